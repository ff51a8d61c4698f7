--- Schedules: how much of the clean sample and how much noise there is at a time.
--
--     local schedule = diffusion.schedule
--     schedule.flow { shift = 3 }
--     schedule.discrete { betas = "scaled_linear" }       -- Stable Diffusion's
--     schedule.exploding { sigma_max = 80 }               -- EDM's
--
-- base.lua says what a schedule can do; a new family is a file beside it.
return {
  discrete = require "tycho.diffusion.schedule.discrete",
  flow = require "tycho.diffusion.schedule.flow",
  exploding = require "tycho.diffusion.schedule.exploding",
  base = require "tycho.diffusion.schedule.base",
}
