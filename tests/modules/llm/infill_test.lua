-- Blank infilling: spans and their law, samples and the text put back, batches, filling; the shrunk gradient.
local here = (arg and arg[0]:match ".*/" or "tests/modules/llm/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm, models = require "tycho.llm", require "tycho.models"

local infill = llm.infill
local marks = infill.marks(100)

local function text(n)
  local ids = {}
  for i = 1, n do ids[i] = i end
  return ids
end

check.test("marks", function()
  check.equal(marks, { mask = 100, gmask = 101, sop = 102, eop = 103, count = 4 }, "ids")
end)

check.test("a sample with short spans, by hand", function()
  local s = infill.blank({ 11, 12, 13, 14, 15, 16 }, { { 2, 1 }, { 4, 2 } }, marks, { 2, 1 })
  check.equal(s, {
    tokens = { 11, 12, 100, 14, 100, 102, 15, 16, 102, 13 },
    targets = { -100, -100, -100, -100, -100, 15, 16, 103, 13, 103 },
    positions = { 0, 1, 2, 3, 4, 4, 4, 4, 2, 2 }, prefix = 5 }, "the figure of the paper")
  local g = infill.suffix({ 11, 12, 13 }, 1, marks)
  check.equal(g, { tokens = { 11, 101, 102, 12, 13 }, targets = { -100, -100, 12, 13, 103 },
    positions = { 0, 1, 2, 3, 4 }, prefix = 2 }, "a suffix")
end)

check.test("spans put back give the text", function()
  ty.manual_seed(1)
  for n = 1, 60 do
    local ids = text(n)
    for _, share in ipairs { 0.15, 0.5, 0.9 } do
      local spans = infill.spans(n, share, 3)
      local order = {}
      for i = 1, #spans do order[i] = #spans + 1 - i end
      check.equal(infill.restore(infill.blank(ids, spans, marks, order), marks), ids, "blank")
    end
    check.equal(infill.restore(infill.suffix(ids, n // 2, marks), marks), ids, "suffix")
  end
end)

check.test("spans: as many tokens as asked for, apart, lengths by Poisson's law", function()
  ty.manual_seed(2)
  local lengths, count, tokens = {}, 0, 0
  for _ = 1, 300 do
    local spans, at, sum = infill.spans(400, 0.15, 3), -1, 0
    for i, span in ipairs(spans) do
      check.ok(span[1] > at and span[1] + span[2] <= 400, "in order, a token between")
      at, sum = span[1] + span[2], sum + span[2]
      if i < #spans then -- the last one may be cut
        lengths[span[2]] = (lengths[span[2]] or 0) + 1
        count = count + 1
      end
    end
    tokens = tokens + sum
  end
  check.equal(tokens, 300 * 60, "15 percent")
  local p = math.exp(-3)
  for k = 0, 6 do
    local want = k == 1 and p + math.exp(-3) or p -- none at all becomes one
    if k > 0 then
      local got, deviation = (lengths[k] or 0) / count, (want * (1 - want) / count) ^ 0.5
      check.ok(math.abs(got - want) < 5 * deviation, ("length %d: %.4f, law %.4f"):format(k, got, want))
    end
    p = p * 3 / (k + 1)
  end
end)

local function tiny(vocabulary)
  return models.GLM { vocab_size = vocabulary, hidden_size = 32, inner_hidden_size = 48, num_layers = 2,
    num_attention_heads = 2, max_sequence_length = 64 }
end

check.test("the loss does not depend on what is side by side, nor the logits on later spans", function()
  ty.manual_seed(3)
  local model = tiny(104)
  local short = infill.blank(text(12), { { 3, 2 }, { 8, 1 } }, marks)
  local long = infill.suffix(text(30), 5, marks)
  local together, apart = infill.batch { short, long }, { infill.batch { short }, infill.batch { long } }
  check.equal(together.count, apart[1].count + apart[2].count, "count")
  check.equal(together.prefix:tolist(), { 11, 6 }, "prefixes")
  local sum = 0
  for _, batch in ipairs(apart) do sum = sum + infill.loss(model, batch):item() * batch.count end
  check.close(infill.loss(model, together):item(), sum / together.count, 1e-5, "loss")
end)

check.test("a suffix of everything is a causal language model behind two marks", function()
  ty.manual_seed(4)
  local model = tiny(104)
  local batch = infill.batch { infill.suffix(text(20), 0, marks) }
  local logits = model(batch.tokens, { prefix = batch.prefix, positions = batch.positions })
  check.close(logits:tolist(), model(batch.tokens):tolist(), 1e-5, "logits")
  check.equal(batch.targets:narrow(1, 1, 20):tolist()[1], text(20), "each token is predicted")
end)

check.test("rows of a text", function()
  ty.manual_seed(5)
  local ids = ty.arange(500):remainder(100)
  local rows = infill.Rows({ ids:narrow(0, 0, 200), ids:narrow(0, 200, 300) }, { marks = marks, length = 40 })
  check.equal(rows.size, 12, "rows")
  local short, all = 0, 0
  for batch in ty.data.DataLoader(rows, { batch_size = 4, shuffle = true, seed = 1 })() do
    for i, prefix in ipairs(batch.prefix:tolist()) do
      local tokens = batch.tokens:select(0, i - 1):tolist()
      local kind = tokens[prefix] == marks.gmask and 0 or 1
      short, all = short + kind, all + 1
      local sample = { prefix = prefix, tokens = {}, targets = {} }
      sample.positions = batch.positions:select(0, i - 1):tolist()
      local targets = batch.targets:select(0, i - 1):tolist()
      for k, token in ipairs(tokens) do
        if k <= prefix or targets[k] ~= -100 then
          sample.tokens[#sample.tokens + 1], sample.targets[#sample.targets + 1] = token, targets[k]
        elseif kind == 0 and token == marks.sop then
          sample.tokens[#sample.tokens + 1], sample.targets[#sample.targets + 1] = token, targets[k]
        end
      end
      local restored = infill.restore(sample, marks)
      check.equal(#restored, 40, "a window")
      for k = 2, 40 do check.equal(restored[k], (restored[k - 1] + 1) % 100, "of the text") end
    end
  end
  check.equal(all, 12, "samples")
  check.ok(short < 12, "both kinds")
end)

check.test("a model learns to count, and fills what was cut out", function()
  ty.manual_seed(6)
  local small = infill.marks(16)
  local model = tiny(20)
  local rows = infill.Rows(ty.arange(800):remainder(16), { marks = small, length = 16, short = 1 })
  ty.train.fit(model, ty.data.DataLoader(rows, { batch_size = 16, shuffle = true, seed = 1 }), { steps = 250, lr = 1e-2,
    warmup = 10, weight_decay = 0, quiet = true, loss = infill.loss })
  local ids, pieces = infill.fill(model, { 2, 3, small.mask, 6, 7, 8, small.mask, 10, 11, 12, 13, 14, 15, 0, 1 }, small)
  check.equal(pieces, { { 4, 5 }, { 9 } }, "pieces")
  check.equal(ids, { 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1 }, "text")
end)

check.test("evaluation, and what the frequencies of tokens alone would cost", function()
  local batches = { infill.batch { infill.suffix({ 1, 2, 3 }, 1, marks), infill.suffix({ 1, 2 }, 1, marks) },
    infill.batch { infill.suffix({ 2, 2, 2, 2 }, 0, marks) } }
  ty.manual_seed(3)
  local model = models.GLM { vocab_size = 104, hidden_size = 32, inner_hidden_size = 64, num_layers = 1,
    num_attention_heads = 2, max_sequence_length = 32 }
  local found, sum, count = infill.evaluate(model, batches), 0, 0
  for _, batch in ipairs(batches) do
    sum, count = sum + infill.loss(model, batch):item() * batch.count, count + batch.count
  end
  check.close(found.loss, sum / count, 1e-5)
  check.ok(found.right >= 0 and found.right <= 1 and model.training)
  -- In the first batch 2, 3, end, 2, end are to be written, of which each counts once more; in the second four 2 and an
  -- end.
  local cost = infill.frequencies({ batches[1] }, { batches[2] }, 104)
  check.close(cost, -(4 * math.log(3 / 109) + math.log(3 / 109)) / 5, 1e-5)
  check.fails(function() infill.evaluate(3, batches) end, "llm.infill.evaluate: model: expected a module, got 3")
end)

check.test("the gradient of embeddings is shrunk and nothing else", function()
  ty.manual_seed(7)
  local model = tiny(30)
  local tokens, targets = ty.randint(0, 30, { 2, 8 }), ty.randint(0, 30, { 2, 8 })
  local function run()
    local loss = model:loss(tokens, targets)
    local named = {}
    for name, p in model:named_parameters() do named[#named + 1] = { name, p } end
    local list = {}
    for i, entry in ipairs(named) do list[i] = entry[2] end
    local grads = ty.grad({ loss }, list)
    local by_name = {}
    for i, entry in ipairs(named) do by_name[entry[1]] = grads[i] end
    return loss:item(), by_name
  end
  local loss, grads = run()
  check.equal(llm.shrink.attach(model, 0.1), 1, "embeddings")
  local other, shrunk = run()
  check.close(other, loss, 1e-6, "value")
  for name, grad in pairs(grads) do
    local factor = name == "transformer.word_embeddings.weight" and 0.1 or 1
    check.close(shrunk[name]:tolist(), (grad * factor):tolist(), 2e-6, name)
  end
  check.equal(llm.shrink.remove(model), 1, "taken off")
  check.close(run(), loss, 0, "as before")
end)

check.test("what is refused", function()
  check.fails(function() infill.blank(text(5), { { 3, 4 } }, marks) end, "llm.infill.blank: spans: expected spans in")
  check.fails(function() infill.blank(text(5), { { 2, 1 }, { 1, 1 } }, marks) end, "as span 2")
  check.fails(function() infill.suffix(text(5), 5, marks) end, "llm.infill.suffix: cut: expected an integer in")
  check.fails(function() infill.spans(0) end, "llm.infill.spans: n: expected an integer >= 1")
  check.fails(function() infill.Rows(ty.arange(5), { marks = marks }) end, "ids: expected at least 56 tokens")
  check.fails(function() infill.Rows(ty.arange(99), {}) end, "llm.infill.Rows: marks: expected a table, got nil")
  check.fails(function() infill.batch {} end, "samples: expected at least one")
  check.fails(function() llm.shrink.attach(tiny(20), 2) end, "llm.shrink.attach: alpha: expected a number in %[0, 1%]")
  check.fails(function() llm.shrink.attach(ty.nn.Linear(2, 2)) end, "no embedding matches")
end)

check.finish()
