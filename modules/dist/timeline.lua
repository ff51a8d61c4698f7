--- Pictures of what ranks did when: a row for each rank, a box for each event.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail

--- A picture of what ranks did when.
---@class Timeline
local Timeline = {}
Timeline.__index = Timeline
Timeline.__name = "Timeline"

local black, white, idle = { 0, 0, 0 }, { 1, 1, 1 }, { 0.93, 0.93, 0.93 }
-- By the first word of an event's name.
local colors = {
  forward = { 0.35, 0.58, 0.87 }, backward = { 0.42, 0.73, 0.45 }, update = { 0.93, 0.65, 0.25 },
  compute = { 0.35, 0.58, 0.87 },
}
local palette = { { 0.72, 0.5, 0.8 }, { 0.85, 0.45, 0.42 }, { 0.6, 0.5, 0.4 }, { 0.3, 0.7, 0.75 }, { 0.8, 0.75, 0.3 } }
local exchange = { 0.85, 0.45, 0.42 }

local label_width, row_height, title_height, axis_height, margin = 92, 30, 30, 26, 12

local function check_rows(who, rows)
  for _, events in ipairs(rows) do
    if type(events) ~= "table" then
      fail("%s: rows: expected a list of events for each rank, got %s", who, arguments.describe(events))
    end
    for _, e in ipairs(events) do
      if type(e) ~= "table" or type(e.name) ~= "string" or type(e.from) ~= "number" or type(e.to) ~= "number"
        or e.from - e.from ~= 0 or e.to - e.to ~= 0 then
        fail("%s: rows: expected events { name, from, to }, got %s", who, arguments.describe(e))
      end
    end
  end
end

--- A picture of timelines, one below the other on one scale of time, each from its first event on. A panel is { title,
-- rows }: rows by rank, of events { name, from, to, bytes } as group:record() has them. The first word of a name gives
-- the color, numbers after it stand in the box; of two numbers the second, a chunk, makes the color darker. Exchanges,
-- which have bytes, are thin boxes, drawn with the option exchanges.
-- options: width (1000), exchanges (false), colors ({ word = { r, g, b } }), labels (of rows: "rank 0" and so on).
---@param panels { title?: string, rows: table[][] }[]
---@param options? { width?: integer, exchanges?: boolean, colors?: table<string, number[]>, labels?: string[] }
---@return Timeline  with svg(), pixels() and save(path)
local function timeline(panels, options)
  local who = "dist.timeline"
  expect(who, "panels", panels, "a list of tables")
  if #panels == 0 then fail("%s: panels: expected at least one, got none", who) end
  local o = arguments.read(who, options, { width = 1000, exchanges = false, colors = {}, labels = {} },
    { width = "an integer in [200, 10000]", exchanges = "a boolean", colors = "a table", labels = "a list of strings" })
  for word, color in pairs(o.colors) do
    expect(who, "colors." .. tostring(word), color, "a list of numbers in [0, 1]")
    if #color ~= 3 then fail("%s: colors.%s: expected red, green and blue, got %d numbers", who, word, #color) end
  end
  local self = setmetatable({ width = o.width, panels = {}, given = o.colors, labels = o.labels, words = {} }, Timeline)
  local height, longest = margin, 0
  for i, panel in ipairs(panels) do
    expect(who, ("panel %d: rows"):format(i), panel.rows, "a list of tables")
    expect(who, ("panel %d: title"):format(i), panel.title, "a string or nil")
    check_rows(who, panel.rows)
    local first, last, rows = math.huge, -math.huge, {}
    for r, events in ipairs(panel.rows) do
      rows[r] = {}
      for _, e in ipairs(events) do
        if o.exchanges or not e.bytes then
          first, last = math.min(first, e.from), math.max(last, e.to)
          table.insert(rows[r], e)
        end
      end
    end
    if first > last then first, last = 0, 0 end
    longest = math.max(longest, last - first)
    self.panels[i] = { title = panel.title, rows = rows, first = first, top = height }
    height = height + (panel.title and title_height or 0) + #rows * row_height + margin
  end
  self.height, self.longest = height + axis_height, longest > 0 and longest or 1
  return self
end

local function color_of(self, word)
  local color = self.given[word] or colors[word] or self.words[word]
  if not color then
    self.count = (self.count or 0) + 1
    color = palette[(self.count - 1) % #palette + 1]
    self.words[word] = color
  end
  return color
end

local function draw_event(self, canvas, e, x0, x1, y)
  local word, numbers = e.name:match "^(%S+)%s*(.*)$"
  if e.bytes then return canvas:rectangle(x0, y + row_height - 9, math.max(x1 - x0, 1), 5, exchange) end
  local number, chunk = numbers:match "^(%-?%d+) ?(%d*)$"
  local color = color_of(self, word or e.name)
  local shade = 0.75 ^ (tonumber(chunk) or 0)
  -- An edge in white sets boxes apart, where they are wide enough for one.
  local gap = x1 - x0 > 4 and 1 or 0
  canvas:rectangle(x0, y, math.max(x1 - x0 - gap, 0.5), row_height - 4,
    { color[1] * shade, color[2] * shade, color[3] * shade })
  if number and x1 - x0 > 12 * #number + 4 then
    canvas:text((x0 + x1) / 2, y + row_height / 2 + 5, number, shade < 0.8 and white or black, { anchor = "middle" })
  end
end

-- Seconds in a unit in which they are short.
local function scale_of(longest)
  if longest < 1e-3 then return 1e6, "us" end
  if longest < 1 then return 1e3, "ms" end
  return 1, "s"
end

local function draw(self, canvas)
  local left, right = label_width, self.width - margin
  for _, label in ipairs(self.labels) do left = math.max(left, margin + 12 * #label) end
  local function px(t) return left + t / self.longest * (right - left) end
  for _, panel in ipairs(self.panels) do
    local y = panel.top
    if panel.title then
      canvas:text(margin, y + 18, panel.title, black, { anchor = "start" })
      y = y + title_height
    end
    for r, events in ipairs(panel.rows) do
      canvas:text(margin, y + row_height / 2 + 5, self.labels[r] or ("rank %d"):format(r - 1), black,
        { anchor = "start" })
      canvas:rectangle(left, y, right - left, row_height - 4, idle)
      for _, e in ipairs(events) do
        draw_event(self, canvas, e, px(e.from - panel.first), px(e.to - panel.first), y)
      end
      y = y + row_height
    end
  end
  local unit, name = scale_of(self.longest)
  local base = self.height - axis_height
  local marks, texts = require("tycho.plot.ticks").linear(0, self.longest * unit, 6)
  for i, value in ipairs(marks) do
    local x = px(value / unit)
    canvas:rectangle(x, base - 6, 1, 6, black)
    canvas:text(x, base + 16, texts[i], black, { anchor = "middle" })
  end
  canvas:text(margin, base + 16, name, black, { anchor = "start" })
  return canvas
end

--- The picture as SVG text.
function Timeline:svg()
  return draw(self, require("tycho.plot.svg").new(self.width, self.height, white)):finish()
end

--- The picture as pixels: u8 [3, height, width].
function Timeline:pixels()
  return draw(self, require("tycho.plot.raster").new(self.width, self.height, white)):pixels()
end

--- Writes an .svg or .png file; returns self.
---@param path string
function Timeline:save(path)
  expect("Timeline:save", "path", path, "a string")
  if path:match "%.svg$" then
    ty.io.write_atomic(path, self:svg())
  elseif path:match "%.png$" then
    ty.io.save_image(path, self:pixels())
  else
    fail("Timeline:save: path: expected the ending .svg or .png, got %s", path)
  end
  return self
end

return timeline
