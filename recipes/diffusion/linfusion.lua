-- Attention that is linear in the pixels, learnt from a teacher's
-- claim: the student's predictions stay near its teacher's, also at sizes that it was not trained at, and the time of
--   its attention grows with the pixels and not with their square
-- system: LinFusion, normalised linear attention distilled from softmax attention
-- paper: Liu et al. 2024, "LinFusion: 1 GPU, 1 Minute, 16K Image"
-- time: 11 minutes on one CPU core
--
-- The teacher is a transformer of single pixels, trained here on small scenes: all that a pixel knows of others comes
-- by attention. (In a U-Net of this size convolutions carry the pictures: exchanging its attention changed them by a
-- ten-thousandth of their variance, before training.) Its places span any grid, so that it draws at any size.
-- Students learn at the teacher's size, in the same steps: the method, one without normalisation, one without the loss
-- of features, one that learns from pictures alone. Distances are of predictions of held-out pictures with fixed noise,
-- as shares of the teacher's variance, at larger sides as well, where no network was trained; that of a student before
-- training stands beside. 100 steps left twice as much. The slope is 1.07 to 1.09 on a core by itself.
local ty = require "tycho"
local datasets, diffusion = require "tycho.datasets", require "tycho.diffusion"
local distill, models = require "tycho.distill", require "tycho.models"

local r = ty.recipe.declare { seeds = 3,
  args = {
    { "teacher_steps", 300, "training steps of the teacher", quick = 2 },
    { "steps", 400, "training steps of each student", quick = 2 },
    { "batch", 16, "pictures of a step", quick = 2 },
    { "width", 24, "of each of two heads", quick = 8 },
    { "count", 8, "held-out pictures", quick = 2 },
    { "longest", 65536, "tokens that attention is timed at", quick = 2048 },
  } }
local args, flow = r.args, diffusion.Flow()
local SIDE = r.quick and 8 or 16

-- ---- pictures, teacher, students ----

local function pictures(split, count, side)
  local set = datasets.load("scenes", { split = split, size = 64, fields = { "image" }, objects = { 1, 2 },
    rotation = 0, backgrounds = { "plain", "gradient" } })
  local x = set:batch(ty.arange(count)).image:to "f32" / 127.5 - 1
  return (side < 64 and x:avg_pool2d(64 // side) or x):to(r.device)
end
local training = ty.data.TensorDataset { image = pictures("training", r.quick and 8 or 1500, SIDE) }
local function loader(seed)
  return ty.data.DataLoader(training, { batch_size = args.batch, shuffle = true, seed = seed, drop_last = true })
end

ty.manual_seed(r.seeds[1])
local model = models.DiTTransformer2DModel { sample_size = SIDE, patch_size = 1, in_channels = 3, num_layers = 3,
  num_attention_heads = 2, attention_head_dim = args.width, num_embeds_ada_norm = 1 }:to(r.device)
local function condition(n) return { labels = ty.zeros({ n }, { dtype = "i64", device = r.device }) } end
ty.train.fit(model, loader(0), { steps = args.teacher_steps, lr = 3e-3, quiet = true,
  loss = function(m, batch) return flow:loss(m, batch.image, condition(batch.image.shape[1])) end })
local teacher = distill.teacher(model)

local function student(seed, options, weights)
  ty.manual_seed(seed)
  local made = distill.linfusion(model, options)
  if weights then
    function weights.read(batch) return batch.image, condition(batch.image.shape[1]) end
    distill.fit(made, loader(seed), { steps = args.steps, lr = 3e-3, quiet = true, teacher = model:clone(),
      loss = distill.linfusion_loss(flow, weights) })
  end
  return made:eval()
end

-- ---- distances ----

-- Of a student's predictions to the teacher's: squared, a share of the teacher's variance; at a side.
local asked = {}
local function questions(side)
  if asked[side] then return asked[side] end
  asked[side] = {}
  local x0 = pictures("validation", args.count, side)
  for i, time in ipairs { 0.25, 0.5, 0.75 } do
    ty.manual_seed(17)
    local noisy = flow.objective:noisy(x0, ty.full({ args.count }, time, { device = r.device }), ty.randn_like(x0))
    asked[side][i] = { noisy = noisy, wanted = ty.no_grad(function()
      return flow.objective:output(teacher, noisy, condition(args.count))
    end) }
  end
  return asked[side]
end
local function distance(of, side)
  return ty.no_grad(function()
    local sum = 0.0
    for _, question in ipairs(questions(side)) do
      local found = flow.objective:output(of, question.noisy, condition(args.count))
      sum = sum + (found - question.wanted):square():mean():item() / question.wanted:var():item()
    end
    return sum / #questions(side)
  end)
end

local sides, found = { SIDE, 2 * SIDE, 4 * SIDE }, {}
local kinds = { { "LinFusion", {}, {} }, { "not normalised", { normalised = false }, {} },
  { "without features", {}, { features = 0 } }, { "from pictures alone", {}, { output = 0, features = 0 } },
  { "before training", {} } }
local best
for i, seed in ipairs(r.seeds) do
  for _, kind in ipairs(kinds) do
    local made = student(seed, kind[2], kind[3])
    if not best then best = made end
    found[kind[1]] = found[kind[1]] or { {}, {}, {} }
    local text = {}
    for s, side in ipairs(sides) do
      found[kind[1]][s][i] = distance(made, side)
      text[s] = ("%d: %.4f"):format(side, found[kind[1]][s][i])
    end
    r:say("seed %d, %s: distance to the teacher at %s", seed, kind[1], table.concat(text, ", "))
  end
end

-- ---- samples at three sizes, the teacher's above ----

local sheet, shown = {}, 4 * SIDE
for _, network in ipairs { model, best } do
  for _, side in ipairs(sides) do
    local x = flow:sampler { steps = r.quick and 2 or 12, solver = diffusion.solver.euler() }:sample(network,
      { 2, 3, side, side }, { condition = condition(2), seeds = { 1, 2 } })
    sheet[#sheet + 1] = x:clamp(-1, 1):repeat_interleave(shown // side, 2):repeat_interleave(shown // side, 3)
  end
end
ty.plot.grid(ty.concat(sheet, 0), { columns = 6 }):save(r:picture "linfusion.png")

-- ---- seconds over tokens ----

local linear, dense, tokens = {}, {}, 1024
while tokens <= args.longest do
  local q, k, v = ty.randn({ 3, 1, tokens, 32 }, { device = r.device }):chunk(3, 0)
  local took = r:time({ linear = function() return distill.linear_attention(q, k, v) end,
    softmax = tokens <= 16384 and function() return ty.scaled_dot_product_attention(q, k, v) end or nil },
    { rounds = 3 })
  linear[#linear + 1] = { tokens, took.linear }
  if took.softmax then dense[#dense + 1] = { tokens, took.softmax } end
  local other = dense[#linear] and (" softmax %.5f s"):format(dense[#linear][2]) or ""
  r:say("%d tokens: linear %.5f s%s", tokens, linear[#linear][2], other)
  tokens = tokens * 2
end

-- ---- the table ----

local function ratio(a, b)
  local values = {}
  for i in ipairs(r.seeds) do values[i] = a[i] / b[i] end
  return values
end
local own, plain = found.LinFusion, found["not normalised"]
os.exit(r:finish {
  { claim = "slope of seconds over tokens on logarithmic axes", bar = 1.15, below = true,
    measured = ty.stats.slope(linear, true), baseline = ty.stats.slope(dense, true) },
  { claim = "distance to the teacher, of its variance", values = own[1], bar = 0.05, below = true,
    baseline = found["before training"][1] },
  { claim = "the same at twice the side", values = own[2], bar = 0.1, below = true,
    baseline = found["before training"][2] },
  { claim = "the same at four times the side", values = own[3], bar = 0.15, below = true,
    baseline = found["before training"][3] },
  { claim = "distance, of that before training", values = ratio(own[1], found["before training"][1]), bar = 0.5,
    below = true },
  { claim = "distance at four times the side, of that without normalisation", values = ratio(own[3], plain[3]), bar = 1,
    below = true },
  { claim = "distance, of that learnt from pictures alone", values = ratio(own[1], found["from pictures alone"][1]),
    bar = 1, below = true },
}, true)
