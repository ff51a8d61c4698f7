-- Distribution matching on normal distributions, whose scores and divergences have closed forms.
local here = (arg and arg[0]:match ".*/" or "tests/modules/distill/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, distill, models = require "tycho.diffusion", require "tycho.distill", require "tycho.models"

local F64 = { dtype = "f64" }
local flow = diffusion.Flow { drop = 0 }

-- The exact velocity of normal data: a mean for each label, the last of them that of no label, one standard deviation.
local Normal = ty.nn.module "Normal"

function Normal:init(means, deviation)
  self:parameter("means", ty.tensor(means, F64):requires_grad_())
  self:parameter("deviation", ty.tensor({ deviation }, F64):requires_grad_())
  self.null_label = #means - 1
end

function Normal:forward(x, t, condition)
  local s = (t / 1000):reshape(-1, 1)
  local alpha, power = 1 - s, self.deviation:square()
  local mean = self.means:index_select(0, condition.labels):unsqueeze(1)
  local x0 = mean + alpha * power / (alpha * alpha * power + s * s) * (x - alpha * mean)
  return (x - x0) / s
end

-- z and n of a normal distribution each, evenly in both: integrals over them are means.
local side = 160
local quantiles = ty.erfinv((ty.arange(side):to "f64" + 0.5) / side * 2 - 1) * math.sqrt(2)
local z = quantiles:unsqueeze(1):expand(side, side):reshape(-1, 1)
local noise = quantiles:unsqueeze(0):expand(side, side):reshape(-1, 1)
local count = side * side
local labels = ty.zeros({ count }, { dtype = "i64" })

-- The generator mean + deviation z, its fake network exact, the teacher with other numbers; and the gradient of the
-- loss by both.
local function gradient(options, mean, deviation, teacher, u)
  local theta = ty.tensor({ mean, deviation }, F64):requires_grad_()
  local x0 = theta:select(0, 0) + theta:select(0, 1) * z
  options.fake, options.updates = Normal({ mean, 0 }, deviation), 0
  local matching = distill.DistributionMatching(flow, Normal(teacher[1], teacher[2]), options)
  matching:loss(x0, { labels = labels }, { u = ty.full({ count }, u, F64), noise = noise }):backward()
  for _, p in ipairs(matching.fake:parameters()) do check.ok(p.grad == nil) end
  return theta.grad:tolist(), matching
end

-- The divergence itself: the mean of d over noised samples, which are drawn where the generator is now and stay there,
-- with the exact network of the moved generator (Luo et al. 2024, "Score Implicit Matching", theorem 3.1).
local function divergence(kind, a, mean, deviation, teacher, u, drawn)
  local alpha = 1 - u
  local function seen(x, m, s)
    return m + alpha * s * s / (alpha * alpha * s * s + u * u) * (x - alpha * m)
  end
  local x = alpha * (drawn[1] + drawn[2] * z) + u * noise
  local y = seen(x, mean, deviation) - seen(x, teacher[1][1], teacher[2])
  if kind == "squares" then return y:square():mean():item() end
  return ((y:square() + a * a):sqrt() - a):mean():item()
end

check.test("squares and huber: the loss has the gradient of the divergence, by mean and by deviation", function()
  local teacher = { { -0.4, 0 }, 0.8 }
  for _, kind in ipairs { "squares", "huber" } do
    for _, u in ipairs { 0.3, 0.7 } do
      local mean, deviation, h = 0.5, 0.5, 1e-4
      local got = gradient({ divergence = kind, a = 0.2 }, mean, deviation, teacher, u)
      local function by(dm, ds)
        local drawn = { mean, deviation }
        return (divergence(kind, 0.2, mean + dm, deviation + ds, teacher, u, drawn) -
          divergence(kind, 0.2, mean - dm, deviation - ds, teacher, u, drawn)) / (2 * h)
      end
      local want = { by(h, 0), by(0, h) }
      check.ok(math.abs(want[1]) > 0.02)
      check.close(got[1], want[1], 0.02 * math.abs(want[1]) + 1e-4, kind)
      check.close(got[2], want[2], 0.05 * math.abs(want[2]) + 1e-3, kind)
    end
  end
  -- A shifted mean by hand: y is the same everywhere, and towards the teacher's is down.
  local got = gradient({ divergence = "huber", a = 0.1 }, 1, 0.5, { { 0.2, 0 }, 0.5 }, 0.5)
  local y = 0.8 * (1 - 0.5 * 0.5 * 0.25 / (0.25 * 0.25 + 0.25))
  check.close(got[1], y / math.sqrt(y * y + 0.01) * y / 0.8, 1e-6)
end)

check.test("kl: the difference of what both see, weighed by the size of the teacher's change", function()
  local mean, u = 1, 0.5
  local theta = ty.tensor({ mean }, F64):requires_grad_()
  local matching = distill.DistributionMatching(flow, Normal({ 0.2, 0 }, 0.5), { fake = Normal({ mean, 0 }, 0.5),
    updates = 0 })
  local point = ty.zeros({ 1, 1 }, F64)
  matching:loss(theta:reshape(1, 1), { labels = labels:narrow(0, 0, 1) }, { u = ty.full({ 1 }, u, F64),
    noise = point }):backward()
  local k = 0.5 * 0.25 / (0.25 * 0.25 + 0.25)
  local ref = 0.2 + k * (0.5 - 0.5 * 0.2)
  check.close(theta.grad:item(), (mean + k * 0 - ref) / math.abs(mean - ref), 1e-5)
end)

check.test("equal scores: no gradient, for all divergences; guidance is a gradient of its own", function()
  for _, kind in ipairs { "kl", "squares", "huber" } do
    local got = gradient({ divergence = kind }, 0.3, 0.7, { { 0.3, 0 }, 0.7 }, 0.4)
    check.close(got, { 0, 0 }, 1e-9)
    -- Away from the mean of no label, which is 0 here.
    got = gradient({ divergence = kind, guidance = 2 }, 0.3, 0.7, { { 0.3, 0 }, 0.7 }, 0.4)
    check.ok(got[1] < -1e-3, kind)
  end
end)

check.test("split: at the same noise the parts sum to the joined one, and each is what it says", function()
  local n = 6
  ty.manual_seed(1)
  local x0, at = ty.randn({ n, 1 }, F64), ty.full({ n }, 0.6, F64)
  local other = ty.randn({ n, 1 }, F64)
  local c = { labels = labels:narrow(0, 0, n) }
  local given = { u = at, noise = other, u_augmentation = at, noise_augmentation = other }
  local function value(options, how)
    options.fake, options.updates = Normal({ 0.7, 0 }, 0.6), 0
    local matching = distill.DistributionMatching(flow, Normal({ 0.1, -0.5 }, 0.8), options)
    return matching:loss(x0, c, how or given)
  end
  local loss, parts = value { guidance = 3, split = true }
  check.close(loss:item(), value({ guidance = 3 }):item(), 1e-10)
  check.close((parts.matching + parts.augmentation):item(), loss:item(), 1e-12)
  check.close(parts.matching:item(), value({ guidance = 1 }):item(), 1e-10)
  check.close(select(2, value { guidance = 1, split = true }).augmentation:item(), 0, 1e-12)
  -- Noise of the part of guidance is never above what the generator began from: of the three batches that networks
  -- see, the teacher's two and the fake's, the second of the teacher has it, with and without the condition.
  local seen, teacher = {}, Normal({ 0.1, -0.5 }, 0.8)
  local forward = teacher.forward
  function teacher:forward(x, t, condition)
    seen[#seen + 1] = t:tolist()
    return forward(self, x, t, condition)
  end
  local matching = distill.DistributionMatching(flow, teacher, { guidance = 3, split = true, updates = 0,
    fake = Normal({ 0.7, 0 }, 0.6), augmentation = function(time) return time * 0.5 end })
  matching:loss(x0, c, { u = at, time = ty.full({ n }, 0.4, F64) })
  check.equal({ #seen, #seen[1], #seen[2] }, { 2, n, 2 * n })
  for _, t in ipairs(seen[2]) do check.ok(t >= 20 and t <= 200, tostring(t)) end
end)

check.test("generators: one step is distill.one_step; of several the last has gradients", function()
  ty.manual_seed(2)
  local model = models.TimeMLP { features = 2, width = 8, depth = 1, classes = 2, waves = 8 }
  for _, p in ipairs(model:parameters()) do p:detach():normal_(0, 0.3) end
  local x, c = ty.randn(5, 2), { labels = ty.tensor { 0, 1, 2, 1, 0 } }
  local made, u = distill.generator(flow)(model, x, c)
  check.close(made:flatten():tolist(), distill.one_step(model, flow, x, c):flatten():tolist(), 1e-5)
  check.equal(u:tolist(), { 1, 1, 1, 1, 1 })
  local several, seen = distill.generator(flow, { steps = 4 }), {}
  local calls = 0
  local spy = setmetatable({}, { __call = function(_, ...)
    calls = calls + 1
    return model(...)
  end })
  for _ = 1, 40 do
    calls = 0
    local y, at = several(spy, x, c)
    seen[at:tolist()[1]] = true
    check.close(calls, 5 - 4 * at:tolist()[1], 1e-6)
    check.ok(y.requires_grad)
  end
  check.ok(seen[1] and seen[0.75] and seen[0.5] and seen[0.25])
end)

check.test("training: a generator comes to the teacher's distribution; a reward pulls, alone without end", function()
  local function trained(options, how, steps)
    ty.manual_seed(3)
    local teacher = Normal({ 1.5, 0 }, 0.5)
    local generator = ty.nn.module "Shift"
    function generator:init()
      self:parameter("mean", ty.zeros({ 1 }, F64):requires_grad_())
      self:parameter("deviation", ty.tensor({ 0.2 }, F64):requires_grad_())
    end
    function generator:forward(x) return x end
    local student = generator()
    options.fake, options.updates, options.lr = Normal({ 0, 0 }, 0.2), 2, 0.03
    local matching = distill.DistributionMatching(flow, teacher, options)
    how.generate = function(model, e) return model.mean + model.deviation * e end
    local losses = distill.fit(student, ty.data.DataLoader(ty.data.TensorDataset { noise = ty.randn({ 4096, 1 }, F64),
      ["condition.labels"] = ty.zeros({ 4096 }, { dtype = "i64" }) }, { batch_size = 256, shuffle = true, seed = 0 }),
      { steps = steps, lr = 0.03, final = 0.02, warmup = 0, weight_decay = 0, quiet = true,
        loss = distill.matching_loss(matching, how) })
    check.equal(#losses, steps)
    return student.mean:item(), math.abs(student.deviation:item()), matching
  end
  for _, kind in ipairs { "kl", "huber" } do
    local mean, deviation, matching = trained({ divergence = kind, a = 0.1 }, {}, 300)
    check.close(mean, 1.5, 0.15, kind)
    check.ok(deviation > 0.3 and deviation < 0.7, ("%s: %g"):format(kind, deviation))
    check.equal({ matching.fake_samples, matching.real.evaluations }, { 300 * 2 * 256, 300 * 256 })
  end
  local function reward(x) return x:flatten() end -- a number for each
  local pulled = trained({ divergence = "huber", a = 0.5 }, { reward = reward, reward_scale = 0.1 }, 300)
  local alone = trained({ divergence = "huber" }, { reward = reward, divergence = false }, 300)
  check.ok(pulled > 1.55 and pulled < alone - 1, ("%g, %g"):format(pulled, alone))
end)

check.test("what is refused", function()
  local model = Normal({ 0, 0 }, 1)
  check.fails(function() distill.DistributionMatching(3, model) end, "DistributionMatching: process: expected a")
  check.fails(function() distill.DistributionMatching(flow, 3) end, "model: expected a module, got 3")
  check.fails(function() distill.DistributionMatching(flow, model, { divergence = "js" }) end, "divergence: expected")
  check.fails(function() distill.DistributionMatching(flow, model, { divergence = "huber", split = true }) end,
    'split: expected the divergence "kl"')
  check.fails(function() distill.DistributionMatching(flow, model, { times = { 0.9, 0.1 } }) end, "the smaller one")
  check.fails(function() distill.matching_loss(3) end, "distill.matching_loss: matching: expected a Distribution")
  local matching = distill.DistributionMatching(flow, model)
  check.fails(function() distill.matching_loss(matching, { divergence = false }) end, "reward: expected a function")
  check.fails(function() distill.matching_loss(matching)({}, { ["condition.labels"] = labels }) end, "shape: expected")
  check.fails(function() distill.matching_loss(matching, { shape = { 1 } })({}, {}) end, "expected noise or a")
  check.fails(function() distill.generator(flow, { steps = 0 }) end, "steps: expected an integer >= 1, got 0")
  check.fails(function() matching:loss(3) end, "DistributionMatching:loss: x0: expected a tensor, got 3")
end)

check.finish()
