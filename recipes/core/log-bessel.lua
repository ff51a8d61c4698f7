-- Logarithms of modified Bessel functions, and directions in 32,768 dimensions
-- claim: log I_v(x) and log K_v(x) to 1e-12 for orders to a million, and fits of directions in 32,768 dimensions
-- system: ty.log_bessel_i, ty.log_bessel_k, distributions.VonMisesFisher
-- paper: Plesner et al. 2024, "Accurate Computation of the Logarithm of Modified Bessel Functions on GPUs"
-- time: 1 minute on one CPU core
--
-- I_v(x) itself leaves the range of doubles where its logarithm is an ordinary number. The points of the comparison
-- lie on all paths of the ops (series, recurrences, expansions for large orders and for large arguments) and between
-- them; mpmath computed them with 160 digits, and SciPy's answers, by its scaled functions, are recorded beside them.
-- An error counts in proportion to the value, or to 1 where the logarithm crosses zero. The von Mises-Fisher
-- distribution has a Bessel function of half its dimensions in its constant: samples of a known concentration are
-- fitted, by the likelihood and by the closed approximation that is used where the constant cannot be computed, which
-- in many dimensions is near. How far off a fit may be says theory: one standard deviation of the estimate.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local VonMisesFisher = require("tycho.distributions").VonMisesFisher

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "dimensions", 32768, "of the directions", quick = 512 },
    { "samples", 400, "directions to fit", quick = 40 },
    { "concentrations", { 1e3, 2e4, 2e5 }, "that samples are drawn with" },
    { "elements", 1000000, "of a tensor that is timed", quick = 10000 },
  },
}
local args = r.args
local claims = {}

-- ---- against 160 digits ----

local root = arg[0]:match "^(.*)/recipes/" or "."
local exact, scipy = {}, nil
if ty.io.exists(root .. "/tests/fixtures/special.lua") then -- where the source tree is at hand
  exact = dofile(root .. "/tests/fixtures/special.lua")
  scipy = ty.io.load_json(root .. "/tests/fixtures/scipy_bessel.json")
end

local function error_of(value, want)
  return value == value and math.abs(value - want) / math.max(1, math.abs(want)) or math.huge
end

for _, name in ipairs(scipy and { "log_bessel_i", "log_bessel_k" } or {}) do
  local v, x, worst, right, largest, doubles = {}, {}, 0, 0, 0, 0
  for i, row in ipairs(exact[name]) do
    v[i], x[i] = row[1], row[2]
    if math.exp(row[3]) > 0 and math.exp(row[3]) < math.huge then doubles = doubles + 1 end
  end
  local got = ty[name](ty.tensor(v, { dtype = "f64", device = r.device }), ty.tensor(x, { dtype = "f64",
    device = r.device })):tolist()
  for i, row in ipairs(exact[name]) do
    worst = math.max(worst, error_of(got[i], row[3]))
    largest = math.max(largest, row[1])
    local theirs = scipy[name][i]
    if type(theirs) == "number" and error_of(theirs, row[3]) <= 1e-12 then right = right + 1 end
  end
  local share = right / #exact[name]
  r:say("%s: %d points, orders to %g: largest error %.2g; SciPy %s has %d of them to 1e-12", name, #exact[name],
    largest, worst, scipy.scipy, right)
  claims[#claims + 1] = { claim = ("largest error of %s, in proportion"):format(name), measured = worst, bar = 1e-12,
    below = true }
  claims[#claims + 1] = { claim = "share of these points that SciPy has to 1e-12", measured = share, judged = false }
  claims[#claims + 1] = { claim = "share of these points at which the function itself is a double",
    measured = doubles / #exact[name], judged = false }
end

-- ---- how fast ----

do
  ty.manual_seed(r.seed)
  local n = args.elements
  local v = ty.rand({ n }, { dtype = "f64", device = r.device }) * 12 - 2
  local x = ty.rand({ n }, { dtype = "f64", device = r.device }) * 12 - 2
  v, x = (v * math.log(10)):exp(), (x * math.log(10)):exp()
  for _, name in ipairs { "log_bessel_i", "log_bessel_k" } do
    local times = {}
    for i = 1, 3 do
      local begin = ty.system.clock()
      ty.scope(function() ty[name](v, x):sum():item() end)
      times[i] = ty.system.clock() - begin
    end
    local each = ty.stats.median(times) / n
    r:say("%s: %.0f ns an element, orders and arguments from 0.01 to 1e10", name, each * 1e9)
    r.metrics[name .. "_ns"] = each * 1e9
  end
end

-- ---- directions ----

local p = args.dimensions
local off, closed_off, unsolved, apart = {}, {}, {}, {}
for s, seed in ipairs(r.seeds) do
  off[s], closed_off[s], unsolved[s], apart[s] = 0, 0, 0, 0
  for _, kappa in ipairs(args.concentrations) do
    ty.manual_seed(seed)
    local truth = VonMisesFisher { mean = ty.randn({ p }, { dtype = "f64", device = r.device }), concentration = kappa }
    local x = truth:sample(args.samples)
    local fitted = VonMisesFisher.fit(x)
    local found = fitted.concentration:item()
    -- The likelihood's maximum is not where the truth is: the mean of n samples is longer than that of all. What is
    -- expected of it follows from its square: R^2 = A^2 + (1 - A^2) / n.
    local a = truth:mean_length():item()
    local slope = 1 - a * a - (p - 1) / kappa * a
    local expected_r = math.sqrt(a * a + (1 - a * a) / args.samples)
    local expected = kappa + (expected_r - a) / slope
    local deviation = 1 / math.sqrt(args.samples * slope)
    local length = x:mean(0):norm():item()
    local closed = length * (p - length ^ 2) / (1 - length ^ 2)
    off[s] = math.max(off[s], math.abs(found - expected) / deviation)
    closed_off[s] = math.max(closed_off[s], math.abs(closed - expected) / deviation)
    unsolved[s] = math.max(unsolved[s], math.abs(fitted:mean_length():item() - length) / length)
    apart[s] = math.max(apart[s], math.abs(closed - found) / found)
    r:say("seed %d: %d directions in %d dimensions with concentration %g: %.1f by the likelihood, %.1f by the closed "
      .. "approximation; one deviation is %.1f", seed, args.samples, p, kappa, found, closed, deviation)
  end
end
claims[#claims + 1] = { claim = ("fit in %d dimensions: deviations from what is expected"):format(p), values = off,
  measured = math.max(table.unpack(off)), baseline = closed_off, bar = 4, below = true }
claims[#claims + 1] = { claim = "what is left of its equation, in proportion", values = unsolved,
  measured = math.max(table.unpack(unsolved)), bar = 1e-6, below = true }
claims[#claims + 1] = { claim = "the closed approximation's distance from the fit, in proportion", values = apart,
  measured = math.max(table.unpack(apart)), judged = false }

-- ---- digits as directions ----

do
  local function part(split)
    local data = datasets.load("digits", { split = split })
    local batch = ty.data.DataLoader(data, { batch_size = #data }):next()
    local ink = batch.image:flatten(1):to { dtype = "f64", device = r.device } + 1
    return ty.nn.normalize(ink), batch.label:to(r.device)
  end
  local x, labels = part "training"
  local y, truth = part "held_out"
  local scores, cosines = {}, {}
  for digit = 0, 9 do
    local own = x:index_select(0, labels:eq(digit):nonzero():flatten())
    local vmf = VonMisesFisher.fit(own)
    scores[#scores + 1], cosines[#cosines + 1] = vmf:log_prob(y), y:matmul(vmf.mean)
  end
  local function accuracy(list)
    return ty.stack(list, 1):argmax(1):eq(truth):to("f64"):mean():item()
  end
  claims[#claims + 1] = { claim = "digits that are named by the likeliest of ten distributions",
    measured = accuracy(scores), baseline = accuracy(cosines), judged = false }
end

-- ---- the picture: what overflows and what does not ----

local xs, series = (ty.arange(200, { dtype = "f64" }) / 199 * math.log(1e6)):exp(), {}
for i, v in ipairs { 0, 100, 10000, 100000 } do
  series[i] = { label = ("v = %d"):format(v), x = xs:tolist(), y = ty.full_like(xs, v):log_bessel_i(xs):tolist() }
end
ty.plot.line { title = "log I_v(x)", series = series, log_x = true,
  x_label = "x", y_label = "log I_v(x)" }:save(r:picture "log-bessel.png")
os.exit(r:finish(claims), true)
