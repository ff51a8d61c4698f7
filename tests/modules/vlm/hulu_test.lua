-- One model for text, pictures, volumes and video: what is left out and what stays, where it stays, and that packed
-- samples are what they are alone.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, vlm = require "tycho.models", require "tycho.vlm"

local hulu = vlm.hulu

local function distance(a, b) return (a:to "f64" - b:to "f64"):abs():max():item() end

check.test("a threshold of 0 keeps all, and frames that are the same keep the first only", function()
  ty.manual_seed(1)
  local frames = ty.rand(1, 3, 8, 8):expand(4, 3, 8, 8):contiguous()
  local count = function(x, threshold) return hulu.changed(x, 2, 2, threshold):to("i64"):sum():item() end
  check.equal({ count(frames, 0), count(frames, 0.1), count(frames, 1e-6) }, { 16, 4, 4 })
  check.equal(hulu.changed(frames, 2, 2, 0.1):select(0, 0):all():item(), true)
  -- One place of one frame changes: it is kept there, and in the frame behind, where it changes back.
  frames["2, :, 0:4, 4:8"]:add_(0.2)
  check.equal(hulu.changed(frames, 2, 2, 0.1):to("u8"):flatten(1):tolist(),
    { { 1, 1, 1, 1 }, { 0, 0, 0, 0 }, { 0, 1, 0, 0 }, { 0, 1, 0, 0 } })
  check.equal(count(frames, 0.21), 4)
  -- The mean over the pixels of a place decides.
  frames = ty.zeros(2, 1, 4, 4)
  frames["1, 0, 0, 0"]:fill_(1)
  check.equal({ count(frames, 0.25), count(frames, 0.26) }, { 5, 4 })
end)

check.test("what is seen: features of the places that stay, and their positions among all", function()
  ty.manual_seed(2)
  local frames, features = ty.zeros(2, 1, 8, 8), ty.randn(2, 4, 4, 3)
  frames["1, 0, 4:8, 0:4"]:fill_(1)
  local seen = hulu.see(frames, features, { threshold = 0.5 })
  check.equal({ seen.length, seen.positions:tolist() }, { 8, { 0, 1, 2, 3, 6 } })
  local pooled = hulu.pooled(features)
  check.equal(pooled.shape, { 2, 2, 2, 3 })
  check.ok(distance(pooled["1, 1, 0"], features["1, 2:4, 0:2"]:mean { 0, 1 }) < 1e-6)
  check.ok(distance(seen.features[4], pooled["1, 1, 0"]) < 1e-6)
  local all = hulu.see(frames, features, { threshold = 0, pool = false })
  check.equal({ all.length, #all.positions:tolist() }, { 32, 32 })
  check.ok(distance(all.features, features:flatten(0, 2)) == 0)
end)

check.test("a volume of one slice is a picture", function()
  local frames, features = ty.rand(1, 1, 8, 8), ty.randn(1, 4, 4, 3)
  local picture = hulu.see(frames, features, { threshold = 0.3 })
  check.equal({ picture.length, picture.kept:all():item() }, { 16, true })
  check.ok(distance(picture.features, features:flatten(0, 2)) == 0)
end)

local tokenizer = ty.tokenizer.train({ "is there a cyst? yes no where is it? right left" }, { vocabulary = 280,
  special = { "<end>" } })
ty.tokenizer.fields(tokenizer).eos = 0

local function new_model()
  ty.manual_seed(3)
  return hulu.Model(models.Llama { vocab_size = tokenizer.size, hidden_size = 16, intermediate_size = 40,
    num_hidden_layers = 2, num_attention_heads = 2, max_position_embeddings = 128, tie_word_embeddings = true }, 3)
end

local function samples()
  ty.manual_seed(4)
  local function seen(count, threshold)
    local frames = ty.rand(1, 1, 8, 8):expand(count, 1, 8, 8):contiguous()
    if count > 1 then frames["1:, :, 0:4, 0:4"]:add_(1) end
    return hulu.see(frames, ty.randn(count, 4, 4, 3), { threshold = threshold })
  end
  return { { question = "where is it?", answer = "left", kind = "text" },
    { seen = seen(1, 0.1), question = "is there a cyst?", answer = "yes", kind = "picture" },
    { seen = seen(3, 0.1), question = "is there a cyst?", answer = "no", kind = "volume" },
    { seen = seen(4, 0), question = "where is it?", answer = "right", kind = "video" } }
end

check.test("packed samples are what they are alone, and none sees another", function()
  local model, list = new_model(), samples()
  local batch = hulu.pack(list, tokenizer)
  local logits, start, losses = model(batch), 0, 0
  for _, sample in ipairs(list) do
    local alone = hulu.pack({ sample }, tokenizer)
    local own = model(alone)
    check.ok(distance(logits:narrow(0, start, own.shape[1]), own) < 1e-5, sample.kind)
    start = start + own.shape[1]
    losses = losses + hulu.loss(model, alone):item() * own.shape[1]
  end
  check.equal(start, logits.shape[1])
  check.close(hulu.loss(model, batch):item(), losses / start, 1e-5)
end)

check.test("positions: text goes on behind all places, whether they were left out or not", function()
  local list = samples()
  local batch = hulu.pack({ list[3] }, tokenizer)
  local seen = list[3].seen
  check.equal(seen.positions:tolist(), { 0, 1, 2, 3, 4 })
  local positions = batch.options.positions:flatten():tolist()
  check.equal({ positions[6], #positions }, { 12, 5 + #tokenizer:encode(" is there a cyst?\n"):tolist()
    + #tokenizer:encode(" no"):tolist() })
  check.equal(batch.options.longest, positions[#positions] + 1)
  -- Tokens and places that the decoder gets by itself, with a mask in place of packing.
  local model = new_model()
  local n = #positions
  local x = model.language_model:embed(batch.tokens)
  x = ty.concat({ model:project(seen.features):unsqueeze(0), x:narrow(1, 5, n - 5) }, 1)
  local hidden = model.language_model:hidden(batch.tokens, { embeddings = x, positions = batch.options.positions,
    mask = ty.ones({ 1, n, n }):to "bool" })
  local logits = model.language_model:head(hidden:select(0, 0):index_select(0, batch.at))
  check.ok(distance(model(batch), logits) < 1e-5)
end)

check.test("questions of all kinds are learnt, and asked by kind", function()
  local model, batch = new_model(), hulu.pack(samples(), tokenizer)
  local opt = ty.optim.AdamW(model:parameters(), { lr = 1e-2 })
  for _ = 1, 60 do opt:step(hulu.loss(model, batch)) end
  check.equal(hulu.ask(model, batch), { { kind = "text", right = true }, { kind = "picture", right = true },
    { kind = "volume", right = true }, { kind = "video", right = true } })
  local wrong = samples()
  wrong[2].answer = "no"
  check.equal(hulu.ask(model, hulu.pack(wrong, tokenizer))[2], { kind = "picture", right = false })
end)

check.test("stages: kinds come when their stage has begun, each as often, no sample twice before all were", function()
  local list, pools, seen = samples(), {}, {}
  for _, sample in ipairs(list) do pools[sample.kind] = { sample } end
  pools.text = { list[1], { question = "is there a cyst?", answer = "yes", kind = "text" } }
  local pack = hulu.pack
  hulu.pack = function(drawn, ...)
    local counts = {}
    for _, sample in ipairs(drawn) do counts[sample] = (counts[sample] or 0) + 1 end
    seen[#seen + 1] = counts
    return pack(drawn, ...)
  end
  local model = new_model()
  local first = hulu.fit(model, pools, tokenizer, { steps = 1, batch = 4, stages = { { 1, { "text" } } } })
  local loss = hulu.fit(model, pools, tokenizer, { steps = 10, batch = 4, seed = 2 })
  hulu.pack = pack
  check.ok(loss < first)
  for step, counts in ipairs(seen) do
    local text = (counts[pools.text[1]] or 0) + (counts[pools.text[2]] or 0)
    local wanted = step <= 3 and { 4, 0, 0 } or step <= 6 and { 2, 2, 0 } or { 1, 1, 1 }
    check.equal({ text, counts[list[2]] or 0, counts[list[3]] or 0 }, wanted, "step " .. step)
    if step <= 3 then check.equal(counts[pools.text[1]], 2) end
  end
  -- The same seed gives the same model.
  local function run()
    local own = new_model()
    hulu.fit(own, pools, tokenizer, { steps = 4, batch = 4, seed = 5 })
    return own.linear_1.weight
  end
  check.ok(distance(run(), run()) == 0)
end)

check.test("each stage warms up and decays on its own", function()
  local rate, list = hulu.rates(hulu.stages, 100), {}
  for step = 0, 99 do list[step + 1] = rate(step) end
  -- Stages of 20, 30 and 50 steps: at the first step after a tenth of each the rate is the peak, in the end it is low.
  for _, stage in ipairs { { 0, 20 }, { 20, 30 }, { 50, 50 } } do
    local from, count = stage[1], stage[2]
    check.close(list[from + 1], 10 / count, 1e-12)
    check.close(list[from + count // 10 + 1], 1, 1e-12)
    check.ok(list[from + count] < 0.07, "the last step of a stage")
  end
  local one, cosine = hulu.rates({ { 1, { "text" } } }, 40), ty.optim.cosine { steps = 40, warmup = 4, final = 0.05 }
  for step = 0, 39 do check.close(one(step), cosine(step), 1e-12) end
end)

check.test("many are asked as few are, and blind answers are the likeliest of training", function()
  local model, list = new_model(), samples()
  for _ = 1, 4 do table.move(list, 1, #list, #list + 1) end
  local all = hulu.ask_all(model, list, tokenizer)
  check.equal(#all, 64)
  local few = hulu.ask(model, hulu.pack(samples(), tokenizer))
  for i, answer in ipairs(all) do check.equal(answer, few[(i - 1) % 4 + 1]) end
  local function asked(question, answer) return { question = question, answer = answer, kind = "text" } end
  local found = hulu.blind({ asked("a\n where?", "left"), asked("b\n where?", "right"), asked("c\n where?", "right"),
    asked("is there?", "no") }, { asked("d\n where?", "right"), asked("where?", "left"), asked("is there?", "no"),
    asked("how?", "no") })
  local right = {}
  for i, answer in ipairs(found) do right[i] = answer.right end
  -- A question is the same behind a report.
  check.equal(right, { true, false, true, false })
end)

check.test("wrong arguments", function()
  check.fails(function() hulu.fit(new_model(), { text = {} }, tokenizer, { steps = 1 }) end,
    "hulu.fit: pools: expected samples of each kind of the stages, got none of text")
  local half = { { 0.5, { "text" } } }
  check.fails(function() hulu.fit(new_model(), { text = samples() }, tokenizer, { stages = half }) end,
    "hulu.fit: stages: expected shares of the steps that add up to 1, got 0.5")
  check.close(hulu.rates(hulu.stages, 2)(1), 1, 1e-12) -- a step for each of the last two stages
  check.fails(function() hulu.rates({ { 1 } }, 10) end, "hulu.rates: stages: expected { share of the steps, list of")
  check.fails(function() hulu.changed(ty.ones(2, 1, 7, 8), 2, 2, 0) end, "h a multiple of 2 and w of 2, got")
  check.fails(function() hulu.see(ty.ones(2, 1, 8, 8), ty.ones(1, 2, 2, 3)) end, "expected frames [f, c, h, w] and")
  check.fails(function() hulu.pooled(ty.ones(1, 3, 2, 4)) end, "even rows and columns")
  check.fails(function() hulu.pack({}, tokenizer) end, "samples: expected at least one, got none")
  check.fails(function() hulu.pack({ { question = "a" } }, tokenizer) end, "expected { question = string, answer")
  local model = new_model().language_model
  local tokens, cu = ty.ones({ 1, 4 }, { dtype = "i64" }), ty.tensor({ 0, 4 }, { dtype = "i64" })
  check.fails(function() model(tokens, { cu_seqlens = cu, positions = ty.ones({ 1, 3 }, { dtype = "i64" }) }) end,
    "positions: expected i64 [1, 4] with cu_seqlens, got")
end)

check.finish()
