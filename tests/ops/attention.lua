-- Rows of src/ops/attention.c.

return function(row, T)
  local from, at = T.from, T.at
  local inf = T.inf

  local function is_options(t) return type(t) == "table" and not t.shape end

  -- What stands before row i of head h in batch b.
  local function before(x, b, h, i) return ((b * x.shape[2] + h) * x.shape[3] + i) * x.shape[4] end

  -- The weights of query i of head h in batch b over the keys, all 0 when it sees none; the log-sum-exp; and the
  -- derivatives of capped scores.
  local function weights(q, k, mask, opts, b, h, i)
    local t, s, d = q.shape[3], k.shape[3], q.shape[4]
    local scale = opts.scale and opts.scale ~= 0 and opts.scale or 1 / math.sqrt(d)
    local window, group = opts.window or -1, q.shape[2] // k.shape[2]
    local w, top, sum, cu, bends = {}, -inf, 0.0, opts.cu_seqlens, {}
    local cap = opts.softcap and opts.softcap > 0 and opts.softcap
    local function sequence(j) -- its number, and where it begins
      local n = 0
      while n < #cu and cu[n + 1] <= j do n = n + 1 end
      return n, cu[n]
    end
    local here = i + (opts.corner == "upper_left" and 0 or s - t)
    local own = cu and sequence(here)
    local query = before(q, b, h, i)
    for j = 0, s - 1 do
      local ahead, x, first, key = j - here, 0.0, j, before(k, b, h // group, j)
      for e = 1, d do x = x + q[query + e] * k[key + e] end
      x = x * scale
      bends[j] = 1.0
      if cap then
        local bent = T.tanh(x / cap)
        x, bends[j] = cap * bent, 1 - bent * bent
      end
      if cu then
        local of, begin = sequence(j)
        if of ~= own or of == 0 or of == #cu then x = -inf else first = j - begin end
      end
      if opts.causal and ahead > 0 then x = -inf end
      if window >= 0 and math.abs(ahead) > window and first >= (opts.sinks or 0) then x = -inf end
      if mask then
        local m = at(mask, { b, h, i, j })
        if mask.dtype ~= "bool" then x = x + m
        elseif m == 0 then x = -inf end
      end
      w[j] = x
      if x > top then top = x end
    end
    if top == -inf then
      for j = 0, s - 1 do w[j] = 0.0 end
      return w, -inf, bends
    end
    for j = 0, s - 1 do
      w[j] = math.exp(w[j] - top)
      sum = sum + w[j]
    end
    for j = 0, s - 1 do w[j] = w[j] / sum end
    return w, top + math.log(sum), bends
  end

  local function attention(q, k, v, mask, opts)
    if is_options(mask) then mask, opts = nil, mask end
    opts = opts or {}
    local group, known = k.shape[2] > 0 and q.shape[2] // k.shape[2] or 1, {}
    return from({ q.shape[1], q.shape[2], q.shape[3], v.shape[4] }, function(p)
      local key = (p[1] * q.shape[2] + p[2]) * q.shape[3] + p[3]
      known[key] = known[key] or weights(q, k, mask, opts, p[1], p[2], p[3])
      local y, w, first, width = 0.0, known[key], before(v, p[1], p[2] // group, 0) + p[4] + 1, v.shape[4]
      for j = 0, k.shape[3] - 1 do y = y + w[j] * v[first + j * width] end
      return y
    end)
  end

  local half_seen = { 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1 }
  local minus = { 0, -inf, 0.5, -1, 0, -inf, -inf, -inf, -inf, -inf, 0.25, 1, 0, 0, -2 }

  local half = { "f16", "bf16" }

  local function received(q, k, mask, opts)
    if is_options(mask) then mask, opts = nil, mask end
    opts = opts or {}
    local group, known = k.shape[2] > 0 and q.shape[2] // k.shape[2] or 1, {}
    return from({ k.shape[1], k.shape[2], k.shape[3] }, function(p)
      local sum = 0.0
      for h = p[2] * group, p[2] * group + group - 1 do
        for i = 0, q.shape[3] - 1 do
          local key = (p[1] * q.shape[2] + h) * q.shape[3] + i
          known[key] = known[key] or weights(q, k, mask, opts, p[1], h, i)
          sum = sum + known[key][p[3]]
        end
      end
      return sum
    end)
  end

  row("attention_received", {
    cases = {
      { T { 2, 2, 4, 3 }, T { 2, 2, 5, 3 } }, { T { 1, 4, 5, 4 }, T { 1, 2, 5, 4 }, opts = { causal = true } },
      { T { 1, 4, 1, 4 }, T { 1, 1, 6, 4 }, opts = { causal = true, scale = 0.3 } },
      { T { 2, 2, 6, 2 }, T { 2, 1, 4, 2 }, opts = { causal = true } }, -- the first queries see no key
      { T { 2, 2, 3, 4 }, T { 2, 1, 5, 4 }, T { 2, 1, 1, 5, bool = true }, opts = { causal = true } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 3, 5, values = half_seen, bool = true } },
      { T { 1, 1, 0, 3 }, T { 1, 1, 4, 3 }, grad = false }, { T { 1, 2, 3, 4 }, T { 1, 2, 0, 4 }, grad = false },
      { T { 0, 2, 3, 4 }, T { 0, 2, 3, 4 }, grad = false },
    },
    ref = received,
    dtype = function(x) return (x == "f16" or x == "bf16") and "f32" or x end,
    tol = { f64 = 1e-9, f32 = 2e-5, f16 = 2e-2, bf16 = 1e-1 },
    errors = {
      { T { 2, 3, 4 }, T { 2, 3, 4 }, match = { "q: expected [b, h, t, d]", "[2, 3, 4]" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 5 }, match = { "k: expected the batch size and the width of q" } },
      { T { 1, 3, 3, 4 }, T { 1, 2, 3, 4 }, match = "a multiple of the 2 heads" },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 3, 5 }, match = "mask: expected bool" },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 5, 3, bool = true }, match = "mask: expected" },
    },
  })

  row("scaled_dot_product_attention", {
    cases = {
      { T { 2, 2, 4, 3 }, T { 2, 2, 5, 3 }, T { 2, 2, 5, 2 } },
      { T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, opts = { causal = true } },
      { T { 1, 4, 3, 4 }, T { 1, 2, 6, 4 }, T { 1, 2, 6, 3 }, opts = { causal = true, scale = 0.3 } },
      { T { 1, 1, 6, 2 }, T { 1, 1, 4, 2 }, T { 1, 1, 4, 2 }, opts = { causal = true } },
      { T { 1, 2, 7, 3 }, T { 1, 2, 7, 3 }, T { 1, 2, 7, 3 }, opts = { causal = true, window = 2 } },
      { T { 1, 2, 7, 3 }, T { 1, 1, 5, 3 }, T { 1, 1, 5, 3 }, opts = { window = 1 } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, T { 3, 5, values = half_seen, bool = true } },
      { T { 2, 2, 3, 4 }, T { 2, 1, 5, 4 }, T { 2, 1, 5, 4 }, T { 2, 1, 1, 5, bool = true }, opts = { causal = true } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 3, 5 } },
      { T { 2, 2, 3, 2 }, T { 2, 2, 4, 2 }, T { 2, 2, 4, 2 }, T { 3, 4 }, opts = { causal = true } },
      { T { 2, 2, 3, 2 }, T { 2, 2, 4, 2 }, T { 2, 2, 4, 2 }, T { 2, 1, 1, 4 } },
      { T { 2, 2, 3, 2 }, T { 2, 2, 4, 2 }, T { 2, 2, 4, 2 }, T { 2, 3, 1 } },
      { T { 1, 1, 3, 2 }, T { 1, 1, 5, 2 }, T { 1, 1, 5, 2 }, T { 3, 5, values = minus }, grad = false },
      { T { 1, 2, 70, 5 }, T { 1, 1, 90, 5 }, T { 1, 1, 90, 18 }, opts = { causal = true }, grad = false },
      { T { 1, 2, 2, 150 }, T { 1, 1, 3, 150 }, T { 1, 1, 3, 140 }, grad = false },
      { T { 1, 2, 1, 4 }, T { 1, 1, 600, 4 }, T { 1, 1, 600, 3 }, grad = false },
      { T { 1, 1, 2, 3, range = { -40, 40 } }, T { 1, 1, 30, 3 }, T { 1, 1, 30, 3 }, grad = false },
      { T { 1, 2, 9, 3 }, T { 1, 1, 11, 3 }, T { 1, 1, 11, 3 }, opts = { causal = true, window = 2, sinks = 3 } },
      { T { 1, 2, 6, 3 }, T { 1, 2, 4, 3 }, T { 1, 2, 4, 3 }, opts = { window = 0, sinks = 2 } },
      { T { 2, 2, 9, 3 }, T { 2, 1, 9, 3 }, T { 2, 1, 9, 3 },
        opts = { cu_seqlens = T { 4, values = { 0, 2, 2, 8 }, dtype = "i32" } } },
      { T { 1, 1, 9, 3 }, T { 1, 1, 9, 3 }, T { 1, 1, 9, 3 }, T { 9, 9 },
        opts = { causal = true, window = 1, sinks = 2, cu_seqlens = T { 3, values = { 1, 4, 9 }, dtype = "i64" } } },
      { T { 1, 1, 150, 3 }, T { 1, 1, 210, 3 }, T { 1, 1, 210, 3 }, opts = { causal = true, window = 5, sinks = 3 },
        grad = false },
      { T { 1, 1, 150, 3 }, T { 1, 1, 210, 3 }, T { 1, 1, 210, 3 }, grad = false,
        opts = { causal = true, window = 20, sinks = 4, cu_seqlens = T { 3, values = { 0, 90, 210 }, dtype = "i64" } } },
      -- Tiles of tensor cores: rows of up to 64, 128 and 256, the last ones not full; tiles that nobody sees.
      { T { 1, 2, 75, 8 }, T { 1, 1, 70, 8 }, T { 1, 1, 70, 8 }, dtypes = half, grad = false },
      { T { 1, 1, 150, 8 }, T { 1, 1, 200, 8 }, T { 1, 1, 200, 4 }, opts = { causal = true, window = 20 },
        dtypes = half, grad = false },
      { T { 1, 1, 150, 8 }, T { 1, 1, 70, 8 }, T { 1, 1, 70, 8 }, T { 70, bool = true }, opts = { causal = true },
        dtypes = half, grad = false },
      { T { 1, 2, 20, 72 }, T { 1, 2, 40, 72 }, T { 1, 2, 40, 65 }, opts = { scale = -0.1 }, dtypes = half,
        grad = false },
      { T { 1, 1, 17, 136 }, T { 1, 1, 70, 136 }, T { 1, 1, 70, 144 }, T { 17, 70 }, dtypes = half, grad = false },
      { T { 1, 3, 1, 8 }, T { 1, 1, 530, 8 }, T { 1, 1, 530, 8 }, dtypes = half, grad = false },
      { T { 1, 1, 2, 264 }, T { 1, 1, 3, 264 }, T { 1, 1, 3, 8 }, dtypes = half, grad = false },
      -- What libraries for GPUs take.
      { T { 1, 2, 64, 8 }, T { 1, 1, 66, 8 }, T { 1, 1, 66, 16 }, opts = { scale = 0.4 }, grad = false },
      { T { 1, 2, 65, 8 }, T { 1, 2, 65, 8 }, T { 1, 2, 65, 8 }, opts = { causal = true }, grad = false },
      { T { 1, 2, 0, 3 }, T { 1, 2, 4, 3 }, T { 1, 2, 4, 3 } }, { T { 1, 2, 3, 4 }, T { 1, 2, 0, 4 },
        T { 1, 2, 0, 2 } },
      { T { 0, 2, 3, 4 }, T { 0, 2, 3, 4 }, T { 0, 2, 3, 4 } }, { T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 },
        T { 1, 2, 3, 0 } },
      -- The first query at the first key: fewer and more queries than keys, with all that positions decide.
      { T { 1, 4, 3, 4 }, T { 1, 2, 6, 4 }, T { 1, 2, 6, 3 }, opts = { causal = true, corner = "upper_left" } },
      { T { 1, 1, 6, 2 }, T { 1, 1, 4, 2 }, T { 1, 1, 4, 2 }, T { 6, 4 },
        opts = { causal = true, corner = "upper_left" } },
      { T { 2, 2, 3, 4 }, T { 2, 1, 7, 4 }, T { 2, 1, 7, 4 }, T { 2, 1, 1, 7, bool = true },
        opts = { causal = true, window = 1, sinks = 1, corner = "upper_left" } },
      { T { 1, 1, 5, 3 }, T { 1, 1, 9, 3 }, T { 1, 1, 9, 3 },
        opts = { window = 2, corner = "upper_left", cu_seqlens = T { 3, values = { 0, 4, 9 }, dtype = "i64" } } },
      { T { 1, 2, 70, 5 }, T { 1, 1, 90, 5 }, T { 1, 1, 90, 18 }, opts = { causal = true, corner = "upper_left" },
        grad = false },
      { T { 1, 2, 75, 8 }, T { 1, 1, 150, 8 }, T { 1, 1, 150, 8 }, opts = { causal = true, corner = "upper_left" },
        dtypes = half, grad = false },
      -- Capped scores: small and large ones, before masks of both kinds.
      { T { 1, 2, 3, 4 }, T { 1, 1, 5, 4 }, T { 1, 1, 5, 3 }, opts = { softcap = 0.7 } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 3, 5 }, opts = { causal = true, softcap = 0.5,
        scale = 1.5 } },
      { T { 2, 2, 7, 3 }, T { 2, 1, 7, 3 }, T { 2, 1, 7, 3 }, T { 2, 1, 1, 7, bool = true },
        opts = { causal = true, window = 2, sinks = 1, softcap = 1.2 } },
      { T { 2, 2, 3, 2 }, T { 2, 2, 4, 2 }, T { 2, 2, 4, 2 }, T { 2, 1, 1, 4 }, opts = { softcap = 0.4 } },
      { T { 1, 1, 2, 3, range = { -40, 40 } }, T { 1, 1, 30, 3 }, T { 1, 1, 30, 3 }, opts = { softcap = 5 },
        grad = false },
      { T { 1, 2, 1, 4 }, T { 1, 1, 600, 4 }, T { 1, 1, 600, 3 }, opts = { softcap = 0.8 }, grad = false },
      { T { 1, 2, 75, 8 }, T { 1, 1, 150, 8 }, T { 1, 1, 150, 8 }, opts = { causal = true, softcap = 0.6 },
        grad = false },
      { T { 1, 2, 66, 8 }, T { 1, 2, 66, 8 }, T { 1, 2, 66, 8 }, opts = { softcap = 2 }, dtypes = half,
        grad = false },
      { T { 1, 2, 20, 72 }, T { 1, 2, 40, 72 }, T { 1, 2, 40, 65 }, T { 40, bool = true },
        opts = { scale = -0.1, softcap = 0.5 }, dtypes = half, grad = false },
      { T { 1, 1, 17, 136 }, T { 1, 1, 70, 136 }, T { 1, 1, 70, 144 }, T { 17, 70 },
        opts = { causal = true, softcap = 1 }, dtypes = half, grad = false },
      { T { 1, 3, 1, 8 }, T { 1, 1, 530, 8 }, T { 1, 1, 530, 8 }, opts = { softcap = 0.7 }, dtypes = half,
        grad = false },
    },
    ref = attention,
    errors = {
      { T { 2, 3, 4 }, T { 2, 3, 4 }, T { 2, 3, 4 }, match = { "q: expected [b, h, t, d]", "[2, 3, 4]" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 5 }, T { 1, 2, 3, 4 },
        match = { "k: expected", "[1, 2, 3, 4]", "[1, 2, 3, 5]" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 },
        match = { "v: expected", "[1, 2, 3, 4]", "[1, 2, 5, 4]" } },
      { T { 2, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 },
        match = { "k: expected the batch size", "[2, 2, 3, 4]" } },
      { T { 1, 3, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, match = { "a multiple of the 2 heads", "[1, 3, 3, 4]" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, T { 5, 3, bool = true },
        match = { "mask: expected", "[1, 2, 3, 5]", "[5, 3]" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, T { 3, 5, int = { 0, 2 } },
        match = "mask: expected a bool or float" },
      { T { 1, 2, 3, 4, dtype = "f64" }, T { 1, 2, 3, 4, dtype = "f32" }, T { 1, 2, 3, 4, dtype = "f64" },
        match = { "one dtype", "f64", "f32" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, opts = { corner = "top" },
        match = { "corner: expected one of", "lower_right", "upper_left", "top" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, opts = { sinks = -1 }, match = "sinks: expected 0 or more" },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, opts = { softcap = -2 },
        match = "softcap: expected a positive number or 0 for none, got -2" },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, opts = { softcap = math.huge },
        match = "softcap: expected a positive number or 0 for none, got inf" },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, opts = { softcap = 0 / 0 }, match = "softcap: expected" },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, opts = { cu_seqlens = T { 2, 1, int = { 0, 2 } } },
        match = { "cu_seqlens: expected [n + 1]", "[2, 1]" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, opts = { cu_seqlens = T { 0, int = { 0, 2 } } },
        match = "cu_seqlens: expected at least one position" },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 }, opts = { cu_seqlens = T { 2, dtype = "f32" } },
        match = "cu_seqlens: expected" },
      { T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 4 },
        opts = { cu_seqlens = T { 2, values = { 0, 6 }, dtype = "i64" } }, match = "index 6 is out of range for size 6" },
    },
    big = function(ty)
      local q, k = ty.randn(2, 6, 300, 40):requires_grad_(), ty.randn(2, 2, 400, 40):requires_grad_()
      local v, mask = ty.randn(2, 2, 400, 24):requires_grad_(), ty.randn(6, 300, 400):requires_grad_()
      local y = ty.scaled_dot_product_attention(q, k, v, mask, { causal = true })
      local decoded = ty.scaled_dot_product_attention(q:detach()["0:1, :, 0:1"], ty.randn(1, 2, 3000, 40), ty.randn(1,
        2, 3000, 40))
      local weight, leaves = ty.randn(2, 6, 300, 24), { q, k, v, mask }
      local capped = ty.scaled_dot_product_attention(q, k, v, mask, { causal = true, softcap = 2 })
      local gradients = ty.grad((y * weight):sum(), leaves)
      for _, g in ipairs(ty.grad((capped * weight):sum(), leaves)) do gradients[#gradients + 1] = g end
      return y:detach(), decoded, capped:detach(), table.unpack(gradients)
    end,
  })

  local function wide(dtype) return (dtype == "f16" or dtype == "bf16") and "f32" or dtype end

  local function zeros(shape) return from(shape, function() return 0.0 end) end

  local function add(x, p, value)
    local i = 0
    for d, size in ipairs(x.shape) do i = i * size + (size == 1 and 0 or p[d]) end
    x[i + 1] = x[i + 1] + value
  end

  -- y and lse are taken as they are given: what they say about the weights need not be true.
  local function backward(g, q, k, v, y, lse, mask, opts)
    if is_options(mask) then mask, opts = nil, mask end
    opts = opts or {}
    local group, d, dv = q.shape[2] // k.shape[2], q.shape[4], v.shape[4]
    local scale = opts.scale and opts.scale ~= 0 and opts.scale or 1 / math.sqrt(d)
    local dq, dk, dvs, dmask = zeros(q.shape), zeros(k.shape), zeros(v.shape), { shape = { 0, 1, 1, 1 } }
    if opts.mask_grad and mask then
      local shape = { 1, 1, 1, 1 }
      for i = 1, #mask.shape do shape[4 - #mask.shape + i] = mask.shape[i] end
      dmask = zeros(shape)
    end
    from({ q.shape[1], q.shape[2], q.shape[3] }, function(p)
      local b, h, i = p[1], p[2], p[3]
      local w, own, bends = weights(q, k, mask, opts, b, h, i)
      local delta, shift = 0.0, math.exp(own - at(lse, p))
      local of_y, of_q = before(y, b, h, i), before(q, b, h, i)
      for e = 1, dv do delta = delta + g[of_y + e] * y[of_y + e] end
      for j = 0, k.shape[3] - 1 do
        local dp, weight = 0.0, w[j] * shift
        local of_k, of_v = before(k, b, h // group, j), before(v, b, h // group, j)
        for e = 1, dv do
          dp = dp + g[of_y + e] * v[of_v + e]
          dvs[of_v + e] = dvs[of_v + e] + weight * g[of_y + e]
        end
        local ds = weight * (dp - delta)
        for e = 1, d do
          dq[of_q + e] = dq[of_q + e] + ds * bends[j] * scale * k[of_k + e]
          dk[of_k + e] = dk[of_k + e] + ds * bends[j] * scale * q[of_q + e]
        end
        if #dmask > 0 then add(dmask, { b, h, i, j }, ds) end
      end
      return 0
    end)
    return dq, dk, dvs, dmask
  end

  local small, moderate = { -0.1, 0.1 }, { -0.5, 0.5 }

  row("attention_backward", {
    cases = {
      { T { 1, 2, 3, 2 }, T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 2 }, T { 1, 2, 3, 2 }, T { 1, 2, 3 } },
      { T { 1, 2, 3, 2 }, T { 1, 2, 3, 4 }, T { 1, 1, 5, 4 }, T { 1, 1, 5, 2 }, T { 1, 2, 3, 2 }, T { 1, 2, 3 },
        T { 1, 2, 3, 5 }, opts = { causal = true, mask_grad = true } },
      { T { 2, 2, 3, 2 }, T { 2, 2, 3, 4 }, T { 2, 1, 5, 4 }, T { 2, 1, 5, 2 }, T { 2, 2, 3, 2 }, T { 2, 2, 3 },
        T { 2, 1, 5 }, opts = { window = 2, mask_grad = true } },
      { T { 2, 2, 3, 2 }, T { 2, 2, 3, 4 }, T { 2, 1, 5, 4 }, T { 2, 1, 5, 2 }, T { 2, 2, 3, 2 }, T { 2, 2, 3 },
        T { 3, 1 }, opts = { scale = 0.7, mask_grad = true } },
      { T { 1, 2, 3, 2 }, T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 2 }, T { 1, 2, 3, 2 }, T { 1, 2, 3 },
        T { 3, 5, bool = true } },
      { T { 1, 2, 35, 3 }, T { 1, 2, 35, 4 }, T { 1, 1, 70, 4 }, T { 1, 1, 70, 3 }, T { 1, 2, 35, 3 }, T { 1, 2, 35 },
        T { 35, 70 }, opts = { causal = true, mask_grad = true } },
      { T { 1, 1, 2, 140 }, T { 1, 1, 2, 150, range = { -0.1, 0.1 } }, T { 1, 1, 3, 150, range = { -1, 1 } },
        T { 1, 1, 3, 140 }, T { 1, 1, 2, 140 }, T { 1, 1, 2 } },
      { T { 1, 1, 150, 3 }, T { 1, 1, 150, 3 }, T { 1, 1, 180, 3 }, T { 1, 1, 180, 3 }, T { 1, 1, 150, 3 },
        T { 1, 1, 150, range = { 4, 6 } }, T { 180 },
        opts = { causal = true, window = 5, sinks = 3, mask_grad = true,
                 cu_seqlens = T { 3, values = { 0, 150, 180 }, dtype = "i64" } } },
      -- Tiles of tensor cores, as above. The weights stay small, so that their products are halves.
      { T { 1, 2, 75, 8 }, T { 1, 2, 75, 8 }, T { 1, 1, 70, 8 }, T { 1, 1, 70, 8 }, T { 1, 2, 75, 8 },
        T { 1, 2, 75, range = { 4, 6 } }, dtypes = half },
      { T { 1, 1, 150, 4 }, T { 1, 1, 150, 8, range = small }, T { 1, 1, 180, 8 }, T { 1, 1, 180, 4 },
        T { 1, 1, 150, 4 }, T { 1, 1, 150, range = { 4, 6 } }, opts = { causal = true, window = 20 }, dtypes = half },
      { T { 1, 1, 75, 72 }, T { 1, 1, 75, 8, range = small }, T { 1, 1, 70, 8 }, T { 1, 1, 70, 72 }, T { 1, 1, 75, 72 },
        T { 1, 1, 75, range = { 4, 6 } }, T { 70, bool = true }, opts = { causal = true }, dtypes = half },
      { T { 1, 1, 17, 130 }, T { 1, 1, 17, 136, range = small }, T { 1, 1, 70, 136, range = { -1, 1 } },
        T { 1, 1, 70, 130 }, T { 1, 1, 17, 130 }, T { 1, 1, 17, range = { 4, 6 } }, T { 17, 70 },
        opts = { mask_grad = true }, dtypes = half },
      -- What libraries for GPUs take.
      { T { 1, 2, 64, 8 }, T { 1, 2, 64, 16, range = moderate }, T { 1, 1, 66, 16, range = moderate }, T { 1, 1, 66, 8 },
        T { 1, 2, 64, 8 }, T { 1, 2, 64 }, opts = { scale = 0.2 } },
      { T { 1, 2, 65, 8 }, T { 1, 2, 65, 8, range = moderate }, T { 1, 2, 65, 8, range = moderate }, T { 1, 2, 65, 8 },
        T { 1, 2, 65, 8 }, T { 1, 2, 65 }, opts = { causal = true } },
      -- The first query at the first key.
      { T { 2, 2, 3, 2 }, T { 2, 2, 3, 4 }, T { 2, 1, 5, 4 }, T { 2, 1, 5, 2 }, T { 2, 2, 3, 2 }, T { 2, 2, 3 },
        T { 2, 1, 5 }, opts = { causal = true, window = 1, mask_grad = true, corner = "upper_left" } },
      { T { 1, 1, 75, 8 }, T { 1, 1, 75, 8, range = small }, T { 1, 1, 150, 8 }, T { 1, 1, 150, 8 }, T { 1, 1, 75, 8 },
        T { 1, 1, 75, range = { 4, 6 } }, opts = { causal = true, corner = "upper_left" }, dtypes = half },
      -- Capped scores: dq and dk take the cap's derivative, the mask's gradient does not.
      { T { 1, 2, 3, 2 }, T { 1, 2, 3, 4 }, T { 1, 1, 5, 4 }, T { 1, 1, 5, 2 }, T { 1, 2, 3, 2 }, T { 1, 2, 3 },
        T { 1, 2, 3, 5 }, opts = { causal = true, mask_grad = true, softcap = 0.6 } },
      { T { 2, 2, 3, 2 }, T { 2, 2, 3, 4 }, T { 2, 1, 5, 4 }, T { 2, 1, 5, 2 }, T { 2, 2, 3, 2 }, T { 2, 2, 3 },
        T { 3, 1 }, opts = { scale = 0.7, mask_grad = true, softcap = 1.1 } },
      { T { 1, 1, 75, 8 }, T { 1, 1, 75, 8, range = moderate }, T { 1, 1, 150, 8 }, T { 1, 1, 150, 8 },
        T { 1, 1, 75, 8 }, T { 1, 1, 75, range = { 4, 6 } }, opts = { causal = true, softcap = 0.3 } },
    },
    ref = backward,
    dtype = function(dtype, i) return i == 4 and wide(dtype) or dtype end,
    errors = {
      { T { 1, 2, 3, 2 }, T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 2 }, T { 1, 2, 3, 2 }, T { 1, 2, 4 },
        match = { "lse: expected a float tensor [1, 2, 3]", "[1, 2, 4]" } },
      { T { 1, 2, 3, 3 }, T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 5, 2 }, T { 1, 2, 3, 2 }, T { 1, 2, 3 },
        match = { "g: expected a float tensor [1, 2, 3, 2]", "[1, 2, 3, 3]" } },
      { T { 1, 2, 3, 2 }, T { 1, 2, 3, 4 }, T { 1, 2, 5, 3 }, T { 1, 2, 5, 2 }, T { 1, 2, 3, 2 }, T { 1, 2, 3 },
        match = { "k: expected" } },
    },
  })
end
