--- LLaVA: a language model that sees pictures. A tower of pictures gives a feature for each patch, a small network
-- takes these to the language model's width, and there they stand in the place of image tokens. Liu et al. 2023,
-- "Visual Instruction Tuning". Names and config.json of transformers' LlavaForConditionalGeneration.
--
--     local model = models.Llava { text_config = { model_type = "llama", ... },
--       vision_config = { model_type = "vit", ... }, image_token_index = 3 }
--     local logits = model(tokens, { pictures = pictures })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local LanguageModel = require "tycho.models.model"

local nn = ty.nn

-- By model_type: the networks of pictures, and the families of language models, whose parts have the same names.
local towers = {
  clip_vision_model = function() return require("tycho.models.clip").CLIPVisionModel end,
  siglip_vision_model = function() return require("tycho.models.siglip").SiglipVisionModel end,
  vit = function() return require("tycho.models.vit").ViT end,
  resnet_vision_model = function() return require "tycho.models.resnet_vision" end,
}
local texts = {
  llama = function() return require "tycho.models.llama" end,
  mistral = function() return require "tycho.models.mistral" end,
  mixtral = function() return require "tycho.models.mixtral" end,
  qwen2 = function() return require "tycho.models.qwen2" end,
  qwen3 = function() return require "tycho.models.qwen3" end,
}

-- What published files leave out of a text_config, as transformers fills it in.
local text_defaults = {
  llama = { vocab_size = 32000, hidden_size = 4096, intermediate_size = 11008, num_hidden_layers = 32,
    num_attention_heads = 32 },
  mistral = { vocab_size = 32000, hidden_size = 4096, intermediate_size = 14336, num_hidden_layers = 32,
    num_attention_heads = 32, num_key_value_heads = 8 },
}

local fields = {
  text_config = { "table", {} }, vision_config = { "table", {} }, image_token_index = { "integer", configs.none },
  image_token_id = { "integer", configs.none }, projector_hidden_act = { "text", "gelu" },
  vision_feature_select_strategy = { "text", "default" }, vision_feature_layer = { "layers", -2 },
  multimodal_projector_bias = { "flag", true }, image_seq_length = { "count", 576 },
  tie_word_embeddings = { "flag", false }, vocab_size = { "count", configs.none },
  ignore_index = { "integer", configs.none },
}

-- The class of a part, and its config with what was left out.
local function part(config, key, classes, default, more)
  local given, result = config[key], {}
  local kind = given.model_type
  if kind == nil or kind == ty.io.null then kind = default end
  if not classes[kind] then
    local names = {}
    for name in pairs(classes) do names[#names + 1] = name end
    table.sort(names)
    error(("Llava: %s: model_type '%s' is not supported; there are %s"):format(key, tostring(kind),
      table.concat(names, ", ")), 0)
  end
  for name, value in pairs(more and more[kind] or {}) do result[name] = value end
  for name, value in pairs(given) do
    if value ~= ty.io.null or result[name] == nil then result[name] = value end
  end
  -- A config that a script wrote is read strictly, also in its parts.
  result.model_type = config.model_type and kind or nil
  return classes[kind](), result
end

-- linear_1, the activation, linear_2.
local Projector = nn.module "LlavaProjector"

function Projector:init(config, inputs, width)
  local bias = config.multimodal_projector_bias
  self.linear_1 = layers.linear(inputs, width, bias)
  self.linear_2 = layers.linear(width, width, bias)
  self.activation = layers.activation("Llava", config, "projector_hidden_act")
end

function Projector:forward(x) return self.linear_2(layers.activated(self.linear_1, x, self.activation)) end

---@class Llava: LanguageModel
---@field language_model Decoder
---@field vision_tower Module
local Llava = nn.module("Llava", LanguageModel)
Llava.model_type, Llava.architecture = "llava", "LlavaForConditionalGeneration"
Llava.family, Llava.fields = "Llava", fields

--- config: the keys of config.json: text_config (of Llama, Mistral, Mixtral, Qwen2 or Qwen3) and vision_config (of
-- CLIPVisionModel, SiglipVisionModel, ViT or ResNetVisionModel), each with its model_type, image_token_index (32000),
-- vision_feature_layer (-2; a list: their features side by side), vision_feature_select_strategy ("default": without
-- the class; "full"), projector_hidden_act ("gelu"), multimodal_projector_bias (true). pooler (false): ViT's tower has
-- the layer over the class, which is not used but is in files of transformers.
---@param config table
---@param pooler? boolean
function Llava:init(config, pooler)
  config = configs.read(self.family, config, self.fields)
  configs.only(self.family, config, { vision_feature_select_strategy = { "default", "full" } })
  config.image_token_index = config.image_token_index or config.image_token_id or 32000
  config.image_token_id = nil
  local Text, text = part(config, "text_config", texts, "llama", text_defaults)
  local Tower, vision = part(config, "vision_config", towers, "clip_vision_model")
  text.tie_word_embeddings = config.tie_word_embeddings or text.tie_word_embeddings
  self.config = config
  self.language_model = Text(text)
  self.vision_tower = Tower(vision, pooler or false)
  configs.with_parts(config, { text_config = self.language_model.config, vision_config = self.vision_tower.config })
  config.tie_word_embeddings = self.language_model.config.tie_word_embeddings
  if config.tie_word_embeddings then self.ignored_too = { "^language_model%.lm_head%.weight$", "^lm_head%.weight$" } end
  self.context = self.language_model.context
  local chosen, count = config.vision_feature_layer, self.vision_tower.config.num_hidden_layers
  for _, layer in ipairs(type(chosen) == "table" and chosen or { chosen }) do
    if layer < -count - 1 or layer > count then
      error(("Llava: vision_feature_layer: expected integers in [%d, %d], got %d"):format(-count - 1, count, layer), 0)
    end
  end
  local width = self.vision_tower.config.hidden_size * (type(chosen) == "table" and #chosen or 1)
  self.multi_modal_projector = Projector(config, width, self.language_model.config.hidden_size)
end

function Llava.from_config(class, given, state)
  local config = {}
  for key, value in pairs(given) do config[key] = value end
  if type(config.text_config) == "table" and state then
    local text, pooled = {}, false
    for key, value in pairs(config.text_config) do text[key] = value end
    text.tie_word_embeddings = text.tie_word_embeddings == true or config.tie_word_embeddings == true
    text = configs.untied(text, state, { "language_model.lm_head.weight", "lm_head.weight" },
      { "language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight" })
    config.text_config, config.tie_word_embeddings = text, text.tie_word_embeddings
    for _, name in ipairs { "vision_tower.pooler.dense.weight", "model.vision_tower.pooler.dense.weight" } do
      pooled = pooled or state[name] ~= nil
    end
    return class(config, pooled)
  end
  return class(config, true)
end

--- Renames one published name to ours: those of transformers from 4.52 on, and of CLIP's tower from 5 on.
function Llava:rename(name)
  name = name:gsub("^model%.language_model%.", "language_model.model."):gsub("^lm_head%.", "language_model.lm_head.")
    :gsub("^model%.vision_tower%.", "vision_tower."):gsub("^model%.multi_modal_projector%.", "multi_modal_projector.")
  if self.vision_tower.vision_model then
    name = name:gsub("^vision_tower%.vision_model%.", "vision_tower.")
      :gsub("^vision_tower%.", "vision_tower.vision_model.")
  end
  local text = name:match "^language_model%.(.*)$" -- some families have more names for a tensor
  return text and self.language_model:rename(text) and "language_model." .. self.language_model:rename(text)
    or not text and name or nil
end

--- The keys of config.json, with those of both parts.
function Llava:published_config()
  local config = LanguageModel.published_config(self)
  config.text_config = self.language_model:published_config()
  config.vision_config = self.vision_tower:published_config()
  return config
end

--- What the language model gets of pictures [m, channels, height, width]: [m, features, hidden], one feature for each
-- patch and, where vision_feature_select_strategy is "full", one for the class before them.
---@param pictures Tensor
---@param options? {interpolate?: boolean, checkpoint?: boolean}
---@return Tensor features
function Llava:picture_features(pictures, options)
  local o = arguments.read("Llava:picture_features", options, { interpolate = false, checkpoint = false })
  local x = self.vision_tower:hidden(pictures, { layer = self.config.vision_feature_layer,
    interpolate = o.interpolate, checkpoint = o.checkpoint })
  if type(x) == "table" then x = ty.concat(x, 2) end
  if self.config.vision_feature_select_strategy == "default" then x = x:narrow(1, 1, x.shape[2] - 1) end
  return self.multi_modal_projector(x)
end

--- The token that stands for a feature of a picture.
---@return integer
function Llava:image_token() return self.config.image_token_index end

--- How many features the language model gets of each picture.
---@param pictures Tensor
---@return integer[]
function Llava:feature_counts(pictures)
  arguments.expect("Llava:feature_counts", "pictures", pictures, "a tensor")
  local count = ty.no_grad(function() return self:picture_features(pictures:narrow(0, 0, 1)).shape[2] end)
  local counts = {}
  for i = 1, pictures.shape[1] do counts[i] = count end
  return counts
end

-- The embeddings of tokens [n, t], those of image tokens replaced by the features of the pictures, in their order.
local function embed(self, tokens, options)
  local features = options.features or self:picture_features(options.pictures, { interpolate = options.interpolate,
    checkpoint = options.checkpoint, sizes = options.sizes })
  local shape = features.shape
  local is_image = tokens:eq(self.config.image_token_index)
  if options.mask and options.mask.ndim == 2 then is_image = is_image:logical_and(options.mask:to "bool") end
  local places = is_image:to("i64"):sum():item()
  if places ~= shape[1] * shape[2] then
    arguments.fail("%s: pictures: expected as many features as the %d image tokens, got %d of %d pictures",
      self.family, places, shape[1] * shape[2], shape[1])
  end
  local x = self.language_model:embed(tokens:masked_fill(is_image, 0))
  if places == 0 then return x end
  local order = (is_image:flatten():to("i64"):cumsum(0) - 1):clamp(0):reshape(tokens.shape)
  return ty.where(is_image:unsqueeze(-1), ty.embedding(features:flatten(0, 1), order):to(x.dtype), x)
end

--- Hidden states after the last norm, as Decoder:hidden() has them. options besides: pictures, interpolate.
---@return Tensor hidden
function Llava:hidden(tokens, options)
  return layers.hidden_of_seen(self.family, self, tokens, options, embed)
end

--- Logits of hidden states.
function Llava:head(hidden) return self.language_model:head(hidden) end

--- tokens i64 [n, t] to logits [n, t, vocabulary]. options: pictures [m, channels, height, width], one after another
-- for the image tokens of all rows (each takes as many of these as picture_features() gives features), interpolate
-- (true: pictures may have another size than in training), or in place of pictures their features, [m, features,
-- hidden], as picture_features() gives them or a method changes them; cache, mask, positions, cu_seqlens, longest,
-- checkpoint, as the language model has them. With a cache, pictures come with the call that has their tokens.
---@param tokens Tensor
---@param options? table
---@return Tensor logits
function Llava:forward(tokens, options) return self:head(self:hidden(tokens, options)) end

--- A cache for forward().
---@return KVCache
function Llava:cache(options) return self.language_model:cache(options) end

--- As LanguageModel:loss(), with the options of forward(); without targets, image tokens are none.
---@param tokens Tensor
---@param targets? Tensor
---@return Tensor loss
function Llava:loss(tokens, targets, options)
  layers.check_tokens("Llava", tokens, options)
  arguments.expect("Llava:loss", "targets", targets, "a tensor or nil")
  if not targets then targets = layers.targets_of_seen(tokens, self.config.image_token_index, options) end
  return LanguageModel.loss(self, tokens, targets, options)
end

function Llava:tied() return self.language_model:tied() end

--- As LanguageModel:untie().
function Llava:untie()
  self.language_model:untie()
  self.config.tie_word_embeddings = false
  rawset(self, "ignored_too", nil)
  return self
end

function Llava:end_tokens() return self.config.eos_token_id or self.language_model:end_tokens() end

--- As LanguageModel:start(), with the pictures of all rows.
function Llava:start(tokens, mask, cache, pictures, sizes)
  if pictures then pictures = pictures:to { device = tokens.device } end
  return tokens, mask, function(input, given)
    local seen = pictures
    pictures = nil -- they are in the cache after the first call
    return self:head(self:hidden(input, { cache = cache, mask = given, last = 1, pictures = seen, sizes = sizes })
      :select(1, -1))
  end
end

return Llava
