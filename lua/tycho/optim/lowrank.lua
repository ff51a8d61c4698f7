--- What the optimizers share that do more with a matrix than a native pass does, and those that keep its state in a
-- subspace of its shorter side: optim.GaLore, APOLLO and FRUGAL. A basis is [short, rank]; a tall matrix [m, n],
-- m >= n, is projected to [m, rank], a wide one to [rank, n].
local ty = require "tycho"

local M = {}

--- The shorter side of a matrix, and whether that is the one of its columns.
function M.short(p)
  local rows, columns = p:size(0), p:size(1)
  return math.min(rows, columns), rows >= columns
end

--- An empty tensor in the shape of p projected to `rank`.
function M.projected_like(p, rank, device)
  local _, tall = M.short(p)
  return ty.empty(tall and { p:size(0), rank } or { rank, p:size(1) }, { dtype = p.dtype, device = device or p.device })
end

--- g in the subspace.
function M.project(g, basis)
  local _, tall = M.short(g)
  return tall and g:matmul(basis) or basis:transpose():matmul(g)
end

--- What `low` is in the full space, shaped like p.
function M.expand(p, basis, low)
  local _, tall = M.short(p)
  basis = basis:to(low.dtype)
  return tall and low:matmul(basis:transpose()) or basis:matmul(low)
end

--- The basis of the `rank` largest singular values of g.
function M.top(g, rank)
  local _, tall = M.short(g)
  local u, _, vh = ty.svd(g)
  return tall and vh:narrow(0, 0, rank):transpose() or u:narrow(1, 0, rank)
end

-- The finalizer of splitmix64 (Steele, Lea and Flood 2014), which scatters what is close together.
local function scatter(x)
  x = (x ~ (x >> 30)) * 0xbf58476d1ce4e5b9
  x = (x ~ (x >> 27)) * 0x94d049bb133111eb
  return x ~ (x >> 31)
end

--- A seed for each of `round` and `position`, far from those that programs choose themselves.
function M.seed(seed, round, position)
  return scatter(scatter(scatter(seed + 0x9e3779b97f4a7c15) + round) + position)
end

--- What fn(...) returns when random numbers begin at `seed`; the generator goes on as if nothing had been drawn.
function M.seeded(seed, fn, ...)
  local before = ty.rng_state()
  ty.manual_seed(seed)
  local result = table.pack(pcall(fn, ...))
  ty.rng_state(before)
  if not result[1] then error(result[2], 0) end
  return table.unpack(result, 2, result.n)
end

--- The gradient as the step wants it: every element cut to clip.limit.
function M.cut(g, clip) return clip.limit < math.huge and g:clamp(-clip.limit, clip.limit) or g end

-- Moments of the dtype of p, directions in at least f32.
local function wide(p) return p.dtype == "f64" and "f64" or "f32" end

--- The gradient cut and scaled, in at least f32, for steps that have no native pass.
function M.clipped(g, clip)
  g = M.cut(g, clip):to(wide(g))
  local factor = clip.factor
  if ty.is_tensor(factor) then return g * factor:to(g.dtype) end
  return factor == 1 and g or g * factor
end

--- Adam's direction, m / (sqrt(v) + eps) without their bias, of each of `low`, projected gradients, times `scale`.
-- rules: adam(true); kind: one of its kinds; batch: lists exp_avg, exp_avg_sq and so on, and step.
function M.directions(rules, kind, group, batch, low, clip, scale)
  local result = {}
  for i, x in ipairs(low) do
    result[i] = ty.zeros(x.shape, { dtype = wide(batch.params[i]), device = x.device })
  end
  local plain = setmetatable({ weight_decay = 0 }, { __index = group })
  local lists = setmetatable({ params = result, grads = low, averages = {} }, { __index = batch })
  local own = { scale = clip.scale, limit = math.huge, weight = 0, norm = clip.norm }
  batch:again(own, function() return -scale end)
  rules.step(kind, plain, lists, -scale, own)
  batch:scaled(own)
  return result
end

--- p = p (1 - lr weight_decay) - lr update for parameter i of a batch, and its average. lr is the batch's rate, or what
-- fn() returns at every step.
function M.descend(batch, i, update, lr, weight_decay, clip, fn)
  batch:again(clip, fn)
  ty.sgd_({ batch.params[i] }, { update }, {}, { batch.averages[i] }, lr, 0, 0, weight_decay, false, 1, math.huge,
    clip.weight, batch.step)
end

--- Whether p has a state in a subspace: a matrix whose shorter side is longer than the rank, which is not 0.
function M.is_low(group, p) return group.rank > 0 and p.ndim == 2 and M.short(p) > group.rank end

return M
