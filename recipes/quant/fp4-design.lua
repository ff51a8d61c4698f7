-- What makes training in four bits work: 32 designs of a quantized linear layer in one table
-- claim: the best of them combines Hadamard rotation, tensor scaling and stochastic rounding, as the paper says
-- system: a small Llama on a book; E2M1 with scales in E8M0, E4M3 or UE5M3 in all three products of linear layers
-- paper: Hu et al. 2025, "Elucidating the Design Space of FP4 training"
-- time: 9 minutes on one CPU core
--
-- All designs see the same batches from the same initial weights, seed by seed, and are judged by the loss on held-out
-- text that they have trained to, not by errors of rounding. 24 designs are all combinations of scale, tensor scaling,
-- rotation and rounding, so that what a choice does is the mean over all others; eight more change the rule of the
-- gradient in the default (MXFP4, nearest, straight through) and in the paper's combination. Backward passes are of the
-- sum of the tokens' losses, and the optimizer divides: with gradients of their mean, scales in UE5M3 were zero, and it
-- lost 11 times what E8M0 does (E4M3 needs tensor scaling still). What rotation and rounding then do, 0.01 nats, is
-- within the 0.03 of three seeds. The rate is chosen by the validation part for f32 and for the default, the smaller
-- one if they differ. A run whose loss is no finite number has diverged: the design is called so, and that run counts
-- as guessing among all tokens evenly, or as the worst of all other runs if that is worse. Overhead is that of a layer
-- of 4096 x 4096 with 4096 rows: operations besides the products, counted by quant.fp4_design.cost.
local ty = require "tycho"
local llm, quant = require "tycho.llm", require "tycho.quant"
local design = quant.fp4_design

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 100, "training steps of every run", quick = 1 },
    { "width", 64, "hidden size" },
    { "layers", 2, "of the model", quick = 1 },
    { "batch", 8, "rows of 64 tokens in a step", quick = 1 },
    { "rates", { 2e-3, 4e-3, 8e-3 }, "learning rates for the choice", quick = { 4e-3 } },
  },
}
local args = r.args

local corpus = llm.corpus.open { folder = r:path "corpus", validation = true, length = 64,
  vocabulary = r.quick and 300 or 512, text = r.quick and ty.data.kjv():sub(1, 40000) or nil }
local batches = { validation = r:tries(corpus:batches "validation"), held_out = r:tries(corpus:batches "held_out") }

local function loss_on(model, part)
  return ty.train.evaluate(batches[part], function(batch)
    return llm.train.loss(model, batch):item() * batch.count, batch.count
  end)
end

-- A model trained with a design (nil: f32).
local function trained(d, seed, rate)
  ty.manual_seed(seed)
  local model = corpus:model { width = args.width, layers = args.layers, heads = 2, hidden = args.width * 5 // 2 }
  if d then
    local share = quant.linear.attach(model, design.policy(d)).share
    assert(share == 1, design.name(d) .. ": a product is not quantized")
  end
  local loader = ty.data.DataLoader(corpus.training, { batch_size = args.batch, shuffle = true, seed = seed })
  ty.train.fit(model, loader, { steps = args.steps, lr = rate, warmup = args.steps // 10, quiet = true,
    backward = function(_, next_batch)
      local batch = next_batch()
      local loss = llm.train.loss(model, batch) * batch.count
      loss:backward()
      ty.no_grad(function() for _, p in ipairs(model:parameters()) do p.grad:div_(batch.count) end end)
      return { loss = loss }
    end })
  return model
end

-- ---- the rate ----

local rate = math.huge
for _, d in ipairs { false, design.design {} } do
  local name = d and design.name(d) or "f32"
  r:choose(name, args.rates, function(tried)
    local loss = loss_on(trained(d or nil, r.seed, tried), "validation")
    r:say("%s, rate %g: validation loss %.4f", name, tried, loss)
    return nil, loss
  end)
  rate = math.min(rate, r.metrics.chosen[name])
end

-- ---- all designs ----

local designs = design.grid { scale = { "e8m0", "e4m3", "ue5m3" }, tensor = { false, true },
  hadamard = { "none", "both" }, rounding = { "nearest", "backward" } }
local factorial = #designs
for _, gradient in ipairs { "clip", "dge", "absmax", "absmax_adjusted" } do -- in the default and in the paper's
  designs[#designs + 1] = design.design { gradient = gradient }
  designs[#designs + 1] = design.design { scale = "ue5m3", tensor = true, hadamard = "both", rounding = "backward",
    gradient = gradient }
end

local whole, results, worst = {}, {}, math.log(corpus.tokenizer.size)
for i, seed in ipairs(r.seeds) do whole[i] = loss_on(trained(nil, seed, rate), "held_out") end
for k, d in ipairs(designs) do
  local losses, diverged = {}, {}
  for i, seed in ipairs(r.seeds) do
    losses[i] = loss_on(trained(d, seed, rate), "held_out")
    if losses[i] < math.huge then
      worst = math.max(worst, losses[i])
    else
      diverged[#diverged + 1], losses[i] = seed, math.huge
    end
  end
  results[k] = { design = d, name = design.name(d), losses = losses, diverged = diverged,
    overhead = design.cost(d, 4096, 4096, 4096).overhead }
end
for _, result in ipairs(results) do
  result.gaps = {}
  for i, loss in ipairs(result.losses) do result.gaps[i] = math.min(loss, worst) - whole[i] end
  result.gap = ty.stats.mean(result.gaps)
  r.metrics[result.name] = result.gap
  r.metrics["diverged: " .. result.name] = #result.diverged > 0 and #result.diverged or nil
end
local sorted = table.move(results, 1, #results, 1, {})
table.sort(sorted, function(a, b) return a.gap < b.gap end)
r:say("loss in f32 %.4f; over it, and operations besides the products, percent:", ty.stats.mean(whole))
for _, result in ipairs(sorted) do
  r:say("  %-58s %.4f ± %.4f  %.3f%s", result.name, result.gap, ty.stats.spread(result.gaps), 100 * result.overhead,
    #result.diverged > 0 and "  diverged with seed " .. table.concat(result.diverged, ", ") or "")
end

-- ---- what each choice does ----

local combinations = table.move(results, 1, factorial, 1, {})
local function effect_row(what, key, value, other)
  local values, baseline = design.effect(combinations, key, value, other)
  return { claim = "loss over f32's " .. what, values = values, baseline = baseline, bar = 1, below = true }
end
local best = results[ty.stats.least(ty.stats.column(combinations, "gap"))]
local won, plain, surrogate = best.design, results[1], math.huge -- the default is the first
local named = (won.tensor and 1 or 0) + (won.hadamard ~= "none" and 1 or 0) + (won.rounding ~= "nearest" and 1 or 0)
for k = factorial + 1, #results, 2 do surrogate = math.min(surrogate, results[k].gap) end
r:say("best: %s; the best other rule of the gradient in the default: %.3f times the gap of straight through", best.name,
  surrogate / plain.gap)

local series, labelled = {}, {}
local colors = { e8m0 = { 0, 0.45, 0.7 }, e4m3 = { 0.84, 0.37, 0 }, ue5m3 = { 0, 0.62, 0.45 } }
for k, result in ipairs(results) do
  local scale = result.design.scale
  series[k] = { x = { 100 * result.overhead }, y = { result.gap }, color = colors[scale], dots = true,
    label = not labelled[scale] and scale or nil }
  labelled[scale] = true
end
table.sort(sorted, function(a, b) return a.overhead < b.overhead end)
local front, low = { x = {}, y = {}, label = "least for its cost", color = { 0.6, 0.6, 0.6 } }, math.huge
for _, result in ipairs(sorted) do
  if result.gap < low then
    low, front.x[#front.x + 1], front.y[#front.y + 1] = result.gap, 100 * result.overhead, result.gap
  end
end
table.insert(series, front)
ty.plot.line { title = "loss over f32's by what a design costs", series = series, y_label = "loss over f32's",
  x_label = "operations besides the products, percent" }:save(r:picture "fp4-design.png")

os.exit(r:finish({
  { claim = "designs in the table", measured = #designs, bar = 24 },
  { claim = "of Hadamard, tensor scaling and stochastic rounding, those in the best combination", measured = named,
    bar = 3 },
  effect_row("with Hadamard rotation, of that without", "hadamard", "both", "none"),
  effect_row("with tensor scaling, of that without", "tensor", true, false),
  effect_row("with stochastic rounding backward, of that to nearest", "rounding", "backward", "nearest"),
  effect_row("with scales in UE5M3, of that in E8M0", "scale", "ue5m3", "e8m0"),
  { claim = "loss over f32's of the best combination, of the default's", bar = 1, below = true,
    values = ty.stats.ratios(best.gaps, plain.gaps), baseline = plain.gaps },
}), true)
