--- Datasets in files of many items: lines of JSON, and tar archives whose neighbours with one name are an item (the
-- layout of WebDataset). Files are gone through once, for where items lie; an item is read when it is asked for.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.data.dataset"
local audio = require "tycho.data.audio"
local pictures = require "tycho.data.pictures"

local expect = arguments.expect
local M = {}

local MOST_ENTRIES, MOST_NAME = 1 << 24, 1 << 16

local function open(who, path)
  local file, problem = io.open(path, "rb")
  if not file then arguments.fail("%s: %s", who, problem) end
  local text, wrong = file:read(0) -- a folder can be opened, not read
  if not text and wrong then arguments.fail("%s: %s: %s", who, path, wrong) end
  return file
end

-- ---- lines of JSON ----

local Lines = datasets.class "Lines"

--- The lines of a JSONL file, each decoded when it is asked for; empty lines are left out. options: fields (a list:
-- only these of each object).
---@param path string
---@param options? {fields: string[]}
---@return table dataset
function M.jsonl(path, options)
  expect("data.jsonl", "path", path, "a string")
  local o = arguments.read("data.jsonl", options, { fields = arguments.none }, { fields = "a list of strings" })
  local file <close> = open("data.jsonl", path)
  local starts, sizes, at = {}, {}, 0
  for line in file:lines "L" do
    if line:find "%S" then starts[#starts + 1], sizes[#sizes + 1] = at, #line end
    at = at + #line
  end
  if #starts == 0 then arguments.fail("data.jsonl: %s has no lines", path) end
  return setmetatable({ path = path, fields = o.fields, size = #starts,
    starts = ty.keep(ty.tensor(starts, { dtype = "i64" })), sizes = ty.keep(ty.tensor(sizes, { dtype = "i64" })) },
    Lines)
end

function Lines:describe() return "from " .. self.path end

local function part_of_file(who, path, start, size)
  local file <close> = open(who, path)
  file:seek("set", start)
  local bytes = file:read(size)
  if not bytes or #bytes < size then arguments.fail("%s: %s has become shorter", who, path) end
  return bytes
end

function Lines:get(i)
  expect("data.jsonl", "position", i, ("an integer in [0, %d]"):format(self.size - 1))
  local text = part_of_file("data.jsonl", self.path, self.starts[i]:item(), self.sizes[i]:item())
  local ok, value = pcall(ty.io.json_decode, text)
  if not ok then
    arguments.raise((tostring(value):gsub("^[^\n]-%.lua:%d+: ", "")),
      ("data.jsonl: %s: item %d: "):format(self.path, i))
  end
  if not self.fields then return value end
  local some = {}
  for _, name in ipairs(self.fields) do some[name] = type(value) == "table" and value[name] or nil end
  return some
end

-- ---- tar ----

local function text_at(header, from, size) return (header:sub(from + 1, from + size):match "^[^\0]*") end

-- Octal digits, or base 256 where the first bit is set.
local function number_at(header, from, size)
  local field = header:sub(from + 1, from + size)
  if field:byte() >= 0x80 then
    local value = 0
    for i = size - 7, size do value = value << 8 | field:byte(i) end
    return value >= 0 and value or nil
  end
  local digits = field:match "^%s*([0-7]+)[%s\0]*$"
  return digits and tonumber(digits, 8)
end

local function sum_is_right(header)
  local sum = 8 * 32
  for i = 1, 512 do
    if i <= 148 or i > 156 then sum = sum + header:byte(i) end
  end
  return number_at(header, 148, 8) == sum
end

-- Calls found(name, start, size) for each file of the archive.
local function each_file(path, found)
  local file <close> = open("data.shards", path)
  local length, at, count, name = file:seek "end", 0, 0, nil
  local function broken(what) arguments.fail("data.shards: %s: at byte %d: %s", path, at, what) end
  while at + 512 <= length do
    file:seek("set", at)
    local header = file:read(512) or broken "nothing can be read (is it a folder?)"
    if not header:find "[^\0]" then return end
    if not sum_is_right(header) then broken "no header of a tar archive" end
    local size, kind = number_at(header, 124, 12), header:sub(157, 157)
    if not size or size > length - at - 512 then broken "the file is cut short" end
    count = count + 1
    if count > MOST_ENTRIES then broken "more entries than are read" end
    if kind == "L" or kind == "x" then -- the name of the next file, by GNU or POSIX
      if size > MOST_NAME then broken "a name that is too long" end
      local text = file:read(size) or ""
      if kind == "L" then name = text:match "^[^\0]*" else name = text:match "%d+ path=([^\n]*)\n" or name end
    elseif kind == "0" or kind == "\0" then
      local prefix = header:sub(258, 262) == "ustar" and text_at(header, 345, 155) or ""
      local own = text_at(header, 0, 100)
      found(name or (prefix ~= "" and prefix .. "/" .. own or own), at + 512, size)
      name = nil
    end
    at = at + 512 + (size + 511) // 512 * 512
  end
end

local decoders = {
  json = function(bytes) return ty.io.json_decode(bytes) end,
  txt = function(bytes) return bytes end,
  cls = function(bytes)
    return math.tointeger(tonumber(bytes)) or arguments.fail("expected an integer, got %q", bytes:sub(1, 100))
  end,
}

local Shards = datasets.class "Shards"

--- The items of tar archives: files that follow each other and have one name up to the first dot, as fields called
-- after the rest of their names, and `key`, that name. Pictures (png, jpg, jpeg, webp) become u8 tensors in the field
-- `image`, sound (wav, flac) floats [channels, samples] in the field `sound` with `rate` beside it, json is decoded,
-- txt a string, cls an integer in the field `label`, others are strings of bytes. options:
-- size, crop, scale, ratio and channels as in image_folder; decode (true; false: all fields as bytes).
---@param paths string|string[]
---@param options? table
---@return table dataset
function M.shards(paths, options)
  expect("data.shards", "paths", paths, "a string or a list of strings")
  if type(paths) == "string" then paths = { paths } end
  local defaults, kinds = pictures.options { decode = true }
  local o = arguments.read("data.shards", options, defaults, kinds)
  -- Of each field the item, the archive, start and size; the names of items and fields once.
  local items = {}
  for shard, path in ipairs(paths) do
    local item
    each_file(path, function(name, start, size)
      local folder, base = name:match "^(.-)([^/]*)$"
      local stem, ending = base:match "^([^.]*)%.(.+)$"
      if not stem then return end
      local key = folder .. stem
      if not item or item.key ~= key then
        item = { key = key, shard = shard }
        items[#items + 1] = item
      end
      item[#item + 1] = { ending:lower(), start, size }
    end)
  end
  if #items == 0 then arguments.fail("data.shards: %s has no files with endings", table.concat(paths, ", ")) end
  return setmetatable({ paths = paths, items = items, o = o, size = #items }, Shards)
end

function Shards:describe() return ("from %d archives"):format(#self.paths) end

function Shards:get(i)
  expect("data.shards", "position", i, ("an integer in [0, %d]"):format(self.size - 1))
  local item = self.items[i + 1]
  local path, result = self.paths[item.shard], { key = item.key }
  for _, field in ipairs(item) do
    local ending, start, size = table.unpack(field)
    local bytes = part_of_file("data.shards", path, start, size)
    local name, ok, value = ending, true, bytes
    if self.o.decode then
      local last = ending:match "[^.]+$"
      if pictures.endings[last] then
        name = ending == last and "image" or ending
        ok, value = pcall(pictures.decode, bytes, self.o)
      elseif last == "wav" or last == "flac" then
        name = ending == last and "sound" or ending
        local rate
        ok, value, rate = pcall(audio.decode_audio, bytes, "sound", item.key)
        if ok then result.rate = rate end
      elseif decoders[last] then
        name = ending == "cls" and "label" or ending
        ok, value = pcall(decoders[last], bytes)
      end
      if not ok then
        arguments.raise((tostring(value):gsub("^[^\n]-%.lua:%d+: ", "")),
          ("data.shards: %s: %s.%s: "):format(path, item.key, ending))
      end
    end
    result[name] = value
  end
  return result
end

return M
