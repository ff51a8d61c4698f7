--- Qwen2 and Qwen2.5: biases of queries, keys and values; from layer max_window_layers on a sliding window, where the
-- config asks for it. Yang et al. 2024, "Qwen2 Technical Report".
local configs = require "tycho.models.config"
local decoder = require "tycho.models.decoder"

local none = configs.none

-- Whether layer i (from 1) has the window, by the newer or the older keys.
local function window(config, i)
  if not config.use_sliding_window then return nil end
  if config.layer_types then
    return config.layer_types[i] == "sliding_attention" and config.sliding_window or nil
  end
  return i > config.max_window_layers and config.sliding_window or nil
end

local spec = {
  name = "Qwen2", model_type = "qwen2", architecture = "Qwen2ForCausalLM", window = window,
  fields = { sliding_window = { "count", none }, use_sliding_window = { "flag", false },
    max_window_layers = { "integer", 28 }, layer_types = { "table", none } },
  layer = function(config, i) return decoder.layer(config, { qkv_bias = true, window = window(config, i) }) end,
}

return decoder.define(spec)
