-- Matrix products and convolutions at the sizes where the kernels cut their work, which the rows of tests/ops are too
-- small for. Products are compared with compositions of other ops, f32 convolutions with f64 ones,
-- which run on kernels of their own.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

local test, equal, close, fails = check.test, check.equal, check.close, check.fails

local function largest(x) return x:abs():max():item() end

-- The sum of products by broadcasting, in f64.
local function by_hand(x, y)
  return (x:to("f64"):unsqueeze(-1) * y:to("f64"):unsqueeze(-3)):sum(-2)
end

local function compare(x, y, what)
  local want = by_hand(x, y)
  local k = x.shape[#x.shape]
  local unit = x.dtype == "f64" and 1e-14 or 1e-6
  close(largest(ty.matmul(x, y):to("f64") - want), 0, unit * (8 + 2 * k ^ 0.5 * 4), what)
end

local sizes = {
  { 1, 1, 5000 }, { 1, 700, 300 }, { 700, 1, 300 }, { 3, 900, 260 }, { 900, 3, 260 }, { 5, 7, 2100 }, { 40, 50, 600 },
  { 64, 64, 64 }, { 65, 33, 257 }, { 130, 70, 520 }, { 17, 1200, 130 }, { 400, 20, 90 },
  { 20, 100, 1301 }, { 53, 20, 1301 }, { 90, 101, 800 }, { 300, 70, 1100 },
}

test("products of every size and layout agree with sums of products", function()
  ty.manual_seed(1)
  for _, s in ipairs(sizes) do
    local m, n, k = s[1], s[2], s[3]
    for _, dtype in ipairs { "f32", "f64" } do
      for layout = 0, 3 do
        local function random(rows, columns, turned)
          if turned then return ty.randn(columns, rows, { dtype = dtype }):transpose(0, 1) end
          return ty.randn(rows, columns, { dtype = dtype })
        end
        local x, y = random(m, k, layout & 1 > 0), random(k, n, layout & 2 > 0)
        compare(x, y, ("%d x %d x %d, %s, layout %d"):format(m, n, k, dtype, layout))
      end
    end
  end
end)

test("views with steps in both dimensions, and batches with broadcast and permuted dimensions", function()
  ty.manual_seed(2)
  local x = ty.randn(60, 90, { dtype = "f64" })["::2, ::3"]
  local y = ty.randn(60, 80, { dtype = "f64" })["::2, ::2"]
  compare(x, y, "steps")
  local a = ty.randn(5, 3, 20, 16, { dtype = "f64" })
  local b = ty.randn(3, 16, 11, { dtype = "f64" })
  local parts = {}
  for i = 0, 2 do parts[#parts + 1] = ty.matmul(a:select(1, i), b[i]) end
  equal(largest(ty.matmul(a, b) - ty.stack(parts, 1)), 0)
  local shared = ty.randn(16, 11, { dtype = "f64" })
  local turned = a:permute(1, 0, 2, 3)
  local function differ(p, q) return largest(p - q) end
  close(differ(ty.matmul(turned, shared), ty.matmul(turned:contiguous(), shared)), 0, 1e-13, "does not merge")
  close(differ(ty.matmul(a, shared):reshape(300, 11), ty.matmul(a:reshape(300, 16), shared)), 0, 1e-13, "merges")
end)

test("linear equals matmul and add, with its gradients", function()
  ty.manual_seed(3)
  for _, s in ipairs { { 7, 300, 40 }, { 300, 64, 65 }, { 2, 3, 900 } } do
    local x = ty.randn(2, s[1], s[3], { dtype = "f64" }):requires_grad_()
    local w = ty.randn(s[2], s[3], { dtype = "f64" }):requires_grad_()
    local b = ty.randn(s[2], { dtype = "f64" }):requires_grad_()
    local y, z = ty.linear(x, w, b), ty.matmul(x, w:transpose(0, 1)) + b
    close(largest((y - z):detach()), 0, 1e-11)
    local g = ty.randn(2, s[1], s[2], { dtype = "f64" })
    local p, q = ty.grad((y * g):sum(), { x, w, b }), ty.grad((z * g):sum(), { x, w, b })
    for i = 1, 3 do close(largest(p[i] - q[i]), 0, 1e-10, "gradient " .. i) end
  end
end)

-- Whole numbers this small are exact in every type, and so are their sums: any error shows.
local function whole(rows, columns, turned, dtype, low, high)
  local x = ty.randint(low, high, turned and { columns, rows } or { rows, columns }):to(dtype)
  return turned and x:transpose(0, 1) or x
end

test("halves are summed in f32 and rounded once, at every size and layout", function()
  ty.manual_seed(4)
  for _, s in ipairs {
    { 1, 300, 257 }, { 300, 1, 257 }, { 3, 200, 513 }, { 1, 1, 1 }, { 0, 3, 4 }, { 3, 4, 0 }, { 9, 33, 5 },
    { 70, 90, 1025 }, { 600, 40, 70 }, { 20, 1100, 130 }, { 5, 6, 4100 },
    { 16, 100, 1301 }, { 95, 30, 1301 }, { 300, 70, 2100 },
  } do
    for _, dtype in ipairs { "f16", "bf16" } do
      for layout = 0, 3 do
        local x = whole(s[1], s[3], layout & 1 > 0, dtype, -3, 4)
        local y = whole(s[3], s[2], layout & 2 > 0, dtype, -3, 4)
        local want = ty.matmul(x:to "i64", y:to "i64"):to "f32":to(dtype)
        local what = ("%d x %d x %d, %s, layout %d"):format(s[1], s[2], s[3], dtype, layout)
        equal(ty.matmul(x, y):eq(want):all():item(), true, what)
      end
    end
  end
  local x, y = whole(40, 90, false, "bf16", -3, 4)["::2, ::3"], whole(90, 70, false, "bf16", -3, 4)["::3, ::2"]
  equal(largest(ty.matmul(x, y):to "f32" - ty.matmul(x:to "f32", y:to "f32")), 0, "steps in both dimensions")
end)

test("infinities and NaN stay in their rows", function()
  for _, dtype in ipairs { "f32", "f16", "bf16" } do
    for _, s in ipairs { { 4, 300, 200 }, { 100, 90, 300 } } do
      local x, y = ty.ones(s[1], s[3], { dtype = dtype }), ty.ones(s[3], s[2], { dtype = dtype })
      x[2]:fill_(math.huge)
      x[1]:fill_(0 / 0)
      local z = ty.matmul(x, y):to "f32"
      equal(z[0]:eq(s[3]):all():item() and z[3]:eq(s[3]):all():item(), true, dtype)
      equal(z[2]:eq(math.huge):all():item(), true, dtype)
      equal(z[1]:eq(z[1]):any():item(), false, dtype)
    end
  end
end)

test("numbers at both ends of f32 are multiplied as any others", function()
  ty.manual_seed(8)
  for _, scale in ipairs { 1e-25, 1e18, 3e38 } do
    local x, y = ty.rand(70, 600) * scale, ty.rand(600, 50) / 1e3
    x["5, 7"] = scale -- beside what is far smaller
    x["40"]:mul_(1e-9)
    local want = by_hand(x, y)
    local off = (ty.matmul(x, y):to "f64" - want):abs() / want
    local finite = want:lt(3.4e38)
    close(largest(ty.where(finite, off, ty.zeros(1, { dtype = "f64" }))), 0, 1e-5, ("scale %g"):format(scale))
  end
  for layout = 0, 3 do -- numbers of every size beside each other
    local x = ty.randn(layout & 1 > 0 and { 64, 96 } or { 96, 64 })
    local y = ty.randn(layout & 2 > 0 and { 48, 64 } or { 64, 48 })
    x:mul_(ty.exp(ty.rand(x.shape) * -95))
    y:mul_(ty.exp(ty.rand(y.shape) * -95))
    if layout & 1 > 0 then x = x:transpose(0, 1) end
    if layout & 2 > 0 then y = y:transpose(0, 1) end
    local off = (ty.matmul(x, y):to "f64" - by_hand(x, y)):abs() / by_hand(x:abs(), y:abs())
    close(largest(off), 0, 1e-6, "all sizes, layout " .. layout)
  end
end)

test("products of bytes are exact", function()
  ty.manual_seed(5)
  for _, s in ipairs {
    { 1, 1, 1 }, { 1, 300, 257 }, { 70, 90, 1026 }, { 600, 40, 71 }, { 20, 1100, 133 }, { 0, 3, 4 }, { 3, 4, 0 },
  } do
    for _, dtype in ipairs { "u8", "i8" } do
      for layout = 0, 3 do
        local low = dtype == "u8" and 0 or -128
        local x = whole(s[1], s[3], layout & 1 > 0, dtype, low, low + 256)
        local y = whole(s[3], s[2], layout & 2 > 0, "i8", -128, 128)
        local z = ty.matmul_int8(x, y)
        equal(z.dtype, "i32")
        equal(z:eq(ty.matmul(x:to "i32", y:to "i32")):all():item(), true,
          ("%d x %d x %d, %s, layout %d"):format(s[1], s[2], s[3], dtype, layout))
      end
    end
  end
  local x, y = whole(60, 64, false, "i8", -128, 128):reshape(3, 20, 64), whole(64, 33, false, "i8", -128, 128)
  local turned = x:transpose(0, 1)
  local z, want = ty.matmul_int8(turned, y), ty.matmul_int8(x, y):transpose(0, 1)
  equal(z:eq(want):all():item(), true, "a batch that does not merge")
end)

test("linear with activation and residual equals the separate ops, recorded or not", function()
  ty.manual_seed(6)
  local acts = { none = function(x) return x end, relu = ty.relu, gelu = ty.gelu, silu = ty.silu, sigmoid = ty.sigmoid,
    gelu_tanh = function(x) return ty.gelu(x, "tanh") end }
  for _, s in ipairs { { 3, 5, 4 }, { 9, 200, 300 }, { 90, 70, 300 } } do
    for name, act in pairs(acts) do
      for dtype, tol in pairs { f64 = 1e-11, f32 = 1e-4, bf16 = 1 } do
        local function random(...) return ty.randn(..., { dtype = dtype }) end
        local x, w, b = random { s[1], s[3] }:requires_grad_(), random { s[2], s[3] }, random { s[2] }
        local r = random { s[1], s[2] }:requires_grad_()
        local z = act(ty.linear(x, w, b) + r)
        local y = ty.linear(x, w, b, r, name)
        close(largest((y - z):detach():to "f64"), 0, tol, name)
        local p, q = ty.grad(y:sum(), { x, r }), ty.grad(z:sum(), { x, r })
        for i = 1, 2 do close(largest((p[i] - q[i]):to "f64"), 0, 10 * tol, name .. ", gradient " .. i) end
        ty.no_grad(function()
          close(largest((ty.linear(x, w, b, r, name) - z):to "f64"), 0, tol, name .. ", not recorded")
        end)
      end
    end
  end
end)

test("integers wrap around and never overflow", function()
  local x = ty.full({ 1, 2 }, math.maxinteger, { dtype = "i64" })
  equal(ty.matmul(x, ty.full({ 2, 1 }, 3, { dtype = "i64" })):item(), 2 * 3 * math.maxinteger)
  local row, column = ty.full({ 1, 4 }, 127, { dtype = "i8" }), ty.full({ 4, 1 }, 127, { dtype = "i8" })
  equal(ty.matmul(row, column):item(), (4 * 127 * 127 + 128) % 256 - 128)
end)

-- n, c, h, w, out, kernel, options
local convolutions = {
  { 2, 16, 20, 20, 24, 3, { padding = 1 } }, { 9, 32, 12, 10, 16, 3, { stride = 2, padding = 1 } },
  { 2, 32, 14, 14, 32, 3, { groups = 2, padding = 1 } }, { 3, 16, 30, 17, 16, 5, { padding = 4, dilation = 2 } },
  { 4, 24, 16, 16, 40, 1, { stride = 1 } }, { 2, 3, 40, 33, 8, 3, { padding = 1 } },
  { 2, 12, 31, 30, 12, 7, { padding = 3, groups = 12 } },
  { 2, 6, 20, 21, 6, 3, { stride = 2, padding = 1, groups = 6 } },
  { 1, 18, 130, 60, 18, 7, { padding = 3, groups = 18 } }, { 5, 33, 7, 7, 33, 7, { padding = 3, groups = 33 } },
  { 1, 20, 60, 66, 20, 5, { stride = 2, padding = 2, groups = 20 } },
  { 2, 17, 33, 12, 17, 3, { stride = { 1, 3 }, padding = 2, dilation = { 3, 2 }, groups = 17 } },
  { 1, 16, 90, 90, 16, 3, { padding = 1 } }, { 17, 16, 7, 7, 64, 3, { padding = 1 } },
  { 2, 4, 9, 9, 4, 4, { stride = { 1, 3 }, padding = { 2, 0 } } },
  { 5, 21, 29, 31, 19, 1, {} }, { 5, 33, 28, 26, 30, 1, { stride = 2 } },
}

-- `first`: what dtype the numbers are rounded to before, if they are.
local function convolve(s, dtype, first)
  ty.manual_seed(5)
  local groups = s[7].groups or 1
  local x = ty.randn(s[1], s[2], s[3], s[4], { dtype = "f64" }):to(first or dtype):to(dtype):requires_grad_()
  local w = ty.randn(s[5], s[2] // groups, s[6], s[6], { dtype = "f64" }):to(first or dtype):to(dtype):requires_grad_()
  local b = ty.randn(s[5], { dtype = "f64" }):to(first or dtype):to(dtype):requires_grad_()
  local y = ty.conv2d(x, w, b, s[7])
  local g = ty.randn(y.shape, { dtype = "f64" }):to(first or dtype):to(dtype)
  local dx = ty.grad((y * g):sum(), { x, w, b })
  return { y:detach(), dx[1], dx[2], dx[3] }
end

test("f32 convolutions and their gradients agree with f64 ones", function()
  for i, s in ipairs(convolutions) do
    local p, q = convolve(s, "f32"), convolve(s, "f64")
    for j = 1, 4 do
      local off = largest(p[j]:to "f64" - q[j]) / (largest(q[j]) + 1)
      close(off, 0, 1e-5, ("convolution %d, result %d"):format(i, j))
    end
  end
end)

-- Channels that fill tiles of the CPU's, and do not; strides, paddings, dilations and kernels of every kind.
local of_halves = {
  { 2, 64, 13, 17, 64, 3, { padding = 1 } }, { 2, 40, 9, 11, 50, 3, { stride = 2, padding = 1 } },
  { 3, 64, 14, 14, 70, 1, {} }, { 2, 64, 15, 14, 64, 1, { stride = 2 } },
  { 2, 3, 33, 30, 64, 7, { stride = 2, padding = 3 } },
  { 2, 3, 20, 21, 33, 3, { padding = 1 } }, { 9, 32, 7, 7, 96, 3, { padding = 1 } },
  { 2, 64, 12, 13, 64, 3, { padding = 1, groups = 2 } }, { 2, 20, 19, 18, 24, 5, { padding = 4, dilation = 2 } },
  { 2, 33, 10, 12, 40, 3, {} }, { 2, 16, 16, 16, 16, 4, { stride = 2, padding = 1 } },
  { 1, 16, 30, 30, 20, 2, { stride = 2 } }, { 2, 5, 16, 19, 16, 5, { padding = 2 } },
  { 1, 70, 80, 90, 33, 3, { padding = 1 } },
  { 2, 16, 14, 15, 16, 5, { stride = 3, padding = 2 } },
  { 2, 48, 18, 18, 64, 3, { stride = 2, padding = 1, dilation = 2 } },
  { 2, 17, 11, 9, 3, 3, { padding = 1 } }, { 2, 16, 9, 9, 12, 3, { stride = { 1, 2 }, padding = { 0, 1 } } },
  { 2, 18, 6, 6, 20, 9, { padding = 4 } }, { 1, 100, 8, 8, 40, 1, { padding = 1 } },
}

test("convolutions of bf16 and their gradients agree with f64 ones, rounded once", function()
  for _, list in ipairs { convolutions, of_halves } do
    for i, s in ipairs(list) do
      local p, q = convolve(s, "bf16"), convolve(s, "f64", "bf16")
      for j = 1, 3 do
        local off = (p[j]:to "f64" - q[j]):abs() - q[j]:abs() * 2 ^ -8
        close(math.max(off:max():item(), 0) / (largest(q[j]) + 1), 0, 1e-5, ("convolution %d, result %d"):format(i, j))
      end
    end
  end
end)

test("f32 convolutions of many channels agree with f64 ones", function()
  for i, s in ipairs(of_halves) do
    local p, q = convolve(s, "f32"), convolve(s, "f64")
    for j = 1, 4 do
      close(largest(p[j]:to "f64" - q[j]) / (largest(q[j]) + 1), 0, 1e-5, ("convolution %d, result %d"):format(i, j))
    end
  end
end)

test("the epilogue of a convolution of bf16 is that of its sums", function()
  ty.manual_seed(6)
  local x, w = ty.randn(2, 32, 15, 17):to "bf16", ty.randn(40, 32, 3, 3):to "bf16"
  local b, r = ty.randn(40):to "bf16", ty.randn(2, 40, 15, 17):to "bf16"
  local function run(kind)
    return ty.conv2d(x:to(kind), w:to(kind), b:to(kind), { padding = 1, residual = r:to(kind), activation = "silu" })
  end
  local p, q = run "bf16", run "f64"
  local off = (p:to "f64" - q):abs() - q:abs() * 2 ^ -8
  close(math.max(off:max():item(), 0) / largest(q), 0, 1e-5)
end)

test("infinities in a convolution of bf16 stay near what sees them", function()
  local x, w = ty.ones(1, 32, 12, 12):to "bf16", ty.ones(32, 32, 3, 3):to "bf16"
  x["0, 3, 11, 11"] = 1 / 0
  local y = ty.conv2d(x, w:requires_grad_(), nil, { padding = 1 })
  local function finite(z) return z:to "f32":isfinite():all():item() end
  check.ok(not finite(y["0, 0, 10, 10"]), "what sees it")
  check.ok(finite(y["0, :, :8"]) and finite(y["0, :, :, :8"]), "far from it") -- Winograd's tiles are of 4
  y:backward(ty.ones(y.shape):to "bf16")
  check.ok(finite(w.grad[":, :3"]) and finite(w.grad[":, 4:"]), "other channels")
  check.ok(not finite(w.grad[":, 3"]), "its channel")
end)

test("max_pool2d over long rows agrees with the largest of shifted slices", function()
  ty.manual_seed(11)
  local x = ty.randn(2, 3, 9, 200)
  for _, s in ipairs { { 2, 2, 0, 1 }, { 3, 1, 1, 1 }, { 3, 2, 1, 4 }, { 5, 3, 2, 7 }, { 2, 1, 1, 3 } } do
    local kernel, stride, padding, dilation = s[1], s[2], s[3], s[4]
    local y, at = ty.max_pool2d(x, { 1, kernel }, { 1, stride }, { 0, padding }, { 1, dilation })
    local wide, n, want = ty.pad(x, { padding, padding }, "constant", -1 / 0), y.shape[4], nil
    for k = 0, kernel - 1 do
      local part = wide:slice(3, k * dilation, k * dilation + (n - 1) * stride + 1, stride)
      want = want and want:maximum(part) or part
    end
    equal(largest(y - want), 0, "kernel, stride, padding, dilation " .. table.concat(s, " "))
    equal(largest(x:reshape(2, 3, 1800):gather(2, at:reshape(2, 3, 9 * n)):reshape(2, 3, 9, n) - y), 0, "positions")
  end
end)

test("results do not depend on the number of threads", function()
  local threads = ty.threads()
  local function run()
    ty.manual_seed(7)
    local all = {}
    for _, s in ipairs(sizes) do all[#all + 1] = ty.matmul(ty.randn(s[1], s[3]), ty.randn(s[3], s[2])) end
    for _, s in ipairs(convolutions) do
      for _, t in ipairs(convolve(s, "f32")) do all[#all + 1] = t end
    end
    for _, s in ipairs(of_halves) do
      for _, t in ipairs(convolve(s, "bf16")) do all[#all + 1] = t:to "f32" end
    end
    return all
  end
  ty.set_threads(1)
  local one = run()
  for _, n in ipairs { 2, 3 } do
    ty.set_threads(n)
    local many = run()
    for i = 1, #one do equal(largest(one[i] - many[i]), 0, ("%d threads, result %d"):format(n, i)) end
  end
  ty.set_threads(threads)
end)

test("infinities and NaN stay where they belong", function()
  local x = ty.ones(40, 30)
  x["3, 5"] = 1 / 0
  x["7, 2"] = 0 / 0
  local y = ty.matmul(x, ty.ones(30, 35))
  equal(y:isfinite():logical_not():sum():item(), 70)
  equal(y:isnan():sum():item(), 35)
  local image = ty.ones(1, 4, 20, 21)
  image["0, 1, 4, 20"] = 1 / 0
  local g = ty.ones(1, 4, 20, 21)
  local w = ty.ones(4, 1, 3, 3):requires_grad_()
  local dw = ty.grad((ty.conv2d(image, w, { padding = 1, groups = 4 }) * g):sum(), { w })[1]
  equal(dw:isfinite():logical_not():sum():item(), 6, "the last column is seen by two of three taps")
end)

test("memory is flat over many steps", function()
  local function step()
    ty.scope(function()
      for _, s in ipairs { convolutions[1], convolutions[7] } do convolve(s, "f32") end
      ty.matmul(ty.randn(130, 700), ty.randn(700, 90))
    end)
  end
  for _ = 1, 3 do step() end
  collectgarbage()
  collectgarbage()
  local before = ty.memory.stats("cpu").live
  for _ = 1, 20 do step() end
  collectgarbage()
  collectgarbage()
  equal(ty.memory.stats("cpu").live, before)
end)

test("rearrange and einsum through \"...\"", function()
  local x = ty.arange(120):reshape(2, 3, 4, 5)
  equal(ty.rearrange(x, "a ... d -> d ... a"):tolist(), x:permute(3, 1, 2, 0):tolist())
  equal(ty.rearrange(x, "... d -> (... d)"):tolist(), x:reshape(120):tolist())
  equal(ty.rearrange(x, "a (b one) ... -> ... (one a) b", { one = 1 }).shape, { 4, 5, 2, 3 })
  fails(function() return ty.rearrange(x, "a b ... c d e -> a b c d e ...") end, "has 5 dimensions on the left side")
  fails(function() return ty.rearrange(x, "a ... -> a") end, "\"...\" is missing on the right side")
  fails(function() return ty.rearrange(x, "a b c d -> a b c d d") end, "axis d is named twice on the right side")
  fails(function() return ty.rearrange(x, "a b c 5 -> a b c") end, "axis 5 is a number")
  fails(function() return ty.rearrange(x, "(a b c d -> a b c d") end, "\"(\" without \")\"")
  local p, q = ty.randn(2, 3, 4), ty.randn(3, 4, 5)
  close(largest(ty.einsum("...ij,...jk->...ik", p:unsqueeze(1), q) - ty.matmul(p:unsqueeze(1), q)), 0, 1e-5)
end)

check.finish()
