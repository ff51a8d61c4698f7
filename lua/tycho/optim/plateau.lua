--- A learning rate that falls where a measure no longer gets better.
local arguments = require "tycho.arguments"

local expect = arguments.expect

---@class ReduceLROnPlateau
---@field best number     the best measure so far
---@field bad integer     calls since then
---@field steps integer   calls of step()
local Plateau = {}
Plateau.__index = Plateau

-- Whether the measure is better than the best by more than the threshold.
local function better(self, value)
  local o, best = self.options, self.best
  local sign = o.mode == "max" and 1 or -1
  if o.relative then return sign * value > sign * best * (1 + sign * o.threshold) end
  return sign * value > sign * best + o.threshold
end

--- Call it with the measure, a number, after each epoch. Returns whether the rates fell.
---@param measure number
---@return boolean
function Plateau:step(measure)
  expect("ReduceLROnPlateau:step", "measure", measure, "a number")
  local o, fell = self.options, false
  self.steps = self.steps + 1
  if better(self, measure) then
    self.best, self.bad = measure, 0
  else
    self.bad = self.bad + 1
  end
  if self.waiting > 0 then
    self.waiting, self.bad = self.waiting - 1, 0
  end
  if self.bad <= o.patience then return false end
  for _, group in ipairs(self.optimizer.groups) do
    local lr = math.max(group.lr * o.factor, o.least)
    if group.lr - lr > o.eps then
      group.lr, fell = lr, true
    end
  end
  self.waiting, self.bad = o.cooldown, 0
  return fell
end

--- Everything needed to go on.
function Plateau:state_dict()
  return { best = self.best, bad = self.bad, steps = self.steps, waiting = self.waiting }
end

--- Takes over a state_dict(); the rates are in that of the optimizer.
function Plateau:load_state_dict(state)
  local who = "ReduceLROnPlateau:load_state_dict"
  expect(who, "state", state, "a table")
  self.best = expect(who, "state.best", state.best, "a number")
  for _, name in ipairs { "bad", "steps", "waiting" } do
    self[name] = expect(who, "state." .. name, state[name], "an integer >= 0")
  end
end

local defaults = { mode = "min", factor = 0.1, patience = 10, threshold = 1e-4, relative = true, cooldown = 0,
  least = 0, eps = 1e-8 }
local kinds = { mode = '"min" or "max"', factor = "a number in [0, 1)", patience = "an integer >= 0",
  threshold = "a finite number >= 0", cooldown = "an integer >= 0", least = "a finite number >= 0",
  eps = "a finite number >= 0" }

--- Multiplies the rates of all groups by `factor` when a measure has not got better for more than `patience` calls of
-- step(measure). As PyTorch's.
--
--     local plateau = optim.ReduceLROnPlateau(opt, { patience = 3 })
--     plateau:step(held_out_loss)
--
-- options: mode ("min": less is better; "max"), factor (0.1), patience (10), threshold (1e-4: by how much a measure
-- must be better), relative (true: as a share of the best), cooldown (0: calls after a fall that do not count), least
-- (0: the lowest rate), eps (1e-8: smaller falls are left out).
---@param optimizer table
---@param options? table
---@return ReduceLROnPlateau
return function(optimizer, options)
  if type(optimizer) ~= "table" or type(optimizer.groups) ~= "table" then
    arguments.fail("ReduceLROnPlateau: optimizer: expected an optimizer, got %s", arguments.describe(optimizer))
  end
  local o = arguments.read("ReduceLROnPlateau", options, defaults, kinds)
  return setmetatable({ optimizer = optimizer, options = o, best = o.mode == "min" and math.huge or -math.huge, bad = 0,
    steps = 0, waiting = 0 }, Plateau)
end
