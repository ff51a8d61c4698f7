--- Muon: the momentum of a matrix, made orthogonal.
local ty = require "tycho"
local Optimizer = require "tycho.optim.optimizer"
local adam = require "tycho.optim.adam" (true)
local lowrank = require "tycho.optim.lowrank"

local rules = { composed = true }

rules.slots = {
  bits32 = adam.slots.bits32,
  matrix = { momentum_buffer = function(p) return ty.zeros_like(p) end },
}

function rules.kind(group, p) return group.matrices and p.ndim >= 2 and "matrix" or "bits32" end

-- x [m, n] with all its singular values brought near 1: a few times x = a x + (b A + c A^2) x with A = x x'. The odd
-- polynomial with these coefficients is steep at 0 and takes (0, 1] into about 0.7 to 1.2 (Jordan et al. 2024).
local a, b, c = 3.4445, -4.7750, 2.0315

local function orthogonal(x, iterations)
  local tall = x:size(0) > x:size(1)
  if tall then x = x:transpose() end
  x = x / x:norm():clamp(1e-7)
  local m, n = x:size(0), x:size(1)
  if n >= 2 * m and iterations > 1 then
    -- All factors are polynomials in the first A and commute with it: so they and the next A are multiplied as small
    -- matrices [m, m], and x is seen twice. Of a [96, 864] that is less than half of the work.
    local gram, product, eye = x:matmul(x:transpose()), nil, ty.eye(m, { dtype = x.dtype, device = x.device }) * a
    for i = 1, iterations do
      local p = eye + gram * b + gram:matmul(gram) * c
      product = product and p:matmul(product) or p
      if i < iterations then gram = p:matmul(gram):matmul(p) end
    end
    x = product:matmul(x)
  else
    for _ = 1, iterations do
      local gram = x:matmul(x:transpose())
      x = x * a + (gram * b + gram:matmul(gram) * c):matmul(x)
    end
  end
  return tall and x:transpose() or x
end

-- The factor of the rate for a matrix [m, n]: "original" keeps the size of what a column adds, "rms" makes updates as
-- large as AdamW's are (Liu et al. 2025, "Muon is scalable for LLM training").
local function factor(adjust, m, n)
  if adjust == "rms" then return 0.2 * math.sqrt(math.max(m, n)) end
  return math.sqrt(math.max(1, m / n))
end

function rules.step(kind, group, batch, lr, clip)
  if kind ~= "matrix" then
    local settings = setmetatable({ eps = 1e-8, beta1 = 0.9, beta2 = 0.95 }, { __index = group })
    batch:again(clip, function() return batch:rate() * group.adam_rate end)
    adam.step("bits32", settings, batch, lr * group.adam_rate, clip)
    return batch:scaled(clip)
  end
  for i, p in ipairs(batch.params) do
    ty.scope(function()
      local g, mean = lowrank.clipped(batch.grads[i], clip), batch.momentum_buffer[i]
      mean:copy_(mean:lerp(g:to(mean.dtype), 1 - group.momentum))
      local now = mean:to(g.dtype)
      local update = (group.nesterov and g:lerp(now, group.momentum) or now):flatten(1)
      local m, n = update:size(0), update:size(1)
      if m * n == 0 then return end
      update = orthogonal(update, group.iterations):reshape(p.shape) * factor(group.adjust, m, n)
      lowrank.descend(batch, i, update, lr, group.weight_decay, clip)
    end)
  end
end

--- Momentum whose update of a matrix is made orthogonal, all its singular values about 1, by a few Newton-Schulz
-- iterations; tensors of more dimensions are matrices [first, rest]. AdamW steps (beta 0.9, 0.95) for vectors and for
-- groups with matrices = false, which embeddings and the output layer should be. Jordan et al. 2024.
--
--     local opt = optim.Muon({ { params = hidden_matrices }, { params = the_rest, matrices = false, lr = 3e-4 } })
--
-- options: lr (0.02), momentum (0.95), nesterov (true), weight_decay (0.1: decoupled), iterations (5), matrices (true),
-- adjust ("original": the rate times sqrt(max(1, m / n)); "rms": times 0.2 sqrt(max(m, n)), which lets one rate and
-- decay serve Muon and AdamW), adam_rate (1: the rate of AdamW as a multiple of lr); clip_norm, clip_value, schedule,
-- ema.
---@type fun(parameters: table, options?: table): Optimizer
local Muon = Optimizer.define("Muon", { lr = 0.02, momentum = 0.95, nesterov = true, weight_decay = 0.1,
  iterations = 5, matrices = true, adjust = "original", adam_rate = 1 }, rules)

return Muon
