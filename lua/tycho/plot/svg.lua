--- Draws the shapes of a plot (plot/line.lua) as SVG text, with the same methods as plot/raster.lua.
local Canvas = {}
Canvas.__index = Canvas

local function css(color)
  return ("#%02x%02x%02x"):format(color[1] * 255 // 1, color[2] * 255 // 1, color[3] * 255 // 1)
end

local function escape(text)
  return (text:gsub("[&<>\"]", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }))
end

local function new(width, height, color)
  local self = setmetatable({ parts = {} }, Canvas)
  self:add('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" '
    .. 'font-family="sans-serif">', width, height, width, height)
  self:rectangle(0, 0, width, height, color)
  return self
end

function Canvas:add(format, ...) self.parts[#self.parts + 1] = format:format(...) end

function Canvas:rectangle(x, y, width, height, color)
  self:add('<rect x="%.2f" y="%.2f" width="%.2f" height="%.2f" fill="%s"/>', x, y, width, height, css(color))
end

function Canvas:polyline(points, color, width)
  local list = {}
  for i = 1, #points, 2 do list[#list + 1] = ("%.2f,%.2f"):format(points[i], points[i + 1]) end
  if #list == 1 then
    self:add('<circle cx="%.2f" cy="%.2f" r="%.2f" fill="%s"/>', points[1], points[2], width / 2 + 1, css(color))
    return
  end
  self:add('<polyline points="%s" fill="none" stroke="%s" stroke-width="%.2f" stroke-linejoin="round"/>',
    table.concat(list, " "), css(color), width)
end

function Canvas:text(x, y, text, color, options)
  local turn = options.turned and (' transform="rotate(-90 %.2f %.2f)"'):format(x, y) or ""
  self:add('<text x="%.2f" y="%.2f" font-size="%d" text-anchor="%s" fill="%s"%s>%s</text>', x, y,
    options.large and 20 or 15, options.anchor or "start", css(color), turn, escape(text))
end

function Canvas:finish() return table.concat(self.parts, "\n") .. "\n</svg>\n" end

return { new = new }
