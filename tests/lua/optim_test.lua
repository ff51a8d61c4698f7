-- Optimizers against PyTorch (tests/fixtures/make_modules.py), schedules, clipping, averages, state.
local here = arg and arg[0]:match ".*/" or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn, optim = ty.nn, ty.optim

local fixture = ty.io.load_npz(check.root .. "tests/fixtures/modules_torch.npz")

local function wave(shape, offset)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return (ty.arange(n):to "f64" * 0.37 + offset):sin():reshape(shape):to "f32"
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
  sgd = function(p) return optim.SGD(p, { lr = 0.1 }) end,
  sgd_momentum = function(p)
    return optim.SGD(p, { lr = 0.1, momentum = 0.9, dampening = 0.1, weight_decay = 0.05 })
  end,
  sgd_nesterov = function(p) return optim.SGD(p, { lr = 0.1, momentum = 0.9, nesterov = true }) end,
  adam = function(p) return optim.Adam(p, { lr = 0.05, beta1 = 0.8, beta2 = 0.95, eps = 1e-6, weight_decay = 0.1 }) end,
  adamw = function(p) return optim.AdamW(p, { lr = 0.05, weight_decay = 0.1 }) end,
  adamw_clipped = function(p) return optim.AdamW(p, { lr = 0.05, weight_decay = 0.1, clip_norm = 1 }) end,
}

for name, make in pairs(makers) do
  check.test("PyTorch: " .. name, function()
    local p = parameters()
    local opt, norm = make(p), nil
    for _ = 1, 5 do norm = opt:step(loss_of(p)) end
    for i, t in ipairs(p) do
      local distance = (t:detach() - fixture[("%s/p%d"):format(name, i - 1)]):abs():max():item()
      check.equal(distance < 2e-5, true, ("p%d differs by %g"):format(i - 1, distance))
    end
    if norm then check.close(norm, fixture[name .. "/norm"]:item(), 1e-4) end
  end)

  check.test("resumed bit for bit: " .. name, function()
    local p = parameters()
    local opt = make(p)
    for _ = 1, 3 do opt:step(loss_of(p)) end
    local state = opt:state_dict()
    local q = {}
    for i, t in ipairs(p) do q[i] = t:detach():clone():requires_grad_() end
    local other = make(q)
    other:load_state_dict(state)
    for _ = 1, 3 do
      opt:step(loss_of(p))
      other:step(loss_of(q))
    end
    for i, t in ipairs(p) do check.equal(q[i]:tolist(), t:tolist(), "parameter " .. i) end
  end)
end

check.test("groups have their own settings", function()
  local a, b = ty.ones(2):requires_grad_(), ty.ones(2):requires_grad_()
  local opt = optim.SGD({ { params = { a }, lr = 1.0 }, { params = { b } } }, { lr = 0.1 })
  opt:step((a + b):sum())
  check.close(a:tolist(), { 0, 0 }, 1e-6)
  check.close(b:tolist(), { 0.9, 0.9 }, 1e-6)
  check.fails(function() optim.SGD({ { params = { a }, rate = 1 } }, {}) end, "no option 'rate'")
  check.fails(function() optim.SGD({ a, a }) end, "given twice")
  check.fails(function() optim.SGD {} end, "SGD: parameters: expected at least one tensor, got an empty table")
  check.fails(function() optim.Adam({ a }, { beta3 = { 0.9 } }) end, "Adam: no option 'beta3'")
  check.fails(function() optim.Adam({ a }, { betas = { 0.9 } }) end,
    "Adam: betas: expected a list of two numbers, got a table")
end)

check.test("unused parameters stay as they are", function()
  local a, b = ty.ones(2):requires_grad_(), ty.ones(2):requires_grad_()
  local opt = optim.AdamW({ a, b })
  opt:step(a:sum())
  check.equal(b:tolist(), { 1, 1 })
  opt:step((a + b):sum())
  check.equal(opt.state[a].step, 2)
  check.equal(opt.state[b].step, 1)
end)

check.test("accumulation: step without a loss", function()
  local p, q = parameters(), parameters()
  local a, b = optim.SGD(p, { lr = 0.1 }), optim.SGD(q, { lr = 0.2 })
  loss_of(p):backward()
  loss_of(p):backward()
  a:step()
  a:zero_grad()
  b:step(loss_of(q))
  for i in ipairs(p) do check.close(p[i]:tolist(), q[i]:tolist(), 1e-5) end
  check.equal(p[1].grad, nil)
end)

check.test("clipping", function()
  local p, slope = ty.zeros(2):requires_grad_(), ty.tensor { 3.0, 4.0 }
  local loss = (p * slope):sum()
  loss:backward()
  check.close(optim.clip_grad_norm({ p }, 1), 5, 1e-6)
  check.close(p.grad:tolist(), { 0.6, 0.8 }, 1e-5)
  optim.clip_grad_value({ p }, 0.7)
  check.close(p.grad:tolist(), { 0.6, 0.7 }, 1e-5)
  local q = ty.zeros(2):requires_grad_()
  local opt = optim.SGD({ q }, { lr = 1, clip_value = 1 })
  opt:step((q * ty.tensor { 3.0, -0.5 }):sum())
  check.close(q:tolist(), { -1, 0.5 }, 1e-6)
end)

check.test("a module, a list or one tensor stand for parameters", function()
  local function gradient_of(linear)
    linear(ty.ones(1, 2)):sum():backward()
    return linear
  end
  local function norm(linear)
    local total = 0
    for _, p in ipairs(linear:parameters()) do total = total + (p.grad * p.grad):sum():item() end
    return math.sqrt(total)
  end
  local linear = gradient_of(ty.nn.Linear(2, 3))
  check.close(optim.clip_grad_norm(linear, 1), 3, 1e-6)
  check.close(norm(linear), 1, 1e-5)
  optim.clip_grad_value(linear, 0.1)
  check.close(norm(linear), 0.3, 1e-5)
  local p = ty.zeros(2):requires_grad_()
  p:sum():backward()
  check.close(optim.clip_grad_norm(p, 1), math.sqrt(2), 1e-6)
  for name in ("SGD Adam AdamW Lion GaLore APOLLO FRUGAL"):gmatch "%a+" do
    check.equal(#optim[name](linear).groups[1].params, 2, name .. " of a module")
    check.equal(#optim[name](p).groups[1].params, 1, name .. " of a tensor")
    check.equal(#optim[name]({ { params = linear, lr = 1 }, { params = p } }).groups, 2, name .. " of groups")
    for _, wrong in ipairs { 3, "weights", false } do
      check.fails(function() optim[name](wrong) end, name .. ": parameters: expected a module or a tensor or a list")
    end
    check.fails(function() optim[name]() end, name .. ": parameters: expected")
    check.fails(function() optim[name] { 1 } end, "got 1 as element 1")
    check.fails(function() optim[name](ty.nn.ReLU()) end, "got a module ReLU without parameters")
  end
  for _, name in ipairs { "clip_grad_norm", "clip_grad_value" } do
    check.fails(function() optim[name](nil, 1) end, name .. ": parameters: expected a module or a tensor or a list")
    check.fails(function() optim[name]({ 1 }, 1) end, name .. ": parameters: expected")
    check.fails(function() optim[name](p) end, "expected a number >= 0, got nil")
    check.fails(function() optim[name](p, -1) end, "expected a number >= 0, got -1")
    check.fails(function() optim[name](p, 0 / 0) end, "expected a number >= 0, got nan")
  end
end)

check.test("settings that cannot be right", function()
  local p = ty.zeros(2):requires_grad_()
  local wrong = {
    lr = { -1, 0 / 0, math.huge, "fast", false }, weight_decay = { -0.1, 0 / 0, math.huge }, eps = { -1e-8, 0 / 0 },
    beta1 = { -0.1, 1, 0 / 0 }, beta2 = { -0.1, 1, 2 }, momentum = { -1, 1.5, 0 / 0 }, clip_norm = { -1, 0 / 0 },
    clip_value = { -1, "x" }, schedule = { 1, "cosine" }, bits = { 4, "8" }, ema = { 0.9, {} },
  }
  local shared = { "lr", "weight_decay", "clip_norm", "clip_value", "schedule", "ema" }
  local own = { SGD = { "momentum" }, Adam = { "beta1", "beta2", "eps", "bits" }, Lion = { "beta1", "beta2" },
    AdamW = { "beta1", "beta2", "eps", "bits" }, GaLore = { "beta1", "eps", "bits" }, APOLLO = { "beta1", "eps" },
    FRUGAL = { "beta1", "eps" } }
  for name, settings in pairs(own) do
    table.move(shared, 1, #shared, #settings + 1, settings)
    for _, setting in ipairs(settings) do
      for _, value in ipairs(wrong[setting]) do
        check.fails(function() optim[name]({ p }, { [setting] = value }) end, name .. ": " .. setting .. ": expected")
      end
    end
    check.fails(function() optim[name] { { params = { p }, lr = -1 } } end, name .. ": lr: expected")
  end
end)

check.test("rates that become wrong between steps", function()
  local p = ty.zeros(2):requires_grad_()
  local function step(opt) opt:step(p:sum()) end
  for _, factor in ipairs { -1, 0 / 0, math.huge, "1" } do
    local opt = optim.SGD({ p }, { lr = 1, schedule = function() return factor end })
    check.fails(function() step(opt) end, "SGD: schedule(0): expected a finite number >= 0")
  end
  local opt = optim.AdamW { p }
  opt.groups[1].lr = -1
  check.fails(function() step(opt) end, "AdamW: lr: expected a finite number >= 0, got -1")
  check.equal(p:tolist(), { 0, 0 }, "nothing moved")
  check.fails(function() optim.Scheduler(opt, function() return -1 end) end, "Scheduler: schedule(0): expected")
end)

check.test("schedules and averages of wrong arguments", function()
  for _, name in ipairs { "cosine", "linear", "one_cycle" } do
    check.fails(function() optim[name]() end, name .. ": steps: expected an integer >= 1, got nil")
    check.fails(function() optim[name](5) end, name .. ": options: expected a table, got 5")
    check.fails(function() optim[name] { steps = 0 } end, name .. ": steps: expected an integer >= 1, got 0")
  end
  check.fails(function() optim.cosine { steps = 5, final = -1 } end, "cosine: final: expected")
  check.fails(function() optim.warmup() end, "warmup: warmup: expected a finite number >= 0, got nil")
  check.fails(function() optim.exponential() end, "exponential: gamma: expected")
  check.fails(function() optim.Scheduler() end, "Scheduler: optimizer: expected an optimizer, got nil")
  check.fails(function() optim.EMA() end, "EMA: module: expected a module, got nil")
  check.fails(function() optim.EMA(ty.nn.Linear(1, 1), { decay = 2 }) end, "EMA: decay: expected a number in [0, 1]")
end)

check.test("schedules", function()
  local cosine = optim.cosine { steps = 110, warmup = 10, final = 0.1 }
  check.close(cosine(0), 0.1, 1e-12)
  check.close(cosine(9), 1, 1e-12)
  check.close(cosine(10), 1, 1e-12)
  check.close(cosine(60), 0.55, 1e-12)
  check.close(cosine(110), 0.1, 1e-12)
  check.close(cosine(500), 0.1, 1e-12)
  local linear = optim.linear { steps = 10 }
  check.close(linear(5), 0.5, 1e-12)
  local step = optim.step { every = 3, gamma = 0.5 }
  check.close({ step(2), step(3), step(7) }, { 1, 0.5, 0.25 }, 1e-12)
  check.close(optim.step { milestones = { 5, 8 } }(8), 0.01, 1e-12)
  check.close(optim.exponential(0.9)(2), 0.81, 1e-12)
  check.close({ optim.warmup(4)(0), optim.warmup(4)(9) }, { 0.25, 1 }, 1e-12)
  check.fails(function() optim.cosine { warmup = 3 } end, "cosine: steps: expected an integer >= 1, got nil")
  local p = ty.zeros(1):requires_grad_()
  local opt = optim.SGD({ p }, { lr = 2, schedule = optim.linear { steps = 2 } })
  opt:step(p:sum())
  check.close(opt:rate(), 1, 1e-12)
  opt:step(p:sum())
  check.close(p:item(), -3, 1e-6)
  local plain = optim.SGD({ p }, { lr = 2 })
  local scheduler = optim.Scheduler(plain, optim.exponential(0.5))
  scheduler:step()
  check.close(plain.groups[1].lr, 1, 1e-12)
  local other = optim.Scheduler(optim.SGD({ p }, { lr = 2 }), optim.exponential(0.5))
  other:load_state_dict(scheduler:state_dict())
  check.close(other.optimizer.groups[1].lr, 1, 1e-12)
end)

-- Rates of torch.optim.lr_scheduler.OneCycleLR(max_lr = 1, total_steps, pct_start, div_factor, final_div_factor).
check.test("one_cycle is PyTorch's, step by step", function()
  local cases = {
    { { steps = 10 }, { 0.04, 0.52, 1, 0.950484632013, 0.81174565395, 0.611262021936, 0.388741978064, 0.18825834605,
      0.0495193679865, 4e-06 } },
    { { steps = 11, peak = 0.25, start = 10, finish = 100, annealing = "linear" }, { 0.1, 0.614285714286,
      0.969727272727, 0.848636363636, 0.727545454545, 0.606454545455, 0.485363636364, 0.364272727273, 0.243181818182,
      0.122090909091, 0.001 } },
    { { steps = 2 }, { 0.811745653949763, 4e-06 } }, { { steps = 1 }, { 4e-06 } },
    { { steps = 5, peak = 1 }, { 0.04, 0.1805887450304573, 0.52, 0.8594112549695427, 1 } },
  }
  for _, case in ipairs(cases) do
    local cycle, rates = optim.one_cycle(case[1]), {}
    for step = 0, case[1].steps - 1 do rates[step + 1] = cycle(step) end
    check.close(rates, case[2], 1e-11)
    check.equal(cycle(case[1].steps + 7), rates[#rates])
  end
  check.fails(function() optim.one_cycle { steps = 5, annealing = "exp" } end,
    'one_cycle: annealing: expected "cosine" or "linear", got "exp"')
end)

check.test("averages of weights", function()
  local model = nn.Linear(1, 1, { bias = false })
  ty.no_grad(function() model.weight:fill_(0) end)
  local ema = optim.EMA(model, { decay = 0.5, warmup = false })
  ty.no_grad(function() model.weight:fill_(1) end)
  ema:update()
  check.close(ema.model.weight:item(), 0.5, 1e-7)
  ema:update()
  check.close(ema.model.weight:item(), 0.75, 1e-7)
  check.equal(ema.model.weight.requires_grad, false)
  local other = optim.EMA(model, { decay = 0.5 })
  other:load_state_dict(ema:state_dict())
  check.equal(other.updates, 2)
  check.close(other.model.weight:item(), 0.75, 1e-7)
  ema:copy_to(model)
  check.close(model.weight:item(), 0.75, 1e-7)
end)

-- A model whose second weight gets no gradient, large enough for quantized moments, and its loss at a step.
local function large()
  local model = { ty.full({ 80, 60 }, 0.5), ty.ones(3), ty.arange(10, { dtype = "f32" }) }
  for _, p in ipairs(model) do p:requires_grad_() end
  local slope = (ty.arange(4800, { dtype = "f32" }) * 0.37):sin():reshape(80, 60)
  return model, function(step)
    return (model[1] * slope * math.cos(step)):sum() + (model[1] - slope):square():sum() + model[3]:square():sum()
  end
end

check.test("clipping leaves the gradients as they are", function()
  local function stepped(options, before)
    local p = ty.tensor { 0.5, -2, 3, 0.1 }:requires_grad_()
    p:set_grad(ty.tensor { 3.0, -0.2, 5, -7 })
    before(p)
    options.lr = 0.1
    local opt = optim.SGD({ p }, options)
    local norm = opt:step()
    return p:tolist(), p.grad:tolist(), norm
  end
  local a, grad, norm = stepped({ clip_value = 1, clip_norm = 0.5 }, function() end)
  local b = stepped({}, function(p)
    optim.clip_grad_value({ p }, 1)
    optim.clip_grad_norm({ p }, 0.5)
  end)
  check.close(a, b, 1e-6)
  check.close(grad, { 3, -0.2, 5, -7 }, 1e-6)
  check.close(norm, math.sqrt(3 + 0.04), 1e-6)
end)

check.test("averages move within the step", function()
  for _, kind in ipairs { "SGD", "AdamW", "Lion" } do
    local function run(fused)
      local model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
      for i, p in ipairs(model:parameters()) do ty.no_grad(function() p:copy_((ty.arange(p:numel()) * 0.7 + i):sin()
        :reshape(p.shape)) end) end
      local ema = optim.EMA(model, { decay = 0.8 })
      local trained = model:parameters()
      table.remove(trained) -- its average moves all the same
      local opt = optim[kind](trained, { lr = 0.1, ema = fused and ema or nil })
      local x = (ty.arange(15, { dtype = "f32" }) * 1.3):sin():reshape(5, 3)
      for step = 1, 5 do
        opt:step(model(x):square():sum())
        ty.no_grad(function() model:parameters()[6]:fill_(step) end)
        if not fused then ema:update() end
      end
      return ema
    end
    local a, b = run(true), run(false)
    check.equal(a.updates, b.updates)
    local wanted = b.model:state_dict()
    for name, value in pairs(a.model:state_dict()) do
      local last = name == "2.bias" -- changed after the step: the fused pass sees it one step later
      if not last then check.close(value:tolist(), wanted[name]:tolist(), 1e-6) end
    end
  end
end)

check.test("moments of 8 bits", function()
  local full, full_loss = large()
  local coarse, coarse_loss = large()
  local a, b = optim.AdamW(full, { lr = 0.01 }), optim.AdamW(coarse, { lr = 0.01, bits = 8 })
  for step = 1, 60 do
    a:step(full_loss(step))
    b:step(coarse_loss(step))
  end
  local state = b.state[coarse[1]]
  check.equal(state.exp_avg.dtype, "u8")
  check.equal(state.exp_avg_sq.dtype, "u8")
  check.equal(table.concat(state.scales.shape, ","), "2,19")
  check.equal(b.state[coarse[3]].exp_avg.dtype, "f32")
  check.equal(b.state[coarse[2]], nil)
  local off = (full[1] - coarse[1]):abs():max():item()
  check.equal(off > 0 and off < 0.03, true)
  check.close(full[3]:tolist(), coarse[3]:tolist(), 0)
  check.fails(function() optim.Adam(full, { bits = 4 }) end, "bits: expected 8 or 32, got 4")
end)

check.test("a state resumes bit for bit", function()
  for _, case in ipairs { { "AdamW", { bits = 8 } }, { "Adam", {} }, { "Lion", { weight_decay = 0.1 } },
    { "SGD", { momentum = 0.9 } } } do
    local p, loss = large()
    local opt = optim[case[1]](p, case[2])
    for step = 1, 3 do opt:step(loss(step)) end
    local q, other_loss = large()
    ty.no_grad(function() for i in ipairs(q) do q[i]:copy_(p[i]) end end)
    local other = optim[case[1]](q, case[2])
    other:load_state_dict(opt:state_dict())
    for step = 4, 6 do
      opt:step(loss(step))
      other:step(other_loss(step))
    end
    for i in ipairs(p) do check.equal((p[i] - q[i]):abs():max():item(), 0.0) end
    if case[2].bits then
      local saved = opt:state_dict()
      saved.state["0"].scales = ty.zeros(2, 7)
      check.fails(function() other:load_state_dict(saved) end, "scales of parameter 0 has shape [2, 7]")
    end
  end
end)

check.test("parameters whose gradients come and go", function()
  local a, b = ty.ones(2):requires_grad_(), ty.ones(2):requires_grad_()
  local opt = optim.SGD({ a, b }, { lr = 0.1, momentum = 0.5 })
  opt:step(a:sum() + b:sum())
  opt:step(a:sum())
  opt:step(a:sum() + b:sum())
  check.equal(opt.state[a].step, 3)
  check.equal(opt.state[b].step, 2)
  check.close(a:tolist(), { 0.575, 0.575 }, 1e-6)
  check.close(b:tolist(), { 0.75, 0.75 }, 1e-6)
  opt.groups[1].momentum = 0
  opt:step(a:sum())
  check.close(a:tolist(), { 0.475, 0.475 }, 1e-6)
end)

check.finish()
