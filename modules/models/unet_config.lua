--- diffusers' config.json of UNet2DModel and UNet2DConditionModel as options of tycho.models.UNet, and back.
local ty = require "tycho"
local configs = require "tycho.models.config"

local M = {}
local none = configs.none

-- ---- reading ----

-- Fields of both classes.
local function shared(more)
  local fields = {
    sample_size = { "size", none }, center_input_sample = { "flag", false }, flip_sin_to_cos = { "flag", true },
    freq_shift = { "number", 0 }, time_embedding_type = { "text", "positional" },
    time_embedding_dim = { "count", none }, down_block_types = { "texts", none }, up_block_types = { "texts", none },
    layers_per_block = { "few_each", 2 }, downsample_padding = { "integer", 1 },
    mid_block_scale_factor = { "number", 1 }, dropout = { "share", 0 }, act_fn = { "text", "silu" },
    norm_num_groups = { "count", 32, null = false },
    norm_eps = { "epsilon", 1e-5 }, resnet_time_scale_shift = { "text", "default" },
    class_embed_type = { "text", none }, num_class_embeds = { "few", none }, null_label = { "integer", none },
  }
  for name, field in pairs(more) do fields[name] = field end
  return fields
end

local plain_fields = shared {
  in_channels = { "count", 3 }, out_channels = { "count", 3 },
  block_out_channels = { "counts", { 224, 448, 672, 896 } },
  mid_block_type = { "text", "UNetMidBlock2D", null = false }, downsample_type = { "text", "conv" },
  upsample_type = { "text", "conv" }, attention_head_dim = { "count", 8, null = false },
  attn_norm_num_groups = { "count", none }, add_attention = { "flag", true }, num_train_timesteps = { "count", none },
}

local conditional_fields = shared {
  in_channels = { "count", 4 }, out_channels = { "count", 4 },
  block_out_channels = { "counts", { 320, 640, 1280, 1280 } },
  mid_block_type = { "text", "UNetMidBlock2DCrossAttn", null = false }, only_cross_attention = { "flag_each", false },
  cross_attention_dim = { "count_each", 1280 }, transformer_layers_per_block = { "depths", 1 },
  reverse_transformer_layers_per_block = { "depths", none }, encoder_hid_dim = { "count", none },
  encoder_hid_dim_type = { "text", none }, attention_head_dim = { "count_each", 8 },
  num_attention_heads = { "count_each", none }, dual_cross_attention = { "flag", false },
  use_linear_projection = { "flag", false }, addition_embed_type = { "text", none },
  addition_time_embed_dim = { "count", none }, addition_embed_type_num_heads = { "count", 64 },
  upcast_attention = { "flag", false }, resnet_skip_time_act = { "flag", false },
  resnet_out_scale_factor = { "number", 1 }, time_embedding_act_fn = { "text", none },
  timestep_post_act = { "text", none }, time_cond_proj_dim = { "count", none }, conv_in_kernel = { "count", 3 },
  conv_out_kernel = { "count", 3 }, projection_class_embeddings_input_dim = { "count", none },
  attention_type = { "text", "default" }, class_embeddings_concat = { "flag", false },
  mid_block_only_cross_attention = { "flag", none }, cross_attention_norm = { "text", none },
}

-- Types of blocks: whether they have attention, and what changes the size after them.
local down_types = {
  DownBlock2D = { attention = false, resize = "conv" }, AttnDownBlock2D = { attention = "own", resize = "conv" },
  CrossAttnDownBlock2D = { attention = "cross", resize = "conv" },
  ResnetDownsampleBlock2D = { attention = false, resize = "resnet" },
}
local up_types = {
  UpBlock2D = { attention = false, resize = "conv" }, AttnUpBlock2D = { attention = "own", resize = "conv" },
  CrossAttnUpBlock2D = { attention = "cross", resize = "conv" },
  ResnetUpsampleBlock2D = { attention = false, resize = "resnet" },
}

local function fail(who, key, expected, got)
  error(("%s: config key '%s': expected %s, got %s"):format(who, key, expected, tostring(got)), 0)
end

-- The type of a level as the tables above have it. own: the attention that the class has.
local function block_type(who, key, types, name, own)
  local found = types[(name:gsub("^UNetRes", ""))]
  if found and (not found.attention or found.attention == own) then return found end
  local names = {}
  for known, t in pairs(types) do
    if not t.attention or t.attention == own then names[#names + 1] = known end
  end
  table.sort(names)
  return fail(who, key, table.concat(names, " or "), name .. ", which is not supported")
end

-- The value of a key for level i: the same for all, or of a list.
local function of_level(config, key, i)
  local value = config[key]
  if type(value) == "table" then return value[i] end
  return value
end

-- What both classes' configs say, as options; levels without attention. own: as in block_type().
local function read_shared(who, config, own)
  local channels = config.block_out_channels
  local count = #channels
  for _, key in ipairs { "down_block_types", "up_block_types", "layers_per_block", "attention_head_dim",
    "only_cross_attention", "cross_attention_dim", "transformer_layers_per_block" } do
    local list = config[key]
    if type(list) == "table" and #list ~= count then
      fail(who, key, ("as many as block_out_channels, %d"):format(count), #list)
    end
  end
  for _, key in ipairs { "down_block_types", "up_block_types" } do
    if not config[key] then fail(who, key, "a list of types of blocks", nil) end
  end
  configs.only(who, config, { act_fn = { "silu", "swish" }, time_embedding_type = "positional",
    mid_block_scale_factor = 1, resnet_time_scale_shift = { "default", "scale_shift" }, downsample_padding = { 0, 1 } })
  if not config.norm_num_groups then
    fail(who, "norm_num_groups", "a positive integer", "null, which is not supported")
  end
  local o = {
    in_channels = config.in_channels, out_channels = config.out_channels, centre = config.center_input_sample,
    sines_first = not config.flip_sin_to_cos, frequency_shift = config.freq_shift, levels = {},
    time_width = config.time_embedding_dim, groups = config.norm_num_groups, eps = config.norm_eps,
    dropout = config.dropout, scale_shift = config.resnet_time_scale_shift == "scale_shift",
    down_padding = config.downsample_padding,
  }
  local ups, blocks = {}, 0
  for i = 1, count do
    local down = block_type(who, "down_block_types", down_types, config.down_block_types[i], own)
    ups[i] = block_type(who, "up_block_types", up_types, config.up_block_types[count + 1 - i], own)
    o.levels[i] = { channels = channels[i], layers = of_level(config, "layers_per_block", i), down = down.resize,
      up = ups[i].resize, attention = down.attention, up_attention = ups[i].attention }
    if channels[i] % o.groups ~= 0 then
      fail(who, "block_out_channels", ("multiples of norm_num_groups %d"):format(o.groups), channels[i])
    end
    blocks = blocks + o.levels[i].layers
  end
  if blocks > 1000 then fail(who, "layers_per_block", "at most 1000 residual blocks", blocks) end -- of a hostile file
  local kind = config.class_embed_type
  if kind == nil and config.num_class_embeds then
    o.null_class = config.null_label ~= nil
    o.classes = config.num_class_embeds - (o.null_class and 1 or 0)
  elseif kind ~= nil then
    configs.only(who, config, { class_embed_type = { "timestep", "identity", "projection", "simple_projection" } })
    o.class_kind = ({ timestep = "time", identity = "embedding", projection = "projection",
      simple_projection = "linear" })[kind]
    o.class_width = config.projection_class_embeddings_input_dim
    if kind:find "projection" and not o.class_width then
      fail(who, "projection_class_embeddings_input_dim", "a positive integer with class_embed_type " .. kind, nil)
    end
  end
  return o
end

-- config without the nulls that stand for something: given has them.
local function restored(config, fields)
  for key, field in pairs(fields) do
    if field.null ~= nil and config[key] == field.null then config[key] = nil end
  end
  return config
end

--- The options of a UNet2DModel.
---@param given table
---@return table options
---@return table config  as it was read
function M.read_plain(given)
  local who = "UNet2DModel"
  local config = configs.read(who, given, plain_fields)
  configs.only(who, config, { downsample_type = { "conv", "resnet" }, upsample_type = { "conv", "resnet" },
    class_embed_type = { false, "timestep", "identity" } })
  local o = read_shared(who, config, "own")
  local width = config.attention_head_dim
  local function attention(channels, groups)
    if width and channels % width ~= 0 then
      fail(who, "attention_head_dim", ("a divisor of the %d channels of a level"):format(channels), width)
    end
    return { heads = width and channels // width or 1, groups = groups }
  end
  for _, level in ipairs(o.levels) do
    if level.attention then level.attention, level.down = attention(level.channels), config.downsample_type end
    if level.up_attention then level.up_attention, level.up = attention(level.channels), config.upsample_type end
  end
  o.middle_blocks = config.mid_block_type and 2 or 0
  -- diffusers has no norm there beside scale and shift, unless it is asked for.
  local groups = config.attn_norm_num_groups or not o.scale_shift and o.groups
  local last = o.levels[#o.levels].channels
  o.middle = o.middle_blocks > 0 and config.add_attention and attention(last, groups)
  return o, restored(config, plain_fields)
end

-- The width of the context, which must be the same for all levels.
local function context_of(who, config)
  local widths = config.cross_attention_dim
  if type(widths) ~= "table" then return widths end
  for _, width in ipairs(widths) do
    if width ~= widths[1] then fail(who, "cross_attention_dim", "the same width for all levels", "others") end
  end
  return widths[1]
end

-- The options of a UNet2DConditionModel, or of a class whose config has such fields too.
local function read_conditional(who, given, fields)
  local config = configs.read(who, given, fields)
  -- Half precision in attention sums in f32 anyway: upcast_attention asks for nothing.
  configs.only(who, config, { dual_cross_attention = false, encoder_hid_dim = false, encoder_hid_dim_type = false,
    num_attention_heads = false, resnet_skip_time_act = false, resnet_out_scale_factor = 1,
    time_embedding_act_fn = false, timestep_post_act = false, attention_type = "default",
    class_embeddings_concat = false, cross_attention_norm = false, addition_embed_type = { false, "text_time" },
    mid_block_type = { false, "UNetMidBlock2DCrossAttn", "UNetMidBlock2D" } })
  local o = read_shared(who, config, "cross")
  local count = #o.levels
  local function attention(i, depth)
    return { heads = of_level(config, "attention_head_dim", i), depth = depth,
      cross_only = of_level(config, "only_cross_attention", i) }
  end
  local reverse, blocks = config.reverse_transformer_layers_per_block, 0
  for i, level in ipairs(o.levels) do
    local depth = of_level(config, "transformer_layers_per_block", i)
    local up = depth
    if type(reverse) == "table" then up = reverse[count + 1 - i] end
    for _, each in ipairs { depth, up } do
      blocks = blocks + level.layers * math.max(table.unpack(type(each) == "table" and each or { each }))
    end
    if blocks > 10000 then fail(who, "transformer_layers_per_block", "at most 10000 blocks", blocks) end
    if level.attention then level.attention = attention(i, depth) end
    if level.up_attention then
      if type(up) == "table" and #up ~= level.layers + 1 then
        fail(who, "reverse_transformer_layers_per_block", ("%d depths for level %d"):format(level.layers + 1, i), #up)
      end
      level.up_attention = attention(i, up)
    end
  end
  o.context, o.linear_projection = context_of(who, config), config.use_linear_projection
  o.middle_blocks = not config.mid_block_type and 0 or config.mid_block_type == "UNetMidBlock2D" and 1 or 2
  o.middle = o.middle_blocks == 2 and attention(count, of_level(config, "transformer_layers_per_block", count))
  if o.middle then o.middle.cross_only = false end
  o.in_kernel, o.out_kernel = config.conv_in_kernel, config.conv_out_kernel
  o.guidance_width = config.time_cond_proj_dim
  if config.addition_embed_type then
    o.added_width, o.sizes_width = config.projection_class_embeddings_input_dim, config.addition_time_embed_dim
    if not o.added_width or not o.sizes_width then
      fail(who, not o.added_width and "projection_class_embeddings_input_dim" or "addition_time_embed_dim",
        "a positive integer with addition_embed_type text_time", nil)
    end
  end
  return o, restored(config, fields)
end

--- The options of a UNet2DConditionModel.
---@param given table
---@return table options
---@return table config  as it was read
function M.read_conditional(given) return read_conditional("UNet2DConditionModel", given, conditional_fields) end

-- What a ControlNetModel's config has of its own, and what it lacks of a U-Net's.
local control_fields = {
  conditioning_channels = { "count", 3 }, controlnet_conditioning_channel_order = { "text", "rgb" },
  conditioning_embedding_out_channels = { "counts", { 16, 32, 96, 256 } }, global_pool_conditions = { "flag", false },
}
local no_control = { "sample_size", "center_input_sample", "out_channels", "time_embedding_type", "time_embedding_dim",
  "dropout", "up_block_types", "reverse_transformer_layers_per_block", "dual_cross_attention", "resnet_skip_time_act",
  "resnet_out_scale_factor", "time_embedding_act_fn", "timestep_post_act", "time_cond_proj_dim", "conv_in_kernel",
  "conv_out_kernel", "attention_type", "class_embeddings_concat", "mid_block_only_cross_attention",
  "cross_attention_norm", "null_label" }

--- The options of the U-Net that a ControlNetModel is the beginning of.
---@param given table
---@return table options
---@return table config  as it was read
function M.read_control(given)
  local who = "ControlNetModel"
  local fields, full = {}, {}
  for key, field in pairs(conditional_fields) do fields[key] = field end
  for key, field in pairs(control_fields) do fields[key] = field end
  for key, value in pairs(type(given) == "table" and given or {}) do full[key] = value end
  if type(full.down_block_types) == "table" then -- it has no way up, and a U-Net's is the mirror of its way down
    full.up_block_types = {}
    for i, name in ipairs(full.down_block_types) do
      full.up_block_types[#full.down_block_types + 1 - i] = tostring(name):gsub("Down", "Up", 1)
    end
  end
  local o, config = read_conditional(who, type(given) == "table" and full or given, fields)
  configs.only(who, config, { controlnet_conditioning_channel_order = { "rgb", "bgr" } })
  for _, key in ipairs(no_control) do config[key] = nil end
  config.given = given
  return o, config
end

-- ---- writing ----

local function cannot(text, ...) error(("UNet: cannot be written as diffusers has it: " .. text):format(...), 0) end

-- The one value that fn(level, i) has for all levels (nil where it has none), or an error.
local function same_for_all(o, what, fn)
  local value
  for i, level in ipairs(o.levels) do
    local own = fn(level, i)
    if value ~= nil and own ~= nil and own ~= value then
      cannot("levels[%d]: expected %s %s as in the levels before, got %s", i, what, tostring(value), tostring(own))
    end
    if value == nil then value = own end
  end
  return value
end

local function types_of(o, names)
  local count, down, up = #o.levels, {}, {}
  for i, level in ipairs(o.levels) do
    down[i] = level.attention and names.down or level.down == "resnet" and "ResnetDownsampleBlock2D" or "DownBlock2D"
    up[count + 1 - i] = level.up_attention and names.up or level.up == "resnet" and "ResnetUpsampleBlock2D"
      or "UpBlock2D"
  end
  return down, up
end

local class_kinds = { time = "timestep", embedding = "identity", projection = "projection",
  linear = "simple_projection" }

local function write_shared(o, names)
  local channels = {}
  for i, level in ipairs(o.levels) do channels[i] = level.channels end
  local down, up = types_of(o, names)
  local config = {
    in_channels = o.in_channels, out_channels = o.out_channels, center_input_sample = o.centre,
    flip_sin_to_cos = not o.sines_first, freq_shift = o.frequency_shift, time_embedding_dim = o.time_width,
    down_block_types = down, up_block_types = up, block_out_channels = channels,
    downsample_padding = o.down_padding, dropout = o.dropout, act_fn = "silu", norm_num_groups = o.groups,
    norm_eps = o.eps, resnet_time_scale_shift = o.scale_shift and "scale_shift" or "default",
    class_embed_type = class_kinds[o.class_kind],
  }
  if o.class_kind == "table" and o.classes > 0 then
    config.num_class_embeds = o.null_class and o.classes + 1 or o.classes
    config.null_label = o.null_class and o.classes or nil -- diffusers does not know it, and says so
  end
  return config
end

-- What attention of a level is like to write it: fn(attention) of both ways, which must be the same.
local function both(level, i, what, fn)
  local down, up = level.attention and fn(level.attention), level.up_attention and fn(level.up_attention)
  if level.attention and level.up_attention and down ~= up then
    cannot("levels[%d]: expected %s of attention and up_attention to be the same, got %s and %s", i, what,
      tostring(down), tostring(up))
  end
  if level.attention then return down end
  if level.up_attention then return up end
  return nil
end

local function write_plain(o)
  local config = write_shared(o, { down = "AttnDownBlock2D", up = "AttnUpBlock2D" })
  config._class_name = "UNet2DModel"
  config.layers_per_block = same_for_all(o, "layers", function(level) return level.layers end)
  for _, way in ipairs { { "attention", "down" }, { "up_attention", "up" } } do
    config[way[2] .. "sample_type"] = same_for_all(o, way[2], function(level, i)
      return level[way[1]] and i > (way[2] == "up" and 1 or 0) and level[way[2]] or nil
    end)
  end
  config.attention_head_dim = same_for_all(o, "a width of heads of", function(level, i)
    local heads = both(level, i, "heads", function(a) return a.heads end)
    return heads and level.channels // heads
  end)
  for i, level in ipairs(o.levels) do
    local groups = both(level, i, "groups", function(a) return a.groups end)
    if groups ~= nil and groups ~= o.groups then
      cannot("levels[%d]: expected attention with groups = %d, got %s", i, o.groups, tostring(groups))
    end
  end
  if o.middle_blocks == 0 then
    config.mid_block_type = ty.io.null
  elseif o.middle_blocks == 2 then
    config.mid_block_type, config.add_attention = "UNetMidBlock2D", o.middle ~= false
  else
    cannot("middle_blocks: expected 0 or 2, got %d", o.middle_blocks)
  end
  if o.middle_blocks > 0 and o.middle then
    local width = o.levels[#o.levels].channels // o.middle.heads
    config.attention_head_dim = config.attention_head_dim or width
    if width ~= config.attention_head_dim then
      cannot("middle: expected a width of heads of %d as in the levels, got %d", config.attention_head_dim, width)
    end
    if not o.middle.groups and not o.scale_shift then
      cannot "middle: expected groups without scale_shift, got false"
    end
    config.attn_norm_num_groups = o.middle.groups or nil
  end
  if o.class_kind == "projection" or o.class_kind == "linear" then
    cannot("class_kind: expected table, time or embedding without a context, got %s", o.class_kind)
  end
  if o.added_width > 0 or o.guidance_width or o.in_kernel ~= 3 or o.out_kernel ~= 3 then
    cannot "added_width, guidance_width, in_kernel, out_kernel: expected the defaults without a context"
  end
  return config
end

local function write_conditional(o)
  local count = #o.levels
  local config = write_shared(o, { down = "CrossAttnDownBlock2D", up = "CrossAttnUpBlock2D" })
  config._class_name = "UNet2DConditionModel"
  config.cross_attention_dim, config.use_linear_projection = o.context, o.linear_projection
  config.conv_in_kernel, config.conv_out_kernel, config.time_cond_proj_dim = o.in_kernel, o.out_kernel, o.guidance_width
  local layers, heads, depths, ups, only, asymmetric = {}, {}, {}, {}, {}, false
  for i, level in ipairs(o.levels) do
    for key, way in pairs { down = "attention", up = "up_attention" } do
      if level[way] and level[key] ~= "conv" then cannot("levels[%d].%s: expected conv, got %s", i, key, level[key]) end
    end
    layers[i] = level.layers
    heads[i] = both(level, i, "heads", function(a) return a.heads end)
      or i == count and o.middle and o.middle.heads or 1
    only[i] = both(level, i, "cross_only", function(a) return a.cross_only end) or false
    depths[i] = level.attention and level.attention.depth or i == count and o.middle and o.middle.depth or 1
    local up = level.up_attention and level.up_attention.depth or depths[i]
    ups[count + 1 - i] = up
    asymmetric = asymmetric or type(up) == "table" or up ~= depths[i] or type(depths[i]) == "table"
  end
  config.layers_per_block, config.attention_head_dim, config.only_cross_attention = layers, heads, only
  config.transformer_layers_per_block = depths
  if asymmetric then config.reverse_transformer_layers_per_block = ups end
  if o.middle_blocks == 2 and o.middle then
    config.mid_block_type = "UNetMidBlock2DCrossAttn"
    local depth = depths[count]
    depth = type(depth) == "table" and depth[1] or depth
    local own = type(o.middle.depth) == "table" and o.middle.depth[1] or o.middle.depth
    if o.middle.heads ~= heads[count] or own ~= depth or o.middle.cross_only then
      cannot("middle: expected heads = %d and depth = %d as in the last level, got %d and %d", heads[count], depth,
        o.middle.heads, own)
    end
  elseif o.middle_blocks == 1 and not o.middle then
    config.mid_block_type = "UNetMidBlock2D"
  elseif o.middle_blocks == 0 then
    config.mid_block_type = ty.io.null
  else
    cannot("middle_blocks: expected 2 with attention, 1 without, or 0, got %d %s", o.middle_blocks,
      o.middle and "with attention" or "without")
  end
  config.projection_class_embeddings_input_dim = o.class_width
  if o.added_width > 0 then
    if o.class_width and o.class_width ~= o.added_width then
      cannot("class_width: expected that of added_width, %d, got %d", o.added_width, o.class_width)
    end
    config.addition_embed_type, config.addition_time_embed_dim = "text_time", o.sizes_width
    config.projection_class_embeddings_input_dim = o.added_width
  end
  return config
end

--- The config.json for options of tycho.models.UNet, as it has read them: of a UNet2DConditionModel where there is a
-- context. What diffusers' classes do not have is an error.
---@param options table
---@return table config
function M.write(options) return (options.context > 0 and write_conditional or write_plain)(options) end

return M
