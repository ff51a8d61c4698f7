-- Rows of src/ops/pool.c. References: naive loops over every window.

return function(row, T)
  local from, at = T.from, T.at

  local function pair(v, otherwise)
    if v == nil or (type(v) == "table" and #v == 0) then return otherwise end
    if type(v) == "number" then return { v, v } end
    return { v[1], v[2] or v[1] }
  end

  -- Positions of the window of output position i along one dimension, and how many of them a full window would have.
  local function window(i, in_size, kernel, stride, padding, dilation)
    local list, full = {}, 0
    for k = 0, kernel - 1 do
      local p = i * stride - padding + k * dilation
      if p < in_size + padding then full = full + 1 end
      if p >= 0 and p < in_size then list[#list + 1] = p end
    end
    return list, full
  end

  local function divided(i, in_size, out_size)
    local list = {}
    for p = i * in_size // out_size, ((i + 1) * in_size + out_size - 1) // out_size - 1 do list[#list + 1] = p end
    return list, #list
  end

  local function sizes(x, h, w)
    local shape = table.move(x.shape, 1, #x.shape, 1, {})
    shape[#shape - 1], shape[#shape] = h, w
    return shape
  end

  -- windows(d, i) -> positions, full; f(values, positions, full count) for every output element
  local function pooled(x, h, w, windows, f)
    local n = #x.shape
    return from(sizes(x, h, w), function(index)
      local rows, full_rows = windows(1, index[n - 1])
      local columns, full_columns = windows(2, index[n])
      local values, positions = {}, {}
      for _, r in ipairs(rows) do
        for _, c in ipairs(columns) do
          local from_index = table.move(index, 1, n, 1, {})
          from_index[n - 1], from_index[n] = r, c
          values[#values + 1] = at(x, from_index)
          positions[#positions + 1] = r * x.shape[n] + c
        end
      end
      return f(values, positions, full_rows * full_columns)
    end)
  end

  local function by_kernel(x, kernel, stride, padding, dilation, f, ceil_mode)
    kernel, padding, dilation = pair(kernel), pair(padding, { 0, 0 }), pair(dilation, { 1, 1 })
    stride = pair(stride, kernel)
    local n = #x.shape
    local function count(d)
      local size, span = x.shape[n - 2 + d], dilation[d] * (kernel[d] - 1) + 1
      local windows = 0
      repeat -- a window fits, or (ceil_mode) reaches over the end by less than a step and begins in x
        local start = windows * stride[d] - padding[d]
        local over = start + span - size - padding[d]
        local good = over <= 0 or (ceil_mode and over < stride[d] and start < size)
        if good then windows = windows + 1 end
      until not good
      return windows
    end
    return pooled(x, count(1), count(2), function(d, i)
      return window(i, x.shape[n - 2 + d], kernel[d], stride[d], padding[d], dilation[d])
    end, f)
  end

  local function by_size(x, size, f)
    size = pair(size)
    local n = #x.shape
    return pooled(x, size[1], size[2], function(d, i) return divided(i, x.shape[n - 2 + d], size[d]) end, f)
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

  local function mean(values, _, full, include)
    local sum = 0.0
    for _, v in ipairs(values) do sum = sum + v end
    return sum / (include and full or #values)
  end

  -- Numbers among which are NaN, both infinities, runs of -infinity and equal ones.
  local function awkward(n)
    local values = {}
    for i = 1, n do
      values[i] = i % 17 == 0 and T.nan or i % 23 == 0 and T.inf or (i % 29 < 6 or i % 11 == 0) and -T.inf or i * 7 % 5
    end
    return values
  end

  row("max_pool2d", {
    cases = {
      { T { 2, 3, 6, 6, distinct = true }, 2 }, { T { 1, 3, 5, 7, distinct = true }, { 3, 2 }, { 2, 1 }, 1 },
      { T { 1, 2, 7, 6, distinct = true }, 2, 1, 0, 2 }, { T { 1, 1, 4, 4, distinct = true }, 3, 2, 1 },
      { T { 0, 2, 4, 4 }, 2 }, { T { 2, 2, 1, 1 }, 1 }, { T { 1, 2, 5, 7, distinct = true, range = { -9, 9 } }, 2, 2, 0, 1, true },
      { T { 1, 2, 6, 5, distinct = true }, 3, { 2, 4 }, 1, opts = { ceil_mode = true } },
      { T { 1, 1, 2, 3, values = { 1, T.nan, 2, 5, 3, T.inf } }, { 2, 1 }, grad = false },
      -- rows of several vectors
      { T { 1, 1, 5, 41, distinct = true, range = { -9, 9 } }, 3, 2, 1, grad = false },
      { T { 1, 2, 5, 38, distinct = true, range = { -9, 9 } }, 2, grad = false },
      { T { 1, 1, 4, 36, values = awkward(144) }, 2, grad = false }, { T { 1, 1, 4, 36, values = awkward(144) }, 3, 2, 1, grad = false },
    },
    ref = function(x, kernel, stride, padding, dilation, up)
      if type(dilation) == "table" and dilation.ceil_mode then dilation, up = nil, true end
      return by_kernel(x, kernel, stride, padding, dilation, largest, up),
        by_kernel(x, kernel, stride, padding, dilation, where, up)
    end,
    errors = {
      { T { 4, 4 }, 2, match = "x: expected [n, c, h, w]" }, { T { 1, 1, 2, 2 }, 3, match = "does not fit into [2, 2]" },
      { T { 1, 1, 4, 4 }, 2, 2, 2, match = "padding: expected at most half" }, { T { 1, 1, 4, 4 }, 0, match = "kernel" },
      { T { 1, 1, 4, 4 }, { 1, 2, 3 }, match = "kernel: expected one or two integers, got 3" },
    },
  })

  row("avg_pool2d", {
    cases = {
      { T { 2, 3, 6, 6 }, 2 }, { T { 1, 3, 5, 7 }, { 3, 2 }, { 2, 1 }, 1 }, { T { 1, 2, 5, 5 }, 3, 2, 1, false },
      { T { 1, 1, 4, 4 }, 3, 2, 1, opts = { count_include_pad = false } }, { T { 0, 2, 4, 4 }, 2 }, { T { 2, 0, 4, 4 }, 2 },
      { T { 1, 2, 5, 6 }, 2, 2, 0, true, true }, { T { 1, 2, 6, 5 }, { 4, 3 }, { 3, 4 }, { 2, 1 }, false, true },
      { T { 1, 2, 6, 5 }, 3, 2, 1, true, true }, { T { 1, 2, 6, 5 }, 3, 2, 1, opts = { divisor = 7 } },
      { T { 1, 2, 5, 38 }, 2, grad = false }, { T { 1, 1, 5, 41 }, 3, 2, 1, grad = false },
    },
    ref = function(x, kernel, stride, padding, include, up, options)
      if type(include) == "table" then include, options = nil, include end
      options = options or {}
      if options.count_include_pad ~= nil then include = options.count_include_pad end
      return by_kernel(x, kernel, stride, padding, 1, function(values, positions, full)
        if options.divisor then return mean(values, positions, options.divisor, true) end
        return mean(values, positions, full, include ~= false)
      end, up)
    end,
    errors = {
      { T { 1, 1, 4, 4 }, 2, opts = { divisor = -2 }, match = "divisor: expected a positive integer, got -2" },
      { T { 4, 4 }, 2, match = "x: expected [n, c, h, w]" }, { T { 1, 1, 2, 2 }, 3, match = "does not fit" } },
  })

  row("adaptive_avg_pool2d", {
    cases = { { T { 2, 3, 6, 6 }, 3 }, { T { 1, 2, 5, 7 }, { 3, 2 } }, { T { 1, 2, 3, 3 }, { 5, 1 } }, { T { 0, 2, 3, 3 }, 2 } },
    ref = function(x, size) return by_size(x, size, function(values) return mean(values, nil, nil, false) end) end,
    errors = { { T { 4, 4 }, 2, match = "x: expected" }, { T { 1, 1, 2, 0 }, 1, match = "nothing to pool" } },
  })

  row("adaptive_max_pool2d", {
    cases = {
      { T { 2, 3, 6, 6, distinct = true }, 3 }, { T { 1, 2, 5, 7, distinct = true }, { 3, 2 } },
      { T { 1, 2, 3, 3, distinct = true }, { 5, 1 } }, { T { 0, 2, 3, 3 }, 2 },
    },
    ref = function(x, size) return by_size(x, size, largest), by_size(x, size, where) end,
    errors = { { T { 4, 4 }, 2, match = "x: expected" }, { T { 1, 1, 2, 2 }, 0, match = "size" } },
  })

  row("avg_pool2d_backward", {
    cases = {
      { T { 2, 3, 3, 3 }, { 6, 6 }, 2, 2, 0 }, { T { 1, 2, 3, 3 }, { 5, 5 }, 3, 2, 1, false }, { T { 1, 3, 3, 4 }, { 5, 7 }, 3, { 2, 2 }, 1, true },
      { T { 1, 2, 3, 2 }, { 5, 7 }, {}, {}, 0, false, true },
      { T { 1, 1, 3, 4 }, { 5, 7 }, 2, 2, 0, true, false, true }, { T { 1, 1, 2, 3 }, { 5, 7 }, 2, 2, 0, true, false, false, 3 },
      { T { 0, 2, 2, 2 }, { 4, 4 }, 2, {}, 0 },
    },
    ref = function(g, size, kernel, stride, padding, include, adaptive, _, divisor)
      local n = #g.shape
      local dx = from(sizes(g, size[1], size[2]), function() return 0.0 end)
      local spec = from(dx.shape, function() return 0.0 end)
      local function spread(windows)
        pooled(spec, g.shape[n - 1], g.shape[n], windows, function() return 0.0 end)
        local strides, step = {}, 1
        for d = n, 1, -1 do strides[d], step = step, step * dx.shape[d] end
        from(g.shape, function(index)
          local rows, full_rows = windows(1, index[n - 1])
          local columns, full_columns = windows(2, index[n])
          local count = divisor or (include ~= false and not adaptive) and full_rows * full_columns or #rows * #columns
          for _, r in ipairs(rows) do
            for _, c in ipairs(columns) do
              local flat = 1
              for d = 1, n do flat = flat + (d == n - 1 and r or d == n and c or index[d]) * strides[d] end
              dx[flat] = dx[flat] + at(g, index) / count
            end
          end
          return 0.0
        end)
      end
      if adaptive then
        spread(function(d, i) return divided(i, size[d], g.shape[n - 2 + d]) end)
      else
        kernel, padding = pair(kernel), pair(padding, { 0, 0 })
        stride = pair(stride, kernel)
        spread(function(d, i) return window(i, size[d], kernel[d], stride[d], padding[d], 1) end)
      end
      return dx
    end,
    errors = { { T { 1, 1, 3, 3 }, { 4, 4 }, 2, 2, 0, match = "g: " } },
  })

  -- Positions lie in their windows, as max_pool2d gives them.
  local dilated = {}
  for i = 0, 19 do
    local y, x = i // 4, i % 4
    dilated[i + 1] = (y + i % 3 // 2 * 2) * 6 + x + i % 2 * 2
  end

  row("max_pool2d_backward", {
    cases = {
      { T { 1, 2, 2, 2 }, T { 1, 2, 2, 2, values = { 0, 6, 9, 15, 5, 2, 12, 11 }, dtype = "i64" }, { 4, 4 }, 2 },
      { T { 1, 1, 3, 3 }, T { 1, 1, 3, 3, values = { 6, 6, 8, 6, 6, 13, 16, 18, 18 }, dtype = "i64" }, { 5, 5 }, 3, 2, 1 },
      { T { 1, 1, 5, 4 }, T { 1, 1, 5, 4, values = dilated, dtype = "i64" }, { 7, 6 }, 2, 1, 0, 2 },
      { T { 1, 1, 3, 2 }, T { 1, 1, 3, 2, values = { 10, 10, 10, 10, 21, 34 }, dtype = "i64" }, { 5, 7 }, opts = { adaptive = true } },
      { T { 1, 1, 3, 2 }, T { 1, 1, 3, 2, values = { 1, 2, 7, 8, 12, 14 }, dtype = "i64" }, { 5, 3 }, 2, opts = { ceil_mode = true } },
      { T { 0, 2, 2, 2 }, T { 0, 2, 2, 2, int = { 0, 4 } }, { 4, 4 }, 2 },
    },
    ref = function(g, position, size)
      local area, results = size[1] * size[2], g.shape[3] * g.shape[4]
      local dx = from(sizes(g, size[1], size[2]), function() return 0.0 end)
      for i = 1, g.shape[1] * g.shape[2] * results do
        local to = (i - 1) // results * area + position[i] + 1
        dx[to] = dx[to] + g[i]
      end
      return dx
    end,
    errors = {
      { T { 1, 1, 3, 3 }, T { 1, 1, 3, 3, int = { 0, 1 } }, { 4, 4 }, 2, match = "g: " },
      { T { 1, 1, 2, 2 }, T { 1, 1, 4, int = { 0, 1 } }, { 4, 4 }, 2, match = "position: " },
      { T { 1, 1, 1, 1 }, T { 1, 1, 1, 1, values = { 4 }, dtype = "i64" }, { 2, 2 }, 2, match = "index 4 is out of range for size 4" },
    },
  })
end
