--- SOAP: Adam in the basis of Shampoo's preconditioners.
local ty = require "tycho"
local fail = require("tycho.arguments").fail
local program = ty.core.program
local Optimizer = require "tycho.optim.optimizer"
local adam = require "tycho.optim.adam" (true)
local lowrank = require "tycho.optim.lowrank"

local rules = { composed = true }

-- At least f32: what rounding adds to the mean would count where the squares are small.
local function wide(p) return p.dtype == "f64" and "f64" or "f32" end
local function zeros(p) return ty.zeros_like(p, wide(p)) end

-- Sides longer than `largest` stay as they are: their tensors are empty.
local function side(rows)
  return function(p, group)
    local n = rows and p:size(0) or p:numel() // math.max(1, p:size(0))
    if n > group.largest then n = 0 end
    return ty.zeros({ n, n }, { dtype = wide(p), device = p.device })
  end
end

rules.slots = {
  bits32 = adam.slots.bits32,
  matrix = { exp_avg = zeros, exp_avg_sq = zeros, left = side(true), right = side(false), left_basis = side(true),
    right_basis = side(false) },
}

function rules.kind(_, p) return p.ndim >= 2 and p:numel() > 0 and "matrix" or "bits32" end

local function turned(x, left, right, back)
  if left:numel() > 0 then x = (back and left or left:transpose()):matmul(x) end
  if right:numel() > 0 then x = x:matmul(back and right:transpose() or right) end
  return x
end

-- The statistics of a side with x x' in them; a basis of eigenvectors, found at the first step and later brought nearer
-- by one step of orthogonal iteration, for which the largest come first: `square`, the second moments in that basis,
-- follows along dimension `dim`.
local function learn(batch, group, statistics, basis, x, square, dim)
  if basis:numel() == 0 then return end
  statistics:copy_(statistics:lerp(x:matmul(x:transpose()), 1 - group.beta2))
  batch:aside(function()
    local step = batch.step - 1
    if step == 0 then
      local _, vectors = ty.eigh(statistics)
      basis:copy_(vectors:flip(1)) -- eigh has the smallest first
    elseif step % group.refresh == 0 then
      local moved = statistics:matmul(basis)
      local order = (basis * moved):sum(0):argsort(0, true)
      basis:copy_((ty.qr(moved:index_select(1, order))))
      square:copy_(square:flatten(1):index_select(dim, order):reshape(square.shape))
    end
  end)
end

function rules.step(kind, group, batch, lr, clip)
  if kind ~= "matrix" then
    adam.step("bits32", group, batch, lr, clip)
    return batch:scaled(clip)
  end
  local first = batch.step == 1
  if first and program.is_recording() then
    fail("SOAP: the first step of a parameter cannot be recorded by ty.compile; take it before")
  end
  for i, p in ipairs(batch.params) do
    ty.scope(function()
      local g = lowrank.clipped(batch.grads[i], clip):flatten(1)
      local left, right = batch.left_basis[i], batch.right_basis[i]
      local mean, square = batch.exp_avg[i], batch.exp_avg_sq[i]
      local function learn_both()
        learn(batch, group, batch.left[i], left, g, square, 0)
        learn(batch, group, batch.right[i], right, g:transpose(), square, 1)
      end
      if first then
        -- In its own basis a gradient is diagonal, and the rest noise, which Adam would make as large.
        learn_both()
        return lowrank.descend(batch, i, ty.zeros_like(p), lr, 0, clip)
      end
      local biased = batch:number(p, function() return 1 / math.sqrt(1 - group.beta2 ^ (batch.step - 1)) end)
      local growth = batch:number(p, function() return 1 / (1 - group.beta1 ^ (batch.step - 1)) end)
      mean:copy_(mean:lerp(g:reshape(p.shape), 1 - group.beta1))
      square:copy_(square:lerp(turned(g, left, right):square():reshape(p.shape), 1 - group.beta2))
      local update = turned(mean:flatten(1), left, right) / (square:flatten(1):sqrt() * biased + group.eps)
      update = turned(update * growth, left, right, true)
      lowrank.descend(batch, i, update:reshape(p.shape), lr, group.weight_decay, clip)
      learn_both()
    end)
  end
end

--- Adam whose second moments of a matrix are those of the gradient in the eigenbasis of averages of G G' and G' G,
-- Shampoo's preconditioners; tensors of more dimensions are matrices [first, rest]. AdamW steps for vectors. The bases
-- follow every `refresh` steps; the first step finds them and leaves matrices as they are. Vyas et al. 2024.
-- options: lr (3e-3), beta1 (0.95), beta2 (0.95), eps (1e-8), weight_decay (0.01: decoupled), refresh (10), largest
-- (10000: longer sides are not turned); clip_norm, clip_value, schedule, ema.
---@type fun(parameters: table, options?: table): Optimizer
local SOAP = Optimizer.define("SOAP", { lr = 3e-3, beta1 = 0.95, beta2 = 0.95, eps = 1e-8, weight_decay = 0.01,
  refresh = 10, largest = 10000 }, rules)

return SOAP
