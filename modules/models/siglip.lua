--- SigLIP and SigLIP 2 (of fixed resolution): a transformer of texts and one of pictures that learn pair by pair, with
-- a sigmoid, whose outputs meet in one space; the names and the config.json of transformers. Zhai et al. 2023, "Sigmoid
-- Loss for Language Image Pre-Training"; Tschannen et al. 2025, "SigLIP 2: Multilingual Vision-Language Encoders with
-- Improved Semantic Understanding, Localization, and Dense Features".
--
--     local model = models.SiglipModel { text_config = { vocab_size = 4096, hidden_size = 128 },
--       vision_config = { image_size = 64, patch_size = 8, hidden_size = 128 } }
--     local logits = model(tokens, { pictures = pictures })     -- [pictures, texts]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.clip_blocks"
local configs = require "tycho.models.config"
local encoder = require "tycho.models.encoder"
local layers = require "tycho.models.layers"
local Pretrained = require "tycho.models.pretrained"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter

-- ---- texts ----

local TextEmbeddings = nn.module "SiglipTextEmbeddings"

function TextEmbeddings:init(config)
  self.token_embedding = layers.embedding(config.vocab_size, config.hidden_size)
  self.position_embedding = layers.embedding(config.max_position_embeddings, config.hidden_size)
end

function TextEmbeddings:forward(tokens)
  local shape, room = ty.is_tensor(tokens) and tokens.shape or {}, self.position_embedding.count
  if #shape ~= 2 or tokens.dtype ~= "i64" or shape[2] == 0 then
    arguments.fail("SiglipModel: tokens: expected an i64 tensor [n, t], got %s", arguments.describe(tokens))
  elseif shape[2] > room then
    arguments.fail("SiglipModel: tokens: expected at most the %d of max_position_embeddings, got %d", room, shape[2])
  end
  return self.token_embedding(tokens) + self.position_embedding.weight:narrow(0, 0, shape[2])
end

local TextTransformer = nn.module "SiglipTextTransformer"

function TextTransformer:init(config)
  self.config = config
  self.embeddings = TextEmbeddings(config)
  self.encoder = blocks.Encoder(config, "SiglipModel")
  self.final_layer_norm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  self.head = layers.linear(config.hidden_size, config.projection_size, true)
end

-- Every token sees every other; the last one, padding or not, stands for the text.
function TextTransformer:run(tokens, options, whole)
  local o = encoder.options("SiglipModel", options, { "mask" })
  local at = { causal = false, mask = o.mask and o.mask:to("bool"):unsqueeze(1):unsqueeze(1) }
  local hidden, last = encoder.through("SiglipModel", self.encoder.layers, self.embeddings(tokens), at, o, whole,
    self.final_layer_norm)
  if not whole then return hidden end
  return hidden, self.head(self.final_layer_norm(last:select(1, -1)))
end

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

-- Attention as PyTorch's MultiheadAttention names it.
local PoolAttention = nn.module "SiglipPoolAttention"

function PoolAttention:init(width, heads)
  self.heads = heads
  self.in_proj_weight = parameter({ 3 * width, width }, function(t) nn.init.xavier_uniform(t) end)
  self.in_proj_bias = parameter({ 3 * width }, nn.init.zeros)
  self.out_proj = layers.linear(width, width, true)
end

function PoolAttention:forward(query, x)
  local width = x.shape[3]
  local function project(from, first, count)
    return ty.linear(from, self.in_proj_weight:narrow(0, first * width, count * width),
      self.in_proj_bias:narrow(0, first * width, count * width))
  end
  local both = project(x, 1, 2)
  return self.out_proj(nn.attention(project(query, 0, 1), both:narrow(-1, 0, width), both:narrow(-1, width, width),
    { heads = self.heads }))
end

-- What stands for a whole picture: what a learnt query finds in its patches.
local Head = nn.module "SiglipHead"

function Head:init(config)
  local width = config.hidden_size
  self.probe = parameter({ 1, 1, width }, function(t) nn.init.normal(t, 0, 1) end)
  self.attention = PoolAttention(width, config.num_attention_heads)
  self.layernorm = nn.LayerNorm(width, { eps = config.layer_norm_eps })
  self.mlp = blocks.Mlp(config, "SiglipModel")
end

function Head:forward(x)
  local found = self.attention(self.probe:expand(x.shape[1], 1, x.shape[3]), x)
  return self.mlp(self.layernorm(found), found):select(1, 0)
end

local VisionTransformer = nn.module "SiglipVisionTransformer"

function VisionTransformer:init(config)
  self.config = config
  self.embeddings = VisionEmbeddings(config)
  self.encoder = blocks.Encoder(config, "SiglipModel")
  self.post_layernorm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  if config.vision_use_head then self.head = Head(config) end
end

function VisionTransformer:run(x, options, whole)
  local o = encoder.options("SiglipModel", options, { "interpolate" })
  x = encoder.pictures("SiglipModel", x, self.config, self.embeddings.patch_embedding.weight, o.interpolate)
  local hidden, last = encoder.through("SiglipModel", self.encoder.layers, self.embeddings(x), {}, o, whole,
    self.post_layernorm)
  if not whole or not self.head then return hidden end
  return hidden, self.head(self.post_layernorm(last))
end

-- ---- configs ----

local shared = {
  hidden_size = { "count", 768 }, intermediate_size = { "count", 3072 }, num_hidden_layers = { "few", 12 },
  num_attention_heads = { "count", 12 }, hidden_act = { "text", "gelu_pytorch_tanh" },
  layer_norm_eps = { "epsilon", 1e-6 }, attention_dropout = { "share", 0 }, initializer_factor = { "number", 1 },
}

local function with(more)
  for name, field in pairs(shared) do more[name] = field end
  return more
end

local text_fields = with { vocab_size = { "count", 32000 }, max_position_embeddings = { "count", 64 },
  projection_size = { "count", configs.none } }

-- num_image_tokens and projection_dim are of models that read the tower's patches, such as PaliGemma.
local vision_fields = with { num_channels = { "count", 3 }, image_size = { "size", 224 }, patch_size = { "size", 16 },
  vision_use_head = { "flag", true }, num_image_tokens = { "count", configs.none },
  projection_dim = { "count", configs.none }, projector_hidden_act = { "text", configs.none } }

local model_fields = { text_config = { "table", {} }, vision_config = { "table", {} } }

-- The config of one transformer, of its own file or of a whole SigLIP's, where it is under `part`.
local function one(who, given, fields, part)
  if type(given) == "table" and type(given[part]) == "table" then
    local own = { model_type = given.model_type }
    for key, value in pairs(given[part]) do own[key] = value end
    given = own
  end
  local config = configs.read(who, given, fields)
  configs.divides(who, config, "num_attention_heads", "hidden_size")
  if fields == vision_fields then
    encoder.check_grid(who, config)
  else
    config.projection_size = config.projection_size or config.hidden_size
  end
  return config
end

-- ---- the models ----

-- A class with one of the transformers, which files call `part`; config.json of a whole SigLIP is read too.
local function single(name, model_type, part, fields, Transformer)
  local class = nn.module(name, Pretrained)
  class.model_type, class.architecture = model_type, name
  class.missing_prefixes = { part .. "." }
  class.other_heads = { part == "text_model" and "^vision_model%." or "^text_model%.", "^logit_scale$", "^logit_bias$" }

  function class:init(given)
    self.config = one(name, given, fields, part:gsub("_model$", "_config"))
    self[part] = Transformer(self.config)
  end

  --- Hidden states [n, t, hidden] of the layer that is asked for, behind which nothing is computed. options: as of
  -- forward().
  function class:hidden(x, options) return (self[part]:run(x, options, false)) end

  --- Of texts, tokens i64 [n, t], or pictures [n, channels, height, width]: hidden states [n, t, hidden], and those of
  -- each whole text or picture, [n, hidden] (pictures: where vision_use_head is true). options:
  --   layer        of which layer hidden states are wanted: nil after the last norm, 0 the embeddings, i after layer i,
  --                -1 after the last layer, -2 after the one before; a list gives a list
  --   norm         whether hidden states go through the last norm (nil: those without `layer`)
  --   mask         of texts: bool or i64 [n, t], 0: padding that is not seen (published models see theirs)
  --   interpolate  of pictures, true: they may have another size than image_size
  --   checkpoint   true: the backward pass runs each layer again, whose results then need not be kept
  function class:forward(x, options) return self[part]:run(x, options, true) end

  return class
end

--- SigLIP's text encoder.
---@class SiglipTextModel: Pretrained
local SiglipTextModel = single("SiglipTextModel", "siglip_text_model", "text_model", text_fields, TextTransformer)
--- SigLIP's picture encoder.
---@class SiglipVisionModel: Pretrained
local SiglipVisionModel = single("SiglipVisionModel", "siglip_vision_model", "vision_model", vision_fields,
  VisionTransformer)

-- Files of multimodal models have the tower without a head.
function SiglipVisionModel.from_config(class, given, state)
  if state and not (state["vision_model.head.probe"] or state["head.probe"]) then
    local config = {}
    for key, value in pairs(type(given.vision_config) == "table" and given.vision_config or given) do
      config[key] = value
    end
    config.model_type, config.vision_use_head = given.model_type, false
    return class(config)
  end
  return class(given)
end

--- SigLIP: texts and pictures in one space.
---@class SiglipModel: Pretrained
---@field logit_scale Tensor  [1], the logarithm of the scale of the similarities
---@field logit_bias Tensor   [1], what is added to them
local SiglipModel = nn.module("SiglipModel", Pretrained)
SiglipModel.model_type, SiglipModel.architecture = "siglip", "SiglipModel"

--- config: the keys of config.json: text_config, vision_config.
---@param config table
function SiglipModel:init(config)
  config = configs.read("SiglipModel", config, model_fields)
  local parts = {}
  for name, fields in pairs { text_config = text_fields, vision_config = vision_fields } do
    local part = { model_type = config.model_type }
    for key, value in pairs(config[name]) do part[key] = value end
    parts[name] = one("SiglipModel: " .. name, part, fields)
  end
  configs.with_parts(config, parts)
  local text, vision = parts.text_config, parts.vision_config
  if not vision.vision_use_head then
    error("SiglipModel: config key 'vision_config.vision_use_head': expected true, got false", 0)
  elseif text.projection_size ~= vision.hidden_size then
    error(("SiglipModel: text_config.projection_size %d must be vision_config.hidden_size %d"):format(
      text.projection_size, vision.hidden_size), 0)
  end
  self.config = config
  self.text_model = TextTransformer(text)
  self.vision_model = VisionTransformer(vision)
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
-- size than image_size), checkpoint.
---@param pictures Tensor
---@param options? {interpolate?: boolean, checkpoint?: boolean}
---@return Tensor features
function SiglipModel:image_features(pictures, options)
  return (select(2, self.vision_model:run(pictures, options, true)))
end

--- How well pictures and texts fit: logits [pictures, texts], the cosines of their features times exp(logit_scale) plus
-- logit_bias, whose sigmoid is the probability of each pair; then the features of the pictures and of the texts, of
-- length 1. options: pictures, mask (of the tokens), interpolate, checkpoint.
---@param tokens Tensor  i64 [texts, t]
---@param options {pictures: Tensor, mask?: Tensor, interpolate?: boolean, checkpoint?: boolean}
---@return Tensor logits
---@return Tensor image
---@return Tensor text
function SiglipModel:forward(tokens, options)
  local cosines, image, text = blocks.cosines("SiglipModel", self, tokens, options)
  return cosines * self.logit_scale:exp() + self.logit_bias, image, text
end

--- The keys of config.json, with those of both transformers.
function SiglipModel:published_config()
  local config = Pretrained.published_config(self)
  for key, model_type in pairs { text = "siglip_text_model", vision = "siglip_vision_model" } do
    local part = Pretrained.published_config(self[key .. "_model"])
    part.model_type, part.architectures, part.initializer_factor = model_type, nil, nil
    config[key .. "_config"] = part
  end
  return config
end

return { SiglipModel = SiglipModel, SiglipTextModel = SiglipTextModel, SiglipVisionModel = SiglipVisionModel }
