-- What ops keep for the backward pass: parameters by name, the rest in memory or on a store.
--
-- A storage goes there once, however many ops keep it or views of it: it is known by its memory and the version of
-- that. What is still in memory when it is wanted is handed over without a read.
local ty = require "tycho"

local tier = ty.core.tier_core

local Saved = {}
Saved.__index = Saved

---@param engine table
---@param smallest integer  bytes of a storage below which it stays
function Saved.new(engine, smallest)
  return setmetatable({ engine = engine, smallest = smallest }, Saved)
end

-- A record's memory is no longer needed here: others may have it still.
local function let_go(self, record)
  if record.bytes then
    record.bytes:free()
    if self.known[record.memory] == record then self.known[record.memory] = nil end
    record.bytes = nil
  end
end

-- Waits for the write of a record. One that failed leaves the record in memory, where it serves as well.
local function written(record)
  if record.writing then
    local transfer = record.writing
    record.writing = nil
    record.store:wait(transfer)
  end
end

-- What has been written gives its memory free, but for what the part that runs may keep again. wait: until the writes
-- that are under way are no more than so many bytes.
function Saved:sweep(most)
  local list, left = self.flying, {}
  local bytes = 0
  for _, record in ipairs(list) do bytes = bytes + record.nbytes end
  for _, record in ipairs(list) do
    local done = not record.writing or record.store:done(record.writing)
    if not done and most and bytes > most then done = true end
    if done then
      written(record)
      bytes = bytes - record.nbytes
      if record.age < self.age then let_go(self, record) else left[#left + 1] = record end
    else
      left[#left + 1] = record
    end
  end
  self.flying = left
end

--- A part of the model has run.
function Saved:older()
  self.age = self.age + 1
  self:sweep(self.engine.in_flight)
end

function Saved:begin()
  self.age, self.records, self.units, self.known, self.flying, self.kept = 0, {}, {}, {}, {}, {}
end

-- What was handed out last: the engine of gradients has a reference of its own by now.
function Saved:release(following)
  if self.handed then self.handed:free() end
  self.handed = following
end

function Saved:pack(t)
  local engine = self.engine
  local memory, version, nbytes = tier.memory_of(t)
  local cell = engine.parameters_at[memory]
  if cell and cell ~= true then
    local bytes, how = tier.unfold(t)
    bytes:free()
    t:free()
    return { cell = cell, version = cell.version, how = how }
  end
  local record = self.known[memory]
  if record and record.version == version then
    engine.counters.shared = engine.counters.shared + 1
  else
    local unit, at = engine.unit, engine.number
    local store = not cell and nbytes >= self.smallest and engine:place_for(unit, nbytes)
    local bytes, _
    if store then bytes, _ = tier.unfold(t) end
    if not bytes then
      self.kept[#self.kept + 1] = ty.keep(t)
      return t
    end
    record = { bytes = ty.keep(bytes), memory = memory, version = version, nbytes = nbytes, store = store, packs = 0,
      place = store:place(nbytes), age = self.age, name = unit and unit.name or "" }
    record.writing = store:begin("write", bytes, record.place, "activations", record.name)
    self.records[#self.records + 1], self.flying[#self.flying + 1] = record, record
    self.known[memory] = record
    self.units[at] = self.units[at] or {}
    table.insert(self.units[at], record)
  end
  record.packs, record.age = record.packs + 1, self.age
  local bytes, how = tier.unfold(t)
  bytes:free()
  t:free()
  return { record = record, how = how }
end

local function fetch(self, record)
  if record.bytes or record.reading or not record.place or record.packs == 0 then return end
  local bytes = self.engine:room(function()
    return ty.keep(ty.empty({ record.nbytes }, { dtype = "u8", device = self.engine.device }))
  end)
  record.reading = record.store:begin("read", bytes, record.place, "activations", record.name)
  record.coming = bytes
end

--- Bytes that went away, of what the part that ran as number `at` kept.
function Saved:bytes(at)
  local bytes = 0
  for _, record in ipairs(self.units[at] or {}) do bytes = bytes + record.nbytes end
  return bytes
end

--- Begins to read what the part that ran as number `at` kept.
function Saved:fetch(at)
  for _, record in ipairs(self.units[at] or {}) do fetch(self, record) end
end

local function arrive(record)
  local transfer = record.reading
  record.reading = nil
  record.store:wait(transfer)
  record.bytes, record.coming = record.coming, nil
  record.memory = tier.memory_of(record.bytes)
end

function Saved:unpack(packed)
  local engine = self.engine
  if ty.is_tensor(packed) then
    self:release(packed)
    return packed
  end
  if packed.cell then
    local cell = packed.cell
    if cell.version ~= packed.version then
      error(("offload: %s was changed by the optimizer before the backward pass was done with it"):format(cell.name), 0)
    end
    cell:need()
    local bytes = tier.unfold(cell.tensor)
    local t = tier.fold(bytes, packed.how)
    bytes:free()
    self:release(t)
    return t
  end
  local record = packed.record
  if not record.place then error("offload: what a step kept is gone at its end", 0) end
  if record.bytes and not record.read then
    engine.counters.forwarded = engine.counters.forwarded + record.nbytes
  elseif not record.bytes then
    if not record.reading then engine.counters.stalls = engine.counters.stalls + 1 end
    local since = ty.core.system.clock()
    fetch(self, record)
    arrive(record)
    engine.counters.waited = engine.counters.waited + ty.core.system.clock() - since
  end
  record.read = true
  local t = tier.fold(record.bytes, packed.how)
  self:release(t)
  record.packs = record.packs - 1
  if record.packs == 0 and not record.writing then let_go(self, record) end
  return t
end

--- The end of a step, however it ended: all memory and all places are given back.
function Saved:finish()
  self:release(nil)
  for _, t in ipairs(self.kept) do t:free() end
  for _, record in ipairs(self.records) do
    for _, what in ipairs { "writing", "reading" } do
      if record[what] then pcall(record.store.wait, record.store, record[what]) end
    end
    let_go(self, record)
    if record.coming then record.coming:free() end
    record.store:release(record.place, record.nbytes)
    record.place = nil
  end
  self:begin()
end

return Saved
