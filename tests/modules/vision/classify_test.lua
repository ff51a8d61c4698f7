-- Image classifiers: training, evaluation, random shifts.
local here = arg and arg[0]:match ".*/" or "tests/modules/vision/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local vision = require "tycho.vision"

check.test("vision: a network learns a few digits, shifts stay inside", function()
  ty.manual_seed(0)
  local few = ty.data.subset(ty.data.digits(), ty.arange(60))
  local model = vision.ResNet { in_channels = 1, classes = 10, small = true, channels = { 8, 16 }, blocks = { 1, 1 } }
  local losses = vision.fit(model, few, { steps = 120, batch_size = 20, quiet = true })
  check.equal(#losses, 120)
  check.equal(model.training, false)
  check.ok(vision.accuracy(model, few) > 0.9, "learnt by heart")
  check.equal(vision.predict(model, few:batch(ty.arange(3)).image).shape, { 3 })
  local image = ty.zeros(1, 1, 5, 5)
  image["0, 0, 2, 2"] = 1
  for _ = 1, 10 do
    local moved = vision.random_shift(image, 2, -1)
    check.equal(moved.shape, { 1, 1, 5, 5 })
    check.equal(moved:max():item(), 1)
  end
  local names = vision.ResNet({ classes = 3 }):state_dict()
  for _, name in ipairs { "conv1.weight", "bn1.running_var", "layer2.0.downsample.0.weight", "layer4.1.bn2.bias",
    "fc.weight" } do
    check.ok(names[name], name)
  end
end)

check.test("ResNet: bottlenecks learn a few digits", function()
  ty.manual_seed(2)
  local few = ty.data.subset(ty.data.digits(), ty.arange(60))
  local model = vision.ResNet { in_channels = 1, classes = 10, small = true, channels = { 8, 16 }, blocks = { 1, 1 },
    block = "bottleneck" }
  vision.fit(model, few, { steps = 120, batch_size = 20, quiet = true })
  check.ok(vision.accuracy(model, few) > 0.9, "learnt by heart")
end)

check.finish()
