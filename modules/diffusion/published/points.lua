--- The points that schedulers of diffusers visit, by what their configs say, with their own ways of rounding.
local betas = require "tycho.diffusion.beta"

local M = {}

--- To the nearest integer, halves to the even one, as NumPy does it.
---@param x number
---@return integer
function M.round(x)
  local low = math.floor(x)
  local rest = x - low
  return (rest > 0.5 or rest == 0.5 and low % 2 == 1) and low + 1 or low
end
local round = M.round

-- The whole part of a time. Those at the end of a table come out a little below it there, by rounding, and are cut off;
-- on a straight path they are not.
local function whole_part(t, below) return math.max(0, math.floor(below and t - 1e-4 or t + 1e-4)) end

-- ---- values between two, from the larger to the smaller: functions (share of the steps, high, low) ----

local curves = {}
M.curves = curves

function curves.karras(share, high, low, rho) -- Karras et al. 2022, equation 5
  rho = rho or 7
  return (high ^ (1 / rho) + share * (low ^ (1 / rho) - high ^ (1 / rho))) ^ rho
end

function curves.exponential(share, high, low) return math.exp(math.log(high) + share * math.log(low / high)) end
curves.lu = curves.exponential -- Lu et al. 2022, with the exponent 1 that diffusers sets

function curves.beta(share, high, low) return low + betas.quantile(1 - share, 0.6, 0.6) * (high - low) end

local function values_of(curve, steps, high, low, rho)
  local list = {}
  for i = 1, steps do list[i] = curves[curve](steps > 1 and (i - 1) / (steps - 1) or 0, high, low, rho) end
  return list
end

-- ---- times of a table ----

-- (steps, i from 0, number of times in the table, options) -> time
local grids = {}

function grids.leading(steps, i, count, o) return (steps - 1 - i) * (count // steps) + o.offset end
function grids.trailing(steps, i, count) return round(count - i * (count / steps)) - 1 end
function grids.linspace(steps, i, count, o)
  local t = steps > 1 and (steps - 1 - i) * ((count - 1) / (steps - 1)) or count - 1
  return o.fine and t or round(t)
end

-- Of classes that leave the last of steps + 1 times out; `last`: how many times of the table are in use.
local ahead = { trailing = function(steps, i, count, _, last) return round(last - i * (count / steps)) - 1 end }
function ahead.leading(steps, i, _, o, last) return (steps - i) * (last // (steps + 1)) + o.offset end
function ahead.linspace(steps, i, _, _, last) return round((steps - i) * ((last - 1) / steps)) end

-- Of a consistency model, some of the times that it was distilled at.
local function distilled(steps, i, count, o)
  return (o.original - i * o.original // steps) * (count // o.original) - 1
end

-- How many times have a ln(alpha / sigma) of at least `least`.
local function times_above(schedule, least)
  local last = schedule.steps
  while last > 1 do
    local p = schedule:point(last - 1)
    if math.log(p.alpha / p.sigma) >= least then break end
    last = last - 1
  end
  return last
end

--- A spacing of a table. o: spacing ("leading", "trailing", "linspace"), offset; fine (times need not be whole), ahead,
-- original (of a consistency model), least (of ln(alpha / sigma)); curve (of sigma / alpha: "karras", "exponential",
-- "beta", "lu"), low and high (its ends: those of the times; all: of the table), cut ("round" or "floor": what is done
-- to times of a curve); final ("clean" or "first"); log_times (the network is told ln(sigma / alpha) / 4).
---@param o table
---@return fun(schedule: table, steps: integer): Point[]
function M.discrete(o)
  local grid = o.original and distilled or (o.ahead and ahead or grids)[o.spacing]
  return function(schedule, steps)
    local count = schedule.steps
    local most = o.original or count
    if math.type(steps) ~= "integer" or steps < 1 or steps > most then
      error(("diffusion.published: steps: expected an integer from 1 to %d, got %s"):format(most, tostring(steps)), 0)
    end
    local last = o.least and times_above(schedule, o.least) or count
    local points = {}
    for i = 0, steps - 1 do
      points[i + 1] = schedule:point(math.max(0, math.min(count - 1, grid(steps, i, count, o, last))))
    end
    if o.curve then
      local function ratio(p) return p.sigma / p.alpha end
      local low, high = schedule:range()
      if not o.all then low, high = ratio(points[steps]), ratio(points[1]) end
      for i, value in ipairs(values_of(o.curve, steps, o.high or high, o.low or low)) do
        local p = schedule:point_at(value)
        if o.cut then p.time = o.cut == "round" and round(p.time) or whole_part(p.time, true) end
        points[i] = p
      end
    end
    if o.log_times then
      for _, p in ipairs(points) do p.time = math.log(p.sigma / p.alpha) / 4 end
    end
    points[steps + 1] = o.final == "first" and schedule:point(0) or schedule:clean()
    return points
  end
end

--- A spacing of a straight path, whose shift is the schedule's. o: count (the times trained with); twice (the least
-- time is shifted for its table and once more with all others, as flow matching's classes do); kind ("ends": both in;
-- "ahead": without the last of steps + 1; "noise": ahead, counted from the clean end), terminal (the last time is moved
-- there, the others in proportion), curve, cut, final ("clean" or "last": the last time again).
---@param o table
---@return fun(schedule: table, steps: integer): Point[]
function M.flow(o)
  return function(schedule, steps)
    if math.type(steps) ~= "integer" or steps < 1 then
      error(("diffusion.published: steps: expected an integer >= 1, got %s"):format(tostring(steps)), 0)
    end
    local times, least = {}, 1 / o.count
    if o.twice then least = schedule:from_unit(least) end
    for i = 0, steps - 1 do
      local share = o.kind == "ends" and (steps > 1 and i / (steps - 1) or 0) or i / steps
      local u = 1 + (least - 1) * share
      if o.kind == "noise" then u = (1 - least) * (1 - share) end
      times[i + 1] = schedule:from_unit(u)
    end
    if o.terminal then
      local scale = (1 - times[steps]) / (1 - o.terminal)
      for i, t in ipairs(times) do times[i] = 1 - (1 - t) / scale end
    end
    if o.curve then times = values_of(o.curve, steps, times[1], times[steps]) end
    if o.kind == "ahead" and times[1] > 1 - 1e-6 then times[1] = 1 - 1e-6 end -- no signal, no logarithm
    local points = {}
    for i, t in ipairs(times) do
      points[i] = schedule:point(t)
      if o.cut then points[i].time = whole_part(points[i].time) end
    end
    points[steps + 1] = o.final == "last" and schedule:point(times[steps]) or schedule:clean()
    return points
  end
end

--- A spacing in sigma itself. o: curve, rho, final ("clean" or "first").
---@param o table
---@return fun(schedule: table, steps: integer): Point[]
function M.exploding(o)
  return function(schedule, steps)
    if math.type(steps) ~= "integer" or steps < 1 then
      error(("diffusion.published: steps: expected an integer >= 1, got %s"):format(tostring(steps)), 0)
    end
    local low, high = schedule:range()
    local points = {}
    for i, sigma in ipairs(values_of(o.curve, steps, high, low, o.rho)) do points[i] = schedule:point(sigma) end
    points[steps + 1] = o.final == "first" and schedule:point(low) or schedule:clean()
    return points
  end
end

return M
