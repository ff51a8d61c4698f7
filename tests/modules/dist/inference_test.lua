-- Engines of ranks: what they compute is what one model does, whatever their stages, tensor parallel ranks, padding and
-- peers; in which order batches go; clocks; layers at peers; errors; ranks that stay.
local here = (arg and arg[0]:match ".*/" or "tests/modules/dist/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

local test, equal, near, fails = check.test, check.equal, check.close, check.fails

local config = { vocab_size = 40, hidden_size = 32, num_hidden_layers = 6, intermediate_size = 48,
  num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 32, tie_word_embeddings = true }
local function make()
  local t = require "tycho"
  t.manual_seed(7)
  return require "tycho.models".Llama(config):to "f64"
end

local batches, tokens = {}, 0
ty.manual_seed(2)
for b = 1, 4 do
  batches[b] = {}
  for i = 1, 3 do
    local n = 1 + (5 * b + 7 * i) % 13
    batches[b][i], tokens = ty.randint(0, 40, { n }), tokens + n
  end
end

-- Another implementation of the same: one sequence at a time, by hand.
local function by_hand(model, x)
  local function norm(h, weight) return h / (h:square():mean({ 1 }, true) + 1e-6):sqrt() * weight end
  local function turn(h, position) -- [heads, t, d]
    local half = h.shape[3] // 2
    local angle = position:unsqueeze(1) * (1e4 ^ (-ty.arange(half, { dtype = "f64" }) / half)):unsqueeze(0)
    local a, b = h:narrow(2, 0, half), h:narrow(2, half, half)
    return ty.concat({ a * angle:cos() - b * angle:sin(), b * angle:cos() + a * angle:sin() }, 2)
  end
  local t = x.shape[1]
  local position = ty.arange(t, { dtype = "f64" })
  local h = model.model.embed_tokens.weight:index_select(0, x)
  local hidden = ty.arange(t):unsqueeze(0):gt(ty.arange(t):unsqueeze(1))
  for _, layer in ipairs(model.model.layers) do
    local function heads(y) return y:reshape(t, 4, 8):transpose(0, 1) end
    local a = norm(h, layer.input_layernorm.weight)
    local at = layer.self_attn
    local q = turn(heads(a:matmul(at.q_proj.weight:t())), position)
    local k = turn(heads(a:matmul(at.k_proj.weight:t())), position)
    local scores = (q:matmul(k:transpose(1, 2)) / 8 ^ 0.5):masked_fill(hidden, -1e30):softmax(-1)
    local mixed = scores:matmul(heads(a:matmul(at.v_proj.weight:t()))):transpose(0, 1):reshape(t, 32)
    h = h + mixed:matmul(at.o_proj.weight:t())
    local m = norm(h, layer.post_attention_layernorm.weight)
    local gate = m:matmul(layer.mlp.gate_proj.weight:t())
    h = h + (gate * gate:sigmoid() * m:matmul(layer.mlp.up_proj.weight:t())):matmul(layer.mlp.down_proj.weight:t())
  end
  return norm(h, model.model.norm.weight):matmul(model.model.embed_tokens.weight:t())
end

local want = {}
ty.no_grad(function()
  local model = make()
  for b, batch in ipairs(batches) do
    want[b] = {}
    for i, x in ipairs(batch) do want[b][i] = by_hand(model, x) end
  end
end)
local bytes = 8 * (40 * 32 + 32 + 6 * (2 * 32 + 4 * 32 * 32 + 3 * 32 * 48)) -- of the weights
local layer = (bytes - 8 * (40 * 32 + 32)) // 6

test("all engines compute what one model does by hand, and nothing for padding", function()
  for _, o in ipairs { {}, { pipeline = 4 }, { tensor = 2, last = false }, { tensor = 2, pipeline = 2 },
    { pipeline = 2, packed = false }, { packed = false, last = false }, { peers = 1, room = 4 * layer },
    { tensor = 2, pipeline = 2, peers = 2, room = 5 * layer // 4 + 11000, last = false },
    { pipeline = 2, peers = 1, room = 5 * layer // 2 + 11000, prefetch = false } } do
    local engine <close> = dist.inference(make, o)
    local coming, label = {}, ("tensor %s, pipeline %s, packed %s, peers %s"):format(o.tensor, o.pipeline, o.packed,
      o.peers)
    for b, batch in ipairs(batches) do coming[b] = engine(batch) end
    for _, b in ipairs { 3, 1, 4, 2 } do -- in any order
      local got = coming[b]:wait()
      equal(coming[b]:wait() == got, true)
      for i, logits in ipairs(want[b]) do
        if o.last == false then
          near(got[i]:tolist(), logits:tolist(), 1e-6, label) -- turns of positions are f32
        else
          near(got[i - 1]:tolist(), logits[-1]:tolist(), 1e-6, label)
        end
      end
    end
    local stages, size, filled = o.pipeline or 1, o.tensor or 1, 0
    for _, batch in ipairs(batches) do
      local most = 0
      for _, x in ipairs(batch) do most = math.max(most, x.shape[1]) end
      filled = filled + 3 * most
    end
    local rows, away, moved = 0, 0, 0
    for rank, s in ipairs(engine:stats()) do
      if rank <= stages * size then rows, away, moved = rows + s.rows, away + s.away, moved + s.moved end
    end
    equal(rows, 6 * size * (o.packed == false and filled or tokens), label)
    equal(away > 0, o.peers ~= nil, label)
    if o.peers then equal(moved >= 4 * layer // size, true, label) end
  end
end)

test("stages do not wait: the clocks of batches that follow each other, and of one at a time", function()
  -- Each layer keeps its rank busy for 10 ms.
  local function slow()
    local model = make()
    local group = require "tycho.dist.group"
    for _, l in ipairs(model.model.layers) do
      l:register_forward_pre_hook(function() group.current:advance(0.01) end)
    end
    return model
  end
  -- The hooks need the rank's group, which make() is not given.
  local function serving(options)
    local function with_group()
      local Group = require "tycho.dist.group"
      if not Group.patched then
        local barrier = Group.barrier
        Group.patched = true
        function Group.barrier(self, ...)
          Group.current = self
          return barrier(self, ...)
        end
      end
      return slow()
    end
    return dist.inference(with_group, options)
  end
  local costs = { 0, 1, 1, 1, 1, 1, 1, 0 }
  for _, alone in ipairs { false, true } do
    local engine <close> = serving { pipeline = 6, costs = costs, record = true }
    engine:restart()
    local coming, at = {}, {}
    for b = 1, 8 do
      coming[b] = engine(batches[(b - 1) % 4 + 1])
      if alone then coming[b]:wait() end
    end
    for b = 1, 8 do
      coming[b]:wait()
      at[b] = coming[b].seconds
    end
    for b = 1, 8 do near(at[b], alone and 0.06 * b or 0.05 + 0.01 * b, 0.02) end
    near(engine.clock, at[8], 1e-9)
    local events = engine:events()
    equal(#events, 6)
    for stage, row in ipairs(events) do
      local number = 0
      for _, e in ipairs(row) do
        if e.name:find "^forward" then
          number = number + 1
          equal(e.name, "forward " .. number, "batches go in order at stage " .. stage)
        end
      end
      equal(number, 8)
    end
    engine:restart()
    equal(engine.clock, 0)
    engine(batches[1]):wait()
    check.ok(engine.clock < 0.1)
  end
end)

test("layers that go away: as few as can be, spread evenly", function()
  local choose = dist.peer_memory.choose
  local sizes, movable = { 5, 10, 10, 10, 10, 5 }, { false, true, true, true, true, false }
  equal(choose(sizes, movable, 50), {})
  equal(choose(sizes, movable, 49), { 2, 3, 5 }) -- one or two away need as much room as they leave
  equal(choose(sizes, movable, 40), { 2, 3, 5 })
  equal(choose(sizes, movable, 39), { 2, 3, 4, 5 })
  fails(function() choose(sizes, movable, 29) end, "room: 29 bytes are too few for layers of 50 bytes")
  local twelve, may = {}, {}
  for i = 1, 12 do twelve[i], may[i] = 1, true end
  equal(choose(twelve, may, 10), { 3, 6, 9, 12 })
end)

test("a rank without memory for all layers computes with some at a peer", function()
  -- Wider, so that weights are most of the memory.
  local function wide()
    local t = require "tycho"
    t.manual_seed(7)
    return require "tycho.models".Llama { vocab_size = 40, hidden_size = 128, num_hidden_layers = 8,
      intermediate_size = 256, num_attention_heads = 4, max_position_embeddings = 32, tie_word_embeddings = true }
  end
  local whole = 4 * (40 * 128 + 128 + 8 * (2 * 128 + 4 * 128 * 128 + 3 * 128 * 256))
  local sequences = { ty.arange(12, { dtype = "i64" }), ty.arange(5, { dtype = "i64" }) }
  local function with(o)
    o.memory = whole * 3 // 4
    local engine <close> = dist.inference(wide, o)
    return engine(sequences):wait(), engine:stats()
  end
  fails(function() with {} end, "memory")
  local got, stats = with { peers = 1, room = whole // 2 }
  local model = wide():eval()
  ty.no_grad(function()
    for i, x in ipairs(sequences) do
      near(got[i - 1]:tolist(), model(x:unsqueeze(0)):select(0, 0)[-1]:tolist(), 1e-5)
    end
  end)
  check.ok(stats[1].live <= whole // 2 and stats[1].peak <= whole * 3 // 4)
end)

test("ranks that stay do what they are asked, in order; an error of one ends all", function()
  local ranks = dist.open(2, function(group, factor)
    return function(x, wrong)
      if wrong then error "this was wrong" end
      return group:all_reduce(x * factor), group.rank
    end
  end, nil, 3)
  for rank = 0, 1 do
    ranks:send(rank, ty.full({ 2 }, rank + 1))
    ranks:send(rank, ty.full({ 2 }, 10))
  end
  for rank = 0, 1 do
    local x, who = ranks:receive(rank)
    equal({ x:tolist(), who }, { { 9, 9 }, rank })
  end
  equal(ranks:receive(1):tolist(), { 60, 60 })
  equal(ranks:receive(0):tolist(), { 60, 60 })
  ranks:send(0, ty.ones(2))
  ranks:send(1, ty.ones(2), true)
  fails(function() ranks:receive(0) end, "rank 1: ")
  fails(function() ranks:receive(1) end, "this was wrong")
  ranks:send(0, ty.ones(2))
  fails(function() ranks:receive(0) end, "rank 1: ")
  ranks:close()
  ranks:close()
  fails(function() ranks:send(0) end, "they were closed")
  local never = dist.open(2, function() error "no ranks today" end)
  never:send(0)
  fails(function() never:receive(0) end, "no ranks today")
  never:close()
end)

test("arguments", function()
  fails(function() dist.inference(3) end, "make: expected a function, got 3")
  fails(function() dist.inference(make, { stages = 3 }) end, "no option 'stages'")
  fails(function() dist.inference(make, { room = 3 }) end, "room: expected peers with it, got none")
  fails(function() dist.open(0, make) end, "ranks: expected an integer >= 1, got 0")
  local engine = dist.inference(make)
  fails(function() engine {} end, "batch: expected at least one sequence, got none")
  fails(function() engine { { 1, 2 }, ty.ones(3) } end, "sequence 2: expected i64 [length]")
  equal(engine({ { 1, 2 }, { 3 } }):wait().shape, { 2, 40 })
  local future = engine { { 1, 2 } }
  engine:close()
  fails(function() future:wait() end, "the engine was closed")
  fails(function() engine { { 1 } } end, "the engine was closed")
  local broken <close> = dist.inference(make, { pipeline = 9 })
  fails(function() broken({ { 1 } }):wait() end, "costs: expected at least 9 layers")
  local beyond <close> = dist.inference(make, { pipeline = 2 })
  fails(function() beyond({ { 1, 400 } }):wait() end, "dist.open: ")
end)

check.finish()
