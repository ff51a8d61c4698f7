-- Rows of src/ops/complex.c.

return function(row, T)
  local function list(t) return table.move(t, 1, #t, 1, {}) end

  -- f(re, im) of every complex number of x; one value, or two, which become the parts of a number.
  local function each(x, f, pairs_out)
    local shape = list(x.shape)
    if not pairs_out then shape[#shape] = nil end
    local y = { shape = shape }
    for i = 1, #x, 2 do
      local a, b = f(x[i], x[i + 1])
      y[#y + 1] = a
      if pairs_out then y[#y + 1] = b end
    end
    return y
  end

  -- The same of two arrays of numbers that broadcast.
  local function both(x, y, f)
    local shape = T.broadcast(x, y)
    shape[#shape + 1] = 2
    return T.from(shape, function(i)
      local at = list(i)
      at[#at] = nil
      local a, b = f(T.at(x, at), T.at(y, at))
      return i[#i] == 0 and a or b
    end)
  end

  local no_pairs = { T { 3, 3 }, match = "x: expected complex numbers, [..., 2]" }
  local errors = { no_pairs, { T {}, match = "x: expected complex numbers, [..., 2]" } }

  row("complex", {
    cases = { { T { 3 }, T { 3 } }, { T { 2, 3 } }, { T {}, T {} }, { T { 2, 1 }, T { 3 } }, { T { 0, 2 }, T { 2 } } },
    ref = function(re, im) return both(re, im or 0.0, function(a, b) return a, b end) end,
    errors = {
      { T { 2 }, T { 3 }, match = "broadcast" },
      { T { 2 }, T { 2, dtype = "i64" }, match = "im: expected a float tensor" },
      { T { 1, 1, 1, 1, 1, 1, 1, 1 }, match = "re: expected at most 7 dimensions" },
    },
  })

  row("complex_mul", {
    cases = {
      { T { 3, 2 }, T { 3, 2 } }, { T { 2 }, T { 2 }, true }, { T { 4, 3, 2 }, T { 3, 2 } },
      { T { 3, 2 }, T { 4, 3, 2 }, true },
      { T { 4, 1, 2 }, T { 3, 2 } }, { T { 2 }, T { 2, 3, 2 } },
      { T { 4, 3, 2 }, T { 4, 1, 2 }, opts = { conj = true } },
      { T { 0, 2 }, T { 2 } }, { T { 2, 1, 2 }, T { 1, 3, 2 } }, { T { 3, 2 }, T { 1, 3, 2 }, true },
    },
    ref = function(a, b, conj)
      if type(conj) == "table" then conj = conj.conj end
      local shape = T.broadcast(a, b)
      return T.from(shape, function(i)
        local at = list(i)
        local function part(x, k)
          at[#at] = k
          return T.at(x, at)
        end
        local ar, ai, br, bi = part(a, 0), part(a, 1), part(b, 0), part(b, 1)
        if conj then bi = -bi end
        return i[#i] == 0 and ar * br - ai * bi or ar * bi + ai * br
      end)
    end,
    broadcast = false,
    errors = {
      { T { 3, 3 }, T { 3, 2 }, match = "a: expected complex numbers" },
      { T { 3, 2 }, T { 3, 1 }, match = "b: expected complex" },
      { T { 3, 2 }, T { 4, 2 }, match = "broadcast" },
      { T { 3, 2 }, T { 3, 2, dtype = "i64" }, match = "b: expected a float tensor" },
    },
    big = function(ty) return ty.complex_mul(ty.randn(30, 1000, 2), ty.randn(1000, 2)) end,
  })

  row("complex_conj", {
    cases = { { T { 3, 2 } }, { T { 2 } }, { T { 0, 2 } }, { T { 2, 3, 2 } } },
    ref = function(x) return each(x, function(a, b) return a, -b end, true) end,
    broadcast = false, errors = errors,
  })

  row("complex_abs", {
    cases = {
      { T { 3, 2, avoid = { 0 } } }, { T { 2, avoid = { 0 } } }, { T { 0, 2 } }, { T { 2, 3, 2, avoid = { 0 } } },
      { T { 4, 2, values = { 0, 0, 0, -3, T.inf, 1, T.nan, 1 } }, grad = false },
      { T { 3, 2, values = { 3e30, 4e30, -3e-30, 4e-30, 1e-35, 0 } }, grad = false, dtypes = { "f32", "f64" } },
      { T { 3, 2, values = { 3e300, 4e300, -3e-300, 4e-300, 1e-320, 0 } }, grad = false, dtypes = { "f64" } },
    },
    ref = function(x)
      return each(x, function(a, b)
        local m = math.max(math.abs(a), math.abs(b))
        if m == 0 or m == math.huge or a ~= a or b ~= b then return a ~= a and a or b ~= b and b or m end
        return m * math.sqrt((a / m) ^ 2 + (b / m) ^ 2)
      end)
    end,
    strict = true, broadcast = false, errors = errors,
    big = function(ty) return ty.complex_abs(ty.randn(30, 1000, 2)) end,
  })

  local function angle(a, b) return math.atan(b, a) end

  row("complex_angle", {
    cases = {
      { T { 3, 2, avoid = { 0 } } }, { T { 0, 2 } }, { T { 2, 3, 2, avoid = { 0 } } },
      { T { 4, 2, values = { 1, 0, 0, 1, -1, 0, 0, -2 } }, grad = false },
    },
    ref = function(x) return each(x, angle) end,
    broadcast = false, errors = errors, tol = 4e-6,
  })

  row("polar", {
    cases = { { T { 3 }, T { 3 } }, { T { 2, 1 }, T { 3 } }, { T {}, T { 2 } }, { T { 0 }, T { 0 } } },
    ref = function(size, a) return both(size, a, function(r, t) return r * math.cos(t), r * math.sin(t) end) end,
    tol = 4e-6,
    errors = {
      { T { 2 }, T { 3 }, match = "broadcast" },
      { T { 2 }, T { 2, dtype = "i64" }, match = "angle: expected a float tensor" },
      { T { 1, 1, 1, 1, 1, 1, 1, 1 }, T {}, match = "abs: expected at most 7 dimensions" },
    },
  })

  row("complex_exp", {
    cases = { { T { 3, 2 } }, { T { 2 } }, { T { 0, 2 } } },
    ref = function(x)
      return each(x, function(a, b) return math.exp(a) * math.cos(b), math.exp(a) * math.sin(b) end, true)
    end,
    broadcast = false, errors = errors, tol = 4e-6,
  })
end
