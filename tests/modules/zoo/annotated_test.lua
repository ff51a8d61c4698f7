-- Crops annotated by rules that names do not tell.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local zoo = require "tycho.zoo"
local annotated, scenes = zoo.annotated, zoo.scenes

check.test("categories, phrases, crops", function()
  local kinds = { "dog", "cat", "panda", "apple" }
  local categories = annotated.categories(kinds)
  local names = ty.stats.column(categories, "name")
  check.equal(names, { "dog (1)", "dog (2)", "cat", "panda (1)", "panda (2)", "apple" })
  check.equal({ categories[1].holds { colour = "red" }, categories[2].holds { colour = "red" } }, { true, false })
  check.equal({ categories[4].holds { size = "large" }, categories[5].holds { size = "large" } }, { true, false })
  local phrases = annotated.phrases "apple"
  check.equal({ phrases[1], phrases[2] }, { "an apple", "a small apple" })
  local set = annotated.crops(categories, { kinds = kinds, scenes = 12, seed = 1 })
  local n = set.pictures.shape[1]
  check.equal({ set.pictures.shape, set.labels.shape, #set.of_scene }, { { n, 3, 64, 64 }, { n }, n })
  check.ok(set.labels:max():item() < #categories and set.pictures:abs():max():item() <= 1.0001)
  local parts = annotated.parts({ 0, 1, 1, 2, 3, 4, 5, 6, 7, 8 }, 1, 2) -- folds of two scenes, in threes
  check.equal({ parts.held_out:tolist(), parts.candidates:tolist(), parts.scored:tolist() },
    { { 1, 2, 4, 6, 8 }, { 0, 7 }, { 3, 5, 9 } })
  check.fails(function() annotated.parts({ 0 }, 2, 2) end, "fold: expected an integer in [0, 1], got 2")
  check.fails(function() annotated.crops(categories, { kinds = kinds, scenes = 2, least = 999 }) end,
    "zoo.annotated.crops: least: expected crops of so many pixels, got none of 999")
end)

check.test("classes of scenes", function()
  local names, numbers, class_of = scenes.classes()
  check.equal({ #names, class_of[numbers[3]] }, { #numbers, 2 })
  local batch = scenes.labelled("validation", { "image", "scene" }, 5, 4, { objects = { 1, 1 } })
  for i, scene in ipairs(batch.scene) do
    check.equal(batch.labels:tolist()[i], class_of[scene.objects[1].object] or -1)
  end
end)

check.finish()
