--- What a network is trained for: what it predicts, at which times, and how much each error counts. A value of its own,
-- that a method may fill otherwise; tycho.diffusion.process has the usual ones ready.
local ty = require "tycho"
local conditions = require "tycho.diffusion.condition"
local predictions = require "tycho.diffusion.prediction"
local times = require "tycho.diffusion.times"
local weighting = require "tycho.diffusion.weighting"

local none = ty.nn.none

---@class Objective
---@field schedule table
---@field predict string
local Objective = {}
Objective.__index = Objective

--- options: schedule; predict ("epsilon", "v", "sample", "flow", "edm"); times (times.uniform()); weighting
-- (weighting.uniform()); data (0.5: the data's standard deviation, for edm);
-- drop (0: share of samples whose condition becomes the null condition; or a table of shares by entry), null and keep
-- (what the null condition is: see condition.null).
---@return Objective
local function new(options)
  local o = ty.nn.options("Objective", options, { schedule = none, predict = "epsilon", times = times.uniform(),
    weighting = weighting.uniform(), data = 0.5, drop = 0, null = none, keep = none },
    { drop = false }) -- a number or a table
  if type(o.schedule) ~= "table" then
    error("Objective: schedule: expected a schedule such as diffusion.schedule.flow(), got " .. type(o.schedule), 2)
  end
  predictions.check("Objective", "predict", o.predict)
  for _, name in ipairs { "times", "weighting" } do
    if type(o[name]) ~= "function" then
      error(("Objective: %s: expected a value of diffusion.%s, got %s"):format(name, name, type(o[name])), 2)
    end
  end
  return setmetatable(o, Objective)
end

--- Times [n] for training.
function Objective:draw_times(n, device) return self.times(self.schedule, n, device or "cpu") end

--- Noisy samples: a table of x (= alpha x0 + sigma noise), t, noise, and alpha, sigma that broadcast to x.
---@param x0 Tensor  [n, ...]
---@param t? Tensor  [n] (drawn)
---@param noise? Tensor  as x0 (drawn)
---@return {x: Tensor, t: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor}
function Objective:noisy(x0, t, noise)
  local n = x0.shape[1]
  t = t or self:draw_times(n, x0.device)
  noise = noise or ty.randn_like(x0)
  local shape = { n }
  for i = 2, x0.ndim do shape[i] = 1 end
  local alpha, sigma = self.schedule:coefficients(t)
  alpha, sigma = alpha:reshape(shape), sigma:reshape(shape)
  return { x = self.schedule:mix(x0, noise, alpha, sigma), t = t, noise = noise, alpha = alpha, sigma = sigma }
end

--- The condition with a share of it dropped, as training for guidance wants it.
function Objective:dropped(model, condition)
  if not next(condition) or self.drop == 0 then return condition end
  return conditions.drop(condition, conditions.null(model, condition, self.null, self.keep), self.drop)
end

--- What the network says about noisy samples (as `noisy` returns them).
function Objective:output(model, noisy, condition)
  local scale = predictions.input_scale(self.predict, noisy.alpha, noisy.sigma, self.data)
  local y = model(scale and noisy.x * scale or noisy.x, self.schedule:network_time(noisy.t), condition)
  -- What some networks say of variances besides, in as many channels again, is not trained.
  return y.ndim == 4 and y.shape[2] == 2 * noisy.x.shape[2] and y:narrow(1, 0, noisy.x.shape[2]) or y
end

--- The training loss, a mean square error: a tensor of no dimensions.
---@param model fun(x: Tensor, t: Tensor, condition: table): Tensor
---@param x0 Tensor  clean samples [n, ...]
---@param condition? table
---@param given? {t?: Tensor, noise?: Tensor}  instead of drawn ones
---@return Tensor
function Objective:loss(model, x0, condition, given)
  condition = condition or {}
  conditions.check("Objective.loss", condition)
  local noisy = self:noisy(x0, given and given.t, given and given.noise)
  condition = self:dropped(model, condition)
  local y = self:output(model, noisy, condition)
  local target = predictions.target(self.predict, x0, noisy.noise, noisy.alpha, noisy.sigma, self.data)
  local weight = self.weighting(noisy.alpha, noisy.sigma,
    predictions.gain(self.predict, noisy.alpha, noisy.sigma, self.data))
  if not weight then return ty.mse_loss(y, target) end
  return (weight * (y - target):square()):mean()
end

return new
