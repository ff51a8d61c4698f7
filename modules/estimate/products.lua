--- What products of matrices cost on this machine: a table of measured ones, forests that learn time and energy of it
-- from shapes and tiles, and a tuner that asks them. After "Understanding GEMM Performance and Energy on NVIDIA Ada
-- Lovelace: A Machine Learning-Based Analytical Approach", 2024, arXiv:2411.16954, for the kernels of the CPU.
--
--     local table = estimate.products.measure(estimate.products.sample(300, { seed = 1 }))
--     local model = estimate.products.fit(table)
--     print(model:seconds { m = 512, n = 512, k = 512 })
--     local choice = estimate.products.tune(model, { m = 512, n = 512, k = 512 })
--     estimate.products.with(choice, function() return x:matmul(y) end)
--
-- A product is { m, n, k, dtype = "f32", layout = "nn" } and how it is done: threads, and rows, columns (of a tile of
-- the result) and pack (1: the left matrix is copied into panels, -1: it is read where it lies), 0 each for what the
-- kernel decides by the shape. "t" of a layout is a matrix that lies transposed: "tn" the left, "nt" the right one.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local forest = require "tycho.estimate.forest"

local ask, clock = ty.core.system.product_tiling, ty.system.clock
local none = arguments.none
local M = {}

local bytes_of = { f32 = 4, f64 = 8, bf16 = 2 }
local layouts = { nn = true, nt = true, tn = true }

local kinds = { m = "an integer >= 1", n = "an integer >= 1", k = "an integer >= 1",
  dtype = '"f32" or "f64" or "bf16"', layout = '"nn" or "nt" or "tn"', threads = "an integer in [0, 1024]",
  rows = "an integer >= 0", columns = "an integer >= 0", pack = "-1 or 0 or 1", seconds = "a finite number > 0",
  joules = "a finite number >= 0", measured = "a boolean", shape = "an integer" }
local defaults = { m = none, n = none, k = none, dtype = "f32", layout = "nn", threads = 0, rows = 0, columns = 0,
  pack = 0, seconds = none, joules = none, measured = none, shape = none }

-- A product with all that says how it is done.
local function read(who, product)
  local p = arguments.read(who, product, defaults, kinds)
  for _, name in ipairs { "m", "n", "k" } do arguments.expect(who, name, p[name], kinds[name]) end
  if p.threads == 0 then p.threads = ty.threads() end
  return p
end

--- Runs fn() with products done in this way, on so many threads, and what it was before afterwards.
---@param choice { threads?: integer, rows?: integer, columns?: integer, pack?: integer }
---@param fn function
---@return any ...
function M.with(choice, fn)
  local who = "estimate.products.with"
  arguments.expect(who, "choice", choice, "a table")
  arguments.expect(who, "fn", fn, "a function")
  for _, name in ipairs { "threads", "rows", "columns", "pack" } do
    arguments.expect(who, name, choice[name], kinds[name] .. " or nil")
  end
  local before = ty.threads()
  if choice.threads and choice.threads > 0 then ty.set_threads(choice.threads) end
  ask(choice.rows or 0, choice.columns or 0, choice.pack or 0)
  local results = table.pack(pcall(fn))
  ask(0, 0, 0)
  ty.set_threads(before)
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

-- ---- shapes, ways to do them, and what these cost ----

local steps = { rows = { 0, 48, 96, 192, 384 }, columns = { 0, 64, 128, 256, 512, 1024 } }

--- Products of drawn shapes, `ways` of doing each: { m, n, k, dtype, layout, threads, rows, columns, pack }. Sizes are
-- drawn evenly in their logarithms. options: least (16), most (1024: of a size), work (4e8: the most multiplications
-- of a product), dtypes ({ "f32", "f64", "bf16" }), threads ({ 1 } up to those that ops have), ways (8; the first is
-- the kernel's own choice), seed (0).
---@param count integer  shapes, at most a million
---@param options? table
---@return table[]
function M.sample(count, options)
  local who = "estimate.products.sample"
  arguments.expect(who, "count", count, "an integer in [1, 1000000]")
  local o = arguments.read(who, options, { least = 16, most = 1024, work = 4e8, dtypes = { "f32", "f64", "bf16" },
    threads = none, ways = 8, seed = 0 }, { least = "an integer >= 1", most = "an integer >= 1",
    work = "a finite number >= 1", dtypes = "a list of strings", threads = "a list of integers", ways =
    "an integer >= 1", seed = "an integer" })
  local all = {}
  for threads = 1, ty.threads() do all[threads] = threads end
  local threads, names = o.threads or all, {}
  for name in pairs(layouts) do names[#names + 1] = name end
  table.sort(names)
  if o.most < o.least or o.least ^ 3 > o.work then
    arguments.fail("%s: expected least <= most and room for it in work, got %d, %d and %g", who, o.least, o.most,
      o.work)
  end
  return ty.data.with_seed(o.seed, function()
    local numbers, at = {}, 0
    local function draw() -- in [0, 1)
      at = at + 1
      if at > #numbers then numbers, at = ty.rand({ 4096 }, { dtype = "f64" }):tolist(), 1 end
      return numbers[at]
    end
    local function one_of(list) return list[math.floor(draw() * #list) + 1] end
    local function size() return math.floor(o.least * (o.most / o.least) ^ draw() + 0.5) end
    local list = {}
    for shape = 1, count do
      local m, n, k
      repeat m, n, k = size(), size(), size() until m * n * k <= o.work
      local dtype, layout = one_of(o.dtypes), one_of(names)
      arguments.expect(who, "dtypes", dtype, kinds.dtype)
      for way = 1, o.ways do
        local plain = way == 1
        list[#list + 1] = { shape = shape, m = m, n = n, k = k, dtype = dtype, layout = layout,
          threads = one_of(threads), rows = plain and 0 or one_of(steps.rows),
          columns = plain and 0 or one_of(steps.columns),
          pack = not plain and dtype ~= "bf16" and one_of { -1, 0, 1 } or 0 }
      end
    end
    return list
  end)
end

-- The operands of a product, as it has them.
local function operands(p)
  local function matrix(rows, columns, turned)
    local t = ty.randn(turned and columns or rows, turned and rows or columns):to(p.dtype)
    return turned and t:transpose(0, 1) or t
  end
  return matrix(p.m, p.k, p.layout:sub(1, 1) == "t"), matrix(p.k, p.n, p.layout:sub(2, 2) == "t")
end

-- Seconds of one call and joules of one, over calls that take `least` seconds together; the shortest and the least of
-- `rounds`.
local function time(fn, least, rounds, meter)
  ty.scope(fn)
  local once, seconds, joules = math.huge, math.huge, math.huge
  for _ = 1, 3 do
    local began = clock()
    ty.scope(fn)
    once = math.min(once, clock() - began)
  end
  local calls = math.max(1, math.min(10000, math.ceil(least / math.max(once, 1e-7))))
  for _ = 1, rounds do
    local reading, began = meter:read(), clock()
    for _ = 1, calls do ty.scope(fn) end
    seconds = math.min(seconds, (clock() - began) / calls)
    joules = math.min(joules, (meter:read().joules - reading.joules) / calls)
  end
  return seconds, joules
end

--- Measures products: gives each of the list `seconds`, `joules` and `measured` (whether the joules come from counters;
-- otherwise from the model of ty.energy: processor seconds and memory). options: seconds (0.002: what is timed at a
-- time, as many calls as that takes), rounds (3, of which the shortest counts), passes (1: times over the whole list,
-- for machines on which something else comes and goes: again the shortest).
---@param list table[]  of products.sample, or others
---@param options? { seconds?: number, rounds?: integer, passes?: integer }
---@return table[] list
function M.measure(list, options)
  local who = "estimate.products.measure"
  arguments.expect(who, "list", list, "a list of tables")
  local o = arguments.read(who, options, { seconds = 0.002, rounds = 3, passes = 1 },
    { seconds = "a finite number > 0", rounds = "an integer >= 1", passes = "an integer >= 1" })
  local meter, count = ty.energy.meter(), #list
  local x, y, last
  for i = 0, o.passes * count - 1 do
    local product = list[i % count + 1]
    local p = read(who, product)
    local key = ("%d %d %d %s %s"):format(p.m, p.n, p.k, p.dtype, p.layout)
    if key ~= last then
      x, y = operands(p)
      last = key
    end
    local seconds, joules = M.with(p, function()
      return time(function() return x:matmul(y) end, o.seconds, o.rounds, meter)
    end)
    local again = i >= count
    product.seconds = again and math.min(product.seconds, seconds) or seconds
    product.joules = again and math.min(product.joules, joules) or joules
    product.measured = meter:read().measured
  end
  return list
end

-- ---- what is known of a product before it is done ----

local names = { "log_m", "log_n", "log_k", "log_work", "log_bytes", "element", "half", "left_turned", "right_turned",
  "threads", "rows", "columns", "pack", "log_tiles", "tiles_per_thread", "uneven", "rows_left", "columns_left",
  "log_tile_bytes", "log_parts" }

--- The features that forests see, by their names.
M.features = names

local vector = 16 -- f32 numbers of a register; tiles are of 8 rows and two registers where there is AVX-512

-- The tile that a kernel takes: what is asked for, or what is left of the shape.
local function features(p)
  local size, work = bytes_of[p.dtype], p.m * p.n * p.k
  local lanes = p.dtype == "f64" and vector // 2 or vector
  local most_m, most_n = 512, 64 * lanes
  local rows = math.min(p.m, p.rows > 0 and p.rows or most_m)
  local columns = math.min(p.n, p.columns > 0 and p.columns or most_n)
  local tiles = ((p.m + rows - 1) // rows) * ((p.n + columns - 1) // columns)
  local each = tiles / p.threads
  return {
    math.log(p.m, 2), math.log(p.n, 2), math.log(p.k, 2), math.log(work, 2),
    math.log(size * (p.m * p.k + p.k * p.n + p.m * p.n), 2), size, p.dtype == "bf16" and 1 or 0,
    p.layout:sub(1, 1) == "t" and 1 or 0, p.layout:sub(2, 2) == "t" and 1 or 0, p.threads, p.rows, p.columns, p.pack,
    math.log(tiles, 2), each, math.ceil(each) / each, p.m % 8, p.n % (2 * lanes),
    math.log(size * (rows * math.min(p.k, 256) + 256 * columns), 2), math.log(work / p.threads, 2),
  }
end

--- The features of a product, as numbers.
---@param product table
---@return number[]
function M.describe(product) return features(read("estimate.products.describe", product)) end

-- ---- the model ----

--- Forests of time and of energy for products, of products.fit.
---@class ProductModel
---@field time Forest    of the logarithm of seconds for a multiplication
---@field energy Forest  of that of joules
local Model = {}
Model.__index = Model
Model.__name = "ProductModel"

--- Learns from measured products. Forests guess the logarithm of the cost of one multiplication and addition, which
-- varies far less than that of a product. options: those of estimate.forest.
---@param list table[]  of products.measure
---@param options? table
---@return ProductModel
function M.fit(list, options)
  local who = "estimate.products.fit"
  arguments.expect(who, "list", list, "a list of tables")
  local x, seconds, joules = {}, {}, {}
  for i, product in ipairs(list) do
    local p = read(who, product)
    arguments.expect(who, ("list[%d].seconds"):format(i), p.seconds, kinds.seconds)
    local work = p.m * p.n * p.k
    x[i], seconds[i] = features(p), math.log(p.seconds / work)
    joules[i] = math.log(math.max(p.joules or 0, 1e-12) / work)
  end
  local settings = { tries = 8, trees = 60 }
  arguments.expect(who, "options", options, "a table or nil")
  for key, value in pairs(options or {}) do settings[key] = value end
  return setmetatable({ time = forest.fit(x, seconds, settings), energy = forest.fit(x, joules, settings) }, Model)
end

local function foretell(self, kind, list)
  local who = "ProductModel:" .. (kind == "time" and "seconds" or "joules")
  arguments.expect(who, "product", list, "a table")
  local one = list.m ~= nil
  local x, work = {}, {}
  for i, product in ipairs(one and { list } or list) do
    local p = read(who, product)
    x[i], work[i] = features(p), p.m * p.n * p.k
  end
  local all = (self[kind]:predict(x):exp() * ty.tensor(work, { dtype = "f64" })):tolist()
  return one and all[1] or all
end

--- Seconds that a product takes, or each of a list of them.
---@param product table
---@return number|number[]
function Model:seconds(product) return foretell(self, "time", product) end

--- Joules that a product takes, or each of a list of them.
---@param product table
---@return number|number[]
function Model:joules(product) return foretell(self, "energy", product) end

-- ---- the tuner ----

--- The ways in which a product may be done, a product each: all of rows, columns and threads, but for what cuts no
-- further than the shape does.
---@param product table
---@param threads? integer[]  (1 up to those that ops have)
---@return table[]
function M.ways(product, threads)
  local p = read("estimate.products.ways", product)
  local list = {}
  for count = 1, threads and #threads or ty.threads() do
    for _, rows in ipairs(steps.rows) do
      for _, columns in ipairs(steps.columns) do
        if rows < p.m and columns < p.n then
          list[#list + 1] = { m = p.m, n = p.n, k = p.k, dtype = p.dtype, layout = p.layout, rows = rows,
            columns = columns, pack = 0, threads = threads and threads[count] or count }
        end
      end
    end
  end
  return list
end

--- The way that the model holds to be the fastest, or the one that takes least energy: the kernel's own with the most
-- threads, unless another is thought to cost less by more than `margin`. options: threads (1 up to those that ops
-- have), by ("seconds"; "joules"), margin (0.05, of the cost).
---@param model ProductModel
---@param product table   m, n, k, dtype, layout
---@param options? { threads?: integer[], by?: "seconds"|"joules", margin?: number }
---@return table choice  threads, rows, columns, pack, and what it is thought to take: seconds or joules
function M.tune(model, product, options)
  local who = "estimate.products.tune"
  if getmetatable(model) ~= Model then
    arguments.fail("%s: model: expected one of products.fit, got %s", who, arguments.describe(model))
  end
  local o = arguments.read(who, options, { threads = none, by = "seconds", margin = 0.05 },
    { threads = "a list of integers >= 1", by = '"seconds" or "joules"', margin = "a number in [0, 1)" })
  local ways, own, best = M.ways(product, o.threads), 1, 1
  local costs = model[o.by](model, ways)
  for i, cost in ipairs(costs) do
    if cost < costs[best] then best = i end
    if ways[i].rows == 0 and ways[i].columns == 0 and ways[i].threads > ways[own].threads then own = i end
  end
  if costs[best] > costs[own] * (1 - o.margin) then best = own end
  local way = ways[best]
  return { threads = way.threads, rows = way.rows, columns = way.columns, pack = way.pack, [o.by] = costs[best] }
end

return M
