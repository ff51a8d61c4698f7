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
  equal({ x:cpu():tolist(), tostring(x:cpu().device) }, { x:tolist(), "cpu" })
  check.fails(function() x:cuda(-1) end, "cuda: index: expected an integer >= 0 or nil, got -1")
  if not ty.device_available "cuda" then check.fails(function() x:cuda() end, "cuda") end
  local module = ty.nn.ReLU()
  module:register_buffer("scale", ty.ones(2))
  module:register_parameter("weight", ty.ones(3))
  equal({ module:state_dict().scale.shape, #module:parameters() }, { { 2 }, 1 })
  equal(ty.tensor({ 3, 1, 2 }):msort():tolist(), { 1, 2, 3 })
end)

test("integers and bool where numbers are asked for", function()
  equal(x:mean():item(), 2.5)
  equal(ty.tensor({ 0, 1 }):exp().dtype, "f32")
  equal(ty.tensor({ true, false }):mean():item(), 0.5)
  fails(function() x:clone():exp_() end, "exp: x: expected a float tensor")
end)

test("products", function()
  local a, b = ty.randn({ 2, 3, 4 }, { dtype = "f64" }), ty.randn({ 4, 3, 5 }, { dtype = "f64" })
  local want = ty.einsum("ijk,kjm->im", a, b)
  check.ok(ty.tensordot(a, b, { { 2, 1 }, { 0, 1 } }):allclose(want, 0, 1e-12))
  check.ok(ty.tensordot(a, ty.randn({ 3, 4, 2 }, { dtype = "f64" }), 2).shape[2] == 2)
  check.ok(ty.inner(a, b[":, :, :4"]):allclose(ty.einsum("ijk,lmk->ijlm", a, b[":, :, :4"]), 0, 1e-12))
  local u, v = ty.tensor { 1.0, 2 }, ty.tensor { 3.0, 4 }
  equal({ u:vdot(v):item(), u:vecdot(v):item(), u:dist(v, 1):item() }, { 11, 11, 4 })
  check.ok(ty.addbmm(ty.ones(2, 2), ty.ones(3, 2, 4), ty.ones(3, 4, 2), 2, 0.5):allclose(ty.full({ 2, 2 }, 8)))
  fails(function() ty.tensordot(a, b, { { 2 }, { 1 } }) end, "tensordot: y: expected size 4 in dimension 1, got 3")
  fails(function() ty.tensordot(a, b, { { 2, 2 }, { 0, 1 } }) end, "tensordot: ")
  fails(function() u:vdot(ty.zeros(3)) end, "vdot: y: expected two lists of one length")
end)

test("parts that are replaced, with gradients", function()
  local src = ty.tensor({ 7.0, 8 }):requires_grad_()
  local whole = ty.zeros(2, 3):requires_grad_()
  local y = whole:select_scatter(src, 1, 2)
  equal(y:detach():tolist(), { { 0, 0, 7 }, { 0, 0, 8 } })
  ty.sum(y * ty.tensor { { 1.0, 2, 3 }, { 4, 5, 6 } }):backward()
  equal({ src.grad:tolist(), whole.grad:tolist() }, { { 3, 6 }, { { 1, 2, 0 }, { 4, 5, 0 } } })
  equal(ty.zeros(4):slice_scatter(ty.ones(2), 0, 0, nil, 2):tolist(), { 1, 0, 1, 0 })
  equal(ty.zeros(2, 3):diagonal_scatter(ty.ones(2), 1):tolist(), { { 0, 1, 0 }, { 0, 0, 1 } })
  equal(ty.tensor({ { 1, 2 } }):diag_embed(-1):tolist(), { { { 0, 0, 0 }, { 1, 0, 0 }, { 0, 2, 0 } } })
  equal(ty.tensor({ { 1 }, { 2 } }):diagflat():tolist(), { { 1, 0 }, { 0, 2 } })
  fails(function() ty.zeros(2, 3):select_scatter(ty.ones(3), 1, 0) end, "src: expected the shape of the part, [2]")
  local parts = {}
  for i, part in ipairs { ty.zeros(2, 5):hsplit(2) } do parts[i] = part:size(1) end
  equal(parts, { 3, 2 })
  fails(function() ty.zeros(2, 5):dsplit(2) end, "dsplit: x: expected at least 3 dimensions, got 2")
  equal(x:take(ty.tensor { { 5, 0 } }):tolist(), { { 5, 0 } })
  local rows, columns = ty.unravel_index(ty.tensor { 0, 5, 3 }, { 2, 3 })
  equal({ rows:tolist(), columns:tolist() }, { { 0, 1, 1 }, { 0, 2, 0 } })
  fails(function() ty.unravel_index(ty.tensor { 6 }, { 2, 3 }) end, "positions in a tensor of shape {2, 3}, got one")
end)

test("numbers", function()
  local a, b = ty.tensor { 1, 0 / 0, 3 }, ty.tensor { 2.0, 5, 0 / 0 }
  equal({ a:fmax(b):tolist(), a:fmin(b):tolist() }, { { 2, 5, 3 }, { 1, 5, 3 } })
  equal(ty.tensor({ 12, 0, -8, 7 }):gcd(ty.tensor { 18, 0, 12, 0 }):tolist(), { 6, 0, 4, 7 })
  equal(ty.tensor({ 4, 0, 3 }):lcm(ty.tensor { 6, 5, 7 }):tolist(), { 12, 0, 21 })
  fails(function() ty.tensor({ 1.5 }):gcd(ty.tensor { 2 }) end, "gcd: x: expected integers, got f32")
  equal(ty.float_power(ty.tensor { 2, 3 }, 2).dtype, "f64")
  equal(ty.tensor({ 1.0, 3 }):ldexp(ty.tensor { 3, -1 }):tolist(), { 8, 1.5 })
  equal(ty.tensor({ 1.0, 4, 9, 16 }):gradient(2):tolist(), { 1.5, 2, 3, 3.5 })
  equal(ty.tensor({ 1.0, 2, 4 }):cumulative_trapezoid(2):tolist(), { 3, 9 })
  equal({ ty.tensor({ 1 / 0, -1 / 0 }):isposinf():tolist(), ty.tensor({ 1 / 0, -1 / 0 }):isneginf():tolist() },
    { { true, false }, { false, true } })
  check.close(ty.tensor({ 0.0, 2 }):xlog1py(ty.tensor { -1.0, 1 }):tolist(), { 0, 2 * math.log(2) }, 1e-6)
  equal({ ty.tensor({ 3 }):is_nonzero(), ty.tensor({ 0 }):is_nonzero() }, { true, false })
  equal(ty.broadcast_shapes({ 3, 1 }, { 4 }, { 2, 1, 1 }), { 2, 3, 4 })
  fails(function() ty.broadcast_shapes({ 3 }, { 4 }) end, "broadcast_shapes: argument 2: size 4 does not meet 3")
  check.ok(ty.as_tensor(x) == x or ty.equal(ty.as_tensor(x), x))
  equal(ty.as_tensor({ 1, 2 }, { dtype = "f64" }).dtype, "f64")
  ty.manual_seed(1)
  local draws = ty.normal(ty.full({ 4000 }, 3), 2)
  check.ok(math.abs(draws:mean():item() - 3) < 0.1 and math.abs(draws:std():item() - 2) < 0.1)
  equal(ty.normal(0, 1, { 2, 3 }).shape, { 2, 3 })
  local ints = x:randint_like(5, 7)
  check.ok(ints:ge(5):all():item() and ints:lt(7):all():item())
  local logits = ty.tensor { { 1.0, 2, 0 } }
  local hard = ty.gumbel_softmax(logits:expand(9000, 3), 1, true)
  check.close(hard:mean({ 0 }):tolist(), logits:softmax(1)[0]:tolist(), 0.02)
  local w = ty.zeros(5, 3):requires_grad_()
  ty.sum(ty.gumbel_softmax(w, 1, true) * ty.tensor { 1.0, 2, 3 }):backward()
  check.ok(w.grad:abs():sum():item() > 0)
end)

local function f64(...) return ty.tensor(..., { dtype = "f64" }) end

test("linear algebra by a few ops", function()
  ty.manual_seed(5)
  local a = f64 { { 2, 1, 0 }, { 1, 3, 1 }, { 0, 1, 4 } }
  check.close({ a:det():item(), a:logdet():item(), a:trace():item() }, { 18, math.log(18), 9 }, 1e-12)
  check.ok((-a):logdet():isnan():item(), "the logarithm of a negative determinant")
  local m = ty.randn({ 2, 4, 3 }, { dtype = "f64" })
  check.ok(m:svdvals():square():sum { -1 }:allclose(m:square():sum { -1, -2 }, 0, 1e-10))
  check.ok(a:eigvalsh():sum():allclose(f64(9), 0, 1e-10))
  check.ok(a:matrix_power(5):allclose(a:mm(a):mm(a):mm(a):mm(a), 0, 1e-9))
  check.ok(a:matrix_power(-2):mm(a):mm(a):allclose(ty.eye(3, { dtype = "f64" }), 0, 1e-10))
  equal(a:matrix_power(0):tolist(), { { 1, 0, 0 }, { 0, 1, 0 }, { 0, 0, 1 } })
  local b = f64 { { 1, -2 }, { 3, 4 } }
  equal({ b:matrix_norm(1):item(), b:matrix_norm(math.huge):item(), b:matrix_norm(-1):item() }, { 6, 7, 4 })
  check.close(b:matrix_norm():item(), math.sqrt(30), 1e-12)
  check.close(b:matrix_norm(2):item() * b:matrix_norm(-2):item(), 10, 1e-10)
  check.close(b:matrix_norm "nuc":item() ^ 2, 30 + 2 * 10, 1e-9)
  check.close(b:condition_number():item(), b:matrix_norm(2):item() / b:matrix_norm(-2):item(), 1e-10)
  equal(ty.matrix_rank(f64 { { { 1, 2 }, { 2, 4 } }, { { 1, 0 }, { 0, 1e-3 } } }):tolist(), { 1, 2 })
  equal(ty.matrix_rank(f64 { { 1, 0 }, { 0, 1e-3 } }, { atol = 0.1 }):item(), 1)
  local list = { ty.randn({ 10, 2 }, { dtype = "f64" }), ty.randn({ 2, 30 }, { dtype = "f64" }),
    ty.randn({ 30, 5 }, { dtype = "f64" }), ty.randn({ 5 }, { dtype = "f64" }) }
  check.ok(ty.multi_dot(list):allclose(list[1]:mm(list[2]):mm(list[3]):mv(list[4]), 0, 1e-9))
  equal(ty.kron(f64 { { 1, 2 } }, f64 { { 1 }, { 10 } }):tolist(), { { 1, 2 }, { 10, 20 } })
  equal(ty.tensor({ 2.0, 3 }):vander(3):tolist(), { { 1, 2, 4 }, { 1, 3, 9 } })
  equal(ty.tensor({ 2.0, 3 }):vander(3, false):tolist(), { { 4, 2, 1 }, { 9, 3, 1 } })
  local factor, right = a:cholesky(), ty.randn({ 3, 2 }, { dtype = "f64" })
  check.ok(a:mm(ty.cholesky_solve(right, factor)):allclose(right, 0, 1e-12))
  check.ok(a:mm(ty.cholesky_solve(right, factor.mT, true)):allclose(right, 0, 1e-12))
  check.ok(factor:cholesky_inverse():allclose(a:inverse(), 0, 1e-12))
  fails(function() m:det() end, "det: x: expected square matrices [..., n, n], got [2, 4, 3]")
  fails(function() b:matrix_norm(3) end, 'matrix_norm: kind: expected "fro"')
  fails(function() ty.multi_dot { list[1], list[3] } end, "multi_dot: list[2]: expected a matrix [2, n], got [30, 5]")
end)

test("matrix_exp: of symmetric matrices by eigenvalues, large, nilpotent, and its gradient", function()
  ty.manual_seed(6)
  for _, scale in ipairs { 1e-3, 1, 30 } do
    local m = ty.randn({ 3, 5, 5 }, { dtype = "f64" })
    m = (m + m:transpose(-2, -1)) * scale / 5
    local values, vectors = ty.eigh(m)
    local want = (vectors * values:exp():unsqueeze(-2)):matmul(vectors:transpose(-2, -1))
    local off = (m:matrix_exp() - want):abs():max():item() / want:abs():max():item()
    check.ok(off < 1e-12, ("scale %g: off by %g"):format(scale, off))
  end
  check.close(f64({ { 0, 2, 1 }, { 0, 0, 3 }, { 0, 0, 0 } }):matrix_exp():tolist(),
    { { 1, 2, 4 }, { 0, 1, 3 }, { 0, 0, 1 } }, 1e-14)
  local t = 0.7 -- a rotation
  check.close(f64({ { 0, -t }, { t, 0 } }):matrix_exp():tolist(),
    { { math.cos(t), -math.sin(t) }, { math.sin(t), math.cos(t) } }, 1e-14)
  local m, g = ty.randn({ 3, 3 }, { dtype = "f64" }), ty.randn({ 3, 3 }, { dtype = "f64" })
  local leaf = m:clone():requires_grad_()
  ty.sum(leaf:matrix_exp() * g):backward()
  for i = 0, 8 do
    local step = ty.zeros({ 9 }, { dtype = "f64" })
    step[i] = 1e-5
    step = step:reshape(3, 3)
    local slope = (((m + step):matrix_exp() - (m - step):matrix_exp()) * g):sum():item() / 2e-5
    check.close(leaf.grad:reshape(-1)[i]:item(), slope, 1e-6)
  end
  equal(ty.zeros({ 2, 2 }):matrix_exp().dtype, "f32")
  for _, size in ipairs { 0.1, 3.8, 4, 30 } do -- f32 has a shorter form
    local a = ty.randn(5, 5)
    a = a * (size / ty.matrix_norm(a, 1):item())
    local want = ty.matrix_exp(a:to "f64")
    local off = (ty.matrix_exp(a):to "f64" - want):abs():max():item() / want:abs():max():item()
    check.ok(off < 1e-7, ("f32 of norm %g: off by %g"):format(size, off))
  end
  check.ok(f64({ { 1 / 0, 0 }, { 0, 0 } }):matrix_exp():isnan():any():item())
end)

check.finish()
