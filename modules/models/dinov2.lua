--- DINOv2: a vision transformer that learnt from pictures alone, with the names and the config.json of transformers.
-- Oquab et al. 2024, "DINOv2: Learning Robust Visual Features without Supervision"; with registers, tokens of no patch
-- in which it may keep what is of none: Darcet et al. 2024, "Vision Transformers Need Registers".
--
--     local model = models.Dinov2 { image_size = 56, patch_size = 14, hidden_size = 128, num_hidden_layers = 6,
--       num_attention_heads = 4 }
--     local hidden, pooled = model(pictures)                    -- [n, 1 + patches, 128], [n, 128]
--     hidden = models.Dinov2WithRegisters { image_size = 56, patch_size = 14, num_register_tokens = 4 } (pictures)
--                                                               -- [n, 1 + 4 + patches, 768]
local ty = require "tycho"
local blocks = require "tycho.models.vit_blocks"
local classifier = require "tycho.models.classifier"
local configs = require "tycho.models.config"
local encoder = require "tycho.models.encoder"
local layers = require "tycho.models.layers"
local Pretrained = require "tycho.models.pretrained"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter

local Embeddings = nn.module "Dinov2Embeddings"

function Embeddings:init(config)
  local function normal(t) nn.init.trunc_normal(t, 0, config.initializer_range) end
  self.rows, self.columns = encoder.grid(config)
  self.cls_token = parameter({ 1, 1, config.hidden_size }, normal)
  if config.use_mask_token ~= false then self.mask_token = parameter({ 1, config.hidden_size }, nn.init.zeros) end
  self.patch_embeddings = blocks.Patches(config)
  self.position_embeddings = parameter({ 1, self.rows * self.columns + 1, config.hidden_size }, normal)
  self.registers = config.num_register_tokens or 0
  if self.registers > 0 then
    self.register_tokens = parameter({ 1, self.registers, config.hidden_size }, nn.init.zeros)
  end
  self.antialias = config.num_register_tokens and "cubic" or nil
  self.dropout = nn.Dropout(config.hidden_dropout_prob)
end

-- hidden: bool [n, patches], those in whose place the token of a mask stands, or nil.
function Embeddings:forward(x, hidden)
  local patches = self.patch_embeddings(x)
  local n, width, rows, columns = table.unpack(patches.shape)
  patches = patches:flatten(2):transpose(1, 2)
  if hidden then patches = ty.where(hidden:unsqueeze(-1), self.mask_token:to(patches.dtype), patches) end
  x = ty.concat({ self.cls_token:expand(n, 1, width), patches }, 1)
    + encoder.resized(self.position_embeddings:squeeze(0), self.rows, self.columns, rows, columns, 1, self.antialias)
  if self.registers > 0 then -- they have no place
    x = ty.concat({ x:narrow(1, 0, 1), self.register_tokens:expand(n, self.registers, width),
      x:narrow(1, 1, rows * columns) }, 1)
  end
  return self.dropout(x)
end

local Scale = nn.module "Dinov2LayerScale"

function Scale:init(config)
  self.lambda1 = parameter({ config.hidden_size }, function(t) t:fill_(config.layerscale_value) end)
end

function Scale:forward(x) return x * self.lambda1 end

local Mlp = nn.module "Dinov2MLP"

function Mlp:init(config, who)
  local width, inner = config.hidden_size, math.tointeger(config.hidden_size * config.mlp_ratio // 1)
  self.fc1 = layers.linear(width, inner, true, config.initializer_range)
  self.fc2 = layers.linear(inner, width, true, config.initializer_range)
  self.activation = layers.activation(who, config, "hidden_act")
end

function Mlp:forward(x) return self.fc2(layers.activated(self.fc1, x, self.activation)) end

-- The gated network of the largest model, of two thirds of the width, rounded up to eights.
local Gated = nn.module "Dinov2SwiGLU"

function Gated:init(config)
  local inner = (math.tointeger(config.hidden_size * config.mlp_ratio * 2 / 3 // 1) + 7) // 8 * 8
  self.inner = inner
  self.weights_in = layers.linear(config.hidden_size, 2 * inner, true, config.initializer_range)
  self.weights_out = layers.linear(inner, config.hidden_size, true, config.initializer_range)
end

function Gated:forward(x)
  local both = self.weights_in(x)
  return self.weights_out(ty.glu(both:narrow(-1, self.inner, self.inner), both:narrow(-1, 0, self.inner), "silu"))
end

local Layer = nn.module "Dinov2Layer"

function Layer:init(config, who)
  self.norm1 = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  self.attention = blocks.Attention(config)
  self.layer_scale1 = Scale(config)
  self.norm2 = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  self.mlp = config.use_swiglu_ffn and Gated(config) or Mlp(config, who)
  self.layer_scale2 = Scale(config)
  self.p = config.drop_path_rate
end

-- Of what a block adds, whole rows of the batch are left out in training. Huang et al. 2016, "Deep Networks with
-- Stochastic Depth".
local function kept(self, x)
  if not self.training or self.p == 0 then return x end
  local rows = ty.rand({ x.shape[1], 1, 1 }, { device = x.device }):ge(self.p):to(x.dtype)
  return x * rows / (1 - self.p)
end

function Layer:forward(x)
  x = x + kept(self, self.layer_scale1(self.attention(self.norm1(x))))
  return x + kept(self, self.layer_scale2(self.mlp(self.norm2(x))))
end

local Encoder = nn.module "Dinov2Encoder"

function Encoder:init(config, who)
  self.layer = nn.ModuleList {}
  for _ = 1, config.num_hidden_layers do self.layer:append(Layer(config, who)) end
end

local fields = {
  hidden_size = { "count", 768 }, num_hidden_layers = { "few", 12 }, num_attention_heads = { "count", 12 },
  mlp_ratio = { "number", 4 }, hidden_act = { "text", "gelu" }, hidden_dropout_prob = { "share", 0 },
  attention_probs_dropout_prob = { "share", 0 }, initializer_range = { "number", 0.02 },
  layer_norm_eps = { "epsilon", 1e-6 }, image_size = { "size", 224 }, patch_size = { "size", 14 },
  num_channels = { "count", 3 }, qkv_bias = { "flag", true }, layerscale_value = { "number", 1 },
  drop_path_rate = { "share", 0 }, use_swiglu_ffn = { "flag", false }, use_mask_token = { "flag", true },
  -- Of backbones, whose maps are not made here.
  apply_layernorm = { "flag", true }, reshape_hidden_states = { "flag", true },
}

-- With registers: no key for the token of a mask, which is always there, and patches of 16.
local with_registers = {}
for name, field in pairs(fields) do with_registers[name] = field end
with_registers.use_mask_token, with_registers.patch_size = nil, { "size", 16 }
with_registers.num_register_tokens = { "count", 4 }

--- DINOv2: a vision transformer that takes pictures of every size.
---@class Dinov2: Pretrained
local Dinov2 = nn.module("Dinov2", Pretrained)
Dinov2.model_type, Dinov2.architecture = "dinov2", "Dinov2Model"
Dinov2.prefixes = { "dinov2." }
Dinov2.other_heads = { "^classifier%." }
Dinov2.family, Dinov2.fields = "Dinov2", fields

--- config: the keys of config.json, among them image_size (224), patch_size (14), hidden_size (768), mlp_ratio (4),
-- num_hidden_layers and num_attention_heads (12), layerscale_value (1), use_swiglu_ffn (false).
---@param config table
function Dinov2:init(config)
  local who = self.family
  config = configs.read(who, config, self.fields)
  configs.divides(who, config, "num_attention_heads", "hidden_size")
  encoder.check_grid(who, config)
  if config.hidden_size * config.mlp_ratio < 1 then
    error(("%s: config key 'mlp_ratio': it leaves the feed-forward network no width"):format(who), 0)
  elseif config.drop_path_rate == 1 then
    error(("%s: config key 'drop_path_rate' must be a number below 1, got 1"):format(who), 0)
  end
  self.config = config
  self.embeddings = Embeddings(config)
  self.encoder = Encoder(config, who)
  self.layernorm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
end

-- Published models are used at every size, and so are these: positions are interpolated.
local function run(self, x, options, whole)
  local who = self.family
  local o = encoder.options(who, options, { "mask" })
  x = encoder.pictures(who, x, self.config, self.embeddings.patch_embeddings.projection.weight, true)
  if o.mask and not self.embeddings.mask_token then
    error(("%s: mask: the model has no token of a mask (use_mask_token)"):format(who), 0)
  end
  return encoder.through(who, self.encoder.layer, self.embeddings(x, o.mask and o.mask:to "bool"), nil, o, whole,
    self.layernorm)
end

--- Hidden states [n, 1 + patches, hidden] of pictures x [n, channels, height, width] of any size, the first that of the
-- class, then of a model with registers those; of the layer that is asked for, behind which nothing is computed.
-- options: layer (nil: after the last norm; 0 the embeddings, i after layer i, -1 after the last one; a list gives a
-- list), norm (false with layer), mask (bool [n, patches]: those that are hidden), checkpoint.
---@param x Tensor
---@param options? {layer?: integer|integer[], norm?: boolean, mask?: Tensor, checkpoint?: boolean}
---@return Tensor|Tensor[] hidden
function Dinov2:hidden(x, options) return (run(self, x, options, false)) end

--- Hidden states, as of hidden(), and that of the class after the last norm, [n, hidden].
---@param x Tensor
---@param options? table
---@return Tensor|Tensor[] hidden
---@return Tensor pooled
function Dinov2:forward(x, options)
  local hidden, last = run(self, x, options, true)
  return hidden, self.layernorm(last:select(1, 0))
end

--- DINOv2 with registers: hidden states [n, 1 + registers + patches, hidden].
---@class Dinov2WithRegisters: Dinov2
local Dinov2WithRegisters = nn.module("Dinov2WithRegisters", Dinov2)
Dinov2WithRegisters.model_type = "dinov2_with_registers"
Dinov2WithRegisters.architecture = "Dinov2WithRegistersModel"
Dinov2WithRegisters.prefixes = { "dinov2_with_registers." }
Dinov2WithRegisters.family, Dinov2WithRegisters.fields = "Dinov2WithRegisters", with_registers

--- config: the keys of config.json, as Dinov2 has them (patch_size 16), and num_register_tokens (4).
---@param config table
function Dinov2WithRegisters:init(config) Dinov2.init(self, config) end

--- DINOv2 with a head over the class and the mean of the patches.
---@class Dinov2ForImageClassification: Pretrained
local Dinov2ForImageClassification = nn.module("Dinov2ForImageClassification", Pretrained)
Dinov2ForImageClassification.model_type = "dinov2"
Dinov2ForImageClassification.architecture = "Dinov2ForImageClassification"
Dinov2ForImageClassification.base = Dinov2

--- config: the keys of config.json, among them num_labels or id2label, and problem_type.
---@param config table
function Dinov2ForImageClassification:init(config)
  self[self.model_type] = self.base(config)
  self.config = self[self.model_type].config
  self.classifier = layers.linear(2 * self.config.hidden_size, configs.labels(self.config), true,
    self.config.initializer_range)
end

--- Logits [n, labels] of pictures x [n, channels, height, width], from the class beside the mean of the patches.
-- options: checkpoint, as of Dinov2.
---@param x Tensor
---@param options? {checkpoint?: boolean}
---@return Tensor logits
function Dinov2ForImageClassification:forward(x, options)
  local hidden = self[self.model_type]:hidden(x, options)
  local before = 1 + (self.config.num_register_tokens or 0)
  local patches = hidden:narrow(1, before, hidden.shape[2] - before):mean { 1 }
  return self.classifier(ty.concat({ hidden:select(1, 0), patches }, 1))
end

--- As ViTForImageClassification:loss().
---@param x Tensor
---@param labels Tensor
---@return Tensor loss
function Dinov2ForImageClassification:loss(x, labels, options)
  return classifier.loss(self:forward(x, options), labels, self.config)
end

--- DINOv2 with registers and a head over the class and the mean of the patches, without the registers.
---@class Dinov2WithRegistersForImageClassification: Dinov2ForImageClassification
local Registered = nn.module("Dinov2WithRegistersForImageClassification", Dinov2ForImageClassification)
Registered.model_type, Registered.architecture = "dinov2_with_registers", "Dinov2WithRegistersForImageClassification"
Registered.base = Dinov2WithRegisters

--- config: the keys of config.json, among them num_labels or id2label, and problem_type.
---@param config table
function Registered:init(config) Dinov2ForImageClassification.init(self, config) end

return { Dinov2 = Dinov2, Dinov2ForImageClassification = Dinov2ForImageClassification,
  Dinov2WithRegisters = Dinov2WithRegisters, Dinov2WithRegistersForImageClassification = Registered }
