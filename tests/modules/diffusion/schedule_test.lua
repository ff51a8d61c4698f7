-- Schedules and spacings: tables against those of diffusers (tests/fixtures/make_diffusion.py), continuous ones against
-- their formulas.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

local schedule, spacing = diffusion.schedule, diffusion.spacing
local fixture = ty.io.load_npz(check.root .. "tests/fixtures/diffusion.npz")

local function expected(name)
  if not fixture[name] then error("no fixture " .. name) end
  return fixture[name]:to("f64"):tolist()
end

check.test("tables of betas are diffusers'", function()
  local tables = {
    linear = schedule.discrete(),
    scaled_linear = schedule.discrete { betas = "scaled_linear" },
    cosine = schedule.discrete { betas = "cosine" },
    ["linear_zero"] = schedule.discrete { zero_snr = true },
    ["scaled_linear_zero"] = schedule.discrete { betas = "scaled_linear", zero_snr = true },
    ["linear_100"] = schedule.discrete { steps = 100, beta_start = 1e-4, beta_end = 0.02 },
  }
  for name, s in pairs(tables) do check.close(s.alpha_bar, expected("alpha_bar/" .. name), 2e-6, name) end
  check.equal(tables.linear_zero.alpha_bar[1000], 0.0)
  check.equal({ tables.linear.frame, tables.linear_zero.frame }, { "noise", "flow" })
  check.close(schedule.discrete({ betas = { 0.1, 0.2 } }).alpha_bar, { 0.9, 0.72 }, 1e-15)
  check.close(schedule.discrete({ steps = 200 }).alpha_bar[200], tables.linear.alpha_bar[1000], 1e-4,
    "fewer steps, the same noise at the end")
  check.fails(function() schedule.discrete { betas = "square" } end, "betas: expected linear, scaled_linear, cosine")
  check.fails(function() schedule.discrete { steps = 0 } end, "steps: expected a positive integer, got 0")
  check.fails(function() tables.linear:point(1000) end, "expected a time from 0 to 999, got 1000")
end)

check.test("spacings visit diffusers' times", function()
  local s = schedule.discrete { betas = "scaled_linear" }
  for _, steps in ipairs { 1, 7, 10, 16, 25, 50 } do
    for name, make in pairs { trailing = spacing.trailing(), leading = spacing.leading { offset = 1 },
      linspace = spacing.linspace() } do
      local points, times = make(s, steps), {}
      for i = 1, steps do times[i] = points[i].t end
      -- In one step NumPy's linspace gives its first number, the clean end; ours begins in noise all the same.
      local want = name == "linspace" and steps == 1 and { 999 } or expected(("times/%s/%d"):format(name, steps))
      check.equal(times, want, name .. " in " .. steps)
      check.equal({ #points, points[#points].alpha, points[#points].sigma }, { steps + 1, 1.0, 0.0 })
    end
  end
  local last = spacing.leading { offset = 1, final = "first" }(s, 10)[11]
  check.close(last.alpha ^ 2, s.alpha_bar[1], 1e-12, "final = first ends at the table's first")
  check.fails(function() spacing.trailing()(s, 1001) end, "spacing.trailing: steps: expected an integer from 1 to 1000")
  check.fails(function() spacing.trailing { final = "second" } end, "final: expected clean or first, got 'second'")
end)

check.test("sigmas of Euler, Karras and exponential spacing are diffusers'", function()
  local s = schedule.discrete { betas = "scaled_linear" }
  for name, make in pairs { euler = spacing.linspace { rounded = false }, karras = spacing.karras(),
    exponential = spacing.exponential() } do
    for _, steps in ipairs { 10, 25 } do
      local sigmas, times, points = {}, {}, make(s, steps)
      for i, p in ipairs(points) do
        sigmas[i] = p.sigma / p.alpha
        if i <= steps then times[i] = p.time end
      end
      local key = ("%s/%d"):format(name, steps)
      check.close(sigmas, expected("sigmas/" .. key), 2e-5, key)
      check.close(times, expected("sigma_times/" .. key), 2e-4, key .. ", times")
    end
  end
end)

check.test("EDM's sigmas", function()
  local s = schedule.exploding()
  for name, make in pairs { edm_karras = spacing.karras(), edm_exponential = spacing.exponential() } do
    local sigmas, times = {}, {}
    for i, p in ipairs(make(s, 18)) do sigmas[i], times[i] = p.sigma, i <= 18 and p.time or nil end
    check.close(sigmas, expected("sigmas/" .. name), 1e-6, name)
    check.close(times, expected("sigma_times/" .. name), 1e-6, name)
  end
  check.equal(s:noise_scale(s:point(80)), 80)
  -- Karras et al. 2022, table 1: the variance-preserving process goes from 152 to 0.01 or so.
  local points = spacing.vp()(schedule.discrete(), 5)
  local t = 1 + 2 / 4 * (1e-3 - 1)
  check.close(points[3].sigma / points[3].alpha, math.sqrt(math.exp(19.9 * t * t / 2 + 0.1 * t) - 1), 1e-9)
  check.fails(function() schedule.exploding { sigma_min = 3, sigma_max = 2 } end, "sigma_max: expected more than")
end)

check.test("flow: times, shift and its inverse", function()
  local s = schedule.flow()
  local points = spacing.trailing()(s, 4)
  check.equal({ points[1].t, points[2].t, points[5].t }, { 1.0, 0.75, 0 })
  check.equal({ points[2].alpha, points[2].sigma, points[2].time }, { 0.25, 0.75, 750.0 })
  local shifted = schedule.flow { shift = 3 }
  for _, steps in ipairs { 10, 28 } do
    local sigmas = {}
    for i, p in ipairs(spacing.trailing()(shifted, steps)) do sigmas[i] = p.sigma end
    check.close(sigmas, expected("flow/shift3/" .. steps), 1e-6, "FlowMatchEulerDiscreteScheduler")
  end
  local back = schedule.flow { shift = 1 / 3 }
  for u = 0, 1, 0.125 do check.close(back:from_unit(shifted:from_unit(u)), u, 1e-15) end
  local tensor = shifted:from_unit(ty.tensor({ 0.25, 0.5 }, { dtype = "f64" })):tolist()
  check.close(tensor, { shifted:from_unit(0.25), shifted:from_unit(0.5) }, 1e-15)
  check.fails(function() schedule.flow { shift = 0 } end, "schedule.flow: shift: expected a number above 0, got 0")
  check.fails(function() spacing.karras()(s, 5) end, "spacing.karras: min, max: expected two numbers with 0 < min")
  local mixed = spacing.karras { min = 0.01, max = 50 }(s, 3)
  check.close(mixed[1].t, 50 / 51, 1e-12)
end)

check.test("tensors and numbers agree; ratios find their times", function()
  for name, s in pairs { discrete = schedule.discrete { betas = "cosine" }, flow = schedule.flow(),
    exploding = schedule.exploding() } do
    local times = s.steps and { 0, 17, 999 } or { 0.01, 0.4, 0.9 }
    local t = ty.tensor(times, { dtype = s.steps and "i64" or "f64" })
    local alpha, sigma = s:coefficients(t)
    local network = s:network_time(t):to("f64"):tolist()
    for i, time in ipairs(times) do
      local p = s:point(time)
      check.close({ alpha:to("f64"):tolist()[i], sigma:to("f64"):tolist()[i] }, { p.alpha, p.sigma }, 5e-6, name)
      check.close(network[i], p.time, 1e-6, name)
      if i < 3 or name ~= "discrete" then
        local found = s:point_at(p.sigma / p.alpha)
        check.close({ found.t, found.alpha, found.sigma }, { time, p.alpha, p.sigma }, 1e-9, name .. " by ratio")
      end
    end
    local clean = s:clean()
    check.equal({ clean.alpha + 0.0, clean.sigma + 0.0 }, { 1.0, 0.0 }, name)
  end
  local s = schedule.discrete()
  local between = s:point(100.5)
  local r = (s:point(100).sigma / s:point(100).alpha + s:point(101).sigma / s:point(101).alpha) / 2
  check.close(between.sigma / between.alpha, r, 1e-12, "linear between two times")
  check.close(between.alpha ^ 2 + between.sigma ^ 2, 1, 1e-12)
end)

check.test("quantiles of the beta distribution, and the spacing made of them", function()
  local betas = require "tycho.diffusion.beta"
  -- scipy.stats.beta.ppf
  for _, row in ipairs { { 0.001, 0.6, 0.6, 1.85587385175e-05 }, { 0.3, 0.6, 0.6, 0.234017003875 },
    { 0.999, 0.6, 0.6, 0.999981441261 }, { 0.1, 2, 5, 0.09259525891312873 }, { 0.77, 2, 5, 0.402118402610099 } } do
    check.close(betas.quantile(row[1], row[2], row[3]), row[4], 1e-10 * math.max(1, row[4]), "quantile of " .. row[1])
  end
  local ends = diffusion.schedule.exploding { sigma_min = 1, sigma_max = 3 }
  local points = diffusion.spacing.beta { a = 1, b = 1 } (ends, 5)
  for i, sigma in ipairs { 3, 2.5, 2, 1.5, 1, 0 } do check.close(points[i].sigma, sigma, 1e-12) end
  check.fails(function() diffusion.spacing.beta { a = 0 } end, "spacing.beta: a, b: expected two numbers above 0")
end)

check.finish()
