--- DS-CNN, depthwise separable convolutions for keywords in spectrograms: the network for keyword spotting of MLPerf
-- Tiny. Zhang et al. 2017, "Hello Edge: Keyword Spotting on Microcontrollers"; Banbury et al. 2021, "MLPerf Tiny
-- Benchmark". (Its network for pictures, ResNet8, is models.ResNet with small = true, channels { 16, 32, 64 } and
-- blocks { 1, 1, 1 }.)
--
--     local model = models.DSCNN { classes = 12 }
--     local logits = model(features)                       -- [n, 1, 49, 10] to [n, 12]
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

---@class DSCNN: Module
local DSCNN = nn.module "DSCNN"

local defaults = { in_channels = 1, classes = 12, width = 64, blocks = 4, dropout = 0.2 }
local kinds = { in_channels = "an integer >= 1", classes = "an integer >= 1", width = "an integer >= 1",
  blocks = "an integer >= 0", dropout = "a number in [0, 1]" }

local function append(list, conv, outputs)
  list:append(conv)
  list:append(nn.BatchNorm2d(outputs))
  list:append(nn.ReLU())
end

--- options: in_channels (1), classes (12), width (64 channels), blocks (4, each a depthwise and a pointwise
-- convolution), dropout (0.2, before the head).
---@param options? table
function DSCNN:init(options)
  local o = arguments.read("DSCNN", options, defaults, kinds)
  self.features = nn.Sequential()
  append(self.features, nn.Conv2d(o.in_channels, o.width, { 10, 4 }, { stride = 2, padding = { 5, 1 } }), o.width)
  for _ = 1, o.blocks do
    append(self.features, nn.Conv2d(o.width, o.width, 3, { padding = 1, groups = o.width }), o.width)
    append(self.features, nn.Conv2d(o.width, o.width, 1), o.width)
  end
  self.dropout = nn.Dropout(o.dropout)
  self.fc = nn.Linear(o.width, o.classes)
end

--- x [n, in_channels, time, coefficients] to logits [n, classes].
---@param x Tensor
---@return Tensor
function DSCNN:forward(x) return self.fc(self.dropout(self.features(x):mean { 2, 3 })) end

return DSCNN
