-- Residual networks: torchvision's sizes and names.
local here = arg and arg[0]:match ".*/" or "tests/modules/models/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local reference = dofile(here .. "reference.lua")(check)
local hub = require "tycho.hub"
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

for _, name in ipairs { "resnet_basic", "resnet_bottleneck" } do
  check.test(name .. ": logits and gradients of transformers", function()
    local folder = check.root .. "tests/fixtures/vision/" .. name
    local model, want = hub.load(folder, { dtype = "f32" }), ty.io.load_safetensors(folder .. "/expected.safetensors")
    check.equal({ model.report.unexpected, model.report.missing }, { {}, {} })
    local ours = {}
    for key, pair in pairs(want) do
      local theirs = key:match "^grad%.(.*)$"
      if theirs then ours["grad." .. model:rename(theirs)] = pair end
    end
    local x = want.x:detach():requires_grad_()
    local logits = model(x)
    reference.compare(logits, want.logits, "logits")
    local loss = (logits * reference.wave(logits):to "f32"):sum()
    check.equal(reference.compare_gradients(model, loss, ours), {}, "gradients left")
    reference.compare(x.grad, want["input_grad.x"], "gradient for the pictures")
    -- The weights alone have torchvision's names, and are read too.
    local other = vision.ResNet { in_channels = model.config.num_channels, classes = #want.logits[0]:tolist(),
      channels = name == "resnet_basic" and { 6, 8 } or { 2, 4, 6 }, blocks = model.config.depths, stem = 6,
      block = model.config.layer_type }
    hub.assign(other, model:state_dict())
    reference.compare(other:eval()(x), want.logits, "logits by torchvision's names")
    check.close(model:loss(x, ty.tensor { 0, 1, 2 }):item(),
      ty.nn.cross_entropy(logits, ty.tensor { 0, 1, 2 }):item(), 1e-6)
  end)
end

check.test("ResNet: a small one, which transformers does not have, is written and read with its labels", function()
  local scratch = dofile(here .. "../../lua/scratch.lua")
  local model = vision.ResNet { in_channels = 1, classes = 7, small = true, channels = { 4, 6 }, blocks = { 1, 2 },
    block = "bottleneck", stem = 5, dropout = 0.1 }:eval()
  model:save(scratch.file "small")
  local again, x = hub.load(scratch.file "small"), ty.randn(2, 1, 8, 8)
  check.equal({ again.maxpool, again.dropout.p, again.config.unknown }, { nil, 0.1, {} })
  check.equal(again(x):tolist(), model(x):tolist())
  check.equal(model(x).shape, { 2, 7 })
end)

check.test("ResNet: what is not computed here is an error", function()
  local ResNet = vision.ResNet
  local function fails(config, text)
    config.model_type = "resnet"
    check.fails(function() ResNet:from_config(config) end, text)
  end
  fails({ hidden_act = "gelu" }, "ResNet: config key 'hidden_act': expected relu, got gelu, which is not supported")
  fails({ downsample_in_bottleneck = true }, "config key 'downsample_in_bottleneck': expected false, got true")
  fails({ layer_type = "wide" }, "config key 'layer_type': expected basic or bottleneck, got wide")
  fails({ hidden_sizes = { 6, 8, 8, 8 } }, "ResNet: hidden_sizes[1] must be a multiple of 4, got 6")
  fails({ depths = { 1, 2 } }, "ResNet: blocks: expected a number for each of the channels, got 2 for 4")
end)

check.finish()
