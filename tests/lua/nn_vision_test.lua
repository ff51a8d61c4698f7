-- Modules of vision: pools, convolutions of volumes, padding, resizing. The ops have tests of their own; here it is
-- that the modules hand on what they were given, and say what is wrong.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn = ty.nn

local function same(a, b, what)
  check.equal(a.shape, b.shape, what)
  check.equal(a:sub(b):abs():max():item(), 0.0, what)
end

local function input(n) return ty.randn(table.move({ 6, 5, 7 }, 1, n, 3, { 2, 4 })) end

check.test("pools hand their options on", function()
  for n = 1, 3 do
    local x, name = input(n), n .. "d"
    local max, avg = ty["max_pool" .. name], ty["avg_pool" .. name]
    same(nn["MaxPool" .. name](2)(x), (max(x, 2)), "MaxPool" .. name)
    local options = { stride = 2, padding = 1, dilation = 2, ceil_mode = true }
    same(nn["MaxPool" .. name](2, options)(x), (max(x, 2, 2, 1, 2, true)), "MaxPool with options")
    same(nn["AvgPool" .. name](3, { stride = 2, padding = 1, count_include_pad = false, ceil_mode = true })(x),
      avg(x, 3, 2, 1, false, true), "AvgPool" .. name)
    same(nn["AvgPool" .. name](2, { divisor = 3 })(x), avg(x, 2, 2, 0, true, false, 3), "divisor")
    same(nn["LPPool" .. name](2, 2, { stride = 1 })(x), ty["lp_pool" .. name](x, 2, 2, 1), "LPPool" .. name)
    same(nn["AdaptiveAvgPool" .. name](3)(x), ty["adaptive_avg_pool" .. name](x, 3), "AdaptiveAvgPool" .. name)
    same(nn["AdaptiveMaxPool" .. name](3)(x), (ty["adaptive_max_pool" .. name](x, 3)), "AdaptiveMaxPool" .. name)
  end
  check.fails(function() nn.MaxPool3d { 2, 2 } end, "MaxPool3d: kernel: expected one or 3 integers, got 2")
  check.fails(function() nn.AvgPool1d(0) end, "AvgPool1d: kernel: expected an integer >= 1")
  check.fails(function() nn.AvgPool1d(2, { divisor = 0 }) end, "AvgPool1d: divisor")
  check.equal(tostring(nn.MaxPool3d(2, { padding = 1 })), "MaxPool3d(2x2x2, padding = 1)")
end)

check.test("unpooling takes what pooling gave", function()
  for n = 1, 3 do
    local x, name = input(n):abs(), n .. "d"
    local y, position = nn["MaxPool" .. name](2, { return_indices = true })(x)
    local size = table.move(x.shape, 3, n + 2, 1, {})
    local back = nn["MaxUnpool" .. name](2)(y, position, size)
    check.equal(back.shape, x.shape)
    same(back * (back:sub(x):eq(0)):to("f32"), back, "every maximum is where it was")
    check.close(back:sum():item(), y:sum():item(), 1e-3)
  end
end)

check.test("convolutions of volumes, and transposed ones", function()
  local conv = nn.Conv3d(4, 6, { 3, 1, 3 }, { padding = "same", groups = 2 })
  check.equal(conv.weight.shape, { 6, 2, 3, 1, 3 })
  check.equal(conv.padding, { 1, 0, 1 })
  local x = input(3)
  same(conv(x), ty.conv3d(x, conv.weight, conv.bias, { padding = { 1, 0, 1 }, groups = 2 }), "Conv3d")
  check.equal(tostring(conv), "Conv3d(4, 6, 3x1x3, padding = 1x0x1, groups = 2)  114")
  check.equal(#conv:parameters(), 2)
  local bound = 1 / math.sqrt(2 * 9)
  check.equal(conv.weight:abs():max():item() <= bound, true, "first values as PyTorch's")

  for _, n in ipairs { 1, 3 } do
    local name = n .. "d"
    local up = nn["ConvTranspose" .. name](4, 6, 3, { stride = 2, padding = 1, output_padding = 1, bias = false })
    local y = up(input(n))
    for d = 1, n do check.equal(y.shape[2 + d], 2 * input(n).shape[2 + d], "twice as large") end
    check.equal(up.bias, nil)
  end
  check.fails(function() nn.Conv3d(4, 6, 3, { groups = 4 }) end, "Conv3d: groups: expected a divisor")
  check.fails(function() nn.Conv3d(4, 6, { 3, 3 }) end, "Conv3d: kernel: expected one or 3 integers, got 2")
  check.fails(function() nn.ConvTranspose1d(4, 6, 3, { stride = -1 }) end, "ConvTranspose1d: stride")
end)

check.test("padding", function()
  local modes = { ZeroPad = "constant", ReflectionPad = "reflect", ReplicationPad = "replicate",
    CircularPad = "circular" }
  for n = 1, 3 do
    local x, sides = input(n), {}
    for i = 1, 2 * n do sides[i] = i % 3 end
    for name, mode in pairs(modes) do
      same(nn[name .. n .. "d"](sides)(x), ty.pad(x, sides, mode), name)
      check.equal(nn[name .. n .. "d"](2)(x).shape[3], 10)
    end
    check.equal(nn["ConstantPad" .. n .. "d"](1, 3.5)(x):select(2, 0):sub(3.5):abs():max():item(), 0.0)
  end
  check.equal(tostring(nn.ConstantPad2d({ 1, 0, -1, 2 }, 5)), "ConstantPad2d({1, 0, -1, 2}, 5)")
  check.fails(function() nn.ZeroPad2d { 1, 2, 3 } end, "ZeroPad2d: pads: expected one or 4 integers, got 3")
  check.fails(function() nn.ReflectionPad2d(9)(input(2)) end, "pad")
end)

check.test("resizing and rearranging", function()
  local x = input(2)
  same(nn.Upsample { scale = 2 }(x), ty.interpolate(x, { scale = 2 }), "Upsample")
  same(nn.Upsample { size = { 3, 9 }, mode = "bicubic", antialias = true }(x),
    ty.interpolate(x, { 3, 9 }, { mode = "bicubic", antialias = true }), "Upsample by size")
  check.equal(nn.Upsample { size = { 3, 4, 5 }, mode = "trilinear" }(input(3)).shape, { 2, 4, 3, 4, 5 })
  local columns = nn.Unfold(3, { padding = 1, stride = 2 })(x)
  same(columns, ty.unfold(x, 3, 1, 1, 2), "Unfold")
  same(nn.Fold({ 6, 5 }, 3, { padding = 1, stride = 2 })(columns), ty.fold(columns, { 6, 5 }, 3, 1, 1, 2), "Fold")
  local pixels = nn.PixelShuffle(2)(x)
  check.equal(pixels.shape, { 2, 1, 12, 10 })
  same(nn.PixelUnshuffle(2)(pixels), x, "and back")
  same(nn.ChannelShuffle(2)(x):select(1, 1), x:select(1, 2), "ChannelShuffle")
  local whole = ty.arange(16):reshape(1, 4, 2, 2)
  same(nn.PixelUnshuffle(2)(nn.PixelShuffle(2)(whole)), whole, "integers too")
  check.fails(function() nn.PixelShuffle(0) end, "PixelShuffle: factor: expected an integer >= 1")
  check.fails(function() nn.Fold(4) end, "Fold: kernel")
end)

check.finish()
