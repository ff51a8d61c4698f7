--- What ranks did when, as a picture: bars in rows over time.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local GAP = 0 / 0
local STROKES = 60 -- lines that fill a bar

--- A picture of rows of bars, the first row on top. rows: { label, bars = { { from, to }, ... } in seconds, color? };
-- rows of one label share its place in the legend. options: as ty.plot.line's (title, width, height), scale (1e3: times
-- are in milliseconds), from and to (seconds that are shown: all).
---@param rows { label: string, bars: number[][], color?: number[] }[]
---@param options? table
---@return LinePlot plot
return function(rows, options)
  local who = "dist.timeline"
  expect(who, "rows", rows, "a list of tables")
  local o = arguments.read(who, options, { title = "", width = 900, height = 360, scale = 1e3, from = -math.huge,
    to = math.huge, x_label = "milliseconds" }, { scale = "a number > 0", from = "a number", to = "a number" })
  local series, seen, count = {}, {}, 0
  for i, row in ipairs(rows) do
    expect(who, ("rows[%d].label"):format(i), row.label, "a string")
    expect(who, ("rows[%d].bars"):format(i), row.bars, "a list of tables")
    local middle = #rows - i + 1
    local x, y = {}, {}
    for k, bar in ipairs(row.bars) do
      if type(bar[1]) ~= "number" or type(bar[2]) ~= "number" then
        fail("%s: rows[%d].bars[%d]: expected { from, to } in seconds, got %s", who, i, k, arguments.describe(bar[1]))
      end
      local from, to = math.max(bar[1], o.from), math.min(bar[2], o.to)
      if from < to then
        for stroke = 0, STROKES do
          local at = middle - 0.3 + 0.6 * stroke / STROKES
          for _, seconds in ipairs(stroke % 2 == 0 and { from, to } or { to, from }) do
            x[#x + 1], y[#y + 1] = seconds * o.scale, at
          end
        end
        x[#x + 1], y[#y + 1] = GAP, GAP
      end
    end
    if not seen[row.label] then count = count + 1 end
    local one = { x = x, y = y, color = row.color or seen[row.label] and seen[row.label].color }
    if not seen[row.label] then one.label, seen[row.label] = row.label, one end
    if #x > 0 then series[#series + 1] = one end
  end
  -- Above the rows there is room for the legend.
  return ty.plot.line { series = series, title = o.title, x_label = o.x_label, width = o.width, height = o.height,
    y_range = { 0.4, #rows + 0.6 + 0.35 * count } }
end
