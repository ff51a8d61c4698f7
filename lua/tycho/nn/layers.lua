--- Linear, Embedding, Dropout, Flatten and the convolutions.
local ty = require "tycho"
local base = require "tycho.nn.module"
local init = require "tycho.nn.initial"
local options = require "tycho.nn.options"
local parts = require "tycho.nn.convolution"

local define, expect, positive, pair = base.define, options.expect, options.positive, options.pair
local default_init, check_groups, read_padding = parts.default_init, parts.check_groups, parts.read_padding
local conv_defaults, conv_kinds, describe_conv = parts.defaults, parts.kinds, parts.describe
local layers = {}

--- x [..., inputs] times weight [outputs, inputs] transposed, plus bias [outputs].
---@class Linear: Module
---@field weight Tensor
---@field bias? Tensor
---@overload fun(inputs: integer, outputs: integer, options?: {bias: boolean}): Linear
local Linear = define "Linear"
layers.Linear = Linear

function Linear:init(inputs, outputs, given)
  local o = options.read("Linear", given, { bias = true })
  positive("Linear", "inputs", inputs)
  positive("Linear", "outputs", outputs)
  self.in_features, self.out_features = inputs, outputs
  self.weight = options.parameter({ outputs, inputs }, default_init(inputs))
  if o.bias then self.bias = options.parameter({ outputs }, default_init(inputs)) end
end

--- residual, activation: as in ty.linear.
function Linear:forward(x, residual, activation) return ty.linear(x, self.weight, self.bias, residual, activation) end

function Linear:describe()
  return ("%d, %d%s"):format(self.in_features, self.out_features, self.bias and "" or ", bias = false")
end

--- Rows of weight [count, width] by position: index [...] to [..., width]. padding_index: a row that stays zero.
---@overload fun(count: integer, width: integer, options?: {padding_index: integer}): Module
local Embedding = define "Embedding"
layers.Embedding = Embedding

function Embedding:init(count, width, given)
  local o = options.read("Embedding", given, { padding_index = -1 }, { padding_index = "an integer >= -1" })
  positive("Embedding", "count", count)
  positive("Embedding", "width", width)
  if o.padding_index >= count then
    options.fail("Embedding: padding_index: expected a row of [0, %d), got %d", count, o.padding_index)
  end
  self.count, self.width, self.padding_index = count, width, o.padding_index
  self.weight = options.parameter({ count, width }, function(t)
    init.normal(t)
    if o.padding_index >= 0 then t:select(0, o.padding_index):fill_(0) end
  end)
end

function Embedding:forward(index) return ty.embedding(self.weight, index, self.padding_index) end

function Embedding:describe() return ("%d, %d"):format(self.count, self.width) end

--- Zeroes elements with probability p in training and scales the rest by 1 / (1 - p). Srivastava et al. 2014.
local Dropout = define "Dropout"
layers.Dropout = Dropout

function Dropout:init(p)
  self.p = expect("Dropout", "p", p, "a number in [0, 1] or nil") or 0.5
end

function Dropout:forward(x)
  if not self.training or self.p == 0 then return x end
  return ty.dropout(x, self.p, true)
end

function Dropout:describe() return ("%g"):format(self.p) end

--- Dimensions start to stop (included) become one.
local Flatten = define "Flatten"
layers.Flatten = Flatten

function Flatten:init(start, stop)
  self.start = expect("Flatten", "start", start, "an integer or nil") or 1
  self.stop = expect("Flatten", "stop", stop, "an integer or nil") or -1
end

function Flatten:forward(x) return ty.flatten(x, self.start, self.stop) end

--- Returns its input.
local Identity = define "Identity"
layers.Identity = Identity

function Identity:forward(x) return x end

--- Convolution of x [n, inputs, h, w] with weight [outputs, inputs / groups, kh, kw].
-- options: stride, padding (number, pair or "same"), dilation, groups, bias, algorithm ("library": ty.conv2d, which
-- takes what is fastest; "im2win": ty.conv2d_im2win).
---@overload fun(inputs: integer, outputs: integer, kernel: integer|integer[], options?: table): Module
local Conv2d = define "Conv2d"
layers.Conv2d = Conv2d

local conv2d_defaults, conv2d_kinds = { algorithm = "library" }, { algorithm = '"library" or "im2win"' }
for name, value in pairs(conv_defaults) do conv2d_defaults[name] = value end
for name, kind in pairs(conv_kinds) do conv2d_kinds[name] = kind end

function Conv2d:init(inputs, outputs, kernel, given)
  local o = options.read("Conv2d", given, conv2d_defaults, conv2d_kinds)
  if o.algorithm ~= "library" then self.algorithm = o.algorithm end
  check_groups("Conv2d", inputs, outputs, o.groups)
  self.in_channels, self.out_channels, self.groups = inputs, outputs, o.groups
  self.kernel_size = pair("Conv2d", "kernel", kernel, 1)
  o.stride, o.dilation = pair("Conv2d", "stride", o.stride, 1), pair("Conv2d", "dilation", o.dilation, 1)
  self.stride, self.dilation = o.stride, o.dilation
  self.padding = pair("Conv2d", "padding", read_padding("Conv2d", o, self.kernel_size))
  local kh, kw = self.kernel_size[1], self.kernel_size[2]
  local fill = default_init(inputs // o.groups * kh * kw)
  self.weight = options.parameter({ outputs, inputs // o.groups, kh, kw }, fill)
  if o.bias then self.bias = options.parameter({ outputs }, fill) end
end

function Conv2d:forward(x)
  local convolve = self.algorithm == "im2win" and ty.conv2d_im2win or ty.conv2d
  return convolve(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
end

function Conv2d:describe()
  return self.algorithm and ("%s, algorithm = %s"):format(describe_conv(self), self.algorithm) or describe_conv(self)
end

--- Convolution of x [n, inputs, w] with weight [outputs, inputs / groups, kw]; options as Conv2d's.
local Conv1d = define "Conv1d"
layers.Conv1d = Conv1d

function Conv1d:init(inputs, outputs, kernel, given)
  local o = options.read("Conv1d", given, conv_defaults, conv_kinds)
  check_groups("Conv1d", inputs, outputs, o.groups)
  self.in_channels, self.out_channels, self.groups = inputs, outputs, o.groups
  local function single(what, value, least)
    if type(value) == "table" and #value == 1 then value = value[1] end
    return { expect("Conv1d", what, value, ("an integer >= %d"):format(least)) }
  end
  self.kernel_size = single("kernel", kernel, 1)
  o.stride, o.dilation = single("stride", o.stride, 1), single("dilation", o.dilation, 1)
  self.stride, self.dilation = o.stride, o.dilation
  self.padding = single("padding", read_padding("Conv1d", o, self.kernel_size), 0)
  local fill = default_init(inputs // o.groups * self.kernel_size[1])
  self.weight = options.parameter({ outputs, inputs // o.groups, self.kernel_size[1] }, fill)
  if o.bias then self.bias = options.parameter({ outputs }, fill) end
end

function Conv1d:forward(x)
  return ty.conv1d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
end

Conv1d.describe = describe_conv

--- Transposed convolution of x [n, inputs, h, w] with weight [inputs, outputs / groups, kh, kw].
-- options: stride, padding, output_padding, dilation, groups, bias.
local ConvTranspose2d = define "ConvTranspose2d"
layers.ConvTranspose2d = ConvTranspose2d

function ConvTranspose2d:init(inputs, outputs, kernel, given)
  local who = "ConvTranspose2d"
  local o = options.read(who, given,
    { stride = 1, padding = 0, output_padding = 0, dilation = 1, groups = 1, bias = true }, conv_kinds)
  check_groups(who, inputs, outputs, o.groups)
  self.in_channels, self.out_channels, self.groups = inputs, outputs, o.groups
  self.kernel_size = pair(who, "kernel", kernel, 1)
  self.stride, self.padding = pair(who, "stride", o.stride, 1), pair(who, "padding", o.padding)
  self.output_padding = pair(who, "output_padding", o.output_padding)
  self.dilation = pair(who, "dilation", o.dilation, 1)
  local kh, kw = self.kernel_size[1], self.kernel_size[2]
  -- PyTorch takes the second size for fan_in here too, though it counts outputs.
  local fill = default_init(outputs // o.groups * kh * kw)
  self.weight = options.parameter({ inputs, outputs // o.groups, kh, kw }, fill)
  if o.bias then self.bias = options.parameter({ outputs }, fill) end
end

function ConvTranspose2d:forward(x)
  return ty.conv_transpose2d(x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups,
    self.dilation)
end

ConvTranspose2d.describe = describe_conv

return layers
