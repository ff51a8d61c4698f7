-- Characteristic functions against sums over samples and the closed form of a normal distribution; the discrepancy's
-- parts; distilling by features.
local here = arg and arg[0]:match ".*/" or "tests/modules/curation/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local curation = require "tycho.curation"
local models = require "tycho.models"
local characteristic, matching = curation.characteristic, curation.matching

local f64 = { dtype = "f64" }
ty.manual_seed(5)

check.test("with weights of 1 it is the distance of complex numbers, summed up one by one", function()
  local real, small, t = ty.randn({ 2, 7, 3 }, f64), ty.randn({ 2, 4, 3 }, f64), ty.randn({ 5, 3 }, f64)
  local got = characteristic.discrepancy(real, small, t, { amplitude = 1, phase = 1 }):tolist()
  local x, y, f = real:tolist(), small:tolist(), t:tolist()
  local function value(samples, frequency)
    local re, im = 0, 0
    for _, s in ipairs(samples) do
      local angle = 0
      for j, a in ipairs(s) do angle = angle + a * frequency[j] end
      re, im = re + math.cos(angle) / #samples, im + math.sin(angle) / #samples
    end
    return re, im
  end
  for c = 1, 2 do
    local sum = 0
    for _, frequency in ipairs(f) do
      local a, b = value(x[c], frequency)
      local d, e = value(y[c], frequency)
      sum = sum + math.sqrt((a - d) ^ 2 + (b - e) ^ 2) / 5
    end
    check.close(got[c], sum, 1e-6)
  end
end)

check.test("a normal distribution has the characteristic function that is known", function()
  local x = ty.randn({ 200000, 2 }, f64) * 0.7 + 1
  local t = ty.tensor({ { 0.5, 0.0 }, { 1.0, -0.5 }, { 0.0, 2.0 } }, f64)
  local re, im = characteristic.value(x, t)
  for k, row in ipairs(t:tolist()) do
    local mean, size = row[1] + row[2], math.exp(-0.5 * 0.49 * (row[1] ^ 2 + row[2] ^ 2))
    check.close(re:tolist()[k], size * math.cos(mean), 0.01)
    check.close(im:tolist()[k], size * math.sin(mean), 0.01)
  end
end)

check.test("amplitude does not see where samples are, phase alone does not see how they vary about 0", function()
  local x = ty.randn({ 500, 3 }, f64)
  x = ty.concat({ x, -x }, 0) -- symmetric: phases are 0 where amplitudes are real and above 0
  local t = ty.randn({ 64, 3 }, f64) * 0.3
  local only_amplitude, only_phase = { amplitude = 1, phase = 0 }, { amplitude = 0, phase = 1 }
  check.ok(characteristic.discrepancy(x, x + 1, t, only_amplitude):item() < 1e-5)
  check.ok(characteristic.discrepancy(x, x + 1, t, only_phase):item() > 0.1)
  check.ok(characteristic.discrepancy(x, x * 2, t, only_phase):item() < 1e-5)
  check.ok(characteristic.discrepancy(x, x * 2, t, only_amplitude):item() > 0.1)
  -- What means cannot tell apart.
  check.ok(matching.means(x, x * 2):item() < 1e-12)
  check.ok(matching.means(x, x + 1):item() > 1)
end)

check.test("its gradient is that of finite differences, by features and by frequencies; none is lost at 0", function()
  local real, small, t = ty.randn({ 6, 3 }, f64), ty.randn({ 4, 3 }, f64), ty.randn({ 5, 3 }, f64)
  local function far(s, f) return characteristic.discrepancy(real, s, f) end
  local s, f = small:clone():requires_grad_(), t:clone():requires_grad_()
  local grads = ty.grad(far(s, f), { s, f })
  local h = 1e-6
  for which, x in ipairs { small, t } do
    local function at(change)
      local moved = x:clone()
      moved:view(-1):narrow(0, 4, 1):add_(change)
      return (which == 1 and far(moved, t) or far(small, moved)):item()
    end
    check.close(grads[which]:flatten():tolist()[5], (at(h) - at(-h)) / (2 * h), 1e-7)
  end
  local same = real:clone():requires_grad_()
  local zero = ty.grad(characteristic.discrepancy(real, same, t), { same })[1]
  check.ok(zero:abs():max():item() < 1e-3)
end)

check.test("a sampler that goes up finds frequencies at which sets are further apart than random ones", function()
  ty.manual_seed(8)
  local x, y = ty.randn(256, 4), ty.randn(256, 4)
  y:narrow(1, 0, 1):mul_(3) -- they differ along one direction
  local sampler = characteristic.Sampler(4)
  local rises = ty.optim.Adam(sampler:parameters(), { lr = 1e-2 })
  local before = characteristic.discrepancy(x, y, sampler(128)):item()
  ty.train.minimize(rises, 60, function() return -characteristic.discrepancy(x, y, sampler(128)) end)
  local after = characteristic.discrepancy(x, y, sampler(128)):item()
  check.ok(after > 1.2 * before, after / before)
  local t = sampler(16)
  check.equal(t.shape, { 16, 4 })
  check.ok(t:abs():max():item() <= 1)
end)

check.test("pictures are brought to the real ones of their class, by both distances", function()
  for _, by in ipairs { "means", "characteristic" } do
    ty.manual_seed(2)
    local model = models.ConvNet { in_channels = 1, size = 4, classes = 2, width = 8, blocks = 1 }
    local networks = {}
    for i = 1, 2 do
      networks[i] = {}
      for k, p in ipairs(model:parameters()) do networks[i][k] = p:detach():clone() end
      model = models.ConvNet { in_channels = 1, size = 4, classes = 2, width = 8, blocks = 1 }
    end
    local n = 40
    local label = ty.arange(n) % 2
    local pattern = ty.randn(2, 1, 4, 4)
    local real = { image = pattern:index_select(0, label) + ty.randn(n, 1, 4, 4) * 0.1, label = label }
    local set = { image = ty.randn(4, 1, 4, 4), label = ty.tensor({ 0, 0, 1, 1 }, { dtype = "i64" }) }
    local function away(s)
      return (s.image - pattern:index_select(0, s.label)):square():mean():item()
    end
    local found, losses = matching.distil(model, networks, real, set, { by = by, rounds = 150, frequencies = 64,
      image_lr = 0.1 })
    check.equal(#losses, 150)
    check.ok(away(found) < 0.9 * away(set), by .. " " .. away(found) / away(set))
    check.ok(losses[150] < losses[1])
    check.fails(function()
      matching.distil(model, networks, real, { image = set.image, label = ty.arange(4) % 2 }, { by = by })
    end, "set: expected as many pictures of each of 2 classes, in their order")
  end
end)

check.finish()
