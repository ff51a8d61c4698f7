-- peft.ce_ssl: random deactivation, ranks from one look, unlabelled signals; and adapters on one-dimensional
-- convolutions, and the network for signals.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local models = require "tycho.models"
local peft = require "tycho.peft"

local nn, ce_ssl = ty.nn, peft.ce_ssl

local function net()
  ty.manual_seed(1)
  return models.ResNet1d { leads = 2, labels = 3, widths = { 4, 6 }, kernel = 3, hidden = 8 }
end

ty.manual_seed(2)
local signals, labels = ty.randn(5, 2, 20), ty.rand(5, 3):lt(0.4):to "f32"

local function loss_of(model) return nn.bce_with_logits(model(signals), labels) end

local function distance(a, b) return (a - b):abs():amax():item() end

check.test("the network for signals", function()
  local model = net()
  check.equal(model(signals).shape, { 5, 3 })
  check.equal(model(ty.randn(2, 2, 501)).shape, { 2, 3 })
  check.equal(model:features(signals).shape, { 5, 12 })
  model:eval()
  check.ok(distance(model(signals), model:head(model:features(signals))) == 0)
  check.fails(function() model(ty.ones(2, 3, 9)) end, "ResNet1d: x: expected [n, 2, t]")
  check.fails(function() models.ResNet1d { kernel = 4 } end, "kernel: expected an odd number, got 4")
end)

check.test("low-rank updates of convolutions of signals: merged equals unmerged", function()
  for _, o in ipairs { { stride = 2, padding = 1 }, { dilation = 2 } } do
    ty.manual_seed(3)
    local model = nn.Sequential(nn.Conv1d(4, 6, 3, o), nn.Conv1d(6, 5, 1))
    local x = ty.randn(3, 4, 17)
    local before = model(x)
    peft.lora(model, { rank = 2, alpha = 4, targets = { "0", "1" } })
    check.ok(distance(model(x), before) == 0)
    for _, p in ipairs(peft.parameters(model)) do ty.no_grad(function() p:normal_(0, 0.5) end) end
    local with = model(x)
    check.ok(distance(with, before) > 0.1)
    peft.merge(model)
    check.ok(distance(model(x), with) < 1e-4)
  end
end)

-- Trains a few steps; before: called at the beginning of each.
local function train(model, before)
  local optimizer = ty.optim.AdamW(peft.parameters(model), { lr = 1e-2 })
  for _ = 1, 4 do
    if before then before() end
    ty.scope(function()
      optimizer:step(loss_of(model))
      optimizer:zero_grad()
    end)
  end
  return optimizer
end

check.test("never off, with equal ranks: LoRA itself", function()
  local targets = { "conv1", "conv2", "conv3", "hidden" }
  local plain = net()
  peft.lora(plain, { rank = 2, alpha = 2, targets = targets, save = { "classifier" } })
  local ours = net()
  local updates = ce_ssl.attach(ours, { rank = 2, deactivation = 0, targets = targets, save = { "classifier" } })
  local a, b = peft.parameters(plain), peft.parameters(ours)
  check.equal(#a, #b)
  for i, p in ipairs(a) do ty.no_grad(function() p:copy_(b[i]) end) end
  train(plain)
  train(ours, function() check.equal(updates:draw(), #updates.ranks) end)
  updates:expected()
  for i, p in ipairs(a) do check.ok(distance(p, b[i]) == 0) end
  check.ok(distance(plain(signals), ours(signals)) == 0)
end)

check.test("an update that is off is not trained: A, B and their moments stay", function()
  local model = net()
  local updates = ce_ssl.attach(model, { rank = 2, deactivation = 0.5, save = { "classifier" },
    targets = { "conv1", "conv2", "hidden" } })
  local list = model._adapter.layers
  local optimizer = ty.optim.AdamW(peft.parameters(model), { lr = 1e-2 })
  local seen = { [true] = 0, [false] = 0 }
  ty.manual_seed(4)
  for _ = 1, 6 do
    local before = {}
    updates:draw()
    for i, layer in ipairs(list) do
      local b = layer.module.lora_B.weight
      local state = optimizer.state[b]
      before[i] = { a = layer.module.lora_A.weight:detach():clone(), b = b:detach():clone(),
        moment = state and state.exp_avg:clone(), step = state and state.step }
    end
    optimizer:step(loss_of(model))
    optimizer:zero_grad()
    for i, layer in ipairs(list) do
      local off, b = layer.module._lora.off == true, layer.module.lora_B.weight
      seen[off] = seen[off] + 1
      check.equal(distance(b, before[i].b) == 0, off)
      if off then
        check.ok(distance(layer.module.lora_A.weight, before[i].a) == 0)
        local state = optimizer.state[b]
        check.equal(state and state.step, before[i].step)
        if before[i].moment then check.ok(distance(state.exp_avg, before[i].moment) == 0) end
      end
    end
  end
  check.ok(seen[true] > 0 and seen[false] > 0)
end)

check.test("the mean over all masks is what inference counts; finished, it is plain LoRA", function()
  ty.manual_seed(5)
  local model = nn.Sequential(nn.Linear(6, 5), nn.Linear(6, 5)):to "f64" -- side by side: linear in each update
  local function forward(x) return model[1](x) + model[2](x) end
  local x, p = ty.randn({ 4, 6 }, { dtype = "f64" }), 0.3
  local updates = ce_ssl.attach(model, { rank = 2, deactivation = p, dtype = "f64" })
  for _, q in ipairs(peft.parameters(model)) do ty.no_grad(function() q:normal_(0, 1) end) end
  local mean = ty.zeros({ 4, 5 }, { dtype = "f64" })
  for mask = 0, 3 do
    local weight = 1
    for i, layer in ipairs(model._adapter.layers) do
      local off = mask >> (i - 1) & 1 == 1
      layer.module._lora.off = off or nil
      weight = weight * (off and p or 1 - p)
    end
    mean = mean + forward(x):detach() * weight
  end
  updates:expected()
  check.ok(distance(forward(x), mean) < 1e-12)
  updates:draw()
  updates:finish()
  check.ok(distance(forward(x), mean) < 1e-12)
  peft.merge(model)
  check.ok(distance(forward(x), mean) < 1e-12)
  check.fails(function() updates:draw() end, "expected the adapter that it was made with")
end)

check.test("how often they are off", function()
  local model = net()
  local updates = ce_ssl.attach(model, { rank = 1, deactivation = 0.25 })
  local on = 0
  ty.manual_seed(6)
  for _ = 1, 500 do on = on + updates:draw() end
  local n = 500 * #updates.ranks
  check.ok(math.abs(on / n - 0.75) < 5 * math.sqrt(0.25 * 0.75 / n))
end)

check.test("scores are the gradient of B times A; the lower half gets half the rank", function()
  check.equal(ce_ssl.allocate({ 3, 1, 2, 4, 0 }, 8, 0.5), { 8, 4, 8, 8, 4 })
  check.equal(ce_ssl.allocate({ 1, 1 }, 1, 0.5), { 1, 1 })
  check.equal(ce_ssl.allocate({ 1, 2 }, 4, 0), { 4, 4 })
  -- Two layers side by side, of which one sees a tenth of the signal: a hundredth of the gradient's square.
  ty.manual_seed(7)
  local model = nn.Sequential(nn.Linear(6, 5), nn.Linear(6, 5))
  local x = ty.randn(40, 6)
  local updates = ce_ssl.attach(model, { rank = 4, look = function()
    return (model[1](x) + model[2](x * 0.1)):square():mean()
  end })
  check.equal(updates.ranks, { 4, 2 })
  local ratio = updates.scores[1] / updates.scores[2]
  check.ok(ratio > 20 and ratio < 500, ratio)
  check.equal({ model[1].lora_A.weight.shape, model[2].lora_A.weight.shape }, { { 4, 6 }, { 2, 6 } })
  check.equal(model[1]._lora.scale, model[2]._lora.scale)
  local with_weight = ce_ssl.attach(net(), { importance = "taylor", look = function() error "no" end, low = 0 })
  check.equal(with_weight.scores, {})
end)

check.test("unlabelled signals reach the norms and nothing else", function()
  local model = net()
  model:train()
  local other = ty.randn(7, 2, 20) * 3 + 1
  local means = model.blocks[1].bn1.running_mean:clone()
  local rows = ce_ssl.forward(model, signals, other)
  check.equal(rows.shape, { 5, 3 })
  local moved = model.blocks[1].bn1.running_mean - means
  local again = net()
  again:train()
  local whole = again(ty.concat({ signals, other }, 0)):narrow(0, 0, 5)
  check.ok(distance(rows, whole) < 1e-6)
  check.ok(distance(moved, again.blocks[1].bn1.running_mean - means) < 1e-6)
  model:eval()
  check.ok(distance(ce_ssl.forward(model, signals, other), model(signals)) < 1e-5, "norms with statistics of their own")
  check.ok(distance(ce_ssl.forward(model, signals), model(signals)) == 0)
end)

check.test("mistakes", function()
  check.fails(function() ce_ssl.attach(net(), { deactivation = 1 }) end, "deactivation: expected a number in [0, 1)")
  check.fails(function() ce_ssl.attach(net(), { look = function() return 1 end }) end,
    "look: expected it to return a loss")
  check.fails(function() ce_ssl.forward(net(), signals, ty.ones(2, 2)) end, "unlabelled: expected items like")
  check.fails(function() ce_ssl.allocate({ 1 }, 0, 0) end, "rank: expected an integer >= 1")
end)

check.finish()
