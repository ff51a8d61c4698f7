-- DualFast: its step by a formula, what leaves the path alone, and where its two kinds end as steps get shorter.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"
local closed_form = dofile(here .. "closed_form.lua")

local schedule, solver, spacing = diffusion.schedule, diffusion.solver, diffusion.spacing
local flow = schedule.flow()

-- Points of a straight path, equal in ln(alpha / sigma), that end before the clean sample.
local function points(steps)
  local list = {}
  for i = 0, steps do
    local ratio = math.exp(2.5 - 5 * i / steps)
    list[i + 1] = flow:point(ratio / (1 + ratio))
  end
  return list
end

-- The end of a path from x at the first point, f64. model: reads x alone, or is a network of closed_form.
local function path(model, method, steps, more)
  local o = { schedule = flow, predict = "flow", solver = method }
  for key, value in pairs(more or {}) do o[key] = value end
  local x = ty.tensor({ { 0.9 }, { -0.3 }, { 1.7 } }, { dtype = "f64" })
  return diffusion.Sampler(o):sample(model, { 3, 1 }, { x = x, points = points(steps) }):flatten():tolist()
end

local gaussian = closed_form.gaussian(flow, "flow", 0.5, 0.4)
local bases = { ddim = solver.ddim(), dpm = solver.dpm { of = "epsilon" }, dpmpp = solver.dpmpp_2m(),
  unipc = solver.unipc(), euler = solver.euler() }

check.test("c = 0 gives the bits of the solver", function()
  for name, base in pairs(bases) do
    for _, from in ipairs { "first", "previous" } do
      check.equal(path(gaussian, solver.dualfast { base = base, c = 0, from = from }, 7), path(gaussian, base, 7), name)
      check.equal(path(gaussian, solver.dualfast { base = base, c = function() return 0 end }, 7),
        path(gaussian, base, 7), name)
    end
  end
  check.equal(path(gaussian, solver.dualfast(), 1), path(gaussian, solver.dpmpp_2m(), 1), "one step has none before")
end)

check.test("noise that stays the same stays the path, for any c", function()
  -- x = alpha x0 + sigma e with x0 = 0.2: e follows from x, and is the same all along.
  local model = closed_form.point(flow, "flow", 0.2)
  for name, base in pairs(bases) do
    for _, from in ipairs { "first", "previous" } do
      local method = solver.dualfast { base = base, c = 0.8, from = from }
      check.close(path(model, method, 5), path(model, base, 5), 1e-5, name)
    end
  end
end)

check.test("steps by the formula", function()
  -- DDIM on plain numbers: x0 = 0.4 + s(x - alpha 0.4) for the Gaussian, e from it, mixed, and put together anew.
  local function by_hand(x, c, from, steps)
    local list, first, before = points(steps), nil, nil
    for i = 1, steps do
      local p, q = list[i], list[i + 1]
      local x0 = 0.4 + (x - p.alpha * 0.4) * p.alpha * 0.25 / (p.alpha ^ 2 * 0.25 + p.sigma ^ 2)
      local e = (x - p.alpha * x0) / p.sigma
      local earlier = from == "first" and first or before
      local w = type(c) == "function" and c(i, steps) or c * (steps - i) / (steps - 1)
      local mixed = earlier and (1 + w) * e - w * earlier or e
      first, before = first or e, e
      -- Equation 3 of the exponential integrator: alpha_t / alpha_s x - sigma_t (e^h - 1) e
      local h = math.log(q.alpha / q.sigma) - math.log(p.alpha / p.sigma)
      x = q.alpha / p.alpha * x - q.sigma * (math.exp(h) - 1) * mixed
    end
    return x
  end
  for _, from in ipairs { "first", "previous" } do
    for _, c in ipairs { 0.5, -0.3, function(i, n) return i / n end } do
      local wanted = { by_hand(0.9, c, from, 6), by_hand(-0.3, c, from, 6), by_hand(1.7, c, from, 6) }
      local method = solver.dualfast { base = solver.ddim(), c = c, from = from }
      -- The network is told its time in single precision.
      check.close(path(gaussian, method, 6), wanted, 1e-5, from)
      check.ok(math.abs(wanted[3] - by_hand(1.7, 0, from, 6)) > 1e-3)
    end
  end
end)

check.test("the step before keeps the limit, the first step changes it", function()
  -- Along the flow a Gaussian's sample keeps its distance from the mean in standard deviations.
  local list = points(1)
  local function exact(x)
    local function deviation(p) return math.sqrt(p.alpha ^ 2 * 0.25 + p.sigma ^ 2) end
    return list[2].alpha * 0.4 + (x - list[1].alpha * 0.4) * deviation(list[2]) / deviation(list[1])
  end
  local function errors(from)
    local all = {}
    for i, steps in ipairs { 25, 50, 400, 800 } do
      all[i] = math.abs(path(gaussian, solver.dualfast { base = solver.ddim(), from = from }, steps)[3] - exact(1.7))
    end
    return all
  end
  local near, far = errors "previous", errors "first"
  check.ok(near[3] < 2e-3 and near[2] < 0.65 * near[1] and near[2] > 0.35 * near[1], "first order")
check.ok(far[3] > 0.04 and far[4] > 0.04 and math.abs(far[4] - far[3]) < 3e-3, "another limit")
end)

check.test("the clean sample is cut after mixing too", function()
  local most = 0
  local method = { step = function(_, prediction, to, run, state)
    most = math.max(most, prediction:as("sample"):abs():max():item())
    return solver.ddim():step(prediction, to, run, state)
  end }
  path(gaussian, solver.dualfast { base = method, c = 3 }, 5)
  check.ok(most > 0.45)
  most = 0
  path(gaussian, solver.dualfast { base = method, c = 3 }, 5, { clip = 0.3 })
  check.ok(most <= 0.3 + 1e-12)
end)

check.test("it takes steps from where there is no signal, and to the clean sample", function()
  for _, base in pairs(bases) do
    for _, from in ipairs { "first", "previous" } do
      local s = diffusion.Sampler { schedule = flow, predict = "flow", solver = solver.dualfast { base = base,
        from = from }, spacing = spacing.trailing(), steps = 4 }
      check.ok(s:sample(gaussian, { 2, 1 }, { seeds = { 1, 2 } }):isfinite():all():item())
    end
  end
end)

check.test("wrong arguments", function()
  check.fails(function() solver.dualfast { base = 3 } end, "solver.dualfast: base: expected a table")
  check.fails(function() solver.dualfast { base = {} } end, "base: expected a value of diffusion.solver")
  check.fails(function() solver.dualfast { c = "much" } end, "c: expected a finite number or a function, got much")
  check.fails(function() solver.dualfast { c = 0 / 0 } end, "c: expected a finite number")
  check.fails(function() solver.dualfast { from = "last" } end, 'expected "first" or "previous"')
end)

check.finish()
