-- Rows of src/ops/eig.c. Reference: the roots of the characteristic polynomial (Faddeev and LeVerrier's recurrence, Durand
-- and Kerner's iteration), and for each root a solution of the singular system by inverse iteration.

return function(row, T)
  local state = 4711
  local function number()
    state = (state * 1103515245 + 12345) % 2147483648
    return state / 1073741824 - 1
  end

  local function any(n, batch) -- of eigenvalues well apart
    local v = {}
    for _ = 1, batch or 1 do
      for i = 1, n do
        for j = 1, n do v[#v + 1] = number() + (i == j and i * 0.7 or 0) + (i - j == 1 and -1 or i - j == -1 and 1 or 0) end
      end
    end
    return v
  end

  -- coefficients of det(z - a), from that of z^(n-1) down; z^n has 1
  local function characteristic(a, n)
    local m, c = {}, {}
    for i = 1, n do
      m[i] = {}
      for j = 1, n do m[i][j] = 0 end
    end
    local last = 1
    for k = 1, n do
      local p, trace = {}, 0 -- m = a m + last, then the trace of a m
      for i = 1, n do
        p[i] = {}
        for j = 1, n do
          local sum = i == j and last or 0
          for l = 1, n do sum = sum + a[i][l] * m[l][j] end
          p[i][j] = sum
        end
      end
      m = p
      for i = 1, n do
        for l = 1, n do trace = trace + a[i][l] * m[l][i] end
      end
      last = -trace / k
      c[k] = last
    end
    return c
  end

  local function divide(a, b, c, d)
    local size = c * c + d * d
    return (a * c + b * d) / size, (b * c - a * d) / size
  end

  local function roots(c, n)
    local re, im = {}, {}
    local x, y = 1, 0
    for i = 1, n do
      x, y = x * 0.4 - y * 0.9, x * 0.9 + y * 0.4
      re[i], im[i] = 2 * x, 2 * y
    end
    for _ = 1, 500 do
      for i = 1, n do
        local p, q = 1, 0
        for k = 1, n do p, q = p * re[i] - q * im[i] + c[k], p * im[i] + q * re[i] end
        for j = 1, n do
          if j ~= i then p, q = divide(p, q, re[i] - re[j], im[i] - im[j]) end
        end
        re[i], im[i] = re[i] - p, im[i] - q
      end
    end
    local order = {}
    for i = 1, n do
      order[i] = i
      if math.abs(im[i]) < 1e-9 then im[i] = 0 end
    end
    table.sort(order, function(i, j)
      if math.abs(re[i] - re[j]) > 1e-9 then return re[i] < re[j] end
      return im[i] < im[j]
    end)
    local list = {}
    for k, i in ipairs(order) do list[k] = { re[i], im[i] } end
    return list
  end

  -- (a - z) x = b, complex, with pivots; where a pivot is about nothing it is made small
  local function solve(a, n, z, b)
    local m = {}
    for i = 1, n do
      m[i] = {}
      for j = 1, n do m[i][j] = { a[i][j] - (i == j and z[1] or 0), i == j and -z[2] or 0 } end
      m[i][n + 1] = { b[i][1], b[i][2] }
    end
    local function size(x) return x[1] * x[1] + x[2] * x[2] end
    for k = 1, n do
      local best = k
      for i = k + 1, n do
        if size(m[i][k]) > size(m[best][k]) then best = i end
      end
      m[k], m[best] = m[best], m[k]
      if size(m[k][k]) < 1e-26 then m[k][k] = { 1e-13, 0 } end
      for i = k + 1, n do
        local f, g = divide(m[i][k][1], m[i][k][2], m[k][k][1], m[k][k][2])
        for j = k, n + 1 do
          local p, q = m[k][j][1], m[k][j][2]
          m[i][j] = { m[i][j][1] - f * p + g * q, m[i][j][2] - f * q - g * p }
        end
      end
    end
    local x = {}
    for i = n, 1, -1 do
      local p, q = m[i][n + 1][1], m[i][n + 1][2]
      for j = i + 1, n do
        local c, d = m[i][j][1], m[i][j][2]
        p, q = p - c * x[j][1] + d * x[j][2], q - c * x[j][2] - d * x[j][1]
      end
      x[i] = { divide(p, q, m[i][i][1], m[i][i][2]) }
    end
    return x
  end

  -- Of length 1, its first element of about the largest size real.
  local function vector(a, n, z)
    local x = {}
    for i = 1, n do x[i] = { 1 + i * 0.1, i * 0.05 } end
    for _ = 1, 3 do
      x = solve(a, n, z, x)
      local most, length, real = 0, 0, nil
      for i = 1, n do
        local size = x[i][1] ^ 2 + x[i][2] ^ 2
        most, length = math.max(most, size), length + size
      end
      for i = n, 1, -1 do
        if x[i][1] ^ 2 + x[i][2] ^ 2 >= 0.998 * most then real = i end
      end
      local scale = 1 / math.sqrt(length * (x[real][1] ^ 2 + x[real][2] ^ 2))
      local c, d = x[real][1] * scale, -x[real][2] * scale
      for i = 1, n do x[i] = { c * x[i][1] - d * x[i][2], c * x[i][2] + d * x[i][1] } end
    end
    return x
  end

  local function eig(x)
    local n = x.shape[#x.shape]
    local values = { shape = table.move(x.shape, 1, #x.shape - 1, 1, {}) }
    local vectors = { shape = table.move(x.shape, 1, #x.shape, 1, {}) }
    values.shape[#values.shape + 1], vectors.shape[#vectors.shape + 1] = 2, 2
    for first = 0, #x - 1, math.max(1, n * n) do
      local a = {}
      for i = 1, n do a[i] = table.move(x, first + (i - 1) * n + 1, first + i * n, 1, {}) end
      local list, columns = roots(characteristic(a, n), n), {}
      for j, z in ipairs(list) do
        values[#values + 1], values[#values + 2] = z[1], z[2]
        columns[j] = vector(a, n, z)
      end
      for i = 1, n do
        for j = 1, n do
          vectors[#vectors + 1], vectors[#vectors + 2] = columns[j][i][1], columns[j][i][2]
        end
      end
    end
    return values, vectors
  end

  local cases = {
    { T { 3, 3, values = any(3) } }, { T { 2, 2, values = { 0, 1, -1, 0.5 } } }, { T { 2, 4, 4, values = any(4, 2) } },
    { T { 3, 3, values = { 1, 0.5, 0.25, 0, 2, -1, 0.5, 0, 4 } } }, { T { 1, 1, values = { -2 } } }, { T { 0, 0 } },
    { T { 0, 2, 2 } }, { T { 7, 7, values = any(7) }, grad = false },
    { T { 3, 3, values = { 0, 1, 0, 0, 0, 1, 1, 0, 0 } }, grad = false },
  }
  local errors = {
    { T { 3 }, match = "x: expected [..., n, n]" },
    { T { 2, 3 }, match = "expected square matrices [..., n, n], got [2, 3]" },
    { T { 2, 2, 2, values = { 1, 0, 0, 1, 1, T.nan, 0, 1 } }, match = "matrix 1 holds a number that is not finite" },
  }
  local tol = { f32 = 1e-4, f64 = 1e-10 }
  row("eig", {
    cases = cases, ref = eig, tol = tol, errors = errors,
    big = function(ty) return ty.eig(ty.randn(8, 24, 24):to "f64") end,
  })
  row("eigvals", { cases = cases, ref = function(x) return (eig(x)) end, tol = tol, errors = errors })
  row("eig_factor", {
    cases = cases,
    ref = function(x)
      local values, vectors = eig(x)
      local n = x.shape[#x.shape]
      local real = { shape = table.move(x.shape, 1, #x.shape - 1, 1, {}), dtype = "i64" }
      for first = 0, #vectors - 1, math.max(1, 2 * n * n) do
        for j = 0, n - 1 do
          local most, best = 0, nil
          for i = n - 1, 0, -1 do
            local at = first + 2 * (i * n + j) + 1
            most = math.max(most, vectors[at] ^ 2 + vectors[at + 1] ^ 2)
          end
          for i = n - 1, 0, -1 do
            local at = first + 2 * (i * n + j) + 1
            if vectors[at] ^ 2 + vectors[at + 1] ^ 2 >= 0.998 * most then best = i end
          end
          real[#real + 1] = best
        end
      end
      return values, vectors, real
    end,
    dtype = function(dtype, i) return i == 3 and "i64" or dtype end,
    tol = tol,
  })
  row("eig_values", { cases = cases, ref = function(x) return (eig(x)) end, tol = tol })
end
