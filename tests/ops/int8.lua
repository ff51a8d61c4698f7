-- Rows of src/ops/int8.c. Reference: the sums over channels and kernel positions, in f64; results rounded to even.

return function(row, T)
  local at = T.at

  local function pair(v, otherwise)
    if v == nil then v = otherwise end
    return type(v) == "number" and { v, v } or { v[1], v[2] or v[1] }
  end

  local function flat(size, ...)
    local index, k = { ... }, 0
    for d = 1, #size do k = k * size[d] + index[d] end
    return k + 1
  end

  local function zeros(size)
    local count = 1
    for _, n in ipairs(size) do count = count * n end
    local t = { shape = size }
    for i = 1, count do t[i] = 0 end
    return t
  end

  local function round(v)
    local low = math.floor(v)
    local rest = v - low
    if rest ~= 0.5 then return rest < 0.5 and low or low + 1 end
    return low % 2 == 0 and low or low + 1
  end

  local function cut(v, low) return math.max(low, math.min(127, v)) end

  -- visit(n, o, oi, oj, channel of x, c, ki, kj, i, j) for every product of a convolution
  local function products(x, w, stride, padding, groups, visit)
    stride, padding, groups = pair(stride, 1), pair(padding, 0), groups or 1
    local oh = (x[3] + 2 * padding[1] - w[3]) // stride[1] + 1
    local ow = (x[4] + 2 * padding[2] - w[4]) // stride[2] + 1
    for n = 0, x[1] - 1 do for o = 0, w[1] - 1 do for oi = 0, oh - 1 do for oj = 0, ow - 1 do
      for c = 0, w[2] - 1 do for ki = 0, w[3] - 1 do for kj = 0, w[4] - 1 do
        local i, j = oi * stride[1] - padding[1] + ki, oj * stride[2] - padding[2] + kj
        if i >= 0 and i < x[3] and j >= 0 and j < x[4] then
          visit(n, o, oi, oj, o // (w[1] // groups) * w[2] + c, c, ki, kj, i, j)
        end
      end end end
    end end end end
    return { x[1], w[1], oh, ow }
  end

  local i8 = function(shape) shape.dtype = "i8" return T(shape) end
  local f32 = function(shape) shape.dtype = "f32" return T(shape) end

  row("conv2d_int8", {
    cases = {
      { i8 { 2, 3, 5, 6 }, i8 { 4, 3, 3, 3 }, f32 { 4 }, f32 { 4 } },
      { i8 { 1, 4, 6, 5 }, i8 { 6, 2, 3, 2 }, f32 { 6 }, f32 { 6 }, { 2, 1 }, { 1, 0 }, 2, 3, -7 },
      { i8 { 2, 4, 5, 5 }, i8 { 4, 1, 3, 3 }, f32 { 4 }, f32 { 4 }, 2, 1, 4, -5, 2, 2 },
      { i8 { 1, 5, 4, 4 }, i8 { 3, 5, 1, 1 }, f32 { 3 }, f32 { 3 }, 1, 0, 1, 9, 1, -3 },
      { i8 { 1, 1, 2, 300 }, i8 { 2, 1, 1, 3 }, f32 { 2 }, f32 { 2 }, 1, { 0, 1 } },
      { i8 { 0, 2, 3, 3 }, i8 { 2, 2, 3, 3 }, f32 { 2 }, f32 { 2 } },
    },
    dtypes = { "i8" },
    dtype = "i8",
    ref = function(x, w, bias, scale, stride, padding, groups, x_zero, y_zero, low)
      x_zero, y_zero, low = x_zero or 0, y_zero or 0, low or -128
      local p, s = pair(padding, 0), pair(stride, 1)
      local shape = { x.shape[1], w.shape[1], (x.shape[3] + 2 * p[1] - w.shape[3]) // s[1] + 1,
        (x.shape[4] + 2 * p[2] - w.shape[4]) // s[2] + 1 }
      local y = zeros(shape)
      products(x.shape, w.shape, stride, padding, groups, function(n, o, oi, oj, channel, c, ki, kj, i, j)
        local k = flat(shape, n, o, oi, oj)
        y[k] = y[k] + (x[flat(x.shape, n, channel, i, j)] - x_zero) * w[flat(w.shape, o, c, ki, kj)]
      end)
      for k = 1, #y do
        local o = (k - 1) // (shape[3] * shape[4]) % shape[2]
        y[k] = cut(round((y[k] + at(bias, { o })) * at(scale, { o })) + y_zero, low)
      end
      return y
    end,
    errors = {
      { i8 { 2, 3, 5, 6 }, i8 { 4, 2, 3, 3 }, f32 { 4 }, f32 { 4 }, match = "weight: expected [out, c / groups, kh, kw]" },
      { i8 { 2, 3, 5, 6 }, i8 { 4, 3, 3, 3 }, f32 { 3 }, f32 { 4 }, match = "bias: expected floats [4]" },
      { T { 2, 3, 5, 6, dtype = "i32" }, i8 { 4, 3, 3, 3 }, f32 { 4 }, f32 { 4 }, match = "x: expected i8 [n, c, h, w]" },
      { i8 { 2, 3, 5, 6 }, i8 { 4, 3, 3, 3 }, f32 { 4 }, f32 { 4 }, 1, 0, 1, 200, match = "x_zero: expected an integer" },
      { i8 { 1, 3, 2, 2 }, i8 { 4, 3, 3, 3 }, f32 { 4 }, f32 { 4 }, match = "does not fit" },
    },
  })

  local function inside(y, k, low) return y[k] > (low or -128) and y[k] < 127 end

  row("conv2d_int8_backward_input", {
    cases = {
      { f32 { 2, 4, 3, 4 }, i8 { 2, 4, 3, 4 }, i8 { 4, 3, 3, 3 }, f32 { 4 }, { 2, 3, 5, 6 } },
      { f32 { 1, 6, 3, 4 }, i8 { 1, 6, 3, 4 }, i8 { 6, 2, 3, 2 }, f32 { 6 }, { 1, 4, 6, 5 }, { 2, 1 }, { 1, 0 }, 2, 0 },
      { f32 { 2, 4, 3, 3 }, i8 { 2, 4, 3, 3 }, i8 { 4, 1, 3, 3 }, f32 { 4 }, { 2, 4, 5, 5 }, 2, 1, 4, -1 },
      { f32 { 1, 3, 4, 4 }, i8 { 1, 3, 4, 4 }, i8 { 3, 5, 1, 1 }, f32 { 3 }, { 1, 5, 4, 4 }, 1, 0, 1, 1 },
      { f32 { 0, 2, 1, 1 }, i8 { 0, 2, 1, 1 }, i8 { 2, 2, 3, 3 }, f32 { 2 }, { 0, 2, 3, 3 } },
    },
    dtypes = { "f32" },
    dtype = "f32",
    ref = function(g, y, w, scale, size, stride, padding, groups, low)
      local dx = zeros(size)
      products(size, w.shape, stride, padding, groups, function(n, o, oi, oj, channel, c, ki, kj, i, j)
        local k, to = flat(g.shape, n, o, oi, oj), flat(size, n, channel, i, j)
        if inside(y, k, low) then dx[to] = dx[to] + g[k] * at(scale, { o }) * w[flat(w.shape, o, c, ki, kj)] end
      end)
      return dx
    end,
    errors = {
      { f32 { 2, 4, 3, 3 }, i8 { 2, 4, 3, 4 }, i8 { 4, 3, 3, 3 }, f32 { 4 }, { 2, 3, 5, 6 }, match = "g: expected [2, 4, 3, 4]" },
      { f32 { 2, 4, 3, 4 }, i8 { 2, 4, 3, 4 }, i8 { 4, 3, 3, 3 }, f32 { 4 }, { 2, 3 }, match = "size: expected four sizes" },
    },
  })

  row("conv2d_int8_backward_weight", {
    cases = {
      { f32 { 2, 4, 3, 4 }, i8 { 2, 4, 3, 4 }, i8 { 2, 3, 5, 6 }, f32 { 4 }, { 4, 3, 3, 3 } },
      { f32 { 1, 6, 3, 4 }, i8 { 1, 6, 3, 4 }, i8 { 1, 4, 6, 5 }, f32 { 6 }, { 6, 2, 3, 2 }, { 2, 1 }, { 1, 0 }, 2, 3, 0 },
      { f32 { 2, 4, 3, 3 }, i8 { 2, 4, 3, 3 }, i8 { 2, 4, 5, 5 }, f32 { 4 }, { 4, 1, 3, 3 }, 2, 1, 4, -5, -1 },
      { f32 { 1, 3, 4, 4 }, i8 { 1, 3, 4, 4 }, i8 { 1, 2, 4, 4 }, f32 { 3 }, { 3, 2, 1, 1 }, 1, 0, 1, 9, 1 },
      { f32 { 0, 2, 1, 1 }, i8 { 0, 2, 1, 1 }, i8 { 0, 2, 3, 3 }, f32 { 2 }, { 2, 2, 3, 3 } },
    },
    dtypes = { "f32" },
    dtype = "f32",
    ref = function(g, y, x, scale, size, stride, padding, groups, x_zero, low)
      local dw, db = zeros(size), zeros { size[1] }
      products(x.shape, size, stride, padding, groups, function(n, o, oi, oj, channel, c, ki, kj, i, j)
        local k, to = flat(g.shape, n, o, oi, oj), flat(size, o, c, ki, kj)
        if inside(y, k, low) then
          dw[to] = dw[to] + g[k] * at(scale, { o }) * (x[flat(x.shape, n, channel, i, j)] - (x_zero or 0))
        end
      end)
      for k = 1, #g do
        local o = (k - 1) // (g.shape[3] * g.shape[4]) % g.shape[2]
        if inside(y, k, low) then db[o + 1] = db[o + 1] + g[k] * at(scale, { o }) end
      end
      return dw, db
    end,
    errors = {
      { f32 { 2, 4, 3, 4 }, i8 { 2, 4, 3, 4 }, i8 { 2, 3, 5, 6 }, f32 { 3 }, { 4, 3, 3, 3 }, match = "scale: expected floats [4]" },
      { f32 { 2, 4, 3, 4 }, i8 { 2, 4, 3, 3 }, i8 { 2, 3, 5, 6 }, f32 { 4 }, { 4, 3, 3, 3 }, match = "y: expected [2, 4, 3, 4]" },
    },
  })

  row("add_int8", {
    cases = {
      { i8 { 3, 4 }, i8 { 3, 4 }, 0.5, 0.25 }, { i8 { 2, 3, 2 }, i8 { 2, 3, 2 }, 1.5, -2, 1, 2, 3, 0 },
      { i8 {}, i8 {}, 1, 1 }, { i8 { 0, 2 }, i8 { 0, 2 }, 1, 1 },
    },
    dtypes = { "i8" },
    dtype = "i8",
    ref = function(a, b, a_scale, b_scale, a_zero, b_zero, y_zero, low)
      return T.from(a.shape, function(index)
        local v = (at(a, index) - (a_zero or 0)) * a_scale + (at(b, index) - (b_zero or 0)) * b_scale
        return cut(round(v) + (y_zero or 0), low or -128)
      end)
    end,
    errors = {
      { i8 { 3, 4 }, i8 { 3 }, 1, 1, match = "b: expected the shape of a" },
      { i8 { 3 }, T { 3, dtype = "i32" }, 1, 1, match = "b: expected i8" },
    },
  })

  row("inside_int8", {
    cases = { { f32 { 3, 4 }, i8 { 3, 4 } }, { f32 { 2, 3 }, i8 { 2, 3 }, 0.5, 0 }, { f32 { 0, 2 }, i8 { 0, 2 } } },
    dtypes = { "f32" },
    dtype = "f32",
    ref = function(g, y, scale, low)
      return T.from(g.shape, function(index)
        local v = at(y, index)
        return v > (low or -128) and v < 127 and at(g, index) * (scale or 1) or 0
      end)
    end,
    errors = { { f32 { 3 }, i8 { 4 }, match = "y: expected the shape of g" } },
  })
end
