--- Activations and pools as modules; the functions themselves are ops.
local ty = require "tycho"
local base = require "tycho.nn.module"
local options = require "tycho.nn.options"

local define, expect = base.define, options.expect
local M = {}

local function simple(name, fn)
  local class = define(name)
  function class:forward(x) return fn(x) end
  M[name] = class
end

--- max(x, 0).
simple("ReLU", ty.relu)
--- x * sigmoid(x), also called swish.
simple("SiLU", ty.silu)
--- 1 / (1 + exp(-x)).
simple("Sigmoid", ty.sigmoid)
--- The hyperbolic tangent.
simple("Tanh", ty.tanh)
--- x * tanh(log(1 + exp(x))). Misra 2019.
simple("Mish", ty.mish)
--- log(1 + exp(x)).
simple("Softplus", ty.softplus)
--- log(1 / (1 + exp(-x))).
simple("LogSigmoid", ty.log_sigmoid)

--- x * Phi(x); approximate = "tanh" for GPT-2's form. nn.GELU "tanh" or nn.GELU { approximate = "tanh" }.
local GELU = define "GELU"
M.GELU = GELU

function GELU:init(given)
  if type(given) == "string" then given = { approximate = given } end
  local kinds = { approximate = '"none" or "tanh"' }
  self.approximate = options.read("GELU", given, { approximate = "none" }, kinds).approximate
end

function GELU:forward(x) return ty.gelu(x, self.approximate) end

function GELU:describe() return self.approximate == "none" and "" or self.approximate end

--- x where it is positive, elsewhere slope (0.01) times x.
local LeakyReLU = define "LeakyReLU"
M.LeakyReLU = LeakyReLU

function LeakyReLU:init(slope) self.slope = expect("LeakyReLU", "slope", slope, "a number or nil") or 0.01 end

function LeakyReLU:forward(x) return ty.leaky_relu(x, self.slope) end

--- x where it is positive, elsewhere alpha (1) * (exp(x) - 1). Clevert et al. 2015.
local ELU = define "ELU"
M.ELU = ELU

function ELU:init(alpha) self.alpha = expect("ELU", "alpha", alpha, "a number or nil") or 1 end

function ELU:forward(x) return ty.elu(x, self.alpha) end

local function over_dim(name, fn)
  local class = define(name)
  function class:init(dim) self.dim = expect(name, "dim", dim, "an integer or nil") or -1 end
  function class:forward(x) return fn(x, self.dim) end
  M[name] = class
end

--- exp(x) / sum(exp(x)) along dimension dim (-1).
over_dim("Softmax", ty.softmax)
--- log(softmax(x)) along dimension dim (-1).
over_dim("LogSoftmax", ty.log_softmax)

local size_kinds = { stride = false, padding = false, dilation = false } -- pair() and the op check them

local function pool(name, defaults, fn)
  local class = define(name)
  function class:init(kernel, given)
    local o = options.read(name, given, defaults, size_kinds)
    self.kernel_size = options.pair(name, "kernel", kernel, 1)
    for key, value in pairs(o) do self[key] = value end
    self.stride = options.pair(name, "stride", o.stride or self.kernel_size, 1)
    self.padding = options.pair(name, "padding", o.padding)
    if o.dilation then self.dilation = options.pair(name, "dilation", o.dilation, 1) end
  end
  class.forward = fn
  function class:describe() return table.concat(self.kernel_size, "x") end
  M[name] = class
end

--- Largest value of each window of x [n, c, h, w]. options: stride (the kernel), padding, dilation.
pool("MaxPool2d", { stride = options.none, padding = 0, dilation = 1 }, function(self, x)
  return (ty.max_pool2d(x, self.kernel_size, self.stride, self.padding, self.dilation))
end)

--- Mean of each window of x [n, c, h, w]. options: stride (the kernel), padding, count_include_pad.
pool("AvgPool2d", { stride = options.none, padding = 0, count_include_pad = true }, function(self, x)
  return ty.avg_pool2d(x, self.kernel_size, self.stride, self.padding, self.count_include_pad)
end)

local function adaptive(name, fn)
  local class = define(name)
  function class:init(size) self.size = options.pair(name, "size", size, 1) end
  function class:forward(x) return (fn(x, self.size)) end
  function class:describe() return table.concat(self.size, "x") end
  M[name] = class
end

--- Means of the parts that make x [n, c, h, w] one of `size` (a number or a pair).
adaptive("AdaptiveAvgPool2d", ty.adaptive_avg_pool2d)
--- Largest values of the parts that make x [n, c, h, w] one of `size` (a number or a pair).
adaptive("AdaptiveMaxPool2d", ty.adaptive_max_pool2d)

--- x [n, c, h, w] resized to `size` or by `scale`; mode "nearest" or "bilinear".
local Upsample = define "Upsample"
M.Upsample = Upsample

function Upsample:init(given)
  local o = options.read("Upsample", given, { size = options.none, scale = 0, mode = "nearest", align_corners = false },
    { size = "an integer >= 1 or a pair of integers >= 1", scale = "a finite number >= 0" })
  self.size, self.scale, self.mode, self.align_corners = o.size or {}, o.scale, o.mode, o.align_corners
end

function Upsample:forward(x) return ty.interpolate(x, self.size, self.scale, self.mode, self.align_corners) end

return M
