-- ty.vjp, jvp, jacobian, hessian against derivatives by hand and by differences; ty.functional_call; hooks and modules
-- by pattern.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn = ty.nn

local function f64(list) return ty.tensor(list, { dtype = "f64" }) end

-- y1 = x1^2 x2 + sin z, y2 = exp x2 z
local function pair(x, z)
  local a, b = x:select(0, 0), x:select(0, 1)
  return ty.stack { a:square() * b + z:sin(), b:exp() * z }
end
local a, b, c = 0.7, -0.4, 1.3
local dx = { { 2 * a * b, a * a }, { 0, c * math.exp(b) } }
local dz = { math.cos(c), math.exp(b) }

check.test("jacobian", function()
  local x, z = f64 { a, b }, f64(c)
  local rows = ty.jacobian(pair, { x, z })
  check.close(rows[1]:tolist(), dx, 1e-12)
  check.close(rows[2]:tolist(), dz, 1e-12)
  check.equal(x.requires_grad, false)
  check.equal(rows[1].requires_grad, false)
  check.close(ty.jacobian(ty.square, f64 { { 1, 2 }, { 3, 4 } }):sum({ 2, 3 }):tolist(), { { 2, 4 }, { 6, 8 } }, 1e-12)
  local two = ty.jacobian(function(t) return t * 2, t:sum() end, f64 { 1, 2 })
  check.close(two[1]:tolist(), { { 2, 0 }, { 0, 2 } }, 1e-12)
  check.close(two[2]:tolist(), { 1, 1 }, 1e-12)
  check.equal(ty.jacobian(function() return ty.ones(2) end, f64 { 1 }):tolist(), { { 0 }, { 0 } }, "no way there")
  check.equal(ty.jacobian(function(t) return t end, ty.ones(0)).shape, { 0, 0 })
end)

check.test("vjp and jvp", function()
  local inputs, v, u = { f64 { a, b }, f64(c) }, f64 { 2, -3 }, { f64 { 0.5, -1 }, f64(2) }
  local y, g = ty.vjp(pair, inputs, v)
  check.close(y:tolist(), { a * a * b + math.sin(c), math.exp(b) * c }, 1e-12)
  check.close(g[1]:tolist(), { 2 * dx[1][1], 2 * dx[1][2] - 3 * dx[2][2] }, 1e-12)
  check.close(g[2]:item(), 2 * dz[1] - 3 * dz[2], 1e-12)
  local same, d = ty.jvp(pair, inputs, u)
  check.close(same:tolist(), y:tolist(), 1e-12)
  check.close(d:tolist(), { 0.5 * dx[1][1] - dx[1][2] + 2 * dz[1], -dx[2][2] + 2 * dz[2] }, 1e-12)
  check.equal(d.requires_grad, false)
  local _, slope = ty.vjp(function(x) return x:square():sum() end, f64 { 3, 4 })
  check.close(slope:tolist(), { 6, 8 }, 1e-12)
  local _, first = ty.jvp(function(x) return x * 3, x:square() end, f64 { 1, 2 }, f64 { 1, 1 })
  check.close({ first[1]:tolist(), first[2]:tolist() }, { { 3, 3 }, { 2, 4 } }, 1e-12)
  local _, second = ty.jvp(function(x) return (ty.zeros_like(x)) end, f64 { 1, 2 }, f64 { 1, 1 })
  check.equal(second:tolist(), { 0, 0 })
end)

check.test("a network's jvp is what differences give; derivatives of derivatives", function()
  ty.manual_seed(1)
  local model = nn.with_defaults({ dtype = "f64" }, function()
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
  end)
  local x, v = ty.randn({ 4, 3 }, { dtype = "f64" }), ty.randn({ 4, 3 }, { dtype = "f64" })
  local _, d = ty.jvp(model, x, v)
  local h = 1e-6
  check.close(d:tolist(), ((model(x + v * h) - model(x - v * h)) * (0.5 / h)):tolist(), 1e-7)
  local function cube(t) return (t * t * t):sum() end
  check.close(ty.hessian(cube, f64 { 1, 2 }):tolist(), { { 6, 0 }, { 0, 12 } }, 1e-12)
  local blocks = ty.hessian(function(p, q) return (p:square() * q):sum() end, { f64 { 1, 2 }, f64 { 3, 5 } })
  check.close(blocks[1][1]:tolist(), { { 6, 0 }, { 0, 10 } }, 1e-12)
  check.close(blocks[1][2]:tolist(), { { 2, 0 }, { 0, 4 } }, 1e-12)
  check.equal(blocks[2][2]:tolist(), { { 0, 0 }, { 0, 0 } })
  local w = f64({ 1, 2 }):requires_grad_()
  local third = ty.hessian(cube, w, { create_graph = true }):sum()
  check.close(ty.grad(third, { w })[1]:tolist(), { 6, 6 }, 1e-12)
  local _, slope = ty.jvp(cube, w, f64 { 1, 1 }, { create_graph = true })
  check.close(ty.grad(slope, { w })[1]:tolist(), { 6, 12 }, 1e-12)
  check.fails(function() ty.hessian(ty.sin, f64 { 1, 2 }) end, "hessian: fn: expected it to return one number")
  check.fails(function() ty.vjp(ty.sin, f64 { 1, 2 }) end, "vjp: v: expected tensors shaped like the outputs, got nil")
  check.fails(function() ty.jvp(ty.sin, f64 { 1, 2 }, f64 { 1 }) end, "jvp: v: expected the shape of the inputs")
  check.fails(function() ty.jacobian(ty.sin, {}) end, "jacobian: inputs: expected at least one tensor")
  check.fails(function() ty.jacobian(function() end, ty.ones(1)) end, "expected it to return a tensor, got nothing")
end)

check.test("functional_call", function()
  local model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
  local x = ty.randn(5, 2)
  local own, weight = model[1].weight, ty.randn(3, 2):requires_grad_()
  local y = ty.functional_call(model, { ["0.weight"] = weight }, x)
  check.ok(rawequal(model[1].weight, own), "the module keeps its own")
  y:sum():backward()
  check.ok(weight.grad ~= nil and own.grad == nil)
  local copy = model:clone()
  copy[1].weight = weight
  check.close(copy(x):tolist(), y:tolist(), 1e-5)
  local mean = ty.zeros(3)
  ty.functional_call(model, { ["1.running_mean"] = mean }, x)
  check.ok(mean:abs():max():item() > 0, "buffers too")
  check.fails(function() ty.functional_call(model, { ["0.weights"] = weight }, x) end, "has no parameter '0.weights'")
  check.fails(function() ty.functional_call(model, { ["0.weight"] = ty.ones(2) }, x) end,
    "0.weight: expected the shape")
  check.fails(function() ty.functional_call(model, { ["0.weight"] = weight }, ty.ones(1, 7)) end, "linear")
  check.ok(rawequal(model[1].weight, own), "after an error too")
  local rows = ty.jacobian(function(w) return ty.functional_call(model:eval(), { ["0.weight"] = w }, x) end, weight)
  check.equal(rows.shape, { 5, 1, 3, 2 })
end)

check.test("modules by pattern, hooks before and after", function()
  local model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
  local names = {}
  for name in model:named_modules "^%d+$" do names[#names + 1] = name end
  check.equal(names, { "0", "1" })
  names = {}
  for name, module in model:named_modules "1%." do names[#names + 1] = name .. " " .. getmetatable(module).__name end
  check.equal(names, { "1.0 ReLU", "1.1 Linear" })
  check.fails(function() model:named_modules(3) end, "named_modules: pattern: expected a string or nil, got 3")
  check.fails(function() model:named_modules "(" end, "named_modules: pattern:")
  local seen = {}
  local stop = model[1]:register_forward_pre_hook(function(_, x)
    seen[#seen + 1] = "before"
    return x * 2
  end)
  local last = model[1]:register_forward_hook(function(_, outputs)
    seen[#seen + 1] = "after"
    return outputs[1] + 1
  end)
  local x = ty.ones(1, 2)
  local hooked = model[1](x)
  stop()
  last()
  check.close(hooked:tolist(), (model[1](x * 2) + 1):tolist(), 1e-6)
  check.equal(seen, { "before", "after" })
end)

check.test("hooks of the backward pass see and change the gradients of a module's inputs and outputs", function()
  local layer = nn.with_defaults({ dtype = "f64" }, nn.Linear, 3, 2)
  local x, v = ty.randn({ 4, 3 }, { dtype = "f64" }):requires_grad_(), ty.randn({ 4, 2 }, { dtype = "f64" })
  local seen = {}
  local stop = layer:register_full_backward_hook(function(module, grad_inputs, grad_outputs)
    seen = { module == layer, grad_inputs[1] and grad_inputs[1]:clone(), grad_outputs[1]:clone(), grad_inputs.n,
      grad_outputs.n }
  end)
  local y = layer(x)
  local whole = ty.grad((y * v):sum(), x)
  check.equal({ seen[1], seen[4], seen[5] }, { true, 1, 1 })
  check.close(seen[2]:tolist(), whole:tolist(), 1e-12)
  check.close(seen[2]:tolist(), v:matmul(layer.weight):tolist(), 1e-12)
  check.close(seen[3]:tolist(), v:tolist(), 1e-12)
  -- What is returned takes their place, on the way out and on the way in.
  local twice = layer:register_full_backward_hook(function(_, grad_inputs) return grad_inputs[1] * 2 end)
  local half = layer:register_full_backward_pre_hook(function(_, grad_outputs) return { grad_outputs[1] * 0.25 } end)
  check.close(ty.grad((layer(x) * v):sum(), x):tolist(), (whole * 0.5):tolist(), 1e-12)
  check.close(seen[3]:tolist(), (v * 0.25):tolist(), 1e-12)
  local copy = layer:clone()
  check.close(ty.grad((copy(x) * v):sum(), x):tolist(), (whole * 0.5):tolist(), 1e-12, "of a copy, too")
  twice()
  half()
  check.close(ty.grad((layer(x) * v):sum(), x):tolist(), whole:tolist(), 1e-12)
  -- A first layer, whose input wants no gradient; second derivatives; no graph, no hook.
  seen = {}
  layer(x:detach()):sum():backward()
  check.equal({ seen[1], seen[2] == nil, seen[3]:tolist()[1] }, { true, true, { 1, 1 } })
  local g = ty.grad((layer(x):square() * v):sum(), x, { create_graph = true })
  check.ok(g.requires_grad and ty.grad(g:sum(), layer.weight):abs():max():item() > 0, "through the hook")
  seen = {}
  ty.no_grad(function() layer(x) end)
  check.equal(seen, {})
  stop()
  check.equal(rawget(layer, "_hooks"), false, "nothing is left")
  -- Several inputs and outputs, of which some have no gradient.
  local Both = nn.module "Both"
  function Both:forward(p, n, q) return p * n, q * n end -- luacheck: no unused args
  local both, lists = Both(), nil
  both:register_full_backward_hook(function(_, i, o) lists = { i, o } end)
  local second = ty.ones({ 2 }, { dtype = "f64" }):requires_grad_()
  local first = both(x, 3, second)
  first:sum():backward()
  check.equal({ lists[1].n, lists[1][2], lists[1][1]:tolist()[1], lists[2].n, lists[2][2] == nil },
    { 3, nil, { 3, 3, 3 }, 2, true })
  both:register_full_backward_hook(function() return { 5 } end)
  check.fails(function() both(x, 3, second):sum():backward() end, "gradient 1 of the hook: expected a tensor, got 5")
  check.fails(function() both:register_full_backward_hook(5) end,
    "register_full_backward_hook: fn: expected a function")
end)

check.test("gradcheck finds gradients that are off", function()
  local m, n = f64 { { 0.3, -1.2 }, { 2, 0.7 } }, f64 { 1.5, -0.4 }
  local function two(x, y) return (x * y):sin(), y:exp() end
  check.equal(ty.gradcheck(two, { m, n }, { second = true }), true)
  check.equal(ty.gradcheck(ty.tanh, ty.tensor { 0.5, -0.2 }), true, "f32, roughly")
  check.equal(m:tolist(), { { 0.3, -1.2 }, { 2, 0.7 } }, "inputs stay as they were")
  local function squared(backward)
    return ty.custom_op { name = "squared", forward = function(ctx, x) ctx:save(x) return x * x end,
      backward = backward }
  end
  local half = squared(function(ctx, g) return g * ctx:saved() end)
  check.fails(function() ty.gradcheck(half, m) end, "gradcheck: the gradient by argument 1, element 0: expected")
  check.fails(function() ty.gradcheck(function(x, y) return x + half(y) end, { m, n }) end, "by argument 2, element 0")
  local flat = squared(function(ctx, g) return 2 * g * ctx:saved():detach() end)
  check.equal(ty.gradcheck(flat, m), true)
  check.fails(function() ty.gradcheck(flat, m, { second = true }) end, "the second derivative by argument 1")
  check.fails(function() ty.gradcheck(function(x) return x:detach() * 3 end, m) end, "got 0")
  check.fails(function() ty.gradcheck(ty.sin, {}) end, "inputs: expected at least one tensor")
  check.fails(function() ty.gradcheck(ty.sin, ty.tensor { 1, 2 }) end, "expected float tensors, got i64")
  check.fails(function() ty.gradcheck(function() end, m) end, "expected it to return a tensor, got nothing")
end)

check.finish()
