-- Rows of src/ops/linalg.c. References: elimination, Gram-Schmidt and Jacobi's rotations, as in any textbook.

return function(row, T)
  local from, at = T.from, T.at

  -- Numbers between -1 and 1 that are the same at every run.
  local state = 12345
  local function number()
    state = (state * 1103515245 + 12345) % 2147483648
    return state / 1073741824 - 1
  end

  -- [m, n] (of a batch) with singular values well apart from 0 and from each other
  local function well(m, n, batch)
    local v = {}
    for _ = 1, batch or 1 do
      for i = 1, m do
        for j = 1, n do v[#v + 1] = (number() + (i == j and 1 + i * 0.75 or 0)) * 0.5 end
      end
    end
    return v
  end

  local function positive(n, batch) -- symmetric and positive definite
    local v = {}
    for _ = 1, batch or 1 do
      local a = well(n, n)
      for i = 1, n do
        for j = 1, n do
          local sum = i == j and 0.25 or 0
          for k = 1, n do sum = sum + a[(i - 1) * n + k] * a[(j - 1) * n + k] end
          v[#v + 1] = sum
        end
      end
    end
    return v
  end

  -- fn(matrix as rows, which) for each matrix of x [..., m, n]
  local function each(x, fn)
    local nd = #x.shape
    local m, n, batch = x.shape[nd - 1], x.shape[nd], 1
    for d = 1, nd - 2 do batch = batch * x.shape[d] end
    for b = 0, batch - 1 do
      local a = {}
      for i = 1, m do
        a[i] = {}
        for j = 1, n do a[i][j] = x[b * m * n + (i - 1) * n + j] end
      end
      fn(a, b)
    end
    return m, n
  end

  local function put(to, a)
    for i = 1, #a do
      if type(a[i]) == "table" then table.move(a[i], 1, #a[i], #to + 1, to) else to[#to + 1] = a[i] end
    end
  end

  local function shaped(x, ...)
    local shape = table.move(x.shape, 1, #x.shape - 2, 1, {})
    for _, n in ipairs { ... } do shape[#shape + 1] = n end
    return { shape = shape }
  end

  local function turned(a, m, n)
    local t = {}
    for j = 1, n do
      t[j] = {}
      for i = 1, m do t[j][i] = a[i][j] end
    end
    return t
  end

  local function averaged(a, n)
    local s = {}
    for i = 1, n do
      s[i] = {}
      for j = 1, n do s[i][j] = (a[i][j] + a[j][i]) / 2 end
    end
    return s
  end

  -- ---- cholesky ----

  local function factor(a, n)
    local l = {}
    for i = 1, n do
      l[i] = {}
      for j = 1, n do l[i][j] = 0 end
    end
    for j = 1, n do
      for i = j, n do
        local sum = a[i][j]
        for k = 1, j - 1 do sum = sum - l[i][k] * l[j][k] end
        l[i][j] = i == j and math.sqrt(sum) or sum / l[j][j]
      end
    end
    return l
  end

  local function cholesky(average)
    return function(x, upper)
      local y = shaped(x, x.shape[#x.shape], x.shape[#x.shape])
      each(x, function(a)
        local n = #a
        local l = factor(average and averaged(a, n) or a, n)
        put(y, upper == true and turned(l, n, n) or l)
      end)
      return y
    end
  end

  local indefinite = { 1, 2, 2, 1 }
  row("cholesky", {
    cases = {
      { T { 1, 1, values = { 2 } } }, { T { 2, 4, 4, values = positive(4, 2) } }, { T { 2, 3, 3, values = positive(3, 2) }, true },
      { T { 3, 3, values = positive(3) } }, { T { 0, 0 } }, { T { 0, 2, 2 } }, { T { 20, 20, values = positive(20) }, grad = false },
      { T { 3, 3, values = { 4, 1, 0, 0.5, 3, 1, 0.25, 0, 5 } } }, { T { 5, 7, 7, values = positive(7, 5) }, grad = false },
    },
    ref = cholesky(true),
    tol = { f32 = 2e-5, f64 = 1e-11 },
    errors = {
      { T { 3 }, match = "x: expected [..., n, n]" }, { T { 2, 3 }, match = "expected square matrices [..., n, n], got [2, 3]" },
      { T { 2, 2, values = indefinite }, match = "matrix 0 is not positive definite: its leading minor of order 2" },
    },
  })
  row("cholesky_factor", {
    cases = { { T { 2, 3, 3, values = positive(3, 2) } }, { T { 0, 0 } } }, -- only one triangle is read
    ref = cholesky(false),
    grad = "through cholesky: it takes x as symmetric, which no difference in one element keeps",
    tol = { f32 = 2e-5, f64 = 1e-11 },
  })

  -- ---- systems ----

  local function eliminate(a, b, n, m) -- a x = b in place, with pivots; sign and logarithm of the determinant
    local sign, log = 1, 0
    for k = 1, n do
      local best = k
      for i = k + 1, n do
        if math.abs(a[i][k]) > math.abs(a[best][k]) then best = i end
      end
      if best ~= k then a[k], a[best], b[k], b[best], sign = a[best], a[k], b[best], b[k], -sign end
      if a[k][k] < 0 then sign = -sign end
      log = log + math.log(math.abs(a[k][k]))
      for i = k + 1, n do
        local f = a[i][k] / a[k][k]
        for j = k, n do a[i][j] = a[i][j] - f * a[k][j] end
        for j = 1, m do b[i][j] = b[i][j] - f * b[k][j] end
      end
    end
    for i = n, 1, -1 do
      for j = 1, m do
        for k = i + 1, n do b[i][j] = b[i][j] - a[i][k] * b[k][j] end
        b[i][j] = b[i][j] / a[i][i]
      end
    end
    return sign, log
  end

  -- The batches of a and b broadcast; b may be a vector. change(a): what is really solved with.
  local function system(change)
    return function(a, b, ...)
      local more = { ... }
      local vector = #b.shape == 1
      if vector then
        b = table.move(b, 1, #b, 1, { shape = { b.shape[1], 1 } })
      end
      local n, na, nb = a.shape[#a.shape], #a.shape, #b.shape
      local nd = math.max(na, nb)
      local left = more[2] ~= false
      local m = b.shape[left and nb or nb - 1]
      local shape = {}
      for d = 1, nd - 2 do shape[d] = math.max((a.shape[d - nd + na] or 1), (b.shape[d - nd + nb] or 1)) end
      local y = { shape = table.move(shape, 1, #shape, 1, {}) }
      y.shape[#shape + 1], y.shape[#shape + 2] = left and n or m, left and m or n
      local batch = from(#shape > 0 and shape or { 1 }, function(index)
        local function matrix(x, count, rows, columns)
          local w = {}
          for i = 0, rows - 1 do
            w[i + 1] = {}
            for j = 0, columns - 1 do
              local where = {}
              for d = 1, count - 2 do where[d] = x.shape[d] == 1 and 0 or index[d + nd - count] end
              where[count - 1], where[count] = i, j
              w[i + 1][j + 1] = at(x, where)
            end
          end
          return w
        end
        local p = matrix(a, na, n, n)
        if change then p = change(p, n, more[1] == true, more[3] == true) end
        local q
        if left then
          q = matrix(b, nb, n, m)
          eliminate(p, q, n, m)
        else
          q = turned(matrix(b, nb, m, n), m, n)
          eliminate(turned(p, n, n), q, n, m)
          q = turned(q, n, m)
        end
        put(y, q)
        return 0
      end)
      assert(batch)
      if vector then table.remove(y.shape) end
      return y
    end
  end

  local function triangle(p, n, upper, unit)
    for i = 1, n do
      for j = 1, n do
        if (j > i and not upper) or (j < i and upper) then p[i][j] = 0 end
        if i == j and unit then p[i][j] = 1 end
      end
    end
    return p
  end

  row("solve", {
    cases = {
      { T { 3, 3, values = well(3, 3) }, T { 3, 2 } }, { T { 3, 3, values = well(3, 3) }, T { 3 } }, { T { 1, 1, values = { 2 } }, T { 1, 1 } },
      { T { 2, 3, 3, values = well(3, 3, 2) }, T { 2, 3, 2 } }, { T { 2, 3, 3, values = well(3, 3, 2) }, T { 3, 1 } }, { T { 3, 3, values = well(3, 3) }, T { 2, 3, 2 } },
      { T { 2, 3, 3, values = well(3, 3, 2) }, T { 3 } }, { T { 0, 0 }, T { 0, 2 } }, { T { 3, 3, values = well(3, 3) }, T { 3, 0 } },
      { T { 40, 40, values = well(40, 40) }, T { 40, 3 }, grad = false },
      { T { 3, 3, values = { 0, 1, 0, 0, 0, 1, 1, 0, 0 } }, T { 3, 2 } },
    },
    ref = system(),
    tol = { f32 = 2e-5, f64 = 1e-11 },
    errors = {
      { T { 2, 3 }, T { 3, 1 }, match = "a: expected square matrices" }, { T { 3, 3 }, T { 2, 1 }, match = "b: expected [..., 3, m]" },
      { T { 3 }, T { 3, 1 }, match = "a: expected [..., n, n]" }, { T { 2, 3, 3 }, T { 3, 3, 1 }, match = "do not broadcast" },
      { T { 2, 2, values = { 1, 2, 2, 4 } }, T { 2, 1 }, match = "matrix 0 is singular: pivot 1 is zero" },
    },
  })

  -- ---- LU ----

  -- l (without its ones) and u of a [m, n] in place; the row of a that each row is
  local function lu_factor(a, m, n)
    local order = {}
    for i = 1, m do order[i] = i - 1 end
    for k = 1, math.min(m, n) do
      local best = k
      for i = k + 1, m do
        if math.abs(a[i][k]) > math.abs(a[best][k]) then best = i end
      end
      a[k], a[best], order[k], order[best] = a[best], a[k], order[best], order[k]
      for i = k + 1, m do
        if a[k][k] ~= 0 then a[i][k] = a[i][k] / a[k][k] end
        for j = k + 1, n do a[i][j] = a[i][j] - a[i][k] * a[k][j] end
      end
    end
    return order
  end

  local turned_rows = { 0.1, 0.4, -0.3, 0.9, -0.2, 0.6, -0.7, 0.5, 0.3 } -- each step swaps rows
  local lu_cases = {
    { T { 3, 3, values = well(3, 3) } }, { T { 3, 3, values = turned_rows } }, { T { 2, 3, 3, values = well(3, 3, 2) } },
    { T { 4, 2, values = well(4, 2) } }, { T { 2, 4, values = well(2, 4) } }, { T { 2, 3, 2, values = well(3, 2, 2) } },
    { T { 1, 1, values = { -2 } } }, { T { 0, 3 } }, { T { 3, 0 } }, { T { 0, 2, 2 } }, { T { 2, 0, 2 } },
    { T { 2, 2, values = { 1, 2, 2, 4 } }, grad = false }, { T { 40, 40, values = well(40, 40) }, grad = false },
    { T { 40, 28, values = well(40, 28) }, grad = false }, { T { 2, 7, 33, values = well(7, 33, 2) }, grad = false },
  }
  row("lu_factor", {
    cases = lu_cases,
    ref = function(x)
      local nd = #x.shape
      local m, n = x.shape[nd - 1], x.shape[nd]
      local y, order = shaped(x, m, n), shaped(x, m)
      order.dtype = "i64"
      each(x, function(a)
        put(order, lu_factor(a, m, n))
        put(y, a)
      end)
      return y, order
    end,
    dtype = function(dtype, i) return i == 2 and "i64" or dtype end,
    tol = { f32 = 2e-5, f64 = 1e-11 },
    errors = { { T { 3 }, match = "x: expected [..., m, n]" } },
    big = function(ty) return ty.lu_factor(ty.randn(20, 40, 40)) end,
  })
  row("lu", {
    cases = lu_cases,
    ref = function(x)
      local nd = #x.shape
      local m, n = x.shape[nd - 1], x.shape[nd]
      local least = math.min(m, n)
      local p, l, u = shaped(x, m, m), shaped(x, m, least), shaped(x, least, n)
      each(x, function(a)
        local order = lu_factor(a, m, n)
        for i = 0, m - 1 do
          for j = 1, m do p[#p + 1] = order[j] == i and 1 or 0 end
        end
        for i = 1, m do
          for j = 1, least do l[#l + 1] = i == j and 1 or i > j and a[i][j] or 0 end
          for j = 1, i <= least and n or 0 do u[#u + 1] = j >= i and a[i][j] or 0 end
        end
      end)
      return p, l, u
    end,
    tol = { f32 = 2e-5, f64 = 1e-11 },
    errors = { { T { 3 }, match = "x: expected [..., m, n]" } },
  })

  -- a x = b of the a that lu and order stand for, or a' x = b
  local function lu_solve(lu, order, b, adjoint)
    if type(adjoint) == "table" then adjoint = adjoint.adjoint end
    local n, batch = lu.shape[#lu.shape], #order / lu.shape[#lu.shape]
    local a = { shape = lu.shape }
    for w = 0, batch - 1 do
      for i = 1, n do
        local row_of = order[w * n + i]
        for j = 1, n do
          local sum = 0
          for k = 1, math.min(i, j) do
            local l = k == i and 1 or lu[(w * n + i - 1) * n + k]
            sum = sum + l * lu[(w * n + k - 1) * n + j]
          end
          a[(w * n + (adjoint and j - 1 or row_of)) * n + (adjoint and row_of or j - 1) + 1] = sum
        end
      end
    end
    return system()(a, b)
  end
  local orders = T { 2, 3, dtype = "i64", values = { 2, 0, 1, 1, 0, 2 } }
  local permuted = T { 3, dtype = "i64", values = { 2, 0, 1 } }
  row("lu_solve", {
    cases = {
      { T { 3, 3, values = well(3, 3) }, permuted, T { 3, 2 } }, { T { 3, 3, values = well(3, 3) }, permuted, T { 3 } },
      { T { 3, 3, values = well(3, 3) }, permuted, T { 3, 2 }, true },
      { T { 2, 3, 3, values = well(3, 3, 2) }, orders, T { 2, 3, 1 }, true },
      { T { 2, 3, 3, values = well(3, 3, 2) }, orders, T { 2, 3, 2 } },
      { T { 2, 3, 3, values = well(3, 3, 2) }, orders, T { 3, 1 } },
      { T { 2, 3, 3, values = well(3, 3, 2) }, orders, T { 3, 2, 3, 1 }, grad = false },
      { T { 3, 3, values = well(3, 3) }, permuted, T { 2, 3, 2 }, opts = { adjoint = true } },
      { T { 0, 0 }, T { 0, dtype = "i64" }, T { 0, 2 } }, { T { 3, 3, values = well(3, 3) }, permuted, T { 3, 0 } },
    },
    ref = lu_solve,
    tol = { f32 = 2e-5, f64 = 1e-11 },
    errors = {
      { T { 2, 3 }, permuted, T { 3, 1 }, match = "lu: expected square matrices" },
      { T { 3, 3 }, T { 2, dtype = "i64", values = { 0, 1 } }, T { 3, 1 }, match = "permutation: expected lu_factor's" },
      { T { 3, 3 }, T { 3 }, T { 3, 1 }, match = "permutation: expected lu_factor's" },
      { T { 3, 3 }, T { 3, dtype = "i64", values = { 0, 3, 1 } }, T { 3, 1 }, match = "out of range" },
      { T { 3, 3 }, permuted, T { 2, 1 }, match = "b: expected [..., 3, m]" },
    },
  })
  row("lu_system", {
    cases = {
      { T { 2, 3, 3, values = well(3, 3, 2) }, T { 2, 3, 2 } }, { T { 3, 3, values = turned_rows }, T { 3, 1 } },
      { T { 0, 0 }, T { 0, 2 } }, { T { 40, 40, values = well(40, 40) }, T { 40, 3 }, grad = false },
    },
    ref = function(a, b)
      local y, order = shaped(a, a.shape[#a.shape], a.shape[#a.shape]), shaped(a, a.shape[#a.shape])
      order.dtype = "i64"
      each(a, function(p)
        put(order, lu_factor(p, #p, #p))
        put(y, p)
      end)
      return system()(a, b), y, order
    end,
    dtype = function(dtype, i) return i == 3 and "i64" or dtype end,
    grad = "through solve: that of the factors is lu_factor's",
    tol = { f32 = 2e-5, f64 = 1e-11 },
  })

  local triangular_cases = {
    { T { 3, 3, values = well(3, 3) }, T { 3, 2 } }, { T { 3, 3, values = well(3, 3) }, T { 3, 2 }, true },
    { T { 2, 3, 3, values = well(3, 3, 2) }, T { 3, 2 } }, { T { 0, 0 }, T { 0, 2 } }, { T { 40, 40, values = well(40, 40) }, T { 40, 3 }, grad = false },
  }
  local outer = table.move(triangular_cases, 1, #triangular_cases, 1, {})
  for _, case in ipairs {
    { T { 3, 3, values = well(3, 3) }, T { 3 } }, { T { 3, 3, values = well(3, 3) }, T { 2, 3 }, true, false },
    { T { 2, 3, 3, values = well(3, 3, 2) }, T { 2, 2, 3 }, false, false }, { T { 3, 3, values = well(3, 3) }, T { 3, 2 }, true, true, true },
  } do outer[#outer + 1] = case end
  row("solve_triangular", {
    cases = outer,
    ref = system(triangle),
    tol = { f32 = 2e-5, f64 = 1e-11 },
    errors = {
      { T { 2, 3 }, T { 3, 1 }, match = "a: expected square matrices" }, { T { 3, 3 }, T { 2, 1 }, match = "b: expected [..., 3, m]" },
      { T { 3, 3 }, T { 3 }, false, false, match = "b: expected [..., m, n] when a is on the right" },
    },
  })
  for _, case in ipairs {
    { T { 3, 3, values = well(3, 3) }, T { 3, 2 }, true, true }, { T { 3, 3, values = well(3, 3) }, T { 3, 2 }, false, true },
  } do triangular_cases[#triangular_cases + 1] = case end
  row("triangular_solve", {
    cases = triangular_cases,
    ref = function(a, b, upper, unit) return system(triangle)(a, b, upper, true, unit) end,
    tol = { f32 = 2e-5, f64 = 1e-11 },
  })

  row("inverse", {
    cases = { { T { 3, 3, values = well(3, 3) } }, { T { 2, 2, 2, values = well(2, 2, 2) } }, { T { 0, 0 } } },
    ref = function(x)
      local n = x.shape[#x.shape]
      return system()(x, from({ n, n }, function(index) return index[1] == index[2] and 1 or 0 end))
    end,
    tol = { f32 = 2e-5, f64 = 1e-11 },
    errors = { { T { 2, 3 }, match = "x: expected square matrices" } },
  })

  row("slogdet", {
    cases = {
      { T { 3, 3, values = well(3, 3) } }, { T { 2, 3, 3, values = well(3, 3, 2) } }, { T { 2, 2, values = { 0, 1, 1, 0 } } },
      { T { 0, 0 } }, { T { 0, 2, 2 } }, { T { 1, 1, values = { -3 } } }, { T { 2, 2, values = { 1, 2, 2, 4 } }, grad = false },
    },
    ref = function(x)
      local sign, log = shaped(x), shaped(x)
      each(x, function(a)
        local b = {}
        for i = 1, #a do b[i] = {} end
        local s, l = eliminate(a, b, #a, 0)
        if l == -T.inf then s = 0 end
        sign[#sign + 1], log[#log + 1] = s, l
      end)
      return sign, log
    end,
    gradient_of = { 2 },
    tol = { f32 = 2e-5, f64 = 1e-11 },
    errors = { { T { 2, 3 }, match = "x: expected square matrices" } },
  })

  -- ---- qr ----

  local function gram_schmidt(a, m, n)
    local k = math.min(m, n)
    local q, r = {}, {}
    for i = 1, m do q[i] = {} end
    for i = 1, k do
      r[i] = {}
      for j = 1, n do r[i][j] = 0 end
    end
    for j = 1, k do
      local v = {}
      for i = 1, m do v[i] = a[i][j] end
      for _ = 1, 2 do
        for l = 1, j - 1 do
          local dot = 0
          for i = 1, m do dot = dot + q[i][l] * v[i] end
          r[l][j] = r[l][j] + dot
          for i = 1, m do v[i] = v[i] - dot * q[i][l] end
        end
      end
      local norm = 0
      for i = 1, m do norm = norm + v[i] * v[i] end
      r[j][j] = math.sqrt(norm)
      for i = 1, m do q[i][j] = v[i] / r[j][j] end
    end
    for j = k + 1, n do
      for l = 1, k do
        for i = 1, m do r[l][j] = r[l][j] + q[i][l] * a[i][j] end
      end
    end
    return q, r
  end

  -- Columns that make the first k of q [m] a basis, by the unit vectors of what is left over.
  local function completed(q, m, k)
    for c = k + 1, m do
      local best, most
      for e = 1, m do
        local v = {}
        for i = 1, m do v[i] = i == e and 1 or 0 end
        for _ = 1, 2 do
          for l = 1, c - 1 do
            local dot = 0
            for i = 1, m do dot = dot + q[i][l] * v[i] end
            for i = 1, m do v[i] = v[i] - dot * q[i][l] end
          end
        end
        local size = 0
        for i = 1, m do size = size + v[i] * v[i] end
        if not most or size > most then best, most = v, size end
      end
      for i = 1, m do q[i][c] = best[i] / math.sqrt(most) end
    end
  end

  local function mode_of(mode) return type(mode) == "table" and mode.mode or mode or "reduced" end
  row("qr", {
    cases = {
      { T { 3, 3, values = well(3, 3) } }, { T { 4, 2, values = well(4, 2) } }, { T { 2, 4, values = well(2, 4) } },
      { T { 2, 3, 2, values = well(3, 2, 2) } }, { T { 0, 3 } }, { T { 3, 0 } }, { T { 1, 1, values = { -2 } } },
      { T { 33, 20, values = well(33, 20) }, grad = false }, { T { 50, 70, values = well(50, 70) }, grad = false },
      { T { 2, 70, 41, values = well(70, 41, 2) }, grad = false },
      { T { 3, 3, values = well(3, 3) }, "complete" }, { T { 2, 4, values = well(2, 4) }, opts = { mode = "complete" } },
      { T { 3, 2, values = well(3, 2) }, "complete", grad = false }, { T { 2, 0 }, "complete", grad = false },
      { T { 35, 34, values = well(35, 34) }, "complete", grad = false },
      { T { 2, 3, 2, values = well(3, 2, 2) }, "r", grad = false }, { T { 40, 35, values = well(40, 35) }, "r", grad = false },
      { T { 2, 3, values = { 1e25, 0, 2e25, 0, -1e-25, 1e-25 } }, dtypes = { "f32", "f64" }, grad = false },
    },
    ref = function(x, mode)
      mode = mode_of(mode)
      local nd = #x.shape
      local m, n = x.shape[nd - 1], x.shape[nd]
      local least = math.min(m, n)
      local k = mode == "complete" and m or least
      local q, r = shaped(x, m, mode == "r" and 0 or k), shaped(x, k, n)
      each(x, function(a)
        local p, s = gram_schmidt(a, m, n)
        completed(p, m, mode == "complete" and least or m)
        for i = least + 1, k do
          s[i] = {}
          for j = 1, n do s[i][j] = 0 end
        end
        if mode ~= "r" then put(q, p) end
        put(r, s)
      end)
      return q, r
    end,
    tol = { f32 = 2e-5, f64 = 1e-11 },
    errors = {
      { T { 3 }, match = "x: expected [..., m, n]" },
      { T { 2, 2 }, "full", match = 'mode: expected "reduced", "complete" or "r", got "full"' },
    },
    big = function(ty) return ty.qr(ty.randn(300, 200)) end,
  })

  -- ---- svd, by one-sided Jacobi; eigh, by Jacobi ----

  local function signed(columns) -- by the largest of each
    local signs = {}
    for j, v in ipairs(columns) do
      local most, sign = 0, 1
      for _, e in ipairs(v) do
        if math.abs(e) > most then most, sign = math.abs(e), e < 0 and -1 or 1 end
      end
      signs[j] = sign
    end
    return signs
  end

  local function svd(a, m, n) -- m >= n: u as columns, s, v as columns
    local u, v = turned(a, m, n), {}
    for j = 1, n do
      v[j] = {}
      for i = 1, n do v[j][i] = i == j and 1 or 0 end
    end
    for _ = 1, 60 do
      for p = 1, n - 1 do
        for q = p + 1, n do
          local x, y, z = 0, 0, 0
          for i = 1, m do
            x, y, z = x + u[p][i] ^ 2, y + u[q][i] ^ 2, z + u[p][i] * u[q][i]
          end
          if z ~= 0 then
            local t = (y - x) / (2 * z)
            t = (t >= 0 and 1 or -1) / (math.abs(t) + math.sqrt(1 + t * t))
            local c = 1 / math.sqrt(1 + t * t)
            local s = c * t
            for _, w in ipairs { u, v } do
              for i = 1, #w[p] do w[p][i], w[q][i] = c * w[p][i] - s * w[q][i], s * w[p][i] + c * w[q][i] end
            end
          end
        end
      end
    end
    local order, size = {}, {}
    for j = 1, n do
      local norm = 0
      for i = 1, m do norm = norm + u[j][i] ^ 2 end
      order[j], size[j] = j, math.sqrt(norm)
    end
    table.sort(order, function(p, q) return size[p] > size[q] end)
    local us, s, vs = {}, {}, {}
    for k, j in ipairs(order) do
      us[k], s[k], vs[k] = {}, size[j], v[j]
      for i = 1, m do us[k][i] = u[j][i] / size[j] end
    end
    return us, s, vs
  end

  local svd_cases = {
    { T { 3, 3, values = well(3, 3) } }, { T { 4, 2, values = well(4, 2) } }, { T { 2, 4, values = well(2, 4) } },
    { T { 2, 3, 2, values = well(3, 2, 2) } }, { T { 0, 3 } }, { T { 3, 0 } }, { T { 1, 1, values = { -2 } } },
    { T { 12, 9, values = well(12, 9) }, grad = false },
  }
  local function all_svd(x)
    local nd = #x.shape
    local m, n = x.shape[nd - 1], x.shape[nd]
    local k = math.min(m, n)
    local u, s, vh = shaped(x, m, k), shaped(x, k), shaped(x, k, n)
    each(x, function(a)
      local us, ss, vs
      if m >= n then us, ss, vs = svd(a, m, n) else vs, ss, us = svd(turned(a, m, n), n, m) end
      for j, sign in ipairs(signed(us)) do
        for i = 1, m do us[j][i] = us[j][i] * sign end
        for i = 1, n do vs[j][i] = vs[j][i] * sign end
      end
      put(u, turned(us, k, m))
      put(s, ss)
      put(vh, vs)
    end)
    return u, s, vh
  end
  row("svd", {
    cases = svd_cases,
    ref = all_svd,
    tol = { f32 = 3e-5, f64 = 1e-10 },
    errors = {
      { T { 3 }, match = "x: expected [..., m, n]" },
      { T { 2, 2, values = { 1, T.nan, 0, 1 } }, match = "matrix 0 holds a number that is not finite" },
    },
  })

  row("pinv", {
    cases = {
      { T { 3, 3, values = well(3, 3) } }, { T { 4, 2, values = well(4, 2) } }, { T { 2, 4, values = well(2, 4) } }, { T { 0, 3 } }, { T { 3, 0 } },
      { T { 2, 2, values = { 1, 2, 2, 4 } }, 1e-4, grad = false },
    },
    ref = function(x, rtol)
      local nd = #x.shape
      local m, n = x.shape[nd - 1], x.shape[nd]
      local y = shaped(x, n, m)
      local u, s, vh = all_svd(x)
      each(x, function(_, b)
        local k = math.min(m, n)
        for i = 0, n - 1 do
          for j = 0, m - 1 do
            local sum = 0
            for l = 0, k - 1 do
              local size = s[b * k + l + 1]
              if size > (rtol or 1e-6) * s[b * k + 1] then
                sum = sum + vh[(b * k + l) * n + i + 1] * u[(b * m + j) * k + l + 1] / size
              end
            end
            y[#y + 1] = sum
          end
        end
      end)
      return y
    end,
    tol = { f32 = 3e-5, f64 = 1e-10 },
    errors = { { T { 3 }, match = "x: expected [..., m, n]" }, { T { 2, 2 }, -1, match = "rtol: expected" } },
  })

  row("lstsq", {
    cases = {
      { T { 4, 2, values = well(4, 2) }, T { 4, 2 } }, { T { 4, 2, values = well(4, 2) }, T { 4 } }, { T { 3, 3, values = well(3, 3) }, T { 3, 1 } },
      { T { 2, 4, values = well(2, 4) }, T { 2, 2 } }, { T { 2, 4, 3, values = well(4, 3, 2) }, T { 2, 4, 1 } },
      { T { 4, 2, values = well(4, 2) }, T { 4, 2 }, 0 }, { T { 3, 2, values = { 1, 2, 2, 4, 3, 6 } }, T { 3 }, 1e-3, grad = false },
      { T { 2, 3, values = { 1, 2, 3, 2, 4, 6 } }, T { 2, 2 }, opts = { rtol = 1e-3 }, grad = false },
    },
    ref = function(a, b, rtol) -- by the pseudo-inverse
      if type(rtol) == "table" then rtol = rtol.rtol end
      local nd = #a.shape
      local m, n = a.shape[nd - 1], a.shape[nd]
      local vector = #b.shape == 1
      local columns = vector and 1 or b.shape[#b.shape]
      local x = shaped(a, n, columns)
      local u, s, vh = all_svd(a)
      local k = math.min(m, n)
      each(a, function(_, p)
        for i = 0, n - 1 do
          for j = 0, columns - 1 do
            local sum = 0
            for l = 0, k - 1 do
              local dot = 0
              if s[p * k + l + 1] <= (rtol or 0) * s[p * k + 1] then break end
              for r = 0, m - 1 do
                dot = dot + u[(p * m + r) * k + l + 1] * b[((#b.shape > 2 and p or 0) * m + r) * columns + j + 1]
              end
              sum = sum + vh[(p * k + l) * n + i + 1] * dot / s[p * k + l + 1]
            end
            x[#x + 1] = sum
          end
        end
      end)
      if vector then table.remove(x.shape) end
      return x
    end,
    tol = { f32 = 3e-5, f64 = 1e-10 },
    errors = { { T { 3 }, T { 3 }, match = "a: expected [..., m, n]" }, { T { 3, 2 }, T { 2, 1 }, match = "b: expected [..., 3, m]" } },
  })

  local function eigh(average)
    return function(x)
      local n = x.shape[#x.shape]
      local values, vectors = shaped(x, n), shaped(x, n, n)
      each(x, function(a)
        a = average and averaged(a, n) or a
        local v = {}
        for i = 1, n do
          v[i] = {}
          for j = 1, n do v[i][j] = i == j and 1 or 0 end
        end
        for _ = 1, 60 do
          for p = 1, n - 1 do
            for q = p + 1, n do
              if a[p][q] ~= 0 then
                local t = (a[q][q] - a[p][p]) / (2 * a[p][q])
                t = (t >= 0 and 1 or -1) / (math.abs(t) + math.sqrt(1 + t * t))
                local c = 1 / math.sqrt(1 + t * t)
                local s = c * t
                for i = 1, n do a[i][p], a[i][q] = c * a[i][p] - s * a[i][q], s * a[i][p] + c * a[i][q] end
                for i = 1, n do
                  a[p][i], a[q][i] = c * a[p][i] - s * a[q][i], s * a[p][i] + c * a[q][i]
                  v[p][i], v[q][i] = c * v[p][i] - s * v[q][i], s * v[p][i] + c * v[q][i]
                end
              end
            end
          end
        end
        local order = {}
        for i = 1, n do order[i] = i end
        table.sort(order, function(p, q) return a[p][p] < a[q][q] end)
        local columns = {}
        for k, i in ipairs(order) do
          values[#values + 1] = a[i][i]
          columns[k] = v[i]
        end
        for j, sign in ipairs(signed(columns)) do
          for i = 1, n do columns[j][i] = columns[j][i] * sign end
        end
        put(vectors, turned(columns, n, n))
      end)
      return values, vectors
    end
  end

  local function one_triangle(x, side)
    if type(side) == "table" then side = side.triangle end
    if side ~= "lower" and side ~= "upper" then return eigh(true)(x) end
    local n, y = x.shape[#x.shape], { shape = x.shape }
    for k = 0, #x - 1 do
      local i, j = k // n % n, k % n
      local taken = (side == "lower") == (i >= j)
      y[k + 1] = x[taken and k + 1 or k - i * n - j + j * n + i + 1]
    end
    return eigh(false)(y)
  end
  row("eigh", {
    cases = {
      { T { 3, 3, values = well(3, 3) }, "lower" }, { T { 2, 3, 3, values = well(3, 3, 2) }, opts = { triangle = "upper" } },
      { T { 3, 3, values = well(3, 3) } }, { T { 2, 3, 3, values = positive(3, 2) } }, { T { 0, 0 } }, { T { 1, 1 } }, { T { 0, 2, 2 } },
      { T { 11, 11, values = positive(11) }, grad = false },
    },
    ref = one_triangle,
    tol = { f32 = 3e-5, f64 = 1e-10 },
    errors = {
      { T { 2, 3 }, match = "x: expected square matrices" },
      { T { 2, 2 }, "left", match = 'triangle: expected "both", "lower" or "upper", got "left"' },
      { T { 2, 2, values = { 1, T.inf, 0, 1 } }, match = "matrix 0 holds a number that is not finite" },
    },
  })
  row("eigh_symmetric", {
    cases = { { T { 2, 3, 3, values = positive(3, 2) } }, { T { 0, 0 } } },
    ref = eigh(false),
    grad = "through eigh: it takes x as symmetric, which no difference in one element keeps",
    tol = { f32 = 3e-5, f64 = 1e-10 },
  })
end
