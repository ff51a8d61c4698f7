-- ZeRO-Offload: parameters in half precision on the device, from which gradients go to the host as they appear; the f32
-- parameters and the moments live on the host, where a native thread steps the optimizer and from which half-precision
-- parameters go back. With the delayed update the thread works on the gradients of the last step while those of this
-- one are computed. Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training", sections 4 and 5.
--
-- The device is the CPU here: what ty.memory counts. The host's memory is beside it.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local tier = ty.core.tier_core

--- What offload.zero_offload makes.
---@class ZeroOffload
---@field steps integer
local ZeroOffload = {}
ZeroOffload.__index = ZeroOffload

-- In the thread: the optimizer's step for one of the two sets of gradients.
local function worker(masters, sets, name, settings)
  local tycho = require "tycho"
  local optimizer = tycho.optim[name](masters, settings)
  local function place(_, _, made) -- moments are the host's as well
    local moved = tycho.core.tier_core.host(made)
    made:free()
    return moved
  end
  optimizer.rules = setmetatable({ place = place }, { __index = optimizer.rules })
  return function(which)
    for i, p in ipairs(masters) do p:set_grad(sets[which][i]) end
    optimizer:step()
    return optimizer.steps
  end
end

local function host(tensor) return ty.keep(tier.host(tensor)) end

--- Takes a model in charge: its parameters become half-precision ones. options:
--   optimizer  the name of one in ty.optim ("AdamW"), which runs in a thread with settings
--   settings   its options: numbers and booleans ({})
--   dtype      "bf16" or "f16", of the parameters on the device
--   delayed    true: step t's update runs beside the computing of step t + 1 (false)
--   from       the step from which it is delayed (0), so that the first ones are not
---@param model Module
---@param options? table
---@return ZeroOffload
function ZeroOffload.new(model, options)
  arguments.expect("offload.zero_offload", "model", model, "a module")
  local o = arguments.read("offload.zero_offload", options, { optimizer = "AdamW", settings = {}, dtype = "bf16",
    delayed = false, from = 0 }, { optimizer = "a string", settings = "a table", dtype = '"bf16" or "f16"',
    delayed = "a boolean", from = "an integer >= 0" })
  if not ty.optim[o.optimizer] then
    arguments.fail("offload.zero_offload: optimizer: expected a name in ty.optim, got %s",
      arguments.describe(o.optimizer))
  end
  local self = setmetatable({ model = model, steps = 0, options = o, masters = {}, sets = { {}, {} }, undo = {},
    which = 1, arrived = {} }, ZeroOffload)
  for i, p in ipairs(model:parameters()) do
    if not p.requires_grad or p.device ~= "cpu" then
      arguments.fail "offload.zero_offload: model: expected parameters on the CPU that require gradients"
    end
    local master = p:detach():to "f32"
    self.masters[i] = host(master)
    for _, set in ipairs(self.sets) do set[i] = host(ty.zeros_like(master)) end
  end
  model:to(o.dtype)
  self.parameters = model:parameters()
  for i, p in ipairs(self.parameters) do
    local hook = p:register_hook(function(g)
      g:free()
      self:collect()
      self.arrived[1] = i
    end)
    self.undo[i] = hook.remove
  end
  self.thread = ty.thread.new(worker, self.masters, self.sets, o.optimizer, o.settings)
  return self
end

-- The gradient whose hook ran last is in its place by now: it goes to the host.
function ZeroOffload:collect()
  local i = table.remove(self.arrived)
  if not i then return end
  local p = self.parameters[i]
  local g = p.grad
  ty.no_grad(function() self.sets[self.which][i]:copy_(g) end)
  p:set_grad()
  g:free()
end

-- What the thread has stepped comes to the device.
function ZeroOffload:send_back()
  ty.no_grad(function()
    for i, p in ipairs(self.parameters) do p:copy_(self.masters[i]) end
  end)
end

--- Waits for an update that is under way; the parameters have it then.
function ZeroOffload:finish()
  if not self.busy then return end
  self.busy = false
  self.thread:receive()
  self:send_back()
end

--- One step: fn(...) computes the loss, its gradients go to the host as they come, which steps. Returns the loss.
---@param fn function  returns the loss, a tensor of one element
---@return number loss
function ZeroOffload:step(fn, ...)
  arguments.expect("ZeroOffload:step", "fn", fn, "a function")
  ty.no_grad(function() -- what gets no gradient in this step has none of an older one
    for _, g in ipairs(self.sets[self.which]) do g:zero_() end
  end)
  local result = table.pack(pcall(ty.scope, function(...)
    local loss = fn(...)
    arguments.expect("ZeroOffload:step", "fn", loss, "a tensor")
    loss:backward()
    self:collect()
    return loss:item()
  end, ...))
  if not result[1] then
    self.arrived = {}
    self.model:zero_grad()
    error(result[2], 0)
  end
  self:finish()
  self.thread:send(self.which)
  self.busy, self.which = true, 3 - self.which
  if not self.options.delayed or self.steps < self.options.from then self:finish() end
  self.steps = self.steps + 1
  return result[2]
end

--- Bytes on the host: parameters and both sets of gradients in f32. The moments, which the thread's optimizer makes,
-- are beside them.
---@return integer
function ZeroOffload:host_bytes()
  local bytes = 0
  for _, p in ipairs(self.masters) do bytes = bytes + 3 * p:nbytes() end
  return bytes
end

--- Ends the thread and gives the model the f32 parameters back.
function ZeroOffload:close()
  if self.closed then return end
  self:finish()
  self.closed = true
  for _, remove in ipairs(self.undo) do remove() end
  self.thread:close()
  self.model:to "f32"
  ty.no_grad(function()
    for i, p in ipairs(self.model:parameters()) do p:copy_(self.masters[i]) end
  end)
end

return ZeroOffload
