--- Folders that are replaced as a whole, such as checkpoints: what is new is written beside, in PATH.partial, and takes
-- the place of what was there by renaming. A kill at any moment leaves the old folder or the new one, at PATH or at
-- PATH.previous.
local io = require("tycho.core").io

local M = {}

--- Removes a folder and all that is in it; nothing where there is none.
---@param path string
function M.remove(path)
  if not io.exists(path) then return end
  for _, name in ipairs(io.listdir(path)) do
    local inside = path .. "/" .. name
    if io.stat(inside).kind == "directory" then M.remove(inside) else io.remove(inside) end
  end
  io.remove(path)
end

--- Makes an empty folder beside `path`, in which the new one is written.
---@param path string
---@return string partial
function M.begin(path)
  local partial = path .. ".partial"
  M.remove(partial)
  io.mkdir(partial)
  return partial
end

local function rename(from, to)
  local ok, problem = os.rename(from, to)
  if not ok then error(problem, 0) end
end

--- What begin() made takes the place of what is at `path`.
---@param path string
---@param partial? string  the folder that does, where it is another one
function M.replace(path, partial)
  local previous = path .. ".previous"
  if io.exists(path) then
    M.remove(previous)
    rename(path, previous)
  end
  rename(partial or path .. ".partial", path)
  M.remove(previous)
end

--- The folder that is complete, which `file` in it says, or nil.
---@param path string
---@param file string  what is written last
---@return string?
function M.find(path, file)
  for _, folder in ipairs { path, path .. ".previous" } do
    if io.exists(folder .. "/" .. file) then return folder end
  end
  return nil
end

return M
