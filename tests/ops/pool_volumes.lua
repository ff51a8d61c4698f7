-- Rows of src/ops/pool_volumes.c. References: naive loops over every window, in any number of dimensions.

return function(row, T)
  local from, at = T.from, T.at

  -- Arguments and options by name: merged(names, defaults, ...).
  local function merged(names, ...)
    local given, o = table.pack(...), {}
    for i = 1, given.n do
      local v = given[i]
      if type(v) == "table" and not v.shape and #v == 0 and next(v) then
        for key, value in pairs(v) do o[key] = value end
      else
        o[names[i]] = v
      end
    end
    return o
  end

  local function each(n, v, otherwise)
    if v == nil or (type(v) == "table" and #v == 0) then return otherwise end
    local list = {}
    for d = 1, n do list[d] = type(v) == "table" and (v[d] or v[1]) or v end
    return list
  end

  -- Positions that output i sees along one dimension, and how many of them lie in x or its padding.
  local function seen(i, size, kernel, stride, padding, dilation)
    local list, full = {}, 0
    for k = 0, kernel - 1 do
      local p = i * stride - padding + k * dilation
      if p < size + padding then full = full + 1 end
      if p >= 0 and p < size then list[#list + 1] = p end
    end
    return list, full
  end

  -- f(values, flat positions, full count) of every window; lists(d, i): its positions along dimension d.
  local function over(x, sizes, lists, f)
    local n = #sizes
    local shape = { x.shape[1], x.shape[2], table.unpack(sizes) }
    return from(shape, function(index)
      local values, positions, full = {}, {}, 1
      local each_list = {}
      for d = 1, n do
        local list, count = lists(d, index[2 + d])
        each_list[d], full = list, full * count
      end
      local place = { index[1], index[2] }
      local function walk(d, flat)
        if d > n then
          values[#values + 1], positions[#positions + 1] = at(x, place), flat
          return
        end
        for _, p in ipairs(each_list[d]) do
          place[2 + d] = p
          walk(d + 1, flat * x.shape[2 + d] + p)
        end
      end
      walk(1, 0)
      return f(values, positions, full)
    end)
  end

  local function pooled(n, x, o, f)
    local kernel = each(n, o.kernel)
    local stride = each(n, o.stride, kernel)
    local padding, dilation = each(n, o.padding, { 0, 0, 0 }), each(n, o.dilation, { 1, 1, 1 })
    local sizes = {}
    for d = 1, n do
      local size = x.shape[2 + d]
      -- Windows are counted one by one: they fit, or (ceil_mode) begin before the end of x.
      local span, count = dilation[d] * (kernel[d] - 1) + 1, 0
      local function fits(i)
        local start = i * stride[d] - padding[d]
        if start + span <= size + padding[d] then return true end
        return o.ceil_mode and start < size and start + span < size + padding[d] + stride[d]
      end
      while fits(count) do count = count + 1 end
      sizes[d] = count
    end
    return over(x, sizes, function(d, i)
      return seen(i, x.shape[2 + d], kernel[d], stride[d], padding[d], dilation[d])
    end, f)
  end

  local function adaptive(n, x, size, f)
    local sizes = each(n, size)
    return over(x, sizes, function(d, i)
      local list, whole = {}, x.shape[2 + d]
      for p = math.floor(i * whole / sizes[d]), math.ceil((i + 1) * whole / sizes[d]) - 1 do list[#list + 1] = p end
      return list, #list
    end, f)
  end

  local function best(values)
    local k = 1
    for i, v in ipairs(values) do
      if v > values[k] or (v ~= v and values[k] == values[k]) then k = i end
    end
    return k
  end
  local function largest(values) return values[best(values)] end
  local function where(values, positions) return positions[best(values)] end
  local function sum(values)
    local total = 0.0
    for _, v in ipairs(values) do total = total + v end
    return total
  end

  local max_names = { "kernel", "stride", "padding", "dilation", "ceil_mode" }
  local avg_names = { "kernel", "stride", "padding", "count_include_pad", "ceil_mode", "divisor" }
  local function max_ref(n)
    return function(x, ...)
      local o = merged(max_names, ...)
      local positions = pooled(n, x, o, where)
      positions.dtype = "i64"
      return pooled(n, x, o, largest), positions
    end
  end
  local function avg_ref(n)
    return function(x, ...)
      local o = merged(avg_names, ...)
      local divisor = o.divisor ~= 0 and o.divisor
      return pooled(n, x, o, function(values, _, full)
        return sum(values) / (divisor or o.count_include_pad ~= false and full or #values)
      end)
    end
  end
  local function adaptive_max_ref(n)
    return function(x, size)
      local positions = adaptive(n, x, size, where)
      positions.dtype = "i64"
      return adaptive(n, x, size, largest), positions
    end
  end
  local function adaptive_avg_ref(n)
    return function(x, size) return adaptive(n, x, size, function(values) return sum(values) / #values end) end
  end

  row("max_pool1d", {
    cases = {
      { T { 2, 3, 7, distinct = true }, 2 }, { T { 1, 3, 8, distinct = true }, 3, 2, 1 },
      { T { 1, 2, 9, distinct = true }, 3, 1, 1, 2 }, { T { 2, 1, 6, distinct = true }, 3, 2, 0, 1, true },
      { T { 1, 1, 6, distinct = true }, { 4 }, opts = { stride = 3, padding = 2, ceil_mode = true } },
      { T { 1, 1, 5, values = { 1, T.nan, 2, 5, T.inf } }, 2, 1, grad = false }, { T { 0, 2, 5 }, 2 },
    },
    ref = max_ref(1),
    errors = {
      { T { 3, 4 }, 2, match = "x: expected [n, c, w]" }, { T { 1, 1, 2 }, 3, match = "does not fit into [2]" },
      { T { 1, 1, 4 }, { 2, 2 }, match = "kernel: expected one integer, got 2" },
      { T { 1, 1, 4 }, 2, 1, 2, match = "padding: expected at most half of the kernel {2}, got {2}" },
      { T { 1, 1, 4 }, 2, 1, 1, 9, match = "max_pool1d: kernel: {2} with padding {1} and dilation {9}" },
      { T { 1, 1, 4 }, 2, 1, 0, 0, match = "dilation: expected integers of at least 1" },
    },
  })

  row("max_pool3d", {
    cases = {
      { T { 2, 2, 4, 4, 4, distinct = true, range = { -12, 12 } }, 2 },
      { T { 1, 2, 3, 5, 4, distinct = true, range = { -9, 9 } }, { 2, 3, 2 }, { 1, 2, 1 }, { 1, 1, 0 } },
      { T { 1, 1, 5, 4, 6, distinct = true, range = { -9, 9 } }, 2, 1, 0, { 2, 1, 3 } },
      { T { 1, 2, 4, 3, 5, distinct = true, range = { -9, 9 } }, 2, 2, 0, 1, true },
      { T { 1, 1, 3, 4, 2, distinct = true }, 3, opts = { stride = 2, padding = 1, ceil_mode = true } },
      { T { 1, 1, 2, 2, 3, values = { 1, T.nan, 2, 5, 3, T.inf, 4, 4, 0, 2, T.nan, 1 } }, { 2, 1, 2 }, 1, grad = false },
      { T { 1, 1, 3, 2, 2, values = { 1, 1, 1, 1, 2, 1, 1, 2, 0, 1, 2, 2 } }, { 2, 2, 2 }, 1, grad = false },
      { T { 0, 1, 2, 2, 2 }, 2 },
    },
    ref = max_ref(3),
    errors = {
      { T { 1, 4, 4, 4 }, 2, match = "x: expected [n, c, d, h, w]" },
      { T { 1, 1, 4, 2, 4 }, 3, match = "does not fit into [4, 2, 4]" },
      { T { 1, 1, 4, 4, 4 }, { 2, 2 }, match = "kernel: expected one or three integers, got 2" },
      { T { 1, 1, 4, 1, 4 }, 2, 2, 1, { 1, 2, 1 }, match = "sees only padding" },
      { T { 1, 1, 4, 4, 4 }, 2, 0, match = "max_pool3d: stride: expected integers of at least 1, got {0, 0, 0}" },
    },
  })

  row("avg_pool1d", {
    cases = {
      { T { 2, 3, 7 }, 2 }, { T { 1, 3, 8 }, 3, 2, 1 }, { T { 1, 2, 7 }, 3, 2, 1, false }, { T { 1, 2, 6 }, 3, 2, 1, true, true },
      { T { 1, 2, 6 }, 4, 3, 2, false, true }, { T { 1, 1, 6 }, 3, opts = { divisor = 2, ceil_mode = true } },
    },
    ref = avg_ref(1),
    errors = {
      { T { 4, 4 }, 2, match = "x: expected [n, c, w]" },
      { T { 1, 1, 4 }, 2, opts = { divisor = -1 }, match = "divisor: expected a positive integer, got -1" },
    },
  })

  row("avg_pool3d", {
    cases = {
      { T { 2, 2, 4, 4, 4 }, 2 }, { T { 1, 2, 3, 5, 4 }, { 2, 3, 2 }, { 1, 2, 1 }, { 1, 1, 0 } },
      { T { 1, 1, 4, 5, 3 }, 3, 2, 1, false }, { T { 1, 1, 4, 5, 3 }, 2, 2, 1, false, true },
      { T { 1, 1, 4, 3, 6 }, 3, 2, 1, true, true }, { T { 1, 1, 4, 3, 6 }, 3, 2, 1, opts = { divisor = 5, ceil_mode = true } },
      { T { 0, 2, 2, 2, 2 }, 2 },
    },
    ref = avg_ref(3),
    errors = {
      { T { 1, 4, 4, 4 }, 2, match = "x: expected [n, c, d, h, w]" }, { T { 1, 1, 1, 4, 4 }, 2, match = "avg_pool3d: kernel" },
    },
  })

  row("adaptive_avg_pool1d", {
    cases = { { T { 2, 3, 7 }, 3 }, { T { 1, 2, 3 }, 5 }, { T { 0, 2, 3 }, 2 } },
    ref = adaptive_avg_ref(1),
    errors = { { T { 4, 4 }, 2, match = "x: expected" }, { T { 1, 1, 0 }, 1, match = "nothing to pool" } },
  })
  row("adaptive_avg_pool3d", {
    cases = { { T { 2, 2, 3, 4, 5 }, { 2, 3, 2 } }, { T { 1, 2, 4, 4, 4 }, 1 }, { T { 1, 1, 2, 3, 2 }, { 3, 1, 4 } } },
    ref = adaptive_avg_ref(3),
    errors = { { T { 4, 4 }, 2, match = "x: expected" }, { T { 1, 1, 2, 2, 2 }, { 1, 2 }, match = "size: expected one or three" } },
  })
  row("adaptive_max_pool1d", {
    cases = { { T { 2, 3, 7, distinct = true }, 3 }, { T { 1, 2, 3, distinct = true }, 5 } },
    ref = adaptive_max_ref(1),
    errors = { { T { 4, 4 }, 2, match = "x: expected" }, { T { 1, 1, 2 }, 0, match = "size" } },
  })
  row("adaptive_max_pool3d", {
    cases = {
      { T { 1, 2, 3, 4, 5, distinct = true, range = { -9, 9 } }, { 2, 3, 2 } }, { T { 1, 2, 3, 3, 2, distinct = true }, 1 },
      { T { 1, 1, 2, 3, 2, distinct = true }, { 3, 1, 4 } },
    },
    ref = adaptive_max_ref(3),
    errors = { { T { 4, 4 }, 2, match = "x: expected" }, { T { 1, 1, 2, 2, 0 }, 1, match = "nothing to pool" } },
  })

  -- ---- unpooling ----

  local function unpool(n)
    return function(x, position, ...)
      local o = merged({ "kernel", "stride", "padding", "size" }, ...)
      local kernel = each(n, o.kernel)
      local stride, padding = each(n, o.stride, kernel), each(n, o.padding, { 0, 0, 0 })
      local shape, area, places = { x.shape[1], x.shape[2] }, 1, 1
      for d = 1, n do
        local size = each(n, o.size) or {}
        shape[2 + d] = size[d] or (x.shape[2 + d] - 1) * stride[d] - 2 * padding[d] + kernel[d]
        area, places = area * shape[2 + d], places * x.shape[2 + d]
      end
      local y = from(shape, function() return 0.0 end)
      for i = 0, #x - 1 do y[i // places * area + position[i + 1] + 1] = x[i + 1] end
      return y
    end
  end

  row("max_unpool1d", {
    cases = {
      { T { 1, 2, 3 }, T { 1, 2, 3, values = { 1, 2, 5, 0, 3, 4 }, dtype = "i64" }, 2 },
      { T { 1, 1, 3 }, T { 1, 1, 3, values = { 6, 2, 0 }, dtype = "i64" }, 3, 2, 1, 7 },
    },
    ref = unpool(1),
    errors = {
      { T { 1, 1, 2 }, T { 1, 2, int = { 0, 2 } }, 2, match = "position: expected the shape of x" },
      { T { 1, 1, 1 }, T { 1, 1, 1, values = { 9 }, dtype = "i64" }, 2, match = "9 is out of range" },
    },
  })
  row("max_unpool2d", {
    cases = {
      { T { 1, 2, 2, 2 }, T { 1, 2, 2, 2, values = { 0, 6, 9, 15, 5, 2, 12, 11 }, dtype = "i64" }, 2 },
      { T { 2, 1, 1, 2 }, T { 2, 1, 1, 2, values = { 4, 2, 1, 11 }, dtype = "i64" }, { 2, 3 }, { 1, 2 }, opts = { size = { 2, 6 } } },
    },
    ref = unpool(2),
    errors = {
      { T { 2, 2 }, T { 2, 2, int = { 0, 1 } }, 2, match = "x: expected [n, c, h, w]" },
      { T { 1, 1, 1, 1 }, T { 1, 1, 1, 1, int = { 0, 1 } }, 2, 2, 1, match = "no possible result" },
    },
  })
  row("max_unpool3d", {
    cases = { { T { 1, 2, 1, 2, 1 }, T { 1, 2, 1, 2, 1, values = { 3, 12, 7, 0 }, dtype = "i64" }, 2 } },
    ref = unpool(3),
    errors = { { T { 1, 1, 1, 1, 1 }, T { 1, 1, 1, 1, 1, int = { 0, 1 } }, { 2, 2 }, match = "kernel: expected one or three" } },
  })

  -- ---- p-norms ----

  local function lp_ref(n)
    return function(x, p, ...)
      local o = merged({ "kernel", "stride", "ceil_mode" }, ...)
      local kernel, whole = each(n, o.kernel), 1
      for d = 1, n do whole = whole * kernel[d] end
      return pooled(n, x, o, function(values) -- a window that is cut off counts as if whole, by its mean
        local total = 0.0
        for _, v in ipairs(values) do total = total + (p == 2 and v * v or v ^ p) end
        return (total * whole / #values) ^ (1 / p)
      end)
    end
  end
  local above = { 0.3, 2 }
  row("lp_pool1d", {
    cases = { { T { 2, 2, 7, range = above }, 2, 3 }, { T { 1, 2, 7, range = above }, 3, 3, 2, true }, { T { 1, 1, 6 }, 1, 2 } },
    ref = lp_ref(1),
    errors = { { T { 1, 1, 4 }, 0, 2, match = "p: expected a positive number, got 0" }, { T { 4 }, 2, 2, match = "x: expected" } },
  })
  row("lp_pool2d", {
    cases = {
      { T { 2, 2, 4, 5, range = above }, 2, 2 }, { T { 1, 2, 4, 5, range = above }, 2.5, { 2, 3 }, 2, true },
      { T { 1, 1, 2, 4, values = { 0, 0, 1, 2, 0, 0, -2, 4 } }, 2, 2, grad = false },
    },
    ref = lp_ref(2),
    errors = { { T { 1, 1, 4, 4 }, 2, 5, match = "does not fit" } },
  })
  row("lp_pool3d", {
    cases = { { T { 1, 2, 3, 4, 3, range = above }, 2, 2, 1 }, { T { 1, 1, 3, 4, 3, range = above }, 3, 2, opts = { ceil_mode = true } } },
    ref = lp_ref(3),
    errors = { { T { 1, 1, 4, 4 }, 2, 2, match = "x: expected [n, c, d, h, w]" } },
  })
end
