--- What ops keep for the backward pass, measured layer by layer: peft.saved.
--
--     local report = peft.saved.measure(model, function() return model:loss(pictures, labels) end)
--     print(report.bytes, report.dynamic, report.by_kind["gelu.x"])
--
-- A storage counts once, however many ops keep it or views of it, for the innermost module whose op kept it first;
-- parameters and buffers of the model do not count, since they are there anyway. What is kept is of two sorts.
-- Dynamic is what only gradients of weights need, the inputs of linear layers: it is not kept where the weight is
-- frozen. Static is the rest, which the gradient of the input needs as well. Ardakani et al. 2023, "SlimFit:
-- Memory-Efficient Fine-Tuning of Transformer-based Models Using Training Dynamics".
local ty = require "tycho"
local arguments = require "tycho.arguments"

local tier, surgery = ty.core.tier_core, ty.nn.surgery
local M = {}

-- What is kept for the gradient of the weight alone: arguments by op.
local for_weights = { linear = "x" }

--- The memory of a model's parameters and buffers, as a set of what core.tier_core.memory_of says.
---@param model Module
---@return table<integer, true>
function M.memory(model)
  arguments.expect("peft.saved.memory", "model", model, "a module")
  local set = {}
  for _, t in model:named_parameters() do set[tier.memory_of(t)] = true end
  for _, t in model:named_buffers() do set[tier.memory_of(t)] = true end
  return set
end

-- Runs fn(...) with the names of the modules that run on a stack, the innermost last.
local function with_names(model, stack, fn, ...)
  local undo = {}
  local names, modules = surgery.modules(model)
  for _, name in ipairs(names) do
    local module = modules[name]
    undo[#undo + 1] = module:register_forward_pre_hook(function() stack[#stack + 1] = name end)
    undo[#undo + 1] = module:register_forward_hook(function() stack[#stack] = nil end)
  end
  local results = table.pack(pcall(fn, ...))
  for _, remove in ipairs(undo) do remove() end
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

--- Runs fn(...), in which the model computes with gradients, and says what it keeps. The report:
--   bytes, dynamic, static   in all
--   layers                   a list of { name, bytes, dynamic, static }, in the order in which they first kept any;
--                            name: of the module, "" the model itself
--   by_kind                  bytes by "op.argument" that kept a storage first
-- Returns the report and what fn returns, of which gradients may be asked for.
---@param model Module
---@param fn function
---@return {bytes: integer, dynamic: integer, static: integer, layers: table[], by_kind: table<string, integer>} report
---@return any ...
function M.measure(model, fn, ...)
  local who = "peft.saved.measure"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "fn", fn, "a function")
  local own, stack, known, order = M.memory(model), {}, {}, {}
  local function pack(t, op, what)
    t = ty.keep(t)
    local memory, _, nbytes = tier.memory_of(t)
    if own[memory] then return t end
    local record = known[memory]
    if not record then
      record = { layer = stack[#stack] or "", kind = op .. "." .. what, nbytes = nbytes, dynamic = true }
      known[memory], order[#order + 1] = record, record
    end
    record.dynamic = record.dynamic and for_weights[op] == what
    return t
  end
  local results = table.pack(with_names(model, stack, ty.saved_tensor_hooks, pack, function(t) return t end, fn, ...))
  local report, by_name = { bytes = 0, dynamic = 0, static = 0, layers = {}, by_kind = {} }, {}
  for _, record in ipairs(order) do
    local layer = by_name[record.layer]
    if not layer then
      layer = { name = record.layer, bytes = 0, dynamic = 0, static = 0 }
      by_name[record.layer], report.layers[#report.layers + 1] = layer, layer
    end
    local sort = record.dynamic and "dynamic" or "static"
    for _, to in ipairs { layer, report } do
      to[sort], to.bytes = to[sort] + record.nbytes, to.bytes + record.nbytes
    end
    report.by_kind[record.kind] = (report.by_kind[record.kind] or 0) + record.nbytes
  end
  return report, table.unpack(results, 1, results.n)
end

return M
