-- Pretraining with a third of AdamW's memory, and with a sixth
-- claim: GaLore keeps 65 % fewer bytes between steps than AdamW, with moments of 8 bits 82 %, at a loss within 2 %
-- system: a Llama of 0.83 million parameters on a book; AdamW, GaLore and GaLore of 8 bits, rates tuned alike
-- paper: Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection"
-- time: 20 minutes on two CPU cores
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
