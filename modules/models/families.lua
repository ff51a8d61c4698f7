--- Which class a config.json asks for.
local M = {}

local lazily = {}

--- model_type -> file of the family.
M.by_model_type = { gpt2 = "gpt2", llama = "llama", mistral = "mistral", qwen2 = "qwen2", qwen3 = "qwen3",
  mixtral = "mixtral", gla = "gla", bert = "bert", t5 = "t5" }

-- Where one model_type has several classes, or a config has no model_type, `architectures` decides.
lazily.bert = function(config)
  local bert = require "tycho.models.bert"
  local name = type(config.architectures) == "table" and config.architectures[1]
  return (name == "BertForMaskedLM" or name == "BertForPreTraining") and bert.BertForMaskedLM or bert.Bert
end

--- The class for a config, or nil.
function M.find(config)
  local kind = config.model_type
  if kind == nil and type(config.architectures) == "table" then
    local name = tostring(config.architectures[1]):lower()
    for model_type in pairs(M.by_model_type) do
      local rest = name:match("^" .. model_type .. "(.*)$")
      if rest and not rest:find "^%d" then kind = model_type end
    end
  end
  if lazily[kind] then return lazily[kind](config) end
  local file = M.by_model_type[kind]
  return file and require("tycho.models." .. file)
end

return M
