-- The network of what is in front in pictures of the arm: trained once, read ever after, better than a guess.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local datasets, zoo = require "tycho.datasets", require "tycho.zoo"

check.test("it is trained once, and what it learns is there in episodes that it has not seen", function()
  local folder = scratch.file "geometry"
  local options = { steps = 40, episodes = 12, batch = 16, quiet = true }
  local network = zoo.geometry.kept(folder, options)
  ty.manual_seed(9)
  local again = zoo.geometry.kept(folder, options)
  local x = zoo.arm.pictures(datasets.arm.chunks({ episodes = 2, looks = 1 }).images)
  check.equal(again:features(x):flatten():tolist(), network:features(x):flatten():tolist())
  check.equal({ again.training, #ty.io.listdir(folder) }, { false, 1 })
  local blank = zoo.geometry.kept(scratch.file "blank", { steps = 1, episodes = 1, batch = 1, quiet = true })
  local learnt, guess = zoo.geometry.measure(network, 4), zoo.geometry.measure(blank, 4)
  check.ok(learnt.front > guess.front + 0.1 and learnt.front > 0.4, ("%.3f, %.3f"):format(learnt.front, guess.front))
  check.ok(learnt.points < 0.5, tostring(learnt.points))
  check.fails(function() zoo.geometry.kept(3) end, "zoo.geometry.kept: folder: expected a string, got 3")
  check.fails(function() zoo.geometry.kept(folder, { steps = 0 }) end, "steps: expected an integer >= 1, got 0")
  check.fails(function() zoo.geometry.measure(3) end, "zoo.geometry.measure: network: expected a module, got 3")
end)

scratch.clean()
check.finish()
