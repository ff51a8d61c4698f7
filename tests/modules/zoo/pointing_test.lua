-- Words of questions that point at what they name: which tokens do, their labels, what is learnt so, errors.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets, zoo = require "tycho.datasets", require "tycho.zoo"
local answerer, pointing = zoo.answerer, zoo.pointing

local tokenizer = answerer.tokenizer(300, 900)
local dialogue = answerer.dialogue(tokenizer)
local pointer = pointing.new(tokenizer)

local function small()
  ty.manual_seed(1)
  return answerer.model(tokenizer, "scene-resnet", { width = 32, layers = 2, heads = 2, inner = 48 })
end

check.test("the last tokens of names name objects, those that two share none", function()
  local named, shared = 0, {}
  for i, object in ipairs(datasets.scenes.objects) do
    for _, word in ipairs { object.name, object.plural } do
      local ids = tokenizer:encode(" " .. word):tolist()
      local found = pointer.object_of[ids[#ids]]
      check.ok(found == nil or found == i - 1, word)
      named = named + (found and 1 or 0)
      if not found then shared[word] = ids[#ids] end
    end
  end
  check.ok(named > 150, named)
  for word, id in pairs(shared) do -- another name ends in the same token
    local ends = 0
    for _, object in ipairs(datasets.scenes.objects) do
      for _, other in ipairs { object.name, object.plural } do
        local ids = tokenizer:encode(" " .. other):tolist()
        ends = ends + (ids[#ids] == id and 1 or 0)
      end
    end
    check.ok(ends > 1, word)
  end
end)

local set = zoo.scenes.set("training", { "image", "questions", "owner", "boxes", "scene" }, { questions = 12,
  objects = { 2, 3 } })
local batch = set:batch(ty.arange(40))

check.test("labels: the shares of an object in each place, or that it is nowhere, and how many there are", function()
  local packed = dialogue:packed(batch.questions)
  local at, labels, counted = pointer:labels(packed, batch, 8)
  local length, flat = packed.tokens.shape[2], packed.tokens:flatten():tolist()
  check.equal(labels.shape, { at.shape[1], 65 })
  check.close(labels:sum(1):tolist(), ty.ones(at.shape[1]):tolist(), 1e-5)
  local nowhere, words = 0, 0
  for k, place in ipairs(at:tolist()) do
    local number, row = pointer.object_of[flat[place + 1]], place // length
    check.ok(number, "a word that names an object")
    -- The pixels of the object, counted one by one.
    local owner, counts, all, many = batch.owner[row], {}, 0, 0
    for j, object in ipairs(batch.scene[row + 1].objects) do
      if object.object == number then
        many = many + 1
        local own = owner:eq(j - 1):to "f32"
        local cells = own:reshape(8, 8, 8, 8):sum { 1, 3 }:flatten():tolist()
        for c, n in ipairs(cells) do
          counts[c] = (counts[c] or 0) + n
          all = all + n
        end
      end
    end
    check.equal(counted[k - 1]:item(), many)
    if k % 7 == 1 then -- some of each kind are enough
      for c = 1, 64 do check.close(labels[k - 1][c - 1]:item(), all > 0 and counts[c] / all or 0, 1e-4) end
      check.equal(labels[k - 1][64]:item(), all == 0 and 1 or 0)
    end
    nowhere, words = nowhere + (all == 0 and 1 or 0), words + 1
  end
  check.ok(words > 200 and nowhere > 10 and nowhere < words / 2, ("%d of %d"):format(nowhere, words))
end)

check.test("the loss of answers is that of the dialogue, and pointing is learnt beside it", function()
  local model = small()
  pointer:attach(model, { layer = 1 })
  local packed = dialogue:packed(batch.questions)
  local features = model:picture_features(zoo.scenes.pictures(batch.image)):detach()
  local answers, points = pointer:loss(model, packed, batch, { features = features })
  check.equal(answers:item(), require("tycho.vlm").Dialogue.loss(model, packed, { features = features }):item())
  check.ok(points:item() > 3)
  local opt, last = ty.optim.AdamW(model:parameters(), { lr = 1e-2 }), nil
  for _ = 1, 60 do
    local _, loss = pointer:loss(model, packed, batch, { features = features })
    opt:step(loss)
    last = loss:item()
  end
  check.ok(last < 0.85 * points:item(), ("%g, then %g"):format(points:item(), last))
  check.equal(rawget(model.language_model.model.layers[1], "_hooks"), false) -- nothing is left behind
  pointer:detach(model)
  check.equal(model.pointer, nil)
  for name in pairs(model:state_dict()) do check.ok(not name:find "pointer", name) end
end)

check.test("questions that name nothing point nowhere", function()
  local model = small()
  pointer:attach(model)
  local few = { owner = batch.owner:narrow(0, 0, 1), boxes = batch.boxes:narrow(0, 0, 1), scene = { batch.scene[1] } }
  local packed = dialogue:packed { { { question = "how many?", answer = "two" } } }
  check.equal(pointer:labels(packed, few, 8), nil)
  local answers, points = pointer:loss(model, packed, few, { pictures = ty.zeros(1, 3, 64, 64) })
  check.ok(answers:item() > 0)
  check.equal(points:item(), 0)
end)

check.test("what does not fit is one clear error", function()
  local model = small()
  check.fails(function() pointing.new(3) end, "pointing.new: tokenizer: expected a tokenizer, got 3")
  check.fails(function() pointer:attach(model, { layer = 3 }) end, "layer: expected one of the model's 2, got 3")
  check.fails(function() pointer:attach(zoo.load "scene-resnet") end, "layer: expected one of the model's 0")
  check.fails(function() pointing.new(tokenizer):loss(model, {}, batch) end, "loss: model: expected one with the layer")
  pointer:attach(model, { layer = 1 })
  check.fails(function()
    pointer:loss(model, dialogue:packed(batch.questions), batch, { features = ty.zeros(1, 64, 32) })
  end, "features")
  check.equal(rawget(model.language_model.model.layers[1], "_hooks"), false)
end)

check.finish()
