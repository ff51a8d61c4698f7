--- Linear algebra that is a few ops: functions of ty and methods of tensors. Matrices are the last two dimensions; what
-- is in front of them is a batch.
local core = require "tycho.core"
local arguments = require "tycho.arguments"

local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe
local functions, of_ty = {}, {}

local function matrix(who, x, name, square)
  expect(who, name or "x", x, "a tensor")
  if x.ndim < 2 or (square and x:size(-1) ~= x:size(-2)) then
    fail("%s: %s: expected %s, got [%s]", who, name or "x", square and "square matrices [..., n, n]" or
      "matrices [..., n, m]", table.concat(x.shape, ", "))
  end
  return x
end

--- The sum of the diagonal.
---@param x Tensor  [..., n, m]
---@return Tensor [...]
function functions.trace(x) return matrix("trace", x):diagonal(0, -2, -1):sum { -1 } end

--- Determinants; 0 of singular matrices, where the gradient is not defined.
---@param x Tensor  [..., n, n]
---@return Tensor [...]
function functions.det(x)
  local sign, log = core.slogdet(matrix("det", x, "x", true))
  return sign * log:exp()
end

--- Logarithms of determinants; NaN of negative ones.
---@param x Tensor  [..., n, n]
---@return Tensor [...]
function functions.logdet(x)
  local sign, log = core.slogdet(matrix("logdet", x, "x", true))
  return core.where(sign:lt(0), 0 / 0, log)
end

--- Singular values in descending order.
---@param x Tensor  [..., n, m]
---@return Tensor [..., min(n, m)]
function functions.svdvals(x)
  local _, values = core.svd(matrix("svdvals", x))
  return values
end

--- Eigenvalues of symmetric matrices in ascending order.
---@param x Tensor  [..., n, n]
---@return Tensor [..., n]
function functions.eigvalsh(x) return (core.eigh(matrix("eigvalsh", x, "x", true))) end

--- x times itself, n times; of its inverse where n is negative.
---@param x Tensor  [..., n, n]
---@param n integer
---@return Tensor
function functions.matrix_power(x, n)
  matrix("matrix_power", x, "x", true)
  expect("matrix_power", "n", n, "an integer in [-1048576, 1048576]")
  local result
  if n < 0 then x, n = x:inverse(), -n end
  if n == 0 then
    return core.eye(x:size(-1), { dtype = x.dtype, device = x.device }):expand(x.shape):clone()
  end
  while true do -- squares, of which those are taken whose bit is set
    if n & 1 == 1 then result = result and result:matmul(x) or x end
    n = n >> 1
    if n == 0 then return result end
    x = x:matmul(x)
  end
end

--- Norms of matrices: "fro" (the root of all squares), "nuc" (the sum of singular values), 2 and -2 (the largest and
--- smallest of them), 1 and -1 (sums of columns), math.huge and -math.huge (sums of rows).
---@param x Tensor  [..., n, m]
---@param kind? string|number  ("fro")
---@return Tensor [...]
function functions.matrix_norm(x, kind)
  matrix("matrix_norm", x)
  if kind == nil then kind = "fro" end
  if kind == "fro" then return x:norm(2, { -2, -1 }) end
  if kind == "nuc" then return functions.svdvals(x):sum { -1 } end
  if kind == 2 then return functions.svdvals(x):max { -1 } end
  if kind == -2 then return functions.svdvals(x):min { -1 } end
  local sums = (kind == 1 or kind == -1) and x:abs():sum { -2 }
    or (kind == math.huge or kind == -math.huge) and x:abs():sum { -1 }
  if not sums then
    fail('matrix_norm: kind: expected "fro", "nuc", 2, -2, 1, -1, math.huge or -math.huge, got %s',
      arguments.describe(kind))
  end
  return kind > 0 and sums:max { -1 } or sums:min { -1 }
end

--- How many singular values lie above a bound: `atol`, and rtol of the largest one (the precision of the dtype times
--- the larger side when neither is given).
---@param x Tensor  [..., n, m]
---@param options? {atol: number, rtol: number}
---@return Tensor i64 [...]
function functions.matrix_rank(x, options)
  matrix("matrix_rank", x)
  local o = arguments.read("matrix_rank", options, { atol = 0, rtol = arguments.none },
    { atol = "a number >= 0", rtol = "a number >= 0" })
  local rtol = o.rtol
  if rtol == nil then
    rtol = o.atol > 0 and 0 or math.max(x:size(-1), x:size(-2)) * (x.dtype == "f64" and 2.0 ^ -52 or 2.0 ^ -23)
  end
  local values = functions.svdvals(x)
  return values:gt((values:max({ -1 }, true) * rtol):clamp(o.atol)):to("i64"):sum { -1 }
end

--- The norm of x times that of its inverse: of what is computed with x, how much larger relative errors can become.
--- kind as matrix_norm's; 2 and -2, the ratio of the largest singular value to the smallest and the other way round,
--- also take matrices that are not square. inf of singular ones.
---@param x Tensor  [..., n, m]; [..., n, n] for kinds other than 2 and -2
---@param kind? string|number  (2)
---@return Tensor [...]
function functions.cond(x, kind)
  kind = kind or 2
  if kind == 2 or kind == -2 then
    local values = functions.svdvals(matrix("cond", x))
    local high, low = values:max { -1 }, values:min { -1 }
    return kind == 2 and high / low or low / high
  end
  matrix("cond", x, "x", true)
  if kind ~= "fro" and kind ~= "nuc" and math.type(kind) ~= "integer" and kind ~= math.huge and kind ~= -math.huge then
    fail('cond: kind: expected "fro", "nuc", 2, -2, 1, -1, math.huge or -math.huge, got %s', arguments.describe(kind))
  end
  local sign = core.slogdet(x:detach())
  local singular = sign:eq(0)
  local one = core.eye(x:size(-1), { dtype = x.dtype, device = x.device })
  local safe = core.where(singular:unsqueeze(-1):unsqueeze(-1), one, x)
  local number = functions.matrix_norm(x, kind) * functions.matrix_norm(safe:inverse(), kind)
  return core.where(singular, math.huge, number)
end
functions.condition_number = functions.cond

--- The product of several matrices, in the order that takes the fewest multiplications. The first may be a row [n], the
--- last a column [n].
---@param list Tensor[]
---@return Tensor
function of_ty.multi_dot(list)
  expect("multi_dot", "list", list, "a list")
  if #list < 2 then fail("multi_dot: list: expected at least two matrices, got %d", #list) end
  local xs, first, last = {}, false, false
  for i, x in ipairs(list) do
    expect("multi_dot", ("list[%d]"):format(i), x, "a tensor")
    if x.ndim == 1 and i == 1 then x, first = x:unsqueeze(0), true end
    if x.ndim == 1 and i == #list then x, last = x:unsqueeze(1), true end
    if x.ndim ~= 2 or (i > 1 and xs[i - 1]:size(1) ~= x:size(0)) then
      fail("multi_dot: list[%d]: expected a matrix [%s, n], got [%s]", i, i > 1 and tostring(xs[i - 1]:size(1)) or "m",
        table.concat(list[i].shape, ", "))
    end
    xs[i] = x
  end
  -- The least cost of a product of neighbours, by the lengths of runs.
  local cost, cut = {}, {}
  for i = 1, #xs do cost[i], cut[i] = { [i] = 0 }, {} end
  for length = 2, #xs do
    for i = 1, #xs - length + 1 do
      local j = i + length - 1
      for k = i, j - 1 do
        local c = cost[i][k] + cost[k + 1][j] + xs[i]:size(0) * xs[k]:size(1) * xs[j]:size(1)
        if not cost[i][j] or c < cost[i][j] then cost[i][j], cut[i][j] = c, k end
      end
    end
  end
  local function product(i, j)
    if i == j then return xs[i] end
    return product(i, cut[i][j]):matmul(product(cut[i][j] + 1, j))
  end
  local y = product(1, #xs)
  if last then y = y:squeeze { 1 } end
  return first and y:squeeze { 0 } or y
end

--- The Kronecker product: x with every element multiplied by all of y. Dimensions that one lacks are of size 1.
---@param x Tensor
---@param y Tensor
---@return Tensor
function functions.kron(x, y)
  expect("kron", "x", x, "a tensor")
  expect("kron", "y", y, "a tensor")
  local n = math.max(x.ndim, y.ndim)
  if 2 * n > 8 then fail("kron: x: expected at most 4 dimensions, got %d", n) end
  local a, b, size = {}, {}, {}
  for d = 1, n do
    local p = d > n - x.ndim and x:size(d - 1 - (n - x.ndim)) or 1
    local q = d > n - y.ndim and y:size(d - 1 - (n - y.ndim)) or 1
    a[2 * d - 1], a[2 * d], b[2 * d - 1], b[2 * d], size[d] = p, 1, 1, q, p * q
  end
  return (x:reshape(a) * y:reshape(b)):reshape(size)
end

--- Powers of the elements of a list as columns, from the first up, or down where increasing is false.
---@param x Tensor  [..., n]
---@param count? integer  (n)
---@param increasing? boolean  (true)
---@return Tensor [..., n, count]
function functions.vander(x, count, increasing)
  if expect("vander", "x", x, "a tensor").ndim < 1 then fail "vander: x: expected [..., n], got no dimensions" end
  count = expect("vander", "count", count or x:size(-1), "an integer >= 0")
  local powers = core.arange(count, { device = x.device })
  if increasing == false then powers = powers:flip(0) end
  return x:unsqueeze(-1):pow(powers:to(x.dtype))
end

--- Solves a x = b where `factor` is the lower (or upper) triangle of the Cholesky decomposition of a.
---@param b Tensor  [..., n, k]
---@param factor Tensor  [..., n, n]
---@param upper? boolean
---@return Tensor [..., n, k]
function functions.cholesky_solve(b, factor, upper)
  matrix("cholesky_solve", b, "b")
  matrix("cholesky_solve", factor, "factor", true)
  local lower = upper and factor:transpose(-2, -1) or factor
  local y = core.solve_triangular(lower, b, false)
  return core.solve_triangular(lower:transpose(-2, -1), y, true)
end

--- The inverse of the matrix whose Cholesky decomposition has this triangle.
---@param factor Tensor  [..., n, n]
---@param upper? boolean
---@return Tensor
function functions.cholesky_inverse(factor, upper)
  matrix("cholesky_inverse", factor, "factor", true)
  local one = core.eye(factor:size(-1), { dtype = factor.dtype, device = factor.device })
  return functions.cholesky_solve(one:expand(factor.shape), factor, upper)
end

-- Numerator and denominator of exp by the Pade approximants of order 13, good to 2^-53 up to a 1-norm of 5.37, and of
-- order 7, good to 2^-24 up to 3.92 (Higham 2005, "The Scaling and Squaring Method for the Matrix Exponential
-- Revisited").
local PADE_7 = { 17297280, 8648640, 1995840, 277200, 25200, 1512, 56, 1 }
local PADE = { 64764752532480000, 32382376266240000, 7771770303897600, 1187353796428800, 129060195264000,
  10559470521600, 670442572800, 33522128640, 1323241920, 40840800, 960960, 16380, 182, 1 }

--- The exponential of matrices.
---@param x Tensor  [..., n, n]
---@return Tensor
function functions.matrix_exp(x)
  matrix("matrix_exp", x, "x", true)
  if x:numel() == 0 then return x:clone() end
  local narrow = x.dtype ~= "f64" and x.dtype
  if narrow then x = x:to "f64" end
  local size = functions.matrix_norm(x:detach(), 1):max():item()
  if size ~= size or size == math.huge then return (x + 0 / 0):to(narrow or "f64") end
  local most = narrow and 3.92 or 5.37
  local squarings = size > most and math.ceil(math.log(size / most, 2)) or 0
  local a = x / 2.0 ^ squarings
  local one = core.eye(x:size(-1), { dtype = "f64", device = x.device })
  local a2 = a:matmul(a)
  local a4 = a2:matmul(a2)
  local a6 = a4:matmul(a2)
  local c = narrow and PADE_7 or PADE
  local odd = a6 * c[8] + a4 * c[6] + a2 * c[4] + one * c[2]
  local even = a6 * c[7] + a4 * c[5] + a2 * c[3] + one * c[1]
  if not narrow then
    odd = a6:matmul(a6 * c[14] + a4 * c[12] + a2 * c[10]) + odd
    even = a6:matmul(a6 * c[13] + a4 * c[11] + a2 * c[9]) + even
  end
  odd = a:matmul(odd)
  local y = core.solve(even - odd, even + odd)
  for _ = 1, squarings do y = y:matmul(y) end
  return narrow and y:to(narrow) or y
end

--- x with tensordot(a, x, x.ndim) = b, for a whose dimensions are those of b and then those of x. Without `dims`, which
--- PyTorch calls so: the dimensions of a that are moved to its end first.
---@param a Tensor
---@param b Tensor
---@param dims? integer[]
---@return Tensor
function functions.tensorsolve(a, b, dims)
  expect("tensorsolve", "a", a, "a tensor")
  expect("tensorsolve", "b", b, "a tensor")
  expect("tensorsolve", "dims", dims, "a list of integers or nil")
  if dims then
    local ends = {}
    for i = 1, #dims do ends[i] = a.ndim - #dims + i - 1 end
    a = a:movedim(dims, ends)
  end
  local size = table.move(a.shape, b.ndim + 1, a.ndim, 1, {})
  local unknowns = 1
  for _, n in ipairs(size) do unknowns = unknowns * n end
  if a.ndim < b.ndim or unknowns * b:numel() ~= a:numel() or unknowns ~= b:numel() then
    fail("tensorsolve: a: expected the dimensions of b %s and as many elements in the others, got %s", describe(b),
      describe(a))
  end
  return core.solve(a:reshape(unknowns, unknowns), b:reshape(unknowns, 1)):reshape(size)
end

--- The inverse of a as a map from its last dimensions to its first `ind`.
---@param a Tensor  whose first `ind` sizes have the product of the others
---@param ind? integer  2
---@return Tensor
function functions.tensorinv(a, ind)
  expect("tensorinv", "a", a, "a tensor")
  ind = expect("tensorinv", "ind", ind == nil and 2 or ind, "an integer >= 1")
  local shape, rows, columns = a.shape, 1, 1
  for d, n in ipairs(shape) do
    if d <= ind then rows = rows * n else columns = columns * n end
  end
  if rows ~= columns then
    fail("tensorinv: a: expected sizes whose first %d have the product of the others, got %s", ind, describe(a))
  end
  local size = table.move(shape, ind + 1, a.ndim, 1, {})
  table.move(shape, 1, math.min(ind, a.ndim), #size + 1, size)
  return core.inverse(a:reshape(rows, rows)):reshape(size)
end

return { functions = functions, methods = {}, of_ty = of_ty, others = { inv = "inverse" } }
