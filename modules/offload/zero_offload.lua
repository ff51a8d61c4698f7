-- ZeRO-Offload: parameters in half precision on the device, from which gradients go to the host as they appear; the f32
-- parameters and the moments live on the host, where a native thread steps the optimizer and from which half-precision
-- parameters go back. With the delayed update the thread works on the gradients of the last step while those of this
-- one are computed. Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training", sections 4 and 5.
--
-- The device is the CPU here: what ty.memory counts. The host's memory is beside it.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Masters = require "tycho.offload.masters"

local tier = ty.core.tier_core

--- What offload.zero_offload makes.
---@class ZeroOffload: OffloadMasters
local ZeroOffload = Masters.define "ZeroOffload"

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
  local known, make = pcall(function() return ty.optim[o.optimizer] end)
  if not known or not make then
    arguments.fail("offload.zero_offload: optimizer: expected a name in ty.optim, got %s",
      arguments.describe(o.optimizer))
  end
  local self = Masters.open(ZeroOffload, "offload.zero_offload", model, o.dtype, host, "^cpu$")
  self.options, self.which, self.sets = o, 1, { {}, {} }
  for _, set in ipairs(self.sets) do
    for i, master in ipairs(self.masters) do set[i] = host(ty.zeros_like(master)) end
  end
  self.thread = ty.thread.new(worker, self.masters, self.sets, o.optimizer, o.settings)
  return self
end

-- What gets no gradient in this step has none of an older one.
function ZeroOffload:before()
  for _, g in ipairs(self.sets[self.which]) do g:zero_() end
end

function ZeroOffload:take(i, g) self.sets[self.which][i]:copy_(g) end

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

function ZeroOffload:update()
  self:finish()
  self.thread:send(self.which)
  self.busy, self.which = true, 3 - self.which
  if not self.options.delayed or self.steps < self.options.from then self:finish() end
end

--- Bytes on the host: parameters and both sets of gradients in f32. The moments, which the thread's optimizer makes,
-- are beside them.
---@return integer
function ZeroOffload:host_bytes()
  local bytes = 0
  for _, p in ipairs(self.masters) do bytes = bytes + 3 * p:nbytes() end
  return bytes
end

return ZeroOffload
