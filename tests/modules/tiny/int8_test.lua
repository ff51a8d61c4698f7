-- tiny.int8, tiny.arena and tiny.search, and models.MobileNetV2.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local models = require "tycho.models"
local tiny = require "tycho.tiny"

local nn = ty.nn

local function mobilenet()
  ty.manual_seed(3)
  local model = models.MobileNetV2 { in_channels = 2, classes = 3, stem = 8, stride = 1, width = 16, dropout = 0,
    settings = { { 1, 8, 1, 1 }, { 2, 12, 2, 2 } } }
  for _ = 1, 3 do model(ty.randn(8, 2, 8, 8)) end
  -- of three classes, which differ by how bright they are
  local x = ty.randn(6, 2, 8, 8) + ty.tensor { -1.5, 0, 1.5, -1.5, 0, 1.5 }:reshape(6, 1, 1, 1)
  tiny.fold(model, x)
  return model, x, tiny.int8(model, x)
end

check.test("codes of weights: symmetric, a scale for each output", function()
  ty.manual_seed(1)
  local w = ty.randn(4, 3, 2, 2)
  local codes, scale = tiny.int8_weight(w)
  check.equal(codes.dtype, "i8")
  check.equal(codes:to("f32"):flatten(1):abs():amax({ 1 }):tolist(), { 127, 127, 127, 127 })
  local back = codes:to "f32" * scale:reshape(4, 1, 1, 1)
  check.ok(((back - w):abs():flatten(1):amax { 1 } / scale):amax():item() <= 0.5001, "half a step")
end)

check.test("every node is the float convolution or sum of its codes, rounded", function()
  local _, x, network = mobilenet()
  local y = network:forward(network:codes(x))
  local function value(place)
    local from = place == 0 and network.input or network.nodes[place]
    return (y[place]:to "f64" - from.zero) * from.scale
  end
  local kinds = {}
  for i, node in ipairs(network.nodes) do
    local v
    if node.kind == "conv" then
      local scale = node.weight_scale:to "f64"
      local weight = node.weight:to "f64" * scale:reshape(-1, 1, 1, 1)
      v = ty.conv2d(value(node.inputs[1]), weight, node.bias:to "f64" * scale * node.x_scale, node.stride, node.padding,
        1, node.groups)
    else
      v = value(node.inputs[1]) + value(node.inputs[2])
    end
    local exact = v / node.scale + node.zero
    -- factor is f32: within its rounding of a tie either neighbour is right
    local got = y[i]:to "f64"
    local cut = exact:clamp(node.low, 127)
    check.ok((got - cut):abs():amax():item() <= 0.5 + 1e-4, node.kind .. " " .. i)
    kinds[node.kind] = true
  end
  check.equal(kinds, { conv = true, add = true })
end)

check.test("a linear layer of bytes is a 1x1 convolution: exact sums, rounded", function()
  ty.manual_seed(2)
  local x, w = ty.randint(-128, 128, { 5, 7 }):to "i8", ty.randint(-127, 128, { 4, 7 }):to "i8"
  local bias, factor = ty.randn(4) * 100, ty.rand(4) * 0.01
  local y = ty.conv2d_int8(x:reshape(5, 7, 1, 1), w:reshape(4, 7, 1, 1), bias, factor, 1, 0, 1, 3, -5, -128)
  local sums = ty.matmul_int8(x, w:transpose(0, 1):contiguous()):to "f64" - w:to("f64"):sum(1) * 3
  local want = (((sums + bias:to "f64") * factor:to "f64"):round() - 5):clamp(-128, 127)
  check.equal(ty.all(y:reshape(5, 4):to("f64"):eq(want)):item(), true)
end)

check.test("scaled gradients: the norms' ratio of the float model, and its steps", function()
  ty.manual_seed(4)
  local conv = nn.Conv2d(3, 4, 3, { padding = 1 })
  ty.no_grad(function() conv.weight:mul_(ty.tensor { 0.01, 1, 30, 0.2 }:reshape(4, 1, 1, 1)) end) -- scales of all sizes
  local Mean = nn.module "Mean"
  function Mean:init() self.conv = conv end
  function Mean:forward(h) return self.conv(h):mean { 2, 3 } end
  local model, pictures = Mean(), ty.randn(5, 3, 6, 6)
  local network = tiny.int8(model, pictures)
  local node, codes = network.nodes[1], network:codes(pictures)
  -- the float model of the same numbers
  local scale = node.weight_scale:reshape(4, 1, 1, 1)
  local x = (codes:to "f32" - network.input.zero) * network.input.scale
  local weight = (node.weight:to "f32" * scale):requires_grad_()
  local bias = (node.bias * node.weight_scale * node.x_scale):requires_grad_()
  local given = ty.randn(5, 4)
  local y = network:forward(codes)
  -- codes at the ends of the range count as cut
  local inside = ty.logical_and(y[1]:gt(-128), y[1]:lt(127)):to "f32"
  ty.sum(ty.conv2d(x, weight, bias, 1, 1) * inside * given:reshape(5, 4, 1, 1) / 36):backward()
  network:backward(y, given, { [1] = 1 }, function(place, dw, db)
    check.equal(place, 1)
    local up = 1 / node.weight_scale:square()
    local scaled, scaled_bias = dw * up:reshape(4, 1, 1, 1), db * up / node.x_scale ^ 2
    local function ratio(w, g) return w:flatten(1):norm(2, 1) / g:flatten(1):norm(2, 1) end
    local want = ratio(weight:detach(), weight.grad)
    check.ok((ratio(node.weight:to "f32", scaled) / want - 1):abs():amax():item() < 1e-4, "of weights")
    check.ok((ratio(node.weight:to "f32", dw) / want * node.weight_scale:square() - 1):abs():amax():item() < 1e-4,
      "without scaling it is off by the square of the scale")
    local biases = ratio(bias:detach():reshape(4, 1), bias.grad:reshape(4, 1))
    local got = ratio(node.bias:reshape(4, 1), scaled_bias:reshape(4, 1))
    check.ok((got / biases - 1):abs():amax():item() < 1e-4, "of biases")
    -- a step on codes is the float step
    check.ok((scaled * scale - weight.grad):abs():amax():item() < 1e-4 * weight.grad:abs():amax():item(), "a step")
  end)
end)

check.test("gradients through the network are those of the float one, but for rounding", function()
  local model, x, network = mobilenet()
  local given = ty.randn(6, 16)
  local features = model.features(x):mean { 2, 3 }
  ty.sum(features * given):backward()
  local float = {}
  for name, p in model:named_parameters() do float[name] = p.grad end
  local y, wanted, seen = network:forward(network:codes(x)), {}, 0
  for i, node in ipairs(network.nodes) do if node.kind == "conv" then wanted[i] = 1 end end
  network:backward(y, given, wanted, function(place, dw)
    local node = network.nodes[place]
    local g, want = dw / node.weight_scale:reshape(-1, 1, 1, 1), float[node.name .. ".weight"]
    local cosine = ty.sum(g * want):item() / (g:norm():item() * want:norm():item())
    check.ok(cosine > 0.97, ("%s: cosine %.4f"):format(node.name, cosine))
    seen = seen + 1
  end)
  check.equal(seen, 10)
end)

check.test("some channels: the same gradient, of these alone", function()
  local _, x, network = mobilenet()
  local y, given = network:forward(network:codes(x)), ty.randn(6, 16)
  local last = #network.nodes
  local whole
  network:backward(y, given, { [last] = 1 }, function(_, dw) whole = dw end)
  network:backward(y, given, { [last] = 0.5 }, function(_, dw)
    check.equal(dw.shape, { 16, 6, 1, 1 })
    check.equal(ty.all(dw:eq(whole:narrow(1, 0, 6))):item(), true)
  end)
  network:backward(y, given, { [last] = 0 }, function(_, dw, db)
    check.equal({ dw, db.shape }, { nil, { 16 } })
  end)
end)

local function trainer(bytes, more)
  local _, x, network = mobilenet()
  local options = { classes = 3, bytes = bytes, lr = 0.05, biases = 4, weights = { [#network.nodes] = 1, [7] = 0.5 } }
  for key, value in pairs(more or {}) do options[key] = value end
  return tiny.arena(network, options), network:codes(x), ty.tensor { 0, 1, 2, 0, 1, 2 }
end

check.test("the plan: no two numbers that are alive share a byte, all lie in the arena, which is held to", function()
  local one, codes, labels = trainer(1 << 30)
  one:step(codes, labels)
  local report, places = one:report(), one:places()
  local overlaps, largest, total = 0, 0, 0
  for i, a in ipairs(places) do
    largest, total = math.max(largest, a.offset + a.bytes), total + a.bytes
    for k = 1, i - 1 do
      local b = places[k]
      local together = a.first <= b.last and b.first <= a.last
      if together and a.offset < b.offset + b.bytes and b.offset < a.offset + a.bytes then overlaps = overlaps + 1 end
    end
  end
  check.equal(overlaps, 0)
  check.ok(largest <= report.arena and report.arena < total, "shared")
  check.equal(report.bytes, report.arena + report.held + report.batch)
  check.equal(report.held, 4 * (16 * 3 + 3) + 4 * (24 + 24 + 12 + 16 + 12) + 5 * (16 * 12 + 12 * 8), "what is trained")
  local enough, short = trainer(report.bytes), trainer(report.bytes - 1)
  enough:step(codes, labels)
  check.fails(function() short:step(codes, labels) end, "bytes, 1 more than the")
  local none = trainer(report.held)
  check.fails(function() none:step(codes, labels) end, "tiny.arena: bytes: what is trained and the batch take")
end)

check.test("steps: recorded as run, codes follow their fractions, the rest stays, the loss falls", function()
  local one, codes, labels = trainer(1 << 30, { lr = 0.3 })
  local before = {}
  for i, node in ipairs(one.network.nodes) do before[i] = node.weight and node.weight:clone() end
  local first = one:step(codes, labels):item()
  local later = 0
  for i = 1, 160 do
    local loss = one:step(codes, labels):item()
    if i > 120 then later = later + loss / 40 end
  end
  check.ok(later < 0.95 * first, ("the loss falls, %.4f to %.4f"):format(first, later))
  local last = #one.network.nodes
  for i, node in ipairs(one.network.nodes) do
    if i == last then
      local part = one.parts[i]
      check.equal(ty.all(node.weight:to("f32"):eq(part.weight:detach():round():clamp(-127, 127))):item(), true)
      check.equal(ty.all(node.weight:eq(before[i])):item(), false)
    elseif i == 7 then
      check.equal(ty.all(node.weight:narrow(1, 8, 8):eq(before[i]:narrow(1, 8, 8))):item(), true, "other channels")
    elseif node.weight then
      check.equal(ty.all(node.weight:eq(before[i])):item(), true, "node " .. i)
    end
  end
end)

check.test("the search finds the best of a knapsack, and never takes what does not fit", function()
  local gain = { { 0, 5, 6 }, { 0, 4 }, { 0, 3, 9 }, { 0, 2 }, { 0, 7 } }
  local cost = { { 0, 4, 7 }, { 0, 3 }, { 0, 2, 8 }, { 0, 1 }, { 0, 6 } }
  local function sum(of, scheme)
    local s = 0
    for i, choice in ipairs(scheme) do s = s + of[i][choice] end
    return s
  end
  local best = 0
  for a = 1, 3 do for b = 1, 2 do for c = 1, 3 do for d = 1, 2 do for e = 1, 2 do
    local scheme = { a, b, c, d, e }
    if sum(cost, scheme) <= 11 then best = math.max(best, sum(gain, scheme)) end
  end end end end end
  local scheme, worth, history = tiny.evolve { genes = { 3, 2, 3, 2, 2 }, generations = 20, seed = 1,
    gain = function(s) return sum(gain, s) end, fits = function(s) return sum(cost, s) <= 11 end }
  check.equal(worth, best)
  check.ok(sum(cost, scheme) <= 11)
  for i = 2, #history do check.ok(history[i] >= history[i - 1], "never worse") end
end)

check.test("contributions and a scheme in so many bytes", function()
  local _, x, network = mobilenet()
  local codes, labels = network:codes(x), ty.tensor { 0, 1, 2, 0, 1, 2 }
  local gains = tiny.contributions(network, { classes = 3, train = { codes, labels }, development = { codes, labels },
    steps = 10, batch = 4, shares = { 0.5, 1 }, first = 6, biases = { 2 } })
  local count = 0
  for _, by_share in pairs(gains.weights) do for _ in pairs(by_share) do count = count + 1 end end
  check.equal(count, 9) -- four of one group with two shares, and a depthwise one
  local batch = { codes:narrow(0, 0, 2), labels:narrow(0, 0, 2) }
  local found = tiny.search(network, gains, { classes = 3, bytes = 9000, batch = batch, population = 4,
    generations = 2 })
  check.ok(found.bytes <= 9000, "fits")
  local one = tiny.arena(network, { classes = 3, bytes = 9000, weights = found.weights, biases = found.biases })
  one:step(batch[1], batch[2])
  check.equal(one:report().bytes, found.bytes)
end)

check.test("errors", function()
  local model, x, network = mobilenet()
  check.fails(function() tiny.int8(nn.Sequential(nn.Linear(2, 2)), ty.ones(1, 2)) end, "tiny.int8: model: ")
  check.fails(function() tiny.int8(models.MobileNetV2 { in_channels = 2, classes = 2, stem = 8, settings = {} }, x) end,
    "fold it first")
  check.fails(function() tiny.arena(network, { classes = 3, weights = { [99] = 1 } }) end, "places of convolutions")
  check.fails(function() tiny.arena(network, { classes = 3, weights = { [1] = 2 } }) end, "in %(0, 1%]")
  check.fails(function() tiny.arena(network, { classes = 3, biases = 99 }) end, "biases: expected at most 10, got 99")
  check.fails(function() tiny.arena(network, {}) end, "tiny.arena: classes")
  check.equal(model.features ~= nil, true)
end)

check.finish()
