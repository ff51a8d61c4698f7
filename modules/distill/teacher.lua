--- A network that others learn from: it does not change, no gradients are kept of it, and what it is asked is counted.
local ty = require "tycho"
local arguments = require "tycho.arguments"

--- A frozen network whose evaluations are counted. It is called as the network is, and has its fields: null_label, say,
-- so that samplers take it in the network's place.
---@class Teacher
---@field model Module
---@field evaluations integer  samples that went through the network so far
local Teacher = {}
Teacher.__name = "Teacher"

function Teacher.__index(self, key)
  local own = rawget(Teacher, key)
  if own ~= nil then return own end
  return rawget(self, "model")[key]
end

--- What the network says, without gradients, in evaluation mode; the first argument's rows are counted.
---@param x Tensor
---@return Tensor
function Teacher:__call(x, ...)
  arguments.expect("Teacher", "x", x, "a tensor")
  if x.ndim == 0 then arguments.fail("Teacher: x: expected rows [n, ...], got a tensor of no dimension") end
  self.evaluations = self.evaluations + x.shape[1]
  return ty.no_grad(self.model, x, ...)
end

--- The device of the network.
function Teacher:device() return self.model:device() end

--- What stands for no condition, where the network says so.
function Teacher:null_condition(condition)
  local own = self.model.null_condition
  return own and own(self.model, condition) or {}
end

--- Freezes a network: its parameters want no gradients, it is in evaluation mode. A teacher is returned as it is.
---@param model Module|Teacher
---@return Teacher
local function new(model)
  if getmetatable(model) == Teacher then return model end
  arguments.expect("distill.teacher", "model", model, "a module")
  return setmetatable({ model = model:requires_grad_(false):eval(), evaluations = 0 }, Teacher)
end

return new
