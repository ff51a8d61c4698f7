-- No learning rate to tune, on four workloads
-- claim: five learning-rate-free methods are scored with one setting each against NadamW calibrated across the set
-- system: D-Adaptation, Prodigy, DoG, Mechanic and schedule-free AdamW, on language, flow matching, digits and emoji
-- paper: Kasimbeg et al. 2025, "How Far Away Are Truly Hyperparameter-Free Learning Algorithms?"
-- time: 6 minutes on one CPU core
--
-- Each method has one setting for all workloads, at lr 1 (schedule-free: its default), with the schedule that its
-- authors advise: a warm-up and a cosine over the fixed budget of steps, none for DoG, which is the one with a rate for
-- each tensor that its paper finds better and whose average is evaluated, and a warm-up alone for schedule-free. All
-- but DoG have Adam's second moment with beta2 0.99, for runs this short, and its correction of the bias: without it
-- D-Adaptation's estimate shoots past in the first steps. NadamW gets the same cosine, and one rate for all workloads:
-- of those tried the one with the least mean log-ratio to the best over the set, on validation data. What a rate for
-- each workload would give it stands in the metrics and in no score. All methods see the same batches from the same
-- weights, by the seed. A score is a held-out loss, the mean of the seeds, as a multiple of the least one on the
-- workload; the profile is the share of workloads on which a method is at most so many times the best (Dolan and More
-- 2002). The two last rows ask what a method without a rate promises; the paper finds as well that the methods do not
-- keep it.
local ty = require "tycho"
local zoo = require "tycho.zoo"
local optim = ty.optim

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 250, "training steps of each run", quick = 2 },
    { "batch", 16, "pictures of a step; rows of text: half as many", quick = 4 },
    { "pictures", 400, "emoji to train on", quick = 16 },
    { "rates", 5, "learning rates of NadamW, from 1e-3 up by factors of 2", quick = 1 },
  },
}
local args = r.args

local workloads = zoo.workloads.all { folder = r:path "corpus", batch = args.batch, pictures = args.pictures,
  small = r.quick }

-- ---- methods ----

local warmup = args.steps // 20
local cosine = optim.cosine { steps = args.steps, warmup = warmup }

local function nadamw(rate)
  return function(model)
    return optim.NAdam(model, { lr = rate, beta2 = 0.99, decoupled = true, schedule = cosine, clip_norm = 1 })
  end
end

local methods = {
  { "D-Adaptation", function(model)
    return optim.DAdaptAdamW(model, { beta2 = 0.99, correction = true, schedule = cosine })
  end },
  { "Prodigy", function(model)
    return optim.Prodigy(model, { beta2 = 0.99, correction = true, safeguard = true, schedule = cosine })
  end },
  { "DoG", function(model) return optim.DoG(model, { layers = true }) end },
  { "Mechanic", function(model)
    return optim.Mechanic(optim.AdamW(model, { lr = 1, beta2 = 0.99, weight_decay = 0, schedule = cosine }))
  end },
  { "schedule-free", function(model) return optim.ScheduleFree(model, { beta2 = 0.99, warmup = warmup }) end },
}

local function train(work, make, seed)
  ty.manual_seed(seed)
  local model, loader = work.model(), work.loader(seed)
  local opt = make(model)
  for _ = 1, args.steps do
    ty.scope(function() opt:step(work.loss(model, loader:next())) end)
  end
  if opt.eval then opt:eval() end
  model:eval()
  local function held(part)
    local loss = work.held(model, part)
    return loss < 1e6 and loss or 1e6 -- where training ran away
  end
  return held "validation", held "held_out"
end

-- The rate of NadamW: of the set, and of each workload.
local rates, by_rate, own = {}, {}, {}
for k = 1, args.rates do rates[k], by_rate[k] = 1e-3 * 2 ^ (k - 1), 0.0 end
for _, work in ipairs(workloads) do
  local losses = {}
  for k, rate in ipairs(rates) do losses[k] = train(work, nadamw(rate), r.seed) end
  local least = math.min(table.unpack(losses))
  for k, loss in ipairs(losses) do
    by_rate[k] = by_rate[k] + math.log(loss / least) / #workloads
    if loss == least then own[work.name] = rates[k] end
    losses[k] = ("%.4g: %.4f"):format(rates[k], loss)
  end
  r:say("NadamW on %s, validation by rate: %s", work.name, table.concat(losses, ", "))
end
local best = 1
for k in ipairs(rates) do if by_rate[k] < by_rate[best] then best = k end end
r:say("NadamW's rate for the set: %.4g", rates[best])
table.insert(methods, 1, { "NadamW", nadamw(rates[best]) })

local results, least = {}, {} -- means by method and workload, the least by workload
for _, work in ipairs(workloads) do
  local name = work.name
  local function mean_of(make)
    local losses = {}
    for i, seed in ipairs(r.seeds) do losses[i] = select(2, train(work, make, seed)) end
    return ty.stats.mean(losses), losses
  end
  for _, method in ipairs(methods) do
    local mean, losses = mean_of(method[2])
    results[method[1]] = results[method[1]] or { mean = {}, losses = {} }
    results[method[1]].mean[name], results[method[1]].losses[name] = mean, losses
    least[name] = math.min(least[name] or mean, mean)
    r:say("%-14s %-14s %.4f", name, method[1], mean)
  end
  if own[name] ~= rates[best] then
    results.NadamW["tuned for " .. name] = { own[name], (mean_of(nadamw(own[name]))) }
  end
end

-- ---- scores ----

local lines, share, ratios = {}, {}, {}
local function share_within(name, factor)
  local count = 0
  for _, work in ipairs(workloads) do
    if results[name].mean[work.name] <= factor * least[work.name] then count = count + 1 end
  end
  return count / #workloads
end
for k, method in ipairs(methods) do
  local name, x, y, words = method[1], {}, {}, {}
  for i = 0, 100 do x[i + 1], y[i + 1] = 1 + i / 50, share_within(name, 1 + i / 50) end
  lines[k] = { x = x, y = y, label = name }
  share[name], ratios[name] = share_within(name, 1.05), {}
  for j, work in ipairs(workloads) do
    ratios[name][j] = results[name].mean[work.name] / least[work.name]
    words[j] = ("%s %.3f"):format(work.name, ratios[name][j])
  end
  r:say("%-14s within 5 %% of the best: %3.0f %%; %s", name, 100 * share[name], table.concat(words, ", "))
  r.metrics[name] = results[name]
end
ty.plot.line { series = lines, title = "Workloads within a multiple of the best loss",
  x_label = "multiple of the least loss", y_label = "share of workloads" }:save(r:picture "profile.png")

local function geometric(list)
  local sum = 0.0
  for _, x in ipairs(list) do sum = sum + math.log(x) end
  return math.exp(sum / #list)
end
local free, closest = 0.0, math.huge
for k = 2, #methods do
  local name = methods[k][1]
  free, closest = math.max(free, share[name]), math.min(closest, geometric(ratios[name]))
end
os.exit(r:finish {
  { claim = "workloads on which five methods are scored with one setting each", measured = #workloads, bar = 4 },
  { claim = "workloads within 5 % of the best: the best learning-rate-free method's share, less NadamW's",
    measured = free - share.NadamW, bar = 0 },
  { claim = "mean multiple of the best loss: the closest learning-rate-free method's, of NadamW's",
    measured = closest / geometric(ratios.NadamW), bar = 1.05, below = true },
}, true)
