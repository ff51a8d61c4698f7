--- Requests as they come over time: when, how long they are, and which adapter they ask for.
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

--- When `n` requests come, in seconds: `rate` in a second in the mean, the times between them drawn from a gamma
-- distribution with the coefficient of variation cv (1: independently of each other, a Poisson process).
---@param n integer
---@param rate number
---@param seed? integer  (0)
---@param cv? number  (1)
---@return number[]
function M.arrivals(n, rate, seed, cv)
  local who = "serve.traces.arrivals"
  arguments.expect(who, "n", n, "an integer in [0, 1000000]")
  arguments.expect(who, "rate", rate, "a number > 0")
  arguments.expect(who, "seed", seed, "an integer or nil")
  arguments.expect(who, "cv", cv, "a number > 0 or nil")
  local draw, now, list = stream(3 * (seed or 0)), 0, {}
  cv = cv or 1
  for i = 1, n do
    now = now + gamma(1 / cv ^ 2, draw) * cv ^ 2 / rate
    list[i] = now
  end
  return list
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
  local times = M.arrivals(o.requests, o.rate, o.seed, o.cv)
  local texts, popular = stream(3 * o.seed + 1), stream(3 * o.seed + 2)
  local shares, sum = {}, 0
  for i = 1, o.adapters do
    sum = sum + i ^ -o.power
    shares[i] = sum
  end
  local function between(pair) return pair[1] + math.floor(texts() * (pair[2] - pair[1] + 1)) end
  local list = {}
  for i = 1, o.requests do
    local length = math.min(between(o.input), o.input[2])
    local from = math.floor(texts() * (o.text.shape[1] - length))
    local wanted, adapter = popular() * sum, 1
    while adapter < o.adapters and shares[adapter] < wanted do adapter = adapter + 1 end
    list[i] = { at = times[i], prompt = o.text:narrow(0, from, length):tolist(), count = math.min(between(o.output),
      o.output[2]), adapter = o.adapters > 0 and adapter or nil }
  end
  return list
end

return M
