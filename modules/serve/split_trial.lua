--- What the comparison of split and mixed machines needs: a small model on ranks, requests with tokens, and how far a
-- cluster in events is from them.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local cluster = require "tycho.serve.cluster"
local designs = require "tycho.serve.designs"
local dist = require "tycho.dist"
local split = require "tycho.serve.split"
local step_time = require "tycho.serve.step_time"
local services = require "tycho.serve.services"

local M = {}

--- What is served: a Llama of random weights, and the sizes of its machines. options: width (256), layers (4),
-- vocabulary (512), longest (512: of a prompt), prompts and counts (1/16, 1/8: what lengths are of those of the
-- service), limit (128), bandwidth (1e9), latency (1e-4), serial_below (0).
---@param options? table
---@return table work
function M.open(options)
  local o = arguments.read("serve.split_trial.open", options, { width = 256, layers = 4, vocabulary = 512,
    longest = 512, prompts = 1 / 16, counts = 1 / 8, limit = 128, bandwidth = 1e9, latency = 1e-4, serial_below = 0 },
    { width = "an integer >= 32", layers = "an integer >= 1", vocabulary = "an integer >= 2",
      longest = "an integer >= 1", prompts = "a finite number > 0", counts = "a finite number > 0",
      limit = "an integer >= 1", bandwidth = "a number > 0", latency = "a finite number >= 0",
      serial_below = "a number >= 0" })
  o.config = { vocab_size = o.vocabulary, hidden_size = o.width, intermediate_size = o.width * 8 // 3 // 16 * 16,
    num_hidden_layers = o.layers, num_attention_heads = o.width // 32, max_position_embeddings = 4 * o.longest }
  o.token_bytes = o.layers * 2 * o.width * 4
  return o
end

local numbers = { "limit", "layers", "vocabulary", "longest", "prompts", "counts", "bandwidth", "latency",
  "serial_below", "token_bytes" }

-- What open() returns; ranks have it without its class.
local function expect_work(who, work)
  arguments.expect(who, "work", work, "a table")
  arguments.expect(who, "work.config", work.config, "a table")
  for _, name in ipairs(numbers) do arguments.expect(who, "work." .. name, work[name], "a number") end
end

--- The model, the same on all ranks.
---@param work table
---@return LanguageModel
function M.model(work)
  expect_work("serve.split_trial.model", work)
  ty.manual_seed(1)
  return require("tycho.llm").Llama(work.config):eval()
end

--- Requests of a service with tokens, for machines of which `place(i)` gives the two of each.
---@param work table
---@param service "coding"|"conversation"
---@param count integer
---@param rate number  a second
---@param seed integer
---@param place fun(i: integer): integer[]
---@return table[]
function M.requests(work, service, count, rate, seed, place)
  expect_work("serve.split_trial.requests", work)
  arguments.expect("serve.split_trial.requests", "place", place, "a function")
  local list = services.draw(service, count, rate, { seed = seed, prompts = work.prompts, counts = work.counts,
    longest = work.longest })
  ty.manual_seed(seed)
  for i, r in ipairs(list) do
    r.prompt, r.place = ty.randint(0, work.vocabulary, { r.prompt }):tolist(), place(i)
  end
  return list
end

local function as_machine(group, work, requests, o)
  local t = require "tycho"
  local trial = require "tycho.serve.split_trial"
  return t.no_grad(require("tycho.serve.split").run, group, trial.model(work), requests, o)
end

--- Serves requests by machines that are ranks; together() of what they return.
---@param work table
---@param machines integer
---@param requests table[]
---@param chunk? integer
---@return table
function M.serve(work, machines, requests, chunk)
  expect_work("serve.split_trial.serve", work)
  arguments.expect("serve.split_trial.serve", "requests", requests, "a list of tables")
  return split.together(dist.run(machines, as_machine, nil, work, requests, { limit = work.limit, chunk = chunk,
    bandwidth = work.bandwidth, latency = work.latency, serial_below = work.serial_below }))
end

--- What one engine gives these requests, each alone.
---@param work table
---@param requests table[]
---@return integer[][] tokens
function M.alone(work, requests)
  expect_work("serve.split_trial.alone", work)
  arguments.expect("serve.split_trial.alone", "requests", requests, "a list of tables")
  local engine, list = require "tycho.serve.engine".new(M.model(work), { prefixes = false, batch = 4096 }), {}
  for i, r in ipairs(requests) do
    list[i] = engine:submit(r.prompt, { count = r.count, stop_tokens = false }):wait()
  end
  return list
end

--- How far what serve() returned is from what it has to be: requests whose tokens are not those of one engine, and
-- bytes that went over beyond the keys and values of those that change machines.
---@param work table
---@param requests table[]
---@param got table  of serve()
---@return integer differ
---@return integer bytes
function M.misses(work, requests, got)
  expect_work("serve.split_trial.misses", work)
  arguments.expect("serve.split_trial.misses", "requests", requests, "a list of tables")
  arguments.expect("serve.split_trial.misses", "got", got, "a table")
  arguments.expect("serve.split_trial.misses", "got.requests", got.requests, "a list of tables")
  local differ, bytes = 0, 0
  for i, tokens in ipairs(M.alone(work, requests)) do
    local r = requests[i]
    if table.concat(tokens, " ") ~= table.concat(got.requests[i].tokens, " ") then differ = differ + 1 end
    if r.place[1] ~= r.place[2] and r.count > 1 then bytes = bytes + #r.prompt * work.token_bytes end
  end
  return differ, math.abs(got.bytes - bytes)
end

--- Fits the machines of a cluster to steps that were measured.
---@param work table
---@param steps table[]
---@return StepTime
---@return number error
function M.fit(work, steps)
  expect_work("serve.split_trial.fit", work)
  local time, off = step_time.fit(steps)
  time.bandwidth, time.latency, time.token_bytes = work.bandwidth, work.latency, work.token_bytes
  return time, off
end

--- Seconds of the same requests in events, of those measured: the mean to the first token, between tokens and to the
-- last.
---@param work table
---@param time StepTime
---@param pools string[]  of the machines
---@param requests table[]
---@param measured table  of serve()
---@param chunk? integer
---@return { ttft: number, tbt: number, e2e: number } ratios
---@return number bytes  that went over in events, of those measured; 1 where none did
function M.compare(work, time, pools, requests, measured, chunk)
  expect_work("serve.split_trial.compare", work)
  arguments.expect("serve.split_trial.compare", "pools", pools, "a list of strings")
  arguments.expect("serve.split_trial.compare", "measured", measured, "a table")
  local machines, list = {}, {}
  for i, pool in ipairs(pools) do machines[i] = { time = time, pool = pool } end
  for i, r in ipairs(requests) do
    list[i] = { arrival = r.arrival, prompt = #r.prompt, count = r.count, place = r.place }
  end
  local outcome = cluster.simulate({ machines = machines, chunk = chunk, limit = work.limit, layers = work.layers,
    serial_below = work.serial_below, overflow = math.huge }, list)
  local function sums(all)
    local ttft, tbt, e2e, gaps = 0, 0, 0, 0
    for _, r in ipairs(all) do
      ttft, e2e = ttft + r.first - r.arrival, e2e + r.over - r.arrival
      tbt, gaps = tbt + r.over - r.first, gaps + r.count - 1
    end
    return { ttft = ttft / #all, e2e = e2e / #all, tbt = tbt / gaps }
  end
  local a, b, ratios = sums(outcome.requests), sums(measured.requests), {}
  for name, value in pairs(a) do ratios[name] = value / b[name] end
  return ratios, measured.bytes > 0 and outcome.bytes / measured.bytes or 1
end

--- Of clusters of machines that are all as those here the designs that serve the most, by kind: see serve.designs.best.
-- As many tokens are asked for as from the service: of two tokens the second would wait for half a step of others.
---@param work table
---@param time StepTime  of fit()
---@param machines integer
---@param service "coding"|"conversation"
---@param count integer  requests of the trace
---@param seed integer
---@return table<string, { rate: number, design: ServeDesign }>
function M.best(work, time, machines, service, count, seed)
  expect_work("serve.split_trial.best", work)
  arguments.expect("serve.split_trial.best", "time", time, "a table")
  local kind = setmetatable({ cost = 1, power = 1 }, { __index = time })
  local list = designs.within(machines, "cost", { kinds = { here = kind }, mixed = { "here" },
    chunks = { work.limit // 4, work.limit // 2, work.limit }, pairs = { { "here", "here" } },
    shares = { 0.125, 0.25, 0.375, 0.5, 0.625, 0.75 }, overflow = { work.limit // 2 },
    cluster = { limit = work.limit, overflow = 4 * work.limit, layers = work.layers,
      serial_below = work.serial_below } })
  local trace = services.draw(service, count, 1, { seed = seed, prompts = work.prompts,
    longest = work.longest })
  return designs.best(list, trace, kind, { from = 0.1 * machines })
end

local function one(group, work, prompt, way)
  local t = require "tycho"
  local trial, s = require "tycho.serve.split_trial", require "tycho.serve.split"
  return t.no_grad(s.transfer, group, trial.model(work), prompt, way)
end

--- What the way of keys and values costs a prompt of n tokens, "layers" or "serial": medians of rounds.
---@param work table
---@param n integer
---@param rounds integer
---@return table<string, { late: number, sending: number, cost: number, second: number }> ways  seconds: late, from the
-- first token until all has arrived; sending, that the machine of the prompt works for it; cost, by which the second
-- token is later than without; second, until the second token is there
---@return table<string, table[]> outcomes  of the last round, by way: what the ranks returned
function M.ways(work, n, rounds)
  expect_work("serve.split_trial.ways", work)
  arguments.expect("serve.split_trial.ways", "n", n, "an integer >= 1")
  arguments.expect("serve.split_trial.ways", "rounds", rounds, "an integer >= 1")
  ty.manual_seed(n)
  local prompt = ty.randint(0, work.vocabulary, { n }):tolist()
  local lists, outcomes, ways = {}, {}, {}
  for _ = 1, rounds do
    for _, way in ipairs { "layers", "serial" } do
      local got = dist.run(2, one, { bandwidth = work.bandwidth, latency = work.latency }, work, prompt, way)
      outcomes[way] = got
      local late, sending = math.max(0, got[2].arrived - got[1].first), got[1].sending
      -- Layers are sent before the first token is there, which they make later; all at once after it.
      local found = { late = late, sending = sending, cost = late + (way == "layers" and sending or 0),
        second = got[2].second }
      lists[way] = lists[way] or {}
      for key, value in pairs(found) do
        lists[way][key] = lists[way][key] or {}
        table.insert(lists[way][key], value)
      end
    end
  end
  for way, by_key in pairs(lists) do
    ways[way] = {}
    for key, list in pairs(by_key) do ways[way][key] = ty.stats.median(list) end
  end
  return ways, outcomes
end

--- Three rows for dist.timeline of one prompt, of what M.ways() returned of it: what rank 0 does, what is on the link,
-- what rank 1 does.
---@param work table
---@param outcome table[]
---@return table[][] rows
function M.rows(work, outcome)
  expect_work("serve.split_trial.rows", work)
  arguments.expect("serve.split_trial.rows", "outcome", outcome, "a list of tables")
  local rows, busy = { {}, {}, {} }, 0
  for _, e in ipairs(outcome[1].events) do
    if e.name == "send" and e.bytes > 8 then
      local departs = math.max(e.from, busy)
      busy = departs + e.bytes / work.bandwidth
      table.insert(rows[2], { name = "keys", from = departs, to = busy })
    elseif not e.bytes then
      table.insert(rows[1], e)
    end
  end
  for _, e in ipairs(outcome[2].events) do
    if not e.bytes then table.insert(rows[3], e) end
  end
  return rows
end

return M
