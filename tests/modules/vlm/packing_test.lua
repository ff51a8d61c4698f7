-- Sequences that share a row without seeing each other: what packing computes is what each of them gives by itself.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, vlm = require "tycho.models", require "tycho.vlm"
local packing = vlm.packing

local function model()
  ty.manual_seed(3)
  return models.Llava { image_token_index = 19, tie_word_embeddings = true, vision_feature_layer = -1,
    text_config = { model_type = "llama", vocab_size = 20, hidden_size = 16, intermediate_size = 32,
      num_hidden_layers = 2, num_attention_heads = 2, max_position_embeddings = 64, tie_word_embeddings = true },
    vision_config = { model_type = "clip_vision_model", image_size = 8, patch_size = 4, hidden_size = 8,
      intermediate_size = 16, num_hidden_layers = 2, num_attention_heads = 2 } }
end

local picture = { 19, 19, 19, 19 }
local function turn(...) -- the last two ids are learnt
  local ids, learnt = { ... }, {}
  for i = 1, #ids do learnt[i] = i > #ids - 2 end
  return { ids = ids, learnt = learnt }
end
local rows = {
  { shared = picture, turns = { turn(1, 2, 3, 4), turn(5, 6, 7), turn(8, 2, 9, 10, 11) } },
  { shared = picture, turns = { turn(12, 3, 4) } },
}

-- Sum of losses over all targets, and the gradients of all parameters.
local function run(m, fn)
  m:zero_grad()
  local loss = fn()
  loss:backward()
  local grads = {}
  for name, p in m:named_parameters() do grads[name] = p.grad and p.grad:clone() end
  return loss:item(), grads
end

local function alike(a, b, what)
  check.ok((a - b):abs():max():item() <= 1e-5 * math.max(1, b:abs():max():item()), what)
end

local function same(m, packed, apart)
  local loss, grads = run(m, packed)
  local expected, others = run(m, apart)
  check.close(loss, expected, 1e-5)
  local count = 0
  for name, g in pairs(others) do
    alike(grads[name], g, name)
    count = count + 1
  end
  check.ok(count > 20)
end

local function sum_of(logits, targets)
  return ty.nn.cross_entropy(logits:flatten(0, 1), targets:flatten(), { reduction = "sum" })
end

check.test("turns about one picture in a row: loss and gradients are those of each turn by itself", function()
  local m = model()
  ty.manual_seed(4)
  local pictures = ty.randn(2, 3, 8, 8)
  local batch = packing.turns(rows, 0)
  check.equal(batch.tokens.shape, { 2, 16 })
  check.equal(batch.at.shape[1], 8)
  same(m, function()
    return sum_of(m(batch.tokens, { pictures = pictures, mask = batch.options.mask,
      positions = batch.options.positions }), batch.targets)
  end, function()
    local total
    for i, row in ipairs(rows) do
      for _, one in ipairs(row.turns) do
        local ids, targets = table.move(picture, 1, 4, 1, {}), { -100, -100, -100, -100 }
        for j, id in ipairs(one.ids) do
          ids[#ids + 1] = id
          targets[#targets + 1] = one.learnt[j + 1] and one.ids[j + 1] or -100
        end
        local loss = sum_of(m(ty.tensor({ ids }, { dtype = "i64" }), { pictures = pictures:narrow(0, i - 1, 1) }),
          ty.tensor({ targets }, { dtype = "i64" }))
        total = total and total + loss or loss
      end
    end
    return total
  end)
end)

check.test("only the places that something is learnt at go through the head, which changes nothing", function()
  local m = model()
  ty.manual_seed(5)
  local pictures = ty.randn(2, 3, 8, 8)
  local batch = packing.turns(rows, 0)
  same(m, function() return vlm.Dialogue.loss(m, batch, { pictures = pictures }) end, function()
    return m:loss(batch.tokens, batch.targets, { pictures = pictures, mask = batch.options.mask,
      positions = batch.options.positions })
  end)
  -- Which turns are right is what the likeliest tokens say.
  local guess = ty.no_grad(function()
    return m(batch.tokens, { pictures = pictures, mask = batch.options.mask, positions = batch.options.positions })
  end):argmax(-1)
  local hit, want = guess:eq(batch.targets), { {}, {} }
  for i, row in ipairs(rows) do
    local at = 4
    for k, one in ipairs(row.turns) do
      local mine = hit:select(0, i - 1):narrow(0, at + #one.ids - 3, 2)
      want[i][k], at = mine:all():item() == true, at + #one.ids
    end
  end
  check.equal(vlm.Dialogue.right(m, batch, { pictures = pictures }), want)
end)

check.test("samples in a row of a fixed length: loss and gradients are those of each by itself", function()
  local m = model()
  ty.manual_seed(6)
  local pictures = ty.randn(3, 3, 8, 8)
  local sequences = {}
  for i, words in ipairs { { 1, 2, 3 }, { 4, 5 }, { 6, 7, 8, 9 } } do
    local one = { ids = table.move(picture, 1, 4, 1, {}), learnt = { false, false, false, false } }
    for _, id in ipairs(words) do one.ids[#one.ids + 1], one.learnt[#one.learnt + 1] = id, true end
    sequences[i] = one
  end
  local batch = packing.samples(sequences, 24, 0)
  check.equal(batch.tokens.shape, { 1, 24 })
  check.equal(batch.options.cu_seqlens:tolist(), { 0, 7, 13, 21, 24 })
  check.equal(batch.options.longest, 8)
  same(m, function()
    return sum_of(m(batch.tokens, { pictures = pictures, cu_seqlens = batch.options.cu_seqlens,
      longest = batch.options.longest }), batch.targets)
  end, function()
    local total
    for i, one in ipairs(sequences) do
      local alone = packing.samples { one }
      local loss = sum_of(m(alone.tokens, { pictures = pictures:narrow(0, i - 1, 1) }), alone.targets)
      total = total and total + loss or loss
    end
    return total
  end)
end)

check.test("first-fit decreasing: every sequence once, none too many in a row", function()
  check.equal(packing.fit({ 5, 7, 5, 2, 4, 2 }, 10), { { 2, 4 }, { 1, 3 }, { 5, 6 } })
  ty.manual_seed(7)
  local lengths, seen = ty.randint(1, 33, { 500 }):tolist(), {}
  for _, row in ipairs(packing.fit(lengths, 32)) do
    local sum = 0
    for _, i in ipairs(row) do
      check.ok(not seen[i])
      seen[i], sum = true, sum + lengths[i]
    end
    check.ok(sum <= 32)
  end
  check.equal(#seen, 500)
end)

check.test("first fit in the order given: rows are not sorted by length", function()
  check.equal(packing.fit({ 5, 7, 5, 2, 4, 2 }, 10, false), { { 1, 3 }, { 2, 4 }, { 5, 6 } })
  ty.manual_seed(7)
  local sequences = {}
  for i, n in ipairs(ty.randint(5, 36, { 400 }):tolist()) do
    sequences[i] = { ids = {}, learnt = {} }
    for k = 1, n do sequences[i].ids[k], sequences[i].learnt[k] = k % 19, true end
  end
  local spread = {}
  for _, decreasing in ipairs { true, false } do
    local loader, counts = packing.loader(sequences, { room = 512, decreasing = decreasing }), {}
    for k = 1, 20 do counts[k] = loader:next().sequences.shape[1] end
    check.ok(loader:padding() < 0.02)
    spread[decreasing] = ty.stats.spread(counts)
  end
  check.ok(spread[false] < 0.5 * spread[true])
end)

local function samples(count, most)
  local list = {}
  for i, words in ipairs(ty.randint(1, most, { count }):tolist()) do
    local one = { ids = table.move(picture, 1, 4, 1, {}), learnt = { false, false, false, false } }
    for k = 1, words do one.ids[4 + k], one.learnt[4 + k] = (i + k) % 19, true end
    list[i] = one
  end
  return list
end

check.test("packed and padded batches have the same loss and gradients, also of the learnt places alone", function()
  local m = model()
  ty.manual_seed(8)
  local pictures, sequences = ty.randn(5, 3, 8, 8), samples(5, 9)
  local packed, padded = packing.samples(sequences, 64, 0), packing.padded(sequences, 0)
  check.equal(packed.wanted:tolist(), padded.wanted:tolist())
  check.ok(padded.tokens.shape[2] * 5 > 40 and packed.at.shape[1] > 5)
  same(m, function() return vlm.Dialogue.loss(m, packed, { pictures = pictures }) end,
    function() return vlm.Dialogue.loss(m, padded, { pictures = pictures }) end)
  same(m, function() return vlm.Dialogue.loss(m, padded, { pictures = pictures }) end, function()
    return m:loss(padded.tokens, padded.targets, { pictures = pictures })
  end)
  same(m, function() return vlm.Dialogue.loss(m, packed, { pictures = pictures }) end, function()
    return m:loss(packed.tokens, packed.targets, { pictures = pictures, cu_seqlens = packed.options.cu_seqlens,
      longest = packed.options.longest })
  end)
end)

check.test("the loader's rows: every sequence as often as any other but for a round, and hardly any padding", function()
  ty.manual_seed(9)
  local sequences = samples(100, 20)
  local loader = packing.loader(sequences, { room = 128 })
  local seen, tokens = {}, 0
  for i = 1, 100 do seen[i] = 0 end
  for _ = 1, 60 do
    local batch = loader:next()
    check.equal(batch.tokens.shape, { 1, 128 })
    local at, cu = 0, batch.options.cu_seqlens:tolist()
    for k, i in ipairs(batch.sequences:tolist()) do
      local one = sequences[i + 1]
      seen[i + 1], tokens = seen[i + 1] + 1, tokens + #one.ids
      check.equal(batch.tokens:narrow(1, at, #one.ids):flatten():tolist(), one.ids)
      at = at + #one.ids
      check.equal(cu[k + 1], at)
    end
  end
  check.ok(math.max(table.unpack(seen)) - math.min(table.unpack(seen)) <= 2)
  check.equal(loader.used, tokens)
  check.close(loader:padding(), 1 - tokens / (60 * 128), 1e-12)
  check.ok(loader:padding() < 0.03)
  local padded = packing.loader(sequences, { batch = 10 })
  for i = 1, 100 do seen[i] = 0 end
  for _ = 1, 10 do
    for _, i in ipairs(padded:next().sequences:tolist()) do seen[i + 1] = seen[i + 1] + 1 end
  end
  for i = 1, 100 do check.equal(seen[i], 1) end
  check.ok(padded:padding() > 0.1)
end)

check.test("what cannot be packed is one clear error", function()
  check.fails(function() packing.fit({ 3, 11 }, 10) end, "vlm.packing.fit: lengths: expected at most the 10 tokens")
  check.fails(function() packing.turns({ { turns = {} } }, 0) end, "row 1: expected { shared = list")
  check.fails(function() packing.turns({ { shared = {}, turns = { { ids = { 1 } } } } }, 0) end, "turn 1 of row 1")
  check.fails(function() packing.samples({ turn(1, 2, 3) }, 2) end, "room: expected at least the 3 tokens")
  check.fails(function() packing.padded {} end, "sequences: expected at least one token, got none")
  check.fails(function() packing.loader({ turn(1, 2, 3) }, {}) end, "expected one of the options room and batch")
  check.fails(function() packing.loader({ turn(1, 2, 3) }, { room = 2 }) end, "sequence 1: expected between 1 and 2")
  local m = model()
  local batch = packing.turns(rows, 0)
  local pictures = ty.zeros(2, 3, 8, 8)
  check.fails(function() m(batch.tokens, { pictures = pictures, mask = batch.options.mask }) end,
    "Llama: positions: expected i64 [2, 16]")
  check.fails(function()
    m(batch.tokens, { pictures = pictures, mask = batch.options.mask:narrow(1, 0, 3),
      positions = batch.options.positions })
  end, "Llama: mask: expected bool")
end)

check.finish()
