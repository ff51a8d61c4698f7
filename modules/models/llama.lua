--- Llama 1 to 3. Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models"; Grattafiori et al. 2024,
-- "The Llama 3 Herd of Models". Config keys and parameter names as published.
--
--     local model = llm.Llama { vocab_size = 1000, hidden_size = 64, intermediate_size = 172, num_hidden_layers = 4,
--       num_attention_heads = 4, num_key_value_heads = 2 }
local decoder = require "tycho.models.decoder"

return decoder.define {
  name = "Llama", model_type = "llama", architecture = "LlamaForCausalLM",
  fields = { attention_bias = { "flag", false }, mlp_bias = { "flag", false } },
  layer = function(config) return decoder.layer(config) end,
}
