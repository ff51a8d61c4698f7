-- Rows of src/ops/linalg.c: QR, singular values, eigenvalues of symmetric matrices, least squares. References:
-- Gram-Schmidt and Jacobi's rotations, as in any textbook.

local matrices = require "matrices"

local each, put, shaped, turned, averaged = matrices.each, matrices.put, matrices.shaped, matrices.turned, matrices.averaged

return function(row, T)
  local well, positive = matrices.numbers(54321)

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
