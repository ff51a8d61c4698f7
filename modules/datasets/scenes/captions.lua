--- Captions of scenes, from a grammar: sentence forms with slots, each slot said in one of several ways. With the
-- words goes `asked`, what they say as data: a picture drawn from the caption is right when it shows that.
local objects = require "tycho.datasets.scenes.objects"
local geometry = require "tycho.datasets.scenes.geometry"

local M = {}

local numbers = { "one", "two", "three", "four", "five" }
M.numbers = numbers

-- What a form needs of a scene besides its number of groups: place (of the first group), places (of the first two),
-- relation (of the first two, or of any two in the last list), background (one that is mentioned).
local forms = {
  { -- scenes of one kind of object
    "{a}", "{a} {bg}", "{a} {bg}", "a picture of {a}", "a picture of {a} {bg}", "an image of {a} {bg}",
    "{a} {place}", "{a} {place} {bg}", "{a} {bg}, {place}", "there {is} {a} {bg}", "there {is} {a} {place}",
    "{place}, {a}", "{place} there {is} {a}", "{bg}, {a}", "{bg} there {is} {a} {place}", "{a} can be seen {place}",
    "we see {a} {place} {bg}", "{scene} with {a}", "{scene} with {a} {place}", "nothing but {a}", "just {a} {bg}",
    "this picture shows {a}", "{a}, {place} of the picture", "an icon of {a}", "look at {a} {bg}",
  },
  { -- two kinds
    "{a} and {b}", "{a} and {b} {bg}", "{a} {rel} {b}", "{a} {rel} {b} {bg}", "{a} {rel} {b} {bg}", "{a} is {rel} {b}",
    "there is {a} {rel} {b}", "{a} with {b} {bg}", "{a} {place} and {b} {place2}", "{a} {place} and {b} {place2} {bg}",
    "a picture of {a} and {b}", "a picture of {a} {rel} {b}", "an image of {a} and {b} {bg}", "{bg}, {a} {rel} {b}",
    "{bg} there are {a} and {b}", "{scene} with {a} {rel} {b}", "{scene} with {a} and {b}",
    "{a} and {b}, {thea} {rel} {theb}", "{a} {place}, together with {b}", "{a} and {b}, {thea} {place}",
    "{place}, {a}, and {place2}, {b}", "we see {a} and also {b} {bg}", "both {a} and {b}",
  },
  { -- more
    "{list}", "{list}", "{list} {bg}", "{list} {bg}", "a picture of {list}", "an image of {list} {bg}", "we see {list}",
    "{list}, {thea} {rel} {theb}", "{list} {bg}, {thea} {place}", "{scene} with {list}", "{scene} with {list}",
    "{total} things: {list}", "{total} things {bg}: {list}", "{bg}, {list}", "{list}; {thea} is {rel} {theb}",
    "{thea} is {rel} {theb} in this picture of {list}", "a group of {list}",
  },
}

-- Forms as lists of words and slots, with the slots that they need by name.
for _, list in ipairs(forms) do
  for i, text in ipairs(list) do
    local form = { needs = {}, text = text }
    for words, slot in (text .. "{}"):gmatch "(.-){(%w*)}" do
      form[#form + 1] = words
      form[#form + 1] = slot
      form.needs[slot] = true
    end
    list[i] = form
  end
end

--- How many sentence forms there are, by the kinds of objects in a scene (1, 2 or more).
M.forms = { #forms[1], #forms[2], #forms[3] }

local sizes = { small = { "small", "small", "little", "tiny" }, large = { "large", "large", "big", "huge" } }

local places = {
  ["top left"] = { "at the top left", "in the top left corner", "in the upper left" },
  top = { "at the top", "at the top", "near the top" },
  ["top right"] = { "at the top right", "in the top right corner", "in the upper right" },
  left = { "on the left", "on the left side", "at the left" },
  centre = { "in the middle", "in the centre", "in the center" },
  right = { "on the right", "on the right side", "at the right" },
  ["bottom left"] = { "at the bottom left", "in the bottom left corner", "in the lower left" },
  bottom = { "at the bottom", "at the bottom", "near the bottom" },
  ["bottom right"] = { "at the bottom right", "in the bottom right corner", "in the lower right" },
}

local relations = {
  ["left of"] = { "to the left of", "left of", "on the left of" },
  ["right of"] = { "to the right of", "right of", "on the right of" },
  above = { "above", "above", "higher than" },
  below = { "below", "under", "beneath" },
  ["in front of"] = { "in front of", "in front of", "partly covering" },
  behind = { "behind", "behind", "partly hidden by" },
}

local function article(words) return (words:find "^[aeiou]" and "an " or "a ") .. words end

--- Words for a count, a size, a colour and the noun: "three small red apples", "an egg".
function M.phrase(count, size, colour, object)
  local row = objects[object + 1]
  local words = count == 1 and row.name or row.plural
  if colour then words = colour .. " " .. words end
  if size then words = size .. " " .. words end
  if count > 1 then return numbers[count] .. " " .. words end
  return article(words)
end

local prepositions = { "on", "on", "on", "against", "over" }

-- { a phrase with its preposition, a noun phrase } of a background, drawn at random.
local backgrounds = {
  plain = function(random, c)
    local on = random:choose(prepositions)
    local noun = article((random:integer(0, 3) == 0 and "plain " or "") .. c[1] .. " background")
    return on .. " " .. noun, noun
  end,
  gradient = function(random, c)
    local noun = article(random:choose { "background that goes from %s to %s", "%s to %s gradient",
      "gradient from %s to %s" }:format(c[1], c[2]))
    return "on " .. noun, noun
  end,
  stripes = function(random, c)
    if random:integer(0, 1) == 0 then
      local noun = ("a striped %s and %s background"):format(c[1], c[2])
      return "on " .. noun, noun
    end
    return ("on %s and %s stripes"):format(c[1], c[2]), ("a pattern of %s and %s stripes"):format(c[1], c[2])
  end,
  checks = function(random, c)
    if random:integer(0, 1) == 0 then
      local noun = ("a checkered %s and %s background"):format(c[1], c[2])
      return "on " .. noun, noun
    end
    return ("on %s and %s checks"):format(c[1], c[2]), ("a pattern of %s and %s checks"):format(c[1], c[2])
  end,
  dots = function(random, c)
    local noun = article(random:choose { "%s background with %s dots", "%s pattern with %s dots" }:format(c[1], c[2]))
    return "on " .. noun, noun
  end,
  noise = function(random, c)
    local noun = random:choose { "a cloudy %s and %s background", "a mottled %s and %s background" }:format(c[1], c[2])
    return "on " .. noun, noun
  end,
  photo = function(random)
    local noun = random:choose { "a photo", "a photograph", "a real photo" }
    return random:choose { "on ", "in front of " } .. noun, noun
  end,
}

--- How a background is called: with a preposition, "on a blue background", and as a noun, "a blue background".
---@return string phrase
---@return string noun
function M.background(random, background) return backgrounds[background.kind](random, background.colours) end

--- A place as words in a sentence: "at the top left".
function M.place(random, place) return random:choose(places[place]) end

--- A word for a size, drawn at random; nil for medium, which is not said.
function M.size(random, size) return sizes[size] and random:choose(sizes[size]) end

-- ---- one caption ----

local Speaker = {}
Speaker.__index = Speaker

-- The phrase of a group at its first mention; what it says goes into `asked`.
function Speaker:group(g)
  local group, random = self.groups[g], self.random
  local said = { object = group.object, name = group.name, count = group.count }
  local size = sizes[group.size] and random:integer(0, 1) == 0 and random:choose(sizes[group.size]) or nil
  if size then said.size = group.size end
  if group.colour and (self.twins or random:integer(0, 99) < 94) then said.colour = group.colour end
  self.asked.objects[g] = said
  return M.phrase(group.count, size, said.colour, group.object)
end

-- The phrase of a group that was mentioned, or is about to be.
function Speaker:definite(g)
  local group = self.groups[g]
  local colour = group.colour and (self.twins or self.random:integer(0, 1) == 0) and group.colour
  if colour then self.later[g] = true end
  return "the " .. (colour and colour .. " " or "") .. group.name
end

function Speaker:background()
  local background = self.scene.background
  local c = background.colours
  self.asked.background = { kind = background.kind, colours = c and { c[1], c[2] } }
  return M.background(self.random, background)
end

function Speaker:list()
  local parts = {}
  for g = 1, #self.groups do parts[g] = self:group(g) end
  local last = table.remove(parts)
  if #parts == 0 then return last end
  return table.concat(parts, ", ") .. " and " .. last
end

local slots = {}
function slots.a(s) return s:group(1) end
function slots.b(s) return s:group(2) end
function slots.list(s) return s:list() end
function slots.thea(s) return s:definite(s.first) end
function slots.theb(s) return s:definite(s.second) end
function slots.is(s) return s.groups[1].count == 1 and "is" or "are" end
function slots.bg(s) return (s:background()) end
function slots.scene(s) return (select(2, s:background())) end
function slots.total(s) return numbers[#s.scene.objects] end
function slots.place(s)
  s.placed[s.first] = s.groups[s.first].place
  return s.random:choose(places[s.groups[s.first].place])
end
function slots.place2(s)
  s.placed[2] = s.groups[2].place
  return s.random:choose(places[s.groups[2].place])
end
function slots.rel(s)
  s.asked.relations[1] = { a = s.first, relation = s.relation, b = s.second }
  return s.random:choose(relations[s.relation])
end

-- Groups in a random order, each with its place where all of it is there.
local function ordered(scene, random)
  local groups, order = {}, {}
  for i = 1, #scene.groups do order[i] = i end
  random:shuffle(order)
  for at, i in ipairs(order) do
    local from = scene.groups[i]
    local place
    if from.count == 1 then
      for _, object in ipairs(scene.objects) do if object.group == i then place = object.place end end
    end
    groups[at] = { object = from.object, name = from.name, colour = from.colour, count = from.count, size = from.size,
      place = place, index = i }
  end
  return groups, order
end

-- A relation between two groups of one object each, the first of them at the front of `groups`.
local function pick_relation(scene, groups, random)
  local at = {}
  for i, group in ipairs(groups) do if group.count == 1 then at[group.index] = i end end
  local list = {}
  for _, r in ipairs(scene.relations) do
    local a, b = at[scene.objects[r.a].group], at[scene.objects[r.b].group]
    if a and b then list[#list + 1] = { a, r.relation, b } end
  end
  if #list == 0 then return nil end
  local r = list[random:integer(1, #list)]
  if random:integer(0, 1) == 0 then return r[3], geometry.inverse[r[2]], r[1] end
  return r[1], r[2], r[3]
end

local function fits(form, s, twins)
  local needs = form.needs
  if needs.rel and not s.relation then return false end
  if needs.place and not s.groups[s.first].place then return false end
  if needs.place2 and not s.groups[2].place then return false end
  if needs.thea and (s.groups[s.first].count > 1 or twins and not s.groups[s.first].colour) then return false end
  if needs.theb and twins and not s.groups[s.second].colour then return false end
  return true
end

-- A form that fits, drawn at random; with `placed` one that names a place, if any does: "the apple" of several has no
-- place.
local function choose(list, s, placed, random)
  local function suits(form) return fits(form, s, s.twins) and (not placed or form.needs.place ~= nil) end
  if placed then
    local any = false
    for _, form in ipairs(list) do any = any or suits(form) end
    placed = any
  end
  local form
  repeat form = random:choose(list) until suits(form)
  return form
end

-- Brings a group to the front that has a place. Whether one has.
local function place_first(groups)
  for g, group in ipairs(groups) do
    if group.place then
      groups[1], groups[g] = group, groups[1]
      return true
    end
  end
  return false
end

--- A caption of a scene whose facts are known, and `asked`: { objects = list of { object, name, count, colour?, size?,
-- place? }, relations = list of { a, relation, b } (positions in objects, from 1), background = { kind, colours? } or
-- nil }. placed: it names a place, where anything that is there once, and can be told from the others, has one.
---@return string caption
---@return table asked
function M.caption(scene, random, placed)
  local groups = ordered(scene, random)
  local s = setmetatable({ scene = scene, groups = groups, random = random, first = 1, second = 2, placed = {},
    later = {}, asked = { objects = {}, relations = {} } }, Speaker)
  local list = forms[math.min(#groups, 3)]
  placed = placed and place_first(groups)
  s.twins = groups[2] and groups[1].object == groups[2].object
  local first, relation, second
  if not placed then first, relation, second = pick_relation(scene, groups, random) end
  if first and #groups == 2 and first == 2 then -- what is said first is the first
    groups[1], groups[2] = groups[2], groups[1]
    first, second = 1, 2
  end
  s.relation = relation
  if first then s.first, s.second = first, second end
  local form = choose(list, s, placed, random)
  local words = {}
  for i = 1, #form, 2 do
    words[i] = form[i]
    local slot = slots[form[i + 1]]
    words[i + 1] = slot and slot(s) or ""
  end
  for g, said in ipairs(s.asked.objects) do
    said.place = s.placed[g]
    if s.later[g] then said.colour = groups[g].colour end
  end
  return table.concat(words), s.asked
end

return M
