-- Random forests: a tree by hand, means of leaves, seeds, what is learnt of a function.
local here = arg and arg[0]:match ".*/" or "tests/modules/estimate/"
local check = dofile(here .. "../../lua/check.lua")
local scratch = dofile(here .. "../../lua/scratch.lua")
local ty = require "tycho"
local estimate = require "tycho.estimate"

local x = { { 1, 0 }, { 2, 5 }, { 3, 1 }, { 4, 4 }, { 5, 2 }, { 6, 3 } }
local y = { 1, 2, 3, 10, 20, 30 }
local plain = { trees = 1, bootstrap = false, tries = 2, least = 1 }

local function with(options)
  local all = {}
  for _, list in ipairs { plain, options } do for key, value in pairs(list) do all[key] = value end end
  return all
end

check.test("a tree splits where most of the squared error goes, and says the means of its leaves", function()
  -- All squared errors of the two parts, by hand: 1 | 5: 1, 542.8; 2 | 4: 0.5, 404.75; 3 | 3: 2, 200; 4 | 2: 50, 50.
  local stump = estimate.forest(x, y, with { depth = 1 })
  check.equal(stump.nodes.feature:tolist(), { 0, 0, 0 })
  check.equal(stump.nodes.threshold[0]:item(), 4.5)
  check.equal(stump:predict(x):tolist(), { 4, 4, 4, 4, 25, 25 })
  check.equal(stump:predict({ { 4.5, 0 }, { 4.6, 0 } }):tolist(), { 4, 25 })
  check.equal(stump.importance, { 1.0, 0.0 })
  -- At least three rows in a leaf: the split is in the middle.
  check.equal(estimate.forest(x, y, with { least = 3 }):predict(x):tolist(), { 2, 2, 2, 20, 20, 20 })
  check.equal(estimate.forest(x, y, with {}):predict(x):tolist(), y)
  local constant = estimate.forest(x, { 7, 7, 7, 7, 7, 7 }, with {})
  check.equal({ constant.depth, constant:predict({ { 9, 9 } }):item() }, { 0, 7 })
end)

-- A tree's leaf, walked in Lua.
local function walk(nodes, at, row)
  while nodes.left[at + 1] ~= at do
    at = row[nodes.feature[at + 1] + 1] <= nodes.threshold[at + 1] and nodes.left[at + 1] or nodes.right[at + 1]
  end
  return nodes.value[at + 1]
end

check.test("a forest is the mean of its trees, each walked to its leaf", function()
  ty.manual_seed(1)
  local rows = ty.rand(200, 3)
  local forest = estimate.forest(rows, rows:select(1, 0) * 3 + rows:select(1, 1), { trees = 7, depth = 5, seed = 2 })
  local nodes = {}
  for name, t in pairs(forest.nodes) do nodes[name] = t:tolist() end
  local new = ty.rand(20, 3)
  local each, all = forest:each(new):tolist(), forest:predict(new):tolist()
  for i, row in ipairs(new:to("f64"):tolist()) do
    local sum = 0
    for tree = 1, 7 do
      check.equal(each[i][tree], walk(nodes, nodes.root[tree], row))
      sum = sum + each[i][tree]
    end
    check.close(all[i], sum / 7, 1e-12)
  end
end)

check.test("a forest depends on the seed alone, and survives a file", function()
  ty.manual_seed(1)
  local rows = ty.rand(100, 4)
  local target = rows:select(1, 2):sin()
  local function grown(seed) return estimate.forest(rows, target, { trees = 5, seed = seed }) end
  local one = grown(3)
  ty.manual_seed(9)
  check.equal(grown(3):predict(rows):tolist(), one:predict(rows):tolist())
  check.ok((grown(4):predict(rows) - one:predict(rows)):abs():max():item() > 0, "another seed, another forest")
  local path = scratch.file "forest.safetensors"
  ty.io.save_safetensors(path, one:state_dict())
  local again = estimate.forest_from(ty.io.load_safetensors(path))
  check.equal(again:predict(rows):tolist(), one:predict(rows):tolist())
  check.equal(again.importance, one.importance)
  local state = one:state_dict()
  state.left = state.left + 1000000
  check.fails(function() estimate.forest_from(state) end, "estimate.forest_from: left: expected")
end)

check.test("a forest learns a function of two of five features, and says which", function()
  ty.manual_seed(4)
  local function target(t) return (t:select(1, 0) * 6):sin() + t:select(1, 3):square() * 2 end
  local rows, new = ty.rand(800, 5), ty.rand(300, 5)
  local forest = estimate.forest(rows, target(rows), { trees = 20, seed = 1, tries = 3 })
  check.ok(estimate.r2(target(new), forest:predict(new)) > 0.97, "held out")
  check.ok(forest.importance[1] + forest.importance[4] > 0.9, "the two that matter")
  check.close(estimate.r2(ty.tensor { 1, 2, 3 }, ty.tensor { 2, 2, 2 }), 0, 1e-12)
  check.close(estimate.r2(ty.tensor { 1, 2, 3 }, ty.tensor { 1, 2, 4 }), 0.5, 1e-12)
end)

check.test("forests: mistakes", function()
  check.fails(function() estimate.forest(x, { 1 }) end,
    "estimate.forest: y: expected a number for each of the 6 rows, got 1")
  check.fails(function() estimate.forest({ { 0 / 0 } }, { 1 }) end, "estimate.forest: x: expected finite numbers")
  check.fails(function() estimate.forest(x, y, { trees = 0 }) end,
    "estimate.forest: trees: expected an integer >= 1, got 0")
  local forest = estimate.forest(x, y, plain)
  check.fails(function() forest:predict { { 1 } } end, "Forest:predict: x: expected [m, 2], got")
end)

check.finish()
