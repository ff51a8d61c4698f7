-- What another order of the training batches would have come to, without training again
-- claim: estimated losses of orders correlate with those of true retraining by 0.8 and more
-- system: a small Llama that goes on from one run over batches of eight books of the Bible; Adam; 20 other orders
-- paper: Yang et al. 2025, "Estimating the Effects of Sample Training Orders for Large Language Models without
--   Retraining"
-- time: 4 minutes on one CPU core
--
-- One run is recorded: its trajectory, the gradient of each batch there, and how the gradients of all batches differ at
-- each of its steps, as random sums of an eighth as many numbers. From these alone come the parameters of every other
-- order; their loss on held-out chapters of one book is computed as ever. The truth is training in that order from the
-- same start. What one takes without a method is that order has no effect: the loss of the recorded run; and without
-- expansion (terms 0), that a batch's gradient is what it was in the recorded run. Estimates need steps that are small
-- enough for an expansion: the picture has the rates at which it holds and the one at which it breaks. What recording
-- costs is as many backward passes as retraining as many orders as there are batches, once.
local ty = require "tycho"
local datasets, llm = require "tycho.datasets", require "tycho.llm"
local nn, optim, stats = ty.nn, ty.optim, ty.stats

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "batches", 16, "of the recorded run", quick = 4 },
    { "orders", 20, "that are trained truly", quick = 3 },
    { "candidates", 60, "orders that are estimated to choose the best", quick = 3 },
    { "lr", 1e-4, "of Adam" },
    { "base", 400, "steps of training before", quick = 5 },
    { "width", 96, "hidden size", quick = 32 },
    { "length", 64, "tokens of a row", quick = 16 },
    { "rows", 8, "of a batch", quick = 2 },
    { "share", 8, "numbers of a gradient for one that is kept" },
  },
}
local args = r.args

-- ---- batches by book, in tokens of the training part ----

local books = { "Genesis", "Psalm", "Matthew", "Isaiah", "Proverbs", "Leviticus", "Acts", "Job" }
local training, held_out = datasets.load("kjv"):by_book(), datasets.load("kjv", { split = "held_out" }):by_book()
local tokenizer = ty.tokenizer.train({ training.Genesis:sub(1, r.quick and 5000 or 60000) }, { vocabulary = 384 })
local size = args.rows * (args.length + 1)
local function rows_of(text, most)
  local ids = tokenizer:encode(text:sub(1, 12 * size * most)):to "i64"
  local list = {}
  for k = 1, math.min(most, ids:numel() // size) do
    list[k] = ids:narrow(0, (k - 1) * size, size):reshape(args.rows, args.length + 1)
  end
  return list
end
local each = (args.batches + #books - 1) // #books -- of a book in the recorded run
local before, recorded = {}, {}
for _, book in ipairs(books) do
  local list = rows_of(training[book], each + (r.quick and 1 or 12))
  for k, batch in ipairs(list) do table.insert(k <= each and recorded or before, batch) end
end
local target = rows_of(held_out.Genesis, r.quick and 1 or 6)

local function loss_of(model, batch)
  local logits = model(batch:narrow(1, 0, args.length))
  return nn.cross_entropy(logits:flatten(0, 1), batch:narrow(1, 1, args.length):reshape(-1))
end

local function measured(model)
  return ty.train.evaluate(target, function(batch) return loss_of(model, batch) end)
end

-- A model that has been trained for a while, and batches in an order of the seed's: not by book.
local function start(seed)
  ty.manual_seed(seed)
  local model = llm.Llama { vocab_size = tokenizer.size, hidden_size = args.width, intermediate_size = 2 * args.width,
    num_hidden_layers = 2, num_attention_heads = 2, num_key_value_heads = 2, max_position_embeddings = args.length,
    tie_word_embeddings = true }
  local opt = optim.Adam(model, { lr = 3e-3, schedule = optim.linear { steps = args.base } })
  local order = ty.randperm(#before):tolist()
  ty.train.minimize(opt, args.base, function(step) return loss_of(model, before[order[step % #before + 1] + 1]) end)
  local batches = {}
  for k, i in ipairs(ty.randperm(#recorded):tolist()) do batches[k] = recorded[i + 1] end
  return model, table.move(batches, 1, args.batches, 1, {})
end

local function orders_of(count)
  local list = {}
  for i = 1, count do list[i] = (ty.randperm(args.batches) + 1):tolist() end
  return list
end

local function record(model, batches, rate, dimensions)
  local effects = optim.order_effects(model, { dimensions = dimensions,
    optimizer = function(p) return optim.Adam(p, { lr = rate, beta2 = 0.95 }) end })
  effects:record(args.batches, function(i) return loss_of(model, batches[i]) end)
  return effects
end

local found = { sums = {}, whole = {}, first = {}, none = {} }
local errors, gains, times, exact, cloud = {}, {}, {}, 0, {}
for i, seed in ipairs(r.seeds) do
  local model, batches = start(seed)
  local count = model:count_parameters()
  local orders = orders_of(args.orders)
  local at_start = measured(model)
  local effects = record(model, batches, args.lr, count // args.share)
  local final, recorded_loss = model:clone(), measured(model)
  effects:estimate(ty.arange(1, args.batches + 1):tolist())
  exact = math.max(exact, ty.recipe.apart(model, final))
  local function loss() return measured(model) end
  local truth, seconds = effects:each(orders, loss, "retrain")
  local estimates, fast = effects:each(orders, loss)
  found.sums[i], times[i] = stats.correlation(estimates, truth), fast / seconds
  cloud[i] = { x = estimates, y = truth, label = "seed " .. seed }
  -- A curriculum: the order that is best by estimate, trained truly.
  local candidates = orders_of(args.candidates)
  effects:retrain(candidates[stats.least((effects:each(candidates, loss)))])
  gains[i] = (stats.mean(truth) - measured(model)) / stats.spread(truth)
  effects:estimate {} -- back at the start
  local whole = record(model, batches, args.lr, 0)
  for terms, name in pairs { [2] = "whole", [1] = "first", [0] = "none" } do
    whole.terms = terms
    local losses = whole:each(orders, loss)
    found[name][i] = stats.correlation(losses, truth)
    if terms == 2 then errors[i] = stats.rms(losses, truth) / stats.rms(truth, recorded_loss) end
  end
  r:say("seed %d: %d parameters, held-out loss %.4f before, %.4f after the recorded run; %d true orders from %.4f to "
    .. "%.4f; %.1f MB kept, %.1f MB with whole gradients; %.3f s an estimate, %.3f s a run", seed, count, at_start,
    recorded_loss, #orders, math.min(table.unpack(truth)), math.max(table.unpack(truth)), effects.bytes / 1e6,
    whole.bytes / 1e6, fast, seconds)
  r:say("  correlation %.3f from random sums, %.3f from whole gradients, %.3f with the first derivative alone, %.3f "
    .. "without expansion", found.sums[i], found.whole[i], found.first[i], found.none[i])
end

-- Where the expansion breaks: rates, with the first seed.
for _, factor in ipairs(r.quick and { 2 } or { 2, 4 }) do
  local model, batches = start(r.seed)
  local effects = record(model, batches, args.lr * factor, model:count_parameters() // args.share)
  local orders = orders_of(math.max(3, args.orders // 2))
  local function loss() return measured(model) end
  local truth = effects:each(orders, loss, "retrain")
  local value = stats.correlation((effects:each(orders, loss)), truth)
  r:say("at %g times the rate: correlation %.3f", factor, value)
  r.metrics[("correlation at %g times the rate"):format(factor)] = value
end
for name, list in pairs(found) do r.metrics["correlation/" .. name] = stats.mean(list) end

local series = {}
for i, points in ipairs(cloud) do
  local function apart(list) return ((ty.tensor(list, { dtype = "f64" }) - stats.mean(list)) * 1e3):tolist() end
  series[i] = { x = apart(points.x), y = apart(points.y), label = points.label, dots = true }
end
ty.plot.line { series = series, title = "Held-out loss by order, less its mean", x_label = "estimated, thousandths",
  y_label = "after true retraining, thousandths", width = 640, height = 480 }:save(r:picture "order-effects.png")

os.exit(r:finish {
  { claim = "correlation of estimated and true losses, gradients kept as random sums", values = found.sums,
    baseline = found.none, bar = 0.8 },
  { claim = "the same with gradients kept whole", values = found.whole, baseline = found.first, bar = 0.8 },
  { claim = "error of an estimate from whole gradients, of that of no effect", values = errors, bar = 1, below = true },
  { claim = "gain of the order that is best by estimate, in spreads of the loss over orders", values = gains, bar = 1 },
  { claim = "time of an estimate, of retraining", values = times, bar = 1, below = true },
  { claim = "largest difference of parameters, recorded order", measured = exact, bar = 0, below = true },
}, true)
