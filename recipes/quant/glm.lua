-- GLM: blanks filled in by a deep network that does not break down, then in four bits
-- claim: trains with every seed at a rate where Post-LN breaks down with every seed; INT4 keeps the score
-- system: a GLM on a book: blank infilling, DeepNorm, gradients of embeddings shrunk to a tenth, INT4 weights by rows
-- paper: Zeng et al. 2023, "GLM-130B: An Open Bilingual Pre-trained Model"
-- time: 4 minutes on one CPU core
--
-- All networks have the same size, see the same samples in the same order, seed by seed, are clipped alike, and get the
-- same rates, raised one after another. Post-LN, Pre-LN and Sandwich begin with Glorot's weights; the DeepNorm that
-- stands beside GLM has whole gradients at the embeddings. A run has broken down when its loss, a mean over some steps,
-- is far above the least such mean before it, is no number, or when it ends no better than the frequencies of tokens:
-- networks as small as these rather fall back to frequencies early than spike late, and never leave them again. At
-- twice the highest rate GLM breaks down as well. Other networks are compared at the rate that is best for each on
-- verses kept apart for it. Held-out samples have marks of both kinds and are the same for all.
local ty = require "tycho"
local llm, models, quant = require "tycho.llm", require "tycho.models", require "tycho.quant"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 120, "training steps of every run", quick = 3 },
    { "width", 64, "hidden size", quick = 32 },
    { "layers", 8, "of the networks", quick = 2 },
    { "batch", 8, "samples in a step", quick = 2 },
    { "rates", { 1e-3, 2e-3, 4e-3 }, "learning rates, from low to high", quick = { 4e-3 } },
    { "window", 8, "steps that the loss is averaged over to find spikes" },
    { "spike", 0.3, "nats above the least loss so far that are one" },
    { "learnt", 0.1, "nats below the frequencies of tokens that a run has to end with" },
  },
}
local args = r.args
local kinds = { "glm", "deepnorm", "post", "pre", "sandwich" }
local titles = { glm = "GLM", deepnorm = "DeepNorm alone", post = "Post-LN", pre = "Pre-LN", sandwich = "Sandwich" }

local corpus = llm.corpus.open { folder = r:path "corpus", length = 64, validation = true,
  vocabulary = r.quick and 300 or 512, text = r.quick and ty.data.kjv():sub(1, 40000) or nil }
local marks = llm.infill.marks(corpus.tokenizer.size)
local rows = llm.infill.Rows(corpus.ids.training, { length = 56, marks = marks })

local function samples(part)
  ty.manual_seed(1)
  local drawn = llm.infill.Rows(corpus.ids[part], { length = 56, marks = marks })
  return r:tries(ty.data.batches(drawn, { batch_size = 32 }))
end
local parts = { validation = samples "validation", held_out = samples "held_out" }
local function score(model, part) return llm.infill.evaluate(model, parts[part]) end

-- What tokens cost that are guessed by how frequent they are among those to be written in training.
local counted = {}
for k = 1, r.quick and 1 or 20 do counted[k] = rows:batch(ty.randperm(#rows):narrow(0, 0, math.min(64, #rows))) end
local frequencies = llm.infill.frequencies(counted, parts.held_out, corpus.tokenizer.size + marks.count)

local function trained(kind, seed, rate)
  ty.manual_seed(seed)
  local model = models.GLM { vocab_size = corpus.tokenizer.size + marks.count, hidden_size = args.width,
    inner_hidden_size = args.width * 8 // 3 // 16 * 16, num_layers = args.layers,
    num_attention_heads = args.width // 32, max_sequence_length = 128, norm = kind == "glm" and "deepnorm" or kind }
  if kind == "glm" then llm.shrink.attach(model, 0.1) end
  local loader = ty.data.DataLoader(rows, { batch_size = args.batch, shuffle = true, seed = seed })
  local opt = ty.optim.AdamW(model:parameters(), { lr = rate, beta2 = 0.95, weight_decay = 0.1, clip_norm = 1,
    schedule = ty.optim.cosine { steps = args.steps, warmup = args.steps // 12, final = 0.1 } })
  local losses, norms = {}, {}
  for step in ty.train.steps(nil, args.steps, { quiet = true }) do
    local loss = llm.infill.loss(model, loader:next())
    losses[step] = loss:item()
    norms[step] = opt:step(loss)
  end
  return model:eval(), losses, norms
end

-- ---- all networks at all rates ----

r:say("held-out loss by the frequencies of tokens: %.4f", frequencies)
local results, curves, norms_of, highest, packed = {}, {}, {}, nil, { loss = {}, right = {}, before = {} }
for _, rate in ipairs(args.rates) do
  highest = rate
  for _, kind in ipairs(kinds) do
    local found = { rate = rate, loss = {}, validation = {}, broken = 0 }
    results[kind] = results[kind] or {}
    results[kind][rate] = found
    for i, seed in ipairs(r.seeds) do
      local model, losses, norms = trained(kind, seed, rate)
      local before = score(model, "held_out")
      found.loss[i], found.validation[i] = before.loss, score(model, "validation").loss
      if ty.stats.rises(losses, args.window, args.spike) or before.loss ~= before.loss
        or before.loss > frequencies - args.learnt then
        found.broken = found.broken + 1
      end
      if i == 1 then curves[kind], norms_of[kind] = losses, norms end
      if kind == "glm" then
        quant.absmax.quantize(model, { bits = 4 })
        local after = score(model, "held_out")
        packed.loss[i], packed.right[i] = after.loss / before.loss, after.right / before.right
        packed.before[i], packed.model = before.loss, i == 1 and model or packed.model
      end
    end
    local mean = ty.stats.mean(found.loss)
    r.metrics[("%s/%s"):format(kind, rate)] = mean
    r.metrics[("broken/%s/%s"):format(kind, rate)] = found.broken
    r:say("%-15s rate %-5s held-out loss %.4f ± %.4f, broken down with %d of %d seeds", titles[kind], rate, mean,
      ty.stats.spread(found.loss), found.broken, #r.seeds)
  end
end

-- By the seeds: the loss at the rate that validation finds best.
local function best(kind)
  local least, found = math.huge, nil
  for _, each in pairs(results[kind]) do
    local mean = ty.stats.mean(each.validation)
    if mean < least then least, found = mean, each end
  end
  return found or results[kind][highest]
end

-- ---- what it fills in, in four bits ----

local text = "And the LORD said unto Moses, Speak unto the children of Israel"
local ids = corpus.tokenizer:encode(text):tolist()
local cut = { table.unpack(ids, 1, #ids // 2) }
cut[#cut + 1] = marks.mask
table.move(ids, #ids // 2 + 4, #ids, #cut + 1, cut)
local filled, pieces = llm.infill.fill(packed.model, cut, marks, { most = 6 })
r:say("in place of [%s]: [%s]\n  %s", corpus.tokenizer:decode { table.unpack(ids, #ids // 2 + 1, #ids // 2 + 3) },
  corpus.tokenizer:decode(pieces[1]), corpus.tokenizer:decode(filled))

local series = {}
for i, kind in ipairs(kinds) do series[i] = { label = titles[kind], y = curves[kind] } end
ty.plot.line { title = ("training loss of the first seed at rate %s"):format(highest), series = series,
  x_label = "step", y_label = "loss", smooth = 9 }:save(r:picture "glm.png")
for _, kind in ipairs(kinds) do
  r.metrics["largest gradient norm/" .. kind] = math.max(table.unpack(norms_of[kind], math.min(11, args.steps)))
end

local glm, post = results.glm[highest], results.post[highest]
local rows_of = {
  { claim = "share of seeds that Post-LN breaks down with at the highest rate", measured = post.broken / #r.seeds,
    bar = 1 },
  { claim = "share of seeds that GLM breaks down with there", measured = glm.broken / #r.seeds, bar = 0, below = true },
}
for _, kind in ipairs { "post", "pre", "sandwich" } do
  local other, ratios = best(kind), {}
  for i, loss in ipairs(glm.loss) do ratios[i] = loss / other.loss[i] end
  rows_of[#rows_of + 1] = { claim = ("held-out loss of GLM there, of that of %s at its best rate"):format(
    titles[kind]), values = ratios, baseline = other.loss, bar = 1, below = true }
end
local alone = {}
for i, loss in ipairs(glm.loss) do alone[i] = loss / results.deepnorm[highest].loss[i] end
table.move({
  { claim = "the same, of that of DeepNorm without shrunk gradients at the highest rate", values = alone,
    judged = false },
  { claim = "held-out loss of GLM in INT4, of that before", values = packed.loss, baseline = packed.before, bar = 1.01,
    below = true },
  { claim = "tokens that it has right in INT4, of those before", values = packed.right, bar = 0.99 },
}, 1, 3, #rows_of + 1, rows_of)
os.exit(r:finish(rows_of), true)
