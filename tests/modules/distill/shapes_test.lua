-- Coloured shapes by rule: drawn, read again, edited.
local here = (arg and arg[0]:match ".*/" or "tests/modules/distill/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local shapes = require("tycho.distill").shapes

check.test("what is drawn is read again, all labels at all places, also under noise", function()
  local at = ty.arange(256)
  local labels = ty.stack({ at % 4, at:floor_divide(4) % 4, at:floor_divide(16) % 4 }, 1)
  local x, mask = shapes.draw(labels, at:floor_divide(64), ty.linspace(-1, -0.6, 256))
  check.equal({ x.shape, mask.shape }, { { 256, 3, 8, 8 }, { 256, 1, 8, 8 } })
  local read, distance = shapes.read(x)
  check.equal({ read:eq(labels):all():item(), shapes.asked(x, labels) }, { true, 1.0 })
  check.ok(distance:max():item() < 1e-6)
  ty.manual_seed(1)
  check.ok(shapes.asked(x + 0.2 * ty.randn(256, 3, 8, 8), labels) > 0.98)
  check.ok(shapes.asked(ty.randn(256, 3, 8, 8), labels) < 0.1)
  -- The distance by hand: one number that is 0.3 off, away from the shape, moves the ground's mean a little.
  local y = shapes.draw(ty.tensor { { 0, 0, 0 } }, ty.tensor { 0 }, ty.tensor { -0.8 })
  y = y:clone()
  y:select(0, 0):select(0, 0):select(0, 7):select(0, 7):add_(0.3)
  local count = 55 * 3
  local want = math.sqrt((0.3 ^ 2 - 0.3 ^ 2 / count) / 192)
  check.close(select(2, shapes.read(y)):item(), want, 1e-6)
end)

check.test("a picture by hand", function()
  local x = shapes.draw(ty.tensor { { 3, 1, 2 } }, ty.tensor { 1 }, ty.tensor { -1.0 })
  local yellow = {}
  for i, v in ipairs(x:select(0, 0):select(0, 2):flatten():tolist()) do
    if v ~= -1 then yellow[#yellow + 1] = i - 1 end
  end
  -- A bar in the square whose corner is at row 4, column 1.
  check.equal(yellow, { 5 * 8 + 1, 5 * 8 + 2, 5 * 8 + 3 })
end)

check.test("text: a vector for each word; edits change the colour alone", function()
  ty.manual_seed(2)
  local labels = shapes.labels(20)
  local text = shapes.text(labels)
  check.equal(text.shape, { 20, 3, 16 })
  check.ok(text:eq(shapes.text(labels)):all():item())
  local batch = shapes.batch(30)
  local said = shapes.text((shapes.read(batch.image)))
  check.ok(said:eq(batch.text.embeddings):all():item(), "captions are of their pictures")
  local e = shapes.edits(50)
  check.equal(shapes.asked(e.image, e.labels), 1.0)
  local before = shapes.read(e.source)
  check.ok(before:narrow(1, 1, 2):eq(e.labels:narrow(1, 1, 2)):all():item())
  check.ok(before:narrow(1, 0, 1):ne(e.labels:narrow(1, 0, 1)):all():item())
  check.equal(((e.image - e.source) * e.kept):abs():max():item(), 0.0)
  check.ok(shapes.text(e.labels, true):eq(e.text):all():item())
  check.equal(shapes.nothing().text.embeddings:abs():max():item(), 0.0)
  check.fails(function() shapes.draw(ty.ones(2, 3)) end, "distill.shapes.draw: labels: expected i64 [n, 3]")
  check.fails(function() shapes.read(ty.ones(2, 3)) end, "pictures: expected [n, 3, 8, 8], got a tensor [2, 3]")
end)

check.test("elsewhere: what an edit changed where nothing was to change", function()
  local e = shapes.edits(6)
  check.equal(shapes.elsewhere(e.source, e), 0)
  check.close(shapes.elsewhere(e.image, e), 0, 1e-6) -- the shape alone has another colour
  check.close(shapes.elsewhere(e.source + e.kept * 0.25, e), 0.25, 1e-6)
  check.fails(function() shapes.elsewhere(e.source:narrow(0, 0, 5), e) end, "elsewhere: x: expected pictures")
end)

check.finish()
