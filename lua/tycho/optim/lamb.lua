--- LAMB: Adam whose update of each tensor is as long as a share of the tensor.
local ty = require "tycho"
local Optimizer = require "tycho.optim.optimizer"
local adam = require "tycho.optim.adam" (true)
local lowrank = require "tycho.optim.lowrank"

local rules = { composed = true, slots = { plain = adam.slots.bits32 }, kind = function() return "plain" end }

function rules.step(_, group, batch, lr, clip)
  local grads = {}
  for i, g in ipairs(batch.grads) do grads[i] = lowrank.cut(g, clip) end
  local directions = lowrank.directions(adam, "bits32", group, batch, grads, clip, 1)
  for i, p in ipairs(batch.params) do
    ty.scope(function()
      local now, update = p:to(directions[i].dtype), directions[i]
      if group.weight_decay ~= 0 then update:add_(now * group.weight_decay) end
      local length, own = now:norm(), update:norm()
      local known = length:gt(0):logical_and(own:gt(0))
      local trust = ty.where(known, length / ty.where(known, own, 1.0), 1.0)
      lowrank.descend(batch, i, update:mul_(trust), lr, 0, clip)
    end)
  end
end

--- Adam for large batches: the update of each tensor, its decay included, is scaled to the norm of the tensor, so that
-- lr is the share that a step may change. You et al. 2020.
-- options: lr (1e-3), beta1 (0.9), beta2 (0.999), eps (1e-6), weight_decay (0); clip_norm, clip_value, schedule, ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
local LAMB = Optimizer.define("LAMB", { lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-6, weight_decay = 0 }, rules)

return LAMB
