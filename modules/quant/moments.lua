--- Second moments of layers' inputs over some text, in f64: what GPTQ, SparseGPT, EoRA, MoDeGPT and ROCKET know of the
-- data, with one rule for damping and one for directions that no input has.
--
--     local found = moments.collect("prune.modegpt", model, data, { rows = 128, batch = 8 }, layers)
--     local root, inverse = moments.whiten(moments.damped(found[layer].sum, 0.01))
local ty = require "tycho"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

--- Options of batches() with their defaults: rows of a dataset that are looked at (128, or all of a shorter one: then
-- more are an error only if they were asked for), rows at a time, which ones, where.
M.options = { rows = nn.none, batch = 8, seed = 0, device = nn.none }

--- Raises unless rows and batch are what M.options says.
---@param who string
---@param o table
function M.check(who, o)
  for _, key in ipairs { "rows", "batch" } do
    local value = o[key]
    local unset = key == "rows" and (value == nil or rawequal(value, nn.none))
    if not unset and (not math.tointeger(value) or value < 1) then
      error(("%s: %s: expected a positive integer, got %s"):format(who, key, tostring(value)), 0)
    end
  end
end

-- The rows of a list of batches.
local function rows_in(list)
  local sum = 0
  for _, batch in ipairs(list) do
    local tokens = type(batch) == "table" and batch.tokens
    sum = sum + (ty.is_tensor(tokens) and tokens.ndim > 0 and tokens.shape[1] or math.huge) -- others: looked at later
  end
  return sum
end

--- Batches of a dataset, or the list that was given.
---@param who string
---@param data PackedDataset|table[]
---@param o table  rows, batch, seed, device as in M.options
---@return table[] batches
function M.batches(who, data, o)
  M.check(who, o)
  if type(data) ~= "table" then
    error(("%s: data: expected a dataset of llm.data.Packed or a list of batches, got %s"):format(who, type(data)), 0)
  end
  if not data[1] and (not data.size or data.size < 1) then error(("%s: data: there are no rows"):format(who), 0) end
  local there = data[1] and rows_in(data) or data.size
  if o.rows and there < o.rows then
    error(("%s: data: expected the %d rows that were asked for, got %d"):format(who, o.rows, there), 0)
  end
  if data[1] then return data end
  local wanted = math.min(o.rows or 128, data.size)
  local list, rows = {}, 0
  local loader = ty.data.DataLoader(data, { batch_size = math.min(o.batch, wanted), shuffle = true, seed = o.seed,
    device = o.device })
  while rows < wanted do
    list[#list + 1] = ty.keep(loader:next())
    rows = rows + math.min(o.batch, wanted)
  end
  return list
end

--- A sum of x' x with nothing in it yet: sum f64 [inputs, inputs], count (rows). exact: products in f64; without it
-- those of a batch are in f32, which is what quantizing weights needs and a whitening of narrow spectra does not bear.
---@param inputs integer
---@param device? string
---@param exact? boolean
---@return { sum: Tensor, count: integer, exact: boolean }
function M.new(inputs, device, exact)
  return { sum = ty.keep(ty.zeros({ inputs, inputs }, { dtype = "f64", device = device })), count = 0,
    exact = exact or false }
end

--- Adds the rows of x [..., inputs] to a sum of new().
function M.add(moment, x)
  ty.scope(function()
    local rows = x:detach():reshape(-1, moment.sum.shape[1])
    if rows.dtype ~= "f64" then rows = rows:to(moment.exact and "f64" or "f32") end
    moment.sum:add_(ty.matmul(rows:transpose(0, 1), rows):to "f64")
    moment.count = moment.count + rows.shape[1]
  end)
end

--- Raises unless what was summed is finite. what: where the inputs go, for the error.
function M.check_finite(who, what, moment)
  if not moment.sum:isfinite():all():item() then
    error(("%s: the inputs of %s are not finite: a weight or an activation is NaN or too large"):format(who, what), 0)
  end
end

--- The moments of the inputs of layers of a model as it stands, all in one pass: a table from layer to { sum, count };
-- layers that see the same tensor share one. layers: a list of { name, module }. before(module, ...), if given, is
-- called with what each block of `blocks` is called with, and after(module, outputs, ...) with what comes out.
---@param who string
---@param model LanguageModel
---@param batches table[]   as batches() gives them
---@param layers { name: string, module: Module }[]
---@param watch? { blocks: Module[], after: fun(block: integer, outputs: table, ...) }
---@return table<table, { sum: Tensor, count: integer }> moments
function M.collect(who, model, batches, layers, watch)
  local found, removes, last = {}, {}, {}
  for _, layer in ipairs(layers) do
    removes[#removes + 1] = layer.module:register_forward_pre_hook(function(_, x)
      if last.x and rawequal(last.x, x) then
        found[layer] = found[layer] or last.moment
        return
      end
      found[layer] = found[layer] or M.new(surgery.sizes(layer.module), layer.module.weight.device, true)
      last.x, last.moment = x, found[layer]
      M.add(found[layer], x)
    end)
  end
  for i, block in ipairs(watch and watch.blocks or {}) do
    removes[#removes + 1] = block:register_forward_hook(function(_, outputs, ...) watch.after(i, outputs, ...) end)
  end
  local was_training = model.training
  model:eval()
  local ok, message = pcall(ty.no_grad, function()
    for _, batch in ipairs(batches) do
      ty.scope(function()
        model[model.hidden and "hidden" or "forward"](model, batch.tokens,
          { cu_seqlens = batch.cu_seqlens, longest = batch.longest, mask = batch.mask })
      end)
      last.x = nil
    end
  end)
  for _, remove in ipairs(removes) do remove() end
  model:train(was_training)
  if not ok then error(message, 0) end
  for _, layer in ipairs(layers) do
    if not found[layer] then error(("%s: no batch reaches %s"):format(who, layer.name), 0) end
    M.check_finite(who, layer.name, found[layer])
  end
  return found
end

--- A moment made solvable, as GPTQ's authors do it: an input that is always zero has no say, and `damp` of the
-- diagonal's mean is added to the diagonal. A factor of the moment changes nothing.
---@param moment Tensor [n, n]
---@param damp number
---@return Tensor
function M.damped(moment, damp)
  local diagonal = moment:diagonal()
  local dead = diagonal:eq(0):to(moment.dtype)
  local mean = diagonal:mean():item()
  local h = moment:clone()
  h:diagonal():add_(dead * (mean > 0 and mean or 1) + damp * mean)
  return h
end

--- A square root s [n, n] of a moment, s' s = moment, and its inverse, by eigenvalues, f64: |s w| is what w' x is by
-- its mean square. Eigenvalues below 1e-12 of the largest are lifted to it: a direction that no input has gets nothing
-- and costs nothing.
---@param moment Tensor [n, n]
---@return Tensor root
---@return Tensor inverse
function M.whiten(moment)
  local values, vectors = ty.eigh(moment:to "f64")
  local least = values:max():item() * 1e-12
  local length = values:clamp(least > 0 and least or 1):sqrt()
  return (vectors * length:unsqueeze(0)):transpose(0, 1), vectors / length:unsqueeze(0)
end

return M
