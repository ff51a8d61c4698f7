-- Rows of src/ops/trellis.c. References add up all alignments, one by one.

return function(row, T)
  local inf = T.inf

  -- An array of f(position in C order).
  local function from(shape, f)
    local list = { shape = shape }
    for i = 1, T.count(shape) do list[i] = f(i - 1) end
    return list
  end

  local function i64(values, n) return T { n or #values, values = values, dtype = "i64" } end

  local function reduced(loss, reduction, by)
    loss.shape = { #loss }
    if reduction == "none" then return loss end
    local sum = 0.0
    for i, x in ipairs(loss) do sum = sum + x / (reduction == "sum" and 1 or by and math.max(1, by[i]) or 1) end
    return reduction == "sum" and sum or sum / #loss
  end

  -- ---- CTC: all sequences of classes, and what is left of them without repetitions and blanks ----

  local function ctc(x, targets, steps, lengths, opts)
    opts = opts or {}
    local n, classes, blank = x.shape[2], x.shape[3], opts.blank or 0
    local loss = {}
    for i = 1, n do
      local sum, path = 0.0, {}
      local function walk(t, log_p)
        if t == steps[i] then
          local left = {}
          for k = 1, t do
            if path[k] ~= blank and path[k] ~= path[k - 1] then left[#left + 1] = path[k] end
          end
          local same = #left == lengths[i]
          for k = 1, lengths[i] do same = same and left[k] == targets[(i - 1) * targets.shape[2] + k] end
          if same then sum = sum + math.exp(log_p) end
          return
        end
        for c = 0, classes - 1 do
          path[t + 1] = c
          walk(t + 1, log_p + x[(t * n + i - 1) * classes + c + 1])
        end
        path[t + 1] = nil
      end
      walk(0, 0.0)
      loss[i] = sum > 0 and -math.log(sum) or opts.zero_infinity and 0.0 or inf
    end
    return reduced(loss, opts.reduction or "mean", lengths)
  end

  local function log_probs(t, n, classes) return T { t, n, classes, range = { -3, -0.2 } } end
  local function ctc_case(opts, more)
    local case = { log_probs(4, 3, 3), T { 3, 2, values = { 1, 2, 2, 2, 1, -7 }, dtype = "i64" }, i64 { 4, 3, 2 },
      i64 { 2, 2, 1 }, opts = opts }
    for key, value in pairs(more or {}) do case[key] = value end
    return case
  end

  row("ctc_loss", {
    cases = {
      ctc_case {}, ctc_case { reduction = "none" }, ctc_case { reduction = "sum" },
      { log_probs(4, 2, 3), T { 2, 2, values = { 0, 1, 1, 0 }, dtype = "i32" }, T { 2, values = { 4, 3 }, dtype = "i32" },
        i64 { 2, 1 }, opts = { blank = 2, reduction = "sum" } },
      { log_probs(3, 2, 2), T { 2, 2, values = { 1, 1, 1, 1 }, dtype = "i64" }, i64 { 3, 2 }, i64 { 2, 0 },
        opts = { zero_infinity = true } },
      -- two equal targets want a blank between them: there is no way in two steps
      { log_probs(3, 2, 2), T { 2, 2, values = { 1, 1, 1, 1 }, dtype = "i64" }, i64 { 2, 3 }, i64 { 2, 2 },
        opts = { zero_infinity = true, reduction = "none" } },
      { log_probs(3, 2, 2), T { 2, 2, values = { 1, 1, 1, 1 }, dtype = "i64" }, i64 { 2, 0 }, i64 { 2, 0 },
        opts = { reduction = "none" }, grad = false },
      { log_probs(3, 1, 2), T { 1, 0, dtype = "i64" }, i64 { 3 }, i64 { 0 } },
      { log_probs(5, 0, 2), T { 0, 2, dtype = "i64" }, i64({}, 0), i64({}, 0), opts = { reduction = "sum" } },
    },
    ref = ctc,
    gradtol = { f32 = 2e-5 },
    errors = {
      { T { 4, 3 }, T { 3, 2, int = { 0, 2 } }, i64 { 4 }, i64 { 2 }, match = "[t, n, classes]" },
      { log_probs(4, 2, 3), T { 3, 2, int = { 0, 2 } }, i64 { 4, 4 }, i64 { 2, 2 },
        match = { "ctc_loss: targets: expected [2, s], got [3, 2]" } },
      { log_probs(4, 2, 3), T { 2, 2, int = { 0, 2 } }, i64 { 4 }, i64 { 2, 2 },
        match = { "ctc_loss: input_lengths: expected integers, one for each target, got [1]" } },
      { log_probs(4, 2, 3), T { 2, 2, int = { 0, 2 } }, i64 { 4, 4 }, i64 { 2, 2 }, opts = { blank = 3 },
        match = "blank: expected a class of log_probs [4, 2, 3]" },
      { log_probs(4, 2, 3), T { 2, 2, values = { 1, 3, 1, 1 }, dtype = "i64" }, i64 { 4, 4 }, i64 { 2, 2 },
        match = "3 .-is out of range for .-3" },
      { log_probs(4, 1, 3), T { 1, 2, int = { 0, 2 } }, i64 { 5 }, i64 { 2 }, match = "5" },
      { log_probs(4, 1, 3), T { 1, 2, int = { 0, 2 } }, i64 { 4 }, i64 { 3 }, match = "3" },
    },
    big = function(ty)
      ty.manual_seed(1)
      local x = ty.randn(60, 9, 20):log_softmax(2):requires_grad_()
      local loss = ty.ctc_loss(x, ty.randint(1, 20, { 9, 12 }), ty.full({ 9 }, 60, { dtype = "i64" }),
        ty.full({ 9 }, 12, { dtype = "i64" }))
      return loss:detach(), ty.grad(loss, { x })[1]
    end,
  })

  -- The logarithm of the sum over the ways in a graph, from `node` on: each step(node) is a list of { weight, node }, an
  -- end has the weight alone.
  local function ways(node, next_of)
    local sum = 0.0
    for _, edge in ipairs(next_of(node)) do
      sum = sum + math.exp(edge[1] + (edge[2] and ways(edge[2], next_of) or 0.0))
    end
    return math.log(sum)
  end

  local function ctc_graph(e, skip, steps, lengths, i)
    local t_max, m = e.shape[2], e.shape[3]
    local function weight(t, s) return e[(i * t_max + t) * m + s + 1] end
    local last = 2 * lengths[i + 1]
    local function after(node)
      local t, s, edges = node[1], node[2], {}
      if t == steps[i + 1] - 1 then return s >= last - 1 and { { 0.0 } } or {} end
      for by = 0, 2 do
        local to = s + by
        if to <= last and (by < 2 or skip[i * m + to + 1] ~= 0 and skip[i * m + to + 1]) then
          edges[#edges + 1] = { weight(t + 1, to), { t + 1, to } }
        end
      end
      return edges
    end
    local function before(node)
      local t, s, edges = node[1], node[2], {}
      if t == 0 then return s <= 1 and { { weight(0, s) } } or {} end
      for by = 0, 2 do
        if s - by >= 0 and (by < 2 or skip[i * m + s + 1] ~= 0 and skip[i * m + s + 1]) then
          edges[#edges + 1] = { weight(t, s), { t - 1, s - by } }
        end
      end
      return edges
    end
    return before, after
  end

  local function inside(steps, states, i, t, s) return t < steps[i + 1] and s < states end

  local function ctc_trellis(e, skip, steps, lengths)
    local n, t_max, m = e.shape[1], e.shape[2], e.shape[3]
    local loss, alpha = { shape = { n } }, { shape = e.shape }
    for i = 0, n - 1 do
      local before = ctc_graph(e, skip, steps, lengths, i)
      local sum, states = 0.0, 2 * lengths[i + 1] + 1
      for t = 0, t_max - 1 do
        for s = 0, m - 1 do
          local a = inside(steps, states, i, t, s) and ways({ t, s }, before) or -inf
          alpha[#alpha + 1] = a
          if t == steps[i + 1] - 1 and s >= states - 2 then sum = sum + math.exp(a) end
        end
      end
      loss[i + 1] = -math.log(sum)
    end
    return loss, alpha
  end

  local function ctc_inputs()
    return T { 2, 4, 5, range = { -2, -0.1 } }, T { 2, 5, values = { 0, 0, 0, 1, 0, 0, 0, 0, 0, 0 }, dtype = "bool" },
      i64 { 4, 3 }, i64 { 2, 1 }
  end
  local emission, skip, steps, lengths = ctc_inputs()
  row("ctc_trellis", {
    cases = { { emission, skip, steps, lengths } },
    ref = ctc_trellis,
    grad = "ctc_loss's row tests it", dtypes = { "f32", "f64" },
    errors = {
      { T { 2, 4, 4 }, T { 2, 4, dtype = "bool" }, steps, lengths, match = "skip: expected bool [n, states], an odd" },
      { emission, skip, T { 2, dtype = "f32" }, lengths, match = "input_lengths: expected i64" },
    },
  })

  row("ctc_trellis_backward", {
    dtypes = { "f32", "f64" },
    cases = { { T { 2 }, emission, skip, steps, lengths, T { 2, 4, 5 }, T { 2 } } },
    ref = function(g, e, skips, t_lengths, s_lengths, alpha, loss)
      return from(e.shape, function(p)
        local m, t_max = e.shape[3], e.shape[2]
        local i, t, s = p // (t_max * m), p // m % t_max, p % m
        if not inside(t_lengths, 2 * s_lengths[i + 1] + 1, i, t, s) then return 0.0 end
        local _, after = ctc_graph(e, skips, t_lengths, s_lengths, i)
        return -g[i + 1] * math.exp(alpha[p + 1] + ways({ t, s }, after) + loss[i + 1])
      end)
    end,
    errors = { { T { 3 }, emission, skip, steps, lengths, T { 2, 4, 5 }, T { 2 }, match = "g: expected one for each" } },
  })

  -- ---- transducers: all ways through the lattice ----

  local function rnnt_graph(blank, label, t_lengths, u_lengths, i)
    local t_max, m = blank.shape[2], blank.shape[3]
    local function place(t, u) return (i * t_max + t) * m + u + 1 end
    local t_last, u_last = t_lengths[i + 1] - 1, u_lengths[i + 1]
    local function after(node)
      local t, u, edges = node[1], node[2], {}
      if t < t_last then edges[1] = { blank[place(t, u)], { t + 1, u } }
      elseif u == u_last then edges[1] = { blank[place(t, u)] } end
      if u < u_last then edges[#edges + 1] = { label[place(t, u)], { t, u + 1 } } end
      return edges
    end
    local function before(node)
      local t, u, edges = node[1], node[2], {}
      if t == 0 and u == 0 then return { { 0.0 } } end
      if t > 0 then edges[1] = { blank[place(t - 1, u)], { t - 1, u } } end
      if u > 0 then edges[#edges + 1] = { label[place(t, u - 1)], { t, u - 1 } } end
      return edges
    end
    return before, after, t_last, u_last
  end

  local function rnnt(x, targets, t_lengths, u_lengths, opts)
    opts = opts or {}
    local n, t_max, m, classes = x.shape[1], x.shape[2], x.shape[3], x.shape[4]
    local none = opts.blank or -1
    none = none < 0 and none + classes or none
    local function log_p(p, class) -- of the place p, from 0 on
      local sum = 0.0
      for c = 1, classes do sum = sum + math.exp(x[p * classes + c]) end
      return x[p * classes + class + 1] - math.log(sum)
    end
    local blank = from({ n, t_max, m }, function(p) return log_p(p, none) end)
    local label = from({ n, t_max, m }, function(p)
      local i, u = p // (t_max * m), p % m
      local class = u < u_lengths[i + 1] and targets[i * (m - 1) + u + 1] or none
      return log_p(p, class)
    end)
    local loss = {}
    for i = 0, n - 1 do
      local _, after = rnnt_graph(blank, label, t_lengths, u_lengths, i)
      loss[i + 1] = t_lengths[i + 1] > 0 and -ways({ 0, 0 }, after) or inf
    end
    return reduced(loss, opts.reduction or "mean")
  end

  local function rnnt_case(opts)
    return { T { 2, 3, 3, 4 }, T { 2, 2, values = { 1, 0, 2, -3 }, dtype = "i64" }, i64 { 3, 2 }, i64 { 2, 1 },
      opts = opts }
  end
  row("rnnt_loss", {
    cases = {
      rnnt_case {}, rnnt_case { reduction = "none" }, rnnt_case { reduction = "sum", blank = 3 },
      { T { 2, 3, 2, 3 }, T { 2, 1, values = { 1, 2 }, dtype = "i32" }, T { 2, values = { 3, 1 }, dtype = "i32" },
        i64 { 0, 1 }, opts = { blank = 0 } },
      { T { 1, 3, 1, 2 }, T { 1, 0, dtype = "i64" }, i64 { 3 }, i64 { 0 } },
      { T { 2, 2, 2, 2 }, T { 2, 1, values = { 0, 0 }, dtype = "i64" }, i64 { 2, 0 }, i64 { 1, 1 },
        opts = { reduction = "none" }, grad = false },
      { T { 0, 2, 2, 2 }, T { 0, 1, dtype = "i64" }, i64({}, 0), i64({}, 0), opts = { reduction = "sum" } },
    },
    ref = rnnt,
    gradtol = { f32 = 2e-5 },
    errors = {
      { T { 2, 3, 3 }, T { 2, 2, int = { 0, 2 } }, i64 { 3, 3 }, i64 { 2, 2 }, match = "[n, t, u + 1, classes]" },
      { T { 2, 3, 3, 4 }, T { 2, 3, int = { 0, 2 } }, i64 { 3, 3 }, i64 { 2, 2 },
        match = "rnnt_loss: targets: expected [2, 2], got [2, 3]" },
      { T { 2, 3, 3, 4 }, T { 2, 2, int = { 0, 2 } }, i64 { 3, 3 }, i64 { 2, 2 }, opts = { blank = 4 },
        match = "blank: expected a class of logits [2, 3, 3, 4]" },
      { T { 1, 3, 3, 4 }, T { 1, 2, int = { 0, 2 } }, i64 { 4 }, i64 { 2 }, match = "4" },
      { T { 1, 3, 3, 4 }, T { 1, 2, int = { 0, 2 } }, i64 { 3 }, i64 { -1 }, match = "1" },
    },
    big = function(ty)
      ty.manual_seed(1)
      local x = ty.randn(7, 30, 9, 11):requires_grad_()
      local loss = ty.rnnt_loss(x, ty.randint(0, 10, { 7, 8 }), ty.full({ 7 }, 30, { dtype = "i64" }),
        ty.full({ 7 }, 8, { dtype = "i64" }))
      return loss:detach(), ty.grad(loss, { x })[1]
    end,
  })

  local blank, label = T { 2, 3, 4, range = { -2, -0.1 } }, T { 2, 3, 4, range = { -2, -0.1 } }
  local t_some, u_some = i64 { 3, 2 }, i64 { 3, 2 }
  row("rnnt_trellis", {
    cases = { { blank, label, t_some, u_some } },
    ref = function(b, l, t_lengths, u_lengths)
      local loss = from({ b.shape[1] }, function(i)
        local _, after = rnnt_graph(b, l, t_lengths, u_lengths, i)
        return -ways({ 0, 0 }, after)
      end)
      return loss, from(b.shape, function(p)
        local t_max, m = b.shape[2], b.shape[3]
        local i, t, u = p // (t_max * m), p // m % t_max, p % m
        if t >= t_lengths[i + 1] or u > u_lengths[i + 1] then return -inf end
        return ways({ t, u }, (rnnt_graph(b, l, t_lengths, u_lengths, i)))
      end)
    end,
    grad = "rnnt_loss's row tests it", dtypes = { "f32", "f64" },
    errors = { { blank, T { 2, 3, 3 }, t_some, u_some, match = "label: expected the shape and dtype of blank" } },
  })

  row("rnnt_trellis_backward", {
    dtypes = { "f32", "f64" },
    cases = { { T { 2 }, blank, label, t_some, u_some, T { 2, 3, 4 }, T { 2 } } },
    ref = function(g, b, l, t_lengths, u_lengths, alpha, loss)
      local function gradient(of, step)
        return from(b.shape, function(p)
          local t_max, m = b.shape[2], b.shape[3]
          local i, t, u = p // (t_max * m), p // m % t_max, p % m
          local _, after, t_last, u_last = rnnt_graph(b, l, t_lengths, u_lengths, i)
          if t > t_last or u > u_last then return 0.0 end
          local rest = step(t, u, t_last, u_last, after)
          return rest and -g[i + 1] * math.exp(alpha[p + 1] + of[p + 1] + rest + loss[i + 1]) or 0.0
        end)
      end
      return gradient(b, function(t, u, t_last, u_last, after)
        if t < t_last then return ways({ t + 1, u }, after) end
        return u == u_last and 0.0 or nil
      end), gradient(l, function(t, u, _, u_last, after) return u < u_last and ways({ t, u + 1 }, after) or nil end)
    end,
    errors = { { T { 2 }, blank, label, t_some, u_some, T { 2, 3, 5 }, T { 2 }, match = "alpha: expected the shape" } },
  })
end
