--- What the operators of ONNX share: element types by number, lists out of tensors, positions from the end.
local ty = require "tycho"

local M = {}

-- ONNX's numbers of element types. Unsigned ones that tensors lack are held by the next that has all their values.
M.dtypes = { "f32", "u8", "i8", "i32", "i16", "i32", "i64", nil, "bool", "f16", "f64", "i64", "i64", [16] = "bf16",
  [21] = "u8", [22] = "i8" }
M.numbers = { f32 = 1, u8 = 2, i8 = 3, i16 = 5, i32 = 6, i64 = 7, bool = 9, f16 = 10, f64 = 11, bf16 = 16 }

-- What a cast to an unsigned type of so many bits leaves.
M.wraps = { [4] = 0xffff, [12] = 0xffffffff }

--- The dtype of a number, or an error.
---@param number integer
---@return string
function M.dtype(number)
  local dtype = M.dtypes[number]
  if not dtype then error(("element type %s is not one of Tycho's"):format(tostring(number)), 0) end
  return dtype
end

--- The integers of a tensor of one dimension, or of a single number.
---@param t Tensor
---@return integer[]
function M.ints(t)
  if t.ndim == 0 then return { math.tointeger(t:item()) or 0 } end
  local list = t:tolist()
  if t.ndim > 1 then list = t:reshape(-1):tolist() end
  for i = 1, #list do list[i] = math.tointeger(list[i]) or math.tointeger(list[i] // 1) or 0 end
  return list
end

--- The only element of a tensor.
---@param t Tensor
---@return number|boolean
function M.scalar(t)
  if t:numel() ~= 1 then error(("expected one element, got %d"):format(t:numel()), 0) end
  return t:reshape(-1):tolist()[1]
end

--- A tensor of integers on the CPU, where shapes are computed.
---@param list integer[]
---@return Tensor
function M.i64(list) return ty.tensor(list, { dtype = "i64" }) end

--- A dimension counted from 0.
---@param dim integer
---@param ndim integer
---@return integer
function M.axis(dim, ndim)
  local from = dim < 0 and dim + ndim or dim
  if from < 0 or from > ndim or from == ndim and ndim > 0 then
    error(("axis %d is not one of %d dimensions"):format(dim, ndim), 0)
  end
  return from
end

--- Dimensions counted from 0, in rising order; all when the list is nil or empty.
---@param list? integer[]
---@param ndim integer
---@return integer[]
function M.axes(list, ndim)
  local dims = {}
  if not list or #list == 0 then
    for i = 0, ndim - 1 do dims[#dims + 1] = i end
    return dims
  end
  for i, dim in ipairs(list) do dims[i] = M.axis(dim, ndim) end
  table.sort(dims)
  return dims
end

--- Positions with negative ones counted from the end of `size`.
---@param index Tensor
---@param size integer
---@return Tensor
function M.positions(index, size)
  if index.dtype ~= "i64" then index = index:to "i64" end
  if index.device == "cpu" and index:numel() == 1 and index:reshape(-1):tolist()[1] >= 0 then return index end
  return ty.where(index:lt(0), index + size, index)
end

--- n copies of a value as a list.
function M.copies(value, n)
  local list = {}
  for i = 1, n do list[i] = value end
  return list
end

--- The product of a list's elements from i to j.
function M.product(list, i, j)
  local p = 1
  for k = i or 1, j or #list do p = p * list[k] end
  return p
end

--- A shape with each dimension of x, but `size` at `dim`, counted from 0.
function M.with_size(x, dim, size)
  local shape = x.shape
  shape[dim + 1] = size
  return shape
end

--- Runs fn on x as f32 where x is of integers or of halves and fn's op takes floats alone, and gives back x's dtype.
function M.in_float(x, fn)
  if x:is_floating_point() then return fn(x) end
  return fn(x:to "f32"):to(x.dtype)
end

return M
