--- Residual networks for images, with torchvision's parameter names; folders have those of transformers. He et al.
-- 2016, "Deep Residual Learning for Image Recognition".
local ty = require "tycho"
local arguments = require "tycho.arguments"
local classifier = require "tycho.models.classifier"
local configs = require "tycho.models.config"
local Pretrained = require "tycho.models.pretrained"

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

---@class ResNet: Pretrained
local ResNet = nn.module("ResNet", Pretrained)
ResNet.model_type, ResNet.architecture = "resnet", "ResNetForImageClassification"

-- What transformers' config.json says of a network by our options.
local function config_of(o)
  local sizes = {}
  for i, channels in ipairs(o.channels) do sizes[i] = channels * kinds[o.block].expansion end
  return { num_channels = o.in_channels, embedding_size = o.stem or o.channels[1], hidden_sizes = sizes,
    depths = o.blocks, layer_type = o.block, hidden_act = "relu", downsample_in_first_stage = false,
    downsample_in_bottleneck = false, num_labels = o.classes, small = o.small or nil,
    classifier_dropout = o.dropout > 0 and o.dropout or nil }
end

--- options: in_channels (3), classes (1000), channels ({ 64, 128, 256, 512 }), blocks ({ 2, 2, 2, 2 }: ResNet-18),
-- block ("basic"; "bottleneck", with blocks = { 3, 4, 6, 3 } ResNet-50), stem (channels[1]: channels of the first
-- convolution), small (false; true for images of a few dozen pixels: a 3x3 stem without pooling, which transformers
-- does not have), dropout (0, before the head).
function ResNet:init(options)
  local o = nn.options("ResNet", options, { in_channels = 3, classes = 1000, channels = { 64, 128, 256, 512 },
    blocks = { 2, 2, 2, 2 }, block = "basic", stem = nn.none, small = false, dropout = 0, config = nn.none },
    { channels = "a list of integers >= 1", blocks = "a list of integers >= 1", stem = "an integer >= 1",
      config = "a table" })
  if #o.channels == 0 or #o.blocks ~= #o.channels then
    arguments.fail("ResNet: blocks: expected a number for each of the channels, got %d for %d",
      #o.blocks, #o.channels)
  end
  local Block = kinds[o.block]
  if not Block then error(("ResNet: block must be basic or bottleneck, got %s"):format(tostring(o.block)), 3) end
  self.config = o.config or config_of(o)
  local width = o.stem or o.channels[1]
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

--- The maps of each stage: x [n, in_channels, h, w] to a list of [n, channels, rows, columns], the last one last.
---@param x Tensor
---@param last? integer  the last stage that is computed
---@return Tensor[]
function ResNet:pyramid(x, last)
  local list = {}
  x = self.bn1(self.conv1(x)):relu()
  if self.maxpool then x = self.maxpool(x) end
  for i = 1, last or self.stages do
    x = self["layer" .. i](x)
    list[i] = x
  end
  return list
end

--- The maps of the last stage, or of an earlier one: x [n, in_channels, h, w] to [n, channels, rows, columns].
---@param x Tensor
---@param stage? integer  from 1
---@return Tensor
function ResNet:maps(x, stage)
  stage = stage == nil and self.stages or stage
  if math.type(stage) ~= "integer" or stage < 1 or stage > self.stages then
    arguments.fail("ResNet:maps: stage: expected an integer in [1, %d], got %s", self.stages, arguments.describe(stage))
  end
  return self:pyramid(x, stage)[stage]
end

--- Features before the head, the means of the maps: x [n, in_channels, h, w] to [n, width].
function ResNet:features(x) return self:maps(x):mean { 2, 3 } end

--- x [n, in_channels, h, w] to logits [n, classes].
function ResNet:forward(x) return self.fc(self.dropout(self:features(x))) end

--- The loss of labels, of one i64 [n] or of many [n, classes], as of models.ViTForImageClassification.
---@param x Tensor
---@param labels Tensor
---@return Tensor loss
function ResNet:loss(x, labels) return classifier.loss(self:forward(x), labels, self.config) end

--- The model of a published config.json.
function ResNet.from_config(class, given)
  local c = configs.read("ResNet", given, {
    num_channels = { "count", 3 }, embedding_size = { "count", 64 },
    hidden_sizes = { "counts", { 256, 512, 1024, 2048 } }, depths = { "counts", { 3, 4, 6, 3 } },
    layer_type = { "text", "bottleneck" }, hidden_act = { "text", "relu" },
    downsample_in_first_stage = { "flag", false }, downsample_in_bottleneck = { "flag", false },
    small = { "flag", configs.none }, classifier_dropout = { "share", configs.none },
  })
  configs.only("ResNet", c, { hidden_act = "relu", downsample_in_first_stage = false,
    downsample_in_bottleneck = false, layer_type = { "basic", "bottleneck" } })
  local expansion, channels = kinds[c.layer_type].expansion, {}
  for i, size in ipairs(c.hidden_sizes) do
    if size % expansion ~= 0 then
      error(("ResNet: hidden_sizes[%d] must be a multiple of %d, got %d"):format(i, expansion, size), 0)
    end
    channels[i] = size // expansion
  end
  for i, depth in ipairs(c.depths) do
    if depth > 10000 then error(("ResNet: depths[%d] must be at most 10000, got %d"):format(i, depth), 0) end
  end
  return class { in_channels = c.num_channels, classes = configs.labels(c), channels = channels, blocks = c.depths,
    block = c.layer_type, stem = c.embedding_size, small = c.small, dropout = c.classifier_dropout, config = c }
end

-- Parts of names, ours and those of transformers.
local names = {
  { "^conv1", "resnet.embedder.embedder.convolution" }, { "^bn1", "resnet.embedder.embedder.normalization" },
  { "^fc", "classifier.1" },
}

--- Renames one published name to ours.
function ResNet:rename(name)
  for _, pair in ipairs(names) do
    local theirs = pair[2] .. "."
    if name:sub(1, #theirs) == theirs then return pair[1]:sub(2) .. name:sub(#theirs) end
  end
  local stage, block, rest = name:match "^resnet%.encoder%.stages%.(%d+)%.layers%.(%d+)%.(.*)$"
  if not stage then return name end
  rest = rest:gsub("^shortcut%.convolution", "downsample.0"):gsub("^shortcut%.normalization", "downsample.1")
    :gsub("^layer%.(%d+)%.(%a+)", function(i, part)
      return ({ convolution = "conv", normalization = "bn" })[part] .. math.tointeger(i) + 1
    end)
  return ("layer%d.%s.%s"):format(math.tointeger(stage) + 1, block, rest)
end

--- The tensors by transformers' names.
function ResNet:published_state()
  local state = {}
  for name, t in pairs(self:state_dict()) do
    for _, pair in ipairs(names) do name = name:gsub(pair[1], pair[2]) end
    local stage, block, rest = name:match "^layer(%d+)%.(%d+)%.(.*)$"
    if stage then
      rest = rest:gsub("^downsample%.0", "shortcut.convolution"):gsub("^downsample%.1", "shortcut.normalization")
        :gsub("^conv(%d+)", function(i) return ("layer.%d.convolution"):format(i - 1) end)
        :gsub("^bn(%d+)", function(i) return ("layer.%d.normalization"):format(i - 1) end)
      name = ("resnet.encoder.stages.%d.layers.%s.%s"):format(stage - 1, block, rest)
    end
    state[name] = t
  end
  return state
end

return ResNet
