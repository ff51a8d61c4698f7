-- Rows of src/ops/create.c. What the numbers of the random ops are like is in tests/lua/random_test.lua.

return function(row, T)
  local FLOATS = { "f32", "f64", "f16", "bf16" }

  -- An array of `shape`; without f only its shape is compared.
  local function filled(shape, f, dtype)
    local y = { shape = shape, dtype = dtype or "f32" }
    if f then
      for i = 1, T.count(shape) do y[i] = f(i - 1) end
    end
    return y
  end

  -- Sizes given as a list or as several numbers, then a table of options.
  local function sizes(...)
    local args, opts = table.pack(...), {}
    local last = args[args.n]
    if type(last) == "table" and (last.dtype or last.device) then
      opts, args.n = last, args.n - 1
    end
    if type(args[1]) == "table" then return args[1], opts end
    return table.move(args, 1, args.n, 1, {}), opts
  end

  local size_errors = {
    { -1, match = "size: expected sizes of at least 0, got [-1]" }, { { 2, -3 }, match = "[2, -3]" },
    { { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, match = "size: at most 8 dimensions, got 9" },
    { 1 << 40, 1 << 40, match = "is not a possible shape" }, { 2, opts = { dtype = "f31" }, match = "f31" },
  }

  local function constant(name, value)
    row(name, {
      cases = {
        { 2, 3 }, { { 2, 3 } }, { 5 }, { {} }, { 0 }, { 2, 0, 3 }, { { 1, 2, 1, 2, 1, 2, 1, 2 } }, { 70001 },
        { { 2, 2 }, opts = { dtype = "f64" } }, { 3, opts = { dtype = "bool" } }, { 3, opts = { dtype = "u8" } },
        { 3, opts = { dtype = "i16" } }, { 3, opts = { dtype = "bf16" } }, { 3, opts = { dtype = "i64" } },
        { { 2, 3 }, opts = { device = "meta" } },
      },
      ref = function(...)
        local shape, opts = sizes(...)
        return filled(shape, opts.device ~= "meta" and value and function() return value end, opts.dtype)
      end,
      errors = size_errors,
    })
  end
  constant("empty", nil)
  constant("zeros", 0)
  constant("ones", 1)

  row("full", {
    cases = {
      { { 2, 3 }, 2.5 }, { {}, -1 }, { { 0 }, 1 }, { { 3 }, 7, opts = { dtype = "i64" } }, { { 3 }, 2.9,
        opts = { dtype = "i32" } },
      { { 3 }, -2.9, opts = { dtype = "i8" } }, { { 3 }, 0.5, opts = { dtype = "bool" } }, { { 3 }, T.inf },
      { { 3 }, T.nan, opts = { dtype = "f16" } }, { { 3 }, 1e6, opts = { dtype = "f16" } }, { { 3 }, 300,
        opts = { dtype = "u8" } },
      { { 3 }, -1e30, opts = { dtype = "i64" } },
    },
    ref = function(shape, value, opts)
      local dtype = opts and opts.dtype or "f32"
      local low = { i64 = math.mininteger, i32 = -(1 << 31), i8 = -128, u8 = 0 }
      local high = { i64 = math.maxinteger, i32 = (1 << 31) - 1, i8 = 127, u8 = 255 }
      if dtype == "bool" then value = value ~= 0 and 1 or 0 end
      if low[dtype] then
        value = value < 0 and math.ceil(value) or math.floor(value)
        value = math.max(low[dtype], math.min(high[dtype], value))
      end
      return filled(shape, function() return value end, dtype)
    end,
    errors = { { { -1 }, 2, match = "full: size: expected sizes of at least 0" } },
  })

  local function like(name, value)
    row(name, {
      cases = {
        { T { 2, 3 } }, { T {} }, { T { 0, 3 } }, { T { 4 }, "f64" }, { T { 4 }, "i16" }, { T { 2, 1 },
          opts = { dtype = "bool" } },
      },
      ref = function(x, dtype)
        if type(dtype) == "table" then dtype = dtype.dtype end
        return filled(x.shape, value and function() return value end, dtype or x.dtype)
      end,
      errors = { { T { 2 }, "f31", match = "f31" } },
    })
  end
  like("empty_like", nil)
  like("zeros_like", 0)
  like("ones_like", 1)

  row("full_like", {
    cases = { { T { 2, 3 }, 1 }, { T {}, 1 }, { T { 0, 3 }, 1 }, { T { 4 }, -2.5, "f64" }, { T { 4 }, 3,
      opts = { dtype = "i16" } } },
    ref = function(x, value, dtype)
      if type(dtype) == "table" then dtype = dtype.dtype end
      return filled(x.shape, function() return value end, dtype or x.dtype)
    end,
  })

  -- ---- ranges ----

  row("arange", {
    cases = {
      { 5 }, { 0 }, { -3 }, { 2, 7 }, { 7, 2 }, { 7, 2, -2 }, { 0, 1, 0.25 }, { 0.5, 3 }, { 0, 10, 3 }, { 3.5 },
      { 0, 4, opts = { dtype = "f64" } }, { 5, opts = { dtype = "f16" } }, { 5, opts = { dtype = "u8" } }, { -2, 3,
        opts = { dtype = "i8" } },
      { 70001 }, { 0, 1, 0.1 }, { 5, opts = { device = "meta" } },
    },
    ref = function(start, stop, step, opts)
      if type(stop) == "table" then stop, opts = nil, stop end
      if type(step) == "table" then step, opts = nil, step end
      opts = opts or {}
      if not stop then start, stop = 0, start end
      step = step or 1
      local whole = start % 1 == 0 and stop % 1 == 0 and step % 1 == 0
      local n = math.max(0, math.ceil((stop - start) / step))
      return filled({ n }, opts.device ~= "meta" and function(i) return start + i * step end,
        opts.dtype or (whole and "i64" or "f32"))
    end,
    errors = {
      { 0, 5, 0, match = "arange: step: expected finite bounds and a step that is not 0" },
      { 0, T.inf, match = "arange: step: expected finite bounds" }, { 0, 1e300,
        match = "arange: stop: 1e+300 elements are too many" },
      { T.nan, match = "arange" },
    },
  })

  row("linspace", {
    cases = {
      { 0, 1, 5 }, { 2, -2, 9 }, { 3, 7, 1 }, { 3, 7, 0 }, { 0, 1, 3, opts = { dtype = "f64" } }, { -1, 1, 33,
        opts = { dtype = "f16" } },
      { 0, 1, 70001 }, { 0, 1, 50, opts = { dtype = "f64" } }, { 0.1, 0.7, 7, opts = { dtype = "f64" } },
    },
    ref = function(start, stop, n, opts)
      return filled({ n }, function(i) return i == n - 1 and n > 1 and stop or start + (n > 1
        and (stop - start) * i / (n - 1) or 0) end,
        opts and opts.dtype)
    end,
    errors = {
      { 0, 1, -1, match = "linspace: count: expected at least 0, got -1" },
      { 0, 1, 3, opts = { dtype = "i64" }, match = "linspace: dtype: expected a float dtype" },
    },
  })

  row("eye", {
    cases = {
      { 3 }, { 0 }, { 1 }, { 2, 4 }, { 4, 2 }, { 2, 0 }, { 3, opts = { dtype = "f64" } }, { 3, 2,
        opts = { dtype = "bool" } },
      { 2, opts = { dtype = "i8" } }, { 90 },
    },
    ref = function(n, m, opts)
      if type(m) == "table" then m, opts = nil, m end
      m = m or n
      return filled({ n, m }, function(i) return i // m == i % m and 1 or 0 end, opts and opts.dtype)
    end,
    errors = { { -2, match = "eye: n: expected at least 0, got -2" } },
  })

  -- ---- random numbers: shapes and dtypes here ----

  local function random(name)
    row(name, {
      cases = { { 2, 3 }, { { 2, 3 } }, { {} }, { 0, 2 }, { 5, opts = { dtype = "f64" } }, { { 3 },
        opts = { dtype = "f16" } } },
      ref = function(...)
        local shape, opts = sizes(...)
        return filled(shape, nil, opts.dtype)
      end,
      errors = { { -1, match = "size: expected sizes of at least 0" }, { 2, opts = { dtype = "i64" },
        match = name .. ": dtype: expected a float dtype" } },
    })
    row(name .. "_like", {
      cases = { { T { 2, 3 } }, { T {} }, { T { 0, 3 } }, { T { 4 }, "f64" } },
      ref = function(x, dtype) return filled(x.shape, nil, dtype or x.dtype) end,
      errors = { { T { 2 }, "i32", match = name .. "_like: dtype: expected a float dtype" } },
    })
  end
  random("rand")
  random("randn")

  row("randint", {
    cases = {
      { 0, 10, { 2, 3 } }, { -5, 5, {} }, { 0, 1, { 0 } }, { 3, 4, { 5 } }, { 0, 100, { 4 }, opts = { dtype = "i32" } },
      { 0, 9, { 4 }, opts = { dtype = "f32" } },
    },
    ref = function(low, high, shape, opts)
      return filled(shape, high - low == 1 and function() return low end, opts and opts.dtype or "i64")
    end,
    errors = {
      { 3, 3, { 2 }, match = "randint: high: expected more than low 3, got 3" }, { 5, 2, { 2 },
        match = "randint: high: expected more than low 5" },
      { 0, 5, { -1 }, match = "randint: size: expected sizes of at least 0" },
    },
  })

  row("randperm", {
    cases = { { 5 }, { 0 }, { 1 }, { 7, opts = { dtype = "i32" } } },
    ref = function(n, opts) return filled({ n }, n == 1 and function() return 0 end, opts and opts.dtype or "i64") end,
    errors = { { -1, match = "randperm: n: expected at least 0, got -1" }, { 4, opts = { dtype = "u8" },
      match = "randperm: dtype: expected i64 or i32" } },
  })

  row("bernoulli", {
    cases = { { T { 5, values = { 0, 1, 1, 0, 1 } } }, { T { 0 } }, { T { values = { 1 } } }, { T { 2, 3,
      values = { 1, 1, 0, 0, 1, 0 } } } },
    ref = function(p) return filled(p.shape, function(i) return p[i + 1] end, p.dtype) end,
  })

  row("multinomial", {
    cases = {
      { T { 4, values = { 0, 0, 3, 0 } }, 1 }, { T { 2, 3, values = { 0, 1, 0, 2, 0, 0 } }, 1 },
      { T { 2, 3, values = { 0, 1, 0, 2, 0, 0 } }, 4, true }, { T { 1, 2, 3, values = { 0, 1, 0, 2, 0, 0 } }, 2,
        opts = { replacement = true } },
    },
    ref = function(p, count, replacement)
      local n, shape = p.shape[#p.shape], table.move(p.shape, 1, #p.shape, 1, {})
      shape[#shape] = count
      return filled(shape, function(i)
        for k = 1, n do
          if p[i // count * n + k] > 0 then return k - 1 end
        end
      end, "i64")
    end,
    errors = {
      { T { 3, range = { 0.1, 1 } }, 4, match = "multinomial: count: cannot draw 4 of 3 without replacement" },
      { T { 3, range = { 0.1, 1 } }, 0, match = "multinomial: count: expected at least 1, got 0" },
      { T { 3, values = { 0, 0, 0 } }, 1, true, match = "multinomial: probs: row 0 has no positive entry" },
      { T { 3, values = { 1, -1, 1 } }, 1,
        match = "multinomial: probs: expected finite numbers of at least 0, got -1 in row 0" },
      { T { 2, 2, values = { 1, 1, T.nan, 1 } }, 1, true, match = "in row 1" },
      { T { 3, values = { 1, 0, 0 } }, 2,
        match = "multinomial: probs: row 0 has 1 positive entries, fewer than the 2" },
      { T { values = { 1 } }, 1, match = "multinomial: probs: expected [..., n]" },
    },
  })

  -- ---- in place ----

  row("fill_", {
    cases = { { T { 2, 3 }, 1 }, { T {}, 0 }, { T { 0, 3 }, 1 }, { T { 3, 50 }, 1 }, { T { 4 }, 2.5,
      dtypes = FLOATS } },
    ref = function(x, value) return filled(x.shape, function() return value end, x.dtype) end,
  })

  row("copy_", {
    cases = {
      { T { 2, 3 }, T { 2, 3 } }, { T { 2, 3 }, T { 3 } }, { T { 2, 3 }, T { 2, 1 } }, { T { 2, 3 }, T {} }, { T {},
        T {} },
      { T { 0, 3 }, T { 3 } }, { T { 40, 50 }, T { 40, 50 }, grad = false }, { T { 3, 2, dtype = "f32" }, T { 3, 2,
        int = { -3, 4 } }, grad = false },
      { T { 3, 2, dtype = "i64" }, T { 3, 2, dtype = "f32" }, grad = false }, { T { 4, dtype = "u8" }, T { 4,
        values = { 1.9, 2.5, 0, 255 }, dtype = "f64" }, grad = false },
      { T { 2, dtype = "bool" }, T { 2, values = { 0.5, 0 }, dtype = "f32" }, grad = false },
    },
    ref = function(x, source)
      return T.from(x.shape, function(index)
        local v = T.at(source, index)
        if x.dtype == "bool" then return v ~= 0 and 1 or 0 end
        if x.dtype == "i64" or x.dtype == "u8" then return v < 0 and math.ceil(v) or math.floor(v) end
        return v
      end)
    end,
    errors = { { T { 2, 3 }, T { 2 }, match = "copy_" }, { T { 3 }, T { 2, 3 }, match = "copy_" } },
  })

  row("uniform_", {
    cases = { { T { 2, 3 } }, { T {} }, { T { 0, 3 } }, { T { 3 }, -2, 5 }, { T { 4 }, 2, 2 } },
    ref = function(x, low, high) return filled(x.shape, low and low == high and function() return low end, x.dtype) end,
  })
  row("normal_", {
    cases = { { T { 2, 3 } }, { T {} }, { T { 0, 3 } }, { T { 3 }, -2, 5 }, { T { 4 }, 2, 0 } },
    ref = function(x, mean, std) return filled(x.shape, std == 0 and function() return mean end, x.dtype) end,
    errors = { { T { 2 }, 0, -1, match = "normal_: std: expected at least 0, got -1" } },
  })
  row("randint_", {
    cases = { { T { 2, 3 }, 0, 10 }, { T {}, 0, 5 }, { T { 0, 3 }, 0, 2 }, { T { 4 }, 3, 4 } },
    ref = function(x, low, high) return filled(x.shape, high - low == 1 and function() return low end, x.dtype) end,
    errors = { { T { 2 }, 3, 3, match = "randint_: high: expected more than low 3, got 3" } },
  })
end
