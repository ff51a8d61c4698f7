-- Arrays to tensors in several memory layouts, and back.

local template = require "template"
local dtypes = require "dtypes"

local layout = { device = "cpu" } -- where all tensors are made
local ty

function layout.use(library) ty = library end

--- Calls fn(...) with tensors made on another device.
function layout.on(device, fn, ...)
  local before = layout.device
  layout.device = device
  local results = table.pack(pcall(fn, ...))
  layout.device = before
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

--- A tensor of a list of values.
function layout.shaped(values, shape, dtype, device)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  if n == 0 then return ty.empty(shape, { dtype = dtype, device = device or layout.device }) end
  return ty.tensor(values, { dtype = dtype, device = device or layout.device }):reshape(shape)
end

local function contiguous(array)
  if dtypes.is_quantized(array.dtype) then
    return ty.io.from_bytes(array.bytes or "", array.dtype, array.shape):to { device = layout.device }
  end
  if #array.shape == 0 then return layout.shaped({ array[1] }, {}, array.dtype) end
  return layout.shaped(table.move(array, 1, template.count(array), 1, {}), array.shape, array.dtype)
end

-- A window in a bigger tensor whose dimensions lie in reverse order, with holes: every stride differs from the plain
-- one. What lies around the window would show if it were read: NaN, or 99.
local function strided(array)
  local nd = #array.shape
  local junk = dtypes.is_float(array.dtype) and 0 / 0 or array.dtype == "bool" and 1 or 99
  if nd == 0 then
    local line = layout.shaped({ junk, array[1], junk }, { 3 }, array.dtype)
    return line:select(0, 1), line
  end
  local big, stride, total = {}, {}, 1
  for d = 1, nd do -- dimension d of the array is dimension nd - d + 1 of the big tensor
    local size = d == 1 and 2 * array.shape[d] + 1 or array.shape[d] + 1
    big[nd - d + 1] = size
    stride[d] = total
    total = total * size
  end
  local values = {}
  for i = 1, total do values[i] = junk end
  for i = 0, template.count(array) - 1 do
    local rest, at = i, 0
    for d = nd, 1, -1 do
      local p = rest % array.shape[d]
      rest = rest // array.shape[d]
      at = at + stride[d] * (d == 1 and 1 + 2 * p or 1 + p)
    end
    values[at + 1] = array[i + 1]
  end
  local whole = layout.shaped(values, big, array.dtype)
  local t, order = whole, {}
  for d = 1, nd do
    local dim = nd - d
    t = d == 1 and t:slice(dim, 1, 2 * array.shape[d] + 1, 2) or t:slice(dim, 1, array.shape[d] + 1)
    order[d] = nd - d
  end
  return t:permute(order), whole
end

-- Stride 0 along `dim`, whose values are equal.
local function expanded(array, dim)
  local small = { shape = table.move(array.shape, 1, #array.shape, 1, {}), dtype = array.dtype }
  small.shape[dim] = 1
  local inner = 1
  for d = dim + 1, #array.shape do inner = inner * array.shape[d] end
  local size = array.shape[dim]
  for i = 0, template.count(array) - 1 do
    if i // inner % size == 0 then small[#small + 1] = array[i + 1] end
  end
  return contiguous(small):expand(array.shape)
end

layout.names = { "contiguous", "strided", "broadcast" }

--- The tensor of an array. For "broadcast", `dim` (1-based) is the dimension with equal values, nil: none. For
-- "strided" the tensor around it comes second.
function layout.tensor(array, name, dim)
  if dtypes.is_quantized(array.dtype) then return contiguous(array) end
  if name == "strided" then return strided(array) end
  if name == "broadcast" and dim then return expanded(array, dim) end
  return contiguous(array)
end

--- The values of a tensor in C order as numbers, booleans as 0 and 1.
function layout.values(t)
  if t:numel() == 0 then return {} end
  if dtypes.is_quantized(t.dtype) then t = t:dequantize() end
  local list = t:detach():reshape(-1):tolist()
  if type(list[1]) == "boolean" then
    for i, v in ipairs(list) do list[i] = v and 1 or 0 end
  end
  return list
end

--- The array of a tensor.
function layout.array(t)
  local a = layout.values(t)
  local shape = {}
  for i, size in ipairs(t.shape) do shape[i] = size end
  a.shape, a.dtype = shape, t.dtype
  return a
end

return layout
