-- Three ways for micro-batches through a pipeline, and tensor, pipeline and data parallelism at once
-- claim: the loss of one rank, a bubble of (p - 1) / m of the ideal time, interleaved 1 / v of that, and less memory
-- system: a Llama on 4 ranks by three schedules, and on grids of up to 8 ranks that share layers, stages and data
-- paper: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
-- time: 10 minutes on one CPU core
--
-- All schedules have the same model, micro-batches and links (20 microseconds, 10 GB/s), and nothing is computed again.
-- Times are those of the ranks' clocks. The formulas are for stages that all take the same time, so they are held
-- against layers that keep their ranks busy for 10 and 20 ms; the Llama's stages differ by the head and by what
-- disturbs a processor: of several steps the one that was over first counts.
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare {
  args = {
    { "layers", 32, "layers of the Llama", quick = 4 }, { "width", 96, "hidden size of it", quick = 32 },
    { "inner", 640, "width of its feed-forward networks", quick = 64 },
    { "length", 64, "tokens of a row", quick = 16 }, { "rows", 2, "rows of a micro-batch", quick = 1 },
    { "repeats", 5, "steps of which the least disturbed counts", quick = 1 },
    { "chunks", 2, "stages of a rank in the interleaved schedule" },
    { "steps", 20, "training steps on grids", quick = 2 },
  },
}
local args = r.args
local ranks, v = r.quick and 2 or 4, args.chunks

local function open(layers)
  return dist.workload.open { length = args.length, width = args.width, layers = layers, heads = 4, rows = 16,
    config = { intermediate_size = args.inner }, vocabulary = 257, chapters = r.quick and 12 or nil }
end
local function costs_of(work)
  return dist.pipeline.costs(dist.pipeline.layers(dist.workload.model(work, 0)),
    work.held_out:narrow(0, 0, 1):narrow(1, 0, args.length):contiguous())
end

-- Grids train what one rank trains.
local small = open(r.quick and 4 or 8)
local layer_costs = costs_of(small)
r:say("%d steps of a Llama of %d layers\ntensor  pipeline  data    last loss  held-out  parameters a rank, MB  "
  .. "MB sent: tensor  pipeline  data", args.steps, small.config.num_hidden_layers)
local one, worst_loss = nil, 0
for _, grid in ipairs(r.quick and { { 1, 1, 1 }, { 2, 2, 1, v } } or { { 1, 1, 1 }, { 2, 1, 1 }, { 1, 4, 1 },
  { 1, 1, 4 }, { 2, 2, 2 }, { 2, 2, 2, v }, { 1, 2, 4, v }, { 4, 2, 1 } }) do
  local got = dist.grid_trial.run(small, { tensor = grid[1], pipeline = grid[2], data = grid[3], chunks = grid[4],
    schedule = grid[4] and "interleaved" or "one_f_one_b", steps = args.steps, costs = layer_costs, seed = r.seed })
  one = one or got
  for step, loss in ipairs(got.losses) do
    worst_loss = math.max(worst_loss, math.abs(loss / one.losses[step] - 1))
  end
  worst_loss = math.max(worst_loss, math.abs(got.held_out / one.held_out - 1))
  r:say("%6d %9d %5d %12.6f %9.6f %22.2f %16.1f %9.1f %5.1f %s", grid[1], grid[2], grid[3], got.losses[args.steps],
    got.held_out, got.parameters / 1e6, got.sent.tensor / 1e6, got.sent.pipeline / 1e6, got.sent.data / 1e6,
    grid[4] and "interleaved" or "")
end

-- Bubbles, memory and messages.
local work = open(args.layers)
local costs = costs_of(work)
local schedules = { { "gpipe", "GPipe", 1 }, { "one_f_one_b", "one forwards, one backwards", 1 },
  { "interleaved", ("interleaved, %d stages a rank"):format(v), v } }
r:say("\nbubble, of the ideal time, on %d ranks\n%-29s micro-batches  formula  busy alike   Llama   ms a step  "
  .. "MB a rank  MB sent", ranks, "schedule")
local worst_alike, worst, panels, last = 0, 0, {}, {}
for _, count in ipairs(r.quick and { 2 } or { 4, 8, 16 }) do
  for _, s in ipairs(schedules) do
    local o = { schedule = s[1], micro_batches = count, chunks = s[3], recompute = false, rows = args.rows,
      steps = args.repeats, seed = r.seed }
    local formula = (ranks - 1) / count / s[3]
    o.busy, o.layers = 0.01, ranks * v
    local alike = dist.pipeline_trial.run(nil, ranks, o)
    o.busy, o.layers, o.costs = nil, nil, costs
    local llama = dist.pipeline_trial.run(work, ranks, o)
    worst_alike = math.max(worst_alike, math.abs(alike.of_ideal / formula - 1))
    worst = math.max(worst, math.abs(llama.of_ideal / formula - 1))
    r:say("%-29s %13d %8.4f %11.4f %7.4f %11.1f %10.2f %8.2f", s[2], count, formula, alike.of_ideal, llama.of_ideal,
      1e3 * llama.seconds, llama.most / 1e6, llama.sent / 1e6)
    r:note(("%s, %d micro-batches"):format(s[1], count), { formula = formula, alike = alike.of_ideal,
      llama = llama.of_ideal, seconds = llama.seconds, bytes = llama.most, sent = llama.sent })
    last[s[1]] = llama
    if count == 8 or r.quick then
      panels[#panels + 1] = { rows = llama.rows, title = ("%s: bubble %.0f %% of the ideal time"):format(s[2],
        100 * llama.of_ideal) }
      if count == 8 then last[s[1] .. " 8"] = llama end
    end
  end
end
dist.timeline(panels, { width = 1200 }):save(r:picture "megatron-3d.png")

local faster = (last["one_f_one_b 8"] or last.one_f_one_b).seconds / (last["interleaved 8"] or last.interleaved).seconds
os.exit(r:finish {
  { claim = "losses of training on grids: furthest from one rank's, of it", measured = worst_loss, bar = 1e-4,
    below = true },
  { claim = "bubbles of ranks that are busy alike: furthest from the formulas, of them", measured = worst_alike,
    bar = 0.15, below = true },
  { claim = "bubbles of the Llama's ranks: furthest from the formulas, of them", measured = worst, bar = 0.15,
    below = true },
  { claim = "times as fast, interleaved, as one forwards, one backwards, with 8 micro-batches", measured = faster,
    bar = 1.1 },
  { claim = "bytes of activations at once, one forwards, one backwards, of GPipe's, with 16 micro-batches",
    measured = last.one_f_one_b.most / last.gpipe.most, bar = 0.35, below = true },
  { claim = "the same, interleaved", measured = last.interleaved.most / last.gpipe.most, judged = false },
  { claim = "bytes sent, interleaved, of those of one forwards, one backwards",
    measured = last.interleaved.sent / last.one_f_one_b.sent, bar = v },
}, true)
