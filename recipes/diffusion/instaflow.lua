-- One step in the place of many, by way of straight paths
-- claim: reflow straightens the paths of a flow, and one step distilled from them is near the flow in many steps
-- system: rectified flow, reflow on coupled pairs, one-step distillation
-- paper: Liu et al. 2024, "InstaFlow: One Step is Enough for High-Quality Diffusion-Based Text-to-Image Generation"
-- time: 10 minutes on one CPU core that others use too
--
-- A flow is trained on a checkerboard and one on the digits by class; pairs of noise and of what many guided steps make
-- of it are stored with what they cost. Reflow trains on the pairs from the flow's own weights; its pairs, in few steps
-- and without guidance, which is in them already, then teach one step. The baseline distils one step directly from the
-- first pairs and is trained for as many steps more as reflow and the second pairs would have cost, a training step
-- being three evaluations a sample. Rates of Muon are chosen for each by the first seed, two each. "Near" is at most
-- 1.25 times the distance of many steps (checkerboard: share of the points that would have to move; digits: Fréchet
-- distance by a classifier's features to held-out digits); bars were set before the first run. With AdamW, digits, one
-- seed, of many steps' distance and of direct distillation's: 1.25 and 1.13 at 2e-3 with 250 steps of reflow and 300 of
-- distillation (reflow's eight steps 1.16), 1.17 and 1.08 at 5e-3, 1.13 and 1.05 with the steps here, 1.10 and 1.04 at
-- 1e-2. The checkerboard's 1.09 of direct distillation is the same with both. --model: a painter for the digits.
local ty = require "tycho"
local distill, diffusion = require "tycho.distill", require "tycho.diffusion"

local r = ty.recipe.declare {
  seeds = 3, base = true,
  args = {
    { "model", "digits", "the base besides the checkerboard's: digits, or a painter of the zoo" },
    { "pairs", 1000, "of noise and sample for the base", quick = 24 },
    { "points", 10000, "of noise and point for the checkerboard", quick = 200 },
    { "point_steps", 800, "training steps of the checkerboard's flow", quick = 5 },
    { "base_steps", 700, "of the digits' flow", quick = 4 },
    { "reflow", 400, "training steps of reflow", quick = 3 },
    { "distil", 150, "of one-step distillation", quick = 3 },
    { "batch", 64, "samples of a step; four times as many points", quick = 8 },
    { "steps", 16, "of Heun's method for the first pairs", quick = 3 },
    { "few", 8, "of Euler's method for the pairs of the straightened flow", quick = 2 },
    { "guidance", 0.0, "scale for the first pairs (0: the base's own)" },
    { "count", 500, "samples to measure with", quick = 20 },
    { "judge_steps", 300, "training steps of the digits' judge", quick = 5 },
  },
}
local args, RATES = r.args, r.quick and { 0.02 } or { 0.02, 0.04 }

local tasks = {
  { name = "checkerboard", steps = args.point_steps, width = r.quick and 16 or 128, pairs = args.points,
    batch = 4 * args.batch, count = r.quick and 200 or 10000 },
  { name = args.model, steps = args.base_steps, pairs = args.pairs, batch = args.batch, count = args.count },
}

local function store(base, task, seed, stage, teacher, sampler, rate)
  local about = { base = base.name, seed = seed, stage = stage, count = task.pairs, steps = args.steps,
    base_steps = task.steps, guidance = args.guidance, reflow = stage == 2 and args.reflow or 0,
    few = stage == 2 and args.few or 0, rate = rate or 0 }
  return distill.store(r:path "pairs", about, function()
    ty.manual_seed(seed + 100 * stage)
    local prompts = base.prompts("training", 0, task.pairs, seed + 100 * stage)
    return distill.pairs(teacher, sampler, { task.pairs, table.unpack(base.shape) },
      { condition = prompts.condition, null = base.null, batch = task.batch == args.batch and 256 or 2500 })
  end)
end

local function learn(from, material, task, seed, steps, rate, loss)
  ty.manual_seed(seed)
  local loader = material:loader { batch = task.batch, seed = seed, device = r.device }
  local _, averaged = distill.fit(from:clone():requires_grad_(), loader, { steps = steps, lr = rate, final = 0.02,
    warmup = 20, average = 0.98, quiet = true, loss = loss, optimizer = ty.optim.Muon })
  return averaged
end

-- All stages of one base, and what was measured.
local function run(task, seed)
  local base = distill.base(task.name, r:base(), { seed = seed, steps = task.steps, width = task.width,
    judge_steps = args.judge_steps, device = r.device })
  local flow, model = base.flow, base.model
  local found, scale = {}, args.guidance > 0 and args.guidance or base.guidance
  -- Rates by the first seed, with other noise than what is reported.
  local prompts, choosing = base.prompts("validation", 0, task.count, 54321),
    base.prompts("validation", 0, task.count, 99)
  local function one_step(m, given) return ty.no_grad(distill.one_step, m, flow, given.noise, given.condition) end
  local function tuned(name, fn, score)
    local key = task.name .. ", " .. name
    local best = r:choose(key, RATES, function(rate, known)
      local candidate = fn(rate)
      return candidate, not known and score(candidate)
    end)
    found[name] = r.metrics.chosen[key]
    return best
  end
  local function score_step(m) return base.distance(one_step(m, choosing), choosing) end

  local first = store(base, task, seed, 1, distill.teacher(model:clone()), distill.sampler(base, args.steps, scale))
  local straightened = tuned("reflow", function(rate)
    return learn(model, first, task, seed, args.reflow, rate, distill.reflow_loss(flow))
  end, function(m) -- by what comes of the pairs that it will make
    local _, x = distill.straightness(m, flow, choosing.noise, { condition = choosing.condition, steps = args.few })
    return base.distance(x, choosing)
  end)
  local second = store(base, task, seed, 2, distill.teacher(straightened:clone()),
    distill.sampler(base, args.few, 1, diffusion.solver.euler()), found.reflow)
  local one = tuned("distil", function(rate)
    return learn(straightened, second, task, seed, args.distil, rate, distill.one_step_loss(flow))
  end, score_step)
  local more = args.distil + args.reflow + second.evaluations // (3 * task.batch)
  local direct = tuned("direct", function(rate)
    return learn(model, first, task, seed, more, rate, distill.one_step_loss(flow))
  end, score_step)

  local many = distill.sampler(base, args.steps, scale):sample(model, prompts.noise.shape,
    { condition = prompts.condition, null = base.null, noise = prompts.noise })
  local guided, paths = distill.guided(base, scale), {}
  for k, network in ipairs { guided, straightened } do
    local bend, _, states = distill.straightness(network, flow, prompts.noise,
      { condition = prompts.condition, steps = r.quick and 3 or 32, states = true })
    found["S" .. k], paths[k] = bend, states
  end
  local shown = { many = many, one = one_step(one, prompts), direct = one_step(direct, prompts),
    euler1 = one_step(guided, prompts), euler2 = one_step(straightened, prompts) }
  for name, x in pairs(shown) do
    found[name] = base.distance(x, prompts)
    if base.asked then found[name .. "_asked"] = base.asked(x, prompts) end
  end
  found.more = more
  found.evaluations = first.evaluations + second.evaluations + 3 * task.batch * (args.reflow + args.distil)
  found.evaluations_direct = first.evaluations + 3 * task.batch * more
  r:say("%s, seed %d: bend %.4f, after reflow %.4f; distance in many steps %.4f, one step of the flow %.4f, of the "
    .. "straightened %.4f, distilled %.4f, directly %.4f; evaluations %d, directly %d", task.name, seed, found.S1,
    found.S2, found.many, found.euler1, found.euler2, found.one, found.direct, found.evaluations,
    found.evaluations_direct)
  return found, shown, paths, base
end

local rows = {}
for _, task in ipairs(tasks) do
  local all = {}
  for i, seed in ipairs(r.seeds) do
    local found, shown, paths, base = run(task, seed)
    for name, value in pairs(found) do ty.stats.put(all, name, i, value) end
    if i == 1 and task.name == "checkerboard" then
      distill.points.paths({ { states = paths[1], label = "rectified flow" },
        { states = paths[2], label = "after reflow" } }, { title = "Paths from noise to the board", width = 900,
        height = 480 }):save(r:picture "instaflow.png")
    end
    if i == 1 and base.decode then
      local sheet = {}
      for _, name in ipairs { "many", "euler1", "euler2", "direct", "one" } do
        sheet[#sheet + 1] = base.decode(shown[name]:narrow(0, 0, math.min(20, task.count)))
      end
      ty.plot.grid(ty.concat(sheet, 0), { columns = math.min(20, task.count), scale = args.model == "digits" and 4 or 1,
        invert = args.model == "digits" }):save(r:path "samples.png")
    end
  end
  r.metrics[task.name] = all
  local function over(a, b) return ty.stats.ratios(all[a], all[b]) end
  rows[#rows + 1] = { claim = task.name .. ": bend of the paths after reflow, of that before",
    values = over("S2", "S1"), baseline = all.S1, bar = 0.5, below = true }
  rows[#rows + 1] = { claim = task.name .. ": distance in one distilled step, of many steps'",
    values = over("one", "many"), baseline = all.many, bar = 1.25, below = true }
  rows[#rows + 1] = { claim = task.name .. ": distance in one distilled step, of direct distillation's",
    values = over("one", "direct"), baseline = all.direct, bar = 1, below = true }
  rows[#rows + 1] = { claim = task.name .. ": distance in one step of the straightened flow, of the first's",
    values = over("euler2", "euler1"), baseline = all.euler1, bar = 0.5, below = true }
end
os.exit(r:finish(rows), true)
