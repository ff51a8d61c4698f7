-- The arm's policy of the zoo: what it draws goes by the seed alone, and pictures that recipes show of it.
local check = dofile((arg[0]:match(".*/") or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local datasets, zoo = require "tycho.datasets", require "tycho.zoo"

check.test("plans go by the seed and by what is seen alone, in batches as one by one", function()
  local model = zoo.load "arm-policy"
  local seen = datasets.arm.plans { split = "validation", episodes = 3, looks = 1, tasks = { "push", "open" } }
  local observation = zoo.arm.observation(model, seen)
  local function draw(rows, seeds)
    local some = {}
    for key, value in pairs(observation) do some[key] = value:narrow(0, rows[1], rows[2]) end
    return ty.no_grad(function() return (zoo.arm.draw(model, nil, some, { seeds = seeds })) end)
  end
  local all = draw({ 0, 3 }, { 5, 6, 7 })
  check.equal(all.shape, { 3, model.config.horizon, 3 })
  local function apart(a, b) return (a - b):abs():max():item() end
  check.equal(apart(all, draw({ 0, 3 }, { 5, 6, 7 })), 0.0)
  check.close(apart(all:narrow(0, 1, 1), draw({ 1, 1 }, { 6 })), 0, 1e-4)
  check.ok(apart(all:narrow(0, 1, 1), draw({ 1, 1 }, { 8 })) > 1e-6, "the seed matters")
  local ways = zoo.arm.ways(seen.states, all)
  check.equal(#ways, 3)
  check.fails(function() zoo.arm.ways(seen.states, all:narrow(0, 0, 2)) end, "expected states [n, 4] and plans")
end)

check.test("shaded: places that are lit stay, dark ones have a quarter", function()
  local picture = ty.full({ 3, 8, 8 }, 100)
  local shown = zoo.arm.shaded(picture, ty.tensor { 1, 0, 0.5, 1 })
  check.equal(shown:select(0, 2):select(0, 0):tolist(), { 100, 100, 100, 100, 25, 25, 25, 25 })
  check.equal(shown:select(0, 0):select(0, 7):tolist(), { 62.5, 62.5, 62.5, 62.5, 100, 100, 100, 100 })
  check.fails(function() zoo.arm.shaded(picture, ty.ones(5)) end, "lit [places] of a square grid")
  check.fails(function() zoo.arm.shaded(ty.ones(3), ty.ones(4)) end, "expected a picture [3, h, w]")
end)

check.finish()
