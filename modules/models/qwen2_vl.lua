--- Qwen2-VL and Qwen2.5-VL: a language model that sees pictures and clips in as many tokens as they have pixels for,
-- with positions of three kinds, by time, row and column (M-RoPE). Wang et al. 2024, "Qwen2-VL: Enhancing
-- Vision-Language Model's Perception of the World at Any Resolution"; Bai et al. 2025, "Qwen2.5-VL Technical Report".
-- Names and config.json of transformers' Qwen2VLForConditionalGeneration and Qwen2_5_VLForConditionalGeneration.
--
--     local patches, grids = hub.processor("path/of/qwen2-vl") { "photo.jpg" }
--     local logits = model(tokens, { pictures = patches, sizes = grids })
--     local clips, times, seconds = hub.video_processor("path/of/qwen2-vl")({ frames }, { fps = 2 })
--     logits = model(others, { videos = clips, video_sizes = times, video_seconds = seconds })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local positions = require "tycho.models.qwen2_axes"
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

--- The token that stands for a feature of a clip.
---@return integer
function Qwen2VL:video_token() return self.config.video_token_id end

--- How many features the language model gets of each picture or clip.
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

--- What the language model gets of pictures or clips, one after another, [1, features, hidden]. pictures [patches,
-- values] and the option sizes, i64 [m, 3], frames, rows and columns of patches, are what the processor of
-- hub.processor or hub.video_processor gives.
---@param pictures Tensor
---@param options? {sizes: Tensor, checkpoint?: boolean}
---@return Tensor features
function Qwen2VL:picture_features(pictures, options)
  local o = arguments.read(self.family .. ":picture_features", options, { sizes = arguments.none, checkpoint = false },
    { sizes = "a tensor" })
  return self.visual(pictures, self.visual:grids(self.family, o.sizes), o.checkpoint):unsqueeze(0)
end

-- ---- what is seen among the words ----

-- How many positions lie between the times of clips: by the seconds between them and the config's tokens_per_second;
-- without video_seconds a second lies between them, as in transformers.
local function intervals_of(self, count, seconds)
  local list, rate = {}, self.visual.published.tokens_per_second
  if seconds ~= nil then
    if not ty.is_tensor(seconds) or seconds.ndim ~= 1 or seconds.shape[1] ~= count
      or not seconds:is_floating_point() then
      arguments.fail("%s: video_seconds: expected numbers [%d], one for each clip, got %s", self.family, count,
        arguments.describe(seconds))
    end
    for i, value in ipairs(seconds:tolist()) do
      if not (value >= 0 and value <= 1e6) then
        arguments.fail("%s: video_seconds: expected numbers in [0, 1e6], got %s of clip %d", self.family, value, i)
      end
      list[i] = value * rate
    end
  else
    for i = 1, count do list[i] = rate end
  end
  return list
end

-- What a call sees, by the token that stands for it: pictures and clips, as tycho.models.qwen2_axes has them, and their
-- features.
local function kinds_of(self, options)
  local pictures, clips = options.pictures or options.features, options.videos
  local function grids(there, sizes, name)
    return there and self.visual:grids(self.family, sizes, name) or {}
  end
  local times = grids(clips, options.video_sizes, "video_sizes")
  local intervals = clips and self.windowed and intervals_of(self, #times, options.video_seconds) or nil
  return {
    [self.config.image_token_id] = { what = "picture", sizes = "sizes", given = pictures, features = options.features,
      grids = grids(pictures, options.sizes, "sizes") },
    [self.config.video_token_id] = { what = "clip", sizes = "video_sizes", given = clips, intervals = intervals,
      grids = times },
  }
end

-- x [n, t, hidden] with features where tokens stand for them, in their order. at: bool [n, t].
local function placed(self, x, at, features, kind)
  local places, count = at:to("i64"):sum():item(), features.shape[1] * features.shape[2]
  if places ~= count then
    arguments.fail("%s: %s: expected as many features as the %d %s tokens, got %d", self.family,
      kind.what == "clip" and "videos" or "pictures", places, kind.what == "clip" and "video" or "image", count)
  end
  if places == 0 then return x end
  local order = (at:flatten():to("i64"):cumsum(0) - 1):clamp(0):reshape(at.shape)
  return ty.where(at:unsqueeze(-1), ty.embedding(features:flatten(0, 1), order):to(x.dtype), x)
end

-- The embeddings of tokens [n, t], those of image and video tokens replaced by features.
local function embed(self, tokens, kinds, options)
  local places, words = {}, tokens
  for token, kind in pairs(kinds) do
    if kind.given then
      local at = tokens:eq(token)
      if options.mask then at = at:logical_and(options.mask:to "bool") end
      places[#places + 1] = { at = at, kind = kind }
      words = words:masked_fill(at, 0)
    end
  end
  local x = self.language_model.model.embed_tokens(words)
  for _, place in ipairs(places) do
    local kind = place.kind
    local features = kind.features or self.visual(kind.given, kind.grids, options.checkpoint):unsqueeze(0)
    x = placed(self, x, place.at, features, kind)
  end
  return x
end

--- Hidden states after the last norm, as Decoder:hidden() has them. options besides: those of forward().
---@return Tensor hidden
function Qwen2VL:hidden(tokens, options)
  layers.check_tokens(self.family, tokens, options)
  options = options or {}
  for _, name in ipairs { "cu_seqlens", "positions" } do
    if options[name] then error(("%s: %s is not an option of this family"):format(self.family, name), 0) end
  end
  local mask, cache = options.mask, options.cache
  if mask and mask.ndim ~= 2 then error(self.family .. ": mask: expected bool or i64 [n, t]", 0) end
  local axes, behind, kinds
  local seen = options.pictures or options.features or options.videos
  if cache and cache.past > 0 then
    if seen then error(self.family .. ": pictures come with the first call of a cache", 0) end
    axes, behind = positions.after(tokens, cache.behind)
  else
    kinds = kinds_of(self, options)
    axes, behind = positions.of(self.family, tokens, mask, self.visual.config.spatial_merge_size, kinds)
  end
  if cache then cache.behind = ty.unscoped(behind.detach, behind) end
  local with = { axes = axes, sections = self.sections }
  for key, value in pairs(options) do with[key] = value end
  if seen then with.embeddings = embed(self, tokens, kinds, options) end
  return self.language_model:hidden(tokens, with)
end

--- Logits of hidden states.
function Qwen2VL:head(hidden) return self.language_model:head(hidden) end

--- tokens i64 [n, t] to logits [n, t, vocabulary]. options: pictures [patches, values] and sizes i64 [m, 3] (frames,
-- rows and columns of patches), one picture after another for the image tokens of all rows; videos [patches, values],
-- video_sizes i64 [m, 3] (times of two frames, rows, columns) and, of Qwen2.5-VL, video_seconds [m] (from one time to
-- the next; 1), one clip after another for the video tokens of all rows; cache, mask (bool or i64 [n, t], 0: padding,
-- on the left), checkpoint. With a cache, pictures and clips come with the first call.
---@param tokens Tensor
---@param options? table
---@return Tensor logits
function Qwen2VL:forward(tokens, options) return self:head(self:hidden(tokens, options)) end

--- A cache for forward().
---@return KVCache
function Qwen2VL:cache(options) return self.language_model:cache(options) end

--- As LanguageModel:loss(), with the options of forward(); without targets, image and video tokens are none.
---@param tokens Tensor
---@param targets? Tensor
---@return Tensor loss
function Qwen2VL:loss(tokens, targets, options)
  layers.check_tokens(self.family, tokens, options)
  arguments.expect(self.family .. ":loss", "targets", targets, "a tensor or nil")
  if not targets then
    targets = layers.targets_of_seen(tokens, { self.config.image_token_id, self.config.video_token_id }, options)
  end
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

--- As LanguageModel:start(), with the pictures of all rows, and the clips: { videos, video_sizes, video_seconds }.
function Qwen2VL:start(tokens, mask, cache, pictures, sizes, clips)
  local seen = { pictures = pictures, sizes = pictures and sizes }
  for key, value in pairs(clips or {}) do seen[key] = value end
  for _, key in ipairs { "pictures", "videos" } do
    seen[key] = seen[key] and seen[key]:to { device = tokens.device }
  end
  return tokens, mask, function(input, given)
    local options = seen
    seen = {} -- they are in the cache after the first call
    options.cache, options.mask, options.last = cache, given, 1
    return self:head(self:hidden(input, options):select(1, -1))
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
