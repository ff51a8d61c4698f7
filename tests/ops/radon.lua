-- Rows of src/ops/radon.c and of seeded_noise. References: the weight of every pixel in every line from its definition,
-- and Philox with the methods of the literature in plain Lua.

return function(row, T)
  local from = T.from

  -- f(picture, y, x, view, detector, weight) for every pixel that a line sees.
  local function each_weight(n, h, w, angles, detectors, spacing, f)
    for a = 0, angles.shape[1] - 1 do
      local cos, sin = math.cos(angles[a + 1]), math.sin(angles[a + 1])
      local c = math.max(math.abs(cos), math.abs(sin))
      for y = 0, h - 1 do
        for x = 0, w - 1 do
          local s = (x - (w - 1) / 2) * cos + (y - (h - 1) / 2) * sin
          for j = 0, detectors - 1 do
            local weight = (1 - math.abs((j - (detectors - 1) / 2) * spacing - s) / c) / c
            if weight > 0 then
              for i = 0, n - 1 do f(i, y, x, a, j, weight) end
            end
          end
        end
      end
    end
  end

  local function settings(first, spacing, options)
    if type(spacing) == "table" then spacing, options = nil, spacing end
    if type(first) == "table" and #first == 0 then first, options = nil, first end
    options = options or {}
    return options.detectors or first, options.spacing or spacing or 1
  end

  local function zeros(...)
    return from({ ... }, function() return 0.0 end)
  end

  local function radon(x, angles, ...)
    local detectors, spacing = settings(...)
    local n, h, w = table.unpack(x.shape)
    if not detectors or detectors == 0 then detectors = math.ceil(math.sqrt(h * h + w * w) / spacing) end
    local count = angles.shape[1]
    local result = zeros(n, count, detectors)
    each_weight(n, h, w, angles, detectors, spacing, function(i, y, k, a, j, weight)
      local at = (i * count + a) * detectors + j + 1
      result[at] = result[at] + weight * x[(i * h + y) * w + k + 1]
    end)
    return result
  end

  local function backproject(g, angles, size, spacing)
    local n, count, detectors = table.unpack(g.shape)
    local h, w = size[1], size[2]
    local result = zeros(n, h, w)
    each_weight(n, h, w, angles, detectors, spacing or 1, function(i, y, k, a, j, weight)
      local at = (i * h + y) * w + k + 1
      result[at] = result[at] + weight * g[(i * count + a) * detectors + j + 1]
    end)
    return result
  end

  local function angles(...) return T { select("#", ...), values = { ... }, dtype = "f64" } end
  local some = angles(0.0, 0.4, 1.0, math.pi / 2, 2.0, 2.9, -0.7, 7.5)

  row("radon", {
    cases = {
      { T { 2, 5, 7 }, some }, { T { 1, 6, 6 }, some, 4 }, { T { 1, 4, 5 }, some, 9, 0.6 },
      { T { 2, 4, 3 }, angles(0.3, 1.2), opts = { spacing = 1.7 } }, { T { 1, 1, 1 }, some }, { T { 3, 1, 8 }, some, 3 },
      { T { 0, 3, 3 }, some }, { T { 1, 0, 3 }, some }, { T { 2, 3, 3 }, T { 0, values = {}, dtype = "f64" } },
      { T { 2, 3, 4 }, T { 3, values = { 0.25, -1, 2.5 } }, grad = false },
      { T { 40, 9, 11 }, some, grad = false, dtypes = { "f32", "f64" } },
    },
    constant = { angles = true },
    ref = radon,
    broadcast = false,
    errors = {
      { T { 4, 4 }, some, match = "x: expected [n, h, w]" }, { T { 1, 4, 4 }, T { 2, 2 }, match = "angles: expected floats [a]" },
      { T { 1, 4, 4 }, T { 2, dtype = "i64" }, match = "angles: expected floats [a]" },
      { T { 1, 4, 4 }, some, -1, match = "detectors: expected 0 to" },
      { T { 1, 4, 4 }, some, 3, 0.0, match = "spacing: expected a positive number" },
      { T { 1, 4, 4 }, some, 0, 1e-9, match = "spacing: 1e-09 takes" },
    },
    big = function(ty) return ty.radon(ty.randn(40, 31, 29), ty.linspace(0, 3, 17)) end,
  })

  row("backproject", {
    cases = {
      { T { 2, 8, 9 }, some, { 5, 7 } }, { T { 1, 8, 4 }, some, { 6, 6 } }, { T { 1, 8, 9 }, some, { 4, 5 }, 0.6 },
      { T { 2, 2, 3 }, angles(0.3, 1.2), { 4, 3 }, 1.7 }, { T { 0, 8, 3 }, some, { 3, 3 } },
      { T { 1, 8, 0 }, some, { 3, 3 } }, { T { 1, 8, 2 }, some, { 0, 3 } },
      { T { 2, 0, 3 }, T { 0, values = {}, dtype = "f64" }, { 3, 2 } },
      { T { 30, 8, 13 }, some, { 11, 9 }, grad = false, dtypes = { "f32", "f64" } },
    },
    constant = { angles = true },
    ref = backproject,
    broadcast = false,
    errors = {
      { T { 4, 4 }, some, { 3, 3 }, match = "x: expected [n, angles, detectors]" },
      { T { 1, 4, 4 }, some, { 3, 3 }, match = "angles: expected [4] for x" },
      { T { 1, 8, 4 }, some, {}, match = "size" }, { T { 1, 8, 4 }, some, { 3, -1 }, match = "size" },
      { T { 1, 8, 4 }, some, { 3, 3 }, -1.0, match = "spacing: expected a positive number" },
    },
    big = function(ty)
      return ty.backproject(ty.randn(20, 17, 40), ty.linspace(0, 3, 17), { 31, 29 })
    end,
  })

  -- ---- numbers by a seed ----

  local function u32(x) return x & 0xffffffff end

  local function philox(seed, i, round)
    local c, k0, k1 = { u32(i), i >> 32, round, 1 }, u32(seed), seed >> 32
    for _ = 1, 10 do
      local p, q = 0xD2511F53 * c[1], 0xCD9E8D57 * c[3]
      c = { (q >> 32) ~ c[2] ~ k0, u32(q), (p >> 32) ~ c[4] ~ k1, u32(p) }
      k0, k1 = u32(k0 + 0x9E3779B9), u32(k1 + 0xBB67AE85)
    end
    return c
  end

  local function uniform(high, low) return ((high << 32 | low) >> 11) * 0x1p-53 end

  local function log_factorial(k)
    local sum = 0.0
    for i = 2, k do sum = sum + math.log(i) end
    return sum
  end

  local function poisson(seed, i, mean)
    if mean ~= mean or mean < 0 then return T.nan end
    if mean > 1e15 then return mean end
    local round = 0
    if mean < 10 then
      local product = 1.0
      while true do
        local w = philox(seed, i, round)
        product = product * uniform(w[1], w[2])
        if product <= math.exp(-mean) then return round end
        round = round + 1
      end
    end
    local b = 0.931 + 2.53 * math.sqrt(mean)
    local a = -0.059 + 0.02483 * b
    while true do
      local w = philox(seed, i, round)
      local u, v = uniform(w[1], w[2]) - 0.5, 1 - uniform(w[3], w[4])
      local us = 0.5 - math.abs(u)
      local k = math.floor((2 * a / us + b) * u + mean + 0.43)
      if us >= 0.07 and v <= 0.9277 - 3.6224 / (b - 2) then return k end
      if k >= 0 and (us >= 0.013 or v <= us)
        and math.log(v * (1.1239 + 1.1328 / (b - 3.4)) / (a / (us * us) + b))
          <= k * math.log(mean) - mean - log_factorial(k) then
        return k
      end
      round = round + 1
    end
  end

  local inf, nan = T.inf, T.nan
  row("seeded_noise", {
    cases = {
      { T { 3, 5 }, 7 }, { T { 40 }, -1, "normal" }, { T { 2, 20 }, 1 << 40, "uniform" }, { T {}, 3, "uniform" },
      { T { 0, 2 }, 3 },
      { T { 200, range = { 0, 9 } }, 11, "poisson" }, { T { 300, range = { 10, 60 } }, 12, "poisson" },
      { T { 8, values = { 0, -1, nan, inf, 1e16, 10, 2000, 9.5 } }, 13, "poisson", dtypes = { "f32", "f64" } },
    },
    ref = function(x, seed, kind)
      local y = { shape = x.shape }
      for i = 1, #x do
        local w = philox(seed, i - 1, 0)
        if kind == "poisson" then
          y[i] = poisson(seed, i - 1, x[i])
        elseif kind == "uniform" then
          y[i] = (w[1] >> 8) * 0x1p-24
        else
          y[i] = math.sqrt(-2 * math.log(((w[1] >> 8) + 1) * 0x1p-24)) * math.cos(2 * math.pi * (w[2] >> 8) * 0x1p-24)
        end
      end
      return y
    end,
    tol = { f32 = 2e-6, f64 = 2e-6, f16 = 2e-3, bf16 = 1.6e-2 }, -- normal numbers are made in f32
    errors = { { T { 3 }, 1, "gamma", match = "kind: expected one of" }, { T { 3, dtype = "i64" }, 1, match = "x" } },
    big = function(ty) return ty.seeded_noise(ty.rand(5000) * 30, 5, "poisson") end,
  })
end
