-- Rows of src/ops/long_conv.c. References: sums from the definitions.

return function(row, T)
  local function list(t) return table.move(t, 1, #t, 1, {}) end

  -- The lines of x [..., c, t]: how many, channels, positions.
  local function lines(x)
    local c, t = x.shape[#x.shape - 1], x.shape[#x.shape]
    return T.count(x.shape) // math.max(1, t), c, t
  end

  -- y[.., c, i] = sum over j of k[c, j] x[.., c, i + start - j], of i + start + j when turned; i < length.
  local function conv_lines(x, k, length, start, turned)
    local count, c, t = lines(x)
    if t == 0 then count = T.count(list(x.shape), 1, #x.shape - 1) end
    local taps, sign = k.shape[2], turned and 1 or -1
    local y = { shape = list(x.shape) }
    y.shape[#y.shape] = length
    for l = 0, count - 1 do
      for i = 0, length - 1 do
        local sum = 0.0
        for j = 0, taps - 1 do
          local at = i + start + sign * j
          if at >= 0 and at < t then sum = sum + k[l % c * taps + j + 1] * x[l * t + at + 1] end
        end
        y[#y + 1] = sum
      end
    end
    return y
  end

  -- dk[c, j] = sum over lines and i of x[.., c, i] g[.., c, i + start + j]
  local function conv_kernel(x, g, taps, start)
    local count, c, t = lines(x)
    local s = g.shape[#g.shape]
    local y = { shape = { c, taps } }
    for i = 1, c * taps do y[i] = 0.0 end
    for l = 0, count - 1 do
      for j = 0, taps - 1 do
        local sum, to = 0.0, l % c * taps + j + 1
        for i = 0, t - 1 do
          local at = i + start + j
          if at >= 0 and at < s then sum = sum + x[l * t + i + 1] * g[l * s + at + 1] end
        end
        y[to] = y[to] + sum
      end
    end
    return y
  end

  local function large(...) return table.move({ ... }, 1, select("#", ...), 1, { grad = false }) end

  row("fft_conv_lines", {
    cases = {
      { T { 3, 5 }, T { 3, 4 }, 5, 0 }, { T { 2, 3, 5 }, T { 3, 4 }, 5, 2 }, { T { 2, 3, 5 }, T { 3, 4 }, 6, -1, true },
      { T { 2, 1, 1 }, T { 1, 1 }, 1, 0 }, { T { 2, 2, 4 }, T { 2, 7 }, 9, -3 }, { T { 2, 4 }, T { 2, 3 }, 12, -6, true },
      { T { 2, 3, 5 }, T { 3, 4 }, 0, 0 }, { T { 0, 2, 5 }, T { 2, 4 }, 5, 0 }, { T { 2, 2, 0 }, T { 2, 4 }, 3, 0 },
      large(T { 3, 2, 70 }, T { 2, 60 }, 70, 0), large(T { 2, 2, 300 }, T { 2, 300 }, 300, 150),
      large(T { 9, 1, 130 }, T { 1, 500 }, 140, -20, true), large(T { 1, 3, 900 }, T { 3, 40 }, 900, 7),
    },
    ref = conv_lines, broadcast = false, tol = 1e-5,
    errors = {
      { T { 5 }, T { 1, 4 }, 5, 0, match = "x: expected [..., c, t]" },
      { T { 3, 5 }, T { 2, 4 }, 5, 0, match = "kernel: expected [3, taps]" },
      { T { 3, 5 }, T { 3, 0 }, 5, 0, match = "kernel: expected [3, taps]" },
      { T { 3, 5 }, T { 3, 4 }, -1, 0, match = "length: expected fewer than" },
      { T { 3, 5 }, T { 3, 4 }, 5, 1 << 40, match = "got start 1099511627776 and length 5" },
    },
    big = function(ty) return ty.core.fft_conv_lines(ty.randn(8, 16, 1000), ty.randn(16, 1000), 1000, 0) end,
  })

  row("fft_conv_kernel", {
    cases = {
      { T { 3, 5 }, T { 3, 5 }, 4, 0 }, { T { 2, 3, 5 }, T { 2, 3, 6 }, 4, -2 }, { T { 2, 2, 3, 4 }, T { 2, 2, 3, 4 }, 7, 1 },
      { T { 2, 3, 5 }, T { 2, 3, 5 }, 0, 0 }, { T { 0, 2, 5 }, T { 0, 2, 5 }, 3, 0 }, { T { 2, 2, 0 }, T { 2, 2, 4 }, 3, 0 },
      large(T { 3, 2, 300 }, T { 3, 2, 300 }, 300, -150), large(T { 1, 2, 700 }, T { 1, 2, 90 }, 80, 3),
    },
    ref = conv_kernel, broadcast = false, tol = 1e-5,
    errors = {
      { T { 5 }, T { 5 }, 4, 0, match = "x: expected [..., c, t]" },
      { T { 2, 3, 5 }, T { 3, 3, 5 }, 4, 0, match = "g: expected the dtype of x" },
      { T { 2, 3, 5 }, T { 2, 3, 5 }, -4, 0, match = "taps: expected fewer than" },
    },
    big = function(ty) return ty.core.fft_conv_kernel(ty.randn(8, 16, 1000), ty.randn(8, 16, 1000), 1000, 0) end,
  })

  local function long_conv(x, k, ahead) return conv_lines(x, k, x.shape[#x.shape], ahead or 0) end

  row("long_conv", {
    cases = {
      { T { 3, 5 }, T { 3, 5 } }, { T { 2, 3, 5 }, T { 3, 4 }, 2 }, { T { 2, 2, 3 }, T { 2, 7 }, 6 },
      { T { 0, 2, 5 }, T { 2, 5 } }, { T { 2, 2, 0 }, T { 2, 3 } }, { T { 2, 2, 2, 4 }, T { 2, 4 } },
      large(T { 3, 2, 80 }, T { 2, 80 }), large(T { 2, 2, 520 }, T { 2, 520 }, 260), large(T { 2, 1, 1100 }, T { 1, 30 }),
    },
    ref = long_conv, broadcast = false, tol = 1e-5,
    errors = {
      { T { 5 }, T { 1, 4 }, match = "x: expected [..., c, t]" },
      { T { 3, 5 }, T { 3, 4 }, 4, match = "ahead: expected 0 to 3, as the kernel has 4 taps, got 4" },
      { T { 3, 5 }, T { 3, 4 }, -1, match = "ahead: expected 0 to 3" },
      { T { 3, 5 }, T { 4, 5 }, match = "kernel: expected [3, taps], as many as x" },
      { T { 3, 5 }, T { 5 }, match = "kernel: expected [3, taps]" },
    },
    big = function(ty) return ty.long_conv(ty.randn(8, 16, 1000), ty.randn(16, 1000)) end,
  })
end
