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
end
