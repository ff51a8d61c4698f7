--- Noise of growing variance on an unchanged sample: x = x0 + sigma e, where the time is sigma itself. Song et al.
-- 2021; Karras et al. 2022, "Elucidating the Design Space of Diffusion-Based Generative Models" (EDM).
local ty = require "tycho"
local base = require "tycho.diffusion.schedule.base"

--- A schedule whose signal stays as it is while noise is added (variance exploding): alpha = 1.
---@class ExplodingSchedule
local Exploding = base.family()

--- options: sigma_min (0.002), sigma_max (80), rho (7: curvature of the way between them).
---@return ExplodingSchedule
local function new(options)
  local self = ty.nn.options("schedule.exploding", options, { sigma_min = 0.002, sigma_max = 80, rho = 7 })
  if not (self.sigma_min > 0 and self.sigma_max > self.sigma_min) then
    error(("schedule.exploding: sigma_max: expected more than sigma_min %s, which is above 0, got %s"):format(
      tostring(self.sigma_min), tostring(self.sigma_max)), 2)
  end
  self.frame = "noise"
  return setmetatable(self, Exploding)
end

function Exploding:coefficients(t) -- luacheck: ignore 212
  return ty.is_tensor(t) and ty.ones_like(t) or 1.0, t
end

function Exploding:mix(x0, e, _, sigma) return x0 + sigma * e end -- luacheck: ignore 212

function Exploding:time_at(ratio) return ratio end -- luacheck: ignore 212

function Exploding:range() return self.sigma_min, self.sigma_max end

--- Even steps in sigma^(1 / rho).
function Exploding:from_unit(u)
  local low, high = self.sigma_min ^ (1 / self.rho), self.sigma_max ^ (1 / self.rho)
  return (low + u * (high - low)) ^ self.rho
end

function Exploding:draw(n, device) return self:from_unit(ty.rand(n, { device = device })) end

--- c_noise = ln(sigma) / 4 of Karras et al.; the clean end has no such time and is never evaluated.
function Exploding:network_time(t) -- luacheck: ignore 212
  if ty.is_tensor(t) then return t:log() * 0.25 end
  return t > 0 and math.log(t) / 4 or -math.huge
end

function Exploding:noise_scale(point) return point.sigma end -- luacheck: ignore 212

return new
