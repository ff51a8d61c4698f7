-- Figures of many labels: macro-F1 against counting, intervals against what is known.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local vision = require "tycho.vision"

check.test("macro-F1 is that of counts", function()
  ty.manual_seed(1)
  local scores, labels = ty.randn(40, 5), ty.rand(40, 5):lt(0.3):to "u8"
  local s, l, mean = scores:tolist(), labels:tolist(), 0
  local got, by_class = vision.macro_f1(scores, labels, 0.2)
  for c = 1, 5 do
    local hit, said, there = 0, 0, 0
    for i = 1, 40 do
      local yes = s[i][c] > 0.2
      if yes then said = said + 1 end
      there = there + l[i][c]
      if yes and l[i][c] == 1 then hit = hit + 1 end
    end
    local precision, recall = hit / said, hit / there
    local f1 = hit == 0 and 0 or 2 * precision * recall / (precision + recall)
    check.close(by_class[c - 1]:item(), f1, 1e-12)
    mean = mean + f1 / 5
  end
  check.close(got, mean, 1e-12)
end)

check.test("classes without anything are left out, thresholds go by class", function()
  local scores = ty.tensor { { 1.0, -1, 3 }, { -1, -1, 2 }, { 2, -1, 1 } }
  local labels = ty.tensor({ { 1, 0, 1 }, { 0, 0, 1 }, { 1, 0, 0 } }, { dtype = "u8" })
  local mean, by_class = vision.macro_f1(scores, labels)
  check.close(mean, (1 + 0.8) / 2, 1e-12)
  check.ok(by_class[1]:isnan():item())
  check.close(vision.macro_f1(scores, labels, { 0, 0, 1.5 }), 1, 1e-12)
  check.close(vision.macro_f1(scores, labels, { 0, -2, 1.5 }), 2 / 3, 1e-12, "said, but never there")
end)

check.test("intervals", function()
  local n = 400
  local right = ty.arange(n):lt(300):to "f32":unsqueeze(1)
  local function share(scores) return scores:mean():item() end
  local found = vision.interval(share, right, right, { rounds = 1000 })
  check.close(found.value, 0.75, 1e-6)
  local half = 1.96 * math.sqrt(0.75 * 0.25 / n)
  check.close(found.low, 0.75 - half, 0.008)
  check.close(found.high, 0.75 + half, 0.008)
  local few = { rounds = 50 }
  check.equal(vision.interval(share, right, right, few), vision.interval(share, right, right, few))
  local wide = vision.interval(share, right, right, { rounds = 1000, level = 0.5 })
  check.ok(wide.high - wide.low < 0.5 * (found.high - found.low))
end)

check.test("mistakes", function()
  local x = ty.ones(3, 2)
  check.fails(function() vision.macro_f1(x, ty.ones(3, 1)) end, "vision.macro_f1: expected scores and labels [n,")
  check.fails(function() vision.macro_f1(x, x * 2) end, "labels: expected 0 and 1 alone")
  check.fails(function() vision.macro_f1(x, x, { 1 }) end, "threshold: expected one for each of 2 classes")
  check.fails(function() vision.interval(print, x, ty.ones(2, 2)) end, "equally many items")
  check.fails(function() vision.interval(print, x, x, { rounds = 1 }) end, "rounds: expected an integer >= 10")
end)

check.finish()
