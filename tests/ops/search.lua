-- Rows of src/ops/search.c and src/ops/statistics.c. References: by looking at every element.

return function(row, T)
  local from, at, dim_of, inf, nan = T.from, T.at, T.dim, T.inf, T.nan
  local FLOATS = { "f32", "f64", "f16", "bf16" }

  local function list(t) return table.move(t, 1, #t, 1, {}) end
  -- NaN is largest, and equals itself in order.
  local function less(a, b)
    if a ~= a then return false end
    return b ~= b or a < b
  end

  -- f(values) -> numbers for each line of x along dim (nil: all of x, flat); the reduced dimension is kept or not.
  local function lines(x, dim, keepdim, results, f)
    local nd, out, shape, inner, d = #x.shape, {}, {}, {}, nil
    if dim then d = nd > 0 and dim_of(dim, nd) or nil end
    for k = 1, nd do
      local gone = dim == nil or k == d
      inner[k] = gone and x.shape[k] or 1
      if not gone then shape[#shape + 1] = x.shape[k] elseif keepdim then shape[#shape + 1] = 1 end
    end
    for r = 1, results do out[r] = { shape = shape } end
    from(shape, function(i)
      local base, k, values = {}, 0, {}
      for e = 1, nd do
        local gone = dim == nil or e == d
        if not gone or keepdim then k = k + 1 end
        base[e] = gone and 0 or i[k]
      end
      from(inner, function(j)
        local p = {}
        for e = 1, nd do p[e] = base[e] + j[e] end
        values[#values + 1] = at(x, p)
        return 0
      end)
      local got = table.pack(f(values))
      for r = 1, results do table.insert(out[r], got[r]) end
      return 0
    end)
    return table.unpack(out)
  end

  -- {value, position} in order
  local function ordered(values)
    local all = {}
    for t, v in ipairs(values) do all[t] = { v, t - 1 } end
    table.sort(all, function(a, b)
      if less(a[1], b[1]) then return true end
      return not less(b[1], a[1]) and a[2] < b[2]
    end)
    return all
  end

  -- ---- different elements ----

  local function runs(x, sorted)
    local order = {}
    for i = 1, T.count(x.shape) do order[i] = { x[i], i } end
    if sorted then
      order = ordered(x)
      for _, o in ipairs(order) do o[2] = o[2] + 1 end
    end
    local values, inverse, counts = { shape = {}, dtype = x.dtype }, { shape = x.shape, dtype = "i64" },
      { dtype = "i64" }
    for i, o in ipairs(order) do
      if i == 1 or o[1] ~= order[i - 1][1] then
        values[#values + 1] = o[1]
        counts[#counts + 1] = 0
      end
      counts[#counts] = counts[#counts] + 1
      inverse[o[2]] = #values - 1
    end
    values.shape, counts.shape = { #values }, { #counts }
    return values, inverse, counts
  end

  local different = {
    { T { 3, 4, int = { 0, 4 } } }, { T { 2, 5, range = { -2, 2 } } }, { T { 7, values = { 3, 3, 1, 1, 1, 3, 2 } } },
    { T {} }, { T { 0 } }, { T { 2, 0 } }, { T { 1 } }, { T { 6, bool = true } },
    { T { 6, values = { nan, 1, nan, inf, 1, -inf } } }, { T { 4, values = { 0.0, -0.0, 1, -1 } }, dtypes = FLOATS },
    { T { 900, int = { 0, 50 } } },
  }
  row("unique", { cases = different, meta = false, ref = function(x) return runs(x, true) end })
  row("unique_consecutive", { cases = different, meta = false, ref = function(x) return runs(x, false) end })

  -- ---- places ----

  local function place(line, v, right)
    local n = 0
    for _, s in ipairs(line) do
      if less(s, v) or (right and not less(v, s)) then n = n + 1 end
    end
    return n
  end
  local function search(sorted, values, right)
    if type(right) == "table" then right = right.right end
    if type(values) == "number" then values = { shape = {}, values } end
    local n = sorted.shape[#sorted.shape]
    local m = #values.shape > 0 and values.shape[#values.shape] or 1
    local y = { shape = values.shape, dtype = "i64" }
    for i = 1, T.count(values.shape) do
      local first = #sorted.shape == 1 and 0 or (i - 1) // m * n
      y[i] = place(table.move(sorted, first + 1, first + n, 1, {}), values[i], right)
    end
    return y
  end
  local rising = { 1, 2, 2, 4, 7 }
  local NUMBERS = { "f32", "f64", "f16", "bf16", "i64", "i32", "i16", "i8", "u8" }

  row("searchsorted", {
    cases = {
      { T { 5, values = rising }, T { 2, 4, values = { 0, 1, 2, 3, 4, 7, 8, 2 } }, dtypes = NUMBERS },
      { T { 5, values = rising }, T { 2, 4, values = { 0, 1, 2, 3, 4, 7, 8, 2 } }, true, dtypes = NUMBERS },
      { T { 2, 3, values = { 1, 2, 3, 4, 5, 6 } }, T { 2, 2, values = { 2, 9, 4, 5 } }, opts = { right = true },
        dtypes = NUMBERS },
      { T { 5, values = rising }, T { values = { 3 } }, dtypes = NUMBERS }, { T { 0 }, T { 3 } },
        { T { 5, values = rising }, 2, true, dtypes = NUMBERS }, { T { 5, values = rising }, 2.5 },
        { T { 2, 0 }, T { 2, 3 } },
      { T { 3 , values = { 0, 1, 2 } }, T { 2, 0 }, dtypes = NUMBERS },
      { T { 5, values = { -inf, 0, 1, inf, nan } }, T { 5, values = { nan, inf, -inf, 0.5, 1 } } },
      { T { 5, values = { -inf, 0, 1, nan, nan } }, T { 5, values = { nan, inf, -inf, 0.5, 1 } }, true },
      { T { 5, values = rising, dtype = "i32" }, T { 3, values = { 1.5, 2, 2.5 } }, dtypes = { "f32", "f64" } },
    },
    ref = search,
    errors = {
      { T {}, T { 3 }, match = "sorted: expected [..., n]" },
        { T { 2, 3 }, T { 3, 3 }, match = "values: expected the dimensions of sorted" },
      { T { 2, 3 }, T { 3 }, match = "values: expected" },
    },
    big = function(ty) return ty.searchsorted(ty.randn(1000):sort(0), ty.randn(300, 700)) end,
  })

  row("bucketize", {
    cases = {
      { T { 2, 4, values = { 0, 1, 2, 3, 4, 7, 8, 2 } }, T { 5, values = rising }, dtypes = NUMBERS },
      { T { 2, 4, values = { 0, 1, 2, 3, 4, 7, 8, 2 } }, T { 5, values = rising }, true, dtypes = NUMBERS },
      { T {}, T { 0 } }, { T { 0, 3 }, T { 2, values = { 0, 1 } }, dtypes = NUMBERS },
      { 2, T { 5, values = rising }, dtypes = NUMBERS },
    },
    ref = function(x, boundaries, right) return search(boundaries, x, right) end,
    errors = { { T { 3 }, T { 2, 2 }, match = "boundaries: expected [n]" } },
  })

  -- ---- counts ----

  row("bincount", {
    cases = {
      { T { 7, int = { 0, 5 } } }, { T { 7, int = { 0, 5 } }, opts = { least = 9 } }, { T { 0 } },
        { T { 0 }, opts = { least = 3 } },
      { T { 5, values = { 0, 3, 1, 3, 3 }, dtype = "i64" }, T { 5, dtype = "f64" } },
      { T { 5, values = { 0, 3, 1, 3, 3 }, dtype = "i64" }, T { 5, values = { 1, 2, 3, 4, 5 }, dtype = "i32" }, 6 },
    },
    dtypes = { "i64", "i32", "i16", "i8", "u8" }, meta = false,
    ref = function(x, weight, least)
      if weight and not weight.shape then weight, least = nil, weight.least end
      local y, n = { dtype = weight and weight.dtype or "i64" }, least or 0
      for i = 1, T.count(x.shape) do n = math.max(n, x[i] + 1) end
      for i = 1, n do y[i] = 0 end
      for i = 1, T.count(x.shape) do y[x[i] + 1] = y[x[i] + 1] + (weight and weight[i] or 1) end
      y.shape = { n }
      return y
    end,
    errors = {
      { T { 2, 2, dtype = "i64" }, match = "x: expected [n]" },
        { T { 2, values = { 1, -1 }, dtype = "i64" }, match = "x: expected integers of at least 0, got -1" },
      { T { 3, int = { 0, 2 } }, T { 2, dtype = "f32" }, match = "weight: expected the shape of x" },
      { T { 3, int = { 0, 2 } }, opts = { least = -1 }, match = "least" },
    },
  })

  local function binned(x, edges, weight)
    local bins, y = #edges - 1, {}
    for b = 1, bins do y[b] = 0 end
    for i = 1, T.count(x.shape) do
      for b = 1, bins do
        if x[i] >= edges[b] and (x[i] < edges[b + 1] or (b == bins and x[i] == edges[b + 1])) then
          y[b] = y[b] + (weight and weight[i] or 1)
        end
      end
    end
    y.shape = { bins }
    return y
  end
  local function even(x, bins, low, high)
    if not low or low == high then
      low, high = inf, -inf
      for i = 1, T.count(x.shape) do low, high = math.min(low, x[i]), math.max(high, x[i]) end
      if low == inf then low, high = 0, 0 end
      if low == high then low, high = low - 0.5, high + 0.5 end
    end
    local edges = { shape = { bins + 1 } }
    for b = 0, bins do edges[b + 1] = (low * (bins - b) + high * b) / bins end
    return edges
  end
  -- no element near an edge, where roundings decide
  local off = { 0.3, 1.2, 1.9, 2.6, 3.3, 0.6, 3.8, 5.5, -1.5, 3.1, 1.7, 0.1 }

  row("histc", {
    cases = {
      { T { 12, values = off }, 4, 0, 4 }, { T { 3, 4, values = off }, opts = { bins = 3, min = -2, max = 6 } },
      { T { 5, values = { 0, 1, 2, 3, 4 } }, 4, 0, 4 }, { T { 5, values = { 0, 1, 2, 3, 4 } }, 4 },
      { T { 3, values = { 2, 2, 2 } }, 2 }, { T { 0 }, 3 }, { T { 4, values = { nan, inf, 0.5, 1 } }, 2, 0, 1 },
      { T { 700, range = { -2, 2 } }, 1, -3, 3 },
    },
    ref = function(x, bins, low, high)
      if type(bins) == "table" then bins, low, high = bins.bins, bins.min, bins.max end
      return binned(x, even(x, bins, low, high))
    end,
    errors = {
      { T { 3 }, 0, match = "bins: expected" }, { T { 3 }, 2, 1, 0, match = "max: expected" },
      { T { 3 }, 2, 0, inf, match = "max: expected finite" },
    },
    big = function(ty) return ty.histc(ty.randn(300, 700)), ty.histc(ty.randn(300, 700), 5000, -3, 3) end,
  })

  row("histogram", {
    cases = {
      { T { 12, values = off }, 4, 0, 4 }, { T { 3, 4, values = off }, 4 },
      { T { 12, values = off }, T { 4, values = { -1, 1, 1.5, 4 } } },
      { T { 5, values = { 0, 1, 2, 3, 4 } }, T { 3, values = { 1, 2, 4 } } },
      { T { 12, values = off }, 4, 0, 4, T { 12 }, true },
        { T { 12, values = off }, 3, -2, 6, opts = { density = true } },
      { T { 12, values = off }, T { 4, values = { -1, 1, 1.5, 4 } }, opts = { weight = T { 12 } } },
    },
    ref = function(x, bins, low, high, weight, density)
      local options = type(low) == "table" and low or type(weight) == "table" and not weight.shape and weight
      if options then
        weight, density = options.weight, options.density
        if type(low) == "table" then low, high = nil, nil end
      end
      local edges = type(bins) == "number" and even(x, bins, low, high) or bins
      local y, sum = binned(x, edges, weight), 0
      for _, v in ipairs(y) do sum = sum + v end
      for b = 1, #y do
        if density then y[b] = y[b] / sum / (edges[b + 1] - edges[b]) end
      end
      return y, edges
    end,
    tol = 1e-5,
    errors = {
      { T { 3 }, 0.5, match = "bins: expected an integer" },
        { T { 3 }, T { 1 }, match = "bins: expected a number, or" },
      { T { 3 }, 2, 0, match = "max: expected both" }, { T { 3 }, 2, 0, 1, T { 2 }, match = "weight: expected floats" },
    },
  })

  row("histogram_counts", {
    cases = {
      { T { 12, values = off }, T { 4, values = { -1, 1, 1.5, 4 } } }, { T { 0 }, T { 2, values = { 0, 1 } } },
      { T { 12, values = off }, T { 5, values = { 0, 1, 2, 3, 4 } }, true },
    },
    ref = function(x, edges)
      local y = binned(x, edges)
      y.dtype = "i64"
      return y
    end,
    errors = { { T { 3 }, T { 1 }, match = "edges: expected at least two" },
      { T { 3, 1 }, T { 2 }, match = "x: expected [n]" } },
  })

  -- ---- order statistics ----

  local function found(rank)
    return function(values)
      local order = ordered(values)
      local o = order[rank(values) + 1]
      return o[1], o[2]
    end
  end
  local function numbers(values)
    local n = 0
    for _, v in ipairs(values) do n = n + (v == v and 1 or 0) end
    return n
  end
  local function median_rank(values)
    local n = numbers(values)
    return n < #values and n or (n - 1) // 2
  end
  local function nanmedian_rank(values) return math.max(numbers(values) - 1, 0) // 2 end
  local function with_positions(y, positions)
    positions.dtype = "i64"
    return y, positions
  end
  local with_nan = { nan, 1, 4, nan, 2, 3, 7, 5, -1, inf, nan, nan }

  row("order_statistic", {
    cases = {
      { T { 3, 6, distinct = true }, 1, 2 }, { T { 6, 3, distinct = true }, 0, 5 },
        { T { 2, 5, 3, distinct = true }, 1, 0, "median" },
      { T { 2, 700, range = { -9, 9 } }, 1, 300, grad = false },
        { T { 3, 4, values = with_nan }, 1, 0, "nanmedian", grad = false },
      { T { 3, 4, values = with_nan }, 1, 0, "median", grad = false }, { T { 0, 3 }, 1, 0 },
        { T { 5000, range = { -99, 99 } }, 0, 1234, grad = false },
    },
    ref = function(x, dim, rank, how)
      return with_positions(lines(x, dim, true, 2, found(how == "median" and median_rank or how == "nanmedian"
        and nanmedian_rank or function() return rank end)))
    end,
    errors = {
      { T { 3 }, 0, 3, match = "rank: expected" }, { T {}, 0, 0, match = "x: expected [..., n]" },
        { T { 3 }, 0, 0, "mean", match = "how" },
      { T { 3 }, 1, 0, match = "dim" },
    },
  })

  row("kthvalue", {
    cases = {
      { T { 3, 6, distinct = true }, 2 }, { T { 3, 6, distinct = true }, 3, 0 },
        { T { 2, 5, 3, distinct = true }, 5, 1, true },
      { T {}, 1 }, { T { 2, 64, range = { -9, 9 } }, 20, opts = { keepdim = true }, grad = false },
    },
    ref = function(x, k, dim, keepdim)
      if type(dim) == "table" then dim, keepdim = nil, dim.keepdim end
      return with_positions(lines(x, dim or -1, keepdim, 2, found(function() return k - 1 end)))
    end,
    errors = {
      { T { 3 }, 0, match = "k: expected one of the 3 positions" }, { T { 3 }, 4, match = "k: expected" },
        { T { 3 }, 1, 1, match = "dim" },
    },
  })

  local function median(rank)
    return function(x, dim, keepdim)
      if type(dim) == "table" then dim, keepdim = nil, dim.keepdim end
      return with_positions(lines(x, dim, keepdim, 2, found(rank)))
    end
  end
  local medians = {
    { T { 3, 6, distinct = true } }, { T { 3, 6, distinct = true }, 1 }, { T { 3, 5, distinct = true }, 0, true },
      { T {} },
    { T { 3, 4, values = with_nan }, 1, grad = false }, { T { 3, 4, values = with_nan }, grad = false },
    { T { 2, 3, distinct = true }, opts = { keepdim = true } }, { T { 0, 3 }, 1 },
  }
  local median_errors = {
    { T { 3 }, 1, match = "dim: expected a dimension in [-1, 0]" },
      { T { 0 }, match = "x: expected at least one element" },
    { T { 3 }, 0.5, match = "dim" },
  }
  row("median", {
    cases = medians, ref = median(median_rank), errors = median_errors,
    big = function(ty) return ty.median(ty.randn(300, 700)), ty.median(ty.randn(300, 700), 0) end,
  })
  row("nanmedian", { cases = medians, ref = median(nanmedian_rank), errors = median_errors })

  local function quantile(skip)
    return function(x, q, dim, keepdim, interpolation)
      if type(dim) == "table" then dim, keepdim, interpolation = dim.dim, dim.keepdim, dim.interpolation end
      local qs, count = type(q) == "table" and list(q) or { q }, 1
      if type(q) == "table" then count = #q end
      local results = table.pack(lines(x, dim, keepdim, count, function(values)
        local order, n, all = ordered(values), numbers(values), {}
        for i = 1, count do
          if (not skip and n < #values) or n == 0 or not (qs[i] >= 0 and qs[i] <= 1) then
            all[i] = nan
          else
            local rank = qs[i] * (n - 1)
            local low, high = order[math.floor(rank) + 1][1], order[math.ceil(rank) + 1][1]
            local part = rank - math.floor(rank)
            if interpolation == "lower" then all[i] = low
            elseif interpolation == "higher" then all[i] = high
            elseif interpolation == "nearest" then all[i] = order[math.tointeger(T.round(rank)) + 1][1]
            elseif interpolation == "midpoint" then all[i] = (low + high) / 2
            else all[i] = low == high and low or low + part * (high - low) end
          end
        end
        return table.unpack(all)
      end))
      if type(q) == "number" or #q.shape == 0 then return results[1] end
      local y = { shape = { #q, table.unpack(results[1].shape) } }
      for i = 1, #q do table.move(results[i], 1, #results[i], #y + 1, y) end
      return y
    end
  end
  local quantiles = {
    { T { 3, 6, distinct = true }, 0.3 }, { T { 3, 6, distinct = true }, 0.5, 1 },
      { T { 5, 2, distinct = true }, 0.7, 0, true },
    { T { 3, 6, distinct = true }, T { 3, values = { 0, 0.35, 1 }, dtype = "f64" }, -1 },
    { T { 2, 6, distinct = true }, T { 2, values = { 0.2, 0.9 }, dtype = "f64" } },
      { T { 7, distinct = true }, T { values = { 0.25 }, dtype = "f64" } },
    { T { 2, 6, distinct = true }, 0.35, opts = { interpolation = "lower", dim = 1 } },
    { T { 2, 6, distinct = true }, 0.35, opts = { interpolation = "higher", dim = 1 } },
    { T { 2, 6, distinct = true }, 0.35, opts = { interpolation = "nearest", dim = 1 } },
    { T { 2, 6, distinct = true }, 0.35, opts = { interpolation = "midpoint", dim = 1, keepdim = true } },
    { T { 6, distinct = true }, 0.4, opts = { interpolation = "midpoint" } }, { T {}, 0.5 },
    { T { 3, 4, values = with_nan }, 0.4, 1, grad = false },
      { T { 2, 2, values = { nan, nan, 1, 2 } }, 0.5, 1, grad = false },
    { T { 3, values = { -inf, inf, inf } }, T { 4, values = { 0, 1, -0.5, 2 }, dtype = "f64" }, grad = false },
  }
  local quantile_errors = {
    { T { 3 }, 1.5, match = "q: expected a number in [0, 1], got 1.5" },
      { T { 3 }, T { 2, 2 }, match = "q: expected a number or floats" },
    { T { 3 }, 0.5, 1, match = "dim" }, { T { 0 }, 0.5, match = "x: expected at least one" },
    { T { 3 }, 0.5, opts = { interpolation = "cubic" }, match = "interpolation" },
  }
  row("quantile", { cases = quantiles, ref = quantile(false), errors = quantile_errors, constant = { q = true } })
  row("nanquantile", { cases = quantiles, ref = quantile(true), errors = quantile_errors, constant = { q = true } })

  row("mode", {
    cases = {
      { T { 3, 6, int = { 0, 3 } } }, { T { 5, 3, int = { 0, 3 } }, 0 }, { T { 5, 3, int = { 0, 3 } }, 0, true },
        { T {} },
      { T { 2, 5, distinct = true } }, { T { 7, values = { 2, 1, 2, 1, 3, 3, 0 } }, grad = false },
        { T { 3, 0, 2 }, 0 },
    },
    ref = function(x, dim, keepdim)
      return with_positions(lines(x, dim or -1, keepdim, 2, function(values)
        local best, most, last = nil, 0, nil
        for _, v in ipairs(values) do
          local n, where = 0, nil
          for t, w in ipairs(values) do
            if w == v then n, where = n + 1, t - 1 end
          end
          if n > most or (n == most and v < best) then best, most, last = v, n, where end
        end
        return best, last
      end))
    end,
    errors = { { T { 3 }, 1, match = "dim" }, { T { 0 }, match = "x: expected at least one element" } },
  })

  -- ---- sums and extremes ----

  local function over(x, dims, keepdim, results, f)
    if type(dims) == "number" then dims = { dims } end
    if not dims or #dims == 0 or #x.shape == 0 then return lines(x, nil, keepdim, results, f) end
    assert(#dims == 1, "the references reduce one dimension or all")
    return lines(x, dims[1], keepdim, results, f)
  end
  local function sum_of(values)
    local s = 0
    for _, v in ipairs(values) do s = s + (v == v and v or 0) end
    return s
  end
  local sums = {
    { T { 3, 4 } }, { T { 3, 4 }, 1 }, { T { 2, 3, 4 }, 1, true }, { T {} },
      { T { 3, 4, values = with_nan }, 0, grad = false },
    { T { 2, 3, values = { nan, nan, nan, 1, 2, nan } }, 1, grad = false },
      { T { 3, 4, values = { nan, 1, 4, nan, 2, 3, 7, 5, -1, 6, nan, nan } } },
  }
  row("nansum", {
    cases = sums, ref = function(x, dims, keepdim) return (over(x, dims, keepdim, 1, sum_of)) end,
    dtype = function(d) return (d:find "^b?f" and d ~= "bool") and d or "i64" end,
    errors = { { T { 3 }, 1, match = "dim" } },
  })
  row("nanmean", {
    cases = sums,
    ref = function(x, dims, keepdim)
      return (over(x, dims, keepdim, 1, function(values) return sum_of(values) / numbers(values) end))
    end,
    errors = { { T { 3 }, 1, match = "dim" } },
  })
  row("aminmax", {
    cases = { { T { 3, 4, distinct = true } }, { T { 3, 4, distinct = true }, 1 },
      { T { 2, 3, 4, distinct = true }, 0, true }, { T {} } },
    ref = function(x, dims, keepdim)
      return over(x, dims, keepdim, 2, function(values) return math.min(table.unpack(values)),
        math.max(table.unpack(values)) end)
    end,
    errors = { { T { 3 }, 1, match = "dim" }, { T { 0 }, match = "nothing to choose" } },
  })

  row("renorm", {
    cases = {
      { T { 3, 4 }, 2, 0, 1.5 }, { T { 3, 4 }, 1, 1, 2 }, { T { 2, 3, 4 }, 3, -2, 0.5 }, { T { 2, 3 }, inf, 0, 1 },
      { T { 2, 3, values = { 0, 0, 0, 3, 4, 0 } }, 2, 0, 1, grad = false },
    },
    ref = function(x, p, dim, limit)
      local d = dim_of(dim, #x.shape)
      local sizes = {}
      from(x.shape, function(i)
        local v, k = math.abs(at(x, i)), i[d]
        sizes[k] = p == inf and math.max(sizes[k] or 0, v) or (sizes[k] or 0) + v ^ p
        return 0
      end)
      return from(x.shape, function(i)
        local size = p == inf and sizes[i[d]] or sizes[i[d]] ^ (1 / p)
        return at(x, i) * (size > limit and limit / size or 1)
      end)
    end,
    tol = 1e-5,
    errors = {
      { T { 3 }, 2, 0, 1, match = "x: expected [..., n, ...]" }, { T { 3, 2 }, 0, 0, 1, match = "p: expected" },
      { T { 3, 2 }, 2, 0, -1, match = "limit" }, { T { 3, 2 }, 2, 2, 1, match = "dim" },
    },
  })

  -- ---- covariance ----

  local function covariance(x, correction, counts, weight)
    if type(correction) == "table" then counts, weight, correction = correction.counts, correction.weight,
      correction.correction end
    local rows, n = #x.shape > 1 and x.shape[1] or 1, #x.shape > 0 and x.shape[#x.shape] or 1
    local w, total, own = {}, 0, 0
    for i = 1, n do
      w[i] = (counts and counts[i] or 1) * (weight and weight[i] or 1)
      total = total + w[i]
      own = own + w[i] * (weight and weight[i] or 1)
    end
    local means = {}
    for r = 1, rows do
      means[r] = 0
      for i = 1, n do means[r] = means[r] + w[i] * x[(r - 1) * n + i] / total end
    end
    local taken = (correction or 1) * (weight and own / total or 1)
    return from(#x.shape > 1 and { rows, rows } or {}, function(i)
      local s, a, b = 0, (i[1] or 0) + 1, (i[2] or 0) + 1
      for k = 1, n do s = s + w[k] * (x[(a - 1) * n + k] - means[a]) * (x[(b - 1) * n + k] - means[b]) end
      return s / math.max(total - taken, 0)
    end)
  end
  row("cov", {
    cases = {
      { T { 3, 5 } }, { T { 6 } }, { T { 2, 4 }, 0 },
        { T { 3, 5 }, 1, T { 5, values = { 1, 2, 1, 3, 1 }, dtype = "i64" } },
      { T { 3, 5 }, opts = { weight = T { 5, range = { 0.5, 2 } } } },
      { T { 2, 4 }, 1, T { 4, values = { 1, 2, 1, 1 }, dtype = "i64" }, T { 4, range = { 0.5, 2 } } },
    },
    ref = covariance, tol = 1e-5,
    errors = {
      { T { 2, 2, 2 }, match = "x: expected [variables, observations]" },
        { T { 2, 3 }, 1, T { 2 }, match = "counts: expected a number for each of 3" },
    },
  })
  row("corrcoef", {
    cases = { { T { 3, 5 } }, { T { 2, 4 } } },
    ref = function(x)
      local c = covariance(x)
      return from(c.shape, function(i)
        return at(c, i) / math.sqrt(at(c, { i[1], i[1] }) * at(c, { i[2], i[2] }))
      end)
    end,
    tol = 1e-5,
    errors = { { T { 2, 2, 2 }, match = "x: expected [variables, observations]" } },
  })
end
