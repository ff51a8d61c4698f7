--- Requests as they come over time, and an engine that serves them. Time is that of the processor, where all computing
-- is done there: what else the machine does then neither delays requests nor makes an engine slow.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local uniform = require("tycho.serve.choice").uniform

local M = {}

-- Numbers in (0, 1), one after another.
local function stream(seed)
  local place = 0
  return function()
    place = place + 1
    return 1 - uniform(seed, place)
  end
end

-- A draw of the gamma distribution with mean `shape`. Marsaglia and Tsang 2000, "A Simple Method for Generating Gamma
-- Variables".
local function gamma(shape, draw)
  if shape < 1 then return gamma(shape + 1, draw) * draw() ^ (1 / shape) end
  local d = shape - 1 / 3
  local c = 1 / math.sqrt(9 * d)
  while true do
    local x = math.sqrt(-2 * math.log(draw())) * math.cos(2 * math.pi * draw())
    local v = (1 + c * x) ^ 3
    if v > 0 and math.log(draw()) < x * x / 2 + d - d * v + d * math.log(v) then return d * v end
  end
end

---@class ServeArrival
---@field at number          seconds after the beginning
---@field prompt integer[]
---@field count integer      new tokens
---@field adapter? integer   the number of its adapter

--- A trace: requests that come `rate` in a second, the times between them drawn from a gamma distribution with the
-- coefficient of variation cv (1: a Poisson process), prompts cut from `text` anywhere; how long prompts and answers
-- are is drawn uniformly from two pairs; adapter i of n is asked for with a probability that goes with i^-power. Sheng
-- et al. 2023, "S-LoRA", section 7. options: text (tokens, i64 [n]), requests (64), rate (1), cv (1), input
-- ({ 8, 64 }), output ({ 8, 64 }), adapters (0: none), power (1), seed (0).
---@param options table
---@return ServeArrival[]
function M.trace(options)
  local who = "serve.traces.trace"
  local o = arguments.read(who, options, { text = arguments.none, requests = 64, rate = 1, cv = 1, input = { 8, 64 },
    output = { 8, 64 }, adapters = 0, power = 1, seed = 0 }, { text = "a tensor", requests = "an integer >= 1",
    rate = "a number > 0", cv = "a number > 0", input = "a pair of integers", output = "a pair of integers",
    adapters = "an integer >= 0", power = "a number >= 0", seed = "an integer" })
  if not o.text or o.text.ndim ~= 1 or o.text.dtype ~= "i64" or o.text.shape[1] < math.max(1, o.input[2]) then
    arguments.fail("%s: text: expected at least %d tokens, i64 [n], got %s", who, math.max(1, o.input[2]),
      arguments.describe(o.text))
  end
  for _, name in ipairs { "input", "output" } do
    if o[name][1] < 1 or o[name][2] < o[name][1] then
      arguments.fail("%s: %s: expected two numbers of tokens that rise, got %d and %d", who, name, o[name][1],
        o[name][2])
    end
  end
  local times, texts, popular = stream(3 * o.seed), stream(3 * o.seed + 1), stream(3 * o.seed + 2)
  local shares, sum = {}, 0
  for i = 1, o.adapters do
    sum = sum + i ^ -o.power
    shares[i] = sum
  end
  local function between(pair) return pair[1] + math.floor(texts() * (pair[2] - pair[1] + 1)) end
  local list, at = {}, 0
  for i = 1, o.requests do
    at = at + gamma(1 / o.cv ^ 2, times) * o.cv ^ 2 / o.rate
    local length = math.min(between(o.input), o.input[2])
    local from = math.floor(texts() * (o.text.shape[1] - length))
    local wanted, adapter = popular() * sum, 1
    while adapter < o.adapters and shares[adapter] < wanted do adapter = adapter + 1 end
    list[i] = { at = at, prompt = o.text:narrow(0, from, length):tolist(), count = math.min(between(o.output),
      o.output[2]), adapter = o.adapters > 0 and adapter or nil }
  end
  return list
end

-- Seconds of the processor, or of the wall where another device computes.
local function clock_of(engine)
  return engine.device == "cpu" and os.clock or ty.system.clock
end

---@class ServeResults
---@field requests ServeRequest[]
---@field seconds number   that the engine was busy
---@field tokens integer   that it gave
---@field first number     seconds from arrival to the first token, the mean
---@field latency number   to the last token

--- Serves a trace. submit(arrival, options) asks for what an arrival is, engine:submit by default; next_ones(waiting)
-- takes from the arrivals that wait for their turn those that may be submitted now (nil: all at once). logprobs: asked
-- for. turn(): called after each step, such as coroutine.yield.
---@param engine ServeEngine
---@param trace ServeArrival[]
---@param options? { submit?: function, next_ones?: function, logprobs?: boolean, turn?: function }
---@return ServeResults
function M.serve(engine, trace, options)
  arguments.expect("serve.traces.serve", "engine", engine, "a table")
  arguments.expect("serve.traces.serve", "trace", trace, "a list")
  local o = arguments.read("serve.traces.serve", options, { submit = arguments.none, next_ones = arguments.none,
    logprobs = false, turn = arguments.none }, { submit = "a function", next_ones = "a function",
    turn = "a function" })
  local submit = o.submit or function(arrival, more) return engine:submit(arrival.prompt, more) end
  local clock, now, came, left, waiting = clock_of(engine), 0, 0, #trace, {}
  local results = { requests = {}, seconds = 0, tokens = 0, first = 0, latency = 0 }
  local due, ended
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
      local arrival = trace[i]
      results.requests[i] = submit(arrival, { count = arrival.count, stop_tokens = false, logprobs = o.logprobs,
        on_token = function(request) if #request.tokens == 1 then due[#due + 1] = arrival end end,
        on_end = function() ended[#ended + 1] = arrival end })
    end
    local busy = #engine.running + #engine.waiting > 0
    if busy then engine:step() end
    local took = clock() - began
    if busy then
      now, results.seconds = now + took, results.seconds + took
    elseif came < #trace then
      now = math.max(now, trace[came + 1].at)
    end
    for _, arrival in ipairs(due) do results.first = results.first + now - arrival.at end
    for _, arrival in ipairs(ended) do results.latency = results.latency + now - arrival.at end
    left = left - #ended
    if o.turn then o.turn() end
  end
  for _, request in ipairs(results.requests) do
    if request.reason == "failed" then error("serve.traces.serve: " .. request.error, 0) end
    results.tokens = results.tokens + #request.tokens
  end
  results.first, results.latency = results.first / #trace, results.latency / #trace
  return results
end

--- Runs functions step by step in turn, so that what disturbs one disturbs the others: each is called with a function
-- that it calls after every step. Returns what they return, by their names.
---@generic K
---@param runs table<K, fun(turn: function): any>
---@return table<K, any>
function M.in_turns(runs)
  arguments.expect("serve.traces.in_turns", "runs", runs, "a table")
  local names, threads, results = {}, {}, {}
  for name, run in pairs(runs) do
    arguments.expect("serve.traces.in_turns", "runs." .. tostring(name), run, "a function")
    names[#names + 1], threads[name] = name, coroutine.create(run)
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
