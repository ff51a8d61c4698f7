--- Shampoo: gradients preconditioned on both sides.
local ty = require "tycho"
local Optimizer = require "tycho.optim.optimizer"
local lowrank = require "tycho.optim.lowrank"

local rules = { composed = true }

local function momentum(p) return ty.zeros_like(p) end

-- [n, n] of the matrix that p is, with n its rows or the rest of its dimensions.
local function side(rows, diagonal)
  return function(p, group)
    local n = rows and p:size(0) or p:numel() // math.max(1, p:size(0))
    local dtype = p.dtype == "f64" and "f64" or "f32"
    return ty.eye(n, { dtype = dtype, device = p.device }) * (diagonal and group.eps or 1)
  end
end

rules.slots = {
  matrix = { momentum_buffer = momentum, left = side(true, true), right = side(false, true),
    left_root = side(true), right_root = side(false) },
  diagonal = { momentum_buffer = momentum, sum = function(p, group) return ty.full_like(p, group.eps) end },
}

function rules.kind(group, p)
  if p.ndim < 2 or p:numel() == 0 then return "diagonal" end
  return math.max(p:size(0), p:numel() // p:size(0)) <= group.largest and "matrix" or "diagonal"
end

-- x^(-1/4) of a symmetric positive matrix.
local function inverse_root(x, eps)
  local values, vectors = ty.eigh(x)
  return (vectors * values:clamp(eps):pow(-0.25)):matmul(vectors:transpose())
end

function rules.step(kind, group, batch, lr, clip)
  for i, p in ipairs(batch.params) do
    ty.scope(function()
      local g, mean = lowrank.clipped(batch.grads[i], clip), batch.momentum_buffer[i]
      if kind == "diagonal" then
        local sum = batch.sum[i]
        sum:copy_(sum:to(g.dtype) + g:square())
        g = g / sum:to(g.dtype):sqrt()
      else
        local x, left, right = g:flatten(1), batch.left[i], batch.right[i]
        left:add_(x:matmul(x:transpose()))
        right:add_(x:transpose():matmul(x))
        batch:aside(function()
          if (batch.step - 1) % group.refresh ~= 0 then return end
          batch.left_root[i]:copy_(inverse_root(left, group.eps))
          batch.right_root[i]:copy_(inverse_root(right, group.eps))
        end)
        g = batch.left_root[i]:matmul(x):matmul(batch.right_root[i]):reshape(p.shape)
      end
      if group.momentum ~= 0 then
        mean:copy_(mean:to(g.dtype) * group.momentum + g)
        g = mean:to(g.dtype)
      end
      lowrank.descend(batch, i, g, lr, group.weight_decay, clip)
    end)
  end
end

--- The gradient G of a matrix becomes L^(-1/4) G R^(-1/4), with L and R the sums of G G' and G' G so far; tensors of
-- more dimensions are matrices [first, rest]. Vectors, and matrices with a side longer than `largest`, are divided by
-- the root of the sum of squares. Gupta et al. 2018.
-- options: lr (0.1), momentum (0), weight_decay (0: decoupled), eps (1e-4: of the identity that L and R begin with),
-- refresh (1: steps between new roots), largest (2048); clip_norm, clip_value, schedule, ema.
---@type fun(parameters: table, options?: table): Optimizer
local Shampoo = Optimizer.define("Shampoo", { lr = 0.1, momentum = 0, weight_decay = 0, eps = 1e-4, refresh = 1,
  largest = 2048 }, rules)

return Shampoo
