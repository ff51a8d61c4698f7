-- Grades of texts: the mean of the grades by how likely a model finds each, whatever else it might say.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, vlm, zoo = require "tycho.models", require "tycho.vlm", require "tycho.zoo"
local grader = vlm.grader

local tokenizer = zoo.tokenizer "scene-vlm"
ty.manual_seed(3)
local model = models.Llava { image_token_index = 1, tie_word_embeddings = true, vision_feature_layer = -1,
  text_config = { model_type = "llama", vocab_size = tokenizer.size, hidden_size = 16, intermediate_size = 32,
    num_hidden_layers = 2, num_attention_heads = 2, max_position_embeddings = 64, tie_word_embeddings = true },
  vision_config = { model_type = "clip_vision_model", image_size = 8, patch_size = 4, hidden_size = 8,
    intermediate_size = 16, num_hidden_layers = 2, num_attention_heads = 2 } }
local dialogue = zoo.answerer.dialogue(tokenizer, 4)
local texts = { "a red apple", "two green cars on a blue background", "a dog" }

check.test("shares become the nearest of five grades", function()
  check.equal(grader.turn("a dog", 1), { question = "does the picture show a dog", answer = "five", kind = "grade" })
  local said = {}
  for k, share in ipairs { 0, 0.12, 0.13, 0.5, 0.74, 0.9 } do said[k] = grader.turn("", share).answer end
  check.equal(said, { "one", "one", "two", "three", "four", "five" })
end)

check.test("grades are those of each text by itself, without packing", function()
  local features = ty.no_grad(function() return model:picture_features(ty.randn(3, 3, 8, 8)) end)
  local got = grader.grades(model, dialogue, features, texts, { batch = 2 }):tolist()
  for i, text in ipairs(texts) do
    local prompt = dialogue:prompt("does the picture show " .. text)
    local logits = ty.no_grad(function()
      return model(prompt, { features = features:narrow(0, i - 1, 1) }):select(1, -1):select(0, 0)
    end):tolist()
    local sum, mean = 0, 0
    for k, word in ipairs(grader.words) do
      local share = math.exp(logits[tokenizer:encode(" " .. word):tolist()[1] + 1])
      sum, mean = sum + share, mean + share * (k - 1) / 4
    end
    check.close(got[i], mean / sum, 1e-4)
  end
end)

check.test("a model that was tuned on graded texts grades them so", function()
  local features = ty.no_grad(function() return model:picture_features(ty.randn(2, 3, 8, 8)) end)
  local pool = { { features = features, questions = { { grader.turn(texts[1], 1), grader.turn(texts[2], 0) },
    { grader.turn(texts[1], 0), grader.turn(texts[2], 1) } } } }
  zoo.answerer.tune(model, dialogue, pool, { steps = 150, batch = 2, lr = 1e-2 })
  local first = grader.grades(model, dialogue, features, { texts[1], texts[1] }):tolist()
  local second = grader.grades(model, dialogue, features, { texts[2], texts[2] }):tolist()
  check.ok(first[1] > 0.8 and first[2] < 0.2 and second[1] < 0.2 and second[2] > 0.8)
end)

check.test("evidence is the difference of each text's mean log-likelihoods, of its picture and of the next", function()
  local features = ty.no_grad(function() return model:picture_features(ty.randn(3, 3, 8, 8)) end)
  local got = grader.evidence(model, dialogue, features, texts, { batch = 2 }):tolist()
  local function likely(i, k)
    local one = dialogue:described(texts[i])
    local batch = vlm.packing.padded { one }
    return -ty.no_grad(vlm.Dialogue.loss, model, batch, { features = features:narrow(0, k - 1, 1) }):item()
  end
  for i = 1, 3 do check.close(got[i], likely(i, i) - likely(i, (i + 1) % 3 + 1), 1e-4) end
end)

check.test("what cannot be graded is one clear error", function()
  check.fails(function() grader.turn("a", 2) end, "share: expected a number in [0, 1], got 2")
  check.fails(function() grader.grades(model, dialogue, ty.zeros(1, 4, 16), texts) end,
    "texts: expected as many as the 1 pictures, got 3")
  check.fails(function() grader.evidence(model, dialogue, ty.zeros(1, 4, 16), texts) end,
    "features: expected those of 3 pictures")
end)

check.finish()
