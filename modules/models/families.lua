--- Which class a config.json asks for.
local M = {}

--- model_type -> file of the family, and where the file has several classes that of a config without architectures.
M.by_model_type = { gpt2 = { "gpt2" }, llama = { "llama" }, mistral = { "mistral" }, qwen2 = { "qwen2" },
  qwen3 = { "qwen3" }, olmo2 = { "olmo2" }, phi3 = { "phi3" }, gpt_neox = { "gpt_neox" },
  gemma = { "gemma" }, gemma2 = { "gemma2" }, gemma3_text = { "gemma3" }, opt = { "opt" }, falcon = { "falcon" },
  mixtral = { "mixtral" }, gla = { "gla" }, mamba = { "mamba" }, mamba2 = { "mamba2" },
  bert = { "bert", "Bert" }, t5 = { "t5" },
  roberta = { "roberta", "Roberta" }, ["xlm-roberta"] = { "roberta", "Roberta" },
  camembert = { "roberta", "Roberta" }, distilbert = { "distilbert", "DistilBert" },
  modernbert = { "modernbert", "ModernBert" },
  vit = { "vit", "ViT" }, clip = { "clip", "CLIPModel" }, clip_text_model = { "clip", "CLIPTextModel" },
  clip_vision_model = { "clip", "CLIPVisionModel" }, resnet = { "resnet" },
  siglip = { "siglip", "SiglipModel" }, siglip_text_model = { "siglip", "SiglipTextModel" },
  siglip_vision_model = { "siglip", "SiglipVisionModel" }, deit = { "vit", "DeiT" }, dinov2 = { "dinov2", "Dinov2" },
  dinov2_with_registers = { "dinov2", "Dinov2WithRegisters" }, siglip2 = { "siglip2", "Siglip2Model" },
  siglip2_text_model = { "siglip2", "Siglip2TextModel" }, siglip2_vision_model = { "siglip2", "Siglip2VisionModel" },
  resnet_vision_model = { "resnet_vision" }, llava = { "llava" },
  llava_next = { "llava_next" }, qwen2_vl = { "qwen2_vl", "Qwen2VL" }, qwen2_5_vl = { "qwen2_vl", "Qwen2_5_VL" },
  paligemma = { "paligemma" },
  action_model = { "action" } }

--- _class_name of the components of diffusers -> file, and the class in it where the file has several.
M.by_class_name = { AutoencoderKL = { "autoencoder_kl" }, AutoencoderTiny = { "autoencoder_tiny" },
  ControlNetModel = { "controlnet" }, DiTTransformer2DModel = { "dit2d" }, FluxTransformer2DModel = { "flux" },
  PixArtTransformer2DModel = { "pixart" }, SD3Transformer2DModel = { "sd3" },
  WanTransformer3DModel = { "wan" }, ZImageTransformer2DModel = { "z_image" },
  UNet2DModel = { "unet2d", "UNet2DModel" }, UNet2DConditionModel = { "unet2d", "UNet2DConditionModel" } }

-- Architectures with a file of their own.
local apart = { T5EncoderModel = "t5_encoder" }

-- Architectures whose weights another class reads.
local as = { BertForPreTraining = "BertForMaskedLM" }

-- Of decoders with other heads, by what follows the family's name.
local tasks = { ForSequenceClassification = "sequences", ForTokenClassification = "tokens" }
local decoders = { gpt2 = true, llama = true, mistral = true, qwen2 = true, qwen3 = true, mixtral = true,
  olmo2 = true, phi3 = true, gpt_neox = true, gemma = true, gemma2 = true, gemma3_text = true,
  opt = true, falcon = true }

-- The class that a row of the tables names, and the classes of its file.
local function class_of(row)
  local file = require("tycho.models." .. row[1])
  if row[2] then return file[row[2]], file end
  return file, { file }
end

-- The class of a family for one of config.json's `architectures`; nil when it has none of that name.
local function by_architecture(kind, name)
  if apart[name] then return (class_of { apart[name] }) end
  local class, all = class_of(M.by_model_type[kind])
  local wanted = as[name] or name:gsub("^XLMRoberta", "Roberta"):gsub("^Camembert", "Roberta") -- which are the same
  for _, other in pairs(all) do
    if other.architecture == wanted then return other end
  end
  local task = decoders[kind] and tasks[name:match "For%u.*$"]
  return task and require("tycho.models.classifier")[task](class)
end

--- The class for a config, or nil. An architecture that the family does not have comes second: the class is then that
-- of its language model, or of the encoder alone.
---@return table? class
---@return string? unknown
function M.find(config)
  local component = M.by_class_name[config._class_name]
  if component then return (class_of(component)) end
  local name = type(config.architectures) == "table" and config.architectures[1]
  if type(name) ~= "string" then name = nil end
  local kind = config.model_type
  if kind == nil and name then
    for model_type in pairs(M.by_model_type) do
      local rest = name:lower():match("^" .. model_type:gsub("%-", "") .. "(.*)$")
      if rest and not rest:find "^%d" then kind = model_type end
    end
  end
  if not M.by_model_type[kind] then return nil end
  local class = name and by_architecture(kind, name)
  if class then return class end
  return (class_of(M.by_model_type[kind])), name
end

return M
