-- Rows of src/ops/hash_grid.c. References: corner by corner from the definition.

return function(row, T)
  local primes = { 1, 2654435761, 805459861 }

  -- visit(level, row of the table, weight, slope along each dimension) for the corners around point i of x.
  local function each_corner(x, i, resolutions, entries, visit)
    local dims, first = x.shape[2], 0
    for level, r in ipairs(resolutions) do
      local corners = math.tointeger((r + 1) ^ dims)
      local cell, far, moves = {}, {}, {}
      for j = 1, dims do
        local given = x[(i - 1) * dims + j]
        local u = (given ~= given and given or math.max(0, math.min(1, given))) * r
        moves[j] = given >= 0 and given <= 1 and r or 0
        cell[j] = u == u and math.min(math.floor(u), r - 1) or 0
        far[j] = u - cell[j]
      end
      for k = 0, (1 << dims) - 1 do
        local dense, hashed, weight, slope = 0, 0, 1.0, {}
        for j = 1, dims do slope[j] = 1.0 end
        for j = 1, dims do
          local up = k >> (j - 1) & 1
          local at, share = cell[j] + up, up == 1 and far[j] or 1 - far[j]
          dense = dense + at * (r + 1) ^ (j - 1)
          hashed = hashed ~ (at * primes[j] & 0xffffffff)
          weight = weight * share
          for d = 1, dims do slope[d] = slope[d] * (d == j and (up == 1 and moves[j] or -moves[j]) or share) end
        end
        visit(level, first + math.tointeger(corners <= entries and dense or hashed % entries), weight, slope)
      end
      first = first + math.min(corners, entries)
    end
  end

  local function zeros(...)
    local y = { shape = { ... } }
    for i = 1, T.count(y.shape) do y[i] = 0.0 end
    return y
  end

  local function encode(x, tbl, resolutions, entries)
    local f, all = tbl.shape[2], #resolutions * tbl.shape[2]
    local y = zeros(x.shape[1], all)
    for i = 1, x.shape[1] do
      each_corner(x, i, resolutions, entries, function(level, at, weight)
        for j = 1, f do
          local to = (i - 1) * all + (level - 1) * f + j
          y[to] = y[to] + weight * tbl[at * f + j]
        end
      end)
    end
    return y
  end

  local function rows_of(dims, resolutions, entries)
    local n = 0
    for _, r in ipairs(resolutions) do n = n + math.min(math.tointeger((r + 1) ^ dims), entries) end
    return n
  end

  local function table_gradient(g, x, resolutions, entries)
    local all = g.shape[2]
    local f = all // #resolutions
    local y = zeros(rows_of(x.shape[2], resolutions, entries), f)
    for i = 1, x.shape[1] do
      each_corner(x, i, resolutions, entries, function(level, at, weight)
        for j = 1, f do
          y[at * f + j] = y[at * f + j] + weight * g[(i - 1) * all + (level - 1) * f + j]
        end
      end)
    end
    return y
  end

  local function input_gradient(g, x, tbl, resolutions, entries)
    local all, f, dims = g.shape[2], tbl.shape[2], x.shape[2]
    local y = zeros(x.shape[1], dims)
    for i = 1, x.shape[1] do
      each_corner(x, i, resolutions, entries, function(level, at, _, slope)
        for j = 1, f do
          for d = 1, dims do
            y[(i - 1) * dims + d] = y[(i - 1) * dims + d]
              + slope[d] * g[(i - 1) * all + (level - 1) * f + j] * tbl[at * f + j]
          end
        end
      end)
    end
    return y
  end

  local function corners(x, resolutions, entries)
    local at, weights = { shape = { x.shape[1], #resolutions, 1 << x.shape[2] } }, {}
    weights.shape = at.shape
    for i = 1, x.shape[1] do
      each_corner(x, i, resolutions, entries, function(_, where, weight)
        at[#at + 1], weights[#weights + 1] = where, weight
      end)
    end
    return at, weights
  end

  -- x [n, i] times w [o, i] transposed, w beginning behind `from`.
  local function linear(x, w, from, o)
    local n, i = x.shape[1], x.shape[2]
    local y = { shape = { n, o } }
    for a = 0, n - 1 do
      for b = 0, o - 1 do
        local sum = 0.0
        for k = 1, i do sum = sum + x[a * i + k] * w[from + b * i + k] end
        y[#y + 1] = sum
      end
    end
    return y
  end
  local function relu(x)
    for i = 1, #x do x[i] = x[i] ~= x[i] and x[i] or math.max(0, x[i]) end
    return x
  end

  local function field(x, tbl, first, last, resolutions, entries, hidden)
    local width = first.shape[1]
    local h = relu(linear(encode(x, tbl, resolutions, entries), first, 0, width))
    for i = 1, hidden and hidden.shape[1] or 0 do h = relu(linear(h, hidden, (i - 1) * width * width, width)) end
    return linear(h, last, 0, last.shape[1])
  end

  -- [n, o] transposed times [n, i] and times [o, i], the latter from `from` on.
  local function weights_of(g, h, y, from)
    for a = 0, g.shape[1] - 1 do
      for o = 0, g.shape[2] - 1 do
        for i = 1, h.shape[2] do
          local to = from + o * h.shape[2] + i
          y[to] = y[to] + g[a * g.shape[2] + o + 1] * h[a * h.shape[2] + i]
        end
      end
    end
  end
  local function back(g, w, from, columns)
    local y = zeros(g.shape[1], columns)
    for a = 0, g.shape[1] - 1 do
      for o = 0, g.shape[2] - 1 do
        for i = 1, columns do
          y[a * columns + i] = y[a * columns + i] + g[a * g.shape[2] + o + 1] * w[from + o * columns + i]
        end
      end
    end
    return y
  end

  local function field_gradient(g, x, tbl, first, last, resolutions, entries, hidden, whole)
    local width, layers = first.shape[1], hidden and hidden.shape[1] or 0
    local square = width * width
    local h = { encode(x, tbl, resolutions, entries) }
    h[2] = relu(linear(h[1], first, 0, width))
    for i = 1, layers do h[i + 2] = relu(linear(h[i + 1], hidden, (i - 1) * square, width)) end
    local d_first, d_last = zeros(first.shape[1], first.shape[2]), zeros(last.shape[1], width)
    local d_hidden = zeros(layers, width, width)
    weights_of(g, h[layers + 2], d_last, 0)
    g = back(g, last, 0, width)
    for i = layers + 1, 1, -1 do
      for k = 1, #g do
        if h[i + 1][k] <= 0 then g[k] = 0.0 end
      end
      weights_of(g, h[i], i > 1 and d_hidden or d_first, math.max(0, i - 2) * square)
      g = i > 1 and back(g, hidden, (i - 2) * square, width) or back(g, first, 0, first.shape[2])
    end
    local d_table = zeros(0, tbl.shape[2])
    if whole then g, d_table = zeros(0, g.shape[2]), table_gradient(g, x, resolutions, entries) end
    return g, d_first, d_last, d_hidden, d_table
  end

  -- Points away from the sides of cells: of 1, 2, 3 and 5 a side.
  local safe = { 0.1, 0.27, 0.45, 0.55, 0.73, 0.9, 0.1, 0.55, 0.27, 0.9, -0.3, 0.45, 0.73, 1.4, 0.27, 0.27, 0.9, 0.1 }
  local function points(n, dims)
    local spec = { n, dims, values = {} }
    for i = 1, n * dims do spec.values[i] = safe[(i * 5 + n) % #safe + 1] end
    return T(spec)
  end
  local levels, hashed = { 2, 3, 5 }, { 1, 3, 5 }
  -- 9 + 16 + 16 rows in two dimensions, 8 + 32 + 32 in three

  local tbl = T { 41, 2 }

  local function many(ty) return ty.rand(5000, 3), ty.randn(72, 2) end

  row("hash_grid", {
    cases = {
      { points(6, 2), T { 41, 2 }, levels, 16 }, { points(5, 3), T { 72, 2 }, hashed, 32 },
      { points(3, 2), T { 41, 1 }, levels, 16 }, { points(3, 3), T { 72, 3 }, hashed, 32 },
      { points(4, 2), T { 16, 4 }, { 40 }, 16, grad = false, tol = 1e-5 },
      { points(4, 2), T { 4, 2 }, { 7, 9 }, 2, grad = false },
      { T { 0, 2 }, T { 41, 2 }, levels, 16 }, { T { 700, 2, range = { 0, 1 } }, T { 41, 2 }, levels, 16, grad = false,
        dtypes = { "f32", "f64" }, tol = 1e-5 },
      { T { 3, 2, values = { 0, 0, 1, 1, 0.5, 1 } }, T { 41, 2 }, levels, 16, grad = false },
      { T { 2, 2, values = { T.nan, 0.3, 0.4, 0.4 } }, T { 9, 1 }, { 2 }, 16, grad = false, dtypes = { "f32", "f64" } },
    },
    ref = encode, broadcast = false,
    errors = {
      { T { 4, 4 }, tbl, levels, 16, match = "x: expected [n, 2 or 3], got" },
      { T { 4 }, tbl, levels, 16, match = "x: expected [n, 2 or 3]" },
      { T { 4, 2 }, tbl, {}, 16, match = "resolutions: expected 1 to 32 levels, got 0" },
      { T { 4, 2 }, tbl, { 2, 0, 5 }, 16, match = "resolutions: expected 1 to 1048576 cells a side, got 0" },
      { T { 4, 2 }, tbl, levels, 17, match = "entries: expected a power of two from 2 to" },
      { T { 4, 2 }, tbl, levels, 1, match = "entries: expected a power of two from 2 to" },
      { T { 4, 2 }, T { 40, 2 }, levels, 16, match = "table: expected [41, features]" },
      { T { 4, 2 }, T { 41, 0 }, levels, 16, match = "table: expected [41, features]" },
    },
    big = function(ty)
      local x, rows = many(ty)
      return ty.hash_grid(x, rows, hashed, 32)
    end,
  })

  row("hash_grid_backward_table", {
    cases = {
      { T { 6, 6 }, points(6, 2), levels, 16 }, { T { 5, 9 }, points(5, 3), hashed, 32 },
      { T { 0, 6 }, T { 0, 2 }, levels, 16 }, { T { 3, 3 }, points(3, 2), levels, 16 },
      { T { 700, 6 }, T { 700, 2, range = { 0, 1 } }, levels, 16, dtypes = { "f32", "f64" }, tol = 1e-5 },
    },
    ref = table_gradient, broadcast = false,
    errors = {
      { T { 4, 5 }, T { 4, 2 }, levels, 16, match = "g: expected [4, 3 levels * 1 to 64 features], got" },
      { T { 3, 6 }, T { 4, 2 }, levels, 16, match = "g: expected [4, 3 levels" },
      { T { 4, 6 }, T { 4, 5 }, levels, 16, match = "x: expected [n, 2 or 3]" },
    },
    big = function(ty) return ty.core.hash_grid_backward_table(ty.randn(5000, 6), ty.rand(5000, 3), hashed, 32) end,
  })

  row("hash_grid_backward_input", {
    cases = {
      { T { 6, 6 }, points(6, 2), T { 41, 2 }, levels, 16 }, { T { 5, 3 }, points(5, 3), T { 72, 1 }, hashed, 32 },
      { T { 0, 6 }, T { 0, 2 }, T { 41, 2 }, levels, 16 },
    },
    ref = input_gradient, broadcast = false,
    errors = {
      { T { 4, 5 }, T { 4, 2 }, T { 41, 2 }, levels, 16, match = "g: expected [4, 6], got" },
      { T { 4, 6 }, T { 4, 2 }, T { 42, 2 }, levels, 16, match = "table: expected [41, features]" },
    },
    big = function(ty)
      local x, rows = many(ty)
      return ty.core.hash_grid_backward_input(ty.randn(5000, 6), x, rows, hashed, 32)
    end,
  })

  row("hash_corners", {
    cases = { { points(6, 2), levels, 16 }, { points(5, 3), hashed, 32 }, { T { 0, 2 }, levels, 16 } },
    ref = corners, broadcast = false, dtype = function(dtype, i) return i == 1 and "i32" or dtype end,
    errors = { { T { 4, 5 }, levels, 16, match = "x: expected [n, 2 or 3]" } },
  })

  row("hash_field", {
    cases = {
      { points(6, 2), T { 41, 2 }, T { 7, 6 }, T { 3, 7 }, levels, 16, T { 2, 7, 7 } },
      { points(5, 3), T { 72, 1 }, T { 4, 3 }, T { 1, 4 }, hashed, 32, T { 1, 4, 4 } },
      { points(4, 2), T { 41, 2 }, T { 5, 6 }, T { 2, 5 }, levels, 16 },
      { points(4, 2), T { 41, 2 }, T { 5, 6 }, T { 2, 5 }, levels, 16, T { 0, 5, 5 } },
      { T { 0, 2 }, T { 41, 2 }, T { 5, 6 }, T { 2, 5 }, levels, 16, T { 1, 5, 5 } },
      { T { 600, 2, range = { 0, 1 } }, T { 41, 2 }, T { 20, 6 }, T { 3, 20 }, levels, 16, T { 1, 20, 20 },
        grad = false, dtypes = { "f32", "f64" }, tol = 1e-5 },
    },
    ref = field, broadcast = false, tol = 1e-5,
    errors = {
      { T { 4, 2 }, T { 40, 2 }, T { 5, 6 }, T { 2, 5 }, levels, 16, match = "table: expected [41, features]" },
      { T { 4, 2 }, T { 41, 2 }, T { 5, 7 }, T { 2, 5 }, levels, 16, match = "first: expected [width, 6]" },
      { T { 4, 2 }, T { 41, 2 }, T { 5, 6 }, T { 2, 4 }, levels, 16, match = "last: expected [out, 5] for first" },
      { T { 4, 2 }, T { 41, 2 }, T { 5, 6 }, T { 2, 5 }, levels, 16, T { 1, 5, 4 }, match = "hidden: expected [layers, 5, 5]" },
    },
    big = function(ty)
      local x, rows = many(ty)
      return ty.hash_field(x, rows, ty.randn(32, 6), ty.randn(2, 32), hashed, 32, ty.randn(1, 32, 32) * 0.2)
    end,
  })

  row("hash_field_backward", {
    cases = {
      { T { 6, 3 }, points(6, 2), T { 41, 2 }, T { 7, 6 }, T { 3, 7 }, levels, 16, T { 2, 7, 7 } },
      { T { 4, 2 }, points(4, 3), T { 72, 1 }, T { 5, 3 }, T { 2, 5 }, hashed, 32 },
      { T { 6, 3 }, points(6, 2), T { 41, 2 }, T { 7, 6 }, T { 3, 7 }, levels, 16, T { 1, 7, 7 }, true },
      { T { 0, 2 }, T { 0, 2 }, T { 41, 2 }, T { 5, 6 }, T { 2, 5 }, levels, 16, T { 1, 5, 5 }, true },
      { T { 0, 2 }, T { 0, 2 }, T { 41, 2 }, T { 5, 6 }, T { 2, 5 }, levels, 16, T { 1, 5, 5 } },
    },
    ref = field_gradient, broadcast = false, tol = 1e-5,
    errors = {
      { T { 4, 3 }, T { 4, 2 }, T { 41, 2 }, T { 5, 6 }, T { 2, 5 }, levels, 16, match = "g: expected [4, 2], got" },
    },
    big = function(ty)
      local x, rows = many(ty)
      local g, hidden = ty.randn(5000, 2), ty.randn(1, 32, 32) * 0.2
      local first, last = ty.randn(32, 6), ty.randn(2, 32)
      local _, a, b, c = ty.core.hash_field_backward(g, x, rows, first, last, hashed, 32, hidden)
      return a, b, c, ty.core.hash_field_backward(g, x, rows, first, last, hashed, 32, hidden, true)
    end,
  })
end
