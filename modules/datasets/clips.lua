--- Clips: emoji that move by physical laws before a background, with captions, tracks and masks. Item i depends on
-- (seed, split, i) alone, to the last byte. The page is datasets/clips/README.md.
--
--     local set = datasets.load("clips", { frames = 16, size = 32 })
--     local item = set:get(0)   -- { video = u8 [16, 3, 32, 32], caption = "a red star bounces off the walls", ... }
local ty = require "tycho"
local arguments = require "tycho.arguments"
local atlas = require "tycho.datasets.scenes.atlas"
local captions = require "tycho.datasets.clips.captions"
local colours = require "tycho.datasets.scenes.colours"
local held_out = require "tycho.datasets.scenes.held_out"
local items = require "tycho.datasets.items"
local layout = require "tycho.datasets.scenes.layout"
local motion = require "tycho.datasets.clips.motion"
local objects = require "tycho.datasets.scenes.objects"
local questions = require "tycho.datasets.clips.questions"
local random = require "tycho.datasets.random"
local render = require "tycho.datasets.scenes.render"
local rows = require "tycho.datasets.scenes.rows"

local M = {}

--- The laws, of which the first is number 0: constant (speed), gravity, bounce, spin, approach.
M.laws = motion.laws
M.objects = objects

--- The kinds of questions, as the field questions has them.
M.question_kinds = questions.kinds

--- Clips of emoji that move by simple laws, drawn on demand, as a data set.
---@class Clips
---@field size integer    items
---@field frames integer
---@field side integer    pixels of a picture's side
local Clips = ty.data.class "Clips"

function Clips:describe()
  return ("of %d frames of %d x %d (%s, seed %d)"):format(self.frames, self.side, self.side, self.split, self.seed)
end

local function generator(self, part, i) return random.new(self.seed, self.streams[part], i) end

-- ---- what happens ----

-- An object and a law that the split has.
local function pick_mover(self, numbers)
  local object, law
  repeat
    object, law = numbers:choose(self.layout.objects_of), numbers:choose(self.laws)
  until self.split == "held_out_objects" or motion.is_held_out(object, law) == (self.split == "held_out_combinations")
  return object, law
end

-- How often what moves is large, in percent: where there is way to go, it is rather not.
local large_shares = { constant = 20, gravity = 30, bounce = 20, spin = 60, approach = 0 }

-- What is to confuse or to hide the one that moves: others that look like it and move on their own, in front of it, and
-- something large in front of all where it is halfway.
local function new_extras(self, numbers, mover, count)
  local list = {}
  for i = 1, self.distractors do
    local law = numbers:choose { "constant", "bounce" }
    list[i] = { object = mover.object, name = mover.name, colour = mover.colour, size = "medium", distractor = true,
      mirrored = numbers:integer(0, 1) == 1, motion = motion.draw(numbers, law, "medium") }
  end
  if self.occlusion > 0 and numbers:number() < self.occlusion then
    local other
    repeat other = numbers:choose(self.layout.objects_of) until other ~= mover.object
    local where = motion.still(numbers, "medium")
    where.x, where.y = motion.at(mover.motion, (count - 1) // 2, math.max(count - 1, 1))
    list[#list + 1] = { object = other, name = objects[other + 1].name, size = "medium", cover = true, motion = where,
      mirrored = numbers:integer(0, 1) == 1 }
  end
  return list
end

-- The objects of a scene in the order in which they are drawn, which is that of their rows.
local function drawn_of(segment)
  if not segment.extras then return segment.objects end
  local list = table.move(segment.objects, 1, #segment.objects, 1, {})
  return table.move(segment.extras, 1, #segment.extras, #list + 1, list)
end

-- A scene of so many frames: one that moves in front of, perhaps, one that does not.
local function new_segment(self, numbers, from, count)
  local object, law = pick_mover(self, numbers)
  local size = numbers:integer(0, 99) < large_shares[law] and "large" or "medium"
  local mover = { object = object, name = objects[object + 1].name, mirrored = numbers:integer(0, 1) == 1,
    colour = layout.colour(numbers, object, self.layout), motion = motion.draw(numbers, law, size),
    size = law ~= "approach" and size or nil }
  local list = { mover }
  local two = self.layout.high > 1 and (self.layout.low > 1 or numbers:integer(0, 99) < 35)
  if two then
    local other
    repeat other = numbers:choose(self.layout.objects_of) until other ~= object
    local other_size = numbers:integer(0, 1) == 0 and "small" or "medium"
    table.insert(list, 1, { object = other, name = objects[other + 1].name, size = other_size,
      colour = layout.colour(numbers, other, self.layout), motion = motion.still(numbers, other_size),
      mirrored = numbers:integer(0, 1) == 1 })
  end
  local segment = { from = from, count = count, law = law, objects = list,
    background = layout.background(numbers, self.layout, list) }
  -- Time stands still for a stretch of frames.
  if self.still > 0 and numbers:number() < self.still and count >= 8 then
    local length = numbers:integer(count // 4, count // 2)
    local begin = numbers:integer(0, count - length)
    segment.still = { from + begin, from + begin + length - 1 }
  end
  if self.distractors > 0 or self.occlusion > 0 then segment.extras = new_extras(self, numbers, mover, count) end
  return segment
end

local function new_clip(self, numbers)
  if self.cuts > 0 and numbers:number() < self.cuts then
    local cut = numbers:integer(self.frames * 3 // 8, self.frames * 5 // 8)
    return { cut = cut, segments = { new_segment(self, numbers, 0, cut),
      new_segment(self, numbers, cut, self.frames - cut) } }
  end
  return { segments = { new_segment(self, numbers, 0, self.frames) } }
end

-- Time in a segment at frame f, and its last: a frozen stretch takes no time.
local function time_of(segment, f)
  local t, last, still = f - segment.from, segment.count - 1, segment.still
  if still then
    local length = still[2] - still[1]
    last = last - length
    if f > still[1] then t = t - math.min(f - still[1], length) end
  end
  return t, math.max(last, 1)
end

-- ---- drawing ----

-- Pictures of clips with `k` rows for each frame: video [n * frames, 3, side, side], owner, boxes, overlap.
local function draw(self, clips, k)
  local scenes, of_frame = {}, {} -- backgrounds, and which of them each frame has
  local list, at, texels, side = {}, 0, self.atlas.shape[3], self.side
  for _, clip in ipairs(clips) do
    local row = 0
    for _, segment in ipairs(clip.segments) do
      scenes[#scenes + 1] = segment
      segment.row = row
      local all = drawn_of(segment)
      row = row + #all
      for f = segment.from, segment.from + segment.count - 1 do
        of_frame[#of_frame + 1] = #scenes - 1
        local t, last = time_of(segment, f)
        for _ = 1, segment.row do at = rows.nothing(list, at) end
        for _, o in ipairs(all) do
          local x, y, edge, turned = motion.at(o.motion, t, last)
          at = rows.sprite(list, at, o.object, x, y, edge, turned, o.mirrored, o.colour, side, texels)
        end
        for _ = segment.row + #all + 1, k do at = rows.nothing(list, at) end
      end
    end
  end
  local canvas = render.backgrounds(self, scenes):index_select(0, ty.tensor(of_frame, { dtype = "i64" }))
  local sprites = ty.tensor(list, { dtype = "i32" }):reshape(#clips * self.frames, k, rows.sprite_fields)
  return { ty.draw_sprites(canvas, self.atlas, sprites) }
end

-- Tracks of a clip from what draw_sprites counted: objects get `track`, a list by frame of { x, y, left, top, right,
-- bottom, visible }. False where one is hidden too much for too long.
local function read_tracks(self, clip, boxes, overlap, k, at)
  for _, segment in ipairs(clip.segments) do
    for j, o in ipairs(drawn_of(segment)) do
      local row, seen = segment.row + j, 0
      o.track = {}
      for f = segment.from, segment.from + segment.count - 1 do
        local here = at * self.frames + f
        local b, area = (here * k + row - 1) * 5, overlap[(here * k + row - 1) * k + row]
        local visible = area > 0 and boxes[b + 5] / area or 0
        if visible >= self.visible then seen = seen + 1 end
        local x, y = motion.at(o.motion, time_of(segment, f))
        o.track[f + 1] = { x * self.side / 1024, y * self.side / 1024, boxes[b + 1], boxes[b + 2], boxes[b + 3],
          boxes[b + 4], visible }
      end
      if 3 * seen < 2 * segment.count and not o.distractor and not o.cover then return false end
    end
  end
  return true
end

local tries = 100

-- Clips from generators, drawn; those in which something is hidden for long are made anew.
local function make(self, generators, k)
  local clips, left, all = {}, {}, nil
  for i = 1, #generators do left[i] = i end
  for try = 1, tries do
    local these, again = {}, {}
    for r, i in ipairs(left) do
      clips[i] = new_clip(self, generators[i])
      these[r] = clips[i]
    end
    local drawn = draw(self, these, k)
    local boxes, overlap = drawn[3]:flatten():tolist(), drawn[4]:flatten():tolist()
    for r, i in ipairs(left) do
      if not read_tracks(self, clips[i], boxes, overlap, k, r - 1) then again[#again + 1] = i end
    end
    if try == 1 then
      all = drawn
    else
      for r, i in ipairs(left) do
        for part = 1, 2 do
          all[part]:narrow(0, (i - 1) * self.frames, self.frames)
            :copy_(drawn[part]:narrow(0, (r - 1) * self.frames, self.frames))
        end
      end
    end
    if #again == 0 then
      local n, t, side = #generators, self.frames, self.side
      return clips, all[1]:reshape(n, t, 3, side, side), all[2]:reshape(n, t, side, side)
    end
    left = again
  end
  arguments.fail("datasets.clips: found no clip of these options in which all is seen in %d tries (%s)", tries,
    tostring(self))
end

-- ---- fields ----

local function each_object(clip, fn)
  for _, segment in ipairs(clip.segments) do
    for j, object in ipairs(drawn_of(segment)) do fn(object, segment.row + j, segment) end
  end
end

local function speak(self, b)
  if b.captions then return end
  b.captions, b.asked = {}, {}
  for r, clip in ipairs(b.clips) do
    b.captions[r], b.asked[r] = captions.caption(clip, generator(self, "caption", b.positions[r]))
  end
end

local makers = {
  video = function(_, b) return b.video end,
  scene = function(_, b) return b.clips end,
  owner = function(_, b) return b.owner end,
  caption = function(self, b)
    speak(self, b)
    return b.captions
  end,
  asked = function(self, b)
    speak(self, b)
    return b.asked
  end,
  questions = function(self, b)
    local lists = {}
    for r, clip in ipairs(b.clips) do
      lists[r] = questions.ask(clip, generator(self, "questions", b.positions[r]), self.questions, self.side,
        self.layout)
    end
    return lists
  end,
  law = function(_, b)
    local list = {}
    for r, clip in ipairs(b.clips) do list[r] = motion.number[clip.segments[1].law] end
    return ty.tensor(list, { dtype = "i64" })
  end,
  cut = function(_, b)
    local list = {}
    for r, clip in ipairs(b.clips) do list[r] = clip.cut or -1 end
    return ty.tensor(list, { dtype = "i64" })
  end,
  target = function(_, b)
    local list = {}
    for r, clip in ipairs(b.clips) do list[r] = #clip.segments[1].objects - 1 end
    return ty.tensor(list, { dtype = "i64" })
  end,
  objects = function(_, b)
    local list = {}
    for i = 1, #b.clips * b.k do list[i] = -1 end
    for r, clip in ipairs(b.clips) do
      each_object(clip, function(o, row) list[(r - 1) * b.k + row] = o.object end)
    end
    return ty.tensor(list, { dtype = "i64" }):reshape(#b.clips, b.k)
  end,
  tracks = function(self, b)
    local list, t = {}, self.frames
    for i = 1, #b.clips * b.k * t * 7 do list[i] = 0 end
    for r, clip in ipairs(b.clips) do
      each_object(clip, function(o, row)
        for f, numbers in pairs(o.track) do
          table.move(numbers, 1, 7, (((r - 1) * b.k + row - 1) * t + f - 1) * 7 + 1, list)
        end
      end)
    end
    return ty.tensor(list, { dtype = "f32" }):reshape(#b.clips, b.k, t, 7)
  end,
  masks = function(_, b)
    return b.owner:unsqueeze(1):eq(ty.arange(b.k, { dtype = "i8" }):reshape(1, b.k, 1, 1, 1)):to "u8"
  end,
}

local function batch_of(self, positions)
  local generators = {}
  for r, i in ipairs(positions) do generators[r] = generator(self, "clip", i) end
  local b, result = { positions = positions, k = self.most }, {}
  b.clips, b.video, b.owner = make(self, generators, b.k)
  for _, field in ipairs(self.fields) do result[field] = makers[field](self, b) end
  return result, b
end

--- The items at `positions`: video u8 [n, frames, 3, side, side]; caption, asked, scene and questions as lists; law and
-- cut (the first frame of the second scene, or -1) i64 [n]; objects i64 [n, most]; tracks f32 [n, most, frames, 7]
-- (middle x, y, left, top, right, bottom in pixels, visible share; zeros where an object is not there); owner i8 [n,
-- frames, side, side], masks u8 [n, most, frames, side, side]; objects that are not there are -1.
---@param positions integer[]|Tensor
function Clips:batch(positions)
  return (batch_of(self, items.positions("Clips:batch", positions, self.size)))
end

--- Item i: the fields of a batch without their first size, of the objects that are there.
---@param i integer
function Clips:get(i)
  local batch, b = batch_of(self, items.position("Clips:get", i, self.size))
  local count = 0
  each_object(b.clips[1], function() count = count + 1 end)
  return items.first(batch, { tracks = count, masks = count, objects = count })
end

--- All clips of a set, drawn some at a time, with the boxes of what each shows first: what vision.track learns from and
-- is judged by.
---@return { video: Tensor, boxes: Tensor }  u8 [clips, frames, 3, h, w]; f32 [clips, frames, 4], pixels
function Clips:tracked()
  local set, video, boxes = setmetatable({ fields = { "video", "tracks" } }, { __index = self }), {}, {}
  for at = 0, self.size - 1, 50 do
    local batch = Clips.batch(set, ty.arange(at, math.min(at + 50, self.size)))
    video[#video + 1], boxes[#boxes + 1] = batch.video, batch.tracks:select(1, 0):narrow(2, 2, 4)
  end
  if #video == 0 then arguments.fail "Clips:tracked: expected a set of at least one clip, got an empty one" end
  return { video = ty.keep(ty.concat(video, 0)), boxes = ty.keep(ty.concat(boxes, 0):contiguous()) }
end

--- What datasets.show draws of an item: eight of its frames beside each other, and the caption.
---@param item table
function M.cell(item)
  arguments.expect("datasets.clips.cell", "item", item, "a table")
  arguments.expect("datasets.clips.cell", "item.video", item.video, "a tensor")
  local last, list = item.video.shape[1] - 1, {}
  for i = 0, 7 do
    list[#list + 1] = item.video:select(0, (i * last + 3) // 7)
    if i < 7 then list[#list + 1] = ty.full({ 3, item.video.shape[3], 1 }, 60, { dtype = "u8" }) end
  end
  return ty.concat(list, 2), item.caption
end

-- ---- options ----

local none = arguments.none
local defaults = { split = "training", seed = 0, size = 32, frames = 16, length = none,
  fields = { "video", "caption", "asked", "scene", "law", "tracks" }, objects = { 1, 2 }, laws = none,
  backgrounds = none, cuts = 0, still = 0, visible = 0.4, distractors = 0, occlusion = 0, questions = 6 }
local kinds = { split = "a string", seed = "an integer", size = "32 or 64 or 128", frames = "an integer in [8, 32]",
  length = "an integer >= 0", fields = "a list of strings", objects = "a pair of integers", laws = "a list of strings",
  backgrounds = "a list of strings", cuts = "a number in [0, 1]", still = "a number in [0, 1]",
  visible = "a number in [0, 1]", distractors = "an integer in [0, 3]", occlusion = "a number in [0, 1]",
  questions = "an integer in [1, 20]" }

--- Items of an epoch of each split.
M.lengths = { training = 50000, validation = 2000, held_out_objects = 2000, held_out_combinations = 2000 }

--- datasets.load("clips", options). options: split ("training", "validation", "held_out_objects",
-- "held_out_combinations"), seed (0), size (32 pixels a side; 64, 128), frames (16; 8 to 32), length (items of an
-- epoch), fields (only these are made: video, caption, asked, scene, law, tracks by default, and cut, objects, owner,
-- masks, target, questions), objects ({ 1, 2 }: the least and the most in a scene, of which one moves), laws (of
-- constant, gravity, bounce, spin, approach), backgrounds (of plain, gradient, stripes, checks, dots, noise, photo),
-- cuts (0: the share of clips with two scenes), still (0: the share of scenes in which nothing moves for a stretch of
-- frames), visible (0.4: of an object, in two thirds of its frames at least), distractors (0 to 3: so many others that
-- look like the one that moves and move on their own), occlusion (0: the share of scenes in which something is in front
-- of where the one that moves is halfway), questions (6 of each clip, at most). Distractors and what hides come last
-- among a scene's rows; captions and questions do not speak of them, and `target` says the row of the one that moves.
---@param options? table
---@return Clips
function M.load(options)
  local who = "datasets.clips"
  local o = arguments.read(who, options, defaults, kinds)
  local function chosen(option, names, all)
    if not names then return all end
    local known, wanted, result = {}, {}, {}
    for _, name in ipairs(all) do known[name] = true end
    for _, name in ipairs(names) do
      if not known[name] then
        arguments.fail("%s: %s: there is no \"%s\"%s", who, option, name, ty.core.nearest(name, known))
      end
      wanted[name] = true
    end
    for _, name in ipairs(all) do if wanted[name] then result[#result + 1] = name end end
    if #result == 0 then arguments.fail("%s: %s: expected at least one name, got none", who, option) end
    return result
  end
  if not M.lengths[o.split] then
    arguments.fail("%s: split: there is no \"%s\"%s", who, o.split, ty.core.nearest(o.split, M.lengths))
  end
  local low, high = o.objects[1], o.objects[2]
  if low < 1 or high > 2 or low > high then
    arguments.fail("%s: objects: expected { least, most } from 1 to 2, got { %d, %d }", who, low, high)
  end
  for _, field in ipairs(o.fields) do
    if not makers[field] then
      arguments.fail("%s: fields: there is no \"%s\"%s", who, field, ty.core.nearest(field, makers))
    end
  end
  local backgrounds, tints = chosen("backgrounds", o.backgrounds, layout.backgrounds), {}
  for i, row in ipairs(colours.tints) do tints[i] = row[1] end
  local photos
  for _, kind in ipairs(backgrounds) do
    if kind == "photo" then photos = atlas.photos(o.split == "training" and "training" or "held_out") end
  end
  return setmetatable({ size = o.length or M.lengths[o.split], side = o.size, frames = o.frames, seed = o.seed,
    split = o.split, fields = o.fields, visible = o.visible, distractors = o.distractors, occlusion = o.occlusion,
    most = (high + o.distractors + (o.occlusion > 0 and 1 or 0)) * (o.cuts > 0 and 2 or 1),
    cuts = o.cuts, still = o.still, questions = o.questions,
    laws = chosen("laws", o.laws, motion.laws), atlas = atlas.objects(o.size == 128 and 128 or 64), photos = photos,
    streams = { clip = "clips " .. o.split, caption = "clip captions " .. o.split,
      questions = "clip questions " .. o.split },
    layout = { objects_of = o.split == "held_out_objects" and held_out.objects or held_out.others, tints = tints,
      natural = true, low = low, high = high, backgrounds = backgrounds, photos = photos and photos.shape[1],
      any_combination = o.split == "held_out_objects" } }, Clips)
end

return M
