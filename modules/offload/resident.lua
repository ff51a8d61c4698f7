-- Bytes that a model has on the device, of all that it has.
local ty = require "tycho"
local arguments = require "tycho.arguments"

--- Bytes of a model's parameters, and of its optimizer's state, that are there now: what an engine has sent away, which
-- is a tensor of the device "meta" meanwhile, does not count.
---@param model Module
---@param optimizer? Optimizer
---@return integer
return function(model, optimizer)
  local who = "offload.resident"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "optimizer", optimizer, "a table or nil")
  if optimizer and type(optimizer.state) ~= "table" then
    arguments.fail("%s: optimizer: expected one of ty.optim, got %s", who, arguments.describe(optimizer))
  end
  local bytes = 0
  local function add(t) if ty.is_tensor(t) and t.device ~= "meta" then bytes = bytes + t:nbytes() end end
  for _, p in ipairs(model:parameters()) do
    add(p)
    for _, value in pairs(optimizer and optimizer.state[p] or {}) do add(value) end
  end
  return bytes
end
