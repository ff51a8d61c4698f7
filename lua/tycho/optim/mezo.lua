--- MeZO: steps along random directions, whose slopes two forward passes tell.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Optimizer = require "tycho.optim.optimizer"
local lowrank = require "tycho.optim.lowrank"

local expect, fail = arguments.expect, arguments.fail

---@class MeZO
---@field groups table[]  one, whose lr may be changed at any time
---@field steps integer   steps done
---@field slope? number   the last step's, along its direction
local MeZO = {}
MeZO.__index = MeZO

-- Numbers of a direction that exist at a time. Each piece has a seed of its own, so that parameters may be visited in
-- any order.
local piece = 1 << 16

-- p = p + scale z for direction number `step`. In a scope: no view of p outlives it, as its memory may leave.
local function along(self, p, step, scale)
  local dtype = p.dtype == "f64" and "f64" or "f32"
  local whole, count = p:detach(), p:numel()
  local flat = whole:is_contiguous() and whole:flatten() or nil
  for number = 0, (count - 1) // piece do
    ty.scope(function()
      local seed = lowrank.seed(self.seed, step, (self.position[p] << 24) + number)
      local from = number * piece
      local size = math.min(piece, count - from)
      local z = lowrank.seeded(seed, ty.randn, { flat and size or count }, { dtype = dtype, device = p.device })
      z = z:mul_(scale):to(p.dtype)
      if flat then flat:narrow(0, from, size):add_(z) else whole:add_(z:reshape(p.shape)) end
    end)
    if not flat then break end
  end
end

--- Moves parameters by `factor` times epsilon along the direction of the step to come: 1, -2 and 1 again is one step.
-- Parameters may be moved in any order and at any time; what one is moved by depends on it alone.
---@param list Tensor[]  of those that the optimizer was made with; others are left alone
---@param factor number
function MeZO:perturb(list, factor)
  expect("MeZO:perturb", "list", list, "a list of tensors")
  expect("MeZO:perturb", "factor", factor, "a finite number")
  ty.no_grad(function()
    for _, p in ipairs(list) do
      if self.position[p] then ty.scope(along, self, p, self.steps + 1, factor * self.eps) end
    end
  end)
end

--- The step of some parameters along the direction of a step that is over, in place of what step() does for all.
---@param list Tensor[]
---@param done {step: integer, slope: number, lr: number, weight_decay: number}  as close() returned it
function MeZO:update(list, done)
  expect("MeZO:update", "list", list, "a list of tensors")
  expect("MeZO:update", "done", done, "a table")
  expect("MeZO:update", "done.step", done.step, "an integer >= 1")
  for _, key in ipairs { "slope", "lr", "weight_decay" } do
    expect("MeZO:update", "done." .. key, done[key], "a number")
  end
  ty.no_grad(function()
    for _, p in ipairs(list) do
      if self.position[p] then
        ty.scope(function()
          if done.weight_decay ~= 0 then p:detach():mul_(1 - done.lr * done.weight_decay) end
          along(self, p, done.step, -done.lr * done.slope)
        end)
      end
    end
  end)
end

--- Ends a step whose two losses are known: what update() takes for every parameter. The loss of the step is the mean.
---@param above number  the loss at epsilon along the direction
---@param below number  and at epsilon against it
---@return {step: integer, slope: number, lr: number, weight_decay: number} done
function MeZO:close(above, below)
  expect("MeZO:close", "above", above, "a number")
  expect("MeZO:close", "below", below, "a number")
  local group = self.groups[1]
  local lr = group.lr * expect("MeZO", ("schedule(%d)"):format(self.steps), self.schedule(self.steps),
    "a finite number >= 0")
  local slope = (above - below) / (2 * self.eps)
  if slope ~= slope or slope == math.huge or slope == -math.huge then slope = 0.0 end -- no step along what is no number
  if self.clip_value > 0 then slope = math.max(-self.clip_value, math.min(self.clip_value, slope)) end
  self.steps, self.slope = self.steps + 1, slope
  return { step = self.steps, slope = slope, lr = lr, weight_decay = group.weight_decay }
end

--- One step: closure() computes the loss twice, a little to either side along a random direction; the generator of
-- random numbers stands the same before both. No gradients, and nothing is kept for any: the direction is drawn again
-- from its seed whenever it is wanted. Returns the mean of the two losses.
---@param closure fun(): Tensor
---@return number loss
function MeZO:step(closure)
  expect("MeZO:step", "closure", closure, "a function")
  if ty.core.program.is_compiling() then
    fail "MeZO: does not work inside ty.compile: its closure() runs twice; compile what closure() does"
  end
  local params, rng = self.groups[1].params, ty.rng_state()
  local function loss()
    return ty.scope(function()
      return expect("MeZO:step", "closure()", ty.no_grad(closure), "a tensor"):item()
    end)
  end
  local at = 0
  local ok, above, below = pcall(function()
    self:perturb(params, 1)
    at = 1
    local first = loss()
    ty.rng_state(rng)
    self:perturb(params, -2)
    at = -1
    return first, loss()
  end)
  if at ~= 0 then self:perturb(params, -at) end
  if not ok then error(above, 0) end
  self:update(params, self:close(above, below))
  require("tycho.optim.watcher").stepped(self)
  return (above + below) / 2
end

--- How many steps there were, and the settings. There is no other state.
function MeZO:state_dict()
  local group = self.groups[1]
  return { steps = self.steps, seed = self.seed, eps = self.eps, lr = group.lr, weight_decay = group.weight_decay }
end

--- Takes over a state_dict().
---@param state table
function MeZO:load_state_dict(state)
  local who = "MeZO:load_state_dict"
  expect(who, "state", state, "a table")
  self.steps = expect(who, "state.steps", state.steps, "an integer >= 0")
  self.seed = expect(who, "state.seed", state.seed, "an integer")
  self.eps = expect(who, "state.eps", state.eps, "a finite number > 0")
  for _, key in ipairs { "lr", "weight_decay" } do
    self.groups[1][key] = expect(who, "state." .. key, state[key], "a finite number >= 0")
  end
end

--- Bytes of state between steps: none, whatever the model.
---@return integer
function MeZO:state_bytes() return 0 end

--- MeZO: trains with forward passes alone, in the memory of inference. A step looks at the loss at theta + eps z and at
-- theta - eps z, z normal and drawn from a seed, and goes -lr (the slope between) along z. Malladi et al. 2023,
-- "Fine-Tuning Language Models with Just Forward Passes". For models that are trained already, with a prompt that makes
-- the task one of what they know; rates are far below those of gradients, many steps.
--
--     local opt = optim.MeZO(model, { lr = 1e-4 })
--     local loss = opt:step(function() return model:loss(batch.tokens, batch.targets) end)
--
-- options: lr (1e-6), eps (1e-3), weight_decay (0), seed (0), clip_value (0: the most that a slope may be, of either
-- sign; no limit), schedule. Parameters that do not require gradients stay as they are.
---@param parameters Module|Tensor[]|Tensor
---@param options? table
---@return MeZO
return function(parameters, options)
  local o = arguments.read("MeZO", options, { lr = 1e-6, eps = 1e-3, weight_decay = 0, seed = 0, clip_value = 0,
    schedule = function() return 1 end }, { lr = "a finite number >= 0", eps = "a finite number > 0",
    weight_decay = "a finite number >= 0", seed = "an integer", clip_value = "a number >= 0" })
  local params, position = {}, {}
  for i, p in ipairs(Optimizer.parameters_of("MeZO", parameters)) do
    if not p.is_leaf then fail("MeZO: parameters: number %d was computed; only leaves can be trained", i) end
    if p.requires_grad and not position[p] then
      params[#params + 1] = p
      position[p] = #params
    end
  end
  if not params[1] then fail "MeZO: parameters: expected at least one that requires gradients, got none" end
  return setmetatable({ groups = { { params = params, lr = o.lr, weight_decay = o.weight_decay } }, eps = o.eps,
    seed = o.seed, schedule = o.schedule, clip_value = o.clip_value, position = position, steps = 0 }, MeZO)
end
