--- The straight path of flow matching: x = (1 - t) x0 + t e. Lipman et al. 2023; Liu et al. 2023; the shift for larger
-- pictures: Esser et al. 2024, "Scaling Rectified Flow Transformers", section 5.3.2.
local ty = require "tycho"
local base = require "tycho.diffusion.schedule.base"

--- The schedule of flow matching: a straight line from the sample to noise.
---@class FlowSchedule
local Flow = base.family()

--- options: shift (1; above 1 spends more of the steps, and of the training, on high noise).
---@return FlowSchedule
local function new(options)
  local self = ty.nn.options("schedule.flow", options, { shift = 1 })
  if type(self.shift) ~= "number" or self.shift <= 0 then
    error("schedule.flow: shift: expected a number above 0, got " .. tostring(self.shift), 2)
  end
  self.frame = "flow"
  return setmetatable(self, Flow)
end

function Flow:coefficients(t) return 1 - t, t end -- luacheck: ignore 212

-- One product less than the general form, and e - x0 is wanted for the loss as well.
function Flow:mix(x0, e, _, sigma) return x0 + sigma * (e - x0) end -- luacheck: ignore 212

function Flow:time_at(ratio) return ratio == math.huge and 1.0 or ratio / (1 + ratio) end -- luacheck: ignore 212

function Flow:range() return 0.0, math.huge end -- luacheck: ignore 212

--- s u / (1 + (s - 1) u) with the shift s; the shift 1 / s takes it back.
function Flow:from_unit(u)
  if self.shift == 1 then return u end
  return self.shift * u / (1 + (self.shift - 1) * u)
end

function Flow:draw(n, device) return self:from_unit(ty.rand(n, { device = device })) end

function Flow:network_time(t) return t * 1000 end -- luacheck: ignore 212

return new
