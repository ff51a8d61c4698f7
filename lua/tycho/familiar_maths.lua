--- More of what users of other libraries reach for: products, parts that are replaced, numbers. Functions of ty and
-- methods of tensors, as in familiar.lua.
local core = require "tycho.core"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local functions, of_ty = {}, {}

local function tensor(who, x, name) return expect(who, name or "x", x, "a tensor") end

local function dim_of(who, dim, n)
  expect(who, "dim", dim, "an integer")
  if dim < -n or dim >= n then fail("%s: dim: expected a dimension in [%d, %d], got %d", who, -n, n - 1, dim) end
  return dim < 0 and dim + n or dim
end

-- ---- making tensors ----

--- A tensor of a value, or the tensor itself where nothing has to change. options: dtype, device.
---@param value Tensor|number|boolean|table
---@param options? {dtype: Dtype, device: Device}
---@return Tensor
function of_ty.as_tensor(value, options)
  if not core.is_tensor(value) then return core.tensor(value, options) end
  local o = arguments.read("as_tensor", options, { dtype = value.dtype, device = value.device })
  return value:to { dtype = o.dtype, device = o.device }
end
of_ty.asarray = of_ty.as_tensor

--- Normal random numbers. mean and std: numbers with a size, or tensors, which broadcast and have the size of the
-- result.
---@param mean number|Tensor
---@param std number|Tensor
---@param size? integer[]
---@return Tensor
function of_ty.normal(mean, std, size)
  expect("normal", "mean", mean, "a number or a tensor")
  expect("normal", "std", std, "a number >= 0 or a tensor")
  local like = core.is_tensor(mean) and mean or core.is_tensor(std) and std
  if not like then
    return core.randn(expect("normal", "size", size, "a list of integers")) * std + mean
  end
  local full = core.is_tensor(mean) and core.is_tensor(std) and core.zeros_like(mean) + core.zeros_like(std) or like
  return core.randn_like(full) * std + mean
end

--- Random integers in [low, high) shaped like x, in its dtype.
---@param x Tensor
---@param low integer
---@param high integer
---@return Tensor
function functions.randint_like(x, low, high)
  tensor("randint_like", x)
  expect("randint_like", "low", low, "an integer")
  expect("randint_like", "high", high, "an integer")
  return core.randint(low, high, x.shape, { device = x.device }):to(x.dtype)
end

--- The shape that shapes broadcast to.
---@param ... integer[]
---@return integer[]
function of_ty.broadcast_shapes(...)
  local result = {}
  for i, shape in ipairs { ... } do
    expect("broadcast_shapes", ("argument %d"):format(i), shape, "a list of integers >= 0")
    local long, short = result, shape
    if #short > #long then long, short = short, long end
    local merged = table.move(long, 1, #long, 1, {})
    for d = 0, #short - 1 do
      local a, b = long[#long - d], short[#short - d]
      if a ~= b and a ~= 1 and b ~= 1 then
        fail("broadcast_shapes: argument %d: size %d does not meet %d of those before", i, shape[#shape - d],
          result[#result - d])
      end
      merged[#merged - d] = a == 1 and b or a
    end
    result = merged
  end
  return result
end

-- ---- products ----

--- beta x + alpha times the sum of the products of two batches of matrices.
---@param x Tensor  what broadcasts to [n, m]
---@param a Tensor  [batch, n, k]
---@param b Tensor  [batch, k, m]
---@param beta? number
---@param alpha? number
---@return Tensor
function functions.addbmm(x, a, b, beta, alpha)
  tensor("addbmm", x)
  tensor("addbmm", a, "a")
  tensor("addbmm", b, "b")
  if a.ndim ~= 3 or b.ndim ~= 3 then
    fail("addbmm: a: expected batches of matrices [batch, n, k] and [batch, k, m], got %d and %d dimensions", a.ndim,
      b.ndim)
  end
  expect("addbmm", "beta", beta, "a number or nil")
  expect("addbmm", "alpha", alpha, "a number or nil")
  return x * (beta or 1) + a:matmul(b):sum { 0 } * (alpha or 1)
end

--- Sums of products over the last dimension of both: [..., k] and [more, k] to [..., more].
---@param x Tensor
---@param y Tensor
---@return Tensor
function functions.inner(x, y)
  tensor("inner", x)
  tensor("inner", y, "y")
  if x.ndim == 0 or y.ndim == 0 then return x * y end
  return functions.tensordot(x, y, { { -1 }, { -1 } })
end

--- Sums of products over several dimensions of both: so many, the last ones of x with the first ones of y; or lists of
-- those of x and of y.
---@param x Tensor
---@param y Tensor
---@param dims integer|integer[][]
---@return Tensor
function functions.tensordot(x, y, dims)
  tensor("tensordot", x)
  tensor("tensordot", y, "y")
  if dims == nil then dims = 2 end
  expect("tensordot", "dims", dims, "an integer >= 0 or a list")
  local ours, theirs = {}, {}
  if type(dims) == "number" then
    if dims > math.min(x.ndim, y.ndim) then
      fail("tensordot: dims: expected at most %d, got %d", math.min(x.ndim, y.ndim), dims)
    end
    for i = 1, dims do ours[i], theirs[i] = x.ndim - dims + i - 1, i - 1 end
  else
    expect("tensordot", "dims[1]", dims[1], "a list of integers")
    expect("tensordot", "dims[2]", dims[2], "a list of integers")
    if #dims[1] ~= #dims[2] then
      fail("tensordot: dims: expected lists of one length, got %d and %d", #dims[1], #dims[2])
    end
    for i = 1, #dims[1] do
      ours[i], theirs[i] = dim_of("tensordot", dims[1][i], x.ndim), dim_of("tensordot", dims[2][i], y.ndim)
    end
  end
  local function rest(t, taken)
    local is, list, sizes, count = {}, {}, {}, 1
    for _, d in ipairs(taken) do
      if is[d] then fail("tensordot: dims: expected different dimensions, got %d twice", d) end
      is[d] = true
    end
    for d = 0, t.ndim - 1 do
      if not is[d] then
        list[#list + 1], sizes[#sizes + 1] = d, t:size(d)
        count = count * t:size(d)
      end
    end
    return list, sizes, count
  end
  local inner = 1
  for i, d in ipairs(ours) do
    if x:size(d) ~= y:size(theirs[i]) then
      fail("tensordot: y: expected size %d in dimension %d, got %d", x:size(d), theirs[i], y:size(theirs[i]))
    end
    inner = inner * x:size(d)
  end
  local a, sizes, n = rest(x, ours)
  local b, more, m = rest(y, theirs)
  table.move(ours, 1, #ours, #a + 1, a)
  local order = table.move(theirs, 1, #theirs, 1, {})
  table.move(b, 1, #b, #order + 1, order)
  local product = x:permute(a):reshape(n, inner):matmul(y:permute(order):reshape(inner, m))
  table.move(more, 1, #more, #sizes + 1, sizes)
  return product:reshape(sizes)
end

--- Sums of products along a dimension (-1); the others broadcast.
---@param x Tensor
---@param y Tensor
---@param dim? integer
---@return Tensor
function functions.vecdot(x, y, dim)
  tensor("vecdot", x)
  tensor("vecdot", y, "y")
  return (x * y):sum { expect("vecdot", "dim", dim or -1, "an integer") }
end

--- The sum of the products of two lists of equal length.
---@param x Tensor
---@param y Tensor
---@return Tensor
function functions.vdot(x, y)
  tensor("vdot", x)
  tensor("vdot", y, "y")
  if x.ndim ~= 1 or y.ndim ~= 1 or x:size(0) ~= y:size(0) then
    fail("vdot: y: expected two lists of one length, got [%s] and [%s]", table.concat(x.shape, ", "),
      table.concat(y.shape, ", "))
  end
  return (x * y):sum()
end

--- The p-norm (2) of the difference.
---@param x Tensor
---@param y Tensor
---@param p? number
---@return Tensor
function functions.dist(x, y, p)
  tensor("dist", x)
  tensor("dist", y, "y")
  return (x - y):norm(expect("dist", "p", p or 2, "a number"))
end

--- The last two dimensions swapped: of real numbers, the adjoint.
---@param x Tensor
---@return Tensor
function functions.adjoint(x)
  if tensor("adjoint", x).ndim < 2 then fail("adjoint: x: expected at least 2 dimensions, got %d", x.ndim) end
  return x:transpose(-2, -1)
end

-- ---- parts that are replaced ----

-- A copy of x whose part, a view of it that part(copy) gives, is src.
local function replaced(who, x, src, part)
  tensor(who, src, "src")
  local y = x:clone()
  local old = part(y)
  local fits = old.ndim == src.ndim
  for d = 0, old.ndim - 1 do fits = fits and old:size(d) == src:size(d) end
  if not fits then
    fail("%s: src: expected the shape of the part, [%s], got [%s]", who, table.concat(old.shape, ", "),
      table.concat(src.shape, ", "))
  end
  -- By positions, so that gradients are recorded.
  local at = part(core.arange(x:numel(), { device = x.device }):reshape(x.shape)):reshape(-1)
  return core.index_copy(x:reshape(-1), 0, at, src:to(x.dtype):reshape(-1)):reshape(x.shape)
end

--- A copy of x with src at a position of a dimension.
---@param x Tensor
---@param src Tensor
---@param dim integer
---@param index integer
---@return Tensor
function functions.select_scatter(x, src, dim, index)
  dim = dim_of("select_scatter", dim, tensor("select_scatter", x).ndim)
  expect("select_scatter", "index", index, "an integer")
  return replaced("select_scatter", x, src, function(y) return y:select(dim, index) end)
end

--- A copy of x with src in a slice of a dimension (0).
---@param x Tensor
---@param src Tensor
---@param dim? integer
---@param start? integer
---@param stop? integer
---@param step? integer
---@return Tensor
function functions.slice_scatter(x, src, dim, start, stop, step)
  dim = dim_of("slice_scatter", dim or 0, tensor("slice_scatter", x).ndim)
  for name, value in pairs { start = start or 0, stop = stop or 0, step = step or 1 } do
    expect("slice_scatter", name, value, name == "step" and "an integer >= 1" or "an integer")
  end
  return replaced("slice_scatter", x, src, function(y)
    return y:slice(dim, start or 0, stop or math.maxinteger, step or 1)
  end)
end

--- A copy of x with src on a diagonal of two dimensions (0 and 1).
---@param x Tensor
---@param src Tensor
---@param offset? integer
---@param dim0? integer
---@param dim1? integer
---@return Tensor
function functions.diagonal_scatter(x, src, offset, dim0, dim1)
  tensor("diagonal_scatter", x)
  return replaced("diagonal_scatter", x, src, function(y) return y:diagonal(offset or 0, dim0 or 0, dim1 or 1) end)
end

--- Matrices with the last dimension of x on their diagonals, in the last two dimensions.
---@param x Tensor  [..., n]
---@param offset? integer
---@return Tensor
function functions.diag_embed(x, offset)
  offset = expect("diag_embed", "offset", offset or 0, "an integer in [-1048576, 1048576]")
  if tensor("diag_embed", x).ndim < 1 then fail "diag_embed: x: expected [..., n], got no dimensions" end
  local shape, n = x.shape, x:size(-1) + math.abs(offset)
  shape[#shape], shape[#shape + 1] = n, n
  local zeros = core.zeros(shape, { dtype = x.dtype, device = x.device })
  return functions.diagonal_scatter(zeros, x, offset, -2, -1)
end

--- The matrix with all elements of x on its diagonal.
---@param x Tensor
---@param offset? integer
---@return Tensor
function functions.diagflat(x, offset)
  return functions.diag_embed(tensor("diagflat", x):reshape(-1), offset)
end

for name, dim in pairs { hsplit = 1, vsplit = 0, dsplit = 2 } do
  --- tensor_split along dimension 1 (hsplit; 0 of a list), 0 (vsplit) or 2 (dsplit).
  ---@param x Tensor
  ---@param where integer|integer[]  how many parts, or where all but the first begin
  ---@return Tensor ...
  functions[name] = function(x, where)
    local at = name == "hsplit" and tensor(name, x).ndim == 1 and 0 or dim
    if tensor(name, x).ndim <= at then
      fail("%s: x: expected at least %d dimensions, got %d", name, at + 1, x.ndim)
    end
    return require("tycho.familiar").functions.tensor_split(x, where, at)
  end
end

--- The elements at positions of x taken flat.
---@param x Tensor
---@param index Tensor  i64
---@return Tensor
function functions.take(x, index)
  tensor("take", x)
  tensor("take", index, "index")
  return x:reshape(-1):index_select(0, index:reshape(-1)):reshape(index.shape)
end

--- Positions in a tensor of a shape taken flat as one tensor for each dimension.
---@param indices Tensor  i64
---@param shape integer[]
---@return Tensor ...
function functions.unravel_index(indices, shape)
  tensor("unravel_index", indices, "indices")
  expect("unravel_index", "shape", shape, "a list of integers >= 1")
  local results, rest = {}, indices
  for d = #shape, 1, -1 do
    results[d] = rest:remainder(shape[d])
    rest = rest:floor_div(shape[d])
  end
  if rest:numel() > 0 and not rest:eq(0):all():item() then
    fail("unravel_index: indices: expected positions in a tensor of shape {%s}, got one beyond",
      table.concat(shape, ", "))
  end
  return table.unpack(results)
end

-- ---- numbers ----

-- Two operands as tensors, of which one may have come as a number.
local function operands(who, x, y)
  if not core.is_tensor(x) and not core.is_tensor(y) then tensor(who, x) end
  expect(who, "x", x, "a tensor or a number")
  expect(who, "y", y, "a tensor or a number")
  local function as_tensor(v, other)
    if core.is_tensor(v) then return v end
    local dtype = math.type(v) == "integer" and "i64" or other:is_floating_point() and other.dtype or "f32"
    return core.tensor(v, { dtype = dtype, device = other.device })
  end
  return as_tensor(x, y), as_tensor(y, x)
end

for name, op in pairs { fmax = "maximum", fmin = "minimum" } do
  --- The larger (fmax) or smaller (fmin) of two; where one is NaN the other.
  ---@param x Tensor|number
  ---@param y Tensor|number
  ---@return Tensor
  functions[name] = function(x, y)
    x, y = operands(name, x, y)
    return core.where(x:isnan(), y, core.where(y:isnan(), x, core[op](x, y)))
  end
end

--- x to the power y, computed in f64.
---@param x Tensor|number
---@param y Tensor|number
---@return Tensor
function functions.float_power(x, y)
  if not core.is_tensor(x) and not core.is_tensor(y) then tensor("float_power", x) end
  local function wide(t, name)
    expect("float_power", name, t, "a tensor or a number")
    return core.is_tensor(t) and t:to "f64" or t
  end
  return core.pow(wide(x, "x"), wide(y, "y"))
end

--- x times 2 to the power n.
---@param x Tensor|number
---@param n Tensor|integer
---@return Tensor
function functions.ldexp(x, n)
  if not core.is_tensor(n) then tensor("ldexp", x) end
  expect("ldexp", "x", x, "a tensor or a number")
  expect("ldexp", "n", n, "a tensor or a number")
  return x * (core.is_tensor(n) and core.exp2(n) or 2.0 ^ n)
end

--- Where x is plus infinity.
---@param x Tensor
---@return Tensor bool
function functions.isposinf(x) return tensor("isposinf", x):eq(math.huge) end

--- Where x is minus infinity.
---@param x Tensor
---@return Tensor bool
function functions.isneginf(x) return tensor("isneginf", x):eq(-math.huge) end

--- Whether a tensor of one element is not 0.
---@param x Tensor
---@return boolean
function functions.is_nonzero(x)
  if tensor("is_nonzero", x):numel() ~= 1 then
    fail("is_nonzero: x: expected one element, got %d", x:numel())
  end
  return x:ne(0):item()
end

--- x as it is.
---@param x Tensor
---@return Tensor
function functions.positive(x) return tensor("positive", x) end

local function whole(who, x, name)
  tensor(who, x, name)
  if x.dtype == "bool" or x:is_floating_point() then fail("%s: %s: expected integers, got %s", who, name, x.dtype) end
  return x
end

--- The greatest common divisors of integers, elementwise.
---@param x Tensor|integer
---@param y Tensor|integer
---@return Tensor
function functions.gcd(x, y)
  x, y = operands("gcd", x, y)
  local a, b = whole("gcd", x, "x"):abs(), whole("gcd", y, "y"):abs()
  a, b = a + core.zeros_like(b), b + core.zeros_like(a) -- of one shape and dtype
  while a:numel() > 0 and b:ne(0):any():item() do
    local zero = b:eq(0)
    local safe = core.where(zero, 1, b)
    a, b = core.where(zero, a, b), core.where(zero, 0, a:remainder(safe))
  end
  return a
end

--- The least common multiples of integers, elementwise; 0 where one is 0.
---@param x Tensor|integer
---@param y Tensor|integer
---@return Tensor
function functions.lcm(x, y)
  x, y = operands("lcm", x, y)
  whole("lcm", x, "x")
  whole("lcm", y, "y")
  local divisor = functions.gcd(x, y)
  return (x:floor_div(core.where(divisor:eq(0), 1, divisor)) * y):abs()
end

--- Sums of y from the first position on by the trapezoidal rule, one less than positions.
---@param y Tensor
---@param dx? number  the distance of positions (1)
---@param dim? integer  (-1)
---@return Tensor
function functions.cumulative_trapezoid(y, dx, dim)
  tensor("cumulative_trapezoid", y, "y")
  dim = dim_of("cumulative_trapezoid", dim or -1, y.ndim)
  expect("cumulative_trapezoid", "dx", dx, "a number or nil")
  local n = y:size(dim)
  if n < 1 then fail("cumulative_trapezoid: y: expected at least one position along dim %d, got none", dim) end
  return ((y:narrow(dim, 1, n - 1) + y:narrow(dim, 0, n - 1)) * ((dx or 1) / 2)):cumsum(dim)
end

--- Slopes along a dimension by central differences, and one-sided ones of first order at the ends.
---@param x Tensor
---@param spacing? number  (1)
---@param dim? integer  (-1)
---@return Tensor
function functions.gradient(x, spacing, dim)
  dim = dim_of("gradient", dim or -1, tensor("gradient", x).ndim)
  spacing = expect("gradient", "spacing", spacing or 1, "a number")
  local n = x:size(dim)
  if n < 2 then fail("gradient: x: expected at least 2 positions along dim %d, got %d", dim, n) end
  local first = x:narrow(dim, 1, 1) - x:narrow(dim, 0, 1)
  local last = x:narrow(dim, n - 1, 1) - x:narrow(dim, n - 2, 1)
  local middle = (x:narrow(dim, 2, n - 2) - x:narrow(dim, 0, n - 2)) / 2
  return core.concat({ first, middle, last }, dim) / spacing
end

--- x log(1 + y), and 0 where x is 0 and y is not NaN.
---@param x Tensor|number
---@param y Tensor|number
---@return Tensor
function functions.xlog1py(x, y)
  x, y = operands("xlog1py", x, y)
  local none = x:eq(0):logical_and(y:isnan():logical_not())
  return x * core.where(none, 0.0, y):log1p()
end

--- The logarithm of the multivariate gamma function of dimension p.
---@param x Tensor  elements above (p - 1) / 2
---@param p integer
---@return Tensor
function functions.mvlgamma(x, p)
  tensor("mvlgamma", x)
  expect("mvlgamma", "p", p, "an integer in [1, 10000]")
  local y = core.lgamma(x)
  for j = 2, p do y = y + core.lgamma(x - (j - 1) / 2) end
  return y + p * (p - 1) / 4 * math.log(math.pi)
end

--- Draws of a relaxed choice: softmax of (logits + Gumbel noise) / tau. hard: one-hot, with the gradient of the soft
-- one. Jang et al. 2017.
---@param logits Tensor
---@param tau? number  (1)
---@param hard? boolean
---@param dim? integer  (-1)
---@return Tensor
function functions.gumbel_softmax(logits, tau, hard, dim)
  dim = dim_of("gumbel_softmax", dim or -1, tensor("gumbel_softmax", logits, "logits").ndim)
  expect("gumbel_softmax", "tau", tau or 1, "a number > 0")
  local noise = -((-(1 - core.rand_like(logits)):log()):clamp(1e-30):log())
  local soft = ((logits + noise) / (tau or 1)):softmax(dim)
  if not hard then return soft end
  local best = soft:detach():eq(soft:detach():max({ dim }, true)):to(soft.dtype)
  return best - soft:detach() + soft
end

--- softmax over the positions along dim that have equal elements of index: segment_softmax by index.
---@param x Tensor
---@param dim integer
---@param index Tensor  [n], of elements below count
---@param count integer
---@return Tensor
function functions.scatter_softmax(x, dim, index, count)
  dim = dim_of("scatter_softmax", dim, tensor("scatter_softmax", x).ndim)
  expect("scatter_softmax", "count", count, "an integer >= 0")
  return core.segment_softmax(x, { dim = dim, index = tensor("scatter_softmax", index, "index"), count = count })
end

local others = {
  argwhere = "nonzero", ger = "outer", trapz = "trapezoid", logsigmoid = "log_sigmoid", expit = "sigmoid",
}

return { functions = functions, methods = {}, of_ty = of_ty, others = others }
