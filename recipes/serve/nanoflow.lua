-- Steps in nano-batches, one computed while the sum of another is on its way
-- claim: the same tokens, and no less of them in a second than with whole steps, on any link
-- system: serve.nano_batches, tensor parallel ranks with an engine each; how steps are cut is sought by trying
-- paper: Zhu et al. 2024, "NanoFlow: Towards Optimal Large Language Model Serving Throughput"
-- time: 1 minute on one CPU core
--
-- The paper overlaps products of matrices, reading of keys and values, and exchange within a GPU, whose units do these
-- at the same time when each kernel gets a share of them. A CPU core has one kind of units: on these ranks products
-- and attention come one after the other, in any order, and a share of the core for one is taken from the other. What
-- can be shown is the third: exchange beside computing. So nothing here says what shares of a GPU are worth. Nor is the
-- next batch made beside a step, as there is no other core for the host's work.
--
-- Whole steps, halves and steps that are cut as is best take turns on the same ranks; the first turn, in which is
-- sought, does not count. Every size of steps tries five cuts, whole steps among them. The link that is judged takes
-- three tenths of a whole step's time; others are shown beside it. Smaller products read the weights again and need
-- more calls, which is what cutting costs.
local ty = require "tycho"
local dist, serve = require "tycho.dist", require "tycho.serve"

local r = ty.recipe.declare {
  args = {
    { "ranks", 2, "that share the model", quick = 2 }, { "width", 512, "hidden size of the Llama", quick = 64 },
    { "layers", 4, "of it", quick = 2 }, { "requests", 48, "at once", quick = 4 },
    { "prompt", 48, "tokens of the longest prompt", quick = 8 },
    { "count", 10, "tokens that follow, at most", quick = 3 },
    { "batch", 128, "tokens of a step", quick = 16 }, { "rounds", 5, "of which the median counts", quick = 1 },
    { "share", 0.3, "of a whole step's time for sums, on the link that is judged" },
    { "others", { 0.1, 0.5 }, "shares on other links", quick = { 0.5 } }, { "latency", 1e-5, "seconds of a message" },
  },
}
local args = r.args
local trial = serve.nano_trial
local work = trial.open { width = args.width, layers = args.layers, requests = args.requests, prompt = args.prompt,
  count = args.count, batch = args.batch, seed = r.seed }
local n = args.ranks

-- Seconds of a sum by the rules of the clocks: a ring.
local function cost(bandwidth)
  return function(event) return 2 * (n - 1) * (args.latency + event.bytes / n / bandwidth) end
end

-- What whole steps compute and send: the link on which sums take a share of their time.
local free = trial.run(work, n, { latency = 0 }, r.quick and 1 or 2)
local computes, bytes, sums = ty.stats.median(free.seconds.whole), 0, 0
for _, e in ipairs(free.events.whole) do
  if e.name == "all_reduce" then bytes, sums = bytes + e.bytes, sums + 1 end
end
local function link_for(share)
  local left = share / (1 - share) * computes - 2 * (n - 1) * args.latency * sums
  return 2 * (n - 1) * bytes / n / math.max(left, 1e-3 * computes)
end

local alone, differ, factors, at = trial.alone(work), 0, {}, nil
local shares = table.move(args.others, 1, #args.others, 2, { args.share })
for k, share in ipairs(shares) do
  local bandwidth = link_for(share)
  local got = trial.run(work, n, { latency = args.latency, bandwidth = bandwidth }, args.rounds)
  local function times(way)
    return ty.stats.median(ty.stats.ratios(got.seconds.whole, got.seconds[way]))
  end
  for _, tokens in pairs(got.tokens) do differ = math.max(differ, trial.differ(alone, tokens)) end
  factors[k] = { sought = times "sought", halves = times "halves" }
  r:say("%.3g bytes a second, %.0f %% of a whole step's time: whole steps %.3f s, of which they wait %.0f %%; halves "
    .. "%.2f times as fast, %.0f %%; as sought %.2f times, %.0f %%", bandwidth, 100 * share,
    ty.stats.median(got.seconds.whole), 100 * got.waited.whole, factors[k].halves, 100 * got.waited.halves,
    factors[k].sought, 100 * got.waited.sought)
  local sizes = {}
  for size in pairs(got.chosen) do sizes[#sizes + 1] = size end
  table.sort(sizes)
  for _, size in ipairs(sizes) do
    local cut = {}
    for i, s in ipairs(got.chosen[size]) do cut[i] = ("%.2f"):format(s) end
    r:say("    steps of %3d tokens and more: %s", 1 << size, table.concat(cut, " + "))
  end
  r:note(("share %g"):format(share), { sought = factors[k].sought, halves = factors[k].halves,
    bandwidth = bandwidth, waited_whole = got.waited.whole, waited_sought = got.waited.sought })
  if k == 1 then at = { got = got, cost = cost(bandwidth) } end
end

local events = at.got.events
local ends = events.whole[#events.whole].to * 0.08
dist.timeline({ { title = "A rank with whole steps", rows = dist.decoding.rows(events.whole, at.cost, ends) },
  { title = "in nano-batches", rows = dist.decoding.rows(events.sought, at.cost, ends) } },
  { labels = { "rank", "sums" } }):save(r:picture "nanoflow.png")

local least, most = math.huge, 0
for _, f in ipairs(factors) do least, most = math.min(least, f.sought), math.max(most, f.sought) end
os.exit(r:finish({
  { claim = "requests whose tokens are not those of one engine on one rank", measured = differ, bar = 0, below = true },
  { claim = "share of the sums' time in which the rank computed", measured = dist.decoding.unwaited(events.sought,
    at.cost), baseline = dist.decoding.unwaited(events.whole, at.cost), bar = 0.5 },
  { claim = "tokens a second, of whole steps, where sums take 30 % of their time", measured = factors[1].sought,
    bar = 1 },
  { claim = "the same in halves, without seeking", measured = factors[1].halves, judged = false },
  { claim = "the same on the link where it gains least", measured = least, bar = 0.95 },
  { claim = "the same on the link where it gains most", measured = most, judged = false },
  { claim = "share of the time in which batches are formed and tokens chosen, which nothing hides here",
    measured = at.got.host.sought, judged = false },
}, true))
