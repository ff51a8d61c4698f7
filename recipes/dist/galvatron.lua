-- A way to divide each layer over ranks, found by a search instead of by trying
-- claim: the plan that is found is within 10 % of the fastest of all that were measured within the same memory
-- system: dist.layer_plans for a Llama on four ranks of two machines, against 25 plans that treat layers alike
-- paper: Miao et al. 2022, "Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism"
-- time: 2 minutes on one CPU core
--
-- Layers are divided by data, by matrices, by data with weights that ranks divide, or by two of these, run forwards
-- once or twice, and stages have parts of them. What single layers take by each strategy is measured over links that
-- take no time, the links are formulas; the search never sees a plan run. Then all plans train the same rows over the
-- same links, in turn; the fastest step counts, as for the profile, by the ranks' clocks. Compared are plans whose
-- ranks had no more bytes than the limit, two of each search among them. Profiles of one rank alone were no good: ranks
-- find their caches cold after each exchange. On a busy processor a plan differs from itself by a tenth.
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare { args = {
  { "length", 64, "tokens of a row", quick = 16 }, { "width", 96, "hidden size of the Llama", quick = 32 },
  { "inner", 384, "width of its feed-forward networks", quick = 64 }, { "layers", 4, "of it", quick = 2 },
  { "vocabulary", 2048, "words", quick = 257 }, { "rows", 16, "of a step", quick = 8 },
  { "rounds", 3, "in which all are measured", quick = 1 }, { "steps", 3, "of a plan in a round", quick = 2 },
  { "ranks", 4, "two of which are on one machine" },
  { "limits", { 0.0, 0.75, 0.5, 0.4 }, "bytes of a rank, of those of plain data parallelism; 0: any", quick = { 0.0 } },
  { "latency", 1e-4, "seconds between machines" }, { "bandwidth", 1e9, "bytes a second between machines" },
  { "inside", 1e10, "bytes a second within one" },
} }
local args = r.args
local ranks, inside = args.ranks, { latency = args.latency / 5, bandwidth = args.inside }
local work = dist.workload.open { length = args.length, width = args.width, layers = args.layers, heads = 4, rows = 8,
  vocabulary = args.vocabulary, chapters = r.quick and 12 or nil,
  config = { tie_word_embeddings = false, intermediate_size = args.inner } }
local cluster = dist.costs.cluster { flops = 1, memory = 1, bandwidth = 1, tiers = {
  { size = 2, latency = inside.latency, bandwidth = inside.bandwidth },
  { latency = args.latency, bandwidth = args.bandwidth } } }
local count = args.layers + 2

-- All plans that treat blocks alike.
local plans, even = {}, {}
for i = 1, count do even[i] = 1 end
for p = 1, ranks do
  for _, s in ipairs(ranks % p == 0 and dist.layer_plans.strategies(ranks // p) or {}) do
    for _, micro in ipairs(p == 1 and { 1 } or { 4, 8 }) do
      local layers = { [1] = { data = s.tensor * s.data, again = s.again, sharded = s.sharded } }
      for i = 2, count - 1 do layers[i] = s end
      layers[count] = layers[1]
      if args.rows % (micro * s.tensor * s.data) == 0 then
        plans[#plans + 1] = { alike = true, plan = { layers = layers, pipeline = p, micro_batches = micro,
          parts = dist.pipeline.divide(even, p) } }
      end
    end
  end
end
if r.quick then plans = { plans[1], plans[2], plans[#plans] } end

local function words(plan)
  local list = {}
  for i, s in ipairs(plan.layers) do
    list[i] = ("%s%s%s"):format((s.tensor or 1) > 1 and ("t%d"):format(s.tensor) or "",
      (s.data or 1) > 1 and (s.first == "data" and "D%d" or "d%d"):format(s.data) or "",
      s.sharded and "s" or s.again and "a" or "")
    if list[i] == "" then list[i] = "-" end
  end
  for i, part in ipairs(plan.parts or {}) do
    if i > 1 then list[part[1]] = "| " .. list[part[1]] end
  end
  return ("%d stages, %d micro-batches: %s"):format(plan.pipeline, plan.micro_batches, table.concat(list, " "))
end

-- The least of two profiles, number by number.
local function least(a, b)
  if not a then return b end
  if type(a) == "number" then return math.min(a, b) end
  local out = {}
  for key, value in pairs(a) do out[key] = least(value, b[key]) end
  return out
end
local profile
for _ = 1, args.rounds do
  profile = least(profile, dist.layer_trial.profile(work, ranks, { rows = args.rows, repeats = r.quick and 1 or 5 }))
end

-- What the search finds within each limit: the best, and what is next.
local plain = select(2, dist.layer_plans.estimate(profile, cluster, ranks, plans[1].plan))
local searches, known, began = {}, {}, ty.system.clock()
for _, entry in ipairs(plans) do known[words(entry.plan)] = entry end
for i, share in ipairs(args.limits) do
  local limit = share > 0 and share * plain or math.huge
  local found = dist.layer_plans.search(profile, cluster, { ranks = ranks, memory = limit,
    micro_batches = r.quick and { 4 } or { 1, 2, 4, 8 } })
  searches[i] = { limit = limit, share = share }
  for k = 1, math.min(2, #found) do
    local name = words(found[k].plan)
    if not known[name] then
      known[name] = { plan = found[k].plan }
      plans[#plans + 1] = known[name]
    end
    if k == 1 then searches[i].chosen = known[name] end
  end
end
r:say("searched within %d limits in %.2f s", #args.limits, ty.system.clock() - began)

local estimated, measured, apart = {}, {}, 0
local took = dist.layer_trial.measure(work, ranks, ty.stats.column(plans, "plan"), { rows = args.rows,
  steps = args.steps, rounds = args.rounds, latency = args.latency, bandwidth = args.bandwidth, per_node = 2,
  within = inside, seed = r.seed })
for i, entry in ipairs(plans) do
  for key, value in pairs(took[i]) do entry[key] = value end
  estimated[i], entry.foretold = dist.layer_plans.estimate(profile, cluster, ranks, entry.plan)
  measured[i] = entry.seconds
  for step, loss in ipairs(entry.losses) do
    apart = math.max(apart, math.abs(loss / plans[1].losses[step] - 1))
  end
  r:say("%7.1f ms, foretold %7.1f; %6.2f MB, foretold %6.2f   %s", 1e3 * entry.seconds, 1e3 * estimated[i],
    entry.bytes / 1e6, entry.foretold / 1e6, words(entry.plan))
end

r:say("\nlimit, MB   chosen, ms  MB     fastest   of layers alike")
local worst, fits, better = 0, 0, math.huge
for _, s in ipairs(searches) do
  local fastest, alike = math.huge, math.huge
  for _, entry in ipairs(plans) do
    if entry.bytes <= s.limit then
      fastest = math.min(fastest, entry.seconds)
      if entry.alike then alike = math.min(alike, entry.seconds) end
    end
  end
  local chosen = s.chosen
  worst = math.max(worst, chosen and chosen.seconds / fastest or math.huge)
  fits = math.max(fits, chosen and chosen.bytes / s.limit or math.huge)
  better = math.min(better, chosen and chosen.seconds / alike or math.huge)
  if chosen then
    r:say("%9.2f %10.1f %6.2f %10.1f %10.1f   %s", s.limit / 1e6, 1e3 * chosen.seconds, chosen.bytes / 1e6,
      1e3 * fastest, 1e3 * alike, words(chosen.plan))
    r:note(("limit %.2f"):format(s.share), { chosen = chosen.seconds, fastest = fastest, alike = alike,
      bytes = chosen.bytes })
  end
end

local order, x = {}, {}
for i = 1, #plans do order[i] = i end
table.sort(order, function(a, b) return measured[a] < measured[b] end)
local foretold, ran = {}, {}
for place, i in ipairs(order) do
  x[place], foretold[place], ran[place] = place, 1e3 * estimated[i], 1e3 * measured[i]
end
ty.plot.line { series = { { x = x, y = ran, label = "measured" }, { x = x, y = foretold, label = "foretold" } },
  x_label = "plans, the fastest first", y_label = "ms a step", width = 900 }:save(r:picture "galvatron.png")

os.exit(r:finish {
  { claim = "seconds of the chosen plan, of the fastest measured within the limit, the worst limit", measured = worst,
    bar = 1.1, below = true },
  { claim = "bytes of the chosen plan, of the limit, at most", measured = fits, bar = 1, below = true },
  { claim = "seconds of the chosen plan, of the fastest that treats layers alike, the best limit", measured = better,
    judged = false },
  { claim = "rank correlation of foretold and measured seconds, all plans",
    measured = ty.stats.rank_correlation(estimated, measured), bar = 0.9 },
  { claim = "losses of all plans, of those of plain data parallelism, furthest", measured = apart, bar = 1e-4,
    below = true },
}, true)
