--- Pools as modules; the functions themselves are ops.
local ty = require "tycho"
local base = require "tycho.nn.module"
local options = require "tycho.nn.options"

local define = base.define
local M = {}

-- options.each() and the ops check sizes.
local size_kinds = { stride = false, padding = false, dilation = false, divisor = "an integer >= 1" }

local function text_of(list)
  for i = 2, #list do
    if list[i] ~= list[1] then return table.concat(list, "x") end
  end
  return tostring(list[1])
end

-- A pool over n dimensions with the options of `defaults`; fn(self, x).
local function pool(name, n, defaults, fn)
  local class = define(name)
  function class:init(kernel, given)
    local o = options.read(name, given, defaults, size_kinds)
    for key, value in pairs(o) do self[key] = value end
    self.kernel_size = options.each(name, "kernel", kernel, n, 1)
    self.stride = options.each(name, "stride", o.stride or self.kernel_size, n, 1)
    self.padding = options.each(name, "padding", o.padding or 0, n)
    if o.dilation then self.dilation = options.each(name, "dilation", o.dilation, n, 1) end
  end
  class.forward = fn
  function class:describe()
    local text = table.concat(self.kernel_size, "x")
    if table.concat(self.stride, "x") ~= text then text = text .. ", stride = " .. text_of(self.stride) end
    if text_of(self.padding) ~= "0" then text = text .. ", padding = " .. text_of(self.padding) end
    return text
  end
  M[name] = class
end

local function largest(op)
  return function(self, x)
    local y, position = op(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)
    if self.return_indices then return y, position end
    return y
  end
end
local max_defaults = { stride = options.none, padding = 0, dilation = 1, ceil_mode = false, return_indices = false }

local function mean(op)
  return function(self, x)
    return op(x, self.kernel_size, self.stride, self.padding, self.count_include_pad, self.ceil_mode, self.divisor)
  end
end
local avg_defaults = { stride = options.none, padding = 0, count_include_pad = true, ceil_mode = false,
  divisor = options.none }

--- Largest value of each window of x [n, c, w].
-- options: stride (the kernel), padding, dilation, ceil_mode, return_indices (false): a second result, the positions
-- that MaxUnpool1d takes.
pool("MaxPool1d", 1, max_defaults, largest(ty.max_pool1d))
--- Largest value of each window of x [n, c, h, w].
-- options: stride (the kernel), padding, dilation, ceil_mode, return_indices (false): a second result, the positions
-- that MaxUnpool2d takes.
pool("MaxPool2d", 2, max_defaults, largest(ty.max_pool2d))
--- Largest value of each window of x [n, c, d, h, w].
-- options: stride (the kernel), padding, dilation, ceil_mode, return_indices (false): a second result, the positions
-- that MaxUnpool3d takes.
pool("MaxPool3d", 3, max_defaults, largest(ty.max_pool3d))

--- Mean of each window of x [n, c, w].
-- options: stride (the kernel), padding, count_include_pad (true), ceil_mode, divisor: of the sums, in place of how
-- many positions a window has.
pool("AvgPool1d", 1, avg_defaults, mean(ty.avg_pool1d))
--- Mean of each window of x [n, c, h, w].
-- options: stride (the kernel), padding, count_include_pad (true), ceil_mode, divisor: of the sums, in place of how
-- many positions a window has.
pool("AvgPool2d", 2, avg_defaults, mean(ty.avg_pool2d))
--- Mean of each window of x [n, c, d, h, w].
-- options: stride (the kernel), padding, count_include_pad (true), ceil_mode, divisor: of the sums, in place of how
-- many positions a window has.
pool("AvgPool3d", 3, avg_defaults, mean(ty.avg_pool3d))

local function unpool(name, n, op)
  pool(name, n, { stride = options.none, padding = 0 }, function(self, x, position, size)
    return op(x, position, self.kernel_size, self.stride, self.padding, size or {})
  end)
end

--- Zeros with x [n, c, w] at the positions that MaxPool1d gave: (x, position, size?).
-- options: stride, padding.
unpool("MaxUnpool1d", 1, ty.max_unpool1d)
--- Zeros with x [n, c, h, w] at the positions that MaxPool2d gave: (x, position, size?).
-- options: stride, padding.
unpool("MaxUnpool2d", 2, ty.max_unpool2d)
--- Zeros with x [n, c, d, h, w] at the positions that MaxPool3d gave: (x, position, size?).
-- options: stride, padding.
unpool("MaxUnpool3d", 3, ty.max_unpool3d)

local function norm(name, n, op)
  local class = define(name)
  function class:init(p, kernel, given)
    local o = options.read(name, given, { stride = options.none, ceil_mode = false }, size_kinds)
    self.p = options.expect(name, "p", p, "a finite number > 0")
    self.kernel_size = options.each(name, "kernel", kernel, n, 1)
    self.stride = options.each(name, "stride", o.stride or self.kernel_size, n, 1)
    self.ceil_mode = o.ceil_mode
  end
  function class:forward(x) return op(x, self.p, self.kernel_size, self.stride, self.ceil_mode) end
  function class:describe() return ("%g, %s"):format(self.p, table.concat(self.kernel_size, "x")) end
  M[name] = class
end

--- (sum of x^p)^(1/p) of each window of x [n, c, w]: (p, kernel). options: stride (the kernel), ceil_mode.
norm("LPPool1d", 1, ty.lp_pool1d)
--- (sum of x^p)^(1/p) of each window of x [n, c, h, w]: (p, kernel). options: stride (the kernel), ceil_mode.
norm("LPPool2d", 2, ty.lp_pool2d)
--- (sum of x^p)^(1/p) of each window of x [n, c, d, h, w]: (p, kernel). options: stride (the kernel), ceil_mode.
norm("LPPool3d", 3, ty.lp_pool3d)

local function adaptive(name, n, op)
  local class = define(name)
  function class:init(size) self.size = options.each(name, "size", size, n, 1) end
  function class:forward(x) return (op(x, self.size)) end
  function class:describe() return table.concat(self.size, "x") end
  M[name] = class
end

--- Means of the parts that make x [n, c, w] one of `size` (a number).
adaptive("AdaptiveAvgPool1d", 1, ty.adaptive_avg_pool1d)
--- Largest values of the parts that make x [n, c, w] one of `size` (a number).
adaptive("AdaptiveMaxPool1d", 1, ty.adaptive_max_pool1d)
--- Means of the parts that make x [n, c, h, w] one of `size` (a number or a pair).
adaptive("AdaptiveAvgPool2d", 2, ty.adaptive_avg_pool2d)
--- Largest values of the parts that make x [n, c, h, w] one of `size` (a number or a pair).
adaptive("AdaptiveMaxPool2d", 2, ty.adaptive_max_pool2d)
--- Means of the parts that make x [n, c, d, h, w] one of `size` (a number or a list of three).
adaptive("AdaptiveAvgPool3d", 3, ty.adaptive_avg_pool3d)
--- Largest values of the parts that make x [n, c, d, h, w] one of `size` (a number or a list of three).
adaptive("AdaptiveMaxPool3d", 3, ty.adaptive_max_pool3d)

return M
