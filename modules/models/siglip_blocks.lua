--- What SigLIP and SigLIP 2 share, with the names that both publish: the transformer of texts, what finds a whole
-- picture in its patches, the keys of their configs, and the classes around a transformer alone.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.models.clip_blocks"
local classifier = require "tycho.models.classifier"
local configs = require "tycho.models.config"
local encoder = require "tycho.models.encoder"
local layers = require "tycho.models.layers"
local Pretrained = require "tycho.models.pretrained"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter
local M = {}

-- ---- texts ----

local TextEmbeddings = nn.module "SiglipTextEmbeddings"

function TextEmbeddings:init(config, who)
  self.who = who
  self.token_embedding = layers.embedding(config.vocab_size, config.hidden_size)
  self.position_embedding = layers.embedding(config.max_position_embeddings, config.hidden_size)
end

function TextEmbeddings:forward(tokens)
  local shape, room = ty.is_tensor(tokens) and tokens.shape or {}, self.position_embedding.count
  if #shape ~= 2 or tokens.dtype ~= "i64" or shape[2] == 0 then
    arguments.fail("%s: tokens: expected an i64 tensor [n, t], got %s", self.who, arguments.describe(tokens))
  elseif shape[2] > room then
    arguments.fail("%s: tokens: expected at most the %d of max_position_embeddings, got %d", self.who, room, shape[2])
  end
  return self.token_embedding(tokens) + self.position_embedding.weight:narrow(0, 0, shape[2])
end

--- The transformer of texts: embeddings, layers, the last norm, and a head over the last token.
local TextTransformer = nn.module "SiglipTextTransformer"
M.TextTransformer = TextTransformer

--- config: as M.config() reads it; who: the family, for errors.
function TextTransformer:init(config, who)
  self.config, self.who = config, who
  self.embeddings = TextEmbeddings(config, who)
  self.encoder = blocks.Encoder(config, who)
  self.final_layer_norm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  self.head = layers.linear(config.hidden_size, config.projection_size, true)
end

--- Hidden states [n, t, hidden] of tokens and, where `whole`, those of each text, [n, projection_size].
-- Every token sees every other; the last one, padding or not, stands for the text.
function TextTransformer:run(tokens, options, whole)
  local o = encoder.options(self.who, options, { "mask" })
  local at = { causal = false, mask = o.mask and o.mask:to("bool"):unsqueeze(1):unsqueeze(1) }
  local hidden, last = encoder.through(self.who, self.encoder.layers, self.embeddings(tokens), at, o, whole,
    self.final_layer_norm)
  if not whole then return hidden end
  return hidden, self.head(self.final_layer_norm(last:select(1, -1)))
end

-- ---- pictures ----

-- Attention as PyTorch's MultiheadAttention names it.
local PoolAttention = nn.module "SiglipPoolAttention"

function PoolAttention:init(width, heads)
  self.heads = heads
  self.in_proj_weight = parameter({ 3 * width, width }, function(t) nn.init.xavier_uniform(t) end)
  self.in_proj_bias = parameter({ 3 * width }, nn.init.zeros)
  self.out_proj = layers.linear(width, width, true)
end

function PoolAttention:forward(query, x, mask)
  local width = x.shape[3]
  local function project(from, first, count)
    return ty.linear(from, self.in_proj_weight:narrow(0, first * width, count * width),
      self.in_proj_bias:narrow(0, first * width, count * width))
  end
  local both = project(x, 1, 2)
  return self.out_proj(nn.attention(project(query, 0, 1), both:narrow(-1, 0, width), both:narrow(-1, width, width),
    { heads = self.heads, mask = mask }))
end

-- What stands for a whole picture: what a learnt query finds in its patches.
local Head = nn.module "SiglipHead"
M.Head = Head

--- Makes what sees pictures of a module: its embeddings, layers, last norm and, where the config asks for it, the head.
---@param tower Module
---@param config table
---@param who string
---@param embeddings Module
function M.build_tower(tower, config, who, embeddings)
  tower.config, tower.who = config, who
  tower.embeddings = embeddings
  tower.encoder = blocks.Encoder(config, who)
  tower.post_layernorm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  if config.vision_use_head then tower.head = Head(config, who) end
end

function Head:init(config, who)
  local width = config.hidden_size
  self.probe = parameter({ 1, 1, width }, function(t) nn.init.normal(t, 0, 1) end)
  self.attention = PoolAttention(width, config.num_attention_heads)
  self.layernorm = nn.LayerNorm(width, { eps = config.layer_norm_eps })
  self.mlp = blocks.Mlp(config, who)
end

--- x [n, patches, hidden] to [n, hidden]. mask: bool [n, 1, 1, patches], those that are there (nil: all).
function Head:forward(x, mask)
  local found = self.attention(self.probe:expand(x.shape[1], 1, x.shape[3]), x, mask)
  return self.mlp(self.layernorm(found), found):select(1, 0)
end

-- ---- configs ----

local shared = {
  hidden_size = { "count", 768 }, intermediate_size = { "count", 3072 }, num_hidden_layers = { "few", 12 },
  num_attention_heads = { "count", 12 }, hidden_act = { "text", "gelu_pytorch_tanh" },
  layer_norm_eps = { "epsilon", 1e-6 }, attention_dropout = { "share", 0 }, initializer_factor = { "number", 1 },
}

-- The fields of both transformers, and `more`.
local function with(more)
  for name, field in pairs(shared) do more[name] = field end
  return more
end

--- The fields of the config of texts.
M.text_fields = with { vocab_size = { "count", 32000 }, max_position_embeddings = { "count", 64 },
  projection_size = { "count", configs.none } }

--- The fields of a config of pictures, with those that differ.
---@param more table<string, table>
---@return table<string, table>
function M.vision_fields(more)
  more.num_channels, more.vision_use_head = { "count", 3 }, { "flag", true }
  return with(more)
end

--- The config of one transformer, of its own file or of a whole model's, where it is under `part`. check(who, config):
-- what else is to be right.
---@param who string
---@param given table
---@param fields table<string, table>
---@param part? string
---@param check? fun(who: string, config: table)
---@return table config
function M.config(who, given, fields, part, check)
  if type(given) == "table" and type(given[part]) == "table" then
    local own = { model_type = given.model_type }
    for key, value in pairs(given[part]) do own[key] = value end
    given = own
  end
  local config = configs.read(who, given, fields)
  configs.divides(who, config, "num_attention_heads", "hidden_size")
  if check then check(who, config) end
  if fields == M.text_fields then config.projection_size = config.projection_size or config.hidden_size end
  return config
end

-- ---- a transformer alone ----

--- A class with one of the transformers, which files call `part`; config.json of a whole model is read too.
---@param name string
---@param model_type string
---@param part string        text_model or vision_model
---@param fields table<string, table>
---@param Transformer table  a class; Transformer(config, who) has run(x, options, whole)
---@param check? fun(who: string, config: table)
---@return table class
function M.single(name, model_type, part, fields, Transformer, check)
  local class = nn.module(name, Pretrained)
  class.model_type, class.architecture = model_type, name
  class.missing_prefixes = { part .. "." }
  class.other_heads = { part == "text_model" and "^vision_model%." or "^text_model%.", "^logit_scale$", "^logit_bias$",
    "^classifier%." }

  function class:init(given)
    self.config = M.config(name, given, fields, part:gsub("_model$", "_config"), check)
    self[part] = Transformer(self.config, name)
  end

  --- Hidden states [n, t, hidden] of the layer that is asked for, behind which nothing is computed. options: as of
  -- forward().
  function class:hidden(x, options) return (self[part]:run(x, options, false)) end

  --- Of texts, tokens i64 [n, t], or of pictures, [n, channels, height, width] or of SigLIP 2 patches [n, most,
  -- values]: hidden states [n, t, hidden], and those of each whole text or picture, [n, hidden] (pictures: where
  -- vision_use_head is true). options:
  --   layer        of which layer hidden states are wanted: nil after the last norm, 0 the embeddings, i after layer i,
  --                -1 after the last layer, -2 after the one before; a list gives a list
  --   norm         whether hidden states go through the last norm (nil: those without `layer`)
  --   mask         of texts: bool or i64 [n, t], 0: padding that is not seen (published models see theirs)
  --   interpolate  of SigLIP's pictures, true: they may have another size than image_size
  --   sizes        of SigLIP 2's patches: i64 [n, 2], rows and columns of each picture
  --   checkpoint   true: the backward pass runs each layer again, whose results then need not be kept
  function class:forward(x, options) return self[part]:run(x, options, true) end

  if part == "vision_model" then
    -- Files of multimodal models have the tower without a head.
    function class.from_config(own, given, state)
      if state and not (state["vision_model.head.probe"] or state["head.probe"]) then
        local config = {}
        for key, value in pairs(type(given.vision_config) == "table" and given.vision_config or given) do
          config[key] = value
        end
        config.model_type, config.vision_use_head = given.model_type, false
        return own(config)
      end
      return own(given)
    end
  end
  return class
end

-- ---- a head over pictures ----

-- The mean of hidden states [n, patches, hidden]; sizes: i64 [n, 2], of pictures whose other places are filled up.
local function pooled(hidden, sizes)
  if not sizes then return hidden:mean { 1 } end
  local counts = (sizes:narrow(1, 0, 1) * sizes:narrow(1, 1, 1)):to { device = hidden.device }
  local there = ty.arange(hidden.shape[2], { device = hidden.device }):lt(counts):to(hidden.dtype)
  return (hidden * there:unsqueeze(-1)):sum(1) / counts:to(hidden.dtype)
end

--- A class that judges pictures: the transformer of them, and a linear layer over the mean of its patches. The other
-- arguments as of single().
---@param name string
---@param model_type string  of the whole model, whose config.json it has
---@return table class
function M.classifier(name, model_type, fields, Transformer, check)
  local class = nn.module(name, Pretrained)
  class.model_type, class.architecture = model_type, name
  class.other_heads = { "^text_model%.", "^logit_scale$", "^logit_bias$" }

  function class:init(given)
    local config = configs.read(name, given, { text_config = { "table", {} }, vision_config = { "table", {} } })
    local own = { model_type = config.model_type }
    for key, value in pairs(config.vision_config) do own[key] = value end
    local vision = M.config(name .. ": vision_config", own, fields, nil, check)
    configs.with_parts(config, { vision_config = vision })
    self.config = config
    self.vision_model = Transformer(vision, name)
    self.classifier = layers.linear(vision.hidden_size, configs.labels(config), true,
      vision.hidden_size ^ -0.5 * vision.initializer_factor)
  end

  --- Logits [n, labels] of pictures [n, channels, height, width] or, of SigLIP 2, of patches [n, most, values].
  -- options: interpolate, sizes and checkpoint, as the encoder of pictures has them.
  function class:forward(x, options)
    local hidden = self.vision_model:run(x, options, false)
    return self.classifier(pooled(hidden, options and options.sizes))
  end

  --- As ViTForImageClassification:loss().
  function class:loss(x, labels, options)
    return classifier.loss(self:forward(x, options), labels, self.config)
  end

  --- The keys of config.json, with those of the encoder of pictures.
  function class:published_config()
    local config = Pretrained.published_config(self)
    local part = Pretrained.published_config(self.vision_model)
    part.model_type, part.architectures, part.initializer_factor = model_type .. "_vision_model", nil, nil
    config.vision_config = part
    return config
  end

  return class
end

return M
