-- Rows of src/ops/grid_sample.c. References: each position by itself, straight from the definition.

return function(row, T)
  local from, at = T.from, T.at

  local function options(...)
    local given, names, o = table.pack(...), { "mode", "padding", "align_corners" }, {}
    for i = 1, given.n do
      local v = given[i]
      if type(v) == "table" then
        for key, value in pairs(v) do o[key] = value end
      else
        o[names[i]] = v
      end
    end
    o.mode, o.padding = o.mode or "bilinear", o.padding or "zeros"
    return o
  end

  -- u within the image as the padding says; step by step, as one would with a mirror.
  local function padded(u, size, o)
    if o.padding == "zeros" then return u end
    if o.padding == "reflection" then
      local low, high = o.align_corners and 0 or -0.5, o.align_corners and size - 1 or size - 0.5
      if low == high then return 0 end
      while u < low or u > high do
        if u < low then u = 2 * low - u else u = 2 * high - u end
      end
    end
    return math.max(0, math.min(size - 1, u))
  end

  -- Keys' kernel with a = -3/4, and its slope.
  local function cubic(t)
    t = math.abs(t)
    if t <= 1 then return 1.25 * t ^ 3 - 2.25 * t ^ 2 + 1 end
    return t < 2 and -0.75 * (t - 1) * (t - 2) ^ 2 or 0.0
  end

  -- { position, weight } pairs along one dimension; those outside are left out.
  local function sources(g, size, o)
    if g ~= g then g = -1 end
    local u = o.align_corners and (g + 1) / 2 * (size - 1) or ((g + 1) * size - 1) / 2
    local list = {}
    local function add(p, w)
      if p >= 0 and p < size then list[#list + 1] = { math.tointeger(p), w } end
    end
    if o.mode == "bicubic" then
      for k = math.floor(u) - 1, math.floor(u) + 2 do add(T.round(padded(k, size, o)) // 1, cubic(u - k)) end
      return list
    end
    u = padded(u, size, o)
    if o.mode == "nearest" then
      add(T.round(u) // 1, 1.0)
      return list
    end
    local low = math.floor(u)
    add(low, 1 - (u - low))
    add(low + 1, u - low)
    return list
  end

  -- visit(place of x or dx, weight) of every source of the output position `index` [n, c, ...].
  local function each_source(index, shape, grid, o, visit)
    local dims = #shape - 2
    local place, other = { index[1] }, { index[1], index[2] }
    for d = 1, dims do place[1 + d] = index[2 + d] end
    local function walk(d, weight)
      if d > dims then return visit(other, weight) end
      place[dims + 2] = dims - d
      for _, s in ipairs(sources(at(grid, place), shape[2 + d], o)) do
        other[2 + d] = s[1]
        walk(d + 1, weight * s[2])
      end
    end
    walk(1, 1.0)
  end

  local function sample(x, grid, ...)
    local o, shape = options(...), { x.shape[1], x.shape[2] }
    for d = 1, #x.shape - 2 do shape[2 + d] = grid.shape[1 + d] end
    return from(shape, function(index)
      local sum = 0.0
      each_source(index, x.shape, grid, o, function(place, w) sum = sum + w * at(x, place) end)
      return sum
    end)
  end

  local function flat(shape, index)
    local k = 0
    for d = 1, #shape do k = k * shape[d] + index[d] end
    return k + 1
  end

  -- Away from where the result has a kink: of 4 pixels, between centres; of 5, with align_corners, the same.
  local kinks4, kinks5 = { -1.75, -1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 1.75 }, { -1.5, -1, -0.5, 0, 0.5, 1, 1.5 }
  local between4 = { -1.5, -1, -0.5, 0, 0.5, 1, 1.5 }
  local function grid4(...) return T { range = { -1.7, 1.7 }, avoid = kinks4, ... } end
  local function grid5(...) return T { range = { -1.7, 1.7 }, avoid = kinks5, ... } end

  row("grid_sample", {
    cases = {
      { T { 2, 3, 4, 4 }, grid4(2, 2, 3, 2) }, { T { 1, 2, 4, 4 }, grid4(1, 3, 2, 2), "bilinear", "border" },
      { T { 1, 2, 4, 4 }, grid4(1, 3, 3, 2), "bilinear", "reflection" }, { T { 1, 2, 5, 5 }, grid5(1, 3, 2, 2), "bilinear", "zeros", true },
      { T { 1, 1, 5, 5 }, grid5(1, 3, 3, 2), "bilinear", "reflection", true }, { T { 1, 1, 5, 5 }, grid5(1, 2, 3, 2), "bilinear", "border", true },
      { T { 2, 2, 4, 4 }, T { 2, 2, 2, 2, range = { -1.7, 1.7 }, avoid = between4 }, "nearest" },
      { T { 1, 2, 4, 4 }, T { 1, 3, 2, 2, range = { -1.7, 1.7 }, avoid = between4 }, opts = { mode = "nearest", padding = "reflection" } },
      { T { 1, 2, 4, 4 }, grid4(1, 1, 3, 2), "bicubic" }, { T { 1, 1, 4, 4 }, grid4(1, 3, 2, 2), "bicubic", "border", grad = false },
      { T { 1, 1, 4, 4 }, grid4(1, 1, 2, 2), "bicubic", "reflection" },
      { T { 1, 1, 5, 5 }, grid5(1, 2, 2, 2), "bicubic", "reflection", true, grad = false },
      { T { 1, 1, 2, 4, 4 }, T { 1, 1, 1, 2, 3, values = { 0.1, 0.4, 0.1, -0.9, -0.1, -0.2 } } },
      { T { 1, 1, 4, 4, 4 }, grid4(1, 1, 2, 3, 3), "bilinear", "reflection", grad = false },
      { T { 1, 1, 3, 5, 5 }, grid5(1, 1, 2, 1, 3), "bilinear", "border", true },
      { T { 1, 2, 4, 4, 4 }, T { 1, 2, 1, 2, 3, range = { -1.7, 1.7 }, avoid = between4 }, "nearest", "border" },
      { T { 1, 1, 2, 3, values = { 1, 2, 3, 4, 5, 6 } }, T { 1, 1, 4, 2, values = { T.nan, 0, 0.25, T.nan, T.inf, 0.5, 0, -T.inf } }, grad = false },
      { T { 0, 1, 4, 4 }, grid4(0, 2, 2, 2) }, { T { 1, 0, 4, 4 }, grid4(1, 2, 2, 2) }, { T { 1, 1, 4, 4 }, grid4(1, 0, 2, 2) },
      { T { 1, 2, 1, 4, values = { 1, -2, 3, 4, 0, 2, 1, 1 } }, grid4(1, 2, 2, 2), opts = { padding = "reflection", align_corners = true }, grad = false },
    },
    ref = sample,
    errors = {
      { T { 4, 4 }, T { 1, 2, 2, 2 }, match = "x: expected [n, c, h, w] or [n, c, d, h, w]" },
      { T { 1, 1, 4, 4 }, T { 1, 2, 2, 3 }, match = "grid: expected [1, oh, ow, 2] for an image of [1, 1, 4, 4], got [1, 2, 2, 3]" },
      { T { 2, 1, 4, 4 }, T { 1, 2, 2, 2 }, match = "grid: expected [2, oh, ow, 2]" },
      { T { 1, 1, 2, 4, 4 }, T { 1, 2, 2, 2 }, match = "grid: expected [1, od, oh, ow, 3]" },
      { T { 1, 1, 2, 4, 4 }, T { 1, 2, 2, 2, 3 }, "bicubic", match = "mode: \"bicubic\" is for images" },
      { T { 1, 1, 4, 4 }, T { 1, 2, 2, 2 }, "linear", match = "mode: expected one of" },
      { T { 1, 1, 4, 4 }, T { 1, 2, 2, 2 }, "nearest", "zero", match = "padding: expected one of" },
      { T { 1, 1, 0, 4 }, T { 1, 2, 2, 2 }, match = "nothing to sample" },
    },
  })

  row("grid_sample_backward_input", {
    cases = {
      { T { 2, 5, 2, 3 }, grid4(2, 2, 3, 2), { 2, 5, 4, 4 } }, { T { 1, 2, 3, 2 }, grid4(1, 3, 2, 2), { 1, 2, 4, 4 }, "bicubic", "border" },
      { T { 1, 2, 2, 1, 2 }, grid4(1, 2, 1, 2, 3), { 1, 2, 4, 4, 4 }, "bilinear", "reflection" },
      { T { 1, 1, 2, 2 }, T { 1, 2, 2, 2, range = { -1.7, 1.7 }, avoid = between4 }, { 1, 1, 4, 4 }, "nearest" },
      { T { 1, 1, 0, 2 }, grid4(1, 0, 2, 2), { 1, 1, 4, 4 } },
    },
    ref = function(g, grid, size, ...)
      local o, dx = options(...), from(size, function() return 0.0 end)
      from(g.shape, function(index)
        each_source(index, size, grid, o, function(place, w)
          local k = flat(size, place)
          dx[k] = dx[k] + w * at(g, index)
        end)
        return 0
      end)
      return dx
    end,
    errors = {
      { T { 1, 1, 2, 2 }, T { 1, 2, 3, 2 }, { 1, 1, 4, 4 }, match = "g: expected [1, 1, ...] with the places of grid" },
      { T { 1, 1, 2, 2 }, T { 1, 2, 2, 2 }, { 4, 4 }, match = "size: expected four or five sizes, got 2" },
      { T { 1, 1, 2, 2 }, T { 1, 2, 2, 2 }, { 1, 1, -4, 4 }, match = "size: expected sizes" },
    },
  })

  row("grid_sample_backward_grid", {
    cases = {
      { T { 2, 3, 2, 3 }, T { 2, 3, 4, 4 }, grid4(2, 2, 3, 2) }, { T { 1, 2, 2, 2 }, T { 1, 2, 4, 4 }, grid4(1, 2, 2, 2), "bicubic" },
      { T { 1, 2, 2, 1, 2 }, T { 1, 2, 4, 4, 4 }, grid4(1, 2, 1, 2, 3), "bilinear", "reflection" },
      { T { 1, 2, 2, 2 }, T { 1, 2, 5, 5 }, grid5(1, 2, 2, 2), "bilinear", "border", true },
      { T { 1, 1, 2, 2 }, T { 1, 1, 4, 4 }, T { 1, 2, 2, 2, range = { -1.7, 1.7 }, avoid = between4 }, "nearest" },
    },
    -- By differences of the reference itself: it is cubic at most between kinks.
    ref = function(g, x, grid, ...)
      local h, rest = 1e-2, table.pack(...)
      local function loss(k, by)
        local moved = table.move(grid, 1, #grid, 1, {})
        moved.shape, moved[k] = grid.shape, grid[k] + by
        local y, sum = sample(x, moved, table.unpack(rest, 1, rest.n)), 0.0
        for i = 1, #y do sum = sum + y[i] * g[i] end
        return sum
      end
      local k = 0
      return from(grid.shape, function()
        k = k + 1
        return (8 * (loss(k, h) - loss(k, -h)) - (loss(k, 2 * h) - loss(k, -2 * h))) / (12 * h)
      end)
    end,
    errors = {
      { T { 1, 2, 2, 2 }, T { 1, 1, 4, 4 }, T { 1, 2, 2, 2 }, match = "g: expected [1, 1, ...]" },
      { T { 1, 1, 2, 2 }, T { 1, 4, 4 }, T { 1, 2, 2, 2 }, match = "x: expected" },
    },
  })

  row("affine_grid", {
    cases = {
      { T { 2, 2, 3 }, { 2, 1, 3, 4 } }, { T { 1, 2, 3 }, { 1, 5, 1, 4 }, true }, { T { 1, 3, 4 }, { 1, 1, 2, 3, 4 } },
      { T { 2, 3, 4 }, { 2, 1, 3, 1, 2 }, opts = { align_corners = true } },
    },
    ref = function(theta, size, corners)
      if type(corners) == "table" then corners = corners.align_corners end
      local dims = #size - 2
      local shape = { size[1], table.unpack(size, 3) }
      shape[dims + 2] = dims
      return from(shape, function(index)
        local sum = at(theta, { index[1], index[dims + 2], dims })
        for k = 0, dims - 1 do
          local count, i = size[#size - k], index[dims + 1 - k]
          local p = corners and (count > 1 and 2 * i / (count - 1) - 1 or 0.0) or (2 * i + 1) / count - 1
          sum = sum + p * at(theta, { index[1], index[dims + 2], k })
        end
        return sum
      end)
    end,
    errors = {
      { T { 1, 2, 3 }, { 1, 3, 4 }, match = "size: expected {n, c, h, w} or {n, c, d, h, w}, got 3 integers" },
      { T { 1, 2, 3 }, { 2, 1, 3, 4 }, match = "theta: expected [2, 2, 3] for size [2, 1, 3, 4], got [1, 2, 3]" },
      { T { 1, 2, 3 }, { 1, 1, 0, 4 }, match = "size: expected integers of at least 1" },
    },
  })
end
