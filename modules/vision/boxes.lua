--- Boxes [..., 4]: left, top, right, bottom, of the same unit. Overlap, its generalisation as a loss, windows of a
-- picture around boxes, and the way back.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local function check(who, name, boxes)
  arguments.expect(who, name, boxes, "a tensor")
  if boxes.ndim == 0 or boxes.shape[boxes.ndim] ~= 4 or not boxes:is_floating_point() then
    arguments.fail("%s: %s: expected floats [..., 4], got %s", who, name, arguments.describe(boxes))
  end
end

-- left, top, right, bottom, [...] each.
local function sides(boxes)
  return boxes:select(-1, 0), boxes:select(-1, 1), boxes:select(-1, 2), boxes:select(-1, 3)
end

local function areas(boxes)
  local l, t, r, b = sides(boxes)
  return (r - l):clamp(0) * (b - t):clamp(0)
end

local function pair(who, a, b)
  check(who, "a", a)
  check(who, "b", b)
  local al, at, ar, ab = sides(a)
  local bl, bt, br, bb = sides(b)
  local common = (ty.minimum(ar, br) - ty.maximum(al, bl)):clamp(0) * (ty.minimum(ab, bb) - ty.maximum(at, bt)):clamp(0)
  local all = areas(a) + areas(b) - common
  local around = (ty.maximum(ar, br) - ty.minimum(al, bl)) * (ty.maximum(ab, bb) - ty.minimum(at, bt))
  return common, all, around
end

--- Intersection over union of boxes, elementwise; they broadcast. Of two without area 0.
---@param a Tensor
---@param b Tensor
---@return Tensor
function M.iou(a, b)
  local common, all = pair("vision.boxes.iou", a, b)
  return common / all:clamp(1e-12)
end

--- The same less the share of the box around both that neither fills, in (-1, 1]: it has a gradient also for boxes that
-- do not meet. Rezatofighi et al. 2019, "Generalized Intersection over Union".
---@param a Tensor
---@param b Tensor
---@return Tensor
function M.giou(a, b)
  local common, all, around = pair("vision.boxes.giou", a, b)
  around = around:clamp(1e-12)
  return common / all:clamp(1e-12) - (around - all) / around
end

--- Square windows around boxes [n, 4] (pixels), `factor` times as wide as the square of the box's area: f32 [n, 4].
---@param boxes Tensor
---@param factor number
---@return Tensor windows
function M.around(boxes, factor)
  local who = "vision.boxes.around"
  check(who, "boxes", boxes)
  arguments.expect(who, "factor", factor, "a finite number > 0")
  local l, t, r, b = sides(boxes)
  local half = areas(boxes):clamp(1):sqrt() * (factor / 2)
  local x, y = (l + r) / 2, (t + b) / 2
  return ty.stack({ x - half, y - half, x + half, y + half }, -1)
end

--- What windows [n, 4] of pictures [n, c, h, w] (pixels, which may lie outside) show, resized to [n, c, side, side];
-- what is outside continues the border.
---@param pictures Tensor  floats
---@param windows Tensor
---@param side integer
---@return Tensor
function M.crop(pictures, windows, side)
  local who = "vision.boxes.crop"
  arguments.expect(who, "pictures", pictures, "a tensor")
  check(who, "windows", windows)
  arguments.expect(who, "side", side, "an integer >= 1")
  if pictures.ndim ~= 4 or windows.ndim ~= 2 or windows.shape[1] ~= pictures.shape[1] then
    arguments.fail("%s: expected pictures [n, c, h, w] and windows [n, 4], got %s and %s", who,
      arguments.describe(pictures), arguments.describe(windows))
  end
  local n, h, w = pictures.shape[1], pictures.shape[3], pictures.shape[4]
  local centre = (ty.arange(side, { dtype = "f32", device = windows.device }) + 0.5) / side
  local l, t, r, b = sides(windows:to "f32")
  local x = l:unsqueeze(1) + (r - l):unsqueeze(1) * centre
  local y = t:unsqueeze(1) + (b - t):unsqueeze(1) * centre
  local grid = ty.stack({ (x * (2 / w) - 1):unsqueeze(1):expand(n, side, side),
    (y * (2 / h) - 1):unsqueeze(2):expand(n, side, side) }, -1)
  return ty.grid_sample(pictures, grid, "bilinear", "border")
end

--- Boxes [n, ..., 4] in units of their windows [n, 4]: 0 the left or upper side, 1 the right or lower one.
---@param boxes Tensor
---@param windows Tensor
---@return Tensor
function M.into(boxes, windows)
  local who = "vision.boxes.into"
  check(who, "boxes", boxes)
  check(who, "windows", windows)
  local corner, size = windows:narrow(-1, 0, 2), windows:narrow(-1, 2, 2) - windows:narrow(-1, 0, 2)
  for _ = 1, boxes.ndim - windows.ndim do corner, size = corner:unsqueeze(1), size:unsqueeze(1) end
  return (boxes - ty.concat({ corner, corner }, -1)) / ty.concat({ size, size }, -1)
end

--- The inverse of into().
---@param boxes Tensor
---@param windows Tensor
---@return Tensor
function M.out_of(boxes, windows)
  local who = "vision.boxes.out_of"
  check(who, "boxes", boxes)
  check(who, "windows", windows)
  local corner, size = windows:narrow(-1, 0, 2), windows:narrow(-1, 2, 2) - windows:narrow(-1, 0, 2)
  for _ = 1, boxes.ndim - windows.ndim do corner, size = corner:unsqueeze(1), size:unsqueeze(1) end
  return boxes * ty.concat({ size, size }, -1) + ty.concat({ corner, corner }, -1)
end

--- A picture [3, h, w] with the sides of a box [4] (pixels) drawn into it, a pixel wide; what is outside is cut off.
---@param picture Tensor
---@param box Tensor
---@param colour number[]  one number a channel
---@return Tensor
function M.drawn(picture, box, colour)
  local who = "vision.boxes.drawn"
  arguments.expect(who, "picture", picture, "a tensor")
  arguments.expect(who, "box", box, "a tensor")
  arguments.expect(who, "colour", colour, "a list of numbers")
  if picture.ndim ~= 3 or picture.shape[1] ~= #colour or box.ndim ~= 1 or box.shape[1] ~= 4 then
    arguments.fail("%s: expected picture [%d, h, w] and box [4], got %s and %s", who, #colour,
      arguments.describe(picture), arguments.describe(box))
  end
  local h, w, b = picture.shape[2], picture.shape[3], {}
  for i, value in ipairs(box:tolist()) do
    local most = (i % 2 == 1 and w or h) - 1
    b[i] = value == value and math.floor(math.max(0, math.min(most, value))) or 0
  end
  local x, y = ty.arange(w, { device = picture.device }):unsqueeze(0), ty.arange(h, { device = picture.device })
    :unsqueeze(1)
  local wide = x:ge(b[1]):logical_and(x:le(b[3])):logical_and(y:ge(b[2])):logical_and(y:le(b[4]))
  local within = x:gt(b[1]):logical_and(x:lt(b[3])):logical_and(y:gt(b[2])):logical_and(y:lt(b[4]))
  local edge = wide:logical_and(within:logical_not())
  return ty.where(edge:unsqueeze(0), ty.tensor(colour, { dtype = picture.dtype, device = picture.device })
    :reshape(#colour, 1, 1), picture)
end

return M
