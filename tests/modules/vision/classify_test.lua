-- Image classifiers: training, evaluation, random shifts.
local here = arg and arg[0]:match ".*/" or "tests/modules/vision/"
local check = dofile(here .. "../../lua/check.lua")
local scratch = dofile(here .. "../../lua/scratch.lua")
local ty = require "tycho"
local vision = require "tycho.vision"

check.test("vision: a network learns a few digits, shifts stay inside", function()
  ty.manual_seed(0)
  local few = ty.data.subset(ty.data.digits(), ty.arange(60))
  local model = vision.ResNet { in_channels = 1, classes = 10, small = true, channels = { 8, 16 }, blocks = { 1, 1 } }
  local losses = vision.fit(model, few, { steps = 120, batch_size = 20, quiet = true })
  check.equal(#losses, 120)
  check.equal(model.training, false)
  check.ok(vision.accuracy(model, few) > 0.9, "learnt by heart")
  check.equal(vision.predict(model, few:batch(ty.arange(3)).image).shape, { 3 })
  local image = ty.zeros(1, 1, 5, 5)
  image["0, 0, 2, 2"] = 1
  for _ = 1, 10 do
    local moved = vision.random_shift(image, 2, -1)
    check.equal(moved.shape, { 1, 1, 5, 5 })
    check.equal(moved:max():item(), 1)
  end
  local names = vision.ResNet({ classes = 3 }):state_dict()
  for _, name in ipairs { "conv1.weight", "bn1.running_var", "layer2.0.downsample.0.weight", "layer4.1.bn2.bias",
    "fc.weight" } do
    check.ok(names[name], name)
  end
end)

check.test("ResNet: bottlenecks learn a few digits", function()
  ty.manual_seed(2)
  local few = ty.data.subset(ty.data.digits(), ty.arange(60))
  local model = vision.ResNet { in_channels = 1, classes = 10, small = true, channels = { 8, 16 }, blocks = { 1, 1 },
    block = "bottleneck" }
  vision.fit(model, few, { steps = 120, batch_size = 20, quiet = true })
  check.ok(vision.accuracy(model, few) > 0.9, "learnt by heart")
end)

check.test("fit is AdamW with a one-cycle rate, number by number", function()
  local nn = ty.nn
  local function network()
    ty.manual_seed(4)
    return vision.ResNet { in_channels = 1, classes = 10, small = true, channels = { 4 }, blocks = { 1 },
      dropout = 0.2 }
  end
  local set, options = ty.data.digits(), { steps = 12, batch_size = 16, lr = 2e-3, weight_decay = 0.02, smoothing = 0.1,
    seed = 3, quiet = true }
  local model = network()
  local losses = vision.fit(model, set, options)
  local other, want = network():train(), {}
  local loader = ty.data.DataLoader(set, { batch_size = 16, shuffle = true, seed = 3, drop_last = true })
  local opt = ty.optim.AdamW(other:parameters(),
    { lr = 2e-3, weight_decay = 0.02, schedule = ty.optim.one_cycle { steps = 12 } })
  for step = 1, 12 do
    local batch = loader:next()
    local loss = nn.cross_entropy(other(batch.image), batch.label, { label_smoothing = 0.1 })
    want[step] = loss:item()
    opt:step(loss)
  end
  check.equal(losses, want)
  for name, t in pairs(model:state_dict()) do check.equal(t:tolist(), other:state_dict()[name]:tolist(), name) end

  -- The same in two runs, by the folder of train.fit; the average of the weights comes second.
  options.steps, options.folder, options.pause = 12, scratch.file "run", 5
  model = network()
  vision.fit(model, set, options)
  options.pause, options.resume, options.average = nil, true, nil
  check.equal(vision.fit(model, set, options), losses)
  local trained = network()
  local averaged
  losses, averaged = vision.fit(trained, set, { steps = 3, average = 0.9, quiet = true })
  check.equal({ #losses, averaged.training, averaged ~= trained }, { 3, false, true })
end)

-- From the definition: the mean, over what is there, of the share of what is there among all that scores as high.
local function naive(scores, labels)
  local sum, there = 0, 0
  for i, s in ipairs(scores) do
    if labels[i] == 1 then
      local above, hits = 0, 0
      for j, other in ipairs(scores) do
        if other >= s then above, hits = above + 1, hits + labels[j] end
      end
      sum, there = sum + hits / above, there + 1
    end
  end
  return sum / there
end

check.test("mean average precision", function()
  -- scikit-learn 1.5: average_precision_score([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]).
  local mean, by_class = vision.mean_average_precision(ty.tensor { { 0.1 }, { 0.4 }, { 0.35 }, { 0.8 } },
    ty.tensor { { 0 }, { 0 }, { 1 }, { 1 } })
  check.close(mean, 0.8333333333333333, 1e-12)
  check.close(by_class:tolist(), { 0.8333333333333333 }, 1e-12)
  ty.manual_seed(2)
  for _, n in ipairs { 1, 2, 7, 60 } do
    local scores = (ty.randn(n, 5) * 3):round() -- with many of the same
    local labels = ty.rand(n, 5):lt(0.4):to "u8"
    labels["0, 0:4"]:fill_(1)
    labels[":, 4"]:fill_(0)
    mean, by_class = vision.mean_average_precision(scores, labels)
    local sum, list = 0, by_class:tolist()
    for c = 0, 3 do
      local want = naive(scores:select(1, c):tolist(), labels:select(1, c):tolist())
      check.close(list[c + 1], want, 1e-12)
      sum = sum + want
    end
    check.ok(list[5] ~= list[5], "a class of which nothing is there")
    check.close(mean, sum / 4, 1e-12)
  end
  local function fails(scores, labels, text)
    check.fails(function() vision.mean_average_precision(scores, labels) end, text)
  end
  fails(ty.ones(2, 3), ty.ones(2, 2),
    "expected scores and labels [n, classes], got a tensor [2, 3] and a tensor [2, 2]")
  fails(ty.ones(2, 2), ty.ones(2, 2) * 2, "labels: expected 0 and 1 alone, got others")
  fails(ty.ones(2, 2), ty.zeros(2, 2), "labels: expected at least one class that is there, got none")
  fails(ty.full({ 1, 1 }, 0 / 0), ty.ones(1, 1), "scores: expected numbers, got NaN")
end)

check.test("labels that are many: what is there is learnt", function()
  ty.manual_seed(1)
  local n = 64
  local labels = ty.rand(n, 3):lt(0.5):to "u8"
  -- Where a class is there its stripe is light; bytes, as sets have them.
  local images = (labels:to "f32":reshape(n, 1, 3, 1):expand(n, 1, 3, 6) * 200 + ty.rand(n, 1, 3, 6) * 55):to "u8"
  local set = ty.data.TensorDataset { picture = images, objects = labels }
  local model = ty.nn.Sequential(ty.nn.Flatten(), ty.nn.Linear(18, 3))
  local function pixels(x) return x:to "f32" / 127.5 - 1 end
  local losses = vision.fit(model, set, { steps = 80, batch_size = 32, lr = 0.05, image = "picture", label = "objects",
    transform = pixels, quiet = true })
  check.ok(losses[#losses] < 0.2 * losses[1], "loss")
  local mean = vision.mean_average_precision(vision.scores(model, pixels(images)), labels)
  check.ok(mean > 0.99, "found")
  local logits = ty.randn(4, 3)
  local want = ty.nn.bce_with_logits(logits, labels["0:4"]:to "f32"):item()
  check.close(vision.classifier_loss(logits, labels["0:4"], 0.3):item(), want, 1e-7)
  check.fails(function() vision.fit(model, set, { steps = 1, quiet = true }) end,
    "vision.fit: dataset: expected a tensor in the field 'image' of a batch, which has objects, picture")
end)

check.test("how well a model reads, and signals in batches", function()
  ty.manual_seed(2)
  local model = ty.nn.Sequential(ty.nn.Flatten(), ty.nn.Linear(12, 3))
  local set = { image = ty.randn(300, 2, 6), label = ty.randint(0, 3, { 300 }) }
  local logits = ty.no_grad(model.forward, model, set.image)
  check.close(vision.scores(model, set.image):flatten():tolist(), logits:flatten():tolist(), 1e-6)
  local found = vision.measure(model, set)
  check.close(found.loss, ty.nn.cross_entropy(logits, set.label):item(), 1e-5)
  check.close(found.accuracy, logits:argmax(1):eq(set.label):to("f64"):mean():item(), 1e-12)
  check.fails(function() vision.measure(model, {}) end, "vision.measure: set.image: expected a tensor, got nil")
  check.fails(function() vision.scores(model, ty.ones(2, 12)) end, "images: expected [n, c, t], [n, c, h, w] or")
end)

check.test("FixMatch: what is surely judged of the weakly disturbed is wanted of the strongly disturbed", function()
  local model = ty.nn.Linear(1, 1)
  ty.no_grad(function()
    model.weight:fill_(1)
    model.bias:fill_(0)
  end)
  local function sigmoid(x) return 1 / (1 + math.exp(-x)) end
  local x, labels, others = ty.tensor { { 2.0 } }, ty.tensor { { 1.0 } }, ty.tensor { { 3.0 }, { -4.0 }, { 0.5 } }
  -- 3 is surely there, -4 surely not, of 0.5 nobody is sure; strongly disturbed they are one less.
  local options = { weak = function(t) return t end, strong = function(t) return t - 1 end }
  local loss = vision.fixmatch_loss(model, x, labels, others, options)
  local want = -math.log(sigmoid(2)) + (-math.log(sigmoid(2)) - math.log(1 - sigmoid(-5))) / 3
  check.close(loss:item(), want, 1e-6)
  loss:backward()
  check.close(model.weight.grad:item(), 2 * (sigmoid(2) - 1) + (2 * (sigmoid(2) - 1) - 5 * sigmoid(-5)) / 3, 1e-6)
  check.fails(function() vision.fixmatch_loss(model, x, labels, others, { weak = print }) end,
    "vision.fixmatch_loss: strong: expected a function, got nil")
end)

check.finish()
