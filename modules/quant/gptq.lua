--- GPTQ: the linear layers of a decoder in 2, 3 or 4 bits, one column after another, the error of each taken out of the
-- columns that are still to come. Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative
-- Pre-trained Transformers"; the options have the names and meaning of the authors' code.
--
--     local report = quant.gptq.quantize(model, corpus.training, { bits = 3, group = 64, act_order = true })
--     local report = quant.gptq.quantize(model, corpus.training, { format = "q3_k" })   -- weights stay packed
--     quant.save(model, "model.gguf", { tokenizer = folder })                            -- for llama.cpp as well
--
-- With a format the grid is the one that a block of it has: its scales are what rounding to nearest would choose, and
-- GPTQ chooses the codes. So nothing is lost in packing, and the result is an ordinary file. Without one the grid is
-- the paper's, with scales in f32, and the weights are left in the model's dtype.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.quant.blocks"
local formats = require "tycho.quant.formats"
local grids = require "tycho.quant.grids"
local moments = require "tycho.quant.moments"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

--- The grid of columns that share it, and the weight of a layer: see tycho.quant.grids.
M.grid, M.weight_of = grids.grid, grids.weight_of

-- ---- the columns ----

--- Upper triangular u with u' u = h^-1. With h turned about, h = r r' for an upper triangle r, and u = r^-1.
---@param h Tensor
---@return Tensor
function M.inverse_factor(h)
  local n = h.shape[1]
  local lower = ty.cholesky(h:flip(0, 1))
  return ty.solve_triangular(lower, ty.eye(n, { dtype = h.dtype, device = h.device })):flip(0, 1)
end

--- Quantizes w [rows, columns] for inputs whose x' x sums up to `moment` [columns, columns]. Options: those of grids
-- (bits, group, symmetric, mse, format), act_order, damp, block. Computes in w's dtype, the factor in f64.
---@param w Tensor
---@param moment Tensor
---@param o table
---@return Tensor value  [rows, columns], as decoding gives it
---@return Tensor codes  u8 [rows, columns]
---@return Tensor? packed of a format
function M.solve(w, moment, o)
  local rows, columns = w.shape[1], w.shape[2]
  local levels, group = 1 << o.bits, o.group > 0 and o.group or columns
  local h = moments.damped(moment, o.damp)
  local order = o.act_order and h:diagonal():argsort(0, true)
  if order then h = h:index_select(0, order):index_select(1, order) end
  local factor = M.inverse_factor(h):to(w.dtype)
  -- Where scales are known beforehand, columns may go in any order; otherwise a group's are those of the columns as
  -- they have become when its turn comes.
  local scale, offset, packed
  local static = o.act_order or o.format ~= nil
  if static then
    scale, offset, packed = grids.all(w, o)
    scale, offset = grids.spread(scale, columns, o), grids.spread(offset, columns, o)
    if order then scale, offset = scale:index_select(1, order), offset:index_select(1, order) end
  end
  local left = order and w:index_select(1, order) or w:clone()
  local codes, values, from = {}, {}, 0
  while from < columns do
    local n = math.min(o.block, columns - from)
    if not static then
      if from % group == 0 then
        scale, offset = M.grid(left:narrow(1, from, math.min(group, columns - from)), o)
      end
      n = math.min(n, group - from % group)
    end
    local function mine(x) return static and x:narrow(1, from, n) or x:expand(rows, n) end
    local s, z, triangle = mine(scale), mine(offset), factor:narrow(0, from, n)
    local code, error = ty.quantize_columns(left:narrow(1, from, n), triangle:narrow(1, from, n), s, z, levels)
    codes[#codes + 1], values[#values + 1] = code, code:to(w.dtype) * s + z
    from = from + n
    if from < columns then
      left:narrow(1, from, columns - from):sub_(ty.matmul(error, triangle:narrow(1, from, columns - from)))
    end
  end
  local value, code = ty.concat(values, 1), ty.concat(codes, 1)
  if order then
    local back = order:argsort()
    value, code = value:index_select(1, back), code:index_select(1, back)
  end
  return value, code, packed and formats.with_codes(packed, code:to "cpu")
end

-- ---- layers ----

--- Raises unless damp and block of a solver's options make sense.
function M.check_solver(who, o)
  if type(o.damp) ~= "number" or o.damp ~= o.damp or o.damp < 0 then
    error(("%s: damp: expected a share of the mean of the diagonal, 0 or more, got %s"):format(who,
      tostring(o.damp)), 0)
  end
  if not math.tointeger(o.block) or o.block < 1 then
    error(("%s: block: expected a positive integer, got %s"):format(who, tostring(o.block)), 0)
  end
end

--- solve(w, moment, o), with an error for the user when its Hessian is singular.
function M.solved(who, name, solve, w, moment, o)
  local result = table.pack(pcall(solve, w, moment, o))
  if result[1] then return table.unpack(result, 2, result.n) end
  if tostring(result[2]):find "not positive definite" then
    error(("%s: the Hessian of %s is singular: its inputs depend on each other; use more rows or a damp above %g")
      :format(who, name, o.damp), 0)
  end
  error(result[2], 0)
end

--- |(w - value) X|^2 / |w X|^2
function M.error(w, value, moment)
  local off = (w - value):to "f64"
  local all = (ty.matmul(w:to "f64", moment) * w):sum():item()
  return all > 0 and (ty.matmul(off, moment) * off):sum():item() / all or 0
end

local function quantize(model, data, options)
  local who, defaults = "quant.gptq", { act_order = false, damp = 0.01, block = 128 }
  for _, more in ipairs { grids.options, blocks.options } do
    for key, value in pairs(more) do defaults[key] = value end
  end
  local o = nn.options(who, options, defaults)
  grids.check(who, o)
  M.check_solver(who, o)
  grids.check_layers(who, blocks.linears(who, model, o.skip), o)
  local report = {}
  blocks.walk(who, model, data, o, function(group, moment)
    for _, layer in ipairs(group) do
      local w = M.weight_of(who, layer)
      local value, _, packed = M.solved(who, layer.name, M.solve, w, moment, o)
      report[#report + 1] = { name = layer.name, parameters = w:numel(), bits = grids.bits(o, w.shape[1], w.shape[2]),
        error = M.error(w, value, moment) }
      grids.put(layer.module, value, packed)
    end
  end)
  return grids.summed(report)
end

--- Quantizes the linear layers of a model's blocks in place; embeddings, norms, biases and the head stay. Blocks go one
-- after the other, in each the layers by the order of their inputs, all with what came before already quantized. data:
-- llm.data.Packed, or a list of its batches. options:
--   bits (4; or 2, 3, 8), group (0: columns with one scale, 0 for a whole row; the last group of a row may have fewer),
--   symmetric (false), mse (false: search for the range), or in their place format ("q2_k", "q3_k", "q4_k", "q4_0":
--   weights become block-quantized)
--   act_order (false: the columns with the largest inputs first; scales are then those of the weights as they were),
--   damp (0.01 of the diagonal's mean is added to it), block (128: columns between updates of the rest)
--   rows (of the dataset to calibrate with: 128, or all of a shorter one; more than it has are an error), batch (8:
--   rows at a time), seed (0: which rows), device, skip (names of layers to leave out, or their ends)
-- Returns a list of { name, parameters, bits, error }, error being |(W - Q) X|^2 / |W X|^2, and the mean of bits in
-- `bits`.
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options? table
---@return table report
function M.quantize(model, data, options)
  return nn.for_caller(quantize, model, data, options)
end

local function network(model, calls, options)
  local who, defaults = "quant.gptq.network", { act_order = false, damp = 0.01, block = 128, skip = {} }
  for key, value in pairs(grids.options) do defaults[key] = value end
  local o = nn.options(who, options, defaults)
  grids.check(who, o)
  M.check_solver(who, o)
  arguments.expect(who, "calls", calls, "a list of tables")
  if #calls == 0 then error(who .. ": calls: expected at least one, got an empty table", 0) end
  local layers = blocks.linears(who, model, o.skip)
  grids.check_layers(who, layers, o)
  local seen, removes, report = {}, {}, {}
  for k, layer in ipairs(layers) do
    seen[k] = moments.new(surgery.sizes(layer.module), layer.module.weight.device)
    removes[k] = layer.module:register_forward_pre_hook(function(_, x) moments.add(seen[k], x) end)
  end
  local was_training = model.training
  model:eval()
  local ok, message = pcall(ty.no_grad, function()
    for _, call in ipairs(calls) do
      ty.scope(function() model(table.unpack(call, 1, call.n or #call)) end)
    end
  end)
  for _, remove in ipairs(removes) do remove() end
  model:train(was_training)
  if not ok then error(message, 0) end
  for k, layer in ipairs(layers) do
    moments.check_finite(who, layer.name, seen[k])
    ty.no_grad(ty.scope, function()
      local w = M.weight_of(who, layer)
      local value, _, packed = M.solved(who, layer.name, M.solve, w, seen[k].sum, o)
      report[#report + 1] = { name = layer.name, parameters = w:numel(), bits = grids.bits(o, w.shape[1], w.shape[2]),
        error = M.error(w, value, seen[k].sum) }
      grids.put(layer.module, value, packed)
    end)
  end
  ty.core.program.renew()
  return grids.summed(report)
end

--- GPTQ for any network: the linear layers of its blocks (its first nn.ModuleList), by what they get when it is called
-- with `calls`, lists of arguments (table.pack). All layers see what the network gave before any was changed, which is
-- one pass; quantize() measures a decoder's layers again after those before them. options and report: as quantize()'s,
-- without rows, batch, seed and device.
---@param model Module
---@param calls table[]
---@param options? table
---@return table report
function M.network(model, calls, options) return nn.for_caller(network, model, calls, options) end

local function round(model, options)
  local who, defaults = "quant.round", { skip = {} }
  for key, value in pairs(grids.options) do defaults[key] = value end
  local o = nn.options(who, options, defaults)
  grids.check(who, o)
  local found, report = blocks.linears(who, model, o.skip), {}
  grids.check_layers(who, found, o)
  for _, layer in ipairs(found) do
    ty.scope(function()
      ty.no_grad(function()
        local w = M.weight_of(who, layer)
        grids.put(layer.module, grids.nearest(w, o))
        report[#report + 1] = { name = layer.name, parameters = w:numel(),
          bits = grids.bits(o, w.shape[1], w.shape[2]) }
      end)
    end)
  end
  ty.core.program.renew()
  return grids.summed(report)
end

--- Rounds the linear layers of a model's blocks to the nearest values of the same grids: what GPTQ is measured against.
-- options: bits, group, symmetric, mse, format, skip, as in quantize().
---@param model LanguageModel
---@param options? table
---@return table report
function M.round(model, options)
  return nn.for_caller(round, model, options)
end

return M
