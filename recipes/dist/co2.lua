-- Training whose network is never waited for: an all-reduce has the whole next round to arrive
-- claim: a step's time does not grow with the network's delay up to a round's length, and the loss is nearly as good
-- system: dist.CO2, rounds of local steps, asynchronous all-reduce, momentum one round late with penalty and clipping
-- paper: Sun et al. 2024, "CO2: Efficient Distributed Training with Full Communication-Computation Overlap"
-- time: 8 minutes on one CPU core
--
-- A small Llama on the Pentateuch, four replicas with rows of their own, at equal steps. Synchronous training means
-- gradients at every step; it and CO2 each choose among four settings, by the first seed and rows that are not those of
-- the table: rates and AdamW's first momentum, and for CO2 the outer momentum too. The step's clip is half of what a
-- round's steps can change at most. Without penalty or without clipping the chosen setting is kept; without either it
-- is chosen anew among four. Times are those of the ranks' clocks, over links of several latencies and bandwidths, for
-- the weights of this model.
--
-- The first momentum matters: AdamW's own is of ten steps, so that what is stale lives on in it beyond the round, and
-- 0.5 in place of 0.9 is better for CO2. The shorter the training, the further it is behind: most steps then go where
-- a mean over the replicas' rows is worth more than the steps themselves.
local ty = require "tycho"
local dist = require "tycho.dist"
local training = dist.local_training

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 3200, "training steps of each replica", quick = 6 },
    { "every", 4, "of these in a round, between two outer steps", quick = 2 },
    { "rounds", 20, "rounds that are timed", quick = 4 },
    { "ranks", 4, "replicas", least = 2 },
    { "batch", 8, "rows of a replica's step", quick = 2 },
    { "books", 5, "books of the text", quick = 1 },
    { "length", 16, "tokens of a row" },
    { "width", 32, "hidden size of the Llama" },
    { "layers", 1, "layers of it" },
    { "rows", 384, "held-out rows, of which a third is to choose settings by", quick = 6, least = 2 },
  },
}
local args = r.args
local work = training.work { length = args.length, width = args.width, layers = args.layers, rows = args.rows,
  books = args.books }
local seconds, weights = {}, dist.workload.model(work, 0):count_parameters()

local function train(what, method, setting, seed)
  local began = r:seconds()
  local largest = args.every * setting.rate / 2
  local outer = method == "CO2" and { momentum = setting.momentum, penalty = setting.penalty,
    clip = setting.clip or largest } or nil
  local run = training.replicas(args.ranks, work, { method = method, outer = outer, rate = setting.rate,
    beta1 = setting.beta1, steps = args.steps, every = args.every, batch = args.batch, seed = seed })
  r:say("%-22s rate %g, beta1 %g%s, seed %d: held out %.4f (to choose by: %.4f), %.0f s", what, setting.rate,
    setting.beta1, outer and (", momentum %g"):format(setting.momentum) or "", seed, run.held_out, run.development,
    r:seconds() - began)
  seconds[#seconds + 1] = (run.seconds - run.waited) / args.steps
  return run, run.development
end

-- ---- quality ----

local function setting(rate, beta1, momentum) return { rate = rate, beta1 = beta1, momentum = momentum } end
local ways = {
  { "data parallel", { setting(8e-3, 0.9), setting(4e-3, 0.9), setting(1.6e-2, 0.9), setting(8e-3, 0.5) } },
  { "CO2", { setting(1.6e-2, 0.5, 0.2), setting(8e-3, 0.5, 0), setting(1.6e-2, 0.5, 0), setting(3.2e-2, 0.5, 0) } },
}
-- Without penalty and clipping the same steps are longer: it has rates of its own to choose from.
ways[3] = { "neither", {} }
for i, entry in ipairs { setting(8e-3, 0.5, 0), setting(8e-3, 0.5, 0.2), setting(1.6e-2, 0.5, 0),
  setting(4e-3, 0.5, 0) } do
  entry.penalty, entry.clip = 1, math.huge
  ways[3][2][i] = entry
end
local held_out = {}
for _, way in ipairs(ways) do
  local name, tries = table.unpack(way)
  local method = name == "data parallel" and name or "CO2"
  for i, seed in ipairs(r.seeds) do
    local run = r:choose(name, tries, function(entry) return train(name, method, entry, seed) end)
    ty.stats.put(held_out, name, i, run.held_out)
  end
end
local chosen = r.metrics.chosen.CO2
for _, without in ipairs { { "no penalty", { penalty = 1 } }, { "no clipping", { clip = math.huge } } } do
  for i, seed in ipairs(r.seeds) do
    local name, changes = table.unpack(without)
    local run = train(name, "CO2", setmetatable(changes, { __index = chosen }), seed)
    ty.stats.put(held_out, name, i, run.held_out)
  end
end
local function ratios(name) return ty.stats.ratios(held_out[name], held_out["data parallel"]) end

-- ---- time ----

local round = args.every * ty.stats.median(seconds)
local delays = r:tries { 0.9, 0, 0.25, 0.5, 0.75, 1, 1.5, 2 }
table.sort(delays)
r:say("\na round of %d steps: %.4f s; time of a step by the delay of an all-reduce in rounds: %s", args.every, round,
  table.concat(delays, "  "))
-- An all-reduce of n ranks is 2 (n - 1) messages one after the other, each of 1 / n of the weights.
local messages = 2 * (args.ranks - 1)
local function pace(method, delay, by)
  local network = by == "latency" and { latency = delay * round / messages }
    or { bandwidth = delay > 0 and messages / args.ranks * 4 * weights / (delay * round) or math.huge }
  local function one(group, o) return require("tycho.dist").local_training.pace(group, o) end
  local each = dist.run(args.ranks, one, network,
    { method = method, weights = weights, rounds = args.rounds, every = args.every, round_seconds = round })
  return math.max(table.unpack(ty.stats.column(each, "seconds"))) / args.rounds / args.every
end
local curves, at = {}, {}
for _, method in ipairs { "CO2", "local SGD", "data parallel" } do
  for _, by in ipairs { "latency", "bandwidth" } do
    local y, none = {}, pace(method, 0, by)
    for i, delay in ipairs(delays) do
      y[i] = pace(method, delay, by) / none
      if delay == 0.9 then at[method] = math.max(at[method] or 0, y[i]) end
    end
    local text = {}
    for i, ratio in ipairs(y) do text[i] = ("%.3f"):format(ratio) end
    r:say("%-14s %-10s %s", method, by, table.concat(text, "  "))
    r.metrics[method .. ", " .. by] = y
    if by == "latency" then curves[#curves + 1] = { x = delays, y = y, label = method } end
  end
end
r.metrics.delays = delays
ty.plot.line { series = curves, title = "Time of a step, of that without delay", y_range = { 0, 4 },
  x_label = "delay of an all-reduce, in rounds" }:save(r:picture "delay.png")

os.exit(r:finish {
  { claim = "time of a step at a delay of 0.9 rounds, of that without", measured = at.CO2, bar = 1.05, below = true },
  { claim = "the same of local SGD", measured = at["local SGD"], judged = false },
  { claim = "the same of synchronous training", measured = at["data parallel"], judged = false },
  { claim = "held-out loss, of synchronous training's", values = ratios "CO2", baseline = held_out["data parallel"],
    bar = 1.02, below = true },
  { claim = "without the penalty", values = ratios "no penalty", judged = false },
  { claim = "without clipping", values = ratios "no clipping", judged = false },
  { claim = "without either", values = ratios "neither", judged = false },
  { claim = "held-out loss, of that without either", values = ty.stats.ratios(held_out.CO2, held_out.neither),
    baseline = held_out.neither, bar = 1, below = true },
}, true)
