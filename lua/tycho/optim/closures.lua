--- What optimizers whose step calls a closure have in common.
local arguments = require "tycho.arguments"

local M = {}

--- Runs the backward pass of what a closure has returned, unless the closure has: gradients were dropped before it ran.
---@param who string
---@param loss Tensor
---@param groups table[]
---@return Tensor loss
function M.backward_of(who, loss, groups)
  arguments.expect(who, "closure()", loss, "a tensor")
  for _, group in ipairs(groups) do
    for _, p in ipairs(group.params) do
      if p.grad then return loss end
    end
  end
  loss:backward()
  return loss
end

return M
