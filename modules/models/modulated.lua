--- Blocks of transformers that a condition modulates, with the parameter names of the public VAR checkpoints; what
-- their attention sees is a function that comes with each call. Peebles and Xie 2023, "Scalable Diffusion Models with
-- Transformers" (adaLN); Tian et al. 2024, "Visual Autoregressive Modeling".
local ty = require "tycho"

local nn = ty.nn
local M = {}

-- Without gradients, what a part of a block needs is given back at its end.
---@param fn fun(): Tensor
---@return Tensor
function M.part(fn) return ty.is_grad_enabled() and fn() or ty.scope(fn) end

local Attention = nn.module "ModulatedAttention"

function Attention:init(width, heads)
  self.heads = heads
  self.mat_qkv = nn.Linear(width, 3 * width, { bias = false })
  self.q_bias, self.v_bias = nn.Parameter(ty.zeros(width)), nn.Parameter(ty.zeros(width))
  self.proj = nn.Linear(width, width)
end

-- attend(q, k, v): what attention makes of [n, heads, tokens, d].
function Attention:forward(x, attend)
  return self.proj(M.part(function()
    local bias = ty.concat({ self.q_bias, ty.zeros_like(self.q_bias), self.v_bias }, 0)
    local q, k, v = ty.linear(x, self.mat_qkv.weight, bias):chunk(3, -1)
    return nn.join_heads(attend(nn.split_heads(q, self.heads), nn.split_heads(k, self.heads),
      nn.split_heads(v, self.heads)))
  end))
end

local Mlp = nn.module "ModulatedMlp"

function Mlp:init(width, inner)
  self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
end

function Mlp:forward(x)
  return self.fc2(ty.linear(x, self.fc1.weight, self.fc1.bias, { activation = "gelu_tanh" }))
end

local plain = { elementwise_affine = false, eps = 1e-6 }

--- A block of a transformer: attention and a feed-forward network, each with a residual; x [n, tokens, width],
-- condition [n, width], attend as attention takes it.
---@overload fun(width: integer, heads: integer, ratio: number): Module
local Block = nn.module "ModulatedBlock"
M.Block = Block

function Block:init(width, heads, ratio)
  self.norm = nn.LayerNorm(width, plain)
  self.attn, self.ffn = Attention(width, heads), Mlp(width, math.floor(width * ratio))
  self.ada_lin = nn.Modulation(width, 6)
end

function Block:forward(x, condition, attend)
  local gate1, gate2, scale1, scale2, shift1, shift2 = self.ada_lin(condition)
  local function normed(shift, scale)
    return M.part(function() return nn.modulate(self.norm(x), shift, scale) end)
  end
  local function attended() return self.attn(normed(shift1, scale1), attend) end
  x = M.part(function() return x + gate1:unsqueeze(1) * M.part(attended) end)
  local function fed() return self.ffn(normed(shift2, scale2)) end
  return M.part(function() return x + gate2:unsqueeze(1) * M.part(fed) end)
end

--- The norm before the last layer.
---@overload fun(width: integer): Module
local Head = nn.module "ModulatedHead"
M.Head = Head

function Head:init(width)
  self.norm = nn.LayerNorm(width, plain)
  self.ada_lin = nn.Modulation(width, 2)
end

function Head:forward(x, condition)
  local scale, shift = self.ada_lin(condition)
  return nn.modulate(self.norm(x), shift, scale)
end

return M
