--- Pictures of worlds: the room by ty.draw_background, everything else as sprites of a small atlas that is made here,
-- in integers, and drawn by ty.draw_sprites: the same bytes everywhere.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local kinematics = require "tycho.datasets.arm.kinematics"
local tasks = require "tycho.datasets.arm.tasks"
local world = require "tycho.datasets.arm.world"

local M = {}

local texels = 32 -- of a sprite's side

-- Sprites by name: the shade (0 to 255) of the texel at (x, y), measured from the middle in 64ths of the side, or nil
-- where it is transparent. The tint recolours shades: 128 takes it as it is.
local function ring(x, y, inner, outer)
  local d = x * x + y * y
  return d >= inner * inner and d < outer * outer
end

local sprites = {
  { "plain", function() return 128 end },
  { "block", function(x, y) -- bevelled
    local away = math.max(math.abs(x), math.abs(y))
    if away > 26 then return (y < 0 and -y >= math.abs(x)) and 190 or 62 end
    return 128
  end },
  { "bar", function(_, y) -- along x: a rounded beam, lit from above
    local a = math.abs(y)
    if a > 26 then return 50 end
    return 150 - 2 * y
  end },
  { "joint", function(x, y)
    if ring(x, y, 0, 12) then return 215 end
    if ring(x, y, 12, 26) then return 105 end
    return ring(x, y, 26, 32) and 40 or nil
  end },
  { "bowl", function(x, y) -- its front: wide above, round below
    if y < -30 then return 200 end
    local half = 31 - math.max(0, y + 8) * math.max(0, y + 8) // 110
    if math.abs(x) > half then return nil end
    return 140 - y // 2 - math.max(0, x)
  end },
  { "rim", function(x, y) -- the inside of a bowl, seen over its edge
    return x * x + 12 * y * y < 31 * 31 and 70 or nil
  end },
  { "drawer", function(x, y)
    if math.max(math.abs(x), math.abs(y)) > 27 then return 55 end
    return 128
  end },
  { "ring", function(x, y) return ring(x, y, 15, 31) and 128 or nil end },
  { "cross", function(x, y)
    local u, v = math.abs(x + y), math.abs(x - y)
    return math.min(u, v) < 13 and math.max(u, v) < 44 and 128 or nil
  end },
  { "star", function(x, y) -- four points
    local a, b = math.abs(x), math.abs(y)
    return (a + 3 * b < 33 or b + 3 * a < 33 or a + b < 17) and 128 or nil
  end },
  { "finger", function(x, _) return math.abs(x) > 20 and 60 or 150 end },
}

local number = {}
for i, s in ipairs(sprites) do number[s[1]] = i - 1 end

local atlas

-- 4 x 4 samples for a texel: the share of those inside is its alpha, their mean shade its grey.
local function make_atlas()
  local values, at = {}, 0
  local plane = texels * texels
  for _, sprite in ipairs(sprites) do
    for y = 0, texels - 1 do
      for x = 0, texels - 1 do
        local count, sum = 0, 0
        for j = 0, 3 do
          for i = 0, 3 do
            local shade = sprite[2]((x * 8 + i * 2 + 1) * 8 // texels - 32, (y * 8 + j * 2 + 1) * 8 // texels - 32)
            if shade then count, sum = count + 1, sum + math.max(0, math.min(255, shade)) end
          end
        end
        local p = at + y * texels + x + 1
        local grey = count > 0 and sum // count or 0
        values[p], values[p + plane], values[p + 2 * plane], values[p + 3 * plane] = grey, grey, grey, count * 255 // 16
      end
    end
    at = at + 4 * plane
  end
  return ty.tensor(values, { dtype = "u8" }):reshape(#sprites, 4, texels, texels)
end

local fields = 12
local floor = math.floor

-- Rows of one picture. A sprite's frame has its middle at (x, y), is `w` along (cos, sin) and `h` across, in 1024ths, y
-- up; colour { red, green, blue }.
local Rows = {}
Rows.__index = Rows

function Rows:put(sprite, x, y, w, h, colour, cos, sin, opacity)
  cos, sin = cos or 1, sin or 0
  local list, at, unit = self.list, self.at, 1024 / self.side
  local u, v = texels * unit / w * 65536, texels * unit / h * 65536
  local a, b, d, e = floor(u * cos + 0.5), floor(-u * sin + 0.5), floor(v * sin + 0.5), floor(v * cos + 0.5)
  local px, py = x / unit, (1024 - y) / unit
  list[at + 1], list[at + 2], list[at + 3], list[at + 5], list[at + 6] = number[sprite], a, b, d, e
  list[at + 4] = floor(texels * 32768 - a * px - b * py + 0.5)
  list[at + 7] = floor(texels * 32768 - d * px - e * py + 0.5)
  list[at + 8], list[at + 9], list[at + 10], list[at + 11] = colour[1], colour[2], colour[3], 256
  list[at + 12] = opacity or 256
  self.at, self.count = at + fields, self.count + 1
end

local function colour_of(o)
  local c = tasks.colours[o.colour]
  return { c[2], c[3], c[4] }
end

local metals = { { 236, 132, 34 }, { 120, 132, 150 }, { 226, 226, 230 } }
local tables = { { 150, 108, 72 }, { 186, 150, 108 }, { 112, 118, 124 } }
local walls = { { 226, 232, 238 }, { 238, 232, 220 }, { 214, 226, 214 }, { 232, 222, 232 } }
local dark, cabinet, shadow = { 58, 60, 66 }, { 128, 98, 74 }, { 30, 30, 34 }

local function link(rows, from, to, width, colour)
  local dx, dy = to.x - from.x, to.y - from.y
  local length = math.sqrt(dx * dx + dy * dy)
  rows:put("bar", (from.x + to.x) / 2, (from.y + to.y) / 2, length, width, colour, dx / length, dy / length)
end

-- What a world shows, from the back to the front.
local function rows_of(w, look, rows)
  local ground = kinematics.table
  rows:put("plain", 512, ground / 2, 1100, ground, tables[look.table + 1])
  rows:put("plain", 512, ground - 8, 1100, 16, dark, 1, 0, 90)
  local base, blocks, bowls = kinematics.base, {}, {}
  local has_drawers = false
  for _, o in ipairs(w.objects) do
    if o.kind == "mat" then rows:put("drawer", o.x, ground - 14, o.width, 52, colour_of(o))
    elseif o.kind == "block" then blocks[#blocks + 1] = o
    elseif o.kind == "bowl" then bowls[#bowls + 1] = o
    elseif o.kind == "drawer" then has_drawers = true end
  end
  if has_drawers then
    local high = world.drawer.height
    rows:put("drawer", world.drawer.front + 100, ground + high + 8, 216, 2 * high + 28, cabinet)
    for _, o in ipairs(w.objects) do
      if o.kind == "drawer" then
        local left, y = world.drawer.front - o.open, o.y + high / 2
        rows:put("plain", world.drawer.front + 80, y, 130, high - 14, shadow)
        rows:put("drawer", left + 66, y, 140, high - 14, colour_of(o))
        local x = world.handle(o)
        rows:put("plain", (left + x) / 2, y, left - x + 8, 20, dark)
        rows:put("joint", x, y, 52, 52, colour_of(o))
      end
    end
  end
  for _, o in ipairs(bowls) do rows:put("rim", o.x, o.y + world.bowl.height - 4, o.width, 46, colour_of(o)) end
  for _, o in ipairs(blocks) do rows:put("block", o.x, o.y + o.width / 2, o.width, o.width, colour_of(o)) end
  for _, o in ipairs(bowls) do
    rows:put("bowl", o.x, o.y + world.bowl.height / 2, o.width, world.bowl.height, colour_of(o))
  end
  for _, o in ipairs(w.objects) do
    if o.kind == "target" then rows:put(o.shape, o.x, o.y, 104, 104, colour_of(o)) end
  end

  local metal = metals[look.metal + 1]
  rows:put("block", base.x, (ground + base.y) / 2 - 4, 120, base.y - ground + 30, dark)
  link(rows, base, w.elbow, 72, metal)
  link(rows, w.elbow, w.wrist, 58, metal)
  rows:put("joint", base.x, base.y, 112, 112, metal)
  rows:put("joint", w.elbow.x, w.elbow.y, 92, 92, metal)
  local palm = { x = w.wrist.x + (w.tip.x - w.wrist.x) * 0.42, y = w.wrist.y + (w.tip.y - w.wrist.y) * 0.42 }
  link(rows, w.wrist, palm, 46, dark)
  local spread = w:spread()
  local cos, sin = w.tip.cos, w.tip.sin -- along the hand; across it is (-sin, cos)
  rows:put("bar", palm.x, palm.y, 2 * spread + 34, 26, dark, -sin, cos)
  for side = -1, 1, 2 do
    local x, y = palm.x - side * sin * spread, palm.y + side * cos * spread
    local ex, ey = w.tip.x - side * sin * spread, w.tip.y + side * cos * spread
    rows:put("finger", (x + ex) / 2, (y + ey) / 2, 80, 26, dark, cos, sin)
  end
  rows:put("joint", w.wrist.x, w.wrist.y, 76, 76, metal)
end

--- Pictures of worlds, u8 [n, 3, side, side], by one call.
---@param worlds table[]
---@param looks table[] of each world
---@param side integer pixels
---@return Tensor
function M.draw(worlds, looks, side)
  arguments.expect("datasets.arm.picture.draw", "worlds", worlds, "a list")
  arguments.expect("datasets.arm.picture.draw", "looks", looks, "a list")
  arguments.expect("datasets.arm.picture.draw", "side", side, "an integer >= 1")
  local painter = M.painter(side)
  for i, w in ipairs(worlds) do painter:add(w, looks[i]) end
  return painter:pictures()
end

local Painter = {}
Painter.__index = Painter

--- Takes the looks of worlds as they are now, and draws them all later: what episodes are drawn with.
---@param side integer pixels
function M.painter(side)
  arguments.expect("datasets.arm.picture.painter", "side", side, "an integer >= 1")
  return setmetatable({ side = side, most = 26, n = 0, list = {}, backgrounds = {} }, Painter)
end

--- Adds a world as it is now.
---@param w table
---@param look table
function Painter:add(w, look)
  arguments.expect("Painter:add", "w", w, "a table")
  arguments.expect("Painter:add", "look", look, "a table")
  local rows = setmetatable({ list = self.list, at = self.n * self.most * fields, count = 0, side = self.side }, Rows)
  rows_of(w, look, rows)
  for _ = rows.count + 1, self.most do
    self.list[rows.at + 1] = -1
    for k = 2, fields do self.list[rows.at + k] = 0 end
    rows.at = rows.at + fields
  end
  local wall = walls[look.wall + 1]
  local b, at = self.backgrounds, self.n * fields
  b[at + 1] = 1
  for c = 1, 3 do b[at + 1 + c], b[at + 4 + c] = wall[c], wall[c] * 4 // 5 end
  b[at + 8], b[at + 9], b[at + 10], b[at + 11], b[at + 12] = 0, 65536, self.side * 65536, 0, 0
  self.n = self.n + 1
end

--- All that were added, u8 [n, 3, side, side].
---@return Tensor
function Painter:pictures()
  atlas = atlas or ty.keep(make_atlas())
  local n, side = self.n, self.side
  local backgrounds = ty.tensor(self.backgrounds, { dtype = "i32" }):reshape(n, fields)
  local list = ty.tensor(self.list, { dtype = "i32" }):reshape(n, self.most, fields)
  return (ty.draw_sprites(ty.draw_background(backgrounds, side, side), atlas, list))
end

return M
