--- How far two ways to the same numbers are apart: a part of ty.recipe.
local arguments = require "tycho.arguments"

local M = {}

--- The largest difference of two tensors, of the largest element of the second; in f64, on the CPU.
---@param a Tensor
---@param b Tensor
---@return number
function M.distance(a, b)
  arguments.expect("recipe.distance", "a", a, "a tensor")
  arguments.expect("recipe.distance", "b", b, "a tensor")
  a, b = a:to { dtype = "f64", device = "cpu" }, b:to { dtype = "f64", device = "cpu" }
  return (a - b):abs():max():item() / b:abs():max():item()
end

-- What a form makes of the inputs in a dtype, and its gradients for them under the incoming gradient g.
local function run(form, inputs, g, dtype)
  local leaves, results = {}, {}
  for i, value in ipairs(inputs) do leaves[i] = value:to(dtype):detach():clone():requires_grad_() end
  local y = form(table.unpack(leaves))
  y:backward(g:to(dtype))
  for i, leaf in ipairs(leaves) do results[i] = leaf.grad end
  return y:detach(), results
end

--- Distances of fn(inputs...) from reference(inputs...) in f64: of the result, and the largest of the gradients.
---@param fn fun(...: Tensor): Tensor
---@param reference fun(...: Tensor): Tensor
---@param inputs Tensor[]  in the dtype that fn is run in
---@param g Tensor         the incoming gradient
---@return number result, number gradients
function M.from_reference(fn, reference, inputs, g)
  arguments.expect("recipe.from_reference", "fn", fn, "a function")
  arguments.expect("recipe.from_reference", "reference", reference, "a function")
  arguments.expect("recipe.from_reference", "inputs", inputs, "a list of tensors")
  arguments.expect("recipe.from_reference", "g", g, "a tensor")
  local y, gradients = run(fn, inputs, g, g.dtype)
  local want, exact = run(reference, inputs, g, "f64")
  local worst = 0
  for i in ipairs(exact) do worst = math.max(worst, M.distance(gradients[i], exact[i])) end
  return M.distance(y, want), worst
end

return M
