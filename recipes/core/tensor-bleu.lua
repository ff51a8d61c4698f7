-- BLEU of token ids for each sentence of a batch, as one op
-- claim: equals NLTK's sentence BLEU to 1e-6 and takes less than a 13th of the time of a loop over the sentences
-- system: ty.bleu, exact n-gram counts of a whole batch of padded ids
-- paper: Filatov 2025, "TensorBLEU: Vectorized GPU-based BLEU Score Implementation"
-- time: 6 seconds
--
-- NLTK's scores of 1,000 pairs are a fixture, which tests/fixtures/make_bleu.py recorded. The loop that is timed is our
-- own, over Lua lists that it has already; NLTK itself took about four times as long as that.
local ty = require "tycho"
local bleu = require("tycho.llm").bleu

local r = ty.recipe.declare {
  args = {
    { "pairs", 1000, "random pairs of the comparison with the loop", quick = 100 },
    { "rounds", 7, "timings of each size, of which the median counts", quick = 1 },
    { "vocabulary", 8000, "ids" },
    { "kept", 0.7, "share of a reference's ids that are those of its candidate" },
  },
}
local args = r.args
local smoothings = { "none", "epsilon", "add_one", "geometric", "length" }
math.randomseed(r.seed)

-- ---- the same numbers ----

local function difference(scores, wanted)
  return (scores:to("cpu"):to("f64") - wanted):abs():max():item()
end

-- NLTK's scores of 1,000 pairs, where the source tree is at hand: tests/fixtures/make_bleu.py recorded them.
local function against_nltk()
  local path = (arg[0]:match "^(.*)/recipes/" or ".") .. "/tests/fixtures/bleu.npz"
  if not ty.io.exists(path) then return nil end
  local f = ty.io.load_npz(path)
  local lengths, others = f.candidate_lengths:to(r.device), f.reference_lengths:to(r.device)
  local candidates, references = f.candidates:to(r.device), f.references:to(r.device)
  local worst = 0
  for m, smoothing in ipairs(smoothings) do
    local scores = ty.bleu(candidates, references, lengths, others, { smoothing = smoothing })
    worst = math.max(worst, difference(scores, f.scores:select(0, m - 1)))
  end
  return worst
end

-- Ids as frequent as words are (the fewer, the more so); references that keep most of the candidate.
local function id() return math.floor(args.vocabulary * math.random() ^ 3) end
local function pairs_of(count, length, most_references, vary)
  local candidates, references = {}, {}
  for i = 1, count do
    local candidate, n = {}, vary and math.random(0, length) or length
    for k = 1, n do candidate[k] = id() end
    candidates[i], references[i] = candidate, {}
    for j = 1, vary and math.random(most_references) or most_references do
      local reference = {}
      for k = 1, vary and math.random(0, length) or length do
        reference[k] = math.random() < args.kept and candidate[k] or id()
      end
      references[i][j] = reference
    end
  end
  return candidates, references
end

local function loop(candidates, references, options)
  local scores = {}
  for i, candidate in ipairs(candidates) do scores[i] = bleu.sentence(candidate, references[i], options) end
  return scores
end

local function against_loop()
  local candidates, references = pairs_of(args.pairs, 40, 4, true)
  local worst = 0
  for _, smoothing in ipairs(smoothings) do
    local scores = bleu.batch(candidates, references, { smoothing = smoothing, device = r.device })
    local wanted = ty.tensor(loop(candidates, references, { smoothing = smoothing }), { dtype = "f64" })
    worst = math.max(worst, difference(scores, wanted))
  end
  return worst
end

local nltk, plain = against_nltk(), against_loop()
if nltk then r:say("largest difference from NLTK on 1,000 recorded pairs, five smoothings: %.2g", nltk) end
r:say("largest difference from the loop on %d random pairs, five smoothings: %.2g", args.pairs, plain)

-- ---- the time ----

-- The loop has the ids as Lua lists already, the op as tensors; both take turns.
local least, measured = math.huge, {}
local function compare(sentences, length, most_references)
  local candidates, references = pairs_of(sentences, length, most_references, false)
  local x, y = ty.tensor(candidates):to(r.device), ty.tensor(references):to(r.device)
  local options = { smoothing = "epsilon" }
  local function op() return ty.bleu(x, y, options):to "cpu" end
  local calls = math.max(1, math.floor(2e-3 / r:time({ op }, { rounds = 1 })[1]))
  local times = r:time({ op, function() loop(candidates, references, options) end },
    { rounds = args.rounds, warmup = 0, calls = { calls } })
  local a, b = times[1], times[2]
  least = math.min(least, b / a)
  measured[#measured + 1] = { sentences = sentences, length = length, references = most_references, op = a, loop = b }
  r:say("%6d %8d %12d %12.1f %12.1f %9.1f", sentences, length, most_references, a * 1e6, b * 1e6, b / a)
end

r:say("\n%6s %8s %12s %12s %12s %9s", "batch", "length", "references", "op, us", "loop, us", "ratio")
for _, sentences in ipairs(r.quick and { 16 } or { 16, 64, 256, 1024 }) do
  for _, length in ipairs(r.quick and { 16 } or { 16, 64, 256 }) do
    compare(sentences, length, 1)
    if length == 64 then compare(sentences, length, 4) end
  end
end
r.metrics.timings = measured

local claims = {}
if nltk then
  claims[1] = { claim = "difference from NLTK's recorded scores, at most", measured = nltk, bar = 1e-6, below = true }
end
table.insert(claims, { claim = "difference from the loop, at most", measured = plain, bar = 1e-6, below = true })
table.insert(claims, { claim = "times as fast as the loop, at least", measured = least, bar = 13 })
os.exit(r:finish(claims))
