-- Training in blocks: what a block's gradient is, what crosses between blocks, and the ways of perceptrons.
local here = arg and arg[0]:match ".*/" or "tests/modules/local/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local learning = require "tycho.local"
local nn = ty.nn

local f64 = { dtype = "f64" }
local function dense(inputs, outputs)
  return nn.with_defaults(f64, function() return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh()) end)
end
local function data(n, width, classes)
  return ty.randn({ n, width }, f64), ty.randint(0, classes, { n })
end

-- Learners of two layers, in f64, with their loss written once more for each block: of its input, in plain ops.
local function learners()
  local function way(name, ...)
    return nn.with_defaults(f64, learning[name], ...)
  end
  local x = ty.randn({ 2, 5 }, f64)
  return {
    mono_forward = way("mono_forward", { dense(5, 6), dense(6, 4) }, { classes = 3, example = x, rate = 0.1 }),
    forward_forward = way("forward_forward", { dense(8, 6), dense(6, 4) }, { classes = 3, rate = 0.1, threshold = 1 }),
  }
end

check.test("a block's gradient is that of its own loss, by finite differences, and no other block's", function()
  ty.manual_seed(1)
  for name, learner in pairs(learners()) do
    local x, label = data(6, 5, 3)
    local target = label
    if learner.prepare then x, target = learner.prepare(x, label) end
    local layers = learner.model.layers or learner.model
    local all = {}
    for _, layer in ipairs(layers) do
      for _, p in ipairs(layer:parameters()) do all[#all + 1] = p end
    end
    local found = learning.blocks.gradients(learner.stages, x, target, { all, all })
    for block = 1, 2 do
      local stage = learner.stages[block]
      local input = block == 1 and x or learner.stages[1].forward(x):detach()
      for k, p in ipairs(all) do
        local own = (k <= 2) == (block == 1)
        check.equal(found[block][k] ~= false, own, ("%s: block %d, parameter %d"):format(name, block, k))
        if own then
          p:set_grad(found[block][k])
          check.gradient(function() return stage.loss(stage.forward(input), target) end, p, { 1, 3, p:numel() }, 1e-7)
        end
      end
    end
  end
end)

check.test("Mono-Forward's loss and scores are those of a M^T", function()
  ty.manual_seed(2)
  local learner = learners().mono_forward
  local x, label = data(4, 5, 3)
  local outputs = learning.blocks.outputs(learner.stages, x)
  for i, stage in ipairs(learner.stages) do
    local a, m, sum = outputs[i]:tolist(), learner.model.projections[i].weight:tolist(), 0
    for row = 1, 4 do
      local total, own = 0, nil
      for class = 1, 3 do
        local g = 0
        for k, value in ipairs(a[row]) do g = g + value * m[class][k] end
        total = total + math.exp(g)
        if class == label:tolist()[row] + 1 then own = g end
      end
      sum = sum + math.log(total) - own
    end
    check.close(stage.loss(outputs[i], label):item(), sum / 4, 1e-12)
  end
  check.close(learner:scores(x):tolist(), learner.model.projections[2](outputs[2]):tolist(), 0)
end)

check.test("Forward-Forward's loss, lengths and scores by hand", function()
  ty.manual_seed(3)
  local learner = learners().forward_forward
  local y = ty.tensor({ { 1, 2, 0, 1 }, { 0.5, 0, 0, 0 }, { 2, 2, 1, 0 }, { 0, 1, 0, 0 } }, f64)
  local function soft(v) return math.log(1 + math.exp(v)) end
  local want = (soft(1 - 6 / 4) + soft(1 - 0.25 / 4) + soft(9 / 4 - 1) + soft(1 / 4 - 1)) / 2
  check.close(learner.stages[1].loss(y):item(), want, 1e-12)
  -- A longer input of the second layer is the same input.
  local h = ty.rand({ 3, 6 }, f64) + 0.1
  check.close(learner.stages[2].forward(h * 7):tolist(), learner.stages[2].forward(h):tolist(), 1e-6)
  -- The score of a class is the goodness of the second layer with its label behind the input.
  local x = ty.randn({ 2, 5 }, f64)
  for class = 0, 2 do
    local one_hot = ty.one_hot(ty.full({ 2 }, class, { dtype = "i64" }), 3):to "f64"
    local labelled = ty.concat({ x, one_hot * x:square():sum(1, true):sqrt() * 2 }, 1)
    local goodness = learning.blocks.outputs(learner.stages, labelled)[2]:square():mean(-1)
    check.close(learner:scores(x):select(1, class):tolist(), goodness:tolist(), 1e-12)
  end
end)

check.test("a step moves each block by its own gradient, and hands on what was before", function()
  ty.manual_seed(4)
  local x, label = data(6, 5, 3)
  local function fresh(rate)
    ty.manual_seed(5)
    return nn.with_defaults(f64, learning.mono_forward, { dense(5, 6), dense(6, 4) }, { classes = 3, example = x,
      rate = function(parameters) return ty.optim.SGD(parameters, { lr = rate }) end })
  end
  local before, after = fresh(0), fresh(0.5)
  local lists = {}
  for i = 1, 2 do
    lists[i] = nn.Sequential(before.model.layers[i], before.model.projections[i]):parameters()
  end
  local gradients = learning.blocks.gradients(before.stages, x, label, lists)
  after:step(x, label)
  for i = 1, 2 do
    local moved = nn.Sequential(after.model.layers[i], after.model.projections[i]):parameters()
    for k, p in ipairs(lists[i]) do
      check.close(moved[k]:tolist(), (p:detach() - gradients[i][k] * 0.5):tolist(), 1e-12)
    end
  end
end)

check.test("Cascaded-Forward leaves blocks alone; its scores are the mean of what predictors say", function()
  ty.manual_seed(6)
  local x, label = data(8, 5, 3)
  local layers = { dense(5, 6), dense(6, 4) }
  local learner = nn.with_defaults(f64, learning.cascaded, layers, { classes = 3, example = x, rate = 0.1 })
  local function values(module) return module:parameters()[1]:tolist() end
  local drawn, read = values(layers[1]), values(learner.model.predictors[2])
  for _ = 1, 3 do learner:step(x, label) end
  check.equal(values(layers[1]), drawn)
  check.ok(learning.blocks and values(learner.model.predictors[2])[1][1] ~= read[1][1], "the predictor learns")
  local h = layers[1](x)
  local want = (learner.model.predictors[1](h):softmax(1) + learner.model.predictors[2](layers[2](h)):softmax(1)) / 2
  check.close(learner:scores(x):tolist(), want:tolist(), 1e-12)
end)

check.test("by feedback a block's gradient is that of what it gives, with e B in the place of the loss's", function()
  ty.manual_seed(8)
  local x, label = data(6, 5, 3)
  local layers = { dense(5, 6), dense(6, 4) }
  local learner = nn.with_defaults(f64, learning.cascaded, layers, { classes = 3, example = x, feedback = true })
  local _, target = learner.prepare(x, label)
  local first, last = learner.model.predictors[1], learner.model.predictors[2]
  local h = layers[1](x)
  local e = last(layers[2](h)):softmax(1) - ty.one_hot(label, 3):to "f64"
  check.close(target.wrong:tolist(), e:tolist(), 1e-12)
  local weights = layers[1]:parameters()
  local found = learning.blocks.gradients(learner.stages, x, target, { weights, layers[2]:parameters() })
  local want = ty.grad(h, weights, { grad_outputs = e:detach():matmul(first.feedback) / 6 })
  for k in ipairs(weights) do check.close(found[1][k]:tolist(), want[k]:tolist(), 1e-12) end
  local true_gradient = ty.grad(nn.cross_entropy(last(layers[2](h:detach())), label), layers[2]:parameters())
  for k, g in ipairs(true_gradient) do check.close(found[2][k]:tolist(), g:tolist(), 1e-12) end
  check.close(first.feedback:square():sum(1):tolist(), { 1, 1, 1 }, 1e-6)
end)

check.test("a block's graph is gone before the next one's begins", function()
  local function peak(in_blocks)
    ty.manual_seed(7)
    local layers, x = {}, ty.randn(512, 64)
    for i = 1, 16 do layers[i] = nn.Sequential(nn.Linear(64, 64), nn.Tanh()) end
    local learner = in_blocks and learning.mono_forward(layers, { classes = 4, example = x })
      or learning.blocks.end_to_end(layers)
    local label = ty.randint(0, 4, { 512 })
    for _ = 1, 2 do learner:step(x, label) end
    collectgarbage()
    local before = ty.memory.stats("cpu").live
    ty.memory.reset_peak "cpu"
    learner:step(x, label)
    return ty.memory.stats("cpu").peak - before
  end
  local blocks, whole = peak(true), peak(false)
  check.ok(blocks < 0.4 * whole, ("%d bytes of blocks, %d from end to end"):format(blocks, whole))
end)

check.test("fit ends when the validation gets no better, with the weights that were best", function()
  local value = ty.nn.Linear(1, 1)
  local accuracies, step = { 0.2, 0.6, 0.5, 0.6, 0.9 }, 0
  local learner = { model = value }
  function learner:step() return { 1 } end
  function learner:accuracy()
    step = step + 1
    ty.no_grad(function() self.model.weight:fill_(step) end)
    return accuracies[step]
  end
  local set = { x = ty.zeros(5, 1), label = ty.zeros({ 5 }, { dtype = "i64" }) }
  local found = learning.fit(learner, set, set, { patience = 2, epochs = 9 })
  check.equal({ found.epochs, found.best, found.accuracy }, { 4, 2, 0.6 })
  check.equal(value.weight:item(), 2.0)
  check.ok(found.energy.joules >= 0, "energy")
end)

check.test("wrong arguments are one clear error", function()
  check.fails(function() learning.blocks.step({}, ty.ones(2)) end, "stages: expected at least one, got none")
  check.fails(function() learning.mono_forward({ nn.Linear(2, 2) }, { example = ty.ones(1, 2) }) end,
    "local.mono_forward: classes: expected an integer >= 1, got nil")
  check.fails(function() learning.forward_forward({ 3 }, { classes = 2 }) end, "layers[1]: expected a module, got 3")
  check.fails(function() learning.fit({}, {}, {}) end, "local.fit: learner.model: expected a module")
end)

check.finish()
