--- What a network predicts, and what follows from it. With a noisy sample x = alpha x0 + sigma e,
--
--     epsilon   e                             the noise (Ho et al. 2020)
--     sample    x0                            the clean sample
--     v         alpha e - sigma x0            Salimans and Ho 2022
--     flow      e - x0                        the velocity of straight paths (Lipman et al. 2023; Liu et al. 2023)
--     edm       (x0 - c_skip x) / c_out       preconditioned, Karras et al. 2022, for data of standard deviation `data`
--
-- Each follows from each other at any alpha and sigma, on any path. x and the prediction are tensors; alpha and sigma
-- are numbers, or tensors that broadcast to x. Where a conversion divides by an alpha or a sigma that is 0, nothing is
-- known, and the result is not finite.
local ty = require "tycho"

local M = {}

local function root(x) return ty.is_tensor(x) and x:sqrt() or math.sqrt(x) end

-- c_skip and c_out of Karras et al. 2022, table 1, for x = alpha x0 + sigma e instead of x0 + sigma e.
local function edm_weights(alpha, sigma, data)
  local power = alpha * alpha * data ^ 2 + sigma * sigma -- variance of x
  return alpha * data ^ 2 / power, sigma * data / root(power)
end

-- (x, y, alpha, sigma, data) -> x0
local sample_from = {
  sample = function(_, y) return y end,
  epsilon = function(x, y, alpha, sigma) return (x - y * sigma) / alpha end,
  v = function(x, y, alpha, sigma) return (x * alpha - y * sigma) / (alpha * alpha + sigma * sigma) end,
  flow = function(x, y, alpha, sigma) return (x - y * sigma) / (alpha + sigma) end,
  edm = function(x, y, alpha, sigma, data)
    local skip, out = edm_weights(alpha, sigma, data)
    return x * skip + y * out
  end,
}

-- (x, y, alpha, sigma, data) -> e, where that does not need x0
local noise_from = {
  epsilon = function(_, y) return y end,
  v = function(x, y, alpha, sigma) return (x * sigma + y * alpha) / (alpha * alpha + sigma * sigma) end,
  flow = function(x, y, alpha, sigma) return (x + y * alpha) / (alpha + sigma) end,
}

-- (x0, e, alpha, sigma, data) -> prediction
local target_of = {
  sample = function(x0) return x0 end,
  epsilon = function(_, e) return e end,
  v = function(x0, e, alpha, sigma) return alpha * e - sigma * x0 end,
  flow = function(x0, e) return e - x0 end,
  edm = function(x0, e, alpha, sigma, data)
    local skip, out = edm_weights(alpha, sigma, data)
    return (x0 - (alpha * x0 + sigma * e) * skip) / out
  end,
}

local names = "edm, epsilon, flow, sample, v"

--- Raises an error unless kind is one of edm, epsilon, flow, sample, v. who, what: function and argument for the error.
---@return string kind
function M.check(who, what, kind)
  if not target_of[kind] then
    error(("%s: %s: expected one of %s, got '%s'"):format(who, what, names, tostring(kind)), 3)
  end
  return kind
end

--- The prediction of kind `to` that follows from the prediction y of kind `from`. data: as in edm (0.5).
---@param from string
---@param to string
---@param x Tensor  the noisy sample
---@param y Tensor  the prediction
---@param alpha number|Tensor
---@param sigma number|Tensor
---@param data? number
---@return Tensor
function M.convert(from, to, x, y, alpha, sigma, data)
  M.check("prediction.convert", "from", from)
  M.check("prediction.convert", "to", to)
  if from == to then return y end
  data = data or 0.5
  if to == "sample" then return sample_from[from](x, y, alpha, sigma, data) end
  local noise = noise_from[from]
  if to == "epsilon" and noise then return noise(x, y, alpha, sigma) end
  local x0 = sample_from[from](x, y, alpha, sigma, data)
  local e = noise and noise(x, y, alpha, sigma) or (x - x0 * alpha) / sigma
  return target_of[to](x0, e, alpha, sigma, data)
end

--- What a perfect network of that kind says about x = alpha x0 + sigma e.
---@param kind string
---@param x0 Tensor
---@param e Tensor
---@param alpha number|Tensor
---@param sigma number|Tensor
---@param data? number
---@return Tensor
function M.target(kind, x0, e, alpha, sigma, data)
  M.check("prediction.target", "kind", kind)
  return target_of[kind](x0, e, alpha, sigma, data or 0.5)
end

--- (d x0 / d prediction)^2: a squared error of the prediction, times this, is the squared error of x0.
---@param kind string
---@param alpha number|Tensor
---@param sigma number|Tensor
---@param data? number
---@return number|Tensor
function M.gain(kind, alpha, sigma, data)
  M.check("prediction.gain", "kind", kind)
  if kind == "sample" then return 1 end
  if kind == "epsilon" then return (sigma / alpha) ^ 2 end
  if kind == "v" then return (sigma / (alpha * alpha + sigma * sigma)) ^ 2 end
  if kind == "flow" then return (sigma / (alpha + sigma)) ^ 2 end
  local _, out = edm_weights(alpha, sigma, data or 0.5)
  return out ^ 2
end

--- By how much x is scaled before an edm network sees it: 1 / its standard deviation; other kinds see x itself.
function M.input_scale(kind, alpha, sigma, data)
  if kind ~= "edm" then return nil end
  return 1 / root(alpha * alpha * (data or 0.5) ^ 2 + sigma * sigma)
end

--- What a network says about a noisy point, seen as the clean sample, the noise or the velocity.
---@class Prediction
---@field x Tensor       the noisy sample
---@field output Tensor  what the network (or guidance) said
---@field kind string
---@field point Point
---@field plain? Prediction  as it was before the clean sample was cut, where it was
local Prediction = {}
Prediction.__index = Prediction

--- An output of kind `kind` for x at a point of a schedule, from which the other predictions are made when they are
-- asked for, once each.
---@return Prediction
function M.new(kind, x, output, point, data)
  return setmetatable({ x = x, output = output, kind = kind, point = point, data = data, made = { [kind] = output } },
    Prediction)
end

--- The prediction as epsilon, sample, v, flow or edm.
---@param kind string
---@return Tensor
function Prediction:as(kind)
  local found = self.made[kind]
  if not found then
    found = M.convert(self.kind, kind, self.x, self.output, self.point.alpha, self.point.sigma, self.data)
    self.made[kind] = found
  end
  return found
end

--- The same with another estimate of the clean sample (cut to its range, say); all else follows from that. The field
-- `plain` of what comes back is the prediction as it was.
---@param x0 Tensor
---@return Prediction
function Prediction:with_sample(x0)
  local made = M.new("sample", self.x, x0, self.point, self.data)
  made.plain = self.plain or self
  return made
end

return M
