--- Initialisers: nn.init.*. Each fills a tensor in place, outside the graph, and returns it.
-- fan_in is the number of inputs that one output sees: weight [out, in, ...kernel].
local ty = require "tycho"

local init = {}

local function fill(fn)
  return function(t, ...)
    ty.no_grad(fn, t, ...)
    return t
  end
end

--- fan_in and fan_out of a weight [out, in, ...kernel].
function init.fans(t)
  local shape = t.shape
  if #shape < 2 then error("init: fans need a weight of two or more dimensions, got " .. #shape, 2) end
  local field = 1
  for i = 3, #shape do field = field * shape[i] end
  return shape[2] * field, shape[1] * field
end

local gains = { linear = 1, conv = 1, sigmoid = 1, tanh = 5 / 3, relu = math.sqrt(2), selu = 3 / 4 }

--- The gain that keeps variances through an activation: linear, sigmoid, tanh, relu, leaky_relu (with its slope), selu.
function init.gain(name, slope)
  if name == "leaky_relu" then return math.sqrt(2 / (1 + (slope or 0.01) ^ 2)) end
  local gain = gains[name]
  if not gain then error(("init.gain: unknown activation '%s'"):format(tostring(name)), 2) end
  return gain
end

init.zeros = fill(function(t) t:fill_(0) end)
init.ones = fill(function(t) t:fill_(1) end)
init.constant = fill(function(t, value) t:fill_(value) end)
init.uniform = fill(function(t, low, high) t:uniform_(low or 0, high or 1) end)
init.normal = fill(function(t, mean, std) t:normal_(mean or 0, std or 1) end)

--- Normal numbers cut to [low, high] (default two standard deviations), drawn by inverting the distribution function.
init.trunc_normal = fill(function(t, mean, std, low, high)
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

--- Uniform within +-gain * sqrt(3 / fan): He et al. 2015. options: a (slope of leaky_relu), mode "fan_in" or "fan_out",
-- nonlinearity. PyTorch's default for Linear and Conv is a = sqrt(5), which is +-1 / sqrt(fan_in).
function init.kaiming_uniform(t, options)
  options = options or {}
  local fan_in, fan_out = init.fans(t)
  local fan = options.mode == "fan_out" and fan_out or fan_in
  local bound = init.gain(options.nonlinearity or "leaky_relu", options.a or 0) * math.sqrt(3 / math.max(1, fan))
  return init.uniform(t, -bound, bound)
end

--- Normal with standard deviation gain / sqrt(fan): He et al. 2015.
function init.kaiming_normal(t, options)
  options = options or {}
  local fan_in, fan_out = init.fans(t)
  local fan = options.mode == "fan_out" and fan_out or fan_in
  local gain = init.gain(options.nonlinearity or "leaky_relu", options.a or 0)
  return init.normal(t, 0, gain / math.sqrt(math.max(1, fan)))
end

--- Uniform within +-gain * sqrt(6 / (fan_in + fan_out)): Glorot and Bengio 2010.
function init.xavier_uniform(t, gain)
  local fan_in, fan_out = init.fans(t)
  local bound = (gain or 1) * math.sqrt(6 / (fan_in + fan_out))
  return init.uniform(t, -bound, bound)
end

--- Normal with standard deviation gain * sqrt(2 / (fan_in + fan_out)): Glorot and Bengio 2010.
function init.xavier_normal(t, gain)
  local fan_in, fan_out = init.fans(t)
  return init.normal(t, 0, (gain or 1) * math.sqrt(2 / (fan_in + fan_out)))
end

--- The identity for a square or rectangular matrix.
init.eye = fill(function(t)
  local shape = t.shape
  t:copy_(ty.eye(shape[1], shape[2]))
end)

-- Names with the underscore of PyTorch do the same.
for _, name in ipairs { "zeros", "ones", "constant", "uniform", "normal", "trunc_normal", "kaiming_uniform",
  "kaiming_normal", "xavier_uniform", "xavier_normal", "eye" } do
  init[name .. "_"] = init[name]
end

return init
