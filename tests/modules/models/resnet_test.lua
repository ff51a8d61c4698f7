-- Residual networks: torchvision's sizes and names.
local here = arg and arg[0]:match ".*/" or "tests/modules/models/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local vision = require "tycho.vision"

check.test("ResNet's defaults are torchvision's ResNet-18", function()
  local model = ty.nn.with_defaults({ device = "meta" }, vision.ResNet)
  check.equal(model:count_parameters(), 11689512)
  local state = model:state_dict()
  check.equal(state["layer4.1.conv2.weight"].shape, { 512, 512, 3, 3 })
  check.equal(state["layer2.0.downsample.0.weight"].shape, { 128, 64, 1, 1 })
  check.equal(state["layer1.0.bn1.running_var"].shape, { 64 })
end)

check.test("ResNet-50 has torchvision's size and names", function()
  local model = ty.nn.with_defaults({ device = "meta" }, vision.ResNet,
    { block = "bottleneck", blocks = { 3, 4, 6, 3 } })
  check.equal(model:count_parameters(), 25557032)
  local state, count = model:state_dict(), 0
  for _ in pairs(state) do count = count + 1 end
  check.equal(count, 320)
  check.equal(state["layer1.0.downsample.0.weight"].shape, { 256, 64, 1, 1 })
  check.equal(state["layer2.0.conv1.weight"].shape, { 128, 256, 1, 1 })
  check.equal(state["layer2.0.conv2.weight"].shape, { 128, 128, 3, 3 })
  check.equal(state["layer4.2.conv3.weight"].shape, { 2048, 512, 1, 1 })
  check.equal(state["layer4.2.bn3.running_mean"].shape, { 2048 })
  check.equal(state["fc.weight"].shape, { 1000, 2048 })
  check.equal(model(ty.zeros(2, 3, 64, 64, { device = "meta" })).shape, { 2, 1000 })
  check.equal(model.layer2[1].conv2.stride[1], 2)
  check.fails(function() vision.ResNet { block = "wide" } end, "ResNet: block must be basic or bottleneck, got wide")
end)

check.finish()
