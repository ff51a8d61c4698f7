--- Networks that make pictures larger. ESPCN works on the small picture and rearranges the channels of its last
-- convolution into pixels: Shi et al. 2016, "Real-Time Single Image and Video Super-Resolution Using an Efficient
-- Sub-Pixel Convolutional Neural Network". SRCNN, before it, works on the picture that was enlarged already: Dong et
-- al. 2014, "Learning a Deep Convolutional Network for Image Super-Resolution".
--
--     local model = models.ESPCN { scale = 3 }
--     local large = model(small)                          -- [n, 1, h, w] to [n, 1, 3 h, 3 w], from 0 to 1
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local M = {}

local defaults = { channels = 1, scale = 3, widths = { 64, 32 }, kernels = { 5, 3, 3 } }
local kinds = { channels = "an integer >= 1", scale = "an integer >= 2", widths = "a list of integers",
  kernels = "a list of integers" }

local function read(who, options, own)
  local o = arguments.read(who, options, own, kinds)
  if #o.kernels ~= #o.widths + 1 then
    arguments.fail("%s: kernels: expected one more than the %d widths, got %d", who, #o.widths, #o.kernels)
  end
  for i, size in ipairs(o.kernels) do
    if size < 1 or size % 2 == 0 then
      arguments.fail("%s: kernels: expected odd sizes, got %d at place %d", who, size, i)
    end
  end
  for i, width in ipairs(o.widths) do
    if width < 1 then arguments.fail("%s: widths: expected integers >= 1, got %d at place %d", who, width, i) end
  end
  return o
end

-- Convolutions that see inner positions alone.
local function layers(o, outputs)
  local list, width = nn.ModuleList {}, o.channels
  for i, kernel in ipairs(o.kernels) do
    local out = o.widths[i] or outputs
    list:append(nn.Conv2d(width, out, kernel))
    width = out
  end
  return list
end

-- What they make of a picture whose edge goes on beyond it, as far as they see.
local function run(self, x, activation)
  local around = 0
  for _, kernel in ipairs(self.config.kernels) do around = around + kernel // 2 end
  x = ty.pad(x, { around, around, around, around }, "replicate")
  for i, layer in ipairs(self.layers) do
    x = layer(x)
    if i < #self.layers then x = ty[activation](x) end
  end
  return x
end

local function check(who, o, x)
  arguments.expect(who, "x", x, "a tensor")
  if x.ndim ~= 4 or x.shape[2] ~= o.channels then
    arguments.fail("%s: x: expected [n, %d, h, w], got %s", who, o.channels, arguments.describe(x))
  end
end

---@class ESPCN: Module
local ESPCN = nn.module "ESPCN"

--- options: channels (1, of a picture), scale (3), widths ({ 64, 32 }, of the inner convolutions), kernels ({ 5, 3, 3
-- }: their sizes and that of the last one).
---@param options? table
function ESPCN:init(options)
  local o = read("ESPCN", options, defaults)
  self.config, self.layers = o, layers(o, o.channels * o.scale * o.scale)
end

--- Pictures [n, channels, h, w] to [n, channels, scale h, scale w].
---@param x Tensor
---@return Tensor
function ESPCN:forward(x)
  check("ESPCN", self.config, x)
  return run(self, x, "tanh"):pixel_shuffle(self.config.scale)
end

---@class SRCNN: Module
local SRCNN = nn.module "SRCNN"

--- options: channels (1), scale (3), widths ({ 64, 32 }), kernels ({ 9, 1, 5 }).
---@param options? table
function SRCNN:init(options)
  local own = {}
  for key, value in pairs(defaults) do own[key] = value end
  own.kernels = { 9, 1, 5 }
  local o = read("SRCNN", options, own)
  self.config, self.layers = o, layers(o, o.channels)
end

--- Pictures [n, channels, h, w] to [n, channels, scale h, scale w].
---@param x Tensor
---@return Tensor
function SRCNN:forward(x)
  check("SRCNN", self.config, x)
  return run(self, ty.interpolate(x, { scale = self.config.scale, mode = "bicubic" }), "relu")
end

M.ESPCN, M.SRCNN = ESPCN, SRCNN
return M
