--- Predictor and corrector: a step of the reverse diffusion, then Langevin steps at the new noise, each of which asks
-- the network once more. Song et al. 2021, "Score-Based Generative Modeling through Stochastic Differential Equations",
-- appendices F and G (reverse diffusion sampler, algorithm 4), for schedules whose signal stays (alpha = 1).
local ty = require "tycho"

local PC = {}
PC.__index = PC

--- options: snr (0.16: of a Langevin step, the ratio of its score's part to its noise), corrections (1: Langevin steps
-- after each predictor's step).
local function new(options)
  local self = ty.nn.options("solver.predictor_corrector", options, { snr = 0.16, corrections = 1 },
    { snr = "a number >= 0", corrections = "an integer >= 0" })
  return setmetatable(self, PC)
end

-- The mean over samples of each one's norm.
local function size(x) return x:flatten(1):square():sum({ 1 }):sqrt():mean() end

function PC:step(prediction, to, run)
  local from = prediction.point
  if from.alpha ~= 1 or to.alpha ~= 1 then
    error("solver.predictor_corrector: schedule: expected one whose signal stays, as schedule.exploding(), got another",
      0)
  end
  local gone = from.sigma ^ 2 - to.sigma ^ 2
  local x = prediction.x - prediction:as "epsilon" * (gone / from.sigma)
  if to.sigma == 0 then return x end -- the last step adds no noise
  x = x + run:noise(x) * math.sqrt(gone)
  for _ = 1, self.corrections do
    local score = run:predict(x, to):as "epsilon" * (-1 / to.sigma)
    local noise = run:noise(x)
    local step = (size(noise) * self.snr / size(score)):square() * 2
    x = x + score * step + noise * (step * 2):sqrt()
  end
  return x
end

return new
