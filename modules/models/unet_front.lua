--- What the U-Net and the networks that control it share: the options, what is made of time, class, text and sizes, and
-- the way down with the middle. Parameter names are those of diffusers.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.unet_blocks"

local nn = ty.nn
local M = {}

-- ---- options ----

-- Attention of a level: its options with the number of heads, or false. given: false, true or a table.
local function read_attention(where, given, channels, o)
  if not given then return false end
  local a = nn.options("UNet", given ~= true and given or nil, { heads = nn.none, head_width = nn.none, depth = 1,
    cross_only = false, groups = o.groups }, { depth = "an integer >= 0 or a list of integers >= 0",
    groups = "an integer >= 1 or a boolean" })
  a.heads = a.heads or (a.head_width and channels // a.head_width) or o.heads
  if a.heads < 1 or channels % a.heads ~= 0 then
    arguments.fail("UNet: %s: expected heads that divide %d channels, got %d", where, channels, a.heads)
  end
  return a
end

local resizes = '"conv" or "resnet"'
local level_kinds = { attention = "a boolean or a table", up_attention = "a boolean or a table", down = resizes,
  up = resizes, layers = "an integer in [1, 1024]" }

-- The option `levels` as a list of { channels, layers, attention, up_attention, down, up }.
local function read_levels(o)
  if type(o.levels) ~= "table" or #o.levels == 0 then
    arguments.fail("UNet: levels: expected a list of numbers of channels or tables, got %s", tostring(o.levels))
  end
  local result = {}
  for i, level in ipairs(o.levels) do
    if math.type(level) == "integer" then level = { channels = level } end
    local l = nn.options("UNet", level, { channels = nn.none, layers = o.layers, attention = false,
      up_attention = nn.none, down = "conv", up = "conv" }, level_kinds)
    local where = ("levels[%d]"):format(i)
    if math.type(l.channels) ~= "integer" or l.channels < 1 or l.channels % o.groups ~= 0 then
      arguments.fail("UNet: %s.channels: expected a multiple of the %d groups, got %s", where, o.groups,
        tostring(l.channels))
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

local size = "an integer >= 1"
local whole = "an integer >= 0"
local kinds = { middle = "a boolean or a table", middle_blocks = "an integer in [0, 1024]",
  layers = "an integer in [1, 1024]", heads = size, groups = size, in_channels = size, out_channels = size,
  classes = whole, context = whole, eps = "a finite number >= 0", dropout = "a number in [0, 1]",
  down_padding = "an integer in [0, 1]", time_width = size, in_kernel = size, out_kernel = size,
  class_kind = '"table" or "time" or "embedding" or "projection" or "linear"', class_width = size,
  added_width = whole, sizes_width = size, guidance_width = size }

--- The options of a U-Net, as UNet:init() says them, with levels and middle read.
---@param options? table
---@return table
function M.options(options)
  local o = nn.options("UNet", options, { in_channels = 1, out_channels = 1,
    levels = { 32, { channels = 64, attention = true } }, middle = true, middle_blocks = 2, layers = 1, heads = 4,
    classes = 0, null_class = true, class_kind = "table", class_width = nn.none, context = 0, linear_projection = false,
    added_width = 0, sizes_width = 256, guidance_width = nn.none, groups = 8, eps = 1e-5, dropout = 0,
    scale_shift = true, sines_first = false, frequency_shift = 0, time_width = nn.none, down_padding = 1,
    in_kernel = 3, out_kernel = 3, centre = false }, kinds)
  o.levels = read_levels(o)
  local last = o.levels[#o.levels]
  o.middle = o.middle == true and last.attention or read_attention("middle", o.middle, last.channels, o)
  return o
end

-- ---- construction ----

--- Gives a network what it has up to the middle, of options that were read. Returns the channels of the maps that the
-- way up gets beside it, first the largest, and the width of the embedded time.
---@param self Module
---@param o table
---@return integer[] skips
---@return integer time
function M.build(self, o)
  local levels, first = o.levels, o.levels[1].channels
  local time = o.time_width or 4 * first
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
    local attention = attention_blocks(width, o.middle, o)
    self.mid_block = blocks.Middle(o.middle_blocks, width, time, attention and attention(1), o)
  end
  return skips, time
end

M.resizer, M.attention_blocks = resizer, attention_blocks

-- ---- what a condition says ----

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
M.embed, M.text = embed, read_text

--- The way down and through the middle, of what conv_in made: what comes out, and the maps on the way.
---@return Tensor h
---@return Tensor[] skips
function M.descend(self, h, time, context, mask)
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
  return h, skips
end

return M
