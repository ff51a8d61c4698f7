--- Learning-rate schedules: each maker returns a function of the number of steps done (0 before the first) to a factor
-- of the base rate. Give one to an optimizer as `schedule`, or drive several groups with optim.Scheduler.
local arguments = require "tycho.arguments"
local program = require("tycho.core").program

local schedules = {}

local expect = arguments.expect
local kinds = { steps = "an integer >= 1", warmup = "a finite number >= 0", final = "a finite number >= 0",
  every = "an integer >= 0", milestones = "a list of finite numbers", gamma = "a finite number >= 0",
  peak = "a number in [0, 1]", start = "a finite number > 0", finish = "a finite number > 0" }

-- Options as arguments.read has them; `steps`, which has no default, must be there.
local function read(who, options, defaults)
  local o = arguments.read(who, options, defaults, kinds)
  if defaults.steps then expect(who, "steps", o.steps, kinds.steps) end
  return o
end

--- 1 at every step.
function schedules.constant() return function() return 1 end end

--- From 1 / warmup up to 1 over the first `warmup` steps, then `after` (default: constant), counted from there.
function schedules.warmup(warmup, after)
  expect("warmup", "warmup", warmup, kinds.warmup)
  expect("warmup", "after", after, "a function or nil")
  return function(step)
    if step < warmup then return (step + 1) / warmup end
    return after and after(step - warmup) or 1
  end
end

--- Linear warm-up, then half a cosine down to `final` at the last step. Loshchilov and Hutter 2017.
-- options: steps, warmup (0), final (0).
function schedules.cosine(options)
  local o = read("cosine", options, { steps = arguments.none, warmup = 0, final = 0 })
  local span = math.max(1, o.steps - o.warmup)
  return schedules.warmup(o.warmup, function(step)
    local x = math.min(1, step / span)
    return o.final + (1 - o.final) * 0.5 * (1 + math.cos(math.pi * x))
  end)
end

--- Linear warm-up, then a straight line down to `final`. options: steps, warmup (0), final (0).
function schedules.linear(options)
  local o = read("linear", options, { steps = arguments.none, warmup = 0, final = 0 })
  local span = math.max(1, o.steps - o.warmup)
  return schedules.warmup(o.warmup, function(step)
    return 1 + (o.final - 1) * math.min(1, step / span)
  end)
end

--- Times gamma every `every` steps, or at each of `milestones`. options: every, milestones, gamma (0.1).
function schedules.step(options)
  local o = read("step", options, { every = 0, milestones = {}, gamma = 0.1 })
  return function(step)
    local passed = o.every > 0 and step // o.every or 0
    for _, milestone in ipairs(o.milestones) do
      if step >= milestone then passed = passed + 1 end
    end
    return o.gamma ^ passed
  end
end

--- Times gamma at every step.
function schedules.exponential(gamma)
  expect("exponential", "gamma", gamma, kinds.gamma)
  return function(step) return gamma ^ step end
end

local annealings = {
  cosine = function(a, b, x) return b + (a - b) * 0.5 * (1 + math.cos(math.pi * x)) end,
  linear = function(a, b, x) return a + (b - a) * x end,
}

--- Up from 1 / start to 1, then down to 1 / (start * finish) at the last step, as PyTorch's OneCycleLR. Smith and Topin
-- 2018. options: steps, peak (0.3: share of steps on the way up), start (25), finish (1e4), annealing ("cosine": both
-- ways by half cosines; or "linear").
function schedules.one_cycle(options)
  local o = read("one_cycle", options, { steps = arguments.none, peak = 0.3, start = 25, finish = 1e4,
    annealing = "cosine" })
  local between = annealings[o.annealing]
  if not between then
    arguments.fail("one_cycle: annealing: expected \"cosine\" or \"linear\", got %s", arguments.describe(o.annealing))
  end
  -- The published schedule is at the top when `up` steps are done, which may fall between two.
  local up, last = o.peak * o.steps - 1, o.steps - 1
  return function(step)
    if step < up then return between(1 / o.start, 1, step / up) end
    return between(1, 1 / (o.start * o.finish), last > up and math.min(1, (step - up) / (last - up)) or 0)
  end
end

--- Multiplies the rates of an optimizer's groups by a schedule; for optimizers made without `schedule`.
---@class Scheduler
local Scheduler = {}
Scheduler.__index = Scheduler

--- Call step() after each optimizer step.
---@param optimizer table
---@param schedule fun(step: integer): number
function schedules.Scheduler(optimizer, schedule)
  if type(optimizer) ~= "table" or type(optimizer.groups) ~= "table" then
    arguments.fail("Scheduler: optimizer: expected an optimizer, got %s", arguments.describe(optimizer))
  end
  expect("Scheduler", "schedule", schedule, "a function")
  local self = setmetatable({ optimizer = optimizer, schedule = schedule, steps = 0, base = {} }, Scheduler)
  for i, group in ipairs(optimizer.groups) do self.base[i] = group.lr end
  self:_set()
  return self
end

function Scheduler:_set()
  local factor = self.schedule(self.steps)
  expect("Scheduler", ("schedule(%d)"):format(self.steps), factor, "a finite number >= 0")
  for i, group in ipairs(self.optimizer.groups) do group.lr = self.base[i] * factor end
end

--- Goes on to the next step's rate.
function Scheduler:step()
  program.on_replay(function() self:step() end)
  self.steps = self.steps + 1
  self:_set()
end

function Scheduler:state_dict() return { steps = self.steps, base = { table.unpack(self.base) } } end

function Scheduler:load_state_dict(state)
  expect("Scheduler:load_state_dict", "state", state, "a table")
  expect("Scheduler:load_state_dict", "state.steps", state.steps, "an integer >= 0")
  expect("Scheduler:load_state_dict", "state.base", state.base, "a list of numbers")
  if #state.base ~= #self.optimizer.groups then
    arguments.fail("Scheduler:load_state_dict: state.base: expected %d rates, got %d", #self.optimizer.groups,
      #state.base)
  end
  self.steps, self.base = state.steps, { table.unpack(state.base) }
  self:_set()
end

return schedules
