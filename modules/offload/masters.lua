-- What trainers share whose model computes in half precision on a device while its f32 parameters, and the optimizer
-- that steps them, are on the host: the hooks that take each gradient as it appears, a step and its errors.
local ty = require "tycho"
local arguments = require "tycho.arguments"

--- A trainer of half-precision parameters with f32 ones on the host. A class made of it has, besides new():
--   before()          before the forward pass
--   take(i, grad)     the gradient of parameter number i is whole; nobody else has it. True: it is kept
--   update()          all gradients were taken: the optimizer steps
--   finish()          waits for what update() left under way
---@class OffloadMasters
---@field steps integer
---@field parameters Tensor[]  of the model, in half precision
---@field masters Tensor[]     the same in f32, on the host
local Masters = {}
Masters.__index = Masters

--- A class of trainers, whose errors begin with its name.
---@param name string
---@return table
function Masters.define(name)
  local class = setmetatable({ name = name }, { __index = Masters })
  class.__index = class
  return class
end

--- The optimizer of a name, of those that ty.optim has.
---@param who string  for errors
---@param name string
---@return table
function Masters.optimizer(who, name)
  local ok, made = pcall(function() return ty.optim[name] end)
  if ok and made then return made end
  arguments.fail("%s: optimizer: expected a name in ty.optim, got %s%s", who, arguments.describe(name),
    ty.core.nearest(name, ty.optim))
end

--- Takes a model in charge: its parameters become half-precision ones.
---@param class table
---@param who string  for errors
---@param model Module
---@param dtype string  "bf16" or "f16"
---@param host fun(t: Tensor): Tensor  a copy of a tensor in the host's memory
---@param devices string  pattern of the devices on which the parameters may be
function Masters.open(class, who, model, dtype, host, devices)
  local self = setmetatable({ model = model, steps = 0, masters = {}, undo = {}, arrived = {} }, class)
  for i, p in ipairs(model:parameters()) do
    if not p.requires_grad or not tostring(p.device):find(devices) then
      arguments.fail("%s: model: expected parameters on the CPU%s that require gradients", who,
        devices:find "cuda" and " or a GPU" or "")
    end
    self.masters[i] = host(p:detach():to "f32")
  end
  model:to(dtype)
  self.parameters = model:parameters()
  for i, p in ipairs(self.parameters) do
    local hook = p:register_hook(function(g)
      g:free()
      self:collect()
      self.arrived[1] = i
    end)
    self.undo[i] = hook.remove
  end
  return self
end

-- The gradient whose hook ran last is in its place by now.
function Masters:collect()
  local i = table.remove(self.arrived)
  if not i then return end
  local p = self.parameters[i]
  local g = p.grad
  p:set_grad()
  if not ty.no_grad(function() return self:take(i, g) end) then g:free() end
end

--- One step: fn(...) computes the loss, its gradients are taken as they come, the optimizer steps. Returns the loss.
---@param fn function  returns the loss, a tensor of one element
---@return number loss
function Masters:step(fn, ...)
  arguments.expect(self.name .. ":step", "fn", fn, "a function")
  ty.no_grad(function() self:before() end)
  local result = table.pack(pcall(ty.scope, function(...)
    local loss = fn(...)
    arguments.expect(self.name .. ":step", "fn", loss, "a tensor")
    loss:backward()
    self:collect()
    return ty.keep(loss:detach())
  end, ...))
  if not result[1] then
    self.arrived = {}
    self.model:zero_grad()
    error(result[2], 0)
  end
  self:update() -- before anybody waits for the loss
  self.steps = self.steps + 1
  local value = result[2]:item()
  result[2]:free()
  return value
end

--- Lets go of the model and gives it the f32 parameters back.
function Masters:close()
  if self.closed then return end
  self:finish()
  self.closed = true
  for _, remove in ipairs(self.undo) do remove() end
  if self.thread then self.thread:close() end
  self.model:to "f32"
  ty.no_grad(function()
    for i, p in ipairs(self.model:parameters()) do p:copy_(self.masters[i]) end
  end)
end

return Masters
