--- Questions about clips, with answers: some that one picture answers, and more that it does not. What moves or stands
-- still, of which colour, how and which way it moves, where it is at the beginning and at the end, what comes first,
-- yes or no. Answers of a kind come about equally, so that who has not seen the clip does not do well.
local captions = require "tycho.datasets.scenes.captions"
local geometry = require "tycho.datasets.scenes.geometry"

local M = {}

--- The kinds of questions.
M.kinds = { "name", "colour", "law", "way", "place", "order", "yes_no" }

-- What is said of a motion by its form or law.
local laws = { constant = "in a line", fall = "it falls", throw = "in an arc", bounce = "it bounces",
  sideways = "it bounces", upright = "it bounces", spin = "it spins", approach = "it comes closer" }

-- Sides and corners by the direction of a motion, in the words that places of pictures have.
local ways = { right = "right", left = "left", up = "top", down = "bottom", ["lower right"] = "bottom right",
  ["upper left"] = "top left", ["lower left"] = "bottom left", ["upper right"] = "top right" }

-- How often an answer that came by chance is kept, in percent: a line has eight ways, an arc two of them.
local kept_laws = { ["it falls"] = 100, ["in an arc"] = 100, ["in a line"] = 50, ["it bounces"] = 50,
  ["it spins"] = 50, ["it comes closer"] = 50 }

local function is_kept(random, share) return random:integer(0, 99) < share end

local function mover_of(segment) return segment.objects[#segment.objects] end

-- The objects that are alone of their kind in the whole clip: { object, segment, moves }.
local function alone(clip)
  local count, list = {}, {}
  for _, segment in ipairs(clip.segments) do
    for _, o in ipairs(segment.objects) do count[o.object] = (count[o.object] or 0) + 1 end
  end
  for k, segment in ipairs(clip.segments) do
    for _, o in ipairs(segment.objects) do
      if count[o.object] == 1 then
        list[#list + 1] = { object = o, segment = segment, number = k, moves = o == mover_of(segment) }
      end
    end
  end
  return list
end

local function some(s, fits)
  if #s.alone == 0 then return nil end
  local from = s.random:integer(0, #s.alone - 1)
  for k = 0, #s.alone - 1 do
    local x = s.alone[(from + k) % #s.alone + 1]
    if fits(x) then return x end
  end
end

local function some_mover(s) return some(s, function(x) return x.moves end) end

-- Where an object is in its scene's first frame or its last.
local function place_of(x, at_end, side)
  local track = x.object.track
  local at = track[at_end and x.segment.from + x.segment.count or x.segment.from + 1]
  return at[7] > 0.5 and geometry.place(at[3], at[4], at[5], at[6], side) or nil
end

-- Each gives a question and its answer, or nil where this clip has none of the kind by these numbers.
local makers = {}

function makers.name(s)
  local segment = s.random:choose(s.clip.segments)
  local first = segment == s.clip.segments[1]
  local when = #s.clip.segments == 1 and "" or first and " at the beginning" or " at the end"
  if #segment.objects > 1 and s.random:integer(0, 1) == 0 then
    return ("what does not move%s?"):format(when), segment.objects[1].name
  end
  return ("what moves%s?"):format(when), mover_of(segment).name
end

function makers.colour(s)
  local x = some(s, function(one) return one.object.colour ~= nil end)
  return x and ("what colour is the %s?"):format(x.object.name), x and x.object.colour
end

function makers.law(s)
  local x = some_mover(s)
  if not x then return nil end
  local answer = laws[x.object.motion.form or x.object.motion.law]
  if not is_kept(s.random, kept_laws[answer]) then return nil end
  return ("how does the %s move?"):format(x.object.name), answer
end

function makers.way(s)
  local x = some(s, function(one) return one.moves and ways[one.object.motion.direction or ""] ~= nil end)
  if not x then return nil end
  if x.object.motion.form == "throw" and not is_kept(s.random, 40) then return nil end
  return ("which way does the %s move?"):format(x.object.name), ways[x.object.motion.direction]
end

function makers.place(s)
  local at_end = s.random:integer(0, 1) == 1
  local x = some_mover(s)
  local place = x and place_of(x, at_end, s.side)
  if not place or not is_kept(s.random, place == "centre" and 50 or 100) then return nil end
  return ("where is the %s at %s?"):format(x.object.name, at_end and "the end" or "first"), place
end

function makers.order(s)
  local one, two = s.clip.segments[1], s.clip.segments[2]
  if not two then return nil end
  local a, b = mover_of(one), mover_of(two)
  if a.object == b.object then return nil end
  local last = s.random:integer(0, 1) == 1
  local x, y = a.name, b.name
  if s.random:integer(0, 1) == 1 then x, y = y, x end
  return ("which comes %s, the %s or the %s?"):format(last and "last" or "first", x, y), last and b.name or a.name
end

local yes_no = {
  function(s, yes) -- does it move?
    if yes and not is_kept(s.random, 40) then return nil end -- more objects move than stand still
    local x = some(s, function(one) return one.moves == yes end)
    return x and ("does the %s move?"):format(x.object.name)
  end,
  function(s, yes) -- the way
    local x = some(s, function(one) return one.moves and one.object.motion.law == "constant" end)
    if not x then return nil end
    local way = ways[x.object.motion.direction]
    if not yes then
      local other
      repeat other = s.random:choose(geometry.places) until other ~= way and other ~= "centre"
      way = other
    end
    return ("does the %s move to the %s?"):format(x.object.name, way)
  end,
  function(s, yes) -- is it there?
    local x = s.random:choose(s.random:choose(s.clip.segments).objects).object
    if not yes then
      x = s.random:choose(s.options.objects_of)
      for _, segment in ipairs(s.clip.segments) do
        for _, o in ipairs(segment.objects) do if o.object == x then return nil end end
      end
    end
    return ("is there %s?"):format(captions.phrase(1, nil, nil, x))
  end,
}

function makers.yes_no(s)
  local question = s.random:choose(yes_no)(s, s.yes)
  return question, question and (s.yes and "yes" or "no")
end

--- Questions about a clip: { { question, answer, kind } ... }, no two the same; fewer than `count` where a clip has too
-- little to ask about. side: pixels of a picture's side.
---@param clip table
---@param random table
---@param count integer
---@param side integer
---@param options table  what clips are drawn from, as in layout.draw
---@return { question: string, answer: string, kind: string }[]
function M.ask(clip, random, count, side, options)
  local s = { clip = clip, random = random, side = side, options = options, alone = alone(clip) }
  local list, asked = {}, {}
  for _ = 1, 6 * count do
    if #list == count then break end
    local kind = random:choose(M.kinds)
    s.yes = random:integer(0, 1) == 0
    local question, answer = makers[kind](s)
    if question and not asked[question] then
      asked[question] = true
      list[#list + 1] = { question = question, answer = answer, kind = kind }
    end
  end
  return list
end

return M
