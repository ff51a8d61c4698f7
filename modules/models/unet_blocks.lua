--- The parts of the U-Net of diffusion and of its autoencoders, with the parameter names of diffusers: residual blocks,
-- self-attention, the transformer that attends to a context, changes of size, levels of all these, the middle.
local ty = require "tycho"

local has_hooks = require("tycho.nn.module").has_hooks
local nn = ty.nn
local M = {}

-- Whether maps may be given back early: nobody looks at them, neither gradients nor hooks of modules.
local function unseen() return not ty.is_grad_enabled() and not has_hooks() end

-- Without gradients, what a part of the network needs is given back at its end, not when the collector comes by: maps
-- are most of what lies beside the weights.
---@param fn fun(): Tensor
---@return Tensor
local function part(fn)
  if unseen() then return ty.scope(fn) end
  return fn()
end
M.part = part

--- Without gradients, a map that nothing needs any longer is given back at once, unless it is one of `others` as well:
-- a technique may have put a block there that returns what it got.
---@param map Tensor
---@param ... Tensor  others
local function discard(map, ...)
  if not unseen() then return end
  for i = 1, select("#", ...) do
    if rawequal(map, (select(i, ...))) then return end
  end
  ty.discard(map)
end
M.discard = discard

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

-- The second norm of h, with the time, through silu.
local function timed(self, h, time)
  local e = self.time_emb_proj and self.time_emb_proj(time):unsqueeze(-1):unsqueeze(-1)
  if not self.scale_shift then return self.norm2(e and h + e or h) end
  local scale, shift = e:chunk(2, 1)
  return (self.norm2(h) * (scale + 1) + shift):silu()
end

local function resnet(self, x, time)
  local h = part(function()
    local normed = self.norm1(x)
    return self.conv1(self.resize and self.resize(normed) or normed)
  end)
  local y = part(function() return self.conv2(self.dropout(timed(self, h, time))) end)
  discard(h, y)
  if self.resize then x = self.resize(x) end
  return (self.conv_shortcut and self.conv_shortcut(x) or x) + y
end

-- x [n, c, h, w]; time [n, time], already through silu, or nil.
function ResnetBlock:forward(x, time) return part(function() return resnet(self, x, time) end) end

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
  return part(function()
    local y = part(function()
      local tokens = to_tokens(self.group_norm and self.group_norm(x) or x)
      return attend(self.to_q(tokens), self.to_k(tokens), self.to_v(tokens), self.heads)
    end)
    return x + to_map(self.to_out[1](y), x.shape)
  end)
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
  self.inner = 8 * width
  self.net = nn.Sequential(Gated(width, 4 * width), nn.Dropout(dropout), nn.Linear(4 * width, width))
end

-- Without gradients as many tokens at once as fit into so many bytes of the inner layer: for all tokens of a large map
-- this is the largest tensor of a network, eight times its input, and tokens do not know of each other.
FeedForward.at_once = 32 << 20

-- x [n, t, width].
function FeedForward:forward(x)
  local n, t, width = table.unpack(x.shape)
  local pieces = math.min(t, math.ceil(self.inner / width * x:nbytes() / self.at_once))
  if not unseen() or n * t == 0 or pieces <= 1 then return self.net(x) end
  local list, step = {}, (t + pieces - 1) // pieces
  for first = 0, t - 1, step do
    list[#list + 1] = part(function() return self.net(x:narrow(1, first, math.min(step, t - first))) end)
  end
  return ty.concat(list, 1)
end

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
  return part(function()
    local y = part(function()
      local h = self.norm1(x)
      return x + self.attn1(h, self.cross_only and context or h)
    end)
    local z = part(function() return y + self.attn2(self.norm2(y), context, mask) end)
    discard(y, z)
    return z + self.ff(self.norm3(z))
  end)
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
  return part(function()
    local tokens = part(function()
      local h = self.norm(x)
      return self.linear and self.proj_in(to_tokens(h)) or to_tokens(self.proj_in(h))
    end)
    for _, block in ipairs(self.transformer_blocks) do
      local before = tokens
      tokens = block(before, context, mask)
      discard(before, tokens)
    end
    if self.linear then return x + to_map(self.proj_out(tokens), x.shape) end
    return x + self.proj_out(to_map(tokens, x.shape))
  end)
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

function Downsample:forward(x)
  return part(function() return self.conv(self.corner and x:pad { 0, 1, 0, 1 } or x) end)
end

local Upsample = nn.module "Upsample"
M.Upsample = Upsample

function Upsample:init(channels) self.conv = nn.Conv2d(channels, channels, 3, { padding = 1 }) end

-- size { h, w }: that of the map that comes beside it, which need not be twice x's where x's was odd; nil: twice x's.
function Upsample:forward(x, size)
  local same = not size or size[1] == 2 * x.shape[3] and size[2] == 2 * x.shape[4]
  return part(function() return self.conv(ty.interpolate(x, same and { scale = 2 } or { size = size })) end)
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

--- Residual block i and the attention after it. spent: nothing else needs x.
function Level:run(i, x, time, context, mask, spent)
  local h = self.resnets[i](x, time)
  if spent then discard(x, h) end
  if not self.attentions then return h end
  local y = self.attentions[i](h, context, mask)
  discard(h, y, not spent and x or nil)
  return y
end

--- The change of size after them, x itself where there is none. size: as in Upsample.
function Level:resize(x, time, size)
  local resize = self.downsamplers or self.upsamplers
  if not resize then return x end
  if resize[1].resize then return resize[1](x, time) end
  return resize[1](x, size)
end

--- All of it: the level of a network without a time and skip connections. spent: nothing else needs x.
function Level:forward(x, spent)
  local h = x
  for i = 1, #self.resnets do h = self:run(i, h, nil, nil, nil, spent or not rawequal(h, x)) end
  local y = self:resize(h)
  discard(h, y, not spent and x or nil)
  return y
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
  local function step(i)
    local y = self.resnets[i](x, time)
    return i == 1 and self.attentions and self.attentions[1](y, context, mask) or y
  end
  for i = 1, #self.resnets do x = part(function() return step(i) end) end
  return x
end

return M
