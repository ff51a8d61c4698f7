-- A third of AdamW's state, and every weight trained at every step
-- claim: FRUGAL reaches a lower loss than GaLore with no more bytes between steps
-- system: a Llama of 0.83 million parameters on a book; FRUGAL on random blocks, GaLore, AdamW, rates tuned alike
-- paper: Zmushko et al. 2024, "FRUGAL: Memory-Efficient Optimization by Reducing State Overhead for Scalable Training"
-- time: 20 minutes on two CPU cores
local ty = require "tycho"
local trials = require("tycho.llm").trials

local r = ty.recipe.declare {
  title = "A third of AdamW's state, and every weight trained at every step",
  claim = "FRUGAL reaches a lower loss than GaLore with no more bytes between steps",
  system = "a Llama of 0.83 million parameters on a book; FRUGAL on random blocks, GaLore, AdamW, rates tuned alike",
  paper = "Zmushko et al. 2024, FRUGAL: Memory-Efficient Optimization by Reducing State Overhead for Scalable Training",
  time = "20 minutes on two CPU cores",
  args = table.move(trials.arguments, 1, #trials.arguments, 4, {
    { "refresh", 50, "steps between changes of the subspace, of both", quick = 2 },
    { "density", 0.2832, "share of the elements of matrices that have a state" },
    { "rank", 28, "dimensions of GaLore's subspace", quick = 8 },
  }),
}
local args = r.args

local results = trials.of_recipe(r):of_methods(r, {
  { { name = "FRUGAL", class = "FRUGAL", others = { density = 1 },
    settings = { density = args.density, refresh = args.refresh, beta2 = args.beta2 } }, 2e-3 },
  { trials.galore(args.rank, args.refresh, args.beta2), 2e-2 },
  { trials.adamw(args.beta2), 4e-3 },
})
local adamw, galore, frugal = results["AdamW"], results["GaLore"], results["FRUGAL"]

r:say("loss of FRUGAL %.4f, of GaLore %.4f times AdamW's", frugal.mean / adamw.mean, galore.mean / adamw.mean)
os.exit(r:finish {
  { claim = "most bytes of FRUGAL's state, of GaLore's", measured = frugal.state_bytes / galore.state_bytes, bar = 1.0,
    below = true },
  { claim = "held-out loss of FRUGAL, of GaLore's", measured = frugal.mean / galore.mean, bar = 1.0, below = true },
}, true)
