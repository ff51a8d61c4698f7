--- A U-Net for diffusion, conditioned on time, class and text, with the parameter names of diffusers' UNet2DModel and
-- (with a context) UNet2DConditionModel. Ronneberger et al. 2015; Ho et al. 2020; scale and shift by the time
-- embedding: Dhariwal and Nichol 2021; text by cross-attention: Rombach et al. 2022; sizes beside it: Podell et al.
-- 2023, "SDXL". The config.json of diffusers is read by unet_config.lua.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.unet_blocks"
local Component = require "tycho.models.component"

local nn = ty.nn

-- Attention of a level: its options with the number of heads, or false. given: false, true or a table.
local function read_attention(where, given, channels, o)
  if not given then return false end
  local a = nn.options("UNet", given ~= true and given or nil, { heads = nn.none, head_width = nn.none, depth = 1,
    cross_only = false, groups = o.groups }, { depth = "an integer >= 0 or a list of integers >= 0",
    groups = "an integer >= 1 or a boolean" })
  a.heads = a.heads or (a.head_width and channels // a.head_width) or o.heads
  if a.heads < 1 or channels % a.heads ~= 0 then
    error(("UNet: %s: expected heads that divide %d channels, got %d"):format(where, channels, a.heads), 4)
  end
  return a
end

local resizes = '"conv" or "resnet"'
local level_kinds = { attention = "a boolean or a table", up_attention = "a boolean or a table", down = resizes,
  up = resizes, layers = "an integer in [1, 1024]" }

-- The option `levels` as a list of { channels, layers, attention, up_attention, down, up }.
local function read_levels(o)
  if type(o.levels) ~= "table" or #o.levels == 0 then
    error("UNet: levels: expected a list of numbers of channels or tables, got " .. tostring(o.levels), 4)
  end
  local result = {}
  for i, level in ipairs(o.levels) do
    if math.type(level) == "integer" then level = { channels = level } end
    local l = nn.options("UNet", level, { channels = nn.none, layers = o.layers, attention = false,
      up_attention = nn.none, down = "conv", up = "conv" }, level_kinds)
    local where = ("levels[%d]"):format(i)
    if math.type(l.channels) ~= "integer" or l.channels < 1 or l.channels % o.groups ~= 0 then
      error(("UNet: %s.channels: expected a multiple of the %d groups, got %s"):format(where, o.groups,
        tostring(l.channels)), 4)
    end
    local up = l.up_attention
    if up == nil then up = l.attention end
    l.attention = read_attention(where .. ".attention", l.attention, l.channels, o)
    l.up_attention = read_attention(where .. ".up_attention", up, l.channels, o)
    result[i] = l
  end
  return result
end

-- Makes the attention after residual block i of a level; nil where it has none.
local function attention_blocks(channels, a, o)
  return a and function(i)
    if o.context == 0 then return blocks.Attention(channels, a.heads, a.groups, o.eps) end
    local depth = a.depth
    if type(depth) == "table" then
      depth = depth[i] or arguments.fail("UNet: attention.depth: expected one for each residual block, got %d", #depth)
    end
    return blocks.Transformer(channels, a.heads, depth, a.cross_only, o)
  end or nil
end

-- What changes the size after a level: a convolution, or a residual block.
local function resizer(kind, direction, channels, time, o)
  if kind == "resnet" then
    return blocks.ResnetBlock(channels, channels, time, o, direction == "down" and blocks.halve or blocks.double)
  end
  return direction == "down" and blocks.Downsample(channels, o.down_padding) or blocks.Upsample(channels)
end

---@class UNet: Component
---@field options table        those of the constructor, with the defaults; levels and middle as read above
---@field null_label? integer  the label that means "any class"
local UNet = nn.module("UNet", Component)

local size = "an integer >= 1"
local whole = "an integer >= 0"
local kinds = { middle = "a boolean or a table", middle_blocks = "an integer in [0, 1024]",
  layers = "an integer in [1, 1024]", heads = size, groups = size, in_channels = size, out_channels = size,
  classes = whole, context = whole, eps = "a finite number >= 0", dropout = "a number in [0, 1]",
  down_padding = "an integer in [0, 1]", time_width = size, in_kernel = size, out_kernel = size,
  class_kind = '"table" or "time" or "embedding" or "projection" or "linear"', class_width = size,
  added_width = whole, sizes_width = size, guidance_width = size }

--- options: in_channels (1), out_channels (1);
-- levels ({ 32, { channels = 64, attention = true } }), one for each resolution: a number of channels, or a table of
--   channels, layers (residual blocks; that of the U-Net), down and up ("conv", or "resnet": how the size changes after
--   it), attention (false; true; or { heads =, head_width =, depth =, cross_only =, groups = } with depth blocks of a
--   transformer where there is a context, a list of depths for each residual block; groups of the norm before attention
--   without a context, false: none) and up_attention (that on the way up; as on the way down);
-- middle (true: attention in the middle, as in the last level where that has some; false; or a table as above);
-- middle_blocks (2: residual blocks there; 0: no middle);
-- layers (1) and heads (4) for levels that do not say;
-- classes (0: not conditioned on a class) and null_class (true: one label more, null_label, for any class);
-- class_kind ("table": labels are numbers of classes; what else labels may be, and class_width: see unet_config.lua);
-- context (0; the width of text embeddings: attention is then to the map and to the text);
-- linear_projection (false: 1x1 convolutions lead into the transformers, as in Stable Diffusion 1);
-- added_width (0; as in SDXL, of pooled text and embedded sizes together) and sizes_width (256, of each size's);
-- guidance_width (none: of an embedding of guidance that is added to the time's, as in consistency models);
-- groups (8) and eps (1e-5) of the norms, dropout (0);
-- scale_shift (true: the time scales and shifts; false: it is added), sines_first (false) and frequency_shift (0) of
-- the time's waves, time_width (four times the first level's channels);
-- down_padding (1: on all sides; 0: on the right and below alone), in_kernel and out_kernel (3), centre (false: true
-- takes pictures of [0, 1]).
function UNet:init(options)
  local o = nn.options("UNet", options, { in_channels = 1, out_channels = 1,
    levels = { 32, { channels = 64, attention = true } }, middle = true, middle_blocks = 2, layers = 1, heads = 4,
    classes = 0, null_class = true, class_kind = "table", class_width = nn.none, context = 0, linear_projection = false,
    added_width = 0, sizes_width = 256, guidance_width = nn.none, groups = 8, eps = 1e-5, dropout = 0,
    scale_shift = true, sines_first = false, frequency_shift = 0, time_width = nn.none, down_padding = 1,
    in_kernel = 3, out_kernel = 3, centre = false }, kinds)
  local levels = read_levels(o)
  local first, last = levels[1].channels, levels[#levels]
  local time = o.time_width or 4 * first
  local middle = o.middle == true and last.attention or read_attention("middle", o.middle, last.channels, o)
  o.levels, o.middle = levels, middle
  rawset(self, "options", o)
  self.in_channels, self.context, self.added_width = o.in_channels, o.context, o.added_width
  self.class_kind, self.centre = o.class_kind, o.centre
  local waves = { sines_first = o.sines_first, shift = o.frequency_shift }
  self.time_proj = nn.Sinusoidal(first, waves)
  self.conv_in = nn.Conv2d(o.in_channels, first, o.in_kernel, { padding = (o.in_kernel - 1) // 2 })
  self.time_embedding = blocks.TimeEmbedding(first, time, o.guidance_width)
  if o.class_kind == "table" and o.classes > 0 then
    self.class_embedding = nn.Embedding(o.null_class and o.classes + 1 or o.classes, time)
    if o.null_class then self.null_label = o.classes end
  elseif o.class_kind == "time" then
    self.class_embedding = blocks.TimeEmbedding(first, time)
  elseif o.class_kind == "projection" then
    self.class_embedding = blocks.TimeEmbedding(o.class_width or time, time)
  elseif o.class_kind == "linear" then
    self.class_embedding = nn.Linear(o.class_width or time, time)
  end
  if o.added_width > 0 then
    self.add_time_proj = nn.Sinusoidal(o.sizes_width, waves)
    self.add_embedding = blocks.TimeEmbedding(o.added_width, time)
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
      level.downsamplers = nn.ModuleList { resizer(l.down, "down", l.channels, time, o) }
      skips[#skips + 1] = l.channels
    end
    self.down_blocks:append(level)
    width = l.channels
  end

  if o.middle_blocks > 0 then
    local attention = attention_blocks(width, middle, o)
    self.mid_block = blocks.Middle(o.middle_blocks, width, time, attention and attention(1), o)
  end

  self.up_blocks = nn.ModuleList {}
  for i = #levels, 1, -1 do
    local l, inputs = levels[i], {}
    for layer = 1, l.layers + 1 do
      inputs[layer] = (layer == 1 and width or l.channels) + table.remove(skips)
    end
    local level = blocks.Level(inputs, l.channels, time, attention_blocks(l.channels, l.up_attention, o), o)
    if i > 1 then level.upsamplers = nn.ModuleList { resizer(l.up, "up", l.channels, time, o) } end
    self.up_blocks:append(level)
    width = l.channels
  end

  self.conv_norm_out = nn.GroupNorm(o.groups, first, { eps = o.eps, activation = "silu" })
  self.conv_out = blocks.zero(nn.Conv2d(first, o.out_channels, o.out_kernel, { padding = (o.out_kernel - 1) // 2 }))
end

-- Raises an error about an entry of the condition.
local function expected(name, what, got)
  local shape = ty.is_tensor(got) and ("[%s]"):format(table.concat(got.shape, ", ")) or tostring(got)
  arguments.fail("UNet: condition.%s: expected %s, got %s", name, what, shape)
end

-- The condition's text; an empty table where there is none.
local function text_of(condition)
  local text = condition and condition.text
  return type(text) == "table" and text or {}
end

-- Embeddings [n, t, context] and mask [n, t] (bool, true: seen) of the condition's text.
local function read_text(self, condition, n)
  if self.context == 0 then return nil, nil end
  local text = text_of(condition)
  local embeddings = text.embeddings
  local shape = ty.is_tensor(embeddings) and embeddings.shape or {}
  if #shape ~= 3 or shape[1] ~= n or shape[3] ~= self.context then
    expected("text.embeddings", ("[%d, tokens, %d]"):format(n, self.context), embeddings)
  end
  return embeddings, text.mask
end

-- What the labels add to the embedding of the time: [n, time] or nil.
local function read_labels(self, condition, dtype)
  if not self.class_embedding and self.class_kind ~= "embedding" then return nil end
  local labels = condition and condition.labels
  if not labels then expected("labels", "i64 [n] (null_label for any class)", nil) end
  if self.class_kind == "embedding" then return labels end
  return self.class_embedding(self.class_kind == "time" and self.time_proj(labels):to(dtype) or labels)
end

-- What pooled text and sizes add to it.
local function read_added(self, condition, n, dtype)
  if self.added_width == 0 then return nil end
  local pooled, sizes = text_of(condition).pooled, condition and condition.sizes
  local each = self.add_time_proj.width
  local room = ty.is_tensor(pooled) and pooled.ndim == 2 and self.added_width - pooled.shape[2] or -1
  if room < 0 or room % each ~= 0 then
    expected("text.pooled", ("[%d, %d less %d for each size]"):format(n, self.added_width, each), pooled)
  end
  local count = room // each
  if not ty.is_tensor(sizes) or sizes.ndim ~= 2 or sizes.shape[2] ~= count then
    expected("sizes", ("[%d, %d] beside text.pooled [%s]"):format(n, count, table.concat(pooled.shape, ", ")), sizes)
  end
  local waves = self.add_time_proj(sizes:flatten()):reshape(n, -1):to(dtype)
  return self.add_embedding(ty.concat({ pooled, waves }, 1))
end

-- The embedding of time, guidance, class and sizes, through silu: [n, time].
local function embed(self, x, t, condition)
  local guidance = condition and condition.guidance
  if guidance and not self.time_embedding.cond_proj then
    expected("guidance", "nil (the model has no guidance_width)", guidance)
  end
  local time = self.time_embedding(self.time_proj(t):to(x.dtype), guidance)
  local labels = read_labels(self, condition, x.dtype)
  if labels then time = time + labels end
  local added = read_added(self, condition, x.shape[1], x.dtype)
  return (added and time + added or time):silu()
end

--- x [n, in_channels, h, w], t [n] from 0 to 1000: [n, out_channels, h, w].
-- condition: labels (i64 [n]; null_label for any class), text = { embeddings [n, tokens, context], mask [n, tokens],
-- pooled [n, width] }, sizes [n, count] (SDXL: height and width of the original, top and left of the crop, height and
-- width wanted), guidance [n, guidance_width].
---@param x Tensor
---@param t Tensor
---@param condition? table
---@return Tensor
function UNet:forward(x, t, condition)
  Component.check_inputs("UNet", self.in_channels, x, t, condition)
  local context, mask = read_text(self, condition, x.shape[1])
  local time = embed(self, x, t, condition)
  local h = self.conv_in(self.centre and x * 2 - 1 or x)
  local skips = { h }
  for _, level in ipairs(self.down_blocks) do
    for i = 1, #level.resnets do
      h = level:run(i, h, time, context, mask)
      skips[#skips + 1] = h
    end
    if level.downsamplers then
      h = level:resize(h, time)
      skips[#skips + 1] = h
    end
  end
  if self.mid_block then h = self.mid_block(h, time, context, mask) end
  for _, level in ipairs(self.up_blocks) do
    for i = 1, #level.resnets do
      h = level:run(i, ty.concat({ h, table.remove(skips) }, 1), time, context, mask)
    end
    local beside = skips[#skips]
    if beside then h = level:resize(h, time, { beside.shape[3], beside.shape[4] }) end
  end
  return self.conv_out(self.conv_norm_out(h))
end

--- The keys of diffusers' config.json for it.
function UNet:published_config() return require("tycho.models.unet_config").write(self.options) end

return UNet
