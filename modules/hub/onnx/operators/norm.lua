--- Normalisations of ONNX, dropout, and transforms to frequencies.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"
local axis = values.axis

local M = {}

local function same_shape(t, shape)
  if t.ndim ~= #shape then return false end
  for i, size in ipairs(shape) do
    if t.shape[i] ~= size then return false end
  end
  return true
end

function M.LayerNormalization(x, a, c)
  local t, eps = x[1], a.epsilon or 1e-5
  local dim = axis(a.axis or -1, t.ndim)
  local shape = table.move(t.shape, dim + 1, t.ndim, 1, {})
  local fits = same_shape(x[2], shape) and (not x[3] or same_shape(x[3], shape))
  local y
  if fits and x[2].dtype == t.dtype then
    y = ty.layer_norm(t, shape, x[2], x[3], eps)
  else
    y = ty.layer_norm(t, shape, nil, nil, eps) * x[2]
    if x[3] then y = y + x[3] end
  end
  if c.outputs < 2 then return y end
  local dims = {}
  for i = dim, t.ndim - 1 do dims[#dims + 1] = i end
  local wide = t:to "f32"
  return y, wide:mean(dims, true), (wide:var(dims, 0, true) + eps):rsqrt()
end

function M.RMSNormalization(x, a)
  local t = x[1]
  local dim = axis(a.axis or -1, t.ndim)
  local shape = table.move(t.shape, dim + 1, t.ndim, 1, {})
  if same_shape(x[2], shape) then return ty.rms_norm(t, shape, x[2], a.epsilon or 1e-5) end
  return ty.rms_norm(t, shape, nil, a.epsilon or 1e-5) * x[2]
end

function M.InstanceNormalization(x, a)
  return ty.group_norm(x[1], x[1].shape[2], x[2], x[3], a.epsilon or 1e-5)
end

function M.GroupNormalization(x, a, c)
  local t, groups, weight, bias = x[1], a.num_groups, x[2], x[3]
  local channels = t.shape[2]
  if c.opset < 21 and weight:numel() == groups and groups ~= channels then -- one number for each group
    weight = weight:reshape(groups, 1):expand(groups, channels // groups):reshape(channels)
    bias = bias:reshape(groups, 1):expand(groups, channels // groups):reshape(channels)
  end
  return ty.group_norm(t, groups, weight, bias, a.epsilon or 1e-5)
end

function M.LpNormalization(x, a)
  local dim = axis(a.axis or -1, x[1].ndim)
  local p = a.p or 2
  local norm = p == 1 and x[1]:abs():sum(dim, true) or x[1]:square():sum(dim, true):sqrt()
  return ty.where(norm:eq(0), ty.zeros_like(x[1]), x[1] / ty.where(norm:eq(0), ty.ones_like(norm), norm))
end

function M.MeanVarianceNormalization(x, a)
  local dims = values.axes(a.axes or { 0, 2, 3 }, x[1].ndim)
  local centred = x[1] - x[1]:mean(dims, true)
  return centred / (centred:square():mean(dims, true):sqrt() + 1e-9)
end

-- Nothing where the model is not in training mode, and then what the file says.
function M.Dropout(x, a, c)
  local p, on = a.ratio or 0.5, c.module_training
  if c.opset >= 12 then
    p = x[2] and values.scalar(x[2]) or 0.5
    on = on or x[3] and values.scalar(x[3]) == true
  end
  if not on or p == 0 then
    return x[1], c.outputs > 1 and ty.ones(x[1].shape, { dtype = "bool", device = x[1].device }) or nil
  end
  if c.outputs < 2 then return ty.dropout(x[1], p, true) end
  local kept = ty.full_like(x[1], 1 - p):bernoulli()
  return x[1] * kept / (1 - p), kept:ne(0)
end

-- ---- frequencies ----

-- x [..., t] real or [..., t, 2] complex along `dim`, as complex pairs.
local function transform(t, dim, inverse, onesided, n)
  local real = t.shape[t.ndim] == 1
  if real then
    local x = t:squeeze(t.ndim - 1)
    if onesided and not inverse then return ty.rfft(x, n or -1, dim) end
    t = ty.complex(x)
  end
  if inverse and onesided then return ty.irfft(t, n or -1, dim):unsqueeze(-1) end
  local y = (inverse and ty.ifft or ty.fft)(t, n or -1, dim)
  if onesided then y = y:slice(dim, 0, y.shape[dim + 1] // 2 + 1) end
  return y
end

function M.DFT(x, a, c)
  local n = x[2] and values.scalar(x[2])
  local dim = c.opset >= 20 and (x[3] and values.scalar(x[3]) or -2) or a.axis or 1
  return transform(x[1], axis(dim, x[1].ndim), a.inverse == 1, a.onesided == 1, n)
end

function M.STFT(x, a)
  local signal, hop, window = x[1], values.scalar(x[2]), x[3]
  if signal.ndim == 2 then signal = signal:unsqueeze(2) end
  local length = x[4] and values.scalar(x[4]) or window.shape[1]
  local count = (signal.shape[2] - length) // hop + 1
  local frames = {}
  for i = 0, count - 1 do frames[i + 1] = signal:narrow(1, i * hop, length) end
  local t = ty.stack(frames, 1) -- [batch, frames, length, 1 or 2]
  if window then t = t * window:reshape(1, 1, -1, 1) end
  return transform(t, 2, false, a.onesided ~= 0 and t.shape[4] == 1)
end

local function window_of(fn)
  return function(x, a)
    local n = values.scalar(x[1])
    return fn(n, a.periodic ~= 0):to(values.dtype(a.output_datatype or 1))
  end
end
-- Filters of the mel scale as the standard has them, with corners at whole bins of the spectrum.
function M.MelWeightMatrix(x, a)
  local bins, length, rate = values.scalar(x[1]), values.scalar(x[2]), values.scalar(x[3])
  local low, high = values.scalar(x[4]), values.scalar(x[5])
  local spectrum = length // 2 + 1
  if not (bins > 0 and length > 0 and rate > 0 and low >= 0) or bins * spectrum > 1 << 24 then
    error(("expected filters of at most 2^24 elements, got %s of %s"):format(tostring(bins), tostring(spectrum)), 0)
  end
  local function mel(f) return 2595 * math.log(1 + f / 700, 10) end
  local step, corner = (mel(high) - mel(low)) / (bins + 2), {}
  for i = 0, bins + 1 do
    local f = 700 * (10 ^ ((mel(low) + i * step) / 2595) - 1)
    corner[i + 1] = math.tointeger((length + 1) * f // rate)
    if not corner[i + 1] or corner[i + 1] > spectrum then
      error(("the highest frequency %g is above half the rate %g"):format(high, rate), 0)
    end
  end
  local rows = {}
  for j = 0, spectrum - 1 do
    local row = {}
    for i = 1, bins do
      local left, centre, right = corner[i], corner[i + 1], corner[i + 2]
      local v = 0.0
      if j >= left and j <= centre then v = centre == left and 1.0 or (j - left) / (centre - left) end
      if right > centre and j >= centre and j < right then v = (right - j) / (right - centre) end
      row[i] = v
    end
    rows[j + 1] = row
  end
  return ty.tensor(rows, { dtype = values.dtype(a.output_datatype or 1) })
end

M.HannWindow = window_of(function(n, periodic) return ty.hann_window(n, periodic) end)
M.HammingWindow = window_of(function(n, periodic) return ty.hamming_window(n, periodic, 25 / 46, 21 / 46) end)
M.BlackmanWindow = window_of(function(n, periodic) return ty.blackman_window(n, periodic) end)

return M
