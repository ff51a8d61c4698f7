-- Three ways to train without backpropagation, beside it
-- claim: Mono-Forward is at least as accurate as backpropagation in the same perceptron, at a measured energy
-- system: local.mono_forward, local.forward_forward and local.cascaded beside training from end to end
-- paper: Spyra 2025, "Beyond Backpropagation: Exploring Innovative Algorithms for Energy-Efficient Deep Neural
--   Network Training"
-- time: 4 minutes on one CPU core
--
-- As in the paper each way has its own architecture, and backpropagation trains the same: perceptrons of three layers
-- for Forward-Forward and Mono-Forward, three blocks of convolutions for Cascaded-Forward. All have the same steps of
-- AdamW in batches of 64, rates from one list, each chosen by the first seed's validation, and training that ends when
-- that has been no better for a while; the weights that were best there are judged on held-out pictures. Energy is that
-- of all of it, validation included: by the processors' counters where they can be read, else by a model of processor
-- seconds and memory, which then compares times. Forward-Forward reads a picture once for each class; how strong its
-- labels are beside the picture is tried as well. Of Cascaded-Forward there are blocks as they were drawn and blocks
-- that learn by direct feedback alignment.
--
-- On digits, where nearly all are right, Mono-Forward is a little behind; scores added over layers were no better. The
-- energy that the paper saves is not saved here: a step takes about as long, and about as many are wanted.
local ty = require "tycho"
local learning = require "tycho.local"
local nn = ty.nn

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "training", 1500, "pictures of things to train on", quick = 96 },
    { "held_out", 2000, "of the test", quick = 64 }, { "width", 256, "of a perceptron's layers", quick = 24 },
    { "channels", 24, "of the first convolution", quick = 4 }, { "epochs", 40, "at most", quick = 1 },
    { "patience", 8, "epochs without a better validation, after which training ends" },
    { "rates", { 3e-4, 1e-3, 3e-3 }, "of AdamW, tried", quick = { 1e-3 } },
    { "strengths", { 0.3, 2 }, "of Forward-Forward's labels, tried with the two higher rates", quick = { 2 } },
  },
}
local args = r.args

local function dense(inputs, outputs) return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU()) end
local function conv(inputs, outputs)
  return nn.Sequential(nn.Conv2d(inputs, outputs, 3, { padding = 1 }), nn.ReLU(), nn.MaxPool2d(2),
    nn.BatchNorm2d(outputs))
end

-- Layers of a perceptron, the first of which takes `more` numbers besides the picture.
local function perceptron(task, more)
  local inputs = task.shape[1] * task.shape[2] * task.shape[3]
  local first = more > 0 and dense(inputs + more, args.width)
    or nn.Sequential(nn.Flatten(), nn.Linear(inputs, args.width), nn.ReLU())
  return { first, dense(args.width, args.width), dense(args.width, args.width) }
end

local function blocks_of(task)
  local c = args.channels
  return { conv(task.shape[1], c), conv(c, 2 * c), conv(2 * c, 4 * c) }
end

local function with_head(layers, task)
  local width = learning.blocks.sizes(layers, task.training.x:narrow(0, 0, 2))[#layers]
  local numbers = width[1] * (width[2] or 1) * (width[3] or 1)
  layers[#layers + 1] = nn.Sequential(nn.Flatten(), nn.Linear(numbers, task.classes))
  return layers
end

local function strengths()
  local tries = {}
  for i = math.min(2, #args.rates), #args.rates do
    for _, strength in ipairs(args.strengths) do tries[#tries + 1] = { args.rates[i], strength } end
  end
  return tries
end

local ways = {
  { "backpropagation", function(task, rate)
    return learning.blocks.end_to_end(with_head(perceptron(task, 0), task), { rate = rate })
  end },
  { "Mono-Forward", function(task, rate)
    return learning.mono_forward(perceptron(task, 0), { classes = task.classes, rate = rate,
      example = task.training.x:narrow(0, 0, 2) })
  end },
  { "Forward-Forward", function(task, try)
    return learning.forward_forward(perceptron(task, task.classes), { classes = task.classes, rate = try[1],
      strength = try[2] })
  end, strengths() },
  { "backpropagation, convolutions", function(task, rate)
    return learning.blocks.end_to_end(with_head(blocks_of(task), task), { rate = rate })
  end },
  { "Cascaded-Forward", function(task, rate)
    return learning.cascaded(blocks_of(task), { classes = task.classes, rate = rate,
      example = task.training.x:narrow(0, 0, 2) })
  end },
  { "Cascaded-Forward, feedback", function(task, rate)
    return learning.cascaded(blocks_of(task), { classes = task.classes, rate = rate, feedback = true,
      example = task.training.x:narrow(0, 0, 2) })
  end },
}

local found, curves = {}, {}
local function compare(name, task, list)
  found[name] = {}
  for i, seed in ipairs(r.seeds) do
    for _, way in ipairs(list) do
      local key = name .. ", " .. way[1]
      local result = r:choose(key, way[3] or args.rates, function(try)
        ty.manual_seed(seed)
        local learner = r:place(function() return way[2](task, try) end)
        local curve = {}
        local fit = learning.fit(learner, task.training, task.validation, { epochs = args.epochs,
          patience = args.patience, seed = seed, device = r.device,
          watch = function(epoch, accuracy) curve[epoch] = accuracy end })
        local got = { accuracy = learner:accuracy(task.held_out), validation = fit.accuracy, epochs = fit.epochs,
          joules = fit.energy.joules, seconds = fit.energy.seconds }
        r:say("%-8s %-30s seed %d, rate %s: %.4f held out, %.4f validation, %d epochs; %s", name, way[1], seed,
          type(try) == "table" and table.concat(try, ", strength ") or try,
          got.accuracy, fit.accuracy, fit.epochs, tostring(fit.energy))
        return { got = got, curve = curve }, -fit.accuracy
      end)
      ty.stats.put(found[name], way[1], i, result.got)
      if name == "things" and i == 1 then curves[#curves + 1] = { y = result.curve, label = way[1] } end
    end
  end
  for _, way in ipairs(list) do r.metrics[name .. "/" .. way[1]] = found[name][way[1]] end
end

local things = learning.tasks.things { training = args.training, validation = r.quick and 64 or 1000,
  held_out = args.held_out, device = r.device }
compare("things", things, ways)
if not r.quick then compare("digits", learning.tasks.digits(r.device), { ways[1], ways[2], ways[3] }) end
ty.plot.line { series = curves, title = "Kinds of things recognised after each epoch", x_label = "epochs",
  y_label = "share of the validation", width = 900 }:save(r:picture "bp-free.png")

-- Bytes of a step with all that stays, in large batches.
local bytes, rows = {}, math.min(512, args.held_out)
for _, way in ipairs(ways) do
  local x, label = things.held_out.x, things.held_out.label
  bytes[way[1]] = r:peak(function()
    local learner = r:place(function() return way[2](things, way[3] and way[3][1] or 1e-3) end)
    return function() learner:step(x:narrow(0, 0, rows), label:narrow(0, 0, rows)) end
  end)
  r:note("bytes of a step", { [way[1]] = bytes[way[1]] })
end

r:say("\n%-32s %9s %9s %8s %9s", "things", "accuracy", "joules", "epochs", "MB a step")
for _, way in ipairs(ways) do
  local own = found.things[way[1]]
  r:say("%-32s %9.4f %9.1f %8.1f %9.2f", way[1], ty.stats.mean(own.accuracy), ty.stats.mean(own.joules),
    ty.stats.mean(own.epochs), bytes[way[1]] / 1e6)
end

local own, theirs = found.things["Mono-Forward"], found.things.backpropagation
local digits = found.digits or found.things
os.exit(r:finish {
  { claim = "things recognised by Mono-Forward, of backpropagation's",
    values = ty.stats.ratios(own.accuracy, theirs.accuracy), bar = 1 },
  { claim = "digits recognised by Mono-Forward, of backpropagation's",
    values = ty.stats.ratios(digits["Mono-Forward"].accuracy, digits.backpropagation.accuracy), bar = 1 },
}, true)
