-- Solvers: orders of convergence on a Gaussian whose path is known, identities between them, trajectories of diffusers.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local known = dofile(here .. "closed_form.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

local schedule, solver, spacing = diffusion.schedule, diffusion.solver, diffusion.spacing
local fixture = ty.io.load_npz(check.root .. "tests/fixtures/diffusion.npz")
local f64 = { dtype = "f64" }

-- scale sin(0.37 i + offset), as wave() in the script.
local function wave(shape, offset, scale)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return ((ty.arange(n):to "f64" * 0.37 + offset):sin() * scale):reshape(shape)
end

-- On the path of N(0, s^2) every sample keeps its quantile: x / sqrt(alpha^2 s^2 + sigma^2) stays the same.
local function exact_end(points, x, s)
  local first, last = points[1], points[#points]
  local function deviation(p) return math.sqrt(p.alpha ^ 2 * s ^ 2 + p.sigma ^ 2) end
  return x * (deviation(last) / deviation(first))
end

-- Slope of the error in the number of steps on log-log axes, f64.
local function order(process_schedule, kind, make_solver, make_spacing, counts)
  local model, x = known.gaussian(process_schedule, kind, 0.5), ty.tensor({ { 1.0 } }, f64)
  local errors = {}
  for i, steps in ipairs(counts) do
    local sampler = diffusion.Sampler { schedule = process_schedule, predict = kind, solver = make_solver,
      spacing = make_spacing, steps = steps }
    local y = sampler:sample(model, { 1, 1 }, { x = x })
    errors[i] = (y - exact_end(sampler:points(), x, 0.5)):abs():item()
  end
  return math.log(errors[1] / errors[2]) / math.log(counts[2] / counts[1]), errors
end

check.test("orders of convergence: flow", function()
  local flow = schedule.flow()
  for name, row in pairs { euler = { solver.euler(), 1 }, ddim = { solver.ddim(), 1 }, heun = { solver.heun(), 2 } } do
    local slope, errors = order(flow, "flow", row[1], spacing.trailing(), { 80, 160 })
    check.close(slope, row[2], 0.1, name .. " has slope " .. slope)
    check.ok(errors[2] < 0.02, name)
  end
end)

check.test("orders of convergence: a table of betas, and sigma itself", function()
  local wide = { min = 0.02, max = 50, final = "first" }
  local ends = schedule.exploding { sigma_min = 0.02, sigma_max = 50 }
  local rows = { euler = { solver.euler(), 1 }, ddim = { solver.ddim(), 1 }, heun = { solver.heun(), 2 },
    dpmpp_2m = { solver.dpmpp_2m(), 2 } }
  for name, row in pairs(rows) do
    local slope = order(ends, "epsilon", row[1], spacing.exponential(wide), { 80, 160 })
    check.ok(slope > row[2] - 0.15 and slope < row[2] + 0.5, name .. " has slope " .. slope)
  end
  -- DDIM on a table: all its times come close to the exact marginal, and the error falls with the number of steps.
  local discrete = schedule.discrete()
  local slope, errors = order(discrete, "epsilon", solver.ddim(), spacing.trailing(), { 125, 500 })
  check.close(slope, 1, 0.15, "DDIM has slope " .. slope)
  check.ok(errors[2] < 5e-3, "and comes to the marginal")
end)

check.test("Euler is exact for a velocity that does not depend on x", function()
  local flow = diffusion.Flow()
  local model = known.model(function(x) return ty.full_like(x, 0.25) end)
  local x = ty.randn({ 3, 2 }, f64)
  for _, steps in ipairs { 1, 3, 10 } do
    local y = flow:sample(model, { 3, 2 }, { x = x, solver = solver.euler(), steps = steps })
    check.close(y:tolist(), (x - 0.25):tolist(), 1e-12, "along a straight line in " .. steps)
  end
  -- dx/dt = x in one Euler step from 1 to 0 gives 0; in n steps (1 - 1/n)^n.
  local linear = known.model(function(z) return z end)
  local y = flow:sample(linear, { 3, 2 }, { x = x, solver = solver.euler(), steps = 8 })
  check.close(y:tolist(), (x * (1 - 1 / 8) ^ 8):tolist(), 1e-12, "linear velocity")
end)

-- One step from time a to time b with given noise.
local function step(s, table_of, kind, x, output, a, b, noise)
  local run = { schedule = table_of, noise = function() return noise end }
  local p = diffusion.prediction.new(kind, x, output, table_of:point(a))
  return s:step(p, b and table_of:point(b) or table_of:clean(), run, s.start and s:start(run) or {})
end

check.test("DDIM with eta 1 is the ancestral step; with eta 0 it is Euler's", function()
  local x, e, noise = ty.randn({ 4, 2 }, f64), ty.randn({ 4, 2 }, f64), ty.randn({ 4, 2 }, f64)
  for name, s in pairs { discrete = schedule.discrete(), flow = schedule.flow(), exploding = schedule.exploding() } do
    local pairs_of = s.steps and { { 999, 700 }, { 500, 499 }, { 20, 0 }, { 400 } }
      or { { 0.9, 0.4 }, { 0.5, 0.49 }, { 0.1, 0.003 } }
    for _, ab in ipairs(pairs_of) do
      local what = ("%s from %s to %s"):format(name, ab[1], ab[2])
      local posterior = step(solver.ddpm(), s, "epsilon", x, e, ab[1], ab[2], noise)
      local ddim = step(solver.ddim { eta = 1 }, s, "epsilon", x, e, ab[1], ab[2], noise)
      check.close(ddim:tolist(), posterior:tolist(), 1e-9, what)
      local plain = step(solver.ddim(), s, "epsilon", x, e, ab[1], ab[2])
      for _, frame in ipairs { "noise", "flow" } do
        local euler = step(solver.euler { frame = frame }, s, "epsilon", x, e, ab[1], ab[2])
        check.close(euler:tolist(), plain:tolist(), 1e-9, what .. ", frame " .. frame)
      end
      local multistep = step(solver.dpmpp_2m(), s, "epsilon", x, e, ab[1], ab[2])
      check.close(multistep:tolist(), plain:tolist(), 1e-9, what .. ", the first step of DPM++")
    end
  end
end)

check.test("the ancestral step is the posterior of Ho et al. 2020", function()
  local s, t, before = schedule.discrete(), 600, 550
  local a, b = s.alpha_bar[t + 1], s.alpha_bar[before + 1]
  local alpha = a / b
  local x, x0, noise = ty.randn({ 4 }, f64), ty.randn({ 4 }, f64), ty.randn({ 4 }, f64)
  local mean = x0 * (math.sqrt(b) * (1 - alpha) / (1 - a)) + x * (math.sqrt(alpha) * (1 - b) / (1 - a))
  local small = mean + noise * math.sqrt((1 - b) / (1 - a) * (1 - alpha))
  local large = mean + noise * math.sqrt(1 - alpha)
  check.close(step(solver.ddpm(), s, "sample", x, x0, t, before, noise):tolist(), small:tolist(), 1e-12)
  local other = solver.ddpm { variance = "large" }
  check.close(step(other, s, "sample", x, x0, t, before, noise):tolist(), large:tolist(), 1e-12)
  check.fails(function() solver.ddpm { variance = "huge" } end, "variance: expected small or large, got 'huge'")
  check.fails(function() solver.ddim { eta = 2 } end, "solver.ddim: eta: expected a number within [0, 1], got 2")
  check.fails(function() step(solver.euler { frame = "x" }, s, "sample", x, x0, t, before) end,
    "solver.euler: frame: expected noise or flow, got 'x'")
end)

-- What network() in the script computes, with 1,000 times.
local function network(x, t)
  t = t:to("f64"):reshape(-1, 1, 1, 1)
  return (x * 1.3 + t * 0.004):sin() + (t * 0.002):cos() * 0.3 * x
end

-- In the script the noise of draw i is wave(i); the same here.
local function numbered_noise()
  local draws = 0
  return { start = function(_, run)
    run.noise = function(_, x)
      draws = draws + 1
      return wave(x.shape, draws, 1.4):to(x.dtype)
    end
    return {}
  end }
end

-- diffusers' DPM-Solver leaves out the last of one time more than there are steps.
local function as_recorded(name)
  return function(s, steps)
    return spacing.times(fixture[("run_times/%s/%d"):format(name, steps)]:tolist())(s, steps)
  end
end

-- And with Karras' sigmas it tells the network whole times.
local function rounded_karras(s, steps)
  local points = spacing.karras()(s, steps)
  for _, point in ipairs(points) do point.time = math.floor(point.time + 0.5) end
  return points
end

check.test("trajectories are diffusers'", function()
  local stable = schedule.discrete { betas = "scaled_linear" }
  local zero = schedule.discrete { betas = "scaled_linear", zero_snr = true }
  local fine = spacing.linspace { rounded = false }
  local runs = {
    ddim = { stable, solver.ddim(), spacing.leading { offset = 1, final = "first" } },
    ddim_v = { stable, solver.ddim(), spacing.leading(), predict = "v" },
    ddim_eta = { stable, solver.ddim { eta = 0.7 }, spacing.leading() },
    ddim_zero = { zero, solver.ddim(), spacing.trailing(), predict = "v" },
    ddpm = { stable, solver.ddpm(), spacing.leading(), clip = 1 },
    ddpm_large = { stable, solver.ddpm { variance = "large" }, spacing.leading() },
    euler = { stable, solver.euler(), fine },
    euler_karras = { stable, solver.euler(), spacing.karras() },
    heun = { stable, solver.heun(), fine },
    dpmpp_2m = { stable, solver.dpmpp_2m(), as_recorded "dpmpp_2m" },
    dpmpp_2m_karras = { stable, solver.dpmpp_2m(), rounded_karras },
    edm = { schedule.exploding(), solver.euler(), spacing.karras(), predict = "edm" },
    flow = { schedule.flow { shift = 3 }, solver.euler(), spacing.trailing(), predict = "flow" },
    flow_heun = { schedule.flow(), solver.heun(), spacing.linspace(), predict = "flow" },
  }
  local start = wave({ 2, 3, 4, 4 }, 3, 1.0)
  for name, row in pairs(runs) do
    for _, steps in ipairs { 10, 25, 50 } do
      local sampler = diffusion.Sampler { schedule = row[1], predict = row.predict, solver = row[2], spacing = row[3],
        steps = steps, clip = row.clip, parts = { numbered_noise() } }
      local x = sampler:sample(known.model(network), { 2, 3, 4, 4 }, { noise = start })
      local want = fixture[("run/%s/%d"):format(name, steps)]
      check.ok(want ~= nil, name)
      local off = (x - want:to "f64"):abs():max():item() / math.max(1, want:to("f64"):abs():max():item())
      check.ok(off < 1e-5, ("%s in %d steps: off by %.2g"):format(name, steps, off))
    end
  end
end)

check.finish()
