--- What the transformers of CLIP and of SigLIP are made of, with the names that both publish: attention, feed-forward
-- network, the layer of both and the stack of layers; and how their outputs meet. A config says hidden_size,
-- intermediate_size, num_hidden_layers, num_attention_heads, hidden_act, layer_norm_eps, attention_dropout and
-- initializer_factor.
local nn = require("tycho").nn
local arguments = require "tycho.arguments"
local layers = require "tycho.models.layers"

local M = {}

local Attention = nn.module "CLIPAttention"
M.Attention = Attention

function Attention:init(config)
  local width, factor = config.hidden_size, config.initializer_factor
  local std = width ^ -0.5 * (2 * config.num_hidden_layers) ^ -0.5 * factor
  self.heads, self.p = config.num_attention_heads, config.attention_dropout
  self.q_proj = layers.linear(width, width, true, std)
  self.k_proj = layers.linear(width, width, true, std)
  self.v_proj = layers.linear(width, width, true, std)
  self.out_proj = layers.linear(width, width, true, width ^ -0.5 * factor)
end

-- at: mask and causal, as nn.attention() has them.
function Attention:forward(x, residual, at)
  return self.out_proj(nn.attention(self.q_proj(x), self.k_proj(x), self.v_proj(x), { heads = self.heads,
    mask = at.mask, causal = at.causal, dropout = self.training and self.p or 0 }), residual)
end

local Mlp = nn.module "CLIPMLP"
M.Mlp = Mlp

function Mlp:init(config, who)
  local width, factor = config.hidden_size, config.initializer_factor
  self.fc1 = layers.linear(width, config.intermediate_size, true, (2 * width) ^ -0.5 * factor)
  self.fc2 = layers.linear(config.intermediate_size, width, true,
    width ^ -0.5 * (2 * config.num_hidden_layers) ^ -0.5 * factor)
  self.activation = layers.activation(who, config, "hidden_act")
end

--- x [..., hidden], and what is added to the result, or nil.
function Mlp:forward(x, residual) return self.fc2(layers.activated(self.fc1, x, self.activation), residual) end

local Layer = nn.module "CLIPEncoderLayer"

function Layer:init(config, who)
  self.self_attn = Attention(config)
  self.layer_norm1 = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  self.mlp = Mlp(config, who)
  self.layer_norm2 = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
end

function Layer:forward(x, at)
  x = self.self_attn(self.layer_norm1(x), x, at)
  return self.mlp(self.layer_norm2(x), x)
end

local Encoder = nn.module "CLIPEncoder"
M.Encoder = Encoder

--- who: for errors.
function Encoder:init(config, who)
  self.layers = nn.ModuleList {}
  for _ = 1, config.num_hidden_layers do self.layers:append(Layer(config, who)) end
end

--- The cosines [pictures, texts] of a model's features of pictures and of texts, and both features, of length 1. who:
-- for errors. options: pictures, mask (of the tokens), interpolate, sizes (of pictures in patches), checkpoint.
---@param who string
---@param model Module  with text_features() and image_features()
---@param tokens Tensor  i64 [texts, t]
---@param options {pictures: Tensor, mask?: Tensor, interpolate?: boolean, sizes?: Tensor, checkpoint?: boolean}
---@return Tensor cosines
---@return Tensor image
---@return Tensor text
function M.cosines(who, model, tokens, options)
  local o = arguments.read(who, options, { pictures = arguments.none, mask = arguments.none, interpolate = false,
    sizes = arguments.none, checkpoint = false }, { pictures = "a tensor", mask = "a tensor", sizes = "a tensor" })
  if not o.pictures then arguments.fail("%s: pictures: expected a tensor, got nil", who) end
  local text = nn.normalize(model:text_features(tokens, { mask = o.mask, checkpoint = o.checkpoint }))
  local image = nn.normalize(model:image_features(o.pictures,
    { interpolate = o.interpolate or nil, sizes = o.sizes, checkpoint = o.checkpoint }))
  return image:matmul(text:transpose(0, 1)), image, text
end

return M
