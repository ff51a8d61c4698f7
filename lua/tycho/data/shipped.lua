--- Files of the data that ships with the project: where they are, and that they are what was put there.
local arguments = require "tycho.arguments"
local shipped = require "tycho.shipped"

local checked = {} -- by path, in this process

--- The path of a file of datasets/, "digits/digits.npz". A file that its folder's checksums.json lists is compared with
-- it, once a process: an error names one that is missing, cut or changed.
---@param name string
---@return string path
return function(name)
  arguments.expect("data.shipped", "name", name, "a string")
  local path, roots = shipped.find("datasets", name)
  if not path then
    arguments.fail("data.shipped: the file datasets/%s is missing: expected it in %s; TYCHO_DATA can name the folder",
      name, table.concat(roots, ", "))
  end
  if not checked[path] then
    local folder, file = path:match "^(.*)/([^/]*)$"
    shipped.verify("data.shipped", folder, { only = file })
    checked[path] = true
  end
  return path
end
