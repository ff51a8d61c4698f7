-- A video classifier trained over grids of frames and sizes
-- claim: multigrid training is as accurate as training on whole clips, for less than half of the operations
-- system: a residual network in three dimensions that tells by which law an emoji moves
-- paper: Wu et al. 2020, "A Multigrid Method for Efficiently Training Video Models"
-- time: 5 minutes on one CPU core
--
-- Three ways to train the same network by SGD, with rates that fall at the same shares of the training: on whole clips;
-- over the paper's long and short cycles; on whole clips with so many steps that they take the operations of the
-- second. Operations are counted on the meta device, one step of each shape. Each way gets the same rates to try with
-- the first seed, on clips that are neither trained nor reported on. The pool of training clips is drawn once and is
-- the same for all. Multigrid training sees 2.4 times as many clips as training on whole clips (the paper: 1.5 times),
-- which was chosen on the validation part too: as many as half of the operations allow. Cycles and the scaling of rates
-- are the paper's. Clips are of one emoji before plain or graded backgrounds, less their mean colour: without that, the
-- means over whole maps that the head sees are of the background, and no way learns in so few steps; photographs take
-- more of them. Where whole clips came in batches of 16 multigrid training stayed behind: its steps were then too few.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local models = require "tycho.models"
local vision = require "tycho.vision"
local multigrid, stats = vision.multigrid, ty.stats

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 800, "steps on whole clips", quick = 8 },
    { "batch", 4, "whole clips of a step" },
    { "epochs", 2.4, "clips that multigrid training sees, of those that training on whole clips sees" },
    { "frames", 16, "frames of a whole clip", quick = 8 },
    { "size", 32, "its height and width" },
    { "pool", 4000, "training clips", quick = 48 },
    { "held_out", 1000, "clips to choose rates by, and as many others to report on", quick = 24 },
    { "width", 8, "channels of the first stage", quick = 4 },
    { "rates", 3, "learning rates tried, from 0.025 up by factors of 2", quick = 1 },
  },
}
local a = r.args

local function clips(split, count, from)
  local set = datasets.load("clips", { frames = a.frames, size = a.size, split = split, fields = { "video", "law" },
    backgrounds = { "plain", "gradient" }, objects = { 1, 1 } })
  local parts = { video = {}, law = {} }
  for start = 0, count - 1, 100 do
    local batch = set:batch(ty.arange(from + start, from + math.min(count, start + 100)))
    for name, list in pairs(parts) do list[#list + 1] = batch[name] end
  end
  return ty.data.TensorDataset { video = ty.concat(parts.video, 0), label = ty.concat(parts.law, 0) }
end
local training = clips("training", a.pool, 0)
local validation, held_out = clips("validation", a.held_out, 0), clips("validation", a.held_out, a.held_out)

local function new_model()
  return models.ResNet3d { classes = 5, channels = { a.width, 2 * a.width, 4 * a.width }, blocks = { 1, 1, 1 },
    small = true }
end

local function options(steps)
  return { frames = a.frames, size = a.size, batch = a.batch, steps = steps, warmup = steps // 12,
    milestones = { steps * 6 // 10, steps * 85 // 100 } }
end
local grids = options(a.steps)
grids.epochs = a.epochs
local schedules = { whole = multigrid.fixed(options(a.steps)), multigrid = multigrid.schedule(grids) }
local flops = {}
for name, schedule in pairs(schedules) do flops[name] = multigrid.flops(schedule, new_model) end
schedules.short = multigrid.fixed(options(math.max(4, math.floor(a.steps * flops.multigrid / flops.whole + 0.5))))
flops.short = multigrid.flops(schedules.short, new_model)
r:say("%s\n", schedules.multigrid)

local whole = { frames = a.frames, size = a.size }
local kept = {}
local function train(name, rate, seed)
  local key = ("%s %g %d"):format(name, rate, seed)
  if not kept[key] then
    ty.manual_seed(seed)
    local model, began = r:place(new_model), os.clock()
    local losses = multigrid.fit(model, training, schedules[name],
      { lr = rate, seed = seed, quiet = true, center = true })
    local run = { seconds = os.clock() - began, losses = losses,
      validation = 100 * multigrid.accuracy(model, validation, whole, { center = true }),
      held_out = 100 * multigrid.accuracy(model, held_out, whole, { center = true }) }
    r:say("%-10s rate %-5g seed %d: validation %.1f %%, held out %.1f %%, %.3g operations, %.1f processor seconds",
      name, rate, seed, run.validation, run.held_out, flops[name], run.seconds)
    kept[key] = run
  end
  return kept[key]
end

local results = {}
for _, name in ipairs { "whole", "short", "multigrid" } do
  local best
  for k = 1, a.rates do
    local rate = 0.025 * 2 ^ (k - 1)
    local accuracy = train(name, rate, r.seed).validation
    if not best or accuracy > best.accuracy then best = { accuracy = accuracy, rate = rate } end
  end
  local result = { rate = best.rate, held_out = {}, seconds = {}, flops = flops[name] }
  for i, seed in ipairs(r.seeds) do
    local run = train(name, best.rate, seed)
    result.held_out[i], result.seconds[i] = run.held_out, run.seconds
    if i == 1 then result.losses = run.losses end
  end
  r:say("%s: held out %.2f %% at rate %g", name, stats.mean(result.held_out), best.rate)
  results[name] = result
end

-- The loss against what was spent, step by step of its own grid.
local series = {}
for name, label in pairs { whole = "whole clips", multigrid = "multigrid", short = "whole clips, fewer" } do
  local x, losses = {}, results[name].losses
  for i = 1, #losses do x[i] = flops[name] / 1e9 * i / #losses end
  series[#series + 1] = { x = x, y = losses, smooth = 10, label = label }
  results[name].losses = nil
  r.metrics[name] = results[name]
end
table.sort(series, function(left, right) return left.label < right.label end)
ty.plot.line { series = series, title = "Training loss", x_label = "10^9 operations", y_label = "cross entropy" }
  :save(r:picture "loss.png")

local function less(other)
  local list = {}
  for i, x in ipairs(results.multigrid.held_out) do list[i] = x - results[other].held_out[i] end
  return list
end
os.exit(r:finish {
  { claim = "operations of multigrid training, of those on whole clips", measured = flops.multigrid / flops.whole,
    bar = 0.5, below = true },
  { claim = "held-out accuracy, points above training on whole clips", values = less "whole",
    baseline = results.whole.held_out, bar = 0 },
  { claim = "held-out accuracy, points above whole clips at the same operations", values = less "short",
    baseline = results.short.held_out, bar = 0.5 },
  { claim = "processor seconds of multigrid training, of those on whole clips",
    measured = stats.mean(results.multigrid.seconds) / stats.mean(results.whole.seconds), bar = 0.67, below = true },
}, true)
