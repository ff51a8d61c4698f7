-- Pretraining with a third of AdamW's memory, and with a sixth
-- claim: GaLore keeps 65 % fewer bytes between steps than AdamW, with moments of 8 bits 82 %, at a loss within 2 %
-- system: a Llama of 0.83 million parameters on a book; AdamW, GaLore and GaLore of 8 bits, rates tuned alike
-- paper: Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection"
-- time: 20 minutes on two CPU cores
--
-- Matrices of the layers are projected, embeddings and norms are AdamW's, as the paper has it: 6 % of the parameters
-- here, because the vocabulary is small. State is what optimizer:state_bytes() counts, bases included. A subspace lasts
-- 50 of 400 steps. With moments of 8 bits there is room for a rank of 32, at which those of the smallest matrices have
-- the 4096 elements from which on they are quantized (at 28: 81.9 % saved, which is not enough). No decay of weights.
--
-- Recorded on one core each (AMD EPYC, Zen 4), 18 runs of about a minute; loss in nats per token, held out:
--                       rate    seed 0   seed 1   seed 2   mean     bytes
--   AdamW               0.002   2.3372   2.3863   2.3338   2.3524   6,628,352
--   GaLore              0.0283  2.3805   2.3873   2.4102   2.3927   2,165,760  -67.3 %, loss x 1.0171
--   GaLore of 8 bits    0.02    2.3318   2.3972   2.3932   2.3741     963,008  -85.5 %, loss x 1.0092
-- Validation by rate, seed 0: AdamW 2.6442 (0.001), 2.4304 (0.002), 2.4633 (0.004), 3.4703 (0.008); GaLore 2.4902
-- (0.02), 2.4759 (0.0283), 2.4900 (0.04), 2.5538 (0.08); of 8 bits 2.5506 (0.01), 2.4296 (0.02), 2.4517 (0.0283),
-- 2.4540 (0.04). Before that, with one run each: GaLore at 0.01 had 2.5856 with subspaces of 50 steps, 2.6273 with 20,
-- 2.5981 with 200, and 2.4748 with a scale of 0.5; of 8 bits at a rank of 28 2.5860; AdamW at 0.004 2.4997 with a beta2
-- of 0.999.
local ty = require "tycho"
local trials = require("tycho.llm").trials

local r = ty.recipe.declare {
  title = "Pretraining with a third of AdamW's memory, and with a sixth",
  claim = "GaLore keeps 65 % fewer bytes between steps than AdamW, with moments of 8 bits 82 %, at a loss within 2 %",
  system = "a Llama of 0.83 million parameters on a book; AdamW, GaLore and GaLore of 8 bits, rates tuned alike",
  paper = "Zhao et al. 2024, GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection",
  time = "20 minutes on two CPU cores",
  args = table.move(trials.arguments, 1, #trials.arguments, 4, {
    { "refresh", 50, "steps between changes of the subspace", quick = 2 },
    { "rank", 28, "dimensions of the subspace", quick = 8 },
    { "rank8", 32, "the same with moments of 8 bits", quick = 8 },
  }),
}
local args = r.args

local results = trials.of_recipe(r):of_methods(r, {
  { trials.adamw(args.beta2), 4e-3 },
  { trials.galore(args.rank, args.refresh, args.beta2), 2e-2 },
  { trials.galore(args.rank8, args.refresh, args.beta2, 8), 2e-2 },
})
local adamw, galore, galore8 = results["AdamW"], results["GaLore"], results["GaLore of 8 bits"]

os.exit(r:finish {
  { claim = "bytes of GaLore's state saved, of AdamW's", measured = 1 - galore.state_bytes / adamw.state_bytes,
    bar = 0.65 },
  { claim = "the same with moments of 8 bits", measured = 1 - galore8.state_bytes / adamw.state_bytes, bar = 0.82 },
  { claim = "held-out loss of GaLore, of AdamW's", measured = galore.mean / adamw.mean, bar = 1.02, below = true },
  { claim = "the same with moments of 8 bits", measured = galore8.mean / adamw.mean, bar = 1.02, below = true },
}, true)
