-- Multigrid training: the schedule by hand, clips on grids, batch norms by groups, the loop.
local here = arg and arg[0]:match ".*/" or "tests/modules/vision/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local models = require "tycho.models"
local vision = require "tycho.vision"

local multigrid, sub_batch_norm, nn = vision.multigrid, vision.sub_batch_norm, ty.nn
local base = { frames = 16, size = 32, batch = 8, steps = 1000, milestones = { 500, 800 } }

local function with(options)
  local all = {}
  for _, list in ipairs { base, options or {} } do for key, value in pairs(list) do all[key] = value end end
  return all
end

check.test("multigrid: the grids of the paper's cycles", function()
  local plan, seen = multigrid.schedule(base), {}
  for i, phase in ipairs(plan.phases) do
    seen[i] = {}
    for k, g in ipairs(phase.grids) do seen[i][k] = { g.batch, g.frames, g.size } end
  end
  local cycle = {
    { { 128, 4, 16 }, { 64, 4, 23 }, { 64, 4, 23 } }, { { 64, 8, 16 }, { 32, 8, 23 }, { 32, 8, 23 } },
    { { 64, 8, 16 }, { 32, 8, 23 }, { 16, 8, 32 } }, { { 32, 16, 16 }, { 16, 16, 23 }, { 8, 16, 32 } },
  }
  check.equal(#seen, 10)
  for i = 1, 8 do check.equal(seen[i], cycle[(i - 1) % 4 + 1]) end
  check.equal({ seen[9], seen[10] }, { cycle[4], cycle[4] })
end)

check.test("multigrid: steps, clips, rates and groups by hand", function()
  local plan = multigrid.schedule(base)
  -- Mean batches are 32/3, 16/3, 14/3 and 7/3 of the whole clips', 23 in sum: 5.75 fixed steps become one.
  local tuning = 200 / 5.75
  local stretch = 1500 / (800 + tuning * 7 / 3)
  check.equal(#plan, math.floor(stretch * (4 * 800 / 23 + tuning) + 0.5))
  local per_grid = { stretch * 500 / 23, stretch * 300 / 23 }
  for i, phase in ipairs(plan.phases) do
    local want = i <= 4 and per_grid[1] or i <= 8 and per_grid[2] or stretch * tuning / 2
    check.ok(math.abs(phase.steps - want) <= 1, ("phase %d: %d steps, wanted %.2f"):format(i, phase.steps, want))
    check.close(phase.rate, ({ 8, 4, 2, 1, 0.8, 0.4, 0.2, 0.1, 0.1, 0.01 })[i], 1e-12)
    check.equal(phase.groups, ({ 8, 4, 2, 1, 8, 4, 2, 1, 1, 1 })[i])
  end
  check.ok(math.abs(plan.clips / (1.5 * 8000) - 1) < 0.02, ("%d clips"):format(plan.clips))
  check.equal(plan:at(0), { batch = 128, frames = 4, size = 16, rate = 8, groups = 8, stage = 1 })
  check.equal(plan:at(1).size, 23)
  check.equal(plan:rate()(#plan - 1), plan.phases[10].rate)
  local count = 0
  for _, shape in ipairs(plan:shapes()) do count = count + shape.steps end
  check.equal(count, #plan)
  -- Every grid has as many numbers as a fixed step, within the rounding of 1 / sqrt 2.
  for step = 0, #plan - 1 do
    local g = plan:at(step)
    check.ok(math.abs(g.batch * g.frames * g.size ^ 2 / (8 * 16 * 32 ^ 2) - 1) < 0.04, "equal work")
  end
end)

check.test("multigrid: warm-up, smaller groups, sizes in multiples, the fixed schedule", function()
  local plan = multigrid.schedule(with { warmup = 4, group = 4, multiple = 8 })
  check.equal({ plan:at(0).rate, plan:at(3).rate, plan:at(0).groups, plan:at(1).size }, { 2.0, 8, 16, 24 })
  local fixed = multigrid.fixed(with { gamma = 0.5 })
  check.equal({ #fixed, fixed.clips, #fixed:shapes() }, { 1000, 8000, 1 })
  check.equal({ fixed:at(499).rate, fixed:at(500).rate, fixed:at(800).rate }, { 1.0, 0.5, 0.25 })
  check.fails(function() multigrid.schedule(with { milestones = { 800, 500 } }) end,
    "multigrid.schedule: milestones[2]: expected more than 800 and less than the 1000 steps, got 500")
  check.fails(function() multigrid.schedule(with { group = 3 }) end,
    "multigrid.schedule: group: expected a divisor of the batch, 8, got 3")
  check.fails(function() multigrid.fixed { frames = 8, size = 8, batch = 1 } end,
    "multigrid.fixed: steps: expected an integer >= 1, got nil")
end)

check.test("multigrid: operations are the shapes' own, times their steps", function()
  local function make() return models.ResNet3d { classes = 5, channels = { 4 }, blocks = { 1 }, small = true } end
  local one = multigrid.fixed { frames = 4, size = 8, batch = 2, steps = 1 }
  local ten = multigrid.fixed { frames = 4, size = 8, batch = 2, steps = 10 }
  local each = multigrid.flops(one, make)
  check.equal(multigrid.flops(ten, make), 10 * each)
  -- Three convolutions of 27 taps on 4 frames of 4 x 4, forward; with both gradients not less than thrice, but for the
  -- first one's input.
  local least = 2 * 2 * 64 * 27 * (3 * 4 * 2 + 4 * 4 * 3 * 2)
  check.ok(each >= least and each < 3 * least, ("%g operations, at least %g"):format(each, least))
end)

check.test("multigrid: clips on grids are frames evenly apart and means of pixels", function()
  local video = ty.arange(2 * 8 * 16):reshape(2, 8, 1, 4, 4):to "f32"
  local whole = multigrid.resample(video, { frames = 8, size = 4 })
  check.equal(whole:transpose(1, 2):tolist(), video:tolist())
  local few = multigrid.resample(video, { frames = 2, size = 4 })
  check.equal(few.shape, { 2, 1, 2, 4, 4 })
  check.equal(few[0][0][0]:tolist(), video[0][1][0]:tolist()) -- frames 1 and 5: in the middle
  check.equal(few[1][0][1]:tolist(), video[1][5][0]:tolist())
  ty.manual_seed(3)
  local starts = {}
  for _ = 1, 20 do
    local drawn = multigrid.resample(video, { frames = 2, size = 4 }, { random = true })
    local first = drawn[0][0][0][0][0]:item() // 16
    starts[first] = true
    check.equal(drawn[0][0][1]:tolist(), video[0][math.tointeger(first) + 4][0]:tolist())
  end
  local count = 0
  for _ in pairs(starts) do count = count + 1 end
  check.equal(count, 4)
  local small = multigrid.resample(video, { frames = 8, size = 2 })
  check.ok(math.abs(small:mean():item() - video:mean():item()) < 1e-3, "the mean stays")
  local centred = multigrid.resample(video, { frames = 2, size = 4 }, { center = true })
  check.ok((centred - few + few:mean({ 2, 3, 4 }, { keepdim = true })):abs():max():item() < 1e-4, "less its mean")
  local bytes = ty.tensor({ 0, 255 }, { dtype = "u8" }):reshape(1, 2, 1, 1, 1)
  check.equal(multigrid.resample(bytes, { frames = 2, size = 1 }):flatten():tolist(), { -1, 1 })
  check.fails(function() multigrid.resample(video, { frames = 9, size = 4 }) end,
    "multigrid.resample: grid: expected at most 8 frames of 4 x 4, got 9 of 4 x 4")
end)

local function clips(n)
  return ty.data.TensorDataset { video = ty.arange(n):reshape(n, 1, 1, 1, 1):expand { n, 4, 3, 8, 8 }:to("u8"):clone(),
    label = ty.arange(n) % 3 }
end

check.test("multigrid: an epoch has every clip once, and a loader goes on where it was", function()
  local set = clips(40)
  local plan = multigrid.schedule { frames = 4, size = 8, batch = 2, steps = 40, milestones = { 20, 30 } }
  local loader, seen, count = multigrid.loader(set, plan, { seed = 5 }), {}, 0
  while count < 80 do
    local before, batch = count, loader:next()
    check.equal(batch.image.shape, { batch.grid.batch, 3, batch.grid.frames, batch.grid.size, batch.grid.size })
    for i, x in ipairs(((batch.image:amax { 1, 2, 3, 4 } + 1) * 127.5):round():tolist()) do
      local id = math.tointeger(x)
      check.equal(batch.label:tolist()[i], id % 3)
      local epoch = count // 40
      check.ok(count >= 80 or not seen[epoch * 40 + id], "twice in an epoch")
      seen[epoch * 40 + id], count = true, count + 1
    end
    check.equal(count - before, plan:at(loader.step - 1).batch)
  end
  local state = loader:state_dict()
  local want = loader:next()
  local other = multigrid.loader(set, plan, { seed = 1 })
  other:load_state_dict(state)
  local got = other:next()
  check.equal(got.image:tolist(), want.image:tolist())
  check.equal(got.label:tolist(), want.label:tolist())
end)

check.test("sub-batch norm is batch norm of every group by itself", function()
  ty.manual_seed(1)
  local x = ty.randn(6, 3, 2, 4, 4, { dtype = "f64" }) * 2 + 1
  local g = ty.randn(6, 3, 2, 4, 4, { dtype = "f64" })
  local model = nn.Sequential(nn.with_defaults({ dtype = "f64" }, nn.BatchNorm3d, 3)):train()
  local norm = model[1]
  norm.weight:detach():copy_(ty.tensor { 1, 2, 3 })
  norm.bias:detach():copy_(ty.tensor { 0.5, 0, -1 })
  sub_batch_norm.wrap(model)
  sub_batch_norm.groups(model, 3)
  local ours = x:clone():requires_grad_()
  local y = model(ours)
  ;(y * g):sum():backward()
  local weight = norm.weight:detach():clone():requires_grad_()
  local bias = norm.bias:detach():clone():requires_grad_()
  local theirs, means, vars = x:clone():requires_grad_(), {}, {}
  local sum
  for i = 0, 2 do -- clips i and i + 3
    local rows = ty.tensor({ i, i + 3 }, { dtype = "i64" })
    local mean, var = ty.zeros({ 3 }, { dtype = "f64" }), ty.ones({ 3 }, { dtype = "f64" })
    local part = ty.batch_norm(theirs:index_select(0, rows), mean, var, weight, bias, true, 0.1, 1e-5)
    check.ok((part - y:index_select(0, rows)):abs():max():item() < 1e-12, "group " .. i)
    means[i + 1], vars[i + 1] = mean, var
    local loss = (part * g:index_select(0, rows)):sum()
    sum = sum and sum + loss or loss
  end
  sum:backward()
  check.ok((ours.grad - theirs.grad):abs():max():item() < 1e-12, "gradient of x")
  check.ok((norm.weight.grad - weight.grad):abs():max():item() < 1e-12, "gradient of the weight")
  check.ok((norm.bias.grad - bias.grad):abs():max():item() < 1e-12, "gradient of the bias")
  local all, spread = ty.stack(means, 0), ty.stack(vars, 0)
  local mean = all:mean(0)
  check.ok((norm.running_mean - mean):abs():max():item() < 1e-12, "running mean")
  check.ok((norm.running_var - spread:mean(0) - (all - mean):square():mean(0)):abs():max():item() < 1e-12,
    "running variance")
  check.fails(function() model(x:narrow(0, 0, 4)) end, "sub_batch_norm: x: expected a batch that 3 groups share, got")
  -- In evaluation, with one group, and taken off again, it is the layer that it was.
  local plain = nn.with_defaults({ dtype = "f64" }, nn.BatchNorm3d, 3)
  plain:load_state_dict(norm:state_dict())
  model:eval()
  check.equal(model(x):tolist(), plain:eval()(x):tolist())
  model:train()
  sub_batch_norm.groups(model, 1)
  check.equal(model(x):tolist(), plain:train()(x):tolist())
  check.equal(norm.running_var:tolist(), plain.running_var:tolist())
  sub_batch_norm.unwrap(model)
  check.equal(getmetatable(norm), nn.BatchNorm3d)
  check.fails(function() sub_batch_norm.groups(model, 2) end,
    "sub_batch_norm.groups: model: expected one that sub_batch_norm.wrap has seen, got none")
  check.fails(function() sub_batch_norm.wrap(nn.Linear(1, 1)) end,
    "sub_batch_norm.wrap: model: expected one with batch norms, got none")
end)

check.test("multigrid.fit on one shape is SGD along the schedule, number by number", function()
  local set, plan = clips(12), multigrid.fixed { frames = 4, size = 8, batch = 4, steps = 6, milestones = { 4 } }
  local function make()
    ty.manual_seed(2)
    return models.ResNet3d { classes = 3, channels = { 4 }, blocks = { 1 }, small = true }
  end
  local model = make()
  local losses = multigrid.fit(model, set, plan, { lr = 0.05, quiet = true })
  local other, loader, want = make():train(), multigrid.loader(set, plan), {}
  local opt = ty.optim.SGD(other:parameters(), { lr = 0.05, momentum = 0.9, weight_decay = 1e-4, nesterov = true,
    schedule = ty.optim.step { milestones = { 4 }, gamma = 0.1 } })
  for step = 1, 6 do
    local batch = loader:next()
    local loss = other:loss(batch.image, batch.label)
    want[step] = loss:item()
    opt:step(loss)
  end
  check.equal(losses, want)
  check.equal(model.training, false)
  local many = multigrid.schedule { frames = 4, size = 8, batch = 2, steps = 12, milestones = { 6, 9 } }
  local run = multigrid.fit(make(), set, many, { lr = 0.01, quiet = true })
  check.equal(#run, #many)
  local share = multigrid.accuracy(model, set, { frames = 4, size = 8 })
  check.ok(share >= 0 and share <= 1, "a share")
end)

check.test("what is no schedule and no data set", function()
  check.fails(function() multigrid.flops("f32", function() end) end, "multigrid.flops: schedule: expected one of")
  check.fails(function() multigrid.accuracy(ty.nn.Identity(), ty.ones(2), { frames = 1, size = 1 }) end,
    "multigrid.accuracy: dataset: expected a data set of clips")
end)

check.finish()
