-- Transforms of pictures (lua/tycho/data/transforms): beside torchvision's, what masks and boxes do, draws and workers.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"
local t = ty.data.transforms
local test, equal, fails = check.test, check.equal, check.fails

local here = arg[0]:match(".*/") or "./"
local want = ty.io.load_npz(here .. "../fixtures/transforms.npz")

-- The largest difference, away from `rim` pixels at the borders.
local function distance(x, y, rim)
  if rim then
    local place = (":, :, %d:-%d, %d:-%d"):format(rim, rim, rim, rim)
    x, y = x[place], y[place]
  end
  equal(x.shape, y.shape)
  return (x:to "f64" - y:to "f64"):abs():max():item()
end

test("as torchvision has them", function()
  local x = want.floats
  local list = {
    { "resize", t.resize { 9, 13 }, 5e-4 }, { "resize_up", t.resize { 31, 33 }, 5e-4 },
    { "bicubic", t.resize({ 9, 13 }, "bicubic"), 2e-3 },
    { "rotate", t.rotate { 30, 30 }, 1e-4 },
    { "hue", t.color_jitter { hue = { 0.2, 0.2 } }, 1e-6 },
    { "brightness", t.color_jitter { brightness = { 1.4, 1.4 } }, 1e-6 },
    { "contrast", t.color_jitter { contrast = { 0.6, 0.6 } }, 1e-4 },
    { "saturation", t.color_jitter { saturation = { 1.7, 1.7 } }, 2e-4 },
    { "solarize", t.solarize(0.5, 1), 1e-12 }, { "autocontrast", t.autocontrast(1), 1e-9 },
    { "normalize", t.normalize(), 1e-9 },
  }
  for _, case in ipairs(list) do
    local d = distance(case[2](x), want[case[1]])
    check.ok(d <= case[3], ("%s: off by %.3g"):format(case[1], d))
  end
  -- Its borders are kept, or reflected, where ours repeat the last pixel.
  check.ok(distance(t.sharpness(2, 1)(x), want.sharpness, 1) < 1e-6, "sharpness")
  check.ok(distance(t.gaussian_blur { sigma = 1.5, size = 7, p = 1 }(x), want.blur, 3) < 1e-6, "blur")
  check.ok(distance(t.posterize(3, 1)(want.image), want.posterize) == 0, "posterize")
  check.ok(distance(t.equalize(1)(want.image), want.equalize) == 0, "equalize")
  local crop = ty.crop_resize(x, ty.tensor { { 3, 2, 15, 12 } }, { 8, 8 })
  check.ok(distance(crop, want.crop) < 5e-4, "crop_resize")
end)

test("affine maps as torchvision's matrix", function()
  local matrix = require("tycho.data.transforms.geometry").affine_matrices(24, 20,
    ty.tensor({ -math.rad(20) }), ty.tensor { 0.8 }, ty.tensor { math.rad(12) }, ty.tensor { 0.0 }, ty.tensor { 3.0 },
    ty.tensor { -2.0 })
  local y = ty.warp(want.floats, matrix, { 24, 20 })
  check.ok(distance(y, want.affine) < 2e-2, ("off by %g"):format(distance(y, want.affine)))
end)

-- A picture with a white rectangle, its mask, and its box.
local function scene()
  local image = ty.zeros({ 3, 40, 30 }, { dtype = "u8" })
  image[":, 10:20, 5:17"] = 255
  local mask = ty.zeros({ 40, 30 }, { dtype = "u8" })
  mask["10:20, 5:17"] = 1
  return { image = image, mask = mask, boxes = ty.tensor { { 5.0, 10, 17, 20 } }, label = 3 }
end

-- The box that pixels of a mask span.
local function span(mask)
  local at = mask:nonzero()
  local low, high = at:min({ 0 }):tolist(), at:max({ 0 }):tolist()
  return { low[2], low[1], high[2] + 1, high[1] + 1 }
end

test("masks and boxes go with the picture", function()
  local list = { hflip = t.horizontal_flip(1), vflip = t.vertical_flip(1), quarter = t.rotate { 90, 90 },
    crop = t.random_crop { 36, 28 }, padded = t.random_crop({ 40, 30 }, { padding = 6 }), resized = t.resize { 80, 60 },
    shifted = t.affine { degrees = 0, translate = { 0.1, 0.1 } } }
  for name, fn in pairs(list) do
    local y = fn(scene())
    equal({ y.image.ndim, y.mask.ndim, y.boxes.ndim, y.label }, { 3, 2, 2, 3 }, name)
    local box = span(y.mask)
    for i, side in ipairs(y.boxes[0]:tolist()) do
      check.ok(math.abs(side - box[i]) <= (name == "quarter" and 0.51 or 0.01), ("%s: side %d: %g, %g"):format(name, i,
        side, box[i]))
    end
    -- What is white is the mask, but for a rim where pixels mix.
    local white = y.image[0]:gt(127):to "u8"
    check.ok((white:to "f32" - y.mask:to "f32"):abs():sum():item() <= 60, name)
  end
  local cut = t.affine { translate = { 0.9, 0.9 } }
  ty.manual_seed(4)
  for _ = 1, 20 do
    local y = cut(scene())
    local b = y.boxes[0]:tolist()
    check.ok(b[1] >= 0 and b[2] >= 0 and b[3] <= 30 and b[4] <= 40 and b[1] <= b[3] and b[2] <= b[4])
  end
end)

test("a picture has draws of its own, and a batch the same ones by its seed", function()
  local image = want.image:expand(16, 3, 24, 20)
  local all = t.compose(t.random_resized_crop(16), t.horizontal_flip(), t.rand_augment(), t.random_erasing())
  local function draw(seed)
    ty.manual_seed(seed)
    return all(image)
  end
  local a, b = draw(7), draw(7)
  check.ok(ty.equal(a, b) and not ty.equal(a, draw(8)))
  local different = 0
  for i = 1, 15 do different = different + (ty.equal(a[0], a[i]) and 0 or 1) end
  check.ok(different >= 14)
  ty.manual_seed(0)
  local flipped = 0
  local flip = t.horizontal_flip(0.25)
  local many = want.image:expand(2000, 3, 24, 20)["..., :1, :"]:contiguous()
  local y = flip(many)
  for i = 0, 1999 do flipped = flipped + (ty.equal(y[i], many[i]) and 0 or 1) end
  check.ok(flipped > 420 and flipped < 580, "a quarter is flipped: " .. flipped)
end)

test("mixtures: shares sum to 1 and are those of the pixels", function()
  local n = 6
  local image = ty.arange(n):to("u8"):reshape(n, 1, 1, 1):expand(n, 1, 20, 20) * 40
  for name, fn in pairs { mixup = t.mixup { classes = n, alpha = 1 }, cutmix = t.cutmix { classes = n } } do
    for seed = 1, 5 do
      ty.manual_seed(seed)
      local y = fn { image = image, label = ty.arange(n) }
      check.close(y.target:sum({ 1 }):tolist(), { 1, 1, 1, 1, 1, 1 }, 1e-6)
      local mean = y.image:to("f32"):mean { 1, 2, 3 }
      local by_target = (y.target * ty.arange(n):to "f32"):sum { 1 } * 40
      check.ok((mean - by_target):abs():max():item() < (name == "mixup" and 0.51 or 0.1), name)
    end
  end
  local y = t.mosaic()(scene())
  equal({ y.image.shape, y.boxes.shape }, { { 3, 40, 30 }, { 4, 4 } })
end)

test("through a DataLoader's threads", function()
  local set = ty.data.TensorDataset { image = want.image:expand(32, 3, 24, 20):clone(), label = ty.arange(32) }
  local jitter = t.color_jitter { brightness = 0.3, hue = 0.1 }
  local through = ty.data.transform(set, t.random_crop(16), jitter, t.normalize())
  local sums = {}
  for i, workers in ipairs { 0, 2 } do
    local loader = ty.data.DataLoader(through, { batch_size = 8, shuffle = true, seed = 3, workers = workers })
    sums[i] = {}
    for batch in loader do table.insert(sums[i], batch.image:sum():item()) end
    loader:close()
  end
  equal(sums[1], sums[2])
  equal(#sums[1], 4)
  equal(through:get(2).image.shape, { 3, 16, 16 })
end)

local function write(path, bytes)
  local file <close> = assert(io.open(path, "wb"))
  file:write(bytes)
end

test("folders of pictures at a size", function()
  local folder = os.tmpname()
  os.remove(folder)
  ty.io.mkdir(folder .. "/a")
  ty.io.mkdir(folder .. "/b")
  ty.io.save_image(folder .. "/a/1.png", want.image[0])
  write(folder .. "/b/2.jpg", ty.io.read(here .. "../../datasets/photos/cat.jpg"))
  for _, crop in ipairs { "center", "random", "none" } do
    local set = ty.data.image_folder(folder, { size = { 32, 24 }, crop = crop, channels = 3 })
    local batch = ty.data.DataLoader(set, { batch_size = 2 }):next()
    equal(batch.image.shape, { 2, 3, 32, 24 }, crop)
    equal(batch.label:tolist(), { 0, 1 })
  end
  local set = ty.data.image_folder(folder, { size = 16, channels = 3 })
  local middle = ty.crop_resize(want.image, ty.tensor { { 2, 0, 20, 20 } }, { 16, 16 })[0]
  check.ok(ty.equal(set:get(0).image, middle))
  write(folder .. "/b/3.jpg", "\xff\xd8\xff no picture")
  set = ty.data.image_folder(folder, { size = 16 })
  fails(function() set:get(2) end, "3.jpg: jpeg")
  fails(function() ty.data.image_folder(folder, { size = 0 }) end, "size: expected")
  fails(function() ty.data.image_folder(folder, { size = 16, crop = "left" }) end, 'crop: expected "center"')
  for _, name in ipairs { "a/1.png", "b/2.jpg", "b/3.jpg", "a", "b", "" } do os.remove(folder .. "/" .. name) end
end)

test("wrong use", function()
  fails(function() t.resize(32)(ty.zeros(3)) end, "transforms.resize: batch: expected a table with `image`")
  fails(function() t.resize(32)(ty.zeros({ 3, 4, 4 }, { dtype = "i64" })) end, "expected an image of u8 or floats")
  fails(function() t.resize "big" end, "transforms.resize: size: expected")
  fails(function() t.resize(8, "lanczos") end, "transforms.resize: mode")
  fails(function() t.center_crop(100)(want.image) end, "expected at most the 24 x 20 pixels of the pictures")
  fails(function() t.mixup {} end, "transforms.mixup: classes: expected an integer >= 1, got nil")
  fails(function() t.cutmix { classes = 3 }(want.image) end, "expected a field `label`")
  fails(function() t.normalize({ 0.5 }, { 0.5 })(want.image) end, "expected images of 1 channels, got 3")
  fails(function() t.horizontal_flip(2) end, "transforms.horizontal_flip: p: expected a number in [0, 1]")
  fails(function() t.compose(t.invert(), 3) end, "transforms.compose: transform 2: expected a function")
  fails(function() t.color_jitter { hue = 0.7 } end, "hue")
  local set = ty.data.TensorDataset { image = want.image }
  fails(function() ty.data.transform(set, 1) end, "transform 1: expected a function")
end)

check.finish()
