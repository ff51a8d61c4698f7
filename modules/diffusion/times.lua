--- How times are drawn in training. Each function returns a drawing: a function (schedule, n, device) that gives times
-- [n] of the schedule.
local ty = require "tycho"

local M = {}

--- All times alike.
function M.uniform()
  return function(schedule, n, device) return schedule:draw(n, device) end
end

--- The share of the way from clean to noise is the sigmoid of a normal number, so the middle is seen more often. Esser
-- et al. 2024 found it better for flow matching. options: mean (0), std (1).
function M.logit_normal(options)
  local o = ty.nn.options("times.logit_normal", options, { mean = 0, std = 1 })
  return function(schedule, n, device)
    return schedule:from_unit((ty.randn(n, { device = device }) * o.std + o.mean):sigmoid())
  end
end

--- sigma is the exponential of a normal number, for schedules whose time is sigma. Karras et al. 2022.
-- options: mean (-1.2), std (1.2).
function M.log_normal(options)
  local o = ty.nn.options("times.log_normal", options, { mean = -1.2, std = 1.2 })
  return function(schedule, n, device)
    if schedule.steps then error("times.log_normal: schedule: expected continuous time, got a discrete one", 0) end
    return schedule:time_at((ty.randn(n, { device = device }) * o.std + o.mean):exp())
  end
end

return M
