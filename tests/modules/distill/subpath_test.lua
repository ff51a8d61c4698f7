-- SLAM's line between two points of a path, its student, and its loss beside that of consistency distillation.
local here = (arg and arg[0]:match ".*/" or "tests/modules/distill/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, distill, models = require "tycho.diffusion", require "tycho.distill", require "tycho.models"

local F64 = { dtype = "f64" }
local flow = diffusion.Flow()

local function same(a, b) return a:eq(b):all():item() end

-- A network in which every weight does something.
local function network()
  ty.manual_seed(1)
  local model = models.TimeMLP { features = 3, width = 16, depth = 1, classes = 2, waves = 8 }
  for _, p in ipairs(model:parameters()) do p:detach():normal_(0, 0.3) end
  return model
end

local labels = ty.tensor { 0, 1, 1, 0 }

check.test("the line: its ends, a value by hand, and the noise in it", function()
  ty.manual_seed(2)
  local x0, e = ty.randn({ 5, 3 }, F64), ty.randn({ 5, 3 }, F64)
  local from = { x = 0.4 * x0 + 0.6 * e, alpha = 0.4, sigma = 0.6 }
  local to = { x = 0.8 * x0 + 0.2 * e, alpha = 0.8, sigma = 0.2 }
  local x, sigma = distill.subpath(from, to, 1)
  check.ok(same(x, from.x))
  check.close(sigma, 0.6, 1e-12)
  x, sigma = distill.subpath(from, to, 0)
  check.close(x:tolist(), (0.5 * to.x):tolist(), 1e-12)
  check.close(sigma, 0.1, 1e-12)
  -- Shared noise: what lies on the line is alpha_t x0 + sigma e, exactly.
  for _, gamma in ipairs { 0, 0.3, 0.9 } do
    x, sigma = distill.subpath(from, to, gamma, "path")
    check.close(sigma, (1 - gamma) * 0.1 + gamma * 0.6, 1e-12)
    check.close(x:tolist(), (0.4 * x0 + sigma * e):tolist(), 1e-12)
  end
  -- Noise of its own: the variance of what is there when x_t = (alpha_t / alpha_s) x_s + fresh noise.
  local n = 200000
  local clean, first, fresh = 0.7, ty.randn({ n }, F64), ty.randn({ n }, F64)
  local s = { x = 0.8 * clean + 0.2 * first, alpha = 0.8, sigma = 0.2 }
  local t = { x = 0.5 * s.x + math.sqrt(0.36 - 0.01) * fresh, alpha = 0.4, sigma = 0.6 }
  x, sigma = distill.subpath(t, s, 0.6, "variance")
  check.close(sigma, math.sqrt(0.01 + 0.36 * 0.35), 1e-12)
  check.close(x:std():item(), sigma, 0.005)
  check.close(x:mean():item(), 0.4 * 0.7, 0.005)
end)

check.test("the student: gamma says nothing at first, and never at 1; afterwards it does", function()
  local model = network()
  local x, t, condition = ty.randn(4, 3), ty.full({ 4 }, 400), { labels = labels }
  local want = model(x, t, condition)
  local student = distill.SubpathStudent(model, { width = 8 })
  local function with(gamma) return { labels = labels, gamma = ty.full({ 4 }, gamma) } end
  check.ok(same(student(x, t, condition), want) and same(student(x, t, with(0.3)), want))
  for _, p in ipairs(student.gamma:parameters()) do p:detach():normal_(0, 1) end
  check.ok(same(student(x, t, with(1)), want) and same(student(x, t, condition), want))
  check.ok((student(x, t, with(0.3)) - want):abs():max():item() > 1e-3)
  local copy = student:clone()
  check.ok(same(copy(x, t, with(0.3)), student(x, t, with(0.3))))
  check.ok(same(student:unwrap()(x, t, condition), want))
  check.fails(function() student(x, t, { labels = labels, gamma = 3 }) end, "condition.gamma: expected a tensor")
  check.fails(function() distill.SubpathStudent(ty.nn.Linear(2, 2)) end, "SubpathStudent: network: expected one with")
end)

-- Parts of a loss: a student and its average of other weights.
local function parts()
  local model = network()
  local student, average = distill.SubpathStudent(model:clone()), distill.SubpathStudent(model:clone())
  for _, p in ipairs(average:parameters()) do p:detach():mul_(0.9) end
  for _, p in ipairs(student.gamma:parameters()) do p:detach():normal_(0, 1) end
  return { student = student, average = average, teacher = distill.teacher(model) }
end

check.test("gamma = 1 is consistency distillation bit for bit, which is what it should be", function()
  local p = parts()
  ty.manual_seed(3)
  local batch = { sample = ty.randn(4, 3), noise = ty.randn(4, 3), ["condition.labels"] = labels }
  local index = ty.tensor { 1, 3, 4, 2 }
  local function value(options)
    local o = { grid = 4, guidance = 2, index = index }
    for key, v in pairs(options) do o[key] = v end
    return distill.subpath_loss(flow, o)(p, batch)
  end
  local plain = value { lines = false }
  check.ok(same(plain, value { gamma = 1 }) and same(plain, value { gamma = 1.0 }))
  check.close(value({ gamma = ty.ones(4) }):item(), plain:item(), 1e-6)
  check.ok(math.abs(value({ gamma = 0.5 }):item() - plain:item()) > 1e-4)
  check.equal(p.teacher.evaluations, 5 * 4 * 2)
  -- By hand: an Euler step of the guided velocity, and the pseudo-Huber distance.
  local t = index:to "f32":reshape(4, 1) / 4
  local x = (1 - t) * batch.sample + t * batch.noise
  local c = { labels = labels }
  local free = p.teacher(x, index * 250, { labels = ty.full({ 4 }, 2, { dtype = "i64" }) })
  local v = free + (p.teacher(x, index * 250, c) - free) * 2
  local y = x - v / 4
  local s = t - 0.25
  local target = y - s * p.average(y, (index - 1) * 250, c)
  local d = x - t * p.student(x, index * 250, c) - target
  check.close(plain:item(), ((d:square() + 1e-6):sqrt() - 1e-3):mean():item(), 1e-5)
  plain:backward()
  for _, q in ipairs(p.average:parameters()) do check.ok(q.grad == nil or q.grad:abs():max():item() == 0) end
end)

check.test("at the clean end the target is the teacher's sample itself: the boundary of consistency", function()
  local p = parts()
  local batch = { sample = ty.randn(4, 3), noise = ty.randn(4, 3), ["condition.labels"] = labels }
  local seen
  distill.subpath_loss(flow, { grid = 4, index = ty.ones({ 4 }, { dtype = "i64" }), lines = false,
    distance = function(a, b)
      seen = b
      return a:sum()
    end })(p, batch)
  local x = 0.75 * batch.sample + 0.25 * batch.noise
  local want = x - 0.25 * p.teacher(x, ty.full({ 4 }, 250), { labels = labels })
  check.close(seen:tolist(), want:tolist(), 1e-5)
end)

check.test("data of one point: no loss at any gamma, for a student that knows it", function()
  local point = ty.tensor({ { 0.3, -1, 2 } }, F64)
  -- Velocities to the point from wherever one is: of x at t, and of lines, whose noise is the path's.
  local function velocity(x, sigma, alpha) return (x - alpha * point) / sigma - point end
  local teacher = setmetatable({}, { __call = function(_, x, t)
    local s = (t / 1000):reshape(-1, 1)
    return velocity(x, s:clamp(1e-9), 1 - s)
  end })
  local grid = 5
  local student = setmetatable({}, { __call = function(_, x, t, condition)
    local s = (t / 1000):reshape(-1, 1)
    local gamma = condition.gamma and condition.gamma:reshape(-1, 1) or 1
    local before = s - 1 / grid
    local sigma = (1 - gamma) * ((1 - s) / (1 - before)) * before + gamma * s
    local size = 1 - s + sigma -- a point of the flow
    return velocity(x, (sigma / size):clamp(1e-9), (1 - s) / size)
  end })
  ty.manual_seed(4)
  local batch = { sample = point:expand(40, 3), noise = ty.randn({ 40, 3 }, F64) }
  for _, gamma in ipairs { 0.05, 0.4, 0.8, 1 } do
    local function value(noise, inner)
      return distill.subpath_loss(flow, { grid = grid, inner = inner, gamma = gamma, noise = noise,
        distance = ty.mse_loss })({ student = student, average = teacher, teacher = teacher }, batch):item()
    end
    check.ok(value("path", 1) < 1e-20, ("%g at %g"):format(value("path", 1), gamma))
    check.ok(value("path", 3) < 1e-20)
    check.ok(gamma == 1 or value("variance", 1) > 1e-6) -- told the other noise, it says another point
  end
end)

check.test("a table of betas and a network of noise; the loss falls and draws in two steps", function()
  local ddpm = diffusion.DDPM { steps = 100, drop = 0 }
  ty.manual_seed(5)
  local teacher = models.TimeMLP { features = 3, width = 8, depth = 1, waves = 8 }
  local student = distill.SubpathStudent(teacher:clone():requires_grad_(), { width = 4, waves = 4 })
  local loader = ty.data.DataLoader(ty.data.TensorDataset { sample = ty.randn(64, 3) * 0.3 + 1 }, { batch_size = 32,
    shuffle = true, seed = 0 })
  local losses, averaged, evaluations = distill.fit(student, loader, { steps = 5, teacher = teacher, average = 0.9,
    quiet = true, loss = distill.subpath_loss(ddpm, { grid = 4, inner = 2 }) })
  check.equal({ #losses, evaluations }, { 5, 5 * 32 * 2 })
  for _, loss in ipairs(losses) do check.ok(loss == loss and loss < 1e3) end
  local x = ddpm:sample(averaged, { 7, 3 }, { steps = 2, solver = diffusion.solver.lcm { scaling = false } })
  check.equal(x.shape, { 7, 3 })
end)

check.test("what is refused", function()
  local one = { x = ty.ones(1), alpha = 1, sigma = 1 }
  check.fails(function() distill.subpath_loss(3) end, "distill.subpath_loss: process: expected a process")
  check.fails(function() distill.subpath_loss(flow, { grid = 0 }) end, "grid: expected an integer >= 1, got 0")
  check.fails(function() distill.subpath_loss(flow)({}, {}) end, "batch.sample: expected a tensor, got nil")
  check.fails(function() distill.subpath_loss(flow)({}, { sample = ty.ones(2, 2) }) end, "teacher: expected the option")
  check.fails(function() distill.subpath(one, one, 1, "x") end, 'noise: expected "path" or "variance" or nil')
  check.fails(function() distill.subpath({ x = ty.ones(1) }, one, 1) end, "from.alpha: expected a number or a tensor")
  check.fails(function() distill.huber(ty.ones(1), 3) end, "distill.huber: b: expected a tensor, got 3")
end)

check.finish()
