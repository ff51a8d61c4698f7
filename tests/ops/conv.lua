-- Rows of src/ops/conv.c. Reference: the sum over channels and kernel positions, and for the gradients the same sum turned around.

return function(row, T)
  local from, at = T.from, T.at

  local function pair(v, otherwise)
    if v == nil then v = otherwise end
    if type(v) == "number" then return { v, v } end
    return { v[1], v[2] or v[1] }
  end

  local f32 = { "f32" } -- of cases too large for all

  local names = { "stride", "padding", "dilation", "groups", "residual", "activation" }
  -- Positional parameters, then options by name.
  local function parameters(list, order)
    local p = {}
    for i, v in pairs(list) do
      if type(v) == "table" and next(v) ~= nil and #v == 0 then
        for k, x in pairs(v) do p[k] = x end
      else
        p[order[i]] = v
      end
    end
    return {
      stride = pair(p.stride, 1), padding = pair(p.padding, 0), dilation = pair(p.dilation, 1), groups = p.groups or 1,
      output_padding = pair(p.output_padding, 0), residual = p.residual, activation = p.activation or "none",
    }
  end

  local function positions(size, kernel, p, d)
    return (size + 2 * p.padding[d] - p.dilation[d] * (kernel - 1) - 1) // p.stride[d] + 1
  end

  -- visit(place in y, place in x, place in w) for every product of the convolution of x by w that gives y; shapes
  local function products(y, x, w, p, visit)
    local up, left = p.padding[1], p.padding[2]
    for n = 0, x[1] - 1 do
      for o = 0, w[1] - 1 do
        local first, weight = n * x[2] + o // (w[1] // p.groups) * w[2], o * w[2]
        for oi = 0, y[3] - 1 do
          for oj = 0, y[4] - 1 do
            local out = ((n * y[2] + o) * y[3] + oi) * y[4] + oj + 1
            for c = 0, w[2] - 1 do
              for ki = 0, w[3] - 1 do
                local i = oi * p.stride[1] - up + ki * p.dilation[1]
                if i >= 0 and i < x[3] then
                  local line, tap = ((first + c) * x[3] + i) * x[4] + 1, ((weight + c) * w[3] + ki) * w[4] + 1
                  for kj = 0, w[4] - 1 do
                    local j = oj * p.stride[2] - left + kj * p.dilation[2]
                    if j >= 0 and j < x[4] then visit(out, line + j, tap + kj) end
                  end
                end
              end
            end
          end
        end
      end
    end
  end

  local function flat(shape, a, b, c, d) return ((a * shape[2] + b) * shape[3] + c) * shape[4] + d + 1 end
  local function zeros(shape) return from(shape, function() return 0.0 end) end

  local function conv2d(x, w, bias, p)
    local shape = { x.shape[1], w.shape[1], positions(x.shape[3], w.shape[3], p, 1), positions(x.shape[4], w.shape[4], p, 2) }
    local y = from(shape, function(index) return bias and at(bias, { index[2] }) or 0.0 end)
    products(shape, x.shape, w.shape, p, function(i, j, k) y[i] = y[i] + x[j] * w[k] end)
    return y
  end

  local function backward_input(g, w, size, p)
    local dx = zeros(size)
    products(g.shape, size, w.shape, p, function(i, j, k) dx[j] = dx[j] + g[i] * w[k] end)
    return dx
  end

  row("conv2d", {
    big = function(ty) -- results and gradients
      local values, leaves = {}, {}
      local function r(...)
        leaves[#leaves + 1] = ty.randn({ ... }):requires_grad_()
        return leaves[#leaves]
      end
      local function add(...)
        values[#values + 1] = ty.conv2d(...)
        values[#values]:square():sum():backward()
      end
      add(r(4, 8, 32, 32), r(16, 8, 3, 3), r(16), { padding = 1 })
      add(r(4, 16, 30, 33), r(24, 16, 3, 3), { padding = 1 })
      add(r(2, 180, 7, 7), r(180, 180, 3, 3), { padding = 1 })
      add(r(2, 24, 31, 33), r(48, 24, 3, 3), { padding = 1, stride = 2 })
      add(r(2, 32, 20, 20), r(64, 32, 1, 1), { stride = 2 })
      add(r(3, 20, 30, 14), r(20, 1, 7, 7), r(20), { padding = 3, groups = 20 })
      add(r(2, 24, 20, 22), r(24, 24, 3, 3), r(24), { padding = 4, dilation = 4 })
      add(r(3, 32, 20, 18), r(32, 4, 3, 3), r(32), { padding = 1, groups = 8 })
      for _, x in ipairs(leaves) do values[#values + 1] = x.grad end
      for i, x in ipairs(values) do values[i] = x:detach() end
      return table.unpack(values)
    end,
    cases = {
      { T { 2, 3, 5, 6 }, T { 4, 3, 3, 3 } }, { T { 1, 3, 5, 5 }, T { 2, 3, 3, 3 }, T { 2 }, 1, 1 },
      { T { 2, 4, 6, 5 }, T { 6, 2, 3, 2 }, T { 6 }, opts = { stride = { 2, 1 }, padding = { 1, 0 }, groups = 2 } },
      { T { 1, 2, 7, 8 }, T { 3, 2, 3, 3 }, opts = { dilation = 2, padding = 2 } }, { T { 2, 3, 4, 4 }, T { 5, 3, 1, 1 }, T { 5 } },
      { T { 2, 4, 5, 5 }, T { 4, 1, 3, 3 }, T { 4 }, opts = { groups = 4, padding = 1 } }, -- depthwise
      { T { 1, 3, 8, 15 }, T { 3, 1, 7, 7 }, T { 3 }, opts = { groups = 3, padding = 3 } },
      { T { 1, 2, 6, 8 }, T { 2, 1, 5, 5 }, opts = { groups = 2, padding = 2, stride = { 1, 2 } } },
      { T { 1, 2, 9, 8 }, T { 2, 1, 3, 3 }, opts = { groups = 2, padding = 1, stride = 2 } },
      { T { 1, 2, 9, 7 }, T { 2, 1, 3, 2 }, opts = { groups = 2, padding = { 2, 1 }, stride = { 3, 4 }, dilation = { 2, 1 } } },
      { T { 1, 3, 6, 7 }, T { 3, 1, 1, 6 }, opts = { groups = 3, padding = { 0, 5 }, dilation = { 1, 2 } } },
      { T { 2, 37, 9, 31 }, T { 37, 1, 3, 3 }, T { 37 }, opts = { groups = 37, padding = 1 }, grad = false },
      { T { 1, 18, 40, 3 }, T { 18, 1, 7, 3 }, opts = { groups = 18, padding = { 3, 1 } }, grad = false },
      -- the same with vectors along rows: parts of a vector and of two, more rows than are taken at once, several bands
      { T { 2, 3, 17, 14 }, T { 3, 1, 5, 4 }, T { 3 }, opts = { groups = 3, padding = { 2, 1 } }, grad = false },
      { T { 1, 2, 9, 33 }, T { 2, 1, 7, 2 }, opts = { groups = 2, padding = { 3, 2 }, dilation = { 1, 3 } }, grad = false },
      { T { 3, 2, 1, 16 }, T { 2, 1, 3, 3 }, T { 2 }, 1, 1, 1, 2, T { 3, 2, 1, 16 }, "relu", grad = false },
      { T { 1, 2, 230, 11 }, T { 2, 1, 3, 3 }, opts = { groups = 2, padding = 1 }, grad = false, dtypes = f32 },
      { T { 1, 2, 5, 5 }, T { 4, 1, 3, 3 }, opts = { groups = 2, stride = 2, padding = 1 } },
      { T { 1, 1, 3, 3 }, T { 1, 1, 3, 3 } }, { T { 0, 2, 4, 4 }, T { 3, 2, 3, 3 }, T { 3 } },
      { T { 1, 17, 9, 9 }, T { 20, 17, 3, 3 }, opts = { padding = 1 }, grad = false },
      -- Winograd's tiles: parts of one, two vectors of channels and a rest, no padding and much, one position
      { T { 2, 16, 5, 6 }, T { 12, 16, 3, 3 }, T { 12 }, grad = false, dtypes = f32 },
      { T { 1, 13, 4, 7 }, T { 35, 13, 3, 3 }, T { 35 }, opts = { padding = { 2, 1 } }, grad = false, dtypes = f32 },
      { T { 1, 16, 2, 13 }, T { 16, 16, 3, 3 }, opts = { padding = { 1, 3 } }, grad = false, dtypes = f32 },
      { T { 1, 16, 1, 1 }, T { 16, 16, 3, 3 }, opts = { padding = 1 }, grad = false, dtypes = f32 },
      -- dilated, by phases: even ones, some a row or a column short, one direction alone, none
      { T { 2, 13, 8, 10 }, T { 5, 13, 3, 3 }, T { 5 }, 1, 2, 2, 1, T { 2, 5, 8, 10 }, "relu", grad = false, dtypes = f32 },
      { T { 1, 16, 11, 14 }, T { 18, 16, 3, 3 }, opts = { padding = { 3, 4 }, dilation = { 3, 4 } }, grad = false, dtypes = f32 },
      { T { 1, 12, 4, 13 }, T { 2, 12, 3, 3 }, T { 2 }, opts = { padding = { 1, 6 }, dilation = { 1, 3 } }, grad = false, dtypes = f32 },
      { T { 1, 12, 12, 4 }, T { 3, 12, 3, 3 }, opts = { padding = { 0, 1 }, dilation = { 2, 1 } }, grad = false, dtypes = f32 },
      { T { 1, 12, 9, 9 }, T { 3, 12, 3, 3 }, opts = { padding = 3, dilation = 2 }, grad = false, dtypes = f32 },
      -- residual and activation: with gradients apart, else in the kernel, of each algorithm
      { T { 1, 2, 3, 4 }, T { 3, 2, 3, 3 }, T { 3 }, 1, 1, 1, 1, T { 1, 3, 3, 4 }, "silu" },
      { T { 1, 2, 3, 4 }, T { 3, 2, 3, 3 }, T { 3 }, 1, 1, 1, 1, T { 1, 3, 3, 4 } },
      { T { 1, 16, 5, 6 }, T { 17, 16, 3, 3 }, T { 17 }, 1, 1, 1, 1, T { 1, 17, 5, 6 }, "relu", grad = false, dtypes = f32 },
      { T { 1, 3, 5, 6 }, T { 17, 3, 3, 3 }, T { 17 }, 2, 1, 1, 1, T { 1, 17, 3, 3 }, "gelu_tanh", grad = false, dtypes = f32 },
      { T { 1, 5, 5, 6 }, T { 7, 5, 1, 1 }, T { 7 }, 1, 0, 1, 1, T { 1, 7, 5, 6 }, "silu", grad = false, dtypes = f32 },
      { T { 1, 5, 5, 6 }, T { 7, 5, 1, 1 }, opts = { stride = 2, activation = "gelu" }, grad = false, dtypes = f32 },
      { T { 1, 2, 4, 5 }, T { 3, 2, 3, 3 }, T { 3 }, 1, { 1, 0 }, 1, 1, T { 1, 3, 4, 3 }, "sigmoid", grad = false },
      -- sums over taps: whole vectors of channels and a rest, strides, one kernel side longer, a kernel larger than x
      { T { 1, 18, 7, 6 }, T { 34, 18, 3, 3 }, T { 34 }, opts = { stride = 2, padding = 1 }, grad = false, dtypes = f32 },
      { T { 1, 32, 3, 9 }, T { 8, 16, 1, 4 }, opts = { stride = { 1, 3 }, groups = 2 }, grad = false, dtypes = f32 },
      { T { 1, 3, 2, 2 }, T { 2, 3, 5, 5 }, opts = { padding = 2 }, grad = false, dtypes = f32 },
      -- few channels, vectors along pixels: parts of one and of two, rows end to end, strides, more than one band
      { T { 2, 3, 5, 41 }, T { 15, 3, 3, 3 }, T { 15 }, 1, 1, grad = false, dtypes = f32 },
      { T { 1, 2, 7, 67 }, T { 5, 2, 3, 4 }, opts = { stride = { 2, 3 }, padding = { 2, 1 }, dilation = { 1, 2 } }, grad = false, dtypes = f32 },
      { T { 1, 3, 9, 70 }, T { 17, 3, 4, 4 }, T { 17 }, 4, 0, 1, 1, T { 1, 17, 2, 17 }, "silu", grad = false, dtypes = f32 },
      { T { 1, 1, 37, 19 }, T { 3, 1, 3, 1 }, opts = { activation = "relu" }, grad = false, dtypes = f32 },
      { T { 1, 4, 2, 3 }, T { 2, 4, 1, 3 }, opts = { padding = { 1, 9 }, stride = { 2, 1 } }, grad = false, dtypes = f32 },
      -- large patches side by side, of three channels and of whole vectors of them
      { T { 1, 3, 9, 53 }, T { 66, 3, 8, 12 }, T { 66 }, opts = { stride = { 8, 12 } }, grad = false, dtypes = f32, tol = 1e-4 },
      { T { 1, 64, 2, 6 }, T { 66, 64, 2, 2 }, opts = { stride = 2 }, grad = false, dtypes = f32, tol = 1e-4 },
      -- small groups, vectors along pixels: rows with gaps between and without, strides, several bands, more weights than one
      { T { 2, 6, 9, 11 }, T { 9, 2, 3, 3 }, T { 9 }, 1, 1, 1, 3, T { 2, 9, 9, 11 }, "relu", grad = false, dtypes = f32 },
      { T { 1, 8, 20, 7 }, T { 4, 4, 3, 3 }, T { 4 }, opts = { padding = 1, groups = 2 }, grad = false, dtypes = f32 },
      { T { 1, 4, 5, 16 }, T { 4, 2, 3, 3 }, T { 4 }, opts = { padding = 1, groups = 2 }, grad = false, dtypes = f32 }, -- whole vectors
      { T { 1, 6, 19, 18 }, T { 4, 3, 2, 2 }, T { 4 }, opts = { stride = 2, groups = 2 }, grad = false, dtypes = f32 },
      { T { 1, 4, 18, 9 }, T { 16, 2, 3, 2 }, opts = { stride = { 2, 1 }, padding = { 1, 2 }, dilation = { 1, 2 }, groups = 2 }, grad = false, dtypes = f32 },
      -- more than 64 channels, more than 128 positions
      { T { 2, 2, 9, 8 }, T { 70, 2, 3, 2 }, T { 70 }, opts = { padding = 1 }, grad = false, dtypes = f32 },
      -- 1x1: panels of positions from several images, parts of a panel, strides, two groups of output channels
      { T { 3, 5, 5, 4 }, T { 15, 5, 1, 1 }, T { 15 }, 1, 0, 1, 1, T { 3, 15, 5, 4 }, "relu", grad = false, dtypes = f32 },
      { T { 5, 3, 8, 9 }, T { 17, 3, 1, 1 }, T { 17 }, { 2, 1 }, grad = false, dtypes = f32 },
      { T { 1, 2, 13, 14 }, T { 3, 2, 1, 1 }, opts = { stride = { 3, 4 } }, grad = false, dtypes = f32 },
      -- windows of halves: images together and one by one, strides of 2 along rows of fewer than a vector and of more
      { T { 3, 3, 9, 7 }, T { 65, 3, 2, 2 }, T { 65 }, opts = { stride = 2, padding = 1, activation = "relu" },
        grad = false, dtypes = { "bf16" } },
      { T { 2, 9, 1, 67 }, T { 64, 9, 1, 3 }, opts = { stride = { 1, 2 }, padding = { 0, 1 } }, grad = false, dtypes = { "bf16" } },
      { T { 1, 2, 9, 67 }, T { 64, 2, 3, 3 }, opts = { stride = 2, padding = 1 }, grad = false, dtypes = { "bf16" } },
    },
    ref = function(x, w, bias, ...)
      local rest = { ... }
      if bias and not bias.shape then
        table.insert(rest, 1, bias)
        bias = nil
      end
      local p = parameters(rest, names)
      local y = conv2d(x, w, bias, p)
      for i = 1, #y do y[i] = T.activations[p.activation](y[i] + (p.residual and p.residual[i] or 0)) end
      return y
    end,
    errors = {
      { T { 1, 3, 5, 5 }, T { 4, 3, 3, 3 }, T { 4 }, 1, 0, 1, 1, T { 1, 4, 3, 2 }, match = "residual: expected [1, 4, 3, 3], got [1, 4, 3, 2]" },
      { T { 1, 3, 5, 5 }, T { 4, 3, 3, 3 }, opts = { activation = "swish" }, match = "activation" },
      { T { 3, 5, 5 }, T { 4, 3, 3, 3 }, match = "x: expected [n, c, h, w]" },
      { T { 1, 3, 5, 5 }, T { 4, 2, 3, 3 }, match = "weight: expected [out, " },
      { T { 1, 3, 5, 5 }, T { 4, 3, 3, 3 }, T { 5 }, match = "bias: expected [4], got [5]" },
      { T { 1, 3, 2, 2 }, T { 4, 3, 3, 3 }, match = "does not fit" }, { T { 1, 3, 5, 5 }, T { 4, 3, 3, 3 }, opts = { stride = 0 }, match = "stride" },
      { T { 1, 4, 5, 5 }, T { 4, 4, 3, 3 }, opts = { groups = 3 }, match = "groups" },
      { T { 1, 4, 5, 5 }, T { 4, 4, 3, 3 }, opts = { groups = 0 }, match = "groups: expected at least 1" },
      { T { 1, 4, 5, 5 }, T { 4, 4, 3, 3 }, opts = { padding = { 1, 2, 3 } }, match = "padding: expected one or two integers" },
      { T { 1, 4, 5, 5 }, T { 4, 4, 3, 3 }, opts = { padding = 1 << 40 }, match = "padding: expected integers of at most 2147483647" },
    },
  })

  row("conv2d_im2win", {
    big = function(ty)
      return ty.conv2d_im2win(ty.randn(2, 40, 40, 41), ty.randn(36, 20, 3, 3), ty.randn(36), { groups = 2 }),
        ty.conv2d_im2win(ty.randn(1, 30, 9, 9), ty.randn(100, 30, 5, 5), nil, { padding = 2, stride = 2 })
    end,
    cases = {
      { T { 2, 3, 5, 6 }, T { 4, 3, 3, 3 } }, { T { 1, 3, 5, 5 }, T { 2, 3, 3, 3 }, T { 2 }, 1, 1 },
      { T { 2, 4, 6, 5 }, T { 6, 2, 3, 2 }, T { 6 }, opts = { stride = { 2, 1 }, padding = { 1, 0 }, groups = 2 } },
      { T { 1, 2, 7, 8 }, T { 3, 2, 3, 3 }, opts = { dilation = 2, padding = 2 } }, { T { 2, 3, 4, 4 }, T { 5, 3, 1, 1 }, T { 5 } },
      { T { 1, 2, 9, 7 }, T { 2, 1, 3, 2 }, opts = { groups = 2, padding = { 2, 1 }, stride = { 3, 4 }, dilation = { 2, 1 } } },
      { T { 1, 3, 6, 7 }, T { 3, 1, 1, 6 }, opts = { groups = 3, padding = { 0, 5 }, dilation = { 1, 2 } } },
      { T { 0, 2, 4, 4 }, T { 3, 2, 3, 3 }, T { 3 } }, { T { 2, 0, 4, 4 }, T { 3, 0, 3, 3 }, T { 3 } },
      { T { 1, 3, 2, 2 }, T { 2, 3, 5, 5 }, opts = { padding = 2 } }, -- kernels larger than x
      -- several panels of kernels and a rest, several passes of channels, parts of a tile, chunks of places
      { T { 1, 18, 7, 6 }, T { 70, 18, 3, 3 }, T { 70 }, opts = { stride = 2, padding = 1 }, grad = false, dtypes = f32 },
      { T { 2, 50, 5, 4 }, T { 19, 50, 3, 3 }, T { 19 }, opts = { padding = 1 }, grad = false, tol = 1e-5 },
      { T { 1, 2, 42, 41 }, T { 34, 2, 2, 3 }, T { 34 }, grad = false, dtypes = f32 },
      { T { 1, 90, 4, 4 }, T { 40, 45, 3, 3 }, opts = { groups = 2, padding = 1 }, grad = false, dtypes = f32, tol = 1e-5 },
      { T { 1, 3, 4, 9 }, T { 140, 3, 2, 2 }, grad = false, dtypes = f32 },
    },
    ref = function(x, w, bias, ...)
      local rest = { ... }
      if bias and not bias.shape then
        table.insert(rest, 1, bias)
        bias = nil
      end
      return conv2d(x, w, bias, parameters(rest, names))
    end,
    errors = {
      { T { 3, 5, 5 }, T { 4, 3, 3, 3 }, match = "x: expected [n, c, h, w]" },
      { T { 1, 3, 5, 5 }, T { 4, 2, 3, 3 }, match = "weight: expected [out, " },
      { T { 1, 3, 5, 5 }, T { 4, 3, 3, 3 }, T { 5 }, match = "bias: expected [4], got [5]" },
      { T { 1, 3, 2, 2 }, T { 4, 3, 3, 3 }, match = "does not fit" },
      { T { 1, 4, 5, 5 }, T { 4, 4, 3, 3 }, opts = { groups = 3 }, match = "groups" },
    },
  })

  row("conv2d_backward_input", {
    cases = {
      { T { 2, 4, 3, 4 }, T { 4, 3, 3, 3 }, { 2, 3, 5, 6 } }, { T { 1, 6, 3, 4 }, T { 6, 2, 3, 2 }, { 1, 4, 6, 5 }, { 2, 1 }, { 1, 0 }, 1, 2 },
      { T { 1, 3, 7, 8 }, T { 3, 2, 3, 3 }, { 1, 2, 7, 8 }, 1, 2, 2 }, { T { 2, 4, 5, 5 }, T { 4, 1, 3, 3 }, { 2, 4, 5, 5 }, 1, 1, 1, 4 },
      { T { 2, 5, 4, 4 }, T { 5, 3, 1, 1 }, { 2, 3, 4, 4 } }, { T { 0, 3, 2, 2 }, T { 3, 2, 3, 3 }, { 0, 2, 4, 4 } },
      { T { 1, 18, 6, 5 }, T { 18, 35, 3, 3 }, { 1, 35, 6, 5 }, 1, 1, grad = false, dtypes = f32 },
      { T { 1, 16, 8, 4 }, T { 16, 12, 3, 3 }, { 1, 12, 4, 4 }, 1, { 3, 1 }, grad = false, dtypes = f32 },
      { T { 1, 17, 4, 3 }, T { 17, 33, 3, 3 }, { 1, 33, 7, 6 }, 2, 1, grad = false, dtypes = f32 },
      { T { 1, 2, 2, 3 }, T { 2, 2, 2, 3 }, { 1, 2, 6, 9 }, 3, { 0, 1 }, { 2, 1 }, grad = false, dtypes = f32 },
      { T { 1, 2, 2, 2 }, T { 2, 2, 1, 1 }, { 1, 2, 4, 3 }, { 3, 2 } },
      { T { 2, 13, 10, 13 }, T { 13, 17, 3, 3 }, { 2, 17, 10, 13 }, 1, { 2, 3 }, { 2, 3 }, grad = false, dtypes = f32 },
      { T { 1, 12, 7, 8 }, T { 12, 5, 3, 3 }, { 1, 5, 13, 8 }, 1, { 0, 1 }, { 3, 1 }, grad = false, dtypes = f32 },
      { T { 2, 9, 9, 11 }, T { 9, 2, 3, 3 }, { 2, 6, 9, 11 }, 1, 1, 1, 3, grad = false, dtypes = f32 },
      { T { 1, 4, 20, 8 }, T { 4, 4, 3, 2 }, { 1, 8, 18, 9 }, 1, { 2, 0 }, 1, 2, grad = false, dtypes = f32 },
      { T { 2, 20, 4, 5 }, T { 20, 19, 1, 1 }, { 2, 19, 8, 9 }, 2, grad = false, dtypes = f32 },
    },
    ref = function(g, w, size, ...) return backward_input(g, w, size, parameters({ ... }, names)) end,
    errors = {
      { T { 2, 4, 3, 3 }, T { 4, 3, 3, 3 }, { 2, 3, 5, 6 }, match = "g: expected [2, 4, 3, 4]" },
      { T { 2, 4, 3, 4 }, T { 4, 3, 3, 3 }, { 2, 3, 5 }, match = "size: expected four sizes" },
    },
  })

  row("conv2d_backward_weight", {
    cases = {
      { T { 2, 4, 3, 4 }, T { 2, 3, 5, 6 }, { 4, 3, 3, 3 } }, { T { 1, 6, 3, 4 }, T { 1, 4, 6, 5 }, { 6, 2, 3, 2 }, { 2, 1 }, { 1, 0 }, 1, 2 },
      { T { 1, 3, 7, 8 }, T { 1, 2, 7, 8 }, { 3, 2, 3, 3 }, 1, 2, 2 }, { T { 2, 4, 5, 5 }, T { 2, 4, 5, 5 }, { 4, 1, 3, 3 }, 1, 1, 1, 4 },
      { T { 2, 5, 4, 4 }, T { 2, 3, 4, 4 }, { 5, 3, 1, 1 } }, { T { 0, 3, 2, 2 }, T { 0, 2, 4, 4 }, { 3, 2, 3, 3 } },
      { T { 2, 18, 6, 5 }, T { 2, 35, 6, 5 }, { 18, 35, 3, 3 }, 1, 1, grad = false, dtypes = f32 },
      { T { 1, 16, 8, 4 }, T { 1, 12, 4, 4 }, { 16, 12, 3, 3 }, 1, { 3, 1 }, grad = false, dtypes = f32 },
      { T { 1, 17, 4, 3 }, T { 1, 33, 7, 6 }, { 17, 33, 3, 3 }, 2, 1, grad = false, dtypes = f32 },
      { T { 2, 2, 2, 3 }, T { 2, 2, 6, 9 }, { 2, 2, 2, 3 }, 3, { 0, 1 }, { 2, 1 }, grad = false, dtypes = f32 },
      { T { 2, 13, 10, 13 }, T { 2, 17, 10, 13 }, { 13, 17, 3, 3 }, 1, { 2, 3 }, { 2, 3 }, grad = false, dtypes = f32 },
      { T { 1, 5, 7, 8 }, T { 1, 12, 13, 8 }, { 5, 12, 3, 3 }, 1, { 0, 1 }, { 3, 1 }, grad = false, dtypes = f32 },
      -- small groups: seven results and a run of taps left over, strides and two bands, more groups than parts
      { T { 2, 14, 9, 11 }, T { 2, 6, 9, 11 }, { 14, 3, 3, 3 }, 1, 1, 1, 2, grad = false, dtypes = f32, tol = 1e-4 },
      { T { 1, 4, 18, 6 }, T { 1, 4, 35, 11 }, { 4, 2, 2, 3 }, 2, { 1, 1 }, 1, 2, grad = false, dtypes = f32, tol = 1e-4 },
      { T { 1, 34, 8, 8 }, T { 1, 34, 8, 8 }, { 34, 2, 3, 3 }, 1, 1, 1, 17, grad = false, dtypes = f32, tol = 1e-4 },
      { T { 1, 3, 20, 20 }, T { 1, 14, 20, 20 }, { 3, 14, 3, 3 }, 1, 1, grad = false, dtypes = f32, tol = 1e-5 }, -- sums of 400
      -- more than 64 results either way; sums in several parts, also of small groups
      { T { 1, 70, 2, 3 }, T { 1, 9, 4, 5 }, { 70, 9, 3, 3 }, grad = false, dtypes = f32 },
      { T { 2, 1, 17, 16 }, T { 2, 2, 17, 16 }, { 1, 2, 1, 1 }, grad = false, dtypes = f32, tol = 1e-4 },
      { T { 2, 2, 17, 16 }, T { 2, 2, 17, 16 }, { 2, 1, 1, 3 }, 1, { 0, 1 }, 1, 2, grad = false, dtypes = f32, tol = 1e-4 },
    },
    ref = function(g, x, size, ...)
      local dw = zeros(size)
      products(g.shape, x.shape, size, parameters({ ... }, names), function(i, j, k) dw[k] = dw[k] + g[i] * x[j] end)
      return dw
    end,
    errors = { { T { 2, 4, 3, 3 }, T { 2, 3, 5, 6 }, { 4, 3, 3, 3 }, match = "g: expected [2, 4, 3, 4]" } },
  })

  row("conv1d", {
    cases = {
      { T { 2, 3, 7 }, T { 4, 3, 3 }, T { 4 } }, { T { 1, 4, 8 }, T { 4, 2, 3 }, opts = { stride = 2, padding = 1, groups = 2 } },
      { T { 1, 2, 9 }, T { 2, 2, 3 }, opts = { dilation = 3 } }, { T { 0, 2, 5 }, T { 3, 2, 2 } },
    },
    ref = function(x, w, bias, ...)
      local rest = { ... }
      if bias and not bias.shape then
        table.insert(rest, 1, bias)
        bias = nil
      end
      local p = parameters(rest, names)
      p.stride[1], p.padding[1], p.dilation[1] = 1, 0, 1
      local function raised(t)
        local y = table.move(t, 1, #t, 1, {})
        y.shape = { t.shape[1], t.shape[2], 1, t.shape[3] }
        return y
      end
      local y = conv2d(raised(x), raised(w), bias, p)
      table.remove(y.shape, 3)
      return y
    end,
    errors = {
      { T { 3, 5 }, T { 4, 3, 3 }, match = "x: expected [n, c, w]" }, { T { 1, 3, 5 }, T { 4, 3, 3 }, opts = { stride = { 1, 1 } }, match = "stride: expected one integer" },
    },
  })

  row("conv_transpose2d", {
    cases = {
      { T { 2, 3, 3, 4 }, T { 3, 4, 3, 3 }, T { 4 } }, { T { 1, 4, 3, 3 }, T { 4, 2, 2, 2 }, T { 4 }, opts = { stride = 2, groups = 2 } },
      { T { 1, 2, 3, 3 }, T { 2, 3, 3, 3 }, opts = { stride = 2, padding = 1, output_padding = 1 } },
      { T { 1, 2, 4, 3 }, T { 2, 2, 3, 2 }, opts = { dilation = 2, padding = { 1, 0 } } }, { T { 0, 2, 3, 3 }, T { 2, 2, 2, 2 } },
      { T { 1, 2, 3, 3 }, T { 2, 2, 2, 3 }, T { 2 }, opts = { dilation = 3, padding = 1, output_padding = 2 } },
      { T { 1, 2, 3, 2 }, T { 2, 1, 2, 2 }, opts = { stride = { 2, 1 }, dilation = { 4, 1 }, output_padding = { 3, 0 } } },
    },
    ref = function(x, w, bias, ...)
      local rest = { ... }
      if bias and not bias.shape then
        table.insert(rest, 1, bias)
        bias = nil
      end
      local p = parameters(rest, { "stride", "padding", "output_padding", "groups", "dilation" })
      local size = { x.shape[1], w.shape[2] * p.groups }
      for d = 1, 2 do
        size[2 + d] = (x.shape[2 + d] - 1) * p.stride[d] - 2 * p.padding[d] + p.dilation[d] * (w.shape[2 + d] - 1) + p.output_padding[d] + 1
      end
      local y = backward_input(x, w, size, p)
      for n = 0, size[1] - 1 do
        for o = 0, size[2] - 1 do
          for i = 0, size[3] - 1 do
            for j = 0, size[4] - 1 do
              local k = flat(size, n, o, i, j)
              y[k] = y[k] + (bias and at(bias, { o }) or 0.0)
            end
          end
        end
      end
      return y
    end,
    errors = {
      { T { 1, 3, 3, 3 }, T { 4, 3, 3, 3 }, match = "weight: expected [3, out/groups, kh, kw]" },
      { T { 1, 3, 3, 3 }, T { 3, 3, 3, 3 }, opts = { output_padding = 1 },
        match = { "output_padding: expected less than the stride {1, 1} or the dilation {1, 1}", "{1, 1}" } },
      { T { 1, 3, 3, 3 }, T { 3, 3, 3, 3 }, opts = { stride = { 4, 2 }, dilation = { 1, 3 }, output_padding = 3 },
        match = "output_padding: expected less than" },
      { T { 1, 3, 3, 3 }, T { 3, 3, 3, 3 }, opts = { padding = 5 }, match = "the result would be empty" },
    },
  })
end
