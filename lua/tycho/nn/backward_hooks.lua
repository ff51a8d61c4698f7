--- Hooks around a module's part of a backward pass, which Module.__call sets up: tensors are handed through an op that
-- leaves them as they are and whose backward rule sees the gradients of all of them at once.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

-- Where in a packed list tensors stand that want a gradient.
local function places_of(list)
  local places = {}
  for i = 1, list.n do
    if ty.is_tensor(list[i]) and list[i].requires_grad then places[#places + 1] = i end
  end
  return places
end

-- Hands the tensors at `places` of a packed list through. see(grads) gets their gradients by position in the list and
-- returns them, or others.
local function hand_through(name, list, places, see)
  local tensors = {}
  for k, i in ipairs(places) do tensors[k] = list[i] end
  local op = ty.custom_op { name = name, forward = function(_, ...) return ... end, backward = function(_, ...)
    local grads, by_place = table.pack(...), { n = list.n }
    for k, i in ipairs(places) do by_place[i] = grads[k] end
    by_place = see(by_place)
    for k, i in ipairs(places) do grads[k] = by_place[i] end
    return table.unpack(grads, 1, #places)
  end }
  local results = table.pack(op(table.unpack(tensors)))
  for k, i in ipairs(places) do list[i] = results[k] end
end

-- What a hook returned, in place of `grads` when it is something.
local function changed(who, grads, result)
  if result == nil then return grads end
  if ty.is_tensor(result) then result = { result } end
  arguments.expect(who, "what the hook returns", result, "a tensor or a list or nil")
  for i = 1, grads.n do
    if result[i] ~= nil then arguments.expect(who, ("gradient %d of the hook"):format(i), result[i], "a tensor") end
  end
  result.n = grads.n
  return result
end

--- Sets a call's hooks up: changes the packed list of its inputs, and returns a function that does so with its outputs;
-- nil where there are no hooks or nothing is recorded.
---@param module Module
---@param hooks { before_backward: function[], after_backward: function[] }
---@param input table  table.pack() of the inputs
---@return function? outputs
function M.begin(module, hooks, input)
  local befores, afters = hooks.before_backward, hooks.after_backward
  if #befores + #afters == 0 or not ty.is_grad_enabled() then return nil end
  local given = {} -- the gradients of the outputs, in the pass that is under way
  local function after(grads)
    local of_outputs = given
    given = {}
    for _, hook in ipairs(afters) do
      grads = changed("register_full_backward_hook", grads, hook(module, grads, of_outputs))
    end
    return grads
  end
  local inputs = places_of(input)
  if #inputs > 0 then hand_through("backward hook", input, inputs, after) end
  return function(output)
    local outputs = places_of(output)
    if #outputs == 0 then return end
    hand_through("backward pre hook", output, outputs, function(grads)
      for _, hook in ipairs(befores) do
        grads = changed("register_full_backward_pre_hook", grads, hook(module, grads))
      end
      given = grads
      if #inputs == 0 then after { n = input.n } end -- of a first layer: no gradient goes further
      return grads
    end)
  end
end

return M
