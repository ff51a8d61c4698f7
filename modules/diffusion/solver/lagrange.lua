--- The polynomials of Lagrange, which multistep methods integrate: that of place j is 1 there and 0 at the others.
local M = {}

--- The coefficients of the j-th of them, from the constant one on.
---@param places number[]  all different
---@param j integer
---@return number[]
function M.polynomial(places, j)
  local c = { 1 }
  for k, place in ipairs(places) do
    if k ~= j then
      local scale, more = 1 / (places[j] - place), {}
      for i = 1, #c + 1 do more[i] = ((c[i - 1] or 0) - place * (c[i] or 0)) * scale end
      c = more
    end
  end
  return c
end

--- Its integral from 0 to h.
---@return number
function M.integral(c, h)
  local sum = 0
  for i = #c, 1, -1 do sum = sum * h + c[i] / i end
  return sum * h
end

--- The integral of it times e^u, from 0 to h: e^u (p - p' + p'' - ...) at both ends.
---@return number
function M.integral_exp(c, h)
  local high, low, sign = 0, 0, 1
  while #c > 0 do
    local value = 0
    for i = #c, 1, -1 do value = value * h + c[i] end
    high, low = high + sign * value, low + sign * c[1]
    local slope = {}
    for i = 2, #c do slope[i - 1] = (i - 1) * c[i] end
    c, sign = slope, -sign
  end
  return math.exp(h) * high - low
end

return M
