--- Traces of requests played to an engine by a clock that stands still while nobody computes: what each request waited
-- for, without hours of waiting. Time is that of the processor, where all computing is done there: what else the
-- machine does then neither delays requests nor makes an engine slow.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, none = arguments.expect, arguments.none
local M = {}

local function check(who, trace)
  expect(who, "trace", trace, "a list of tables")
  for i, x in ipairs(trace) do
    local at = who .. ": request " .. i
    expect(at, "at", x.at, "a number >= 0")
    expect(at, "prompt", x.prompt, "a list")
    expect(at, "count", x.count, "an integer >= 1")
    if i > 1 and x.at < trace[i - 1].at then
      arguments.fail("%s: at: expected no time before that of the request before, got %g after %g", at, x.at,
        trace[i - 1].at)
    end
  end
end

--- What a trace took. Lists are by request, in the order of the trace.
---@class ServeResults
---@field texts integer[][]  the new tokens of each request
---@field requests? ServeRequest[]  of an engine
---@field first number[]     seconds from each request's arrival to its first token
---@field done number[]      to its last one
---@field each number[]      the latter by token
---@field tokens integer     that all got
---@field busy number        seconds in which something was computed
---@field ended number       when the last request ended
---@field throughput number  tokens by ended

local function results_of(trace, texts, first, done, counts, busy)
  local r = { texts = texts, first = {}, done = {}, each = {}, tokens = 0, busy = busy, ended = 0 }
  for i, x in ipairs(trace) do
    r.first[i], r.done[i] = first[i] - x.at, done[i] - x.at
    r.each[i] = r.done[i] / counts[i]
    r.tokens, r.ended = r.tokens + counts[i], math.max(r.ended, done[i])
  end
  r.throughput = r.ended > 0 and r.tokens / r.ended or 0
  return r
end

--- Plays a trace to an engine. options: clock (seconds of what computes; nil: of the processor, or of the wall where
-- another device computes), submit(arrival, options) (asks for what an arrival is; nil: engine:submit()), next_ones(
-- waiting, trace) (takes from the numbers of the arrivals that wait for their turn those that may be submitted now;
-- nil: all at once), logprobs (false), turn (called after each step, such as coroutine.yield). A request that fails
-- raises.
---@param engine ServeEngine
---@param trace ServeArrival[]
---@param options? { clock?: function, submit?: function, next_ones?: function, logprobs?: boolean, turn?: function }
---@return ServeResults
function M.run(engine, trace, options)
  expect("replay.run", "engine", engine, "a table")
  check("replay.run", trace)
  local o = arguments.read("replay.run", options, { clock = none, submit = none, next_ones = none, logprobs = false,
    turn = none }, { clock = "a function", submit = "a function", next_ones = "a function", logprobs = "a boolean",
    turn = "a function" })
  local clock = o.clock or (engine.device or "cpu") == "cpu" and os.clock or ty.system.clock
  local submit = o.submit or function(arrival, more) return engine:submit(arrival.prompt, more) end
  local now, busy, came, left, waiting = 0, 0, 0, #trace, {}
  local requests, first, done, counts = {}, {}, {}, {}
  local due, ended -- who got a first token, or the last one, in the step that goes on
  while left > 0 do
    while came < #trace and trace[came + 1].at <= now do
      came = came + 1
      waiting[#waiting + 1] = came
    end
    local began = clock()
    due, ended = {}, {}
    local ready = waiting
    if o.next_ones then ready = o.next_ones(waiting, trace) else waiting = {} end
    for _, i in ipairs(ready) do
      requests[i] = submit(trace[i], { count = trace[i].count, stop_tokens = false, logprobs = o.logprobs,
        on_token = function(request) if #request.tokens == 1 then due[#due + 1] = i end end,
        on_end = function() ended[#ended + 1] = i end })
    end
    if #engine.running + #engine.waiting > 0 then
      engine:step()
      local took = clock() - began
      now, busy = now + took, busy + took
    elseif came < #trace then
      now = math.max(now, trace[came + 1].at)
    end
    for _, i in ipairs(due) do first[i] = now end
    for _, i in ipairs(ended) do
      if requests[i].reason == "failed" then error("replay.run: " .. requests[i].error, 0) end
      done[i], counts[i] = now, #requests[i].tokens
    end
    left = left - #ended
    if o.turn then o.turn() end
  end
  local texts = {}
  for i, request in ipairs(requests) do texts[i] = request.tokens end
  local results = results_of(trace, texts, first, done, counts, busy)
  results.requests = requests
  return results
end

--- The same by batches that begin and end together: up to `batch` requests that wait are generated until the longest of
-- them has all its tokens, each getting them as they come; those that arrive meanwhile wait.
---@param model LanguageModel
---@param trace ServeArrival[]
---@param batch integer
---@param clock? fun(): number
---@return ServeResults
function M.batches(model, trace, batch, clock)
  expect("replay.batches", "model", model, "a module")
  check("replay.batches", trace)
  expect("replay.batches", "batch", batch, "an integer >= 1")
  expect("replay.batches", "clock", clock, "a function or nil")
  clock = clock or model:device() == "cpu" and os.clock or ty.system.clock
  local now, busy, at, first, done, counts, texts = 0, 0, 1, {}, {}, {}, {}
  while at <= #trace do
    now = math.max(now, trace[at].at)
    local rows, most, base = {}, 0, at
    while at <= #trace and trace[at].at <= now and #rows < batch do
      rows[#rows + 1], most, counts[at] = trace[at].prompt, math.max(most, trace[at].count), trace[at].count
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
    local took = clock() - begun
    now, busy = now + took, busy + took
    for row, tokens in ipairs(all) do
      local i, list = base + row - 1, tokens:tolist()
      texts[i] = table.move(list, #rows[row] + 1, #rows[row] + counts[i], 1, {})
    end
  end
  return results_of(trace, texts, first, done, counts, busy)
end

--- The new tokens that the model gives each request of a trace alone, the most likely ones.
---@param model LanguageModel
---@param trace ServeArrival[]
---@return integer[][] texts
function M.alone(model, trace)
  expect("replay.alone", "model", model, "a module")
  check("replay.alone", trace)
  local texts = {}
  for i, x in ipairs(trace) do
    local all = model:generate({ x.prompt }, x.count, { temperature = 0, stop_tokens = false })[1]:tolist()
    texts[i] = table.move(all, #x.prompt + 1, #all, 1, {})
  end
  return texts
end

--- The share of texts that are the same in two lists.
---@param texts integer[][]
---@param others integer[][]
---@return number
function M.same(texts, others)
  expect("replay.same", "texts", texts, "a list of lists")
  expect("replay.same", "others", others, "a list of lists")
  local count = 0
  for i, text in ipairs(texts) do
    local equal = others[i] ~= nil and #text == #others[i]
    for j, token in ipairs(text) do equal = equal and token == others[i][j] end
    count = count + (equal and 1 or 0)
  end
  return count / math.max(1, #texts)
end

--- Runs functions step by step in turn, so that what disturbs one disturbs the others: each is called with a function
-- that it calls after every step. Returns what they return, by their names.
---@generic K
---@param runs table<K, fun(turn: function): any>
---@return table<K, any>
function M.in_turns(runs)
  arguments.expect("replay.in_turns", "runs", runs, "a table")
  local names, threads, results = {}, {}, {}
  for name, run in pairs(runs) do
    arguments.expect("replay.in_turns", "runs." .. tostring(name), run, "a function")
    names[#names + 1], threads[name] = name, coroutine.create(function(turn) return run(turn) end)
  end
  table.sort(names, function(a, b) return tostring(a) < tostring(b) end)
  while next(threads) do
    for _, name in ipairs(names) do
      local thread = threads[name]
      if thread then
        local ok, result = coroutine.resume(thread, coroutine.yield)
        if not ok then error(result, 0) end
        if coroutine.status(thread) == "dead" then results[name], threads[name] = result, nil end
      end
    end
  end
  return results
end

return M
