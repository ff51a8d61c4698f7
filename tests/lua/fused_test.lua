-- What the rows of norms, attention, losses and dropout cannot show: running statistics, random masks, memory, and
-- agreement of the fused kernels with compositions at sizes where they cut their work.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

local test, equal, close, ok, fails = check.test, check.equal, check.close, check.ok, check.fails

local function largest(x) return x:abs():max():item() end

test("dropout draws p of the elements, scales the rest, and its gradient has the same mask", function()
  ty.manual_seed(3)
  local n, p = 200000, 0.3
  local x = ty.ones(n, { dtype = "f64" }):requires_grad_()
  local y = ty.dropout(x, p)
  local kept = y:detach():gt(0):sum():item() / n
  close(kept, 1 - p, 0.005, "share kept")
  close(y:detach():max():item(), 1 / (1 - p), 1e-12, "scale")
  local g = ty.grad(y:sum(), { x })[1]
  equal(largest(g - y:detach()), 0, "gradient")
  ty.manual_seed(3)
  equal(largest(ty.dropout(ty.ones(n, { dtype = "f64" }), p) - y:detach()), 0, "same seed")
  ok(largest(ty.dropout(ty.ones(n, { dtype = "f64" }), p) - y:detach()) > 0, "the next draw differs")
  ty.manual_seed(3)
  equal(largest(ty.dropout(ty.ones(n), p):gt(0):to "f64" - y:detach():gt(0):to "f64"), 0, "same mask in f32")
end)

test("dropout in half precision and through two derivatives", function()
  local h = ty.dropout(ty.ones(1000, { dtype = "bf16" }), 0.5)
  equal(h.dtype, "bf16")
  close(h:to("f32"):max():item(), 2, 1e-6)
  local x = ty.randn(50, { dtype = "f64" }):requires_grad_()
  ty.manual_seed(1)
  local y = ty.dropout(x * x * x, 0.5)
  local g = ty.grad(y:sum(), { x }, { create_graph = true })[1]
  local gg = ty.grad(g:sum(), { x })[1]
  local mask = y:detach() / (x * x * x):detach()
  close(largest(gg - mask * x:detach() * 6), 0, 1e-9)
end)

test("batch_norm moves its running statistics", function()
  local x = ty.randn(6, 3, 4, { dtype = "f64" })
  for _, dtype in ipairs { "f64", "f32", "bf16" } do
    local mean, var = ty.full({ 3 }, 2, { dtype = "f32" }), ty.full({ 3 }, 3, { dtype = "f32" })
    ty.batch_norm(x:to(dtype), mean, var, nil, nil, { training = true, momentum = 0.2 })
    local tol = dtype == "bf16" and 1e-2 or 1e-6
    local want_mean, want_var = x:mean { 0, 2 } * 0.2 + 1.6, x:var({ 0, 2 }, { correction = 1 }) * 0.2 + 2.4
    close(mean:tolist(), want_mean:tolist(), tol, "mean " .. dtype)
    close(var:tolist(), want_var:tolist(), tol, "variance " .. dtype)
    local before = mean:tolist()
    ty.batch_norm(x:to(dtype), mean, var)
    equal(mean:tolist(), before, "evaluation leaves them alone")
  end
end)

test("batch_norm of [n, c] in blocks of channels agrees with [n, c, 2]", function()
  local x = ty.randn(1500, 300):requires_grad_()
  local w, b, g = ty.randn(300):requires_grad_(), ty.randn(300):requires_grad_(), ty.randn(1500, 300)
  local y = ty.batch_norm(x, nil, nil, w, b, { training = true })
  local paired = ty.batch_norm(x:reshape(750, 2, 300):transpose(1, 2), nil, nil, w, b, { training = true })
  local z = paired:transpose(1, 2):reshape(1500, 300)
  close(largest((y - z):detach()), 0, 1e-5)
  local gy, gz = ty.grad((y * g):sum(), { x, w, b }), ty.grad((z * g):sum(), { x, w, b })
  for i = 1, 3 do close(largest(gy[i] - gz[i]), 0, 1e-3) end
end)

-- Attention as a composition, with every query row over all keys.
local function composed(q, k, v, see, bias, scale)
  local group = q.shape[2] // k.shape[2]
  local function repeated(x)
    local n = x.shape
    return x:unsqueeze(2):expand(n[1], n[2], group, n[3], n[4]):reshape(n[1], n[2] * group, n[3], n[4])
  end
  local s = q:matmul(repeated(k):transpose(-2, -1)) * scale
  if bias then s = s + bias end
  if see then s = s:masked_fill(see:logical_not(), -1e30) end
  return ty.softmax(s, -1):matmul(repeated(v))
end

test("attention agrees with its composition over many tiles", function()
  ty.manual_seed(5)
  local t, s = 200, 330
  local f64 = { dtype = "f64" }
  local row, column = ty.arange(t):unsqueeze(1) + (s - t), ty.arange(s)
  for number, options in ipairs {
    {}, { causal = true }, { causal = true, window = 70 }, { window = 40 }, { causal = true, bias = { 4, t, s } },
    { bias = { 2, 1, 1, s } }, { hide = true },
  } do
    local q, k = ty.randn(2, 4, t, 20, f64):requires_grad_(), ty.randn(2, 2, s, 20, f64):requires_grad_()
    local v, g = ty.randn(2, 2, s, 33, f64):requires_grad_(), ty.randn(2, 4, t, 33, f64)
    local leaves, see, mask = { q, k, v }, ty.ones(t, s, { dtype = "bool" }), nil
    if options.causal then see = see:logical_and(column:le(row)) end
    if options.window then see = see:logical_and((column - row):abs():le(options.window)) end
    if options.bias then
      mask = ty.randn(options.bias, f64):requires_grad_()
      leaves[4] = mask
    elseif options.hide then -- whole tiles are hidden; key 0 is always seen
      mask = (ty.rand(t, s):lt(0.2)):logical_and(column:lt(100)):logical_or(column:eq(0))
      see = mask
    end
    local y = ty.scaled_dot_product_attention(q, k, v, mask,
      { causal = options.causal or false, window = options.window or -1, scale = 0.3 })
    local z = composed(q, k, v, see, options.bias and mask, 0.3)
    close(largest((y - z):detach()), 0, 1e-12, "result " .. number)
    local a, b = ty.grad((y * g):sum(), leaves), ty.grad((z * g):sum(), leaves)
    for i = 1, #leaves do close(largest(a[i] - b[i]), 0, 1e-10, "gradient " .. number .. "." .. i) end
  end
end)

test("attention of one new token splits the keys and still agrees", function()
  local q, k, v = ty.randn(1, 8, 1, 32), ty.randn(1, 2, 5000, 32), ty.randn(1, 2, 5000, 32)
  local y = ty.scaled_dot_product_attention(q, k, v, { causal = true })
  close(largest(y - composed(q, k, v, nil, nil, 1 / math.sqrt(32))), 0, 1e-5)
end)

test("attention never holds the [t, s] matrix", function()
  local t = 2048
  local x = ty.randn(1, 2, t, 16):requires_grad_()
  local mask = ty.ones(t, t, { dtype = "bool" })
  ty.memory.reset_peak "cpu"
  local before = ty.memory.stats("cpu").live
  local y = ty.scaled_dot_product_attention(x, x, x, mask, { causal = true })
  ty.grad(y:sum(), { x })
  local peak = ty.memory.stats("cpu").peak - before
  ok(peak < t * t * 4 / 2, string.format("%d bytes of scratch and results", peak))
end)

test("rows that see nothing are zero, with zero gradients", function()
  local q, k = ty.randn(1, 1, 3, 4):requires_grad_(), ty.randn(1, 1, 2, 4):requires_grad_()
  local y = ty.scaled_dot_product_attention(q, k, k, { causal = true }) -- query 0 stands before all keys
  equal(y:detach():select(2, 0):tolist(), { { { 0.0, 0.0, 0.0, 0.0 } } })
  local g = ty.grad(y:sum(), { q, k })
  equal(g[1]:select(2, 0):tolist(), { { { 0.0, 0.0, 0.0, 0.0 } } })
  ok(g[2]:isfinite():all():item(), "finite gradients")
end)

test("cross_entropy's weight has no gradient and says so", function()
  local x, w = ty.randn(4, 3):requires_grad_(), ty.ones(3):requires_grad_()
  local loss = ty.cross_entropy(x, ty.tensor { 0, 1, 2, 0 }, w)
  fails(function() ty.grad(loss, { x, w }) end, "weight: has no gradient")
end)

test("cross_entropy of a large vocabulary in f32 agrees with f64", function()
  local x, target = ty.randn(64, 5003, { dtype = "f64" }) * 4, ty.randint(0, 5003, { 64 })
  local function run(dtype)
    local leaf = x:to(dtype):detach():requires_grad_()
    local loss = ty.cross_entropy(leaf, target, { label_smoothing = 0.05 })
    return loss:item(), ty.grad(loss, { leaf })[1]
  end
  local a, ga = run "f32"
  local b, gb = run "f64"
  close(a, b, 1e-6)
  close(largest(ga:to "f64" - gb) * 64, 0, 1e-4)
end)

test("linear_cross_entropy in parts equals the loss of all logits", function()
  local n, classes, d = 530, 33000, 12
  local x, w = ty.randn(n, d):requires_grad_(), (ty.randn(classes, d)):requires_grad_()
  local target = ty.randint(0, classes, { n })
  target:narrow(0, 3, 5):fill_(-100)
  for _, opts in ipairs { {}, { reduction = "sum", label_smoothing = 0.1 } } do
    local a, b = ty.linear_cross_entropy(x, w, target, opts), ty.cross_entropy(ty.linear(x, w), target, opts)
    close(a:item(), b:item(), 1e-5 * math.abs(b:item()))
    local ga, gb = ty.grad(a * 0.5, { x, w }), ty.grad(b * 0.5, { x, w })
    for i = 1, 2 do close(largest(ga[i] - gb[i]) / largest(gb[i]), 0, 1e-5, "gradient " .. i) end
  end
end)

test("add_layer_norm and add_rms_norm with dropout equal their parts", function()
  for _, dtype in ipairs { "f32", "f64" } do
    local rows, width = 37, 1031 -- rows begin anywhere in a block of random words
    local function make(...) return ty.randn(..., { dtype = dtype }):requires_grad_() end
    local x, r, w, b = make { rows, width }, make { rows, width }, make { width }, make { width }
    local g = make({ rows, width }):detach()
    for _, centred in ipairs { true, false } do
      local inputs = centred and { x, r, w, b } or { x, r, w }
      ty.manual_seed(9)
      local s, y
      if centred then s, y = ty.add_layer_norm(x, r, w, b, { p = 0.3 })
      else s, y = ty.add_rms_norm(x, r, w, { p = 0.3 }) end
      local ga = ty.grad((y * g):sum() + (s * s):sum(), inputs, { keep_graph = true })
      ty.manual_seed(9)
      local s2 = ty.dropout(x, 0.3) + r
      local y2 = centred and s2:layer_norm({ width }, w, b) or s2:rms_norm({ width }, w)
      local gb = ty.grad((y2 * g):sum() + (s2 * s2):sum(), inputs)
      close(largest(s - s2), 0, 1e-6)
      close(largest(y - y2), 0, 1e-5)
      for i in ipairs(inputs) do close(largest(ga[i] - gb[i]) / largest(gb[i]), 0, 1e-5, "gradient " .. i) end
      local only = ty.grad(s:sum(), { r })[1] -- the norm unused
      equal(largest(only - 1), 0)
    end
  end
end)

check.finish()
