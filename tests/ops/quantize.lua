-- Rows of src/ops/quantize.c. What bytes the formats have is tested in tests/lua/quantize_test.lua; here inputs that are
-- block-quantized come as what they decode to.

return function(row, T)
  local from = T.from

  -- The largest error that a code may have, of values up to 2.
  local error = { q8_0 = 0.008, q4_0 = 0.27, q2_k = 0.8, q3_k = 0.5, q4_k = 0.15, q6_k = 0.07, nf4 = 0.32,
    mxfp4 = 0.52, nvfp4 = 0.4 }

  row("quantize", {
    cases = {
      { T { 3, 64 }, "q8_0" }, { T { 2, 2, 32 }, "q8_0" }, { T { 0, 32 }, "q8_0" }, { T { 3, 0 }, "q8_0" },
      { T { 96 }, "q4_0" }, { T { 2, 256 }, "q4_k" }, { T { 512 }, "q6_k" }, { T { 2, 512 }, "q2_k" }, { T { 256 }, "q3_k" }, { T { 3, 192 }, "nf4" },
      { T { 3, 96 }, "mxfp4" }, { T { 3, 192 }, "nvfp4" }, { T { 2, 0 }, "nvfp4" }, { T { 0, 64 }, "nvfp4" },
      { T { 3, 64 }, "mxfp4", T { 64, range = { 0.5, 2 } } }, { T { 3, 64 }, "nvfp4", T { 64, range = { 0.5, 2 } } },
      -- With importance; whether the codes lose less: tests/modules/quant/imatrix_test.lua.
      { T { 3, 64 }, "q4_0", T { 64, range = { 0.5, 2 } } }, { T { 2, 256 }, "q4_k", T { 256, range = { 0.5, 2 } } },
      { T { 2, 2, 512 }, "q6_k", T { 512, range = { 0.5, 2 } } }, { T { 512 }, "q2_k", T { 512, range = { 0.5, 2 } } },
      { T { 256 }, "q3_k", T { 256, range = { 0.5, 2 } } }, { T { 3, 64 }, "q8_0", T { 64 } },
      { T { 0, 32 }, "q4_0", T { 32 } },
    },
    ref = function(x, dtype)
      local y = from(x.shape, function(index) return T.at(x, index) end)
      y.dtype = dtype
      return y
    end,
    tol = error,
    errors = {
      { T { 2, 31 }, "q8_0", match = "multiple of 32, got [2, 31]" }, { T {}, "q8_0", match = "multiple of 32" },
      { T { 2, 128 }, "q4_k", match = "multiple of 256" }, { T { 2, 32 }, "nf4", match = "multiple of 64" },
      { T { 2, 32 }, "f16", match = "dtype: expected q8_0, q4_0, q2_k, q3_k, q4_k, q6_k, nf4, mxfp4 or nvfp4, got f16" },
      { T { 2, 32 }, "q4_0", T { 31 }, match = "importance: expected [32] for x" },
      { T { 2, 32 }, "q4_0", T { 2, 32 }, match = "importance: expected [32] for x" },
      { T { 2, 64 }, "nf4", T { 64 }, match = "importance: nf4 has fixed levels and takes none" },
      { T { 2, 32 }, match = "dtype: expected q8_0" }, { T { 2, 32, dtype = "q8_0" }, "q4_0", match = "expected a float tensor" },
    },
  })

  local function decoded(x) return from(x.shape, function(index) return T.at(x, index) end) end

  row("dequantize", {
    dtypes = { "f32" },
    cases = {
      { T { 3, 64, dtype = "q8_0" } }, { T { 2, 2, 32, dtype = "q4_0" } }, { T { 512, dtype = "q4_k" } },
      { T { 2, 256, dtype = "q2_k" } }, { T { 512, dtype = "q3_k" } },
      { T { 2, 256, dtype = "q6_k" } }, { T { 2, 192, dtype = "nf4" } },
      { T { 3, 96, dtype = "mxfp4" } }, { T { 3, 192, dtype = "nvfp4" } }, { T { 64, dtype = "nvfp4" }, "f16", tol = 2e-3 }, { T { 0, 32, dtype = "q8_0" } },
      { T { 2, 32, dtype = "q8_0" }, "f64" }, { T { 2, 32, dtype = "q8_0" }, "f16", tol = 2e-3 },
    },
    ref = function(x, dtype)
      local y = decoded(x)
      y.dtype = dtype or "f32"
      return y
    end,
    errors = {
      { T { 2, 32 }, match = "expected a block-quantized tensor" },
      { T { 2, 32, dtype = "q8_0" }, "i64", match = "dtype: expected f32, f64, f16 or bf16, got i64" },
    },
  })

  -- Column by column, as the paper's algorithm has it. factor: an upper triangle; scales and offsets so that codes are
  -- used from end to end, and some are cut.
  local function triangle(n)
    local v = {}
    for i = 1, n do
      for j = 1, n do v[#v + 1] = j < i and 7 or i == j and 1 + i % 3 / 4 or math.sin(3 * i + 5 * j) / 4 end
    end
    return T { n, n, values = v }
  end
  local function scales(rows, n, zero)
    local v = {}
    for i = 1, rows * n do v[i] = zero == i and 0 or 0.25 + i % 5 / 8 end
    return T { rows, n, values = v }
  end
  row("quantize_columns", {
    cases = {
      { T { 3, 5 }, triangle(5), scales(3, 5), T { 3, 5, range = { -1.5, -0.5 } }, 4 },
      { T { 1, 1 }, triangle(1), scales(1, 1), T { 1, 1 }, 2 },
      { T { 17, 9 }, triangle(9), scales(17, 9, 8), T { 17, 9, range = { -1, 0 } }, 8 },
      { T { 2, 40 }, triangle(40), scales(2, 40), T { 2, 40, range = { -1, 0 } }, 16 },
      { T { 35, 33 }, triangle(33), scales(35, 33), T { 35, 33, range = { -1, 0 } }, 256 },
      { T { 0, 4 }, triangle(4), scales(0, 4), T { 0, 4 }, 4 },
    },
    dtypes = { "f32", "f64" },
    ref = function(w, factor, scale, offset, levels)
      local rows, n, left = w.shape[1], w.shape[2], {}
      local codes, errors = { shape = w.shape, dtype = "u8" }, { shape = w.shape }
      for i = 1, rows * n do left[i] = w[i] end
      for r = 1, rows do
        for i = 1, n do
          local at = (r - 1) * n + i
          local x = scale[at] ~= 0 and (left[at] - offset[at]) / scale[at] or 0
          local low = math.floor(x)
          if x - low > 0.5 or (x - low == 0.5 and low % 2 == 1) then low = low + 1 end
          codes[at] = math.max(0, math.min(levels - 1, low))
          errors[at] = (left[at] - (scale[at] * codes[at] + offset[at])) / factor[(i - 1) * n + i]
          for j = i + 1, n do
            left[(r - 1) * n + j] = left[(r - 1) * n + j] - errors[at] * factor[(i - 1) * n + j]
          end
        end
      end
      return codes, errors
    end,
    errors = {
      { T { 3 }, triangle(3), scales(1, 3), T { 1, 3 }, 4, match = "w: expected" },
      { T { 2, 3 }, triangle(2), scales(2, 3), T { 2, 3 }, 4, match = "factor: expected [3, 3] for w" },
      { T { 2, 3 }, triangle(3), scales(1, 3), T { 2, 3 }, 4, match = "scale: expected [2, 3] for w" },
      { T { 2, 3 }, triangle(3), scales(2, 3), T { 2, 2 }, 4, match = "offset: expected [2, 3] for w" },
      { T { 2, 3 }, triangle(3), scales(2, 3), T { 2, 3 }, 1, match = "levels: expected 2 to 256, got 1" },
    },
  })

  row("embedding_quantized", {
    dtypes = { "f32" }, dtype = "f32",
    cases = {
      { T { 5, 64, dtype = "q8_0" }, T { 3, int = { 0, 5 } } }, { T { 4, 256, dtype = "q4_k" }, T { 2, 2, int = { 0, 4 } } },
      { T { 4, 64, dtype = "nf4" }, T { int = { 0, 4 } } },
      { T { 4, 64, dtype = "nvfp4" }, T { 3, int = { 0, 4 } } }, { T { 4, 32, dtype = "mxfp4" }, T { 3, int = { 0, 4 } } },
      { T { 4, 32, dtype = "q4_0" }, T { 0, int = { 0, 4 } } },
    },
    ref = function(w, index)
      local shape = table.move(index.shape, 1, #index.shape, 1, {})
      shape[#shape + 1] = w.shape[2]
      return from(shape, function(at)
        local place = table.move(at, 1, #at - 1, 1, {})
        return T.at(w, { T.at(index, place), at[#at] })
      end)
    end,
    errors = {
      { T { 2, 32 }, T { 3, int = { 0, 2 } }, match = "expected a block-quantized tensor" },
      { T { 2, 32, dtype = "q8_0" }, T { values = { 2, 0 }, 2, dtype = "i64" }, match = "index 2 is out of range" },
      { T { 2, 32, dtype = "q8_0" }, T { 3 }, match = "index" },
    },
  })

  -- x [..., k] times w [n, k] transposed (turned: w [k, n]), plus bias.
  local function product(x, w, bias, turned)
    local shape = table.move(x.shape, 1, #x.shape, 1, {})
    local k = shape[#shape]
    shape[#shape] = w.shape[turned and 2 or 1]
    return from(shape, function(at)
      local place, j, sum = table.move(at, 1, #at, 1, {}), at[#at], 0.0
      for i = 0, k - 1 do
        place[#place] = i
        sum = sum + T.at(x, place) * T.at(w, turned and { i, j } or { j, i })
      end
      return sum + (bias and T.at(bias, { j }) or 0)
    end)
  end

  -- x is rounded to 1/254 of its largest; tests/lua/quantize_test.lua compares with what follows from that.
  local rounds = { f32 = 0.02, f64 = 0.02, f16 = 0.02, bf16 = 0.04 }
  row("linear_quantized", {
    cases = {
      { T { 3, 64 }, T { 5, 64, dtype = "q8_0" }, T { 5 } }, { T { 64 }, T { 3, 64, dtype = "q4_0" } },
      { T { 2, 2, 256 }, T { 35, 256, dtype = "q4_k" }, T { 35 } }, { T { 9, 256 }, T { 3, 256, dtype = "q6_k" } },
      { T { 256 }, T { 5, 256, dtype = "q2_k" }, T { 5 } }, { T { 7, 512 }, T { 3, 512, dtype = "q3_k" } },
      { T { 10, 256 }, T { 4, 256, dtype = "q2_k" }, T { 4 } }, { T { 9, 256 }, T { 33, 256, dtype = "q3_k" } },
      { T { 11, 128 }, T { 4, 128, dtype = "nf4" }, T { 4 } }, { T { 2, 64 }, T { 4, 64, dtype = "nf4" } },
      { T { 0, 64 }, T { 5, 64, dtype = "q8_0" }, T { 5 } }, { T { 17, 96 }, T { 33, 96, dtype = "q8_0" } },
      { T { 96 }, T { 5, 96, dtype = "mxfp4" }, T { 5 } }, { T { 17, 96 }, T { 33, 96, dtype = "mxfp4" } },
      { T { 3, 192 }, T { 5, 192, dtype = "nvfp4" }, T { 5 } }, { T { 17, 64 }, T { 33, 64, dtype = "nvfp4" } },
      -- one row, of which several rows of the weight are read at a time and some are left; blocks that fill no eight
      { T { 96 }, T { 11, 96, dtype = "q8_0" }, T { 11 } }, { T { 352 }, T { 7, 352, dtype = "q4_0" }, T { 7 } },
      { T { 512 }, T { 7, 512, dtype = "q4_k" } }, { T { 512 }, T { 6, 512, dtype = "q6_k" }, T { 6 } },
      { T { 12, 288 }, T { 3, 288, dtype = "q4_0" } },
      -- many rows, for which some formats are decoded once
      { T { 97, 64 }, T { 3, 64, dtype = "q8_0" }, T { 3 } }, { T { 97, 64 }, T { 3, 64, dtype = "nvfp4" } },
    },
    ref = function(x, w, bias) return product(x, w, bias) end,
    tol = rounds,
    grad = "the forward pass rounds x; tests/lua/quantize_test.lua compares gradients with decoded weights",
    errors = {
      { T { 2, 64 }, T { 4, 64 }, match = "weight: expected a block-quantized tensor" },
      { T { 2, 32 }, T { 4, 64, dtype = "q8_0" }, match = "x: expected [..., 64] for weight" },
      { T { 2, 64 }, T { 64, dtype = "q8_0" }, match = "weight" },
      { T { 2, 64 }, T { 4, 64, dtype = "q8_0" }, T { 3 }, match = "bias: expected [4]" },
    },
  })

  row("linear_quantized_backward", {
    cases = {
      { T { 3, 5 }, T { 5, 64, dtype = "q8_0" } }, { T { 7 }, T { 7, 64, dtype = "nf4" } },
      { T { 2, 2, 9 }, T { 9, 256, dtype = "q4_k" } }, { T { 33, 9 }, T { 9, 96, dtype = "q4_0" } },
      { T { 3, 5 }, T { 5, 256, dtype = "q6_k" } }, { T { 3, 5 }, T { 5, 256, dtype = "q2_k" } },
      { T { 2, 9 }, T { 9, 512, dtype = "q3_k" } }, { T { 0, 5 }, T { 5, 64, dtype = "q8_0" } },
      { T { 3, 5 }, T { 5, 96, dtype = "mxfp4" } }, { T { 9, 5 }, T { 5, 64, dtype = "nvfp4" } },
    },
    ref = function(g, w) return product(g, w, nil, true) end,
    tol = { f32 = 1e-5, f64 = 1e-5, f16 = 4e-3, bf16 = 4e-2 }, -- f64 is computed in f32
    grad = "its gradient is linear_quantized, which rounds",
    errors = {
      { T { 2, 4 }, T { 4, 64 }, match = "weight: expected a block-quantized tensor" },
      { T { 2, 5 }, T { 4, 64, dtype = "q8_0" }, match = "g: expected [..., 4] for weight" },
    },
  })

  -- Bytes of five trits, of 64 rows beside each other, the value of a weight's element, and the product. `any`: with
  -- magnitudes above 121, which count as that. x and scales are small integers where sums have to be exact.
  local function trits(groups, rows, planes, bytes, any)
    local v, blocks = {}, (rows + 63) // 64
    for i = 1, groups * blocks * bytes * planes * 64 do
      local code = (37 * i + i * i // 7) % 256
      v[i] = any and code or code % 128 % 122 + code // 128 * 128
    end
    return T { groups, blocks, bytes, planes, 64, values = v, dtype = "u8" }
  end
  local function whole(n, columns, top)
    local v = {}
    for i = 1, n * columns do v[i] = (29 * i + i * i // 5) % (2 * top + 1) - top end
    return v
  end
  row("matmul_trit", {
    cases = {
      { T { 3, 10 }, trits(1, 4, 2, 2), T { 1, 4, 2 }, 10 }, { T { 7 }, trits(1, 3, 1, 2), T { 1, 3, 1 }, 7 },
      { T { 2, 2, 20 }, trits(3, 5, 2, 2), T { 3, 5, 2 }, 8 }, { T { 2, 6 }, trits(6, 3, 2, 1), T { 6, 3, 2 }, 1 },
      { T { 2, 33 }, trits(2, 9, 3, 6), T { 2, 9, 3 }, 30 }, { T { 2, 9 }, trits(1, 3, 5, 3, true), T { 1, 3, 5 }, 12 },
      { T { 3, 64, values = whole(3, 64, 9) }, trits(1, 5, 2, 13), T { 1, 5, 2, values = whole(5, 2, 4) }, 64, tol = 0 },
      { T { 2, 100, values = whole(2, 100, 9) }, trits(4, 7, 2, 6), T { 4, 7, 2, values = whole(28, 2, 4) }, 30, tol = 0 },
      { T { 2, 100 }, trits(1, 3, 2, 20, true), T { 1, 3, 2 }, 100 },
      -- several blocks of rows, whole and not, and more rows of x than go together
      { T { 3, 24, values = whole(3, 24, 9) }, trits(2, 70, 2, 3, true), T { 2, 70, 2, values = whole(140, 2, 4) }, 13,
        tol = 0, grad = false },
      { T { 11, 18, values = whole(11, 18, 9) }, trits(1, 130, 3, 4), T { 1, 130, 3, values = whole(130, 3, 4) }, 18,
        tol = 0, grad = false },
      { T { 128 }, trits(2, 64, 1, 13), T { 2, 64, 1 }, 64, grad = false },
      -- groups of so many bytes that sums of one kind do not fit, and that none do
      { T { 5, 130, values = whole(5, 130, 9) }, trits(2, 5, 2, 18), T { 2, 5, 2, values = whole(10, 2, 4) }, 88,
        tol = 0 },
      { T { 3, 260, values = whole(3, 260, 9) }, trits(1, 3, 1, 52, true), T { 1, 3, 1, values = whole(3, 1, 4) }, 260,
        tol = 0, grad = false },
      { T { 2, 610, values = whole(2, 610, 9) }, trits(1, 2, 1, 122), T { 1, 2, 1, values = whole(2, 1, 4) }, 610,
        tol = 0, grad = false },
      { T { 0, 10 }, trits(1, 4, 2, 2), T { 1, 4, 2 }, 10 }, { T { 2, 5 }, trits(1, 0, 2, 1), T { 1, 0, 2 }, 5 },
    },
    ref = function(x, codes, factors, group)
      local shape = table.move(x.shape, 1, #x.shape, 1, {})
      local k = shape[#shape]
      shape[#shape] = factors.shape[2]
      return from(shape, function(at)
        local place, n, sum = table.move(at, 1, #at, 1, {}), at[#at], 0.0
        for i = 0, k - 1 do
          place[#place] = i
          for p = 0, codes.shape[4] - 1 do
            local code = T.at(codes, { i // group, n // 64, i % group // 5, p, n % 64 })
            local number = math.min(code % 128, 121) * (code < 128 and 1 or -1) + 121
            local trit = number // 3 ^ (i % group % 5) % 3 - 1
            sum = sum + T.at(x, place) * trit * T.at(factors, { i // group, n, p })
          end
        end
        return sum
      end)
    end,
    tol = { f16 = 2e-2, bf16 = 0.2 }, -- scales are rounded as x is
    errors = {
      { T { 3, 10 }, trits(2, 4, 2, 2), T { 2, 4, 2 }, 10, match = "trits: expected u8 [1, blocks, 2, planes, 64] for x" },
      { T { 3, 10 }, trits(2, 4, 2, 2), T { 2, 4, 2 }, 5, match = "trits: expected u8 [2, blocks, 1, planes, 64] for x" },
      { T { 3, 10 }, T { 1, 1, 2, 2, 64 }, T { 1, 4, 2 }, 10, match = "trits: expected u8" },
      { T { 3, 10 }, trits(1, 4, 2, 2), T { 1, 4, 1 }, 10, match = "scales: expected [1, n, 2] for trits" },
      { T { 3, 10 }, trits(1, 4, 2, 2), T { 1, 65, 2 }, 10, match = "n of 1 blocks of 64" },
      { T { 3, 10 }, trits(1, 4, 2, 2), T { 1, 4, 2 }, 0, match = "group: expected at least 1, got 0" },
      { T { 3, 0 }, trits(0, 4, 2, 2), T { 0, 4, 2 }, 10, match = "x: expected [..., k] with k above 0" },
    },
  })

  -- Entries of a codebook: few rows of x and many, entries of each length that has a loop of its own and of another,
  -- rows of codes that are no multiple of eight.
  local function codes(n, places, top)
    local v = {}
    for i = 1, n * places do v[i] = (41 * i + i * i // 3) % top end
    return T { n, places, values = v, dtype = "u8" }
  end
  row("linear_codebook", {
    cases = {
      { T { 20 }, codes(3, 5, 9), T { 9, 4 } }, { T { 3, 72 }, codes(5, 9, 256), T { 256, 8 } },
      { T { 2, 2, 68 }, codes(7, 17, 16), T { 16, 4 } }, { T { 8, 34 }, codes(9, 17, 4), T { 4, 2 } },
      { T { 7, 12 }, codes(3, 4, 5), T { 5, 3 } }, { T { 1, 9 }, codes(4, 9, 7), T { 7, 1 } },
      { T { 11, 32 }, codes(6, 8, 12), T { 12, 4 } }, { T { 5, 22 }, codes(2, 2, 3), T { 3, 11 } },
      { T { 6, 64 }, codes(3, 8, 1), T { 1, 8 } }, { T { 0, 8 }, codes(3, 2, 3), T { 3, 4 } },
      { T { 2, 8 }, codes(0, 2, 3), T { 3, 4 } }, { T { 2, 0 }, codes(3, 0, 3), T { 3, 4 } },
      -- so many rows that products with x are made for all entries and looked up, in blocks that are whole and not
      { T { 2, 20 }, codes(520, 5, 256), T { 256, 4 }, grad = false },
      { T { 140 }, codes(641, 70, 200), T { 200, 2 }, grad = false },
      { T { 3, 24 }, codes(700, 8, 9), T { 9, 3 }, grad = false },
    },
    ref = function(x, index, entries)
      local d = entries.shape[2]
      local shape = table.move(x.shape, 1, #x.shape, 1, {})
      local k = shape[#shape]
      shape[#shape] = index.shape[1]
      return from(shape, function(at)
        local place, n, sum = table.move(at, 1, #at, 1, {}), at[#at], 0.0
        for i = 0, k - 1 do
          place[#place] = i
          sum = sum + T.at(x, place) * T.at(entries, { T.at(index, { n, i // d }), i % d })
        end
        return sum
      end)
    end,
    tol = { f16 = 2e-2, bf16 = 0.2 }, -- the codebook is rounded as x is
    errors = {
      { T { 3, 8 }, T { 4, 2 }, T { 3, 4 }, match = "codes: expected u8 [n, k / d], got" },
      { T { 3, 9 }, codes(4, 2, 3), T { 3, 4 }, match = "x: expected [..., 8] for codes" },
      { T { 3, 8 }, codes(4, 2, 3), T { 12 }, match = "codebook: expected" },
      { T { 3, 8 }, codes(4, 2, 3), T { 257, 4 }, match = "codebook: expected [entries, d] with 1 to 256 entries" },
      { T { 3, 8 }, codes(4, 2, 9), T { 3, 4 }, match = "out of range" },
    },
  })
end
