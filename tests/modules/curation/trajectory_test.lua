-- The gradient of trajectory matching with the graph of one step at a time: against the whole unrolled graph, against
-- finite differences, and what TESLA's form leaves out; its memory; how a small set is judged.
local here = arg and arg[0]:match ".*/" or "tests/modules/curation/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local curation = require "tycho.curation"
local models = require "tycho.models"
local condensed, trajectory = curation.condensed, curation.trajectory

local f64 = { dtype = "f64" }
ty.manual_seed(3)
local model = ty.nn.with_defaults(f64, function()
  return models.ConvNet { in_channels = 1, size = 4, classes = 3, width = 4, blocks = 1 }
end)
local function weights(spread)
  local list = {}
  for k, p in ipairs(model:parameters()) do list[k] = p:detach() + ty.randn(p.shape, f64) * spread end
  return list
end
local from, to = weights(0), weights(0.05)
local image = ty.randn({ 6, 1, 4, 4 }, f64)
local hard = ty.tensor({ 0, 1, 2, 0, 1, 2 }, { dtype = "i64" })
local soft = ty.randn({ 6, 3 }, f64):softmax(-1)

local function order_of(steps)
  local order = {}
  for i = 1, steps do order[i] = ty.randperm(6):narrow(0, 0, 4) end
  return order
end
local function apart(a, b) return (a - b):abs():max():item() / b:abs():max():item() end

for _, case in ipairs { { 1, 4, hard }, { 2, 1, soft }, { 5, 2, hard, true }, { 13, 3, soft, true },
  { 20, 4, hard } } do
  local steps, snapshots, label, parts = table.unpack(case)
  check.test(("%d steps, %d snapshots: exactly the gradient of the unrolled graph"):format(steps, snapshots), function()
    local set = { image = image, label = label }
    local o = { lr = 0.3, steps = steps, order = parts and order_of(steps) or nil }
    local loss, gradient, by_rate = trajectory.unrolled(model, from, to, set, o)
    o.snapshots = snapshots
    local loss2, gradient2, by_rate2 = trajectory.constant(model, from, to, set, o)
    check.close(loss2, loss, 1e-12)
    check.ok(apart(gradient2, gradient) < 1e-10, apart(gradient2, gradient))
    check.ok(math.abs(by_rate2 / by_rate - 1) < 1e-9)
    -- With weights of a step held fixed it is another gradient as soon as there are two steps.
    o.exact = false
    local _, fixed, rate_fixed = trajectory.constant(model, from, to, set, o)
    local gap = apart(fixed, gradient)
    check.ok(steps == 1 and gap < 1e-10 or steps > 1 and gap > 1e-3, gap)
    check.ok(rate_fixed == rate_fixed)
  end)
end

check.test("and that of finite differences", function()
  local o = { lr = 0.2, steps = 4 }
  local _, gradient, by_rate = trajectory.constant(model, from, to, { image = image, label = hard }, o)
  local function at(change, rate)
    local moved = image:clone()
    moved:view(-1):narrow(0, 37, 1):add_(change)
    return (trajectory.constant(model, from, to, { image = moved, label = hard }, { lr = 0.2 + rate, steps = 4 }))
  end
  local h = 1e-5
  check.close(gradient:flatten():tolist()[38], (at(h, 0) - at(-h, 0)) / (2 * h), 1e-7)
  check.close(by_rate, (at(0, h) - at(0, -h)) / (2 * h), 1e-7)
end)

check.test("TESLA's form: the gradient with the weights of each step held fixed", function()
  local o = { lr = 0.3, steps = 5, exact = false }
  local set = { image = image, label = soft }
  local _, gradient = trajectory.constant(model, from, to, set, o)
  -- The weights of all steps, then the sum of all gradients as a function of the pictures.
  local names, now = {}, {}
  for name in model:named_parameters() do names[#names + 1] = name end
  for k, w in ipairs(from) do now[k] = w:clone():requires_grad_() end
  local x, total = image:clone():requires_grad_(), {}
  for _ = 1, 5 do
    local named, after = {}, {}
    for k, name in ipairs(names) do named[name] = now[k] end
    local grads = ty.grad(condensed.loss(ty.functional_call(model, named, x), soft), now, { create_graph = true })
    for k, g in ipairs(grads) do
      total[k] = total[k] and total[k] + g or g
      after[k] = (now[k]:detach() - g:detach() * 0.3):requires_grad_()
    end
    now = after
  end
  local scale, loss = 0, 0
  for k, w in ipairs(from) do
    scale = scale + (w - to[k]):square():sum()
    loss = loss + (w - total[k] * 0.3 - to[k]):square():sum()
  end
  check.ok(apart(gradient, ty.grad(loss / scale, { x })[1]) < 1e-10)
end)

check.test("steps walked again: none where all fit, few where snapshots are few", function()
  check.equal(trajectory.walked_again(1, 3), 0)
  check.equal(trajectory.walked_again(5, 0), 10)
  check.equal(trajectory.walked_again(5, 5), 4)
  check.ok(trajectory.walked_again(50, 4) <= 4 * 50)
  check.ok(trajectory.walked_again(50, 4) > trajectory.walked_again(50, 8))
end)

check.test("memory does not grow with the steps", function()
  local small = ty.nn.with_defaults({}, function()
    return models.ConvNet { in_channels = 1, size = 8, classes = 3, width = 8, blocks = 2 }
  end)
  local a, b = {}, {}
  for k, p in ipairs(small:parameters()) do a[k], b[k] = p:detach(), p:detach() + 0.01 end
  local set = { image = ty.randn(12, 1, 8, 8), label = ty.arange(12) % 3 }
  local function peak(way, steps)
    collectgarbage()
    collectgarbage()
    local before = ty.memory.stats("cpu").live
    ty.memory.reset_peak "cpu"
    way(small, a, b, set, { steps = steps })
    return ty.memory.stats("cpu").peak - before
  end
  check.ok(peak(trajectory.constant, 40) < 1.1 * peak(trajectory.constant, 5))
  check.ok(peak(trajectory.unrolled, 40) > 4 * peak(trajectory.unrolled, 5))
end)

check.test("distilling brings the network nearer to where experts went", function()
  local net = models.ConvNet { in_channels = 1, size = 4, classes = 2, width = 4, blocks = 1 }
  local n = 64
  local truth = ty.arange(n) % 2
  local pictures = ty.randn(n, 1, 4, 4) + (truth:to "f32" * 2 - 1):reshape(n, 1, 1, 1)
  local real = { image = pictures, label = truth }
  local path = trajectory.expert(net, real, { epochs = 4, lr = 0.1, batch_size = 32 })
  check.equal(#path, 5)
  local small = condensed.random(real, 2)
  check.equal(small.label:tolist(), { 0, 0, 1, 1 })
  local distilled, rate, losses = trajectory.distil(net, { path }, small, { rounds = 40, steps = 4, epochs = 2,
    latest = 2, lr = 0.1, rate_lr = 0.02, soft = true, batch_size = 3 })
  check.equal(distilled.label.shape, { 4, 2 })
  check.ok(rate > 0 and rate ~= 0.1)
  local first, last = 0, 0
  for i = 1, 10 do first, last = first + losses[i], last + losses[30 + i] end
  check.ok(last < 0.9 * first, last / first)
  check.fails(function() trajectory.distil(net, {}, small) end, "experts: expected at least one")
end)

check.test("herding takes the sample whose mean is nearest; a set is judged by networks of its own", function()
  local x = ty.tensor { { 0.0 }, { 1.0 }, { 5.0 }, { 10.0 }, { 2.0 }, { 4.0 } }
  local label = ty.tensor({ 0, 0, 0, 1, 1, 1 }, { dtype = "i64" })
  -- Means are 2 and 16/3: nearest 1 and 4; then 1 and 5 (mean 3) or 1 and 0 (0.5), 4 and 10 (7) or 4 and 2 (3).
  local chosen = condensed.herding({ image = x, label = label }, x, 2)
  check.equal(chosen.image:flatten():tolist(), { 1, 5, 4, 10 })
  check.equal(chosen.label:tolist(), { 0, 0, 1, 1 })
  check.fails(function() condensed.random({ image = x, label = label }, 4) end, "at most the 3 samples of class 0")
  local function make() return ty.nn.Linear(1, 2) end
  local mean, shares = condensed.accuracy(make, chosen, { image = x, label = label }, { networks = 2, steps = 20,
    rates = { 0.01, 0.1 }, choose = chosen })
  check.equal(#shares, 2)
  check.close(mean, (shares[1] + shares[2]) / 2, 1e-12)
  local hot = ty.one_hot(label, 2):to "f32"
  local logits = ty.randn(6, 2)
  check.close(condensed.loss(logits, hot):item(), condensed.loss(logits, label):item(), 1e-6)
end)

check.test("a trial: parts for choices, experts, a judge, a sheet", function()
  local function make() return models.ConvNet { in_channels = 1, size = 4, classes = 2, width = 4, blocks = 1 } end
  local label = ty.arange(50) % 2
  local all = { image = ty.randn(50, 1, 4, 4) + (label:to "f32" * 4 - 2):reshape(50, 1, 1, 1), label = label }
  local trial = curation.condensing.new(all, all, make, { experts = 2, epochs = 3, batch_size = 10, networks = 1,
    learn = 15, choose = 0.2 })
  check.equal(trial.choose.label.shape, { 10 })
  check.equal(trial.real.label.shape, { 40 })
  check.equal(#trial:weights(), 8)
  check.ok(ty.equal(trial:teacher().classifier.bias, trial.experts[1][4][6]))
  local small = condensed.random(trial.real, 2)
  check.ok(trial:judge(small) > 0.8)
  check.ok(trial:judge(small, trial.choose) >= 0)
  local sheet = curation.condensing.sheet({ small, small }, { "one", "other" }, 2).pixels.shape
  check.ok(sheet[2] > 16 and sheet[3] > 32)
  check.fails(function() curation.condensing.sheet({ small, condensed.random(trial.real, 1) }, { "a", "b" }) end,
    "sets: expected 4 pictures of each, got 2 of number 2")
end)

check.finish()
