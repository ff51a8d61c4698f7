--- Who is it that all wait for: a monitor of collectives, which names a rank that is slow, hangs or has died, and a
-- slow link, from when each rank came to each collective and how long it waited; and a supervisor that replaces it and
-- starts the job again.
--
-- Collectives of training come again and again, and all ranks do the same between them, so that a rank which is waited
-- for every time is a fault of its machine and not of the job. Dong et al. 2024, "Boosting Large-scale Parallel
-- Training Efficiency with C4: A Communication-Driven Approach".
--
-- What ranks note lies in a board, which is shared memory: it is there when a rank has died. Each writes its own part
-- of it, a ring, and only differences of one rank's times are compared: clocks of machines need not agree.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local run = require("tycho.dist.ranks").run
local Group = require "tycho.dist.group"

local expect, fail = arguments.expect, arguments.fail

local M = {}

---@class MonitorBoard
---@field ring Tensor     f64 [ranks, capacity, 3]: of a collective its number, seconds of work before it, seconds of
--   waiting for it; -1 while it is waited for
---@field came Tensor     f64 [ranks]: the number of the last collective that each has come to
---@field transit Tensor  f64 [ranks, ranks]: seconds of a message from one to the other, 0 where none was sent
---@field verdict Tensor  f64 [3]: what a rank has found while the job ran: place in KINDS, and ranks

local PROBE = 1 << 40 -- tag of its messages
local KINDS = { "dead", "hung", "slow", "link" }

--- An empty board for so many ranks. options: capacity (32: collectives of each that are kept).
---@param ranks integer
---@param options? { capacity?: integer }
---@return MonitorBoard
function M.board(ranks, options)
  expect("dist.monitor.board", "ranks", ranks, "an integer >= 1")
  local o = arguments.read("dist.monitor.board", options, { capacity = 32 }, { capacity = "an integer >= 4" })
  local function zeros(...) return ty.zeros({ ... }, { dtype = "f64" }) end
  return { ring = zeros(ranks, o.capacity, 3), came = zeros(ranks), transit = zeros(ranks, ranks), verdict = zeros(3) }
end

local function check_board(who, board)
  expect(who, "board", board, "a table")
  for _, name in ipairs { "ring", "came", "transit", "verdict" } do
    if not ty.is_tensor(board[name]) then
      fail("%s: board: expected what dist.monitor.board gives, got %s", who, arguments.describe(board))
    end
  end
end

local OPTIONS = { timeout = 60, window = 8, share = 0.25, times = 3 }
local WANTED = { timeout = "a number > 0", window = "an integer >= 2", share = "a number > 0", times = "a number > 1" }

-- ---- what a rank does ----

--- A rank's side of the monitor.
---@class MonitorWatch
local Watch = {}
Watch.__index = Watch
Watch.__name = "MonitorWatch"

--- From now on the rank notes its collectives on the board; barriers do not count, which are no work's end. One that
-- has been waited for longer than `timeout` seconds is an error. options: timeout (60), window (8: collectives that are
-- judged together), share (0.25: how much later than all others a slow rank comes, of their work), times (3: how much
-- longer than others a message on a slow link takes).
---@param group RankGroup
---@param board MonitorBoard
---@param options? { timeout?: number, window?: integer, share?: number, times?: number }
---@return MonitorWatch
function M.watch(group, board, options)
  local who = "dist.monitor.watch"
  Group.expect(who, group)
  check_board(who, board)
  if board.came.shape[1] ~= group.size then
    fail("%s: board: expected one for %d ranks, got one for %d", who, group.size, board.came.shape[1])
  end
  local o = arguments.read(who, options, OPTIONS, WANTED)
  local self = setmetatable({ group = group, board = board, options = o, count = 0 }, Watch)
  local ring, came = board.ring[group.rank], board.came:narrow(0, group.rank, 1)
  local capacity, left = ring.shape[1], group:clock()
  local entered, worked = {}, {}
  group:observe(function(number, name, clock, over)
    if name == "barrier" then return end
    if not over then
      self.count = self.count + 1
      entered[number], worked[number] = { self.count, clock }, clock - left
      ring:narrow(0, (self.count - 1) % capacity, 1):copy_(ty.tensor({ { self.count, clock - left, -1 } },
        { dtype = "f64" }))
      came:fill_(self.count)
      return
    end
    local count, began = table.unpack(entered[number])
    ring:narrow(0, (count - 1) % capacity, 1):copy_(ty.tensor({ { count, worked[number], clock - began } },
      { dtype = "f64" }))
    entered[number], worked[number], left = nil, nil, clock
    if clock - began > o.timeout then
      fail("dist.monitor: rank %d has waited %.1f s for others, more than the %g s that it may", group.rank,
        clock - began, o.timeout)
    end
  end)
  return self
end

--- Sends a message from every rank to every other, one at a time, and notes how long it was on its way. All ranks call
-- it.
---@param bytes? integer  of a message (4096)
function Watch:probe(bytes)
  expect("MonitorWatch:probe", "bytes", bytes, "an integer >= 4 or nil")
  local group, x = self.group, ty.zeros((bytes or 4096) // 4)
  for k = 1, group.size - 1 do
    local from = (group.rank - k) % group.size
    group:barrier()
    local began = group:clock()
    group:send(x, (group.rank + k) % group.size, PROBE)
    group:receive(from, PROBE)
    self.board.transit[from]:narrow(0, group.rank, 1):fill_(group:clock() - began)
  end
  group:barrier()
end

--- Looks whether a rank or a link is slow; all ranks call it, at a place from which the job can go on. Where there is
-- one, it is noted on the board and the first rank gets an error, which ends the job.
function Watch:check()
  self:probe()
  if self.group.rank ~= 0 then return end
  local found = M.diagnose(self.board, self.options)
  if not found then return end
  for i, kind in ipairs(KINDS) do
    if kind == found.kind then
      self.board.verdict:copy_(ty.tensor({ i, found.rank, found.to or -1 }, { dtype = "f64" }))
    end
  end
  fail("dist.monitor: %s", found.text)
end

-- ---- what is read off the board ----

-- The largest and the second largest of a list, and the place of the largest.
local function two_largest(list)
  local place, largest, second = 1, list[1], -math.huge
  for i = 2, #list do
    if list[i] > largest then
      place, largest, second = i, list[i], largest
    elseif list[i] > second then
      second = list[i]
    end
  end
  return place, largest, second
end

-- By collective, those that all ranks have waited for: { number, work = by rank, waits = by rank }, in their order.
local function complete(board)
  local by_number, ranks = {}, board.came.shape[1]
  for rank, ring in ipairs(board.ring:tolist()) do
    for _, entry in ipairs(ring) do
      local number, work, wait = table.unpack(entry)
      if number > 0 and wait >= 0 then
        local one = by_number[number] or { number = number, work = {}, waits = {}, ranks = 0 }
        one.work[rank], one.waits[rank], one.ranks = work, wait, one.ranks + 1
        by_number[number] = one
      end
    end
  end
  local list = {}
  for _, one in pairs(by_number) do if one.ranks == ranks then list[#list + 1] = one end end
  table.sort(list, function(a, b) return a.number < b.number end)
  return list
end

local function hung(board, o)
  for rank, ring in ipairs(board.ring:tolist()) do
    for _, entry in ipairs(ring) do
      if entry[1] > 0 and entry[2] > o.timeout then
        return { kind = "hung", rank = rank - 1,
          text = ("rank %d came to collective %d only after %.1f s"):format(rank - 1, entry[1], entry[2]) }
      end
    end
  end
end

-- Of a job that has ended: one rank has not come to the collective in which all others wait.
local function dead(board)
  local came = board.came:tolist()
  local last = math.max(table.unpack(came))
  local missing = {}
  for rank, number in ipairs(came) do if number < last then missing[#missing + 1] = rank - 1 end end
  if #missing == 1 then
    return { kind = "dead", rank = missing[1],
      text = ("rank %d has not come to collective %d, where all others wait"):format(missing[1], last) }
  end
end

-- The others wait for one and the same rank in three quarters of the last collectives, and long: it waits the least.
local function slow(board, o)
  local all, list, most = complete(board), {}, 0
  for _, one in ipairs(all) do
    one.usual = ty.stats.median(one.work)
    most = math.max(most, one.usual)
  end
  -- One right after another tells nothing: whoever came late has been waited for already.
  for _, one in ipairs(all) do if one.usual > most / 4 then list[#list + 1] = one end end
  if #list < o.window or board.came.shape[1] < 3 then return nil end
  local times, excess, usual = {}, {}, {}
  for i = #list - o.window + 1, #list do
    local one, negative = list[i], {}
    for rank, wait in ipairs(one.waits) do negative[rank] = -wait end
    local place, largest, second = two_largest(negative)
    times[place] = (times[place] or 0) + 1
    excess[place] = excess[place] or {}
    table.insert(excess[place], largest - second)
    usual[#usual + 1] = one.usual
  end
  for place, count in pairs(times) do
    local later, work = ty.stats.median(excess[place]), ty.stats.median(usual)
    if count >= 0.75 * o.window and later > o.share * work then
      return { kind = "slow", rank = place - 1, text = ("rank %d is the last in %d of %d collectives, by %.3g s, "
        .. "where work takes %.3g s"):format(place - 1, count, o.window, later, work) }
    end
  end
end

-- Seconds of work before a collective, of all that the board has; 0 where it has none.
local function usual_work(board)
  local list = {}
  for i, one in ipairs(complete(board)) do list[i] = math.max(table.unpack(one.work)) end
  return #list > 0 and math.max(table.unpack(list)) or 0
end

-- One message takes much longer than all, also than others that its two ranks send and receive, and so long that it
-- counts beside the work: of links that take next to nothing one is always the slowest.
local function slow_link(board, o)
  local all, longest, from, to = {}, -1, nil, nil
  for a, row in ipairs(board.transit:tolist()) do
    for b, seconds in ipairs(row) do
      if a ~= b and seconds > 0 then
        all[#all + 1] = seconds
        if seconds > longest then longest, from, to = seconds, a - 1, b - 1 end
      end
    end
  end
  if #all < 6 then return nil end
  local _, _, second = two_largest(all)
  local usual = ty.stats.median(all)
  if longest > o.times * usual and longest > o.times * second and longest > usual_work(board) / 100 then
    return { kind = "link", rank = from, to = to, text = ("a message from rank %d to %d takes %.3g s, others %.3g s")
      :format(from, to, longest, usual) }
  end
end

--- What is wrong by the board, or nil. kind: "slow" (rank), "link" (rank and to), and of a job that has ended, which
-- `ended` says, "dead" or "hung" (rank). A link is looked for between three ranks or more, as a slow rank is.
---@param board MonitorBoard
---@param options? { ended?: boolean, timeout?: number, window?: integer, share?: number, times?: number }
---@return { kind: string, rank: integer, to?: integer, text: string }|nil
function M.diagnose(board, options)
  local who = "dist.monitor.diagnose"
  check_board(who, board)
  local defaults = { ended = false }
  for name, value in pairs(OPTIONS) do defaults[name] = value end
  local o = arguments.read(who, options, defaults, WANTED)
  local verdict = board.verdict:tolist()
  if verdict[1] > 0 then
    local to = verdict[3] >= 0 and math.tointeger(verdict[3]) or nil
    return { kind = KINDS[math.tointeger(verdict[1])], rank = math.tointeger(verdict[2]), to = to,
      text = "found while the job ran" }
  end
  return o.ended and (hung(board, o) or dead(board)) or slow(board, o) or slow_link(board, o)
end

-- ---- the supervisor ----

--- Runs job(group, watch, machine, ...) on `ranks` of the machines until it is done. What fails is looked for on the
-- board; that machine is left out, a spare one takes its place, or there is a rank less, and the job is started again:
-- it goes on from its last checkpoint. An error that the board does not explain is no machine's fault, and is raised.
-- options: ranks (all machines), network (options of dist.run), and those of watch(). watch.machines has the machines
-- of all ranks.
---@param machines any[]  names, of which the first `ranks` are used and the others are spare
---@param job fun(group: RankGroup, watch: MonitorWatch, machine: any, ...): any
---@param options? table
---@return any[] results  of the ranks of the last start
---@return table[] found  of each failure: machine, kind, rank, text; of a link also to, and other, its machine
function M.supervise(machines, job, options, ...)
  local who = "dist.monitor.supervise"
  expect(who, "machines", machines, "a list")
  expect(who, "job", job, "a function")
  if #machines == 0 then fail("%s: machines: expected at least one, got none", who) end
  local defaults = { ranks = #machines, network = {} }
  for name, value in pairs(OPTIONS) do defaults[name] = value end
  local wanted = { ranks = "an integer >= 1", network = "a table" }
  for name, value in pairs(WANTED) do wanted[name] = value end
  local o = arguments.read(who, options, defaults, wanted)
  local active = table.move(machines, 1, math.min(o.ranks, #machines), 1, {})
  local spare = table.move(machines, #active + 1, #machines, 1, {})
  local limits, found = {}, {}
  for name in pairs(OPTIONS) do limits[name] = o[name] end
  while true do
    local board = M.board(#active)
    -- A rank that dies tells nobody, as a process that is gone: that the others wait for it is how it is noticed.
    local results = run(#active, function(group, names, shared, settings, fn, ...)
      local monitor = require "tycho.dist.monitor"
      local done, value = pcall(function(...)
        local watch = monitor.watch(group, shared, settings)
        watch.machines = names
        return fn(group, watch, names[group.rank + 1], ...)
      end, ...)
      return { done = done, value = done and value or tostring(value) }
    end, o.network, active, board, limits, job, ...)
    local problem
    for i, result in ipairs(results) do
      if not result.done then problem = problem or result.value else results[i] = result.value end
    end
    if not problem then return results, found end
    limits.ended = true
    local one = M.diagnose(board, limits)
    limits.ended = nil
    if not one then error("dist.monitor.supervise: " .. problem, 0) end
    one.machine = active[one.rank + 1]
    one.other = one.to and active[one.to + 1]
    found[#found + 1] = one
    if spare[1] then
      active[one.rank + 1] = table.remove(spare, 1)
    else
      table.remove(active, one.rank + 1)
      if #active == 0 then error("dist.monitor.supervise: no machine is left: " .. one.text, 0) end
    end
  end
end

return M
