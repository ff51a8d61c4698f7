-- What is measured of drawn scenes: where single things are, the rows of a table, judges that do not ship.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local geometry = require "tycho.datasets.scenes.geometry"
local zoo = require "tycho.zoo"

local drawings = zoo.drawings

local function recipe(kinds)
  return { args = { most = 2, rotation = 0, backgrounds = { "plain" }, kinds = kinds or { "all" }, drawing_steps = 7,
    guidance = 2 } }
end

-- An eye of its own kind: where the middle is of the pixels that differ from the corners of a plain background.
local eye = {}

function eye:where(pictures)
  local numbers = {}
  for i = 0, pictures.shape[1] - 1 do
    local x = pictures[i]
    local ground = x:narrow(1, 0, 1):narrow(2, 0, 1)
    local other = x:narrow(1, 63, 1):narrow(2, 63, 1)
    if (ground - other):abs():max():item() > 0.01 then ground = x:narrow(1, 0, 1):narrow(2, 63, 1) end
    local differs = (x - ground):abs():amax(0):gt(0.1):to "f32"
    local at = ty.arange(64):to "f32" + 0.5
    local row = (differs:sum(1) * at):sum():item() / differs:sum():item() / 64
    local column = (differs:sum(0) * at):sum():item() / differs:sum():item() / 64
    local function band(p) return p < 0.39 and 0 or p > 0.61 and 2 or 1 end
    numbers[i + 1] = band(row) * 3 + band(column)
  end
  return ty.tensor(numbers, { dtype = "i64" })
end

local judge_of = drawings.judge
local function with_eye(fn)
  drawings.judge = function() return eye end
  local ok, message = pcall(fn)
  drawings.judge = judge_of
  if not ok then error(message, 0) end
end

check.test("single things are where captions say: real ones all, those put anywhere a ninth", function()
  with_eye(function()
    local set = drawings.set(recipe().args, "validation", { "image", "caption", "asked" },
      { objects = { 1, 1 }, placed = true })
    local all, seen = set:batch(ty.arange(0, 600)), nil
    local picture_of = {}
    for i, caption in ipairs(all.caption) do picture_of[caption] = all.image[i - 1] end
    local real, away = {}, {}
    function real:paint(captions, options)
      seen = { captions, options }
      local list = {}
      for i, caption in ipairs(captions) do list[i] = picture_of[caption] end
      return ty.stack(list, 0)
    end
    function away:paint(captions, options)
      local drawn = real:paint(captions, options)
      return ty.concat({ drawn:narrow(0, 7, #captions - 7), drawn:narrow(0, 0, 7) }, 0)
    end
    local drawn, of_real = drawings.placed(recipe(), real, "validation", 200)
    check.ok(of_real > 0.93, tostring(of_real))
    check.close(drawn, of_real, 0.03) -- a caption may be that of two scenes
    check.equal({ #seen[1], seen[2] }, { 200, { steps = 7, guidance = 2 } })
    for _, caption in ipairs(seen[1]) do
      local named
      for _, place in ipairs(geometry.places) do named = named or caption:find(place:match "%w+$", 1, true) end
      check.ok(named or caption:find "middle" or caption:find "center", caption)
    end
    local moved = drawings.placed(recipe(), away, "validation", 200)
    check.ok(moved > 0.02 and moved < 0.25, tostring(moved))
    -- Later scenes are others.
    local before = seen[1]
    drawings.placed(recipe(), { paint = function(_, captions)
      seen = captions
      return ty.zeros({ #captions, 3, 64, 64 }, { dtype = "u8" })
    end }, "validation", 20, 600)
    check.ok(seen[1] ~= before[1])
  end)
end)

check.test("no judge, no figure", function()
  drawings.judge = function() return nil end
  check.equal(drawings.placed(recipe(), {}, "validation", 10), nil)
  drawings.judge = judge_of
end)

check.test("rows: of each kind what is drawn and what is beside it; bars only where all seeds have figures", function()
  local function figures(place)
    local shares = { object = 0.95, colour = 0.5, place = place, caption = 0.8 }
    return { drawn = shares, others = shares, real = shares, decoded = shares, combinations = shares, placed = 0.4,
      placed_real = 0.9 }
  end
  local rows = drawings.rows { figures(0.7), figures(0.9) }
  local by = {}
  for _, row in ipairs(rows) do by[row.claim] = row end
  check.equal(#rows, 20)
  local objects = by["objects that captions ask for, share that the judge sees"]
  check.equal({ objects.values, objects.bar, objects.judged }, { { 0.95, 0.95 }, 0.9, true })
  local places = by["places that captions ask for, share that the judge sees"]
  check.equal({ places.values, places.bar, places.judged }, { { 0.7, 0.9 }, 0.8, true })
  check.equal(by["places, in real pictures of these captions"].judged, false)
  check.equal(by["single things of which most is where the caption says (chance is 0.11)"].values, { 0.4, 0.4 })
  check.equal(by["right caption among 100 by scene-clip, drawn"].values, { 0.8, 0.8 })
  local none = drawings.rows { figures(nil), figures(0.9) }
  for _, row in ipairs(none) do
    if row.claim == places.claim then
      check.equal({ row.values == nil, row.measured, row.judged }, { true, "not asked for", false })
    end
  end
end)

check.test("how a recipe's painter draws: guidance within an interval, fresh noise, where it says so", function()
  check.equal(drawings.options { drawing_steps = 3, guidance = 2.0 }, { steps = 3, guidance = 2.0 })
  check.equal(drawings.options { drawing_steps = 3, guidance = 2.0, eta = 0 }, { steps = 3, guidance = 2.0 })
  check.equal(drawings.options({ drawing_steps = 3, guidance = 2.0, eta = 0.5 }).solver.eta, 0.5)
  local how = drawings.options { drawing_steps = 3, guidance = 2.0, interval = { 0.5, 4 } }
  local function guided(sigma) -- is the null condition asked for?
    local asked
    local run = { has_condition = function() return true end, evaluate = function(_, x, _, branches)
      asked = #branches
      return { condition = x, null = x }
    end }
    how.guidance:guide(run, ty.ones(1, 2), { sigma = sigma, alpha = 1 })
    return asked == 2
  end
  check.equal({ guided(0.4), guided(0.6), guided(4), guided(5) }, { false, true, true, false })
  how = drawings.options { drawing_steps = 3, guidance = 2.0, interval = { 0, math.huge } }
  check.equal({ guided(1e-6), guided(math.huge) }, { true, true }) -- on straight paths it begins at infinity
  check.fails(function() drawings.options { drawing_steps = 3, guidance = 2.0, interval = { 5 } } end,
    "interval: expected { low, high } of sigma / alpha, got { 5, nil }")
end)

check.finish()
