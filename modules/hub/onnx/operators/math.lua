--- Operators of ONNX that work element by element, and products of matrices.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"

local M = {}

-- ---- one input ----

for name, fn in pairs { Abs = ty.abs, Acos = ty.acos, Acosh = ty.acosh, Asin = ty.asin, Asinh = ty.asinh,
  Atan = ty.atan, Atanh = ty.atanh, Ceil = ty.ceil, Cos = ty.cos, Cosh = ty.cosh, Erf = ty.erf, Exp = ty.exp,
  Floor = ty.floor, IsNaN = ty.isnan, Log = ty.log, Neg = ty.neg, Not = ty.logical_not, Reciprocal = ty.reciprocal,
  Relu = ty.relu, Round = ty.round, Sigmoid = ty.sigmoid, Sign = ty.sign, Sin = ty.sin, Sinh = ty.sinh, Sqrt = ty.sqrt,
  Tan = ty.tan, Tanh = ty.tanh, Softplus = ty.softplus, Mish = ty.mish, BitwiseNot = ty.bitwise_not } do
  M[name] = function(x) return fn(x[1]) end
end

function M.Identity(x) return x[1] end

function M.IsInf(x, a)
  local up, down = a.detect_positive ~= 0, a.detect_negative ~= 0
  if up and down then return x[1]:isinf() end
  if not up and not down then return x[1]:isinf():logical_and(false) end
  return x[1]:eq(up and math.huge or -math.huge)
end

-- ---- activations ----

function M.LeakyRelu(x, a) return ty.leaky_relu(x[1], a.alpha or 0.01) end

function M.Elu(x, a) return ty.elu(x[1], a.alpha or 1) end

function M.Celu(x, a)
  local alpha = a.alpha or 1
  return ty.elu(x[1] / alpha, 1) * alpha
end

function M.Selu(x, a)
  return ty.elu(x[1], a.alpha or 1.67326319217681884765625) * (a.gamma or 1.05070102214813232421875)
end

function M.PRelu(x) return ty.where(x[1]:lt(0), x[1] * x[2], x[1]) end

function M.HardSigmoid(x, a) return (x[1] * (a.alpha or 0.2) + (a.beta or 0.5)):clamp(0, 1) end

function M.HardSwish(x) return x[1] * (x[1] / 6 + 0.5):clamp(0, 1) end

function M.Softsign(x) return x[1] / (x[1]:abs() + 1) end

function M.ThresholdedRelu(x, a) return ty.where(x[1]:gt(a.alpha or 1), x[1], ty.zeros_like(x[1])) end

function M.Gelu(x, a) return ty.gelu(x[1], a.approximate or "none") end

function M.Swish(x, a)
  local alpha = a.alpha or 1
  return alpha == 1 and x[1]:silu() or x[1] * (x[1] * alpha):sigmoid()
end

function M.Shrink(x, a)
  local bias, limit = a.bias or 0, a.lambd or 0.5
  local function shrink(v)
    local zero = ty.zeros_like(v)
    return ty.where(v:lt(-limit), v + bias, ty.where(v:gt(limit), v - bias, zero))
  end
  return values.in_float(x[1], shrink)
end

-- ---- two inputs ----

for name, fn in pairs { Add = ty.add, Sub = ty.sub, Mul = ty.mul, Equal = ty.eq,
  Greater = ty.gt, GreaterOrEqual = ty.ge, Less = ty.lt, LessOrEqual = ty.le, And = ty.logical_and,
  Or = ty.logical_or, Xor = ty.logical_xor, BitwiseAnd = ty.bitwise_and, BitwiseOr = ty.bitwise_or,
  BitwiseXor = ty.bitwise_xor } do
  M[name] = function(x) return fn(x[1], x[2]) end
end

-- Of integers the quotient without its fraction.
function M.Div(x)
  local a, b = x[1], x[2]
  if a:is_floating_point() then return a / b end
  if a.dtype == "u8" then return a:floor_div(b) end
  return a:abs():floor_div(b:abs()) * (a:sign() * b:sign())
end

function M.Pow(x)
  local a, b = x[1], x[2]
  if b:numel() == 1 and b.device == "cpu" then b = values.scalar(b) end
  local y = ty.pow(a, b)
  return y.dtype == a.dtype and y or y:to(a.dtype)
end

function M.Mod(x, a)
  if a.fmod == 1 then return ty.fmod(x[1], x[2]) end
  return ty.remainder(x[1], x[2])
end

function M.BitShift(x, a)
  return (a.direction == "LEFT" and ty.bitwise_left_shift or ty.bitwise_right_shift)(x[1], x[2])
end

function M.Where(x) return ty.where(x[1], x[2], x[3]) end

-- Any number of inputs.
local function folded(fn)
  return function(x)
    local y = x[1]
    for i = 2, x.n do y = fn(y, x[i]) end
    return y
  end
end
M.Sum, M.Max, M.Min = folded(ty.add), folded(ty.maximum), folded(ty.minimum)

function M.Mean(x) return M.Sum(x) / x.n end

function M.Clip(x, a, c)
  local low, high = a.min, a.max -- attributes before opset 11
  if c.opset >= 11 then low, high = x[2] and values.scalar(x[2]), x[3] and values.scalar(x[3]) end
  if low and high and low > high then -- all become the upper bound
    return ty.full_like(x[1], high)
  end
  if not low and not high then return x[1] end
  local whole = not x[1]:is_floating_point()
  if whole then low, high = math.tointeger(low), math.tointeger(high) end
  return x[1]:clamp(low or nil, high or nil)
end

-- ---- types ----

local function cast(x, to)
  local dtype = values.dtype(to)
  if not x:is_floating_point() and values.wraps[to] then
    return x:to(to == 12 and "i64" or "i32"):bitwise_and(values.wraps[to])
  end
  if to == 21 or to == 22 then -- four bits
    if x:is_floating_point() then x = x:round() end
    return x:clamp(to == 21 and 0 or -8, to == 21 and 15 or 7):to(dtype)
  end
  if x:is_floating_point() and dtype == "bool" then return x:ne(0) end
  return x:to(dtype)
end

function M.Cast(x, a) return cast(x[1], a.to) end

function M.CastLike(x) return x[1]:to(x[2].dtype) end

-- ---- products ----

function M.MatMul(x) return ty.matmul(x[1], x[2]) end

function M.Gemm(x, a)
  local left, right, c = x[1], x[2], x[3]
  local alpha, beta = a.alpha or 1, a.beta or 1
  if a.transA == 1 then left = left:transpose(0, 1) end
  if a.transB == 1 and alpha == 1 and beta == 1 and left:is_floating_point() and (not c or c.ndim == 1
    and c.shape[1] == right.shape[1]) then
    return ty.linear(left, right, c)
  end
  if a.transB == 1 then right = right:transpose(0, 1) end
  local y = ty.matmul(left, right)
  if alpha ~= 1 then y = y * alpha end
  if c and beta ~= 0 then y = y + (beta == 1 and c or c * beta) end
  return y
end

function M.Einsum(x, a)
  return ty.einsum((a.equation or ""):gsub("%s", ""), { table.unpack(x, 1, x.n) })
end

function M.Det(x) return ty.det(x[1]) end

-- ---- running sums ----

function M.CumSum(x, a)
  local dim = values.axis(values.scalar(x[2]), x[1].ndim)
  local y = x[1]:cumsum(dim, a.reverse == 1)
  if a.exclusive ~= 1 then return y end
  return y - x[1]
end

return M
