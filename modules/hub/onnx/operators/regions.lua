--- Operators of ONNX that read between the elements of pictures: RoiAlign and DeformConv.
local ty = require "tycho"

local M = {}

local MOST_REGIONS = 128 -- at a time, so that what is between the two products stays small

-- Where the samples of regions lie along one dimension and how much each element counts in them: weights
-- [regions, bins, samples, size] of linear interpolation, 0 for samples outside; how many samples a bin of each region
-- has, [regions]; which of the samples are a region's, [regions, samples]. from, extent: [regions].
local function taps(from, extent, bins, size, ratio)
  local device = from.device
  local step = extent / bins
  local count = ratio > 0 and ty.full_like(step, ratio) or step:ceil():clamp(0)
  local most = ratio > 0 and ratio or math.max(1, math.tointeger(count:max():item()))
  if most * bins > 1 << 16 then
    error(("a region has %d samples, more than %d"):format(most * bins, 1 << 16), 0)
  end
  local function along(t) return t:reshape(-1, 1, 1) end
  local bin = ty.arange(bins, { device = device }):reshape(1, -1, 1)
  local sample = ty.arange(most, { device = device }):reshape(1, 1, -1)
  local at = along(from) + (bin + (sample + 0.5) / along(count:clamp(1))) * along(step)
  local own = sample:lt(along(count))
  local inside = at:ge(-1):logical_and(at:le(size)):logical_and(own)
  at = at:clamp(0, size - 1):unsqueeze(-1)
  local weight = (1 - (at - ty.arange(size, { device = device })):abs()):clamp(0)
  return weight * inside:unsqueeze(-1):to(weight.dtype), count, own:squeeze(1)
end

-- The same of elements one after another, [regions, bins, samples]: positions and weights of the two neighbours.
local function neighbours(weight)
  return weight:topk(math.min(2, weight.shape[4]))
end

-- The largest of the four weighted neighbours of all samples of a bin, as the standard's reference and onnxruntime
-- have it: not of their sums.
local function largest(x, rows, columns, own_rows, own_columns)
  local wy, iy = neighbours(rows)       -- [r, bins, samples, 2]
  local wx, ix = neighbours(columns)
  local r, channels = x.shape[1], x.shape[2]
  local oh, ow, width = rows.shape[2], columns.shape[2], x.shape[4]
  local ny, nx = rows.shape[3] * wy.shape[4], columns.shape[3] * wx.shape[4]
  local function down(t) return t:reshape(r, oh, 1, ny, 1) end
  local function across(t) return t:reshape(r, 1, ow, 1, nx) end
  local index = (down(iy) * width + across(ix)):reshape(r, 1, -1):expand(r, channels, oh * ow * ny * nx)
  local taken = x:reshape(r, channels, -1):gather(2, index):reshape(r, channels, oh, ow, ny, nx)
  local y = taken * (down(wy) * across(wx)):unsqueeze(1)
  local two = y.shape[5] // rows.shape[3]
  local own = own_rows:reshape(r, 1, 1, 1, -1, 1):repeat_interleave(two, 4):logical_and(
    own_columns:reshape(r, 1, 1, 1, 1, -1):repeat_interleave(y.shape[6] // columns.shape[3], 5))
  return ty.where(own, y, -math.huge):max { 4, 5 }
end

function M.RoiAlign(x, a, c)
  local t, boxes, image = x[1], x[2], x[3]:to "i64"
  local half = (a.coordinate_transformation_mode or (c.opset >= 16 and "half_pixel" or "output_half_pixel"))
    == "half_pixel"
  local oh, ow, ratio = a.output_height or 1, a.output_width or 1, a.sampling_ratio or 0
  local n, height, width = boxes.shape[1], t.shape[3], t.shape[4]
  if n == 0 then return ty.zeros({ 0, t.shape[2], oh, ow }, { dtype = t.dtype, device = t.device }) end
  local parts = {}
  for start = 0, n - 1, MOST_REGIONS do
    local m = math.min(MOST_REGIONS, n - start)
    local at = boxes:narrow(0, start, m) * (a.spatial_scale or 1) - (half and 0.5 or 0)
    local x1, y1, x2, y2 = at:unbind(1)
    local w, h = x2 - x1, y2 - y1
    if not half then w, h = w:clamp(1), h:clamp(1) end
    local rows, down, own_rows = taps(y1, h, oh, height, ratio)
    local columns, across, own_columns = taps(x1, w, ow, width, ratio)
    local pictures = t:index_select(0, image:narrow(0, start, m))
    if a.mode == "max" then
      parts[#parts + 1] = largest(pictures, rows, columns, own_rows, own_columns)
    else
      rows = rows:sum { 2 } / down:clamp(1):reshape(-1, 1, 1)
      columns = columns:sum { 2 } / across:clamp(1):reshape(-1, 1, 1)
      local y = pictures:matmul(columns:transpose(1, 2):unsqueeze(1)) -- [m, channels, height, ow]
      parts[#parts + 1] = rows:unsqueeze(1):matmul(y)
    end
  end
  return #parts == 1 and parts[1] or ty.concat(parts, 0)
end

function M.DeformConv(x, a)
  local t, weight, offset, bias, mask = x[1], x[2], x[3], x[4], x[5]
  if t.ndim ~= 4 then error(("expected two dimensions of positions, got %d"):format(t.ndim - 2), 0) end
  local kh, kw = weight.shape[3], weight.shape[4]
  local stride, dilation = a.strides or { 1, 1 }, a.dilations or { 1, 1 }
  local pads, groups, parts = a.pads or { 0, 0, 0, 0 }, a.group or 1, a.offset_group or 1
  local n, channels, height, width = table.unpack(t.shape)
  local oh, ow, taken = offset.shape[3], offset.shape[4], kh * kw
  if channels % parts ~= 0 or offset.shape[2] ~= parts * taken * 2 then
    error(("expected %d channels of offsets for kernels of %d x %d and %d groups of offsets, got %d"):format(
      parts * taken * 2, kh, kw, parts, offset.shape[2]), 0)
  end
  local device = t.device
  local function places(count, step) return ty.arange(count, { device = device }) * step end
  -- [n, parts, kh, kw, oh, ow]
  local moved = offset:reshape(n, parts, kh, kw, 2, oh, ow)
  local row = moved:select(4, 0) + (places(kh, dilation[1]):reshape(-1, 1, 1, 1)
    + places(oh, stride[1]):reshape(1, 1, -1, 1) - pads[1])
  local column = moved:select(4, 1) + (places(kw, dilation[2]):reshape(-1, 1, 1)
    + places(ow, stride[2]):reshape(1, 1, -1) - pads[2])
  local grid = ty.stack({ (column * 2 + 1) / width - 1, (row * 2 + 1) / height - 1 }, -1)
    :reshape(n * parts, taken * oh, ow, 2)
  local y = ty.grid_sample(t:reshape(n * parts, channels // parts, height, width), grid, "bilinear", "zeros", false)
  y = y:reshape(n, parts, channels // parts, taken, oh * ow)
  if mask then y = y * mask:reshape(n, parts, 1, taken, oh * ow) end
  local inputs = channels // groups * taken
  y = weight:reshape(1, groups, weight.shape[1] // groups, inputs):matmul(y:reshape(n, groups, inputs, oh * ow))
  y = y:reshape(n, weight.shape[1], oh, ow)
  return bias and y + bias:reshape(-1, 1, 1) or y
end

return M
