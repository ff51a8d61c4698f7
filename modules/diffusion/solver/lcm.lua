--- Sampling by a consistency model (Song et al. 2023, algorithm 1; Luo et al. 2023, "Latent Consistency Models"): the
-- clean sample as predicted, with fresh noise at the next point. The prediction is made to be x itself at the clean
-- end: c_skip x + c_out x0, with c_skip = d^2 / (s^2 + d^2), c_out = s / sqrt(s^2 + d^2), s = scaling times the
-- network's time. scaling = false: the prediction as it is, which samples any flow or diffusion with fresh noise in
-- each step.
local ty = require "tycho"

local LCM = {}
LCM.__index = LCM

--- options: scaling (10), data (0.5: the d above).
local function new(options)
  local self = ty.nn.options("solver.lcm", options, { scaling = 10, data = 0.5 },
    { scaling = "a finite number > 0 or a boolean", data = "a finite number > 0" })
  if self.scaling == true then self.scaling = 10 end
  return setmetatable(self, LCM)
end

function LCM:step(prediction, to, run)
  local x0 = prediction:as "sample"
  if self.scaling then
    local s = self.scaling * prediction.point.time
    local power = s ^ 2 + self.data ^ 2
    x0 = x0 * (s / math.sqrt(power)) + prediction.x * (self.data ^ 2 / power)
  end
  if to.sigma == 0 then return x0 end
  return x0 * to.alpha + run:noise(x0) * to.sigma
end

return new
