-- Rows of src/ops/sparse_products.c.

return function(row, T)
  local function i64(values) return T { #values, values = values, dtype = "i64" } end

  -- fn(row, column, place of its value) for each entry, from 0.
  local function entries(offsets, columns, order, fn)
    for r = 0, #offsets - 2 do
      for j = offsets[r + 1], offsets[r + 2] - 1 do fn(r, columns[j + 1], order and order[j + 1] or j) end
    end
  end

  local function zeros(shape)
    local y = { shape = shape }
    for i = 1, T.count(shape) do y[i] = 0.0 end
    return y
  end

  local function product(values, x, offsets, columns, order)
    local d = x.shape[2]
    local y = zeros { #offsets - 1, d }
    entries(offsets, columns, order and order.shape and order or nil, function(r, column, j)
      for i = 1, d do y[r * d + i] = y[r * d + i] + values[j + 1] * x[column * d + i] end
    end)
    return y
  end

  local function sampled(a, b, offsets, columns, order)
    local d = a.shape[2]
    local y = zeros { #columns }
    entries(offsets, columns, order and order.shape and order or nil, function(r, column, j)
      for i = 1, d do y[j + 1] = y[j + 1] + a[r * d + i] * b[column * d + i] end
    end)
    return y
  end

  -- 4 x 5 with an empty row, an empty column, and an entry that is there twice.
  local offsets, columns = i64 { 0, 2, 2, 5, 7 }, i64 { 4, 1, 0, 1, 1, 2, 0 }
  local order = i64 { 3, 0, 6, 1, 4, 2, 5 }
  local turned = { turned_offsets = i64 { 0, 2, 5, 6, 6, 7 }, turned_columns = i64 { 2, 3, 0, 2, 2, 3, 0 },
    turned_order = i64 { 2, 6, 1, 3, 4, 5, 0 } }
  -- Rows of 0, 1, 2 ... entries in n columns.
  local function wide(rows, n)
    local o, c = { 0 }, {}
    for r = 0, rows - 1 do
      for j = 1, r * 5 % 23 do c[#c + 1] = (r * 31 + j * 17) % n end
      o[#o + 1] = #c
    end
    return i64(o), i64(c), #c
  end
  local many_offsets, many_columns, many = wide(60, 41)
  local small = { range = { -0.5, 0.5 }, many }

  row("sparse_mm", {
    cases = {
      { T { 7 }, T { 5, 3 }, offsets, columns }, { T { 7 }, T { 5, 2 }, offsets, columns, order },
      { T { 7 }, T { 5, 1 }, offsets, columns }, { T { 7 }, T { 5, 2 }, offsets, columns, opts = turned },
      { T { 0 }, T { 3, 2 }, i64 { 0, 0, 0 }, i64 {} }, { T { 0 }, T { 3, 2 }, i64 { 0 }, i64 {} },
      { T { 7 }, T { 5, 0 }, offsets, columns },
      { T(small), T { 41, 67 }, many_offsets, many_columns, grad = false },
      { T(small), T { 41, 260 }, many_offsets, many_columns, grad = false },
      { T(small), T { 41, 1 }, many_offsets, many_columns, grad = false },
    },
    ref = product,
    tol = { f64 = 1e-10, f32 = 2e-5, f16 = 2e-2, bf16 = 1e-1 },
    errors = {
      { T { 6 }, T { 5, 3 }, offsets, columns, match = "values: expected [7]" },
      { T { 7 }, T { 5 }, offsets, columns, match = "x: expected [n, d]" },
      { T { 7 }, T { 4, 3 }, offsets, columns, match = "index 4 is out of range for size 4" },
      { T { 7 }, T { 4, 1 }, offsets, columns, match = "index 4 is out of range for size 4" },
      { T { 7 }, T { 5, 3 }, i64 { 0, 2, 1, 7 }, columns, match = "offsets do not rise from 0 to 7: 1 stands at 2" },
      { T { 7 }, T { 5, 3 }, i64 { 0, 2, 6 }, columns, match = "offsets do not rise from 0 to 7: 6 stands at 2" },
      { T { 7 }, T { 5, 3 }, offsets, i64 { 4, 1, 0, -1, 1, 2, 0 }, match = "index -1 is out of range for size 5" },
      { T { 7 }, T { 5, 3 }, offsets, columns, i64 { 0, 1, 2, 3, 4, 5, 7 }, match = "index 7 is out of range for size 7" },
      { T { 7 }, T { 5, 3 }, offsets, columns, i64 { 0, 1 }, match = "order: expected [7]" },
      { T { 7 }, T { 5, 3 }, T { 5, dtype = "f32" }, columns, match = "offsets" },
      { T { 7 }, T { 5, 3 }, offsets, columns, opts = { turned_order = order }, match = "turned_offsets: expected" },
      { T { 7 }, T { 4, 3 }, offsets, columns, opts = turned, match = "turned_offsets: expected [5]" },
    },
    big = function(ty)
      local index = ty.randint(0, 500, { 20000 })
      local _, begins = ty.segments_of(index, 500)
      local values, x = ty.randn(20000):requires_grad_(), ty.randn(300, 50):requires_grad_()
      local y = ty.sparse_mm(values, x, begins, ty.randint(0, 300, { 20000 }))
      return y:detach(), table.unpack(ty.grad((y * ty.randn(500, 50)):sum(), { values, x }))
    end,
  })

  row("sddmm", {
    cases = {
      { T { 4, 3 }, T { 5, 3 }, offsets, columns }, { T { 4, 2 }, T { 5, 2 }, offsets, columns, order },
      { T { 4, 2 }, T { 5, 2 }, offsets, columns, opts = turned }, { T { 4, 0 }, T { 5, 0 }, offsets, columns },
      { T { 2, 3 }, T { 5, 3 }, i64 { 0, 0, 0 }, i64 {} },
      { T { 60, 67 }, T { 41, 67 }, many_offsets, many_columns, grad = false },
    },
    ref = sampled,
    tol = { f64 = 1e-10, f32 = 2e-5, f16 = 2e-2, bf16 = 1e-1 },
    errors = {
      { T { 4, 3 }, T { 5, 2 }, offsets, columns, match = "b: expected rows of 3 elements" },
      { T { 3, 3 }, T { 5, 3 }, offsets, columns, match = "offsets: expected [4], one more than rows" },
      { T { 4, 3 }, T { 4, 3 }, offsets, columns, match = "index 4 is out of range for size 4" },
      { T { 4, 3 }, T { 5, 3 }, i64 { 0, 2, 9, 5, 7 }, columns, match = "offsets do not rise from 0 to 7" },
      { T { 4, 3 }, T { 5, 3 }, offsets, columns, i64 { 0, 1, 2, 3, 4, 5, -7 }, match = "index -7 is out of range" },
    },
    big = function(ty)
      local _, begins = ty.segments_of(ty.randint(0, 500, { 20000 }), 500)
      return ty.sddmm(ty.randn(500, 50), ty.randn(300, 50), begins, ty.randint(0, 300, { 20000 }))
    end,
  })
end
