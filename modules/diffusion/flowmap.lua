--- Flow maps: networks of two times that jump along the paths of a flow, learnt by being their own teachers. Boffi,
-- Albergo and Vanden-Eijnden 2025, "How to build a consistency model: Learning flow maps via self-distillation".
--
--     local map = diffusion.FlowMap(models.TimeMLP { features = 2 }, { scale = 10 })
--     local loss = map:loss(points, {}, { kind = "lagrangian" })
--     local drawn = map:sample({ 1000, 2 }, { steps = 1 })
--
-- With X_{s,t}(x) = x + (t - s) v_{s,t}(x), which takes a point of a path at time s to its point at time t, v_{t,t} is
-- the velocity of the flow: that is trained by flow matching, and one of three conditions that characterise the map of
-- this very velocity says what v_{s,t} is elsewhere:
--
--     lagrangian    d/dt X_{s,t}(x) = v_{t,t}(X_{s,t}(x))
--     eulerian      d/ds X_{s,t}(x) + dX_{s,t}/dx v_{s,s}(x) = 0
--     progressive   X_{s,t}(x) = X_{u,t}(X_{s,u}(x)), s > u > t
--
-- Times are those of schedule.flow: 0 is clean and 1 noise (the paper counts the other way), so that s >= t in
-- sampling. "sg" below is what no gradients pass through. Derivatives are ty.jvp's, exact and differentiable.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
local embedder_of = require "tycho.diffusion.embedder"

local nn = ty.nn
local expect, fail, none = arguments.expect, arguments.fail, arguments.none

-- ---- the conditions, for any function v(x, s, t, condition) ----

-- A time [n] that broadcasts to x.
local function column(t, x)
  local shape = { t.shape[1] }
  for i = 2, x.ndim do shape[i] = 1 end
  return t:reshape(shape)
end

local function jump(v, x, s, t, condition) return x + column(t - s, x) * v(x, s, t, condition) end

-- Mean square of each sample, [n].
local function squares(x) return x:square():flatten(1):mean { 1 } end

local conditions_of = {}

--- |d/dt X_{s,t}(x) - sg v_{t,t}(X_{s,t}(x))|^2.
function conditions_of.lagrangian(v, teacher, batch)
  local x, s, t, c = batch.x, batch.s, batch.t, batch.condition
  local reached, speed = ty.jvp(function(to) return jump(v, x, s, to, c) end, t, ty.ones_like(t),
    { create_graph = true })
  local target = ty.no_grad(function() return teacher(reached:detach(), t, t, c) end)
  return squares(speed - target)
end

--- |d/ds X_{s,t}(x) + sg[dX_{s,t}/dx v_{s,s}(x)]|^2. `stop` says what of it gets no gradients: "advection" the whole
-- second term, "velocity" v_{s,s} alone; "derivatives" all but v_{s,t} itself, which makes it the loss of Geng et al.
-- 2025, "Mean Flows for One-step Generative Modeling".
function conditions_of.eulerian(v, teacher, batch, stop)
  local x, s, t, c = batch.x, batch.s, batch.t, batch.condition
  local one = ty.ones_like(s)
  local velocity = ty.no_grad(function() return teacher(x, s, s, c) end)
  if stop == "derivatives" then
    local _, slope = ty.jvp(function(at, from) return teacher(at, from, t, c) end, { x, s }, { velocity, one })
    return squares(v(x, s, t, c) - velocity - column(t - s, x) * slope)
  elseif stop == "velocity" then
    local _, change = ty.jvp(function(at, from) return jump(v, at, from, t, c) end, { x, s }, { velocity, one },
      { create_graph = true })
    return squares(change)
  end
  local _, change = ty.jvp(function(from) return jump(v, x, from, t, c) end, s, one, { create_graph = true })
  local _, advection = ty.jvp(function(at) return jump(teacher, at, s, t, c) end, x, velocity)
  return squares(change + advection)
end

--- |v_{s,t}(x) - sg[(u - s) v_{s,u}(x) + (t - u) v_{u,t}(X_{s,u}(x))] / (t - s)|^2: the difference of the two ways from
-- s to t, divided by (t - s)^2.
function conditions_of.progressive(v, teacher, batch)
  local x, s, t, u, c = batch.x, batch.s, batch.t, batch.u, batch.condition
  local target = ty.no_grad(function()
    local first = teacher(x, s, u, c)
    local second = teacher(x + column(u - s, x) * first, u, t, c)
    local share = column((u - s) / (t - s), x)
    return share * first + (1 - share) * second
  end)
  return squares(v(x, s, t, c) - target)
end

local KINDS = '"lagrangian" or "eulerian" or "progressive"'
local STOPS = '"advection" or "velocity" or "derivatives"'

-- ---- a network of two times ----

-- Adds to what a network makes of its time what is made of the length of the jump, while the map calls the network.
local second_time = nn.surgery.wrapper { name = "TwoTime", field = "_two_times", forward = function(base)
  return function(self, ...)
    local y = base.forward(self, ...)
    local more = self._two_times.embedded
    return more and y + more:to(y.dtype) or y
  end
end }

local Span = nn.module "FlowMapSpan"

function Span:init(waves, width, outputs)
  self.frequencies = nn.Sinusoidal(waves)
  self.fc1, self.fc2 = nn.Linear(waves, width), nn.Linear(width, outputs)
  nn.init.zeros(self.fc2.weight)
  nn.init.zeros(self.fc2.bias)
end

function Span:forward(length) return self.fc2(self.fc1(self.frequencies(length)):silu()) end

-- The logarithm of the error expected at s and t, by which losses are balanced. Karras et al. 2024, "Analyzing and
-- Improving the Training Dynamics of Diffusion Models", section 2.4 and appendix B.2, with a second time.
local Balance = nn.module "FlowMapBalance"

function Balance:init(waves)
  self.frequencies, self.linear = nn.Sinusoidal(waves), nn.Linear(2 * waves, 1)
  nn.init.zeros(self.linear.weight)
  nn.init.zeros(self.linear.bias)
end

function Balance:forward(s, t)
  return self.linear(ty.concat({ self.frequencies(s), self.frequencies(t) }, 1)):squeeze(1)
end

---@class FlowMap: Module
---@field network Module
---@field scale number
local FlowMap = nn.module "FlowMap"

--- A flow map of any network model(x, time, condition): what the network makes of its time gets a second part, of
-- s - t, which is 0 at the start, so that a trained network begins as what it was. options: embedder (the name of the
-- module that embeds the time: its output's last dimension is what the second part is added to; found by itself in the
-- networks of tycho.models), scale (1000: the network's time at t = 1. Derivatives by the times grow with it: 10 or so
-- for a network that is trained from the start), waves (64), width (128: of the second part's hidden layer).
function FlowMap:init(network, options)
  local who = "FlowMap"
  expect(who, "network", network, "a module")
  local o = arguments.read(who, options, { embedder = none, scale = 1000, waves = 64, width = 128 },
    { embedder = "a string", scale = "a finite number > 0", waves = "an integer >= 2", width = "an integer >= 1" })
  local embedder, outputs = embedder_of(who, network, o.embedder)
  self.network, self.scale = network, o.scale
  self.span = Span(o.waves, o.width, outputs)
  self.balance = Balance(o.waves)
  self.state = second_time:state(second_time:wrap(embedder, {}))
end

--- v_{s,t}(x): the mean velocity on the way from time s to time t; the velocity of the flow where they are equal.
---@param x Tensor   [n, ...]
---@param s Tensor   [n]
---@param t Tensor   [n]
---@param condition? table
---@return Tensor
function FlowMap:forward(x, s, t, condition)
  expect("FlowMap", "x", x, "a tensor")
  expect("FlowMap", "s", s, "a tensor")
  expect("FlowMap", "t", t, "a tensor")
  self.state.embedded = self.span((s - t) * self.scale)
  local result = table.pack(pcall(self.network, x, s * self.scale, condition or {}))
  self.state.embedded = nil
  if not result[1] then error(result[2], 0) end
  return result[2]
end

--- X_{s,t}(x), the point at time t of the path that is at x at time s.
---@param x Tensor
---@param s Tensor  [n]
---@param t Tensor  [n]
---@param condition? table
---@return Tensor
function FlowMap:jump(x, s, t, condition)
  expect("FlowMap:jump", "x", x, "a tensor")
  expect("FlowMap:jump", "s", s, "a tensor")
  expect("FlowMap:jump", "t", t, "a tensor")
  return jump(self, x, s, t, condition)
end

--- Takes the second time away again; the network is a plain one.
---@return Module network
function FlowMap:unwrap()
  for _, layer in ipairs(second_time:wrapped("FlowMap:unwrap", self.network)) do second_time:unwrap(layer.module) end
  return self.network
end

-- Points between clean samples and noise at times t, and their velocities.
local function between(x0, noise, t) return x0 + column(t, x0) * (noise - x0), noise - x0 end

--- Errors of one of the conditions, of any functions of (x, s, t, condition): the mean square of each sample, [n].
-- batch: { x [n, ...], s, t, u (between them, for progressive) [n], condition }. teacher: in the places without
-- gradients (v). options: kind ("lagrangian", "eulerian", "progressive"), stop (eulerian: "advection", "velocity",
-- "derivatives").
---@param v function
---@param batch table
---@param options? { kind?: string, stop?: string, teacher?: function }
---@return Tensor
local function errors(v, batch, options)
  local who = "flowmap.errors"
  expect(who, "v", v, "a function")
  expect(who, "batch", batch, "a table")
  local o = arguments.read(who, options, { kind = "lagrangian", stop = "advection", teacher = none },
    { kind = KINDS, stop = STOPS, teacher = "a function" })
  for _, name in ipairs { "x", "s", "t", o.kind == "progressive" and "u" or nil } do
    expect(who, "batch." .. name, batch[name], "a tensor")
  end
  return conditions_of[o.kind](v, o.teacher or v, batch, o.stop)
end

--- The loss of self-distillation on clean samples: flow matching at s = t on a share of the batch, one of the
-- conditions on the rest, each balanced by its learned weight w(s, t): exp(-w) error + w. Returns it, and the mean
-- errors of both. options: kind ("lagrangian"; nil with share = 1: flow matching alone), stop (of eulerian), share
-- (0.75: of the batch, on the diagonal), balance (true), teacher (the map itself; its moving average, say), s, t, u
-- ([rest], drawn evenly: the larger of two is s), noise (as x0, drawn), times (the diagonal's, drawn evenly).
---@param x0 Tensor  [n, ...]
---@param condition? table
---@param options? table
---@return Tensor loss
---@return table<string, number> errors  diagonal, rest
function FlowMap:loss(x0, condition, options)
  local who = "FlowMap:loss"
  expect(who, "x0", x0, "a tensor")
  local o = arguments.read(who, options, { kind = "lagrangian", stop = "advection", share = 0.75, balance = true,
    teacher = none, s = none, t = none, u = none, noise = none, times = none },
    { kind = KINDS, stop = STOPS, share = "a number in [0, 1]", teacher = "a function", s = "a tensor",
      t = "a tensor", u = "a tensor", noise = "a tensor", times = "a tensor" })
  local n = x0.ndim >= 2 and x0:numel() > 0 and x0.shape[1]
  if not n then fail("%s: x0: expected a tensor [n, ...] with elements, got %s", who, arguments.describe(x0)) end
  condition = condition or {}
  conditions.check_batch(who, condition, n)
  local where = { device = x0.device, dtype = x0.dtype }
  local diagonal = math.floor(o.share * n + 0.5)
  local rest, noise = n - diagonal, o.noise or ty.randn_like(x0)
  local sum, found = nil, {}
  local function count(errors_of, s, t, name)
    found[name] = errors_of:detach():mean():item()
    if o.balance then
      local w = self.balance(s * self.scale, t * self.scale)
      errors_of = errors_of * (-w):exp() + w
    end
    sum = sum and sum + errors_of:sum() or errors_of:sum()
  end
  if diagonal > 0 then
    local times = o.times or ty.rand({ diagonal }, where)
    local x, velocity = between(x0:narrow(0, 0, diagonal), noise:narrow(0, 0, diagonal), times)
    local v = self(x, times, times, conditions.narrow(condition, 0, diagonal))
    count(squares(v - velocity), times, times, "diagonal")
  end
  if rest > 0 then
    local a, b = o.s or ty.rand({ rest }, where), o.t or ty.rand({ rest }, where)
    local s, t = ty.maximum(a, b), ty.minimum(a, b)
    local u = o.u or t + (s - t) * ty.rand({ rest }, where)
    local x = between(x0:narrow(0, diagonal, rest), noise:narrow(0, diagonal, rest), s)
    count(errors(self, { x = x, s = s, t = t, u = u, condition = conditions.narrow(condition, diagonal, rest) },
      { kind = o.kind, stop = o.stop, teacher = o.teacher }), s, t, "rest")
  end
  return sum / n, found
end

--- Samples of a shape in a few jumps, at even distances from noise to clean; without gradients. options: steps (1),
-- condition ({}), noise (drawn), euler (false; true: steps of length 1 / steps along v_{s,s} instead of jumps).
---@param shape integer[]
---@param options? { steps?: integer, condition?: table, noise?: Tensor, euler?: boolean }
---@return Tensor
function FlowMap:sample(shape, options)
  local who = "FlowMap:sample"
  expect(who, "shape", shape, "a list of integers >= 1")
  local o = arguments.read(who, options, { steps = 1, condition = {}, noise = none, euler = false },
    { steps = "an integer >= 1", noise = "a tensor" })
  conditions.check_batch(who, o.condition, shape[1])
  local device = self:device()
  local x = o.noise or ty.randn(shape, { device = device })
  return ty.no_grad(function()
    for i = o.steps, 1, -1 do
      x = ty.scope(function()
        local s = ty.full({ shape[1] }, i / o.steps, { device = device, dtype = x.dtype })
        local v = self(x, s, o.euler and s or s - 1 / o.steps, o.condition)
        return x - v / o.steps
      end)
    end
    return x
  end)
end

FlowMap.errors = errors

return FlowMap
