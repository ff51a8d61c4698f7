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
  check.equal(plot.grid(ty.zeros(4, 4, 4), { invert = true }).pixels[("0, 3, 3")]:item(), 127)
  check.fails(function() plot.grid(ty.zeros(2, 2, 4, 4)) end, "images: expected [n, 1 or 3, h, w]")
end)

check.finish()
