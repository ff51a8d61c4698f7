--- Quantiles of the beta distribution, for spacings (Lee et al. 2024, "Beta Sampling is All You Need").
local M = {}

-- ln Gamma(x), x > 0: Stirling's series (DLMF 5.11.1) after steps up to 10.
local function log_gamma(x)
  local shift = 0
  while x < 10 do
    shift, x = shift - math.log(x), x + 1
  end
  local y = 1 / (x * x)
  return shift + (x - 0.5) * math.log(x) - x + math.log(2 * math.pi) / 2
    + (1 / 12 - y * (1 / 360 - y * (1 / 1260 - y * (1 / 1680 - y / 1188)))) / x
end

-- I_x(a, b) by its continued fraction (DLMF 8.17.22), from the front by the recurrence of Wallis with scaling.
local function share(x, a, b)
  if x <= 0 then return 0 elseif x >= 1 then return 1 end
  if x > (a + 1) / (a + b + 2) then return 1 - share(1 - x, b, a) end
  local a0, b0, a1, b1 = 1, 0, 1, 1 -- convergents A / B
  for i = 1, 200 do
    local m = i // 2
    local d = (i % 2 == 0 and m * (b - m) or -(a + m) * (a + b + m)) * x / ((a + i - 1) * (a + i))
    local a2, b2, before = a1 + d * a0, b1 + d * b0, a1 / b1
    a0, b0, a1, b1 = a1 / b2, b1 / b2, a2 / b2, 1
    if math.abs(a1 - before) < 1e-16 * math.abs(a1) then break end
  end
  local front = a * math.log(x) + b * math.log(1 - x) + log_gamma(a + b) - log_gamma(a) - log_gamma(b)
  return math.exp(front) / a / (a1 / b1)
end
M.share = share

--- The x of which the share p lies below. By bisection in the smaller tail, whose quantile may be tiny.
---@param p number
---@param a number
---@param b number
---@return number
function M.quantile(p, a, b)
  if p <= 0 then return 0 elseif p >= 1 then return 1 end
  local upper = p > share(0.5, a, b)
  if upper then p, a, b = 1 - p, b, a end
  local low, high = -200.0, math.log(0.5) -- of ln x
  for _ = 1, 80 do
    local middle = (low + high) / 2
    if share(math.exp(middle), a, b) < p then low = middle else high = middle end
  end
  local x = math.exp((low + high) / 2)
  return upper and 1 - x or x
end

return M
