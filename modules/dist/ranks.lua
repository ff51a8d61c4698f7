--- Running a function as several ranks.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local core = ty.core.comm_core
local fail = arguments.fail

local M = {}

local DEFAULTS = { latency = 0, bandwidth = math.huge, per_node = 0, within = arguments.none, memory = 0, seed = 0 }
local WANTED = { latency = "a finite number >= 0", bandwidth = "a number > 0", per_node = "an integer >= 0",
  within = "a table", memory = "an integer >= 0", seed = "an integer" }

-- Runs in the thread of a rank, which is a Lua state of its own.
local function serve()
  local tycho = require "tycho"
  local comms, Group = tycho.core.comm_core, require "tycho.dist.group"
  return function(world, rank, memory, seed, prompt, fn, ...)
    if prompt then rawset(_G, "ty", tycho) end -- what is typed there goes by it
    local group = Group.of(comms.join(world, rank))
    comms.limit_memory(memory)
    tycho.manual_seed(seed)
    local results = table.pack(xpcall(fn, function(problem)
      return type(problem) == "string" and problem or tostring(problem)
    end, group, ...))
    if results[1] then
      group.comm:leave()
      return true, results[2]
    end
    local text = ("rank %d: %s"):format(rank, results[2])
    local first = comms.fail(world, text)
    group.comm:leave()
    return false, first and text or results[2], first
  end
end

-- Runs in the thread of a rank that stays: answers what it is asked by what setup() gave.
local function stay(world, rank, memory, seed, prompt, setup, ...)
  local tycho = require "tycho"
  local comms, Group = tycho.core.comm_core, require "tycho.dist.group"
  if prompt then rawset(_G, "ty", tycho) end
  local group = Group.of(comms.join(world, rank))
  comms.limit_memory(memory)
  tycho.manual_seed(seed)
  local ended
  local function guarded(fn, ...)
    local results = table.pack(xpcall(fn, function(problem)
      return type(problem) == "string" and problem or tostring(problem)
    end, ...))
    if results[1] then return table.unpack(results, 1, results.n) end
    local text = ("rank %d: %s"):format(rank, results[2])
    ended = comms.fail(world, text) and text or results[2]
    group.comm:leave()
    return false
  end
  local _, answer = guarded(setup, group, ...)
  return function(...)
    if ended then return false, ended end
    local results = table.pack(guarded(answer, ...))
    if ended then return false, ended end
    return table.unpack(results, 1, results.n)
  end
end

-- What a thread says of values that cannot go to another one.
local function plain(problem)
  return (tostring(problem):gsub("\n.*", ""):gsub("^.*thread: ", ""))
end

---@class RankOptions
---@field latency? number    seconds that a message takes on its way (0)
---@field bandwidth? number  bytes a second (math.huge)
---@field per_node? integer  ranks that are on one machine (0: all)
---@field within? { latency?: number, bandwidth?: number }  the link between these, as fast as can be by itself
---@field memory? integer    bytes of tensors that a rank may have (0: no limit)
---@field seed? integer      of the ranks' generators, the same for each (0)

-- Options as they count, and a world of ranks.
local function open_world(who, ranks, options)
  arguments.expect(who, "ranks", ranks, "an integer >= 1")
  if ranks > 1024 then fail("%s: ranks: expected at most 1024, got %d", who, ranks) end
  local o = arguments.read(who, options, DEFAULTS, WANTED)
  local within = arguments.read(who .. ": within", o.within or {}, { latency = 0, bandwidth = math.huge },
    { latency = WANTED.latency, bandwidth = WANTED.bandwidth })
  local one_machine = o.per_node == 0
  if one_machine and not o.within then within = o end
  return o, core.open(ranks, o.latency, o.bandwidth, within.latency, within.bandwidth,
    one_machine and ranks or o.per_node)
end

local function close_world(world, threads)
  core.fail(world, "the run was ended")
  for _, thread in ipairs(threads) do thread:close() end
  core.close(world)
end

--- Runs fn(group, ...) as `ranks` ranks, each in a native thread with a Lua state and a random generator of its own,
-- and returns what each returned. A function of a script goes there with copies of what it refers to, tensors with
-- their memory; modules are loaded anew. Each rank computes on one thread.
--
-- Where ranks share cores, group:clock() says what time it would be if they did not. What lies between them is said in
-- the options, for that clock alone: nobody waits in fact.
--
-- An error of one rank ends all of them; so does what no rank could get out of: collectives that do not match, and
-- ranks that all wait.
--
--     local sums = dist.run(4, function(group)
--       return group:all_reduce(ty.full({ 3 }, group.rank)):tolist()
--     end)
---@param ranks integer
---@param fn fun(group: RankGroup, ...): any
---@param options? RankOptions
---@return any[] results  by rank, from 1 on: the first value that fn returned
function M.run(ranks, fn, options, ...)
  local who = "dist.run"
  arguments.expect(who, "fn", fn, "a function")
  local o, world = open_world(who, ranks, options)
  local threads = {}
  local _ <close> = setmetatable({}, { __close = function() close_world(world, threads) end })
  for rank = 0, ranks - 1 do
    threads[rank + 1] = ty.thread.new(serve)
    local ok, why = pcall(threads[rank + 1].send, threads[rank + 1], world, rank, o.memory, o.seed,
      rawget(_G, "ty") == ty, fn, ...)
    if not ok then fail("%s: fn and its arguments: %s", who, plain(why)) end
  end
  local results, problem = {}, nil
  for i, thread in ipairs(threads) do
    local came, ok, value, first = pcall(thread.receive, thread)
    if not came then
      if arguments.interrupted(ok) then error(ok, 0) end
      fail("%s: what fn returns on rank %d: %s", who, i - 1, plain(ok))
    elseif ok then
      results[i] = value
    else
      if first or not problem then problem = value end
      if first then break end
    end
  end
  if problem then error("dist.run: " .. problem, 0) end
  return results
end

-- ---- ranks that stay ----

--- Ranks that stay, and do what they are asked.
---@class Ranks
---@field size integer
local Ranks = {}
Ranks.__index = Ranks
Ranks.__name = "Ranks"

--- Ranks as those of run(), which stay until they are closed: setup(group, ...) runs on each and returns a function,
-- and send(rank, ...) has it called there. Nobody waits: what a rank is asked it does in the order in which it was
-- asked.
-- An error of one rank ends all of them.
--
--     local ranks <close> = dist.open(2, function(group)
--       return function(x) return group:all_reduce(x) end
--     end)
--     for rank = 0, 1 do ranks:send(rank, ty.ones(3)) end
--     print(ranks:receive(0))
---@param ranks integer
---@param setup fun(group: RankGroup, ...): function
---@param options? RankOptions
---@return Ranks
function M.open(ranks, setup, options, ...)
  local who = "dist.open"
  arguments.expect(who, "setup", setup, "a function")
  local o, world_of = open_world(who, ranks, options)
  local self = setmetatable({ size = ranks, world = world_of, threads = {} }, Ranks)
  for rank = 0, ranks - 1 do
    local prompt = rawget(_G, "ty") == ty
    local ok, thread = pcall(ty.thread.new, stay, world_of, rank, o.memory, o.seed, prompt, setup, ...)
    if not ok then
      self:close()
      fail("%s: setup and its arguments: %s", who, plain(thread))
    end
    self.threads[rank + 1] = thread
  end
  return self
end

local function thread_of(self, who, rank)
  if getmetatable(self) ~= Ranks then fail("Ranks:%s: expected ranks, got %s", who, arguments.describe(self)) end
  arguments.expect("Ranks:" .. who, "rank", rank, "an integer")
  if self.closed then fail("Ranks:%s: they were closed", who) end
  local thread = self.threads[rank + 1]
  if not thread then fail("Ranks:%s: expected a rank of 0 to %d, got %d", who, self.size - 1, rank) end
  return thread
end

--- Has a rank call its function with these values, and goes on.
---@param rank integer
function Ranks:send(rank, ...)
  local thread = thread_of(self, "send", rank)
  local ok, why = pcall(thread.send, thread, ...)
  if not ok then fail("Ranks:send: the values: %s", plain(why)) end
end

--- What the function of a rank returned for the oldest call of which that is not yet known; waits for it.
---@param rank integer
---@return any ...
function Ranks:receive(rank)
  local thread = thread_of(self, "receive", rank)
  local results = table.pack(pcall(thread.receive, thread))
  if not results[1] then
    if arguments.interrupted(results[2]) then error(results[2], 0) end
    fail("Ranks:receive: rank %d: %s", rank, plain(results[2]))
  end
  if not results[2] then error("dist.open: " .. tostring(results[3]), 0) end
  return table.unpack(results, 3, results.n)
end

--- Ends the ranks: what they were asked and have not begun they do not do.
function Ranks:close()
  if getmetatable(self) ~= Ranks then fail("Ranks:close: expected ranks, got %s", arguments.describe(self)) end
  if self.closed then return end
  self.closed = true
  close_world(self.world, self.threads)
end
Ranks.__close = Ranks.close
Ranks.__gc = Ranks.close

local world

--- The group of all processes that MPI has started (mpirun -n 4 tycho SCRIPT), each of which is a rank; alone, a
-- process is the only rank. group:clock() is the time that has passed, and nothing says what left a machine.
---@return RankGroup
function M.world()
  if not world then
    local ok, comm = pcall(core.process)
    if not ok then arguments.raise(comm, "dist.world: ") end
    world = require("tycho.dist.group").of(comm)
  end
  return world
end

return M
