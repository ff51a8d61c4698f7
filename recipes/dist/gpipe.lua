-- Layers on several ranks that work at once, because a batch goes through in pieces
-- claim: gradients of one rank, idle for (p - 1) / (m + p - 1) of the time, a tenth of the activations kept
-- system: a Llama of 32 layers over 1 to 8 ranks, fill and drain, stages that run forwards again before they go back
-- paper: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism"
-- time: 10 minutes on one CPU core
--
-- Times are those of the ranks' clocks: the processor time of each, and what it waits for others over links of 20
-- microseconds and 10 GB/s. The formula is for stages that all take the same time, so it is held against layers that
-- keep their ranks busy for 10 and 20 ms; the Llama's stages differ by the head (an eightieth of the last of four) and
-- by what disturbs a processor: of several steps the one that was over first counts. What is sped up is one rank that
-- computes again, too; without that it would take three quarters of the time, and the memory that is shown.
local ty = require "tycho"
local dist = require "tycho.dist"
local trial = dist.pipeline_trial

local r = ty.recipe.declare {
  args = {
    { "layers", 32, "layers of the Llama", quick = 4 }, { "width", 96, "hidden size of it", quick = 32 },
    { "inner", 640, "width of its feed-forward networks", quick = 64 },
    { "length", 64, "tokens of a row", quick = 16 }, { "rows", 2, "rows of a micro-batch", quick = 1 },
    { "steps", 5, "of which the least disturbed counts", quick = 1 },
    { "most", 32, "micro-batches where throughput is measured", quick = 4 },
  },
}
local args = r.args
local work = dist.workload.open { length = args.length, width = args.width, layers = args.layers, rows = 4,
  config = { intermediate_size = args.inner }, vocabulary = 257, chapters = r.quick and 12 or nil }
local costs = dist.pipeline.costs(dist.pipeline.layers(dist.workload.model(work, 0)),
  work.held_out:narrow(0, 0, 1):narrow(1, 0, args.length):contiguous())

local function run(ranks, micro_batches, options)
  local o = { micro_batches = micro_batches, rows = args.rows, costs = costs, steps = args.steps, seed = r.seed }
  for key, value in pairs(options or {}) do o[key] = value end
  return trial.run(work, ranks, o)
end

local p, m = r.quick and 2 or 4, r.quick and 2 or 8
local many = run(p, m, { rows = 1, gradients = true, steps = 1 })
local one = run(1, 1, { rows = m, gradients = true, steps = 1 })
local apart = trial.apart(many.gradients, one.gradients[1])
r:say("%d ranks with %d micro-batches: loss %.6f; one rank with one: %.6f; gradients %.1e apart", p, m, many.loss,
  one.loss, apart)

r:say("\nidle, of the time\nranks  micro-batches  formula  busy alike   Llama  MB a rank  kept all")
local worst, worst_alike, kept, again = 0, 0, nil, nil
for _, ranks in ipairs(r.quick and { 2 } or { 2, 4 }) do
  for _, count in ipairs(r.quick and { 1, 2 } or { 1, 4, 8, 16 }) do
    local formula = (ranks - 1) / (count + ranks - 1)
    local alike = trial.run(nil, ranks, { busy = 0.01, micro_batches = count, steps = args.steps })
    local llama = run(ranks, count)
    local all = run(ranks, count, { recompute = false, steps = 1 })
    r:say("%5d %14d %8.3f %11.3f %7.3f %10.2f %9.2f", ranks, count, formula, alike.share, llama.share, llama.most / 1e6,
      all.most / 1e6)
    worst_alike = math.max(worst_alike, math.abs(alike.share / formula - 1))
    worst = math.max(worst, math.abs(llama.share / formula - 1))
    kept, again = all.most, llama.most
    r:note(("ranks %d, micro-batches %d"):format(ranks, count), { formula = formula, alike = alike.share,
      llama = llama.share, seconds = llama.seconds, bytes = llama.most, bytes_kept = all.most })
  end
end

r:say("\n%d micro-batches\nranks  rows/s  times one rank  formula  parameters a rank, MB", args.most)
local first, speed
for _, ranks in ipairs(r.quick and { 1, 2 } or { 1, 2, 4, 8 }) do
  local got = run(ranks, args.most)
  first = first or got.seconds
  speed = first / got.seconds
  r:say("%5d %7.1f %15.2f %8.2f %23.2f", ranks, args.most * args.rows / got.seconds, speed,
    ranks * args.most / (args.most + ranks - 1), math.max(table.unpack(got.parameters)) / 1e6)
  r:note(("throughput, ranks %d"):format(ranks), { seconds = got.seconds, times = speed })
end

-- One batch in 1, 4 and 16 pieces.
local panels, batch = {}, r.quick and 4 or 16
for _, count in ipairs(r.quick and { 1, 4 } or { 1, 4, 16 }) do
  local got = run(p, count, { rows = batch // count, costs = costs })
  panels[#panels + 1] = { rows = got.rows, title = ("%d rows, %d micro-batch%s: idle %.0f %% of %.0f ms"):format(batch,
    count, count > 1 and "es" or "", 100 * got.share, 1e3 * got.seconds) }
end
dist.timeline(panels):save(r:picture "gpipe.png")

os.exit(r:finish {
  { claim = "gradients: furthest from one rank's, of the largest number", measured = apart, bar = 1e-5, below = true },
  { claim = "idle time of ranks that are busy alike: furthest from (p - 1) / (m + p - 1), of it",
    measured = worst_alike, bar = 0.15, below = true },
  { claim = "idle time of the Llama's ranks: furthest from that, of it", measured = worst, bar = 0.15, below = true },
  { claim = ("times as fast as one rank, of 8, with %d micro-batches"):format(args.most), measured = speed / 8,
    bar = 0.7 },
  { claim = "bytes at once of 16 micro-batches' activations, of those without computing again",
    measured = again / kept, bar = 0.25, below = true },
}, true)
