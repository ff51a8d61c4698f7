-- Guidance that ends by itself, and null predictions that are estimated.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local known = dofile(here .. "closed_form.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

local guidance, flow = diffusion.guidance, diffusion.schedule.flow()

-- Predicted noise is x and an offset by the condition that falls with the time, so that the branches become alike; how
-- fast, the label says.
local model = known.model(function(x, t, c)
  local strength = (t / 1000):reshape(-1, 1) ^ (c.labels:to("f32"):reshape(-1, 1) + 1)
  local null = c.labels:eq(10):to("f32"):reshape(-1, 1)
  return x * 0.3 + ty.arange(4):to("f32"):sin() * strength * (1 - null) * 2
end, 10)

local function sample(how, options)
  local sampler = diffusion.Sampler { schedule = flow, predict = "flow", guidance = how, steps = 12,
    solver = options and options.solver or diffusion.solver.euler(), parts = options and options.parts }
  local labels = options and options.labels or { 0, 3, 8 }
  return sampler:sample(model, { #labels, 4 }, { condition = { labels = ty.tensor(labels) },
    seeds = options and options.seeds or { 1, 2, 3 }, branches = options and options.branches,
    null = options and options.null })
end

check.test("a threshold above 1 is classifier-free guidance, bit for bit", function()
  for _, solver in ipairs { diffusion.solver.euler(), diffusion.solver.heun(), diffusion.solver.dpmpp_2m() } do
    local full, run = sample(3, { solver = solver })
    local x, adaptive = sample(guidance.adaptive { scale = 3, threshold = 1.1 }, { solver = solver })
    check.equal(x:tolist(), full:tolist())
    check.equal(adaptive.evaluations, run.evaluations)
  end
end)

check.test("each sample ends by itself, and does not depend on the others", function()
  local how = guidance.adaptive { scale = 3, threshold = 0.9 }
  local x, run = sample(how)
  local cosines, ended = guidance.trace(how, run)
  check.equal(#cosines, 3)
  local guided = 0
  for i = 1, 3 do
    check.equal(#cosines[i], ended[i] or 12, "a cosine for each guided step")
    guided = guided + #cosines[i]
    for step, value in ipairs(cosines[i]) do
      check.equal(value >= 0.9, step == ended[i], "the first step at the threshold is the last that is guided")
    end
  end
  check.equal(ended[1] ~= ended[3], true, "by their conditions")
  check.equal(run.evaluations, { condition = 36, null = guided })
  for i, label in ipairs { 0, 3, 8 } do
    local alone = sample(how, { labels = { label }, seeds = { i } })
    check.close(alone:tolist(), x:narrow(0, i - 1, 1):tolist(), 1e-6)
  end
end)

-- Euler's steps of a flow from 1 to 0: at the time t the clean sample is x - t v.
check.test("the cosine of the clean samples that follow", function()
  local how = guidance.adaptive { scale = 3, threshold = 2, of = "sample" }
  local states, times = {}, {}
  local _, run = sample(how, { parts = { { predict = function(_, _, next, x, point)
    states[#states + 1], times[#times + 1] = x, point.sigma
    return next(x, point)
  end } } })
  local cosines = guidance.trace(how, run)
  for step, x in ipairs(states) do
    local t = ty.full({ 3 }, times[step] * 1000)
    local function clean(labels) return x - model(x, t, { labels = ty.tensor(labels) }) * times[step] end
    local want = ty.nn.cosine_similarity(clean { 0, 3, 8 }, clean { 10, 10, 10 }):tolist()
    for i = 1, 3 do check.close(cosines[i][step], want[i], 1e-5) end
  end
  -- With some samples ended, the others are seen with their own states.
  local x = sample(guidance.adaptive { scale = 3, threshold = 0.9, of = "sample" })
  for i, label in ipairs { 0, 3, 8 } do
    local alone = sample(guidance.adaptive { scale = 3, threshold = 0.9, of = "sample" }, { labels = { label },
      seeds = { i } })
    check.close(alone:tolist(), x:narrow(0, i - 1, 1):tolist(), 1e-6)
  end
  check.equal(ty.allclose(x, (sample(guidance.adaptive { scale = 3, threshold = 0.9 }))), false)
end)

check.test("a negative prompt takes the null condition's place", function()
  local negative = { labels = ty.tensor { 5, 5, 5 } }
  local full = sample(3, { null = negative })
  local x = sample(guidance.adaptive { scale = 3, threshold = 1.1 }, { null = negative })
  check.equal(x:tolist(), full:tolist())
  check.equal(ty.allclose(full, (sample(3))), false)
end)

check.test("planted coefficients are recovered", function()
  -- The null prediction of step 3 is 0.5 c(3) + 0.25 n(1) - 0.75 c(2) by the network itself; features are random.
  ty.manual_seed(1)
  local c, n = {}, {}
  for step = 1, 4 do c[step], n[step] = ty.randn(64, 4), ty.randn(64, 4) end
  n[3] = c[3] * 0.5 + n[1] * 0.25 - c[2] * 0.75
  local planted = known.model(function(x, _, condition)
    local step = condition.step[1]
    return condition.null and n[step] or c[step]
  end)
  local record = guidance.recorder { scale = 2 }
  local run = { state = {}, kind = "epsilon", step = 0, evaluate = function(self, x)
    return { condition = planted(x, nil, { step = { self.step } }),
      null = planted(x, nil, { step = { self.step }, null = true }) }
  end }
  for step = 1, 4 do
    run.step = step
    local y = record:guide(run, ty.zeros(64, 4), flow:point(1 - step / 5))
    check.close(y:tolist(), (n[step] + (c[step] - n[step]) * 2):tolist(), 1e-6)
  end
  local form = record:fit({ 3 })[3]
  check.close({ form.condition[1], form.condition[2], form.condition[3] }, { 0, -0.75, 0.5 }, 1e-5)
  check.close({ form.null[1], form.null[2] }, { 0.25, 0 }, 1e-5)
  check.fails(function() record:fit { 1 } end, "fit: replaced: expected steps from 2 to 4, got 1")
  check.fails(function() guidance.recorder():fit { 2 } end, "expected a sampler to have run")
end)

check.test("LinearAG: no forms is full guidance; forms save null evaluations and stay near", function()
  local record = guidance.recorder { scale = 3 }
  local full, run = sample(record)
  check.equal(full:tolist(), (sample(3)):tolist())
  local none, of_none = sample(guidance.linear { scale = 3, forms = {} })
  check.equal(none:tolist(), full:tolist())
  check.equal(of_none.evaluations, run.evaluations)
  local x, linear = sample(guidance.linear { scale = 3, forms = record:fit { 3, 5 } })
  check.equal(linear.evaluations, { condition = 36, null = 30 })
  check.close(x:tolist(), full:tolist(), 1e-2)
  local cut, of_cut = sample(guidance.linear { scale = 3, forms = {}, threshold = 0.9 })
  check.equal(of_cut.evaluations.null < 36 and #cut:tolist(), 3)
  check.fails(function() guidance.linear { scale = 3 } end, "guidance.linear: forms: expected")
end)

check.test("wrong arguments", function()
  check.fails(function() guidance.adaptive { scale = "3" } end, "guidance.adaptive: scale: expected a number")
  check.fails(function() guidance.adaptive { of = "noise" } end, 'guidance.adaptive: of: expected "output" or "sample"')
  check.fails(function() guidance.trace(guidance.adaptive(), {}) end, "guidance.trace: run: expected a run")
end)

check.finish()
