-- models.ConvNet: names and sizes of its parameters, and what it computes, op by op.
local here = arg and arg[0]:match ".*/" or "tests/modules/models/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models = require "tycho.models"

check.test("the parameters of a network of three blocks for 32 x 32", function()
  local model, names = models.ConvNet {}, {}
  for name in model:named_parameters() do names[#names + 1] = name end
  check.equal(names, { "features.0.weight", "features.0.bias", "features.1.weight", "features.1.bias",
    "features.4.weight", "features.4.bias", "features.5.weight", "features.5.bias", "features.8.weight",
    "features.8.bias", "features.9.weight", "features.9.bias", "classifier.weight", "classifier.bias" })
  check.equal(model.classifier.weight.shape, { 10, 2048 })
  check.equal(model:count_parameters(), 320010)
end)

check.test("a block is a convolution, a norm of each channel, ReLU and a mean over 2 x 2", function()
  ty.manual_seed(1)
  local model = models.ConvNet { in_channels = 2, size = 6, classes = 3, width = 4, blocks = 1 }
  ty.no_grad(function()
    local x, state = ty.randn(5, 2, 6, 6), model:state_dict()
    local y = ty.conv2d(x, state["features.0.weight"], state["features.0.bias"], { padding = 1 })
    local mean = y:mean({ 2, 3 }, true)
    y = (y - mean) / ((y - mean):square():mean({ 2, 3 }, true) + 1e-5):sqrt()
    y = y:clamp(0):reshape(5, 4, 3, 2, 3, 2):mean { 3, 5 }
    check.ok((model:embed(x) - y:flatten(1)):abs():max():item() < 1e-5)
    check.ok((model(x) - y:flatten(1):matmul(state["classifier.weight"]:transpose(0, 1))
      - state["classifier.bias"]):abs():max():item() < 1e-5)
  end)
  check.fails(function() models.ConvNet { size = 4, blocks = 3 } end, "size: expected at least 8 for 3 blocks, got 4")
  check.equal(models.ConvNet { size = 8, blocks = 0, in_channels = 1 }.classifier.weight.shape, { 10, 64 })
end)

check.finish()
