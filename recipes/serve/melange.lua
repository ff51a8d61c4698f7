-- GPUs of several kinds that serve a language model for less than those of one
-- claim: a mix of GPUs costs less than the cheapest kind alone, and up to 77 % less than the dearest
-- system: serve.melange: Llama 2 7B on L4, A10G, A100 and H100, chats, documents and both, 40 and 120 ms a token
-- paper: Griggs et al. 2024, "Melange: Cost Efficient Large Language Model Serving by Exploiting GPU Heterogeneity"
-- time: 15 seconds on one CPU core
--
-- Prices, GPUs, the model, limits and rates are the paper's. Its profiles are not public: what a GPU takes is a formula
-- of its sheet with a few round numbers for the engine, of which a row says how often it agrees with the paper's figure
-- on which of two GPUs is cheaper for a size. Lengths of requests are drawn, as chats and papers have them. All ways
-- have the same rates of GPUs; the single kind is the best for each setting, chosen with hindsight. Greedy sends every
-- bucket to the kind on which it is cheapest by itself. The packing is exact unless its search runs out of nodes, which
-- a row counts. Whether tokens come in time is seen by playing the allocation through, with requests by chance.
local ty = require "tycho"
local melange = require("tycho.serve").melange

local r = ty.recipe.declare { args = {
  { "rates", { 1.0, 2.0, 4.0, 8.0, 16.0, 32.0 }, "requests a second", quick = { 1.0, 4.0 } },
  { "limits", { 0.12, 0.04 }, "seconds for a token", quick = { 0.12 } },
  { "requests", 4000, "lengths that are drawn", quick = 500 }, { "nodes", 3000, "of a search", quick = 100 },
  { "seconds", 60.0, "that are played through", quick = 5.0 }, { "slices", 8, "of a bucket", quick = 2 },
} }
local args, stats = r.args, ty.stats
local kinds = { "L4", "A10G", "A100", "H100" }

-- Which of two GPUs is cheaper for a size: agreement with the paper's figure, and by how much.
local agree, count, apart = 0, 0, {}
for o, output in ipairs(melange.outputs) do
  for i = 1, 6 do
    local input, published = melange.inputs[i], melange.published[o][i]
    local function per_dollar(name)
      return melange.rate(melange.gpus[name], input, output) / melange.gpus[name].cost
    end
    local ratio = math.log(per_dollar "A10G" / per_dollar "A100")
    local want = published > 0 and math.log(1 + published / 100) or -math.log(1 - published / 100)
    count, agree = count + 1, agree + (ratio * want > 0 and 1 or 0)
    apart[count] = ratio - want
  end
end
r:say("A10G or A100: %d of %d sizes as the paper has it; ratios %.0f %% apart", agree, count, 100 * stats.rms(apart))

r:say("\n%-10s ms  rate   dollars an hour: mix  one kind  greedy   L4 A10G A100 H100   in time  proven", "requests")
local of_best, of_greedy, saved, cheaper, worst, proven, in_time = {}, {}, {}, {}, 1, {}, {}
local series = {}
for _, kind in ipairs { "chat", "documents", "mixed" } do
  local requests = melange.requests(kind, args.requests, r.seed + 1)
  for _, within in ipairs(args.limits) do
    local x, y = {}, {}
    for _, rate in ipairs(args.rates) do
      local rates = melange.rates(requests, rate)
      local best = melange.allocate(rates, { within = within, nodes = args.nodes, slices = args.slices })
      local single, least, most = melange.single(rates, { within = within }), math.huge, 0
      for _, cost in pairs(single) do least, most = math.min(least, cost), math.max(most, cost) end
      local greedy = melange.greedy(rates, { within = within })
      local played = melange.simulate(best, { seconds = args.seconds, requests = requests, seed = r.seed })
      local n = #of_best + 1
      of_best[n], of_greedy[n], saved[n] = best.cost / least, best.cost / greedy, 1 - best.cost / most
      cheaper[n], proven[n] = best.cost < least - 1e-6, best.proven
      local sum = in_time[within] or { 0, 0 }
      in_time[within] = { sum[1] + played.within * played.count, sum[2] + played.count }
      worst = math.min(worst, played.within)
      x[#x + 1], y[#y + 1] = rate, best.cost / least
      local machines = {}
      for i, name in ipairs(kinds) do machines[i] = ("%4d"):format(best.machines[name]) end
      r:say("%-10s %3.0f %5.0f %19.2f %9.2f %7.2f %s %8.3f  %s", kind, 1e3 * within, rate, best.cost, least, greedy,
        table.concat(machines, " "), played.within, best.proven and "yes" or "no")
      r:note(("%s, %d ms, %d a second"):format(kind, math.floor(1e3 * within + 0.5), math.floor(rate)),
        { cost = best.cost, single = least, greedy = greedy, within = played.within })
    end
    series[#series + 1] = { x = x, y = y, label = ("%s, %.0f ms"):format(kind, 1e3 * within) }
  end
end
local least_in_time = 1
for _, sum in pairs(in_time) do least_in_time = math.min(least_in_time, sum[1] / sum[2]) end
ty.plot.line { series = series, title = "Dollars of a mix, of the best single kind", x_label = "requests a second",
  width = 800 }:save(r:picture "melange.png")

os.exit(r:finish {
  { claim = "dollars, of the best single kind of each setting, mean", measured = stats.mean(of_best), bar = 0.95,
    below = true },
  { claim = "settings in which a mix is cheaper than any single kind", measured = stats.share(cheaper), bar = 0.5 },
  { claim = "most that is saved on a single kind, which the paper has as 0.77",
    measured = math.max(table.unpack(saved)), bar = 0.7 },
  { claim = "dollars, of those of greedy buckets, mean", measured = stats.mean(of_greedy), bar = 0.95, below = true },
  { claim = "requests whose tokens came in time, played through, all of the worse limit", measured = least_in_time,
    bar = 0.995 },
  { claim = "the same, the worst setting", measured = worst, judged = false },
  { claim = "settings in which nothing cheaper can be, proven", measured = stats.share(proven), bar = 0.8 },
  { claim = "sizes for which the A10G or the A100 is cheaper as in the paper's figure", measured = agree / count,
    bar = 0.75 },
}, true)
