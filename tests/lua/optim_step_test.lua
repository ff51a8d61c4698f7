-- Optimizer steps as ops: whole trajectories against the papers' formulas in plain Lua, odd layouts, long lists.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"

local function flat(t) return t:detach():reshape(-1):tolist() end

-- A gradient that depends on the step, so that a mistake in the moments shows.
local function slope(p, step, j) return p - math.sin(step * 0.7 + j) end

local function trajectory(steps, make_state, reference, op)
  local p = ty.tensor({ 0.5, -1.5, 2, 0.1, -0.3 }, { dtype = "f64" })
  local plain, state = flat(p), make_state(p)
  for step = 1, steps do
    local g = {}
    for j = 1, 5 do g[j] = slope(plain[j], step, j) end
    op(p, ty.tensor(g, { dtype = "f64" }), state, step)
    for j = 1, 5 do plain[j] = reference(plain[j], g[j], step, j) end
  end
  check.close(flat(p), plain, 1e-12)
end

check.test("Adam and AdamW over many steps", function()
  for _, decoupled in ipairs { false, true } do
    local m, v = { 0, 0, 0, 0, 0 }, { 0, 0, 0, 0, 0 }
    local lr, b1, b2, eps, decay = 0.05, 0.9, 0.99, 1e-8, 0.1
    trajectory(30, function(p) return { ty.zeros_like(p), ty.zeros_like(p) } end, function(p, g, step, j)
      if decoupled then p = p - lr * decay * p else g = g + decay * p end
      m[j] = b1 * m[j] + (1 - b1) * g
      v[j] = b2 * v[j] + (1 - b2) * g * g
      return p - lr * (m[j] / (1 - b1 ^ step)) / (math.sqrt(v[j] / (1 - b2 ^ step)) + eps)
    end, function(p, g, s, step)
      ty.adam_({ p }, { g }, { s[1] }, { s[2] }, {}, lr, b1, b2, eps, decay, decoupled, 1, math.huge, 0, step)
    end)
  end
end)

check.test("SGD with momentum over many steps", function()
  for _, nesterov in ipairs { false, true } do
    local b = {}
    trajectory(30, function(p) return { ty.empty_like(p) } end, function(p, g, step, j)
      g = g + 0.01 * p
      b[j] = step == 1 and g or 0.9 * b[j] + g
      return p - 0.05 * (nesterov and g + 0.9 * b[j] or b[j])
    end, function(p, g, s, step)
      ty.sgd_({ p }, { g }, s, {}, 0.05, { momentum = 0.9, weight_decay = 0.01, nesterov = nesterov, step = step })
    end)
  end
end)

check.test("parameters and gradients in any layout", function()
  local base = ty.arange(0, 24, { dtype = "f32" }):reshape(4, 6)
  local window = base["1:3, 0:6:2"]
  local gradient = ty.ones(3, 2):transpose()
  ty.sgd_({ window }, { gradient }, {}, {}, 100)
  check.equal(base:tolist(), {
    { 0, 1, 2, 3, 4, 5 }, { -94, 7, -92, 9, -90, 11 }, { -88, 13, -86, 15, -84, 17 }, { 18, 19, 20, 21, 22, 23 },
  })
  check.fails(function() ty.sgd_({ ty.ones(1):expand(4) }, { ty.ones(4) }, {}, {}, 1) end, "params[0]: cannot write")
end)

-- 1 - lr * decay rounds to 0.99999899 in f32, which is 1.3 % more than 1 - 1e-6.
check.test("a small decoupled decay in f32 is the one that was asked for", function()
  local lr, decay, steps, n = 1e-4, 1e-2, 200, 1024
  local ways = {
    adam = function(p, zeros, step)
      ty.adam_({ p }, { zeros[1] }, { zeros[2] }, { zeros[3] }, {}, lr, 0.9, 0.999, 1e-8, decay, true, 1, math.huge, 0,
        step)
    end,
    lion = function(p, zeros) ty.lion_({ p }, { zeros[1] }, { zeros[2] }, {}, lr, 0.9, 0.99, decay) end,
    adam_8bit = function(p, zeros, step)
      ty.adam_8bit_({ p }, { zeros[1] }, { zeros.first }, { zeros.second }, { zeros.scales }, {}, lr, 0.9, 0.999, 1e-8,
        decay, true, 1, math.huge, 0, step)
    end,
  }
  for name, way in pairs(ways) do
    for _, device in ipairs(ty.cuda.count() > 0 and { "cpu", "cuda" } or { "cpu" }) do
      local before = ty.linspace(1, 2, n, { device = device })
      local p, zeros = before:clone(), {
        ty.zeros(n, { device = device }), ty.zeros(n, { device = device }), ty.zeros(n, { device = device }),
        first = ty.full({ n }, 127, { dtype = "u8", device = device }),
        second = ty.zeros(n, { dtype = "u8", device = device }),
        scales = ty.zeros(2, n // 256, { device = device }),
      }
      for step = 1, steps do way(p, zeros, step) end
      local share = ((before - p):to "f64" / before:to "f64"):mean():item() -- roundings of single elements cancel
      check.close(share / (1 - (1 - lr * decay) ^ steps), 1, 1e-3, name .. " on " .. device)
    end
  end
end)

check.test("half precision parameters with f32 moments", function()
  for _, dtype in ipairs { "f16", "bf16" } do
    local p = ty.tensor({ 1, -2, 3 }, { dtype = dtype })
    local g = ty.tensor({ 0.5, 0.5, -4 }, { dtype = dtype })
    local m, v = ty.zeros(3), ty.zeros(3)
    ty.adam_({ p }, { g }, { m }, { v }, {}, 0.25)
    check.equal({ p.dtype, m.dtype }, { dtype, "f32" })
    check.close(flat(p), { 0.75, -2.25, 3.25 }, 1e-6) -- the first step is lr against the sign of the gradient
    check.close(flat(m), { 0.05, 0.05, -0.4 }, 1e-6)
    check.close(flat(v), { 0.00025, 0.00025, 0.016 }, 1e-6)
  end
end)

check.test("hundreds of tensors of all sizes", function()
  local xs, ys, want, total = {}, {}, {}, 0.0
  for i = 1, 300 do
    local n = i * 7919 % 1000
    if i % 10 == 0 then n = 0 end
    if i == 150 then n = 100000 end
    xs[i], ys[i] = ty.full({ n }, i), ty.full({ n }, -i)
    want[i] = i + 0.25 * -2 * i
    total = total + n * i * i
  end
  check.close(ty.norm_list(xs):item(), math.sqrt(total), 1e-12)
  check.close(ty.norm_list(xs, math.huge):item(), 299)
  ty.lerp_list_(xs, ys, 0.25)
  for i = 1, 300 do
    local n = xs[i]:numel()
    if n > 0 then check.equal({ xs[i]:min():item(), xs[i]:max():item() }, { want[i], want[i] }) end
  end
  check.equal(ty.norm_list({}):item(), 0.0)
end)

check.test("the result does not depend on the threads", function()
  local before = ty.threads()
  local function run(count)
    ty.set_threads(count)
    ty.manual_seed(2)
    local p, g, m, v = ty.randn(300000), ty.randn(300000), ty.zeros(300000), ty.zeros(300000)
    ty.adam_({ p, p:clone() }, { g, g }, { m, m:clone() }, { v, v:clone() }, {}, 0.1)
    return ty.norm_list { p, g }:item(), p:sum():item()
  end
  check.equal({ run(1) }, { run(2) })
  ty.set_threads(before)
end)

check.test("a step on a leaf counts as a write", function()
  local p = ty.tensor({ 1, 2 }, { dtype = "f32" }):requires_grad_()
  local loss = p:exp():sum()
  local kept = p:square():sum() -- keeps p for its gradient
  ty.sgd_({ p }, { ty.ones(2) }, {}, {}, 0.1)
  check.close(flat(p), { 0.9, 1.9 }, 1e-6)
  check.ok(p.requires_grad, "still a leaf")
  loss:backward()
  check.fails(function() kept:backward() end, "square")
end)

-- ---- parameters in half precision without a copy in f32 ----

local function half_steps(dtype, values, lr, steps, stochastic, device)
  local p = ty.tensor(values):to { dtype = dtype, device = device or "cpu" }
  local g = ty.ones(#values):to { dtype = dtype, device = device or "cpu" }
  for step = 1, steps do ty.sgd_({ p }, { g }, {}, {}, lr, { step = step, stochastic = stochastic }) end
  return p:to { device = "cpu", dtype = "f32" }
end

check.test("stochastic rounding keeps the mean, and takes a neighbour", function()
  local n = 20000
  for _, row in ipairs { { "bf16", 1.0, 2 ^ -7 }, { "f16", 1.0, 2 ^ -10 }, { "bf16", -3.0, 2 ^ -6 },
    { "f16", 2 ^ -16, 2 ^ -24 }, { "f16", -2 ^ -14, 2 ^ -24 } } do
    local dtype, value, place = table.unpack(row)
    local values = {}
    for i = 1, n do values[i] = value end
    for _, part in ipairs { 0.1, 0.5, 0.8 } do
      local wanted = value - part * place
      local got = half_steps(dtype, values, part * place, 1, true)
      local apart = ((got - wanted) / place):tolist()
      local sum, seen = 0, {}
      for _, x in ipairs(apart) do
        sum = sum + x
        seen[math.floor(x * 1000 + 0.5)] = true
      end
      local kinds = 0
      for _ in pairs(seen) do kinds = kinds + 1 end
      local what = ("%s, %g less %g of its last place"):format(dtype, value, part)
      -- Just below a power of two the places are half as wide.
      local halves = dtype == "bf16" and value == 1 or dtype == "f16" and value == 1
      check.ok(kinds == 2 or halves and part == 0.5 and kinds == 1, what .. ": neighbours " .. kinds)
      check.ok(math.abs(sum / n) < 4 * 0.5 / math.sqrt(n), ("%s: off by %g"):format(what, sum / n))
    end
  end
end)

check.test("steps below half of the last place are not lost", function()
  local values = {}
  for i = 1, 4096 do values[i] = 1.5 end
  check.equal(half_steps("bf16", values, 1e-4, 500, false):max():item(), 1.5)
  local mean = half_steps("bf16", values, 1e-4, 500, true):mean():item()
  check.ok(math.abs(mean - 1.45) < 2e-3, "the mean of 500 steps: " .. mean)
end)

check.test("the same rounding whatever the threads, the lists and the device", function()
  ty.manual_seed(1)
  local shapes, all = { 5, 1000, 40003 }, {}
  for i, n in ipairs(shapes) do all[i] = { p = ty.randn(n):to "bf16", g = ty.randn(n):to "bf16" } end
  local function run(device, together)
    local p, g, m, v = {}, {}, {}, {}
    for i, x in ipairs(all) do
      p[i], g[i] = x.p:to(device):clone(), x.g:to(device)
      m[i], v[i] = ty.zeros_like(p[i], { dtype = "f32" }), ty.zeros_like(p[i], { dtype = "f32" })
    end
    local o = { stochastic = true, decoupled = true }
    for step = 1, 3 do
      o.step = step
      if together then ty.adam_(p, g, m, v, {}, 1e-2, o)
      else for i = #p, 1, -1 do ty.adam_({ p[i] }, { g[i] }, { m[i] }, { v[i] }, {}, 1e-2, o) end end
    end
    for i in ipairs(p) do p[i] = p[i]:to "cpu" end
    return p
  end
  local wanted, threads = run("cpu", true), ty.threads()
  ty.set_threads(3)
  local third = run("cpu", true)
  ty.set_threads(threads)
  for i, p in ipairs(run("cpu", false)) do check.ok(p:equal(wanted[i]) and p:equal(third[i]), "tensor " .. i) end
  if ty.cuda.count() > 0 then -- the arithmetic differs in the last place of f32, and with it the hash
    for i, p in ipairs(run("cuda", true)) do
      local apart = (p:to "f32" - wanted[i]:to "f32"):abs():max():item()
      check.ok(apart <= 0.05, ("on a GPU: %g"):format(apart))
    end
  end
end)

check.test("what is not finite stays, f32 is as ever, 8 bits refuse", function()
  local values = { 0 / 0, 0, 65504 }
  for _, dtype in ipairs { "bf16", "f16" } do
    local got = half_steps(dtype, values, 0, 1, true):tolist()
    check.ok(got[1] ~= got[1] and got[2] == 0 and math.abs(got[3] - 65504) <= 32)
    check.equal(half_steps(dtype, { dtype == "f16" and 65504 or 3.38e38 }, -1e38, 1, true):item(), math.huge)
  end
  check.equal(half_steps("f32", { 1, 2 }, 0.1, 2, true):tolist(), half_steps("f32", { 1, 2 }, 0.1, 2, false):tolist())
  local p = ty.zeros(5000):to "bf16":requires_grad_()
  p:set_grad(ty.ones(5000):to "bf16")
  check.fails(function() ty.optim.AdamW(p, { bits = 8, stochastic = true }):step() end, "expected false with bits = 8")
  check.fails(function() ty.optim.SGD(p, { stochastic = 1 }) end, "stochastic")
  for _, make in ipairs { ty.optim.AdamW, ty.optim.Lion, ty.optim.SGD } do
    local q = ty.ones(5000):to "bf16":requires_grad_()
    q:set_grad(ty.ones(5000):to "bf16")
    make(q, { lr = 1e-4, weight_decay = 0, stochastic = true }):step()
    local moved = q:ne(1):to "f32":mean():item()
    check.ok(moved > 0.005 and moved < 0.06, "some move, by a whole place: " .. moved)
  end
end)

check.finish()
