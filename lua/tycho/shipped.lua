--- Files that ship beside the library: data sets and small trained models, and the checksums they are held to.
local core = require "tycho.core"
local arguments = require "tycho.arguments"

local fs = core.io
local M = {}

local variables = { datasets = "TYCHO_DATA", zoo = "TYCHO_ZOO" }

-- Seen from this file a folder is at the root of the source tree, in PREFIX/share/tycho of an installed one, or in the
-- library's folder of a LuaRocks tree.
local function roots_of(kind)
  local own = os.getenv(variables[kind])
  if own then return { own } end
  local here = debug.getinfo(1, "S").source:match "^@(.*)[/\\][^/\\]*$" or "."
  return { here .. "/../../" .. kind, here .. "/../../../tycho/" .. kind, here .. "/" .. kind }
end

--- The path of a file or folder that ships, nil and the folders that were looked in where it is not there. kind:
-- "datasets" (TYCHO_DATA names another folder) or "zoo" (TYCHO_ZOO).
---@param kind "datasets"|"zoo"
---@param name string
---@return string? path
---@return string[] roots
function M.find(kind, name)
  arguments.expect("shipped.find", "kind", kind, '"datasets" or "zoo"')
  arguments.expect("shipped.find", "name", name, "a string")
  local roots = roots_of(kind)
  for _, root in ipairs(roots) do
    local path = root .. "/" .. name
    if fs.exists(path) then return path, roots end
  end
  return nil, roots
end

--- Names of the folders of a kind, sorted.
---@param kind "datasets"|"zoo"
---@return string[]
function M.names(kind)
  local list = {}
  for _, root in ipairs(roots_of(arguments.expect("shipped.names", "kind", kind, '"datasets" or "zoo"'))) do
    if fs.exists(root) then
      for _, name in ipairs(fs.listdir(root)) do
        if fs.stat(root .. "/" .. name).kind == "directory" then list[#list + 1] = name end
      end
      break
    end
  end
  table.sort(list)
  return list
end

-- ---- checksums: checksums.json is { FILE: { "bytes": N, "crc32": "0123abcd" } } ----

-- Calls fn(name, path, stat) for each file of a folder and, where they are wanted, of the folders in it; names are like
-- "unet/config.json".
local function each_file(folder, folders, fn, prefix)
  for _, name in ipairs(fs.listdir(folder)) do
    local path, full = folder .. "/" .. name, (prefix or "") .. name
    local info = fs.stat(path)
    if info.kind ~= "directory" then
      fn(full, path, info)
    elseif folders then
      each_file(path, true, fn, full .. "/")
    end
  end
end

--- The bytes of all files in a folder.
---@param folder string
---@return integer
function M.size(folder)
  local sum = 0
  arguments.expect("shipped.size", "folder", folder, "a string")
  each_file(folder, true, function(_, _, info) sum = sum + info.size end)
  return sum
end

--- Writes checksums.json, with the sizes and the CRC-32 of the files in a folder. options: skip (names to leave out),
-- sums (the CRC-32 of files that need not be read for it, since whoever wrote them had it then), folders (false: true
-- for the files of the folders in it as well).
---@param folder string
---@param options? { skip?: table<string, true>, sums?: table<string, integer>, folders?: boolean }
function M.write_checksums(folder, options)
  local who = "shipped.write_checksums"
  arguments.expect(who, "folder", folder, "a string")
  local o = arguments.read(who, options, { skip = {}, sums = {}, folders = false })
  local files = {}
  each_file(folder, o.folders, function(name, path, info)
    if name ~= "checksums.json" and not o.skip[name] then
      files[name] = { bytes = info.size, crc32 = ("%08x"):format(o.sums[name] or fs.crc32(path)) }
    end
  end)
  fs.save_json(folder .. "/checksums.json", files)
end

-- The lists of files that checksums.json has; nil where it cannot be understood. Checkpoints of earlier programs have
-- only sums, under "crc32".
local function read(path)
  local ok, list = pcall(fs.load_json, path)
  if not ok or type(list) ~= "table" then return nil end
  if type(list.crc32) == "table" and list.crc32.crc32 == nil then
    local sums = list.crc32
    list = {}
    for name, sum in pairs(sums) do list[name] = { crc32 = sum } end
  end
  for name, entry in pairs(list) do
    if type(name) ~= "string" or type(entry) ~= "table" or type(entry.crc32) ~= "string" then return nil end
  end
  return list
end

local function check_file(who, folder, name, entry)
  local path = folder .. "/" .. name
  local function differs(what, wanted, found)
    arguments.fail("%s: %s is damaged: %s is not as it was written: expected %s %s, got %s", who, folder, name, what,
      wanted, found)
  end
  if not fs.exists(path) then differs("CRC-32", entry.crc32, "no file") end
  local size = fs.stat(path).size
  if entry.bytes and size ~= entry.bytes then differs("bytes", tostring(entry.bytes), size) end
  local sum = ("%08x"):format(fs.crc32(path))
  if sum ~= entry.crc32 then differs("CRC-32", entry.crc32, sum) end
end

--- Raises where a file of a folder is not as checksums.json says. only: one file of it, which passes where the list
-- does not have it. A folder without checksums.json passes unless `required`.
---@param who string  in front of errors
---@param folder string
---@param options? {only?: string, required?: boolean}
function M.verify(who, folder, options)
  arguments.expect("shipped.verify", "who", who, "a string")
  arguments.expect(who, "folder", folder, "a string")
  local o = arguments.read(who, options, { only = arguments.none, required = false }, { only = "a string" })
  local path = folder .. "/checksums.json"
  if not fs.exists(path) then
    if o.required then arguments.fail("%s: %s has no checksums.json", who, folder) end
    return
  end
  local list = read(path)
  if not list then arguments.fail("%s: %s is damaged: checksums.json cannot be read", who, folder) end
  for name, entry in pairs(list) do
    if not o.only or name == o.only then check_file(who, folder, name, entry) end
  end
end

return M
