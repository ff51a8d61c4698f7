--- L-BFGS: quasi-Newton steps from a short history of gradients, with a line search.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local closures = require "tycho.optim.closures"
local Optimizer = require "tycho.optim.optimizer"

local expect, fail = arguments.expect, arguments.fail

---@class LBFGS
---@field groups table[]  one, whose lr may be changed at any time
---@field steps integer   calls of step()
local LBFGS = {}
LBFGS.__index = LBFGS

local function dot(a, b) return (a * b):sum():item() end
local function largest(x) return x:numel() > 0 and x:abs():max():item() or 0 end

-- All gradients as one vector; zeros where there is none.
local function flat_gradient(params)
  local parts = {}
  for i, p in ipairs(params) do
    parts[i] = (p.grad or ty.zeros_like(p)):detach():reshape(-1):to(params[1].dtype)
  end
  return ty.concat(parts)
end

local function flat_values(params)
  local parts = {}
  for i, p in ipairs(params) do parts[i] = p:detach():reshape(-1):to(params[1].dtype) end
  return ty.concat(parts)
end

local function set_values(params, flat)
  ty.no_grad(function()
    local at = 0
    for _, p in ipairs(params) do
      p:copy_(flat:narrow(0, at, p:numel()):reshape(p.shape))
      at = at + p:numel()
    end
  end)
end

-- Loss and gradient with the parameters as they are.
local function evaluate(self, closure)
  for _, p in ipairs(self.groups[1].params) do p:set_grad() end
  local loss = closures.backward_of("LBFGS:step", closure(), self.groups)
  self.evaluated = self.evaluated + 1
  return loss:detach():item(), flat_gradient(self.groups[1].params)
end

-- Where the cubic through two points with slopes has its least value, kept away from the ends. Nocedal and Wright 2006,
-- equation 3.59.
local function cubic(a, b)
  local d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.t - b.t)
  local square = d1 * d1 - a.slope * b.slope
  local low, high = math.min(a.t, b.t), math.max(a.t, b.t)
  local t
  if square >= 0 then
    local d2 = (b.t > a.t and 1 or -1) * math.sqrt(square)
    t = b.t - (b.t - a.t) * (b.slope + d2 - d1) / (b.slope - a.slope + 2 * d2)
  end
  local margin = 0.1 * (high - low)
  if not t or t ~= t or t < low + margin or t > high - margin then t = 0.5 * (low + high) end
  return t
end

local c1, c2, most = 1e-4, 0.9, 25

-- A rate along d at which the loss has fallen enough and the slope has become small: the strong conditions of Wolfe.
-- try(t) gives a point { t, loss, gradient, slope }; start is that of t = 0. Nocedal and Wright 2006, algorithms 3.5
-- and 3.6.
local function strong_wolfe(try, start, t)
  local function falls(x) return x.loss <= start.loss + c1 * x.t * start.slope end -- false for NaN too
  local function flat(x) return math.abs(x.slope) <= -c2 * start.slope end
  local before, count = start, 0
  local low, high
  while count < most do
    local x = try(t)
    count = count + 1
    if not falls(x) or (count > 1 and x.loss >= before.loss) then
      low, high = before, x
      break
    end
    if flat(x) then return x end
    if x.slope >= 0 then
      low, high = x, before
      break
    end
    before, t = x, 2 * t
  end
  if not high then return before end -- it falls for ever
  while count < most and math.abs(high.t - low.t) * math.abs(low.slope) > 1e-16 do
    local x = try(high.loss - high.loss == 0 and cubic(low, high) or 0.5 * (low.t + high.t))
    count = count + 1
    if not falls(x) or x.loss >= low.loss then
      high = x
    else
      if flat(x) then return x end
      if x.slope * (high.t - low.t) >= 0 then high = low end
      low = x
    end
  end
  return low
end

-- Minus the inverse Hessian, as the history has it, times g. Nocedal and Wright 2006, algorithm 7.4.
local function direction_of(state, g)
  local q, weights = -g, {}
  for i = #state.moves, 1, -1 do
    weights[i] = dot(state.moves[i], q) / state.products[i]
    q = q - state.changes[i] * weights[i]
  end
  q = q * state.scale
  for i = 1, #state.moves do
    q = q + state.moves[i] * (weights[i] - dot(state.changes[i], q) / state.products[i])
  end
  return q
end

local function remember(state, move, change, history)
  local product = dot(move, change)
  if product ~= product or product <= 1e-10 then return end -- the curvature is not that of a minimum
  if #state.moves >= history then
    for _, list in ipairs { state.moves, state.changes, state.products } do table.remove(list, 1) end
  end
  local n = #state.moves + 1
  state.moves[n], state.changes[n], state.products[n] = ty.keep(move), ty.keep(change), product
  state.scale = product / dot(change, change)
end

-- One iteration from a point { loss, gradient }: the next one, or nil where there is no way down.
local function iterate(self, closure, point, last)
  local o, state, params = self.options, self.state, self.groups[1].params
  local g = point.gradient
  if state.iterations > 0 then
    remember(state, state.direction * state.t, g - state.gradient, o.history)
  end
  state.iterations = state.iterations + 1
  local d = direction_of(state, g)
  local t = self.groups[1].lr
  if state.iterations == 1 then t = t * math.min(1, 1 / g:abs():sum():item()) end
  state.direction, state.gradient, state.t = ty.keep(d), ty.keep(g), t
  local slope = dot(g, d)
  if slope > -o.tolerance_change then return nil end
  local from = flat_values(params)
  local function try(at)
    set_values(params, from + d * at)
    local loss, gradient = evaluate(self, closure)
    return { t = at, loss = loss, gradient = gradient, slope = dot(gradient, d) }
  end
  if o.line_search == "none" then
    if not last then return try(t) end
    set_values(params, from + d * t)
    return { t = t, loss = point.loss, gradient = g }
  end
  local found = strong_wolfe(try, { t = 0, loss = point.loss, gradient = g, slope = slope }, t)
  set_values(params, from + d * found.t)
  state.t = found.t
  return found
end

--- Up to `iterations` iterations. closure() computes the loss with the weights as they are; gradients and backward
-- passes are this function's. Returns the loss before the step, a number.
---@param closure fun(): Tensor
---@return number loss
function LBFGS:step(closure)
  expect("LBFGS:step", "closure", closure, "a function")
  if ty.core.program.is_compiling() then
    arguments.fail("LBFGS: does not work inside ty.compile: how often it calls closure() depends on values; compile "
      .. "the closure")
  end
  expect("LBFGS", "lr", self.groups[1].lr, "a finite number > 0")
  local o = self.options
  self.evaluated = 0
  local first, g = evaluate(self, closure)
  local point = { loss = first, gradient = g }
  for i = 1, o.iterations do
    if largest(point.gradient) <= o.tolerance_grad or self.evaluated >= o.evaluations then break end
    local last = i == o.iterations
    local new = iterate(self, closure, point, last)
    if not new then break end
    local moved = largest(self.state.direction) * self.state.t
    local change = math.abs(new.loss - point.loss)
    point = new
    if not last and (moved <= o.tolerance_change or change < o.tolerance_change) then break end
  end
  self.steps = self.steps + 1
  self:zero_grad()
  require("tycho.optim.watcher").stepped(self)
  return first
end

--- Drops the gradients of all parameters.
function LBFGS:zero_grad()
  for _, p in ipairs(self.groups[1].params) do p:set_grad() end
end

--- Everything needed to go on bit for bit.
function LBFGS:state_dict()
  local s = self.state
  local state = { iterations = s.iterations, scale = s.scale, t = s.t, direction = s.direction, gradient = s.gradient,
    products = ty.tensor(s.products, { dtype = "f64" }) }
  if #s.moves > 0 then
    state.moves, state.changes = ty.stack(s.moves), ty.stack(s.changes)
  end
  return { steps = self.steps, groups = { { lr = self.groups[1].lr, count = #self.groups[1].params } }, state = state }
end

local function rows(t, n)
  local list = {}
  for i = 1, n do list[i] = ty.keep(t:select(0, i - 1):clone()) end
  return list
end

--- Takes over a state_dict() of an optimizer with the same parameters in the same order.
function LBFGS:load_state_dict(state)
  local who = "LBFGS:load_state_dict"
  expect(who, "state", state, "a table")
  expect(who, "state.groups", state.groups, "a list of tables")
  expect(who, "state.state", state.state, "a table")
  expect(who, "state.steps", state.steps, "an integer >= 0")
  local s, own = state.state, self.groups[1]
  local group = expect(who, "state.groups[1]", state.groups[1], "a table")
  expect(who, "state.groups[1].lr", group.lr, "a finite number > 0")
  expect(who, "state.state.iterations", s.iterations, "an integer >= 0")
  if group.count ~= #own.params then
    fail("LBFGS: group 1 of the state has %s parameters, the optimizer %d", tostring(group.count), #own.params)
  end
  local total = 0
  for _, p in ipairs(own.params) do total = total + p:numel() end
  local new = { iterations = s.iterations, moves = {}, changes = {}, products = {}, scale = 1 }
  if s.iterations > 0 then
    local like = own.params[1]
    local function vector(name, ndim)
      local t = expect(who, "state.state." .. name, s[name], "a tensor")
      if t.ndim ~= ndim or t:size(-1) ~= total then
        fail("LBFGS: %s of the state has shape [%s], expected %d numbers", name, table.concat(t.shape, ", "), total)
      end
      return t:to { device = like.device, dtype = like.dtype }
    end
    new.t = expect(who, "state.state.t", s.t, "a finite number")
    new.scale = expect(who, "state.state.scale", s.scale, "a finite number")
    new.direction, new.gradient = ty.keep(vector("direction", 1):clone()), ty.keep(vector("gradient", 1):clone())
    new.products = expect(who, "state.state.products", s.products, "a tensor"):tolist()
    if #new.products > 0 then
      local moves, changes = vector("moves", 2), vector("changes", 2)
      if moves:size(0) ~= #new.products or changes:size(0) ~= #new.products then
        fail("LBFGS: moves and changes of the state: expected %d rows", #new.products)
      end
      new.moves, new.changes = rows(moves, #new.products), rows(changes, #new.products)
    end
  end
  own.lr, self.steps, self.state = group.lr, state.steps, new
end

local defaults = { lr = 1, iterations = 20, evaluations = arguments.none, tolerance_grad = 1e-7,
  tolerance_change = 1e-9, history = 100, line_search = "none" }
local kinds = { lr = "a finite number > 0", iterations = "an integer >= 1", evaluations = "an integer >= 1",
  tolerance_grad = "a finite number >= 0", tolerance_change = "a finite number >= 0", history = "an integer >= 1",
  line_search = '"none" or "strong_wolfe"' }

--- Newton's method with an inverse Hessian that `history` pairs of steps and changes of the gradient give, for smooth
-- losses of all the data. Liu and Nocedal 1989.
--
--     local opt = optim.LBFGS(parameters, { line_search = "strong_wolfe" })
--     local loss = opt:step(function() return loss_of(parameters) end)
--
-- options: lr (1), iterations (20: of a step), evaluations (5/4 of them: of the closure, after which no iteration
-- begins), tolerance_grad (1e-7: of its largest element), tolerance_change (1e-9: of the loss, and of the largest
-- element of a move), history (100), line_search ("none": lr times the direction; "strong_wolfe").
---@param parameters Module|Tensor[]|Tensor
---@param options? table
---@return LBFGS
return function(parameters, options)
  local o = arguments.read("LBFGS", options, defaults, kinds)
  o.evaluations = o.evaluations or o.iterations * 5 // 4
  local params = Optimizer.parameters_of("LBFGS", parameters)
  if #params == 0 then fail("LBFGS: parameters: expected at least one tensor, got none") end
  for i, p in ipairs(params) do
    if not ty.is_tensor(p) or not p.is_leaf then
      fail("LBFGS: parameters: expected leaves alone, got %s as number %d", arguments.describe(p), i)
    end
  end
  local groups = { { params = params, lr = o.lr } }
  return setmetatable({ name = "LBFGS", options = o, steps = 0, groups = groups, param_groups = groups,
    state = { iterations = 0, moves = {}, changes = {}, products = {}, scale = 1 } }, LBFGS)
end
