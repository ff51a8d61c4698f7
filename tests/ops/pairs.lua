-- Rows of src/ops/pairs.c.

return function(row, T)
  local from, at, inf = T.from, T.at, T.inf

  local function distance(x, y, p)
    local s = 0
    for k = 1, #x do
      local v = math.abs(x[k] - y[k])
      if p == 0 then s = s + (v ~= 0 and 1 or 0) elseif p == inf then s = math.max(s, v) else s = s + v ^ p end
    end
    return (p == 0 or p == inf) and s or s ^ (1 / p)
  end

  -- Point i of a batch, where dimensions of size 1 repeat.
  local function point(x, batch, i)
    local index, c = table.move(batch, 1, #batch, 1, {}), {}
    index[#index + 1] = i
    for k = 1, x.shape[#x.shape] do
      index[#batch + 2] = k - 1
      c[k] = at(x, index)
    end
    return c
  end

  local function distances(x, y, p)
    if type(p) == "table" then p = p.p end
    local nx, ny = #x.shape, #y.shape
    local shape = T.broadcast({ shape = table.move(x.shape, 1, nx - 2, 1, {}) },
      { shape = table.move(y.shape, 1, ny - 2, 1, {}) })
    local batch = #shape
    shape[batch + 1], shape[batch + 2] = x.shape[nx - 1], y.shape[ny - 1]
    return from(shape, function(i)
      local head = table.move(i, 1, batch, 1, {})
      return distance(point(x, head, i[batch + 1]), point(y, head, i[batch + 2]), p or 2)
    end)
  end

  row("cdist", {
    cases = {
      { T { 3, 4 }, T { 5, 4 } }, { T { 2, 3, 2 }, T { 2, 4, 2 }, 1 }, { T { 2, 1, 3, 2 }, T { 5, 2 }, 3 },
        { T { 3, 4 }, T { 2, 4 }, inf },
      { T { 3, 4 }, T { 2, 4 }, 1.5 },
        { T { 3, 2, values = { 0, 1, 1, 1, 0, 0 } }, T { 2, 2, values = { 0, 1, 1, 0 } }, 0, grad = false },
      { T { 0, 4 }, T { 2, 4 } }, { T { 3, 0 }, T { 2, 0 } }, { T { 9, 70 }, T { 11, 70 }, grad = false },
      { T { 3, 4 }, T { 2, 4 }, opts = { p = 0.5 }, grad = false }, { T { 2, 13, 3 }, T { 19, 3 }, grad = false },
      { T { 9, 130 }, T { 41, 130 }, 1, grad = false }, { T { 9, 260 }, T { 8, 260 }, grad = false },
      { T { 2, 2, values = { 1, 2, 3, 4 } }, T { 2, 2, values = { 1, 2, 0, 0 } }, grad = false },
    },
    ref = distances, tol = 1e-5,
    errors = {
      { T { 3 }, T { 2, 3 }, match = "x: expected [..., n, d]" },
        { T { 3, 2 }, T { 3, 3 }, match = "y: expected points of 2 coordinates" },
      { T { 3, 2 }, T { 3, 2 }, -1, match = "p: expected" }, { T { 2, 3, 2 }, T { 3, 3, 2 }, match = "broadcast" },
    },
    big = function(ty) return ty.cdist(ty.randn(200, 20):requires_grad_(), ty.randn(300, 20)), ty.cdist(ty.randn(200,
      20), ty.randn(300, 20), 1) end,
  })

  local function gradient(g, r, x, y, p)
    return from(x.shape, function(i)
      local n, d, nd = y.shape[#y.shape - 1], i[#i], #x.shape
      local head, s = table.move(i, 1, nd - 2, 1, {}), 0
      local a = point(x, head, i[nd - 1])
      for j = 0, n - 1 do
        local b = point(y, head, j)
        local index = table.move(head, 1, #head, 1, {})
        index[nd - 1], index[nd] = i[nd - 1], j
        local size, v = at(r, index), a[d + 1] - b[d + 1]
        if size ~= 0 and v ~= 0 and p ~= 0 then
          local w = p == inf and (math.abs(v) == size and 1 or 0) or (math.abs(v) / size) ^ (p - 1)
          s = s + at(g, index) * (v < 0 and -w or w)
        end
      end
      return s
    end)
  end
  row("cdist_backward", {
    cases = {
      { T { 3, 2 }, T { 3, 2, range = { 1, 2 } }, T { 3, 4 }, T { 2, 4 }, 2 },
        { T { 3, 2 }, T { 3, 2, range = { 1, 2 } }, T { 3, 4 }, T { 2, 4 }, 1 },
      { T { 2, 3, 2 }, T { 2, 3, 2, range = { 1, 2 } }, T { 2, 3, 4 }, T { 2, 2, 4 }, 3 },
        { T { 1, 2 }, T { 1, 2, values = { 0, 5 } }, T { 1, 2 }, T { 2, 2 }, 2 },
      { T { 1, 1 }, T { 1, 1, values = { 2 } }, T { 1, 2, values = { 3, 1 } }, T { 1, 2, values = { 1, 0 } }, inf },
      { T { 1, 1 }, T { 1, 1, values = { 2 } }, T { 1, 2, values = { 3, 1 } }, T { 1, 2, values = { 1, 0 } }, 0 },
    },
    ref = gradient, tol = 1e-5,
    errors = { { T { 3, 3 }, T { 3, 2 }, T { 3, 4 }, T { 2, 4 }, 2, match = "g: expected distances [3, 2]" } },
  })

  row("pdist", {
    cases = { { T { 4, 3 } }, { T { 3, 2 }, 1 }, { T { 1, 2 } }, { T { 0, 2 } }, { T { 5, 2 }, opts = { p = inf } } },
    ref = function(x, p)
      local d, n, y = distances(x, x, p), x.shape[1], {}
      for i = 0, n - 1 do
        for j = i + 1, n - 1 do y[#y + 1] = d[i * n + j + 1] end
      end
      y.shape = { #y }
      return y
    end,
    tol = 1e-5,
    errors = { { T { 3 }, match = "x: expected [n, d]" }, { T { 3, 2 }, -1, match = "p: expected" } },
  })

  -- ---- positions ----

  local function triangle(inside)
    return function(rows, columns, offset)
      if type(columns) == "table" then columns, offset = nil, columns.offset end
      local r, c = {}, {}
      for i = 0, rows - 1 do
        for j = 0, (columns or rows) - 1 do
          if inside(j - i, offset or 0) then
            r[#r + 1], c[#c + 1] = i, j
          end
        end
      end
      local n = #r
      table.move(c, 1, n, n + 1, r)
      r.shape, r.dtype = { 2, n }, "i64"
      return r
    end
  end
  local triangles = { { 3 }, { 3, 5 }, { 5, 3, 1 }, { 4, 4, -2 }, { 0 }, { 3, 0 }, { 3, 3, 9 }, { 3, 3, -9 },
    { 3, opts = { offset = 1 } } }
  local triangle_errors = { { -1, match = "rows: expected" } }
  row("tril_indices", { cases = triangles, ref = triangle(function(d, offset) return d <= offset end),
    errors = triangle_errors })
  row("triu_indices", { cases = triangles, ref = triangle(function(d, offset) return d >= offset end),
    errors = triangle_errors })

  -- ---- sets ----

  local function tuples(lists)
    local all = { {} }
    for _, l in ipairs(lists) do
      local longer = {}
      for _, t in ipairs(all) do
        for i = 1, l.shape[1] do
          local u = table.move(t, 1, #t, 1, {})
          u[#u + 1] = l[i]
          longer[#longer + 1] = u
        end
      end
      all = longer
    end
    return all
  end
  local function matrix(all, width)
    local y = { shape = { #all, width } }
    for _, t in ipairs(all) do table.move(t, 1, #t, #y + 1, y) end
    return y
  end
  row("cartesian_prod", {
    cases = { { { T { 2 }, T { 3 } } }, { { T { 2 }, T { 1 }, T { 3 } } }, { { T { 2 }, T { 0 } } }, { { T { 3 } } } },
    ref = function(xs)
      if #xs == 1 then return { shape = xs[1].shape, table.unpack(xs[1]) } end
      return matrix(tuples(xs), #xs)
    end,
    errors = { { {}, match = "xs: expected 1 to 8" }, { { T { 2 }, T { 2, 2 } }, match = "xs: expected tensors [n]" } },
  })

  row("combinations", {
    cases = { { T { 5 } }, { T { 4 }, 3 }, { T { 3 }, 2, true }, { T { 3 }, 3, true }, { T { 2 }, 3 },
      { T { 4 }, 1 }, { T { 3 }, 0 }, { T { 0 } },
      { T { 7 }, 5 } },
    ref = function(x, r, replacement)
      r = r or 2
      if r == 0 then return { shape = { 0 } } end
      local all, chosen = {}, {}
      local function choose(k, first)
        if k > r then
          local t = {}
          for i = 1, r do t[i] = x[chosen[i]] end
          all[#all + 1] = t
          return
        end
        for i = first, x.shape[1] do
          chosen[k] = i
          choose(k + 1, replacement and i or i + 1)
        end
      end
      choose(1, 1)
      return matrix(all, r)
    end,
    errors = { { T { 2, 2 }, match = "x: expected [n]" }, { T { 3 }, -1, match = "r: expected" },
      { T { 900 }, 60, match = "fewer combinations" } },
  })

  row("block_diag", {
    cases = { { { T { 2, 3 }, T { 1, 2 } } }, { { T { 3 }, T {}, T { 2, 2 } } }, { { T { 2, 2 } } },
      { { T { 0, 2 }, T { 2, 1 } } } },
    ref = function(xs)
      local rows, columns, parts = 0, 0, {}
      for i, x in ipairs(xs) do
        local m, n = #x.shape > 1 and x.shape[1] or 1, #x.shape > 0 and x.shape[#x.shape] or 1
        parts[i] = { x, rows, columns, m, n }
        rows, columns = rows + m, columns + n
      end
      return from({ rows, columns }, function(i)
        for _, part in ipairs(parts) do
          local r, c = i[1] - part[2], i[2] - part[3]
          if r >= 0 and c >= 0 and r < part[4] and c < part[5] then return part[1][r * part[5] + c + 1] end
        end
        return 0
      end)
    end,
    errors = { { {}, match = "xs: expected at least one" }, { { T { 2, 2, 2 } }, match = "xs: expected matrices" } },
  })
end
