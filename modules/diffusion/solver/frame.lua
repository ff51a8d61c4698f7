--- Where a solver integrates. In a frame the sample is x / scale, it moves with one number (`place`), and its
-- derivative by that number is one of the predictions:
--
--     noise   x / alpha           = x0 + p e             p = sigma / alpha             derivative epsilon
--     flow    x / (alpha + sigma) = (1 - p) x0 + p e     p = sigma / (alpha + sigma)   derivative flow
--
-- A step of first order is the same in all of them; higher orders differ in what they take to be straight. "noise" is
-- that of Karras et al. 2022 and k-diffusion, "flow" that of flow matching. A schedule names the one it is usually
-- integrated in; where a schedule has no signal at its noisy end, only "flow" has an end there.
local M = {}

M.noise = {
  kind = "epsilon",
  scale = function(point) return point.alpha end,
  place = function(point) return point.sigma / point.alpha end,
}

M.flow = {
  kind = "flow",
  scale = function(point) return point.alpha + point.sigma end,
  place = function(point) return point.sigma / (point.alpha + point.sigma) end,
}

--- The frame of that name, or the schedule's. who: the function that asks, for the error.
function M.get(who, name, schedule)
  local found = ({ noise = M.noise, flow = M.flow })[name or schedule.frame]
  if not found then error(("%s: frame: expected noise or flow, got '%s'"):format(who, tostring(name)), 3) end
  return found
end

--- x moved from one point to another along a derivative of the frame.
---@param frame table
---@param x Tensor
---@param derivative Tensor
---@param from Point
---@param to Point
---@return Tensor
function M.move(frame, x, derivative, from, to)
  local before, after = frame.scale(from), frame.scale(to)
  if before ~= 1 then x = x / before end
  x = x + derivative * (frame.place(to) - frame.place(from))
  return after ~= 1 and x * after or x
end

--- The step of first order from a point without signal, where x / alpha and ln(alpha / sigma) are no numbers: along the
-- flow, which has that point. For solvers that integrate predicted noise in those.
---@param prediction Prediction
---@param to Point
---@return Tensor
function M.from_noise(prediction, to)
  return M.move(M.flow, prediction.x, prediction:as "flow", prediction.point, to)
end

return M
