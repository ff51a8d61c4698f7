--- Resize and Upsample of ONNX: each dimension by itself, as sums of few elements whose positions and weights are
-- computed here; nearest takes one, linear two, cubic four, antialias more.
local ty = require "tycho"
local values = require "tycho.hub.onnx.values"

local M = {}

-- Where element i of m lies among n: coordinate modes. s: the scale.
local coordinates = {
  half_pixel = function(i, s) return (i + 0.5) / s - 0.5 end,
  pytorch_half_pixel = function(i, s, _, m) return m > 1 and (i + 0.5) / s - 0.5 or 0 end,
  align_corners = function(i, _, n, m) return m == 1 and 0 or i * (n - 1) / (m - 1) end,
  asymmetric = function(i, s) return i / s end,
  tf_half_pixel_for_nn = function(i, s) return (i + 0.5) / s end,
  half_pixel_symmetric = function(i, s, n, m)
    return n / 2 * (1 - m / (s * n)) + (i + 0.5) / s - 0.5
  end,
  tf_crop_and_resize = function(i, _, n, m, from, to)
    if m > 1 then return from * (n - 1) + i * (to - from) * (n - 1) / (m - 1) end
    return 0.5 * (from + to) * (n - 1)
  end,
}

local nearest = {
  round_prefer_floor = function(x) return math.ceil(x - 0.5) end,
  round_prefer_ceil = function(x) return math.floor(x + 0.5) end,
  floor = math.floor,
  ceil = math.ceil,
}

local kernels = {
  linear = { radius = 1, function(d) return math.max(0, 1 - math.abs(d)) end },
  cubic = { radius = 2, function(d, a) -- Keys 1981
    d = math.abs(d)
    if d <= 1 then return (a + 2) * d ^ 3 - (a + 3) * d ^ 2 + 1 end
    if d < 2 then return a * d ^ 3 - 5 * a * d ^ 2 + 8 * a * d - 4 * a end
    return 0
  end },
}

-- For one dimension: lists of taps, each { index = {...}, weight = {...} } over the m results; and which results lie
-- outside, for tf_crop_and_resize.
local function taps_of(n, m, scale, o, from, to)
  local coordinate, all, outside = coordinates[o.coordinate], {}, nil
  if o.mode == "nearest" then
    local round, tap = nearest[o.nearest], { index = {} }
    for i = 0, m - 1 do
      local x = coordinate(i, scale, n, m, from, to)
      if o.coordinate == "tf_crop_and_resize" and (x < 0 or x > n - 1) then
        outside = outside or {}
        outside[i + 1] = true
      end
      tap.index[i + 1] = math.max(0, math.min(n - 1, round(x)))
    end
    return { tap }, outside
  end
  local kernel = kernels[o.mode]
  local narrow = o.antialias and math.min(1, scale) or 1
  local reach = math.ceil(kernel.radius / narrow)
  for k = 1, 2 * reach do all[k] = { index = {}, weight = {} } end
  for i = 0, m - 1 do
    local x = coordinate(i, scale, n, m, from, to)
    if o.coordinate == "tf_crop_and_resize" and (x < 0 or x > n - 1) then
      outside = outside or {}
      outside[i + 1] = true
    end
    local first, sum = math.floor(x) - reach + 1, 0
    for k = 1, 2 * reach do
      local at = first + k - 1
      local weight = kernel[1]((x - at) * narrow, o.cubic)
      if o.exclude_outside and (at < 0 or at >= n) then weight = 0 end
      all[k].index[i + 1] = math.max(0, math.min(n - 1, at))
      all[k].weight[i + 1] = weight
      sum = sum + weight
    end
    if (o.antialias or o.exclude_outside) and sum ~= 0 then
      for k = 1, 2 * reach do all[k].weight[i + 1] = all[k].weight[i + 1] / sum end
    end
  end
  return all, outside
end

local function flags(n, set)
  local list = {}
  for i = 1, n do list[i] = set[i] and 1 or 0 end
  return ty.tensor(list):ne(0)
end

local function resize_dim(t, dim, m, scale, o, from, to)
  local n = t.shape[dim + 1]
  local taps, outside = taps_of(n, m, scale, o, from, to)
  local shape = values.copies(1, t.ndim)
  shape[dim + 1] = m
  local function along(list) return ty.tensor(list, { dtype = t.dtype }):to { device = t.device }:reshape(shape) end
  local y
  if #taps > 4 then -- a product with the weights of all elements
    local rows = {}
    for i = 1, m do
      rows[i] = values.copies(0, n)
      for _, tap in ipairs(taps) do
        local at = tap.index[i] + 1
        rows[i][at] = rows[i][at] + tap.weight[i]
      end
    end
    local weight = ty.tensor(rows, { dtype = t.dtype }):to { device = t.device }
    y = ty.matmul(t:movedim(dim, -1), weight:transpose(0, 1)):movedim(-1, dim)
  else
    for _, tap in ipairs(taps) do
      local one = t:index_select(dim, values.i64(tap.index):to { device = t.device })
      if tap.weight then one = one * along(tap.weight) end
      y = y and y + one or one
    end
  end
  return y, outside and flags(m, outside):reshape(shape):to { device = t.device }
end

-- By Tycho's own op where that means the same.
local function native(t, sizes, scales, o)
  if t.ndim < 3 or t.ndim > 5 or not t:is_floating_point() or o.antialias or o.exclude_outside then return nil end
  if sizes[1] ~= t.shape[1] or sizes[2] ~= t.shape[2] then return nil end
  for i = 3, t.ndim do
    if math.abs(scales[i] - sizes[i] / t.shape[i]) > 1e-9 or sizes[i] < 2 then return nil end
  end
  local size = table.move(sizes, 3, #sizes, 1, {})
  if o.mode == "nearest" then
    for i = 3, t.ndim do
      if sizes[i] % t.shape[i] ~= 0 then return nil end -- rounding is the same for whole scales alone
    end
    local same = o.coordinate == "asymmetric" and o.nearest == "floor" or o.coordinate == "half_pixel"
      and o.nearest:find "^round"
    return same and ty.interpolate(t, size, 0, "nearest") or nil
  end
  local corners = o.coordinate == "align_corners"
  if not (corners or o.coordinate == "half_pixel" or o.coordinate == "pytorch_half_pixel") then return nil end
  if o.mode == "linear" then
    return ty.interpolate(t, size, 0, ({ "linear", "bilinear", "trilinear" })[#size], corners)
  end
  if o.mode == "cubic" and #size == 2 and o.cubic == -0.75 then
    return ty.interpolate(t, size, 0, "bicubic", corners)
  end
  return nil
end

local function resize(t, sizes, scales, o, roi)
  local whole = not t:is_floating_point()
  if whole and o.mode ~= "nearest" then
    local y = resize(t:to "f32", sizes, scales, o, roi)
    local bounds = { u8 = { 0, 255 }, i8 = { -128, 127 } }
    local bound = bounds[t.dtype]
    return (bound and y:clamp(bound[1], bound[2]) or y):to(t.dtype)
  end
  local fast = native(t, sizes, scales, o)
  if fast then return fast end
  for i = 1, t.ndim do
    local crops = o.coordinate == "tf_crop_and_resize"
    if sizes[i] ~= t.shape[i] or scales[i] ~= 1 or crops and roi and (roi[i] ~= 0 or roi[t.ndim + i] ~= 1) then
      local outside
      t, outside = resize_dim(t, i - 1, sizes[i], scales[i], o, roi and roi[i] or 0, roi and roi[t.ndim + i] or 1)
      if outside then t = t:masked_fill(outside, o.extrapolation) end
    end
  end
  return t
end

local function numbers(t)
  if not t or t:numel() == 0 then return nil end
  return t:tolist()
end

-- Sizes and scales of all dimensions from those of `axes`.
local function complete(t, a, scales, sizes, roi)
  local axes = a.axes
  local n = t.ndim
  local all_scales, all_sizes, all_roi = values.copies(1, n), t.shape, roi and {} or nil
  for i = 1, n do
    if roi then all_roi[i], all_roi[n + i] = 0, 1 end
  end
  local count = axes and #axes or n
  if sizes and (a.keep_aspect_ratio_policy or "stretch") ~= "stretch" then
    local pick = a.keep_aspect_ratio_policy == "not_larger" and math.min or math.max
    local scale
    for k = 1, count do
      local dim = axes and values.axis(axes[k], n) + 1 or k
      local one = sizes[k] / t.shape[dim]
      scale = scale and pick(scale, one) or one
    end
    scales = values.copies(scale, count)
    local same = {}
    for k = 1, count do
      local dim = axes and values.axis(axes[k], n) + 1 or k
      same[k] = math.floor(scale * t.shape[dim] + 0.5)
    end
    sizes = same
  end
  for k = 1, count do
    local dim = axes and values.axis(axes[k], n) + 1 or k
    if sizes then
      all_sizes[dim] = sizes[k]
      all_scales[dim] = scales and scales[k] or sizes[k] / t.shape[dim]
    else
      all_scales[dim] = scales[k]
      all_sizes[dim] = math.floor(t.shape[dim] * scales[k])
    end
    if roi then all_roi[dim], all_roi[n + dim] = roi[k], roi[count + k] end
  end
  return all_sizes, all_scales, all_roi
end

function M.Resize(x, a, c)
  local o = { mode = a.mode or "nearest", coordinate = a.coordinate_transformation_mode or "half_pixel",
    nearest = a.nearest_mode or "round_prefer_floor", cubic = a.cubic_coeff_a or -0.75,
    exclude_outside = a.exclude_outside == 1, antialias = a.antialias == 1,
    extrapolation = a.extrapolation_value or 0 }
  local scales, sizes, roi
  if c.opset < 11 then
    scales, o.coordinate, o.nearest = numbers(x[2]), "asymmetric", "floor"
  else
    roi, scales, sizes = numbers(x[2]), numbers(x[3]), numbers(x[4])
  end
  if not scales and not sizes then error("expected scales or sizes", 0) end
  if not coordinates[o.coordinate] or not nearest[o.nearest] or o.mode ~= "nearest" and not kernels[o.mode] then
    error(("the modes %s, %s and %s are not known"):format(o.mode, o.coordinate, o.nearest), 0)
  end
  local all_sizes, all_scales, all_roi = complete(x[1], a, scales, sizes, roi)
  return resize(x[1], all_sizes, all_scales, o, all_roi)
end

function M.Upsample(x, a, c)
  local scales = c.opset >= 9 and numbers(x[2]) or a.scales
  local mode = a.mode or "nearest"
  if mode ~= "nearest" and mode ~= "linear" then error(("mode %s is not known"):format(mode), 0) end
  local o = { mode = mode, coordinate = "asymmetric", nearest = "floor", extrapolation = 0 }
  local sizes, all = complete(x[1], {}, scales)
  return resize(x[1], sizes, all, o)
end

return M
