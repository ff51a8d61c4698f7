--- A processor's core as an analytical model: instructions enter in order, a few in each cycle, wait for what they
-- read, for their kind's turn and for a place among those on their way, and leave in order. A kernel's time is that of
-- the instructions which it runs more of for a larger input, or that of its bytes, whichever is longer. After
-- "Analyzing Modern NVIDIA GPU cores", 2025, arXiv:2503.20481: issue, dependences and memory, each measured by itself.
--
--     local machine = estimate.pipeline.machine()
--     local guess = estimate.pipeline.foretell(machine, function(n)
--       local x, y = ty.randn(n), ty.randn(n)
--       return function() return x + y end
--     end, { small = 1024, large = 2048, size = 1 << 20 })
--     print(guess.seconds, guess.bound)
--
-- Nothing in it is fitted to kernels. What it does not know: addresses (a load takes what the first cache takes, bytes
-- from further away are counted apart), branches that were guessed wrong, and other threads.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local instructions = require "tycho.estimate.instructions"
local tracing = require "tycho.estimate.trace"

local M = {}

-- ---- the core ----

-- The share of a kind's rate that another kind's instruction takes: measured for the widest vectors, and the same for
-- others.
local function share_of(shares, width, kind, other)
  local function widest(name)
    local stem = name:match "^(.*) %d+$"
    return stem and ("%s %d"):format(stem, width) or name
  end
  local row = shares[widest(kind)]
  return row and row[widest(other)] or 0
end

-- For each kind: its latency, its rate, and whom it holds up by how many cycles.
local function table_of(costs, kinds)
  local list = {}
  for kind in pairs(kinds) do
    local cost = costs.kinds[kind] or costs.kinds.alu
    local delays = { { kind, cost.rate } }
    for other in pairs(kinds) do
      local share = other ~= kind and share_of(costs.shares, costs.width, kind, other) or 0
      if kind:match "^(.*) %d+$" and kind ~= other and kind:match "^(.*) %d+$" == other:match "^(.*) %d+$" then
        share = 1 -- another width of the same
      end
      if share > 0 then delays[#delays + 1] = { other, share * cost.rate } end
    end
    list[kind] = { latency = cost.latency or (kind:find "^gather" and 4 * cost.rate) or 1, delays = delays }
  end
  return list
end

--- Cycles that a list of instructions takes, of estimate.trace. Each is sent off at the rate of costs.front, at least
-- `window` (256) instructions after one that has left; it begins when what it reads is there and the instructions
-- before it have left its kind room. options: window, load (5: cycles until a load's value is there).
---@param list table[]
---@param costs InstructionCosts
---@param options? { window?: integer, load?: number }
---@return number cycles
function M.cycles(list, costs, options)
  local who = "estimate.pipeline.cycles"
  arguments.expect(who, "list", list, "a list of tables")
  arguments.expect(who, "costs", costs, "a table")
  local o = arguments.read(who, options, { window = 256, load = 5 }, { window = "an integer >= 1",
    load = "a finite number >= 0" })
  local kinds = {}
  for _, i in ipairs(list) do
    for _, key in ipairs { "kind", "load", "store" } do if i[key] then kinds[i[key]] = true end end
  end
  local of = table_of(costs, kinds)
  local turn, ready, left = {}, {}, {}
  for kind in pairs(kinds) do turn[kind] = 0.0 end
  local sent, last = 0.0, 0.0
  -- When an instruction of a kind may begin; others have to wait for it.
  local function take(kind)
    local begin = turn[kind]
    if begin < sent then begin = sent end
    local delays = of[kind].delays
    for d = 1, #delays do
      local other = delays[d]
      local at = turn[other[1]]
      turn[other[1]] = (at < sent and sent or at) + other[2]
    end
    return begin
  end
  for n = 1, #list do
    local i = list[n]
    sent = sent + costs.front
    local before = left[n - o.window]
    if before and before > sent then sent = before end
    local start = sent
    for _, r in ipairs(i.reads) do
      local at = ready[r]
      if at and at > start then start = at end
    end
    if i.load then
      local begin = take(i.load)
      start = (begin > start and begin or start) + o.load
    end
    local done = start
    if i.kind then
      local begin = take(i.kind)
      if begin > start then start = begin end
      done = start + of[i.kind].latency
    end
    if i.store then
      local begin = take(i.store)
      if begin > done then done = begin end
    end
    for _, r in ipairs(i.writes) do ready[r] = done end
    if done > last then last = done end
    left[n] = last
  end
  return last
end

-- ---- memory ----

local sizes = {}
for k = 14, 27 do sizes[#sizes + 1] = 1 << k end

--- Bytes in a second that one thread reads and writes, by how many bytes it goes over again and again: measured.
-- options: seconds (0.01, of each), most (2^27 bytes), folder.
---@param options? table
---@return { bytes: integer, read: number, write: number }[]
function M.memory(options)
  local who = "estimate.pipeline.memory"
  local o = arguments.read(who, options, { seconds = 0.01, most = 1 << 27, folder = arguments.none },
    { seconds = "a finite number > 0", most = "an integer >= 16384", folder = "a string" })
  local streams = instructions.streams(o.folder)
  local result = {}
  for _, bytes in ipairs(sizes) do
    if bytes <= o.most then
      local row = { bytes = bytes }
      for name, time in pairs(streams.time) do
        local buffer = ty.ones({ bytes // 4 + 64 })
        local best, rounds = math.huge, 1
        time(buffer, bytes, 1)
        for _ = 1, 4 do
          local took = time(buffer, bytes, rounds)
          best = math.min(best, took / rounds)
          rounds = math.max(1, math.min(1000000, math.ceil(o.seconds / 4 / best)))
        end
        row[name] = bytes / best
      end
      result[#result + 1] = row
    end
  end
  streams.close()
  return result
end

-- The rate for so many bytes, between the measured ones by their logarithms.
local function rate_of(memory, bytes, name)
  local before = memory[1]
  for _, row in ipairs(memory) do
    if row.bytes >= bytes then
      if row == before then return row[name] end
      local x = math.log(bytes / before.bytes) / math.log(row.bytes / before.bytes)
      return before[name] ^ (1 - x) * row[name] ^ x
    end
    before = row
  end
  return before[name]
end

-- ---- kernels ----

--- What is measured of a machine before a kernel is foretold: { costs, memory, call }, call: seconds of an op on one
-- element, from Lua and back. options: those of instructions.measure and pipeline.memory.
---@param options? { quick?: boolean }
---@return { costs: InstructionCosts, memory: table[], call: number }
function M.machine(options)
  local o = arguments.read("estimate.pipeline.machine", options, { quick = false })
  local costs = instructions.measure(o.quick and { seconds = 2e-5, rounds = 2 } or nil)
  local memory = M.memory(o.quick and { seconds = 1e-4, most = 1 << 20 } or nil)
  local x, best = ty.ones(1), math.huge
  for _ = 1, 20 do
    local began = ty.system.clock()
    for _ = 1, 100 do ty.scope(function() return x:neg() end) end
    best = math.min(best, (ty.system.clock() - began) / 100)
  end
  return { costs = costs, memory = memory, call = best }
end

--- Foretells the seconds that a kernel takes for an input of some size, from the instructions that it runs for two
-- small ones: what the larger of them adds is what goes on to `size`. make(n) returns a function that runs the kernel
-- on an input of size n, whose first result is the kernel's output. spec: small, large (sizes that are traced), size,
-- and writes (bytes that are written, where they are not those of the result). Bytes are those that ty.profile counts.
---@param machine table  of pipeline.machine
---@param make fun(n: integer): function
---@param spec { small: integer, large: integer, size: integer, writes?: integer }
---@return { seconds: number, core: number, memory: number, bound: "core"|"memory", instructions: number,
---  bytes: integer, flops: number }
function M.foretell(machine, make, spec)
  local who = "estimate.pipeline.foretell"
  arguments.expect(who, "machine", machine, "a table")
  arguments.expect(who, "make", make, "a function")
  local o = arguments.read(who, spec, { small = arguments.none, large = arguments.none, size = arguments.none,
    writes = arguments.none }, { small = "an integer >= 1", large = "an integer >= 2", size = "an integer >= 1",
    writes = "an integer >= 0" })
  for _, name in ipairs { "small", "large", "size" } do arguments.expect(who, name, o[name], "an integer >= 1") end
  if o.large <= o.small then
    arguments.fail("%s: large: expected more than small, %d, got %d", who, o.small, o.large)
  end
  local function traced(n)
    local fn = make(n)
    ty.scope(fn) -- what is made at the first call
    local list = ty.scope(function() return (tracing.trace(fn)) end)
    return M.cycles(list, machine.costs), #list
  end
  local threads = ty.threads()
  ty.set_threads(1)
  local ok, small, count, large, more = pcall(function()
    local cycles, n = traced(o.small)
    return cycles, n, traced(o.large)
  end)
  if not ok then
    ty.set_threads(threads)
    error(small, 0)
  end
  local core = (large - small) / (o.large - o.small) * o.size * 1e-9 / machine.costs.ghz
  local fn, output = make(o.size), nil
  local seen = ty.profile(function() output = fn() end, { limits = { flops = 1, bandwidth = 1 } })
  ty.set_threads(threads)
  local bytes, flops = 0, 0.0
  for _, event in ipairs(seen.events) do bytes, flops = bytes + event.bytes, flops + event.flops end
  local writes = o.writes or ty.is_tensor(output) and output:nbytes() or 0
  local reads = math.max(0, bytes - writes)
  local memory = reads / rate_of(machine.memory, bytes, "read") + writes / rate_of(machine.memory, bytes, "write")
  return { seconds = machine.call + math.max(core, memory), core = core, memory = memory, bytes = bytes, flops = flops,
    bound = core >= memory and "core" or "memory", instructions = (more - count) / (o.large - o.small) * o.size }
end

return M
