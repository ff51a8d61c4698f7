-- A thousand adapters on one language model
-- claim: requests with 1,000 adapters of ranks 4 to 64 cost at most a fifth more than without, and say what merged does
-- system: serve.adapters on the engine: one pool of pages for keys, values and adapters, one op for all ranks of a step
-- paper: Sheng et al. 2023, "S-LoRA: Serving Thousands of Concurrent LoRA Adapters"
-- time: 2 minutes on one CPU core
--
-- kjv-lm of the zoo with adapters of the four projections of attention, drawn at random and half as large as the
-- weights, in folders of PEFT. Requests come as in the paper: a Poisson process, faster than can be served, adapter i
-- of n wanted with a probability that goes with 1 / i; prompts are pieces of the book. All ways serve the same
-- requests with the same engine, whose pool is in f16, as adapters are; time is that of the processor, and ways take
-- turns step by step. The base leaves adapters out. Padded ways give each adapter the room and the work of rank 64.
-- Merged weights serve one adapter at a time, all that wait for it together, and change when these are done; the plain
-- weights and the adapters are kept in memory for that. Every run begins without adapters in the pool; they come from
-- host memory, or from the disk where that is said. What is compared with merged weights token by token is computed in
-- f32. At a width of 256 rank 64 is a quarter of a matrix, and a step with many adapters reads as many bytes of them
-- as of the model: in the paper's models of 4096 it is a sixty-fourth.
-- A trace asks for some of the adapters only, as their popularity has it; that all are served is what the row of every
-- adapter in turn says.
local ty = require "tycho"
local serve, zoo = require "tycho.serve", require "tycho.zoo"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "model", "kjv-lm", "of the zoo", quick = "kjv-draft" },
    { "adapters", { 1, 10, 100, 1000 }, "numbers of adapters", quick = { 1, 6 } },
    { "requests", 48, "of a trace", quick = 6 },
    { "rate", 100, "requests in a second" },
    { "input", 128, "most tokens of a prompt", quick = 16 },
    { "output", 48, "most new tokens", quick = 8 },
    { "room", 8192, "tokens whose keys and values would fill the pool", quick = 2048 },
    { "exact", 24, "requests that are compared with merged weights", quick = 6 },
  },
}
local args = r.args
local trials, traces, replay = serve.adapter_trials, serve.traces, serve.replay
local most = args.adapters[#args.adapters]

local function make() return r:place(function() return zoo.load(args.model) end) end
local folder = r:path "adapters"
r:say("drawing %d adapters", most)
local paths = trials.draw(make(), folder, most, { ranks = { 16, 64, 4, 32, 8 } })
local text = zoo.tokenizer(args.model):encode(ty.data.kjv { books = 2 }):to "i64"

local function trace_of(seed, adapters, more)
  local o = { text = text, seed = seed, adapters = adapters, requests = args.requests, rate = args.rate,
    input = { 8, args.input }, output = { 8, args.output } }
  for key, value in pairs(more or {}) do o[key] = value end
  return traces.trace(o)
end
local function ways_of(names, options)
  local engine = { requests = 32, batch = 256, room = args.room, dtype = "f16", prefixes = false }
  for key, value in pairs(options or {}) do engine[key] = value end
  engine.dtype = engine.dtype or nil
  return trials.ways(names, { paths = paths, make = make, host = 8 << 20, engine = engine })
end

-- ---- the same as merged weights ----

local exact = ways_of({ "together", "merged" }, { dtype = false })
local same, apart = {}, {}
for i, seed in ipairs(r.seeds) do
  local trace = trace_of(seed, most, { requests = args.exact, output = { 8, 16 } })
  same[i], apart[i] = trials.compare(exact.together.run(trace, true), exact.merged.run(trace, true))
  r:say("seed %d: %.0f %% of the requests say what merged weights say, log-probabilities %.2g apart", seed,
    100 * same[i], apart[i])
end

-- ---- every adapter once, from the disk through a small pool ----

local disk = ways_of({ "disk" }, { dtype = false, room = args.room // 4 }).disk
local all = trace_of(0, most, { requests = most, rate = 1e6, input = { 8, 8 }, output = { 2, 2 } })
for i, arrival in ipairs(all) do arrival.adapter = i end
local served = disk.run(all)
local few, got = {}, { requests = {} }
for i = 1, most, math.max(1, most // 50) do
  few[#few + 1] = all[i]
  got.requests[#few] = served.requests[i]
end
local from_disk = trials.compare(got, exact.merged.run(few))
local usage, pool = disk.set:usage(), disk.engine.cache:bytes()
local bytes = 0
for _, entry in pairs(disk.set.entries) do bytes = bytes + entry.pages * disk.set.form.page_bytes end
r:say("%d adapters of %.0f MB through a pool of %.0f MB: brought %d times, read %d times", most, bytes / 1e6,
  pool / 1e6, usage.fetched, usage.read)
r:note("disk", { pool_bytes = pool, adapter_bytes = bytes, fetched = usage.fetched, read = usage.read,
  host_bytes = usage.host_bytes })

-- ---- how fast ----

local ways = ways_of { "base", "together", "padded", "disk", "merged" }
local speeds = {} -- tokens in a second, by way and number of adapters, of each seed
local function measure(names, seed, i, n) -- i nil: to warm up, which makes the pools as large as they will be
  local trace, runs = trace_of(seed, n), {}
  for _, name in ipairs(names) do
    local way = ways[name]
    -- Adapters that are to be in host memory are read before.
    for _, arrival in ipairs(way.set and name ~= "disk" and trace or {}) do
      way.set:pages_of("s-lora", tostring(arrival.adapter))
    end
    runs[name] = function(turn) return way.run(trace, false, turn) end
  end
  local asked, distinct = {}, 0
  for _, arrival in ipairs(trace) do
    distinct = distinct + (asked[arrival.adapter] and 0 or 1)
    asked[arrival.adapter] = true
  end
  local results = replay.in_turns(runs)
  for name, result in pairs(i and results or {}) do
    local speed, first = result.tokens / result.busy, ty.stats.mean(result.first)
    r:say("seed %d, %4d adapters (%2d asked for), %-8s %7.1f tokens in a second, %.2f s to the first token", seed, n,
      distinct, name, speed, first)
    r:note(("%s/%d"):format(name, n), { tokens_per_second = speed, first = first,
      latency = ty.stats.mean(result.done), asked_for = distinct }, seed)
    ty.stats.put(speeds, ("%s/%d"):format(name, n), i, speed)
  end
end
measure({ "base", "together", "padded", "disk" }, 1 << 20, nil, most)
for i, seed in ipairs(r.seeds) do
  measure({ "base", "together", "padded", "merged", "disk" }, seed, i, most)
  for _, n in ipairs(i == 1 and args.adapters or {}) do
    if n < most then measure({ "base", "together", "padded", "merged" }, seed, i, n) end
  end
end

local function ratios(of, at)
  local list = {}
  for i in ipairs(r.seeds) do list[i] = of[i] / at[i] end
  return list
end
local base, together = speeds["base/" .. most], speeds["together/" .. most]
local overheads = ratios(base, together)
for i, x in ipairs(overheads) do overheads[i] = x - 1 end

local series = {}
for _, name in ipairs { "base", "together", "padded", "merged" } do
  local y = {}
  for k, n in ipairs(args.adapters) do y[k] = speeds[name .. "/" .. n][1] / speeds["base/" .. n][1] end
  series[#series + 1] = { x = args.adapters, y = y, label = name }
end
ty.plot.line { series = series, title = "Tokens in a second, of those without adapters", x_label = "adapters",
  log_x = true, y_range = { 0, 1.1 } }:save(r:picture "throughput.png")
trials.discard(paths)

os.exit(r:finish {
  { claim = "time that requests with 1,000 adapters take more than without", values = overheads, bar = 0.2,
    below = true },
  { claim = "requests that say what merged weights say, share", values = same, bar = 1 },
  { claim = "their log-probabilities from those of merged weights, relative, the largest", values = apart, bar = 1e-5,
    below = true },
  { claim = "of every adapter in turn from the disk, those that say what merged weights say", measured = from_disk,
    bar = 1 },
  { claim = "bytes of the pool through which they went, of those of all adapters", measured = pool / bytes, bar = 0.2,
    below = true },
  { claim = "tokens in a second, of those of weights merged for one adapter at a time",
    values = ratios(together, speeds["merged/" .. most]), bar = 2 },
  { claim = "tokens in a second, of those with ranks padded to 64",
    values = ratios(together, speeds["padded/" .. most]), bar = 1.1 },
}, true)
