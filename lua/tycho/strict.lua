--- Tables of functions that say what they do not have: require "tycho.strict" (ty.nn, "ty.nn").
--
-- ty.nn.Linnear is then an error that names the nearest names, at the line that asked, and no nil that is called later.
-- Names that begin with "_", which programs ask any table for, and keys that are no names stay nil; rawget() asks
-- without an error.
local core = require "tycho.core"

---@param part table   what is there; one whose metatable loads more keeps it
---@param title string as users write it
---@return table part
return function(part, title)
  local meta = getmetatable(part) or {}
  local load = meta.__index
  meta.__index = function(self, name)
    local value
    if load then value = load(self, name) end
    if value ~= nil or type(name) ~= "string" or name:sub(1, 1) == "_" then return value end
    error(("%s has no '%s'%s"):format(title, name, core.nearest(name, self, meta.__names or {})), 2)
  end
  return setmetatable(part, meta)
end
