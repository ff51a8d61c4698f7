-- Pretraining with next to no optimizer state
-- claim: APOLLO keeps at most an eighth of AdamW's bytes, APOLLO-Mini about as few as SGD, at a loss within 1 %
-- system: a Llama of 0.83 million parameters on a book; AdamW, APOLLO and APOLLO-Mini, rates tuned alike
-- paper: Zhu et al. 2024, "APOLLO: SGD-like Memory, AdamW-level Performance"
-- time: 20 minutes on two CPU cores
--
-- Matrices of the layers are treated so, embeddings and norms are AdamW's, as the paper has it: 6 % of the parameters
-- here, because the vocabulary is small, and at a rank of 8 (a sixteenth of the width) half of APOLLO's state. Weights
-- and gradients are f32 in the comparison with SGD, which has no state. No decay of weights.
--
-- Recorded on one core each (AMD EPYC, Zen 4), 18 runs of about a minute; loss in nats per token, held out:
--                  rate    seed 0   seed 1   seed 2   mean     bytes
--   AdamW          0.002   2.3372   2.3863   2.3338   2.3524   6,628,352
--   APOLLO         0.02    2.3274   2.3595   2.3365   2.3411     791,664  x 0.119 of AdamW's, loss x 0.9952
--   APOLLO-Mini    0.006   2.5631   2.5712   2.6306   2.5883     451,184  memory x 1.068 of SGD's, loss x 1.100: FAIL
-- Validation by rate, seed 0: AdamW 2.6442 (0.001), 2.4304 (0.002), 2.4633 (0.004), 3.4703 (0.008); APOLLO 2.4765
-- (0.01), 2.4266 (0.02), 2.4371 (0.0283), 2.4645 (0.04); APOLLO-Mini 2.7094 (0.003), 2.7086 (0.00424), 2.6505 (0.006),
-- 3.0214 (0.012). Before that, with one run each and a projection for 50 steps: APOLLO at 0.01 had 2.4816, APOLLO-Mini
-- 2.7723 at 0.003 and 2.9956 at 0.01.
--
-- APOLLO-Mini misses its bar on the loss. Why was not measured. What speaks for its being the one random direction that
-- all rates of a matrix hang on: with fewer of them it does better (above), and with 8 and a rate for each channel all
-- is well. The paper's batches are also larger, 131,072 tokens; these have 1024.
local ty = require "tycho"
local trials = require("tycho.llm").trials

local r = ty.recipe.declare {
  title = "Pretraining with next to no optimizer state",
  claim = "APOLLO keeps at most an eighth of AdamW's bytes, APOLLO-Mini about as few as SGD, at a loss within 1 %",
  system = "a Llama of 0.83 million parameters on a book; AdamW, APOLLO and APOLLO-Mini, rates tuned alike",
  paper = "Zhu et al. 2024, APOLLO: SGD-like Memory, AdamW-level Performance",
  time = "20 minutes on two CPU cores",
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
