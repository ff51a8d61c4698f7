--- Gemma 3, the decoder of texts: Gemma 2 with norms of queries and keys in place of caps, one full layer in six, and
-- rotary positions of a base of their own where layers see a window. Gemma Team 2025, "Gemma 3 Technical Report".
local configs = require "tycho.models.config"
local decoder = require "tycho.models.decoder"
local rotary = require "tycho.models.rotary"
local shared = require("tycho.models.gemma2").family.shared

local none = configs.none

local fields = { rope_local_base_freq = { "number", 10000 }, sliding_window_pattern = { "count", 6 },
  _sliding_window_pattern = { "count", none } }
for name, field in pairs(shared.fields) do fields[name] = field end

local function rotaries(who, config)
  return rotary.pair(who, config, config.head_dim, { theta = config.rope_theta or 1e6, scaling = config.rope_scaling },
    { theta = config.rope_local_base_freq })
end

local Gemma3 = shared.finish(decoder.define {
  name = "Gemma3", model_type = "gemma3_text", architecture = "Gemma3ForCausalLM", fields = fields,
  rotary = rotaries,
  check = function(config)
    shared.check("Gemma3", config)
    configs.only("Gemma3", config, { attn_logit_softcapping = false }) -- transformers does not compute it either
    config.layer_types = configs.layer_types("Gemma3", config, function(i)
      return i % config.sliding_window_pattern == 0
    end)
  end,
  layer = function(config, i)
    local kind = config.layer_types[i]
    local attention = shared.attention(config, kind)
    attention.norm_eps, attention.norm = config.rms_norm_eps, shared.Norm
    attention.local_positions = kind == "sliding_attention"
    return shared.Layer("Gemma3", config, attention)
  end,
  norm = function(config) return shared.Norm(config.hidden_size, config.rms_norm_eps) end,
})

Gemma3.judges = "Gemma3Text" -- Gemma3For... are those of pictures and texts

return Gemma3
