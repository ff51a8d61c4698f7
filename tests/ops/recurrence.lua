-- Rows of src/ops/recurrence.c.

return function(row, T)
  local from, at, inf = T.from, T.at, T.inf
  local exp, max = math.exp, math.max

  local function is_options(t) return type(t) == "table" and not t.shape end
  local function sigmoid(x) return x < 0 and exp(x) / (1 + exp(x)) or 1 / (1 + exp(-x)) end
  local function tanh(x) return 1 - 2 / (exp(2 * x) + 1) end
  local function log_sigmoid(x) return (x < 0 and x or 0) - T.log1p(exp(-math.abs(x))) end
  local function log_forget(cell, f) return cell == "slstm_exp" and f or log_sigmoid(f) end
  local function gates_of(cell) return cell == "gru" and 3 or 4 end
  local function states_of(cell) return cell == "gru" and 1 or cell == "lstm" and 2 or 4 end

  -- One unit's step: x and u, its gates' parts; s, the state. Gives the new state and the four numbers that are saved.
  local function step(cell, x, u, s)
    if cell == "gru" then
      local r, z = sigmoid(x[1] + u[1]), sigmoid(x[2] + u[2])
      local n = tanh(x[3] + r * u[3])
      return { (1 - z) * n + z * s[1] }, { r, z, n, u[3] }
    end
    local p = {}
    for g = 1, 4 do p[g] = x[g] + u[g] end
    if cell == "lstm" then
      local i, f, g, o = sigmoid(p[1]), sigmoid(p[2]), tanh(p[3]), sigmoid(p[4])
      local c = f * s[2] + i * g
      return { o * tanh(c), c }, { i, f, g, o }
    end
    local z, o, before = tanh(p[3]), sigmoid(p[4]), log_forget(cell, p[2]) + s[4]
    local m = max(p[1], before)
    local i, f = exp(p[1] - m), exp(before - m)
    local c, n = f * s[2] + i * z, f * s[3] + i
    return { o * c / n, c, n, m }, { p[1], p[2], z, o }
  end

  local function arguments(x, weight, bias, state, opts)
    if is_options(bias) then bias, state, opts = nil, nil, bias
    elseif is_options(state) then state, opts = nil, state end
    return x, weight, bias, state, opts or {}
  end

  local function zeros(shape) return from(shape, function() return 0.0 end) end
  local function put(a, p, value)
    local i = 0
    for d, size in ipairs(a.shape) do i = i * size + p[d] end
    a[i + 1] = value
  end

  local function run(...)
    local x, weight, bias, state, opts = arguments(...)
    local cell = opts.cell or "lstm"
    local G, S, heads, d = gates_of(cell), states_of(cell), weight.shape[1], weight.shape[3]
    local steps, batch = x.shape[1], x.shape[2]
    local y, last = zeros { steps, batch, heads * d }, zeros { S, batch, heads * d }
    local kept = opts.save ~= false and steps or 0
    local states, saved = zeros { kept, S - 1, batch, heads * d }, zeros { kept, batch, heads * 4 * d }
    for b = 0, batch - 1 do
      for k = 0, heads - 1 do
        local s = {}
        for j = 0, d - 1 do
          s[j] = {}
          for i = 1, S do
            s[j][i] = state and at(state, { i - 1, b, k * d + j }) or (i == 4 and -inf or 0.0)
          end
        end
        for t = 0, steps - 1 do
          local new = {}
          for j = 0, d - 1 do
            local xs, us = {}, {}
            for g = 1, G do
              local place = k * G * d + (g - 1) * d + j
              xs[g] = at(x, { t, b, place })
              local u = bias and at(bias, { place }) or 0.0
              for e = 0, d - 1 do u = u + at(weight, { k, (g - 1) * d + j, e }) * s[e][1] end
              us[g] = u
            end
            local four
            new[j], four = step(cell, xs, us, s[j])
            put(y, { t, b, k * d + j }, new[j][1])
            if kept > 0 then
              for i = 2, S do put(states, { t, i - 2, b, k * d + j }, new[j][i]) end
              for g = 1, 4 do put(saved, { t, b, k * 4 * d + (g - 1) * d + j }, four[g]) end
            end
          end
          s = new
        end
        for j = 0, d - 1 do
          for i = 1, S do put(last, { i - 1, b, k * d + j }, s[j][i]) end
        end
      end
    end
    return y, last, states, saved
  end

  -- One unit's step back: s before it, after, the four numbers, and the gradients of the state after it. Gives those of
  -- x's and u's gates and of the state before it (of h without the recurrent product).
  local function back(cell, s, after, a, ds)
    if cell == "gru" then
      local r, z, n, q = a[1], a[2], a[3], a[4]
      local dn = ds[1] * (1 - z) * (1 - n * n)
      local dz, dr = ds[1] * (s[1] - n) * z * (1 - z), dn * q * r * (1 - r)
      return { dr, dz, dn }, { dr, dz, dn * r }, { ds[1] * z }
    elseif cell == "lstm" then
      local i, f, g, o = a[1], a[2], a[3], a[4]
      local q = tanh(after[2])
      local dc = ds[2] + ds[1] * o * (1 - q * q)
      local d = { dc * g * i * (1 - i), dc * s[2] * f * (1 - f), dc * i * (1 - g * g), ds[1] * q * o * (1 - o) }
      return d, d, { 0.0, dc * f }
    end
    local before, z, o, m, n = log_forget(cell, a[2]) + s[4], a[3], a[4], after[4], after[3]
    local i, f, ratio = exp(a[1] - m), exp(before - m), after[2] / n
    local dr = ds[1] * o / n
    local dc, dn = ds[2] + dr, ds[3] - dr * ratio
    local di, df = (dc * z + dn) * i, (dc * s[2] + dn * s[3]) * f
    local dm, share = ds[4] - di - df, a[1] > before and 1 or a[1] < before and 0 or 0.5
    di, df = di + share * dm, df + (1 - share) * dm
    local slope = cell == "slstm_exp" and 1 or sigmoid(-a[2])
    local d = { di, df * slope, dc * i * (1 - z * z), ds[1] * ratio * o * (1 - o) }
    return d, d, { 0.0, dc * f, dn * f, df }
  end

  local function run_back(weight, state, y, states, saved, g, g_last, opts)
    if is_options(g) then g, g_last, opts = nil, nil, g
    elseif is_options(g_last) then g_last, opts = nil, g_last end
    local cell = opts and opts.cell or "lstm"
    local G, S, heads, d = gates_of(cell), states_of(cell), weight.shape[1], weight.shape[3]
    local steps, batch = y.shape[1], y.shape[2]
    local dx, dstate = zeros { steps, batch, heads * G * d }, zeros { S, batch, heads * d }
    local du = zeros { cell == "gru" and steps or 0, batch, heads * G * d }
    for b = 0, batch - 1 do
      for k = 0, heads - 1 do
        local ds = {}
        for j = 0, d - 1 do
          ds[j] = {}
          for i = 1, S do ds[j][i] = g_last and at(g_last, { i - 1, b, k * d + j }) or 0.0 end
        end
        for t = steps - 1, 0, -1 do
          local through = {}
          for e = 0, d - 1 do through[e] = 0.0 end
          for j = 0, d - 1 do
            local place, s, after, four = k * d + j, {}, {}, {}
            s[1] = t > 0 and at(y, { t - 1, b, place }) or at(state, { 0, b, place })
            for i = 2, S do
              s[i] = t > 0 and at(states, { t - 1, i - 2, b, place }) or at(state, { i - 1, b, place })
              after[i] = at(states, { t, i - 2, b, place })
            end
            for i = 1, 4 do four[i] = at(saved, { t, b, k * 4 * d + (i - 1) * d + j }) end
            if g then ds[j][1] = ds[j][1] + at(g, { t, b, place }) end
            local of_x, of_u
            of_x, of_u, ds[j] = back(cell, s, after, four, ds[j])
            for gate = 1, G do
              local p = { t, b, k * G * d + (gate - 1) * d + j }
              put(dx, p, of_x[gate])
              if cell == "gru" then put(du, p, of_u[gate]) end
              for e = 0, d - 1 do
                through[e] = through[e] + of_u[gate] * at(weight, { k, (gate - 1) * d + j, e })
              end
            end
          end
          for j = 0, d - 1 do ds[j][1] = ds[j][1] + through[j] end
        end
        for j = 0, d - 1 do
          for i = 1, S do put(dstate, { i - 1, b, k * d + j }, ds[j][i]) end
        end
      end
    end
    return dx, du, dstate
  end

  local function wide(dtype) return (dtype == "f16" or dtype == "bf16") and "f32" or dtype end
  local positive = { 0.5, 2 } -- the states of a test of the gradient: the normaliser is divided by
  local calm = { -0.3, 0.3 } -- weights of many units, whose sums stay where the gates move

  -- Sizes around the vectors and the rows of a block.
  local large = {
    { T { 2, 13, 4 * 37 }, T { 1, 4 * 37, 37, range = calm }, grad = false, dtypes = { "f32", "f64" } },
    { T { 2, 3, 2 * 3 * 20 }, T { 2, 3 * 20, 20, range = calm }, opts = { cell = "gru" }, grad = false },
    { T { 2, 7, 4 * 64 }, T { 1, 4 * 64, 64, range = calm }, opts = { cell = "slstm" }, grad = false,
      dtypes = { "f32", "f64" } },
    { T { 2, 1, 4 * 80 }, T { 1, 4 * 80, 80, range = calm }, grad = false, dtypes = { "f32", "bf16" } },
    { T { 2, 3, 4 * 16, range = { -120, 120 } }, T { 1, 4 * 16, 16, range = calm }, grad = false, dtypes = { "f32" } },
    { T { 3, 2, 4 * 16, range = { -120, 120 } }, T { 1, 4 * 16, 16, range = calm }, opts = { cell = "slstm" },
      grad = false, dtypes = { "f32" } },
    { T { 3, 2, 4 * 32 }, T { 1, 4 * 32, 32, range = calm }, opts = { cell = "slstm_exp" }, grad = false,
      dtypes = { "f32" } },
  }

  row("recurrence", {
    cases = {
      { T { 3, 2, 12 }, T { 1, 12, 3 } },
      { T { 3, 2, 16 }, T { 2, 8, 2 }, T { 16 }, T { 2, 2, 4 } },
      { T { 3, 2, 12 }, T { 2, 6, 2 }, T { 12 }, T { 1, 2, 4 }, opts = { cell = "gru" } },
      { T { 2, 3, 9 }, T { 1, 9, 3 }, opts = { cell = "gru" } },
      { T { 3, 2, 16 }, T { 2, 8, 2 }, T { 16 }, opts = { cell = "slstm" } },
      { T { 3, 2, 12 }, T { 1, 12, 3 }, T { 12 }, T { 4, 2, 3, range = positive }, opts = { cell = "slstm" } },
      { T { 3, 2, 12 }, T { 1, 12, 3 }, T { 12 }, T { 4, 2, 3, range = positive }, opts = { cell = "slstm_exp" } },
      { T { 3, 1, 8 }, T { 1, 8, 2 }, opts = { cell = "slstm_exp" } },
      { T { 1, 1, 4 }, T { 1, 4, 1 } },
      { T { 3, 2, 8, range = { -60, 60 } }, T { 1, 8, 2 }, opts = { cell = "slstm" }, grad = false },
      { T { 3, 2, 8, range = { -60, 60 } }, T { 1, 8, 2 }, opts = { cell = "slstm_exp" }, grad = false,
        dtypes = { "f32", "f64" } },
      { T { 3, 2, 8, range = { -60, 60 } }, T { 1, 8, 2 }, grad = false },
      { T { 0, 2, 12 }, T { 1, 12, 3 }, T { 12 }, T { 2, 2, 3 } },
      { T { 3, 0, 12 }, T { 1, 12, 3 } },
      { T { 3, 2, 0 }, T { 1, 0, 0 } }, { T { 3, 2, 0 }, T { 0, 12, 3 } },
      table.unpack(large),
    },
    ref = function(...)
      local y, last = run(...)
      return y, last
    end,
    tol = { f32 = 5e-6, f16 = 5e-3, bf16 = 4e-2 },
    gradtol = { f64 = 2e-5, f16 = 4e-2, bf16 = 2e-1 },
    dtype = function(dtype, i) return i == 1 and dtype or wide(dtype) end,
    errors = {
      { T { 3, 2, 12 }, T { 1, 12, 4 }, match = { "weight: expected [heads, 4 * d, d]", "[1, 12, 4]" } },
      { T { 3, 2, 12 }, T { 12, 3 }, match = { "weight: expected [heads, 4 * d, d]", "[12, 3]" } },
      { T { 3, 2, 12 }, T { 1, 12, 3 }, opts = { cell = "gru" }, match = "weight: expected [heads, 3 * d, d]" },
      { T { 3, 2, 13 }, T { 1, 12, 3 }, match = { "x: expected [t, b, 12]", "[3, 2, 13]" } },
      { T { 3, 12 }, T { 1, 12, 3 }, match = { "x: expected [t, b, 12]", "[3, 12]" } },
      { T { 3, 2, 12, dtype = "f64" }, T { 1, 12, 3, dtype = "f32" }, match = { "one dtype", "f64", "f32" } },
      { T { 3, 2, 12 }, T { 1, 12, 3 }, T { 11 }, match = { "bias: expected a float tensor [12]", "[11]" } },
      { T { 3, 2, 12 }, T { 1, 12, 3 }, T { 12 }, T { 1, 2, 3 },
        match = { "state: expected a float tensor [2, 2, 3]", "[1, 2, 3]" } },
      { T { 3, 2, 12 }, T { 1, 12, 3 }, opts = { cell = "rnn" }, match = { "cell: expected one of", "slstm", "rnn" } },
    },
    big = function(ty) -- rows shared, steps shared (large weights), heads shared
      local results = {}
      for _, shape in ipairs { { 5, 29, 1, 70, "lstm" }, { 3, 8, 1, 300, "gru" }, { 4, 3, 3, 40, "slstm" },
        { 3, 1, 1, 600, "lstm" }, { 3, 9, 2, 300, "slstm_exp" } } do
        local t, b, heads, d, cell = table.unpack(shape)
        local gates = cell == "gru" and 3 or 4
        local x = ty.randn(t, b, heads * gates * d):requires_grad_()
        local w = (ty.randn(heads, gates * d, d) * 0.1):requires_grad_()
        local y, last = ty.recurrence(x, w, { cell = cell })
        results[#results + 1] = y:detach()
        results[#results + 1] = last:detach()
        for _, g in ipairs(table.pack(ty.grad((y * y):sum() + last:select(0, 0):sum(), { x, w }))) do
          if type(g) == "table" then table.move(g, 1, #g, #results + 1, results) else results[#results + 1] = g end
        end
      end
      return table.unpack(results)
    end,
  })

  row("recurrence_steps", {
    cases = {
      { T { 3, 2, 12 }, T { 1, 12, 3 }, T { 12 }, T { 2, 2, 3 } },
      { T { 3, 2, 12 }, T { 2, 6, 2 }, T { 12 }, T { 1, 2, 4 }, opts = { cell = "gru" } },
      { T { 3, 2, 16 }, T { 2, 8, 2 }, T { 16 }, T { 4, 2, 4, range = positive }, opts = { cell = "slstm" } },
      { T { 3, 2, 16 }, T { 2, 8, 2 }, T { 16 }, T { 4, 2, 4, range = positive },
        opts = { cell = "slstm_exp", save = false } },
      { T { 2, 2, 4 * 18 }, T { 1, 4 * 18, 18, range = calm }, T { 72 }, T { 2, 2, 18 } },
    },
    ref = run,
    grad = "recurrence's row tests it",
    tol = { f32 = 5e-6, f16 = 5e-3, bf16 = 4e-2 },
    dtype = function(dtype, i) return i == 1 and dtype or wide(dtype) end,
    errors = { { T { 3, 2, 12 }, T { 1, 12, 3 }, T { 12 }, T { 1, 2, 3 },
      match = { "state: expected a float tensor [2, 2, 3]", "[1, 2, 3]" } } },
  })

  row("recurrence_backward", {
    cases = {
      { T { 1, 12, 3 }, T { 2, 2, 3 }, T { 3, 2, 3 }, T { 3, 1, 2, 3 }, T { 3, 2, 12, range = { 0.1, 0.9 } },
        T { 3, 2, 3 }, T { 2, 2, 3 } },
      { T { 2, 6, 2 }, T { 1, 2, 4 }, T { 3, 2, 4 }, T { 3, 0, 2, 4 }, T { 3, 2, 16, range = { 0.1, 0.9 } },
        T { 3, 2, 4 }, T { 1, 2, 4 }, opts = { cell = "gru" } },
      { T { 2, 8, 2 }, T { 4, 2, 4, range = positive }, T { 3, 2, 4 }, T { 3, 3, 2, 4, range = positive },
        T { 3, 2, 16, range = { 0.1, 0.9 } }, T { 3, 2, 4 }, T { 4, 2, 4 }, opts = { cell = "slstm" } },
      { T { 2, 8, 2 }, T { 4, 2, 4, range = positive }, T { 3, 2, 4 }, T { 3, 3, 2, 4, range = positive },
        T { 3, 2, 16, range = { 0.1, 0.9 } }, T { 3, 2, 4 }, opts = { cell = "slstm_exp" } },
      -- Products over many units, with the weights so small that the gradients of half precision stay near.
      { T { 1, 4 * 37, 37, range = { -0.1, 0.1 } }, T { 2, 13, 37 }, T { 2, 13, 37 }, T { 2, 1, 13, 37 },
        T { 2, 13, 148, range = { 0.1, 0.9 } }, T { 2, 13, 37 } },
      { T { 2, 4 * 16, 16, range = { -0.1, 0.1 } }, T { 4, 3, 32, range = positive }, T { 2, 3, 32 },
        T { 2, 3, 3, 32, range = positive }, T { 2, 3, 128, range = { -30, 30 } }, T { 2, 3, 32 },
        opts = { cell = "slstm" }, dtypes = { "f32", "f64" } },
      { T { 1, 3 * 150, 150, range = { -0.1, 0.1 } }, T { 1, 4, 150 }, T { 2, 4, 150 }, T { 2, 0, 4, 150 },
        T { 2, 4, 600, range = { 0.1, 0.9 } }, T { 2, 4, 150 }, opts = { cell = "gru" }, dtypes = { "f32", "f64" } },
    },
    ref = run_back,
    tol = { f32 = 5e-6, f16 = 5e-3, bf16 = 4e-2 },
    dtype = function(dtype, i) return i == 3 and wide(dtype) or dtype end,
    errors = {
      { T { 1, 12, 3 }, T { 2, 2, 3 }, T { 3, 2, 4 }, T { 3, 1, 2, 3 }, T { 3, 2, 12 },
        match = { "y: expected [t, b, 3]", "[3, 2, 4]" } },
      { T { 1, 12, 3 }, T { 2, 2, 3 }, T { 3, 2, 3 }, T { 3, 1, 2, 3 }, T { 3, 2, 11 },
        match = { "gates: expected a float tensor [3, 2, 12]", "[3, 2, 11]" } },
    },
  })
end
