--- Cutting a tensor into parts that share its memory: functions of ty and methods of tensors.
local views = {}

local function size_of(who, x, dim)
  local n = x.ndim
  if not math.tointeger(dim) or dim < -n or dim >= n then
    error(("%s: dim: expected a dimension in [%d, %d], got %s"):format(who, -n, n - 1, tostring(dim)), 3)
  end
  return x:size(dim)
end

--- Parts of `sizes` (a list that sums to the dimension's size, or one size for all; the last part may be smaller).
---@param x Tensor
---@param sizes integer|integer[]
---@param dim? integer  default 0
---@return Tensor ...
function views.split(x, sizes, dim)
  dim = dim or 0
  local n = size_of("split", x, dim)
  if type(sizes) == "number" then
    local size = math.tointeger(sizes)
    if not size or size < 1 then error("split: expected a positive size, got " .. tostring(sizes), 2) end
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
    error(("split: the sizes {%s} do not sum to %d, the size of dimension %d")
      :format(table.concat(sizes, ", "), n, dim), 2)
  end
  return table.unpack(parts)
end

--- `count` parts, equal except that the last may be smaller (fewer parts when the dimension is small).
---@return Tensor ...
function views.chunk(x, count, dim)
  dim = dim or 0
  local n = size_of("chunk", x, dim)
  if not math.tointeger(count) or count < 1 then
    error("chunk: expected a positive count, got " .. tostring(count), 2)
  end
  return views.split(x, math.max(1, (n + count - 1) // count), dim)
end

--- The positions of a dimension, each without it.
---@return Tensor ...
function views.unbind(x, dim)
  dim = dim or 0
  local parts = {}
  for i = 0, size_of("unbind", x, dim) - 1 do parts[i + 1] = x:select(dim, i) end
  return table.unpack(parts)
end

return views
