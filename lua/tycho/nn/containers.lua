--- Modules made of modules. In Lua lists count from 1; their names in state_dict() count from 0, as in public
-- checkpoints.
local base = require "tycho.nn.module"
local options = require "tycho.nn.options"

local define = base.define
local containers = {}

local expect = options.expect

local function check_module(who, at, value) return expect(who, ("module %s"):format(at), value, "a module") end

--- Calls its modules one after the other. Takes modules or one list of them.
---@overload fun(...: Module): Module
local Sequential = define "Sequential"
containers.Sequential = Sequential

function Sequential:init(...)
  local list = table.pack(...)
  if list.n == 1 and type(list[1]) == "table" and not base.is_module(list[1]) then list = list[1] end
  for i = 1, list.n or #list do self[i] = check_module("Sequential", i, list[i]) end
end

function Sequential:forward(x)
  for i = 1, #self do x = self[i](x) end
  return x
end

--- Adds a module at the end; returns self.
function Sequential:append(module)
  self[#self + 1] = check_module(getmetatable(self).__name .. ":append", #self + 1, module)
  return self
end

--- A list of modules: list[1], #list, ipairs(list).
---@overload fun(list?: Module[]): Module
local ModuleList = define "ModuleList"
containers.ModuleList = ModuleList

function ModuleList:init(list)
  expect("ModuleList", "list", list, "a list or nil")
  for i, module in ipairs(list or {}) do self[i] = check_module("ModuleList", i, module) end
end

ModuleList.append = Sequential.append

-- PyTorch counts modules from 0; the nil that is there would be found much later.
for _, class in ipairs { Sequential, ModuleList } do
  local of_class = getmetatable(class)
  local parent = of_class.__index
  of_class.__index = function(_, key)
    if math.type(key) == "integer" and key <= 0 then
      options.fail("%s: [%d]: modules count from 1, as Lua's lists do; the last is [#modules]", class.__name, key)
    end
    return parent[key]
  end
end

-- Tables have no order: sorted names make it the same in every run.
local function names_of(who, map)
  local names = {}
  expect(who, "map", map, "a table or nil")
  for name in pairs(map or {}) do names[#names + 1] = expect(who, "name", name, "a string") end
  table.sort(names)
  return names
end

--- Modules by name: dict.name or dict["name"].
---@overload fun(map?: table<string, Module>): Module
local ModuleDict = define "ModuleDict"
containers.ModuleDict = ModuleDict

function ModuleDict:init(map)
  for _, name in ipairs(names_of("ModuleDict", map)) do self[name] = check_module("ModuleDict", name, map[name]) end
end

--- Parameters by name: dict.name or dict["name"].
---@overload fun(map?: table<string, Tensor>): Module
local ParameterDict = define "ParameterDict"
containers.ParameterDict = ParameterDict

function ParameterDict:init(map)
  for _, name in ipairs(names_of("ParameterDict", map)) do
    local tensor = expect("ParameterDict", name, map[name], "a tensor")
    self[name] = tensor.requires_grad and tensor or tensor:requires_grad_()
  end
end

--- A list of parameters.
local ParameterList = define "ParameterList"
containers.ParameterList = ParameterList

function ParameterList:init(list)
  expect("ParameterList", "list", list, "a list of tensors or nil")
  for i, tensor in ipairs(list or {}) do
    self[i] = tensor.requires_grad and tensor or tensor:requires_grad_()
  end
end

return containers
