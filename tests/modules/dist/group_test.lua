-- Ranks: collectives against what one rank computes, messages, groups, clocks, memory, and everything that goes wrong.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

local test, equal, near, fails = check.test, check.equal, check.close, check.fails

-- What each of n ranks has, by the generator of its number.
local function inputs(n, shape, dtype)
  local list = {}
  for rank = 1, n do
    ty.manual_seed(rank)
    local x = dtype:find "^[iu]" and ty.randint(0, 5, shape) or ty.randn(shape)
    list[rank] = x:to(dtype)
  end
  return list
end

local function stacked(list)
  local wide = {}
  for i, x in ipairs(list) do wide[i] = x:to "f64" end
  return ty.stack(wide, 0)
end

test("collectives of all dtypes are those of one rank over all inputs", function()
  for _, dtype in ipairs { "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8" } do
    local list = inputs(3, { 6, 5 }, dtype)
    local got = dist.run(3, function(group, mine)
      local x = mine[group.rank + 1]
      local out = { sum = group:all_reduce(x:clone()), max = group:all_reduce(x:clone(), "max"),
        min = group:all_reduce(x:clone(), "min"), prod = group:all_reduce(x:clone(), "prod"),
        gathered = group:all_gather(x), part = group:reduce_scatter(x),
        root = group:broadcast(x:clone(), 1), all = group:all_to_all(x) }
      if x.dtype:find "f" then out.mean = group:all_reduce(x:clone(), "mean") end
      return out
    end, nil, list)
    local all = stacked(list)
    local tolerance = ({ f64 = 1e-14, f32 = 1e-6, f16 = 4e-3, bf16 = 3e-2 })[dtype] or 0
    local sum = all:sum(0)
    for rank = 1, 3 do
      local out = got[rank]
      local function same(name, want)
        near(out[name]:to("f64"):tolist(), want:tolist(), tolerance * (1 + want:abs():max():item()),
          ("%s of %s on rank %d"):format(name, dtype, rank - 1))
        equal(out[name].dtype, dtype)
      end
      same("sum", sum)
      same("max", all:amax(0))
      same("min", all:amin(0))
      same("prod", all:prod(0))
      same("gathered", all:reshape(18, 5))
      same("part", sum:narrow(0, 2 * (rank - 1), 2))
      same("root", all[1])
      same("all", all:narrow(1, 2 * (rank - 1), 2):reshape(6, 5))
      if out.mean then same("mean", all:mean(0)) end
      for name in pairs(out) do equal(out[name]:is_contiguous(), true) end
    end
    -- The same bits everywhere.
    for rank = 2, 3 do equal(got[rank].sum:to("f64"):tolist(), got[1].sum:to("f64"):tolist()) end
  end
end)

test("other dimensions, tensors that are not contiguous, of more pieces than one, empty and of one number", function()
  local got = dist.run(2, function(group)
    local x = (ty.arange(24) + 100 * group.rank):reshape(4, 6)
    local t = x:t()
    group:all_reduce(t)
    local big = ty.ones(5000) * (group.rank + 1)
    return { columns = group:all_gather(x:narrow(1, 0, 2), { dim = 1 }), x = x,
      part = group:reduce_scatter(x, "sum", { dim = 1 }),
      exchanged = group:all_to_all(ty.arange(4):reshape(1, 4) + 10 * group.rank, { dim = -1 }),
      big = group:all_reduce(big), empty = group:all_reduce(ty.empty(0)), one = group:all_reduce(ty.tensor(2.5)),
      each = group:all_gather(ty.tensor(group.rank)) }
  end)
  local a = ty.arange(24):reshape(4, 6)
  local both = 2 * a + 100
  equal(got[1].x:tolist(), both:tolist(), "through a view")
  equal(got[2].columns:tolist(), ty.concat({ both:narrow(1, 0, 2), both:narrow(1, 0, 2) }, 1):tolist())
  equal(got[2].part:tolist(), (2 * both):narrow(1, 3, 3):contiguous():tolist())
  equal(got[1].exchanged:tolist(), { { 0, 1, 10, 11 } })
  equal(got[2].exchanged:tolist(), { { 2, 3, 12, 13 } })
  equal({ got[1].big:min():item(), got[1].big:max():item() }, { 3, 3 })
  equal(got[1].empty:numel(), 0)
  equal(got[2].one:item(), 5)
  equal(got[2].each:tolist(), { 0, 1 })
end)

test("results that come to memory of the caller's, the rank's own part of it among them", function()
  local got = dist.run(3, function(group)
    local x, whole, part = ty.arange(6):to "bf16" + group.rank, ty.zeros(6):to "bf16", ty.zeros(2):to "bf16"
    local same = rawequal(group:reduce_scatter(x, "mean", { out = part }), part)
    whole:narrow(0, 2 * group.rank, 2):copy_(part)
    local work = group:all_gather(whole:narrow(0, 2 * group.rank, 2), { out = whole, async = true })
    return { same and rawequal(work:wait(), whole), whole:to("f32"):tolist() }
  end)
  for rank = 1, 3 do equal(got[rank], { true, { 1, 2, 3, 4, 5, 6 } }) end
  local function one(fn) return function() dist.run(1, fn) end end
  fails(one(function(g) g:all_gather(ty.ones(2), { out = ty.ones(3) }) end), "out: expected 2 elements of f32")
  fails(one(function(g) g:reduce_scatter(ty.ones(2), "sum", { out = ty.ones(2):to "f64" }) end),
    "contiguous and for dimension 0, got a tensor [2]")
  fails(one(function(g) g:all_gather(ty.ones(2), { out = 3 }) end), "out: expected a tensor, got 3")
end)

test("several collectives at once, waited for in another order, and steps by others between", function()
  local got = dist.run(3, function(group)
    local a, b, c = ty.tensor { group.rank }, ty.tensor { 10 * group.rank }, ty.tensor { group.rank }
    local first = group:all_reduce(a, "sum", { async = true })
    local second = group:all_gather(b, { async = true })
    group:all_reduce(c, "max")
    local gathered = second:wait():tolist()
    return { first:wait():tolist(), gathered, c:tolist(), first:wait():tolist() }
  end)
  for rank = 1, 3 do equal(got[rank], { { 3 }, { 0, 10, 20 }, { 2 }, { 3 } }) end
end)

test("messages keep their order, by tag, and may be sent before they are asked for", function()
  local got = dist.run(2, function(group)
    if group.rank == 0 then
      local x = ty.tensor { 1.0 }
      group:send(x, 1)
      x:fill_(2)
      group:send(x, 1, 7)
      group:send(ty.tensor({ { 3, 4 } }, { dtype = "i16" }), 1)
      group:send(ty.empty(0, 2), 1)
      return group:receive(1):tolist()
    end
    local tagged, first, second, empty = group:receive(0, 7), group:receive(0), group:receive(0), group:receive(0)
    group:send(tagged + first, 0)
    return { tagged:item(), first:item(), second:tolist(), second.dtype, empty.shape }
  end)
  equal(got, { { 3 }, { 2, 1, { { 3, 4 } }, "i16", { 0, 2 } } })
end)

test("groups of ranks, in the order of their keys, and ranks that are in none", function()
  local got = dist.run(5, function(group)
    local odd = group:split(group.rank % 2, -group.rank)
    local few = group:split(group.rank < 2 and 3 or -1)
    local inner = odd.size > 2 and odd:split(0)
    return { odd.rank, odd.size, odd.members, odd:all_gather(ty.tensor(group.rank)):tolist(), few and few.size or 0,
      inner and inner:all_reduce(ty.tensor { 1 }):item() or 0 }
  end)
  equal(got[1], { 2, 3, { 4, 2, 0 }, { 4, 2, 0 }, 2, 3 })
  equal(got[2], { 1, 2, { 3, 1 }, { 3, 1 }, 2, 0 })
  equal(got[5], { 0, 3, { 4, 2, 0 }, { 4, 2, 0 }, 0, 3 })
end)

test("clocks: what others are waited for, what messages take, and what is hidden behind work", function()
  local got = dist.run(2, function(group)
    local x = ty.ones(1000)
    group:advance(group.rank)
    group:all_reduce(x) -- 1 s of waiting; 2 * 0.1 s of latency; 4,000 bytes, each way half of them, at 40,000 a second
    local reduced = group:clock()
    local work = group:all_reduce(x, "sum", { async = true })
    group:advance(2)
    work:wait()
    local hidden = group:clock() - reduced
    if group.rank == 0 then group:send(x, 1) else group:receive(0) end
    return { reduced, hidden, group:clock() - reduced - hidden }
  end, { latency = 0.1, bandwidth = 40000 })
  for rank = 1, 2 do
    near(got[rank][1], 1.3, 0.1, "slower rank, latency and bytes")
    near(got[rank][2], 2, 0.1, "hidden")
  end
  near(got[1][3], 0, 0.1)
  near(got[2][3], 0.2, 0.1)
end)

test("traffic, and what of it leaves a machine", function()
  local got = dist.run(4, function(group)
    group:all_reduce(ty.ones(100))
    group:all_gather(ty.ones(25))
    group:all_to_all(ty.ones(100))
    local within = group:split(group.rank // 2)
    within:all_reduce(ty.ones(100))
    if group.rank == 3 then group:send(ty.ones(10), 0) elseif group.rank == 0 then group:receive(3) end
    return { group:traffic(), within:traffic() }
  end, { per_node = 2 })
  local t = got[2][1]
  equal({ t.sent.all_reduce, t.sent.all_gather, t.sent.all_to_all, t.calls.all_reduce }, { 600, 300, 300, 1 })
  equal(t.crossed, 600 + 300 + 200)
  equal(got[1][1].crossed, 200, "the next of rank 0 is on its machine")
  equal({ got[1][2].bytes, got[1][2].crossed }, { 400, 0 })
  equal({ got[4][1].sent.send, got[4][1].bytes, got[4][1].crossed }, { 40, 1240, 1140 })
end)

test("events, and spans of them", function()
  local got = dist.run(2, function(group)
    local events = group:record()
    group:split(0):all_reduce(ty.ones(4))
    local a, b = group:span("compute", function(x) group:advance(1) return x, 2 end, 1)
    local names = {}
    for i, event in ipairs(events) do names[i] = event.name end
    return { names, events[2].to - events[2].from, events[1].bytes, a, b }
  end)
  near(got[1][2], 1, 0.01)
  got[1][2] = 0
  equal(got[1], { { "all_reduce", "compute" }, 0, 16, 1, 2 })
end)

test("what a collective was on its way beside", function()
  local got = dist.run(2, function(group)
    local events = group:record()
    local work = group:all_reduce(ty.ones(4), "sum", { async = true })
    group:span("compute", function() group:advance(0.5) end)
    work:wait()
    local span, reduce = events[1], events[2]
    return { span.begun == nil, span.from - reduce.begun, reduce.from - span.to, reduce.to - reduce.begun }
  end, { latency = 0.4 }) -- two messages of a ring
  equal(got[1][1], true)
  near({ got[1][2], got[1][3], got[1][4] }, { 0, 0, 0.8 }, 0.02)
end)

test("collectives are observed when they begin, also those that never end, and when they are over", function()
  local seen = ty.zeros({ 2, 4 }, { dtype = "f64" })
  local got = dist.run(2, function(group)
    local list = {}
    group:observe(function(number, name, clock, over) list[#list + 1] = { number, name, clock, over } end)
    local work = group:all_reduce(ty.ones(1), "sum", { async = true })
    group:barrier()
    group:split(0):barrier() -- of another group: not seen
    group:advance(1)
    work:wait()
    return list
  end)
  for rank = 1, 2 do
    for i, want in ipairs { { 1, "all_reduce", false }, { 2, "barrier", false }, { 2, "barrier", true },
      { 1, "all_reduce", true } } do
      local number, name, clock, over = table.unpack(got[rank][i])
      equal({ number, name, over }, want)
      near(clock, i == 4 and 1 or 0, 0.1)
    end
  end
  fails(function()
    dist.run(2, function(group, board)
      group:observe(function(number) board[group.rank][number - 1]:fill_(1) end)
      group:barrier()
      if group.rank == 0 then group:barrier() end
    end, nil, seen)
  end, "rank 1 has ended")
  equal(seen:tolist(), { { 1, 1, 0, 0 }, { 1, 0, 0, 0 } })
end)

test("a rank has a limit of memory of its own", function()
  local got = dist.run(2, function(group)
    group:reset_memory()
    local before = group:memory()
    local x = ty.ones(1000, 100)
    local _, peak = group:memory()
    local fine, problem = pcall(ty.ones, 4000, 100)
    if group.rank == 0 then group:send(x, 1) else x = group:receive(0) end
    return { peak - before, fine, tostring(problem), x:sum():item() }
  end, { memory = 1400000 })
  for rank = 1, 2 do
    equal({ got[rank][1] >= 400000, got[rank][2], got[rank][4] }, { true, false, 100000 })
    equal(got[rank][3]:find("1600000 bytes more are beyond the 1400000", 1, true) ~= nil, true, got[rank][3])
  end
  fails(function() dist.run(1, function() return ty.ones(1000) end, { memory = 1000 }) end, "beyond the 1000")
end)

test("numbers do not depend on the other ranks: each has its own generator", function()
  local got = dist.run(3, function() return ty.randn(3):tolist() end, { seed = 5 })
  ty.manual_seed(5)
  local want = ty.randn(3):tolist()
  for rank = 1, 3 do equal(got[rank], want) end
end)

test("collectives with a history", function()
  local n = 2
  local got = dist.run(n, function(group)
    local x = (ty.arange(4):to "f64" + group.rank):requires_grad_()
    local w = ty.arange(4):to "f64" * (group.rank + 1) + 1
    local function gradient(y, weight)
      x:set_grad(nil);
      (y * weight):sum():backward()
      return x.grad:tolist()
    end
    local whole = ty.arange(8):to "f64" + 1
    return {
      copied = gradient(dist.copied(group, x), w), summed = gradient(dist.summed(group, x), w),
      gathered = gradient(dist.gathered(group, x), whole),
      scattered = gradient(dist.scattered(group, x), w:narrow(0, 0, 2)),
      apart = gradient(dist.gathered_apart(group, x), whole * (group.rank + 1)),
      sum_scattered = gradient(dist.sum_scattered(group, x), w:narrow(0, 0, 2)),
      exchanged = gradient(dist.exchanged(group, x), w),
    }
  end)
  local w = { { 1, 2, 3, 4 }, { 1, 3, 5, 7 } }
  for rank = 1, n do
    local out = got[rank]
    equal(out.copied, { 2, 5, 8, 11 })
    equal(out.summed, w[rank])
    equal(out.gathered, rank == 1 and { 1, 2, 3, 4 } or { 5, 6, 7, 8 })
    equal(out.scattered, { 1, 2, 1, 3 })
    equal(out.apart, rank == 1 and { 3, 6, 9, 12 } or { 15, 18, 21, 24 })
    equal(out.sum_scattered, { 1, 2, 1, 3 })
    equal(out.exchanged, rank == 1 and { 1, 2, 1, 3 } or { 3, 4, 5, 7 })
  end
end)

test("gradients in buckets are the mean over ranks", function()
  local got = dist.run(3, function(group)
    ty.manual_seed(1)
    local model = ty.nn.Sequential(ty.nn.Linear(5, 7), ty.nn.Linear(7, 2))
    local unused = ty.zeros(3):requires_grad_()
    local list = model:parameters()
    list[#list + 1] = unused
    local buckets = dist.buckets(list, { bytes = 100, multiple = 4 })
    local x = (ty.arange(30):reshape(6, 5) / 10):sin():narrow(0, 2 * group.rank, 2)
    model(x):square():mean():backward()
    buckets:mean_gradients(group)
    local out = { count = #buckets.buckets }
    for i, p in ipairs(list) do out[i] = p.grad:tolist() end
    return out
  end)
  ty.manual_seed(1)
  local model = ty.nn.Sequential(ty.nn.Linear(5, 7), ty.nn.Linear(7, 2))
  model((ty.arange(30):reshape(6, 5) / 10):sin()):square():mean():backward()
  equal(got[1].count > 1, true)
  for rank = 1, 3 do
    for i, p in ipairs(model:parameters()) do near(got[rank][i], p.grad:tolist(), 1e-6) end
    equal(got[rank][5], { 0, 0, 0 })
  end
end)

test("an error of one rank ends all", function()
  fails(function()
    dist.run(3, function(group)
      if group.rank == 1 then error "too bad" end
      group:barrier()
    end)
  end, "rank 1: ")
  fails(function()
    dist.run(2, function(group)
      if group.rank == 1 then error {} end
      group:barrier()
    end)
  end, "rank 1: table")
end)

test("what cannot go to ranks or come from them", function()
  local co = coroutine.create(print)
  fails(function() dist.run(2, function() return co end) end,
    "dist.run: fn and its arguments: a function cannot be sent: its upvalue 'co' is a thread")
  fails(function() dist.run(2, function(g) return g end) end,
    "dist.run: what fn returns on rank 0: a userdata cannot be sent to a thread")
end)

test("what no rank can get out of", function()
  fails(function() dist.run(3, function(g) if g.rank ~= 1 then g:barrier() end end) end,
    "no rank can go on: rank 0 waits in barrier, rank 1 has ended, rank 2 waits in barrier")
  fails(function() dist.run(2, function(g) g:receive(1 - g.rank) end) end, "rank 0 waits for a message of rank 1")
  fails(function() dist.run(2, function(g) g:all_reduce(ty.ones(g.rank + 1)) end) end, "called all_reduce of [")
  fails(function() dist.run(2, function(g) g:broadcast(ty.ones(1), g.rank) end) end, "with another root")
  fails(function() dist.run(2, function(g) g:all_reduce(ty.ones(1), g.rank == 0 and "sum" or "max") end) end,
    "with another reduction")
  fails(function() dist.run(2, function(g) if g.rank == 0 then g:barrier() else g:all_gather(ty.ones(1)) end end) end,
    "called")
  fails(function() dist.run(2, function(g)
    if g.rank == 0 then g:all_reduce(ty.ones(1), "sum", { async = true }) return end
    g:receive(0)
  end) end, "")
end)

test("arguments", function()
  local function alone(fn, text) fails(function() dist.run(1, fn) end, text) end
  alone(function(g) g:all_reduce(3) end, "RankGroup:all_reduce: x: expected a tensor, got 3")
  alone(function(g) g:all_reduce(ty.ones(1), "add") end, "reduction: expected")
  alone(function(g) g:all_reduce(ty.ones(1):bool()) end, "got bool")
  alone(function(g) g:all_reduce(ty.tensor({ 1 }, { dtype = "i32" }), "mean") end,
    "mean: expected floating point, got i32")
  alone(function(g) g:send(ty.ones(1), 1) end, "RankGroup:send: expected a rank of 0 to 0, got 1")
  alone(function(g) g:receive(-1) end, "RankGroup:receive: expected a rank")
  alone(function(g) g:broadcast(ty.ones(1), 4) end, "broadcast: root: expected a rank of 0 to 0, got 4")
  alone(function(g) g:all_gather(ty.ones(2), { dim = 1 }) end, "dim: expected one of the 1 dimensions")
  alone(function(g) g:observe(1) end, "RankGroup:observe: fn: expected a function, got 1")
  alone(function(g) g:advance(-1) end, "seconds: expected a finite number >= 0")
  alone(function(g) g.barrier(3) end, "expected a group, got 3")
  fails(function() dist.run(2, function(g) g:reduce_scatter(ty.ones(3)) end) end, "expected a multiple of 2")
  fails(function() dist.run(0, print) end, "dist.run: ranks: expected an integer >= 1, got 0")
  fails(function() dist.run(2000, print) end, "expected at most 1024")
  fails(function() dist.run(2, 3) end, "dist.run: fn: expected a function")
  fails(function() dist.run(2, function() end, { latency = -1 }) end, "latency: expected")
  fails(function() dist.run(2, function() end, { within = { speed = 1 } }) end, "speed")
  fails(function() dist.copied(3, ty.ones(1)) end, "dist.copied: group: expected a group, got 3")
  fails(function() dist.buckets {} end, "at least one")
end)

test("many runs leave nothing behind", function()
  collectgarbage()
  local before = ty.memory.stats().live
  for _ = 1, 20 do
    dist.run(3, function(group) return group:all_reduce(ty.ones(100000)):sum():item() end)
    pcall(dist.run, 3, function(group)
      group:all_reduce(ty.ones(100000), "sum", { async = true })
      if group.rank == 2 then error "x" end
      group:barrier()
    end)
  end
  collectgarbage()
  equal(ty.memory.stats().live - before < 300000, true)
end)

check.finish()
