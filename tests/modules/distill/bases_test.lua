-- What recipes of distillation begin with and measure by: points of a board, the digits' model and judge.
local here = (arg and arg[0]:match ".*/" or "tests/modules/distill/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local diffusion, distill = require "tycho.diffusion", require "tycho.distill"
local models, zoo = require "tycho.models", require "tycho.zoo"

local points, digits = distill.points, distill.digits

check.test("points of the board lie on dark cells, evenly", function()
  ty.manual_seed(1)
  local x = points.checkerboard(20000)
  local dark = 0
  for _, p in ipairs(x:narrow(0, 0, 2000):tolist()) do
    local column, row = math.floor(p[1]), math.floor(p[2])
    if column >= -2 and column < 2 and row >= -2 and row < 2 and (column + row) % 2 == 0 then dark = dark + 1 end
  end
  check.equal(dark, 2000)
  local shares = points.histogram(x)
  check.close(shares:sum():item(), 1, 1e-12)
  check.equal(shares:gt(0):sum():item(), 128)
  -- The expected sum of |deviations| of 128 shares of 20000 points: sqrt(2 / pi) sqrt(128 / 20000) / 2.
  check.close(points.off_board(x), math.sqrt(2 / math.pi * 128 / 20000) / 2, 0.004)
  check.close(points.off_board(x + ty.tensor { 1, 0 }), 1, 1e-12, "on light cells")
  check.close(points.off_board(ty.where(x:select(1, 0):lt(0):unsqueeze(1), x, x + 100)), 0.5, 0.03)
  check.equal(points.off_board(ty.full({ 10, 2 }, 0 / 0)), 1.0)
  -- Rows from above: the corner at the top right is light, that at the bottom right is dark... of 20 x 20 with borders.
  local corner = points.histogram(ty.tensor { { 1.9, -1.9 } })
  check.equal(corner:select(0, 17):select(0, 17):item(), 1.0)
  check.fails(function() points.histogram(ty.ones(3)) end, "points: expected [n, 2] with n > 0, got a tensor [3]")
  check.fails(function() points.checkerboard(0) end, "n: expected an integer >= 1, got 0")
end)

check.test("a flow of the board is trained once; paths of points side by side", function()
  local folder = scratch.file "board"
  local options = { steps = 3, width = 16, seed = 4 }
  local one, again = distill.base("checkerboard", folder, options), distill.base("checkerboard", folder, options)
  local prompts = one.prompts("validation", 0, 5, 7)
  check.equal({ prompts.noise.shape, prompts.condition, one.shape, one.guidance }, { { 5, 2 }, {}, { 2 }, 1 })
  check.equal(again.model(prompts.noise, ty.full({ 5 }, 500), {}):tolist(),
    one.model(prompts.noise, ty.full({ 5 }, 500), {}):tolist())
  check.equal({ #ty.io.listdir(folder), one.model.training, one.flow.objective.drop }, { 1, false, 0 })
  check.close(one.distance(points.checkerboard(1000)), 0.14, 0.05)
  check.ok(rawequal(distill.guided(one), one.model), "no guidance")
  local _, _, states = distill.straightness(one.model, one.flow, prompts.noise, { steps = 2, states = true })
  local figure = points.paths({ { states = states, label = "a" }, { states = states } }, { most = 4, apart = 10 })
  local x = figure.series[2].x
  check.equal({ #figure.series[1].x, #x, figure.series[1].label, x[4] ~= x[4] }, { 16, 16, "a", true })
  check.close(x[1] - figure.series[1].x[1], 10, 1e-9)
  check.fails(function() points.paths { { states = 3 } } end, "points.paths: states of set 1: expected a list")
end)

check.test("tasks for maps: the same noise every time, an infinite distance where a number is", function()
  local board = distill.tasks.checkerboard { count = 500, points = 50, width = 16 }
  check.equal({ board.data():batch({ 0, 49 }).x.shape, board.network()(ty.ones(3, 2), ty.ones(3), {}).shape },
    { { 2, 2 }, { 3, 2 } })
  local map = { sample = function(_, shape, how) return ty.randn(shape) * how.scale end }
  ty.manual_seed(1)
  local d, x = board.measure(map, { scale = 1 })
  local again, y = board.measure(map, { scale = 1 })
  check.equal({ again, y:tolist() }, { d, x:tolist() })
  check.close(d, points.off_board(x), 1e-12)
  check.equal((board.measure(map, { scale = 1 / 0 })), math.huge)
  local digits_task = distill.tasks.digits(scratch.file "tasks", { count = 12, width = 16, judge_steps = 2 })
  local says = { sample = function(_, shape, how) return { shape, how.condition.labels, how.steps } end }
  local asked = digits_task.sample(says, { steps = 3 })
  check.equal({ asked[1], asked[2]:tolist()[12], asked[3] }, { { 12, 1, 8, 8 }, 1, 3 })
  check.equal(points.densities({ points.checkerboard(100), x }).shape, { 2, 1, 20, 20 })
  check.fails(function() points.densities {} end, "distill.points.densities: sets: expected at least one, got none")
  check.fails(function() board.measure(map) end, "DistillTask.measure: options: expected a table, got nil")
end)

check.test("the digits' model and judge are trained once", function()
  local folder = scratch.file "digits"
  local options = { steps = 2, width = 16, depth = 1, batch = 8, seed = 3 }
  local model, flow = digits.base(folder, options)
  local again = digits.base(folder, options)
  local x, t, c = ty.randn(2, 1, 8, 8), ty.full({ 2 }, 500), { labels = ty.tensor { 1, 10 } }
  check.equal(again(x, t, c):tolist(), model(x, t, c):tolist())
  check.equal({ flow.objective.drop, model.training }, { 0.1, false })
  options.network = "mlp"
  local small = digits.base(folder, options)
  check.equal(small(x, t, c):tolist(), digits.base(folder, options)(x, t, c):tolist())
  check.equal({ getmetatable(small).__name, getmetatable(model).__name }, { "TimeMLP", "DiT" })
  options.network = "x"
  check.fails(function() digits.base(folder, options) end, 'network: expected "dit" or "mlp", got')
  local judge = digits.judge(folder, { steps = 30 })
  local same = digits.judge(folder, { steps = 30 })
  local _, held_out = digits.data()
  local real = held_out:batch(ty.arange(#held_out))
  check.ok(judge.accuracy > 0.3 and judge.accuracy == same.accuracy, ("reads %g"):format(judge.accuracy))
  check.close(judge:recognised(real.image, real.label), judge.accuracy, 1e-9)
  check.close(judge:frechet(real.image), 0, 1e-6)
  check.ok(judge:frechet(ty.randn(200, 1, 8, 8)) > judge:frechet(digits.data():batch(ty.arange(200)).image))
  check.fails(function() digits.base(3) end, "distill.digits.base: folder: expected a string, got 3")
  check.fails(function() judge:recognised(real.image) end, "labels: expected a tensor, got nil")
end)

check.test("samples of the digits' base are training digits by chance, with their labels", function()
  local base = distill.base("digits", scratch.file "digits", { steps = 2, judge_steps = 30 })
  local training = digits.data()
  local all = training:batch(ty.arange(#training))
  ty.manual_seed(5)
  local x, condition = base.samples(9)
  check.equal({ x.shape, condition.labels.shape }, { { 9, 1, 8, 8 }, { 9 } })
  local seen = {}
  for k = 0, 8 do
    local found = all.image:eq(x:narrow(0, k, 1)):flatten(1):all(1):nonzero():flatten():tolist()
    check.equal(all.label[found[1]]:item(), condition.labels[k]:item())
    check.ok(not seen[found[1]], "none twice")
    seen[found[1]] = true
  end
  ty.manual_seed(5)
  check.equal((base.samples(9)):tolist(), x:tolist())
  check.ok(not (base.samples(9)):eq(x):all():item(), "others next")
  check.fails(function() base.samples(0) end, "DistillBase.samples: count: expected an integer in [1, ")
end)

check.test("a painter as a base: conditions, samples, judges", function()
  ty.manual_seed(4)
  local network = models.SD3Transformer2DModel { sample_size = 16, patch_size = 2, in_channels = 4, out_channels = 4,
    num_layers = 1, attention_head_dim = 8, num_attention_heads = 2, caption_projection_dim = 16,
    joint_attention_dim = zoo.load("scene-clip").config.text_config.hidden_size,
    pooled_projection_dim = zoo.load("scene-clip").config.projection_dim, pos_embed_max_size = 8 }
  local function painter(scheduler)
    return diffusion.TextToImage(zoo.painter.pipeline({ args = { length = 32 }, device = "cpu" }, "transformer",
      network, scheduler))
  end
  local base = distill.base(painter { _class_name = "FlowMatchEulerDiscreteScheduler", num_train_timesteps = 1000,
    shift = 1.0 }, scratch.file "none")
  check.equal({ base.shape, base.guidance, base.name }, { { 4, 16, 16 }, 4, "painter" })
  local prompts = base.prompts("validation", 3, 2, 1)
  check.equal({ prompts.noise.shape, prompts.condition.text.embeddings.shape[1] }, { { 2, 4, 16, 16 }, 2 })
  local made, evaluations = distill.pairs(base.model, distill.sampler(base, 1, 2), { 2, 4, 16, 16 },
    { condition = prompts.condition, null = base.null })
  check.equal({ evaluations, base.decode(made.sample).shape }, { 4, { 2, 3, 64, 64 } })
  local t, c = ty.full({ 2 }, 300), prompts.condition
  local free = base.model(prompts.noise, t, diffusion.condition.null(base.model, c, base.null))
  check.close(distill.guided(base)(prompts.noise, t, c):flatten():tolist(),
    (free + (base.model(prompts.noise, t, c) - free) * 4):flatten():tolist(), 1e-6)
  check.fails(function() distill.guided(base, "x") end, "distill.guided: scale: expected a finite number or nil")
  local student = distill.GuidanceAdapters(base.model, { kind = "attention", hidden = 4 })
  local states = distill.trajectories(student:off(), distill.sampler(base, 1, 1), { 2, 4, 16, 16 },
    { condition = prompts.condition, null = base.null })
  check.ok(distill.guidance_loss({ student = student:off(false) }, states):item() >= 0)
  check.fails(function() distill.base(painter { _class_name = "DDIMScheduler" }, scratch.file "none") end,
    "expected a painter that predicts velocities, got one that predicts epsilon")
  check.fails(function() distill.base(3, "folder") end, "distill.base: name: expected a string or a table, got 3")
end)

scratch.clean()
check.finish()
