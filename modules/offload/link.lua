-- Where memory of a GPU goes that is away: the host's page-locked memory, or a file beyond it. The same interface as
-- tycho.offload.store, which is that of the CPU: places in it by size, and what went through it.
--
-- Copies go on two streams of their own, one down to the host and one up to the device. Down waits for what the program
-- has computed until then, up for what has been given out as memory until then, and either for the last copy of the
-- same place; what the program computes after wait() waits for the copy. The host stands still only for the file.
local ty = require "tycho"
local Store = require "tycho.offload.store"

local clock = ty.core.system.clock

--- A store in the memory of the host or in a file, and the copies between it and a GPU.
---@class OffloadLink: OffloadStore
---@field device string
---@field last table<integer, CudaEvent>   of each place: the end of the last copy from or to its memory
---@field memory table<integer, Tensor>    of each place on the host: its page-locked memory
---@field spare table<string, Tensor[]>    page-locked memory, by dtype and shape, for what is on its way to a file
local Link = setmetatable({}, { __index = Store })
Link.__index = Link

--- Opens one for a GPU; arguments as of Store.open().
---@param name string  "file" or "host"
---@param device string
---@return OffloadLink
function Link.open(name, device, folder, backend, events, limit, direct)
  local self = setmetatable(Store.open(name, folder, backend, events, limit, direct), Link)
  self.device, self.last, self.memory, self.spare, self.landing = device, {}, {}, {}, {}
  self.down, self.up = ty.cuda.Stream(device), ty.cuda.Stream(device)
  return self
end

local function key_of(tensor) return tensor.dtype .. " " .. table.concat(tensor.shape, " ") end

local function pinned(tensor)
  return ty.keep(ty.empty(tensor.shape, { dtype = tensor.dtype }):pin_memory())
end

-- Page-locked memory for a tensor: that of a place on the host, or some on the way to a file.
local function memory_for(self, tensor, place)
  local key = key_of(tensor)
  if self.name == "host" then
    local memory = self.memory[place]
    if memory and key_of(memory) ~= key then
      if self.last[place] then self.last[place]:synchronize() end
      memory:free()
      memory = nil
    end
    self.memory[place] = memory or pinned(tensor)
    return self.memory[place], key
  end
  local list = self.spare[key]
  return list and table.remove(list) or pinned(tensor), key
end

-- The memory of a file's transfer is free again.
local function give_back(self, transfer)
  local list = self.spare[transfer.key] or {}
  self.spare[transfer.key] = list
  list[#list + 1] = transfer.memory
  transfer.memory = nil
end

-- A copy on a stream, after everything that was asked for on the current one and after the last of its place.
local function copy(self, stream, to, from, place)
  stream:wait_stream(ty.cuda.current_stream(self.device))
  if self.last[place] then stream:wait_event(self.last[place]) end
  ty.cuda.stream(stream, function() ty.no_grad(function() to:copy_(from, { non_blocking = true }) end) end)
  local event = ty.cuda.Event():record(stream)
  self.last[place] = event
  return event
end

-- What has come down goes on to the file. wait: as soon as it has come down.
local function go_on(self, transfer, wait)
  if transfer.ticket or self.name == "host" then return true end
  if not wait and not transfer.event:query() then return false end
  transfer.event:synchronize()
  transfer.ticket = self.tier:write(transfer.memory, transfer.place)
  if self.landing[transfer.place] == transfer then self.landing[transfer.place] = nil end
  return true
end

--- Begins a transfer; what wait() needs of it.
function Link:begin(what, tensor, place, kind, name)
  local transfer = { what = what, kind = kind, name = name, place = place, tensor = tensor, from = clock() }
  self:count(kind, what == "write" and "written" or "read", tensor:nbytes())
  local before = self.landing[place]
  if before then go_on(self, before, true) end -- the file takes one after the other
  if what == "write" then
    transfer.memory, transfer.key = memory_for(self, tensor, place)
    transfer.event = copy(self, self.down, transfer.memory, tensor, place)
    if self.name == "file" then self.landing[place] = transfer end
  elseif self.name == "host" then
    transfer.event = copy(self, self.up, tensor, self.memory[place], place)
  else
    transfer.memory, transfer.key = memory_for(self, tensor, place)
    transfer.ticket = self.tier:read(transfer.memory, place)
  end
  return transfer
end

function Link:done(transfer)
  if self.name == "host" then return transfer.event:query() end
  return go_on(self, transfer, false) and self.tier:done(transfer.ticket)
end

--- What is computed from now on finds the transfer over; the memory that was written may be given free. Raises when it
-- failed.
function Link:wait(transfer)
  go_on(self, transfer, true)
  if transfer.ticket then
    local ok, problem = pcall(self.tier.wait, self.tier, transfer.ticket)
    if ok and transfer.what == "read" then
      transfer.event = copy(self, self.up, transfer.tensor, transfer.memory, transfer.place)
    end
    if transfer.event then transfer.event:synchronize() end -- before the memory is another's
    give_back(self, transfer)
    if not ok then error(problem, 0) end
  end
  ty.cuda.current_stream(self.device):wait_event(transfer.event)
  transfer.tensor = nil
  self:note(transfer, transfer.from, clock())
end

--- Gives a place back; its page-locked memory stays with it.
function Link:release(place, nbytes) Store.release(self, place, nbytes) end

function Link:probe(nbytes)
  ty.cuda.synchronize(self.device)
  local tensor, place, rates = ty.keep(ty.zeros({ nbytes }, { dtype = "u8", device = self.device })),
    self:place(nbytes), {}
  for _, what in ipairs { "write", "write", "read" } do
    local since = clock()
    self:wait(self:begin(what, tensor, place, "probe", "probe"))
    ty.cuda.synchronize(self.device)
    rates[what] = nbytes / (clock() - since)
  end
  tensor:free()
  self:release(place, nbytes)
  return rates.write, rates.read
end

function Link:close()
  ty.cuda.synchronize(self.device)
  Store.close(self)
end

return Link
