-- The usual processes against data known in closed form, training objectives, measures.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local known = dofile(here .. "closed_form.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

local solver, times, weighting = diffusion.solver, diffusion.times, diffusion.weighting

check.test("flow: the loss of the right velocity is 0, samples of a point are the point", function()
  local drawings = { uniform = times.uniform(), logit_normal = times.logit_normal() }
  for name, drawing in pairs(drawings) do
    local flow = diffusion.Flow { times = drawing }
    check.ok(flow:loss(known.point(flow.schedule, "flow", 0.7), ty.full({ 32, 2 }, 0.7)):item() < 1e-6, name)
    local t = flow.objective:draw_times(20000)
    check.close(t:mean():item(), 0.5, 0.01)
    check.close(t:std():item(), name == "uniform" and math.sqrt(1 / 12) or 0.2084, 0.01)
  end
  local flow = diffusion.Flow()
  for _, s in ipairs { solver.heun(), solver.euler(), solver.ddim(), solver.dpmpp_2m() } do
    local x = flow:sample(known.point(flow.schedule, "flow", 0.7), { 5, 3 }, { steps = 4, solver = s })
    check.close(x:tolist(), ty.full({ 5, 3 }, 0.7):tolist(), 1e-5)
  end
  check.fails(function() diffusion.Flow { times = "noon" } end, "Flow: times: expected a function")
  check.fails(function() flow:sample(nil, { 1, 1 }, { solver = "rk4" }) end, "Sampler: solver: expected a table")
  check.fails(function() flow:loss(nil, ty.zeros(2, 1), ty.tensor { 1, 2 }) end,
    "Objective.loss: condition: expected a table such as { labels = labels }, got a tensor")
end)

check.test("DDPM: every schedule and prediction, deterministic and ancestral", function()
  for _, betas in ipairs { "cosine", "linear", "scaled_linear" } do
    for _, predict in ipairs { "epsilon", "v", "sample", "flow" } do
      local process = diffusion.DDPM { betas = betas, predict = predict, steps = 200 }
      local model = known.point(process.schedule, predict, 0.4)
      local what = betas .. " " .. predict
      check.ok(process:loss(model, ty.full({ 64, 3 }, 0.4)):item() < 1e-4, what)
      local x = process:sample(model, { 4, 3 }, { steps = 7 })
      check.close(x:tolist(), ty.full({ 4, 3 }, 0.4):tolist(), 1e-4, what)
      local ancestral = process:sample(model, { 4, 3 }, { solver = solver.ddim { eta = 1 } })
      check.close(ancestral:tolist(), x:tolist(), 1e-3, what .. " ancestral")
    end
  end
  local cosine = diffusion.DDPM().schedule.alpha_bar
  local function f(t) return math.cos((t + 0.008) / 1.008 * math.pi / 2) ^ 2 end
  check.close(cosine[1], f(0.001) / f(0), 1e-9)
  check.ok(cosine[1000] < 1e-6 and cosine[500] > 0.45 and cosine[500] < 0.55, "cosine falls from 1 to 0")
  check.close(diffusion.DDPM({ betas = "linear" }).schedule.alpha_bar[1000], 4.0358e-5, 1e-8)
end)

check.test("without a signal at the noisy end", function()
  local process = diffusion.DDPM { betas = "scaled_linear", zero_snr = true, predict = "v" }
  local model = known.point(process.schedule, "v", 0.4)
  for _, s in ipairs { solver.ddim(), solver.ddpm(), solver.euler(), solver.heun(), solver.dpmpp_2m() } do
    local x = process:sample(model, { 4, 3 }, { steps = 10, solver = s })
    check.close(x:tolist(), ty.full({ 4, 3 }, 0.4):tolist(), 1e-4)
  end
end)

check.test("EDM: loss 0 for the right network, samples have the data's moments", function()
  local process = diffusion.EDM { data = 0.5 }
  check.ok(process:loss(known.point(process.schedule, "edm", 0.2), ty.full({ 64, 3 }, 0.2)):item() < 1e-6, "loss")
  ty.manual_seed(4)
  local x = process:sample(known.gaussian(process.schedule, "edm", 0.5, 0.3), { 8000, 1 }, { steps = 72 })
  check.close(x:mean():item(), 0.3, 0.02)
  check.close(x:std():item(), 0.5, 0.02)
  local t = process.objective:draw_times(20000):log()
  check.close({ t:mean():item(), t:std():item() }, { -1.2, 1.2 }, 0.03)
end)

check.test("the ancestral solvers keep the variance", function()
  local process = diffusion.DDPM { steps = 100 }
  local model = known.gaussian(process.schedule, "epsilon", 0.3)
  ty.manual_seed(1)
  for name, s in pairs { ddim = solver.ddim(), half = solver.ddim { eta = 0.5 }, all = solver.ddim { eta = 1 },
    ddpm = solver.ddpm() } do
    local x = process:sample(model, { 4000, 1 }, { steps = 100, solver = s, clip = false })
    check.close(x:std():item(), 0.3, 0.03, name)
  end
end)

check.test("weights: the same loss of the clean sample, whatever is predicted", function()
  -- A network that is off by a fixed amount in x0: weighted losses follow from the papers' formulas.
  local schedule = diffusion.schedule.discrete { betas = "cosine" }
  local t = ty.tensor { 3, 250, 500, 900 }
  local x0, noise = ty.randn(4, 1), ty.randn(4, 1)
  local snr, wanted = {}, { min_snr = 0, edm = 0, snr_plus_one = 0 }
  for i, time in ipairs(t:tolist()) do
    local p = schedule:point(time)
    snr[i] = (p.alpha / p.sigma) ^ 2
    wanted.min_snr = wanted.min_snr + math.min(snr[i], 5) * 0.01 / 4
    wanted.edm = wanted.edm + (1 / snr[i] + 0.25) / (0.25 / snr[i]) * 0.01 / 4
    wanted.snr_plus_one = wanted.snr_plus_one + math.min(snr[i] + 1, 25) * 0.01 / 4
  end
  for name, weights in pairs { min_snr = weighting.min_snr(), edm = weighting.edm(),
    snr_plus_one = weighting.snr_plus_one { most = 25 } } do
    for _, predict in ipairs { "epsilon", "v", "sample", "flow" } do
      local objective = diffusion.Objective { schedule = schedule, predict = predict, weighting = weights }
      local noisy = objective:noisy(x0, t, noise)
      local model = known.model(function(x)
        return diffusion.prediction.convert("sample", predict, x, x0 + 0.1, noisy.alpha, noisy.sigma)
      end)
      local loss = objective:loss(model, x0, nil, { t = t, noise = noise }):item()
      check.close(loss / wanted[name], 1, 2e-3, name .. " " .. predict)
    end
  end
  -- Hang et al. 2023: min(SNR, gamma) / SNR for epsilon.
  local alpha, sigma = ty.tensor { 0.9, 0.3 }, ty.tensor { math.sqrt(1 - 0.81), math.sqrt(1 - 0.09) }
  local gain = diffusion.prediction.gain("epsilon", alpha, sigma)
  check.close(weighting.min_snr { gamma = 2 }(alpha, sigma, gain):tolist(), { 2 / (0.81 / 0.19), 1 }, 1e-5)
  check.equal(weighting.uniform()(alpha, sigma, gain), nil)
  check.fails(function() weighting.min_snr { gamma = 0 } end, "weighting.min_snr: gamma: expected a number > 0, got 0")
  check.fails(function() weighting.snr_plus_one { most = -1 } end, "snr_plus_one: most: expected a number > 0, got -1")
  -- Salimans & Ho 2022: every error of v alike.
  gain = diffusion.prediction.gain("v", alpha, sigma)
  check.close(weighting.snr_plus_one()(alpha, sigma, gain):tolist(), { 1, 1 }, 1e-5)
  local clean = ty.zeros(1) -- no noise at all: SNR has no bound
  gain = diffusion.prediction.gain("v", clean + 1, clean)
  check.equal(weighting.snr_plus_one()(clean + 1, clean, gain):tolist(), { 0 })
end)

check.test("measures", function()
  local a, b = ty.randn(4, 1, 2, 2), ty.randn(5, 1, 2, 2)
  local d = diffusion.measure.distances(a, b)
  local expected = (a[2]:to "f64" - b[3]:to "f64"):square():sum():sqrt():item()
  check.close(d["2, 3"]:item(), expected, 1e-9)
  local samples = ty.tensor { { 0.0 }, { 3.0 }, { 5.0 }, { 1.0 }, { 2.0 } }
  local mean, smallest = diffusion.measure.spread_within_classes(samples, ty.tensor { 0, 0, 0, 1, 1 }, 2)
  check.close(mean, ((3 + 5 + 2) / 3 + 1) / 2, 1e-6)
  check.close(smallest, 1, 1e-6)
  check.close(diffusion.measure.nearest(ty.tensor { { 0.5 } }, samples), 0.5, 1e-6)
end)

check.finish()
