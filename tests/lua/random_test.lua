-- Random numbers: the same for a seed whatever the number of threads or the memory layout, and distributed as promised.
-- The seeds are fixed, so these tests do not fail by chance.

local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"

local N = 100000

-- Largest distance between the distribution of the values and cdf, times sqrt(n) (Kolmogorov 1933): above 1.95 once in
-- 1000 good samples.
local function kolmogorov(x, cdf)
  local v = x:reshape(-1):sort():tolist()
  local n, most = #v, 0
  for i = 1, n do
    local f = cdf(v[i])
    most = math.max(most, f - (i - 1) / n, i / n - f)
  end
  return most * math.sqrt(n)
end

local function normal_cdf(x) return 0.5 * ty.erfc(ty.tensor({ -x / math.sqrt(2) }, { dtype = "f64" })):item() end

local function correlation(a, b)
  a, b = a:to "f64", b:to "f64"
  local x, y = a - a:mean(), b - b:mean()
  return ((x * y):mean() / (x:square():mean() * y:square():mean()):sqrt()):item()
end

check.test("uniform numbers", function()
  ty.manual_seed(1)
  local x = ty.rand(N)
  check.ok(x:min():item() >= 0 and x:max():item() < 1, "in [0, 1)")
  check.close(x:mean():item(), 0.5, 4 * math.sqrt(1 / 12 / N))
  check.close(x:var():item(), 1 / 12, 1e-3)
  check.ok(kolmogorov(x, function(v) return v end) < 1.95, "uniform")
  local y = ty.empty(N):uniform_(-3, 5)
  check.ok(y:min():item() >= -3 and y:max():item() < 5, "in [-3, 5)")
  check.ok(kolmogorov(y, function(v) return (v + 3) / 8 end) < 1.95, "uniform in [-3, 5)")
  local narrow = ty.empty(N):uniform_(1, 1 + 2 ^ -22)
  check.ok(narrow:max():item() < 1 + 2 ^ -22, "rounding does not reach the open end")
  for _, dtype in ipairs { "f16", "bf16" } do
    local half = ty.rand(N, { dtype = dtype })
    check.ok(half:max():item() < 1 and half:min():item() >= 0, dtype .. " in [0, 1)")
    check.close(half:to("f32"):mean():item(), 0.5, 1e-2)
  end
end)

check.test("normal numbers", function()
  ty.manual_seed(2)
  local x = ty.randn(N, { dtype = "f64" })
  check.close(x:mean():item(), 0, 4 / math.sqrt(N))
  check.close(x:var():item(), 1, 4 * math.sqrt(2 / N))
  check.close((x ^ 3):mean():item(), 0, 4 * math.sqrt(15 / N))
  check.close((x ^ 4):mean():item(), 3, 4 * math.sqrt(96 / N))
  check.ok(kolmogorov(x["0:20000"], normal_cdf) < 1.95, "normal")
  local y = ty.empty(N):normal_(3, 0.5)
  check.close(y:mean():item(), 3, 0.01)
  check.close(y:std():item(), 0.5, 0.01)
  check.ok(x:abs():max():item() > 4, "tails")
end)

check.test("neighbours and following draws do not depend on each other", function()
  ty.manual_seed(3)
  local x, y = ty.randn(N), ty.randn(N)
  check.close(correlation(x, y), 0, 4 / math.sqrt(N))
  for lag = 1, 5 do check.close(correlation(x["" .. lag .. ":"], x[":-" .. lag]), 0, 4 / math.sqrt(N)) end
  ty.manual_seed(4)
  check.close(correlation(x, ty.randn(N)), 0, 4 / math.sqrt(N), "another seed")
end)

check.test("integers", function()
  ty.manual_seed(5)
  local counts = {}
  for i = 1, 7 do counts[i] = 0 end
  for _, v in ipairs(ty.randint(-3, 4, { 70000 }):tolist()) do
    check.ok(v >= -3 and v <= 3)
    counts[v + 4] = counts[v + 4] + 1
  end
  local chi = 0
  for i = 1, 7 do chi = chi + (counts[i] - 10000) ^ 2 / 10000 end
  check.ok(chi < 22.5, "chi squared with 6 degrees of freedom: " .. chi)
  local wide = ty.randint(-(1 << 52), 1 << 52, { N }):to "f64" / 2 ^ 52
  check.ok(kolmogorov(wide, function(v) return (v + 1) / 2 end) < 1.95, "wide range")
  check.ok(ty.randint(0, 2, { 100 }, { dtype = "u8" }):max():item() == 1)
end)

check.test("bernoulli", function()
  ty.manual_seed(6)
  for _, p in ipairs { 0, 0.1, 0.5, 0.9, 1 } do
    local x = ty.bernoulli(ty.full({ N }, p))
    check.close(x:mean():item(), p, 4 * math.sqrt(p * (1 - p) / N) + 1e-12)
    check.ok(((x:eq(0)):logical_or(x:eq(1))):all():item(), "0 or 1")
  end
end)

check.test("permutations", function()
  ty.manual_seed(7)
  for _, n in ipairs { 0, 1, 2, 10, 1000, 70000 } do
    check.equal(ty.randperm(n):sort():tolist(), ty.arange(n):tolist(), "each position once")
  end
  local first = {}
  for i = 0, 3 do first[i] = 0 end
  for _ = 1, 4000 do
    local v = ty.randperm(4)[0]:item()
    first[v] = first[v] + 1
  end
  for i = 0, 3 do check.close(first[i], 1000, 4 * math.sqrt(750)) end
  ty.manual_seed(70005) -- the order of the random keys by a stable sort, whatever sorts them
  local hash = 17
  for _, v in ipairs(ty.randperm(70000):tolist()) do hash = (hash * 1000003 + v) & math.maxinteger end
  check.equal(hash, 1195216994085242915)
  ty.manual_seed(5)
  local wide = ty.randperm(300000)
  ty.manual_seed(5)
  check.ok(wide:eq(ty.randperm(300000, { dtype = "i32" })):all():item(), "in both dtypes")
  check.ok(not ty.randperm(100):eq(ty.randperm(100)):all():item(), "another one each time")
end)

check.test("few draws are the first of many", function()
  for _, dtype in ipairs { "f32", "f64" } do
    ty.manual_seed(9)
    local p = ty.rand({ 3, 5000 }, { dtype = dtype })
    p:masked_fill_(ty.rand_like(p):lt(0.1), 0)
    ty.manual_seed(10)
    local many = p:multinomial(4000)
    for _, count in ipairs { 1, 7, 300 } do
      ty.manual_seed(10)
      check.equal(p:multinomial(count):tolist(), many:narrow(1, 0, count):contiguous():tolist())
    end
  end
end)

check.test("multinomial", function()
  ty.manual_seed(8)
  local p = ty.tensor { 1.0, 0, 3, 6 }
  local counts = { [0] = 0, 0, 0, 0 }
  for _, v in ipairs(p:multinomial(50000, true):tolist()) do counts[v] = counts[v] + 1 end
  check.equal(counts[1], 0)
  for i, share in pairs { [0] = 0.1, [2] = 0.3, [3] = 0.6 } do
    check.close(counts[i] / 50000, share, 4 * math.sqrt(share * (1 - share) / 50000))
  end
  local rows = p:expand(2000, 4):multinomial(3):tolist()
  local firsts = 0
  for _, r in ipairs(rows) do
    table.sort(r)
    check.equal(r, { 0, 2, 3 }, "without replacement: each positive entry once")
  end
  for _, r in ipairs(p:expand(20000, 4):multinomial(2):tolist()) do firsts = firsts + (r[1] == 3 and 1 or 0) end
  check.close(firsts / 20000, 0.6, 4 * math.sqrt(0.24 / 20000), "the first draw follows the probabilities")
end)

check.test("a seed gives the same numbers", function()
  local function draw()
    local p = ty.rand(300)
    return { ty.rand(7, 11):tolist(), ty.randn(70001):tolist(), ty.randint(0, 1000, { 50 }):tolist(),
      ty.randperm(500):tolist(),
      p:bernoulli():tolist(), p:multinomial(20):tolist(), p:multinomial(20, true):tolist() }
  end
  ty.manual_seed(9)
  local state = ty.rng_state()
  local a = draw()
  local b = draw()
  check.ok(a[1][1][1] ~= b[1][1][1], "draws go on")
  ty.manual_seed(9)
  check.equal(draw(), a, "the same seed")
  ty.rng_state(state)
  check.equal(draw(), a, "a state put back")
  local threads = ty.threads and ty.threads()
  ty.manual_seed(9)
  ty.set_threads(1)
  local one = draw()
  ty.set_threads(2)
  check.equal(one, a, "one thread")
  ty.set_threads(threads or 0)
  ty.manual_seed(10)
  check.ok(draw()[1][1][1] ~= a[1][1][1], "another seed")
end)

check.test("neither dtype nor layout changes what is drawn", function()
  ty.manual_seed(11)
  local whole = ty.randn(40, 30)
  ty.manual_seed(11)
  local turned = ty.empty(30, 40):transpose(0, 1)
  turned:normal_()
  check.equal(turned:tolist(), whole:tolist(), "a transposed target")
  ty.manual_seed(11)
  check.equal(ty.randn(1200):tolist(), whole:reshape(-1):tolist(), "another shape")
  ty.manual_seed(11)
  check.equal(ty.randn(900):tolist(), whole:reshape(-1)["0:900"]:tolist(), "a shorter draw")
  ty.manual_seed(11)
  check.equal(ty.randn({ 40, 30 }, { dtype = "f16" }):tolist(), whole:to("f16"):tolist(), "f16")
  ty.manual_seed(11)
  check.equal(ty.randn({ 40, 30 }, { dtype = "f64" }):to("f32"):tolist(), whole:tolist(), "f64")
  local window = ty.zeros(6, 8)
  window["1:5, 2:8:2"]:uniform_(1, 2)
  check.equal(window:gt(0):to("i64"):sum():item(), 12, "a window's elements only")
end)

check.finish()
