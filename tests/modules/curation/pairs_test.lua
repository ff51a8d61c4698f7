-- Pairs of pictures and texts: scores, what each judge keeps, and the union of that.
local here = arg and arg[0]:match ".*/" or "tests/modules/curation/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local pairs_of = require("tycho.curation").pairs

check.test("similarity is the cosine of each pair", function()
  local image, text = ty.tensor { { 3, 0 }, { 1, 1 }, { 0, 2 } }:to "f32", ty.tensor { { 5, 0 }, { 0, 2 }, { 0, -1 } }
    :to "f32"
  check.close(pairs_of.similarity(image, text):tolist(), { 1, math.sqrt(0.5), -1 }, 1e-6)
end)

check.test("the best share, by score and then by place", function()
  local scores = ty.tensor { 0.1, 0.9, 0.5, 0.9, 0.5 }
  check.equal(pairs_of.best(scores, 0.4), { 1, 3 })
  check.equal(pairs_of.best(scores, 0.6), { 1, 2, 3 })
  check.equal(pairs_of.best(scores, 0), {})
  check.equal(pairs_of.best(scores, 1), { 0, 1, 2, 3, 4 })
end)

check.test("the union has every position once, and its noise is counted", function()
  local union = pairs_of.union { { 7, 1 }, { 1, 4 }, {} }
  check.equal(union, { 1, 4, 7 })
  local wrong = ty.tensor({ 1, 0, 1, 0, 1, 0, 0, 0 }, { dtype = "u8" })
  check.close(pairs_of.noise(wrong), 3 / 8, 0)
  check.close(pairs_of.noise(wrong, union), 1 / 3, 0)
  check.equal(pairs_of.noise(wrong, {}), 0)
end)

check.test("what cannot be chosen from is one clear error", function()
  check.fails(function() pairs_of.similarity(ty.zeros(2, 3), ty.zeros(2, 4)) end, "expected image and text [n, d]")
  check.fails(function() pairs_of.best(ty.zeros { 3 }, 1.5) end, "share: expected a number in [0, 1]")
  check.fails(function() pairs_of.union { { 1.5 } } end, "list 1: expected integers, got 1.5")
  check.fails(function() pairs_of.noise(ty.zeros { 3 }, { 3 }) end, "positions: expected integers in [0, 2], got 3")
end)

check.finish()
