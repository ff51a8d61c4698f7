--- Making a network that draws from words forget a concept, a style or a kind of thing, and keep the rest:
-- diffusion.unlearn. Five methods, each a file, with one way to say what is to be forgotten:
--
--     local task = unlearn.task(painter, { word = "hatched", other = "plain", prompts = prompts })
--     local report = unlearn.esd(painter, task, { steps = 40 })
--     painter:paint { "a hatched fish on a pink ground" }
--     unlearn.undo(painter, report)
--
-- What is measured of them, after Zhang et al. 2024, "UnlearnCanvas: A Stylized Image Dataset to Benchmark Machine
-- Unlearning for Diffusion Models": unlearning accuracy, the share of pictures asked for with the concept that do not
-- show it; in-domain and cross-domain retention, shares of the others that show what was asked for, in the concept's
-- domain and in the other one (retention()).
local tuning = require "tycho.diffusion.unlearn.tuning"
local uce = require "tycho.diffusion.unlearn.uce"

return { task = require "tycho.diffusion.unlearn.task", undo = tuning.undo, state = tuning.state, use = tuning.use,
  esd = require "tycho.diffusion.unlearn.esd", ablation = require "tycho.diffusion.unlearn.ablation",
  forget_me_not = require "tycho.diffusion.unlearn.forget_me_not", uce = uce.uce, solve_uce = uce.solve,
  salun = require "tycho.diffusion.unlearn.salun", retention = require "tycho.diffusion.unlearn.retention",
  benchmark = require "tycho.diffusion.unlearn.benchmark" }
