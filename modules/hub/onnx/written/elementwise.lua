--- Ops that work element by element, and reductions, as nodes of ONNX.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"

local M = {}

for op, node in pairs { neg = "Neg", abs = "Abs", sign = "Sign", exp = "Exp", log = "Log", sqrt = "Sqrt", sin = "Sin",
  cos = "Cos", tan = "Tan", asin = "Asin", acos = "Acos", atan = "Atan", sinh = "Sinh", cosh = "Cosh", asinh = "Asinh",
  acosh = "Acosh", atanh = "Atanh", tanh = "Tanh", erf = "Erf", sigmoid = "Sigmoid", relu = "Relu", floor = "Floor",
  ceil = "Ceil", round = "Round", reciprocal = "Reciprocal", mish = "Mish" } do
  M[op] = function(b, a, out) return b:emit(node, { b:operand(a.x, out[1].dtype) }) end
end

-- Those made of several: fn gets the builder, x's name, a function that makes constants of its dtype, the arguments.
local function made(fn)
  return function(b, a, out)
    local dtype = out[1].dtype
    return fn(b, b:operand(a.x, dtype), function(v) return b:constant(v, dtype) end, a)
  end
end

M.square = made(function(b, x) return b:emit("Mul", { x, x }) end)
M.expm1 = made(function(b, x, c) return b:emit("Sub", { b:emit("Exp", { x }), c(1) }) end)
M.log1p = made(function(b, x, c) return b:emit("Log", { b:emit("Add", { x, c(1) }) }) end)
M.log2 = made(function(b, x, c) return b:emit("Mul", { b:emit("Log", { x }), c(1 / math.log(2)) }) end)
M.log10 = made(function(b, x, c) return b:emit("Mul", { b:emit("Log", { x }), c(1 / math.log(10)) }) end)
M.rsqrt = made(function(b, x) return b:emit("Reciprocal", { b:emit("Sqrt", { x }) }) end)
M.exp2 = made(function(b, x, c) return b:emit("Pow", { c(2), x }) end)
M.erfc = made(function(b, x, c) return b:emit("Sub", { c(1), b:emit("Erf", { x }) }) end)
M.log_sigmoid = made(function(b, x) return b:emit("Neg", { b:emit("Softplus", { b:emit("Neg", { x }) }) }) end)
M.leaky_relu = made(function(b, x, _, a) return b:emit("LeakyRelu", { x }, { alpha = a.slope + 0.0 }) end)
M.elu = made(function(b, x, _, a) return b:emit("Elu", { x }, { alpha = a.alpha + 0.0 }) end)
M.gelu = made(function(b, x, _, a) return b:emit("Gelu", { x }, { approximate = a.approximate }) end)
M.silu = made(function(b, x) return b:emit("Mul", { x, b:emit("Sigmoid", { x }) }) end)
M.softplus = made(function(b, x, c, a)
  if a.beta == 1 then return b:emit("Softplus", { x }) end
  return b:emit("Div", { b:emit("Softplus", { b:emit("Mul", { x, c(a.beta) }) }), c(a.beta) })
end)
M.hardtanh = made(function(b, x, c, a) return b:emit("Clip", { x, c(a.min), c(a.max) }) end)
M.trunc = made(function(b, x)
  return b:emit("Mul", { b:emit("Sign", { x }), b:emit("Floor", { b:emit("Abs", { x }) }) })
end)

function M.isnan(b, a) return b:emit("IsNaN", { b:name(a.x) }) end

function M.isinf(b, a) return b:emit("IsInf", { b:name(a.x) }) end

function M.isfinite(b, a)
  local x = b:name(a.x)
  return b:emit("Not", { b:emit("Or", { b:emit("IsNaN", { x }), b:emit("IsInf", { x }) }) })
end

function M.logical_not(b, a) return b:emit("Not", { b:operand(a.x, "bool") }) end

--- What a product or convolution applies at its end; used by others too.
function M.activate(b, name, kind)
  if not kind or kind == "none" then return name end
  if kind == "relu" then return b:emit("Relu", { name }) end
  if kind == "sigmoid" then return b:emit("Sigmoid", { name }) end
  if kind == "silu" then return b:emit("Mul", { name, b:emit("Sigmoid", { name }) }) end
  if kind == "gelu" then return b:emit("Gelu", { name }, { approximate = "none" }) end
  return b:emit("Gelu", { name }, { approximate = "tanh" })
end

function M.glu(b, a, out)
  local x, gate
  if ty.is_tensor(a.gate) then
    x, gate = b:name(a.x), b:operand(a.gate, out[1].dtype)
  else
    x, gate = b:emit("Split", { b:name(a.x) }, { axis = -1, num_outputs = 2 }, 2)
  end
  return b:emit("Mul", { x, M.activate(b, gate, a.activation) })
end

-- ---- two operands ----

for op, node in pairs { add = "Add", sub = "Sub", mul = "Mul", div = "Div", pow = "Pow", maximum = "Max",
  minimum = "Min" } do
  M[op] = function(b, a, out)
    local dtype = out[1].dtype
    if dtype == "bool" then return nil, "of bool" end
    local y = b:operand(a.y, dtype)
    if a.alpha then y = b:emit("Mul", { y, b:constant(a.alpha, dtype) }) end -- of add and sub
    return b:emit(node, { b:operand(a.x, dtype), y })
  end
end

function M.fmod(b, a, out)
  return b:emit("Mod", { b:operand(a.x, out[1].dtype), b:operand(a.y, out[1].dtype) }, { fmod = 1 })
end

local function floor_of_quotient(b, x, y, dtype)
  if dtype:find "f%d" then return b:emit("Floor", { b:emit("Div", { x, y }) }) end
  local rest = b:emit("Mod", { x, y }) -- of the sign of y, so that what is left divides without rest
  return b:emit("Div", { b:emit("Sub", { x, rest }), y })
end

function M.floor_div(b, a, out)
  local dtype = out[1].dtype
  return floor_of_quotient(b, b:operand(a.x, dtype), b:operand(a.y, dtype), dtype)
end

function M.remainder(b, a, out)
  local dtype = out[1].dtype
  local x, y = b:operand(a.x, dtype), b:operand(a.y, dtype)
  if not dtype:find "f%d" then return b:emit("Mod", { x, y }) end
  return b:emit("Sub", { x, b:emit("Mul", { floor_of_quotient(b, x, y, dtype), y }) })
end

function M.logaddexp(b, a, out)
  local dtype = out[1].dtype
  local x, y = b:operand(a.x, dtype), b:operand(a.y, dtype)
  local gap = b:emit("Neg", { b:emit("Abs", { b:emit("Sub", { x, y }) }) })
  return b:emit("Add", { b:emit("Max", { x, y }), b:emit("Log", { b:emit("Add", { b:emit("Exp", { gap }),
    b:constant(1, dtype) }) }) })
end

-- The dtype in which two operands are compared.
local function common(x, y)
  if ty.is_tensor(x) and ty.is_tensor(y) then
    if x.dtype == y.dtype then return x.dtype end
    return (ty.zeros({ 1 }, { dtype = x.dtype }) + ty.zeros({ 1 }, { dtype = y.dtype })).dtype
  end
  local t, number = x, y
  if not ty.is_tensor(t) then t, number = y, x end
  if type(number) == "number" and math.type(number) == "float" and not t:is_floating_point() then return "f32" end
  return t.dtype
end

for op, node in pairs { eq = "Equal", lt = "Less", le = "LessOrEqual", gt = "Greater", ge = "GreaterOrEqual",
  ne = "Equal" } do
  M[op] = function(b, a)
    local dtype = common(a.x, a.y)
    if dtype == "bool" and node ~= "Equal" then dtype = "i32" end
    if dtype == "bool" and type(a.y) == "number" then dtype = "i32" end
    local y = b:emit(node, { b:operand(a.x, dtype), b:operand(a.y, dtype) })
    return op == "ne" and b:emit("Not", { y }) or y
  end
end

for op, node in pairs { logical_and = "And", logical_or = "Or", logical_xor = "Xor" } do
  M[op] = function(b, a)
    local function truth(v)
      if type(v) == "number" then return b:constant(v ~= 0, "bool") end
      return b:operand(v, "bool")
    end
    return b:emit(node, { truth(a.x), truth(a.y) })
  end
end

for op, node in pairs { bitwise_and = "BitwiseAnd", bitwise_or = "BitwiseOr", bitwise_xor = "BitwiseXor" } do
  M[op] = function(b, a, out)
    local dtype = out[1].dtype
    if dtype == "bool" then
      return b:emit((node:gsub("Bitwise", "")), { b:operand(a.x, dtype), b:operand(a.y, dtype) })
    end
    return b:emit(node, { b:operand(a.x, dtype), b:operand(a.y, dtype) })
  end
end

function M.where(b, a, out)
  local dtype = out[1].dtype
  return b:emit("Where", { b:operand(a.condition, "bool"), b:operand(a.x, dtype), b:operand(a.y, dtype) })
end

function M.masked_fill(b, a, out)
  return b:emit("Where", { b:operand(a.mask, "bool"), b:operand(a.value, out[1].dtype), b:name(a.x) })
end

function M.clamp(b, a, out)
  local dtype = out[1].dtype
  if ty.is_tensor(a.min) or ty.is_tensor(a.max) then
    local x = b:operand(a.x, dtype)
    if a.min then x = b:emit("Max", { x, b:operand(a.min, dtype) }) end
    return a.max and b:emit("Min", { x, b:operand(a.max, dtype) }) or x
  end
  return b:emit("Clip", { b:operand(a.x, dtype), a.min and b:constant(a.min, dtype) or "",
    a.max and b:constant(a.max, dtype) or nil })
end

function M.cast(b, a, out)
  if a.x.dtype == out[1].dtype then return b:name(a.x) end
  return b:cast(b:name(a.x), out[1].dtype)
end

for _, op in ipairs { "clone", "contiguous", "detach" } do
  M[op] = function(b, a) return b:name(a.x) end
end

-- Without training there is none.
function M.dropout(b, a)
  if a.training and a.p > 0 then return nil, "in training mode" end
  return b:name(a.x)
end

-- ---- reductions ----

local function dims_of(a)
  local dims = values.axes(a.dims, a.x.ndim)
  return dims
end

local function reduced(b, node, x, dims, keep)
  if #dims == 0 then return b:emit("Identity", { x }) end
  return b:emit(node, { x, b:constant(dims) }, { keepdims = keep and 1 or 0 })
end

for op, node in pairs { sum = "ReduceSum", mean = "ReduceMean", prod = "ReduceProd", max = "ReduceMax",
  min = "ReduceMin", logsumexp = "ReduceLogSumExp" } do
  M[op] = function(b, a, out)
    local dtype = out[1].dtype
    if dtype == "bool" then return nil, "of bool" end
    return reduced(b, node, b:operand(a.x, dtype), dims_of(a), a.keepdim)
  end
end

for op, node in pairs { any = "ReduceMax", all = "ReduceMin" } do
  M[op] = function(b, a)
    local x = b:cast(b:operand(a.x, "bool"), "i32")
    return b:cast(reduced(b, node, x, dims_of(a), a.keepdim), "bool")
  end
end

function M.norm(b, a, out)
  local node = a.p == 2 and "ReduceL2" or a.p == 1 and "ReduceL1"
  if not node then return nil, ("p = %g"):format(a.p) end
  return reduced(b, node, b:operand(a.x, out[1].dtype), dims_of(a), a.keepdim)
end

local function variance(b, a, dtype)
  local dims, count = dims_of(a), 1
  for _, dim in ipairs(dims) do count = count * a.x.shape[dim + 1] end
  local x = b:operand(a.x, dtype)
  local centred = b:emit("Sub", { x, reduced(b, "ReduceMean", x, dims, true) })
  local sum = reduced(b, "ReduceSumSquare", centred, dims, a.keepdim)
  return b:emit("Div", { sum, b:constant(math.max(0, count - a.correction), dtype) })
end

function M.var(b, a, out) return variance(b, a, out[1].dtype) end

function M.std(b, a, out) return b:emit("Sqrt", { variance(b, a, out[1].dtype) }) end

for op, node in pairs { argmax = "ArgMax", argmin = "ArgMin" } do
  M[op] = function(b, a, out)
    local x, dims = b:name(a.x), dims_of(a)
    if a.x.dtype == "bool" then x = b:cast(x, "i32") end
    if #dims ~= 1 then
      if #dims ~= a.x.ndim then return nil, "of several dimensions" end
      x = b:emit("Reshape", { x, b:constant { -1 } })
      local y = b:emit(node, { x }, { axis = 0, keepdims = 0 })
      return b:emit("Reshape", { y, b:constant(out[1].shape) })
    end
    return b:emit(node, { x }, { axis = dims[1], keepdims = a.keepdim and 1 or 0 })
  end
end

return M
