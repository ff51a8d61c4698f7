-- The photographs: whole, in crops, what is said of them.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"

-- FNV-1a of a tensor's bytes, 64 bits: what pins exact values.
local function hash(tensor)
  local h, bytes = -0x340d631b7bdddcdb, ty.io.to_bytes(tensor)
  for i = 1, #bytes do h = (h ~ bytes:byte(i)) * 0x100000001b3 end
  return ("%016x"):format(h)
end

check.test("whole ones, each of its size", function()
  local all = datasets.load("photos", { split = "all" })
  check.equal(#all, 34)
  local listed, kinds = ty.io.load_json(datasets.path("photos", "photos.json")), {}
  for i, item in all:each() do
    local entry = listed[i + 1]
    check.equal({ item.name, item.image.shape, item.image.dtype },
      { entry.name, { 3, entry.height, entry.width }, "u8" })
    check.ok(item.image:to("f32"):std():item() > 4, item.name .. " shows something")
    kinds[item.kind] = true
  end
  for _, kind in ipairs { "people", "animals", "buildings", "landscapes", "textures", "text" } do
    check.ok(kinds[kind], kind)
  end
  local grey = all:get(1).image
  check.ok(grey:select(0, 0):eq(grey:select(0, 2)):all():item(), "grey ones have three equal channels")
  all:get(0).image:fill_(0)
  check.ok(all:get(0).image:max():item() > 0, "what is given is a copy")
end)

check.test("no photograph is in two splits", function()
  local seen = {}
  for _, split in ipairs { "training", "held_out" } do
    for _, item in datasets.load("photos", { split = split }):each() do
      check.equal(seen[item.name], nil)
      seen[item.name] = split
    end
  end
  local names = {}
  for _, item in datasets.load("photos", { split = "held_out", crop = 32, length = 200 }):each() do
    check.equal(seen[item.name], "held_out")
    names[item.name] = true
  end
  check.equal((function() local n = 0 for _ in pairs(names) do n = n + 1 end return n end)(), 9)
end)

check.test("crops: part of the photograph, at a place that seed, split and position say", function()
  local whole = {}
  for _, item in datasets.load("photos", { split = "training" }):each() do whole[item.name] = item.image end
  local set, places = datasets.load("photos", { crop = 48, length = 120, seed = 5 }), {}
  check.equal(#set, 120)
  for _, item in set:each() do
    local part = whole[item.name]:narrow(1, item.y, 48):narrow(2, item.x, 48)
    check.ok(item.image:eq(part):all():item(), item.name)
    places[#places + 1] = item.x .. " " .. item.y
  end
  local before = ty.threads()
  for _, threads in ipairs { 1, 2 } do
    ty.set_threads(threads)
    package.loaded["tycho.datasets.photos"] = nil -- nothing read yet
    local again = require("tycho.datasets.photos").load { crop = 48, length = 7, seed = 5 }
    check.equal(hash(again:get(6).image), "dde22c375bddfaaa")
    check.equal(hash(again:get(0).image), "5984a679babeb19f")
  end
  ty.set_threads(before)
  local other, same = datasets.load("photos", { crop = 48, length = 120, seed = 6 }), 0
  for i, item in other:each() do
    if item.x .. " " .. item.y == places[i + 1] then same = same + 1 end
  end
  check.ok(same < 3)
  for _, item in datasets.load("photos", { split = "all", crop = 400, length = 60 }):each() do
    check.ok(item.name ~= "text" and item.name ~= "louvre", "too small ones are left out")
  end
  local batch = ty.data.DataLoader(set, { batch_size = 6 }):next()
  check.equal({ batch.image.shape, batch.name[1] }, { { 6, 3, 48, 48 }, set:get(0).name })
end)

check.test("the page names author, licence and source of each as the list does", function()
  local page = ty.io.read(ty.data.shipped "photos/README.md")
  local free = { ["public domain"] = true, ["CC0 1.0"] = true, ["no known copyright restrictions"] = true,
    ["CC BY 1.0"] = true, ["CC BY 2.0"] = true, ["CC BY 3.0"] = true, ["CC BY 4.0"] = true }
  local _, rows = page:gsub("\n| `[%w_]+%.jpg` |", "")
  local list = ty.io.load_json(datasets.path("photos", "photos.json"))
  check.equal(rows, #list)
  for _, entry in ipairs(list) do
    local package, file = entry.source:match "^(.-): (.*)$"
    local row = ("\n| `%s` | %d x %d | %s | %s | %s | %s: `%s` |"):format(entry.file, entry.width, entry.height,
      entry.split, entry.author, entry.licence, package, file)
    check.ok(page:find(row, 1, true), "a row of the page: " .. row)
    check.ok(free[entry.licence], entry.licence)
  end
end)

check.test("wrong arguments", function()
  local function fails(options, text) check.fails(function() datasets.load("photos", options) end, text) end
  fails({ split = "validation" },
    'datasets.photos: split: expected "training" or "held_out" or "all", got "validation"')
  fails({ crop = 0 }, "datasets.photos: crop: expected an integer >= 1, got 0")
  fails({ crop = 700 },
    'datasets.photos: crop: expected at most 640, the shorter side of the largest photograph of "training", got 700')
  fails({ crop = 64, length = 0 }, "datasets.photos: length: expected an integer >= 1, got 0")
  check.fails(function() datasets.load("photos"):get(25) end, "Photos:get: i: expected 0 to 24, got 25")
  check.fails(function() datasets.load("photos", { crop = 8, length = 2 }):get(-1) end,
    "Crops:get: i: expected 0 to 1, got -1")
end)

check.finish()
