-- ty.vmap against loops: dimensions, tables, nesting, gradients of each sample, ensembles, Jacobians, random numbers,
-- writing, what it refuses. Every op inside it is compared with loops by tests/run_ops.lua (harness/mapped.lua).
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn = ty.nn

ty.manual_seed(3)

local function near(got, want, tolerance)
  check.equal(got.shape, want.shape)
  local off = (got:to "f64" - want:to "f64"):abs():max():item()
  check.ok(off <= (tolerance or 1e-5) * (1 + want:abs():max():item()), ("off by %g"):format(off))
end

check.test("dimensions, tables and what is the same for all", function()
  local x, y = ty.randn(4, 3, 2), ty.randn(3, 2)
  near(ty.vmap(function(a) return (a * a):sum(0) end)(x), (x * x):sum(1))
  near(ty.vmap(function(a) return a:sum(0) end, { in_dims = 1 })(x), x:sum(0))
  near(ty.vmap(function(a) return a:sum(0) end, { in_dims = -1, out_dims = 1 })(x), x:sum(0))
  near(ty.vmap(function(a, b) return a + b end, { in_dims = { 0, false } })(x, y), x + y)
  near(ty.vmap(function(a) return a + y end)(x), x + y)
  near(ty.vmap(function(a, k) return a * k end, { in_dims = { 1, false }, out_dims = 1 })(x, 3), x * 3)
  local sum, both = ty.vmap(function(t) return t.a + t.b, { twice = t.a * 2, list = { t.b } } end,
    { in_dims = { { a = 0, b = false } } })({ a = x, b = y })
  near(sum, x + y)
  near(both.twice, x * 2)
  near(both.list[1], ty.stack { y, y, y, y })
  local first, second = ty.vmap(function(a) return a:sum(), a end, { out_dims = { 0, 2 } })(x)
  near(first, x:sum { 1, 2 })
  near(second, x:movedim(0, 2))
  check.equal(ty.vmap(function(a) return a:sum() end)(ty.zeros(0, 3)).shape, { 0 })
  near(ty.vmap(function(a) return a:exp() end, { chunk_size = 3 })(x), x:exp())
  near(ty.vmap(function(a) return { a:exp() } end, { chunk_size = 2, out_dims = 1 })(x)[1], x:exp():movedim(0, 1))
end)

check.test("shapes inside are those of a sample", function()
  ty.vmap(function(a)
    check.equal(a.shape, { 3 })
    check.equal(a.ndim, 1)
    check.equal(a:numel(), 3)
    check.ok(tostring(a):find("of each sample", 1, true) ~= nil)
    return a
  end)(ty.randn(5, 3))
end)

check.test("nested", function()
  local a, b = ty.randn(4, 3), ty.randn(5, 3)
  local function dot(p, q) return (p * q):sum() end
  local table_of = ty.vmap(function(p) return ty.vmap(function(q) return dot(p, q) end)(b) end)(a)
  near(table_of, a:matmul(b:t()))
  local pairs_of = ty.vmap(ty.vmap(dot, { in_dims = { false, 0 } }), { in_dims = { 0, false } })(a, b)
  near(pairs_of, a:matmul(b:t()))
  local x = ty.randn(2, 3, 4)
  near(ty.vmap(ty.vmap(function(v) return v:softmax(0) end, { in_dims = 1, out_dims = 1 }))(x), x:softmax(1))
  local w = ty.randn(3, 5, 4):requires_grad_()
  local function layers(m) return ty.vmap(function(v) return ty.linear(v, m):tanh():sum() end)(ty.ones(6, 4)) end
  local g = ty.grad(ty.vmap(layers)(w):sum(), { w })[1]
  local want = ty.grad((ty.linear(ty.ones(6, 4), w:reshape(15, 4)):tanh()):sum(), { w })[1]
  near(g, want)
end)

-- ---- gradients of each sample ----

local function names_of(model)
  local names, values = {}, {}
  for name in pairs(model:state_dict()) do names[#names + 1] = name end
  table.sort(names)
  for i, name in ipairs(names) do values[i] = model:state_dict()[name]:detach() end
  return names, values
end

-- Gradients of loss(model(x), t) for the model's parameters, as a function of x and t.
local function gradients_of(model, loss)
  local names, values = names_of(model)
  return function(x, t)
    local _, grads = ty.vjp(function(...)
      local parameters, list = {}, { ... }
      for i, name in ipairs(names) do parameters[name] = list[i] end
      return loss(ty.functional_call(model, parameters, x:unsqueeze(0)), t:unsqueeze(0))
    end, values)
    return table.unpack(grads)
  end
end

local function as_in_a_loop(gradients, x, t)
  local got, each = { ty.vmap(gradients)(x, t) }, {}
  for i = 0, x.shape[1] - 1 do
    for k, g in ipairs { gradients(x:select(0, i), t:select(0, i)) } do
      each[k] = each[k] or {}
      each[k][i + 1] = g
    end
  end
  check.equal(#got, #each)
  for k, list in ipairs(each) do near(got[k], ty.stack(list), 2e-5) end
end

check.test("gradients of each sample: MLP", function()
  local model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
  as_in_a_loop(gradients_of(model, ty.cross_entropy), ty.randn(5, 6), ty.randint(0, 3, { 5 }))
end)

check.test("gradients of each sample: convolutions", function()
  local model = nn.Sequential(nn.Conv2d(2, 4, 3, { padding = 1 }), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(4, 4, 3, { groups = 2, stride = 2, padding = 1 }), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(4, 3))
  as_in_a_loop(gradients_of(model, ty.cross_entropy), ty.randn(4, 2, 8, 8), ty.randint(0, 3, { 4 }))
end)

check.test("gradients of each sample: attention", function()
  local model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, { dropout = 0, feedforward = 16 }), nn.Flatten(),
    nn.Linear(40, 3))
  as_in_a_loop(gradients_of(model, ty.cross_entropy), ty.randn(4, 5, 8), ty.randint(0, 3, { 4 }))
end)

check.test("gradients of each sample: recurrent", function()
  local model = nn.LSTM(3, 4)
  local names, values = names_of(model)
  local function gradients(x)
    local _, grads = ty.vjp(function(...)
      local parameters, list = {}, { ... }
      for i, name in ipairs(names) do parameters[name] = list[i] end
      return (ty.functional_call(model, parameters, x:unsqueeze(1))):square():sum()
    end, values)
    return table.unpack(grads)
  end
  local x = ty.randn(3, 6, 3)
  local got = { ty.vmap(gradients)(x) }
  for i = 0, 2 do
    for k, g in ipairs { gradients(x:select(0, i)) } do near(got[k]:select(0, i), g) end
  end
end)

check.test("gradients by ty.grad inside are of each sample, outside of all", function()
  local w, x = ty.randn(3, 4):requires_grad_(), ty.randn(5, 4)
  local function loss(v) return ty.linear(v, w):tanh():square():sum() end
  local each = ty.vmap(function(v) return ty.grad(loss(v), { w })[1] end)(x)
  check.equal(each.shape, { 5, 3, 4 })
  for i = 0, 4 do near(each:select(0, i), ty.grad(loss(x:select(0, i)), { w })[1]) end
  near(ty.grad(ty.vmap(loss)(x):sum(), { w })[1], each:sum(0))
  ty.vmap(loss)(x):sum():backward()
  near(w.grad, each:sum(0))
end)

check.test("derivatives of gradients of each sample", function()
  local w, x = ty.randn(3, 4, { dtype = "f64" }):requires_grad_(), ty.randn(5, 4, { dtype = "f64" })
  local function norm(v)
    local g = ty.grad(ty.linear(v, w):sigmoid():square():sum(), { w }, { create_graph = true })[1]
    return g:square():sum()
  end
  local total = 0
  for i = 0, 4 do total = total + norm(x:select(0, i)) end
  local got = ty.grad(ty.vmap(norm)(x):sum(), { w })[1]
  near(got, ty.grad(total, { w })[1], 1e-10)
  local fixed = w:detach()
  local function curve(v) return ty.hessian(function(u) return ty.linear(u, fixed):tanh():sum() end, v) end
  local hessians = ty.vmap(curve)(x)
  for i = 0, 4 do near(hessians:select(0, i), curve(x:select(0, i))) end
  local _, along = ty.vmap(function(v) return ty.jvp(ty.sin, v, v) end)(x)
  near(along, x:cos() * x, 1e-10)
end)

check.test("an ensemble: parameters that are stacked", function()
  local models, stacked = {}, {}
  for i = 1, 3 do models[i] = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)) end
  for name in pairs(models[1]:state_dict()) do
    local list = {}
    for i, model in ipairs(models) do list[i] = model:state_dict()[name]:detach() end
    stacked[name] = ty.stack(list):requires_grad_()
  end
  local x = ty.randn(6, 4)
  local function call(p, v) return ty.functional_call(models[1], p, v) end
  local y = ty.vmap(call, { in_dims = { 0, false } })(stacked, x)
  y:square():sum():backward()
  for i, model in ipairs(models) do
    local own = model(x)
    near(y:select(0, i - 1):detach(), own:detach())
    own:square():sum():backward()
    near(stacked["0.weight"].grad:select(0, i - 1), model[1].weight.grad, 1e-4)
    near(stacked["1.bias"].grad:select(0, i - 1), model[2].bias.grad, 1e-4)
  end
  local convs, kernels = {}, {}
  for i = 1, 3 do
    convs[i] = nn.Conv2d(2, 3, 3)
    kernels[i] = convs[i].weight:detach()
  end
  local image = ty.randn(2, 2, 6, 6)
  local maps = ty.vmap(function(k) return ty.conv2d(image, k, convs[1].bias:detach()) end)(ty.stack(kernels))
  for i = 1, 3 do near(maps:select(0, i - 1), ty.conv2d(image, kernels[i], convs[1].bias:detach())) end
end)

check.test("Jacobians by one mapped pass, row by row where an op has no rule", function()
  local x = ty.randn(7, { dtype = "f64" })
  local w = ty.randn(90, 7, { dtype = "f64" })
  local rows = ty.jacobian(function(v) return ty.linear(v, w):tanh() end, x)
  near(rows, (1 - w:matmul(x):tanh():square()):unsqueeze(1) * w, 1e-12)
  local square = ty.custom_op {
    name = "squared",
    forward = function(ctx, v)
      ctx:save(v)
      return v * v
    end,
    backward = function(ctx, g) return 2 * g * (ctx:saved()) end,
  }
  near(ty.vmap(function(v) return select(2, ty.vjp(function(u) return square(u):sum() end, v)) end)(w), 2 * w, 1e-12)
  local doubled = ty.custom_op {
    name = "doubled",
    forward = function(_, v) return v * 2 end,
    backward = function(_, g) return ty.tensor(g:tolist(), { dtype = "f64" }) * 2 end, -- looks at values
  }
  near(ty.jacobian(doubled, x), ty.eye(7, { dtype = "f64" }) * 2, 1e-12)
end)

-- ---- random numbers ----

check.test("random numbers", function()
  local x = ty.zeros(4, 1000)
  local function all_equal(t) return (t - t:select(0, 0)):abs():max():item() == 0 end
  for _, draw in ipairs {
    function(v) return v + ty.randn(1000) end, function(v) return v + ty.rand_like(v) end,
    function(v) return v:clone():normal_() end, function(v) return ty.bernoulli(v + 0.5) end,
    function(v) return ty.dropout(v + 1, 0.5) end, function() return ty.dropout(ty.ones(1000), 0.5) end,
    function(v) return v + ty.randperm(1000) end, function(v) return v + ty.randint(0, 50, { 1000 }) end,
  } do
    check.fails(function() ty.vmap(draw)(x) end, "randomness")
    local different = ty.vmap(draw, { randomness = "different" })(x)
    local same = ty.vmap(draw, { randomness = "same" })(x)
    check.equal(different.shape, { 4, 1000 })
    check.equal(same.shape, { 4, 1000 })
    check.ok(not all_equal(different), "different")
    check.ok(all_equal(same), "the same")
  end
  local drawn = ty.vmap(function(p) return ty.multinomial(p, 2) end, { randomness = "different" })(ty.ones(3, 5))
  check.equal(drawn.shape, { 3, 2 })
  local orders = ty.vmap(function(v) return v + ty.randperm(9) end, { randomness = "different" })(ty.zeros(5, 9))
  near(orders:sort(1), ty.arange(9):to("f32"):expand(5, 9))
  local weight = ty.ones(8):requires_grad_()
  local kept = ty.vmap(function(v) return ty.dropout(weight * v, 0.5) end, { randomness = "different" })(ty.ones(50, 8))
  near(ty.grad(kept:sum(), { weight })[1], kept:detach():sum(0))
  check.ok(ty.nn.Dropout(0.5):eval()(x):sum():item() == 0)
  check.equal(ty.vmap(ty.nn.Dropout(0.5):eval())(x).shape, { 4, 1000 })
end)

-- ---- writing ----

check.test("writing in place", function()
  local x = ty.randn(4, 3)
  local y = ty.vmap(function(v)
    local z = v:clone()
    z:add_(1)
    z[0] = 5
    z["1:3"] = v:sum()
    return z
  end)(x)
  local want = x + 1
  want:select(1, 0):fill_(5)
  want:narrow(1, 1, 2):copy_(x:sum(1):unsqueeze(1):expand(4, 2))
  near(y, want)
  local own = ty.zeros(3)
  check.fails(function() ty.vmap(function(v) return own:add_(v) end)(x) end, "cannot be written")
  check.fails(function() ty.vmap(function(v)
    own[0] = v:sum()
    return v
  end)(x) end, "cannot be written")
  ty.vmap(function(v) return own:add_(1) + v end)(x)
  check.equal(own:tolist(), { 1, 1, 1 }, "what is the same for all, once")
  local filled = ty.vmap(function(v)
    local z = ty.zeros_like(v)
    for i = 0, 2 do z[i] = v[i] * i end
    return z
  end)(x)
  near(filled, x * ty.arange(3))
end)

check.test("positions that differ by sample", function()
  local x, at = ty.randn(4, 6), ty.tensor { 1, 5, 0, 2 }
  near(ty.vmap(function(v, i) return v:index_select(0, i) end)(x, at:unsqueeze(1)):squeeze(1),
    x:gather(1, at:unsqueeze(1)):squeeze(1))
  check.fails(function() ty.vmap(function(v, i) return v:index_select(0, i) end)(x, at:unsqueeze(1) + 3) end,
    "out of range")
  local table_of = ty.randn(4, 7, 3)
  local rows = ty.vmap(ty.embedding)(table_of, at)
  for i = 0, 3 do near(rows:select(0, i), table_of:select(0, i):select(0, at[i]:item())) end
end)

-- ---- with the rest ----

check.test("inside ty.compile", function()
  local w = ty.randn(3, 4):requires_grad_()
  local function step(x)
    return ty.vmap(function(v) return ty.grad(ty.linear(v, w):tanh():sum(), { w })[1] end)(x)
  end
  local compiled = ty.compile(step)
  for _ = 1, 4 do
    local x = ty.randn(5, 4)
    near(compiled(x), step(x), 0)
  end
  check.equal(#ty.core.program.stats(compiled), 1)
end)

check.test("nothing is left alive", function()
  local w = ty.randn(3, 4):requires_grad_()
  local function once()
    local x <const> = ty.randn(5, 4)
    local y = ty.vmap(function(v) return ty.linear(v, w):tanh() end)(x)
    y:sum():backward()
    w:set_grad(nil)
    pcall(ty.vmap(function(v) error("stop") return v end), x)
  end
  once()
  collectgarbage()
  collectgarbage()
  local before = ty.memory.stats("cpu").live
  for _ = 1, 3 do once() end
  collectgarbage()
  collectgarbage()
  check.equal(ty.memory.stats("cpu").live, before)
end)

check.test("errors", function()
  local x = ty.randn(4, 3)
  local function id(v) return v end
  check.fails(function() ty.vmap(3) end, "vmap: fn: expected a function, got 3")
  check.fails(function() ty.vmap(id, { dims = 0 }) end, "dims")
  check.fails(function() ty.vmap(id, { randomness = "some" }) end, "randomness")
  check.fails(function() ty.vmap(id)(3) end, "vmap: expected a tensor among the arguments")
  check.fails(function() ty.vmap(id, { in_dims = 2 })(x) end,
    "vmap: argument 1: expected a dimension of a tensor [4, 3]")
  check.fails(function() ty.vmap(id, { out_dims = 2 })(x) end, "vmap: out_dims: expected a dimension")
  check.fails(function() ty.vmap(id, { in_dims = { 0, 0 } })(x) end, "vmap: in_dims")
  check.fails(function() ty.vmap(id, { in_dims = { { a = 0 } } })(x) end, "argument 1")
  check.fails(function() ty.vmap(id)(x, ty.randn(5)) end, "vmap: argument 2: expected 4 samples in dimension 0")
  check.fails(function() ty.vmap(function() return 3 end)(x) end, "vmap: fn: expected it to return tensors, got 3")
  check.fails(function() ty.vmap(function(v) return v:sum():item() end)(x) end, "item: inside ty.vmap the values of")
  check.fails(function() ty.vmap(function(v) return v:tolist() end)(x) end, "tolist: inside ty.vmap the values of")
  check.fails(function() ty.vmap(function(v) return v:unique() end)(x) end, "unique: ty.vmap has no rule for this op")
  check.fails(function() ty.vmap(function(v) return v[v:gt(0)] end)(x) end, "nonzero: ty.vmap has no rule")
  check.fails(function() ty.vmap(function(v) return v:sum(1) end)(x) end, "expected a dimension in [-1, 0], got 1")
  check.fails(function()
    local w = ty.randn(3):requires_grad_()
    ty.vmap(function(v)
      (w * v):sum():backward()
      return v
    end)(x)
  end, "use ty.grad")
  local kept
  ty.vmap(function(v)
    kept = v
    return v
  end)(x)
  check.fails(function() kept:tolist() end, "inside ty.vmap")
end)

check.finish()
