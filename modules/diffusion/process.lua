--- The usual processes, put together: a schedule, an objective to train with, and how one samples.
--
--     local flow = diffusion.Flow()
--     local loss = flow:loss(model, pictures, { labels = labels })
--     local samples = flow:sample(model, { 16, 1, 8, 8 }, { condition = { labels = labels }, guidance = 2 })
local ty = require "tycho"
local new_objective = require "tycho.diffusion.objective"
local new_sampler = require "tycho.diffusion.sampler"
local schedules = require "tycho.diffusion.schedule"
local solvers = require "tycho.diffusion.solver"
local spacings = require "tycho.diffusion.spacing"
local times = require "tycho.diffusion.times"
local weightings = require "tycho.diffusion.weighting"

local none = ty.nn.none
local M = {}

--- A schedule, an objective and defaults of sampling that belong together, for training and for sampling.
---@class Process
---@field schedule table
---@field objective Objective
---@field defaults table  of sampling: solver, spacing, steps, clip
local Process = {}
Process.__index = Process

local sampler_options = { "solver", "guidance", "spacing", "steps", "clip", "parts" }

local function new(objective, defaults)
  return setmetatable({ schedule = objective.schedule, objective = objective, defaults = defaults }, Process)
end

--- Objective:loss of this process: the training loss for clean samples x0 [n, ...] under a condition.
---@param model fun(x: Tensor, t: Tensor, condition: table): Tensor
---@param x0 Tensor
---@param condition? table
---@param given? {t?: Tensor, noise?: Tensor}
---@return Tensor loss
function Process:loss(model, x0, condition, given) return self.objective:loss(model, x0, condition, given) end

--- A sampler for networks that were trained with this process. options: those of Sampler but for schedule, predict and
-- data.
---@return Sampler
function Process:sampler(options)
  local o = { schedule = self.schedule, predict = self.objective.predict, data = self.objective.data }
  for key, value in pairs(self.defaults) do o[key] = value end
  for key, value in pairs(options or {}) do o[key] = value end
  return new_sampler(o)
end

--- Samples of `shape`. options: those of Sampler (steps, guidance, solver, spacing, clip, parts) and of Sampler.sample
-- (condition, null, noise, on_step, ...) in one table.
---@return Tensor samples, Run run
function Process:sample(model, shape, options)
  local how, what = {}, { null = self.objective.null, keep = self.objective.keep }
  for key, value in pairs(options or {}) do what[key] = value end
  for _, key in ipairs(sampler_options) do how[key], what[key] = what[key], nil end
  return self:sampler(how):sample(model, shape, what)
end

--- Flow matching on straight paths, x = (1 - t) x0 + t e, where the network learns the velocity e - x0. Lipman et al.
-- 2023, "Flow Matching for Generative Modeling"; Liu et al. 2023, "Flow Straight and Fast" (rectified flow). Samples by
-- Heun's method in 20 steps.
-- options: times (times.logit_normal()), shift (1), weighting (uniform), drop (0.1: share of conditions dropped for
-- guidance), null, keep (see condition.null).
---@return Process
function M.Flow(options)
  local o = ty.nn.options("Flow", options, { times = times.logit_normal(), shift = 1, weighting = weightings.uniform(),
    drop = 0.1, null = none, keep = none }, { drop = false })
  local objective = new_objective { schedule = schedules.flow { shift = o.shift }, predict = "flow", times = o.times,
    weighting = o.weighting, drop = o.drop, null = o.null, keep = o.keep }
  return new(objective, { solver = solvers.heun(), steps = 20 })
end

--- Denoising diffusion in discrete time. Ho et al. 2020. Samples by DDIM in 50 steps, the clean sample cut to [-1, 1].
-- options: those of schedule.discrete, with betas = "cosine"; predict ("epsilon"), times (uniform), weighting
-- (uniform), drop (0.1), null, keep, clip (1).
---@return Process
function M.DDPM(options)
  local o = ty.nn.options("DDPM", options, { steps = 1000, betas = "cosine", beta_start = none, beta_end = none,
    zero_snr = false, least = 0,
    predict = "epsilon", times = times.uniform(), weighting = weightings.uniform(), drop = 0.1,
    null = none, keep = none, clip = 1 }, { betas = false, drop = false, clip = false })
  local schedule = schedules.discrete { steps = o.steps, betas = o.betas, beta_start = o.beta_start,
    beta_end = o.beta_end, zero_snr = o.zero_snr, least = o.least }
  local objective = new_objective { schedule = schedule, predict = o.predict, times = o.times,
    weighting = o.weighting, drop = o.drop, null = o.null, keep = o.keep }
  return new(objective, { solver = solvers.ddim(), steps = math.min(50, schedule.steps), clip = o.clip })
end

--- The design of Karras et al. 2022 (EDM): x = x0 + sigma e, a network preconditioned to see and to predict numbers of
-- standard deviation 1. Samples by Heun's method in 18 steps of their spacing.
-- options: those of schedule.exploding, data (0.5: the data's standard deviation), times (times.log_normal()), drop
-- (0.1), null, keep.
---@return Process
function M.EDM(options)
  local o = ty.nn.options("EDM", options, { sigma_min = 0.002, sigma_max = 80, rho = 7, data = 0.5,
    times = times.log_normal(), drop = 0.1, null = none, keep = none }, { drop = false })
  local schedule = schedules.exploding { sigma_min = o.sigma_min, sigma_max = o.sigma_max, rho = o.rho }
  local objective = new_objective { schedule = schedule, predict = "edm", data = o.data, times = o.times,
    weighting = weightings.edm { data = o.data }, drop = o.drop, null = o.null, keep = o.keep }
  return new(objective, { solver = solvers.heun(), spacing = spacings.karras { rho = o.rho }, steps = 18 })
end

return M
