--- Qwen3: Qwen2 with norms of queries and keys in place of biases. Yang et al. 2025, "Qwen3 Technical Report".
local decoder = require "tycho.models.decoder"
local qwen2 = require("tycho.models.qwen2").family

local fields = { attention_bias = { "flag", false } }
for name, field in pairs(qwen2.fields) do fields[name] = field end

return decoder.define {
  name = "Qwen3", model_type = "qwen3", architecture = "Qwen3ForCausalLM", fields = fields,
  layer = function(config, i)
    return decoder.layer(config, { norm_eps = config.rms_norm_eps, window = qwen2.window(config, i) })
  end,
}
