-- Networks whose layers are physical systems that nobody has a model of
-- claim: digits are learnt through two black boxes in a row, and nearly as well while the boxes drift, where training
--   through a model of them falls behind
-- system: local.physical around systems of waves: a multimode fibre with a camera, a plate that sounds
-- paper: Momeni et al. 2023, "Backpropagation-free Training of Deep Physical Neural Networks"
-- time: 1 minute on one CPU core
--
-- The systems are simulated, forward only: they are called through a function that refuses gradients. Nothing goes
-- around them here (the paper's layers also hand their input on): what is known of a digit at the end has passed
-- through both. Beside it the same layers trained from end to end through a model of the systems and then run on these,
-- with a model that is exact (which nobody has), models that are off (a little matters little), and one that was exact
-- before the systems began to drift. Rates are tried alike, by the first seed's validation on the systems themselves. A
-- fibre has 200 detectors, a plate 144, the numbers between systems are 100. Without a system the layers are linear but
-- for their last step, goodness.
local ty = require "tycho"
local learning = require "tycho.local"
local physical, waves = learning.physical, learning.waves

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "hidden", 100, "numbers between systems", quick = 16 }, { "detectors", 200, "of a fibre", quick = 24 },
    { "scale", 2, "pi times this is the phase of a full amplitude" },
    { "off", { 0.3, 0.5, 0.7 }, "how far models are from the system, of the spread of its parts" },
    { "drift", 0.1, "of the systems in an epoch, the same" },
    { "epochs", 40, "at most", quick = 1 }, { "patience", 10, "epochs without a better validation before the end" },
    { "rates", { 3e-3, 1e-3 }, "of AdamW, tried" }, { "plate", 20, "epochs of the plates", quick = 1 },
  },
}
local args = r.args
local task = learning.tasks.digits(r.device)
for _, set in pairs { task.training, task.validation, task.held_out } do
  set.x = set.x:flatten(1)
  if r.quick then set.x, set.label = set.x:narrow(0, 0, 64), set.label:narrow(0, 0, 64) end
end
local width = task.training.x.shape[2]

-- Two systems in a row; what a seed draws is the same in each call.
local function systems(kind, seed)
  local list = {}
  for i = 1, 2 do
    local inputs = i == 1 and width + task.classes or args.hidden
    list[i] = kind == "fibre" and waves.fibre { inputs = inputs, outputs = args.detectors, seed = 2 * seed + i,
      scale = args.scale, device = r.device }
      or waves.plate { inputs = inputs, outputs = 144, seed = 2 * seed + i, steps = 20, device = r.device }
  end
  return list
end

local function options_of(list, run, rate)
  local functions, outputs = {}, {}
  for i, system in ipairs(list) do functions[i], outputs[i] = run(system), system.outputs end
  return { classes = task.classes, width = width, systems = functions, outputs = outputs, hidden = args.hidden,
    rate = rate, around = false }
end
local function boxed(system)
  return (physical.black_box(system.name, function(x) return system:measure(x) end))
end
local function open(system) return function(x) return system:measure(x) end end

local curves = {}
-- Trains a way; the systems drift after each epoch where that is asked for. Returns what is recognised on them then.
local function train(way, rate, seed, keep)
  ty.manual_seed(seed)
  local real = systems(way.kind, seed)
  local learner
  if way.model then
    local model = systems(way.kind, seed)
    for i, system in ipairs(model) do system:drift(way.model, 1000 * seed + i) end
    learner = r:place(function() return physical.in_silico(options_of(model, open, rate)) end)
  else
    learner = r:place(function() return physical.new(options_of(real, boxed, rate)) end)
  end
  local modelled = learner.systems and table.move(learner.systems, 1, 2, 1, {})
  local function on_systems(set)
    if modelled then
      for i, system in ipairs(real) do learner.systems[i] = boxed(system) end
    end
    local share = learner:accuracy(set)
    if modelled then table.move(modelled, 1, 2, 1, learner.systems) end
    return share
  end
  local curve = {}
  learning.fit(learner, task.training, task.validation, { seed = seed, last = way.drift, patience = args.patience,
    epochs = way.kind == "plate" and args.plate or args.epochs, device = r.device, watch = function(epoch)
      if way.drift then
        for i, system in ipairs(real) do system:drift(args.drift, 100000 * seed + 1000 * i + epoch) end
      end
      if keep then curve[epoch] = on_systems(task.validation) end
    end })
  if keep then curves[#curves + 1] = { y = curve, label = way.name } end
  return on_systems(task.held_out), on_systems(task.validation)
end

local ways = {
  { name = "fibres", kind = "fibre" }, { name = "plates", kind = "plate" },
  { name = "fibres that drift", kind = "fibre", drift = true },
  { name = "through an exact model", kind = "fibre", model = 0 },
  { name = "through a model from before the drift", kind = "fibre", model = 0, drift = true },
}
for _, off in ipairs(args.off) do
  ways[#ways + 1] = { name = ("through a model off by %g"):format(off), kind = "fibre", model = off }
end
local found = {}
for _, way in ipairs(ways) do
  for i, seed in ipairs(r.seeds) do
    local share = r:choose(way.name, args.rates, function(rate)
      local shown = i == 1 and rate == args.rates[1] and (way.model or 0) == 0
      local share, validation = train(way, rate, seed, shown)
      r:say("%-38s seed %d, rate %.0e: %.4f held out, %.4f validation", way.name, seed, rate, share, validation)
      return share, -validation
    end)
    ty.stats.put(found, way.name, i, share)
  end
end
ty.plot.line { series = curves, title = "Digits through systems of waves", x_label = "epochs",
  y_label = "validation, on the systems", width = 900 }:save(r:picture "physical-ff.png")

local drifting = found["fibres that drift"]
local rows = {
  { claim = "digits recognised through two fibres", values = found.fibres, bar = 0.95 },
  { claim = "through two plates", values = found.plates, bar = 0.9 },
  { claim = "through two fibres that drift all the while", values = drifting, bar = 0.93 },
}
rows[4] = { claim = "more than by training through the model from before the drift", bar = 0.05,
  values = ty.stats.differences(drifting, found["through a model from before the drift"]) }
rows[5] = { claim = "without drift, by training through an exact model", judged = false,
  values = found["through an exact model"] }
for _, off in ipairs(args.off) do
  rows[#rows + 1] = { claim = ("through a model off by %g"):format(off), judged = false,
    values = found[("through a model off by %g"):format(off)] }
end
os.exit(r:finish(rows), true)
