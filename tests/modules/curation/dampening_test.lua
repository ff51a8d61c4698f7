-- The diagonal of the Fisher information against a backward pass for each sample, the rule of dampening against loops
-- over single weights, the membership score on groups that are known.
local here = arg and arg[0]:match ".*/" or "tests/modules/curation/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local curation = require "tycho.curation"
local models = require "tycho.models"
local dampening, fisher, unlearning = curation.dampening, curation.fisher, curation.unlearning

local f64 = { dtype = "f64" }

local function networks()
  return {
    residual = models.ResNet { in_channels = 1, classes = 4, small = true, channels = { 4, 8 }, blocks = { 1, 1 } },
    transformer = models.ViTForImageClassification { image_size = 8, patch_size = 4, num_channels = 1, hidden_size = 8,
      intermediate_size = 16, num_hidden_layers = 1, num_attention_heads = 2, num_labels = 4 },
  }
end

ty.manual_seed(1)
local set = { image = ty.randn({ 11, 1, 8, 8 }, f64), label = ty.randint(0, 4, { 11 }) }

for kind, model in pairs(networks()) do
  check.test("the diagonal is the mean of the squares of a backward pass for each sample: " .. kind, function()
    model:to "f64":train()
    local found = fisher.diagonal(model, set, { part = 4 })
    check.equal(model.training, true)
    model:eval()
    local want, batched = {}, 0
    for i = 0, 10 do
      model:zero_grad()
      ty.nn.cross_entropy(model(set.image:narrow(0, i, 1)), set.label:narrow(0, i, 1)):backward()
      for name, p in model:named_parameters() do
        local square = p.grad:square() / 11
        want[name] = want[name] and want[name] + square or square
      end
    end
    model:zero_grad()
    ty.nn.cross_entropy(model(set.image), set.label):backward()
    for name, p in model:named_parameters() do
      local scale = want[name]:max():item() + 1e-16 -- keys' biases have no gradient but by rounding
      check.ok((found[name] - want[name]):abs():max():item() <= 1e-12 * scale, name)
      batched = math.max(batched, (p.grad:square() - want[name]):abs():max():item() / scale)
    end
    check.ok(batched > 0.1, "the square of a mean is another number")
  end)
end

check.test("an op without a rule for ty.vmap: one sample after the other, the same numbers", function()
  local model = networks().residual:to "f64"
  local function loss(m, x, y)
    if x.requires_grad == nil then error "never" end
    return ty.nn.cross_entropy(m(x), y)
  end
  local function refused(m, x, y)
    x:nonzero() -- of a size that values say
    return loss(m, x, y)
  end
  local a, b = fisher.diagonal(model, set, { loss = loss }), fisher.diagonal(model, set, { loss = refused })
  for name, x in pairs(a) do check.ok((x - b[name]):abs():max():item() <= 1e-12 * x:max():item() + 1e-300, name) end
end)

check.test("frozen parameters are left out, a mistake of the loss is passed on", function()
  local model = networks().residual:to "f64"
  model.fc.weight:requires_grad_(false)
  local found = fisher.diagonal(model, set)
  check.equal(found["fc.weight"], nil)
  check.ok(found["fc.bias"] ~= nil)
  check.fails(function() fisher.diagonal(model, set, { loss = function() error "a mistake" end }) end, "a mistake")
  check.fails(function() fisher.diagonal(model, { image = set.image, label = set.label:narrow(0, 0, 3) }) end,
    "set: expected images [n, ...] and labels i64 [n]")
end)

check.test("weights are dampened one by one as the paper's equations say", function()
  local model = networks().residual:to "f64"
  local before, forget, whole = {}, {}, {}
  for name, p in model:named_parameters() do
    before[name] = p:detach():clone()
    forget[name], whole[name] = ty.rand(p.shape, f64), ty.rand(p.shape, f64) * 0.5
    forget[name]:flatten():narrow(0, 0, 2):fill_(0) -- nothing is divided by 0
    whole[name]:flatten():narrow(0, 1, 2):fill_(0)
  end
  local alpha, lambda, selected, total, kept = 2, 0.7, 0, 0, 0.0
  local report = dampening.apply(model, forget, whole, { alpha = alpha, lambda = lambda })
  for name, p in model:named_parameters() do
    local old, f, d = before[name]:flatten():tolist(), forget[name]:flatten():tolist(), whole[name]:flatten():tolist()
    for i, value in ipairs(p:flatten():tolist()) do
      local want = old[i]
      total = total + 1
      if f[i] > alpha * d[i] then
        selected = selected + 1
        local factor = math.min(lambda * d[i] / f[i], 1)
        want, kept = want * factor, kept + factor
      end
      check.close(value, want, 1e-12)
    end
  end
  check.equal(report.selected, selected)
  check.equal(report.total, total)
  check.close(report.kept, kept / selected, 1e-9)
  check.ok(selected > 0 and selected < total)
end)

check.test("a strength above alpha raises no weight; what is refused", function()
  local model = networks().residual:to "f64"
  local importance = fisher.diagonal(model, set)
  local before = ty.concat({ model.fc.weight:detach():clone() }, 0)
  local report = dampening.apply(model, importance, importance, { alpha = 0.5, lambda = 3 })
  check.equal(report.kept, 1.0)
  check.equal((model.fc.weight - before):abs():max():item(), 0.0)
  check.fails(function() dampening.apply(model, {}, importance) end, "forget: expected the model's parameters")
  check.fails(function() dampening.apply(model, importance, {}) end, "whole: expected a tensor [")
end)

check.test("membership: groups that are alike are half, those that are not are told apart", function()
  -- A model whose logits are its inputs: entropies are what we make them.
  local Plain = ty.nn.module "Plain"
  function Plain:init() self.unused = ty.nn.Linear(1, 1) end
  function Plain:forward(x) return x:flatten(1) end
  local model = Plain()
  local function group(n, sharp)
    local logits = ty.randn(n, 5)
    logits:narrow(1, 0, 1):add_(sharp)
    return { image = logits, label = ty.zeros({ n }, { dtype = "i64" }) }
  end
  local sure, unsure = group(400, 9), group(100, 0)
  check.ok(unlearning.membership(model, sure, unsure, group(200, 9)) > 0.95)
  check.ok(unlearning.membership(model, sure, unsure, group(200, 0)) < 0.05)
  local alike = unlearning.membership(model, group(2000, 1), group(500, 1), group(2000, 1))
  check.ok(alike > 0.05 and alike < 0.95)
  check.close(unlearning.entropy(model, ty.zeros(3, 5)):tolist(), { math.log(5), math.log(5), math.log(5) }, 1e-9)
end)

check.test("parts of a set; ways that train do what they say", function()
  local model = networks().residual
  local all = { image = ty.randn(40, 1, 8, 8), label = ty.arange(40) % 4 }
  local forget, retained = unlearning.part(all, unlearning.of_class(all, 2))
  check.equal(forget.label:tolist(), { 2, 2, 2, 2, 2, 2, 2, 2, 2, 2 })
  check.equal(retained.label.shape, { 30 })
  check.fails(function() unlearning.part(all, { 40 }) end, "positions: expected integers in [0, 39]")
  local function loss(set_)
    model:eval()
    return ty.nn.cross_entropy(model(set_.image), set_.label):item()
  end
  unlearning.finetune(model, all, { steps = 40, lr = 1e-2, batch_size = 16 })
  local before = loss(forget)
  check.ok(before < 1.2)
  unlearning.ascend(model, forget, { steps = 5, lr = 1e-3 })
  check.ok(loss(forget) > before)
  unlearning.mislabel(model, retained, forget, { steps = 80, lr = 1e-2, batch_size = 16 })
  check.ok(unlearning.accuracy(model, forget) < 0.5)
  check.ok(unlearning.accuracy(model, retained) > 0.5)
end)

check.finish()
