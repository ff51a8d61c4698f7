--- Denoising diffusion in discrete time: training on noise or velocity, sampling by DDIM (eta 0 is deterministic, eta 1
-- is ancestral sampling). Ho et al. 2020; cosine schedule: Nichol and Dhariwal 2021; DDIM: Song et al. 2021; velocity:
-- Salimans and Ho 2022.
local ty = require "tycho"
local embedding = require "tycho.diffusion.embedding"

local read = ty.nn.options

---@class DDPM
---@field alpha_bar number[]  signal left after step t, at index t + 1
local DDPM = {}
DDPM.__index = DDPM

local function cosine(steps)
  local function f(t) return math.cos((t / steps + 0.008) / 1.008 * math.pi / 2) ^ 2 end
  local result, product = {}, 1.0
  for t = 1, steps do
    product = product * (1 - math.min(0.999, 1 - f(t) / f(t - 1)))
    result[t] = product
  end
  return result
end

-- 1e-4 to 0.02 in 1,000 steps, scaled to other numbers of steps.
local function linear(steps)
  local result, product = {}, 1.0
  for t = 1, steps do
    local x = steps > 1 and (t - 1) / (steps - 1) or 0
    product = product * (1 - math.min(0.999, 1000 / steps * (1e-4 + (0.02 - 1e-4) * x)))
    result[t] = product
  end
  return result
end

local schedules = { cosine = cosine, linear = linear }

--- options: steps (1000), schedule ("cosine", "linear"), predict ("noise", "velocity"), drop (0.1: share of labels
-- dropped).
---@return DDPM
local function new(options)
  local self = read("DDPM", options, { steps = 1000, schedule = "cosine", predict = "noise", drop = 0.1 })
  if not schedules[self.schedule] then error("DDPM: unknown schedule " .. tostring(self.schedule), 2) end
  if self.predict ~= "noise" and self.predict ~= "velocity" then
    error("DDPM: predict must be noise or velocity, got " .. tostring(self.predict), 2)
  end
  self.alpha_bar = schedules[self.schedule](self.steps)
  self.table = ty.keep(ty.tensor(self.alpha_bar, { dtype = "f32" }))
  return setmetatable(self, DDPM)
end

--- The training loss for clean samples x [n, ...] and labels [n] (or nil).
---@return Tensor loss
function DDPM:loss(model, x, labels)
  local n = x.shape[1]
  local t, noise = ty.randint(0, self.steps, { n }, { device = x.device }), ty.randn_like(x)
  local shape = { n }
  for i = 2, x.ndim do shape[i] = 1 end
  if self.table.device ~= x.device then self.table = ty.keep(self.table:to { device = x.device }) end
  local signal = self.table:index_select(0, t):reshape(shape)
  local a, b = signal:sqrt(), (1 - signal):sqrt()
  if labels then labels = embedding.drop_labels(labels, self.drop, model.null_label) end
  local y = model(a * x + b * noise, t:to "f32" * (1000 / self.steps), labels)
  return ty.mse_loss(y, self.predict == "noise" and noise or a * noise - b * x)
end

--- Samples of `shape` by DDIM. options: labels, guidance (1), steps (50), eta (0), clip (true: the estimate of the
-- clean sample is cut to [-1, 1]), noise (the start).
---@return Tensor samples
function DDPM:sample(model, shape, options)
  local none = ty.nn.none
  local o = read("DDPM.sample", options,
    { labels = none, guidance = 1, steps = 50, eta = 0, clip = true, noise = none })
  local count = math.min(o.steps, self.steps)
  return ty.no_grad(function()
    local predict = embedding.guided(model, o.labels, o.guidance, model.null_label)
    local x = o.noise or ty.randn(shape, { device = embedding.device_of(model) })
    for i = count, 1, -1 do
      local before = x
      x = ty.scope(function()
        -- Evenly spread steps that include the last one.
        local t = math.floor(i * self.steps / count + 0.5) - 1
        local previous = i > 1 and math.floor((i - 1) * self.steps / count + 0.5) - 1 or -1
        local signal, next_signal = self.alpha_bar[t + 1], previous >= 0 and self.alpha_bar[previous + 1] or 1.0
        local a, b = math.sqrt(signal), math.sqrt(1 - signal)
        local y = predict(before, ty.full({ shape[1] }, t * 1000 / self.steps, { device = x.device }))
        local clean = self.predict == "noise" and (before - y * b) / a or before * a - y * b
        if o.clip then clean = clean:clamp(-1, 1) end
        local noise = (before - clean * a) / b
        local sigma = o.eta * math.sqrt((1 - next_signal) / (1 - signal)) * math.sqrt(1 - signal / next_signal)
        local result = clean * math.sqrt(next_signal) + noise * math.sqrt(math.max(0, 1 - next_signal - sigma ^ 2))
        return sigma > 0 and result + ty.randn_like(result) * sigma or result
      end)
    end
    return x
  end)
end

return new
