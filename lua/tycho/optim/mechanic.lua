--- Mechanic: finds the rate of any optimizer.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect = arguments.expect

---@class Mechanic
---@field optimizer Optimizer  the one whose steps are scaled
---@field scale number         by which they are, the rate that was found
local Mechanic = {}
Mechanic.__index = Mechanic

-- The decay of each of the tuners that bet on the scale, whose sum it is.
local betas = { 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999 }

local function sum(list)
  local total = 0.0
  for _, x in ipairs(list) do total = total + x end
  return total
end

local function parameters_of(self)
  local list = {}
  for _, group in ipairs(self.optimizer.groups) do table.move(group.params, 1, #group.params, #list + 1, list) end
  return list
end

local function dot(a, b) return ty.scope(function() return (a:to "f64" * b:to "f64"):sum():item() end) end

-- The bet of a step, `h` in Algorithm 1 of the paper, lines 8 to 13: all tuners see the same h.
local function tune(self, h)
  for k, beta in ipairs(betas) do
    local m = math.max(beta * self.largest[k], math.abs(h))
    local v = beta * beta * self.squares[k] + h * h
    local r = math.max(0, beta * self.rewards[k] - self.scales[k] * h)
    self.largest[k], self.squares[k], self.rewards[k] = m, v, r
    self.scales[k] = (self.first_scale / #betas * m + r) / (math.sqrt(v) + self.eps)
  end
  self.scale = sum(self.scales)
end

local function move(self)
  local list, before = {}, {}
  for _, p in ipairs(parameters_of(self)) do
    if p.grad then
      list[#list + 1], before[p] = p, p:detach():clone()
      if not self.start[p] then
        self.start[p], self.along[p] = ty.keep(before[p]:clone()), ty.keep(ty.zeros_like(p))
      end
    end
  end
  local product, on_weights, weights, gradients = 0.0, 0.0, 0.0, 0.0
  for _, p in ipairs(list) do
    product = product + dot(self.along[p], p.grad)
    on_weights = on_weights + dot(self.along[p], before[p])
    weights, gradients = weights + dot(before[p], before[p]), gradients + dot(p.grad, p.grad)
  end
  local pull = self.decay * self.scale * math.sqrt(gradients) / (math.sqrt(weights) + self.eps)
  local norm = self.optimizer:step()
  tune(self, product + pull * on_weights)
  for _, p in ipairs(list) do
    self.along[p]:add_(p - before[p])
    p:copy_(self.start[p] + self.along[p] * self.scale)
  end
  return norm
end

--- One step. With a loss: drops old gradients, runs backward, steps and drops the gradients. Without: steps with the
-- gradients that are there. Returns what the optimizer's step does: the norm of the gradients where it has clip_norm.
---@param loss? Tensor
---@return number? norm
function Mechanic:step(loss)
  if ty.core.program.is_compiling() then
    arguments.fail "Mechanic: does not work inside ty.compile; compile the forward and the backward pass alone"
  end
  if loss == nil then return ty.no_grad(move, self) end
  expect("Mechanic:step", "loss", loss, "a tensor or nil")
  self:zero_grad()
  loss:backward()
  local norm = ty.no_grad(move, self)
  self:zero_grad()
  return norm
end

--- Drops the gradients of all parameters.
function Mechanic:zero_grad() self.optimizer:zero_grad() end

--- The rate of the next step of the first group: the optimizer's, times the scale.
function Mechanic:rate() return self.optimizer:rate() * self.scale end

--- The bytes of the tensors that live between steps, as Optimizer:state_bytes() counts them.
---@return integer bytes
function Mechanic:state_bytes()
  local bytes = self.optimizer:state_bytes()
  for _, kept in ipairs { self.start, self.along } do
    for _, tensor in pairs(kept) do bytes = bytes + tensor:nbytes() end
  end
  return bytes
end

local numbers = { "largest", "squares", "rewards", "scales" }

--- Everything needed to go on bit for bit.
function Mechanic:state_dict()
  local result = { optimizer = self.optimizer:state_dict(), start = {}, along = {} }
  for _, name in ipairs(numbers) do result[name] = ty.tensor(self[name], { dtype = "f64" }) end
  for position, p in ipairs(parameters_of(self)) do
    local key = tostring(position - 1)
    result.start[key], result.along[key] = self.start[p], self.along[p]
  end
  return result
end

--- Takes over a state_dict() of a Mechanic with the same parameters in the same order.
function Mechanic:load_state_dict(state)
  local who = "Mechanic:load_state_dict"
  expect(who, "state", state, "a table")
  for _, name in ipairs { "optimizer", "start", "along" } do expect(who, "state." .. name, state[name], "a table") end
  local read = {}
  for _, name in ipairs(numbers) do
    read[name] = expect(who, "state." .. name, state[name], "a tensor"):tolist()
    if #read[name] ~= #betas then
      arguments.fail("%s: state.%s: expected %d numbers, got %d", who, name, #betas, #read[name])
    end
  end
  local start, along = {}, {}
  for position, p in ipairs(parameters_of(self)) do
    for from, to in pairs { [state.start] = start, [state.along] = along } do
      local value = from[tostring(position - 1)]
      if value then
        if table.concat(value.shape, ",") ~= table.concat(p.shape, ",") then
          arguments.fail("%s: parameter %d has shape [%s], its state [%s]", who, position - 1,
            table.concat(p.shape, ", "), table.concat(value.shape, ", "))
        end
        to[p] = ty.keep(value:to { device = p.device, dtype = p.dtype }:clone())
      end
    end
  end
  self.optimizer:load_state_dict(state.optimizer)
  self.start, self.along = start, along
  for _, name in ipairs(numbers) do self[name] = read[name] end
  self.scale = sum(self.scales)
end

--- Finds the rate of `optimizer`, whose own is 1 or a schedule of height 1: weights are the start plus the sum of the
-- optimizer's updates times a scale, on which six tuners with decays 0.9 to 0.999999 bet by the product of that sum
-- with the gradients. Two more numbers a parameter. Not with optimizers that normalise by the weights (LAMB). Cutkosky,
-- Defazio and Mehta 2023, "Mechanic: A Learning Rate Tuner", Algorithm 1.
--
--     local opt = optim.Mechanic(optim.AdamW(model, { lr = 1, schedule = optim.cosine { steps = 1000 } }))
--
-- options: decay (0.01: pull towards smaller scales by the norm of the weights, lambda of the paper), first_scale
-- (1e-8), eps (1e-8). Not inside ty.compile.
---@param optimizer Optimizer
---@param options? table
---@return Mechanic
return function(optimizer, options)
  if type(optimizer) ~= "table" or type(optimizer.groups) ~= "table" or type(optimizer.step) ~= "function" then
    arguments.fail("Mechanic: optimizer: expected an optimizer, got %s", arguments.describe(optimizer))
  end
  if optimizer.ema then arguments.fail "Mechanic: optimizer: its ema would average steps before they are scaled" end
  local o = arguments.read("Mechanic", options, { decay = 0.01, first_scale = 1e-8, eps = 1e-8 }, {
    decay = "a finite number >= 0", first_scale = "a finite number > 0", eps = "a finite number >= 0" })
  local self = setmetatable({ optimizer = optimizer, decay = o.decay, first_scale = o.first_scale, eps = o.eps,
    scale = 0.0, start = {}, along = {} }, Mechanic)
  for _, name in ipairs(numbers) do
    self[name] = {}
    for k = 1, #betas do self[name][k] = 0.0 end
  end
  return self
end
