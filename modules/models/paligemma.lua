--- PaliGemma and PaliGemma 2: SigLIP's tower, one linear layer, Gemma. A picture and what is asked of it see each other
-- whole, the answer sees what is before it. Beyer et al. 2024, "PaliGemma: A versatile 3B VLM for transfer"; Steiner et
-- al. 2024, "PaliGemma 2: A Family of Versatile VLMs for Transfer". Names and config.json of transformers'
-- PaliGemmaForConditionalGeneration.
--
--     local logits = model(tokens, { pictures = pictures })                     -- all tokens are asked
--     local loss = model:loss(tokens, targets, { pictures = pictures, suffix = answers })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local LanguageModel = require "tycho.models.model"
local Llava = require "tycho.models.llava"

local nn = ty.nn
local none = configs.none

local texts = { gemma = "tycho.models.gemma", gemma2 = "tycho.models.gemma2" }

local Projector = nn.module "PaliGemmaProjector"

function Projector:init(inputs, width) self.linear = layers.linear(inputs, width, true) end

function Projector:forward(x) return self.linear(x) end

--- PaliGemma: Gemma with SigLIP's tower.
---@class PaliGemma: Llava
local PaliGemma = nn.module("PaliGemma", Llava)
PaliGemma.model_type, PaliGemma.architecture = "paligemma", "PaliGemmaForConditionalGeneration"
PaliGemma.family = "PaliGemma"

local fields = {
  text_config = { "table", {} }, vision_config = { "table", {} }, image_token_index = { "integer", none },
  image_token_id = { "integer", none }, vocab_size = { "count", none }, projection_dim = { "count", none },
  hidden_size = { "count", none }, tie_word_embeddings = { "flag", true }, ignore_index = { "integer", none },
}

-- What published files leave out, as transformers fills it in.
local text_defaults = { hidden_size = 2048, num_hidden_layers = 18, intermediate_size = 16384,
  num_attention_heads = 8, num_key_value_heads = 1, vocab_size = 257152 }
local vision_defaults = { hidden_size = 1152, intermediate_size = 4096, patch_size = 14, image_size = 224,
  num_hidden_layers = 27, num_attention_heads = 16 }

local function filled(given, defaults)
  local config = {}
  for key, value in pairs(defaults) do config[key] = value end
  for key, value in pairs(given) do
    if value ~= ty.io.null or config[key] == nil then config[key] = value end
  end
  return config
end

--- config: the keys of config.json: text_config (of Gemma or Gemma2), vision_config (of SiglipVisionModel),
-- image_token_index (256000).
---@param config table
function PaliGemma:init(config)
  local given = config
  config = configs.read("PaliGemma", given, fields)
  config.image_token_index = config.image_token_index or config.image_token_id or 256000
  config.image_token_id = nil
  local kind = config.text_config.model_type
  if kind == nil or kind == ty.io.null then kind = "gemma" end
  if not texts[kind] then
    error(("PaliGemma: text_config: model_type '%s' is not supported; there are gemma, gemma2"):format(
      tostring(kind)), 0)
  end
  -- A config that a script wrote is read strictly, also in its parts.
  local text = filled(config.text_config, config.model_type and kind == "gemma" and text_defaults or {})
  local vision = filled(config.vision_config, config.model_type and vision_defaults or {})
  text.model_type, vision.model_type = config.model_type and kind, config.model_type and "siglip_vision_model"
  text.use_bidirectional_attention, text.num_image_tokens = nil, nil -- they say what is done here
  text.tie_word_embeddings = config.tie_word_embeddings
  vision.vision_use_head = false
  self.config = config
  self.language_model = require(texts[kind])(text)
  self.vision_tower = require("tycho.models.siglip").SiglipVisionModel(vision)
  configs.with_parts(config, { text_config = self.language_model.config, vision_config = self.vision_tower.config })
  if config.tie_word_embeddings then self.ignored_too = { "^language_model%.lm_head%.weight$", "^lm_head%.weight$" } end
  self.context = self.language_model.context
  self.multi_modal_projector = Projector(self.vision_tower.config.hidden_size, self.language_model.config.hidden_size)
end

function PaliGemma.from_config(class, config, state)
  return class(configs.untied(config, state, { "language_model.lm_head.weight", "lm_head.weight" },
    { "language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight" }))
end

--- What the language model gets of pictures [m, channels, height, width]: [m, patches, hidden].
---@param pictures Tensor
---@param options? {interpolate?: boolean, checkpoint?: boolean}
---@return Tensor features
function PaliGemma:picture_features(pictures, options)
  local o = arguments.read("PaliGemma:picture_features", options, { interpolate = false, checkpoint = false })
  return self.multi_modal_projector(self.vision_tower:hidden(pictures, { interpolate = o.interpolate,
    checkpoint = o.checkpoint }))
end

--- Hidden states after the last norm, as Decoder:hidden() has them. options besides: pictures, suffix (bool [n, t]: the
-- tokens of an answer, which see what is before them alone; all others of the first call see each other).
---@return Tensor hidden
function PaliGemma:hidden(tokens, options)
  layers.check_tokens("PaliGemma", tokens, options)
  local with = {}
  for key, value in pairs(options or {}) do with[key] = value end
  with.suffix = nil
  local first = not with.cache or with.cache.past == 0
  if options and options.suffix then
    local suffix = options.suffix
    if not ty.is_tensor(suffix) or suffix.ndim ~= 2 or suffix.shape[1] ~= tokens.shape[1]
      or suffix.shape[2] ~= tokens.shape[2] then
      arguments.fail("PaliGemma: suffix: expected bool [%d, %d], got %s", tokens.shape[1], tokens.shape[2],
        arguments.describe(suffix))
    end
    with.prefix = suffix:to("bool"):logical_not()
  elseif first then
    with.prefix = ty.ones(tokens.shape, { device = tokens.device }):to "bool"
  end
  return Llava.hidden(self, tokens, with)
end

--- As LanguageModel:loss(), with the options of forward(). Without targets these are the tokens of the answers, which
-- suffix has to say.
---@param tokens Tensor
---@param targets? Tensor
---@return Tensor loss
function PaliGemma:loss(tokens, targets, options)
  layers.check_tokens("PaliGemma", tokens, options)
  arguments.expect("PaliGemma:loss", "targets", targets, "a tensor or nil")
  local suffix = options and options.suffix
  if not suffix then
    arguments.fail "PaliGemma:loss: suffix: expected bool [n, t], which tokens are answers, got nil"
  end
  if not targets then
    targets = layers.targets_of_seen(tokens, self.config.image_token_index, options)
    local n, t = tokens.shape[1], tokens.shape[2]
    local none_behind = ty.zeros({ n, 1 }, { device = tokens.device }):to "bool"
    local answered = ty.concat({ suffix:to("bool"):narrow(1, 1, t - 1), none_behind }, 1)
    targets = targets:masked_fill(answered:logical_not(), -100)
  end
  return LanguageModel.loss(self, tokens, targets, options)
end

--- The keys of config.json, with those of both parts.
function PaliGemma:published_config()
  local config = Llava.published_config(self)
  config.text_config.use_bidirectional_attention = true
  local side = self.vision_tower.config.image_size // self.vision_tower.config.patch_size
  config.text_config.num_image_tokens = side * side
  config.vision_config.projection_dim = self.language_model.config.hidden_size
  config.projection_dim = config.projection_dim or self.language_model.config.hidden_size
  return config
end

return PaliGemma
