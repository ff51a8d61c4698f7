--- Sine, cosine and angles of directions, with the same bits on every machine: sums, products, quotients and roots of
-- IEEE 754, which are exact to the last place everywhere, where the functions of C libraries differ in it. Sets whose
-- places follow from angles are made with these. Errors are below 2e-15, for angles up to a thousand turns.
local arguments = require "tycho.arguments"

local M = {}

local half_turn = 3.141592653589793
local quarter_high, quarter_low = 0x1.921fb54400000p+0, 0x1.0b4611a626331p-34 -- half of pi in two parts, Cody and Waite

-- Taylor's polynomials for |x| <= pi/4, in Horner's form.
local function sin_reduced(x)
  local z = x * x
  local sum = 1 / 6227020800 - z / 1307674368000
  sum = sum * z - 1 / 39916800
  sum = sum * z + 1 / 362880
  sum = sum * z - 1 / 5040
  sum = sum * z + 1 / 120
  sum = sum * z - 1 / 6
  return x + x * z * sum
end

local function cos_reduced(x)
  local z = x * x
  local sum = 1 / 479001600 - z / 87178291200 + z * z / 20922789888000
  sum = sum * z - 1 / 3628800
  sum = sum * z + 1 / 40320
  sum = sum * z - 1 / 720
  sum = sum * z + 1 / 24
  return 1 - z * (0.5 - z * sum)
end

--- Sine and cosine of an angle in radians.
---@param x number at most 6000 in size
---@return number sin
---@return number cos
function M.sincos(x)
  if type(x) ~= "number" or not (x >= -6000 and x <= 6000) then
    arguments.expect("datasets.trigonometry.sincos", "x", x, "a number in [-6000, 6000]")
  end
  local quarters = (x / 1.5707963267948966 + 0.5) // 1
  local rest = (x - quarters * quarter_high) - quarters * quarter_low
  local s, c = sin_reduced(rest), cos_reduced(rest)
  local turn = quarters % 4
  if turn == 0 then return s, c elseif turn == 1 then return c, -s elseif turn == 2 then return -s, -c end
  return -c, s
end

-- atan of t in [0, 1]: three times half the angle, then the series.
local function atan_reduced(t)
  for _ = 1, 3 do t = t / (1 + math.sqrt(1 + t * t)) end
  local z, sum = t * t, 0.0
  for k = 19, 3, -2 do sum = (1 / k - sum) * z end
  return 8 * (t - t * sum)
end

--- The angle of the direction (x, y) from that of x, from -pi to pi; 0 for no direction.
---@param y number
---@param x number
---@return number
function M.atan2(y, x)
  if type(y) ~= "number" or y ~= y then arguments.expect("datasets.trigonometry.atan2", "y", y, "a finite number") end
  if type(x) ~= "number" or x ~= x then arguments.expect("datasets.trigonometry.atan2", "x", x, "a finite number") end
  local across, up = math.abs(x), math.abs(y)
  if across == 0 and up == 0 then return 0.0 end
  local angle
  if up <= across then angle = atan_reduced(up / across) else angle = half_turn / 2 - atan_reduced(across / up) end
  if x < 0 then angle = half_turn - angle end
  return y < 0 and -angle or angle
end

return M
