--- Residual networks for images, with torchvision's parameter names. He et al. 2016.
local ty = require "tycho"

local nn = ty.nn

local function shortcut(inputs, outputs, stride)
  if stride == 1 and inputs == outputs then return nil end
  return nn.Sequential(nn.Conv2d(inputs, outputs, 1, { stride = stride, bias = false }), nn.BatchNorm2d(outputs))
end

local BasicBlock = nn.module "BasicBlock"
BasicBlock.expansion = 1 -- outputs for each channel of the stage

function BasicBlock:init(inputs, outputs, stride)
  self.conv1 = nn.Conv2d(inputs, outputs, 3, { stride = stride, padding = 1, bias = false })
  self.bn1 = nn.BatchNorm2d(outputs)
  self.conv2 = nn.Conv2d(outputs, outputs, 3, { padding = 1, bias = false })
  self.bn2 = nn.BatchNorm2d(outputs)
  self.downsample = shortcut(inputs, outputs, stride)
end

function BasicBlock:forward(x)
  local h = self.bn1(self.conv1(x)):relu()
  h = self.bn2(self.conv2(h))
  return (h + (self.downsample and self.downsample(x) or x)):relu()
end

-- The block of ResNet-50 and deeper, with the stride in its 3x3 convolution as torchvision has it.
local Bottleneck = nn.module "Bottleneck"
Bottleneck.expansion = 4

function Bottleneck:init(inputs, channels, stride)
  local outputs = channels * Bottleneck.expansion
  self.conv1 = nn.Conv2d(inputs, channels, 1, { bias = false })
  self.bn1 = nn.BatchNorm2d(channels)
  self.conv2 = nn.Conv2d(channels, channels, 3, { stride = stride, padding = 1, bias = false })
  self.bn2 = nn.BatchNorm2d(channels)
  self.conv3 = nn.Conv2d(channels, outputs, 1, { bias = false })
  self.bn3 = nn.BatchNorm2d(outputs)
  self.downsample = shortcut(inputs, outputs, stride)
end

function Bottleneck:forward(x)
  local h = self.bn1(self.conv1(x)):relu()
  h = self.bn2(self.conv2(h)):relu()
  h = self.bn3(self.conv3(h))
  return (h + (self.downsample and self.downsample(x) or x)):relu()
end

local kinds = { basic = BasicBlock, bottleneck = Bottleneck }

---@class ResNet: Module
local ResNet = nn.module "ResNet"

--- options: in_channels (3), classes (1000), channels ({ 64, 128, 256, 512 }), blocks ({ 2, 2, 2, 2 }: ResNet-18),
-- block ("basic"; "bottleneck", with blocks = { 3, 4, 6, 3 } ResNet-50), small (false; true for images of a few dozen
-- pixels: a 3x3 stem without pooling), dropout (0, before the head).
function ResNet:init(options)
  local o = nn.options("ResNet", options, { in_channels = 3, classes = 1000, channels = { 64, 128, 256, 512 },
    blocks = { 2, 2, 2, 2 }, block = "basic", small = false, dropout = 0 },
    { channels = "a list of integers >= 1", blocks = "a list of integers >= 1" })
  if #o.channels == 0 or #o.blocks ~= #o.channels then
    require("tycho.arguments").fail("ResNet: blocks: expected a number for each of the channels, got %d for %d",
      #o.blocks, #o.channels)
  end
  local Block = kinds[o.block]
  if not Block then error(("ResNet: block must be basic or bottleneck, got %s"):format(tostring(o.block)), 3) end
  local width = o.channels[1]
  if o.small then
    self.conv1 = nn.Conv2d(o.in_channels, width, 3, { padding = 1, bias = false })
  else
    self.conv1 = nn.Conv2d(o.in_channels, width, 7, { stride = 2, padding = 3, bias = false })
    self.maxpool = nn.MaxPool2d(3, { stride = 2, padding = 1 })
  end
  self.bn1 = nn.BatchNorm2d(width)
  self.stages = #o.channels
  for i, channels in ipairs(o.channels) do
    local layer = nn.Sequential()
    for block = 1, o.blocks[i] do
      layer:append(Block(width, channels, block == 1 and i > 1 and 2 or 1))
      width = channels * Block.expansion
    end
    self["layer" .. i] = layer
  end
  self.dropout = nn.Dropout(o.dropout)
  self.fc = nn.Linear(width, o.classes)
  for _, module in self:named_modules() do
    if module.kernel_size and module.weight then
      nn.init.kaiming_normal(module.weight, { mode = "fan_out", nonlinearity = "relu" })
    end
  end
end

--- Features before the head: x [n, in_channels, h, w] to [n, width].
function ResNet:features(x)
  x = self.bn1(self.conv1(x)):relu()
  if self.maxpool then x = self.maxpool(x) end
  for i = 1, self.stages do x = self["layer" .. i](x) end
  return x:mean { 2, 3 }
end

--- x [n, in_channels, h, w] to logits [n, classes].
function ResNet:forward(x) return self.fc(self.dropout(self:features(x))) end

return ResNet
