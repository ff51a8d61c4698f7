--- D-Adaptation: AdamW whose rate is a lower bound of the distance to the solution, which grows as it is found.
local ty = require "tycho"
local Optimizer = require "tycho.optim.optimizer"
local distance = require "tycho.optim.distance"
local lowrank = require "tycho.optim.lowrank"

local function zeros(p) return ty.zeros_like(p) end

local rules = { composed = true, eager = true, kind = function() return "plain" end,
  slots = { plain = { exp_avg = zeros, exp_avg_sq = zeros, s = zeros } } }

-- In the letters of the paper's D-Adapted Adam: s, the weighted sum of the gradients, and r, that of their products
-- with the direction of s, both decaying as the root of the second moment does; d_hat = r / ((1 - sqrt(beta2)) |s|_1).
function rules.together(self, parts, clip)
  local all = self.groups[1]
  local d, rate = all.distance or all.first_distance, distance.rate(self, parts)
  local product, l1 = distance.sums(parts, clip, function(batch, i, g, group)
    local s, keep, scale = batch.s[i], group.beta2 ^ 0.5, d * rate
    if group.correction then
      scale = scale * math.sqrt(1 - group.beta2 ^ batch.step) / (1 - group.beta1 ^ batch.step)
    end
    local along = (g * s / distance.divisor(batch, i, group.eps)):sum() * scale
    batch.exp_avg[i]:mul_(group.beta1):add_(g * (scale * (1 - group.beta1)))
    batch.exp_avg_sq[i]:mul_(group.beta2):add_(g * g * (1 - group.beta2))
    s:mul_(keep):add_(g * (scale * (1 - keep)))
    return along, s:abs():sum()
  end)
  local keep = all.beta2 ^ 0.5
  all.reward = keep * (all.reward or 0.0) + (1 - keep) * product
  if l1 == 0 then return end
  distance.each(parts, clip, function(batch, i, _, group, part)
    ty.scope(function()
      local update = batch.exp_avg[i] / distance.divisor(batch, i, group.eps)
      lowrank.descend(batch, i, update, 1, group.weight_decay * d * part.lr, clip)
    end)
  end)
  if rate > 0 then
    local found = all.reward / ((1 - keep) * l1)
    d = math.max(d, math.min(found, d * all.growth))
  end
  all.distance = d
end

--- AdamW that finds its rate: the distance from the start to the solution is bounded from below by what the gradients
-- have said so far, the bound only grows, and the rate is the bound times lr, which stays at 1. A schedule without
-- restarts belongs to it. groups[1].distance is the bound. Groups share one rate, or have rate 0 and rest. Defazio and
-- Mishchenko 2023, "Learning-Rate-Free Learning by D-Adaptation", the Adam variant; four numbers a parameter with
-- AdamW's two.
-- options: lr (1), first_distance (1e-6), growth (math.huge: by what the bound may grow in a step), correction (false:
-- Adam's correction of the bias), beta1 (0.9), beta2 (0.999), eps (1e-8), weight_decay (0: decoupled); clip_norm,
-- clip_value, schedule, ema. Not inside ty.compile.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
local DAdaptAdamW = Optimizer.define("DAdaptAdamW", { lr = 1, first_distance = 1e-6, growth = math.huge,
  correction = false, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0 }, rules)

return DAdaptAdamW
