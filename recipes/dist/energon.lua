-- Inference by several ranks, written as if it were one model
-- claim: a script calls an engine as a model; four stages give more than three times the batches, none of it padding
-- system: dist.inference: futures, stages that do not wait, tensor parallel ranks, packed sequences, layers at peers
-- paper: Du et al. 2022, "EnergonAI: An Inference System for 10-100 Billion Parameter Transformer Models"
-- time: 2 minutes on one CPU core
--
-- Sequences are passages of the book that ships, so many verses as chance has it; the model is a Llama that has not
-- been trained. What is wanted is the next token after each sequence. Times are those of the ranks' clocks, as if each
-- had a core of its own, over links of 20 microseconds and 10 GB/s; of several rounds the least disturbed counts. One
-- at a time is the same engine, whose program waits for each batch before it gives the next. With padding the same
-- engine gets sequences filled up to the longest of the batch. The link to a peer's memory is slower, so that a layer
-- is on its way for about as long as it computes; without prefetching it is asked for when it is needed.
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare {
  args = {
    { "width", 160, "hidden size of the Llama", quick = 32 }, { "layers", 12, "layers of it", quick = 4 },
    { "longest", 128, "tokens of the longest sequence", quick = 64 },
    { "batches", 24, "batches", quick = 3 }, { "batch", 4, "sequences of a batch", quick = 2 },
    { "stages", { 1, 2, 4 }, "numbers of stages, the last of which is judged", quick = { 1, 4 } },
    { "rounds", 4, "of which the least disturbed counts", quick = 1 },
    { "latency", 2e-5, "seconds of a message" }, { "bandwidth", 1e10, "bytes a second between ranks" },
    { "peer_bandwidth", 5e8, "bytes a second from a peer's memory" },
    { "home", 0.45, "share of the weights for which a rank has room", quick = 0.8 },
  },
}
local args = r.args
local passages = dist.unpadded_trial.passages { longest = args.longest, books = 1, vocabulary = r.quick and 300 or 1000,
  seed = r.seed }
local work = dist.workload.open { length = args.longest, width = args.width, heads = 4, layers = args.layers, rows = 1,
  chapters = 12, vocabulary = 257, config = { vocab_size = passages.vocabulary } }
local function make() return require("tycho.dist").workload.model(work, r.seed) end

local batches, tokens, filled = {}, 0, 0
for b = 1, args.batches do
  local most = 0
  batches[b] = {}
  for i = 1, args.batch do
    local x = passages.items[((b - 1) * args.batch + i) * 7 % #passages.items + 1]:select(0, 0):contiguous()
    batches[b][i], tokens, most = x, tokens + x.shape[1], math.max(most, x.shape[1])
  end
  filled = filled + most * args.batch
end
local want, weights = {}, 0
local model = make():eval()
for _, p in ipairs(model:parameters()) do weights = weights + p:nbytes() end
local costs = dist.pipeline.costs(dist.pipeline.layers(model), batches[1][1]:unsqueeze(0))
ty.no_grad(function()
  for b, batch in ipairs(batches) do
    want[b] = {}
    for i, x in ipairs(batch) do want[b][i] = ty.scope(function() return model(x:unsqueeze(0)):select(0, 0)[-1] end) end
  end
end)
model = nil

-- Furthest that logits are from those of one rank and one sequence at a time, of the largest.
local worst = 0
local function compare(b, got)
  for i, logits in ipairs(want[b]) do
    worst = math.max(worst, (got[i - 1] - logits):abs():max():item() / logits:abs():max():item())
  end
end

-- All batches by an engine: seconds, what its ranks did, and what its first stages did when. alone: one at a time.
local function run(options, alone)
  local o = { costs = costs, latency = args.latency, bandwidth = args.bandwidth, record = true }
  for key, value in pairs(options) do o[key] = value end
  local engine <close> = dist.inference(make, o)
  local best, events, stats = math.huge, nil, nil
  for round = 0, args.rounds do
    engine:restart()
    -- This is what a program does: it calls the engine, and later asks for what came.
    local coming = {}
    for b, batch in ipairs(batches) do
      coming[b] = engine(batch)
      if alone then coming[b]:wait() end
    end
    for b, future in ipairs(coming) do compare(b, future:wait()) end
    if (round > 0 or r.quick) and engine.clock < best then
      best, events, stats = engine.clock, engine:events(), engine:stats()
    end
  end
  return best, stats, events
end

r:say("%d batches of %d sequences, %d tokens, with padding %d", args.batches, args.batch, tokens, filled)
r:say("\nstages  batches a second  of one stage  one at a time")
local base, last, alone, panels, without = nil, nil, nil, nil, nil
for i, stages in ipairs(args.stages) do
  local flowing, stats, events = run { pipeline = stages }
  base, without, last = base or flowing, without or stats, (base or flowing) / flowing
  local note = ""
  if i == #args.stages then
    local single, _, waiting = run({ pipeline = stages }, true)
    alone, note = single / flowing, (" %14.2f"):format(base / single)
    panels = { { title = "Batches follow each other", rows = events },
      { title = "One batch at a time", rows = waiting } }
  end
  r:say("%6d %17.1f %13.2f%s", stages, args.batches / flowing, last, note)
  r:note(("%d stages"):format(stages), { seconds = flowing })
end
dist.timeline(panels, { width = 1200 }):save(r:picture "energon.png")

local tensor = {}
for i, size in ipairs { 1, 2 } do
  tensor[i] = run({ tensor = size }, true)
  r:say("%d tensor parallel ranks: %.2f ms a batch", size, 1e3 * tensor[i] / args.batches)
end
local both = run { tensor = 2, pipeline = 2 }
r:say("2 x 2 ranks: %.1f batches a second", args.batches / both)

local padded, with = run { packed = false }
local function computed(stats) return stats[1].rows / args.layers / tokens end
r:say("\ntokens that layers compute, of those there are: %.4f, with padding %.4f; %.2f times as fast",
  computed(without), computed(with), padded / base)

local slow = { bandwidth = args.peer_bandwidth, pipeline = 1 }
local at_home, home_stats = run(slow)
local function away(prefetch)
  return run { bandwidth = args.peer_bandwidth, peers = 1, room = math.floor(args.home * weights), prefetch = prefetch }
end
local ahead, peer_stats = away(true)
local behind = away(false)
local live, peak = peer_stats[1].live / home_stats[1].live, peer_stats[1].peak / home_stats[1].peak
r:say("\n%d of %d layers are at a peer: a rank has %.2f of the bytes, %.2f at most", peer_stats[1].away, args.layers,
  live, peak)

os.exit(r:finish {
  { claim = "logits, furthest from those of one rank and one sequence at a time, of the largest", measured = worst,
    bar = 1e-5, below = true },
  { claim = "batches a second by 4 stages, of those by one", measured = last, bar = 3.2 },
  { claim = "of those when the program waits for each batch", measured = alone, bar = 3.2 },
  { claim = "batches a second by 2 tensor parallel ranks, one at a time, of those by one",
    measured = tensor[1] / tensor[2], bar = 1.5 },
  { claim = "by 2 x 2 ranks, of those by one", measured = base / both, bar = 2.5 },
  { claim = "tokens that each layer computes, of those there are", measured = computed(without), bar = 1,
    below = true },
  { claim = "with padding", measured = computed(with), judged = false },
  { claim = "times as fast as with padding", measured = padded / base, judged = false },
  { claim = "the same, of what padding adds", measured = padded / base * tokens / filled, bar = 0.9 },
  { claim = "bytes of a rank whose layers are at a peer, of those with all at home", measured = live, bar = 0.5,
    below = true },
  { claim = "the most at once", measured = peak, judged = false },
  { claim = "batches a second then, of those with all at home", measured = at_home / ahead, bar = 0.9 },
  { claim = "without prefetching", measured = at_home / behind, judged = false },
}, true)
