--- A language model and a network of pictures, each trained by itself, as one model that sees: what instruction tuning
-- begins with. Liu et al. 2023, "Visual Instruction Tuning".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local models = require "tycho.models"

local expect = arguments.expect

-- CLIP's part of pictures as a network of its own; ViT and CLIPVisionModel as they are.
local function tower_of(who, tower)
  expect(who, "tower", tower, "a module")
  local config = tower.published_config and tower:published_config() or {}
  if config.vision_config then
    local vision, state = models.CLIPVisionModel(config.vision_config), {}
    local all = tower:state_dict()
    for name in pairs(vision:state_dict()) do state[name] = all[name] end
    vision:load_state_dict(state)
    return vision, "clip_vision_model"
  end
  local kind = config.model_type
  if kind ~= "vit" and kind ~= "clip_vision_model" then
    arguments.fail("%s: tower: expected a CLIPModel, CLIPVisionModel or ViT, got %s", who, arguments.describe(tower))
  end
  return tower, kind
end

-- The language model's tensors, with a row for one more token: the mean of the others.
local function with_token(state)
  local result = {}
  for name, tensor in pairs(state) do
    if name:find "embed_tokens%.weight$" or name:find "lm_head%.weight$" then
      tensor = ty.concat({ tensor, tensor:mean({ 0 }, true) }, 0)
    end
    result[name] = tensor
  end
  return result
end

--- A Llava whose language model and tower of pictures are copies of two models, and whose projector between them is
-- new. language: of a family that Llava has (Llama, Mistral, Mixtral, Qwen2, Qwen3); its vocabulary grows by the token
-- that stands for a picture's features, whose id is the vocabulary's size before. tower: a CLIPModel, CLIPVisionModel
-- or ViT. options: other keys of Llava's config (vision_feature_layer, -2; vision_feature_select_strategy, "default").
---@param language LanguageModel
---@param tower Module
---@param options? table
---@return Llava
return function(language, tower, options)
  local who = "vlm.join"
  expect(who, "language", language, "a module")
  expect(who, "options", options, "a table or nil")
  local text = language.published_config and language:published_config() or {}
  if type(text.vocab_size) ~= "number" or not language.generate then
    arguments.fail("%s: language: expected a language model, got %s", who, arguments.describe(language))
  end
  local vision, kind = tower_of(who, tower)
  local vision_config = vision:published_config()
  vision_config.model_type = kind
  local config = { model_type = "llava", text_config = text, vision_config = vision_config,
    image_token_index = text.vocab_size, tie_word_embeddings = text.tie_word_embeddings }
  for key, value in pairs(options or {}) do config[key] = value end
  text.vocab_size = text.vocab_size + 1
  local model = models.Llava(config, kind == "vit" and vision.pooler ~= nil)
  ty.no_grad(function()
    model.language_model:load_state_dict(with_token(language:state_dict()))
    model.vision_tower:load_state_dict(vision:state_dict())
  end)
  return model
end
