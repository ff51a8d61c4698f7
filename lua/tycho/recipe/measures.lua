--- How far two ways to the same numbers are apart: a part of ty.recipe.
local ty = require "tycho"
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

--- The largest difference between what should be the same: two numbers or tensors (in f64), the parameters of two
-- modules, or two lists or tables of such; no number where one of the differences is none.
---@param a number|Tensor|Module|table
---@param b number|Tensor|Module|table
---@return number
function M.apart(a, b)
  local who = "recipe.apart"
  if type(a) == "number" and type(b) == "number" then return math.abs(a - b) end
  if ty.is_tensor(a) and ty.is_tensor(b) then
    if table.concat(a.shape, ", ") ~= table.concat(b.shape, ", ") then
      arguments.fail("%s: b: expected a tensor [%s], as a is, got %s", who, table.concat(a.shape, ", "),
        arguments.describe(b))
    end
    if a:numel() == 0 then return 0.0 end
    local to = { dtype = "f64", device = "cpu" }
    return (a:detach():to(to) - b:detach():to(to)):abs():max():item()
  end
  if arguments.is_module(a) and arguments.is_module(b) then return M.apart(a:parameters(), b:parameters()) end
  if type(a) ~= "table" or type(b) ~= "table" or arguments.is_module(a) or arguments.is_module(b) then
    arguments.fail("%s: expected two numbers, tensors, modules or lists, got %s and %s", who, arguments.describe(a),
      arguments.describe(b))
  end
  local most = 0.0
  for key in pairs(b) do
    if a[key] == nil then arguments.fail("%s: a: expected what b has, got nothing under %s", who, tostring(key)) end
  end
  for key, value in pairs(a) do
    if b[key] == nil then arguments.fail("%s: b: expected what a has, got nothing under %s", who, tostring(key)) end
    local one = M.apart(value, b[key])
    if one > most or one ~= one then most = one end
  end
  return most
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
