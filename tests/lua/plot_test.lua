-- Plots and image grids: files are written, readable, and show what they should.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local plot = ty.plot
local ticks = require "tycho.plot.ticks"

local path = os.tmpname()

check.test("ticks are round numbers", function()
  local function of(low, high, count) return select(2, ticks.linear(low, high, count)) end
  check.equal(of(0, 1, 5), { "0.0", "0.2", "0.4", "0.6", "0.8", "1.0" })
  check.equal(of(0, 1000, 8), { "0", "200", "400", "600", "800", "1000" })
  check.equal(of(-0.013, 0.011, 6), { "-0.010", "-0.005", "0.000", "0.005", "0.010" })
  check.equal(of(0, 3e7, 3), { "0", "1e+7", "2e+7", "3e+7" })
  check.equal(select(2, ticks.logarithmic(-2, 2, 6)), { "0.01", "0.1", "1", "10", "100" })
  check.equal(select(2, ticks.logarithmic(0, 1, 6)), { "1", "1.5", "2", "3", "4", "5", "7", "10" })
end)

check.test("svg", function()
  local p = plot.line {
    series = { { y = { 1, 4, 9, 0 / 0, 25, 36 }, label = "a < b & c" }, { x = { 0, 5 }, y = ty.tensor { 30.0, 2.0 } } },
    title = "Title", x_label = "x", y_label = "y",
  }
  local svg = p:svg()
  check.equal(svg:match "^<svg " ~= nil and svg:match "</svg>\n$" ~= nil, true)
  check.equal(svg:find("a &lt; b &amp; c", 1, true) ~= nil, true)
  local lines = 0
  for _ in svg:gmatch "<polyline" do lines = lines + 1 end
  check.equal(lines, 2 + 1 + 1, "a gap parts the first line; one more for the legend")
  p:save(path .. ".svg")
  check.equal(ty.io.read(path .. ".svg"), svg)
  os.remove(path .. ".svg")
end)

check.test("dots are not joined", function()
  local svg = plot.line { series = { { x = { 1, 3, 2 }, y = { 1, 2, 3 }, dots = true } } }:svg()
  check.equal({ select(2, svg:gsub("<circle", "")), svg:find "<polyline" }, { 3 })
  check.fails(function() plot.line { series = { { y = { 1 }, dots = 3 } } } end, "dots: expected a boolean or nil")
end)

check.test("png", function()
  local p = plot.line { y = { 1, 2, 3 }, width = 300, height = 200, title = "t", label = "l" }
  p:save(path .. ".png")
  local image = ty.io.load_image(path .. ".png")
  check.equal(image.shape, { 3, 200, 300 })
  check.equal(image:tolist(), p:pixels():tolist())
  check.equal(image[":, 0, 0"]:tolist(), { 255, 255, 255 }, "background")
  local blue = image:select(0, 2):to("i32") - image:select(0, 0):to "i32"
  check.equal(blue:gt(100):sum():item() > 200, true, "the line is blue")
  os.remove(path .. ".png")
  check.fails(function() p:save "x.pdf" end, "path: expected the ending .svg or .png, got x.pdf")
end)

-- The legend's box in an SVG, which is the last white rectangle but the ground, or nil; and all lines but samples.
local function parts_of(svg)
  local boxes, lines = {}, {}
  for x, y, w, h in svg:gmatch '<rect x="([%d.]+)" y="([%d.]+)" width="([%d.]+)" height="([%d.]+)" fill="#ffffff"/>' do
    boxes[#boxes + 1] = { x = tonumber(x), y = tonumber(y), w = tonumber(w), h = tonumber(h) }
  end
  for points, width in svg:gmatch '<polyline points="([^"]*)"[^>]*stroke%-width="([%d.]+)"' do
    local line = { width = tonumber(width) }
    for x, y in points:gmatch "([%d.]+),([%d.]+)" do line[#line + 1] = { tonumber(x), tonumber(y) } end
    lines[#lines + 1] = line
  end
  return boxes[2], lines
end

-- Whether a line has a point in the box, by walking along it in steps of half a pixel.
local function enters(box, line)
  for i = 1, #line - 1 do
    local a, b = line[i], line[i + 1]
    local steps = 2 * math.ceil(math.max(math.abs(a[1] - b[1]), math.abs(a[2] - b[2]))) + 1
    for k = 0, steps do
      local x, y = a[1] + (b[1] - a[1]) * k / steps, a[2] + (b[2] - a[2]) * k / steps
      if x > box.x and x < box.x + box.w and y > box.y and y < box.y + box.h then return true end
    end
  end
  return false
end

check.test("the legend covers no curve", function()
  local function curve(f)
    local y = {}
    for i = 0, 200 do y[i + 1] = f(i / 200) end
    return y
  end
  local shapes = {
    falling = { curve(function(t) return math.exp(-5 * t) end) },
    rising = { curve(function(t) return t end), curve(function(t) return 0.9 + 0.1 * t end) },
    top = { curve(function(t) return 1 - t * t * 0.01 end), curve(function() return 0 end) },
    valley = { curve(function(t) return (t - 0.5) ^ 2 end) },
    hill = { curve(function(t) return -(t - 0.5) ^ 2 end), curve(function(t) return -(t - 0.3) ^ 2 end) },
    full = { curve(function(t) return math.sin(90 * t) end), curve(function(t) return math.cos(100 * t) end) },
  }
  for name, ys in pairs(shapes) do
    local series = {}
    for i, y in ipairs(ys) do series[i] = { y = y, label = "the series number " .. i } end
    local box, lines = parts_of(plot.line({ series = series, title = name }):svg())
    check.equal(#lines, 2 * #ys, name)
    check.equal(box == nil, name == "full", name .. ": in the frame where there is room, else above it")
    for _, line in ipairs(lines) do
      if line.width == 2 and box then check.equal(enters(box, line), false, name) end
    end
    if not box then
      local highest = math.huge -- of the curves; samples lie above
      for _, line in ipairs(lines) do
        for _, p in ipairs(line) do if line.width == 2 then highest = math.min(highest, p[2]) end end
      end
      for _, line in ipairs(lines) do
        if line.width == 3 then check.equal(line[1][2] + 10 < highest, true, "the legend lies above the frame") end
      end
    end
  end
  local many = {}
  for i = 1, 12 do many[i] = { y = curve(function(t) return math.sin(50 * t + i) end), label = "series " .. i } end
  local _, lines = parts_of(plot.line({ series = many, width = 400 }):svg())
  local rows = {}
  for _, line in ipairs(lines) do
    if line.width == 3 then
      rows[line[1][2]] = true
      check.equal(line[2][1] < 400 and line[1][1] >= 0, true, "rows end at the frame")
    end
  end
  local count = 0
  for _ in pairs(rows) do count = count + 1 end
  check.equal(count > 2 and count < 12, true, "as many side by side as there is room for")
end)

check.test("letters descend below the line", function()
  local font = require "tycho.plot.font"
  local function ink(character)
    local first, last = math.huge, -math.huge
    font.draw(character, 0, 0, 1, function(_, y) first, last = math.min(first, y), math.max(last, y) end)
    return first, last
  end
  local x_top, baseline = ink "x"
  check.equal(baseline, font.height - 1)
  for letter in ("gpqy"):gmatch "." do
    local top, bottom = ink(letter)
    check.equal({ top, bottom }, { x_top, baseline + font.depth }, letter .. " is as high as x and goes below the line")
  end
  check.equal({ select(2, ink "j"), select(2, ink ",") }, { baseline + font.depth, baseline + 1 })
  for byte = 33, 126 do
    local top, bottom = ink(string.char(byte))
    check.equal(top >= 0 and bottom < font.height + font.depth, true, string.char(byte))
  end
  -- In a picture: the lowest ink of the label of the x axis is that of descenders, two pixels to each of the font's.
  local function lowest(label)
    local image = plot.line({ y = { 1, 2 }, width = 200, height = 150, x_label = label }):pixels()
    local last = 0
    for y = 0, 149 do
      if image[("0, %d, :"):format(y)]:min():item() < 100 then last = y end
    end
    return last
  end
  check.equal(lowest "gap" - lowest "max", 2 * font.depth)
end)

check.test("an axis of logarithms has enough marks", function()
  local fewest, most = math.huge, 0
  for decades = 0.05, 14, 0.05 do
    for low = -4, 4, 0.37 do
      local at, labels = ticks.logarithmic(low, low + decades, 6)
      fewest, most = math.min(fewest, #at), math.max(most, #at)
      for i = 1, #at do
        local inside = at[i] > low - 1e-6 and at[i] < low + decades + 1e-6
        local right = math.abs(math.log(tonumber(labels[i]), 10) - at[i]) < 0.01
        if not inside or not right or i > 1 and labels[i] == labels[i - 1] then
          check.equal(labels, nil, ("%g to %g"):format(low, low + decades))
        end
      end
    end
  end
  check.equal({ fewest >= 3, most <= 13 }, { true, true }, ("%d to %d marks"):format(fewest, most))
  check.equal(select(2, ticks.logarithmic(math.log(3, 10), math.log(1500, 10), 6)),
    { "3", "10", "30", "100", "300", "1000" })
  check.equal(select(2, ticks.logarithmic(math.log(22, 10), math.log(43, 10), 6)), { "25", "30", "35", "40" })
  check.equal(select(2, ticks.logarithmic(-6, 9, 6)), { "1e-6", "0.001", "1", "1000", "1e+6", "1e+9" })
end)

check.test("smoothed lines", function()
  local function smooth(y, width)
    local _, lines = parts_of(plot.line({ y = y, smooth = width, width = 400, height = 300 }):svg())
    check.equal(#lines, 2, "the values and the smooth line over them")
    return lines[2], lines[1]
  end
  local line, values = smooth({ 0, 1, 2, 3, 4, 5, 6 }, 3)
  check.close({ line[1][2], line[4][2], line[7][2] }, { values[1][2], values[4][2], values[7][2] }, 0.02,
    "a straight line stays")
  check.equal(line[1][1] == values[1][1] and line[7][1] == values[7][1], true, "from the first value to the last")
  local steep = {}
  for i = 1, 200 do steep[i] = 10 * math.exp(-i / 40) end
  line, values = smooth(steep, 5)
  local worst = 0
  for i = 1, 200 do worst = math.max(worst, math.abs(line[i][2] - values[i][2])) end
  check.equal(worst < 6, true, ("it does not lag behind a falling curve: %.1f pixels"):format(worst))
  local jump = {}
  for i = 1, 101 do jump[i] = i < 51 and 0 or i > 51 and 1 or 0.5 end
  line, values = smooth(jump, 8)
  check.close(line[51][2], values[51][2], 0.02, "a step stays where it is")
  -- Against the least squares solved point by point.
  local y, width = {}, 4
  for i = 1, 30 do y[i] = math.sin(i * i) + i / 10 end
  y[7] = 0 / 0
  local best = {}
  for i = 1, 30 do
    if i ~= 7 then
      local w0, w1, w2, v0, v1 = 0, 0, 0, 0, 0
      for j = 1, 30 do
        local w, d = j == 7 and 0 or math.exp(-math.abs(i - j) / width), j - i
        local v = j == 7 and 0 or w * y[j]
        w0, w1, w2, v0, v1 = w0 + w, w1 + w * d, w2 + w * d * d, v0 + v, v1 + d * v
      end
      best[#best + 1] = (w2 * v0 - w1 * v1) / (w0 * w2 - w1 * w1)
    end
  end
  local options = { y = y, smooth = width, width = 400, height = 300, y_range = { -2, 5 } }
  local _, all = parts_of(plot.line(options):svg())
  local drawn = {}
  for k = 3, 4 do -- before and after the gap
    for _, p in ipairs(all[k]) do drawn[#drawn + 1] = p[2] end
  end
  local again = {}
  _, all = parts_of(plot.line({ y = best, width = 400, height = 300, y_range = { -2, 5 } }):svg())
  for _, p in ipairs(all[1]) do again[#again + 1] = p[2] end
  check.close(drawn, again, 0.02)
  check.fails(function() plot.line { y = { 1 }, smooth = -1 } end, "plot.line: smooth: expected a finite number >= 0")
end)

check.test("odd data", function()
  local nan, huge = 0 / 0, math.huge
  for _, y in ipairs { {}, { 5 }, { 2, 2, 2 }, { nan, nan }, { huge, 1, 2 }, { 1e300, -1e300 }, { 1e-12, 2e-12 } } do
    check.equal(#plot.line({ y = y, width = 200, height = 150 }):svg() > 100, true)
  end
  check.equal(#plot.line({ y = { -1, 0, 1, 10, 1000 }, log_y = true }):svg() > 100, true)
  check.equal(#plot.line({ x = { 1, 10, 100 }, y = { 1, 2, 3 }, log_x = true, y_range = { 0, 2 } }):svg() > 100, true)
  local many = ty.randn(200000)
  check.equal(#plot.line({ y = many }):svg() < 400000, true, "many points are thinned out")
  check.fails(function() plot.line { y = "text" } end, "y: expected a tensor or a list of numbers")
  check.fails(function() plot.line { y = { 1 }, x = { 1, 2 } } end, "x: expected 1, as many as y, in series 1, got 2")
  check.fails(function() plot.line { y = { 1 }, colour = "red" } end, "no option 'colour'")
end)

check.test("grids of images", function()
  local images = ty.stack({ ty.full({ 1, 2, 3 }, -1.0), ty.full({ 1, 2, 3 }, 1.0), ty.full({ 1, 2, 3 }, 0.0) }, 0)
  local grid = plot.grid(images, { columns = 2, scale = 2, gap = 1, background = 9 })
  check.equal(grid.pixels.shape, { 1, 2 * 5 + 1, 2 * 7 + 1 })
  local at = function(y, x) return grid.pixels[("0, %d, %d"):format(y, x)]:item() end
  check.equal({ at(0, 0), at(1, 1), at(4, 6), at(1, 8), at(6, 1), at(6, 8) }, { 9, 0, 0, 255, 128, 9 })
  grid:save(path .. ".png")
  check.equal(ty.io.load_image(path .. ".png"):tolist(), grid.pixels:tolist())
  os.remove(path .. ".png")
  check.equal(plot.grid(ty.zeros({ 5, 3, 4, 4 }, { dtype = "u8" }), { labels = { "a", "b", 3 } }).pixels.shape[1], 3)
  local blank, one = ty.zeros({ 2, 1, 20, 20 }, { dtype = "u8" }), { columns = 2, labels = { "I", "I" } }
  local rows = plot.grid(blank, one).pixels.shape[2]
  local two = plot.grid(blank, { columns = 2, labels = { "I\nI", "I" } }).pixels
  check.equal(two.shape[2] - rows, 11, "a second line")
  check.equal(two:narrow(1, 14, 8):narrow(2, 0, 22):max():item(), 255, "has its letters below the first")
  check.equal(two:narrow(1, 14, 8):narrow(2, 24, 20):max():item(), 60, "where the other label has none")
  check.equal(plot.grid(ty.zeros(4, 4, 4), { invert = true }).pixels[("0, 3, 3")]:item(), 127)
  check.fails(function() plot.grid(ty.zeros(2, 2, 4, 4)) end, "images: expected [n, 1 or 3, h, w]")
end)

check.test("a batch as a sheet: pictures in any range, boxes, masks, names", function()
  local image = ty.zeros({ 3, 3, 20, 30 }, { dtype = "u8" })
  image["0, 0, 4:8, 6:16"] = 200
  local mask = ty.zeros({ 3, 20, 30 }, { dtype = "u8" })
  mask["1, 10:, :"] = 1
  local boxes = ty.zeros(3, 2, 4)
  boxes["0, 1"] = ty.tensor { 6.0, 4, 16, 8 }
  local batch = { image = image, mask = mask, boxes = boxes, label = ty.tensor { 2, 0, 1 } }
  local sheet = plot.batch(batch, { columns = 3, scale = 2, classes = { "cat", "dog", "ox" } })
  local x = sheet.pixels
  check.equal(x.shape[3], 3 * 62 + 2)
  local top = x.shape[2] - 42 -- below the names
  local function at(y, column) return x[(":, %d, %d"):format(top + y, column)]:tolist() end
  check.equal(at(2 * 5, 2 + 2 * 9), { 200, 0, 0 }, "the picture, enlarged")
  check.equal(at(2 * 4, 2 + 2 * 6), { 64, 160, 255 }, "the corner of the second box")
  check.equal(at(2 * 4 + 1, 2 + 2 * 6 + 1), { 200, 0, 0 }, "which is a line")
  check.equal(at(2 * 12, 62 + 2 + 8), { 128, 32, 32 }, "half of the colour of what the mask counts")
  check.equal(at(2 * 2, 62 + 2 + 8), { 0, 0, 0 })
  check.ok(x:narrow(1, 0, top - 2):max():item() == 255, "names above")
  -- Floats of the usual ranges, normalised ones, and any others.
  local function first(floats, options) return plot.batch(floats, options).pixels["0, 2, 2"]:item() end
  check.equal(first(ty.full({ 1, 1, 4, 4 }, 0.5)), 128)
  check.equal(first(ty.stack({ ty.full({ 1, 4, 4 }, 0.0), ty.full({ 1, 4, 4 }, -1.0) }, 0)), 128)
  check.equal(first(ty.full({ 1, 3, 4, 4 }, 2.0), { mean = { 0.5, 0.4, 0.3 }, std = { 0.25, 0.25, 0.25 } }), 255)
  check.equal(first(ty.full({ 1, 3, 4, 4 }, -1.2), { mean = { 0.5 }, std = { 0.25 } }), 51)
  check.equal(first(ty.stack({ ty.full({ 1, 4, 4 }, 30.0), ty.full({ 1, 4, 4 }, 10.0) }, 0)), 255)
  -- Clips, spectrograms, shares, one picture's text, an upper limit.
  local clip = { video = ty.rand(2, 5, 3, 16, 16), caption = { "runs", "stands" } }
  check.equal(plot.batch(clip).pixels.shape[1], 3)
  local mel = ty.zeros(1, 1, 8, 10)
  mel["0, 0, 0"] = 1
  check.equal(plot.batch({ mel = mel }, { scale = 1 }).pixels["0, 9, 3"]:item(), 255, "low tones lie below")
  check.ok(plot.batch { image = ty.rand(2, 1, 8, 8), target = ty.tensor { { 0.3, 0.7 }, { 1.0, 0 } } })
  check.equal(plot.batch(ty.rand(40, 1, 96, 96), { count = 4 }).pixels.shape, { 1, 198, 198 })
  check.fails(function() plot.batch { x = 3 } end, "plot.batch: batch: expected a tensor of at least 3 dimensions")
  check.fails(function() plot.batch(3) end, "plot.batch: batch: expected a table, got 3")
  check.fails(function() plot.batch(ty.ones(1, 3, 4, 4), { mean = { 1, 2 } }) end, "expected 1 or 3 numbers")
  check.fails(function() plot.batch(ty.ones(0, 3, 4, 4)) end, "expected pictures, got image of no elements")
end)

check.test("lines by name are refused", function()
  check.fails(function() plot.line { series = { loss = { 1, 2 } } } end,
    'series: expected a list { { y = ..., label = "loss" }, ... }, got a table with names')
end)

check.finish()
