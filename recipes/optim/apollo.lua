-- Pretraining with next to no optimizer state
-- claim: APOLLO keeps at most an eighth of AdamW's bytes, APOLLO-Mini about as few as SGD, at a loss within 1 %
-- system: a Llama of 0.83 million parameters on a book; AdamW, APOLLO and APOLLO-Mini, rates tuned alike
-- paper: Zhu et al. 2024, "APOLLO: SGD-like Memory, AdamW-level Performance"
-- time: 11 minutes on two CPU cores
--
-- Matrices of the layers are treated so, embeddings and norms are AdamW's, as the paper has it: 6 % of the parameters
-- here, because the vocabulary is small, and at a rank of 8 (a sixteenth of the width) half of APOLLO's state. Weights
-- and gradients are f32 in the comparison with SGD, which has no state. No decay of weights.
--
-- Recorded on one core (AMD EPYC, Zen 4), 18 runs of half a minute; loss in nats per token, held out:
--                  rate    seed 0   seed 1   seed 2   mean     bytes
--   AdamW          0.002   2.3372   2.3862   2.3343   2.3525   6,628,352
--   APOLLO         0.02    2.3273   2.3595   2.3364   2.3411     791,664  x 0.119 of AdamW's, loss x 0.9951
--   APOLLO-Mini    0.006   2.5622   2.5558   2.6630   2.5937     451,184  memory x 1.068 of SGD's, loss x 1.103: FAIL
-- Validation by rate, seed 0: AdamW 2.6442 (0.001), 2.4304 (0.002), 2.4697 (0.004), 3.4264 (0.008); APOLLO 2.4765
-- (0.01), 2.4266 (0.02), 2.4371 (0.0283), 2.4654 (0.04); APOLLO-Mini 2.7093 (0.003), 2.6907 (0.00424), 2.6504 (0.006),
-- 3.0448 (0.012). Before that, with one run each and a projection for 50 steps: APOLLO at 0.01 had 2.4816, APOLLO-Mini
-- 2.7723 at 0.003 and 2.9956 at 0.01.
--
-- APOLLO-Mini misses its bar on the loss: x 1.103 (x 1.100 in an earlier run), where 1.01 was wanted. Its steps are
-- those of the authors' program (optim_lowrank_test.lua); what it lacks is a rate for each channel. Losses on
-- validation, seed 0, one run each:
-- * Not the one random direction: one rate for a matrix, read off 8 directions, has 2.6824 (at 0.012, steps as long as
--   with one at 0.006). With a rate for each channel from the same 8 it is APOLLO; from one, 3.3010 (0.02).
-- * Not the noise of small batches: APOLLO follows the same raw gradients and does well. With 8,192 tokens a step and
--   200 steps the gap is wider: AdamW 2.2922 (0.004), APOLLO-Mini 2.7646 (0.012, scale sqrt(32)), rates not tuned.
-- * With 128 tokens, 3,200 steps and beta2 0.99 Mini gains most, not enough, and APOLLO would miss: AdamW 2.3508 (at
--   0.002; 2.6002 at 0.004), APOLLO 2.3571 (0.01, best of 4), Mini 2.4490 (0.004, scale sqrt(512)); held out 2.2382,
--   2.2712 (x 1.015) and 2.3398 (x 1.045).
-- * The scale matters little: sqrt(32), a quarter of the width as in the authors' run of 130 million parameters, 2.7024
--   (0.012) and 3.0621 (0.024); sqrt(8) 2.6728 (0.024); sqrt(384), the largest that they try, 2.6271 (0.004), 2.7469
--   (0.002), 2.6435 (0.00283), 3.3861 (0.008), held out 2.5377, 2.6020 and 2.5759 with three seeds: x 1.093.
-- * The limiter is needed: without it 4.6495 (0.012, scale sqrt(32)). It shortens about nine updates of ten.
-- On a smaller model (--width 64 --layers 2): AdamW 2.7489 (0.004); Mini 2.9265 (0.012), with growth 1.003 3.0334, 1.03
-- 2.8744, 1.1 2.9120, with beta2 0.999 2.9072, with scale sqrt(512) 2.8708 (0.006). More steps of 1,024 tokens, AdamW
-- at 0.004 and Mini at 0.006: 1,600 steps 2.2092 and 2.4577 (x 1.112), 6,400 steps 2.1115 and 2.2268 (x 1.055). The
-- authors take 10,000 steps of 131,072 tokens and more, 20 tokens for each parameter where there is half of one here;
-- whether AdamW with a tuned rate is reached there was not measured.
local ty = require "tycho"
local trials = require("tycho.llm").trials

local r = ty.recipe.declare {
  title = "Pretraining with next to no optimizer state",
  claim = "APOLLO keeps at most an eighth of AdamW's bytes, APOLLO-Mini about as few as SGD, at a loss within 1 %",
  system = "a Llama of 0.83 million parameters on a book; AdamW, APOLLO and APOLLO-Mini, rates tuned alike",
  paper = "Zhu et al. 2024, APOLLO: SGD-like Memory, AdamW-level Performance",
  time = "11 minutes on two CPU cores",
  args = table.move(trials.arguments, 1, #trials.arguments, 3, {
    { "refresh", 200, "steps between random projections", quick = 2 },
    { "rank", 8, "random dimensions of APOLLO" },
  }),
}
local args = r.args

local results = trials.of_recipe(r):of_methods(r, {
  { { name = "APOLLO", class = "APOLLO", others = { rank = 0 },
    settings = { rank = args.rank, refresh = args.refresh, beta2 = args.beta2 } }, 1e-2 },
  { { name = "APOLLO-Mini", class = "APOLLO", others = { rank = 0 },
    settings = { mini = true, refresh = args.refresh, beta2 = args.beta2 } }, 3e-3 },
  { trials.adamw(args.beta2), 4e-3 },
})
local adamw, apollo, mini = results["AdamW"], results["APOLLO"], results["APOLLO-Mini"]

-- Weights and gradients of f32, which SGD needs as well, and the state.
local function memory(result) return 8 * result.parameters + result.state_bytes end

os.exit(r:finish {
  { claim = "bytes of APOLLO's state, of AdamW's", measured = apollo.state_bytes / adamw.state_bytes, bar = 1 / 8,
    below = true },
  { claim = "weights, gradients and state of APOLLO-Mini, of SGD's", measured = memory(mini) / (8 * mini.parameters),
    bar = 1.1, below = true },
  { claim = "held-out loss of APOLLO, of AdamW's", measured = apollo.mean / adamw.mean, bar = 1.01, below = true },
  { claim = "held-out loss of APOLLO-Mini, of AdamW's", measured = mini.mean / adamw.mean, bar = 1.01, below = true },
}, true)
