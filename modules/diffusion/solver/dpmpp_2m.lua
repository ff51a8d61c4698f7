--- DPM-Solver++(2M), of second order with one evaluation a step: the clean sample is extrapolated from this step and
-- the one before, in the variable ln(alpha / sigma). Lu et al. 2022, "DPM-Solver++", algorithm 2: solver.dpm as it is
-- when nothing is said.
local ty = require "tycho"
local dpm = require "tycho.diffusion.solver.dpm"

return function(options)
  ty.nn.options("solver.dpmpp_2m", options, {})
  return dpm()
end
