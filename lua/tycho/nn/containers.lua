--- Modules made of modules. In Lua lists count from 1; their names in state_dict() count from 0, as in public
-- checkpoints.
local base = require "tycho.nn.module"
local ty = require "tycho"

local define = base.define
local containers = {}

local function check_module(who, value)
  if not base.is_module(value) then
    error(("%s: expected a module, got %s"):format(who, type(value)), 4)
  end
  return value
end

--- Calls its modules one after the other. Takes modules or one list of them.
---@overload fun(...: Module): Module
local Sequential = define "Sequential"
containers.Sequential = Sequential

function Sequential:init(...)
  local list = { ... }
  if #list == 1 and type(list[1]) == "table" and not base.is_module(list[1]) then list = list[1] end
  for i, module in ipairs(list) do self[i] = check_module("Sequential", module) end
end

function Sequential:forward(x)
  for i = 1, #self do x = self[i](x) end
  return x
end

--- Adds a module at the end; returns self.
function Sequential:append(module)
  self[#self + 1] = check_module("append", module)
  return self
end

--- A list of modules: list[1], #list, ipairs(list).
---@overload fun(list?: Module[]): Module
local ModuleList = define "ModuleList"
containers.ModuleList = ModuleList

function ModuleList:init(list)
  for i, module in ipairs(list or {}) do self[i] = check_module("ModuleList", module) end
end

ModuleList.append = Sequential.append

--- Modules by name: dict.name or dict["name"].
---@overload fun(map?: table<string, Module>): Module
local ModuleDict = define "ModuleDict"
containers.ModuleDict = ModuleDict

function ModuleDict:init(map)
  -- Tables have no order: sorted names make it the same in every run.
  local names = {}
  for name in pairs(map or {}) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do self[name] = check_module("ModuleDict", map[name]) end
end

--- A list of parameters.
local ParameterList = define "ParameterList"
containers.ParameterList = ParameterList

function ParameterList:init(list)
  for i, tensor in ipairs(list or {}) do
    if not ty.is_tensor(tensor) then error("ParameterList: expected a tensor, got " .. type(tensor), 3) end
    self[i] = tensor.requires_grad and tensor or tensor:requires_grad_()
  end
end

return containers
