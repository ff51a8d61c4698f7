--- Products, convolutions, pools, normalisations, attention and recurrent layers as nodes of ONNX.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"
local activate = require("tycho.hub.onnx.written.elementwise").activate
local axis, copies = values.axis, values.copies

local M = {}

function M.softmax(b, a, out)
  return b:emit("Softmax", { b:operand(a.x, out[1].dtype) }, { axis = axis(a.dim, a.x.ndim) })
end

function M.log_softmax(b, a, out)
  return b:emit("LogSoftmax", { b:operand(a.x, out[1].dtype) }, { axis = axis(a.dim, a.x.ndim) })
end

-- ---- products ----

function M.matmul(b, a, out)
  return b:emit("MatMul", { b:operand(a.x, out[1].dtype), b:operand(a.y, out[1].dtype) })
end

function M.linear(b, a, out)
  if a.weight:nbytes() < a.weight:numel() then return nil, "with a block-quantized weight" end
  local dtype = out[1].dtype
  local y
  if a.x.ndim == 2 then
    y = b:emit("Gemm", { b:operand(a.x, dtype), b:operand(a.weight, dtype), a.bias and b:operand(a.bias, dtype) },
      { transB = 1 })
  else
    local turned = b:emit("Transpose", { b:operand(a.weight, dtype) }, { perm = { 1, 0 } })
    y = b:emit("MatMul", { b:operand(a.x, dtype), turned })
    if a.bias then y = b:emit("Add", { y, b:operand(a.bias, dtype) }) end
  end
  if a.residual then y = b:emit("Add", { y, b:operand(a.residual, dtype) }) end
  return activate(b, y, a.activation)
end

function M.einsum(b, a, out)
  local names = {}
  for i, t in ipairs(a.xs) do names[i] = b:operand(t, out[1].dtype) end
  return b:emit("Einsum", names, { equation = a.equation })
end

-- ---- windows ----

local function spread(list, n)
  if #list == n then return list end
  return copies(list[1], n)
end

local function twice(pads)
  local all = { table.unpack(pads) }
  for i = 1, #pads do all[#pads + i] = pads[i] end
  return all
end

for n = 1, 3 do
  M[("conv%dd"):format(n)] = function(b, a, out)
    local dtype = out[1].dtype
    local y = b:emit("Conv", { b:operand(a.x, dtype), b:operand(a.weight, dtype), a.bias and b:operand(a.bias, dtype) },
      { strides = spread(a.stride, n), pads = twice(spread(a.padding, n)), dilations = spread(a.dilation, n),
        group = a.groups, kernel_shape = table.move(a.weight.shape, 3, n + 2, 1, {}) })
    if a.residual then y = b:emit("Add", { y, b:operand(a.residual, dtype) }) end
    return activate(b, y, a.activation)
  end
  M[("conv_transpose%dd"):format(n)] = function(b, a, out)
    local dtype = out[1].dtype
    return b:emit("ConvTranspose", { b:operand(a.x, dtype), b:operand(a.weight, dtype),
      a.bias and b:operand(a.bias, dtype) }, { strides = spread(a.stride, n), pads = twice(spread(a.padding, n)),
      output_padding = spread(a.output_padding, n), dilations = spread(a.dilation, n), group = a.groups,
      kernel_shape = table.move(a.weight.shape, 3, n + 2, 1, {}) })
  end
  M[("max_pool%dd"):format(n)] = function(b, a)
    local kernel = spread(a.kernel, n)
    return b:emit("MaxPool", { b:name(a.x) }, { kernel_shape = kernel, strides = #a.stride > 0 and spread(a.stride, n)
      or kernel, pads = twice(spread(a.padding, n)), dilations = spread(a.dilation, n),
      ceil_mode = a.ceil_mode and 1 or 0 })
  end
  M[("avg_pool%dd"):format(n)] = function(b, a)
    if a.divisor and a.divisor ~= 0 then return nil, "with a divisor" end
    local kernel = spread(a.kernel, n)
    return b:emit("AveragePool", { b:name(a.x) }, { kernel_shape = kernel, strides = #a.stride > 0
      and spread(a.stride, n) or kernel, pads = twice(spread(a.padding, n)), ceil_mode = a.ceil_mode and 1 or 0,
      count_include_pad = a.count_include_pad and 1 or 0 })
  end
  for kind, node in pairs { avg = "AveragePool", max = "MaxPool" } do
    M[("adaptive_%s_pool%dd"):format(kind, n)] = function(b, a, out)
      local kernel, whole = {}, true
      for i = 1, n do
        local size, wanted = a.x.shape[i + 2], out[1].shape[i + 2]
        if size % wanted ~= 0 then return nil, ("of %d positions to %d"):format(size, wanted) end
        kernel[i], whole = size // wanted, whole and wanted == 1
      end
      if whole then return b:emit("Global" .. node, { b:name(a.x) }) end
      return b:emit(node, { b:name(a.x) }, { kernel_shape = kernel, strides = kernel })
    end
  end
end

function M.fold(b, a)
  local function two(list) return spread(list, 2) end
  return b:emit("Col2Im", { b:name(a.x), b:constant(two(a.size)), b:constant(two(a.kernel)) },
    { dilations = two(a.dilation), pads = twice(two(a.padding)), strides = two(a.stride) })
end

local resize_modes = {
  nearest = { mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor" },
  ["nearest-exact"] = { mode = "nearest", coordinate_transformation_mode = "half_pixel",
    nearest_mode = "round_prefer_ceil" },
  linear = { mode = "linear" }, bilinear = { mode = "linear" }, trilinear = { mode = "linear" },
  bicubic = { mode = "cubic", cubic_coeff_a = -0.75 },
}

function M.interpolate(b, a, out)
  local how, attributes = resize_modes[a.mode], {}
  if not how then return nil, a.mode end
  for key, value in pairs(how) do attributes[key] = value end
  if not attributes.coordinate_transformation_mode then
    attributes.coordinate_transformation_mode = a.align_corners and "align_corners" or "half_pixel"
  end
  if a.antialias then attributes.antialias = 1 end
  local shape = out[1].shape
  for i = 3, #shape do
    if a.scale ~= 0 and math.abs(shape[i] - a.x.shape[i] * a.scale) > 1e-6 then return nil, "by an uneven scale" end
  end
  return b:emit("Resize", { b:name(a.x), "", "", b:constant(shape) }, attributes)
end

function M.grid_sample(b, a)
  local modes = { bilinear = "linear", bicubic = "cubic", nearest = "nearest" }
  return b:emit("GridSample", { b:name(a.x), b:name(a.grid) }, { mode = modes[a.mode], padding_mode = a.padding,
    align_corners = a.align_corners and 1 or 0 })
end

-- ---- normalisations ----

local function filled(b, count, value, dtype)
  return b:name(ty.full({ count }, value, { dtype = dtype }))
end

local function layer_norm(b, x, shape, weight, bias, eps, dtype)
  if not weight then weight = ty.ones(shape, { dtype = dtype }) end
  return b:emit("LayerNormalization", { x, b:operand(weight, dtype), bias and b:operand(bias, dtype) },
    { axis = -#shape, epsilon = eps + 0.0 })
end

local function rms_norm(b, x, count, weight, eps, dtype)
  local dims = {}
  for i = 1, count do dims[i] = i - 1 - count end
  local wide = x
  local half = dtype == "f16" or dtype == "bf16"
  if half then wide = b:cast(x, "f32") end
  local inner = half and "f32" or dtype
  local mean = b:emit("ReduceMean", { b:emit("Mul", { wide, wide }), b:constant(dims) }, { keepdims = 1 })
  local root = b:emit("Sqrt", { b:emit("Add", { mean, b:constant(eps, inner) }) })
  local y = b:emit("Div", { wide, root })
  if half then y = b:cast(y, dtype) end
  return weight and b:emit("Mul", { y, b:operand(weight, dtype) }) or y
end

local function shape_of(a)
  return #a.normalized_shape > 0 and a.normalized_shape or { a.x.shape[a.x.ndim] }
end

function M.layer_norm(b, a, out)
  return layer_norm(b, b:name(a.x), shape_of(a), a.weight, a.bias, a.eps, out[1].dtype)
end

function M.rms_norm(b, a, out) return rms_norm(b, b:name(a.x), #shape_of(a), a.weight, a.eps, out[1].dtype) end

local function added(b, a, out)
  if a.training and a.p > 0 then return nil end
  return b:emit("Add", { b:name(a.x), b:operand(a.residual, out[1].dtype) })
end

function M.add_layer_norm(b, a, out)
  local sum = added(b, a, out)
  if not sum then return nil, "with dropout" end
  return sum, layer_norm(b, sum, { a.x.shape[a.x.ndim] }, a.weight, a.bias, a.eps, out[1].dtype)
end

function M.add_rms_norm(b, a, out)
  local sum = added(b, a, out)
  if not sum then return nil, "with dropout" end
  return sum, rms_norm(b, sum, 1, a.weight, a.eps, out[1].dtype)
end

function M.group_norm(b, a, out)
  local shape, dtype = a.x.shape, out[1].dtype
  local grouped = b:emit("Reshape", { b:name(a.x), b:constant { shape[1], a.groups, -1 } })
  local y = b:emit("InstanceNormalization", { grouped, filled(b, a.groups, 1, dtype), filled(b, a.groups, 0, dtype) },
    { epsilon = a.eps + 0.0 })
  y = b:emit("Reshape", { y, b:constant(shape) })
  local channels = { shape[2], table.unpack(copies(1, #shape - 2)) }
  if a.weight then
    y = b:emit("Mul", { y, b:emit("Reshape", { b:operand(a.weight, dtype), b:constant(channels) }) })
  end
  if a.bias then y = b:emit("Add", { y, b:emit("Reshape", { b:operand(a.bias, dtype), b:constant(channels) }) }) end
  return activate(b, y, a.activation)
end

function M.batch_norm(b, a, out)
  if a.training or not a.running_mean then return nil, "by the batch's statistics" end
  local count, dtype = a.x.shape[2], out[1].dtype
  return b:emit("BatchNormalization", { b:name(a.x), a.weight and b:operand(a.weight, dtype)
    or filled(b, count, 1, dtype), a.bias and b:operand(a.bias, dtype) or filled(b, count, 0, dtype),
    b:operand(a.running_mean, dtype), b:operand(a.running_var, dtype) }, { epsilon = a.eps + 0.0 })
end

-- ---- attention ----

-- Which keys each query sees, as numbers to be added, or nil where it sees all. As src/ops/attention.c has it.
local function span(a)
  local t, s = a.q.shape[3], a.k.shape[3]
  if not a.causal and a.window < 0 then return nil end
  local shift = a.corner == "upper_left" and 0 or s - t
  local at = ty.arange(t):unsqueeze(1) + shift
  local j = ty.arange(s):unsqueeze(0)
  local seen = j:ge(0):logical_or(at:ge(0))
  if a.window >= 0 then
    seen = (at - j):le(a.window)
    if not a.causal then seen = seen:logical_and((j - at):le(a.window)) end
    if a.sinks > 0 then seen = seen:logical_or(j:lt(a.sinks)) end
  end
  if a.causal then seen = seen:logical_and(j:le(at)) end
  return seen
end

local function repeated(b, t, heads, dtype)
  local n, h, s, d = table.unpack(t.shape)
  local name = b:operand(t, dtype)
  if h == heads then return name end
  name = b:emit("Reshape", { name, b:constant { n, h, 1, s, d } })
  name = b:emit("Expand", { name, b:constant { n, h, heads // h, s, d } })
  return b:emit("Reshape", { name, b:constant { n, heads, s, d } })
end

function M.scaled_dot_product_attention(b, a, out)
  if a.cu_seqlens then return nil, "of packed sequences" end
  local dtype, heads, d = out[1].dtype, a.q.shape[2], a.q.shape[4]
  local scale = a.scale ~= 0 and a.scale or 1 / math.sqrt(d)
  local k, v = repeated(b, a.k, heads, dtype), repeated(b, a.v, heads, dtype)
  local q = b:emit("Mul", { b:name(a.q), b:constant(scale, dtype) })
  local scores = b:emit("MatMul", { q, b:emit("Transpose", { k }, { perm = { 0, 1, 3, 2 } }) })
  if a.softcap ~= 0 then
    local cap = b:constant(a.softcap, dtype)
    scores = b:emit("Mul", { b:emit("Tanh", { b:emit("Div", { scores, cap }) }), cap })
  end
  local low = b:constant(dtype == "f16" and -65504 or -3e38, dtype)
  if a.mask then
    if a.mask.dtype == "bool" then
      scores = b:emit("Where", { b:name(a.mask), scores, low })
    else
      scores = b:emit("Add", { scores, b:operand(a.mask, dtype) })
    end
  end
  local seen = span(a)
  if seen then scores = b:emit("Where", { b:name(seen), scores, low }) end
  return b:emit("MatMul", { b:emit("Softmax", { scores }, { axis = -1 }), v })
end

local function cut(b, x, from, to)
  return b:emit("Slice", { x, b:constant { from }, b:constant { to }, b:constant { -1 } })
end

function M.rotary(b, a, out)
  local dtype, shape = out[1].dtype, a.x.shape
  local width, pairs_ = shape[#shape], a.cos.shape[a.cos.ndim]
  local x, cos, sin = b:name(a.x), b:operand(a.cos, dtype), b:operand(a.sin, dtype)
  local p, q
  if a.interleaved then
    local two = table.move(shape, 1, #shape - 1, 1, {})
    two[#shape], two[#shape + 1] = pairs_, 2
    local turned = b:emit("Reshape", { 2 * pairs_ < width and cut(b, x, 0, 2 * pairs_) or x, b:constant(two) })
    p, q = b:emit("Gather", { turned, b:constant(0) }, { axis = -1 }), b:emit("Gather", { turned, b:constant(1) },
      { axis = -1 })
  else
    p, q = cut(b, x, 0, pairs_), cut(b, x, pairs_, 2 * pairs_)
  end
  local left = b:emit("Sub", { b:emit("Mul", { p, cos }), b:emit("Mul", { q, sin }) })
  local right = b:emit("Add", { b:emit("Mul", { p, sin }), b:emit("Mul", { q, cos }) })
  local parts
  if a.interleaved then
    local wide = table.move(shape, 1, #shape - 1, 1, {})
    wide[#shape], wide[#shape + 1] = pairs_, 1
    local both = b:emit("Concat", { b:emit("Reshape", { left, b:constant(wide) }),
      b:emit("Reshape", { right, b:constant(wide) }) }, { axis = -1 })
    wide[#shape], wide[#shape + 1] = 2 * pairs_, nil
    parts = { b:emit("Reshape", { both, b:constant(wide) }) }
  else
    parts = { left, right }
  end
  if 2 * pairs_ < width then parts[#parts + 1] = cut(b, x, 2 * pairs_, width) end
  return #parts > 1 and b:emit("Concat", parts, { axis = -1 }) or parts[1]
end

-- ---- recurrent layers ----

-- Gates in ONNX's order, of ours.
local orders = { lstm = { 1, 4, 2, 3 }, gru = { 2, 1, 3 } }

-- The inputs' part of the gates is there already: the node's own product is with the identity.
function M.recurrence(b, a, out)
  local order, dtype = orders[a.cell], out[1].dtype
  if not order or a.weight.shape[1] ~= 1 then return nil, ("cell %s of %d heads"):format(a.cell, a.weight.shape[1]) end
  local gates, d = #order, a.weight.shape[3]
  local batch = a.x.shape[2]
  local rows = {}
  for i, gate in ipairs(order) do
    for k = 0, d - 1 do rows[(i - 1) * d + k + 1] = (gate - 1) * d + k end
  end
  local pick = b:constant(rows)
  local identity = ty.eye(gates * d, gates * d, { dtype = dtype }):index_select(0, values.i64(rows)):unsqueeze(0)
  local recurrent = b:emit("Gather", { b:operand(a.weight, dtype), pick }, { axis = 1 })
  local bias = ""
  if a.bias then
    local own = b:emit("Gather", { b:operand(a.bias, dtype), pick }, { axis = 0 })
    bias = b:emit("Reshape", { b:emit("Concat", { filled(b, gates * d, 0, dtype), own }, { axis = 0 }),
      b:constant { 1, 2 * gates * d } })
  end
  local inputs = { b:operand(a.x, dtype), b:name(identity), recurrent, bias, "" }
  if a.state then
    local state = b:operand(a.state, dtype) -- [n, b, d]
    for i = 1, a.state.shape[1] do
      inputs[5 + i] = b:emit("Slice", { state, b:constant { i - 1 }, b:constant { i }, b:constant { 0 } })
    end
  end
  local lstm = a.cell == "lstm"
  local y, h, c = b:emit(lstm and "LSTM" or "GRU", inputs, { hidden_size = d,
    linear_before_reset = not lstm and 1 or nil }, lstm and 3 or 2)
  y = b:emit("Reshape", { y, b:constant { a.x.shape[1], batch, d } })
  return y, lstm and b:emit("Concat", { h, c }, { axis = 0 }) or h
end

return M
