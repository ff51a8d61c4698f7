--- Schedules of pipelines: in which order each rank runs micro-batches through its stages, forwards and backwards. A
-- schedule is a value, without ranks that run it; tycho.dist.pipeline goes by it, simulate() says what it would take.
--
-- Stage s of ranks * chunks stages is on rank s % ranks, as its chunk s // ranks. Huang et al. 2019, "GPipe: Efficient
-- Training of Giant Neural Networks using Pipeline Parallelism"; Narayanan et al. 2021, "Efficient Large-Scale Language
-- Model Training on GPU Clusters Using Megatron-LM", figures 3 and 4.
local arguments = require "tycho.arguments"

local M = {}

---@class PipelineAction
---@field kind "forward"|"backward"
---@field micro integer  micro-batch, from 0
---@field chunk integer  which of the rank's stages, from 0

---@class PipelineSchedule
---@field name string
---@field ranks integer
---@field micro_batches integer
---@field chunks integer
---@field [integer] PipelineAction[]  by rank, from 1 on

local Schedule = {}
Schedule.__index = Schedule
Schedule.__name = "PipelineSchedule"

-- Checks, and an empty schedule.
local function new(name, ranks, micro_batches, chunks)
  local who = "dist.schedule." .. name
  arguments.expect(who, "ranks", ranks, "an integer >= 1")
  arguments.expect(who, "micro_batches", micro_batches, "an integer >= 1")
  arguments.expect(who, "chunks", chunks, "an integer >= 1")
  if ranks > 1024 or micro_batches > 65536 or chunks > 1024 then
    arguments.fail("%s: expected at most 1024 ranks, 65536 micro-batches and 1024 chunks, got %d, %d and %d", who,
      ranks, micro_batches, chunks)
  end
  return setmetatable({ name = name, ranks = ranks, micro_batches = micro_batches, chunks = chunks }, Schedule)
end

local function add(list, kind, micro, chunk) list[#list + 1] = { kind = kind, micro = micro, chunk = chunk } end

--- Fill and drain: all micro-batches forwards, then all backwards, the last one first. A rank has all of them at once.
---@param ranks integer
---@param micro_batches integer
---@return PipelineSchedule
function M.gpipe(ranks, micro_batches)
  local self = new("gpipe", ranks, micro_batches, 1)
  for rank = 1, ranks do
    local list = {}
    for micro = 0, micro_batches - 1 do add(list, "forward", micro, 0) end
    for micro = micro_batches - 1, 0, -1 do add(list, "backward", micro, 0) end
    self[rank] = list
  end
  return self
end

--- One forwards, one backwards: a rank begins with as many micro-batches as there are ranks behind it, and then each
-- goes back before the next comes. It has at most as many at once as there are ranks, however many micro-batches.
---@param ranks integer
---@param micro_batches integer
---@return PipelineSchedule
function M.one_f_one_b(ranks, micro_batches)
  local self = new("one_f_one_b", ranks, micro_batches, 1)
  for rank = 0, ranks - 1 do
    local list, ahead = {}, math.min(ranks - rank - 1, micro_batches)
    for micro = 0, ahead - 1 do add(list, "forward", micro, 0) end
    for micro = ahead, micro_batches - 1 do
      add(list, "forward", micro, 0)
      add(list, "backward", micro - ahead, 0)
    end
    for micro = micro_batches - ahead, micro_batches - 1 do add(list, "backward", micro, 0) end
    self[rank + 1] = list
  end
  return self
end

--- One forwards, one backwards, with several stages on each rank, which are as much smaller: the pipeline fills in
-- 1 / chunks of the time and passes on chunks times as much. Ranks take as many micro-batches as there are ranks
-- through a chunk before they turn to the next.
---@param ranks integer
---@param micro_batches integer  a multiple of ranks
---@param chunks integer         stages of a rank
---@return PipelineSchedule
function M.interleaved(ranks, micro_batches, chunks)
  local self = new("interleaved", ranks, micro_batches, chunks)
  if micro_batches % ranks ~= 0 then
    arguments.fail("dist.schedule.interleaved: micro_batches: expected a multiple of the %d ranks, got %d", ranks,
      micro_batches)
  end
  local total = micro_batches * chunks
  -- The k-th forward or backward, from 0.
  local function put(list, kind, k)
    local turn, within = k // (ranks * chunks), k % (ranks * chunks)
    local chunk = within // ranks
    add(list, kind, turn * ranks + within % ranks, kind == "forward" and chunk or chunks - 1 - chunk)
  end
  for rank = 0, ranks - 1 do
    -- Each micro-batch that goes on leaves room for two of the neighbour behind, as they go to it and come back.
    local ahead = math.min(chunks == 1 and ranks - rank - 1 or 2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
    if chunks > 1 and micro_batches == ranks then ahead = total end
    local list = {}
    for k = 0, ahead - 1 do put(list, "forward", k) end
    for k = ahead, total - 1 do
      put(list, "forward", k)
      put(list, "backward", k - ahead)
    end
    for k = total - ahead, total - 1 do put(list, "backward", k) end
    self[rank + 1] = list
  end
  return self
end

--- Whether a value is a schedule.
---@param value any
---@return boolean
function M.is_schedule(value) return getmetatable(value) == Schedule end

local SECONDS = "a finite number >= 0 or a list of finite numbers >= 0"

-- A number for each rank.
local function by_rank(who, name, value, ranks)
  if type(value) == "number" then
    local list = {}
    for rank = 1, ranks do list[rank] = value end
    return list
  end
  if #value ~= ranks then
    arguments.fail("%s: %s: expected a number, or one for each of %d ranks, got %d", who, name, ranks, #value)
  end
  return value
end

--- What a schedule would take. `forward` and `backward`: what a rank takes for a micro-batch through all its chunks, a
-- number for all or a list by rank; `message`: until what a rank has computed is at the next one, or on the way back at
-- the one before, a number or a list by the rank that is nearer to the beginning (of the last one: to the first). The
-- rank goes on meanwhile. Raises an error where ranks wait for each other.
---@param schedule PipelineSchedule
---@param options? { forward?: number|number[], backward?: number|number[], message?: number|number[] }  1, 2 and 0
---@return { seconds: number, busy: number[], in_flight: integer[], rows: table[][] }  until all have ended; by rank:
-- how long it is busy, the most of its stages' micro-batches that were forwards and not yet backwards, and events
-- { name, from, to }
function M.simulate(schedule, options)
  local who = "dist.schedule.simulate"
  if not M.is_schedule(schedule) then
    arguments.fail("%s: schedule: expected a schedule, got %s", who, arguments.describe(schedule))
  end
  local o = arguments.read(who, options, { forward = 1.0, backward = 2.0, message = 0.0 },
    { forward = SECONDS, backward = SECONDS, message = SECONDS })
  local ranks, chunks = schedule.ranks, schedule.chunks
  for name, value in pairs(o) do o[name] = by_rank(who, name, value, ranks) end
  local last = ranks * chunks - 1
  local done = { forward = {}, backward = {} } -- by kind and stage * micro_batches + micro: when
  local out = { seconds = 0, busy = {}, in_flight = {}, rows = {} }
  local at, clock, flying = {}, {}, {}
  for rank = 1, ranks do
    at[rank], clock[rank], flying[rank] = 1, 0.0, 0
    out.busy[rank], out.in_flight[rank], out.rows[rank] = 0.0, 0, {}
  end
  -- Runs what a rank can run, and says whether that was anything.
  local function go_on(rank)
    local moved = false
    while true do
      local action = schedule[rank][at[rank]]
      if not action then return moved end
      local forward = action.kind == "forward"
      local stage = action.chunk * ranks + rank - 1
      local function of(kind, s) return done[kind][s * schedule.micro_batches + action.micro] end
      local ready = 0
      local before = forward and stage > 0 and stage - 1 or not forward and stage < last and stage + 1
      if before then ready = of(action.kind, before) end
      if not ready or not forward and not of("forward", stage) then return moved end
      if before then ready = ready + o.message[math.min(before, stage) % ranks + 1] end
      local from = math.max(clock[rank], ready)
      local seconds = (forward and o.forward or o.backward)[rank] / chunks
      clock[rank] = from + seconds
      done[action.kind][stage * schedule.micro_batches + action.micro] = clock[rank]
      out.busy[rank] = out.busy[rank] + seconds
      flying[rank] = flying[rank] + (forward and 1 or -1)
      out.in_flight[rank] = math.max(out.in_flight[rank], flying[rank])
      out.rows[rank][at[rank]] = { name = M.label(schedule, action), from = from, to = clock[rank] }
      at[rank], moved = at[rank] + 1, true
    end
  end
  local moved
  repeat
    moved = false
    for rank = 1, ranks do moved = go_on(rank) or moved end
  until not moved
  for rank = 1, ranks do
    local action = schedule[rank][at[rank]]
    if action then
      arguments.fail("%s: rank %d waits forever for %s of micro-batch %d in chunk %d", who, rank - 1, action.kind,
        action.micro, action.chunk)
    end
    out.seconds = math.max(out.seconds, clock[rank])
  end
  return out
end

--- The name of an action in events and pictures: "forward 3", and with several chunks "forward 3 1".
---@param schedule PipelineSchedule
---@param action PipelineAction
---@return string
function M.label(schedule, action)
  local who = "dist.schedule.label"
  if not M.is_schedule(schedule) then
    arguments.fail("%s: schedule: expected a schedule, got %s", who, arguments.describe(schedule))
  end
  arguments.expect(who, "action", action, "a table")
  arguments.expect(who, "action.kind", action.kind, "a string")
  arguments.expect(who, "action.micro", action.micro, "an integer")
  arguments.expect(who, "action.chunk", action.chunk, "an integer")
  if schedule.chunks == 1 then return ("%s %d"):format(action.kind, action.micro) end
  return ("%s %d %d"):format(action.kind, action.micro, action.chunk)
end

--- How much of the time of a run ranks do nothing, by events { name, from, to } of its ranks, of which those that are
-- named forward and backward count: idle / (ranks * time), and idle / busy, which is what Narayanan et al. call the
-- fraction of the bubble.
---@param rows table[][]  by rank
---@return number share   of the whole time
---@return number of_ideal
---@return number seconds from the first to the last of them
function M.bubble(rows)
  local who = "dist.schedule.bubble"
  arguments.expect(who, "rows", rows, "a list of tables")
  local first, last, busy = math.huge, -math.huge, 0
  for _, events in ipairs(rows) do
    for _, e in ipairs(events) do
      if type(e) ~= "table" or type(e.name) ~= "string" or not tonumber(e.from) or not tonumber(e.to) then
        arguments.fail("%s: rows: expected lists of { name, from, to }, got %s", who, arguments.describe(e))
      end
      if e.name:find "^forward" or e.name:find "^backward" then
        first, last, busy = math.min(first, e.from), math.max(last, e.to), busy + e.to - e.from
      end
    end
  end
  if busy == 0 then arguments.fail("%s: rows: expected events forward and backward, got none", who) end
  local whole = #rows * (last - first)
  return 1 - busy / whole, whole / busy - 1, last - first
end

return M
