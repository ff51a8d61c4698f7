-- SAIL: the sigmoid loss against its definition, in pieces and in any order; heads; frozen encoders; k-NN.
local here = arg and arg[0]:match ".*/" or "tests/modules/vlm/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local vlm = require "tycho.vlm"

local sail, nn = vlm.sail, ty.nn

local function distance(a, b) return (a:to "f64" - b:to "f64"):abs():max():item() end

-- Seven texts of five pictures; the third picture has none.
local owner = ty.tensor { 0, 0, 1, 3, 4, 4, 4 }
local function features()
  ty.manual_seed(1)
  return ty.randn({ 5, 3 }, { dtype = "f64" }), ty.randn({ 7, 3 }, { dtype = "f64" })
end

check.test("the loss is the sum over all pairs of the paper", function()
  local image, text = features()
  local a, b = nn.normalize(image):tolist(), nn.normalize(text):tolist()
  local of = owner:tolist()
  local function naive(t, bias)
    local sum = 0
    for i = 1, 5 do
      for j = 1, 7 do
        local dot = a[i][1] * b[j][1] + a[i][2] * b[j][2] + a[i][3] * b[j][3]
        local z = of[j] == i - 1 and 1 or -1
        sum = sum + math.log(1 + math.exp(-z * (t * dot + bias)))
      end
    end
    return sum / 5
  end
  for _, at in ipairs { { 10, -10 }, { 1, 0 }, { 3, 2 } } do
    check.close(sail.loss(image * 2, text / 3, at[1], at[2], { owner = owner }):item(), naive(at[1], at[2]), 1e-9)
  end
  -- Without owner, text j is of picture j.
  local five = text["0:5"]
  check.close(sail.loss(image, five, 5, -1):item(), sail.loss(image, five, 5, -1, { owner = ty.arange(5) }):item(), 0)
end)

check.test("in pieces it has the same value and the same gradients", function()
  local image, text = features()
  local function of(chunk)
    local leaves = { image:clone():requires_grad_(), text:clone():requires_grad_(),
      ty.tensor(4.0, { dtype = "f64" }):requires_grad_(), ty.tensor(-2.0, { dtype = "f64" }):requires_grad_() }
    local loss = sail.loss(leaves[1], leaves[2], leaves[3], leaves[4], { owner = owner, chunk = chunk })
    loss:backward()
    return loss:item(), leaves
  end
  local whole, want = of()
  for _, chunk in ipairs { 1, 2, 3, 5, 99 } do
    local loss, leaves = of(chunk)
    check.close(loss, whole, 1e-12)
    for i, leaf in ipairs(leaves) do
      check.ok(distance(leaf.grad, want[i].grad) < 1e-12, ("chunk %d, gradient %d"):format(chunk, i))
      check.ok(want[i].grad:abs():max():item() > 1e-4, "there is a gradient")
    end
  end
end)

check.test("another order of the batch is the same loss", function()
  local image, text = features()
  local want = sail.loss(image, text, 6, -3, { owner = owner }):item()
  local rows, columns = ty.tensor { 3, 0, 4, 1, 2 }, ty.tensor { 6, 2, 0, 5, 1, 4, 3 }
  local place = ty.tensor { 1, 3, 4, 0, 2 } -- where each picture went
  local moved = place:index_select(0, owner:index_select(0, columns))
  check.close(sail.loss(image:index_select(0, rows), text:index_select(0, columns), 6, -3, { owner = moved }):item(),
    want, 1e-12)
  check.ok(math.abs(sail.loss(image:index_select(0, rows), text, 6, -3, { owner = owner }):item() - want) > 1e-3,
    "but texts belong to their pictures")
end)

check.test("heads: gated-linear and linear, from the definition; features have length 1", function()
  ty.manual_seed(2)
  local x, y = ty.randn(4, 6), ty.randn(3, 5)
  local model = sail.Alignment { image = 6, text = 5, dim = 3, width = 8 }
  local head = model.image_head
  local normed = (x - x:mean(1, true)) / ((x - x:mean(1, true)):square():mean(1, true) + 1e-5):sqrt()
  local gate = ty.linear(normed, head.gate.weight, head.gate.bias)
  local value = ty.linear(normed, head.value.weight, head.value.bias)
  local want = nn.normalize(ty.linear(gate:clamp(0) * value, head.out.weight, head.out.bias))
  check.ok(distance(model:image_features(x), want) < 1e-5)
  check.ok(distance(model:text_features(y):square():sum(1), ty.ones(3)) < 1e-5)
  local cosines = model:image_features(x):matmul(model:text_features(y):transpose(0, 1))
  check.ok(distance(model(x, y), cosines * 10 - 10) < 1e-4, "t begins as 10 and b as -10")
  local linear = sail.Alignment { image = 6, text = 5, dim = 3, kind = "linear" }
  want = nn.normalize(ty.linear(normed, linear.image_head.out.weight, linear.image_head.out.bias))
  check.ok(distance(linear:image_features(x), want) < 1e-5)
end)

-- Pictures and texts of eight classes, seen by two encoders that never met: random maps of one-hot vectors and noise.
local function world(n, seed)
  ty.manual_seed(7)
  local eyes, ears = ty.randn(8, 12), ty.randn(8, 10)
  ty.manual_seed(seed)
  local labels = ty.arange(n) % 8
  local function seen(map, width) return map:index_select(0, labels) + ty.randn(n, width) * 0.3 end
  return seen(eyes, 12), ty.stack({ seen(ears, 10), seen(ears, 10) }, 1), labels
end

check.test("fit aligns what was never seen together; chunks and softmax as well", function()
  local image, text = world(64, 1)
  local more, texts, labels = world(40, 2)
  for _, o in ipairs { {}, { chunk = 3 }, { loss = "softmax" } } do
    ty.manual_seed(3)
    local model = sail.Alignment { image = 12, text = 10, dim = 16 }
    local losses = sail.fit(model, image, text, { steps = 80, lr = 1e-2, batch = 8, quiet = true, chunk = o.chunk,
      loss = o.loss })
    check.ok(losses[#losses] < losses[1], "the loss falls")
    local accuracy = vlm.zero_shot(model:image_features(more), model:text_features(texts:select(1, 0)["0:8"]), labels)
    check.ok(accuracy > 0.8, ("found %.2f"):format(accuracy))
  end
end)

check.test("embed computes features once, in batches, and leaves the encoder as it was", function()
  ty.manual_seed(4)
  local encoder, x = nn.Linear(6, 4), ty.randn(11, 6)
  local before, calls = encoder.weight:detach():clone(), 0
  local all = vlm.embed(11, function(start, rows)
    calls = calls + 1
    return encoder(x:narrow(0, start, rows))
  end, 4)
  check.equal({ calls, all.shape[1], all.requires_grad }, { 3, 11, false })
  check.ok(distance(all, encoder(x)) == 0)
  local model = sail.Alignment { image = 4, text = 6, dim = 4 }
  sail.fit(model, all, x, { steps = 3, batch = 11, quiet = true })
  check.ok(distance(encoder.weight, before) == 0 and encoder.weight.grad == nil, "frozen")
  check.fails(function() vlm.embed(3, function() return x end) end, "vlm.embed: fn: expected a tensor of 3 rows")
end)

check.test("joined and k-NN", function()
  local states = ty.tensor { { { 1.0, 2.0 }, { 3.0, 0.0 }, { 5.0, 4.0 } } }
  check.equal(sail.joined(states):tolist(), { { 1.0, 2.0, 4.0, 2.0 } })
  check.equal(sail.joined(states, false):tolist(), { { 3.0, 2.0, 5.0, 4.0 } })
  local known = ty.tensor { { 1.0, 0.0 }, { 0.9, 0.1 }, { 0.0, 1.0 }, { 0.1, 1.0 } }
  local asked, classes = ty.tensor { { 5.0, 0.1 }, { 0.2, 3.0 }, { 1.0, 0.9 } }, ty.tensor { 0, 0, 1, 1 }
  check.equal(sail.knn(known, classes, asked, ty.tensor { 0, 1, 0 }, 1), 1.0)
  check.close(sail.knn(known, classes, asked, ty.tensor { 1, 1, 1 }, 2), 1 / 3, 1e-6)
  -- Of all four as neighbours the nearer ones count more.
  check.equal(sail.knn(known, classes, asked, ty.tensor { 0, 1, 0 }), 1.0)
end)

check.test("a linear probe finds what lines divide, and k-NN what they do not", function()
  ty.manual_seed(8)
  local x = ty.randn(200, 2)
  local left = x:select(1, 0):gt(0):to "i64"
  check.ok(sail.linear_probe(x["0:100"], left["0:100"], x["100:200"], left["100:200"]) > 0.93)
  local cross = (x:select(1, 0) * x:select(1, 1)):gt(0):to "i64"
  check.ok(sail.linear_probe(x["0:100"], cross["0:100"], x["100:200"], cross["100:200"]) < 0.75)
  check.ok(sail.knn(x["0:100"], cross["0:100"], x["100:200"], cross["100:200"], 5) > 0.9)
  check.fails(function() sail.linear_probe(x, left - 1, x, left) end, "expected classes and labels from 0 on, got -1")
end)

check.test("new heads by a seed, and classes by the names that they are given", function()
  ty.manual_seed(9)
  local image, text = ty.randn(40, 3), ty.randn(40, 4)
  local options = { kind = "linear", dim = 8, steps = 5, batch = 20, seed = 3, quiet = true }
  local model, again = sail.aligned(image, text, options), sail.aligned(image, text, options)
  check.equal({ model.training, ty.recipe.apart(model, again) }, { false, 0.0 })
  local asked = {}
  local prompts = sail.prompts({ "dog", "cat" }, function(texts)
    asked[#asked + 1] = texts[2]
    return text:narrow(0, 2 * #asked, 2)
  end, { "a %s", "the %s" })
  check.equal({ asked, #prompts }, { { "a cat", "the cat" }, 2 })
  local share, found = sail.zero_shot(model, prompts, image:narrow(0, 0, 6), ty.tensor { 0, 1, 0, 1, 0, 1 })
  local sum = model:text_features(prompts[1]) + model:text_features(prompts[2])
  local want, wanted = vlm.zero_shot(model:image_features(image:narrow(0, 0, 6)), sum, ty.tensor { 0, 1, 0, 1, 0, 1 })
  check.equal({ share, found:tolist() }, { want, wanted:tolist() })
  check.fails(function() sail.zero_shot(model, {}, image, ty.arange(40)) end, "expected at least one, got none")
  check.fails(function() sail.prompts({ "a" }, 3) end, "vlm.sail.prompts: read: expected a function, got 3")
  check.fails(function() sail.aligned(image, 3, options) end, "vlm.sail.aligned: text: expected a tensor, got 3")
end)

check.test("wrong arguments", function()
  local x = ty.ones(3, 2)
  check.fails(function() sail.loss(x, ty.ones(4, 2), 1, 0) end,
    "vlm.sail.loss: owner: expected i64 [4] where there are 3 pictures, got nil")
  check.fails(function() sail.loss(x, x, 1, 0, { owner = ty.arange(2) }) end, "owner: expected i64 [3]")
  check.fails(function() sail.loss(x, ty.ones(3, 4), 1, 0) end, "expected image [n, d] and text [m, d]")
  check.fails(function() sail.Alignment { image = 3 } end,
    "vlm.sail.Alignment: text: expected an integer >= 1, got nil")
  check.fails(function() sail.Alignment { image = 3, text = 3, kind = "mlp" } end, 'kind: expected "glu" or "linear"')
  check.fails(function() sail.fit(nn.Linear(1, 1), x, x, {}) end, "expected a SailAlignment, got a module Linear")
  check.fails(function() sail.Alignment { image = 3, text = 3 }:image_features(x) end,
    "SailAlignment: image: expected features [n, 3], got a tensor [3, 2]")
  check.fails(function() sail.joined(ty.ones(2, 1, 3)) end, "states: expected [n, 1 + patches, d]")
  check.fails(function() sail.knn(x, ty.arange(3), x, ty.arange(2)) end, "vlm.sail.knn: expected known [m, d]")
end)

check.finish()
