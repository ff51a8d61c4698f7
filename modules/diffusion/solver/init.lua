--- Solvers: one step from a point to the next. A solver is a value with
--
--     start(run)                          the state of one run, any table (may be left out)
--     step(prediction, to, run, state)    x at the point `to`
--
-- where prediction.x is x at prediction.point, prediction:as(kind) what is predicted there ("epsilon", "sample", "v",
-- "flow"), run:predict(x, point) evaluates once more, run:noise(x) draws noise like x. Tensors that the state keeps
-- over steps are taken out of the step's scope with ty.keep. A new solver is a file beside these.
--
-- Euler's method with ancestral noise (k-diffusion's euler_ancestral) is ddim { eta = 1 }: the same numbers.
return {
  ddim = require "tycho.diffusion.solver.ddim",
  ddpm = require "tycho.diffusion.solver.ddpm",
  deis = require "tycho.diffusion.solver.deis",
  dpm = require "tycho.diffusion.solver.dpm",
  dpm2 = require "tycho.diffusion.solver.dpm2",
  dpm_single = require "tycho.diffusion.solver.dpm_single",
  dpmpp_2m = require "tycho.diffusion.solver.dpmpp_2m",
  dualfast = require "tycho.diffusion.solver.dualfast",
  euler = require "tycho.diffusion.solver.euler",
  heun = require "tycho.diffusion.solver.heun",
  lcm = require "tycho.diffusion.solver.lcm",
  lms = require "tycho.diffusion.solver.lms",
  pndm = require "tycho.diffusion.solver.pndm",
  predictor_corrector = require "tycho.diffusion.solver.predictor_corrector",
  unipc = require "tycho.diffusion.solver.unipc",
  frame = require "tycho.diffusion.solver.frame",
}
