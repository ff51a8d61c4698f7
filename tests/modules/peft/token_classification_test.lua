-- A head over words: labels stand on first pieces alone, padding changes nothing, LoRA that is off is the model before,
-- and little is trained.
local here = (arg and arg[0]:match ".*/" or "tests/modules/peft/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, peft = require "tycho.llm", require "tycho.peft"

local text = ("In the beginning Moab went up to Gilead and dwelt there with the children of Reuben. "):rep(20)
local tokenizer = ty.tokenizer.train({ text }, { vocabulary = 280 })
local classes = { "O", "B-place", "I-place", "B-person" }

local function tagger(seed)
  ty.manual_seed(seed or 1)
  local bert = llm.Bert({ vocab_size = 300, hidden_size = 32, num_hidden_layers = 2, num_attention_heads = 2,
    intermediate_size = 64, max_position_embeddings = 64 }, false)
  return peft.token_classification.new(bert, classes, { pad = 299 })
end

local texts = { { words = { "Reuben", "dwelt", "in", "Gilead" }, tags = { "B-person", "O", "O", "B-place" } },
  { words = { "Moab" }, tags = { "B-place" } } }

check.test("labels stand on the first piece of each word", function()
  local m = tagger()
  local batch = m:batch(tokenizer, texts)
  local pieces = {}
  for _, word in ipairs(texts[1].words) do
    local ids = tokenizer:encode(" " .. word)
    for k, id in ipairs(ty.is_tensor(ids) and ids:tolist() or ids) do pieces[#pieces + 1] = { id, k == 1 } end
  end
  check.ok(#pieces > 4, "some word has several pieces")
  local tokens, labels, mask = batch.tokens:tolist(), batch.labels:tolist(), batch.mask:to("i64"):tolist()
  check.equal(#tokens[1], #pieces)
  local word = 0
  for k, piece in ipairs(pieces) do
    check.equal(tokens[1][k], piece[1])
    if piece[2] then word = word + 1 end
    local index = { O = 0, ["B-place"] = 1, ["B-person"] = 3 }
    check.equal(labels[1][k], piece[2] and index[texts[1].tags[word]] or -100)
    if piece[2] then check.equal(batch.first[1][word], k - 1) end
  end
  local second = #(mask[2])
  local there = 0
  for k = 1, second do
    there = there + mask[2][k]
    if mask[2][k] == 0 then check.equal({ tokens[2][k], labels[2][k] }, { 299, -100 }) end
  end
  check.ok(there < second)
end)

check.test("what each way trains", function()
  local function count(list)
    local sum = 0
    for _, p in ipairs(list) do sum = sum + p:numel() end
    return sum
  end
  local whole, head = tagger():count_parameters(), 32 * #classes + #classes
  check.equal(count(tagger():trainable "full"), whole)
  local m = tagger()
  check.equal(count(m:trainable "head"), head)
  check.equal(m.encoder:parameters()[1].requires_grad, false)
  m = tagger()
  check.equal(count(m:trainable("lora", { targets = { "query" }, rank = 2 })), head + 2 * 2 * (32 + 32))
  check.fails(function() tagger():trainable "half" end, 'TokenClassifier:trainable: how: expected "full" or "head"')
end)

check.test("padding changes no score", function()
  local m = tagger():eval()
  local both, alone = m:batch(tokenizer, texts), m:batch(tokenizer, { texts[2] })
  local n = alone.tokens.shape[2]
  ty.no_grad(function()
    local a = m(both.tokens, { mask = both.mask })["1:2"]:narrow(1, 0, n)
    local b = m(alone.tokens, { mask = alone.mask })
    check.ok((a - b):abs():max():item() < 1e-5)
  end)
  check.equal(m:tags(tokenizer, texts, { batch = 1 }), m:tags(tokenizer, texts))
  check.equal(#m:tags(tokenizer, texts)[1], 4)
end)

check.test("LoRA on the encoder: off, it is the model before; few parameters; it learns the words", function()
  local m = tagger()
  local function scores()
    local batch = m:batch(tokenizer, texts)
    local was = m.training
    m:eval()
    local result = ty.no_grad(function() return m.encoder(batch.tokens, { mask = batch.mask }) end)
    m:train(was)
    return result
  end
  local before = scores()
  peft.lora(m.encoder, { targets = { "query", "value" }, rank = 2, alpha = 8 })
  local trained = peft.parameters(m.encoder)
  for _, p in ipairs(m.classifier:parameters()) do trained[#trained + 1] = p end
  local opt = ty.optim.AdamW(trained, { lr = 2e-2 })
  for _ = 1, 60 do opt:step(m:loss(m:batch(tokenizer, texts))) end
  check.equal(m:tags(tokenizer, texts), { texts[1].tags, texts[2].tags })
  check.ok(not scores():equal(before))
  check.ok(peft.disable(m.encoder, scores):equal(before))
  local count, all = 0, 0
  for _, p in ipairs(trained) do count = count + p:numel() end
  for _, p in ipairs(m:parameters()) do all = all + p:numel() end
  check.equal(count, 2 * 2 * 2 * (32 + 32) + 4 * 32 + 4)
  check.ok(count < all)
end)

check.test("mistakes", function()
  local new = peft.token_classification.new
  check.fails(function() new(ty.nn.Linear(2, 2), classes) end, "encoder: expected one with config.hidden_size")
  check.fails(function() new(tagger().encoder, { "O" }) end, "classes: expected at least 2, got 1")
  check.fails(function() new(tagger().encoder, { "O", "O" }) end, 'there are two "O"')
  local m = tagger()
  check.fails(function() m:batch(tokenizer, {}) end, "TokenClassifier:batch: texts: expected at least one, got none")
  check.fails(function() m:batch(tokenizer, { { words = { "a" }, tags = { "B-x" } } }) end, 'there is no class "B-x"')
  check.fails(function() m:batch(tokenizer, { { words = { "a" }, tags = {} } }) end, "got 1 words and 0 tags")
  check.fails(function() m:batch(3, texts) end, "tokenizer: expected one with encode(), got 3")
  check.fails(function() m:loss {} end, "TokenClassifier:loss: batch.tokens: expected a tensor, got nil")
end)

check.finish()
