-- Convolutions in window order
-- claim: windows of a row written once give the library's results with far less room than a matrix of windows
-- system: ty.conv2d_im2win, an op beside conv2d with kernels for CPU and CUDA
-- paper: Lu, Chu and Liu 2023, "Im2win: An Efficient Convolution Paradigm on GPU"
-- time: 10 seconds on one CPU core
--
-- The twelve layers are those of the authors' benchmark, without padding. im2col is ty.unfold and a product of
-- matrices, all of it ours; what it needs besides its result is the matrix of windows, counted by its definition, and
-- what is measured of either way has what it needs for kernels as well. The library's convolution is ours, too, and
-- takes what suits a layer: Winograd's transforms for 3 x 3 kernels, sums over taps, tiles. It is shown beside, not to
-- be beaten.
local ty = require "tycho"

local r = ty.recipe.declare {
  args = {
    { "batch", 1, "images" },
    { "rounds", 7, "measurements of which the median counts", quick = 1 },
    { "shrink", 1, "by which sides and channels are divided", quick = 4 },
  },
}
local args = r.args
-- channels, side, kernels, side of a kernel, stride
local layers = {
  { 3, 227, 96, 11, 4 }, { 3, 231, 96, 11, 4 }, { 3, 227, 64, 7, 2 }, { 32, 224, 64, 7, 2 }, { 96, 24, 256, 5, 1 },
  { 256, 12, 512, 3, 1 }, { 3, 224, 64, 3, 1 }, { 64, 112, 128, 3, 1 }, { 64, 56, 64, 3, 1 }, { 128, 28, 128, 3, 1 },
  { 256, 14, 256, 3, 1 }, { 512, 7, 512, 3, 1 },
}

local function im2col(x, weight, stride)
  local o, side = weight.shape[1], (x.shape[4] - weight.shape[4]) // stride + 1
  local windows = ty.unfold(x, weight.shape[4], { stride = stride })
  return ty.matmul(weight:flatten(1), windows):reshape(x.shape[1], o, side, side)
end

local table_of, apart, room, measured, faster, behind = {}, 0, {}, {}, {}, {}
r:say("%-28s %9s %9s %9s   %8s %8s %8s  %7s %7s", "", "library", "im2col", "im2win", "library", "im2col", "im2win",
  "im2col", "im2win")
r:say("%-28s %29s   %26s  %15s", "channels, side, kernels", "milliseconds", "measured room, MB", "by count, MB")
for i, layer in ipairs(layers) do
  local c, side, o, k, stride = table.unpack(layer)
  c, side, o = math.max(1, c // args.shrink), math.max(k, side // args.shrink), math.max(1, o // args.shrink)
  ty.manual_seed(i)
  local x, weight = r:place(function() return ty.randn(args.batch, c, side, side), ty.randn(o, c, k, k) end)
  local ways = {
    library = function() return ty.conv2d(x, weight, nil, { stride = stride }) end,
    im2col = function() return im2col(x, weight, stride) end,
    im2win = function() return ty.conv2d_im2win(x, weight, nil, { stride = stride }) end,
  }
  local want = ways.library()
  local typical = want:square():mean():sqrt():item()
  for _, name in ipairs { "im2col", "im2win" } do
    apart = math.max(apart, (ways[name]() - want):abs():max():item() / typical)
  end
  local bytes = {}
  for name, fn in pairs(ways) do bytes[name] = r:memory(fn) - 4 * want:numel() end
  local at = r:time(ways, { rounds = args.rounds })
  local out = want.shape[4]
  local columns = 4 * args.batch * c * k * k * out * out
  local windows = 4 * c * k * out * ((out - 1) * stride + k) * (r.device == "cpu" and 1 or args.batch)
  r:say("%-28s %9.2f %9.2f %9.2f   %8.2f %8.2f %8.2f  %7.2f %7.2f",
    ("%3d x %3d^2, %3d of %2d^2 / %d"):format(c, side, o, k, stride), 1e3 * at.library, 1e3 * at.im2col,
    1e3 * at.im2win, bytes.library / 1e6, bytes.im2col / 1e6, bytes.im2win / 1e6, columns / 1e6, windows / 1e6)
  table_of[i] = { layer = layer, seconds = at, bytes = bytes, columns = columns, windows = windows }
  room[i], measured[i] = 1 - windows / columns, 1 - bytes.im2win / bytes.im2col
  faster[i], behind[i] = at.im2col / at.im2win, at.library / at.im2win
end
r.metrics.layers = table_of
local numbers = {}
for i = 1, #layers do numbers[i] = i end
ty.plot.line { title = "Room beside the result, of im2col's", x_label = "layer", width = 640, series = {
  { x = numbers, y = (1 - ty.tensor(room)):tolist(), label = "by count" },
  { x = numbers, y = (1 - ty.tensor(measured)):tolist(), label = "measured" } } }:save(r:picture "im2win.png")

os.exit(r:finish {
  { claim = "from the library's convolution, of a typical value", measured = apart, bar = 1e-4, below = true },
  { claim = "less room than im2col, by count, at least", measured = math.min(table.unpack(room)), bar = 0.2 },
  { claim = "less room than im2col, measured, at least", measured = math.min(table.unpack(measured)), bar = 0.2 },
  { claim = "times as fast as im2col, median of the twelve", measured = ty.stats.median(faster), judged = false },
  { claim = "times as fast as the library's convolution, median", measured = ty.stats.median(behind), judged = false },
}, true)
