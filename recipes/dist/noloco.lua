-- Replicas that never meet all at once: random pairs in place of the all-reduce
-- claim: without any collective the held-out loss is at most DiLoCo's, and one late replica holds up fewer others
-- system: dist.NoLoCo, pairs drawn from a shared seed, messages, Nesterov's momentum with a pull towards the partner
-- paper: Kolehmainen et al. 2025, "NoLoCo: No-all-reduce Low Communication Training Method for Large Models"
-- time: 5 minutes on one CPU core
--
-- A small Llama on the Pentateuch, four replicas with rows of their own. All ways have the steps, rows, rounds and the
-- schedule in common; the rate of AdamW is the best of three for data-parallel training, which means gradients at every
-- step. DiLoCo and NoLoCo each choose among as many settings of their outer step, by the first seed and rows that are
-- not those of the table; each choice has the published ones in it. NoLoCo has two rounds for each of DiLoCo's, as in
-- the paper, and the table also says what it gives with as many. Its loss is the mean over its replicas, each by
-- itself. Times are those of the ranks' clocks: rounds of outer steps on a million weights, with links between.
local ty = require "tycho"
local dist = require "tycho.dist"
local training = dist.local_training

local r = ty.recipe.declare {
  seeds = 3,
  args = table.move(training.arguments, 1, #training.arguments, 9, {
    { "steps", 400, "training steps of each replica", quick = 8 },
    { "every", 10, "of these in a round of DiLoCo; NoLoCo has two rounds in them", quick = 2, least = 2 },
    { "many", 16, "replicas whose rounds are timed", quick = 4, least = 4 },
    { "rounds", 40, "rounds that are timed", quick = 5 },
    { "weights", 1000000, "weights of these, of 4 bytes", quick = 1000 },
    { "latency", 0.05, "seconds of a message between them" },
    { "bandwidth", 4e6, "bytes a second between them" },
    { "late", 1.0, "by how many rounds one replica of each round, drawn at random, is late" },
  }),
}
local args = r.args
local work = training.work { length = args.length, width = args.width, layers = args.layers, rows = args.rows,
  books = args.books }

local function train(method, outer, rate, seed, every)
  local began = r:seconds()
  local run = training.replicas(args.ranks, work, { method = method, outer = outer, rate = rate, steps = args.steps,
    every = every or method == "NoLoCo" and args.every // 2 or args.every, batch = args.batch, seed = seed,
    snapshots = seed == r.seed and 10 or 1, curve = seed == r.seed and 5 or 0 })
  local settings = ""
  for _, name in ipairs { "lr", "momentum", "pull" } do
    if outer and outer[name] then settings = settings .. (" %s %g"):format(name, outer[name]) end
  end
  r:say("%-13s rate %g%s, seed %d: held out %.4f (to choose by: %.4f), %.1f MB sent by a rank, %d collectives, %.0f s",
    method, rate, settings, seed, run.held_out, run.development, run.bytes / 1e6, run.collectives, r:seconds() - began)
  return run, run.development
end

-- ---- quality ----

local function outer(lr, momentum, pull) return { lr = lr, momentum = momentum, pull = pull } end
local ways = {
  { "data parallel", { 4e-3, 8e-3, 1.6e-2 } },
  { "DiLoCo", { outer(0.7, 0.3), outer(0.7, 0.9), outer(1, 0), outer(1, 0.3) } },
  { "NoLoCo", { outer(0.7, 0.3, 0.7), outer(0.7, 0.5, 0.7), outer(1, 0, 1), outer(1, 0.3, 1) } },
}
local held_out, first, rate, collectives = {}, {}, nil, 0
for _, way in ipairs(ways) do
  local name, tries = table.unpack(way)
  for i, seed in ipairs(r.seeds) do
    local run = r:choose(name, tries, function(entry)
      if name == "data parallel" then return train(name, nil, entry, seed) end
      return train(name, entry, rate, seed)
    end)
    ty.stats.put(held_out, name, i, run.held_out)
    if i == 1 then first[name] = run end
    if name == "NoLoCo" then
      collectives = collectives + run.collectives
      ty.stats.put(held_out, "as many rounds", i, train(name, r.metrics.chosen[name], rate, seed, args.every).held_out)
    end
  end
  if name == "data parallel" then rate = r.metrics.chosen[name] end
end
local chosen = r.metrics.chosen.NoLoCo
local apart = train("NoLoCo", outer(chosen.lr, chosen.momentum, 0), rate, r.seed)

local spread, curves = first.NoLoCo.spread, {}
for _, entry in ipairs { { spread, "pairs with a pull" }, { apart.spread, "pairs without" } } do
  local x = {}
  for i = 1, #entry[1] do x[i] = i * args.steps // #entry[1] end
  curves[#curves + 1] = { x = x, y = entry[1], label = entry[2] }
end
r:note("spread", { largest = math.max(table.unpack(spread)), last = spread[#spread], without = apart.spread[#spread] })
ty.plot.line { series = curves, title = "How far replicas are apart", x_label = "training steps",
  y_label = "standard deviation of a weight" }:save(r:picture "spread.png")
for name, run in pairs(first) do r.metrics["curve of " .. name] = run.curve end

-- ---- time ----

local network = { latency = args.latency, bandwidth = args.bandwidth }
local function pace(method, links, options)
  options.method, options.rounds, options.weights = method, args.rounds, options.weights or args.weights
  local function one(group, o) return require("tycho.dist").local_training.pace(group, o) end
  local each = dist.run(args.many, one, links, options)
  return math.max(table.unpack(ty.stats.column(each, "seconds"))) / args.rounds
end
local of_diloco = {}
for _, case in ipairs {
  { "slow links", network, {} },
  { "late replicas", nil, { weights = 1, late = args.late } },
  { "uneven rounds", nil, { weights = 1, jitter = 0.5 } },
} do
  local name, links, options = table.unpack(case)
  local own, theirs = pace("NoLoCo", links, options), pace("DiLoCo", links, options)
  r:say("%s: a round of NoLoCo takes %.3f s, of DiLoCo %.3f s, its steps 1 s", name, own, theirs)
  r:note(name, { NoLoCo = own, DiLoCo = theirs })
  of_diloco[name] = { round = own / theirs, lost = (own - 1) / (theirs - 1) }
end

os.exit(r:finish {
  { claim = "collectives called in NoLoCo's training", measured = collectives, bar = 0, below = true },
  { claim = "held-out loss, of DiLoCo's", values = ty.stats.ratios(held_out.NoLoCo, held_out.DiLoCo),
    baseline = held_out.DiLoCo, bar = 1, below = true },
  { claim = "with as many rounds as DiLoCo", values = ty.stats.ratios(held_out["as many rounds"], held_out.DiLoCo),
    judged = false },
  { claim = "held-out loss, of data-parallel training's",
    values = ty.stats.ratios(held_out.NoLoCo, held_out["data parallel"]), judged = false },
  { claim = "spread of the replicas at the end, of its largest",
    measured = spread[#spread] / math.max(table.unpack(spread)), bar = 0.5, below = true },
  { claim = "spread at the end, of that without the pull", measured = spread[#spread] / apart.spread[#spread],
    bar = 0.5, below = true },
  { claim = "time lost to slow links, of DiLoCo's", measured = of_diloco["slow links"].lost, bar = 0.5, below = true },
  { claim = "time lost to one late replica a round, of DiLoCo's", measured = of_diloco["late replicas"].lost,
    bar = 0.5, below = true },
  { claim = "time of rounds of uneven length, of DiLoCo's", measured = of_diloco["uneven rounds"].round, bar = 0.9,
    below = true },
}, true)
