--- Modules of many files: require "tycho.lazy" (M, files). A file is read when its name is first asked for.
---@param M table       what is there from the start
---@param files table<string, string|string[]>  by name: the module that is the value, or { module, its field }
---@return table M
return function(M, files)
  local names = {}
  for name in pairs(files) do names[#names + 1] = name end
  table.sort(names)
  return setmetatable(M, {
    __names = names, -- for completion and help: what is there but not loaded yet
    __index = function(self, name)
      local place = files[name]
      if not place then return nil end
      local value
      if type(place) == "table" then value = require(place[1])[place[2]] else value = require(place) end
      rawset(self, name, value)
      return value
    end,
  })
end
