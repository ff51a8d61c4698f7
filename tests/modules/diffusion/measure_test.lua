-- Measures of pictures and of sets of samples, beside scikit-image, pytorch-msssim, scipy and torchmetrics
-- (tests/fixtures/make_measures.py) and beside plain loops.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local measure = require("tycho.diffusion").measure

local expected = ty.io.load(check.root .. "tests/fixtures/measures.json")

-- As wave() and features() in the script.
local function wave(shape, offset, step, scale)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  local i = ty.arange(n):to "f64"
  return ((i * (step or 0.37) + (i * 0.013):cos() * 3 + offset):sin() * (scale or 0.5) + 0.5):reshape(shape)
end
local function features(n, width, offset)
  return wave({ n, width }, offset, 1.7 + offset / 10, 2.0) * (ty.arange(width):to "f64" / width + 1)
end

check.test("structural similarity", function()
  local a, b = wave({ 2, 3, 24, 31 }, 0), wave({ 2, 3, 24, 31 }, 0.4, nil, 0.45)
  check.close(measure.ssim(a, b):tolist(), expected.ssim, 1e-9)
  check.close(measure.ssim(a, a):tolist(), { 1, 1 }, 1e-12)
  check.close(measure.ssim(a * 255, b * 255, { range = 255 }):tolist(), expected.ssim, 1e-9)
  check.close(measure.ssim(b:to "f32", a:to "f32"):tolist(), expected.ssim, 1e-5)
  -- Constant pictures: luminance alone, (2 x y + c) / (x^2 + y^2 + c).
  local flat = measure.ssim(ty.full({ 1, 1, 12, 12 }, 0.5), ty.full({ 1, 1, 12, 12 }, 0.25))
  check.close(flat:item(), (2 * 0.125 + 1e-4) / (0.25 + 0.0625 + 1e-4), 1e-9)
  check.fails(function() measure.ssim(a, wave({ 2, 3, 24, 30 }, 0)) end,
    "measure.ssim: b: expected the shape of a, [2, 3, 24, 31], got a tensor [2, 3, 24, 30]")
  check.fails(function() measure.ssim(ty.zeros(2, 3, 8, 8), ty.zeros(2, 3, 8, 8)) end,
    "expected [n, c, h, w] with sides of at least 11, got a tensor [2, 3, 8, 8]")
end)

check.test("structural similarity over scales", function()
  local a, b = wave({ 2, 2, 177, 190 }, 0, 0.011), wave({ 2, 2, 177, 190 }, 0.3, 0.011, 0.4)
  check.close(measure.ms_ssim(a, b):tolist(), expected.ms_ssim, 1e-6) -- its window is in f32
  local x, y = wave({ 1, 1, 20, 20 }, 0), wave({ 1, 1, 20, 20 }, 0.2)
  check.close(measure.ms_ssim(x, y, { weights = { 1 } }):item(), measure.ssim(x, y):item(), 1e-12)
  check.fails(function() measure.ms_ssim(x, y) end, "with sides of at least 161, got a tensor [1, 1, 20, 20]")
end)

check.test("distance in the features of a network", function()
  local function net(x) return { x, x:square() } end
  local a, b = ty.randn(2, 3, 2, 2), ty.randn(2, 3, 2, 2)
  local want = {}
  for n = 1, 2 do
    want[n] = 0
    for _, layer in ipairs { { a, b }, { a:square(), b:square() } } do
      local x, y = layer[1]:tolist()[n], layer[2]:tolist()[n]
      for i = 1, 2 do
        for j = 1, 2 do
          local xx, yy, d = 0, 0, 0
          for c = 1, 3 do xx, yy = xx + x[c][i][j] ^ 2, yy + y[c][i][j] ^ 2 end
          for c = 1, 3 do d = d + (x[c][i][j] / math.sqrt(xx) - y[c][i][j] / math.sqrt(yy)) ^ 2 end
          want[n] = want[n] + d / 4
        end
      end
    end
  end
  check.close(measure.perceptual(a, b, net):tolist(), want, 1e-5)
  check.close(measure.perceptual(a, a * 3, net):tolist(), { 0, 0 }, 1e-6) -- lengths do not matter
end)

check.test("features are what modules put out, and the network stays as it was", function()
  local nn = ty.nn
  local model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(3, 2, 3)):train()
  local x = ty.randn(2, 1, 8, 8)
  local taps = measure.features(model, { "3", "0" })
  local found = taps(x)
  check.equal({ #found, found[1].shape, found[2].shape }, { 2, { 2, 2, 4, 4 }, { 2, 3, 6, 6 } })
  check.close(found[2]:tolist(), model:get "0" (x):tolist(), 1e-6)
  check.equal(taps(x)[1]:tolist(), found[1]:tolist()) -- no dropout
  check.ok(model.training)
  check.fails(function() measure.features(model, { "x" }) end,
    "measure.features: names[1]: expected the name of a module of the network, got x")
end)

check.test("Fréchet distance", function()
  local a, b = features(40, 6, 0), features(50, 6, 1)
  check.close(measure.frechet(a, b), expected.frechet, 1e-6)
  check.close(measure.frechet(measure.moments(a), b), expected.frechet, 1e-6)
  check.close(measure.frechet(a, a), 0, 1e-6)
  check.close(measure.frechet(a, a + 2), 24, 1e-6) -- means alone
  -- In one dimension: (m1 - m2)^2 + (s1 - s2)^2.
  local x, y = ty.tensor { { 0 }, { 2 } }, ty.tensor { { 5 }, { 11 } }
  check.close(measure.frechet(x, y), 49 + (math.sqrt(2) - math.sqrt(18)) ^ 2, 1e-9)
  check.fails(function() measure.frechet(a, features(9, 5, 0)) end,
    "measure.frechet: b: expected features of width 6 as those of a, got 5")
end)

check.test("kernel distance", function()
  local a, b = features(40, 6, 0), features(50, 6, 1)
  check.close(measure.kernel(a, b:narrow(0, 0, 40)), expected.kernel, 1e-9)
  local state = ty.rng_state()
  local mean, deviation = measure.kernel(a, b, { size = 20, subsets = 50 })
  check.equal(ty.rng_state(), state)
  check.equal({ measure.kernel(a, b, { size = 20, subsets = 50 }) }, { mean, deviation })
  check.close(mean, measure.kernel(a, b), 4 * deviation / math.sqrt(50) + 0.5)
  check.ok(deviation > 0)
  check.fails(function() measure.kernel(a, b, { size = 41 }) end, "measure.kernel: size: expected at most 40")
end)

check.test("precision and recall", function()
  local real, drawn, k = features(30, 3, 0), features(25, 3, 1), 3
  local function distance(x, y)
    local sum = 0
    for i = 1, #x do sum = sum + (x[i] - y[i]) ^ 2 end
    return sum
  end
  local function share(of, among)
    local count = 0
    for _, x in ipairs(of) do
      local inside = false
      for i, y in ipairs(among) do
        local others = {}
        for j, z in ipairs(among) do if j ~= i then others[#others + 1] = distance(y, z) end end
        table.sort(others)
        inside = inside or distance(x, y) <= others[k]
      end
      count = count + (inside and 1 or 0)
    end
    return count / #of
  end
  local precision, recall = measure.precision_recall(real, drawn)
  check.close(precision, share(drawn:tolist(), real:tolist()), 1e-12)
  check.close(recall, share(real:tolist(), drawn:tolist()), 1e-12)
  check.ok(precision > 0 and recall > 0 and precision < 1)
  check.equal({ measure.precision_recall(real, real) }, { 1.0, 1.0 })
  check.equal({ measure.precision_recall(real, drawn + 100) }, { 0.0, 0.0 })
  -- One point of the real ones, drawn again and again: precise, and recalls little.
  local one = real:narrow(0, 0, 1):expand { 25, 3 } + features(25, 3, 2) * 1e-3
  precision, recall = measure.precision_recall(real, one)
  check.ok(precision == 1 and recall < 0.2)
end)

check.test("alignment", function()
  local a = measure.alignment(ty.tensor { { 1, 0 }, { 3, 4 } }, ty.tensor { { 0, 2 }, { 3, 4 } })
  check.close(a:tolist(), { 0, 1 }, 1e-12)
end)

check.finish()
