-- Rows of src/ops/conv_volumes.c. Reference: the sum over channels and kernel positions in any number of dimensions, and
-- for the gradients the same sum turned around.

return function(row, T)
  local from = T.from

  local function each(n, v, otherwise)
    if v == nil then v = otherwise end
    local list = {}
    for d = 1, n do list[d] = type(v) == "table" and (v[d] or v[1]) or v end
    return list
  end

  -- Positional parameters, then options by name, for n dimensions.
  local function parameters(n, list, order)
    local p = {}
    for i, v in pairs(list) do
      if type(v) == "table" and next(v) ~= nil and #v == 0 then
        for k, x in pairs(v) do p[k] = x end
      else
        p[order[i]] = v
      end
    end
    return {
      stride = each(n, p.stride, 1), padding = each(n, p.padding, 0), dilation = each(n, p.dilation, 1),
      groups = p.groups or 1, output_padding = each(n, p.output_padding, 0),
    }
  end

  local function zeros(shape) return from(shape, function() return 0.0 end) end
  local function flat(shape, index)
    local k = 0
    for d = 1, #shape do k = k * shape[d] + index[d] end
    return k + 1
  end

  -- visit(place in y, place in x, place in w) for every product of the convolution of x by w that gives y; shapes.
  local function products(y, x, w, p, visit)
    local n = #x - 2
    from(y, function(out)
      local first = out[2] // (w[1] // p.groups) * w[2]
      local taps = { w[2] }
      for d = 1, n do taps[1 + d] = w[2 + d] end
      from(taps, function(tap)
        local place, weight = { out[1], first + tap[1] }, { out[2], tap[1] }
        for d = 1, n do
          local i = out[2 + d] * p.stride[d] - p.padding[d] + tap[1 + d] * p.dilation[d]
          if i < 0 or i >= x[2 + d] then return 0 end
          place[2 + d], weight[2 + d] = i, tap[1 + d]
        end
        visit(flat(y, out), flat(x, place), flat(w, weight))
        return 0
      end)
      return 0
    end)
  end

  local function split(bias, rest)
    if bias and not bias.shape then
      table.insert(rest, 1, bias)
      bias = nil
    end
    return bias, rest
  end

  local function conv(x, w, bias, p)
    local n, shape = #x.shape - 2, { x.shape[1], w.shape[1] }
    for d = 1, n do
      shape[2 + d] = (x.shape[2 + d] + 2 * p.padding[d] - p.dilation[d] * (w.shape[2 + d] - 1) - 1) // p.stride[d] + 1
    end
    local y = from(shape, function(index) return bias and bias[index[2] + 1] or 0.0 end)
    products(shape, x.shape, w.shape, p, function(i, j, k) y[i] = y[i] + x[j] * w[k] end)
    return y
  end

  local function backward_input(g, w, size, p)
    local dx = zeros(size)
    products(g.shape, size, w.shape, p, function(i, j, k) dx[j] = dx[j] + g[i] * w[k] end)
    return dx
  end

  local names = { "stride", "padding", "dilation", "groups" }

  row("conv3d", {
    big = function(ty)
      local x, w = ty.randn(2, 4, 6, 14, 15):requires_grad_(), ty.randn(8, 4, 3, 3, 3):requires_grad_()
      local y = ty.conv3d(x, w, { padding = 1 })
      y:square():sum():backward()
      return y:detach(), x.grad, w.grad
    end,
    cases = {
      { T { 2, 3, 3, 4, 5 }, T { 4, 3, 2, 3, 2 }, T { 4 } }, { T { 1, 2, 4, 3, 4 }, T { 3, 2, 3, 3, 3 }, T { 3 }, 1, 1 },
      { T { 1, 4, 4, 4, 3 }, T { 4, 2, 2, 1, 2 }, opts = { stride = { 2, 1, 2 }, groups = 2 } },
      { T { 1, 2, 5, 3, 5 }, T { 2, 1, 2, 2, 2 }, T { 2 }, opts = { dilation = { 3, 1, 2 }, padding = { 2, 0, 1 }, groups = 2 } },
      { T { 2, 3, 3, 2, 2 }, T { 2, 3, 1, 1, 1 }, T { 2 } }, { T { 1, 2, 7, 2, 2 }, T { 2, 2, 2, 1, 1 }, opts = { stride = 3 } },
      { T { 0, 2, 3, 3, 3 }, T { 2, 2, 2, 2, 2 }, T { 2 } }, { T { 1, 1, 2, 3, 3 }, T { 1, 1, 2, 3, 3 }, opts = { padding = { 0, 1, 1 } } },
    },
    ref = function(x, w, bias, ...)
      local b, rest = split(bias, { ... })
      return conv(x, w, b, parameters(3, rest, names))
    end,
    errors = {
      { T { 3, 5, 5, 5 }, T { 4, 3, 3, 3, 3 }, match = "x: expected [n, c, d, h, w]" },
      { T { 1, 3, 5, 5, 5 }, T { 4, 2, 3, 3, 3 }, match = "weight: expected [out, 3 / 1 groups, kd, kh, kw]" },
      { T { 1, 3, 5, 5, 5 }, T { 4, 3, 3, 3, 3 }, T { 5 }, match = "bias: expected [4], got [5]" },
      { T { 1, 3, 2, 5, 5 }, T { 4, 3, 3, 3, 3 }, match = "does not fit" },
      { T { 1, 3, 5, 5, 5 }, T { 4, 3, 3, 3, 3 }, opts = { stride = { 1, 2 } }, match = "stride: expected one or three integers, got 2" },
      { T { 1, 4, 5, 5, 5 }, T { 4, 4, 3, 3, 3 }, opts = { groups = 0 }, match = "groups: expected at least 1" },
      { T { 1, 4, 3, 3, 3 }, T { 3, 2, 3, 3, 3 }, opts = { groups = 2 }, match = "multiple of 2 groups" },
    },
  })

  row("conv3d_backward_input", {
    cases = {
      { T { 2, 4, 2, 2, 4 }, T { 4, 3, 2, 3, 2 }, { 2, 3, 3, 4, 5 } },
      { T { 1, 4, 2, 4, 2 }, T { 4, 2, 2, 1, 2 }, { 1, 4, 4, 4, 3 }, opts = { stride = { 2, 1, 1 }, groups = 2 } },
      { T { 1, 2, 3, 3, 2 }, T { 2, 2, 2, 1, 2 }, { 1, 2, 5, 3, 3 }, { 2, 1, 2 }, { 1, 0, 1 }, { 2, 1, 2 } },
      { T { 0, 2, 2, 2, 2 }, T { 2, 2, 2, 2, 2 }, { 0, 2, 3, 3, 3 } },
    },
    ref = function(g, w, size, ...) return backward_input(g, w, size, parameters(3, { ... }, names)) end,
    errors = {
      { T { 1, 4, 3, 3, 3 }, T { 4, 3, 3, 3, 3 }, { 1, 3, 6, 5, 5 }, match = "g: expected [1, 4, 4, 3, 3]" },
      { T { 1, 4, 3, 3, 3 }, T { 4, 3, 3, 3, 3 }, { 3, 6 }, match = "size: expected five sizes" },
    },
  })

  row("conv3d_backward_weight", {
    cases = {
      { T { 2, 4, 2, 2, 4 }, T { 2, 3, 3, 4, 5 }, { 4, 3, 2, 3, 2 } },
      { T { 1, 4, 2, 4, 2 }, T { 1, 4, 4, 4, 3 }, { 4, 2, 2, 1, 2 }, opts = { stride = { 2, 1, 1 }, groups = 2 } },
      { T { 1, 2, 3, 3, 2 }, T { 1, 2, 5, 3, 3 }, { 2, 2, 2, 1, 2 }, { 2, 1, 2 }, { 1, 0, 1 }, { 2, 1, 2 } },
    },
    ref = function(g, x, size, ...)
      local dw = zeros(size)
      products(g.shape, x.shape, size, parameters(3, { ... }, names), function(i, j, k) dw[k] = dw[k] + g[i] * x[j] end)
      return dw
    end,
    errors = { { T { 1, 4, 3, 3, 3 }, T { 1, 3, 5, 5, 5 }, { 4, 3, 2, 3, 3 }, match = "g: expected [1, 4, 4, 3, 3]" } },
  })

  local function transposed(n)
    return function(x, w, bias, ...)
      local b, rest = split(bias, { ... })
      local p = parameters(n, rest, { "stride", "padding", "output_padding", "groups", "dilation" })
      local size = { x.shape[1], w.shape[2] * p.groups }
      for d = 1, n do
        size[2 + d] = (x.shape[2 + d] - 1) * p.stride[d] - 2 * p.padding[d] + p.dilation[d] * (w.shape[2 + d] - 1)
          + p.output_padding[d] + 1
      end
      local y = backward_input(x, w, size, p)
      from(size, function(index)
        local k = flat(size, index)
        y[k] = y[k] + (b and b[index[2] + 1] or 0.0)
        return 0
      end)
      return y
    end
  end

  row("conv_transpose1d", {
    cases = {
      { T { 2, 3, 4 }, T { 3, 4, 3 }, T { 4 } }, { T { 1, 4, 3 }, T { 4, 2, 2 }, T { 4 }, opts = { stride = 2, groups = 2 } },
      { T { 1, 2, 3 }, T { 2, 3, 3 }, opts = { stride = 2, padding = 1, output_padding = 1 } },
      { T { 1, 2, 4 }, T { 2, 2, 3 }, opts = { dilation = { 2 }, padding = 1 } },
      { T { 1, 2, 3 }, T { 2, 2, 2 }, T { 2 }, opts = { dilation = 3, padding = 1, output_padding = 2 } },
    },
    ref = transposed(1),
    errors = {
      { T { 3, 3 }, T { 3, 3, 3 }, match = "x: expected [n, c, w]" },
      { T { 1, 3, 3 }, T { 4, 3, 3 }, match = "weight: expected [c, out/groups, kw] with the 3 channels" },
      { T { 1, 3, 3 }, T { 3, 3, 3 }, opts = { output_padding = 1 }, match = "output_padding: expected less than the stride {1}" },
      { T { 1, 3, 3 }, T { 3, 3, 3 }, opts = { stride = { 1, 1 } }, match = "stride: expected one integer, got 2" },
      { T { 1, 3, 3 }, T { 3, 3, 3 }, T { 2 }, match = "bias: expected [3], got [2]" },
    },
  })

  row("conv_transpose3d", {
    cases = {
      { T { 2, 3, 2, 3, 2 }, T { 3, 4, 2, 1, 3 }, T { 4 } },
      { T { 1, 4, 2, 3, 2 }, T { 4, 2, 2, 2, 2 }, T { 4 }, opts = { stride = 2, groups = 2 } },
      { T { 1, 2, 3, 2, 2 }, T { 2, 3, 3, 3, 3 }, opts = { stride = 2, padding = 1, output_padding = 1 } },
      { T { 1, 2, 3, 2, 3 }, T { 2, 1, 2, 2, 2 }, opts = { dilation = { 3, 1, 1 }, padding = { 1, 0, 0 }, output_padding = { 2, 0, 0 } } },
      { T { 1, 2, 2, 3, 2 }, T { 2, 1, 1, 2, 2 } }, { T { 0, 2, 2, 2, 2 }, T { 2, 2, 2, 2, 2 } },
    },
    ref = transposed(3),
    errors = {
      { T { 1, 3, 3, 3 }, T { 3, 3, 3, 3, 3 }, match = "x: expected [n, c, d, h, w]" },
      { T { 1, 3, 3, 3, 3 }, T { 3, 3, 3, 3, 3 }, opts = { padding = 5 }, match = "the result would be empty" },
      { T { 1, 3, 3, 3, 3 }, T { 3, 3, 3, 3, 3 }, opts = { groups = 2 }, match = "divisible by 2 groups" },
    },
  })
end
