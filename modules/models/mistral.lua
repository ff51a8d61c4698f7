--- Mistral: Llama with a sliding window. Jiang et al. 2023, "Mistral 7B".
local configs = require "tycho.models.config"
local decoder = require "tycho.models.decoder"

return decoder.define {
  name = "Mistral", model_type = "mistral", architecture = "MistralForCausalLM",
  fields = { sliding_window = { "count", configs.none } },
  layer = function(config) return decoder.layer(config, { window = config.sliding_window }) end,
}
