--- Names that users of other libraries reach for: other names of ops, and functions that are a few ops. All are
-- functions of ty, and methods of tensors where the first argument is one.
local core = require "tycho.core"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local functions = {}

-- Another name = the op.
local others = {
  cat = "concat", concatenate = "concat", row_stack = "vstack",
  mm = "matmul", bmm = "matmul", mv = "matmul", dot = "matmul",
  multiply = "mul", subtract = "sub", divide = "div", true_divide = "div", floor_divide = "floor_div",
  negative = "neg", absolute = "abs", sgn = "sign", fix = "trunc", clip = "clamp",
  arcsin = "asin", arccos = "acos", arctan = "atan", arctan2 = "atan2",
  arcsinh = "asinh", arccosh = "acosh", arctanh = "atanh",
  greater = "gt", greater_equal = "ge", less = "lt", less_equal = "le", not_equal = "ne",
  amax = "max", amin = "min", swapaxes = "transpose", swapdims = "transpose", broadcast_to = "expand",
  multiply_ = "mul_", subtract_ = "sub_", divide_ = "div_", clip_ = "clamp_",
}

local function tensor(who, x, name) return expect(who, name or "x", x, "a tensor") end

-- A dimension of n, counted from 0.
local function dim_of(who, name, dim, n)
  expect(who, name, dim, "an integer")
  if dim < -n or dim >= n then fail("%s: %s: expected a dimension in [%d, %d], got %d", who, name, -n, n - 1, dim) end
  return dim < 0 and dim + n or dim
end

-- The sizes that are given as numbers in a row, or as one list.
local function sizes_of(who, first, ...)
  local sizes = type(first) == "table" and first or { first, ... }
  for _, size in ipairs(sizes) do expect(who, "size", size, "an integer") end
  return sizes
end

-- ---- comparison ----

--- x, but no element smaller than min.
---@param x Tensor
---@param min Tensor|number
---@return Tensor
function functions.clamp_min(x, min)
  tensor("clamp_min", x)
  return core.clamp(x, { min = expect("clamp_min", "min", min, "a tensor or a number") })
end

--- x, but no element larger than max.
---@param x Tensor
---@param max Tensor|number
---@return Tensor
function functions.clamp_max(x, max)
  tensor("clamp_max", x)
  return core.clamp(x, { max = expect("clamp_max", "max", max, "a tensor or a number") })
end

--- Whether two tensors have one shape and equal elements.
---@param x Tensor
---@param y Tensor
---@return boolean
function functions.equal(x, y)
  tensor("equal", x)
  tensor("equal", y, "y")
  if x.ndim ~= y.ndim then return false end
  for d = 0, x.ndim - 1 do
    if x:size(d) ~= y:size(d) then return false end
  end
  return core.scope(function() return x:eq(y):all():item() end)
end

--- Whether all elements of x are close to those of y: isclose of all.
---@param x Tensor
---@param y Tensor
---@param rtol? number  default 1e-5
---@param atol? number  default 1e-8
---@param equal_nan? boolean  whether NaN is close to NaN
---@return boolean
function functions.allclose(x, y, rtol, atol, equal_nan)
  tensor("allclose", x)
  tensor("allclose", y, "y")
  expect("allclose", "rtol", rtol, "a number >= 0 or nil")
  expect("allclose", "atol", atol, "a number >= 0 or nil")
  expect("allclose", "equal_nan", equal_nan, "a boolean or nil")
  return core.scope(function()
    return core.isclose(x, y, rtol or 1e-5, atol or 1e-8, equal_nan or false):all():item()
  end)
end

--- Which elements of x are among those of `values`.
---@param x Tensor|number
---@param values Tensor|number
---@return Tensor  bool, shaped like x
function functions.isin(x, values)
  expect("isin", "x", x, "a tensor or a number")
  expect("isin", "values", values, "a tensor or a number")
  if not core.is_tensor(x) then x = core.tensor(x, { device = core.is_tensor(values) and values.device or "cpu" }) end
  if not core.is_tensor(values) then return x:eq(values) end
  local n = values:numel()
  if n == 0 then return core.zeros_like(x, { dtype = "bool" }) end
  local sorted = core.sort(values:flatten())
  local flat = x:reshape(-1, 1)
  -- A block of elements at a time, so that the table of comparisons stays small.
  local block, parts = math.max(1, (1 << 22) // n), {}
  for start = 0, x:numel() - 1, block do
    parts[#parts + 1] = flat:narrow(0, start, math.min(block, x:numel() - start)):eq(sorted):any { 1 }
  end
  if #parts == 0 then return core.zeros_like(x, { dtype = "bool" }) end
  return core.concat(parts, 0):reshape(x.shape)
end

--- Whether two tensors have one shape.
---@param x Tensor
---@param y Tensor
---@return boolean
function functions.is_same_size(x, y)
  tensor("is_same_size", x)
  tensor("is_same_size", y, "y")
  return table.concat(x.shape, ",") == table.concat(y.shape, ",")
end

-- ---- dtypes ----

local conversions = {
  float = "f32", double = "f64", half = "f16", bfloat16 = "bf16", long = "i64", int = "i32", short = "i16",
  char = "i8", byte = "u8", bool = "bool",
}
local methods_only = {}
for name, dtype in pairs(conversions) do
  --- The tensor in another dtype: float is f32, double f64, half f16, bfloat16, long i64, int i32, short i16, char i8,
  --- byte u8, bool.
  ---@return Tensor
  methods_only[name] = function(x) return tensor(name, x):to(dtype) end
end

--- x in the dtype of y, on its device.
---@param x Tensor
---@param y Tensor
---@return Tensor
function functions.type_as(x, y)
  tensor("type_as", x)
  tensor("type_as", y, "y")
  return x:to { dtype = y.dtype, device = y.device }
end

-- ---- shapes ----

--- The same memory in another shape, or, for the name of a dtype, its bytes as elements of that dtype. An error where
--- that needs a copy, which :reshape makes.
---@param x Tensor
---@param size integer|integer[]|Dtype  sizes in a row or a list, one of which may be -1; or a dtype
---@return Tensor
function functions.view(x, size, ...)
  tensor("view", x)
  if type(size) == "string" then return core.view_dtype(x, size) end
  expect("view", "size", size, "an integer or a list of integers or a string")
  local ok, y = pcall(core.view_shape, x, sizes_of("view", size, ...))
  if not ok then fail("%s", (tostring(y):gsub("^view_shape: ", "view: "):gsub("^view: reshape: ", "view: "))) end
  return y
end

--- x in the shape of y, a view.
---@param x Tensor
---@param y Tensor
---@return Tensor
function functions.view_as(x, y)
  tensor("view_as", x)
  return core.view_shape(x, tensor("view_as", y, "y").shape)
end

--- x in the shape of y, a view where strides allow.
---@param x Tensor
---@param y Tensor
---@return Tensor
function functions.reshape_as(x, y)
  tensor("reshape_as", x)
  return x:reshape(tensor("reshape_as", y, "y").shape)
end

--- x expanded to the shape of y, without a copy.
---@param x Tensor
---@param y Tensor
---@return Tensor
function functions.expand_as(x, y)
  tensor("expand_as", x)
  return x:expand(tensor("expand_as", y, "y").shape)
end

--- The transpose of a matrix; what has fewer dimensions is itself.
---@param x Tensor  [n, m], [n] or []
---@return Tensor
function functions.t(x)
  if tensor("t", x).ndim > 2 then
    fail("t: x: expected at most 2 dimensions, got %s; :transpose swaps two of more", tostring(x.ndim))
  end
  return x.ndim == 2 and x:transpose(0, 1) or x
end

--- All elements in one dimension.
---@param x Tensor
---@return Tensor
function functions.ravel(x) return tensor("ravel", x):reshape(-1) end

--- Dimension `dim` becomes several of `sizes`, one of which may be -1.
---@param x Tensor
---@param dim integer
---@param sizes integer[]
---@return Tensor
function functions.unflatten(x, dim, sizes)
  dim = dim_of("unflatten", "dim", dim, tensor("unflatten", x).ndim)
  expect("unflatten", "sizes", sizes, "a list of integers")
  local known, open, shape = 1, nil, {}
  for i, size in ipairs(sizes) do
    if size == -1 and not open then open = i else known = known * size end
  end
  local n = x:size(dim)
  if #sizes == 0 or known < 0 or (open and (known == 0 or n % known ~= 0)) or (not open and known ~= n) then
    fail("unflatten: sizes: expected a product of %d, the size of dimension %d, got {%s}", n, dim,
      table.concat(sizes, ", "))
  end
  for d = 0, x.ndim - 1 do
    if d == dim then
      for i, size in ipairs(sizes) do shape[#shape + 1] = i == open and n // known or size end
    else
      shape[#shape + 1] = x:size(d)
    end
  end
  return x:reshape(shape)
end

--- Dimensions moved to other places; the others stay in order.
---@param x Tensor
---@param source integer|integer[]
---@param destination integer|integer[]  as many
---@return Tensor
function functions.movedim(x, source, destination)
  local n = tensor("movedim", x).ndim
  expect("movedim", "source", source, "an integer or a list of integers")
  expect("movedim", "destination", destination, "an integer or a list of integers")
  source = type(source) == "table" and source or { source }
  destination = type(destination) == "table" and destination or { destination }
  if #source ~= #destination then
    fail("movedim: destination: expected %d dimensions like source, got %d", #source, #destination)
  end
  local order, taken = {}, {}
  for i = 1, #source do
    local from = dim_of("movedim", "source", source[i], n)
    local to = dim_of("movedim", "destination", destination[i], n)
    if taken[from] or order[to + 1] then
      fail("movedim: %s: expected different dimensions, got {%s}", taken[from] and "source" or "destination",
        table.concat(taken[from] and source or destination, ", "))
    end
    order[to + 1], taken[from] = from, true
  end
  local next = 0
  for d = 1, n do
    if not order[d] then
      while taken[next] do next = next + 1 end
      order[d], next = next, next + 1
    end
  end
  return x:permute(order)
end
functions.moveaxis = functions.movedim

for _, least in ipairs { 1, 2, 3 } do
  local name = ("atleast_%dd"):format(least)
  --- x with dimensions of size 1 added where it has fewer than 1, 2 or 3: in front, the third behind.
  ---@param x Tensor
  ---@return Tensor
  functions[name] = function(x)
    tensor(name, x)
    while x.ndim < least do x = x:unsqueeze(least == 3 and x.ndim == 2 and 2 or 0) end
    return x
  end
end

--- Rows of a matrix in reverse order: dimension 0 flipped.
---@param x Tensor
---@return Tensor
function functions.flipud(x)
  if tensor("flipud", x).ndim < 1 then fail("flipud: x: expected at least 1 dimension, got none") end
  return x:flip(0)
end

--- Columns of a matrix in reverse order: dimension 1 flipped.
---@param x Tensor
---@return Tensor
function functions.fliplr(x)
  if tensor("fliplr", x).ndim < 2 then fail("fliplr: x: expected at least 2 dimensions, got %d", x.ndim) end
  return x:flip(1)
end

--- Tensors expanded to the shape that all of them broadcast to.
---@param ... Tensor
---@return Tensor ...
function functions.broadcast_tensors(...)
  local list, shape = { ... }, {}
  if #list == 0 then fail("broadcast_tensors: expected at least one tensor, got none") end
  for i, x in ipairs(list) do
    tensor("broadcast_tensors", x, ("argument %d"):format(i))
    for d = 1, x.ndim do -- counted from the last
      local size, before = x:size(-d), shape[d] or 1
      if size ~= before and size ~= 1 and before ~= 1 then
        fail("broadcast_tensors: argument %d: size %d of dimension %d does not meet %d of those before", i, size,
          -d, before)
      end
      shape[d] = size == 1 and before or size
    end
  end
  local size, results = {}, {}
  for d = #shape, 1, -1 do size[#size + 1] = shape[d] end
  for i, x in ipairs(list) do results[i] = x:expand(size) end
  return table.unpack(results)
end

--- Parts of nearly equal size, the first ones larger by one; or parts that begin at the positions of a list.
---@param x Tensor
---@param where integer|integer[]  how many parts, or where all but the first begin
---@param dim? integer  default 0
---@return Tensor ...
function functions.tensor_split(x, where, dim)
  dim = dim_of("tensor_split", "dim", dim or 0, tensor("tensor_split", x).ndim)
  expect("tensor_split", "where", where, "an integer >= 1 or a list of integers")
  local n, bounds = x:size(dim), { 0 }
  if type(where) == "number" then
    if where > 1 << 20 then fail("tensor_split: where: expected at most 2^20 parts, got %d", where) end
    for i = 1, where do bounds[i + 1] = bounds[i] + n // where + (i <= n % where and 1 or 0) end
  else
    for _, at in ipairs(where) do
      bounds[#bounds + 1] = math.max(0, math.min(n, at < 0 and at + n or at))
    end
    bounds[#bounds + 1] = n
  end
  local parts = {}
  for i = 1, #bounds - 1 do parts[i] = x:narrow(dim, bounds[i], math.max(0, bounds[i + 1] - bounds[i])) end
  return table.unpack(parts)
end

--- The matrix with the list x on a diagonal, or the diagonal of a matrix; offset > 0 is above the middle.
---@param x Tensor  [n] or [n, m]
---@param offset? integer
---@return Tensor
function functions.diag(x, offset)
  offset = expect("diag", "offset", offset or 0, "an integer")
  if tensor("diag", x).ndim == 2 then return x:diagonal(offset) end
  if x.ndim ~= 1 then fail("diag: x: expected a list [n] or a matrix [n, m], got %d dimensions", x.ndim) end
  if math.abs(offset) > 1 << 20 then fail("diag: offset: expected at most 2^20, got %d", offset) end
  local n = x:size(0)
  local at = core.arange(n, { device = x.device })
  local rows, columns = at + math.max(0, -offset), at + math.max(0, offset)
  local size = n + math.abs(offset)
  return core.index_put(core.zeros({ size, size }, { dtype = x.dtype, device = x.device }), { rows, columns }, x)
end

--- Tensors as columns side by side: lists become columns first.
---@param xs Tensor[]
---@return Tensor
function functions.column_stack(xs)
  expect("column_stack", "xs", xs, "a list")
  local list = {}
  for i, x in ipairs(xs) do
    tensor("column_stack", x, ("xs[%d]"):format(i))
    list[i] = x.ndim < 2 and x:reshape(-1, 1) or x
  end
  return core.hstack(list)
end

--- Tensors joined along dimension 2, after atleast_3d.
---@param xs Tensor[]
---@return Tensor
function functions.dstack(xs)
  expect("dstack", "xs", xs, "a list")
  local list = {}
  for i, x in ipairs(xs) do
    list[i] = functions.atleast_3d(tensor("dstack", x, ("xs[%d]"):format(i)))
  end
  return core.concat(list, 2)
end

-- ---- making tensors ----

--- `count` numbers from base^start to base^stop whose logarithms are evenly spaced.
---@param start number  or a tensor without dimensions
---@param stop number  or a tensor without dimensions
---@param count integer
---@param base? number  default 10
---@param options? { dtype: Dtype, device: Device }
---@return Tensor
function functions.logspace(start, stop, count, base, options)
  if type(base) == "table" then base, options = nil, base end
  if core.is_tensor(start) and start.ndim == 0 then start = start:item() end
  if core.is_tensor(stop) and stop.ndim == 0 then stop = stop:item() end
  expect("logspace", "start", start, "a number")
  expect("logspace", "stop", stop, "a number")
  expect("logspace", "count", count, "an integer >= 0")
  base = expect("logspace", "base", base or 10, "a number > 0")
  options = arguments.read("logspace", options, { dtype = "f32", device = "cpu" })
  local exponents = core.linspace(start, stop, count, { dtype = "f64", device = options.device })
  return core.pow(base, exponents):to(options.dtype)
end

local function like(x, options, who)
  tensor(who, x)
  return arguments.read(who, options, { dtype = x.dtype, device = x.device })
end

for _, name in ipairs { "empty", "zeros", "ones" } do
  local who = "new_" .. name
  --- A tensor of other sizes in the dtype and on the device of x, or those of `options`.
  ---@param x Tensor
  ---@param size integer[]|integer  a list, or sizes in a row
  ---@param options? { dtype: Dtype, device: Device }
  ---@return Tensor
  methods_only[who] = function(x, size, options, ...)
    if type(size) == "number" then size, options = { size, options, ... }, nil end
    expect(who, "size", size, "a list of integers")
    return core[name](size, like(x, options, who))
  end
end
--- A tensor of other sizes filled with a value, in the dtype and on the device of x, or those of `options`.
---@param x Tensor
---@param size integer[]|integer
---@param value number
---@param options? { dtype: Dtype, device: Device }
---@return Tensor
methods_only.new_full = function(x, size, value, options)
  expect("new_full", "size", size, "an integer or a list of integers")
  expect("new_full", "value", value, "a number")
  return core.full(type(size) == "number" and { size } or size, value, like(x, options, "new_full"))
end

-- ---- of one tensor ----

--- All elements in order of size along dimension 0.
---@param x Tensor
---@return Tensor
function functions.msort(x) return (core.sort(tensor("msort", x), 0)) end

--- Makes every element 0.
---@return Tensor
methods_only.zero_ = function(x) return tensor("zero_", x):fill_(0) end
--- The tensor in the memory of the host, itself where it is there.
---@return Tensor
methods_only.cpu = function(x) return tensor("cpu", x):to { device = "cpu" } end
--- The tensor on a GPU, the first one or the one of a number from 0.
---@param index? integer
---@return Tensor
methods_only.cuda = function(x, index)
  expect("cuda", "index", index, "an integer >= 0 or nil")
  return tensor("cuda", x):to { device = index and ("cuda:%d"):format(index) or "cuda" }
end
--- How many dimensions there are: x.ndim.
---@return integer
methods_only.dim = function(x) return tensor("dim", x).ndim end
--- How many elements there are: x:numel().
---@return integer
methods_only.nelement = function(x) return tensor("nelement", x):numel() end

return { functions = functions, methods = methods_only, others = others }
