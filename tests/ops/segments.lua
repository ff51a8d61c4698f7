-- Rows of src/ops/segments.c.

return function(row, T)
  local function i64(values, more)
    local spec = { #values, values = values, dtype = "i64" }
    for k, v in pairs(more or {}) do spec[k] = v end
    return T(spec)
  end

  -- The numbers of the positions of each segment, from 0, by offsets and order or by index and count.
  local function members(o)
    local list = {}
    if o.index then
      for s = 1, o.count do list[s] = {} end
      for j, s in ipairs(o.index) do table.insert(list[s + 1], j - 1) end
      return list
    end
    for s = 1, #o.offsets - 1 do
      list[s] = {}
      for j = o.offsets[s], o.offsets[s + 1] - 1 do table.insert(list[s], o.order and o.order[j + 1] or j) end
    end
    return list
  end

  -- x around a dimension: how many lines, positions, and elements that follow; and the index of an element in the array.
  local function lines(shape, dim)
    if dim < 0 then dim = dim + #shape end
    local outer, n, inner = 1, shape[dim + 1], 1
    for d, size in ipairs(shape) do
      if d <= dim then outer = outer * size elseif d > dim + 1 then inner = inner * size end
    end
    return outer, n, inner, dim
  end

  local function with_size(shape, dim, size)
    local copy = table.move(shape, 1, #shape, 1, {})
    copy[dim + 1] = size
    return copy
  end

  local join = {
    sum = function(list) local s = 0 for _, v in ipairs(list) do s = s + v end return s end,
    prod = function(list) local s = 1 for _, v in ipairs(list) do s = s * v end return s end,
    max = function(list) return math.max(table.unpack(list)) end,
    min = function(list) return math.min(table.unpack(list)) end,
  }
  function join.mean(list, whole) return whole and join.sum(list) // #list or join.sum(list) / #list end

  local function reduced(x, reduce, o, dim, empty)
    local outer, n, inner, d = lines(x.shape, dim)
    local groups, whole = members(o), x.dtype:find "^[iu]" ~= nil
    local y = { shape = with_size(x.shape, d, #groups) }
    for line = 0, outer - 1 do
      for _, group in ipairs(groups) do
        for i = 1, inner do
          local list = {}
          for _, j in ipairs(group) do list[#list + 1] = x[(line * n + j) * inner + i] end
          y[#y + 1] = #list > 0 and join[reduce](list, whole) or empty or (reduce == "prod" and 1 or 0)
        end
      end
    end
    return y
  end

  -- What fn makes of the elements of each segment, in their places.
  local function each(shape, dim, o, fn, ...)
    local outer, n, inner = lines(shape, dim)
    local y, arrays = { shape = shape }, { ... }
    for k = 1, outer * n * inner do y[k] = 0.0 end
    for line = 0, outer - 1 do
      for _, group in ipairs(members(o)) do
        for i = 1, inner do
          local lists = {}
          for a, array in ipairs(arrays) do
            lists[a] = {}
            for _, j in ipairs(group) do table.insert(lists[a], array[(line * n + j) * inner + i]) end
          end
          local made = fn(table.unpack(lists))
          for k, j in ipairs(group) do y[(line * n + j) * inner + i] = made[k] end
        end
      end
    end
    return y
  end

  local function softmax(list)
    local top, sum, y = -math.huge, 0.0, {}
    for _, v in ipairs(list) do top = math.max(top, v) end
    for k, v in ipairs(list) do y[k] = math.exp(v - top) sum = sum + y[k] end
    for k, v in ipairs(y) do y[k] = v / sum end
    return y
  end

  local some, order = i64 { 0, 2, 2, 5, 6 }, i64 { 3, 0, 5, 1, 4, 2 }
  local index = i64 { 2, 0, 2, 1, 0, 2, 4 }
  -- Segments of one to many pieces, with empty ones, of n positions.
  local function wide(n) return i64 { 0, 0, n // 300, n // 3, n // 3, n // 3 + 1, n - 2, n, n } end
  local function mixed(n)
    local values = {}
    for i = 0, n - 1 do values[i + 1] = (i * 7 + 3) % n end
    return i64(values)
  end

  row("segments_of", {
    cases = {
      { T { 7, values = { 2, 0, 2, 1, 0, 2, 4 } }, 5 }, { T { 0, int = { 0, 1 } }, 3 }, { T { 0, int = { 0, 1 } }, 0 },
      { T { 40, int = { 0, 9 } }, 9 }, { T { 3, values = { 1, 1, 1 } }, 2 },
    },
    dtypes = { "i64", "i32" }, dtype = "i64",
    ref = function(list, count)
      local groups, at, offsets = members { index = list, count = count }, { shape = { #list } }, { 0, shape = { count + 1 } }
      for _, group in ipairs(groups) do
        table.move(group, 1, #group, #at + 1, at)
        offsets[#offsets + 1] = #at
      end
      return at, offsets
    end,
    errors = {
      { T { 2, 2, int = { 0, 2 } }, 2, match = "index: expected [n]" },
      { T { 2, values = { 0, 2 } }, 2, match = "index 2 is out of range for size 2" },
      { T { 2, values = { 0, -1 } }, 2, match = "index -1 is out of range for size 2" },
      { T { 2, values = { 0, 1 } }, -1, match = "count: expected a number of segments" },
      { T { 2, dtype = "u8" }, 2, match = "index" },
    },
    big = function(ty) return ty.segments_of(ty.randint(0, 1000, { 100000 }), 1000) end,
  })

  local reducing = {}
  for _, reduce in ipairs { "sum", "mean", "max", "min", "prod" } do
    local function case(x, opts, more)
      local c = { T(x), reduce, opts = opts }
      for k, v in pairs(more or {}) do c[k] = v end
      reducing[#reducing + 1] = c
    end
    local function values(...) return { distinct = true, avoid = { 0 }, range = { -3, 3 }, ... } end
    case(values(6, 3), { offsets = some })
    case(values(7, 2), { index = index, count = 5 })
    case(values(2, 6), { offsets = some, order = order, dim = -1 })
    case(values(6), { offsets = some, empty = 7 })
    case(values(2, 7, 2), { index = index, count = 6, dim = 1, empty = 2 })
    case(values(0, 3), { offsets = i64 { 0, 0, 0 } })
    case(values(3, 0), { offsets = i64 { 0, 3 } })
    case(values(0, 2), { offsets = i64 { 0 } })
    case({ 2, 700, 3, range = { 0.99, 1.01 } }, { offsets = wide(700), dim = 1 }, { grad = false })
    case({ 1500, 37, range = { 0.99, 1.01 } }, { offsets = wide(1500), order = mixed(1500) }, { grad = false, dtypes = { "f32" } })
    case({ 20000, range = { 0.999, 1.001 } }, { offsets = wide(20000) }, { grad = false, dtypes = { "f32", "f64" } })
  end
  table.insert(reducing, { T { 3, 2, values = { 1, 0 / 0, 3, 4, 5, 6 } }, "max", opts = { offsets = i64 { 0, 2, 3 } },
    grad = false, dtypes = { "f64", "f32" } })

  local nan = 0 / 0
  row("segment_reduce", {
    cases = reducing,
    ref = function(x, reduce, o)
      local y = reduced(x, reduce, o, o.dim or 0, o.empty)
      for i = 1, #x do -- math.max knows no NaN
        if x[i] ~= x[i] then y[(i - 1) // (2 * x.shape[2]) * x.shape[2] + (i - 1) % x.shape[2] + 1] = nan end
      end
      return y
    end,
    tol = { f64 = 1e-9, f32 = 2e-4, f16 = 2e-2, bf16 = 1e-1 },
    errors = {
      { T { 6, 3 }, "median", opts = { offsets = some }, match = "reduce" },
      { T { 6, 3 }, "sum", match = "offsets: expected offsets or else an index and a count, got neither" },
      { T { 7 }, "sum", opts = { offsets = i64 { 0, 7 }, index = index, count = 5 }, match = "got both" },
      { T { 7 }, "sum", opts = { index = index }, match = "count: expected" },
      { T { 7 }, "max", opts = { index = index, count = 5, order = mixed(7) }, match = "order: expected none" },
      { T { 5 }, "sum", opts = { index = index, count = 5 }, match = { "index: expected [5]", "[7]" } },
      { T { 7 }, "sum", opts = { index = index, count = 4 }, match = "index 4 is out of range for size 4" },
      { T { 7 }, "max", opts = { index = index, count = 4 }, match = "index 4 is out of range for size 4" },
      { T { 6 }, "sum", opts = { offsets = i64 { 0, 3, 2, 6 } }, match = "offsets do not rise from 0 to 6: 2 stands at 2" },
      { T { 6 }, "prod", opts = { offsets = i64 { 1, 3, 6 } }, match = "offsets do not rise from 0 to 6: 1 stands at 0" },
      { T { 6 }, "max", opts = { offsets = i64 { 0, 3, 5 } }, match = "offsets do not rise from 0 to 6: 5 stands at 2" },
      { T { 6 }, "max", opts = { offsets = i64 { 0, 3, 1 << 40, 6 } }, match = "offsets do not rise from 0 to 6" },
      { T { 6 }, "sum", opts = { offsets = T { 0, dtype = "i64" } }, match = "offsets: expected at least one" },
      { T { 6 }, "sum", opts = { offsets = T { 2, dtype = "f32" } }, match = "offsets" },
      { T { 6 }, "sum", opts = { offsets = some, order = i64 { 0, 1, 2, 3, 4, 6 } }, match = "index 6 is out of range for size 6" },
      { T { 6 }, "max", opts = { offsets = some, order = i64 { 0, 1, 2 } }, match = "order: expected the 6 positions" },
      { T {}, "sum", opts = { offsets = i64 { 0, 1 } }, match = "x: expected [..., n, ...]" },
    },
    big = function(ty)
      local x = ty.randn(30000, 9):requires_grad_()
      local sorted, offsets = ty.segments_of(ty.randint(0, 700, { 30000 }), 700)
      local loss, all = 0, {}
      for _, reduce in ipairs { "sum", "mean", "max", "prod" } do
        local y = ty.segment_reduce(x, reduce, { offsets = offsets, order = sorted })
        all[#all + 1] = y:detach()
        loss = y:sum() + loss
      end
      all[#all + 1] = ty.segment_reduce(x:detach(), "sum", { offsets = ty.tensor({ 0, 3, 29000, 30000 }, { dtype = "i64" }) })
      all[#all + 1] = ty.grad(loss, { x })[1]
      return table.unpack(all)
    end,
  })

  row("segment_softmax", {
    cases = {
      { T { 6, 3 }, opts = { offsets = some } }, { T { 2, 6 }, opts = { offsets = some, order = order, dim = 1 } },
      { T { 7, 2 }, opts = { index = index, count = 5 } }, { T { 7, range = { -60, 60 } }, opts = { index = index, count = 5 }, grad = false },
      { T { 0, 2 }, opts = { offsets = i64 { 0, 0 } } }, { T { 3, 0 }, opts = { offsets = i64 { 0, 3 } } },
      { T { 2, 700, 3 }, opts = { offsets = wide(700), dim = -2 }, grad = false },
      { T { 600, 70 }, opts = { offsets = wide(600), order = mixed(600) }, grad = false, dtypes = { "f32" } },
      { T { 9000 }, opts = { offsets = wide(9000) }, grad = false, dtypes = { "f32", "f64" } },
    },
    ref = function(x, o) return each(x.shape, o.dim or 0, o, softmax, x) end,
    errors = {
      { T { 6 }, match = "offsets: expected offsets or else" },
      { T { 6 }, opts = { offsets = i64 { 0, 4, 3, 6 } }, match = "offsets do not rise from 0 to 6: 3 stands at 2" },
      { T { 7 }, opts = { index = index, count = 3 }, match = "index 4 is out of range for size 3" },
    },
    big = function(ty)
      local x = ty.randn(30000, 5):requires_grad_()
      local y = ty.segment_softmax(x, { index = ty.randint(0, 700, { 30000 }), count = 700 })
      return y:detach(), ty.grad((y * ty.randn(30000, 5)):sum(), { x })[1]
    end,
  })

  -- ---- what they are made of ----

  local function by(offsets, o) return { offsets = offsets, order = o } end

  row("segment_sum", {
    cases = { { T { 6, 3 }, some, nil, 0 }, { T { 2, 6 }, some, order, -1 }, { T { 2, 6, 2 }, some, order, 1 } },
    ref = function(x, offsets, o, dim)
      if type(o) == "number" then o, dim = nil, o end
      return reduced(x, "sum", by(offsets, o), dim)
    end,
    tol = { f64 = 1e-10, f32 = 1e-5, f16 = 1e-2, bf16 = 5e-2 },
    dtype = function(dtype) return dtype end,
    errors = { { T { 5 }, some, nil, 0, match = "offsets do not rise from 0 to 5" }, { T { 6 }, some, nil, 1, match = "dim" } },
  })

  row("segment_spread", {
    cases = { { T { 4, 3 }, some, nil, 0, 6 }, { T { 2, 4 }, some, order, -1, 6 }, { T { 2, 4, 2 }, some, order, 1, 6 },
      { T { 0, 2 }, i64 { 0 }, nil, 0, 0 }, { T { 1, 40 }, i64 { 0, 900 }, nil, 0, 900, grad = false } },
    ref = function(g, offsets, o, dim, size)
      local outer, m, inner, d = lines(g.shape, dim)
      local y = { shape = with_size(g.shape, d, size) }
      for line = 0, outer - 1 do
        for s, group in ipairs(members(by(offsets, o))) do
          for _, j in ipairs(group) do
            for i = 1, inner do y[(line * size + j) * inner + i] = g[(line * m + s - 1) * inner + i] end
          end
        end
      end
      return y
    end,
    errors = {
      { T { 3 }, some, nil, 0, 6, match = "g: expected 4 segments" }, { T { 4 }, some, nil, 0, 7, match = "do not rise from 0 to 7" },
      { T { 4 }, some, nil, 0, -1, match = "size: expected 0 or more" },
    },
  })

  row("segment_combine", {
    cases = {
      { T { 6, 3, distinct = true }, some, nil, "max", 0 }, { T { 2, 6, distinct = true }, some, order, "min", -1, 9 },
      { T { 6, 2, avoid = { 0 } }, some, order, "prod", 0 },
    },
    ref = function(x, offsets, o, reduce, dim, empty) return reduced(x, reduce, by(offsets, o), dim, empty) end,
    tol = { f64 = 1e-10, f32 = 1e-5, f16 = 2e-2, bf16 = 1e-1 },
    errors = { { T { 6 }, some, nil, "sum", 0, match = "reduce" } },
  })

  row("segment_weights", {
    cases = { { T { 6, 3 }, some, nil, 0 }, { T { 2, 6, 2 }, some, order, 1 } },
    ref = function(x, offsets, o, dim) return each(x.shape, dim, by(offsets, o), softmax, x) end,
    errors = { { T { 6 }, i64 { 0, 5 }, nil, 0, match = "do not rise from 0 to 6" } },
  })

  row("segment_weights_backward", {
    cases = { { T { 6, 3 }, T { 6, 3 }, some, nil, 0 }, { T { 2, 6, 2 }, T { 2, 6, 2 }, some, order, 1 },
      { T { 3000, 3 }, T { 3000, 3 }, wide(3000), mixed(3000), 0 } },
    ref = function(g, y, offsets, o, dim)
      return each(g.shape, dim, by(offsets, o), function(gs, ys)
        local sum, dx = 0.0, {}
        for k = 1, #gs do sum = sum + gs[k] * ys[k] end
        for k = 1, #gs do dx[k] = ys[k] * (gs[k] - sum) end
        return dx
      end, g, y)
    end,
    tol = { f64 = 1e-9, f32 = 1e-4, f16 = 2e-2, bf16 = 1e-1 },
    errors = { { T { 6 }, T { 5 }, i64 { 0, 5 }, nil, 0, match = "g: expected the shape of y" } },
  })
end
