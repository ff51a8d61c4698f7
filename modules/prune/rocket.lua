--- ROCKET: linear layers as a dictionary and sparse coefficients, in one step each, with what each layer may keep found
-- by a knapsack over all. Ali et al. 2026, "ROCKET: Rapid Optimization via Calibration-guided Knapsack Enhanced
-- Truncation for Efficient Model Compression"; constants are those of the authors' code.
--
--     local report = prune.rocket(model, corpus.training, { keep = 0.7 })
--
-- With W as inputs x outputs and S' S the second moment of the inputs, S W = U V by its singular vectors; V loses its
-- least coefficients, U is solved for again, and the layer is S^-1 U, dense, and V, sparse.
local ty = require "tycho"
local allocate = require "tycho.prune.allocate"
local blocks = require "tycho.quant.blocks"
local moments = require "tycho.quant.moments"
local shrink = require "tycho.prune.shrink"

local nn = ty.nn
local surgery = nn.surgery
local arguments = require "tycho.arguments"
local M = {}

local BACK = 0.005 -- of all coefficients are given back by their error, over columns
local RIDGE = 1e-3 -- of the mean of V V's diagonal

--- What a layer is stored in, in numbers of 16 bits: the dictionary [inputs, rank], and of coefficients [rank, outputs]
-- the nonzeros, with a bit for each where there are zeros.
---@return number
function M.cost(inputs, outputs, rank, nonzeros)
  local sparse = nonzeros < rank * outputs
  return inputs * rank + nonzeros + (sparse and rank * outputs / 16 or 0)
end

--- The rank and the nonzeros of a column that a layer may have when it keeps a share of its numbers; `split`: rank over
-- nonzeros of a column (1: plain low rank).
---@return integer rank
---@return integer nonzeros  of a column
function M.sizes(inputs, outputs, keep, split)
  local bits = split > 1 and outputs / 16 or 0
  local rank = math.floor(keep * inputs * outputs / (inputs + outputs / split + bits))
  rank = math.max(1, math.min(rank, inputs, outputs))
  return rank, math.max(1, math.min(rank, math.floor(rank / split)))
end

--- Sets the coefficients to zero that matter least. Importance is the geometric mean of |v| and |v| |S^-1 u|, by
-- column; of all that went some come back, by |v| |S^-1 u| over all columns, for which a column keeps as much less.
---@param v Tensor        f64 [rank, outputs]
---@param lengths Tensor  |S^-1 u| f64 [rank]
---@param nonzeros integer  of a column
---@return Tensor sparse
function M.sparsify(v, lengths, nonzeros)
  local rank, outputs = v.shape[1], v.shape[2]
  if nonzeros >= rank then return v end
  local back = math.min(math.floor(BACK * rank * outputs), (nonzeros - 1) * outputs)
  local each = nonzeros - math.ceil(back / outputs)
  back = (nonzeros - each) * outputs
  local error = v:abs() * lengths:unsqueeze(1)
  local _, at = (v:abs() * error):sqrt():topk(each, 0)
  local mask = ty.zeros({ rank, outputs }, { dtype = "u8", device = v.device }):scatter(0, at, 1)
  if back > 0 then
    local left = error:masked_fill(mask:to "bool", -1):flatten()
    local _, more = left:topk(back, 0)
    mask = mask:flatten():scatter(0, more, 1):reshape(rank, outputs)
  end
  return v * mask:to "f64"
end

--- The dictionary that sparse coefficients fit best: x V' (V V' + e I)^-1.
---@param x Tensor  S W, f64 [inputs, outputs]
---@param v Tensor  f64 [rank, outputs]
---@param ridge? number  1e-3: e over the mean of the diagonal of V V'
---@return Tensor
function M.dictionary(x, v, ridge)
  local gram = ty.matmul(v, v:transpose(0, 1))
  local mean = gram:diagonal():mean():item()
  gram:diagonal():add_(math.max(1e-6, (ridge or RIDGE) * mean))
  return ty.solve(gram, ty.matmul(v, x:transpose(0, 1))):transpose(0, 1)
end

-- What of a layer does not depend on its rank. weight [outputs, inputs].
local function prepare(weight, moment, o)
  local root, inverse = moments.whiten(moments.damped(moment, o.damp))
  local w = weight:to("f64"):transpose(0, 1)
  local x = ty.matmul(root, w)
  local u = (ty.svd(x))
  local a = ty.matmul(inverse, u)
  return { w = w, x = x, u = u, v = ty.matmul(u:transpose(0, 1), x), a = a, inverse = inverse,
    lengths = a:square():sum(0):sqrt(), weight_norm = w:norm():item(), output_norm = x:norm():item() }
end

local function solve(p, rank, nonzeros)
  local u, a = p.u:narrow(1, 0, rank), p.a:narrow(1, 0, rank)
  local v = M.sparsify(p.v:narrow(0, 0, rank), p.lengths:narrow(0, 0, rank), nonzeros)
  local function off(dictionary) return (ty.matmul(dictionary, v) - p.w):norm():item() / p.weight_norm end
  local weight_error, output = off(a), u
  if nonzeros < rank then
    local new = M.dictionary(p.x, v)
    local back = ty.matmul(p.inverse, new)
    local error = off(back)
    if error < weight_error then a, weight_error, output = back, error, new end
  end
  return { left = a, right = v, weight_error = weight_error,
    output_error = (ty.matmul(output, v) - p.x):norm():item() / p.output_norm }
end

--- A layer as two: left [inputs, rank] and right [rank, outputs], right with `nonzeros` in a column on average; and
-- what is off, relative: weight_error |W - left right| / |W|, output_error that of what the layer makes of its inputs.
---@param weight Tensor   [outputs, inputs]
---@param moment Tensor   x' x of the inputs, [inputs, inputs]
---@param rank integer
---@param nonzeros integer
---@param damp? number    1e-6, of the moment's mean
---@return { left: Tensor, right: Tensor, weight_error: number, output_error: number }
function M.factorize(weight, moment, rank, nonzeros, damp)
  return solve(prepare(weight, moment, { damp = damp or 1e-6 }), rank, nonzeros)
end

-- ---- models ----

-- The linear layers of the blocks and what each sees.
local function survey(who, model, data, o)
  local found = blocks.linears(who, model, o.skip)
  for _, layer in ipairs(found) do
    if not layer.module.weight:is_floating_point() or layer.module.fan_in_fan_out then
      arguments.fail("%s: %s: expected a weight of floats [outputs, inputs], got %s", who, layer.name,
        layer.module.fan_in_fan_out and "GPT-2's Conv1D" or layer.module.weight.dtype)
    end
  end
  local seen = o.moments or moments.collect(who, model, moments.batches(who, data, o), found)
  local list = {}
  for i, layer in ipairs(found) do
    local sum = o.moments and o.moments[i] or not o.moments and seen[layer].sum
    if not sum then arguments.fail("%s: moments: expected those of %s, got none", who, layer.name) end
    list[i] = { layer = layer, moment = sum }
  end
  return list
end

local moment_options = { skip = {} }
for key, value in pairs(moments.options) do moment_options[key] = value end

--- The second moments of what the linear layers of the blocks see, f64, in their order: for rocket()'s option moments.
-- options: rows (128), batch (8), seed (0), device, skip.
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options? table
---@return Tensor[]
function M.moments(model, data, options)
  return nn.for_caller(function()
    local who = "prune.rocket_moments"
    local o, list = arguments.read(who, options, moment_options, { skip = "a list of strings" }), {}
    for i, each in ipairs(survey(who, model, data, o)) do list[i] = each.moment end
    return list
  end)
end

-- What a layer can be made into: its choices for the knapsack. The layer as it is costs all and loses nothing.
local function profile(entry, o)
  local layer = entry.layer
  local inputs, outputs = surgery.sizes(layer.module)
  local p = prepare(layer.module.weight:detach(), entry.moment, o)
  local choices = { { cost = inputs * outputs, error = 0, keep = 1 } }
  for _, keep in ipairs(o.keeps) do
    local best
    for _, split in ipairs(o.splits) do
      ty.scope(function()
        local rank, nonzeros = M.sizes(inputs, outputs, keep, split)
        local made = solve(p, rank, nonzeros)
        local error = made[o.by .. "_error"]
        if not best or error < best.error then
          best = { cost = M.cost(inputs, outputs, rank, nonzeros * outputs), error = error, keep = keep, split = split,
            rank = rank, nonzeros = nonzeros }
        end
      end)
    end
    choices[#choices + 1] = best
  end
  return choices
end

local function compress(model, data, options)
  local who = "prune.rocket"
  local defaults = { keep = 0.7, keeps = { 0.4, 0.55, 0.7, 0.85 }, splits = { 1, 1.5, 2.5 },
    allocation = "knapsack", by = "weight", damp = 1e-6, moments = nn.none, profiles = nn.none }
  for key, value in pairs(moment_options) do defaults[key] = value end
  local o = arguments.read(who, options, defaults, { keep = "a number in (0, 1]", keeps = "a list of numbers",
    splits = "a list of numbers", allocation = '"knapsack" or "uniform"', by = '"weight" or "output"',
    damp = "a finite number >= 0", moments = "a list of tensors", skip = "a list of strings" })
  for name, least in pairs { keeps = 0, splits = 1 } do
    if #o[name] == 0 then arguments.fail("%s: %s: expected at least one number, got none", who, name) end
    for _, value in ipairs(o[name]) do
      if not (value > 0 and value >= least and value < (name == "keeps" and 1 or math.huge)) then
        arguments.fail("%s: %s: expected %s, got %g", who, name,
          name == "keeps" and "numbers in (0, 1)" or "numbers of at least 1", value)
      end
    end
  end
  if o.allocation == "uniform" then o.keeps = { o.keep < 1 and o.keep or 0.999 } end
  local entries = survey(who, model, data, o)
  local report = { layers = {}, before = 0, after = 0 }
  ty.no_grad(function()
    local profiles = o.profiles or {}
    for i, entry in ipairs(entries) do
      if not profiles[i] then profiles[i] = ty.scope(profile, entry, o) end
      report.before = report.before + profiles[i][1].cost
    end
    local chosen = {}
    for i in ipairs(entries) do chosen[i] = 2 end
    if o.keep == 1 then
      for i in ipairs(entries) do chosen[i] = 1 end
    elseif o.allocation == "knapsack" then
      chosen = allocate.choose(profiles, o.keep * report.before)
    end
    for i, entry in ipairs(entries) do
      local choice, layer = profiles[i][chosen[i]], entry.layer
      if choice.rank then
        ty.scope(function()
          local made = solve(prepare(layer.module.weight:detach(), entry.moment, o), choice.rank, choice.nonzeros)
          shrink.factor(model, layer.name, layer.module, made.right:transpose(0, 1), made.left:transpose(0, 1))
        end)
      end
      report.after = report.after + choice.cost
      report.layers[i] = { name = layer.name, keep = choice.keep, error = choice.error, rank = choice.rank,
        nonzeros = choice.nonzeros, cost = choice.cost }
    end
    report.profiles = profiles
  end)
  return report
end

--- Makes the linear layers of a model's blocks two each, a dense dictionary and sparse coefficients, without training;
-- weight is then [outputs, rank], with zeros, and `basis` [rank, inputs]. data: llm.data.Packed, or a list of its
-- batches. options:
--   keep        0.7: the share of the numbers of 16 bits that is kept of all layers, with a bit for each place
--   allocation  "knapsack": layers keep what makes the sum of their errors least; or "uniform"
--   keeps       shares that are tried for each layer, { 0.4, 0.55, 0.7, 0.85 }; a layer may also stay as it is
--   splits      rank over nonzeros of a column that are tried, { 1, 1.5, 2.5 }; { 1 } is low rank by singular values,
--               as SVD-LLM has it
--   by          what the knapsack and the splits go by: "weight" or "output", the relative error of either
--   damp        1e-6 of the mean of the diagonal is added to it
--   moments     of prune.rocket_moments(); profiles: of a report with the same keeps, splits and by
--   rows (128), batch (8), seed (0), device, skip: the data that is looked at, layers to leave out
-- Returns { before, after, layers, profiles }: numbers of 16 bits, and of each layer { name, keep, error, rank,
-- nonzeros, cost }.
---@param model LanguageModel
---@param data PackedDataset|table[]|nil  nil with moments
---@param options? table
---@return table report
function M.compress(model, data, options) return nn.for_caller(compress, model, data, options) end

return M
