--- The parts of the U-Net of diffusion, with the parameter names of diffusers: residual blocks, self-attention, the
-- transformer that attends to a context, changes of size.
local ty = require "tycho"

local nn = ty.nn
local M = {}

local function zero(module)
  nn.init.zeros(module.weight)
  nn.init.zeros(module.bias)
  return module
end
M.zero = zero

-- norm, silu, conv, time, norm, silu, conv, and the input beside.
local ResnetBlock = nn.module "ResnetBlock"
M.ResnetBlock = ResnetBlock

function ResnetBlock:init(inputs, outputs, time, o)
  self.norm1 = nn.GroupNorm(o.groups, inputs, { activation = "silu" })
  self.conv1 = nn.Conv2d(inputs, outputs, 3, { padding = 1 })
  self.time_emb_proj = nn.Linear(time, o.scale_shift and 2 * outputs or outputs)
  self.norm2 = nn.GroupNorm(o.groups, outputs, { activation = o.scale_shift and "none" or "silu" })
  self.dropout = nn.Dropout(o.dropout)
  self.conv2 = zero(nn.Conv2d(outputs, outputs, 3, { padding = 1 }))
  if inputs ~= outputs then self.conv_shortcut = nn.Conv2d(inputs, outputs, 1) end
  self.scale_shift = o.scale_shift
end

-- x [n, c, h, w]; time [n, time], already through silu.
function ResnetBlock:forward(x, time)
  local h = self.conv1(self.norm1(x))
  local e = self.time_emb_proj(time):unsqueeze(-1):unsqueeze(-1)
  if self.scale_shift then
    local scale, shift = e:chunk(2, 1)
    h = (self.norm2(h) * (scale + 1) + shift):silu()
  else
    h = self.norm2(h + e)
  end
  h = self.conv2(self.dropout(h))
  return (self.conv_shortcut and self.conv_shortcut(x) or x) + h
end

-- [n, c, h, w] to [n, h * w, c] and back.
local function to_tokens(x) return x:flatten(2):transpose(1, 2) end

local function to_map(tokens, shape) return tokens:transpose(1, 2):reshape(shape[1], -1, shape[3], shape[4]) end

-- q [n, t, c], k and v [n, s, c], mask [n, s] (bool, true: seen; or nil): [n, t, c].
local function attend(q, k, v, heads, mask)
  return nn.attention(q, k, v, { heads = heads, mask = mask and mask:unsqueeze(1):unsqueeze(1) })
end

-- Attention of tokens x to a context (left out: to themselves); diffusers' names.
local function projections(self, channels, context, bias)
  self.to_q = nn.Linear(channels, channels, { bias = bias })
  self.to_k = nn.Linear(context, channels, { bias = bias })
  self.to_v = nn.Linear(context, channels, { bias = bias })
  self.to_out = nn.ModuleList { nn.Linear(channels, channels) }
end

-- Self-attention over positions, with the input beside.
local Attention = nn.module "Attention"
M.Attention = Attention

function Attention:init(channels, heads, o)
  self.heads = heads
  self.group_norm = nn.GroupNorm(o.groups, channels)
  projections(self, channels, channels, true)
  zero(self.to_out[1])
end

function Attention:forward(x)
  local tokens = to_tokens(self.group_norm(x))
  local y = attend(self.to_q(tokens), self.to_k(tokens), self.to_v(tokens), self.heads)
  return x + to_map(self.to_out[1](y), x.shape)
end

local TokenAttention = nn.module "TokenAttention"

function TokenAttention:init(channels, heads, context)
  self.heads = heads
  projections(self, channels, context, false)
end

function TokenAttention:forward(x, context, mask)
  return self.to_out[1](attend(self.to_q(x), self.to_k(context), self.to_v(context), self.heads, mask))
end

local Gated = nn.module "GEGLU" -- Shazeer 2020, "GLU Variants Improve Transformer"

function Gated:init(width, inner) self.proj = nn.Linear(width, 2 * inner) end

function Gated:forward(x)
  local value, gate = self.proj(x):chunk(2, -1)
  return value * gate:gelu()
end

local FeedForward = nn.module "FeedForward"

function FeedForward:init(width, dropout)
  self.net = nn.Sequential(Gated(width, 4 * width), nn.Dropout(dropout), nn.Linear(4 * width, width))
end

function FeedForward:forward(x) return self.net(x) end

local TransformerBlock = nn.module "BasicTransformerBlock"

function TransformerBlock:init(channels, heads, o)
  self.norm1 = nn.LayerNorm(channels)
  self.attn1 = TokenAttention(channels, heads, channels)
  self.norm2 = nn.LayerNorm(channels)
  self.attn2 = TokenAttention(channels, heads, o.context)
  self.norm3 = nn.LayerNorm(channels)
  self.ff = FeedForward(channels, o.dropout)
end

function TransformerBlock:forward(x, context, mask)
  local h = self.norm1(x)
  x = x + self.attn1(h, h)
  x = x + self.attn2(self.norm2(x), context, mask)
  return x + self.ff(self.norm3(x))
end

-- Transformer blocks over the positions of a map, each attending to the map and to the context, with the input beside.
-- Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models".
local Transformer = nn.module "Transformer2D"
M.Transformer = Transformer

function Transformer:init(channels, heads, depth, o)
  self.norm = nn.GroupNorm(o.groups, channels, { eps = 1e-6 })
  self.linear = o.linear_projection
  self.proj_in = self.linear and nn.Linear(channels, channels) or nn.Conv2d(channels, channels, 1)
  self.transformer_blocks = nn.ModuleList {}
  for _ = 1, depth do self.transformer_blocks:append(TransformerBlock(channels, heads, o)) end
  self.proj_out = zero(self.linear and nn.Linear(channels, channels) or nn.Conv2d(channels, channels, 1))
end

-- x [n, c, h, w], context [n, t, d], mask [n, t].
function Transformer:forward(x, context, mask)
  local h, shape = self.norm(x), x.shape
  local tokens = self.linear and self.proj_in(to_tokens(h)) or to_tokens(self.proj_in(h))
  for _, block in ipairs(self.transformer_blocks) do tokens = block(tokens, context, mask) end
  if self.linear then return x + to_map(self.proj_out(tokens), shape) end
  return x + self.proj_out(to_map(tokens, shape))
end

local Downsample = nn.module "Downsample"
M.Downsample = Downsample

function Downsample:init(channels) self.conv = nn.Conv2d(channels, channels, 3, { stride = 2, padding = 1 }) end

function Downsample:forward(x) return self.conv(x) end

local Upsample = nn.module "Upsample"
M.Upsample = Upsample

function Upsample:init(channels) self.conv = nn.Conv2d(channels, channels, 3, { padding = 1 }) end

-- size { h, w }: that of the map that comes beside it, which need not be twice x's where x's was odd.
function Upsample:forward(x, size)
  local same = size[1] == 2 * x.shape[3] and size[2] == 2 * x.shape[4]
  return self.conv(ty.interpolate(x, same and { scale = 2 } or { size = size }))
end

return M
