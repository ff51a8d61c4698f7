-- The loop: parts around its stages, memory, recordings of the network.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local known = dofile(here .. "closed_form.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

local solver = diffusion.solver
local flow = diffusion.schedule.flow()
local model = known.gaussian(flow, "flow", 0.5)

local function sample(options, given)
  local o = { schedule = flow, predict = "flow", solver = solver.heun(), steps = 6 }
  for key, value in pairs(options or {}) do o[key] = value end
  local network = o.model or model
  o.model = nil
  local what = { noise = ty.ones(4, 1) }
  for key, value in pairs(given or {}) do what[key] = value end
  return diffusion.Sampler(o):sample(network, what.noise.shape, what)
end

check.test("parts stand around the stages, the first outermost", function()
  local log = {}
  local function part(name)
    local p = {}
    function p:start(run) -- luacheck: ignore 212
      log[#log + 1] = name .. " starts with " .. #run.points - 1
      return { count = 0 }
    end
    function p:call(run, next, request)
      run.state[self].count = run.state[self].count + 1
      log[#log + 1] = name .. " call " .. table.concat(request.branches, "+")
      return next(request)
    end
    function p:predict(_, next, x, point) -- luacheck: ignore 212
      log[#log + 1] = name .. " predict"
      return next(x, point)
    end
    function p:advance(_, next, prediction, to) -- luacheck: ignore 212
      log[#log + 1] = name .. " advance"
      return next(prediction, to)
    end
    function p:finish(run) log[#log + 1] = name .. " calls: " .. run.state[self].count end
    return p
  end
  local plain, first = sample { steps = 2 }
  local x, run = sample { steps = 2, parts = { part "a", part "b" } }
  check.equal(log, { "a starts with 2", "b starts with 2",
    "a predict", "b predict", "a call condition", "b call condition", "a advance", "b advance",
    "a predict", "b predict", "a call condition", "b call condition", -- Heun's second evaluation
    "a predict", "b predict", "a call condition", "b call condition", "a advance", "b advance",
    "a calls: 3", "b calls: 3" })
  check.equal(x:tolist(), plain:tolist(), "parts that change nothing")
  check.equal({ run.calls, first.calls, run.evaluations.condition }, { 3, 3, 12 })
end)

check.test("a cache in the place of calls", function()
  -- Every second call is answered by the output before it.
  local cache = {}
  function cache:call(run, next, request)
    local state = run.state[self]
    state.turn = not state.turn
    if state.turn then state.output = ty.keep(next(request)) end
    return state.output
  end
  local constant = known.model(function(x) return ty.full_like(x, 0.3) end)
  local x, run = sample { model = constant, solver = solver.euler(), steps = 8, parts = { cache } }
  check.equal(run.calls, 4)
  check.close(x:flatten():tolist(), { 0.7, 0.7, 0.7, 0.7 }, 1e-6, "exact where nothing changes")
  local again, second = sample { model = constant, solver = solver.euler(), steps = 8, parts = { cache } }
  check.equal({ again:tolist(), second.calls }, { x:tolist(), 4 }, "each run has a state of its own")
end)

check.test("a prediction in the place of another", function()
  local towards = {}
  function towards:predict(_, next, x, point) -- luacheck: ignore 212
    return next(x, point):with_sample(ty.full_like(x, 0.9))
  end
  check.close(sample({ parts = { towards } }):flatten():tolist(), { 0.9, 0.9, 0.9, 0.9 }, 1e-6)
  local cut = sample { clip = 0.2, model = known.point(flow, "flow", 0.7) }
  check.close(cut:flatten():tolist(), { 0.2, 0.2, 0.2, 0.2 }, 1e-6, "clip")
  local own = sample { clip = function(x0, p) return x0 * 0 + p.t end, solver = solver.ddim(), steps = 4 }
  check.close(own:flatten():tolist(), { 0.25, 0.25, 0.25, 0.25 }, 1e-6, "a function of the clean sample and the point")
end)

check.test("a step that changes the size, and the points to come", function()
  local grow = {}
  function grow:advance(run, next, prediction, to) -- luacheck: ignore 212
    local x = next(prediction, to)
    if run.step ~= 2 then return x end
    run.points = { run.points[1], run.points[2], to, flow:point(0.3), flow:clean() }
    return ty.interpolate(x, { scale = 2 })
  end
  local picture = known.model(function(x) return ty.full_like(x, 0.5) end)
  local steps = {}
  local x, run = sample({ model = picture, parts = { grow }, solver = solver.euler(), steps = 8 },
    { noise = ty.ones(1, 1, 2, 2), on_step = function(i, y) steps[i] = y.shape[3] end })
  check.equal({ x.shape, run.calls, steps }, { { 1, 1, 4, 4 }, 4, { 2, 4, 4, 4 } })
  check.close(x:flatten():tolist()[7], 0.5, 1e-6)
end)

check.test("a sample's noise depends on its own seed: alone, in a batch, in another place", function()
  local table_of = diffusion.schedule.discrete()
  local perfect = known.gaussian(table_of, "epsilon", 0.5)
  for name, method in pairs { ancestral = solver.ddim { eta = 1 }, sde = solver.dpm { sde = true } } do
    local sampler = diffusion.Sampler { schedule = table_of, solver = method, steps = 6 }
    local state = ty.rng_state()
    local both = sampler:sample(perfect, { 3, 2 }, { seeds = { 7, 8, 7 } })
    check.equal(ty.rng_state(), state) -- the generator is left as it was
    local alone = sampler:sample(perfect, { 1, 2 }, { seeds = { 8 } })
    check.equal(both:narrow(0, 1, 1):tolist(), alone:tolist(), name)
    check.equal(both:narrow(0, 0, 1):tolist(), both:narrow(0, 2, 1):tolist(), name)
    check.ok(both:narrow(0, 0, 1):ne(alone):all():item(), name)
    local draws = {}
    sampler:sample(perfect, { 1, 2 }, { fresh = function(draw, x)
      draws[#draws + 1] = draw
      return ty.zeros_like(x)
    end })
    check.equal(draws, { 1, 2, 3, 4, 5 })
  end
  check.fails(function() sample({}, { seeds = { 1 } }) end,
    "Sampler.sample: seeds: expected 4, one for each sample, got 1")
end)

check.test("a run that is ended early", function()
  local x, run = sample({ steps = 6 }, { on_step = function(i) return i < 2 end })
  check.equal({ run.step, x.shape }, { 2, { 4, 1 } })
end)

check.test("a start in the middle: a picture with noise", function()
  local x0 = ty.full({ 4, 1 }, 0.5)
  local points = diffusion.spacing.times { 0.4, 0.2 } (flow)
  local x, run = sample({ model = known.point(flow, "flow", 0.5) },
    { x = flow:mix(x0, ty.randn_like(x0), points[1].alpha, points[1].sigma), points = points })
  check.close(x:tolist(), x0:tolist(), 1e-5)
  check.equal(run.step, 2)
end)

check.test("memory stays flat over steps", function()
  for name, s in pairs { heun = solver.heun(), dpmpp_2m = solver.dpmpp_2m() } do
    local live = {}
    sample({ solver = s, steps = 52 }, { noise = ty.ones(1000, 1), on_step = function(i)
      collectgarbage() collectgarbage()
      live[i] = ty.memory.stats().live
    end })
    check.equal(live[50], live[3], name)
  end
end)

check.test("a recorded network gives the same numbers", function()
  ty.manual_seed(5)
  local unet = diffusion.UNet { levels = { 8, { channels = 16, attention = true } }, classes = 4, context = 6 }:eval()
  ty.no_grad(function()
    for _, p in ipairs(unet:parameters()) do p:add_(ty.randn_like(p) * 0.05) end
  end)
  local text = { embeddings = ty.randn(3, 5, 6), mask = ty.ones(3, 5):to "bool" }
  local given = { noise = ty.randn(3, 1, 8, 8), condition = { labels = ty.tensor { 0, 1, 2 }, text = text },
    null = { text = { embeddings = ty.zeros(1, 5, 6), mask = ty.ones(1, 5):to "bool" } } }
  for scale = 1, 3 do
    local plain = sample({ model = unet, guidance = scale }, given)
    local fast = diffusion.compiled(unet)
    for _ = 1, 2 do
      local x = sample({ model = fast, guidance = scale }, given)
      check.equal((x - plain):abs():max():item(), 0.0, "scale " .. scale)
    end
  end
  given = { noise = given.noise, condition = { labels = ty.tensor { 0, 1, 2 } } }
  check.fails(function() sample({ model = unet }, given) end,
    "UNet: condition.text.embeddings: expected [3, tokens, 6], got nil")
end)

check.test("wrong arguments", function()
  check.fails(function() diffusion.Sampler {} end, "Sampler: schedule: expected a schedule such as")
  check.fails(function() diffusion.Sampler { schedule = flow, clip = "yes" } end, "Sampler: clip: expected false, a")
  check.fails(function() diffusion.Sampler { schedule = flow, spacing = 3 } end, "Sampler: spacing: expected a")
  check.fails(function() diffusion.Sampler { schedule = flow, predict = "noise" } end, "Sampler: predict: expected one")
  check.fails(function() sample({}, { condition = ty.tensor { 1 } }) end, "Sampler.sample: condition: expected a table")
  check.fails(function() sample({}, { label = 1 }) end, "Sampler.sample: no option 'label'")
end)

check.finish()
