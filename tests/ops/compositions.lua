-- Rows of src/ops/compositions.c.

return function(row, T)
  local from, at, dim_of, zip, map, broadcast = T.from, T.at, T.dim, T.zip, T.map, T.broadcast

  local function list(t) return table.move(t, 1, #t, 1, {}) end

  -- ---- views ----

  local function reshaped(x, size)
    local shape, n, open = list(size), 1, nil
    for i, s in ipairs(shape) do
      if s == -1 then open = i else n = n * s end
    end
    if open then shape[open] = n > 0 and T.count(x.shape) // n or 0 end
    return table.move(x, 1, #x, 1, { shape = shape })
  end

  row("view_shape", {
    cases = {
      { T { 2, 6 }, { 3, 4 } }, { T { 2, 6 }, { -1 } }, { T { 4 }, { 2, 1, 2 } },
      { T {}, { 1 } }, { T { 0, 3 }, { 3, 0 } },
    },
    ref = reshaped,
    strided = false, broadcast = false, -- other strides have no such views, which is an error
    errors = {
      { T { 2, 6 }, { 5 }, match = "size" }, { T { 2, 6 }, { -1, -1 }, match = "size" },
    },
  })

  row("view_dtype", {
    strided = false, broadcast = false,
    cases = {
      { T { 2, 3 }, opts = { dtype = "i16" }, dtypes = { "i16" } },
      { T { 2, 3, values = { 0, 1, -1, 127, -128, 5 } }, opts = { dtype = "u8" }, dtypes = { "i8" } },
      { T { 2, 2, values = { 1, -1, 2, -2 } }, opts = { dtype = "i8" }, dtypes = { "i16" } },
      { T { 2, 4, values = { 1, 0, 255, 255, 2, 0, 254, 255 } }, opts = { dtype = "i16" }, dtypes = { "u8" } },
    },
    ref = function(x, options)
      local bytes, to = {}, options.dtype
      local width = { i8 = 1, u8 = 1, i16 = 2 }
      local format = { i8 = "<i1", u8 = "<I1", i16 = "<i2" }
      for i = 1, #x do bytes[i] = string.pack(format[x.dtype], x[i]) end
      local text, shape = table.concat(bytes), list(x.shape)
      shape[#shape] = shape[#shape] * width[x.dtype] // width[to]
      local y = { shape = shape, dtype = to }
      for i = 1, T.count(shape) do y[i] = string.unpack(format[to], text, (i - 1) * width[to] + 1) end
      return y
    end,
    errors = {
      { T { 2, 3, dtype = "u8" }, "i16", match = "cannot be seen as i16" },
      { T { dtype = "f32" }, "u8", match = "cannot be seen as u8" }, { T { 2 }, match = "dtype" },
    },
  })

  -- ---- products ----

  row("outer", {
    cases = { { T { 3 }, T { 4 } }, { T { 1 }, T { 2 } }, { T { 0 }, T { 2 } } },
    ref = function(x, y)
      return from({ #x, #y }, function(i) return x[i[1] + 1] * y[i[2] + 1] end)
    end,
    errors = { { T { 3, 1 }, T { 4 }, match = "x: expected [n]" }, { T { 3 }, T {}, match = "y: expected [m]" } },
  })

  local function added(x, a, b, beta, alpha)
    local nd = #a.shape
    local shape = list(a.shape)
    shape[nd] = b.shape[nd]
    return from(shape, function(i)
      local p, q, s = list(i), list(i), 0
      for k = 0, a.shape[nd] - 1 do
        p[nd], q[nd - 1] = k, k
        s = s + at(a, p) * at(b, q)
      end
      local y = (alpha or 1) * s
      return beta == 0 and y or y + (beta or 1) * at(x, i)
    end)
  end

  row("addmm", {
    cases = {
      { T { 2, 4 }, T { 2, 3 }, T { 3, 4 } }, { T { 4 }, T { 2, 3 }, T { 3, 4 }, 0.5, 2 },
      { T { 2, 1 }, T { 2, 3 }, T { 3, 4 }, opts = { alpha = -1 } }, { T { 2, 2 }, T { 2, 0 }, T { 0, 2 } },
    },
    ref = function(x, a, b, beta, alpha)
      if type(beta) == "table" then beta, alpha = beta.beta, beta.alpha end
      return added(x, a, b, beta, alpha)
    end,
    tol = 1e-5,
    errors = {
      { T { 3, 4 }, T { 2, 3 }, T { 3, 4 }, match = { "addmm", "[2, 4]", "[3, 4]" } },
      { T { 5, 2, 4 }, T { 2, 3 }, T { 3, 4 }, match = "x: expected what broadcasts to the product" },
      { T { 2, 4 }, T { 1, 2, 3 }, T { 3, 4 }, match = "a: expected [n, k]" },
      { T { 2, 4 }, T { 2, 3 }, T { 4, 4 }, match = "addmm" },
    },
  })

  row("baddbmm", {
    cases = {
      { T { 2, 2, 4 }, T { 2, 2, 3 }, T { 2, 3, 4 } }, { T { 4 }, T { 2, 2, 3 }, T { 2, 3, 4 }, 0.5, 2 },
    },
    ref = added,
    tol = 1e-5,
    errors = { { T { 2, 4 }, T { 2, 3 }, T { 3, 4 }, match = "a: expected [batch, n, k]" } },
  })

  row("addmv", {
    cases = { { T { 2 }, T { 2, 3 }, T { 3 } }, { T { 1 }, T { 2, 3 }, T { 3 }, 0.5, 2 } },
    ref = function(x, a, b, beta, alpha)
      return from({ a.shape[1] }, function(i)
        local s = 0
        for k = 0, a.shape[2] - 1 do s = s + at(a, { i[1], k }) * b[k + 1] end
        return (alpha or 1) * s + (beta or 1) * at(x, i)
      end)
    end,
    tol = 1e-5,
    errors = { { T { 2 }, T { 2, 3 }, T { 3, 1 }, match = "b: expected [k]" }, { T { 4 }, T { 2, 3 }, T { 3 }, match =
      "addmv" } },
  })

  row("addr", {
    cases = { { T { 2, 3 }, T { 2 }, T { 3 } }, { T { 3 }, T { 2 }, T { 3 }, 0.5, 2 } },
    ref = function(x, a, b, beta, alpha)
      return from({ #a, #b }, function(i)
        return (alpha or 1) * a[i[1] + 1] * b[i[2] + 1] + (beta or 1) * at(x, i)
      end)
    end,
    errors = { { T { 2, 3 }, T { 2, 1 }, T { 3 }, match = "a: expected [n]" } },
  })

  row("addcmul", {
    cases = { { T { 2, 3 }, T { 2, 3 }, T { 3 } }, { T { 3 }, T { 3 }, T { 3 }, -0.5 }, { T { 0 }, T { 0 }, T { 0 } } },
    ref = function(x, a, b, value)
      return zip(function(p, q, r) return p + (value or 1) * q * r end, x, a, b)
    end,
    errors = { { T { 2 }, T { 3 }, T { 3 }, match = "broadcast" } },
  })

  row("addcdiv", {
    cases = {
      { T { 2, 3 }, T { 2, 3 }, T { 3, range = { 1, 2 } } }, { T { 3 }, T { 3 }, T { 3, range = { -2, -1 } }, -0.5 },
    },
    ref = function(x, a, b, value)
      return zip(function(p, q, r) return p + (value or 1) * q / r end, x, a, b)
    end,
    tol = 1e-5,
    errors = { { T { 2 }, T { 3 }, T { 3 }, match = "broadcast" } },
  })

  row("cross", {
    cases = { { T { 4, 3 }, T { 4, 3 } }, { T { 3, 2 }, T { 3, 2 }, 0 }, { T { 2, 1, 3 }, T { 4, 3 } }, { T { 3 }, T { 3 } } },
    ref = function(x, y, dim)
      local shape = broadcast(x, y)
      local d = dim_of(dim or -1, #shape)
      return from(shape, function(i)
        local p, q = list(i), list(i)
        p[d], q[d] = (i[d] + 1) % 3, (i[d] + 2) % 3
        return at(x, p) * at(y, q) - at(x, q) * at(y, p)
      end)
    end,
    dtypes = { "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8" },
    errors = { { T { 4, 2 }, T { 4, 2 }, match = "dim: expected 3 elements" }, { T { 3 }, T { 3 }, 1, match = "dim" } },
  })

  -- ---- elementwise ----

  row("isclose", {
    cases = {
      { T { 4, values = { 1, 1, 1, 0 } }, T { 4, values = { 1, 1 + 5e-6, 1 + 2e-5, 5e-9 } }, dtypes = { "f64" } },
      { T { 5, values = { T.inf, T.inf, -T.inf, T.nan, 1 } }, T { 5, values = { T.inf, -T.inf, 1, T.nan, T.nan } } },
      { T { 2, values = { T.nan, 1 } }, T { 2, values = { T.nan, 1 } }, 0, 0, true },
      { T { 2, 3, values = { 1, 2, 3, 4, 5, 6 } }, T { 3, values = { 1, 2, 4 } }, 0, 1 },
      { T { 3, values = { 100, 1, 0 } }, T { 3, values = { 101, 2, 1 } }, 0.01, 0 },
    },
    ref = function(x, y, rtol, atol, equal_nan)
      local r = zip(function(p, q)
        if p == q or (equal_nan and p ~= p and q ~= q) then return 1 end
        local error = math.abs(p - q)
        return error < T.inf and error <= (atol or 1e-8) + (rtol or 1e-5) * math.abs(q) and 1 or 0
      end, x, y)
      r.dtype = "bool"
      return r
    end,
    errors = { { T { 2 }, T { 3 }, match = "broadcast" }, { T { 2 }, T { 2 }, -1, match = "rtol" } },
  })

  local most = { f64 = 0x1.fffffffffffffp1023, f32 = 0x1.fffffep127, f16 = 65504, bf16 = 0x1.fep127 }
  local odd = { 1, T.nan, T.inf, -T.inf, -2 }

  row("nan_to_num", {
    cases = { { T { 2, 3 } }, { T { 5, values = odd }, grad = false }, { T { 5, values = odd }, 3, 4, -5, grad = false },
      { T { 5, values = odd }, opts = { neginf = 0.5 }, grad = false } },
    ref = function(x, nan, posinf, neginf)
      if type(nan) == "table" then nan, posinf, neginf = nan.nan, nan.posinf, nan.neginf end
      return map(x, function(v)
        if v ~= v then return nan or 0 end
        if v == T.inf then return posinf or most[x.dtype] end
        return v == -T.inf and (neginf or -most[x.dtype]) or v
      end)
    end,
  })

  row("xlogy", {
    cases = {
      { T { 2, 3 }, T { 3, range = { 0.5, 2 } } }, { T { 2, 3 }, 0.5 }, { 1.5, T { 3, range = { 0.5, 2 } } },
      { T { 5, values = { 0, 0, 0, 0, 2 } }, T { 5, values = { 0, -1, T.inf, T.nan, 0 } }, grad = false },
    },
    ref = function(x, y)
      return zip(function(p, q) return p == 0 and q == q and 0 or p * (q < 0 and T.nan or math.log(q)) end, x, y)
    end,
    tol = 1e-5,
    errors = { { T { 2 }, T { 3 }, match = "broadcast" } },
  })

  -- ---- reductions ----

  -- Over dims: f of the list of values.
  local function over(x, dims, keepdim, f)
    local reduced, nd = {}, #x.shape
    if type(dims) == "number" then dims = { dims } end
    for _, d in ipairs(dims or {}) do reduced[dim_of(d, nd)] = true end
    if not dims or #dims == 0 then
      for d = 1, nd do reduced[d] = true end
    end
    local shape, inner = {}, {}
    for d = 1, nd do
      if not reduced[d] then shape[#shape + 1] = x.shape[d] elseif keepdim then shape[#shape + 1] = 1 end
      inner[d] = reduced[d] and x.shape[d] or 1
    end
    return from(shape, function(i)
      local base, k = {}, 0
      for d = 1, nd do
        if not reduced[d] or keepdim then k = k + 1 end
        base[d] = reduced[d] and 0 or i[k]
      end
      local values = {}
      from(inner, function(j)
        local p = {}
        for d = 1, nd do p[d] = base[d] + j[d] end
        values[#values + 1] = at(x, p)
        return 0
      end)
      return f(values)
    end)
  end

  row("count_nonzero", {
    cases = { { T { 3, 4, range = { -1, 1 } } }, { T { 3, 4, int = { 0, 2 } }, 1 }, { T { 2, 3, 2 }, { 0, -1 }, true },
      { T { 0, 3 } }, { T {} } },
    ref = function(x, dims, keepdim)
      local y = over(x, dims, keepdim, function(values)
        local n = 0
        for _, v in ipairs(values) do n = n + (v ~= 0 and 1 or 0) end
        return n
      end)
      y.dtype = "i64"
      return y
    end,
    errors = { { T { 3 }, 1, match = "dim" } },
  })

  local function mean(values)
    local s = 0
    for _, v in ipairs(values) do s = s + v end
    return s / #values
  end
  local function variance(correction)
    return function(values)
      local m, s = mean(values), 0
      for _, v in ipairs(values) do s = s + (v - m) ^ 2 end
      return s / (#values - (correction or 1))
    end
  end
  local moments = { { T { 3, 4 } }, { T { 3, 4 }, 1 }, { T { 2, 3, 4 }, { 0, -1 }, 0, true } }

  row("var_mean", {
    cases = moments,
    ref = function(x, dims, correction, keepdim)
      return over(x, dims, keepdim, variance(correction)), over(x, dims, keepdim, mean)
    end,
    tol = 1e-5,
    errors = { { T { 3 }, 1, match = "dim" } },
  })

  row("std_mean", {
    cases = moments,
    ref = function(x, dims, correction, keepdim)
      local v = variance(correction)
      return over(x, dims, keepdim, function(values) return math.sqrt(v(values)) end), over(x, dims, keepdim, mean)
    end,
    tol = 1e-5,
    errors = { { T { 3 }, 1, match = "dim" } },
  })

  -- ---- along a dimension ----

  local function joined(xs, d)
    local shape = list(xs[1].shape)
    for k = 2, #xs do shape[d] = shape[d] + xs[k].shape[d] end
    return from(shape, function(i)
      local p = list(i)
      for _, x in ipairs(xs) do
        if p[d] < x.shape[d] then return x[(function()
          local n = 0
          for k, size in ipairs(x.shape) do n = n * size + p[k] end
          return n + 1
        end)()] end
        p[d] = p[d] - x.shape[d]
      end
    end)
  end

  row("diff", {
    cases = {
      { T { 5 } }, { T { 3, 4 }, 1, 0 }, { T { 3, 5 }, 2 }, { T { 3, 4 }, 0 }, { T { 3 }, 4 }, { T { 1, 2 }, 1, 0 },
      { T { 2, 3 }, 1, 1, T { 2, 1 }, T { 2, 2 } }, { T { 2, 3 }, opts = { append = T { 2, 1 } } },
    },
    ref = function(x, n, dim, prepend, append)
      if type(n) == "table" then n, append = 1, n.append end
      local is_bool, d = x.dtype == "bool", dim_of(dim or -1, #x.shape)
      local parts = {}
      if prepend then parts[1] = prepend end
      parts[#parts + 1] = x
      if append then parts[#parts + 1] = append end
      if #parts > 1 then x = joined(parts, d) end
      for _ = 1, n or 1 do
        local shape = list(x.shape)
        if shape[d] == 0 then break end
        shape[d] = shape[d] - 1
        local before = x
        x = from(shape, function(i)
          local p, q = list(i), list(i)
          p[d] = i[d] + 1
          local function value(k)
            local m = 0
            for e, size in ipairs(before.shape) do m = m * size + k[e] end
            return before[m + 1]
          end
          local v = value(p) - value(q)
          return is_bool and math.abs(v) or v
        end)
      end
      return x
    end,
    dtypes = { "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "bool" },
    errors = {
      { T {}, match = "x: expected [..., n]" }, { T { 3 }, -1, match = "n: expected" }, { T { 3 }, 1, 1, match = "dim" },
      { T { 2, 3 }, 1, 1, T { 3, 1 }, match = "diff" },
    },
  })

  row("trapezoid", {
    cases = {
      { T { 5 } }, { T { 3, 4 }, opts = { dx = 0.5, dim = 0 } }, { T { 3, 4 }, T { 4 } }, { T { 3, 4 }, T { 3 }, 1, 0 },
      { T { 3, 4 }, T { 3, 4 } }, { T { 1 } }, { T { 2, 0 } },
    },
    ref = function(y, x, dx, dim)
      if x and not x.shape then x, dx, dim = nil, x.dx, x.dim end
      local d = dim_of(dim or -1, #y.shape)
      local shape = list(y.shape)
      table.remove(shape, d)
      return from(shape, function(i)
        local s = 0
        for k = 0, y.shape[d] - 2 do
          local p, q = list(i), list(i)
          table.insert(p, d, k)
          table.insert(q, d, k + 1)
          local width = dx or 1
          if x then width = #x.shape == 1 and x[k + 2] - x[k + 1] or at(x, q) - at(x, p) end
          s = s + (at(y, p) + at(y, q)) / 2 * width
        end
        return s
      end)
    end,
    tol = 1e-5,
    errors = {
      { T {}, match = "y: expected [..., n]" }, { T { 3, 4 }, T { 3 }, match = "x: expected the shape of y" },
      { T { 3 }, opts = { dim = 1 }, match = "dim" },
    },
  })

  row("rot90", {
    cases = {
      { T { 2, 3 } }, { T { 2, 3 }, 2 }, { T { 2, 3 }, 3 }, { T { 2, 3 }, 4 }, { T { 2, 3 }, -1 },
      { T { 2, 3, 4 }, 1, { 1, 2 } }, { T { 2, 3, 4 }, 1, { -1, 0 } },
    },
    ref = function(x, k, dims)
      local a, b = 1, 2
      if dims then a, b = dim_of(dims[1], #x.shape), dim_of(dims[2], #x.shape) end
      for _ = 1, (k or 1) % 4 do
        local before, shape = x, list(x.shape)
        shape[a], shape[b] = shape[b], shape[a]
        x = from(shape, function(i)
          local p = list(i)
          p[a], p[b] = i[b], before.shape[b] - 1 - i[a]
          return at(before, p)
        end)
      end
      return x
    end,
    errors = {
      { T { 3 }, match = "dims: expected two different dimensions" }, { T { 2, 3 }, 1, { 0, 0 }, match = "dims" },
      { T { 2, 3 }, 1, { 0 }, match = "dims" }, { T { 2, 3 }, 1, { 0, 2 }, match = "dims" },
    },
  })

  row("hstack", {
    cases = { { { T { 3 }, T { 2 } } }, { { T { 2, 3 }, T { 2, 1 } } }, { { T {}, T { 2 } } }, { { T { 2, 1, 2 },
      T { 2, 2, 2 } } } },
    ref = function(xs)
      for i, x in ipairs(xs) do
        if #x.shape == 0 then xs[i] = { shape = { 1 }, x[1] } end
      end
      return joined(xs, #xs[1].shape > 1 and 2 or 1)
    end,
    errors = { { {}, match = "xs: expected at least one tensor" }, { { T { 2, 3 }, T { 3, 3 } }, match = "hstack" } },
  })

  row("vstack", {
    cases = { { { T { 3 }, T { 3 } } }, { { T { 2, 3 }, T { 3 } } }, { { T {}, T {} } }, { { T { 2, 1, 2 },
      T { 1, 1, 2 } } } },
    ref = function(xs)
      local rows = {}
      for i, x in ipairs(xs) do
        local shape = list(x.shape)
        while #shape < 2 do table.insert(shape, 1, 1) end
        rows[i] = table.move(x, 1, T.count(x.shape), 1, { shape = shape })
      end
      return joined(rows, 1)
    end,
    errors = { { {}, match = "xs: expected at least one tensor" }, { { T { 2, 3 }, T { 2 } }, match = "vstack" } },
  })

  row("repeat_interleave", {
    cases = {
      { T { 3 }, 2 }, { T { 2, 3 }, 2, 1 }, { T { 2, 3 }, 3, -2 }, { T { 2, 3 }, 2 }, { T { 2 }, 0 }, { T {}, 3 },
      { T { 4, 2 }, T { 4, values = { 2, 0, 0, 3 }, dtype = "i64" }, 0 }, { T { 3 }, T { 1, values = { 2 },
        dtype = "i32" } },
      { T { 2, 3 }, T { values = { 2 }, dtype = "i64" }, 1 }, { T { 0, 2 }, T { 0, int = { 0, 3 } }, 0 },
      { T { 3 }, T { 3, values = { 0, 0, 0 }, dtype = "i64" }, 0 },
      { T { 1, 1, 2, 1, 1, 1, 1, 2 }, 2, 2 },
    },
    ref = function(x, repeats, dim)
      local shape, d = list(x.shape), 1
      if dim then d = dim_of(dim, #shape) else shape = { T.count(shape) } end
      local positions = {}
      for k = 0, shape[d] - 1 do
        local n = type(repeats) == "table" and (repeats[k + 1] or repeats[1]) or repeats
        for _ = 1, n do positions[#positions + 1] = k end
      end
      local flat = { shape = list(shape), table.unpack(x, 1, T.count(x.shape)) }
      shape[d] = #positions
      return from(shape, function(i)
        local p, n = list(i), 0
        p[d] = positions[i[d] + 1]
        for k, size in ipairs(flat.shape) do n = n * size + p[k] end
        return flat[n + 1]
      end)
    end,
    meta = "tensors say how often",
    errors = {
      { T { 3 }, -1, match = "repeats: expected an integer of at least 0, got -1" },
      { T { 3 }, 1.5, match = "repeats: expected an integer" },
      { T { 3 }, T { 2, values = { 1, 2 }, dtype = "i64" }, match = "one for each of 3 positions" },
      { T { 2 }, T { 2, values = { 1, -2 }, dtype = "i64" }, match = "at least 0, got -2" },
      { T { 3 }, T { 3, dtype = "f32" }, match = "repeats: expected integers" }, { T { 3 }, 2, 1, match = "dim" },
    },
  })
end
