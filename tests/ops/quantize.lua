-- Rows of src/ops/quantize.c. What bytes the formats have is tested in tests/lua/quantize_test.lua; here inputs that are
-- block-quantized come as what they decode to.

return function(row, T)
  local from = T.from

  -- The largest error that a code may have, of values up to 2.
  local error = { q8_0 = 0.008, q4_0 = 0.27, q4_k = 0.15, q6_k = 0.07, nf4 = 0.32 }

  row("quantize", {
    cases = {
      { T { 3, 64 }, "q8_0" }, { T { 2, 2, 32 }, "q8_0" }, { T { 0, 32 }, "q8_0" }, { T { 3, 0 }, "q8_0" },
      { T { 96 }, "q4_0" }, { T { 2, 256 }, "q4_k" }, { T { 512 }, "q6_k" }, { T { 3, 192 }, "nf4" },
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
      { T { 2, 32 }, "f16", match = "dtype: expected q8_0, q4_0, q4_k, q6_k or nf4, got f16" },
      { T { 2, 32 }, match = "dtype: expected q8_0" }, { T { 2, 32, dtype = "q8_0" }, "q4_0", match = "expected a float tensor" },
    },
  })

  local function decoded(x) return from(x.shape, function(index) return T.at(x, index) end) end

  row("dequantize", {
    dtypes = { "f32" },
    cases = {
      { T { 3, 64, dtype = "q8_0" } }, { T { 2, 2, 32, dtype = "q4_0" } }, { T { 512, dtype = "q4_k" } },
      { T { 2, 256, dtype = "q6_k" } }, { T { 2, 192, dtype = "nf4" } }, { T { 0, 32, dtype = "q8_0" } },
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

  row("embedding_quantized", {
    dtypes = { "f32" }, dtype = "f32",
    cases = {
      { T { 5, 64, dtype = "q8_0" }, T { 3, int = { 0, 5 } } }, { T { 4, 256, dtype = "q4_k" }, T { 2, 2, int = { 0, 4 } } },
      { T { 4, 64, dtype = "nf4" }, T { int = { 0, 4 } } }, { T { 4, 32, dtype = "q4_0" }, T { 0, int = { 0, 4 } } },
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
      { T { 11, 128 }, T { 4, 128, dtype = "nf4" }, T { 4 } }, { T { 2, 64 }, T { 4, 64, dtype = "nf4" } },
      { T { 0, 64 }, T { 5, 64, dtype = "q8_0" }, T { 5 } }, { T { 17, 96 }, T { 33, 96, dtype = "q8_0" } },
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
      { T { 3, 5 }, T { 5, 256, dtype = "q6_k" } }, { T { 0, 5 }, T { 5, 64, dtype = "q8_0" } },
    },
    ref = function(g, w) return product(g, w, nil, true) end,
    tol = { f32 = 1e-5, f64 = 1e-5, f16 = 4e-3, bf16 = 4e-2 }, -- f64 is computed in f32
    grad = "its gradient is linear_quantized, which rounds",
    errors = {
      { T { 2, 4 }, T { 4, 64 }, match = "weight: expected a block-quantized tensor" },
      { T { 2, 5 }, T { 4, 64, dtype = "q8_0" }, match = "g: expected [..., 4] for weight" },
    },
  })
end
