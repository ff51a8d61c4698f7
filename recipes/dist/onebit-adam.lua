-- Adam over a slow network: ranks exchange one bit for each parameter
-- claim: less than a fifth of Adam's bytes in the whole run, warm-up included, at the same held-out loss
-- system: dist.onebit_adam, a Llama on a book over ranks
-- paper: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed"
-- time: 10 minutes on one CPU core
--
-- All ways take the same batches, a share on each rank, and a rate chosen among the same by the first seed. The warm-up
-- ends by the paper's rule: the variance's sum is 0.96 of what it was 1 / (1 - beta2) steps before. The paper has runs
-- of 10^5 steps and a beta2 of 0.999; here there are some hundred steps, and it is 0.98 for all ways. Plain compression
-- takes Adam's mean gradient as signs and scales, by the same exchange, from the same step on: without what was lost
-- before and with a variance that goes on; beside it, the same with what was lost. The paper has one scale for a
-- tensor, this has one for 128 elements: with 1024 training fell apart in the end, rows of rare tokens have far smaller
-- gradients than others. Bytes are those of rings, which a rank sends.
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "length", 64, "tokens of a row", quick = 16 }, { "width", 64, "hidden size of the Llama", quick = 32 },
    { "layers", 3, "layers of it", quick = 2 }, { "rows", 192, "held-out rows that are measured", quick = 8 },
    { "steps", 600, "training steps", quick = 6 }, { "batch", 8, "rows of a step", quick = 4 },
    { "ranks", 4, "that share them", quick = 2 }, { "beta2", 0.98, "of the variance", quick = 0.5 },
    { "rates", { 2e-3, 4e-3, 8e-3 }, "tried for each way", quick = { 2e-3 } },
    { "warmup", 20, "steps in which the rate rises", quick = 2 },
  },
}
local args = r.args
local work = dist.workload.open { length = args.length, width = args.width, layers = args.layers, rows = args.rows }

-- Trains on a rank by a way: "adam", "1-bit adam", or "signs" of gradients, remembered or not, from step `from` on.
local function train(group, way, rate, seed, o)
  local t, d = require "tycho", require "tycho.dist"
  local model = d.workload.model(o.work, seed)
  local list, share = model:parameters(), o.batch // group.size
  local options = { lr = rate, beta2 = o.beta2, schedule = t.optim.cosine { steps = o.steps, warmup = o.warmup } }
  local optimizer, buckets, mean
  if way == "1-bit adam" then
    optimizer = d.onebit_adam(group, list, options)
  else
    optimizer, buckets = t.optim.Adam(list, options), d.buckets(list, { bytes = math.maxinteger })
    mean = d.sign_mean(group, buckets.buckets[1].count, { feedback = way == "signs, remembered" })
  end
  local losses, sent = {}, {}
  for step = 1, o.steps do
    t.scope(function()
      local loss = d.workload.loss(model, d.workload.rows(o.work, seed, step, share * group.rank, share))
      optimizer:zero_grad()
      loss:backward()
      if mean and step > o.from then
        local bucket = buckets.buckets[1]
        buckets:read_gradients(bucket)
        mean:mean(bucket.flat)
        buckets:write_gradients(bucket)
      elseif mean then
        buckets:mean_gradients(group)
      end
      optimizer:step()
      losses[step], sent[step] = loss:item(), group:traffic().bytes
    end)
  end
  local all = group:all_reduce(t.tensor(losses, { dtype = "f64" }), "mean"):tolist()
  return { losses = all, sent = sent, bytes = sent[o.steps], held_out = d.workload.evaluate(model, o.work),
    frozen = optimizer.frozen }
end

local frozen = {} -- by seed: the last step of the warm-up
local function run(way, rate, seed)
  local o = { work = work, steps = args.steps, batch = args.batch, beta2 = args.beta2, warmup = args.warmup,
    from = way == "adam" and math.maxinteger or frozen[seed] }
  local began = r:seconds()
  local got = dist.run(args.ranks, train, nil, way, rate, seed, o)[1]
  if way == "1-bit adam" then frozen[seed] = got.frozen or args.steps end
  r:say("%-18s rate %.0e seed %d: %.4f, %.1f MB sent, %s; %.0f s", way, rate, seed, got.held_out, got.bytes / 1e6,
    got.frozen and "frozen after " .. got.frozen or "not frozen", r:seconds() - began)
  return got
end

local ways = { "adam", "1-bit adam", "signs", "signs, remembered" }
local held_out, ratios, bytes, curves = {}, {}, {}, {}
for i, seed in ipairs(r.seeds) do
  local sent = {}
  for _, way in ipairs(ways) do
    local got = r:choose(way, args.rates, function(rate)
      local result = run(way, rate, seed)
      return result, result.held_out
    end)
    held_out[way] = held_out[way] or {}
    held_out[way][i], sent[way] = got.held_out, got.bytes
    if i == 1 then
      local x, y = {}, {}
      for k = 5, #got.losses, 5 do
        x[#x + 1], y[#y + 1] = got.sent[k] / 1e6, ty.stats.mean(table.move(got.losses, k - 4, k, 1, {}))
      end
      curves[#curves + 1] = { x = x, y = y, label = way }
    end
    r:note(way, { held_out = got.held_out, bytes = got.bytes, frozen = got.frozen }, seed)
  end
  bytes[i] = sent.adam / sent["1-bit adam"]
end
for _, way in ipairs(ways) do ratios[way] = ty.stats.ratios(held_out[way], held_out.adam) end
ty.plot.line { series = curves, title = "Loss by what has been sent", x_label = "megabytes", log_x = true,
  width = 900 }
  :save(r:picture "onebit_adam.png")

os.exit(r:finish {
  { claim = "times fewer bytes sent than by Adam, warm-up included", values = bytes, bar = 5 },
  { claim = "held-out loss of 1-bit Adam, of Adam's", values = ratios["1-bit adam"], baseline = held_out.adam,
    bar = 1.01, below = true },
  { claim = "of Adam over signs of gradients, of 1-bit Adam's",
    values = ty.stats.ratios(held_out.signs, held_out["1-bit adam"]), bar = 1.01 },
  { claim = "the same with what was lost remembered",
    values = ty.stats.ratios(held_out["signs, remembered"], held_out["1-bit adam"]), judged = false },
}, true)
