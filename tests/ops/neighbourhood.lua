-- Rows of src/ops/neighbourhood.c.

return function(row, T)
  local from = T.from

  local function zeros(shape) return from(shape, function() return 0.0 end) end

  -- The first place that place i of n sees through a window.
  local function begin(i, n, window) return math.max(0, math.min(i - window // 2, n - window)) end

  -- f(query, key) for every pair of places, from 0 in the order of memory, of which the query sees the key.
  local function each_pair(shape, window, f)
    if type(window) == "number" then window = { window, window } end
    if #window == 1 then window = { window[1], window[1] } end
    local rows, columns = shape[3], shape[4]
    local high, broad = math.min(window[1], rows), math.min(window[2], columns)
    for head = 0, shape[1] * shape[2] - 1 do
      for y = 0, rows - 1 do
        for x = 0, columns - 1 do
          local top, left, first = begin(y, rows, high), begin(x, columns, broad), head * rows * columns
          for i = top, top + high - 1 do
            for j = left, left + broad - 1 do f(first + y * columns + x, first + i * columns + j) end
          end
        end
      end
    end
  end

  local function dot(a, i, b, j, n)
    local sum = 0.0
    for c = 1, n do sum = sum + a[i * n + c] * b[j * n + c] end
    return sum
  end

  local function scale_of(q, opts)
    return opts and opts.scale and opts.scale ~= 0 and opts.scale or 1 / math.sqrt(math.max(1, q.shape[5]))
  end

  -- The result; the log-sum-exp is not the user's.
  local function attention(q, k, v, window, opts)
    local d, dv, scale = q.shape[5], v.shape[5], scale_of(q, opts)
    local y, lse = zeros(v.shape), zeros { q.shape[1], q.shape[2], q.shape[3], q.shape[4] }
    local most = {}
    each_pair(q.shape, window, function(i, j)
      most[i] = math.max(most[i] or -math.huge, scale * dot(q, i, k, j, d))
    end)
    each_pair(q.shape, window, function(i, j)
      lse[i + 1] = lse[i + 1] + math.exp(scale * dot(q, i, k, j, d) - most[i])
    end)
    for i = 1, #lse do lse[i] = math.log(lse[i]) + most[i - 1] end
    each_pair(q.shape, window, function(i, j)
      local w = math.exp(scale * dot(q, i, k, j, d) - lse[i + 1])
      for c = 1, dv do y[i * dv + c] = y[i * dv + c] + w * v[j * dv + c] end
    end)
    return y
  end

  -- y and lse are taken as they are given: what they say about the weights need not be true.
  local function backward(g, q, k, v, y, lse, window, opts)
    local d, dv, scale = q.shape[5], v.shape[5], scale_of(q, opts)
    local dq, dk, dvs = zeros(q.shape), zeros(k.shape), zeros(v.shape)
    each_pair(q.shape, window, function(i, j)
      local w = math.exp(scale * dot(q, i, k, j, d) - lse[i + 1])
      local ds = w * scale * (dot(g, i, v, j, dv) - dot(g, i, y, i, dv))
      for c = 1, d do
        dq[i * d + c] = dq[i * d + c] + ds * k[j * d + c]
        dk[j * d + c] = dk[j * d + c] + ds * q[i * d + c]
      end
      for c = 1, dv do dvs[j * dv + c] = dvs[j * dv + c] + w * g[i * dv + c] end
    end)
    return dq, dk, dvs
  end

  local function qkv(b, h, rows, columns, d, dv)
    return T { b, h, rows, columns, d }, T { b, h, rows, columns, d }, T { b, h, rows, columns, dv or d }
  end
  local function case(shape, window, options)
    local q, k, v = qkv(table.unpack(shape))
    local result = { q, k, v, window }
    for key, value in pairs(options or {}) do result[key] = value end
    return result
  end

  row("neighbourhood_attention", {
    cases = {
      case({ 1, 1, 4, 5, 3 }, 3), case({ 2, 1, 3, 4, 2, 3 }, { 2, 3 }), case({ 1, 2, 2, 3, 2 }, 7),
      case({ 1, 1, 5, 2, 3, 1 }, { 1, 2 }, { opts = { scale = 0.7 } }), case({ 1, 1, 1, 1, 2 }, { 1 }),
      case({ 1, 1, 3, 3, 2 }, { 4, 2 }), case({ 0, 2, 3, 3, 2 }, 3), case({ 1, 2, 0, 3, 2 }, 3),
      case({ 1, 2, 3, 0, 2 }, 3), case({ 1, 1, 3, 3, 2, 0 }, 3),
      case({ 2, 2, 9, 11, 17, 19 }, 5, { grad = false }), case({ 1, 1, 3, 40, 4, 140 }, { 2, 37 }, { grad = false }),
      case({ 1, 1, 12, 12, 5 }, { 7, 12 }, { grad = false }),
    },
    ref = attention,
    tol = { f64 = 1e-9, f32 = 2e-5, f16 = 2e-2, bf16 = 1e-1 },
    broadcast = false,
    errors = {
      { T { 2, 3, 4, 4 }, T { 2, 3, 4, 4 }, T { 2, 3, 4, 4 }, 3,
        match = { "q: expected [b, h, rows, columns, d]", "[2, 3, 4, 4]" } },
      { T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 3 }, T { 1, 1, 4, 4, 2 }, 3,
        match = { "k: expected the shape of q", "[1, 1, 4, 4, 3]" } },
      { T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 5, 2 }, 3,
        match = { "v: expected the batch size, heads and grid of k", "[1, 1, 4, 5, 2]" } },
      { T { 1, 1, 4, 4, 2, dtype = "f64" }, T { 1, 1, 4, 4, 2, dtype = "f32" }, T { 1, 1, 4, 4, 2, dtype = "f64" }, 3,
        match = { "one dtype", "f64", "f32" } },
      { T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 2 }, 0, match = "window" },
      { T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 2 }, { 1, 2, 3 }, match = "window" },
    },
    big = function(ty)
      local q, k = ty.randn(3, 4, 23, 21, 24):requires_grad_(), ty.randn(3, 4, 23, 21, 24):requires_grad_()
      local v = ty.randn(3, 4, 23, 21, 40):requires_grad_()
      local y = ty.neighbourhood_attention(q, k, v, 7)
      return y:detach(), table.unpack(ty.grad((y * ty.randn(3, 4, 23, 21, 40)):sum(), { q, k, v }))
    end,
  })

  local function back(b, h, rows, columns, d, dv, window, options)
    local q, k, v = qkv(b, h, rows, columns, d, dv)
    local result = { T { b, h, rows, columns, dv }, q, k, v, T { b, h, rows, columns, dv },
      T { b, h, rows, columns, range = { 1, 2 } }, window }
    for key, value in pairs(options or {}) do result[key] = value end
    return result
  end

  row("neighbourhood_attention_backward", {
    cases = {
      back(1, 1, 4, 5, 3, 3, 3), back(2, 1, 3, 4, 2, 3, { 2, 3 }), back(1, 2, 2, 3, 2, 2, 7),
      back(1, 1, 5, 2, 3, 1, { 1, 2 }, { opts = { scale = 0.7 } }), back(1, 1, 3, 3, 2, 2, { 4, 2 }),
      back(2, 2, 9, 11, 5, 6, 5), back(1, 1, 3, 40, 4, 6, { 2, 37 }), back(0, 2, 3, 3, 2, 2, 3),
      back(1, 1, 8, 7, 3, 130, 4),
    },
    ref = backward,
    tol = { f64 = 1e-9, f32 = 5e-5, f16 = 6e-2, bf16 = 3e-1 },
    broadcast = false,
    errors = {
      { T { 1, 1, 4, 4, 3 }, T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 2 },
        T { 1, 1, 4, 4 }, 3, match = { "g: expected a float tensor [1, 1, 4, 4, 2]", "[1, 1, 4, 4, 3]" } },
      { T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 2 }, T { 1, 1, 4, 4, 2 },
        T { 1, 1, 4, 5 }, 3, match = { "lse: expected a float tensor [1, 1, 4, 4]", "[1, 1, 4, 5]" } },
    },
  })
end
