-- The machine that all others wait for is found, replaced, and no step beyond the last checkpoint is lost
-- claim: slow, hung and dead machines and slow links are named by who waits for whom, and training goes on exactly
-- system: dist.monitor, a board of collectives in shared memory, and a supervisor with spare machines
-- paper: Dong et al. 2024, "Boosting Large-scale Parallel Training Efficiency with C4: A Communication-Driven Approach"
-- time: 3 minutes on one CPU core
--
-- Data-parallel training of a small Llama, whose steps take uneven times by the ranks' clocks. Each run has one fault,
-- of a kind, a machine, a step and a size that are drawn at random; others have none. The supervisor knows nothing of
-- it: a machine that dies ends without a word, and its error is not read. It names a machine by the board alone and
-- starts the job again with a spare one in its place. A run is right when the fault's kind and machine (of a link both)
-- are named once and nothing else is; and exact when losses and weights at the end are those of a run without faults,
-- to the bit. A slow machine is told from the unevenness of all, so that its slowness is drawn in units of a step.
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare {
  args = {
    { "ranks", 4, "machines that train", least = 3 },
    { "injections", 60, "runs with a fault", quick = 3 },
    { "healthy", 20, "runs without one", quick = 1 },
    { "steps", 40, "training steps of a run", quick = 16 },
    { "every", 10, "steps between two checkpoints", quick = 8, least = 8 },
    { "step_seconds", 0.1, "of a step by the ranks' clocks" },
    { "jitter", 0.1, "standard deviation of its logarithm" },
    { "slowest", 2, "steps that a slow machine's step takes more, at most" },
    { "mildest", 0.5, "the same, at least" },
  },
}
local args = r.args
local work = dist.workload.open { length = 8, width = 32, layers = 1, rows = 8, chapters = 20, vocabulary = 300 }
local machines = {}
for i = 1, args.ranks + 1 do machines[i] = "m" .. i end

-- Uniform numbers in [0, 1) of the seed.
local drawn = ty.seeded_noise(ty.empty(4 * args.injections), r.seed, "uniform"):tolist()
local next_draw = 0
local function draw(low, high)
  next_draw = next_draw + 1
  return low + drawn[next_draw] * (high - low)
end

local KINDS = { "slow", "dead", "stopped", "hung", "link" }
local NAMED = { slow = "slow", dead = "dead", stopped = "dead", hung = "hung", link = "link" }
local runs = 0

-- A supervised training with faults.
local function train(faults)
  runs = runs + 1
  local o = { folder = ("%s/checkpoint-%d"):format(r.out, runs), steps = args.steps, every = args.every,
    batch = 4 * args.ranks, step_seconds = args.step_seconds, jitter = args.jitter, faults = faults,
    losses = ty.zeros(args.steps), runs = ty.zeros(args.steps) }
  ty.train.remove_checkpoint(o.folder)
  local results, found = dist.monitor.supervise(machines, function(...)
    return require("tycho.dist").monitored_training(...)
  end, { ranks = args.ranks, timeout = 60 }, work, o)
  ty.train.remove_checkpoint(o.folder)
  return { found = found, losses = o.losses, weights = results[1], repeated = o.runs:sum():item() - args.steps }
end

local whole = train {}
local function exact(run) return run.losses:equal(whole.losses) and run.weights:equal(whole.weights) end

local alarms, right, same, repeated, by_kind = #whole.found, 0, 0, 0, {}
for _ = 2, args.healthy do alarms = alarms + #train({}).found end
r:say("%d runs without a fault: %d alarms", args.healthy, alarms)

local picture
for i = 1, args.injections do
  local kind = KINDS[(i - 1) % #KINDS + 1]
  local machine = 1 + math.floor(draw(0, args.ranks))
  local other = 1 + (machine - 1 + math.floor(draw(1, args.ranks))) % args.ranks
  -- What is slow has to be so before the monitor looks for the last time.
  local last = (kind == "slow" or kind == "link") and args.steps // args.every * args.every - 7 or args.steps
  local fault = { kind = kind, machine = machines[machine], step = math.floor(draw(1, last + 1)),
    other = kind == "link" and machines[other] or nil, seconds = args.step_seconds * draw(args.mildest, args.slowest) }
  local run = train { fault }
  local one = run.found[1]
  local named = #run.found == 1 and one.kind == NAMED[kind] and one.machine == fault.machine
    and one.other == fault.other
  by_kind[kind] = by_kind[kind] or { named = 0, of = 0 }
  by_kind[kind].named, by_kind[kind].of = by_kind[kind].named + (named and 1 or 0), by_kind[kind].of + 1
  right, same = right + (named and 1 or 0), same + (exact(run) and 1 or 0)
  repeated = math.max(repeated, run.repeated)
  r:say("%2d %-7s %s%s from step %2d, %.2f s: %s%s; %d steps again%s", i, kind, fault.machine,
    fault.other and " to " .. fault.other or "", fault.step, fault.seconds, named and "" or "WRONG, ",
    one and one.text or "not found", run.repeated, exact(run) and "" or ", NOT the same losses")
  if kind == "dead" and not picture then picture = { step = fault.step, losses = run.losses:tolist() } end
end
for kind, counts in pairs(by_kind) do r:note(kind, counts) end

-- What the monitor costs: a collective that is observed, and one that is not.
local function cost(observed)
  return dist.run(2, function(group, watched, calls)
    local ty_, d = require "tycho", require "tycho.dist"
    if watched then d.monitor.watch(group, d.monitor.board(2)) end
    local x, began = ty_.ones(16), group:clock()
    for _ = 1, calls do group:all_reduce(x) end
    return (group:clock() - began) / calls
  end, nil, observed, r.quick and 100 or 5000)[1]
end
local bare, watched = cost(false), cost(true)
r:note("seconds of a collective", { bare = bare, watched = watched })
r:say("a collective takes %.1f microseconds, watched %.1f", 1e6 * bare, 1e6 * watched)

local steps = ty.arange(args.steps):add(1):tolist()
ty.plot.line { series = { { x = steps, y = whole.losses:tolist(), label = "without a fault" },
  { x = steps, y = picture and picture.losses or {}, label = "a machine dies and is replaced" } },
  title = "The same training, to the bit", x_label = "step", y_label = "loss" }:save(r:picture "losses.png")

os.exit(r:finish {
  { claim = "share of random faults that are named, kind and machine", measured = right / args.injections, bar = 0.95 },
  { claim = "alarms in runs without a fault", measured = alarms, bar = 0, below = true },
  { claim = "share of runs whose losses and weights are those without a fault, to the bit",
    measured = same / args.injections, bar = 1 },
  { claim = "steps done again after a fault, at most, of those between two checkpoints",
    measured = repeated / args.every, bar = 1, below = true },
  { claim = "microseconds that watching a collective takes", measured = 1e6 * (watched - bare), bar = 100,
    below = true },
}, true)
