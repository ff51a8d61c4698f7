--- How an op is called over and over: forward, or forward with backward. Both release what a call made.
local ty = require "tycho"

local calls = {}

function calls.forward(forward)
  local function run() forward() end -- what a scope's function returns outlives the scope
  return function() ty.scope(run) end
end

--- inputs: the tensors that want gradients; g: the gradient of what forward() returns, nil for a scalar loss.
function calls.both(inputs, g, forward)
  for _, x in ipairs(inputs) do x:requires_grad_() end
  return function()
    ty.scope(function()
      for _, x in ipairs(inputs) do x:set_grad() end
      forward():backward(g)
    end)
  end
end

return calls
