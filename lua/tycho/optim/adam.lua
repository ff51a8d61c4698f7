--- The rules of Adam and AdamW (tycho.optim.optimizer), also for optimizers that treat a part of the parameters so.
local ty = require "tycho"

local block, small = 256, 4096 -- elements that share a scale; tensors below this size keep moments of 32 bits

local function zeros(p) return ty.zeros_like(p) end
local function codes_of(first) return function(p) return ty.full_like(p, first, { dtype = "u8" }) end end

-- decoupled: AdamW
local function adam(decoupled)
  return {
    -- what a parameter has begun with, it keeps
    kind = function(group, p, state)
      if state then return state.scales and "bits8" or "bits32" end
      return group.bits == 8 and p.dtype ~= "f64" and p:numel() >= small and "bits8" or "bits32"
    end,
    slots = {
      bits32 = { exp_avg = zeros, exp_avg_sq = zeros },
      bits8 = {
        exp_avg = codes_of(127), exp_avg_sq = codes_of(0),
        scales = function(p)
          return ty.zeros({ 2, (p:numel() + block - 1) // block }, { dtype = "f32", device = p.device })
        end,
      },
    },
    -- small ones, of which there are many, would waste most of a page
    place = function(group, p, tensor)
      return group.paged and p:numel() >= small and tensor:page_memory() or tensor
    end,
    step = function(kind, group, batch, lr, clip)
      if kind == "bits8" then
        if group.stochastic then
          require("tycho.arguments").fail "Adam: stochastic: expected false with bits = 8, got true"
        end
        ty.adam_8bit_(batch.params, batch.grads, batch.exp_avg, batch.exp_avg_sq, batch.scales, batch.averages, lr,
          group.beta1, group.beta2, group.eps, group.weight_decay, decoupled, clip.scale, clip.limit, clip.weight,
          batch.step, clip.control)
      else
        ty.adam_(batch.params, batch.grads, batch.exp_avg, batch.exp_avg_sq, batch.averages, lr, group.beta1,
          group.beta2, group.eps, group.weight_decay, decoupled, clip.scale, clip.limit, clip.weight, batch.step,
          group.stochastic, clip.control)
      end
    end,
  }
end

return adam
