-- Scenes: what is drawn, what is said of it, splits that share nothing, the same bytes whoever draws.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"
local captions = require "tycho.datasets.scenes.captions"
local colours = require "tycho.datasets.scenes.colours"
local geometry = require "tycho.datasets.scenes.geometry"
local held_out = require "tycho.datasets.scenes.held_out"
local objects = require "tycho.datasets.scenes.objects"

-- FNV-1a of a tensor's bytes, 64 bits: what pins exact values.
local function hash(tensor)
  local h = -0x340d631b7bdddcdb
  local bytes = ty.io.to_bytes(tensor)
  for i = 1, #bytes do h = (h ~ bytes:byte(i)) * 0x100000001b3 end
  return ("%016x"):format(h)
end

local splits = { "training", "validation", "held_out_objects", "held_out_combinations" }

-- Runs fn(scene, caption, asked, questions, r, batch) over `count` items.
local function each(count, options, fn)
  options.fields = options.fields or { "scene", "caption", "asked", "questions" }
  options.length = count
  local set = datasets.load("scenes", options)
  for from = 0, count - 1, 200 do
    ty.scope(function()
      local b = set:batch(ty.arange(from, math.min(from + 200, count)))
      for r = 1, #b.scene do
        fn(b.scene[r], b.caption and b.caption[r], b.asked and b.asked[r], b.questions and b.questions[r], r, b)
      end
    end)
  end
end

check.test("the hundred objects", function()
  check.equal(#objects, 100)
  check.equal({ #held_out.objects, #held_out.others }, { 10, 90 })
  local names, emoji = {}, datasets.load("emoji", { split = "all" })
  for _, object in ipairs(objects) do
    check.equal(names[object.name], nil, object.name)
    names[object.name] = true
    local place = emoji:find(object.emoji)
    check.equal(place and emoji:get(place).code, object.code, object.name)
    check.equal(colours.tint[object.natural] ~= nil or colours.background[object.natural] ~= nil, true, object.name)
  end
end)

check.test("sprites keep their area and their middle at every size, place and turn, and smooth edges", function()
  local rows = require "tycho.datasets.scenes.rows"
  local sprite = ty.zeros({ 1, 4, 64, 64 }, { dtype = "u8" })
  sprite:narrow(2, 8, 48):narrow(3, 8, 48):fill_(255) -- a white square of three quarters of the frame
  local at = ty.arange(64):to "f64" + 0.5
  for _, side in ipairs { 90, 200, 333, 512, 700 } do
    for _, turn in ipairs { 0, 13, 45, 90, 200 } do
      local list = {}
      rows.sprite(list, 0, 0, 500, 517, side, turn, turn == 13, nil, 64, 64)
      local picture = ty.draw_sprites(ty.zeros({ 1, 3, 64, 64 }, { dtype = "u8" }), sprite,
        ty.tensor(list, { dtype = "i32" }):reshape(1, 1, 12))
      local light = picture:select(1, 0):select(0, 0):to "f64" / 255
      local area, width = light:sum():item(), side / 16 * 0.75
      check.close({ area / (width * width) }, { 1 }, 0.03)
      check.close({ (light:sum { 0 } * at):sum():item() / area, (light:sum { 1 } * at):sum():item() / area },
        { 500 / 16, 517 / 16 }, 0.03)
    end
  end
end)

-- The zoo's networks were trained on these bytes.
check.test("the same bytes as when the zoo was trained", function()
  local pinned = { training = "225339e90fa44e43", validation = "0749bbf3892a4930",
    held_out_objects = "83af0c5f1eda81c7", held_out_combinations = "e5dce34020590fff" }
  local said = { training = "a watermelon, a red cake and a small key on a cloudy orange and turquoise background",
    validation = "a small monkey, a robot and a snail on black and purple checks",
    held_out_objects = "a plain black background with two orange guitars",
    held_out_combinations = "a purple chicken is left of a red bus" }
  for _, split in ipairs(splits) do
    local b = datasets.load("scenes", { split = split, fields = { "image", "caption" } }):batch(ty.arange(32))
    check.equal(hash(b.image), pinned[split], split)
    check.equal(b.caption[1], said[split])
  end
end)

check.test("an item is itself in any batch, with any fields, by any number of workers", function()
  local all = { "image", "caption", "asked", "scene", "labels", "boxes", "owner", "masks", "full_masks", "questions" }
  local set = datasets.load("scenes", { fields = all, length = 40, seed = 3 })
  local whole = set:batch(ty.arange(40))
  local part = set:batch { 7, 31 }
  for r, i in ipairs { 7, 31 } do
    local item = set:get(i)
    local n = #whole.scene[i + 1].objects
    check.equal(hash(part.image:select(0, r - 1)), hash(whole.image:select(0, i)))
    check.equal(hash(item.image), hash(whole.image:select(0, i)))
    check.equal({ item.caption, part.caption[r] }, { whole.caption[i + 1], whole.caption[i + 1] })
    check.equal(item.questions, whole.questions[i + 1])
    check.equal(item.scene, whole.scene[i + 1])
    check.equal(item.boxes:tolist(), whole.boxes:select(0, i):narrow(0, 0, n):tolist())
    for _, field in ipairs { "masks", "full_masks" } do
      check.equal(hash(item[field]), hash(whole[field]:select(0, i):narrow(0, 0, n)), field)
    end
  end
  local few = datasets.load("scenes", { fields = { "questions" }, length = 40, seed = 3 })
  check.equal(few:batch { 7 }.questions[1], whole.questions[8])
  for workers = 0, 2 do
    local loader <close> = ty.data.DataLoader(set, { batch_size = 16, workers = workers })
    local at = 0
    for b in loader do
      check.equal(hash(b.image), hash(whole.image:narrow(0, at, b.image.shape[1])), workers .. " workers")
      check.equal(b.caption, table.move(whole.caption, at + 1, at + #b.caption, 1, {}))
      at = at + #b.caption
    end
    check.equal(at, 40)
  end
  local other = datasets.load("scenes", { fields = { "image" }, length = 40, seed = 4 })
  check.equal(hash(other:batch(ty.arange(40)).image) == hash(whole.image), false)
end)

check.test("boxes, masks, labels and visible shares are those of the pixels", function()
  local fields = { "scene", "labels", "boxes", "owner", "masks", "full_masks" }
  for _, size in ipairs { 32, 64, 128 } do
    each(60, { fields = fields, size = size }, function(scene, _, _, _, r, b)
      local full, seen = b.full_masks:select(0, r - 1), b.masks:select(0, r - 1)
      local boxes, labels = b.boxes:select(0, r - 1):tolist(), b.labels:select(0, r - 1)
      local wanted = {}
      for j, object in ipairs(scene.objects) do
        wanted[object.object] = true
        local mask = full:select(0, j - 1):to "i64"
        local area, hidden = mask:sum():item(), seen:select(0, j - 1):to "i64":sum():item()
        check.close({ object.visible }, { hidden / area }, 1e-12)
        check.equal(object.visible >= 0.4, true)
        local rows, columns = mask:sum { 1 }:tolist(), mask:sum { 0 }:tolist()
        local box = { size, size, 0, 0 }
        for i = 1, size do
          if columns[i] > 0 then box[1], box[3] = math.min(box[1], i - 1), i end
          if rows[i] > 0 then box[2], box[4] = math.min(box[2], i - 1), i end
        end
        check.equal(object.box, box)
        check.equal(boxes[j], { object.object, table.unpack(box) })
        -- what is in front of it hides it
        for k = j + 1, #scene.objects do
          local both = (mask * full:select(0, k - 1):to "i64" * seen:select(0, j - 1):to "i64"):sum():item()
          check.equal(both, 0)
        end
      end
      for j = #scene.objects + 1, 5 do check.equal(boxes[j], { -1, 0, 0, 0, 0 }) end
      local marked = 0
      for _ in pairs(wanted) do marked = marked + 1 end
      check.equal(labels:to "i64":sum():item(), marked)
      for i in pairs(wanted) do check.equal(labels:select(0, i):item(), 1) end
    end)
  end
end)

check.test("held-out objects and combinations are in no other split", function()
  local pairs_seen, relations_seen = {}, {}
  for _, split in ipairs(splits) do
    local combinations, least = 0, 1
    each(2500, { split = split, fields = { "scene" } }, function(scene)
      local found = false
      for _, object in ipairs(scene.objects) do
        least = math.min(least, object.visible)
        check.equal(objects[object.object + 1].held_out, split == "held_out_objects")
        if object.colour then
          local one = object.object .. object.colour
          if held_out.colour(object.object, object.colour) then found = true end
          if split == "training" or split == "validation" then pairs_seen[one] = true end
          if split == "held_out_combinations" and held_out.colour(object.object, object.colour) then
            check.equal(pairs_seen[one], nil, one)
          end
        end
      end
      for _, r in ipairs(scene.relations) do
        local a, b = scene.objects[r.a].object, scene.objects[r.b].object
        local relation = r.relation
        if relation == "right of" or relation == "below" then a, b, relation = b, a, geometry.inverse[relation] end
        local one = a .. relation .. b
        local out = held_out.relation(a, relation, b)
        check.equal(held_out.relation(b, geometry.inverse[relation], a), out)
        if out then found = true end
        if split == "training" or split == "validation" then relations_seen[one] = true end
        if split == "held_out_combinations" and out then check.equal(relations_seen[one], nil, one) end
      end
      if found then combinations = combinations + 1 end
    end)
    if split == "held_out_combinations" then check.equal(combinations, 2500)
    elseif split ~= "held_out_objects" then check.equal(combinations, 0) end
    check.equal(least >= 0.4, true)
  end
  local tints = 0
  for i = 0, 99 do
    for name in pairs(colours.tint) do if held_out.colour(i, name) then tints = tints + 1 end end
  end
  check.equal(tints, 80)
end)

-- Whether a scene shows what is asked for, from its boxes and looks alone.
local function shows(scene, asked)
  local found = {}
  for g, wanted in ipairs(asked.objects) do
    local list = {}
    for _, o in ipairs(scene.objects) do
      if o.object == wanted.object and (not wanted.colour or o.colour == wanted.colour)
        and (not wanted.size or o.size == wanted.size) and (not wanted.place or o.place == wanted.place) then
        list[#list + 1] = o
      end
    end
    if #list < wanted.count then return false end
    found[g] = list
  end
  for _, r in ipairs(asked.relations) do
    local holds = false
    for _, have in ipairs(scene.relations) do
      local a, b = scene.objects[have.a], scene.objects[have.b]
      for _, one in ipairs(found[r.a]) do
        for _, two in ipairs(found[r.b]) do
          if a == one and b == two and have.relation == r.relation
            or a == two and b == one and have.relation == geometry.inverse[r.relation] then holds = true end
        end
      end
    end
    if not holds then return false end
  end
  local background = asked.background
  if background then
    if background.kind ~= scene.background.kind then return false end
    if background.colours then
      for i, name in ipairs(background.colours) do if scene.background.colours[i] ~= name then return false end end
    end
  end
  return true
end

check.test("captions say what is there, in many forms, and `asked` is what they say", function()
  local forms, total = {}, captions.forms[1] + captions.forms[2] + captions.forms[3]
  check.equal(total >= 30, true)
  each(4000, { fields = { "scene", "caption", "asked" } }, function(scene, caption, asked)
    check.equal(shows(scene, asked), true, caption)
    local form, rest = caption, 0
    for _, wanted in ipairs(asked.objects) do
      local row = objects[wanted.object + 1]
      local noun = wanted.count > 1 and row.plural or row.name
      check.equal(caption:find(noun, 1, true) ~= nil, true, caption)
      if wanted.count > 1 then
        check.equal(caption:find(captions.numbers[wanted.count] .. " ", 1, true) ~= nil, true, caption)
      end
      if wanted.colour then
        check.equal(caption:find(wanted.colour .. " " .. row.name, 1, true) ~= nil or
          caption:find(wanted.colour .. " " .. row.plural, 1, true) ~= nil, true, caption)
      end
      rest = rest + wanted.count
    end
    check.equal(rest, #scene.objects, caption)
    check.equal(caption:find "  " or caption:find "%f[%a]a [aeiou]" or caption:find "%f[%a]an [^aeiou]"
      or caption:find "nil", nil, caption)
    for word in pairs(colours.background) do form = form:gsub(word, "C") end
    for _, row in ipairs(objects) do form = form:gsub(row.plural, "N"):gsub(row.name, "N") end
    forms[form] = true
  end)
  local count = 0
  for _ in pairs(forms) do count = count + 1 end
  check.equal(count > 500, true) -- of words in the places of nouns and colours
end)

check.test("captions that are asked to name a place do, where anything that is there once has one", function()
  local named, without = 0, 0
  each(2000, { fields = { "scene", "caption", "asked" }, placed = true }, function(scene, caption, asked)
    check.equal(shows(scene, asked), true, caption)
    local can, does = false, false
    for _, object in ipairs(scene.objects) do
      can = can or object.place ~= nil and scene.groups[object.group].count == 1
    end
    for _, wanted in ipairs(asked.objects) do does = does or wanted.place ~= nil end
    check.equal(does or not can, true, caption)
    named, without = named + (does and 1 or 0), without + (can and 0 or 1)
  end)
  check.equal(named > 1200 and without > 50, true, ("%d, %d"):format(named, without))
  -- Of apples alone none can be told by its name: then there is no place to name.
  each(200, { objects_of = { "apple", "dog" }, placed = true, fields = { "scene", "caption", "asked" } },
    function(scene, caption, asked) check.equal(shows(scene, asked), true, caption) end)
  check.fails(function() datasets.load("scenes", { placed = 3 }) end,
    "datasets.scenes: placed: expected a boolean, got 3")
end)

check.test("a scene that lacks something is not what is asked for", function()
  local wrong, n = 0, 0
  each(300, { fields = { "scene", "asked" } }, function(scene, _, asked)
    local background = asked.background
    asked.background = nil
    table.insert(asked.objects, { object = (scene.objects[1].object + 50) % 100, count = 1 })
    n = n + 1
    if not shows(scene, asked) then wrong = wrong + 1 end
    asked.background = background
  end)
  check.equal(wrong >= n - 6, true) -- some have that object by chance
end)

-- ---- questions ----

check.test("questions have the right answers, and are not to be guessed without the picture", function()
  local kinds, yes, texts, n = {}, 0, {}, 0
  each(6000, { fields = { "scene", "questions" } }, function(scene, _, _, questions)
    local once = {}
    for _, q in ipairs(questions) do
      check.equal(once[q.question], nil, q.question)
      once[q.question] = true
      kinds[q.kind] = kinds[q.kind] or {}
      kinds[q.kind][q.answer] = (kinds[q.kind][q.answer] or 0) + 1
      if q.answer == "yes" then yes = yes + 1 end
      n = n + 1
      texts[q.question] = texts[q.question] or {}
      texts[q.question][q.answer] = (texts[q.question][q.answer] or 0) + 1

      -- the answers that can be read off the scene by what the question says
      local plural = q.question:match "^how many (.-) are there%?$" or q.question:match "^count the (.-)%.$"
      if plural then
        local count = 0
        for _, o in ipairs(scene.objects) do
          if plural == "objects" or objects[o.object + 1].plural == plural then count = count + 1 end
        end
        check.equal(q.answer, captions.numbers[count], q.question)
      end
      local noun = q.question:match "^where is the ([%a ]-)%?$"
      local colour_of = q.question:match "^what colour is the ([%a ]-)%?$"
      local is_there = q.question:match "^is there an? (.-)%?$" or q.question:match "^can you see an? (.-)%?$"
      local there = false
      for _, o in ipairs(scene.objects) do
        if o.name == noun then check.equal(q.answer, o.place, q.question) end
        if o.name == colour_of then check.equal(q.answer, o.colour, q.question) end
        if o.name == is_there then there = true end
      end
      if is_there then check.equal(q.answer, there and "yes" or "no", q.question) end
    end
  end)
  check.equal(n > 3.8 * 6000, true, n .. " questions")
  local share = yes / (yes + kinds.yes_no.no)
  check.equal(share > 0.47 and share < 0.53, true, "yes: " .. share)
  -- the best answer to each text that came often
  local best, all = 0, 0
  for _, answers in pairs(texts) do
    local most, sum = 0, 0
    for _, count in pairs(answers) do most, sum = math.max(most, count), sum + count end
    if sum >= 40 then best, all = best + most, all + sum end
  end
  check.equal(all > 3000, true)
  check.equal(best / all < 0.5, true, "guessed: " .. best / all)
  for kind, limit in pairs { name = 0.03, count = 0.4, colour = 0.2, place = 0.2, relation = 0.35 } do
    local most, sum = 0, 0
    for _, count in pairs(kinds[kind]) do most, sum = math.max(most, count), sum + count end
    check.equal(most / sum < limit, true, kind .. ": " .. most / sum)
  end
end)

check.test("noise of pixels is as strong as asked for and leaves the rest", function()
  local fields = { "image", "clean_image", "caption" }
  local noisy = datasets.load("scenes", { fields = fields, noise = 8, length = 50 }):batch(ty.arange(50))
  local clean = datasets.load("scenes", { fields = fields, length = 50 }):batch(ty.arange(50))
  check.equal(hash(noisy.clean_image), hash(clean.image))
  check.equal(hash(clean.clean_image), hash(clean.image))
  check.equal(noisy.caption, clean.caption)
  local middle = clean.image:ge(60):logical_and(clean.image:le(190)):to "f64" -- where nothing is cut off
  local d = (noisy.image:to "f64" - clean.image:to "f64") * middle
  local n = middle:sum():item()
  check.close({ d:sum():item() / n }, { 0 }, 0.05)
  check.close({ (d:square():sum():item() / n) ^ 0.5 }, { 8 }, 0.05)
  local one = datasets.load("scenes", { fields = { "image" }, noise = 8, length = 50 }):get(17)
  check.equal(hash(one.image), hash(noisy.image:select(0, 17)))
end)

check.test("label noise: a share of captions and labels is of other items, and the truth is kept", function()
  local fields = { "caption", "labels", "asked", "swapped", "true_caption", "true_labels", "scene" }
  local n = 400
  local b = datasets.load("scenes", { fields = fields, label_noise = 0.25, length = n }):batch(ty.arange(n))
  local clean = datasets.load("scenes", { fields = fields, length = n }):batch(ty.arange(n))
  check.equal(b.true_caption, clean.caption)
  check.equal(hash(b.true_labels), hash(clean.labels))
  check.equal(clean.swapped:to "i64":sum():item(), 0)
  local of = {} -- captions by position
  for r = 1, n do of[clean.caption[r]] = r end
  local swapped = b.swapped:tolist()
  local count = 0
  for r = 1, n do
    local other = of[b.caption[r]]
    check.equal(other ~= nil, true, b.caption[r])
    check.equal(swapped[r] == 1, b.caption[r] ~= clean.caption[r])
    check.equal(hash(b.labels:select(0, r - 1)), hash(clean.labels:select(0, other - 1)))
    check.equal(shows(clean.scene[other], b.asked[r]), true)
    count = count + swapped[r]
  end
  check.equal(count > 70 and count < 130, true, count .. " swapped")
end)

-- ---- options ----

check.test("options", function()
  local set = datasets.load("scenes", { objects = { 2, 3 }, objects_of = { "apple", "dog", "star" },
    colours = { "red", "blue" }, backgrounds = { "plain", "dots" }, rotation = 0, length = 300, fields = { "scene" },
    seed = 5 })
  check.equal(#set, 300)
  check.equal(tostring(set), "Scenes of 300 items of 64 x 64 (training, seed 5)")
  for _, scene in ipairs(set:batch(ty.arange(300)).scene) do
    check.equal(#scene.objects == 2 or #scene.objects == 3, true)
    check.equal(scene.background.kind == "plain" or scene.background.kind == "dots", true)
    for _, o in ipairs(scene.objects) do
      check.equal(o.name == "apple" or o.name == "dog" or o.name == "star", true)
      check.equal(o.colour == "red" or o.colour == "blue", true)
      check.equal(o.rotation, 0)
    end
  end
  check.equal(datasets.load("scenes", { size = 32, fields = { "image" } }):get(0).image.shape, { 3, 32, 32 })
  check.equal(datasets.load("scenes", { size = 128, fields = { "image" } }):get(0).image.shape, { 3, 128, 128 })
end)

check.test("wrong options and positions say so", function()
  local function fails(options, ...) check.fails(function() return datasets.load("scenes", options) end, ...) end
  fails({ split = "trainin" }, 'split: there is no "trainin"; did you mean training')
  fails({ size = 48 }, "size: expected 32 or 64 or 128, got 48")
  fails({ objects = { 0, 5 } }, "objects: expected { least, most } from 1 to 5, got { 0, 5 }")
  fails({ objects = { 3, 2 } }, "objects: expected { least, most } from 1 to 5, got { 3, 2 }")
  fails({ objects_of = { "aple" } }, 'objects_of: there is no "aple"; did you mean apple')
  fails({ objects_of = { "kite" } }, 'objects_of: the split "training" has none of kite')
  fails({ objects_of = {} }, "objects_of: expected at least one name")
  fails({ colours = { "mauve" } }, 'colours: there is no "mauve"')
  fails({ backgrounds = { "stripe" } }, 'backgrounds: there is no "stripe"; did you mean stripes')
  fails({ fields = { "picture" } }, 'fields: there is no "picture"')
  fails({ visible = 2 }, "visible: expected a number in [0, 1], got 2")
  fails({ lenght = 2 }, "lenght")
  local set = datasets.load("scenes", { length = 5 })
  check.fails(function() return set:get(5) end, "get: i: expected 0 to 4, got 5")
  check.fails(function() return set:batch { 0, -1 } end, "batch: positions: expected 0 to 4, got -1")
  local none = datasets.load("scenes", { split = "held_out_combinations", objects = { 1, 1 }, colours = { "natural" } })
  check.fails(function() return none:get(0) end, "found no scene of these options in 1000 tries")
end)

check.finish()
