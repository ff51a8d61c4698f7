-- A tensor whose memory comes and goes: a parameter, a moment, a gradient. The tensor stays the object that optimizers
-- and graphs know; while its memory is away it is one of the meta device, so that an op that meets it brings it back or
-- says so, and never computes with what is not there.
--
-- here -> leaving (being written, unless the file has it already) -> away -> coming (being read) -> here
local ty = require "tycho"
local absent = require "tycho.absent"

local tier = ty.core.tier_core

--- A tensor that the engine sends away and brings back.
---@class OffloadCell
---@field tensor Tensor
---@field state "here"|"leaving"|"away"|"coming"
---@field dirty boolean  the file does not have what the tensor has now
---@field version integer  counts the changes that were made, by optimizers and by the program
---@field seen integer     the version of its memory when it was last known to be as the file has it
local Cell = {}
Cell.__index = Cell

--- An op has met the tensor while its memory is away.
function Cell:bring_back()
  self.engine:was_asked(self)
  self:need()
  self.engine:brought(self)
end

---@param engine table  for counters, and for room when memory is short
---@param tensor Tensor
---@param kind string
---@param store OffloadStore
---@param name string
---@return OffloadCell
function Cell.new(engine, tensor, kind, store, name)
  return setmetatable({ engine = engine, tensor = tensor, kind = kind, store = store, name = name, state = "here",
    dirty = true, version = 0, nbytes = tensor:nbytes() }, Cell)
end

-- The tensor and another of its shape change their memory; the other is no longer wanted by any scope.
local function stub_of(tensor) return ty.keep(ty.empty(tensor.shape, { dtype = tensor.dtype, device = "meta" })) end

local function come(self)
  absent.returned(self.memory)
  tier.exchange(self.tensor, self.other)
  self.other:free()
  self.other, self.memory, self.transfer, self.state = nil, nil, nil, "here"
  self:arrived()
end

--- The engine knows what is here, and parameters by their memory.
function Cell:arrived()
  self.engine.here[self] = self.kind
  local _, version = tier.memory_of(self.tensor)
  self.seen = version
  if self.kind == "parameters" then self.engine.parameters_at[tier.memory_of(self.tensor)] = self end
end

--- Begins to bring the memory back.
function Cell:fetch()
  if self.state ~= "away" then return end
  local engine = self.engine
  local other = engine:room(function()
    local pool = engine.pools[self.kind]
    if pool and (self.kind == "parameters" or pool:fits(self.tensor)) then return ty.keep(pool:take(self.tensor)) end
    return ty.keep(ty.empty(self.tensor.shape, { dtype = self.tensor.dtype, device = engine.device }))
  end)
  self.transfer = self.store:begin("read", other, self.place, self.kind, self.name)
  self.other, self.state = other, "coming"
end

--- The memory is there when this returns.
function Cell:need()
  if self.state == "here" then return end
  local engine, since = self.engine, ty.core.system.clock()
  if self.state == "leaving" then -- still in memory: handed over without a read
    engine.counters.forwarded = engine.counters.forwarded + self.nbytes
    self.dirty = not pcall(self.store.wait, self.store, self.transfer) -- what was refused is written the next time
    engine.leaving[self] = nil
    return come(self)
  end
  if self.state == "away" then engine.counters.stalls = engine.counters.stalls + 1 end
  self:fetch()
  local ok, problem = pcall(self.store.wait, self.store, self.transfer)
  engine.counters.waited = engine.counters.waited + ty.core.system.clock() - since
  if not ok then
    self.other:free()
    self.other, self.transfer, self.state = nil, nil, "away"
    error(problem, 0)
  end
  come(self)
end

--- Sees whether something was written into the tensor of which nobody told: between steps the model is the program's.
function Cell:look()
  if self.state ~= "here" then return end
  local _, version = tier.memory_of(self.tensor)
  if version ~= self.seen then
    self.seen = version
    if not self.dirty then self:changed() end
  end
end

--- Sends the memory away; writes it when the file has not got it.
---@param discard? boolean  what was written into it without a word is not wanted
function Cell:drop(discard)
  if self.state ~= "here" then return end
  if not discard then self:look() end
  self.place = self.place or self.store:place(self.nbytes)
  local other = stub_of(self.tensor)
  if self.dirty then -- before anything changes: a disk that refuses leaves the tensor where it is
    self.transfer = self.store:begin("write", self.tensor, self.place, self.kind, self.name)
  end
  local parameters_at = self.engine.parameters_at
  local stood_on = tier.memory_of(self.tensor)
  if parameters_at[stood_on] == self then parameters_at[stood_on] = nil end
  tier.exchange(self.tensor, other)
  self.memory = tier.memory_of(self.tensor)
  absent.left(self.memory, self)
  self.engine.here[self] = nil
  if self.dirty then
    self.other, self.dirty, self.state, self.begun = other, false, "leaving", ty.core.system.clock()
    self.engine.leaving[self] = true
  else
    other:free()
    self.state = "away"
  end
end

--- Gives memory free that has been written; wait: stands still until it is. Raises when it could not be written: the
-- tensor then has its memory again.
function Cell:settle(wait)
  if self.state ~= "leaving" or not (wait or self.store:done(self.transfer)) then return end
  local ok, problem = pcall(self.store.wait, self.store, self.transfer)
  self.engine.leaving[self] = nil
  if not ok then
    come(self)
    self.dirty = true
    error(problem, 0)
  end
  self.other:free()
  self.other, self.transfer, self.state = nil, nil, "away"
end

--- The tensor was changed.
function Cell:changed()
  self.dirty = true
  self.version = self.version + 1
end

--- The cell is no more; the tensor is what it is. Without its memory it is of no use.
function Cell:forget()
  if self.transfer then pcall(self.store.wait, self.store, self.transfer) end
  self.engine.leaving[self], self.engine.here[self] = nil, nil
  if self.memory then absent.returned(self.memory) end
  if self.other then self.other:free() end
  self.other, self.transfer = nil, nil
  if self.place then self.store:release(self.place, self.nbytes) end
  self.place, self.state = nil, "gone"
end

return Cell
