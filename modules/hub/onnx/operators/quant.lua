--- Operators of ONNX on numbers of eight bits.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"
local nn = require "tycho.hub.onnx.operators.nn"

local M = {}

-- The bounds of a type; i32 holds what is u16 in the file.
local bounds = { u8 = { 0, 255 }, i8 = { -128, 127 }, i16 = { -32768, 32767 }, i32 = { 0, 65535 } }

-- A scale or zero point of one number, of one for each position of `dim`, or for each block of positions.
local function spread(t, x, dim, block)
  if not t or t:numel() == 1 and t.ndim <= 1 then return t and t:reshape({}) end
  if t.ndim == 1 then
    local shape = values.copies(1, x.ndim)
    shape[values.axis(dim, x.ndim) + 1] = t.shape[1]
    return t:reshape(shape)
  end
  if block and block > 0 then
    local at = values.axis(dim, x.ndim)
    return t:repeat_interleave(block, at):narrow(at, 0, x.shape[at + 1])
  end
  return t
end

local function quantize(y, zero, dtype)
  local bound = bounds[dtype] or error(("numbers of %s are not made"):format(dtype), 0)
  y = y:round()
  if zero then y = y + zero:to(y.dtype) end
  return y:clamp(bound[1], bound[2]):to(dtype)
end

function M.QuantizeLinear(x, a)
  local scale, zero = spread(x[2], x[1], a.axis or 1, a.block_size), spread(x[3], x[1], a.axis or 1, a.block_size)
  local dtype = zero and zero.dtype or a.output_dtype and a.output_dtype ~= 0 and values.dtype(a.output_dtype) or "u8"
  return quantize(x[1]:to(scale.dtype) / scale, zero, dtype)
end

function M.DequantizeLinear(x, a)
  local scale, zero = spread(x[2], x[1], a.axis or 1, a.block_size), spread(x[3], x[1], a.axis or 1, a.block_size)
  local y = x[1]:to(scale.dtype)
  if zero then y = y - zero:to(scale.dtype) end
  return y * scale
end

function M.DynamicQuantizeLinear(x)
  local low, high = math.min(0, values.scalar(x[1]:min())), math.max(0, values.scalar(x[1]:max()))
  local scale = ty.tensor((high - low) / 255, { dtype = "f32" })
  local step = scale:item()
  local zero = ty.tensor(step == 0 and 0 or -low / step):round():clamp(0, 255)
  local y = step == 0 and ty.zeros_like(x[1]) or x[1] / step
  return quantize(y, zero, "u8"), scale, zero:to "u8"
end

local function less(t, zero, column)
  t = t:to "i32"
  if not zero then return t end
  zero = zero:to "i32"
  if zero.ndim == 1 and zero.shape[1] > 1 and column then zero = zero:unsqueeze(1) end
  return t - zero
end

function M.MatMulInteger(x)
  return ty.matmul(less(x[1], x[3], true), less(x[2], x[4]))
end

function M.ConvInteger(x, a)
  local zero = x[4]
  if zero and zero:numel() > 1 then zero = zero:reshape(-1, table.unpack(values.copies(1, x[2].ndim - 1))) end
  local t, w = less(x[1], x[3] and x[3]:reshape({})):to "f64", less(x[2], zero):to "f64"
  return nn.Conv({ t, w, n = 2 }, a):to "i32"
end

-- By row of the left or column of the right factor, or for all.
local function scales(t, as_rows)
  if not t or t.ndim == 0 or t:numel() == 1 then return t and t:reshape({}) end
  if t.ndim > 1 then return t end
  return as_rows and t:unsqueeze(1) or t
end

function M.QLinearMatMul(x)
  local left = x[1]:to "f64" - scales(x[3], true):to "f64"
  local right = x[4]:to "f64" - scales(x[6]):to "f64"
  local factor = scales(x[2], true):to "f64" * scales(x[5]):to "f64" / x[7]:to "f64"
  return quantize(ty.matmul(left, right) * factor, x[8], x[8].dtype)
end

function M.QLinearConv(x, a)
  local t, w = x[1]:to "f64" - x[3]:to "f64":reshape({}), x[4]:to "f64"
  local shape = { -1, table.unpack(values.copies(1, w.ndim - 1)) }
  w = w - (x[6]:numel() > 1 and x[6]:to "f64":reshape(shape) or x[6]:to "f64":reshape({}))
  local bias = x[9] and x[9]:to "f64" or nil
  local y = nn.Conv({ t, w, bias, n = 3 }, a)
  local scale = x[5]:to "f64"
  if scale:numel() > 1 then scale = scale:reshape(1, -1, table.unpack(values.copies(1, w.ndim - 2))) end
  local factor = x[2]:to "f64":reshape({}) * (scale:numel() > 1 and scale or scale:reshape({}))
    / x[7]:to "f64":reshape({})
  return quantize(y * factor, x[8]:reshape({}), x[8].dtype)
end

return M
