-- Networks known in closed form, for the tests of this folder: what a perfect network of any kind says about data whose
-- distribution is simple. Each is called as model(x, t, condition) and reads the times of `schedule`.
local ty = require "tycho"
local prediction = require "tycho.diffusion.prediction"

local M = {}

--- Any function of (x, t, condition) as a model.
function M.model(fn, null_label)
  return setmetatable({ null_label = null_label }, { __call = function(_, ...) return fn(...) end })
end

-- alpha and sigma [n, 1] at the network's times t [n], looked up one by one.
local function coefficients(schedule, t, dtype)
  local alphas, sigmas = {}, {}
  for i, time in ipairs(t:to("f64"):tolist()) do
    local own = time / 1000
    if schedule.steps then own = math.min(schedule.steps - 1, math.max(0, time * schedule.steps / 1000)) end
    if schedule.steps and math.abs(own - math.floor(own + 0.5)) < 1e-3 then own = math.floor(own + 0.5) end
    if schedule.sigma_max then own = math.exp(4 * time) end
    alphas[i], sigmas[i] = schedule:coefficients(own)
  end
  local function column(list) return ty.tensor(list, { dtype = dtype }):reshape(-1, 1) end
  return column(alphas), column(sigmas)
end

-- A model of that kind from a function (x, alpha, sigma) -> E[x0 | x].
local function from_mean(schedule, kind, mean, data)
  return M.model(function(x, t)
    local alpha, sigma = coefficients(schedule, t, x.dtype)
    local scale = prediction.input_scale(kind, alpha, sigma, data)
    if scale then x = x / scale end
    return prediction.convert("sample", kind, x, mean(x, alpha, sigma), alpha, sigma, data)
  end)
end

--- All data is the point c.
function M.point(schedule, kind, c, data)
  return from_mean(schedule, kind, function(x) return ty.full_like(x, c) end, data)
end

--- Data from N(m, s^2).
function M.gaussian(schedule, kind, s, m, data)
  m = m or 0
  return from_mean(schedule, kind, function(x, alpha, sigma)
    return (x - alpha * m) * (alpha * s ^ 2) / (alpha:square() * s ^ 2 + sigma:square()) + m
  end, data)
end

return M
