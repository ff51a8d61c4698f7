-- A Llava of a few thousand weights, with tokens about two pictures: what tests of methods on its decoder share.
local ty = require "tycho"
local models = require "tycho.models"

local M = { image = 19, features = 16 } -- the token of a picture's feature, and how many a picture has

--- The model, in evaluation. text: other keys of the decoder's config.
function M.model(text)
  ty.manual_seed(3)
  local config = { model_type = "llama", vocab_size = 20, hidden_size = 16, intermediate_size = 32,
    num_hidden_layers = 3, num_attention_heads = 2, max_position_embeddings = 64, tie_word_embeddings = true }
  for key, value in pairs(text or {}) do config[key] = value end
  local m = models.Llava { image_token_index = M.image, tie_word_embeddings = true, vision_feature_layer = -1,
    text_config = config, vision_config = { model_type = "clip_vision_model", image_size = 16, patch_size = 4,
      hidden_size = 8, intermediate_size = 16, num_hidden_layers = 1, num_attention_heads = 2 } }
  -- Larger than they begin, so that all parts of a layer matter.
  for _, p in ipairs(m.language_model:parameters()) do
    if p.ndim == 2 then ty.no_grad(function() p:mul_(8) end) end
  end
  return m:eval()
end

--- Tokens i64 [n, t]: of each row a picture's, then the words given.
function M.rows(...)
  local list = {}
  for i, words in ipairs { ... } do
    list[i] = {}
    for k = 1, M.features do list[i][k] = M.image end
    table.move(words, 1, #words, M.features + 1, list[i])
  end
  return ty.tensor(list, { dtype = "i64" })
end

M.tokens = M.rows({ 1, 2, 3, 4 }, { 5, 6, 7, 8 })
ty.manual_seed(7)
M.pictures = ty.randn(2, 3, 16, 16)

--- The largest difference of two tensors over the largest value of the second.
function M.apart(a, b) return (a - b):abs():max():item() / b:abs():max():item() end

return M
