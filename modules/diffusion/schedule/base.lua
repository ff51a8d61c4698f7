--- What all schedules have in common. A schedule says how much of the clean sample and how much noise there is at a
-- time t of its own: x = alpha(t) x0 + sigma(t) e. Times count from the clean end.
--
-- A family (discrete.lua, flow.lua, exploding.lua) has
--
--     coefficients(t)     alpha, sigma: numbers for a number, tensors [n] for a tensor [n]
--     time_at(ratio)      the time at which sigma / alpha is `ratio`
--     from_unit(u)        the time at the share u of the way from clean (0) to noise (1): numbers and tensors
--     draw(n, device)     n times spread evenly, for training: a tensor [n]
--     network_time(t)     what the network is given as its t: numbers and tensors
--     range()             smallest and largest sigma / alpha that sampling visits
--     steps               the number of times of a table; nil where time is continuous
--     frame               "noise" or "flow": where a solver integrates, see tycho.diffusion.solver.frame
--     noise_scale(point)  standard deviation of x where sampling begins (1)
--
-- and what is below. Where it says otherwise there, a family does better than the general formula.
local Schedule = {}
Schedule.__index = Schedule

---@class Point
---@field t number      the schedule's time; nil at the clean end of a table
---@field alpha number
---@field sigma number
---@field time number   what the network is given

--- A new family of schedules: a class whose instances have the methods here.
function Schedule.family()
  local class = setmetatable({}, Schedule)
  class.__index = class
  return class
end

--- Everything about one time, as numbers.
---@param t number
---@return Point
function Schedule:point(t)
  local alpha, sigma = self:coefficients(t)
  return { t = t, alpha = alpha, sigma = sigma, time = self:network_time(t) }
end

--- The point at which sigma / alpha is `ratio` (EDM's and k-diffusion's sigma).
---@param ratio number
---@return Point
function Schedule:point_at(ratio) return self:point(self:time_at(ratio)) end

--- The end of the path: the clean sample itself.
---@return Point
function Schedule:clean() return self:point(0) end

--- alpha x0 + sigma e, for coefficients that broadcast to x0.
---@param x0 Tensor
---@param e Tensor
---@param alpha number|Tensor
---@param sigma number|Tensor
---@return Tensor
function Schedule:mix(x0, e, alpha, sigma) return alpha * x0 + sigma * e end -- luacheck: ignore 212

--- Standard deviation of x where sampling begins, for standard noise to be scaled with.
---@return number
function Schedule:noise_scale() return 1 end -- luacheck: ignore 212

return Schedule
