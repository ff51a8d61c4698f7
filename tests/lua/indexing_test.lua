-- Indexing ops: what the rows of tests/ops/indexing.lua do not show.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"

check.test("the padding row of an embedding gets no gradient", function()
  local w = ty.ones({ 4, 2 }, { dtype = "f64" }):requires_grad_()
  local index = ty.tensor { { 1, 3 }, { 1, 2 } }
  local y = ty.embedding(w, index, 1)
  check.equal(y:detach():tolist(), { { { 1, 1 }, { 1, 1 } }, { { 1, 1 }, { 1, 1 } } })
  local g = ty.grad(y:square():sum(), { w }, { create_graph = true })[1]
  check.equal(g:detach():tolist(), { { 0, 0 }, { 0, 0 }, { 2, 2 }, { 2, 2 } })
  local h = ty.grad(g:square():sum(), { w })[1]
  check.equal(h:tolist(), { { 0, 0 }, { 0, 0 }, { 8, 8 }, { 8, 8 } })
end)

check.test("of repeated indices in scatter only the last has a gradient", function()
  local x = ty.zeros({ 3 }, { dtype = "f64" }):requires_grad_()
  local src = ty.tensor({ 5, 6, 7, 8 }, { dtype = "f64" }):requires_grad_()
  local y = ty.scatter(x, 0, ty.tensor { 1, 0, 1, 0 }, src)
  check.equal(y:detach():tolist(), { 8, 7, 0 })
  local grads = ty.grad((y * ty.tensor({ 10, 20, 30 }, { dtype = "f64" })):sum(), { x, src })
  check.equal(grads[1]:tolist(), { 0, 0, 30 })
  check.equal(grads[2]:tolist(), { 0, 0, 20, 10 })
end)

check.test("large indexed writes are the same for any number of threads", function()
  local before = ty.threads()
  local n = 200000
  local function run(count)
    ty.set_threads(count)
    ty.manual_seed(4)
    local index, src = ty.randint(0, 1000, { n }), ty.randn(n)
    local one = ty.scatter_add(ty.zeros(1000), 0, index, src)
    local last = ty.scatter(ty.zeros(1000), 0, index, src)
    local rows = ty.index_add(ty.zeros(1000, 3), 0, index, ty.randn(n, 3))
    return { one:tolist(), last:tolist(), rows:tolist() }
  end
  local a, b = run(1), run(3)
  check.equal(a, b)
  ty.set_threads(before)
end)

check.test("the last of repeated indices wins", function()
  local n = 100000
  local positions = ty.arange(n)
  local y = ty.scatter(ty.full({ 10 }, -1, { dtype = "i64" }), 0, positions % 7, positions)
  check.equal(y:tolist(), { 99995, 99996, 99997, 99998, 99999, 99993, 99994, -1, -1, -1 })
end)

check.test("a mask selects and nonzero finds", function()
  local x = ty.arange(12):reshape(3, 4)
  check.equal(x:masked_select((x % 5):eq(0)):tolist(), { 0, 5, 10 })
  check.equal((x % 5):eq(0):nonzero():tolist(), { { 0, 0 }, { 1, 1 }, { 2, 2 } })
  check.equal(ty.ones(3):nonzero().shape, { 3, 1 })
  check.fails(function() ty.nonzero(x:to { device = "meta" }) end, "nonzero: the number of nonzero elements depends")
  check.fails(function() ty.one_hot(x:to { device = "meta" }) end, "one_hot: the number of classes depends")
end)

check.test("long sorts", function()
  ty.manual_seed(6)
  local x = ty.randn(30000)
  local values, positions = x:sort()
  check.ok((values[1] - values[0]):item() >= 0, "ascending")
  check.equal(values:tolist(), x:gather(0, positions):tolist())
  check.ok(values["1:"]:ge(values[":-1"]):all():item(), "in order")
  local top, where = x:topk(4000)
  check.equal(top:tolist(), x:sort(0, true)[":4000"]:tolist())
  check.equal(x:gather(0, where):tolist(), top:tolist())
  local ties = ty.randint(0, 3, { 30000 })
  local _, order = ties:sort()
  local low = ties:eq(0):sum():item()
  local first = order["0:" .. low]
  check.ok(first["1:"]:gt(first[":-1"]):all():item(), "equal values keep their order")
end)

check.test("gradients of running products through zeros", function()
  local x = ty.tensor({ 2, 0, 3, 0, 5 }, { dtype = "f64" }):requires_grad_()
  local g = ty.grad(x:cumprod(0):sum(), { x }, { create_graph = true })[1]
  check.equal(g:detach():tolist(), { 1, 8, 0, 0, 0 })
  local h = ty.grad(g:sum(), { x })[1]
  check.equal(h:tolist(), { 4, 42, 2, 36, 0 })
end)

check.finish()
