--- Flow matching on straight paths: x_t = (1 - t) x + t noise, and the network learns the velocity noise - x.
-- Lipman et al. 2023, "Flow Matching for Generative Modeling"; Liu et al. 2023, "Flow Straight and Fast" (rectified
-- flow). The network is called with 1000 t, the scale of the sinusoidal embedding.
local ty = require "tycho"
local embedding = require "tycho.diffusion.embedding"

local read = ty.nn.options

---@class Flow
local Flow = {}
Flow.__index = Flow

--- options: time ("logit_normal" or "uniform": how t is drawn in training; Esser et al. 2024 found the former better),
-- mean (0) and std (1) of the logit, drop (0.1: share of labels dropped for guidance).
---@return Flow
local function new(options)
  local self = setmetatable(read("Flow", options, { time = "logit_normal", mean = 0, std = 1, drop = 0.1 }), Flow)
  if self.time ~= "logit_normal" and self.time ~= "uniform" then
    error(("Flow: time must be logit_normal or uniform, got '%s'"):format(tostring(self.time)), 2)
  end
  return self
end

--- Times in (0, 1), [n], on a device.
function Flow:draw_times(n, device)
  if self.time == "uniform" then return ty.rand(n, { device = device }) end
  return (ty.randn(n, { device = device }) * self.std + self.mean):sigmoid()
end

--- The training loss for clean samples x [n, ...] and labels [n] (or nil): mean square error of the velocity.
---@return Tensor loss
function Flow:loss(model, x, labels)
  local n = x.shape[1]
  local t, noise = self:draw_times(n, x.device), ty.randn_like(x)
  local shape = { n }
  for i = 2, x.ndim do shape[i] = 1 end
  local s = t:reshape(shape)
  if labels then labels = embedding.drop_labels(labels, self.drop, model.null_label) end
  local velocity = model(x + s * (noise - x), t * 1000, labels)
  return ty.mse_loss(velocity, noise - x)
end

--- Samples of `shape` by integrating the velocity from noise (t = 1) to data (t = 0).
-- options: labels [n], guidance (1), steps (20), method ("heun": two calls a step, second order; "euler"), noise (the
-- start), on_step(i, x).
---@return Tensor samples
function Flow:sample(model, shape, options)
  local none = ty.nn.none
  local o = read("Flow.sample", options,
    { labels = none, guidance = 1, steps = 20, method = "heun", noise = none, on_step = none })
  if o.method ~= "heun" and o.method ~= "euler" then
    error(("Flow.sample: method must be heun or euler, got '%s'"):format(tostring(o.method)), 2)
  end
  return ty.no_grad(function()
    local velocity = embedding.guided(model, o.labels, o.guidance, model.null_label)
    local x = o.noise or ty.randn(shape, { device = embedding.device_of(model) })
    local n, there = shape[1], { device = x.device }
    for i = 0, o.steps - 1 do
      -- Each step is a scope of its own: only the new x goes on.
      local before = x
      x = ty.scope(function()
        local t, after = 1 - i / o.steps, 1 - (i + 1) / o.steps
        local v = velocity(before, ty.full({ n }, 1000 * t, there))
        local euler = before + v * (after - t)
        if o.method == "euler" or i == o.steps - 1 then return euler end
        local w = velocity(euler, ty.full({ n }, 1000 * after, there))
        return before + (v + w) * ((after - t) / 2)
      end)
      if o.on_step then o.on_step(i, x) end
    end
    return x
  end)
end

return new
