-- Pretraining with next to no optimizer state
-- claim: APOLLO keeps at most an eighth of AdamW's bytes, APOLLO-Mini about as few as SGD, at a loss within 1 %
-- system: a Llama of 0.83 million parameters on a book; AdamW, APOLLO and APOLLO-Mini, rates tuned alike
-- paper: Zhu et al. 2024, "APOLLO: SGD-like Memory, AdamW-level Performance"
-- time: 20 minutes on two CPU cores
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
