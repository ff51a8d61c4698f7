-- Once for both: gates by hand, the gated network against the cut one, multiplications against what is executed, and
-- searches that end at their target.
local here = arg and arg[0]:match ".*/" or "tests/modules/prune/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models, prune = require "tycho.models", require "tycho.prune"

local gates_of, ofb = prune.vit_gates, prune.ofb
local f64 = { dtype = "f64" }

local function vit()
  local model = models.ViTForImageClassification { image_size = 9, patch_size = 3, num_channels = 1, hidden_size = 24,
    intermediate_size = 40, num_hidden_layers = 2, num_attention_heads = 3, num_labels = 10 }:eval()
  ty.no_grad(function() -- norms and biases that matter
    for _, t in ipairs(model:parameters()) do t:detach():add_(ty.randn(t.shape) * 0.2) end
  end)
  return model
end

check.test("a gate: scores at first, at the end the profile of the candidates by the order of the scores", function()
  local gate = gates_of.gate(ty.tensor({ { 0.5, -1, 2, 0 }, { 3, 1, 0, -2 } }, f64), { 0.25, 0.5, 1 })
  ty.no_grad(function() gate.alpha:copy_(ty.tensor({ math.log(1), math.log(2), math.log(5) }, f64)) end)
  check.equal(gate:ranks():tolist(), { { 1, 3, 0, 2 }, { 0, 1, 2, 3 } })
  local profile = { 8 / 8, 7 / 8, 5 / 8, 5 / 8 }
  for _, w in ipairs { 1, 0.3, 0 } do
    gate.w = w
    local value, open = gate:value()
    local scores, ranks = gate.score:tolist(), gate:ranks():tolist()
    for i = 1, 2 do
      for j = 1, 4 do
        check.close(value:tolist()[i][j], w / (1 + math.exp(-scores[i][j])) + (1 - w) * profile[ranks[i][j] + 1], 1e-12)
      end
    end
    check.equal(open:min():item(), 1.0)
  end
  check.close(gate:width():item(), (1 * 1 + 2 * 2 + 5 * 4) / 8, 1e-12)
  check.equal(gate:drop(0.2), false) -- 1/8 is above 0.2 / 3
  check.equal(gate:drop(0.4), true)
  check.equal(gate:left(), 2)
  check.close(gate:width():item(), (2 * 2 + 5 * 4) / 7, 1e-12)
  check.equal(gate:decide(), 4)
  ty.no_grad(function() gate.alpha:copy_(ty.tensor({ 9, 1, 0 }, f64)) end)
  gate.alive = { true, true, true }
  check.equal(gate:decide(), 1)
  local value, open = gate:value()
  check.equal(open:tolist(), { { 0.0, 0.0, 1.0, 0.0 }, { 1.0, 0.0, 0.0, 0.0 } })
  check.equal(value:tolist(), open:tolist())
end)

check.test("indecision by hand; gradients of scores and candidates by finite differences", function()
  ty.manual_seed(1)
  local gate = gates_of.gate(ty.randn(2, 6, f64), { 0.3, 0.5, 0.8, 1 })
  ty.no_grad(function() gate.alpha:copy_(ty.tensor({ 0.3, -0.5, 1.2, 0.1 }, f64)) end)
  local p, entropy, spread = gate:weights():tolist(), 0, 0
  for _, x in ipairs(p) do entropy, spread = entropy - x * math.log(x), spread + (x - 0.25) ^ 2 end
  check.close(gate:indecision():item(), entropy + math.tan(math.pi / 2 - math.pi * spread / 0.75) / 4, 1e-10)
  gate.w = 0.4
  local mix = ty.randn(2, 6, f64)
  local function loss() return (gate:value() * mix):square():sum() + gate:indecision() + gate:width():square() * 0.1 end
  loss():backward()
  for _, name in ipairs { "score", "alpha" } do
    local t, grad = gate[name], gate[name].grad:flatten():tolist()
    local flat = t:detach():flatten()
    for i = 1, flat:numel() do
      local eps, at = 1e-6, flat:narrow(0, i - 1, 1)
      local old = at:item()
      at:fill_(old + eps)
      local above = loss():item()
      at:fill_(old - eps)
      local below = loss():item()
      at:fill_(old)
      check.close(grad[i], (above - below) / (2 * eps), 1e-5)
    end
  end
  gate:keep(3)
  check.equal({ gate:left(), gate:decide(), gate:width():item() }, { 1, 3, 3.0 })
  check.fails(function() gate:keep(7) end, "VitGate:keep: count: expected an integer in [1, 6]")
  check.fails(function() gates_of.gate(ty.ones(2, 2), { 2 }) end, "prune.vit_gates.gate: ratios")
end)

check.test("one candidate of all units and w = 0: the model is unchanged", function()
  ty.manual_seed(2)
  local model, images = vit(), ty.randn(4, 1, 9, 9)
  local want = ty.no_grad(model, images)
  local gates = gates_of.attach(model, { 1 })
  for _, gate in ipairs(gates.list) do gate.w = 0 end
  gates_of.refresh(gates)
  check.close((ty.no_grad(model, images) - want):abs():max():item(), 0, 1e-5)
  gates_of.detach(model)
  check.equal((ty.no_grad(model, images) - want):abs():max():item(), 0)
  check.fails(function() gates_of.detach(model) end, "prune.vit_gates.detach: model: expected one with gates")
end)

-- Multiplications of one picture, counted at the layers that are called.
local function executed(model)
  local sum, removers = 0, {}
  local heads = model.vit.config.num_attention_heads
  for _, layer in ipairs(ty.nn.surgery.find("test", model, { kinds = { "linear", "conv" } })) do
    removers[#removers + 1] = layer.module:register_forward_hook(function(module, outputs)
      sum = sum + outputs[1]:numel() * (module.weight:numel() // module.weight.shape[1])
    end)
  end
  for _, layer in ipairs(model.vit.encoder.layer) do
    removers[#removers + 1] = layer.attention.attention:register_forward_hook(function(_, outputs)
      local n, t, width = table.unpack(outputs[1].shape)
      sum = sum + 2 * n * heads * t * t * (width // heads)
    end)
  end
  ty.no_grad(model, ty.randn(1, 1, 9, 9))
  for _, remove in ipairs(removers) do remove() end
  -- The classifier sees one token alone.
  return sum
end

check.test("the cut model is the gated one; multiplications are those that are executed", function()
  ty.manual_seed(3)
  for _ = 1, 3 do
    local model, images = vit(), ty.randn(5, 1, 9, 9)
    local gates = gates_of.attach(model, { 0.25, 0.5, 0.75, 1 })
    local units = { layers = { {}, {} } }
    local function decide(gate, k)
      ty.no_grad(function()
        gate.score:copy_(ty.randn(gate.score.shape))
        gate.alpha:copy_(ty.randn(4))
      end)
      for i = 1, 4 do gate.alive[i] = i <= k end
      gate.w = 0.3
      local count = gate:decide()
      local value, open = gate:value()
      check.equal(open:sum(1):tolist()[1], count + 0.0)
      local _, at = gate.score:detach():topk(count, 1)
      return { at = at, gate = value:detach():gather(1, at) }
    end
    units.embedding = decide(gates.embedding, 3)
    for i, layer in ipairs(gates.layers) do
      units.layers[i] = { head = decide(layer.head, 3), inner = decide(layer.inner, 4) }
    end
    gates_of.refresh(gates)
    gates.before = 1
    local want = ty.no_grad(model, images)
    local term = ofb.flops_loss(gates, 0):item() ^ 0.5
    gates_of.detach(model)
    gates_of.cut(model, units)
    check.close((ty.no_grad(model, images) - want):abs():max():item(), 0, 2e-5)
    local count = gates_of.multiplications(model, gates_of.widths(model))
    check.equal(executed(model), count)
    check.close(term / count, 1, 1e-5)
    check.ok(model:count_parameters() < vit():count_parameters())
  end
  local model = vit()
  check.equal(executed(model), gates_of.multiplications(model, gates_of.widths(model)))
end)

check.test("sizes are brought to the budget, less than a unit below it; equal shares", function()
  ty.manual_seed(4)
  local model = vit()
  local full = gates_of.multiplications(model, gates_of.widths(model))
  for _, target in ipairs { 0.2, 0.5, 0.9 } do
    local sizes = gates_of.widths(model)
    sizes.embedding = 20
    sizes = ofb.fit(model, sizes, target * full)
    local count = gates_of.multiplications(model, sizes)
    check.ok(count <= target * full, target)
    if sizes.layers[1].inner < 40 then check.ok(count + 20 * 24 > target * full, target) end
    local even = vit()
    local got = ofb.uniform(even, target)
    local now = gates_of.multiplications(even, gates_of.widths(even))
    check.equal(executed(even), now)
    local room = got.layers[1].inner < 40 and got.layers[2].inner < 40
    check.ok(now <= target * full and (not room or now > target * full - 2 * 10 * 24), target)
  end
  check.fails(function() ofb.fit(model, gates_of.widths(model), 1) end, "prune.ofb.fit: budget: expected room")
end)

check.test("searches end at the target, cut, and can be trained on", function()
  ty.manual_seed(5)
  local set = ty.data.TensorDataset { image = ty.randn(24, 1, 9, 9), label = ty.randint(0, 10, { 24 }) }
  for _, how in ipairs { { way = "joint" }, { way = "two-stage" }, { way = "joint", hidden = false } } do
    local model = vit():requires_grad_()
    how.steps, how.batch_size, how.quiet, how.target, how.interval = 20, 8, true, 0.4, 2
    local report = ofb.search(model, set, how)
    check.equal(report.multiplications, executed(model))
    check.ok(report.multiplications <= 0.4 * report.before and report.multiplications > 0.35 * report.before)
    check.equal(#report.history, 2)
    check.equal(#report.history[1].shares, 5)
    check.equal(report.units.layers[2].inner.at.shape, { 1, report.sizes.layers[2].inner })
    local before = model.classifier.weight:detach():clone()
    require("tycho.vision").distil(model, set, { steps = 2, batch_size = 8, quiet = true, warmup = 0 })
    check.ok((model.classifier.weight:detach() - before):abs():max():item() > 0)
  end
  local model = vit()
  check.fails(function() ofb.search(model, set, { hidden = { 2, 3 } }) end, "hidden: expected two shares below 1")
  check.fails(function() ofb.search(model, set, { way = "x" }) end, 'prune.ofb.search: way: expected "joint"')
  check.fails(function() ofb.search(ty.nn.Linear(1, 1), set) end, "expected a ViTForImageClassification")
end)

check.finish()
