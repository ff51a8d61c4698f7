-- Rows of src/ops/fft.c. Reference: transforms from their definitions, with a sum for every element.

return function(row, T)
  local function list(t) return table.move(t, 1, #t, 1, {}) end

  -- Arguments after x by name: some in order, the rest in a table.
  local function named(names, ...)
    local args = {}
    for i, v in ipairs { ... } do
      if type(v) == "table" and type(next(v)) == "string" then
        for name, value in pairs(v) do args[name] = value end
      else
        args[names[i]] = v
      end
    end
    return args
  end

  -- The lines of x along a dimension (counted from 1) through f(re, im, m), which returns the parts of `length`
  -- results, from index 0. pairs_in, pairs_out: whether a last dimension of 2 has the parts.
  local function along(x, pairs_in, pairs_out, d, length, f)
    local shape = list(x.shape)
    if pairs_in then shape[#shape] = nil end
    local outer, inner, m = 1, 1, shape[d]
    for k = 1, d - 1 do outer = outer * shape[k] end
    for k = d + 1, #shape do inner = inner * shape[k] end
    shape[d] = length
    if pairs_out then shape[#shape + 1] = 2 end
    local y = { shape = shape }
    for o = 0, outer - 1 do
      for i = 0, inner - 1 do
        local re, im = {}, {}
        for k = 0, m - 1 do
          local at = (o * m + k) * inner + i
          if pairs_in then re[k], im[k] = x[2 * at + 1], x[2 * at + 2] else re[k], im[k] = x[at + 1], 0.0 end
        end
        local yr, yi = f(re, im, m)
        for k = 0, length - 1 do
          local at = (o * length + k) * inner + i
          if pairs_out then y[2 * at + 1], y[2 * at + 2] = yr[k], yi[k] else y[at + 1] = yr[k] end
        end
      end
    end
    return y
  end

  -- scale sum x[i] exp(sign 2 pi i k / n) for k < length, 0 from n on.
  local function dft(re, im, m, n, sign, length, scale)
    local yr, yi, cos, sin = {}, {}, {}, {}
    for k = 0, n - 1 do cos[k], sin[k] = math.cos(2 * math.pi * k / n), sign * math.sin(2 * math.pi * k / n) end
    for k = 0, length - 1 do
      local sr, si, at = 0.0, 0.0, 0 -- at: i k % n
      for i = 0, k < n and math.min(m, n) - 1 or -1 do
        local c, s, a, b = cos[at], sin[at], re[i], im[i]
        sr, si = sr + a * c - b * s, si + a * s + b * c
        at = at + k
        if at >= n then at = at - n end
      end
      yr[k], yi[k] = sr * scale, si * scale
    end
    return yr, yi
  end

  local function weight(k, n, doubled) return doubled and k ~= 0 and 2 * k ~= n and 2 or 1 end

  -- ---- along one dimension ----

  local function fft_line(x, ...)
    local a = named({ "n", "dim", "length", "inverse", "scale" }, ...)
    return along(x, true, true, T.dim(a.dim, #x.shape - 1), a.length, function(re, im, m)
      return dft(re, im, m, a.n, a.inverse and 1 or -1, a.length, a.scale or 1)
    end)
  end

  local REAL = { "n", "dim", "length", "inverse", "doubled", "scale" }

  local function rfft_line(x, ...)
    local a = named(REAL, ...)
    return along(x, false, true, T.dim(a.dim, #x.shape), a.length, function(re, im, m)
      local yr, yi = dft(re, im, m, a.n, a.inverse and 1 or -1, a.length, a.scale or 1)
      for k = 0, a.length - 1 do
        local w = k <= a.n // 2 and weight(k, a.n, a.doubled) or 0
        yr[k], yi[k] = w * yr[k], w * yi[k]
      end
      return yr, yi
    end)
  end

  local function irfft_line(x, ...)
    local a = named(REAL, ...)
    return along(x, true, false, T.dim(a.dim, #x.shape - 1), a.length, function(re, im, m)
      local taken = math.min(m, a.n // 2 + 1)
      for k = 0, taken - 1 do
        local w = weight(k, a.n, a.doubled)
        re[k], im[k] = w * re[k], w * im[k]
      end
      return dft(re, im, taken, a.n, a.inverse and -1 or 1, a.length, a.scale or 1)
    end)
  end

  local function dct_line(x, ...)
    local a = named({ "n", "dim", "length", "inverse", "scale", "first" }, ...)
    return along(x, false, false, T.dim(a.dim, #x.shape), a.length, function(re, _, m)
      local y, cos = {}, {}
      local turn, first = 4 * a.n, a.first or 1
      for k = 0, turn - 1 do cos[k] = math.cos(2 * math.pi * k / turn) end
      for j = 0, a.length - 1 do
        -- The sum over i of re[i] cos(k (2 t + 1)), of which i is t, or k of the inverse; at: k (2 t + 1) % turn.
        local sum, at, step = 0.0, a.inverse and 0 or j, a.inverse and 2 * j + 1 or 2 * j
        for i = 0, j < a.n and math.min(m, a.n) - 1 or -1 do
          sum = sum + re[i] * cos[at]
          at = at + step
          if at >= turn then at = at - turn end
        end
        if a.inverse and m > 0 and j < a.n then sum = sum + (first - 1) * re[0]
        elseif j == 0 then sum = sum * first end
        y[j] = (a.scale or 1) * sum
      end
      return y
    end)
  end

  -- Every way through the kernels: single numbers, all radices, a large prime factor, lines that fill no vector, lines
  -- across memory, lengths that are cut into matrices, well and badly, and these with a large prime.
  local lengths = { 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 17, 30, 61, 64, 67, 97, 134 }
  local long = { 128, 144, 160, 256, 257, 264, 536, 1031 }
  local hundred = { dtypes = { "f64", "f32" }, grad = false }

  local function line_cases(tail, extra, length_of, real)
    local cases = extra
    local function add(shape, options, ...)
      if not tail then shape[#shape + 1] = nil end
      local case = { T(shape), ... }
      for k, v in pairs(options or {}) do case[k] = v end
      cases[#cases + 1] = case
    end
    for _, n in ipairs(lengths) do
      add({ 3, n, tail }, n > 12 and { grad = false } or nil, n, -1, length_of(n))
      add({ 11, n, tail }, hundred, n, -1, length_of(n), true)
      add({ n, 19, tail }, hundred, n, 0, length_of(n), true)
      if real then add({ n, 3, tail }, hundred, n, 0, length_of(n), false, true) end
    end
    for _, n in ipairs(long) do
      add({ 2, n, tail }, hundred, n, 1, length_of(n))
      add({ n, tail }, hundred, n, 0, length_of(n), true)
      if real then add({ n, tail }, hundred, n, 0, length_of(n), false, true) end
    end
    return cases
  end

  local wrong = { T { 3, 4 }, 4, 0, 4, match = "x: expected complex numbers" }

  row("fft_line", {
    cases = line_cases(2, {
      { T { 2, 5, 2 }, 8, 1, 8 }, { T { 2, 5, 2 }, 3, 1, 3, true }, { T { 2, 5, 2 }, 4, 1, 6 },
      { T { 5, 2, 2 }, 4, 0, 2, true, 0.5 },
      { T { 2, 3, 4, 2 }, 3, -2, 3, opts = { scale = 0.25, inverse = true } }, { T { 0, 4, 2 }, 4, 1, 4 },
      { T { 2, 0, 2 }, 4, 1, 4 }, { T { 2, 4, 2 }, 4, 1, 0 }, { T { 2, 300, 2 }, 256, 1, 200, grad = false },
      { T { 300, 2, 2 }, 320, 0, 330, true, grad = false },
      { T { 1, 2187, 2 }, 2187, 1, 2187, grad = false, dtypes = { "f64" } },
      { T { 1, 4374, 2 }, 4374, 1, 99, grad = false, dtypes = { "f32" } },
    }, function(n) return n end),
    ref = fft_line, broadcast = false, tol = 4e-6,
    errors = {
      wrong, { T { 2 }, 2, 0, 2, match = "x: expected complex numbers" },
      { T { 3, 4, 3 }, 4, 1, 4, match = "x: expected complex" },
      { T { 3, 4, 2 }, 4, 2, 4, match = "dim: expected a dimension in [-2, 1], got 2" },
      { T { 3, 4, 2 }, 0, 1, 4, match = "n: expected 1 to" }, { T { 3, 4, 2 }, 4, 1, -1, match = "length" },
      { T { 3, 4, 2 }, 1 << 31, 1, 4, match = "n: expected 1 to" },
    },
    big = function(ty) return ty.core.fft_line(ty.randn(300, 60, 2), 60, 1, 60) end,
  })

  row("rfft_line", {
    cases = line_cases(nil, {
      { T { 2, 5 }, 8, 1, 5 }, { T { 2, 5 }, 3, 1, 2, true }, { T { 2, 5 }, 5, 1, 3, true, true },
      { T { 2, 6 }, 6, 1, 6, true, true, 0.5 },
      { T { 6, 2 }, 6, 0, 3 }, { T { 0, 4 }, 4, 1, 3 }, { T { 2, 0 }, 4, 1, 3 }, { T { 2, 5 }, 4, 1, 0 },
      { T { 4 }, 4, 0, 3 },
      { T { 2, 300 }, 256, 1, 100, grad = false }, { T { 2, 200 }, 512, 1, 257, grad = false },
      { T { 2, 200 }, 512, 1, 300, true, true, grad = false },
      { T { 500, 2 }, 512, 0, 300, false, true, grad = false },
    }, function(n) return n // 2 + 1 end, true),
    ref = rfft_line, broadcast = false, tol = 4e-6,
    errors = {
      { T {}, 1, 0, 1, match = "x: expected a signal" },
      { T { 3, 4 }, 4, 2, 4, match = "dim: expected a dimension in [-2, 1], got 2" },
      { T { 3, 4 }, 0, 1, 4, match = "n: expected 1 to" }, { T { 3, 4 }, 4, 1, -1, match = "length" },
    },
    big = function(ty) return ty.core.rfft_line(ty.randn(300, 60), 60, 1, 31) end,
  })

  row("fft_plane", {
    cases = {
      { T { 3, 5 }, true }, { T { 2, 4, 6 }, true, false, 0.5 }, { T { 3, 2 }, true }, { T { 1, 3 }, true },
      { T { 3, 5, 2 } }, { T { 2, 4, 3, 2 }, false, true, 0.5 }, { T { 1, 2, 2 }, false, true },
      { T { 0, 3, 4 }, true },
      { T { 20, 34 }, true, grad = false }, { T { 3, 16, 18, 2 }, false, true, grad = false },
      { T { 8, 33, 2 }, grad = false },
    },
    ref = function(x, ...)
      local a = named({ "real", "inverse", "scale" }, ...)
      local n = #x.shape - (a.real and 0 or 1)
      local w, h = x.shape[n], x.shape[n - 1]
      local y = a.real and rfft_line(x, w, n - 1, w // 2 + 1, false, false, a.scale)
        or fft_line(x, w, n - 1, w, a.inverse, a.scale)
      return fft_line(y, h, n - 2, h, a.inverse, 1)
    end,
    broadcast = false, tol = 4e-6,
    errors = {
      { T { 3, 1 }, true, match = "expected planes with rows and at least two columns" },
      { T { 3, 4 }, true, true, match = "inverse: expected false for a real x" },
      { T { 3, 4 }, match = "x: expected complex numbers" },
    },
    big = function(ty) return ty.core.fft_plane(ty.randn(40, 60, 31), true) end,
  })

  -- A case of f32 and f64 without gradient: arguments in order.
  local function wide(...)
    local case = { ... }
    case.dtypes, case.grad = hundred.dtypes, false
    return case
  end

  local function half_cases()
    local cases = {
      { T { 2, 5, 2 }, 8, 1, 8, false, true }, { T { 2, 5, 2 }, 7, 1, 7, true, true },
      { T { 2, 3, 2 }, 8, 1, 8, false, true },
      { T { 2, 7, 2 }, 4, 1, 4 }, { T { 2, 3, 2 }, 4, 1, 6, true, false, 0.5 }, { T { 3, 2, 2 }, 5, 0, 3 },
      { T { 0, 3, 2 }, 4, 1, 4 },
      { T { 2, 0, 2 }, 4, 1, 4 }, { T { 2, 2, 2 }, 3, 1, 0 }, { T { 1, 2 }, 1, 0, 1 }, { T { 2, 2 }, 2, 0, 2 },
      { T { 2, 300, 2 }, 512, 1, 512, false, true, grad = false }, { T { 2, 100, 2 }, 512, 1, 600, grad = false },
      { T { 257, 2, 2 }, 512, 0, 500, true, true, grad = false },
    }
    for _, n in ipairs(lengths) do
      for _, doubled in ipairs { true, false } do
        cases[#cases + 1] = { T { 3, n // 2 + 1, 2 }, n, 1, n, false, doubled, grad = n <= 8 }
        cases[#cases + 1] = wide(T { 11, n // 2 + 1, 2 }, n, 1, n, true, doubled)
        cases[#cases + 1] = wide(T { n // 2 + 1, 19, 2 }, n, 0, n, false, doubled)
      end
    end
    for _, n in ipairs(long) do
      for _, m in ipairs { n, 2 * n } do
        cases[#cases + 1] = wide(T { 2, m // 2 + 1, 2 }, m, 1, m, m == n, true)
        cases[#cases + 1] = wide(T { m // 2 + 1, 2 }, m, 0, m)
      end
    end
    return cases
  end

  row("irfft_line", {
    cases = half_cases(),
    ref = irfft_line, broadcast = false, tol = 4e-6,
    errors = {
      wrong, { T { 3, 4, 2 }, 4, 2, 4, match = "dim: expected a dimension in [-2, 1], got 2" },
      { T { 3, 4, 2 }, 0, 1, 4, match = "n: expected 1 to" }, { T { 3, 4, 2 }, 4, 1, -1, match = "length" },
    },
    big = function(ty) return ty.core.irfft_line(ty.randn(300, 31, 2), 60, 1, 60) end,
  })

  local function cosine_cases()
    local cases = {
      { T { 2, 5 }, 8, 1, 8 }, { T { 2, 5 }, 3, 1, 3, true }, { T { 2, 5 }, 4, 1, 6, false, 0.5, 2 },
      { T { 5, 2 }, 4, 0, 2, true, 0.5, 0.25 },
      { T { 0, 4 }, 4, 1, 4 }, { T { 2, 0 }, 4, 1, 4 }, { T { 2, 4 }, 4, 1, 0 },
      { T { 4 }, 4, 0, 4, opts = { first = 0.5 } },
      { T { 2, 300 }, 256, 1, 200, grad = false }, { T { 300, 2 }, 320, 0, 330, true, grad = false },
    }
    for _, n in ipairs(lengths) do
      for _, back in ipairs { true, false } do
        cases[#cases + 1] = { T { 3, n }, n, 1, n, back, 1, 0.5, grad = n <= 8 }
        cases[#cases + 1] = wide(T { 11, n }, n, 1, n, back)
        cases[#cases + 1] = wide(T { n, 19 }, n, 0, n, back)
      end
    end
    for _, n in ipairs(long) do
      for _, m in ipairs { n, 2 * n } do
        for _, back in ipairs { true, false } do
          cases[#cases + 1] = wide(T { 2, m }, m, 1, m, back, 1, 0.5)
        end
      end
    end
    return cases
  end

  row("dct_line", {
    cases = cosine_cases(),
    ref = dct_line, broadcast = false, tol = 4e-6,
    errors = {
      { T {}, 1, 0, 1, match = "x: expected a signal" },
      { T { 3, 4 }, 4, 2, 4, match = "dim: expected a dimension in [-2, 1], got 2" },
      { T { 3, 4 }, 0, 1, 4, match = "n: expected 1 to" }, { T { 3, 4 }, 4, 1, -1, match = "length" },
    },
    big = function(ty) return ty.core.dct_line(ty.randn(300, 60), 60, 1, 60) end,
  })

  -- ---- the transforms by their names ----

  local function factor(norm, n, back)
    if norm == "ortho" then return 1 / math.sqrt(n) end
    return ((norm or "backward") == "backward") == back and 1 / n or 1
  end

  local ONE = { "n", "dim", "norm" }

  local function complex_ref(back)
    return function(x, ...)
      local a = named(ONE, ...)
      local d = T.dim(a.dim or -1, #x.shape - 1)
      local n = a.n and a.n ~= -1 and a.n or x.shape[d]
      return fft_line(x, n, d - 1, n, back, factor(a.norm, n, back))
    end
  end

  local complex_cases = {
    { T { 2, 5, 2 } }, { T { 6, 2 }, 4 }, { T { 2, 3, 2 }, 5, 0 }, { T { 2, 3, 2 }, -1, -2, "ortho" },
    { T { 3, 4, 2 }, opts = { norm = "forward", dim = 0 } }, { T { 7, 2 }, 9, 0, "forward" }, { T { 0, 3, 2 } },
  }
  local complex_errors = {
    { T { 2, 5 }, match = "x: expected complex numbers, [..., n, 2]" },
    { T { 2, 5, 2 }, 0, match = "n: expected 1 to" },
    { T { 2, 5, 2 }, 4, 2, match = "dim: expected a dimension in [-2, 1], got 2" },
    { T { 2, 0, 2 }, match = "x: expected at least 1" },
    { T { 2, 5, 2 }, 4, 1, "none", match = 'norm: expected one of "backward"' },
  }
  for name, back in pairs { fft = false, ifft = true } do
    row(name, {
      cases = complex_cases, ref = complex_ref(back), broadcast = false, errors = complex_errors, tol = 4e-6,
      big = function(ty) return ty[name](ty.randn(300, 60, 2)) end,
    })
  end

  local function real_ref(back)
    return function(x, ...)
      local a = named(ONE, ...)
      local d = T.dim(a.dim or -1, #x.shape)
      local n = a.n and a.n ~= -1 and a.n or x.shape[d]
      return rfft_line(x, n, d - 1, n // 2 + 1, back, false, factor(a.norm, n, back))
    end
  end
  for name, back in pairs { rfft = false, ihfft = true } do
    row(name, {
      cases = {
        { T { 2, 5 } }, { T { 6 }, 4 }, { T { 2, 3 }, 5, 0 }, { T { 2, 3, 2 }, -1, -2, "ortho" },
        { T { 3, 4 }, opts = { norm = "forward", dim = 0 } }, { T { 7 }, 9, 0, "forward" }, { T { 0, 3 } },
      },
      ref = real_ref(back), broadcast = false, tol = 4e-6,
      errors = {
        { T {}, match = "x: expected a signal" }, { T { 2, 5 }, 0, match = "n: expected 1 to" },
        { T { 2, 5 }, 4, 2, match = "dim: expected a dimension in [-2, 1], got 2" },
        { T { 2, 0 }, match = "x: expected at least 1" },
        { T { 2, 5 }, 4, 1, "none", match = 'norm: expected one of "backward"' },
      },
      big = function(ty) return ty[name](ty.randn(300, 60)) end,
    })
  end

  local function half_ref(forward)
    return function(x, ...)
      local a = named(ONE, ...)
      local d = T.dim(a.dim or -1, #x.shape - 1)
      local n = a.n and a.n ~= -1 and a.n or 2 * (x.shape[d] - 1)
      return irfft_line(x, n, d - 1, n, forward, true, factor(a.norm, n, not forward))
    end
  end
  for name, forward in pairs { irfft = false, hfft = true } do
    row(name, {
      cases = {
        { T { 2, 5, 2 } }, { T { 6, 2 }, 4 }, { T { 2, 3, 2 }, 5, 0 }, { T { 2, 3, 2 }, -1, -2, "ortho" },
        { T { 3, 4, 2 }, opts = { norm = "forward", dim = 0 } }, { T { 7, 2 }, 9, 0, "forward" }, { T { 0, 3, 2 } },
        { T { 4, 2 }, opts = { n = 7 } },
      },
      ref = half_ref(forward), broadcast = false, tol = 4e-6,
      errors = {
        { T { 2, 5 }, match = "x: expected complex numbers" }, { T { 2, 5, 2 }, 0, match = "n: expected 1 to" },
        { T { 2, 5, 2 }, 4, 2, match = "dim: expected a dimension in [-2, 1], got 2" },
        { T { 2, 1, 2 }, match = "x: expected at least 2 positions along dim 1" },
        { T { 2, 5, 2 }, 4, 1, "none", match = 'norm: expected one of "backward"' },
      },
      big = function(ty) return ty[name](ty.randn(300, 31, 2)) end,
    })
  end

  -- ---- along several ----

  local function several(x, pairs_in, halved, default, ...)
    local a = named({ "size", "dims", "norm" }, ...)
    local nd = #x.shape - (pairs_in and 1 or 0)
    local size, dims = a.size or {}, a.dims or {}
    if type(size) == "number" then size = { size } end
    if type(dims) == "number" then dims = { dims } end
    local d, n = {}, {}
    local count = #dims > 0 and #dims or #size > 0 and #size or default or nd
    for i = 1, count do
      d[i] = T.dim(dims[i] or i - count - 1, nd)
      n[i] = size[i] and size[i] ~= -1 and size[i] or halved and i == count and 2 * (x.shape[d[i]] - 1) or x.shape[d[i]]
    end
    return d, n, a.norm
  end

  local function complex_several(back, default)
    return function(x, ...)
      local d, n, norm = several(x, true, false, default, ...)
      for i = 1, #d do x = fft_line(x, n[i], d[i] - 1, n[i], back, factor(norm, n[i], back)) end
      return x
    end
  end
  local function real_several(default)
    return function(x, ...)
      local d, n, norm = several(x, false, false, default, ...)
      local k = #d
      x = rfft_line(x, n[k], d[k] - 1, n[k] // 2 + 1, false, false, factor(norm, n[k], false))
      for i = 1, k - 1 do x = fft_line(x, n[i], d[i] - 1, n[i], false, factor(norm, n[i], false)) end
      return x
    end
  end
  local function half_several(default)
    return function(x, ...)
      local d, n, norm = several(x, true, true, default, ...)
      local k = #d
      for i = 1, k - 1 do x = fft_line(x, n[i], d[i] - 1, n[i], true, factor(norm, n[i], true)) end
      return irfft_line(x, n[k], d[k] - 1, n[k], false, true, factor(norm, n[k], true))
    end
  end

  local function several_errors(tail)
    local function x(a) return T { a, tail } end
    local function xs(a, b) return tail and T { a, b, tail } or T { a, b } end
    return {
      tail and { T { 2, 5 }, match = "x: expected complex numbers" } or { T {}, match = "x: expected a signal" },
      { xs(3, 4), { 2, 0 }, match = "size: expected 1 to" }, { xs(3, 4), { 2 }, { 0, 1 }, match = "size" },
      { xs(3, 4), {}, { 0, 2 }, match = "dims: expected dimensions in [-2, 1], got 2" },
      { xs(3, 4), {}, { 0, -2 }, match = "dims: dimension -2 is named twice" },
      { x(4), { 2, 2 }, match = "x: expected at least 2" },
      { xs(3, 0), match = "x: expected at least" }, { xs(3, 4), {}, {}, "none", match = "norm: expected one of" },
    }
  end
  local two_errors = { { T { 3, 4, 2 }, { 2, 2, 2 }, match = "size: expected two integers" } }

  for name, back in pairs { fft = false, ifft = true } do
    row(name .. "2", {
      cases = {
        { T { 3, 4, 2 } }, { T { 2, 3, 4, 2 }, { 4, 3 } }, { T { 2, 3, 4, 2 }, {}, { 0, -1 }, "ortho" },
        { T { 2, 3, 1, 2 }, { -1, 2 } },
        { T { 3, 2, 2 }, opts = { dims = { 1, 0 }, norm = "forward" } },
      },
      ref = complex_several(back, 2), broadcast = false, tol = 4e-6,
      errors = table.move(two_errors, 1, 1, 9, several_errors(2)),
    })
    row(name .. "n", {
      cases = {
        { T { 3, 4, 2 } }, { T { 5, 2 } }, { T { 2, 3, 4, 2 }, { 4, 3 } },
        { T { 2, 3, 2, 2 }, {}, { 0, -1 }, "ortho" },
        { T { 2, 3, 1, 2 }, {}, 1 }, { T { 2, 2, 3, 2 }, opts = { norm = "forward" } },
        { T { 2, 3, 2 }, { 3, 2 }, { 1, 0 } },
      },
      ref = complex_several(back), broadcast = false, tol = 4e-6, errors = several_errors(2),
    })
  end
  for name, default in pairs { rfft2 = 2, rfftn = false } do
    row(name, {
      cases = {
        { T { 3, 4 } }, { T { 2, 3, 4 }, { 4, 3 } }, { T { 2, 3, 4 }, {}, { 2, 0 }, "ortho" },
        { T { 2, 3, 1 }, { -1, 2 } },
        { T { 3, 5 }, opts = { norm = "forward" } }, { T { 2, 3, 2 } },
      },
      ref = real_several(default or nil), broadcast = false, tol = 4e-6, errors = several_errors(nil),
    })
  end
  for name, default in pairs { irfft2 = 2, irfftn = false } do
    row(name, {
      cases = {
        { T { 3, 4, 2 } }, { T { 2, 3, 4, 2 }, { 4, 3 } }, { T { 2, 3, 4, 2 }, {}, { 2, 0 }, "ortho" },
        { T { 2, 3, 2, 2 }, { -1, -1 } },
        { T { 3, 3, 2 }, opts = { norm = "forward" } }, { T { 2, 3, 2, 2 } },
      },
      ref = half_several(default or nil), broadcast = false, tol = 4e-6, errors = several_errors(2),
    })
  end

  -- ---- frequencies ----

  local function frequencies(n, d, half)
    if type(d) == "table" then d = d.d end
    local y = { shape = { half and n // 2 + 1 or n } }
    for k = 0, y.shape[1] - 1 do y[k + 1] = (half and k or (k + n // 2) % n - n // 2) / (n * (d or 1)) end
    return y
  end
  for name, half in pairs { fftfreq = false, rfftfreq = true } do
    row(name, {
      cases = {
        { 1 }, { 8 }, { 7, 0.5 }, { 6, -2 }, { 5, opts = { dtype = "f64" } }, { 4, opts = { dtype = "bf16", d = 3 } },
      },
      dtypes = { "f32" }, dtype = "f32",
      ref = function(n, d)
        local y = frequencies(n, d, half)
        y.dtype = type(d) == "table" and d.dtype or "f32"
        return y
      end,
      errors = {
        { 0, match = "n: expected 1 to" }, { 4, 0.0, match = "d: expected a distance" },
        { 4, 1, opts = { dtype = "i64" }, match = "dtype: expected a float" },
      },
    })
  end

  local function shifted(back)
    return function(x, ...)
      local a = named({ "dims", "complex" }, ...)
      local nd = #x.shape - (a.complex and 1 or 0)
      local dims = a.dims or {}
      if type(dims) == "number" then dims = { dims } end
      local by = {}
      for d = 1, nd do
        if #dims == 0 then by[d] = x.shape[d] // 2 end
      end
      for _, d in ipairs(dims) do by[T.dim(d, nd)] = x.shape[T.dim(d, nd)] // 2 end
      return T.from(list(x.shape), function(i)
        local from = list(i)
        for d, k in pairs(by) do from[d] = (i[d] + (back and k or -k)) % x.shape[d] end
        return T.at(x, from)
      end)
    end
  end
  for name, back in pairs { fftshift = false, ifftshift = true } do
    row(name, {
      cases = {
        { T { 5 } }, { T { 2, 3, 4 } }, { T { 4, 3 }, 1 }, { T { 5, 3, 2 }, {}, true },
        { T { 5, 3, 2 }, { -1 }, true }, { T {} },
        { T { 0, 3 } }, { T { 4, 7 }, opts = { dims = { 0 } } },
      },
      ref = shifted(back), broadcast = false,
      errors = {
        { T { 5, 3 }, 2, match = "dims: expected dimensions in [-2, 1]" },
        { T { 5, 3 }, {}, true, match = "x: expected complex" },
        { T { 5, 2 }, 1, true, match = "dims: expected dimensions in [-1, 0]" },
      },
    })
  end

  -- ---- cosine transforms ----

  local function cosine(back)
    return function(x, ...)
      local a = named({ "type", "n", "dim", "norm" }, ...)
      local third = ((a.type or 2) == 3) ~= back
      local norm = a.norm or "backward"
      local d = T.dim(a.dim or -1, #x.shape)
      local n = a.n and a.n ~= -1 and a.n or x.shape[d]
      return along(x, false, false, d, n, function(re, _, m)
        local y = {}
        for j = 0, n - 1 do
          local sum = 0.0
          for i = 0, math.min(m, n) - 1 do
            if third then
              local w = i > 0 and 2 or norm == "ortho" and math.sqrt(2) or 1
              sum = sum + w * re[i] * math.cos(math.pi * i * (2 * j + 1) / (2 * n))
            else
              local w = j == 0 and norm == "ortho" and math.sqrt(2) or 2
              sum = sum + w * re[i] * math.cos(math.pi * j * (2 * i + 1) / (2 * n))
            end
          end
          y[j] = norm == "ortho" and sum / math.sqrt(2 * n) or (norm == "backward") == back and sum / (2 * n) or sum
        end
        return y
      end)
    end
  end
  for name, back in pairs { dct = false, idct = true } do
    row(name, {
      cases = {
        { T { 2, 5 } }, { T { 2, 4 }, 3 }, { T { 6 }, 2, 4 }, { T { 2, 3 }, 3, 5, 0 },
        { T { 3, 4 }, 2, -1, -2, "ortho" },
        { T { 2, 5 }, 3, -1, 1, "ortho" }, { T { 2, 4 }, 3, -1, 1, "forward" },
        { T { 4 }, opts = { norm = "forward" } },
      },
      ref = cosine(back), broadcast = false, tol = 4e-6,
      errors = {
        { T {}, match = "x: expected a signal" }, { T { 3 }, 1, match = "type: expected 2 or 3, got 1" },
        { T { 3 }, 2, 0, match = "n: expected 1 to" }, { T { 3 }, 2, 3, 1, match = "dim" },
        { T { 3 }, 2, 3, 0, "none", match = "norm: expected one of" },
      },
    })
  end
end
