--- Calibration, block by block: the inputs of a decoder's linear layers on some text, each measured after the layers
-- before it were changed. Only the activations of one block are kept.
local ty = require "tycho"
local moments = require "tycho.quant.moments"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

--- The decoder's list of blocks and its name: the first nn.ModuleList.
---@param who string
---@param model LanguageModel
---@return Module[] blocks
---@return string name
function M.list(who, model)
  if not nn.is_module(model) then error(("%s: expected a language model, got %s"):format(who, type(model)), 0) end
  for name, module in model:named_modules() do
    if getmetatable(module) == nn.ModuleList then return module, name end
  end
  error(("%s: the model has no list of layers (nn.ModuleList)"):format(who), 0)
end

--- The linear layers of the blocks, in order: { name, module, block }. skip: names, or ends of names after a dot, to
-- leave out. Adapters' own layers do not count.
---@param who string
---@param model LanguageModel
---@param skip? string[]
---@return { name: string, module: Module, block: integer }[]
function M.linears(who, model, skip)
  local blocks, prefix = M.list(who, model)
  local found = {}
  for i, block in ipairs(blocks) do
    for _, layer in ipairs(surgery.find(who, block)) do
      local full, out = ("%s.%d.%s"):format(prefix, i - 1, layer.name), false
      for _, ending in ipairs(skip or {}) do out = out or surgery.ends_in(full, ending) end
      if not out then found[#found + 1] = { name = full, module = layer.module, block = i } end
    end
  end
  if #found == 0 then error(("%s: the blocks have no linear layers"):format(who), 0) end
  return found
end

--- Runs the model up to its first block for every batch; returns the arguments that the block is called with.
---@param model LanguageModel
---@param block Module
---@param batches table[]
---@return table[] calls  of table.pack
function M.first_calls(model, block, batches)
  local stop, calls = {}, {}
  for i, batch in ipairs(batches) do
    local remove = block:register_forward_pre_hook(function(_, ...)
      calls[i] = table.pack(...)
      error(stop, 0)
    end)
    local ok, message = pcall(model.forward, model, batch.tokens,
      { cu_seqlens = batch.cu_seqlens, longest = batch.longest, mask = batch.mask })
    remove()
    if ok or message ~= stop then error(message, 0) end
  end
  return calls
end

--- The arguments of the next block: what this one returns for `call`, and the last argument of all blocks.
---@param block Module
---@param call table  of table.pack
---@return table
function M.next_call(block, call)
  local out = table.pack(ty.scope(function() return block(table.unpack(call, 1, call.n)) end))
  return table.move(out, 1, call.n - 1, 1, { n = call.n, [call.n] = call[call.n] })
end

--- Groups the layers of a block that see the same tensor, in the order of their calls: { {layer, ...}, ... }. Layers
-- that no batch reaches (an expert that no token goes to) come last, alone.
---@param block Module
---@param linears { name: string, module: Module }[]
---@param calls table[]  of table.pack
---@return table[] groups
function M.groups(block, linears, calls)
  local order, placed, removes = {}, {}, {}
  for _, layer in ipairs(linears) do
    removes[#removes + 1] = layer.module:register_forward_pre_hook(function(_, x)
      if placed[layer] then return end
      placed[layer] = true
      local last = order[#order]
      if last and rawequal(last.x, x) then last[#last + 1] = layer else order[#order + 1] = { layer, x = x } end
    end)
  end
  local ok, message = pcall(function()
    for _, call in ipairs(calls) do
      ty.scope(function() block(table.unpack(call, 1, call.n)) end)
      for _, group in ipairs(order) do group.x = false end
      local reached = 0
      for _ in pairs(placed) do reached = reached + 1 end
      if reached == #linears then return end
    end
  end)
  for _, remove in ipairs(removes) do remove() end
  if not ok then error(message, 0) end
  for _, layer in ipairs(linears) do
    if not placed[layer] then order[#order + 1] = { layer } end
  end
  return order
end

-- Calls fn with every input of a layer of a block.
local function each_input(layer, block, calls, fn)
  local remove = layer.module:register_forward_pre_hook(function(_, x) fn(x) end)
  local ok, message = pcall(function()
    for _, call in ipairs(calls) do ty.scope(function() block(table.unpack(call, 1, call.n)) end) end
  end)
  remove()
  if not ok then error(message, 0) end
end

-- The sum of x' x over all rows of the inputs of a layer, f64, and their number.
local function second_moment(who, layer, block, calls)
  local moment = moments.new(surgery.sizes(layer.module), layer.module.weight.device)
  each_input(layer, block, calls, function(x) moments.add(moment, x) end)
  moments.check_finite(who, layer.name, moment)
  return moment.sum, moment.count
end

--- Options of walk() with their defaults: rows of the dataset that are looked at, rows at a time, which ones, where.
M.options = { skip = {} }
for key, value in pairs(moments.options) do M.options[key] = value end

--- Where a group stands, as walk() says.
---@class GroupPlace
---@field block Module
---@field calls table[]         what the block is called with, of table.pack
---@field each fun(fn: fun(x: Tensor))  calls fn with every input of the group

--- Goes through the blocks of a model. Layers that see the same input form a group; for each, in the order of their
-- calls, visit(group, moment, count, place) is called with its layers, the sum of x' x over the `count` rows that it
-- saw, f64 [inputs, inputs], and where that is; it may change the layers, and what comes after sees the change. data:
-- llm.data.Packed, or a list of its batches.
---@param who string  in front of errors
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param o table     rows, batch, seed, device, skip as in M.options
---@param visit fun(group: { name: string, module: Module }[], moment: Tensor, count: integer, place: GroupPlace)
function M.walk(who, model, data, o, visit)
  moments.check(who, o)
  local blocks, linears = M.list(who, model), M.linears(who, model, o.skip)
  local batches = moments.batches(who, data, o)
  local was_training = model.training
  model:eval()
  local ok, message = pcall(ty.no_grad, function()
    local calls = M.first_calls(model, blocks[1], batches)
    ty.core.program.renew()
    for i, block in ipairs(blocks) do
      local mine = {}
      for _, layer in ipairs(linears) do
        if layer.block == i then mine[#mine + 1] = layer end
      end
      if #mine > 0 then
        for _, group in ipairs(M.groups(block, mine, calls)) do
          ty.scope(function()
            local moment, count = second_moment(who, group[1], block, calls)
            visit(group, moment, count, { block = block, calls = calls,
              each = function(fn) each_input(group[1], block, calls, fn) end })
            moment:free()
          end)
          ty.core.program.renew()
        end
      end
      if i < #blocks then
        for k, call in ipairs(calls) do calls[k] = M.next_call(block, call) end
      end
    end
  end)
  model:train(was_training)
  if not ok then error(message, 0) end
end

return M
