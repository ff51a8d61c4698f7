--- MobileNetV2, with torchvision's parameter names. Sandler et al. 2018, "MobileNetV2: Inverted Residuals and Linear
-- Bottlenecks".
--
--     local model = models.MobileNetV2 { classes = 10, settings = { { 1, 8, 1, 1 }, { 3, 16, 2, 2 } }, stem = 8,
--       stride = 1, width = 64 }
--     local logits = model(pictures)                       -- [n, 3, h, w] to [n, 10]
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

-- Convolution, norm, and relu6 where it is wanted.
local function convolution(inputs, outputs, kernel, stride, groups)
  return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, { stride = stride, padding = kernel // 2, groups = groups,
    bias = false }), nn.BatchNorm2d(outputs), nn.ReLU6())
end

local Inverted = nn.module "InvertedResidual"

function Inverted:init(inputs, outputs, stride, expansion)
  local hidden = inputs * expansion
  self.residual = stride == 1 and inputs == outputs
  self.conv = nn.Sequential()
  if expansion > 1 then self.conv:append(convolution(inputs, hidden, 1, 1, 1)) end
  self.conv:append(convolution(hidden, hidden, 3, stride, hidden))
  self.conv:append(nn.Conv2d(hidden, outputs, 1, { bias = false }))
  self.conv:append(nn.BatchNorm2d(outputs))
end

function Inverted:forward(x)
  local y = self.conv(x)
  return self.residual and x + y or y
end

---@class MobileNetV2: Module
local MobileNetV2 = nn.module "MobileNetV2"

local defaults = { in_channels = 3, classes = 1000, stem = 32, stride = 2, width = 1280, dropout = 0.2, settings = {
  { 1, 16, 1, 1 }, { 6, 24, 2, 2 }, { 6, 32, 3, 2 }, { 6, 64, 4, 2 }, { 6, 96, 3, 1 }, { 6, 160, 3, 2 },
  { 6, 320, 1, 1 } } }
local kinds = { in_channels = "an integer >= 1", classes = "an integer >= 1", stem = "an integer >= 1",
  stride = "an integer >= 1", width = "an integer >= 1", dropout = "a number in [0, 1]", settings = "a list of tables" }

--- options: in_channels (3), classes (1000), stem (32: channels of the first convolution), stride (2, of that),
-- settings (of each stage the expansion, channels, blocks, stride of the first), width (1280: of the features), dropout
-- (0.2, before the head). The defaults are the paper's network.
---@param options? table
function MobileNetV2:init(options)
  local who = "MobileNetV2"
  local o = arguments.read(who, options, defaults, kinds)
  self.features = nn.Sequential(convolution(o.in_channels, o.stem, 3, o.stride, 1))
  local width = o.stem
  for i, setting in ipairs(o.settings) do
    for k = 1, 4 do arguments.expect(who, ("settings[%d][%d]"):format(i, k), setting[k], "an integer >= 1") end
    for block = 1, setting[3] do
      self.features:append(Inverted(width, setting[2], block == 1 and setting[4] or 1, setting[1]))
      width = setting[2]
    end
  end
  self.features:append(convolution(width, o.width, 1, 1, 1))
  self.classifier = nn.Sequential(nn.Dropout(o.dropout), nn.Linear(o.width, o.classes))
  for _, module in self:named_modules() do
    if module.kernel_size and module.weight then nn.init.kaiming_normal(module.weight, { mode = "fan_out" }) end
  end
end

--- x [n, in_channels, h, w] to logits [n, classes].
---@param x Tensor
---@return Tensor
function MobileNetV2:forward(x) return self.classifier(self.features(x):mean { 2, 3 }) end

return MobileNetV2
