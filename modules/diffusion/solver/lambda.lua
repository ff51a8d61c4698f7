--- The variable in which DPM-Solver and its kin integrate (Lu et al. 2022, "DPM-Solver", section 3): l = ln(alpha /
-- sigma), where a step of length h = l(to) - l(from) is, exactly,
--
--     data    x(to) = sigma(to) / sigma(from) x - alpha(to) (e^z - 1) m - ...   z = -h   m predicts the clean sample
--     noise   x(to) = alpha(to) / alpha(from) x - sigma(to) (e^z - 1) m - ...   z = h    m predicts the noise
--
-- for a prediction m that does not change, and what a changing one adds is a sum over its derivatives.
local M = {}

--- ln(alpha / sigma): -inf where there is no signal, inf where there is no noise.
---@param point Point
---@return number
function M.at(point) return math.log(point.alpha / point.sigma) end

--- What both forms have in common, as numbers: { h, z, ratio (of x), scale (alpha or sigma at `to`), first (the factor
-- of m, e^z - 1 times scale, also where z is infinite) }. of: "sample" (data) or "epsilon" (noise).
---@param of string
---@param from Point
---@param to Point
---@return table
function M.step(of, from, to)
  local h = M.at(to) - M.at(from)
  if of == "sample" then
    return { h = h, z = -h, ratio = to.sigma / from.sigma, scale = to.alpha, first = to.alpha * (math.exp(-h) - 1) }
  end
  local ratio = to.alpha / from.alpha
  return { h = h, z = h, ratio = ratio, scale = to.sigma, first = ratio * from.sigma - to.sigma }
end

return M
