-- A unit that keeps its inputs alone and is computed again for its backward pass: one node of the graph, whose
-- gradients are those of a second forward pass. The inputs go where the plan sends activations; random numbers and
-- autocast are those of the first pass, so that the gradients are the same to the last bit. (But for a parameter that
-- several units share under autocast, whose gradients the graph in memory adds in half precision.)
local ty = require "tycho"

local function is_wanted(value) return ty.is_tensor(value) and value:is_floating_point() end

-- The gradients of the second pass, in the order of `inputs` and the unit's parameters.
local function gradients(engine, self, given)
  local arguments, leaves = { n = self.arguments.n }, {}
  for i = 1, arguments.n do
    local a = self.arguments[i]
    if self.packed[i] then
      local leaf = engine.saved:unpack(self.packed[i]):detach()
      if self.wants[i] then leaves[#leaves + 1] = leaf:requires_grad_() end
      a = leaf
    end
    arguments[i] = a
  end
  for _, p in ipairs(self.parameters) do leaves[#leaves + 1] = p end
  local results = table.pack(ty.autocast(self.autocast, self.forward, self.module,
    table.unpack(arguments, 1, arguments.n)))
  local outputs, grads, k = {}, {}, 0
  for i = 1, results.n do
    if is_wanted(results[i]) then
      k = k + 1
      if given[k] and results[i].requires_grad then
        outputs[#outputs + 1], grads[#grads + 1] = results[i], given[k]
      end
    end
  end
  return ty.grad(outputs, leaves, { grad_outputs = grads, allow_unused = true })
end

--- forward(module, ...) of a unit that has tensors of numbers as inputs, without what it would keep. Tensors among the
-- arguments are found at the top level; the results are tensors and other values at the top level.
---@param engine OffloadEngine
---@param unit ModuleUnit
---@param forward function
---@param module Module
---@return any ...
return function(engine, unit, forward, module, ...)
  local self = { forward = forward, module = module, arguments = table.pack(...), packed = {}, wants = {},
    parameters = {}, autocast = ty.autocast_dtype() }
  local rng, inputs, floats = ty.rng_state(), {}, false
  for i = 1, self.arguments.n do floats = floats or is_wanted(self.arguments[i]) end
  if not floats then return ty.scope(forward, module, ...) end -- an embedding, which keeps its indices alone
  local results = table.pack(ty.no_grad(ty.scope, forward, module, ...))
  for i = 1, self.arguments.n do
    local a = self.arguments[i]
    if is_wanted(a) then
      self.wants[i] = a.requires_grad
      if a.requires_grad then inputs[#inputs + 1] = a end
      self.packed[i] = engine.saved:pack(a:detach())
      self.arguments[i] = false
    end
  end
  for _, p in ipairs(unit.all) do
    if p.requires_grad then
      self.parameters[#self.parameters + 1], inputs[#inputs + 1] = p, p
    end
  end
  local outputs, count = {}, #inputs
  for i = 1, results.n do
    if is_wanted(results[i]) then
      if results[i].requires_grad then results[i] = results[i]:detach() end -- an input handed on
      outputs[#outputs + 1] = results[i]
    end
  end
  ty.record("offload", inputs, outputs, function(...)
    local given, now = table.pack(...), ty.rng_state()
    engine:need(unit)
    engine.again = true
    ty.rng_state(rng)
    local ok, list = pcall(ty.enable_grad, ty.scope, gradients, engine, self, given)
    ty.rng_state(now)
    engine.again = false
    if not ok then error(list, 0) end
    for i = 1, count do
      list[i] = list[i] or nil
      if list[i] then engine.handed[#engine.handed + 1] = list[i] end
    end
    return table.unpack(list, 1, count)
  end)
  return table.unpack(results, 1, results.n)
end
