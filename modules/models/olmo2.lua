--- OLMo 2: Llama with norms behind attention and the feed-forward network in place of those before them, and norms of
-- queries and keys over all heads. OLMo Team 2024, "2 OLMo 2 Furious".
local ty = require "tycho"
local configs = require "tycho.models.config"
local decoder = require "tycho.models.decoder"
local layers = require "tycho.models.layers"

local nn = ty.nn

local Layer = nn.module "Olmo2Layer"

function Layer:init(config)
  self.self_attn = layers.Attention(decoder.attention(config, { norm_eps = config.rms_norm_eps, whole_norms = true }))
  self.mlp = layers.GatedMlp(config.hidden_size, config.intermediate_size,
    configs.activation("Olmo2", config.hidden_act, "hidden_act"))
  self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, { eps = config.rms_norm_eps })
  self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, { eps = config.rms_norm_eps })
end

--- The stream [b, t, hidden] after the layer, of the last at.last positions where that is given.
function Layer:forward(stream, _, at)
  local attended = self.post_attention_layernorm(self.self_attn(stream, at))
  stream = layers.tail(stream, 1, at.last) + attended
  return stream + self.post_feedforward_layernorm(self.mlp(stream))
end

return decoder.define {
  name = "Olmo2", model_type = "olmo2", architecture = "Olmo2ForCausalLM",
  fields = { attention_bias = { "flag", false }, rms_norm_eps = { "epsilon", 1e-5 } },
  layer = Layer,
}
