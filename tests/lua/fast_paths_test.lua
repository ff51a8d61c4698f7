-- Kernels that take another way for sizes that the op tests are too small for: windows over several blocks of a row,
-- rows resized to twice their length, integers sorted together with their positions, draws by stretches of a row,
-- halves that are added without a stage between or widened a few rows at a time. Each is compared with a composition
-- that goes another way.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

local test, equal = check.test, check.equal

local function same(x, y, what)
  equal(table.concat(x.shape, "x"), table.concat(y.shape, "x"), what .. ": shape")
  -- NaN counts as equal to NaN here.
  local both = ty.logical_and(ty.isnan(x), ty.isnan(y))
  equal(ty.logical_or(ty.eq(x, y), both):all():item(), true, what)
end

local function near(x, y, most, what)
  local off = (x:to "f64" - y:to "f64"):abs():max():item()
  equal(off <= most, true, ("%s: off by %g"):format(what, off))
end

-- All windows of padded pictures as one dimension, in the order of their taps: [n, c, taps, rows, columns].
local function windows(x, kernel, stride, padding, value)
  local p = ty.pad(x, { padding, padding, padding, padding }, "constant", value)
  local rows, columns = (p.shape[3] - kernel) // stride + 1, (p.shape[4] - kernel) // stride + 1
  local taps = {}
  for i = 0, kernel - 1 do
    for j = 0, kernel - 1 do
      taps[#taps + 1] = p:narrow(2, i, (rows - 1) * stride + 1):narrow(3, j, (columns - 1) * stride + 1)
        :index_select(2, ty.arange(rows) * stride):index_select(3, ty.arange(columns) * stride)
    end
  end
  return ty.stack(taps, 2)
end

local sizes = { { 7, 5 }, { 9, 64 }, { 8, 131 }, { 5, 300 } }
local pools = { { 2, 2, 0 }, { 3, 2, 1 }, { 3, 1, 1 }, { 3, 2, 0 }, { 5, 2, 2 }, { 3, 3, 1 }, { 2, 1, 0 },
  { 8, 8, 0 }, { 7, 5, 3 }, { 4, 6, 1 } }

test("max_pool2d finds the first of the largest, and the first NaN, in rows of several blocks", function()
  ty.manual_seed(0)
  for _, dtype in ipairs { "f32", "f64" } do
    for _, size in ipairs(sizes) do
      local h, w = size[1], size[2]
      local x = ty.randint(0, 5, { 2, 3, h, w }):to(dtype) -- many that are equal
      local holes = ty.rand(2, 3, h, w)
      x = ty.where(holes:lt(0.02), ty.full({}, 0 / 0, { dtype = dtype }), x)
      x = ty.where(holes:gt(0.9), ty.full({}, -math.huge, { dtype = dtype }), x)
      for _, pool in ipairs(pools) do
        local kernel, stride, padding = table.unpack(pool)
        if h + 2 * padding >= kernel and w + 2 * padding >= kernel then
          local label = ("%s %dx%d kernel %d stride %d padding %d"):format(dtype, h, w, kernel, stride, padding)
          local y, position = ty.max_pool2d(x, kernel, stride, padding)
          local taps = windows(x, kernel, stride, padding, -math.huge)
          local want, first = taps:max(2), taps:argmax(2)
          same(y, want, label)
          local rows = ty.arange(y.shape[3]):reshape(-1, 1) * stride - padding
          local columns = ty.arange(y.shape[4]) * stride - padding
          local at = (rows + first // kernel) * w + columns + first % kernel
          -- Where nothing but -infinity is in a window, the first of its positions inside the picture counts.
          local some = want:gt(-math.huge):logical_or(ty.isnan(want))
          same(ty.where(some, position, 0), ty.where(some, at, 0), label .. ": positions")
          same(x:flatten(2):gather(2, position:flatten(2)), y:flatten(2), label .. ": what lies there")
        end
      end
    end
  end
end)

test("max_pool1d of pairs finds the first of the largest, and the first NaN", function()
  ty.manual_seed(0)
  for _, dtype in ipairs { "f32", "f64" } do
    for _, w in ipairs { 2, 15, 16, 37, 300 } do
      local x = ty.randint(0, 3, { 2, 3, w }):to(dtype)
      x = ty.where(ty.rand(2, 3, w):lt(0.1), ty.full({}, 0 / 0, { dtype = dtype }), x)
      x = ty.where(ty.rand(2, 3, w):gt(0.7), ty.full({}, -math.huge, { dtype = dtype }), x)
      local pairs_of = x:narrow(2, 0, w // 2 * 2):reshape(2, 3, w // 2, 2)
      local y, position = ty.max_pool1d(x, 2)
      local label = ("%s of %d"):format(dtype, w)
      same(y, pairs_of:max(3), label)
      same(position, pairs_of:argmax(3) + ty.arange(w // 2) * 2, label .. ": positions")
    end
  end
end)

test("avg_pool2d and adaptive_avg_pool2d over rows of several blocks", function()
  for _, size in ipairs(sizes) do
    local h, w = size[1], size[2]
    local x = ty.randn(2, 3, h, w)
    for _, pool in ipairs(pools) do
      local kernel, stride, padding = table.unpack(pool)
      if h + 2 * padding >= kernel and w + 2 * padding >= kernel then
        local label = ("%dx%d kernel %d stride %d padding %d"):format(h, w, kernel, stride, padding)
        local want = windows(x, kernel, stride, padding, 0):to("f64"):mean(2)
        near(ty.avg_pool2d(x, kernel, stride, padding), want, 1e-6, label)
      end
    end
    near(ty.adaptive_avg_pool2d(x, 1), x:to("f64"):mean({ 2, 3 }, true), 1e-6, "to one position")
    local parts = ty.adaptive_avg_pool2d(x, { 2, 3 })
    local part = x:to("f64"):narrow(2, h // 2, h - h // 2):narrow(3, w // 3, (2 * w + 2) // 3 - w // 3)
    near(parts:select(3, 1):select(2, 1), part:mean { 2, 3 }, 1e-6, "a part")
  end
end)

test("interpolate to twice the size is what it is by weights", function()
  for _, dtype in ipairs { "f32", "f64" } do
    for _, size in ipairs { { 1, 1 }, { 2, 5 }, { 9, 33 } } do
      local h, w = table.unpack(size)
      local x = ty.randn({ 2, 3, h, w }, { dtype = dtype })
      local function positions(n) return ty.arange(2 * n) end
      same(ty.interpolate(x, { scale = 2, mode = "nearest" }),
        x:index_select(2, positions(h) // 2):index_select(3, positions(w) // 2), "nearest")
      local function along(y, dim, n)
        local at = ((positions(n):to "f64" + 0.5) * 0.5 - 0.5):clamp(0, n - 1)
        local first = at:floor():to "i64"
        local second = (first + 1):clamp(0, n - 1)
        local weight = (at - first:to "f64"):to(dtype)
        local shape = { 1, 1, 1, 1 }
        shape[dim + 1] = 2 * n
        weight = weight:reshape(shape)
        return (1 - weight) * y:index_select(dim, first) + weight * y:index_select(dim, second)
      end
      near(ty.interpolate(x, { scale = 2, mode = "bilinear" }), along(along(x, 3, w), 2, h),
        dtype == "f32" and 1e-6 or 1e-14, "bilinear")
    end
  end
end)

test("integers are sorted with their positions, stably and in both orders, however far apart", function()
  ty.manual_seed(1)
  for _, n in ipairs { 512, 1000, 4097 } do
    for _, bits in ipairs { 0, 1, 9, 10, 33, 40, 51, 52, 53, 62 } do
      local x = ty.randint(0, (1 << bits) + (bits == 0 and 0 or 1), { n }) - (1 << bits) // 2
      if bits > 1 then -- and some that are equal
        local part = n // 4
        x = ty.cat { x:narrow(0, 0, n - part), x:narrow(0, 0, part) }
      end
      for _, descending in ipairs { false, true } do
        local label = ("%d of %d bits, %s"):format(n, bits, descending and "descending" or "ascending")
        local sorted, at = x:sort(0, descending)
        same(x:index_select(0, at), sorted, label)
        local a, b = sorted:narrow(0, 0, n - 1), sorted:narrow(0, 1, n - 1)
        equal((descending and a:ge(b) or a:le(b)):all():item(), true, label .. ": in order")
        local equals = a:eq(b)
        local rising = at:narrow(0, 0, n - 1):lt(at:narrow(0, 1, n - 1))
        equal(equals:logical_not():logical_or(rising):all():item(), true, label .. ": stable")
      end
    end
  end
end)

test("a few draws again and again from long rows come as often as they should", function()
  ty.manual_seed(2)
  local n, rows = 1000, 4000
  local p = ty.zeros(n)
  p:narrow(0, 250, 10):fill_(1) -- across the border of two stretches
  p:narrow(0, 990, 10):fill_(3)
  local at = ty.multinomial(p:expand(rows, n):contiguous(), 3, true)
  local low, high = at:lt(500), at:ge(500)
  equal(at:ge(250):logical_and(at:lt(260)):logical_or(at:ge(990)):all():item(), true, "nothing that weighs nothing")
  near(high:to("f32"):mean(), ty.full({}, 0.75), 0.02, "three of four")
  near(ty.where(low, at, 0):eq(255):to("f32"):mean(), ty.full({}, 0.025), 0.008, "the last of a stretch")
  check.fails(function() ty.multinomial(ty.full({ 600 }, -1), 1, true) end, "finite numbers of at least 0")
  check.fails(function() ty.multinomial(ty.zeros(600), 1, true) end, "no positive entry")
end)

test("sums, differences and products of halves are those of floats, rounded", function()
  for _, dtype in ipairs { "f16", "bf16" } do
    for _, n in ipairs { 0, 1, 7, 8, 31, 1000 } do
      local x, y, z = (ty.randn(n) * 100):to(dtype), ty.randn(n):to(dtype), ty.randn(1):to(dtype)
      for _, op in ipairs { "add", "sub", "mul" } do
        local function by_floats(a, b) return ty[op](a:to "f32", b:to "f32"):to(dtype) end
        same(ty[op](x, y), by_floats(x, y), dtype .. " " .. op)
        same(ty[op](x, z), by_floats(x, z), dtype .. " " .. op .. " one")
        same(ty[op](z, x), by_floats(z, x), dtype .. " one " .. op)
      end
      near(x:sum(), x:to("f32"):sum(), dtype == "f16" and n or 8 * n, dtype .. " sum")
    end
    local m = ty.randn(37, 300):to(dtype)
    near(m:mean(0), m:to("f32"):mean(0), 0.01, dtype .. " mean of columns")
    near(m:mean(1), m:to("f32"):mean(1), 0.01, dtype .. " mean of rows")
  end
end)

test("softmax and norms of halves are those of f32, rounded", function()
  local function gradients(f, x, g, ...)
    local leaves = { x:detach():requires_grad_() }
    for _, p in ipairs { ... } do leaves[#leaves + 1] = p:detach():requires_grad_() end
    return ty.grad((f(table.unpack(leaves)):to "f32" * g):sum(), leaves)
  end
  for _, dtype in ipairs { "f16", "bf16" } do
    local rounding = dtype == "f16" and 2e-3 or 1.6e-2
    for _, width in ipairs { 40, 300, 1500, 5000 } do
      local x, w, b = ty.randn(77, width):to(dtype), ty.rand(width) + 0.5, ty.randn(width)
      local g = ty.randn_like(x:to "f32"):to(dtype):to "f32"
      for name, f in pairs {
        layer_norm = function(p, u, v) return ty.layer_norm(p, { width }, u, v) end,
        rms_norm = function(p, u) return ty.rms_norm(p, { width }, u) end,
      } do
        local what, rest = ("%s of %s, %d wide"):format(name, dtype, width), name == "layer_norm" and { w, b } or { w }
        same(f(x, w, b), f(x:to "f32", w, b):to(dtype), what)
        local d, want = gradients(f, x, g, table.unpack(rest)), gradients(f, x:to "f32", g, table.unpack(rest))
        near(d[1], want[1], rounding * want[1]:abs():max():item(), what .. ": gradient")
        for i = 2, #want do near(d[i], want[i], 2e-5 * want[i]:abs():max():item(), what .. ": gradient of a weight") end
      end
    end
    for _, shape in ipairs { { 130, 5 }, { 130, 70 }, { 3, 50, 64 }, { 2, 9, 150 }, { 300, 300 }, { 3, 5000 } } do
      local x = ty.randn(shape):to(dtype)
      local g = ty.randn_like(x:to "f32"):to(dtype):to "f32"
      for dim = 0, #shape - 1 do
        for _, name in ipairs { "softmax", "log_softmax" } do
          local f = function(p) return ty[name](p, dim) end
          local what = ("%s of %s over %d of %s"):format(name, dtype, dim, table.concat(shape, "x"))
          same(f(x), f(x:to "f32"):to(dtype), what)
          local backward, y = ty[name .. "_backward"], f(x)
          same(backward(g:to(dtype), y, dim), backward(g, y:to "f32", dim):to(dtype), what .. ": gradient")
        end
      end
    end
  end
end)

test("gelu holds its relative precision where it is small, and its limits", function()
  local x = ty.cat { ty.linspace(-12, 6, 5003), ty.tensor { -1e-30, 0, 1e-30, -13 } }
  local y, want = ty.gelu(x):to "f64", ty.gelu(x:to "f64")
  local off = ((y - want):abs() / want:abs():clamp(1e-300)):max():item()
  equal(off < 1.2e-6, true, ("off by %g of itself"):format(off))
  for _, spread in ipairs { 1, 2, 6 } do -- the same whatever stands beside an element, and in place
    for _, dtype in ipairs { "f32", "bf16" } do
      local z, order = (ty.randn(3001) * spread):to(dtype), ty.randperm(3001)
      local all = ty.gelu(z)
      same(ty.gelu(z:index_select(0, order)), all:index_select(0, order), "gelu in another order")
      same(ty.gelu(z:narrow(0, 5, 37)), all:narrow(0, 5, 37), "gelu of a part")
      same(z:clone():gelu_(), all, "gelu in place")
    end
  end
  local ends = ty.gelu(ty.tensor { math.huge, -math.huge, 0 / 0, -200 })
  equal(ends:select(0, 0):item(), math.huge, "of infinity")
  equal(ends:select(0, 1):item(), 0, "of -infinity")
  equal(ty.isnan(ends):select(0, 2):item(), true, "of NaN")
  equal(ends:select(0, 3):item(), 0, "of -200")
end)

check.finish()
