--- Initialisers: nn.init.*. Each fills a tensor in place, outside the graph, and returns it.
-- fan_in is the number of inputs that one output sees: weight [out, in, ...kernel].
local ty = require "tycho"
local arguments = require "tycho.arguments"

local init = {}

local expect = arguments.expect
local number, spread = "a number or nil", "a finite number >= 0 or nil"

-- An initialiser: fn(t, ...) fills t. `kinds`: of the further arguments, in pairs of a name and a kind.
local function fill(name, kinds, fn)
  local who = "init." .. name
  return function(t, ...)
    expect(who, "t", t, "a tensor")
    for i = 1, #kinds, 2 do expect(who, kinds[i], (select((i + 1) // 2, ...)), kinds[i + 1]) end
    ty.no_grad(fn, t, ...)
    return t
  end
end

local function fans_of(who, t)
  local shape = expect(who, "t", t, "a tensor").shape
  if #shape < 2 then
    arguments.fail("%s: t: expected a weight of two or more dimensions, got %s", who, arguments.describe(t))
  end
  local field = 1
  for i = 3, #shape do field = field * shape[i] end
  return shape[2] * field, shape[1] * field
end

--- fan_in and fan_out of a weight [out, in, ...kernel].
function init.fans(t) return fans_of("init.fans", t) end

local gains = { linear = 1, conv = 1, sigmoid = 1, tanh = 5 / 3, relu = math.sqrt(2), selu = 3 / 4 }

--- The gain that keeps variances through an activation: linear, sigmoid, tanh, relu, leaky_relu (with its slope), selu.
function init.gain(name, slope)
  if name == "leaky_relu" then
    return math.sqrt(2 / (1 + (expect("init.gain", "slope", slope, number) or 0.01) ^ 2))
  end
  return gains[name] or expect("init.gain", "name", name, '"linear" or "conv" or "sigmoid" or "tanh" or "relu" or '
    .. '"leaky_relu" or "selu"')
end

--- Zeros.
init.zeros = fill("zeros", {}, function(t) t:fill_(0) end)
--- Ones.
init.ones = fill("ones", {}, function(t) t:fill_(1) end)
--- The same value everywhere: init.constant(t, value).
init.constant = fill("constant", { "value", "a number" }, function(t, value) t:fill_(value) end)
--- Uniform numbers: init.uniform(t, low (0), high (1)).
init.uniform = fill("uniform", { "low", number, "high", number }, function(t, low, high)
  t:uniform_(low or 0, high or 1)
end)
--- Normal numbers: init.normal(t, mean (0), std (1)).
init.normal = fill("normal", { "mean", number, "std", spread }, function(t, mean, std)
  t:normal_(mean or 0, std or 1)
end)

local truncated = { "mean", number, "std", spread, "low", number, "high", number }

--- Normal numbers cut to [low, high] (default two standard deviations), drawn by inverting the distribution function.
init.trunc_normal = fill("trunc_normal", truncated, function(t, mean, std, low, high)
  mean, std = mean or 0, std or 1
  low, high = low or mean - 2 * std, high or mean + 2 * std
  -- Values outside are drawn again; at two deviations one in 22 is, so a few rounds are enough.
  t:normal_(mean, std)
  for _ = 1, 64 do
    local outside = ty.logical_or(t:lt(low), t:gt(high))
    if not outside:any():item() then return end
    t:copy_(ty.where(outside, ty.randn_like(t) * std + mean, t))
  end
  t:clamp_(low, high)
end)

local kaiming_kinds = { mode = '"fan_in" or "fan_out"' }

-- The gain and the fan that He's initialisers go by.
local function kaiming(who, t, options)
  local o = arguments.read(who, options, { a = 0, mode = "fan_in", nonlinearity = "leaky_relu" }, kaiming_kinds)
  local fan_in, fan_out = fans_of(who, t)
  return init.gain(o.nonlinearity, o.a), math.max(1, o.mode == "fan_out" and fan_out or fan_in)
end

--- Uniform within +-gain * sqrt(3 / fan): He et al. 2015. options: a (0: slope of leaky_relu), mode ("fan_in" or
-- "fan_out"), nonlinearity. PyTorch's default for Linear and Conv is a = sqrt(5), which is +-1 / sqrt(fan_in).
function init.kaiming_uniform(t, options)
  local gain, fan = kaiming("init.kaiming_uniform", t, options)
  local bound = gain * math.sqrt(3 / fan)
  return init.uniform(t, -bound, bound)
end

--- Normal with standard deviation gain / sqrt(fan): He et al. 2015.
function init.kaiming_normal(t, options)
  local gain, fan = kaiming("init.kaiming_normal", t, options)
  return init.normal(t, 0, gain / math.sqrt(fan))
end

--- Uniform within +-gain * sqrt(6 / (fan_in + fan_out)): Glorot and Bengio 2010.
function init.xavier_uniform(t, gain)
  local fan_in, fan_out = fans_of("init.xavier_uniform", t)
  local bound = (expect("init.xavier_uniform", "gain", gain, number) or 1) * math.sqrt(6 / (fan_in + fan_out))
  return init.uniform(t, -bound, bound)
end

--- Normal with standard deviation gain * sqrt(2 / (fan_in + fan_out)): Glorot and Bengio 2010.
function init.xavier_normal(t, gain)
  local fan_in, fan_out = fans_of("init.xavier_normal", t)
  gain = expect("init.xavier_normal", "gain", gain, spread) or 1
  return init.normal(t, 0, gain * math.sqrt(2 / (fan_in + fan_out)))
end

--- The identity for a square or rectangular matrix.
init.eye = fill("eye", {}, function(t)
  local shape = t.shape
  if #shape ~= 2 then arguments.fail("init.eye: t: expected a matrix, got %s", arguments.describe(t)) end
  t:copy_(ty.eye(shape[1], shape[2]))
end)

--- A matrix whose rows or columns, whichever are fewer, are orthogonal and of length gain; of a weight [out, in,
-- ...kernel] the matrix [out, rest]. Saxe et al. 2014.
init.orthogonal = fill("orthogonal", { "gain", number }, function(t, gain)
  local rows = t.ndim > 1 and t:size(0) or 0
  if rows == 0 or t:numel() == 0 then
    arguments.fail("init.orthogonal: t: expected at least 2 dimensions, none empty, got %s", arguments.describe(t))
  end
  local columns = t:numel() // rows
  local a = ty.randn({ math.max(rows, columns), math.min(rows, columns) }, { dtype = "f32", device = t.device })
  local q, r = ty.qr(a)
  q = q * r:diagonal():sign() -- so that all such matrices are equally likely
  if rows < columns then q = q:transpose(0, 1) end
  t:copy_(q:reshape(t.shape) * (gain or 1))
end)

--- A convolution's weight [out, in, ...kernel] that hands channels through: 1 in the middle of kernel i of channel i.
init.dirac = fill("dirac", { "groups", "an integer >= 1 or nil" }, function(t, groups)
  local n = t.ndim
  groups = groups or 1
  if n < 3 or n > 5 or t:size(0) % groups ~= 0 then
    arguments.fail("init.dirac: t: expected [out, in, ...kernel] with out a multiple of groups %d, got %s", groups,
      arguments.describe(t))
  end
  t:zero_()
  local each = t:size(0) // groups
  for i = 0, t:size(0) - 1 do
    local at = i % each
    if at < t:size(1) then
      local place = { i, at }
      for d = 2, n - 1 do place[d + 1] = t:size(d) // 2 end
      t[place] = 1
    end
  end
end)

-- Names with the underscore of PyTorch do the same.
for _, name in ipairs { "zeros", "ones", "constant", "uniform", "normal", "trunc_normal", "kaiming_uniform",
  "kaiming_normal", "xavier_uniform", "xavier_normal", "eye", "orthogonal", "dirac" } do
  init[name .. "_"] = init[name]
end

return init
