--- HQQ: zeros of a grid such that few weights are far off and the rest may be a little, without data. Badri and Shaji
-- 2023, "Half-Quadratic Quantization of Large Machine Learning Models"; constants as in the authors' program
-- (mobiusml/hqq).
--
--     local report = quant.hqq(model, { bits = 4, group = 64 })
--
-- A group of columns has codes q = round(w s + z) from its least to its largest value. The l_p norm, p = 0.7, of what
-- rounding changes is made small over z by half-quadratic splitting: errors e are shrunk, and z becomes the mean of
-- q - (w - e) s.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.quant.blocks"
local grids = require "tycho.quant.grids"

local nn = ty.nn
local expect = arguments.expect
local M = {}

local P, BETA, KAPPA, STEPS = 0.7, 10.0, 1.01, 20

-- The proximal operator of |x|^p, as the paper approximates it.
local function shrink(x, beta)
  return x:sign() * (x:abs() - x:abs():clamp(1e-30):pow(P - 1) / beta):relu()
end

--- Rounds groups w [groups, columns] of 2^bits values. Returns the values, and the mean magnitude of what that changed
-- before and after z was moved.
---@param w Tensor  f32 or f64
---@param bits integer
---@return Tensor value
---@return number before
---@return number after
function M.solve(w, bits)
  expect("quant.hqq.solve", "w", w, "a tensor")
  expect("quant.hqq.solve", "bits", bits, "an integer in [1, 8]")
  local most = (1 << bits) - 1
  local low, high = w:min(1, true), w:max(1, true)
  local scale = (ty.full_like(low, most) / (high - low)):clamp(nil, 2e4) -- a group of equal values has no range
  local zero = -low * scale
  if bits == 4 then zero = zero:round() end
  local function codes(z) return (w * scale + z):round():clamp(0, most) end
  local beta, best, least, first = BETA, zero, math.huge, nil
  for _ = 1, STEPS do
    local q = codes(zero)
    local value = (q - zero) / scale
    local off = (w - value):abs():mean():item()
    first = first or off
    if off >= least then break end
    best, least = zero, off
    local e = shrink(w - value, beta)
    zero = (q - (w - e) * scale):mean(1, true)
    beta = beta * KAPPA
  end
  return (codes(best) - best) / scale, first, least
end

local function quantize(model, options)
  local who = "quant.hqq"
  local o = nn.options(who, options, { bits = 4, group = 64, skip = {} })
  expect(who, "bits", o.bits, "an integer in [1, 8]")
  expect(who, "group", o.group, "an integer >= 0")
  local found, report = blocks.linears(who, model, o.skip), {}
  for _, layer in ipairs(found) do
    local columns = nn.surgery.sizes(layer.module)
    if o.group > 0 and columns % o.group ~= 0 then
      arguments.fail("%s: group: expected a divisor of the %d inputs of %s, got %d", who, columns, layer.name, o.group)
    end
    grids.weight_of(who, layer)
  end
  for _, layer in ipairs(found) do
    ty.scope(function()
      ty.no_grad(function()
        local w = grids.weight_of(who, layer)
        local columns = w.shape[2]
        local group = o.group > 0 and o.group or columns
        local value, before, after = M.solve(w:reshape(-1, group), o.bits)
        value = value:reshape(w.shape)
        grids.put(layer.module, value)
        -- Scale and zero are stored in half precision.
        report[#report + 1] = { name = layer.name, parameters = w:numel(), bits = o.bits + 32 / group,
          before = before, after = after }
      end)
    end)
  end
  ty.core.program.renew()
  return grids.summed(report)
end

--- Quantizes the linear layers of a model's blocks in place, without data; embeddings, norms, biases and the head
-- stay. The values are left in the model's dtype. options: bits (4; 1 to 8), group (64: columns with one scale and
-- zero, 0 for a whole row), skip (names of layers to leave out, or their ends). Returns a list of { name, parameters,
-- bits, before, after (the mean magnitude of what rounding changes, with the first zeros and with those found) }, with
-- the mean of bits in `bits`.
---@param model LanguageModel
---@param options? {bits?: integer, group?: integer, skip?: string[]}
---@return table report
function M.quantize(model, options) return nn.for_caller(quantize, model, options) end

return M
