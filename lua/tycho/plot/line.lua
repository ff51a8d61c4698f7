--- Line plots.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local font = require "tycho.plot.font"
local legend = require "tycho.plot.legend"
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

--- A plot of lines, of ty.plot.line.
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

-- At each point the value there of the straight line that fits best, points at distance d weighing exp(-d / width): it
-- begins and ends where the values do, and does not lag behind them. Local linear regression: Fan 1992.
local function smoothed(values, width)
  local keep, n = math.exp(-1 / width), #values
  -- Sums over the points on one side of the current one: of weights, weights times distance and its square, and of
  -- weights and weights times distance times values.
  local function sums() return { w0 = 0, w1 = 0, w2 = 0, v0 = 0, v1 = 0 } end
  local function pass(s, v)
    if finite(v) then s.w0, s.v0 = s.w0 + 1, s.v0 + v end
    s.w2 = keep * (s.w2 + 2 * s.w1 + s.w0)
    s.w1, s.v1 = keep * (s.w1 + s.w0), keep * (s.v1 + s.v0)
    s.w0, s.v0 = keep * s.w0, keep * s.v0
  end
  local before, side = {}, sums()
  for i = 1, n do
    before[i] = { w0 = side.w0, w1 = side.w1, w2 = side.w2, v0 = side.v0, v1 = side.v1 }
    pass(side, values[i])
  end
  local result, after = {}, sums()
  for i = n, 1, -1 do
    local a, v = before[i], values[i]
    if finite(v) then
      local w0, w1, w2 = a.w0 + 1 + after.w0, after.w1 - a.w1, a.w2 + after.w2
      local v0, v1 = a.v0 + v + after.v0, after.v1 - a.v1
      local det = w0 * w2 - w1 * w1
      result[i] = det > 0 and (w2 * v0 - w1 * v1) / det or v0 / w0
    else
      result[i] = 0 / 0
    end
    pass(after, v)
  end
  return result
end

local function pale(color)
  local result = {}
  for i = 1, 3 do result[i] = 1 - 0.35 * (1 - color[i]) end
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
--   y: list or 1-d tensor, x: the same (default 0, 1, ...), label, smooth (0: as it is; else the width in points of the
-- average that is drawn over the pale values);
--   or series = { { y =, x =, label =, smooth =, color = { r, g, b }, dots = true }, ... }, dots: points that no line
-- joins;
--   title, x_label, y_label, log_x, log_y, x_range, y_range ({ low, high }), width (900), height (540) in pixels.
---@param options table
---@return LinePlot plot  plot:save "loss.svg" or "loss.png"
local function line(options)
  local o = arguments.read("plot.line", options, { x = none, y = none, series = none, title = "", x_label = "",
    y_label = "", label = none, smooth = 0, log_x = false, log_y = false, x_range = none, y_range = none, width = 900,
    height = 540 }, kinds)
  local given = o.series or { { x = o.x, y = o.y, label = o.label, smooth = o.smooth } }
  if #given == 0 and next(given) ~= nil then
    arguments.fail("plot.line: series: expected a list { { y = ..., label = \"%s\" }, ... }, got a table with names",
      tostring((next(given))))
  end
  o.series = {}
  for i, s in ipairs(given) do
    o.series[i] = {
      x = s.x and numbers("x", s.x), y = numbers("y", s.y),
      label = arguments.expect("plot.line", "label", s.label, "a string or nil"),
      color = arguments.expect("plot.line", "color", s.color, "a list of finite numbers or nil")
        or palette[(i - 1) % #palette + 1],
      smooth = arguments.expect("plot.line", "smooth", s.smooth, "a finite number >= 0 or nil") or 0,
      dots = arguments.expect("plot.line", "dots", s.dots, "a boolean or nil") or false,
    }
    if s.x and #o.series[i].x ~= #o.series[i].y then
      arguments.fail("plot.line: x: expected %d, as many as y, in series %d, got %d", #o.series[i].y, i, #o.series[i].x)
    end
  end
  return setmetatable(o, LinePlot)
end

-- `above`: pixels between the title and the frame that the legend takes.
local function frame(self, all, above)
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
  f.top = (self.title ~= "" and 52 or 24) + above
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

-- The pieces of a curve in pixels: x, y, x, y ... Cut to the frame in y, so that given ranges hold; x outside is left
-- out.
local function runs_of(f, points, dots)
  local runs, run = {}, nil
  for _, p in ipairs(points) do
    if dots then run = nil end
    if p and p[1] >= f.x0 - 1e-12 and p[1] <= f.x1 + 1e-12 then
      if not run then
        run = {}
        runs[#runs + 1] = run
      end
      run[#run + 1] = f.px(p[1])
      run[#run + 1] = math.max(f.top, math.min(f.bottom, f.py(p[2])))
    else
      run = nil
    end
  end
  return runs
end

-- What is drawn of the series, back to front: of a smoothed one the values themselves, pale, and the smooth line.
local function curves_of(self)
  local back, front = {}, {}
  for _, s in ipairs(self.series) do
    local function add(list, y, color)
      local points = points_of({ x = s.x, y = y }, self.log_x, self.log_y)
      list[#list + 1] = { points = s.dots and points or thin(points, 4 * self.width), color = color, dots = s.dots }
    end
    if s.smooth > 0 then
      add(back, s.y, pale(s.color))
      add(front, smoothed(s.y, s.smooth), s.color)
    else
      add(front, s.y, s.color)
    end
  end
  return table.move(front, 1, #front, #back + 1, back)
end

-- Draws on a canvas of plot/raster.lua or plot/svg.lua.
local function draw(self, canvas)
  local curves, points, runs = curves_of(self), {}, {}
  for i, curve in ipairs(curves) do points[i] = curve.points end
  local entries = legend.entries(self.series)
  local f = frame(self, points, 0)
  local function place_curves()
    runs = {}
    for _, curve in ipairs(curves) do
      curve.runs = runs_of(f, curve.points, curve.dots)
      table.move(curve.runs, 1, #curve.runs, #runs + 1, runs)
    end
  end
  place_curves()
  local x, y, width, height
  if #entries > 0 then x, y, width, height = legend.place(entries, f, runs) end
  if #entries > 0 and not x then
    f = frame(self, points, legend.height_above(entries, f.right - f.left))
    place_curves()
    legend.draw_above(entries, f, canvas, ink)
  end
  draw_axes(self, f, canvas)
  for _, curve in ipairs(curves) do
    for _, run in ipairs(curve.runs) do canvas:polyline(run, curve.color, curve.dots and 4 or 2) end
  end
  if x then
    legend.draw_inside(entries, x, y, width, height, canvas, { ink = ink, grid = grid_color, background = white })
  end
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
