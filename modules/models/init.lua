--- Networks, one file for each architecture, with the parameter names of the published files: require "tycho.models".
--
--     local models = require "tycho.models"
--     local model = models.Llama { vocab_size = 1000, hidden_size = 64, intermediate_size = 160, num_hidden_layers = 2,
--       num_attention_heads = 4 }
--     local logits = model(tokens)
--
-- A network is nothing but its parameters and what it computes. Files are read by tycho.hub; what one does with a
-- model (generation, schedules, adapters, quantization) is in the module of that method, which no file here requires.

-- name -> file; the file returns the class, or a table that has it under the name.
local files = {
  -- language models
  Bert = "bert", BertForMaskedLM = "bert", GLA = "gla", GPT2 = "gpt2", Llama = "llama", Mistral = "mistral",
  Mixtral = "mixtral", Qwen2 = "qwen2", Qwen3 = "qwen3", T5 = "t5",
}

-- The file of an architecture is read when its name is first asked for.
return setmetatable({}, { __index = function(self, name)
  local file = files[name]
  if not file then return nil end
  local value = require("tycho.models." .. file)
  value = rawget(value, name) or value
  rawset(self, name, value)
  return value
end })
