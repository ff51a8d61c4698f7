--- Single ops at shapes of use that other groups do not hold: elementwise ops from memory and in halves, reductions,
-- pools, resizing, padding, rearranging, random draws, indices, factorizations, sorting of integers.
-- The bar is the peer at its best: eager, channels last where that is faster.
local ty = require "tycho"
local calls = require "bench.lib.calls"

local items = {}

local function add(name, peer, make)
  items[#items + 1] = { name = name, peer = peer, bars = { peer = 1 }, setup = make }
end

-- fn(inputs...) without gradients.
local function forward(name, peer, inputs, fn)
  add(name, peer, function()
    local x = table.pack(inputs())
    return calls.forward(function() fn(table.unpack(x)) end)
  end)
end

-- With gradients of all inputs, from a random gradient of the result.
local function both(name, peer, inputs, fn)
  add(name, peer, function()
    local x = table.pack(inputs())
    local y = ty.no_grad(fn, table.unpack(x))
    return calls.both(x, ty.randn(y.shape, { dtype = y.dtype }), function() return fn(table.unpack(x)) end)
  end)
end

-- From memory: 10^7 elements.
local n = 10000000
for _, op in ipairs { "relu", "abs", "square" } do
  forward(op .. "/10^7", { "unary", { op = op, n = n } }, function() return ty.randn(n) end, ty[op])
end
forward("add/10^7", { "add", { n = n } }, function() return ty.randn(n), ty.randn(n) end, ty.add)
forward("outer/3162x3162", { "outer", { n = 3162 } }, function() return ty.randn(3162), ty.randn(3162) end, ty.outer)
both("softplus fwd+bwd/10^7", { "softplus", { n = n } }, function() return ty.randn(n) end,
  function(x) return ty.softplus(x) end)

-- 10^6 elements: in the cache.
forward("gelu/f32/1024x1024", { "rows", { op = "gelu", dtype = "f32" } }, function() return ty.randn(1024, 1024) end,
  function(x) return ty.gelu(x) end)
for _, dtype in ipairs { "f16", "bf16" } do
  local function x() return ty.randn(1024, 1024):to(dtype) end
  local function of_rows(op, fn, inputs)
    forward(("%s/%s/1024x1024"):format(op, dtype), { "rows", { op = op, dtype = dtype } }, inputs or x, fn)
  end
  of_rows("softmax", function(a) return ty.softmax(a, -1) end)
  of_rows("gelu", function(a) return ty.gelu(a) end)
  of_rows("gelu_tanh", function(a) return ty.gelu(a, "tanh") end)
  of_rows("layer_norm", function(a, w, b) return (ty.layer_norm(a, 1024, w, b)) end,
    function() return x(), ty.ones(1024):to(dtype), ty.zeros(1024):to(dtype) end)
  of_rows("sum", function(a) return a:sum() end)
  of_rows("sum of rows", function(a) return a:sum(1) end)
  of_rows("sum of columns", function(a) return a:sum(0) end)
  of_rows("add", ty.add, function() return x(), x() end)
end
for _, shape in ipairs { { 512, 768 }, { 4096, 256 } } do
  local rows, width = table.unpack(shape)
  both(("layer_norm fwd+bwd/%dx%d"):format(rows, width), { "layer_norm", { rows = rows, width = width } },
    function() return ty.randn(rows, width), ty.ones(width), ty.zeros(width) end,
    function(x, w, b) return (ty.layer_norm(x, width, w, b)) end)
end

-- Random draws.
forward("randperm/10^6", { "randperm", { n = 1000000 } }, function() return 1000000 end, ty.randperm)
for _, count in ipairs { 1, 8 } do
  for _, replacement in ipairs { false, true } do
    forward(("multinomial/64x50257/%d%s"):format(count, replacement and " again" or ""),
      { "multinomial", { count = count, replacement = replacement } },
      function() return ty.rand(64, 50257) end, function(p) return ty.multinomial(p, count, replacement) end)
  end
end

-- Pictures.
local function pictures(...)
  local shape = { ... }
  return function() return ty.randn(shape) end
end
local function pool(name, shape, args, fn)
  args.shape = shape
  forward(name .. "/" .. table.concat(shape, "x"), { "pool", args }, pictures(table.unpack(shape)), fn)
end
pool("adaptive_avg_pool 1", { 32, 512, 7, 7 }, { op = "adaptive_avg_pool2d", size = 1 },
  function(x) return ty.adaptive_avg_pool2d(x, 1) end)
pool("adaptive_avg_pool 7", { 8, 256, 56, 56 }, { op = "adaptive_avg_pool2d", size = 7 },
  function(x) return ty.adaptive_avg_pool2d(x, 7) end)
pool("avg_pool 2", { 8, 64, 112, 112 }, { op = "avg_pool2d", kernel = 2, stride = 2, padding = 0 },
  function(x) return ty.avg_pool2d(x, 2) end)
pool("avg_pool 3, stride 2", { 8, 64, 112, 112 }, { op = "avg_pool2d", kernel = 3, stride = 2, padding = 1 },
  function(x) return ty.avg_pool2d(x, 3, 2, 1) end)
pool("max_pool 2", { 8, 64, 112, 112 }, { op = "max_pool2d", kernel = 2, stride = 2, padding = 0 },
  function(x) return (ty.max_pool2d(x, 2)) end)
pool("max_pool 3, stride 2", { 8, 64, 112, 112 }, { op = "max_pool2d", kernel = 3, stride = 2, padding = 1 },
  function(x) return (ty.max_pool2d(x, 3, 2, 1)) end)
pool("mean", { 32, 512, 7, 7 }, { op = "mean" }, function(x) return x:mean { 2, 3 } end)
for _, mode in ipairs { "nearest", "bilinear" } do
  pool("interpolate " .. mode, { 8, 64, 64, 64 }, { op = "interpolate", mode = mode },
    function(x) return ty.interpolate(x, { scale = 2, mode = mode }) end)
end
for _, mode in ipairs { "constant", "reflect" } do
  pool("pad " .. mode, { 8, 64, 56, 56 }, { op = "pad", mode = mode },
    function(x) return ty.pad(x, { 1, 1, 1, 1 }, mode) end)
end
pool("flip", { 32, 3, 224, 224 }, { op = "flip" }, function(x) return x:flip(3) end)
add("cross_entropy fwd+bwd/8x21x128x128", { "cross_entropy", { shape = { 8, 21, 128, 128 } } }, function()
  local x, target = ty.randn(8, 21, 128, 128), ty.randint(0, 21, { 8, 128, 128 })
  return calls.both({ x }, nil, function() return ty.cross_entropy(x, target) end)
end)

-- Convolutions that conv/ does not hold. kernel, stride, padding, dilation, groups
for _, c in ipairs {
  { "depthwise, stride 2", { 8, 64, 112, 112 }, 64, 3, 2, 1, 1, 64 },
  { "depthwise 3x3", { 8, 144, 56, 56 }, 144, 3, 1, 1, 1, 144 },
  { "grouped 32", { 8, 128, 56, 56 }, 128, 3, 1, 1, 1, 32 },
  { "grouped 32", { 8, 512, 14, 14 }, 512, 3, 1, 1, 1, 32 },
  { "grouped 2", { 8, 64, 56, 56 }, 64, 3, 1, 1, 1, 2 },
  { "dilated 2", { 8, 64, 56, 56 }, 64, 3, 1, 2, 2, 1 },
  { "dilated 4", { 4, 256, 28, 28 }, 256, 3, 1, 4, 4, 1 },
  { "patches 4", { 8, 3, 224, 224 }, 96, 4, 4, 0, 1, 1 },
  { "patches 16", { 8, 3, 224, 224 }, 384, 16, 16, 0, 1, 1 },
} do
  local name, shape, out, kernel, stride, padding, dilation, groups = table.unpack(c)
  local peer = { shape = shape, out = out, kernel = kernel, stride = stride, padding = padding, dilation = dilation,
    groups = groups }
  local function tensors() return ty.randn(shape), ty.randn(out, shape[2] // groups, kernel, kernel) end
  local function conv(x, w) return ty.conv2d(x, w, nil, stride, padding, dilation, groups) end
  local label = ("/%s"):format(table.concat(shape, "x"))
  forward("conv " .. name .. label, { "conv", peer }, tensors, conv)
  both("conv " .. name .. " fwd+bwd" .. label, { "conv_both", peer }, tensors, conv)
end
local function transposed() return ty.randn(8, 128, 28, 28), ty.randn(128, 64, 2, 2) end
local function transpose(x, w) return ty.conv_transpose2d(x, w, nil, 2) end
forward("conv transposed 2x2/8x128x28x28", { "transposed", { grad = false } }, transposed, transpose)
both("conv transposed 2x2 fwd+bwd/8x128x28x28", { "transposed", { grad = true } }, transposed, transpose)

-- Indices, sorting, joining.
local function indexed() return ty.randn(1000, 1000), ty.randint(0, 1000, { 1000, 1000 }) end
forward("gather/1000x1000", { "gather", {} }, indexed, function(x, i) return x:gather(1, i) end)
forward("scatter_add/1000x1000", { "scatter_add", {} }, indexed, function(x, i) return x:scatter_add(1, i, x) end)
for _, shape in ipairs { { 1000000 }, { 1024, 1024 } } do
  forward("sort/i64/" .. table.concat(shape, "x"), { "sort", { shape = shape } },
    function() return ty.randint(0, 1 << 40, shape) end, function(x) return (x:sort(-1)) end)
end
both("cat fwd+bwd/4x1000x1000", { "cat", {} },
  function() return ty.randn(1000, 1000), ty.randn(1000, 1000), ty.randn(1000, 1000), ty.randn(1000, 1000) end,
  function(...) return ty.cat({ ... }, 0) end)

-- Matrices.
for _, shape in ipairs { { 64, 64 }, { 256, 256 }, { 512, 512 }, { 2048, 128 } } do
  forward(("qr/%dx%d"):format(table.unpack(shape)), { "qr", { shape = shape } },
    function() return ty.randn(shape) end, function(x) return (ty.qr(x)) end)
end
for _, side in ipairs { 16, 64, 256, 512 } do
  forward(("eigh/%dx%d"):format(side, side), { "eigh", { n = side } }, function()
    local x = ty.randn(side, side)
    return x + x:t()
  end, function(x) return (ty.eigh(x)) end)
end
for _, dtype in ipairs { "f32", "bf16" } do
  forward(("linear/%s/17x4096x4096"):format(dtype), { "linear", { dtype = dtype } },
    function() return ty.randn(17, 4096):to(dtype), ty.randn(4096, 4096):to(dtype) end,
    function(x, w) return ty.linear(x, w) end)
end
for _, shape in ipairs { { 96, 128, 64, 128 }, { 64, 256, 256, 64 } } do
  local batch, rows, columns, depth = table.unpack(shape)
  for _, dtype in ipairs { "f32", "bf16" } do
    local label = ("bmm/%s/%dx%dx%dx%d"):format(dtype, batch, rows, columns, depth)
    forward(label, { "bmm", { shape = shape, dtype = dtype } }, function()
      return ty.randn(batch, rows, depth):to(dtype), ty.randn(batch, depth, columns):to(dtype)
    end, ty.matmul)
  end
end
forward("mv/1000x1000", { "mv", { n = 1000 } }, function() return ty.randn(1000, 1000), ty.randn(1000) end, ty.matmul)
forward("mv/4096x4096", { "mv", { n = 4096 } }, function() return ty.randn(4096, 4096), ty.randn(4096) end, ty.matmul)

add("lstm fwd+bwd/B1xT128xH256", { "lstm", { time = 128, width = 256 } }, function()
  local layer, x = ty.nn.LSTM(256, 256, { batch_first = false }), ty.randn(128, 1, 256)
  return calls.both({ x, table.unpack(layer:parameters()) }, ty.randn(128, 1, 256), function() return (layer(x)) end)
end)

return items
