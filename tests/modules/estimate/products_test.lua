-- Products of matrices: tiles change no bit, tables and forests keep shapes apart, the tuner finds the cheapest way.
local here = arg and arg[0]:match ".*/" or "tests/modules/estimate/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local estimate = require "tycho.estimate"

local products = estimate.products

check.test("products are the same to the last bit, however they are cut into tiles", function()
  ty.manual_seed(1)
  for _, dtype in ipairs { "f32", "f64", "bf16", "f16" } do
    for _, sizes in ipairs { { 130, 300, 70 }, { 96, 64, 520 }, { 33, 700, 257 } } do
      local m, n, k = table.unpack(sizes)
      local x, y = ty.randn(m, k):to(dtype), ty.randn(k, n):to(dtype)
      local left, right = ty.randn(k, m):to(dtype):transpose(0, 1), ty.randn(n, k):to(dtype):transpose(0, 1)
      local plain = { x:matmul(y), left:matmul(y), x:matmul(right), ty.linear(x, right:transpose(0, 1)) }
      for _, way in ipairs { { rows = 48, columns = 64 }, { rows = 5 }, { columns = 96, pack = 1 }, { pack = -1 },
        { rows = 64, columns = 1, pack = -1 }, { rows = 1000, columns = 1000, pack = 1 } } do
        products.with(way, function()
          local cut = { x:matmul(y), left:matmul(y), x:matmul(right), ty.linear(x, right:transpose(0, 1)) }
          for i = 1, 4 do
            check.ok(cut[i]:eq(plain[i]):all():item(), ("%s %dx%dx%d, case %d"):format(dtype, m, n, k, i))
          end
        end)
      end
    end
  end
end)

check.test("what was asked for ends with the function, by an error too", function()
  local threads = ty.threads()
  check.fails(function() products.with({ rows = 8, threads = 1 }, function() error("inside", 0) end) end, "inside")
  check.equal(ty.threads(), threads)
  check.equal(products.with({ pack = 1 }, function() return 1, nil, 3 end), 1)
  check.fails(function() products.with({ rows = -1 }, print) end,
    "estimate.products.with: rows: expected an integer >= 0 or nil, got -1")
  check.fails(function() ty.core.system.product_tiling(0, 0, 2) end, "expected -1, 0 or 1")
end)

check.test("drawn products are those of the seed, within their limits, the first way the kernel's own", function()
  local list = products.sample(20, { seed = 3, ways = 4, most = 200, work = 1e6, threads = { 1, 2 } })
  check.equal(list, products.sample(20, { seed = 3, ways = 4, most = 200, work = 1e6, threads = { 1, 2 } }))
  check.equal(#list, 80)
  for i, p in ipairs(list) do
    check.equal(p.shape, (i - 1) // 4 + 1)
    check.ok(math.min(p.m, p.n, p.k) >= 16 and math.max(p.m, p.n, p.k) <= 200 and p.m * p.n * p.k <= 1e6, "sizes")
    if i % 4 == 1 then check.equal({ p.rows, p.columns, p.pack }, { 0, 0, 0 }) end
    if i % 4 ~= 1 then check.equal({ p.m, p.n, p.k }, { list[i - 1].m, list[i - 1].n, list[i - 1].k }) end
  end
  check.fails(function() products.sample(1 << 40) end, "an integer in [1, 1000000], got 1099511627776")
  check.fails(function() products.sample(1, { least = 100, work = 1e5 }) end, "room for it in work")
end)

check.test("features say what the paper's do: sizes, work, tiles, what is left over", function()
  local row, of = products.describe { m = 96, n = 128, k = 32, rows = 48, columns = 64, threads = 2 }, {}
  for i, name in ipairs(products.features) do of[name] = row[i] end
  check.equal(#row, #products.features)
  check.close(of.log_work, math.log(96 * 128 * 32, 2), 1e-12)
  check.equal({ of.log_tiles, of.tiles_per_thread, of.uneven, of.rows_left, of.columns_left }, { 2, 2, 1, 0, 0 })
  check.close(of.log_bytes, math.log(4 * (96 * 32 + 32 * 128 + 96 * 128), 2), 1e-12)
  check.fails(function() products.describe { m = 1, n = 1, k = 1, dtype = "f8" } end,
    'estimate.products.describe: dtype: expected "f32" or "f64" or "bf16", got "f8"')
end)

-- A machine whose products cost what we say: time falls with threads, tiles of 96 rows are best.
local function pretend(list)
  for _, p in ipairs(list) do
    local tiles = p.rows == 0 and 1 or (1 + 0.3 * math.abs(math.log(p.rows / 96)))
    p.seconds = p.m * p.n * p.k * 1e-10 * (p.rows == 0 and 1.3 or tiles) / p.threads + 1e-6
    p.joules = p.seconds * (p.threads == 1 and 10 or 25)
  end
  return list
end

check.test("a model learns such a machine, and the tuner its best way, by time and by energy", function()
  local list = pretend(products.sample(90, { seed = 1, threads = { 1, 2 }, dtypes = { "f32" } }))
  local model = products.fit(list, { trees = 10, tries = 20 })
  local new = pretend(products.sample(20, { seed = 2, threads = { 1, 2 }, dtypes = { "f32" } }))
  local seconds, guess = {}, model:seconds(new)
  for i, p in ipairs(new) do seconds[i], guess[i] = math.log(p.seconds), math.log(guess[i]) end
  check.ok(estimate.r2(seconds, guess) > 0.98, "held-out shapes")
  local shape = { m = 700, n = 600, k = 500 }
  local fast = products.tune(model, shape, { threads = { 1, 2 } })
  check.equal({ fast.threads, fast.rows }, { 2, 96 })
  check.equal(products.tune(model, shape, { threads = { 1, 2 }, by = "joules" }).threads, 1)
  -- The tuner's choice is the least of what the model says of all ways.
  for _, way in ipairs(products.ways(shape, { 1, 2 })) do
    check.ok(model:seconds(way) >= fast.seconds, "no way is cheaper")
  end
  -- What is hardly cheaper is not worth leaving the kernel's own way for.
  local own = products.tune(model, shape, { threads = { 1, 2 }, margin = 0.9 })
  check.equal({ own.threads, own.rows, own.columns }, { 2, 0, 0 })
  check.fails(function() products.tune({}, shape) end, "estimate.products.tune: model: expected one of products.fit")
  check.fails(function() products.fit { { m = 1, n = 1, k = 1 } } end,
    "estimate.products.fit: list[1].seconds: expected a finite number > 0, got nil")
end)

check.test("measured products have seconds, joules and where these come from", function()
  local list = products.measure(products.sample(2, { ways = 2, most = 32, threads = { 1 } }),
    { seconds = 1e-4, rounds = 1 })
  for _, p in ipairs(list) do
    check.ok(p.seconds > 0 and p.seconds < 1 and p.joules >= 0, "a cost")
    check.equal(type(p.measured), "boolean")
  end
end)

check.finish()
