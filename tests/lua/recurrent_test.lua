-- nn.LSTM and nn.GRU against PyTorch (tests/fixtures/make_recurrent.py), nn.SLSTM against its equations in f64.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn = ty.nn

local fixture = ty.io.load_npz(check.root .. "tests/fixtures/recurrent_torch.npz")

local function wave(shape, offset, scale)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return ((ty.arange(n):to "f64" * 0.37 + offset):sin() * scale):reshape(shape)
end

local function offset(name)
  local sum = 0
  for i = 1, #name do sum = sum + name:byte(i) end
  return sum % 97
end

local function near(got, want, what, tolerance)
  check.equal(table.concat(got.shape, ","), table.concat(want.shape, ","), what .. " shape")
  local distance = (got:to "f64" - want:to "f64"):abs():max():item()
  check.equal(distance < tolerance, true, ("%s: differs by %g"):format(what, distance))
end

local function filled(make)
  local module = nn.with_defaults({ dtype = "f64" }, make)
  for name, p in module:named_parameters() do
    ty.no_grad(function() p:copy_(wave(p.shape, offset(name), 0.5)) end)
  end
  return module
end

local function against_torch(name, kind, settings, given)
  local layers = (settings.num_layers or 1) * (settings.bidirectional and 2 or 1)
  for _, dtype in ipairs { "f64", "f32" } do
    local module = filled(function() return nn[kind](3, 5, settings) end):to(dtype)
    local inputs = { wave({ 2, 6, 3 }, 1, 1):to(dtype):requires_grad_() }
    for i = 0, given and (kind == "LSTM" and 1 or 0) or -1 do
      inputs[#inputs + 1] = wave({ layers, 2, 5 }, 2 + i, 0.5):to(dtype):requires_grad_()
    end
    local results = { module(table.unpack(inputs)) }
    local loss = 0
    for i, r in ipairs(results) do
      near(r, fixture[("%s/result%d"):format(name, i - 1)], name .. " " .. dtype, dtype == "f64" and 1e-12 or 2e-6)
      loss = loss + (r * wave(r.shape, 8 + i, 1):to(dtype)):sum()
    end
    loss:backward()
    local tolerance = dtype == "f64" and 1e-11 or 1e-5
    for i, x in ipairs(inputs) do
      local what = ("%s %s input %d"):format(name, dtype, i)
      near(x.grad, fixture[("%s/grad_input%d"):format(name, i - 1)], what, tolerance)
    end
    for key, p in module:named_parameters() do
      near(p.grad, fixture[("%s/grad/%s"):format(name, key)], ("%s %s %s"):format(name, dtype, key), tolerance)
    end
  end
end

check.test("LSTM equals PyTorch's", function() against_torch("lstm", "LSTM", {}, false) end)
check.test("LSTM in layers and both directions equals PyTorch's", function()
  against_torch("lstm_deep", "LSTM", { num_layers = 2, bidirectional = true }, true)
end)
check.test("GRU equals PyTorch's", function() against_torch("gru", "GRU", {}, true) end)
check.test("GRU in layers and both directions, without biases, equals PyTorch's", function()
  against_torch("gru_deep", "GRU", { num_layers = 2, bidirectional = true, bias = false }, false)
end)

-- The equations of the paper, without the stabiliser: exp(i) and the forget gate as they are.
local function plain_slstm(module, x, forget)
  local heads, width = module.heads, module.hidden_size
  local d, batch = width // heads, x.shape[1]
  local h, c, n = ty.zeros(batch, width, { dtype = "f64" }), 0, 0
  local ys = {}
  local into = ty.linear(x, module.weight_ih_l0, module.bias_l0)
  for t = 0, x.shape[2] - 1 do
    local u = ty.einsum("bhd,hgd->bhg", h:reshape(batch, heads, d), module.weight_hh_l0)
    local p = (into:select(1, t):reshape(batch, heads, 4 * d) + u):reshape(batch, heads, 4, d)
    local function gate(g) return p:select(2, g):reshape(batch, width) end
    local i, z, o = gate(0):exp(), gate(2):tanh(), gate(3):sigmoid()
    local f = forget == "exp" and gate(1):exp() or gate(1):sigmoid()
    c, n = f * c + i * z, f * n + i
    h = o * (c / n)
    ys[#ys + 1] = h
  end
  return ty.stack(ys, 1), c, n
end

check.test("SLSTM equals its equations", function()
  for _, forget in ipairs { "sigmoid", "exp" } do
    for _, heads in ipairs { 1, 3 } do
      local what = ("slstm %s, %d heads"):format(forget, heads)
      local module = filled(function() return nn.SLSTM(4, 6, { heads = heads, forget = forget }) end)
      local x = wave({ 2, 7, 4 }, 5, 1):requires_grad_()
      local y, state = module(x)
      local want, c, n = plain_slstm(module, x, forget)
      near(y, want, what, 1e-12)
      local last = state:select(0, 0)
      near(last:select(0, 0), want:select(1, 6), what .. " h", 1e-12)
      near(last:select(0, 1) * last:select(0, 3):exp(), c, what .. " c", 1e-12)
      near(last:select(0, 2) * last:select(0, 3):exp(), n, what .. " n", 1e-12)
      local weight, all = wave(y.shape, 3, 1), { x }
      for _, p in ipairs(module:parameters()) do all[#all + 1] = p end
      local a = table.pack(ty.grad((y * weight):sum(), all))
      local b = table.pack(ty.grad((want * weight):sum(), all))
      if a.n == 1 then a, b = a[1], b[1] end
      for i = 1, #all do near(a[i], b[i], ("%s, gradient %d"):format(what, i), 1e-11) end
    end
  end
end)

check.test("SLSTM stays finite where the plain exponentials overflow", function()
  for _, forget in ipairs { "sigmoid", "exp" } do
    local module = nn.SLSTM(2, 4, { forget = forget })
    local x = (ty.randn(2, 50, 2) * 300):requires_grad_()
    local y = module(x)
    y:sum():backward()
    check.equal(y:isfinite():all():item(), true, "values")
    check.equal(x.grad:isfinite():all():item(), true, "gradient")
  end
end)

check.test("a sequence in parts, by the state, is the whole", function()
  ty.manual_seed(1)
  local x = ty.randn(3, 9, 4)
  for _, make in ipairs { function() return nn.LSTM(4, 6, { num_layers = 2 }) end, function() return nn.GRU(4, 6) end,
    function() return nn.SLSTM(4, 6, { heads = 2, num_layers = 2 }) end } do
    local module = make()
    local whole = module(x)
    local first = { module(x["0:3, 0:4"]) }
    local second = { module(x["0:3, 4:9"], table.unpack(first, 2)) }
    near(ty.concat({ first[1], second[1] }, 1), whole, tostring(module), 1e-6)
  end
end)

check.test("layouts, half precision, no gradient, errors", function()
  ty.manual_seed(2)
  local module = nn.LSTM(4, 8, { batch_first = false })
  local x = ty.randn(5, 3, 4)
  local y, h, c = module(x)
  check.equal({ y.shape, h.shape, c.shape }, { { 5, 3, 8 }, { 1, 3, 8 }, { 1, 3, 8 } })
  local quiet = ty.no_grad(function() return (module(x)) end)
  near(quiet, y, "without a gradient", 1e-9)
  local half = nn.LSTM(4, 8, { batch_first = false })
  half:load_state_dict(module:state_dict())
  local low = half:to "bf16"(x:to "bf16")
  check.equal(low.dtype, "bf16")
  near(low, y, "bf16", 2e-2)
  check.fails(function() nn.LSTM(4, 8)(ty.randn(5, 3, 5)) end,
    "expected a tensor %[batch, time, 4%], got a tensor %[5, 3, 5%]")
  check.fails(function() nn.LSTM(4, 8)(ty.randn(5, 3, 4), h) end, "h, c: expected both or none")
  check.fails(function() nn.SLSTM(4, 8, { heads = 3 }) end, "heads: expected a divisor of hidden 8, got 3")
  check.fails(function() nn.SLSTM(4, 8, { forget = "tanh" }) end, 'forget: expected "sigmoid" or "exp"')
  check.fails(function() nn.GRU(4, 0) end, "hidden: expected an integer >= 1")
  check.equal(tostring(nn.SLSTM(4, 8, { heads = 2 })):match "SLSTM%(4, 8, heads = 2%)" ~= nil, true)
end)

check.test("a compiled step gives the same", function()
  ty.manual_seed(3)
  local module = nn.LSTM(4, 8)
  local function step(x)
    local y = module(x)
    return (y * y):sum()
  end
  local compiled = ty.compile(step)
  for _ = 1, 3 do
    local x = ty.randn(3, 5, 4)
    near(compiled(x), step(x), "compiled", 1e-5)
  end
end)

check.finish()
