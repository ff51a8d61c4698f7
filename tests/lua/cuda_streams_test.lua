-- Streams, events, page-locked memory and copies that nobody waits for. On the emulated device they run once more with
-- lazy streams: work is done at the latest moment that the rules allow, so that a forgotten wait gives wrong numbers.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local count, why = ty.cuda.count()

if count == 0 then
  check.test("without a GPU", function()
    check.fails(function() ty.cuda.Stream() end, why)
    check.fails(function() ty.cuda.Event() end, why)
    check.fails(function() ty.ones(3):pin_memory() end, "pin_memory: " .. why)
    check.equal(ty.ones(3):is_pinned(), false)
    check.equal(ty.memory.stats("pinned").live, 0)
  end)
  check.finish()
  return
end

local emulated = ty.cuda.describe():find "emulated" ~= nil
local lazy = os.getenv "TYCHO_EMULATED_STREAMS" == "lazy"
local n = 1000

local function gpu(x) return x:to "cuda" end
local function settle()
  collectgarbage()
  collectgarbage()
  ty.cuda.synchronize()
end

check.test("a stream is current inside its function only", function()
  local s = ty.cuda.Stream()
  local default = ty.cuda.default_stream()
  check.equal(ty.cuda.current_stream() == default, true)
  local a, b, c = ty.cuda.stream(s, function(...)
    check.equal(ty.cuda.current_stream() == s, true)
    check.equal(s == default, false)
    return ...
  end, 1, nil, 3)
  check.equal({ a, b == nil, c }, { 1, true, 3 })
  check.fails(function() ty.cuda.stream(s, function() error "inside" end) end, "inside")
  check.equal(ty.cuda.current_stream() == default, true)
  check.fails(function() ty.cuda.stream(1, print) end, "cuda.stream: argument 1: expected a cuda stream, got 1")
  check.fails(function() ty.cuda.stream(s) end, "cuda.stream: argument 2: expected a function, got nothing")
  check.fails(function() ty.cuda.Stream "cpu" end, "Stream: expected a GPU, got cpu")
  check.equal(tostring(default), "cuda stream 0 of cuda:0")
end)

check.test("streams wait for streams and for events", function()
  local s, t = ty.cuda.Stream(), ty.cuda.Stream()
  local x = gpu(ty.ones(n))
  ty.cuda.synchronize()
  local y = ty.cuda.stream(s, function() return (x * 3):add_(1) end)
  t:wait_stream(s)
  local z = ty.cuda.stream(t, function() return y * 2 end)
  local e = ty.cuda.stream(t, function() return ty.cuda.Event():record() end)
  e:wait()
  check.equal((z + 1):sum():item(), 9.0 * n)
  e = ty.cuda.Event()
  ty.cuda.default_stream():wait_event(e) -- never recorded: nothing to wait for
  e:wait()
  e:synchronize()
  check.equal(e:query(), true)
  e:record(s)
  check.equal(e:query() or e:query(), true)
  s:synchronize()
  check.equal(s:query(), true)
end)

check.test("events tell the time", function()
  local from, to = ty.cuda.Event { timing = true }, ty.cuda.Event { timing = true }
  check.fails(function() return from:elapsed_time(to) end, "event 1 was not recorded")
  from:record()
  local x = gpu(ty.ones(n)) + 1
  to:record()
  to:synchronize()
  local ms = from:elapsed_time(to)
  check.equal(ms >= 0 and ms < 60000, true)
  check.equal(to:elapsed_time(from) <= 0, true)
  check.fails(function() return from:elapsed_time(ty.cuda.Event():record()) end, "made without { timing = true }")
  check.equal(x:sum():item(), 2.0 * n)
end)

check.test("page-locked memory", function()
  local before = ty.memory.stats("pinned").live
  local x = ty.randn(40, 30):transpose(0, 1)
  local p = x:pin_memory()
  check.equal(p:is_pinned(), true)
  check.equal(x:is_pinned(), false)
  check.equal(tostring(p.device), "cpu")
  check.equal(p:tolist(), x:tolist())
  check.equal(p:pin_memory():is_pinned(), true)
  check.equal(p["3:5"]:is_pinned(), true)
  check.equal((p * 2):is_pinned(), false)
  check.equal(ty.memory.stats("pinned").live - before >= 4800, true)
  check.equal(ty.zeros(0):pin_memory():tolist(), {})
  check.fails(function() return gpu(x):pin_memory() end,
    "pin_memory: expected a tensor on the CPU, got [30, 40] f32 cuda:0")
  p:free()
  settle()
  check.equal(ty.memory.stats("pinned").live, before)
  ty.memory.empty_cache "pinned"
  ty.memory.set_budget("pinned", before + 1000)
  check.fails(function() return ty.zeros(1000):pin_memory() end, "out of memory on pinned: wanted 3.9 KiB")
  ty.memory.set_budget "pinned"
  ty.memory.reset_peak "pinned"
  ty.memory.empty_cache "pinned"
  check.equal(ty.memory.stats("pinned").cached, 0)
end)

check.test("copies that nobody waits for", function()
  local x = ty.randn(n)
  local p, expected = x:pin_memory(), x:tolist()
  local g = p:to("cuda", { non_blocking = true })
  check.equal(g:tolist(), expected)
  check.equal(p:to({ device = "cuda", non_blocking = true }):tolist(), expected)
  check.equal(x:to("cuda", { non_blocking = true }):tolist(), expected) -- waits: the memory is not page-locked
  -- freed at once: its memory goes to nobody before it is read
  for _ = 1, 5 do
    local q = ty.full({ n }, 5):pin_memory()
    local h = q:to("cuda", { non_blocking = true })
    q:free()
    local other = ty.full({ n }, 7):pin_memory()
    check.equal(h:sum():item(), 5.0 * n)
    other:free()
  end
  local back = ty.zeros(n):pin_memory()
  back:copy_(g * 2, true)
  ty.cuda.synchronize()
  check.equal(back:tolist(), (x * 2):tolist())
  back:copy_(g) -- waits
  check.equal(back:tolist(), expected)
  local half = ty.zeros(n, { dtype = "f16" }):pin_memory()
  half:copy_(g, { non_blocking = true })
  ty.cuda.synchronize()
  check.equal(half:tolist(), x:to("f16"):tolist())
  check.fails(function() return p:to("cuda", { nonblocking = true }) end, 'to: unknown option "nonblocking"')
  if emulated and lazy then -- it was not there before: the copy is asynchronous indeed
    back:fill_(0)
    back:copy_(g + 1, { non_blocking = true })
    check.equal(back:sum():item(), 0)
    p:copy_(x)
    g = p:to("cuda", { non_blocking = true })
    p:fill_(1)
    check.equal(g:sum():item(), n)
    ty.cuda.synchronize()
  end
end)

check.test("a DataLoader through page-locked memory", function()
  local data = ty.data.TensorDataset { x = ty.arange(40):reshape(10, 4), y = ty.arange(10) }
  local loader = ty.data.DataLoader(data, { batch_size = 5, device = "cuda", pin_memory = true })
  for batch in loader() do
    check.equal(tostring(batch.x.device), "cuda:0")
    check.equal((batch.x:sum { 1 } - batch.y * 16):tolist(), { 6, 6, 6, 6, 6 })
  end
  loader = ty.data.DataLoader(data, { batch_size = 5, pin_memory = true })
  check.equal(loader:next().y:is_pinned(), true)
end)

check.test("memory goes round in its stream, and to no other before it is done with", function()
  local s, x = ty.cuda.Stream(), gpu(ty.ones(n))
  ty.cuda.synchronize()
  settle()
  -- Used by a stream that it was not made on and freed before that has run.
  for _ = 1, 3 do
    local a = x * 2
    s:wait_stream(ty.cuda.default_stream())
    local b = ty.cuda.stream(s, function() return a + 1 end)
    a:record_stream(s)
    a:free()
    local c = x * 50 -- would take the block of a
    check.equal(c:sum():item(), 50.0 * n)
    s:synchronize()
    check.equal(b:sum():item(), 3.0 * n)
  end
  -- What a stream frees another does not get.
  local a = ty.cuda.stream(s, function() return x * 4 end)
  local b = ty.cuda.stream(s, function() return a + 1 end)
  a:free()
  local c = x * 6
  check.equal(c:sum():item(), 6.0 * n)
  s:synchronize()
  check.equal(b:sum():item(), 5.0 * n)
  check.fails(function() return ty.ones(3):record_stream(s) end, "expected a tensor on a GPU or in pinned memory")
  settle()
  ty.memory.empty_cache "cuda"
  check.equal(ty.memory.stats("cuda").cached, 0)
end)

check.test("libraries work on the current stream", function()
  local image, kernel = ty.randn(1, 2, 6, 6), ty.randn(3, 2, 3, 3)
  local left, right = ty.randn(4, 5), ty.randn(5, 3)
  local s = ty.cuda.Stream()
  local g = {}
  for i, t in ipairs { image, kernel, left, right } do g[i] = t:to "cuda" end
  ty.conv2d(g[1], g[2]) -- another stream is the first to have them
  g[3]:matmul(g[4])
  ty.cuda.synchronize()
  local conv, product = ty.cuda.stream(s, function() -- read there, too: nothing else is waited for
    return ty.conv2d(g[1], g[2]):to "cpu", g[3]:matmul(g[4]):to "cpu"
  end)
  check.close(conv:tolist(), ty.conv2d(image, kernel):tolist(), 1e-4)
  check.close(product:tolist(), left:matmul(right):tolist(), 1e-4)
end)

check.test("an index out of range on another stream is raised too", function()
  local s, x = ty.cuda.Stream(), gpu(ty.ones(4, 2))
  local bad = gpu(ty.tensor { 1, 9 })
  ty.cuda.synchronize()
  ty.cuda.stream(s, ty.index_select, x, 0, bad)
  check.fails(function() s:synchronize() end, "index 9 is out of range for size 4")
  ty.cuda.stream(s, ty.index_select, x, 0, bad)
  check.fails(ty.cuda.synchronize, "index 9 is out of range for size 4")
  ty.cuda.synchronize()
end)

check.test("compiled functions on several streams", function()
  local s, w = ty.cuda.Stream(), gpu(ty.ones(n))
  local f = ty.compile(function(x) return ((x + w) * 2):softmax(0):sum() + (x * w):sum() end)
  local inputs = {}
  for i = 1, 8 do inputs[i] = gpu(ty.full({ n }, i)) end
  ty.cuda.synchronize()
  local results = {}
  for i, x in ipairs(inputs) do
    if i % 2 == 0 then results[i] = ty.cuda.stream(s, f, x)
    else results[i] = f(x) end
  end
  ty.cuda.synchronize()
  for i, r in ipairs(results) do check.close(r:item(), 1 + i * n, 1e-4) end
  ty.cuda.stream(s, function() f(inputs[1]):free() end)
  ty.core.program.renew()
  f(inputs[1]) -- frees the program, which the other stream had last
  settle() -- frees the results
  local two = ty.compile(function(x) return ty.cuda.stream(s, function() return x + 1 end) end)
  two(inputs[1])
  check.fails(function() two(inputs[1]) end, "stream: a function of ty.compile runs on one stream")
end)

if count > 1 then
  check.test("from one GPU to the other, in order with both", function()
    local x = gpu(ty.ones(n))
    for i = 1, 4 do
      local y = x * i
      local z = y:to "cuda:1"
      y:free()
      x:add_(0)
      check.equal((z + 1):sum():item(), (i + 1.0) * n)
    end
  end)
end

if emulated and lazy then
  check.test("a planted fault is found: nobody waits for the stream", function()
    local s, x = ty.cuda.Stream(), gpu(ty.ones(n))
    ty.cuda.synchronize()
    local y = ty.zeros(n, { device = "cuda" })
    s:wait_stream(ty.cuda.default_stream())
    ty.cuda.stream(s, function() y:add_(x) end)
    check.equal(y:sum():item(), 0) -- with s:synchronize() before, n
    s:synchronize()
    check.equal(y:sum():item(), 1.0 * n)
    -- memory that a stream still uses, freed without record_stream
    local a = x * 2
    s:wait_stream(ty.cuda.default_stream())
    local b = ty.cuda.stream(s, function() return a + 1 end)
    a:free()
    local c = x * 50
    check.equal(c:sum():item(), 50.0 * n)
    s:synchronize()
    check.equal(b:sum():item(), 51.0 * n) -- instead of 3 n
  end)
end

check.finish()
