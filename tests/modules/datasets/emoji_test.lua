-- The emoji: their pictures, words, splits.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"

-- FNV-1a of a tensor's bytes, 64 bits: what pins exact values.
local function hash(tensor)
  local h = -0x340d631b7bdddcdb
  for _, byte in ipairs { ty.io.to_bytes(tensor):byte(1, 65536) } do h = (h ~ byte) * 0x100000001b3 end
  return ("%016x"):format(h)
end

local all = datasets.load("emoji", { split = "all" })

check.test("items", function()
  check.equal(#all, 1849)
  local item = all:get(datasets.emoji.find "red apple")
  check.equal({ item.name, item.code, item.group, item.subgroup },
    { "red apple", "1F34E", "Food & Drink", "food-fruit" })
  check.equal(item.keywords, { "apple", "fruit", "red" })
  check.equal(item.names, { en = "red apple", de = "roter Apfel", fr = "pomme rouge", es = "manzana roja",
    zh = "红苹果", ja = "赤リンゴ" })
  check.equal(item.translations.fr, { "fruit", "pomme", "pomme rouge" })
  check.equal(item.image.shape, { 4, 64, 64 })
  check.equal(item.image.dtype, "u8")
  local german = datasets.load("emoji", { split = "all", languages = { "de" }, size = 128 }):get(0)
  check.equal(german.names, { de = "grinsendes Gesicht" })
  check.equal(german.image.shape, { 4, 128, 128 })
end)

check.test("64 is the mean of 2 x 2 pixels of 128, weighted by alpha, in integers", function()
  local large = datasets.load("emoji", { split = "all", size = 128 })
  for _, name in ipairs { "red apple", "flag: Germany", "fog", "grinning face", "dizzy" } do
    local i = all:find(name)
    local fine, coarse = large:get(i).image:tolist(), all:get(i).image:tolist()
    local wrong = 0
    for y = 1, 64 do
      for x = 1, 64 do
        local alpha, sums = 0, { 0, 0, 0 }
        for dy = 0, 1 do
          for dx = 0, 1 do
            local row, column = 2 * y - 1 + dy, 2 * x - 1 + dx
            local a = fine[4][row][column]
            alpha = alpha + a
            for c = 1, 3 do sums[c] = sums[c] + a * fine[c][row][column] end
          end
        end
        for c = 1, 3 do
          local want = alpha == 0 and 0 or (2 * sums[c] + alpha) // (2 * alpha)
          if coarse[c][y][x] ~= want then wrong = wrong + 1 end
        end
        if coarse[4][y][x] ~= (alpha + 2) // 4 then wrong = wrong + 1 end
      end
    end
    check.equal(wrong, 0, name)
  end
end)

check.test("the same bytes for every number of threads, in whatever order they are asked for", function()
  check.equal(hash(all:get(0).image), "81b53893ca5c70ab")
  check.equal(hash(all:get(1848).image), "1e352c5edccca5a5")
  local before = ty.threads()
  for _, threads in ipairs { 1, 2 } do
    ty.set_threads(threads)
    package.loaded["tycho.datasets.emoji"] = nil -- nothing decoded yet
    local again = require("tycho.datasets.emoji").load { split = "all" }
    local pictures = again:pictures(ty.tensor { 1848, 0, 7 })
    check.equal(hash(pictures:select(0, 1)), "81b53893ca5c70ab")
    check.equal(hash(pictures:select(0, 0)), "1e352c5edccca5a5")
    check.ok(pictures:select(0, 2):eq(all:get(7).image):all():item())
  end
  ty.set_threads(before)
end)

check.test("what is given is a copy", function()
  local item = all:get(5)
  item.image:fill_(9)
  check.ok(not all:get(5).image:eq(9):all():item())
end)

-- A person, whoever it is, without the signs of gender: written apart from the rule of the set.
local function shown(item)
  local points = {}
  for point in item.code:gmatch "%x+" do
    if point == "1F468" or point == "1F469" then point = "1F9D1" end
    if point ~= "FE0F" and point ~= "2640" and point ~= "2642" then points[#points + 1] = point end
  end
  while points[#points] == "200D" do points[#points] = nil end
  return table.concat(points, " ")
end

check.test("splits: every picture in one, no object in two, all subgroups in the training part", function()
  local place, total, subgroups, held = {}, 0, {}, {}
  for _, split in ipairs { "training", "validation", "held_out" } do
    local set = datasets.load("emoji", { split = split, languages = {} })
    total = total + #set
    for i = 0, #set - 1 do
      local item = set:get(i)
      local object = shown(item)
      check.ok(place[object] == nil or place[object] == split, item.name)
      place[object] = split
      if split == "training" then subgroups[item.subgroup] = true end
      if split == "held_out" then held[item.subgroup] = true end
    end
  end
  check.equal(total, #all)
  local names, missing, spread = {}, {}, 0
  for i = 0, #all - 1 do names[all:get(i).subgroup] = true end
  for name in pairs(names) do
    if not subgroups[name] then missing[#missing + 1] = name end
    if held[name] then spread = spread + 1 end
  end
  check.equal(missing, {})
  check.ok(spread >= 75, "held-out pictures in " .. spread .. " subgroups")
end)

check.test("batches, through a loader", function()
  local set = datasets.load("emoji", { split = "held_out" })
  local batch = ty.data.DataLoader(set, { batch_size = 8 }):next()
  check.equal(batch.image.shape, { 8, 4, 64, 64 })
  check.equal(batch.name[3], set:get(2).name)
  check.equal(batch.keywords[3], set:get(2).keywords)
  check.equal(tostring(set), "Emoji of 193 items of 64 x 64 (held_out)")
  check.equal(set:find "red apple", nil)
end)

check.test("wrong arguments", function()
  local function fails(options, text) check.fails(function() datasets.load("emoji", options) end, text) end
  fails({ size = 32 }, "datasets.emoji: size: expected 64 or 128, got 32")
  fails({ split = "test" },
    'datasets.emoji: split: expected "training" or "validation" or "held_out" or "all", got "test"')
  fails({ languages = { "en", "xx" } }, 'datasets.emoji: languages: expected some of en, de, fr, es, zh, ja, got "xx"')
  fails({ groups = { "Fruit" } }, 'datasets.emoji: the split "training" has no pictures of groups Fruit')
  check.fails(function() all:get(1849) end, "Emoji:get: i: expected 0 to 1848, got 1849")
  check.fails(function() all:get() end, "Emoji:get: i: expected 0 to 1848, got nil")
  check.fails(function() all:pictures(ty.ones(2)) end,
    "Emoji:pictures: positions: expected i64 of one dimension, got f32 [2]")
  check.fails(function() all:pictures { 0, -1 } end, "Emoji:pictures: positions: expected 0 to 1848, got -1")
  check.fails(function() datasets.emoji.find(3) end, "datasets.emoji.find: name: expected a string, got 3")
end)

check.finish()
