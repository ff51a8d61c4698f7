--- How much of what varies is foretold.
local ty = require "tycho"
local arguments = require "tycho.arguments"

--- The coefficient of determination, 1 - sum of squared errors / sum of squares around the mean: 1 where all is
-- foretold, 0 for the mean itself, below 0 for worse than it.
---@param measured Tensor|number[]  [n], not all the same
---@param foretold Tensor|number[]  [n]
---@return number
return function(measured, foretold)
  local who = "estimate.r2"
  local function read(what, value)
    if type(value) == "table" then value = ty.tensor(value, { dtype = "f64" }) end
    return arguments.expect(who, what, value, "a tensor"):to { dtype = "f64", device = "cpu" }
  end
  measured, foretold = read("measured", measured), read("foretold", foretold)
  if measured.ndim ~= 1 or measured:numel() < 2 or foretold.ndim ~= 1 or foretold:numel() ~= measured:numel() then
    arguments.fail("%s: expected two times [n] with n > 1, got %s and %s", who, arguments.describe(measured),
      arguments.describe(foretold))
  end
  local around = (measured - measured:mean()):square():sum():item()
  return 1 - (measured - foretold):square():sum():item() / around
end
