--- A U-Net for diffusion, conditioned on time, class and text, with the parameter names of diffusers' UNet2DModel and
-- (with a context) UNet2DConditionModel. Ronneberger et al. 2015; Ho et al. 2020; scale and shift by the time
-- embedding: Dhariwal and Nichol 2021; text by cross-attention: Rombach et al. 2022.
local ty = require "tycho"
local blocks = require "tycho.models.unet_blocks"

local nn = ty.nn

-- Attention of a level as { heads, depth }, or false. given: false, true or { heads =, head_width =, depth = }.
local function read_attention(where, given, channels, o)
  if not given then return false end
  local a = nn.options("UNet", given ~= true and given or nil, { heads = nn.none, head_width = nn.none, depth = 1 })
  local heads = a.heads or (a.head_width and channels // a.head_width) or o.heads
  if heads < 1 or channels % heads ~= 0 then
    error(("UNet: %s: expected heads that divide %d channels, got %d"):format(where, channels, heads), 4)
  end
  return { heads = heads, depth = a.depth }
end

-- The option `levels` as a list of { channels, layers, attention }.
local function read_levels(o)
  if type(o.levels) ~= "table" or #o.levels == 0 then
    error("UNet: levels: expected a list of numbers of channels or tables, got " .. tostring(o.levels), 4)
  end
  local result = {}
  for i, level in ipairs(o.levels) do
    if math.type(level) == "integer" then level = { channels = level } end
    local l = nn.options("UNet", level, { channels = nn.none, layers = o.layers, attention = false },
      { attention = "a boolean or a table" })
    local where = ("levels[%d]"):format(i)
    if math.type(l.channels) ~= "integer" or l.channels < 1 or l.channels % o.groups ~= 0 then
      error(("UNet: %s.channels: expected a multiple of the %d groups, got %s"):format(where, o.groups,
        tostring(l.channels)), 4)
    end
    l.attention = read_attention(where .. ".attention", l.attention, l.channels, o)
    result[i] = l
  end
  return result
end

-- Makes the attention of a level, for each of its residual blocks; nil where it has none.
local function attention_blocks(channels, attention, o)
  return attention and function()
    if o.context > 0 then return blocks.Transformer(channels, attention.heads, attention.depth, o) end
    return blocks.Attention(channels, attention.heads, o)
  end or nil
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

--- options: in_channels (1), out_channels (1);
-- levels ({ 32, { channels = 64, attention = true } }), one for each resolution: a number of channels, or a table of
--   channels, layers (residual blocks; that of the U-Net), attention (false; true; or { heads =, head_width =, depth =
--   } with depth blocks of a transformer where there is a context);
-- middle (true: attention in the middle, as in the last level where that has some; false; or a table as above);
-- layers (1) and heads (4) for levels that do not say; classes (0: not conditioned on a class);
-- context (0; the width of text embeddings: attention is then to the map and to the text);
-- linear_projection (false: 1x1 convolutions lead into the transformers, as in Stable Diffusion 1);
-- groups (8) and eps (1e-5) of the norms, dropout (0);
-- scale_shift (true: the time scales and shifts; false: it is added).
function UNet:init(options)
  local o = nn.options("UNet", options, { in_channels = 1, out_channels = 1,
    levels = { 32, { channels = 64, attention = true } }, middle = true, layers = 1, heads = 4, classes = 0,
    context = 0, linear_projection = false, groups = 8, eps = 1e-5, dropout = 0, scale_shift = true },
    { middle = "a boolean or a table", layers = "an integer in [1, 1024]", heads = "an integer >= 1" })
  local levels = read_levels(o)
  local first, last = levels[1].channels, levels[#levels]
  local time = 4 * first
  local middle = o.middle == true and last.attention or read_attention("middle", o.middle, last.channels, o)
  self.context = o.context
  self.time_proj = nn.Sinusoidal(first)
  self.conv_in = nn.Conv2d(o.in_channels, first, 3, { padding = 1 })
  self.time_embedding = TimeEmbedding(first, time)
  if o.classes > 0 then
    self.class_embedding = nn.Embedding(o.classes + 1, time)
    self.null_label = o.classes
  end

  self.down_blocks = nn.ModuleList {}
  local skips, width = { first }, first
  for i, l in ipairs(levels) do
    local inputs = {}
    for layer = 1, l.layers do
      inputs[layer] = layer == 1 and width or l.channels
      skips[#skips + 1] = l.channels
    end
    local level = blocks.Level(inputs, l.channels, time, attention_blocks(l.channels, l.attention, o), o)
    if i < #levels then
      level.downsamplers = nn.ModuleList { blocks.Downsample(l.channels) }
      skips[#skips + 1] = l.channels
    end
    self.down_blocks:append(level)
    width = l.channels
  end

  local attention = attention_blocks(width, middle, o)
  self.mid_block = blocks.Middle(2, width, time, attention and attention(), o)

  self.up_blocks = nn.ModuleList {}
  for i = #levels, 1, -1 do
    local l, inputs = levels[i], {}
    for layer = 1, l.layers + 1 do
      inputs[layer] = (layer == 1 and width or l.channels) + table.remove(skips)
    end
    local level = blocks.Level(inputs, l.channels, time, attention_blocks(l.channels, l.attention, o), o)
    if i > 1 then level.upsamplers = nn.ModuleList { blocks.Upsample(l.channels) } end
    self.up_blocks:append(level)
    width = l.channels
  end

  self.conv_norm_out = nn.GroupNorm(o.groups, first, { eps = o.eps, activation = "silu" })
  self.conv_out = blocks.zero(nn.Conv2d(first, o.out_channels, 3, { padding = 1 }))
end

-- Embeddings [n, t, context] and mask [n, t] (bool, true: seen) of the condition's text.
local function read_text(self, condition, n)
  if self.context == 0 then return nil, nil end
  local text = condition and condition.text
  local embeddings = text and text.embeddings
  if not embeddings then
    error(("UNet: condition.text.embeddings: expected [%d, tokens, %d], got nil"):format(n, self.context), 3)
  end
  local shape = embeddings.shape
  if #shape ~= 3 or shape[1] ~= n or shape[3] ~= self.context then
    error(("UNet: condition.text.embeddings: expected [%d, tokens, %d], got [%s]"):format(n, self.context,
      table.concat(shape, ", ")), 3)
  end
  return embeddings, text.mask
end

--- x [n, in_channels, h, w], t [n] from 0 to 1000: [n, out_channels, h, w].
-- condition: labels (i64 [n]; null_label for any class), text = { embeddings [n, tokens, context], mask [n, tokens] }.
---@param x Tensor
---@param t Tensor
---@param condition? table
---@return Tensor
function UNet:forward(x, t, condition)
  local time = self.time_embedding(self.time_proj(t))
  if self.class_embedding then
    local labels = condition and condition.labels
    if not labels then error("UNet: condition.labels: expected i64 [n] (null_label for any class), got nil", 2) end
    time = time + self.class_embedding(labels)
  end
  local context, mask = read_text(self, condition, x.shape[1])
  time = time:silu()
  local h = self.conv_in(x)
  local skips = { h }
  for _, level in ipairs(self.down_blocks) do
    for i = 1, #level.resnets do
      h = level:run(i, h, time, context, mask)
      skips[#skips + 1] = h
    end
    if level.downsamplers then
      h = level.downsamplers[1](h)
      skips[#skips + 1] = h
    end
  end
  h = self.mid_block(h, time, context, mask)
  for _, level in ipairs(self.up_blocks) do
    for i = 1, #level.resnets do
      h = level:run(i, ty.concat({ h, table.remove(skips) }, 1), time, context, mask)
    end
    if level.upsamplers then
      local beside = skips[#skips].shape
      h = level.upsamplers[1](h, { beside[3], beside[4] })
    end
  end
  return self.conv_out(self.conv_norm_out(h))
end

return UNet
