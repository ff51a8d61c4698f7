--- The legend of a plot: in a free place of the frame, above it when the curves leave none.
local font = require "tycho.plot.font"

local legend = {}

local row_height, sample, padding = 22, 28, 8 -- of an entry; of the piece of line before its label; around the text

local function entry_width(label) return sample + 10 + font.text_width(label, 2) end

--- The series that have a label.
---@param series table[]
---@return table[]
function legend.entries(series)
  local list = {}
  for _, s in ipairs(series) do
    if s.label then list[#list + 1] = s end
  end
  return list
end

-- Whether the segment from (x0, y0) to (x1, y1) has a point in the box: Liang and Barsky 1984.
local function crosses(box, x0, y0, x1, y1)
  local first, last = 0, 1
  local function cut(step, room) -- the part of the segment with step * t <= room
    if step == 0 then return room >= 0 end
    local t = room / step
    if step < 0 then first = math.max(first, t) else last = math.min(last, t) end
    return first <= last
  end
  local dx, dy = x1 - x0, y1 - y0
  return cut(-dx, x0 - box.left) and cut(dx, box.right - x0) and cut(-dy, y0 - box.top) and cut(dy, box.bottom - y0)
end

local function is_free(box, runs)
  for _, run in ipairs(runs) do
    for i = 1, #run, 2 do
      local next_x, next_y = run[i + 2] or run[i], run[i + 3] or run[i + 1]
      if crosses(box, run[i], run[i + 1], next_x, next_y) then return false end
    end
  end
  return true
end

--- The top left corner of a place within the frame that no curve touches, or nil: the corners first, then along the
-- edges.
---@param entries table[]
---@param frame {left: number, right: number, top: number, bottom: number}
---@param runs number[][] the curves in pixels: x, y, x, y ...
---@return number|nil x
---@return number|nil y
function legend.place(entries, frame, runs)
  local width, height = 0, row_height * #entries + padding
  for _, s in ipairs(entries) do width = math.max(width, entry_width(s.label)) end
  width = width + 2 * padding
  local gap, clear = 6, 4
  local room_x, room_y = frame.right - frame.left - width - 2 * gap, frame.bottom - frame.top - height - 2 * gap
  if room_x < 0 or room_y < 0 then return nil end
  local function try(across, down)
    local x, y = frame.left + gap + across * room_x, frame.top + gap + down * room_y
    local box = { left = x - clear, right = x + width + clear, top = y - clear, bottom = y + height + clear }
    if is_free(box, runs) then return math.floor(x), math.floor(y) end
  end
  local places = { { 1, 0 }, { 0, 0 }, { 1, 1 }, { 0, 1 } }
  for i = 1, 7 do
    local part = i / 8
    for _, place in ipairs { { 1 - part, 0 }, { 1, part }, { 0, part }, { part, 1 } } do places[#places + 1] = place end
  end
  for _, place in ipairs(places) do
    local x, y = try(place[1], place[2])
    if x then return x, y, width, height end
  end
end

-- Rows of entries side by side, as many as fit into the width.
local function rows_across(entries, width)
  local rows, x = {}, math.huge
  for _, s in ipairs(entries) do
    local wide = entry_width(s.label) + 24
    if x + wide > width + 24 and not (#rows > 0 and #rows[#rows] == 0) then
      rows[#rows + 1], x = {}, 0
    end
    table.insert(rows[#rows], { x = x, series = s })
    x = x + wide
  end
  return rows
end

--- How much height the legend takes above a frame of this width.
---@param entries table[]
---@param width number
---@return integer
function legend.height_above(entries, width) return row_height * #rows_across(entries, width) + padding end

local function draw_entry(canvas, x, middle, s, ink)
  canvas:polyline({ x, middle, x + sample, middle }, s.color, 3)
  canvas:text(x + sample + 10, middle + 6, s.label, ink, {})
end

--- Draws it above the frame.
function legend.draw_above(entries, frame, canvas, ink)
  local rows = rows_across(entries, frame.right - frame.left)
  local top = frame.top - row_height * #rows - padding
  for i, row in ipairs(rows) do
    for _, entry in ipairs(row) do
      draw_entry(canvas, frame.left + entry.x, top + row_height * (i - 0.5), entry.series, ink)
    end
  end
end

--- Draws it in a box at a place that place() has found.
function legend.draw_inside(entries, x, y, width, height, canvas, colors)
  canvas:rectangle(x, y, width, height, colors.grid)
  canvas:rectangle(x + 1, y + 1, width - 2, height - 2, colors.background)
  for i, s in ipairs(entries) do
    draw_entry(canvas, x + padding, y + padding / 2 + row_height * (i - 0.5), s, colors.ink)
  end
end

return legend
