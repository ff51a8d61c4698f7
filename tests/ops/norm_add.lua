-- Rows of src/ops/norm_add.c. tests/lua/fused_test.lua shows the dropout.

return function(row, T)
  local count = T.count

  local function is_options(t) return type(t) == "table" and not t.shape end
  local function wide(dtype) return (dtype == "f16" or dtype == "bf16") and "f32" or dtype end

  local function add(x, residual)
    local s = { shape = x.shape }
    for i = 1, count(x.shape) do s[i] = x[i] + residual[i] end
    return s
  end

  -- the last dimension normalised; also mean and rstd of each row
  local function normalized(s, weight, bias, eps, centred)
    local n = s.shape[#s.shape]
    local y, means, rstds = { shape = s.shape }, {}, {}
    means.shape = table.move(s.shape, 1, #s.shape, 1, {})
    means.shape[#means.shape] = 1
    rstds.shape = means.shape
    for r = 0, count(means.shape) - 1 do
      local mean, var = 0.0, 0.0
      for i = 1, n do mean = mean + s[r * n + i] / n end
      if not centred then mean = 0.0 end
      for i = 1, n do var = var + (s[r * n + i] - mean) ^ 2 / n end
      means[r + 1], rstds[r + 1] = mean, 1 / math.sqrt(var + eps)
      for i = 1, n do
        y[r * n + i] = (s[r * n + i] - mean) * rstds[r + 1] * (weight and weight[i] or 1) + (bias and bias[i] or 0)
      end
    end
    return y, means, rstds
  end

  local errors = {
    { T { 2, 3 }, T { 3, 2 }, match = { "residual: expected the shape and dtype of x [2, 3]", "[3, 2]" } },
    { T {}, T {}, match = "x: expected at least one dimension" },
    { T { 2, 3 }, T { 2, 3 }, T { 2 }, match = { "weight: expected a float tensor [3]", "got [2]" } },
    { T { 2, 3 }, T { 2, 3 }, opts = { p = 1 }, match = "p: expected a probability in [0, 1), got 1" },
  }

  row("add_layer_norm", {
    cases = {
      { T { 3, 8 }, T { 3, 8 }, T { 8 }, T { 8 } }, { T { 2, 3, 5 }, T { 2, 3, 5 }, T { 5 } }, { T { 2, 5 }, T { 2, 5 } },
      { T { 2, 40 }, T { 2, 40 }, nil, T { 40 }, opts = { eps = 0.1 } }, { T { 20, 3 }, T { 20, 3 }, T { 3 }, T { 3 } },
      { T { 0, 4 }, T { 0, 4 }, T { 4 }, T { 4 } }, { T { 2, 5 }, T { 2, 5 }, opts = { p = 0.5, training = false } },
      { T { 2, 1100 }, T { 2, 1100 }, T { 1100 }, T { 1100 }, grad = false, dtypes = { "f32" } },
      { T { 2, 1104 }, T { 2, 1104 }, T { 1104 }, T { 1104 }, grad = false, dtypes = { "bf16", "f16" } },
      { T { 1, 8208 }, T { 1, 8208 }, T { 8208 }, T { 8208 }, grad = false, dtypes = { "bf16", "f16" } },
    },
    ref = function(x, residual, weight, bias, opts)
      if is_options(weight) then weight, opts = nil, weight end
      if is_options(bias) then bias, opts = nil, bias end
      local s = add(x, residual)
      return s, (normalized(s, weight, bias, opts and opts.eps or 1e-5, true))
    end,
    gradtol = 1e-4, errors = errors,
    big = function(ty)
      local x, r = ty.randn(700, 96):requires_grad_(), ty.randn(700, 96):requires_grad_()
      local w, b = ty.randn(96):requires_grad_(), ty.randn(96):requires_grad_()
      local s, y = ty.add_layer_norm(x, r, w, b)
      return s:detach(), y:detach(), table.unpack(ty.grad((y * y * y):sum() + s:sum(), { x, r, w, b }))
    end,
  })

  row("add_rms_norm", {
    cases = {
      { T { 3, 8 }, T { 3, 8 }, T { 8 } }, { T { 2, 3, 5 }, T { 2, 3, 5 } }, { T { 20, 3 }, T { 20, 3 }, T { 3 } },
      { T { 0, 4 }, T { 0, 4 }, T { 4 } }, { T { 2, 1100 }, T { 2, 1100 }, T { 1100 }, grad = false, dtypes = { "f32" } },
    },
    ref = function(x, residual, weight, opts)
      if is_options(weight) then weight, opts = nil, weight end
      local s = add(x, residual)
      return s, (normalized(s, weight, nil, opts and opts.eps or 1e-6, false))
    end,
    gradtol = 1e-4, errors = errors,
  })

  row("add_norm", {
    cases = { { T { 3, 8 }, T { 3, 8 }, T { 8 }, T { 8 } } },
    ref = function(x, residual, weight, bias)
      local s = add(x, residual)
      return s, normalized(s, weight, bias, 1e-5, true)
    end,
    dtype = function(dtype, i) return i > 2 and wide(dtype) or dtype end,
    grad = "mean and rstd have none; the rows of add_layer_norm and add_rms_norm test the rest",
    errors = errors,
  })

  row("add_norm_backward", {
    cases = {
      { T { 3, 8 }, T { 3, 8 }, T { 3, 8 }, T { 3, 1 }, T { 3, 1, range = { 0.5, 2 } }, T { 8 } },
      { T { 30, 4 }, nil, T { 30, 4 }, T { 30, 1 }, T { 30, 1, range = { 0.5, 2 } } },
    },
    ref = function(g, g_sum, total, mean, rstd, weight)
      local n = total.shape[#total.shape]
      local d, dw, db = { shape = total.shape }, { shape = { weight and n or 0 } }, { shape = { weight and n or 0 } }
      for i = 1, weight and n or 0 do dw[i], db[i] = 0.0, 0.0 end
      for r = 0, count(total.shape) // n - 1 do
        local a, b = 0.0, 0.0
        local function h(i) return (total[r * n + i] - mean[r + 1]) * rstd[r + 1] end
        local function u(i) return g[r * n + i] * (weight and weight[i] or 1) end
        for i = 1, n do
          a, b = a + u(i) / n, b + u(i) * h(i) / n
          if weight then dw[i], db[i] = dw[i] + g[r * n + i] * h(i), db[i] + g[r * n + i] end
        end
        for i = 1, n do d[r * n + i] = rstd[r + 1] * (u(i) - a - h(i) * b) + (g_sum and g_sum[r * n + i] or 0) end
      end
      return d, { shape = { 0 } }, dw, db
    end,
    dtype = function(dtype, i) return i > 2 and wide(dtype) or dtype end,
    errors = {
      { T { 3, 8 }, nil, T { 8, 3 }, T { 8, 1 }, T { 8, 1 }, match = { "g: expected the shape of total [8, 3]", "[3, 8]" } },
      { T { 3, 8 }, nil, T { 3, 8 }, T { 2, 1 }, T { 3, 1 }, match = "mean: expected 3 floats" },
      { T { 3, 8 }, nil, T { 3, 8 }, T { 3, 1 }, T { 3, 1 }, T { 7 }, match = "weight: expected 8 floats" },
    },
  })
end
