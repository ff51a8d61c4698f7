--- SigLIP and SigLIP 2 (of fixed resolution): a transformer of texts and one of pictures that learn pair by pair, with
-- a sigmoid, whose outputs meet in one space; the names and the config.json of transformers. Zhai et al. 2023, "Sigmoid
-- Loss for Language Image Pre-Training"; Tschannen et al. 2025, "SigLIP 2: Multilingual Vision-Language Encoders with
-- Improved Semantic Understanding, Localization, and Dense Features". Those that take pictures of every shape (NaFlex)
-- are in tycho.models.siglip2.
--
--     local model = models.SiglipModel { text_config = { vocab_size = 4096, hidden_size = 128 },
--       vision_config = { image_size = 64, patch_size = 8, hidden_size = 128 } }
--     local logits = model(tokens, { pictures = pictures })     -- [pictures, texts]
local ty = require "tycho"
local blocks = require "tycho.models.siglip_blocks"
local clip_blocks = require "tycho.models.clip_blocks"
local configs = require "tycho.models.config"
local encoder = require "tycho.models.encoder"
local layers = require "tycho.models.layers"
local Pretrained = require "tycho.models.pretrained"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter

-- ---- pictures ----

local VisionEmbeddings = nn.module "SiglipVisionEmbeddings"

function VisionEmbeddings:init(config)
  self.rows, self.columns = encoder.grid(config)
  self.patch_embedding = nn.Conv2d(config.num_channels, config.hidden_size, config.patch_size,
    { stride = config.patch_size })
  self.position_embedding = layers.embedding(self.rows * self.columns, config.hidden_size)
end

function VisionEmbeddings:forward(x)
  local patches = self.patch_embedding(x)
  local rows, columns = patches.shape[3], patches.shape[4]
  return patches:flatten(2):transpose(1, 2)
    + encoder.resized(self.position_embedding.weight, self.rows, self.columns, rows, columns, 0)
end

local VisionTransformer = nn.module "SiglipVisionTransformer"

function VisionTransformer:init(config, who)
  blocks.build_tower(self, config, who, VisionEmbeddings(config))
end

function VisionTransformer:run(x, options, whole)
  local o = encoder.options(self.who, options, { "interpolate" })
  x = encoder.pictures(self.who, x, self.config, self.embeddings.patch_embedding.weight, o.interpolate)
  local hidden, last = encoder.through(self.who, self.encoder.layers, self.embeddings(x), {}, o, whole,
    self.post_layernorm)
  if not whole or not self.head then return hidden end
  return hidden, self.head(self.post_layernorm(last))
end

-- num_image_tokens and projection_dim are of models that read the tower's patches, such as PaliGemma.
local vision_fields = blocks.vision_fields { image_size = { "size", 224 }, patch_size = { "size", 16 },
  num_image_tokens = { "count", configs.none }, projection_dim = { "count", configs.none },
  projector_hidden_act = { "text", configs.none } }

-- ---- the models ----

--- SigLIP's text encoder.
---@class SiglipTextModel: Pretrained
local SiglipTextModel = blocks.single("SiglipTextModel", "siglip_text_model", "text_model", blocks.text_fields,
  blocks.TextTransformer)
--- SigLIP's picture encoder.
---@class SiglipVisionModel: Pretrained
local SiglipVisionModel = blocks.single("SiglipVisionModel", "siglip_vision_model", "vision_model", vision_fields,
  VisionTransformer, encoder.check_grid)

--- SigLIP: texts and pictures in one space.
---@class SiglipModel: Pretrained
---@field logit_scale Tensor  [1], the logarithm of the scale of the similarities
---@field logit_bias Tensor   [1], what is added to them
local SiglipModel = nn.module("SiglipModel", Pretrained)
SiglipModel.model_type, SiglipModel.architecture = "siglip", "SiglipModel"
SiglipModel.other_heads = { "^classifier%." }
SiglipModel.tower = { fields = vision_fields, Transformer = VisionTransformer, check = encoder.check_grid }

--- config: the keys of config.json: text_config, vision_config.
---@param config table
function SiglipModel:init(config)
  local who = self.architecture
  config = configs.read(who, config, { text_config = { "table", {} }, vision_config = { "table", {} } })
  local function part(name, fields, check)
    local own = { model_type = config.model_type }
    for key, value in pairs(config[name]) do own[key] = value end
    return blocks.config(who .. ": " .. name, own, fields, nil, check)
  end
  local text = part("text_config", blocks.text_fields)
  local vision = part("vision_config", self.tower.fields, self.tower.check)
  configs.with_parts(config, { text_config = text, vision_config = vision })
  if not vision.vision_use_head then
    error(("%s: config key 'vision_config.vision_use_head': expected true, got false"):format(who), 0)
  elseif text.projection_size ~= vision.hidden_size then
    error(("%s: text_config.projection_size %d must be vision_config.hidden_size %d"):format(who,
      text.projection_size, vision.hidden_size), 0)
  end
  self.config = config
  self.text_model = blocks.TextTransformer(text, who)
  self.vision_model = self.tower.Transformer(vision, who)
  -- As the paper begins: a scale of 10, and a bias that makes most pairs none.
  self.logit_scale = parameter({ 1 }, function(t) t:fill_(math.log(10)) end)
  self.logit_bias = parameter({ 1 }, function(t) t:fill_(-10) end)
end

--- Features [n, width] of texts, tokens i64 [n, t]. options: mask (bool or i64 [n, t], 0: padding that is not seen),
-- checkpoint.
---@param tokens Tensor
---@param options? {mask?: Tensor, checkpoint?: boolean}
---@return Tensor features
function SiglipModel:text_features(tokens, options) return (select(2, self.text_model:run(tokens, options, true))) end

--- Features [n, width] of pictures [n, channels, height, width]. options: interpolate (true: pictures may have another
-- size than image_size), sizes (of SigLIP 2's patches), checkpoint.
---@param pictures Tensor
---@param options? {interpolate?: boolean, sizes?: Tensor, checkpoint?: boolean}
---@return Tensor features
function SiglipModel:image_features(pictures, options)
  return (select(2, self.vision_model:run(pictures, options, true)))
end

--- How well pictures and texts fit: logits [pictures, texts], the cosines of their features times exp(logit_scale) plus
-- logit_bias, whose sigmoid is the probability of each pair; then the features of the pictures and of the texts, of
-- length 1. options: pictures, mask (of the tokens), interpolate, sizes (of SigLIP 2's patches), checkpoint.
---@param tokens Tensor  i64 [texts, t]
---@param options {pictures: Tensor, mask?: Tensor, interpolate?: boolean, sizes?: Tensor, checkpoint?: boolean}
---@return Tensor logits
---@return Tensor image
---@return Tensor text
function SiglipModel:forward(tokens, options)
  local cosines, image, text = clip_blocks.cosines(self.architecture, self, tokens, options)
  return cosines * self.logit_scale:exp() + self.logit_bias, image, text
end

--- The keys of config.json, with those of both transformers.
function SiglipModel:published_config()
  local config = Pretrained.published_config(self)
  for _, key in ipairs { "text", "vision" } do
    local part = Pretrained.published_config(self[key .. "_model"])
    part.model_type = ("%s_%s_model"):format(self.model_type, key)
    part.architectures, part.initializer_factor = nil, nil
    config[key .. "_config"] = part
  end
  return config
end

--- SigLIP's picture encoder with a head over the mean of the patches.
---@class SiglipForImageClassification: Pretrained
local SiglipForImageClassification = blocks.classifier("SiglipForImageClassification", "siglip", vision_fields,
  VisionTransformer, encoder.check_grid)

return { SiglipForImageClassification = SiglipForImageClassification, SiglipModel = SiglipModel,
  SiglipTextModel = SiglipTextModel, SiglipVisionModel = SiglipVisionModel }
