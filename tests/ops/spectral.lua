-- Rows of src/ops/spectral.c. References: sums from the definitions.

return function(row, T)
  local function list(t) return table.move(t, 1, #t, 1, {}) end

  -- Arguments after x by name: some in order (false: left out), the rest in a table of options.
  local function named(names, ...)
    local args = {}
    for i, v in ipairs { ... } do
      if type(v) == "table" and not v.shape then
        for name, value in pairs(v) do args[name] = value end
      else
        args[names[i]] = v
      end
    end
    return args
  end

  -- The last `drop` dimensions of x as blocks; how many there are, how long, and the shape before them.
  local function blocks(x, drop)
    local shape, width = list(x.shape), 1
    for _ = 1, drop do width = width * table.remove(shape) end
    return T.count(shape), width, shape
  end

  row("frames", {
    cases = {
      { T { 7 }, 3, 2, 3 }, { T { 2, 8 }, 4, 1, 5 }, { T { 2, 8 }, 2, 3, 2 }, { T { 5 }, 5, 9, 1 },
      { T { 2, 3 }, 4, 1, 0 },
      { T { 0, 4 }, 2, 2, 2 },
    },
    ref = function(x, size, hop, count)
      local lines, t, shape = blocks(x, 1)
      local y = { shape = list(shape) }
      y.shape[#shape + 1], y.shape[#shape + 2] = count, size
      for l = 0, lines - 1 do
        for k = 0, count - 1 do
          for i = 0, size - 1 do y[#y + 1] = x[l * t + k * hop + i + 1] end
        end
      end
      return y
    end,
    broadcast = false,
    errors = {
      { T {}, 1, 1, 1, match = "x: expected [..., t]" }, { T { 7 }, 0, 1, 1, match = "size: expected a size" },
      { T { 7 }, 3, 0, 1, match = "hop" }, { T { 7 }, 3, 2, 4, match = "count: 4 frames of 3, 2 apart, do not fit" },
      { T { 7 }, 8, 1, 1, match = "do not fit" }, { T { 7 }, 3, 2, -1, match = "count" },
    },
  })

  local function overlap_add(x, hop, length)
    local count, size = x.shape[#x.shape - 1], x.shape[#x.shape]
    local lines, _, shape = blocks(x, 2)
    local y = { shape = list(shape) }
    y.shape[#shape + 1] = length
    for i = 1, lines * length do y[i] = 0.0 end
    for l = 0, lines - 1 do
      for k = 0, count - 1 do
        for i = 0, size - 1 do
          local at = l * length + k * hop + i + 1
          y[at] = y[at] + x[(l * count + k) * size + i + 1]
        end
      end
    end
    return y
  end

  row("overlap_add", {
    cases = {
      { T { 3, 4 }, 2, 8 }, { T { 2, 3, 4 }, 1, 9 }, { T { 2, 3, 2 }, 5, 12 }, { T { 1, 5 }, 3, 7 },
      { T { 2, 0, 4 }, 3, 5 },
      { T { 3, 0 }, 1, 4 }, { T { 0, 2, 3 }, 1, 4 },
      { T { 30, 64, 128 }, 50, 3300, grad = false, dtypes = { "f32", "f64" } },
    },
    ref = overlap_add, broadcast = false, tol = 4e-6,
    errors = {
      { T { 4 }, 1, 4, match = "x: expected [..., count, size]" },
      { T { 3, 4 }, 0, 9, match = "hop: expected at least 1" },
      { T { 3, 4 }, 2, 7, match = "length: expected at least the 3 frames" }, { T { 3, 4 }, 2, -1, match = "length" },
    },
    big = function(ty) return ty.overlap_add(ty.randn(20, 64, 128), 50, 3300) end,
  })

  -- ---- short-time Fourier transforms ----

  local NAMES = { "n_fft", "hop_length", "win_length", "window", "center", "pad_mode", "normalized", "onesided" }
  local BACK = { "n_fft", "hop_length", "win_length", "window", "center", "normalized", "onesided", "length" }

  -- What the window is over all n_fft positions, from 0.
  local function window_of(a)
    local n, w = a.n_fft, {}
    local width = (a.win_length or 0) > 0 and a.win_length or n
    for i = 0, n - 1 do
      local k = i - (n - width) // 2
      w[i] = k >= 0 and k < width and (a.window and a.window[k + 1] or 1.0) or 0.0
    end
    return w
  end
  local function or_true(v) return v == nil or v end
  local function hop_of(a) return (a.hop_length or 0) > 0 and a.hop_length or math.max(a.n_fft // 4, 1) end

  -- Sample i, perhaps outside, of a line of t.
  local function sample(get, i, t, mode)
    if i >= 0 and i < t then return get(i) end
    if mode == "constant" then return 0.0 end
    if mode == "replicate" then return get(i < 0 and 0 or t - 1) end
    if mode == "circular" then return get(i % t) end
    return get(i < 0 and -i or 2 * (t - 1) - i)
  end

  local function stft(x, ...)
    local a = named(NAMES, ...)
    local n, hop, w = a.n_fft, hop_of(a), window_of(a)
    local lines, t, shape = blocks(x, 1)
    local half = or_true(a.center) and n // 2 or 0
    local count, bins = (t + 2 * half - n) // hop + 1, or_true(a.onesided) and n // 2 + 1 or n
    local y = { shape = list(shape) }
    table.move({ bins, count, 2 }, 1, 3, #shape + 1, y.shape)
    local scale = a.normalized and 1 / math.sqrt(n) or 1
    for l = 0, lines - 1 do
      for f = 0, bins - 1 do
        for k = 0, count - 1 do
          local re, im = 0.0, 0.0
          for i = 0, n - 1 do
            local v = w[i] * sample(function(j) return x[l * t + j + 1] end, k * hop + i - half, t, a.pad_mode)
            local angle = 2 * math.pi * (f * i % n) / n
            re, im = re + v * math.cos(angle), im - v * math.sin(angle)
          end
          y[#y + 1], y[#y + 2] = scale * re, scale * im
        end
      end
    end
    return y
  end

  local function window(n) return T { n, range = { 0.2, 1 } } end

  row("rfft_frames", {
    cases = {
      { T { 12 }, nil, 5, 3, 3 }, { T { 2, 9 }, window(4), 4, 2, 3, 0.5 }, { T { 2, 7 }, window(7), 7, 1, 1 },
      { T { 4 }, nil, 1, 2, 2 }, { T { 0, 8 }, window(4), 4, 2, 3 }, { T { 2, 5 }, window(6), 6, 1, 0 },
      { T { 2, 90 }, window(34), 34, 3, 17, grad = false }, { T { 3, 600 }, window(512), 512, 40, 3, grad = false },
    },
    ref = function(x, w, n, hop, count, scale)
      local lines, t, shape = blocks(x, 1)
      local y = { shape = list(shape) }
      table.move({ count, n // 2 + 1, 2 }, 1, 3, #shape + 1, y.shape)
      for l = 0, lines - 1 do
        for k = 0, count - 1 do
          for f = 0, n // 2 do
            local re, im = 0.0, 0.0
            for i = 0, n - 1 do
              local v, angle = x[l * t + k * hop + i + 1] * (w and w[i + 1] or 1), 2 * math.pi * (f * i % n) / n
              re, im = re + v * math.cos(angle), im - v * math.sin(angle)
            end
            y[#y + 1], y[#y + 2] = re * (scale or 1), im * (scale or 1)
          end
        end
      end
      return y
    end,
    broadcast = false, tol = 4e-6,
    errors = {
      { T {}, nil, 1, 1, 1, match = "x: expected [..., t]" }, { T { 7 }, nil, 0, 1, 1, match = "size" },
      { T { 7 }, nil, 3, 2, 4, match = "count: 4 frames of 3, 2 apart, do not fit" },
      { T { 7 }, T { 4 }, 3, 2, 2, match = "window: expected [3] of x's dtype" },
    },
    big = function(ty) return ty.core.rfft_frames(ty.randn(8, 4000), ty.rand(256), 256, 64, 50) end,
  })

  row("stft", {
    cases = {
      { T { 12 }, 8 }, { T { 2, 10 }, 6, 3 }, { T { 2, 9 }, 5, 2, 0, window(5) }, { T { 11 }, 8, 2, 5, window(5) },
      { T { 11 }, 8, 3, 4 }, { T { 12 }, opts = { n_fft = 6, center = false } },
      { T { 9 }, 6, 2, 6, window(6), true, "constant" },
      { T { 9 }, 6, 2, 6, window(6), true, "replicate" }, { T { 9 }, 6, 2, 6, window(6), true, "circular", true },
      { T { 8 }, 4, 2, 4, window(4), false, "reflect", true, false },
      { T { 2, 1, 6 }, 5, 1, 0, opts = { onesided = false } },
      { T { 3 }, 1 }, { T { 0, 8 }, 4 }, { T { 5 }, 4, opts = { window = window(4) } },
    },
    ref = stft, broadcast = false, tol = 4e-6,
    errors = {
      { T {}, 4, match = "x: expected [..., t]" }, { T { 9 }, 0, match = "n_fft: expected 1 to" },
      { T { 9 }, 4, -1, match = "hop_length" }, { T { 9 }, 4, 1, 5, match = "win_length: expected 1 to n_fft, 4" },
      { T { 9 }, 4, 1, 4, T { 3 }, match = "window: expected floats [4]" },
      { T { 9 }, 4, 1, 4, T { 4, dtype = "i64" }, match = "window: expected floats [4]" },
      { T { 2 }, 4, match = "x: expected more samples to fill up n_fft / 2 = 2" },
      { T { 3 }, 4, 1, 4, T { 4 }, false, match = "x: expected at least n_fft = 4 samples" },
      { T { 9 }, 4, 1, 4, T { 4 }, true, "other", match = 'pad_mode: expected one of "reflect"' },
    },
    big = function(ty) return ty.stft(ty.randn(8, 4000), 256, 64, 256, ty.hann_window(256)) end,
  })

  -- Each piece by the inverse transform's sum, weighted, over the sum of squares of the windows.
  local function istft(x, ...)
    local a = named(BACK, ...)
    local n, hop, w = a.n_fft, hop_of(a), window_of(a)
    local nd, whole = #x.shape, not or_true(a.onesided)
    local bins, count = x.shape[nd - 2], x.shape[nd - 1]
    local lines, _, shape = blocks(x, 3)
    local all = n + (count - 1) * hop
    local start = or_true(a.center) and n // 2 or 0
    local length = (a.length or -1) >= 0 and a.length or all - 2 * start
    local scale = 1 / n * (a.normalized and math.sqrt(n) or 1)
    local y = { shape = list(shape) }
    y.shape[#shape + 1] = math.max(length, 0)
    for l = 0, lines - 1 do
      local sum, weight = {}, {}
      for i = 0, all - 1 do sum[i], weight[i] = 0.0, 0.0 end
      for k = 0, count - 1 do
        for i = 0, n - 1 do
          local v = 0.0
          for f = 0, bins - 1 do
            local at = ((l * bins + f) * count + k) * 2
            local angle = 2 * math.pi * (f * i % n) / n
            local twice = (whole or f == 0 or 2 * f == n) and 1 or 2
            local im = not whole and twice == 1 and 0 or x[at + 2]
            v = v + twice * (x[at + 1] * math.cos(angle) - im * math.sin(angle))
          end
          local at = k * hop + i
          sum[at], weight[at] = sum[at] + scale * v * w[i], weight[at] + w[i] ^ 2
        end
      end
      for i = start, start + length - 1 do
        y[#y + 1] = i < all and weight[i] > 1e-11 and sum[i] / weight[i] or 0.0
      end
    end
    return y
  end

  row("istft", {
    cases = {
      { T { 5, 4, 2 }, 8 }, { T { 2, 4, 3, 2 }, 6, 3, 6, window(6) }, { T { 3, 4, 2 }, 5, 2, 4, window(4) },
      { T { 3, 3, 2 }, 4, 4, 2, window(2), false }, { T { 4, 3, 2 }, 4, 2, 4, window(4), false, true, false },
      { T { 5, 4, 2 }, 8, 2, 8, window(8), true, false, true, 5 },
      { T { 5, 4, 2 }, 8, 2, 8, window(8), true, false, true, 14 },
      { T { 3, 2, 2 }, 4, opts = { length = 3, normalized = true } }, { T { 0, 3, 2, 2 }, 4 }, { T { 1, 3, 2 }, 1 },
    },
    ref = istft, broadcast = false, tol = 8e-6,
    errors = {
      { T { 5, 2 }, 8, match = "x: expected [..., frequencies, frames, 2]" },
      { T { 4, 3, 2 }, 8, match = "x: expected [..., 5, frames, 2]" },
      { T { 5, 3, 1 }, 8, match = "x: expected [..., 5, frames, 2]" },
      { T { 5, 0, 2 }, 8, match = "x: expected [..., 5, frames, 2]" },
      { T { 5, 3, 2 }, 0, match = "n_fft: expected 1 to" }, { T { 5, 3, 2 }, 8, -1, match = "hop_length" },
      { T { 5, 3, 2 }, 8, 1, 9, match = "win_length" },
      { T { 5, 3, 2 }, 8, 1, 8, T { 7 }, match = "window: expected floats [8]" },
      { T { 5, 3, 2 }, 8, 1, 8, T { 8 }, true, false, true, -2, match = "length" },
    },
  })

  -- ---- windows ----

  local function window_ref(names, f)
    return function(n, ...)
      local a = named(names, ...)
      local y = { shape = { n }, dtype = a.dtype or "f32" }
      for k = 0, n - 1 do y[k + 1] = n == 1 and 1.0 or f(k / (or_true(a.periodic) and n or n - 1), a) end
      return y
    end
  end

  local function window_row(name, f, names, more)
    local cases = { { 8 }, { 7, false }, { 1 }, { 1, false }, { 0 }, { 2, false }, { 6, opts = { dtype = "f64" } },
      { 5, opts = { dtype = "bf16", periodic = false } } }
    table.move(more or {}, 1, #(more or {}), #cases + 1, cases)
    row(name, {
      cases = cases, ref = window_ref(names or { "periodic" }, f), dtypes = { "f32" }, dtype = "f32",
      errors = {
        { -1, match = "n: expected 0 to" }, { 4, opts = { dtype = "i64" }, match = "dtype: expected a float" },
        name == "kaiser_window" and { 4, true, 701, match = "beta: expected at most 700" } or nil,
      },
    })
  end

  local function cos(x) return math.cos(2 * math.pi * x) end
  window_row("hann_window", function(x) return 0.5 - 0.5 * cos(x) end)
  window_row("hamming_window", function(x, a) return (a.alpha or 0.54) - (a.beta or 0.46) * cos(x) end,
    { "periodic", "alpha", "beta" }, { { 6, true, 0.5, 0.4 }, { 6, opts = { beta = 0.3 } } })
  window_row("blackman_window", function(x) return 0.42 - 0.5 * cos(x) + 0.08 * cos(2 * x) end)
  window_row("bartlett_window", function(x) return 1 - math.abs(2 * x - 1) end)

  -- By the integral over a turn of exp(x cos(t)), which the trapezoidal rule gives to all digits; over exp(x).
  local function scaled_bessel(x)
    local sum, n = 0.0, 400
    for i = 0, n - 1 do sum = sum + math.exp(x * (math.cos(2 * math.pi * i / n) - 1)) end
    return sum / n
  end
  window_row("kaiser_window", function(x, a)
    local beta = math.abs(a.beta or 12)
    local u = beta * math.sqrt(math.max(1 - (2 * x - 1) ^ 2, 0))
    return scaled_bessel(u) / scaled_bessel(beta) * math.exp(u - beta)
  end, { "periodic", "beta" },
    { { 9, false, 0 }, { 6, true, 100 }, { 6, true, -3.5 }, { 5, opts = { beta = 700, dtype = "f64" } } })

  -- ---- mel scale ----

  local function to_mel(f, slaney)
    if not slaney then return 2595 * math.log(1 + f / 700, 10) end
    return f < 1000 and 3 * f / 200 or 15 + 27 * math.log(f / 1000) / math.log(6.4)
  end
  local function to_hz(m, slaney)
    if not slaney then return 700 * (10 ^ (m / 2595) - 1) end
    return m < 15 and 200 * m / 3 or 1000 * 6.4 ^ ((m - 15) / 27)
  end

  row("mel_filter_bank", {
    cases = {
      { 9, 4, 8000 }, { 17, 6, 16000, 100, 7000 }, { 33, 5, 22050, opts = { scale = "slaney", norm = "slaney" } },
      { 17, 8, 4000, 0, 1900, "slaney" },
      { 9, 3, 16000, 20.5, 0, "htk", "slaney", opts = { dtype = "f64" } }, { 2, 1, 2 },
    },
    dtypes = { "f32" }, dtype = "f32",
    ref = function(n_freqs, n_mels, rate, ...)
      local a = named({ "f_min", "f_max", "scale", "norm" }, ...)
      local slaney = a.scale == "slaney"
      local low, high = to_mel(a.f_min or 0, slaney), to_mel((a.f_max or 0) > 0 and a.f_max or rate / 2, slaney)
      local function edge(i) return to_hz(low + (high - low) * i / (n_mels + 1), slaney) end
      local y = { shape = { n_mels, n_freqs }, dtype = a.dtype or "f32" }
      for m = 1, n_mels do
        local l, c, r = edge(m - 1), edge(m), edge(m + 1)
        for k = 0, n_freqs - 1 do
          local f = rate / 2 * k / (n_freqs - 1)
          local v = math.max(0, math.min((f - l) / (c - l), (r - f) / (r - c)))
          y[#y + 1] = a.norm == "slaney" and v * 2 / (r - l) or v
        end
      end
      return y
    end,
    errors = {
      { 1, 4, 8000, match = "n_freqs: expected 2 to" }, { 9, 0, 8000, match = "n_mels: expected 1 to" },
      { 9, 4, 0, match = "sample_rate: expected a positive" },
      { 9, 4, 8000, 5000, match = "f_min: expected 0 <= f_min < f_max" },
      { 9, 4, 8000, 0, 0, "other", match = "scale: expected one of" },
      { 9, 4, 8000, 0, 0, "htk", "other", match = "norm: expected one" },
      { 9, 4, 8000, opts = { dtype = "i64" }, match = "dtype: expected a float" },
    },
  })
end
