--- Norms, softmax, cross entropy, gates: forward with backward, in the cache and out of it. The limit is the traffic of
-- a pass that touches each tensor as seldom as the formula allows, at the bandwidth of a copy.
local ty = require "tycho"
local calls = require "bench.lib.calls"

local items = {}
local N = 4 -- bytes of an f32

-- One item: make() returns the inputs that want gradients, the gradient of the result (nil for a scalar loss) and the
-- function. passes: how often n elements are read or written, forward and backward together.
local function add(name, big, elements, passes, peer, make)
  items[#items + 1] = { name = name, peer = peer, work = { copy = elements * passes * N },
    bars = { peer = 1.5, limit = big and 0.75 or nil }, setup = function()
      return calls.both(make())
    end }
end

local function add_forward(name, big, elements, passes, peer, make)
  items[#items + 1] = { name = name, peer = peer, work = { copy = elements * passes * N },
    bars = { peer = 1.5, limit = big and 0.75 or nil }, setup = function()
      local _, _, forward = make()
      return calls.forward(forward)
    end }
end

for _, rows in ipairs { 256, 65536 } do -- 1 MB and 256 MB
  local width, big = 1024, rows > 10000
  local size = rows * width
  local label = ("%dx%d"):format(rows, width)
  for _, op in ipairs { "softmax", "log_softmax" } do
    local function make()
      local x, g = ty.randn(rows, width), ty.randn(rows, width)
      return { x }, g, function() return ty[op](x, -1) end
    end
    add_forward(("%s/%s/fwd"):format(op, label), big, size, 2, { "softmax", { op = op, rows = rows, width = width,
      grad = false } }, make)
    add(("%s/%s/fwd+bwd"):format(op, label), big, size, 5, { "softmax", { op = op, rows = rows, width = width,
      grad = true } }, make)
  end
  for _, op in ipairs { "layer_norm", "rms_norm" } do
    local function make()
      local x, w, b, g = ty.randn(rows, width), ty.ones(width), ty.zeros(width), ty.randn(rows, width)
      if op == "layer_norm" then return { x, w, b }, g, function() return (ty.layer_norm(x, width, w, b)) end end
      return { x, w }, g, function() return (ty.rms_norm(x, width, w)) end
    end
    add_forward(("%s/%s/fwd"):format(op, label), big, size, 2, { "row_norm", { op = op, rows = rows, width = width,
      grad = false } }, make)
    add(("%s/%s/fwd+bwd"):format(op, label), big, size, 5, { "row_norm", { op = op, rows = rows, width = width,
      grad = true } }, make)
  end
end

for _, shape in ipairs { { 16, 64, 32, 32 }, { 32, 256, 96, 96 } } do -- 4 MB and 302 MB
  local big = shape[1] > 16
  local size = shape[1] * shape[2] * shape[3] * shape[4]
  local label = table.concat(shape, "x")
  local function make(norm)
    return function()
      local x, w, b, g = ty.randn(shape), ty.ones(shape[2]), ty.zeros(shape[2]), ty.randn(shape)
      return { x, w, b }, g, function() return norm(x, w, b) end
    end
  end
  add(("group_norm/%s/fwd+bwd"):format(label), big, size, 5, { "group_norm", { shape = shape, groups = 8 } },
    make(function(x, w, b) return (ty.group_norm(x, 8, w, b)) end))
  -- The statistics need a pass of their own: x is read twice forward, x and the gradient twice backward.
  add(("batch_norm/%s/fwd+bwd"):format(label), big, size, big and 8 or 5, { "batch_norm", { shape = shape } },
    make(function(x, w, b) return ty.batch_norm(x, nil, nil, w, b, true) end))
end

for _, rows in ipairs { 256, 1024 } do -- 51 MB and 206 MB
  local classes = 50257
  add(("cross_entropy/%dx%d/fwd+bwd"):format(rows, classes), rows > 256, rows * classes, 3,
    { "cross_entropy", { rows = rows, classes = classes } }, function()
      local x, target = ty.randn(rows, classes), ty.randint(0, classes, { rows })
      return { x }, nil, function() return ty.cross_entropy(x, target) end
    end)
end

for _, rows in ipairs { 256, 32768 } do
  local width, big = 3072, rows > 10000
  local label = ("%dx%d"):format(rows, width)
  add(("gelu/%s/fwd+bwd"):format(label), big, rows * width, 5, { "gelu", { rows = rows, width = width } }, function()
    local x, g = ty.randn(rows, width), ty.randn(rows, width)
    return { x }, g, function() return ty.gelu(x, "tanh") end
  end)
  add(("silu_gate/%s/fwd+bwd"):format(label), big, rows * width, 8, { "silu_gate", { rows = rows, width = width } },
    function()
      local x, y, g = ty.randn(rows, width), ty.randn(rows, width), ty.randn(rows, width)
      return { x, y }, g, function() return ty.glu(y, x, "silu") end
    end)
end

return items
