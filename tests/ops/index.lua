-- Rows of src/ops/index.c and src/ops/scatter_reduce.c.

return function(row, T)
  local from, at, dim_of, broadcast = T.from, T.at, T.dim, T.broadcast

  local function list(t) return table.move(t, 1, #t, 1, {}) end

  local function copy(x) return table.move(x, 1, T.count(x.shape), 1, { shape = x.shape }) end

  local function flat(shape, index)
    local n = 0
    for d, size in ipairs(shape) do n = n * size + index[d] end
    return n + 1
  end

  local function each(shape, f)
    from(shape, function(index)
      f(list(index))
      return 0
    end)
  end

  -- Lists of positions for each dimension, nil where there is none, from tensors and masks.
  local function by_dimension(x, indices, dims)
    local found, next_dim = {}, 1
    for i, t in ipairs(indices) do
      local d = dims and dim_of(dims[i], #x.shape) or next_dim
      if t.dtype == "bool" then
        local positions = {}
        for k = 1, #t.shape do positions[k] = { shape = { 0 } } end
        each(t.shape, function(p)
          if at(t, p) ~= 0 then
            for k, v in ipairs(p) do
              local q = positions[k]
              q[#q + 1], q.shape[1] = v, #q + 1
            end
          end
        end)
        for k, q in ipairs(positions) do found[d + k - 1] = q end
        next_dim = d + #t.shape
      else
        found[d] = t
        next_dim = d + 1
      end
    end
    return found
  end

  -- The shape of what is selected, and the position in x of a position in it.
  local function selection(x, indices, dims)
    local found = by_dimension(x, indices, dims)
    local first, last, count, tensors = nil, nil, 0, {}
    for d = 1, #x.shape do
      if found[d] then
        first, last, count = first or d, d, count + 1
        tensors[#tensors + 1] = found[d]
      end
    end
    local shared = broadcast(table.unpack(tensors))
    local before = last - first + 1 == count and first - 1 or 0
    local shape = {}
    local function rest(lo, hi)
      for d = lo, hi do
        if not found[d] then shape[#shape + 1] = x.shape[d] end
      end
    end
    rest(1, before)
    table.move(shared, 1, #shared, #shape + 1, shape)
    rest(before + 1, #x.shape)
    return shape, function(p)
      local others, index, k = {}, {}, 0
      for i, v in ipairs(p) do
        if i <= before or i > before + #shared then others[#others + 1] = v end
      end
      local own = table.move(p, before + 1, before + #shared, 1, {})
      for d = 1, #x.shape do
        if found[d] then
          local v = at(found[d], own)
          index[d] = v < 0 and v + x.shape[d] or v
        else
          k = k + 1
          index[d] = others[k]
        end
      end
      return index
    end
  end

  local function put(x, indices, values, accumulate, dims)
    local shape, place = selection(x, indices, dims)
    each(shape, function(p)
      local q, v = flat(x.shape, place(p)), values
      if type(values) == "table" then v = at(values, p) end
      x[q] = accumulate and x[q] + v or v
    end)
    return x
  end

  local i32 = { 1, -1, 0, 2 }

  row("index", {
    cases = {
      { T { 5, 3 }, { T { 4, int = { -5, 5 } } } }, { T { 5, 3 }, { T { 2, 2, int = { -5, 5 } } } },
      { T { 5, 3 }, { T { 4, int = { -5, 5 } }, T { 4, int = { -3, 3 } } } },
      { T { 4, 3, 5 }, { T { 2, 1, int = { -4, 4 } }, T { 3, int = { -3, 3 } } } },
      { T { 2, 4, 3, 2 }, { T { 3, int = { -4, 4 } }, T { 2, 3, int = { -3, 3 } } }, { 1, 2 } },
      { T { 2, 4, 3 }, { T { 3, int = { -2, 2 } }, T { 3, int = { -3, 3 } } }, { 0, 2 } },
      { T { 2, 4, 3 }, { T { 5, int = { -3, 3 } }, T { 1, int = { -2, 2 } } }, { -1, 0 } },
      { T { 3, 4 }, { T { 4, values = i32, dtype = "i32" } } }, { T { 5, 3 }, { T { 5, bool = true } } },
      { T { 4, 3, 2 }, { T { 4, 3, bool = true } } }, { T { 2, 3, 4 }, { T { 3, values = { 1, 0, 1 }, dtype = "bool" },
        T { 2, values = { 3, -4 }, dtype = "i64" } }, { 1, 2 } },
      { T { 5, 3 }, { T { values = { -2 }, dtype = "i64" } } }, { T { 5, 3 }, { T { 0, int = { 0, 5 } } } },
      { T { 4, 0 }, { T { 3, int = { 0, 4 } } } },
    },
    ref = function(x, indices, dims)
      local shape, place = selection(x, indices, dims)
      return from(shape, function(p) return at(x, place(list(p))) end)
    end,
    errors = {
      { T { 5, 3 }, { T { 2, values = { 0, 5 }, dtype = "i64" } }, match = "index 5 is out of range for size 5" },
      { T { 5, 3 }, { T { 2, values = { 0, -6 }, dtype = "i64" } }, match = "out of range for size 5" },
      { T { 5, 3 }, { T { 1, int = { 0, 3 } }, T { 1, values = { 3 }, dtype = "i64" } },
        match = "index 3 is out of range for size 3" },
      { T { 5, 3 }, { T { 2, int = { 0, 3 } }, T { 3, int = { 0, 3 } } }, match = "broadcast" },
      { T { 5, 3 }, { T { 2, dtype = "f32" } }, match = "indices: expected tensors of dtype i64, i32 or bool" },
      { T { 5 }, { T { 2, int = { 0, 3 } }, T { 2, int = { 0, 3 } } }, match = "dimension 1" },
      { T { 5, 3 }, { T { 3, bool = true } }, match = "expected a mask with the sizes of x [5, 3]" },
      { T { 5, 3 }, { T { 1, int = { 0, 3 } }, T { 1, int = { 0, 3 } } }, { 0, 0 }, match = "two for dimension 0" },
      { T { 5, 3 }, { T { 1, int = { 0, 3 } } }, { 0, 1 }, match = "a dim for each" },
      { T { 5, 3 }, {}, match = "at least one index tensor" },
    },
    meta = "masks select as many as are true",
    big = function(ty)
      return ty.index(ty.randn(300, 700):requires_grad_(), { ty.randint(-300, 300, { 90000 }),
        ty.randint(-700, 700, { 90000 }) })
    end,
  })

  local puts = {
    { T { 5, 3 }, { T { 4, int = { -5, 5 } } }, T { 4, 3 } }, { T { 5, 3 }, { T { 2, 2, int = { -5, 5 } } }, T { 3 } },
    { T { 5, 3 }, { T { 4, int = { -5, 5 } }, T { 4, int = { -3, 3 } } }, T { 4 } },
    { T { 5, 3 }, { T { 4, int = { -5, 5 } }, T { 4, int = { -3, 3 } } }, 1 },
    { T { 2, 4, 3, 2 }, { T { 3, int = { -4, 4 } }, T { 2, 3, int = { -3, 3 } } }, T { 2, 2, 3, 2 }, false, { 1, 2 } },
    { T { 2, 4, 3 }, { T { 3, int = { -2, 2 } }, T { 3, int = { -3, 3 } } }, T { 3, 4 }, false, { 0, 2 } },
    { T { 2, 4, 3 }, { T { 3, int = { -2, 2 } }, T { 3, int = { -3, 3 } } }, T { 1, 3, 1 }, false, { 0, 2 } },
    { T { 4, 3, 2 }, { T { 4, 3, bool = true } }, T { 2 } }, { T { 4, 3 }, { T { 4, bool = true } }, 0 },
    { T { 5, 3 }, { T { 0, int = { 0, 5 } } }, T { 0, 3 } },
  }
  local put_errors = {
    { T { 5, 3 }, { T { 2, int = { 0, 5 } } }, T { 3, 3 }, match = "values: expected what broadcasts to the [2, 3]" },
    { T { 5, 3 }, { T { 2, values = { 0, 5 }, dtype = "i64" } }, 1, match = "index 5 is out of range for size 5" },
    { T { 5, dtype = "bool" }, { T { 2, int = { 0, 5 } } }, 1, true, match = "x: expected numbers to add to" },
  }

  -- adding is for numbers
  local numbers = { "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8" }
  local function with_sums(cases)
    local all = list(cases)
    all[#all + 1] = { T { 5, 3 }, { T { 9, int = { -5, 5 } } }, T { 9, 3 }, true, dtypes = numbers }
    all[#all + 1] = { T { 2, 4, 3 }, { T { 7, int = { 0, 2 } }, T { 7, int = { 0, 3 } } }, T { 7, 4 }, true, { 0, 2 },
      dtypes = numbers }
    all[#all + 1] = { T { 5, 3 }, { T { 6, int = { -5, 5 } } }, 1, true, dtypes = numbers }
    return all
  end

  row("index_put", {
    cases = with_sums(puts),
    ref = function(x, ...) return put(copy(x), ...) end,
    errors = put_errors,
    meta = "masks select as many as are true",
  })

  row("index_put_", {
    cases = with_sums(puts),
    ref = put,
    errors = put_errors,
    meta = "masks select as many as are true",
  })

  local function copied(x, dim, index, src)
    local d, y = dim_of(dim, #x.shape), copy(x)
    local shape = list(x.shape)
    if #shape > 0 then shape[d] = #index end
    each(shape, function(p)
      local v = type(src) == "table" and src[#src.shape == 0 and 1 or flat(src.shape, p)] or src
      if #p > 0 then p[d] = index[p[d] + 1] end
      y[flat(x.shape, p)] = v
    end)
    return y
  end

  row("index_copy", {
    cases = {
      { T { 5, 3 }, 0, T { 4, int = { 0, 5 } }, T { 4, 3 } }, { T { 2, 4, 3 }, 1, T { 6, int = { 0, 4 } },
        T { 2, 6, 3 } },
      { T { 2, 5 }, -1, T { 7, int = { 0, 5 } }, T { 2, 7 } }, { T { 6 }, 0, T { 2, values = { 5, 5 }, dtype = "i32" },
        T { 2 } },
      { T { 4, 2 }, 0, T { 0, int = { 0, 4 } }, T { 0, 2 } }, { T {}, 0, T { 1, values = { 0 }, dtype = "i64" }, T {} },
      { T { 2, 4, 3 }, 1, T { 2, int = { 0, 4 } }, 1 },
      { T { 3, 130 }, 0, T { 40, int = { 0, 3 } }, T { 40, 130 }, grad = false },
    },
    ref = copied,
    errors = {
      { T { 5, 3 }, 0, T { 4, int = { 0, 5 } }, T { 3, 3 }, match = "src: expected a number or the shape of x" },
      { T { 5, 3 }, 0, T { 1, values = { 5 }, dtype = "i64" }, T { 1, 3 },
        match = "index 5 is out of range for size 5" },
      { T { 5, 3 }, 0, T { 1, 1, int = { 0, 5 } }, T { 1, 3 }, match = "index: expected [n]" },
      { T { 3, dtype = "i64" }, 0, T { 1, int = { 0, 3 } }, T { 1, dtype = "f32" },
        match = "src: expected a dtype that fits" },
    },
    big = function(ty)
      return ty.index_copy(ty.randn(50, 100), 0, ty.randint(0, 50, { 3000 }), ty.randn(3000, 100)),
        ty.index_copy(ty.randn(1000), 0, ty.randint(0, 1000, { 100000 }), ty.randn(100000))
    end,
  })

  row("index_fill", {
    cases = {
      { T { 5, 3 }, 0, T { 4, int = { 0, 5 } }, 1 }, { T { 2, 4, 3 }, -2, T { 2, int = { 0, 4 } }, 0 },
      { T { 4, 2 }, 0, T { 0, int = { 0, 4 } }, 1 },
      { T { 4, 2 }, 1, T { 1, int = { 0, 2 } }, 1.5, dtypes = { "f32", "f64", "f16" } },
      { T { 4, 2 }, 0, T { 3, int = { 0, 4 } }, T {} }, { T { 2, 3 }, -1, T { 0, int = { 0, 3 } }, T {} },
    },
    ref = copied,
    errors = {
      { T { 5, 3 }, 0, T { 1, values = { 5 }, dtype = "i64" }, 1, match = "index 5 is out of range for size 5" },
      { T { 5, dtype = "i64" }, 0, T { 1, int = { 0, 5 } }, 0.5, match = "value: expected an integer" },
      { T { 5 }, 0, T { 1, int = { 0, 5 } }, T { 1 }, match = "value: expected a number or a tensor without" },
    },
  })

  row("ravel_index", {
    cases = {
      { { T { 4, int = { -3, 3 } } }, { 3 } }, { { T { 4, 1, int = { -3, 3 } }, T { 5, int = { -4, 4 } } }, { 3, 4 } },
      { { T { int = { 0, 3 } }, T { 2, int = { 0, 4 } }, T { 2, int = { -2, 2 } } }, { 3, 4, 2 } },
      { { T { 0, int = { 0, 3 } } }, { 3 } },
    },
    ref = function(indices, size)
      local y = from(broadcast(table.unpack(indices)), function(p)
        local n = 0
        for i, t in ipairs(indices) do
          local v = at(t, p)
          n = n * size[i] + (v < 0 and v + size[i] or v)
        end
        return n
      end)
      y.dtype = "i64"
      return y
    end,
    dtypes = { "i64", "i32" },
    errors = {
      { { T { 1, values = { 3 } } }, { 3 }, match = "index 3 is out of range for size 3" },
      { { T { 1, values = { 0 } } }, { 3, 2 }, match = "size: expected one size" },
      { { T { 1, values = { 0 }, dtype = "u8" } }, { 3 }, match = "indices: expected indices of dtype i64 or i32" },
    },
    big = function(ty)
      return ty.ravel_index({ ty.randint(-300, 300, { 200000 }), ty.randint(0, 7, { 200000 }) }, { 300, 7 })
    end,
  })

  -- items: 0 skip n, 1 new dimension, 2 position, 3 start stop step
  row("slice_put_", {
    cases = {
      { T { 4, 5 }, T { 5 }, { 2, -1, 0, 0 } }, { T { 4, 5 }, T { 4, 2 }, { 0, 1, 0, 0, 3, 0, 4, 2 } },
      { T { 4, 5 }, T { 1, 2, 1 }, { 1, 0, 0, 0, 3, 1, 3, 1 } }, { T { 4, 5 }, 1, { 3, 1, 3, 1, 2, 2, 0, 0 } },
      { T { 4, 5 }, T { 4, 5 }, {} }, { T { 3 }, T {}, { 3, 0, 0, 1 } },
    },
    ref = function(x, source, items)
      local shape, origin, step, dims, d = {}, {}, {}, {}, 1
      for k = 1, #x.shape do origin[k], step[k] = 0, 1 end
      local function keep() shape[#shape + 1], dims[#shape + 1], d = x.shape[d], d, d + 1 end
      for i = 1, #items, 4 do
        local what, a, b, c = table.unpack(items, i, i + 3)
        if what == 0 then for _ = 1, a do keep() end
        elseif what == 1 then shape[#shape + 1], dims[#shape + 1] = 1, 0
        elseif what == 2 then origin[d], d = a < 0 and a + x.shape[d] or a, d + 1
        else
          shape[#shape + 1], dims[#shape + 1] = math.max(0, (b - a + c - 1) // c), d
          origin[d], step[d], d = a, c, d + 1
        end
      end
      while d <= #x.shape do keep() end
      each(shape, function(p)
        local q = list(origin)
        for i, own in ipairs(dims) do
          if own > 0 then q[own] = origin[own] + p[i] * step[own] end
        end
        x[flat(x.shape, q)] = type(source) == "table" and at(source, p) or source
      end)
      return x
    end,
    errors = {
      { T { 4, 5 }, T { 4 }, { 2, 0, 0, 0 }, match = "broadcast" },
      { T { 4, 5 }, T { 5 }, { 7, 0, 0, 0 }, match = "items: expected kinds" },
      { T { 4, 5 }, T { 5 }, { 2, 4, 0, 0 }, match = "index" },
    },
  })

  row("masked_scatter", {
    cases = {
      { T { 3, 4 }, T { 3, 4, bool = true }, T { 12 } }, { T { 3, 4 }, T { 4, bool = true }, T { 4, 3 } },
      { T { 5 }, T { 5, values = { 0, 0, 0, 0, 0 }, dtype = "bool" }, T { 0 } },
      { T {}, T { values = { 1 }, dtype = "bool" }, T { 2 } }, { T { 0, 2 }, T { 0, 2, bool = true }, T { 3 } },
    },
    ref = function(x, mask, source)
      local n = 0
      return from(x.shape, function(p)
        if at(mask, p) == 0 then return at(x, p) end
        n = n + 1
        return source[n]
      end)
    end,
    errors = {
      { T { 3 }, T { 3, dtype = "i64" }, T { 3 }, match = "mask: expected dtype bool" },
      { T { 3 }, T { 4, bool = true }, T { 4 }, match = "broadcast" },
      { T { 3 }, T { 2, 3, bool = true }, T { 6 }, match = "mask" },
      { T { 3 }, T { 3, values = { 1, 1, 0 }, dtype = "bool" }, T { 1 }, match = "source: expected at least the 2" },
      { T { 3, dtype = "f32" }, T { 3, bool = true }, T { 3, dtype = "f64" }, match = "source: expected the dtype" },
    },
    meta = "how much of the source is read depends on the mask",
  })

  row("take_along_dim", {
    cases = {
      { T { 3, 4 }, T { 3, 2, int = { 0, 4 } }, 1 }, { T { 3, 4 }, T { 1, 2, int = { 0, 4 } }, -1 },
      { T { 1, 4 }, T { 5, 2, int = { 0, 4 } }, 1 }, { T { 2, 3, 4 }, T { 2, 5, 1, int = { 0, 3 } }, 1 },
      { T { 3, 4 }, T { 2, 2, int = { 0, 12 } } }, { T { 3, 4 }, T { 3, 0, int = { 0, 4 } }, 1 },
    },
    ref = function(x, index, dim)
      if not dim then
        return from({ #index }, function(p) return x[index[p[1] + 1] + 1] end)
      end
      local d, shape = dim_of(dim, #x.shape), {}
      for k = 1, #x.shape do
        shape[k] = (k == d or x.shape[k] == 1) and index.shape[k] or x.shape[k]
      end
      return from(shape, function(p)
        local q = list(p)
        q[d] = at(index, p)
        for k = 1, #q do
          if x.shape[k] == 1 and k ~= d then q[k] = 0 end
        end
        return x[flat(x.shape, q)]
      end)
    end,
    errors = {
      { T { 3, 4 }, T { 2, 2, int = { 0, 3 } }, 1, match = "index: expected sizes that broadcast to x" },
      { T { 3, 4 }, T { 3, int = { 0, 3 } }, 1, match = "index: expected the 2 dimensions" },
      { T { 3, 4 }, T { 3, 1, int = { 0, 3 } }, 2, match = "dim: expected a dimension in [-2, 1]" },
      { T { 3, 4 }, T { 3, 1, dtype = "f32" }, 1, match = "i64 or i32" },
    },
  })

  local function reduced(x, dim, index, src, reduce, include_self)
    local d, y, seen = dim_of(dim, #x.shape), copy(x), {}
    local is_float = not (x.dtype or "f"):find "^[iu]"
    if include_self ~= false then
      for p = 1, #y do seen[p] = 1 end
    end
    each(index.shape, function(i)
      local p, v = list(i), src[flat(src.shape, i)]
      if #p > 0 then p[d] = at(index, i) end
      p = flat(x.shape, p)
      local n, old = seen[p], y[p]
      seen[p] = (n or 0) + 1
      if not n then y[p] = v
      elseif reduce == "sum" or reduce == "mean" then y[p] = old + v
      elseif reduce == "prod" then y[p] = old * v
      elseif reduce == "amax" then y[p] = (v > old or v ~= v) and v or old
      else y[p] = (v < old or v ~= v) and v or old end
    end)
    if reduce == "mean" then
      for p = 1, #y do
        local n = seen[p] or 1
        if is_float then y[p] = y[p] / n else y[p] = y[p] // n end
      end
    end
    return y
  end

  local reductions = {}
  for _, reduce in ipairs { "sum", "prod", "mean", "amax", "amin" } do
    for _, include_self in ipairs { true, false } do
      local narrow = (reduce == "sum" or reduce == "prod") and { "f64", "f32", "f16", "bf16", "i64", "i32" } or nil
      reductions[#reductions + 1] = { T { 3, 4, distinct = true }, 1, T { 3, 6, int = { 0, 4 } },
        T { 3, 6, distinct = true }, reduce, include_self, dtypes = narrow }
      reductions[#reductions + 1] = { T { 5, 2, distinct = true }, 0, T { 4, 2, int = { 0, 5 } },
        T { 6, 3, distinct = true }, reduce, include_self, dtypes = narrow }
    end
    reductions[#reductions + 1] = { T {}, 0, T { values = { 0 }, dtype = "i64" }, T {}, reduce }
    reductions[#reductions + 1] = { T { 3 }, 0, T { 0, int = { 0, 3 } }, T { 0 }, reduce, false }
  end
  reductions[#reductions + 1] = { T { 3, values = { 1, T.nan, 2 } }, 0, T { 3, values = { 0, 1, 2 }, dtype = "i64" },
    T { 3, values = { T.nan, 1, 3 } }, "amax", grad = false }
  reductions[#reductions + 1] = { T { 2, 3, distinct = true }, 1, T { 2, 300, int = { 0, 3 } },
    T { 2, 300, distinct = true }, "amin", grad = false, dtypes = { "f64", "f32", "i64" } }

  row("scatter_reduce", {
    cases = reductions,
    ref = reduced,
    tol = 1e-5,
    errors = {
      { T { 3, 4 }, 1, T { 3, 2, int = { 0, 4 } }, T { 3, 2 }, "median", match = "reduce" },
      { T { 3, 4 }, 1, T { 4, 2, int = { 0, 4 } }, T { 4, 2 }, "sum", match = "index: expected 2 dimensions" },
      { T { 3, 4 }, 1, T { 3, 2, int = { 0, 4 } }, T { 3, 1 }, "prod", match = "src: expected at least the sizes" },
      { T { 3, dtype = "i64" }, 0, T { 1, int = { 0, 3 } }, T { 1, dtype = "f32" }, "amax", match = "dtype of x" },
      { T { 3 }, 0, T { 1, values = { 3 }, dtype = "i64" }, T { 1 }, "amax",
        match = "index 3 is out of range for size 3" },
    },
    big = function(ty)
      local index = ty.randint(0, 50, { 100000 })
      return ty.scatter_reduce(ty.randn(50):requires_grad_(), 0, index, ty.randn(100000), "amax"),
        ty.scatter_reduce(ty.randn(300, 700), 0, ty.randint(0, 300, { 300, 700 }), ty.randn(300, 700), "prod")
    end,
  })

  row("scatter_combine", {
    cases = {
      { T { 3, 4, distinct = true }, 1, T { 3, 6, int = { 0, 4 } }, T { 3, 6, distinct = true }, "amax" },
      { T { 5, 2, distinct = true }, 0, T { 4, 2, int = { 0, 5 } }, T { 4, 2, distinct = true }, "amin" },
      { T { 2, 3, 2 }, 1, T { 2, 4, 2, int = { 0, 3 } }, T { 2, 4, 2 }, "prod",
        dtypes = { "f64", "f32", "f16", "bf16", "i64", "i32" } },
    },
    ref = reduced,
    errors = {
      { T { 3, 4 }, 1, T { 3, 2, int = { 0, 4 } }, T { 3, 1 }, "amax", match = "src: expected the shape of index" },
      { T { 3, 4 }, 1, T { 3, 2, int = { 0, 4 } }, T { 3, 2 }, "sum", match = "reduce" },
    },
  })
end
