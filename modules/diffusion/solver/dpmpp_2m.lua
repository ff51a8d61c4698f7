--- DPM-Solver++(2M), of second order with one evaluation a step: the clean sample is extrapolated from this step and
-- the one before, in the variable ln(alpha / sigma). Lu et al. 2022, "DPM-Solver++", algorithm 2.
local ty = require "tycho"

local Multistep = {}
Multistep.__index = Multistep

local function new(options)
  return setmetatable(ty.nn.options("solver.dpmpp_2m", options, {}), Multistep)
end

function Multistep:start() return {} end -- luacheck: ignore 212

local function log_ratio(point) return math.log(point.alpha / point.sigma) end

function Multistep:step(prediction, to, _, state) -- luacheck: ignore 212
  local from, x0 = prediction.point, prediction:as "sample"
  local h = log_ratio(to) - log_ratio(from)
  local estimate = x0
  if state.x0 and to.sigma > 0 then -- the last step, to the clean sample, is of first order
    local weight = h / state.h / 2 -- 1 / (2 r)
    estimate = x0 * (1 + weight) - state.x0 * weight
  end
  state.x0, state.h = ty.keep(x0), h
  return prediction.x * (to.sigma / from.sigma) - estimate * (to.alpha * (math.exp(-h) - 1))
end

return new
