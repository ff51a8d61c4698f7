--- Which points of a schedule a sampler visits. A spacing is a function (schedule, steps) that returns steps + 1 points
-- from noise to clean; the functions here make such functions. Any list of times works too: spacing.times { 999, 500, 0
-- }.
--
-- leading, trailing and linspace are those of table 2 in Lin et al. 2024 and of diffusers; karras, exponential, beta
-- and vp choose sigma / alpha (Karras et al. 2022). All take final = "clean" (the last step ends in the clean sample)
-- or "first" (it ends at the schedule's least noise, as the published Stable Diffusion files have it).
local ty = require "tycho"
local betas = require "tycho.diffusion.beta"

local M = {}

local function read(who, options, defaults)
  defaults.final = "clean"
  local o = ty.nn.options("spacing." .. who, options, defaults)
  if o.final ~= "clean" and o.final ~= "first" then
    error(("spacing.%s: final: expected clean or first, got '%s'"):format(who, tostring(o.final)), 3)
  end
  return o
end

local function check_steps(who, schedule, steps)
  if math.type(steps) ~= "integer" or steps < 1 or (schedule.steps and steps > schedule.steps) then
    error(("spacing.%s: steps: expected an integer from 1 to %s, got %s"):format(who, schedule.steps or "any",
      tostring(steps)), 0)
  end
end

local function finish(points, schedule, final)
  if final == "clean" then
    points[#points + 1] = schedule:clean()
  elseif schedule.steps then
    points[#points + 1] = schedule:point(0)
  else
    points[#points + 1] = schedule:point_at((schedule:range()))
  end
  return points
end

-- To the nearest integer, halves to the even one, as NumPy does it.
local function round(x)
  local low = math.floor(x)
  local rest = x - low
  if rest > 0.5 or (rest == 0.5 and low % 2 == 1) then low = low + 1 end
  return low
end

-- A spacing from a function (i, steps, schedule) that gives the i-th time, i from 0.
local function by_time(who, o, time)
  return function(schedule, steps)
    check_steps(who, schedule, steps)
    local points = {}
    for i = 0, steps - 1 do points[i + 1] = schedule:point(time(i, steps, schedule)) end
    return finish(points, schedule, o.final)
  end
end

--- Equal gaps that begin at the noisiest time: the default. With continuous time, the shares 1, 1 - 1 / steps, ...
-- of the way. options: final.
function M.trailing(options)
  return by_time("trailing", read("trailing", options, {}), function(i, steps, schedule)
    if schedule.steps then return round(schedule.steps - i * (schedule.steps / steps)) - 1 end
    return schedule:from_unit(1 - i / steps)
  end)
end

--- Equal whole gaps that end at time `offset`; they do not begin at the noisiest time. options: offset (0), final.
function M.leading(options)
  local o = read("leading", options, { offset = 0 })
  return by_time("leading", o, function(i, steps, schedule)
    if not schedule.steps then error("spacing.leading: schedule: expected a discrete one, got continuous time", 0) end
    return (steps - 1 - i) * (schedule.steps // steps) + o.offset
  end)
end

--- From the noisiest to the least noisy time, both included. options: rounded (true: whole times, for a discrete
-- schedule), last (0.001: the last share of the way, for continuous time), final.
function M.linspace(options)
  local o = read("linspace", options, { rounded = true, last = 0.001 })
  return by_time("linspace", o, function(i, steps, schedule)
    local down = steps > 1 and i / (steps - 1) or 0
    if not schedule.steps then return schedule:from_unit(1 + (o.last - 1) * down) end
    local t = (schedule.steps - 1) * (steps > 1 and (steps - 1 - i) / (steps - 1) or 1)
    return o.rounded and round(t) or t
  end)
end

-- A spacing from a function (share, largest, smallest) of sigma / alpha at a share of the steps, 0 to 1.
local function by_ratio(who, o, at)
  return function(schedule, steps)
    check_steps(who, schedule, steps)
    local smallest, largest = schedule:range()
    smallest, largest = o.min or smallest, o.max or largest
    if not (smallest > 0 and largest > smallest and largest < math.huge) then
      error(("spacing.%s: min, max: expected two numbers with 0 < min < max, got %s and %s"):format(who,
        tostring(smallest), tostring(largest)), 0)
    end
    local points = {}
    for i = 0, steps - 1 do
      points[i + 1] = schedule:point_at(at(steps > 1 and i / (steps - 1) or 0, largest, smallest))
    end
    return finish(points, schedule, o.final)
  end
end

--- Even steps in (sigma / alpha)^(1 / rho). options: rho (7), min and max of sigma / alpha (the schedule's), final.
function M.karras(options)
  local o = read("karras", options, { rho = 7, min = ty.nn.none, max = ty.nn.none })
  local power = 1 / o.rho
  return by_ratio("karras", o, function(share, largest, smallest)
    local high, low = largest ^ power, smallest ^ power
    return (high + share * (low - high)) ^ o.rho
  end)
end

--- Even steps in ln(sigma / alpha), which are also those of the variance-exploding process. options: min, max, final.
function M.exponential(options)
  local o = read("exponential", options, { min = ty.nn.none, max = ty.nn.none })
  return by_ratio("exponential", o, function(share, largest, smallest)
    return math.exp(math.log(largest) + share * (math.log(smallest) - math.log(largest)))
  end)
end

--- sigma / alpha at the quantiles of a beta distribution, which are dense at both ends. Lee et al. 2024. options: a and
-- b of the distribution (0.6), min, max, final.
function M.beta(options)
  local o = read("beta", options, { a = 0.6, b = 0.6, min = ty.nn.none, max = ty.nn.none })
  if not (o.a > 0 and o.b > 0) then
    error(("spacing.beta: a, b: expected two numbers above 0, got %s and %s"):format(tostring(o.a), tostring(o.b)), 2)
  end
  return by_ratio("beta", o, function(share, largest, smallest)
    return smallest + betas.quantile(1 - share, o.a, o.b) * (largest - smallest)
  end)
end

--- The points of the variance-preserving process in continuous time (Song et al. 2021; Karras et al. 2022, table 1):
-- sqrt(exp(beta_d t^2 / 2 + beta_min t) - 1), t from 1 to `last`. options: beta_d (19.9), beta_min (0.1), last (1e-3),
-- final.
function M.vp(options)
  local o = read("vp", options, { beta_d = 19.9, beta_min = 0.1, last = 1e-3 })
  return function(schedule, steps)
    check_steps("vp", schedule, steps)
    local points = {}
    for i = 0, steps - 1 do
      local t = 1 + (steps > 1 and i / (steps - 1) or 0) * (o.last - 1)
      points[i + 1] = schedule:point_at(math.sqrt(math.exp(o.beta_d * t * t / 2 + o.beta_min * t) - 1))
    end
    return finish(points, schedule, o.final)
  end
end

--- These times of the schedule, from noise to clean; the number of steps is that of the list.
---@param times number[]
function M.times(times, options)
  local o = read("times", options, {})
  return function(schedule)
    local points = {}
    for i, t in ipairs(times) do points[i] = schedule:point(t) end
    return finish(points, schedule, o.final)
  end
end

--- These values of sigma / alpha, from noise to clean.
---@param ratios number[]
function M.ratios(ratios, options)
  local o = read("ratios", options, {})
  return function(schedule)
    local points = {}
    for i, r in ipairs(ratios) do points[i] = schedule:point_at(r) end
    return finish(points, schedule, o.final)
  end
end

return M
