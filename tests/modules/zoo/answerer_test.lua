-- What models that answer questions about scenes are made of: their tokens, the words of places, tuning the decoder.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local vlm, zoo = require "tycho.vlm", require "tycho.zoo"
local answerer = zoo.answerer

local tokenizer = answerer.tokenizer(300, 900)
local dialogue = answerer.dialogue(tokenizer)
ty.manual_seed(1)
local model = answerer.model(tokenizer, "scene-resnet", { width = 32, layers = 2, heads = 2, inner = 48 })

check.test("words of scenes are tokens, and chats end as dialogues do", function()
  for _, word in ipairs { " apple", " apples", " red", " left", " how", " many", " where", " background" } do
    check.equal(tokenizer:encode(word).shape, { 1 }, word)
  end
  check.equal({ tokenizer:token(0), tokenizer:token(1), tokenizer.eos }, { "<|endoftext|>", "<image>", 0 })
  local tokens = dialogue:rows { { { question = "what is this?", answer = "red" } } }
  local said = tokenizer:encode(("<image>"):rep(64) .. " what is this?\n red<|endoftext|>"):tolist()
  check.equal(tokens:select(0, 0):tolist(), said)
end)

check.test("the tower is the network of the zoo and stays as it is", function()
  local resnet = zoo.load "scene-resnet"
  local x = ty.randn(1, 3, 64, 64)
  check.equal((model.vision_tower.resnet:eval():maps(x) - resnet:maps(x)):abs():max():item(), 0.0)
  for _, p in ipairs(model.vision_tower.resnet:parameters()) do check.ok(not p.requires_grad) end
end)

local set = zoo.scenes.set("training", { "image", "questions", "owner", "boxes", "scene" }, { questions = 3 })
local batch = set:batch(ty.arange(6))
local pictures = zoo.scenes.pictures(batch.image)

check.test("the loss of places falls to that of features that are the words themselves", function()
  local words = answerer.patch_words(tokenizer)
  local opt = ty.optim.AdamW(model:parameters(), { lr = 1e-2 })
  local first, last
  for _ = 1, 15 do
    local loss = words(model, model:picture_features(pictures), batch)
    opt:step(loss)
    first, last = first or loss:item(), loss:item()
  end
  check.ok(last < 0.5 * first, ("%g after %g"):format(last, first))
end)

check.test("a decoder is tuned on features that are computed once, and knows what it was tuned on", function()
  local pool = answerer.featured(model, { { pictures = pictures, questions = batch.questions, image = batch.image } })
  local tower = model.vision_tower:state_dict()
  local before = tower["position_embedding.weight"]:clone()
  answerer.tune(model, dialogue, pool, { steps = 60, batch = 6, lr = 1e-2 })
  check.equal((tower["position_embedding.weight"] - before):abs():max():item(), 0.0)
  local shares = vlm.answers.shares(vlm.answers.ask(model, dialogue, pool))
  check.ok(shares.all > 0.9, shares.all)
end)

check.test("subsets of samples keep pictures and questions together", function()
  local part = { questions = batch.questions, image = batch.image, features = ty.arange(12):reshape(6, 2, 1) }
  local chosen = answerer.subset({ part }, { 4, 1 })
  check.equal({ chosen.features:flatten():tolist(), chosen.questions[1] == batch.questions[5] },
    { { 8, 9, 2, 3 }, true })
  check.fails(function() answerer.subset({ part }, { 6 }) end, "positions: expected integers in [0, 5], got 6")
end)

check.test("draws give each picture once before any comes again, the same after the same seed", function()
  local part = { questions = batch.questions, image = batch.image, features = ty.arange(12):reshape(6, 2, 1) }
  local function drawn()
    ty.manual_seed(4)
    local draw, list = answerer.draw(dialogue, { part }, 3), {}
    for _ = 1, 4 do
      local packed, features = draw()
      check.equal(packed.tokens.shape[1], 3)
      for _, first in ipairs(features:select(1, 0):flatten():tolist()) do list[#list + 1] = first // 2 end
    end
    return list
  end
  local list = drawn()
  check.equal(list, drawn())
  for _, from in ipairs { 1, 7 } do
    local pass = table.move(list, from, from + 5, 1, {})
    table.sort(pass)
    check.equal(pass, { 0, 1, 2, 3, 4, 5 })
  end
end)

check.test("logits are those of the answers' words, and single questions are the first ones", function()
  local pool = answerer.featured(model, { { pictures = pictures, questions = batch.questions, image = batch.image } })
  local single = answerer.single(pool)
  for i, turns in ipairs(single[1].questions) do
    check.equal({ #turns, turns[1] == batch.questions[i][1] }, { 1, true })
  end
  local logits = ty.no_grad(answerer.logits(model, dialogue, single))
  local packed = dialogue:packed(single[1].questions)
  local loss = ty.no_grad(function()
    return vlm.Dialogue.loss(model, packed, { features = single[1].features }):item()
  end)
  check.close(ty.nn.cross_entropy(logits, packed.wanted):item(), loss, 1e-5)
end)

check.finish()
