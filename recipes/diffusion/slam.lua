-- Few steps by consistency distillation on straight lines between the points of a path
-- claim: students of lines between points draw better in one to eight steps than those of the points alone
-- system: sub-path linear approximation distillation from a guided flow
-- paper: Xu et al. 2024, "Accelerating Image Generation with Sub-path Linear Approximation Model"
-- time: 4 minutes on one CPU core
--
-- The teacher is a class-conditional flow of handwritten digits with guidance. Both ways get the same start, batches,
-- teacher's steps and updates; for both, parts of the path and rate are chosen from the same lists by the first seed,
-- with other noise than what is reported. The distance is Fréchet's, by a classifier's features, to held-out digits;
-- that of the teacher in many steps stands beside it. Bars were set before the first run. In a first run points of
-- lines were given to the flow as they come, where signal and noise do not sum to 1, which it does not know: all bars
-- were missed. With 400 updates lines had 1.23 of the distance of points in one step and 1.04 in two; twice as many
-- mend two steps, not one. One step depends on the run: on a base of another seed, after 400 updates, lines in 64 parts
-- at 2e-3, which are chosen, drew at 0.99 in one step, where the best of points had 1.26. A student that is told the
-- time of the point on the line, with the noise of the path, in the place of x_t's does worse: 3.50 in one step with
-- that choice, 1.57 at best.
local ty = require "tycho"
local distill, diffusion = require "tycho.distill", require "tycho.diffusion"

local r = ty.recipe.declare {
  seeds = 3, base = true,
  args = {
    { "base_steps", 1500, "training steps of the teacher", quick = 4 },
    { "steps", 800, "training steps of every student", quick = 3 },
    { "batch", 64, "digits in a step", quick = 16 },
    { "grids", { 16, 32, 64 }, "parts of the path, for each way the best", quick = { 8 } },
    { "noise", "variance", "in a point of a line: path or variance" },
    { "rates", { 5e-4, 2e-3 }, "learning rates, for each way the best", quick = { 1e-3 } },
    { "count", 1000, "digits to measure with", quick = 40 },
    { "judge_steps", 300, "training steps of the judge", quick = 5 },
  },
}
local args = r.args
local STEPS = { 1, 2, 4, 8 }
local WAYS = { "consistency", "lines" }

local function data()
  local digits = distill.digits.data()
  local all = digits:batch(ty.arange(#digits))
  return ty.data.TensorDataset { sample = all.image, ["condition.labels"] = all.label }
end

local function learn(base, way, seed, grid, rate)
  ty.manual_seed(seed)
  local loader = ty.data.DataLoader(data(), { batch_size = args.batch, shuffle = true, seed = seed, drop_last = true,
    device = r.device })
  local losses, averaged, evaluations = distill.fit(distill.SubpathStudent(base.model:clone():requires_grad_()), loader,
    { steps = args.steps, teacher = base.model:clone(), lr = rate, final = 0.02, warmup = 20, beta2 = 0.99,
      weight_decay = 0, average = 0.95, quiet = true,
      loss = distill.subpath_loss(base.flow, { grid = grid, guidance = base.guidance, lines = way == "lines",
        noise = args.noise }) })
  return averaged, evaluations, losses
end

-- Digits in so many steps, each with fresh noise (the same for all).
local function draw(base, student, steps, prompts)
  ty.manual_seed(777)
  return (base.flow:sample(student, prompts.noise.shape, { condition = prompts.condition, noise = prompts.noise,
    steps = steps, solver = diffusion.solver.lcm { scaling = false } }))
end

local chosen, found, sheets, spent = {}, {}, {}, {}
local function note(name, i, value)
  found[name] = found[name] or {}
  found[name][i] = value
end

for i, seed in ipairs(r.seeds) do
  local base = distill.base("digits", r:base(), { network = "mlp", seed = seed, steps = args.base_steps,
    judge_steps = args.judge_steps, device = r.device })
  local prompts, choosing = base.prompts("validation", 0, args.count, 54321),
    base.prompts("validation", 0, args.count, 99)
  local many = distill.sampler(base, r.quick and 2 or 25):sample(base.model, prompts.noise.shape,
    { condition = prompts.condition, noise = prompts.noise })
  note("teacher", i, base.distance(many, prompts))
  local students = {}
  for _, way in ipairs(WAYS) do
    if chosen[way] then
      students[way], spent[way] = learn(base, way, seed, chosen[way].grid, chosen[way].rate)
    else
      local least = math.huge
      for _, grid in ipairs(args.grids) do
        for _, rate in ipairs(args.rates) do
          local student, evaluations = learn(base, way, seed, math.tointeger(grid), rate)
          local sum = 0
          for _, steps in ipairs(STEPS) do
            sum = sum + math.log(base.distance(draw(base, student, steps, choosing), choosing))
          end
          r:say("%s, %d parts, rate %g: distance %.4f (mean over steps)", way, grid, rate, math.exp(sum / #STEPS))
          if sum < least then
            least, students[way], spent[way] = sum, student, evaluations
            chosen[way] = { grid = math.tointeger(grid), rate = rate }
          end
        end
      end
    end
    for _, steps in ipairs(STEPS) do
      local x = draw(base, students[way], steps, prompts)
      note(way .. "/" .. steps, i, base.distance(x, prompts))
      note(way .. "_asked/" .. steps, i, base.asked(x, prompts))
      if i == 1 and (steps == 2 or steps == 4) then sheets[#sheets + 1] = x end
    end
  end
  if i == 1 then table.insert(sheets, 1, many) end
  r:say("seed %d: teacher %.4f; in 1, 2, 4, 8 steps by points %.4f %.4f %.4f %.4f, by lines %.4f %.4f %.4f %.4f", seed,
    found.teacher[i], found["consistency/1"][i], found["consistency/2"][i], found["consistency/4"][i],
    found["consistency/8"][i], found["lines/1"][i], found["lines/2"][i], found["lines/4"][i], found["lines/8"][i])
end

-- Rows: the teacher, points in two and four steps, lines in two and four.
local shown = math.min(20, args.count)
for k, x in ipairs(sheets) do sheets[k] = x:narrow(0, 0, shown):clamp(-1, 1) end
ty.plot.grid(ty.concat(sheets, 0), { columns = shown, scale = 4, invert = true }):save(r:picture "slam.png")

r.metrics.chosen, r.metrics.found = chosen, found
local rows = {}
for _, steps in ipairs(STEPS) do
  local ratios = {}
  for i in ipairs(r.seeds) do ratios[i] = found["lines/" .. steps][i] / found["consistency/" .. steps][i] end
  rows[#rows + 1] = { claim = ("distance in %d step%s, of consistency distillation's"):format(steps,
    steps > 1 and "s" or ""), values = ratios, baseline = found["consistency/" .. steps], bar = 1, below = true }
end
local near = {}
for i in ipairs(r.seeds) do near[i] = found["lines/4"][i] / found.teacher[i] end
rows[#rows + 1] = { claim = "distance in 4 steps, of the teacher's in many", values = near, baseline = found.teacher,
  bar = 1.25, below = true }
rows[#rows + 1] = { claim = "the teacher's evaluations, of consistency distillation's",
  measured = spent.lines / spent.consistency, bar = 1, below = true }
os.exit(r:finish(rows), true)
