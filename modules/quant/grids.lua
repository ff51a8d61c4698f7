--- Uniform grids of weights, and layers that are put on them: what GPTQ, AWQ, HQQ and rounding share. A grid is that of
-- some columns of a row (scale and offset, a value being scale code + offset) or that of a block's format.
local ty = require "tycho"
local formats = require "tycho.quant.formats"
local stored = require "tycho.quant.stored"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

--- Options of a grid with their defaults.
M.options = { bits = 4, group = 0, symmetric = false, mse = false, format = nn.none }

--- Raises where options of a grid are wrong; a format sets bits and group.
function M.check(who, o)
  if o.format ~= nil then
    local format = formats.get(who, o.format)
    o.bits, o.group = format.bits, format.group
    return
  end
  if o.bits ~= 2 and o.bits ~= 3 and o.bits ~= 4 and o.bits ~= 8 then
    error(("%s: bits: expected 2, 3, 4 or 8, got %s"):format(who, tostring(o.bits)), 0)
  end
  if not math.tointeger(o.group) or o.group < 0 then
    error(("%s: group: columns that share a scale, or 0 for whole rows, got %s"):format(who, tostring(o.group)), 0)
  end
end

local function check_columns(who, name, o, columns)
  local format = o.format and formats.get(who, o.format)
  if format and columns % format.columns ~= 0 then
    error(("%s: format: blocks of %s have %d columns, which does not divide the %d inputs of %s"):format(who, o.format,
      format.columns, columns, name), 0)
  end
end

-- ---- grids ----

local function rounded(w, scale, offset, levels)
  return ((w - offset) / scale):round():clamp(0, levels - 1) * scale + offset
end

--- The grid of columns w [rows, columns] that share it: scale and offset [rows, 1], a value being scale code + offset.
-- 0 is on it. symmetric: as far below 0 as above. mse: the part of the range is searched that rounds with the least sum
-- of |error|^2.4, as the authors' code does.
---@param w Tensor
---@param o { bits: integer, symmetric: boolean, mse: boolean }
---@return Tensor scale
---@return Tensor offset
function M.grid(w, o)
  local levels = 1 << o.bits
  local low, high = w:min(1, true):clamp(nil, 0), w:max(1, true):clamp(0)
  if o.symmetric then
    high = ty.maximum(high, -low)
    low = ty.where(low:lt(0), -high, low)
  end
  local empty = low:eq(0):logical_and(high:eq(0))
  low, high = low:masked_fill(empty, -1), high:masked_fill(empty, 1)
  local function of(share)
    local scale = (high - low) * (share / (levels - 1))
    local zero = o.symmetric and ty.full_like(scale, levels / 2) or (-low * share / scale):round()
    return scale, -scale * zero
  end
  local scale, offset = of(1)
  if not o.mse then return scale, offset end
  local least = (rounded(w, scale, offset, levels) - w):abs():pow(2.4):sum(1, true)
  for step = 1, 79 do
    local s, z = of(1 - step / 100)
    local error = (rounded(w, s, z, levels) - w):abs():pow(2.4):sum(1, true)
    local better = error:lt(least)
    scale, offset, least = ty.where(better, s, scale), ty.where(better, z, offset), ty.where(better, error, least)
  end
  return scale, offset
end

--- The grids of all groups of a matrix: scale and offset [rows, groups], and the encoded matrix of a format.
function M.all(w, o)
  if o.format then
    local q = w:to({ dtype = "f32", device = "cpu" }):contiguous():to(o.format)
    local scale, offset = formats.grid(q)
    return scale:to { dtype = w.dtype, device = w.device }, offset:to { dtype = w.dtype, device = w.device }, q
  end
  local rows, columns = w.shape[1], w.shape[2]
  local group = o.group > 0 and o.group or columns
  local groups = (columns + group - 1) // group
  if groups * group > columns then -- 0 is on every grid, so that zeros change none
    w = ty.concat({ w, ty.zeros({ rows, groups * group - columns }, { dtype = w.dtype, device = w.device }) }, 1)
  end
  local scale, offset = M.grid(w:reshape(rows * groups, group), o)
  return scale:reshape(rows, groups), offset:reshape(rows, groups)
end

--- [rows, groups] for each column.
function M.spread(x, columns, o)
  local rows, groups = x.shape[1], x.shape[2]
  local group = o.group > 0 and o.group or columns
  return x:unsqueeze(2):expand(rows, groups, group):reshape(rows, groups * group):narrow(1, 0, columns)
end

--- The nearest values of a matrix on a grid, in w's dtype, and the encoded matrix of a format.
---@param w Tensor  [rows, columns]
---@param o table   bits, group, symmetric, mse, or format, as check_grid() leaves them
---@return Tensor value
---@return Tensor? packed
function M.nearest(w, o)
  local scale, offset, packed = M.all(w, o)
  if packed then return packed:to "f32":to { dtype = w.dtype, device = w.device }, packed end
  local columns = w.shape[2]
  return rounded(w, M.spread(scale, columns, o), M.spread(offset, columns, o), 1 << o.bits)
end

-- ---- layers ----

--- The weight [outputs, inputs] of a layer, whatever way round it lies, f32 or f64, once it is known to be finite.
function M.weight_of(who, layer)
  local w = layer.module.weight
  if not w:is_floating_point() then
    error(("%s: %s is quantized already (%s)"):format(who, layer.name, w.dtype), 0)
  end
  w = w:detach()
  if w.dtype ~= "f64" then w = w:to "f32" end
  if not w:isfinite():all():item() then error(("%s: %s: a weight is not finite"):format(who, layer.name), 0) end
  return surgery.rows(layer.module, w):contiguous()
end

--- Gives a layer its new weight, values [outputs, inputs] or an encoded matrix.
function M.put(module, value, packed)
  if packed then
    local device = module.weight.device
    surgery.exchange(module, "weight", device == "cpu" and packed or packed:to { device = device })
  else
    module.weight:detach():copy_(surgery.laid_out(module, value))
  end
end

--- Raises unless all layers can take the grid, before any is changed.
function M.check_layers(who, found, o)
  for _, layer in ipairs(found) do
    local inputs = surgery.sizes(layer.module)
    check_columns(who, layer.name, o, inputs)
    if o.format and layer.module.fan_in_fan_out then
      error(("%s: format: the weights of %s lie the other way (GPT-2's Conv1D) and cannot be packed; leave it out")
        :format(who, layer.name), 0)
    end
    M.weight_of(who, layer)
  end
end

--- Bits of a weight as stored.
function M.bits(o, rows, columns)
  local format = o.format and formats.get("quant.gptq", o.format)
  if format then return 8 * format.bytes / format.columns end
  return 8 * stored.grid(rows, columns, o) / (rows * columns)
end

--- A report with the mean of its layers' bits in `bits`.
function M.summed(report)
  local bits, all = 0, 0
  for _, layer in ipairs(report) do bits, all = bits + layer.bits * layer.parameters, all + layer.parameters end
  report.bits = bits / all
  return report
end

return M
