-- Rows of src/ops/reduce.c.

return function(row, T)
  local inf, nan = T.inf, T.nan
  local FLOATS = { "f32", "f64", "f16", "bf16" }

  -- dims as written in a case (nil, a number, a list) to a set of 1-based dimensions; empty means all
  local function set_of(dims, nd)
    local set = {}
    if type(dims) == "number" then dims = { dims } end
    for _, d in ipairs(dims or {}) do set[T.dim(d, nd)] = true end
    if next(set) == nil then
      for d = 1, nd do set[d] = true end
    end
    return set
  end

  -- f(values, x) over the reduced elements of every result, in C order
  local function reduced(x, dims, keepdim, f)
    local nd = #x.shape
    local set = set_of(dims, nd)
    local kept = {}
    for d, size in ipairs(x.shape) do kept[d] = set[d] and 1 or size end
    local groups = {}
    for i = 1, T.count(kept) do groups[i] = {} end
    T.from(x.shape, function(index)
      local at = 0
      for d, size in ipairs(kept) do at = at * size + (set[d] and 0 or index[d]) end
      local g = groups[at + 1]
      g[#g + 1] = T.at(x, index)
      return 0
    end)
    local y = { shape = {} }
    for d, size in ipairs(kept) do
      if keepdim or not set[d] then y.shape[#y.shape + 1] = size end
    end
    for i, g in ipairs(groups) do y[i] = f(g) end
    return y
  end

  -- The reference of an op with arguments (x, dims, keepdim), also as options.
  local function over(f)
    return function(x, dims, keepdim)
      local opts = type(keepdim) == "table" and keepdim or type(dims) == "table" and #dims == 0 and dims or nil
      if opts then
        if opts == dims then dims = nil end
        return reduced(x, opts.dims or dims, opts.keepdim, f)
      end
      return reduced(x, dims, keepdim, f)
    end
  end

  -- spec: fields of the templates.
  local function cases(spec, more)
    local function t(...)
      local template = { ... }
      for k, v in pairs(spec) do template[k] = v end
      return T(template)
    end
    local list = {
      { t(3, 4) }, { t(3, 4), 0 }, { t(3, 4), 1 }, { t(3, 4), { -1 }, true }, { t(2, 3, 4), { 0, 2 } },
      { t(2, 3, 4), { 1 }, opts = { keepdim = true } }, { t(2, 3, 2, 2), { 3, 0 }, true }, { t(5), 0 }, { t() },
        { t(), 0 },
      { t(4, 1), 1 }, { t(0, 3), 1 }, { t(3, 0), 0 },
      { t(3, 40), 0, grad = false }, { t(2, 3, 70), { 0 }, grad = false }, { t(40, 3), 0, grad = false },
      { t(7, 5, 6), { 0, 1 }, grad = false },
      -- on a GPU: rows of vectors for a block, rows and columns split over blocks, rows of two dimensions. Roundings of
      -- equal elements do not cancel, which shows where sums have one lane.
      { t(3, 1300), 1, grad = false, dtypes = { "f32", "bf16" }, tol = { f32 = 1e-5 } },
      { t(40000), grad = false, dtypes = { "f32" }, tol = { f32 = 1e-5 } },
      { t(5000, 3), 0, grad = false, dtypes = { "f32", "f64" } },
      { t(6, 3, 64), { 0, 2 }, grad = false, dtypes = { "f32", "f16" } },
    }
    for _, case in ipairs(more or {}) do list[#list + 1] = case end
    return list
  end

  local empty = { { T { 0, 3 } }, { T { 0, 3 }, 0 }, { T { 2, 0, 3 }, { 1 }, true }, { T { 0, 0 }, 1 } }
  local function with_empty(list)
    for _, case in ipairs(empty) do list[#list + 1] = case end
    return list
  end

  local function dim_errors()
    return {
      { T { 2, 3 }, 2, match = "dims: expected dimensions in [-2, 1], got 2 for [2, 3]" },
      { T { 2, 3 }, { 0, -3 }, match = "dims: expected dimensions in [-2, 1], got -3" },
      { T { 2, 3 }, { 1, -1 }, match = "dims: dimension -1 is named twice" },
      { T {}, 1, match = "dims: expected dimensions" },
    }
  end

  local function total(g)
    local s = 0
    for _, v in ipairs(g) do s = s + v end
    return s
  end

  -- one result, columns, short rows, long rows, several pieces, and a column sum in strips
  local function big(name)
    return function(ty)
      local x = ty.randn(300, 700)
      local y = ty.randn(90000, 5)
      return ty[name](x), ty[name](x, 0), ty[name](x, 1), ty[name](x:transpose(0, 1), 0), ty[name](y, 0), ty[name](y,
        1),
        ty[name](ty.randn(40, 30, 200), { 0, 2 })
    end
  end

  -- ---- sums ----

  local specials = { { T { 2, 3, values = { 1, inf, 2, nan, 1, 1 } }, 1, grad = false },
    { T { 2, 2, values = { inf, 1, -inf, inf } }, 0, grad = false } }

  local sum_cases = with_empty(cases({}, specials))
  sum_cases[#sum_cases + 1] = { T { 3, 4 }, opts = { dims = { 0 }, keepdim = true } }
  sum_cases[#sum_cases + 1] = { T { 600, range = { 100, 101 } }, dtypes = { "i8", "u8", "i16" } }
  row("sum", { cases = sum_cases, ref = over(total), errors = dim_errors(), big = big "sum" })

  row("mean", {
    cases = with_empty(cases({}, specials)), ref = over(function(g) return total(g) / #g end), errors = dim_errors(),
    big = big "mean",
  })

  local function variance(g, correction)
    local m, s = total(g) / #g, 0.0
    for _, v in ipairs(g) do s = s + (v - m) ^ 2 end
    return s / math.max(#g - correction, 0)
  end

  local function spread(root)
    return function(x, dims, correction, keepdim)
      if type(dims) == "table" and (dims.correction or dims.keepdim) then
        dims, correction, keepdim = nil, dims.correction, dims.keepdim
      elseif type(correction) == "table" then
        correction, keepdim = correction.correction, correction.keepdim
      end
      return reduced(x, dims, keepdim, function(g)
        local v = variance(g, correction or 1)
        return root and math.sqrt(v) or v
      end)
    end
  end

  local function variance_cases()
    return {
      { T { 3, 4 } }, { T { 3, 4 }, 0 }, { T { 3, 4 }, 1, 0 }, { T { 2, 3, 4 }, { 0, 2 }, 1, true },
      { T { 3, 4 }, { 1 }, opts = { keepdim = true } }, { T { 3, 4 }, opts = { correction = 0 } },
      { T { 5 }, 0, 2 }, { T { 5, range = { 1000, 1001 } }, grad = false, dtypes = { "f64", "f32" }, tol = 1e-4 },
      { T { 0, 3 }, 1 }, { T { 0, 3 }, 0, grad = false }, { T { 1, 3 }, 0, grad = false }, { T {}, grad = false },
      { T { 3, 600 }, 1, grad = false }, { T { 600, 3 }, 0, grad = false }, { T { 700 }, grad = false },
      { T { 2, 3, values = { 1, inf, 2, nan, 1, 1 } }, 1, grad = false },
    }
  end
  -- Squares that the dtype does not hold, of a deviation that it does: rows, columns, several blocks.
  local function extreme_cases()
    local list = {}
    for _, range in ipairs { { 300, { "f16", "bf16", "f32", "f64" } }, { 1e30, { "bf16", "f32", "f64" } } } do
      local s = range[1]
      local few, many = { s, -2 * s, 3 * s, 4 * s, -5 * s, 2 * s }, {}
      for i = 1, 1800 do many[i] = few[i % 6 + 1] end
      list[#list + 1] = { T { 2, 3, values = few }, 1, grad = false, dtypes = range[2] }
      list[#list + 1] = { T { 18, 100, values = many }, 0, grad = false, dtypes = range[2] }
      list[#list + 1] = { T { 1800, values = many }, 0, grad = false, dtypes = range[2] }
    end
    return list
  end

  row("var", { cases = variance_cases(), ref = spread(false), errors = dim_errors(), big = big "var" })
  local deviation_cases = variance_cases()
  table.move(extreme_cases(), 1, 6, #deviation_cases + 1, deviation_cases)
  row("std", { cases = deviation_cases, ref = spread(true), errors = dim_errors(), big = big "std" })

  local norm_cases = {
    { T { 3, 4 } }, { T { 3, 4, avoid = { 0 } }, 1 },
    { T { 2, 3, 4 }, 2, { 0, 2 } }, { T { 2, 3 }, 2, { 1 }, true }, { T { 2, 3, avoid = { 0 } }, 3, 0 },
    { T { 2, 3, avoid = { 0 } }, 1.5 }, { T { 3, 4, distinct = true, range = { 0.2, 3 } }, inf, 1 },
    { T { 3, 4, distinct = true, range = { 0.2, 3 } }, -inf, 0 }, { T { 2, 3, values = { 0, 1, 2, 0, 0, 3 } }, 0, 1,
      grad = false },
    { T { 0, 3 }, 2, 0, grad = false }, { T { 4 }, opts = { dims = { 0 }, keepdim = true } }, { T { avoid = { 0 } } },
    { T { 3, 5, avoid = { 0 } }, opts = { p = 1 } }, { T { 2, 3, avoid = { 0 } }, -1, 1 },
    { T { 3, 2, avoid = { 0 } }, 0.5, 0, true },
  }
  for _, case in ipairs(extreme_cases()) do
    norm_cases[#norm_cases + 1] = { case[1], 2, case[2], grad = false, dtypes = case.dtypes }
    norm_cases[#norm_cases + 1] = { case[1], 3, case[2], grad = false, dtypes = case.dtypes }
    norm_cases[#norm_cases + 1] = { case[1], -2, case[2], grad = false, dtypes = case.dtypes }
  end
  row("norm", {
    cases = norm_cases,
    ref = function(x, p, dims, keepdim)
      local opts = type(p) == "table" and p or type(keepdim) == "table" and keepdim or nil
      if opts then
        dims, keepdim = opts.dims or dims, opts.keepdim
        p = opts.p or (type(p) == "number" and p) or 2
      end
      p = p or 2
      return reduced(x, dims, keepdim, function(g)
        local s = p == -inf and inf or 0.0
        for _, v in ipairs(g) do
          v = math.abs(v)
          if p == inf then s = math.max(s, v)
          elseif p == -inf then s = math.min(s, v)
          elseif p == 0 then s = s + (v ~= 0 and 1 or 0)
          else s = s + v ^ p end
        end
        return (p == inf or p == -inf or p == 0) and s or s ^ (1 / p)
      end)
    end,
    errors = {
      { T { 2, 3 }, 2, 5, match = "norm: dims: expected dimensions in [-2, 1], got 5" },
      { T { 2, 3 }, nan, match = "norm: p: expected a number" },
    },
  })

  -- ---- products ----

  row("prod", {
    cases = with_empty(cases({}, {
      { T { 5, values = { 1.5, 0, -2, 3, 0.5 } }, 0, dtypes = FLOATS },
      { T { 5, values = { 1.5, 0, -2, 0, 0.5 } }, 0, dtypes = FLOATS },
      { T { 2, 4, values = { 0, 0, 0, 2, 1, 2, 3, 0 } }, 1 }, { T { 2, 2, 2, values = { 1, 0, 2, 3, -1, 2, 0, 2 } },
        { 0, 2 } },
      { T { 300, values = (function()
        local v = {}
        for i = 1, 300 do v[i] = i % 2 == 0 and 2 or 0.5 end
        return v
      end)() }, grad = false, dtypes = FLOATS },
    })),
    ref = over(function(g)
      local p = 1
      for _, v in ipairs(g) do p = p * v end
      return p
    end),
    errors = dim_errors(), big = function(ty)
      local x = ty.randn(300, 70)
      return x:prod(0), x:prod(1), ty.rand(40000):add(0.5):prod()
    end,
  })

  -- ---- extremes ----

  local ties = {
    { T { 2, 4, values = { 1, 3, 3, 2, -1, -1, -1, -1 } }, 1, grad = false },
    { T { 3, 2, values = { 1, 3, 1, 3, 0, 3 } }, grad = false }, { T { 3, 2, values = { 1, 3, 1, 3, 0, 3 } }, 0,
      grad = false },
    { T { 2, 5, values = { 1, nan, 3, nan, inf, -inf, 2, 3, inf, 1 } }, 1, grad = false },
    { T { 5, 2, values = { 1, nan, 3, nan, inf, -inf, 2, 3, inf, 1 } }, 0, grad = false },
    { T { 600, distinct = true, range = { -9, 9 } }, grad = false }, { T { 3, 600 }, 1, grad = false },
    { T { 600, 40 }, 0, grad = false, dtypes = { "f32", "i16", "bool", "f16" } },
    { T { 2, 2, values = { -inf, -inf, -inf, -inf } }, 1, grad = false },
  }
  local function nothing(name)
    local list = dim_errors()
    list[#list + 1] = { T { 0, 3 }, 0, match = name .. ": dims: nothing to choose from in dimension 0 of x [0, 3]" }
    list[#list + 1] = { T { 0 }, match = name .. ": dims: nothing to choose from" }
    return list
  end

  -- the position (from 1) of the first extreme; the first NaN when there is one
  local function best(g, better)
    local k = 1
    for i, v in ipairs(g) do
      if v ~= v then return i end
      if better(v, g[k]) then k = i end
    end
    return k
  end
  local function more(a, b) return a > b end
  local function less(a, b) return a < b end

  local function extreme(name, better)
    row(name, {
      cases = cases({ distinct = true, range = { -3, 3 } }, ties), ref = over(function(g) return g[best(g,
        better)] end),
      errors = nothing(name), big = big(name),
    })
    row("arg" .. name, {
      cases = cases({ distinct = true, range = { -3, 3 } }, ties), ref = over(function(g) return best(g,
        better) - 1 end),
      errors = nothing("arg" .. name), big = big("arg" .. name),
    })
  end
  extreme("max", more)
  extreme("min", less)

  -- ---- truth ----

  local truths = {
    { T { 3, 3, values = { 0, 0, 0, 1, 0, 0, 1, 2, 3 } }, 1 }, { T { 3, 3, values = { 0, 0, 0, 1, 0, 0, 1, 2, 3 } },
      0 },
    { T { 4, values = { nan, 0.0, -0.0, nan } }, 0 }, { T { 2, 2, values = { 0.25, 0, -0.25, 1e-30 } }, 0,
      dtypes = { "f32", "f64" } },
    { T { 700, values = (function()
      local v = {}
      for i = 1, 700 do v[i] = i == 690 and 0 or 1 end
      return v
    end)() } },
  }
  row("any", {
    cases = with_empty(cases({}, truths)), errors = dim_errors(), big = big "any",
    ref = over(function(g)
      for _, v in ipairs(g) do
        if v ~= 0 then return 1 end
      end
      return 0
    end),
  })
  row("all", {
    cases = with_empty(cases({}, truths)), errors = dim_errors(), big = big "all",
    ref = over(function(g)
      for _, v in ipairs(g) do
        if v == 0 then return 0 end
      end
      return 1
    end),
  })

  -- ---- log(sum(exp)) ----

  row("logsumexp", {
    cases = with_empty(cases({}, {
      { T { 3, 4, range = { -300, 300 } }, 1, grad = false, dtypes = { "f32", "f64" } },
      { T { 2, 3, values = { -inf, -inf, -inf, 1, -inf, 2 } }, 1, grad = false },
      { T { 2, 3, values = { inf, -inf, 3, 1, nan, 2 } }, 1, grad = false }, { T { 3, 700, range = { -30, 30 } }, 1,
        grad = false },
      { T { 700, 3, range = { -30, 30 } }, 0, grad = false },
    })),
    ref = over(function(g)
      local top, s = -inf, 0.0
      for _, v in ipairs(g) do
        if v ~= v then return nan end
        top = math.max(top, v)
      end
      if top == inf or top == -inf then return top end
      for _, v in ipairs(g) do s = s + math.exp(v - top) end
      return top + math.log(s)
    end),
    errors = dim_errors(), big = big "logsumexp",
  })

  -- ---- back from broadcasting ----

  row("sum_to", {
    cases = {
      { T { 3, 4 }, { 4 } }, { T { 3, 4 }, { 3, 1 } }, { T { 3, 4 }, { 1, 1 } }, { T { 3, 4 }, {} }, { T { 3, 4 },
        { 3, 4 } },
      { T { 2, 3, 4 }, { 3, 1 } }, { T { 2, 3, 4 }, { 1, 4 } }, { T {}, {} }, { T { 0, 3 }, { 1, 3 } }, { T { 0, 3 },
        { 3 } },
      { T { 3, 0 }, { 3, 1 } }, { T { 2, 1, 3 }, { 1, 3 } },
    },
    dtype = function(dtype) return dtype end,
    dtypes = { "f32", "f64", "f16", "bf16" },
    ref = function(x, size)
      local skip, y = #x.shape - #size, { shape = size }
      for i = 1, T.count(size) do y[i] = 0.0 end
      T.from(x.shape, function(index)
        local at = 0
        for d, n in ipairs(size) do at = at * n + (n == 1 and 0 or index[d + skip]) end
        y[at + 1] = y[at + 1] + T.at(x, index)
        return 0
      end)
      return y
    end,
    errors = {
      { T { 2, 3 }, { 2 }, match = "sum_to: size: [2] does not broadcast to x [2, 3]" },
      { T { 3 }, { 2, 3 }, match = "sum_to: size: [2, 3] does not broadcast to x [3]" },
    },
  })
end
