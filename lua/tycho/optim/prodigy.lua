--- Prodigy: D-Adaptation that weighs its gradients by the square of the bound, and so finds the rate sooner.
local ty = require "tycho"
local Optimizer = require "tycho.optim.optimizer"
local distance = require "tycho.optim.distance"
local lowrank = require "tycho.optim.lowrank"

local function zeros(p) return ty.zeros_like(p) end

local rules = { composed = true, eager = true, kind = function() return "plain" end,
  slots = { plain = { exp_avg = zeros, exp_avg_sq = zeros, s = zeros,
    start = function(p) return p:detach():clone() end } } }

-- Prodigy with Adam's steps, Algorithm 4 of the paper: r sums <g, x_0 - x> and s the gradients, both weighed by the
-- square of the bound d and decaying with beta3; d_hat = r / |s|_1. The weights are divided by d_0 d_0, which cancels
-- and keeps them from being too small for floats.
function rules.together(self, parts, clip)
  local all = self.groups[1]
  local first = all.first_distance
  local d, rate = all.distance or first, distance.rate(self, parts)
  local beta3, corrected = all.beta3 > 0 and all.beta3 or all.beta2 ^ 0.5, {}
  local product, l1 = distance.sums(parts, clip, function(batch, i, g, group)
    local scale, weight = rate, (d / first) ^ 2
    if group.correction then
      scale = scale * math.sqrt(1 - group.beta2 ^ batch.step) / (1 - group.beta1 ^ batch.step)
    end
    corrected[batch] = scale
    batch.exp_avg[i]:mul_(group.beta1):add_(g * (d * (1 - group.beta1)))
    batch.exp_avg_sq[i]:mul_(group.beta2):add_(g * g * (d * d * (1 - group.beta2)))
    local s = batch.s[i]:mul_(beta3):add_(g * (weight * (group.safeguard and 1 or scale)))
    return (g * (batch.start[i] - batch.params[i])):sum() * (weight * scale), s:abs():sum()
  end)
  all.reward = beta3 * (all.reward or 0.0) + product
  if l1 == 0 then return end
  distance.each(parts, clip, function(batch, i, _, group)
    ty.scope(function()
      local update = batch.exp_avg[i] / distance.divisor(batch, i, d * group.eps)
      lowrank.descend(batch, i, update, d * corrected[batch], group.weight_decay, clip)
    end)
  end)
  if rate > 0 then
    local found = all.coefficient * all.reward / l1
    if d == first then d = math.max(d, found) end -- the limit of growth does not hold the first estimate back
    all.largest = math.max(all.largest or first, found)
    d = math.min(all.largest, d * all.growth)
  end
  all.distance = d
end

--- AdamW that finds its rate as optim.DAdaptAdamW does, faster: gradients count by the square of the bound at their
-- time, so that those from when the bound was far too small are forgotten. lr stays at 1; coefficient makes the
-- estimate larger or smaller. groups[1].distance is the bound. Mishchenko and Defazio 2023, "Prodigy: An Expeditiously
-- Adaptive Parameter-Free Learner", Algorithm 4. Groups share one rate, or have rate 0 and rest.
-- options: lr (1), first_distance (1e-6), coefficient (1), growth (math.huge: by what the bound may grow in a step),
-- correction (false: Adam's correction of the bias), safeguard (false; true: a schedule's warm-up does not make the
-- bound too large), beta1 (0.9), beta2 (0.999), beta3 (0: the root of beta2), eps (1e-8), weight_decay (0: decoupled);
-- clip_norm, clip_value, schedule, ema. Not inside ty.compile.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
local Prodigy = Optimizer.define("Prodigy", { lr = 1, first_distance = 1e-6, coefficient = 1, growth = math.huge,
  correction = false, safeguard = false, beta1 = 0.9, beta2 = 0.999, beta3 = 0, eps = 1e-8, weight_decay = 0 }, rules)

return Prodigy
