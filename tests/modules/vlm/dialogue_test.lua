-- Rows of tokens for questions about pictures, and models joined of two.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, vlm = require "tycho.models", require "tycho.vlm"

-- A tokenizer of single bytes with a token of the end.
local function tokenizer()
  return ty.tokenizer.train({ "what is this? a red apple" }, { vocabulary = 257, special = { "<|endoftext|>" } })
end

local t = tokenizer()
ty.tokenizer.fields(t).eos = 0
local function ids(text) return t:encode(text):tolist() end

check.test("rows: a picture's place, questions that are not learnt, answers and their ends that are", function()
  local dialogue = vlm.Dialogue(t, { image_token = 999, features = 3 })
  local tokens, targets = dialogue:rows {
    { { question = "what?", answer = "red" }, { question = "is it?", answer = "apple" } },
    { { question = "a", answer = "b" } },
  }
  local want, learnt = { 999, 999, 999 }, { false, false, false }
  for _, turn in ipairs { { "what?", "red" }, { "is it?", "apple" } } do
    for _, id in ipairs(ids("\n" .. turn[1] .. "\n")) do want[#want + 1], learnt[#learnt + 1] = id, false end
    for _, id in ipairs(ids(turn[2])) do want[#want + 1], learnt[#learnt + 1] = id, true end
    want[#want + 1], learnt[#learnt + 1] = 0, true
  end
  local follows = {}
  for i = 1, #want do follows[i] = learnt[i + 1] and want[i + 1] or -100 end
  check.equal(tokens:select(0, 0):tolist(), want)
  check.equal(targets:select(0, 0):tolist(), follows)
  -- The shorter row: 3 places, 3 of the question, 1 of the answer, 1 of the end; nothing is learnt behind it.
  local short = 3 + #ids "\na\n" + #ids "b" + 1
  check.equal(tokens:select(0, 1):narrow(0, short, #want - short):eq(0):all():item(), true)
  check.equal(targets:select(0, 1):ne(-100):to("i64"):sum():item(), #ids "b" + 1)
  check.equal(dialogue:prompt("a"):tolist(), { table.move(ids "\na\n", 1, 9, 4, { 999, 999, 999 }) })
end)

check.test("answered says which rows greedy decoding gets right to the end", function()
  ty.manual_seed(1)
  local model = models.Llama { vocab_size = 300, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2,
    num_attention_heads = 2, max_position_embeddings = 64, tie_word_embeddings = true }
  local dialogue = vlm.Dialogue(t, { image_token = 0, features = 0 })
  local known = { { { question = "what?", answer = "red" } }, { { question = "is it?", answer = "ap" } } }
  local tokens, targets = dialogue:rows(known)
  local opt = ty.optim.AdamW(model:parameters(), { lr = 3e-3 })
  for _ = 1, 60 do opt:step(model:loss(tokens, targets)) end
  model:eval()
  check.equal(vlm.Dialogue.answered(model, tokens, targets), { true, true })
  tokens, targets = dialogue:rows { known[1], { { question = "is it?", answer = "at" } } }
  check.equal(vlm.Dialogue.answered(model, tokens, targets), { true, false })
  -- The same from generation, step by step.
  for i, turn in ipairs { known[1][1], known[2][1] } do
    local prompt = dialogue:prompt(turn.question)
    local answer = ids(turn.answer)
    answer[#answer + 1] = 0
    local said = model:generate(prompt, #answer, { temperature = 0 }):select(0, 0):tolist()
    check.equal({ table.unpack(said, prompt.shape[2] + 1) }, answer, "answer " .. i)
  end
end)

-- That two tensors differ by at most 1e-6.
local function alike(a, b) check.ok((a - b):abs():max():item() <= 1e-6) end

local function parts()
  ty.manual_seed(2)
  local language = models.Llama { vocab_size = 20, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1,
    num_attention_heads = 2, max_position_embeddings = 64, tie_word_embeddings = true }
  local clip = models.CLIPModel { projection_dim = 8,
    text_config = { vocab_size = 20, hidden_size = 8, intermediate_size = 16, num_hidden_layers = 1,
      num_attention_heads = 2, max_position_embeddings = 8, eos_token_id = 1 },
    vision_config = { image_size = 8, patch_size = 4, hidden_size = 8, intermediate_size = 16, num_hidden_layers = 2,
      num_attention_heads = 2 } }
  return language:eval(), clip:eval()
end

check.test("a joined model reads as the language model and sees as the tower; neither is changed", function()
  local language, clip = parts()
  local before = ty.io.json_encode(language:published_config())
  local model = vlm.join(language, clip):eval()
  check.equal({ model.config.image_token_index, model.language_model.config.vocab_size }, { 20, 21 })
  local tokens = ty.tensor({ { 3, 4, 5 } }, { dtype = "i64" })
  alike(model(tokens):narrow(2, 0, 20), language(tokens))
  local pictures = ty.randn(2, 3, 8, 8)
  alike(model.vision_tower:hidden(pictures), (clip.vision_model:run(pictures, nil, false)))
  check.equal(model:picture_features(pictures).shape, { 2, 4, 16 })
  local with = model(ty.tensor({ { 20, 20, 20, 20, 3 } }, { dtype = "i64" }), { pictures = pictures:narrow(0, 0, 1) })
  check.equal(with.shape, { 1, 5, 21 })
  -- The new token's row is the mean of the others; the parts are copies.
  local rows = model.language_model.model.embed_tokens.weight
  alike(rows:select(0, 20), rows:narrow(0, 0, 20):mean { 0 })
  ty.no_grad(function() rows:zero_() end)
  check.ok(language.model.embed_tokens.weight:abs():sum():item() > 0)
  check.equal({ language.config.vocab_size, ty.io.json_encode(language:published_config()) }, { 20, before })
end)

check.test("what cannot be joined or told is one clear error", function()
  local language, clip = parts()
  check.fails(function() vlm.join(clip, clip) end, "vlm.join: language: expected a language model")
  check.fails(function() vlm.join(language, language) end, "vlm.join: tower: expected a CLIPModel")
  check.fails(function() vlm.Dialogue(t, { image_token = -1, features = 1 }) end, "at least 0")
  local dialogue = vlm.Dialogue(t, { image_token = 1, features = 1 })
  check.fails(function() dialogue:rows {} end, "expected at least one")
  check.fails(function() dialogue:rows { { { question = "a" } } } end, "Dialogue:rows: dialogue 1: expected turns")
end)

check.finish()
