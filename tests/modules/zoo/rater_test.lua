-- The rater of scenes: levels of equal size, what it learns goes with the true complexity.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets, vlm, zoo = require "tycho.datasets", require "tycho.vlm", require "tycho.zoo"

check.test("levels divide numbers in equal parts", function()
  local levels = zoo.rater.levels(ty.tensor { 5.0, 1, 4, 2, 3, 6 }, 3)
  check.equal({ levels:tolist(), levels.dtype }, { { 2, 0, 1, 0, 1, 2 }, "i64" })
  check.fails(function() zoo.rater.levels(ty.ones(2), 1) end, "zoo.rater.levels: levels: expected an integer >= 2")
end)

check.test("a rater learns which scenes are complex, the same by the same seed", function()
  local options = { levels = 3, scenes = 200, steps = 60, seed = 1 }
  local rater, again = zoo.rater.train(options), zoo.rater.train(options)
  check.equal({ rater.training, ty.recipe.apart(rater, again) }, { false, 0.0 })
  local batch = zoo.scenes.set("training", { "image", "scene" }):batch(ty.arange(90000 - 400, 90000 - 200))
  local rated = ty.no_grad(function()
    return vlm.icar.complexity(rater(zoo.rater.pool(zoo.scenes.pictures(batch.image))))
  end)
  local truth = ty.tensor(datasets.scenes.complexity(batch.scene)):to("f64"):tolist()
  check.ok(ty.stats.correlation(rated:to("f64"):tolist(), truth) > 0.5, "of the scenes that it learnt from")
  check.fails(function() zoo.rater.train { scenes = 4000, seed = 22 } end, "seed: expected one below 22, with 4000")
  check.fails(function() zoo.rater.pool(3) end, "zoo.rater.pool: pictures: expected a tensor, got 3")
end)

check.finish()
