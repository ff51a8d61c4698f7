-- Stages of training: each kind teaches, text keeps its share beside pictures, operations are those of shapes.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local models, vlm, zoo = require "tycho.models", require "tycho.vlm", require "tycho.zoo"
local captioner, curriculum = zoo.captioner, zoo.curriculum

local tokenizer = zoo.tokenizer "scene-vlm"
ty.manual_seed(1)
local model = vlm.solo.Solo(models.Llama(zoo.answerer.text_config(tokenizer, { width = 32, layers = 1, heads = 2,
  inner = 48 })), { patch = 8 })
local dialogue = vlm.Dialogue(tokenizer, { picture = model:marks(2, 2), before = " ", lead = " " })
local texts = captioner.verses(zoo.answerer.dialogue(tokenizer, 0), "training", 30)
local pictures = ty.randn(4, 3, 16, 16)
local words = { "a red dog", "a cat", "two cars", "an apple" }
local asked = { { seen = pictures, questions = {} } }
for i, text in ipairs(words) do asked[1].questions[i] = { { question = "what is this?", answer = text } } end
local options = { project = function(m, seen) return m:picture_features(seen) end, texts = texts, share = 0.3,
  room = 512, batch = 4, lr = 1e-2, tune_lr = 1e-2 }

check.test("both kinds of stages teach, and those without steps are left out", function()
  local losses = curriculum.run(model, dialogue, { { words = words, seen = pictures, steps = 0 },
    { words = words, seen = pictures, steps = 30 }, { questions = asked, steps = 40 } }, options)
  check.equal(#losses, 2)
  local shares = captioner.score(model, dialogue, asked, options.project)
  check.equal(shares.all, 1.0)
  -- Of other pictures the answers are others: it sees.
  local turned = { { seen = pictures:roll(1, 0), questions = asked[1].questions } }
  check.ok(captioner.score(model, dialogue, turned, options.project).all < 0.5)
end)

check.test("texts have their share of the tokens, and a model that reads them needs fewer bits", function()
  local described = captioner.described(dialogue, words)
  local list, of_texts, all = captioner.mixed(described, texts, 0.3), 0, 0
  for k, one in ipairs(list) do
    all, of_texts = all + #one.ids, of_texts + (k > #described and #one.ids or 0)
  end
  check.ok(of_texts / all >= 0.3)
  check.ok((of_texts - #list[#list].ids) / (all - #list[#list].ids) < 0.3)
  local some, bytes = captioner.verses(zoo.answerer.dialogue(tokenizer, 0), "held_out", 10)
  local before = captioner.bits(model, some, bytes)
  captioner.fit(model, texts, { steps = 20, lr = 1e-2, room = 512 })
  check.ok(captioner.bits(model, some, bytes) < before)
end)

check.test("operations of a step are six for each weight and token, with those of patches and of the head", function()
  ty.manual_seed(5)
  local list = curriculum.operations(model, dialogue, { { words = words, seen = pictures, steps = 1 },
    { questions = asked, steps = 1 } }, { project = options.project, room = 512, batch = 4 })
  -- All tokens go through queries, keys and values, and of a last layer what is learnt goes on through the rest and the
  -- head; patches through their layer, which has no gradient of pixels.
  ty.manual_seed(5)
  local loader = vlm.packing.loader(captioner.described(dialogue, words), { room = 512 })
  local batch = loader:next()
  local patches, learnt = 4 * batch.sequences.shape[1], batch.at.shape[1]
  local rest = 32 * 32 + 3 * 32 * 48 + 926 * 32
  local want = 6 * (3 * 32 * 32 * 512 + rest * learnt) + 4 * 192 * 32 * patches
  check.close(list[1] / want, 1, 1e-9)
  check.ok(list[2] > 0 and list[2] < list[1])
end)

check.test("an encoder learns the labels of pictures for as many operations as it is given", function()
  local at = ty.arange(64) % 2
  local bright = (at:to "f32" * 2 - 1):reshape(64, 1, 1, 1):expand(64, 3, 16, 16) + ty.randn(64, 3, 16, 16) * 0.1
  local network, steps, loss = curriculum.encoder(bright, { at, (at + 1) % 2 }, { operations = 3e9, batch = 8 })
  check.ok(steps >= 2 and loss < 1)
  check.equal(network(bright).shape, { 64, 4 })
  local _, twice = curriculum.encoder(bright, { at }, { operations = 6e9, batch = 8 })
  local _, fewer = curriculum.encoder(bright, { at }, { operations = 6e9, batch = 8, features = 3 * 8 * steps })
  check.ok(math.abs(twice - 2 * steps) <= 1 and math.abs(fewer - steps) <= 1)
end)

check.test("what is no stage is one clear error", function()
  check.fails(function() curriculum.run(model, dialogue, { { steps = 1 } }, options) end,
    "stage 1: expected words or questions")
  check.fails(function() curriculum.run(model, dialogue, {}, {}) end, "project: expected a function")
  check.fails(function() curriculum.encoder(pictures, { ty.zeros { 3 } }, {}) end, "and labels [n], got")
end)

check.finish()
