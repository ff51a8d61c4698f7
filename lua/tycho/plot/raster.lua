--- Draws the shapes of a plot (plot/line.lua) into pixels: lines with smooth edges, rectangles, text.
local ty = require "tycho"
local font = require "tycho.plot.font"

local Canvas = {}
Canvas.__index = Canvas

local function new(width, height, color)
  local self = setmetatable({ width = width, height = height, plane = { {}, {}, {} } }, Canvas)
  for c = 1, 3 do
    local plane, value = self.plane[c], color[c]
    for i = 1, width * height do plane[i] = value end
  end
  return self
end

-- Mixes a color into pixel (x, y), both from 0, by `cover` in [0, 1]; outside is ignored.
function Canvas:blend(x, y, color, cover)
  if x < 0 or y < 0 or x >= self.width or y >= self.height or cover <= 0 then return end
  local i = y * self.width + x + 1
  for c = 1, 3 do
    local plane = self.plane[c]
    plane[i] = plane[i] + (color[c] - plane[i]) * cover
  end
end

function Canvas:rectangle(x, y, width, height, color)
  for row = math.floor(y), math.ceil(y + height) - 1 do
    local cover_y = math.min(row + 1, y + height) - math.max(row, y)
    for column = math.floor(x), math.ceil(x + width) - 1 do
      local cover_x = math.min(column + 1, x + width) - math.max(column, x)
      self:blend(column, row, color, cover_x * cover_y)
    end
  end
end

-- Coverage of a pixel by distance from the segment: 1 inside, falling to 0 over one pixel at the edge. Coverage of a
-- whole polyline is the maximum over its segments, so that joints are not mixed twice.
local function cover_segment(cover, width, height, x0, y0, x1, y1, radius)
  local dx, dy = x1 - x0, y1 - y0
  local length2 = dx * dx + dy * dy
  local reach = radius + 1
  local top = math.max(0, math.floor(math.min(y0, y1) - reach))
  local bottom = math.min(height - 1, math.ceil(math.max(y0, y1) + reach))
  for y = top, bottom do
    local left = math.max(0, math.floor(math.min(x0, x1) - reach))
    local right = math.min(width - 1, math.ceil(math.max(x0, x1) + reach))
    if math.abs(dy) > 1e-9 then -- only the part of the row near the line
      local a, b = (y - reach - y0) / dy, (y + 1 + reach - y0) / dy
      if a > b then a, b = b, a end
      a, b = math.max(0, a), math.min(1, b)
      local xa, xb = x0 + a * dx, x0 + b * dx
      left = math.max(left, math.floor(math.min(xa, xb) - reach))
      right = math.min(right, math.ceil(math.max(xa, xb) + reach))
    end
    for x = left, right do
      local px, py = x + 0.5 - x0, y + 0.5 - y0
      local t = length2 > 0 and math.max(0, math.min(1, (px * dx + py * dy) / length2)) or 0
      local distance = math.sqrt((px - t * dx) ^ 2 + (py - t * dy) ^ 2)
      local value = radius + 0.5 - distance
      if value > 0 then
        local i = y * width + x
        if value > 1 then value = 1 end
        if value > (cover[i] or 0) then cover[i] = value end
      end
    end
  end
end

function Canvas:polyline(points, color, width)
  local cover = {}
  local radius = width / 2
  for i = 1, #points - 2, 2 do
    cover_segment(cover, self.width, self.height, points[i], points[i + 1], points[i + 2] or points[i],
      points[i + 3] or points[i + 1], radius)
  end
  if #points == 2 then -- a lone point
    cover_segment(cover, self.width, self.height, points[1], points[2], points[1], points[2], radius + 1)
  end
  for i, value in pairs(cover) do self:blend(i % self.width, i // self.width, color, value) end
end

-- anchor: "start", "middle" or "end" of the text is at x; y is its baseline. Turned text reads upwards.
function Canvas:text(x, y, text, color, options)
  local scale = options.large and 3 or 2
  local length = font.text_width(text, scale)
  local shift = options.anchor == "middle" and length / 2 or options.anchor == "end" and length or 0
  local function set_at(px, py)
    if options.turned then
      self:blend(math.floor(x) + py - font.height * scale, math.floor(y + shift) - px, color, 1)
    else
      self:blend(math.floor(x - shift) + px, math.floor(y) - font.height * scale + py, color, 1)
    end
  end
  font.draw(text, 0, 0, scale, set_at)
end

--- The pixels as a u8 tensor [3, height, width].
function Canvas:pixels()
  local planes = {}
  for c = 1, 3 do planes[c] = ty.tensor(self.plane[c], { dtype = "f32" }):reshape(self.height, self.width) end
  return (ty.stack(planes, 0) * 255):round():clamp(0, 255):to "u8"
end

return { new = new }
