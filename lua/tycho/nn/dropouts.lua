--- Dropout of whole channels, and dropout that keeps mean and variance.
local ty = require "tycho"
local base = require "tycho.nn.module"
local options = require "tycho.nn.options"

local M = {}

-- 1 / (1 - p) with probability 1 - p, else 0, of the shape of x with 1 in place of all dimensions from `first` on.
local function factors(x, p, first)
  local shape = x.shape
  for d = first + 1, #shape do shape[d] = 1 end
  return ty.dropout(ty.ones(shape, { dtype = x.dtype, device = x.device }), p, true)
end

local function define(name, low, high, layout, fn)
  local class = base.define(name)
  function class:init(p) self.p = options.expect(name, "p", p, "a number in [0, 1] or nil") or 0.5 end
  function class:forward(x)
    if not ty.is_tensor(x) or x.ndim < low or x.ndim > high then
      options.fail("%s: x: expected a tensor %s, got %s", name, layout, options.describe(x))
    end
    if not self.training or self.p == 0 then return x end
    return fn(x, self.p)
  end
  function class:describe() return ("%g"):format(self.p) end
  M[name] = class
end

local function whole(x, p) return x * factors(x, p, 2) end

--- Zeroes whole channels of x [n, channels, w] with probability p (0.5) in training and scales the rest. Tompson et al.
-- 2015.
define("Dropout1d", 2, 3, "[n, channels, w] or [n, channels]", whole)
--- Zeroes whole channels of x [n, channels, h, w].
define("Dropout2d", 4, 4, "[n, channels, h, w]", whole)
--- Zeroes whole channels of x [n, channels, d, h, w].
define("Dropout3d", 5, 5, "[n, channels, d, h, w]", whole)

-- The value of SELU far below 0, which what is dropped becomes.
local floor = -1.0507009873554805 * 1.6732632423543772

local function alpha(x, p, first)
  if p == 1 then return x * 0 end
  local kept = factors(x, p, first) * (1 - p)
  local scale = ((1 - p) * (1 + p * floor ^ 2)) ^ -0.5
  return (x * kept + (1 - kept) * floor) * scale - scale * floor * p
end

--- Dropout for SELU: what is dropped becomes SELU's least value, and mean 0 and variance 1 stay. Klambauer et al. 2017.
define("AlphaDropout", 0, 64, "of any shape", function(x, p) return alpha(x, p, x.ndim) end)
--- AlphaDropout of whole channels of x [n, channels, ...].
define("FeatureAlphaDropout", 2, 64, "[n, channels, ...]", function(x, p) return alpha(x, p, 2) end)

return M
