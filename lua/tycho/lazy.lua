--- Parts and modules as tables of names: require "tycho.lazy" (M, files, title). A file is read when its name is first
-- asked for; a name that is not there is an error that shows the nearest ones.
---@param M table       what is there from the start
---@param files table<string, string|string[]>  by name: the module that is the value, or { module, its field }
---@param title string  what errors call the table: "ty.data", "tycho.models"
---@return table M
return function(M, files, title)
  local names = {}
  for name in pairs(files) do names[#names + 1] = name end
  table.sort(names)
  return setmetatable(M, {
    __names = names, -- for completion and help: what is there but not loaded yet
    __index = function(self, name)
      local place = files[name]
      if not place then
        if type(name) ~= "string" or name:find "^_" then return nil end
        local near = require("tycho.pytorch").instead(title:match "^ty%.(.*)$" or title, name)
          or require("tycho.core").nearest(name, self, names)
        error(("%s has no '%s'%s"):format(title, name, near), 2)
      end
      local value
      if type(place) == "table" then value = require(place[1])[place[2]] else value = require(place) end
      rawset(self, name, value)
      return value
    end,
  })
end
