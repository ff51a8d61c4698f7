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
  arguments.expect(who, "ranks", ranks, "an integer >= 1")
  if ranks > 1024 then fail("%s: ranks: expected at most 1024, got %d", who, ranks) end
  arguments.expect(who, "fn", fn, "a function")
  local o = arguments.read(who, options, DEFAULTS, WANTED)
  local within = arguments.read(who .. ": within", o.within or {}, { latency = 0, bandwidth = math.huge },
    { latency = WANTED.latency, bandwidth = WANTED.bandwidth })
  local one_machine = o.per_node == 0
  if one_machine and not o.within then within = o end
  local world = core.open(ranks, o.latency, o.bandwidth, within.latency, within.bandwidth,
    one_machine and ranks or o.per_node)
  local threads = {}
  local _ <close> = setmetatable({}, { __close = function()
    core.fail(world, "the run was ended")
    for _, thread in ipairs(threads) do thread:close() end
    core.close(world)
  end })
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
      if tostring(ok):find "interrupted" then error(ok, 0) end
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
