-- GaLore, APOLLO and FRUGAL: against the authors' programs (tests/fixtures/make_lowrank.py) and against the papers'
-- formulas in f64; what they keep, going on from a saved state, mistakes.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local optim = ty.optim
local lowrank = require "tycho.optim.lowrank"

local fixture = ty.io.load_npz(check.root .. "tests/fixtures/lowrank_torch.npz")

local function apart(a, b) return (a:detach():to "f64" - b:to "f64"):abs():max():item() end
local function leaf(t) return t:detach():clone():requires_grad_() end

-- Tensors that depend on nothing but a number, in f64.
local function wave(shape, offset)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  local i = ty.arange(n, { dtype = "f64" })
  return ((i * 0.37 + offset):sin() + (i * i * 0.011 + 2 * offset):cos()):reshape(shape)
end

local shapes = { { 12, 8 }, { 6, 20 }, { 5 } }
local function parameters(dtype)
  local list = {}
  for i, shape in ipairs(shapes) do list[i] = leaf(wave(shape, i):to(dtype or "f64")) end
  return list
end

local function slope(i, step) return wave(shapes[i], 10 * i + step) * (1 + step % 2) end

local function set_slopes(list, step)
  for i, p in ipairs(list) do p:set_grad(slope(i, step):to(p.dtype)) end
end

local function follow(name, make)
  local list = {}
  for i = 1, 3 do list[i] = leaf(fixture["start" .. i - 1]) end
  local opt = make(list)
  for step = 0, 6 do
    for i, p in ipairs(list) do p:set_grad(fixture["grad" .. i - 1]:select(0, step):clone()) end
    opt:step()
    for i, p in ipairs(list) do
      local distance = apart(p, fixture[("%s/p%d"):format(name, i - 1)]:select(0, step))
      check.ok(distance < 2e-5, ("%s: step %d, p%d differs by %g"):format(name, step, i - 1, distance))
    end
  end
end

check.test("GaLore as the authors' program", function()
  follow("galore", function(list)
    return optim.GaLore(list, { lr = 0.05, rank = 3, refresh = 3, scale = 0.25, eps = 1e-12 })
  end)
end)

check.test("APOLLO as the authors' program", function()
  for name, options in pairs { apollo = { rank = 3 }, apollo_mini = { mini = true } } do
    options.lr, options.refresh, options.eps = 0.05, 3, 1e-12
    local seed, seeded = lowrank.seed, lowrank.seeded
    -- The authors' random numbers in place of ours.
    lowrank.seed = function(_, round, position) return { round, position - 1 } end
    lowrank.seeded = function(key)
      return fixture[("%s/basis%d"):format(name, key[2])]:select(0, key[1]):clone()
    end
    local ok, problem = pcall(follow, name, function(list) return optim.APOLLO(list, options) end)
    lowrank.seed, lowrank.seeded = seed, seeded
    check.ok(ok, problem)
  end
end)

-- ---- references in f64, from the papers ----

-- Adam's direction for the gradient g of a state { m, v, step }.
local function direction(s, g, beta1, beta2, eps)
  s.step = (s.step or 0) + 1
  s.m = (s.m or ty.zeros_like(g)) * beta1 + g * (1 - beta1)
  s.v = (s.v or ty.zeros_like(g)) * beta2 + g:square() * (1 - beta2)
  return s.m / (1 - beta1 ^ s.step) / ((s.v / (1 - beta2 ^ s.step)):sqrt() + eps)
end

local function compare(opt, list, reference, steps, tolerance)
  local plain, states = {}, {}
  for i, p in ipairs(list) do plain[i], states[i] = p:detach():clone(), {} end
  for step = 1, steps do
    set_slopes(list, step)
    opt:step()
    for i in ipairs(list) do
      plain[i] = reference(plain[i], slope(i, step), states[i], step, i)
      local distance = apart(list[i], plain[i])
      check.ok(distance < (tolerance or 1e-10), ("step %d, parameter %d differs by %g"):format(step, i, distance))
    end
  end
end

local function tall(i) return i == 1 end

check.test("GaLore by the paper: decay, clipping, alpha", function()
  local list = parameters()
  local opt = optim.GaLore(list, { lr = 0.03, rank = 3, refresh = 4, scale = 0.5, beta1 = 0.8, beta2 = 0.95,
    weight_decay = 0.1, clip_value = 1.5 })
  compare(opt, list, function(p, g, s, step, i)
    g = g:clamp(-1.5, 1.5)
    p = p * (1 - 0.03 * 0.1)
    if i == 3 then return p - 0.03 * direction(s, g, 0.8, 0.95, 1e-8) end
    if (step - 1) % 4 == 0 then
      local u, _, vh = ty.svd(g)
      s.p = tall(i) and vh:narrow(0, 0, 3):transpose():contiguous() or u:narrow(1, 0, 3):contiguous()
    end
    if tall(i) then
      return p - 0.03 * 0.5 * direction(s, g:matmul(s.p), 0.8, 0.95, 1e-8):matmul(s.p:transpose())
    end
    return p - 0.03 * 0.5 * s.p:matmul(direction(s, s.p:transpose():matmul(g), 0.8, 0.95, 1e-8))
  end, 11)
end)

check.test("APOLLO by the paper: channels, the limiter, the norm clipped", function()
  local list = parameters()
  local opt = optim.APOLLO(list, { lr = 0.03, rank = 2, refresh = 4, scale = 0.7, beta1 = 0.8, beta2 = 0.95, seed = 7,
    weight_decay = 0.1, clip_norm = 3 })
  local random = {}
  compare(opt, list, function(p, g, s, step, i)
    local all = ty.norm_list { slope(1, step), slope(2, step), slope(3, step) }:item()
    g = g * math.min(1, 3 / (all + 1e-6))
    p = p * (1 - 0.03 * 0.1)
    if i == 3 then return p - 0.03 * direction(s, g, 0.8, 0.95, 1e-8) end
    local round, short = (step - 1) // 4, tall(i) and 8 or 6
    local key = round .. "/" .. i
    random[key] = random[key] or lowrank.seeded(lowrank.seed(7, round, i), ty.randn, { short, 2 }, { dtype = "f64" })
    local basis = random[key] / math.sqrt(2)
    local low = tall(i) and g:matmul(basis) or basis:transpose():matmul(g)
    local turned, dim = direction(s, low, 0.8, 0.95, 1e-8), tall(i) and 1 or 0
    local update = g * (turned:norm(2, { dim }, true) / low:norm(2, { dim }, true))
    local norm = update:norm():item() * (1 - 0.8 ^ step) / math.sqrt(1 - 0.95 ^ step)
    if s.norm and norm > 1.01 * s.norm then
      update, norm = update * (1.01 * s.norm / norm), 1.01 * s.norm
      s.limited = true
    end
    s.norm = norm
    if step == 11 then check.ok(s.limited, "the limiter is never met") end
    return p - 0.03 * 0.7 * update
  end, 11, 1e-8) -- there is 1e-8 in a divisor
end)

check.test("FRUGAL by the paper", function()
  for _, projection in ipairs { "blocks", "columns", "random", "svd" } do
    local list = parameters()
    local opt = optim.FRUGAL(list, { lr = 0.03, density = 0.6, refresh = 4, projection = projection, beta1 = 0.8,
      beta2 = 0.95, weight_decay = 0.1, free_rate = 0.5, seed = 3 })
    local full_blocks = 0
    compare(opt, list, function(p, g, s, step, i)
      p = p * (1 - 0.03 * 0.1)
      if i == 3 then return p - 0.03 * direction(s, g, 0.8, 0.95, 1e-8) end
      if (step - 1) % 4 == 0 then s.step, s.m, s.v = nil, nil, nil end
      local kept = opt.state[list[i]]
      if projection == "blocks" then
        if not kept.exp_avg then return p - 0.03 * 0.5 * g:sign() end
        full_blocks = full_blocks + 1
        return p - 0.03 * direction(s, g, 0.8, 0.95, 1e-8)
      end
      -- A projection onto positions is one by a matrix of zeros and ones.
      local basis = kept.projection
      if projection == "columns" then
        basis = ty.one_hot(kept.chosen, { classes = tall(i) and 8 or 6 }):to "f64":transpose()
      end
      local eye = ty.eye(basis:size(1), { dtype = "f64" })
      check.ok(apart(basis:transpose():matmul(basis), eye) < 1e-12, "a basis is orthonormal")
      if projection == "svd" and (step - 1) % 4 == 0 then
        check.ok(apart(basis, lowrank.top(g, basis:size(1))) < 1e-12)
      end
      local low = tall(i) and g:matmul(basis) or basis:transpose():matmul(g)
      local function back(x) return tall(i) and x:matmul(basis:transpose()) or basis:matmul(x) end
      local rest = (g - back(low)):sign()
      if projection == "columns" then -- exactly nothing where there is a state
        local free = 1 - basis:sum { 1 }
        rest = g:sign() * (tall(i) and free or free:reshape(-1, 1))
      end
      return p - 0.03 * (back(direction(s, low, 0.8, 0.95, 1e-8)) + 0.5 * rest)
    end, 11)
    if projection == "blocks" then check.equal(full_blocks, 11, "one of two matrices has a state") end
  end
end)

-- ---- what they keep, and for how long ----

local cases = {
  { "GaLore", { rank = 3, refresh = 3 } }, { "GaLore", { rank = 60, refresh = 3, bits = 8 } },
  { "APOLLO", { rank = 3, refresh = 3 } }, { "APOLLO", { mini = true, refresh = 3 } },
  { "FRUGAL", { refresh = 3, density = 0.6 } }, { "FRUGAL", { refresh = 3, projection = "columns" } },
  { "FRUGAL", { refresh = 3, projection = "random" } }, { "FRUGAL", { refresh = 3, projection = "svd" } },
}

check.test("a state resumes bit for bit", function()
  for _, case in ipairs(cases) do
    for _, dtype in ipairs { "f32", "bf16" } do
      local p = { leaf(wave({ 80, 70 }, 1):to(dtype)), leaf(wave({ 61, 100 }, 2):to(dtype)), leaf(wave({ 9 }, 3)) }
      local function set(list, step)
        for i, x in ipairs(list) do x:set_grad(wave(x.shape, 10 * i + step):to(x.dtype)) end
      end
      local opt = optim[case[1]](p, case[2])
      for step = 1, 4 do
        set(p, step)
        opt:step()
      end
      local q = {}
      for i, x in ipairs(p) do q[i] = leaf(x) end
      local other = optim[case[1]](q, case[2])
      other:load_state_dict(opt:state_dict())
      check.equal(other:state_bytes(), opt:state_bytes())
      for step = 5, 9 do
        ty.randn(3) -- other random numbers in between do not matter
        set(p, step)
        opt:step()
        set(q, step)
        other:step()
      end
      for i in ipairs(p) do check.equal(apart(p[i], q[i]), 0.0, case[1]) end
    end
  end
end)

check.test("random numbers of the program stay as they are", function()
  for _, case in ipairs { cases[3], cases[5], cases[6], cases[7] } do
    local list = parameters "f32"
    ty.manual_seed(5)
    local want = ty.randn(4):tolist()
    ty.manual_seed(5)
    set_slopes(list, 1)
    optim[case[1]](list, case[2]):step()
    check.equal(ty.randn(4):tolist(), want)
  end
end)

check.test("the bytes of a state", function()
  local function bytes(class, options, dtype)
    local list = { leaf(wave({ 80, 64 }, 1):to(dtype or "f32")), leaf(wave({ 48, 100 }, 2):to(dtype or "f32")),
      leaf(wave({ 10 }, 3):to(dtype or "f32")) }
    local opt = optim[class](list, options)
    check.equal(opt:state_bytes(), 0)
    for i, x in ipairs(list) do x:set_grad(wave(x.shape, i):to(x.dtype)) end
    opt:step()
    return opt:state_bytes()
  end
  local a, b, c = 80 * 64, 48 * 100, 10
  check.equal(bytes("SGD", {}), 0)
  check.equal(bytes("SGD", { momentum = 0.9 }), 4 * (a + b + c))
  check.equal(bytes("AdamW", {}), 8 * (a + b + c))
  check.equal(bytes("AdamW", { bits = 8 }), 2 * (a + b) + 8 * (a // 256 + b // 256 + 1) + 8 * c)
  check.equal(bytes("Lion", {}, "bf16"), 2 * (a + b + c))
  check.equal(bytes("GaLore", { rank = 5 }), 8 * (5 * 80 + 5 * 100 + c) + 4 * 5 * (64 + 48))
  check.equal(bytes("GaLore", { rank = 5 }, "bf16"), 4 * (5 * 80 + 5 * 100 + c) + 2 * 5 * (64 + 48))
  -- 47 columns: 3760 numbers, too few for 8 bits, and 4700
  check.equal(bytes("GaLore", { rank = 47, bits = 8 }),
    8 * (47 * 80 + c) + 2 * 47 * 100 + 8 * (4700 // 256 + 1) + 4 * 47 * (64 + 48))
  check.equal(bytes("GaLore", { rank = 0 }), 8 * (a + b + c))
  check.equal(bytes("APOLLO", { rank = 5 }), 8 * (5 * 80 + 5 * 100 + c) + 2 * 4)
  check.equal(bytes("APOLLO", { mini = true }), 8 * (80 + 100 + c) + 2 * 4)
  check.equal(bytes("APOLLO", { mini = true, rank = 2 }), 8 * (160 + 200 + c) + 2 * 4)
  check.equal(bytes("FRUGAL", { density = 0 }), 8 * c)
  check.equal(bytes("FRUGAL", { density = 1 }), 8 * (a + b + c))
  check.equal(bytes("FRUGAL", { density = 0.5, seed = 1 }), 8 * (b + c), "b alone is not more than half of a + b")
  check.equal(bytes("FRUGAL", { density = 0.25, projection = "columns" }),
    8 * (16 * 80 + 12 * 100 + c) + 8 * (16 + 12))
  check.equal(bytes("FRUGAL", { density = 0.25, projection = "svd" }),
    8 * (16 * 80 + 12 * 100 + c) + 4 * (16 * 64 + 12 * 48))
end)

check.test("averages, schedules, groups and gradients that come late", function()
  local model = ty.nn.Linear(8, 12)
  for _, name in ipairs { "GaLore", "APOLLO", "FRUGAL" } do
    local ema = optim.EMA(model, { decay = 0.5, warmup = false })
    local before = model.weight:detach():clone()
    local rank = name ~= "FRUGAL" and 2 or nil
    local opt = optim[name]({ { params = { model.weight }, rank = rank }, { params = { model.bias }, lr = 0 } },
      { lr = 0.1, ema = ema, schedule = optim.linear { steps = 4 } })
    for step = 1, 2 do
      model.weight:set_grad(wave({ 12, 8 }, step):to "f32")
      if step == 2 then model.bias:set_grad(ty.ones(12)) end
      local average = step == 1 and before or ema.model.weight:detach():clone()
      opt:step()
      check.ok(apart(ema.model.weight, (average + model.weight:detach()) / 2) < 1e-6, name)
    end
    check.ok(apart(model.weight, before) > 1e-3)
    check.equal(opt.state[model.bias].step, 1)
    check.close(opt:rate(), 0.05, 1e-12)
    opt:zero_grad()
  end
end)

check.test("a matrix whose first gradient is nothing is not held back", function()
  local p = leaf(wave({ 12, 8 }, 1))
  local opt = optim.APOLLO({ p }, { rank = 2, lr = 0.1 })
  p:set_grad(ty.zeros_like(p))
  opt:step()
  local before = p:detach():clone()
  p:set_grad(wave({ 12, 8 }, 2))
  opt:step()
  check.ok(apart(p, before) > 1e-3)
end)

check.test("mistakes are errors", function()
  local p = leaf(wave({ 12, 8 }, 1))
  check.fails(function() optim.GaLore({ p }, { rank = -1 }) end, "rank: expected an integer >= 0, got -1")
  check.fails(function() optim.GaLore({ p }, { rank = 2.5 }) end, "GaLore: rank: expected an integer >= 0, got 2.5")
  check.fails(function() optim.GaLore({ p }, { refresh = 0 }) end, "GaLore: refresh: expected an integer >= 1, got 0")
  check.fails(function() optim.GaLore({ p }, { bits = 4 }) end, "GaLore: bits: expected 8 or 32, got 4")
  check.fails(function() optim.GaLore({ p }, { density = 1 }) end, "GaLore: no option 'density'")
  check.fails(function() optim.APOLLO({ p }, { growth = 0.5 }) end, "APOLLO: growth: expected a number >= 1, got 0.5")
  check.fails(function() optim.APOLLO({ p }, { seed = "x" }) end, 'APOLLO: seed: expected an integer, got "x"')
  check.fails(function() optim.APOLLO({ p }, 3) end, "APOLLO: options: expected a table, got 3")
  check.fails(function() optim.FRUGAL({ p }, { density = 2 }) end,
    "FRUGAL: density: expected a number in [0, 1], got 2")
  check.fails(function() optim.FRUGAL({ p }, { projection = "rows" }) end,
    'FRUGAL: projection: expected "blocks" or "columns"')
  for _, name in ipairs { "GaLore", "APOLLO", "FRUGAL" } do
    local opt = optim[name]({ p }, {})
    local step = ty.compile(function(x)
      opt:step((p * x):sum())
      return x:sum()
    end)
    check.fails(function() step(ty.ones({ 12, 8 }, { dtype = "f64" })) end, name .. ": does not work inside ty.compile")
    local scaler = optim.GradScaler()
    check.fails(function() scaler:step(opt, p:sum()) end, name .. ": does not work with a GradScaler")
  end
  local opt = optim.GaLore({ p }, { rank = 2 })
  opt:step(p:sum())
  local other = optim.GaLore({ leaf(wave({ 13, 8 }, 1)) }, { rank = 2 })
  check.fails(function() other:load_state_dict(opt:state_dict()) end, "of parameter 0 has shape [12, 2]")
end)

check.finish()
