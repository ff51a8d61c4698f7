-- Where memory goes that is away: a file of the disk, or memory outside of the device's. Places in it by size, and what
-- went through it.
local ty = require "tycho"

local tier = ty.core.tier_core
local block = 4096

--- A place beside the device for bytes of tensors: a file, or the host's memory.
---@class OffloadStore
---@field name string     "file" or "host"
---@field counters table  by kind: { written =, read = } in bytes
---@field used integer    bytes of places that are taken
---@field most integer    the most there were
local Store = {}
Store.__index = Store

--- Opens one. events: a list that gets { name, kind, row, begin, end } for each transfer, seconds of system.clock().
---@param name string       "file" or "host"
---@param folder? string    of the file
---@param backend? string   "auto", "uring" or "threads"
---@param events table
---@param limit? integer    bytes of all places together
---@param direct? boolean    of a file, past the page cache (true)
---@return OffloadStore
function Store.open(name, folder, backend, events, limit, direct)
  return setmetatable({ name = name, free = {}, top = 0, used = 0, most = 0, limit = limit or math.huge, counters = {},
    events = events, tier = tier.open(folder, backend, direct ~= false) }, Store)
end

local function rounded(nbytes) return math.max(1, (nbytes + block - 1) // block) * block end

--- A place for so many bytes.
function Store:place(nbytes)
  local size = rounded(nbytes)
  if self.used + size > self.limit then
    error(("offload: %s: its %d bytes do not hold %d more, beside the %d that are there"):format(self.name, self.limit,
      size, self.used), 0)
  end
  local list = self.free[size]
  local place = list and table.remove(list)
  if not place then
    place = self.top
    self.top = place + size
  end
  self.used = self.used + size
  self.most = math.max(self.most, self.used)
  return place
end

--- Gives a place back.
function Store:release(place, nbytes)
  local size = rounded(nbytes)
  self.free[size] = self.free[size] or {}
  table.insert(self.free[size], place)
  self.used = self.used - size
end

--- Bytes of a kind were "written" or "read".
function Store:count(kind, what, nbytes)
  local c = self.counters[kind]
  if not c then
    c = { written = 0, read = 0 }
    self.counters[kind] = c
  end
  c[what] = c[what] + nbytes
end

--- Begins a transfer; what wait() needs of it.
function Store:begin(what, tensor, place, kind, name)
  local nbytes = tensor:nbytes()
  local ticket = what == "write" and self.tier:write(tensor, place) or self.tier:read(tensor, place)
  self:count(kind, what == "write" and "written" or "read", nbytes)
  return { ticket = ticket, what = what, kind = kind, name = name }
end

function Store:done(transfer) return self.tier:done(transfer.ticket) end

--- Adds a transfer to the timeline.
function Store:note(transfer, from, to)
  if #self.events < 100000 then -- a timeline is for some steps
    self.events[#self.events + 1] = { name = transfer.name, kind = transfer.kind,
      row = self.name .. " " .. transfer.what, from = from, to = to }
  end
end

--- Waits for a transfer; raises when it failed.
function Store:wait(transfer) self:note(transfer, self.tier:wait(transfer.ticket)) end

--- Bytes a second that are written and read here, measured now with so many bytes. They count as the kind "probe".
function Store:probe(nbytes)
  local tensor, place, rates = ty.zeros({ nbytes }, { dtype = "u8" }), self:place(nbytes), {}
  for _, what in ipairs { "write", "write", "read" } do -- the first write makes room in the file
    local since = ty.core.system.clock()
    self:wait(self:begin(what, tensor, place, "probe", "probe"))
    rates[what] = nbytes / (ty.core.system.clock() - since)
  end
  tensor:free()
  self:release(place, nbytes)
  return rates.write, rates.read
end

function Store:stats()
  local s = self.tier:stats()
  s.counters, s.most = {}, self.most
  s.moved = 0
  for kind, c in pairs(self.counters) do
    s.counters[kind] = { written = c.written, read = c.read }
    s.moved = s.moved + c.written + c.read
  end
  return s
end

function Store:close() self.tier:close() end

return Store
