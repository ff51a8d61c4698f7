--- Convolutions of volumes, and transposed ones of rows and volumes, as modules.
local ty = require "tycho"
local base = require "tycho.nn.module"
local parts = require "tycho.nn.convolution"
local options = require "tycho.nn.options"

local M = {}

local function product(list)
  local n = 1
  for _, size in ipairs(list) do n = n * size end
  return n
end

-- A convolution over n dimensions; a transposed one has [inputs, outputs / groups, ...] for its weight.
local function convolution(name, n, transposed)
  local class = base.define(name)
  M[name] = class
  local defaults = { stride = 1, padding = 0, dilation = 1, groups = 1, bias = true }
  if transposed then defaults.output_padding = 0 end

  function class:init(inputs, outputs, kernel, given)
    local o = options.read(name, given, defaults, parts.kinds)
    parts.check_groups(name, inputs, outputs, o.groups)
    self.in_channels, self.out_channels, self.groups = inputs, outputs, o.groups
    self.kernel_size = options.each(name, "kernel", kernel, n, 1)
    o.stride = options.each(name, "stride", o.stride, n, 1)
    o.dilation = options.each(name, "dilation", o.dilation, n, 1)
    self.stride, self.dilation = o.stride, o.dilation
    local padding = transposed and o.padding or parts.read_padding(name, o, self.kernel_size)
    self.padding = options.each(name, "padding", padding, n)
    if transposed then self.output_padding = options.each(name, "output_padding", o.output_padding, n) end
    local size = transposed and { inputs, outputs // o.groups } or { outputs, inputs // o.groups }
    -- PyTorch takes the second size for fan_in in both cases.
    local fill = parts.default_init(size[2] * product(self.kernel_size))
    self.weight = options.parameter(table.move(self.kernel_size, 1, n, 3, size), fill)
    if o.bias then self.bias = options.parameter({ outputs }, fill) end
  end
  class.describe = parts.describe
  return class
end

--- Convolution of x [n, inputs, d, h, w] with weight [outputs, inputs / groups, kd, kh, kw].
-- options: stride, padding (number, list of three or "same"), dilation, groups, bias.
---@overload fun(inputs: integer, outputs: integer, kernel: integer|integer[], options?: table): Module
local Conv3d = convolution("Conv3d", 3)

function Conv3d:forward(x)
  return ty.conv3d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
end

--- Transposed convolution of x [n, inputs, w] with weight [inputs, outputs / groups, kw].
-- options: stride, padding, output_padding, dilation, groups, bias.
local ConvTranspose1d = convolution("ConvTranspose1d", 1, true)

function ConvTranspose1d:forward(x)
  return ty.conv_transpose1d(x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups,
    self.dilation)
end

--- Transposed convolution of x [n, inputs, d, h, w] with weight [inputs, outputs / groups, kd, kh, kw].
-- options: stride, padding, output_padding, dilation, groups, bias.
local ConvTranspose3d = convolution("ConvTranspose3d", 3, true)

function ConvTranspose3d:forward(x)
  return ty.conv_transpose3d(x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups,
    self.dilation)
end

return M
