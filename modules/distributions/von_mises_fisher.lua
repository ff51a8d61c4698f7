--- Directions around a mean direction: the von Mises-Fisher distribution of unit vectors of any number of dimensions.
-- Mardia and Jupp 2000, "Directional Statistics", section 9.3. Its constant is made of log_bessel_i, so that thousands
-- of dimensions overflow nothing.
--
--     local vmf = distributions.VonMisesFisher.fit(directions)       -- directions [n, p], f32 or f64
--     print(vmf.concentration:item(), vmf:log_prob(directions))
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail

---@class VonMisesFisher
---@field mean Tensor           [p], of length 1
---@field concentration Tensor  a number above 0, f64: the larger, the nearer to the mean
local VonMisesFisher = {}
VonMisesFisher.__index = VonMisesFisher
VonMisesFisher.__name = "VonMisesFisher"

-- log_bessel_i of order v at kappa.
local function log_i(v, kappa) return ty.full_like(kappa, v):log_bessel_i(kappa) end

--- options: mean ([p], not 0; its length does not matter), concentration (a number above 0, or a tensor of one, which
-- may require a gradient).
---@param options { mean: Tensor, concentration: number|Tensor }
---@return VonMisesFisher
local function new(options)
  local o = arguments.read("VonMisesFisher", options, { mean = arguments.none, concentration = arguments.none })
  local mean = o.mean
  if not ty.is_tensor(mean) or mean.ndim ~= 1 or mean.shape[1] < 2 or not mean:is_floating_point() then
    fail("VonMisesFisher: mean: expected floats [p], p >= 2, got %s", arguments.describe(mean))
  end
  local length = mean:to("f64"):norm()
  if not (length:item() > 0 and length:item() < math.huge) then
    fail("VonMisesFisher: mean: expected a direction, got one of length %g", length:item())
  end
  local kappa = o.concentration
  if type(kappa) == "number" then kappa = ty.tensor(kappa, { dtype = "f64", device = mean.device }) end
  if not ty.is_tensor(kappa) or kappa:numel() ~= 1 or not (kappa:item() > 0 and kappa:item() < math.huge) then
    fail("VonMisesFisher: concentration: expected a number above 0, got %s",
      ty.is_tensor(kappa) and kappa:numel() == 1 and ("%g"):format(kappa:item()) or arguments.describe(o.concentration))
  end
  return setmetatable({ mean = ty.keep((mean:to("f64") / length):to(mean.dtype)),
    concentration = ty.keep(kappa:flatten():select(0, 0):to "f64") }, VonMisesFisher)
end

--- The logarithm of the constant that makes the density one: kappa^(p/2 - 1) / ((2 pi)^(p/2) I_(p/2 - 1)(kappa)), f64.
---@return Tensor
function VonMisesFisher:log_constant()
  local half, kappa = self.mean.shape[1] / 2, self.concentration
  return kappa:log() * (half - 1) - half * math.log(2 * math.pi) - log_i(half - 1, kappa)
end

local function directions(who, x, p)
  if not ty.is_tensor(x) or x.ndim ~= 2 or not x:is_floating_point() or p and x.shape[2] ~= p then
    fail("%s: x: expected floats [n, %s], got %s", who, p or "p", arguments.describe(x))
  end
  return x
end

--- The logarithm of the density, with respect to the sphere's area, at each of n unit vectors: f64 [n].
---@param x Tensor  [n, p]
---@return Tensor
function VonMisesFisher:log_prob(x)
  directions("VonMisesFisher:log_prob", x, self.mean.shape[1])
  return x:matmul(self.mean:to(x.dtype)):to "f64" * self.concentration + self:log_constant()
end

--- The expected length of the mean of samples, the ratio I_(p/2) / I_(p/2 - 1) at kappa: f64.
---@return Tensor
function VonMisesFisher:mean_length()
  local half = self.mean.shape[1] / 2
  return (log_i(half, self.concentration) - log_i(half - 1, self.concentration)):exp()
end

-- Cosines to the mean of n samples. Wood 1994, "Simulation of the von Mises Fisher distribution": proposals made of
-- Beta((p - 1) / 2, (p - 1) / 2), here a quotient of sums of squares, are rejected where they are too frequent.
local function cosines(n, p, kappa, device)
  local m, found = p - 1, {}
  -- (sqrt(4 kappa^2 + m^2) - 2 kappa) / m without the difference of what is nearly equal
  local b = m / (2 * kappa + math.sqrt(4 * kappa ^ 2 + m ^ 2))
  local x0 = (1 - b) / (1 + b)
  local c = kappa * x0 + m * math.log(1 - x0 ^ 2)
  local left = n
  local function squares(count)
    local sums = {}
    -- A few rows at a time: high dimensions take much room.
    local rows = math.max(1, (1 << 22) // m)
    for first = 0, count - 1, rows do
      sums[#sums + 1] = ty.scope(function()
        return ty.randn({ math.min(rows, count - first), m }, { dtype = "f64", device = device }):square():sum(1)
      end)
    end
    return ty.concat(sums, 0)
  end
  while left > 0 do
    local s, t = squares(left), squares(left)
    local z = s / (s + t)
    local w = (1 - z * (1 + b)) / (1 - z * (1 - b))
    local u = ty.rand({ left }, { dtype = "f64", device = device })
    local fits = (w * kappa + (1 - w * x0):log() * m - c):ge(u:log())
    local kept = w:masked_select(fits)
    found[#found + 1] = kept
    left = left - kept:numel()
  end
  return ty.concat(found, 0)
end

--- n samples: unit vectors [n, p] of the mean's dtype.
---@param n integer
---@return Tensor
function VonMisesFisher:sample(n)
  expect("VonMisesFisher:sample", "n", n, "an integer > 0")
  return ty.no_grad(ty.scope, function()
    local p, device = self.mean.shape[1], self.mean.device
    local w = cosines(n, p, self.concentration:item(), device):to(self.mean.dtype):unsqueeze(1)
    -- A direction across the mean.
    local v = ty.randn({ n, p }, { dtype = self.mean.dtype, device = device })
    v = ty.nn.normalize(v - v:matmul(self.mean):unsqueeze(1) * self.mean)
    return w * self.mean + (1 - w:square()):clamp(0):sqrt() * v
  end)
end

--- The distribution under which n unit vectors are likeliest. Its mean is theirs; the concentration solves
-- I_(p/2) / I_(p/2 - 1) = the length of their mean, by Newton's method from the approximation of Banerjee et al. 2005.
-- options: weights ([n], >= 0: how much each counts), steps (50: at most), tolerance (1e-12: of a step, relative).
---@param x Tensor  [n, p]
---@param options? { weights?: Tensor, steps?: integer, tolerance?: number }
---@return VonMisesFisher
function VonMisesFisher.fit(x, options)
  local who = "VonMisesFisher.fit"
  directions(who, x)
  local o = arguments.read(who, options, { weights = arguments.none, steps = 50, tolerance = 1e-12 },
    { steps = "an integer >= 0", tolerance = "a finite number > 0" })
  local n, p = x.shape[1], x.shape[2]
  if n == 0 or p < 2 then
    fail("%s: x: expected at least one vector of at least 2 numbers, got %s", who, arguments.describe(x))
  end
  local weights = o.weights
  if weights ~= nil and not (ty.is_tensor(weights) and weights.ndim == 1 and weights.shape[1] == n
    and weights:min():item() >= 0 and weights:sum():item() > 0) then
    fail("%s: weights: expected [%d], none below 0 and not all 0, got %s", who, n, arguments.describe(weights))
  end
  return ty.no_grad(ty.scope, function()
    local sum
    if weights then
      weights = weights:to "f64" / weights:to("f64"):sum()
      sum = weights:to(x.dtype):matmul(x)
    else
      sum = x:mean(0)
    end
    sum = sum:to "f64"
    local r = sum:norm():item()
    -- Lengths of f32 and narrower vectors are 1 but for rounding.
    if r ~= r or r >= 1 - (x.dtype == "f64" and 0 or 2.5e-7) then
      fail("%s: x: expected unit vectors that are not all the same, got a mean of length %.17g", who, r)
    end
    if r == 0 then fail("%s: x: expected vectors with a mean other than 0, got one of length 0", who) end
    local kappa, last = r * (p - r ^ 2) / (1 - r ^ 2), math.huge
    for _ = 1, o.steps do
      local a = new { mean = sum, concentration = kappa }:mean_length():item()
      local slope = 1 - a * a - (p - 1) / kappa * a
      local step = (a - r) / slope
      local next_one = kappa - step
      if next_one <= 0 then next_one = kappa / 2 end
      local moved = math.abs(next_one - kappa)
      -- Steps that no longer become shorter are those of rounding.
      if moved >= last and moved < 1e-6 * kappa then break end
      kappa, last = next_one, moved
      if moved <= o.tolerance * kappa then break end
    end
    return new { mean = sum:to(x.dtype), concentration = kappa }
  end)
end

return setmetatable(VonMisesFisher, { __call = function(_, options) return new(options) end })
