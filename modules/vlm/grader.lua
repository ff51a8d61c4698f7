--- How well a text fits a picture, as a model that sees grades it: it is asked, and the grades that it could answer
-- count by how likely it finds them. A few graded pairs tune it. Wang et al. 2024, "Finetuned Multimodal Language
-- Models Are High-Quality Image-Text Data Filters" (MLM-Filter, arXiv 2403.02677), whose grades go from 0 to 100.
--
--     answerer.tune(model, dialogue, graded, ...)          -- turns of grader.turn(caption, share)
--     local grades = grader.grades(model, dialogue, features, captions)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Dialogue = require "tycho.vlm.dialogue"
local packing = require "tycho.vlm.packing"

local M = {}

--- The grades, from the worst to the best.
M.words = { "one", "two", "three", "four", "five" }

-- A question that asks for a grade begins so; the text follows.
local asked = "does the picture show "

--- What a model is asked about a text, and what is right where a share of what the text says is true.
---@param text string
---@param share number  from 0 to 1
---@return { question: string, answer: string, kind: string }
function M.turn(text, share)
  arguments.expect("vlm.grader.turn", "text", text, "a string")
  arguments.expect("vlm.grader.turn", "share", share, "a number in [0, 1]")
  return { question = asked .. text, answer = M.words[math.floor(share * (#M.words - 1) + 0.5) + 1], kind = "grade" }
end

-- The first token of each grade, i64 [grades]; these have to differ.
local function tokens_of(who, dialogue)
  local ids, seen = {}, {}
  for k, word in ipairs(M.words) do
    ids[k] = dialogue.tokenizer:encode(dialogue.lead .. word):tolist()[1]
    if seen[ids[k]] then
      arguments.fail("%s: dialogue: expected a tokenizer in which the grades '%s' and '%s' begin differently, got one "
        .. "token for both", who, seen[ids[k]], word)
    end
    seen[ids[k]] = word
  end
  return ty.tensor(ids, { dtype = "i64" })
end

--- The grades of texts, one for each picture, f32 [n] from 0 to 1: the mean of the grades by the model's probabilities
-- of them.
---@param model LanguageModel
---@param dialogue Dialogue
---@param features Tensor  [n, features, hidden], as the model's picture_features() gives them
---@param texts string[]
---@param options? { batch?: integer }  (50 at a time)
---@return Tensor
function M.grades(model, dialogue, features, texts, options)
  local who = "vlm.grader.grades"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "dialogue", dialogue, "a table")
  arguments.expect(who, "features", features, "a tensor")
  arguments.expect(who, "texts", texts, "a list of strings")
  local o = arguments.read(who, options, { batch = 50 }, { batch = "an integer > 0" })
  if features.shape[1] ~= #texts then
    arguments.fail("%s: texts: expected as many as the %d pictures, got %d", who, features.shape[1], #texts)
  end
  local words, device, parts = tokens_of(who, dialogue), model:device(), {}
  local scale = ty.arange(#M.words, { dtype = "f32" }) / (#M.words - 1)
  local training = model.training
  model:eval()
  for first = 1, #texts, o.batch do
    parts[#parts + 1] = ty.scope(ty.no_grad, function()
      local questions = {}
      for i = first, math.min(first + o.batch - 1, #texts) do questions[#questions + 1] = { M.turn(texts[i], 1) } end
      local batch = dialogue:packed(questions)
      -- The first place of each row that something is learnt at is where the grade is said.
      local length, at, row = batch.tokens.shape[2], {}, -1
      for _, place in ipairs(batch.at:tolist()) do
        if place // length ~= row then
          row = place // length
          at[#at + 1] = place
        end
      end
      local hidden = model:hidden(batch.tokens:to { device = device }, {
        features = features:narrow(0, first - 1, #questions), mask = batch.options.mask:to { device = device },
        positions = batch.options.positions:to { device = device },
        places = ty.tensor(at, { dtype = "i64" }):to { device = device } })
      local logits = model:head(hidden:select(0, 0)):to "f32"
      local share = logits:index_select(1, words:to { device = device }):softmax(1)
      return (share * scale:to { device = device }):sum(1)
    end)
  end
  model:train(training)
  return ty.concat(parts, 0)
end

-- Mean log-likelihood of each of some sequences, f32 [n], in padded rows.
local function likelihoods(model, sequences, features)
  local batch = packing.padded(sequences)
  local device, length = model:device(), batch.tokens.shape[2]
  local likely = Dialogue.likelihoods(model, batch, { features = features })
  local row = ty.tensor(batch.at:tolist(), { dtype = "i64" }):floor_divide(length):to { device = device }
  local n = #sequences
  local sums = ty.zeros({ n }, { device = device }):index_add(0, row, likely)
  return sums / ty.zeros({ n }, { device = device }):index_add(0, row, ty.ones_like(likely)):clamp(1)
end

--- How much likelier its picture makes each text than the next picture does, in nats a token, f32 [n]: what a model
-- says that writes captions, where it is too small to learn grades in words. Of wrong texts neither picture is the
-- right one.
---@param model LanguageModel
---@param dialogue Dialogue
---@param features Tensor  [n, features, hidden]
---@param texts string[]
---@param options? { batch?: integer }  (50 at a time)
---@return Tensor
function M.evidence(model, dialogue, features, texts, options)
  local who = "vlm.grader.evidence"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "dialogue", dialogue, "a table")
  arguments.expect(who, "features", features, "a tensor")
  arguments.expect(who, "texts", texts, "a list of strings")
  local o = arguments.read(who, options, { batch = 50 }, { batch = "an integer > 0" })
  if features.ndim ~= 3 or features.shape[1] ~= #texts or #texts < 2 then
    arguments.fail("%s: features: expected those of %d pictures, one for each of at least two texts, got %s", who,
      #texts, arguments.describe(features))
  end
  local others, parts, training = features:roll(1, 0), {}, model.training
  model:eval()
  for first = 1, #texts, o.batch do
    parts[#parts + 1] = ty.scope(ty.no_grad, function()
      local sequences = {}
      for i = first, math.min(first + o.batch - 1, #texts) do
        sequences[#sequences + 1] = dialogue:described(texts[i])
      end
      return likelihoods(model, sequences, features:narrow(0, first - 1, #sequences))
        - likelihoods(model, sequences, others:narrow(0, first - 1, #sequences))
    end)
  end
  model:train(training)
  return ty.concat(parts, 0)
end

return M
