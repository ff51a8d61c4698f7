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

  -- The gradient after clipping, and the average of a parameter moved.
  local function gradient(g, o)
    local limit = o.grad_limit or inf
    return math.max(-limit, math.min(limit, g)) * (o.grad_scale or 1)
  end
  local function average(averages, params, i, j, o)
    if not averages[1] then return end
    averages[i][j] = averages[i][j] + o.average_weight * (params[i][j] - averages[i][j])
  end

  local function sgd_case(opts, shapes, spec)
    local l = lists(4, shapes or some, spec)
    return { l[1], l[2], opts.momentum and l[3] or {}, opts.average_weight and l[4] or {}, 0.1, opts = opts }
  end

  row("sgd_", {
    cases = {
      sgd_case {}, sgd_case { weight_decay = 0.1, grad_scale = 0.5 }, sgd_case { momentum = 0.9, step = 1 },
        sgd_case { momentum = 0.9, step = 2 },
      sgd_case { momentum = 0.9, step = 3, nesterov = true, weight_decay = 0.1 },
        sgd_case { momentum = 0.9, step = 1, nesterov = true },
      sgd_case { momentum = 0.5, dampening = 0.3, step = 4 }, sgd_case({ momentum = 0.9, step = 2 }, { { 40, 60 } }),
      sgd_case { grad_limit = 0.5, grad_scale = 0.7, average_weight = 0.3 },
      sgd_case({ momentum = 0.9, step = 2, average_weight = 0.2 }, { { 3, 17 }, { 16 } }),
    },
    ref = function(params, grads, momenta, averages, lr, given)
      local o = options(given, { momentum = 0, dampening = 0, weight_decay = 0, nesterov = false, step = 1 })
      each(params, function(i, j)
        local p = params[i][j]
        local d = gradient(grads[i][j], o) + o.weight_decay * p
        if o.momentum ~= 0 then
          local b = o.step == 1 and d or o.momentum * momenta[i][j] + (1 - o.dampening) * d
          momenta[i][j] = b
          d = o.nesterov and d + o.momentum * b or b
        end
        params[i][j] = p - lr * d
        average(averages, params, i, j, o)
      end)
    end,
    errors = {
      { { T { 2 }, T { 3 } }, { T { 2 } }, {}, {}, 0.1, match = "grads: expected 2 tensors" },
      { { T { 2 } }, { T { 3 } }, {}, {}, 0.1, match = "grads[0]: expected the shape of params[0]" },
      { { T { 2 } }, { T { 2 } }, {}, {}, 0.1, opts = { momentum = 0.9 }, match = "momenta: expected 1 tensors" },
      { { T { 2 } }, { T { 2 } }, {}, {}, 0.1, opts = { nesterov = true }, match = "nesterov" },
      { { T { 2 } }, { T { 2 } }, {}, {}, 0.1, opts = { step = 0 }, match = "step" },
      { { T { 2 } }, { T { 2 } }, {}, {}, 0.1, opts = { grad_limit = -1 }, match = "limit" },
      { { T { 2 } }, { T { 2 } }, { T { 2 } }, {}, 0.1, match = "momenta: expected none" },
      { { T { 2 } }, { T { 2 } }, {}, { T { 3 } }, 0.1, match = "averages[0]: expected the shape" },
    },
  })

  local function adam_case(opts, shapes, spec)
    local l = lists(5, shapes or some, spec or { [4] = positive })
    return { l[1], l[2], l[3], l[4], opts.average_weight and l[5] or {}, opts.decoupled and 0.1 or 0.01, opts = opts }
  end

  row("adam_", {
    cases = {
      adam_case {}, adam_case { step = 3, weight_decay = 0.1 },
        adam_case { step = 2, weight_decay = 0.1, decoupled = true },
      adam_case { step = 10, beta1 = 0.8, beta2 = 0.95, eps = 1e-3, grad_scale = 0.25 }, adam_case({ step = 5 },
        { { 40, 60 }, { 7 } }),
      adam_case { step = 3, grad_limit = 0.5, grad_scale = 0.7, average_weight = 0.3 },
      adam_case({ step = 2, decoupled = true, average_weight = 0.1 }, { { 3, 17 }, { 16 } }),
      adam_case({ step = 4 }, { { 20 } }, { [2] = { range = { 0, 0 } }, [3] = { range = { 0, 0 } },
        [4] = { range = { 0, 0 } } }),
      adam_case({ step = 5, decoupled = true, weight_decay = 0.01 }, some, { [3] = { dtype = "f32" },
        [4] = { dtype = "f32", range = { 0, 1 } } }),
      adam_case({ step = 5 }, some, { [2] = { dtype = "bf16" }, [3] = { dtype = "f32" }, [4] = { dtype = "f32",
        range = { 0, 1 } } }),
    },
    ref = function(params, grads, first, second, averages, lr, given)
      local o = options(given, { beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, decoupled = false,
        step = 1 })
      local c1, c2 = 1 - o.beta1 ^ o.step, 1 - o.beta2 ^ o.step
      each(params, function(i, j)
        local p, g = params[i][j], gradient(grads[i][j], o)
        if o.decoupled then p = p - lr * o.weight_decay * p else g = g + o.weight_decay * p end
        local m = o.beta1 * first[i][j] + (1 - o.beta1) * g
        local v = o.beta2 * second[i][j] + (1 - o.beta2) * g * g
        first[i][j], second[i][j] = m, v
        params[i][j] = p - lr * (m / c1) / (math.sqrt(v) / math.sqrt(c2) + o.eps)
        average(averages, params, i, j, o)
      end)
    end,
    errors = {
      { { T { 2 } }, { T { 2 } }, { T { 2 } }, {}, {}, 0.1, match = "exp_avg_sq: expected 1 tensors" },
      { { T { 2 } }, { T { 2 } }, { T { 2, 1 } }, { T { 2 } }, {}, 0.1, match = "exp_avg[0]: expected the shape" },
      { { T { 2 } }, { T { 2 } }, { T { 2 } }, { T { 2 } }, {}, 0.1, opts = { step = 0 }, match = "step" },
    },
  })

  local function lion_case(opts, shapes, spec)
    local l = lists(4, shapes or some, spec)
    return { l[1], l[2], l[3], opts.average_weight and l[4] or {}, 0.1, opts = opts }
  end

  row("lion_", {
    cases = {
      lion_case {}, lion_case { weight_decay = 0.1, step = 7 }, lion_case { beta1 = 0.5, beta2 = 0.6, grad_scale = 0.3 },
      lion_case({ grad_limit = 0.5, average_weight = 0.2 }, { { 40, 60 }, { 7 } }),
      lion_case({}, { { 9 } }, { [2] = { range = { 0, 0 } }, [3] = { range = { 0, 0 } } }),
    },
    ref = function(params, grads, moments, averages, lr, given)
      local o = options(given, { beta1 = 0.9, beta2 = 0.99, weight_decay = 0 })
      each(params, function(i, j)
        local g, m = gradient(grads[i][j], o), moments[i][j]
        local mean = o.beta1 * m + (1 - o.beta1) * g
        local sign = mean > 0 and 1 or mean < 0 and -1 or 0
        params[i][j] = params[i][j] - lr * (sign + o.weight_decay * params[i][j])
        moments[i][j] = o.beta2 * m + (1 - o.beta2) * g
        average(averages, params, i, j, o)
      end)
    end,
    errors = {
      { { T { 2 } }, { T { 2 } }, {}, {}, 0.1, match = "exp_avg: expected 1 tensors" },
      { { T { 2 } }, { T { 2 } }, { T { 2 } }, {}, 0.1, opts = { step = 0 }, match = "step" },
    },
  })

  -- The rules of adaptive_: step(o, g, p, s, t, u, n) gives the new p and states; s, t and u are lists of states, o the
  -- options, n the number of the step.
  local rules = {}

  function rules.rmsprop(o, g, p, s, t, u)
    s = o.beta2 * s + (1 - o.beta2) * g ^ 2
    if u then u = o.beta2 * u + (1 - o.beta2) * g end
    local d = g / (math.sqrt(s - (u or 0) ^ 2) + o.eps)
    if t then
      t = o.beta1 * t + d
      d = t
    end
    return p - o.lr * d, s, t, u
  end

  function rules.adagrad(o, g, p, s, _, _, n)
    s = s + g ^ 2
    return p - o.lr / (1 + (n - 1) * o.low) * g / (math.sqrt(s) + o.eps), s
  end

  function rules.adadelta(o, g, p, s, t)
    s = o.beta2 * s + (1 - o.beta2) * g ^ 2
    local d = math.sqrt(t + o.eps) / math.sqrt(s + o.eps) * g
    return p - o.lr * d, s, o.beta2 * t + (1 - o.beta2) * d ^ 2
  end

  function rules.adamax(o, g, p, s, t, _, n)
    s, t = o.beta1 * s + (1 - o.beta1) * g, math.max(o.beta2 * t, math.abs(g) + o.eps)
    return p - o.lr / (1 - o.beta1 ^ n) * s / t, s, t
  end

  function rules.nadam(o, g, p, s, t, _, n)
    local function momentum(k) return o.beta1 * (1 - 0.5 * 0.96 ^ (k * o.low)) end
    local product = 1.0
    for k = 1, n do product = product * momentum(k) end
    s, t = o.beta1 * s + (1 - o.beta1) * g, o.beta2 * t + (1 - o.beta2) * g ^ 2
    local root = math.sqrt(t / (1 - o.beta2 ^ n)) + o.eps
    p = p - o.lr * (1 - momentum(n)) / (1 - product) * g / root
    return p - o.lr * momentum(n + 1) / (1 - product * momentum(n + 1)) * s / root, s, t
  end

  function rules.radam(o, g, p, s, t, _, n)
    local most = 2 / (1 - o.beta2) - 1
    local rho = most - 2 * n * o.beta2 ^ n / (1 - o.beta2 ^ n)
    s, t = o.beta1 * s + (1 - o.beta1) * g, o.beta2 * t + (1 - o.beta2) * g ^ 2
    local d = s / (1 - o.beta1 ^ n)
    if rho > 5 then
      d = d * math.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho))
        * math.sqrt(1 - o.beta2 ^ n) / (math.sqrt(t) + o.eps)
    end
    return p - o.lr * d, s, t
  end

  function rules.rprop(o, g, p, s, t)
    local factor = g * s > 0 and o.beta2 or g * s < 0 and o.beta1 or 1
    t = math.max(o.low, math.min(o.high, t * factor))
    if g * s < 0 then g = 0 end
    return p - t * (g > 0 and 1 or g < 0 and -1 or 0), g, t
  end

  function rules.asgd(o, g, p, s, _, _, n)
    local eta = o.lr / (1 + o.low * o.lr * (n - 1)) ^ o.beta1
    p = p * (1 - o.low * eta) - eta * g
    return p, s + 1 / math.max(1, n - 1 - o.high) * (p - s)
  end

  local function adaptive_case(rule, states, opts, shapes, spec)
    local l = lists(6, shapes or some, spec or { [3] = { range = { 0.3, 1 } }, [4] = positive,
      [5] = { range = { -0.4, 0.4 } } })
    return { l[1], l[2], l[3], states:find "t" and l[4] or {}, states:find "u" and l[5] or {},
      opts.average_weight and l[6] or {}, rule, 0.1, opts = opts }
  end
  local limits = { beta1 = 0.5, beta2 = 1.2, low = 1e-6, high = 50 }
  local few = { [2] = { values = { 1, -2, 0, 3 } }, [3] = { values = { 1, 1, 2, -1 } },
    [4] = { values = { 1, 1e-6, 2, 49 } } }

  row("adaptive_", {
    cases = {
      adaptive_case("rmsprop", "s", { beta1 = 0, beta2 = 0.99 }),
      adaptive_case("rmsprop", "st", { beta1 = 0.9, beta2 = 0.9, weight_decay = 0.1, step = 3 }),
      adaptive_case("rmsprop", "su", { beta1 = 0, beta2 = 0.99, eps = 1e-3 }, { { 3, 17 }, { 16 } }),
      adaptive_case("rmsprop", "stu", { beta1 = 0.5, beta2 = 0.99, average_weight = 0.3, grad_limit = 0.5 }),
      adaptive_case("adagrad", "s", { low = 0.1, step = 5 }), adaptive_case("adagrad", "s", { weight_decay = 0.1 }),
      adaptive_case("adadelta", "st", { beta2 = 0.9, eps = 1e-6, grad_scale = 0.3 }, { { 40, 60 }, { 7 } }),
      adaptive_case("adamax", "st", { step = 4, weight_decay = 0.1 }),
      adaptive_case("nadam", "st", { low = 4e-3, step = 1 }), adaptive_case("nadam", "st", { low = 4e-3, step = 700 }),
      adaptive_case("nadam", "st", { low = 4e-3, step = 9, weight_decay = 0.2, average_weight = 0.1 }),
      adaptive_case("nadamw", "st", { low = 4e-3, step = 9, weight_decay = 0.2 }),
      adaptive_case("radam", "st", { step = 2, weight_decay = 0.2 }), adaptive_case("radam", "st", { step = 50 }),
      adaptive_case("radamw", "st", { step = 9, weight_decay = 0.2 }, { { 50 } }),
      adaptive_case("rprop", "st", limits), adaptive_case("rprop", "st", limits, { { 4 } }, few),
      adaptive_case("asgd", "s", { low = 1e-2, beta1 = 0.75, high = 10, step = 3, weight_decay = 0.1 }),
      adaptive_case("asgd", "s", { low = 1e-2, beta1 = 0.75, high = 10, step = 20 }),
      adaptive_case("nadam", "st", { step = 5 }, some, { [2] = { dtype = "bf16" }, [3] = { dtype = "f32" },
        [4] = { dtype = "f32", range = { 0, 1 } } }),
    },
    ref = function(params, grads, first, second, third, averages, rule, lr, given)
      local o = options(given, { beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, low = 0, high = 0, step = 1,
        lr = lr })
      local plain, decoupled = rule:gsub("w$", "")
      each(params, function(i, j)
        local p, g = params[i][j], gradient(grads[i][j], o)
        if decoupled > 0 then p = p * (1 - lr * o.weight_decay) else g = g + o.weight_decay * p end
        local s, t, u
        p, s, t, u = rules[plain](o, g, p, first[i][j], second[i] and second[i][j], third[i] and third[i][j], o.step)
        params[i][j], first[i][j] = p, s
        if second[i] then second[i][j] = t end
        if third[i] then third[i][j] = u end
        average(averages, params, i, j, o)
      end)
    end,
    errors = {
      { { T { 2 } }, { T { 2 } }, { T { 2 } }, {}, {}, {}, "adam", 0.1, match = "rule" },
      { { T { 2 } }, { T { 2 } }, { T { 2 } }, {}, {}, {}, "adamax", 0.1, match = "second: expected 1 tensors" },
      { { T { 2 } }, { T { 2 } }, { T { 2 } }, { T { 2 } }, {}, {}, "adagrad", 0.1, match = "second: expected none" },
      { { T { 2 } }, { T { 2 } }, { T { 3 } }, {}, {}, {}, "adagrad", 0.1, match = "first[0]: expected the shape" },
      { { T { 2 } }, { T { 2 } }, { T { 2 } }, {}, {}, {}, "asgd", 0.1, opts = { step = 0 }, match = "step" },
    },
  })

  -- The quantization maps of Dettmers et al. 2022: values in order, and the code of the nearest.
  local function map_of(signed)
    local half = { 1 }
    for k = 0, 6 do
      local n = 2 ^ (signed and k or k + 1)
      for j = 0, n - 1 do half[#half + 1] = 10.0 ^ (k - 6) * (0.1 + 0.9 * (j + 0.5) / n) end
    end
    local values = { 0 }
    for i, v in ipairs(half) do
      values[#values + 1] = v
      if signed and i > 1 then values[#values + 1] = -v end
    end
    table.sort(values)
    return values
  end
  local signed_map, unsigned_map = map_of(true), map_of(false)

  local function nearest(map, x)
    local best
    for code = 1, 256 do
      if not best or math.abs(map[code] - x) < math.abs(map[best] - x) then best = code end
    end
    return best - 1
  end

  local function adam_8bit_case(opts, shapes, spec)
    local f32 = { dtype = "f32" }
    local l = lists(6, shapes, { f32, spec or f32, { dtype = "u8", range = { 0, 255 } }, { dtype = "u8",
      range = { 0, 255 } }, {}, f32 })
    for i, shape in ipairs(shapes) do
      l[5][i] = T { 2, (T.count(shape) + 255) // 256, dtype = "f32", range = { 0.1, 1 } }
    end
    return { l[1], l[2], l[3], l[4], l[5], opts.average_weight and l[6] or {}, 0.01, opts = opts }
  end

  -- References of codes may differ by one where a value lies between two of them.
  row("adam_8bit_", {
    cases = {
      adam_8bit_case({ step = 3 }, { { 20, 30 }, { 256 }, { 5 }, {}, { 0, 2 } }),
      adam_8bit_case({ step = 2, weight_decay = 0.1, decoupled = true, grad_limit = 0.5, grad_scale = 0.7,
        average_weight = 0.2 }, { { 3, 100 } }),
      adam_8bit_case({ step = 9 }, { { 70 } }, { dtype = "bf16" }),
    },
    ref = function(params, grads, first, second, scales, averages, lr, given)
      local o = options(given, { beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, decoupled = false })
      local c1, c2 = 1 - o.beta1 ^ o.step, 1 - o.beta2 ^ o.step
      for i, param in ipairs(params) do
        local count = T.count(param.shape)
        local blocks = (count + 255) // 256
        for block = 0, blocks - 1 do
          local from, to = block * 256 + 1, math.min(count, block * 256 + 256)
          local ms, vs, largest_m, largest_v = {}, {}, 0, 0
          for j = from, to do
            local p, g = param[j], gradient(grads[i][j], o)
            if o.decoupled then p = p - lr * o.weight_decay * p else g = g + o.weight_decay * p end
            local m = o.beta1 * signed_map[first[i][j] + 1] * scales[i][block + 1] + (1 - o.beta1) * g
            local v = o.beta2 * unsigned_map[second[i][j] + 1] * scales[i][blocks + block + 1] + (1 - o.beta2) * g * g
            ms[j], vs[j] = m, v
            largest_m, largest_v = math.max(largest_m, math.abs(m)), math.max(largest_v, v)
            param[j] = p - lr * (m / c1) / (math.sqrt(v) / math.sqrt(c2) + o.eps)
            average(averages, params, i, j, o)
          end
          for j = from, to do
            first[i][j] = nearest(signed_map, ms[j] / largest_m)
            second[i][j] = math.max(vs[j] > 0 and 1 or 0, nearest(unsigned_map, vs[j] / largest_v))
          end
          scales[i][block + 1], scales[i][blocks + block + 1] = largest_m, largest_v
        end
      end
    end,
    dtypes = { "f32" },
    errors = {
      { { T { 2 } }, { T { 2 } }, { T { 2 } }, { T { 2, dtype = "u8" } }, { T { 2, 1 } }, {}, 0.1,
        match = "exp_avg[0]: expected u8" },
      { { T { 2, dtype = "f64" } }, { T { 2 } }, { T { 2, dtype = "u8" } }, { T { 2, dtype = "u8" } }, { T { 2, 1 } },
        {}, 0.1, match = "params[0]: expected f32, f16 or bf16" },
      { { T { 300 } }, { T { 300 } }, { T { 300, dtype = "u8" } }, { T { 300, dtype = "u8" } },
        { T { 2, 1, dtype = "f32" } }, {}, 0.1, match = "scales[0]: expected [2, 2]" },
      { { T { 2 } }, { T { 2 } }, { T { 2, dtype = "u8" } }, { T { 2, dtype = "u8" } }, {}, {}, 0.1,
        match = "scales: expected 1 tensors" },
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
      { { T { 3, values = { 1, -inf, 2 } } }, 1 }, { xs, 2, 0.5 }, { xs, inf, 0.5 }, { xs, 1, opts = { limit = 0.3 } },
      { { T { 4, dtype = "f32" }, T { 4, dtype = "f64" }, T { 4, dtype = "bf16" } } },
    },
    ref = function(list, p, limit)
      p = p or 2
      if type(limit) == "table" then limit = limit.limit end
      local sum = p == -inf and inf or 0
      each(list, function(i, j)
        local a = math.abs(list[i][j])
        if limit and a > limit then a = limit end
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

  row("finite_list", {
    cases = {
      { xs }, { {} }, { { T { 200, 100 } } }, { { T { 0 } } }, { { T { 0 }, T { 2 } } },
      { { T { 3, values = { 1, nan, 2 } }, T { 2 } } }, { { T { 2 }, T { 3, values = { 1, 2, inf } } } },
      { { T { 3, values = { -inf, 1, 2 } } } }, { { T { 3, values = { 0, -1, 6e4 } } } },
      { { T { 4, dtype = "f32" }, T { 4, dtype = "f64" }, T { 4, dtype = "bf16" } } },
    },
    ref = function(list)
      local finite = 1
      each(list, function(i, j)
        local a = math.abs(list[i][j])
        if a ~= a or a == inf then finite = 0 end
      end)
      return { shape = {}, dtype = "bool", finite }
    end,
    big = function(ty)
      local x = ty.randn(300, 700)
      x["299, 699"] = nan
      return ty.stack { ty.finite_list { ty.randn(100000), ty.randn(300, 700) }, ty.finite_list { ty.randn(9), x } }
    end,
  })
end
