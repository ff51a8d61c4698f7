--- Modules that resize and rearrange images: Upsample, windows as columns, pixels as channels.
local ty = require "tycho"
local base = require "tycho.nn.module"
local options = require "tycho.nn.options"

local define = base.define
local M = {}

--- x [n, c, w], [n, c, h, w] or [n, c, d, h, w] resized. options: size or scale, mode ("nearest"), align_corners,
-- antialias, as ty.interpolate takes them.
local Upsample = define "Upsample"
M.Upsample = Upsample

function Upsample:init(given)
  local o = options.read("Upsample", given,
    { size = options.none, scale = 0, mode = "nearest", align_corners = false, antialias = false },
    { size = "an integer >= 1 or a list of integers >= 1", scale = "a finite number >= 0" })
  self.size, self.scale, self.mode, self.align_corners = o.size or {}, o.scale, o.mode, o.align_corners
  self.antialias = o.antialias
end

function Upsample:forward(x)
  return ty.interpolate(x, self.size, self.scale, self.mode, self.align_corners, self.antialias)
end

function Upsample:describe()
  local size = type(self.size) == "table" and table.concat(self.size, "x") or tostring(self.size)
  return (size ~= "" and size or ("scale = %g"):format(self.scale)) .. ", " .. self.mode
end

local sides = { dilation = false, padding = false, stride = false }

local function read_windows(self, name, kernel, given)
  local o = options.read(name, given, { dilation = 1, padding = 0, stride = 1 }, sides)
  self.kernel_size = options.pair(name, "kernel", kernel, 1)
  self.dilation = options.pair(name, "dilation", o.dilation, 1)
  self.padding = options.pair(name, "padding", o.padding)
  self.stride = options.pair(name, "stride", o.stride, 1)
end

--- The windows of x [n, c, h, w] as columns [n, c*kh*kw, windows]. options: dilation, padding, stride.
local Unfold = define "Unfold"
M.Unfold = Unfold

function Unfold:init(kernel, given) read_windows(self, "Unfold", kernel, given) end
function Unfold:forward(x) return ty.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride) end
function Unfold:describe() return table.concat(self.kernel_size, "x") end

--- Columns [n, c*kh*kw, windows] summed up to images [n, c, h, w] of `size`: (size, kernel).
-- options: dilation, padding, stride.
local Fold = define "Fold"
M.Fold = Fold

function Fold:init(size, kernel, given)
  self.size = options.pair("Fold", "size", size, 1)
  read_windows(self, "Fold", kernel, given)
end
function Fold:forward(x) return ty.fold(x, self.size, self.kernel_size, self.dilation, self.padding, self.stride) end
function Fold:describe() return table.concat(self.size, "x") .. ", " .. table.concat(self.kernel_size, "x") end

local function shuffle(name, argument, op)
  local class = define(name)
  function class:init(count) self[argument] = options.positive(name, argument, count) end
  function class:forward(x) return op(x, self[argument]) end
  function class:describe() return tostring(self[argument]) end
  M[name] = class
end

--- x [..., c*factor^2, h, w] as [..., c, h*factor, w*factor].
shuffle("PixelShuffle", "factor", ty.pixel_shuffle)
--- x [..., c, h*factor, w*factor] as [..., c*factor^2, h, w].
shuffle("PixelUnshuffle", "factor", ty.pixel_unshuffle)
--- x [n, c, ...] with the channels of `groups` dealt out in turn.
shuffle("ChannelShuffle", "groups", ty.channel_shuffle)

return M
