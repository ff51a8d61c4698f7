--- Schedule-free AdamW: an average in place of a schedule that goes down.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Optimizer = require "tycho.optim.optimizer"
local lowrank = require "tycho.optim.lowrank"

local rules = { composed = true, eager = true, methods = {}, kind = function() return "plain" end }

rules.slots = { plain = { z = function(p) return p:detach():clone() end,
  exp_avg_sq = function(p) return ty.zeros_like(p) end } }

-- The parameters are y = (1 - beta1) z + beta1 x, where gradients are taken: z makes Adam's steps without momentum, and
-- x is the average of all z, each counted by the square of the largest rate so far. x is never kept: it is what y and z
-- leave.
function rules.together(self, parts, clip)
  local share, rates = {}, {}
  for _, part in ipairs(parts) do
    local group, batch = part.group, part.batch
    if group.shows_average then
      arguments.fail("%s: step: the parameters are the averages; call train() first", self.name)
    end
    if not share[group] then
      local rate = part.lr * (group.warmup > 0 and math.min(1, (self.steps + 1) / group.warmup) or 1)
      group.largest = math.max(group.largest or 0, rate)
      local weight = (self.steps + 1) ^ group.power * group.largest ^ 2
      group.weights = (group.weights or 0.0) + weight
      share[group], rates[group] = group.weights > 0 and weight / group.weights or 0.0, rate
    end
    local c, rate, beta1 = share[group], rates[group], group.beta1
    for i, p in ipairs(batch.params) do
      ty.scope(function()
        local g, z, square = lowrank.clipped(batch.grads[i], clip), batch.z[i], batch.exp_avg_sq[i]
        square:mul_(group.beta2):add_(g * g * (1 - group.beta2))
        local update = g / (square / (1 - group.beta2 ^ batch.step)):sqrt():add_(group.eps)
        if group.weight_decay ~= 0 then update:add_(p * group.weight_decay) end
        -- y moves to z by the share of x's step, and both by what z has moved.
        local along = (p - z) * c + update * (rate * (1 - beta1 * (1 - c)))
        lowrank.descend(batch, i, along, 1, 0, clip)
        z:sub_(update * rate)
      end)
    end
  end
end

-- Moves the parameters along the line from z through them: `by` of the way from z.
local function show(self, averages)
  for _, group in ipairs(self.groups) do
    if (group.shows_average or false) ~= averages then
      local by = averages and 1 / group.beta1 or group.beta1
      ty.no_grad(function()
        for _, p in ipairs(group.params) do
          local state = self.state[p]
          if state then p:copy_(state.z + (p - state.z) * by) end
        end
      end)
      group.shows_average = averages
    end
  end
  return self
end

--- Puts the average of the weights into the parameters, to be evaluated and saved, until train() is called.
---@return Optimizer self
function rules.methods:eval() return show(self, true) end

--- Puts back the weights at which gradients are taken; a step asks for it.
---@return Optimizer self
function rules.methods:train() return show(self, false) end

local make = Optimizer.define("ScheduleFree", { lr = 2.5e-3, warmup = 0, power = 0, beta1 = 0.9, beta2 = 0.999,
  eps = 1e-8, weight_decay = 0 }, rules)

--- AdamW without a schedule, good at any step: Adam's steps without momentum are made on z, gradients are taken at
-- y = (1 - beta1) z + beta1 x, and x, the average of all z, is what is found. The parameters are y; opt:eval() puts x
-- in their place and opt:train() takes it out again, by arithmetic that floats round. As many bytes as AdamW. Defazio
-- et al. 2024, "The Road Less Scheduled", Algorithm 1.
-- options: lr (2.5e-3; larger than with a schedule), warmup (0 steps; `schedule` should not go down), power (0: later
-- steps count by their number to this power), beta1 (0.9, more than 0), beta2 (0.999), eps (1e-8), weight_decay (0:
-- taken at y); clip_norm, clip_value, schedule, ema. Not inside ty.compile.
---@param parameters Module|Tensor[]|Tensor|table[]
---@param options? table
---@return Optimizer
local function ScheduleFree(parameters, options)
  local self = make(parameters, options)
  for _, group in ipairs(self.groups) do
    if group.beta1 == 0 then arguments.expect("ScheduleFree", "beta1", 0, "a number in (0, 1)") end
  end
  return self
end

return ScheduleFree
