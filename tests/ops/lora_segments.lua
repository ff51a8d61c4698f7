-- Rows of src/ops/lora_segments.c.

return function(row, T)
  local from = T.from

  local function reference(y, x, a, b, a_rows, b_rows, begins, ranks)
    local n, inputs, outputs, wa, wb = x.shape[1], x.shape[2], y.shape[2], a.shape[2], b.shape[2]
    local a_parts, b_parts = a_rows.shape[2], b_rows.shape[2]
    local out = from({ n, outputs }, function() return 0.0 end)
    for i = 1, n * outputs do out[i] = y[i] end
    for s = 1, begins.shape[1] - 1 do
      for t = begins[s], begins[s + 1] - 1 do
        for pair = ranks[s], ranks[s + 1] - 1 do
          local h = 0.0
          for c = 0, inputs - 1 do
            h = h + x[t * inputs + c + 1] * a[a_rows[pair * a_parts + c // wa + 1] * wa + c % wa + 1]
          end
          for c = 0, outputs - 1 do
            local at = t * outputs + c + 1
            out[at] = out[at] + h * b[b_rows[pair * b_parts + c // wb + 1] * wb + c % wb + 1]
          end
        end
      end
    end
    return out
  end

  local function ints(shape, values) return T { values = values, dtype = "i64", table.unpack(shape) } end

  -- Segments of so many rows and ranks; their rows are dealt out from the last of the pools.
  local function case(inputs, outputs, wa, wb, counts, ranks)
    local begins, sums, a_rows, b_rows = { 0 }, { 0 }, {}, {}
    for s, count in ipairs(counts) do begins[s + 1], sums[s + 1] = begins[s] + count, sums[s] + ranks[s] end
    local pairs_of, n = sums[#sums], begins[#begins]
    local a_parts, b_parts = math.ceil(inputs / wa), math.ceil(outputs / wb)
    for i = pairs_of * a_parts - 1, 0, -1 do a_rows[#a_rows + 1] = i end
    for i = pairs_of * b_parts - 1, 0, -1 do b_rows[#b_rows + 1] = i end
    return { T { n, outputs }, T { n, inputs }, T { pairs_of * a_parts, wa }, T { pairs_of * b_parts, wb },
      ints({ pairs_of, a_parts }, a_rows), ints({ pairs_of, b_parts }, b_rows), ints({ #begins }, begins),
      ints({ #sums }, sums) }
  end
  local function with(x, at, value, match)
    x[at], x.match = value, match
    return x
  end
  local function small() return case(3, 2, 3, 2, { 2, 1 }, { 1, 2 }) end

  row("lora_segments", {
    cases = {
      case(3, 2, 3, 2, { 2, 1 }, { 1, 2 }), case(5, 7, 2, 3, { 1, 3, 2 }, { 2, 0, 3 }), case(4, 4, 4, 4, { 3 }, { 0 }),
      case(4, 4, 4, 4, {}, {}), case(4, 4, 4, 4, { 0, 2, 0 }, { 2, 1, 0 }), case(4, 0, 4, 1, { 2 }, { 2 }),
      -- Blocks of rows, of pairs and of elements with some left over.
      case(37, 41, 37, 41, { 1, 39, 6 }, { 9, 13, 4 }), case(70, 35, 32, 16, { 33, 2 }, { 3, 17 }),
    },
    ref = reference,
    tol = { f64 = 1e-9, f32 = 5e-5, f16 = 1e-1, bf16 = 5e-1 },
    errors = {
      with(small(), 1, T { 4, 2 }, { "y: expected the rows and the dtype of x", "[4, 2]" }),
      with(small(), 2, T { 3, 3, 1 }, { "x: expected [n, in]", "[3, 3, 1]" }),
      with(small(), 5, ints({ 3, 2 }, { 0, 0, 0, 0, 0, 0 }), "a_rows: expected [pairs, 1], as 3 elements are in rows of 3"),
      with(small(), 6, ints({ 2, 1 }, { 0, 0 }), "b_rows: expected as many pairs as in a_rows"),
      with(small(), 6, T { 3, 1, dtype = "f32" }, "b_rows: expected"),
      with(small(), 8, ints({ 2 }, { 0, 3 }), { "ranks: expected [3]", "[2]" }),
      with(small(), 5, ints({ 3, 1 }, { 0, 3, 1 }), "index 3 is out of range for size 3"),
      with(small(), 6, ints({ 3, 1 }, { 0, -1, 1 }), "index -1 is out of range for size 3"),
    },
    big = function(ty)
      local slots = 600
      local a, b = ty.randn(slots, 64), ty.randn(slots, 64)
      local rows = ty.randperm(slots):narrow(0, 0, 256)
      return ty.lora_segments(ty.randn(90, 60), ty.randn(90, 128), a, b, rows:reshape(128, 2),
        rows:narrow(0, 0, 128):reshape(128, 1), ty.tensor { 0, 1, 60, 90 }, ty.tensor { 0, 64, 100, 128 })
    end,
  })
end
