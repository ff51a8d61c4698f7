-- Attention and its gradients at sizes that fill tiles of keys, queries and products, compared with f64 of the same
-- numbers, which runs on kernels of its own.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

local test, equal, close = check.test, check.equal, check.close

local function largest(x) return x:abs():max():item() end

-- b, h, hkv, t, s, d, dv, options; swapped: heads and positions change places in memory
local shapes = {
  { 1, 2, 2, 300, 300, 64, 64, { causal = true } }, { 2, 4, 2, 100, 200, 40, 80, {} },
  { 1, 3, 1, 64, 500, 33, 17, { causal = true } }, { 1, 16, 16, 130, 130, 128, 64, { causal = true }, swapped = true },
  { 1, 4, 4, 40, 129, 64, 64, { softcap = 5 } },
  { 1, 2, 1, 600, 600, 64, 96, { causal = true, window = 90, sinks = 3 } },
  { 2, 8, 8, 512, 512, 64, 64, {}, swapped = true }, { 1, 8, 4, 512, 640, 96, 64, { causal = true, softcap = 20 } },
  { 1, 2, 2, 200, 150, 32, 32, { causal = true } }, { 1, 2, 2, 7, 700, 64, 64, { causal = true } },
  { 1, 2, 2, 260, 260, 32, 48, { causal = true, cu_seqlens = ty.tensor({ 0, 31, 160, 250 }, { dtype = "i64" }) } },
}

local function random(shape, swapped)
  if not swapped then return ty.randn(shape, { dtype = "f64" }) end
  return ty.randn({ shape[1], shape[3], shape[2], shape[4] }, { dtype = "f64" }):transpose(1, 2)
end

local function attend(s, dtype, kind, mask)
  ty.manual_seed(3)
  local b, h, hkv, t, keys, d, dv = table.unpack(s)
  local x = { { b, h, t, d }, { b, hkv, keys, d }, { b, hkv, keys, dv } }
  for i, shape in ipairs(x) do x[i] = random(shape, s.swapped):to(dtype):to(kind):detach():requires_grad_() end
  local g = random({ b, h, t, dv }):to(dtype):to(kind)
  local y = ty.scaled_dot_product_attention(x[1], x[2], x[3], mask, s[8])
  local dx = ty.grad((y * g):sum(), x)
  return { y:detach(), dx[1], dx[2], dx[3] }
end

local tolerance = { f32 = 1e-5, bf16 = 6e-3, f16 = 1e-3 } -- the gradients of halves see a result that was rounded

local function compare(s, what, mask)
  for dtype, bar in pairs(tolerance) do
    local p, q = attend(s, dtype, dtype, mask), attend(s, dtype, "f64", mask)
    for j = 1, 4 do
      local off = largest(p[j]:to "f64" - q[j]) / (largest(q[j]) + 1e-3)
      close(off, 0, bar, ("%s, %s, result %d"):format(what, dtype, j))
    end
  end
end

test("attention and its gradients agree with f64", function()
  for i, s in ipairs(shapes) do compare(s, "shape " .. i) end
end)

test("so they do under masks", function()
  ty.manual_seed(4)
  compare({ 2, 4, 4, 96, 160, 64, 64, {} }, "bool", ty.randn(2, 1, 96, 160):gt(-0.5))
  compare({ 2, 4, 4, 96, 160, 64, 64, {} }, "added", ty.randn(96, 160))
end)

test("what is not seen does not matter, not even infinities and NaN", function()
  for _, dtype in ipairs { "f32", "bf16" } do
    local n, cut = 640, 520
    ty.manual_seed(5)
    local q, k, v = ty.randn(1, 2, n, 64):to(dtype), ty.randn(1, 2, n, 64):to(dtype), ty.randn(1, 2, n, 64):to(dtype)
    local want = ty.scaled_dot_product_attention(q, k, v, nil, true):narrow(2, 0, cut)
    local dirty = k:clone()
    dirty["0, 0, 639, 5"] = 0 / 0
    dirty["0, 1, 638, 7"] = 1 / 0
    local got = ty.scaled_dot_product_attention(q, dirty, v, nil, true):narrow(2, 0, cut)
    close(largest(got:to "f32" - want:to "f32"), 0, dtype == "f32" and 1e-5 or 2e-2, dtype)
  end
end)

test("results do not depend on the number of threads", function()
  local threads = ty.threads()
  for _, dtype in ipairs { "f32", "bf16" } do
    for i, s in ipairs(shapes) do
      ty.set_threads(1)
      local one = attend(s, dtype, dtype)
      ty.set_threads(3)
      local many = attend(s, dtype, dtype)
      for j = 1, 4 do
        local off = largest(one[j]:to "f32" - many[j]:to "f32")
        equal(off, 0, ("%s, shape %d, result %d"):format(dtype, i, j))
      end
    end
  end
  ty.set_threads(threads)
end)

test("outputs of ops that serve backward rules: the log-sum-exps of scores", function()
  local q, k, v = ty.randn(1, 4, 5, 8), ty.randn(1, 2, 9, 8), ty.randn(1, 2, 9, 8)
  local y, lse = ty.core.outputs_core.scaled_dot_product_attention(q, k, v, nil, false, 0.5)
  equal(y:equal((ty.scaled_dot_product_attention(q, k, v, nil, false, 0.5))), true)
  equal(select("#", ty.scaled_dot_product_attention(q, k, v)), 1)
  local scores = q:reshape(1, 2, 10, 8):matmul(k:transpose(2, 3)) * 0.5
  close(lse:tolist(), scores:logsumexp(-1):reshape(1, 4, 5):tolist(), 1e-5)
  check.fails(function() ty.core.outputs_core.scaled_dot_product_attention(q, k) end, "v")
end)

check.finish()
