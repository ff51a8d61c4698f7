--- Floats of four bits with a scale for each block: the numbers of E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6) times a scale in
-- E8M0 (MXFP4: powers of 2, blocks of 32; Rouhani et al. 2023, "Microscaling Data Formats for Deep Learning"), E4M3
-- (NVFP4: blocks of 16 and one factor for the tensor), UE5M3 (Hu et al. 2025, "Elucidating the Design Space of FP4
-- training") or f32. Elements of E4M3 with E8M0 scales are MXFP8.
--
--     local value = fp4.quantize(x, { scale = "e4m3", block = 16, tensor = true })
--     local packed = fp4.encode(x, { scale = "e8m0" })         -- 4.25 bits an element
--     local value = fp4.decode(packed)
--     layer.weight = fp4.tensor(packed)                        -- of dtype mxfp4 or nvfp4, for products that read codes
--
-- quantize() computes in f32 what the formats hold: the products of such values are those that hardware for the format
-- forms, up to the order of its sums. encode() packs the same numbers: decode() gives them back bit for bit.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local M = {}

--- The magnitudes of E2M1 by code; 8 more is the negative one.
M.values = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 }

-- Small floats: bits of the mantissa, bias of the exponent, the greatest number. E4M3 keeps one code for NaN, and so
-- does UE5M3, which has no sign.
local small = {
  e4m3 = { mantissa = 3, bias = 7, greatest = 448 },
  ue5m3 = { mantissa = 3, bias = 15, greatest = 114688 },
}
local scales = '"e8m0" or "e4m3" or "ue5m3" or "float"'

-- ---- small floats ----

-- x (f32, any sign) to the nearest number of a small float, ties to the even code, what is too large to the greatest.
local function round_small(x, f)
  local drop = 23 - f.mantissa
  local smallest = 2.0 ^ (1 - f.bias)
  local step = smallest * 2.0 ^ -f.mantissa
  local bits = x:contiguous():view "i32"
  local odd = bits:bitwise_right_shift(drop):bitwise_and(1)
  local rounded = (bits + odd + ((1 << drop - 1) - 1)):bitwise_and(-(1 << drop)):view "f32"
  return ty.where(x:abs():lt(smallest), (x / step):round() * step, rounded):clamp(-f.greatest, f.greatest)
end

-- The power of 2 at or below x >= 0; 0 for 0.
local function power_below(x) return x:contiguous():view("i32"):bitwise_and(0x7f800000):view "f32" end

--- Positive numbers, f32, as a format of scales holds them: "e8m0" the power of 2 below (at least 2^-126), "e4m3" and
-- "ue5m3" the nearest number (0 where it is too small), "float" as they are.
---@param x Tensor
---@param format string
---@return Tensor
function M.round_scale(x, format)
  expect("quant.fp4.round_scale", "x", x, "a tensor")
  expect("quant.fp4.round_scale", "format", format, scales)
  if format == "float" then return x end
  if format == "e8m0" then return power_below(x):clamp(2.0 ^ -126) end
  return round_small(x, small[format])
end

local function encode_scale(x, format)
  if format == "float" then return x end
  local bits = x:contiguous():view "i32"
  if format == "e8m0" then return bits:bitwise_right_shift(23):to "u8" end
  local f = small[format]
  local code = bits:bitwise_right_shift(23 - f.mantissa) - ((127 - f.bias) << f.mantissa)
  local smallest = 2.0 ^ (1 - f.bias)
  return ty.where(x:lt(smallest), (x * (2.0 ^ f.mantissa / smallest)):to "i32", code):to "u8"
end

local function decode_scale(code, format)
  if format == "float" then return code end
  local i = code:to "i32"
  if format == "e8m0" then return i:bitwise_left_shift(23):view "f32" end
  local f = small[format]
  local value = (i + ((127 - f.bias) << f.mantissa)):bitwise_left_shift(23 - f.mantissa):view "f32"
  return ty.where(i:lt(1 << f.mantissa), i:to "f32" * (2.0 ^ (1 - f.bias) / 2.0 ^ f.mantissa), value)
end

-- ---- options ----

local defaults = { element = "e2m1", scale = "e8m0", block = 32, tensor = false, rounding = "nearest",
  range = "absmax", shrink = 1, gradient = "ste" }
local kinds = { element = '"e2m1" or "e4m3" or "bf16"', scale = scales, block = "an integer >= 1",
  rounding = '"nearest" or "stochastic"', range = '"absmax" or "quest"', shrink = "a number > 0",
  gradient = '"ste" or "clip" or "dge" or "absmax" or "absmax_adjusted"' }

--- Options of quantize(), checked, with their defaults:
--   element   "e2m1"; "e4m3" (with E8M0 scales: MXFP8); "bf16", which has no scale
--   scale     "e8m0", "e4m3", "ue5m3" or "float"; block (32): elements that share one
--   tensor    true: the whole tensor is scaled first, so that the largest block's scale is the greatest of its format
--             (1 for E8M0)
--   rounding  "nearest" (ties to even) or "stochastic", which draws from the generator: its mean is the number itself
--   range     what the block's scale is made of: "absmax", or "quest": 2.9225 standard deviations go to the largest
--             code (Panferov et al. 2025, "QuEST"), what is beyond is clipped
--   shrink    the elements are made smaller by it before they are rounded, and larger again: 0.75 with absmax and E8M0
--             leaves nothing to clip
--   gradient  what vjp() does, see there
---@param who string  in front of errors
---@param options? table
---@return table
function M.options(who, options)
  expect("quant.fp4.options", "who", who, "a string")
  local o = arguments.read(who, options, defaults, kinds)
  if o.element == "e4m3" and o.scale ~= "e8m0" then
    fail('%s: scale: expected "e8m0" for elements of e4m3, got %s', who, arguments.describe(o.scale))
  end
  if o.element ~= "e2m1" and o.rounding == "stochastic" then
    fail('%s: rounding: expected "nearest" for elements of %s, got "stochastic"', who, o.element)
  end
  return o
end

--- Bits that an element takes, its share of the block's scale among them.
---@param options? table  of options()
---@return number
function M.bits(options)
  local o = M.options("quant.fp4.bits", options)
  if o.element == "bf16" then return 16 end
  return (o.element == "e2m1" and 4 or 8) + (o.scale == "float" and 32 or 8) / o.block
end

-- ---- quantizing ----

local quest = 2.92247856 -- standard deviations of a normal variable that lose least in E2M1 codes, as in the code

-- The scale that format o.scale holds for each block of x [blocks, block], with the tensor's factor: f32 [blocks, 1].
-- Besides it the scale alone and the factor.
local function scales_of(x, o)
  local largest = o.element == "e2m1" and 6 or 448
  local factor = 1.0
  local top = ty.norm(x, math.huge, 1, true)
  if o.tensor and o.scale ~= "float" then
    local whole = top:max():item()
    factor = whole > 0 and whole / (largest * (small[o.scale] and small[o.scale].greatest or 1)) or 1.0
  end
  local raw
  if o.range == "quest" then
    raw = x:std(1, 0, true) * (quest / largest) + 1e-8
    if factor ~= 1 then raw = raw / factor end
  else
    if factor ~= 1 then top = top / factor end
    -- E8M0 takes the exponent of the largest element, less that of the largest code (section 5.2 of the paper).
    raw = o.scale == "e8m0" and top * (o.element == "e2m1" and 0.25 or 2.0 ^ -8) or top / largest
  end
  local scale = M.round_scale(raw, o.scale)
  factor = factor / o.shrink
  return factor == 1 and scale or scale * factor, scale, factor
end

local function blocks_of(who, x, o)
  expect(who, "x", x, "a tensor")
  local n = x.ndim > 0 and x.shape[x.ndim]
  if not n or n % o.block ~= 0 then
    fail("%s: x: expected [..., n], n a multiple of the block, %d, got %s", who, o.block, arguments.describe(x))
  end
  if x.dtype ~= "f32" then fail("%s: x: expected a tensor of f32, got %s", who, x.dtype) end
  return x:reshape(-1, o.block)
end

local function quantize(who, x, o)
  if o.element == "bf16" then return x:to("bf16"):to "f32", {} end
  local b = blocks_of(who, x, o)
  local total, scale, factor = scales_of(b, o)
  local value
  if o.element == "e4m3" then
    value = round_small(b / total:masked_fill(total:eq(0), 1), small.e4m3) * total
  elseif o.rounding == "nearest" then
    value = ty.round_e2m1(b, total)
  else
    -- Blocks whose scale is 0 hold nothing: their numbers are 0, or too small, also once the tensor's factor is in it.
    local safe = total:masked_fill(total:eq(0), 1)
    value = ty.round_e2m1_stochastic(b / safe, ty.rand_like(b)) * total
  end
  return value:reshape(x.shape), { x = b, value = value, total = total, scale = scale, factor = factor }
end

-- What the gradient needs of all that: a list of tensors.
local function kept(how, s)
  if how == "ste" or not s.x then return {} end
  if how == "clip" then return { s.x:abs():lt(s.total * 6) } end
  if how == "dge" then return { s.x, s.total } end
  return { s.x, s.total, s.value }
end

--- x [..., n], f32, as the format of the options holds it; and what vjp() wants to know, a list of tensors. Without
-- gradient.
---@param x Tensor
---@param options? table  of options()
---@return Tensor value
---@return Tensor[] saved
function M.quantize(x, options)
  local o = M.options("quant.fp4.quantize", options)
  expect("quant.fp4.quantize", "x", x, "a tensor")
  return ty.no_grad(function()
    local value, state = quantize("quant.fp4.quantize", x, o)
    return value, kept(o.gradient, state)
  end)
end

-- The slope of the soft staircase that stands for E2M1 between two codes of distance d, t of the way from one to the
-- other: |2t - 1|^(1/k - 1) / k, at most 3, k = 5 (Wang et al. 2025, "Optimizing Large Language Model Training Using
-- FP4 Quantization").
local function staircase_slope(q)
  local a = q:abs()
  local steps = ty.where(a:lt(2), ty.full_like(a, 2), ty.where(a:lt(4), ty.ones_like(a), ty.full_like(a, 0.5)))
  local t = a * steps
  t = (t - t:floor()) * 2 - 1
  local slope = (t:abs():clamp(1e-6):pow(1 / 5 - 1) / 5):clamp(nil, 3)
  return ty.where(a:gt(6), ty.zeros_like(a), slope)
end

--- The gradient for x from that for quantize()'s value, by the option `gradient`:
--   "ste"              straight through
--   "clip"             straight through where nothing was clipped, 0 elsewhere (the mask of QuEST)
--   "dge"              times the slope of a soft staircase (Wang et al. 2025)
--   "absmax"           straight through the rounding of elements and of scales, and through the block's largest
--                      element, of which the scale is made: proposition 1 of Hu et al. 2025
--   "absmax_adjusted"  the same, but the rounded scale counts as so many times the largest element as it is
-- The factor of a whole tensor counts as a constant.
---@param grad Tensor
---@param saved Tensor[]
---@param options? table
---@return Tensor
function M.vjp(grad, saved, options)
  local o = M.options("quant.fp4.vjp", options)
  expect("quant.fp4.vjp", "grad", grad, "a tensor")
  expect("quant.fp4.vjp", "saved", saved, "a list of tensors")
  if #saved == 0 then return grad end
  local g = grad:reshape(saved[1].shape)
  if o.gradient == "clip" then return (g * saved[1]:to "f32"):reshape(grad.shape) end
  local x, total = saved[1], saved[2]
  local safe = total:masked_fill(total:eq(0), 1)
  if o.gradient == "dge" then return (g * staircase_slope(x / safe)):reshape(grad.shape) end
  -- d value / d scale = code - x / scale where x passes straight; d scale / d largest element is 1 / 6, or what the
  -- scale is of the largest element.
  local by_scale, magnitude = (g * (saved[3] - x)):sum(1, true) / safe, x:abs()
  local slope = o.gradient == "absmax" and by_scale / (6 * o.shrink)
    or by_scale * total / magnitude:max(1, true):clamp(1e-30)
  local largest = ty.one_hot(magnitude:argmax(1), x.shape[2]):to "f32"
  return (g + largest * x:sign() * slope):reshape(grad.shape)
end

-- ---- packed ----

-- Bytes [rows, blocks, 2, half] of codes, elements 0 .. half - 1 low, the others high, as ggml's blocks have them.
local function halves(codes, rows, width)
  local parts = codes:reshape(rows, codes.shape[2] // width, 2, width // 2)
  return parts:select(2, 0) + parts:select(2, 1) * 16
end

--- A packed matrix as a tensor of dtype mxfp4 or nvfp4, whose products read the codes as they are: what encode() gives,
-- or files of weights with codes and scales apart, as those of torchao, compressed-tensors and ModelOpt (codes u8
-- [rows, n / 2], the even element low; scales u8 [rows, n / block]; factor: their global
-- scale, by which values are multiplied).
-- Scales are E8M0 for blocks of 32 (n a multiple of 32), or E4M3 for blocks of 16 (n a multiple of 64).
---@param packed { codes: Tensor, scales: Tensor, factor?: number, options: table }
---@return Tensor
function M.tensor(packed)
  local who = "quant.fp4.tensor"
  expect(who, "packed", packed, "a table")
  local codes = expect(who, "codes", packed.codes, "a tensor")
  local scale = expect(who, "scales", packed.scales, "a tensor")
  local factor = packed.factor or 1.0
  expect(who, "factor", factor, "a finite number")
  local o = M.options(who, packed.options)
  local mx = o.scale == "e8m0" and o.block == 32
  if not mx and not (o.scale == "e4m3" and o.block == 16) or o.element ~= "e2m1" then
    fail("%s: options: expected elements of e2m1 with scales of e8m0 for 32 or of e4m3 for 16, got %s with %s for %d",
      who, o.element, o.scale, o.block)
  end
  local width = mx and 32 or 64
  if codes.dtype ~= "u8" or codes.ndim ~= 2 or codes.shape[2] * 2 % width ~= 0 then
    fail("%s: codes: expected u8 [rows, n / 2], n a multiple of %d, got %s", who, width, arguments.describe(codes))
  end
  local rows, n = codes.shape[1], codes.shape[2] * 2
  if scale.dtype ~= "u8" or scale.ndim ~= 2 or scale.shape[1] ~= rows or scale.shape[2] ~= n // o.block then
    fail("%s: scales: expected u8 [%d, %d], got %s", who, rows, n // o.block, arguments.describe(scale))
  end
  if mx and factor ~= 1 then fail("%s: factor: expected 1 with scales of e8m0, got %g", who, factor) end
  return ty.no_grad(function()
    local bytes = codes:to("cpu"):reshape(rows, n // 2, 1)
    local list = ty.concat({ bytes:bitwise_and(15), bytes:floor_div(16) }, 2):reshape(rows, n)
    local blocks, s = n // width, scale:to "cpu"
    if mx then
      local all = ty.concat({ s:reshape(rows, blocks, 1), halves(list, rows, 32) }, 2)
      return ty.io.from_bytes(ty.io.to_bytes(all:contiguous()), "mxfp4", { rows, n }):to { device = codes.device }
    end
    local all = ty.concat({ s:reshape(rows, blocks, 4), halves(list, rows, 16):reshape(rows, blocks, 32) }, 2)
    local head = ty.io.from_bytes(string.pack("<f", factor):rep(rows), "u8", { rows, 4 })
    all = ty.concat({ head, all:reshape(rows, -1) }, 1)
    return ty.io.from_bytes(ty.io.to_bytes(all:contiguous()), "nvfp4", { rows, n }):to { device = codes.device }
  end)
end

--- x packed: codes u8 [..., n / 2], the even element in the low half of a byte; scales u8 (f32 for "float") [..., n /
-- block], factor: a number that all values are multiplied by. The second result is what decode() will give.
---@param x Tensor
---@param options? table  of options(), for elements of e2m1
---@return { codes: Tensor, scales: Tensor, factor: number, options: table } packed
---@return Tensor value
function M.encode(x, options)
  local who = "quant.fp4.encode"
  local o = M.options(who, options)
  if o.element ~= "e2m1" or o.block % 2 == 1 then
    fail("%s: options: expected elements of e2m1 in blocks of an even number, got %s in blocks of %d", who, o.element,
      o.block)
  end
  expect(who, "x", x, "a tensor")
  return ty.no_grad(function()
    local value, s = quantize(who, x, o)
    local a = (s.value / s.total:masked_fill(s.total:eq(0), 1)):abs()
    local code = ty.where(a:lt(2), a * 2, ty.where(a:lt(4), a + 2, a / 2 + 4)):round():to "u8"
    code = code + s.value:signbit():to "u8" * 8
    local shape = value.shape
    local pairs_of = code:reshape(-1, 2)
    local codes = pairs_of:select(1, 0) + pairs_of:select(1, 1) * 16
    local function with_last(n)
      local size = { table.unpack(shape) }
      size[#size] = n
      return size
    end
    local n = shape[#shape]
    return { codes = codes:reshape(with_last(n // 2)), factor = s.factor, options = o,
      scales = encode_scale(s.scale, o.scale):reshape(with_last(n // o.block)) }, value
  end)
end

--- The values of a packed tensor, f32.
---@param packed { codes: Tensor, scales: Tensor, factor: number, options: table }
---@return Tensor
function M.decode(packed)
  local who = "quant.fp4.decode"
  expect(who, "packed", packed, "a table")
  expect(who, "codes", packed.codes, "a tensor")
  expect(who, "scales", packed.scales, "a tensor")
  expect(who, "factor", packed.factor, "a finite number")
  local o = M.options(who, packed.options)
  if packed.codes:numel() * 2 ~= packed.scales:numel() * o.block then
    fail("%s: packed: expected a scale for each %d codes, got %s and %s", who, o.block,
      arguments.describe(packed.codes), arguments.describe(packed.scales))
  end
  return ty.no_grad(function()
    local list = {}
    for code = 0, 15 do list[code + 1] = M.values[code % 8 + 1] * (code < 8 and 1.0 or -1.0) end
    local bytes = packed.codes:reshape(-1, 1)
    local codes = ty.concat({ bytes:bitwise_and(15), bytes:floor_div(16) }, 1)
    local values = ty.tensor(list, { dtype = "f32" }):to(bytes.device):index_select(0, codes:reshape(-1):to "i64")
    local scale = decode_scale(packed.scales:reshape(-1, 1), o.scale)
    if packed.factor ~= 1 then scale = scale * packed.factor end
    local shape = packed.codes.shape
    shape[#shape] = shape[#shape] * 2
    return (values:reshape(-1, o.block) * scale):reshape(shape)
  end)
end

return M
