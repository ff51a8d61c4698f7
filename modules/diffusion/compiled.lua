--- A network whose calls are recorded and replayed (ty.compile), for sampling and for training of parts around it.
local ty = require "tycho"
local conditions = require "tycho.diffusion.condition"

-- A function that puts a list of tensors back into a condition of this structure.
local function builder(condition, at)
  local fields = {}
  for _, key in ipairs(conditions.keys(condition)) do
    local value = condition[key]
    if ty.is_tensor(value) then
      at.count = at.count + 1
      local i = at.count
      fields[key] = function(list) return list[i] end
    elseif type(value) == "table" then
      fields[key] = builder(value, at)
    else
      fields[key] = function() return value end
    end
  end
  return function(list)
    local result = {}
    for key, field in pairs(fields) do result[key] = field(list) end
    return result
  end
end

-- What distinguishes structures: paths of the tensors, values of the rest.
local function signature(condition, parts, path)
  for _, key in ipairs(conditions.keys(condition)) do
    local value, here = condition[key], path .. "." .. tostring(key)
    if type(value) == "table" then
      signature(value, parts, here)
    else
      parts[#parts + 1] = ty.is_tensor(value) and here or ("%s=%s:%s"):format(here, type(value), tostring(value))
    end
  end
  return parts
end

--- A network whose calls are recorded and replayed by ty.compile, for samplers.
---@class CompiledNetwork
local Compiled = {}
Compiled.__index = Compiled

function Compiled:__call(x, t, condition)
  condition = condition or {}
  local key = table.concat(signature(condition, {}, ""), "\0")
  local replay = self.replays[key]
  if not replay then
    local build, model = builder(condition, { count = 0 }), self.model
    replay = ty.compile(function(...)
      local list = { ... }
      return model(list[1], list[2], build { table.unpack(list, 3) })
    end)
    self.replays[key] = replay
  end
  local list = { x, t }
  for _, entry in ipairs(conditions.tensors(condition)) do list[#list + 1] = entry[2] end
  return replay(table.unpack(list))
end

function Compiled:device() return self.model.device and self.model:device() or "cpu" end

--- A network that is called like `model` and gives the same numbers, from recordings: one for each structure and each
-- shape of its arguments. model: a module or a table with the fields of one. It serves all samplers and guidances.
---@param model Module
---@return CompiledNetwork
local function compiled(model)
  require("tycho.arguments").expect("diffusion.compiled", "model", model, "a table")
  local self = setmetatable({ model = model, null_label = model.null_label, replays = {} }, Compiled)
  if model.null_condition then
    self.null_condition = function(_, condition) return model:null_condition(condition) end
  end
  return self
end

return compiled
