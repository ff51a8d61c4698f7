--- Further activations, as functions (nn.hardswish) and as modules (nn.Hardswish); those of nn.activations are ops.
local ty = require "tycho"
local base = require "tycho.nn.module"
local options = require "tycho.nn.options"

local expect = options.expect
local M = {}

local all = {} -- by name of the function: it and its numbers

-- fn(x, numbers...) with checks of its numbers: a name, default and kind of each, in their order.
local function define(name, fn, numbers)
  numbers = numbers or {}
  all[name] = { fn = fn, numbers = numbers }
  return function(x, ...)
    expect(name, "x", x, "a tensor")
    local values = { ... }
    for i, number in ipairs(numbers) do
      if values[i] == nil then values[i] = number[2] end
      expect(name, number[1], values[i], number[3] or "a finite number")
    end
    return fn(x, table.unpack(values, 1, #numbers))
  end
end

-- The function as a module that has the numbers.
local function module(name, short)
  local class, fn, numbers = base.define(name), all[short].fn, all[short].numbers
  function class:init(...)
    local values = { ... }
    for i, number in ipairs(numbers) do
      local value = values[i]
      if value == nil then value = number[2] end
      self[number[1]] = expect(name, number[1], value, number[3] or "a finite number")
    end
  end
  function class:forward(x)
    local values = {}
    for i, number in ipairs(numbers) do values[i] = self[number[1]] end
    return fn(expect(name, "x", x, "a tensor"), table.unpack(values, 1, #numbers))
  end
  function class:describe()
    local text = {}
    for i, number in ipairs(numbers) do text[i] = ("%g"):format(self[number[1]]) end
    return table.concat(text, ", ")
  end
  M[name] = class
end

--- Scaled elu, whose outputs keep mean 0 and variance 1. Klambauer et al. 2017.
M.selu = define("selu", function(x)
  return ty.elu(x, 1.6732632423543772) * 1.0507009873554805
end)
--- nn.selu as a module.
module("SELU", "selu")

--- x where positive, alpha (exp(x / alpha) - 1) elsewhere. Barron 2017.
M.celu = define("celu", function(x, alpha)
  return alpha == 1 and ty.elu(x, 1) or ty.elu(x * (1 / alpha), 1) * alpha
end, { { "alpha", 1, "a finite number > 0" } })
--- nn.celu as a module.
module("CELU", "celu")

--- x / 6 + 1 / 2 cut to [0, 1].
M.hardsigmoid = define("hardsigmoid", function(x) return ty.hardtanh(x * (1 / 6) + 0.5, 0, 1) end)
--- nn.hardsigmoid as a module.
module("Hardsigmoid", "hardsigmoid")

--- x times hardsigmoid(x). Howard et al. 2019.
M.hardswish = define("hardswish", function(x) return x * ty.hardtanh(x * (1 / 6) + 0.5, 0, 1) end)
--- nn.hardswish as a module.
module("Hardswish", "hardswish")

--- x cut to [min, max].
M.hardtanh = define("hardtanh", ty.hardtanh, { { "min", -1 }, { "max", 1 } })
--- nn.hardtanh as a module.
module("Hardtanh", "hardtanh")

--- x cut to [0, 6].
M.relu6 = define("relu6", function(x) return ty.hardtanh(x, 0, 6) end)
--- nn.relu6 as a module.
module("ReLU6", "relu6")

--- x / (1 + |x|).
M.softsign = define("softsign", function(x) return x / (x:abs() + 1) end)
--- nn.softsign as a module.
module("Softsign", "softsign")

--- x moved towards 0 by lambda, 0 where it would cross.
M.softshrink = define("softshrink", function(x, lambda) return x - x:clamp(-lambda, lambda) end,
  { { "lambda", 0.5, "a finite number >= 0" } })
--- nn.softshrink as a module.
module("Softshrink", "softshrink")

--- x where it is more than lambda away from 0, else 0.
M.hardshrink = define("hardshrink", function(x, lambda) return ty.where(x:abs():gt(lambda), x, 0.0) end,
  { { "lambda", 0.5, "a finite number >= 0" } })
--- nn.hardshrink as a module.
module("Hardshrink", "hardshrink")

--- x - tanh(x).
M.tanhshrink = define("tanhshrink", function(x) return x - x:tanh() end)
--- nn.tanhshrink as a module.
module("Tanhshrink", "tanhshrink")

--- x where it is above the threshold, else value.
M.threshold = define("threshold", function(x, limit, value) return ty.where(x:gt(limit), x, value) end,
  { { "threshold", 0 }, { "value", 0 } })
--- nn.threshold as a module.
module("Threshold", "threshold")

--- softmax(-x) along a dimension.
M.softmin = define("softmin", function(x, dim) return ty.softmax(-x, dim) end, { { "dim", -1, "an integer" } })
--- nn.softmin as a module.
module("Softmin", "softmin")

--- x where positive, elsewhere x times a slope drawn in [lower, upper] for each element; the mean slope when not
-- training. Xu et al. 2015.
function M.rrelu(x, lower, upper, training)
  expect("rrelu", "x", x, "a tensor")
  lower = expect("rrelu", "lower", lower, "a finite number or nil") or 1 / 8
  upper = expect("rrelu", "upper", upper, "a finite number or nil") or 1 / 3
  if lower > upper then options.fail("rrelu: lower: expected at most upper %g, got %g", upper, lower) end
  if not expect("rrelu", "training", training, "a boolean or nil") then
    return ty.leaky_relu(x, (lower + upper) / 2)
  end
  local slope = ty.uniform_(ty.empty_like(x:detach()), lower, upper)
  return ty.where(x:ge(0), x, x * slope)
end

--- nn.rrelu as a module. lower (1/8), upper (1/3).
local RReLU = base.define "RReLU"
M.RReLU = RReLU

function RReLU:init(lower, upper)
  self.lower = expect("RReLU", "lower", lower, "a finite number or nil") or 1 / 8
  self.upper = expect("RReLU", "upper", upper, "a finite number or nil") or 1 / 3
  if self.lower > self.upper then
    options.fail("RReLU: lower: expected at most upper %g, got %g", self.upper, self.lower)
  end
end

function RReLU:forward(x) return M.rrelu(x, self.lower, self.upper, self.training) end

function RReLU:describe() return ("%g, %g"):format(self.lower, self.upper) end

--- x where positive, elsewhere weight x; weight [1], or one for each channel of x [n, channels, ...].
function M.prelu(x, weight)
  expect("prelu", "x", x, "a tensor")
  expect("prelu", "weight", weight, "a tensor")
  local channels = x.ndim > 1 and x:size(1) or 1
  if weight:numel() ~= 1 and weight:numel() ~= channels then
    options.fail("prelu: weight: expected 1 or %d numbers for x [%s], got %d", channels, table.concat(x.shape, ", "),
      weight:numel())
  end
  local shape = { weight:numel() }
  for d = 2, x.ndim - 1 do shape[d] = 1 end
  return x:relu() - weight:reshape(shape) * (-x):relu()
end

--- nn.prelu with a learned weight: count (1, or the number of channels), start (0.25). He et al. 2015.
local PReLU = base.define "PReLU"
M.PReLU = PReLU

function PReLU:init(count, start)
  count = math.tointeger(expect("PReLU", "count", count, "an integer >= 1 or nil") or 1)
  start = expect("PReLU", "start", start, "a finite number or nil") or 0.25
  self.weight = options.parameter({ count }, function(t)
    ty.no_grad(function() t:fill_(start) end)
  end)
end

function PReLU:forward(x) return M.prelu(x, self.weight) end

function PReLU:describe() return ("%d"):format(self.weight:numel()) end

--- One half of x along dim times the sigmoid of the other. Dauphin et al. 2017.
local GLU = base.define "GLU"
M.GLU = GLU

function GLU:init(dim) self.dim = expect("GLU", "dim", dim, "an integer or nil") or -1 end

function GLU:forward(x)
  expect("GLU", "x", x, "a tensor")
  if self.dim == -1 or self.dim == x.ndim - 1 then return ty.glu(x) end
  return ty.glu(x:transpose(self.dim, -1)):transpose(self.dim, -1)
end

function GLU:describe() return ("%d"):format(self.dim) end

return M
