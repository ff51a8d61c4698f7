--- What vision transformers are made of in the files of ViT, DeiT and DINOv2: attention, the layer, the stack of
-- layers, patches of pixels. A config says hidden_size, num_attention_heads, attention_probs_dropout_prob, qkv_bias,
-- initializer_range, and of a layer intermediate_size, hidden_act, hidden_dropout_prob, layer_norm_eps.
local ty = require "tycho"
local layers = require "tycho.models.layers"

local nn, Dense = ty.nn, layers.Dense
local M = {}

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
M.Attention = Attention

function Attention:init(config)
  self.attention = SelfAttention(config)
  self.output = Dense(config.hidden_size, config.hidden_size, nil, config.initializer_range)
end

function Attention:forward(x) return self.output(self.attention(x)) end

local Layer = nn.module "ViTLayer"

function Layer:init(config, who)
  local width, std = config.hidden_size, config.initializer_range
  self.layernorm_before = nn.LayerNorm(width, { eps = config.layer_norm_eps })
  self.attention = Attention(config)
  self.layernorm_after = nn.LayerNorm(width, { eps = config.layer_norm_eps })
  self.intermediate = Dense(width, config.intermediate_size, layers.activation(who, config, "hidden_act"), std)
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
M.Encoder = Encoder

--- who: for errors.
function Encoder:init(config, who)
  self.layer = nn.ModuleList {}
  for _ = 1, config.num_hidden_layers do self.layer:append(Layer(config, who)) end
end

local Patches = nn.module "ViTPatches"
M.Patches = Patches

function Patches:init(config)
  local size = config.patch_size
  self.projection = nn.Conv2d(config.num_channels, config.hidden_size, size, { stride = size })
  if self.projection.weight.device == "meta" then return end
  nn.init.trunc_normal(self.projection.weight, 0, config.initializer_range)
  nn.init.zeros(self.projection.bias)
end

--- [n, channels, h, w] to [n, width, rows, columns].
function Patches:forward(x) return self.projection(x) end

return M
