-- Rows of src/ops/warp.c. The references follow what kernels/warp.h says in Lua integers: bytes must be equal.

return function(row, T)
  local ONE, WEIGHT = 65536, 16384
  local floor = math.floor

  local function fixed(x) return x < 0 and math.ceil(x * ONE - 0.5) or floor(x * ONE + 0.5) end
  local function div0(a, b) return a < 0 and -(-a // b) or a // b end -- as C divides
  local function clamp(x, lo, hi) return x < lo and lo or x > hi and hi or x end

  local filters = {
    nearest = function() return 1 end,
    bilinear = function(d, radius) return math.max(radius - d, 0) end,
    bicubic = function(d, radius)
      if d >= radius then return 0 end
      local t = (d << 16) // (radius // 2)
      local t2 = t * t // ONE
      local t3 = t2 * t // ONE
      return t < ONE and div0(3 * t3 - 5 * t2 + 2 * ONE, 2) or div0(-t3 + 5 * t2 - 8 * t + 4 * ONE, 2)
    end,
  }

  -- For each pixel of a side of the result the first pixel it is made of, from 0, and the weights.
  local function side(start, length, size, count, mode)
    start, length = fixed(start), fixed(math.max(length, 0))
    local wide = math.max(length // count, ONE)
    local radius = mode == "bicubic" and 2 * wide or wide
    local lo = clamp(start // ONE, 0, size - 1)
    local hi = math.max(lo + 1, math.min(size, (start + length + ONE - 1) // ONE))
    local taps = {}
    for i = 0, count - 1 do
      local centre = start + (2 * i + 1) * length // (2 * count)
      local first, last = (centre - radius + ONE // 2) // ONE, (centre + radius + ONE // 2) // ONE
      if mode == "nearest" then first, last = centre // ONE, centre // ONE + 1 end
      first = clamp(first, lo, hi - 1)
      last = math.max(first + 1, math.min(last, hi))
      local raw, total, best, weights, rest = {}, 0, 1, {}, WEIGHT
      for p = first, last - 1 do
        raw[#raw + 1] = filters[mode](math.abs(p * ONE + ONE // 2 - centre), radius)
        total = total + raw[#raw]
      end
      for k, r in ipairs(raw) do
        weights[k] = total > 0 and div0(r * 2 * WEIGHT + total, 2 * total) or 0
        rest = rest - weights[k]
        if r > raw[best] then best = k end
      end
      weights[best] = weights[best] + rest
      taps[i] = { first = first, weights = weights }
    end
    return taps
  end

  local function crop_resize(x, boxes, size, mode)
    local n, channels, h, w = table.unpack(x.shape)
    local y = { shape = { n, channels, size[1], size[2] }, dtype = x.dtype }
    local bytes = x.dtype == "u8"
    for i = 0, n - 1 do
      local rows = side(boxes[4 * i + 1], boxes[4 * i + 3], h, size[1], mode or "bilinear")
      local columns = side(boxes[4 * i + 2], boxes[4 * i + 4], w, size[2], mode or "bilinear")
      for plane = i * channels, (i + 1) * channels - 1 do
        for r = 0, size[1] - 1 do
          for c = 0, size[2] - 1 do
            local sum = 0
            for k, weight in ipairs(columns[c].weights) do
              local line = 0
              for l, share in ipairs(rows[r].weights) do
                line = line + share * x[(plane * h + rows[r].first + l - 1) * w + columns[c].first + k]
              end
              sum = sum + weight * (bytes and (line + 128) // 256 or line / WEIGHT)
            end
            y[#y + 1] = bytes and clamp((sum + (1 << 19)) // (1 << 20), 0, 255) or sum / WEIGHT
          end
        end
      end
    end
    return y
  end

  local dtypes = { "u8", "f32", "f64", "f16" }
  local function boxes(...) return T { select("#", ...) // 4, 4, values = { ... }, dtype = "f64" } end

  row("crop_resize", {
    cases = {
      { T { 1, 2, 6, 7, range = { 0, 255 } }, boxes(0, 0, 6, 7), { 3, 4 } },
      { T { 2, 1, 6, 7, range = { 0, 255 } }, boxes(1, 2, 3, 4, 0.5, 0.25, 5, 6.5), { 5, 9 }, "bicubic" },
      { T { 1, 1, 9, 9, range = { 0, 255 } }, boxes(0, 0, 9, 9), { 2, 3 }, "bicubic" },
      { T { 2, 1, 4, 5, range = { 0, 255 } }, boxes(-2, -3, 6, 6, 3, 4, 20, 20), { 3, 3 }, "bilinear" },
      { T { 2, 1, 4, 5, range = { 0, 255 } }, boxes(1, 1, 0, 0, 9, 9, 2, 2), { 2, 2 }, "nearest" },
      { T { 1, 3, 3, 4, range = { 0, 255 } }, boxes(0, 0, 3, 4), { 3, 4 }, "nearest" },
      { T { 0, 3, 3, 4, range = { 0, 255 } }, T { 0, 4, dtype = "f64" }, { 2, 2 } },
    },
    ref = crop_resize, dtypes = dtypes, tol = 1e-5,
    big = function(ty)
      return ty.crop_resize(ty.randint(0, 256, { 3, 3, 90, 70 }):to "u8",
        ty.tensor { { 0, 0, 90, 70 }, { 10, 20, 40, 31 }, { 5, 5, 80, 20 } }, { 64, 48 })
    end,
    errors = {
      { T { 3, 4, 5, dtype = "u8" }, boxes(0, 0, 1, 1), { 2, 2 }, match = "x: expected u8 or floats [n, c, h, w]" },
      { T { 1, 3, 4, 5, dtype = "i64" }, boxes(0, 0, 1, 1), { 2, 2 }, match = "x: expected u8 or floats" },
      { T { 1, 3, 0, 5, dtype = "u8" }, boxes(0, 0, 1, 1), { 2, 2 }, match = "x: expected sides of 1 to 65535" },
      { T { 2, 3, 4, 5, dtype = "u8" }, boxes(0, 0, 1, 1), { 2, 2 }, match = "boxes: expected [2, 4]" },
      { T { 1, 3, 4, 5, dtype = "u8" }, boxes(0, 0, 1, 1), { 2 }, match = "size: expected { height, width }" },
      { T { 1, 3, 4, 5, dtype = "u8" }, boxes(0, 0, 1, 1), { 2, 0 }, match = "size: expected { height, width }" },
      { T { 1, 3, 4, 5, dtype = "u8" }, boxes(0, 0, 1, 1), { 2, 2 }, "lanczos", match = "mode" },
    },
  })

  local function warp(x, matrix, size, mode, fill)
    local n, channels, h, w = table.unpack(x.shape)
    local y, bytes = { shape = { n, channels, size[1], size[2] }, dtype = x.dtype }, x.dtype == "u8"
    fill = fill or 0
    if bytes then fill = clamp(floor(fill + 0.5), 0, 255) end
    for i = 0, n - 1 do
      local m = table.move(matrix, 9 * i + 1, 9 * i + 9, 1, {})
      for plane = i * channels, (i + 1) * channels - 1 do
        local function pixel(r, c)
          if r < 0 or c < 0 or r >= h or c >= w then return fill end
          return x[(plane * h + r) * w + c + 1]
        end
        for r = 0, size[1] - 1 do
          for c = 0, size[2] - 1 do
            local d = m[7] * c + m[8] * r + m[9]
            local u, v = (m[1] * c + m[2] * r + m[3]) / d, (m[4] * c + m[5] * r + m[6]) / d
            local value = fill
            if d > 0 and math.abs(u) < 1e5 and math.abs(v) < 1e5 then
              u, v = fixed(u), fixed(v)
              if mode == "nearest" then
                value = pixel((v + ONE // 2) // ONE, (u + ONE // 2) // ONE)
              else
                local s, t, j, k = u % ONE, v % ONE, v // ONE, u // ONE
                local upper = pixel(j, k) * (ONE - s) + pixel(j, k + 1) * s
                local lower = pixel(j + 1, k) * (ONE - s) + pixel(j + 1, k + 1) * s
                value = upper * (ONE - t) + lower * t
                value = bytes and (value + (1 << 31)) >> 32 or value / ONE / ONE
              end
            end
            y[#y + 1] = value
          end
        end
      end
    end
    return y
  end

  local function matrices(...) return T { select("#", ...) // 9, 3, 3, values = { ... }, dtype = "f64" } end
  local turn = matrices(0.8, -0.6, 1.5, 0.6, 0.8, -1.25, 0, 0, 1)

  row("warp", {
    cases = {
      { T { 1, 2, 4, 5, range = { 0, 255 } }, matrices(1, 0, 0, 0, 1, 0, 0, 0, 1), { 4, 5 } },
      { T { 1, 2, 6, 7, range = { 0, 255 } }, turn, { 6, 7 }, "bilinear", 100 },
      { T { 1, 2, 6, 7, range = { 0, 255 } }, turn, { 5, 4 }, "nearest", 7 },
      { T { 2, 1, 6, 7, range = { 0, 255 } }, matrices(1.1, 0.1, -1, 0, 1.2, 0.3, 0.02, 0.01, 0.9,
        1, 0, 0, 0, 1, 0, -0.5, 0, 1.2), { 6, 7 } },
      { T { 2, 1, 3, 3, range = { 0, 255 } }, matrices(1e9, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0), { 3, 3 } },
    },
    ref = warp, dtypes = dtypes, tol = 1e-5,
    big = function(ty)
      return ty.warp(ty.randint(0, 256, { 2, 3, 80, 70 }):to "u8",
        ty.tensor { { { 0.8, -0.6, 20 }, { 0.6, 0.8, 0 }, { 0, 0, 1 } }, { { 1, 0, 3 }, { 0, 1, 4 }, { 0, 0, 1 } } },
        { 100, 90 })
    end,
    errors = {
      { T { 1, 2, 4, 5, dtype = "u8" }, T { 1, 2, 3 }, { 2, 2 }, match = "matrix: expected floats [1, 3, 3]" },
      { T { 1, 2, 4, 5, dtype = "u8" }, T { 1, 3, 3, dtype = "i64" }, { 2, 2 }, match = "matrix: expected floats" },
      { T { 1, 2, 4, 5, dtype = "u8" }, turn, { 2, 2 }, "bicubic", match = "mode" },
      { T { 2, 4, 5, dtype = "u8" }, turn, { 2, 2 }, match = "x: expected u8 or floats" },
    },
  })
end
