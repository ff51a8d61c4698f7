--- DoG: gradient descent whose rate is the distance from the start over the root of the gradients' squares.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local Optimizer = require "tycho.optim.optimizer"
local lowrank = require "tycho.optim.lowrank"

local function copy(p) return p:detach():clone() end

local rules = { composed = true, eager = true, methods = {} }

-- `distance` and `squares` are those of one tensor (DoG for each layer); without them all tensors are one vector.
local function number(p) return ty.zeros({}, { dtype = "f64", device = p.device }) end
rules.slots = {
  whole = { start = copy }, layers = { start = copy, distance = number, squares = number },
  whole_averaged = { start = copy, average = copy },
  layers_averaged = { start = copy, average = copy, distance = number, squares = number },
}

function rules.kind(group)
  return (group.layers and "layers" or "whole") .. (group.averaging > 0 and "_averaged" or "")
end

local function square(x) return x:to("f64"):square():sum():item() end

-- What came of a tensor: its gradient, its square, how far it is from the start and how long it was there.
local function seen(batch, i, group, clip)
  return ty.scope(function()
    local g, p = lowrank.clipped(batch.grads[i], clip), batch.params[i]
    if group.weight_decay ~= 0 then g = g + p * group.weight_decay end
    return { squares = square(g), moved = square(p - batch.start[i]), length = square(batch.start[i]), gradient = g }
  end)
end

-- The rate of one vector, whose sums are kept in `of`: r / sqrt(G), r the largest distance so far (equation 2).
local function advance(of, all, first, squares, moved, length)
  if first then of.distance, of.squares = all.first_distance * (1 + math.sqrt(length)), all.eps end
  of.distance = math.max(of.distance, math.sqrt(moved))
  of.squares = of.squares + squares
  return of.squares > 0 and of.distance / math.sqrt(of.squares) or 0.0
end

-- x = (1 - (1 + a) / (t + a)) x + (1 + a) / (t + a) p: the later weights count more, as t^a.
local function average(batch, i, a)
  batch.average[i]:lerp_(batch.params[i], (1 + a) / (batch.step + a))
end

function rules.together(self, parts, clip)
  local all = self.groups[1]
  if all.shows_average then
    arguments.fail("%s: step: the parameters are the averages; call train() first", self.name)
  end
  local list, squares, moved, length = {}, 0.0, 0.0, 0.0
  for _, part in ipairs(parts) do
    for i in ipairs(part.batch.params) do
      local new = seen(part.batch, i, part.group, clip)
      new.part, new.i = part, i
      squares, moved, length = squares + new.squares, moved + new.moved, length + new.length
      list[#list + 1] = new
    end
  end
  local shared = not all.layers and advance(all, all, all.distance == nil, squares, moved, length)
  for _, new in ipairs(list) do
    local part, i = new.part, new.i
    local batch, rate = part.batch, shared
    if not rate then
      local of = { distance = batch.distance[i]:item(), squares = batch.squares[i]:item() }
      rate = advance(of, all, batch.step == 1, new.squares, new.moved, new.length)
      batch.distance[i]:fill_(of.distance)
      batch.squares[i]:fill_(of.squares)
    end
    ty.scope(function()
      lowrank.descend(batch, i, new.gradient, part.lr * rate, 0, clip)
      if part.group.averaging > 0 then average(batch, i, part.group.averaging) end
    end)
  end
end

-- The weights and their averages change places.
local function show(self, averages)
  local all = self.groups[1]
  if (all.shows_average or false) == averages then return self end
  ty.no_grad(function()
    for p, state in pairs(self.state) do
      if state.average then
        local now = copy(p)
        p:copy_(state.average)
        state.average:copy_(now)
      end
    end
  end)
  all.shows_average = averages
  return self
end

--- Puts the averages into the parameters, to be evaluated and saved, until train() is called.
---@return Optimizer self
function rules.methods:eval() return show(self, true) end

--- Puts back what is trained; a step asks for it.
---@return Optimizer self
function rules.methods:train() return show(self, false) end

--- Gradient descent without a rate: the step is as long as the largest distance from the start so far, over the root of
-- the sum of all squared gradients. The first is first_distance (1 + |x_0|). What it finds is the average of the
-- weights, which opt:eval() puts into the parameters and opt:train() takes out again. Ivgi, Hinder and Carmon 2023,
-- "DoG is SGD's Best Friend", equations 1 and 2 and section 4.1; averages as Shamir and Zhang 2013 have them.
-- options: lr (1), first_distance (1e-6; 1e-4 where there is batch normalisation), layers (false; true is L-DoG: a rate
-- for each tensor), averaging (8: the later of t weights count by t to this power; 0: no average), eps (1e-8),
-- weight_decay (0: added to the gradient); clip_norm, clip_value, schedule, ema. Not inside ty.compile.
---@type fun(parameters: Module|Tensor[]|Tensor|table[], options?: table): Optimizer
local DoG = Optimizer.define("DoG", { lr = 1, first_distance = 1e-6, layers = false, averaging = 8, eps = 1e-8,
  weight_decay = 0 }, rules)

return DoG
