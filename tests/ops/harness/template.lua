-- Templates of tensors in test rows, T{2, 3, range = {-1, 1}}, and the arrays made from them: { shape = {2, 3}, dtype
-- = "f32", [1..n] = values in C order }, with booleans as 0 and 1. The same case always gets the same values.
--
--   range = {lo, hi}   uniform in there (default {-2, 2}); integer dtypes get the integers in there
--   int = {lo, hi}     i64 in [lo, hi) whatever the case's dtype is (the case's dtype for INTS ops)
--   bool = true        bool
--   distinct = true    no two values closer than 0.05
--   avoid = {0, 1}     no value closer than 0.1 to these
--   values = {...}     exactly these
--   dtype = "f32"      always this dtype; of a block-quantized one, the values are what decoding what was encoded gives

local dtypes = require "dtypes"

local Template = {}
Template.__index = Template

local template = {}

function template.is(v) return getmetatable(v) == Template end

local function near(x, list)
  for _, a in ipairs(list) do
    if math.abs(x - a) < 0.1 then return true end
  end
  return false
end

local function shuffle(list)
  for i = #list, 2, -1 do
    local j = math.random(i)
    list[i], list[j] = list[j], list[i]
  end
end

local function distinct_values(n, lo, hi, dtype)
  local values = {}
  if dtype == "bool" then
    for i = 1, n do values[i] = math.random(0, 1) end
    return values
  end
  if dtypes.is_float(dtype) then
    local step = math.max(0.08, (hi - lo) / math.max(n, 1))
    local start = math.max(lo, (lo + hi - step * n) / 2)
    if lo < 0 then start = (lo + hi - step * n) / 2 end
    for i = 1, n do values[i] = start + step * (i - 1 + 0.3 * math.random()) end
  else
    local low, high = dtypes.limits(dtype)
    local start = math.max(low, math.min(math.ceil(lo), high - n))
    for i = 1, n do values[i] = start + i - 1 end
  end
  shuffle(values)
  return values
end

local function random_values(n, lo, hi, dtype, avoid)
  local values = {}
  local low, high = lo, hi
  if dtypes.is_int(dtype) then
    low, high = math.ceil(lo), math.floor(hi)
    if low > high then low, high = math.floor(lo), math.ceil(hi) end
    if dtype == "u8" then low, high = math.max(low, 0), math.max(high, 1) end
  end
  for i = 1, n do
    local x
    for _ = 1, 1000 do
      if dtype == "bool" then
        x = math.random(0, 1)
      elseif dtypes.is_int(dtype) then
        x = math.random(low, high)
      else
        x = low + (high - low) * math.random()
      end
      if not near(x, avoid) then break end
    end
    values[i] = x
  end
  return values
end

--- The array of a template when the case runs in `dtype`; nil when its values do not exist in that dtype.
function template.fill(spec, dtype, follow_int)
  local array = { shape = {} }
  local n = 1
  for i, size in ipairs(spec) do
    array.shape[i] = size
    n = n * size
  end
  if spec.dtype then dtype = spec.dtype
  elseif spec.bool then dtype = "bool"
  elseif spec.int and not (follow_int and not dtypes.is_float(dtype) and dtype ~= "bool") then dtype = "i64" end
  array.dtype = dtype
  array.fixed = (spec.dtype or spec.bool or (spec.int and not follow_int)) and true or nil
  array.exact = (spec.distinct or spec.int or spec.values or spec.bool) and true or nil

  local values
  if spec.values then
    assert(#spec.values == n, "values of a template do not fit its shape")
    values = table.move(spec.values, 1, n, 1, {})
    for _, x in ipairs(values) do
      if not dtypes.is_float(dtype) and (x ~= x or x == math.huge or x == -math.huge or x % 1 ~= 0) then return nil end
      if dtype == "u8" and x < 0 then return nil end
    end
  elseif spec.int then
    values = {}
    for i = 1, n do values[i] = math.random(spec.int[1], spec.int[2] - 1) end
    if spec.distinct then
      values = {}
      for i = spec.int[1], spec.int[2] - 1 do values[#values + 1] = i end
      shuffle(values)
    end
  else
    local lo, hi = table.unpack(spec.range or { -2, 2 })
    if spec.distinct then
      values = distinct_values(n, lo, hi, dtype)
    else
      values = random_values(n, lo, hi, dtype, spec.avoid or {})
    end
  end
  for i = 1, n do array[i] = dtypes.round(values[i], dtype) end
  if dtypes.is_quantized(dtype) and n > 0 then
    local ty = require "tycho"
    local encoded = ty.tensor(values, { dtype = "f32" }):reshape(array.shape):quantize(dtype)
    array.exact = true
    array.bytes = ty.io.to_bytes(encoded)
    table.move(encoded:dequantize():reshape(-1):tolist(), 1, n, 1, array)
  end
  return array
end

function template.count(array)
  local n = 1
  for _, size in ipairs(array.shape) do n = n * size end
  return n
end

--- The same shape, dtype and values, to be changed.
function template.copy(array)
  local c = { shape = array.shape, dtype = array.dtype, fixed = array.fixed, exact = array.exact, bytes = array.bytes }
  return table.move(array, 1, template.count(array), 1, c)
end

--- An array whose values repeat along one dimension of size > 1, or nil; for the layout with stride 0. Returns the
--- dimension.
function template.repeated(array)
  for dim = #array.shape, 1, -1 do
    local size = array.shape[dim]
    if size > 1 and not array.exact then
      local inner = 1
      for d = dim + 1, #array.shape do inner = inner * array.shape[d] end
      local c = template.copy(array)
      for i = 0, template.count(array) - 1 do
        c[i + 1] = array[i // (inner * size) * (inner * size) + i % inner + 1]
      end
      return c, dim
    end
  end
  return nil
end

function template.new(spec) return setmetatable(spec, Template) end

return template
