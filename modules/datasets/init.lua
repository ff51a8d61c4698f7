--- The data sets that ship with the project and those that it draws: require "tycho.datasets".
--
--     local datasets = require "tycho.datasets"
--     local training = datasets.load "emoji"                        -- a data set as ty.data has them
--     local held_out = datasets.load("emoji", { split = "held_out", size = 128 })
--     print(datasets.info("emoji").licence)
--     datasets.show "emoji"                                         -- emoji.png: what it looks like
--
-- Each set is a file of this folder with a function load(options), and has its page in datasets/NAME/README.md. Where
-- it draws what it gives, an item depends on the set's seed, the split and the item's position alone, in integers
-- (datasets.random): the same bytes on every machine and for every number of threads.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local page = require "tycho.datasets.page"

local M = {}

-- The sets. A further one is a row here, a file and a page.
local sets = {
  arm = "tycho.datasets.arm",
  canvas = "tycho.datasets.canvas",
  clips = "tycho.datasets.clips",
  digits = "tycho.datasets.digits",
  emoji = "tycho.datasets.emoji",
  kjv = "tycho.datasets.kjv",
  photos = "tycho.datasets.photos",
  scenes = "tycho.datasets.scenes",
  signals = "tycho.datasets.signals",
  text_tasks = "tycho.datasets.text_tasks",
  volumes = "tycho.datasets.volumes",
}

local function known(who, name)
  arguments.expect(who, "name", name, "a string")
  if not sets[name] then
    arguments.fail("%s: there is no data set \"%s\"%s; there are: %s", who, name, ty.core.nearest(name, sets),
      table.concat(M.names(), ", "))
  end
  return name
end

--- The names of all sets, sorted.
---@return string[]
function M.names()
  local names = {}
  for name in pairs(sets) do names[#names + 1] = name end
  table.sort(names)
  return names
end

--- A data set: #set, set:get(i), set:batch(positions), made to be given to ty.data.DataLoader. options: split
-- ("training"), and what the set's own file says (`help "datasets.emoji.load"`).
---@param name string
---@param options? table
function M.load(name, options) return M[known("datasets.load", name)].load(options) end

--- What the set's page says: title, text, splits (by name a sentence), and a field for each row of its first table:
-- source, licence, made ...
---@param name string
---@return {title: string, text: string, source: string, licence: string, made: string, splits: table<string, string>}
function M.info(name) return page.read(known("datasets.info", name)) end

--- Draws items of a set with their names into a PNG file and returns its path. options: path ("NAME.png"), split
-- ("training"), count (so many items, drawn at random), columns, seed (0, of that draw).
---@param name string
---@param options? {path: string, split: string, count: integer, columns: integer, seed: integer}
---@return string path
function M.show(name, options)
  local set = M[known("datasets.show", name)]
  if set.show then return set.show(options) end -- sets without pictures
  return require("tycho.datasets.sheet").write(set, name, options)
end

--- The path of a file that ships with a set, once it was compared with the set's checksums.
---@param name string
---@param file string
---@return string path
function M.path(name, file)
  known("datasets.path", name)
  arguments.expect("datasets.path", "file", file, "a string")
  return ty.data.shipped(name .. "/" .. file)
end

--- A picture of bytes for a network: f32 from -1 to 1.
---@param bytes Tensor u8, any shape
---@return Tensor
function M.pixels(bytes)
  if not ty.is_tensor(bytes) or bytes.dtype ~= "u8" then
    arguments.fail("datasets.pixels: bytes: expected a tensor of u8, got %s",
      ty.is_tensor(bytes) and "one of " .. bytes.dtype or arguments.describe(bytes))
  end
  return bytes:to "f32" / 127.5 - 1
end

--- The way back: u8, rounded, what is outside of -1 to 1 cut off.
---@param pixels Tensor floats, any shape
---@return Tensor
function M.bytes(pixels)
  if not ty.is_tensor(pixels) or not pixels.dtype:find "^b?f%d" then
    arguments.fail("datasets.bytes: pixels: expected a tensor of floats, got %s",
      ty.is_tensor(pixels) and "one of " .. pixels.dtype or arguments.describe(pixels))
  end
  return ((pixels:detach():to "f32" + 1) * 127.5):clamp(0, 255):round():to "u8"
end

local files = { random = "tycho.datasets.random", kjv_names = "tycho.datasets.kjv_names",
  refused_books = "tycho.datasets.refused_books", parity = "tycho.datasets.parity",
  copying = "tycho.datasets.copying" }
for name, file in pairs(sets) do files[name] = file end
return require "tycho.lazy" (M, files, "tycho.datasets")
