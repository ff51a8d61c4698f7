-- Training language models: token files, packing, accumulation, checkpointing, resuming, evaluation, the n-gram model.
local here = (arg and arg[0]:match ".*/" or "tests/modules/llm/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local data, train = llm.data, llm.train
local scratch = os.tmpname()

local families = {}

function families.Llama(more)
  ty.manual_seed(3)
  local config = { vocab_size = 40, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
    num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 32 }
  for key, value in pairs(more or {}) do config[key] = value end
  return llm.Llama(config)
end

function families.GPT2(more)
  ty.manual_seed(3)
  local options = { vocabulary = 40, context = 16, width = 32, layers = 2, heads = 4 }
  for key, value in pairs(more or {}) do options[key] = value end
  return llm.GPT2(options)
end

-- Large weights, so that what a token sees makes a difference.
local function shaken(model)
  for _, p in ipairs(model:parameters()) do if p.ndim >= 2 then p:detach():normal_(0, 0.3) end end
  return model
end

local function documents(lengths)
  ty.manual_seed(7)
  local list = {}
  for i, n in ipairs(lengths) do list[i] = ty.randint(0, 40, { n }) end
  return list
end

local function gradients(model)
  local list = {}
  for i, p in ipairs(model:parameters()) do
    list[i] = p.grad:flatten():clone()
  end
  model:zero_grad()
  return ty.concat(list, 0)
end

check.test("a token file is mapped and gives back its documents", function()
  data.write(scratch, { { 1, 2, 3 }, { 4 }, ty.tensor({}, { dtype = "i64" }), { 5, 255 } })
  local file = ty.io.load_safetensors(scratch)
  check.equal(file.tokens.dtype, "u8")
  check.equal(file.starts:tolist(), { 0, 3, 4, 4, 6 })
  check.equal(data.join({ { 256 } }).tokens.dtype, "i16")
  check.equal(data.join({ { 1 << 15 } }).tokens.dtype, "i32")
  local rows = data.Packed(scratch, { length = 4 })
  check.equal(#rows, 2)
  local batch = rows:batch(ty.tensor({ 0, 1 }, { dtype = "i64" }))
  check.equal(batch.tokens:tolist(), { { 1, 2, 3, 4, 5, 255 } })
  check.equal(batch.targets:tolist(), { { 2, 3, -100, -100, 255, -100 } })
  check.equal(batch.cu_seqlens:tolist(), { 0, 3, 4, 6 })
  check.equal({ batch.count, batch.longest }, { 3, 4 })
end)

check.test("bad token files and options are errors", function()
  local function bad(tensors, message)
    ty.io.save_safetensors(scratch, tensors)
    check.fails(function() data.Packed(scratch) end, message)
  end
  local tokens = ty.tensor({ 1, 2, 3 }, { dtype = "i32" })
  local function starts(...) return ty.tensor({ ... }, { dtype = "i64" }) end
  bad({ tokens = tokens }, "'starts' must be i64")
  bad({ tokens = tokens:to "f32", starts = starts(0, 3) }, "'tokens' must be integers")
  bad({ tokens = tokens, starts = starts(0, 4) }, "must rise from 0 to 3")
  bad({ tokens = tokens, starts = starts(0, 2, 1, 3) }, "must rise from 0 to 3")
  bad({ tokens = tokens, starts = starts(1, 3) }, "must rise from 0 to 3")
  check.fails(function() data.Packed(data.join { { 1 } }, { length = 4, overlap = 4 }) end, "overlap < length")
  check.fails(function() data.join {} end, "there are no tokens")
  check.fails(function() data.join { { -1 } } end, "below 0")
end)

check.test("every token counts once, whatever the rows", function()
  local source = data.join(documents { 5, 1, 17, 2, 30, 9 })
  for _, options in ipairs { { length = 8 }, { length = 64 }, { length = 7, overlap = 3 }, { length = 1 } } do
    local rows, count, pairs_seen = data.Packed(source, options), 0, {}
    for i = 0, #rows - 1 do
      local batch = rows:get(i)
      count = count + batch.count
      local tokens, targets = batch.tokens:tolist()[1], batch.targets:tolist()[1]
      for k, target in ipairs(targets) do
        if target >= 0 then pairs_seen[#pairs_seen + 1] = tokens[k] .. ">" .. target end
      end
    end
    check.equal(count, 64 - 6, options.length)
    local wanted, all, starts = {}, source.tokens:tolist(), source.starts:tolist()
    for d = 1, #starts - 1 do
      for k = starts[d] + 1, starts[d + 1] - 1 do wanted[#wanted + 1] = all[k] .. ">" .. all[k + 1] end
    end
    check.equal(pairs_seen, wanted)
  end
end)

for _, name in ipairs { "GPT2", "Llama" } do
  local make = families[name]
  check.test(name .. ": packed documents are as they are alone", function()
    local model, list = shaken(make()):eval(), documents { 5, 9, 1, 12 }
    local batch = data.Packed(data.join(list), { length = 64 }):get(0)
    batch.longest = 12
    ty.no_grad(function()
      local packed, from = model(batch.tokens, batch), 0
      for _, document in ipairs(list) do
        local n = document:numel()
        check.close(packed:narrow(1, from, n):tolist(), model(document:unsqueeze(0)):tolist(), 1e-4)
        from = from + n
      end
      local joined = model(batch.tokens:narrow(1, 0, 14))
      check.ok((joined - packed:narrow(1, 0, 14)):abs():max():item() > 1e-2, "without cu_seqlens they are not")
    end)
    check.fails(function() model(ty.zeros({ 2, 3 }, { dtype = "i64" }), { cu_seqlens = batch.cu_seqlens }) end,
      "tokens: expected [1, n] with cu_seqlens")
    check.fails(function() model:loss(batch.tokens, nil, { cu_seqlens = batch.cu_seqlens }) end, "need their targets")
  end)

  check.test(name .. ": accumulated gradients are those of one batch; checkpointing changes nothing", function()
    local model = shaken(make())
    local rows = data.Packed(data.join(documents { 3, 20, 1, 9, 4, 15 }), { length = 10 })
    local function batch(...) return rows:batch(ty.tensor({ ... }, { dtype = "i64" })) end
    local loss, tokens = train.backward(model, { batch(0, 1, 2, 3, 4, 5) })
    local whole = gradients(model)
    local parts = { batch(0, 1), batch(2), batch(3, 4, 5) }
    check.ok(parts[1].count ~= 2 * parts[2].count, "the parts differ in their tokens")
    local parts_loss, parts_tokens = train.backward(model, parts)
    local summed = gradients(model)
    check.equal(parts_tokens, tokens)
    check.close(parts_loss, loss, 1e-6 * loss)
    local largest = whole:abs():max():item()
    check.ok((summed - whole):abs():max():item() <= 1e-6 * largest, "gradients, relative to the largest")
    local again = train.backward(model, parts, { checkpoint = true })
    check.equal(again, parts_loss)
    check.equal(ty.io.to_bytes(gradients(model)) == ty.io.to_bytes(summed), true, "the same bits")
  end)
end

check.test("the loss of a batch is the one that backward has", function()
  local model = shaken(families.Llama())
  local ids = ty.randint(0, 40, { 1, 9 })
  local batch = { tokens = ids:narrow(1, 0, 8), targets = ids:narrow(1, 1, 8), count = 8 }
  check.equal(train.loss(model, batch):item(), (train.backward(model, { batch })))
  check.fails(function() train.loss(3, batch) end, "llm.train.loss: model: expected a language model, got 3")
end)

check.test("N steps are k steps, a resume and N - k, bit for bit", function()
  local rows = data.Packed(data.join(documents { 60, 33, 90, 8, 41 }), { length = 12, overlap = 2, jitter = true })
  local folder = scratch .. ".run"
  local function run(more)
    local model = families.GPT2 { dropout = 0.1 }
    local options = { steps = 12, batch = 2, accumulate = 2, seed = 5, lr = 3e-3, quiet = true, save_every = 3 }
    for key, value in pairs(more or {}) do options[key] = value end
    local losses = train.fit(model, rows, options)
    return model, losses
  end
  local straight, losses = run()
  check.equal(#losses, 12)
  run { folder = folder, log = folder .. ".log", pause = 7 }
  ty.manual_seed(99)
  local resumed, more = run { folder = folder, log = folder .. ".log", resume = true }
  local logged = {}
  for line in ty.io.lines(folder .. ".log/metrics.jsonl") do logged[#logged + 1] = ty.io.json_decode(line).loss end
  check.close(logged, losses, 1e-9)
  check.equal(more, losses)
  local other = resumed:state_dict()
  for key, tensor in pairs(straight:state_dict()) do
    check.equal(ty.io.to_bytes(other[key]) == ty.io.to_bytes(tensor), true, key)
  end
  for _, path in ipairs { folder, folder .. ".log" } do
    for _, file in ipairs(ty.io.listdir(path)) do ty.io.remove(path .. "/" .. file) end
    ty.io.remove(path)
  end
  check.fails(function() run { resume = true } end, "needs the folder")
  check.fails(function() run { resume = true, folder = folder } end, "nothing to resume: there is no checkpoint at")
end)

check.test("it learns, and evaluation says how well", function()
  local list = {}
  for i = 1, 8 do list[i] = ty.arange(i, i + 20) % 10 end
  local source = data.join(list)
  local model = families.Llama()
  local before = train.evaluate(model, data.Packed(source, { length = 16 }), { bytes = 320 })
  check.close(before.loss, math.log(40), 0.3)
  check.close(before.perplexity, math.exp(before.loss), 1e-9)
  check.close(before.bits_per_byte, before.loss * before.tokens / math.log(2) / 320, 1e-9)
  check.equal(before.tokens, 8 * 19)
  check.equal(model.training, true)
  local seen = {}
  train.fit(model, data.Packed(source, { length = 16, jitter = true }), { steps = 60, batch = 4, lr = 1e-2,
    quiet = true, every = 30, evaluate = function(step)
      seen[#seen + 1] = step
      return train.evaluate(model, data.Packed(source, { length = 16 }))
    end })
  check.equal(seen, { 30, 60 })
  local after = train.evaluate(model, data.Packed(source, { length = 16 }), { batch = 3 })
  check.ok(after.loss < 0.2, after.loss)
  local same = train.evaluate(model, data.Packed(source, { length = 16 }), { batch = 1 })
  check.close(same.loss, after.loss, 1e-5)
end)

check.test("the text that ships", function()
  local text = ty.data.kjv()
  check.equal({ #text, text:match "[^\n]+", select(2, text:gsub("\n\n", "")) }, { 494446, "Genesis 1", 116 })
end)

check.test("n-grams: probabilities sum to one, and repetition is cheap", function()
  local texts = { "\0abracadabra\0", "\0a bra and a cad\0", "\0abra\0" }
  for order = 1, 4 do
    local model = llm.ngram.train(texts, { order = order })
    for _, context in ipairs { "\0", "\0abr", "ra", "zz", "xab" } do
      local sum = 0.0
      for byte = 0, 255 do sum = sum + model:probability(context, string.char(byte)) end
      check.close(sum, 1, 1e-9, ("order %d behind %q"):format(order, context))
    end
  end
  local long = { "\0" .. ("the cat sat on the mat. "):rep(40) }
  local bits, symbols = llm.ngram.train(long, { order = 4 }):bits { "\0the cat sat on the mat. the cat" }
  check.equal(symbols, 31)
  check.ok(bits / symbols < 1, bits / symbols)
  local wide = llm.ngram.train({ (long[1]:gsub(".", "%0\1")) }, { order = 4, width = 2 })
  check.close(wide:bits { (("\0the cat sat"):gsub(".", "%0\1")) },
    llm.ngram.train(long, { order = 4 }):bits { "\0the cat sat" }, 1e-9)
end)

check.test("compressors: gzip alone or behind another text, the order of n-grams that is best", function()
  local before, text = ("the cat sat on the mat. "):rep(40), ("the cat sat on the mat, and "):rep(3)
  local path = os.tmpname()
  local behind, name = llm.compressors.gzip(path, before, text)
  local alone = llm.compressors.gzip(path, "", text)
  check.ok(behind > 0 and behind < alone, ("%d, %d"):format(behind, alone))
  check.ok(name:find "gzip %-9" or name:find "deflate", name)
  check.ok(not ty.io.exists(path) and not ty.io.exists(path .. ".gz"), "files are gone")
  local sets, tried = { training = { "\0" .. before }, held_out = { "\0the cat sat on the mat." } }, {}
  local bits, order = llm.compressors.best_ngram(sets, { orders = { 1, 2, 5 },
    each = function(n, of) tried[n] = of end })
  check.equal({ order, bits }, { 5, math.min(tried[1], tried[2], tried[5]) })
  check.close(tried[2], (llm.ngram.train(sets.training, { order = 2 }):bits(sets.held_out)), 1e-12)
  check.fails(function() llm.compressors.best_ngram(sets, { orders = { 0 } }) end, "orders: expected a list of")
end)

os.remove(scratch)
check.finish()
