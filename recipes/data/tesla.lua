-- A data set distilled by matching trajectories, in memory that does not grow with their length
-- claim: the gradient of the whole unrolled training, exactly, in flat memory; digits distilled by it beat real ones
-- system: curation.trajectory: the matching loss taken apart so that the graph of one step is held at a time
-- paper: Cui et al. 2023, "Scaling Up Dataset Distillation to ImageNet-1K with Constant Memory"
-- time: 3 minutes on one CPU core
--
-- TESLA writes the loss as a sum over steps and takes each one's gradient alone. That is exact where the weights of a
-- step are held fixed; but they follow the pictures of the steps before, which its form leaves out. Here what they
-- follow goes back step by step as well, so that the result is the gradient of MTT's whole graph, and both are
-- measured: how far they are from it, their memory, and what they distil. Weights at earlier steps are found again from
-- four snapshots. All small sets begin with the same real digits and are judged alike, by networks that learn from them
-- alone at the best of three rates by digits kept for choices. The rate of the pictures was chosen with another seed
-- and digits of the training part. Soft labels are those of an expert that has learnt all, for the first pictures; with
-- ten classes they do not help. Digits distilled by either gradient are about as good.
local ty = require "tycho"
local curation, datasets, models = require "tycho.curation", require "tycho.datasets", require "tycho.models"
local condensed, condensing, trajectory = curation.condensed, curation.condensing, curation.trajectory

local r = ty.recipe.declare {
  seeds = 3,
  args = table.move(condensing.arguments, 1, #condensing.arguments, 6, {
    { "rounds", 100, "of distilling one digit of a class", quick = 2 },
    { "steps", 12, "of a round", quick = 2 },
    { "rounds_of_ten", 50, "of distilling ten digits of a class", quick = 1 },
    { "image_rate", 0.03, "of the pictures" },
    { "lengths", { 5, 10, 20, 50 }, "steps whose memory is measured", quick = { 2, 4 } },
  }),
}
local args = r.args

local function all_of(split)
  local set = datasets.load("digits", { split = split })
  return ty.data.batches(set, { batch_size = #set, device = r.device })[1]
end
local training, test = all_of "training", all_of "held_out"
local function make()
  return r:place(function()
    return models.ConvNet { in_channels = 1, size = 8, classes = 10, width = args.width, blocks = 2 }
  end)
end

-- ---- the gradient, and what it takes ----

-- In f64, from one network to one that took other steps.
ty.manual_seed(r.seed)
local model = make():to "f64"
local first = condensed.random(training, 1)
local double = { image = first.image:to "f64", label = first.label }
local path = trajectory.expert(model, { image = training.image:to "f64", label = training.label }, { epochs = 1 })
local longest = args.lengths[#args.lengths]
local function gradient(way, exact)
  local _, g = way(model, path[1], path[2], double, { lr = 0.05, steps = longest, exact = exact })
  return g
end
local whole = gradient(trajectory.unrolled)
local function off(g) return (g - whole):abs():max():item() / whole:abs():max():item() end
local exact, fixed = off(gradient(trajectory.constant, true)), off(gradient(trajectory.constant, false))
r:say("%d steps, f64: %.1e from the gradient of the whole graph, with weights held fixed %.1e", longest, exact, fixed)

local series, bytes, seconds = {}, {}, {}
model = make()
local from = trajectory.expert(model, training, { epochs = 1 })
for k, way in ipairs { "unrolled", "constant" } do
  bytes[way], seconds[way] = {}, {}
  for i, steps in ipairs(args.lengths) do
    local function run() trajectory[way](model, from[1], from[2], first, { lr = 0.05, steps = steps }) end
    bytes[way][i] = r:memory(run)
    seconds[way][i] = r:clock(run)
    r:say("%-9s %3d steps: %8.2f MB, %7.1f ms", way, steps, bytes[way][i] / 1e6, 1e3 * seconds[way][i])
    r:note(way .. "/" .. steps, { bytes = bytes[way][i], seconds = seconds[way][i] })
  end
  series[k] = { x = args.lengths, y = bytes[way], label = way == "unrolled" and "whole graph" or "step by step" }
end
ty.plot.line { series = series, title = "Bytes of a gradient", x_label = "unrolled steps", log_y = true }
  :save(r:path "memory.png")
local count = #args.lengths

-- ---- what is distilled ----

local found, sheet, names = {}, {}, {}
for i, seed in ipairs(r.seeds) do
  ty.manual_seed(seed)
  local trial = condensing.new(training, test, make, { experts = args.experts, epochs = args.epochs,
    networks = args.networks, learn = args.learn })
  local net = make()
  local function tell(name, set)
    local share = trial:judge(set)
    ty.stats.put(found, name, i, share)
    r:note("accuracy", { [name] = share }, seed)
    r:say("seed %d, %-28s %.4f", seed, name, share)
    if i == 1 and set.image.shape[1] == 10 then sheet[#sheet + 1], names[#names + 1] = set, name end
  end
  local teacher = trial:teacher()
  local embedded = ty.no_grad(function() return teacher:embed(trial.real.image) end)
  for _, each in ipairs { 1, 10 } do
    local start = condensed.random(trial.real, each)
    local function name(what) return ("%s, %d a class"):format(what, each) end
    local function distilled(what, set, more)
      local o = { rounds = each == 1 and args.rounds or args.rounds_of_ten, steps = args.steps, epochs = 1,
        latest = math.min(8, args.epochs - 1), batch_size = 50, rate_lr = 0.02,
        image_lr = args.image_rate }
      for key, value in pairs(more or {}) do o[key] = value end
      tell(name(what), (trajectory.distil(net, trial.experts, set, o)))
    end
    tell(name "random", start)
    tell(name "herding", condensed.herding(trial.real, embedded, each))
    distilled("distilled", start)
    if each == 1 then
      distilled("weights fixed", start, { exact = false })
      local experts = trial.experts[1]
      distilled("soft labels", { image = start.image,
        label = trajectory.soften(net, experts[#experts], start.image) })
    end
  end
  ty.stats.put(found, "all real digits", i, curation.unlearning.accuracy(teacher, test))
end
condensing.sheet(sheet, names):save(r:picture "tesla.png")

local function above(name, than) return ty.stats.differences(found[name], found[than]) end
local rows = {
  { claim = ("gradient of %d steps, f64, from that of the unrolled graph, relative"):format(longest), measured = exact,
    bar = 1e-9, below = true },
  { claim = ("bytes of %d steps, of those of %d"):format(longest, args.lengths[1]),
    measured = bytes.constant[count] / bytes.constant[1], bar = 1.1, below = true },
  { claim = ("bytes of %d steps, of those of the unrolled graph"):format(longest),
    measured = bytes.constant[count] / bytes.unrolled[count], bar = 0.2, below = true },
  { claim = "one digit a class, accuracy above real ones", values = above("distilled, 1 a class", "random, 1 a class"),
    bar = 0.05 },
  { claim = "ten digits a class, the same", values = above("distilled, 10 a class", "random, 10 a class"),
    bar = 0.005 },
}
local function show(claim, values) rows[#rows + 1] = { claim = claim, values = values, judged = false } end
rows[#rows + 1] = { claim = "TESLA's form, weights held fixed: gradient from that of the unrolled graph",
  measured = fixed, judged = false }
rows[#rows + 1] = { claim = ("seconds of a gradient of %d steps, of the unrolled graph's"):format(longest),
  measured = seconds.constant[count] / seconds.unrolled[count], judged = false }
for _, name in ipairs { "random, 1 a class", "herding, 1 a class", "distilled, 1 a class", "weights fixed, 1 a class",
  "soft labels, 1 a class", "random, 10 a class", "herding, 10 a class", "distilled, 10 a class", "all real digits" } do
  show("accuracy: " .. name, found[name])
end
os.exit(r:finish(rows), true)
