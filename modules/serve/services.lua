--- Requests as a service gets them: when they come, how long their prompts are and how many tokens are asked for. The
-- lengths have the distributions of two services of Azure in November 2023, by their quantiles; they come one
-- independently of the other. Patel et al. 2023, "Splitwise: Efficient generative LLM inference using phase splitting",
-- whose traces are published as AzureLLMInferenceTrace_code and _conv (AzurePublicDataset, CC-BY 4.0).
local arguments = require "tycho.arguments"
local choice = require "tycho.serve.choice"

local M = {}

-- At these percentages of the requests, of 8,819 of the first service and 19,366 of the second.
local shares = { 0, 1, 2.5, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 97.5, 99, 100 }
local quantiles = {
  coding = {
    prompt = { 3, 17, 44, 75, 147, 232, 386, 578, 770, 938, 1075, 1261, 1469, 1690, 1909, 2164, 2433, 2745, 3192, 3919,
      5186, 7302, 7435, 7436, 7437 },
    count = { 6, 6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 90, 145, 252, 1899 },
  },
  conversation = {
    prompt = { 2, 29, 120, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315, 1876,
      2735, 4083, 4092, 4142, 14050 },
    count = { 7, 16, 28, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 522,
      601, 1000 },
  },
}

-- The value at a share u in [0, 1). Between two quantiles logarithms are interpolated: the last parts are long tails.
local function at_share(values, u)
  u = 100 * u
  local i = 1
  while shares[i + 1] < u do i = i + 1 end
  local f = (u - shares[i]) / (shares[i + 1] - shares[i])
  return math.floor(values[i] * (values[i + 1] / values[i]) ^ f + 0.5)
end

--- A request of a trace.
---@class ServiceArrival
---@field arrival number  seconds, from 0 on
---@field prompt integer  tokens of the prompt
---@field count integer   tokens that are asked for

--- `count` requests of a service, "coding" or "conversation", in the order in which they come: a Poisson process of
-- `rate` requests a second. options: seed (0), prompts (1: prompts are so many times as long, at least a token),
-- counts (1: the same of the tokens asked for), longest (nil: of a prompt).
---@param service "coding"|"conversation"
---@param count integer
---@param rate number
---@param options? { seed?: integer, prompts?: number, counts?: number, longest?: integer }
---@return ServiceArrival[]
function M.draw(service, count, rate, options)
  local who = "serve.services.draw"
  arguments.expect(who, "service", service, '"coding" or "conversation"')
  arguments.expect(who, "count", count, "an integer >= 1")
  arguments.expect(who, "rate", rate, "a finite number > 0")
  local o = arguments.read(who, options, { seed = 0, prompts = 1, counts = 1, longest = arguments.none },
    { seed = "an integer", prompts = "a finite number > 0", counts = "a finite number > 0",
      longest = "an integer >= 1" })
  local of, now, list = quantiles[service], 0.0, {}
  for i = 1, count do
    local function u(k) return choice.uniform(o.seed * 3 + k, i) end
    now = now - math.log(1 - u(0)) / rate
    local prompt = math.max(1, math.floor(at_share(of.prompt, u(1)) * o.prompts + 0.5))
    list[i] = { arrival = now, prompt = math.min(prompt, o.longest or prompt),
      count = math.max(1, math.floor(at_share(of.count, u(2)) * o.counts + 0.5)) }
  end
  return list
end

--- The same requests at another rate: `times` as many a second.
---@param trace ServiceArrival[]
---@param times number
---@return ServiceArrival[]
function M.faster(trace, times)
  arguments.expect("serve.services.faster", "trace", trace, "a list of tables")
  arguments.expect("serve.services.faster", "times", times, "a finite number > 0")
  local list = {}
  for i, r in ipairs(trace) do
    local copy = {}
    for key, value in pairs(r) do copy[key] = value end
    copy.arrival = r.arrival / times
    list[i] = copy
  end
  return list
end

return M
