--- Models that are trained once and read ever after.
local ty = require "tycho"
local arguments = require "tycho.arguments"

--- A model with the weights of a file; where there is none, train(model) returns the model that is kept there, the same
-- or its average. It is in evaluation mode.
---@generic T: Module
---@param path string  of a safetensors file; folders on the way are made
---@param model T
---@param train fun(model: T): T
---@return T
return function(path, model, train)
  local who = "train.kept"
  arguments.expect(who, "path", path, "a string")
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "train", train, "a function")
  if ty.io.exists(path) then return model:load(path):eval() end
  local trained = train(model)
  arguments.expect(who, "train(model)", trained, "a module")
  local folder = path:match "^(.+)/"
  if folder then ty.io.mkdir(folder) end
  trained:save(path)
  return trained:eval()
end
