--- Captions of clips, from a grammar, and what they ask for as data.
local captions = require "tycho.datasets.scenes.captions"

local M = {}

local ways = { right = "to the right", left = "to the left", down = "down", up = "up",
  ["lower right"] = "to the lower right", ["upper left"] = "to the upper left", ["lower left"] = "to the lower left",
  ["upper right"] = "to the upper right" }

-- What an object does, by its law: with {way} for the direction and {speed} for how fast, where there is one.
local verbs = {
  constant = { "moves {way}", "moves {speed} {way}", "glides {way}", "slides {speed} {way}", "travels {way}",
    "moves {way} at a constant speed" },
  fall = { "falls", "falls down", "drops", "drops to the ground", "is falling" },
  throw = { "is thrown {way}", "flies {way} in an arc", "is tossed {way}", "jumps {way} and comes down again" },
  bounce = { "bounces off the walls", "bounces around", "bounces", "moves and bounces off the walls" },
  sideways = { "bounces from side to side", "bounces between the left and the right wall", "bounces off the walls" },
  upright = { "bounces up and down", "bounces between the floor and the ceiling", "bounces off the walls" },
  spin = { "spins", "spins {way}", "turns {way}", "rotates", "rotates {way}", "is spinning in place" },
  approach = { "comes closer", "approaches", "grows larger", "comes towards the viewer", "moves closer and closer" },
}

local stills = { "while %s stays where it is", "while %s does not move", "beside %s", "with %s standing still" }

local frames = { "{x}", "{x}", "{x} {bg}", "{x} {bg}", "{bg}, {x}", "a clip in which {x}", "in this clip {x}",
  "{x} in this video", "a video of a scene {bg}: {x}", "we see how {x}" }

local cuts = { "{x}, then the scene changes: {y}", "{x}; cut; {y}", "first {x}, then {y}" }

-- A text with its slots filled; one without a value leaves nothing behind.
local function fill(text, values)
  return (text:gsub("{(%w+)}", function(slot) return values[slot] or "" end):gsub(" +", " "))
end

-- The phrase of an object, and what it says.
local function subject(random, object, asked)
  local said = { object = object.object, name = object.name, count = 1 }
  local size = random:integer(0, 2) == 0 and captions.size(random, object.size) or nil
  if size then said.size = object.size end
  if object.colour and random:integer(0, 99) < 94 then said.colour = object.colour end
  asked.objects[#asked.objects + 1] = said
  return captions.phrase(1, size, said.colour, object.object), said
end

-- "a red ball bounces off the walls while a dog does not move"
local function event(random, segment, asked)
  local mover = segment.objects[#segment.objects]
  local m = mover.motion
  local words, said = subject(random, mover, asked)
  local verb = random:choose(verbs[m.form or m.law])
  local speed = verb:find("{speed}", 1, true) and m.speed or nil
  local way = verb:find("{way}", 1, true) and (ways[m.direction] or m.direction) or nil
  said.law, said.speed, said.direction = m.law, speed, way and m.direction
  words = words .. " " .. fill(verb, { way = way, speed = speed })
  if #segment.objects > 1 then
    words = words .. " " .. random:choose(stills):format((subject(random, segment.objects[1], asked)))
  end
  return words
end

--- A caption of a clip, and `asked`: { objects = list of { object, name, count = 1, colour?, size?, law?, direction?,
-- speed? }, background = { kind, colours? } or nil }, of all segments.
---@return string caption
---@return table asked
function M.caption(clip, random)
  local asked = { objects = {}, relations = {} }
  local x = event(random, clip.segments[1], asked)
  if clip.segments[2] then
    return fill(random:choose(cuts), { x = x, y = event(random, clip.segments[2], asked) }), asked
  end
  local frame = random:choose(frames)
  local bg
  if frame:find("{bg}", 1, true) then
    local background = clip.segments[1].background
    local c = background.colours
    bg = captions.background(random, background)
    asked.background = { kind = background.kind, colours = c and { c[1], c[2] } }
  end
  return fill(frame, { x = x, bg = bg }), asked
end

return M
