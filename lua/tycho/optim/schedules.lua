--- Learning-rate schedules: each maker returns a function of the number of steps done (0 before the first) to a factor
-- of the base rate. Give one to an optimizer as `schedule`, or drive several groups with optim.Scheduler.
local arguments = require "tycho.arguments"
local program = require("tycho.core").program

local schedules = {}

local expect = arguments.expect
local kinds = { steps = "an integer >= 1", warmup = "a finite number >= 0", final = "a finite number >= 0",
  every = "an integer >= 0", milestones = "a list of finite numbers", gamma = "a finite number >= 0",
  power = "a finite number >= 0", growth = "an integer >= 1", up = "an integer >= 1", down = "an integer >= 0",
  low = "a number in [0, 1]", mode = '"triangular" or "triangular2" or "exponential"',
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

--- Times gamma every `every` steps, or at each of `milestones` (PyTorch's StepLR, MultiStepLR).
-- options: every, milestones, gamma (0.1).
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

--- From 1 to `final` along (1 - step / steps)^power, then constant. options: steps, power (1), final (0).
function schedules.polynomial(options)
  local o = read("polynomial", options, { steps = arguments.none, power = 1, final = 0 })
  return function(step) return o.final + (1 - o.final) * (1 - math.min(step, o.steps) / o.steps) ^ o.power end
end

--- Half a cosine down to `final`, again and again, each `growth` times as long as the last. Loshchilov and Hutter 2017.
-- options: steps (of the first), growth (1), final (0).
function schedules.cosine_restarts(options)
  local o = read("cosine_restarts", options, { steps = arguments.none, growth = 1, final = 0 })
  return function(step)
    local length = o.steps
    if o.growth == 1 then
      step = step % length
    else
      while step >= length do step, length = step - length, length * o.growth end
    end
    return o.final + (1 - o.final) * 0.5 * (1 + math.cos(math.pi * step / length))
  end
end

--- Up from `low` to 1 in `up` steps and down again in `down`, over and over. Smith 2017.
-- options: up, down (as many), low (0.1), mode ("triangular"; "triangular2": each cycle half as high as the last;
-- "exponential": the height times gamma at each step), gamma (1).
function schedules.cyclic(options)
  local o = read("cyclic", options, { up = arguments.none, down = 0, low = 0.1, mode = "triangular", gamma = 1 })
  expect("cyclic", "up", o.up, kinds.up)
  local down = o.down > 0 and o.down or o.up
  return function(step)
    local cycle, at = step // (o.up + down), step % (o.up + down)
    local height = at <= o.up and at / o.up or (o.up + down - at) / down
    if o.mode == "triangular2" then height = height / 2 ^ cycle
    elseif o.mode == "exponential" then height = height * o.gamma ^ step end
    return o.low + (1 - o.low) * height
  end
end

local function check_schedules(who, list)
  expect(who, "schedules", list, "a list of functions")
  if #list == 0 then arguments.fail("%s: schedules: expected at least one, got an empty table", who) end
end

--- One schedule after the other: the next begins, from its step 0, at each of `milestones`.
---@param list (fun(step: integer): number)[]
---@param milestones integer[]  one less than schedules, rising
function schedules.sequential(list, milestones)
  check_schedules("sequential", list)
  expect("sequential", "milestones", milestones, "a list of integers >= 0")
  if #milestones ~= #list - 1 then
    arguments.fail("sequential: milestones: expected %d, one less than schedules, got %d", #list - 1, #milestones)
  end
  for i = 2, #milestones do
    if milestones[i] <= milestones[i - 1] then
      arguments.fail("sequential: milestones: expected rising numbers, got %d after %d", milestones[i],
        milestones[i - 1])
    end
  end
  return function(step)
    local i = 1
    while milestones[i] and step >= milestones[i] do i = i + 1 end
    return list[i](step - (milestones[i - 1] or 0))
  end
end

--- The product of several schedules.
---@param list (fun(step: integer): number)[]
function schedules.chained(list)
  check_schedules("chained", list)
  return function(step)
    local factor = 1
    for _, schedule in ipairs(list) do factor = factor * schedule(step) end
    return factor
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

--- Call step() after each optimizer step. schedule: one for all groups, or a list with one for each.
---@param optimizer table
---@param schedule (fun(step: integer): number)|(fun(step: integer): number)[]
function schedules.Scheduler(optimizer, schedule)
  if type(optimizer) ~= "table" or type(optimizer.groups) ~= "table" then
    arguments.fail("Scheduler: optimizer: expected an optimizer, got %s", arguments.describe(optimizer))
  end
  expect("Scheduler", "schedule", schedule, "a function or a list of functions")
  local each = not arguments.is_callable(schedule)
  if each and #schedule ~= #optimizer.groups then
    arguments.fail("Scheduler: schedule: expected one for each of %d groups, got %d", #optimizer.groups, #schedule)
  end
  local self = setmetatable({ optimizer = optimizer, schedule = schedule, each = each, steps = 0, base = {} },
    Scheduler)
  for i, group in ipairs(optimizer.groups) do self.base[i] = group.lr end
  self:_set()
  return self
end

function Scheduler:_set()
  local schedule, factor = self.schedule, nil
  for i, group in ipairs(self.optimizer.groups) do
    if self.each or not factor then
      factor = (self.each and schedule[i] or schedule)(self.steps)
      expect("Scheduler", ("schedule(%d)"):format(self.steps), factor, "a finite number >= 0")
    end
    self.base[i] = self.base[i] or group.lr -- of a group that came later
    group.lr = self.base[i] * factor
  end
end

--- Goes on to the next step's rate.
function Scheduler:step()
  program.on_replay(function() self:step() end)
  self.steps = self.steps + 1
  self:_set()
end

--- The rates of the groups now.
---@return number[]
function Scheduler:get_last_lr()
  local rates = {}
  for i, group in ipairs(self.optimizer.groups) do rates[i] = group.lr end
  return rates
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
