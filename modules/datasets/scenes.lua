--- Scenes: one to five emoji on a background, with all that is known of them: boxes, masks, depth order, captions from
-- a grammar and what they ask for. Item i depends on (seed, split, i) alone, to the last byte. The page is
-- datasets/scenes/README.md.
--
--     local set = datasets.load("scenes", { split = "validation", fields = { "image", "caption" } })
--     local item = set:get(0)       -- { image = u8 [3, 64, 64], caption = "two red apples on a blue background" }
local ty = require "tycho"
local arguments = require "tycho.arguments"
local atlas = require "tycho.datasets.scenes.atlas"
local captions = require "tycho.datasets.scenes.captions"
local colours = require "tycho.datasets.scenes.colours"
local complexity = require "tycho.datasets.scenes.complexity"
local held_out = require "tycho.datasets.scenes.held_out"
local items = require "tycho.datasets.items"
local layout = require "tycho.datasets.scenes.layout"
local objects = require "tycho.datasets.scenes.objects"
local questions = require "tycho.datasets.scenes.questions"
local random = require "tycho.datasets.random"
local render = require "tycho.datasets.scenes.render"
local statements = require "tycho.datasets.scenes.statements"

local M = {}

--- The hundred objects, { name, plural, code, emoji, natural, held_out } each; the first is number 0 in labels, boxes
-- and scenes.
M.objects = objects

--- The colours that objects may be tinted with: position by name, from 1.
M.tints = colours.tint

--- The colours of backgrounds: position by name, from 1.
M.backgrounds = colours.background

--- What a picture shows, as sentences that are true or not: see tycho.datasets.scenes.statements.
M.statements = statements

--- The kinds of questions, as the field questions has them.
M.question_kinds = questions.kinds

M.complexity = complexity

--- Scenes of emoji with captions, questions, boxes and masks, drawn on demand, as a data set.
---@class Scenes
---@field size integer  items
---@field side integer  pixels of a picture's side
local Scenes = ty.data.class "Scenes"

function Scenes:describe() return ("of %d x %d (%s, seed %d)"):format(self.side, self.side, self.split, self.seed) end

-- Each part of an item has numbers of its own, so that what is asked for does not change the rest.
local function generator(self, part, i) return random.new(self.seed, self.streams[part], i) end

-- ---- fields ----

-- Number of each object of each scene, i64 [n, k]; `none` where there is none.
local function numbers_of(scenes, k, none)
  local list, at = {}, 0
  for _, scene in ipairs(scenes) do
    for j = 1, k do
      local object = scene.objects[j]
      list[at + j] = object and object.object or none
    end
    at = at + k
  end
  return ty.tensor(list, { dtype = "i64" }):reshape(#scenes, k)
end

-- The scenes that captions and labels are of, and their positions: their own, or with label_noise for some items those
-- of another item, drawn at random. b.swapped says for which.
local function told(self, b)
  if b.told then return end
  b.told, b.told_positions, b.swapped = b.scenes, b.positions, {}
  local others, where = {}, {}
  for r, i in ipairs(b.positions) do
    b.swapped[r] = 0
    if self.label_noise > 0 and self.size > 1 then
      local numbers = generator(self, "labels", i)
      if numbers:number() < self.label_noise then
        local other = numbers:integer(0, self.size - 2)
        if other >= i then other = other + 1 end
        b.swapped[r] = 1
        others[#others + 1], where[#where + 1] = other, r
      end
    end
  end
  if #others == 0 then return end
  b.told = table.move(b.scenes, 1, #b.scenes, 1, {})
  b.told_positions = table.move(b.positions, 1, #b.positions, 1, {})
  local generators = {}
  for k, i in ipairs(others) do generators[k] = generator(self, "scene", i) end
  local scenes = render.scenes(self, generators)
  for k, r in ipairs(where) do b.told[r], b.told_positions[r] = scenes[k], others[k] end
end

-- Captions, and what they ask for, of scenes at positions.
local function speak(self, scenes, positions)
  local words, asked = {}, {}
  for r, scene in ipairs(scenes) do
    words[r], asked[r] = captions.caption(scene, generator(self, "caption", positions[r]), self.placed)
  end
  return words, asked
end

local function told_words(self, b)
  told(self, b)
  if not b.captions then b.captions, b.asked = speak(self, b.told, b.told_positions) end
end

local function labels_of(scenes, k)
  local n = #scenes
  local labels, ones = ty.zeros(n, #objects + 1, { dtype = "u8" }), ty.ones(n, k, { dtype = "u8" })
  return labels:scatter(1, numbers_of(scenes, k, #objects), ones):narrow(1, 0, #objects):contiguous()
end

-- Pixels with noise of so many grey levels, from a seed for each item.
local function noisy(self, b)
  local list, at = {}, 0
  for _, i in ipairs(b.positions) do
    local seed = generator(self, "noise", i):bits()
    list[at + 1], list[at + 2] = (seed & 0xffffffff) - 0x80000000, (seed >> 32) - 0x80000000
    list[at + 3] = math.floor(self.noise * 256 + 0.5)
    at = at + 3
  end
  return ty.pixel_noise(b.image, ty.tensor(list, { dtype = "i32" }):reshape(#b.positions, 3))
end

-- What makes a field of a batch b: { positions, k, scenes, image, owner, boxes }.
local makers = {
  image = function(self, b) return self.noise > 0 and noisy(self, b) or b.image end,
  clean_image = function(_, b) return b.image end,
  owner = function(_, b) return b.owner end,
  scene = function(_, b) return b.scenes end,
  caption = function(self, b)
    told_words(self, b)
    return b.captions
  end,
  asked = function(self, b)
    told_words(self, b)
    return b.asked
  end,
  labels = function(self, b)
    told(self, b)
    return labels_of(b.told, b.k)
  end,
  swapped = function(self, b)
    told(self, b)
    return ty.tensor(b.swapped, { dtype = "u8" })
  end,
  true_caption = function(self, b) return (speak(self, b.scenes, b.positions)) end,
  true_labels = function(_, b) return labels_of(b.scenes, b.k) end,
  questions = function(self, b)
    local lists = {}
    for r, scene in ipairs(b.scenes) do
      local numbers = generator(self, "questions", b.positions[r])
      lists[r] = questions.ask(scene, numbers, self.questions, self.layout)
    end
    return lists
  end,
  statements = function(_, b) return statements.of(b.scenes) end,
  boxes = function(_, b)
    local numbers = numbers_of(b.scenes, b.k, -1):to "i32":unsqueeze(2)
    return ty.concat({ numbers, b.boxes:narrow(2, 0, 4) }, 2)
  end,
  masks = function(_, b)
    return b.owner:unsqueeze(1):eq(ty.arange(b.k, { dtype = "i8" }):reshape(1, b.k, 1, 1)):to "u8"
  end,
  full_masks = function(self, b) return render.full_masks(self, b.scenes, b.k) end,
}

local function batch_of(self, positions)
  local generators = {}
  for r, i in ipairs(positions) do generators[r] = generator(self, "scene", i) end
  local b, result = { positions = positions, k = self.layout.high }, {}
  b.scenes, b.image, b.owner, b.boxes = render.scenes(self, generators)
  for _, field in ipairs(self.fields) do result[field] = makers[field](self, b) end
  return result, b
end

--- The items at `positions`, drawn by one call: image u8 [n, 3, side, side]; caption, asked and scene as lists; labels
-- u8 [n, 100]; statements u8 [n, 1900]; boxes i32 [n, most, 5] (number, left, top, right, bottom), owner i8 [n, side,
-- side], masks and full_masks u8 [n, most, side, side], where `most` is how many objects a scene may have; the number
-- of one that is not there is -1.
---@param positions integer[]|Tensor
function Scenes:batch(positions)
  return (batch_of(self, items.positions("Scenes:batch", positions, self.size)))
end

--- Item i: the fields of a batch without their first size; boxes and masks are of the objects that are there, in the
-- order of scene.objects.
---@param i integer
function Scenes:get(i)
  local batch, b = batch_of(self, items.position("Scenes:get", i, self.size))
  local count = #b.scenes[1].objects
  return items.first(batch, { boxes = count, masks = count, full_masks = count })
end

-- ---- options ----

local none = arguments.none
local defaults = { split = "training", seed = 0, size = 64, length = none,
  fields = { "image", "caption", "asked", "scene", "labels", "boxes" }, objects = { 1, 5 }, objects_of = none,
  colours = none, backgrounds = none, rotation = 20, visible = 0.4, questions = 4, noise = 0,
  label_noise = 0, placed = false }
local kinds = { split = "a string", seed = "an integer", size = "32 or 64 or 128", length = "an integer >= 0",
  fields = "a list of strings", objects = "a pair of integers", objects_of = "a list of strings",
  colours = "a list of strings", backgrounds = "a list of strings", rotation = "an integer in [0, 180]",
  visible = "a number in [0, 1]", questions = "an integer in [1, 20]",
  noise = "a number in [0, 255]", placed = "a boolean", label_noise = "a number in [0, 1]" }

--- Items of an epoch of each split.
M.lengths = { training = 100000, validation = 5000, held_out_objects = 5000, held_out_combinations = 5000 }

local function set_of(names)
  local set = {}
  for _, name in ipairs(names) do set[name] = true end
  return set
end

-- The names of an option, each of which `known` has, or all of them; in the order of `all`.
local function chosen(option, names, all)
  if not names then return all end
  local known, wanted = set_of(all), set_of(names)
  for _, name in ipairs(names) do
    if not known[name] then
      arguments.fail("datasets.scenes: %s: there is no \"%s\"%s", option, name, ty.core.nearest(name, known))
    end
  end
  local result = {}
  for _, name in ipairs(all) do if wanted[name] then result[#result + 1] = name end end
  if #result == 0 then arguments.fail("datasets.scenes: %s: expected at least one name, got none", option) end
  return result
end

local function names_of(rows, key)
  local names = {}
  for i, row in ipairs(rows) do names[i] = row[key] end
  return names
end

-- Positions of the objects of a split, of those that are wanted.
local function objects_of(split, names)
  local wanted, result = set_of(chosen("objects_of", names, names_of(objects, "name"))), {}
  for _, i in ipairs(split == "held_out_objects" and held_out.objects or held_out.others) do
    if wanted[objects[i + 1].name] then result[#result + 1] = i end
  end
  if #result == 0 then
    arguments.fail("datasets.scenes: objects_of: the split \"%s\" has none of %s", split, table.concat(names, ", "))
  end
  return result
end

--- datasets.load("scenes", options). options: split ("training", "validation", "held_out_objects",
-- "held_out_combinations"), seed (0), size (64 pixels a side; 32, 128), length (items of an epoch), fields (only these
-- are made: image, caption, asked, scene, labels, boxes by default, and statements, owner, masks, full_masks,
-- questions), objects ({ 1, 5 }: the least and the most in a scene), objects_of (names: only these), colours (tints,
-- and "natural" for an object's own look), backgrounds (of plain, gradient, stripes, checks, dots, noise, photo),
-- rotation (20 degrees at most), visible (0.4: the share of each object that is not hidden, at least), questions (4 of
-- each scene), noise (0: the standard deviation of pixels, in grey levels; the field clean_image has none), label_noise
-- (0: the share of items with caption, asked and labels of another; the fields swapped, true_caption and true_labels
-- say so) and placed (false; true: captions name a place, where anything has one).
---@param options? table
---@return Scenes
function M.load(options)
  local o = arguments.read("datasets.scenes", options, defaults, kinds)
  if not M.lengths[o.split] then
    arguments.fail("datasets.scenes: split: there is no \"%s\"%s", o.split, ty.core.nearest(o.split, M.lengths))
  end
  local low, high = o.objects[1], o.objects[2]
  if low < 1 or high > 5 or low > high then
    arguments.fail("datasets.scenes: objects: expected { least, most } from 1 to 5, got { %d, %d }", low, high)
  end
  for _, field in ipairs(o.fields) do
    if not makers[field] then
      arguments.fail("datasets.scenes: fields: there is no \"%s\"%s", field, ty.core.nearest(field, makers))
    end
  end
  local looks = names_of(colours.tints, 1)
  table.insert(looks, 1, "natural")
  looks = chosen("colours", o.colours, looks)
  local natural = looks[1] == "natural"
  if natural then looks = table.move(looks, 2, #looks, 1, {}) end
  local backgrounds = chosen("backgrounds", o.backgrounds, layout.backgrounds)
  local photos = set_of(backgrounds).photo and atlas.photos(o.split == "training" and "training" or "held_out")
  return setmetatable({ size = o.length or M.lengths[o.split], side = o.size, seed = o.seed, split = o.split,
    fields = o.fields, visible = o.visible, atlas = atlas.objects(o.size == 128 and 128 or 64), photos = photos or nil,
    questions = o.questions, noise = o.noise, label_noise = o.label_noise, placed = o.placed,
    streams = { scene = "scenes " .. o.split, caption = "captions " .. o.split, questions = "questions " .. o.split,
      noise = "noise " .. o.split, labels = "labels " .. o.split },
    layout = { objects_of = objects_of(o.split, o.objects_of), tints = looks, natural = natural, low = low, high = high,
      backgrounds = backgrounds, photos = photos and photos.shape[1], rotation = o.rotation,
      any_combination = o.split == "held_out_objects" or o.split == "held_out_combinations",
      held_out = o.split == "held_out_combinations" } }, Scenes)
end

return M
