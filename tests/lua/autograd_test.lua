-- Gradients: the engine, not the rules of single ops (tests/run_ops.lua has those).

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"

local function leaf(values) return ty.tensor(values, { dtype = "f64" }):requires_grad_() end

-- ty.grad as a list, whatever form its results have.
local function grad(loss, inputs, options)
  local g = table.pack(ty.grad(loss, inputs, options))
  if type(g[1]) == "table" then return g[1] end
  return g
end

local function random(seed, ...)
  ty.manual_seed(seed)
  return ty.randn(..., { dtype = "f64" })
end

check.test("gradients accumulate until they are cleared", function()
  local x = leaf { 1, 2, 3 }
  check.equal(x.grad, nil)
  local y = (x * x):sum()
  y:backward()
  check.close(x.grad:tolist(), { 2, 4, 6 })
  y = (x * 3):sum()
  y:backward()
  check.close(x.grad:tolist(), { 5, 7, 9 })
  x:set_grad()
  check.equal(x.grad, nil)
  y = x:sum()
  y:backward()
  check.close(x.grad:tolist(), { 1, 1, 1 })
end)

check.test("a tensor used several times gets the sum", function()
  local x = leaf { 2 }
  local a = x * x
  local b = a + a * x + x
  local y = b:sum()
  y:backward()
  check.close(x.grad:item(), 2 * 2 + 3 * 4 + 1)
end)

check.test("no_grad, enable_grad and detach", function()
  local x = leaf { 1, 2 }
  local y = ty.no_grad(function() return x * 2 end)
  check.equal(y.requires_grad, false)
  local inner, outer
  ty.no_grad(function()
    ty.enable_grad(function() inner = (x * 2).requires_grad end)
    outer = (x * 2).requires_grad
  end)
  check.equal({ inner, outer, (x * 2).requires_grad }, { true, false, true })
  check.equal(x:detach().requires_grad, false)
  local z = (x * x:detach()):sum()
  z:backward()
  check.close(x.grad:tolist(), { 1, 2 })
end)

check.test("no_grad ends with the function, also by an error", function()
  local x = leaf { 1 }
  pcall(ty.no_grad, function() error "stop" end)
  check.equal((x * 2).requires_grad, true)
  local a, b = ty.no_grad(function(p, q) return q, p end, 1, 2)
  check.equal({ a, b }, { 2, 1 })
end)

check.test("leaves: requires_grad_ and its limits", function()
  local x = ty.ones(2)
  check.equal(x.requires_grad, false)
  check.equal(x:requires_grad_().requires_grad, true)
  check.equal(x:requires_grad_(false).requires_grad, false)
  check.fails(function() ty.ones(2, { dtype = "i64" }):requires_grad_() end, "float")
end)

check.test("backward of what is not one number", function()
  local x = leaf { 1, 2 }
  check.fails(function() (x * 2):backward() end, "one element")
  check.fails(function() ty.ones(1):backward() end, "require")
  local y = x * 2
  y:backward(ty.tensor({ 3, 4 }, { dtype = "f64" }))
  check.close(x.grad:tolist(), { 6, 8 })
  check.fails(function()
    local z = x * 2
    z:backward(ty.ones(3, { dtype = "f64" }))
  end, "[3]")
end)

check.test("the graph is freed by backward unless it is kept", function()
  local x = leaf { 3 }
  local y = (x * x):sum()
  y:backward()
  check.fails(function() y:backward() end, "keep_graph")
  local z = (x * x):sum()
  z:backward { keep_graph = true }
  z:backward()
  check.close(x.grad:item(), 18)
end)

check.test("ty.grad leaves .grad alone", function()
  local x, w = leaf { 1, 2 }, leaf { 3, 4 }
  local g = grad((x * w):sum(), { x, w })
  check.close(g[1]:tolist(), { 3, 4 })
  check.close(g[2]:tolist(), { 1, 2 })
  check.equal(x.grad, nil)
  check.fails(function() ty.grad((x * 2):sum(), { x, w }) end, "allow_unused")
  g = grad((x * 2):sum(), { w, x }, { allow_unused = true })
  check.ok(not g[1], "no gradient for what was not used")
  check.close(g[2]:tolist(), { 2, 2 })
end)

check.test("gradients of inner tensors", function()
  local x = leaf { 1, 2 }
  local h = x * 3
  local y = (h * h):sum()
  local g = grad(y, { h, x }, { keep_graph = true })
  check.close(g[1]:tolist(), { 6, 12 })
  check.close(g[2]:tolist(), { 18, 36 })
end)

check.test("hooks see and replace gradients", function()
  local x = leaf { 1, 2 }
  local seen
  local handle = x:register_hook(function(g) seen = g:tolist() end)
  local y = (x * 5):sum()
  y:backward()
  check.close(seen, { 5, 5 })
  check.close(x.grad:tolist(), { 5, 5 })
  handle:remove()
  seen = nil
  x:set_grad()
  x:register_hook(function(g) return g * 10 end)
  y = (x * 5):sum()
  y:backward()
  check.equal(seen, nil)
  check.close(x.grad:tolist(), { 50, 50 })

  local a = leaf { 1 }
  local h = a * 2
  h:register_hook(function(g) return g * 100 end)
  y = (h * 3):sum()
  y:backward()
  check.close(a.grad:item(), 600)
end)

check.test("a hook on a leaf sees the whole gradient once", function()
  local x = leaf { 1, 2 }
  local calls, seen = 0, nil
  x:register_hook(function(g)
    calls = calls + 1
    seen = g:tolist()
    return g:clamp(-4, 4)
  end)
  local y = (x * 3 + x * 2):sum()
  y:backward()
  check.equal({ calls, seen }, { 1, { 5.0, 5.0 } })
  check.close(x.grad:tolist(), { 4, 4 })
end)

check.test("hooks may remove themselves and each other while they run", function()
  local x = leaf { 1 }
  local calls, first, second = {}, nil, nil
  first = x:register_hook(function()
    calls[#calls + 1] = "first"
    first:remove()
    second:remove()
  end)
  second = x:register_hook(function() calls[#calls + 1] = "second" end)
  x:register_hook(function() calls[#calls + 1] = "third" end)
  for _ = 1, 2 do
    local y = (x * 2):sum()
    y:backward()
  end
  check.equal(calls, { "first", "third", "third" })
  first:remove()
end)

check.test("a hook that hands back a released tensor does no harm", function()
  local x = leaf { 1 }
  x:register_hook(function(g)
    g:free()
    return g
  end)
  local y = (x * 2):sum()
  check.fails(function() y:backward() end, "released")
  check.equal(ty.is_grad_enabled(), true)
  local z = leaf { 1 }
  local w = (z * 2):sum()
  w:backward()
  check.close(z.grad:item(), 2)
end)

check.test("an error in a hook is an error of backward", function()
  local x = leaf { 1 }
  x:register_hook(function() error "bad hook" end)
  check.fails(function()
    local y = (x * 2):sum()
    y:backward()
  end, "bad hook")
  local z = leaf { 1 }
  z:register_hook(function() return ty.ones(5) end)
  check.fails(function()
    local y = (z * 2):sum()
    y:backward()
  end, "hook")
end)

-- ---- in-place writes ----

check.test("in-place ops take part in the graph", function()
  local x = leaf { 1, 2 }
  local h = x * 2
  h:add_(x):mul_(3):exp_()
  local y = h:sum()
  y:backward()
  check.close(x.grad:tolist(), { 9 * math.exp(9), 9 * math.exp(18) }, 1e-12)
  x:set_grad()
  h = x * 2
  h:mul_(x) -- the rule of mul needs the factor that is overwritten
  y = h:sum()
  y:backward()
  check.close(x.grad:tolist(), { 4, 8 })
end)

check.test("a saved tensor that was changed in place is an error", function()
  local x = leaf { 1, 2 }
  local h = x * 1
  local y = (h * h):sum()
  ty.no_grad(function() h:add_(1) end)
  check.fails(function() y:backward() end, "in place")
  local e = x:exp()
  local z = e:sum()
  ty.no_grad(function() e:mul_(2) end)
  check.fails(function() z:backward() end, "in place")
  local a = x * 1
  local b = a:sin():sum()
  ty.no_grad(function() a["0:1"]:fill_(0) end) -- through a view
  check.fails(function() b:backward() end, "in place")
end)

check.test("a leaf that wants a gradient cannot be changed in place", function()
  local x = leaf { 1, 2 }
  check.fails(function() x:add_(1) end, "no_grad")
  ty.no_grad(function() x:add_(1) end)
  check.equal(x:tolist(), { 2.0, 3.0 })
  check.equal(x.requires_grad, true)
end)

-- ---- saved-tensor hooks, checkpoints ----

check.test("saved-tensor hooks pack and unpack what is kept", function()
  local x = leaf { 1, 2, 3 }
  local packed, unpacked = 0, 0
  local y = ty.saved_tensor_hooks(function(t)
    packed = packed + 1
    return { values = t:tolist(), dtype = t.dtype }
  end, function(box)
    unpacked = unpacked + 1
    return ty.tensor(box.values, { dtype = box.dtype })
  end, function() return (x * 1):exp():sin():sum() end)
  check.ok(packed >= 2, "something was packed")
  y:backward()
  check.ok(unpacked >= 2, "it was unpacked")
  local want = {}
  for i, v in ipairs { 1, 2, 3 } do want[i] = math.cos(math.exp(v)) * math.exp(v) end
  check.close(x.grad:tolist(), want, 1e-12)
end)

check.test("saved-tensor hooks are told what keeps a tensor; frozen weights need no input", function()
  local function kept(weight)
    local list = {}
    local x = random(3, { 4, 8 }):requires_grad_()
    local y = ty.saved_tensor_hooks(function(t, op, what)
      list[#list + 1] = ("%s.%s %d"):format(op, what, t:numel())
      return ty.keep(t)
    end, function(t) return t end, function() return ty.linear(x, weight):exp():sum() end)
    y:backward()
    return list, x.grad
  end
  local weight = random(4, { 5, 8 })
  local list, dx = kept(weight)
  check.equal(list, { "linear.weight 40", "exp.output 20" })
  weight:requires_grad_()
  local more, same = kept(weight)
  check.equal(more, { "linear.x 32", "linear.weight 40", "exp.output 20" })
  check.close(same:flatten():tolist(), dx:flatten():tolist(), 0)
end)

check.test("norms do not keep what they give", function()
  local function kept(fn)
    local list = {}
    ty.saved_tensor_hooks(function(t, op, what)
      list[#list + 1] = ("%s.%s %d"):format(op, what, t:numel())
      return ty.keep(t)
    end, function(t) return t end, fn)
    return list
  end
  local x, residual = random(5, { 4, 8 }):requires_grad_(), random(6, { 4, 8 })
  check.equal(kept(function() return ty.layer_norm(x) end), { "layer_norm.x 32", "layer_norm.output 4",
    "layer_norm.output 4" })
  check.equal(kept(function() return ty.rms_norm(x) end), { "rms_norm.x 32", "rms_norm.output 4" })
  check.equal(kept(function() return ty.add_rms_norm(x, residual) end), { "add_norm.output 32", "add_norm.output 4",
    "add_norm.output 4" })
end)

check.test("errors in saved-tensor hooks arrive", function()
  local x = leaf { 1 }
  check.fails(function()
    ty.saved_tensor_hooks(function() error "cannot pack" end, function(v) return v end, function() return x:exp() end)
  end, "cannot pack")
  local y = ty.saved_tensor_hooks(function(t) return t:tolist() end, function() error "cannot unpack" end,
    function() return x:exp():sum() end)
  check.fails(function() y:backward() end, "cannot unpack")
  local z = x:exp():sum()
  z:backward()
  check.close(x.grad:item(), math.exp(1), 1e-12, "hooks are gone afterwards")
end)

check.test("a checkpoint gives the same values and gradients", function()
  local function block(x, w)
    local h = ty.matmul(x, w):tanh()
    return ty.dropout(h, 0.4) * 2
  end
  local function run(checkpointed)
    local x, w = random(30, { 4, 5 }):requires_grad_(), random(31, { 5, 5 }):requires_grad_()
    ty.manual_seed(77)
    local h = x
    for _ = 1, 3 do
      if checkpointed then h = ty.checkpoint(block, h, w)
      else h = block(h, w) end
    end
    local after = ty.rand(3):tolist()
    local loss = h:square():sum()
    loss:backward()
    return { loss:item(), x.grad:tolist(), w.grad:tolist(), after, ty.rand(3):tolist() }
  end
  check.equal(run(true), run(false))
end)

check.test("a checkpoint keeps less memory", function()
  local function deep(x)
    for _ = 1, 20 do x = (x * 1.01):tanh():sin() end
    return x
  end
  local function live(checkpointed)
    local x = ty.ones(10000):requires_grad_()
    collectgarbage()
    collectgarbage()
    local before = ty.memory.stats("cpu").live
    local y = checkpointed and ty.checkpoint(deep, x) or deep(x)
    collectgarbage()
    collectgarbage()
    local used = ty.memory.stats("cpu").live - before
    y:sum():backward()
    return used
  end
  local plain, saved = live(false), live(true)
  check.ok(saved * 5 < plain, string.format("%d bytes with the checkpoint, %d without", saved, plain))
end)

-- ---- custom ops ----

check.test("a custom op with its own gradient", function()
  local cube = ty.custom_op {
    name = "cube",
    forward = function(ctx, x)
      ctx:save(x)
      return x * x * x
    end,
    backward = function(ctx, gy)
      local x = ctx:saved()
      return gy * x * x * 3
    end,
  }
  local x = leaf { 1.5, -2 }
  local y = cube(x)
  check.close(y:tolist(), { 3.375, -8 })
  check.equal(y.requires_grad, true)
  local s = (y * 2):sum()
  s:backward()
  check.close(x.grad:tolist(), { 13.5, 24 })
  check.equal(cube(ty.ones(2)).requires_grad, false)
end)

check.test("a custom op with two inputs, one without gradient", function()
  local scale = ty.custom_op {
    name = "scale",
    forward = function(ctx, x, y)
      ctx:save(x, y)
      return x * y
    end,
    backward = function(ctx, gy)
      local x, y = ctx:saved()
      return gy * y, gy * x
    end,
  }
  local x, k = leaf { 1, 2 }, ty.tensor({ 5, 6 }, { dtype = "f64" })
  local y = scale(x, k):sum()
  y:backward()
  check.close(x.grad:tolist(), { 5, 6 })
  check.equal(k.grad, nil)
end)

check.test("a custom op's backward can be differentiated", function()
  local square = ty.custom_op {
    name = "square_twice",
    forward = function(ctx, x)
      ctx:save(x)
      return x * x
    end,
    backward = function(ctx, gy)
      local x = ctx:saved()
      return gy * x * 2
    end,
  }
  local x = leaf { 3 }
  local g = grad(square(square(x)):sum(), { x }, { create_graph = true })[1]
  check.close(g:item(), 4 * 27)
  local gg = grad(g:sum(), { x })[1]
  check.close(gg:item(), 12 * 9)
end)

check.test("errors in custom ops", function()
  local x = leaf { 1 }
  local broken = ty.custom_op {
    name = "broken", forward = function(_, v) return v * 1 end, backward = function() error "no way back" end,
  }
  local y = broken(x):sum()
  check.fails(function() y:backward() end, "no way back")
  local wrong = ty.custom_op {
    name = "wrong", forward = function(_, v) return v * 1 end, backward = function() return ty.ones(7) end,
  }
  local z = wrong(leaf { 1, 2, 3 }):sum()
  check.fails(function() z:backward() end, "[7]")
  local silly = ty.custom_op { name = "silly", forward = function() return 5 end, backward = function() end }
  check.fails(function() silly(x) end, "silly")
end)

-- ---- shape of graphs ----

check.test("chains of 100,000 nodes", function()
  local x = leaf { 1 }
  local y = x
  for _ = 1, 100000 do y = y + 1 end
  local loss = y:sum()
  loss:backward()
  check.close(x.grad:item(), 1)
  local z = x * 1
  for _ = 1, 100000 do z = z + 1 end
  z = nil -- freed without backward: no recursion either
  collectgarbage()
  collectgarbage()
  check.equal(z, nil)
end)

check.test("a wide graph", function()
  local x = leaf { 1 }
  local sum = x * 0
  for i = 1, 2000 do sum = sum + x * i end
  local loss = sum:sum()
  loss:backward()
  check.close(x.grad:item(), 2000 * 2001 / 2)
end)

check.test("backward inside a scope leaves the gradients", function()
  local x = leaf { 1, 2 }
  ty.scope(function()
    local loss = (x * x):sum()
    loss:backward()
  end)
  check.close(x.grad:tolist(), { 2, 4 })
end)

check.test("views of a graph", function()
  local x = leaf { { 1, 2, 3 }, { 4, 5, 6 } }
  local y = (x[0] * 2):sum() + (x[":, 1"] * 10):sum() + x:transpose(0, 1):reshape(-1)["0:2"]:sum()
  y:backward()
  check.close(x.grad:tolist(), { { 3, 12, 2 }, { 1, 10, 0 } })
end)

check.test("gradients in half precision keep the leaf's dtype", function()
  local x = ty.tensor({ 1, 2 }, { dtype = "f16" }):requires_grad_()
  local y = (x:to "f32" * 3):sum()
  y:backward()
  check.equal(x.grad.dtype, "f16")
  check.close(x.grad:to("f32"):tolist(), { 3, 3 })
end)

-- ---- sums in place ----

check.test("gradients of tied weights: rules may add to the sum, but never to what somebody holds", function()
  local w = ty.randn(11, 6):requires_grad_()
  local index = ty.tensor({ { 1, 2, 1 }, { 10, 0, 2 } })
  local function loss() return ty.linear(ty.embedding(w, index), w):square():sum() end

  local table, head = w:detach():clone():requires_grad_(), w:detach():clone():requires_grad_()
  ty.linear(ty.embedding(table, index), head):square():sum():backward()
  local expected = table.grad + head.grad
  local function near(got, want)
    check.equal((got - want):abs():max():item() < 1e-5 * want:abs():max():item(), true)
  end

  loss():backward()
  near(w.grad, expected)
  local held = w.grad
  loss():backward() -- w.grad is visible as `held`
  near(w.grad, expected * 2)
  near(held, expected)
  collectgarbage()
  loss():backward()
  near(w.grad, expected * 3)
  near(ty.grad(loss(), { w })[1], expected)
  near(ty.grad(loss(), { w }, { create_graph = true })[1], expected)

  -- An embedding used twice, alone and with a hook.
  local twice = w:detach():clone():requires_grad_()
  local hooked = w:detach():clone():requires_grad_()
  local calls = 0
  hooked:register_hook(function(g) calls = calls + 1 return g end)
  for _, t in ipairs { twice, hooked } do
    (ty.embedding(t, index) * ty.embedding(t, index)):sum():backward()
    near(t.grad, ty.embedding_backward(ty.embedding(t:detach(), index) * 2, index, 11))
  end
  check.equal(calls, 1)
end)

check.test("mul and div keep an operand only for a gradient that is wanted", function()
  local x, c = ty.tensor({ 1.0, 2.0 }):requires_grad_(), ty.tensor { 3.0, 5.0 }
  local function changed(f, t) -- the gradient after t was changed in place
    local y = f()
    ty.no_grad(function() t:add_(1) end)
    return ty.grad(y:sum(), { x })[1]
  end
  check.equal(changed(function() return x * 2 end, x):sum():item(), 4)
  check.equal(changed(function() return x * c end, x):sum():item(), 8)
  check.equal(changed(function() return x / c end, x):sum():item(), ty.div(1, c):sum():item())
  check.fails(function() changed(function() return x * c end, c) end, "changed in place")
  check.fails(function() changed(function() return x / c end, c) end, "changed in place")
  check.fails(function() changed(function() return x * x end, x) end, "changed in place")
end)

check.test("a weight used through a transposed view has a gradient of its own", function()
  local x, seed = ty.randn({ 5, 3 }, { dtype = "f64" }), ty.randn({ 5, 4 }, { dtype = "f64" })
  local expected = ty.matmul(x:transpose(0, 1), seed)
  local function near(a, b) check.equal((a - b):abs():max():item() < 1e-12, true) end
  local function product(a, w) return ty.matmul(a, w:transpose(0, 1)) end
  for _, f in ipairs { ty.linear, product } do
    local w = ty.randn({ 3, 4 }, { dtype = "f64" }):requires_grad_()
    f(x, w:transpose(0, 1)):backward(seed)
    near(w.grad, expected)
    ty.add(f(x, w:transpose(0, 1)), f(x, w:transpose(0, 1))):backward(seed) -- twice in one pass, onto what is there
    near(w.grad, expected * 3)
  end
  -- A view of the gradient that somebody gave: the leaf's is a copy.
  local w = ty.randn({ 3, 4 }, { dtype = "f64" }):requires_grad_()
  local given = ty.randn({ 4, 3 }, { dtype = "f64" })
  w:transpose(0, 1):backward(given:transpose(0, 1):contiguous():transpose(0, 1))
  near(w.grad, given:transpose(0, 1))
  local before = given:clone()
  local v = w:detach():clone():requires_grad_()
  v:reshape(12):backward(given:reshape(12))
  ty.no_grad(function() v.grad:add_(1) end)
  near(given, before)
end)

check.finish()
