-- Tensors as Lua sees them: making, printing, slices, writes, operators, promotion, values out, errors.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"

-- ---- making ----

check.test("ty.tensor from tables", function()
  local x = ty.tensor { { 1, 2 }, { 3, 4 } }
  check.equal({ x.shape, x.dtype, tostring(x.device), x.ndim, #x, x:numel() }, { { 2, 2 }, "i64", "cpu", 2, 2, 4 })
  check.equal(x:tolist(), { { 1, 2 }, { 3, 4 } })
  check.equal(ty.tensor({ 1.5, 2 }).dtype, "f32")
  check.equal(ty.tensor({ true, false }).dtype, "bool")
  check.equal(ty.tensor({ true, false }):tolist(), { true, false })
  check.equal(ty.tensor(5).shape, {})
  check.equal(ty.tensor(5):item(), 5)
  check.equal(ty.tensor(2.5):item(), 2.5)
  check.equal(ty.tensor({}).shape, { 0 })
  check.equal(ty.tensor({ {}, {} }).shape, { 2, 0 })
  check.equal(ty.tensor({ 1, 2 }, { dtype = "f64" }).dtype, "f64")
  check.equal(ty.tensor({ 1, 0, 2 }, { dtype = "bool" }):tolist(), { true, false, true })
  check.equal(ty.tensor({ math.maxinteger, math.mininteger }):tolist(), { math.maxinteger, math.mininteger })
end)

check.test("ty.tensor refuses what is no array", function()
  check.fails(function() ty.tensor { { 1, 2 }, { 3 } } end, "tensor")
  check.fails(function() ty.tensor { { 1, 2 }, 3 } end, "tensor")
  check.fails(function() ty.tensor { 1, "two" } end, "tensor")
  check.fails(function() ty.tensor { 1, {} } end, "tensor")
  check.fails(function() ty.tensor() end, "tensor")
  check.fails(function() ty.tensor({ 1 }, { dtype = "f31" }) end, "f31")
  check.fails(function() ty.tensor({ 1 }, { dtyp = "f32" }) end, "dtyp")
  local deep = 1
  for _ = 1, 100 do deep = { deep } end
  check.fails(function() ty.tensor(deep) end, "tensor")
  local loop = {}
  loop[1] = loop
  check.fails(function() ty.tensor(loop) end, "tensor")
end)

check.test("sizes as numbers or lists", function()
  check.equal(ty.zeros(2, 3).shape, { 2, 3 })
  check.equal(ty.zeros({ 2, 3 }).shape, { 2, 3 })
  check.equal(ty.zeros({ 2, 3 }, { dtype = "i32" }).dtype, "i32")
  check.equal(ty.zeros(2, 3, { dtype = "i32" }).shape, { 2, 3 })
  check.equal(ty.zeros({}).shape, {})
  check.fails(function() ty.zeros(-1) end, "zeros")
  check.fails(function() ty.zeros(2, "3") end, "zeros")
  check.fails(function() ty.zeros(2.5) end, "zeros")
  check.fails(function() ty.zeros(1, 1, 1, 1, 1, 1, 1, 1, 1) end, "8 dimensions")
end)

-- ---- values out ----

check.test("item and tolist", function()
  check.equal(ty.ones(1, 1):item(), 1.0)
  check.equal(math.type(ty.tensor({ 3 }):item()), "integer")
  check.equal(ty.tensor({ true }):item(), true)
  check.fails(function() ty.ones(2):item() end, "one element")
  check.fails(function() ty.ones(2, { device = "meta" }):tolist() end, "meta")
  check.fails(function() ty.ones(1, { device = "meta" }):item() end, "meta")
  check.equal(ty.zeros(0):tolist(), {})
  check.equal(ty.zeros(2, 0):tolist(), { {}, {} })
  check.equal(ty.tensor({ { 1, 2 }, { 3, 4 } }):transpose(0, 1):tolist(), { { 1, 3 }, { 2, 4 } })
  for _, dtype in ipairs { "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8" } do
    check.equal(ty.tensor({ 0, 1, 100 }, { dtype = dtype }):tolist(), { 0, 1, 100 }, dtype)
  end
end)

check.test("to", function()
  local x = ty.tensor { 1.75, -2.5 }
  check.equal(x:to("i32"):tolist(), { 1, -2 })
  check.equal(x:to("f16").dtype, "f16")
  check.equal(x:to { dtype = "f64", device = "meta" }.dtype, "f64")
  check.equal(tostring(x:to("meta").device), "meta")
  check.fails(function() x:to "f33" end, "f33")
  check.fails(function() x:to "meta":to "cpu" end, "meta")
end)

-- ---- printing ----

check.test("printing", function()
  local text = tostring(ty.tensor { { 1.5, 2 }, { -3, 4 } })
  for _, part in ipairs { "1.5", "-3", "4", "f32" } do check.ok(text:find(part, 1, true), part .. " in " .. text) end
  text = tostring(ty.zeros(1000, 1000))
  check.ok(#text < 4000, "a big tensor is cut: " .. #text .. " characters")
  check.ok(text:find("%.%.%.") or text:find("…"), "and says so")
  check.ok(text:find("1000"), "with its shape")
  local odd = {
    ty.zeros(0), ty.zeros(2, 0, 3), ty.tensor(5), ty.tensor { true }, ty.zeros(2, 2, { device = "meta" }),
    ty.tensor { 1e30, 1e-30, 0 / 0, math.huge }, ty.ones(1, 1, 1, 1, 1, 1, 1, 1), ty.ones(2):to "bf16",
    ty.tensor { math.mininteger },
  }
  for _, t in ipairs(odd) do check.ok(#tostring(t) > 0) end
  check.ok(tostring(ty.ones(1):requires_grad_()):find("grad"), "a leaf that wants a gradient says so")
end)

-- ---- slices ----

local grid = ty.arange(24):reshape(4, 6)

check.test("reading slices", function()
  check.equal(grid[0]:tolist(), { 0, 1, 2, 3, 4, 5 })
  check.equal(grid[-1]:tolist(), { 18, 19, 20, 21, 22, 23 })
  check.equal(grid[1][2]:item(), 8)
  check.equal(grid["1, 2"]:item(), 8)
  check.equal(grid["1:3, 0"]:tolist(), { 6, 12 })
  check.equal(grid[":, -1"]:tolist(), { 5, 11, 17, 23 })
  check.equal(grid["::2, 1:4:2"]:tolist(), { { 1, 3 }, { 13, 15 } })
  check.equal(grid["-2:, :2"]:tolist(), { { 12, 13 }, { 18, 19 } })
  check.equal(grid["..., 0"]:tolist(), { 0, 6, 12, 18 })
  check.equal(grid["0, ..."].shape, { 6 })
  check.equal(grid["..."].shape, { 4, 6 })
  check.equal(grid["2:2"].shape, { 0, 6 })
  check.equal(grid["1:100"].shape, { 3, 6 })
  check.equal(ty.zeros(2, 3, 4)["..., 0, :"].shape, { 2, 4 })
  check.equal(grid[":, None, 0"].shape, { 4, 1 })
  check.equal(ty.tensor(5)["..."]:item(), 5)
  check.equal(grid[ty.tensor { 2, 0 }][":, 0"]:tolist(), { 12, 0 })
  check.equal(grid[grid:gt(21)]:tolist(), { 22, 23 })
end)

check.test("wrong slices", function()
  check.fails(function() return grid[4] end, "4")
  check.fails(function() return grid[-5] end, "-5")
  check.fails(function() return grid["0, 0, 0"] end, "0, 0, 0")
  check.fails(function() return grid["a"] end, "a")
  check.fails(function() return grid["0:1:0"] end)
  check.fails(function() return grid["0:1:2:3"] end)
  check.fails(function() return grid["..., ..."] end)
  check.fails(function() return grid["1 2"] end)
  check.fails(function() return grid["99999999999999999999"] end)
  check.fails(function() return grid[1.5] end)
  check.fails(function() return ty.tensor(5)[0] end)
end)

check.test("writing slices", function()
  local x = ty.zeros(3, 4)
  x["0"] = 1
  x["1, 2"] = 5
  x["2, ::2"] = ty.tensor { 7, 8 }
  check.equal(x:tolist(), { { 1.0, 1.0, 1.0, 1.0 }, { 0.0, 0.0, 5.0, 0.0 }, { 7.0, 0.0, 8.0, 0.0 } })
  x["..."] = 2
  check.equal(x:sum():item(), 24.0)
  x[1] = ty.arange(4)
  check.equal(x[1]:tolist(), { 0.0, 1.0, 2.0, 3.0 })
  x[":, 0"] = x[":, 3"]
  check.equal(x[":, 0"]:tolist(), { 2.0, 3.0, 2.0 })
  x["0:2"] = x["1:3"] -- source and target overlap
  check.equal(x[0]:tolist(), { 3.0, 1.0, 2.0, 3.0 })
  x[x:gt(2)] = 0
  check.equal(x[0]:tolist(), { 0.0, 1.0, 2.0, 0.0 })
  check.equal(x[1]:tolist(), { 2.0, 2.0, 2.0, 2.0 })
  check.fails(function() x["0"] = ty.ones(5) end, "[5]")
  check.fails(function() x["7"] = 1 end, "7")
  check.fails(function() x.no_such_field = 1 end, "no_such_field")
  check.fails(function() x["0"] = "text" end)
  check.fails(function() ty.ones(1):expand(3)["0:2"] = 2 end, "expand")
end)

check.test("views share memory, copies do not", function()
  local x = ty.zeros(2, 3)
  x:transpose(0, 1)["2, 1"] = 9
  check.equal(x:tolist(), { { 0.0, 0.0, 0.0 }, { 0.0, 0.0, 9.0 } })
  local c = x:clone()
  c["..."] = 1
  check.equal(x:sum():item(), 9.0)
end)

-- ---- operators and promotion ----

check.test("operators", function()
  local x, y = ty.tensor { 7.0, -7.0 }, ty.tensor { 2.0, 2.0 }
  check.equal((x + y):tolist(), { 9.0, -5.0 })
  check.equal((x - 1):tolist(), { 6.0, -8.0 })
  check.equal((1 - x):tolist(), { -6.0, 8.0 })
  check.equal((x * y):tolist(), { 14.0, -14.0 })
  check.equal((x / y):tolist(), { 3.5, -3.5 })
  check.equal((x // y):tolist(), { 3.0, -4.0 })
  check.equal((x % y):tolist(), { 1.0, 1.0 })
  check.equal((y ^ 3):tolist(), { 8.0, 8.0 })
  check.equal((2 ^ y):tolist(), { 4.0, 4.0 })
  check.equal((-x):tolist(), { -7.0, 7.0 })
  check.equal(x:gt(0):tolist(), { true, false })
  local m, n = ty.tensor { 12, -3 }, ty.tensor { 10, 6 }
  check.equal({ (m & n):tolist(), (m | 1):tolist(), (m ~ n):tolist() }, { { 8, 4 }, { 13, -3 }, { 6, -5 } })
  check.equal({ (n << 2):tolist(), (m >> 1):tolist(), (1 << n):tolist(), (~m):tolist() },
    { { 40, 24 }, { 6, -2 }, { 1024, 64 }, { -13, 2 } })
  local yes = x:gt(0)
  check.equal({ (yes & ~yes):tolist(), (yes | ~yes):tolist() }, { { false, false }, { true, true } })
  check.fails(function() return x & 1 end, "bitwise_and")
  check.fails(function() return m << 1.5 end, "bitwise_left_shift")
  check.fails(function() return x + {} end)
  check.fails(function() return x + "1" end)
  check.fails(function() return x + nil end)
end)

check.test("promotion", function()
  local function dtype(a, b) return (a + b).dtype end
  local function t(d) return ty.ones(2, { dtype = d }) end
  check.equal(dtype(t "f32", t "f64"), "f64")
  check.equal(dtype(t "f16", t "bf16"), "f32")
  check.equal(dtype(t "f16", t "f32"), "f32")
  check.equal(dtype(t "i64", t "f16"), "f16")
  check.equal(dtype(t "u8", t "i8"), "i16")
  check.equal(dtype(t "i32", t "i64"), "i64")
  check.equal(dtype(t "bool", t "u8"), "u8")
  check.equal(dtype(t "f32", 1), "f32")
  check.equal(dtype(t "f16", 1.5), "f16")
  check.equal(dtype(t "i32", 1), "i32")
  check.equal(dtype(t "i32", 1.5), "f32")
  check.equal(dtype(t "bool", 1), "i64")
  check.equal((t "i32" / t "i32").dtype, "f32")
end)

check.test("in-place ops", function()
  local x = ty.ones(2, 2)
  local same = x:add_(1):mul_(3)
  check.equal(x:tolist(), { { 6.0, 6.0 }, { 6.0, 6.0 } })
  check.equal(same:tolist(), x:tolist())
  check.fails(function() x:add_(ty.ones(3, 2, 2)) end, "add")
  check.fails(function() ty.ones(2, { dtype = "i32" }):add_(1.5) end, "add")
  check.fails(function() ty.ones(1):expand(4):add_(1) end, "clone")
  local y = ty.arange(4):to "f32"
  y["1:"]:add_(y[":3"]) -- overlapping operands
  check.equal(y:tolist(), { 0.0, 1.0, 3.0, 5.0 })
end)

-- ---- functions, methods, options ----

check.test("functions and methods are the same ops", function()
  local x = ty.tensor { { 1.0, 2.0 }, { 3.0, 4.0 } }
  check.equal(ty.sum(x, { 0 }):tolist(), { 4.0, 6.0 })
  check.equal(x:sum({ 0 }):tolist(), { 4.0, 6.0 })
  check.equal(x:sum(0):tolist(), { 4.0, 6.0 })
  check.equal(x:sum({ 0 }, true).shape, { 1, 2 })
  check.equal(x:sum({ 0 }, { keepdim = true }).shape, { 1, 2 })
  check.equal(x:sum { 0, keepdim = true }.shape, { 1, 2 })
  check.equal(x:sum { dims = { 1 }, keepdim = true }.shape, { 2, 1 })
  check.equal(x:sum { keepdim = true }.shape, { 1, 1 })
  check.equal(x:reshape(4, -1).shape, { 4, 1 })
  check.equal(x:reshape({ 4, -1 }).shape, { 4, 1 })
  check.fails(function() x:sum({ 0 }, { keepdims = true }) end, "keepdims")
  check.fails(function() x:sum(0, false, "f32", 1) end, "sum")
  check.fails(function() return x:no_such_method() end, "no_such_method")
end)

check.test("errors say where they were raised", function()
  local text = check.fails(function() ty.ones(2, 3):matmul(ty.ones(2, 3)) end, "matmul")
  check.ok(text:find("tensor_test.lua:%d+"), "position in " .. text)
  check.ok(text:find("[2, 3]", 1, true), "shapes in " .. text)
end)

check.test("reading fields that do not exist", function()
  check.fails(function() return ty.ones(1).no_such_field end, "no_such_field")
  check.equal(rawequal(ty.ones(1).add, ty.ones(2).add), true)
end)

check.test("random state", function()
  ty.manual_seed(5)
  local a = ty.rand(3):tolist()
  local state = ty.rng_state()
  local b = ty.rand(3):tolist()
  ty.rng_state(state)
  check.equal(ty.rand(3):tolist(), b)
  ty.manual_seed(5)
  check.equal(ty.rand(3):tolist(), a)
end)

check.test("no globals are made", function()
  for _, name in ipairs { "tycho", "ty", "torch", "tensor" } do check.equal(rawget(_G, name), nil, name) end
end)

check.test("casts of what is turned are those of the same elements in order", function()
  local x = (ty.rand(3, 70, 45) * 250)
  for _, from in ipairs { "f32", "f64", "bf16", "f16", "i64", "u8", "bool" } do
    local source = x:to(from)
    for _, to in ipairs { "f32", "f64", "bf16", "f16", "i64", "i32", "u8", "bool" } do
      local turned, want = source:transpose(1, 2):to(to), source:to(to)
      check.equal(turned.shape, { 3, 45, 70 })
      check.ok(turned:transpose(1, 2):eq(want):all():item(), from .. " to " .. to)
    end
  end
end)

check.test("errors name the op that was called, not a part of it that has no name to the user", function()
  local function says(f, text)
    local _, message = pcall(f)
    check.equal(message:find(text, 1, true) ~= nil, true, ("%q in %q"):format(text, message))
  end
  says(function() ty.cholesky(ty.zeros(2, 2)) end, "cholesky: x: matrix 0 is not positive definite")
  says(function() ty.solve(ty.zeros(2, 2), ty.zeros(2, 1)) end, "solve: a: matrix 0 is singular")
  says(function() ty.inverse(ty.zeros(2, 2)) end, "inverse: solve: a: matrix 0 is singular")
  says(function() ty.addcmul(ty.zeros(5), ty.zeros(3), ty.zeros(3)) end, "addcmul: shapes [5] and [3]")
  says(function() ty.index_put(ty.zeros(3), { ty.zeros(1) }, 1) end, "index_put: indices: expected tensors")
end)

check.finish()
