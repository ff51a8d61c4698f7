--- Residual networks for signals, one-dimensional convolutions with leaky rectifiers and averages for shortcuts. After
-- Ribeiro et al. 2020, "Automatic Diagnosis of the 12-Lead ECG Using a Deep Neural Network", and the encoder of Zhou et
-- al. 2024, "CE-SSL", in small.
--
--     local model = models.ResNet1d { leads = 2, labels = 8, widths = { 24, 32, 48 } }
--     local logits = model(signal)                         -- [n, 2, t] to [n, 8]
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

local Block = nn.module "SignalBlock"

function Block:init(inputs, outputs, kernel, stride)
  self.stride = stride
  self.conv1 = nn.Conv1d(inputs, outputs, kernel, { stride = stride, padding = kernel // 2 })
  self.bn1 = nn.BatchNorm1d(outputs)
  self.conv2 = nn.Conv1d(outputs, outputs, kernel, { padding = kernel // 2 })
  self.bn2 = nn.BatchNorm1d(outputs)
  if inputs ~= outputs or stride ~= 1 then self.conv3 = nn.Conv1d(inputs, outputs, 1) end
end

function Block:forward(x)
  local y = self.bn1(self.conv1(x)):leaky_relu(0.01)
  y = self.bn2(self.conv2(y)):leaky_relu(0.01)
  if self.conv3 then
    local n, c, t = x.shape[1], x.shape[2], x.shape[3]
    if self.stride > 1 then -- means of so many samples, the last ones of those there are
      local rest = y.shape[3] * self.stride - t
      if rest > 0 then x = ty.pad(x, { 0, rest }, "replicate") end
      x = x:reshape(n, c, -1, self.stride):mean(3)
    end
    x = self.conv3(x)
  end
  return x + y
end

---@class ResNet1d: Module
local ResNet1d = nn.module "ResNet1d"

local defaults = { leads = 2, labels = 8, widths = { 24, 32, 48 }, blocks = 1, kernel = 9, hidden = 64 }
local kinds = { leads = "an integer >= 1", labels = "an integer >= 1", widths = "a list of integers",
  blocks = "an integer >= 1", kernel = "an integer >= 1", hidden = "an integer >= 1" }

--- options: leads (2), labels (8), widths ({ 24, 32, 48 }: of the stages, each of which begins by halving the samples),
-- blocks (1, of a stage), kernel (9, odd), hidden (64, of the layer before the last).
---@param options? table
function ResNet1d:init(options)
  local who = "ResNet1d"
  local o = arguments.read(who, options, defaults, kinds)
  if #o.widths == 0 then arguments.fail("%s: widths: expected at least one, got none", who) end
  if o.kernel % 2 == 0 then arguments.fail("%s: kernel: expected an odd number, got %d", who, o.kernel) end
  self.config = o
  self.blocks = nn.ModuleList {}
  local width = o.leads
  for i, outputs in ipairs(o.widths) do
    if outputs < 1 then arguments.fail("%s: widths: expected integers >= 1, got %d at place %d", who, outputs, i) end
    for k = 1, o.blocks do
      self.blocks:append(Block(width, outputs, o.kernel, k == 1 and 2 or 1))
      width = outputs
    end
  end
  self.hidden = nn.Linear(2 * width, o.hidden)
  self.classifier = nn.Linear(o.hidden, o.labels)
end

--- Signals [n, leads, t] to what is known of each after the blocks, [n, 2 * width]: maxima and means over time.
---@param x Tensor
---@return Tensor
function ResNet1d:features(x)
  arguments.expect("ResNet1d", "x", x, "a tensor")
  if x.ndim ~= 3 or x.shape[2] ~= self.config.leads then
    arguments.fail("ResNet1d: x: expected [n, %d, t], got %s", self.config.leads, arguments.describe(x))
  end
  for _, block in ipairs(self.blocks) do x = block(x) end
  return ty.concat({ x:amax({ 2 }), x:mean(2) }, 1)
end

--- Logits [n, labels] of features [n, 2 * width].
---@param features Tensor
---@return Tensor
function ResNet1d:head(features)
  arguments.expect("ResNet1d:head", "features", features, "a tensor")
  return self.classifier(self.hidden(features):leaky_relu(0.01))
end

--- Logits [n, labels] of signals [n, leads, t].
---@param x Tensor
---@return Tensor
function ResNet1d:forward(x) return self:head(self:features(x)) end

return ResNet1d
