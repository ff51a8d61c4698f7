--- Operators of ONNX that reduce dimensions, softmax and its like, and the order of elements.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"

local M = {}

-- The dimensions and what follows from the attributes; nil: nothing is reduced. They are an attribute before opset
-- `since` and an input from then on.
local function dims_of(x, a, c, since)
  local axes = a.axes
  if c.opset >= since then axes = x[2] and values.ints(x[2]) end
  if (not axes or #axes == 0) and a.noop_with_empty_axes == 1 then return nil end
  return values.axes(axes, x[1].ndim), a.keepdims ~= 0
end

-- Reduces by `fn`; `each` is what becomes of elements where no dimension is.
local function reduction(since, fn, each)
  return function(x, a, c)
    local dims, keep = dims_of(x, a, c, since)
    if not dims then return each and each(x[1]) or x[1] end
    if x[1].ndim == 0 then
      local y = fn(x[1]:reshape(1), { 0 }, false)
      return y.dtype == x[1].dtype and y or y:to(x[1].dtype)
    end
    local y = fn(x[1], dims, keep)
    return y.dtype == x[1].dtype and y or y:to(x[1].dtype)
  end
end

-- Whether some reduced dimension has no elements, and then the result's shape.
local function nothing(x, dims, keep)
  local shape, empty, gone = x.shape, false, {}
  for _, dim in ipairs(dims) do
    empty = empty or shape[dim + 1] == 0
    gone[dim + 1] = true
  end
  if not empty then return nil end
  local left = {}
  for i, size in ipairs(shape) do
    if not gone[i] then left[#left + 1] = size elseif keep then left[#left + 1] = 1 end
  end
  return left
end

local smallest = { f32 = -math.huge, f64 = -math.huge, f16 = -math.huge, bf16 = -math.huge, i64 = math.mininteger,
  i32 = -2 ^ 31 // 1 | 0, i16 = -32768, i8 = -128, u8 = 0, bool = false }
local largest = { f32 = math.huge, f64 = math.huge, f16 = math.huge, bf16 = math.huge, i64 = math.maxinteger,
  i32 = 2 ^ 31 // 1 - 1 | 0, i16 = 32767, i8 = 127, u8 = 255, bool = true }

local function extreme(fn, of_nothing)
  return function(x, dims, keep)
    local shape = nothing(x, dims, keep)
    if shape then return ty.full(shape, of_nothing[x.dtype], { dtype = x.dtype, device = x.device }) end
    if x.dtype == "bool" then return fn(x:to "u8", dims, keep):to "bool" end
    return fn(x, dims, keep)
  end
end

local function sum(x, dims, keep) return x:sum(dims, keep) end

M.ReduceSum = reduction(13, sum)
M.ReduceMean = reduction(18, function(x, dims, keep) return x:mean(dims, keep) end)
M.ReduceProd = reduction(18, function(x, dims, keep) return x:prod(dims, keep) end)
M.ReduceMax = reduction(18, extreme(function(x, dims, keep) return x:max(dims, keep) end, smallest))
M.ReduceMin = reduction(18, extreme(function(x, dims, keep) return x:min(dims, keep) end, largest))
M.ReduceL1 = reduction(18, function(x, dims, keep) return x:abs():sum(dims, keep) end, ty.abs)
M.ReduceL2 = reduction(18, function(x, dims, keep) return x:square():sum(dims, keep):sqrt() end, ty.abs)
M.ReduceSumSquare = reduction(18, function(x, dims, keep) return x:square():sum(dims, keep) end, ty.square)
M.ReduceLogSum = reduction(18, function(x, dims, keep) return x:sum(dims, keep):log() end, ty.log)
M.ReduceLogSumExp = reduction(18, function(x, dims, keep)
  local shape = nothing(x, dims, keep)
  if shape then return ty.full(shape, -math.huge, { dtype = x.dtype, device = x.device }) end
  return x:logsumexp(dims, keep)
end)

local function arg_extreme(fn)
  return function(x, a)
    local dim = values.axis(a.axis or 0, x[1].ndim)
    local keep = a.keepdims ~= 0
    if a.select_last_index ~= 1 then return fn(x[1], dim, keep) end
    return fn(x[1]:flip(dim), dim, keep):neg() + (x[1].shape[dim + 1] - 1)
  end
end
M.ArgMax, M.ArgMin = arg_extreme(ty.argmax), arg_extreme(ty.argmin)

-- ---- softmax ----

-- Before opset 13 all dimensions from `axis` on are one.
local function soft(fn)
  return function(x, a, c)
    local x1 = x[1]
    if c.opset >= 13 then return fn(x1, values.axis(a.axis or -1, x1.ndim)) end
    local dim = a.axis or 1
    if dim < 0 then dim = dim + x1.ndim end
    if dim == x1.ndim - 1 then return fn(x1, dim) end
    local flat = x1:reshape(values.product(x1.shape, 1, dim), -1)
    return fn(flat, 1):reshape(x1.shape)
  end
end
M.Softmax, M.LogSoftmax = soft(ty.softmax), soft(ty.log_softmax)
M.Hardmax = soft(function(x, dim)
  return ty.zeros_like(x):scatter(dim, x:argmax(dim, true), 1)
end)

-- ---- order ----

function M.TopK(x, a, c)
  local k = c.opset >= 10 and values.scalar(x[2]) or a.k
  local dim = values.axis(a.axis or -1, x[1].ndim)
  local v, i = x[1]:topk(k, dim, a.largest ~= 0)
  return v, i
end

function M.NonZero(x)
  if x[1].ndim == 0 then return x[1]:reshape(1):nonzero():transpose(0, 1) end
  return x[1]:nonzero():transpose(0, 1)
end

-- Rows along `dim`, as lists, in the order in which they are sorted.
local function unique_rows(x, dim, sorted)
  local n = x.shape[dim + 1]
  local rows = x:movedim(dim, 0):reshape(n, -1):tolist()
  local order, seen = {}, {}
  for i, row in ipairs(rows) do
    local key = table.concat(row, " ")
    local at = seen[key]
    if not at then
      at = { row = row, first = i - 1, count = 0, members = {} }
      seen[key], order[#order + 1] = at, at
    end
    at.count = at.count + 1
    at.members[#at.members + 1] = i
  end
  if sorted then
    table.sort(order, function(p, q)
      for i = 1, #p.row do
        if p.row[i] ~= q.row[i] then return p.row[i] < q.row[i] end
      end
      return false
    end)
  end
  local first, inverse, counts = {}, {}, {}
  for at, group in ipairs(order) do
    first[at], counts[at] = group.first, group.count
    for _, i in ipairs(group.members) do inverse[i] = at - 1 end
  end
  return first, inverse, counts
end

function M.Unique(x, a)
  local flat = a.axis == nil
  local source = flat and x[1]:reshape(-1) or x[1]
  local dim = flat and 0 or values.axis(a.axis, source.ndim)
  local first, inverse, counts = unique_rows(source, dim, a.sorted ~= 0)
  first = values.i64(first)
  return source:index_select(dim, first:to { device = source.device }), first, values.i64(inverse), values.i64(counts)
end

return M
