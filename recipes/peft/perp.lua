-- Retraining a pruned language model by its norms and biases
-- claim: retraining less than 0.5 % of the parameters recovers 90 % of what retraining all of them does
-- system: the small Llama of the corpus, pruned by magnitude; norms and a bias for each linear layer
-- paper: Zimmer et al. 2023, "PERP: Rethinking the Prune-Retrain Paradigm in the Era of LLMs"
-- time: about 20 minutes on two CPU cores, and 3 more for each base that has to be trained
--
-- Recorded on one core (AMD EPYC, Zen 4), 38 minutes; held-out loss dense, pruned, with all parameters retrained, with
-- norms and biases (0.49 %) retrained, the share recovered, (pruned - few) / (pruned - all), and the perplexity of few
-- over that of all, which is what the paper compares:
--   pruned  seed  dense    pruned   all      few      recovered  few / all
--   50 %    0     3.0214   3.0711   3.0329   3.0612   25.9 %     1.029
--           1     3.1015   3.1324   3.1072   3.1261   25.3 %     1.019
--           2     3.0109   3.0597   3.0185   3.0483   27.7 %     1.030
--   70 %    0     3.0214   3.3497   3.0498   3.1665   61.1 %     1.124
--           1     3.1015   3.3543   3.1315   3.2168   61.7 %     1.089
--           2     3.0109   3.3710   3.0478   3.1601   65.3 %     1.119
--   90 %    0     3.0214   6.1930   3.2235   3.4859   91.2 %     1.300
--           1     3.1015   5.5083   3.2937   3.5130   90.1 %     1.245
--           2     3.0109   5.6830   3.2431   3.4933   89.7 %     1.284
-- 90.3 % at 90 % on average, of the 90 % wanted; FAIL: 26.3 % at 50 %, 62.7 % at 70 %. (An earlier run, with a base
-- that rounding had taken elsewhere, had 89.7, 27.4 and 65.6 %.) The best rates are inside the six but for norms and
-- biases at 90 %, where it is the largest. Where pruning takes as much as from models of the paper (a perplexity of
-- hundreds) the method does what it says; where it takes little, it recovers little here. Matrices of rank 1 in all
-- layers besides help, but are 1.2 % of the parameters at this width, 0.49 % at 512: --rank 1 --variant mask gave
-- 94.7 % at 90 % and 74.7 % at 70 %, scale 93.0 % and 73.8 % (seed 0, validation, 80 steps). A base of width 512 and 2
-- layers was too dear to train here: after 400 steps its validation loss is 3.60 (3.02 for width 192), and pruning 70 %
-- adds but 0.04 to it, so that it says nothing about recovering.
local ty = require "tycho"
local llm = require "tycho.llm"
local prune = require "tycho.prune"

local r = ty.recipe.declare {
  title = "Retraining a pruned language model by its norms and biases",
  claim = "retraining less than 0.5 % of the parameters recovers 90 % of what retraining all of them does",
  system = "the small Llama of the corpus, pruned by magnitude; norms and a bias for each linear layer",
  paper = "Zimmer et al. 2023, PERP: Rethinking the Prune-Retrain Paradigm in the Era of LLMs",
  time = "about 20 minutes on two CPU cores, and 3 more for each base that has to be trained",
  args = {
    { "seeds", 3, "bases, trained with seeds from --seed on", quick = 1 },
    { "base", "", "folder of trained bases (seed0, seed1, ...); made where there are none" },
    { "base_steps", 1050, "training steps of a base", quick = 8 },
    { "steps", 80, "of retraining, the same for all", quick = 3 },
    { "sparsity", "0.5,0.7,0.9", "shares of the weights that go", quick = "0.7" },
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
  return corpus:trained { folder = ("%s/seed%d"):format(args.base ~= "" and args.base or r:path "bases", seed),
    model = args.width == 192 and args.layers == 4 and {} or { width = args.width, layers = args.layers },
    train = settings,
    device = r.device ~= "cpu" and r.device or nil }
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
for text in args.sparsity:gmatch "[^,]+" do
  local sparsity = tonumber(text) or error("--sparsity takes numbers with commas between them, got " .. args.sparsity)
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
  local sum = 0
  for seed = r.seed, r.seed + args.seeds - 1 do
    local losses = { dense = loss(base(seed)), pruned = loss(prune.magnitude(base(seed), { sparsity = sparsity })) }
    for name, way in pairs(ways) do
      losses[name] = loss(seed == r.seed and models[name] or retrained(seed, sparsity, way, way.rate))
    end
    local recovered = (losses.pruned - losses.perp) / (losses.pruned - losses.all)
    r:say("%.0f %%, seed %d: held-out loss dense %.4f, pruned %.4f, all retrained %.4f, %.2f %% retrained %.4f: "
      .. "%.1f %% recovered; perplexity %.2f of all's %.2f", 100 * sparsity, seed, losses.dense, losses.pruned,
      losses.all, 100 * ways.perp.share, losses.perp, 100 * recovered, math.exp(losses.perp), math.exp(losses.all))
    r.metrics[("recovered_%g_seed%d"):format(100 * sparsity, seed)] = recovered
    for name, value in pairs(losses) do r.metrics[("%s_%g_seed%d"):format(name, 100 * sparsity, seed)] = value end
    sum = sum + recovered
  end
  rows[#rows + 1] = { claim = ("%.0f %% pruned: recovered of what retraining all does, mean"):format(100 * sparsity),
    measured = sum / args.seeds, bar = 0.9 }
end

rows[#rows + 1] = { claim = "share of the parameters that is retrained", measured = trained, bar = 0.005,
  below = true }
os.exit(r:finish(rows), true)
