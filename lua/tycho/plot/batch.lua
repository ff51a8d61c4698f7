--- A look at a batch: its pictures as a sheet, with boxes and masks drawn into them and what they are called above.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local grid = require "tycho.plot.grid"

local fail, none = arguments.fail, arguments.none

local kinds = { count = "an integer >= 1", columns = "an integer >= 1", scale = "an integer >= 1", field = "a string",
  classes = "a list of strings", mean = "a list of finite numbers", std = "a list of finite numbers > 0",
  range = "a pair of finite numbers" }

-- Colours of boxes and of what masks count, one after the other.
local palette = { { 255, 64, 64 }, { 64, 160, 255 }, { 80, 220, 80 }, { 255, 200, 40 }, { 220, 90, 255 },
  { 60, 230, 230 } }

local function colour(k) return ty.tensor(palette[(k - 1) % #palette + 1]):to "f32" end

-- The field that has pictures, as f32 [n, 1 or 3, h, w]: images, the frames' first of clips, or spectrograms.
local function pictures_of(batch, o)
  local x, name
  for _, field in ipairs(o.field and { o.field } or { "image", "images", "video", "mel", "x" }) do
    if ty.is_tensor(batch[field]) and batch[field].ndim >= 3 then
      x, name = batch[field], field
      break
    end
  end
  if not x then
    fail("plot.batch: batch: expected a tensor of at least 3 dimensions in the field %s, got none",
      o.field and "'" .. o.field .. "'" or "'image' (the option field names another)")
  end
  if x.ndim == 3 then x = x:unsqueeze(1) end
  while x.ndim > 4 do x = x:select(1, 0) end
  x = x:narrow(0, 0, math.min(x:size(0), o.count)):detach():to { device = "cpu" }
  if name == "mel" or (x:size(1) ~= 1 and x:size(1) < 3) then x = x:narrow(1, 0, 1) end
  if name == "mel" then x = x:flip(2) end -- low tones below
  if x:size(1) > 3 then x = x:narrow(1, 0, 3) end
  return x, name
end

-- Pictures as numbers from 0 to 255.
local function shown(x, o)
  if x.dtype == "u8" or x.dtype == "bool" then return x:to "f32" * (x.dtype == "bool" and 255 or 1) end
  x = x:to "f32"
  if o.mean or o.std then
    local channels = x:size(1)
    local function each(list, otherwise)
      list = list or { otherwise }
      if #list ~= 1 and #list ~= channels then
        fail("plot.batch: mean, std: expected 1 or %d numbers, as many as channels, got %d", channels, #list)
      end
      return ty.tensor(list):to("f32"):reshape(1, -1, 1, 1)
    end
    x = x * each(o.std, 1) + each(o.mean, 0)
  end
  local range = o.range
  if not range then -- the smallest of the usual ones that has them all, else their own
    local finite = ty.where(x:isfinite(), x, 0.0)
    local low, high = finite:min():item(), finite:max():item()
    if low >= 0 and high <= 1 or (o.mean or o.std) then range = { 0, 1 }
    elseif low >= -1 and high <= 1 then range = { -1, 1 }
    else range = { low, high > low and high or low + 1 } end
  end
  return ((x - range[1]) * (255 / (range[2] - range[1]))):clamp(0, 255)
end

-- x enlarged by a whole number: [n, c, h, w].
local function enlarged(x, scale)
  if scale == 1 then return x end
  return ty.interpolate(x, { scale = scale, mode = "nearest" })
end

-- A mask [n, h, w] or [n, k, h, w] of whole numbers laid over pictures: 0 lets them be.
local function with_masks(x, mask, scale)
  mask = mask:narrow(0, 0, x:size(0)):to { dtype = "f32", device = "cpu" }
  if mask.ndim == 3 then mask = mask:unsqueeze(1) end
  for k = 0, mask:size(1) - 1 do
    local part = enlarged(mask:narrow(1, k, 1), scale)
    local most = math.min(math.tointeger(part:max():item() // 1), 255)
    for value = 1, most do
      local tint = colour(value + k):reshape(1, 3, 1, 1)
      x = ty.where(part:eq(value), x * 0.5 + tint * 0.5, x)
    end
  end
  return x
end

-- The border of one box (left, top, right, bottom in pixels of the sheet) in a picture [3, h, w].
local function draw_box(picture, box, k)
  local h, w = picture:size(1), picture:size(2)
  local function within(v, most) return math.tointeger(math.max(0, math.min(most, math.floor(v + 0.5)))) end
  local left, top, right, bottom = within(box[1], w), within(box[2], h), within(box[3], w), within(box[4], h)
  if right <= left or bottom <= top then return end -- padding
  local tint = colour(k):reshape(3, 1, 1)
  local function line(y, x, height, width)
    picture:narrow(1, y, height):narrow(2, x, width):copy_(tint:expand(3, height, width))
  end
  line(top, left, 1, right - left)
  line(bottom - 1, left, 1, right - left)
  line(top, left, bottom - top, 1)
  line(top, right - 1, bottom - top, 1)
end

-- What stands above picture i (from 0): its caption, the name of its label, or the largest shares of its target.
local function text_of(batch, i, o)
  local function class(k) return o.classes and o.classes[k + 1] or tostring(k) end
  for _, field in ipairs { "caption", "text", "name" } do
    if type(batch[field]) == "table" and batch[field][i + 1] then return tostring(batch[field][i + 1]) end
  end
  local target, label = batch.target, batch.label
  if ty.is_tensor(target) and target.ndim == 2 and target:is_floating_point() then
    local list, order = target[i]:tolist(), {}
    for k, share in ipairs(list) do if share >= 0.05 then order[#order + 1] = k end end
    table.sort(order, function(a, b) return list[a] > list[b] end)
    local parts = {}
    for k = 1, math.min(2, #order) do parts[k] = ("%s %.2f"):format(class(order[k] - 1), list[order[k]]) end
    return table.concat(parts, "\n")
  end
  if ty.is_tensor(label) and label.ndim == 1 and i < label:size(0) then
    local k = label[i]:item()
    return math.tointeger(k) and class(math.tointeger(k)) or ("%.4g"):format(k)
  end
  if type(label) == "table" and label[i + 1] then return tostring(label[i + 1]) end
  return nil
end

--- A batch of a DataLoader, or of anything, as a sheet: the pictures of its field `image` [n, c, h, w] (or [n, h, w];
-- clips show their first frame, spectrograms in `mel` have low tones below), `boxes` [n, k, 4] and `mask` drawn in,
-- above them caption, text, name, label or target. Bytes are shown as they are; floats of 0 to 1 or -1 to 1
-- likewise, others from their least to their largest. options: count (32; pictures), columns, scale (so that pictures
-- are about 96 pixels), field (another than image), classes (names by label), mean and std (of transforms.normalize,
-- which is undone), range (a pair: of floats, what is black and white).
--
--     ty.plot.batch(loader:next(), { classes = classes }):save "batch.png"
--
---@param batch table|Tensor
---@param options? table
---@return ImageGrid
return function(batch, options)
  local o = arguments.read("plot.batch", options, { count = 32, columns = none, scale = none, field = none,
    classes = none, mean = none, std = none, range = none }, kinds)
  if ty.is_tensor(batch) then batch = { [o.field or "image"] = batch } end
  arguments.expect("plot.batch", "batch", batch, "a table")
  return ty.no_grad(function()
    local x, field = pictures_of(batch, o)
    local n = x:size(0)
    if x:numel() == 0 then fail("plot.batch: batch: expected pictures, got %s of no elements", field) end
    x = shown(x, o)
    local scale = o.scale or math.max(1, 96 // math.max(x:size(2), x:size(3)))
    x = enlarged(x, scale)
    local mask, boxes, size = batch.mask, batch.boxes, { x:size(2) // scale, x:size(3) // scale }
    local masked = ty.is_tensor(mask) and mask.ndim >= 3 and mask.ndim <= 4 and mask:size(-2) == size[1]
      and mask:size(-1) == size[2] and mask:size(0) >= n
    local boxed = ty.is_tensor(boxes) and boxes.ndim == 3 and boxes:size(2) == 4 and boxes:size(0) >= n
    if masked or boxed then x = x:expand(n, 3, x:size(2), x:size(3)):clone() end
    if masked then x = with_masks(x, mask, scale) end
    if boxed then
      local list = boxes:narrow(0, 0, n):to { dtype = "f64", device = "cpu" } * scale
      for i, of_picture in ipairs(list:tolist()) do
        for k, box in ipairs(of_picture) do draw_box(x:select(0, i - 1), box, k) end
      end
    end
    local labels, named = {}, false
    for i = 0, n - 1 do
      local text = text_of(batch, i, o)
      labels[i + 1], named = text or "", named or text ~= nil
    end
    return grid(x:round():to "u8", { columns = o.columns, labels = named and labels or nil })
  end)
end
