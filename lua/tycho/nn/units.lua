-- The parts into which a model is taken apart: what comes and goes together.
local ty = require "tycho"
local surgery = ty.nn.surgery

local function is_container(module)
  local class = getmetatable(module)
  return class == ty.nn.ModuleList or class == ty.nn.Sequential or class == ty.nn.ModuleDict
end

--- A part of a model that comes and goes as one, for what keeps models away in parts.
---@class ModuleUnit
---@field name string
---@field module Module
---@field index integer
---@field params Tensor[]   its own: those of no unit before it
---@field all Tensor[]      its own and those that it shares
---@field outer boolean     of a module around others, which runs while these do

-- Whether a class below asks to be taken apart further.
local function in_parts(module)
  if module._in_parts then return true end
  for _, child in module:named_children() do if in_parts(child) then return true end end
  return false
end

--- The units of a model: each child of a list (nn.ModuleList, nn.Sequential, nn.ModuleDict) with all below it, and each
-- other module that has parameters of its own, with these. A child with a class that has `_in_parts` set is taken apart
-- further. Every parameter is some unit's own.
---@param model Module
---@return ModuleUnit[]
return function(model)
  local units, owner = {}, {}
  local names, modules = surgery.modules(model)
  local by_name, claimed = {}, {}
  for _, name in ipairs(names) do by_name[modules[name]] = name end

  local function add(name, module, params, outer)
    local unit = { name = name, module = module, index = #units + 1, params = {}, all = params, outer = outer }
    for _, p in ipairs(params) do
      if not owner[p] then
        owner[p] = unit
        table.insert(unit.params, p)
      end
    end
    units[unit.index] = unit
  end

  local function visit(module, name)
    if claimed[module] then return end
    claimed[module] = true
    local own = {}
    for _, key in ipairs(module._order) do
      local value = rawget(module, key)
      if ty.is_tensor(value) and module._parameters[key] and module._buffers[key] == nil then own[#own + 1] = value end
    end
    if own[1] then add(name, module, own, #own < #module:parameters()) end
    for _, child in module:named_children() do
      if is_container(module) and not is_container(child) and not in_parts(child) then
        if not claimed[child] then
          claimed[child] = true
          add(by_name[child] or name, child, child:parameters())
        end
      else
        visit(child, by_name[child] or name)
      end
    end
  end
  visit(model, "")
  return units
end
