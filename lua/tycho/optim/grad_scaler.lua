--- Scaling of losses for f16, whose smallest numbers are not small enough for gradients.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local program = ty.core.program

---@class GradScaler
local GradScaler = {}
GradScaler.__index = GradScaler

local kinds = { scale = "a finite number > 0", growth = "a finite number > 1", backoff = "a number in (0, 1)",
  interval = "an integer >= 1" }

--- Multiplies losses by a factor before the backward pass and gradients by its inverse in the optimizer's step. A step
-- whose gradients are not all finite is left out and the factor made smaller; after `interval` good steps in a row it
-- grows. All of it happens where the parameters are: the host waits for nothing. Micikevicius et al. 2018.
--
--     local scaler = optim.GradScaler()
--     for x, y in batches do
--       local loss = ty.autocast("f16", function() return ty.cross_entropy(model(x), y) end)
--       scaler:step(optimizer, loss)
--     end
--
-- Works inside ty.compile. Left out steps count for schedules and in optimizer.steps. A parameter that got its first
-- gradient after some step was left out is taken to be as many steps younger.
-- options: scale (65536; at first), growth (2), backoff (0.5), interval (2000), enabled (true; false: it does nothing).
---@param options? {scale?: number, growth?: number, backoff?: number, interval?: integer, enabled?: boolean}
---@return GradScaler
local function new(options)
  local o = arguments.read("GradScaler", options,
    { scale = 65536, growth = 2, backoff = 0.5, interval = 2000, enabled = true }, kinds)
  return setmetatable({ options = o, first = { scale = o.scale, good = 0 } }, GradScaler)
end

-- The state, 0-d f64 tensors on a device: `factor`, good steps since it changed, whether this step's gradients are bad.
local function place(self, device)
  if self.factor then return end
  local function number(x) return ty.keep(ty.full({}, x, { dtype = "f64", device = device })) end
  self.factor, self.good, self.bad = number(self.first.scale), number(self.first.good), number(0)
end

--- The loss times the factor. What it is computed from gets gradients as much larger.
---@param loss Tensor
---@return Tensor
function GradScaler:scale(loss)
  arguments.expect("GradScaler:scale", "loss", loss, "a tensor")
  if not self.options.enabled then return loss end
  place(self, loss.device)
  return loss:to(loss.dtype == "f64" and "f64" or "f32") * self.factor:to(loss.dtype == "f64" and "f64" or "f32")
end

-- For the optimizer: the limit of elements before they are scaled back.
function GradScaler:limit(limit)
  if limit == math.huge then return limit end
  if program.is_compiling() then
    error("GradScaler: clip_value does not work inside ty.compile, since the limit changes with the factor", 0)
  end
  return limit * self.factor:item()
end

-- For the optimizer: the control of its native step (see ty.sgd_) and the norm of the gradients, from that of the
-- scaled ones and from a number that is finite when they all are; left_out counts the optimizer's steps.
function GradScaler:control(norm, largest, clip_norm, left_out)
  local inverse = 1 / self.factor
  local finite = largest:isfinite()
  norm = norm * inverse
  local factor = inverse
  if clip_norm > 0 then factor = ty.minimum(clip_norm / (norm + 1e-6), 1) * inverse end
  local control = ty.stack { ty.where(finite, factor, math.huge), left_out }
  local bad = finite:logical_not():to "f64"
  left_out:copy_(left_out + bad)
  self.bad:copy_(ty.maximum(self.bad, bad))
  return control, norm
end

--- The optimizer's step. With a loss: drops old gradients, runs the backward pass of the scaled loss, steps, updates
-- the factor and drops the gradients. Without: takes the gradients that are there, of losses from :scale; call :update
-- after the steps of all optimizers. Returns what optimizer:step does.
---@param optimizer Optimizer
---@param loss? Tensor
---@return number|Tensor|nil norm
function GradScaler:step(optimizer, loss)
  if type(optimizer) ~= "table" or not optimizer.step_scaled then
    arguments.fail("GradScaler:step: optimizer: expected an optimizer, got %s", arguments.describe(optimizer))
  end
  arguments.expect("GradScaler:step", "loss", loss, "a tensor or nil")
  if not self.options.enabled then return optimizer:step(loss) end
  if not loss then
    if not self.factor then arguments.fail "GradScaler:step: no loss was scaled before" end
    return optimizer:step_scaled(self)
  end
  optimizer:zero_grad()
  self:scale(loss):backward()
  local norm = optimizer:step_scaled(self)
  optimizer:zero_grad()
  self:update()
  return norm
end

--- Changes the factor by what the steps since the last update met.
function GradScaler:update()
  local o = self.options
  if not o.enabled or not self.factor then return end
  ty.no_grad(function()
    local bad, good = self.bad:gt(0), self.good + 1
    local grows = good:ge(o.interval)
    local grown = ty.where(grows, self.factor * o.growth, self.factor)
    self.factor:copy_(ty.where(bad, self.factor * o.backoff, ty.where(grown:isfinite(), grown, self.factor)))
    self.good:copy_(ty.where(ty.logical_or(bad, grows), 0.0, good))
    self.bad:fill_(0)
  end)
end

--- The factor now; waits for it.
---@return number
function GradScaler:get_scale()
  if not self.options.enabled then return 1 end
  return self.factor and self.factor:item() or self.first.scale
end

--- The factor and the count of good steps.
function GradScaler:state_dict()
  return { scale = self:get_scale(), good = self.good and math.tointeger(self.good:item()) or self.first.good }
end

--- Takes over a state_dict().
function GradScaler:load_state_dict(state)
  arguments.expect("GradScaler:load_state_dict", "state", state, "a table")
  arguments.expect("GradScaler:load_state_dict", "state.scale", state.scale, kinds.scale)
  arguments.expect("GradScaler:load_state_dict", "state.good", state.good, "an integer >= 0")
  self.first = { scale = state.scale, good = state.good }
  if self.factor then
    self.factor:fill_(state.scale)
    self.good:fill_(state.good)
    self.bad:fill_(0)
  end
end

return new
