--- How a canvas is drawn: emoji of a few kinds, in their own colours or dyed, with marks, put on a ground, and all of
-- it in a style. Numbers are integers in f32 below 2^24, and quotients are cut off: the same bytes on every machine.
local ty = require "tycho"
local emoji = require "tycho.datasets.emoji"

local M = {}

local SIDE = 32
M.side = SIDE

--- Kinds of things: those that every network of canvases knows, then those that none was shown.
M.kinds = { "apple", "banana", "fish", "frog", "car", "house", "tree", "flower", "balloon", "umbrella", "butterfly",
  "mushroom", "strawberry", "octopus", "rocket", "snail", "cactus", "bell" }
--- How many of the kinds are known.
M.known = 12
local names = { "red apple", "banana", "tropical fish", "frog", "automobile", "house", "evergreen tree", "sunflower",
  "balloon", "umbrella", "butterfly", "mushroom", "strawberry", "octopus", "rocket", "snail", "cactus", "bell" }

--- Colours that things are dyed in, sixty degrees of hue each, the first around 0; and marks on things.
M.colours = { "red", "yellow", "green", "teal", "blue", "violet" }
M.marks = { "unmarked", "striped", "spotted" }

M.grounds = { "grey", "blue", "green", "pink" }
local GROUNDS = { { 214, 214, 206 }, { 112, 160, 236 }, { 128, 208, 120 }, { 244, 160, 196 } }

--- Places of a thing: moved by 0, 2 or 4 pixels in each direction; far or near; as it is or mirrored.
M.shifts = 3

-- ---- sprites ----

-- An emoji with a pad around it, k x k pixels as one: colours weighted by alpha, rounded, f32 [4, side, side].
local function shrunk(picture, pad, k)
  local x = ty.pad(picture:to "f32", { pad, pad, pad, pad }, "constant", 0)
  local alpha = x:narrow(0, 3, 1)
  local sums = ty.concat({ x:narrow(0, 0, 3) * alpha, alpha }, 0):unsqueeze(0):avg_pool2d(k, { divisor = 1 }):squeeze(0)
  alpha = sums:narrow(0, 3, 1)
  local colour = ((sums:narrow(0, 0, 3) + (alpha * 0.5):floor()) / alpha:clamp(1)):floor()
  return ty.concat({ colour, ((alpha + k * k // 2) / (k * k)):floor() }, 0)
end

-- Where marks are, as channels [2, side, side]: upright stripes and round spots.
local function marks_of(side)
  local stripes, spots = {}, {}
  for v = 0, side - 1 do
    for u = 0, side - 1 do
      stripes[#stripes + 1] = (u + 1) // 3 % 2
      local a, b = (u + v // 8 % 2 * 4) % 8 - 3, v % 8 - 3
      spots[#spots + 1] = a * a + b * b <= 5 and 1 or 0
    end
  end
  return ty.concat({ ty.tensor(stripes, { dtype = "f32" }):reshape(1, side, side),
    ty.tensor(spots, { dtype = "f32" }):reshape(1, side, side) }, 0)
end

local sprites -- u8 [kinds * 2 * 2 * shifts * shifts, 6, 32, 32]: red, green, blue, alpha, stripes, spots

-- All things in all places. Near ones are 26 pixels, far ones 21 in 24.
local function all_sprites()
  if sprites then return sprites end
  sprites = ty.keep(ty.scope(function()
    local places = {}
    for i, name in ipairs(names) do places[i] = emoji.find(name) end
    local pictures, list = emoji.load { split = "all", size = 128, languages = {} }:pictures(places), {}
    for i = 0, #names - 1 do
      for _, view in ipairs { { 8, 6 }, { 1, 5 } } do
        local sprite = shrunk(pictures:select(0, i), view[1], view[2])
        local side = sprite.shape[2]
        sprite = ty.concat({ sprite, marks_of(side) }, 0)
        for mirror = 0, 1 do
          local turned = mirror == 1 and sprite:flip { 2 } or sprite
          local first = (SIDE - side) // 2 + 1 - M.shifts
          local last = first + 2 * (M.shifts - 1)
          for y = first, last, 2 do
            for x = first, last, 2 do
              list[#list + 1] = ty.pad(turned, { x, SIDE - side - x, y, SIDE - side - y }, "constant", 0):to "u8"
            end
          end
        end
      end
    end
    return ty.stack(list, 0)
  end))
  return sprites
end

-- ---- colours ----

-- Brightness of [n, 3, h, w], [n, 1, h, w].
local function brightness(x)
  return ((x:narrow(1, 0, 1) * 77 + x:narrow(1, 1, 1) * 150 + x:narrow(1, 2, 1) * 29) / 256):floor()
end

-- Red, green, blue of a hue in whole degrees at full strength, 0 to 255 each.
local function of_hue(hue)
  local sector, rest = hue // 60, hue % 60
  local up, down = (255 * rest + 30) // 60, (255 * (60 - rest) + 30) // 60
  return ({ { 255, up, 0 }, { down, 255, 0 }, { 0, 255, up }, { 0, down, 255 }, { up, 0, 255 },
    { 255, 0, down } })[sector + 1]
end

local function rows_of(list) -- of numbers or of triples: f32 [n, 1 or 3, 1, 1]
  local t = ty.tensor(list, { dtype = "f32" })
  return t:reshape(#list, -1, 1, 1)
end

-- Things dyed: three quarters of the hue at the thing's brightness, one of its own colour.
local function dyed(x, hues)
  local dyes, whether = {}, {}
  for i, hue in ipairs(hues) do
    dyes[i], whether[i] = of_hue(math.max(hue, 0)), hue >= 0
  end
  local light = ((brightness(x) * 3) / 4):floor() + 64
  local dye = ((rows_of(dyes) * 3 + 255) / 4):floor()
  local made = (((light * dye / 255):floor() * 3 + x) / 4):floor()
  return ty.where(ty.tensor(whether):reshape(#hues, 1, 1, 1), made, x)
end

-- ---- styles ----

-- The largest of each 3 x 3 less the smallest.
local function edges(x)
  local function largest(y) return (ty.max_pool2d(y, { 3, 3 }, { stride = { 1, 1 }, padding = { 1, 1 } })) end
  return largest(x) + largest(-x)
end

local function lattice(fn) -- f32 [1, 1, 32, 32] of fn(row, column)
  local list = {}
  for v = 0, SIDE - 1 do
    for u = 0, SIDE - 1 do list[#list + 1] = fn(v, u) and 1 or 0 end
  end
  return ty.tensor(list, { dtype = "f32" }):reshape(1, 1, SIDE, SIDE):gt(0)
end

local function blocks(x, k) -- the mean of each k x k in its place
  local mean = (x:avg_pool2d(k, { divisor = 1 }) / (k * k)):floor()
  return mean:repeat_interleave(k, 2):repeat_interleave(k, 3)
end

--- Styles, each a function of the picture and its ground, integers from 0 to 255 in f32 [n, 3, 32, 32].
M.styles = { "plain", "outlined", "mosaic", "sepia", "hatched", "dotted", "negative", "neon" }
local STYLES = {
  plain = function(x) return x end,
  outlined = function(x, ground)
    return ty.where(edges(x):amax({ 1 }, true):gt(56), ty.zeros(1, 1, 1, 1), ground)
  end,
  mosaic = function(x) return blocks(x, 4) end,
  sepia = function(x)
    local b = brightness(x)
    return ty.concat({ b, (b * 196 / 256):floor(), (b * 132 / 256):floor() }, 1)
  end,
  hatched = function(x)
    return ty.where(lattice(function(v) return v % 2 == 1 end), (x * 80 / 256):floor(), x)
  end,
  dotted = function(x)
    local mean = blocks(x, 2)
    return ty.where(lattice(function(v, u) return v % 2 == 0 and u % 2 == 0 end), (mean * 160 / 256):floor(),
      ((mean + 765) / 4):floor())
  end,
  negative = function(x) return 255 - x end,
  neon = function(x, ground) return ((ground / 4):floor() + edges(x) * 2):clamp(0, 255) end,
}

-- ---- pictures ----

--- A thing on a canvas, by numbers from 0.
---@class CanvasItem
---@field kind integer
---@field style integer
---@field ground integer
---@field hue integer     in degrees, 0 to 359; -1: as it is
---@field mark integer
---@field near integer    0 or 1
---@field mirror integer  0 or 1
---@field x integer       0 to 2, each two pixels
---@field y integer       0 to 2

--- Pictures u8 [n, 3, 32, 32] of items, and where their things are, u8 [n, 1, 32, 32] (1 or 0).
---@param items CanvasItem[]
---@return Tensor image
---@return Tensor mask
function M.draw(items)
  local at, hues, grounds, dark, groups = {}, {}, {}, {}, {}
  for i, item in ipairs(items) do
    at[i] = (((item.kind * 2 + item.near) * 2 + item.mirror) * M.shifts + item.y) * M.shifts + item.x
    hues[i], grounds[i] = item.hue, GROUNDS[item.ground + 1]
    dark[i] = { item.mark == 1 and 1 or 0, item.mark == 2 and 1 or 0 }
    groups[item.style] = groups[item.style] or {}
    table.insert(groups[item.style], i - 1)
  end
  local sprite = all_sprites():index_select(0, ty.tensor(at)):to "f32"
  local alpha = sprite:narrow(1, 3, 1)
  local x = dyed(sprite:narrow(1, 0, 3), hues)
  local marked = (sprite:narrow(1, 4, 2) * ty.tensor(dark, { dtype = "f32" }):reshape(#items, 2, 1, 1)):sum({ 1 }, true)
  x = ty.where(marked:gt(0), (x * 72 / 256):floor(), x)
  local ground = rows_of(grounds)
  x = ((x * alpha + ground * (255 - alpha) + 127) / 255):floor()
  ground = ground:expand(x.shape)
  local parts, order = {}, {}
  for style = 0, #M.styles - 1 do
    local list = groups[style]
    if list then
      local index = ty.tensor(list)
      local made = STYLES[M.styles[style + 1]](x:index_select(0, index), ground:index_select(0, index))
      parts[#parts + 1] = made
      for _, i in ipairs(list) do order[#order + 1] = i end
    end
  end
  local back = {}
  for k, i in ipairs(order) do back[i + 1] = k - 1 end
  return ty.concat(parts, 0):index_select(0, ty.tensor(back)):to "u8", alpha:ge(128):to "u8"
end

--- What an item shows, in words: "a hatched violet striped fish on a pink ground". name: what the thing is called in
-- the place of its colour, marks and kind.
---@param item CanvasItem
---@param name? string
---@return string
function M.caption(item, name)
  local words = { "a", M.styles[item.style + 1] }
  if not name and item.hue >= 0 then
    words[#words + 1] = M.colours[(item.hue + 30) // 60 % 6 + 1]
    if item.mark > 0 then words[#words + 1] = M.marks[item.mark + 1] end
  end
  words[#words + 1] = name or M.kinds[item.kind + 1]
  return ("%s on a %s ground"):format(table.concat(words, " "), M.grounds[item.ground + 1])
end

return M
