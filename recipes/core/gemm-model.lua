-- What a product of matrices will cost
-- claim: a random forest foretells time and energy of products it has not seen, and a tuner that asks it chooses well
-- system: a measured table of this machine's products and a random forest over shapes and tiles
-- paper: "Understanding GEMM Performance and Energy on NVIDIA Ada Lovelace: A Machine Learning-Based Analytical
--   Approach", 2024, arXiv:2411.16954
-- time: 2 minutes on all CPU cores, which must have nothing else to do
--
-- The paper's measurements are of a GPU; these are of the kernels for CPUs, whose tiles, copies of the left matrix and
-- threads can be asked for, with results that stay the same to the last bit. Shapes, types and layouts are drawn; each
-- is done in several ways. A fifth of the shapes are in no fit that they judge. Forests see the logarithm of the
-- cost of one multiplication. Beside them stand a linear model of the same features and a roofline of the machine's
-- measured limits. Where the kernel shows no counters of energy, joules come from the model of ty.energy: processor
-- seconds and memory. The tuner's shapes are new once more; for each, all ways are timed, and then its choice, the best
-- of all and the kernel's own in turns, so that the best is not best by luck. The kernel's own way leaves a tuner next
-- to nothing to gain: several runs put the choice on either side of it. A margin, below which the tuner stays with the
-- kernel's way, and timing in passes over the whole table brought it level.
local ty = require "tycho"
local estimate = require "tycho.estimate"
local products, stats = estimate.products, ty.stats

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "shapes", 600, "shapes of the table", quick = 12 },
    { "ways", 3, "ways of doing each of them" },
    { "seconds", 0.0005, "timed at a time", quick = 0.0002 },
    { "rounds", 6, "times it is timed, of which the shortest counts", quick = 1 },
    { "passes", 3, "times over the whole table, likewise", quick = 1 },
    { "most", 1024, "rows, columns and inner size at most", quick = 64 },
    { "trees", 30, "trees of a forest", quick = 10 },
    { "tuned", 16, "shapes that the tuner is tried on", quick = 2 },
  },
}
local a = r.args
local work = math.min(1.5e7, a.most ^ 3)

local began = ty.system.clock()
local list = products.measure(products.sample(a.shapes, { seed = r.seed, ways = a.ways, most = a.most, work = work }),
  { seconds = a.seconds, rounds = a.rounds, passes = a.passes })
local counted = list[1].measured
r:say("%d products of %d shapes measured in %.0f s; energy by %s\n", #list, a.shapes, ty.system.clock() - began,
  counted and "counters" or "the model of ty.energy")

-- A fifth of the shapes is held out, another one for each seed.
local function fold(number)
  local known, new = {}, {}
  for _, p in ipairs(list) do table.insert(p.shape % 5 == number and new or known, p) end
  return known, new
end

-- ---- two models without trees ----

-- Least squares of the logarithm of the cost of a multiplication over the same features.
local function linear(known, new)
  local function rows(some)
    local x, y = {}, {}
    for i, p in ipairs(some) do
      x[i], y[i] = products.describe(p), { math.log(p.seconds / (p.m * p.n * p.k)) }
      x[i][#x[i] + 1] = 1
    end
    return ty.tensor(x, { dtype = "f64" }), ty.tensor(y, { dtype = "f64" })
  end
  local x, y = rows(known)
  local penalty = ty.eye(x.shape[2]):to "f64" * 1e-6 -- features may depend on each other
  local weights = ty.solve(x:transpose(0, 1):matmul(x) + penalty, x:transpose(0, 1):matmul(y))
  local guess = (rows(new)):matmul(weights):flatten():exp():tolist()
  for i, p in ipairs(new) do guess[i] = guess[i] * p.m * p.n * p.k end
  return guess
end

local limits = {}
for threads = 1, ty.threads() do
  limits[threads] = products.with({ threads = threads }, function() return ty.profile.limits() end)
end
local function roofline(p)
  local limit, size = limits[p.threads], ({ f32 = 4, f64 = 8, bf16 = 2 })[p.dtype]
  return math.max(2 * p.m * p.n * p.k * size / 4 / limit.flops,
    size * (p.m * p.k + p.k * p.n + p.m * p.n) / limit.bandwidth)
end

-- ---- held-out shapes ----

local result = { time = {}, log_time = {}, energy = {}, log_energy = {}, forest = {}, linear = {}, roofline = {} }
local picture = {}
for i, seed in ipairs(r.seeds) do
  local known, new = fold(i - 1)
  local model = products.fit(known, { trees = a.trees, seed = seed })
  local seconds, joules, plain = model:seconds(new), model:joules(new), linear(known, new)
  local own = { seconds = {}, joules = {}, log = {}, guess = {}, log_joules = {}, guess_joules = {} }
  local errors = { forest = {}, linear = {}, roofline = {} }
  for k, p in ipairs(new) do
    own.seconds[k], own.joules[k] = p.seconds, p.joules
    own.log[k], own.guess[k] = math.log(p.seconds), math.log(seconds[k])
    own.log_joules[k], own.guess_joules[k] = math.log(math.max(p.joules, 1e-12)), math.log(joules[k])
    errors.forest[k], errors.linear[k] = math.abs(seconds[k] / p.seconds - 1), math.abs(plain[k] / p.seconds - 1)
    errors.roofline[k] = math.abs(roofline(p) / p.seconds - 1)
    if i == 1 then picture[k] = { p.seconds, seconds[k] } end
  end
  result.time[i], result.log_time[i] = estimate.r2(own.seconds, seconds), estimate.r2(own.log, own.guess)
  result.energy[i] = estimate.r2(own.joules, joules)
  result.log_energy[i] = estimate.r2(own.log_joules, own.guess_joules)
  for name, errs in pairs(errors) do result[name][i] = 100 * stats.median(errs) end
  r:say("fold %d, %d products: R2 of seconds %.3f, of their logarithm %.3f, of joules %.3f; median error %.1f %%, "
    .. "linear %.1f %%, roofline %.1f %%", i, #new, result.time[i], result.log_time[i], result.energy[i],
    result.forest[i], result.linear[i], result.roofline[i])
end

-- ---- the tuner ----

local model = products.fit(list, { trees = a.trees, seed = r.seed })
local shapes = products.sample(a.tuned, { seed = r.seed + 1000, ways = 1, most = a.most, work = work, least = 48 })
local of_best, of_own, speeds = {}, {}, {}
for i, p in ipairs(shapes) do
  local all = products.measure(products.ways(p), { seconds = a.seconds, rounds = a.rounds, passes = 2 })
  local best, own = all[1], nil
  for _, one in ipairs(all) do
    if one.seconds < best.seconds then best = one end
    if one.threads == ty.threads() and one.rows == 0 and one.columns == 0 then own = one end
  end
  local chosen
  local choice = products.tune(model, p)
  for _, one in ipairs(all) do
    if one.threads == choice.threads and one.rows == choice.rows and one.columns == choice.columns then chosen = one end
  end
  local least = {}
  for _ = 1, 2 * a.rounds do -- in turns
    for name, one in pairs { chosen = chosen, best = best, own = own } do
      products.measure({ one }, { seconds = a.seconds, rounds = 3 })
      least[name] = math.min(least[name] or math.huge, one.seconds)
    end
  end
  of_best[i], of_own[i] = least.chosen / math.min(least.best, least.own, least.chosen), least.chosen / least.own
  speeds[i] = ("%5d x %5d x %5d %-4s %s: %d threads, tiles of %d x %d; %.3f of the best, %.3f of the kernel's own")
    :format(p.m, p.n, p.k, p.dtype, p.layout, chosen.threads, chosen.rows, chosen.columns, of_best[i], of_own[i])
end
r:say("\nthe tuner's choices\n%s", table.concat(speeds, "\n"))

table.sort(picture, function(x, y) return x[1] < y[1] end)
local measured, foretold = {}, {}
for i, pair in ipairs(picture) do measured[i], foretold[i] = pair[1], pair[2] end
ty.plot.line { series = { { y = foretold, label = "foretold" }, { y = measured, label = "measured" } }, log_y = true,
  title = "Products of held-out shapes, by time", x_label = "product", y_label = "seconds" }
  :save(r:picture "products.png")

os.exit(r:finish {
  { claim = "R2 of the logarithm of the seconds of products of held-out shapes", values = result.log_time, bar = 0.9 },
  { claim = "R2 of the seconds themselves", values = result.time, bar = 0.9 },
  { claim = "R2 of the joules, by counters or, without any, by the model of ty.energy", values = result.energy,
    bar = 0.9 },
  { claim = "R2 of the logarithm of the joules", values = result.log_energy, bar = 0.9 },
  { claim = "median error of the seconds, of a linear model's", baseline = result.linear, bar = 1, below = true,
    measured = stats.mean(result.forest) / stats.mean(result.linear) },
  { claim = "time of the tuner's choice, of the best of all ways: median of new shapes",
    measured = stats.median(of_best), bar = 1.1, below = true },
  { claim = "time of the tuner's choice, of the kernel's own: mean of new shapes", measured = stats.mean(of_own),
    bar = 1.0, below = true },
}, true)
