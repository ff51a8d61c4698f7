--- DDIM (Song et al. 2021): the clean sample and the noise as predicted, put together anew at the next point. With eta,
-- a share of that noise is replaced by fresh noise: eta 0 is deterministic, eta 1 samples the posterior as DDPM does.
-- On any path, not only on those whose variance is 1.
local ty = require "tycho"

local DDIM = {}
DDIM.__index = DDIM

--- options: eta (0); clipped_noise (true: where the clean sample is cut to its range, the noise follows from what is
-- left; false: it stays as predicted).
local function new(options)
  local self = ty.nn.options("solver.ddim", options, { eta = 0, clipped_noise = true }, { eta = false })
  if type(self.eta) ~= "number" or not (self.eta >= 0 and self.eta <= 1) then
    error("solver.ddim: eta: expected a number within [0, 1], got " .. tostring(self.eta), 2)
  end
  return setmetatable(self, DDIM)
end

function DDIM:step(prediction, to, run)
  local from = prediction.point
  local fresh, rest = 0, to.sigma
  if self.eta > 0 and to.sigma > 0 then
    local share = to.sigma * from.alpha / (to.alpha * from.sigma) -- of the noise that stays
    fresh = self.eta * to.sigma * math.sqrt(math.max(0, 1 - share * share))
    rest = math.sqrt(math.max(0, to.sigma ^ 2 - fresh ^ 2))
  end
  local x0 = prediction:as "sample"
  local e = (not self.clipped_noise and prediction.plain or prediction):as "epsilon"
  local x = x0 * to.alpha + e * rest
  return fresh > 0 and x + run:noise(x) * fresh or x
end

return new
