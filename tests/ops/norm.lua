-- Rows of src/ops/norm.c.

return function(row, T)
  local count = T.count

  local function wide(dtype) return (dtype == "f16" or dtype == "bf16") and "f32" or dtype end
  -- dtypes of dx and of the gradients of the parameters
  local function gradients(dtype, i) return i == 1 and dtype or wide(dtype) end

  -- Which row (any key) and which parameter (1-based) an element belongs to.
  local function last_dims(x, n)
    local inner = 1
    for d = #x.shape - n + 1, #x.shape do inner = inner * x.shape[d] end
    return function(i) return (i - 1) // inner, (i - 1) % inner + 1 end, inner
  end

  local function groups_of(x, groups)
    local spatial, channels = 1, x.shape[2]
    for d = 3, #x.shape do spatial = spatial * x.shape[d] end
    local width = channels // groups
    return function(i)
      local c = (i - 1) // spatial % channels
      return (i - 1) // (spatial * channels) * groups + c // width, c + 1
    end, channels
  end

  local function channels_of(x)
    local of = groups_of(x, 1)
    return function(i)
      local _, c = of(i)
      return c, c
    end
  end

  -- Mean and 1/sqrt(var + eps) of every row; `centred` false: mean 0.
  local function statistics(x, of, eps, centred)
    local n, mean, var = {}, {}, {}
    for i = 1, count(x.shape) do
      local r = of(i)
      n[r], mean[r], var[r] = (n[r] or 0) + 1, (mean[r] or 0) + x[i], 0.0
    end
    for r in pairs(n) do mean[r] = centred and mean[r] / n[r] or 0.0 end
    for i = 1, count(x.shape) do
      local r = of(i)
      var[r] = var[r] + (x[i] - mean[r]) ^ 2 / n[r]
    end
    local rstd = {}
    for r in pairs(n) do rstd[r] = 1 / math.sqrt(var[r] + eps) end
    return mean, rstd, var, n
  end

  local function normalize(x, of, weight, bias, eps, centred)
    local mean, rstd = statistics(x, of, eps, centred)
    local y = { shape = x.shape }
    for i = 1, count(x.shape) do
      local r, c = of(i)
      y[i] = (x[i] - mean[r]) * rstd[r] * (weight and weight[c] or 1) + (bias and bias[c] or 0)
    end
    return y
  end

  -- dx and, when there is a weight, dweight and dbias, from given statistics (a function of the row).
  local function backward(g, x, mean, rstd, weight, of, centred)
    local n, a, b, dx = {}, {}, {}, { shape = x.shape }
    local dw, db = { shape = weight and weight.shape or { 0 } }, { shape = weight and weight.shape or { 0 } }
    for i = 1, weight and count(weight.shape) or 0 do dw[i], db[i] = 0.0, 0.0 end
    for i = 1, count(x.shape) do
      local r, c = of(i)
      local h, gw = (x[i] - mean(r)) * rstd(r), g[i] * (weight and weight[c] or 1)
      n[r], a[r], b[r] = (n[r] or 0) + 1, (a[r] or 0) + gw, (b[r] or 0) + gw * h
      if weight then dw[c], db[c] = dw[c] + g[i] * h, db[c] + g[i] end
    end
    for i = 1, count(x.shape) do
      local r, c = of(i)
      local h, gw = (x[i] - mean(r)) * rstd(r), g[i] * (weight and weight[c] or 1)
      dx[i] = rstd(r) * (gw - (centred and a[r] / n[r] or 0) - h * b[r] / n[r])
    end
    return dx, dw, db
  end

  local function option(opts, name, default)
    if type(opts) == "table" and not opts.shape and opts[name] ~= nil then return opts[name] end
    return default
  end

  -- ---- layer_norm and rms_norm ----

  row("layer_norm", {
    cases = {
      { T { 3, 8 }, { 8 }, T { 8 }, T { 8 } }, { T { 2, 3, 4 }, { 3, 4 }, T { 3, 4 }, T { 3, 4 } },
      { T { 2, 5 }, { 5 } }, { T { 2, 5 } }, { T { 2, 3, 5 }, {}, T { 3, 5 } }, { T { 4, 6 }, 6, nil, T { 6 } },
      { T { 2, 3, 40 }, { 40 }, T { 40 }, T { 40 }, opts = { eps = 0.1 } }, { T { 7 }, { 7 }, T { 7 } },
      { T { 20, 3 }, { 3 }, T { 3 }, T { 3 } }, { T { 0, 4 }, { 4 }, T { 4 }, T { 4 } },
      { T { 3, 0 }, { 0 }, T { 0 }, T { 0 } }, { T { 2, 3, range = { 50, 52 } }, { 3 } },
      -- rows that fit into registers, whole ones and not, and longer ones
      { T { 3, 16 }, { 16 }, T { 16 }, T { 16 } }, { T { 2, 33 }, { 33 }, T { 33 } }, { T { 2, 64 }, { 64 }, nil, T { 64 } },
      { T { 2, 67 }, { 67 }, T { 67 }, T { 67 } }, { T { 2, 1100 }, { 1100 }, T { 1100 }, T { 1100 }, grad = false, dtypes = { "f32" } },
      { T { 2, 1100, range = { 50, 52 } }, { 1100 }, grad = false, dtypes = { "f32" } },
      { T { 1, 2051 }, { 2051 }, T { 2051 }, T { 2051 }, grad = false, dtypes = { "f32" } },
      { T { 1, 8204 }, { 8204 }, T { 8204 }, T { 8204 }, grad = false, dtypes = { "f32" } },
      -- the same of halves in whole packs
      { T { 3, 512 }, { 512 }, T { 512 }, T { 512 }, grad = false, dtypes = { "bf16", "f16" } },
      { T { 2, 1104 }, { 1104 }, T { 1104 }, T { 1104 }, grad = false, dtypes = { "bf16", "f16" } },
      { T { 1, 8208 }, { 8208 }, T { 8208 }, T { 8208 }, grad = false, dtypes = { "bf16", "f16" } },
    },
    ref = function(x, shape, weight, bias, opts)
      if shape == nil then return normalize(x, last_dims(x, 1), nil, nil, 1e-5, true) end
      local n = type(shape) == "number" and 1 or #shape > 0 and #shape or weight and #weight.shape or 1
      if bias and not bias.shape then bias, opts = nil, bias end
      return normalize(x, last_dims(x, n), weight, bias, option(opts, "eps", 1e-5), true)
    end,
    gradtol = 1e-4,
    errors = {
      { T { 2, 3 }, { 4 }, match = { "normalized_shape", "[2, 3]", "[4]" } },
      { T { 2, 3 }, { 3 }, T { 2 }, match = { "weight: expected a float tensor [3]", "got [2]" } },
      { T { 2, 3 }, { 3 }, T { 3 }, T { 4 }, match = { "bias: expected a float tensor [3]", "got [4]" } },
      { T { 3 }, { 2, 3 }, match = "normalized_shape" }, { T {}, match = "at least 1 dimensions" },
      { T { 2, 3 }, { 3 }, T { 3, int = { 0, 2 } }, match = "weight: expected a float tensor" },
    },
    big = function(ty)
      local x = ty.randn(700, 96):requires_grad_()
      local w, b = ty.randn(96):requires_grad_(), ty.randn(96):requires_grad_()
      local y = ty.layer_norm(x, 96, w, b)
      return y:detach(), table.unpack(ty.grad((y * ty.randn(700, 96)):sum(), { x, w, b }))
    end,
  })

  row("rms_norm", {
    cases = {
      { T { 3, 8 }, { 8 }, T { 8 } }, { T { 2, 3, 4 }, { 3, 4 }, T { 3, 4 } }, { T { 2, 5 }, { 5 } }, { T { 2, 5 } },
      { T { 2, 3, 40 }, { 40 }, T { 40 }, opts = { eps = 0.1 } }, { T { 20, 3 }, { 3 }, T { 3 } },
      { T { 0, 4 }, { 4 }, T { 4 } }, { T { 3, 0 }, { 0 }, T { 0 } },
      { T { 3, 16 }, { 16 }, T { 16 } }, { T { 2, 33 }, { 33 } }, { T { 2, 67 }, { 67 }, T { 67 } },
      { T { 2, 1100 }, { 1100 }, T { 1100 }, grad = false },
    },
    ref = function(x, shape, weight, opts)
      if shape == nil then return normalize(x, last_dims(x, 1), nil, nil, 1e-6, false) end
      return normalize(x, last_dims(x, #shape), weight, nil, option(opts, "eps", 1e-6), false)
    end,
    gradtol = 1e-4,
    errors = {
      { T { 2, 3 }, { 4 }, match = { "normalized_shape", "[2, 3]", "[4]" } },
      { T { 2, 3 }, { 3 }, T { 2 }, match = { "weight: expected a float tensor [3]", "got [2]" } },
    },
  })

  local function by_row(t) return function(r) return t[r + 1] end end

  row("layer_norm_backward", {
    cases = {
      { T { 3, 8 }, T { 3, 8 }, T { 3, 1 }, T { 3, 1, range = { 0.5, 2 } }, T { 8 } },
      { T { 3, 8 }, T { 3, 8 }, T { 3, 1 }, T { 3, 1, range = { 0.5, 2 } } },
      { T { 2, 3, 4 }, T { 2, 3, 4 }, T { 2, 1, 1 }, T { 2, 1, 1, range = { 0.5, 2 } }, T { 3, 4 } },
      { T { 30, 4 }, T { 30, 4 }, T { 30, 1 }, T { 30, 1, range = { 0.5, 2 } }, T { 4 } },
      { T { 0, 4 }, T { 0, 4 }, T { 0, 1 }, T { 0, 1 }, T { 4 } },
      { T { 3, 67 }, T { 3, 67 }, T { 3, 1 }, T { 3, 1, range = { 0.5, 2 } }, T { 67 } },
      { T { 3, 64 }, T { 3, 64 }, T { 3, 1 }, T { 3, 1, range = { 0.5, 2 } } },
      { T { 6, 301 }, T { 6, 301 }, T { 6, 1 }, T { 6, 1, range = { 0.5, 2 } }, T { 301 } }, -- four rows at once
      { T { 2, 1100 }, T { 2, 1100 }, T { 2, 1 }, T { 2, 1, range = { 0.5, 2 } }, T { 1100 }, dtypes = { "f32" } },
      -- roundings of equal elements all along a row do not cancel, which shows where sums have one lane
      { T { 2, 2051 }, T { 2, 2051 }, T { 2, 1 }, T { 2, 1, range = { 0.5, 2 } }, T { 2051 }, dtypes = { "f32" },
        tol = { f32 = 1e-5 } },
      { T { 2, 8204 }, T { 2, 8204 }, T { 2, 1 }, T { 2, 1, range = { 0.5, 2 } }, T { 8204 }, dtypes = { "f32" },
        tol = { f32 = 2e-5 } },
      -- halves in whole packs
      { T { 9, 512 }, T { 9, 512 }, T { 9, 1 }, T { 9, 1, range = { 0.5, 2 } }, T { 512 }, dtypes = { "bf16", "f16" } },
      { T { 3, 1104 }, T { 3, 1104 }, T { 3, 1 }, T { 3, 1, range = { 0.5, 2 } }, T { 1104 }, dtypes = { "bf16", "f16" } },
      { T { 2, 8208 }, T { 2, 8208 }, T { 2, 1 }, T { 2, 1, range = { 0.5, 2 } }, T { 8208 }, dtypes = { "bf16", "f16" } },
    },
    ref = function(g, x, mean, rstd, weight)
      return backward(g, x, by_row(mean), by_row(rstd), weight, last_dims(x, #x.shape - 1), true)
    end,
    dtype = gradients,
    errors = {
      { T { 3, 8 }, T { 8, 3 }, T { 3, 1 }, T { 3, 1 }, match = { "[3, 8]", "[8, 3]" } },
      { T { 3, 8 }, T { 3, 8 }, T { 2, 1 }, T { 3, 1 }, match = "mean: expected 3 floats" },
      { T { 3, 8 }, T { 3, 8 }, T { 3, 1 }, T { 3, 1 }, T { 7 }, match = "weight: expected 8 floats" },
      { T { 3, 8 }, T { 3, 8 }, T { 5, 1 }, T { 5, 1 }, match = "rstd: expected one for each row" },
    },
  })

  row("rms_norm_backward", {
    cases = {
      { T { 3, 8 }, T { 3, 8 }, T { 3, 1, range = { 0.5, 2 } }, T { 8 } },
      { T { 3, 8 }, T { 3, 8 }, T { 3, 1, range = { 0.5, 2 } } },
      { T { 30, 4 }, T { 30, 4 }, T { 30, 1, range = { 0.5, 2 } }, T { 4 } },
      { T { 6, 301 }, T { 6, 301 }, T { 6, 1, range = { 0.5, 2 } }, T { 301 } },
    },
    ref = function(g, x, rstd, weight)
      local dx, dw = backward(g, x, function() return 0 end, by_row(rstd), weight, last_dims(x, 1), false)
      return dx, dw
    end,
    dtype = gradients,
    errors = {
      { T { 3, 8 }, T { 8, 3 }, T { 3, 1 }, match = { "[3, 8]", "[8, 3]" } },
      { T { 3, 8 }, T { 3, 8 }, T { 3, 1 }, T { 7 }, match = "weight: expected 8 floats" },
    },
  })

  -- ---- x * scale + shift per channel ----

  local function channel(x)
    local inner = 1
    for d = 3, #x.shape do inner = inner * x.shape[d] end
    return function(i) return (i - 1) // inner % x.shape[2] + 1 end
  end

  row("channel_affine", {
    cases = {
      { T { 2, 3, 4, 5 }, T { 3 }, T { 3 } }, { T { 5, 4 }, T { 4 }, T { 4 } }, { T { 2, 3, 17 }, T { 3 }, T { 3 } },
      { T { 0, 3, 2 }, T { 3 }, T { 3 } }, { T { 2, 0 }, T { 0 }, T { 0 } }, { T { 3, 130 }, T { 130 }, T { 130 } },
    },
    ref = function(x, scale, shift)
      local y, c = { shape = x.shape }, channel(x)
      for i = 1, count(x.shape) do y[i] = x[i] * scale[c(i)] + shift[c(i)] end
      return y
    end,
    errors = {
      { T { 2, 3, 4 }, T { 4 }, T { 3 }, match = "scale: expected a float tensor [3]" },
      { T { 2, 3, 4 }, T { 3 }, T { 4 }, match = "shift: expected a float tensor [3]" },
      { T { 3 }, T { 3 }, T { 3 }, match = "[n, c, ...]" },
    },
    big = function(ty)
      local x, w, b = ty.randn(9, 20, 33, 31):requires_grad_(), ty.randn(20):requires_grad_(), ty.randn(20):requires_grad_()
      local y = ty.core.channel_affine(x, w, b)
      return y:detach(), table.unpack(ty.grad((y * y):sum(), { x, w, b }))
    end,
  })

  row("channel_affine_backward", {
    cases = {
      { T { 2, 3, 4, 5 }, T { 2, 3, 4, 5 }, T { 3 } }, { T { 5, 4 }, T { 5, 4 }, T { 4 } },
      { T { 9, 130 }, T { 9, 130 }, T { 130 } }, { T { 0, 3 }, T { 0, 3 }, T { 3 } },
    },
    ref = function(g, x, scale)
      local dx, dscale, dshift, c = { shape = x.shape }, { shape = scale.shape }, { shape = scale.shape }, channel(x)
      for i = 1, scale.shape[1] do dscale[i], dshift[i] = 0.0, 0.0 end
      for i = 1, count(x.shape) do
        local k = c(i)
        dx[i], dscale[k], dshift[k] = g[i] * scale[k], dscale[k] + g[i] * x[i], dshift[k] + g[i]
      end
      return dx, dscale, dshift
    end,
    dtype = gradients,
    errors = {
      { T { 2, 3 }, T { 3, 2 }, T { 2 }, match = { "[3, 2]", "[2, 3]" } },
      { T { 2, 3 }, T { 2, 3 }, T { 2 }, match = "scale: expected a float tensor [3]" },
    },
  })

  -- ---- group_norm ----

  row("group_norm", {
    cases = {
      { T { 2, 6, 3, 2 }, 3, T { 6 }, T { 6 } }, { T { 2, 4, 5 }, 1 }, { T { 2, 4, 5 }, 4, T { 4 } },
      { T { 3, 6 }, 2, T { 6 }, T { 6 } }, { T { 1, 2, 4, 20 }, 2, nil, T { 2 } },
      { T { 2, 4, 3, 3, 2 }, 2, T { 4 }, T { 4 }, opts = { eps = 0.01 } },
      { T { 0, 4, 3 }, 2, T { 4 }, T { 4 } }, { T { 2, 4, 0 }, 2, T { 4 }, T { 4 } },
      { T { 2, 4, 3, 3 }, 2, T { 4 }, T { 4 }, opts = { activation = "silu" } },
      { T { 2, 6, 5 }, 2, T { 6 }, T { 6 }, opts = { activation = "gelu" } },
      { T { 1, 4, 2, 20 }, 2, T { 4 }, opts = { activation = "gelu_tanh" } },
      { T { 2, 4, 5 }, 4, nil, T { 4 }, opts = { activation = "silu" } },
      { T { 2, 4, 5 }, 2, opts = { activation = "silu" } },
      { T { 2, 4, 5 }, 2, T { 4 }, T { 4 }, opts = { activation = "relu" }, grad = false },
      { T { 2, 4, 5 }, 2, T { 4 }, T { 4 }, opts = { activation = "sigmoid" } },
      { T { 0, 4, 3 }, 2, T { 4 }, T { 4 }, opts = { activation = "silu" } },
      { T { 1, 2, 1100 }, 2, T { 2 }, T { 2 }, opts = { activation = "silu" }, grad = false, dtypes = { "f32" } },
      { T { 1, 2, 4101 }, 2, T { 2 }, T { 2 }, grad = false, dtypes = { "f32" } },
      { T { 1, 2, 1104 }, 2, T { 2 }, T { 2 }, opts = { activation = "silu" }, grad = false, dtypes = { "bf16", "f16" } },
    },
    ref = function(x, groups, weight, bias, opts)
      for _, given in ipairs { weight or {}, bias or {} } do
        if not given.shape and next(given) then opts = given end
      end
      weight, bias = weight and weight.shape and weight, bias and bias.shape and bias
      local y = normalize(x, groups_of(x, groups), weight, bias, option(opts, "eps", 1e-5), true)
      local f = T.activations[option(opts, "activation", "none")]
      for i = 1, #y do y[i] = f(y[i]) end
      return y
    end,
    gradtol = 1e-4,
    errors = {
      { T { 2, 6, 3 }, 4, match = { "groups: expected a divisor of the 6 channels", "got 4" } },
      { T { 2, 6, 3 }, 0, match = "groups: expected a divisor" }, { T { 6 }, 2, match = "[n, c, ...]" },
      { T { 2, 6, 3 }, 2, T { 3 }, match = { "weight: expected a float tensor [6]", "got [3]" } },
      { T { 2, 6, 3 }, 2, opts = { activation = "swish" }, match = { "activation", "silu" } },
    },
    big = function(ty)
      local x = ty.randn(6, 32, 30, 31):requires_grad_()
      local w, b = ty.randn(32):requires_grad_(), ty.randn(32):requires_grad_()
      local y = ty.group_norm(x, 8, w, b, { activation = "silu" })
      return y:detach(), table.unpack(ty.grad((y * ty.randn(6, 32, 30, 31)):sum(), { x, w, b }))
    end,
  })

  row("group_norm_backward", {
    cases = {
      { T { 2, 6, 3 }, T { 2, 6, 3 }, T { 2, 3 }, T { 2, 3, range = { 0.5, 2 } }, T { 6 }, 3 },
      { T { 2, 6, 3, 2 }, T { 2, 6, 3, 2 }, T { 2, 2 }, T { 2, 2, range = { 0.5, 2 } }, nil, 2 },
      { T { 2, 6, 3 }, T { 2, 6, 3 }, T { 2, 3 }, T { 2, 3, range = { 0.5, 2 } }, T { 6 }, 3, T { 6 }, "silu" },
      { T { 2, 4, 37 }, T { 2, 4, 37 }, T { 2, 2 }, T { 2, 2, range = { 0.5, 2 } }, T { 4 }, 2, nil, "gelu" },
      { T { 1, 4, 37 }, T { 1, 4, 37 }, T { 1, 2 }, T { 1, 2, range = { 0.5, 2 } }, nil, 2, T { 4 }, "gelu_tanh" },
      { T { 2, 6, 3 }, T { 2, 6, 3 }, T { 2, 3 }, T { 2, 3, range = { 0.5, 2 } }, T { 6 }, 3, T { 6 }, "relu" },
      { T { 2, 6, 3 }, T { 2, 6, 3 }, T { 2, 3 }, T { 2, 3, range = { 0.5, 2 } }, T { 6 }, 3, T { 6 }, "sigmoid" },
      { T { 1, 2, 1100 }, T { 1, 2, 1100 }, T { 1, 1 }, T { 1, 1, range = { 0.5, 2 } }, T { 2 }, 1, T { 2 }, "silu",
        dtypes = { "f32" } },
      { T { 1, 2, 4101 }, T { 1, 2, 4101 }, T { 1, 1 }, T { 1, 1, range = { 0.5, 2 } }, T { 2 }, 1, dtypes = { "f32" } },
      { T { 1, 2, 1104 }, T { 1, 2, 1104 }, T { 1, 1 }, T { 1, 1, range = { 0.5, 2 } }, T { 2 }, 1, dtypes = { "bf16" } },
    },
    ref = function(g, x, mean, rstd, weight, groups, bias, activation)
      local of, through = groups_of(x, groups), { shape = g.shape }
      local slope = T.slopes[activation or "none"]
      for i = 1, count(x.shape) do
        local r, c = of(i)
        local v = (x[i] - by_row(mean)(r)) * by_row(rstd)(r) * (weight and weight[c] or 1) + (bias and bias[c] or 0)
        through[i] = g[i] * slope(v)
      end
      return backward(through, x, by_row(mean), by_row(rstd), weight, of, true)
    end,
    dtype = gradients,
    tol = { f64 = 1e-9, f32 = 1e-5, f16 = 5e-3, bf16 = 4e-2 },
    errors = {
      { T { 2, 6, 3 }, T { 2, 6, 3 }, T { 2, 3 }, T { 2, 3 }, nil, 4, match = "groups: expected a divisor" },
      { T { 2, 6, 3 }, T { 2, 6, 3 }, T { 2, 3 }, T { 2, 2 }, nil, 3, match = "rstd: expected 6 floats" },
      { T { 2, 6, 3 }, T { 2, 6, 4 }, T { 2, 3 }, T { 2, 3 }, nil, 3, match = { "[2, 6, 3]", "[2, 6, 4]" } },
      { T { 2, 6, 3 }, T { 2, 6, 3 }, T { 2, 3 }, T { 2, 3 }, nil, 3, T { 5 }, match = { "bias: expected", "got [5]" } },
    },
  })

  -- ---- batch_norm ----

  local function batch_norm(x, mean, var, weight, bias, opts)
    local eps, of = option(opts, "eps", 1e-5), channels_of(x)
    if option(opts, "training", false) or not mean then return normalize(x, of, weight, bias, eps, true) end
    local y = { shape = x.shape }
    for i = 1, count(x.shape) do
      local c = of(i)
      y[i] = (x[i] - mean[c]) / math.sqrt(var[c] + eps) * (weight and weight[c] or 1) + (bias and bias[c] or 0)
    end
    return y
  end

  row("batch_norm", {
    cases = {
      { T { 4, 3, 2, 2 }, nil, nil, T { 3 }, T { 3 }, opts = { training = true } },
      { T { 4, 3 }, nil, nil, T { 3 }, T { 3 }, opts = { training = true } }, { T { 5, 140 }, nil, nil, T { 140 } },
      { T { 3, 2, 5 }, nil, nil, nil, T { 2 }, opts = { training = true, eps = 0.1 } }, { T { 3, 2, 5 } },
      { T { 2, 3, 4 }, T { 3 }, T { 3, range = { 0.5, 2 } }, T { 3 }, T { 3 }, opts = { eps = 1e-3 } },
      { T { 2, 3 }, T { 3 }, T { 3, range = { 0.5, 2 } } },
    },
    ref = function(x, mean, var, weight, bias, opts)
      if mean and not mean.shape then mean, opts = nil, mean end
      if var and not var.shape then var, opts = nil, var end
      if weight and not weight.shape then weight, opts = nil, weight end
      if bias and not bias.shape then bias, opts = nil, bias end
      return batch_norm(x, mean, var, weight, bias, opts)
    end,
    gradtol = 1e-4,
    errors = {
      { T { 4, 3 }, nil, nil, T { 4 }, match = { "weight: expected a float tensor [3]", "got [4]" } },
      { T { 4, 3 }, T { 3 }, match = "running_mean and running_var: expected both or neither" },
      { T { 4, 3 }, T { 2 }, T { 2 }, match = "running_mean: expected a float tensor [3]" },
      { T { 1, 3 }, opts = { training = true }, match = { "more than one value per channel", "[1, 3]" } },
      { T { 3 }, match = "[n, c, ...]" },
    },
    big = function(ty)
      local x = ty.randn(16, 20, 17, 19):requires_grad_()
      local mean, var = ty.zeros(20), ty.ones(20)
      local y = ty.batch_norm(x, mean, var, nil, nil, { training = true })
      return y:detach(), mean, var, ty.grad((y * ty.randn(16, 20, 17, 19)):sum(), { x })[1]
    end,
  })

  row("batch_norm_fused", {
    cases = {
      { T { 4, 3, 2, 2 }, T { 3 }, T { 3 } }, { T { 4, 3 }, T { 3 } }, { T { 5, 140 }, nil, T { 140 } },
      { T { 3, 2, 5 }, opts = { eps = 0.1 } }, { T { 4100, 2 }, T { 2 }, dtypes = { "f32" } },
      { T { 300, 2, 4 }, T { 2 }, dtypes = { "f32" } },
    },
    ref = function(x, weight, bias, opts)
      if weight and not weight.shape then weight, opts = nil, weight end
      local of, eps = channels_of(x), option(opts, "eps", 1e-5)
      local mean, _, var = statistics(x, of, eps, true)
      mean.shape, var.shape = { x.shape[2] }, { x.shape[2] }
      return normalize(x, of, weight, bias, eps, true), mean, var
    end,
    dtype = gradients,
    grad = "mean and variance have none; batch_norm's row tests the rest",
    errors = { { T { 4, 3 }, T { 4 }, match = "weight: expected a float tensor [3]" } },
  })

  row("batch_norm_backward", {
    cases = {
      { T { 4, 3, 2 }, T { 4, 3, 2 }, T { 3 }, T { 3, range = { 0.5, 2 } }, T { 3 } },
      { T { 4, 3 }, T { 4, 3 }, T { 3 }, T { 3, range = { 0.5, 2 } }, T { 3 } },
      { T { 4, 3, 2, 2 }, T { 4, 3, 2, 2 }, T { 3 }, T { 3, range = { 0.5, 2 } } },
    },
    ref = function(g, x, mean, rstd, weight)
      return backward(g, x, function(c) return mean[c] end, function(c) return rstd[c] end, weight, channels_of(x),
        true)
    end,
    dtype = gradients,
    errors = { { T { 4, 3 }, T { 4, 3 }, T { 4 }, T { 3 }, match = "mean: expected 3 floats" } },
  })
end
