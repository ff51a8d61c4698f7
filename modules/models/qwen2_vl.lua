--- Qwen2-VL and Qwen2.5-VL: a language model that sees pictures in as many tokens as they have pixels for, with
-- positions of three kinds, by time, row and column (M-RoPE). Wang et al. 2024, "Qwen2-VL: Enhancing Vision-Language
-- Model's Perception of the World at Any Resolution"; Bai et al. 2025, "Qwen2.5-VL Technical Report". Names and
-- config.json of transformers' Qwen2VLForConditionalGeneration and Qwen2_5_VLForConditionalGeneration.
--
--     local patches, grids = hub.processor("path/of/qwen2-vl") { "photo.jpg" }
--     local logits = model(tokens, { pictures = patches, sizes = grids })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local LanguageModel = require "tycho.models.model"
local Qwen2 = require "tycho.models.qwen2"
local Vision = require("tycho.models.qwen2_vision").Vision

local nn = ty.nn
local none = configs.none

local fields = {
  text_config = { "table", none }, vision_config = { "table", {} }, image_token_id = { "integer", 151655 },
  video_token_id = { "integer", 151656 }, vision_start_token_id = { "integer", 151652 },
  vision_end_token_id = { "integer", 151653 }, vision_token_id = { "integer", none },
  tie_word_embeddings = { "flag", false },
}

-- Keys of the text that a flat config.json has beside the others.
local text_keys = {}
for name in ([[vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
  head_dim hidden_act max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters attention_dropout
  use_sliding_window sliding_window max_window_layers layer_types]]):gmatch "%S+" do text_keys[name] = true end

-- The config of the text, and how many pairs of a head turn by each axis.
local function text_of(who, config, given)
  local text = {}
  for key, value in pairs(config.text_config or given) do
    if config.text_config or text_keys[key] then text[key] = value end
  end
  local rope = {}
  for _, part in ipairs { text.rope_scaling or {}, text.rope_parameters or {} } do
    for key, value in pairs(type(part) == "table" and part or {}) do rope[key] = value end
  end
  local sections = rope.mrope_section
  rope.mrope_section = nil
  if rope.type == "mrope" then rope.type = nil end
  if rope.rope_type == "mrope" then rope.rope_type = nil end
  rope.rope_theta = rope.rope_theta or text.rope_theta or 1e6
  text.rope_scaling, text.rope_theta, text.rope_parameters = nil, nil, rope
  text.model_type, text.tie_word_embeddings = config.model_type and "qwen2", config.tie_word_embeddings
  text.mrope_section, text.rope_type = nil, nil
  local sum = 0
  for i = 1, 3 do
    local count = type(sections) == "table" and #sections == 3 and math.tointeger(sections[i])
    if not count or count < 1 then
      error(("%s: rope setting 'mrope_section': expected three positive integers, got %s"):format(who,
        arguments.describe(sections)), 0)
    end
    sum = sum + count
  end
  return text, { math.tointeger(sections[1]), math.tointeger(sections[2]), math.tointeger(sections[3]) }, sum
end

--- Qwen2-VL: Qwen2 with a network of pictures of any size.
---@class Qwen2VL: LanguageModel
---@field language_model Qwen2
---@field visual QwenVision
local Qwen2VL = nn.module("Qwen2VL", LanguageModel)
Qwen2VL.model_type, Qwen2VL.architecture = "qwen2_vl", "Qwen2VLForConditionalGeneration"
Qwen2VL.family, Qwen2VL.windowed = "Qwen2VL", false

--- config: the keys of config.json: those of Qwen2, at its top or in text_config, with rope_scaling.mrope_section (how
-- many pairs of a head turn by time, by row and by column), vision_config, image_token_id (151655).
---@param given table
function Qwen2VL:init(given)
  arguments.expect(self.family, "config", given, "a table")
  local own = {}
  for key, value in pairs(given) do
    if given.text_config or not text_keys[key] then own[key] = value end
  end
  local config = configs.read(self.family, own, fields)
  local text, sections, pairs_of = text_of(self.family, config, given)
  self.config, self.sections = config, sections
  self.language_model = Qwen2(text)
  self.visual = Vision(self.family, config.vision_config, self.windowed)
  local head, out = self.language_model.config.head_dim, self.visual.config.out
  if pairs_of ~= head // 2 then
    error(("%s: rope setting 'mrope_section': expected half of a head's %d in all, got %d"):format(self.family, head,
      pairs_of), 0)
  elseif out ~= self.language_model.config.hidden_size then
    error(("%s: vision_config: its features of %d must be as wide as the text's hidden_size %d"):format(self.family,
      out, self.language_model.config.hidden_size), 0)
  end
  configs.with_parts(config, { text_config = self.language_model.config, vision_config = self.visual.published })
  config.given = given
  self.context = self.language_model.context
  if config.tie_word_embeddings then self.ignored_too = { "^language_model%.lm_head%.weight$" } end
end

function Qwen2VL.from_config(class, config, state)
  return class(configs.untied(config, state, { "lm_head.weight" }, { "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight" }))
end

--- Renames one published name to ours: those of all versions of transformers.
function Qwen2VL:rename(name)
  name = name:gsub("^model%.visual%.", "visual."):gsub("^model%.language_model%.", "model.")
  if name:find "^visual%." then return name end
  return "language_model." .. name
end

--- The tensors by published names.
function Qwen2VL:published_state()
  local state = {}
  for name, t in pairs(self:state_dict()) do state[(name:gsub("^language_model%.", ""))] = t end
  return state
end

--- The token that stands for a feature of a picture.
---@return integer
function Qwen2VL:image_token() return self.config.image_token_id end

--- How many features the language model gets of each picture.
---@param pictures Tensor
---@param sizes Tensor
---@return integer[]
function Qwen2VL:feature_counts(pictures, sizes)
  arguments.expect(self.family .. ":feature_counts", "pictures", pictures, "a tensor")
  local counts, merge = {}, self.visual.config.spatial_merge_size
  for i, grid in ipairs(self.visual:grids(self.family, sizes)) do
    counts[i] = grid[1] * (grid[2] // merge) * (grid[3] // merge)
  end
  return counts
end

--- What the language model gets of pictures, one after another, [1, features, hidden]. pictures [patches, values] and
-- the option sizes, i64 [m, 3], frames, rows and columns of patches, are what hub.processor's processor gives.
---@param pictures Tensor
---@param options? {sizes: Tensor, checkpoint?: boolean}
---@return Tensor features
function Qwen2VL:picture_features(pictures, options)
  local o = arguments.read(self.family .. ":picture_features", options, { sizes = arguments.none, checkpoint = false },
    { sizes = "a tensor" })
  return self.visual(pictures, self.visual:grids(self.family, o.sizes), o.checkpoint):unsqueeze(0)
end

-- ---- positions ----

-- By time, row and column, i64 [3, n, t], of the tokens, and the position behind each row, i64 [n, 1]. Text counts on
-- by one; a picture's features have the time at which it begins, and rows and columns from there on.
local function axes_of(self, tokens, mask, grids)
  local image, merge = self.config.image_token_id, self.visual.config.spatial_merge_size
  local seen, at = mask and mask:to("u8"):tolist(), 1
  local list, behind = { {}, {}, {} }, {}
  for i, row in ipairs(tokens:tolist()) do
    local axes, position, k = { {}, {}, {} }, 0, 1
    while k <= #row do
      if seen and seen[i][k] == 0 then
        axes[1][k], axes[2][k], axes[3][k] = 0, 0, 0
        k = k + 1
      elseif row[k] == image then
        local grid = grids[at]
        if not grid then
          arguments.fail("%s: sizes: expected one for each of the pictures in the text, got %d", self.family, #grids)
        end
        local rows, columns = grid[2] // merge, grid[3] // merge
        for p = 0, grid[1] * rows * columns - 1 do
          axes[1][k] = position + p // (rows * columns)
          axes[2][k] = position + p // columns % rows
          axes[3][k] = position + p % columns
          k = k + 1
        end
        position, at = position + math.max(rows, columns), at + 1
      else
        axes[1][k], axes[2][k], axes[3][k] = position, position, position
        position, k = position + 1, k + 1
      end
    end
    for a = 1, 3 do
      if #axes[a] ~= #row then
        arguments.fail("%s: tokens: expected as many image tokens as picture %d has features", self.family, at - 1)
      end
      list[a][i] = axes[a]
    end
    behind[i] = { position }
  end
  local function integers(x) return ty.tensor(x, { dtype = "i64" }):to { device = tokens.device } end
  return integers(list), integers(behind)
end

-- Of a call whose tokens are text alone and follow those in the cache.
local function axes_after(tokens, behind)
  local n, t = tokens.shape[1], tokens.shape[2]
  local axes = behind + ty.arange(t, { device = tokens.device })
  return axes:unsqueeze(0):expand(3, n, t), behind + t
end

-- The embeddings of tokens [n, t], those of image tokens replaced by the features of the pictures, in their order.
local function embed(self, tokens, options)
  local features = options.features or self:picture_features(options.pictures, { sizes = options.sizes,
    checkpoint = options.checkpoint })
  local is_image = tokens:eq(self.config.image_token_id)
  if options.mask then is_image = is_image:logical_and(options.mask:to "bool") end
  local places, count = is_image:to("i64"):sum():item(), features.shape[1] * features.shape[2]
  if places ~= count then
    arguments.fail("%s: pictures: expected as many features as the %d image tokens, got %d", self.family, places, count)
  end
  local x = self.language_model.model.embed_tokens(tokens:masked_fill(is_image, 0))
  if places == 0 then return x end
  local order = (is_image:flatten():to("i64"):cumsum(0) - 1):clamp(0):reshape(tokens.shape)
  return ty.where(is_image:unsqueeze(-1), ty.embedding(features:flatten(0, 1), order):to(x.dtype), x)
end

--- Hidden states after the last norm, as Decoder:hidden() has them. options besides: pictures, sizes.
---@return Tensor hidden
function Qwen2VL:hidden(tokens, options)
  layers.check_tokens(self.family, tokens, options)
  options = options or {}
  for _, name in ipairs { "cu_seqlens", "positions" } do
    if options[name] then error(("%s: %s is not an option of this family"):format(self.family, name), 0) end
  end
  local mask, cache = options.mask, options.cache
  if mask and mask.ndim ~= 2 then error(self.family .. ": mask: expected bool or i64 [n, t]", 0) end
  local axes, behind
  local seen = options.pictures or options.features
  if cache and cache.past > 0 then
    if seen then error(self.family .. ": pictures come with the first call of a cache", 0) end
    axes, behind = axes_after(tokens, cache.behind)
  else
    local grids = seen and self.visual:grids(self.family, options.sizes) or {}
    axes, behind = axes_of(self, tokens, mask, grids)
  end
  if cache then cache.behind = ty.unscoped(behind.detach, behind) end
  local with = { axes = axes, sections = self.sections }
  for key, value in pairs(options) do with[key] = value end
  if seen then with.embeddings = embed(self, tokens, options) end
  return self.language_model:hidden(tokens, with)
end

--- Logits of hidden states.
function Qwen2VL:head(hidden) return self.language_model:head(hidden) end

--- tokens i64 [n, t] to logits [n, t, vocabulary]. options: pictures [patches, values] and sizes i64 [m, 3] (frames,
-- rows and columns of patches), one picture after another for the image tokens of all rows; cache, mask (bool or i64
-- [n, t], 0: padding, on the left), checkpoint. With a cache, pictures come with the first call.
---@param tokens Tensor
---@param options? table
---@return Tensor logits
function Qwen2VL:forward(tokens, options) return self:head(self:hidden(tokens, options)) end

--- A cache for forward().
---@return KVCache
function Qwen2VL:cache(options) return self.language_model:cache(options) end

--- As LanguageModel:loss(), with the options of forward(); without targets, image tokens are none.
---@param tokens Tensor
---@param targets? Tensor
---@return Tensor loss
function Qwen2VL:loss(tokens, targets, options)
  layers.check_tokens(self.family, tokens, options)
  arguments.expect(self.family .. ":loss", "targets", targets, "a tensor or nil")
  if not targets then targets = layers.targets_of_seen(tokens, self.config.image_token_id, options) end
  return LanguageModel.loss(self, tokens, targets, options)
end

function Qwen2VL:tied() return self.language_model:tied() end

--- As LanguageModel:untie().
function Qwen2VL:untie()
  self.language_model:untie()
  self.config.tie_word_embeddings = false
  rawset(self, "ignored_too", nil)
  return self
end

function Qwen2VL:end_tokens() return self.config.eos_token_id or self.language_model:end_tokens() end

--- As LanguageModel:start(), with the pictures of all rows.
function Qwen2VL:start(tokens, mask, cache, pictures, sizes)
  if pictures then pictures = pictures:to { device = tokens.device } end
  return tokens, mask, function(input, given)
    local seen = pictures
    pictures = nil -- they are in the cache after the first call
    return self:head(self:hidden(input, { cache = cache, mask = given, last = 1, pictures = seen,
      sizes = seen and sizes }):select(1, -1))
  end
end

--- The keys of config.json, with those of both parts.
function Qwen2VL:published_config()
  local config = LanguageModel.published_config(self)
  config.vision_config = {}
  for key, value in pairs(self.visual.published) do
    if key ~= "given" and key ~= "unknown" then config.vision_config[key] = value end
  end
  local text = self.language_model:published_config()
  text.model_type, text.architectures = self.model_type .. "_text", nil
  text.rope_scaling, text.rope_theta = nil, nil
  local rope = { mrope_section = ty.io.array { table.unpack(self.sections) } }
  for key, value in pairs(text.rope_parameters or {}) do rope[key] = value end
  rope.rope_type = rope.rope_type or "default"
  text.rope_parameters = rope
  for key in pairs(text_keys) do config[key] = nil end
  config.text_config = text
  return config
end

--- Qwen2.5-VL: Qwen2-VL whose network of pictures attends in windows in most layers.
---@class Qwen2_5_VL: Qwen2VL
local Qwen25 = nn.module("Qwen2_5_VL", Qwen2VL)
Qwen25.model_type, Qwen25.architecture = "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"
Qwen25.family, Qwen25.windowed = "Qwen2_5_VL", true

--- config: the keys of config.json, as Qwen2VL has them.
---@param given table
function Qwen25:init(given) Qwen2VL.init(self, given) end

return { Qwen2VL = Qwen2VL, Qwen2_5_VL = Qwen25 }
