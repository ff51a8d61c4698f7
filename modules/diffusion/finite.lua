--- Numbers that are none, found where they begin: a part of a sampler that ends a run whose network says NaN or
-- infinity, with the step and the module, in the place of a picture of noise.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect = arguments.expect
local M = {}

-- Where it began, by doing it once more under a watch that is too slow for every day.
local function blame(model, again)
  local options = { model = arguments.is_module(model) and model or nil }
  for _, infinite in ipairs { false, true } do
    options.infinite = infinite
    local ok, found = pcall(ty.profile.blame, again, options)
    if ok and found then return tostring(found) end
  end
  return nil
end

--- Raises an error unless all numbers of y are finite. what: in front of it, what y is; again(): makes y once more;
-- model: whose module is to be named.
---@param who string
---@param what string
---@param y Tensor
---@param again fun(): Tensor
---@param model? Module
---@return Tensor y
function M.check(who, what, y, again, model)
  expect("finite.check", "who", who, "a string")
  expect("finite.check", "what", what, "a string")
  expect("finite.check", "y", y, "a tensor")
  expect("finite.check", "again", again, "a function")
  if y:isfinite():all():item() then return y end
  local where = blame(model, again)
  arguments.fail("%s: %s: expected finite numbers, got NaN or infinity%s%s", who, what, where and "; " or "",
    where or "")
end

local Part = {}
Part.__index = Part

--- A part of a sampler that looks at what the network says at every call. who: in front of errors; model: whose module
-- is named in them.
---@param who string
---@param model? Module
---@return table part
function M.part(who, model)
  expect("finite.part", "who", who, "a string")
  return setmetatable({ who = who, model = model }, Part)
end

function Part:call(run, next, request)
  local x = request.x
  if not x:isfinite():all():item() then
    arguments.fail("%s: step %d of %d: expected a sample of finite numbers, got NaN or infinity%s", self.who, run.step,
      #run.points - 1, run.step == 1 and " to begin with" or ", of a step or a part of the sampler")
  end
  return M.check(self.who, ("step %d of %d, what the network says"):format(run.step, #run.points - 1), next(request),
    function() return next(request) end, self.model)
end

return M
