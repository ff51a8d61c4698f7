-- Rows of src/ops/block_sparse.c.

return function(row, T)
  local from, at = T.from, T.at

  local function wide(dtype) return (dtype == "f16" or dtype == "bf16") and "f32" or dtype end
  local function zeros(shape) return from(shape, function() return 0.0 end) end
  local function before(x, b, h, i) return ((b * x.shape[2] + h) * x.shape[3] + i) * x.shape[4] end

  -- The keys that query i of head h in batch b sees, as often as their blocks are listed, and their scores.
  local function seen(q, k, blocks, query_block, key_block, opts, b, h, i)
    local d, s = q.shape[4], k.shape[3]
    local scale = opts and opts.scale and opts.scale ~= 0 and opts.scale or 1 / math.sqrt(d)
    local group, list = q.shape[2] // k.shape[2], {}
    local of_b, of_h = blocks.shape[1] == 1 and 0 or b, blocks.shape[2] == 1 and 0 or h
    for e = 0, blocks.shape[4] - 1 do
      local block = at(blocks, { of_b, of_h, i // query_block, e })
      for j = block * key_block, block < 0 and -1000 or math.min(s, (block + 1) * key_block) - 1 do
        local x, query, key = 0.0, before(q, b, h, i), before(k, b, h // group, j)
        for c = 1, d do x = x + q[query + c] * k[key + c] end
        list[#list + 1] = { key = j, score = x * scale }
      end
    end
    return list
  end

  local function log_sum(list)
    local top, sum = -math.huge, 0.0
    for _, e in ipairs(list) do top = math.max(top, e.score) end
    if top == -math.huge then return top end
    for _, e in ipairs(list) do sum = sum + math.exp(e.score - top) end
    return top + math.log(sum)
  end

  local function attention(q, k, v, blocks, query_block, key_block, opts)
    local group, dv = q.shape[2] // math.max(k.shape[2], 1), v.shape[4]
    local y, lse = zeros { q.shape[1], q.shape[2], q.shape[3], dv }, zeros { q.shape[1], q.shape[2], q.shape[3] }
    for b = 0, q.shape[1] - 1 do
      for h = 0, q.shape[2] - 1 do
        for i = 0, q.shape[3] - 1 do
          local list = seen(q, k, blocks, query_block, key_block, opts, b, h, i)
          local own, to = log_sum(list), before(y, b, h, i)
          lse[(b * q.shape[2] + h) * q.shape[3] + i + 1] = own
          for _, e in ipairs(list) do
            local w, value = math.exp(e.score - own), before(v, b, h // group, e.key)
            for c = 1, dv do y[to + c] = y[to + c] + w * v[value + c] end
          end
        end
      end
    end
    return y, lse
  end

  -- y, lse and dlse are taken as they are given: what they say about the weights need not be true.
  local function backward(g, q, k, v, y, lse, dlse, blocks, query_block, key_block, opts)
    if type(query_block) ~= "number" or type(key_block) ~= "number" then -- dlse was left out
      dlse, blocks, query_block, key_block, opts = nil, dlse, blocks, query_block, key_block
    end
    local group, d, dv = q.shape[2] // k.shape[2], q.shape[4], v.shape[4]
    local scale = opts and opts.scale and opts.scale ~= 0 and opts.scale or 1 / math.sqrt(d)
    local dq, dk, dvs = zeros(q.shape), zeros(k.shape), zeros(v.shape)
    for b = 0, q.shape[1] - 1 do
      for h = 0, q.shape[2] - 1 do
        for i = 0, q.shape[3] - 1 do
          local of_y, of_q, delta = before(y, b, h, i), before(q, b, h, i), 0.0
          for c = 1, dv do delta = delta + g[of_y + c] * y[of_y + c] end
          if dlse then delta = delta - at(dlse, { b, h, i }) end
          for _, e in ipairs(seen(q, k, blocks, query_block, key_block, opts, b, h, i)) do
            local w, dp = math.exp(e.score - at(lse, { b, h, i })), 0.0
            local of_k, of_v = before(k, b, h // group, e.key), before(v, b, h // group, e.key)
            for c = 1, dv do
              dp = dp + g[of_y + c] * v[of_v + c]
              dvs[of_v + c] = dvs[of_v + c] + w * g[of_y + c]
            end
            local ds = w * (dp - delta) * scale
            for c = 1, d do
              dq[of_q + c] = dq[of_q + c] + ds * k[of_k + c]
              dk[of_k + c] = dk[of_k + c] + ds * q[of_q + c]
            end
          end
        end
      end
    end
    return dq, dk, dvs
  end

  local function list(b, h, n, kept, values) return T { b, h, n, kept, values = values, dtype = "i64" } end
  local every = list(1, 1, 3, 3, { 0, 1, 2, 2, 0, 1, 1, 2, 0 })
  local many = {} -- of nine blocks some, by head: different numbers of them
  for h = 0, 1 do
    for i = 0, 4 do
      for e = 0, 3 do many[#many + 1] = e > (i + h) % 4 and -1 or (3 * i + 2 * e + 5 * h) % 9 end
    end
  end

  row("block_sparse_attention", {
    cases = {
      { T { 1, 1, 6, 3 }, T { 1, 1, 6, 3 }, T { 1, 1, 6, 2 }, every, 2, 2 },
      { T { 2, 2, 5, 3 }, T { 2, 2, 7, 3 }, T { 2, 2, 7, 4 }, every, 2, 3 },
      { T { 1, 4, 5, 2 }, T { 1, 2, 8, 2 }, T { 1, 2, 8, 3 }, list(1, 4, 2, 2,
        { 0, 1, 1, -1, 2, 0, -1, 2, -1, 0, 1, 2, 2, 1, 0, -1 }), 3, 3, opts = { scale = 0.4 } },
      { T { 2, 1, 4, 2 }, T { 2, 1, 6, 2 }, T { 2, 1, 6, 2 }, list(2, 1, 2, 2, { 0, 1, 2, -1, 1, -1, 1, 2 }), 2, 2 },
      { T { 1, 1, 4, 2 }, T { 1, 1, 6, 2 }, T { 1, 1, 6, 2 }, list(1, 1, 2, 3, { 0, 0, 1, 2, 2, 2 }), 2, 2 },
      -- Queries that see nothing.
      { T { 1, 1, 4, 2 }, T { 1, 1, 6, 2 }, T { 1, 1, 6, 2 }, list(1, 1, 2, 2, { -1, -1, 2, -1 }), 2, 2,
        grad = false },
      { T { 1, 2, 4, 2 }, T { 1, 2, 6, 2 }, T { 1, 2, 6, 2 }, T { 1, 1, 2, 0, dtype = "i32" }, 2, 2, grad = false },
      { T { 1, 2, 4, 2 }, T { 1, 2, 0, 2 }, T { 1, 2, 0, 2 }, list(1, 1, 2, 1, { -1, -1 }), 2, 2, grad = false },
      { T { 1, 2, 0, 2 }, T { 1, 2, 4, 2 }, T { 1, 2, 4, 2 }, T { 1, 1, 0, 2, dtype = "i64" }, 2, 2, grad = false },
      { T { 0, 2, 4, 2 }, T { 0, 2, 4, 2 }, T { 0, 2, 4, 2 }, T { 1, 1, 2, 1, int = { 0, 2 } }, 2, 2, grad = false },
      { T { 1, 2, 4, 2 }, T { 1, 2, 4, 2 }, T { 1, 2, 4, 0 }, T { 1, 1, 2, 1, int = { 0, 2 } }, 2, 2, grad = false },
      -- Blocks larger than tiles, and blocks that do not fill them.
      { T { 1, 2, 75, 18 }, T { 1, 1, 150, 18 }, T { 1, 1, 150, 17 }, list(1, 2, 5, 4, many), 16, 17, grad = false },
      { T { 1, 2, 350, 5 }, T { 1, 2, 290, 5 }, T { 1, 2, 290, 8 }, list(1, 1, 2, 2, { 2, 0, 1, -1 }), 200, 100,
        grad = false },
      { T { 1, 1, 20, 136, range = { -0.2, 0.2 } }, T { 1, 1, 70, 136 }, T { 1, 1, 70, 140 }, list(1, 1, 2, 2, { 1, 4, 0, 2 }), 10, 16,
        grad = false },
    },
    ref = attention,
    tol = { f64 = 1e-9, f32 = 2e-5, f16 = 2e-2, bf16 = 1e-1 },
    dtype = function(dtype, i) return i == 2 and wide(dtype) or dtype end,
    errors = {
      { T { 2, 3, 4 }, T { 2, 3, 4 }, T { 2, 3, 4 }, every, 2, 2, match = { "q: expected [b, h, t, d]", "[2, 3, 4]" } },
      { T { 1, 1, 6, 3 }, T { 1, 1, 6, 4 }, T { 1, 1, 6, 2 }, every, 2, 2, match = { "k: expected", "[1, 1, 6, 4]" } },
      { T { 1, 1, 6, 3 }, T { 1, 1, 6, 3 }, T { 1, 1, 5, 2 }, every, 2, 2, match = { "v: expected", "[1, 1, 5, 2]" } },
      { T { 1, 3, 6, 3 }, T { 1, 2, 6, 3 }, T { 1, 2, 6, 2 }, every, 2, 2, match = "a multiple of the 2 heads" },
      { T { 1, 1, 6, 3, dtype = "f64" }, T { 1, 1, 6, 3, dtype = "f32" }, T { 1, 1, 6, 2, dtype = "f64" }, every, 2, 2,
        match = { "one dtype", "f64", "f32" } },
      { T { 1, 1, 6, 3 }, T { 1, 1, 6, 3 }, T { 1, 1, 6, 2 }, every, 0, 2, match = "query_block: expected 1 or more" },
      { T { 1, 1, 6, 3 }, T { 1, 1, 6, 3 }, T { 1, 1, 6, 2 }, every, 2, 0, match = "key_block: expected 1 or more" },
      { T { 1, 1, 6, 3 }, T { 1, 1, 6, 3 }, T { 1, 1, 6, 2 }, every, 3, 2,
        match = { "blocks: expected [1 or 1, 1 or 1, 2, kept]", "[1, 1, 3, 3]" } },
      { T { 1, 1, 6, 3 }, T { 1, 1, 6, 3 }, T { 1, 1, 6, 2 }, T { 1, 1, 3, 3 }, 2, 2, match = "blocks: expected" },
      { T { 1, 1, 6, 3 }, T { 1, 1, 6, 3 }, T { 1, 1, 6, 2 }, list(1, 1, 3, 1, { 0, 1, 3 }), 2, 2,
        match = "index 3 is out of range for size 3" },
      { T { 1, 1, 6, 3 }, T { 1, 1, 6, 3 }, T { 1, 1, 6, 2 }, list(1, 1, 3, 1, { 0, -2, 2 }), 2, 2,
        match = "index -2 is out of range for size 3" },
    },
    big = function(ty)
      local q, k = ty.randn(2, 4, 700, 40):requires_grad_(), ty.randn(2, 2, 650, 40):requires_grad_()
      local v, blocks = ty.randn(2, 2, 650, 24):requires_grad_(), ty.randint(-1, 21, { 2, 4, 22, 6 })
      local y, lse = ty.block_sparse_attention(q, k, v, blocks, 32, 32)
      local loss = (y * ty.randn(2, 4, 700, 24)):sum() + (lse * ty.randn(2, 4, 700)):sum()
      return y:detach(), lse:detach(), table.unpack(ty.grad(loss, { q, k, v }))
    end,
  })

  local small = { -0.1, 0.1 }
  row("block_sparse_attention_backward", {
    cases = {
      { T { 1, 2, 6, 2 }, T { 1, 2, 6, 3 }, T { 1, 1, 6, 3 }, T { 1, 1, 6, 2 }, T { 1, 2, 6, 2 }, T { 1, 2, 6 },
        T { 1, 2, 6 }, every, 2, 2 },
      { T { 2, 2, 5, 4 }, T { 2, 2, 5, 3 }, T { 2, 2, 7, 3 }, T { 2, 2, 7, 4 }, T { 2, 2, 5, 4 },
        T { 2, 2, 5, range = { 1, 2 } }, T { 2, 2, 5 }, list(2, 2, 2, 2,
        { 0, 1, 1, -1, 2, 0, -1, 2, -1, 0, 1, 2, 2, 1, 0, -1 }), 3, 3, opts = { scale = 0.4 } },
      { T { 1, 2, 75, 17 }, T { 1, 2, 75, 18, range = small }, T { 1, 1, 150, 18, range = small }, T { 1, 1, 150, 17 },
        T { 1, 2, 75, 17 }, T { 1, 2, 75, range = { 3, 4 } }, T { 1, 2, 75 }, list(1, 2, 5, 4, many), 16, 17 },
      { T { 1, 2, 350, 8 }, T { 1, 2, 350, 5, range = small }, T { 1, 2, 290, 5, range = small }, T { 1, 2, 290, 8 },
        T { 1, 2, 350, 8 }, T { 1, 2, 350, range = { 4, 5 } }, T { 1, 2, 350 }, list(1, 1, 2, 2, { 2, 0, 1, -1 }), 200,
        100 },
      { T { 1, 1, 20, 140 }, T { 1, 1, 20, 136, range = small }, T { 1, 1, 70, 136, range = small },
        T { 1, 1, 70, 140 }, T { 1, 1, 20, 140 }, T { 1, 1, 20, range = { 3, 4 } }, T { 1, 1, 20 },
        list(1, 1, 2, 2, { 1, 4, 0, 2 }), 10, 16 },
      { T { 1, 2, 4, 2 }, T { 1, 2, 4, 2 }, T { 1, 2, 6, 2 }, T { 1, 2, 6, 2 }, T { 1, 2, 4, 2 }, T { 1, 2, 4 },
        T { 1, 2, 4 }, T { 1, 1, 2, 0, dtype = "i32" }, 2, 2 },
    },
    ref = backward,
    tol = { f64 = 1e-9, f32 = 5e-5, f16 = 6e-2, bf16 = 3e-1 },
    errors = {
      { T { 1, 2, 5, 2 }, T { 1, 2, 6, 3 }, T { 1, 1, 6, 3 }, T { 1, 1, 6, 2 }, T { 1, 2, 6, 2 }, T { 1, 2, 6 },
        T { 1, 2, 6 }, every, 2, 2, match = { "g: expected a float tensor [1, 2, 6, 2]", "[1, 2, 5, 2]" } },
      { T { 1, 2, 6, 2 }, T { 1, 2, 6, 3 }, T { 1, 1, 6, 3 }, T { 1, 1, 6, 2 }, T { 1, 2, 6, 2 }, T { 1, 2, 6 },
        T { 1, 2, 7 }, every, 2, 2, match = { "dlse: expected a float tensor [1, 2, 6]", "[1, 2, 7]" } },
      { T { 1, 2, 6, 2 }, T { 1, 2, 6, 3 }, T { 1, 1, 6, 3 }, T { 1, 1, 6, 2 }, T { 1, 2, 6, 2 }, T { 1, 2, 6 },
        T { 1, 2, 6 }, list(1, 1, 3, 1, { 0, 1, 3 }), 2, 2, match = "index 3 is out of range for size 3" },
    },
  })
end
