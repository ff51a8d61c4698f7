--- Photographs with free licences, whole or in crops. Their page, datasets/photos/README.md, names author and licence
-- of each.
--
--     local crops = datasets.load("photos", { crop = 64, length = 10000 })
--     local item = crops:get(0)   -- { image = u8 [3, 64, 64], name = "astronaut", caption =, kind =, x =, y = ... }
local ty = require "tycho"
local arguments = require "tycho.arguments"
local random = require "tycho.datasets.random"

local M = {}

local list
local function read_list()
  list = list or ty.io.load_json(ty.data.shipped "photos/photos.json")
  return list
end

-- Photographs by their position in the list, read when they are first asked for.
local pictures = {}
local function picture(place)
  if not pictures[place] then
    local path = ty.data.shipped("photos/" .. list[place].file)
    pictures[place] = ty.keep(ty.io.load_image(path, { channels = 3 }))
  end
  return pictures[place]
end

local function about(place, image)
  local entry = list[place]
  return { image = image, name = entry.name, caption = entry.caption, kind = entry.kind, author = entry.author,
    licence = entry.licence }
end

local function check_position(self, who, i)
  if math.type(i) ~= "integer" or i < 0 or i >= self.size then
    arguments.fail("%s: i: expected 0 to %d, got %s", who, self.size - 1, arguments.describe(i))
  end
end

local Photos = ty.data.class "Photos"

--- { image = u8 [3, h, w], name, caption, kind, author, licence }
---@param i integer
function Photos:get(i)
  check_position(self, "Photos:get", i)
  local place = self.places[i + 1]
  return about(place, picture(place):clone())
end

function Photos:describe() return ("(%s)"):format(self.split) end

local Crops = ty.data.class "Crops"

--- Like Photos:get, of a square of crop x crop pixels, with the place of its left upper corner: x, y. Photographs
-- follow one another; the place depends on seed, split and i alone.
---@param i integer
function Crops:get(i)
  check_position(self, "Crops:get", i)
  local place = self.places[i % #self.places + 1]
  local whole, side, rng = picture(place), self.side, random.new(self.seed, self.split, i)
  local y, x = rng:integer(0, whole.shape[2] - side), rng:integer(0, whole.shape[3] - side)
  local item = about(place, whole:narrow(1, y, side):narrow(2, x, side):clone())
  item.x, item.y = x, y
  return item
end

function Crops:describe() return ("of %d x %d (%s)"):format(self.side, self.side, self.split) end

--- datasets.load("photos", options). options: split ("training"; "held_out", "all"), crop (none: whole photographs,
-- each of its size; else squares of so many pixels, from photographs that are large enough), and for crops length
-- (items, 1000) and seed (0).
---@param options? {split: string, crop: integer, length: integer, seed: integer}
function M.load(options)
  local o = arguments.read("datasets.photos", options, { split = "training", crop = arguments.none, length = 1000,
    seed = 0 }, { split = '"training" or "held_out" or "all"', crop = "an integer >= 1", length = "an integer >= 1",
    seed = "an integer" })
  local places, most = {}, 0
  for place, entry in ipairs(read_list()) do
    if o.split == "all" or entry.split == o.split then
      local shorter = math.min(entry.height, entry.width)
      if not o.crop or shorter >= o.crop then places[#places + 1] = place end
      most = math.max(most, shorter)
    end
  end
  if #places == 0 then
    arguments.fail("datasets.photos: crop: expected at most %d, the shorter side of the largest photograph of \"%s\", "
      .. "got %d", most, o.split, o.crop)
  end
  if not o.crop then return setmetatable({ places = places, size = #places, split = o.split }, Photos) end
  return setmetatable({ places = places, size = math.tointeger(o.length), side = math.tointeger(o.crop),
    split = o.split, seed = math.tointeger(o.seed) }, Crops)
end

return M
