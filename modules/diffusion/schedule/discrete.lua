--- Schedules that are tables of betas: x = sqrt(a) x0 + sqrt(1 - a) e with a = product of (1 - beta), at times 0 to
-- steps - 1. Ho et al. 2020 (linear); Rombach et al. 2022 (scaled_linear); Nichol and Dhariwal 2021 (cosine); Lin et
-- al. 2024, "Common Diffusion Noise Schedules and Sample Steps are Flawed" (zero_snr).
local ty = require "tycho"
local base = require "tycho.diffusion.schedule.base"

--- A schedule of a table of times: of DDPM and of what was trained as it was.
---@class DiscreteSchedule
---@field steps integer
---@field alpha_bar number[]  share of the clean sample's variance at time t, at index t + 1
local Discrete = base.family()

local function between(first, last, steps, i) return steps > 1 and first + (last - first) * i / (steps - 1) or first end

-- name -> function(steps, first, last) that gives the list of betas
local makers = {}

function makers.linear(steps, first, last)
  local betas = {}
  for i = 0, steps - 1 do betas[i + 1] = between(first, last, steps, i) end
  return betas
end

function makers.scaled_linear(steps, first, last)
  local betas = {}
  for i = 0, steps - 1 do betas[i + 1] = between(math.sqrt(first), math.sqrt(last), steps, i) ^ 2 end
  return betas
end

function makers.cosine(steps)
  local function f(t) return math.cos((t / steps + 0.008) / 1.008 * math.pi / 2) ^ 2 end
  local betas = {}
  for t = 1, steps do betas[t] = 1 - f(t) / f(t - 1) end
  return betas
end

local function products(betas)
  local result, product = {}, 1.0
  for i, beta in ipairs(betas) do
    product = product * (1 - math.min(0.999, beta))
    result[i] = product
  end
  return result
end

-- sqrt(alpha_bar) moved and stretched so that the last is 0 and the first stays.
local function without_signal_at_the_end(alpha_bar)
  local first, last, result = math.sqrt(alpha_bar[1]), math.sqrt(alpha_bar[#alpha_bar]), {}
  for i, a in ipairs(alpha_bar) do result[i] = ((math.sqrt(a) - last) * first / (first - last)) ^ 2 end
  result[#result] = 0.0
  return result
end

--- options: steps (1000), betas ("linear", "scaled_linear", "cosine", or a list of numbers), beta_start (1e-4;
-- scaled_linear 8.5e-4) and beta_end (0.02; scaled_linear 0.012), both for 1,000 steps unless given, zero_snr (false),
-- least (0: the least share of the clean sample at the noisy end, where zero_snr leaves none).
---@return DiscreteSchedule
local function new(options)
  local none = ty.nn.none
  local self = ty.nn.options("schedule.discrete", options,
    { steps = 1000, betas = "linear", beta_start = none, beta_end = none, zero_snr = false,
      least = 0 },
    { betas = "a string or a list of numbers", beta_start = "a number in [0, 1]", beta_end = "a number in [0, 1]",
      least = "a number in [0, 1)" })
  local betas = self.betas
  if type(betas) == "string" then
    local make = makers[betas]
    if not make then
      error(("schedule.discrete: betas: expected linear, scaled_linear, cosine or a list, got '%s'"):format(betas), 2)
    end
    if math.type(self.steps) ~= "integer" or self.steps < 1 then
      error("schedule.discrete: steps: expected a positive integer, got " .. tostring(self.steps), 2)
    end
    -- The same noise in fewer steps takes larger ones.
    local scale, latent = 1000 / self.steps, betas == "scaled_linear"
    betas = make(self.steps, self.beta_start or (latent and 8.5e-4 or 1e-4) * scale,
      self.beta_end or (latent and 0.012 or 0.02) * scale)
  elseif type(betas) ~= "table" or #betas == 0 then
    error("schedule.discrete: betas: expected linear, scaled_linear, cosine or a list, got " .. type(betas), 2)
  end
  self.steps = #betas
  self.alpha_bar = products(betas)
  if self.zero_snr then self.alpha_bar = without_signal_at_the_end(self.alpha_bar) end
  self.alpha_bar[self.steps] = math.max(self.least, self.alpha_bar[self.steps])
  self.table = ty.keep(ty.tensor(self.alpha_bar, { dtype = "f32" }))
  -- Where there is no signal, sigma / alpha is no number to integrate over.
  self.frame = self.alpha_bar[self.steps] > 0 and "noise" or "flow"
  return setmetatable(self, Discrete)
end

-- sigma / alpha at a whole time.
local function ratio(self, t)
  local a = self.alpha_bar[t + 1]
  return math.sqrt((1 - a) / a)
end

--- Times between those of the table are interpolated linearly in sigma / alpha, as k-diffusion does.
function Discrete:coefficients(t)
  if ty.is_tensor(t) then
    if self.table.device ~= t.device then self.table = ty.keep(self.table:to { device = t.device }) end
    local signal = self.table:index_select(0, t)
    return signal:sqrt(), (1 - signal):sqrt()
  end
  if not (t >= 0 and t <= self.steps - 1) then
    error(("schedule: t: expected a time from 0 to %d, got %s"):format(self.steps - 1, tostring(t)), 0)
  end
  local below = math.floor(t)
  if below == t then
    local a = self.alpha_bar[below + 1]
    return math.sqrt(a), math.sqrt(1 - a)
  end
  local r = ratio(self, below) + (ratio(self, below + 1) - ratio(self, below)) * (t - below)
  local alpha = 1 / math.sqrt(1 + r * r)
  return alpha, r * alpha
end

--- The time, linear in the logarithm of sigma / alpha between those of the table.
function Discrete:time_at(r)
  local low, high = 0, self.steps - 1
  if r <= ratio(self, low) then return low end
  if r >= ratio(self, high) then return high end
  while high - low > 1 do -- ratio(low) <= r < ratio(high)
    local middle = (low + high) // 2
    if ratio(self, middle) <= r then low = middle else high = middle end
  end
  local from, to = math.log(ratio(self, low)), math.log(ratio(self, high))
  return low + (math.log(r) - from) / (to - from)
end

--- The point at which sigma / alpha is r exactly; its time is interpolated.
function Discrete:point_at(r)
  local alpha, t = 1 / math.sqrt(1 + r * r), self:time_at(r)
  return { t = t, alpha = alpha, sigma = r * alpha, time = self:network_time(t) }
end

function Discrete:clean() return { alpha = 1.0, sigma = 0.0, time = self:network_time(0) } end -- luacheck: ignore 212

function Discrete:range() return ratio(self, 0), ratio(self, self.steps - 1) end

function Discrete:draw(n, device) return ty.randint(0, self.steps, { n }, { device = device }) end

function Discrete:from_unit(u)
  if ty.is_tensor(u) then return (u * self.steps):floor():clamp(0, self.steps - 1):to "i64" end
  return math.max(0, math.min(self.steps - 1, math.floor(u * self.steps)))
end

--- Networks know 1,000 times, however many the table has.
function Discrete:network_time(t)
  if ty.is_tensor(t) then return t:to "f32" * (1000 / self.steps) end
  return t * 1000 / self.steps
end

return new
