--- What a picture of a scene shows, as 1,900 sentences that are true or not: "there is an apple", "there is a red
-- apple" (or one in its own colours), "there is an apple at the top left". A classifier of these labels is a judge of
-- pictures that were drawn from a caption: what the caption asks for is a few of the sentences.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local colours = require "tycho.datasets.scenes.colours"
local geometry = require "tycho.datasets.scenes.geometry"
local objects = require "tycho.datasets.scenes.objects"

local M = {}

local looks = #colours.tints + 1 -- the first is an object's own look
local of_place = {}
for i, name in ipairs(geometry.places) do of_place[name] = i - 1 end
local first_colour = #objects
local first_place = first_colour + #objects * looks

--- How many sentences there are.
M.count = first_place + #objects * #geometry.places

-- Positions of sentences, from 0.
local function colour_at(object, colour)
  return first_colour + object * looks + (colour and colours.tint[colour] or 0)
end

local function place_at(object, place) return first_place + object * #geometry.places + of_place[place] end

--- The sentences in short: "apple", "red apple", "natural apple", "apple at the top left".
---@return string[]
function M.names()
  local names = {}
  for i, object in ipairs(objects) do
    names[i] = object.name
    for c = 0, #colours.tints do
      local look = c == 0 and "natural" or colours.tints[c][1]
      names[first_colour + (i - 1) * looks + c + 1] = look .. " " .. object.name
    end
    for p, place in ipairs(geometry.places) do
      names[first_place + (i - 1) * #geometry.places + p] = object.name .. " at the " .. place
    end
  end
  return names
end

--- Which sentences are true of scenes: u8 [n, count].
---@param scenes table[]  as the field `scene` has them
---@return Tensor
function M.of(scenes)
  arguments.expect("statements.of", "scenes", scenes, "a list of tables")
  local rows, columns, n = {}, {}, 0
  local function say(row, column)
    n = n + 1
    rows[n], columns[n] = row, column
  end
  for r, scene in ipairs(scenes) do
    arguments.expect("statements.of", "a scene's objects", scene.objects, "a list of tables")
    for _, object in ipairs(scene.objects) do
      say(r - 1, object.object)
      say(r - 1, colour_at(object.object, object.colour))
      if object.place then say(r - 1, place_at(object.object, object.place)) end
    end
  end
  local result = ty.zeros(#scenes * M.count, { dtype = "u8" })
  for i = 1, n do rows[i] = rows[i] * M.count + columns[i] end
  return result:scatter(0, ty.tensor(rows, { dtype = "i64" }), ty.ones(n, { dtype = "u8" })):reshape(#scenes, M.count)
end

--- What a caption asks for, as sentences: a list of { kind ("object", "colour", "place"), index }.
---@param asked table  as the field `asked` has it
---@return { kind: string, index: integer }[]
function M.asked(asked)
  arguments.expect("statements.asked", "asked", asked, "a table")
  arguments.expect("statements.asked", "asked.objects", asked.objects, "a list of tables")
  local list = {}
  for _, said in ipairs(asked.objects) do
    list[#list + 1] = { kind = "object", index = said.object }
    if said.colour then list[#list + 1] = { kind = "colour", index = colour_at(said.object, said.colour) } end
    if said.place then list[#list + 1] = { kind = "place", index = place_at(said.object, said.place) } end
  end
  return list
end

--- How much of what captions ask for a judge sees in pictures: by kind (object, colour, place) the share of sentences
-- that it takes for true, and how many were asked. A colour or a place counts as well where it is the likeliest of its
-- object.
---@param logits Tensor    [n, count], the judge's, of one picture for each caption
---@param asked table[]    what each caption asks for
---@return table<string, number> shares
---@return table<string, integer> counts
function M.score(logits, asked)
  local who = "statements.score"
  arguments.expect(who, "logits", logits, "a tensor")
  arguments.expect(who, "asked", asked, "a list of tables")
  if logits.ndim ~= 2 or logits.shape[1] ~= #asked or logits.shape[2] ~= M.count then
    arguments.fail("%s: logits: expected [%d, %d], got %s", who, #asked, M.count, arguments.describe(logits))
  end
  local groups = { object = { 0, 1 }, colour = { first_colour, looks }, place = { first_place, #geometry.places } }
  local shares, counts = {}, {}
  for r = 1, #asked do
    local row = logits:select(0, r - 1):tolist()
    for _, said in ipairs(M.asked(asked[r])) do
      local first, width = table.unpack(groups[said.kind])
      first = said.index - (said.index - first) % width
      local holds = row[said.index + 1] > 0
      if width > 1 and not holds then
        local others = table.move(row, first + 1, first + width, 1, {})
        table.remove(others, said.index - first + 1)
        holds = row[said.index + 1] > math.max(table.unpack(others))
      end
      counts[said.kind] = (counts[said.kind] or 0) + 1
      shares[said.kind] = (shares[said.kind] or 0) + (holds and 1 or 0)
    end
  end
  for kind, count in pairs(counts) do shares[kind] = shares[kind] / count end
  return shares, counts
end

return M
