--- Adafactor: the second moments of a matrix as the product of a row and a column.
local ty = require "tycho"
local Optimizer = require "tycho.optim.optimizer"
local lowrank = require "tycho.optim.lowrank"

local rules = { composed = true }

-- Of p's shape with 1 in place of dimension `dim`.
local function without(dim)
  return function(p)
    local shape = p.shape
    shape[#shape + 1 + dim] = 1
    return ty.zeros(shape, { dtype = p.dtype, device = p.device })
  end
end

rules.slots = {
  plain = { variance = function(p) return ty.zeros_like(p) end },
  factored = { row_var = without(-1), col_var = without(-2) },
}

function rules.kind(_, p) return p.ndim > 1 and "factored" or "plain" end

local precision = { f64 = 2.0 ^ -52, f32 = 2.0 ^ -23, f16 = 2.0 ^ -10, bf16 = 2.0 ^ -7 }

-- An average of squares that moves by `weight`, a number or a tensor.
local function move(state, squares, weight)
  local before = state:to(squares.dtype)
  state:copy_(before + (squares - before) * weight)
  return state:to(squares.dtype)
end

function rules.step(kind, group, batch, _, clip)
  for i, p in ipairs(batch.params) do
    ty.scope(function()
      if p:numel() == 0 then return end
      local g, now = lowrank.clipped(batch.grads[i], clip), p:to(p.dtype == "f64" and "f64" or "f32")
      local weight = batch:number(p, function() return batch.step ^ -group.decay end)
      local rate = batch:number(p, function() return math.min(batch:rate(), 1 / math.sqrt(batch.step)) end)
      local least, root = group.eps1 > 0 and group.eps1 or precision[p.dtype], math.sqrt(p:numel())
      local variance
      if kind == "factored" then
        local row = move(batch.row_var[i], g:square():mean(-1, true), weight)
        local column = move(batch.col_var[i], g:square():mean(-2, true), weight)
        variance = row:matmul(column) / row:mean(-2, true):clamp(least)
      else
        variance = move(batch.variance[i], g:square(), weight)
      end
      local update = g * variance:clamp(least * least):rsqrt()
      local share = (now:norm() / root):clamp(group.eps2) * rate / (update:norm() / (root * group.limit)):clamp(1)
      -- sgd_ multiplies with lr what it is given; the decay alone takes it
      if group.weight_decay ~= 0 then
        p:mul_(batch:number(p, function() return 1 - batch:rate() * group.weight_decay end))
      end
      lowrank.descend(batch, i, update * share, 1, 0, clip, function() return 1 end)
    end)
  end
end

--- Adam without first moments, whose second moments of [..., m, n] are the product of a column [..., m, 1] and a row
-- [..., 1, n], in m + n numbers; steps are relative to the size of the weights. Shazeer and Stern 2018; as PyTorch's.
-- options: lr (0.01: the largest relative step; later ones are at most 1 / sqrt(step)), decay (0.8: the averages move
-- by step^-decay), eps1 (0: the precision of the dtype; its square is the least variance), eps2 (1e-3: the least size
-- of weights that a step is relative to), limit (1: of the root mean square of updates), weight_decay (0: decoupled);
-- clip_norm, clip_value, schedule, ema.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
local Adafactor = Optimizer.define("Adafactor", { lr = 0.01, decay = 0.8, eps1 = 0, eps2 = 1e-3, limit = 1,
  weight_decay = 0 }, rules)

return Adafactor
