--- What training would have come to with the same batches in another order, without training again.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local lowrank = require "tycho.optim.lowrank"
local Optimizer = require "tycho.optim.optimizer"

local expect, fail = arguments.expect, arguments.fail

--- What optim.order_effects makes: a recorded training run.
---@class OrderEffects
---@field count integer       batches of the recorded run
---@field terms integer       as the option; may be changed between estimates, as may damping
---@field bytes integer       of what is kept
---@field passes integer      backward passes that recording took
local OrderEffects = {}
OrderEffects.__index = OrderEffects

-- ---- parameters as one vector ----

local function flat(list)
  local parts, dtype = {}, list[1].dtype == "f64" and "f64" or "f32"
  for i, t in ipairs(list) do parts[i] = t:detach():reshape(-1):to(dtype) end
  return ty.concat(parts)
end

local function values(self) return ty.no_grad(ty.scope, flat, self.params) end

-- Writes a vector into the parameters, or hands it to them as their gradients.
local function set(self, vector, as_gradients)
  ty.no_grad(function()
    local at = 0
    for _, p in ipairs(self.params) do
      local part = vector:narrow(0, at, p:numel()):reshape(p.shape):to(p.dtype)
      if as_gradients then p:set_grad(part:clone()) else p:detach():copy_(part) end
      at = at + p:numel()
    end
  end)
end

local function drop_gradients(self) for _, p in ipairs(self.params) do p:set_grad() end end

-- The gradient of a batch where the parameters are, which the parameters keep.
local function backward(self, loss, batch)
  drop_gradients(self)
  ty.scope(function() expect("OrderEffects", ("loss(%d)"):format(batch), loss(batch), "a tensor"):backward() end)
end

local function gradient(self)
  return ty.no_grad(ty.scope, function()
    local list = {}
    for i, p in ipairs(self.params) do list[i] = p.grad or ty.zeros_like(p) end
    return flat(list)
  end)
end

-- ---- the random projection ----

-- Every number is added, with a sign of its own, to one of `dimensions` sums, each of as many numbers (a sparse
-- projection as Charikar et al. 2002 have it); back again it is the sum with the sign, which in the mean is the number.
local function projection(self, size)
  local each = (size + self.dimensions - 1) // self.dimensions
  local padded = each * self.dimensions
  local order, signs = lowrank.seeded(self.seed, function()
    return ty.randperm(padded), ty.randint(0, 2, { padded }):to(self.start.dtype) * 2 - 1
  end)
  local back = order:argsort()
  return {
    to = function(vector)
      if padded > size then vector = ty.concat { vector, ty.zeros({ padded - size }, { dtype = vector.dtype }) } end
      return (vector:index_select(0, order) * signs):reshape(self.dimensions, each):sum(1)
    end,
    from = function(sums)
      local spread = (sums:unsqueeze(1) * signs:reshape(self.dimensions, each)):reshape(-1)
      return spread:index_select(0, back):narrow(0, 0, size)
    end,
    keep = { order, signs, back },
  }
end

local function identity(t) return t end

-- ---- recording ----

--- Trains in the order 1, 2, ... `count` and keeps what estimate() needs: the trajectory, the gradient of each batch
-- where it was taken, and by what the gradients of all batches differ from these at the checkpoints. That is `count`
-- backward passes for training, and `count` more for each checkpoint. The parameters are then those at the end.
---@param count integer
---@param loss fun(batch: integer): Tensor  the loss of batch 1 .. count with the parameters as they are
---@return number[] losses  of the batches, in their order
function OrderEffects:record(count, loss)
  expect("OrderEffects:record", "count", count, "an integer >= 1")
  expect("OrderEffects:record", "loss", loss, "a function")
  self.count, self.loss, self.passes = count, loss, 0
  self.start = ty.keep(values(self))
  local size = self.start:numel()
  self.project = self.dimensions > 0 and self.dimensions < size and projection(self, size)
    or { to = identity, from = identity, keep = {} }
  for _, t in ipairs(self.project.keep) do ty.keep(t) end
  -- The run itself.
  local optimizer, losses, path, own = self.make(self.params), {}, {}, {}
  for t = 1, count do
    path[t] = ty.keep(values(self))
    drop_gradients(self)
    ty.scope(function()
      local value = expect("OrderEffects:record", ("loss(%d)"):format(t), loss(t), "a tensor")
      losses[t] = value:item()
      value:backward()
    end)
    own[t] = ty.keep(gradient(self))
    optimizer:step()
  end
  local final = values(self)
  self.passes = count
  -- Where every batch's gradient is looked at.
  self.points, self.differences = {}, {}
  for t = 1, count, self.every do
    local row = {}
    set(self, path[t])
    for batch = 1, count do
      if batch ~= t then
        backward(self, loss, batch)
        self.passes = self.passes + 1
        row[batch] = ty.keep(ty.no_grad(ty.scope, function()
          return self.project.to(gradient(self) - own[batch])
        end))
      end
    end
    self.points[#self.points + 1], self.differences[#self.points + 1] = t, row
  end
  set(self, final)
  drop_gradients(self)
  -- The trajectory from its start, as rows.
  self.path = ty.keep(ty.no_grad(ty.scope, function()
    local rows = {}
    for t = 1, count do rows[t] = path[t] - self.start end
    return ty.stack(rows)
  end))
  for _, t in ipairs(path) do t:free() end
  self.own = own
  self.products = self.path:to "f64"
  self.products = ty.keep(self.products:matmul(self.products:transpose(0, 1)))
  self.bytes = self.path:nbytes() + self.start:nbytes()
  for batch = 1, count do
    self.bytes = self.bytes + own[batch]:nbytes()
    for i in ipairs(self.points) do
      self.bytes = self.bytes + (self.differences[i][batch] and self.differences[i][batch]:nbytes() or 0)
    end
  end
  return losses
end

-- ---- estimating ----

-- The checkpoint nearest to step t, or 0 for the batch's own point where that is as near.
local function nearest(self, t, batch)
  local best, distance = 0, math.abs(t - batch)
  for i, at in ipairs(self.points) do
    if math.abs(t - at) < distance then best, distance = i, math.abs(t - at) end
  end
  return best
end

-- The weights of the points (number i of self.points, 0: the batch's own) by which a batch's gradient is taken at the
-- parameters `position` (from the start): that of the nearest point; with the second derivative besides what the
-- gradient changed by along the trajectory, in so far as the way from that point to here goes along it.
local function weights(self, position, t, batch)
  local base = nearest(self, t, batch)
  if self.terms < 1 then return { [0] = 1 } end
  local found = { [base] = 1 }
  if self.terms < 2 then return found end
  local steps, numbers = {}, {}
  if base ~= 0 then steps[1], numbers[1] = batch, 0 end
  for i, at in ipairs(self.points) do
    if i ~= base and at ~= batch then steps[#steps + 1], numbers[#numbers + 1] = at, i end
  end
  local n = #steps
  if n == 0 then return found end
  local from = base == 0 and batch or self.points[base]
  local rows = ty.tensor(steps, { dtype = "i64" }) - 1
  local products = self.products
  local function row(at) return products:narrow(0, at - 1, 1):reshape(-1) end
  local along = self.path:matmul(position - self.path:select(0, from - 1)):to "f64"
  local way = along:index_select(0, rows) - along:narrow(0, from - 1, 1)
  local origin = row(from):index_select(0, rows)
  local gram = products:index_select(0, rows):index_select(1, rows) - origin:unsqueeze(0) - origin:unsqueeze(1)
    + products:narrow(0, from - 1, 1):narrow(1, from - 1, 1)
  local damping = self.damping * gram:diagonal():mean():item() + 1e-300
  local solved = ty.solve(gram + ty.eye(n, { dtype = "f64" }) * damping, way):tolist()
  for k, number in ipairs(numbers) do
    found[number] = (found[number] or 0) + solved[k]
    found[base] = found[base] - solved[k]
  end
  return found
end

local function estimated_gradient(self, position, t, batch)
  local sum
  for number, weight in pairs(weights(self, position, t, batch)) do
    local difference = number > 0 and self.differences[number][batch]
    if difference and weight ~= 0 then sum = sum and sum + difference * weight or difference * weight end
  end
  return sum and self.own[batch] + self.project.from(sum) or self.own[batch]
end

local function check_order(self, who, order)
  expect(who, "order", order, "a list of integers")
  if not self.count then fail("%s: nothing is recorded; record() first", who) end
  for i, batch in ipairs(order) do
    if batch < 1 or batch > self.count then
      fail("%s: order: expected batches from 1 to %d, got %d at position %d", who, self.count, batch, i)
    end
  end
end

--- Gives the parameters the values that they would have, by estimate, had the batches come in this order. No loss is
-- computed. A batch may be missing or come again; an order is best no longer than the recorded one.
---@param order integer[]  numbers of batches, 1 .. count
function OrderEffects:estimate(order)
  check_order(self, "OrderEffects:estimate", order)
  set(self, self.start)
  local optimizer = self.make(self.params)
  for t, batch in ipairs(order) do
    ty.scope(function()
      ty.no_grad(function()
        local position = self.terms > 1 and flat(self.params) - self.start or nil
        set(self, estimated_gradient(self, position, math.min(t, self.count), batch), true)
      end)
      optimizer:step()
    end)
  end
  drop_gradients(self)
end

--- Trains in this order from the start of the recorded run: the truth that estimate() is about.
---@param order integer[]
function OrderEffects:retrain(order)
  check_order(self, "OrderEffects:retrain", order)
  set(self, self.start)
  local optimizer = self.make(self.params)
  for _, batch in ipairs(order) do
    backward(self, self.loss, batch)
    optimizer:step()
  end
  drop_gradients(self)
end

--- What a measure says of the parameters after each of several orders, by estimate or by training: losses, say. The
-- parameters are then as the last order leaves them.
---@param orders integer[][]
---@param measure fun(): number
---@param how? "estimate"|"retrain"  ("estimate")
---@return number[] values
---@return number seconds  of an order, what measuring takes included
function OrderEffects:each(orders, measure, how)
  local who = "OrderEffects:each"
  expect(who, "orders", orders, "a list of tables")
  expect(who, "measure", measure, "a function")
  how = expect(who, "how", how, '"estimate" or "retrain" or nil') or "estimate"
  if #orders == 0 then fail("%s: orders: expected at least one, got none", who) end
  local found, began = {}, ty.core.system.clock()
  for i, order in ipairs(orders) do
    self[how](self, order)
    found[i] = expect(who, "what measure gives", measure(), "a number")
  end
  return found, (ty.core.system.clock() - began) / #orders
end

--- Estimates what other orders of the batches of a training run would have come to. Yang et al. 2025, "Estimating the
-- Effects of Sample Training Orders for Large Language Models without Retraining".
--
--     local effects = optim.order_effects(model, { optimizer = function(p) return optim.Adam(p, { lr = 1e-3 }) end })
--     effects:record(16, function(i) return model:loss(batches[i].tokens, batches[i].targets) end)
--     effects:estimate(curriculum)                    -- the model is as if trained so
--
-- The optimizer runs through the new order with gradients that are not computed but expanded around the recorded
-- trajectory: a batch's gradient at the point that is as many steps from the start (first derivative of the loss), and
-- its change on the way from there to where the new order has come to by now (second derivative: a difference quotient
-- along the trajectory, from the gradients that are kept; what lies across the trajectory does not count). Adam's
-- moments are those of the new order. The recorded order gives the recorded parameters to the last bit.
--
-- options: optimizer (makes one of ty.optim for a list of tensors; its state begins anew), terms (2; 1: without the
-- second derivative; 0: a batch's gradient is what it was in the recorded run), every (1: each step is a checkpoint;
-- n: every n-th), dimensions (0: differences of gradients are kept whole; otherwise as so many random sums), damping
-- (1e-3: of the fit along the trajectory), seed (0, of the projection).
---@param parameters Module|Tensor[]|Tensor
---@param options table
---@return OrderEffects
return function(parameters, options)
  local who = "order_effects"
  local params = {}
  for _, p in ipairs(Optimizer.parameters_of(who, parameters)) do
    if p.requires_grad then params[#params + 1] = p end
  end
  if not params[1] then fail("%s: parameters: expected at least one that requires gradients, got none", who) end
  local o = arguments.read(who, options, { optimizer = arguments.none, terms = 2, every = 1, dimensions = 0,
    damping = 1e-3, seed = 0 }, { optimizer = "a function", terms = "an integer in [0, 2]",
    every = "an integer >= 1", dimensions = "an integer >= 0", damping = "a finite number >= 0", seed = "an integer" })
  if not o.optimizer then fail("%s: optimizer: expected a function that makes one, got nil", who) end
  return setmetatable({ params = params, make = o.optimizer, terms = o.terms, every = o.every,
    dimensions = o.dimensions, damping = o.damping, seed = o.seed }, OrderEffects)
end
