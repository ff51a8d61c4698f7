--- CLIP: a transformer of texts and one of pictures whose outputs meet in one space, with the names and the config.json
-- of transformers. Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision".
--
--     local model = models.CLIPModel { projection_dim = 64, text_config = { vocab_size = 4096, hidden_size = 128 },
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

local TextEmbeddings = nn.module "CLIPTextEmbeddings"

function TextEmbeddings:init(config)
  local std = 0.02 * config.initializer_factor
  self.token_embedding = layers.embedding(config.vocab_size, config.hidden_size, std)
  self.position_embedding = layers.embedding(config.max_position_embeddings, config.hidden_size, std)
end

function TextEmbeddings:forward(tokens)
  local shape, room = ty.is_tensor(tokens) and tokens.shape or {}, self.position_embedding.count
  if #shape ~= 2 or tokens.dtype ~= "i64" then
    arguments.fail("CLIP: tokens: expected an i64 tensor [n, t], got %s", arguments.describe(tokens))
  elseif shape[2] > room then
    arguments.fail("CLIP: tokens: expected at most the %d of max_position_embeddings, got %d", room, shape[2])
  end
  return self.token_embedding(tokens) + self.position_embedding.weight:narrow(0, 0, shape[2])
end

local TextTransformer = nn.module "CLIPTextTransformer"

function TextTransformer:init(config)
  self.config = config
  self.embeddings = TextEmbeddings(config)
  self.encoder = blocks.Encoder(config, "CLIP")
  self.final_layer_norm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
end

-- Where each text ends, i64 [n]: at the first eos_token_id. Configs that were written before transformers 4.31 say 2,
-- whatever the tokenizer has: there it is the token with the highest number.
local function ends(tokens, eos)
  if eos == 2 then return tokens:argmax { 1 } end
  return tokens:eq(eos):to("i64"):argmax { 1 }
end

function TextTransformer:run(tokens, options, whole)
  local o = encoder.options("CLIP", options, { "mask" })
  local x = self.embeddings(tokens)
  local at = { causal = true, mask = o.mask and o.mask:to("bool"):unsqueeze(1):unsqueeze(1) }
  local hidden, last = encoder.through("CLIP", self.encoder.layers, x, at, o, whole, self.final_layer_norm)
  if not whole then return hidden end
  local n, t = tokens.shape[1], tokens.shape[2]
  local rows = ty.arange(n, { device = tokens.device }) * t + ends(tokens, self.config.eos_token_id)
  return hidden, self.final_layer_norm(last:flatten(0, 1):index_select(0, rows))
end

-- ---- pictures ----

local VisionEmbeddings = nn.module "CLIPVisionEmbeddings"

function VisionEmbeddings:init(config)
  local width, factor, size = config.hidden_size, config.initializer_factor, config.patch_size
  local std = config.initializer_range * factor
  self.rows, self.columns = encoder.grid(config)
  self.class_embedding = parameter({ width }, function(t) nn.init.normal(t, 0, width ^ -0.5 * factor) end)
  self.patch_embedding = nn.Conv2d(config.num_channels, width, size, { stride = size, bias = false })
  if self.patch_embedding.weight.device ~= "meta" then nn.init.normal(self.patch_embedding.weight, 0, std) end
  self.position_embedding = layers.embedding(self.rows * self.columns + 1, width, std)
end

function VisionEmbeddings:forward(x)
  local patches = self.patch_embedding(x)
  local n, width, rows, columns = table.unpack(patches.shape)
  x = ty.concat({ self.class_embedding:expand(n, 1, width), patches:flatten(2):transpose(1, 2) }, 1)
  return x + encoder.resized(self.position_embedding.weight, self.rows, self.columns, rows, columns)
end

local VisionTransformer = nn.module "CLIPVisionTransformer"

function VisionTransformer:init(config)
  self.config = config
  self.embeddings = VisionEmbeddings(config)
  self.pre_layrnorm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps }) -- so published
  self.encoder = blocks.Encoder(config, "CLIP")
  self.post_layernorm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
end

function VisionTransformer:run(x, options, whole)
  local o = encoder.options("CLIP", options, { "interpolate" })
  x = encoder.pictures("CLIP", x, self.config, self.embeddings.patch_embedding.weight, o.interpolate)
  -- The last norm is for the class alone; the states after the last layer are published without it.
  if o.norm == nil then o.norm = false end
  local hidden, last = encoder.through("CLIP", self.encoder.layers, self.pre_layrnorm(self.embeddings(x)), {}, o, whole,
    self.post_layernorm)
  if not whole then return hidden end
  return hidden, self.post_layernorm(last:select(1, 0))
end

-- ---- configs ----

local shared = {
  num_hidden_layers = { "few", 12 }, hidden_act = { "text", "quick_gelu" }, layer_norm_eps = { "epsilon", 1e-5 },
  attention_dropout = { "share", 0 }, initializer_range = { "number", 0.02 }, initializer_factor = { "number", 1 },
  projection_dim = { "count", 512 }, dropout = { "share", configs.none },
}

local function with(more)
  local fields = {}
  for _, part in ipairs { shared, more } do
    for name, field in pairs(part) do fields[name] = field end
  end
  return fields
end

local text_fields = with {
  vocab_size = { "count", 49408 }, hidden_size = { "count", 512 }, intermediate_size = { "count", 2048 },
  num_attention_heads = { "count", 8 }, max_position_embeddings = { "count", 77 }, eos_token_id = { "integer", 49407 },
}

local vision_fields = with {
  hidden_size = { "count", 768 }, intermediate_size = { "count", 3072 }, num_attention_heads = { "count", 12 },
  num_channels = { "count", 3 }, image_size = { "size", 224 }, patch_size = { "size", 32 },
}

local model_fields = {
  text_config = { "table", {} }, vision_config = { "table", {} }, text_config_dict = { "table", configs.none },
  vision_config_dict = { "table", configs.none }, projection_dim = { "count", 512 },
  logit_scale_init_value = { "number", 2.6592 }, initializer_factor = { "number", 1 },
}

-- The config of one transformer, of its own file or of a whole CLIP's, where it is under `part`.
local function one(who, given, fields, part)
  if type(given) == "table" and type(given[part]) == "table" then given = given[part] end
  local config = configs.read(who, given, fields)
  configs.divides(who, config, "num_attention_heads", "hidden_size")
  configs.only(who, config, { dropout = { 0, false } }) -- older files have it, and it was never used
  if fields == vision_fields then encoder.check_grid(who, config) end
  return config
end

-- ---- the models ----

-- A class with one of the transformers, which files call `part`; config.json of a whole CLIP is read too.
local function single(name, architecture, model_type, part, fields, Transformer, projection)
  local class = nn.module(name, Pretrained)
  class.model_type, class.architecture = model_type, architecture
  class.missing_prefixes = { part .. "." }
  class.other_heads = { part == "text_model" and "^vision_model%." or "^text_model%.", "^logit_scale$",
    projection == "text_projection" and "^visual_projection%." or "^text_projection%." }
  if not projection then table.insert(class.other_heads, "^visual_projection%.") end

  function class:init(given)
    local config = one(name, given, fields, part:gsub("_model$", "_config"))
    self.config = config
    self[part] = Transformer(config)
    if projection then
      self[projection] = layers.linear(config.hidden_size, config.projection_dim, false,
        config.hidden_size ^ -0.5 * config.initializer_factor)
    end
  end

  --- Hidden states [n, t, hidden] of the layer that is asked for, behind which nothing is computed. options: as of
  -- forward().
  function class:hidden(x, options) return (self[part]:run(x, options, false)) end

  --- Of texts, tokens i64 [n, t], or pictures [n, channels, height, width]: hidden states [n, t, hidden], and those of
  -- each whole text or picture, [n, hidden], with a projection [n, projection_dim]. options:
  --   layer        of which layer hidden states are wanted: nil the last one (of texts after the last norm), 0 the
  --                embeddings, i after layer i, -1 after the last layer, -2 after the one before; a list gives a list
  --   norm         whether hidden states go through the last norm (nil: those of texts without `layer`)
  --   mask         of texts: bool or i64 [n, t], 0: padding
  --   interpolate  of pictures, true: they may have another size than image_size
  --   checkpoint   true: the backward pass runs each layer again, whose results then need not be kept
  function class:forward(x, options)
    local hidden, pooled = self[part]:run(x, options, true)
    return hidden, projection and self[projection](pooled) or pooled
  end

  return class
end

--- CLIP's text encoder.
---@class CLIPTextModel: Pretrained
local CLIPTextModel = single("CLIPTextModel", "CLIPTextModel", "clip_text_model", "text_model", text_fields,
  TextTransformer)
--- CLIP's text encoder, with the projection into the space that texts and pictures share.
---@class CLIPTextModelWithProjection: CLIPTextModel
local CLIPTextModelWithProjection = single("CLIPTextModelWithProjection", "CLIPTextModelWithProjection",
  "clip_text_model", "text_model", text_fields, TextTransformer, "text_projection")
--- CLIP's picture encoder.
---@class CLIPVisionModel: Pretrained
local CLIPVisionModel = single("CLIPVisionModel", "CLIPVisionModel", "clip_vision_model", "vision_model",
  vision_fields, VisionTransformer)
--- CLIP's picture encoder, with the projection into the space that texts and pictures share.
---@class CLIPVisionModelWithProjection: CLIPVisionModel
local CLIPVisionModelWithProjection = single("CLIPVisionModelWithProjection", "CLIPVisionModelWithProjection",
  "clip_vision_model", "vision_model", vision_fields, VisionTransformer, "visual_projection")

---@class CLIPModel: Pretrained
---@field logit_scale Tensor  the logarithm of the scale of the similarities
local CLIPModel = nn.module("CLIPModel", Pretrained)
CLIPModel.model_type, CLIPModel.architecture = "clip", "CLIPModel"

-- The config of a part: older files have it under text_config_dict too, which counts.
local function part_of(config, name)
  local part = { model_type = config.model_type }
  for _, key in ipairs { name, name .. "_dict" } do
    for k, value in pairs(config[key] or {}) do part[k] = value end
  end
  return part
end

--- config: the keys of config.json: text_config, vision_config, projection_dim (512), logit_scale_init_value (2.6592).
---@param config table
function CLIPModel:init(config)
  config = configs.read("CLIPModel", config, model_fields)
  local text = one("CLIPModel: text_config", part_of(config, "text_config"), text_fields)
  local vision = one("CLIPModel: vision_config", part_of(config, "vision_config"), vision_fields)
  configs.with_parts(config, { text_config = text, vision_config = vision })
  local factor, width = config.initializer_factor, config.projection_dim
  self.config = config
  self.text_model = TextTransformer(text)
  self.vision_model = VisionTransformer(vision)
  self.visual_projection = layers.linear(vision.hidden_size, width, false, vision.hidden_size ^ -0.5 * factor)
  self.text_projection = layers.linear(text.hidden_size, width, false, text.hidden_size ^ -0.5 * factor)
  self.logit_scale = parameter({}, function(t) t:fill_(config.logit_scale_init_value) end)
end

--- Features [n, projection_dim] of texts, tokens i64 [n, t]. options: mask (bool or i64 [n, t], 0: padding),
-- checkpoint.
---@param tokens Tensor
---@param options? {mask?: Tensor, checkpoint?: boolean}
---@return Tensor features
function CLIPModel:text_features(tokens, options)
  local _, pooled = self.text_model:run(tokens, options, true)
  return self.text_projection(pooled)
end

--- Features [n, projection_dim] of pictures [n, channels, height, width]. options: interpolate (true: pictures may have
-- another size than image_size), checkpoint.
---@param pictures Tensor
---@param options? {interpolate?: boolean, checkpoint?: boolean}
---@return Tensor features
function CLIPModel:image_features(pictures, options)
  local _, pooled = self.vision_model:run(pictures, options, true)
  return self.visual_projection(pooled)
end

--- How alike pictures and texts are: logits [pictures, texts], the cosines of their features times exp(logit_scale);
-- then the features of the pictures and of the texts, of length 1. options: pictures, mask (of the tokens),
-- interpolate, checkpoint.
---@param tokens Tensor  i64 [texts, t]
---@param options {pictures: Tensor, mask?: Tensor, interpolate?: boolean, checkpoint?: boolean}
---@return Tensor logits
---@return Tensor image
---@return Tensor text
function CLIPModel:forward(tokens, options)
  local cosines, image, text = blocks.cosines("CLIPModel", self, tokens, options)
  return cosines * self.logit_scale:exp(), image, text
end

--- The keys of config.json, with those of both transformers.
function CLIPModel:published_config()
  local config = Pretrained.published_config(self)
  config.text_config_dict, config.vision_config_dict = nil, nil
  for key, model_type in pairs { text = "clip_text_model", vision = "clip_vision_model" } do
    local part = Pretrained.published_config(self[key .. "_model"])
    part.model_type, part.architectures = model_type, nil
    config[key .. "_config"] = part
  end
  return config
end

return { CLIPModel = CLIPModel, CLIPTextModel = CLIPTextModel, CLIPVisionModel = CLIPVisionModel,
  CLIPTextModelWithProjection = CLIPTextModelWithProjection,
  CLIPVisionModelWithProjection = CLIPVisionModelWithProjection }
