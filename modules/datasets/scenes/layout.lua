--- What is in a scene and where, drawn at random: groups of objects with a look each, sizes, places, rotation, depth,
-- and a background. Lengths are in 1024ths of the picture's side, so that a scene is the same at every size.
local objects = require "tycho.datasets.scenes.objects"
local colours = require "tycho.datasets.scenes.colours"
local held_out = require "tycho.datasets.scenes.held_out"

local M = {}

--- Sides of the emoji's frame by size, with gaps between the words.
M.sizes = { small = { 256, 300 }, medium = { 380, 464 }, large = { 560, 720 } }

-- Shares of sizes by how many objects there are.
local size_shares = {
  { large = 55, medium = 30, small = 15 },
  { large = 30, medium = 48, small = 22 },
  { large = 8, medium = 56, small = 36 },
  { large = 0, medium = 36, small = 64 },
  { large = 0, medium = 16, small = 84 },
}
local count_shares = { 30, 28, 20, 12, 10 }
-- How so many objects fall into groups of equal ones: shares, and sizes of the groups.
local groupings = {
  { { 1, 1 } },
  { { 28, 2 }, { 72, 1, 1 } },
  { { 30, 3 }, { 20, 2, 1 }, { 50, 1, 1, 1 } },
  { { 34, 4 }, { 12, 3, 1 }, { 14, 2, 2 }, { 40, 1, 1, 1, 1 } },
  { { 34, 5 }, { 12, 4, 1 }, { 14, 3, 2 }, { 40, 1, 1, 1, 1, 1 } },
}
local background_shares = { plain = 34, gradient = 20, stripes = 7, checks = 7, dots = 7, noise = 7, photo = 18 }
M.backgrounds = { "plain", "gradient", "stripes", "checks", "dots", "noise", "photo" }

local function pick(random, shares, names)
  local sum = 0
  for _, name in ipairs(names) do sum = sum + shares[name] end
  local at = random:integer(0, sum - 1)
  for _, name in ipairs(names) do
    at = at - shares[name]
    if at < 0 then return name end
  end
end

local size_names = { "large", "medium", "small" }

local function pick_count(random, low, high)
  if low == high then return low end
  local sum = 0
  for n = low, high do sum = sum + count_shares[n] end
  local at = random:integer(0, sum - 1)
  for n = low, high do
    at = at - count_shares[n]
    if at < 0 then return n end
  end
end

local function pick_grouping(random, n)
  local rows = groupings[n]
  local at = random:integer(0, 99)
  for _, row in ipairs(rows) do
    at = at - row[1]
    if at < 0 then return row end
  end
  return rows[#rows]
end

--- The look of an object, drawn at random: nil for its own, or a tint that it has not by nature.
---@return string?
function M.colour(random, object, o)
  local natural = objects[object + 1].natural
  for _ = 1, 20 do
    local colour = o.tints[1]
    if o.natural and (not colour or random:integer(0, 99) < 42) then return nil end
    colour = random:choose(o.tints)
    if colour ~= natural and (o.any_combination or not held_out.colour(object, colour)) then return colour end
  end
  return not o.natural and random:choose(o.tints) or nil
end

-- The tint in which an object is held out, if there is one.
local function held_out_colour(object, o)
  local natural = objects[object + 1].natural
  for _, colour in ipairs(o.tints) do
    if colour ~= natural and held_out.colour(object, colour) then return colour end
  end
end

local function new_group(random, object, colour, count, total)
  local shares = size_shares[total]
  local size = pick(random, shares, size_names)
  if size == "large" and count > 2 then size = "medium" end
  if count == 2 and total == 2 and size == "large" then size = "medium" end
  return { object = object, name = objects[object + 1].name, colour = colour, count = count, size = size }
end

local function has(groups, object, colour)
  for _, group in ipairs(groups) do
    if group.object == object and (colour == true or group.colour == colour) then return true end
  end
  return false
end

local function pick_groups(random, o, n)
  local groups, row = {}, pick_grouping(random, n)
  for i = 2, #row do
    local object, colour
    local twin = i == 3 and #row == 3 and random:integer(0, 99) < 12 -- a red apple and a green one
    if twin then
      object = groups[1].object
      for _ = 1, 10 do
        colour = M.colour(random, object, o)
        if colour ~= groups[1].colour then break end
      end
      if colour == groups[1].colour then twin = false end
    end
    if not twin then
      for _ = 1, 50 do
        object = random:choose(o.objects_of)
        if not has(groups, object, true) then break end
      end
      colour = M.colour(random, object, o)
      if has(groups, object, colour) then return nil end
    end
    groups[#groups + 1] = new_group(random, object, colour, row[i], n)
  end
  return groups
end

-- ---- where ----

local thirds = { { 0, 340 }, { 452, 572 }, { 684, 1024 } }

local function pick_place(random, margin, wished)
  local low, high = margin, 1024 - margin
  if low > high then return 512 end
  if wished then
    local third = thirds[random:integer(1, 3)]
    local a, b = math.max(low, third[1]), math.min(high, third[2])
    if a <= b then return random:integer(a, b) end
  end
  return random:integer(low, high)
end

-- Whether an object at x, y keeps its distance from those that are there: a share of what would let both be seen whole.
local function is_free(placed, x, y, radius, share)
  for _, other in ipairs(placed) do
    local dx, dy, near = x - other.x, y - other.y, (radius + other.side * 460 // 1024) * share // 100
    if dx * dx + dy * dy < near * near then return false end
  end
  return true
end

local function put(random, item, placed, crowded, wish)
  local radius = item.side * 460 // 1024
  local margin = item.side * (490 + 4 * math.abs(item.rotation)) // 1024
  for try = 1, 24 do
    local x, y
    local other = crowded and placed[#placed]
    if wish and other then -- in this relation to the other one
      local far = (radius + other.side * 460 // 1024) * random:integer(90, 130) // 100
      far = math.max(far, 250)
      local aside = random:integer(-far // 4, far // 4)
      if wish == "left of" then x, y = other.x + far, other.y + aside
      elseif wish == "above" then x, y = other.x + aside, other.y + far
      else x, y = other.x + random:integer(-radius, radius), other.y + random:integer(-radius, radius) end
    elseif other and try < 16 then
      local reach = radius + other.side * 460 // 1024
      x, y = other.x + random:integer(-reach, reach), other.y + random:integer(-reach, reach)
    else
      local wished = random:integer(0, 99) < 60
      x, y = pick_place(random, margin, wished), pick_place(random, margin, wished)
    end
    if x >= margin and y >= margin and x <= 1024 - margin and y <= 1024 - margin
      and is_free(placed, x, y, radius, crowded and 52 or 96) then
      item.x, item.y = x, y
      return true
    end
  end
  return false
end

local function place_all(random, groups, o, wish)
  local placed, waiting = {}, {}
  for g, group in ipairs(groups) do
    local range = M.sizes[group.size]
    local side = random:integer(range[1], range[2])
    for _ = 1, group.count do
      local turn = random:integer(0, 99) < 40 and random:integer(-o.rotation, o.rotation) or 0
      waiting[#waiting + 1] = { group = g, object = group.object, name = group.name, colour = group.colour,
        size = group.size, side = side, rotation = turn, mirrored = random:integer(0, 1) == 1 }
    end
  end
  local crowded = wish ~= nil or #waiting > 1 and random:integer(0, 99) < 30
  for _, item in ipairs(waiting) do
    if not put(random, item, placed, crowded, wish) then return nil end
    placed[#placed + 1] = item
  end
  if wish == "in front of" then
    placed[1], placed[2] = placed[2], placed[1] -- the list begins at the back
  elseif not wish then
    random:shuffle(placed)
  end
  return placed
end

-- ---- backgrounds ----

--- A background, drawn at random, of other colours than those of the objects in `groups`.
function M.background(random, o, groups)
  local kind = pick(random, background_shares, o.backgrounds)
  local background = { kind = kind }
  if kind == "photo" then
    background.photo = random:integer(0, o.photos - 1)
    background.x, background.y = random:integer(0, 1023), random:integer(0, 1023)
    background.zoom = random:integer(0, 1023)
    background.mirrored = random:integer(0, 1) == 1
    return background
  end
  local taken, names = {}, {}
  for _, group in ipairs(groups) do
    taken[group.colour or objects[group.object + 1].natural] = true
  end
  for i = 1, kind == "plain" and 1 or 2 do
    local name
    repeat name = colours.backgrounds[random:integer(1, #colours.backgrounds)][1] until not taken[name]
    names[i] = name
    taken[name] = true
  end
  background.colours = names
  background.angle = random:integer(0, 359)
  background.radial = kind == "gradient" and random:integer(0, 3) == 0
  if kind == "stripes" or kind == "checks" then background.angle = 45 * random:integer(0, 7) end
  if kind == "dots" then background.angle = 45 * random:integer(0, 1) end
  background.period = random:integer(150, 300)
  background.phase = random:integer(0, 1023)
  background.seed = random:integer(0, 0x7fffffff)
  return background
end

-- ---- the whole ----

-- Groups that show a combination that other splits lack, and the relation that two of them are to be in.
local function pick_held_out(random, o)
  local one = random:choose(o.objects_of)
  if random:integer(0, 1) == 0 then
    local colour = held_out_colour(one, o)
    if not colour then return nil end
    local n = pick_count(random, o.low, math.min(o.high, 3))
    local groups = { new_group(random, one, colour, 1, n) }
    while #groups < n do
      local object = random:choose(o.objects_of)
      if not has(groups, object, true) then
        groups[#groups + 1] = new_group(random, object, M.colour(random, object, o), 1, n)
      end
    end
    return groups
  end
  if o.high < 2 then return nil end
  local relation = random:choose { "left of", "above", "in front of" }
  for _ = 1, 200 do
    local other = random:choose(o.objects_of)
    if other ~= one and held_out.relation(one, relation, other) then
      local groups = { new_group(random, one, M.colour(random, one, o), 1, 2),
        new_group(random, other, M.colour(random, other, o), 1, 2) }
      for _, group in ipairs(groups) do if group.size == "large" then group.size = "medium" end end
      return groups, relation
    end
  end
end

--- One scene: { background, groups, objects } with objects from the back to the front; nil where chance put it so that
-- it does not fit, which calls for another try.
-- o: objects_of (positions from 0), tints (names), natural (whether objects may have their own look), low and high
-- (objects in a scene), backgrounds (kinds), photos (how many), rotation (degrees at most), any_combination, held_out.
function M.draw(random, o)
  local groups, wish
  if o.held_out then
    groups, wish = pick_held_out(random, o)
  else
    groups = pick_groups(random, o, pick_count(random, o.low, o.high))
  end
  local placed = groups and place_all(random, groups, o, wish)
  if not placed then return nil end
  return { background = M.background(random, o, groups), groups = groups, objects = placed }
end

return M
