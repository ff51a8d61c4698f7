-- Draws docs/transforms.png: some transforms of pictures, each on three photographs.
--
--   tycho docs/transforms.lua
local ty = require "tycho"
local t = ty.data.transforms

ty.manual_seed(3)
local here = (arg and arg[0] or "docs/"):match "^(.*/)" or "./"
local photos = {}
for i, name in ipairs { "astronaut", "cat", "coffee" } do
  local path = here .. "../datasets/photos/" .. name .. ".jpg"
  photos[i] = ty.io.load_image(path, { channels = 3, size = { 96, 96 } })
end
local batch = { image = ty.stack(photos, 0), label = ty.arange(3) }
local list = {
  t.resize(96), t.random_resized_crop(96), t.affine { degrees = 30, scale = { 0.8, 1.1 }, shear = 10 },
  t.perspective { p = 1 }, t.color_jitter { brightness = 0.4, contrast = 0.4, saturation = 0.6, hue = 0.2 },
  t.equalize(1), t.gaussian_blur { sigma = 2, p = 1 }, t.random_erasing { p = 1, value = "noise" },
  t.cutmix { classes = 3 }, t.rand_augment { magnitude = 0.6 },
}
local rows = {}
for k = 0, 2 do
  for i, transform in ipairs(list) do
    rows[k * #list + i] = transform(batch).image[k]
  end
end
ty.plot.grid(ty.stack(rows, 0):to "f32" / 127.5 - 1, { columns = #list }):save(here .. "transforms.png")
