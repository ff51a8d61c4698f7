-- Rows of copies, views and rearrangements: src/ops/copy.c, views.c, arrange.c.

return function(row, T)
  local inf, nan = T.inf, T.nan
  local FLOATS = { "f32", "f64", "f16", "bf16" }
  local from, at, dim_of = T.from, T.at, T.dim

  -- Sizes given as several numbers or as one list.
  local function numbers(...)
    local first = ...
    return type(first) == "table" and first or { ... }
  end

  local function plain(x, shape) -- the values of x in another shape
    return table.move(x, 1, T.count(x.shape), 1, { shape = shape or x.shape })
  end

  local function list(shape) return table.move(shape, 1, #shape, 1, {}) end

  -- x at index with position d (1-based) replaced by f(position)
  local function moved(index, d, position)
    local other = list(index)
    other[d] = position
    return other
  end

  -- ---- copies and dtypes ----

  local some = { { T { 3, 4 } }, { T { 2, 1, 3 } }, { T {} }, { T { 0, 3 } } }
  row("clone", { cases = some, ref = function(x) return plain(x) end })
  row("contiguous", { cases = some, ref = function(x) return plain(x) end })
  row("detach", { cases = some, ref = function(x) return plain(x) end })
  row("to_device", {
    cases = { { T { 3, 4 }, "cpu" }, { T { 0, 2 }, "cpu" }, { T {}, "cpu" } }, meta = false,
    ref = function(x) return plain(x) end,
  })

  local limits = {
    i64 = {
      math.mininteger, math.maxinteger,
    }, i32 = { -2 ^ 31, 2 ^ 31 - 1 }, i16 = { -32768, 32767 }, i8 = { -128, 127 }, u8 = { 0, 255 },
  }
  local is_float = { f32 = true, f64 = true, f16 = true, bf16 = true }
  local cast_cases = {}
  for _, to in ipairs { "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool" } do
    cast_cases[#cast_cases + 1] = { T { 3, 4, range = { -9, 9 } }, to, grad = to == "f64" and true or false }
    cast_cases[#cast_cases + 1] = {
      T { 8, values = { 0.0, -0.7, 0.7, 1e3, -1e3, 2.5, 127.9, 7 } }, to, grad = false, dtypes = FLOATS,
    }
  end
  cast_cases[#cast_cases + 1] = {
    T { 4, values = { inf, -inf, nan, 1e30 } }, "f32", grad = false, dtypes = { "f64", "bf16", "f32" },
  }
  cast_cases[#cast_cases + 1] = {
    T { 3, values = { 1e30, -1e30, 3e9 } }, "i32", grad = false, dtypes = { "f64", "f32" },
  }
  cast_cases[#cast_cases + 1] = {
    T { 4, values = { 1e30, -1e30, 300, -5 } }, "u8", grad = false, dtypes = { "f64", "f32" },
  }
  cast_cases[#cast_cases + 1] = { T {}, "f64" }
  cast_cases[#cast_cases + 1] = { T { 0, 2 }, "i32", grad = false }
  cast_cases[#cast_cases + 1] = { T { 100 }, "f16", grad = false }
  for _, to in ipairs { "bf16", "f32", "f64", "i32", "u8" } do -- turned (a layout of all cases): by tiles of 32
    cast_cases[#cast_cases + 1] = { T { 3, 45, 70 }, to, grad = false }
  end
  row("cast", {
    cases = cast_cases,
    ref = function(x, to)
      local y = T.map(x, function(v)
        if is_float[to] then return v end
        if to == "bool" then return v ~= 0 and 1 or 0 end
        if not is_float[x.dtype] then return v end -- integers wrap around
        if v ~= v then return 0 end
        v = v < 0 and math.ceil(v) or math.floor(v) -- floats are cut to the range
        return math.max(limits[to][1], math.min(limits[to][2], v))
      end)
      y.dtype = to
      return y
    end,
    strict = true,
  })

  -- ---- views ----

  row("reshape", {
    cases = {
      { T { 2, 6 }, 3, 4 }, { T { 2, 3, 4 }, 6, -1 }, {
        T { 2, 3, 4 }, { 4, 6 },
      }, { T { 0, 3 }, 3, 0 }, { T {}, 1, 1 }, { T { 1 }, {} },
      { T { 2, 3, 2 }, 2, 3, 2, 1 }, { T { 4, 1, 3 }, { 2, 2, 3 } }, { T { 5 }, -1 },
    },
    ref = function(x, ...)
      local shape, known, unknown = list(numbers(...)), 1, nil
      for d, size in ipairs(shape) do
        if size == -1 then unknown = d else known = known * size end
      end
      if unknown then shape[unknown] = T.count(x.shape) // known end
      return plain(x, shape)
    end,
    errors = {
      { T { 2, 3 }, 4, 2, match = "size" }, { T { 2, 3 }, 4, -1, match = "size" }, {
        T { 2, 3 }, -1, -1, match = "size",
      },
      { T { 2, 3 }, 2, -3, match = "size" }, { T { 0, 3 }, -1, 0, match = "size" },
      { T { 4 }, 1 << 40, 1 << 40, match = "size" }, { T { 1 }, { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, match = "size" },
    },
  })

  row("flatten", {
    cases = {
      { T { 2, 3, 4 } }, { T { 2, 3, 4 }, 1 }, { T { 2, 3, 4 }, 0, 1 }, { T { 2, 3, 4 }, -2, -1 }, { T {} },
      { T { 2, 0, 3 }, 1 },
    },
    ref = function(x, start, stop)
      local nd = #x.shape
      if nd == 0 then return plain(x, { 1 }) end
      start, stop = dim_of(start or 0, nd), dim_of(stop or -1, nd)
      local shape, merged = {}, 1
      for d, size in ipairs(x.shape) do
        if d < start or d > stop then shape[#shape + 1] = size
        else
          merged = merged * size
          if d == stop then shape[#shape + 1] = merged end
        end
      end
      return plain(x, shape)
    end,
    errors = { { T { 2, 3 }, 1, 0, match = "stop" }, { T { 2, 3 }, 2, match = "start" } },
  })

  local function permuted(x, order) -- order: 1-based
    local shape = {}
    for d, o in ipairs(order) do shape[d] = x.shape[o] end
    return from(shape, function(index)
      local source = {}
      for d, o in ipairs(order) do source[o] = index[d] end
      return at(x, source)
    end)
  end

  row("transpose", {
    cases = {
      { T { 3, 4 } }, { T { 2, 3, 4 } }, { T { 2, 3, 4 }, 0, 2 }, { T { 2, 3, 4 }, -3, 1 }, { T { 0, 3 } },
      { T { 5 }, 0, 0 },
    },
    ref = function(x, a, b)
      local nd, order = #x.shape, {}
      for d = 1, nd do order[d] = d end
      a, b = dim_of(a or -2, nd), dim_of(b or -1, nd)
      order[a], order[b] = order[b], order[a]
      return permuted(x, order)
    end,
    errors = {
      { T { 2, 3 }, 0, 2, match = "dim1" }, { T { 2, 3 }, -3, 0, match = "dim0" }, { T { 3 }, match = "dim0" },
    },
  })

  row("permute", {
    cases = {
      { T { 2, 3, 4 }, 2, 0, 1 }, { T { 2, 3, 4 }, { -1, 0, -2 } }, { T { 3 }, 0 }, { T {}, {} },
      { T { 0, 2, 3 }, { 2, 1, 0 } },
    },
    ref = function(x, ...)
      local order = {}
      for d, o in ipairs(numbers(...)) do order[d] = dim_of(o, #x.shape) end
      return permuted(x, order)
    end,
    errors = {
      { T { 2, 3 }, 0, 0, match = "dims" }, { T { 2, 3 }, 0, match = "dims" }, { T { 2, 3 }, 0, 2, match = "dims" },
    },
  })

  row("expand", {
    cases = {
      { T { 3, 1 }, 3, 4 }, { T { 3, 1 }, 2, -1, 4 }, { T { 1 }, { 0 } }, { T {}, 2, 3 }, { T { 2, 3 }, { 2, 3 } },
      { T { 0, 1 }, 0, 5 },
    },
    ref = function(x, ...)
      local shape = list(numbers(...))
      local skip = #shape - #x.shape
      for d, size in ipairs(shape) do
        if size == -1 then shape[d] = x.shape[d - skip] end
      end
      return from(shape, function(index) return at(x, index) end)
    end,
    errors = {
      { T { 3 }, 4, match = "size" }, { T { 3, 2 }, 2, match = "size" }, { T { 3 }, -1, 3, match = "size" },
      { T { 1 }, { 1 << 40, 1 << 40 }, match = "size" }, { T { 1 }, { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, match = "size" },
    },
  })

  row("squeeze", {
    cases = {
      { T { 1, 3, 1, 2 } }, { T { 1, 3, 1, 2 }, 0 }, {
        T { 1, 3, 1, 2 }, { 0, -2 },
      }, { T { 2, 3 }, 1 }, { T {} }, { T { 1, 0 } },
      { T { 1, 1 } },
    },
    ref = function(x, dims)
      local drop = {}
      for d = 1, #x.shape do drop[d] = dims == nil end
      for _, d in ipairs(type(dims) == "number" and { dims } or dims or {}) do drop[dim_of(d, #x.shape)] = true end
      local shape = {}
      for d, size in ipairs(x.shape) do
        if size ~= 1 or not drop[d] then shape[#shape + 1] = size end
      end
      return plain(x, shape)
    end,
    errors = { { T { 1, 3 }, 2, match = "dims" }, { T { 1, 3 }, { 0, 0 }, match = "dims" } },
  })

  row("unsqueeze", {
    cases = {
      { T { 2, 3 }, 0 }, { T { 2, 3 }, 1 }, { T { 2, 3 }, -1 }, { T { 2, 3 }, -3 }, { T {}, 0 }, { T {}, -1 },
      { T { 0 }, 1 },
    },
    ref = function(x, dim)
      local shape = list(x.shape)
      table.insert(shape, dim_of(dim, #shape + 1), 1)
      return plain(x, shape)
    end,
    errors = {
      { T { 2, 3 }, 3, match = "dim" }, { T { 2, 3 }, -4, match = "dim" },
      { T { 1, 1, 1, 1, 1, 1, 1, 1 }, 0, match = "x" },
    },
  })

  local function sliced(x, d, first, length, step)
    local shape = list(x.shape)
    shape[d] = length
    return from(shape, function(index) return at(x, moved(index, d, first + index[d] * step)) end)
  end

  local function slice_bounds(size, start, stop, step)
    start, stop, step = start or 0, stop or math.maxinteger, step or 1
    if start < 0 then start = math.max(start + size, 0) end
    if stop < 0 then stop = stop + size end
    stop = math.min(stop, size)
    return start, math.max(0, (stop - start + step - 1) // step), step
  end

  row("slice", {
    cases = {
      { T { 6, 3 }, 0, 1, 4 }, {
        T { 3, 7 }, 1, 0, 7, 3,
      }, { T { 3, 7 }, -1, -3 }, { T { 5 }, 0, -100, 100 }, { T { 5 }, 0, 3, 2 },
      { T { 5, 2 }, 0, 1, -1, 2 }, { T { 0, 2 }, 0 }, { T { 5 }, 0, 5 }, {
        T { 5 }, 0, opts = { stop = 2 },
      }, { T { 4, 3 }, 0, 0, 4, 1 << 40 },
    },
    ref = function(x, dim, start, stop, step)
      if type(start) == "table" then start, stop, step = start.start, start.stop, start.step end
      local d = dim_of(dim, #x.shape)
      return sliced(x, d, slice_bounds(x.shape[d], start, stop, step))
    end,
    errors = { { T { 3 }, 1, match = "dim" }, { T { 3 }, 0, 0, 3, 0, match = "step" }, {
      T { 3 }, 0, 0, 3, -1, match = "step",
    },
      { T {}, 0, match = "x" } },
  })

  row("slice_backward", {
    cases = { { T { 3, 2 }, 6, 0, 1, 4, 1 }, { T { 2, 3 }, 7, 1, 0, 7, 3 }, { T { 0, 2 }, 3, 0, 3, 3, 1 } },
    ref = function(g, size, dim, start, stop, step)
      local d = dim_of(dim, #g.shape)
      local shape = list(g.shape)
      shape[d] = size
      return from(shape, function(index)
        local p = index[d] - start
        if p < 0 or index[d] >= stop or p % step ~= 0 then return 0 end
        return at(g, moved(index, d, p // step))
      end)
    end,
  })

  row("select", {
    cases = {
      { T { 3, 4 }, 0, 2 }, { T { 3, 4 }, 1, -1 }, { T { 2, 3, 4 }, -2, 0 }, { T { 3 }, 0, 1 }, { T { 3, 0 }, 0, 1 },
    },
    ref = function(x, dim, index)
      local d = dim_of(dim, #x.shape)
      local y = sliced(x, d, index < 0 and index + x.shape[d] or index, 1, 1)
      local shape = list(y.shape)
      table.remove(shape, d)
      return plain(y, shape)
    end,
    errors = { { T { 3, 4 }, 0, 3, match = "index" }, {
      T { 3, 4 }, 0, -4, match = "index",
    }, { T { 3, 4 }, 2, 0, match = "dim" },
      { T {}, 0, 0, match = "x" } },
  })

  row("narrow", {
    cases = { { T { 5, 3 }, 0, 1, 3 }, { T { 3, 5 }, -1, -2, 2 }, { T { 4 }, 0, 4, 0 }, { T { 0, 2 }, 0, 0, 0 } },
    ref = function(x, dim, start, length)
      local d = dim_of(dim, #x.shape)
      return sliced(x, d, start < 0 and start + x.shape[d] or start, length, 1)
    end,
    errors = { { T { 3 }, 0, 1, 3, match = "length" }, {
      T { 3 }, 0, 0, -1, match = "length",
    }, { T { 3 }, 0, 4, 0, match = "start" },
      { T { 3 }, 1, 0, 1, match = "dim" } },
  })

  local function diagonal_of(shape, offset, dim0, dim1)
    local nd = #shape
    local p, q = dim_of(dim0 or 0, nd), dim_of(dim1 or 1, nd)
    offset = offset or 0
    local kept, order = {}, {}
    for d, size in ipairs(shape) do
      if d ~= p and d ~= q then
        kept[#kept + 1] = size
        order[#order + 1] = d
      end
    end
    kept[#kept + 1] = math.max(0, math.min(shape[p] + math.min(offset, 0), shape[q] - math.max(offset, 0)))
    return kept, order, p, q, offset
  end

  row("diagonal", {
    cases = {
      { T { 3, 3 } }, { T { 3, 5 }, 1 }, { T { 3, 5 }, -1 }, { T { 2, 3, 4 }, 0, 1, 2 }, {
        T { 2, 3, 4 }, 1, -1, 0,
      }, { T { 3, 3 }, 5 },
      { T { 0, 3 } },
    },
    ref = function(x, offset, dim0, dim1)
      local shape, order, p, q, k = diagonal_of(x.shape, offset, dim0, dim1)
      return from(shape, function(index)
        local source = {}
        for i, d in ipairs(order) do source[d] = index[i] end
        source[p], source[q] = index[#shape] - math.min(k, 0), index[#shape] + math.max(k, 0)
        return at(x, source)
      end)
    end,
    errors = {
      { T { 3 }, match = "x" }, { T { 3, 3 }, 0, 1, 1, match = "dim1" }, { T { 3, 3 }, 0, 0, 2, match = "dim1" },
    },
  })

  row("diagonal_backward", {
    cases = { { T { 3 }, { 3, 3 }, 0, 0, 1 }, { T { 2, 3 }, { 2, 3, 4 }, 1, 1, 2 }, { T { 2 }, { 3, 5 }, -1, 0, 1 } },
    ref = function(g, size, offset, dim0, dim1)
      local _, order, p, q, k = diagonal_of(size, offset, dim0, dim1)
      return from(list(size), function(index)
        if index[q] - index[p] ~= k then return 0 end
        local source = {}
        for i, d in ipairs(order) do source[i] = index[d] end
        source[#order + 1] = index[p] + math.min(k, 0)
        return at(g, source)
      end)
    end,
  })

  -- ---- joining and repeating ----

  local function joined(xs, d)
    local shape, starts = list(xs[1].shape), {}
    shape[d] = 0
    for i, x in ipairs(xs) do
      starts[i] = shape[d]
      shape[d] = shape[d] + x.shape[d]
    end
    return from(shape, function(index)
      local i = #xs
      while starts[i] > index[d] or xs[i].shape[d] == 0 do i = i - 1 end
      return at(xs[i], moved(index, d, index[d] - starts[i]))
    end)
  end

  row("concat", {
    cases = {
      { { T { 2, 3 }, T { 4, 3 } } }, {
        { T { 2, 3 }, T { 2, 1 }, T { 2, 2 } }, 1,
      }, { { T { 2, 3 } }, -1 }, { { T { 0, 3 }, T { 2, 3 } } },
      { { T { 2, 2, 3 }, T { 2, 1, 3 } }, -2 }, { { T { 3 }, T { 0 }, T { 2 } }, 0 },
    },
    ref = function(xs, dim) return joined(xs, dim_of(dim or 0, #xs[1].shape)) end,
    errors = {
      {
        { T { 2, 3 }, T { 2, 4 } }, 0, match = { "concat", "[2, 3]", "[2, 4]" },
      }, { { T { 2, 3 }, T { 3 } }, match = "xs" },
      { { T { 2, 3 } }, 2, match = "dim" }, { {}, match = "xs" }, { { T {} }, match = "xs" },
    },
  })

  row("stack", {
    cases = {
      { { T { 2, 3 }, T { 2, 3 } } }, { { T { 3 }, T { 3 }, T { 3 } }, 1 }, { { T {}, T {} } }, { { T { 2, 3 } }, -1 },
      { { T { 0 }, T { 0 } } },
    },
    ref = function(xs, dim)
      local d, parts = dim_of(dim or 0, #xs[1].shape + 1), {}
      for i, x in ipairs(xs) do
        local shape = list(x.shape)
        table.insert(shape, d, 1)
        parts[i] = plain(x, shape)
      end
      return joined(parts, d)
    end,
    errors = {
      { { T { 2, 3 }, T { 3, 2 } }, match = { "stack", "[2, 3]", "[3, 2]" } }, { { T { 2 } }, 2, match = "dim" },
      { {}, match = "xs" },
    },
  })

  row("tile", {
    cases = { { T { 2, 3 }, 2, 1 }, { T { 2, 3 }, { 2, 1, 2 } }, { T { 3 }, 0 }, { T {}, 3 }, { T { 2, 0 }, 1, 2 } },
    ref = function(x, ...)
      local times = numbers(...)
      local skip = #times - #x.shape
      local shape = {}
      for d, n in ipairs(times) do shape[d] = n * (x.shape[d - skip] or 1) end
      return from(shape, function(index)
        local source = {}
        for d, size in ipairs(x.shape) do source[d] = index[d + skip] % size end
        return at(x, source)
      end)
    end,
    errors = { { T { 2, 3 }, 2, match = "times" }, { T { 2 }, -1, match = "times" } },
  })

  local function padded(x, pads, mode, value)
    if type(mode) == "table" then mode, value = mode.mode, mode.value end
    mode, value = mode or "constant", value or 0
    local nd, shape, before = #x.shape, {}, {}
    for d, size in ipairs(x.shape) do
      local k = 2 * (nd - d) + 1
      before[d] = pads[k] or 0
      shape[d] = size + before[d] + (pads[k + 1] or 0)
    end
    return from(shape, function(index)
      local source = {}
      for d, n in ipairs(x.shape) do
        local p = index[d] - before[d]
        if mode == "reflect" and n > 1 then
          p = p % (2 * n - 2)
          p = p < n and p or 2 * n - 2 - p
        elseif mode == "replicate" then
          p = math.max(0, math.min(n - 1, p))
        elseif mode == "circular" then
          p = p % n
        end
        if p < 0 or p >= n then return value end
        source[d] = p
      end
      return at(x, source)
    end)
  end

  row("pad", {
    cases = {
      { T { 3, 4 }, { 1, 2 } }, {
        T { 2, 3 }, { 1, 0, 0, 2 }, "constant", 1,
      }, { T { 2, 2, 4 }, { -1, 2 } }, { T { 3, 4 }, { -1, -1 } },
      { T { 2, 5 }, { 2, 3 }, "reflect" }, {
        T { 1, 2, 3, 4 }, { 1, 2, 2, 1 }, "reflect",
      }, { T { 2, 3 }, { 2, 1 }, "replicate" },
      {
        T { 1, 2, 3, 3 }, { 1, 2, 2, 0 }, "replicate",
      }, { T { 2, 4 }, { 3, 2 }, "circular" }, { T { 1, 1, 3, 3 }, { 1, 1, 2, 0 }, "circular" },
      { T { 2, 3, 2, 4 }, { 0, 0, 2, 1, 0, 0, 1, 0 } }, { T { 4, 2, 4 }, { 0, 0, 1, 1, 2, 3 }, "reflect" },
      { T { 2, 3, 4 }, { 1, -2, -1, 2 }, "replicate" }, { T { 2, 6 }, { -1, 3 }, "circular" },
      { T { 2, 6 }, { 4, -1 }, "reflect" },
      { T { 0, 2 }, { 1, 1 } }, { T { 3 }, { 0, 0 } }, { T { 3 }, { 1, 1 }, opts = { value = 2 } },
    },
    ref = padded,
    errors = {
      { T { 3 }, { 1 }, match = "pads" }, { T { 3 }, { 1, 1, 1, 1 }, match = "pads" }, {
        T { 3 }, { 1, 1 }, "mirror", match = "mode",
      },
      { T { 2, 3 }, { 3, 0 }, "reflect", match = "pads" }, { T { 3 }, { -2, -2 }, match = "pads" }, {
        T { 2, 3 }, { 4, 0 }, "circular", match = "pads",
      },
    },
  })

  local modes = { [0] = "constant", "reflect", "replicate", "circular" }
  row("pad_edges", {
    cases = {
      { T { 2, 3 }, T { values = { 5 } }, { 1, 2, 0, 1 } }, { T { 2, 5, 2 }, T { values = { 0 } }, { 0, 0, 3, 4 }, 1 },
      { T { 2, 3 }, T { values = { 0 } }, { 1, 2, 3, 1 }, 2 }, { T { 3, 4 }, T { values = { 0 } }, { 4, 2, 1, 0 }, 3 },
      { T { 0, 3 }, T { values = { 0 } }, { 1, 1 } },
    },
    ref = function(x, value, pads, mode) return padded(x, pads, modes[mode or 0], at(value, {})) end,
    errors = { { T { 3 }, T { values = { 0 } }, { 3, 0 }, 1, match = "pads: they do not fit x" },
      { T { 3 }, T { values = { 0 } }, { 1 }, match = "pads" } },
  })

  row("flip", {
    cases = {
      { T { 3, 4 }, 0 }, { T { 3, 4 }, 0, 1 }, { T { 2, 3, 4 }, { -1, 0 } }, { T { 0, 3 }, 1 },
      { T { 67 }, 0, grad = false },
    },
    ref = function(x, ...)
      local flips = {}
      for _, d in ipairs(numbers(...)) do flips[dim_of(d, #x.shape)] = true end
      return from(x.shape, function(index)
        local source = {}
        for d, size in ipairs(x.shape) do source[d] = flips[d] and size - 1 - index[d] or index[d] end
        return at(x, source)
      end)
    end,
    errors = { { T { 3 }, 1, match = "dims" }, { T { 3, 3 }, 0, 0, match = "dims" } },
  })

  row("roll", {
    cases = {
      { T { 3, 4 }, { 1 }, { 0 } }, {
        T { 3, 4 }, { -1, 2 }, { 0, 1 },
      }, { T { 5 }, 7, 0 }, { T { 2, 3 }, { 0 }, { -1 } }, { T { 0, 3 }, 1, 1 },
      { T { 2, 3 }, 2 }, { T { 40, 3, 2 }, { 1, -1 }, { 1, 2 }, grad = false },
    },
    ref = function(x, shifts, dims)
      local s = type(shifts) == "number" and { shifts } or shifts
      local flat = dims == nil -- without dims the flattened tensor moves
      local y = flat and plain(x, { T.count(x.shape) }) or x
      local d = flat and { 0 } or type(dims) == "number" and { dims } or dims
      local result = from(y.shape, function(index)
        local source = list(index)
        for i, dim in ipairs(d) do
          local k = dim_of(dim, #y.shape)
          source[k] = (source[k] - s[i]) % y.shape[k]
        end
        return at(y, source)
      end)
      return plain(result, x.shape)
    end,
    errors = { { T { 3 }, { 1, 2 }, { 0 }, match = "shifts" }, { T { 3 }, { 1 }, { 1 }, match = "dims" } },
  })

  row("roll_line", {
    cases = {
      { T { 3, 4 }, 1, 0 }, { T { 3, 4 }, -6, 1 }, { T { 2, 3, 2 }, 2, -2 }, { T { 0, 3 }, 1, 1 }, { T { 2, 0 }, 1, 1 },
      { T { 2, 3 }, 0, 0 }, { T { 40, 5 }, 2, 1, grad = false },
    },
    ref = function(x, shift, dim)
      local d = dim_of(dim, #x.shape)
      return from(x.shape, function(index)
        local source = list(index)
        source[d] = (source[d] - shift) % x.shape[d]
        return at(x, source)
      end)
    end,
    errors = { { T { 3 }, 1, 1, match = "dim" } },
  })

  local function triangle(name, keeps)
    row(name, {
      cases = {
        { T { 3, 4 } }, { T { 4, 3 }, 1 }, { T { 3, 3 }, -1 }, { T { 2, 3, 3 } }, { T { 0, 3 } }, { T { 2, 2 }, 9 },
        { T { 9, 35 }, 3, grad = false },
      },
      ref = function(x, k)
        local nd = #x.shape
        return from(x.shape, function(index) return keeps(index[nd] - index[nd - 1], k or 0) and at(x, index) or 0 end)
      end,
      errors = { { T { 3 }, match = "x" } },
    })
  end
  triangle("tril", function(above, k) return above <= k end)
  triangle("triu", function(above, k) return above >= k end)
end
