-- The judge of drawn scenes: what drawing leaves of pictures and clips, places by cells, what tuning gives, errors.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets, zoo = require "tycho.datasets", require "tycho.zoo"

local judges, statements = zoo.drawing_judge, datasets.scenes.statements

check.test("pictures are disturbed by shares of their own, some not at all", function()
  ty.manual_seed(4)
  local x = zoo.scenes.pictures(zoo.scenes.set("training", { "image" }):batch(ty.arange(200)).image)
  local apart = (judges.disturb(x) - x):square():mean { 1, 2, 3 }
  local same = apart:eq(0):to("f32"):mean():item()
  check.ok(same > 0.3 and same < 0.5, tostring(same))
  check.ok(apart:max():item() > 2 * apart:mean():item() and apart:max():item() < 0.5)
end)

check.test("frames of a clip are blurred alike, with noise of their own", function()
  ty.manual_seed(5)
  local still = ty.rand(40, 3, 1, 32, 32):expand(40, 3, 4, 32, 32):contiguous()
  local y = judges.disturb(still)
  check.equal(y.shape, { 40, 3, 4, 32, 32 })
  local moved = (y:select(2, 0) - y:select(2, 3)):abs():amax { 1, 2, 3 }
  local changed = (y:select(2, 0) - still:select(2, 0)):abs():amax { 1, 2, 3 }
  for i = 0, 39 do check.equal(moved[i]:item() > 0, changed[i]:item() > 0) end -- a clip is disturbed as a whole or not
  check.ok(moved:gt(0):to("f32"):mean():item() > 0.4)
end)

check.test("objects are at the places whose cells show them", function()
  local names = { "top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right" }
  for p = 0, 8 do
    -- Two by two cells of eight around the middle of each place, of the first of two objects.
    local at, shown = { 1, 3, 6 }, ty.zeros(1, 64, 2)
    for dy = 0, 1 do
      for dx = 0, 1 do
        local y, x = at[p // 3 + 1] + dy, at[p % 3 + 1] + dx
        shown[0][math.min(y, 7) * 8 + math.min(x, 7)][0]:fill_(1)
      end
    end
    local found = judges.places(shown):tolist()[1]
    for q = 0, 17 do check.equal(found[q + 1] > 0, q == p, names[p + 1] .. " " .. q) end
  end
  local both = ty.zeros(1, 64, 1)
  for _, cell in ipairs { 0, 63 } do both[0][cell][0]:fill_(1) end
  local found = judges.places(both):tolist()[1]
  check.ok(found[1] > 0 and found[9] > 0 and found[5] < 0, "of two apples each is seen")
  check.ok(judges.places(ty.full({ 1, 64, 1 }, 0.005)):max():item() < 0, "hardly a trace is no object")
end)

check.test("most of what is not background is at one of the places, whatever it is", function()
  local objects = #datasets.scenes.objects
  local cells = ty.zeros(150, 64, objects + 8)
  cells:narrow(2, objects, 1):fill_(9)
  for i = 0, 149 do -- three cells of an object, in a place of its own, and one of another thing elsewhere
    local at, p = { 1, 3, 6 }, i % 9
    for d = 0, 2 do
      local cell = cells[i][(at[p // 3 + 1] + d // 2) * 8 + at[p % 3 + 1] + d % 2]
      cell[(i + d) % objects]:fill_(18)
    end
    cells[i][(at[(8 - p) // 3 + 1]) * 8 + at[(8 - p) % 3 + 1]][i % objects]:fill_(p == 4 and 0 or 18)
  end
  local from = 0
  local network = setmetatable({ device = function() return "cpu" end }, { __call = function(_, x)
    from = from + x.shape[1]
    return nil, cells:narrow(0, from - x.shape[1], x.shape[1])
  end })
  local places = judges.new().where(network, ty.zeros(150, 3, 64, 64)):tolist()
  for i = 0, 149 do check.equal(places[i + 1], i % 9) end
end)

check.test("a judge is tuned, says each sentence of each picture, and is read back", function()
  ty.manual_seed(6)
  local fields = { "image", "statements", "owner", "boxes", "scene" }
  local made = judges.tune { set = zoo.scenes.set("training", fields), steps = 2, batch = 4 }
  local batch = zoo.scenes.set("validation", { "image", "labels" }):batch(ty.arange(102))
  local logits = made:scores(zoo.scenes.pictures(batch.image))
  check.equal(logits.shape, { 102, statements.count })
  local right = logits:narrow(1, 0, 100):gt(0):eq(batch.labels:gt(0)):to("f32"):mean():item()
  check.ok(right > 0.97, tostring(right)) -- two steps do not spoil what scene-resnet knows
  local path = os.tmpname()
  made:save(path)
  local again = judges.new()
  again:load(path)
  check.close(again:eval():scores(zoo.scenes.pictures(batch.image:narrow(0, 0, 2))):tolist(),
    logits:narrow(0, 0, 2):tolist(), 1e-4)
  os.remove(path)
end)

check.test("what does not fit is one clear error", function()
  check.fails(function() judges.disturb(ty.zeros(3, 32, 32)) end, "disturb: x: expected %[n, 3, h, h%] or")
  check.fails(function() judges.disturb(ty.zeros(1, 3, 32, 16)) end, "disturb: x: expected")
  check.fails(function() judges.places(ty.zeros(1, 60, 2)) end, "places: shown: expected %[n, side %* side, objects%]")
  check.fails(function() judges.new():scores(ty.zeros(0, 3, 64, 64)) end, "scores: pictures: expected %[n, 3, 64, 64%]")
  check.fails(function() judges.new():where(ty.zeros(0, 3, 64, 64)) end, "where: pictures: expected %[n, 3, 64, 64%]")
  check.fails(function() judges.tune {} end, "options.set: expected a table, got nil")
end)

check.finish()
