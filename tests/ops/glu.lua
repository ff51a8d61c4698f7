-- Rows of src/ops/glu.c.

return function(row, T)
  local count = T.count

  local gates, slopes = T.activations, T.slopes

  -- x and gate as lists, the shape of the result, and where element i of it lies in x of halves
  local function parts(x, gate)
    if gate then return x, gate, x.shape end
    local shape = table.move(x.shape, 1, #x.shape, 1, {})
    local half = shape[#shape] // 2
    shape[#shape] = half
    local a, b = {}, {}
    for i = 1, count(shape) do
      local first = (i - 1) // half * 2 * half + (i - 1) % half + 1
      a[i], b[i] = x[first], x[first + half]
    end
    return a, b, shape, half
  end

  local function name_of(gate, activation, opts)
    if type(gate) == "table" and not gate.shape then gate, opts = nil, gate end
    return gate, activation or opts and opts.activation or "sigmoid"
  end

  local cases, backward = {}, {}
  for name in pairs(gates) do
    cases[#cases + 1] = { T { 3, 5 }, T { 3, 5 }, name }
    cases[#cases + 1] = { T { 2, 3, 6 }, nil, name }
    backward[#backward + 1] = { T { 3, 5 }, T { 3, 5 }, T { 3, 5 }, name }
    backward[#backward + 1] = { T { 2, 3 }, T { 2, 6 }, nil, name }
  end
  for _, case in ipairs {
    { T { 3, 4 } }, { T { 70 }, T { 70, range = { -30, 30 } }, "silu" }, { T {}, T {} }, { T { 0, 4 } }, { T { 3, 0 } },
    { T { 2, 600 }, nil, "silu", grad = false }, { T { 2, 608 }, nil, "silu", grad = false, dtypes = { "bf16" } }, { T { 3, 301 }, T { 3, 301 }, "gelu", grad = false },
  } do cases[#cases + 1] = case end

  row("glu", {
    cases = cases,
    ref = function(x, gate, activation)
      local name
      gate, name = name_of(gate, activation)
      local a, b, shape = parts(x, gate)
      local y = { shape = shape }
      for i = 1, count(shape) do y[i] = a[i] * gates[name](b[i]) end
      return y
    end,
    errors = {
      { T { 3, 4 }, T { 4, 3 }, match = { "gate: expected the shape and dtype of x [3, 4]", "[4, 3]" } },
      { T { 3, 5 }, match = { "x: expected an even last dimension", "[3, 5]" } }, { T {}, match = "even last dimension" },
      { T { 3, 4 }, nil, "swish", match = { "activation", "silu" } },
    },
    big = function(ty)
      local x, y = ty.randn(300, 777):requires_grad_(), ty.randn(300, 777):requires_grad_()
      return ty.glu(x, y, "silu"):detach(), table.unpack(ty.grad(ty.glu(x, y, "gelu"):sum(), { x, y }))
    end,
  })

  row("glu_backward", {
    cases = backward,
    ref = function(g, x, gate, activation)
      local name
      gate, name = name_of(gate, activation)
      local a, b, shape, half = parts(x, gate)
      local dx, dgate = { shape = x.shape }, { shape = gate and gate.shape or { 0 } }
      for i = 1, count(shape) do
        local first = half and (i - 1) // half * 2 * half + (i - 1) % half + 1 or i
        local d = g[i] * a[i] * slopes[name](b[i])
        dx[first] = g[i] * gates[name](b[i])
        if half then dx[first + half] = d else dgate[i] = d end
      end
      return dx, dgate
    end,
    tol = { f64 = 1e-9, f32 = 1e-5, f16 = 5e-3, bf16 = 4e-2 },
    errors = {
      { T { 3, 4 }, T { 3, 4 }, match = { "g: expected [3, 2]", "[3, 4]" } },
      { T { 3, 4 }, T { 3, 4 }, T { 3, 2 }, match = "gate: expected" },
    },
  })
end
