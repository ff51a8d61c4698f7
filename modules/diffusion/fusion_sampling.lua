--- Fusion sampling: a picture and words asked for at once without either being lost. Before each step the sample takes
-- in what both ask for together, m times, and keeps its amount of noise:
--
--     x <- x - s sigma e + sqrt(s (2 - s)) sigma z,    s = eta^2 (1 - (r' / r)^2),    r = sigma / alpha, r' the next
--
-- e the noise as the branch "fusion" is guided to say (the prompt with the picture's word at a smaller scale), z fresh.
-- Then the step is taken by guidance.sum, which adds the directions of the whole prompt and of a prompt without the
-- picture's word. Zhou et al. 2023, "Enhancing Detail Preservation for Customized Text-to-Image Generation: A
-- Regularization-Free Approach", algorithm 1. In its terms s = sigma_t^2 / (1 - abar_{t-1}) with DDIM's sigma_t; said
-- by ratios it holds for any schedule: where e is right, x keeps its mean and its variance, for
-- (1 - s)^2 + s (2 - s) = 1.
local arguments = require "tycho.arguments"
local guidances = require "tycho.diffusion.guidance"
local predictions = require "tycho.diffusion.prediction"

local M = {}

local Fusion = {}
Fusion.__index = Fusion

--- A part of a sampler. options: times (1: m, how often before each step; 0: never), scale (3: of guidance by the
-- branch "fusion"), eta (1: how much of the noise is new), branch ("fusion"), interval ({ low, high } of sigma / alpha
-- where it is done; everywhere).
---@param options? { times?: integer, scale?: number, eta?: number, branch?: string, interval?: number[] }
---@return table part
function M.fusion(options)
  local self = arguments.read("fusion_sampling.fusion", options, { times = 1, scale = 3.0, eta = 1.0,
    branch = "fusion", interval = arguments.none }, { times = "an integer >= 0", scale = "a finite number",
    eta = "a number in [0, 1]", interval = "a pair of numbers" })
  return setmetatable(self, Fusion)
end

--- s for a step from one point to the next.
---@param eta number
---@param from Point
---@param to Point
---@return number
function M.share(eta, from, to)
  local who = "fusion_sampling.share"
  arguments.expect(who, "eta", eta, "a number in [0, 1]")
  for name, point in pairs { from = from or false, to = to or false } do
    arguments.expect(who, name, point, "a table")
    arguments.expect(who, name .. ".alpha", point.alpha, "a finite number")
    arguments.expect(who, name .. ".sigma", point.sigma, "a finite number")
  end
  if from.alpha == 0 then return eta * eta end -- from pure noise
  local ratio = to.alpha == 0 and 1 or to.sigma / to.alpha * from.alpha / from.sigma
  return eta * eta * (1 - ratio * ratio)
end

function Fusion:predict(run, next, x, point)
  local ratio = point.sigma / point.alpha
  if self.interval and not (ratio > self.interval[1] and ratio <= self.interval[2]) then return next(x, point) end
  local s = M.share(self.eta, point, run.points[run.step + 1])
  for _ = 1, self.times do
    local outputs = run:evaluate(x, point, { self.branch, "null" })
    local output = outputs.null + (outputs[self.branch] - outputs.null) * self.scale
    local noise = predictions.new(run.kind, x, output, point, run.data):as "epsilon"
    x = x - noise * (s * point.sigma) + run:noise(x) * ((s * (2 - s)) ^ 0.5 * point.sigma)
  end
  return next(x, point)
end

--- The guidance of the steps: e_null + s1 (e_whole - e_null) + s2 (e_reference - e_null), with the branch "reference" a
-- prompt without the picture's word. s2 = 0 is classifier-free guidance.
---@param s1 number
---@param s2 number
---@return table guidance
function M.guidance(s1, s2)
  arguments.expect("fusion_sampling.guidance", "s1", s1, "a finite number")
  arguments.expect("fusion_sampling.guidance", "s2", s2, "a finite number")
  return guidances.sum { base = "null", terms = { { branch = "condition", scale = s1 },
    { branch = "reference", scale = s2 } } }
end

return M
