-- Orders of convergence on a mixture of two Gaussians, whose perfect network and whose path are known: along the flow
-- every sample keeps its quantile, so the exact end follows from the distribution functions at both ends.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

local schedule, solver, spacing = diffusion.schedule, diffusion.solver, diffusion.spacing
local MEANS, SHARES, S = { -0.8, 0.9 }, { 0.35, 0.65 }, 0.4

-- E[x0 | x] at alpha and sigma, for a tensor x.
local function mean(x, alpha, sigma)
  local variance = alpha ^ 2 * S ^ 2 + sigma ^ 2
  local weights, values = {}, {}
  for k, m in ipairs(MEANS) do
    local d = x - alpha * m
    weights[k] = (d * d * (-0.5 / variance)):exp() * SHARES[k]
    values[k] = d * (alpha * S ^ 2 / variance) + m
  end
  return (weights[1] * values[1] + weights[2] * values[2]) / (weights[1] + weights[2])
end

-- Share of the distribution at a point below the number x.
local function share(x, point)
  local deviation, sum = math.sqrt(point.alpha ^ 2 * S ^ 2 + point.sigma ^ 2), 0
  for k, m in ipairs(MEANS) do
    local z = ty.tensor({ (x - point.alpha * m) / deviation / math.sqrt(2) }, { dtype = "f64" }):erf():item()
    sum = sum + SHARES[k] * (1 + z) / 2
  end
  return sum
end

local function exact_end(x, first, last)
  local wanted, low, high = share(x, first), -10.0, 10.0
  for _ = 1, 60 do
    local middle = (low + high) / 2
    if share(middle, last) < wanted then low = middle else high = middle end
  end
  return (low + high) / 2
end

-- The network reads its alpha and sigma from the sampler, so that no rounding of times gets in between.
local function network(kind)
  local point = {}
  local part = { predict = function(_, _, next, x, p)
    point = p
    return next(x, p)
  end }
  return function(x)
    return diffusion.prediction.convert("sample", kind, x, mean(x, point.alpha, point.sigma), point.alpha, point.sigma)
  end, part
end

-- Slope of the error in the number of steps on log-log axes.
local function slope(table_of, kind, method, points, x, counts)
  local errors = {}
  for i, steps in ipairs(counts) do
    local model, part = network(kind)
    local sampler = diffusion.Sampler { schedule = table_of, predict = kind, solver = method, spacing = points,
      steps = steps, parts = { part } }
    local path = sampler:points()
    local y = sampler:sample(model, { 1, 1 }, { x = ty.tensor({ { x } }, { dtype = "f64" }) })
    errors[i] = math.abs(y:item() - exact_end(x, path[1], path[#path]))
  end
  return math.log(errors[1] / errors[2]) / math.log(counts[2] / counts[1]), errors
end

-- Points from a function of the share of the way whose first steps are short: a multistep method begins by steps of a
-- lower order, which must not be what is measured.
local function graded(at)
  return function(s, steps)
    local list = {}
    for i = 0, steps do list[i + 1] = at(s, (i / steps) ^ 2) end
    return list
  end
end

local rows = {
  { "euler", solver.euler(), 1 }, { "ddim", solver.ddim(), 1 }, { "heun", solver.heun(), 2 },
  { "dpm2", solver.dpm2(), 2 }, { "lms of order 2", solver.lms { order = 2 }, 2 },
  { "lms of order 3", solver.lms { order = 3 }, 3 },
  { "lms", solver.lms(), 4, "the error on sigma itself goes through 0" },
  { "dpmpp_2m", solver.dpmpp_2m(), 2 }, { "dpm of order 1", solver.dpm { order = 1 }, 1 },
  { "dpm, heun", solver.dpm { rule = "heun" }, 2 }, { "dpm of noise", solver.dpm { of = "epsilon" }, 2 },
  { "dpm of order 3", solver.dpm { order = 3 }, 3 },
  { "dpm of noise of order 3", solver.dpm { order = 3, of = "epsilon" }, 3 },
  { "dpm_single", solver.dpm_single { lower_final = false }, 2 },
  { "dpm_single of noise, heun", solver.dpm_single { of = "epsilon", rule = "heun", lower_final = false }, 2 },
  { "deis", solver.deis(), 2 }, { "deis of order 3", solver.deis { order = 3 }, 3 },
  { "unipc of order 1", solver.unipc { order = 1, lower_final = false }, 2 },
  { "unipc", solver.unipc { lower_final = false }, 3 },
  { "unipc of noise", solver.unipc { lower_final = false, of = "epsilon", weight = "bh1" }, 3 },
  { "unipc of order 3", solver.unipc { order = 3, lower_final = false }, 4 },
}

local function check_orders(table_of, kind, points, x)
  for _, row in ipairs(rows) do
    if row[4] and kind ~= "flow" then goto next_row end
    local found, errors = slope(table_of, kind, row[2], points, x, { 160, 320 })
    check.ok(found > row[3] - 0.3 and found < row[3] + 0.6,
      ("%s: expected %d, got %.2f"):format(row[1], row[3], found))
    check.ok(errors[2] < 0.02 ^ row[3], row[1])
    ::next_row::
  end
end

check.test("orders, on sigma itself", function()
  local ends = schedule.exploding { sigma_min = 0.05, sigma_max = 20 }
  check_orders(ends, "epsilon", graded(function(s, u) return s:point(20 * (0.05 / 20) ^ u) end), 7.0)
end)

check.test("orders, on a straight path", function()
  check_orders(schedule.flow(), "flow", graded(function(s, u)
    local ratio = math.exp(3 - 5 * u)
    return s:point(ratio / (1 + ratio))
  end), 0.8)
end)

check.test("orders of whole groups of three steps", function()
  for _, o in ipairs { { of = "sample", rule = "heun" }, { of = "epsilon", rule = "heun" }, { of = "epsilon",
    rule = "midpoint" } } do
    o.order, o.lower_final = 3, false
    local found = slope(schedule.flow(), "flow", solver.dpm_single(o), function(s, steps)
      local list = {}
      for i = 0, steps do
        local ratio = math.exp(3 - 5 * i / steps)
        list[i + 1] = s:point(ratio / (1 + ratio))
      end
      return list
    end, 0.8, { 150, 300 })
    check.ok(found > 2.7 and found < 3.6, ("%s, %s: %.2f"):format(o.of, o.rule, found))
  end
end)

check.test("Runge and Kutta begin PNDM better than one step of two evaluations", function()
  local s = schedule.discrete()
  for _, row in ipairs { { false, 2e-3 }, { true, 1e-3 } } do
    local _, errors = slope(s, "epsilon", solver.pndm { runge_kutta = row[1] }, spacing.leading { final = "first",
      offset = 1 }, 0.6, { 25, 100 })
    check.ok(errors[2] < row[2], tostring(errors[2]))
  end
end)

-- One network for all: data at 0.3, from any point that has noise, in any list of times.
check.test("every solver takes any list of times, from points without signal too", function()
  local solvers = { ddim = solver.ddim(), ancestral = solver.ddim { eta = 1 }, ddpm = solver.ddpm(),
    single = solver.dpm_single { order = 3 }, single_of_noise = solver.dpm_single { of = "epsilon" },
    deis = solver.deis { order = 3, lower_final = true }, dpm = solver.dpm { order = 3, lower_final = true },
    of_noise = solver.dpm { of = "epsilon" }, sde = solver.dpm { sde = true },
    sde_of_noise = solver.dpm { of = "epsilon", sde = true }, dpm2 = solver.dpm2(), euler = solver.euler(),
    heun = solver.heun(), lcm = solver.lcm { scaling = false }, lms = solver.lms(), pndm = solver.pndm(),
    runge_kutta = solver.pndm { runge_kutta = true }, unipc = solver.unipc { order = 3 },
    unipc_of_noise = solver.unipc { of = "epsilon" },
    unipc_to_the_end = solver.unipc { order = 3, lower_final = false } }
  local whole = { 999, 998, 600, 599, 123, 7, 0 }
  local lists = { { schedule.flow(), { 1.0, 0.93, 0.4, 0.39, 0.1, 0.003 } }, { schedule.discrete(), whole },
    { schedule.discrete { zero_snr = true }, whole }, { schedule.exploding(), { 80, 70, 3, 2.9, 0.1, 0.01 } },
    { schedule.flow(), { 0.5 } }, { schedule.flow(), { 1.0 } }, { schedule.flow(), { 1.0, 0.5 } } }
  for name, method in pairs(solvers) do
    for i, list in ipairs(lists) do
      for _, kind in ipairs { "flow", "v", "sample" } do
        local point
        local part = { predict = function(_, _, next, x, p)
          point = p
          return next(x, p)
        end }
        local model = function(x)
          return diffusion.prediction.convert("sample", kind, x, ty.full_like(x, 0.3), point.alpha, point.sigma)
        end
        local y = diffusion.Sampler { schedule = list[1], predict = kind, solver = method, parts = { part } }
          :sample(model, { 2, 3 }, { points = spacing.times(list[2])(list[1]), seeds = { 1, 2 } })
        -- They end where the data is; multistep methods on the noise may be anywhere after steps as long as these.
        check.ok(y:isfinite():all():item(), ("%s, list %d, %s"):format(name, i, kind))
        if not name:find "of_noise" and name ~= "deis" and name ~= "runge_kutta" then
          check.close(y:flatten():tolist(), { 0.3, 0.3, 0.3, 0.3, 0.3, 0.3 }, 2e-3,
            ("%s, list %d, %s"):format(name, i, kind))
        end
      end
    end
  end
end)

check.finish()
