-- Diffusion processes against models known in closed form, guidance, measures.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion = require "tycho.diffusion"

-- Any callable table is a model.
local function model_of(fn, null)
  return setmetatable({ null_label = null }, { __call = function(_, ...) return fn(...) end })
end

-- All data at the point c: x_t = (1 - t) c + t noise, so the velocity noise - c is (x - c) / t.
local function point(c) return model_of(function(x, t) return (x - c) / (t / 1000):reshape(-1, 1) end) end

-- Data from N(0, s^2): the mean of noise - x0 given x_t.
local function gaussian(s)
  return model_of(function(x, t)
    t = (t / 1000):reshape(-1, 1)
    local signal = 1 - t
    return x * (t - signal * s ^ 2) / (signal:square() * s ^ 2 + t:square())
  end)
end

check.test("flow: samples of a point are the point", function()
  for _, method in ipairs { "euler", "heun" } do
    local x = diffusion.Flow():sample(point(0.7), { 5, 3 }, { steps = 4, method = method })
    check.close(x:tolist(), ty.full({ 5, 3 }, 0.7):tolist(), 1e-5, method)
  end
end)

check.test("flow: Heun is of second order, Euler of first", function()
  ty.manual_seed(3)
  local noise = ty.randn(64, 1)
  local flow, model = diffusion.Flow(), gaussian(0.5)
  local function sample(method, steps)
    return flow:sample(model, { 64, 1 }, { method = method, steps = steps, noise = noise })
  end
  local exact = sample("heun", 800)
  check.close((exact / noise):mean():item(), 0.5, 1e-3, "the flow maps N(0, 1) to N(0, 1/4)")
  local function distance(method, steps) return (sample(method, steps) - exact):abs():max():item() end
  local euler = distance("euler", 20) / distance("euler", 40)
  local heun = distance("heun", 20) / distance("heun", 40)
  check.ok(euler > 1.7 and euler < 2.3, "Euler: halving the step divides the error by " .. euler)
  check.ok(heun > 3.2 and heun < 5, "Heun: halving the step divides the error by " .. heun)
  check.fails(function() flow:sample(model, { 1, 1 }, { method = "rk4" }) end, "heun or euler")
end)

check.test("flow: the loss of the right velocity is 0", function()
  for _, time in ipairs { "uniform", "logit_normal" } do
    local flow = diffusion.Flow { time = time }
    check.ok(flow:loss(point(0.7), ty.full({ 32, 2 }, 0.7)):item() < 1e-6, time)
    local t = flow:draw_times(20000)
    check.close(t:mean():item(), 0.5, 0.01)
    check.close(t:std():item(), time == "uniform" and math.sqrt(1 / 12) or 0.2084, 0.01)
  end
  check.fails(function() diffusion.Flow { time = "noon" } end, "logit_normal or uniform")
end)

-- alpha_bar at times of the embedding's scale.
local function signal_at(process, t)
  local values = {}
  for i, step in ipairs((t * (process.steps / 1000)):round():to("i64"):tolist()) do
    values[i] = process.alpha_bar[step + 1]
  end
  return ty.tensor(values, { dtype = "f32" }):reshape(-1, 1)
end

check.test("DDPM and DDIM with the right prediction", function()
  for _, schedule in ipairs { "cosine", "linear" } do
    for _, predict in ipairs { "noise", "velocity" } do
      local process = diffusion.DDPM { schedule = schedule, predict = predict, steps = 200 }
      local model = model_of(function(x, t)
        local signal = signal_at(process, t)
        local a, b = signal:sqrt(), (1 - signal):sqrt()
        local noise = (x - a * 0.4) / b
        return predict == "noise" and noise or a * noise - b * 0.4
      end)
      local what = schedule .. " " .. predict
      check.ok(process:loss(model, ty.full({ 64, 3 }, 0.4)):item() < 1e-4, what)
      local x = process:sample(model, { 4, 3 }, { steps = 7 })
      check.close(x:tolist(), ty.full({ 4, 3 }, 0.4):tolist(), 1e-4, what)
      check.close(process:sample(model, { 4, 3 }, { eta = 1 }):tolist(), x:tolist(), 1e-3, what .. " ancestral")
    end
  end
  local cosine = diffusion.DDPM().alpha_bar
  local function f(t) return math.cos((t + 0.008) / 1.008 * math.pi / 2) ^ 2 end
  check.close(cosine[1], f(0.001) / f(0), 1e-9)
  check.ok(cosine[1000] < 1e-6 and cosine[500] > 0.45 and cosine[500] < 0.55, "cosine falls from 1 to 0")
  check.close(diffusion.DDPM({ schedule = "linear" }).alpha_bar[1000], 4.0358e-5, 1e-8)
end)

check.test("ancestral sampling keeps the variance", function()
  local process = diffusion.DDPM { steps = 100 }
  local s = 0.3
  local model = model_of(function(x, t) -- the noise given x for data from N(0, s^2)
    local signal = signal_at(process, t)
    return x * (1 - signal):sqrt() / (signal * s ^ 2 + 1 - signal)
  end)
  ty.manual_seed(1)
  for _, eta in ipairs { 0, 0.5, 1 } do
    local x = process:sample(model, { 4000, 1 }, { steps = 100, eta = eta, clip = false })
    check.close(x:std():item(), s, 0.03, "eta " .. eta)
  end
end)

check.test("guidance and dropped labels", function()
  local seen
  local model = model_of(function(x, _, labels)
    seen = labels:numel()
    return labels:to("f32"):reshape(-1, 1) + x * 0
  end, 10)
  local labels, x, t = ty.tensor { 2, 4 }, ty.zeros(2, 1), ty.zeros(2)
  check.equal(diffusion.guided(model, labels, 1, 10)(x, t):tolist(), { { 2 }, { 4 } })
  check.equal(seen, 2, "without guidance one call on the batch itself")
  check.equal(diffusion.guided(model, labels, 3, 10)(x, t):tolist(), { { 10 + 3 * (2 - 10) }, { 10 + 3 * (4 - 10) } })
  ty.manual_seed(2)
  local dropped = diffusion.drop_labels(ty.zeros({ 10000 }, { dtype = "i64" }), 0.1, 10)
  check.equal(dropped.dtype, "i64")
  check.close(dropped:eq(10):to("f32"):mean():item(), 0.1, 0.015)
  check.equal(diffusion.drop_labels(labels, 0, 10):tolist(), { 2, 4 })
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
