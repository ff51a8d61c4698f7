--- A rank's place in a group of ranks: what it exchanges with the others, its clock, its memory.
--
-- All ranks of a group call its collectives in the same order, with tensors of the same shape and dtype. Tensors of
-- GPUs go through the host's memory. Collectives work on values: they have no history; dist.copied and its like have.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local core = ty.core.comm_core
local expect, fail = arguments.expect, arguments.fail

---@class RankGroup
---@field rank integer       of this one in the group, from 0
---@field size integer       ranks of the group
---@field members integer[]  their ranks in the world, in the group's order
---@field events table[]|nil  after record(): { name, from, to, bytes, begun }, seconds of the clock
local Group = {}
Group.__index = Group
Group.__name = "RankGroup"

--- A collective that was begun with { async = true }.
---@class RankWork
local Work = {}
Work.__index = Work
Work.__name = "RankWork"

local REDUCTIONS = '"sum" or "mean" or "min" or "max" or "prod" or nil'

-- A group of the native comm; for dist.run and split().
function Group.of(comm, first)
  local self = setmetatable({ comm = comm, rank = comm:rank(), size = comm:size(), members = comm:members() }, Group)
  self.first = first or self -- the group of all ranks of the run, which has the events
  return self
end

--- Raises unless a value is a group of ranks; for functions that take one.
---@param who string  the function
---@param group any
function Group.expect(who, group)
  expect("RankGroup.expect", "who", who, "a string")
  if getmetatable(group) ~= Group then fail("%s: group: expected a group, got %s", who, arguments.describe(group)) end
end

-- ---- events ----

--- From now on every exchange and every span of the rank is kept in the events of the group of all ranks.
---@return table[] events  { name, from, to, bytes, begun }: seconds of the rank's clock, from when to when it waited;
-- of a collective bytes, and when it was begun
function Group:record()
  self.first.events = {}
  return self.first.events
end

local function note(self, name, from, bytes, begun)
  local events = self.first.events
  if not events then return end
  events[#events + 1] = { name = name, from = from, to = self.comm:clock(), bytes = bytes, begun = begun }
end

--- From now on fn(number, name, clock, over) is called when the rank begins a collective of the group of all ranks, and
-- with over = true when it has waited for it. number: which of them it is, from 1 on, the same on all ranks.
---@param fn fun(number: integer, name: string, clock: number, over: boolean)
function Group:observe(fn)
  expect("RankGroup:observe", "fn", fn, "a function")
  self.first.observer, self.first.seen = fn, 0
end

--- Runs fn(...) and keeps in the events, if they are recorded, from when to when; returns what fn returns.
---@param name string
---@param fn function
function Group:span(name, fn, ...)
  expect("RankGroup:span", "name", name, "a string")
  expect("RankGroup:span", "fn", fn, "a function")
  local from = self.comm:clock()
  local results = table.pack(fn(...))
  note(self, name, from)
  return table.unpack(results, 1, results.n)
end

-- ---- collectives ----

local function check(self, who, x)
  Group.expect("RankGroup:" .. who, self)
  if x ~= nil or who ~= "barrier" then expect("RankGroup:" .. who, "x", x, "a tensor") end
end

-- What the others may read and write: x itself, or a copy on the host, and whether it is a copy.
local function host(x)
  x = x:detach()
  if x.device == "cpu" and x:is_contiguous() then return x, false end
  return x:to("cpu"):contiguous(), true
end

--- Waits until it is over and returns what the collective returns.
function Work:wait()
  if not self.ticket then return self.result end
  local ticket = self.ticket
  self.ticket = nil
  local from = self.group.comm:clock()
  local ok, problem = pcall(self.group.comm.wait, self.group.comm, ticket)
  if not ok then arguments.raise(problem) end
  note(self.group, self.kind, from, self.bytes, self.begun)
  if self.number then self.group.observer(self.number, self.kind, self.group.comm:clock(), true) end
  if self.finish then self.result = self.finish() end
  return self.result
end

-- Begins a collective; `finish` makes of its buffers what is returned.
local function start(self, kind, options, x, out, reduction, root, finish)
  local o = arguments.read("RankGroup:" .. kind, options, { async = false, dim = 0, out = arguments.none },
    { async = "a boolean", dim = "an integer", out = "a tensor" })
  local number
  if self.observer then -- before it can fail: who has come, and who has not, is what is asked after a failure
    self.seen = self.seen + 1
    number = self.seen
    self.observer(number, kind, self.comm:clock(), false)
  end
  local begun = self.first.events and self.comm:clock() or nil
  local ok, ticket = pcall(self.comm.start, self.comm, kind, x, out, reduction, root)
  if not ok then arguments.raise(ticket) end
  local work = setmetatable({ group = self, kind = kind, ticket = ticket, finish = finish, begun = begun,
    number = number, bytes = x and (out or x):nbytes() or 0 }, Work)
  if o.async then return work end
  return work:wait()
end

-- x gets the values of what stood in for it.
local function in_place(x, mine, copied)
  return function()
    if copied then x:detach():copy_(mine) end
    return x
  end
end

--- Every rank's x becomes the reduction of all of them, in the order of ranks: the same bits everywhere.
---@param x tensor           changed in place, and returned
---@param reduction? string  sum (as it is), mean, min, max or prod
---@param options? { async?: boolean }  async: returns at once, a work whose wait() returns x
function Group:all_reduce(x, reduction, options)
  check(self, "all_reduce", x)
  expect("RankGroup:all_reduce", "reduction", reduction, REDUCTIONS)
  local mine, copied = host(x)
  return start(self, "all_reduce", options, mine, nil, reduction, nil, in_place(x, mine, copied))
end

--- Every rank gets x of the root, in place.
---@param x tensor
---@param root? integer  a rank of the group (0)
---@param options? { async?: boolean }
function Group:broadcast(x, root, options)
  check(self, "broadcast", x)
  expect("RankGroup:broadcast", "root", root, "an integer >= 0 or nil")
  local mine, copied = host(x)
  return start(self, "broadcast", options, mine, nil, nil, root, in_place(x, mine, copied))
end

local function dim_of(who, x, options)
  local dim = type(options) == "table" and options.dim or 0
  expect(who, "dim", dim, "an integer")
  if dim < -x.ndim or dim >= x.ndim then
    fail("%s: dim: expected one of the %d dimensions of %s, got %d", who, x.ndim, arguments.describe(x), dim)
  end
  return dim < 0 and dim + x.ndim or dim
end

-- Where the result of a collective comes: memory of its own, or the caller's `out`, which has to fit.
local function place_for(who, x, shape, options)
  local out = type(options) == "table" and options.out
  if not out then return ty.empty(shape, { dtype = x.dtype }) end
  expect(who, "out", out, "a tensor")
  local dim, count = options.dim or 0, 1
  for _, n in ipairs(shape) do count = count * n end
  if dim ~= 0 or out.dtype ~= x.dtype or out.device ~= "cpu" or not out:is_contiguous() or out:numel() ~= count then
    fail("%s: out: expected %d elements of %s on the CPU, contiguous and for dimension 0, got %s", who, count, x.dtype,
      arguments.describe(out))
  end
  return out:detach()
end

--- What all ranks have, one after the other along a dimension.
---@param x tensor  of the same shape everywhere, [..., d, ...]
---@param options? { dim?: integer, async?: boolean, out?: tensor }  dim: along which they are put together (0); out:
-- where the result comes, of which x may be the rank's own part
---@return tensor  [..., size * d, ...]
function Group:all_gather(x, options)
  check(self, "all_gather", x)
  local dim = x.ndim > 0 and dim_of("RankGroup:all_gather", x, options) or 0
  local mine = host(x)
  local shape = mine.shape
  local out = place_for("RankGroup:all_gather", mine, { self.size, table.unpack(shape) }, options)
  return start(self, "all_gather", options, mine, out, nil, nil, function()
    if type(options) == "table" and options.out then return options.out end
    local all = out
    if #shape > 0 then
      if dim > 0 then all = all:movedim(0, dim) end
      local whole = table.move(shape, 1, #shape, 1, {})
      whole[dim + 1] = whole[dim + 1] * self.size
      all = all:reshape(whole)
    end
    return all:to(x.device)
  end)
end

-- Parts of x along a dimension, [size, ...], and their shape as parts.
local function parts(self, who, x, options)
  local name = "RankGroup:" .. who
  if x.ndim == 0 then fail("%s: x: expected a dimension that ranks share, got a tensor []", name) end
  local dim = dim_of(name, x, options)
  local n = x.shape[dim + 1]
  if n % self.size ~= 0 then
    fail("%s: x: expected a multiple of %d along dimension %d, a part for each rank, got %s", name, self.size, dim,
      arguments.describe(x))
  end
  local shape = table.move(x.shape, 1, x.ndim, 1, {})
  shape[dim + 1] = n // self.size
  if dim > 0 then x = x:unflatten(dim, { self.size, n // self.size }):movedim(dim, 0) end
  return (host(x)), shape, dim
end

--- Of the reduction of all x the rank's own part along a dimension.
---@param x tensor  [..., size * d, ...]
---@param reduction? string
---@param options? { dim?: integer, async?: boolean, out?: tensor }  out: where the result comes, which is no part of x
---@return tensor  [..., d, ...]
function Group:reduce_scatter(x, reduction, options)
  check(self, "reduce_scatter", x)
  expect("RankGroup:reduce_scatter", "reduction", reduction, REDUCTIONS)
  local mine, shape = parts(self, "reduce_scatter", x, options)
  local out = place_for("RankGroup:reduce_scatter", mine, shape, options)
  return start(self, "reduce_scatter", options, mine, out, reduction, nil, function()
    return type(options) == "table" and options.out or out:to(x.device)
  end)
end

--- Part r of x along a dimension goes to rank r; returns what has come, in the order of ranks, along that dimension.
---@param x tensor  [..., size * d, ...]
---@param options? { dim?: integer, async?: boolean }
---@return tensor  [..., size * d, ...]
function Group:all_to_all(x, options)
  check(self, "all_to_all", x)
  local mine, _, dim = parts(self, "all_to_all", x, options)
  local out = mine:empty_like()
  return start(self, "all_to_all", options, mine, out, nil, nil, function()
    local all = out
    if dim > 0 then all = all:movedim(0, dim) end
    return all:reshape(x.shape):to(x.device)
  end)
end

--- Waits until all ranks are there.
function Group:barrier()
  check(self, "barrier")
  start(self, "barrier")
end

-- ---- messages ----

local function rank_of(self, who, rank)
  expect("RankGroup:" .. who, "rank", rank, "an integer")
  if rank < 0 or rank >= self.size then
    fail("RankGroup:%s: expected a rank of 0 to %d, got %d", who, self.size - 1, rank)
  end
end

--- Sends the values of x to a rank, and goes on; x may be changed at once.
---@param x tensor
---@param to integer    a rank of the group
---@param tag? integer  tells messages apart (0); those of one tag arrive in their order
function Group:send(x, to, tag)
  check(self, "send", x)
  rank_of(self, "send", to)
  expect("RankGroup:send", "tag", tag, "an integer or nil")
  local from = self.comm:clock()
  self.comm:send((host(x)), to, tag or 0)
  note(self, "send", from, x:nbytes())
end

--- Waits for a message of a rank.
---@param from integer
---@param tag? integer
---@return tensor  on the CPU, in the shape and dtype of what was sent
function Group:receive(from, tag)
  Group.expect("RankGroup:receive", self)
  rank_of(self, "receive", from)
  expect("RankGroup:receive", "tag", tag, "an integer or nil")
  local began = self.comm:clock()
  local ok, x = pcall(self.comm.receive, self.comm, from, tag or 0)
  if not ok then arguments.raise(x) end
  note(self, "receive", began, x:nbytes())
  return x
end

-- ---- groups, clocks, memory ----

--- Divides the group: ranks that give the same color are a new one, in the order of their keys and ranks. All ranks of
-- the group call it.
---@param color integer  below 0: in none of the new groups
---@param key? integer   (the rank)
---@return RankGroup|nil
function Group:split(color, key)
  Group.expect("RankGroup:split", self)
  expect("RankGroup:split", "color", color, "an integer")
  expect("RankGroup:split", "key", key, "an integer or nil")
  local ok, comm = pcall(self.comm.split, self.comm, color, key or self.rank)
  if not ok then arguments.raise(comm) end
  return comm and Group.of(comm, self.first)
end

--- Seconds since the rank began, as if it had a core of its own and messages took what the options of dist.run say:
-- what its thread has computed, and what it has waited for others.
---@return number
function Group:clock() return self.comm:clock() end

--- Lets the rank's clock go on, as if it had been busy: a slow rank, or work that is not done here.
---@param seconds number
function Group:advance(seconds)
  expect("RankGroup:advance", "seconds", seconds, "a finite number >= 0")
  self.comm:advance(seconds)
end

--- What this rank has sent in this group: calls and bytes by the name of the exchange, bytes as rings of ranks send
-- them, and bytes that left its machine.
---@return { calls: table<string, integer>, sent: table<string, integer>, crossed: integer, bytes: integer }
function Group:traffic()
  local t = self.comm:traffic()
  t.bytes = 0
  for _, n in pairs(t.sent) do t.bytes = t.bytes + n end
  return t
end

--- Bytes of tensors that the rank has now, and the most at once since the last reset_memory().
---@return integer live
---@return integer peak
function Group:memory() return core.memory() end

--- What nobody has any more goes, and the rank's most bytes are counted from here on.
function Group:reset_memory()
  collectgarbage()
  collectgarbage()
  core.reset_memory()
end

return Group
