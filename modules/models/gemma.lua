--- Gemma: norms whose weights count from 1, embeddings scaled by the root of their width. Gemma Team 2024, "Gemma: Open
-- Models Based on Gemini Research and Technology".
local configs = require "tycho.models.config"
local decoder = require "tycho.models.decoder"
local gemma2 = require("tycho.models.gemma2").family.shared
local layers = require "tycho.models.layers"

local nn = require("tycho").nn
local none = configs.none

local Layer = nn.module "GemmaFirstLayer"

function Layer:init(config)
  local width, eps = config.hidden_size, config.rms_norm_eps
  self.self_attn = layers.Attention(decoder.attention(config))
  self.mlp = layers.GatedMlp(width, config.intermediate_size,
    configs.activation("Gemma", config.hidden_activation or "gelu_pytorch_tanh", "hidden_activation"))
  self.input_layernorm, self.post_attention_layernorm = gemma2.Norm(width, eps), gemma2.Norm(width, eps)
end

--- The stream [b, t, hidden] after the layer, of the last at.last positions where that is given.
function Layer:forward(stream, _, at)
  stream = layers.tail(stream, 1, at.last) + self.self_attn(self.input_layernorm(stream), at)
  return stream + self.mlp(self.post_attention_layernorm(stream))
end

-- hidden_act says "gelu" in the first files, whose models were trained with the tanh form; hidden_activation counts.
return gemma2.finish(decoder.define {
  name = "Gemma", model_type = "gemma", architecture = "GemmaForCausalLM",
  fields = { head_dim = { "count", 256 }, hidden_act = { "text", none }, hidden_activation = { "text", none },
    attention_bias = { "flag", false }, tie_word_embeddings = { "flag", true },
    use_bidirectional_attention = { "flag", none }, num_image_tokens = { "count", none } },
  layer = function(config) return Layer(config) end,
  norm = function(config) return gemma2.Norm(config.hidden_size, config.rms_norm_eps) end,
})
