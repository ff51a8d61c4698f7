--- Grids of images.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local font = require "tycho.plot.font"

local none = arguments.none
local kinds = { columns = "an integer >= 1", scale = "an integer >= 1", gap = "an integer >= 0",
  range = "a pair of finite numbers", labels = "a list", background = "a number in [0, 255]" }

--- A sheet of pictures, of ty.plot.grid.
---@class ImageGrid
---@field pixels Tensor  u8 [channels, height, width]
local ImageGrid = {}
ImageGrid.__index = ImageGrid

-- Images as u8 [n, c, h, w]: u8 stays; floats are mapped from `range` to 0..255.
local function to_bytes(images, range)
  if images.dtype == "u8" then return images end
  local low, high = range[1], range[2]
  return ((images:to "f32" - low) * (255 / (high - low))):clamp(0, 255):round():to "u8"
end

local function label_strip(labels, first, columns, cell, gap, width)
  local lines, line_height = 1, font.height + font.depth + 2
  for column = 0, columns - 1 do
    local _, breaks = tostring(labels[first + column + 1] or ""):gsub("\n", "")
    lines = math.max(lines, breaks + 1)
  end
  local height = lines * line_height + 2
  local mask = {}
  for i = 1, height * width do mask[i] = 0 end
  for column = 0, columns - 1 do
    local text = labels[first + column + 1]
    if text ~= nil then
      local top = 3
      for line in (tostring(text) .. "\n"):gmatch "(.-)\n" do
        local left = gap + column * (cell + gap) + math.max(0, (cell - font.text_width(line, 1)) // 2)
        font.draw(line, left, top, 1, function(x, y)
          if x < width then mask[y * width + x + 1] = 1 end
        end)
        top = top + line_height
      end
    end
  end
  return ty.tensor(mask, { dtype = "u8" }):reshape(1, height, width) * 255
end

--- One picture of many. images: [n, c, h, w] (or [n, h, w]), c 1 or 3, u8 or floats in `range`.
-- options: columns (about square), scale (1: pixels per pixel), gap (2), range ({ -1, 1 }), invert (false), labels
-- (list of texts, which may have several lines), background (0 to 255: 60).
---@return ImageGrid grid  grid:save "samples.png"
local function grid(images, options)
  local o = arguments.read("plot.grid", options, { columns = none, scale = 1, gap = 2, range = { -1, 1 },
    invert = false, labels = none, background = 60 }, kinds)
  arguments.expect("plot.grid", "images", images, "a tensor")
  if images.ndim == 3 then images = images:unsqueeze(1) end
  local shape = images.shape
  if #shape ~= 4 or (shape[2] ~= 1 and shape[2] ~= 3) or shape[1] == 0 then
    arguments.fail("plot.grid: images: expected [n, 1 or 3, h, w] with n > 0, got [%s]", table.concat(shape, ", "))
  end
  local n, channels = shape[1], shape[2]
  local columns = math.min(n, o.columns or math.ceil(math.sqrt(n)))
  local rows = (n + columns - 1) // columns
  local bytes = to_bytes(images:detach():to { device = "cpu" }, o.range)
  if o.invert then bytes = 255 - bytes:to "i16" end
  local h, w = shape[3] * o.scale, shape[4] * o.scale
  -- Repeating pixels by broadcasting: [n, c, h, 1, w, 1] to [n, c, h, scale, w, scale].
  local x = bytes:to("f32"):reshape(n, channels, shape[3], 1, shape[4], 1)
    :expand(n, channels, shape[3], o.scale, shape[4], o.scale):reshape(n, channels, h, w)
  if rows * columns > n then
    x = ty.concat({ x, ty.full({ rows * columns - n, channels, h, w }, o.background) }, 0)
  end
  x = ty.pad(x, { o.gap, 0, o.gap, 0 }, "constant", o.background)
  local strips = {}
  local width = columns * (w + o.gap)
  for row = 0, rows - 1 do
    if o.labels then
      local strip = label_strip(o.labels, row * columns, columns, w, o.gap, width):to "f32"
      strips[#strips + 1] = ty.maximum(strip, o.background):expand(channels, strip.shape[2], width)
    end
    strips[#strips + 1] = x:narrow(0, row * columns, columns):permute(1, 2, 0, 3):reshape(channels, h + o.gap, width)
  end
  local whole = ty.pad(ty.concat(strips, 1), { 0, o.gap, 0, o.gap }, "constant", o.background)
  return setmetatable({ pixels = whole:to "u8" }, ImageGrid)
end

--- Writes a .png file; returns self.
function ImageGrid:save(path)
  arguments.expect("ImageGrid:save", "path", path, "a string")
  if not path:match "%.png$" then arguments.fail("ImageGrid:save: path: expected the ending .png, got %s", path) end
  ty.io.save_image(path, self.pixels)
  return self
end

return grid
