-- Block-quantized tensors: the bytes of the formats against ggml's reference (tests/fixtures/make_quant.py), and what
-- such tensors allow and refuse.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

local test, equal, ok, fails = check.test, check.equal, check.ok, check.fails
local fixture = ty.io.load(here .. "../fixtures/quant.npz")
local bytes, from = ty.io.to_bytes, ty.io.from_bytes

local function rms(x) return x:square():mean():sqrt():item() end

test("q8_0 and q4_0 encode as the reference does, bit for bit", function()
  for _, dtype in ipairs { "q8_0", "q4_0" } do
    ok(bytes(fixture.x:to(dtype)) == bytes(fixture[dtype .. "_blocks"]), dtype)
  end
end)

test("all of ggml's formats decode as the reference does, bit for bit", function()
  for _, dtype in ipairs { "q8_0", "q4_0", "q2_k", "q3_k", "q4_k", "q6_k" } do
    local x = from(bytes(fixture[dtype .. "_blocks"]), dtype, { 6, 512 })
    ok(bytes(x:to "f32") == bytes(fixture[dtype .. "_values"]), dtype)
  end
end)

test("mxfp4 and the blocks of nvfp4 decode as ggml's do, bit for bit; rows of nvfp4 have a factor", function()
  ok(bytes(from(bytes(fixture.mxfp4_blocks), "mxfp4", { 6, 512 }):to "f32") == bytes(fixture.mxfp4_values))
  local blocks, rows = bytes(fixture.nvfp4_blocks), {}
  for _, factor in ipairs { 1.0, 0.25 } do
    for i = 0, 5 do rows[i + 1] = string.pack("<f", factor) .. blocks:sub(i * 288 + 1, i * 288 + 288) end
    local x = from(table.concat(rows), "nvfp4", { 6, 512 }):to "f32"
    ok(bytes(x) == bytes(fixture.nvfp4_values * factor), "factor " .. factor)
  end
end)

test("mxfp4 loses no more than ggml's encoder; both encode what quant.fp4 computes", function()
  local fp4 = require("tycho.quant").fp4
  ok(rms(fixture.x:to "mxfp4":to "f32" - fixture.x) <= rms(fixture.mxfp4_of_x - fixture.x) * (1 + 1e-6))
  ty.manual_seed(9)
  local x = ty.randn(5, 256) * ty.rand(5, 1):mul(12):sub(6):exp()
  ok(x:to "mxfp4":to "f32":eq((fp4.quantize(x, { scale = "e8m0", block = 32 }))):all():item(), "mxfp4")
  for i = 0, 4 do
    local row = x:narrow(0, i, 1)
    local want = fp4.quantize(row, { scale = "e4m3", block = 16, tensor = true })
    check.close((row:to "nvfp4":to "f32" - want):abs():max():item(), 0, row:abs():max():item() * 1e-6, "nvfp4")
  end
  local ties = ty.tensor { 6, -6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -5, 5.1, 0.26, 0, -3.5 }:tile(2)
  check.close(ties:reshape(1, 32):to "mxfp4":to "f32":tolist()[1], ty.tensor { 6, -6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -4, 6,
    0.5, 0, -4 }:tile(2):tolist(), 0)
end)

test("importance: mxfp4 and nvfp4 take a neighbour of the scale where that loses less", function()
  ty.manual_seed(10)
  local x, w = ty.randn(16, 512), ty.rand(512):mul(6):exp()
  for _, dtype in ipairs { "mxfp4", "nvfp4" } do
    local function loss(y) return ((y:to "f32" - x):square() * w):sum():item() end
    local with, without = loss(x:quantize(dtype, w)), loss(x:to(dtype))
    ok(with < 0.97 * without, ("%s: %g of %g"):format(dtype, with, without))
    ok(bytes(x["3:4"]:quantize(dtype, w)) == bytes(x:quantize(dtype, w)["3:4"]), dtype)
  end
end)

test("errors of encoding random normal numbers, and bytes", function()
  ty.manual_seed(1)
  local x = ty.randn(8, 32768)
  for dtype, want in pairs { -- rms error, bits of an element
    q8_0 = { 0.0055, 8.5 }, q4_0 = { 0.088, 4.5 }, q2_k = { 0.33, 2.625 },
    q3_k = { 0.165, 3.4375 }, q4_k = { 0.073, 4.5 }, q6_k = { 0.0185, 6.5625 },
    nf4 = { 0.0925, 4.127 }, mxfp4 = { 0.115, 4.25 }, nvfp4 = { 0.0955, 4.501 },
  } do
    local y = x:to(dtype)
    equal(y.dtype, dtype)
    ok(rms(y:to "f32" - x) < want[1], dtype .. ": rms error")
    check.close(#bytes(y) * 8 / x:numel(), want[2], 1e-4, dtype .. ": bits")
  end
end)

test("nf4 keeps its levels", function()
  -- Appendix E of the QLoRA paper
  local level = {
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022833234,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
  }
  local values = {}
  for i = 0, 63 do values[i + 1] = level[i * 7 % 16 + 1] * 3 end
  local x = ty.tensor(values):reshape(1, 64)
  check.close(x:to "nf4":to "f32":tolist()[1], values, 1e-6)
end)

test("blocks with NaN or infinity do not decode to numbers; zeros stay zeros", function()
  for dtype in pairs { q8_0 = 1, q4_0 = 1, q2_k = 1, q3_k = 1, q4_k = 1, q6_k = 1, nf4 = 1, mxfp4 = 1, nvfp4 = 1 } do
    local x = ty.ones(2, 256)
    x:select(0, 1):slice(0, 3, 4):fill_(0 / 0)
    local y = x:to(dtype):to "f32"
    ok(y:select(0, 0):isfinite():all():item(), dtype)
    ok(y:select(0, 1):slice(0, 0, 32):isnan():any():item(), dtype)
    ok(ty.zeros(2, 256):to(dtype):to "f32":eq(0):all():item(), dtype)
  end
end)

test("views of whole rows", function()
  ty.manual_seed(2)
  for dtype in pairs { q8_0 = 1, q4_0 = 1, q2_k = 1, q3_k = 1, q4_k = 1, q6_k = 1, nf4 = 1, mxfp4 = 1, nvfp4 = 1 } do
    local q = ty.randn(8, 512):to(dtype)
    local x = q:to "f32"
    ok(q["2:5"]:to "f32":eq(x["2:5"]):all():item(), dtype .. " slice")
    ok(q:select(0, 3):to "f32":eq(x:select(0, 3)):all():item(), dtype .. " select")
    ok(q:reshape(2, 4, 512):select(0, 1):to "f32":eq(x["4:8"]):all():item(), dtype .. " reshape")
    ok(q:detach():clone():to "f32":eq(x):all():item(), dtype .. " clone")
    ok(ty.embedding(q, ty.tensor { 7, 0 }):eq(ty.embedding(x, ty.tensor { 7, 0 })):all():item(), dtype)
    fails(function() return q:transpose(0, 1) end, "views of whole rows only")
    fails(function() return q[":, 0:256"] end, "views of whole rows only")
    fails(function() return q["::2"] end, "views of whole rows only")
    fails(function() return q:reshape(16, 256) end, "views of whole rows only")
    fails(function() return q:unsqueeze(0):expand(2, 8, 512) end, "views of whole rows only")
  end
end)

test("what they are not for is an error", function()
  local x = ty.ones(2, 32)
  local q = x:to "q8_0"
  fails(function() return q + 1 end, "add: x: expected a tensor that is not block%-quantized")
  fails(function() return x + q end, "add: y: expected")
  fails(function() return q:sum() end, "sum: x: expected")
  fails(function() return ty.concat { q, q } end, "concat")
  fails(function() return q:fill_(1) end, "fill_")
  fails(function() return x:copy_(q) end, "copied only to or from")
  fails(function() return q:copy_(x) end, "copied only to or from")
  fails(function() return q:requires_grad_() end, "float")
  fails(function() return ty.zeros(2, 32, { dtype = "q8_0" }) end, "not block%-quantized, got q8_0")
  fails(function() return ty.tensor({ 1 }, { dtype = "q8_0" }) end, "numbers are not q8_0")
  fails(function() return x:to "q4_k" end, "multiple of 256")
  fails(function() return from("123", "q8_0", { 1, 32 }) end, "needs 34")
  fails(function() return ty.io.save_safetensors("/dev/null", { q = q }) end, "has no q8_0")
  fails(function() return ty.io.save_npy("/dev/null", q) end,
    "has no q8_0; convert to f32 first, or save as .gguf")
  fails(function() return ty.io.save_npy("/dev/null", ty.ones(2, 64):to "nf4") end, "has no nf4; convert to f32 first$")
  fails(function() return ty.io.save_npy("/dev/null", ty.ones(2, 64):to "nvfp4") end, "has no nvfp4; convert to f32")
end)

test("printing, values, copies, another format, meta", function()
  local q = ty.tensor { { 1.5, 2, 3, 4 } }:tile(1, 8):to "q8_0"
  ok(tostring(q):find("tensor [1, 32] q8_0 cpu", 1, true), tostring(q))
  equal(#q:tolist()[1], 32)
  equal(q:to "q4_0".dtype, "q4_0")
  equal(q:to "f16".dtype, "f16")
  equal(q:to "meta".dtype, "q8_0")
  local other = ty.zeros(1, 32):to "q8_0"
  other:copy_(q)
  ok(bytes(other) == bytes(q), "copy_")
  local w = ty.randn(2, 32):requires_grad_()
  equal(w:to "q8_0".requires_grad, false)
end)

-- Sizes: rows, outputs, inputs; few rows, tiles, remainders of both, long and short k, x past half the first cache.
local sizes = {
  { 1, 70, 512 }, { 3, 33, 2304 }, { 8, 40, 256 }, { 5, 31, 5632 }, { 9, 33, 768 }, { 70, 65, 2304 }, { 530, 40, 512 },
  { 2, 3, 64 }, { 20, 5, 320 }, { 7, 5, 576 }, { 1, 6, 17408 }, { 2, 6, 9216 }, { 4, 9, 1280 }, { 6, 5, 3072 },
  { 90, 40, 96 }, { 600, 300, 256 },
}
local function each_product(f)
  for dtype, block in pairs { q8_0 = 32, q4_0 = 32, q2_k = 256, q3_k = 256, q4_k = 256, q6_k = 256, nf4 = 64,
    mxfp4 = 32, nvfp4 = 64 } do
    for _, size in ipairs(sizes) do
      local m, n, k = table.unpack(size)
      if k % block == 0 then
        f(dtype, m, n, k, (ty.randn(n, k) * 0.05):to(dtype), ("%s %d x %d x %d"):format(dtype, m, n, k))
      end
    end
  end
end

test("products: the error is that of rounding x, the gradient that of the decoded weight", function()
  ty.manual_seed(3)
  each_product(function(dtype, m, n, k, w, what)
    local x, bias, g = ty.randn(m, k):requires_grad_(), ty.randn(n):requires_grad_(), ty.randn(m, n)
    local wide = w:to "f64"
    local y = ty.linear(x, w, bias)
    local off = (y:detach():to "f64" - ty.linear(x:detach():to "f64", wide, bias:detach():to "f64")):abs()
    local function most(a, group) -- the largest magnitude of each group
      local rows = a.shape[1]
      return a:reshape(rows, k // group, group):abs():max(2, true):expand(rows, k // group, group):reshape(rows, k)
    end
    local bound
    if dtype == "nf4" then -- to words, both x and the levels, or not at all
      bound = ty.linear(most(x:detach():to "f64", 64) / 32766, wide:abs())
        + ty.linear(x:detach():to "f64":abs(), most(wide, 64) / 32766) + 2e-5
    else
      local steps = (dtype == "q4_0" or dtype == "q4_k") and 127 or 254 -- of powers of two
      bound = ty.linear(most(x:detach():to "f64", 32) / steps, wide:abs()) * 1.001 + 2e-5
    end
    ok((off / bound):max():item() <= 0.5, what) -- errors do not all add up
    y:backward(g)
    check.close((x.grad:to "f64" - ty.matmul(g:to "f64", wide)):abs():max():item(), 0, 2e-5, what .. " gradient of x")
    check.close((bias.grad - g:sum(0)):abs():max():item(), 0, 1e-4, what .. " gradient of bias")
  end)
end)

test("products: groups of very small and large numbers, weights of zeros, far from 1, and not finite", function()
  ty.manual_seed(8)
  local function factors(rows, groups, list) -- a factor for each group of 32, in turn
    local f = {}
    for i = 1, rows * groups do f[i] = list[(i - 1) % #list + 1] end
    return ty.tensor(f):reshape(rows, groups, 1):expand(rows, groups, 32):reshape(rows, groups * 32)
  end
  for _, dtype in ipairs { "q4_0", "q8_0", "q2_k", "q3_k", "q4_k", "q6_k", "mxfp4", "nvfp4" } do
    for _, xs in ipairs { { 1 }, { 1, 1e-5, 1e7, 0, 3e-3 }, { 1e-18, 1, 1e-25 }, { 1e18 }, { 1e30 }, { 1e-28 } } do
      local function compare(w, what, rows)
        rows = rows or 20
        local x = ty.randn(rows, 512) * factors(rows, 16, xs)
        local exact = ty.linear(x:to "f64", w:to "f64")
        local most = x:abs():reshape(rows, 16, 32):max(2, true):expand(rows, 16, 32):reshape(rows, 512)
        local bound = ty.linear(most:to "f64" / 127, w:to "f64":abs()) * 1.001 + 1e-5 * xs[1]
        local y, few = ty.linear(x, w), ty.linear(x["0:3"], w)
        local function within(z, first, last)
          return ((z:to "f64" - exact:narrow(0, first, last)):abs() / bound:narrow(0, first, last)):max():item() <= 0.5
        end
        ok(within(y, 0, rows), ("%s %s x %g"):format(dtype, what, xs[#xs]))
        ok(within(few, 0, 3), ("%s %s x %g, few rows"):format(dtype, what, xs[#xs]))
        -- without VNNI or AVX2, many rows on these two are multiplied in f32
        if dtype ~= "q2_k" and dtype ~= "q3_k" then
          check.close((few - y["0:3"]):abs():max():item() / y:abs():max():item(), 0, 1e-5, "few rows")
        end
      end
      compare(ty.randn(40, 512):to(dtype), "plain weights")
      compare(ty.randn(40, 512):to(dtype), "plain weights, on tiles where the CPU has them", 90)
      compare((ty.randn(40, 512) * factors(40, 16, { 1, 0, 0.01 })):to(dtype), "weights of zeros", 90)
      compare((ty.randn(40, 512) * factors(40, 16, { 1, 100, 1e-4 })):to(dtype), "weights small and large", 90)
    end
    local w = ty.randn(40, 512)
    w["3, 40"] = 0 / 0
    local y = ty.linear(ty.randn(90, 512), w:to(dtype))
    ok(not y[":, 3"]:isfinite():any():item(), dtype .. " NaN in a weight")
    ok(y[":, 4:40"]:isfinite():all():item(), dtype .. " other weights")
  end
end)

test("products: codes at their ends, rows that fill no tile, numbers that are wholes", function()
  -- all bytes of x and of W alike and at their ends: sums of products are the largest there are
  local function q8(n, k, code, halves)
    local blocks = {}
    for i = 1, n * k // 32 do
      blocks[i] = string.pack("<I2", halves[i % #halves + 1]) .. string.char(code(i) & 255):rep(32)
    end
    return from(table.concat(blocks), "q8_0", { n, k })
  end
  local one, tiny, huge = 0x3c00, 0x0001, 0x7bff -- of f16
  for _, rows in ipairs { 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 21, 90, 97 } do
    for _, size in ipairs { { 17, 256 }, { 5, 288 }, { 33, 96 } } do
      local n, k = table.unpack(size)
      for _, codes in ipairs { { -128, -128 }, { 127, -128 }, { -127, 127 }, { -128, 0 } } do
        local w = q8(n, k, function(i) return codes[i % 2 + 1] end, { one })
        for _, sign in ipairs { 1, -1 } do
          local x = ty.ones(rows, k) * (127 * sign)
          ok(ty.linear(x, w):eq(ty.matmul(x, w:to "f32":transpose(0, 1))):all():item(), "codes at their ends")
        end
      end
      local w = q8(n, k, function(i) return i * 37 % 256 - 128 end, { one, tiny, huge })
      local x = ty.ones(rows, k) * 127
      x[":, 32:64"]:fill_(0) -- a group of zeros
      local exact = ty.linear(x:to "f64", w:to "f64")
      local most = ty.linear(x:abs():to "f64", w:to "f64":abs()):max():item()
      check.close((ty.linear(x, w):to "f64" - exact):abs():max():item() / most, 0, 4e-6, "scales at their ends")
    end
  end
  ty.manual_seed(12)
  for dtype, block in pairs { q4_0 = 32, q2_k = 256, q3_k = 256, q4_k = 256, q6_k = 256, mxfp4 = 32, nvfp4 = 64 } do
    for _, rows in ipairs { 9, 21, 25, 98 } do -- x of wholes, each group with 127: its rounding loses nothing
      local k = block == 256 and 512 or 320
      local x = ty.ones(rows, k) * 127
      local w = (ty.randn(19, k):sign() * 0.25):to(dtype)
      local exact = ty.linear(x:to "f64", w:to "f64")
      local most = ty.linear(x:abs():to "f64", w:to "f64":abs()):max():item()
      check.close((ty.linear(x, w):to "f64" - exact):abs():max():item() / most, 0, 4e-6, dtype)
    end
  end
end)

test("products: scales of E8M0 and E4M3 at their ends", function()
  ty.manual_seed(11)
  local function compare(dtype, block, scales, x, what)
    local w = {}
    for i = 1, 6 * 16 do w[i] = block(scales, i) end
    local k = dtype == "mxfp4" and 512 or 1024
    if dtype == "nvfp4" then
      for i = 1, 6 * 16, 16 do w[i] = string.pack("<f", 0.5) .. w[i] end
    end
    w = from(table.concat(w), dtype, { 6, k })
    for _, rows in ipairs { 1, 3, 20 } do
      local part = x(rows, k)
      local exact = ty.linear(part:to "f64", w:to "f64")
      local y = ty.linear(part, w):to "f64"
      ok(y:isnan():eq(exact:isnan()):all():item(), ("%s %s, %d rows: NaN"):format(dtype, what, rows))
      local off = (y - exact):abs():masked_fill(exact:isnan(), 0):max():item()
      check.close(off / ty.linear(part:to "f64":abs(), w:to "f64":abs()):nan_to_num(0):max():item(), 0, 4e-3, what)
    end
  end
  local function codes(n, i)
    local b = {}
    for j = 1, n do b[j] = string.char((37 * i + 11 * j + i * j // 3) % 256) end
    return table.concat(b)
  end
  local function mx(scales, i) return string.char(scales[i % #scales + 1]) .. codes(16, i) end
  local function nv(scales, i)
    local s = {}
    for j = 1, 4 do s[j] = string.char(scales[(3 * i + j) % #scales + 1]) end
    return table.concat(s) .. codes(32, i)
  end
  local function numbers(size) return function(rows, k) return ty.randn(rows, k) * size end end
  compare("mxfp4", mx, { 0, 1, 2, 3, 5 }, numbers(1e20), "the smallest scales")
  compare("mxfp4", mx, { 240, 239, 238 }, numbers(1e-20), "large scales")
  compare("nvfp4", nv, { 0, 1, 2, 7, 8, 126, 56 }, numbers(1), "all kinds of scales")
  local function rare(n, usual, nan)
    local list = {}
    for i = 1, n do list[i] = usual + i % 9 end
    list[5] = nan
    return list
  end
  compare("mxfp4", mx, rare(37, 120, 255), numbers(1), "a block of NaN")
  compare("nvfp4", nv, rare(97, 50, 127), numbers(1), "a block of NaN")
end)

test("products: the same bits for every number of threads", function()
  ty.manual_seed(4)
  local before = ty.threads()
  each_product(function(_, m, _, k, w, what)
    local x = ty.randn(m, k)
    ty.set_threads(1)
    local one = bytes(ty.linear(x, w))
    ty.set_threads(3)
    ok(one == bytes(ty.linear(x, w)), what)
  end)
  ty.set_threads(before)
end)

test("linear with activation and residual, other dtypes of x, weights that are views, NaN and infinity", function()
  ty.manual_seed(5)
  local w, x, r, b = (ty.randn(12, 64) * 0.1):to "q8_0", ty.randn(5, 64), ty.randn(5, 12), ty.randn(12)
  local plain = ty.linear(x, w, b)
  local function near(a, c, tol, what) check.close((a:to "f32" - c):abs():max():item(), 0, tol, what) end
  near(ty.linear(x, w, b, r, "silu"), (plain + r):silu(), 1e-6, "activation and residual")
  local leaf, residual = x:clone():requires_grad_(), r:clone():requires_grad_()
  ty.linear(leaf, w, b, residual, "gelu"):sum():backward()
  ok(leaf.grad and residual.grad, "gradients")
  for _, dtype in ipairs { "f16", "bf16", "f64" } do
    local y = ty.linear(x:to(dtype), w, b)
    equal(y.dtype, dtype)
    near(y, plain, dtype == "bf16" and 0.05 or 0.02, dtype)
  end
  near(ty.linear(x, w["3:7"], b["3:7"]), plain[":, 3:7"], 1e-6, "rows of w")
  near(ty.linear(ty.randn(64, 5):transpose(0, 1), w), ty.zeros(5, 12), 10, "x turned")
  for _, dtype in ipairs { "q8_0", "q2_k", "q3_k", "nf4", "mxfp4", "nvfp4" } do
    local v = (ty.randn(12, 256) * 0.1):to(dtype)
    for _, bad in ipairs { 0 / 0, math.huge, -math.huge } do
      for _, rows in ipairs { 2, 20, 90 } do
        local y = ty.randn(rows, 256)
        y["1, 40"] = bad
        local z = ty.linear(y, v)
        ok(not z[1]:isfinite():any():item(), dtype .. ": not finite")
        ok(z[0]:isfinite():all():item(), dtype .. ": the other rows are")
      end
    end
  end
  fails(function() return ty.linear(w, w) end, "x: expected a float tensor")
  fails(function() return ty.matmul(x, w) end, "matmul: y: expected")
end)

test("compiled products", function()
  ty.manual_seed(6)
  local w = (ty.randn(40, 64) * 0.1):to "q4_0"
  local f = ty.compile(function(x) return ty.linear(x, w):relu() end)
  for _ = 1, 3 do
    local x = ty.randn(9, 64)
    ok(bytes(f(x)) == bytes(ty.linear(x, w):relu()), "replayed")
  end
end)

check.finish()
