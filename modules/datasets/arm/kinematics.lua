--- The arm's geometry: three links in a vertical plane, seen from the side. Lengths are in 1024ths of the picture's
-- side, x to the right, y up from the lower edge; angles are integers, 4096 to a radian, so that they add up without
-- rounding.
local arguments = require "tycho.arguments"
local trigonometry = require "tycho.datasets.trigonometry"

local M = {}

--- Where the shoulder is, how long the links are, how high the table stands; units of an angle.
M.base = { x = 96, y = 262 }
M.links = { 400, 380, 112 }
M.table = 190
M.radian = 4096

--- How far a joint turns in a step at most: 0.1 radians.
M.limit = 409

local down = -6434 -- a quarter turn

--- Whether the arm can bring its tip to (x, y) with the hand pointing down, with a little to spare.
---@param x number
---@param y number
---@return boolean
function M.reaches(x, y)
  arguments.expect("datasets.arm.reaches", "x", x, "a finite number")
  arguments.expect("datasets.arm.reaches", "y", y, "a finite number")
  local dx, dy, most = x - M.base.x, y + M.links[3] - M.base.y, M.links[1] + M.links[2] - 10
  return dx * dx + dy * dy < most * most
end

local function round(x) return math.floor(x + 0.5) // 1 | 0 end

--- Where the joints are at three angles, each measured from the link before: elbow, wrist and tip, and the direction of
-- the hand.
---@param q integer[]
function M.forward(q)
  arguments.expect("datasets.arm.forward", "q", q, "a list of integers")
  local x, y, angle = M.base.x, M.base.y, 0
  local places = {}
  for i = 1, 3 do
    angle = angle + q[i]
    local s, c = trigonometry.sincos(angle / M.radian)
    x, y = x + M.links[i] * c, y + M.links[i] * s
    places[i] = { x = x, y = y, sin = s, cos = c }
  end
  return places[1], places[2], places[3]
end

--- The angles that put the tip at (x, y) with the hand pointing down and the elbow up; where that is too far, as near
-- as the arm comes.
---@param x number
---@param y number
---@return integer[]
function M.inverse(x, y)
  arguments.expect("datasets.arm.inverse", "x", x, "a finite number")
  arguments.expect("datasets.arm.inverse", "y", y, "a finite number")
  local a, b = M.links[1], M.links[2]
  local dx, dy = x - M.base.x, y + M.links[3] - M.base.y
  local far = math.sqrt(dx * dx + dy * dy)
  local most, least = a + b - 2, a - b + 60
  local reach = math.max(least, math.min(most, far))
  if far > 0 then dx, dy = dx * reach / far, dy * reach / far else dx = reach end
  local c1 = (a * a + reach * reach - b * b) / (2 * a * reach)
  local c2 = (a * a + b * b - reach * reach) / (2 * a * b)
  local lift = trigonometry.atan2(math.sqrt(math.max(0, 1 - c1 * c1)), c1)
  local inside = trigonometry.atan2(math.sqrt(math.max(0, 1 - c2 * c2)), c2)
  local q1 = round((trigonometry.atan2(dy, dx) + lift) * M.radian)
  local q2 = round((inside - 3.141592653589793) * M.radian)
  return { q1, q2, down - q1 - q2 }
end

return M
