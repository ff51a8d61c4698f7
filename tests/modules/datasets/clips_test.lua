-- Clips: laws of motion, tracks, captions, splits that share nothing, cuts and still stretches.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"
local motion = require "tycho.datasets.clips.motion"
local objects = require "tycho.datasets.scenes.objects"
local rows = require "tycho.datasets.scenes.rows"

-- FNV-1a of a tensor's bytes, 64 bits: what pins exact values.
local function hash(tensor)
  local h = -0x340d631b7bdddcdb
  local bytes = ty.io.to_bytes(tensor)
  for i = 1, #bytes do h = (h ~ bytes:byte(i)) * 0x100000001b3 end
  return ("%016x"):format(h)
end

local splits = { "training", "validation", "held_out_objects", "held_out_combinations" }

-- Runs fn(clip, batch, r) over `count` items.
local function each(count, options, fn)
  options.length = count
  local set = datasets.load("clips", options)
  for from = 0, count - 1, 50 do
    ty.scope(function()
      local b = set:batch(ty.arange(from, math.min(from + 50, count)))
      for r = 1, #b.scene do fn(b.scene[r], b, r) end
    end)
  end
end

local function mover_of(segment) return segment.objects[#segment.objects] end

-- The zoo's networks were trained on these bytes.
check.test("the same bytes as when the zoo was trained", function()
  local pinned = {
    training = { "b2b51c00bf600151", "a pizza bounces between the left and the right wall" },
    validation = { "df280523d1399fb5", "a sailboat spins clockwise" },
    held_out_objects = { "788dc2a019aabf42", "a blue flamingo bounces off the walls" },
    held_out_combinations = { "8b87ea41c303e2d2", "we see how a pizza is thrown to the right" },
  }
  for _, split in ipairs(splits) do
    local b = datasets.load("clips", { split = split, fields = { "video", "caption" } }):batch(ty.arange(8))
    check.equal({ hash(b.video), b.caption[1] }, pinned[split], split)
  end
end)

check.test("an item is itself in any batch, with any fields, by any number of workers", function()
  local all = { "video", "caption", "asked", "scene", "law", "cut", "objects", "tracks", "owner", "masks" }
  local options = { fields = all, length = 24, seed = 2, cuts = 0.5, still = 0.5 }
  local set = datasets.load("clips", options)
  local whole = set:batch(ty.arange(24))
  for _, i in ipairs { 3, 20 } do
    local item = set:get(i)
    local n = item.objects:numel()
    check.equal(hash(item.video), hash(whole.video:select(0, i)))
    check.equal({ item.caption, item.asked, item.scene },
      { whole.caption[i + 1], whole.asked[i + 1], whole.scene[i + 1] })
    check.equal({ item.law:item(), item.cut:item() },
      { whole.law:select(0, i):item(), whole.cut:select(0, i):item() })
    for _, field in ipairs { "tracks", "masks", "objects" } do
      check.equal(hash(item[field]), hash(whole[field]:select(0, i):narrow(0, 0, n)), field)
    end
  end
  for workers = 0, 2 do
    local loader <close> = ty.data.DataLoader(set, { batch_size = 10, workers = workers })
    local at = 0
    for b in loader do
      check.equal(hash(b.video), hash(whole.video:narrow(0, at, #b.caption)), workers .. " workers")
      at = at + #b.caption
    end
    check.equal(at, 24)
  end
end)

-- ---- laws ----

-- Differences from frame to frame of one number of a track.
local function steps(track, column, from, to)
  local list = {}
  for f = from + 1, to do list[#list + 1] = track[f + 1][column] - track[f][column] end
  return list
end

local function spread(list)
  local low, high = math.huge, -math.huge
  for _, x in ipairs(list) do low, high = math.min(low, x), math.max(high, x) end
  return high - low
end

check.test("what moves moves by its law", function()
  local seen = {}
  local pixel = 64 / 1024 -- what positions are rounded to
  each(400, { size = 64, fields = { "scene", "law" }, frames = 20 }, function(clip, b, r)
    local segment = clip.segments[1]
    local o, last = mover_of(segment), segment.count - 1
    local m, track = o.motion, o.track
    check.equal(datasets.clips.laws[b.law:select(0, r - 1):item() + 1], segment.law)
    seen[segment.law] = (seen[segment.law] or 0) + 1
    local dx, dy = steps(track, 1, 1, last), steps(track, 2, 1, last)
    if segment.law == "constant" then
      check.equal(spread(dx) <= 1.01 * pixel and spread(dy) <= 1.01 * pixel, true)
      check.equal(dx[1] ^ 2 + dy[1] ^ 2 > 0.2, true)
      local way = (dy[1] > pixel and "down" or dy[1] < -pixel and "up" or "")
      local side = dx[1] > pixel and "right" or dx[1] < -pixel and "left" or ""
      if way ~= "" and side ~= "" then way = (way == "down" and "lower " or "upper ") end
      check.equal(m.direction, way .. side)
    elseif segment.law == "gravity" then
      check.equal(spread(dx) <= 1.01 * pixel, true)
      local ddy = {}
      for i = 2, #dy do ddy[#ddy + 1] = dy[i] - dy[i - 1] end
      check.equal(spread(ddy) <= 4.01 * pixel, true, "the acceleration is constant")
      check.equal(dy[#dy] > dy[1], true, "and points down")
      check.equal(m.form == "fall" and dy[1] >= 0 or m.form == "throw" and dy[1] < 0, true)
    elseif segment.law == "bounce" then
      local turns, speed = 0, 0
      for _, list in ipairs { dx, dy } do
        for i, d in ipairs(list) do
          speed = math.max(speed, math.abs(d))
          if i > 1 and d * list[i - 1] < 0 then turns = turns + 1 end
        end
      end
      check.equal(turns >= 1, true, "it comes back from a wall")
      for _, list in ipairs { dx, dy } do
        local fast = 0
        for _, d in ipairs(list) do fast = math.max(fast, math.abs(d)) end
        local slower = 0
        for _, d in ipairs(list) do if math.abs(d) < fast - 1.01 * pixel then slower = slower + 1 end end
        check.equal(slower <= 6, true, "only in frames in which it meets a wall it goes less far")
      end
    elseif segment.law == "spin" then
      check.equal({ spread(steps(track, 1, 1, last)), spread(steps(track, 2, 1, last)) }, { 0, 0 })
      check.equal(m.turn > 0, m.direction == "counter-clockwise")
    else
      check.equal({ spread(dx), spread(dy) }, { 0, 0 })
      local first, final = track[1], track[segment.count]
      check.equal((final[5] - final[3]) / (first[5] - first[3]) > 1.8, true, "it grows")
      local inverse = {} -- 1 / side falls evenly
      for t = 0, last do inverse[#inverse + 1] = 1 / select(3, motion.at(m, t, last)) end
      for i = 2, #inverse - 1 do
        check.close({ inverse[i + 1] - inverse[i] }, { inverse[i] - inverse[i - 1] }, 5e-5)
      end
    end
    for f = 1, segment.count do
      check.equal(track[f][3] >= 0 and track[f][6] <= 64, true)
      if #segment.objects > 1 then
        check.equal({ table.unpack(segment.objects[1].track[f], 1, 6) },
          { table.unpack(segment.objects[1].track[1], 1, 6) }, "what stands still")
      end
    end
  end)
  for _, law in ipairs(datasets.clips.laws) do check.equal(seen[law] > 50, true, law) end
end)

check.test("turns are the way that the words say, mirrored or not", function()
  -- A sprite with its upper half covered: turned by 90 degrees counter-clockwise it covers the left half.
  local sprite = ty.zeros({ 1, 4, 16, 16 }, { dtype = "u8" })
  sprite:narrow(2, 0, 8):fill_(255)
  for _, mirrored in ipairs { false, true } do
    for _, case in ipairs { { 0, "top" }, { 90, "left" }, { 180, "bottom" }, { -90, "right" } } do
      local list = {}
      rows.sprite(list, 0, 0, 512, 512, 1024, case[1], mirrored, nil, 16, 16)
      local _, _, boxes = ty.draw_sprites(ty.zeros({ 1, 3, 16, 16 }, { dtype = "u8" }), sprite,
        ty.tensor(list, { dtype = "i32" }):reshape(1, 1, 12))
      local box = boxes:reshape(5):tolist()
      check.equal({ table.unpack(box, 1, 4) }, ({ top = { 0, 0, 16, 8 }, left = { 0, 0, 8, 16 },
        bottom = { 0, 8, 16, 16 }, right = { 8, 0, 16, 16 } })[case[2]], case[2])
    end
  end
end)

check.test("tracks and masks are those of the pixels", function()
  local fields = { "scene", "tracks", "masks", "objects", "owner" }
  each(50, { fields = fields, cuts = 0.4, size = 64 }, function(clip, b, r)
    local tracks, masks = b.tracks:select(0, r - 1), b.masks:select(0, r - 1)
    local numbers = b.objects:select(0, r - 1):tolist()
    local row = 0
    for _, segment in ipairs(clip.segments) do
      for _, o in ipairs(segment.objects) do
        row = row + 1
        check.equal(numbers[row], o.object)
        for f = 0, 15 do
          local inside = f >= segment.from and f < segment.from + segment.count
          local track = tracks:select(0, row - 1):select(0, f):tolist()
          local mask = masks:select(0, row - 1):select(0, f):to "i64"
          if not inside then
            check.equal({ track, mask:sum():item() }, { { 0, 0, 0, 0, 0, 0, 0 }, 0 })
          else
            check.close(track, o.track[f + 1], 1e-6)
            local part = mask -- what is seen of it inside of the box
              :narrow(0, track[4] // 1 | 0, (track[6] - track[4]) // 1 | 0)
              :narrow(1, track[3] // 1 | 0, (track[5] - track[3]) // 1 | 0)
            local count = part:sum():item()
            check.equal(mask:sum():item(), count)
            check.equal(count > 0, track[7] > 0)
          end
        end
      end
    end
    for k = row + 1, #numbers do check.equal(numbers[k], -1) end
  end)
end)

check.test("cuts change the scene, and in still stretches nothing moves", function()
  local cuts, stills, n = 0, 0, 200
  each(n, { fields = { "video", "scene", "cut", "caption" }, cuts = 0.5, still = 0.5 }, function(clip, b, r)
    local video, cut = b.video:select(0, r - 1), b.cut:select(0, r - 1):item()
    check.equal(cut, clip.cut or -1)
    check.equal(#clip.segments, cut > 0 and 2 or 1)
    if cut > 0 then
      cuts = cuts + 1
      check.equal(clip.segments[1].count, cut)
      check.equal(hash(video:select(0, cut)) ~= hash(video:select(0, cut - 1)), true)
    end
    for _, segment in ipairs(clip.segments) do
      if segment.still then
        stills = stills + 1
        check.equal(segment.still[2] > segment.still[1], true)
        for f = segment.still[1], segment.still[2] - 1 do
          check.equal(hash(video:select(0, f)), hash(video:select(0, f + 1)))
        end
      end
    end
  end)
  check.equal(cuts > 70 and cuts < 130, true, cuts)
  check.equal(stills > 40, true, stills)
  each(60, { fields = { "video", "scene" } }, function(clip, b, r) -- without: something moves
    local video = b.video:select(0, r - 1)
    check.equal(clip.segments[1].still, nil)
    check.equal(hash(video:select(0, 0)) ~= hash(video:select(0, 8)), true)
  end)
end)

-- ---- words and splits ----

check.test("captions say what moves and how", function()
  local words = { constant = { "move", "glide", "slide", "travel" },
    gravity = { "fall", "drop", "thrown", "flies", "tossed", "jump" }, bounce = { "bounce" },
    spin = { "spin", "turn", "rotate" }, approach = { "closer", "approach", "grows", "towards" } }
  local different = {}
  each(1000, { fields = { "scene", "caption", "asked" }, cuts = 0.2 }, function(clip, b, r)
    local caption, asked = b.caption[r], b.asked[r]
    different[caption] = true
    check.equal(caption:find "[{}]" or caption:find "  " or caption:find " $" or caption:find "nil"
      or caption:find "%f[%a]a [aeiou]" or caption:find "%f[%a]an [^aeiou]", nil, caption)
    local at = 0
    for _, segment in ipairs(clip.segments) do
      local mover = mover_of(segment)
      local said = asked.objects[at + 1]
      check.equal({ said.object, said.law }, { mover.object, segment.law })
      check.equal(said.colour == nil or said.colour == mover.colour, true)
      check.equal(caption:find(objects[mover.object + 1].name, 1, true) ~= nil, true, caption)
      local found = false
      for _, word in ipairs(words[segment.law]) do found = found or caption:find(word, 1, true) ~= nil end
      check.equal(found, true, caption)
      if said.direction then check.equal(caption:find(said.direction, 1, true) ~= nil, true, caption) end
      if said.speed then check.equal(caption:find(said.speed, 1, true) ~= nil, true, caption) end
      at = at + #segment.objects
    end
    check.equal(#asked.objects, at)
  end)
  local count = 0
  for _ in pairs(different) do count = count + 1 end
  check.equal(count > 900, true)
end)

check.test("held-out objects and combinations are in no other split", function()
  local seen = {}
  for _, split in ipairs(splits) do
    each(1000, { split = split, fields = { "scene" }, cuts = 0.2 }, function(clip)
      for _, segment in ipairs(clip.segments) do
        for _, o in ipairs(segment.objects) do
          check.equal(objects[o.object + 1].held_out, split == "held_out_objects")
        end
        local one = mover_of(segment).object .. segment.law
        local out = motion.is_held_out(mover_of(segment).object, segment.law)
        if split == "held_out_combinations" then check.equal({ out, seen[one] }, { true, nil }, one)
        elseif split ~= "held_out_objects" then
          check.equal(out, false, one)
          seen[one] = true
        end
      end
    end)
  end
end)

check.test("options, and wrong ones", function()
  each(60, { laws = { "spin" }, objects = { 1, 1 }, backgrounds = { "plain" }, fields = { "scene" } }, function(clip)
    local segment = clip.segments[1]
    check.equal({ segment.law, #segment.objects, segment.background.kind }, { "spin", 1, "plain" })
  end)
  local one = datasets.load("clips", { frames = 9, size = 64, fields = { "video" } }):get(1)
  check.equal(one.video.shape, { 9, 3, 64, 64 })
  check.equal(tostring(datasets.load("clips", { length = 7 })),
    "Clips of 7 items of 16 frames of 32 x 32 (training, seed 0)")
  local function fails(options, ...) check.fails(function() return datasets.load("clips", options) end, ...) end
  fails({ split = "trainin" }, 'datasets.clips: split: there is no "trainin"; did you mean training')
  fails({ frames = 7 }, "frames: expected an integer in [8, 32], got 7")
  fails({ laws = { "gravty" } }, 'laws: there is no "gravty"; did you mean gravity')
  fails({ laws = {} }, "laws: expected at least one name")
  fails({ objects = { 1, 3 } }, "objects: expected { least, most } from 1 to 2, got { 1, 3 }")
  fails({ fields = { "image" } }, 'fields: there is no "image"')
  fails({ cuts = 2 }, "cuts: expected a number in [0, 1], got 2")
  local few = datasets.load("clips", { length = 5 })
  check.fails(function() return few:get(5) end, "get: i: expected 0 to 4, got 5")
end)

check.test("distractors look like the one that moves, what hides is where it is halfway; without both nothing changes",
  function()
    local o = { size = 64, frames = 9, objects = { 1, 1 }, backgrounds = { "plain" },
      fields = { "video", "tracks", "objects", "target", "scene" }, laws = { "constant", "bounce" } }
    local plain = datasets.load("clips", o)
    o.distractors, o.occlusion = 2, 1
    local set = datasets.load("clips", o)
    local batch = set:batch { 0, 1, 2, 3 }
    check.equal({ batch.objects.shape, batch.target:tolist() }, { { 4, 4 }, { 0, 0, 0, 0 } })
    for k = 0, 3 do
      local row, tracks = batch.objects:select(0, k):tolist(), batch.tracks:select(0, k)
      check.ok(row[1] == row[2] and row[2] == row[3] and row[4] ~= row[1])
      local mover, cover = tracks:select(0, 0):select(0, 4):tolist(), tracks:select(0, 3):select(0, 4):tolist()
      check.equal({ mover[1], mover[2] }, { cover[1], cover[2] })
      check.ok(mover[7] < 0.8, "hidden in part")
      local apart = (tracks:select(0, 1) - tracks:select(0, 0)):narrow(1, 0, 2):abs():amax():item()
      check.ok(apart > 1, "they move on their own")
      check.equal(#batch.scene[k + 1].segments[1].objects, 1)
    end
    local item = set:get(2)
    check.equal({ item.objects.shape, item.target:item() }, { { 4 }, 0 })
    check.equal(plain:get(2).objects.shape, { 1 })
    o.distractors, o.occlusion = 0, 0
    check.ok(ty.equal(datasets.load("clips", o):get(5).video, plain:get(5).video))
    check.fails(function() datasets.load("clips", { distractors = 4 }) end, "distractors: expected an integer in [0,")
  end)

check.test("all clips of a set with the boxes of what each shows first", function()
  local set = datasets.load("clips", { length = 52, frames = 8, objects = { 1, 1 }, fields = { "caption" } })
  local all = set:tracked()
  check.equal({ all.video.shape, all.boxes.shape }, { { 52, 8, 3, 32, 32 }, { 52, 8, 4 } })
  local one = datasets.load("clips", { length = 52, frames = 8, objects = { 1, 1 } }):get(51)
  check.equal(all.video:select(0, 51):flatten():tolist(), one.video:flatten():tolist())
  check.equal(all.boxes:select(0, 51):tolist(), one.tracks:select(0, 0):narrow(1, 2, 4):tolist())
  check.equal(set:get(0).video, nil, "the set is what it was")
end)

check.finish()
