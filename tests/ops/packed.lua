-- Rows of src/ops/packed.c. The weight is made of the case's numbers: sizes are odd, tiles are at the edge, rows are
-- empty and full.

return function(row, T)
  local from, at = T.from, T.at

  -- A weight [rows][columns], a table of rows that count from 0, with a share of zeros; its values are exact in f16.
  local function weight(rows, columns, share)
    local w = {}
    for r = 0, rows - 1 do
      w[r] = {}
      for c = 0, columns - 1 do
        local gone = (r * 131 + c * 71) % 10 < 10 * share
        w[r][c] = gone and 0 or ((r * 37 + c * 11) % 15 - 7.5) / 4
      end
    end
    return w
  end

  local function bitmap(rows, columns, share)
    local w, values, bytes, starts = weight(rows, columns, share), {}, {}, { 0 }
    for r = 0, rows - 1 do
      for c0 = 0, columns - 1, 8 do
        local byte = 0
        for c = c0, math.min(c0 + 7, columns - 1) do
          if w[r][c] ~= 0 then
            values[#values + 1] = w[r][c]
            byte = byte | 1 << c - c0
          end
        end
        bytes[#bytes + 1] = byte
      end
      starts[r + 2] = #values
    end
    return T { #values, values = values, dtype = "f16" },
      T { rows, (columns + 7) // 8, values = bytes, dtype = "u8" }, T { rows + 1, values = starts, dtype = "i64" }
  end

  -- The bits of a number in f16; those of weight() are all exact and no denormals.
  local function half(x)
    if x == 0 then return 0 end
    local sign, exponent = x < 0 and 0x8000 or 0, 0
    x = math.abs(x)
    while x >= 2 do x, exponent = x / 2, exponent + 1 end
    while x < 1 do x, exponent = x * 2, exponent - 1 end
    return sign | exponent + 15 << 10 | math.tointeger((x - 1) * 1024)
  end

  local function csl(rows, columns, share)
    local w, words, starts = weight(rows, columns, share), {}, { 0 }
    for r0 = 0, rows - 1, 128 do
      for c0 = 0, columns - 1, 64 do
        for c = c0, math.min(c0 + 63, columns - 1) do
          for r = r0, math.min(r0 + 127, rows - 1) do
            if w[r][c] ~= 0 then words[#words + 1] = half(w[r][c]) | (c - c0) * 128 + (r - r0) << 16 end
          end
        end
        starts[#starts + 1] = #words
      end
    end
    return T { #words, values = words, dtype = "i32" }, T { #starts, values = starts, dtype = "i64" }
  end

  local sizes = { { 3, 5, 0.4 }, { 1, 1, 0 }, { 2, 16, 1 }, { 4, 70, 0.6 }, { 5, 64, 0 } }
  local larger = { { 131, 67, 0.7 }, { 7, 200, 0.5 }, { 129, 130, 0.9 }, { 9, 192, 0.6 } }

  local function product_cases(stored)
    local cases = {}
    local function add(x, size, options)
      local case = { T(x), stored(size[1], size[2], size[3]) }
      for key, value in pairs(options or {}) do case[key] = value end
      cases[#cases + 1] = case
    end
    for _, size in ipairs(sizes) do
      add({ size[2] }, size)
      add({ 2, 3, size[2] }, size)
    end
    for _, size in ipairs(larger) do
      for _, n in ipairs { 1, 3, 11, 66 } do add({ n, size[2] }, size, { grad = false }) end
    end
    add({ 0, 5 }, sizes[1])
    return cases
  end

  local function product(x, w)
    local n, rows = #x.shape, #w + 1
    local shape = table.move(x.shape, 1, n, 1, {})
    shape[n] = rows
    return from(shape, function(index)
      local columns, sum, weights = x.shape[n], 0.0, w[index[n]]
      local line = 0 -- of x
      for d = 1, n - 1 do line = line * x.shape[d] + index[d] end
      for c = 0, columns - 1 do sum = sum + x[line * columns + c + 1] * weights[c] end
      return sum
    end)
  end

  -- The weight of a bitmap, or of words, as a table of rows from 0.
  local function of_bitmap(values, bits, columns)
    local w, k = {}, 0
    for r = 0, bits.shape[1] - 1 do
      w[r] = {}
      for c = 0, columns - 1 do
        if at(bits, { r, c // 8 }) >> c % 8 & 1 == 1 then
          k = k + 1
          w[r][c] = values[k]
        else
          w[r][c] = 0
        end
      end
    end
    return w
  end
  local function of_words(words, starts, rows, columns)
    local w, across = {}, (columns + 63) // 64
    for r = 0, rows - 1 do
      w[r] = {}
      for c = 0, columns - 1 do w[r][c] = 0 end
    end
    for tile = 0, #starts - 2 do
      for k = starts[tile + 1] + 1, starts[tile + 2] do
        local place, bits = words[k] >> 16 & 0xffff, words[k] & 0xffff
        local value = (1 + (bits & 1023) / 1024) * 2.0 ^ ((bits >> 10 & 31) - 15)
        w[tile // across * 128 + place % 128][tile % across * 64 + place // 128] = bits >> 15 == 1 and -value or value
      end
    end
    return w
  end

  local function dense(w, rows, columns)
    local y = from({ rows, columns }, function(index) return w[index[1]][index[2]] end)
    y.dtype = "f16"
    return y
  end

  local tol = { f64 = 1e-10, f32 = 1e-4, f16 = 6e-2, bf16 = 4e-1 }

  row("linear_bitmap", {
    cases = product_cases(bitmap),
    ref = function(x, values, bits) return product(x, of_bitmap(values, bits, x.shape[#x.shape])) end,
    tol = tol, constant = { values = true },
    errors = {
      { T {}, T { 2, dtype = "f16" }, T { 2, 1, dtype = "u8" }, T { 3, dtype = "i64" }, match = "x: expected [..., columns]" },
      { T { 9 }, T { 2, dtype = "f16" }, T { 2, 1, dtype = "u8" }, T { 3, dtype = "i64" }, match = "bitmap: expected u8 [rows, 2], got" },
      { T { 3 }, T { 2, dtype = "f32" }, T { 2, 1, dtype = "u8" }, T { 3, dtype = "i64" }, match = "values: expected f16 [n], got" },
      { T { 3 }, T { 2, dtype = "f16" }, T { 2, 1, dtype = "u8" }, T { 2, dtype = "i64" }, match = "starts: expected i64 [3], got" },
    },
    big = function(ty)
      local bits = ty.full({ 600, 130 }, 85, "u8")
      local starts = ty.arange(601) * (130 * 4)
      return ty.linear_bitmap(ty.randn(1, 1040), ty.randn(600 * 520):to "f16", bits, starts),
        ty.linear_bitmap(ty.randn(5, 1040), ty.randn(600 * 520):to "f16", bits, starts),
        ty.linear_bitmap(ty.randn(13, 1040), ty.randn(600 * 520):to "f16", bits, starts)
    end,
  })

  local csl_cases = product_cases(function(rows, columns, share)
    local words, starts = csl(rows, columns, share)
    return words, starts, rows
  end)
  row("linear_csl", {
    cases = csl_cases,
    ref = function(x, words, starts, rows) return product(x, of_words(words, starts, rows, x.shape[#x.shape])) end,
    tol = tol,
    errors = {
      { T {}, T { 2, dtype = "i32" }, T { 2, dtype = "i64" }, 3, match = "x: expected [..., columns]" },
      { T { 9 }, T { 2, dtype = "i64" }, T { 2, dtype = "i64" }, 3, match = "words: expected i32 [n], got" },
      { T { 65 }, T { 2, dtype = "i32" }, T { 2, dtype = "i64" }, 3, match = "starts: expected i64 [3], got" },
      { T { 65 }, T { 2, dtype = "i32" }, T { 3, dtype = "i64" }, -1, match = "rows: expected 0 or more" },
    },
    big = function(ty)
      local words = (ty.arange(8192) * 65536 + 0x3c00):to "i32"
      local starts = ty.tensor { 0, 4096, 8192, 8192, 8192 }
      return ty.linear_csl(ty.randn(3, 128), words, starts, 256)
    end,
  })

  local function dense_cases(stored, last)
    local cases = {}
    for _, list in ipairs { sizes, larger } do
      for _, size in ipairs(list) do
        local case = { stored(size[1], size[2], size[3]) }
        for _, value in ipairs(last(size)) do case[#case + 1] = value end
        cases[#cases + 1] = case
      end
    end
    return cases
  end
  row("dense_bitmap", {
    dtypes = { "f32" },
    cases = dense_cases(bitmap, function(size) return { size[2] } end),
    ref = function(values, bits, _, columns)
      return dense(of_bitmap(values, bits, columns), bits.shape[1], columns)
    end,
    errors = {
      { T { 2, dtype = "f16" }, T { 2, 1, dtype = "u8" }, T { 3, dtype = "i64" }, 9, match = "bitmap: expected u8 [rows, 2]" },
      { T { 2, dtype = "f16" }, T { 2, 1, dtype = "u8" }, T { 3, dtype = "i64" }, -1, match = "columns: expected 0 or more" },
    },
  })
  row("dense_csl", {
    dtypes = { "f32" },
    cases = dense_cases(csl, function(size) return { size[1], size[2] } end),
    ref = function(words, starts, rows, columns)
      return dense(of_words(words, starts, rows, columns), rows, columns)
    end,
    errors = { { T { 2, dtype = "i32" }, T { 3, dtype = "i64" }, 3, 9, match = "starts: expected i64 [2], got" } },
  })
end
