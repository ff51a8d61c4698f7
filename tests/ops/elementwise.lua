-- Rows of the elementwise ops: kernels/elementwise.def, src/ops/elementwise.c.

return function(row, T)
  local inf, nan = T.inf, T.nan
  local FLOATS = { "f32", "f64", "f16", "bf16" }
  local NUMBERS = {
    "f32", "f64", "f16", "bf16", "i64", "i32", "i16", "i8", "u8",
  } -- bool and a number: i64, see tensor_test

  -- ---- one operand ----

  -- f: the reference of one value. spec: range and avoid of the values; special: values tried once more, without
  -- gradient; wide: another range without gradient.
  local function unary(name, f, spec)
    local function template(...)
      return T { range = spec.range, avoid = spec.avoid, ... }
    end
    local cases = {
      { template(3, 4) }, { template(2, 1, 5) }, { template() }, { template(0, 3) }, { template(2, 0) }, {
        template(67), grad = false,
      },
    }
    if spec.wide then cases[#cases + 1] = { T { 37, range = spec.wide }, grad = false } end
    if spec.special then cases[#cases + 1] = {
      T { #spec.special, values = spec.special }, grad = false, dtypes = FLOATS,
    } end
    for _, extra in ipairs(spec.cases or {}) do cases[#cases + 1] = extra end
    row(name, {
      cases = cases, strict = true, tol = spec.tol, dtype = spec.dtype,
      ref = function(x, ...)
        local rest = table.pack(...)
        return T.map(x, function(v) return f(v, table.unpack(rest, 1, rest.n)) end)
      end,
    })
  end

  local edges = { nan, inf, -inf, 0.0, -0.0, 1.0 }

  unary("neg", function(x) return -x end, { special = edges })
  unary("abs", math.abs, { avoid = { 0 }, special = edges })
  unary("sign", function(x) return x > 0 and 1 or x < 0 and -1 or 0 end, { special = { inf, -inf, 0, 3 } })
  unary("square", function(x) return x * x end, { special = edges })
  unary("exp", math.exp, { special = edges, wide = { -20, 20 } })
  unary("exp2", function(x) return 2.0 ^ x end, { special = edges, wide = { -20, 20 } })
  unary("expm1", T.expm1, { special = edges, wide = { -1e-3, 1e-3 } })
  unary("log", function(x) return math.log(x) end, {
    range = { 0.2, 3 }, special = { nan, inf, 0.0, 1.0 }, wide = { 1e-4, 1e4 },
  })
  unary("log2", function(x) return math.log(x, 2) end, { range = { 0.2, 3 }, special = { nan, inf, 0.0, 1.0, 8.0 } })
  unary("log10", function(x) return math.log(x) / math.log(10) end, {
    range = { 0.2, 3 }, special = { nan, inf, 0.0, 1.0 },
  })
  unary("log1p", T.log1p, { range = { -0.8, 3 }, special = { nan, inf, -1.0, 0.0 }, wide = { -1e-3, 1e-3 } })
  unary("sqrt", math.sqrt, { range = { 0.2, 4 }, special = { nan, inf, 0.0, 1.0, -1.0 }, wide = { 0, 1e4 } })
  unary("rsqrt", function(x) return 1 / math.sqrt(x) end, { range = { 0.2, 4 }, special = { nan, inf, 0.0, 1.0 } })
  unary("reciprocal", function(x) return 1 / x end, { range = { 0.3, 3 }, special = { nan, inf, -inf, 0.0, 2.0 } })
  unary("sin", math.sin, { special = { nan, inf, 0.0 }, wide = { -100, 100 } })
  unary("cos", math.cos, { special = { nan, inf, 0.0 }, wide = { -100, 100 } })
  unary("tan", math.tan, { range = { -1.2, 1.2 }, special = { nan, inf, 0.0 } })
  unary("asin", math.asin, { range = { -0.9, 0.9 }, special = { nan, 1.0, -1.0, 2.0 } })
  unary("acos", math.acos, { range = { -0.9, 0.9 }, special = { nan, 1.0, -1.0, 2.0 } })
  unary("atan", math.atan, { special = edges, wide = { -50, 50 } })
  unary("sinh", T.sinh, { special = edges, wide = { -9, 9 } })
  unary("cosh", T.cosh, { special = edges, wide = { -9, 9 } })
  unary("asinh", function(x)
    local a = math.abs(x)
    if a == 0 or x ~= x or a == inf then return x end
    return (x < 0 and -1 or 1) * T.log1p(a + a * a / (1 + math.sqrt(a * a + 1)))
  end, { special = edges, wide = { -50, 50 } })
  unary("acosh", function(x) return T.log1p(x - 1 + math.sqrt((x - 1) * (x + 1))) end, {
    range = { 1.2, 3 }, special = { nan, inf, 0.0, 1.0 }, wide = { 1, 50 },
  })
  unary("atanh", function(x) return 0.5 * (T.log1p(x) - T.log1p(-x)) end, {
    range = { -0.9, 0.9 }, special = { nan, inf, 0.0, 1.0, -1.0, 2.0 },
  })
  unary("tanh", T.tanh, { special = edges, wide = { -12, 12 } })
  unary("erf", T.erf, { special = edges, wide = { -5, 5 } })
  unary("erfc", T.erfc, { special = edges, wide = { -5, 5 } })
  unary("sigmoid", T.sigmoid, { special = edges, wide = { -30, 30 } })
  unary("log_sigmoid", function(x) return -T.softplus(-x) end, { special = edges, wide = { -60, 60 } })
  unary("relu", function(x) return x ~= x and x or math.max(x, 0) end, { avoid = { 0 }, special = edges })
  unary("leaky_relu", function(x, slope)
    if type(slope) == "table" then slope = slope.slope end
    return x > 0 and x or x * (slope or 0.01)
  end, { avoid = { 0 }, special = { nan, inf, 0.0 }, cases = { { T { 5, avoid = { 0 } }, 0.3 },
    { T { 5, avoid = { 0 } }, opts = { slope = -0.5 } } } })
  unary("elu", function(x, alpha) return x > 0 and x or (alpha or 1) * T.expm1(x) end,
    { avoid = { 0 }, special = edges, wide = { -20, 20 }, cases = { { T { 5, avoid = { 0 } }, 1.7 } } })
  unary("gelu", function(x, form)
    if type(form) == "table" then form = form.approximate end
    if form == "tanh" then return 0.5 * x * (1 + T.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ^ 3))) end
    return 0.5 * x * T.erfc(-x / math.sqrt(2))
  end, {
    special = { nan, inf, 0.0 }, wide = { -6, 6 },
    cases = {
      { T { 3, 5 }, "tanh" }, { T { 41, range = { -6, 6 } }, "tanh", grad = false },
      { T { 4 }, opts = { approximate = "tanh" } }, { T { 4 }, "none" },
    },
  })
  unary("silu", function(x) return x * T.sigmoid(x) end, { special = { nan, inf, 0.0 }, wide = { -30, 30 } })
  unary("mish", function(x) return x * T.tanh(T.softplus(x)) end, { special = { nan, inf, 0.0 }, wide = { -30, 30 } })
  unary("softplus", function(x, beta, threshold)
    beta = beta or 1
    return beta * x > (threshold or 20) and x or T.softplus(beta * x) / beta
  end, {
    special = edges, wide = { -60, 60 },
    cases = { { T { 7 }, 2.5 }, { T { 9, range = { -2, 4 }, avoid = { 1.5 } }, 2, 3 } },
  })
  unary("hardtanh", function(x, min, max) return x ~= x and x or math.max(math.min(x, max or 1), min or -1) end,
    { avoid = { -1, 1 }, special = edges, cases = { { T { 9, range = { -3, 9 }, avoid = { 0, 6 } }, 0, 6 } } })

  local function integral(name, f)
    unary(name, f, { range = { -5, 5 }, special = { nan, inf, -inf, 0.5, 1.5, -0.5, -2.5, 2.0, -3.0, 1e6 } })
  end
  integral("floor", math.floor)
  integral("ceil", math.ceil)
  integral("round", T.round)
  integral("trunc", function(x)
    if x ~= x or math.abs(x) == inf then return x end
    return x < 0 and math.ceil(x) or math.floor(x)
  end)

  unary("isnan", function(x) return x ~= x and 1 or 0 end, { special = edges })
  unary("isinf", function(x) return math.abs(x) == inf and 1 or 0 end, { special = edges })
  unary("isfinite", function(x) return x == x and math.abs(x) ~= inf and 1 or 0 end, { special = edges })
  unary("logical_not", function(x) return x == 0 and 1 or 0 end,
    { special = edges, cases = { { T { 6, values = { 0, 1, 2, 0, 3, 0 } } } } })

  row("bitwise_not", {
    cases = { { T { 3, 4, range = { -100, 100 } } }, { T {} }, { T { 0 } }, { T { 41, range = { -100, 100 } } } },
    ref = function(x) return T.map(x, function(v) return x.dtype == "bool" and 1 - v or -v - 1 end) end,
  })

  -- ---- two operands ----

  local function is_float(x)
    local d = type(x) == "table" and x.dtype
    return d == "f32" or d == "f64" or d == "f16" or d == "bf16"
  end

  -- f(x, y, int): the reference of one pair; int: both are integers.
  local function binary(name, f, spec)
    local function a(...) return T { range = spec.x and spec.x.range, avoid = spec.x and spec.x.avoid, ... } end
    local function b(...)
      local y = spec.y or spec.x or {}
      return T { range = y.range, avoid = y.avoid, ... }
    end
    local cases = {
      { a(3, 4), b(3, 4) }, { a(2, 3, 4), b(3, 1) }, { a(2, 1), b(3) }, { a(), b(3) }, { a(3, 2), b() }, { a(), b() },
      { a(0, 3), b(3) }, { a(1), b(0) }, { a(2, 0), b(0) }, { a(70), b(70), grad = false }, {
        a(5, 9), b(5, 1), grad = false,
      },
    }
    if not spec.tensors_only then
      cases[#cases + 1] = { a(2, 3), spec.number or 2, dtypes = NUMBERS }
      cases[#cases + 1] = { spec.number or 2, b(2, 3), dtypes = NUMBERS }
    end
    for _, c in ipairs(spec.cases or {}) do cases[#cases + 1] = c end
    local errors = { { T { 2, 3 }, T { 2, 4 }, match = { name, "[2, 3]", "[2, 4]" } } }
    for _, e in ipairs(spec.errors or {}) do errors[#errors + 1] = e end
    row(name, {
      cases = cases, errors = errors, strict = true, tol = spec.tol, grad = spec.grad,
      ref = function(x, y, more) -- more: alpha of add and sub
        local int = not is_float(x) and not is_float(y)
        if type(more) == "table" then more = more.alpha end
        return T.zip(function(u, v) return f(u, v, int, more) end, x, y)
      end,
    })
  end

  local function special(a, b) return { T { #a, values = a }, T { #b, values = b }, grad = false, dtypes = FLOATS } end
  local x_edges, y_edges = { nan, 1, inf, -inf, inf, 0.0, 1.0 }, { 1, nan, inf, inf, 1.0, 0.0, -inf }
  local edge_case = special(x_edges, y_edges)
  local SIGNED = { "i64", "i32", "i16", "i8" }

  local alpha_cases = {
    { T { 2, 3 }, T { 3 }, 3, dtypes = NUMBERS }, { T { 2, 3 }, T { 2, 3 }, opts = { alpha = 0.5 }, dtypes = FLOATS },
    { T { 3 }, 2, 2, dtypes = NUMBERS }, { 2, T { 3 }, -0.5, dtypes = FLOATS }, { T {}, T { 0 }, 2, dtypes = NUMBERS },
  }
  local alpha_errors = {
    { T { 3, dtype = "i64" }, T { 3, dtype = "i64" }, 0.5, match = "alpha: expected an integer" },
    { 1, 2, 3, match = "expected at least one tensor" },
  }
  for name, sign in pairs { add = 1, sub = -1 } do
    local cases = { edge_case, table.unpack(alpha_cases) }
    if name == "add" then cases[#cases + 1] = { T { 3 }, 0.1, dtypes = FLOATS } end
    binary(name, function(x, y, _, alpha) return x + sign * (alpha or 1) * y end, { cases = cases, errors = alpha_errors })
  end
  binary("mul", function(x, y) return x * y end, { cases = { edge_case } })
  binary("div", function(x, y) return x / y end, {
    x = { range = { -3, 3 } }, y = { range = { -3, 3 }, avoid = { 0, 0.2, -0.2 } },
    cases = { edge_case, special({ 1, -1, 0 }, { 0.0, 0.0, 0.0 }) },
  })
  binary("pow", function(x, y, int)
    if int and y < 0 then return (x == 1 or x == -1) and math.tointeger(x ^ (y % 2)) or 0 end -- 1 / 2 without .5
    return x ^ y
  end, {
    x = { range = { 0.4, 2 } }, y = { range = { 0, 2.5 } },
    cases = {
      { T { 3, 4, range = { 0.4, 2 } }, T { 4, range = { -2, 2 } }, dtypes = FLOATS },
      { T { 5 }, 3 }, { T { 5 }, 2 }, {
        T { 5, range = { 0.3, 2 } }, 0.5, dtypes = FLOATS,
      }, { T { 4 }, 1 }, { T { 4 }, 0 },
      { T { 4, range = { 0.5, 2 } }, -1.5, dtypes = FLOATS }, { 0.7, T { 4 }, dtypes = FLOATS },
      { T { 3, values = { 0.0, 2.0, 1.0 } }, T { 3, values = { 2.0, 0.0, 3.0 } }, grad = false },
      {
        T { 7, values = { 2, 1, -1, -1, 3, 0, 0 } }, T { 7, values = { -1, -2, -1, -2, 3, 4, -1 } }, grad = false,
        dtypes = SIGNED,
      },
      special({ nan, inf, 0.0, -2.0, -2.0 }, { 1, 2, -1.0, 3.0, 0.5 }),
    },
  })
  binary("maximum", function(x, y) return (x ~= x or y ~= y) and nan or math.max(x, y) end, { cases = { edge_case } })
  binary("minimum", function(x, y) return (x ~= x or y ~= y) and nan or math.min(x, y) end, { cases = { edge_case } })
  row("logaddexp", {
    cases = {
      { T { 3, 4 }, T { 3, 4 } }, { T { 2, 3 }, T { 3 } }, { T { 2, 1 }, T { 1, 3 } }, { T {}, T { 2 } },
        { T { 0, 3 }, T { 3 } },
      { T { 3 }, 0.5 }, { -0.5, T { 3 } }, special({ -inf, -inf, inf, 1000, 0.0, nan }, { -inf, 1, 1, 1000, -1000, 1 }),
    },
    ref = function(p, q)
      return T.zip(function(x, y)
        if x == y then return x + math.log(2) end
        return (x ~= x or y ~= y) and nan or math.max(x, y) + math.log(1 + math.exp(-math.abs(x - y)))
      end, p, q)
    end,
    errors = { { T { 2, 3 }, T { 4 }, match = "do not broadcast" } },
  })
  row("logaddexp2", {
    cases = {
      { T { 3, 4 }, T { 3, 4 } }, { T { 2, 1 }, T { 1, 3 } }, { T {}, T { 2 } }, { T { 0, 3 }, T { 3 } },
      { T { 3 }, 0.5 }, { -0.5, T { 3 } }, special({ -inf, -inf, inf, 1000, 0.0, nan }, { -inf, 1, 1, 1000, -1000, 1 }),
    },
    ref = function(p, q)
      return T.zip(function(x, y)
        if x == y then return x + 1 end
        return (x ~= x or y ~= y) and nan or math.max(x, y) + math.log(1 + 2 ^ -math.abs(x - y), 2)
      end, p, q)
    end,
    errors = { { T { 2, 3 }, T { 4 }, match = "do not broadcast" } },
  })
  binary("hypot", function(x, y)
    if math.abs(x) == inf or math.abs(y) == inf then return inf end
    local top = math.max(math.abs(x), math.abs(y))
    return (x ~= x or y ~= y) and nan or top == 0 and 0 or top * math.sqrt((x / top) ^ 2 + (y / top) ^ 2)
  end, {
    cases = { special({ inf, nan, 0.0, 3, -3 },
      { nan, 1, 0.0, 4, 4 }), { T { 2, values = { 1e200, 3e30 } }, T { 2, values = { 1e200, 4e30 } },
        grad = false, dtypes = { "f64" } } },
  })
  local function negative(y) return y < 0 or 1 / y == -inf end
  binary("copysign", function(x, y, int)
    if int then return y < 0 and -math.abs(x) or math.abs(x) end
    return negative(y) and -math.abs(x) or math.abs(x)
  end, {
    x = { avoid = { 0 } }, y = { avoid = { 0 } },
    cases = { special({ 1, 1, -2, inf, 3 }, { -0.0, 0.0, inf, -1, -inf }) },
  })
  binary("heaviside", function(x, y)
    if x == 0 then return y end
    return x ~= x and nan or x > 0 and 1 or 0
  end, { cases = { special({ 0.0, -0.0, nan, inf, -inf, 0.0 }, { 0.5, 2, 1, 3, 3, nan }) } })
  -- The numbers of E2M1 by their codes, and the place of a among them: the code below, and the part of the step passed.
  local e2m1 = { [0] = 0, 0.5, 1, 1.5, 2, 3, 4, 6 }
  local function place(a)
    local code = 0
    while code < 7 and e2m1[code + 1] <= a do code = code + 1 end
    return code, code == 7 and 0 or (a - e2m1[code]) / (e2m1[code + 1] - e2m1[code])
  end
  local halves = { 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 6, 7, -100, 0.0 }
  local function positive(...) return T { range = { 0.3, 2 }, ... } end
  row("round_e2m1", {
    cases = {
      { T { 3, 4, range = { -9, 9 } }, positive(3, 4) }, { T { 2, 5, range = { -9, 9 } }, positive(2, 1) },
      { T { 2, 1 }, positive(1, 3) }, { T {}, positive(2) }, { T { 0, 3 }, positive(3) },
      { T { 67, range = { -9, 9 } }, 0.5 }, { 3.5, positive(3) },
      { T { #halves, values = halves }, 1.0 }, { T { 3, values = { inf, -inf, nan } }, 1.0 },
      { T { 3, values = { 1.0, 0.0, -7.0 } }, T { 1, values = { 0.0 } } },
    },
    ref = function(p, q)
      return T.zip(function(x, scale)
        local y = scale == 0 and 0.0 or x / scale
        if y ~= y then return y end
        local code, passed = place(math.abs(y))
        if passed > 0.5 or passed == 0.5 and code % 2 == 1 then code = code + 1 end
        return (y < 0 and -1 or 1) * e2m1[code] * scale
      end, p, q)
    end,
    errors = { { T { 2, 3 }, T { 4 }, match = "do not broadcast" } },
  })
  row("round_e2m1_stochastic", {
    cases = {
      { T { 30, 40, range = { -9, 9 } }, T { 30, 40, range = { 0, 0.99 } } }, { T { 2, 1 }, T { 1, 3, range = { 0, 0.9 } } },
      { T {}, T { 2, range = { 0, 0.9 } } }, { T { 0, 3 }, T { 3 } }, { T { 5, range = { -9, 9 } }, 0.3 },
      { 3.4, T { 3, range = { 0, 0.9 } } }, { T { 15, values = { 0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -3, 7, -9, inf, -inf,
        nan } }, 0.0 },
    },
    ref = function(p, q)
      return T.zip(function(x, u)
        if x ~= x then return x end
        local code, passed = place(math.abs(x))
        return (x < 0 and -1 or 1) * e2m1[passed > u and code + 1 or code]
      end, p, q)
    end,
    errors = { { T { 2, 3 }, T { 4 }, match = "do not broadcast" } },
  })
  row("signbit", {
    cases = { { T { 3, 4 } }, { T {} }, { T { 0 } }, { T { 5, values = { 0.0, -0.0, inf, -inf, -2 } } },
      { T { 3, bool = true } } },
    ref = function(x)
      local y = T.map(x,
        function(v) return math.type(v) == "integer" and (v < 0 and 1 or 0) or negative(v) and 1 or 0 end)
      y.dtype = "bool"
      return y
    end,
  })
  row("frac", {
    cases = { { T { 3, 4, range = { -5, 5 } } }, { T {} }, { T { 0 } },
      { T { 4, values = { 2.5, -2.5, 3, -0.25 } }, grad = false } },
    ref = function(x) return T.map(x, function(v) return v - (v < 0 and math.ceil(v) or math.floor(v)) end) end,
  })
  local function angles(name, factor)
    row(name, {
      cases = { { T { 3, 4, range = { -100, 100 } } }, { T {} }, { T { 0 } } },
      ref = function(x) return T.map(x, function(v) return v * factor end) end,
      dtype = function(d) return d:find "^b?f" and d or "f32" end,
    })
  end
  angles("deg2rad", math.pi / 180)
  angles("rad2deg", 180 / math.pi)
  binary("atan2", function(x, y) return math.atan(x, y) end, {
    x = { avoid = { 0 } }, y = { avoid = { 0 } },
    cases = { special({ 1, -1, 0.0, 0.0, 1, inf }, { 0.0, 0.0, 1, -1, -1, 1 }) },
  })
  local zero = { { T { 3, dtype = "i32" }, T { 3, values = { 1, 0, 2 }, dtype = "i32" }, match = "zero" } }
  local function jumps(name, f, pairs_tried)
    binary(name, f, {
      x = { range = { -6, 6 } }, y = {
        range = { -3, 3 }, avoid = { 0, 0.2, -0.2, 0.4, -0.4 },
      }, number = 3, errors = zero,
      cases = { special(pairs_tried[1], pairs_tried[2]) },
    })
  end
  jumps("fmod", function(x, y) return math.fmod(x, y) end, { { 5.5, -5.5, 5.5, nan, 1 }, { 2, 2, -2, 1, inf } })
  jumps("remainder", function(x, y) return x % y end, { { 5.5, -5.5, 5.5, nan, 1, -1 }, { 2, 2, -2, 1, inf, inf } })
  jumps("floor_div", function(x, y) return x // y end, { { 5.5, -5.5, 5.5, nan, 1, 1 }, { 2, 2, -2, 1, inf, 0.0 } })

  local equal_ish = { T { 2, 4, values = { 0, 1, 2, 1, 0, 3, 1, 1 } }, T { 4, values = { 0, 1, 1, 2 } } }
  local function compare(name, f)
    local cases = { equal_ish, edge_case, { T { 3, values = { 0, 1, 2 } }, 1 } }
    binary(name, function(x, y) return f(x, y) and 1 or 0 end, { cases = cases })
  end
  compare("eq", function(x, y) return x == y end)
  compare("ne", function(x, y) return x ~= y end)
  compare("lt", function(x, y) return x < y end)
  compare("le", function(x, y) return x <= y end)
  compare("gt", function(x, y) return x > y end)
  compare("ge", function(x, y) return x >= y end)
  compare("logical_and", function(x, y) return x ~= 0 and y ~= 0 end)
  compare("logical_or", function(x, y) return x ~= 0 or y ~= 0 end)
  compare("logical_xor", function(x, y) return (x ~= 0) ~= (y ~= 0) end)

  local function bitwise(name, f)
    binary(name, function(x, y) return f(math.tointeger(x), math.tointeger(y)) end, {
      x = { range = { -100, 100 } }, tensors_only = true,
      cases = { { T { 2, 3, range = { -100, 100 } }, 6, dtypes = { "i64", "i32", "i16", "i8", "u8" } } },
      errors = { { T { 3 }, T { 3, dtype = "f32" }, match = "y" } },
    })
  end
  bitwise("bitwise_and", function(x, y) return x & y end)
  bitwise("bitwise_or", function(x, y) return x | y end)
  bitwise("bitwise_xor", function(x, y) return x ~ y end)

  local width = { i64 = 64, i32 = 32, i16 = 16, i8 = 8, u8 = 8 }
  local function shift(name, f)
    local INTS = { "i64", "i32", "i16", "i8", "u8" }
    row(name, {
      dtypes = INTS,
      cases = {
        { T { 3, 4, range = { -100, 100 } }, T { 3, 4, int = { 0, 7 } } }, { T { 2, 3, range = { -100, 100 } }, 2 },
        { 3, T { 2, 3, int = { 0, 5 } } }, { T { 2, 1, range = { -9, 9 } }, T { 3, int = { 0, 3 } } },
          { T {}, T {} }, { T { 0 }, 1 },
        { T { 6, values = { 100, -100, 1, -1, 5, -5 } }, T { 6, values = { 64, 64, -1, -1, 70, 63 } },
          dtypes = { "i64", "i32", "i16", "i8" } },
      },
      ref = function(x, y)
        local bits = width[type(x) == "table" and x.dtype or y.dtype]
        return T.zip(function(u, v) return f(u, v, bits) end, x, y)
      end,
      errors = {
        { T { 3 }, T { 3, dtype = "f32" }, match = "y" },
          { T { 3, bool = true }, T { 3, bool = true }, match = "x: expected integers, got bool" },
      },
    })
  end
  shift("bitwise_left_shift", function(x, y, bits) return (y < 0 or y >= bits) and 0 or x << y end)
  shift("bitwise_right_shift", function(x, y)
    if y < 0 or y > 63 then return x < 0 and -1 or 0 end
    return x // (1 << math.min(y, 62)) // (y > 62 and 2 or 1)
  end)

  -- ---- others ----

  row("where", {
    cases = {
      { T { 3, 4, bool = true }, T { 3, 4 }, T { 3, 4 } }, { T { 3, 1, bool = true }, T { 4 }, T { 2, 1, 1 } },
      {
        T { 4, bool = true }, T { 4 }, 0, dtypes = NUMBERS,
      }, { T { 4, bool = true }, 1, T { 4 }, dtypes = NUMBERS }, { T { bool = true }, T {}, T {} },
      { T { 0, 2, bool = true }, T { 2 }, T { 1, 2 } }, { T { 70, bool = true }, T { 70 }, T { 70 }, grad = false },
      { T { 4, int = { 0, 3 } }, T { 4 }, T { 4 } }, { T { 4, bool = true }, T { 4 }, 0.25, dtypes = FLOATS },
    },
    ref = function(c, x, y) return T.zip(function(k, u, v) return k ~= 0 and u or v end, c, x, y) end,
    errors = { { T { 2, 3, bool = true }, T { 2, 4 }, T { 2, 3 }, match = { "where", "[2, 3]", "[2, 4]" } } },
    strict = true,
  })

  row("masked_fill", {
    cases = {
      {
        T { 3, 4 }, T { 3, 4, bool = true }, 1,
      }, { T { 2, 3 }, T { 3, bool = true }, 0 }, { T {}, T { bool = true }, 1 },
      { T { 0, 3 }, T { 3, bool = true }, 1 }, { T { 3, 4 }, T { 3, 1, bool = true }, -inf, dtypes = FLOATS },
      { T { 3, 4 }, T { 4, bool = true }, T {} }, { T { 0, 4 }, T { 4, bool = true }, T {} },
    },
    ref = function(x, mask, value)
      if type(value) == "table" then value = value[1] end
      return T.zip(function(v, m) return m ~= 0 and value or v end, x, mask)
    end,
    errors = { { T { 3 }, T { 3, bool = true }, T { 1 }, match = "value: expected a number or a tensor without" },
      { T { 3 }, T { 4, bool = true }, 1, match = { "masked_fill", "[3]", "[4]" } },
      { T { 3 }, T { 2, 3, bool = true }, 1, match = "mask" } },
    strict = true,
  })

  row("clamp", {
    cases = {
      { T { 3, 4, avoid = { -1, 1 } }, -1, 1 }, { T { 5, avoid = { 1 } }, opts = { max = 1 } },
      { T { 5, avoid = { 1 } }, 1 }, { T { avoid = { 0, 1 } }, 0, 1 }, { T { 0, 2 }, 0, 1 },
      { T { 5, values = { nan, inf, -inf, 0.5, 7.0 } }, -2, 2, grad = false },
      { T { 71, range = { -9, 9 } }, -3, 4, grad = false },
      { T { 3, 4, range = { -3, 3 } }, T { 3, 4, range = { -1.7, -0.4 } }, T { 4, range = { 0.3, 1.6 } } },
      { T { 2, 3 }, T { 3, range = { 0.3, 0.6 } } },
      { T { 2, 3, range = { -1, 3 } }, -0.5, T { 2, 1, range = { 0.4, 1 } }, dtypes = FLOATS },
      { T { 2, 1, 3 }, T { 2, 1, range = { -0.7, -0.2 } }, 0.9, dtypes = FLOATS }, { T {}, T {}, T {} },
      { T { 0, 2 }, T { 2 }, 1 },
      { T { 6, range = { -2, 2 } }, T { 6, range = { 0.4, 0.9 } }, T { 6, range = { -0.8, -0.3 } } }, -- they cross
      { T { 5, values = { nan, inf, -inf, 0.5, 7.0 } }, T { 5, values = { -2.0, -2, -2, 1, 1 } }, 2, grad = false },
    },
    errors = { { T { 3 }, T { 4 }, match = { "clamp", "[3]", "[4]" } } },
    ref = function(x, min, max)
      if type(min) == "table" and not min.shape then min, max = min.min, min.max end
      local inner = min and T.zip(function(u, v) return u ~= u and u or math.max(u, v) end, x, min) or x
      return max and T.zip(function(u, v) return u ~= u and u or math.min(u, v) end, inner, max) or inner
    end,
    strict = true,
  })

  row("clamp_between", {
    cases = {
      { T { 3, 4 }, T { 3, 4, range = { -1, 0 } }, T { 3, 4, range = { 0, 1 } } }, { T { 2, 3 }, T { 3 }, T { 2, 1 } },
      { T { 0 }, T { 0 }, T { 0 } },
      { T { 4, values = { 0 / 0, 1, 2, 3 } }, T { 4, values = { 0, 0 / 0, 1, 4 } },
        T { 4, values = { 1, 1, 0 / 0, 2 } } },
    },
    ref = function(x, low, high)
      return T.zip(function(u, v) return (u ~= u or v ~= v) and 0 / 0 or math.min(u, v) end, T.zip(function(u, v)
        return (u ~= u or v ~= v) and 0 / 0 or math.max(u, v)
      end, x, low), high)
    end,
    errors = { { T { 3 }, T { 4 }, T { 3 }, match = { "clamp_between", "[3]", "[4]" } } },
  })

  row("lerp", {
    cases = {
      { T { 3, 4 }, T { 3, 4 }, 0.3 }, { T { 2, 3 }, T { 3 }, 1.5 }, { T {}, T {}, 0.5 }, { T { 0 }, T { 0 }, 0.5 },
      { T { 3, 4 }, T { 3, 4 }, T { 4 } }, { T { 2, 3 }, T { 3 }, T { 2, 1 } }, { T {}, T {}, T {} },
    },
    ref = function(x, y, w)
      if type(w) == "table" then
        local step = T.zip(function(a, b) return a * b end, T.zip(function(u, v) return v - u end, x, y), w)
        return T.zip(function(u, v) return u + v end, x, step)
      end
      return T.zip(function(u, v) return u + w * (v - u) end, x, y)
    end,
    errors = { { T { 3 }, T { 4 }, 0.5, match = { "lerp", "[3]", "[4]" } } },
  })

  -- ---- gradients of activations, fused ----

  row("silu_backward", {
    cases = {
      { T { 3, 4 }, T { 3, 4 } }, { T {}, T {} }, { T { 0 }, T { 0 } }, { T { 67 }, T { 67, range = { -30, 30 } } },
    },
    ref = function(g, x)
      return T.zip(function(u, v)
        local s = T.sigmoid(v)
        return u * s * (1 + v * (1 - s))
      end, g, x)
    end,
    errors = { { T { 3 }, T { 4 }, match = "g" } },
  })

  -- numbers: lists of those that the op takes besides
  local function slope_of(name, slope, numbers)
    local cases = {}
    for _, list in ipairs(numbers or { {} }) do
      for _, case in ipairs {
        { T { 3, 4 }, T { 3, 4 } }, { T {}, T {} }, { T { 0 }, T { 0 } }, { T { 67 }, T { 67, range = { -6, 6 } } },
      } do
        cases[#cases + 1] = table.move(list, 1, #list, 3, case)
      end
    end
    row(name, {
      cases = cases,
      ref = function(g, x, ...)
        local more = { ... }
        return T.zip(function(u, v) return u * slope(v, table.unpack(more)) end, g, x)
      end,
      errors = { { T { 3 }, T { 4 }, match = "g" } },
    })
  end
  slope_of("sigmoid_backward", function(y) return y * (1 - y) end)
  slope_of("tanh_backward", function(y) return 1 - y * y end)
  slope_of("relu_backward", function(y) return y > 0 and 1 or 0 end)
  slope_of("mish_backward", function(x)
    local t = T.tanh(T.softplus(x))
    return t + x * (1 - t * t) * T.sigmoid(x)
  end)
  slope_of("log_sigmoid_backward", function(x) return T.sigmoid(-x) end)
  slope_of("leaky_relu_backward", function(x, slope) return x > 0 and 1 or slope end, { { 0.01 }, { -0.5 } })
  slope_of("elu_backward", function(x, alpha) return x > 0 and 1 or alpha * math.exp(x) end, { { 1.0 }, { 1.7 } })
  slope_of("softplus_backward", function(x, beta, threshold)
    return beta * x > threshold and 1 or T.sigmoid(beta * x)
  end, { { 1.0, 20.0 }, { 2.0, 3.0 } })
  slope_of("hardtanh_backward", function(x, min, max) return x >= min and x <= max and 1 or 0 end,
    { { -1.0, 1.0 }, { 0.0, 6.0 }, { -math.huge, 2.0 } })
  slope_of("gelu_backward", function(x)
    return 0.5 * T.erfc(-x / math.sqrt(2)) + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
  end)
  slope_of("gelu_tanh_backward", function(x)
    local k = math.sqrt(2 / math.pi)
    local t = T.tanh(k * (x + 0.044715 * x ^ 3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x)
  end)
end
