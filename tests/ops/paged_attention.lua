-- Rows of src/ops/paged_attention.c.

return function(row, T)
  local from = T.from

  -- Softmax of one query over the keys it sees, in the order of their positions.
  local function attention(q, k, v, pages, cu, lengths, page, opts)
    opts = opts or {}
    local h, d, hkv, dv = q.shape[2], q.shape[3], k.shape[2], v.shape[3]
    local scale = opts.scale and opts.scale ~= 0 and opts.scale or 1 / math.sqrt(math.max(d, 1))
    local y, most = from({ q.shape[1], h, dv }, function() return 0.0 end), pages.shape[2]
    for i = 1, pages.shape[1] do
      for row_of = cu[i], cu[i + 1] - 1 do
        local here = lengths[i] - cu[i + 1] + row_of
        local first = opts.window and opts.window >= 0 and math.max(0, here - opts.window) or 0
        for head = 0, h - 1 do
          local weights, slots, sum, top = {}, {}, 0.0, -math.huge
          for j = first, here do
            local slot = pages[(i - 1) * most + j // page + 1] * page + j % page
            local at, x = (slot * hkv + head // (h // hkv)), 0.0
            for c = 1, d do x = x + q[(row_of * h + head) * d + c] * k[at * d + c] end
            x = x * scale
            if opts.softcap and opts.softcap > 0 then
              local e = math.exp(2 * x / opts.softcap)
              x = opts.softcap * (e - 1) / (e + 1)
            end
            weights[#weights + 1], slots[#slots + 1], top = x, at, math.max(top, x)
          end
          for j, x in ipairs(weights) do
            weights[j] = math.exp(x - top)
            sum = sum + weights[j]
          end
          for j, w in ipairs(weights) do
            for c = 1, dv do
              local to = (row_of * h + head) * dv + c
              y[to] = y[to] + w / sum * v[slots[j] * dv + c]
            end
          end
        end
      end
    end
    return y
  end

  local function ints(shape, values) return T { values = values, dtype = "i64", table.unpack(shape) } end

  -- Sequences of so many keys (lengths) and queries (counts) in pages that are dealt out in turn from the last one.
  local function case(heads, kv_heads, d, dv, page, lengths, counts, more)
    local most, total = 0, 0
    for _, length in ipairs(lengths) do
      most, total = math.max(most, math.ceil(length / page)), total + math.ceil(length / page)
    end
    local numbers, cu, left = {}, { 0 }, total
    for i, length in ipairs(lengths) do
      for j = 1, most do
        local there = j <= math.ceil(length / page)
        if there then left = left - 1 end
        numbers[#numbers + 1] = there and left or 0
      end
      cu[i + 1] = cu[i] + counts[i]
    end
    local n, slots = #lengths, total * page
    local result = { T { cu[n + 1], heads, d }, T { slots, kv_heads, d }, T { slots, kv_heads, dv },
      ints({ n, most }, numbers), ints({ n + 1 }, cu), ints({ n }, lengths), page }
    for key, value in pairs(more or {}) do result[key] = value end
    return result
  end

  local function broken(at, values)
    local x = case(2, 1, 3, 2, 4, { 5, 3 }, { 2, 1 })
    x[at] = ints(at == 4 and { 2, 2 } or { #values }, values)
    return x
  end
  local function with(x, match)
    x.match = match
    return x
  end

  row("paged_attention", {
    cases = {
      case(2, 1, 3, 2, 4, { 5, 3 }, { 2, 1 }), case(2, 2, 4, 4, 1, { 3, 1, 2 }, { 1, 1, 2 }),
      case(4, 2, 5, 3, 3, { 7, 9, 1 }, { 7, 2, 0 }, { opts = { window = 2 } }),
      case(2, 1, 3, 2, 16, { 20, 3 }, { 3, 3 }, { opts = { softcap = 1.5, scale = 0.4 } }),
      case(1, 1, 2, 0, 2, { 3 }, { 2 }), case(2, 1, 3, 2, 4, { 5, 3 }, { 0, 0 }),
      -- More than tiles and than what one task takes.
      case(4, 1, 18, 17, 16, { 150, 67, 300 }, { 1, 67, 40 }), case(2, 1, 6, 5, 16, { 1100, 20 }, { 1, 1 }),
      case(3, 1, 70, 136, 8, { 90 }, { 3 }),
    },
    ref = attention,
    tol = { f64 = 1e-9, f32 = 2e-5, f16 = 2e-2, bf16 = 1e-1 },
    errors = {
      { T { 3, 2 }, T { 4, 1, 2 }, T { 4, 1, 2 }, ints({ 1, 1 }, { 0 }), ints({ 2 }, { 0, 3 }), ints({ 1 }, { 3 }), 4,
        match = { "q: expected [n, h, d]", "[3, 2]" } },
      { T { 3, 2, 2 }, T { 4, 1, 3 }, T { 4, 1, 2 }, ints({ 1, 1 }, { 0 }), ints({ 2 }, { 0, 3 }), ints({ 1 }, { 3 }),
        4, match = { "k: expected the width of q", "[4, 1, 3]" } },
      { T { 3, 2, 2 }, T { 4, 1, 2 }, T { 5, 1, 2 }, ints({ 1, 1 }, { 0 }), ints({ 2 }, { 0, 3 }), ints({ 1 }, { 3 }),
        4, match = { "v: expected the slots and heads of k", "[5, 1, 2]" } },
      { T { 3, 3, 2 }, T { 4, 2, 2 }, T { 4, 2, 2 }, ints({ 1, 1 }, { 0 }), ints({ 2 }, { 0, 3 }), ints({ 1 }, { 3 }),
        4, match = "a multiple of the 2 heads" },
      { T { 3, 2, 2, dtype = "f64" }, T { 4, 1, 2, dtype = "f32" }, T { 4, 1, 2, dtype = "f32" },
        ints({ 1, 1 }, { 0 }), ints({ 2 }, { 0, 3 }), ints({ 1 }, { 3 }), 4,
        match = { "k: expected the dtype of q", "f64", "f32" } },
      { T { 3, 2, 2 }, T { 4, 1, 2 }, T { 4, 1, 2 }, ints({ 1, 1 }, { 0 }), ints({ 2 }, { 0, 3 }), ints({ 1 }, { 3 }),
        3, match = "page: expected a size that divides the 4 rows" },
      { T { 3, 2, 2 }, T { 4, 1, 2 }, T { 4, 1, 2 }, ints({ 1, 1 }, { 0 }), ints({ 3 }, { 0, 3, 3 }),
        ints({ 1 }, { 3 }), 4, match = { "cu_seqlens: expected [2]", "[3]" } },
      { T { 3, 2, 2 }, T { 4, 1, 2 }, T { 4, 1, 2 }, T { 1, 1, dtype = "f32" }, ints({ 2 }, { 0, 3 }),
        ints({ 1 }, { 3 }), 4, match = "pages: expected" },
      { T { 3, 2, 2 }, T { 4, 1, 2 }, T { 4, 1, 2 }, ints({ 1, 1 }, { 0 }), ints({ 2 }, { 0, 3 }), ints({ 1 }, { 3 }),
        4, opts = { softcap = -1 }, match = "softcap: expected a positive number" },
      with(broken(4, { 3, 0, 1, 0 }), "index 3 is out of range for size 3"),
      with(broken(5, { 0, 4, 4 }), "index 4 is out of range for size 4"),
      with(broken(6, { 9, 3 }), "index 9 is out of range for size 9"),
      with(broken(6, { 5, 0 }), "index 0 is out of range for size 9"),
    },
    big = function(ty)
      local q, k, v = ty.randn(70, 8, 32), ty.randn(2000, 2, 32), ty.randn(2000, 2, 32)
      local order = ty.randperm(125)
      local pages = ty.concat { order:narrow(0, 0, 60), order:narrow(0, 60, 60) }:reshape(2, 60)
      return ty.paged_attention(q, k, v, pages, ty.tensor { 0, 1, 70 }, ty.tensor { 950, 333 }, 16)
    end,
  })
end
