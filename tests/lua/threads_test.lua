-- The threads of the kernels: how many, and several Lua states at once.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"

check.test("set_threads: any number from 0", function()
  local default = ty.threads()
  check.equal(default >= 1, true)
  local x, y = ty.randn(300, 400), ty.randn(400, 200)
  local expected = ty.matmul(x, y)
  for _, count in ipairs { 1, 2, 64, 1024 } do -- far more than cores, too
    ty.set_threads(count)
    check.equal(ty.threads(), count)
    check.equal((ty.matmul(x, y) - expected):abs():max():item(), 0)
  end
  ty.set_threads(0)
  check.equal(ty.threads(), default)
  for _, wrong in ipairs { -1, 1025, 1.5, "many" } do
    check.fails(function() ty.set_threads(wrong) end, "set_threads: argument 1: expected")
  end
  check.equal(ty.threads(), default)
end)

check.test("several Lua states compute at once, each with its own number of threads", function()
  local function setup(count)
    local tycho = require "tycho"
    tycho.set_threads(count)
    return function(x, rounds)
      local y = x
      for _ = 1, rounds do y = tycho.softmax(tycho.matmul(y, x), -1) end
      return y, tycho.threads()
    end
  end
  local x, before = ty.randn(200, 200), ty.threads()
  local expected = setup(before)(x, 20)
  ty.set_threads(0)
  local threads = {}
  for i = 1, 3 do
    threads[i] = ty.thread.new(setup, i)
    threads[i]:send(x, 20)
  end
  local here = setup(2)(x, 20)
  check.equal((here - expected):abs():max():item(), 0)
  for i, thread in ipairs(threads) do
    local y, count = thread:receive()
    check.equal((y - expected):abs():max():item(), 0)
    check.equal(count, i)
    thread:close()
  end
  check.equal(ty.threads(), 2)
  ty.set_threads(0)
end)

-- ---- memory between threads ----

-- Resident megabytes of this process; nil where /proc is not, and under sanitizers, which hold back what was freed.
local function resident()
  local f = not os.getenv "UBSAN_OPTIONS" and io.open "/proc/self/status"
  if not f then return nil end
  local kb = f:read("a"):match "VmRSS:%s*(%d+)"
  f:close()
  return tonumber(kb) / 1024
end

-- Megabytes that the process grows by when `again` has run `count` times, after `warm` times.
local function growth(warm, count, again)
  for _ = 1, warm do again() end
  collectgarbage()
  local before = resident()
  for _ = 1, count do again() end
  collectgarbage()
  return before and resident() - before or 0
end

check.test("loaders made again and again, each with threads of its own, take no more memory", function()
  local dataset = ty.data.TensorDataset { x = ty.zeros(64, 4), y = ty.arange(64) }
  local grown = growth(20, 80, function() -- 0.2 MB of small blocks were lost by each
    local loader <close> = ty.data.DataLoader(dataset, { batch_size = 16, workers = 2 })
    for _ = 1, 4 do loader:next() end
  end)
  check.ok(grown < 3, ("80 loaders grew by %.1f MB"):format(grown))
end)

check.test("what a thread makes and another frees goes back to the first", function()
  local thread <close> = ty.thread.new(function()
    local zeros = require("tycho").zeros
    return function() return zeros(800) end
  end)
  local grown = growth(1000, 10000, function() -- 3.3 KB each
    thread:send()
    thread:receive():free()
  end)
  check.ok(grown < 3, ("10,000 tensors grew by %.1f MB"):format(grown))
end)

check.finish()
