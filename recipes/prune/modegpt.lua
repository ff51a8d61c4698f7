-- A smaller language model by closed forms, without training
-- claim: MoDeGPT loses less than magnitude structured pruning at 25 % of the blocks' parameters, untuned
-- system: the zoo's Llama of the King James Bible; neurons by Nystrom, rotary pairs by CR, values by singular values
-- paper: Lin et al. 2025, "MoDeGPT: Modular Decomposition for Large Language Model Compression"
-- time: 4 minutes on one CPU core
--
-- All ways make the same modules narrower and end with as many parameters, to a neuron; nothing is trained. Magnitude
-- has the choice of squares or absolute values; both have that of equal shares for all layers or shares by how much a
-- layer turns the stream (the same epsilons), made on chapters of their own with the first seed's calibration text.
-- Chapters that perplexity is measured on were neither trained on nor chosen by. A seed draws the chapters that are
-- calibrated with, and what the random way takes out. Shares are of the linear layers in the blocks; the embedding
-- stays.
local ty = require "tycho"
local llm, prune, zoo = require "tycho.llm", require "tycho.prune", require "tycho.zoo"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "model", "kjv-lm", "of the zoo", quick = "kjv-draft" },
    { "ratios", { 0.1, 0.25, 0.4, 0.55 }, "shares of the parameters that go; seeds are for 0.25", quick = { 0.25 } },
    { "training", 48, "chapters to calibrate with", quick = 1 },
    { "held_out", 24, "chapters to measure on", quick = 1 },
    { "tokens", 32, "that are decoded in a round of the timing", quick = 2 },
    { "rounds", 7, "of the timing", quick = 1 },
  },
}
local args = r.args
local MAIN = 0.25 -- what the bar is for

local model = zoo.load(args.model):to(r.device)
local function parts(seed)
  return zoo.chapters { model = args.model, folder = r:path("seed" .. seed), seed = seed, training = args.training,
    held_out = args.held_out, validation = r.quick and 1 or 8, length = r.quick and 64 or 256 }
end

local function perplexity(of, part) return llm.train.evaluate(of, part, { device = r.device }).perplexity end

-- Each way makes a copy of the model smaller: { name, settings to choose from, function }.
local epsilons = { math.huge, 0.3, 0.1, 0.05 }
local function shares(seen, ratio, epsilon)
  return prune.modegpt(model:clone(), nil, { statistics = seen, ratio = ratio, epsilon = epsilon }).shares
end
local ways = {
  { name = "MoDeGPT", choices = {}, apply = function(seen, ratio, choice)
    local small = model:clone()
    return small, prune.modegpt(small, nil, { statistics = seen, ratio = ratio, epsilon = choice.epsilon })
  end },
  { name = "magnitude", choices = {}, apply = function(seen, ratio, choice)
    local small = model:clone()
    local even = choice.epsilon == math.huge
    return small, prune.structured(small, { ratio = ratio, score = choice.score,
      shares = not even and shares(seen, ratio, choice.epsilon) or nil })
  end },
  { name = "random", choices = { {} }, apply = function(_, ratio)
    local small = model:clone()
    return small, prune.structured(small, { ratio = ratio, score = "random" })
  end },
}
for _, epsilon in ipairs(r.quick and { math.huge } or epsilons) do
  table.insert(ways[1].choices, { epsilon = epsilon })
  for _, score in ipairs { "l2", "l1" } do table.insert(ways[2].choices, { epsilon = epsilon, score = score }) end
end

local function chosen(way, seen, part)
  local best, least = way.choices[1], math.huge
  for _, choice in ipairs(#way.choices > 1 and way.choices or {}) do
    local found = perplexity((way.apply(seen, MAIN, choice)), part)
    r:say("  %s, epsilon %g%s: perplexity %.3f on the chapters to choose by", way.name, choice.epsilon,
      choice.score and ", " .. choice.score or "", found)
    if found < least then best, least = choice, found end
  end
  return best
end

-- ---- quality ----

local added, theirs, curves, kept = {}, {}, {}, nil
for _, seed in ipairs(r.seeds) do
  local text = parts(seed)
  local seen = prune.modegpt_statistics(model, text.training, { seed = seed })
  local dense = perplexity(model, text.held_out)
  r:say("seed %d: held-out perplexity %.3f", seed, dense)
  r.metrics.dense = dense
  if seed == r.seeds[1] then
    for _, way in ipairs(ways) do way.choice = chosen(way, seen, text.validation) end
  end
  for _, ratio in ipairs(args.ratios) do
    local results = {}
    if ratio == MAIN or seed == r.seeds[1] then
      for _, way in ipairs(ways) do
        ty.manual_seed(seed)
        local small, report = way.apply(seen, ratio, way.choice)
        local found = perplexity(small, text.held_out)
        results[way.name] = { perplexity = found, parameters = report.after }
        r.metrics[("%s/%g/%d"):format(way.name, ratio, seed)] = found
        if seed == r.seeds[1] then
          curves[way.name] = curves[way.name] or { label = way.name, x = { 0 }, y = { dense } }
          table.insert(curves[way.name].x, 100 * ratio)
          table.insert(curves[way.name].y, found)
        end
        if ratio == MAIN and way == ways[1] and seed == r.seeds[1] then kept = { model = small, report = report } end
      end
      local ours, other, any = results.MoDeGPT, results.magnitude, results.random
      r:say("  %2.0f %%: MoDeGPT %.3f (%d parameters), magnitude %.3f (%d), random %.3f (%d)", 100 * ratio,
        ours.perplexity, ours.parameters, other.perplexity, other.parameters, any.perplexity, any.parameters)
      if ratio == MAIN then
        added[#added + 1] = (ours.perplexity - dense) / (other.perplexity - dense)
        theirs[#theirs + 1] = other.perplexity
      end
    end
  end
end

-- ---- the file, and the time ----

local folder = r:path "small"
kept.model:save(folder)
local again, counted = prune.load(folder, { device = r.device }), 0
for _, t in pairs(llm.weights(folder)) do
  if t:is_floating_point() then counted = counted + t:numel() end
end
local prompt = ty.randint(0, 4096, { 1, r.quick and 32 or 256 }, { device = r.device })
local differs = ty.no_grad(function() return (again(prompt) - kept.model(prompt)):abs():max():item() end)
local bytes = { dense = model:count_parameters() * 4, small = ty.io.stat(folder .. "/model.safetensors").size }
r:say("file of %d bytes in f32, of %d; %d parameters of %d", bytes.small, bytes.dense, counted,
  model:count_parameters())

local function reads(of) return function() ty.no_grad(function() return of(prompt):sum():item() end) end end
local function writes(of)
  return function()
    of:generate(prompt:narrow(1, 0, 8), args.tokens, { temperature = 0, stop_tokens = false })
  end
end
local times = r:time({ reads_dense = reads(model), reads_small = reads(kept.model), writes_dense = writes(model),
  writes_small = writes(kept.model) }, { rounds = args.rounds, warmup = 1 })
for name, seconds in pairs(times) do r.metrics["milliseconds/" .. name] = 1000 * seconds end
local read, write = times.reads_small / times.reads_dense, times.writes_small / times.writes_dense
r:say("reading %d tokens: %.2f ms, dense %.2f; writing %d: %.2f ms, dense %.2f", prompt.shape[2],
  1000 * times.reads_small, 1000 * times.reads_dense, args.tokens, 1000 * times.writes_small,
  1000 * times.writes_dense)
for i, share in ipairs(kept.report.shares) do r.metrics["kept/" .. i] = share end

local series = {}
for i, way in ipairs(ways) do series[i] = curves[way.name] end
ty.plot.line { title = "Held-out perplexity", series = series, x_label = "% of the blocks' parameters that go",
  y_label = "perplexity", log_y = true }:save(r:picture "modegpt.png")

os.exit(r:finish {
  { claim = "perplexity added at 25 %, of what magnitude structured pruning adds", values = added, baseline = theirs,
    bar = 1, below = true },
  { claim = "parameters in the file, of those counted", measured = counted / kept.model:count_parameters(), bar = 1,
    below = true },
  { claim = "logits of the model loaded again: largest difference", measured = differs, bar = 0, below = true },
  { claim = "time to read a prompt, of the dense model's", measured = read, bar = 1, below = true },
  { claim = "time to write tokens, of the dense model's", measured = write, bar = 1, below = true },
}, true)
