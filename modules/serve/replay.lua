--- Traces of requests played to an engine by a clock that stands still while nobody computes: what each request waited
-- for, without hours of waiting. The clock counts the processor's time of the steps, so that others who use the machine
-- do not count.
local arguments = require "tycho.arguments"

local expect = arguments.expect
local M = {}

--- When requests arrive that come independently of each other, `rate` a second in the mean: n times in seconds, from
-- the seed.
---@param n integer
---@param rate number
---@param seed integer
---@return number[]
function M.arrivals(n, rate, seed)
  expect("replay.arrivals", "n", n, "an integer in [0, 1000000]")
  expect("replay.arrivals", "rate", rate, "a number > 0")
  expect("replay.arrivals", "seed", seed, "an integer")
  local uniform, now, list = require("tycho.serve.choice").uniform, 0, {}
  for i = 1, n do
    now = now - math.log(1 - uniform(seed, i)) / rate
    list[i] = now
  end
  return list
end

local function check(who, trace)
  expect(who, "trace", trace, "a list of tables")
  for i, x in ipairs(trace) do
    local at = who .. ": request " .. i
    expect(at, "at", x.at, "a number >= 0")
    if i > 1 and x.at < trace[i - 1].at then
      arguments.fail("%s: at: expected no time before that of the request before, got %g after %g", at, x.at,
        trace[i - 1].at)
    end
  end
end

-- first: when each request got its first token; done: its last one; in seconds after it arrived.
local function result(trace, first, done, tokens)
  local r = { first = {}, done = {}, each = {}, tokens = 0, seconds = 0 }
  for i, x in ipairs(trace) do
    if done[i] then
      r.first[#r.first + 1], r.done[#r.done + 1] = first[i] - x.at, done[i] - x.at
      r.each[#r.each + 1] = (done[i] - x.at) / tokens[i]
      r.tokens, r.seconds = r.tokens + tokens[i], math.max(r.seconds, done[i])
    end
  end
  r.throughput = r.seconds > 0 and r.tokens / r.seconds or 0
  return r
end

--- Plays a trace to an engine. trace: requests in the order of their times, tables with at (seconds), tokens and
-- options (of engine:submit()). clock: seconds of what computes (os.clock). Returns first, done and each (seconds from
-- its arrival to the first and to the last token of each request, and the latter by token), tokens, seconds (when the
-- last one ended) and throughput (tokens a second); and the requests.
---@param engine ServeEngine
---@param trace { at: number, tokens: integer[], options: table }[]
---@param clock? fun(): number
---@return table times
---@return ServeRequest[] requests
function M.run(engine, trace, clock)
  expect("replay.run", "engine", engine, "a table")
  check("replay.run", trace)
  expect("replay.run", "clock", clock, "a function or nil")
  clock = clock or os.clock
  local now, next_one, requests, first, done, counts = 0, 1, {}, {}, {}, {}
  local busy = false
  while next_one <= #trace or busy do
    if not busy then now = math.max(now, trace[next_one].at) end
    while next_one <= #trace and trace[next_one].at <= now do
      local x = trace[next_one]
      requests[next_one] = engine:submit(x.tokens, x.options)
      next_one = next_one + 1
    end
    local begun = clock()
    busy = engine:step()
    now = now + clock() - begun
    for i, request in ipairs(requests) do
      if not first[i] and #request.tokens > 0 then first[i] = now end
      if not done[i] and request.reason then done[i], counts[i] = now, #request.tokens end
    end
  end
  return result(trace, first, done, counts), requests
end

--- The same by batches that begin and end together: up to `batch` requests that wait are generated until the longest of
-- them has all its tokens, each getting them as they come; those that arrive meanwhile wait.
---@param model LanguageModel
---@param trace { at: number, tokens: integer[], options: table }[]
---@param batch integer
---@param clock? fun(): number
---@return table times
---@return integer[][] texts  the new tokens of each
function M.batches(model, trace, batch, clock)
  expect("replay.batches", "model", model, "a module")
  check("replay.batches", trace)
  expect("replay.batches", "batch", batch, "an integer >= 1")
  expect("replay.batches", "clock", clock, "a function or nil")
  clock = clock or os.clock
  local now, at, first, done, counts, texts = 0, 1, {}, {}, {}, {}
  while at <= #trace do
    now = math.max(now, trace[at].at)
    local rows, most, base = {}, 0, at
    while at <= #trace and trace[at].at <= now and #rows < batch do
      local o = trace[at].options
      rows[#rows + 1], most, counts[at] = trace[at].tokens, math.max(most, o.count), o.count
      at = at + 1
    end
    local begun, got = clock(), {}
    local all = model:generate(rows, most, { temperature = 0, stop_tokens = false, on_token = function(row)
      local i = base + row - 1
      got[i] = (got[i] or 0) + 1
      if got[i] == 1 then first[i] = now + clock() - begun end
      if got[i] == counts[i] then done[i] = now + clock() - begun end
      return got[i] < counts[i]
    end })
    now = now + clock() - begun
    for row, tokens in ipairs(all) do
      local i, list = base + row - 1, tokens:tolist()
      texts[i] = table.move(list, #rows[row] + 1, #rows[row] + counts[i], 1, {})
    end
  end
  return result(trace, first, done, counts), texts
end

return M
