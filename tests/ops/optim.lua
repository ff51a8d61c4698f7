-- Rows of src/ops/optim.c. The references change the arrays that they are given, as the ops do.

return function(row, T)
  local inf, nan = T.inf, T.nan

  local function lists(n, shapes, more)
    local all = {}
    for k = 1, n do
      all[k] = {}
      for i, shape in ipairs(shapes) do
        local spec = table.move(shape, 1, #shape, 1, {})
        for key, v in pairs(more and more[k] or {}) do spec[key] = v end
        all[k][i] = T(spec)
      end
    end
    return all
  end

  local some = { { 3, 4 }, { 5 }, {}, { 0, 2 }, { 2, 1, 3 } }
  local positive = { range = { 0, 1 } }

  -- The options of a call given by name with their defaults.
  local function options(given, defaults)
    return setmetatable(type(given) == "table" and given or {}, { __index = defaults })
  end

  local function each(list, f)
    for i, x in ipairs(list) do
      for j = 1, T.count(x.shape) do f(i, j) end
    end
  end

  local function sgd_case(opts, shapes, spec)
    local l = lists(3, shapes or some, spec)
    return { l[1], l[2], opts.momentum and l[3] or {}, 0.1, opts = opts }
  end

  row("sgd_", {
    cases = {
      sgd_case {}, sgd_case { weight_decay = 0.1, grad_scale = 0.5 }, sgd_case { momentum = 0.9, step = 1 },
        sgd_case { momentum = 0.9, step = 2 },
      sgd_case { momentum = 0.9, step = 3, nesterov = true, weight_decay = 0.1 },
        sgd_case { momentum = 0.9, step = 1, nesterov = true },
      sgd_case { momentum = 0.5, dampening = 0.3, step = 4 }, sgd_case({ momentum = 0.9, step = 2 }, { { 40, 60 } }),
    },
    ref = function(params, grads, momenta, lr, given)
      local o = options(given, { momentum = 0, dampening = 0, weight_decay = 0, nesterov = false, grad_scale = 1,
        step = 1 })
      each(params, function(i, j)
        local p = params[i][j]
        local d = grads[i][j] * o.grad_scale + o.weight_decay * p
        if o.momentum ~= 0 then
          local b = o.step == 1 and d or o.momentum * momenta[i][j] + (1 - o.dampening) * d
          momenta[i][j] = b
          d = o.nesterov and d + o.momentum * b or b
        end
        params[i][j] = p - lr * d
      end)
    end,
    errors = {
      { { T { 2 }, T { 3 } }, { T { 2 } }, {}, 0.1, match = "grads: expected 2 tensors" },
      { { T { 2 } }, { T { 3 } }, {}, 0.1, match = "grads[0]: expected the shape of params[0]" },
      { { T { 2 } }, { T { 2 } }, {}, 0.1, opts = { momentum = 0.9 }, match = "momenta: expected 1 tensors" },
      { { T { 2 } }, { T { 2 } }, {}, 0.1, opts = { nesterov = true }, match = "nesterov" },
      { { T { 2 } }, { T { 2 } }, {}, 0.1, opts = { step = 0 }, match = "step" },
    },
  })

  local function adam_case(opts, shapes, spec)
    local l = lists(4, shapes or some, spec or { [4] = positive })
    return { l[1], l[2], l[3], l[4], opts.decoupled and 0.1 or 0.01, opts = opts }
  end

  row("adam_", {
    cases = {
      adam_case {}, adam_case { step = 3, weight_decay = 0.1 },
        adam_case { step = 2, weight_decay = 0.1, decoupled = true },
      adam_case { step = 10, beta1 = 0.8, beta2 = 0.95, eps = 1e-3, grad_scale = 0.25 }, adam_case({ step = 5 },
        { { 40, 60 }, { 7 } }),
      adam_case({ step = 5, decoupled = true, weight_decay = 0.01 }, some, { [3] = { dtype = "f32" },
        [4] = { dtype = "f32", range = { 0, 1 } } }),
      adam_case({ step = 5 }, some, { [2] = { dtype = "bf16" }, [3] = { dtype = "f32" }, [4] = { dtype = "f32",
        range = { 0, 1 } } }),
    },
    ref = function(params, grads, first, second, lr, given)
      local o = options(given, { beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, decoupled = false,
        grad_scale = 1, step = 1 })
      local c1, c2 = 1 - o.beta1 ^ o.step, 1 - o.beta2 ^ o.step
      each(params, function(i, j)
        local p, g = params[i][j], grads[i][j] * o.grad_scale
        if o.decoupled then p = p - lr * o.weight_decay * p else g = g + o.weight_decay * p end
        local m = o.beta1 * first[i][j] + (1 - o.beta1) * g
        local v = o.beta2 * second[i][j] + (1 - o.beta2) * g * g
        first[i][j], second[i][j] = m, v
        params[i][j] = p - lr * (m / c1) / (math.sqrt(v) / math.sqrt(c2) + o.eps)
      end)
    end,
    errors = {
      { { T { 2 } }, { T { 2 } }, { T { 2 } }, {}, 0.1, match = "exp_avg_sq: expected 1 tensors" },
      { { T { 2 } }, { T { 2 } }, { T { 2, 1 } }, { T { 2 } }, 0.1, match = "exp_avg[0]: expected the shape" },
      { { T { 2 } }, { T { 2 } }, { T { 2 } }, { T { 2 } }, 0.1, opts = { step = 0 }, match = "step" },
    },
  })

  local pairs_of = lists(2, some)
  row("lerp_list_", {
    cases = {
      { pairs_of[1], pairs_of[2], 0.3 }, { { T { 50, 50 } }, { T { 50, 50 } }, 0.999 }, { {}, {}, 0.5, grad = false },
      { { T { 6 } }, { T { 6, dtype = "f64" } }, 0.1 }, { { T { 6 } }, { T { 6, dtype = "bf16" } }, 0.1 },
    },
    ref = function(xs, ys, weight)
      each(xs, function(i, j) xs[i][j] = xs[i][j] + weight * (ys[i][j] - xs[i][j]) end)
    end,
    errors = { { { T { 2 } }, {}, 0.1, match = "ys: expected 1 tensors" }, { { T { 2 } }, { T { 3 } },
      0.1, match = "ys[0]: expected the shape" } },
  })

  local xs = lists(1, some)[1]
  row("norm_list", {
    cases = {
      { xs }, { xs, 1 }, { xs, inf }, { xs, -inf }, { xs, 3 }, { xs, 0 }, { {} }, { { T { 200, 100 } } },
      { { T { 0 } }, 1 },
      { { T { 3, values = { 1, nan, 2 } }, T { 2 } }, inf }, { { T { 3, values = { 1, nan, 2 } } } },
      { { T { 3, values = { 1, -inf, 2 } } }, 1 },
      { { T { 4, dtype = "f32" }, T { 4, dtype = "f64" }, T { 4, dtype = "bf16" } } },
    },
    ref = function(list, p)
      p = p or 2
      local sum = p == -inf and inf or 0
      each(list, function(i, j)
        local a = math.abs(list[i][j])
        if a ~= a or sum ~= sum then sum = nan
        elseif p == inf then sum = math.max(sum, a)
        elseif p == -inf then sum = math.min(sum, a)
        elseif p == 0 then sum = sum + (a ~= 0 and 1 or 0)
        else sum = sum + a ^ p end
      end)
      if p ~= inf and p ~= -inf and p ~= 0 then sum = sum ^ (1 / p) end
      return { shape = {}, dtype = "f64", sum }
    end,
    tol = 1e-5,
    big = function(ty) return ty.norm_list { ty.randn(300, 700), ty.randn(100000) } end,
  })
end
