--- How many requests a second a cluster serves well, and which cluster of a price or a power serves the most: machines
-- that mix prompts and tokens, or some for prompts and some for tokens, of one kind or of two. Patel et al. 2023,
-- "Splitwise: Efficient generative LLM inference using phase splitting".
local arguments = require "tycho.arguments"
local cluster = require "tycho.serve.cluster"
local services = require "tycho.serve.services"

local M = {}

--- A cluster with its price and its power.
---@class ServeDesign
---@field name string
---@field cluster ServeCluster
---@field cost number
---@field power number
---@field kind string  what designs of one family share: "mixed whole", "mixed in parts" or "split"

local function machines_of(...)
  local list, cost, power = {}, 0, 0
  for _, part in ipairs { ... } do
    for _ = 1, part[3] do list[#list + 1] = { time = part[1], pool = part[2] } end
    cost, power = cost + part[3] * (part[1].cost or 0), power + part[3] * (part[1].power or 0)
  end
  return list, cost, power
end

--- `count` machines that mix, with whole prompts or, of `chunk` tokens a step, parts of prompts.
---@param name string
---@param time StepTime
---@param count integer
---@param chunk? integer
---@return ServeDesign
function M.mixed(name, time, count, chunk)
  arguments.expect("serve.designs.mixed", "time", time, "a table")
  arguments.expect("serve.designs.mixed", "count", count, "an integer in [1, 100000]")
  arguments.expect("serve.designs.mixed", "name", name, "a string")
  arguments.expect("serve.designs.mixed", "chunk", chunk, "an integer >= 1 or nil")
  local list, cost, power = machines_of { time, "mixed", count }
  return { name = ("%d %s, %s"):format(count, name, chunk and chunk .. " tokens a step" or "whole prompts"),
    kind = chunk and "mixed in parts" or "mixed whole", cost = cost, power = power,
    cluster = { machines = list, chunk = chunk } }
end

--- Some machines for prompts and some for tokens. options: as ServeCluster has them, besides its machines.
---@param names string[]   of the two kinds
---@param prompt StepTime
---@param prompts integer
---@param token StepTime
---@param tokens integer
---@param options? table
---@return ServeDesign
function M.split(names, prompt, prompts, token, tokens, options)
  local who = "serve.designs.split"
  arguments.expect(who, "names", names, "a list of strings")
  arguments.expect(who, "prompt", prompt, "a table")
  arguments.expect(who, "prompts", prompts, "an integer in [1, 100000]")
  arguments.expect(who, "token", token, "a table")
  arguments.expect(who, "tokens", tokens, "an integer in [1, 100000]")
  local list, cost, power = machines_of({ prompt, "prompt", prompts }, { token, "token", tokens })
  local all = { machines = list }
  for key, value in pairs(options or {}) do all[key] = value end
  return { name = ("%d %s for prompts, %d %s for tokens%s"):format(prompts, names[1], tokens, names[2],
    all.chunk and ", overflow in parts" or ""), kind = "split", cost = cost, power = power, cluster = all }
end

--- All designs within a budget: `by` the field of machines, "cost" or "power". options: chunks (sizes that mixed
-- machines try), shares (of the budget, for prompts), kinds (of machines by name), pairs (names of the two kinds of
-- splits), overflow (of splits: sizes of steps that machines with overflow try), cluster (what all clusters have
-- besides machines: see ServeCluster).
---@param budget number
---@param by "cost"|"power"
---@param options { kinds: table<string, StepTime>, pairs: string[][], mixed: string[], chunks: integer[],
---  shares: number[] }
---@return ServeDesign[]
function M.within(budget, by, options)
  local who = "serve.designs.within"
  arguments.expect(who, "budget", budget, "a finite number > 0")
  arguments.expect(who, "by", by, '"cost" or "power"')
  arguments.expect(who, "options", options, "a table")
  local o, list = options, {}
  for _, name in ipairs(o.mixed) do
    local time = o.kinds[name]
    local count = math.floor(budget / time[by] + 1e-9)
    if count > 0 then
      list[#list + 1] = M.mixed(name, time, count)
      for _, chunk in ipairs(o.chunks) do list[#list + 1] = M.mixed(name, time, count, chunk) end
    end
  end
  local seen = {}
  for _, pair in ipairs(o.pairs) do
    local prompt, token = o.kinds[pair[1]], o.kinds[pair[2]]
    for _, share in ipairs(o.shares) do
      local prompts = math.max(1, math.floor(budget * share / prompt[by] + 0.5))
      local tokens = math.floor((budget - prompts * prompt[by]) / token[by] + 1e-9)
      local key = table.concat({ pair[1], pair[2], prompts, tokens }, " ")
      if tokens > 0 and not seen[key] then
        seen[key] = true
        list[#list + 1] = M.split(pair, prompt, prompts, token, tokens)
        for _, chunk in ipairs(o.overflow or {}) do
          list[#list + 1] = M.split(pair, prompt, prompts, token, tokens, { chunk = chunk })
        end
      end
    end
  end
  for _, design in ipairs(list) do
    for key, value in pairs(o.cluster or {}) do design.cluster[key] = value end
  end
  return list
end

--- Whether a design keeps to the service level with a trace that comes at `rate` times its speed.
---@param design ServeDesign
---@param trace ServiceArrival[]
---@param rate number
---@param alone StepTime  what requests are compared with
---@param level? table
---@return boolean
---@return number worst
---@return string where
---@return table outcome
function M.serves(design, trace, rate, alone, level)
  arguments.expect("serve.designs.serves", "design", design, "a table")
  local outcome = cluster.simulate(design.cluster, services.faster(trace, rate))
  outcome.latencies = cluster.latencies(outcome.requests, alone)
  local keeps, worst, where = cluster.keeps(outcome.latencies, level)
  return keeps, worst, where, outcome
end

--- The most requests a second that a design serves within the service level, to one and a half per cent; 0 where it
-- does not serve `from` of them.
---@param design ServeDesign
---@param trace ServiceArrival[]  at one request a second
---@param alone StepTime
---@param options? { from?: number, level?: table }  from: the rate to begin with (1)
---@return number rate
function M.throughput(design, trace, alone, options)
  local o = arguments.read("serve.designs.throughput", options, { from = 1, level = cluster.service_level },
    { from = "a finite number > 0", level = "a table" })
  local function serves(rate) return (M.serves(design, trace, rate, alone, o.level)) end
  local good = o.from
  if not serves(good) then return 0 end
  local bad = good * 1.25
  while serves(bad) do good, bad = bad, bad * 1.25 end
  for _ = 1, 4 do
    local middle = math.sqrt(good * bad)
    if serves(middle) then good = middle else bad = middle end
  end
  return good
end

-- Whether a design may serve more than `rate`: a third of the trace says so, where it is far from it.
local function may_serve(design, trace, rate, alone, level)
  if #trace < 300 then return true end
  local _, worst = M.serves(design, table.move(trace, 1, #trace // 3, 1, {}), rate, alone, level)
  return worst < 1.3
end

--- Of designs the one that serves the most, of each kind: { rate, design } by kind. One is tried in full only where it
-- may serve more than the best of its kind so far.
---@param list ServeDesign[]
---@param trace ServiceArrival[]  at one request a second
---@param alone StepTime
---@param options? { from?: number, level?: table }
---@return table<string, { rate: number, design: ServeDesign }>
function M.best(list, trace, alone, options)
  local who = "serve.designs.best"
  arguments.expect(who, "list", list, "a list of tables")
  for i, design in ipairs(list) do
    arguments.expect(who, ("list[%d].kind"):format(i), design.kind, "a string")
    arguments.expect(who, ("list[%d].cluster"):format(i), design.cluster, "a table")
  end
  arguments.expect(who, "trace", trace, "a list of tables")
  arguments.read(who, options, { from = arguments.none, level = arguments.none },
    { from = "a finite number > 0", level = "a table" })
  local best = {}
  for _, design in ipairs(list) do
    local so_far = best[design.kind]
    local o = { level = options and options.level, from = so_far and so_far.rate * 1.02 or options and options.from }
    local tried = not so_far or may_serve(design, trace, o.from, alone, o.level)
    local rate = tried and M.throughput(design, trace, alone, o) or 0
    if rate > (so_far and so_far.rate or 0) then best[design.kind] = { rate = rate, design = design } end
  end
  return best
end

--- Requests a second of the best design of each kind on some traces: chosen by the first of them, and judged by all.
---@param list ServeDesign[]
---@param traces ServiceArrival[][]  each at one request a second
---@param alone StepTime
---@param options? { from?: number, level?: table }
---@return table<string, number>[] rates  by trace, of each kind
---@return table<string, { rate: number, design: ServeDesign }> best  of each kind, on the first
function M.rates(list, traces, alone, options)
  local who = "serve.designs.rates"
  arguments.expect(who, "traces", traces, "a list of lists")
  if #traces == 0 then arguments.fail("%s: traces: expected at least one, got none", who) end
  local best, rates = M.best(list, traces[1], alone, options), {}
  for i, trace in ipairs(traces) do
    rates[i] = {}
    for kind, own in pairs(best) do
      rates[i][kind] = i == 1 and own.rate or M.throughput(own.design, trace, alone,
        { from = own.rate / 2, level = options and options.level or cluster.service_level })
    end
  end
  return rates, best
end

--- How many times as much split designs serve as those of a kind: by trace, the geometric mean over services.
---@param own table<string, number>[][]    of each service what rates() returns
---@param other table<string, number>[][]  the same, with which it is compared
---@param kind string
---@return number[]
function M.gains(own, other, kind)
  local who = "serve.designs.gains"
  arguments.expect(who, "own", own, "a list of lists")
  arguments.expect(who, "other", other, "a list of lists")
  arguments.expect(who, "kind", kind, "a string")
  if #own ~= #other then arguments.fail("%s: other: expected %d services, got %d", who, #own, #other) end
  local list = {}
  for service, by_trace in ipairs(own) do
    for i, rates in ipairs(by_trace) do
      local theirs = other[service][i]
      arguments.expect(who, ("own[%d][%d]"):format(service, i), rates, "a table")
      arguments.expect(who, ("other[%d][%d]"):format(service, i), theirs, "a table")
      arguments.expect(who, "a rate", rates.split, "a number or nil")
      arguments.expect(who, "a rate", theirs[kind], "a number or nil")
      list[i] = (list[i] or 1) * ((rates.split or 0) / math.max(theirs[kind] or 0, 1e-9)) ^ (1 / #own)
    end
  end
  return list
end

return M
