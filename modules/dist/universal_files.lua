--- The files of a universal checkpoint: what a rank writes, when all of it counts, and reading it without the tensors.
-- It has no group of ranks: what writes in the background is no rank.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local folders = require "tycho.folders"
local parts_of = require "tycho.dist.universal_parts"
local shipped = require "tycho.shipped"

local fail = arguments.fail
local fs = ty.io
local M = {}

M.version = 1

--- The name of a rank's files, without an ending.
function M.rank_name(rank) return ("rank-%04d"):format(rank) end

--- Writes a rank's files: the tensors by the entries' keys, and the entries, to which is added where each lies in the
-- file. The second file says that the first one is whole.
---@param folder string
---@param rank integer
---@param tensors table<string, Tensor>
---@param entries table[]  { key, name, slot, begin, part }
---@param rate? integer    bytes a second at most (0: no limit)
---@return integer bytes   of the tensors
function M.write(folder, rank, tensors, entries, rate)
  local file, list, bytes = folder .. "/" .. M.rank_name(rank), ty.core.io.array {}, 0
  local sum, places = fs.save_safetensors(file .. ".safetensors", tensors, nil,
    { crc32 = true, places = true, rate = rate })
  for i, e in ipairs(entries) do
    local at = places[e.key]
    bytes = bytes + at.bytes
    local part = {}
    for key, value in pairs(e.part) do part[key] = value end
    part.shape = ty.core.io.array(table.move(part.shape, 1, #part.shape, 1, {}))
    list[i] = { key = e.key, name = e.name, slot = e.slot, begin = e.begin, part = part, at = at.at, bytes = at.bytes,
      crc32 = at.crc32, dtype = tensors[e.key].dtype }
  end
  fs.save_json(file .. ".json", { version = M.version, pieces = list, crc32 = sum })
  return bytes
end

--- Raises unless values are those that a checkpoint keeps.
function M.check_values(who, values)
  for key, value in pairs(values) do
    local fine = type(value) == "string" or type(value) == "boolean"
      or type(value) == "number" and value - value == 0
    if type(key) ~= "string" or not fine then
      fail("%s: values: expected texts, booleans and finite numbers by name, got %s = %s", who, tostring(key),
        arguments.describe(value))
    end
  end
end

--- What all ranks have written takes the place of what is at `path`: the values and the sums come last.
---@param path string
---@param partial string  the folder in which they have
---@param ranks integer
---@param values table
function M.commit(path, partial, ranks, values)
  local sums = {}
  for rank = 0, ranks - 1 do
    local name = M.rank_name(rank)
    sums[name .. ".safetensors"] = fs.load_json(partial .. "/" .. name .. ".json", { values = 10000000 }).crc32
  end
  fs.save_json(partial .. "/state.json", { version = M.version, ranks = ranks, values = values })
  shipped.write_checksums(partial, { sums = sums })
  folders.replace(path, partial)
end

--- A file of ours as a table; raises where it is none.
function M.read_json(who, path)
  local ok, value = pcall(fs.load_json, path, { values = 10000000 })
  if not ok or type(value) ~= "table" then
    fail("%s: %s is damaged: %s", who, path, ok and "it is no table" or tostring(value))
  end
  if value.version ~= M.version then
    fail("%s: %s has format %s, this program reads %d", who, path, tostring(value.version), M.version)
  end
  return value
end

--- How many ranks have saved, and the values.
function M.read_state(who, folder)
  local state = M.read_json(who, folder .. "/state.json")
  local ranks = state.ranks
  if math.type(ranks) ~= "integer" or ranks < 1 or ranks > 65536 then
    fail("%s: %s is damaged: state.json has %s ranks", who, folder, tostring(ranks))
  end
  return ranks, type(state.values) == "table" and state.values or {}
end

--- The list of a rank's pieces, as the file has it.
function M.read_list(who, folder, rank)
  local file = folder .. "/" .. M.rank_name(rank) .. ".json"
  local list = M.read_json(who, file).pieces
  if type(list) ~= "table" then fail("%s: %s is damaged: it has no pieces", who, file) end
  return list
end

local sizes = { f64 = 8, f32 = 4, f16 = 2, bf16 = 2, f8e4m3 = 1, f8e5m2 = 1, i64 = 8, i32 = 4, i16 = 2, i8 = 1, u8 = 1,
  bool = 1 }

--- An entry as it came from a file, with its part and how many elements it has; raises unless it can be so.
function M.check_entry(who, rank, i, entry)
  local function damaged(what)
    fail("%s: %s.json is damaged: piece %d: %s", who, M.rank_name(rank), i, what)
  end
  if type(entry) ~= "table" then damaged "it is no table" end
  for _, key in ipairs { "name", "slot", "key" } do
    if type(entry[key]) ~= "string" then damaged(key) end
  end
  if entry.at == nil then
    fail("%s: %s.json was written by an earlier program; dist.universal.open() reads it", who, M.rank_name(rank))
  end
  for _, key in ipairs { "begin", "at", "bytes", "crc32" } do
    if math.type(entry[key]) ~= "integer" or entry[key] < 0 then damaged(key) end
  end
  local size = sizes[entry.dtype]
  if not size or entry.bytes % size ~= 0 then damaged "dtype" end
  local part, problem = parts_of.read_part(entry.part)
  if not part then damaged(problem) end
  entry.part, entry.count, entry.rank = part, entry.bytes // size, rank
  if entry.begin + entry.count > parts_of.elements(part.own) then damaged "it is longer than its part" end
  return entry
end

--- The tensor of an entry, flat, read from its file; raises where the bytes are not those that were written.
function M.read_entry(who, folder, entry)
  local path = folder .. "/" .. M.rank_name(entry.rank) .. ".safetensors"
  local file = io.open(path, "rb")
  if not file then fail("%s: %s is damaged: there is no %s", who, folder, path) end
  file:setvbuf "no" -- only what is asked for is read
  local text = file:seek("set", entry.at) and file:read(entry.bytes) or ""
  file:close()
  if #text ~= entry.bytes then
    fail("%s: %s is damaged: expected %d bytes of %s of %s, got %d", who, path, entry.bytes, entry.slot, entry.name,
      #text)
  end
  local x = fs.from_bytes(text, entry.dtype)
  local sum = fs.crc32(x)
  if sum ~= entry.crc32 then
    fail("%s: %s is damaged: %s of %s is not as it was written: expected CRC-32 %08x, got %08x", who, path, entry.slot,
      entry.name, entry.crc32, sum)
  end
  return x
end

return M
