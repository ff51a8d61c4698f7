--- Several pictures in one: mixup, cutmix and mosaics. What a mixture shows is said by `target` [n, classes], shares
-- that sum to 1, made of `label` (or of a target that is there).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local frame = require "tycho.data.transforms.frame"

local M = {}

local transform = frame.transform

-- Draws of a Beta(a, a) by two Gammas (Joehnk 1964 where a <= 1, else by normal order statistics of Marsaglia and Tsang
-- 2000).
local function gamma(a)
  local boost = 1
  if a < 1 then
    boost = ty.rand(1):item() ^ (1 / a)
    a = a + 1
  end
  local d = a - 1 / 3
  local c = 1 / math.sqrt(9 * d)
  while true do
    local x = ty.randn(1):item()
    local v = (1 + c * x) ^ 3
    local u = 1 - ty.rand(1):item()
    if v > 0 and math.log(u) < 0.5 * x * x + d - d * v + d * math.log(v) then return d * v * boost end
  end
end

local function beta(a)
  local x, y = gamma(a), gamma(a)
  return x + y > 0 and x / (x + y) or 0.5
end

local function target_of(who, batch, classes)
  if ty.is_tensor(batch.target) then return batch.target end
  if not ty.is_tensor(batch.label) then
    arguments.fail("transforms.%s: batch: expected a field `label` [n] or `target` [n, classes], got neither", who)
  end
  return ty.one_hot(batch.label:to "i64", classes):to "f32"
end

local kinds = { alpha = "a number > 0", classes = "an integer >= 1", p = "a number in [0, 1]" }

local function read(who, given, alpha)
  local o = frame.options(who, given, { classes = arguments.none, alpha = alpha, p = 1 }, kinds)
  arguments.expect("transforms." .. who, "classes", o.classes, "an integer >= 1")
  return o
end

--- Each picture with a share of another of the batch, drawn from Beta(alpha, alpha) once a batch (Zhang et al. 2018).
-- options: classes, alpha (0.2), p (1; share of batches).
---@param given {classes: integer, alpha: number, p: number}
function M.mixup(given)
  local o = read("mixup", given, 0.2)
  return transform("mixup", function(batch)
    local target = target_of("mixup", batch, o.classes)
    local share = ty.rand(1):item() < o.p and beta(o.alpha) or 1
    local order = ty.randperm(batch.image:size(0)):to { device = batch.image.device }
    batch.image = frame.as_floats(batch.image, function(x)
      return x * share + x:index_select(0, order) * (1 - share)
    end)
    batch.target = target * share + target:index_select(0, order:to { device = target.device }) * (1 - share)
  end)
end

--- In each picture a box of another of the batch, whose area has a share drawn from Beta(alpha, alpha) once a batch
-- (Yun et al. 2019). options: classes, alpha (1), p (1; share of batches).
---@param given {classes: integer, alpha: number, p: number}
function M.cutmix(given)
  local o = read("cutmix", given, 1)
  return transform("cutmix", function(batch)
    local target = target_of("cutmix", batch, o.classes)
    local n, _, h, w = table.unpack(batch.image.shape)
    local side = ty.rand(1):item() < o.p and math.sqrt(1 - beta(o.alpha)) or 0
    local y, x = ty.rand(1):item() * h, ty.rand(1):item() * w
    local function span(at, size)
      local half = side * size / 2
      return math.max(0, math.floor(at - half + 0.5)), math.min(size, math.floor(at + half + 0.5))
    end
    local top, bottom = span(y, h)
    local left, right = span(x, w)
    local order = ty.randperm(n):to { device = batch.image.device }
    local share = 1 - (bottom - top) * (right - left) / (h * w)
    if share < 1 then
      local place = (":, :, %d:%d, %d:%d"):format(top, bottom, left, right)
      local image = batch.image:clone()
      image[place] = batch.image:index_select(0, order)[place]
      batch.image = image
    end
    batch.target = target * share + target:index_select(0, order:to { device = target.device }) * (1 - share)
  end)
end

--- Four pictures of the batch in one of the same size, meeting at a point that is drawn for each (Bochkovskiy et al.
-- 2020), each at the size of its quarter; with their masks and boxes, those of all four. options: p (1).
---@param given? {p: number}
function M.mosaic(given)
  local o = frame.options("mosaic", given, { p = 1 }, { p = "a number in [0, 1]" })
  return transform("mosaic", function(batch)
    local n, _, h, w = table.unpack(batch.image.shape)
    local cy = (frame.draws(n, 0.25, 0.75) * h):round():tolist()
    local cx = (frame.draws(n, 0.25, 0.75) * w):round():tolist()
    local does = frame.chosen(n, o.p):tolist()
    local image, mask = batch.image:clone(), batch.mask and batch.mask:clone()
    local boxes, k = {}, batch.boxes and batch.boxes:size(1)
    local geometry = require "tycho.data.transforms.geometry"
    local others = { ty.arange(n), ty.randperm(n), ty.randperm(n), ty.randperm(n) }
    for i = 0, n - 1 do
      local x, y = math.tointeger(cx[i + 1]), math.tointeger(cy[i + 1])
      local parts = { { 0, 0, y, x }, { 0, x, y, w - x }, { y, 0, h - y, x }, { y, x, h - y, w - x } }
      if not does[i + 1] then parts = {} end
      local list = {}
      for q, part in ipairs(parts) do
        local top, left, height, width = table.unpack(part)
        local one = { image = batch.image:narrow(0, others[q][i]:item(), 1) }
        if mask then one.mask = batch.mask:narrow(0, others[q][i]:item(), 1) end
        if k then one.boxes = batch.boxes:narrow(0, others[q][i]:item(), 1) end
        geometry.crop(one, ty.tensor({ { 0, 0, h, w } }, { dtype = "f64" }), { height, width }, "bilinear")
        local place = (", %d:%d, %d:%d"):format(top, top + height, left, left + width)
        image[("%d, :"):format(i) .. place] = one.image[0]
        if mask then mask[(mask.ndim == 4 and "%d, :" or "%d"):format(i) .. place] = one.mask[0] end
        if k then list[q] = one.boxes[0] + ty.tensor({ left, top, left, top }, { dtype = one.boxes.dtype }) end
      end
      if k then
        local own = #list > 0 and list or { batch.boxes[i] }
        local empty = ty.zeros({ k, 4 }, { dtype = batch.boxes.dtype, device = batch.boxes.device })
        while #own < 4 do own[#own + 1] = empty end
        boxes[i + 1] = ty.concat(own, 0)
      end
    end
    batch.image, batch.mask = image, mask
    if k then batch.boxes = ty.stack(boxes, 0) end
  end)
end

return M
