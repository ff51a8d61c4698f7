-- How fast a cluster trains a transformer by tensor, pipeline and data parallelism, from formulas alone
-- claim: formulas put plans of parallelism in the order in which clusters have run them, and say which fit
-- system: dist.plans against 10 steps measured on Selene, 66 on Jean Zay and the three recipes of Frontier
-- paper: Dash et al. 2023, "Optimizing Distributed Training on Frontier for Large Language Models"
-- time: 1 second on one CPU core
--
-- Nothing is trained: published steps are foretold from a model's sizes, a plan and a machine's sheet. Of Frontier and
-- Selene nothing is fitted. Jean Zay waited for every kernel, and what that takes, what products reach and what the
-- links give are four numbers that no sheet has: they are fitted to the trials of the first days, all of which have 8
-- ranks for a layer, and judged on those of the later days. What Dash et al. measured besides their recipes is in
-- figures, which are not among the data. Rows judge the order; how far the level is off stands beside them. Baselines
-- see the plan, too: the pipeline's bubble alone, and as little of model parallelism as can be.
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare { args = {
  { "margin", 0.02, "of two measured speeds, below which their order does not count" },
  { "devices", 384, "of Jean Zay, for the search" }, { "sequences", 2048, "of a step, for the search" },
} }
local published, plans, stats = dist.published, dist.plans, ty.stats

-- Foretold and measured speeds of rows, and how far they agree.
local function compare(name, rows, cluster, foretell)
  local foretold, measured, groups, ratios = {}, {}, {}, {}
  foretell = foretell or function(row) return plans.step(row.model, cluster, row.plan).flops end
  for _, row in ipairs(rows) do
    if row.flops then
      local n = #foretold + 1
      foretold[n], measured[n], groups[n] = foretell(row), row.flops, row.group
      ratios[n] = foretold[n] / row.flops
    end
  end
  local share, pairs_of = plans.agreement(foretold, measured, groups, r.args.margin)
  local got = { correlation = stats.rank_correlation(foretold, measured), pairs = share, level = stats.mean(ratios),
    off = stats.rms(ratios, stats.mean(ratios)) / stats.mean(ratios) }
  r:say("%-42s rank correlation %6.3f, pairs in order %5.1f %% of %3d, level %.2f +- %.0f %%", name, got.correlation,
    100 * share, pairs_of, got.level, 100 * got.off)
  r:note(name, got)
  return got, foretold, measured
end

-- The speed of the plan that is put first among those measured of a group, of the fastest of them; the worst group.
local function regret(rows, cluster)
  local best, worst = {}, 1
  for _, row in ipairs(rows) do
    if row.flops then
      local g = best[row.group] or { foretold = 0, fastest = 0, rows = 0 }
      best[row.group] = g
      local foretold = plans.step(row.model, cluster, row.plan).flops
      if foretold > g.foretold then g.foretold, g.chosen = foretold, row.flops end
      g.fastest, g.rows = math.max(g.fastest, row.flops), g.rows + 1
    end
  end
  for _, g in pairs(best) do if g.rows > 2 then worst = math.min(worst, g.chosen / g.fastest) end end
  return worst
end

local selene, sx, sy = compare("Selene", published.selene(), published.clusters.selene)
local frontier, fx, fy = compare("Frontier's recipes", published.frontier(), published.clusters.frontier)
local early, late = {}, {}
for _, row in ipairs(published.jean_zay()) do
  table.insert(row.day < 25 and early or late, row)
end
local sheet = published.clusters.jean_zay
compare("Jean Zay, later days, by its sheet", late, sheet)
local fitted = plans.fit(sheet, early)
r:say("fitted: products reach %.2f, a kernel takes %.0f us besides, links %.0f and %.1f GB/s", fitted.efficiency,
  1e6 * fitted.launch, fitted.tiers[1].bandwidth / 1e9, fitted.tiers[2].bandwidth / 1e9)
compare("Jean Zay, first days, to which it is fitted", early, fitted)
local zay, zx, zy = compare("Jean Zay, later days", late, fitted)
local bubble = compare("  by the pipeline's bubble alone", late, fitted, function(row)
  local plan = row.plan
  return 1 / (1 + (plan.pipeline - 1) / (plan.sequences / plan.data / plan.micro))
end)
local least = compare("  by the least model parallelism", late, fitted, function(row)
  return 1 / (row.plan.tensor * row.plan.pipeline)
end)
local chosen = regret(late, fitted)

-- Bytes: of what was measured, and whether what ran out of memory is told.
local foretold_bytes, measured_bytes, told, ran_out = {}, {}, 0, 0
for _, list in ipairs { early, late } do
  for _, row in ipairs(list) do
    local got = plans.step(row.model, fitted, row.plan)
    if row.bytes then
      table.insert(foretold_bytes, got.bytes.total)
      table.insert(measured_bytes, row.bytes)
    elseif not row.flops then
      ran_out, told = ran_out + 1, told + (got.fits and 0 or 1)
    end
  end
end
local memory = stats.rank_correlation(foretold_bytes, measured_bytes)
r:say("bytes: rank correlation %.3f, foretold %.2f of measured; %d of %d that ran out of memory are told", memory,
  stats.mean(stats.ratios(foretold_bytes, measured_bytes)), told, ran_out)

-- More replicas with as much work each.
local scaling = 1
for _, row in ipairs(published.frontier()) do
  local function speed(replicas)
    local plan = {}
    for key, value in pairs(row.plan) do plan[key] = value end
    plan.sequences, plan.data = row.plan.sequences // row.plan.data * replicas, replicas
    return plans.step(row.model, published.clusters.frontier, plan).flops
  end
  scaling = math.min(scaling, speed(row.plan.data) / speed(1))
end

-- What the search would run.
local model = late[1].model
local found, tried = plans.search(model, fitted, { devices = r.args.devices, sequences = r.args.sequences,
  reserve = 2e9 })
r:say("\n%d layers of %d on %d GPUs of Jean Zay: %d of %d plans fit\ntensor pipeline data micro zero  seconds  Tflop/s"
  .. "  GB", model.layers, model.hidden, r.args.devices, #found, tried)
for i = 1, math.min(5, #found) do
  local p = found[i].plan
  r:say("%6d %8d %4d %5d %4d %8.1f %8.1f %4.0f", p.tensor, p.pipeline, p.data, p.micro, p.zero, found[i].seconds,
    found[i].flops / 1e12, found[i].bytes.total / 1e9)
end

-- A small cross for each point, in Tflop/s.
local function crosses(xs, ys, label)
  local x, y, gap = {}, {}, 0 / 0
  for i, at in ipairs(xs) do
    local a, b = at / 1e12, ys[i] / 1e12
    for _, point in ipairs { { a - 1, b - 1 }, { a + 1, b + 1 }, { gap, gap }, { a - 1, b + 1 }, { a + 1, b - 1 },
      { gap, gap } } do
      table.insert(x, point[1])
      table.insert(y, point[2])
    end
  end
  return { x = x, y = y, label = label }
end
ty.plot.line { series = { crosses(sx, sy, "Selene"), crosses(zx, zy, "Jean Zay"), crosses(fx, fy, "Frontier"),
  { x = { 50, 185 }, y = { 50, 185 }, label = "as measured" } }, x_label = "foretold, Tflop/s of a GPU",
  y_label = "measured", width = 800, height = 560 }:save(r:picture "frontier-tuner.png")

os.exit(r:finish {
  { claim = "Frontier's three recipes: rank correlation, nothing fitted", measured = frontier.correlation, bar = 1 },
  { claim = "Selene's ten models: rank correlation, nothing fitted", measured = selene.correlation, bar = 0.8 },
  { claim = "Jean Zay's later days: rank correlation", measured = zay.correlation, bar = 0.8 },
  { claim = "pairs of plans of a model and day in the right order, there", measured = zay.pairs, bar = 0.8 },
  { claim = "the same, above the better baseline", measured = zay.pairs - math.max(bubble.pairs, least.pairs),
    bar = 0.1 },
  { claim = "speed of the plan that is put first, of the best that was measured, the worst model", measured = chosen,
    bar = 0.9 },
  { claim = "speed foretold, of that measured, Frontier", measured = frontier.level, judged = false },
  { claim = "bytes of the fullest GPU: rank correlation, Jean Zay", measured = memory, bar = 0.8 },
  { claim = "weak scaling to all of Frontier's replicas, published as 1", measured = scaling, bar = 0.95 },
}, true)
