--- DataLoader: batches of a dataset in a fixed, seeded order, optionally made ahead by worker threads.
--
-- The order of epoch e depends on (seed, e) alone, so a loader that is given its state_dict() goes on with the very
-- next batch. Worker threads run dataset:get() and the collation in a Lua state of their own: the dataset is copied to
-- them (tensors by reference), so its functions may use their arguments, upvalues that can be copied, and `require`.
local ty = require "tycho"
local batches = require "tycho.data.batches"
local datasets = require "tycho.data.dataset"
local arguments = require "tycho.arguments"

---@class DataLoader
---@field epoch integer     epoch of the next batch, from 0
---@field position integer  batches of it already given
local DataLoader = {}
DataLoader.__index = DataLoader

-- Pools of loops `for batch in loader do`, by the batch that the loop holds: a loop that was left holds none, and
-- nobody is told of it, so that the collector ends its threads.
local pools = setmetatable({}, { __mode = "k" })

--- options: batch_size (1), shuffle (false), seed (0), drop_last (false), collate (items to batch), device (where
-- batches go), pin_memory (false; batches pass through page-locked memory, from where a GPU copies them without
-- anybody waiting), workers (0: in this thread), prefetch (2 batches per worker), sampler (which positions an epoch
-- has, in which order, in place of all of them and of shuffle: data.WeightedSampler ...).
---@param dataset table
---@param options? table
---@return DataLoader
local function new(dataset, options)
  datasets.expect_dataset("DataLoader", "dataset", dataset)
  local o = arguments.read("DataLoader", options, { batch_size = 1, shuffle = false, seed = 0, drop_last = false,
    collate = datasets.collate, device = arguments.none, pin_memory = false, workers = 0, prefetch = 2,
    sampler = arguments.none },
    { batch_size = "an integer > 0", seed = "an integer", device = "a string", workers = "an integer in [0, 1024]",
      prefetch = "an integer > 0" })
  if o.sampler ~= nil and not require("tycho.data.samplers").is_sampler(o.sampler) then
    arguments.fail("DataLoader: sampler: expected one with order(seed) and a length, got %s",
      arguments.describe(o.sampler))
  elseif o.sampler ~= nil and o.shuffle then
    arguments.fail "DataLoader: shuffle: expected none with a sampler, which has an order of its own"
  end
  local self = setmetatable(o, DataLoader)
  self.dataset, self.epoch, self.position = dataset, 0, 0
  self.custom_collate = o.collate ~= datasets.collate
  if #self == 0 then
    arguments.fail("DataLoader: %d items make no batch of %d", self:_count(), o.batch_size)
  end
  return self
end

-- Positions of an epoch.
function DataLoader:_count() return self.sampler and #self.sampler or #self.dataset end

--- Batches of one epoch.
function DataLoader.__len(self)
  local n = self:_count()
  return self.drop_last and n // self.batch_size or (n + self.batch_size - 1) // self.batch_size
end

-- What the sampler gives, checked.
function DataLoader:_sampled(seed)
  local order, n = self.sampler:order(seed), self:_count()
  if not ty.is_tensor(order) or order.dtype ~= "i64" or order.ndim ~= 1 or order:numel() ~= n then
    arguments.fail("DataLoader: sampler: expected %d positions of i64 from order(seed), got %s", n,
      ty.is_tensor(order) and ("%s [%s]"):format(order.dtype, table.concat(order.shape, ", ")) or
      arguments.describe(order))
  end
  if n > 0 and (order:min():item() < 0 or order:max():item() >= #self.dataset) then
    arguments.fail("DataLoader: sampler: expected positions from 0 to %d, got %d to %d", #self.dataset - 1,
      order:min():item(), order:max():item())
  end
  return order
end

-- The order of an epoch as an i64 tensor; only the current one is held.
function DataLoader:_order_of(epoch)
  if self.order_epoch ~= epoch then
    local n = self:_count()
    -- The epoch goes into the upper bits, so that (seed, epoch) and (seed + 1, epoch - 1) differ.
    local seed = (self.seed ~ (epoch << 32)) * 2
    if self.sampler then
      self.order = ty.keep(self:_sampled(seed))
    elseif self.shuffle then
      self.order = datasets.with_seed(seed, function() return ty.keep(ty.randperm(n)) end)
    else
      self.order = ty.keep(ty.arange(n))
    end
    self.order_epoch = epoch
  end
  return self.order
end

-- Positions of one batch, an i64 tensor.
function DataLoader:_positions(epoch, batch)
  local start = batch * self.batch_size
  return self:_order_of(epoch):narrow(0, start, math.min(self.batch_size, self:_count() - start))
end

local function each_tensor(batch, fn)
  if ty.is_tensor(batch) then return fn(batch) end
  if type(batch) ~= "table" then return batch end
  local result = {}
  for key, value in pairs(batch) do result[key] = each_tensor(value, fn) end
  return result
end

-- From page-locked memory a GPU takes the batch while the host goes on.
local function deliver(self, batch)
  local device, pin = self.device, self.pin_memory
  if not device and not pin then return batch end
  return each_tensor(batch, function(t)
    if pin then t = t:pin_memory() end
    return device and t:to { device = device, non_blocking = pin } or t
  end)
end

-- Differs from the seed of the epoch's order, which is even.
function DataLoader:_seed(epoch, batch) return (self.seed ~ (epoch << 32)) * 2 + 1 + (batch << 44) end

local function following(self, epoch, position)
  position = position + 1
  if position >= #self then return epoch + 1, 0 end
  return epoch, position
end

-- The workers, if there are any: of a loop only the batch holds them.
function DataLoader:_running() return self.pool or self.latest and self.latest.pool end

-- Hands batches to the workers until each has `prefetch` in hand; answers come back in the order of the requests.
function DataLoader:_fill()
  self.pool = self:_running()
  if not self.pool then
    self.pool = require("tycho.data.workers").new(self.workers, self.dataset, self.custom_collate and self.collate)
    self.ahead_epoch, self.ahead_position = self.epoch, self.position
  end
  while self.pool:pending() < self.workers * self.prefetch do
    local epoch, position = self.ahead_epoch, self.ahead_position
    self.pool:send(self:_positions(epoch, position):clone(), self:_seed(epoch, position))
    self.ahead_epoch, self.ahead_position = following(self, self.ahead_epoch, self.ahead_position)
  end
end

--- The next batch, over the end of epochs.
function DataLoader:next()
  local batch
  if self.workers > 0 then
    self:_fill()
    batch = self.pool:receive()
  else
    batch = batches.make(self.dataset, self:_positions(self.epoch, self.position),
      self:_seed(self.epoch, self.position), self.custom_collate and self.collate)
  end
  self.epoch, self.position = following(self, self.epoch, self.position)
  return deliver(self, batch)
end

-- A loop takes what is left of the current epoch. One that was left early has ended its epoch: the next loop begins
-- with the one after it, as loops over anything else begin at the front.
function DataLoader:_begin()
  if self.loop then
    self:close()
    if self.epoch == self.loop then self.epoch, self.position = self.epoch + 1, 0 end
  end
  self.loop = self.epoch
end

local function another_loop()
  arguments.fail "DataLoader: another loop has gone over this loader; loops within each other need a loader each"
end

-- The next batch of the loop that began with epoch `loop`, nil at its end.
function DataLoader:_step(loop)
  if self.loop ~= loop then another_loop() end
  if self.epoch == loop then return self:next() end
  self.loop = nil -- the workers go on to the next epoch
end

local function collectable(value) return type(value) == "table" or type(value) == "userdata" end

--- Iterates the batches that are left of the current epoch: `for batch in loader do`. Left early, the loop ends its
-- epoch, and its workers when the collector comes by or the next loop begins; `for batch in loader() do` ends them at
-- once.
function DataLoader.__call(self, ...)
  if select("#", ...) == 0 then -- loader(): what a loop takes, with something to close
    self:_begin()
    local loop = self.loop
    local guard = setmetatable({}, { __close = function()
      if self.loop == loop then self:_begin() self.loop = nil end
    end })
    return function() return self:_step(loop) end, nil, nil, guard
  end
  local _, last = ...
  if last == nil then
    self:_begin()
  elseif self.loop == nil or not rawequal(last, self.latest.batch) then
    another_loop()
  end
  if collectable(last) then pools[last] = nil end
  local batch = self:_step(self.loop)
  if batch == nil then return nil end
  self.latest = setmetatable({ batch = batch, pool = self.pool }, { __mode = "v" })
  if self.pool and collectable(batch) then
    pools[batch] = self.pool
    self.pool = nil
  end
  return batch
end

--- As print() shows it.
function DataLoader.__tostring(self)
  return ("DataLoader of %d batches of %d from %s%s%s, at epoch %d, batch %d"):format(#self, self.batch_size,
    tostring(self.dataset), self.shuffle and ", shuffled" or "",
    self.workers > 0 and (", %d workers"):format(self.workers) or "", self.epoch, self.position)
end

--- Where the loader stands.
function DataLoader:state_dict() return { epoch = self.epoch, position = self.position, seed = self.seed } end

--- Goes to where a loader with the same dataset and options stood.
---@param state {epoch: integer, position: integer, seed: integer}
function DataLoader:load_state_dict(state)
  local who = "DataLoader:load_state_dict"
  arguments.expect(who, "state", state, "a table")
  for _, name in ipairs { "epoch", "position" } do arguments.expect(who, name, state[name], "an integer >= 0") end
  arguments.expect(who, "seed", state.seed, "an integer")
  if state.position >= #self then
    arguments.fail("%s: position: expected one of the %d batches of an epoch, got %d", who, #self, state.position)
  end
  self:close()
  self.epoch, self.position, self.seed, self.order_epoch = state.epoch, state.position, state.seed, nil
  self.loop = nil
end

--- Ends the worker threads; the loader can still be used (they start again).
function DataLoader:close()
  local pool = self:_running()
  self.pool, self.latest = nil, nil
  if pool then pool:close() end
end

DataLoader.__close = DataLoader.close
DataLoader.__gc = DataLoader.close

return { new = new }
