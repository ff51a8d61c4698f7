-- Optimizers and schedules against trajectories of PyTorch in f64 (tests/fixtures/make_optim.py), those that PyTorch
-- lacks against the formulas of their papers in plain Lua; their state.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local optim = ty.optim

local fixture = ty.io.load(check.root .. "tests/fixtures/optim_torch.json")

local function wave(shape, offset)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return (ty.arange(n):to "f64" * 0.37 + offset):sin():reshape(shape)
end

local function parameters() return { wave({ 3, 4 }, 5):requires_grad_(), wave({ 5 }, 6):requires_grad_() } end

local function loss_of(params)
  local total
  for _, p in ipairs(params) do
    local term = ((p - 0.5):square() * (p + 1.5):square()):sum()
    total = total and total + term or term
  end
  return total
end

local makers = {
  RMSprop = { "RMSprop", { lr = 0.02 } },
  ["RMSprop momentum"] = { "RMSprop", { lr = 0.01, alpha = 0.9, momentum = 0.8, weight_decay = 0.1, eps = 1e-6 } },
  ["RMSprop centered"] = { "RMSprop", { lr = 0.01, momentum = 0.5, centered = true } },
  Adagrad = { "Adagrad", { lr = 0.1, lr_decay = 0.05, weight_decay = 0.1, initial = 0.1 } },
  Adadelta = { "Adadelta", { lr = 1.5, rho = 0.8, eps = 1e-5, weight_decay = 0.1 } },
  Adamax = { "Adamax", { lr = 0.05, beta1 = 0.8, beta2 = 0.95, eps = 1e-6, weight_decay = 0.1 } },
  NAdam = { "NAdam", { lr = 0.05, beta1 = 0.8, beta2 = 0.95, eps = 1e-6, weight_decay = 0.1, momentum_decay = 0.01 } },
  ["NAdam decoupled"] = { "NAdam", { lr = 0.05, weight_decay = 0.1, decoupled = true } },
  RAdam = { "RAdam", { lr = 0.05, beta1 = 0.8, beta2 = 0.95, eps = 1e-6, weight_decay = 0.1 } },
  ["RAdam decoupled"] = { "RAdam", { lr = 0.05, weight_decay = 0.1, decoupled = true } },
  Rprop = { "Rprop", { lr = 0.02, shrink = 0.4, grow = 1.3, smallest = 1e-5, largest = 0.2 } },
  ASGD = { "ASGD", { lr = 0.02, decay = 0.01, alpha = 0.6, start = 5, weight_decay = 0.1 } },
  Adafactor = { "Adafactor", { lr = 0.05, decay = 0.7, limit = 1.1, weight_decay = 0.1 } },
}
local closures = { LBFGS = { "LBFGS", { lr = 0.05, iterations = 3, history = 4 } } }

local function compare(name, make, step)
  check.test("PyTorch: " .. name, function()
    local p, expected = parameters(), fixture.optimizers[name]
    local opt = make(p)
    for i = 1, 20 do
      step(opt, p)
      local kept = expected[tostring(i)]
      for k = 1, kept and 2 or 0 do
        check.close(p[k]:detach():reshape(-1):tolist(), kept[k], 1e-9, ("p%d after %d steps"):format(k, i))
      end
    end
  end)
end

local function is_same(name, make, step)
  check.test("resumed bit for bit: " .. name, function()
    local p = parameters()
    local opt = make(p)
    for _ = 1, 3 do step(opt, p) end
    local state, q = opt:state_dict(), {}
    for i, t in ipairs(p) do q[i] = t:detach():clone():requires_grad_() end
    local other = make(q)
    other:load_state_dict(state)
    for _ = 1, 3 do
      step(opt, p)
      step(other, q)
    end
    for i, t in ipairs(p) do check.equal(q[i]:tolist(), t:tolist(), "parameter " .. i) end
  end)
end

local function plain_step(opt, p) opt:step(loss_of(p)) end
local function closure_step(opt, p)
  opt:step(function() return loss_of(p) end)
end

for name, row in pairs(makers) do
  local function make(p) return optim[row[1]](p, row[2]) end
  compare(name, make, plain_step)
  is_same(name, make, plain_step)
end
for name, row in pairs(closures) do
  local function make(p) return optim[row[1]](p, row[2]) end
  compare(name, make, closure_step)
  is_same(name, make, closure_step)
end
for _, name in ipairs { "Muon", "LAMB", "Shampoo", "SOAP" } do
  is_same(name, function(p) return optim[name](p, { lr = 0.01 }) end, plain_step)
end
is_same("SAM", function(p) return optim.SAM(optim.SGD(p, { lr = 0.01, momentum = 0.9 })) end, closure_step)
is_same("LBFGS with a line search", function(p)
  return optim.LBFGS(p, { iterations = 2, line_search = "strong_wolfe" })
end, closure_step)

-- ---- formulas in plain Lua: matrices are lists of rows ----

local function product(a, b)
  local c = {}
  for i = 1, #a do
    c[i] = {}
    for j = 1, #b[1] do
      local s = 0.0
      for k = 1, #b do s = s + a[i][k] * b[k][j] end
      c[i][j] = s
    end
  end
  return c
end

local function transposed(a)
  local c = {}
  for j = 1, #a[1] do
    c[j] = {}
    for i = 1, #a do c[j][i] = a[i][j] end
  end
  return c
end

local function map(f, a, b)
  local c = {}
  for i = 1, #a do
    c[i] = {}
    for j = 1, #a[1] do c[i][j] = f(a[i][j], b and b[i][j]) end
  end
  return c
end

local function norm(a)
  local s = 0.0
  for _, row in ipairs(a) do
    for _, x in ipairs(row) do s = s + x * x end
  end
  return math.sqrt(s)
end

local function slope(x) return 2 * (x - 0.5) * (x + 1.5) ^ 2 + 2 * (x - 0.5) ^ 2 * (x + 1.5) end

-- Steps of an optimizer and of a function of a matrix, its gradient and the number of the step.
local function follow(name, options, shape, reference)
  check.test(name .. ": the formula", function()
    local p = wave(shape, 5):requires_grad_()
    local plain, opt = p:detach():tolist(), optim[name]({ p }, options)
    for step = 1, 20 do
      opt:step(loss_of { p })
      plain = reference(plain, map(slope, plain), step)
      check.close(p:detach():tolist(), plain, 1e-9, "step " .. step)
    end
  end)
end

-- Newton and Schulz, as Jordan et al. 2024 have it.
local function orthogonal(x)
  local tall = #x > #x[1]
  if tall then x = transposed(x) end
  local length = norm(x)
  x = map(function(v) return v / length end, x)
  for _ = 1, 5 do
    local gram = product(x, transposed(x))
    local inner = map(function(a, b) return -4.7750 * a + 2.0315 * b end, gram, product(gram, gram))
    x = map(function(a, b) return 3.4445 * a + b end, x, product(inner, x))
  end
  return tall and transposed(x) or x
end

for _, shape in ipairs { { 3, 4 }, { 5, 2 } } do
  for _, adjust in ipairs { "original", "rms" } do
    local mean
    follow("Muon", { lr = 0.02, momentum = 0.9, weight_decay = 0.1, adjust = adjust }, shape, function(p, g)
      mean = map(function(m, x) return 0.9 * m + 0.1 * x end, mean or map(function() return 0.0 end, p), g)
      local update = orthogonal(map(function(x, m) return 0.1 * x + 0.9 * m end, g, mean))
      local m, n = shape[1], shape[2]
      local rate = 0.02 * (adjust == "rms" and 0.2 * math.sqrt(math.max(m, n)) or math.sqrt(math.max(1, m / n)))
      return map(function(w, u) return w * (1 - 0.02 * 0.1) - rate * u end, p, update)
    end)
  end
end

check.test("Muon: vectors and other groups are AdamW's, singular values come near 1", function()
  local p, q = wave({ 5 }, 6):requires_grad_(), wave({ 2, 3 }, 1):requires_grad_()
  local a, b = p:detach():clone():requires_grad_(), q:detach():clone():requires_grad_()
  local muon = optim.Muon({ { params = { p } }, { params = { q }, matrices = false } }, { lr = 0.02, adam_rate = 0.5 })
  local adam = optim.AdamW({ a, b }, { lr = 0.01, beta2 = 0.95, weight_decay = 0.1 })
  for _ = 1, 5 do
    muon:step(loss_of { p, q })
    adam:step(loss_of { a, b })
  end
  check.equal(p:tolist(), a:tolist())
  check.equal(q:tolist(), b:tolist())
  local w = ty.zeros(6, 9):requires_grad_()
  optim.Muon({ w }, { lr = 1, weight_decay = 0 }):step((w * ty.randn(6, 9)):sum())
  local _, s = ty.svd(w:detach())
  for _, value in ipairs(s:tolist()) do check.ok(value > 0.5 and value < 1.3, "singular value " .. value) end
end)

do
  local m, v
  follow("LAMB", { lr = 0.05, beta1 = 0.8, beta2 = 0.95, weight_decay = 0.1 }, { 3, 4 }, function(p, g, step)
    local none = map(function() return 0.0 end, p)
    m = map(function(a, x) return 0.8 * a + 0.2 * x end, m or none, g)
    v = map(function(a, x) return 0.95 * a + 0.05 * x * x end, v or none, g)
    local update = map(function(a, b) return a / (1 - 0.8 ^ step) / (math.sqrt(b / (1 - 0.95 ^ step)) + 1e-6) end, m, v)
    update = map(function(u, w) return u + 0.1 * w end, update, p)
    local trust = norm(p) / norm(update)
    return map(function(w, u) return w - 0.05 * trust * u end, p, update)
  end)
end

-- x^(-1/4) by Newton's iteration for the inverse root, twice; independent of eigenvectors.
local function inverse_root(x)
  local n = #x
  local function identity()
    local e = {}
    for i = 1, n do
      e[i] = {}
      for j = 1, n do e[i][j] = i == j and 1.0 or 0.0 end
    end
    return e
  end
  local function inverse_square_root(a) -- Denman and Beavers by products: y to a^(1/2), z to a^(-1/2)
    local size = norm(a)
    local y, z = map(function(v) return v / size end, a), identity()
    for _ = 1, 60 do
      local t = map(function(v, e) return 0.5 * (3 * e - v) end, product(z, y), identity())
      y, z = product(y, t), product(t, z)
    end
    return map(function(v) return v / math.sqrt(size) end, z), map(function(v) return v * math.sqrt(size) end, y)
  end
  local _, root = inverse_square_root(x)
  return (inverse_square_root(root))
end

do
  local left, right, mean
  follow("Shampoo", { lr = 0.05, momentum = 0.5, weight_decay = 0.1, eps = 0.1 }, { 3, 2 }, function(p, g)
    left = left or { { 0.1, 0, 0 }, { 0, 0.1, 0 }, { 0, 0, 0.1 } }
    right = right or { { 0.1, 0 }, { 0, 0.1 } }
    local function add(a, b) return a + b end
    left, right = map(add, left, product(g, transposed(g))), map(add, right, product(transposed(g), g))
    local update = product(product(inverse_root(left), g), inverse_root(right))
    mean = mean and map(function(m, u) return 0.5 * m + u end, mean, update) or update
    return map(function(w, u) return w * (1 - 0.05 * 0.1) - 0.05 * u end, p, mean)
  end)
end

-- Where a side is too long to be turned, SOAP is AdamW; where the basis is right it is Adam in it: on a matrix whose
-- gradients are always a known rotation of a diagonal one, the update stays diagonal in the basis.
check.test("SOAP: AdamW for long sides, Adam in the eigenbasis", function()
  local p, q = wave({ 3, 4 }, 5):requires_grad_(), wave({ 3, 4 }, 5):requires_grad_()
  local soap = optim.SOAP({ p }, { lr = 0.01, largest = 2 })
  local adam = optim.AdamW({ q }, { lr = 0.01, beta1 = 0.95, beta2 = 0.95 })
  for i = 0, 10 do
    soap:step(loss_of { p })
    if i > 0 then adam:step(loss_of { q }) end -- the first step looks for a basis
  end
  check.close(p:tolist(), q:tolist(), 1e-12)
  local u, v = ty.qr(wave({ 3, 3 }, 1)), ty.qr(wave({ 3, 3 }, 2):exp())
  local w = ty.zeros({ 3, 3 }, { dtype = "f64" }):requires_grad_()
  soap = optim.SOAP({ w }, { lr = 0.1, weight_decay = 0, refresh = 1, eps = 1e-8 })
  for step = 0, 5 do
    local slopes = ty.tensor({ { 3.0 + step, 0, 0 }, { 0, 2.0, 0 }, { 0, 0, 0.5 } }, { dtype = "f64" })
    soap:step((w * u:matmul(slopes):matmul(v:transpose())):sum())
  end
  local inner = u:transpose():matmul(w:detach()):matmul(v):tolist()
  local expected, m, s = 0.0, 0.0, 0.0
  for step = 1, 5 do -- Adam for the first element of the diagonal; constant gradients make steps of lr
    m, s = 0.95 * m + 0.05 * (3 + step), 0.95 * s + 0.05 * (3 + step) ^ 2
    expected = expected - 0.1 * (m / (1 - 0.95 ^ step)) / math.sqrt(s / (1 - 0.95 ^ step))
  end
  check.close(inner, { { expected, 0, 0 }, { 0, -0.5, 0 }, { 0, 0, -0.5 } }, 1e-6)
end)

check.test("SAM: the gradient from up the slope", function()
  for _, adaptive in ipairs { false, true } do
    local p = ty.tensor({ 0.3, -1.2, 0.9 }, { dtype = "f64" }):requires_grad_()
    local plain = p:tolist()
    local sam = optim.SAM(optim.SGD({ p }, { lr = 0.02 }), { rho = 0.1, adaptive = adaptive })
    for _ = 1, 10 do
      local before = 0.0
      for j = 1, 3 do before = before + (plain[j] - 0.5) ^ 2 * (plain[j] + 1.5) ^ 2 end
      local loss = sam:step(function() return loss_of { p } end)
      check.close(loss:item(), before, 1e-9)
      local length, along = 0.0, {}
      for j = 1, 3 do
        along[j] = slope(plain[j]) * (adaptive and math.abs(plain[j]) or 1)
        length = length + along[j] ^ 2
      end
      for j = 1, 3 do
        local up = 0.1 * along[j] * (adaptive and math.abs(plain[j]) or 1) / (math.sqrt(length) + 1e-12)
        plain[j] = plain[j] - 0.02 * slope(plain[j] + up)
      end
      check.close(p:tolist(), plain, 1e-9)
    end
    check.equal(p.grad, nil)
    local kept = p:tolist()
    local calls = 0
    check.fails(function()
      sam:step(function()
        calls = calls + 1
        if calls == 2 then error "lost" end
        return loss_of { p }
      end)
    end, "lost")
    check.equal(p:tolist(), kept, "an error in the second pass leaves the weights")
  end
  check.fails(function() optim.SAM {} end, "SAM: optimizer: expected an optimizer, got an empty table")
end)

check.test("L-BFGS with a line search finds the minimum of Rosenbrock's function", function()
  local p = ty.tensor({ -1.2, 1.0 }, { dtype = "f64" }):requires_grad_()
  local calls = 0
  local function rosenbrock()
    calls = calls + 1
    local x, y = p:select(0, 0), p:select(0, 1)
    return (1 - x):square() + (y - x:square()):square() * 100
  end
  local opt = optim.LBFGS({ p }, { iterations = 100, evaluations = 1000, line_search = "strong_wolfe",
    tolerance_change = 1e-16 })
  check.close(opt:step(rosenbrock), 24.2, 1e-9)
  check.close(p:tolist(), { 1, 1 }, 1e-6)
  check.ok(calls < 70, calls .. " evaluations")
  check.equal(p.grad, nil)
  local q = ty.tensor({ -1.2, 1.0 }, { dtype = "f64" }):requires_grad_()
  local wild = optim.LBFGS({ q }, { lr = 1e6, iterations = 5, line_search = "strong_wolfe" })
  local last = math.huge
  for _ = 1, 5 do
    local loss = wild:step(function()
      return (q:select(0, 0) - 3):square() + (q:select(0, 1) + 2):square():square()
    end)
    check.ok(loss <= last, "a line search never climbs")
    last = loss
  end
  check.fails(function() optim.LBFGS({ p }, { line_search = "armijo" }) end, "line_search: expected")
end)

check.test("half precision and clipping go through the composed steps", function()
  for _, name in ipairs { "Muon", "LAMB", "Adafactor", "Shampoo", "SOAP", "RMSprop", "NAdam" } do
    local p = { wave({ 4, 6 }, 1):to("bf16"):requires_grad_(), wave({ 6 }, 2):to("bf16"):requires_grad_() }
    local before = loss_of(p):item()
    local opt = optim[name](p, { lr = 0.02, clip_norm = 1 })
    for _ = 1, 10 do check.ok(opt:step(loss_of(p)) > 0) end
    check.ok(loss_of(p):item() < before, name)
  end
end)

check.test("rules inside ty.compile and with a GradScaler", function()
  for _, name in ipairs { "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD" } do
    local p, q = parameters(), parameters()
    local options = { lr = 0.01, schedule = optim.exponential(0.9) }
    local plain, recorded = optim[name](p, options), optim[name](q, options)
    local step = ty.compile(function(scale)
      local loss = loss_of(q) * scale
      recorded:step(loss)
      return loss
    end)
    for i = 1, 6 do
      plain:step(loss_of(p) * (1 + 0.1 * i))
      step(ty.tensor(1 + 0.1 * i, { dtype = "f64" }))
    end
    for k = 1, 2 do check.close(q[k]:tolist(), p[k]:tolist(), 1e-12, name) end
    local r = parameters()
    local scaled, scaler = optim[name](r, options), optim.GradScaler { scale = 8 }
    for i = 1, 6 do
      scaled:zero_grad()
      scaler:scale(loss_of(r) * (1 + 0.1 * i)):backward()
      scaler:step(scaled)
    end
    for k = 1, 2 do check.close(r[k]:tolist(), p[k]:tolist(), 1e-9, name .. " scaled") end
  end
end)

check.test("composed steps inside ty.compile: the numbers of plain ones, recorded once", function()
  local program = ty.core.program
  local cases = {
    { "LAMB", { clip_norm = 0.5, weight_decay = 0.1 } }, { "LAMB", {} }, { "Adafactor", { weight_decay = 0.1 } },
    { "Adafactor", { clip_norm = 0.5 } }, { "Muon", { clip_norm = 0.5, adam_rate = 0.3 } }, { "Muon", {} },
    { "Shampoo", { refresh = 3, momentum = 0.9, clip_norm = 0.5 } }, { "Shampoo", { refresh = 2 } },
    { "SOAP", { refresh = 3, clip_norm = 0.5 } }, { "SOAP", { refresh = 2 } },
  }
  for _, case in ipairs(cases) do
    for _, dtype in ipairs { "f32", "f64", "bf16" } do
      local name, model = case[1], ty.nn.Linear(4, 6):to(dtype)
      local twin = model:clone()
      local p, q = { model.weight, model.bias }, { twin.weight, twin.bias }
      local function options(module)
        local o = { lr = 0.02, schedule = optim.exponential(0.9), ema = optim.EMA(module, { decay = 0.9 }) }
        for key, value in pairs(case[2]) do o[key] = value end
        return o
      end
      local of_p, of_q = options(model), options(twin)
      local plain, recorded = optim[name](p, of_p), optim[name](q, of_q)
      local step = ty.compile(function(scale)
        local loss = loss_of(q) * scale
        return loss, recorded:step(loss)
      end)
      for i = 1, 9 do
        local loss = loss_of(p) * ty.tensor(1 + 0.1 * i, { dtype = dtype })
        local plain_norm = plain:step(loss)
        local same, of_same = step(ty.tensor(1 + 0.1 * i, { dtype = dtype }))
        check.equal(same:item(), loss:item(), name .. " " .. dtype)
        if plain_norm then check.equal(of_same:item(), plain_norm, name .. "'s norm") end
      end
      for k = 1, 2 do
        check.equal(q[k]:tolist(), p[k]:tolist(), name .. " " .. dtype)
        check.equal(of_q.ema:averages_of_weights()[q[k]]:tolist(), of_p.ema:averages_of_weights()[p[k]]:tolist())
      end
      check.equal(recorded.steps, plain.steps)
      check.equal(#program.stats(step), 1, name .. " is recorded")
    end
  end
end)

check.test("steps with closures say that they are not for ty.compile", function()
  local p = parameters()
  local sam, lbfgs = optim.SAM(optim.SGD(p)), optim.LBFGS(p)
  for name, opt in pairs { SAM = sam, LBFGS = lbfgs } do
    local step = ty.compile(function(x)
      opt:step(function() return loss_of(p) end)
      return x
    end)
    check.fails(function() step(ty.ones(1)) end, name .. ": does not work inside ty.compile")
  end
end)

-- ---- schedules ----

local schedules = {
  exponential = optim.exponential(0.9),
  multi_step = optim.step { milestones = { 3, 8, 20 }, gamma = 0.3 },
  polynomial = optim.polynomial { steps = 25, power = 2 },
  cosine_restarts = optim.cosine_restarts { steps = 5, growth = 2 },
  ["cosine_restarts even"] = optim.cosine_restarts { steps = 7 },
  ["cyclic triangular"] = optim.cyclic { up = 4, down = 6 },
  ["cyclic triangular2"] = optim.cyclic { up = 4, mode = "triangular2" },
  ["cyclic exp_range"] = optim.cyclic { up = 5, mode = "exponential", gamma = 0.95 },
  sequential = optim.sequential({ function(step) return step < 100 and 0.1 or 1 end, optim.exponential(0.9),
    optim.polynomial { steps = 10 } }, { 4, 15 }),
  chained = optim.chained { function(step) return 0.25 + 0.75 * math.min(step, 8) / 8 end, optim.exponential(0.95) },
  per_group = { optim.exponential(0.9), function(step) return 1 / (1 + step) end },
}

local function two_groups(more)
  local groups = { { params = { ty.ones(1):requires_grad_() }, lr = 0.5 },
    { params = { ty.ones(1):requires_grad_() }, lr = 1.0 } }
  for i, schedule in ipairs(more or {}) do groups[i].schedule = schedule end
  return optim.SGD(groups)
end

for name, schedule in pairs(schedules) do
  check.test("PyTorch: schedule " .. name, function()
    local opt = two_groups()
    local scheduler = optim.Scheduler(opt, schedule)
    for i, expected in ipairs(fixture.schedules[name]) do
      check.close({ opt.groups[1].lr, opt.groups[2].lr }, expected, 1e-9, "step " .. i - 1)
      scheduler:step()
    end
  end)
end

check.test("groups with schedules of their own", function()
  local opt = two_groups(schedules.per_group)
  local p, q = opt.groups[1].params[1], opt.groups[2].params[1]
  local a, b = 1.0, 1.0
  for i = 0, 4 do
    opt:step((p + q):sum())
    a, b = a - 0.5 * 0.9 ^ i, b - 1 / (1 + i)
    check.close(p:item(), a, 1e-5)
    check.close(q:item(), b, 1e-5)
  end
  check.fails(function() optim.SGD { { params = { p }, schedule = 3 } } end, "schedule: expected a function, got 3")
  check.fails(function() optim.Scheduler(opt, { optim.constant() }) end, "expected one for each of 2 groups, got 1")
end)

local plateaus = {
  plain = { patience = 2, factor = 0.5 },
  cooldown = { patience = 1, factor = 0.5, cooldown = 2, threshold = 0.01, least = 0.1 },
  absolute = { patience = 1, factor = 0.3, threshold = 0.05, relative = false, mode = "max" },
}
for name, options in pairs(plateaus) do
  check.test("PyTorch: ReduceLROnPlateau " .. name, function()
    local opt = two_groups()
    local plateau = optim.ReduceLROnPlateau(opt, options)
    for i, loss in ipairs(fixture.losses) do
      local before = opt.groups[2].lr
      local fell = plateau:step(options.mode == "max" and -loss or loss)
      check.close({ opt.groups[1].lr, opt.groups[2].lr }, fixture.plateau[name][i], 1e-12, "call " .. i)
      check.equal(fell, opt.groups[2].lr < before)
      local copy = optim.ReduceLROnPlateau(opt, options)
      copy:load_state_dict(plateau:state_dict())
      plateau = copy
    end
  end)
end

check.test("schedules: wrong arguments", function()
  check.fails(function() optim.sequential({ optim.constant() }, { 3 }) end, "milestones: expected 0, one less")
  check.fails(function() optim.sequential({ optim.constant(), optim.constant(), optim.constant() }, { 3, 3 }) end,
    "expected rising numbers, got 3 after 3")
  check.fails(function() optim.chained {} end, "schedules: expected at least one")
  check.fails(function() optim.cyclic {} end, "cyclic: up: expected an integer >= 1, got nil")
  check.fails(function() optim.polynomial {} end, "polynomial: steps: expected an integer >= 1")
end)

check.finish()
