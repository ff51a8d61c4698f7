-- Row of src/ops/solids.c. The reference follows what kernels/solids.h says voxel by voxel in Lua integers, without
-- spans that are added up, steps along a line or clipping: numbers must be equal.

return function(row, T)
  local ONE, VOXEL, WHOLE, SHARE = 1 << 20, 1024, 16384, 65536

  local function clamp(x, lo, hi) return x < lo and lo or x > hi and hi or x end

  local function root(x)
    local r = math.floor(math.sqrt(x))
    while r * r > x do r = r - 1 end
    while (r + 1) * (r + 1) <= x do r = r + 1 end
    return r
  end

  -- The part of the line at (y, z), in eighths of a voxel, that is inside, between low and high.
  local function span(f, y, z, low, high)
    local q = {}
    for i = 1, 4 do q[i] = (f[i][2] * y + f[i][3] * z) // 8 + f[i][4] end
    local slope = f[4][1]
    if slope == 0 then
      if math.abs(q[4]) > ONE then return 0, 0 end
    else
      local ends = { (-ONE - q[4]) * VOXEL // slope, (ONE - q[4]) * VOXEL // slope }
      if slope < 0 then ends[1], ends[2] = ends[2], ends[1] end
      low, high = math.max(low, ends[1]), math.min(high, ends[2])
    end
    if low >= high then return 0, 0 end
    local a, b = 0, 0
    for i = 1, 3 do a, b = a + f[i][1] * f[i][1], b + f[i][1] * q[i] end
    local middle
    if a < ONE then
      middle = (low + high) // 2
    else
      local whole = -b // a
      if math.abs(whole) > 4096 then return 0, 0 end
      middle = whole * VOXEL + (-b - whole * a) * VOXEL // a
    end
    local rest = ONE * ONE
    for i = 1, 3 do
      local p = q[i] + f[i][1] * middle // 1024
      if math.abs(p) > ONE then return 0, 0 end
      rest = rest - p * p
    end
    if rest < 0 then return 0, 0 end
    if a >= ONE then
      local half = root(rest * ONE // a)
      low, high = math.max(low, middle - half), math.min(high, middle + half)
    end
    return low, high
  end

  local function lattice(seed, x, y)
    local h = (seed ~ x * 0x9E3779B1 ~ y * 0x85EBCA77) & 0xffffffff
    h = (h ~ h >> 15) * 0x2C1B3C6D & 0xffffffff
    h = (h ~ h >> 12) * 0x297A2D39 & 0xffffffff
    return (h ~ h >> 15) >> 16
  end

  local function between(a, b, share) return (a * (SHARE - share) + b * share) // SHARE end

  -- Value noise of one octave at voxel (x, y, z).
  local function noise(s, octave, ...)
    local at, share = {}, {}
    for i, v in ipairs { ... } do
      local place = (2 * v + 1) * 32768 << octave
      at[i] = place // s.period
      local part = math.min(place % s.period * ((1 << 32) // s.period) // SHARE, SHARE)
      share[i] = part * part // SHARE * (3 * SHARE - 2 * part) // SHARE
    end
    local corner = {}
    for i = 0, 1 do
      local layer = {}
      for k = 0, 1 do
        local seed = (s.seed + octave & 0xffffffff) ~ ((at[3] + k) * 0x27D4EB2F & 0xffffffff)
        layer[k] = between(lattice(seed, at[1] + i, at[2]), lattice(seed, at[1] + i, at[2] + 1), share[2])
      end
      corner[i] = between(layer[0], layer[1], share[3])
    end
    return between(corner[0], corner[1], share[1])
  end

  local function read(list, first, size)
    local s = { label = list[first], value = clamp(list[first + 1], 0, 32767),
      amplitude = clamp(list[first + 2], 0, 32767), period = clamp(list[first + 3], SHARE, 1 << 30),
      seed = list[first + 4] & 0xffffffff, box = {}, f = {} }
    for i = 0, 5 do s.box[i + 1] = clamp(list[first + 5 + i], 0, size[i // 2 + 1]) end
    for i = 0, 3 do
      s.f[i + 1] = {}
      for j = 0, 3 do
        local v = list[first + 11 + 4 * i + j]
        s.f[i + 1][j + 1] = j < 3 and clamp(v, -(1 << 21), 1 << 21) or v
      end
    end
    return s
  end

  local function draw_solids(list, depth, height, width)
    local n, k = list.shape[1], list.shape[2]
    local values = { shape = { n, depth, height, width }, dtype = "i16" }
    local labels = { shape = { n, depth, height, width }, dtype = "u8" }
    local at = 0
    for i = 0, n - 1 do
      local solids = {}
      for j = 0, k - 1 do solids[j + 1] = read(list, (i * k + j) * 27 + 1, { width, height, depth }) end
      for z = 0, depth - 1 do
        for y = 0, height - 1 do
          for x = 0, width - 1 do
            local value, label = 0, 0
            for _, s in ipairs(solids) do
              local box, cover = s.box, 0
              if s.label >= 0 and x >= box[1] and x < box[2] and y >= box[3] and y < box[4] and z >= box[5]
                and z < box[6] then
                for line = 0, 15 do
                  local low, high = span(s.f, 8 * y + 2 * (line % 4) + 1, 8 * z + 2 * (line // 4) + 1,
                    box[1] * VOXEL, box[2] * VOXEL)
                  cover = cover + math.max(0, math.min(high, (x + 1) * VOXEL) - math.max(low, x * VOXEL))
                end
              end
              if cover > 0 then
                local shade = s.value
                if s.amplitude > 0 then
                  local wave = 2 * noise(s, 0, x, y, z) + noise(s, 1, x, y, z) - 3 * (SHARE // 2)
                  shade = clamp(shade + s.amplitude * wave // SHARE, 0, 32767)
                end
                shade = shade * 16
                value = cover == WHOLE and shade or value + ((shade - value) * cover + WHOLE // 2) // WHOLE
                if 2 * cover >= WHOLE then label = s.label end
              end
            end
            at = at + 1
            values[at], labels[at] = (value + 8) // 16, label
          end
        end
      end
    end
    return values, labels
  end

  -- A row of the list from numbers: f as four functions { a, b, c, d } in units of one.
  local function solid(label, value, f, more)
    more = more or {}
    local r = { label, value, more.amplitude or 0, more.period or 3 * SHARE, more.seed or 0 }
    for _, v in ipairs(more.box or { 0, 99, 0, 99, 0, 99 }) do r[#r + 1] = v end
    for i = 1, 4 do
      for j = 1, 4 do r[#r + 1] = f[i] and math.floor(f[i][j] * ONE) or 0 end
    end
    return r
  end
  local function ball(x, y, z, r) return { { 1 / r, 0, 0, -x / r }, { 0, 1 / r, 0, -y / r }, { 0, 0, 1 / r, -z / r } } end
  local function rows_of(n, k, ...)
    local values = {}
    for _, r in ipairs { ... } do table.move(r, 1, #r, #values + 1, values) end
    return T { n, k, 27, values = values, dtype = "i32" }
  end
  local nothing = solid(-1, 0, {})
  local tilted = { { 0.3, 0.1, -0.05, -1.4 }, { -0.08, 0.25, 0.1, -1.2 }, { 0.02, -0.1, 0.35, -1.3 }, { 0.2, 0.3, 0.1, -2.2 } }
  local tube = { { 0.5, -0.2, 0.1, -1.5 }, { 0.1, 0.1, -0.6, 1.5 }, { 0, 0, 0, 0 }, { 0.1, 0.3, 0.05, -1.5 } }
  local along = { { 0, 0.6, 0, -1.8 }, { 0, 0, 0.7, -2 }, { 0, 0, 0, 0 }, { -0.3, 0, 0, 1.2 } }
  local small, large = -2147483648, 2147483647
  local wild, wild_too = solid(9, 77, {}), solid(8, 99, {})
  for i = 12, 27 do wild[i], wild_too[i] = i % 2 == 0 and small or large, i % 3 == 0 and large or small end

  row("draw_solids", {
    cases = {
      { rows_of(1, 1, solid(3, 1000, ball(3.2, 2.9, 3.6, 2.4))), 7, 6, 8 },
      { rows_of(2, 3, solid(1, 1000, ball(4, 4, 4, 3.7), { amplitude = 300, seed = -5 }), nothing,
        solid(200, 32767, ball(5.1, 3, 4, 0.5)), solid(7, 500, tilted), solid(2, 40000, tube, { amplitude = 90000 }),
        solid(4, -4, along, { box = { 1, 6, -4, 5, 2, 7 } })), 7, 8, 9 },
      -- a texture finer than a voxel, one of all of the volume; a layer; a solid that is cut by its box to nothing
      { rows_of(1, 3, solid(5, 200, { nil, nil, nil, { 0, 0.3, 0.2, -1.4 } }, { amplitude = 150, period = 1, seed = 9 }),
        solid(6, 900, ball(4, 4, 4, 3), { amplitude = 200, period = 1 << 30 }),
        solid(7, 900, ball(4, 4, 4, 3), { box = { 5, 5, 0, 9, 0, 9 } })), 6, 7, 8 },
      -- numbers at the ends of their range
      { rows_of(1, 3, wild, wild_too, solid(1, large, ball(2, 2, 2, 0.1), { amplitude = large, period = small })), 4, 5, 6 },
      { T { 1, 0, 27, values = {}, dtype = "i32" }, 2, 3, 4 },
      { T { 0, 2, 27, values = {}, dtype = "i32" }, 2, 3, 4 },
      { rows_of(1, 1, nothing), 0, 3, 4 },
    },
    dtypes = { "i32" },
    dtype = { "i16", "u8" },
    ref = draw_solids,
    broadcast = false,
    errors = {
      { T { 1, 27, dtype = "i32" }, 4, 4, 4, match = "list: expected i32 [n, k, 27]" },
      { T { 1, 1, 26, dtype = "i32" }, 4, 4, 4, match = "list: expected i32 [n, k, 27]" },
      { T { 1, 1, 27, dtype = "i64" }, 4, 4, 4, match = "list: expected i32 [n, k, 27]" },
      { rows_of(1, 1, nothing), 513, 4, 4, match = "depth: expected 0 to 512, got 513" },
      { rows_of(1, 1, nothing), 4, -1, 4, match = "height: expected 0 to 512, got -1" },
      { rows_of(1, 1, solid(256, 1, {})), 4, 4, 4, match = { "draw_solids", "256" } },
      { rows_of(1, 1, solid(-2, 1, {})), 4, 4, 4, match = { "draw_solids", "-2" } },
    },
    big = function(ty)
      local list = ty.zeros({ 3, 4, 27 }, { dtype = "i32" })
      list:select(2, 0):copy_(ty.randint(0, 9, { 3, 4 }))
      list:select(2, 1):copy_(ty.randint(0, 3000, { 3, 4 }))
      list:select(2, 2):fill_(100)
      list:select(2, 3):fill_(300000)
      for _, at in ipairs { 6, 8, 10 } do list:select(2, at):fill_(40) end
      for i = 0, 2 do
        list:select(2, 11 + 5 * i):copy_(ty.randint(80000, 200000, { 3, 4 }))
        list:select(2, 14 + 4 * i):copy_(ty.randint(-3000000, -1000000, { 3, 4 }))
      end
      return ty.draw_solids(list, 24, 25, 26)
    end,
  })
end
