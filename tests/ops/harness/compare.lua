-- Comparing results with references, and the dtypes that results should have.

local dtypes = require "dtypes"
local reference = require "reference"

local compare = {}

local BOOL = {
  "isnan", "isinf", "isfinite", "logical_not", "logical_and", "logical_or", "logical_xor", "eq", "ne", "lt", "le", "gt",
  "ge", "any", "all", "finite_list",
}
local I64 = { "argmax", "argmin", "argsort", "nonzero", "one_hot", "randint", "randperm", "multinomial" }
local SECOND_I64 = { "sort", "topk", "max_pool2d", "adaptive_max_pool2d" }
local INTS_TO_F32 = { "div", "atan2", "hypot", "copysign" }

local rule = {}
for _, name in ipairs(BOOL) do rule[name] = function() return "bool" end end
for _, name in ipairs(I64) do rule[name] = function() return "i64" end end
for _, name in ipairs(SECOND_I64) do rule[name] = function(dtype, i) return i == 2 and "i64" or dtype end end
for _, name in ipairs(INTS_TO_F32) do
  rule[name] = function(dtype) return dtypes.is_float(dtype) and dtype or "f32" end
end
rule.sum = function(dtype) return dtypes.is_float(dtype) and dtype or "i64" end
rule.cumsum, rule.cumprod, rule.prod = rule.sum, rule.sum, rule.sum
rule.norm_list = function() return "f64" end

--- The dtype that result i of an op should have: from the row, the reference's result, the rules above, or the first
--- tensor that follows the case's dtype (for creating ops: nil, anything).
function compare.result_dtype(row, instance, i, want)
  if want.dtype then return want.dtype end
  local d = row.dtype
  if type(d) == "function" then d = d(instance.dtype, i) end
  if type(d) == "table" then d = d[i] end
  if d then return d end
  if instance.opts and instance.opts.dtype then return instance.opts.dtype end
  local dtype
  for _, s in ipairs(instance.slots) do
    if not s.array.fixed then
      dtype = s.array.dtype
      break
    end
  end
  if not dtype and instance.slots[1] then dtype = instance.slots[1].array.dtype end
  local by_rule = rule[row.name]
  if by_rule then return by_rule(dtype, i) end
  return dtype
end

--- The tolerance of a row for results of `dtype`: row.tol by dtype, or one number for f32 that the others are scaled
--- to.
function compare.tolerance(tol, dtype)
  local base = dtypes.tolerance[dtype] or 0
  if type(tol) == "table" then return tol[dtype] or base end
  if type(tol) == "number" then return base * math.max(1, tol / dtypes.tolerance.f32) end
  return base
end

function compare.shape_text(shape) return "[" .. table.concat(shape, ", ") .. "]" end

function compare.same_shape(a, b)
  if #a ~= #b then return false end
  for i = 1, #a do
    if a[i] ~= b[i] then return false end
  end
  return true
end

local function same(a, b) return a == b or (a ~= a and b ~= b) end

--- Whether two lists of numbers are equal bit for bit (NaN equals NaN, 0 equals -0).
function compare.equal(a, b)
  if #a ~= #b then return false, string.format("%d values, not %d", #a, #b) end
  for i = 1, #a do
    if not same(a[i], b[i]) then return false, string.format("value %d is %.9g, not %.9g", i - 1, a[i], b[i]) end
  end
  return true
end

--- Whether values are near `want` (numbers, rounded to dtype first when it is given): |a - b| <= tol * max(1, |b|, and
--- unless `strict`, the largest |b| of all).
function compare.near(values, want, tol, dtype, strict)
  local scale = 1
  if not strict then
    for i = 1, #values do
      local b = math.abs(want[i])
      if b > scale and b < math.huge then scale = b end
    end
  end
  for i = 1, #values do
    local a, b = values[i], want[i]
    if type(a) ~= "number" then return false, string.format("value %d is a %s", i - 1, type(a)) end
    if dtype then b = dtypes.round(b, dtype) end
    if not same(a, b) then
      local d = math.abs(a - b)
      local allowed = tol * math.max(scale, math.abs(b))
      if math.abs(b) == math.huge or d ~= d or d > allowed then
        local text = "value %d is %.17g, expected %.17g (off by %.3g, allowed %.3g)"
        return false, text:format(i - 1, a, b, d, allowed)
      end
    end
  end
  return true
end

--- A reference's result as an array: numbers become 0-d.
function compare.as_array(want)
  if type(want) == "number" then return { shape = {}, want } end
  if type(want) == "boolean" then return { shape = {}, want and 1 or 0 } end
  assert(type(want) == "table" and want.shape, "the reference gives no array")
  return want
end

--- Whether the array has values and not only a shape.
function compare.has_values(want) return reference.count(want.shape) == 0 or want[1] ~= nil end

return compare
