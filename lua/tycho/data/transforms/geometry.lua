--- Where pixels go: sizes, crops, flips, rotations, affine and projective maps. Pictures are interpolated, masks take
-- the nearest pixel, boxes follow their corners and are cut at the borders.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local frame = require "tycho.data.transforms.frame"

local M = {}

local options, transform = frame.options, frame.transform

-- ---- boxes of pixels at another size ----

-- Masks as pictures of bytes, or floats where they hold more, and back.
local function through_pixels(mask, fn)
  local whole = mask.dtype == "u8" or mask.dtype == "bool"
  local x = mask:to(whole and "u8" or "f64")
  local flat = x.ndim == 3
  local y = fn(flat and x:unsqueeze(1) or x)
  if not whole then y = y:round() end
  return (flat and y:select(1, 0) or y):to(mask.dtype)
end

-- Corners of boxes under x -> (x - origin) * scale, cut to the size.
local function move_boxes(boxes, left, top, across, down, size)
  local function column(t) return t:to { dtype = boxes.dtype, device = boxes.device }:reshape(-1, 1) end
  local function cut(x, from, by, most) return ((x - column(from)) * column(by)):clamp(0, most) end
  return ty.stack({
    cut(boxes:select(-1, 0), left, across, size[2]), cut(boxes:select(-1, 1), top, down, size[1]),
    cut(boxes:select(-1, 2), left, across, size[2]), cut(boxes:select(-1, 3), top, down, size[1]),
  }, -1)
end

--- The parts `places` [n, 4] (top, left, height, width) of a batch's pictures at `size`.
---@param batch table
---@param places Tensor  floats [n, 4]
---@param size integer[]
---@param mode string
function M.crop(batch, places, size, mode)
  local at = places:to { dtype = "f64", device = batch.image.device }
  batch.image = ty.crop_resize(batch.image, at, size, mode)
  if batch.mask then
    batch.mask = through_pixels(batch.mask, function(x)
      return ty.crop_resize(x, at:to { device = x.device }, size, "nearest")
    end)
  end
  if batch.boxes then
    local p = places:to "f64"
    batch.boxes = move_boxes(batch.boxes, p:select(1, 1), p:select(1, 0), size[2] / p:select(1, 3),
      size[1] / p:select(1, 2), size)
  end
end

local function whole(batch)
  local n, _, h, w = table.unpack(batch.image.shape)
  return ty.tensor({ 0, 0, h, w }, { dtype = "f64" }):expand(n, 4)
end

--- Every picture at `size`: { height, width } or a side. mode: nearest, bilinear, bicubic; what becomes smaller is
-- filtered (antialiasing).
---@param size integer|integer[]
---@param mode? string
function M.resize(size, mode)
  size = frame.size_of("resize", size)
  mode = arguments.expect("transforms.resize", "mode", mode or "bilinear", '"nearest" or "bilinear" or "bicubic"')
  return transform("resize", function(batch) M.crop(batch, whole(batch), size, mode) end)
end

--- The middle of every picture, `size` pixels of it; pictures that are smaller are an error.
---@param size integer|integer[]
function M.center_crop(size)
  size = frame.size_of("center_crop", size)
  return transform("center_crop", function(batch)
    local n, _, h, w = table.unpack(batch.image.shape)
    if h < size[1] or w < size[2] then
      arguments.fail("transforms.center_crop: size: expected at most the %d x %d pixels of the pictures, got %d x %d",
        h, w, size[1], size[2])
    end
    local place = { (h - size[1]) // 2, (w - size[2]) // 2, size[1], size[2] }
    M.crop(batch, ty.tensor(place, { dtype = "f64" }):expand(n, 4), size, "nearest")
  end)
end

--- A part of `size` pixels of every picture, each elsewhere. options: padding (0; pixels added on every side first),
-- fill (0; what they are).
---@param size integer|integer[]
---@param given? {padding: integer, fill: number}
function M.random_crop(size, given)
  size = frame.size_of("random_crop", size)
  local o = options("random_crop", given, { padding = 0, fill = 0 },
    { padding = "an integer in [0, 65535]", fill = "a finite number" })
  return transform("random_crop", function(batch)
    local n, _, h, w = table.unpack(batch.image.shape)
    local room = { h + 2 * o.padding - size[1], w + 2 * o.padding - size[2] }
    if room[1] < 0 or room[2] < 0 then
      arguments.fail("transforms.random_crop: size: expected at most the %d x %d pixels of the padded pictures, got "
        .. "%d x %d", h + 2 * o.padding, w + 2 * o.padding, size[1], size[2])
    end
    local top = (ty.rand(n) * (room[1] + 1)):floor():clamp(0, room[1]) - o.padding
    local left = (ty.rand(n) * (room[2] + 1)):floor():clamp(0, room[2]) - o.padding
    local matrix = ty.eye(3, { dtype = "f64" }):expand(n, 3, 3):clone()
    matrix[":, 0, 2"], matrix[":, 1, 2"] = left:to "f64", top:to "f64"
    M.map(batch, matrix, size, o.fill)
  end)
end

--- A part of every picture at `size`, as large and as wide as is drawn: options scale ({ 0.08, 1 }; shares of the
-- area), ratio ({ 3/4, 4/3 }; width to height), mode ("bilinear"). Szegedy et al. 2015. For files, image_folder does
-- it while it decodes them.
---@param size integer|integer[]
---@param given? {scale: number[], ratio: number[], mode: string}
function M.random_resized_crop(size, given)
  size = frame.size_of("random_resized_crop", size)
  local o = options("random_resized_crop", given, { scale = { 0.08, 1 }, ratio = { 3 / 4, 4 / 3 }, mode = "bilinear" },
    { scale = "a pair of numbers in (0, 1]", ratio = "a pair of numbers > 0", mode = "a string" })
  return transform("random_resized_crop", function(batch)
    local n, _, h, w = table.unpack(batch.image.shape)
    local places = {}
    for i = 1, n do places[i] = { M.random_place(h, w, o.scale, o.ratio) } end
    M.crop(batch, ty.tensor(places, { dtype = "f64" }), size, o.mode)
  end)
end

--- A random part of a picture of h x w pixels: top, left, height, width, whole pixels. Ten draws that do not fit are
-- given up for the largest part in the middle whose ratio is allowed.
---@return integer top
---@return integer left
---@return integer height
---@return integer width
function M.random_place(h, w, scale, ratio)
  local u = ty.rand(10, 4):tolist()
  local low, high = math.log(ratio[1]), math.log(ratio[2])
  for _, draw in ipairs(u) do
    local area = h * w * (scale[1] + draw[1] * (scale[2] - scale[1]))
    local aspect = math.exp(low + draw[2] * (high - low))
    local width, height = math.floor(math.sqrt(area * aspect) + 0.5), math.floor(math.sqrt(area / aspect) + 0.5)
    if width >= 1 and height >= 1 and width <= w and height <= h then
      local top = math.min(h - height, math.floor(draw[3] * (h - height + 1)))
      return top, math.min(w - width, math.floor(draw[4] * (w - width + 1))), height, width
    end
  end
  local width, height = w, h
  if w / h < ratio[1] then height = math.max(1, math.min(h, math.floor(w / ratio[1] + 0.5)))
  elseif w / h > ratio[2] then width = math.max(1, math.min(w, math.floor(h * ratio[2] + 0.5))) end
  return (h - height) // 2, (w - width) // 2, height, width
end

-- ---- flips ----

local function flip(who, dim, p)
  p = frame.probability(who, p)
  return transform(who, function(batch)
    local n = batch.image:size(0)
    local chosen = frame.chosen(n, p)
    batch.image = frame.where(chosen, batch.image:flip(dim), batch.image)
    if batch.mask then batch.mask = frame.where(chosen, batch.mask:flip(dim), batch.mask) end
    if batch.boxes then
      local b, most = batch.boxes, batch.image:size(dim)
      local first = dim == -1 and 0 or 1
      local sides = { b:select(-1, 0), b:select(-1, 1), b:select(-1, 2), b:select(-1, 3) }
      sides[first + 1], sides[first + 3] = most - sides[first + 3], most - sides[first + 1]
      batch.boxes = frame.where(chosen, ty.stack(sides, -1), b)
    end
  end)
end

--- Left and right change places in a share p of the pictures (0.5).
---@param p? number
function M.horizontal_flip(p) return flip("horizontal_flip", -1, p) end

--- Top and bottom change places in a share p of the pictures (0.5).
---@param p? number
function M.vertical_flip(p) return flip("vertical_flip", -2, p) end

-- ---- maps ----

-- Boxes under the inverse of `matrix`: what their corners span, cut at the borders.
local function map_boxes(boxes, matrix, size)
  local inverse = ty.inverse(matrix:to "f64"):to { device = boxes.device }
  local b = boxes:to "f64"
  local left, top, right, bottom = b:select(-1, 0), b:select(-1, 1), b:select(-1, 2), b:select(-1, 3)
  local one = ty.ones_like(left)
  -- Pixels are measured at their centres by the matrix, and at their corners by boxes.
  local corners = ty.stack({
    ty.stack({ left - 0.5, top - 0.5, one }, -1), ty.stack({ right - 0.5, top - 0.5, one }, -1),
    ty.stack({ left - 0.5, bottom - 0.5, one }, -1), ty.stack({ right - 0.5, bottom - 0.5, one }, -1),
  }, -2)
  local n, k = boxes:size(0), boxes:size(1)
  local moved = ty.matmul(corners:reshape(n, k * 4, 3), inverse:transpose(1, 2)):reshape(n, k, 4, 3)
  local w = moved:select(-1, 2)
  local x = (moved:select(-1, 0) / w + 0.5):clamp(0, size[2])
  local y = (moved:select(-1, 1) / w + 0.5):clamp(0, size[1])
  return ty.stack({ x:min { -1 }, y:min { -1 }, x:max { -1 }, y:max { -1 } }, -1):to(boxes.dtype)
end

--- A batch's pictures under maps: `matrix` [n, 3, 3] leads from pixels of the result to pixels of the picture, as in
-- ty.warp.
---@param batch table
---@param matrix Tensor
---@param size integer[]
---@param fill? number
function M.map(batch, matrix, size, fill)
  local at = matrix:to { device = batch.image.device }
  batch.image = ty.warp(batch.image, at, size, "bilinear", fill or 0)
  if batch.mask then
    batch.mask = through_pixels(batch.mask, function(x)
      return ty.warp(x, at:to { device = x.device }, size, "nearest", 0)
    end)
  end
  if batch.boxes then batch.boxes = map_boxes(batch.boxes, matrix, size) end
end

local function matrices(rows)
  local n = rows[1][1]:numel()
  local list = {}
  for i, row in ipairs(rows) do
    for j, x in ipairs(row) do
      list[(i - 1) * 3 + j] = ty.is_tensor(x) and x:to "f64" or ty.full({ n }, x, { dtype = "f64" })
    end
  end
  return ty.stack(list, 1):reshape(n, 3, 3)
end
M.matrices = matrices

--- Matrices of a rotation by `angle` (radians, counterclockwise), a scale, a shear along x and y (radians; the top goes
-- to the right, the left down) and a shift (pixels) around the middle of the pictures, from pixels of the result to
-- those of the picture. All are tensors [n].
function M.affine_matrices(h, w, angle, scale, shear_x, shear_y, right, down)
  local cx, cy = (w - 1) / 2, (h - 1) / 2
  local cos, sin = angle:to("f64"):cos(), angle:to("f64"):sin()
  scale = scale:to "f64"
  -- forward: shift . rotate . shear . scale; with y down a counterclockwise turn has sin in the upper right
  local a, b = cos * scale, sin * scale
  local c, d = -sin * scale, cos * scale
  local along, up = -shear_x:to("f64"):tan(), -shear_y:to("f64"):tan()
  a, b, c, d = a + b * up, a * along + b, c + d * up, c * along + d
  local det = a * d - b * c
  local ia, ib, ic, id = d / det, -b / det, -c / det, a / det
  local x, y = right:to "f64" + cx, down:to "f64" + cy
  return matrices { { ia, ib, cx - ia * x - ib * y }, { ic, id, cy - ic * x - id * y }, { ia * 0, 0, 1 } }
end

--- Turns, shifts, scales and shears, drawn for each picture. options: degrees (0; -x to x or { low, high }), translate
-- ({ 0, 0 }; shares of the height and width), scale ({ 1, 1 }), shear (0; degrees, along x), fill (0), p (1).
---@param given table
function M.affine(given)
  local o = options("affine", given,
    { degrees = 0, translate = { 0, 0 }, scale = { 1, 1 }, shear = 0, fill = 0, p = 1 },
    { degrees = "a number or a list of numbers", translate = "a pair of numbers in [0, 1]",
      scale = "a pair of numbers > 0", shear = "a number or a list of numbers", fill = "a finite number",
      p = "a number in [0, 1]" })
  local degrees = frame.range_of("affine", "degrees", o.degrees)
  local shear = frame.range_of("affine", "shear", o.shear)
  return transform("affine", function(batch)
    local n, _, h, w = table.unpack(batch.image.shape)
    local does = frame.chosen(n, o.p):to "f64"
    local function drawn(range, unit) return frame.draws(n, range[1], range[2]):to "f64" * unit end
    local matrix = M.affine_matrices(h, w, drawn(degrees, math.pi / 180) * does,
      1 + (drawn(o.scale, 1) - 1) * does, drawn(shear, math.pi / 180) * does, does * 0,
      drawn({ -o.translate[2], o.translate[2] }, w):round() * does,
      drawn({ -o.translate[1], o.translate[1] }, h):round() * does)
    M.map(batch, matrix, { h, w }, o.fill)
  end)
end

--- Turns around the middle by -degrees to degrees, or { low, high }, counterclockwise. options: fill (0), p (1).
---@param degrees number|number[]
---@param given? {fill: number, p: number}
function M.rotate(degrees, given)
  local o = options("rotate", given, { fill = 0, p = 1 }, { fill = "a finite number", p = "a number in [0, 1]" })
  degrees = frame.range_of("rotate", "degrees", degrees)
  return M.affine { degrees = degrees, fill = o.fill, p = o.p }
end

-- The map that takes four points to four others: of each picture the eight unknowns of its matrix.
local function through_points(from, to)
  local n = from:size(0)
  local x, y, u, v = from:select(-1, 0), from:select(-1, 1), to:select(-1, 0), to:select(-1, 1)
  local one, zero = ty.ones_like(x), ty.zeros_like(x)
  local upper = ty.stack({ x, y, one, zero, zero, zero, -x * u, -y * u }, -1)
  local lower = ty.stack({ zero, zero, zero, x, y, one, -x * v, -y * v }, -1)
  local solved = ty.solve(ty.concat({ upper, lower }, 1), ty.concat({ u, v }, 1):unsqueeze(-1)):reshape(n, 8)
  return ty.concat({ solved, ty.ones({ n, 1 }, { dtype = "f64" }) }, 1):reshape(n, 3, 3)
end

--- Pictures as seen from aside: each corner moves inwards by up to `distortion` (0.5) of half a side. options:
-- distortion, fill (0), p (0.5).
---@param given? {distortion: number, fill: number, p: number}
function M.perspective(given)
  local o = options("perspective", given, { distortion = 0.5, fill = 0, p = 0.5 },
    { distortion = "a number in [0, 1)", fill = "a finite number", p = "a number in [0, 1]" })
  return transform("perspective", function(batch)
    local n, _, h, w = table.unpack(batch.image.shape)
    local signs = ty.tensor({ { 0, 0 }, { 1, 0 }, { 0, 1 }, { 1, 1 } }, { dtype = "f64" })
    local side = ty.tensor({ w - 1, h - 1 }, { dtype = "f64" })
    local corners = (signs * side):expand(n, 4, 2)
    local inwards = (1 - 2 * signs) * side * (o.distortion / 2)
    local does = frame.chosen(n, o.p):to("f64"):reshape(n, 1, 1)
    local moved = corners + ty.rand(n, 4, 2):to "f64" * inwards * does
    M.map(batch, through_points(moved, corners), { h, w }, o.fill)
  end)
end

return M
