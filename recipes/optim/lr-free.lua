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
local llm = require "tycho.llm"
local diffusion = require "tycho.diffusion"
local datasets = require "tycho.datasets"
local nn, optim = ty.nn, ty.optim

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

-- ---- workloads: model(), loader(seed), loss(model, batch), held(model, part), part "validation" or "held_out" ----

local function language()
  local text = ty.data.kjv { books = 1 }:sub(1, r.quick and 9000 or -1)
  local corpus = llm.corpus.open { folder = r:path "corpus", text = text, validation = true,
    length = 32, vocabulary = r.quick and 257 or 300, every = r.quick and 3 or nil }
  return {
    model = function() return corpus:model { width = 64, layers = 2 } end,
    loader = function(seed)
      return ty.data.DataLoader(corpus.training, { batch_size = args.batch // 2, shuffle = true, seed = seed })
    end,
    loss = function(model, b)
      return model:loss(b.tokens, b.targets, { cu_seqlens = b.cu_seqlens, longest = b.longest })
    end,
    held = function(model, part) return corpus:evaluate(model, part, { batch = 64 }).loss end,
  }
end

-- The rest of a workload of pictures, { model, loss }, with its parts as datasets.
local function of_pictures(work, training, validation, held_out)
  local parts = { validation = validation, held_out = held_out }
  for name, set in pairs(parts) do
    parts[name] = ty.data.DataLoader(set, { batch_size = #set }):next()
    for _, t in pairs(parts[name]) do if ty.is_tensor(t) then ty.keep(t) end end
  end
  function work.loader(seed)
    return ty.data.DataLoader(training, { batch_size = args.batch, shuffle = true, drop_last = true, seed = seed })
  end
  function work.held(model, part)
    ty.manual_seed(1) -- the same noise for all
    return ty.no_grad(work.loss, model, parts[part]):item()
  end
  return work
end

local function digits() return ty.data.digits { split = { 0.8, 0.1, 0.1 }, seed = 0 } end

local function flow_matching()
  local flow = diffusion.Flow()
  return of_pictures({
    model = function() return diffusion.DiT { width = 64, depth = 2, heads = 2, classes = 10 } end,
    loss = function(model, b) return flow:loss(model, b.image, { labels = b.label }) end,
  }, digits())
end

local function classifier()
  return of_pictures({
    model = function()
      return nn.Sequential(nn.Conv2d(1, 16, 3, { padding = 1 }), nn.ReLU(), nn.Conv2d(16, 32, 3, { padding = 1 }),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
    end,
    loss = function(model, b) return nn.cross_entropy(model(b.image), b.label) end,
  }, digits())
end

-- Emoji on white, f32 [n, 3, 16, 16] from -1 to 1.
local function emoji(split, count)
  local set, list = datasets.load("emoji", { size = 64, split = split }), {}
  for i = 1, count do
    list[i] = ty.scope(function()
      local picture = set:get((i - 1) * (#set // count)).image:to "f32" / 255
      local alpha = picture:narrow(0, 3, 1)
      return (picture:narrow(0, 0, 3) * alpha + 1 - alpha):unsqueeze(0):avg_pool2d(4):squeeze(0) * 2 - 1
    end)
  end
  return ty.data.TensorDataset { image = ty.keep(ty.stack(list, 0)) }
end

local function autoencoder()
  local count = args.pictures
  return of_pictures({
    model = function()
      return nn.Sequential(nn.Conv2d(3, 16, 3, { stride = 2, padding = 1 }), nn.SiLU(),
        nn.Conv2d(16, 32, 3, { stride = 2, padding = 1 }), nn.SiLU(), nn.Flatten(), nn.Linear(512, 32),
        nn.Linear(32, 256), nn.SiLU(), nn.Linear(256, 768), nn.Tanh())
    end,
    loss = function(model, b) return nn.mse_loss(model(b.image), b.image:flatten(1)) end,
  }, emoji("training", count), emoji("validation", count // 4), emoji("held_out", count // 4))
end

local workloads = { { "language", language }, { "flow matching", flow_matching }, { "classifier", classifier },
  { "autoencoder", autoencoder } }
for _, entry in ipairs(workloads) do entry.work = entry[2]() end

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
for _, entry in ipairs(workloads) do
  local losses = {}
  for k, rate in ipairs(rates) do losses[k] = train(entry.work, nadamw(rate), r.seed) end
  local least = math.min(table.unpack(losses))
  for k, loss in ipairs(losses) do
    by_rate[k] = by_rate[k] + math.log(loss / least) / #workloads
    if loss == least then own[entry[1]] = rates[k] end
    losses[k] = ("%.4g: %.4f"):format(rates[k], loss)
  end
  r:say("NadamW on %s, validation by rate: %s", entry[1], table.concat(losses, ", "))
end
local best = 1
for k in ipairs(rates) do if by_rate[k] < by_rate[best] then best = k end end
r:say("NadamW's rate for the set: %.4g", rates[best])
table.insert(methods, 1, { "NadamW", nadamw(rates[best]) })

local results, least = {}, {} -- means by method and workload, the least by workload
for _, entry in ipairs(workloads) do
  local name = entry[1]
  local function mean_of(make)
    local losses = {}
    for i, seed in ipairs(r.seeds) do losses[i] = select(2, train(entry.work, make, seed)) end
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
  for _, entry in ipairs(workloads) do
    if results[name].mean[entry[1]] <= factor * least[entry[1]] then count = count + 1 end
  end
  return count / #workloads
end
for k, method in ipairs(methods) do
  local name, x, y, words = method[1], {}, {}, {}
  for i = 0, 100 do x[i + 1], y[i + 1] = 1 + i / 50, share_within(name, 1 + i / 50) end
  lines[k] = { x = x, y = y, label = name }
  share[name], ratios[name] = share_within(name, 1.05), {}
  for j, entry in ipairs(workloads) do
    ratios[name][j] = results[name].mean[entry[1]] / least[entry[1]]
    words[j] = ("%s %.3f"):format(entry[1], ratios[name][j])
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
