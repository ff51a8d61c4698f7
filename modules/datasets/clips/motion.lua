--- The laws by which objects of clips move, in integers: where an object is in a frame follows from the numbers that
-- were drawn for it, with no sum from frame to frame. Lengths are in 1024ths of the picture's side, time runs from 0 to
-- `last`, the number of the last frame.
local layout = require "tycho.datasets.scenes.layout"

local M = {}

--- The laws; their order is that of labels, from 0.
M.laws = { "constant", "gravity", "bounce", "spin", "approach" }
M.number = {}
for i, law in ipairs(M.laws) do M.number[law] = i - 1 end

--- Which objects (positions from 0) under which laws no split but held_out_combinations shows.
function M.is_held_out(object, law) return (object + 2 * M.number[law]) % 10 == 3 end

local function between(random, a, b) return random:integer(math.min(a, b), math.max(a, b)) end

local function margin_of(side) return side * 490 // 1024 end

local directions = {
  { "right", 1, 0 }, { "left", -1, 0 }, { "down", 0, 1 }, { "up", 0, -1 }, { "lower right", 1, 1 },
  { "upper left", -1, -1 }, { "lower left", -1, 1 }, { "upper right", 1, -1 },
}

-- ---- drawing the numbers of a motion ----

local draws = {}

function draws.constant(random, m)
  local margin = margin_of(m.side)
  local room = 1024 - 2 * margin
  local row = random:choose(directions)
  local far = random:integer(room * 55 // 100, room)
  m.direction = row[1]
  local function along(sign)
    if sign == 0 then
      local at = random:integer(margin, 1024 - margin)
      return at, at
    end
    local from = random:integer(margin, margin + room - far)
    if sign < 0 then return from + far, from end
    return from, from + far
  end
  m.x, m.x_end = along(row[2])
  m.y, m.y_end = along(row[3])
  m.speed = far > 560 and "quickly" or far < 400 and "slowly" or nil
end

function draws.gravity(random, m)
  local margin = margin_of(m.side)
  local low, high = margin, 1024 - margin
  if random:integer(0, 1) == 0 then
    m.form, m.x = "fall", random:integer(low, high)
    m.x_end = m.x
    m.y, m.y_end, m.rise = random:integer(low, low + 60), high - random:integer(0, 40), 0
    return
  end
  m.form = "throw"
  local far = random:integer((high - low) * 60 // 100, high - low)
  local from = random:integer(low, high - far)
  if random:integer(0, 1) == 0 then
    m.x, m.x_end, m.direction = from, from + far, "right"
  else
    m.x, m.x_end, m.direction = from + far, from, "left"
  end
  m.y = high - random:integer(0, 60)
  m.y_end = m.y
  m.rise = random:integer((m.y - low) * 70 // 100, m.y - low)
end

function draws.bounce(random, m)
  local margin = margin_of(m.side)
  local room = 1024 - 2 * margin
  m.x, m.y = random:integer(margin, 1024 - margin), random:integer(margin, 1024 - margin)
  local sign_x, sign_y = 2 * random:integer(0, 1) - 1, 2 * random:integer(0, 1) - 1
  m.move_x = sign_x * room * random:integer(130, 260) // 100
  m.move_y = sign_y * room * random:integer(130, 260) // 100
  local straight = random:integer(0, 3)
  if straight == 0 then m.move_y, m.form = 0, "sideways" elseif straight == 1 then m.move_x, m.form = 0, "upright" end
end

function draws.spin(random, m)
  local margin = margin_of(m.side) * 5 // 4
  margin = math.min(margin, 500)
  m.x, m.y = random:integer(margin, 1024 - margin), random:integer(margin, 1024 - margin)
  m.turn = random:integer(200, 540)
  m.direction = "counter-clockwise"
  if random:integer(0, 1) == 0 then m.turn, m.direction = -m.turn, "clockwise" end
end

function draws.approach(random, m)
  m.side, m.side_end = random:integer(200, 280), random:integer(600, 780)
  local margin = margin_of(m.side_end)
  m.x, m.y = between(random, margin, 1024 - margin), between(random, margin, 1024 - margin)
end

--- A motion under a law for an object of `size`, drawn at random: { law, side, x, y, direction ... }.
function M.draw(random, law, size)
  local range = layout.sizes[size]
  local m = { law = law, side = random:integer(range[1], range[2]) }
  draws[law](random, m)
  return m
end

--- Something that does not move.
function M.still(random, size)
  local range = layout.sizes[size]
  local m = { law = "still", side = random:integer(range[1], range[2]) }
  local margin = margin_of(m.side)
  m.x, m.y = random:integer(margin, 1024 - margin), random:integer(margin, 1024 - margin)
  return m
end

-- ---- where it is ----

local function mirrored(at, low, high)
  local room = high - low
  if room == 0 then return low end
  local rest = (at - low) % (2 * room)
  return low + (rest > room and 2 * room - rest or rest)
end

local function mix(a, b, t, last) return a + ((b - a) * t + last // 2) // last end

local wheres = {
  still = function(m) return m.x, m.y, m.side, 0 end,
  constant = function(m, t, last) return mix(m.x, m.x_end, t, last), mix(m.y, m.y_end, t, last), m.side, 0 end,
  gravity = function(m, t, last) -- y = y0 + v t + g t t / 2
    local x = mix(m.x, m.x_end, t, last)
    if m.form == "fall" then return x, m.y + (m.y_end - m.y) * t * t // (last * last), m.side, 0 end
    return x, m.y - 4 * m.rise * t * (last - t) // (last * last), m.side, 0
  end,
  bounce = function(m, t, last)
    local margin = margin_of(m.side)
    return mirrored(m.x + m.move_x * t // last, margin, 1024 - margin),
      mirrored(m.y + m.move_y * t // last, margin, 1024 - margin), m.side, 0
  end,
  spin = function(m, t, last) return m.x, m.y, m.side, m.turn * t // last end,
  approach = function(m, t, last) -- size goes with 1 / distance, distance falls evenly
    return m.x, m.y, m.side * m.side_end * last // (m.side_end * last - t * (m.side_end - m.side)), 0
  end,
}

--- Where an object is at time t: x, y, side of its frame, degrees that it has turned.
---@return integer x
---@return integer y
---@return integer side
---@return integer rotation
function M.at(m, t, last) return wheres[m.law](m, t, last) end

return M
