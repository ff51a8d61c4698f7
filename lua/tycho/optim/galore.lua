--- GaLore: AdamW whose moments live in the subspace of the largest singular values of a recent gradient.
local ty = require "tycho"
local Optimizer = require "tycho.optim.optimizer"
local adam = require "tycho.optim.adam" (true)
local lowrank = require "tycho.optim.lowrank"

local function projected(make)
  return function(p, group) return make(lowrank.projected_like(p, group.rank)) end
end

-- adam's kinds, and one of each for projected gradients.
local slots = {}
for kind, makers in pairs(adam.slots) do
  local low = {
    projection = function(p, group)
      return ty.zeros({ (lowrank.short(p)), group.rank }, { dtype = p.dtype, device = p.device })
    end,
  }
  for slot, make in pairs(makers) do low[slot] = projected(make) end
  slots[kind], slots["low " .. kind] = makers, low
end

local rules = { slots = slots, composed = true, eager = true }

function rules.kind(group, p, state)
  if not lowrank.is_low(group, p) then return adam.kind(group, p, state) end
  return "low " .. adam.kind(group, lowrank.projected_like(p, group.rank, "meta"), state)
end

function rules.step(kind, group, batch, lr, clip)
  local inner = kind:match "^low (.*)"
  if not inner then return adam.step(kind, group, batch, lr, clip) end
  local low = {}
  for i in ipairs(batch.params) do
    low[i] = ty.scope(function()
      local g, basis = lowrank.cut(batch.grads[i], clip), batch.projection[i]
      if (batch.step - 1) % group.refresh == 0 then basis:copy_(lowrank.top(g, group.rank)) end
      return lowrank.project(g, basis)
    end)
  end
  local directions = lowrank.directions(adam, inner, group, batch, low, clip, group.scale)
  for i, p in ipairs(batch.params) do
    ty.scope(function()
      lowrank.descend(batch, i, lowrank.expand(p, batch.projection[i], directions[i]), lr, group.weight_decay, clip)
    end)
  end
end

--- AdamW whose moments are those of the gradient projected to `rank` dimensions: [m, n], m >= n, takes
-- (2 m + n) rank numbers between steps in place of 2 m n. The subspace is that of the largest singular values of the
-- gradient, on the shorter side, taken anew every `refresh` steps; the moments go on in the new one as they are. What
-- is no matrix, and matrices whose shorter side is no longer than rank, are AdamW's. Zhao et al. 2024.
--
--     local opt = optim.GaLore({ { params = matrices }, { params = embeddings_and_norms, rank = 0 } }, { lr = 0.01 })
--
-- options: lr (0.01), rank (128; 0: AdamW), refresh (200), scale (0.25: of the projected updates), beta1 (0.9), beta2
-- (0.999), eps (1e-8), weight_decay (0), bits (32; 8: moments of 8 bits as optim.Adam has them); clip_norm, clip_value,
-- schedule, ema. Not inside ty.compile.
---@type fun(parameters: table, options?: table): Optimizer
local GaLore = Optimizer.define("GaLore", { lr = 0.01, rank = 128, refresh = 200, scale = 0.25, beta1 = 0.9,
  beta2 = 0.999, eps = 1e-8, weight_decay = 0, bits = 32 }, rules)

return GaLore
