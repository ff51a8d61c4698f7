-- The meta device foretells: peak memory as the CPU's allocator has it, work as a profile counts it.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn, optim = ty.nn, ty.optim

-- The peak on the CPU of what is foretold.
local function measured(fn)
  collectgarbage()
  collectgarbage()
  ty.memory.empty_cache()
  ty.memory.reset_peak()
  local before = ty.memory.stats().live
  fn "cpu"
  return ty.memory.stats().peak - before, ty.memory.stats().live - before
end

ty.set_threads(1) -- kernels take memory for each thread

-- Small storages are added to the CPU's count some at a time.
local slack = 128 * 1024

check.test("sizes by class, blocks again, what is freed", function()
  local function fn(device)
    local sizes = { 5000, 123457, 1 << 20, 1000003, 4097, 100, 900001, 1100000, 777 }
    local held = {}
    for round = 1, 60 do
      local size = sizes[1 + round * 7 % #sizes]
      held[#held + 1] = ty.empty({ size }, { dtype = "u8", device = device })
      if round % 3 == 0 then table.remove(held, 1 + round % #held):free() end
    end
    for _, t in ipairs(held) do t:free() end
  end
  local seen = ty.profile.foresee(fn)
  local peak = measured(fn)
  check.ok(math.abs(seen.peak - peak) <= slack, ("%d and %d"):format(seen.peak, peak))
  check.equal(seen.live, 0)
end)

check.test("the cache, block by block", function()
  local function fn(device)
    local held = {}
    for round = 1, 400 do -- more than 64 MiB of many sizes, so that the oldest blocks are given back
      held[#held + 1] = ty.empty({ 5000 + round * 7919 * 1237 % (9 << 20) }, { dtype = "u8", device = device })
      if #held > 5 then table.remove(held, 1 + round * 31 % #held):free() end
    end
    for _, t in ipairs(held) do t:free() end
    return ty.memory.stats(device).cached
  end
  local _, cached = ty.profile.foresee(fn)
  collectgarbage()
  collectgarbage()
  ty.memory.empty_cache()
  local real = fn "cpu"
  check.ok(math.abs(cached - real) <= 1 << 20, ("%d and %d"):format(cached, real))
  check.ok(cached > 64 << 20 and cached < 160 << 20, ("%d"):format(cached))
end)

check.test("a larger block is given out again, and counts as what was asked for", function()
  local function after(second)
    return select(2, ty.profile.foresee(function(device)
      ty.empty({ 1 << 20 }, { dtype = "u8", device = device }):free()
      ty.memory.reset_peak "meta" -- what lives now is nothing
      local x = ty.empty({ second }, { dtype = "u8", device = device })
      local stats = ty.memory.stats "meta"
      x:free()
      return { stats.cached, stats.peak }
    end))
  end
  check.equal(after(1 << 20), { 0, 1 << 20 })
  check.equal(after((1 << 20) - 3 * (1 << 16)), { 0, (1 << 20) - 3 * (1 << 16) })
  check.equal(after(1 << 19), { 0, 1 << 19 }) -- twice as large
  check.equal(after((1 << 19) - (1 << 15)), { 1 << 20, (1 << 19) - (1 << 15) }) -- more: a block of its own
end)

check.test("a step of training", function()
  local function fn(device)
    local model = nn.with_defaults({ device = device }, function()
      return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    end)
    local opt = optim.AdamW(model:parameters(), { lr = 1e-3 })
    for _ = 1, 3 do
      ty.scope(function()
        local x = ty.randn({ 1024, 256 }, { device = device })
        opt:step((model(x) - x):square():mean())
      end)
    end
    return #model:parameters()
  end
  local seen, count = ty.profile.foresee(fn)
  check.equal(count, 4)
  local peak = measured(fn)
  check.ok(math.abs(seen.peak - peak) <= 0.05 * peak, ("%d and %d"):format(seen.peak, peak))
  -- Forward and backward: 3 products of 2 * 256 * 128 * 512 for the second layer, 2 for the first, whose input wants
  -- no gradient.
  check.equal(seen.products, 3 * 5 * 2.0 * 1024 * 256 * 1024)
  local real = ty.profile(function() fn "cpu" end, { limits = { flops = 1, bandwidth = 1 } })
  local flops = 0
  for _, e in ipairs(real.events) do if e.op == "matmul" then flops = flops + e.flops end end
  check.equal(seen.products, flops)
end)

check.test("nothing is allocated", function()
  local before = ty.memory.stats().allocations
  local seen = ty.profile.foresee(function(device)
    local x = ty.empty({ 1 << 20, 1 << 20 }, { device = device })
    return x:matmul(x):sum().shape
  end)
  check.ok(seen.peak >= 1 << 42 and seen.flops >= 2.0 ^ 61)
  check.ok(ty.memory.stats().allocations - before < 10)
end)

check.test("seconds are learnt", function()
  local rows = {}
  local truth = { products = 2e-10, convolutions = 5e-10, bytes = 1e-10, kernels = 1e-5 }
  for i = 1, 6 do
    local seen = { products = 1e9 * i, convolutions = i % 2 * 1e9, bytes = 1e8 * (7 - i) ^ 2, kernels = 100 + i ^ 3 }
    local seconds = 0
    for name, cost in pairs(truth) do seconds = seconds + cost * seen[name] end
    rows[i] = { seen = seen, seconds = seconds }
  end
  local model = ty.profile.fit_time(rows)
  for name, cost in pairs(truth) do check.close(model[name] / cost, 1, 1e-6, name) end
  check.close(model:seconds(rows[3].seen), rows[3].seconds, 1e-9)
  -- A cost that the rows would make negative is none.
  model = ty.profile.fit_time { { seconds = 1, seen = { products = 1, convolutions = 0, bytes = 0, kernels = 0 } },
    { seconds = 1, seen = { products = 2, convolutions = 0, bytes = 1, kernels = 0 } } }
  check.ok(model.bytes == 0 and model.products > 0.5 and model.products < 1)
end)

check.test("seconds of each step by the others alone", function()
  -- Two costs of 2 and 3 seconds make all rows but the second, which takes twice as long as they would have it.
  local function row(products, bytes, factor)
    return { seen = { products = products, convolutions = 0, bytes = bytes, kernels = 0 },
      seconds = (factor or 1) * (2 * products + 3 * bytes) }
  end
  local rows = { row(1, 1), row(1, 5, 2), row(4, 1), row(2, 7) }
  check.close(ty.profile.cross_time(rows)[2], 2 * 1 + 3 * 5, 1e-9)
  -- The first is foretold by three rows, one of which is off; without that one it is right.
  check.ok(math.abs(ty.profile.cross_time(rows)[1] - 5) > 0.1)
  local exact = ty.profile.cross_time { rows[1], rows[3], rows[4] }
  for i, want in ipairs { 5, 11, 25 } do check.close(exact[i], want, 1e-9) end
  check.equal(#rows, 4)
end)

check.test("mistakes", function()
  check.fails(function() ty.profile.foresee(3) end, "profile.foresee: fn")
  check.fails(function() ty.profile.foresee(function() error "inside" end) end, "inside")
  check.fails(function() ty.profile.fit_time {} end, "profile.fit_time: rows")
  check.fails(function() ty.profile.cross_time(3) end, "profile.cross_time: rows: expected a table, got 3")
  check.fails(function() ty.profile.cross_time { {} } end, "profile.cross_time: rows: expected at least two, got 1")
  check.fails(function() ty.profile.cross_time { {}, {} } end, "profile.cross_time: rows%[1%].seen")
  check.fails(function() ty.profile.fit_time { { seen = {}, seconds = 1 } } end, "rows%[1%].seen.products")
end)

check.finish()
