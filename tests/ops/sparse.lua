-- Rows of src/ops/sparse.c.

return function(row, T)
  local from, at = T.from, T.at

  local function is_options(t) return type(t) == "table" and not t.shape end

  row("sparsify", {
    cases = {
      { T { 3, 7, distinct = true, avoid = { 0 } }, nil, 3 }, { T { 9, distinct = true, avoid = { 0 } }, T { 9, range = { 0.5, 2 }, dtype = "f64" }, 4, grad = false },
      { T { 2, 3, 5, distinct = true, avoid = { 0 } }, opts = { threshold = 1.03 }, dtypes = { "f64", "f32" } },
      { T { 2, 6, avoid = { 0, 1, -1 } }, T { 6, values = { 1, 2, 0, 1, 4, 1 }, dtype = "f32" }, 2 },
      { T { 6, values = { 1, -2, 2, 2, 0, -2 } }, nil, 2, grad = false }, -- of equal ones the first
      { T { 4, values = { 0, 0, 0, 0 } }, nil, 2, grad = false }, { T { 3, 4 }, nil, 9 }, { T { 3, 4 }, nil, 4 },
      { T { 0, 4 }, nil, 2 }, { T { 3, 0 }, nil, 2 }, { T { 1 }, nil, 1 }, { T { 2, 5, avoid = { 0 } }, T { 5 }, 0, 0.0, grad = false },
      { T { 3, 700, distinct = true, range = { -30, 30 } }, nil, 301, grad = false, dtypes = { "f64", "f32" } },
      { T { 2, 300, range = { -3, 3 } }, T { 300, range = { -1, 1 } }, 17, grad = false },
    },
    -- Scores as the op has them: of halves in f32.
    ref = function(x, scale, count, threshold)
      if is_options(scale) then scale, count, threshold = nil, scale.count, scale.threshold end
      count, threshold = count or 0, threshold or 0
      local n, y = x.shape[#x.shape], { shape = x.shape }
      for first = 0, #x - 1, math.max(n, 1) do
        local order, score = {}, {}
        for i = 1, n do
          local v = math.abs(x[first + i] * (scale and scale[i] or 1))
          score[i], order[i] = x.dtype == "f64" and v or string.unpack("f", string.pack("f", v)), i
        end
        table.sort(order, function(a, b) return score[a] > score[b] or score[a] == score[b] and a < b end)
        for rank, i in ipairs(order) do
          local stays = count > 0 and rank <= count or count == 0 and score[i] > threshold
          y[first + i] = stays and x[first + i] or 0
        end
      end
      return y
    end,
    constant = { scale = true },
    errors = {
      { T {}, match = "x: expected [..., n]" }, { T { 2, 3 }, T { 4 }, 1, match = { "scale: expected [3]", "[4]" } },
      { T { 2, 3 }, nil, -1, match = "count: expected 0 or more, got -1" },
      { T { 2, 3 }, T { 3, dtype = "i64" }, 1, match = "scale" },
    },
    big = function(ty)
      return ty.sparsify(ty.randn(70, 3001), ty.rand(3001), 1500), ty.sparsify(ty.randn(70, 3001), nil, 0, 0.7)
    end,
  })

  -- Half of the inputs are zeros.
  local function gaps(n)
    local values = {}
    for i = 1, n do values[i] = i * 7 % 5 < 2 and 0 or ((i * 37 % 23) - 11) / 8 end
    return values
  end

  row("sparse_linear", {
    cases = {
      { T { 4 }, T { 4, 5 }, T { 5 } }, { T { 1, 1, 7 }, T { 7, 3 } }, { T { 3, 4 }, T { 4, 5 }, T { 5 } }, { T { 2, 2, 4 }, T { 4, 3 } },
      { T { 6, values = { 0, 1, 0, 0, -2, 0 } }, T { 6, 4 }, T { 4 } }, { T { 1, 3, values = { 0, 0, 0 } }, T { 3, 4 } },
      { T { 0 }, T { 0, 4 } }, { T { 4 }, T { 4, 0 } }, { T { 0, 4 }, T { 4, 3 } },
      { T { 41, values = gaps(41) }, T { 41, 37 }, T { 37 }, grad = false }, { T { 1, 67, values = gaps(67) }, T { 67, 300 }, grad = false },
      { T { 33, values = gaps(33) }, T { 33, 1 }, grad = false }, { T { 530, values = gaps(530) }, T { 530, 40 }, T { 40 }, grad = false },
      { T { 19, values = gaps(19) }, T { 19, 1100 }, T { 1100 }, grad = false },
    },
    ref = function(x, weight, bias)
      local n = #x.shape
      local shape = table.move(x.shape, 1, n, 1, {})
      shape[n] = weight.shape[2]
      return from(shape, function(index)
        local where, sum = table.move(index, 1, n, 1, {}), bias and at(bias, { index[n] }) or 0.0
        for k = 0, x.shape[n] - 1 do
          where[n] = k
          sum = sum + at(x, where) * at(weight, { k, index[n] })
        end
        return sum
      end)
    end,
    tol = { f64 = 1e-10, f32 = 1e-4, f16 = 3e-2, bf16 = 2e-1 },
    errors = {
      { T {}, T { 2, 3 }, match = "x: expected [..., in]" }, { T { 2, 3 }, T { 4, 3 }, match = "x: expected [..., 4] for weight [4, 3]" },
      { T { 3 }, T { 3 }, match = "weight: expected [in, out]" }, { T { 3 }, T { 3, 2 }, T { 3 }, match = { "bias: expected [2]", "[3]" } },
    },
    big = function(ty)
      local x = ty.sparsify(ty.randn(3000), nil, 900)
      return ty.sparse_linear(x, ty.randn(3000, 2050), ty.randn(2050)), ty.sparse_linear(x:to "bf16", ty.randn(3000, 530):to "bf16")
    end,
  })
end
