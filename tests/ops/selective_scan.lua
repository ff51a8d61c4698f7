-- Rows of src/ops/selective_scan.c.

return function(row, T)
  local from, at = T.from, T.at

  local function wide(dtype) return (dtype == "f16" or dtype == "bf16") and "f32" or dtype end
  local function zeros(shape) return from(shape, function() return 0.0 end) end
  local function put(x, p, value)
    local i = 0
    for d, size in ipairs(x.shape) do i = i * size + p[d] end
    x[i + 1] = value
  end
  local function add(x, p, value) put(x, p, at(x, p) + value) end

  -- One token after the other. seen(s, t, j, i, h, before): state i of channel j, and what it was before.
  local function walk(u, delta, a, b, state, seen, done)
    local sequences, length, channels = u.shape[1], u.shape[2], u.shape[3]
    for s = 0, sequences - 1 do
      for j = 0, channels - 1 do
        for i = 0, a.shape[2] - 1 do
          local h = state and at(state, { s, j, i }) or 0.0
          for t = 0, length - 1 do
            local before, step = h, at(delta, { s, t, j })
            h = math.exp(step * at(a, { j, i })) * before + step * at(u, { s, t, j }) * at(b, { s, t, i })
            if seen then seen(s, t, j, i, h, before) end
          end
          if done then done(s, j, i, h) end
        end
      end
    end
  end

  local function scan(u, delta, a, b, c, state)
    if type(state) == "table" and not state.shape then state = nil end
    local y, last = zeros(u.shape), zeros { u.shape[1], u.shape[3], a.shape[2] }
    walk(u, delta, a, b, state, function(s, t, j, i, h) add(y, { s, t, j }, at(c, { s, t, i }) * h) end,
      function(s, j, i, h) put(last, { s, j, i }, h) end)
    return y, last
  end

  local rates, steps, hostile = { -2, -0.1 }, { 0.05, 0.8 }, { -200, -90 }

  -- Of b sequences of t tokens, d channels of n states.
  local function case(b, t, d, n, more)
    local list = { T { b, t, d }, T { b, t, d, range = steps }, T { d, n, range = more and more.rates or rates },
      T { b, t, n }, T { b, t, n } }
    if more and more.state then list[6] = T { b, d, n } end
    list.grad = more and more.grad
    list.dtypes = more and more.dtypes
    return list
  end

  local cases = {
    case(2, 5, 3, 2), case(1, 4, 3, 4, { state = true }), case(2, 1, 2, 3, { state = true }), case(1, 7, 1, 1),
    -- Blocks of channels, full and not; chunks of tokens; more states than lanes of a team.
    case(1, 70, 35, 3, { state = true, grad = false }), case(2, 33, 32, 2, { grad = false }),
    case(1, 20, 3, 19, { state = true, grad = false }), case(1, 9, 300, 2, { grad = false }),
    case(1, 40, 4, 2, { rates = hostile, grad = false }),
    case(1, 12, 9, 4, { state = true, grad = false, dtypes = { "f16", "bf16" } }),
    case(1, 0, 3, 2, { state = true }), case(0, 3, 2, 2), case(1, 3, 0, 2), case(1, 3, 2, 0),
  }

  row("selective_scan", {
    cases = cases, ref = scan,
    dtype = function(dtype, i) return i == 2 and wide(dtype) or dtype end,
    errors = {
      { T { 3, 4 }, T { 3, 4 }, T { 4, 2 }, T { 3, 2 }, T { 3, 2 }, match = { "u: expected [b, t, d]", "[3, 4]" } },
      { T { 1, 3, 4 }, T { 1, 3, 5 }, T { 4, 2 }, T { 1, 3, 2 }, T { 1, 3, 2 },
        match = { "delta: expected a float tensor [1, 3, 4]", "[1, 3, 5]" } },
      { T { 1, 3, 4 }, T { 1, 3, 4 }, T { 5, 2 }, T { 1, 3, 2 }, T { 1, 3, 2 },
        match = { "a: expected a float tensor [4, 2]", "[5, 2]" } },
      { T { 1, 3, 4 }, T { 1, 3, 4 }, T { 4, 2 }, T { 1, 4, 2 }, T { 1, 3, 2 },
        match = { "b: expected a float tensor [1, 3, 2]", "[1, 4, 2]" } },
      { T { 1, 3, 4 }, T { 1, 3, 4 }, T { 4, 2 }, T { 1, 3, 2 }, T { 1, 3, 3 },
        match = { "c: expected a float tensor [1, 3, 2]", "[1, 3, 3]" } },
      { T { 1, 3, 4 }, T { 1, 3, 4 }, T { 4, 2 }, T { 1, 3, 2 }, T { 1, 3, 2 }, T { 1, 2, 4 },
        match = { "state: expected a float tensor [1, 4, 2]", "[1, 2, 4]" } },
    },
    big = function(ty)
      local u, delta = ty.randn(2, 300, 70):requires_grad_(), ty.rand(2, 300, 70):requires_grad_()
      local a = (-ty.rand(70, 16) - 0.1):requires_grad_()
      local b, c = ty.randn(2, 300, 16):requires_grad_(), ty.randn(2, 300, 16):requires_grad_()
      local s = ty.randn(2, 70, 16):requires_grad_()
      local y, last = ty.selective_scan(u, delta, a, b, c, s)
      local loss = (y * ty.randn(2, 300, 70)):sum() + (last * ty.randn(2, 70, 16)):sum()
      return y:detach(), last:detach(), table.unpack(ty.grad(loss, { u, delta, a, b, c, s }))
    end,
  })

  -- G, the gradient of the states, is carried from the end.
  local function backward(u, delta, a, b, c, opts)
    local state, dy, dstate = opts.state, opts.dy, opts.dstate
    local length, channels, n = u.shape[2], u.shape[3], a.shape[2]
    local now, past = {}, {}
    local function id(s, t, j, i) return ((s * length + t) * channels + j) * n + i end
    walk(u, delta, a, b, state, function(s, t, j, i, h, before)
      now[id(s, t, j, i)], past[id(s, t, j, i)] = h, before
    end)
    local du, dd, da, db, dc = zeros(u.shape), zeros(u.shape), zeros(a.shape), zeros(b.shape), zeros(c.shape)
    local ds = zeros { u.shape[1], channels, n }
    for s = 0, u.shape[1] - 1 do
      for j = 0, channels - 1 do
        for i = 0, n - 1 do
          local g = dstate and at(dstate, { s, j, i }) or 0.0
          for t = length - 1, 0, -1 do
            local token, state_of = { s, t, j }, { s, t, i }
            local step, value, rate = at(delta, token), at(u, token), at(a, { j, i })
            g = g + at(c, state_of) * at(dy, token)
            add(dc, state_of, now[id(s, t, j, i)] * at(dy, token))
            add(db, state_of, g * step * value)
            add(du, token, g * step * at(b, state_of))
            local decay = math.exp(step * rate)
            local by_decay = g * decay * past[id(s, t, j, i)]
            add(dd, token, g * value * at(b, state_of) + by_decay * rate)
            add(da, { j, i }, by_decay * step)
            g = g * decay
          end
          put(ds, { s, j, i }, g)
        end
      end
    end
    return du, dd, da, db, dc, ds
  end

  local function back(b, t, d, n, states)
    local list = case(b, t, d, n)
    list.opts = { dy = T { b, t, d } }
    if states then list.opts.state, list.opts.dstate = T { b, d, n }, T { b, d, n } end
    return list
  end

  row("selective_scan_backward", {
    cases = { back(2, 5, 3, 2), back(1, 4, 3, 4, true), back(1, 70, 35, 3, true), back(2, 33, 40, 2, true),
      back(1, 20, 3, 19, true), back(1, 9, 300, 2), back(1, 0, 3, 2, true), back(1, 3, 2, 0) },
    ref = backward, tol = 5e-6,
    dtype = function(dtype, i) return (i == 2 or i == 3 or i == 6) and wide(dtype) or dtype end,
    errors = {
      { T { 1, 3, 4 }, T { 1, 3, 4 }, T { 4, 2 }, T { 1, 3, 2 }, T { 1, 3, 2 }, opts = { dy = T { 1, 3, 2 } },
        match = { "dy: expected a float tensor [1, 3, 4]", "[1, 3, 2]" } },
      { T { 1, 3, 4 }, T { 1, 3, 4 }, T { 4, 2 }, T { 1, 3, 2 }, T { 1, 3, 2 },
        opts = { dy = T { 1, 3, 4 }, dstate = T { 1, 2, 4 } },
        match = { "dstate: expected a float tensor [1, 4, 2]", "[1, 2, 4]" } },
    },
  })
end
