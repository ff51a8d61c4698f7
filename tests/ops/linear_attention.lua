-- Rows of src/ops/linear_attention.c.

return function(row, T)
  local from, at = T.from, T.at

  local function is_options(t) return type(t) == "table" and not t.shape end
  local function wide(dtype) return (dtype == "f16" or dtype == "bf16") and "f32" or dtype end
  local function zeros(shape) return from(shape, function() return 0.0 end) end

  local function put(x, p, value)
    local i = 0
    for d, size in ipairs(x.shape) do i = i * size + p[d] end
    x[i + 1] = value
  end
  local function add(x, p, value) put(x, p, at(x, p) + value) end

  -- Calls fn(row, head, sequence, begin, stop) for every head of every sequence.
  local function each(q, opts, fn)
    local cu = opts.cu_seqlens
    for s = 0, cu and #cu - 2 or q.shape[1] - 1 do
      for h = 0, q.shape[2] - 1 do
        if cu then fn(0, h, s, cu[s + 1], cu[s + 2]) else fn(s, h, s, 0, q.shape[3]) end
      end
    end
  end

  local function sizes(q, v, opts)
    local cu, d = opts.cu_seqlens, q.shape[4]
    local scale = opts.scale and opts.scale ~= 0 and opts.scale or d > 0 and 1 / math.sqrt(d) or 1
    return cu and #cu - 1 or q.shape[1], d, v.shape[4], scale
  end

  -- One token after the other. seen(b, h, t, S) gets the state [i * dv + j] of every token.
  local function walk(q, k, v, g, state, opts, seen, done)
    local _, d, dv = sizes(q, v, opts)
    each(q, opts, function(b, h, s, begin, stop)
      local S = {}
      for i = 0, d - 1 do
        for j = 0, dv - 1 do S[i * dv + j] = state and at(state, { s, h, i, j }) or 0.0 end
      end
      for t = begin, stop - 1 do
        for i = 0, d - 1 do
          local decay, key = math.exp(at(g, { b, h, t, i })), at(k, { b, h, t, i })
          for j = 0, dv - 1 do S[i * dv + j] = decay * S[i * dv + j] + key * at(v, { b, h, t, j }) end
        end
        seen(b, h, t, S)
      end
      if done then done(s, h, S) end
    end)
  end

  local function attention(q, k, v, g, state, opts)
    if is_options(state) then state, opts = nil, state end
    opts = opts or {}
    local n, d, dv, scale = sizes(q, v, opts)
    local y, last = zeros { q.shape[1], q.shape[2], q.shape[3], dv }, zeros { n, q.shape[2], d, dv }
    walk(q, k, v, g, state, opts, function(b, h, t, S)
      for j = 0, dv - 1 do
        local sum = 0.0
        for i = 0, d - 1 do sum = sum + at(q, { b, h, t, i }) * S[i * dv + j] end
        put(y, { b, h, t, j }, sum * scale)
      end
    end, function(s, h, S)
      for i = 0, d - 1 do
        for j = 0, dv - 1 do put(last, { s, h, i, j }, S[i * dv + j]) end
      end
    end)
    return y, last
  end

  local gates, hostile, half = { -1, 0 }, { -90, 0 }, { "f16", "bf16" }
  local resets = {} -- gates that forget everything, beside gates that forget next to nothing
  for i = 1, 40 * 3 do resets[i] = i % 7 == 0 and -math.huge or i % 5 == 0 and -300 or -0.01 * (i % 4) end

  row("gated_linear_attention", {
    cases = {
      { T { 2, 2, 5, 3 }, T { 2, 2, 5, 3 }, T { 2, 2, 5, 2 }, T { 2, 2, 5, 3, range = gates } },
      { T { 1, 2, 6, 3 }, T { 1, 2, 6, 3 }, T { 1, 2, 6, 4 }, T { 1, 2, 6, 3, range = gates }, T { 1, 2, 3, 4 } },
      { T { 2, 2, 4, 3 }, T { 2, 2, 4, 3 }, T { 2, 2, 4, 2 }, T { 2, 1, 1, range = gates }, opts = { scale = 0.7 } },
      { T { 2, 2, 1, 3 }, T { 2, 2, 1, 3 }, T { 2, 2, 1, 5 }, T { 2, 2, 1, 3, range = gates }, T { 2, 2, 3, 5 } },
      { T { 1, 2, 19, 3 }, T { 1, 2, 19, 3 }, T { 1, 2, 19, 2 }, T { 1, 2, 19, 3, range = { -0.3, 0 } } },
      { T { 1, 1, 9, 3 }, T { 1, 1, 9, 3 }, T { 1, 1, 9, 2 }, T { 1, 1, 9, 3, range = gates },
        opts = { cu_seqlens = T { 5, values = { 1, 3, 3, 7, 8 }, dtype = "i32" } } },
      { T { 1, 2, 7, 2 }, T { 1, 2, 7, 2 }, T { 1, 2, 7, 3 }, T { 1, 2, 7, 2, range = gates }, T { 3, 2, 2, 3 },
        opts = { cu_seqlens = T { 4, values = { 0, 2, 2, 7 }, dtype = "i64" } } },
      -- Chunks, full and not, with what is left to the recurrence; rooms that are not full.
      { T { 1, 2, 33, 18 }, T { 1, 2, 33, 18 }, T { 1, 2, 33, 35 }, T { 1, 2, 33, 18, range = { -0.3, 0 } },
        T { 1, 2, 18, 35 }, grad = false },
      { T { 1, 1, 40, 16 }, T { 1, 1, 40, 16 }, T { 1, 1, 40, 48 }, T { 1, 1, 40, 16, range = { -0.1, 0 } },
        T { 1, 1, 16, 48 }, grad = false },
      { T { 1, 1, 3, 16 }, T { 1, 1, 3, 16 }, T { 1, 1, 3, 80 }, T { 1, 1, 3, 16, range = { -0.1, 0 } },
        T { 1, 1, 16, 80 }, grad = false },
      { T { 2, 1, 70, 4 }, T { 2, 1, 70, 4 }, T { 2, 1, 70, 4 }, T { 2, 1, 70, 4, range = hostile }, T { 2, 1, 4, 4 },
        grad = false },
      { T { 1, 1, 40, 3 }, T { 1, 1, 40, 3 }, T { 1, 1, 40, 3 }, T { 1, 1, 40, 3, values = resets }, grad = false },
      { T { 1, 1, 90, 4 }, T { 1, 1, 90, 4 }, T { 1, 1, 90, 4 }, T { 1, 1, 90, 4, range = gates }, T { 3, 1, 4, 4 },
        opts = { cu_seqlens = T { 4, values = { 2, 37, 39, 88 }, dtype = "i64" } }, grad = false },
      { T { 1, 2, 66, 72 }, T { 1, 2, 66, 72 }, T { 1, 2, 66, 40 }, T { 1, 2, 66, 1, range = { -0.2, 0 } }, dtypes = half,
        grad = false },
      { T { 1, 2, 0, 3 }, T { 1, 2, 0, 3 }, T { 1, 2, 0, 2 }, T { 1, 2, 0, 3 }, T { 1, 2, 3, 2 } },
      { T { 0, 2, 3, 3 }, T { 0, 2, 3, 3 }, T { 0, 2, 3, 2 }, T { 0, 2, 3, 3 } },
      { T { 1, 2, 3, 0 }, T { 1, 2, 3, 0 }, T { 1, 2, 3, 2 }, T { 1, 2, 3, 0 } },
      { T { 1, 2, 3, 2 }, T { 1, 2, 3, 2 }, T { 1, 2, 3, 0 }, T { 1, 2, 3, 2 } },
    },
    ref = attention,
    dtype = function(dtype, i) return i == 2 and wide(dtype) or dtype end,
    errors = {
      { T { 2, 3, 4 }, T { 2, 3, 4 }, T { 2, 3, 4 }, T { 2, 3, 4 }, match = { "q: expected [b, h, t, d]", "[2, 3, 4]" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 5 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 },
        match = { "k: expected the shape of q", "[1, 2, 3, 4]", "[1, 2, 3, 5]" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 5, 4 }, T { 1, 2, 3, 4 },
        match = { "v: expected", "[1, 2, 3, 4]", "[1, 2, 5, 4]" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 2, 4 },
        match = { "g: expected a float tensor that broadcasts to [1, 2, 3, 4]", "[1, 2, 2, 4]" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 4, int = { 0, 1 } },
        match = "g: expected a float tensor" },
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 5 }, T { 1, 2, 3, 4 }, T { 1, 2, 4, 4 },
        match = { "state: expected a float tensor [1, 2, 4, 5]", "[1, 2, 4, 4]" } },
      { T { 1, 2, 3, 4, dtype = "f64" }, T { 1, 2, 3, 4, dtype = "f32" }, T { 1, 2, 3, 4, dtype = "f64" },
        T { 1, 2, 3, 4 }, match = { "one dtype", "f64", "f32" } },
      { T { 2, 2, 3, 4 }, T { 2, 2, 3, 4 }, T { 2, 2, 3, 4 }, T { 2, 2, 3, 4 },
        opts = { cu_seqlens = T { 2, int = { 0, 2 } } }, match = "expected a batch of 1" },
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 },
        opts = { cu_seqlens = T { 0, int = { 0, 2 } } }, match = "cu_seqlens: expected at least one position" },
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 },
        opts = { cu_seqlens = T { 2, dtype = "f32" } }, match = "cu_seqlens: expected" },
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 },
        opts = { cu_seqlens = T { 2, values = { 0, 4 }, dtype = "i64" } }, match = "index 4 is out of range for size 4" },
    },
    big = function(ty)
      local q, k = ty.randn(2, 3, 600, 40):requires_grad_(), ty.randn(2, 3, 600, 40):requires_grad_()
      local v, g = ty.randn(2, 3, 600, 24):requires_grad_(), (-ty.rand(2, 3, 600, 40)):requires_grad_()
      local s = ty.randn(2, 3, 40, 24):requires_grad_()
      local y, last = ty.gated_linear_attention(q, k, v, g, s)
      local loss = (y * ty.randn(2, 3, 600, 24)):sum() + (last * ty.randn(2, 3, 40, 24)):sum()
      return y:detach(), last:detach(), table.unpack(ty.grad(loss, { q, k, v, g, s }))
    end,
  })

  -- D, the gradient of the states, is carried from the end; dg[t] is that of exp(g[t]) S[t - 1] by itself.
  local function backward(q, k, v, g, opts)
    local state, dy, dstate = opts.state, opts.dy, opts.dstate
    local n, d, dv, scale = sizes(q, v, opts)
    local states = {}
    local function id(b, h, t) return (b * q.shape[2] + h) * q.shape[3] + t end
    walk(q, k, v, g, state, opts, function(b, h, t, S) states[id(b, h, t)] = table.move(S, 0, d * dv - 1, 0, {}) end)
    local dq, dk, dvs, dg = zeros(q.shape), zeros(q.shape), zeros(v.shape), zeros(q.shape)
    local ds = zeros { n, q.shape[2], d, dv }
    each(q, opts, function(b, h, s, begin, stop)
      local D = {}
      for i = 0, d - 1 do
        for j = 0, dv - 1 do D[i * dv + j] = dstate and at(dstate, { s, h, i, j }) or 0.0 end
      end
      for t = stop - 1, begin, -1 do
        local S, before = states[id(b, h, t)], t > begin and states[id(b, h, t - 1)]
        for i = 0, d - 1 do
          local p = { b, h, t, i }
          local decay = math.exp(at(g, p))
          for j = 0, dv - 1 do
            local e, into = i * dv + j, at(dy, { b, h, t, j })
            local past = before and before[e] or not before and state and at(state, { s, h, i, j }) or 0.0
            D[e] = D[e] + scale * at(q, p) * into
            add(dq, p, scale * S[e] * into)
            add(dk, p, D[e] * at(v, { b, h, t, j }))
            add(dvs, { b, h, t, j }, D[e] * at(k, p))
            add(dg, p, D[e] * decay * past)
            D[e] = D[e] * decay
          end
        end
      end
      for i = 0, d - 1 do
        for j = 0, dv - 1 do put(ds, { s, h, i, j }, D[i * dv + j]) end
      end
    end)
    return dq, dk, dvs, dg, ds
  end

  -- Both walks over chunks, spans of 16 chunks, and the sums of dg over them.
  local function case(b, h, t, d, dv, range, opts)
    opts = opts or {}
    local n = opts.cu_seqlens and #opts.cu_seqlens.values - 1 or b
    if opts.states then opts.state, opts.dstate, opts.states = T { n, h, d, dv }, T { n, h, d, dv }, nil end
    opts.dy = T { b, h, t, dv }
    return { T { b, h, t, d }, T { b, h, t, d }, T { b, h, t, dv }, T { b, h, t, d, range = range }, opts = opts }
  end

  row("gated_linear_attention_backward", {
    cases = {
      case(2, 2, 5, 3, 2, gates), case(1, 2, 37, 4, 5, gates, { states = true }),
      case(1, 1, 33, 18, 35, { -0.3, 0 }, { states = true, scale = 0.1 }),
      case(1, 1, 300, 2, 3, { -0.2, 0 }, { states = true, scale = 0.3 }), case(1, 1, 70, 3, 3, hostile),
      case(1, 1, 90, 3, 4, gates, { cu_seqlens = T { 4, values = { 2, 37, 39, 88 }, dtype = "i64" }, states = true }),
      { T { 1, 1, 40, 3 }, T { 1, 1, 40, 3 }, T { 1, 1, 40, 3 }, T { 1, 1, 40, 3, values = resets },
        opts = { dy = T { 1, 1, 40, 3 } } },
    },
    ref = backward, tol = 5e-6,
    dtype = function(dtype, i) return i >= 4 and wide(dtype) or dtype end,
    errors = {
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 2 }, T { 1, 2, 3, 4 }, opts = { dy = T { 1, 2, 3, 4 } },
        match = { "dy: expected a float tensor [1, 2, 3, 2]", "[1, 2, 3, 4]" } },
      { T { 1, 2, 3, 4 }, T { 1, 2, 3, 4 }, T { 1, 2, 3, 2 }, T { 1, 2, 3, 4 },
        opts = { dy = T { 1, 2, 3, 2 }, dstate = T { 1, 2, 2, 4 } },
        match = { "dstate: expected a float tensor [1, 2, 4, 2]", "[1, 2, 2, 4]" } },
    },
  })
end
