--- ConvNet, the plain network for pictures that methods which condense data sets are compared with: blocks of a 3 x 3
-- convolution, a norm of each channel of each picture, ReLU and a mean over 2 x 2. Gidaris and Komodakis 2018, "Dynamic
-- Few-Shot Visual Learning without Forgetting"; Zhao et al. 2021, "Dataset Condensation with Gradient Matching", of
-- whose files it has the parameter names.
--
--     local model = models.ConvNet { in_channels = 1, size = 8, classes = 10, width = 32, blocks = 2 }
--     local logits = model(images)                         -- [n, 1, 8, 8] to [n, 10]
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

---@class ConvNet: Module
local ConvNet = nn.module "ConvNet"

local defaults = { in_channels = 3, classes = 10, size = 32, width = 128, blocks = 3 }
local kinds = { in_channels = "an integer >= 1", classes = "an integer >= 1", size = "an integer >= 1",
  width = "an integer >= 1", blocks = "an integer in [0, 8]" }

--- options: in_channels (3), classes (10), size (32: height and width of pictures), width (128 channels), blocks (3,
-- each of which halves height and width).
---@param options? table
function ConvNet:init(options)
  local o = arguments.read("ConvNet", options, defaults, kinds)
  local side, channels = o.size, o.in_channels
  self.features = nn.Sequential()
  for _ = 1, o.blocks do
    if side < 2 then
      arguments.fail("ConvNet: size: expected at least %d for %d blocks, got %d", 2 ^ o.blocks, o.blocks, o.size)
    end
    self.features:append(nn.Conv2d(channels, o.width, 3, { padding = 1 }))
    self.features:append(nn.GroupNorm(o.width, o.width))
    self.features:append(nn.ReLU())
    self.features:append(nn.AvgPool2d(2))
    side, channels = side // 2, o.width
  end
  self.classifier = nn.Linear(channels * side * side, o.classes)
end

--- What the classifier sees of x [n, in_channels, size, size]: [n, width].
---@param x Tensor
---@return Tensor
function ConvNet:embed(x) return self.features(x):flatten(1) end

--- x [n, in_channels, size, size] to logits [n, classes].
---@param x Tensor
---@return Tensor
function ConvNet:forward(x) return self.classifier(self:embed(x)) end

return ConvNet
