-- A language model with 30 % fewer bytes, by a knapsack over layers and sparse dictionaries, without training
-- claim: ROCKET loses less than singular values with equal shares and less than slicing, at 30 % fewer bytes
-- system: the zoo's Llama of the King James Bible; every linear layer of the blocks as a dictionary and sparse
--   coefficients
-- paper: Ali et al. 2026, "ROCKET: Rapid Optimization via Calibration-guided Knapsack Enhanced Truncation for Efficient
--   Model Compression"
-- time: 6 minutes on one CPU core
--
-- Equal bytes are those of the blocks' linear layers, 16 bits a number and a bit for the place of every coefficient
-- where there are zeros. Singular values are those of whitened weights (SVD-LLM). Slicing is SliceGPT's: a rotation of
-- its own at every place, kept components as many as its two rotations of the residual stream in each block leave room
-- for; its quality alone is had, by projecting. Knapsack without sparsity and sparsity without knapsack stand beside.
-- Whether the knapsack goes by the error of weights, as the authors' code does, or of outputs is chosen on chapters of
-- their own with the first seed. Chapters that perplexity is measured on were neither trained on nor chosen by. A seed
-- draws the chapters that all calibrate with.
local ty = require "tycho"
local llm, prune, zoo = require "tycho.llm", require "tycho.prune", require "tycho.zoo"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "model", "kjv-lm", "of the zoo", quick = "kjv-draft" },
    { "keep", { 0.7, 0.5 }, "shares of the bytes that stay; seeds are for the first", quick = { 0.7 } },
    { "training", 32, "chapters to calibrate with", quick = 1 },
    { "rows", 64, "rows of their text, of 256 tokens", quick = 2 },
    { "held_out", 24, "chapters to measure on", quick = 1 },
    { "rounds", 7, "of the timing", quick = 1 },
  },
}
local args = r.args
local model = zoo.load(args.model):to(r.device)
local keeps = args.keep

local function perplexity(of, part) return llm.train.evaluate(of, part, { device = r.device }).perplexity end

-- Ways to compress, in the order of the report. options: those of prune.rocket.
local low_rank = { 1 }
local ways = {
  { name = "svd", label = "singular values, equal shares", options = { splits = low_rank, allocation = "uniform" } },
  { name = "dictionary", label = "dictionaries, equal shares", options = { allocation = "uniform" } },
  { name = "knapsack", label = "singular values, knapsack", options = { splits = low_rank } },
  { name = "rocket", label = "ROCKET", options = {} },
  { name = "slicing", label = "slicing" },
}
local chosen = "weight"

-- profiles: what layers can be made into, by way and kind of error, where a share does not matter.
local function apply(way, keep, seen, text, seed, profiles, by)
  local small = model:clone()
  if not way.options then
    return small, prune.slice(small, text.training, { keep = keep, rows = args.rows, seed = seed })
  end
  local o = { keep = keep, moments = seen, by = by }
  for key, value in pairs(way.options) do o[key] = value end
  local key = not o.allocation and way.name .. by
  o.profiles = key and profiles[key] or nil
  local report = prune.rocket(small, nil, o)
  if key then profiles[key] = report.profiles end
  return small, report
end

local found, kept = {}, nil -- by way: of the first share, of each seed
for _, way in ipairs(ways) do found[way.name] = {} end
for _, seed in ipairs(r.seeds) do
  local text = zoo.chapters { model = args.model, folder = r:path("seed" .. seed), seed = seed,
    training = args.training, held_out = args.held_out, validation = r.quick and 1 or 8,
    length = r.quick and 64 or 256 }
  local seen = prune.rocket_moments(model, text.training, { rows = args.rows, seed = seed })
  local profiles, first = {}, seed == r.seeds[1]
  if first then
    local least = math.huge
    for _, by in ipairs { "weight", "output" } do
      local small = apply(ways[4], keeps[1], seen, text, seed, profiles, by)
      local other = perplexity(small, text.validation)
      r:say("by the error of %ss: perplexity %.3f on the chapters to choose by", by, other)
      if other < least then chosen, least = by, other end
    end
  end
  local dense = perplexity(model, text.held_out)
  r.metrics.dense = dense
  r:say("seed %d: held-out perplexity %.3f", seed, dense)
  for k, keep in ipairs(first and keeps or { keeps[1] }) do
    for _, way in ipairs(ways) do
      local small, report = apply(way, keep, seen, text, seed, profiles, chosen)
      local after = perplexity(small, text.held_out)
      r:say("  %-30s %.1f %% of the bytes: perplexity %.3f", way.label, 100 * report.after / report.before, after)
      r.metrics[("%s/%g/%d"):format(way.name, keep, seed)] = after
      if k == 1 then table.insert(found[way.name], after - dense) end
      if k == 1 and first and way.name == "rocket" then kept = { model = small, report = report } end
    end
  end
end

-- ---- the file, and the time ----

local bytes = prune.save(kept.model, r:path "small")
local again = prune.load(r:path "small", { dtype = "f32", device = r.device })
local prompt = ty.randint(0, 4096, { 1, r.quick and 32 or 256 }, { device = r.device })
local rounded = kept.model:clone():to("f16"):to "f32"
local differs = ty.no_grad(function() return (again(prompt) - rounded(prompt)):abs():max():item() end)
local blocks, dense_bytes = 0, model:count_parameters() * 2
for _, layer in ipairs(kept.report.layers) do blocks = blocks + 2 * layer.cost end
r:say("file of %d bytes, of %d in f16; blocks %d of %d", bytes, dense_bytes, blocks, 2 * kept.report.before)
r.metrics.bytes, r.metrics.bytes_dense = bytes, dense_bytes
local function reads(of) return function() ty.no_grad(function() return of(prompt):sum():item() end) end end
local times = r:time({ dense = reads(model), rocket = reads(kept.model) }, { rounds = args.rounds, warmup = 1 })
r.metrics.milliseconds, r.metrics.milliseconds_dense = 1000 * times.rocket, 1000 * times.dense
r:say("reading %d tokens, zeros multiplied as any other: %.2f ms, dense %.2f", prompt.shape[2], 1000 * times.rocket,
  1000 * times.dense)

-- What the knapsack keeps of each layer.
local kinds, series = {}, {}
for _, layer in ipairs(kept.report.layers) do
  local kind = layer.name:match "[^.]+$"
  if not kinds[kind] then
    kinds[kind] = { label = kind, y = {} }
    series[#series + 1] = kinds[kind]
  end
  table.insert(kinds[kind].y, 100 * layer.keep)
  r.metrics["kept/" .. layer.name] = layer.keep
end
ty.plot.line { title = "What the knapsack keeps of each layer", series = series, x_label = "block",
  y_label = "% of the bytes" }:save(r:picture "rocket.png")

local function against(name)
  local ratios = {}
  for i, mine in ipairs(found.rocket) do ratios[i] = mine / found[name][i] end
  return ratios
end
os.exit(r:finish {
  { claim = "perplexity added at 30 % fewer bytes, of what singular values with equal shares add",
    values = against "svd", baseline = found.svd, bar = 1, below = true },
  { claim = "of what slicing adds", values = against "slicing", baseline = found.slicing, bar = 1, below = true },
  { claim = "of what dictionaries with equal shares add", values = against "dictionary", baseline = found.dictionary,
    bar = 1, below = true },
  { claim = "of what singular values with the knapsack add", values = against "knapsack", baseline = found.knapsack,
    bar = 1, below = true },
  { claim = "bytes of the blocks' linear layers, of those of the dense ones in f16",
    measured = kept.report.after / kept.report.before, bar = 0.7, below = true },
  { claim = "logits of the packed file loaded again: largest difference", measured = differs, bar = 0, below = true },
}, true)
