--- The short loop of methods that tune something for a moment: no checkpoints, no log (ty.train.fit has these).
local ty = require "tycho"
local arguments = require "tycho.arguments"

--- Steps an optimizer on the loss that loss(step) gives, each step in a scope of its own. watch(step, value): called
-- after each. Returns the mean loss of the last tenth of the steps, nan where there are none.
---@param optimizer Optimizer
---@param steps integer
---@param loss fun(step: integer): Tensor
---@param watch? fun(step: integer, value: number)
---@return number
return function(optimizer, steps, loss, watch)
  local who = "train.minimize"
  arguments.expect(who, "optimizer", optimizer, "a table")
  arguments.expect(who, "steps", steps, "an integer >= 0")
  arguments.expect(who, "loss", loss, "a function")
  arguments.expect(who, "watch", watch, "a function or nil")
  if type(optimizer.step) ~= "function" then
    arguments.fail("%s: optimizer: expected one of ty.optim, got %s", who, arguments.describe(optimizer))
  end
  local last, sum, counted = math.max(1, steps // 10), 0, 0
  for step = 1, steps do
    ty.scope(function()
      local value = loss(step)
      if not ty.is_tensor(value) then
        arguments.fail("%s: loss: expected it to give a tensor, got %s", who, arguments.describe(value))
      end
      optimizer:step(value)
      value = value:item()
      if step > steps - last then sum, counted = sum + value, counted + 1 end
      if watch then watch(step, value) end
    end)
  end
  return sum / counted
end
