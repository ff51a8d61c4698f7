-- Rows of src/ops/interpolate.c. References: each output position's sources and weights, straight from the definition.

return function(row, T)
  local from, at = T.from, T.at

  local function f32(x) return (string.unpack("f", string.pack("f", x))) end

  -- { position, weight } pairs of output position i
  local function sources(i, in_size, out_size, scale, mode, corners)
    if out_size == in_size or mode == "nearest" and out_size == 2 * in_size then scale = nil end
    local step = scale or in_size / out_size
    if mode == "nearest" then
      local source = scale and f32(i * f32(step)) or i * in_size // out_size
      return { { math.min(math.floor(source), in_size - 1), 1.0 } }
    end
    local p
    if corners then
      p = out_size > 1 and i * (in_size - 1) / (out_size - 1) or 0.0
    else
      p = math.max((i + 0.5) * step - 0.5, 0.0)
    end
    local lo = math.min(math.floor(p), in_size - 1)
    local hi, t = math.min(lo + 1, in_size - 1), p - math.floor(p)
    return { { lo, 1 - t }, { hi, t } }
  end

  local function settings(size, scale, mode, corners, options)
    if type(corners) == "table" then corners, options = nil, corners end
    if type(mode) == "table" then mode, options = nil, mode end
    if type(scale) == "table" then scale, options = nil, scale end
    if type(size) == "table" and #size == 0 and next(size) then size, options = nil, size end
    options = options or {}
    size, scale = options.size or size, options.scale or scale
    mode, corners = options.mode or mode or "nearest", options.align_corners or corners
    if scale == 0 then scale = nil end
    if type(size) == "number" then size = { size, size } end
    if size and #size == 0 then size = nil end
    return size, scale, mode, corners
  end

  local function resize(x, ...)
    local size, scale, mode, corners = settings(...)
    local n = #x.shape
    local shape = table.move(x.shape, 1, n, 1, {})
    for d = n - 1, n do shape[d] = size and (size[d - n + 2] or size[1]) or math.floor(x.shape[d] * scale) end
    return from(shape, function(index)
      local sum = 0.0
      for _, r in ipairs(sources(index[n - 1], x.shape[n - 1], shape[n - 1], scale and 1 / scale, mode, corners)) do
        for _, c in ipairs(sources(index[n], x.shape[n], shape[n], scale and 1 / scale, mode, corners)) do
          local other = table.move(index, 1, n, 1, {})
          other[n - 1], other[n] = r[1], c[1]
          sum = sum + r[2] * c[2] * at(x, other)
        end
      end
      return sum
    end)
  end

  row("interpolate", {
    cases = {
      { T { 2, 3, 4, 5 }, { 8, 10 } }, { T { 1, 2, 3, 4 }, { 2, 7 } }, { T { 1, 2, 4, 4 }, opts = { scale = 2 } },
      { T { 1, 2, 4, 4 }, opts = { scale = 1.6, mode = "bilinear" } }, { T { 1, 2, 5, 4 }, 3, opts = { mode = "bilinear" } },
      { T { 1, 2, 3, 4 }, { 7, 9 }, opts = { mode = "bilinear", align_corners = true } },
      { T { 1, 1, 1, 1 }, { 3, 2 }, opts = { mode = "bilinear" } }, { T { 0, 2, 3, 3 }, 6 },
      { T { 2, 2, 4, 6 }, { 1, 1 }, opts = { mode = "bilinear", align_corners = true } },
      -- By a scale that sizes do not show: position 39 of 50 is 30 of 39; sizes that stay, or double.
      { T { 1, 1, 39, 5, distinct = true, range = { -9, 9 } }, opts = { scale = 1.3 }, grad = false },
      { T { 1, 1, 3, 7 }, opts = { scale = 1.3 } }, { T { 1, 1, 3, 7 }, opts = { scale = 1.3, mode = "bilinear" } },
      { T { 1, 1, 5, 9 }, opts = { scale = 2.1 } }, { T { 1, 1, 5, 9 }, opts = { scale = 2.1, mode = "bilinear" } },
      { T { 1, 1, 7, 5 }, opts = { scale = 0.6 } },
    },
    ref = resize,
    errors = {
      { T { 4, 4 }, 2, match = "x: expected [n, c, h, w]" }, { T { 1, 1, 2, 2 }, match = "size: expected a size or a scale, got neither" },
      { T { 1, 1, 2, 2 }, 4, opts = { mode = "cubic" }, match = "mode: expected one of" },
      { T { 1, 1, 2, 2 }, 4, opts = { align_corners = true }, match = "align_corners" },
      { T { 1, 1, 2, 2 }, opts = { scale = 0.1 }, match = "no possible size" },
    },
  })

  row("interpolate_backward", {
    cases = {
      { T { 2, 3, 8, 10 }, { 4, 5 } }, { T { 1, 2, 3, 3 }, { 5, 4 }, 0, "bilinear" }, { T { 1, 2, 7, 9 }, { 3, 4 }, 0, "bilinear", true },
      { T { 1, 2, 6, 6 }, { 4, 4 }, 1.6, "bilinear" }, { T { 0, 2, 6, 6 }, 3 }, { T { 1, 1, 50, 3 }, { 39, 3 }, 1.3 },
      { T { 1, 1, 10, 3 }, { 5, 3 }, 2.1 }, { T { 1, 1, 3, 10 }, { 3, 5 }, 2.1, "bilinear" },
    },
    ref = function(g, size, scale, mode, corners)
      mode = mode or "nearest"
      if type(size) == "number" then size = { size, size } end
      if scale == 0 then scale = nil end
      local n = #g.shape
      local shape = table.move(g.shape, 1, n, 1, {})
      shape[n - 1], shape[n] = size[1], size[2]
      local dx = from(shape, function() return 0.0 end)
      local strides, step = {}, 1
      for d = n, 1, -1 do strides[d], step = step, step * shape[d] end
      from(g.shape, function(index)
        for _, r in ipairs(sources(index[n - 1], size[1], g.shape[n - 1], scale and 1 / scale, mode, corners)) do
          for _, c in ipairs(sources(index[n], size[2], g.shape[n], scale and 1 / scale, mode, corners)) do
            local flat = 1
            for d = 1, n do flat = flat + (d == n - 1 and r[1] or d == n and c[1] or index[d]) * strides[d] end
            dx[flat] = dx[flat] + r[2] * c[2] * at(g, index)
          end
        end
        return 0.0
      end)
      return dx
    end,
    errors = { { T { 4, 4 }, { 2, 2 }, match = "g: expected [n, c, oh, ow]" }, { T { 1, 1, 2, 2 }, {}, match = "size" } },
  })
end
