--- Ancestral sampling: a draw from q(x_s | x_t, x0) with the predicted clean sample in the place of x0. Ho et al. 2020,
-- equations 6 and 7, on any path.
local ty = require "tycho"

local DDPM = {}
DDPM.__index = DDPM

--- options: variance ("small": that of the posterior; "large": that of the step forward, the other of the two choices
-- of Ho et al. 2020).
local function new(options)
  local self = ty.nn.options("solver.ddpm", options, { variance = "small" })
  if self.variance ~= "small" and self.variance ~= "large" then
    error(("solver.ddpm: variance: expected small or large, got '%s'"):format(tostring(self.variance)), 2)
  end
  return setmetatable(self, DDPM)
end

function DDPM:step(prediction, to, run)
  local from = prediction.point
  local decay = from.alpha / to.alpha -- of the signal, in the step from `to` to `from`
  local forward = from.sigma ^ 2 - decay ^ 2 * to.sigma ^ 2 -- variance that this step adds
  local kept = to.sigma ^ 2 / from.sigma ^ 2
  local x = prediction:as "sample" * (to.alpha * forward / from.sigma ^ 2) + prediction.x * (decay * kept)
  if to.sigma == 0 then return x end
  local variance = self.variance == "small" and forward * kept or forward
  return x + run:noise(x) * math.sqrt(math.max(0, variance))
end

return new
