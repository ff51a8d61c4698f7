-- A language model trained from scratch with every product of its linear layers in four bits
-- claim: Quartet trains within 5 % of the loss in bf16, and loses less than rounding to nearest, LUQ or SR do
-- system: a small Llama on a book; MXFP4 in all three products, Hadamard, QuEST forward, stochastic rounding backward
-- paper: Castro et al. 2025, "Quartet: Native FP4 Training Can Be Optimal for Large Language Models"
-- time: 6 minutes on one CPU core
--
-- All variants see the same batches from the same initial weights, seed by seed, and each has its rate from the same
-- list by the validation part. The values are those of the formats, computed in f32; so nothing here is about speed.
-- Embeddings, head, norms and attention scores are not quantized, as in the paper. The variants: quant.quartet.policy.
-- Held-out loss is measured as the model was trained, with the forward product in four bits.
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 120, "training steps of every run", quick = 2 },
    { "width", 96, "hidden size", quick = 32 },
    { "layers", 2, "of the model", quick = 1 },
    { "batch", 16, "rows of 64 tokens in a step", quick = 2 },
    { "rates", { 4e-3, 8e-3 }, "learning rates, for each variant the better one", quick = { 4e-3 } },
  },
}
local args = r.args

local corpus = llm.corpus.open { folder = r:path "corpus", validation = true, length = 64,
  vocabulary = r.quick and 300 or 512, text = r.quick and ty.data.kjv():sub(1, 60000) or nil }
local names = { "bf16", "fp8", "quartet", "luq", "stochastic", "nearest" }

local function validation_loss(model)
  model:eval()
  return ty.train.evaluate(corpus:batches "validation", function(batch)
    return llm.train.loss(model, batch):item() * batch.count, batch.count
  end)
end

local share = 1
local function trained(name, seed, rate)
  ty.manual_seed(seed)
  local model = corpus:model { width = args.width, layers = args.layers, heads = args.width // 32,
    hidden = args.width * 8 // 3 // 32 * 32 }
  share = math.min(share, quant.linear.attach(model, quant.quartet.policy(name)).share)
  local losses = llm.train.fit(model, corpus.training, { steps = args.steps, batch = args.batch, seed = seed, lr = rate,
    warmup = args.steps // 10, quiet = true })
  return model, losses
end

local results, curves = {}, {}
for _, name in ipairs(names) do
  local best, rate, kept = math.huge, nil, nil
  for _, tried in ipairs(args.rates) do
    local model, losses = trained(name, r.seed, tried)
    local loss = validation_loss(model)
    if loss < best then best, rate, kept, curves[name] = loss, tried, model, losses end
    r:say("%-10s rate %g: validation loss %.4f", name, tried, loss)
  end
  results[name] = {}
  for i, seed in ipairs(r.seeds) do
    local model = seed == r.seed and kept or trained(name, seed, rate)
    results[name][i] = corpus:evaluate(model).loss
    r.metrics[("%s/%d"):format(name, seed)] = results[name][i]
  end
  r:say("%-10s rate %g: held-out loss %.4f", name, rate, ty.stats.mean(results[name]))
end

-- ---- the table ----

local function over(name, other)
  local list = {}
  for i, loss in ipairs(results[name]) do list[i] = loss / results[other][i] end
  return list
end
-- The gap to bf16 as a share of another's gap, by the means over seeds; the spread is that of the seeds.
local function gap(name)
  local list = {}
  for i, loss in ipairs(results[name]) do list[i] = loss - results.bf16[i] end
  return list
end
local series = {}
for i, name in ipairs(names) do
  local gaps = gap(name)
  r:say("%-10s loss over bf16's: %.4f ± %.4f", name, ty.stats.mean(gaps), ty.stats.spread(gaps))
  series[i] = { label = name, y = curves[name] }
end
local low = ty.stats.mean(results.bf16)
ty.plot.line { title = "training loss of the first seed", series = series, x_label = "step", y_label = "loss",
  smooth = 9, y_range = not r.quick and { low - 0.2, low + 1.3 } or nil }:save(r:picture "quartet.png")

local quartet, nearest = gap "quartet", gap "nearest"
local rows = {
  { claim = "share of the linear layers' multiplications in MXFP4, in all three products", measured = share, bar = 1 },
  { claim = "held-out loss of Quartet, of bf16's", values = over("quartet", "bf16"), baseline = results.bf16,
    bar = 1.05, below = true },
}
for _, other in ipairs { "luq", "stochastic", "nearest" } do
  rows[#rows + 1] = { claim = ("held-out loss of Quartet, of that of %s"):format(({ luq = "LUQ on MXFP4",
    stochastic = "stochastic rounding everywhere", nearest = "rounding to nearest" })[other]),
    values = over("quartet", other), baseline = results[other], bar = 1, below = true }
end
rows[#rows + 1] = { claim = "held-out loss of MXFP8, of Quartet's", values = over("fp8", "quartet"),
  baseline = results.quartet, bar = 1, below = true }
r:say("of what rounding to nearest loses, Quartet loses %.2f", ty.stats.mean(quartet) / ty.stats.mean(nearest))
os.exit(r:finish(rows), true)
