-- A teacher's count, material made once and read again, pairs and trajectories, the loop of distillation.
local here = (arg and arg[0]:match ".*/" or "tests/modules/distill/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local diffusion, distill = require "tycho.diffusion", require "tycho.distill"

local function network()
  ty.manual_seed(1)
  local model = diffusion.DiT { width = 16, depth = 1, heads = 2, classes = 3 }
  for _, p in ipairs(model:parameters()) do p:detach():normal_(0, 0.1) end
  return model
end

local function same(a, b) return a:eq(b):all():item() end

local labels = ty.tensor { 0, 1, 2, 1, 0 }

check.test("a teacher is frozen, counts samples, and stands in the network's place", function()
  local model = network()
  local x, t, condition = ty.randn(5, 1, 8, 8), ty.full({ 5 }, 300), { labels = labels }
  local want = model(x, t, condition)
  local teacher = distill.teacher(model)
  local got = teacher(x, t, condition)
  check.ok(same(got, want))
  check.equal({ teacher.evaluations, got.requires_grad, model:parameters()[1].requires_grad }, { 5, false, false })
  check.equal({ teacher.null_label, tostring(teacher:device()) }, { 3, tostring(model:device()) })
  check.ok(rawequal(distill.teacher(teacher), teacher))
  local flow = diffusion.Flow()
  local noise = ty.randn(5, 1, 8, 8)
  local function draw(who)
    return (flow:sample(who, { 5, 1, 8, 8 }, { condition = condition, guidance = 2, steps = 3, noise = noise }))
  end
  check.ok(same(draw(model), draw(teacher)))
  -- Heun: two calls a step but for the last one; guidance: both branches.
  check.equal(teacher.evaluations, 5 + 5 * 5 * 2)
  check.fails(function() distill.teacher(3) end, "distill.teacher: model: expected a module, got 3")
end)

check.test("pairs: the sampler's own, in any batches; the condition comes back", function()
  local teacher, flow = distill.teacher(network()), diffusion.Flow()
  local sampler = flow:sampler { guidance = 1.5, steps = 4, solver = diffusion.solver.euler() }
  local made, evaluations = distill.pairs(teacher, sampler, { 5, 1, 8, 8 }, { condition = { labels = labels },
    batch = 2 })
  check.equal(evaluations, 5 * 4 * 2)
  local want = sampler:sample(teacher, { 5, 1, 8, 8 }, { condition = { labels = labels }, noise = made.noise })
  check.close(made.sample:flatten():tolist(), want:flatten():tolist(), 1e-5)
  check.equal(distill.condition(made).labels:tolist(), labels:tolist())
  local deep = { text = { embeddings = ty.ones(2, 3, 4), pooled = ty.zeros(2, 4) }, labels = ty.tensor { 1, 2 } }
  local again = distill.condition(distill.flatten(deep))
  check.equal({ again.text.embeddings.shape, again.text.pooled.shape, again.labels:tolist() },
    { { 2, 3, 4 }, { 2, 4 }, { 1, 2 } })
  check.fails(function() distill.pairs(teacher, {}, { 5, 1, 8, 8 }) end, "distill.pairs: sampler: expected a Sampler")
  check.fails(function() distill.pairs(teacher, sampler, { 4, 1, 8, 8 }, { condition = { labels = labels } }) end,
    "condition.labels: expected [4, ...]")
end)

check.test("trajectories: targets are the guided predictions at their states, with a scale for each sample", function()
  local teacher, flow = distill.teacher(network()), diffusion.Flow()
  local sampler = flow:sampler { steps = 4, solver = diffusion.solver.euler() }
  local function targets_of(made)
    local c = distill.condition(made)
    local given = teacher(made.x, made.time, c)
    local free = teacher(made.x, made.time, { labels = ty.full_like(c.labels, teacher.null_label) })
    return free + (given - free) * made.scale:reshape(-1, 1, 1, 1)
  end
  local made, evaluations = distill.trajectories(teacher, sampler, { 5, 1, 8, 8 }, { condition = { labels = labels },
    scales = { 1, 4 }, batch = 3 })
  check.equal({ evaluations, made.x.shape, made.scale.shape }, { 5 * 4 * 2, { 20, 1, 8, 8 }, { 20 } })
  check.close(made.target:flatten():tolist(), targets_of(made):flatten():tolist(), 1e-4)
  check.ok(made.scale:min():item() >= 1 and made.scale:max():item() <= 4 and made.scale:std():item() > 0.1)
  -- The first batch's second state is an Euler step from its first along the guided prediction.
  local first, second = made.x:narrow(0, 0, 3), made.x:narrow(0, 3, 3)
  local dt = (made.time:tolist()[4] - made.time:tolist()[1]) / 1000
  check.close(second:flatten():tolist(), (first + made.target:narrow(0, 0, 3) * dt):flatten():tolist(), 1e-4)
  local clean = ty.full({ 5, 1, 8, 8 }, 7)
  local noised = distill.trajectories(teacher, sampler, { 5, 1, 8, 8 }, { condition = { labels = labels },
    noised = clean })
  check.close(noised.target:flatten():tolist(), targets_of(noised):flatten():tolist(), 1e-4)
  local t = noised.time:reshape(-1, 1, 1, 1) / 1000
  local spread = ((noised.x - (1 - t) * 7) / t):std():item()
  check.ok(math.abs(spread - 1) < 0.1, ("noise of standard deviation %g"):format(spread))
  check.fails(function() distill.trajectories(teacher, sampler, { 5, 1, 8, 8 }, { scales = { 3, 1 } }) end,
    "scales: expected the smaller one first")
  check.fails(function() distill.trajectories(teacher, sampler, { 5, 1, 8, 8 }, { noised = ty.ones(2) }) end,
    "noised: expected [5, 1, 8, 8]")
end)

check.test("material is made once, and costs the same when it is read", function()
  local calls = 0
  local function make()
    calls = calls + 1
    return { x = ty.arange(6):reshape(3, 2) * calls, y = ty.ones(3) }, 42
  end
  local folder = scratch.file "material"
  local first = distill.store(folder, { base = "a b/c", seed = 3 }, make)
  local again = distill.store(folder, { seed = 3, base = "a b/c" }, make)
  local other = distill.store(folder, { base = "a b/c", seed = 4 }, make)
  check.equal({ calls, first.made, again.made, again.evaluations, again.count, other.made }, { 2, true, false, 42, 3,
    true })
  check.equal(again.tensors.x:tolist(), first.tensors.x:tolist())
  check.close(again.seconds, first.seconds, 1e-12)
  local loader = again:loader { batch = 2, seed = 5 }
  local batch = loader:next()
  check.equal({ batch.x.shape, batch.y.shape }, { { 2, 2 }, { 2 } })
  check.equal(again:loader { batch = 9 }:next().x.shape, { 3, 2 })
  -- Another text that makes the same name of a file is noticed.
  check.fails(function() distill.store(folder, { base = "a b_c", seed = 3 }, make) end, "expected material about")
  check.fails(function() distill.store(folder, { base = {} }, make) end, "distill.store: about: expected strings")
  check.fails(function() distill.store(folder, {}, make) end, "about: expected what the material is made of")
  check.fails(function() distill.store(folder, { base = "x" }, function() return {}, 1 end) end, "at least one tensor")
  check.fails(function() distill.store(folder, { base = "x" }, function() return { x = ty.ones(2) } end) end,
    "evaluations: expected an integer >= 0, got nil")
  check.fails(function() distill.store(folder, { base = "x" }, function()
    return { x = ty.ones(2), y = ty.ones(3) }, 1
  end) end, "items")
end)

check.test("the loop: a student comes to its teacher; the average is at hand; the teacher stays", function()
  ty.manual_seed(2)
  local teacher, student = ty.nn.Linear(3, 2), ty.nn.Linear(3, 2)
  local before = teacher.weight:detach():clone()
  local loader = ty.data.DataLoader(ty.data.TensorDataset { x = ty.randn(64, 3) }, { batch_size = 16, shuffle = true,
    seed = 0 })
  local seen, moved
  local losses, averaged, evaluations = distill.fit(student, loader, { steps = 200, teacher = teacher, lr = 0.05,
    weight_decay = 0, average = 0.9, quiet = true, loss = function(parts, batch)
      seen = rawequal(parts.student, student) and parts.teacher.model == teacher
      moved = not same(parts.average.weight, student.weight)
      return ty.mse_loss(parts.student(batch.x), parts.teacher(batch.x))
    end })
  check.ok(seen and moved and same(before, teacher.weight))
  check.equal({ #losses, evaluations }, { 200, 200 * 16 })
  check.ok(losses[200] < 1e-4 * losses[1], ("%g of %g"):format(losses[200], losses[1]))
  check.close(averaged.weight:tolist(), before:tolist(), 0.02)
  check.fails(function() distill.fit(teacher, loader, { steps = 1, teacher = teacher, loss = function() end }) end,
    "another module than the student")
  check.fails(function() distill.fit(student, loader, { steps = 1 }) end, "options.loss: expected a function, got nil")
end)

scratch.clean()
check.finish()
