-- Rows of src/ops/interpolate.c and src/ops/resample.c. References: each output position's sources and weights, straight from the definition.

return function(row, T)
  local from, at = T.from, T.at

  local function f32(x) return (string.unpack("f", string.pack("f", x))) end

  -- The cubic kernel as two polynomials of the distance, with slope a at 1.
  local function cubic(t, a)
    t = math.abs(t)
    if t <= 1 then return 1 - (a + 3) * t ^ 2 + (a + 2) * t ^ 3 end
    if t >= 2 then return 0.0 end
    return a * (t - 1) * (t - 2) ^ 2
  end

  -- { position, weight } pairs of output position i along one dimension; mode nearest, nearest-exact, area, linear, cubic.
  local function sources(i, in_size, out_size, scale, mode, corners, antialias)
    if out_size == in_size or mode == "nearest" and out_size == 2 * in_size then scale = nil end
    local step = scale or in_size / out_size
    if corners then step = out_size > 1 and (in_size - 1) / (out_size - 1) or 0.0 end
    local function inside(p) return math.max(0, math.min(p, in_size - 1)) end
    if mode == "nearest" then
      local source = scale and f32(i * f32(step)) or i * in_size // out_size
      return { { inside(math.floor(source)), 1.0 } }
    elseif mode == "nearest-exact" then
      return { { inside(math.floor(scale and f32((i + 0.5) * f32(step)) or (i + 0.5) * in_size / out_size)), 1.0 } }
    elseif mode == "area" then
      local list = {}
      local first, stop = math.floor(i * in_size / out_size), math.ceil((i + 1) * in_size / out_size)
      for p = first, stop - 1 do list[#list + 1] = { p, 1 / (stop - first) } end
      return list
    elseif antialias then
      -- The kernel, stretched, at the distances of all pixel centres that it reaches; the weights add up to 1.
      local list, total, stretch = {}, 0.0, math.max(step, 1.0)
      for p = 0, in_size - 1 do
        local t = (p + 0.5 - (i + 0.5) * step) / stretch
        local w = mode == "cubic" and cubic(t, -0.5) or math.max(0, 1 - math.abs(t))
        if w ~= 0 then list[#list + 1] = { p, w } end
        total = total + w
      end
      for _, pair in ipairs(list) do pair[2] = pair[2] / total end
      return list
    end
    local p = corners and i * step or (i + 0.5) * step - 0.5
    if mode == "cubic" then
      local list = {}
      for k = math.floor(p) - 1, math.floor(p) + 2 do list[#list + 1] = { inside(k), cubic(p - k, -0.75) } end
      return list
    end
    p = math.max(p, 0.0)
    local lo = math.min(math.floor(p), in_size - 1)
    local hi, t = math.min(lo + 1, in_size - 1), p - math.floor(p)
    return { { lo, 1 - t }, { hi, t } }
  end
  local one_dimensional = { bilinear = "linear", trilinear = "linear", bicubic = "cubic" }

  local function settings(n, ...)
    local given, o = table.pack(...), {}
    local names = { "size", "scale", "mode", "align_corners", "antialias" }
    for i = 1, given.n do
      local v = given[i]
      if type(v) == "table" and #v == 0 and next(v) then
        for key, value in pairs(v) do o[key] = value end
      else
        o[names[i]] = v
      end
    end
    if o.scale == 0 then o.scale = nil end
    if type(o.size) == "table" and #o.size == 0 then o.size = nil end
    if o.size then
      local list = {}
      for d = 1, n do list[d] = type(o.size) == "table" and (o.size[d] or o.size[1]) or o.size end
      o.size = list
    end
    o.mode = one_dimensional[o.mode] or o.mode or "nearest"
    return o
  end

  -- The sum over the sources of every dimension from `first` on; sizes: of the result.
  local function resized(x, first, sizes, o)
    local n = #x.shape
    local shape = table.move(x.shape, 1, n, 1, {})
    for d = first, n do shape[d] = sizes[d - first + 1] end
    return from(shape, function(index)
      local other = table.move(index, 1, n, 1, {})
      local function walk(d)
        if d > n then return at(x, other) end
        local sum = 0.0
        for _, s in ipairs(sources(index[d], x.shape[d], shape[d], o.scale and 1 / o.scale, o.mode, o.align_corners, o.antialias)) do
          other[d] = s[1]
          sum = sum + s[2] * walk(d + 1)
        end
        return sum
      end
      return walk(first)
    end)
  end

  local function resize(x, ...)
    local n = #x.shape - 2
    local o = settings(n, ...)
    local sizes = {}
    for d = 1, n do sizes[d] = o.size and o.size[d] or math.floor(x.shape[d + 2] * o.scale) end
    return resized(x, 3, sizes, o)
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
      -- One and three dimensions, and the other modes.
      { T { 2, 3, 5 }, 8 }, { T { 1, 2, 5 }, 3, 0, "linear" }, { T { 1, 2, 4 }, opts = { scale = 2.3, mode = "linear" } },
      { T { 1, 2, 5 }, { 7 }, opts = { mode = "linear", align_corners = true } }, { T { 1, 2, 7 }, 3, 0, "nearest-exact" },
      { T { 1, 1, 9 }, opts = { scale = 1.7, mode = "nearest-exact" } }, { T { 1, 2, 7 }, 3, 0, "area" }, { T { 1, 1, 3, 5 }, { 5, 2 }, 0, "area" },
      { T { 1, 1, 5, 7 }, { 3, 9 }, 0, "nearest-exact" }, { T { 1, 2, 3, 2, 4 }, { 2, 5, 4 } }, { T { 1, 1, 3, 4, 5 }, 2, 0, "nearest-exact" },
      { T { 1, 1, 3, 4, 5 }, { 2, 3, 7 }, 0, "area" }, { T { 1, 2, 3, 2, 4 }, { 5, 4, 3 }, 0, "trilinear" },
      { T { 1, 1, 2, 3, 3 }, { 4, 2, 5 }, 0, "trilinear", true }, { T { 1, 1, 2, 3, 2 }, opts = { scale = 1.5, mode = "trilinear" } },
      { T { 2, 2, 5, 4 }, { 7, 3 }, 0, "bicubic" }, { T { 1, 2, 5, 4 }, { 3, 7 }, 0, "bicubic", true }, { T { 1, 1, 1, 2 }, { 3, 1 }, 0, "bicubic" },
      { T { 1, 1, 6, 5 }, opts = { scale = 1.3, mode = "bicubic" } }, { T { 1, 1, 3, 3 }, opts = { size = { 3, 9 }, mode = "bicubic" } },
      { T { 1, 2, 9, 7 }, { 4, 3 }, 0, "bilinear", false, true }, { T { 1, 1, 3, 8 }, { 7, 3 }, 0, "bilinear", false, true },
      { T { 1, 1, 11, 5 }, { 4, 7 }, 0, "bicubic", false, true }, { T { 1, 1, 9, 7 }, { 4, 3 }, opts = { mode = "bicubic", antialias = true, align_corners = true } },
      { T { 1, 1, 7, 8 }, opts = { scale = 0.4, mode = "bilinear", antialias = true } }, { T { 1, 1, 2, 2 }, 2, 0, "bicubic" },
      { T { 0, 2, 3 }, 6, 0, "linear" },
    },
    ref = resize,
    errors = {
      { T { 4, 4 }, 2, match = "x: expected [n, c, w], [n, c, h, w]" }, { T { 1, 1, 2, 2 }, match = "size: expected a size or a scale, got neither" },
      { T { 1, 1, 2, 2 }, 4, opts = { mode = "cubic" }, match = "mode: expected one of" },
      { T { 1, 1, 2, 2 }, 4, opts = { align_corners = true }, match = "align_corners: not for mode \"nearest\"" },
      { T { 1, 1, 2 }, 4, opts = { mode = "bilinear" }, match = "mode: \"bilinear\" is for x of 4 dimensions, got [1, 1, 2]" },
      { T { 1, 1, 2 }, 4, opts = { mode = "linear", antialias = true }, match = "antialias: only for modes" },
      { T { 1, 1, 2, 2, 2 }, { 3, 3 }, match = "size: expected one or three integers, got 2" },
      { T { 1, 1, 2, 0 }, 3, opts = { mode = "bicubic" }, match = "nothing to resize" },
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
        for _, r in ipairs(sources(index[n - 1], size[1], g.shape[n - 1], scale and 1 / scale, one_dimensional[mode] or mode, corners)) do
          for _, c in ipairs(sources(index[n], size[2], g.shape[n], scale and 1 / scale, one_dimensional[mode] or mode, corners)) do
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

  -- ---- one dimension ----

  local function options(...)
    local given, o = table.pack(...), {}
    local names = { "dim", "size", "mode", "align_corners", "scale", "antialias" }
    for i = 1, given.n do o[names[i]] = given[i] end
    if o.scale == 0 then o.scale = nil end
    o.mode = o.mode or "linear"
    return o
  end

  -- visit(place of the result, place of the input, weight), positions along `dim` and what lies beside it.
  local function each_weight(in_shape, out_size, dim, o, visit)
    local inner, outer = 1, 1
    for d = 1, dim - 1 do outer = outer * in_shape[d] end
    for d = dim + 1, #in_shape do inner = inner * in_shape[d] end
    for i = 0, out_size - 1 do
      for _, s in ipairs(sources(i, in_shape[dim], out_size, o.scale and 1 / o.scale, o.mode, o.align_corners, o.antialias)) do
        for a = 0, outer - 1 do
          for b = 0, inner - 1 do
            visit((a * out_size + i) * inner + b + 1, (a * in_shape[dim] + s[1]) * inner + b + 1, s[2])
          end
        end
      end
    end
  end
  local function shaped(shape, dim, size)
    local other = table.move(shape, 1, #shape, 1, {})
    other[dim] = size
    return from(other, function() return 0.0 end)
  end

  row("resample", {
    cases = {
      { T { 2, 5, 3 }, 1, 8 }, { T { 2, 3, 7 }, -1, 4, "cubic" }, { T { 9, 2 }, 0, 3, "linear", false, 0, true }, { T { 12 }, 0, 5, "cubic", false, 0, true },
      { T { 2, 5, 3 }, 1, 3, "nearest-exact" }, { T { 3, 4 }, 1, 6, "nearest", false, 1.5 }, { T { 1, 6, 2 }, 1, 3, "cubic", true },
      { T { 2, 3 }, 1, 2, "cubic", false, 0.9 }, { T { 2, 3, 0 }, 1, 2 },
    },
    ref = function(x, dim, ...)
      local d = dim < 0 and dim + #x.shape + 1 or dim + 1
      local o = options(dim, ...)
      local y = shaped(x.shape, d, o.size)
      each_weight(x.shape, o.size, d, o, function(i, j, w) y[i] = y[i] + w * x[j] end)
      return y
    end,
    errors = {
      { T { 2, 3 }, 2, 4, match = "dim" }, { T { 2, 3 }, 1, 0, match = "size: expected a positive integer, got 0" },
      { T { 2, 3 }, 1, 4, "bilinear", match = "mode: expected one of" }, { T { 2, 0 }, 1, 4, match = "nothing to resize" },
      { T { 2, 3 }, 1, 4, "nearest", true, match = "align_corners: only for modes" }, { T { 2, 3 }, 1, 4, "linear", false, -1, match = "scale" },
    },
  })

  row("resample_backward", {
    cases = {
      { T { 2, 8, 3 }, 1, 5 }, { T { 2, 3, 4 }, -1, 7, "cubic" }, { T { 3, 2 }, 0, 9, "linear", false, 0, true }, { T { 5 }, 0, 12, "cubic", false, 0, true },
      { T { 2, 3, 3 }, 1, 5, "nearest-exact" }, { T { 3, 6 }, 1, 4, "nearest", false, 1.5 }, { T { 1, 3, 2 }, 1, 6, "cubic", true },
    },
    ref = function(g, dim, ...)
      local d = dim < 0 and dim + #g.shape + 1 or dim + 1
      local o = options(dim, ...)
      local dx = shaped(g.shape, d, o.size)
      each_weight(dx.shape, g.shape[d], d, o, function(i, j, w) dx[j] = dx[j] + w * g[i] end)
      return dx
    end,
    errors = { { T { 2, 3 }, 1, 0, match = "size: expected a positive integer" }, { T { 2, 3 }, 1, 4, "area", match = "mode" } },
  })
end
