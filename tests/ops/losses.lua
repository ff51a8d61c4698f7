-- Rows of src/ops/losses.c.

return function(row, T)
  local from, at, count, zip = T.from, T.at, T.count, T.zip
  local inf = T.inf

  local function is_options(t) return type(t) == "table" and not t.shape end

  local function sum(list, n)
    local s = 0.0
    for i = 1, n do s = s + list[i] end
    return s
  end

  -- The loss per element to what the reduction makes of it.
  local function reduced(loss, reduction, rows)
    local n = count(loss.shape)
    if reduction == "none" then return loss end
    if reduction == "sum" then return sum(loss, n) end
    return sum(loss, n) / (reduction == "batchmean" and rows or n)
  end

  -- ---- cross_entropy and nll_loss ----

  -- position of the classes first, then the others: [n, classes, ...] -> classes, index(of row, class)
  local function layout(x)
    if #x.shape == 1 then return 1, x.shape[1], 1 end
    local inner = 1
    for d = 3, #x.shape do inner = inner * x.shape[d] end
    return x.shape[1], x.shape[2], inner
  end

  local function class_loss(x, target, weight, opts, log_probs)
    local n, classes, inner = layout(x)
    local ignore, e = opts.ignore_index or -100, opts.label_smoothing or 0
    local probabilities = target.dtype ~= "i64" and target.dtype ~= "i32"
    local loss, total = {}, 0.0
    for a = 0, n - 1 do
      for b = 0, inner - 1 do
        local function i(c) return (a * classes + c) * inner + b + 1 end
        local top, s, lse = -inf, 0.0, 0.0
        for c = 0, classes - 1 do top = math.max(top, x[i(c)]) end
        for c = 0, classes - 1 do s = s + math.exp(x[i(c)] - top) end
        if not log_probs then lse = top + math.log(s) end
        local y, row_loss = not probabilities and target[a * inner + b + 1], 0.0
        for c = 0, classes - 1 do
          local t = probabilities and target[i(c)] or c == y and 1 or 0
          t = (t * (1 - e) + e / classes) * (weight and weight[c + 1] or 1)
          if t ~= 0 then row_loss = row_loss + t * (lse - x[i(c)]) end
        end
        -- classes have their own weight, also when the target is smoothed; an ignored row has none
        if y == ignore then row_loss = 0.0
        else total = total + (probabilities and 1 or weight and weight[y + 1] or 1) end
        loss[#loss + 1] = row_loss
      end
    end
    loss.shape = {}
    for d = 1, #x.shape do
      if d ~= (#x.shape == 1 and 1 or 2) then loss.shape[#loss.shape + 1] = x.shape[d] end
    end
    local reduction = opts.reduction or "mean"
    if reduction == "mean" then return sum(loss, n * inner) / total end
    return reduced(loss, reduction)
  end

  local function loss_ref(log_probs)
    return function(x, target, weight, opts)
      if is_options(weight) then weight, opts = nil, weight end
      return class_loss(x, target, weight, opts or {}, log_probs)
    end
  end

  local ignored = { 2, -100, 0, 1, -100, 2 }
  local function class_cases()
    return {
      { T { 6, 5 }, T { 6, int = { 0, 5 } } }, { T { 6, 5 }, T { 6, int = { 0, 5 } }, opts = { reduction = "sum" } },
      { T { 6, 5 }, T { 6, int = { 0, 5 } }, opts = { reduction = "none" } },
      { T { 6, 3 }, T { 6, values = ignored, dtype = "i64" } },
      { T { 6, 3 }, T { 6, values = ignored, dtype = "i32" }, T { 3, range = { 0.2, 2 } } },
      { T { 6, 3 }, T { 6, int = { 0, 3 } }, T { 3, range = { 0.2, 2 } },
        opts = { ignore_index = 1, reduction = "none" } },
      { T { 2, 4, 3 }, T { 2, 3, int = { 0, 4 } } },
      { T { 2, 4, 3, 2 }, T { 2, 3, 2, int = { 0, 4 } }, T { 4, range = { 0.2, 2 } }, opts = { reduction = "none" } },
      { T { 5 }, T { int = { 0, 5 } } }, { T { 5 }, T { int = { 0, 5 } }, opts = { reduction = "none" } },
      { T { 3, 100, range = { -20, 20 } }, T { 3, int = { 0, 100 } }, grad = false },
      { T { 0, 4 }, T { 0, int = { 0, 4 } } }, { T { 0, 4 }, T { 0, int = { 0, 4 } }, opts = { reduction = "none" } },
      { T { 2, 3 }, T { 2, values = { -100, -100 }, dtype = "i64" }, grad = false }, -- NaN: nothing counts
      { T { 18, 17 }, T { 18, int = { 0, 17 } } }, { T { 2, 64 }, T { 2, int = { 0, 64 } } }, -- rows in registers
      { T { 2, 300 }, T { 2, int = { 0, 300 } }, grad = false },
      -- places enough to lie along vectors
      { T { 2, 3, 17 }, T { 2, 17, int = { 0, 3 } } },
      { T { 1, 4, 5, 4 }, T { 1, 5, 4, int = { 0, 4 } }, T { 4, range = { 0.2, 2 } },
        opts = { ignore_index = 1, reduction = "none" } },
      { T { 2, 18, 300, range = { -20, 20 } }, T { 2, 300, int = { 0, 18 } }, grad = false },
      { T { 1, 2, 16 }, T { 1, 16, int = { -100, -99 } }, grad = false }, -- NaN
    }
  end
  local function class_errors()
    return {
      { T { 6, 5 }, T { 5, int = { 0, 5 } }, match = { "target: expected [6]", "[6, 5]", "[5]" } },
      { T { 2, 5, 3 }, T { 2, 5, int = { 0, 5 } }, match = { "target: expected [2, 3]", "[2, 5, 3]", "[2, 5]" } },
      { T { 2, 5 }, T { 2, values = { 1, 5 }, dtype = "i64" },
        match = "5 .-is out of range for .-5" },
      { T { 2, 5 }, T { 2, values = { -1, 3 }, dtype = "i32" },
        match = "%-1 .-is out of range for .-5" },
      { T { 2, 5 }, T { 2, int = { 0, 5 } }, T { 4 }, match = { "weight: expected a float tensor [5]", "got [4]" } },
      { T { 2, 5 }, T { 2, int = { 0, 5 } }, opts = { reduction = "max" }, match = { "reduction", "mean", "max" } },
      { T {}, T { int = { 0, 5 } }, match = "[n, classes, ...]" },
    }
  end

  local cases = class_cases()
  for _, case in ipairs {
    { T { 6, 5 }, T { 6, int = { 0, 5 } }, opts = { label_smoothing = 0.3 } },
    { T { 6, 3 }, T { 6, values = ignored, dtype = "i64" }, T { 3, range = { 0.2, 2 } },
      opts = { label_smoothing = 0.1 } },
    { T { 6, 3 }, T { 6, values = ignored, dtype = "i64" }, opts = { label_smoothing = 1.0, reduction = "none" } },
    { T { 2, 3, 16 }, T { 2, 16, int = { 0, 3 } }, T { 3, range = { 0.2, 2 } }, opts = { label_smoothing = 0.2 } },
    { T { 3, 4 }, T { 3, 4, range = { 0, 1 } } }, { T { 3, 4 }, T { 3, 4, range = { 0, 1 } },
      opts = { reduction = "sum" } },
    { T { 2, 4, 3 }, T { 2, 4, 3, range = { 0, 1 } }, T { 4, range = { 0.2, 2 } },
      opts = { reduction = "none", label_smoothing = 0.2 } },
    { T { 4 }, T { 4, range = { 0, 1 } }, opts = { label_smoothing = 0.2 } },
  } do cases[#cases + 1] = case end
  local more = class_errors()
  for _, case in ipairs {
    { T { 3, 4 }, T { 4, 3 }, match = { "target: expected class positions", "[3, 4]", "[4, 3]" } },
    { T { 3, 4 }, T { 3, int = { 0, 4 } }, opts = { label_smoothing = 1.5 }, match = { "label_smoothing", "1.5" } },
  } do more[#more + 1] = case end

  row("cross_entropy", {
    cases = cases, ref = loss_ref(false), errors = more, constant = { weight = true },
    big = function(ty)
      local x, target = ty.randn(700, 300):requires_grad_(), ty.randint(0, 300, { 700 })
      local y = ty.cross_entropy(x, target, { label_smoothing = 0.1 })
      return y:detach(), ty.grad(y, { x })[1]
    end,
  })

  local nll_errors = class_errors()
  nll_errors[#nll_errors + 1] = { T { 2, 3 }, T { 2, 3 }, match = "target: expected indices" }
  row("nll_loss", { cases = class_cases(), ref = loss_ref(true), errors = nll_errors, constant = { weight = true } })

  local function rows(x, target, weight, opts)
    if is_options(weight) then weight, opts = nil, weight end
    opts = opts or {}
    local classes = x.shape[2]
    local none = { ignore_index = opts.ignore_index, label_smoothing = opts.label_smoothing, reduction = "none" }
    local loss, ignore = class_loss(x, target, weight, none, opts.log_probs), opts.ignore_index or -100
    local lse = from(target.shape, function(p)
      local s = 0.0
      for c = 0, classes - 1 do s = s + math.exp(at(x, { p[1], c, table.unpack(p, 2) })) end
      return opts.log_probs and 0 or math.log(s)
    end)
    return loss, lse, from(target.shape, function(p)
      local y = at(target, p)
      return y == ignore and 0 or weight and weight[y + 1] or 1
    end)
  end

  local function wide(dtype) return (dtype == "f16" or dtype == "bf16") and "f32" or dtype end

  row("cross_entropy_rows", {
    cases = {
      { T { 6, 5 }, T { 6, int = { 0, 5 } } }, { T { 6, 3 }, T { 6, values = ignored, dtype = "i64" }, T { 3 } },
      { T { 6, 5 }, T { 6, int = { 0, 5 } }, opts = { log_probs = true } },
      { T { 2, 1200 }, T { 2, int = { 0, 1200 } }, opts = { label_smoothing = 0.1 }, grad = false, dtypes = { "f32", "bf16" } },
      { T { 2, 70 }, T { 2, int = { 0, 70 } }, grad = false, dtypes = { "f32", "bf16" } },
      { T { 6, 3 }, T { 6, values = ignored, dtype = "i32" }, T { 3 }, opts = { label_smoothing = 0.2 } },
      { T { 0, 3 }, T { 0, int = { 0, 3 } } }, { T { 2, 3, 0 }, T { 2, 0, int = { 0, 3 } } },
      { T { 2, 4, 3 }, T { 2, 3, int = { 0, 4 } } },
      { T { 1, 3, 2, 3 }, T { 1, 2, 3, values = ignored, dtype = "i32" }, T { 3 }, opts = { label_smoothing = 0.2 } },
      { T { 2, 4, 3 }, T { 2, 3, int = { 0, 4 } }, opts = { log_probs = true } },
    },
    ref = rows, constant = { weight = true }, dtype = wide,
    errors = {
      { T { 6 }, T { int = { 0, 5 } }, match = "[n, classes, ...]" },
      { T { 2, 5 }, T { 2, values = { 1, 5 }, dtype = "i64" },
        match = { "cross_entropy", "5 .-is out of range for .-5" } },
    },
  })

  row("cross_entropy_backward", {
    cases = {
      { T { 6 }, T { 6, 5 }, T { 6, int = { 0, 5 } }, T { 6 } },
      { T { 6 }, T { 6, 3 }, T { 6, values = ignored, dtype = "i64" }, T { 6 }, T { 3 },
        opts = { label_smoothing = 0.2 } },
      { T { 6 }, T { 6, 3 }, T { 6, values = ignored, dtype = "i32" }, T { 6 }, T { 3 },
        opts = { label_smoothing = 0.2, log_probs = true } },
      { T { 2, 3 }, T { 2, 3, 3 }, T { 2, 3, values = ignored, dtype = "i64" }, T { 2, 3 }, T { 3 },
        opts = { label_smoothing = 0.2 } },
      { T { 1, 2, 3 }, T { 1, 4, 2, 3 }, T { 1, 2, 3, int = { 0, 4 } }, T { 1, 2, 3 } },
      { T { 1, 6 }, T { 1, 3, 6 }, T { 1, 6, values = ignored, dtype = "i32" }, T { 1, 6 }, T { 3 },
        opts = { label_smoothing = 0.2, log_probs = true } },
    },
    ref = function(g, x, target, lse, weight, opts)
      if is_options(weight) then weight, opts = nil, weight end
      opts = opts or {}
      local classes, e = x.shape[2], opts.label_smoothing or 0
      return from(x.shape, function(p)
        local place = { p[1], table.unpack(p, 3) }
        local y, all, own = at(target, place), 0.0, nil
        if y == -100 then return 0 end
        for c = 0, classes - 1 do
          local t = ((c == y and 1 - e or 0) + e / classes)
          if c == y then t = (1 - e) * (weight and weight[y + 1] or 1) + e / classes * (weight and weight[c + 1] or 1)
          else t = t * (weight and weight[c + 1] or 1) end
          all = all + t
          if c == p[2] then own = t end
        end
        local share = opts.log_probs and 0 or math.exp(at(x, p) - at(lse, place))
        return at(g, place) * (all * share - own)
      end)
    end,
    errors = {
      { T { 5 }, T { 6, 5 }, T { 6, int = { 0, 5 } }, T { 6 }, match = { "expected [6]", "[6, 5]", "[5]" } },
      { T { 2 }, T { 2, 5 }, T { 2, values = { 1, 5 }, dtype = "i64" }, T { 2 },
        match = "5 .-is out of range for .-5" },
      { T { 6 }, T { 6, 5 }, T { 6, int = { 0, 5 } }, T { 6 }, T { 4 }, match = "weight: expected one for each class" },
    },
  })

  -- ---- losses between tensors of one shape ----

  -- f(x, target, options) per element
  local function pair(name, f, cases_, more_errors, extra)
    local errors_ = {
      { T { 3, 4 }, T { 4 }, match = { "target: expected the shape of x [3, 4]", "got [4]" } },
      { T { 3, 1 }, T { 3 }, match = { "target: expected the shape of x [3, 1]", "got [3]" } },
      { T { 3 }, T { 3 }, opts = { reduction = "avg" }, match = { "reduction", "\"mean\", \"sum\", \"none\"", "avg" } },
    }
    for _, case in ipairs(more_errors or {}) do errors_[#errors_ + 1] = case end
    local definition = {
      cases = cases_,
      ref = function(x, target, opts)
        opts = opts or {}
        local loss = zip(function(a, b) return f(a, b, opts) end, x, target)
        return reduced(loss, opts.reduction or "mean", x.shape[1])
      end,
      errors = errors_,
    }
    for k, v in pairs(extra or {}) do definition[k] = v end
    row(name, definition)
  end

  pair("mse_loss", function(a, b) return (a - b) ^ 2 end, {
    { T { 3, 4 }, T { 3, 4 } }, { T { 3, 4 }, T { 3, 4 }, opts = { reduction = "sum" } }, { T {}, T {} },
    { T { 2, 3 }, T { 2, 3 }, opts = { reduction = "none" } }, { T { 0, 2 }, T { 0, 2 }, opts = { reduction = "sum" } },
  })

  pair("l1_loss", function(a, b) return math.abs(a - b) end, {
    { T { 3, 4, range = { 0, 1 } }, T { 3, 4, range = { 1.2, 2 } } },
    { T { 3, 4, range = { 0, 1 } }, T { 3, 4, range = { -2, -0.2 } }, opts = { reduction = "sum" } },
    { T { range = { 0, 1 } }, T { range = { 2, 3 } } },
    { T { 2, 3, range = { 0, 1 } }, T { 2, 3, range = { 1.2, 2 } }, opts = { reduction = "none" } },
  })

  pair("huber_loss", function(a, b, opts)
    local delta, d = opts.delta or 1, math.abs(a - b)
    return d <= delta and d * d / 2 or delta * (d - delta / 2)
  end, {
    { T { 3, 4, range = { 0, 1 } }, T { 3, 4, range = { 2.2, 3 } } }, { T { 3, 4, range = { 0, 0.4 } },
      T { 3, 4, range = { 0, 0.4 } } },
    { T { 3, 4, range = { 0, 1 } }, T { 3, 4, range = { 1.2, 3 } }, opts = { delta = 0.1, reduction = "sum" } },
    { T { 2, 2, range = { 0, 0.1 } }, T { 2, 2, values = { 0.6, 0.8, 3, -5 } },
      opts = { delta = 2, reduction = "none" } },
    { T { 2, range = { 0, 1 } }, T { 2, values = { inf, -inf } }, opts = { reduction = "none" }, grad = false },
  }, { { T { 3 }, T { 3 }, opts = { delta = 0 }, match = "delta: expected a number above 0, got 0" } })

  local function xlogx(t) return t == 0 and 0 or t * math.log(t) end
  pair("kl_div", function(x, t, opts)
    if opts.log_target then return t == -inf and 0 or math.exp(t) * (t - x) end
    return t == 0 and 0 or xlogx(t) - t * x
  end, {
    { T { 3, 4, range = { -3, 0 } }, T { 3, 4, range = { 0.1, 1 } } },
    { T { 3, 4, range = { -3, 0 } }, T { 3, 4, range = { 0.1, 1 } }, opts = { reduction = "batchmean" } },
    { T { 3, 4, range = { -3, 0 } }, T { 3, 4, range = { -3, 0 } }, opts = { log_target = true, reduction = "sum" } },
    { T { 2, 2, values = { -1, -inf, -2, -0.5 } }, T { 2, 2, values = { 1, 0, 0, 0.5 } },
      opts = { reduction = "none" }, grad = false },
    { T { 2, values = { -1, -2 } }, T { 2, values = { -inf, -1 } },
      opts = { log_target = true, reduction = "none" }, grad = false },
  })

  row("bce_with_logits", {
    cases = {
      { T { 3, 4 }, T { 3, 4, range = { 0, 1 } } }, { T { 3, 4 }, T { 3, 4, range = { 0, 1 } },
        T { 4, range = { 0, 2 } } },
      { T { 3, 4 }, T { 3, 4, range = { 0, 1 } }, nil, T { 4, range = { 0, 3 } }, opts = { reduction = "sum" } },
      { T { 3, 4 }, T { 3, 4, range = { 0, 1 } }, T { 3, 1, range = { 0, 2 } }, T { 4, range = { 0, 3 } },
        opts = { reduction = "none" } },
      { T { 2, 3, values = { 90, -90, 90, -90, 0, 20 } }, T { 2, 3, values = { 1, 0, 0, 1, 0.5, 1 } },
        opts = { reduction = "none" }, grad = false },
      { T {}, T { range = { 0, 1 } } },
    },
    ref = function(x, target, weight, pos_weight, opts)
      if is_options(weight) then weight, opts = nil, weight end
      if is_options(pos_weight) then pos_weight, opts = nil, pos_weight end
      opts = opts or {}
      local loss = zip(function(a, t, w, p) return w * (p * t * T.softplus(-a) + (1 - t) * T.softplus(a)) end, x,
        target,
        weight or 1, pos_weight or 1)
      return reduced(loss, opts.reduction or "mean")
    end,
    errors = {
      { T { 3, 4 }, T { 4 }, match = { "target: expected the shape of x [3, 4]", "got [4]" } },
      { T { 3, 4 }, T { 3, 4 }, T { 3 }, match = { "[3, 4]", "[3]" } },
      { T { 3, 4 }, T { 3, 4 }, nil, T { 2, 3, 4 },
        match = { "pos_weight: expected a tensor that broadcasts", "[2, 3, 4]" } },
    },
  })

  -- ---- dropout ----

  row("dropout", {
    cases = {
      { T { 3, 4 }, 0.5, false }, { T { 3, 4 }, 0 }, { T { 3, 4 }, 1 }, { T {}, 0 }, { T { 0, 3 }, 0.5 },
    },
    ref = function(x, p) return p == 1 and from(x.shape, function() return 0 end) or x end,
    errors = {
      { T { 3 }, 1.5, match = "p: expected a probability in [0, 1], got 1.5" }, { T { 3 }, -0.1,
        match = "p: expected a probability" },
    },
    big = function(ty) return ty.dropout(ty.randn(300, 1001), 0.3) end,
  })

  row("dropout_apply", {
    cases = { { T { 3, 4 }, 0, 1, 2 }, { T { 3, 4 }, 1, 1, 2 }, { T { 3, 5 }, 0.5, 1, 2 }, { T { 0 }, 0.5, 1, 2 } },
    ref = function(x, p) return p == 0.5 and { shape = x.shape } or p == 1 and from(x.shape,
      function() return 0 end) or x end,
    errors = { { T { 3 }, 1.5, 0, 0, match = "p: expected a probability" } },
  })
end
