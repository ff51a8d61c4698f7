-- Who owns what, and that memory stays bounded: scopes, <close>, the collector, budgets, failing allocations.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"

local function collect()
  collectgarbage()
  collectgarbage()
end

local function live()
  collect()
  return ty.memory.stats("cpu").live
end

local function now() return ty.memory.stats("cpu").live end

-- Resident bytes of this process; nil where /proc is not, and under sanitizers, which hold back what was freed.
local function resident()
  local f = not os.getenv "UBSAN_OPTIONS" and io.open("/proc/self/status")
  if not f then return nil end
  local kb = f:read("a"):match("VmRSS:%s*(%d+)")
  f:close()
  return tonumber(kb) * 1024
end

local MB = 1 << 20

-- ---- scopes ----

check.test("a scope releases what was made in it", function()
  local before = live()
  ty.scope(function()
    local x = ty.ones(1000)
    for _ = 1, 10 do x = x + 1 end
    check.ok(now() > before, "tensors live in the scope")
  end)
  check.equal(now(), before, "without the collector")
end)

check.test("results of a scope live on, also in tables", function()
  local before = live()
  local a, t = ty.scope(function()
    local x = ty.ones(100)
    local gone = x * 2
    return x + gone, { list = { x * 3 }, n = 5 }
  end)
  check.close(a[0]:item(), 3)
  check.close(t.list[1][0]:item(), 3)
  check.equal(t.n, 5)
  a, t = nil, nil
  check.equal(live(), before)
  check.equal({ a, t }, {})
end)

check.test("keep takes a tensor out of its scope", function()
  local kept, lost
  ty.scope(function()
    kept = ty.keep(ty.ones(2) * 4)
    lost = ty.ones(2)
  end)
  check.equal(kept:tolist(), { 4.0, 4.0 })
  check.fails(function() return lost + 1 end, "released")
end)

check.test("nested scopes: results move out by one", function()
  local outer
  ty.scope(function()
    local inner = ty.scope(function() return ty.ones(3) end)
    check.equal(inner:tolist(), { 1.0, 1.0, 1.0 })
    outer = inner
  end)
  check.fails(function() return outer + 1 end, "released")
end)

check.test("what a scope returns but did not make lives as long as before", function()
  local free, kept = ty.ones(2), nil
  ty.scope(function()
    local mine = ty.ones(3)
    ty.scope(function()
      kept = ty.keep(ty.ones(5))
      local a, b, c = ty.scope(function() return free, mine, kept end)
      check.equal({ a:numel(), b:numel(), c:numel() }, { 2, 3, 5 })
    end)
    check.equal(mine:tolist(), { 1.0, 1.0, 1.0 }, "of the scope around")
  end)
  check.equal({ free:tolist(), kept:numel() }, { { 1.0, 1.0 }, 5 }, "of none")
end)

check.test("discard releases what the end of the innermost scope would", function()
  local before = live()
  local free = ty.ones(1000)
  ty.discard(free)
  ty.scope(function()
    local outer = ty.ones(1000)
    ty.scope(function()
      local alone = now()
      local mine, given, kept = ty.ones(1000), ty.scope(function() return ty.ones(1000) end), ty.keep(ty.ones(1000))
      local gone = kept:free()
      ty.discard(mine, given, outer, free, kept)
      ty.discard(mine)
      check.equal({ now(), gone }, { alone, nil })
      check.fails(function() return mine + 1 end, "released")
      check.fails(function() return given + 1 end, "released")
      check.fails(function() ty.discard(free, 1) end, "argument 2: expected a tensor")
    end)
    check.equal({ outer:numel(), free:numel() }, { 1000, 1000 })
    coroutine.wrap(function() ty.discard(outer) end)()
    check.equal(outer:numel(), 1000, "another coroutine's")
  end)
  free = nil
  check.equal({ live() - before, free }, { 0, nil })
end)

check.test("a scope that ends by an error releases too", function()
  local before = live()
  local x
  check.fails(function()
    ty.scope(function()
      x = ty.ones(1000)
      error "stop"
    end)
  end, "stop")
  check.fails(function() return x + 1 end, "released")
  check.equal(now(), before)
end)

check.test("a graph keeps the memory it needs beyond the scope", function()
  local x = ty.ones(4):requires_grad_()
  local loss = ty.scope(function()
    local h = x * 3
    return (h * h):sum()
  end)
  loss:backward()
  check.equal(x.grad:tolist(), { 18.0, 18.0, 18.0, 18.0 })
end)

check.test("a scope belongs to its coroutine", function()
  local before = live()
  local co = coroutine.wrap(function()
    ty.scope(function()
      local x = ty.ones(10)
      coroutine.yield(1)
      x = x + 1
      coroutine.yield(x:sum():item())
    end)
    return "end"
  end)
  check.equal(co(), 1)
  local other = ty.ones(5) -- made while the coroutine's scope is open
  check.equal(co(), 20.0)
  check.equal(co(), "end")
  check.equal(other:tolist(), { 1.0, 1.0, 1.0, 1.0, 1.0 })
  other = nil
  check.equal({ other, live() - before }, { nil, 0 })
end)

check.test("unscoped: what is made there outlives the scopes around it", function()
  local before = live()
  local cache, lost = {}, nil
  ty.scope(function()
    ty.scope(function()
      cache.x, cache.y = ty.unscoped(function(a, b) return ty.ones(a), ty.zeros(b) end, 2, 3)
      lost = ty.ones(2)
    end)
  end)
  check.equal({ cache.x:tolist(), cache.y:tolist() }, { { 1.0, 1.0 }, { 0.0, 0.0, 0.0 } })
  check.fails(function() return lost + 1 end, "released")
  cache, lost = nil, nil
  check.equal({ cache, lost, live() - before }, { nil, nil, 0 })
  local ok, message = pcall(ty.unscoped, function() error("no such thing", 0) end)
  check.equal({ ok, message }, { false, "no such thing" }, "errors come as they are")
  local closed = false
  pcall(ty.unscoped, function()
    local guard <close> = setmetatable({}, { __close = function() closed = true end })
    error(guard)
  end)
  check.ok(closed, "variables to be closed are closed after an error")
end)

check.test("an unfinished coroutine with a scope is collected", function()
  local before = live()
  do
    local co = coroutine.create(function()
      ty.scope(function()
        local x = ty.ones(1000)
        coroutine.yield(x)
      end)
    end)
    coroutine.resume(co)
    coroutine.close(co)
  end
  check.equal(live(), before)
end)

check.test("<close> and free", function()
  local before = live()
  local out
  do
    local x <close> = ty.ones(1000)
    out = x
  end
  check.equal(now(), before)
  check.fails(function() return out:sum() end, "released")
  local y = ty.ones(10)
  y:free()
  y:free()
  check.fails(function() return y.shape end, "released")
  check.equal(now(), before)
end)

check.test("views keep the storage, the storage keeps nothing else", function()
  local before = live()
  local view
  do
    local x = ty.ones(1000)
    view = x["10:20"]
    x:free()
  end
  check.equal(view:sum():item(), 10.0)
  view = nil
  check.equal({ view, live() - before }, { nil, 0 })
end)

-- ---- the collector ----

check.test("a million temporaries stay bounded", function()
  collect()
  local x = ty.ones(512) -- 2 KB each: 2 GB in all
  local before = now()
  ty.memory.reset_peak("cpu")
  local rss = resident()
  for _ = 1, 1000000 do
    local y = x + 1 -- luacheck: ignore 211
  end
  local peak = ty.memory.stats("cpu").peak - before
  check.ok(peak < 160 * MB, string.format("peak is %.0f MB", peak / MB))
  if rss then
    local grown = resident() - rss
    check.ok(grown < 400 * MB, string.format("resident memory grew by %.0f MB", grown / MB))
  end
end)

check.test("big temporaries stay bounded", function()
  collect()
  local before = now()
  ty.memory.reset_peak("cpu")
  for _ = 1, 100 do
    local y = ty.zeros(4 * MB // 4) -- luacheck: ignore 211
  end
  local peak = ty.memory.stats("cpu").peak - before
  check.ok(peak < 200 * MB, string.format("peak is %.0f MB", peak / MB))
end)

check.test("beside a large model the dead take a share of the memory, and not as much again", function()
  collect()
  ty.memory.set_budget("cpu", 6400 * MB) -- a share: 200 MB
  local model = ty.empty(1000 * MB // 4) -- never touched, so it takes no memory
  collectgarbage()
  local before = now()
  ty.memory.reset_peak("cpu")
  for _ = 1, 400 do
    local y = ty.empty(4 * MB // 4) -- luacheck: ignore 211
  end
  local peak = ty.memory.stats("cpu").peak - before
  ty.memory.set_budget("cpu", 0)
  -- The first limit is that of the last collection, before the model was there.
  check.ok(peak < 280 * MB, string.format("peak is %.0f MB", peak / MB))
  model:free()
end)

check.test("beside a large model those that die young are few, whatever the machine has", function()
  collect()
  local model = ty.empty(2000 * MB // 4) -- never touched
  local heap = collectgarbage "count" / 1024
  for _, mode in ipairs { "generational", "incremental" } do
    local was = collectgarbage(mode)
    collectgarbage()
    local before = now()
    ty.memory.reset_peak("cpu")
    local kept = {}
    for i = 1, 400 do
      local y = ty.empty(4 * MB // 4)
      if i % 40 == 0 then kept[#kept + 1] = y end -- as results that are wanted later
    end
    local peak = ty.memory.stats("cpu").peak - before - 4 * MB * #kept
    -- In incremental mode nothing is young: what may be dead goes by the size of Lua's heap.
    local most = mode == "generational" and 100 or 80 + math.max(64, 128 * 1.5 * heap)
    check.ok(peak < most * MB, string.format("%s: peak is %.0f MB", mode, peak / MB))
    collectgarbage(was)
  end
  model:free()
end)

check.test("a tensor is in memory as far as it goes, not to the end of its class or of a huge page", function()
  ty.memory.empty_cache()
  local before, held = resident(), {}
  if not before then return end
  for i = 1, 8 do held[i] = ty.ones { (16 * MB + (200 << 10)) // 4 } end
  local each = (resident() - before) / #held / MB
  check.ok(each < 16.5, ("%.2f MB of 16.2"):format(each))
  for _, x in ipairs(held) do x:free() end
end)

check.test("a large module is not in memory twice while it is converted", function()
  local module, before = ty.nn.Sequential(), live()
  for i = 1, 6 do module["w" .. i] = ty.empty({ 32 * MB }):requires_grad_() end -- 128 MB each
  module.again = module.w1
  local mine = module.w6
  ty.memory.reset_peak()
  module:to "f16"
  local most = (ty.memory.stats().peak - before) / MB
  check.ok(most < 1050, ("%.0f MB at the peak, of 768 and then 384"):format(most))
  check.equal(now() - before, (6 * 64 + 128) * MB, "and what somebody holds")
  check.equal({ mine.dtype, module.w6.dtype, rawequal(module.w1, module.again) }, { "f32", "f16", true })
  mine, module = nil, nil
  check.equal({ live() - before, mine, module }, { 0, nil, nil })
  ty.memory.empty_cache()
end)

check.test("the counters", function()
  local before = ty.memory.stats("cpu")
  local x = ty.zeros(1024, { dtype = "f64" })
  local after = ty.memory.stats("cpu")
  check.ok(after.live - before.live >= 8192 and after.live - before.live < 8192 + 4096, "live counts the bytes")
  check.ok(after.allocations > before.allocations, "allocations are counted")
  check.ok(after.peak >= after.live, "the peak is not below what is live")
  x:free()
  ty.memory.empty_cache("cpu")
  check.equal(ty.memory.stats("cpu").cached, 0)
  check.fails(function() ty.memory.stats("no such device") end, "device")
end)

-- ---- too much ----

check.test("an impossible allocation is an error that lists live tensors", function()
  local big = ty.zeros(123, 45678)
  local text = check.fails(function() return ty.zeros(1 << 21, 1 << 21) end, "memory")
  check.ok(text:find("[123, 45678]", 1, true), "the largest live tensor is listed: " .. text)
  check.equal((ty.ones(3) + 1):tolist(), { 2.0, 2.0, 2.0 }, "and the program goes on")
  big:free()
  check.fails(function() return ty.zeros(1 << 40, 1 << 40) end, "shape")
  check.fails(function() return ty.ones(1):expand(1 << 40, 1 << 40) end, "expand")
end)

check.test("a budget", function()
  collect()
  ty.memory.empty_cache("cpu")
  local ok, message = pcall(function()
    ty.memory.set_budget("cpu", now() + 10 * MB)
    check.fails(function() return ty.zeros(20 * MB // 4) end, "budget")
    check.equal(ty.ones(2):tolist(), { 1.0, 1.0 })
    for _ = 1, 50 do -- garbage is collected before the budget is said to be spent
      local y = ty.zeros(4 * MB // 4) -- luacheck: ignore 211
    end
    local a, b = ty.zeros(4 * MB // 4), ty.zeros(4 * MB // 4)
    check.fails(function() return ty.zeros(4 * MB // 4) end, "budget")
    return a, b
  end)
  ty.memory.set_budget("cpu", 0)
  if not ok then error(message, 0) end
  check.equal(ty.zeros(20 * MB // 4):numel(), 20 * MB // 4)
end)

-- ---- failing allocations ----

local function parameter(seed, ...)
  ty.manual_seed(seed)
  return (ty.randn(...) * 0.3):requires_grad_()
end

-- Everything a step of training touches.
local function make_step()
  local p = { parameter(1, 8, 1, 3, 3), parameter(2, 8), parameter(3, 10, 8), parameter(4, 10) }
  local norm = { parameter(5, 8), parameter(6, 8) }
  local all = { p[1], p[2], p[3], p[4], norm[1], norm[2] }
  local m, v = {}, {}
  for i, t in ipairs(all) do m[i], v[i] = ty.zeros_like(t), ty.zeros_like(t) end
  ty.manual_seed(9)
  local x, target = ty.rand(4, 1, 8, 8), ty.randint(0, 10, { 4 })
  local step = 0
  return function()
    return ty.scope(function()
      step = step + 1
      local h = ty.conv2d(x, p[1], p[2], { padding = 1 })
      h = ty.group_norm(h, 2, norm[1], norm[2]):silu()
      h = ty.dropout(h:mean { 2, 3 }, 0.1)
      local loss = ty.cross_entropy(ty.linear(h, p[3], p[4]), target)
      loss:backward()
      local grads = {}
      for i, t in ipairs(all) do grads[i] = t.grad end
      ty.no_grad(function() ty.adam_(all, grads, m, v, {}, 1e-2, { step = step, decoupled = true }) end)
      for _, t in ipairs(all) do t:set_grad() end
      return loss:item()
    end)
  end, all
end

check.test("memory is flat between step 2 and step 50", function()
  local step = make_step()
  local second, first_loss, last
  for i = 1, 50 do
    last = step()
    first_loss = first_loss or last
    if i == 2 then second = live() end
  end
  check.equal(live(), second)
  check.ok(last < first_loss, "and the loss falls")
end)

check.test("every allocation of a training step may fail", function()
  local step, all = make_step()
  step()
  local before = live()
  local n, failed = 1, 0
  while true do
    ty.memory.fail_at(n)
    local ok, message = pcall(step)
    ty.memory.fail_at(0)
    if not ok then
      failed = failed + 1
      check.ok(tostring(message):find("memory"), "failure " .. n .. " says why: " .. tostring(message))
      for _, t in ipairs(all) do t:set_grad() end
    end
    collect()
    if now() ~= before then
      check.equal(now(), before, "live bytes after failure " .. n)
      break
    end
    if ok then break end
    n = n + 1
    if n > 5000 then error "the step never passes" end
  end
  check.ok(failed > 50, failed .. " allocations failed in turn")
  check.ok(step() == step() or true, "the step works afterwards")
end)

check.test("all allocations after the nth may fail", function()
  local step, all = make_step()
  step()
  local before = live()
  for n = 1, 60, 7 do
    ty.memory.fail_at(n, true)
    local ok = pcall(step)
    ty.memory.fail_at(0)
    check.equal(ok, false)
    for _, t in ipairs(all) do t:set_grad() end
    check.equal(live(), before, "live bytes after failures from " .. n)
  end
end)

-- ---- small tensors ----

check.test("dead small tensors do not pile up, whatever the collector's mode", function()
  local w, b = ty.ones(1):requires_grad_(), ty.ones(1)
  for _, mode in ipairs { "incremental", "generational" } do
    collectgarbage(mode)
    local before, most = live(), 0
    for i = 1, 100000 do
      local _ = w + b
      if i % 1000 == 0 then most = math.max(most, now() - before) end
    end
    check.equal(most < 2 * MB, true, mode)
  end
end)

check.test("wrong arguments", function()
  local memory = ty.memory
  check.fails(function() memory.set_budget(1 << 30) end, "memory.set_budget: argument 1: expected a device")
  check.fails(function() memory.set_budget("cpu", "much") end, "memory.set_budget: argument 2: expected an integer")
  check.fails(function() memory.set_budget("cpu", -1) end, "memory.set_budget: argument 2: expected bytes")
  check.fails(function() memory.set_budget("gpu") end, 'unknown device "gpu"')
  check.fails(function() memory.keep_weights(-1) end, "memory.keep_weights: argument 1: expected bytes")
  check.fails(function() memory.stats(3) end, "memory.stats: argument 1: expected a device")
  -- the name does not depend on how a function is called
  local ok, message = pcall(memory.fail_at, "soon")
  check.equal({ ok, message }, { false, 'memory.fail_at: argument 1: expected an integer, got "soon"' })
end)

check.test("device_available", function()
  check.equal(ty.device_available "cpu", true)
  check.equal(ty.device_available "meta", true)
  local there, why = ty.device_available "gpu"
  check.equal({ there, why }, { false, 'unknown device "gpu"; devices are cpu, meta, cuda and cuda:1 ...' })
  there, why = ty.device_available "cuda"
  if there then check.equal(ty.cuda.count() > 0, true)
  else check.equal(why:find('device "cuda": ', 1, true) == 1 and not why:find "\n", true, "one line: " .. why) end
  check.fails(function() ty.device_available(1) end, "device_available: argument 1: expected a string, got 1")
end)

check.test("a lower budget holds for what is cached as well", function()
  collectgarbage()
  ty.empty({ 8 << 20 }, { dtype = "u8" }):free()
  check.ok(ty.memory.stats().cached >= 8 << 20, "it is cached")
  ty.memory.set_budget("cpu", ty.memory.stats().live + (1 << 20))
  check.equal(ty.memory.stats().cached, 0)
  check.fails(function() return ty.empty({ 8 << 20 }, { dtype = "u8" }) end, "out of memory")
  ty.memory.set_budget("cpu")
end)

check.finish()
