-- Rows of src/ops/indexing.c.

return function(row, T)
  local from, at, dim_of = T.from, T.at, T.dim

  local function list(t) return table.move(t, 1, #t, 1, {}) end

  -- index with position d (1-based) replaced
  local function moved(index, d, position)
    local other = list(index)
    if d <= #other then other[d] = position end
    return other
  end

  local function flat(shape, index)
    local n = 0
    for d, size in ipairs(shape) do n = n * size + index[d] end
    return n + 1
  end

  local function copy(x) return table.move(x, 1, T.count(x.shape), 1, { shape = x.shape }) end

  local function zeros(shape)
    return from(shape, function() return 0 end)
  end

  local function each(shape, f)
    from(shape, function(index)
      f(index)
      return 0
    end)
  end

  local i32 = { 0, 0, 1, 2, 1, 0 }

  -- ---- gather and its gradient ----

  row("gather", {
    cases = {
      { T { 3, 4 }, 1, T { 3, 2, int = { 0, 4 } } }, { T { 3, 4 }, 0, T { 5, 4, int = { 0, 3 } } },
      { T { 2, 3, 4 }, -2, T { 2, 5, 4, int = { 0, 3 } } }, { T { 2, 3, 4 }, 0, T { 3, 2, 3, int = { 0, 2 } } },
      { T { 4, 3, 5 }, 2, T { 2, 2, 3, int = { 0, 5 } } }, { T { 3, 2 }, 0, T { 3, 2, values = i32, dtype = "i32" } },
      { T { 7 }, 0, T { 9, int = { 0, 7 } } }, { T {}, 0, T { values = { 0 }, dtype = "i64" } },
      { T { 3, 4 }, 1, T { 3, 0, int = { 0, 4 } } }, { T { 0, 4 }, 1, T { 0, 2, int = { 0, 4 } } },
    },
    ref = function(x, dim, index)
      local d = dim_of(dim, #x.shape)
      return from(index.shape, function(i) return at(x, moved(i, d, at(index, i))) end)
    end,
    errors = {
      { T { 3, 4 }, 2, T { 3, 2, int = { 0, 3 } }, match = "dim" },
      { T { 3, 4 }, 1, T { 4, 2, int = { 0, 3 } }, match = "index: expected 2 dimensions" },
      { T { 3, 4 }, 1, T { 3, int = { 0, 3 } }, match = "index: expected 2 dimensions" },
      { T { 3, 4 }, 1, T { 3, 1, dtype = "f32" }, match = "i64 or i32" },
      { T { 3 }, 0, T { 2, values = { 0, 3 }, dtype = "i64" }, match = "index 3 is out of range for size 3" },
      { T { 3 }, 0, T { 2, values = { 0, -1 }, dtype = "i32" }, match = "index -1 is out of range for size 3" },
      { T { 0 }, 0, T { 2, values = { 0, 0 }, dtype = "i64" }, match = "index 0 is out of range for size 0" },
    },
    big = function(ty)
      return ty.gather(ty.randn(300, 700):requires_grad_(), 0, ty.randint(0, 300, { 300, 700 })),
        ty.gather(ty.randn(300, 700), 1, ty.randint(0, 700, { 300, 700 }))
    end,
  })

  row("gather_backward", {
    cases = {
      { T { 3, 2 }, 1, T { 3, 2, int = { 0, 4 } }, { 3, 4 } }, { T { 5, 4 }, 0, T { 5, 4, int = { 0, 3 } }, { 3, 4 } },
      { T { 2, 2, 3 }, 2, T { 2, 2, 3, int = { 0, 5 } }, { 4, 3, 5 } }, { T {}, 0, T { values = { 0 },
        dtype = "i64" }, {} },
      { T { 3, 0 }, 1, T { 3, 0, int = { 0, 4 } }, { 3, 4 } },
    },
    ref = function(g, dim, index, size)
      local d, y = dim_of(dim, #size), zeros(size)
      each(index.shape, function(i)
        local p = flat(size, moved(i, d, at(index, i)))
        y[p] = y[p] + at(g, i)
      end)
      return y
    end,
    errors = {
      { T { 3, 2 }, 1, T { 3, 3, int = { 0, 4 } }, { 3, 4 }, match = "g: expected the shape of index" },
      { T { 3, 2 }, 1, T { 3, 2, int = { 0, 4 } }, { 2, 4 }, match = "index: expected" },
    },
  })

  -- ---- scatter ----

  local function scattered(x, dim, index, src, add)
    local d, y = dim_of(dim, #x.shape), copy(x)
    each(index.shape, function(i)
      local p = flat(x.shape, moved(i, d, at(index, i)))
      local v = type(src) == "table" and src[flat(src.shape, i)] or src
      y[p] = add and y[p] + v or v
    end)
    return y
  end

  row("scatter", {
    cases = {
      { T { 3, 4 }, 1, T { 3, 2, int = { 0, 4 } }, T { 3, 2 } }, { T { 3, 4 }, 0, T { 6, 4, int = { 0, 3 } },
        T { 6, 4 } },
      { T { 2, 3, 4 }, 1, T { 2, 5, 4, int = { 0, 3 } }, T { 2, 5, 4 } }, { T { 3, 2, 4 },
        -3, T { 2, 1, 3, int = { 0, 3 } }, T { 4, 2, 3 } },
      { T { 5 }, 0, T { 8, int = { 0, 5 } }, T { 8 } }, { T { 3, 4 }, 1, T { 3, 2, int = { 0, 4 } }, 1 },
      { T { 3, 2 }, 0, T { 3, 2, values = i32, dtype = "i32" }, 0.0 }, { T {}, 0, T { values = { 0 }, dtype = "i64" },
        T {} },
      { T { 3 }, 0, T { 0, int = { 0, 3 } }, T { 0 } }, { T { 0, 2 }, 0, T { 0, 2, int = { 0, 3 } }, 1 },
    },
    ref = function(x, dim, index, src) return scattered(x, dim, index, src, false) end,
    errors = {
      { T { 3, 4 }, 1, T { 3, 2, int = { 0, 4 } }, T { 3, 1 }, match = "src: expected at least the sizes of index" },
      { T { 3, 4 }, 1, T { 4, 2, int = { 0, 4 } }, T { 4, 2 }, match = "index: expected 2 dimensions" },
      { T { 3 }, 0, T { 1, values = { 3 }, dtype = "i64" }, 1, match = "index 3 is out of range for size 3" },
      { T { 3, dtype = "i64" }, 0, T { 1, int = { 0, 3 } }, T { 1, dtype = "f32" },
        match = "src: expected a dtype that fits" },
    },
    big = function(ty)
      local index = ty.randint(0, 50, { 100000 })
      return ty.scatter(ty.randn(50), 0, index, ty.randn(100000)), ty.scatter(ty.randn(300, 700),
        0, ty.randint(0, 300, { 300, 700 }), 1)
    end,
  })

  row("scatter_add", {
    cases = {
      { T { 3, 4 }, 1, T { 3, 2, int = { 0, 4 } }, T { 3, 2 } }, { T { 3, 4 }, 0, T { 6, 4, int = { 0, 3 } },
        T { 6, 4 } },
      { T { 2, 3, 4 }, 1, T { 2, 5, 3, int = { 0, 3 } }, T { 2, 6, 4 } }, { T { 5 }, 0, T { 8, int = { 0, 5 } },
        T { 8 } },
      { T { 3, 2 }, 0, T { 3, 2, values = i32, dtype = "i32" }, T { 3, 2 } }, { T {}, -1, T { values = { 0 },
        dtype = "i64" }, T {} },
      { T { 3 }, 0, T { 0, int = { 0, 3 } }, T { 0 } },
      -- indices that repeat often, and more than are sorted at once
      { T { 2, 3 }, 1, T { 2, 70, int = { 0, 3 } }, T { 2, 70 }, grad = false },
      { T { 300 }, 0, T { 5000, int = { 0, 300 } }, T { 5000 }, grad = false, dtypes = { "f32" } },
    },
    ref = function(x, dim, index, src) return scattered(x, dim, index, src, true) end,
    errors = {
      { T { 3, 4 }, 1, T { 3, 2, int = { 0, 4 } }, T { 2, 2 }, match = "src: expected at least" },
      { T { 3 }, 0, T { 1, values = { -1 }, dtype = "i64" }, T { 1 }, match = "index -1 is out of range for size 3" },
    },
  })

  -- ---- whole positions of a dimension ----

  row("index_select", {
    cases = {
      { T { 5, 3 }, 0, T { 4, int = { 0, 5 } } }, { T { 2, 4, 3 }, 1, T { 6, int = { 0, 4 } } }, { T { 2, 5 },
        -1, T { 3, int = { 0, 5 } } },
      { T { 6 }, 0, T { 2, values = { 5, 0 }, dtype = "i32" } }, { T { 4, 2 }, 0, T { 0, int = { 0, 4 } } },
      { T { 4, 0 }, 0, T { 3, int = { 0, 4 } } }, { T { 4, 2 }, 0, T { values = { 3 }, dtype = "i64" } },
      { T {}, 0, T { 1, values = { 0 }, dtype = "i64" } },
    },
    ref = function(x, dim, index)
      local d, shape = dim_of(dim, #x.shape), list(x.shape)
      if #shape > 0 then shape[d] = #index end
      return from(shape, function(i) return at(x, moved(i, d, #i > 0 and index[i[d] + 1])) end)
    end,
    errors = {
      { T { 5, 3 }, 2, T { 4, int = { 0, 3 } }, match = "dim" }, { T { 5, 3 }, 0, T { 2, 2, int = { 0, 5 } },
        match = "index: expected [n]" },
      { T { 5, 3 }, 0, T { 2, values = { 0, 5 }, dtype = "i64" }, match = "index 5 is out of range for size 5" },
      { T {}, 0, T { 2, values = { 0, 0 }, dtype = "i64" }, match = "one position" },
      { T { 5, 3 }, 0, T { 2, dtype = "f32" }, match = "i64 or i32" },
    },
  })

  local function added(x, dim, index, src)
    local d, y = dim_of(dim, #x.shape), copy(x)
    each(src.shape, function(i)
      local p = flat(x.shape, moved(i, d, #i > 0 and index[i[d] + 1]))
      y[p] = y[p] + src[flat(src.shape, i)]
    end)
    return y
  end

  row("index_select_backward", {
    cases = {
      { T { 4, 3 }, 0, T { 4, int = { 0, 5 } }, 5 }, { T { 2, 6, 3 }, 1, T { 6, int = { 0, 4 } }, 4 }, { T { 3, 0 },
        0, T { 3, int = { 0, 4 } }, 4 },
      { T { 0, 2 }, 0, T { 0, int = { 0, 4 } }, 4 }, { T {}, 0, T { values = { 0 }, dtype = "i64" }, 1 },
    },
    ref = function(g, dim, index, size)
      local shape = list(g.shape)
      if #shape > 0 then shape[dim_of(dim, #shape)] = size end
      return added(zeros(shape), dim, index, g)
    end,
    errors = { { T { 4, 3 }, 0, T { 3, int = { 0, 5 } }, 5, match = "g: expected one position" } },
  })

  row("index_add", {
    cases = {
      { T { 5, 16 }, 0, T { 40, int = { 0, 5 } }, T { 40, 16 }, grad = false, dtypes = { "f32", "bf16", "f16" } },
      { T { 5, 3 }, 0, T { 4, int = { 0, 5 } }, T { 4, 3 } }, { T { 2, 4, 3 }, 1, T { 6, int = { 0, 4 } },
        T { 2, 6, 3 } },
      { T { 2, 5 }, -1, T { 7, int = { 0, 5 } }, T { 2, 7 } }, { T { 6 }, 0, T { 2, values = { 5, 5 },
        dtype = "i32" }, T { 2 } },
      { T { 4, 2 }, 0, T { 0, int = { 0, 4 } }, T { 0, 2 } }, { T {}, 0, T { 1, values = { 0 }, dtype = "i64" }, T {} },
      { T { 2, 3, 4 }, 1, T { 50, int = { 0, 3 } }, T { 2, 50, 4 }, grad = false }, -- repeated often
      -- rows that are long enough to be sorted by destination, of which some get nothing; too uneven
      { T { 5, 130 }, 0, T { 40, int = { 0, 5 } }, T { 40, 130 }, grad = false },
      { T { 30, 64 }, 0, T { 9, int = { 0, 30 } }, T { 9, 64 }, grad = false },
      { T { 30, 64 }, 0, T { 40, int = { 7, 8 } }, T { 40, 64 }, grad = false },
    },
    ref = added,
    errors = {
      { T { 5, 3 }, 0, T { 4, int = { 0, 5 } }, T { 3, 3 }, match = "src: expected the shape of x" },
      { T { 5, 3 }, 0, T { 1, values = { 5 }, dtype = "i64" }, T { 1, 3 },
        match = "index 5 is out of range for size 5" },
      { T { 5, 3 }, 0, T { 1, 1, int = { 0, 5 } }, T { 1, 3 }, match = "index: expected [n]" },
    },
  })

  -- ---- embedding ----

  row("embedding", {
    cases = {
      { T { 5, 3 }, T { 2, 4, int = { 0, 5 } } }, { T { 5, 3 }, T { 7, int = { 0, 5 } } }, { T { 5, 3 },
        T { values = { 4 }, dtype = "i64" } },
      { T { 5, 3 }, T { 6, values = i32, dtype = "i32" } }, { T { 5, 3 }, T { 2, 0, int = { 0, 5 } } }, { T { 4, 0 },
        T { 3, int = { 0, 4 } } },
      { T { 5, 3 }, T { 7, int = { 0, 5 } }, 2, grad = false },
      -- padding leaves the true gradient out: tests/lua/indexing_test.lua
    },
    ref = function(weight, index)
      local shape = list(index.shape)
      shape[#shape + 1] = weight.shape[2]
      return from(shape, function(i)
        local column = table.remove(i)
        local v = at(weight, { at(index, i), column })
        i[#i + 1] = column
        return v
      end)
    end,
    errors = {
      { T { 5 }, T { 2, int = { 0, 5 } }, match = "weight: expected [n, width]" },
      { T { 5, 3 }, T { 2, dtype = "f32" }, match = "index: expected indices" },
      { T { 5, 3 }, T { 2, values = { 5, 0 }, dtype = "i64" }, match = "index 5 is out of range for size 5" },
      { T { 5, 3 }, T { 2, values = { 0, 0 }, dtype = "i64" }, 5, match = "padding_index" },
    },
  })

  local function add_rows(x, g, index, padding)
    local width = x.shape[2]
    for i = 1, #index do
      for j = 1, width do
        local p = index[i] * width + j
        if index[i] ~= padding then x[p] = x[p] + g[(i - 1) * width + j] end
      end
    end
    return x
  end

  row("embedding_backward", {
    cases = {
      { T { 2, 4, 3 }, T { 2, 4, int = { 0, 5 } }, 5 }, { T { 7, 3 }, T { 7, int = { 0, 5 } }, 5, 2 }, { T { 3 },
        T { values = { 4 }, dtype = "i64" }, 5 },
      { T { 0, 3 }, T { 0, int = { 0, 5 } }, 5 },
      -- rows of several parts of 512, some of which many add to and some none
      { T { 60, 1100 }, T { 60, int = { 0, 4 } }, 6, 3, grad = false, dtypes = { "f32", "bf16", "f16" } },
    },
    ref = function(g, index, rows, padding)
      return add_rows(zeros { rows, g.shape[#g.shape] }, g, index, padding)
    end,
    errors = { { T { 7, 3 }, T { 6, int = { 0, 5 } }, 5, match = "g: expected one row" } },
    big = function(ty)
      return ty.embedding_backward(ty.randn(4000, 200), ty.randint(0, 300, { 4000 }), 300)
    end,
  })

  row("embedding_add_", {
    cases = {
      { T { 5, 3 }, T { 2, 4, 3 }, T { 2, 4, int = { 0, 5 } } }, { T { 5, 3 }, T { 7, 3 }, T { 7, int = { 0, 5 } }, 2 },
      { T { 5, 3 }, T { 3 }, T { values = { 4 }, dtype = "i64" } }, { T { 5, 3 }, T { 0, 3 }, T { 0, int = { 0, 5 } } },
      { T { 6, 1100 }, T { 60, 1100 }, T { 60, int = { 0, 4 } }, 3, dtypes = { "f32", "bf16", "f16" } },
    },
    ref = add_rows,
    errors = {
      { T { 5, 3 }, T { 7, 3 }, T { 6, int = { 0, 5 } }, match = "g: expected one row" },
      { T { 5, 3 }, T { 7, 2 }, T { 7, int = { 0, 5 } }, match = "g: expected rows like those of x" },
      { T { 5, 3 }, T { 2, 3 }, T { 2, values = { 5, 0 }, dtype = "i64" }, match = "out of range" },
    },
  })

  -- ---- shapes that depend on values ----

  local dynamic = "the shape of the result depends on the values"

  row("masked_select", {
    cases = {
      { T { 3, 4 }, T { 3, 4, bool = true } }, { T { 3, 4 }, T { 4, bool = true } }, { T { 4 },
        T { 3, 4, bool = true } },
      { T { 3, 1 }, T { 1, 5, bool = true } }, { T {}, T { values = { 1 }, dtype = "bool" } }, { T { 3 },
        T { values = { 0 }, dtype = "bool" } },
      { T { 0, 2 }, T { 0, 2, bool = true } },
    },
    ref = function(x, mask)
      local y = { shape = { 0 } }
      each(T.broadcast(x, mask), function(i)
        if at(mask, i) ~= 0 then y[#y + 1] = at(x, i) end
      end)
      y.shape[1] = #y
      return y
    end,
    errors = { { T { 3 }, T { 3, dtype = "i64" }, match = "mask: expected dtype bool" }, { T { 3 },
      T { 4, bool = true }, match = "broadcast" } },
    meta = dynamic,
  })

  row("nonzero", {
    cases = {
      { T { 3, 4, range = { -1, 1 } } },
      { T { 2, 3, 4, values = { 0, 1, 0, 2, 3, 0, 0, 0, 0, 0, 4, 5, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0, 0, 8 } } },
      { T { 5, values = { 0.0, -0.0, T.nan, 1e-7, T.inf } } }, { T { 0, 3 } }, { T {} }, { T { values = { 0 } } },
      { T { 4, 0 } }, { T { 3, 1500, range = { -1, 1 } }, dtypes = { "bool", "i16", "f32" } },
    },
    ref = function(x)
      local y, nd = { shape = { 0, #x.shape } }, #x.shape
      each(x.shape, function(i)
        if at(x, i) ~= 0 then
          y.shape[1] = y.shape[1] + 1
          for d = 1, nd do y[#y + 1] = i[d] end
        end
      end)
      return y
    end,
    meta = dynamic,
    big = function(ty) return ty.nonzero(ty.randn(300, 700):gt(0.5)) end,
  })

  row("one_hot", {
    cases = {
      { T { 4, int = { 0, 5 } }, 5, dtypes = { "i64", "i32", "u8", "i8", "i16" } }, { T { 2, 3, int = { 0, 5 } }, 7 },
      { T { 3, values = { 0, 1, 1 } }, 2 }, { T { 5, values = { 0, 3, 1, 3, 2 }, dtype = "i64" } },
      { T { values = { 2 }, dtype = "i32" } },
      { T { 0, int = { 0, 5 } }, 3 },
    },
    ref = function(x, classes)
      if not classes then classes = math.max(table.unpack(x)) + 1 end
      local shape = list(x.shape)
      shape[#shape + 1] = classes
      return from(shape, function(i)
        local class = table.remove(i)
        local v = at(x, i) == class and 1 or 0
        i[#i + 1] = class
        return v
      end)
    end,
    errors = {
      { T { 2, values = { 0, 3 }, dtype = "i64" }, 3, match = "index 3 is out of range for size 3" },
      { T { 2, values = { 0, -2 }, dtype = "i64" }, match = "index -2 is out of range for size 1" },
      { T { 0, dtype = "i64" }, match = "classes" }, { T { 2, values = { 0, 0 }, dtype = "i64" },
        -3, match = "classes" },
    },
    meta = dynamic,
  })
end
