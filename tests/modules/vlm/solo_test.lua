-- One transformer over patches and words: where patches go, what marks say, and that without pictures nothing changes.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, vlm = require "tycho.models", require "tycho.vlm"
local solo = vlm.solo

local function apart(a, b) return (a - b):abs():max():item() end
local function language()
  ty.manual_seed(3)
  return models.Llama { model_type = "llama", vocab_size = 20, hidden_size = 16, intermediate_size = 32,
    num_hidden_layers = 2, num_attention_heads = 2, max_position_embeddings = 64, tie_word_embeddings = true,
    eos_token_id = 0 }
end
local function new(patch) return solo.Solo(language(), { patch = patch or 4 }) end
local function row(list, ...)
  local ids = table.move(list, 1, #list, 1, {})
  for _, id in ipairs { ... } do ids[#ids + 1] = id end
  return ids
end
local function tokens(...) return ty.tensor({ ... }, { dtype = "i64" }) end

check.test("patches are cut row by row, the numbers of each channel by channel", function()
  local x = ty.arange(2 * 3 * 4 * 6):reshape(2, 3, 4, 6)
  local y = solo.patches(x, 2)
  check.equal(y.shape, { 2, 6, 12 })
  for place = 0, 5 do
    local want = x:select(0, 1):narrow(1, place // 3 * 2, 2):narrow(2, place % 3 * 2, 2):contiguous():flatten()
    check.equal(y:select(0, 1):select(0, place):tolist(), want:tolist())
  end
end)

check.test("sizes keep the proportion, in multiples of the patch and at most so large", function()
  check.equal({ solo.size(540, 33) }, { 544, 64 })
  check.equal({ solo.size(32, 540) }, { 32, 544 })
  check.equal({ solo.size(64, 64) }, { 64, 64 })
  check.equal({ solo.size(3000, 1000) }, { 1024, 352 })
  check.equal({ solo.size(1, 4000) }, { 32, 1024 })
  check.equal({ solo.size(20, 9, { patch = 8, most = 64 }) }, { 24, 16 })
end)

check.test("marks say where a picture and its rows begin, whatever its shape", function()
  local m = new()
  check.equal(m:marks(1, 1), { 20, 21, 23 })
  check.equal(m:marks(2, 3), { 20, 21, 21, 21, 22, 21, 21, 21, 23 })
  for rows = 1, 5 do
    for columns = 1, 4 do
      local count = { [20] = 0, [21] = 0, [22] = 0, [23] = 0 }
      for _, id in ipairs(m:marks(rows, columns)) do count[id] = count[id] + 1 end
      check.equal(count, { [20] = 1, [21] = rows * columns, [22] = rows - 1, [23] = 1 })
    end
  end
end)

check.test("without pictures, logits are the language model's", function()
  local m, before = new(), language()
  local x = ty.randint(0, 20, { 3, 9 })
  ty.no_grad(function()
    check.equal(m(x).shape, { 3, 9, 24 })
    check.ok(apart(m(x):narrow(2, 0, 20), before(x)) < 1e-6)
  end)
end)

check.test("the only layer of pictures is linear, without a bias, and patches are added to their tokens", function()
  local m, count = new(), 0
  for name, p in m:named_parameters() do
    if not name:find "^language_model%." then
      check.equal({ name, p.shape }, { "embed_vision_patch.weight", { 16, 48 } })
      count = count + 1
    end
  end
  check.equal(count, 1)
  local pictures, ids = ty.randn(1, 3, 4, 8), row(m:marks(1, 2), 3, 4)
  ty.no_grad(function()
    local x = m.language_model.model.embed_tokens(tokens(ids)):clone()
    local patches = m.embed_vision_patch(solo.patches(pictures, 4))
    x:narrow(1, 1, 2):add_(patches)
    check.ok(apart(m(tokens(ids), { pictures = pictures }), m.language_model(tokens(ids), { embeddings = x })) < 1e-6)
    check.ok(apart(m(tokens(ids), { pictures = pictures }), m(tokens(ids), { features = patches })) < 1e-6)
  end)
end)

check.test("pictures of several shapes in rows that are packed are what each is by itself", function()
  local m = new()
  local a, b = ty.randn(1, 3, 8, 4), ty.randn(1, 3, 4, 12)
  local first, second = row(m:marks(2, 1), 3, 4), row(m:marks(1, 3), 5)
  local both = row(first, table.unpack(second))
  ty.no_grad(function()
    local packed = m(tokens(both), { pictures = { a, b }, longest = 7,
      cu_seqlens = ty.tensor({ 0, #first, #both }, { dtype = "i64" }) })
    check.ok(apart(packed:narrow(1, 0, #first), m(tokens(first), { pictures = a })) < 1e-5)
    check.ok(apart(packed:narrow(1, #first, #second), m(tokens(second), { pictures = b })) < 1e-5)
  end)
end)

check.test("only words are predicted", function()
  local m = new()
  local pictures, ids = ty.randn(1, 3, 4, 8), row(m:marks(1, 2), 3, 4, 0)
  local logits = ty.no_grad(function() return m(tokens(ids), { pictures = pictures }) end):log_softmax(-1):select(0, 0)
  local sum = 0
  for k = 4, 6 do sum = sum - logits:select(0, k - 1):select(0, ids[k + 1]):item() end -- what follows the stop
  check.close(m:loss(tokens(ids), nil, { pictures = pictures }):item(), sum / 3, 1e-5)
  m:zero_grad()
  m:loss(tokens(ids), nil, { pictures = pictures }):backward()
  check.ok(m.embed_vision_patch.weight.grad:abs():max():item() > 0)
end)

check.test("decoding with a cache is computing all anew", function()
  local m = new()
  local pictures = ty.randn(2, 3, 8, 8)
  local ids = row(m:marks(2, 2), 3, 4)
  local all = tokens(ids, ids)
  local cache = m:cache()
  local logits = ty.no_grad(function() return m(all, { pictures = pictures, cache = cache }) end)
  for _ = 1, 3 do
    local following = logits:narrow(1, logits.shape[2] - 1, 1):argmax(-1):clamp(0, 19)
    all = ty.concat({ all, following }, 1)
    logits = ty.no_grad(function() return m(following, { cache = cache }) end)
    local want = ty.no_grad(function() return m(all, { pictures = pictures }) end)
    check.ok(apart(logits, want:narrow(1, all.shape[2] - 1, 1)) < 1e-5)
  end
  local said = m:generate(tokens(ids, ids), 3, { temperature = 0, pictures = pictures, stop_tokens = false })
  check.equal(said.shape, { 2, #ids + 3 })
end)

check.test("questions about a picture share its marks and patches", function()
  local m, tokenizer = new(), require("tycho.zoo").tokenizer "scene-vlm"
  local dialogue = vlm.Dialogue(tokenizer, { picture = m:marks(2, 2) })
  check.equal(dialogue.features, 7)
  local batch = dialogue:packed { { { question = "what is this?", answer = "a dog" } } }
  check.equal(batch.tokens:narrow(1, 0, 7):flatten():tolist(), m:marks(2, 2))
  check.equal(batch.turn:narrow(1, 0, 7):flatten():tolist(), { 0, 0, 0, 0, 0, 0, 0 })
  check.equal(table.move(dialogue:described("a dog").ids, 1, 7, 1, {}), m:marks(2, 2))
end)

check.test("what does not fit is one clear error", function()
  local m = new()
  check.fails(function() solo.patches(ty.zeros(1, 3, 6, 8), 4) end, "expected [n, channels, height, width]")
  check.fails(function() solo.size(3, 3, { patch = 8, most = 20 }) end, "most: expected a multiple of the patch, 8")
  check.fails(function() m(tokens(m:marks(1, 2)), { pictures = ty.zeros(1, 3, 4, 4) }) end,
    "expected as many patches as the 2 tokens of patches, got 1")
  check.fails(function() solo.Solo(ty.nn.Linear(2, 2)) end, "language: expected a decoder such as models.Llama")
end)

check.finish()
