-- Rows of src/ops/scan_sort.c.

return function(row, T)
  local inf, nan = T.inf, T.nan
  local FLOATS = { "f32", "f64", "f16", "bf16" }

  -- Calls f(get, set, n) for every line of x along dim: get(t) and set(t, v) for 0 <= t < n.
  local function lines(x, dim, y, f)
    local nd = #x.shape
    local d = T.dim(dim, nd)
    local n, m, inner, outer = nd == 0 and 1 or x.shape[d], nd == 0 and 1 or y.shape[d], 1, 1
    for k, size in ipairs(x.shape) do
      if k < d then outer = outer * size elseif k > d then inner = inner * size end
    end
    for o = 0, outer - 1 do
      for i = 0, inner - 1 do
        f(function(t) return x[(o * n + t) * inner + i + 1] end, function(t, v,
          z) (z or y)[(o * m + t) * inner + i + 1] = v end, n)
      end
    end
    return y
  end

  local function like(x) return { shape = x.shape } end

  local function reversed(opts, position) return position == true or (type(opts) == "table" and opts.reverse) end

  -- ---- running sums and products ----

  row("cumsum", {
    cases = {
      { T { 5 }, 0 }, { T { 3, 4 }, 0 }, { T { 3, 4 }, -1, true }, { T { 2, 3, 4 }, 1, opts = { reverse = true } },
      { T { 2, 3, 4 }, 1 },
      { T {}, 0 }, { T { 0, 3 }, 1 }, { T { 3, 0 }, 0 }, { T { 2, 150 }, 0, grad = false },
      { T { 4, values = { 1, inf, 2, nan } }, 0, grad = false },
      -- on a GPU: lines of a warp, of a block, in chunks; columns
      { T { 3, 600 }, 1, grad = false, dtypes = { "f32", "f16", "i64" } },
      { T { 20004 }, 0, grad = false, dtypes = { "f32", "i64" } },
      { T { 20004 }, 0, true, grad = false, dtypes = { "f32" } },
      { T { 20003, 2 }, 0, true, grad = false, dtypes = { "f32" } },
      { T { 150, 40 }, 0, grad = false, dtypes = { "f32" } },
      { T { 150, 40 }, 0, true, grad = false, dtypes = { "f64" } },
    },
    ref = function(x, dim, reverse)
      return lines(x, dim, like(x), function(get, set, n)
        local sum, first, last, step = 0, 0, n - 1, 1
        if reversed(reverse, reverse) then first, last, step = n - 1, 0, -1 end
        for t = first, last, step do
          sum = sum + get(t)
          set(t, sum)
        end
      end)
    end,
    errors = { { T { 3, 4 }, 2, match = "dim" }, { T {}, 1, match = "dim" } },
    big = function(ty)
      local long = ty.randn(200000):requires_grad_()
      return long:cumsum(0), ty.randn(300, 700):cumsum(0, true), ty.randn(30, 7000):cumsum(1)
    end,
  })

  local overflowing = { 0 } -- in products of its parts
  for i = 2, 40 do overflowing[i] = 1e30 end

  row("cumprod", {
    cases = {
      { T { 5 }, 0 }, { T { 3, 4 }, 0 }, { T { 2, 3, 4 }, -2 }, { T {}, 0 }, { T { 0, 3 }, 1 }, { T { 1, 3 }, 0 },
      { T { 6, values = { 2, 0, 3, 1, 0, 2 } }, 0 }, { T { 2, 3, values = { 0, 2, 1, 2, 3, 0 } }, 1 },
      { T { 3, values = { 0, 0, 0 } }, 0 },
      { T { 20004, range = { 0.998, 1.002 } }, 0, grad = false, dtypes = { "f32", "f64" } },
      { T { 90, 40, range = { 0.5, 2 } }, 0, grad = false, dtypes = { "f32" } },
      { T { 40, values = overflowing }, 0, grad = false, dtypes = { "f32" } },
    },
    ref = function(x, dim)
      return lines(x, dim, like(x), function(get, set, n)
        local product = 1
        for t = 0, n - 1 do
          product = product * get(t)
          set(t, product)
        end
      end)
    end,
    errors = { { T { 3, 4 }, -3, match = "dim" } },
    big = function(ty) return ty.rand(300, 700):mul(0.01):add(1):cumprod(0),
      ty.rand(300, 700):mul(0.01):add(1):cumprod(1) end,
  })

  row("logcumsumexp", {
    cases = {
      { T { 5 }, 0 }, { T { 3, 4 }, 0 }, { T { 2, 3, 4 }, -2 }, { T {}, 0 }, { T { 0, 3 }, 0 }, { T { 0, 3 }, 1 },
      { T { 6, values = { -inf, 1, 1000, -inf, 2, 1001 } }, 0, grad = false, dtypes = { "f32", "f64" } },
      { T { 4, values = { 1, inf, 2, nan } }, 0, grad = false }, { T { 150, 40 }, 0, grad = false, dtypes = { "f32" } },
    },
    ref = function(x, dim)
      return lines(x, dim, like(x), function(get, set, n)
        for t = 0, n - 1 do
          local top, sum = -inf, 0
          for k = 0, t do top = (get(k) ~= get(k) or top ~= top) and nan or math.max(top, get(k)) end
          for k = 0, t do sum = sum + (get(k) == top and 1 or math.exp(get(k) - top)) end
          set(t, math.abs(top) == inf and top or top + math.log(sum))
        end
      end)
    end,
    errors = { { T { 3, 4 }, 2, match = "dim" } },
    big = function(ty) return ty.randn(300, 700):logcumsumexp(0), ty.randn(300, 700):logcumsumexp(1) end,
  })

  local function extremes(name, at_least)
    row(name, {
      cases = {
        { T { 6, distinct = true }, 0 }, { T { 3, 4, distinct = true }, 0 }, { T { 2, 5, 3, distinct = true }, -2 },
          { T {}, 0 },
        { T { 0, 3 }, 0 }, { T { 7, int = { 0, 3 } }, 0 },
          { T { 6, values = { 1, inf, -inf, nan, 2, nan } }, 0, grad = false },
        { T { 60, 200, range = { -99, 99 } }, 0, grad = false },
      },
      ref = function(x, dim)
        local positions = { shape = x.shape, dtype = "i64" }
        return lines(x, dim, like(x), function(get, set, n)
          local best, where
          for t = 0, n - 1 do
            local v = get(t)
            if t == 0 or v ~= v or at_least(v, best) then best, where = v, t end
            set(t, best)
            set(t, where, positions)
          end
        end), positions
      end,
      errors = { { T { 3, 4 }, 2, match = "dim" } },
    })
  end
  extremes("cummax", function(a, b) return a >= b end)
  extremes("cummin", function(a, b) return a <= b end)

  local function recurrence(a, b, dim, reverse)
    local shape = T.broadcast(a, b)
    local wide = T.zip(function(x) return x, 0 end, a, T.from(shape, function() return 0 end))
    local input = T.zip(function(x) return x end, b, T.from(shape, function() return 0 end))
    local factors = {}
    lines(wide, dim, { shape = shape }, function(get) factors[#factors + 1] = get end)
    local line = 0
    return lines(input, dim, { shape = shape }, function(get, set, n)
      line = line + 1
      local h, first, last, step = 0, 0, n - 1, 1
      if reversed(reverse, reverse) then first, last, step = n - 1, 0, -1 end
      for t = first, last, step do
        h = factors[line](t) * h + get(t)
        set(t, h)
      end
    end), wide
  end

  row("linear_scan", {
    cases = {
      { T { 5 }, T { 5 }, 0 }, { T { 3, 4 }, T { 3, 4 }, 0 }, { T { 2, 3, 4 }, T { 2, 3, 4 }, 1, true },
      { T { 3, 1 }, T { 3, 4 }, -1 }, { T {}, T { 4, 3 }, 0 }, { T { 2, 4 }, T {}, 1 }, { T {}, T {}, 0 },
      { T { 0, 3 }, T { 0, 3 }, 0 },
      { T { 2, 150, range = { -1, 1 } }, T { 2, 150 }, 0, grad = false },
      { T { 20004, range = { -1, 1 } }, T { 20004 }, 0, grad = false, dtypes = { "f32" } },
      { T { 2, 300, range = { -1, 1 } }, T { 2, 300 }, 1, true, grad = false, dtypes = { "f32" } },
      { T { 150, 40, range = { -1, 1 } }, T { 150, 40 }, 0, grad = false, dtypes = { "f32" } },
      { T { 4, values = { 0, 2, 0, 0.5 } }, T { 4 }, 0 },
    },
    ref = function(a, b, dim, reverse) return (recurrence(a, b, dim, reverse)) end,
    errors = { { T { 3 }, T { 4 }, 0, match = "broadcast" }, { T { 3 }, T { 3 }, 1, match = "dim" }, { T { 3 },
      T { 3, dtype = "i64" }, 0, match = "b: expected a float" } },
    big = function(ty)
      return ty.linear_scan(ty.rand(30, 7000):requires_grad_(), ty.randn(30, 7000), 1),
        ty.linear_scan(ty.rand(700, 300):requires_grad_(), ty.randn(700, 300), 0)
    end,
  })

  row("linear_scan_backward", {
    cases = { { T { 5 }, T { 5 }, T { 5 }, 0 }, { T { 2, 3, 4 }, T { 2, 3, 4 }, T { 2, 3, 4 }, 1, true }, { T {},
      T {}, T {}, 0 }, { T { 0 }, T { 0 }, T { 0 }, 0 },
      { T { 20004 }, T { 20004, range = { -1, 1 } }, T { 20004 }, 0, dtypes = { "f32" } },
      { T { 150, 40 }, T { 150, 40, range = { -1, 1 } }, T { 150, 40 }, 0, true, dtypes = { "f32" } } },
    ref = function(g, a, h, dim, reverse)
      local da, db, row_of = like(g), like(g), {}
      lines(a, dim, like(a), function(get) row_of[#row_of + 1] = { a = get } end)
      local line = 0
      lines(h, dim, like(h), function(get)
        line = line + 1
        row_of[line].h = get
      end)
      line = 0
      lines(g, dim, db, function(get, set, n)
        line = line + 1
        local r, carry, first, last, step = row_of[line], 0, n - 1, 0, -1
        if reverse then first, last, step = 0, n - 1, 1 end
        for t = first, last, step do
          local s = get(t) + carry
          set(t, s)
          set(t, t == last and 0 or s * r.h(t + step), da)
          carry = r.a(t) * s
        end
      end)
      return da, db
    end,
    errors = { { T { 5 }, T { 4 }, T { 5 }, 0, match = "a: expected the shape of g" } },
  })

  -- ---- order ----

  -- Whether a comes before b, each {value, position}: NaN largest, ties by position.
  local function before(descending)
    return function(a, b)
      local x, y = a[1], b[1]
      local same = x == y or (x ~= x and y ~= y)
      if same then return a[2] < b[2] end
      if x ~= x then return descending end
      if y ~= y then return not descending end
      if descending then return x > y end
      return x < y
    end
  end

  local function ordered(x, dim, descending, k)
    local shape = table.move(x.shape, 1, #x.shape, 1, {})
    if k and #shape > 0 then shape[T.dim(dim, #shape)] = k end
    local values, positions = { shape = shape }, { shape = shape }
    lines(x, dim, values, function(get, set, n)
      local all = {}
      for t = 0, n - 1 do all[t + 1] = { get(t), t } end
      table.sort(all, before(descending or false))
      for t = 0, (k or n) - 1 do
        set(t, all[t + 1][1])
        set(t, all[t + 1][2], positions)
      end
    end)
    return values, positions
  end

  local special = { nan, 1, -inf, 0.0, -0.0, nan, inf, -2, 1, 0.0 }

  local sort_cases = {
    { T { 3, 6, distinct = true } }, { T { 3, 6, distinct = true }, 0, true }, { T { 2, 5, 3, distinct = true }, 1 },
    { T { 2, 9, range = { -1, 1 } }, 1, opts = { descending = true }, grad = false }, { T { 10, values = special },
      grad = false },
    { T { 10, values = special }, 0, true, grad = false }, { T {} }, { T { 0, 3 } }, { T { 3, 0 }, 0 },
    { T { 2, 700, range = { -99, 99 } }, grad = false },
    { T { 5000, range = { -99, 99 } }, grad = false, dtypes = { "f32", "f64", "i16" } }, -- on a GPU: merged tiles
    { T { 3, 2500, range = { -99, 99 } }, 1, true, grad = false, dtypes = { "f32" } },
  }
  local function descending_of(a) return a == true or (type(a) == "table" and a.descending) end

  row("sort", {
    cases = sort_cases,
    ref = function(x, dim, descending) return ordered(x, dim or -1, descending_of(descending)) end,
    errors = { { T { 3 }, 1, match = "dim" } },
  })

  row("argsort", {
    cases = sort_cases,
    ref = function(x, dim, descending) return (select(2, ordered(x, dim or -1, descending_of(descending)))) end,
    errors = { { T { 3 }, -2, match = "dim" } },
    big = function(ty) return ty.argsort(ty.randn(300, 700), 0) end,
  })

  row("topk", {
    cases = {
      { T { 3, 6, distinct = true }, 2 }, { T { 3, 6, distinct = true }, 2, 0, false },
      { T { 2, 5, 3, distinct = true }, 5, 1 },
      { T { 2, 64, range = { -1, 1 } }, 3, grad = false }, { T { 2, 64, range = { -3, 3 } },
        4, opts = { largest = false }, grad = false },
      { T { 10, values = special }, 4, grad = false, dtypes = FLOATS }, { T { 10, values = special },
        3, 0, false, grad = false },
      { T {}, 1 }, { T { 3, 4 }, 0 }, { T { 0, 3 }, 2 }, { T { 700, range = { -99, 99 } }, 60, grad = false },
      -- on a GPU: the best of several tiles, and merged tiles
      { T { 2, 9000, range = { -99, 99 } }, 300, grad = false, dtypes = { "f32", "f64", "i16" } },
      { T { 5000, range = { -99, 99 } }, 600, opts = { largest = false }, grad = false, dtypes = { "f32" } },
    },
    ref = function(x, k, dim, largest)
      local descending = true
      if type(dim) == "table" then
        dim, largest = nil, dim.largest
      end
      if largest == false then descending = false end
      return ordered(x, dim or -1, descending, k)
    end,
    errors = {
      { T { 3, 4 }, 5, match = "k: expected at most the 4 positions" }, { T { 3, 4 }, -1, match = "k:" },
      { T { 3, 4 }, 1, 2, match = "dim" },
      { T {}, 0, match = "k:" },
    },
  })
end
