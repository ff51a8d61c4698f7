-- BERT on passages of all lengths, without padding, and with as much work for every rank
-- claim: no token of padding is computed, and steps are half as long again as fast and more than with padding
-- system: a BERT whose passages are packed one behind the other, and an exchange of passages beside the step before
-- paper: Zeng et al. 2022, "Boosting Distributed Training Performance of the Unpadded BERT Model"
-- time: 3 minutes on one CPU core
--
-- Passages are so many verses of a book as chance has it, few often and many seldom, with 15 % of the tokens hidden.
-- All ways see the same passages in the same steps and have the same losses. The baseline pads the rows of a rank to
-- the longest that it has in the step; padding to the longest that there can be, as BERT was trained at first, stands
-- beside it. Seconds are by the ranks' clocks, until all ranks are through, exchanges included.
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare {
  args = {
    { "ranks", 4, "of the comparison", quick = 2 }, { "items", 16, "passages of a rank and step", quick = 2 },
    { "longest", 256, "tokens of a passage, at most", quick = 64 },
    { "verses", 3, "of a passage, on average" }, { "width", 128, "hidden size", quick = 32 },
    { "layers", 4, "layers", quick = 1 }, { "steps", 8, "that are timed", quick = 1 },
    { "latency", 1e-4, "seconds of a message" }, { "bandwidth", 1e9, "bytes a second between ranks" },
  },
}
local args = r.args
local passages = dist.unpadded_trial.passages { longest = args.longest, verses = args.verses,
  vocabulary = r.quick and 300 or 1000 }
local config = { vocab_size = passages.vocabulary, hidden_size = args.width, num_hidden_layers = args.layers,
  num_attention_heads = math.max(1, args.width // 32), intermediate_size = 4 * args.width,
  max_position_embeddings = args.longest, hidden_dropout_prob = 0, attention_probs_dropout_prob = 0 }

local function train(way, balanced, more)
  local o = { config = config, passages = passages, way = way, balanced = balanced, items = args.items,
    steps = args.steps, seed = r.seed }
  for key, value in pairs(more or {}) do o[key] = value end
  local ranks = o.ranks or args.ranks
  o.ranks = nil
  return dist.run(ranks, function(group, settings)
    return require("tycho.dist").unpadded_trial.train(group, settings)
  end, { latency = args.latency, bandwidth = args.bandwidth }, o)
end

-- The same numbers: gradients of the first step and losses, of few steps in f64.
local exact = { steps = 2, dtype = "f64", gradients = true }
local many = train("unpadded", true, exact)
exact.ranks, exact.items = 1, args.items * args.ranks
local one = train("longest", false, exact)[1]
local apart, largest = 0, 0
for i, g in ipairs(one.gradients) do
  apart = math.max(apart, (many[1].gradients[i] - g):abs():max():item())
  largest = math.max(largest, g:abs():max():item())
end
apart = apart / largest
for i, loss in ipairs(one.losses) do apart = math.max(apart, math.abs(many[1].losses[i] / loss - 1)) end

local ways = { { "all", false, "rows as long as can be" }, { "longest", false, "rows as long as the longest" },
  { "unpadded", false, "unpadded" }, { "unpadded", true, "unpadded, as much for all" } }
local results = {}
r:say("%-27s ms a step  slowest rank, of the mean  tokens computed, of those there are  ms waited for passages", "")
for i, way in ipairs(ways) do
  local all = train(way[1], way[2])
  local work, slowest, tokens, real, waited = 0, 0, 0, 0, 0
  for _, of in ipairs(all) do
    work, slowest = work + of.work / args.ranks, math.max(slowest, of.work)
    tokens, real, waited = tokens + of.tokens, real + of.real, math.max(waited, of.waited)
  end
  results[i] = { seconds = all[1].seconds, uneven = slowest / work, padding = tokens / real - 1, waited = waited,
    share = waited / all[1].seconds }
  r:say("%-27s %9.1f %26.2f %36.2f %24.2f", way[3], 1e3 * all[1].seconds, slowest / work, tokens / real, 1e3 * waited)
  r:note(way[3], results[i])
end

-- How long passages are.
local counts, edges = {}, 16
for _, x in ipairs(passages.items) do
  local k = math.min(edges, (x.shape[2] - 1) * edges // args.longest + 1)
  counts[k] = (counts[k] or 0) + 1
end
local x, y = {}, {}
for k = 1, edges do x[k], y[k] = (k - 0.5) * args.longest / edges, counts[k] or 0 end
ty.plot.line { series = { { x = x, y = y } }, title = "Passages by their length", x_label = "tokens",
  y_label = "passages", width = 700 }:save(r:picture "unpadded-bert.png")

os.exit(r:finish {
  { claim = "losses and gradients of the ranks without padding, from one rank's with it, in f64", measured = apart,
    bar = 1e-9, below = true },
  { claim = "tokens of padding that are computed, of those there are", measured = results[4].padding, bar = 0,
    below = true },
  { claim = "times as fast as rows as long as the longest of a rank's", measured =
    results[2].seconds / results[4].seconds, bar = 1.5 },
  { claim = "times as fast as rows as long as can be", measured = results[1].seconds / results[4].seconds, bar = 1.5 },
  { claim = "work of the rank that has the most, of the mean, once passages have changed ranks",
    measured = results[4].uneven, baseline = results[3].uneven, bar = 1.03, below = true },
  { claim = "times as fast as unpadded ranks that keep the passages they draw", measured =
    results[3].seconds / results[4].seconds, judged = false },
  { claim = "share of a step in which a rank waits for passages, at most", measured = results[4].share, bar = 0.05,
    below = true },
}, true)
