--- Residual networks for clips and volumes, with the parameter names of torchvision's r3d_18, mc3_18 and r2plus1d_18.
-- Tran et al. 2018, "A Closer Look at Spatiotemporal Convolutions for Action Recognition".
--
--     local model = models.ResNet3d { classes = 5, channels = { 8, 16, 32 }, blocks = { 1, 1, 1 }, small = true }
--     local logits = model(clips)                          -- [n, 3, frames, height, width] to [n, 5]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local classifier = require "tycho.models.classifier"

local nn = ty.nn

-- ---- convolutions of a block: over space and time at once, over space alone, or one after the other ----

local makers = {}

makers["3d"] = function(inputs, outputs, _, stride)
  return nn.Conv3d(inputs, outputs, 3, { stride = stride, padding = 1, bias = false })
end

function makers.space(inputs, outputs, _, stride)
  return nn.Conv3d(inputs, outputs, { 1, 3, 3 },
    { stride = { 1, stride, stride }, padding = { 0, 1, 1 }, bias = false })
end

-- (2+1)D: `middle` channels between the two give it the parameters of one in three dimensions.
makers["2plus1d"] = function(inputs, outputs, middle, stride)
  return nn.Sequential(makers.space(inputs, middle, nil, stride), nn.BatchNorm3d(middle), nn.ReLU(),
    nn.Conv3d(middle, outputs, { 3, 1, 1 }, { stride = { stride, 1, 1 }, padding = { 1, 0, 0 }, bias = false }))
end

local Block = nn.module "VideoBlock"

function Block:init(inputs, outputs, kind, stride)
  local make, middle = makers[kind], inputs * outputs * 27 // (inputs * 9 + 3 * outputs)
  self.conv1 = nn.Sequential(make(inputs, outputs, middle, stride), nn.BatchNorm3d(outputs), nn.ReLU())
  self.conv2 = nn.Sequential(make(outputs, outputs, middle, 1), nn.BatchNorm3d(outputs))
  if stride ~= 1 or inputs ~= outputs then
    local steps = { kind == "space" and 1 or stride, stride, stride }
    self.downsample = nn.Sequential(nn.Conv3d(inputs, outputs, 1, { stride = steps, bias = false }),
      nn.BatchNorm3d(outputs))
  end
end

function Block:forward(x)
  local y = self.conv2(self.conv1(x))
  return (y + (self.downsample and self.downsample(x) or x)):relu()
end

-- What comes before the blocks halves the height and the width, and the frames where `stride` says so.
local function new_stem(kind, inputs, width, small, stride)
  local k = small and 3 or 7
  local space = { stride = { 1, 2, 2 }, padding = { 0, k // 2, k // 2 }, bias = false }
  if kind ~= "2plus1d" then
    local over_time = kind ~= "space"
    if over_time then space.stride[1], space.padding[1] = stride, 1 end
    return nn.Sequential(nn.Conv3d(inputs, width, { over_time and 3 or 1, k, k }, space), nn.BatchNorm3d(width),
      nn.ReLU())
  end
  local middle = math.max(1, 45 * width // 64) -- torchvision has 45 for 64 channels
  return nn.Sequential(nn.Conv3d(inputs, middle, { 1, k, k }, space), nn.BatchNorm3d(middle), nn.ReLU(),
    nn.Conv3d(middle, width, { 3, 1, 1 }, { padding = { 1, 0, 0 }, bias = false }), nn.BatchNorm3d(width), nn.ReLU())
end

---@class ResNet3d: Module
local ResNet3d = nn.module "ResNet3d"

local defaults = { in_channels = 3, classes = 400, channels = { 64, 128, 256, 512 }, blocks = { 2, 2, 2, 2 },
  convolution = "3d", stem = arguments.none, stem_stride = 1, small = false, dropout = 0 }
local kinds = { in_channels = "an integer >= 1", classes = "an integer >= 1", channels = "a list of integers >= 1",
  blocks = "a list of integers >= 1", convolution = '"3d" or "2plus1d" or "mixed" or "space"', stem = "an integer >= 1",
  stem_stride = "1 or 2", dropout = "a number in [0, 1)" }

--- options: in_channels (3), classes (400), channels ({ 64, 128, 256, 512 }), blocks ({ 2, 2, 2, 2 }), convolution
-- ("3d": r3d_18; "2plus1d": over space, then over time, r2plus1d_18; "mixed": over time in the first stage alone,
-- mc3_18; "space": each frame by itself, a network of two dimensions), stem (channels[1]: channels of the first
-- convolution), stem_stride (1, of frames; 2 as of rows and columns; not of "2plus1d" and "space"), small (false; true
-- for clips of a few dozen pixels: a kernel of 3 in place of 7 in the stem), dropout (0, before the head).
---@param options? table
function ResNet3d:init(options)
  local o = arguments.read("ResNet3d", options, defaults, kinds)
  if #o.channels == 0 or #o.blocks ~= #o.channels then
    arguments.fail("ResNet3d: blocks: expected a number for each of the channels, got %d for %d", #o.blocks,
      #o.channels)
  end
  self.config = o
  local width = o.stem or o.channels[1]
  if o.stem_stride ~= 1 and (o.convolution == "2plus1d" or o.convolution == "space") then
    arguments.fail("ResNet3d: stem_stride: expected 1 for convolutions of the kind %s, got %d", o.convolution,
      o.stem_stride)
  end
  self.stem = new_stem(o.convolution, o.in_channels, width, o.small, o.stem_stride)
  for i, channels in ipairs(o.channels) do
    local kind = o.convolution == "mixed" and (i == 1 and "3d" or "space") or o.convolution
    local layer = nn.Sequential()
    for block = 1, o.blocks[i] do
      layer:append(Block(width, channels, kind, block == 1 and i > 1 and 2 or 1))
      width = channels
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
  nn.init.normal(self.fc.weight, 0, 0.01)
  nn.init.zeros(self.fc.bias)
end

--- The maps of the last stage: x [n, in_channels, t, h, w] to [n, width, frames, rows, columns].
---@param x Tensor
---@return Tensor
function ResNet3d:maps(x)
  arguments.expect("ResNet3d", "x", x, "a tensor")
  if x.ndim ~= 5 or x.shape[2] ~= self.config.in_channels then
    arguments.fail("ResNet3d: x: expected [n, %d, t, h, w], got %s", self.config.in_channels, arguments.describe(x))
  end
  x = self.stem(x)
  for i = 1, #self.config.channels do x = self["layer" .. i](x) end
  return x
end

--- Features before the head, the means of the maps: x [n, in_channels, t, h, w] to [n, width].
---@param x Tensor
---@return Tensor
function ResNet3d:features(x) return self:maps(x):mean { 2, 3, 4 } end

--- x [n, in_channels, t, h, w] to logits [n, classes].
---@param x Tensor
---@return Tensor
function ResNet3d:forward(x) return self.fc(self.dropout(self:features(x))) end

--- The loss of labels, of one i64 [n] or of many [n, classes], as of models.ResNet.
---@param x Tensor
---@param labels Tensor
---@return Tensor loss
function ResNet3d:loss(x, labels) return classifier.loss(self:forward(x), labels, self.config) end

return ResNet3d
