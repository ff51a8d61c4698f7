--- What training loops do with parameters: nn.utils.
local ty = require "tycho"
local options = require "tycho.nn.options"
local sequences = require "tycho.nn.sequences"

local expect = options.expect
local utils = {}

-- A module, a tensor or a list of tensors as a list.
local function list_of(who, parameters)
  expect(who, "parameters", parameters, "a module or a tensor or a list of tensors")
  if ty.is_tensor(parameters) then return { parameters } end
  return require("tycho.nn.module").is_module(parameters) and parameters:parameters() or parameters
end

local function gradients(who, parameters)
  local grads = {}
  for _, p in ipairs(list_of(who, parameters)) do
    if p.grad then grads[#grads + 1] = p.grad end
  end
  return grads
end

--- The norm of tensors as if they were one.
---@param tensors Tensor[]
---@param norm_type? number  default 2; math.huge: the largest magnitude
---@return Tensor []
function utils.get_total_norm(tensors, norm_type)
  expect("get_total_norm", "tensors", tensors, "a list of tensors")
  expect("get_total_norm", "norm_type", norm_type, "a number > 0 or nil")
  if #tensors == 0 then return ty.zeros {} end
  local norms = {}
  for i, t in ipairs(tensors) do norms[i] = t:detach():float():norm(norm_type or 2):cpu() end
  return ty.stack(norms):norm(norm_type or 2)
end

--- Scales all gradients so that their norm together is at most max_norm; returns the norm before. Optimizers do the
--- same in their step, without a pass of its own: optim.AdamW(model, { clip_norm = 1 }). Pascanu et al. 2013.
---@param parameters Module|Tensor[]|Tensor
---@param max_norm number
---@param norm_type? number  default 2; math.huge: the largest magnitude
---@return Tensor []
function utils.clip_grad_norm_(parameters, max_norm, norm_type)
  expect("clip_grad_norm_", "max_norm", max_norm, "a number >= 0")
  expect("clip_grad_norm_", "norm_type", norm_type, "a number > 0 or nil")
  local grads = gradients("clip_grad_norm_", parameters)
  return ty.no_grad(function()
    local total = utils.get_total_norm(grads, norm_type)
    local factor = max_norm / (total:item() + 1e-6)
    if factor < 1 or factor ~= factor then
      for _, g in ipairs(grads) do g:mul_(factor) end
    end
    return total
  end)
end

--- Cuts every element of all gradients to [-clip_value, clip_value].
---@param parameters Module|Tensor[]|Tensor
---@param clip_value number
function utils.clip_grad_value_(parameters, clip_value)
  expect("clip_grad_value_", "clip_value", clip_value, "a number >= 0")
  ty.optim.clip_grad_value(parameters, clip_value)
end

--- All parameters one after another in one vector.
---@param parameters Module|Tensor[]|Tensor
---@return Tensor [n]
function utils.parameters_to_vector(parameters)
  local parts = {}
  for i, p in ipairs(list_of("parameters_to_vector", parameters)) do parts[i] = p:reshape(-1) end
  if #parts == 0 then return ty.zeros { 0 } end
  return ty.concat(parts)
end

--- Writes a vector back into parameters, in the order of parameters_to_vector.
---@param vector Tensor [n]
---@param parameters Module|Tensor[]|Tensor
function utils.vector_to_parameters(vector, parameters)
  expect("vector_to_parameters", "vector", vector, "a tensor")
  local list, count, at = list_of("vector_to_parameters", parameters), 0, 0
  for _, p in ipairs(list) do count = count + p:numel() end
  if vector.ndim ~= 1 or vector:numel() ~= count then
    options.fail("vector_to_parameters: vector: expected [%d], the elements of all parameters, got %s", count,
      options.describe(vector))
  end
  ty.no_grad(function()
    for _, p in ipairs(list) do
      p:copy_(vector:narrow(0, at, p:numel()):reshape(p.shape))
      at = at + p:numel()
    end
  end)
end

local rnn = {}
for name, fn in pairs(sequences) do rnn[name] = fn end
utils.rnn = require "tycho.lazy" (rnn, {}, "ty.nn.utils.rnn")

return require "tycho.lazy" (utils, {}, "ty.nn.utils")
