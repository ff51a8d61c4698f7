--- AWQ: weights that meet large inputs are made larger before they are rounded, and so lose less. Lin et al. 2024,
-- "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration"; grids and constants as in
-- the authors' program (mit-han-lab/llm-awq).
--
--     local report = quant.awq(model, corpus.training, { bits = 4, group = 128 })
--     local report = quant.awq(model, corpus.training, { format = "q4_k" })     -- weights stay packed
--
-- Columns are multiplied by s = size^alpha, size the mean magnitude of the input, and what comes before is divided by
-- it (quant.scaling); alpha is that of 20 with which the layers lose least. Then the range of each group of a row is
-- cut where that loses less, but for queries and keys.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.quant.blocks"
local gptq = require "tycho.quant.gptq"
local grids = require "tycho.quant.grids"
local scaling = require "tycho.quant.scaling"

local nn = ty.nn
local expect = arguments.expect
local M = {}

-- |e X|^2 for e [rows, columns] and the moment of X.
local function lost(e, moment)
  e = e:to "f64"
  return (ty.matmul(e, moment) * e):sum():item()
end

--- Factors of the channels of some layers with one input: those of `steps` exponents, from 0 on, with which rounding
-- costs least (equation 4 of the paper). weights: a list of [outputs, channels]; moment: x' x [channels, channels];
-- size: mean magnitudes [channels]; o: a grid, as grids.nearest takes it.
---@param weights Tensor[]
---@param moment Tensor
---@param size Tensor
---@param o table
---@param steps? integer  20
---@return Tensor s       f32 [channels]
---@return number alpha
---@return number least   |(W - W') X|^2 with it
---@return number plain   the same without factors
function M.search(weights, moment, size, o, steps)
  steps = expect("quant.awq.search", "steps", steps == nil and 20 or steps, "an integer >= 1")
  local best, alpha, least, plain
  for i = 0, steps - 1 do
    local s = size:to("f32"):pow(i / steps):clamp(1e-4)
    s = s / math.sqrt(s:max():item() * s:min():item())
    local sum = 0
    for _, w in ipairs(weights) do
      local by = s:to(w.dtype):unsqueeze(0)
      sum = sum + ty.scope(function() return lost(grids.nearest(w * by, o) / by - w, moment) end)
    end
    plain = plain or sum
    if not least or sum < least then best, alpha, least = s, i / steps, sum end
  end
  return best, alpha, least, plain
end

--- A matrix with the ranges of its groups cut: of `steps` ranges down to half of the largest magnitude, for each group
-- of a row the one that loses least. w [rows, columns]; moment, o: as in search().
---@param w Tensor
---@param moment Tensor
---@param o table
---@param steps? integer  10
---@return Tensor
function M.clip(w, moment, o, steps)
  steps = expect("quant.awq.clip", "steps", steps == nil and 10 or steps, "an integer >= 1")
  local rows, columns = w.shape[1], w.shape[2]
  local group = o.group > 0 and o.group or columns
  if columns % group ~= 0 then return w end -- the last group has fewer: left as it is
  local groups = columns // group
  -- The moments of groups, [groups, group, group].
  local own = moment:reshape(groups, group, groups, group):diagonal(0, 0, 2):rearrange "a b g -> g a b"
  local top = ty.norm(w:reshape(rows, groups, group), math.huge, 2, true)
  local best, least
  for i = 0, steps - 1 do
    local limit = top * (1 - i / (2 * steps))
    local cut = ty.minimum(ty.maximum(w:reshape(rows, groups, group), -limit), limit):reshape(rows, columns)
    local e = (grids.nearest(cut, o) - w):to "f64":reshape(rows, groups, group):transpose(0, 1) -- [groups, rows, group]
    local found = (ty.matmul(e, own) * e):sum(2):transpose(0, 1):unsqueeze(2)
    if not least then best, least = limit, found else
      local better = found:lt(least)
      best, least = ty.where(better, limit, best), ty.where(better, found, least)
    end
  end
  return ty.minimum(ty.maximum(w:reshape(rows, groups, group), -best), best):reshape(rows, columns)
end

local function is_clipped(name)
  local last = name:match "[^.]+$"
  for _, part in ipairs { "^q_", "^k_", "query", "key", "qkv", "c_attn" } do
    if last:find(part) then return false end
  end
  return true
end

local function quantize(model, data, options)
  local who, defaults = "quant.awq", { clip = true }
  for _, more in ipairs { grids.options, blocks.options } do
    for key, value in pairs(more) do defaults[key] = value end
  end
  local o = nn.options(who, options, defaults)
  grids.check(who, o)
  grids.check_layers(who, blocks.linears(who, model, o.skip), o)
  local alphas, report = {}, { left = {} }
  -- First all factors: those of one layer change the rows of another.
  blocks.walk(who, model, data, o, function(group, moment, count, place)
    local before = scaling.feeder(place.block, group, place.calls[1])
    if not before then
      for _, layer in ipairs(group) do report.left[#report.left + 1] = layer.name end
      return
    end
    local size, weights = nil, {}
    place.each(function(x)
      local sum = x:detach():flatten(0, -2):to("f32"):abs():sum(0)
      size = ty.keep(size and size + sum or sum)
    end)
    for i, layer in ipairs(group) do weights[i] = grids.weight_of(who, layer) end
    local s, alpha = M.search(weights, moment, size / count, o)
    scaling.move(before, group, s)
    for _, layer in ipairs(group) do alphas[layer.name] = alpha end
  end)
  blocks.walk(who, model, data, o, function(group, moment)
    for _, layer in ipairs(group) do
      local w = grids.weight_of(who, layer)
      local value, packed = grids.nearest(o.clip and is_clipped(layer.name) and M.clip(w, moment, o) or w, o)
      report[#report + 1] = { name = layer.name, parameters = w:numel(), bits = grids.bits(o, w.shape[1], w.shape[2]),
        alpha = alphas[layer.name], error = gptq.error(w, value, moment) }
      grids.put(layer.module, value, packed)
    end
  end)
  ty.core.program.renew()
  return grids.summed(report)
end

--- Quantizes the linear layers of a model's blocks in place; embeddings, biases and the head stay, norms and layers
-- before others take factors in. data: llm.data.Packed, or a list of its batches. options: bits (4; or 2, 3, 8), group
-- (0: columns with one scale, 0 for a whole row), symmetric (false), mse (false), or in their place format ("q4_k" and
-- others: weights become block-quantized); clip (true: ranges are cut where that loses less); rows (128), batch (8),
-- seed (0), device, skip: as in quant.gptq.quantize().
-- Returns a list of { name, parameters, bits, error, alpha (of its factors; nil: it has none) }, error being |(W - Q)
-- X|^2 / |W X|^2, with the mean of bits in `bits`, and the names of layers that have nothing before them to take
-- factors in `left`.
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options? table
---@return table report
function M.quantize(model, data, options) return nn.for_caller(quantize, model, data, options) end

return M
