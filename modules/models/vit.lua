--- Vision transformers, with the names and the config.json of transformers. Dosovitskiy et al. 2021, "An Image is Worth
-- 16x16 Words: Transformers for Image Recognition at Scale".
--
--     local model = models.ViTForImageClassification { image_size = 64, patch_size = 8, hidden_size = 128,
--       intermediate_size = 512, num_hidden_layers = 6, num_attention_heads = 4, num_labels = 10 }
--     local logits = model(pictures)
local ty = require "tycho"
local classifier = require "tycho.models.classifier"
local configs = require "tycho.models.config"
local encoder = require "tycho.models.encoder"
local layers = require "tycho.models.layers"
local Pretrained = require "tycho.models.pretrained"

local nn, Dense = ty.nn, layers.Dense
local parameter = require("tycho.nn.options").parameter

local SelfAttention = nn.module "ViTSelfAttention"

function SelfAttention:init(config)
  self.heads, self.p = config.num_attention_heads, config.attention_probs_dropout_prob
  for _, name in ipairs { "query", "key", "value" } do
    self[name] = layers.linear(config.hidden_size, config.hidden_size, config.qkv_bias, config.initializer_range)
  end
end

function SelfAttention:forward(x)
  return nn.attention(self.query(x), self.key(x), self.value(x),
    { heads = self.heads, dropout = self.training and self.p or 0 })
end

-- The published names nest: attention.attention, attention.output.
local Attention = nn.module "ViTAttention"

function Attention:init(config)
  self.attention = SelfAttention(config)
  self.output = Dense(config.hidden_size, config.hidden_size, nil, config.initializer_range)
end

function Attention:forward(x) return self.output(self.attention(x)) end

local Layer = nn.module "ViTLayer"

function Layer:init(config)
  local width, std = config.hidden_size, config.initializer_range
  self.layernorm_before = nn.LayerNorm(width, { eps = config.layer_norm_eps })
  self.attention = Attention(config)
  self.layernorm_after = nn.LayerNorm(width, { eps = config.layer_norm_eps })
  self.intermediate = Dense(width, config.intermediate_size, layers.activation("ViT", config, "hidden_act"), std)
  self.output = Dense(config.intermediate_size, width, nil, std)
  self.p = config.hidden_dropout_prob
end

function Layer:forward(x)
  local norm = self.layernorm_after
  local y
  x, y = ty.add_layer_norm(self.attention(self.layernorm_before(x)), x, norm.weight, norm.bias, norm.eps, self.p,
    self.training)
  y = self.output(self.intermediate(y))
  if self.training and self.p > 0 then y = ty.dropout(y, self.p, true) end
  return x + y
end

local Encoder = nn.module "ViTEncoder"

function Encoder:init(config)
  self.layer = nn.ModuleList {}
  for _ = 1, config.num_hidden_layers do self.layer:append(Layer(config)) end
end

local Patches = nn.module "ViTPatches"

function Patches:init(config)
  local size = config.patch_size
  self.projection = nn.Conv2d(config.num_channels, config.hidden_size, size, { stride = size })
  if self.projection.weight.device == "meta" then return end
  nn.init.trunc_normal(self.projection.weight, 0, config.initializer_range)
  nn.init.zeros(self.projection.bias)
end

-- [n, channels, h, w] to [n, width, rows, columns].
function Patches:forward(x) return self.projection(x) end

local Embeddings = nn.module "ViTEmbeddings"

function Embeddings:init(config)
  local rows, columns = encoder.grid(config)
  local function normal(t) nn.init.trunc_normal(t, 0, config.initializer_range) end
  self.rows, self.columns = rows, columns
  self.cls_token = parameter({ 1, 1, config.hidden_size }, normal)
  self.patch_embeddings = Patches(config)
  self.position_embeddings = parameter({ 1, rows * columns + 1, config.hidden_size }, normal)
  self.dropout = nn.Dropout(config.hidden_dropout_prob)
end

function Embeddings:forward(x)
  local patches = self.patch_embeddings(x)
  local n, width, rows, columns = table.unpack(patches.shape)
  x = ty.concat({ self.cls_token:expand(n, 1, width), patches:flatten(2):transpose(1, 2) }, 1)
  return self.dropout(x + encoder.resized(self.position_embeddings:squeeze(0), self.rows, self.columns, rows, columns))
end

local fields = {
  hidden_size = { "count", 768 }, num_hidden_layers = { "few", 12 }, num_attention_heads = { "count", 12 },
  intermediate_size = { "count", 3072 }, hidden_act = { "text", "gelu" }, hidden_dropout_prob = { "share", 0 },
  attention_probs_dropout_prob = { "share", 0 }, initializer_range = { "number", 0.02 },
  layer_norm_eps = { "epsilon", 1e-12 }, image_size = { "size", 224 }, patch_size = { "size", 16 },
  num_channels = { "count", 3 }, qkv_bias = { "flag", true }, encoder_stride = { "count", 16 },
  pooler_output_size = { "count", configs.none }, pooler_act = { "text", "tanh" },
}

---@class ViT: Pretrained
local ViT = nn.module("ViT", Pretrained)
ViT.model_type, ViT.architecture = "vit", "ViTModel"
ViT.prefixes = { "vit." }
ViT.other_heads = { "^classifier%.", "^decoder%.", "embeddings%.mask_token$" }

--- config: the keys of config.json, among them image_size (224), patch_size (16), hidden_size (768), intermediate_size
-- (3072), num_hidden_layers and num_attention_heads (12). pooler (true): with the layer over the first token.
---@param config table
---@param pooler? boolean
function ViT:init(config, pooler)
  config = configs.read("ViT", config, fields)
  configs.divides("ViT", config, "num_attention_heads", "hidden_size")
  encoder.check_grid("ViT", config)
  self.config = config
  self.embeddings = Embeddings(config)
  self.encoder = Encoder(config)
  self.layernorm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  if pooler ~= false then
    self.pooler = Dense(config.hidden_size, config.pooler_output_size or config.hidden_size,
      layers.activation("ViT", config, "pooler_act"), config.initializer_range)
  end
end

-- Published with a pooler as well as without one.
function ViT.from_config(class, config, state)
  return class(config, not state or (state["pooler.dense.weight"] or state["vit.pooler.dense.weight"]) ~= nil)
end

local function run(self, x, options, whole)
  local o = encoder.options("ViT", options, { "interpolate" })
  x = encoder.pictures("ViT", x, self.config, self.embeddings.patch_embeddings.projection.weight, o.interpolate)
  return encoder.through("ViT", self.encoder.layer, self.embeddings(x), nil, o, whole, self.layernorm)
end

--- Hidden states [n, 1 + patches, hidden] of pictures x [n, channels, height, width], the first that of the class; of
-- the layer that is asked for, behind which nothing is computed. options: layer (nil: after the last norm; 0 the
-- embeddings, i after layer i, -1 after the last one; a list gives a list), norm (false with layer), interpolate
-- (false; true: pictures may have another size than image_size), checkpoint.
---@param x Tensor
---@param options? {layer?: integer|integer[], norm?: boolean, interpolate?: boolean, checkpoint?: boolean}
---@return Tensor|Tensor[] hidden
function ViT:hidden(x, options) return (run(self, x, options, false)) end

--- Hidden states, as of hidden(), and where the model has a pooler what it makes of the class, [n, pooler_output_size].
---@param x Tensor
---@param options? table
---@return Tensor|Tensor[] hidden
---@return Tensor? pooled
function ViT:forward(x, options)
  local hidden, last = run(self, x, options, true)
  if not self.pooler then return hidden end
  return hidden, self.pooler(self.layernorm(last:select(1, 0)))
end

---@class ViTForImageClassification: Pretrained
local ViTForImageClassification = nn.module("ViTForImageClassification", Pretrained)
ViTForImageClassification.model_type, ViTForImageClassification.architecture = "vit", "ViTForImageClassification"
ViTForImageClassification.other_heads = { "^vit%.pooler%.", "^pooler%.", "embeddings%.mask_token$" }

--- config: the keys of config.json, among them num_labels or id2label, and problem_type.
---@param config table
function ViTForImageClassification:init(config)
  self.vit = ViT(config, false)
  self.config = self.vit.config
  self.classifier = layers.linear(self.config.hidden_size, configs.labels(self.config), true,
    self.config.initializer_range)
end

--- Logits [n, labels] of pictures x [n, channels, height, width]. options: interpolate, checkpoint, as of ViT.
---@param x Tensor
---@param options? {interpolate?: boolean, checkpoint?: boolean}
---@return Tensor logits
function ViTForImageClassification:forward(x, options)
  return self.classifier(self.vit:hidden(x, options):select(1, 0))
end

--- Mean cross entropy of labels i64 [n]; of labels [n, labels] in floating point what the config's problem_type says:
-- binary cross entropy (multi_label_classification) or the squared error.
---@param x Tensor
---@param labels Tensor
---@return Tensor loss
function ViTForImageClassification:loss(x, labels, options)
  return classifier.loss(self:forward(x, options), labels, self.config)
end

return { ViT = ViT, ViTForImageClassification = ViTForImageClassification }
