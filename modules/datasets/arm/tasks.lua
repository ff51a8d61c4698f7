--- What the arm is asked to do: five tasks, the scenes they begin in, and their words.
local arguments = require "tycho.arguments"
local kinematics = require "tycho.datasets.arm.kinematics"
local world = require "tycho.datasets.arm.world"

local M = {}

--- The tasks.
M.kinds = { "reach", "push", "place", "stack", "open" }

--- Colours of things, { name, red, green, blue }.
M.colours = { { "red", 222, 44, 40 }, { "green", 46, 160, 60 }, { "blue", 44, 98, 224 }, { "yellow", 246, 206, 30 },
  { "purple", 142, 62, 192 }, { "orange", 244, 130, 22 } }

local shapes = { "ring", "star", "cross" }

-- By task: words for training, and words for held_out alone. %a: what is moved, %b: where to.
local phrases = {
  reach = {
    seen = { "touch the %b", "reach the %b", "move the hand to the %b", "go to the %b", "bring the gripper to the %b",
      "point at the %b" },
    held_out = { "let the gripper come to the %b", "the hand should be at the %b" },
  },
  push = {
    seen = { "push the %a onto the %b", "push the %a to the %b", "slide the %a onto the %b", "shove the %a to the %b",
      "move the %a along the table to the %b", "get the %a onto the %b by pushing" },
    held_out = { "the %a should slide to the %b", "onto the %b, push the %a" },
  },
  place = {
    seen = { "put the %a in the %b", "put the %a into the %b", "place the %a in the %b", "drop the %a into the %b",
      "pick up the %a and put it in the %b", "the %a goes in the %b" },
    held_out = { "take the %a and leave it in the %b", "I want the %a inside the %b" },
  },
  stack = {
    seen = { "stack the %a on the %b", "put the %a on top of the %b", "place the %a on the %b",
      "build a tower: the %a on the %b", "set the %a on the %b", "lift the %a onto the %b" },
    held_out = { "the %b should carry the %a", "on the %b, stack the %a" },
  },
  open = {
    seen = { "open the %a", "pull the %a open", "pull out the %a", "slide the %a open", "open up the %a",
      "draw the %a out" },
    held_out = { "I need what is in the %a, open it", "the %a should be open" },
  },
}
M.phrases = phrases

--- Whether a pair (positions among the colours, of reach: of a shape among three and a colour; of open: 1 for the upper
-- drawer, 2 for the lower, and a colour) is one that only the split held_out asks for.
---@param kind string
---@param a integer
---@param b integer
function M.is_held_out(kind, a, b)
  arguments.expect("datasets.arm.is_held_out", "kind", kind, "a string")
  if kind == "reach" or kind == "open" then return (2 * a + b) % 6 == 1 end
  return a ~= b and (a + 2 * b) % 5 == 1
end

local function colour_name(i) return M.colours[i][1] end

-- Colours in random order, and a pair of positions that the split asks for.
local function draw_pair(random, kind, held_out)
  local firsts = kind == "reach" and #shapes or kind == "open" and 2 or #M.colours
  for _ = 1, 1000 do
    local a, b = random:integer(1, firsts), random:integer(1, #M.colours)
    local distinct = firsts ~= #M.colours or a ~= b
    if distinct and M.is_held_out(kind, a, b) == held_out then return a, b end
  end
end

-- Places along the table for things of these widths, in random order; nil where they do not fit.
local function lay_out(random, widths, left, right)
  local sum = 0
  for _, w in ipairs(widths) do sum = sum + w end
  local gap = 26
  local free = right - left - sum - gap * (#widths - 1)
  if free < 0 then return nil end
  local order, cuts = {}, {}
  for i = 1, #widths do order[i], cuts[i] = i, random:integer(0, free) end
  random:shuffle(order)
  table.sort(cuts)
  local places, x = {}, left
  for k, i in ipairs(order) do
    places[i] = x + cuts[k] + widths[i] / 2
    x = x + widths[i] + gap
  end
  return places
end

local floor = kinematics.table

local make = {}

local function other_colours(random, ...)
  local taken, list = {}, {}
  for _, i in ipairs { ... } do taken[i] = true end
  for i = 1, #M.colours do if not taken[i] then list[#list + 1] = i end end
  return random:shuffle(list)
end

local function thing(kind, width)
  return function(colour)
    return { kind = kind, colour = colour, width = width, name = colour_name(colour) .. " " .. kind }
  end
end
local block, bowl, mat = thing("block", world.block), thing("bowl", world.bowl.width), thing("mat", 150)

-- Puts things side by side.
local function set_out(random, objects, left, right)
  local widths = {}
  for i, o in ipairs(objects) do widths[i] = o.width end
  local places = lay_out(random, widths, left, right)
  if not places then return false end
  for i, o in ipairs(objects) do o.x, o.y = places[i], floor end
  return true
end

function make.reach(random, a, b)
  local objects, more = {}, other_colours(random, b)
  local function target(shape, colour)
    return { kind = "target", shape = shapes[shape], colour = colour,
      name = ("%s %s"):format(colour_name(colour), shapes[shape]) }
  end
  objects[1] = target(a, b)
  objects[2] = target(random:integer(1, 3), more[1])
  objects[3] = target(a % 3 + 1, random:integer(0, 1) == 0 and b or more[2])
  for i, o in ipairs(objects) do
    local free
    repeat
      o.x, o.y = random:integer(300, 800), random:integer(floor + 60, floor + 380)
      free = kinematics.reaches(o.x, o.y)
      for k = 1, i - 1 do
        free = free and (math.abs(objects[k].x - o.x) > 120 or math.abs(objects[k].y - o.y) > 120)
      end
    until free
  end
  return objects, nil, objects[1]
end

function make.push(random, a, b)
  local more = other_colours(random, a, b)
  local object, goal = block(a), mat(b)
  local objects = { object, goal, random:integer(0, 1) == 0 and mat(more[1]) or block(more[1]) }
  if not set_out(random, objects, 260, 860) then return nil end
  -- nothing stands between the block and its goal, and there is room to push from
  local other = objects[3]
  local low, high = math.min(object.x, goal.x), math.max(object.x, goal.x)
  if other.kind == "block" and other.x > low and other.x < high then return nil end
  local behind = object.x + (object.x < goal.x and -1 or 1) * 100
  if behind < 250 or behind > 850 or other.kind == "block" and math.abs(other.x - behind) < 80 then return nil end
  table.sort(objects, function(p, q) return p.kind == "mat" and q.kind ~= "mat" end) -- mats lie below
  return objects, object, goal
end

function make.place(random, a, b)
  local more = other_colours(random, a, b)
  local object, goal = block(a), bowl(b)
  local objects = { object, goal, random:integer(0, 1) == 0 and bowl(more[1]) or block(more[1]) }
  if not set_out(random, objects, 250, 850) then return nil end
  return objects, object, goal
end

function make.stack(random, a, b)
  local more = other_colours(random, a, b)
  local object, goal = block(a), block(b)
  local objects = { object, goal, block(more[1]) }
  if not set_out(random, objects, 260, 830) then return nil end
  return objects, object, goal
end

function make.open(random, a, b)
  local more = other_colours(random, b)
  local colours = { more[1], more[1] }
  colours[a] = b
  local objects = {}
  for i = 1, 2 do
    objects[i] = { kind = "drawer", colour = colours[i], open = 0, x = world.drawer.front,
      y = floor + (2 - i) * world.drawer.height + 6, name = ("%s drawer"):format(colour_name(colours[i])) }
  end
  objects[a].name = random:choose { ("%s drawer"):format(colour_name(b)),
    ("%s %s drawer"):format(a == 1 and "upper" or "lower", colour_name(b)) }
  objects[3] = block(more[2])
  if not set_out(random, { objects[3] }, 260, 600) then return nil end
  return objects, objects[a]
end

--- A task from a generator (datasets.random): { kind, text, phrase, pair, object, goal, objects, q, look }; q is how
-- the arm stands, look the colours of the room. kind: one of the five, or nil for any. held_out: of the split held_out.
---@param random table
---@param kind? string
---@param held_out boolean
function M.draw(random, kind, held_out)
  arguments.expect("datasets.arm.tasks.draw", "random", random, "a table")
  kind = kind or random:choose(M.kinds)
  for _ = 1, 1000 do
    local a, b = draw_pair(random, kind, held_out)
    local objects, object, goal = make[kind](random, a, b)
    if objects then
      local phrase = random:choose(phrases[kind][held_out and "held_out" or "seen"])
      local text = phrase:gsub("%%a", object and object.name or ""):gsub("%%b", goal and goal.name or "")
      return { kind = kind, text = text, phrase = phrase, pair = { a, b }, object = object, goal = goal,
        objects = objects, q = kinematics.inverse(random:integer(440, 660), random:integer(460, 600)),
        look = { wall = random:integer(0, 3), table = random:integer(0, 2), metal = random:integer(0, 2) } }
    end
  end
  arguments.fail("datasets.arm: found no scene for \"%s\" in 1000 tries", kind)
end

return M
