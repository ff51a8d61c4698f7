--- Operators of ONNX over windows: convolutions and pools in one to three dimensions.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"
local copies, product = values.copies, values.product

local M = {}

local function by_rank(...)
  local fns = { ... }
  return function(rank)
    return fns[rank] or error(("expected 1 to 3 dimensions of positions, got %d"):format(rank), 0)
  end
end
local conv = by_rank(ty.conv1d, ty.conv2d, ty.conv3d)
local conv_transpose = by_rank(ty.conv_transpose1d, ty.conv_transpose2d, ty.conv_transpose3d)
local max_pool = by_rank(ty.max_pool1d, ty.max_pool2d, ty.max_pool3d)
local avg_pool = by_rank(ty.avg_pool1d, ty.avg_pool2d, ty.avg_pool3d)

-- What a window over positions needs to know: kernel, strides, dilations, pads before and after.
local function window(a, size, kernel)
  local n = #kernel
  local w = { n = n, kernel = kernel, stride = a.strides or copies(1, n), dilation = a.dilations or copies(1, n),
    before = {}, after = {} }
  local auto = a.auto_pad or "NOTSET"
  for i = 1, n do
    local reach = (kernel[i] - 1) * w.dilation[i] + 1
    if auto == "SAME_UPPER" or auto == "SAME_LOWER" then
      local out = (size[i] + w.stride[i] - 1) // w.stride[i]
      local total = math.max(0, (out - 1) * w.stride[i] + reach - size[i])
      local less = total // 2
      w.before[i] = auto == "SAME_UPPER" and less or total - less
      w.after[i] = total - w.before[i]
    elseif auto == "VALID" then
      w.before[i], w.after[i] = 0, 0
    else
      w.before[i], w.after[i] = a.pads and a.pads[i] or 0, a.pads and a.pads[n + i] or 0
    end
  end
  return w
end

local function spatial(x) return table.move(x.shape, 3, x.ndim, 1, {}) end

local function even(w)
  for i = 1, w.n do
    if w.before[i] ~= w.after[i] or w.before[i] < 0 then return false end
  end
  return true
end

-- x with what the window has before and after it.
local function padded(x, w, value)
  local list, any = {}, false
  for i = w.n, 1, -1 do
    list[#list + 1], list[#list + 2] = w.before[i], w.after[i]
    any = any or w.before[i] ~= 0 or w.after[i] ~= 0
  end
  return any and x:pad(list, "constant", value) or x
end

function M.Conv(x, a)
  local size = spatial(x[1])
  local w = window(a, size, spatial(x[2]))
  local pad = w.before
  local t = x[1]
  if not even(w) then t, pad = padded(t, w, 0), copies(0, w.n) end
  return conv(w.n)(t, x[2], x[3], w.stride, pad, w.dilation, a.group or 1)
end

function M.ConvTranspose(x, a)
  local size, kernel = spatial(x[1]), spatial(x[2])
  local n = #kernel
  local stride, dilation = a.strides or copies(1, n), a.dilations or copies(1, n)
  local extra = a.output_padding or copies(0, n)
  local w = { n = n, before = {}, after = {} }
  local same = a.auto_pad == "SAME_UPPER" or a.auto_pad == "SAME_LOWER"
  for i = 1, n do
    local full = stride[i] * (size[i] - 1) + (kernel[i] - 1) * dilation[i] + 1
    local want = a.output_shape and a.output_shape[#a.output_shape - n + i] or same and size[i] * stride[i]
    if want then
      local total = full + extra[i] - want
      local less = total // 2
      if a.auto_pad == "SAME_UPPER" then
        w.before[i], w.after[i] = less, total - less
      else
        w.before[i], w.after[i] = total - less, less
      end
    else
      w.before[i], w.after[i] = a.pads and a.pads[i] or 0, a.pads and a.pads[n + i] or 0
    end
  end
  local groups = a.group or 1
  local native = even(w)
  for i = 1, n do native = native and extra[i] < math.max(stride[i], dilation[i]) end
  if native then
    return conv_transpose(n)(x[1], x[2], x[3], stride, w.before, extra, groups, dilation)
  end
  local y = conv_transpose(n)(x[1], x[2], nil, stride, copies(0, n), copies(0, n), groups, dilation)
  for i = 1, n do w.before[i], w.after[i] = -w.before[i], extra[i] - w.after[i] end
  for i = 1, n do
    local from, to = math.max(0, -w.before[i]), y.shape[i + 2] + math.min(0, w.after[i])
    if from > 0 or to < y.shape[i + 2] then y = y:slice(i + 1, from, to) end
    w.before[i], w.after[i] = math.max(0, w.before[i]), math.max(0, w.after[i])
  end
  y = padded(y, w, 0)
  if x[3] then y = y + x[3]:reshape(-1, table.unpack(copies(1, n))) end
  return y
end

-- ---- pools ----

-- Makes `after` so large that windows of ceil_mode lie inside; how much more that is than was asked for.
local function complete(w, size, ceil)
  local more, any = {}, false
  for i = 1, w.n do
    local reach = (w.kernel[i] - 1) * w.dilation[i] + 1
    local span = size[i] + w.before[i] + w.after[i] - reach
    local out = span // w.stride[i] + 1
    if ceil then
      out = -(-span // w.stride[i]) + 1
      if (out - 1) * w.stride[i] >= size[i] + w.before[i] then out = out - 1 end -- it would begin behind x
    end
    more[i] = math.max(0, (out - 1) * w.stride[i] + reach - (size[i] + w.before[i] + w.after[i]))
    w.after[i] = w.after[i] + more[i]
    any = any or more[i] > 0
  end
  return more, any
end

local function small_pads(w)
  for i = 1, w.n do
    if w.before[i] * 2 > w.kernel[i] then return false end
  end
  return true
end

-- Positions in padded planes as those in the whole input, in the order of memory or with rows and columns exchanged.
local function whole_positions(index, w, shape, planes, by_columns)
  local at, rest = {}, index
  for i = w.n, 1, -1 do
    at[i] = rest:remainder(planes[i]) - w.before[i]
    rest = rest:floor_div(planes[i])
  end
  local flat
  for k = 1, w.n do
    local i = by_columns and w.n + 1 - k or k
    flat = flat and flat * shape[i + 2] + at[i] or at[i]
  end
  local n, c = shape[1], shape[2]
  local plane = ty.arange(n * c, { device = index.device }):reshape(n, c, table.unpack(copies(1, w.n)))
  return flat + plane * product(shape, 3)
end

function M.MaxPool(x, a, c)
  local t, shape = x[1], x[1].shape
  local w = window(a, spatial(t), a.kernel_shape)
  local _, more = complete(w, spatial(t), a.ceil_mode == 1)
  local whole = not t:is_floating_point()
  if whole then t = t:to "f32" end
  local direct = even(w) and not more and small_pads(w) and c.outputs < 2
  local pad = direct and w.before or copies(0, w.n)
  local wide = direct and t or padded(t, w, -math.huge)
  local y, index = max_pool(w.n)(wide, w.kernel, w.stride, pad, w.dilation)
  if whole then y = y:to(x[1].dtype) end
  if c.outputs < 2 then return y end
  return y, whole_positions(index, w, shape, spatial(wide), a.storage_order == 1)
end

-- Sums over windows, as a convolution of each plane with ones.
local function sums(t, w)
  local shape = t.shape
  local planes = t:reshape(shape[1] * shape[2], 1, table.unpack(shape, 3))
  local ones = ty.ones({ 1, 1, table.unpack(w.kernel) }, { dtype = t.dtype, device = t.device })
  local y = conv(w.n)(planes, ones, nil, w.stride, copies(0, w.n), w.dilation)
  return y:reshape(shape[1], shape[2], table.unpack(y.shape, 3))
end

function M.AveragePool(x, a)
  local t = x[1]
  local w = window(a, spatial(t), a.kernel_shape)
  local more, any = complete(w, spatial(t), a.ceil_mode == 1)
  local dilated = product(w.dilation) ~= 1
  if even(w) and not any and not dilated and small_pads(w) then
    return avg_pool(w.n)(t, w.kernel, w.stride, w.before, a.count_include_pad == 1)
  end
  local one = ty.ones({ 1, 1, table.unpack(spatial(t)) }, { dtype = t.dtype, device = t.device })
  local counted
  if a.count_include_pad == 1 then -- but not what ceil_mode has added
    for i = 1, w.n do w.after[i] = w.after[i] - more[i] end
    one = padded(one, w, 1)
    local rest = { n = w.n, before = copies(0, w.n), after = more }
    counted = padded(one, rest, 0)
    for i = 1, w.n do w.after[i] = w.after[i] + more[i] end
  else
    counted = padded(one, w, 0)
  end
  return sums(padded(t, w, 0), w) / sums(counted, w)
end

function M.LpPool(x, a)
  local w = window(a, spatial(x[1]), a.kernel_shape)
  complete(w, spatial(x[1]), a.ceil_mode == 1)
  local p = a.p or 2
  return sums(padded(x[1]:abs():pow(p), w, 0), w):pow(1 / p)
end

local function positions_of(x)
  local dims = {}
  for i = 2, x.ndim - 1 do dims[#dims + 1] = i end
  return dims
end

function M.GlobalAveragePool(x) return x[1]:mean(positions_of(x[1]), true) end

function M.GlobalMaxPool(x) return x[1]:max(positions_of(x[1]), true) end

function M.GlobalLpPool(x, a)
  local p = a.p or 2
  return x[1]:abs():pow(p):sum(positions_of(x[1]), true):pow(1 / p)
end

function M.MaxUnpool(x, a)
  local t, index = x[1], x[2]
  local shape, n = t.shape, #a.kernel_shape
  local stride = a.strides or copies(1, n)
  local inner = { shape[1], shape[2] }
  for i = 1, n do
    local pad = a.pads and a.pads[i] + a.pads[n + i] or 0
    inner[i + 2] = (shape[i + 2] - 1) * stride[i] - pad + a.kernel_shape[i]
  end
  local want = x[3] and values.ints(x[3])
  local flat = ty.zeros(product(inner), { dtype = t.dtype, device = t.device })
  local y = flat:scatter(0, index:reshape(-1), t:reshape(-1)):reshape(inner)
  if not want then return y end
  local list = {}
  for i = #want, 3, -1 do list[#list + 1], list[#list + 2] = 0, want[i] - inner[i] end
  return y:pad(list)
end

-- ---- others ----

local function by_channel(w, ndim) return w:reshape(-1, table.unpack(copies(1, ndim - 2))) end

function M.LRN(x, a)
  local t, size = x[1], a.size
  local before = (size - 1) // 2
  local list = copies(0, 2 * (t.ndim - 1))
  list[#list - 1], list[#list] = before, size - 1 - before
  local square = t:square():pad(list)
  local sum
  for i = 0, size - 1 do
    local one = square:narrow(1, i, t.shape[2])
    sum = sum and sum + one or one
  end
  return t / ((sum * ((a.alpha or 1e-4) / size) + (a.bias or 1)):pow(a.beta or 0.75))
end

function M.BatchNormalization(x, a, c)
  local t, eps, momentum = x[1], a.epsilon or 1e-5, a.momentum or 0.9
  local given = a.training_mode == 1 and c.opset >= 14
  if not given then
    if c.training and c.module_training then
      return ty.batch_norm(t, x[4], x[5], x[2], x[3], true, 1 - momentum, eps)
    end
    return ty.batch_norm(t, x[4], x[5], x[2], x[3], false, 0, eps)
  end
  local dims = { 0 }
  for i = 2, t.ndim - 1 do dims[#dims + 1] = i end
  local mean, var = t:mean(dims), t:var(dims, 0)
  local y = (t - by_channel(mean, t.ndim)) * (by_channel(var, t.ndim) + eps):rsqrt() * by_channel(x[2], t.ndim)
    + by_channel(x[3], t.ndim)
  return y, x[4] * momentum + mean * (1 - momentum), x[5] * momentum + var * (1 - momentum)
end

function M.GridSample(x, a)
  local modes = { linear = "bilinear", cubic = "bicubic", bilinear = "bilinear", bicubic = "bicubic",
    nearest = "nearest" }
  local mode = modes[a.mode or "linear"] or error(("mode %s is not known"):format(tostring(a.mode)), 0)
  return ty.grid_sample(x[1], x[2], mode, a.padding_mode or "zeros", a.align_corners == 1)
end

function M.AffineGrid(x, a) return ty.affine_grid(x[1], values.ints(x[2]), a.align_corners == 1) end

-- Columns laid where they came from: a transposed convolution whose kernels have a single 1.
function M.Col2Im(x, a)
  local size, block = values.ints(x[2]), values.ints(x[3])
  local n, each, shape = #size, product(block), x[1].shape
  local stride, dilation, pads = a.strides or copies(1, n), a.dilations or copies(1, n), a.pads or copies(0, 2 * n)
  local places, list = {}, {}
  for i = 1, n do
    local whole = size[i] + pads[i] + pads[n + i]
    places[i] = (whole - (block[i] - 1) * dilation[i] - 1) // stride[i] + 1
    list[i] = whole - ((places[i] - 1) * stride[i] + (block[i] - 1) * dilation[i] + 1)
  end
  local channels = shape[2] // each
  local one = ty.eye(each, each, { dtype = x[1].dtype, device = x[1].device }):reshape(each, 1, table.unpack(block))
  local weight = one:tile(channels, 1, table.unpack(copies(1, n)))
  local y = conv_transpose(n)(x[1]:reshape(shape[1], shape[2], table.unpack(places)), weight, nil, stride,
    copies(0, n), copies(0, n), channels, dilation)
  local w = { n = n, before = copies(0, n), after = list }
  y = padded(y, w, 0)
  for i = 1, n do y = y:narrow(i + 1, pads[i], size[i]) end
  return y
end

-- ---- losses ----

-- log_probs [n, c, ...] and target [n, ...].
local function nll(x, target, weight, a)
  local seen = a.ignore_index and target:ne(a.ignore_index) or target:eq(target)
  local index = ty.where(seen, target, ty.zeros_like(target)):to "i64"
  local loss = -x:gather(1, index:unsqueeze(1)):squeeze(1)
  local w = seen:to(x.dtype)
  if weight then w = w * weight:index_select(0, index:reshape(-1)):reshape(index.shape) end
  loss = ty.where(seen, loss, ty.zeros_like(loss)) * w
  local how = a.reduction or "mean"
  if how == "none" then return loss end
  if how == "sum" then return loss:sum() end
  return loss:sum() / (weight and w:sum() or a.ignore_index and w:sum() or loss:numel())
end

function M.NegativeLogLikelihoodLoss(x, a) return (nll(x[1], x[2], x[3], a)) end

function M.SoftmaxCrossEntropyLoss(x, a)
  local logs = x[1]:log_softmax(1)
  return (nll(logs, x[2], x[3], a)), logs
end

return M
