-- Layers that compute while the sum of the one before is on its way
-- claim: a third less time by tensor parallel ranks where sums over ranks cost what they cost the paper, at little loss
-- system: the zoo's Llama, its upper half or all of it one module behind; a wider Llama by tensor parallel ranks
-- paper: Zhang et al. 2025, "Ladder-residual: parallelism-aware architecture for accelerating large model inference
--   with communication overlapping"
-- time: 8 minutes on one CPU core
--
-- Time is by the ranks' clocks, of a prompt and of tokens that are decoded with a cache. The paper's standard model
-- spends 38 % of its time on communication (70 billion parameters, 8 GPUs); the latency of the link that is judged is
-- the one at which ours should, from what its modules take without any, and other links are shown beside it.
--
-- For quality the zoo's model of the King James Bible, which was trained as it is, is converted and trained on for 2 %
-- of the tokens that it was trained with, on chapters that it knows, with the dropout that it was trained with. The
-- baseline, which is not converted, gets the same steps, and both have their rates chosen on chapters of their own by
-- the first seed, from the same. Loss is of chapters that no model saw.
local ty = require "tycho"
local dist, llm, zoo = require "tycho.dist", require "tycho.llm", require "tycho.zoo"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "ranks", 4, "of the timing", quick = 2 }, { "width", 512, "hidden size of what is timed", quick = 64 },
    { "layers", 8, "of it", quick = 2 }, { "rows", 4, "sequences at a time", quick = 1 },
    { "prompt", 48, "tokens before those that are decoded", quick = 8 },
    { "tokens", 24, "that are decoded", quick = 2 }, { "rounds", 5, "of which the median counts", quick = 1 },
    { "bandwidth", 1e10, "bytes a second between ranks" }, { "share", 0.38, "of its time the paper's model spends" },
    { "latencies", { 1e-5, 3e-5, 1e-4, 3e-4 }, "seconds of a message, of other links", quick = { 1e-4 } },
    { "model", "kjv-lm", "of the zoo", quick = "kjv-draft" },
    { "steps", 40, "of training on", quick = 1 }, { "batch", 2, "rows of a step", quick = 1 },
    { "rates", { 5e-5, 2e-4 }, "learning rates to choose from", quick = { 1e-4 } },
    { "training", 100, "chapters to train on", quick = 1 }, { "held_out", 16, "chapters to measure on", quick = 1 },
  },
}
local args = r.args

-- ---- time ----

local function run(group, work, lag, first, o)
  local d = require "tycho.dist"
  local model = d.workload.model(work, 1):eval()
  d.tensor_parallel(model, group)
  if lag then d.ladder_residual(model, { lag = lag, first = first }) end
  local prompt = work.held_out:narrow(0, 0, o.rows):narrow(1, 0, o.prompt):contiguous()
  return d.decoding.measure(group, model, prompt, { tokens = o.tokens, rounds = o.rounds })
end

local work = dist.workload.open { length = args.prompt, width = args.width, layers = args.layers,
  heads = args.ranks * math.max(1, args.width // 64 // args.ranks), rows = args.rows, vocabulary = 512 }
local half = args.layers // 2 + 1
local function measure(latency, lag, first)
  return dist.run(args.ranks, run, { latency = latency, bandwidth = args.bandwidth }, work, lag, first, args)[1]
end

local free = measure(0)
local sums = 2 * args.layers + 1
local judged = args.share / (1 - args.share) * free.decode / (sums * 2 * (args.ranks - 1))
local latencies = table.move(args.latencies, 1, #args.latencies, 1, {})
latencies[#latencies + 1] = judged
table.sort(latencies)
local at, curve = nil, { x = {}, all = {}, half = {} }
r:say("%d ranks, width %d, %d layers; seconds of a message: times as fast as without the ladder, all layers (prompt, "
  .. "decoding, both), upper half (both); milliseconds without", args.ranks, args.width, args.layers)
for i, latency in ipairs(latencies) do
  local standard, all, upper = measure(latency), measure(latency, 1, 1), measure(latency, 1, half)
  r:say("%9.3g%s  %.2f %.2f %.2f   %.2f   %.1f", latency, latency == judged and "*" or " ",
    standard.prefill / all.prefill, standard.decode / all.decode, standard.whole / all.whole,
    standard.whole / upper.whole, 1e3 * standard.whole)
  curve.x[i], curve.all[i], curve.half[i] = latency, standard.whole / all.whole, standard.whole / upper.whole
  if latency == judged then
    at = { standard = standard, all = all, faster = curve.all[i], upper = curve.half[i] }
  end
end
r.metrics.speed = curve
-- Seconds of a sum by the rules of the clocks: a ring.
local function cost(event) return 2 * (args.ranks - 1) * (judged + event.bytes / args.ranks / args.bandwidth) end
local seen, seen_before = dist.decoding.unwaited(at.all.events, cost), dist.decoding.unwaited(at.standard.events, cost)
local waits, spans = 0, at.standard.events
for _, e in ipairs(spans) do waits = waits + (e.name == "all_reduce" and e.to - e.from or 0) end
waits = waits / (spans[#spans].to - spans[1].from)
local ends = at.standard.prefill * 0.6
dist.timeline({ { title = "A rank with a prompt", rows = dist.decoding.rows(spans, cost, ends) },
  { title = "the same with the ladder", rows = dist.decoding.rows(at.all.events, cost, ends) } },
  { labels = { "computes", "sums" } }):save(r:picture "ladder-residual.png")

-- ---- quality ----

local base = zoo.load(args.model)
local layers = #base.model.layers
local ways = { { "not converted" }, { "upper half", layers // 2 + 1 }, { "all layers", 1 } }

local function converted(way)
  local model = base:clone()
  if way[2] then dist.ladder_residual(model, { first = way[2] }) end
  return model
end

local function fit(way, text, rate, seed)
  local model = converted(way):train()
  ty.manual_seed(seed)
  llm.dropout.attach(model, 0.1)
  llm.train.fit(model, text.training, { steps = args.steps, batch = args.batch, lr = rate, warmup = args.steps // 10,
    final = 0.05, seed = seed, quiet = true })
  llm.dropout.remove(model)
  return model:eval()
end

local function loss(model, part) return llm.train.evaluate(model:eval(), part).loss end

local found, before = { {}, {}, {} }, {}
for i, seed in ipairs(r.seeds) do
  local text = zoo.chapters { model = args.model, folder = r:path("text" .. seed), seed = seed,
    training = args.training, held_out = args.held_out, validation = r.quick and 1 or 8,
    length = r.quick and 64 or 256 }
  for k, way in ipairs(ways) do
    if i == 1 then before[k] = loss(converted(way), text.held_out) end
    local model
    if i == 1 then
      local score
      model, score, way.rate = ty.stats.best(r:tries(args.rates), function(rate)
        local tried = fit(way, text, rate, seed)
        return tried, -loss(tried, text.validation)
      end)
      r:say("%s: rate %g, %.4f on the chapters to choose by", way[1], way.rate, -score)
    else
      model = fit(way, text, way.rate, seed)
    end
    found[k][i] = loss(model, text.held_out)
    r:say("seed %d, %s: %.4f, %.4f before training on", seed, way[1], found[k][i], before[k])
  end
end
r.metrics.loss = { before = before, after = found }

local function of_base(list) return ty.stats.ratios(list, found[1]) end
os.exit(r:finish {
  { claim = "times as fast, all layers, where the paper's share goes into sums", measured = at.faster, bar = 1.29 },
  { claim = "share of its time that the standard waited for sums there", measured = waits, judged = false },
  { claim = "times as fast, upper half", measured = at.upper, judged = false },
  { claim = "share of the sums' time in which the rank computed", measured = seen, baseline = seen_before, bar = 0.8 },
  { claim = "held-out loss after training on, upper half, of that not converted", values = of_base(found[2]),
    baseline = found[1], bar = 1.02, below = true },
  { claim = "held-out loss after training on, all layers, of that not converted", values = of_base(found[3]),
    baseline = found[1], bar = 1.05, below = true },
  { claim = "held-out loss before training on, upper half, of that not converted", measured = before[2] / before[1],
    judged = false },
  { claim = "held-out loss before training on, all layers, of that not converted", measured = before[3] / before[1],
    judged = false },
}, true)
