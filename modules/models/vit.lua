--- Vision transformers, with the names and the config.json of transformers. Dosovitskiy et al. 2021, "An Image is Worth
-- 16x16 Words: Transformers for Image Recognition at Scale"; with a second token that learns from a teacher: Touvron et
-- al. 2021, "Training data-efficient image transformers & distillation through attention" (DeiT).
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

local blocks = require "tycho.models.vit_blocks"

local nn, Dense = ty.nn, layers.Dense
local parameter = require("tycho.nn.options").parameter

local Embeddings = nn.module "ViTEmbeddings"

-- distilled: with a token for what a teacher says, behind that of the class.
function Embeddings:init(config, distilled)
  local rows, columns = encoder.grid(config)
  local function normal(t) nn.init.trunc_normal(t, 0, config.initializer_range) end
  self.rows, self.columns = rows, columns
  self.cls_token = parameter({ 1, 1, config.hidden_size }, normal)
  if distilled then self.distillation_token = parameter({ 1, 1, config.hidden_size }, normal) end
  self.patch_embeddings = blocks.Patches(config)
  self.position_embeddings = parameter({ 1, rows * columns + (distilled and 2 or 1), config.hidden_size }, normal)
  self.dropout = nn.Dropout(config.hidden_dropout_prob)
end

function Embeddings:forward(x)
  local patches = self.patch_embeddings(x)
  local n, width, rows, columns = table.unpack(patches.shape)
  local list = { self.cls_token:expand(n, 1, width) }
  if self.distillation_token then list[2] = self.distillation_token:expand(n, 1, width) end
  local before = #list
  list[before + 1] = patches:flatten(2):transpose(1, 2)
  return self.dropout(ty.concat(list, 1)
    + encoder.resized(self.position_embeddings:squeeze(0), self.rows, self.columns, rows, columns, before))
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
ViT.family = "ViT"
ViT.other_heads = { "^classifier%.", "^cls_classifier%.", "^distillation_classifier%.", "^decoder%.",
  "embeddings%.mask_token$" }

--- config: the keys of config.json, among them image_size (224), patch_size (16), hidden_size (768), intermediate_size
-- (3072), num_hidden_layers and num_attention_heads (12). pooler (true): with the layer over the first token.
---@param config table
---@param pooler? boolean
function ViT:init(config, pooler)
  local who = self.family
  config = configs.read(who, config, fields)
  configs.divides(who, config, "num_attention_heads", "hidden_size")
  encoder.check_grid(who, config)
  self.config = config
  self.embeddings = Embeddings(config, self.distilled)
  self.encoder = blocks.Encoder(config, who)
  self.layernorm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  if pooler ~= false then
    self.pooler = Dense(config.hidden_size, config.pooler_output_size or config.hidden_size,
      layers.activation(who, config, "pooler_act"), config.initializer_range)
  end
end

-- Published with a pooler as well as without one.
function ViT.from_config(class, config, state)
  return class(config, not state
    or (state["pooler.dense.weight"] or state[class.prefixes[1] .. "pooler.dense.weight"]) ~= nil)
end

local function run(self, x, options, whole)
  local who = self.family
  local o = encoder.options(who, options, { "interpolate" })
  x = encoder.pictures(who, x, self.config, self.embeddings.patch_embeddings.projection.weight, o.interpolate)
  return encoder.through(who, self.encoder.layer, self.embeddings(x), nil, o, whole, self.layernorm)
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

--- DeiT: ViT with a token that learns what a teacher says, which comes second.
---@class DeiT: ViT
local DeiT = nn.module("DeiT", ViT)
DeiT.model_type, DeiT.architecture = "deit", "DeiTModel"
DeiT.family, DeiT.distilled, DeiT.prefixes = "DeiT", true, { "deit." }

--- config: the keys of config.json, as ViT has them. pooler (true): with the layer over the first token.
---@param config table
---@param pooler? boolean
function DeiT:init(config, pooler) ViT.init(self, config, pooler) end

-- A head over a token of DeiT: places of the heads among the tokens, by their names in files.
local function judges(name, heads)
  local class = nn.module(name, Pretrained)
  class.model_type, class.architecture = "deit", name
  class.other_heads = { "^deit%.pooler%.", "^pooler%.", "embeddings%.mask_token$" }
  for _, other in ipairs { "classifier", "cls_classifier", "distillation_classifier" } do
    if not heads[other] then table.insert(class.other_heads, "^" .. other .. "%.") end
  end

  --- config: the keys of config.json, among them num_labels or id2label, and problem_type.
  function class:init(config)
    self.deit = DeiT(config, false)
    self.config = self.deit.config
    for head in pairs(heads) do
      self[head] = layers.linear(self.config.hidden_size, configs.labels(self.config), true,
        self.config.initializer_range)
    end
  end

  --- Logits [n, labels] of pictures x [n, channels, height, width], the mean of the heads; with two heads then those of
  -- the class and of the teacher's token. options: interpolate, checkpoint, as of ViT.
  ---@param x Tensor
  ---@param options? {interpolate?: boolean, checkpoint?: boolean}
  ---@return Tensor logits
  function class:forward(x, options)
    local hidden = self.deit:hidden(x, options)
    if heads.classifier then return self.classifier(hidden:select(1, 0)) end
    local own = self.cls_classifier(hidden:select(1, 0))
    local taught = self.distillation_classifier(hidden:select(1, 1))
    return (own + taught) / 2, own, taught
  end

  --- As ViTForImageClassification:loss().
  ---@param x Tensor
  ---@param labels Tensor
  ---@return Tensor loss
  function class:loss(x, labels, options) return classifier.loss(self:forward(x, options), labels, self.config) end

  return class
end

--- DeiT with a head over the class.
---@class DeiTForImageClassification: Pretrained
local DeiTForImageClassification = judges("DeiTForImageClassification", { classifier = 0 })
--- DeiT with a head over the class and one over the teacher's token.
---@class DeiTForImageClassificationWithTeacher: Pretrained
local WithTeacher = judges("DeiTForImageClassificationWithTeacher", { cls_classifier = 0, distillation_classifier = 1 })

return { ViT = ViT, ViTForImageClassification = ViTForImageClassification, DeiT = DeiT,
  DeiTForImageClassification = DeiTForImageClassification, DeiTForImageClassificationWithTeacher = WithTeacher }
