-- A third of AdamW's state, and every weight trained at every step
-- claim: FRUGAL reaches a lower loss than GaLore with no more bytes between steps
-- system: a Llama of 0.83 million parameters on a book; FRUGAL on random blocks, GaLore, AdamW, rates tuned alike
-- paper: Zmushko et al. 2024, "FRUGAL: Memory-Efficient Optimization by Reducing State Overhead for Scalable Training"
-- time: 20 minutes on two CPU cores
--
-- Matrices of the layers are split, embeddings and norms are AdamW's, as the paper has it: 6 % of the parameters here,
-- because the vocabulary is small. The blocks with a state are whole matrices, chosen anew and without moments every
-- 50 of 400 steps; what they take changes with the choice, the most at any step counts. The density is what gives the
-- bytes of GaLore of rank 28, bases included. No decay of weights. The difference to GaLore is smaller than that
-- between seeds; GaLore with moments of 8 bits (galore.lua) does better with fewer bytes, FRUGAL has f32 here.
local ty = require "tycho"
local trials = require("tycho.llm").trials

local r = ty.recipe.declare {
  seeds = 3,
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
  trials.row("held-out loss of FRUGAL, of GaLore's", frugal, galore, 1.0),
}, true)
