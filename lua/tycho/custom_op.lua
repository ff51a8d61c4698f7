--- Ops with a backward rule written in Lua.
--
--     local cube = ty.custom_op {
--       name = "cube",
--       forward = function(ctx, x) ctx:save(x) return x * x * x end,
--       backward = function(ctx, g) local x = ctx:saved() return g * 3 * x * x end,
--     }
local ty = require "tycho"
local checks = require "tycho.arguments"

local expect = checks.expect

local Context = {}
Context.__index = Context

--- Keeps tensors for backward. Inputs keep their history, so that second derivatives are right; results of forward are
-- kept as constants.
function Context:save(...) self._saved = table.pack(...) end

--- The kept tensors.
function Context:saved()
  local saved = self._saved
  if not saved then return end
  return table.unpack(saved, 1, saved.n)
end

-- An output among the kept tensors would hold its own node alive: a detached view of it does not.
local function hold(saved, inputs)
  if not saved then return end
  local is_input = {}
  for _, x in ipairs(inputs) do is_input[x] = true end
  for i = 1, saved.n do
    if ty.is_tensor(saved[i]) then saved[i] = ty.keep(is_input[saved[i]] and saved[i] or saved[i]:detach()) end
  end
end

local function shape_text(t) return table.concat(t.shape, ", ") end

--- Makes a function of forward(ctx, ...), which runs without recording, and backward(ctx, g1, ...), which gets the
-- gradient of each result (nil: none came) and returns one for each argument of forward (nil: none). ctx is a table for
-- anything that backward needs; ctx:save(...) and ctx:saved() are for tensors.
---@param spec {name: string, forward: function, backward: function}
---@return function op
local function custom_op(spec)
  expect("custom_op", "spec", spec, "a table")
  local name = expect("custom_op", "name", spec.name, "a string or nil") or "custom op"
  local forward = expect("custom_op", "forward", spec.forward, "a function")
  local backward = expect("custom_op", "backward", spec.backward, "a function")
  return function(...)
    local ctx = setmetatable({}, Context)
    local arguments = table.pack(...)
    local inputs, positions, shapes = {}, {}, {}
    for i = 1, arguments.n do
      if ty.is_tensor(arguments[i]) then
        inputs[#inputs + 1], positions[#positions + 1] = arguments[i], i
        shapes[#inputs] = shape_text(arguments[i])
      end
    end
    local results = table.pack(ty.no_grad(forward, ctx, ...))
    local outputs = {}
    for i = 1, results.n do
      local result = results[i]
      if not ty.is_tensor(result) then
        checks.fail("%s: forward: expected tensors as results, got %s", name, checks.describe(result))
      end
      -- An input handed through needs a tensor of its own, which can get a history.
      for _, x in ipairs(inputs) do
        if rawequal(x, result) then result = result:detach() end
      end
      outputs[i] = result
    end
    hold(ctx._saved, inputs)
    ty.record(name, inputs, outputs, function(...)
      local grads = table.pack(backward(ctx, ...))
      local wanted = {}
      for i, position in ipairs(positions) do
        local grad = grads[position]
        if ty.is_tensor(grad) and shape_text(grad) ~= shapes[i] then
          error(("%s: backward: the gradient of argument %d must have shape [%s], got [%s]")
            :format(name, position, shapes[i], shape_text(grad)), 0)
        end
        wanted[i] = grad
      end
      return table.unpack(wanted, 1, #positions)
    end)
    return table.unpack(outputs, 1, #outputs)
  end
end

return custom_op
