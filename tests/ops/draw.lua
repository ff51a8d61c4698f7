-- Rows of src/ops/draw.c. The references follow what kernels/draw.h says pixel by
-- pixel in Lua integers, without pyramids with rims, clipping or reciprocals: bytes must be equal.

return function(row, T)
  local ONE, OPAQUE = 65536, 65025
  local floor = math.floor

  local function clamp(x, lo, hi) return x < lo and lo or x > hi and hi or x end
  local function towards_0(a, b) return a < 0 and -(-a // b) or a // b end

  -- ---- sprites ----

  -- Levels of sprite m: { side =, [y * side + x] = { r, g, b, a } }, all times alpha; and the mean luminance.
  local function pyramid(atlas, m)
    local side = atlas.shape[3]
    local plane, level, weight, bright = side * side, { side = side }, 0, 0
    for i = 0, plane - 1 do
      local r, g, b, a = atlas[m * 4 * plane + i + 1], atlas[(m * 4 + 1) * plane + i + 1],
        atlas[(m * 4 + 2) * plane + i + 1], atlas[(m * 4 + 3) * plane + i + 1]
      level[i] = { r * a, g * a, b * a, 255 * a }
      weight, bright = weight + a, bright + a * (77 * r + 150 * g + 29 * b)
    end
    local levels = { [0] = level }
    while side > 1 do
      local half, up, down = (side + 1) // 2, levels[#levels], {}
      down.side = half
      for y = 0, half - 1 do
        for x = 0, half - 1 do
          local sum = { 2, 2, 2, 2 }
          for dy = 0, 1 do
            for dx = 0, 1 do
              local inside = 2 * x + dx < side and 2 * y + dy < side
              local t = inside and up[(2 * y + dy) * side + 2 * x + dx]
              for c = 1, 4 do sum[c] = sum[c] + (t and t[c] or 0) end
            end
          end
          for c = 1, 4 do sum[c] = sum[c] // 4 end
          down[y * half + x] = sum
        end
      end
      levels[#levels + 1] = down
      side = half
    end
    return levels, weight > 0 and bright // (weight * 256) or 128
  end

  local function texel(level, x, y)
    if x < 0 or y < 0 or x >= level.side or y >= level.side then return nil end
    return level[y * level.side + x]
  end

  local function add_sample(level, l, u, v, sum)
    u, v = (u // (1 << l)) - ONE // 2, (v // (1 << l)) - ONE // 2
    local x, y, s, t = u // ONE, v // ONE, u // 256 % 256, v // 256 % 256
    local corners = { { x, y, (256 - s) * (256 - t) }, { x + 1, y, s * (256 - t) }, { x, y + 1, (256 - s) * t },
      { x + 1, y + 1, s * t } }
    local part = { 32768, 32768, 32768, 32768 }
    for _, corner in ipairs(corners) do
      local p = texel(level, corner[1], corner[2])
      for c = 1, 4 do part[c] = part[c] + (p and p[c] or 0) * corner[3] end
    end
    for c = 1, 4 do sum[c] = sum[c] + part[c] // ONE end
  end

  local function tint(colour, strength, mean, rgba)
    mean = clamp(mean, 1, 254)
    local alpha = rgba[4]
    local beyond = (77 * rgba[1] + 150 * rgba[2] + 29 * rgba[3]) // 256 - (mean * alpha + 127) // 255
    local shade, shine = alpha, 0
    if beyond < 0 then shade = alpha - (-beyond * (166 * 256 // mean)) // 256
    else shine = beyond * (153 * 256 // (255 - mean)) // 256 end
    for c = 1, 3 do
      local to = (colour[c] * shade + (255 - colour[c]) * shine + 127) // 255
      rgba[c] = (rgba[c] * (256 - strength) + to * strength) // 256
    end
  end

  local function draw_sprites(canvas, atlas, list)
    local n, h, w, k = canvas.shape[1], canvas.shape[3], canvas.shape[4], list.shape[2]
    local plane = h * w
    local picture = { shape = canvas.shape, dtype = "u8" }
    table.move(canvas, 1, n * 3 * plane, 1, picture)
    local owner = { shape = { n, h, w }, dtype = "i8" }
    local boxes, overlap = { shape = { n, k, 5 }, dtype = "i32" }, { shape = { n, k, k }, dtype = "i32" }
    for i = 1, n * plane do owner[i] = -1 end
    for i = 1, n * k * 5 do boxes[i] = 0 end
    for i = 1, n * k * k do overlap[i] = 0 end
    for i = 0, n - 1 do
      local covered = {} -- by row of the list, sets of pixels
      for j = 0, k - 1 do
        local f = table.move(list, (i * k + j) * 12 + 1, (i * k + j) * 12 + 12, 1, {})
        covered[j] = {}
        if f[1] >= 0 then
          local levels, mean = pyramid(atlas, f[1])
          local colour = { clamp(f[8], 0, 255), clamp(f[9], 0, 255), clamp(f[10], 0, 255) }
          local strength, opacity = clamp(f[11], 0, 256), clamp(f[12], 0, 256)
          local a, b, d, e = f[2], f[3], f[5], f[6]
          local step, l = math.max(a * a + d * d, b * b + e * e), 0
          while step // (1 << 2 * l) > 4 * ONE * ONE and l < #levels do l = l + 1 end
          local least = { left = w, top = h, right = 0, bottom = 0 }
          for y = 0, h - 1 do
            for x = 0, w - 1 do
              local u, v = f[4] + a * x + b * y + (a + b) // 2, f[7] + d * x + e * y + (d + e) // 2
              local p = { 2, 2, 2, 2 }
              add_sample(levels[l], l, u + (a + b) // 4, v + (d + e) // 4, p)
              add_sample(levels[l], l, u - (a + b) // 4, v - (d + e) // 4, p)
              add_sample(levels[l], l, u + (a - b) // 4, v + (d - e) // 4, p)
              add_sample(levels[l], l, u - (a - b) // 4, v - (d - e) // 4, p)
              for c = 1, 4 do p[c] = p[c] // 4 end
              if strength > 0 and p[4] > 0 then tint(colour, strength, mean, p) end
              local at, alpha = y * w + x + 1, p[4] * opacity // 256
              for c = 0, 2 do
                local o = (i * 3 + c) * plane + at
                picture[o] = (p[c + 1] * opacity // 256 * 255 + picture[o] * (OPAQUE - alpha) + OPAQUE // 2) // OPAQUE
              end
              if 2 * p[4] > OPAQUE then
                covered[j][at] = true
                owner[i * plane + at] = j
                least = { left = math.min(least.left, x), top = math.min(least.top, y),
                  right = math.max(least.right, x + 1), bottom = math.max(least.bottom, y + 1) }
              end
            end
          end
          if next(covered[j]) then
            local o = (i * k + j) * 5
            boxes[o + 1], boxes[o + 2], boxes[o + 3], boxes[o + 4] = least.left, least.top, least.right, least.bottom
          end
        end
        for other = 0, j do
          local count = 0
          for at in pairs(covered[j]) do count = count + (covered[other][at] and 1 or 0) end
          overlap[(i * k + j) * k + other + 1], overlap[(i * k + other) * k + j + 1] = count, count
        end
      end
      for at = 1, plane do
        local j = owner[i * plane + at]
        if j >= 0 then boxes[(i * k + j) * 5 + 5] = boxes[(i * k + j) * 5 + 5] + 1 end
      end
    end
    return picture, owner, boxes, overlap
  end

  -- A row of the list: a sprite of `side` texels turned by a fraction `s` of its step and drawn at (x, y), `scale`
  -- texels for a pixel.
  local function sprite(index, side, x, y, scale, s, more)
    more = more or {}
    local a, b = floor(scale * ONE * (1 - s * s / 2)), floor(scale * ONE * s)
    local middle = side * ONE // 2
    return { index, a, b, middle - floor(a * x + b * y), -b, a, middle - floor(a * y - b * x), more.red or 0,
      more.green or 0, more.blue or 0, more.strength or 0, more.opacity or 256 }
  end

  local function rows_of(n, k, ...)
    local values = {}
    for _, r in ipairs { ... } do table.move(r, 1, #r, #values + 1, values) end
    return T { n, k, #values // (n * k), values = values, dtype = "i32" }
  end
  local nothing = { -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
  local function pixels(...) return T { range = { 0, 255 }, dtype = "u8", ... } end

  row("draw_sprites", {
    cases = {
      -- as large as it is, smaller, larger, and turned; two that overlap
      { pixels(1, 3, 7, 9), pixels(2, 4, 5, 5), rows_of(1, 1, sprite(1, 5, 4, 3, 1, 0)) },
      { pixels(2, 3, 8, 11), pixels(3, 4, 6, 6), rows_of(2, 3,
        sprite(0, 6, 4, 4, 1.3, 0.3), nothing, sprite(2, 6, 6.5, 4.25, 0.6, -0.2, { opacity = 200 }),
        sprite(1, 6, 2, 2, 0.5, 0, { red = 250, blue = 40, strength = 256 }),
        sprite(1, 6, 9, 7, 0.7, 0.9, { green = 130, strength = 99, opacity = 256 }), sprite(2, 6, 5, 5, 0.9, 0)) },
      -- levels of the pyramid, of an odd side; outside of the picture; turned inside out; nothing at all
      { pixels(1, 3, 6, 5), pixels(1, 4, 13, 13), rows_of(1, 4, sprite(0, 13, 2, 3, 2.6, 0.1), sprite(0, 13, 3, 1, 5.5, 0),
        sprite(0, 13, 4, 4, 40, 0), sprite(0, 13, 30, -20, 1.5, 0)) },
      { pixels(1, 3, 6, 6), pixels(1, 4, 4, 4), rows_of(1, 2, { 0, -ONE, 0, 4 * ONE, 0, ONE, 0, 300, -5, 70, 400, 999 },
        { 0, 0, 0, 2 * ONE, 0, 0, 2 * ONE, 0, 0, 0, 0, 100 }) },
      -- numbers at the ends of their range
      { pixels(1, 3, 4, 4), pixels(1, 4, 3, 3), rows_of(1, 2,
        { 0, 2147483647, -2147483648, 2147483647, -2147483648, 2147483647, -2147483648, 0, 0, 0, 0, 256 },
        { 0, -2147483648, -2147483648, 5, -2147483648, -2147483648, 5, 2147483647, 0, -2147483648, 256, -2147483648 }) },
      { pixels(1, 3, 3, 3), T { 1, 4, 1, 1, values = { 255, 255, 255, 255 }, dtype = "u8" },
        rows_of(1, 1, sprite(0, 1, 1.5, 1.5, 0.3, 0, { red = 200, green = 20, blue = 90, strength = 256 })) },
      { pixels(0, 3, 4, 4), pixels(2, 4, 3, 3), T { 0, 2, 12, values = {}, dtype = "i32" } },
      { pixels(2, 3, 4, 3), pixels(2, 4, 3, 3), T { 2, 0, 12, values = {}, dtype = "i32" } },
      { pixels(1, 3, 0, 4), pixels(1, 4, 3, 3), rows_of(1, 1, sprite(0, 3, 1, 1, 1, 0)) },
      { pixels(1, 3, 4, 4), pixels(0, 4, 3, 3), rows_of(1, 1, nothing) },
    },
    dtypes = { "u8" },
    dtype = { "u8", "i8", "i32", "i32" },
    ref = draw_sprites,
    broadcast = false,
    errors = {
      { pixels(1, 3, 4), pixels(1, 4, 3, 3), rows_of(1, 1, nothing), match = "canvas: expected u8 [n, 3, h, w]" },
      { pixels(1, 4, 4, 4), pixels(1, 4, 3, 3), rows_of(1, 1, nothing), match = "canvas: expected u8 [n, 3, h, w]" },
      { T { 1, 3, 4, 4, dtype = "i32" }, pixels(1, 4, 3, 3), rows_of(1, 1, nothing),
        match = "canvas: expected u8 [n, 3, h, w]" },
      { pixels(1, 3, 4097, 1), pixels(1, 4, 3, 3), rows_of(1, 1, nothing), match = "canvas: expected at most 4096" },
      { pixels(1, 3, 4, 4), pixels(1, 3, 3, 3), rows_of(1, 1, nothing), match = "atlas: expected u8 [m, 4, s, s]" },
      { pixels(1, 3, 4, 4), pixels(1, 4, 3, 2), rows_of(1, 1, nothing), match = "atlas: expected u8 [m, 4, s, s]" },
      { pixels(1, 3, 4, 4), pixels(1, 4, 0, 0), rows_of(1, 1, nothing), match = "atlas: expected u8 [m, 4, s, s]" },
      { pixels(1, 3, 4, 4), pixels(1, 4, 3, 3), rows_of(2, 1, nothing, nothing), match = "list: expected i32 [1, k, 12]" },
      { pixels(1, 3, 4, 4), pixels(1, 4, 3, 3), T { 1, 1, 11, dtype = "i32" }, match = "list: expected i32 [1, k, 12]" },
      { pixels(1, 3, 4, 4), pixels(1, 4, 3, 3), T { 1, 1, 12, dtype = "i64" }, match = "list: expected i32 [n, k, 12]" },
      { pixels(1, 3, 4, 4), pixels(1, 4, 3, 3), T { 1, 65, 12, dtype = "i32" }, match = "list: expected at most 64" },
      { pixels(1, 3, 4, 4), pixels(2, 4, 3, 3), rows_of(1, 1, sprite(2, 3, 1, 1, 1, 0)), match = { "draw_sprites", "2" } },
      { pixels(1, 3, 4, 4), pixels(2, 4, 3, 3), rows_of(1, 1, sprite(-2, 3, 1, 1, 1, 0)),
        match = { "draw_sprites", "-2" } },
    },
    big = function(ty)
      local list = ty.zeros({ 40, 3, 12 }, { dtype = "i32" })
      list:select(2, 0):copy_(ty.randint(0, 9, { 40, 3 }))
      for _, at in ipairs { 1, 5 } do list:select(2, at):copy_(ty.randint(20000, 90000, { 40, 3 })) end
      for _, at in ipairs { 3, 6 } do list:select(2, at):copy_(ty.randint(-900000, 100000, { 40, 3 })) end
      list:select(2, 10):copy_(ty.randint(0, 256, { 40, 3 }))
      list:select(2, 11):fill_(220)
      return ty.draw_sprites(ty.randint(0, 256, { 40, 3, 33, 29 }):to "u8", ty.randint(0, 256, { 9, 4, 20, 20 }):to "u8",
        list)
    end,
  })

  -- ---- backgrounds ----

  local function root(x)
    local r = floor(x ^ 0.5)
    while r * r > x do r = r - 1 end
    while (r + 1) * (r + 1) <= x do r = r + 1 end
    return r
  end

  local function share(x) return clamp(x, 0, ONE) end

  local function u32(x) return x & 0xffffffff end
  local function lattice(seed, x, y)
    local h = u32(seed) ~ u32(x * 0x9E3779B1) ~ u32(y * 0x85EBCA77)
    h = u32((h ~ h >> 15) * 0x2C1B3C6D)
    h = u32((h ~ h >> 12) * 0x297A2D39)
    return (h ~ h >> 15) >> 16
  end

  local function noise(seed, period, inverse, x, y)
    local column, line = x // period, y // period
    local s, t = share(x % period * inverse // ONE), share(y % period * inverse // ONE)
    s = (s * s // ONE) * (3 * ONE - 2 * s) // ONE
    t = (t * t // ONE) * (3 * ONE - 2 * t) // ONE
    local function across(at)
      return (lattice(seed, column, at) * (ONE - s) + lattice(seed, column + 1, at) * s) // ONE
    end
    return (across(line) * (ONE - t) + across(line + 1) * t) // ONE
  end

  -- The share of the second colour at (x, y) from the middle.
  local function mixture(f, x, y)
    local kind, cos, sin = f[1], clamp(f[8], -ONE, ONE), clamp(f[9], -ONE, ONE)
    local period, phase, seed = clamp(f[10], ONE, 1 << 30), clamp(f[11], -(1 << 30), 1 << 30), f[12]
    local inverse = (1 << 32) // period
    local u, v = (x * cos + y * sin) // ONE, (y * cos - x * sin) // ONE
    local function wave(at) -- the half of a period with the second colour, with an edge as wide as a pixel
      return share(ONE // 2 + math.abs(at % period - period // 2) - period // 4)
    end
    if kind == 1 then return share(ONE // 2 + (u + phase) * inverse // ONE) end
    if kind == 2 then return share(root((x - phase) * (x - phase) + y * y) * inverse // ONE) end
    if kind == 3 then return wave(u + phase) end
    if kind == 4 then
      return ONE // 2 + towards_0((2 * wave(u + phase) - ONE) * (2 * wave(v + phase) - ONE), 2 * ONE)
    end
    if kind == 5 then
      local right, down = (u + phase) % period - period // 2, (v + phase) % period - period // 2
      return share(ONE // 2 + period // 4 - root(right * right + down * down))
    end
    local coarse = noise(seed, period, inverse, u + phase, v)
    local fine = noise(seed + 1, period, inverse, 2 * (u + phase), 2 * v)
    return share(ONE // 2 + 2 * coarse + fine - 3 * (ONE // 2))
  end

  local function draw_background(list, height, width)
    local n = list.shape[1]
    local result = { shape = { n, 3, height, width }, dtype = "u8" }
    for i = 0, n - 1 do
      local f = table.move(list, i * 12 + 1, i * 12 + 12, 1, {})
      for y = 0, height - 1 do
        for x = 0, width - 1 do
          local part = f[1] == 0 and 0
            or mixture(f, (2 * x + 1 - width) * (ONE // 2), (2 * y + 1 - height) * (ONE // 2))
          for c = 0, 2 do
            local one, two = clamp(f[2 + c], 0, 255), clamp(f[5 + c], 0, 255)
            result[((i * 3 + c) * height + y) * width + x + 1] = (one * (ONE - part) + two * part + ONE // 2) // ONE
          end
        end
      end
    end
    return result
  end

  local function background(kind, cos, sin, period, phase, seed)
    return { kind, 250, 30, 120, 10, 200, 90, cos, sin, period, phase, seed or 0 }
  end
  local function list_of(...)
    local values = {}
    for _, r in ipairs { ... } do table.move(r, 1, #r, #values + 1, values) end
    return T { #values // 12, 12, values = values, dtype = "i32" }
  end

  row("draw_background", {
    cases = {
      { list_of(background(0, ONE, 0, ONE, 0), background(1, 46341, 46341, 9 * ONE, 0),
        background(2, ONE, 0, 6 * ONE, 70000)), 9, 11 },
      { list_of(background(3, 60547, 25080, 5 * ONE + 999, 12345), background(4, 46341, -46341, 7 * ONE, -54321),
        background(5, 0, ONE, 6 * ONE + 77, 4 * ONE)), 13, 12 },
      { list_of(background(6, ONE, 0, 6 * ONE, 0, 7), background(6, 30000, -58000, 4 * ONE + 3, 99999, -5)), 12, 10 },
      -- numbers at the ends of their range; colours beyond theirs
      { list_of({ 3, -9, 300, 5, 2147483647, -2147483648, 0, 2147483647, -2147483648, 2147483647, -2147483648, 1 },
        background(6, ONE, ONE, -2147483648, 2147483647, 2147483647), background(5, 0, 0, 0, 2147483647)), 3, 4 },
      { list_of(background(1, ONE, 0, ONE, 0)), 0, 4 },
      { T { 0, 12, values = {}, dtype = "i32" }, 3, 4 },
    },
    dtypes = { "i32" },
    dtype = "u8",
    ref = draw_background,
    broadcast = false,
    errors = {
      { T { 2, 11, dtype = "i32" }, 3, 4, match = "list: expected i32 [n, 12]" },
      { T { 12, dtype = "i32" }, 3, 4, match = "list: expected i32 [n, 12]" },
      { T { 2, 12, dtype = "i64" }, 3, 4, match = "list: expected i32 [n, 12]" },
      { T { 2, 12, dtype = "i32" }, -1, 4, match = "height: expected 0 to 4096, got -1" },
      { T { 2, 12, dtype = "i32" }, 3, 5000, match = "width: expected 0 to 4096, got 5000" },
      { list_of(background(7, ONE, 0, ONE, 0)), 3, 4, match = { "draw_background", "7" } },
      { list_of(background(-1, ONE, 0, ONE, 0)), 3, 4, match = { "draw_background", "-1" } },
    },
    big = function(ty)
      local list = ty.randint(-70000, 900000, { 50, 12 }):to "i32"
      list:select(1, 0):copy_(ty.randint(0, 7, { 50 }))
      return ty.draw_background(list, 40, 33)
    end,
  })

  -- ---- noise ----

  -- Philox4x32-10 on { w0, w1, w2, w3 }, Salmon et al. 2011, fig. 2.
  local function philox(low, high, block)
    local c = { block & 0xffffffff, block >> 32, 0, 0 }
    for _ = 1, 10 do
      local p, q = 0xD2511F53 * c[1], 0xCD9E8D57 * c[3]
      c = { (q >> 32) ~ c[2] ~ low, u32(q), (p >> 32) ~ c[4] ~ high, u32(p) }
      low, high = u32(low + 0x9E3779B9), u32(high + 0xBB67AE85)
    end
    return c
  end

  local function pixel_noise(x, list)
    local n, result = x.shape[1], { shape = x.shape, dtype = "u8" }
    local each = 1
    for d = 2, #x.shape do each = each * x.shape[d] end
    for i = 0, n - 1 do
      local low, high, sigma = u32(list[3 * i + 1]), u32(list[3 * i + 2]), clamp(list[3 * i + 3], 0, 1 << 20)
      for at = 0, each - 1 do
        local word = philox(low, high, at // 4)[at % 4 + 1]
        local z = (word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24) - 510
        result[i * each + at + 1] = clamp(x[i * each + at + 1] + (z * sigma * 443 + (1 << 23)) // (1 << 24), 0, 255)
      end
    end
    return result
  end

  local function noise_of(...) return T { select("#", ...) // 3, 3, values = { ... }, dtype = "i32" } end
  row("pixel_noise", {
    cases = {
      { pixels(2, 3, 4, 5), noise_of(1, 2, 2560, -7, 2147483647, 500) },
      { pixels(3, 7), noise_of(5, 0, 0, 5, 0, 9999, 1, 1, 256) },
      { pixels(2), noise_of(1, 0, 5000, 2, -2147483648, 2147483647) }, { pixels(1, 5), noise_of(9, 9, -5) },
      { pixels(0, 3), T { 0, 3, values = {}, dtype = "i32" } }, { pixels(2, 0), noise_of(1, 0, 5, 2, 0, 5) },
    },
    dtypes = { "u8" },
    ref = pixel_noise,
    broadcast = false,
    errors = {
      { T { 2, 3, dtype = "i32" }, noise_of(1, 0, 5, 2, 0, 5), match = "x: expected u8 [n, ...]" },
      { T { values = { 3 }, dtype = "u8" }, noise_of(1, 0, 5), match = "x: expected u8 [n, ...]" },
      { pixels(2, 3), noise_of(1, 0, 5), match = "list: expected i32 [2, 3]" },
      { pixels(1, 3), T { 1, 3, dtype = "i64" }, match = "list: expected i32 [1, 3]" },
    },
    big = function(ty)
      return ty.pixel_noise(ty.randint(0, 256, { 40, 3, 20, 21 }):to "u8", ty.randint(0, 5000, { 40, 3 }):to "i32")
    end,
  })
end
