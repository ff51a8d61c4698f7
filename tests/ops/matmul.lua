-- Rows of src/ops/matmul.c and src/ops/einsum.c. References: the definition, one product at a time.

return function(row, T)
  local from, at = T.from, T.at

  local function raised(x, shape)
    local y = table.move(x, 1, #x, 1, {})
    y.shape = shape
    return y
  end

  -- x [..., m, k] times y [..., k, n]; vectors become matrices and lose the dimension again
  local function matmul(x, y)
    local xv, yv = #x.shape == 1, #y.shape == 1
    if xv then x = raised(x, { 1, x.shape[1] }) end
    if yv then y = raised(y, { y.shape[1], 1 }) end
    local nx, ny = #x.shape, #y.shape
    local n = math.max(nx, ny)
    local shape = {}
    for d = 1, n - 2 do
      local a, b = x.shape[d - n + nx] or 1, y.shape[d - n + ny] or 1
      shape[d] = a == 1 and b or a
    end
    shape[n - 1], shape[n] = x.shape[nx - 1], y.shape[ny]
    local function place(t, count, index, row_index, column)
      local where = {}
      for d = 1, count - 2 do where[d] = t.shape[d] == 1 and 0 or index[d + n - count] end
      where[count - 1], where[count] = row_index, column
      return T.place(t, where)
    end
    local z = from(shape, function(index)
      local sum, many = 0.0, x.shape[nx]
      if many == 0 then return sum end
      local at_x, at_y, step = place(x, nx, index, index[n - 1], 0), place(y, ny, index, 0, index[n]), y.shape[ny]
      for k = 0, many - 1 do sum = sum + x[at_x + k] * y[at_y + k * step] end
      return sum
    end)
    if xv then table.remove(z.shape, n - 1) end
    if yv then table.remove(z.shape) end
    return z
  end

  row("matmul", {
    cases = {
      { T { 3, 4 }, T { 4, 5 } }, { T { 4 }, T { 4 } }, { T { 4 }, T { 4, 3 } }, { T { 3, 4 }, T { 4 } }, { T { 2, 3, 4 }, T { 4, 5 } },
      { T { 2, 3, 4 }, T { 2, 4, 5 } }, { T { 2, 1, 3, 4 }, T { 3, 4, 2 } }, { T { 4 }, T { 2, 4, 3 } }, { T { 2, 3, 4 }, T { 4 } },
      { T { 1, 1 }, T { 1, 1 } }, { T { 3, 0 }, T { 0, 4 } }, { T { 0, 3 }, T { 3, 4 } }, { T { 2, 0, 3 }, T { 3, 4 } },
      { T { 17, 33 }, T { 33, 19 }, grad = false }, { T { 1, 40 }, T { 40, 70 }, grad = false }, { T { 70, 40 }, T { 40, 1 }, grad = false },
      { T { 70, 9 }, T { 9, 66 }, grad = false }, { T { 130, 9 }, T { 9, 68 }, grad = false },
    },
    ref = matmul,
    errors = {
      { T { 2, 3 }, T { 4, 5 }, match = "expected the last size of x, 3, to equal" }, { T {}, T { 2, 2 }, match = "x: expected at least one dimension" },
      { T { 2, 3, 4 }, T { 3, 4, 5 }, match = "do not broadcast" },
    },
  })

  row("linear", {
    cases = {
      { T { 3, 4 }, T { 5, 4 }, T { 5 } }, { T { 4 }, T { 5, 4 }, T { 5 } }, { T { 2, 3, 4 }, T { 5, 4 } }, { T { 2, 1, 3, 4 }, T { 2, 4 }, T { 2 } },
      { T { 0, 4 }, T { 5, 4 }, T { 5 } }, { T { 3, 1 }, T { 1, 1 }, T { 1 } }, { T { 2, 3, 4 }, T { 5, 4 }, T { 5 }, T { 2, 3, 5 } },
      { T { 3, 4 }, T { 5, 4 }, opts = { residual = T { 3, 5 }, activation = "silu" } }, { T { 3, 4 }, T { 5, 4 }, T { 5 }, opts = { activation = "gelu_tanh" } },
      { T { 3, 4 }, T { 5, 4 }, T { 5 }, T { 3, 5 }, "sigmoid" }, { T { 66, 3 }, T { 70, 3 }, T { 70 }, T { 66, 70 }, "relu", grad = false },
    },
    ref = function(x, weight, bias, residual, activation)
      if type(bias) == "table" and not bias.shape then bias, residual, activation = nil, bias.residual, bias.activation end
      if type(residual) == "table" and not residual.shape then residual, activation = residual.residual, residual.activation end
      local turned = from({ weight.shape[2], weight.shape[1] }, function(index) return at(weight, { index[2], index[1] }) end)
      local y = matmul(x, turned)
      return from(y.shape, function(index)
        local v = at(y, index) + (bias and at(bias, { index[#index] }) or 0)
        return T.activations[activation or "none"](v + (residual and at(residual, index) or 0))
      end)
    end,
    errors = {
      { T { 2, 3 }, T { 5, 4 }, match = "x: expected [..., 4] for weight [5, 4]" }, { T { 2, 4 }, T { 5, 4 }, T { 4 }, match = "bias: expected [5]" },
      { T { 2, 4 }, T { 5, 4 }, T { 5 }, T { 2, 4 }, match = "residual: expected" },
      { T { 2, 4 }, T { 5, 4 }, opts = { activation = "swish" }, match = "activation" },
    },
  })

  row("matmul_int8", {
    cases = {
      { T { 3, 4, dtype = "i8" }, T { 4, 5, dtype = "i8" } }, { T { 2, 3, 5, dtype = "u8" }, T { 5, 2, dtype = "i8" } },
      { T { 0, 3, dtype = "i8" }, T { 3, 4, dtype = "i8" } }, { T { 3, 0, dtype = "i8" }, T { 0, 4, dtype = "i8" } },
    },
    dtypes = { "i8" },
    dtype = "i32",
    ref = matmul,
    errors = {
      { T { 2, 3, dtype = "i8" }, T { 4, 5, dtype = "i8" }, match = "x: expected [..., m, 4]" },
      { T { 2, 3, dtype = "i32" }, T { 3, 5, dtype = "i8" }, match = "x: expected u8 or i8" },
      { T { 2, 3, dtype = "i8" }, T { 3, 5, dtype = "u8" }, match = "y: expected i8 [k, n]" },
    },
  })

  row("matmul_shift", {
    cases = {
      { T { 3, 4, dtype = "i8" }, T { 5, 4, dtype = "i8" } }, { T { 7, dtype = "i8" }, T { 2, 7, dtype = "i8" } },
      { T { 2, 3, 37, dtype = "i8" }, T { 9, 37, dtype = "i8" } }, { T { 0, 3, dtype = "i8" }, T { 4, 3, dtype = "i8" } },
      { T { 3, 0, dtype = "i8" }, T { 4, 0, dtype = "i8" } },
    },
    dtypes = { "i8" },
    dtype = "i32",
    ref = function(x, codes)
      local shape = table.move(x.shape, 1, #x.shape, 1, {})
      shape[#shape] = codes.shape[1]
      return from(shape, function(index)
        local sum, where = 0, table.move(index, 1, #index, 1, {})
        for k = 0, codes.shape[2] - 1 do
          where[#where] = k
          local c = at(codes, { index[#index], k })
          if c ~= 0 then sum = sum + at(x, where) * (c > 0 and 1 or -1) * 2 ^ (math.abs(c) - 1) end
        end
        return sum
      end)
    end,
    errors = {
      { T { 2, 3, dtype = "i8" }, T { 5, 4, dtype = "i8" }, match = "x: expected [..., 4]" },
      { T { 2, 3, dtype = "i32" }, T { 5, 3, dtype = "i8" }, match = "x: expected i8" },
      { T { 2, 3, dtype = "i8" }, T { 5, 3, dtype = "u8" }, match = "codes: expected i8 [n, k]" },
    },
  })

  -- Sums over every assignment of the labels. "..." is not part of these references; its cases spell the dimensions out.
  local function einsum(equation, ...)
    local operands = { ... }
    if #operands == 1 and not operands[1].shape then operands = operands[1] end
    equation = equation:gsub("%s", "")
    local left, right = equation:match "^(.-)%->(.*)$"
    left = left or equation
    local terms, size, order, counts = {}, {}, {}, {}
    local total = 0
    for term in (left .. ","):gmatch "(.-)," do terms[#terms + 1] = term end
    for i, x in ipairs(operands) do
      local covered = #x.shape - #(terms[i]:gsub("%.%.%.", ""))
      terms[i] = terms[i]:gsub("%.%.%.", ("XYZ"):sub(-covered > 0 and 4 or 4 - covered))
      for d = 1, #terms[i] do
        local label = terms[i]:sub(d, d)
        if not size[label] then order[#order + 1] = label end
        if not size[label] or size[label] == 1 then size[label] = x.shape[d] end
        counts[label] = (counts[label] or 0) + 1
      end
    end
    local dots = ""
    for _, label in ipairs { "X", "Y", "Z" } do dots = dots .. (size[label] and label or "") end
    if right then
      right = right:gsub("%.%.%.", dots)
    else
      local once = {}
      for label, n in pairs(counts) do
        if n == 1 and not label:match "[XYZ]" then once[#once + 1] = label end
      end
      table.sort(once)
      right = dots .. table.concat(once)
    end
    local shape = {}
    for d = 1, #right do shape[d] = size[right:sub(d, d)] end
    local summed = {}
    for _, label in ipairs(order) do
      if not right:find(label, 1, true) then
        summed[#summed + 1] = label
        total = total + 1
      end
    end
    return from(shape, function(index)
      local value, sum = {}, 0.0
      for d = 1, #right do value[right:sub(d, d)] = index[d] end
      local function go(k)
        if k > total then
          local product = 1.0
          for i, x in ipairs(operands) do
            local where = {}
            for d = 1, #terms[i] do where[d] = x.shape[d] == 1 and 0 or value[terms[i]:sub(d, d)] end
            product = product * at(x, where)
          end
          sum = sum + product
          return
        end
        for v = 0, size[summed[k]] - 1 do
          value[summed[k]] = v
          go(k + 1)
        end
      end
      go(1)
      return sum
    end)
  end

  row("einsum", {
    cases = {
      { "ij,jk->ik", T { 3, 4 }, T { 4, 2 } }, { "bqd,bkd->bqk", T { 2, 3, 4 }, T { 2, 5, 4 } }, { "ij->ji", T { 3, 4 } }, { "ij->", T { 3, 4 } },
      { "ii->i", T { 3, 3 } }, { "ii", T { 3, 3 } }, { "i,j->ij", T { 3 }, T { 4 } }, { "ij,kj", T { 2, 3 }, T { 4, 3 } }, { "ij,ij->i", T { 2, 3 }, T { 2, 3 } },
      { "ab,bc,cd->ad", T { 2, 3 }, T { 3, 2 }, T { 2, 4 } }, { "...ij,...jk->...ik", T { 2, 3, 2 }, T { 2, 2, 4 } }, { "b h i d -> b i h d", T { 1, 2, 3, 2 } },
      { "ij,jk->ik", T { 0, 3 }, T { 3, 2 } }, { "ij,jk->ik", T { 2, 0 }, T { 0, 3 } }, { ",i->i", T {}, T { 3 } },
    },
    ref = einsum,
    errors = {
      { "ij,jk->ik", T { 2, 3 }, T { 4, 5 }, match = "equation" }, { "ij->k", T { 2, 3 }, match = "equation" }, { "ijk->i", T { 2, 3 }, match = "equation" },
      { "i1->i", T { 2, 3 }, match = "equation" }, { "ij,jk->ik", T { 2, 3 }, match = "equation" },
    },
  })

  -- Splits, orders and joins names; "..." is left to the fixtures of views.
  local function rearrange(x, pattern, options)
    local left, right = pattern:match "^(.-)%->(.*)$"
    local function parse(side)
      local groups, open = {}, nil
      for token in side:gsub("[()]", " %0 "):gmatch "%S+" do
        if token == "(" then open = {}
        elseif token == ")" then
          groups[#groups + 1] = open
          open = nil
        elseif open then open[#open + 1] = token
        else groups[#groups + 1] = token == "1" and {} or { token } end
      end
      return groups
    end
    local size = {}
    for k, v in pairs(options or {}) do size[k] = v end
    local from_groups, to_groups = parse(left), parse(right)
    for d, group in ipairs(from_groups) do
      local known, unknown = 1, nil
      for _, name in ipairs(group) do
        if size[name] then known = known * size[name] else unknown = name end
      end
      if unknown then size[unknown] = x.shape[d] // known end
    end
    local shape = {}
    for d, group in ipairs(to_groups) do
      shape[d] = 1
      for _, name in ipairs(group) do shape[d] = shape[d] * size[name] end
    end
    return from(shape, function(index)
      local value = {}
      for d, group in ipairs(to_groups) do
        local rest = index[d]
        for k = #group, 1, -1 do
          value[group[k]] = rest % size[group[k]]
          rest = rest // size[group[k]]
        end
      end
      local where = {}
      for d, group in ipairs(from_groups) do
        where[d] = 0
        for _, name in ipairs(group) do where[d] = where[d] * size[name] + value[name] end
      end
      return at(x, where)
    end)
  end

  row("rearrange", {
    cases = {
      { T { 2, 6, 3 }, "b (h d) t -> b h t d", opts = { h = 2 } }, { T { 2, 3, 4 }, "a b c -> c (a b)" }, { T { 2, 1, 3 }, "a 1 b -> b a" },
      { T { 2, 3 }, "a b -> a 1 b" }, { T { 4, 6 }, "(a b) (c d) -> (a c) (b d)", opts = { a = 2, c = 3 } }, { T { 0, 3 }, "a b -> b a" }, { T { 3 }, "a -> a" },
    },
    ref = rearrange,
    errors = {
      { T { 2, 3 }, "a b c -> a b c", match = "pattern" }, { T { 2, 3 }, "a b -> a", match = "pattern" }, { T { 2, 5 }, "a (b c) -> a b c", opts = { b = 2 }, match = "pattern" },
      { T { 2, 3 }, "a b", match = "pattern" }, { T { 2, 3 }, "a a -> a", match = "pattern" }, { T { 2, 4 }, "a (b c) -> a b c", match = "pattern" },
    },
  })
end
