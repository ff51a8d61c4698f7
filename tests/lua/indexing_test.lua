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

-- What a mask of the first dimensions reads and writes, in plain Lua: nested lists, the mask's true positions in order.
local function masked(x, mask, visit)
  if type(mask) == "boolean" then
    if mask then visit(x) end
    return
  end
  for i, m in ipairs(mask) do
    if m == true then visit(x, i) elseif m then masked(x[i], m, visit) end
  end
end

check.test("a mask stands for the first dimensions", function()
  ty.manual_seed(8)
  for _, sizes in ipairs { { 5 }, { 4, 3 }, { 3, 4, 2 }, { 2, 3, 2, 2 } } do
    for dims = 1, #sizes do
      for _, dtype in ipairs { "f32", "i64", "bool", "bf16" } do
        local what = table.concat(sizes, "x") .. " by " .. dims .. " " .. dtype
        local x = (ty.randn(sizes) * 4):to(dtype)
        if #sizes > 1 then x = x:transpose(0, 1):contiguous():transpose(0, 1) end -- strides of their own
        local mask = ty.rand({ table.unpack(sizes, 1, dims) }):gt(0.4)

        local expected = {}
        masked(x:tolist(), mask:tolist(), function(list, i) expected[#expected + 1] = list[i] end)
        check.equal(x[mask]:tolist(), expected, what)

        local count, rest = #expected, { table.unpack(sizes, dims + 1) }
        local values = (ty.randn { count, table.unpack(rest) } * 4):to(dtype)
        for _, given in ipairs { values, values["0:1"], (ty.randn(rest) * 4):to(dtype), 1 } do
          if count > 0 then
            local rows = type(given) == "number" and ty.full({ count, table.unpack(rest) }, given, { dtype = dtype })
              or given:expand { count, table.unpack(rest) }
            local after, k = x:tolist(), 0
            rows = rows:tolist()
            masked(after, mask:tolist(), function(list, i)
              k = k + 1
              list[i] = rows[k]
            end)
            local y = x:clone()
            local view = #sizes > 1 and y:transpose(0, 1):contiguous():transpose(0, 1) or y
            view[mask] = given
            check.equal(view:tolist(), after, what)
          end
        end
      end
    end
  end
end)

check.test("a mask's gradient, a mask without dimensions, and masks that do not fit", function()
  local x = ty.arange(6):reshape(3, 2)
  local rows = ty.tensor { true, false, true }
  local p = x:to("f64"):requires_grad_()
  check.equal(ty.grad((p[rows] * ty.tensor { { 1, 2 }, { 3, 4 } }):sum(), { p })[1]:tolist(),
    { { 1, 2 }, { 0, 0 }, { 3, 4 } })
  check.equal(x[ty.tensor(true)].shape, { 1, 3, 2 })
  check.equal(x[ty.tensor(false)].shape, { 0, 3, 2 })
  local y = x:clone()
  y[ty.tensor(false)] = 7
  check.equal(y:tolist(), x:tolist())
  y[rows] = 2.5 -- into integers: cut off, as fill_ does
  check.equal(y:tolist(), { { 2, 2 }, { 2, 3 }, { 2, 2 } })
  local big = ty.full({ 2, 2 }, (1 << 53) + 1, { dtype = "i64" }) -- what is not written stays as it is
  big[ty.tensor { true, false }] = ty.tensor { 1.5, 2.5 }
  check.equal(big:tolist(), { { 1, 2 }, { (1 << 53) + 1, (1 << 53) + 1 } })
  local text = "index: expected a mask with the sizes of the first dimensions of x [3, 2]"
  for _, mask in ipairs { ty.tensor { true, false }, ty.tensor { { true }, { true }, { false } },
    x:unsqueeze(2):gt(0) } do
    check.fails(function() return x[mask] end, text)
    check.fails(function() x[mask] = 1 end, text)
  end
  check.fails(function() x[rows] = ty.ones(3, 2) end, "index: expected values that broadcast to the [2, 2] written to")
  check.fails(function() x[rows] = ty.ones(3) end, "index: expected values that broadcast to the [2] written to")
end)

check.test("errors of an index speak of the index", function()
  local x = ty.zeros(3, 2)
  local function set(index, value) return function() x[index] = value end end
  local function get(index) return function() return x[index] end end
  for _, try in ipairs { get(7), set(7, 1), get "7", set("7, 0", 1) } do
    check.fails(try, "index: expected a position in [-3, 2] of dimension 0, got 7 for x [3, 2] f32 cpu")
  end
  for _, try in ipairs { get ":, -3", set("..., -3", 1), get "None, 1:, None, -3" } do
    check.fails(try, "index: expected a position in [-2, 1] of dimension 1, got -3 for x [3, 2] f32 cpu")
  end
  check.fails(get "::0", "index: slice: step")
  check.fails(get "one", 'a tensor has no op')
  check.fails(get "1 2", "index: expected positions, start:stop:step")
  check.fails(get(ty.tensor { 9 }), "index: index 9 is out of range")
  check.fails(set("0:2", ty.ones(5)), "index: expected values that broadcast to the [2, 2] written to, got [5]")
  check.fails(function() return ty.zeros(0)[0] end, "index: dimension 0 of x [0] f32 cpu is empty, got position 0")
  check.fails(function() return ty.tensor(1)[0] end, "index: expected a tensor with dimensions, got [] i64")
end)

check.test("a shape is a list that counts from 1, and says so", function()
  local x = ty.zeros(3, 2)
  for _, shape in ipairs { x.shape, x:size() } do
    check.equal({ #shape, shape[1], shape[2], shape[3] }, { 2, 3, 2 })
    check.equal({ table.unpack(shape) }, { 3, 2 })
    check.equal(shape, { 3, 2 })
    for _, wrong in ipairs { 0, -1 } do
      check.fails(function() return shape[wrong] end, ("expected a position from 1 up, got %d"):format(wrong))
      check.fails(function() return shape[wrong] end, ("x:size(%d)"):format(wrong))
    end
    check.equal(shape.other, nil)
  end
  check.equal({ x:size(0), x:size(-1) }, { 3, 2 })
  local thread = ty.thread.new(function()
    return function(shape) return shape, #shape, select(2, pcall(function() return shape[0] end)) end
  end)
  thread:send(x.shape)
  local back, n, message = thread:receive()
  thread:close()
  check.equal({ back, n }, { { 3, 2 }, 2 })
  check.ok(tostring(message):find("expected a position from 1 up", 1, true), "the other side's shape says so too")
end)

-- ---- lists of slices, positions, tensors and masks ----

local function gradients(y, inputs, weight) return ty.grad((y * weight):sum(), inputs) end

check.test("lists of slices and tensors read", function()
  local x = ty.arange(24):reshape(2, 3, 4)
  local i, j = ty.tensor { 0, -1 }, ty.tensor { 2, 0 }
  check.equal(x[{ 1, 2, 3 }]:item(), 23)
  check.equal(x[{ 0, "1:", -1 }]:tolist(), { 7, 11 })
  check.equal(x[{ "..., None" }].shape, { 2, 3, 4, 1 })
  check.equal(x[{ i, j }]:tolist(), { { 8, 9, 10, 11 }, { 12, 13, 14, 15 } })
  check.equal(x[{ ":", i, j }]:tolist(), { { 2, 8 }, { 14, 20 } })
  check.equal(x[{ i, ":", j }]:tolist(), { { 2, 6, 10 }, { 12, 16, 20 } }, "apart: the index comes first")
  check.equal(x[{ 1, "::2", i }]:tolist(), { { 12, 15 }, { 20, 23 } })
  check.equal(x[{ i:unsqueeze(1), j }].shape, { 2, 2, 4 })
  check.equal(x[{ "...", ty.tensor { true, false, false, true } }]:tolist(),
    { { { 0, 3 }, { 4, 7 }, { 8, 11 } }, { { 12, 15 }, { 16, 19 }, { 20, 23 } } })
  check.equal(x[ty.tensor { -1 }]:tolist(), x["1:"]:tolist())
  check.equal(x[ty.tensor(-2)]:tolist(), x[0]:tolist())
end)

check.test("lists of slices and tensors write", function()
  local x = ty.zeros({ 3, 4 }, { dtype = "i64" })
  x[{ ty.tensor { 0, -1 }, ty.tensor { 1, 3 } }] = ty.tensor { 5, 6 }
  x[{ 1, "::2" }] = 7
  x[{ ":", ty.tensor { -1 } }] = ty.tensor { 1, 2, 3 }:unsqueeze(1)
  check.equal(x:tolist(), { { 0, 5, 0, 1 }, { 7, 0, 7, 2 }, { 0, 0, 0, 3 } })
  x[ty.tensor { 0, 0, -1 }] = ty.tensor { { 1, 1, 1, 1 }, { 2, 2, 2, 2 }, { 3, 3, 3, 3 } }
  check.equal(x:tolist(), { { 2, 2, 2, 2 }, { 7, 0, 7, 2 }, { 3, 3, 3, 3 } }, "the last of repeated positions wins")
  local t = x:transpose(0, 1)
  t[{ ty.tensor { 0, 1 } }] = 9
  check.equal(x:tolist(), { { 9, 9, 2, 2 }, { 9, 9, 7, 2 }, { 9, 9, 3, 3 } }, "through strides of its own")
  x[{ ty.tensor { 0, 1 } }] = x["1:3"]
  check.equal(x:tolist(), { { 9, 9, 7, 2 }, { 9, 9, 3, 3 }, { 9, 9, 3, 3 } }, "from its own memory")
end)

check.test("written parts have gradients", function()
  local function leaf(...) return ty.randn({ ... }, { dtype = "f64" }):requires_grad_() end
  ty.manual_seed(11)
  local a, y = leaf(3, 4), leaf(4)
  local keys = {
    [1] = { 1, function(w) return w[1] end }, -- key, and its part of the gradient of what was written to
    [2] = { "1, ::2", function(w) return w["1, ::2"] end, leaf(2) },
    [3] = { { ":", -1 }, function(w) return w[":, -1"] end, leaf(3) },
    [4] = { { ty.tensor { 2, 0 }, ty.tensor { 1, -1 } }, function(w)
      return ty.stack { w["2, 1"], w["0, 3"] }
    end, leaf(2) },
    [5] = { { "1:", ty.tensor { 3, 0, 2 } }, function(w)
      return ty.stack({ w["1:, 3"], w["1:, 0"], w["1:, 2"] }, 1)
    end, leaf(2, 3) },
    [6] = { ty.tensor { true, false, true }, function(w) return w["::2"]:sum { 0 } end },
    [7] = { ty.tensor { -2 }, function(w) return w["1:2"] end, leaf(1, 4) },
  }
  for i, case in ipairs(keys) do
    local key, part, values = case[1], case[2], case[3] or y
    local x, weight = a * 2, ty.randn({ 3, 4 }, { dtype = "f64" })
    x[key] = values * 3
    check.equal(x:detach()[key]:reshape(-1):tolist(), (values * 3):detach():expand(x[key].shape):reshape(-1):tolist())
    local ga, gv = table.unpack(gradients(x, { a, values }, weight))
    local kept = weight:clone()
    kept[key] = 0
    check.equal(ga:tolist(), (kept * 2):tolist(), "of x, case " .. i)
    check.ok((gv - part(weight) * 3):abs():max():item() < 1e-12, "of the values, case " .. i)

    -- a number cuts the gradient, and the square of what was written has second derivatives
    x = a * 2
    x[key] = 1.5
    check.equal(gradients(x, { a }, weight)[1]:tolist(), (kept * 2):tolist())
    x = a * 1
    x[key] = values
    local g = ty.grad((x ^ 3):sum(), { values }, { create_graph = true })[1]
    local h = ty.grad(g:sum(), { values })[1]
    local times = i == 6 and 2 or 1
    check.ok((h - values:detach() * 6 * times):abs():max():item() < 1e-12, "second derivative, case " .. i)
  end
  local x = ty.zeros({ 3, 4 }, { dtype = "f64" }) -- itself without a gradient
  x[0] = y
  check.ok(x.requires_grad)
  check.equal(gradients(x, { y }, ty.ones(3, 4))[1]:tolist(), { 1, 1, 1, 1 })
end)

check.test("of repeated positions the last has the gradient, and sums give it to all", function()
  local v = ty.tensor({ 1, 2, 3 }, { dtype = "f64" }):requires_grad_()
  local at, weight = { ty.tensor { 1, 0, 1 } }, ty.tensor({ 10, 20 }, { dtype = "f64" })
  check.equal(gradients(ty.index_put(ty.zeros({ 2 }, { dtype = "f64" }), at, v), { v }, weight)[1]:tolist(),
    { 0, 10, 20 })
  check.equal(gradients(ty.index_put(ty.zeros({ 2 }, { dtype = "f64" }), at, v, true), { v }, weight)[1]:tolist(),
    { 20, 10, 20 })
end)

check.test("what of writes cannot be recorded, and wrong lists", function()
  local x = ty.ones(3, 2):requires_grad_()
  check.fails(function() x[0] = 1 end, "index: [3, 2] f32 cpu is a leaf that requires a gradient")
  check.fails(function() (x * 1):reshape(2, 3)[0] = 1 end, "index: a write through the view [2, 3]")
  check.fails(function() ty.ones(1, 2):expand(3, 2)["0"] = x[0] end, "index: cannot write into the expanded view")
  local y = x * 2
  local z = y:square()
  y[0] = 1
  check.fails(function() z:sum():backward() end, "changed")
  ty.no_grad(function() x[{ 0, 1 }] = 5 end)
  check.equal(x:detach():tolist(), { { 1, 5 }, { 1, 1 }, { 1, 1 } })
  y = ty.zeros(3, 2)
  check.fails(function() return y[{}] end, "index: expected a list of integers, slice strings and tensors, got an")
  check.fails(function() return y[{ 0, true }] end, "slice strings and tensors in a list, got boolean")
  check.fails(function() return y[{ 0.5 }] end, "in a list, got a fraction")
  check.fails(function() return y[{ 0, 0, 0 }] end, "names more dimensions than x [3, 2] f32 cpu has")
  check.fails(function() return y[{ 3 }] end, "index: expected a position in [-3, 2] of dimension 0, got 3")
  check.fails(function() return y[{ ty.tensor { 3 } }] end, "index 3 is out of range for size 3")
  check.fails(function() return y[{ ty.tensor { 0.5 } }] end, "expected tensors of dtype i64, i32 or bool")
  check.fails(function() y[{ ty.tensor { 0, 1 } }] = ty.ones(3) end, "expected what broadcasts to the [2, 2]")
  check.fails(function() y[{ ":", true }] = 1 end, "got boolean")
  check.fails(function() y[y] = 1 end, "expected tensors of dtype i64, i32 or bool")
end)

check.finish()
