--- Weights in 8 or 4 bits by their largest element, row by row, nothing else changed: a code is the nearest integer to
-- the weight over max |row| / (2^(bits - 1) - 1). Zeng et al. 2023, "GLM-130B", section 2.4: weights alone, activations
-- stay as they are. No calibration, no training.
--
--     local report = quant.absmax.quantize(model, { bits = 4 })
--     local packed = quant.absmax.encode(weight, 4)
local ty = require "tycho"
local arguments = require "tycho.arguments"

local surgery = ty.nn.surgery
local expect, fail = arguments.expect, arguments.fail
local M = {}

local function check_bits(who, bits) return expect(who, "bits", bits, "4 or 8") end

--- A matrix [rows, columns] as codes and scales: { codes, scales f32 [rows, 1], bits, columns }. Codes of 8 bits are i8
-- [rows, columns]; of 4 bits u8 [rows, half of them], the first of a pair in the low half, 8 standing for 0.
---@param w Tensor
---@param bits? integer  4
---@return { codes: Tensor, scales: Tensor, bits: integer, columns: integer }
function M.encode(w, bits)
  local who = "quant.absmax.encode"
  expect(who, "w", w, "a tensor")
  bits = check_bits(who, bits == nil and 4 or bits)
  if w.ndim ~= 2 or w:numel() == 0 then fail("%s: w: expected [rows, columns], got %s", who, arguments.describe(w)) end
  return ty.no_grad(function()
    w = w:to "f32"
    local scales = ty.norm(w, math.huge, 1, true) / ((1 << bits - 1) - 1)
    local codes = (w / scales:masked_fill(scales:eq(0), 1)):round()
    local columns = w.shape[2]
    if bits == 8 then
      codes = codes:to "i8"
    else
      codes = (codes + 8):to "u8"
      if columns % 2 == 1 then codes = ty.concat({ codes, codes:narrow(1, 0, 1) }, 1) end
      codes = codes:reshape(w.shape[1], -1, 2)
      codes = codes:select(2, 0) + codes:select(2, 1) * 16
    end
    return { codes = codes, scales = scales, bits = bits, columns = columns }
  end)
end

--- The values of an encoded matrix, f32 [rows, columns].
---@param packed { codes: Tensor, scales: Tensor, bits: integer, columns: integer }
---@return Tensor
function M.decode(packed)
  local who = "quant.absmax.decode"
  expect(who, "packed", packed, "a table")
  expect(who, "codes", packed.codes, "a tensor")
  expect(who, "scales", packed.scales, "a tensor")
  expect(who, "columns", packed.columns, "an integer >= 1")
  local codes = packed.codes
  if check_bits(who, packed.bits) == 4 then
    codes = ty.stack({ codes:bitwise_and(15), codes:floor_div(16) }, 2):reshape(codes.shape[1], -1)
    return (codes:narrow(1, 0, packed.columns):to "f32" - 8) * packed.scales
  end
  return codes:to "f32" * packed.scales
end

--- Puts the weights of a model's linear layers through it, in place: they have the values that codes give, in the dtype
-- that they had. options: bits (4), skip (names or ends of names of layers to leave out), head (false). Returns a
-- report: layers, bytes (that codes and scales, in 16 bits, take), bits (of a weight), error (root mean square of what
-- changed, over that of the weights).
---@param model Module
---@param options? { bits?: integer, skip?: string[], head?: boolean }
---@return { layers: integer, bytes: integer, bits: number, error: number }
function M.quantize(model, options)
  local who = "quant.absmax.quantize"
  expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { bits = 4, skip = {}, head = false }, { bits = false })
  check_bits(who, o.bits)
  local report = { layers = 0, bytes = 0 }
  local wrong, all, parameters = 0, 0, 0
  for _, layer in ipairs(surgery.find(who, model, { skip = o.skip, head = o.head })) do
    ty.no_grad(ty.scope, function()
      local rows = surgery.rows(layer.module)
      local packed = M.encode(rows, o.bits)
      local value = M.decode(packed)
      wrong = wrong + (value - rows:to "f32"):square():sum():item()
      all = all + rows:to("f32"):square():sum():item()
      layer.module.weight:copy_(surgery.laid_out(layer.module, value))
      report.layers, parameters = report.layers + 1, parameters + rows:numel()
      report.bytes = report.bytes + packed.codes:nbytes() + 2 * packed.scales:numel()
    end)
  end
  report.bits = parameters > 0 and 8 * report.bytes / parameters or 0
  report.error = all > 0 and (wrong / all) ^ 0.5 or 0
  return report
end

return M
