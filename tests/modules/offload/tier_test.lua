-- The file tier: what is written comes back whole, by both backends, past and through the page cache, with a disk that
-- answers in parts, with errors or not at all; and what moves the memory of a tensor.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local tier = ty.core.tier_core

local folder = scratch.folder
local block = 4096

-- Tiers of every kind that this machine has: io_uring is not everywhere, threads are.
local kinds = {}
for _, row in ipairs { { "threads, direct", folder, "threads", true }, { "threads", folder, "threads", false },
  { "uring, direct", folder, "uring", true }, { "uring", folder, "uring", false }, { "memory", nil, "threads", false },
  { "memory, uring", nil, "uring", false } } do
  local ok, made = pcall(tier.open, row[2], row[3], row[4])
  if ok then
    made:close()
    kinds[#kinds + 1] = row
  else
    check.ok(row[3] == "uring", row[1] .. ": " .. tostring(made))
    check.ok(tostring(made):find "no io_uring", row[1])
  end
end

local function each(what, fn)
  for _, row in ipairs(kinds) do
    check.test(what .. ", " .. row[1], function()
      local t <close> = tier.open(row[2], row[3], row[4])
      fn(t, row)
      check.equal(t:stats().held, 0, "nothing is held")
    end)
  end
end

local function random(bytes, seed)
  ty.manual_seed(seed)
  return ty.randint(0, 256, { bytes }):to "u8"
end

each("what is written comes back", function(t)
  local sizes, at, put = { 0, 1, 100, 4095, 4096, 4097, 40000, 65536, 1 << 20, (5 << 20) + 77 }, 0, {}
  for i, n in ipairs(sizes) do
    local x = random(n, i)
    put[i] = { x = x, at = at, ticket = t:write(x, at) }
    at = at + (n + block - 1) // block * block
  end
  for i = #sizes, 1, -1 do -- reads wait for the writes of what they read
    local y = ty.full({ sizes[i] }, 7, { dtype = "u8" })
    local ticket = t:read(y, put[i].at)
    t:wait(ticket)
    check.ok(y:equal(put[i].x), sizes[i] .. " bytes")
  end
  for _, one in ipairs(put) do t:wait(one.ticket) end
  local whole = 0
  for _, n in ipairs(sizes) do whole = whole + n end
  local s = t:stats()
  check.equal({ s.read, s.written, s.reads, s.writes }, { whole, whole, #sizes, #sizes })
end)

each("numbers of every kind, and parts of a tensor", function(t)
  for i, dtype in ipairs { "f64", "f32", "f16", "bf16", "i64", "i32", "u8", "bool" } do
    local x = (ty.rand(3, 5, 1000) * 100):to(dtype)
    local y = ty.zeros(3, 5, 1000, { dtype = dtype })
    t:wait(t:write(x, i * 262144))
    t:wait(t:read(y, i * 262144))
    check.ok(x:equal(y), dtype)
  end
  local x = ty.rand(100, 999)
  local middle, y = x:narrow(0, 10, 50), ty.zeros(100, 999)
  t:wait(t:write(middle, 0))
  t:wait(t:read(y:narrow(0, 1, 50), 0))
  check.ok(y:narrow(0, 1, 50):equal(middle), "a view")
  check.equal(y:narrow(0, 0, 1):abs():sum():item() + y:narrow(0, 51, 49):abs():sum():item(), 0, "and no more")
end)

each("transfers of the same place are done in order", function(t)
  local y = ty.zeros(300000)
  for i = 1, 30 do
    local x = ty.full({ 300000 }, i)
    local w, r = t:write(x, 0), t:read(y, 0)
    t:wait(r)
    t:wait(w)
    check.equal({ y:min():item(), y:max():item() }, { i, i })
  end
end)

each("a disk that does half of what it is asked for, and signals", function(t)
  for i, fault in ipairs { "short", "interrupt" } do
    local x, y = random((6 << 20) + 5, i), ty.zeros((6 << 20) + 5, { dtype = "u8" })
    t:inject(fault, 1, 12)
    t:wait(t:write(x, 0))
    t:inject(fault, 1, 12)
    t:wait(t:read(y, 0))
    check.ok(x:equal(y), fault)
    t:inject(fault, 1, 1 << 40) -- for ever: it is given up
    check.fails(function() t:wait(t:write(random(5000, 1), 0)) end, "tier: writing 5000 bytes at 0 of a file in")
    t:inject(fault, 1, 0)
  end
end)

each("errors and a full disk: one error, and the tier goes on", function(t)
  local x, y = random(5 << 20, 3), ty.zeros(5 << 20, { dtype = "u8" })
  t:inject("full", 2, 1)
  check.fails(function() t:wait(t:write(x, 0)) end,
    "tier: writing 5242880 bytes at 0 of a file in .*: No space left on device")
  t:wait(t:write(x, 0))
  t:inject("error", 1, 1)
  check.fails(function() t:wait(t:read(y, 0)) end,
    "tier: reading 5242880 bytes at 0 of a file in .*: Input/output error")
  check.equal(y:max():item() >= 0, true)
  t:wait(t:read(y, 0))
  check.ok(x:equal(y), "after space was made")
  check.fails(function() t:wait(t:read(y, 64 << 20)) end, "nothing was written there")
  check.fails(function() t:wait(7777) end, "tier:wait: there is no transfer 7777")
end)

each("closing waits for what is under way", function(t, row)
  local other = tier.open(row[2], row[3], row[4])
  local x = ty.rand(1 << 18)
  for i = 0, 7 do other:write(x, i << 20) end
  other:close()
  check.fails(function() other:write(x, 0) end, "tier: it was closed")
  local left = tier.open(row[2], row[3], row[4])
  left:write(x, 0)
  left = nil -- luacheck: ignore
  collectgarbage()
end)

each("a tensor that is changed before it was written is an error", function(t)
  local x = ty.rand(1 << 18)
  local ticket = t:write(x, 0)
  x:add_(1)
  if t:stats().copied == 0 then -- else the disk has its own copy
    check.fails(function() t:wait(ticket) end, "the tensor was changed before it was written")
  else
    t:wait(ticket)
  end
end)

check.test("large tensors go to the disk without a copy", function()
  local t <close> = tier.open(folder, "auto", true)
  local x, y = ty.rand(40000), ty.zeros(40000)
  t:wait(t:write(x, 0))
  t:wait(t:read(y, 0))
  check.equal(t:stats().copied, 0)
  t:wait(t:write(x:narrow(0, 1, 30000), 0))
  check.equal(t:stats().copied, 120000, "a part that begins within a block")
end)

check.test("no file has a name; a folder that is none is an error", function()
  local t <close> = tier.open(folder, "auto", true)
  t:wait(t:write(ty.rand(10000), 0))
  check.equal(#ty.io.listdir(folder), 0)
  check.fails(function() tier.open(folder .. "/nowhere") end, "tier: no file in .*/nowhere: No such file")
  check.fails(function() tier.open(folder, "tape") end, '"auto" or "uring" or "threads"')
  check.fails(function() t:write(ty.rand(4), 100) end, "at: expected a multiple of 4096, got 100")
  check.fails(function() t:write(ty.rand(4, 4):t(), 0) end, "expected a contiguous tensor on the CPU")
  check.fails(function() t:write(ty.rand(4):to { device = "meta" }, 0) end, "expected a contiguous tensor on the CPU")
  check.fails(function() t:inject("flood", 1, 1) end, '"short", "interrupt"')
end)

check.test("folders of every kind", function()
  local file = scratch.spit("file", "text")
  check.fails(function() tier.open(file) end, "tier: no file in .*: Not a directory")
  check.fails(function() tier.open "/proc" end, "tier: no file in /proc")
  local one <close> = tier.open(folder, "auto", true)
  local two <close> = tier.open(folder, "auto", true) -- two programs, or one twice, in one folder
  local x, y, a, b = ty.rand(30000), ty.rand(30000), ty.zeros(30000), ty.zeros(30000)
  for _, row in ipairs { { one, x }, { two, y } } do row[1]:wait(row[1]:write(row[2], 0)) end
  one:wait(one:read(a, 0))
  two:wait(two:read(b, 0))
  check.ok(a:equal(x) and b:equal(y), "each has its own")
  check.ok(one:stats().room > 0, "how much there is room for")
  if ty.io.exists "/dev/shm" then -- memory: works, and says that it is not direct where that is so
    local t <close> = tier.open("/dev/shm", "auto", true)
    t:wait(t:write(x, 4096))
    t:wait(t:read(b, 4096))
    check.ok(b:equal(x), "a file system in memory")
    check.ok(t:stats().memory, "says that it is memory")
  end
  os.remove(file)
end)

check.test("what the disk gives, measured", function()
  local offload = require "tycho.offload"
  for _, direct in ipairs { true, false } do
    local rates = offload.bandwidth(folder, { bytes = 32 << 20, direct = direct })
    for _, what in ipairs { "read", "write", "both" } do check.ok(rates[what] > 1e6 and rates[what] < 1e12, what) end
    check.ok(not rates.direct or direct, "direct")
  end
  check.equal(ty.io.listdir(folder), {})
  check.fails(function() offload.bandwidth(folder .. "/nowhere") end, "tier: no file in .*/nowhere: No such file")
  check.fails(function() offload.bandwidth(folder, { bytes = 0 }) end, "bytes: expected an integer >= 1, got 0")
  check.fails(function() offload.bandwidth(folder, { backend = "tape" }) end, '"auto" or "uring" or "threads"')
end)

check.test("what the kernel says of the process", function()
  local outside = require("tycho.offload").outside
  local before = outside()
  local x = ty.ones(8 << 20) -- 32 MiB
  local t <close> = tier.open(folder, "auto", true)
  t:wait(t:write(x, 0))
  local after = outside()
  local total = (tonumber((ty.io.read "/proc/meminfo"):match "MemTotal:%s*(%d+)") or 0) * 1024
  if after.available then
    check.ok(after.available > 0 and after.available < total and after.available % 1024 == 0, after.available)
  end
  if before.resident then check.ok(after.most >= after.resident and after.resident > 1 << 20) end
  if before.written and t:stats().direct and not t:stats().memory then
    local written = after.written - before.written
    check.ok(written >= 32 << 20 and written < 34 << 20, "bytes that went to the disk: " .. written)
  end
end)

check.test("a program that is killed leaves nothing behind", function()
  local child = scratch.spit("child.lua", ([[
    local ty = require "tycho"
    local t = ty.core.tier_core.open(%q, "auto", true)
    local x = ty.rand(1 << 18)
    t:wait(t:write(x, 0))
    io.open(%q, "w"):close()
    while true do t:wait(t:write(x, 0)) end
  ]]):format(folder, scratch.file "began"))
  local began = false
  for _, seconds in ipairs { 0.2, 1, 5 } do
    os.execute(("timeout -s KILL %g %s %s >/dev/null 2>&1"):format(seconds, arg[-1] or "tycho", child))
    began = ty.io.exists(scratch.file "began")
    if began then break end
  end
  check.ok(began, "it was killed while it wrote")
  os.remove(scratch.file "began")
  os.remove(child)
  check.equal(ty.io.listdir(folder), {})
end)

check.test("a tensor whose memory is away, and comes back when it is asked for", function()
  local w = ty.rand(64, 64):requires_grad_()
  local x = ty.rand(8, 64)
  local wanted = x:matmul(w)
  local stub = ty.empty({ 64, 64 }, { dtype = "f32", device = "meta" })
  tier.exchange(w, stub)
  check.equal({ w.device, stub.device }, { "meta", "cpu" })
  check.fails(function() return x:matmul(w) end, "expected a tensor on cpu")
  local away, asked = tier.memory_of(w), 0
  tier.on_absent(function(memory)
    asked = asked + 1
    if memory == away then tier.exchange(w, stub) end
  end)
  check.ok(x:matmul(w):equal(wanted), "the same product")
  check.ok(w:t():contiguous():equal(w:t()), "and again")
  check.equal(asked, 1)
  tier.exchange(w, stub)
  tier.on_absent(function() error "no such memory" end)
  check.fails(function() return x:matmul(w) end, "no such memory")
  tier.on_absent(nil)
  tier.exchange(w, stub)
  check.fails(function() tier.exchange(w, ty.rand(64)) end, "exchange: expected two leaves of one shape and dtype")
  check.fails(function() tier.exchange(x:matmul(w), ty.rand(8, 64)) end, "exchange: expected two leaves")
end)

check.test("the memory of a view as bytes, and the view again", function()
  local x = ty.rand(6, 70, 80)
  local view = x:transpose(0, 2):narrow(1, 3, 20)
  local bytes, how = tier.unfold(view)
  check.equal({ bytes.dtype, bytes.shape }, { "u8", { 4 * 6 * 70 * 80 } })
  local copy = bytes:clone()
  check.ok(tier.fold(copy, how):equal(view), "of a copy")
  check.equal(tier.memory_of(tier.fold(copy, how)), tier.memory_of(copy))
  check.equal(tier.unfold(ty.rand(3):to { device = "meta" }), nil)
  check.fails(function() tier.fold(copy, "x") end, "what unfold")
end)

check.test("hooks of leaves see their gradient as soon as it is whole", function()
  local seen, w = {}, {}
  for i = 1, 3 do
    w[i] = ty.rand(4, 4):requires_grad_()
    w[i]:register_hook(function() seen[#seen + 1] = i end)
  end
  local x = ty.rand(2, 4)
  local first = x:matmul(w[1])
  local reached = first * 1
  reached:register_hook(function() seen[#seen + 1] = "first" end)
  local y = reached:matmul(w[2]):matmul(w[3]):matmul(w[2]) -- w[2] twice
  y:sum():backward()
  check.equal(seen, { 3, 2, "first", 1 })
  local plain = {}
  for i = 1, 3 do plain[i] = w[i]:detach():clone():requires_grad_() end
  x:matmul(plain[1]):matmul(plain[2]):matmul(plain[3]):matmul(plain[2]):sum():backward()
  for i = 1, 3 do check.ok(plain[i].grad:equal(w[i].grad), "the same gradient") end
end)

check.finish()
