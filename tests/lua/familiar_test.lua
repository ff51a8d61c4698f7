-- The names that users of other libraries reach for (lua/tycho/familiar.lua).

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"
local test, equal, fails = check.test, check.equal, check.fails

local x = ty.arange(6):reshape(2, 3)

test("other names are the ops themselves", function()
  for name, op in pairs(require("tycho.familiar").others) do
    check.ok(ty[name] ~= nil and ty[name] == ty[op], name)
    check.ok(rawget(ty.core.Tensor.methods, name) == rawget(ty.core.Tensor.methods, op), name)
  end
  equal(ty.cat({ x, x }, 0).shape, { 4, 3 })
  equal(x:float():mm(x:float():t()):tolist(), { { 5, 14 }, { 14, 50 } })
end)

test("equal, allclose, isin", function()
  check.ok(ty.equal(x, x:clone()) and not ty.equal(x, x + 1) and not ty.equal(x, x:reshape(3, 2)))
  check.ok(ty.equal(ty.zeros(0, 2), ty.zeros(0, 2)) and not ty.equal(ty.zeros(0, 2), ty.zeros(2, 0)))
  local y = ty.tensor { 1, 2, 0 / 0 }
  check.ok(not y:allclose(y) and y:allclose(y, nil, nil, true) and y:allclose(y + 1e-6, 1e-5, 1e-8, true))
  check.ok(not ty.tensor({ 1.0 }):allclose(ty.tensor { 1.1 }) and ty.tensor({ 1.0 }):allclose(ty.tensor { 1.1 }, 0.2))
  equal(ty.isin(x, ty.tensor { 5, 0, 9 }):tolist(), { { true, false, false }, { false, false, true } })
  equal(ty.isin(x, ty.tensor({}, { dtype = "i64" })):any():item(), false)
  fails(function() ty.equal(x, 3) end, "equal: y: expected a tensor, got 3")
  fails(function() ty.allclose(x, x, -1) end, "allclose: rtol: expected a number >= 0 or nil, got -1")
end)

test("dtypes by name", function()
  local want = { float = "f32", double = "f64", half = "f16", bfloat16 = "bf16", long = "i64", int = "i32",
    short = "i16", char = "i8", byte = "u8", bool = "bool" }
  for name, dtype in pairs(want) do equal(x[name](x).dtype, dtype) end
  equal(x:type_as(ty.zeros(1)).dtype, "f32")
end)

test("views: memory is shared, bytes are seen as another dtype, a copy is refused", function()
  local v = x:clone()
  v:view(3, -1):fill_(7)
  equal(v:tolist(), { { 7, 7, 7 }, { 7, 7, 7 } })
  equal(v:view({ 6 }).shape, { 6 })
  fails(function() v:t():view(6) end, "has no view of shape [6] without a copy")
  local f = ty.tensor { 1.0, -2.0 }
  equal(f:view("i32"):tolist(), { 0x3f800000, 0xc0000000 - (1 << 32) })
  equal(f:view("u8").shape, { 8 })
  equal(f:view("u8"):view("f32"):tolist(), { 1, -2 })
  fails(function() f:view("f99") end, "view_dtype: dtype")
  fails(function() ty.zeros(3):view("f64") end, "cannot be seen as f64")
  equal(v:view_as(ty.zeros(3, 2)).shape, { 3, 2 })
  equal(v:t():reshape_as(ty.zeros(6)).shape, { 6 })
  equal(ty.zeros(1, 3):expand_as(x).shape, { 2, 3 })
end)

test("T, mT, t", function()
  equal(x.T:tolist(), { { 0, 3 }, { 1, 4 }, { 2, 5 } })
  equal(ty.zeros(4, 2, 3).mT.shape, { 4, 3, 2 })
  equal(x[0].T.shape, { 3 })
  local w = ty.ones(2, 3):requires_grad_()
  ty.sum(w.T * ty.tensor { 1.0, 2.0 }):backward()
  equal(w.grad:tolist(), { { 1, 1, 1 }, { 2, 2, 2 } })
  fails(function() return ty.zeros(2, 2, 2).T end, "T: expected at most 2 dimensions")
  fails(function() return ty.zeros(2).mT end, "mT: expected at least 2 dimensions, got [2] f32 cpu")
  fails(function() return ty.zeros(2, 2, 2):t() end, "t: x: expected at most 2 dimensions")
end)

test("shapes", function()
  equal(x:ravel().shape, { 6 })
  equal(ty.zeros(2, 12, 3):unflatten(1, { 3, -1 }).shape, { 2, 3, 4, 3 })
  fails(function() ty.zeros(2, 12):unflatten(1, { 5, -1 }) end, "unflatten: sizes: expected a product of 12")
  equal(ty.zeros(2, 3, 4, 5):movedim({ 0, -1 }, { -1, 0 }).shape, { 5, 3, 4, 2 })
  equal(ty.zeros(2, 3, 4):movedim(0, 2).shape, { 3, 4, 2 })
  fails(function() ty.zeros(2, 3):movedim({ 0, 0 }, { 0, 1 }) end, "movedim: source: expected different dimensions")
  equal({ ty.tensor(1.0):atleast_1d().shape, ty.zeros(3):atleast_2d().shape, ty.zeros(3):atleast_3d().shape,
    x:atleast_3d().shape }, { { 1 }, { 1, 3 }, { 1, 3, 1 }, { 2, 3, 1 } })
  equal(x:flipud()[0]:tolist(), { 3, 4, 5 })
  equal(x:fliplr()[0]:tolist(), { 2, 1, 0 })
  local a, b = ty.broadcast_tensors(ty.zeros(3, 1), ty.zeros(2))
  equal({ a.shape, b.shape }, { { 3, 2 }, { 3, 2 } })
  fails(function() ty.broadcast_tensors(ty.zeros(3), ty.zeros(2)) end, "argument 2: size 2 of dimension -1")
  local sizes = {}
  for i, part in ipairs { ty.arange(7):tensor_split(3) } do sizes[i] = part:numel() end
  equal(sizes, { 3, 2, 2 })
  sizes = {}
  for i, part in ipairs { ty.arange(7):tensor_split { 2, 5, 9 } } do sizes[i] = part:numel() end
  equal(sizes, { 2, 3, 2, 0 })
  equal(ty.column_stack({ ty.arange(2), x }).shape, { 2, 4 })
  equal(ty.dstack({ x, x }).shape, { 2, 3, 2 })
end)

test("diag", function()
  equal(ty.tensor({ 1, 2 }):diag():tolist(), { { 1, 0 }, { 0, 2 } })
  equal(ty.tensor({ 1, 2 }):diag(-1):tolist(), { { 0, 0, 0 }, { 1, 0, 0 }, { 0, 2, 0 } })
  equal(x:diag(1):tolist(), { 1, 5 })
  local w = ty.ones(2):requires_grad_()
  w:diag():sum():backward()
  equal(w.grad:tolist(), { 1, 1 })
end)

test("making tensors", function()
  equal(ty.logspace(0, 2, 3):tolist(), { 1, 10, 100 })
  equal(ty.logspace(0, 3, 4, 2, { dtype = "f64" }):tolist(), { 1, 2, 4, 8 })
  equal(x:new_zeros(2, 2).dtype, "i64")
  equal(x:new_ones({ 2 }, { dtype = "f32" }):tolist(), { 1, 1 })
  equal(x:new_full({ 2 }, 7):tolist(), { 7, 7 })
  equal(x:clone():zero_():sum():item(), 0)
  equal({ x:dim(), x:nelement() }, { 2, 6 })
  equal(ty.tensor({ 3, 1, 2 }):msort():tolist(), { 1, 2, 3 })
end)

test("integers and bool where numbers are asked for", function()
  equal(x:mean():item(), 2.5)
  equal(ty.tensor({ 0, 1 }):exp().dtype, "f32")
  equal(ty.tensor({ true, false }):mean():item(), 0.5)
  fails(function() x:clone():exp_() end, "exp: x: expected a float tensor")
end)

check.finish()
