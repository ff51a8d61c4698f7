-- MeZO: a step is that of its formula with the direction that its seed gives, leaves nothing behind, and two runs are
-- the same; with the mean over many directions the slope is the gradient's.
local here = (arg and arg[0]:match ".*/" or "tests/lua/")
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local nn, optim = ty.nn, ty.optim

local function leaf(values) return ty.tensor(values, { dtype = "f64" }):requires_grad_() end
local target = ty.tensor({ 1, -2, 0.5 }, { dtype = "f64" })
local function quadratic(p) return function() return (p - target):square():sum() end end

check.test("a step is minus the rate times the slope along the direction, by hand", function()
  local p = leaf { 0.3, 0.1, -0.7 }
  local before = p:detach():clone()
  local opt = optim.MeZO({ p }, { lr = 0.05, eps = 1e-4, seed = 3 })
  opt:perturb({ p }, 1)
  local z = (p:detach() - before) / 1e-4
  opt:perturb({ p }, -1)
  check.ok((p:detach() - before):abs():max():item() < 1e-15)
  local gradient = 2 * (before - target)
  local loss = opt:step(quadratic(p))
  local slope = (gradient * z):sum():item() -- of a quadratic the two sides give it without error
  check.close(opt.slope, slope, 1e-8)
  check.close(loss, ((before - target):square():sum() + 1e-8 * z:square():sum()):item(), 1e-10)
  check.ok((p:detach() - (before - 0.05 * slope * z)):abs():max():item() < 1e-9)
  check.equal(p.grad, nil)
  check.equal(opt.steps, 1)
  local after = p:detach():clone()
  opt:perturb({ p }, 1)
  check.ok(((p:detach() - after) / 1e-4 - z):abs():max():item() > 1e-3, "the next direction is another")
end)

check.test("weight decay, schedule and the limit of slopes", function()
  local function after(options, scale)
    local p = leaf { 2, 4 }
    local opt = optim.MeZO({ p }, options)
    local loss = opt:step(function() return p:sum() * scale end)
    return p:detach():tolist(), opt, loss
  end
  local values = after({ lr = 0.1, weight_decay = 0.5 }, 0)
  check.close(values[1], 1.9, 1e-12)
  check.close(values[2], 3.8, 1e-12)
  values = after({ lr = 0.1, schedule = function() return 0 end }, 1)
  check.close(values[2], 4, 1e-12)
  local _, opt = after({ lr = 0.1, clip_value = 0.25 }, 1e3)
  check.close(math.abs(opt.slope), 0.25, 1e-15)
  _, opt = after({ lr = 0.1 }, math.huge)
  check.equal(opt.slope, 0.0)
end)

check.test("the mean of slope times direction is the gradient", function()
  local p = leaf { 0.3, 0.1, -0.7 }
  local start = p:detach():clone()
  local opt = optim.MeZO({ p }, { lr = 1, eps = 1e-3, seed = 1 })
  local sum, count = ty.zeros({ 3 }, { dtype = "f64" }), 4000
  for _ = 1, count do
    opt:step(quadratic(p))
    sum:add_(start - p:detach())
    p:detach():copy_(start)
  end
  -- The scatter of one is about |gradient| times sqrt(4): the mean of 4,000 lies within 5 of its own.
  local gradient = 2 * (start - target)
  local bound = 5 * 2 * gradient:norm():item() / math.sqrt(count)
  check.ok((sum / count - gradient):abs():max():item() < bound)
end)

check.test("directions depend on seed, step and parameter alone: not on order, nor on the pieces' bounds", function()
  ty.manual_seed(0)
  local a, b = ty.zeros(70000):requires_grad_(), ty.zeros(5, 3):requires_grad_()
  local opt = optim.MeZO({ a, b }, { eps = 1 })
  opt:perturb({ a, b }, 1)
  local first, second = a:detach():clone(), b:detach():clone()
  a:detach():zero_()
  b:detach():zero_()
  opt:perturb({ b }, 1)
  opt:perturb({ a }, 1)
  check.ok(first:equal(a:detach()) and second:equal(b:detach()))
  check.close(first:mean():item(), 0, 0.02)
  check.close(first:square():mean():item(), 1, 0.03)
  check.ok(not first:narrow(0, 0, 4464):equal(first:narrow(0, 65536, 4464)), "pieces are not alike")
end)

check.test("the generator of random numbers: the same for both passes, untouched by directions", function()
  local p = leaf { 0, 0 }
  local seen = {}
  ty.manual_seed(9)
  local opt = optim.MeZO({ p }, { lr = 0 })
  opt:step(function()
    seen[#seen + 1] = ty.rand(1):item()
    return p:sum()
  end)
  ty.manual_seed(9)
  check.equal({ seen[1], seen[2] }, { ty.rand(1):item(), seen[1] })
  opt:perturb({ p }, 1)
  local follows = ty.rand(1):item()
  ty.manual_seed(9)
  local _ = ty.rand(1)
  check.equal(ty.rand(1):item(), follows)
end)

check.test("an error leaves the parameters where they were; a state is a seed and a count", function()
  local p = leaf { 1, 2 }
  local opt = optim.MeZO({ p }, { lr = 0.01 })
  for fail = 1, 2 do
    local calls = 0
    check.fails(function()
      opt:step(function()
        calls = calls + 1
        if calls == fail then error "broken" end
        return p:sum()
      end)
    end, "broken")
    check.close(p:detach():tolist()[1], 1, 1e-12)
    check.close(p:detach():tolist()[2], 2, 1e-12)
  end
  local function run(count, saved, values)
    local q = leaf(values or { 1, 2, 3 })
    local o = optim.MeZO({ q }, { lr = 0.02, seed = 4 })
    if saved then o:load_state_dict(saved) end
    for _ = 1, count do o:step(quadratic(q)) end
    return q:detach():tolist(), o:state_dict()
  end
  local whole = run(6)
  local half, state = run(3)
  check.equal((run(3, state, half)), whole)
  check.equal(opt:state_bytes(), 0)
end)

check.test("it trains: a regression by forward passes alone", function()
  ty.manual_seed(0)
  local x = ty.randn(64, 8)
  local y = x:matmul(ty.randn(8, 1))
  local layer = nn.Linear(8, 1)
  local opt = optim.MeZO(layer, { lr = 0.02, eps = 1e-3 })
  local function loss() return nn.mse_loss(layer(x), y) end
  local before = loss():item()
  for _ = 1, 400 do opt:step(loss) end
  check.ok(loss():item() < 0.2 * before)
end)

check.test("mistakes", function()
  local p = leaf { 1 }
  check.fails(function() optim.MeZO({ p }, { eps = 0 }) end, "MeZO: eps: expected a finite number > 0, got 0")
  check.fails(function() optim.MeZO({ ty.ones(2) }) end, "expected at least one that requires gradients, got none")
  check.fails(function() optim.MeZO { p * 2 } end, "number 1 was computed")
  local opt = optim.MeZO { p }
  check.fails(function() opt:step(3) end, "MeZO:step: closure: expected a function, got 3")
  check.fails(function() opt:step(function() return 3 end) end, "MeZO:step: closure(): expected a tensor, got 3")
  check.fails(function() opt:update({ p }, { step = 1 }) end, "MeZO:update: done.slope: expected a number, got nil")
  check.fails(function() opt:load_state_dict { steps = -1 } end, "state.steps: expected an integer >= 0, got -1")
end)

check.finish()
