-- Rectified flow: straight couplings have no bend and need one step; reflow keeps the marginals of a Gaussian; a
-- monotone coupling on the line is a fixed point.
local here = (arg and arg[0]:match ".*/" or "tests/modules/distill/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, distill, models = require "tycho.diffusion", require "tycho.distill", require "tycho.models"

local F64 = { dtype = "f64" }
local flow = diffusion.Flow()
local euler = diffusion.solver.euler()

local function time_of(t, x) return (t / 1000):reshape(x.shape[1], 1):to(x.dtype) end

check.test("a straight coupling: no bend, and one step is the sample", function()
  ty.manual_seed(1)
  -- Every sample is its noise moved by the same vector: the velocity is that vector everywhere.
  local move = ty.tensor({ 0.5, -2 }, F64)
  local function straight(x) return move:expand(x.shape) end
  local noise = ty.randn({ 30, 2 }, F64)
  local S, x, states = distill.straightness(straight, flow, noise, { steps = 7, states = true })
  check.ok(S < 1e-28, ("%g"):format(S))
  check.close(x:tolist(), (noise - move):tolist(), 1e-12)
  check.equal(#states, 8)
  check.close(states[8]:tolist(), x:tolist(), 0)
  check.close(distill.one_step(straight, flow, noise):tolist(), x:tolist(), 1e-12)
  -- Scaling towards a point: straight lines as well, whose velocity depends on the place.
  local function shrink(y, t)
    local s = time_of(t, y)
    return (y - (1 - s) * 3) / (0.25 + 0.75 * s) * 0.75 - 3
  end
  local S2, x2 = distill.straightness(shrink, flow, noise, { steps = 5 })
  check.ok(S2 < 1e-25, ("%g"):format(S2))
  check.close(x2:tolist(), (noise * 0.25 + 3):tolist(), 1e-12)
end)

check.test("straightness of a bent flow is the integral", function()
  -- v = 2 t: x0 = e - 1, and the mean of (1 - 2 t)^2 over t is 1 / 3; by Euler's steps of 1 / n at t = i / n, exactly
  -- known: the sums below.
  local function bent(x, t) return (time_of(t, x) * 2):expand(x.shape) end
  local n, gone, want = 50, 0.0, 0.0
  for i = 1, n do gone = gone + 2 * i / n / n end
  for i = 1, n do want = want + (gone - 2 * i / n) ^ 2 / n end
  local S = distill.straightness(bent, flow, ty.randn({ 3, 4 }, F64), { steps = n })
  check.close(S, want, 1e-10)
  check.ok(math.abs(S - 1 / 3) < 1e-3)
end)

-- The velocity of the flow between noise N(0, 1) and data N(mean, C), each coordinate of its own variance: E[e - x0 |
-- x].
local function gaussian(mean, c)
  return function(x, t)
    local s = time_of(t, x)
    local slope = (s - (1 - s) * c) / ((1 - s):square() * c + s:square())
    return slope * (x - (1 - s) * mean) - mean
  end
end

check.test("Gaussian to Gaussian: what reflow learns keeps mean and covariance, and is straight", function()
  ty.manual_seed(2)
  local mean, c = ty.tensor({ 1, -0.5 }, F64), ty.tensor({ 0.09, 4 }, F64)
  local first = gaussian(mean, c)
  local noise = ty.randn({ 4000, 2 }, F64)
  local S1, x = distill.straightness(first, flow, noise, { steps = 400 })
  check.ok(S1 > 0.05, ("%g"):format(S1))
  -- The minimiser of reflow's loss on these pairs: e - x0 is an affine function of x at each time, by least squares.
  local function second(y, t)
    local s = t:tolist()[1] / 1000
    local at = (1 - s) * x + s * noise
    local columns = {}
    for i = 0, 1 do
      local a, v = at:narrow(1, i, 1), (noise - x):narrow(1, i, 1)
      local design = ty.concat({ a, ty.ones_like(a) }, 1)
      local w = ty.solve(design:transpose(0, 1):matmul(design), design:transpose(0, 1):matmul(v))
      columns[i + 1] = ty.concat({ y:narrow(1, i, 1), ty.ones_like(y:narrow(1, i, 1)) }, 1):matmul(w)
    end
    return ty.concat(columns, 1)
  end
  local S2, x2 = distill.straightness(second, flow, noise, { steps = 20 })
  check.ok(S2 < 1e-3 * S1, ("straightness %g of %g"):format(S2, S1))
  local d, d2 = x - x:mean { 0 }, x2 - x2:mean { 0 }
  check.close(x2:mean({ 0 }):tolist(), x:mean({ 0 }):tolist(), 0.01)
  check.close((d2:transpose(0, 1):matmul(d2) / 4000):tolist(), (d:transpose(0, 1):matmul(d) / 4000):tolist(), 0.03)
  check.close(x:mean({ 0 }):tolist(), mean:tolist(), 0.15)
end)

check.test("on the line the coupling of a flow is monotone and reflow leaves it", function()
  ty.manual_seed(3)
  local function two(x, t) -- data at -1 and 1, by half: E[e - x0 | x]
    local s = time_of(t, x):clamp(1e-3)
    local x0 = (x * (1 - s) / s:square()):tanh()
    return (x - x0) / s
  end
  local noise = (ty.randn({ 400, 1 }, F64) * 1.0):sort(0)
  local _, x = distill.straightness(two, flow, noise, { steps = 400 })
  local order = x:select(1, 0):tolist()
  for i = 2, #order do check.ok(order[i] >= order[i - 1] - 1e-9) end
  -- Reflow's velocity by pairs: the paths of a monotone coupling do not cross, so each has its own velocity, and one
  -- step of it leads to the same sample.
  local loss = distill.reflow_loss(flow)
  local exact = function(y, t)
    local s = time_of(t, y)
    local at = (1 - s):narrow(0, 0, 1) * x + s:narrow(0, 0, 1) * noise
    local nearest = (y - at:transpose(0, 1)):abs():argmin(1)
    return (noise - x):index_select(0, nearest)
  end
  local batch = { noise = noise, sample = x }
  local error_of = setmetatable({}, { __call = function(_, y, t)
    local rows = {}
    for i, value in ipairs(t:tolist()) do
      rows[i] = exact(y:narrow(0, i - 1, 1), ty.full({ 1 }, value, F64))
    end
    return ty.concat(rows, 0)
  end })
  check.ok(loss({ student = error_of }, batch):item() < 1e-12)
  check.close(distill.one_step(exact, flow, noise):tolist(), x:tolist(), 1e-12)
end)

check.test("training: on the pairs the loss falls below flow matching's; fresh noise would not", function()
  ty.manual_seed(4)
  local noise = ty.randn(512, 2)
  local pairs_of = { noise = noise, sample = noise * 0.3 + 1 }
  local function learn(fields, loss)
    ty.manual_seed(5)
    local student = models.TimeMLP { width = 32, depth = 1 }
    local loader = ty.data.DataLoader(ty.data.TensorDataset(fields), { batch_size = 128, shuffle = true, seed = 0 })
    local losses = distill.fit(student, loader, { steps = 120, lr = 0.01, weight_decay = 0, loss = loss, quiet = true })
    return student, losses[120]
  end
  local student, coupled = learn(pairs_of, distill.reflow_loss(flow))
  local _, fresh = learn({ noise = ty.randn(512, 2), sample = pairs_of.sample }, distill.reflow_loss(flow))
  check.ok(coupled < 0.1 * fresh, ("%g of %g"):format(coupled, fresh))
  check.ok(distill.straightness(student, flow, noise) < 0.1)
  local one, left = learn(pairs_of, distill.one_step_loss(flow))
  check.ok(left < 0.01, ("%g"):format(left))
  check.ok((distill.one_step(one, flow, noise) - pairs_of.sample):abs():mean():item() < 0.1)
  local seen
  distill.one_step_loss(flow, function(a, b)
    seen = b
    return a:sum() * 0
  end)({ student = one }, pairs_of)
  check.ok(rawequal(seen, pairs_of.sample))
end)

check.test("the pairs' conditions reach the student; nothing is dropped", function()
  local labels, told = ty.tensor { 1, 2, 0 }, nil
  local student = setmetatable({ null_label = 9 }, { __call = function(_, x, _, condition)
    told = condition
    return x * 0
  end })
  local batch = { noise = ty.ones(3, 2), sample = ty.zeros(3, 2), ["condition.labels"] = labels }
  for _ = 1, 20 do
    check.close(distill.reflow_loss(flow)({ student = student }, batch):item(), 1, 1e-6)
    check.equal(told.labels:tolist(), { 1, 2, 0 })
  end
  check.close(distill.one_step_loss(flow)({ student = student }, batch):item(), 1, 1e-6)
end)

check.test("what is refused", function()
  local ddpm = diffusion.DDPM()
  check.fails(function() distill.reflow_loss(ddpm) end, "distill.reflow_loss: flow: expected a process that predicts")
  check.fails(function() distill.one_step_loss(flow, 3) end, "distance: expected a function or nil, got 3")
  check.fails(function() distill.straightness(3, flow, ty.ones(2, 2)) end, "model: expected a function, got 3")
  check.fails(function() distill.reflow_loss(flow)({}, { noise = ty.ones(1) }) end, "batch.sample: expected a tensor")
  check.fails(function() distill.straightness(euler, flow, ty.ones(2), { steps = 0 }) end, "expected")
end)

check.finish()
