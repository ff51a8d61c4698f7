-- Rows of src/ops/linear_cross_entropy.c.

return function(row, T)
  local count = T.count

  local function is_options(t) return type(t) == "table" and not t.shape end

  -- The loss and its gradients for x [n, d] and weight [classes, d].
  local function loss_of(x, weight, target, of_class, opts)
    local classes, d = weight.shape[1], weight.shape[2]
    local n, e, ignore = count(target.shape), opts.label_smoothing or 0, opts.ignore_index or -100
    local loss, total, rows = 0.0, 0.0, {}
    for r = 0, n - 1 do
      local y, logits, sum = target[r + 1], {}, 0.0
      for c = 0, classes - 1 do
        local v = 0.0
        for i = 1, d do v = v + x[r * d + i] * weight[c * d + i] end
        logits[c], sum = v, sum + math.exp(v)
      end
      rows[r] = {}
      if y ~= ignore then
        local lse, all, t = math.log(sum), 0.0, {}
        for c = 0, classes - 1 do
          t[c] = ((c == y and 1 - e or 0) + e / classes) * (of_class and of_class[c + 1] or 1)
          all, loss = all + t[c], loss + t[c] * (lse - logits[c])
        end
        for c = 0, classes - 1 do rows[r][c] = all * math.exp(logits[c]) / sum - t[c] end
        total = total + (of_class and of_class[y + 1] or 1)
      end
    end
    local scale = opts.mean and 1 / total or 1
    local dx, dw = { shape = x.shape }, { shape = weight.shape }
    for i = 1, count(x.shape) do dx[i] = 0.0 end
    for i = 1, count(weight.shape) do dw[i] = 0.0 end
    for r = 0, n - 1 do
      for c, v in pairs(rows[r]) do
        for i = 1, d do
          dx[r * d + i] = dx[r * d + i] + scale * v * weight[c * d + i]
          dw[c * d + i] = dw[c * d + i] + scale * v * x[r * d + i]
        end
      end
    end
    return loss * scale, dx, dw
  end

  local ignored = { 2, -100, 0, 1, -100, 2 }
  row("linear_cross_entropy", {
    cases = {
      { T { 6, 4 }, T { 5, 4 }, T { 6, int = { 0, 5 } } },
      { T { 6, 4 }, T { 5, 4 }, T { 6, int = { 0, 5 } }, opts = { reduction = "sum", label_smoothing = 0.2 } },
      { T { 2, 3, 4 }, T { 3, 4 }, T { 2, 3, int = { 0, 3 } }, T { 3, range = { 0.2, 2 } } },
      { T { 6, 2 }, T { 3, 2 }, T { 6, values = ignored, dtype = "i64" } },
      { T { 6, 2 }, T { 3, 2 }, T { 6, values = ignored, dtype = "i32" }, T { 3, range = { 0.2, 2 } },
        opts = { label_smoothing = 0.1 } },
      { T { 4 }, T { 3, 4 }, T { int = { 0, 3 } } },
      { T { 0, 4 }, T { 3, 4 }, T { 0, int = { 0, 3 } }, opts = { reduction = "sum" } },
    },
    ref = function(x, weight, target, of_class, opts)
      if is_options(of_class) then of_class, opts = nil, of_class end
      opts = opts or {}
      local o = { ignore_index = opts.ignore_index, label_smoothing = opts.label_smoothing,
        mean = (opts.reduction or "mean") == "mean" }
      return (loss_of(x, weight, target, of_class, o))
    end,
    constant = { class_weight = true },
    errors = {
      { T { 6, 4 }, T { 5, 3 }, T { 6, int = { 0, 5 } }, match = { "x: expected [..., 3]", "[6, 4]" } },
      { T { 6, 4 }, T { 5, 4 }, T { 5, int = { 0, 5 } }, match = { "target: expected [6]", "[5]" } },
      { T { 2, 4 }, T { 5, 4 }, T { 2, values = { 1, 5 }, dtype = "i64" }, match = "out of range for .-5" },
      { T { 6, 4 }, T { 5, 4 }, T { 6, int = { 0, 5 } }, T { 4 }, match = "class_weight: expected a float tensor [5]" },
      { T { 6, 4 }, T { 5, 4 }, T { 6, int = { 0, 5 } }, opts = { reduction = "none" }, match = { "reduction", "mean" } },
      { T { 6, 4 }, T { 5, 4 }, T { 6, int = { 0, 5 } }, opts = { label_smoothing = 2 }, match = "label_smoothing" },
    },
    big = function(ty) -- rows in two parts
      local x, w = ty.randn(520, 8):requires_grad_(), ty.randn(40000, 8):requires_grad_()
      local y = ty.linear_cross_entropy(x, w, ty.randint(0, 40000, { 520 }))
      return y:detach(), table.unpack(ty.grad(y, { x, w }))
    end,
  })

  row("linear_cross_entropy_fused", {
    cases = {
      { T { 6, 4 }, T { 5, 4 }, T { 6, int = { 0, 5 } }, opts = { grad_x = true, grad_weight = true } },
      { T { 6, 2 }, T { 3, 2 }, T { 6, values = ignored, dtype = "i64" }, T { 3, range = { 0.2, 2 } },
        opts = { grad_x = true, label_smoothing = 0.1, mean = false } },
    },
    ref = function(x, weight, target, of_class, opts)
      if is_options(of_class) then of_class, opts = nil, of_class end
      local o = { label_smoothing = opts.label_smoothing, mean = opts.mean ~= false }
      local loss, dx, dw = loss_of(x, weight, target, of_class, o)
      return loss, opts.grad_x and dx or { shape = { 0 } }, opts.grad_weight and dw or { shape = { 0 } }
    end,
    dtype = function(dtype, i) return (dtype == "f16" or dtype == "bf16") and i ~= 2 and "f32" or dtype end,
    grad = "linear_cross_entropy's row tests it",
    errors = { { T { 2, 3, 4 }, T { 5, 4 }, T { 2, 3, int = { 0, 5 } }, match = "[n, d]" } },
  })
end
