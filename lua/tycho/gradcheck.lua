--- Whether the gradients of a function are right: ty.gradcheck.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail

-- One number of fn's tensors: their sum with weights that are fixed at the first call.
local function weighted_sum(who, fn)
  local weights = {}
  return function(list)
    local sum
    local outputs = table.pack(fn(table.unpack(list)))
    for i = 1, outputs.n do
      local y = expect(who, "fn(...)", outputs[i], "a tensor")
      weights[i] = weights[i] or ty.unscoped(function() return ty.rand_like(y:detach()) + 0.5 end)
      local part = (y * weights[i]):sum()
      sum = sum and sum + part or part
    end
    return sum or fail("%s: fn: expected it to return a tensor, got nothing", who)
  end
end

-- Compares the gradient of number(list) with central differences, element by element.
local function compare(what, number, list, o)
  local value = number(list)
  local grads = value.requires_grad and ty.grad(value, list, { allow_unused = true }) or {}
  for k, x in ipairs(list) do
    local memory = x:detach():reshape(-1) -- the same numbers: writing here moves x
    local slopes = grads[k] and grads[k]:reshape(-1):tolist()
    for i = 0, memory:numel() - 1 do
      local at = memory[i]:item()
      local function moved(by)
        memory[i] = at + by
        local result = ty.scope(function() return number(list):item() end)
        memory[i] = at
        return result
      end
      local expected = (moved(o.eps) - moved(-o.eps)) / (2 * o.eps)
      local got = slopes and slopes[i + 1] or 0.0
      local near = math.abs(got - expected) <= o.atol + o.rtol * math.abs(expected) -- false for NaN
      if not near then
        fail("gradcheck: %s by argument %d, element %d: expected %.6g, as differences say, got %.6g", what, k, i,
          expected, got)
      end
    end
  end
end

--- Compares the gradients of fn(inputs...), which returns one or several tensors, with central differences at each
-- element of the inputs. Returns true; a gradient that is off is an error that names the argument and the element.
-- Use f64 inputs, of a few elements and away from kinks: f32 has too few digits for more than a rough look. options:
-- eps (1e-6; how far an element is moved), atol (1e-5), rtol (1e-3) (of f32 inputs 1e-2 each), second (false; true:
-- second derivatives as well).
---@param fn fun(...: Tensor): Tensor
---@param inputs Tensor|Tensor[]
---@param options? {eps: number, atol: number, rtol: number, second: boolean}
---@return boolean
local function gradcheck(fn, inputs, options)
  expect("gradcheck", "fn", fn, "a function")
  expect("gradcheck", "inputs", inputs, "a tensor or a list of tensors")
  local list, exact = {}, true
  for i, x in ipairs(ty.is_tensor(inputs) and { inputs } or inputs) do
    if not x:is_floating_point() then fail("gradcheck: inputs: expected float tensors, got %s", x.dtype) end
    exact = exact and x.dtype == "f64"
    list[i] = x:detach():clone():contiguous():requires_grad_()
  end
  if #list == 0 then fail "gradcheck: inputs: expected at least one tensor, got an empty table" end
  local o = arguments.read("gradcheck", options, { eps = exact and 1e-6 or 1e-2, atol = exact and 1e-5 or 1e-2,
    rtol = exact and 1e-3 or 1e-2, second = false },
    { eps = "a finite number > 0", atol = "a finite number >= 0", rtol = "a finite number >= 0" })
  require("tycho.data.dataset").with_seed(0, function()
    local first = weighted_sum("gradcheck", fn)
    compare("the gradient", first, list, o)
    if not o.second then return end
    compare("the second derivative", weighted_sum("gradcheck", function(...)
      local grads = ty.grad(first { ... }, { ... }, { create_graph = true, allow_unused = true })
      local result = {}
      for i = 1, select("#", ...) do
        result[i] = grads[i] or ty.zeros_like(list[i]:detach())
      end
      return table.unpack(result)
    end), list, o)
  end)
  return true
end

return gradcheck
