--- Phi-3 and Phi-4-mini: Llama with one product for queries, keys and values and one for gate and up, perhaps a sliding
-- window, a part of each head that is turned, and LongRoPE. Abdin et al. 2024, "Phi-3 Technical Report".
local ty = require "tycho"
local configs = require "tycho.models.config"
local decoder = require "tycho.models.decoder"
local layers = require "tycho.models.layers"

local nn = ty.nn

local Mlp = nn.module "Phi3Mlp"

function Mlp:init(config)
  self.gate_up_proj = layers.linear(config.hidden_size, 2 * config.intermediate_size)
  self.down_proj = layers.linear(config.intermediate_size, config.hidden_size)
  self.activation = configs.activation("Phi3", config.hidden_act, "hidden_act")
end

function Mlp:forward(x)
  local gate, up = self.gate_up_proj(x):chunk(2, -1)
  return self.down_proj(ty.glu(up, gate, self.activation))
end

return decoder.define {
  name = "Phi3", model_type = "phi3", architecture = "Phi3ForCausalLM",
  fields = { sliding_window = { "count", configs.none }, rms_norm_eps = { "epsilon", 1e-5 },
    original_max_position_embeddings = { "count", 4096 }, partial_rotary_factor = { "number", configs.none },
    resid_pdrop = { "share", 0 }, embd_pdrop = { "share", 0 } },
  check = function(config) configs.only("Phi3", config, { resid_pdrop = 0, embd_pdrop = 0 }) end,
  layer = function(config)
    return layers.DecoderLayer(decoder.attention(config, { fused = true, window = config.sliding_window }),
      config.rms_norm_eps, "mlp", function() return Mlp(config) end)
  end,
}
