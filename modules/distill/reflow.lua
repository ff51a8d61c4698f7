--- Rectified flow: paths made straight by training again on the couplings of a flow's own solver, and then one step in
-- the place of many. Liu et al. 2023, "Flow Straight and Fast: Learning to Generate and Transfer Data with Rectified
-- Flow"; of pictures by words: Liu et al. 2024, "InstaFlow: One Step is Enough for High-Quality Diffusion-Based
-- Text-to-Image Generation".
--
--     local couples = distill.store(folder, { base = "digits", seed = 0, stage = 1 }, function()
--       return distill.pairs(teacher, sampler, { 2000, 1, 8, 8 }, { condition = condition })
--     end)
--     distill.fit(student, couples:loader(), { loss = distill.reflow_loss(flow), steps = 500 })
--     local S = distill.straightness(student, flow, noise, { condition = condition })
--     distill.fit(one, couples_of_student:loader(), { loss = distill.one_step_loss(flow), steps = 500 })
--
-- x = (1 - t) x0 + t e with t = 1 at the noise, as schedule.flow has it; the papers count the other way. The velocity
-- is e - x0.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
local material = require "tycho.distill.material"

local expect, fail = arguments.expect, arguments.fail
local M = {}

local function check_flow(who, flow)
  if type(flow) ~= "table" or type(flow.objective) ~= "table" or flow.objective.predict ~= "flow" then
    fail("%s: flow: expected a process that predicts velocities, as diffusion.Flow, got %s", who,
      arguments.describe(flow))
  end
  return flow
end

local function check_pairs(who, batch)
  expect(who, "batch", batch, "a table")
  expect(who, "batch.noise", batch.noise, "a tensor")
  expect(who, "batch.sample", batch.sample, "a tensor")
end

--- The loss of reflow, for distill.fit on pairs of noise and the sample that the flow before leads it to: flow matching
-- with this noise for this sample. Fresh noise instead would train the flow before over again. The student is
-- conditioned as the pairs are; none of the conditions is dropped.
---@param flow Process
---@return fun(parts: DistillParts, batch: table): Tensor
function M.reflow_loss(flow)
  local who = "distill.reflow_loss"
  check_flow(who, flow)
  local objective = setmetatable({}, getmetatable(flow.objective))
  for key, value in pairs(flow.objective) do objective[key] = value end
  objective.drop = 0
  return function(parts, batch)
    check_pairs(who, batch)
    return objective:loss(parts.student, batch.sample, material.condition(batch), { noise = batch.noise })
  end
end

--- What one step of Euler's method makes of noise: e - v(e, 1).
---@param model fun(x: Tensor, t: Tensor, condition: table): Tensor
---@param flow Process
---@param noise Tensor  [n, ...]
---@param condition? table
---@return Tensor
function M.one_step(model, flow, noise, condition)
  local who = "distill.one_step"
  check_flow(who, flow)
  expect(who, "model", model, "a function")
  expect(who, "noise", noise, "a tensor")
  local t = ty.full({ noise.shape[1] }, flow.schedule:network_time(1), { device = noise.device, dtype = noise.dtype })
  return noise - model(noise, t, condition or {})
end

--- The loss that makes one step do what a flow does, for distill.fit on the pairs of that flow: the distance of one
-- step to the sample. distance: a function of drawn and wanted samples (mean square); a perceptual one late in training
-- is what the paper ends with.
---@param flow Process
---@param distance? fun(drawn: Tensor, wanted: Tensor): Tensor
---@return fun(parts: DistillParts, batch: table): Tensor
function M.one_step_loss(flow, distance)
  local who = "distill.one_step_loss"
  check_flow(who, flow)
  distance = expect(who, "distance", distance, "a function or nil") or ty.mse_loss
  return function(parts, batch)
    check_pairs(who, batch)
    return distance(M.one_step(parts.student, flow, batch.noise, material.condition(batch)), batch.sample)
  end
end

--- How far the paths of a flow are from straight: the mean over path and time of |(e - x0) - v(x_t, t)|^2 along the
-- flow's own paths, a mean over numbers too; 0 where every path is a straight line, which one step follows exactly.
-- S of Liu et al. 2023. By Euler's method from `noise`, with these steps, so that x0 is what it ends at.
-- options: condition ({}), steps (50). Returns it, the samples, and the states on the way (steps + 1 of them) where
-- `states` is true.
---@param model fun(x: Tensor, t: Tensor, condition: table): Tensor
---@param flow Process
---@param noise Tensor  [n, ...]
---@param options? { condition?: table, steps?: integer, states?: boolean }
---@return number straightness
---@return Tensor samples
---@return Tensor[]? states
function M.straightness(model, flow, noise, options)
  local who = "distill.straightness"
  check_flow(who, flow)
  expect(who, "model", model, "a function")
  expect(who, "noise", noise, "a tensor")
  local o = arguments.read(who, options, { condition = {}, steps = 50, states = false }, { steps = "an integer >= 1" })
  conditions.check_batch(who, o.condition, noise.shape[1])
  return ty.no_grad(function()
    local x, velocities, states = noise, {}, { noise }
    for i = o.steps, 1, -1 do
      local t = ty.full({ x.shape[1] }, flow.schedule:network_time(i / o.steps), { device = x.device, dtype = x.dtype })
      local v = ty.scope(function() return model(x, t, o.condition) end)
      velocities[#velocities + 1] = v
      x = x - v / o.steps
      states[#states + 1] = x
    end
    local straight, sum = noise - x, 0.0
    for _, v in ipairs(velocities) do
      sum = sum + ty.scope(function() return (straight - v):square():mean():item() end)
    end
    return sum / o.steps, x, o.states and states or nil
  end)
end

return M
