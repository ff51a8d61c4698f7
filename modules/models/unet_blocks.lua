--- The parts of the U-Net of diffusion and of its autoencoders, with the parameter names of diffusers: residual blocks,
-- self-attention, the transformer that attends to a context, changes of size, levels of all these, the middle.
local ty = require "tycho"

local nn = ty.nn
local M = {}

local function zero(module)
  nn.init.zeros(module.weight)
  nn.init.zeros(module.bias)
  return module
end
M.zero = zero

-- norm, silu, conv, time, norm, silu, conv, and the input beside. time: the width of its embedding; nil: there is none.
-- o: groups, eps, dropout, scale_shift. resize: a function that makes maps of another size of the input and what goes
-- into the first convolution.
local ResnetBlock = nn.module "ResnetBlock"
M.ResnetBlock = ResnetBlock

function ResnetBlock:init(inputs, outputs, time, o, resize)
  self.resize = resize
  self.norm1 = nn.GroupNorm(o.groups, inputs, { eps = o.eps, activation = "silu" })
  self.conv1 = nn.Conv2d(inputs, outputs, 3, { padding = 1 })
  self.scale_shift = time and o.scale_shift
  if time then self.time_emb_proj = nn.Linear(time, self.scale_shift and 2 * outputs or outputs) end
  self.norm2 = nn.GroupNorm(o.groups, outputs, { eps = o.eps, activation = self.scale_shift and "none" or "silu" })
  self.dropout = nn.Dropout(o.dropout)
  self.conv2 = zero(nn.Conv2d(outputs, outputs, 3, { padding = 1 }))
  if inputs ~= outputs then self.conv_shortcut = nn.Conv2d(inputs, outputs, 1) end
end

-- x [n, c, h, w]; time [n, time], already through silu, or nil.
function ResnetBlock:forward(x, time)
  local h = self.norm1(x)
  if self.resize then x, h = self.resize(x), self.resize(h) end
  h = self.conv1(h)
  local e = self.time_emb_proj and self.time_emb_proj(time):unsqueeze(-1):unsqueeze(-1)
  if self.scale_shift then
    local scale, shift = e:chunk(2, 1)
    h = (self.norm2(h) * (scale + 1) + shift):silu()
  else
    h = self.norm2(e and h + e or h)
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

-- Self-attention over positions, with the input beside. groups: of the norm before it; nil: there is none.
local Attention = nn.module "Attention"
M.Attention = Attention

function Attention:init(channels, heads, groups, eps)
  self.heads = heads
  if groups then self.group_norm = nn.GroupNorm(groups, channels, { eps = eps }) end
  projections(self, channels, channels, true)
  zero(self.to_out[1])
end

function Attention:forward(x)
  local tokens = to_tokens(self.group_norm and self.group_norm(x) or x)
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

function Gated:forward(x) return ty.glu(self.proj(x), nil, "gelu") end

local FeedForward = nn.module "FeedForward"

function FeedForward:init(width, dropout)
  self.net = nn.Sequential(Gated(width, 4 * width), nn.Dropout(dropout), nn.Linear(4 * width, width))
end

function FeedForward:forward(x) return self.net(x) end

local TransformerBlock = nn.module "BasicTransformerBlock"

function TransformerBlock:init(channels, heads, cross_only, o)
  self.cross_only = cross_only
  self.norm1 = nn.LayerNorm(channels)
  self.attn1 = TokenAttention(channels, heads, cross_only and o.context or channels)
  self.norm2 = nn.LayerNorm(channels)
  self.attn2 = TokenAttention(channels, heads, o.context)
  self.norm3 = nn.LayerNorm(channels)
  self.ff = FeedForward(channels, o.dropout)
end

function TransformerBlock:forward(x, context, mask)
  local h = self.norm1(x)
  x = x + self.attn1(h, self.cross_only and context or h)
  x = x + self.attn2(self.norm2(x), context, mask)
  return x + self.ff(self.norm3(x))
end

-- Transformer blocks over the positions of a map, each attending to the map (cross_only: to the context instead) and to
-- the context, with the input beside. o: groups, context (its width), linear_projection, dropout.
-- Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models".
local Transformer = nn.module "Transformer2D"
M.Transformer = Transformer

function Transformer:init(channels, heads, depth, cross_only, o)
  self.norm = nn.GroupNorm(o.groups, channels, { eps = 1e-6 })
  self.linear = o.linear_projection
  self.proj_in = self.linear and nn.Linear(channels, channels) or nn.Conv2d(channels, channels, 1)
  self.transformer_blocks = nn.ModuleList {}
  for _ = 1, depth do self.transformer_blocks:append(TransformerBlock(channels, heads, cross_only, o)) end
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

-- Two linear layers and a SiLU between, from the embedding of a time (or of what else says how to draw) to what the
-- blocks get. guidance: the width of an embedding that is added to the input; nil: there is none.
local TimeEmbedding = nn.module "TimestepEmbedding"
M.TimeEmbedding = TimeEmbedding

function TimeEmbedding:init(inputs, width, guidance)
  self.linear_1 = nn.Linear(inputs, width)
  if guidance then self.cond_proj = nn.Linear(guidance, inputs, { bias = false }) end
  self.linear_2 = nn.Linear(width, width)
end

function TimeEmbedding:forward(x, guidance)
  if guidance then x = x + self.cond_proj(guidance) end
  return self.linear_2(self.linear_1(x, nil, "silu"))
end

-- Half the size. padding 1: on all sides; 0: on the right and below alone, as autoencoders have it.
local Downsample = nn.module "Downsample"
M.Downsample = Downsample

function Downsample:init(channels, padding)
  self.conv = nn.Conv2d(channels, channels, 3, { stride = 2, padding = padding or 1 })
  self.corner = padding == 0
end

function Downsample:forward(x) return self.conv(self.corner and x:pad { 0, 1, 0, 1 } or x) end

local Upsample = nn.module "Upsample"
M.Upsample = Upsample

function Upsample:init(channels) self.conv = nn.Conv2d(channels, channels, 3, { padding = 1 }) end

-- size { h, w }: that of the map that comes beside it, which need not be twice x's where x's was odd; nil: twice x's.
function Upsample:forward(x, size)
  local same = not size or size[1] == 2 * x.shape[3] and size[2] == 2 * x.shape[4]
  return self.conv(ty.interpolate(x, same and { scale = 2 } or { size = size }))
end

--- Half the size, and twice, without weights: what a residual block resizes by.
function M.halve(x) return ty.avg_pool2d(x, { 2, 2 }) end
function M.double(x) return ty.interpolate(x, { scale = 2 }) end

-- Residual blocks of one resolution, inputs[i] channels into the i-th, and after each the module of attention(i), or
-- nothing (nil).
local Level = nn.module "Level"
M.Level = Level

function Level:init(inputs, outputs, time, attention, o)
  self.resnets = nn.ModuleList {}
  if attention then self.attentions = nn.ModuleList {} end
  for i, width in ipairs(inputs) do
    self.resnets:append(ResnetBlock(width, outputs, time, o))
    if attention then self.attentions:append(attention(i)) end
  end
end

--- Residual block i and the attention after it.
function Level:run(i, x, time, context, mask)
  x = self.resnets[i](x, time)
  return self.attentions and self.attentions[i](x, context, mask) or x
end

--- The change of size after them, x itself where there is none. size: as in Upsample.
function Level:resize(x, time, size)
  local resize = self.downsamplers or self.upsamplers
  if not resize then return x end
  if resize[1].resize then return resize[1](x, time) end
  return resize[1](x, size)
end

--- All of it: the level of a network without a time and skip connections.
function Level:forward(x)
  for i = 1, #self.resnets do x = self:run(i, x) end
  return self:resize(x)
end

-- The middle: residual blocks, with the module `attention` (or nothing) after the first.
local Middle = nn.module "Middle"
M.Middle = Middle

function Middle:init(count, channels, time, attention, o)
  if attention then self.attentions = nn.ModuleList { attention } end
  self.resnets = nn.ModuleList {}
  for _ = 1, count do self.resnets:append(ResnetBlock(channels, channels, time, o)) end
end

function Middle:forward(x, time, context, mask)
  for i, resnet in ipairs(self.resnets) do
    x = resnet(x, time)
    if i == 1 and self.attentions then x = self.attentions[1](x, context, mask) end
  end
  return x
end

return M
