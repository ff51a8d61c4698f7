-- Retraining a pruned language model by its norms and biases
-- claim: retraining less than 0.5 % of the parameters recovers 90 % of what retraining all of them does
-- system: the small Llama of the corpus, pruned by magnitude; norms and a bias for each linear layer
-- paper: Zimmer et al. 2023, "PERP: Rethinking the Prune-Retrain Paradigm in the Era of LLMs"
-- time: about 20 minutes on two CPU cores, and 3 more for each base that has to be trained
--
-- The share recovered is (pruned - few) / (pruned - all), of held-out losses; both ways get six rates by the validation
-- part. Where pruning takes as much as from models of the paper (a perplexity of hundreds) the method does what it
-- says; where it takes little, it recovers little here: 0.28 and 0.64 with 50 and 70 % pruned at width 192,
-- 0.38 and 0.64 at 96 (one seed, 0.89 % of the parameters). Matrices of rank 1 in all layers besides (--rank 1
-- --variant mask) help, but are 1.2 % of the parameters at this width, 0.49 % at 512. A base of width 512 and 2 layers
-- is too dear to train here: cut short, it loses so little by pruning that it says nothing about recovering.
local ty = require "tycho"
local llm = require "tycho.llm"
local prune = require "tycho.prune"

local r = ty.recipe.declare {
  seeds = 3, base = true,
  args = {
    { "base_steps", 1050, "training steps of a base", quick = 8 },
    { "steps", 80, "of retraining, the same for all", quick = 3 },
    { "sparsity", { 0.5, 0.7, 0.9 }, "shares of the weights that go", quick = { 0.7 } },
    { "vocabulary", 1024, "tokens", quick = 400 },
    { "width", 192, "hidden size of the bases", quick = 64 },
    { "layers", 4, "of the bases", quick = 2 },
    { "rank", 0, "of matrices beside the weights of all linear layers: 2 / width of the parameters for each 1" },
    { "variant", "scale", "what those do: mask (added) or scale (multiplied)" },
  },
}
local args = r.args

local corpus = llm.corpus.open { folder = r.out, validation = true, vocabulary = args.vocabulary,
  text = r.quick and ty.data.kjv():sub(1, 60000) or nil }

local function base(seed)
  local settings = args.base_steps == 1050 and {} or { steps = args.base_steps }
  settings.seed, settings.quiet = seed, true
  return corpus:trained { folder = r:base(seed),
    model = args.width == 192 and args.layers == 4 and {} or { width = args.width, layers = args.layers },
    train = settings,
    device = r.device }
end

local function loss(model, part) return corpus:evaluate(model, part, { device = r.device }).loss end

-- A pruned base, retrained at a rate. Which parameters: "all", or those of prune.perp. Returns the model, which is a
-- plain sparse one again, and the share that was trained.
local ways = {
  all = { rates = { 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2 } },
  perp = { rates = { 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1 },
    options = { add_biases = true, rank = args.rank, variant = args.variant } },
}
local function retrained(seed, sparsity, way, rate)
  local model = prune.magnitude(base(seed), { sparsity = sparsity })
  local parameters, share = model:parameters(), 1
  if way.options then parameters, share = prune.perp(model, way.options) end
  llm.train.fit(model, corpus.training, { steps = args.steps, seed = seed, lr = rate, warmup = 10, quiet = true,
    device = r.device, optimizer = function(_, o)
      return ty.optim.AdamW(parameters, { lr = o.lr, beta2 = 0.95, weight_decay = 0, clip_norm = o.clip_norm,
        schedule = o.schedule })
    end })
  prune.merge(model)
  local zeros = prune.sparsity(model)
  if math.abs(zeros - sparsity) > 1e-3 then error(("%.4f of the weights are zero, not %g"):format(zeros, sparsity)) end
  return prune.release(model), share
end

local rows, trained = {}, 0
for _, sparsity in ipairs(args.sparsity) do
  -- Rates by the validation part and the first seed, six for each way; its models then count for the seed as well.
  local models = {}
  for name, way in pairs(ways) do
    local best = math.huge
    for _, rate in ipairs(r.quick and { way.rates[1] } or way.rates) do
      local model, share = retrained(r.seed, sparsity, way, rate)
      local found = loss(model, "validation")
      r:say("%.0f %%, %s: rate %g, validation loss %.4f", 100 * sparsity, name, rate, found)
      if found < best then best, way.rate, models[name], way.share = found, rate, model, share end
    end
    trained = math.max(trained, name == "perp" and way.share or 0)
  end
  local shares, all = {}, {}
  for i, seed in ipairs(r.seeds) do
    local losses = { dense = loss(base(seed)), pruned = loss((prune.magnitude(base(seed), { sparsity = sparsity }))) }
    for name, way in pairs(ways) do
      losses[name] = loss(seed == r.seed and models[name] or retrained(seed, sparsity, way, way.rate))
    end
    local recovered = (losses.pruned - losses.perp) / (losses.pruned - losses.all)
    r:say("%.0f %%, seed %d: held-out loss dense %.4f, pruned %.4f, all retrained %.4f, %.2f %% retrained %.4f: "
      .. "%.1f %% recovered; perplexity %.2f of all's %.2f", 100 * sparsity, seed, losses.dense, losses.pruned,
      losses.all, 100 * ways.perp.share, losses.perp, 100 * recovered, math.exp(losses.perp), math.exp(losses.all))
    for name, value in pairs(losses) do r.metrics[("%s_%g_seed%d"):format(name, 100 * sparsity, seed)] = value end
    shares[i], all[i] = recovered, losses.all
  end
  rows[#rows + 1] = { claim = ("%.0f %% pruned: recovered of what retraining all does"):format(100 * sparsity),
    values = shares, baseline = all, bar = 0.9 }
end

rows[#rows + 1] = { claim = "share of the parameters that is retrained", measured = trained, bar = 0.005,
  below = true }
os.exit(r:finish(rows), true)
