--- From scenes to the rows of ty.draw_sprites and ty.draw_background: integers all the way, so that a scene is the same
-- bytes everywhere.
local colours = require "tycho.datasets.scenes.colours"

local M = {}

--- Columns of a row.
M.sprite_fields, M.background_fields = 12, 12

-- Sine of whole degrees in 16.16. Rounding is far from every tie, so that any C library gives the same table.
local sines = {}
for degree = 0, 359 do sines[degree] = math.floor(math.sin(math.rad(degree)) * 65536 + 0.5) end

local function sine(degree) return sines[degree % 360] end
local function cosine(degree) return sines[(degree + 90) % 360] end
M.sine, M.cosine = sine, cosine

local kinds = { plain = 0, gradient = 1, stripes = 3, checks = 4, dots = 5, noise = 6 }

--- Appends the row of a sprite. x, y: its middle, and side: of its frame, in 1024ths of the picture's side `size`;
-- rotation in degrees, counter-clockwise; colour: a tint's name or nil.
---@param list integer[]
---@param at integer columns that are there
---@param texels integer pixels of a side in the atlas
---@return integer at columns that are there then
function M.sprite(list, at, index, x, y, side, rotation, mirrored, colour, size, texels)
  local scale = (texels << 26) // (size * side) -- texels per pixel, 16.16
  local c, s = cosine(rotation), sine(rotation)
  local a, b, d, e = (scale * c) >> 16, -((scale * s) >> 16), (scale * s) >> 16, (scale * c) >> 16
  if c < 0 then a = -((scale * -c) >> 16) e = a end
  if s < 0 then d = -((scale * -s) >> 16) b = -d end
  if mirrored then a, b = -a, -b end
  local px, py = (x * size) << 6, (y * size) << 6
  list[at + 1], list[at + 2], list[at + 3] = index, a, b
  list[at + 4] = (texels << 15) - (a * px + b * py) // 65536
  list[at + 5], list[at + 6] = d, e
  list[at + 7] = (texels << 15) - (d * px + e * py) // 65536
  local tint = colour and colours.tints[colours.tint[colour]]
  if tint then
    list[at + 8], list[at + 9], list[at + 10], list[at + 11] = tint[2], tint[3], tint[4], 256
  else
    list[at + 8], list[at + 9], list[at + 10], list[at + 11] = 0, 0, 0, 0
  end
  list[at + 12] = 256
  return at + 12
end

--- Appends a row that draws nothing.
function M.nothing(list, at)
  list[at + 1] = -1
  for i = 2, 12 do list[at + i] = 0 end
  return at + 12
end

local black = { "black", 0, 0, 0 }

--- Appends the row of a background; of a photo, a black one.
function M.background(list, at, background, size)
  local names = background.colours
  local one = names and colours.backgrounds[colours.background[names[1]]] or black
  local two = names and names[2] and colours.backgrounds[colours.background[names[2]]] or one
  local kind = kinds[background.kind] or 0
  local period = ((background.period or 1024) * size) << 6
  local phase = (period >> 10) * (background.phase or 0)
  if kind == 1 then
    phase, period = 0, size << 16
    if background.radial then kind, period = 2, size * 40000 end
  elseif kind == 6 then
    period = 2 * period
  end
  list[at + 1] = kind
  list[at + 2], list[at + 3], list[at + 4] = one[2], one[3], one[4]
  list[at + 5], list[at + 6], list[at + 7] = two[2], two[3], two[4]
  list[at + 8], list[at + 9] = cosine(background.angle or 0), sine(background.angle or 0)
  list[at + 10], list[at + 11], list[at + 12] = period, phase, background.seed or 0
  return at + 12
end

--- Appends the row of a photo as a sprite that fills the picture: a crop of at least half of its side, two texels from
-- its rim, beyond which a sprite fades out.
function M.photo(list, at, background, size, texels)
  local rim = 2 << 16
  texels = texels - 4
  local part = 512 + background.zoom // 2 -- of the photo's side, in 1024ths
  local room = 1024 - part
  local scale = ((texels * part) << 6) // size
  local left = rim + ((texels * room * background.x) >> 4) -- in 16.16: texels * (room / 1024) * (x / 1024) * 65536
  local top = rim + ((texels * room * background.y) >> 4)
  list[at + 1] = background.photo
  if background.mirrored then
    list[at + 2], list[at + 4] = -scale, left + ((texels * part) << 6)
  else
    list[at + 2], list[at + 4] = scale, left
  end
  list[at + 3], list[at + 5], list[at + 6], list[at + 7] = 0, 0, scale, top
  for i = 8, 11 do list[at + i] = 0 end
  list[at + 12] = 256
  return at + 12
end

return M
