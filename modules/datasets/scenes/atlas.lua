--- The sprites that scenes and clips are made of: the hundred objects, and squares of photos for backgrounds.
local ty = require "tycho"
local objects = require "tycho.datasets.scenes.objects"
local rows = require "tycho.datasets.scenes.rows"

local M = {}

local made = {} -- by side

--- The hundred objects, u8 [100, 4, side, side].
---@param side integer 64 or 128
---@return Tensor
function M.objects(side)
  if not made[side] then
    local set = require("tycho.datasets.emoji").load { split = "all", size = side }
    local places = {}
    for i, object in ipairs(objects) do places[i] = set:find(object.emoji) end
    made[side] = ty.keep(set:pictures(places))
  end
  return made[side]
end

local photo_side = 128

-- A square of a photo as a sprite, made smaller as draw_sprites does it.
local function square(image, left, top, side)
  local part = image:narrow(1, top, side):narrow(2, left, side)
  local opaque = ty.full({ 1, side, side }, 255, { dtype = "u8" })
  local sprite = ty.concat({ part, opaque }, 0):unsqueeze(0)
  -- Two texels more at each side than are seen, so that the rim, beyond which a sprite fades out, stays outside.
  local step = ((side - 4) << 16) // photo_side
  local row = { 0, step, 0, 2 << 16, 0, step, 2 << 16, 0, 0, 0, 0, 256 }
  local canvas = ty.zeros(1, 3, photo_side, photo_side, { dtype = "u8" })
  local picture = ty.draw_sprites(canvas, sprite, ty.tensor(row, { dtype = "i32" }):reshape(1, 1, rows.sprite_fields))
  return ty.concat({ picture, ty.full({ 1, 1, photo_side, photo_side }, 255, { dtype = "u8" }) }, 1)
end

-- The photos of each split of theirs that show none of the hundred objects.
local names = {
  training = { "bricks", "galaxies", "grass", "great wall", "louvre", "meadow", "mountains", "palace", "stairs",
    "sunset", "windmill" },
  held_out = { "gravel", "leaning tower", "stream", "temple" },
}

local photos = {} -- by split

--- Squares of photos, u8 [n, 4, 128, 128]: the two ends of each, or the whole where it is about square. Training
-- scenes have other photos behind them than those that are measured on.
---@param split "training"|"held_out"
---@return Tensor
function M.photos(split)
  if photos[split] then return photos[split] end
  local by_name, list = {}, {}
  for _, item in require("tycho.datasets.photos").load({ split = split }):each() do by_name[item.name] = item.image end
  for _, name in ipairs(names[split]) do
    local image = by_name[name]
    local h, w = image.shape[2], image.shape[3]
    local side = math.min(h, w)
    list[#list + 1] = square(image, 0, 0, side)
    if 4 * math.max(h, w) > 5 * side then list[#list + 1] = square(image, w - side, h - side, side) end
  end
  photos[split] = ty.keep(ty.concat(list, 0))
  return photos[split]
end

return M
