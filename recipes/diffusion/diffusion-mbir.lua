-- Volumes from few projections, by a diffusion prior of slices and total variation between them
-- claim: a prior trained on slices alone, tied along the third axis by a classical one, beats both of them alone
-- system: DiffusionMBIR on simulated chests: CT from four views, MRI from a quarter of k-space
-- paper: Chung et al. 2023, "Solving 3D Inverse Problems using Pre-trained 2D Diffusion Models"
-- time: 6 minutes on one CPU core, with the prior
--
-- The prior is a small U-Net trained on slices; it never sees a volume. Between its steps the whole volume takes one
-- iteration of ADMM, with the measurements and the differences between neighbouring slices. Filtered back-projection,
-- total variation in 3-D and posterior sampling slice by slice see the same measurements; posterior sampling gets as
-- many evaluations of the same prior (and a backward pass with each). Each has its own strength by a volume that is not
-- counted, from the values that are named. Volumes are of the split validation, drawn by a seed of their own, and
-- besides of the split of findings that training never shows. Photons are counted (a dose), so that measurements have
-- noise. The sampler makes 30 steps where the paper makes 2000, which is what a core can do here.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local diffusion = require "tycho.diffusion"

local inverse, solver = diffusion.inverse, diffusion.solver

local r = ty.recipe.declare {
  seeds = 3, base = true,
  args = {
    { "size", 32, "voxels of a side" },
    { "volumes", 200, "whose slices train the prior", quick = 2 },
    { "prior_steps", 800, "training steps of the prior", quick = 4 },
    { "width", 16, "channels of the prior's first level", quick = 8 },
    { "steps", 30, "of the sampler, two evaluations each", quick = 3 },
    { "views", 4, "of the sparse scan" },
    { "cg", 3, "steps of conjugate gradients after each step of the sampler" },
    { "dose", 1e6, "photons for each detector" },
    { "strengths", { 0.05, 0.2, 0.6 }, "of total variation in 3-D, tried", quick = { 0.2 } },
    { "lambdas", { 0.2, 1, 5 }, "of total variation along z, tried by DiffusionMBIR", quick = { 1 } },
    { "scales", { 0.3, 1 }, "of posterior sampling's steps, tried", quick = { 0.3 } },
  },
}
local args, size = r.args, r.args.size

-- ---- the prior ----

local process = diffusion.EDM { data = 0.6, sigma_min = 0.005, sigma_max = 10, drop = 0,
  times = diffusion.times.log_normal { mean = -1.5, std = 1.3 } }

local function new_prior()
  local w = args.width
  return r:place(function() return diffusion.UNet { levels = { w, 2 * w, { channels = 2 * w } } } end)
end

local function prior()
  local folder = r:base "diffusion-mbir"
  local path, model = ("%s/slices%d-%d.safetensors"):format(folder, args.width, args.prior_steps), new_prior()
  if ty.io.exists(path) then
    model:load(path)
    return model:eval()
  end
  local set = datasets.load("volumes", { size = size, fields = { "volume" } })
  local slices = {}
  for i = 0, args.volumes - 1 do slices[i + 1] = set:get(i).volume:squeeze(0):unsqueeze(1) end
  slices = ty.concat(slices, 0)
  ty.manual_seed(0)
  local optimizer = ty.optim.AdamW(model:parameters(), { lr = 2e-3, beta2 = 0.99, weight_decay = 0, clip_norm = 1,
    schedule = ty.optim.cosine { steps = args.prior_steps, warmup = math.min(30, args.prior_steps // 4) } })
  local ema = ty.optim.EMA(model, { decay = 0.99 })
  for step, _, log in ty.train.steps(nil, args.prior_steps, { title = "prior" }) do
    local x = slices:index_select(0, ty.randint(0, slices.shape[1], { 32 })):to(r.device)
    local loss = process:loss(model, step % 2 == 0 and x:flip { 3 } or x)
    optimizer:step(loss)
    ema:update()
    log { loss = loss:item() }
  end
  ty.io.mkdir(folder)
  ema.model:save(path)
  return ema.model:eval()
end
local model = prior()

-- ---- what is measured ----

-- Line integrals come back in voxels: 1 for each voxel of water.
local centimetres = datasets.volumes.field / 10 / size
local unit = datasets.volumes.water * centimetres

local function ct(views, arc)
  local angles = ty.arange(views, { dtype = "f64" }) * (math.pi * arc / 180 / views)
  local A = inverse.radon { angles = angles, size = size }
  return { operator = A, measure = function(x, seed)
    return datasets.volumes.project(x:squeeze(1), { views = views, arc = arc, dose = args.dose, seed = seed }).sinogram
      / unit
  end, classical = function(y) return inverse.fbp(A, y) * (arc / 180) end }
end

-- A quarter of the rows of k-space: the middle eighth, and others at random, the same for all slices.
local function mri()
  local kept, middle = {}, size // 16
  for i = 0, size - 1 do kept[i + 1] = math.min(i, size - i) < middle + 1 and 1 or 0 end
  local left = size // 4 - (2 * middle + 1)
  for _, i in ipairs(ty.data.with_seed(1, function() return ty.randperm(size) end):tolist()) do
    if left > 0 and kept[i + 1] == 0 then kept[i + 1], left = 1, left - 1 end
  end
  local mask = ty.tensor(kept, { dtype = "f32" }):unsqueeze(1):expand(size, size)
  local A = inverse.fourier(mask)
  return { operator = A, measure = function(x, seed)
    local y = A.forward(x)
    return y + ty.data.with_seed(seed, function() return ty.randn_like(y) end) * 0.01 * mask:unsqueeze(-1)
  end, classical = A.adjoint }
end

local problems = { ct(args.views, 180), mri() }
problems[1].name, problems[2].name = "few views", "a quarter of k-space"
if r.quick then problems[2] = nil end

-- ---- reconstructions ----

local function sampled(seed, part, with)
  ty.manual_seed(seed)
  return process:sample(model, { size, 1, size, size }, { solver = with,
    spacing = diffusion.spacing.exponential(), parts = { part },
    steps = with.corrections and args.steps or 2 * args.steps - 1 })
end

local pc = solver.predictor_corrector()
local function consistent(lambda)
  return function(problem, y, seed)
    return sampled(seed, inverse.mbir(problem.operator, y, { lambda = lambda, rho = lambda > 0 and 5 or 0,
      cg = args.cg, periodic = false }), pc)
  end
end
local methods = {
  { name = "classical", label = "FBP or adjoint", make = function(p, y) return p.classical(y) end },
  { name = "tv", label = "total variation", strengths = args.strengths, with = function(strength)
    return function(p, y) return inverse.tv(p.operator, y, { lambda = strength, rho = 20 * strength,
      iterations = r.quick and 5 or 60 }) end
  end },
  { name = "dps", label = "posterior sampling", strengths = args.scales, with = function(scale)
    return function(p, y, seed)
      return sampled(seed, inverse.dps(p.operator, y, { scale = scale }), solver.ddim { eta = 1 })
    end
  end },
  { name = "slices", label = "the prior alone", make = consistent(0) },
  { name = "mbir", label = "DiffusionMBIR", strengths = args.lambdas, with = consistent },
}

local function volume(split, i)
  local set = datasets.load("volumes", { size = size, split = split, seed = 1, fields = { "volume" } })
  return set:get(i).volume:squeeze(0):unsqueeze(1):to(r.device)
end

local function psnr(x, truth) return inverse.psnr(x:clamp(0, 3), truth, 2) end

-- ---- strengths by a volume that is not counted, then the volumes that are ----

local gains, rows, columns = {}, {}, {}
for k, problem in ipairs(problems) do
  problem.by = {}
  local tuning = volume("validation", 99)
  local y = problem.measure(tuning, 99)
  for _, m in ipairs(methods) do
    local best = -math.huge
    problem.by[m.name] = m.make
    for _, strength in ipairs(m.strengths or {}) do
      local found = psnr(m.with(strength)(problem, y, 99), tuning)
      r:say("%s, %s %g: %.2f dB (not counted)", problem.name, m.label, strength, found)
      if found > best then best, problem.by[m.name] = found, m.with(strength) end
    end
  end
  local values = {}
  for i, seed in ipairs(r.seeds) do
    local truth = volume("validation", seed)
    local measured, line = problem.measure(truth, seed), {}
    for j, m in ipairs(methods) do
      local began = r:seconds()
      local x = problem.by[m.name](problem, measured, seed)
      values[m.name] = values[m.name] or {}
      values[m.name][i] = psnr(x, truth)
      line[j] = ("%s %.2f"):format(m.label, values[m.name][i])
      r.metrics[("psnr/%s/%s/%d"):format(problem.name, m.name, seed)] = values[m.name][i]
      r.metrics[("seconds/%s/%s"):format(problem.name, m.name)] = r:seconds() - began
      if i == 1 and k == 1 then columns[j] = x:clamp(0, 2) / 2 end
    end
    if i == 1 and k == 1 then table.insert(columns, 1, truth / 2) end
    r:say("%s, volume %d: %s", problem.name, seed, table.concat(line, ", "))
  end
  for _, m in ipairs(methods) do
    if m.name ~= "mbir" then
      local less = ty.stats.differences(values.mbir, values[m.name])
      gains[#gains + 1] = { claim = ("%s: dB above %s"):format(problem.name, m.label), values = less,
        baseline = values[m.name], bar = 0 }
    end
  end
end

-- A volume whose finding is of a kind and place that the prior never saw.
local strange = volume("held_out_findings", r.seed)
local seen = problems[1].measure(strange, r.seed)
for _, m in ipairs(methods) do
  r.metrics["psnr/held-out findings/" .. m.name] = psnr(problems[1].by[m.name](problems[1], seen, r.seed), strange)
end

-- Cuts along the three axes, a method a row: the true volume first.
for _, x in ipairs(columns) do
  for dim = 0, 2 do rows[#rows + 1] = x:squeeze(1):select(dim, size // 2):unsqueeze(0) end
end
ty.plot.grid(ty.stack(rows, 0) * 2 - 1, { columns = 3, scale = 3, gap = 2 }):save(r:picture "cuts.png")

os.exit(r:finish(gains), true)
