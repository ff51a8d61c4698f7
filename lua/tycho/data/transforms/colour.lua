--- What pixels are: light and colour, blur and noise, erased parts, and the floats that networks take. Masks and boxes
-- stay. Images of bytes stay bytes, those of floats count from 0 to 1.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local frame = require "tycho.data.transforms.frame"

local M = {}

local options, transform, beside = frame.options, frame.transform, frame.beside

local LUMA = { 0.299, 0.587, 0.114 } -- ITU-R BT.601

-- The lightness [n, 1, h, w] of colours; gray is its own.
local function luma(who, x)
  if x:size(1) == 1 then return x end
  if x:size(1) ~= 3 then
    arguments.fail("transforms.%s: batch: expected images of 1 or 3 channels, got %d", who, x:size(1))
  end
  local weights = ty.tensor(LUMA, { dtype = x.dtype, device = x.device }):reshape(1, 3, 1, 1)
  return (x * weights):sum({ 1 }, true)
end

-- Away from or towards `base`, by a factor for each picture.
local function blend(x, base, factor) return (base + (x - base) * factor):clamp(0, 1) end

--- Lighter by a factor [n].
function M.brighten(x, factor) return (x * beside(factor, x)):clamp(0, 1) end

--- Away from the mean lightness by a factor [n].
function M.contrast(x, factor)
  return blend(x, luma("contrast", x):mean({ 1, 2, 3 }, true), beside(factor, x))
end

--- Away from gray by a factor [n].
function M.saturate(x, factor) return blend(x, luma("saturation", x), beside(factor, x)) end

--- Hues turned by shares [n] of the whole circle, through HSV.
function M.turn_hue(x, shift)
  if x:size(1) ~= 3 then return x end
  local r, g, b = x:select(1, 0), x:select(1, 1), x:select(1, 2)
  local value, least = x:max { 1 }, x:min { 1 }
  local chroma = value - least
  local safe = ty.where(chroma:eq(0), 1.0, chroma)
  local hue = ty.where(value:eq(r), (g - b) / safe,
    ty.where(value:eq(g), (b - r) / safe + 2, (r - g) / safe + 4)) / 6
  hue = (hue + shift:to { dtype = x.dtype, device = x.device }:reshape(-1, 1, 1)) * 6
  -- Each colour is the value less the chroma times a trapezoid of the hue.
  local channels = {}
  for i, offset in ipairs { 5, 3, 1 } do
    local k = (hue + offset):remainder(6)
    channels[i] = value - chroma * ty.minimum(k, 4 - k):clamp(0, 1)
  end
  return ty.stack(channels, 1)
end

--- Light and colour drawn for each picture, in a random order for each batch. options: brightness, contrast, saturation
-- (0; x: factors from 1 - x to 1 + x, or { low, high }), hue (0; x: turned by -x to x of the circle, or { low, high }
-- up to 0.5), p (1).
---@param given table
function M.color_jitter(given)
  local kind = "a number >= 0 or a list of numbers"
  local o = options("color_jitter", given, { brightness = 0, contrast = 0, saturation = 0, hue = 0, p = 1 },
    { brightness = kind, contrast = kind, saturation = kind, p = "a number in [0, 1]",
      hue = "a number in [0, 0.5] or a list of numbers in [-0.5, 0.5]" })
  local list = {}
  for _, name in ipairs { "brightness", "contrast", "saturation" } do
    local range = frame.range_of("color_jitter", name, o[name], 1)
    range[1] = math.max(range[1], 0)
    local change = ({ brightness = M.brighten, contrast = M.contrast, saturation = M.saturate })[name]
    if range[1] ~= 1 or range[2] ~= 1 then list[#list + 1] = { change, range } end
  end
  local hue = frame.range_of("color_jitter", "hue", o.hue)
  if hue[1] ~= 0 or hue[2] ~= 0 then list[#list + 1] = { M.turn_hue, hue } end
  local p = o.p
  return transform("color_jitter", function(batch)
    local n = batch.image:size(0)
    local order = #list > 0 and ty.randperm(#list):tolist() or {}
    local chosen = frame.chosen(n, p)
    local image = frame.as_floats(batch.image, function(x)
      for _, at in ipairs(order) do
        local change, range = table.unpack(list[at + 1])
        x = change(x, frame.draws(n, range[1], range[2]))
      end
      return x
    end)
    batch.image = p == 1 and image or frame.where(chosen, image, batch.image)
  end)
end

-- A transform of pictures as floats, done to a share p of them.
local function sometimes(who, p, fn)
  p = frame.probability(who, p)
  return transform(who, function(batch)
    local chosen = frame.chosen(batch.image:size(0), p)
    batch.image = frame.where(chosen, frame.as_floats(batch.image, fn), batch.image)
  end)
end

--- Colours become gray, as many channels as before, in a share p of the pictures (1).
---@param p? number
function M.grayscale(p)
  return sometimes("grayscale", p == nil and 1 or p, function(x) return luma("grayscale", x):expand(x.shape) end)
end

--- Light becomes dark in a share p of the pictures (0.5).
---@param p? number
function M.invert(p) return sometimes("invert", p, function(x) return 1 - x end) end

--- What is at least `threshold` (of 0 to 1) is inverted, in a share p of the pictures (0.5).
---@param threshold? number
---@param p? number
function M.solarize(threshold, p)
  threshold = arguments.expect("transforms.solarize", "threshold", threshold or 0.5, "a number")
  return sometimes("solarize", p, function(x) return ty.where(x:ge(threshold), 1 - x, x) end)
end

--- Only the upper `bits` of each byte stay, in a share p of the pictures (0.5).
---@param bits integer
---@param p? number
function M.posterize(bits, p)
  arguments.expect("transforms.posterize", "bits", bits, "an integer in [1, 8]")
  local step = 2.0 ^ (8 - bits)
  return sometimes("posterize", p, function(x) return ((x * 255 / step + 1e-4):floor() * step / 255) end)
end

--- The darkest of each channel becomes 0 and the lightest 1, in a share p of the pictures (0.5).
---@param p? number
function M.autocontrast(p)
  return sometimes("autocontrast", p, function(x)
    local low, high = x:min({ 2, 3 }, true), x:max({ 2, 3 }, true)
    local flat = high:eq(low)
    return ty.where(flat, x, (x - low) / ty.where(flat, 1.0, high - low))
  end)
end

--- Each channel so that its lightness is spread evenly (histogram equalization), in a share p of the pictures (0.5).
---@param p? number
function M.equalize(p)
  return sometimes("equalize", p, function(x)
    local n, channels, h, w = table.unpack(x.shape)
    local level = (x * 255):round():clamp(0, 255):to("i64"):reshape(n * channels, h * w)
    local counts = ty.zeros({ n * channels, 256 }, { dtype = "i64", device = x.device })
      :scatter_add(1, level, ty.ones_like(level))
    -- The last level that occurs has no share in the steps: what is lightest becomes 255.
    local sums = counts:cumsum(1)
    local last = ty.where(counts:gt(0), ty.arange(256, { device = x.device }), -1):max({ 1 }, true)
    local step = (h * w - counts:gather(1, last)) // 255
    local before = sums - counts
    local table_of = ((before + step // 2) // step:clamp(1)):clamp(0, 255)
    local y = table_of:gather(1, level):to(x.dtype):reshape(x.shape) / 255
    return ty.where(step:eq(0):reshape(n, channels, 1, 1), x, y)
  end)
end

-- Each channel filtered by a kernel [1, 1, k, k], its borders reflected.
local function filtered(x, kernel)
  local n, channels, h, w = table.unpack(x.shape)
  local reach = kernel:size(-1) // 2
  local padded = ty.pad(x:reshape(n * channels, 1, h, w), { reach, reach, reach, reach }, "replicate")
  return ty.conv2d(padded, kernel:to { dtype = x.dtype, device = x.device }):reshape(n, channels, h, w)
end

--- Away from a smoothed picture by a factor: 0 blurs, 1 changes nothing, 2 sharpens; in a share p of the pictures
-- (0.5).
---@param factor number
---@param p? number
function M.sharpness(factor, p)
  arguments.expect("transforms.sharpness", "factor", factor, "a number >= 0")
  return sometimes("sharpness", p, function(x)
    return blend(x, filtered(x, ty.tensor { { { { 1, 1, 1 }, { 1, 5, 1 }, { 1, 1, 1 } } } } / 13.0), factor)
  end)
end

--- A blur as wide as is drawn for each batch. options: sigma ({ 0.1, 2 }; pixels), size (0; the kernel's side, odd; 0:
-- as wide as sigma takes), p (0.5).
---@param given? {sigma: number|number[], size: integer, p: number}
function M.gaussian_blur(given)
  local o = options("gaussian_blur", given, { sigma = { 0.1, 2 }, size = 0, p = 0.5 },
    { sigma = "a number > 0 or a list of numbers > 0", size = "an integer in [0, 255]", p = "a number in [0, 1]" })
  local sigma = type(o.sigma) == "number" and { o.sigma, o.sigma } or frame.range_of("gaussian_blur", "sigma", o.sigma)
  if o.size > 0 and o.size % 2 == 0 then
    arguments.fail("transforms.gaussian_blur: size: expected an odd number, got %d", o.size)
  end
  return sometimes("gaussian_blur", o.p, function(x)
    local width = frame.draws(1, sigma[1], sigma[2]):item()
    local reach = o.size > 0 and o.size // 2 or math.max(1, math.ceil(3 * width))
    local line = (ty.arange(-reach, reach + 1):to("f64") / width):square():mul(-0.5):exp()
    line = line / line:sum()
    return filtered(filtered(x, line:reshape(1, 1, 1, -1):expand(1, 1, 1, 2 * reach + 1)
      * ty.one_hot(ty.tensor { reach }, 2 * reach + 1):to("f64"):reshape(1, 1, -1, 1)),
      line:reshape(1, 1, -1, 1) * ty.one_hot(ty.tensor { reach }, 2 * reach + 1):to("f64"):reshape(1, 1, 1, -1))
  end)
end

--- Normal noise added to every pixel. std: of 0 to 1.
---@param std number
---@param p? number
function M.gaussian_noise(std, p)
  arguments.expect("transforms.gaussian_noise", "std", std, "a number >= 0")
  return sometimes("gaussian_noise", p, function(x) return (x + ty.randn_like(x) * std):clamp(0, 1) end)
end

--- A box of a share p of the pictures becomes `value` (Zhong et al. 2020). options: p (0.5), scale ({ 0.02, 0.33 };
-- shares of the area), ratio ({ 0.3, 3.3 }; width to height), value (0, or "noise").
---@param given? {p: number, scale: number[], ratio: number[], value: number|string}
function M.random_erasing(given)
  local o = options("random_erasing", given, { p = 0.5, scale = { 0.02, 0.33 }, ratio = { 0.3, 3.3 }, value = 0 },
    { p = "a number in [0, 1]", scale = "a pair of numbers in [0, 1]", ratio = "a pair of numbers > 0",
      value = 'a finite number or "noise"' })
  return transform("random_erasing", function(batch)
    local x = batch.image
    local n, _, h, w = table.unpack(x.shape)
    local function column(t) return t:to { device = x.device }:reshape(n, 1, 1, 1) end
    local area = frame.draws(n, o.scale[1], o.scale[2]) * (h * w)
    local aspect = frame.draws(n, math.log(o.ratio[1]), math.log(o.ratio[2])):exp()
    local height, width = (area / aspect):sqrt():round():clamp(1, h), (area * aspect):sqrt():round():clamp(1, w)
    local top = (ty.rand(n) * (h - height + 1)):floor()
    local left = (ty.rand(n) * (w - width + 1)):floor()
    local rows = ty.arange(h, { device = x.device }):reshape(1, 1, h, 1)
    local columns = ty.arange(w, { device = x.device }):reshape(1, 1, 1, w)
    local function inside(at, from, size) return at:ge(column(from)):logical_and(at:lt(column(from + size))) end
    local erased = inside(rows, top, height):logical_and(inside(columns, left, width))
      :logical_and(column(frame.chosen(n, o.p)))
    local value = o.value
    if value == "noise" then
      value = x.dtype == "u8" and ty.randint(0, 256, x.shape):to { dtype = "u8", device = x.device } or ty.randn_like(x)
    end
    batch.image = ty.where(erased, value, x):to(x.dtype)
  end)
end

--- Floats from 0 to 1 of bytes.
function M.to_float()
  return transform("to_float", function(batch)
    if batch.image.dtype == "u8" then batch.image = batch.image:to "f32" / 255 end
  end)
end

--- Floats with the mean taken off and divided by the standard deviation of each channel; bytes count as 0 to 1. The
-- defaults are those of ImageNet.
---@param mean? number[]
---@param std? number[]
function M.normalize(mean, std)
  mean = arguments.expect("transforms.normalize", "mean", mean or { 0.485, 0.456, 0.406 }, "a list of numbers")
  std = arguments.expect("transforms.normalize", "std", std or { 0.229, 0.224, 0.225 }, "a list of numbers > 0")
  if #mean ~= #std then
    arguments.fail("transforms.normalize: std: expected %d numbers like mean, got %d", #mean, #std)
  end
  return transform("normalize", function(batch)
    local x = batch.image
    if x:size(1) ~= #mean then
      arguments.fail("transforms.normalize: batch: expected images of %d channels, got %d", #mean, x:size(1))
    end
    local unit = x.dtype == "u8" and 255 or 1
    local scale, shift = {}, {}
    for i = 1, #mean do scale[i], shift[i] = 1 / (unit * std[i]), -mean[i] / std[i] end
    local dtype = x.dtype == "u8" and "f32" or x.dtype
    local function channels(list) return ty.tensor(list, { dtype = dtype, device = x.device }):reshape(1, -1, 1, 1) end
    local y = x:to(dtype)
    if y == x then y = x:clone() end
    batch.image = y:mul_(channels(scale)):add_(channels(shift)) -- in place: batches are large
  end)
end

return M
