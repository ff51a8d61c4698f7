-- Rows of src/ops/softmax.c.

return function(row, T)
  local from, at, count = T.from, T.at, T.count
  local inf = T.inf

  local function moved(index, d, position)
    local other = table.move(index, 1, #index, 1, {})
    other[d] = position
    return other
  end

  -- f(line, i) for every element, where line[0 .. n-1] are the elements along dim and i is the position in it
  local function along(x, dim, f)
    local d = T.dim(dim, #x.shape)
    local lines, n = {}, x.shape[d] or 1
    return from(x.shape, function(index)
      local key = #index > 0 and table.concat(moved(index, d, 0), " ") or ""
      local line = lines[key] or {}
      if not lines[key] then
        for i = 0, n - 1 do line[i] = at(x, #index > 0 and moved(index, d, i) or index) end
        lines[key] = line
      end
      return f(line, index[d] or 0, n, index)
    end)
  end

  -- Both are kept in the line.
  local function total(line, n, f)
    if not line.total then
      local sum = 0.0
      for i = 0, n - 1 do sum = sum + f(line[i]) end
      line.total = sum
    end
    return line.total
  end

  local function largest(line, n)
    if not line.top then
      local top = -inf
      for i = 0, n - 1 do
        if line[i] > top then top = line[i] end
      end
      line.top = top
    end
    return line.top
  end

  local function softmax(line, i, n)
    local top = largest(line, n)
    return math.exp(line[i] - top) / total(line, n, function(v) return math.exp(v - top) end)
  end

  local function log_softmax(line, i, n)
    local top = largest(line, n)
    return line[i] - top - math.log(total(line, n, function(v) return math.exp(v - top) end))
  end

  local extremes = { -inf, 1, 2, -inf, -inf, -inf, 0, inf, 1, T.nan, 0, 1, 300, 301, 250, -700, -701, -30000 }
  local function cases()
    return {
      { T { 3, 4 }, 1 }, { T { 2, 3, 4 }, -2 }, { T { 2, 3, 4 }, 0 }, { T { 5 }, 0 }, { T {}, 0 }, { T {}, -1 },
      { T { 3, 70 }, 1 }, { T { 5, 70 }, 0 }, { T { 2, 3, 2, 2 }, 1 }, { T { 4, 1 }, 1 },
      { T { 0, 3 }, 1 }, { T { 3, 0 }, 1 }, { T { 2, 0, 3 }, 1 }, { T { 3, 40, range = { -30, 30 } }, 1 },
      { T { 6, 3, values = extremes }, 1, grad = false }, { T { 1, 6, 3, values = extremes }, 2, grad = false },
      { T { 2, 9, values = extremes }, 0, grad = false },
      -- rows that fit into registers, whole ones and not, and one that does not
      { T { 35, 3 }, 1 }, { T { 17, 16 }, 1 }, { T { 2, 33 }, 1 }, { T { 2, 48 }, 1 }, { T { 2, 64 }, 1 },
      { T { 2, 65 }, 1 },
      -- on a GPU: held by a block, and too long for that
      { T { 2, 1200 }, 1, grad = false, dtypes = { "f32", "bf16" } }, { T { 2, 9000 }, 1, grad = false, dtypes = { "f32", "bf16" } },
      { T { 1, 8197 }, 1, grad = false, dtypes = { "f32", "bf16" } }, { T { 60, 40 }, 0, grad = false, dtypes = { "f32", "bf16" } },
    }
  end
  local errors = {
    { T { 2, 3 }, 2, match = "dim: expected a dimension in [-2, 1], got 2 for [2, 3]" },
    { T { 2, 3 }, -3, match = "dim: expected a dimension in [-2, 1], got -3" }, { T {}, 1, match = "dim: expected" },
  }
  local function big(name)
    return function(ty)
      local x = ty.randn(300, 777)
      return ty[name](x, 1), ty[name](x, 0), ty[name](ty.randn(7, 300, 333), 1), ty[name](ty.randn(3000, 20), 1)
    end
  end

  row("softmax", { cases = cases(), ref = function(x, dim) return along(x, dim, softmax) end, errors = errors,
    big = big("softmax") })
  row("log_softmax", { cases = cases(), ref = function(x, dim) return along(x, dim, log_softmax) end, errors = errors,
    big = big("log_softmax") })

  local function backward_cases()
    return {
      { T { 3, 4 }, T { 3, 4, range = { -3, 0 } }, 1 }, { T { 2, 3, 4 }, T { 2, 3, 4, range = { -3, 0 } }, 0 },
      { T { 3, 70 }, T { 3, 70, range = { -3, 0 } }, 0 }, { T { 2, 70 }, T { 2, 70, range = { -3, 0 } }, -1 },
      { T {}, T { range = { -3, 0 } }, 0 }, { T { 0, 3 }, T { 0, 3 }, 1 }, { T { 3, 0 }, T { 3, 0 }, 1 },
      { T { 2, 17 }, T { 2, 17, range = { -3, 0 } }, -1 }, { T { 2, 64 }, T { 2, 64, range = { -3, 0 } }, -1 },
      { T { 2, 300 }, T { 2, 300, range = { -3, 0 } }, -1 },
      { T { 1, 9000 }, T { 1, 9000, range = { -3, 0 } }, -1, dtypes = { "f32", "bf16" } },
      { T { 60, 40 }, T { 60, 40, range = { -3, 0 } }, 0, dtypes = { "f32", "bf16" } },
    }
  end
  local backward_errors = {
    { T { 2, 3 }, T { 3, 2 }, 0, match = { "[2, 3]", "[3, 2]" } }, { T { 2, 3 }, T { 2, 3 }, 2, match = "dim" },
  }

  row("softmax_backward", {
    cases = backward_cases(),
    ref = function(g, y, dim)
      local product = { shape = g.shape }
      for i = 1, count(g.shape) do product[i] = g[i] * y[i] end
      local dots = along(product, dim, function(line, _, n) return total(line, n, function(v) return v end) end)
      return from(g.shape, function(index) return at(y, index) * (at(g, index) - at(dots, index)) end)
    end,
    errors = backward_errors,
  })

  row("log_softmax_backward", {
    cases = backward_cases(),
    ref = function(g, y, dim)
      local sums = along(g, dim, function(line, _, n) return total(line, n, function(v) return v end) end)
      return from(g.shape, function(index) return at(g, index) - math.exp(at(y, index)) * at(sums, index) end)
    end,
    errors = backward_errors,
  })
end
