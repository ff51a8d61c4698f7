--- Methods of tensors that write into the tensor: random numbers of distributions, and in-place twins of functions that
-- are made of several ops. Twins of ops are the table's own (src/ops/ops.def).
local core = require "tycho.core"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local methods = {}

local function tensor(who, x, name) return expect(who, name or "x", x, "a tensor") end

-- ---- random numbers ----

local function floats(who, x)
  if not tensor(who, x):is_floating_point() then fail("%s: x: expected a float tensor, got %s", who, x.dtype) end
  return x
end

-- Uniform in (0, 1], of which the logarithm is finite.
local function uniform(x) return 1 - core.rand_like(x) end

--- Each element becomes 1 with probability p, else 0.
---@param p? number|Tensor  default 0.5; a tensor broadcasts to x
---@return Tensor x
function methods.bernoulli_(x, p)
  tensor("bernoulli_", x)
  if p == nil then p = 0.5 end
  expect("bernoulli_", "p", p, "a tensor or a number")
  if type(p) == "number" and not (p >= 0 and p <= 1) then
    fail("bernoulli_: p: expected a probability in [0, 1], got %s", p)
  end
  return core.no_grad(function()
    local draw = core.rand(x.shape, { device = x.device })
    return x:copy_(draw:lt(p))
  end)
end

--- Fills x with draws of the exponential distribution: density rate exp(-rate x).
---@param rate? number  default 1
---@return Tensor x
function methods.exponential_(x, rate)
  floats("exponential_", x)
  expect("exponential_", "rate", rate, "a number > 0 or nil")
  return core.no_grad(function() return x:copy_(uniform(x):log() / -(rate or 1)) end)
end

--- Fills x with draws of the Cauchy distribution.
---@param median? number  default 0
---@param sigma? number  half the width at half the height; default 1
---@return Tensor x
function methods.cauchy_(x, median, sigma)
  floats("cauchy_", x)
  expect("cauchy_", "median", median, "a number or nil")
  expect("cauchy_", "sigma", sigma, "a number > 0 or nil")
  return core.no_grad(function()
    return x:copy_(((core.rand_like(x) - 0.5) * math.pi):tan() * (sigma or 1) + (median or 0))
  end)
end

--- Fills x with numbers whose logarithms are normal.
---@param mean? number  of the logarithms; default 1, as in PyTorch
---@param std? number  of the logarithms; default 2, as in PyTorch
---@return Tensor x
function methods.log_normal_(x, mean, std)
  floats("log_normal_", x)
  expect("log_normal_", "mean", mean, "a number or nil")
  expect("log_normal_", "std", std, "a number >= 0 or nil")
  return core.no_grad(function() return x:copy_((core.randn_like(x) * (std or 2) + (mean or 1)):exp()) end)
end

--- Fills x with the number of trials up to the first success: 1, 2, 3 ...
---@param p number  of success, in (0, 1)
---@return Tensor x
function methods.geometric_(x, p)
  tensor("geometric_", x)
  expect("geometric_", "p", p, "a number > 0")
  if p >= 1 then fail("geometric_: p: expected a probability below 1, got %s", p) end
  return core.no_grad(function()
    local draw = uniform(core.empty(x.shape, { device = x.device }))
    return x:copy_((draw:log() / math.log(1 - p)):floor() + 1)
  end)
end

--- Fills x with integers in [low, high): all that the dtype holds exactly when nothing is said.
---@param low? integer  where high is left out, what is given is high and low is 0
---@param high? integer
---@return Tensor x
function methods.random_(x, low, high)
  tensor("random_", x)
  expect("random_", "low", low, "an integer or nil")
  expect("random_", "high", high, "an integer or nil")
  if low and not high then low, high = 0, low end
  local most = { f64 = 1 << 53, f32 = 1 << 24, f16 = 1 << 11, bf16 = 1 << 8, i64 = math.maxinteger, i32 = 1 << 31,
    i16 = 1 << 15, i8 = 1 << 7, u8 = 1 << 8, bool = 2 }
  low, high = low or 0, high or most[x.dtype]
  if low >= high then fail("random_: high: expected an integer above low %d, got %d", low, high) end
  if x.dtype == "bool" then
    return core.no_grad(function() return x:copy_(core.randint(low, high, x.shape, { device = x.device })) end)
  end
  return x:randint_(low, high)
end

-- ---- twins ----

--- The values of a diagonal of a matrix, of one of equal sizes in more dimensions of the main one.
---@param value number
---@return Tensor x
function methods.fill_diagonal_(x, value)
  local n = tensor("fill_diagonal_", x).ndim
  expect("fill_diagonal_", "value", value, "a number")
  if n < 2 then fail("fill_diagonal_: x: expected at least 2 dimensions, got %d", n) end
  local index, least = {}, x:size(0)
  for d = 0, n - 1 do
    if n > 2 and x:size(d) ~= x:size(0) then
      fail("fill_diagonal_: x: expected equal sizes in more than 2 dimensions, got [%s]", table.concat(x.shape, ", "))
    end
    least = math.min(least, x:size(d))
  end
  local at = core.arange(least, { device = x.device })
  for d = 1, n do index[d] = at end
  return x:index_put_(index, value)
end

for name in ([[
  eq ne lt le gt ge greater greater_equal less less_equal not_equal logical_and logical_or logical_xor logical_not
  atan2 arctan2 hypot copysign xlogy tril triu cumsum cumprod renorm addmm addbmm baddbmm addmv addr scatter_add
  scatter_reduce index_add clamp_min clamp_max ldexp float_power gcd lcm negative absolute floor_divide true_divide
  deg2rad rad2deg arccos arcsin arctan arccosh arcsinh arctanh sgn fix mvlgamma
]]):gmatch "%S+" do
  --- In-place twin of the function of that name: its result is written into the tensor, in the tensor's dtype.
  ---@return Tensor x
  methods[name .. "_"] = function(x, ...)
    tensor(name .. "_", x)
    local y = x[name](x, ...)
    local same = y.ndim == x.ndim
    for d = 0, x.ndim - 1 do same = same and y:size(d) == x:size(d) end
    if not same then
      fail("%s_: x: expected the shape of the result [%s], got [%s]", name, table.concat(y.shape, ", "),
        table.concat(x.shape, ", "))
    end
    return x:copy_(y)
  end
end

return { functions = {}, methods = methods, others = {} }
