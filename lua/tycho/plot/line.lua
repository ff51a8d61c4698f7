--- Line plots.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local font = require "tycho.plot.font"
local ticks = require "tycho.plot.ticks"

-- Distinct for readers with color blindness too. Okabe and Ito 2008.
local palette = {
  { 0.00, 0.45, 0.70 }, { 0.84, 0.37, 0.00 }, { 0.00, 0.62, 0.45 }, { 0.80, 0.47, 0.65 }, { 0.90, 0.62, 0.00 },
  { 0.34, 0.71, 0.91 }, { 0.30, 0.30, 0.30 },
}
local ink, grid_color, white = { 0.15, 0.15, 0.15 }, { 0.88, 0.88, 0.88 }, { 1, 1, 1 }

local none = arguments.none
local kinds = { series = "a list of tables", label = "a string", x_range = "a pair of finite numbers",
  y_range = "a pair of finite numbers", width = "an integer in [100, 16384]", height = "an integer in [100, 16384]" }

---@class LinePlot
local LinePlot = {}
LinePlot.__index = LinePlot

local function numbers(who, values)
  if ty.is_tensor(values) then values = values:to("f64"):flatten():tolist() end
  return arguments.expect("plot.line", who, values, "a tensor or a list of numbers")
end

local function finite(v) return v == v and v > -math.huge and v < math.huge end

-- Pairs x, y on the axes' scales; false where there is a gap.
local function points_of(series, log_x, log_y)
  local points = {}
  for i, y in ipairs(series.y) do
    local x = series.x and series.x[i] or i - 1
    if log_x then x = x > 0 and math.log(x, 10) or 0 / 0 end
    if log_y then y = y > 0 and math.log(y, 10) or 0 / 0 end
    points[i] = x and finite(x) and finite(y) and { x, y }
  end
  return points
end

-- More points than pixels: of each stretch only the first, lowest, highest and last are drawn.
local function thin(points, limit)
  if #points <= limit then return points end
  local result, size = {}, math.ceil(#points / (limit // 4))
  for start = 1, #points, size do
    local stop = math.min(#points, start + size - 1)
    local low, high
    for i = start, stop do
      local p = points[i]
      if p and (not low or p[2] < points[low][2]) then low = i end
      if p and (not high or p[2] > points[high][2]) then high = i end
    end
    local a, b = low, high
    if a and a > b then a, b = b, a end
    for _, i in ipairs { start, a or start, b or start, stop } do result[#result + 1] = points[i] end
  end
  return result
end

local function range_of(all, axis)
  local low, high = math.huge, -math.huge
  for _, points in ipairs(all) do
    for _, p in ipairs(points) do
      if p then low, high = math.min(low, p[axis]), math.max(high, p[axis]) end
    end
  end
  if low > high then return 0, 1 end
  if low == high then
    local margin = low == 0 and 1 or math.abs(low) * 0.1
    return low - margin, high + margin
  end
  return low, high
end

--- A plot of one or more lines. options:
--   y: list or 1-d tensor, x: the same (default 0, 1, ...); or series = { { y =, x =, label =, color = { r, g, b } },
-- ... };
--   title, x_label, y_label, log_x, log_y, x_range, y_range ({ low, high }), width (900), height (540) in pixels.
---@param options table
---@return LinePlot plot  plot:save "loss.svg" or "loss.png"
local function line(options)
  local o = arguments.read("plot.line", options, { x = none, y = none, series = none, title = "", x_label = "",
    y_label = "", label = none, log_x = false, log_y = false, x_range = none, y_range = none, width = 900, height = 540 },
    kinds)
  local given = o.series or { { x = o.x, y = o.y, label = o.label } }
  o.series = {}
  for i, s in ipairs(given) do
    o.series[i] = {
      x = s.x and numbers("x", s.x), y = numbers("y", s.y),
      label = arguments.expect("plot.line", "label", s.label, "a string or nil"),
      color = arguments.expect("plot.line", "color", s.color, "a list of finite numbers or nil")
        or palette[(i - 1) % #palette + 1],
    }
    if s.x and #o.series[i].x ~= #o.series[i].y then
      arguments.fail("plot.line: x: expected %d, as many as y, in series %d, got %d", #o.series[i].y, i, #o.series[i].x)
    end
  end
  return setmetatable(o, LinePlot)
end

local function frame(self, all)
  local function limits(axis, given, log, margin)
    local low, high = range_of(all, axis)
    if given then
      low, high = given[1], given[2]
      if log then low, high = math.log(low, 10), math.log(high, 10) end
    else
      low, high = low - margin * (high - low), high + margin * (high - low)
    end
    return low, high
  end
  local f = {}
  f.x0, f.x1 = limits(1, self.x_range, self.log_x, 0.0)
  f.y0, f.y1 = limits(2, self.y_range, self.log_y, 0.05)
  f.x_ticks, f.x_labels = (self.log_x and ticks.logarithmic or ticks.linear)(f.x0, f.x1, 8)
  f.y_ticks, f.y_labels = (self.log_y and ticks.logarithmic or ticks.linear)(f.y0, f.y1, 6)
  local widest = 0
  for _, label in ipairs(f.y_labels) do widest = math.max(widest, font.text_width(label, 2)) end
  f.left = 24 + widest + (self.y_label ~= "" and 28 or 0)
  f.right = self.width - 30
  f.top = self.title ~= "" and 52 or 24
  f.bottom = self.height - 40 - (self.x_label ~= "" and 28 or 0)
  function f.px(x) return f.left + (x - f.x0) / (f.x1 - f.x0) * (f.right - f.left) end
  function f.py(y) return f.bottom - (y - f.y0) / (f.y1 - f.y0) * (f.bottom - f.top) end
  return f
end

local function draw_axes(self, f, canvas)
  for i, value in ipairs(f.x_ticks) do
    local x = math.floor(f.px(value)) + 0.5
    canvas:rectangle(x - 0.5, f.top, 1, f.bottom - f.top, grid_color)
    canvas:text(x, f.bottom + 22, f.x_labels[i], ink, { anchor = "middle" })
  end
  for i, value in ipairs(f.y_ticks) do
    local y = math.floor(f.py(value)) + 0.5
    canvas:rectangle(f.left, y - 0.5, f.right - f.left, 1, grid_color)
    canvas:text(f.left - 8, y + 6, f.y_labels[i], ink, { anchor = "end" })
  end
  canvas:rectangle(f.left, f.bottom, f.right - f.left, 1, ink)
  canvas:rectangle(f.left, f.top, 1, f.bottom - f.top, ink)
  if self.title ~= "" then canvas:text(self.width / 2, 36, self.title, ink, { anchor = "middle", large = true }) end
  local middle = (f.left + f.right) / 2
  if self.x_label ~= "" then canvas:text(middle, self.height - 12, self.x_label, ink, { anchor = "middle" }) end
  if self.y_label ~= "" then
    canvas:text(24, (f.top + f.bottom) / 2, self.y_label, ink, { anchor = "middle", turned = true })
  end
end

-- Cuts a step of the line to the frame in y, so that given ranges hold; x outside is left out.
local function draw_series(f, points, color, canvas)
  local run = {}
  local function flush()
    if #run > 0 then canvas:polyline(run, color, 2) end
    run = {}
  end
  for _, p in ipairs(points) do
    if p and p[1] >= f.x0 - 1e-12 and p[1] <= f.x1 + 1e-12 then
      run[#run + 1] = f.px(p[1])
      run[#run + 1] = math.max(f.top, math.min(f.bottom, f.py(p[2])))
    else
      flush()
    end
  end
  flush()
end

local function draw_legend(self, f, canvas)
  local entries, widest = {}, 0
  for _, s in ipairs(self.series) do
    if s.label then
      entries[#entries + 1] = s
      widest = math.max(widest, font.text_width(s.label, 2))
    end
  end
  if #entries == 0 then return end
  local x, y = f.right - widest - 56, f.top + 8
  canvas:rectangle(x - 8, y - 4, widest + 60, 22 * #entries + 8, grid_color)
  canvas:rectangle(x - 7, y - 3, widest + 58, 22 * #entries + 6, white)
  for i, s in ipairs(entries) do
    local row = y + 22 * (i - 1) + 11
    canvas:polyline({ x, row, x + 28, row }, s.color, 3)
    canvas:text(x + 38, row + 6, s.label, ink, {})
  end
end

-- Draws on a canvas of plot/raster.lua or plot/svg.lua.
local function draw(self, canvas)
  local all = {}
  for i, s in ipairs(self.series) do all[i] = thin(points_of(s, self.log_x, self.log_y), 4 * self.width) end
  local f = frame(self, all)
  draw_axes(self, f, canvas)
  for i, s in ipairs(self.series) do draw_series(f, all[i], s.color, canvas) end
  draw_legend(self, f, canvas)
  return canvas
end

--- The plot as SVG text.
function LinePlot:svg()
  return draw(self, require("tycho.plot.svg").new(self.width, self.height, white)):finish()
end

--- The plot as pixels: u8 [3, height, width].
function LinePlot:pixels()
  return draw(self, require("tycho.plot.raster").new(self.width, self.height, white)):pixels()
end

--- Writes an .svg or .png file; returns self.
function LinePlot:save(path)
  arguments.expect("LinePlot:save", "path", path, "a string")
  if path:match "%.svg$" then
    ty.io.write_atomic(path, self:svg())
  elseif path:match "%.png$" then
    ty.io.save_image(path, self:pixels())
  else
    arguments.fail("LinePlot:save: path: expected the ending .svg or .png, got %s", path)
  end
  return self
end

return line
