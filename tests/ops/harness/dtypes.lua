-- Element types as plain Lua numbers: what each can hold, which ops take it, how results are rounded. Independent of
-- the core.

local dtypes = {}

local FLOATS = { "f32", "f64", "f16", "bf16" }
local INTS = { "i64", "i32", "i16", "i8", "u8" }
local bits = { i64 = 64, i32 = 32, i16 = 16, i8 = 8, u8 = 8 }

local function join(...)
  local all = {}
  for _, list in ipairs { ... } do table.move(list, 1, #list, #all + 1, all) end
  return all
end

-- The dtypes of the first tensor that a flag of the table allows, and in a quick run.
local classes = {
  FLOATS = FLOATS, NUMBERS = join(FLOATS, INTS), ANY = join(FLOATS, INTS, { "bool" }), INTS = join(INTS, { "bool" }),
}
local quick = { f32 = true, f64 = true, bf16 = true, i64 = true, u8 = true, bool = true }

--- The dtypes that the op's flags allow; a few of them when `reduced`.
function dtypes.of(flags, reduced)
  for class, list in pairs(classes) do
    if flags[class] then
      if not reduced then return list end
      local some = {}
      for _, name in ipairs(list) do
        if quick[name] then some[#some + 1] = name end
      end
      return some
    end
  end
  error("an op without a dtype class")
end

--- A dtype that the op's class forbids, or nil.
function dtypes.forbidden(flags)
  if flags.PROMOTED then return nil end
  if flags.FLOATS then return "i64" end
  if flags.NUMBERS then return "bool" end
  if flags.INTS then return "f32" end
  return nil
end

function dtypes.is_float(dtype) return dtype == "f32" or dtype == "f64" or dtype == "f16" or dtype == "bf16" end
--- Block-quantized: { dtype = the elements of a block }.
local blocks = { q8_0 = 32, q4_0 = 32, q2_k = 256, q3_k = 256, q4_k = 256, q6_k = 256, nf4 = 64, mxfp4 = 32,
  nvfp4 = 64 }
function dtypes.is_quantized(dtype) return blocks[dtype] ~= nil end
function dtypes.is_half(dtype) return dtype == "f16" or dtype == "bf16" end
function dtypes.is_int(dtype) return bits[dtype] ~= nil end

--- Smallest and largest value of an integer dtype.
function dtypes.limits(dtype)
  if dtype == "u8" then return 0, 255 end
  return -(1 << (bits[dtype] - 1)), (1 << (bits[dtype] - 1)) - 1
end

-- As C converts: to the nearest, halves to even.
local function to_f32(x) return (string.unpack("<f", string.pack("<f", x))) end

-- x to `digits` binary digits, halves to even, exponents not below `lowest`.
local function to_digits(x, digits, lowest, max)
  if x == 0 or x ~= x or x == math.huge or x == -math.huge then return x end
  local exponent = (string.unpack("<i8", string.pack("<d", x)) >> 52 & 0x7ff) - 1023
  local unit = 2.0 ^ (math.max(exponent, lowest) - digits + 1)
  local steps = x / unit
  local low = math.floor(steps)
  local part = steps - low
  if part > 0.5 or (part == 0.5 and low % 2 == 1) then low = low + 1 end
  local y = low * unit
  if math.abs(y) > max then return x < 0 and -math.huge or math.huge end
  return y
end

local function wrap(x, dtype)
  if dtype == "i64" then return math.tointeger(x) or math.floor(x) end
  local n = bits[dtype]
  local i = (math.tointeger(x) or math.floor(x)) & ((1 << n) - 1)
  if dtype ~= "u8" and i >= 1 << (n - 1) then i = i - (1 << n) end
  return i
end

local round = {
  f64 = function(x) return x + 0.0 end,
  f32 = to_f32,
  f16 = function(x) return to_digits(to_f32(x), 11, -14, 65504) end,
  bf16 = function(x) return to_digits(to_f32(x), 8, -126, 0x1.fep127) end,
  bool = function(x) return x ~= 0 and 1 or 0 end,
}
for dtype in pairs(bits) do
  round[dtype] = function(x)
    if x ~= x or x == math.huge or x == -math.huge then return x end
    return wrap(x, dtype)
  end
end
for dtype in pairs(blocks) do round[dtype] = function(x) return x end end

--- The value of `dtype` nearest to x; integers wrap around.
function dtypes.round(x, dtype) return round[dtype](x) end

--- Allowed error of a result of `dtype`, relative to max(1, |expected|).
dtypes.tolerance = { f64 = 1e-12, f32 = 2e-6, f16 = 2e-3, bf16 = 2e-2 }

--- The dtype of a result of two operands.
function dtypes.promote(a, b)
  if a == b then return a end
  local fa, fb = dtypes.is_float(a), dtypes.is_float(b)
  if fa ~= fb then return fa and a or b end
  if fa then
    if a == "f64" or b == "f64" then return "f64" end
    return "f32"
  end
  if a == "bool" then return b end
  if b == "bool" then return a end
  if a == "u8" or b == "u8" then
    local other = a == "u8" and b or a
    return other == "i8" and "i16" or other
  end
  return bits[a] > bits[b] and a or b
end

return dtypes
