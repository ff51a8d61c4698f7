--- Cutting a tensor into parts that share its memory: functions of ty and methods of tensors.
local arguments = require "tycho.arguments"

local expect = arguments.expect
local views = {}

-- A dimension that came by position or as { dim = 1 }.
local function dim_of(who, given)
  if type(given) == "table" then return arguments.read(who, given, { dim = 0 }).dim end
  return given or 0
end

local function size_of(who, x, dim)
  local n = expect(who, "x", x, "a tensor").ndim
  expect(who, "dim", dim, "an integer")
  if dim < -n or dim >= n then
    arguments.fail("%s: dim: expected a dimension in [%d, %d], got %d", who, -n, n - 1, dim)
  end
  return x:size(dim)
end

--- Parts of `sizes` (a list that sums to the dimension's size, or one size for all; the last part may be smaller).
---@param x Tensor
---@param sizes integer|integer[]
---@param dim? integer  default 0
---@return Tensor ...
function views.split(x, sizes, dim)
  dim = dim_of("split", dim)
  local n = size_of("split", x, dim)
  expect("split", "sizes", sizes, "an integer >= 1 or a list of integers >= 0")
  if type(sizes) == "number" then
    local size = math.tointeger(sizes)
    sizes = {}
    for start = 0, n - 1, size do sizes[#sizes + 1] = math.min(size, n - start) end
    if n == 0 then sizes[1] = 0 end
  end
  local parts, start = {}, 0
  for i, size in ipairs(sizes) do
    if start + size > n then break end
    parts[i] = x:narrow(dim, start, size)
    start = start + size
  end
  if start ~= n or #parts ~= #sizes then
    arguments.fail("split: sizes: expected a sum of %d, the size of dimension %d, got {%s}", n, dim,
      table.concat(sizes, ", "))
  end
  return table.unpack(parts)
end

--- `count` parts, equal except that the last may be smaller (fewer parts when the dimension is small).
---@return Tensor ...
function views.chunk(x, count, dim)
  dim = dim_of("chunk", dim)
  local n = size_of("chunk", x, dim)
  expect("chunk", "count", count, "an integer >= 1")
  return views.split(x, math.max(1, (n + count - 1) // count), dim)
end

--- The positions of a dimension, each without it.
---@return Tensor ...
function views.unbind(x, dim)
  dim = dim_of("unbind", dim)
  local parts = {}
  for i = 0, size_of("unbind", x, dim) - 1 do parts[i + 1] = x:select(dim, i) end
  return table.unpack(parts)
end

return views
