-- Rows of src/ops/linalg.c: Cholesky, systems, LU, triangles. References: elimination, as in any textbook.

local matrices = require "matrices"

local each, put, shaped, turned, averaged = matrices.each, matrices.put, matrices.shaped, matrices.turned, matrices.averaged

return function(row, T)
  local from, at = T.from, T.at
  local well, positive = matrices.numbers(12345)

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

  local function cholesky(x, average, upper)
    local y = shaped(x, x.shape[#x.shape], x.shape[#x.shape])
    each(x, function(a)
      local n = #a
      local l = factor(average and averaged(a, n) or a, n)
      put(y, upper and turned(l, n, n) or l)
    end)
    return y
  end

  local indefinite = { 1, 2, 2, 1 }
  row("cholesky", {
    cases = {
      { T { 1, 1, values = { 2 } } }, { T { 2, 4, 4, values = positive(4, 2) } }, { T { 2, 3, 3, values = positive(3, 2) }, true },
      { T { 3, 3, values = positive(3) } }, { T { 0, 0 } }, { T { 0, 2, 2 } }, { T { 20, 20, values = positive(20) }, grad = false },
      { T { 3, 3, values = { 4, 1, 0, 0.5, 3, 1, 0.25, 0, 5 } } }, { T { 5, 7, 7, values = positive(7, 5) }, grad = false },
      { T { 33, 33, values = positive(33) }, grad = false }, { T { 2, 150, 150, values = positive(150, 2) }, grad = false },
    },
    ref = function(x, upper) return cholesky(x, true, upper == true) end,
    tol = { f32 = 2e-5, f64 = 1e-11 },
    errors = {
      { T { 3 }, match = "x: expected [..., n, n]" }, { T { 2, 3 }, match = "expected square matrices [..., n, n], got [2, 3]" },
      { T { 2, 2, values = indefinite }, match = "matrix 0 is not positive definite: its leading minor of order 2" },
    },
  })
  row("cholesky_factor", {
    cases = { -- only one triangle is read, unless they are averaged
      { T { 2, 3, 3, values = positive(3, 2) } }, { T { 0, 0 } }, { T { 2, 2, values = { 4, 99, 1, 3 } } },
      { T { 2, 2, values = { 4, 2, 1, 3 } }, true },
    },
    ref = function(x, average) return cholesky(x, average == true) end,
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
      { T { 59, 59, values = well(59, 59) }, T { 59, 70 }, grad = false }, -- by halves
      { T { 2, 33, 33, values = well(33, 33, 2) }, T { 33, 17 }, grad = false },
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
    { T { 59, 59, values = well(59, 59) }, T { 59, 70 }, grad = false }, -- by halves
    { T { 59, 59, values = well(59, 59) }, T { 59, 70 }, true, grad = false },
    { T { 2, 33, 33, values = well(33, 33, 2) }, T { 2, 33, 17 }, true, grad = false },
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
    { T { 59, 59, values = well(59, 59) }, T { 59, 70 }, false, true, grad = false },
  } do triangular_cases[#triangular_cases + 1] = case end
  row("triangular_solve", {
    cases = triangular_cases,
    ref = function(a, b, upper, unit) return system(triangle)(a, b, upper, true, unit) end,
    tol = { f32 = 2e-5, f64 = 1e-11 },
  })

  row("inverse", {
    cases = { { T { 3, 3, values = well(3, 3) } }, { T { 2, 2, 2, values = well(2, 2, 2) } }, { T { 0, 0 } },
      { T { 50, 50, values = well(50, 50) }, grad = false } },
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
end
