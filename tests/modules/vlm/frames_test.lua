-- Clips in a model that learnt on pictures: a clip of one frame is a picture, questions see their clip and not each
-- other, every token keeps its place and frame; plain ways to make tokens fewer.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, vlm = require "tycho.models", require "tycho.vlm"
local frames, fewer = vlm.frames, vlm.fewer

local WIDTH, PLACES = 16, 16

local function apart(a, b) return (a - b):abs():max():item() end

local tokenizer = ty.tokenizer.train({ "what is this?", " an apple", " a dog that runs", "where is it?" },
  { vocabulary = 270, special = { "<end>", "<image>" } })
ty.tokenizer.fields(tokenizer).eos = 0
local dialogue = vlm.Dialogue(tokenizer, { image_token = 1, features = PLACES, before = " ", lead = " " })

local function model()
  ty.manual_seed(3)
  local m = models.Llava { image_token_index = 1, tie_word_embeddings = true, vision_feature_layer = -1,
    text_config = { model_type = "llama", vocab_size = tokenizer.size, hidden_size = WIDTH, intermediate_size = 32,
      num_hidden_layers = 2, num_attention_heads = 2, max_position_embeddings = 64, tie_word_embeddings = true },
    vision_config = { model_type = "clip_vision_model", image_size = 16, patch_size = 4, hidden_size = 8,
      intermediate_size = 16, num_hidden_layers = 1, num_attention_heads = 2 } }
  for _, p in ipairs(m.language_model:parameters()) do
    if p.ndim == 2 then ty.no_grad(function() p:mul_(8) end) end
  end
  return m:eval()
end

local questions = {
  { { question = "what is this?", answer = "an apple" }, { question = "where is it?", answer = "a dog" } },
  { { question = "what is this?", answer = "a dog that runs", kind = "name" } } }

check.test("a clip of one frame is a picture", function()
  local m, features = model(), ty.randn(2, 1, PLACES, WIDTH)
  frames.attach(m, 4, PLACES)
  local batch = dialogue:packed(questions)
  local want = vlm.Dialogue.loss(m, batch, { features = features:select(1, 0) }):item()
  local packed, options = frames.packed(m, dialogue, questions, frames.all(features))
  check.close(vlm.Dialogue.loss(m, packed, options):item(), want, 1e-6)
  -- Each question in a row of its own: the same targets, the same loss.
  local all, places = frames.all(features)
  packed, options = frames.packed(m, dialogue, questions, all, places, true)
  check.equal(packed.tokens.shape[1], 3)
  check.close(vlm.Dialogue.loss(m, packed, options):item(), want, 1e-5)
end)

check.test("a token is its place's position and its frame's embedding, whatever others are left out", function()
  local m, features = model(), ty.randn(2, 4, PLACES, WIDTH)
  frames.attach(m, 4, PLACES)
  ty.no_grad(function() m.language_model.frames.weight:copy_(ty.randn(4, WIDTH)) end)
  local places = ty.tensor { { 0, 5, 17, 63 }, { 3, 16, 31, 48 } }
  local all = frames.all(features)
  local kept = all:gather(1, places:unsqueeze(-1):expand(2, 4, WIDTH))
  local batch, options = frames.packed(m, dialogue, questions, kept, places)
  check.equal(options.positions:select(0, 0):narrow(0, 0, 6):tolist(), { 0, 5, 1, 15, 16, 17 })
  local table_of = m.language_model.frames.weight
  check.close(apart(options.features:select(0, 1),
    kept:select(0, 1) + table_of:index_select(0, ty.tensor { 0, 1, 1, 3 })), 0, 1e-6)
  check.equal(batch.tokens:select(0, 0):narrow(0, 0, 5):tolist()[4], 1)
  frames.remove(m)
  check.fails(function() frames.packed(m, dialogue, questions, kept, places) end, "one with vlm.frames.attach()")
end)

check.test("squares of places are averaged, and stay at the first of them", function()
  local features = ty.randn(1, 2, PLACES, 3)
  local small, places = frames.all(features, 2)
  check.equal({ small.shape, places:select(0, 0):tolist() }, { { 1, 8, 3 }, { 0, 2, 8, 10, 16, 18, 24, 26 } })
  local want = features:select(0, 0):select(0, 1):index_select(0, ty.tensor { 10, 11, 14, 15 }):mean { 0 }
  check.ok(apart(small:select(0, 0):select(0, 7), want) < 1e-6)
end)

check.test("questions are asked in their order, together and apart", function()
  local m, features = model(), ty.randn(2, 4, PLACES, WIDTH)
  frames.attach(m, 4, PLACES)
  local all, places = frames.all(features)
  local clips = { { questions = questions, features = all, places = places } }
  local rows
  local together = frames.ask(m, dialogue, clips)
  local single = frames.ask(m, dialogue, clips, { apart = true, before = function(b) rows = b.tokens.shape[1] end })
  check.equal(together, single)
  check.equal({ #together, together[3].kind, rows }, { 3, "name", 3 })
end)

check.test("plain ways give as many tokens as were asked for, in order, of each frame about as many", function()
  ty.manual_seed(1)
  local x, attention = ty.randn(2, 4, PLACES, 6), ty.rand(2, 4, PLACES)
  for _, count in ipairs { 4, 10, 33, 64 } do
    for name, fn in pairs { uniform = fewer.uniform, attended = fewer.attended, merged = fewer.merged } do
      local tokens, places = fn(x, count, attention)
      check.equal({ tokens.shape, places.shape }, { { 2, count, 6 }, { 2, count } }, name)
      local of_frame, last = { 0, 0, 0, 0 }, -1
      for _, place in ipairs(places:select(0, 1):tolist()) do
        check.ok(place > last)
        of_frame[place // PLACES + 1], last = of_frame[place // PLACES + 1] + 1, place
      end
      for _, k in ipairs(of_frame) do check.ok(math.abs(k - count / 4) <= 1, name) end
      if count == 64 then check.equal(apart(tokens, x:flatten(1, 2)), 0) end
    end
  end
  local tokens, places = fewer.attended(x, 4, attention)
  check.equal((places - ty.tensor { 0, 16, 32, 48 }):tolist(), attention:argmax(-1):tolist())
  check.equal(apart(tokens:select(1, 2), x:select(1, 2):gather(1,
    attention:select(1, 2):argmax(-1, true):unsqueeze(-1):expand(2, 1, 6)):squeeze(1)), 0)
  -- Merging keeps the sum of all members: a frame of two kinds of tokens becomes these two.
  local a, b = ty.randn(6), ty.randn(6)
  local rows = {}
  for k = 1, PLACES do rows[k] = (k % 4 < 2) and a or b end
  local two = fewer.merged(ty.stack(rows):reshape(1, 1, PLACES, 6), 2)
  check.ok(math.min(apart(two:select(0, 0), ty.stack { a, b }), apart(two:select(0, 0), ty.stack { b, a })) < 1e-5)
  check.fails(function() fewer.uniform(x, 65) end, "count: expected an integer in [1, 64], got 65")
end)

check.finish()
