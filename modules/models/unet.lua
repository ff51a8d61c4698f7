--- A U-Net for diffusion, conditioned on time and class, with the parameter names of diffusers' UNet2DModel.
-- Ronneberger et al. 2015; Ho et al. 2020; scale and shift by the time embedding: Dhariwal and Nichol 2021.
local ty = require "tycho"
local embedding = require "tycho.diffusion.embedding"

local nn = ty.nn

local function zero(module)
  nn.init.zeros(module.weight)
  nn.init.zeros(module.bias)
  return module
end

-- norm, silu, conv, time, norm, silu, conv, and the input beside.
local ResnetBlock = nn.module "ResnetBlock"

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

-- Self-attention over positions, with the input beside.
local Attention = nn.module "Attention"

function Attention:init(channels, o)
  self.heads = o.heads
  self.group_norm = nn.GroupNorm(o.groups, channels)
  self.to_q = nn.Linear(channels, channels)
  self.to_k = nn.Linear(channels, channels)
  self.to_v = nn.Linear(channels, channels)
  self.to_out = nn.ModuleList { zero(nn.Linear(channels, channels)) }
end

function Attention:forward(x)
  local shape = x.shape
  local n, c, h, w = shape[1], shape[2], shape[3], shape[4]
  local tokens = self.group_norm(x):flatten(2):transpose(1, 2) -- [n, hw, c]
  local function heads(t) return t:reshape(n, h * w, self.heads, c // self.heads):transpose(1, 2) end
  local q, k, v = self.to_q(tokens), self.to_k(tokens), self.to_v(tokens)
  local y = ty.scaled_dot_product_attention(heads(q), heads(k), heads(v))
  y = self.to_out[1](y:transpose(1, 2):reshape(n, h * w, c))
  return x + y:transpose(1, 2):reshape(n, c, h, w)
end

local Downsample = nn.module "Downsample"

function Downsample:init(channels) self.conv = nn.Conv2d(channels, channels, 3, { stride = 2, padding = 1 }) end

function Downsample:forward(x) return self.conv(x) end

local Upsample = nn.module "Upsample"

function Upsample:init(channels) self.conv = nn.Conv2d(channels, channels, 3, { padding = 1 }) end

function Upsample:forward(x) return self.conv(ty.interpolate(x, { scale = 2 })) end

-- Residual blocks of one resolution, with attention after each where wanted.
local Level = nn.module "Level"

function Level:init(inputs, outputs, time, attention, o)
  self.resnets = nn.ModuleList {}
  if attention then self.attentions = nn.ModuleList {} end
  for _, width in ipairs(inputs) do
    self.resnets:append(ResnetBlock(width, outputs, time, o))
    if attention then self.attentions:append(Attention(outputs, o)) end
  end
end

function Level:run(i, x, time)
  x = self.resnets[i](x, time)
  return self.attentions and self.attentions[i](x) or x
end

local Middle = nn.module "Middle"

function Middle:init(channels, time, o)
  self.attentions = nn.ModuleList { Attention(channels, o) }
  self.resnets = nn.ModuleList { ResnetBlock(channels, channels, time, o), ResnetBlock(channels, channels, time, o) }
end

function Middle:forward(x, time)
  return self.resnets[2](self.attentions[1](self.resnets[1](x, time)), time)
end

local TimeEmbedding = nn.module "TimeEmbedding"

function TimeEmbedding:init(inputs, width)
  self.linear_1 = nn.Linear(inputs, width)
  self.linear_2 = nn.Linear(width, width)
end

function TimeEmbedding:forward(x) return self.linear_2(self.linear_1(x):silu()) end

---@class UNet: Module
---@field null_label? integer  the label that means "any class"
local UNet = nn.module "UNet"

--- options: in_channels (1), out_channels (1), channels ({ 32, 64 }: width of each resolution), layers (1: blocks per
-- resolution), attention ({ false, true }), classes (0: unconditional), groups (8), heads (4), dropout (0), scale_shift
-- (true).
function UNet:init(options)
  local o = nn.options("UNet", options, { in_channels = 1, out_channels = 1, channels = { 32, 64 }, layers = 1,
    attention = { false, true }, classes = 0, groups = 8, heads = 4, dropout = 0, scale_shift = true })
  local first, levels = o.channels[1], #o.channels
  local time = 4 * first
  self.levels, self.layers = levels, o.layers
  self:buffer("frequencies", embedding.frequencies(first), { persistent = false })
  self.conv_in = nn.Conv2d(o.in_channels, first, 3, { padding = 1 })
  self.time_embedding = TimeEmbedding(first, time)
  if o.classes > 0 then
    self.class_embedding = nn.Embedding(o.classes + 1, time)
    self.null_label = o.classes
  end

  self.down_blocks = nn.ModuleList {}
  local skips, width = { first }, first
  for i, channels in ipairs(o.channels) do
    local inputs = {}
    for layer = 1, o.layers do
      inputs[layer] = layer == 1 and width or channels
      skips[#skips + 1] = channels
    end
    local level = Level(inputs, channels, time, o.attention[i], o)
    if i < levels then
      level.downsamplers = nn.ModuleList { Downsample(channels) }
      skips[#skips + 1] = channels
    end
    self.down_blocks:append(level)
    width = channels
  end

  self.mid_block = Middle(width, time, o)

  self.up_blocks = nn.ModuleList {}
  for i = levels, 1, -1 do
    local channels, inputs = o.channels[i], {}
    for layer = 1, o.layers + 1 do
      inputs[layer] = (layer == 1 and width or channels) + table.remove(skips)
    end
    local level = Level(inputs, channels, time, o.attention[i], o)
    if i > 1 then level.upsamplers = nn.ModuleList { Upsample(channels) } end
    self.up_blocks:append(level)
    width = channels
  end

  self.conv_norm_out = nn.GroupNorm(o.groups, first, { activation = "silu" })
  self.conv_out = zero(nn.Conv2d(first, o.out_channels, 3, { padding = 1 }))
end

--- x [n, in_channels, h, w], t [n] from 0 to 1000, labels i64 [n] (with classes): [n, out_channels, h, w].
function UNet:forward(x, t, labels)
  local time = self.time_embedding(embedding.sinusoidal(t, self.frequencies))
  if self.class_embedding then
    if not labels then error("UNet: this model needs labels (null_label for any class)", 2) end
    time = time + self.class_embedding(labels)
  end
  time = time:silu()
  local h = self.conv_in(x)
  local skips = { h }
  for _, level in ipairs(self.down_blocks) do
    for i = 1, self.layers do
      h = level:run(i, h, time)
      skips[#skips + 1] = h
    end
    if level.downsamplers then
      h = level.downsamplers[1](h)
      skips[#skips + 1] = h
    end
  end
  h = self.mid_block(h, time)
  for _, level in ipairs(self.up_blocks) do
    for i = 1, self.layers + 1 do h = level:run(i, ty.concat({ h, table.remove(skips) }, 1), time) end
    if level.upsamplers then h = level.upsamplers[1](h) end
  end
  return self.conv_out(self.conv_norm_out(h))
end

return UNet
