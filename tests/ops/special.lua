-- Rows of src/ops/special.c. References: power series, bisection, sums and integrals in plain Lua; large and awkward
-- arguments are in tests/lua/special_test.lua.

return function(row, T)
  local inf, nan = T.inf, T.nan
  local FLOATS = { "f32", "f64", "f16", "bf16" }

  local function unary(name, f, spec)
    local function template(...) return T { range = spec.range, avoid = spec.avoid, ... } end
    local cases = { { template(3, 4) }, { template() }, { template(0, 3) }, { template(67), grad = false } }
    if spec.wide then cases[#cases + 1] = { T { 37, range = spec.wide, avoid = spec.avoid },
      grad = false, dtypes = spec.wide.dtypes } end
    if spec.special then cases[#cases + 1] = { T { #spec.special, values = spec.special },
      grad = false, dtypes = FLOATS } end
    for _, extra in ipairs(spec.cases or {}) do cases[#cases + 1] = extra end
    row(name, {
      cases = cases, tol = spec.tol, gradtol = spec.gradtol,
      ref = function(x, ...)
        local rest = table.pack(...)
        return T.map(x, function(v) return f(v, table.unpack(rest, 1, rest.n)) end)
      end,
    })
  end

  -- ---- error functions ----

  unary("erfinv", function(x)
    if math.abs(x) >= 1 or x ~= x then return math.abs(x) == 1 and x * inf or nan end
    local low, high = -7.0, 7.0
    for _ = 1, 200 do
      local mid = (low + high) / 2
      if T.erf(mid) < x then low = mid else high = mid end
    end
    return (low + high) / 2
  end, { range = { -0.9, 0.9 }, special = { nan, 1.0, -1.0, 0.0, -2.0, 0.5 } })

  unary("erfcx", function(x)
    if x == inf then return 0 end
    return math.exp(x * x) * T.erfc(x)
  end, { special = { nan, inf, -inf, 0.0 }, tol = { f64 = 1e-11 } })

  local function ndtr(x) return 0.5 * T.erfc(-x / math.sqrt(2)) end
  unary("ndtr", ndtr, { special = { nan, inf, -inf, 0.0 }, wide = { -6, 6 } })
  unary("log_ndtr", function(x) return math.log(ndtr(x)) end, { special = { nan, inf, 0.0 }, wide = { -9, 6 },
    tol = 1e-5 })

  unary("ndtri", function(p)
    if p ~= p or p < 0 or p > 1 then return nan end
    if p == 0 or p == 1 then return p == 0 and -inf or inf end
    local low, high = -9, 9
    for _ = 1, 200 do
      local mid = (low + high) / 2
      if ndtr(mid) < p then low = mid else high = mid end
    end
    return (low + high) / 2
  end, { range = { 0.02, 0.98 }, special = { nan, 0.0, 1.0, -0.5, 1.5, 0.5, 1e-5, 1e-9 } })

  -- ---- elementary ----

  unary("sinc", function(x)
    if x == 0 then return 1 end
    return math.abs(x) == inf and 0 or math.sin(math.pi * x) / (math.pi * x)
  end, {
    special = { nan, inf, -inf, 0.0 }, wide = { -20, 20 },
    cases = { { T { 5, values = { 0.0, 0.01, -0.09, 0.11, 1e-4 } }, dtypes = { "f64", "f32" } } },
  })
  unary("logit", function(x, eps)
    if type(eps) == "table" then eps = eps.eps end
    if eps and eps >= 0 then x = math.min(math.max(x, eps), 1 - eps) end
    return (x < 0 or x > 1) and nan or math.log(x / (1 - x))
  end, {
    range = { 0.05, 0.95 }, special = { nan, 0.0, 1.0, -1.0, 2.0, 0.5 }, tol = 1e-5,
    cases = { { T { 5, values = { 0.1, 0.3, 0.5, 0.7, 0.95 } }, 0.2 },
      { T { 3, values = { 0, 1, 0.5 } }, opts = { eps = 0.25 }, grad = false } },
  })
  unary("entr", function(x)
    if x == 0 then return 0 end
    return x < 0 and -inf or -x * math.log(x)
  end, { range = { 0.1, 3 }, special = { nan, 0.0, -1.0, inf, 1.0 } })

  -- ---- the gamma function ----

  local function lgamma(x)
    if x == inf then return inf end
    if x <= 0 then
      if x == math.floor(x) then return inf end
      return math.log(math.pi / math.abs(math.sin(math.pi * x))) - lgamma(1 - x)
    end
    local product = 1
    while x < 15 do product, x = product * x, x + 1 end
    local z = 1 / (x * x)
    return (x - 0.5) * math.log(x) - x + 0.5 * math.log(2 * math.pi)
      + (1 / 12 - z * (1 / 360 - z * (1 / 1260 - z * (1 / 1680 - z / 1188)))) / x - math.log(product)
  end
  local function zeta(s, q) -- the sum, and its tail by the formula of Euler and Maclaurin
    local sum, n = 0, 0
    while n < 60 do sum, n = sum + (q + n) ^ -s, n + 1 end
    local a = q + n
    return sum + a ^ (1 - s) / (s - 1) + a ^ -s / 2 + s * a ^ (-s - 1) / 12 - s * (s + 1) * (s + 2) * a ^ (-s - 3) / 720
      + s * (s + 1) * (s + 2) * (s + 3) * (s + 4) * a ^ (-s - 5) / 30240
  end
  local function factorial(n) return n < 2 and 1 or n * factorial(n - 1) end
  local function polygamma(n, x)
    if n > 0 then return (n % 2 == 1 and 1 or -1) * factorial(n) * zeta(n + 1, x) end
    local sum = 0
    while x < 20 do sum, x = sum - 1 / x, x + 1 end
    local z = 1 / (x * x)
    return sum + math.log(x) - 0.5 / x - z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z / 132))))
  end

  unary("lgamma", lgamma, { range = { 0.2, 6 }, special = { 1.0, 2.0, 0.0, -1.0, 0.5, nan, inf, -inf },
    wide = { -4, 40 }, tol = 1e-5 })
  unary("digamma", function(x) return polygamma(0, x) end, {
    range = { 0.3, 6 }, wide = { -4, 40, dtypes = { "f32", "f64" } }, avoid = { 0, -1, -2, -3, -4 }, tol = 1e-5,
    special = { nan, inf, 0.0, -0.0, 1.0, 2.0 },
    cases = { { T { 2, values = { -1e-20, 1e-20 } }, grad = false, dtypes = { "f32", "f64" } } },
  })
  row("polygamma", {
    cases = {
      { 0, T { 3, 4, range = { 0.5, 5 } } }, { 1, T { 3, 4, range = { 0.5, 5 } } },
        { 2, T { 5, range = { 0.7, 9 } } }, { 5, T { range = { 0.8, 3 } } },
      { 1, T { 5, range = { -3, 0 }, avoid = { 0, -1, -2, -3 } }, grad = false, dtypes = { "f32", "f64" } },
      { 3, T { 5, range = { -3, 0 }, avoid = { 0, -1, -2, -3 } }, grad = false, dtypes = { "f32", "f64" } },
        { 4, T { 0, 3 } },
    },
    ref = function(n, x) return T.map(x, function(v) return polygamma(n, v) end) end,
    tol = 1e-5,
    errors = { { -1, T { 3 }, match = "n: expected an order from 0 to 150, got -1" },
      { 1000, T { 3 }, match = "n: expected" } },
  })
  row("zeta", {
    cases = {
      { T { 3, 4, range = { 1.5, 6 } }, T { 3, 4, range = { 0.5, 4 } } }, { 2, T { 5, range = { 0.5, 4 } } },
        { T { 3, range = { 1.5, 6 } }, 1 },
      { T { 2, 1, range = { 1.5, 6 } }, T { 3, range = { 0.6, 4 } } }, { T { 0 }, T { 0 } },
        { T { 4, values = { 20, 30, 12, 2 } }, T { 4, values = { 0.5, 20, 3, 50 } }, grad = false },
    },
    ref = function(s, q) return T.zip(zeta, s, q) end,
    constant = { x = true }, tol = { f32 = 1e-5, f64 = 1e-10 },
    errors = { { T { 2 }, T { 3 }, match = "broadcast" } },
  })
  row("betaln", {
    cases = { { T { 3, 4, range = { 0.3, 5 } }, T { 4, range = { 0.3, 5 } } },
      { T { range = { 1, 2 } }, T { range = { 1, 2 } } }, { T { 0 }, T { 1 } } },
    ref = function(a, b) return T.zip(function(x, y) return lgamma(x) + lgamma(y) - lgamma(x + y) end, a, b) end,
    tol = { f32 = 1e-5, f16 = 1e-2, bf16 = 1e-1 }, errors = { { T { 2 }, T { 3 }, match = "broadcast" } },
  })

  local function lower(a, x) -- the series of positive terms
    if x == 0 then return 0 end
    local sum, term = 0, 1 / a
    for k = 1, 2000 do
      sum = sum + term
      term = term * x / (a + k)
    end
    return sum * math.exp(a * math.log(x) - x - lgamma(a))
  end
  local shapes = {
    { T { 3, 4, range = { 0.3, 5 } }, T { 3, 4, range = { 0.2, 6 } } }, { 2.5, T { 5, range = { 0.2, 6 } } },
      { T { 3, range = { 0.3, 5 } }, 2 },
    { T { 2, 1, range = { 0.5, 3 } }, T { 3, range = { 0.2, 6 } } }, { T { 0 }, T { 0 } },
      { T { 2, values = { 1, 3 } }, T { 2, values = { 0, 0 } }, grad = false },
    { T { 6, range = { 20, 60 } }, T { 6, range = { 20, 60 } }, grad = false, dtypes = { "f32", "f64" } },
  }
  local function incomplete(name, f)
    row(name, {
      cases = shapes, constant = { a = true }, tol = { f32 = 1e-5, f64 = 1e-11 },
        ref = function(a, x) return T.zip(f, a, x) end,
      errors = { { T { 2 }, T { 3 }, match = "broadcast" } },
    })
  end
  incomplete("gammainc", lower)
  incomplete("gammaincc", function(a, x) return 1 - lower(a, x) end)

  -- ---- modified Bessel functions ----

  local function series(v, x) -- of I[v](x) / (x / 2)^v Gamma(v + 1), v > -1
    local sum, term = 0, 1
    for k = 1, 300 do
      sum = sum + term
      term = term * x * x / 4 / (k * (v + k))
    end
    return sum
  end
  local function i0(x) return series(0, x) end
  local function i1(x) return x / 2 * series(1, x) end
  unary("i0", i0, { special = { nan, 0.0, inf, -inf }, wide = { -20, 20, dtypes = { "f32", "f64" } }, tol = 1e-5 })
  unary("i1", i1, { special = { nan, 0.0, inf, -inf }, wide = { -20, 20, dtypes = { "f32", "f64" } }, avoid = { 0 },
    tol = 1e-5 })
  local function scaled(f) return function(x) return math.exp(-math.abs(x)) * f(x) end end
  unary("i0e", scaled(i0), { special = { nan, 0.0 }, wide = { -20, 20 }, avoid = { 0 } })
  unary("i1e", scaled(i1), { special = { nan, 0.0 }, wide = { -20, 20 }, avoid = { 0 } })

  local function log_i(v, x) return v * math.log(x / 2) - lgamma(v + 1) + math.log(series(v, x)) end
  local function log_k(v, x) -- the integral of exp(-x cosh t) cosh(v t), which the trapezoidal rule gives all digits of
    local sum, h = 0.5 * math.exp(-x), 1 / 64
    for k = 1, 64 * 12 do
      local t = k * h
      sum = sum + math.exp(-x * (math.exp(t) + math.exp(-t)) / 2) * (math.exp(v * t) + math.exp(-v * t)) / 2
    end
    return math.log(sum * h)
  end
  local orders = {
    { T { 3, 4, range = { 0, 4 } }, T { 3, 4, range = { 0.2, 6 } } }, { 0, T { 5, range = { 0.2, 6 } } },
      { T { 3, range = { 0, 5 } }, 2.5 },
    { 0.5, T { 5, range = { 0.2, 6 } } }, { T { 2, 1, range = { 0, 3 } }, T { 3, range = { 0.5, 6 } } },
      { T { 0 }, T { 0 } },
    { T { 30, range = { 0, 45 } }, T { 30, range = { 1, 60 } }, grad = false, dtypes = { "f32", "f64" } },
  }
  local function bessel(name, f)
    row(name, {
      cases = orders, constant = { v = true }, tol = { f32 = 1e-5, f64 = 1e-11 },
        ref = function(v, x) return T.zip(f, v, x) end,
      errors = { { T { 2 }, T { 3 }, match = "broadcast" } },
    })
  end
  bessel("log_bessel_i", log_i)
  bessel("log_bessel_k", log_k)
end
