--- SAM: steps with the gradient at the worst point nearby.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local closures = require "tycho.optim.closures"

local expect = arguments.expect

---@class SAM
---@field optimizer Optimizer  the one that makes the steps
local SAM = {}
SAM.__index = SAM

local function gradients(self)
  local params, grads = {}, {}
  for _, group in ipairs(self.optimizer.groups) do
    for _, p in ipairs(group.params) do
      if p.grad then
        params[#params + 1], grads[#grads + 1] = p, p.grad
      end
    end
  end
  return params, grads
end

-- Moves the parameters up the gradient; returns them and what they were.
local function climb(self)
  local params, grads = gradients(self)
  local before, along = {}, grads
  if self.adaptive then
    along = {}
    for i, p in ipairs(params) do along[i] = grads[i] * p:abs() end
  end
  if #params == 0 then return params, before end
  local scale = self.rho / (ty.norm_list(along, 2):item() + 1e-12)
  for i, p in ipairs(params) do
    before[i] = p:detach():clone()
    local by = self.adaptive and along[i] * p:abs() or along[i]
    p:add_((by * scale):to(p.dtype))
  end
  return params, before
end

--- One step in two passes. closure() computes the loss with the weights as they are; gradients and backward passes are
-- this function's. Returns the loss at the weights before the step.
---@param closure fun(): Tensor
---@return Tensor loss
function SAM:step(closure)
  expect("SAM:step", "closure", closure, "a function")
  if ty.core.program.is_compiling() then
    arguments.fail "SAM: does not work inside ty.compile: its closure() runs twice; compile what closure() does"
  end
  self.optimizer:zero_grad()
  local loss = closures.backward_of("SAM:step", closure(), self.optimizer.groups)
  local params, before = ty.no_grad(climb, self)
  self.optimizer:zero_grad()
  local result = table.pack(pcall(function()
    closures.backward_of("SAM:step", closure(), self.optimizer.groups)
  end))
  ty.no_grad(function()
    for i, p in ipairs(params) do p:copy_(before[i]) end
  end)
  if not result[1] then error(result[2], 0) end
  self.optimizer:step()
  self.optimizer:zero_grad()
  return loss:detach()
end

--- Drops the gradients of all parameters.
function SAM:zero_grad() self.optimizer:zero_grad() end

--- The state of the optimizer within, and rho.
function SAM:state_dict() return { optimizer = self.optimizer:state_dict(), rho = self.rho } end

--- Takes over a state_dict().
function SAM:load_state_dict(state)
  expect("SAM:load_state_dict", "state", state, "a table")
  expect("SAM:load_state_dict", "state.optimizer", state.optimizer, "a table")
  self.rho = expect("SAM:load_state_dict", "state.rho", state.rho, "a finite number >= 0")
  self.optimizer:load_state_dict(state.optimizer)
end

--- Sharpness-aware minimisation: each step of `optimizer` takes the gradient at the point at distance rho up the slope,
-- and so looks for minima that are flat. A step costs two forward and backward passes. Foret et al. 2021.
--
--     local sam = optim.SAM(optim.SGD(model, { lr = 0.1, momentum = 0.9 }))
--     local loss = sam:step(function() return nn.cross_entropy(model(x), y) end)
--
-- options: rho (0.05), adaptive (false; true: distances relative to the size of the weights, Kwon et al. 2021, with a
-- rho about ten times as large).
---@param optimizer Optimizer
---@param options? table
---@return SAM
return function(optimizer, options)
  if type(optimizer) ~= "table" or type(optimizer.groups) ~= "table" or type(optimizer.step) ~= "function" then
    arguments.fail("SAM: optimizer: expected an optimizer, got %s", arguments.describe(optimizer))
  end
  local o = arguments.read("SAM", options, { rho = 0.05, adaptive = false }, { rho = "a finite number >= 0" })
  return setmetatable({ optimizer = optimizer, rho = o.rho, adaptive = o.adaptive }, SAM)
end
