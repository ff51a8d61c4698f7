--- Ops that fewer programs call, at shapes of use, without gradients: signals, volumes, windows, searches, statistics,
-- segments, linear algebra, special functions, trellises. One row each; the twin is in bench/peer/rarer.py by its name.
local ty = require "tycho"
local calls = require "bench.lib.calls"

local items = {}

-- fn(inputs...) of what inputs() makes once.
local function add(name, inputs, fn)
  items[#items + 1] = { name = name, peer = { "op", { name = name } }, bars = { peer = 1 }, setup = function()
    local x = table.pack(inputs())
    return calls.forward(function() fn(table.unpack(x)) end)
  end }
end

-- The sizes of one random input, or the op's inputs.
local function one(...)
  local shape = { ... }
  return function() return ty.randn(shape) end
end
local function positive(...)
  local shape = { ... }
  return function() return ty.rand(shape) + 0.1 end
end

-- Signals.
add("fft/64x1024", one(64, 1024, 2), function(x) return ty.fft(x) end)
add("rfft/64x4096", one(64, 4096), function(x) return ty.rfft(x) end)
add("rfft/64x1000", one(64, 1000), function(x) return ty.rfft(x) end)
add("irfft/64x2049", one(64, 2049, 2), function(x) return ty.irfft(x) end)
add("rfft2/16x256x256", one(16, 256, 256), function(x) return ty.rfft2(x) end)
add("stft/8x80000", function() return ty.randn(8, 80000), ty.hann_window(400) end,
  function(x, w) return ty.stft(x, 512, 160, 400, w) end)
add("long_conv/32x64x1024", function() return ty.randn(32, 64, 1024), ty.randn(64, 1024) end, ty.long_conv)
add("long_conv/2x16x65536", function() return ty.randn(2, 16, 65536), ty.randn(16, 65536) end, ty.long_conv)

-- Volumes and lines.
add("conv3d/2x16x16x32x32", function() return ty.randn(2, 16, 16, 32, 32), ty.randn(32, 16, 3, 3, 3) end,
  function(x, w) return ty.conv3d(x, w, nil, 1, 1) end)
add("conv_transpose1d/8x64x1000", function() return ty.randn(8, 64, 1000), ty.randn(64, 64, 4) end,
  function(x, w) return ty.conv_transpose1d(x, w, nil, 2, 1) end)
add("conv_transpose3d/2x32x8x16x16", function() return ty.randn(2, 32, 8, 16, 16), ty.randn(32, 16, 2, 2, 2) end,
  function(x, w) return ty.conv_transpose3d(x, w, nil, 2) end)
add("max_pool1d/32x64x1000", one(32, 64, 1000), function(x) return (ty.max_pool1d(x, 2)) end)
add("avg_pool1d/32x64x1000", one(32, 64, 1000), function(x) return ty.avg_pool1d(x, 2) end)
add("max_pool3d/2x32x16x56x56", one(2, 32, 16, 56, 56), function(x) return (ty.max_pool3d(x, 2)) end)
add("avg_pool3d/2x32x16x56x56", one(2, 32, 16, 56, 56), function(x) return ty.avg_pool3d(x, 2) end)

-- Windows and grids.
add("unfold/8x32x56x56", one(8, 32, 56, 56), function(x) return ty.unfold(x, 3, 1, 1) end)
add("fold/8x288x3136", one(8, 288, 3136), function(x) return ty.fold(x, { 56, 56 }, 3, 1, 1) end)
add("pixel_shuffle/8x64x64x64", one(8, 64, 64, 64), function(x) return ty.pixel_shuffle(x, 2) end)
add("grid_sample/8x32x64x64", function() return ty.randn(8, 32, 64, 64), ty.rand(8, 64, 64, 2) * 2 - 1 end,
  function(x, g) return ty.grid_sample(x, g) end)
add("interpolate bicubic/8x16x64x64", one(8, 16, 64, 64),
  function(x) return ty.interpolate(x, { scale = 2, mode = "bicubic" }) end)
add("interpolate antialias/8x3x512x512", one(8, 3, 512, 512),
  function(x) return ty.interpolate(x, { size = { 224, 224 }, mode = "bilinear", antialias = true }) end)
add("interpolate trilinear/2x16x16x32x32", one(2, 16, 16, 32, 32),
  function(x) return ty.interpolate(x, { scale = 2, mode = "trilinear" }) end)

-- Searches, counts, order.
add("unique/10^6", function() return ty.randint(0, 5000, { 1000000 }) end, function(x) return (ty.unique(x)) end)
add("searchsorted/10^5 of 10^5", function() return (ty.randn(100000):sort(0)), ty.randn(100000) end,
  function(s, x) return ty.searchsorted(s, x) end)
add("bincount/10^6", function() return ty.randint(0, 1000, { 1000000 }) end, function(x) return ty.bincount(x) end)
add("histc/10^6", one(1000000), function(x) return ty.histc(x, 100, -4, 4) end)
add("median/1000x1000", one(1000, 1000), function(x) return (ty.median(x, 1)) end)
add("quantile/1000x1000", one(1000, 1000), function(x) return ty.quantile(x, 0.3, 1) end)
add("kthvalue/1000x1000", one(1000, 1000), function(x) return (ty.kthvalue(x, 300, 1)) end)
add("nonzero/10^6", function() return ty.randn(1000, 1000):gt(0) end, function(x) return ty.nonzero(x) end)
add("masked_select/10^6", function() return ty.randn(1000, 1000), ty.randn(1000, 1000):gt(0) end,
  function(x, m) return ty.masked_select(x, m) end)
add("cummax/1000x1000", one(1000, 1000), function(x) return (ty.cummax(x, 1)) end)
add("logcumsumexp/1000x1000", one(1000, 1000), function(x) return ty.logcumsumexp(x, 1) end)
add("roll/1000x1000", one(1000, 1000), function(x) return ty.roll(x, 100, 1) end)
add("diff/1000x1000", one(1000, 1000), function(x) return ty.diff(x, 1, 1) end)
add("repeat_interleave/1000x1000", one(1000, 1000), function(x) return ty.repeat_interleave(x, 3, 0) end)

-- Indices and segments.
local function rows() return ty.randn(1000, 512), ty.randint(0, 1000, { 4000 }), ty.randn(4000, 512) end
add("index_add/4000x512", rows, function(x, i, v) return ty.index_add(x, 0, i, v) end)
add("index_put/4000x512", rows, function(x, i, v) return ty.index_put(x, { i }, v) end)
add("scatter_reduce amax/1000x1000", function() return ty.randn(1000, 1000), ty.randint(0, 1000, { 1000, 1000 }) end,
  function(x, i) return ty.scatter_reduce(x, 1, i, x, "amax") end)
add("segment max/20000x64", function() return ty.randn(20000, 64), ty.arange(0, 20001, 20) end,
  function(x, o) return ty.segment_reduce(x, "max", { offsets = o }) end)
add("segment sum/20000x64", function() return ty.randn(20000, 64), ty.arange(0, 20001, 20) end,
  function(x, o) return ty.segment_reduce(x, "sum", { offsets = o }) end)

-- Distances and linear algebra.
add("cdist/1000x1000x64", function() return ty.randn(1000, 64), ty.randn(1000, 64) end,
  function(x, y) return ty.cdist(x, y) end)
add("cross/10^5x3", function() return ty.randn(100000, 3), ty.randn(100000, 3) end,
  function(x, y) return ty.cross(x, y) end)
add("solve/64x32x32", function() return ty.randn(64, 32, 32), ty.randn(64, 32, 4) end, ty.solve)
add("inverse/256x256", one(256, 256), ty.inverse)
add("cholesky/256x256", function()
  local x = ty.randn(256, 256)
  return x:matmul(x:t()) + ty.eye(256) * 10
end, function(x) return ty.cholesky(x) end)
add("svd/128x128", one(128, 128), function(x) return (ty.svd(x)) end)
add("lstsq/512x64", function() return ty.randn(512, 64), ty.randn(512, 4) end,
  function(x, y) return (ty.lstsq(x, y)) end)
add("matrix_exp/32x32x32", function() return ty.randn(32, 32, 32) * 0.3 end, ty.matrix_exp)
add("slogdet/64x32x32", one(64, 32, 32), ty.slogdet)

-- Special functions and losses over lattices.
for _, op in ipairs { "lgamma", "digamma", "i0", "erfcx" } do add(op .. "/10^6", positive(1000, 1000), ty[op]) end
add("erfinv/10^6", function() return ty.rand(1000, 1000) * 1.8 - 0.9 end, ty.erfinv)
add("xlogy/10^6", function() return ty.rand(1000, 1000), ty.rand(1000, 1000) + 0.1 end, ty.xlogy)
add("clamp of tensors/10^6", function() return ty.randn(1000, 1000), -ty.rand(1000, 1000), ty.rand(1000, 1000) end,
  ty.clamp)
add("lerp by a tensor/10^6", function() return ty.randn(1000, 1000), ty.randn(1000, 1000), ty.rand(1000, 1000) end,
  ty.lerp)
add("ctc_loss/200x16x32", function()
  return ty.randn(200, 16, 32):log_softmax(2), ty.randint(1, 32, { 16, 40 }), ty.full({ 16 }, 200, { dtype = "i64" }),
    ty.full({ 16 }, 40, { dtype = "i64" })
end, function(x, t, n, m) return ty.ctc_loss(x, t, n, m) end)

return items
