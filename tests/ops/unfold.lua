-- Rows of src/ops/unfold.c. References: where each element comes from, straight from the definition.

return function(row, T)
  local from, at = T.from, T.at

  local function pair(v, otherwise)
    if v == nil then v = otherwise end
    if type(v) == "number" then return { v, v } end
    return { v[1], v[2] or v[1] }
  end

  local function options(...)
    local given, names, o = table.pack(...), { "kernel", "dilation", "padding", "stride" }, {}
    for i = 1, given.n do
      local v = given[i]
      if type(v) == "table" and #v == 0 and next(v) then
        for key, value in pairs(v) do o[key] = value end
      else
        o[names[i]] = v
      end
    end
    return { kernel = pair(o.kernel), dilation = pair(o.dilation, 1), padding = pair(o.padding, 0), stride = pair(o.stride, 1) }
  end

  local function windows(size, o, d)
    return (size + 2 * o.padding[d] - o.dilation[d] * (o.kernel[d] - 1) - 1) // o.stride[d] + 1
  end

  -- Channel, row and column of the image that element (c, l) of the columns stands for.
  local function place(c, l, o, width)
    local taps = o.kernel[1] * o.kernel[2]
    local tap, oy, ox = c % taps, l // width, l % width
    return c // taps, oy * o.stride[1] - o.padding[1] + tap // o.kernel[2] * o.dilation[1],
      ox * o.stride[2] - o.padding[2] + tap % o.kernel[2] * o.dilation[2]
  end

  row("unfold", {
    cases = {
      { T { 2, 3, 4, 5 }, 2 }, { T { 1, 2, 5, 4 }, { 3, 2 }, 1, 1, 2 }, { T { 1, 1, 6, 7 }, { 2, 3 }, { 2, 1 }, { 0, 2 }, { 1, 3 } },
      { T { 1, 2, 3, 3 }, 3, opts = { padding = 2, stride = 2, dilation = 2 } }, { T { 0, 2, 3, 3 }, 2 }, { T { 1, 2, 3, 2 }, 1 },
    },
    ref = function(x, ...)
      local o = options(...)
      local s = x.shape
      local width = windows(s[4], o, 2)
      return from({ s[1], s[2] * o.kernel[1] * o.kernel[2], windows(s[3], o, 1) * width }, function(index)
        local c, y, z = place(index[2], index[3], o, width)
        if y < 0 or y >= s[3] or z < 0 or z >= s[4] then return 0.0 end
        return at(x, { index[1], c, y, z })
      end)
    end,
    errors = {
      { T { 3, 4, 5 }, 2, match = "x: expected [n, c, h, w]" }, { T { 1, 1, 2, 4 }, 3, match = "kernel: {3, 3} with padding {0, 0}" },
      { T { 1, 1, 4, 4 }, { 1, 2, 3 }, match = "kernel: expected one or two integers" }, { T { 1, 1, 4, 4 }, 2, opts = { stride = 0 }, match = "stride" },
    },
  })

  row("fold", {
    cases = {
      { T { 2, 12, 12 }, { 4, 5 }, 2 }, { T { 1, 12, 9 }, { 5, 4 }, { 3, 2 }, 1, 1, 2 }, { T { 1, 6, 12 }, { 6, 7 }, { 2, 3 }, { 2, 1 }, { 0, 2 }, { 1, 3 } },
      { T { 1, 9, 4 }, 3, 3, opts = { padding = 2, stride = 2, dilation = 2 } }, { T { 0, 8, 4 }, 3, 2 },
    },
    ref = function(x, size, ...)
      local o = options(...)
      size = pair(size)
      local width = windows(size[2], o, 2)
      local channels = x.shape[2] // (o.kernel[1] * o.kernel[2])
      local y = from({ x.shape[1], channels, size[1], size[2] }, function() return 0.0 end)
      from(x.shape, function(index)
        local c, i, j = place(index[2], index[3], o, width)
        if i >= 0 and i < size[1] and j >= 0 and j < size[2] then
          local k = ((index[1] * channels + c) * size[1] + i) * size[2] + j + 1
          y[k] = y[k] + at(x, index)
        end
        return 0
      end)
      return y
    end,
    errors = {
      { T { 1, 12, 12, 1 }, 4, 2, match = "x: expected [n, c*kh*kw, windows]" },
      { T { 1, 12, 8 }, { 4, 5 }, 2, match = "x: expected [n, c * 4, 12], for 3 x 4 windows of {2, 2}, got [1, 12, 8]" },
      { T { 1, 11, 12 }, { 4, 5 }, 2, match = "x: expected" },
    },
  })

  row("pixel_shuffle", {
    cases = { { T { 2, 8, 2, 3 }, 2 }, { T { 9, 1, 2 }, 3 }, { T { 1, 2, 4, 2, 2 }, 2 }, { T { 1, 3, 2, 2 }, 1 } },
    ref = function(x, r)
      local n = #x.shape
      local shape = table.move(x.shape, 1, n, 1, {})
      shape[n - 2], shape[n - 1], shape[n] = shape[n - 2] // (r * r), shape[n - 1] * r, shape[n] * r
      return from(shape, function(index)
        local other = table.move(index, 1, n, 1, {})
        local i, j = index[n - 1], index[n]
        other[n - 2] = index[n - 2] * r * r + i % r * r + j % r
        other[n - 1], other[n] = i // r, j // r
        return at(x, other)
      end)
    end,
    errors = {
      { T { 4, 4 }, 2, match = "x: expected" }, { T { 1, 6, 2, 2 }, 2, match = "x: expected a multiple of 4 channels" },
      { T { 1, 4, 2, 2 }, 0, match = "factor: expected a positive integer, got 0" },
    },
  })

  row("pixel_unshuffle", {
    cases = { { T { 2, 2, 4, 6 }, 2 }, { T { 1, 3, 6 }, 3 }, { T { 1, 2, 1, 2, 2 }, 2 } },
    ref = function(x, r)
      local n = #x.shape
      local shape = table.move(x.shape, 1, n, 1, {})
      shape[n - 2], shape[n - 1], shape[n] = shape[n - 2] * r * r, shape[n - 1] // r, shape[n] // r
      return from(shape, function(index)
        local other = table.move(index, 1, n, 1, {})
        local c = index[n - 2]
        other[n - 2] = c // (r * r)
        other[n - 1], other[n] = index[n - 1] * r + c // r % r, index[n] * r + c % r
        return at(x, other)
      end)
    end,
    errors = { { T { 1, 2, 3, 4 }, 2, match = "x: expected height and width that 2 divides, got [1, 2, 3, 4]" } },
  })

  row("channel_shuffle", {
    cases = { { T { 2, 6, 2, 2 }, 3 }, { T { 1, 4 }, 2 }, { T { 1, 6, 2, 1, 2 }, 2 } },
    ref = function(x, groups)
      return from(x.shape, function(index)
        local other = table.move(index, 1, #x.shape, 1, {})
        other[2] = index[2] % groups * (x.shape[2] // groups) + index[2] // groups
        return at(x, other)
      end)
    end,
    errors = { { T { 1, 6, 2, 2 }, 4, match = "groups: expected a divisor of the channels" }, { T { 6 }, 2, match = "x: expected" } },
  })
end
