--- Which class a config.json asks for.
local M = {}

--- model_type -> file of the family.
M.by_model_type = { gpt2 = "gpt2", llama = "llama", mistral = "mistral", qwen2 = "qwen2", qwen3 = "qwen3",
  mixtral = "mixtral", gla = "gla", bert = "bert", t5 = "t5" }

--- _class_name of the components of diffusers -> file, and the class in it where the file has several.
M.by_class_name = { AutoencoderKL = { "autoencoder_kl" }, SD3Transformer2DModel = { "sd3" },
  UNet2DModel = { "unet2d", "UNet2DModel" }, UNet2DConditionModel = { "unet2d", "UNet2DConditionModel" } }

-- Of decoders with other heads, by what follows the family's name.
local tasks = { ForSequenceClassification = "sequences", ForTokenClassification = "tokens" }
local decoders = { gpt2 = true, llama = true, mistral = true, qwen2 = true, qwen3 = true, mixtral = true }

-- The class of a family for one of config.json's `architectures`; nil when it has none of that name.
local function by_architecture(kind, name)
  if kind == "bert" then
    local bert = require "tycho.models.bert"
    return name == "BertForPreTraining" and bert.BertForMaskedLM or name == "BertModel" and bert.Bert or bert[name]
  end
  local class = require("tycho.models." .. M.by_model_type[kind])
  if name == class.architecture then return class end
  local task = decoders[kind] and tasks[name:match "For%u.*$"]
  return task and require("tycho.models.classifier")[task](class)
end

--- The class for a config, or nil. An architecture that the family does not have comes second: the class is then that
-- of its language model, or of the encoder alone.
---@return table? class
---@return string? unknown
function M.find(config)
  local component = M.by_class_name[config._class_name]
  if component then
    local file = require("tycho.models." .. component[1])
    return component[2] and file[component[2]] or file
  end
  local name = type(config.architectures) == "table" and config.architectures[1]
  if type(name) ~= "string" then name = nil end
  local kind = config.model_type
  if kind == nil and name then
    for model_type in pairs(M.by_model_type) do
      local rest = name:lower():match("^" .. model_type .. "(.*)$")
      if rest and not rest:find "^%d" then kind = model_type end
    end
  end
  local file = M.by_model_type[kind]
  if not file then return nil end
  local class = name and by_architecture(kind, name)
  if class then return class end
  class = require("tycho.models." .. file)
  return kind == "bert" and class.Bert or class, name
end

return M
