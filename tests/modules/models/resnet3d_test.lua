-- Residual networks for clips: torchvision's sizes, names and strides, and what a block computes.
local here = arg and arg[0]:match ".*/" or "tests/modules/models/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models = require "tycho.models"

local nn = ty.nn

local function on_meta(options) return nn.with_defaults({ device = "meta" }, models.ResNet3d, options) end

check.test("ResNet3d has the sizes of torchvision's three networks", function()
  check.equal(on_meta():count_parameters(), 33371472)
  check.equal(on_meta({ convolution = "mixed" }):count_parameters(), 11695440)
  check.equal(on_meta({ convolution = "2plus1d" }):count_parameters(), 31505325)
end)

check.test("ResNet3d has torchvision's names and shapes", function()
  local plain, factored, mixed = on_meta(), on_meta { convolution = "2plus1d" }, on_meta { convolution = "mixed" }
  local function shape(model, name)
    return assert(model:state_dict()[name], name).shape
  end
  check.equal(shape(plain, "stem.0.weight"), { 64, 3, 3, 7, 7 })
  check.equal(shape(plain, "stem.1.running_mean"), { 64 })
  check.equal(shape(plain, "layer1.0.conv1.0.weight"), { 64, 64, 3, 3, 3 })
  check.equal(shape(plain, "layer2.0.downsample.0.weight"), { 128, 64, 1, 1, 1 })
  check.equal(shape(plain, "layer4.1.conv2.1.running_var"), { 512 })
  check.equal(shape(plain, "fc.weight"), { 400, 512 })
  check.equal(shape(factored, "stem.0.weight"), { 45, 3, 1, 7, 7 })
  check.equal(shape(factored, "stem.3.weight"), { 64, 45, 3, 1, 1 })
  check.equal(shape(factored, "layer1.0.conv1.0.0.weight"), { 144, 64, 1, 3, 3 })
  check.equal(shape(factored, "layer1.0.conv1.0.1.weight"), { 144 })
  check.equal(shape(factored, "layer2.0.conv1.0.3.weight"), { 128, 230, 3, 1, 1 })
  check.equal(shape(factored, "layer2.0.conv2.0.0.weight"), { 230, 128, 1, 3, 3 })
  check.equal(shape(mixed, "layer1.0.conv1.0.weight"), { 64, 64, 3, 3, 3 })
  check.equal(shape(mixed, "layer2.0.conv1.0.weight"), { 128, 64, 1, 3, 3 })
end)

check.test("ResNet3d: sizes of the maps, which mixed convolutions keep along time", function()
  local clips = ty.zeros({ 2, 3, 16, 56, 56 }, { device = "meta" })
  check.equal(on_meta():maps(clips).shape, { 2, 512, 2, 4, 4 })
  check.equal(on_meta({ convolution = "2plus1d" }):maps(clips).shape, { 2, 512, 2, 4, 4 })
  check.equal(on_meta({ convolution = "mixed" }):maps(clips).shape, { 2, 512, 16, 4, 4 })
  check.equal(on_meta()(clips).shape, { 2, 400 })
end)

check.test("ResNet3d of space sees each frame by itself, and a stem of stride 2 every other", function()
  local clips = ty.zeros({ 2, 3, 16, 56, 56 }, { device = "meta" })
  check.equal(on_meta({ convolution = "space" }):maps(clips).shape, { 2, 512, 16, 4, 4 })
  check.equal(on_meta({ stem_stride = 2 }):maps(clips).shape, { 2, 512, 1, 4, 4 })
  check.equal(on_meta({ convolution = "space" }):state_dict()["stem.0.weight"].shape, { 64, 3, 1, 7, 7 })
  ty.manual_seed(2)
  local flat = models.ResNet3d { classes = 3, channels = { 4, 6 }, blocks = { 1, 1 }, small = true,
    convolution = "space" }:eval()
  local x = ty.randn(1, 3, 4, 8, 8)
  check.ok((flat:maps(x):select(2, 2) - flat:maps(x:narrow(2, 2, 1)):select(2, 0)):abs():max():item() < 1e-5)
end)

check.test("ResNet3d is what its parts say, number by number", function()
  ty.manual_seed(1)
  for _, kind in ipairs { "3d", "2plus1d" } do
    local model = models.ResNet3d { classes = 3, channels = { 4, 6 }, blocks = { 1, 1 }, small = true,
      convolution = kind }:eval()
    local x = ty.randn(2, 3, 5, 8, 8)
    local state = model:state_dict()
    local function norm(y, name)
      local function along(part) return state[name .. "." .. part]:reshape(1, -1, 1, 1, 1) end
      return (y - along "running_mean") / (along "running_var" + 1e-5):sqrt() * along "weight" + along "bias"
    end
    local function conv(y, name, stride)
      if kind == "3d" then return ty.conv3d(y, state[name .. ".weight"], nil, stride, 1) end
      y = ty.conv3d(y, state[name .. ".0.weight"], nil, { 1, stride, stride }, { 0, 1, 1 })
      return ty.conv3d(norm(y, name .. ".1"):relu(), state[name .. ".3.weight"], nil, { stride, 1, 1 }, { 1, 0, 0 })
    end
    local y
    if kind == "3d" then
      y = norm(ty.conv3d(x, state["stem.0.weight"], nil, { 1, 2, 2 }, 1), "stem.1"):relu()
    else
      y = norm(ty.conv3d(x, state["stem.0.weight"], nil, { 1, 2, 2 }, { 0, 1, 1 }), "stem.1"):relu()
      y = norm(ty.conv3d(y, state["stem.3.weight"], nil, 1, { 1, 0, 0 }), "stem.4"):relu()
    end
    for i = 1, 2 do
      local name = ("layer%d.0."):format(i)
      local z = norm(conv(y, name .. "conv1.0", i), name .. "conv1.1"):relu()
      z = norm(conv(z, name .. "conv2.0", 1), name .. "conv2.1")
      if i == 2 then
        y = norm(ty.conv3d(y, state[name .. "downsample.0.weight"], nil, 2), name .. "downsample.1")
      end
      y = (z + y):relu()
    end
    local want = y:mean { 2, 3, 4 }:matmul(state["fc.weight"]:transpose(0, 1)) + state["fc.bias"]
    check.ok((model(x) - want):abs():max():item() < 1e-5, kind)
  end
end)

check.test("ResNet3d learns which way a dot goes", function()
  ty.manual_seed(2)
  local clips, labels = ty.zeros(16, 3, 4, 8, 8), {}
  for i = 0, 15 do
    for t = 0, 3 do
      clips[("%d, :, %d, %d, %d"):format(i, t, i // 2, i % 2 == 0 and 2 * t or 6 - 2 * t)] = 1
    end
    labels[i + 1] = i % 2
  end
  labels = ty.tensor(labels, { dtype = "i64" })
  local model = models.ResNet3d { classes = 2, channels = { 4, 8 }, blocks = { 1, 1 }, small = true }
  local opt = ty.optim.Adam(model:parameters(), { lr = 0.02 })
  local loss
  for _ = 1, 25 do
    loss = model:loss(clips, labels)
    opt:step(loss)
  end
  check.ok(loss:item() < 0.1, ("learnt by heart, %.3f"):format(loss:item()))
end)

check.test("ResNet3d: mistakes", function()
  check.fails(function() models.ResNet3d { blocks = { 1, 1 } } end,
    "ResNet3d: blocks: expected a number for each of the channels, got 2 for 4")
  check.fails(function() models.ResNet3d { convolution = "4d" } end,
    'ResNet3d: convolution: expected "3d" or "2plus1d" or "mixed" or "space", got "4d"')
  local model = models.ResNet3d { channels = { 2 }, blocks = { 1 } }
  check.fails(function() model(ty.zeros(1, 3, 8, 8)) end, "ResNet3d: x: expected [n, 3, t, h, w], got")
end)

check.finish()
