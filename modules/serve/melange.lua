--- Which GPUs, of which kinds, serve a language model as cheaply as can be, for requests of many sizes at a rate, when
-- each token has to come within a time. Griggs et al. 2024, "Melange: Cost Efficient Large Language Model Serving by
-- Exploiting GPU Heterogeneity": requests are sorted into buckets by their lengths, a GPU can take so many of a bucket
-- in a second, and slices of the buckets are packed into GPUs (serve.packing).
--
--     local melange = serve.melange
--     local rates = melange.rates(melange.requests("chat", 4000, 1), 8)
--     local best = melange.allocate(rates, { within = 0.12 })
--     print(best.cost, best.machines.A10G, melange.simulate(best, { seconds = 60 }).within)
--
-- The paper profiles GPUs. Here a GPU's rate is a formula of its sheet: an iteration reads the weights and what is
-- cached of every sequence, or computes, and takes what the engine takes for each; prompts are computed between.
local arguments = require "tycho.arguments"
local packing = require "tycho.serve.packing"

local expect, fail = arguments.expect, arguments.fail
local M = {}

---@class ServeGpu
---@field cost number       dollars an hour
---@field memory number     bytes
---@field bandwidth number  bytes a second
---@field flops number      operations a second, two bytes each

--- The paper's GPUs and on-demand prices (its table 1). The L4's operations are those that 72 W sustain.
M.gpus = {
  L4 = { cost = 0.70, memory = 24e9, bandwidth = 300e9, flops = 60e12 },
  A10G = { cost = 1.01, memory = 24e9, bandwidth = 600e9, flops = 70e12 },
  A100 = { cost = 3.67, memory = 80e9, bandwidth = 2039e9, flops = 312e12 },
  H100 = { cost = 7.516, memory = 80e9, bandwidth = 3350e9, flops = 989e12 },
}

-- Llama 2 of 7 billion parameters, and an engine as vLLM was: 256 sequences at once, nine tenths of the memory. What
-- products and memory reach, and what each sequence and each prompt takes of the engine, are round numbers near those
-- with which the A10G is as far from the A100 as in the paper's figure 3.
local MODEL = { parameters = 6.74e9, layers = 32, width = 4096, cached = 2 * 2 * 32 * 4096 }
local ENGINE = { sequences = 256, usable = 0.9, taken = 1e9, computing = 0.5, reading = 0.9, iteration = 1e-3,
  sequence = 4e-4, prompt = 2e-3 }

-- Upper ends of the buckets.
M.inputs = { 25, 100, 250, 500, 1000, 2000, 4000, 8000, 12000, 16000 }
M.outputs = { 25, 100, 250, 500, 1000, 2000 }

local function gpu_of(who, gpu)
  expect(who, "gpu", gpu, "a table")
  for _, name in ipairs { "cost", "memory", "bandwidth", "flops" } do
    expect(who, "gpu." .. name, gpu[name], "a number > 0")
  end
  return gpu
end

-- Tokens whose keys and values fit.
local function room(gpu)
  return math.floor((gpu.memory * ENGINE.usable - 2 * MODEL.parameters - ENGINE.taken) / MODEL.cached)
end

local function prompt_seconds(gpu, input)
  local attention = 2.0 * MODEL.layers * MODEL.width * input * input
  return (2.0 * MODEL.parameters * input + attention) / (gpu.flops * ENGINE.computing) + ENGINE.prompt
end

-- An iteration over so many sequences that have so many tokens together.
local function iteration_seconds(gpu, sequences, tokens)
  local reading = (2 * MODEL.parameters + tokens * MODEL.cached) / (gpu.bandwidth * ENGINE.reading)
  local computing = 2.0 * MODEL.parameters * sequences / (gpu.flops * ENGINE.computing)
  return math.max(reading, computing) + ENGINE.iteration + sequences * ENGINE.sequence
end

--- Requests of a size that a GPU can take in a second, so that the mean time of a token is within a limit; 0 where it
-- cannot take any. As many sequences run at once as fit, or fewer where that is faster or tokens would come too late.
---@param gpu ServeGpu
---@param input integer   tokens
---@param output integer  tokens
---@param within? number  seconds for a token (math.huge)
---@return number rate
---@return integer batch
function M.rate(gpu, input, output, within)
  local who = "serve.melange.rate"
  gpu_of(who, gpu)
  expect(who, "input", input, "an integer in [1, 1000000]")
  expect(who, "output", output, "an integer in [1, 1000000]")
  expect(who, "within", within, "a number > 0 or nil")
  within = within or math.huge
  local tokens = input + output / 2
  local most = math.min(ENGINE.sequences, room(gpu) // (input + output))
  local best, batch = 0, 0
  for n = 1, most do
    local seconds = iteration_seconds(gpu, n, n * tokens) + n / output * prompt_seconds(gpu, input)
    if seconds > within then break end
    if n / (output * seconds) > best then best, batch = n / (output * seconds), n end
  end
  return best, batch
end

-- ---- requests ----

local function normal(draw)
  return math.sqrt(-2 * math.log(1 - draw())) * math.cos(2 * math.pi * draw())
end

-- Logarithms of lengths: mean and spread of the input's, of the output's; the longest input.
local SHAPES = { chat = { 4.6, 1.3, 5.0, 0.9, 2000 }, documents = { 8.2, 0.55, 5.45, 0.5, 16000 } }

-- Numbers in [0, 1) that a seed begins.
local function drawer(seed)
  local state = seed * 2654435761 % 4294967296 + 1
  return function()
    state = state ~ (state << 13) & 0xffffffff
    state = state ~ (state >> 17)
    state = state ~ (state << 5) & 0xffffffff
    return (state & 0xffffffff) / 4294967296
  end
end

--- Drawn lengths of requests: "chat" (short, as those of Chatbot Arena), "documents" (long, as papers that are to be
-- summarized) or "mixed" (four of five are chat). Lengths are log-normal and below the largest bucket's end.
---@param kind string
---@param count integer
---@param seed integer
---@return { [1]: integer, [2]: integer }[]  input and output tokens
function M.requests(kind, count, seed)
  local who = "serve.melange.requests"
  expect(who, "kind", kind, '"chat" or "documents" or "mixed"')
  expect(who, "count", count, "an integer in [0, 10000000]")
  expect(who, "seed", seed, "an integer in [0, 1000000000]")
  local draw, list = drawer(seed), {}
  for _ = 1, 20 do draw() end
  local function length(mean, spread, most)
    return math.max(1, math.min(most, math.floor(math.exp(mean + spread * normal(draw)))))
  end
  for i = 1, count do
    local shape = SHAPES[kind] or (draw() < 0.8 and SHAPES.chat or SHAPES.documents)
    list[i] = { length(shape[1], shape[2], shape[5]), length(shape[3], shape[4], M.outputs[#M.outputs]) }
  end
  return list
end

local function place(ends, length)
  for i, last in ipairs(ends) do if length <= last then return i end end
  return #ends
end

--- Rates of the buckets of requests that come at a rate: { input, output, rate } of those that have any.
---@param requests { [1]: integer, [2]: integer }[]
---@param rate number  of all, a second
---@return { input: integer, output: integer, rate: number }[]
function M.rates(requests, rate)
  local who = "serve.melange.rates"
  expect(who, "requests", requests, "a list of tables")
  expect(who, "rate", rate, "a finite number > 0")
  local counts, list = {}, {}
  for i, request in ipairs(requests) do
    expect(who, ("requests[%d][1]"):format(i), request[1], "an integer >= 1")
    expect(who, ("requests[%d][2]"):format(i), request[2], "an integer >= 1")
    local key = (place(M.inputs, request[1]) - 1) * #M.outputs + place(M.outputs, request[2])
    counts[key] = (counts[key] or 0) + 1
  end
  for key = 1, #M.inputs * #M.outputs do
    if counts[key] then
      list[#list + 1] = { input = M.inputs[(key - 1) // #M.outputs + 1], output = M.outputs[(key - 1) % #M.outputs + 1],
        rate = rate * counts[key] / #requests }
    end
  end
  return list
end

-- ---- allocation ----

---@class ServeAllocation
---@field cost number                      dollars an hour
---@field machines table<string, integer>  by kind
---@field shares table<string, number>[]   by bucket: what of it each kind takes
---@field rates table[]                    the buckets
---@field proven boolean                   whether nothing is cheaper
---@field bound number                     nothing is cheaper than this
---@field nodes integer

local function read(who, rates, options)
  expect(who, "rates", rates, "a list of tables")
  for i, bucket in ipairs(rates) do
    for _, name in ipairs { "input", "output", "rate" } do
      expect(who, ("rates[%d].%s"):format(i, name), bucket[name], "a finite number > 0")
    end
  end
  local o = arguments.read(who, options, { within = math.huge, gpus = M.gpus, slices = 8, nodes = 10000, gap = 0.0 },
    { within = "a number > 0", gpus = "a table", slices = "an integer in [1, 1000]", nodes = "an integer >= 1",
      gap = "a finite number >= 0" })
  local names = {}
  for name, gpu in pairs(o.gpus) do
    gpu_of(who, gpu)
    names[#names + 1] = name
  end
  table.sort(names)
  if #names == 0 then fail("%s: gpus: expected at least one, got none", who) end
  return o, names
end

--- The cheapest GPUs that serve buckets of requests, or nil where none of them can serve some. options: within (seconds
-- for a token, math.huge), gpus (kinds by name), slices (of each bucket, which go to one kind each: 8), nodes and gap
-- (of serve.packing).
---@param rates { input: integer, output: integer, rate: number }[]
---@param options? { within?: number, gpus?: table<string, ServeGpu>, slices?: integer, nodes?: integer, gap?: number }
---@return ServeAllocation|nil
function M.allocate(rates, options)
  local o, names = read("serve.melange.allocate", rates, options)
  local problem = { costs = {}, pieces = {}, nodes = o.nodes, gap = o.gap }
  for j, name in ipairs(names) do problem.costs[j] = o.gpus[name].cost end
  for b, bucket in ipairs(rates) do
    local loads = {}
    for j, name in ipairs(names) do
      local rate = M.rate(o.gpus[name], bucket.input, bucket.output, o.within)
      loads[j] = rate > 0 and bucket.rate / o.slices / rate or math.huge
    end
    problem.pieces[b] = { loads = loads, count = o.slices }
  end
  local got = packing(problem)
  if not got then return nil end
  local out = { cost = got.cost, machines = {}, shares = {}, rates = rates, proven = got.proven, bound = got.bound,
    nodes = got.nodes, gpus = o.gpus, within_limit = o.within }
  for j, name in ipairs(names) do out.machines[name] = got.machines[j] end
  for b in ipairs(rates) do
    out.shares[b] = {}
    for j, name in ipairs(names) do out.shares[b][name] = got.counts[b][j] / o.slices end
  end
  return out
end

--- What GPUs of one kind would cost, by kind; kinds that cannot serve some bucket are left out.
---@param rates { input: integer, output: integer, rate: number }[]
---@param options? { within?: number, gpus?: table<string, ServeGpu> }
---@return table<string, number>
function M.single(rates, options)
  local o, names = read("serve.melange.single", rates, options)
  local costs = {}
  for _, name in ipairs(names) do
    local load = 0
    for _, bucket in ipairs(rates) do
      local rate = M.rate(o.gpus[name], bucket.input, bucket.output, o.within)
      load = rate > 0 and load + bucket.rate / rate or math.huge
    end
    if load < math.huge then costs[name] = o.gpus[name].cost * math.ceil(load - 1e-9) end
  end
  return costs
end

--- What it costs when every bucket goes to the kind on which it is cheapest by itself.
---@param rates { input: integer, output: integer, rate: number }[]
---@param options? { within?: number, gpus?: table<string, ServeGpu> }
---@return number|nil cost
function M.greedy(rates, options)
  local o, names = read("serve.melange.greedy", rates, options)
  local loads, cost = {}, 0
  for _, bucket in ipairs(rates) do
    local best, least
    for _, name in ipairs(names) do
      local rate = M.rate(o.gpus[name], bucket.input, bucket.output, o.within)
      local price = rate > 0 and o.gpus[name].cost / rate
      if price and (not least or price < least) then best, least = name, price end
    end
    if not best then return nil end
    local rate = M.rate(o.gpus[best], bucket.input, bucket.output, o.within)
    loads[best] = (loads[best] or 0) + bucket.rate / rate
  end
  for name, load in pairs(loads) do cost = cost + o.gpus[name].cost * math.ceil(load - 1e-9) end
  return cost
end

-- ---- whether tokens come in time ----

-- One iteration of a machine: prompts that fit, and a token for each sequence.
local function advance(machine, now)
  local gpu, seconds = machine.gpu, 0
  while machine.waiting[machine.first] do
    local r = machine.waiting[machine.first]
    local tokens = r.input + r.output
    if #machine.running >= ENGINE.sequences or machine.held + tokens > room(gpu) then break end
    machine.waiting[machine.first] = nil
    machine.first = machine.first + 1
    machine.held, machine.tokens = machine.held + tokens, machine.tokens + r.input
    seconds = seconds + prompt_seconds(gpu, r.input)
    r.left, r.began = r.output, now + seconds
    machine.running[#machine.running + 1] = r
  end
  local n = #machine.running
  if n == 0 then return nil end
  local ended = now + seconds + iteration_seconds(gpu, n, machine.tokens)
  for i = n, 1, -1 do
    local r = machine.running[i]
    r.left, machine.tokens = r.left - 1, machine.tokens + 1
    if r.left == 0 then
      r.ended = ended
      machine.held, machine.tokens = machine.held - r.input - r.output, machine.tokens - r.input - r.output
      machine.running[i] = machine.running[#machine.running]
      machine.running[#machine.running] = nil
    end
  end
  return ended
end

--- Plays an allocation through: requests come by chance, of the sizes of their buckets or of a list, go to kinds by the
-- shares of their buckets and there to the machine that has fewest tokens to come, which runs iterations. options:
-- seconds (60), requests (sizes that are drawn from; those of the buckets), seed (1).
---@param allocation ServeAllocation
---@param options? { seconds?: number, requests?: table, seed?: integer }
---@return { within: number, mean: number, count: integer }  the share of requests whose tokens came within the limit on
-- average, the mean time of a token, and how many requests these are
function M.simulate(allocation, options)
  local who = "serve.melange.simulate"
  expect(who, "allocation", allocation, "a table")
  if type(allocation.shares) ~= "table" or not allocation.gpus then
    fail("%s: allocation: expected one of serve.melange.allocate, got %s", who, arguments.describe(allocation))
  end
  local o = arguments.read(who, options, { seconds = 60.0, requests = arguments.none, seed = 1 },
    { seconds = "a finite number > 0", requests = "a list of tables", seed = "an integer in [0, 1000000000]" })
  local draw, total, machines, by_kind = drawer(o.seed + 77), 0, {}, {}
  for _, bucket in ipairs(allocation.rates) do total = total + bucket.rate end
  for name, count in pairs(allocation.machines) do
    by_kind[name] = {}
    for i = 1, count do
      local machine = { gpu = allocation.gpus[name], waiting = {}, first = 1, last = 0, running = {}, held = 0,
        tokens = 0, at = 0, due = 0 }
      by_kind[name][i], machines[#machines + 1] = machine, machine
    end
  end
  local places = {}
  for b, bucket in ipairs(allocation.rates) do places[bucket.input .. " " .. bucket.output] = b end
  local function pick(list, weight)
    local at = draw()
    for key, value in pairs(list) do
      at = at - weight(value)
      if at < 0 then return key end
    end
    return next(list)
  end
  local names = {}
  for name in pairs(allocation.machines) do names[#names + 1] = name end
  table.sort(names)
  local all, now = {}, 0
  while true do
    now = now - math.log(1 - draw()) / total
    if now > o.seconds then break end
    local r
    if o.requests then
      local size = o.requests[math.floor(draw() * #o.requests) + 1]
      r = { input = size[1], output = size[2] }
    else
      local bucket = allocation.rates[pick(allocation.rates, function(at) return at.rate / total end)]
      r = { input = bucket.input, output = bucket.output }
    end
    local key = M.inputs[place(M.inputs, r.input)] .. " " .. M.outputs[place(M.outputs, r.output)]
    local shares, kind, at = allocation.shares[places[key] or 1], nil, draw()
    for _, name in ipairs(names) do
      if shares[name] > 0 and at >= 0 then kind, at = name, at - shares[name] end
    end
    -- Machines that are behind run on to the moment at which the request comes.
    for _, machine in ipairs(machines) do
      while machine.at < now do
        local ended = advance(machine, machine.at)
        machine.at = ended or now
      end
    end
    local best
    for _, machine in ipairs(by_kind[kind]) do
      local load = machine.held + machine.due
      if not best or load < best.load then best = { machine = machine, load = load } end
    end
    local machine = best.machine
    machine.last = machine.last + 1
    machine.waiting[machine.last] = r
    all[#all + 1] = r
    machine.due = 0
    for i = machine.first, machine.last do
      machine.due = machine.due + machine.waiting[i].input + machine.waiting[i].output
    end
  end
  for _, machine in ipairs(machines) do
    local ended = machine.at
    while ended do ended = advance(machine, ended) end
  end
  local within, sum = 0, 0
  for _, r in ipairs(all) do
    local token = (r.ended - r.began) / r.output
    sum = sum + token
    if token <= allocation.within_limit then within = within + 1 end
  end
  return { within = #all > 0 and within / #all or 1, mean = #all > 0 and sum / #all or 0, count = #all }
end

-- T/$ of the A10G above the A100's, in percent (below 0: the other way), from 25 to 2000 tokens of output down and of
-- input across: figure 3 of the paper, as its repository shows it.
M.published = {
  { 72, 52, 20, 17, 13, 11 }, { 52, 25, 15, 1, -1, -4 }, { 28, 11, 2, 1, -8, -13 }, { 12, 2, 1, -4, -17, -21 },
  { -6, -10, -11, -11, -18, -20 }, { -8, -10, -13, -17, -18, -38 },
}

return M
