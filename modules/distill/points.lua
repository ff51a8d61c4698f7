--- Points in the plane for recipes of distillation: a distribution with sharp edges, and how far drawn points are from
-- it.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect = arguments.expect
local M = {}

--- Points drawn evenly from the eight dark cells of a 4 x 4 board over [-2, 2] x [-2, 2].
---@param n integer
---@return Tensor points  f32 [n, 2]
function M.checkerboard(n)
  expect("distill.points.checkerboard", "n", n, "an integer >= 1")
  local row, half = ty.randint(0, 4, { n }), ty.randint(0, 2, { n })
  local corner = ty.stack({ half * 2 + row % 2, row }, 1):to "f32" - 2
  return corner + ty.rand(n, 2)
end

local PARTS = 20 -- cells of a quarter, over [-2.5, 2.5]

--- How many points lie in each of 20 x 20 small cells over [-2.5, 2.5] x [-2.5, 2.5], as shares of all: f64 [20, 20],
-- rows from above.
---@param points Tensor  [n, 2]
---@return Tensor
function M.histogram(points)
  local who = "distill.points.histogram"
  expect(who, "points", points, "a tensor")
  if points.ndim ~= 2 or points.shape[2] ~= 2 or points.shape[1] == 0 then
    arguments.fail("%s: points: expected [n, 2] with n > 0, got %s", who, arguments.describe(points))
  end
  local at = ((points:to "f64" + 2.5) * 4):floor()
  local inside = at:ge(0):logical_and(at:lt(PARTS)):all(1)
  local x, y = at:select(1, 0), at:select(1, 1)
  local cell = ty.where(inside, (PARTS - 1 - y) * PARTS + x, PARTS * PARTS):nan_to_num(PARTS * PARTS)
  local counts = ty.bincount(cell:to "i64", nil, PARTS * PARTS + 1)
  return counts:narrow(0, 0, PARTS * PARTS):reshape(PARTS, PARTS):to "f64" / points.shape[1]
end

--- Half the sum of absolute differences between the shares of drawn points in small cells and those of the board
-- itself: the share of the points that would have to move, 0 to 1. Points outside of the cells count in full.
---@param points Tensor  [n, 2]
---@return number
function M.off_board(points)
  local found = M.histogram(points)
  local i = ty.arange(PARTS)
  local cell = (i:to "f64" / 4 - 2.5):floor() -- from -3 (outside) to 2 (outside)
  local inside = cell:ge(-2):logical_and(cell:lt(2))
  local dark = ((cell:unsqueeze(0) + cell:flip(0):unsqueeze(1)) % 2):eq(0)
    :logical_and(inside:unsqueeze(0)):logical_and(inside:unsqueeze(1))
  local wanted = dark:to "f64" / (8 * 16)
  local outside = 1 - found:sum():item()
  return ((found - wanted):abs():sum():item() + outside) / 2
end

return M
