--- Canvases: pictures of one thing in a style on a ground, a full grid of styles and kinds of things, with captions.
-- Item i depends on (seed, split, i) alone, to the last byte. The page is datasets/canvas/README.md.
--
--     local set = datasets.load("canvas", { dyed = 0 })       -- things as they are: the grid of styles and kinds
--     local item = set:get(0)    -- { image = u8 [3, 32, 32], caption = "a hatched fish on a pink ground", ... }
--     local image = datasets.canvas.draw { item.item }
local ty = require "tycho"
local arguments = require "tycho.arguments"
local drawing = require "tycho.datasets.canvas.drawing"
local items = require "tycho.datasets.items"
local random = require "tycho.datasets.random"

local M = { styles = drawing.styles, kinds = drawing.kinds, known = drawing.known, grounds = drawing.grounds,
  colours = drawing.colours, marks = drawing.marks, side = drawing.side }

--- The words of captions, each once, in order.
M.words = { "a", "on", "ground" }
for _, list in ipairs { M.styles, M.kinds, M.grounds, M.colours, M.marks } do
  for _, word in ipairs(list) do
    local known = false
    for _, other in ipairs(M.words) do known = known or other == word end
    if not known then M.words[#M.words + 1] = word end
  end
end

--- Pictures of one thing in a style on a ground, drawn on demand, as a data set.
---@class Canvas
---@field size integer  items
local Canvas = ty.data.class "Canvas"

function Canvas:describe() return ("of %d x %d (%s, seed %d)"):format(M.side, M.side, self.split, self.seed) end

-- The number of an item's colour, 0 to 5.
local function colour_of(item) return (item.hue + 30) // 60 % 6 end

--- Whether a dyed thing is one of the sixth of kind, colour and marks together that training never shows.
---@param item CanvasItem
---@return boolean
function M.held_out(item)
  arguments.expect("datasets.canvas.held_out", "item", item, "a table")
  for _, name in ipairs { "hue", "kind", "mark" } do
    arguments.expect("datasets.canvas.held_out", "item." .. name, item[name], "an integer")
  end
  return item.hue >= 0 and (item.kind + colour_of(item) + 2 * item.mark) % 6 == 0
end

local function clean(self, item)
  if item.kind >= M.known ~= (self.split == "unknown_kinds") then return false end
  if M.held_out(item) ~= (self.split == "held_out") and self.split ~= "unknown_kinds" then return false end
  if not self.without then return true end
  local words = " " .. drawing.caption(item) .. " "
  for _, word in ipairs(self.without) do
    if words:find(" " .. word .. " ", 1, true) then return false end
  end
  return true
end

local function draw_item(self, i)
  local r, low, high = random.new(self.seed, "canvas " .. self.split, i), 0, M.known - 1
  if self.split == "unknown_kinds" then low, high = M.known, #M.kinds - 1 end
  while true do
    local item = { kind = r:integer(low, high), style = r:integer(0, #M.styles - 1),
      ground = r:integer(0, #M.grounds - 1), hue = -1, mark = 0, near = r:integer(0, 1), mirror = r:integer(0, 1),
      x = r:integer(0, drawing.shifts - 1), y = r:integer(0, drawing.shifts - 1) }
    if r:number() < self.dyed then item.hue, item.mark = r:integer(0, 359), r:integer(0, #M.marks - 1) end
    if not self.moved then item.x, item.y = 1, 1 end
    if self.styles then item.style = self.styles[r:integer(1, #self.styles)] end
    if clean(self, item) then return item end
  end
end

local integers = { "kind", "style", "ground", "hue", "mark" }

--- The items at `positions`: image u8 [n, 3, 32, 32], mask u8 [n, 1, 32, 32] (1 where the thing is), caption and item
-- as lists, and kind, style, ground, hue (degrees, -1: not dyed) and mark i64 [n], numbers from 0 of the lists of
-- names.
---@param positions integer[]|Tensor
function Canvas:batch(positions)
  local list = items.positions("Canvas:batch", positions, self.size)
  if #list == 0 then arguments.fail("Canvas:batch: positions: expected at least one, got none") end
  local batch = { item = {}, caption = {} }
  for k, i in ipairs(list) do
    batch.item[k] = draw_item(self, i)
    batch.caption[k] = drawing.caption(batch.item[k])
  end
  batch.image, batch.mask = drawing.draw(batch.item)
  for _, name in ipairs(integers) do
    local values = {}
    for k, item in ipairs(batch.item) do values[k] = item[name] end
    batch[name] = ty.tensor(values, { dtype = "i64" })
  end
  return batch
end

--- Item i: the fields of a batch without their first size.
---@param i integer
function Canvas:get(i) return items.first(self:batch(items.position("Canvas:get", i, self.size))) end

-- ---- options ----

local none = arguments.none

--- Items of an epoch of each split.
M.lengths = { training = 60000, validation = 2000, held_out = 2000, unknown_kinds = 1000 }

--- datasets.load("canvas", options). options: split ("training"; "validation"; "held_out": dyed things whose kind,
-- colour and marks training never shows together; "unknown_kinds": things that training never shows), seed (0), length
-- (items of an epoch), dyed (0.5: the share of things in another colour than their own; held_out: all), styles (all; a
-- list of names), without (a list of words that no caption has: a set without a style or a kind), moved (false: things
-- are in the middle; true: up to two pixels from there in each direction).
---@param options? table
---@return Canvas
function M.load(options)
  local o = arguments.read("datasets.canvas", options, { split = "training", seed = 0, length = none, dyed = 0.5,
    styles = none, without = none, moved = false }, { split = "a string", seed = "an integer",
    length = "an integer >= 0", dyed = "a number in [0, 1]", styles = "a list of strings",
    without = "a list of strings" })
  if not M.lengths[o.split] then
    arguments.fail("datasets.canvas: split: there is no \"%s\"%s", o.split, ty.core.nearest(o.split, M.lengths))
  end
  local numbers
  for _, name in ipairs(o.styles or {}) do
    local at
    for i, style in ipairs(M.styles) do at = style == name and i - 1 or at end
    if not at then
      arguments.fail("datasets.canvas: styles: expected some of %s, got \"%s\"", table.concat(M.styles, ", "), name)
    end
    numbers = numbers or {}
    numbers[#numbers + 1] = at
  end
  for _, word in ipairs(o.without or {}) do
    local known = false
    for _, list in ipairs { M.styles, M.kinds, M.grounds, M.colours, M.marks } do
      for _, other in ipairs(list) do known = known or other == word end
    end
    if not known then
      arguments.fail("datasets.canvas: without: expected words of captions, got \"%s\"", word)
    end
  end
  return setmetatable({ size = o.length or M.lengths[o.split], seed = math.tointeger(o.seed), split = o.split,
    dyed = o.split == "held_out" and 1 or o.dyed, styles = numbers, without = o.without,
    moved = o.moved }, Canvas)
end

-- ---- items of one's own ----

local most = { kind = #M.kinds - 1, style = #M.styles - 1, ground = #M.grounds - 1, hue = 359, mark = #M.marks - 1,
  near = 1, mirror = 1, x = drawing.shifts - 1, y = drawing.shifts - 1 }

local function check(who, list)
  arguments.expect(who, "items", list, "a list of tables")
  if #list == 0 then arguments.fail("%s: items: expected at least one, got none", who) end
  for i, item in ipairs(list) do
    for name, high in pairs(most) do
      local value, low = item[name], name == "hue" and -1 or 0
      if math.type(value) ~= "integer" or value < low or value > high then
        arguments.fail("%s: items[%d].%s: expected an integer in [%d, %d], got %s", who, i, name, low, high,
          arguments.describe(value))
      end
    end
  end
end

--- Pictures of items that the caller wants: u8 [n, 3, 32, 32], and masks u8 [n, 1, 32, 32].
---@param list CanvasItem[]
---@return Tensor image
---@return Tensor mask
function M.draw(list)
  check("datasets.canvas.draw", list)
  return drawing.draw(list)
end

--- The caption of an item. name: what the thing is called in the place of its colour, marks and kind.
---@param item CanvasItem
---@param name? string
---@return string
function M.caption(item, name)
  check("datasets.canvas.caption", { item })
  arguments.expect("datasets.canvas.caption", "name", name, "a string or nil")
  return drawing.caption(item, name)
end

return M
