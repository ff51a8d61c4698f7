-- Machines for prompts and machines for tokens
-- claim: the same tokens, keys and values that travel while the prompt is computed, and more requests a second for a
--   price or a power than machines that do both
-- system: serve.split, machines as ranks that exchange pages; serve.cluster, a cluster of them in events
-- paper: Patel et al. 2023, "Splitwise: Efficient generative LLM inference using phase splitting"
-- time: 5 minutes on one CPU core
--
-- Requests have the lengths of two services of Azure; for ranks here they are shortened. Machines have the clocks of
-- their threads, and a link that takes a tenth of what a prompt takes, as the paper's does. The cluster in events is
-- held against the same requests on ranks, with step times fitted to steps of other requests.
--
-- Then clusters of the paper's machines are sought, with the step times, prices and powers that its authors published:
-- how many requests a second they serve within the paper's service level, of all that a budget buys. What is judged is
-- Llama-2 70B with what its contexts cost; in the authors' simulator they cost nothing, which is shown beside it.
-- Machines that mix take whole prompts, as the paper's baseline does, or parts of them, of three sizes; nothing is
-- charged for mixing. Split ones have four shares for prompts, four pairs of kinds, and parts or none where they help
-- out. All is chosen by the first seed. The paper has 1.4 times at 20 % less cost, 2.35 at the same cost and power.
local ty = require "tycho"
local dist, serve = require "tycho.dist", require "tycho.serve"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "width", 256, "hidden size of the Llama on ranks", quick = 32 }, { "layers", 4, "of it", quick = 2 },
    { "served", 40, "requests of each run on ranks", quick = 4 },
    { "fitted", 30, "requests of each run that step times are fitted to", quick = 8 },
    { "rate", 25.0, "requests a second on two ranks", quick = 100.0 },
    { "lengths", { 16, 64, 256, 512 }, "of prompts that go over", quick = { 16, 64 } },
    { "rounds", 5, "of these, of which the median counts", quick = 1 },
    { "machines", 10, "DGX-H100 whose price or power is the budget", quick = 2 },
    { "requests", 800, "of a trace in events", quick = 40 },
  },
}
local args = r.args
local trial = serve.split_trial
local work = trial.open { width = args.width, layers = args.layers, bandwidth = 1e6 * args.layers * args.width }

-- ---- one prompt: what its way costs ----

local hidden, threshold = 0, 0
for i = #args.lengths, 1, -1 do
  local n = args.lengths[i]
  local ways, outcomes = trial.ways(work, n, args.rounds)
  r:say("prompt of %3d tokens: the second token is later by %.2f ms layer by layer, of which %.2f after the prompt; by "
    .. "%.2f ms in one piece", n, 1e3 * ways.layers.cost, 1e3 * ways.layers.late, 1e3 * ways.serial.cost)
  r:note("way/" .. n, { layers = ways.layers.cost, late = ways.layers.late, serial = ways.serial.cost })
  if i == #args.lengths then
    hidden = 1 - ways.layers.late / ways.serial.late
    local function panel(title, way) return { title = title, rows = trial.rows(work, outcomes[way]) } end
    dist.timeline({ panel(("A prompt of %d tokens, keys and values in one piece"):format(n), "serial"),
      panel("layer by layer", "layers") }, { labels = { "prompt", "link", "tokens" } }):save(r:picture "splitwise.png")
  end
  if ways.layers.cost > ways.serial.cost and threshold == 0 then threshold = n + 1 end
end
work.serial_below = threshold
r:say("prompts below %d tokens go in one piece", threshold)

-- ---- many requests on ranks, and in events ----

local ways = { { name = "split", pools = { "prompt", "token" } }, { name = "mixed, whole prompts" },
  { name = "mixed, 48 tokens a step", chunk = 48 } }
local steps, runs, differ, off_bytes = {}, {}, 0, 0
for k, service in ipairs(r:tries { "conversation", "coding" }) do
  for w, way in ipairs(ways) do
    local function place(i) return way.pools and { 1, 2 } or { i % 2 + 1, i % 2 + 1 } end
    for _, rate in ipairs(r:tries { args.rate, args.rate / 2 }) do
      local list = trial.requests(work, service, args.fitted, rate, 100 + 10 * k + w, place)
      local got = trial.serve(work, 2, list, way.chunk)
      table.move(got.steps, 1, #got.steps, #steps + 1, steps)
    end
    local list = trial.requests(work, service, args.served, args.rate, k, place)
    local got = trial.serve(work, 2, list, way.chunk)
    local others, bytes = trial.misses(work, list, got)
    differ, off_bytes = differ + others, math.max(off_bytes, bytes)
    runs[#runs + 1] = { service = service, way = way, list = list, got = got }
  end
end
local time, error_of_steps = trial.fit(work, steps)
local off = {}
for _, run in ipairs(runs) do
  local ratios = trial.compare(work, time, run.way.pools or { "mixed", "mixed" }, run.list, run.got, run.way.chunk)
  r:say("%s, %s: in events %.2f of the time to the first token, %.2f of that between tokens, %.2f of all", run.service,
    run.way.name, ratios.ttft, ratios.tbt, ratios.e2e)
  for _, ratio in pairs(ratios) do off[#off + 1] = math.abs(ratio - 1) end
end

-- ---- clusters of machines like these, as many of each design ----

local here = {} -- of each service, requests a second by kind
for k, service in ipairs(r:tries { "conversation", "coding" }) do
  here[k] = { {} }
  for kind, own in pairs(trial.best(work, time, r.quick and 3 or 8, service, args.requests, r.seed)) do
    here[k][1][kind] = own.rate
    r:say("machines as here, %s: %.1f requests a second, %s", service, own.rate, own.design.name)
  end
end

-- ---- clusters within a budget ----

local variants = { { "llama2-70b", "llama2-70b" }, { "llama2-70b, contexts free", "llama2-70b", contexts = false },
  { "bloom-176b", "bloom-176b" } }
local rates = {} -- by variant and budget: of each service, by seed, requests a second of each kind of design
for _, variant in ipairs(variants) do
  local kinds = {}
  for name, machine in pairs { A100 = "dgx-a100", H100 = "dgx-h100", capped = "dgx-h100-capped" } do
    kinds[name] = serve.step_time.published(machine, variant[2], { contexts = variant.contexts })
  end
  local o = { kinds = kinds, mixed = { "H100", "A100" }, chunks = r:tries { 512, 1024, 2048 }, overflow = { 512 },
    shares = r.quick and { 0.5 } or { 0.3, 0.45, 0.6, 0.75 },
    pairs = r:tries { { "H100", "H100" }, { "H100", "capped" }, { "A100", "A100" }, { "H100", "A100" } } }
  for _, budget in ipairs { { "cost", 1 }, { "power", 1 }, variant == variants[1] and { "cost", 0.8 } or nil } do
    if budget[2] < 1 then o.mixed = {} end
    local key = ("%s/%s x %g"):format(variant[1], budget[1], budget[2])
    rates[key] = {}
    for k, service in ipairs { "conversation", "coding" } do
      local traces = {}
      for i, seed in ipairs(r.seeds) do traces[i] = serve.services.draw(service, args.requests, 1, { seed = seed }) end
      local list = serve.designs.within(args.machines * budget[2] * kinds.H100[budget[1]], budget[1], o)
      local by_seed, best = serve.designs.rates(list, traces, kinds.A100, { from = 0.1 * args.machines })
      for kind, own in pairs(best) do
        r:say("%s, %s: %.2f requests a second, %s", key, service, own.rate, own.design.name)
        for i, seed in ipairs(r.seeds) do
          r:note(("%s/%s/%s"):format(key, service, kind), { rate = by_seed[i][kind] }, seed)
        end
      end
      rates[key][k] = by_seed
    end
  end
end

-- Times as many requests as mixed machines serve, by seed.
local function gain(key, kind, base)
  return rates[key] and serve.designs.gains(rates[key], rates[base or key], kind) or {}
end
r:note("fit", { error = error_of_steps, send = time.send, take = time.take })
local first, cost, power = variants[1][1], "/cost x 1", "/power x 1"
local rows = {
  { claim = "requests whose tokens are not those of one engine", measured = differ, bar = 0, below = true },
  { claim = "bytes that went over beyond those of keys and values", measured = off_bytes, bar = 0, below = true },
  { claim = "share of the way that is hidden behind the longest prompt", measured = hidden, bar = 0.8 },
  { claim = "seconds in events from those on ranks, mean of all", measured = ty.stats.mean(off), bar = 0.15,
    below = true },
  { claim = "requests a second at the same cost, of machines that mix whole prompts",
    values = gain(first .. cost, "mixed whole"), bar = 1 },
  { claim = "the same at the same power", values = gain(first .. power, "mixed whole"), bar = 1 },
  { claim = "at the same power, of machines that mix parts of prompts",
    values = gain(first .. power, "mixed in parts"), bar = 1 },
}
local function show(claim, values) rows[#rows + 1] = { claim = claim, values = values, judged = false } end
show("at 20 % less cost, of those that mix whole prompts", gain(first .. "/cost x 0.8", "mixed whole", first .. cost))
show("at the same cost, of machines that mix parts of prompts", gain(first .. cost, "mixed in parts"))
for _, kind in ipairs { "mixed whole", "mixed in parts" } do
  show("as many machines as those here, of " .. kind, serve.designs.gains(here, here, kind))
  for k = 2, #variants do
    show(("%s, at the same power, of %s"):format(variants[k][1], kind), gain(variants[k][1] .. power, kind))
  end
end
os.exit(r:finish(rows, true))
