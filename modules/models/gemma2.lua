--- Gemma 2: norms before and behind attention and the feed-forward network, whose weights count from 1; embeddings
-- scaled by the root of their width; caps of the scores of attention and of the logits; every other layer sees a
-- window. Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size".
local ty = require "tycho"
local configs = require "tycho.models.config"
local decoder = require "tycho.models.decoder"
local layers = require "tycho.models.layers"

local nn = ty.nn
local none = configs.none

-- x / sqrt(mean(x^2) + eps) * (1 + weight), rounded once.
local Norm = nn.module "GemmaRMSNorm"

function Norm:init(width, eps)
  self.width, self.eps = width, eps
  self.weight = require("tycho.nn.options").parameter({ width }, nn.init.zeros)
end

function Norm:forward(x)
  local wide = x.dtype == "f64" and "f64" or "f32"
  return ty.rms_norm(x:to(wide), { self.width }, self.weight:to(wide) + 1, self.eps):to(x.dtype)
end

function Norm:describe() return tostring(self.width) end

local Layer = nn.module "GemmaLayer"

function Layer:init(who, config, attention)
  local width, eps = config.hidden_size, config.rms_norm_eps
  self.self_attn = layers.Attention(attention)
  self.mlp = layers.GatedMlp(width, config.intermediate_size,
    configs.activation(who, config.hidden_activation, "hidden_activation"))
  self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)
  self.pre_feedforward_layernorm, self.post_feedforward_layernorm = Norm(width, eps), Norm(width, eps)
end

--- The stream [b, t, hidden] after the layer, of the last at.last positions where that is given.
function Layer:forward(stream, _, at)
  local attended = self.post_attention_layernorm(self.self_attn(self.input_layernorm(stream), at))
  stream = layers.tail(stream, 1, at.last) + attended
  return stream + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(stream)))
end

local function positive(who, config, keys)
  for _, key in ipairs(keys) do
    if config[key] and config[key] <= 0 then
      error(("%s: config key '%s': expected a positive number, got %g"):format(who, key, config[key]), 0)
    end
  end
end

-- Of the whole family: fields of the config, the layer, what embeddings and logits go through.
local M = { Norm = Norm, Layer = Layer, fields = {
  head_dim = { "count", 256 }, hidden_act = { "text", none }, hidden_activation = { "text", "gelu_pytorch_tanh" },
  attention_bias = { "flag", false }, tie_word_embeddings = { "flag", true },
  query_pre_attn_scalar = { "number", 256 }, sliding_window = { "count", 4096 }, layer_types = { "texts", none },
  final_logit_softcapping = { "number", none }, attn_logit_softcapping = { "number", none },
  use_bidirectional_attention = { "flag", none } } }

function M.check(who, config)
  configs.only(who, config, { use_bidirectional_attention = false })
  positive(who, config, { "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping" })
end

--- Options of the attention of a layer.
function M.attention(config, kind)
  return decoder.attention(config, { scale = config.query_pre_attn_scalar ^ -0.5,
    softcap = config.attn_logit_softcapping, window = kind == "sliding_attention" and config.sliding_window or nil })
end

local digits = { bf16 = 7, f16 = 10, f32 = 23 } -- behind the point

-- A positive number as a dtype has it.
local function rounded(x, dtype)
  if not digits[dtype] then return x end
  local unit = 2.0 ^ (math.floor(math.log(x, 2)) - digits[dtype])
  return math.floor(x / unit + 0.5) * unit
end

--- Gives a class of decoder.define() the scaled embeddings and the capped logits. The scale is rounded as the weights
-- are, which the published models have learnt with.
function M.finish(class)
  function class:embed(tokens)
    local x = self.model.embed_tokens(tokens)
    return x * rounded(math.sqrt(self.config.hidden_size), x.dtype)
  end

  function class:head(hidden)
    local logits, cap = decoder.head(self, hidden), self.config.final_logit_softcapping
    if cap then logits = (logits / cap):tanh() * cap end
    return logits
  end

  return class
end

local fields = {}
for name, field in pairs(M.fields) do fields[name] = field end
fields.final_logit_softcapping, fields.attn_logit_softcapping = { "number", 30, null = false },
  { "number", 50, null = false }

local Gemma2 = M.finish(decoder.define {
  name = "Gemma2", model_type = "gemma2", architecture = "Gemma2ForCausalLM", fields = fields, shared = M,
  check = function(config)
    M.check("Gemma2", config)
    config.layer_types = configs.layer_types("Gemma2", config, function(i) return i % 2 == 0 end)
  end,
  layer = function(config, i) return Layer("Gemma2", config, M.attention(config, config.layer_types[i])) end,
  norm = function(config) return Norm(config.hidden_size, config.rms_norm_eps) end,
})

return Gemma2
