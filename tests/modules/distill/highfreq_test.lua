-- Bands of frequencies, edges, their distance, and HiPA's loss on low-rank adapters.
local here = (arg and arg[0]:match ".*/" or "tests/modules/distill/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, distill, models = require "tycho.diffusion", require "tycho.distill", require "tycho.models"
local peft = require "tycho.peft"

local F64 = { dtype = "f64" }
local flow = diffusion.Flow()

local function norm(x) return x:square():sum():item() end

local function same(a, b) return a:eq(b):all():item() end

-- cos(2 pi (k i / h + l j / w)) on h x w.
local function wave(h, w, k, l)
  local i, j = ty.arange(h):to "f64":unsqueeze(1) / h, ty.arange(w):to "f64":unsqueeze(0) / w
  return ((i * k + j * l) * (2 * math.pi)):cos():reshape(1, 1, h, w)
end

check.test("bands: they sum to the picture, are orthogonal, and part waves where they should", function()
  ty.manual_seed(1)
  for _, size in ipairs { { 8, 8 }, { 7, 9 }, { 6, 5 } } do
    local x = ty.randn({ 3, 2, table.unpack(size) }, F64)
    local low, high = distill.bands(x, 0.6)
    check.close((low + high - x):abs():max():item(), 0, 1e-12)
    check.close(norm(low) + norm(high), norm(x), 1e-9)
    check.ok(norm(low) > 0.05 * norm(x) and norm(high) > 0.05 * norm(x))
    local again, rest = distill.bands(high, 0.6)
    check.ok(norm(again) < 1e-20 and norm(rest - high) < 1e-20)
  end
  -- On 8 x 12: the wave (1, 2) is at sqrt((1 / 4)^2 + (2 / 6)^2) = 0.4167.
  local x = wave(8, 12, 1, 2)
  check.ok(norm(select(2, distill.bands(x, 0.41)) - x) < 1e-18 and norm(distill.bands(x, 0.42) - x) < 1e-18)
  local a, b = wave(8, 8, 0, 1), wave(8, 8, 4, 3)
  check.close(distill.swap_bands(a + 3 * b, 5 * a + 7 * b):flatten():tolist(), (a + 7 * b):flatten():tolist(), 1e-9)
end)

check.test("the spectrum: Parseval, white noise, one wave in its bin", function()
  ty.manual_seed(2)
  check.close(distill.spectrum(ty.randn({ 4000, 1, 8, 8 }, F64), 4):tolist(), { 1, 1, 1, 1 }, 0.06)
  local x = ty.randn({ 2, 3, 7, 6 }, F64)
  check.close(distill.spectrum(x, 1):item() * 42, norm(x) / 6, 1e-9)
  -- cos has two components of the 64 with the power 64 / 4 each; at 2 / 4 = 0.5, in the bin 0.35 to 0.71 of 4.
  local power = distill.spectrum(wave(8, 8, 0, 2), 4)
  check.ok(power:select(0, 1):item() > 0.5)
  check.close({ power:select(0, 0):item(), power:select(0, 2):item(), power:select(0, 3):item() }, { 0, 0, 0 }, 1e-12)
end)

check.test("edges: the slope of a ramp, nothing of a constant", function()
  local i, j = ty.arange(6):to "f64":unsqueeze(1), ty.arange(5):to "f64":unsqueeze(0)
  local ramp = (3 * i + 4 * j + 7):reshape(1, 1, 6, 5)
  local found = distill.edges(ramp)
  check.equal(found.shape, { 1, 1, 4, 3 })
  check.close(found:flatten():tolist(), ty.full({ 12 }, 5):tolist(), 1e-5)
  check.equal(distill.edges(ty.full({ 1, 2, 4, 4 }, 3, F64)):abs():max():item(), 0.0)
end)

check.test("the distance: 0 for a constant more; low waves count by edges alone; gradients are right", function()
  ty.manual_seed(3)
  local x = ty.randn({ 2, 2, 8, 8 }, F64)
  check.close(distill.high_distance(x, x + 0.7):item(), 0, 1e-5)
  local low = wave(8, 8, 1, 0):expand(2, 2, 8, 8)
  check.close(distill.high_distance(x, x + low, { edges = 0 }):item(), 0, 1e-5)
  check.ok(distill.high_distance(x, x + low):item() > 0.01)
  -- A wave beyond the radius: two components of length sqrt(64) / 2, over those there are.
  local count = 0
  for k = 0, 7 do
    for l = 0, 7 do
      if math.sqrt(math.min(k, 8 - k) ^ 2 + math.min(l, 8 - l) ^ 2) / 4 >= 0.5 then count = count + 1 end
    end
  end
  check.close(distill.high_distance(x, x + wave(8, 8, 3, 1), { edges = 0 }):item(), 8 / count, 1e-5)
  local y = ty.randn({ 1, 1, 5, 6 }, F64)
  check.ok(ty.gradcheck(function(a) return distill.high_distance(a, y, { radius = 0.4 }) end,
    { ty.randn({ 1, 1, 5, 6 }, F64):requires_grad_() }))
end)

local function network()
  ty.manual_seed(4)
  local model = models.TimeMLP { features = 16, width = 16, depth = 1, classes = 2, waves = 8 }
  for _, p in ipairs(model:parameters()) do p:detach():normal_(0, 0.3) end
  return model
end

check.test("HiPA's loss trains adapters alone; at zero they are the base, merged they stay", function()
  local base, model = network(), network()
  peft.lora(model, { rank = 2, alpha = 2, targets = "all-linear" })
  local noise, labels = ty.randn(32, 1, 4, 4), ty.arange(32) % 2
  local condition = { labels = labels }
  check.ok(same(distill.one_step(model, flow, noise, condition), distill.one_step(base, flow, noise, condition)))
  local pairs_of = { noise = noise, sample = ty.randn(32, 1, 4, 4), ["condition.labels"] = labels }
  local drawn = distill.one_step(base, flow, noise, condition)
  local squares, high = ty.mse_loss(drawn, pairs_of.sample):item(),
    distill.high_distance(drawn, pairs_of.sample, { radius = 0.7, edges = 2 }):item()
  local loss, both = distill.hipa_loss(flow, { weight = 3, radius = 0.7, edges = 2 })({ student = model }, pairs_of)
  check.close(loss:item(), squares + 3 * high, 1e-4)
  check.close({ both.perceptual:item(), both.high:item() }, { squares, high }, 1e-5)
  check.close(distill.hipa_loss(flow, { weight = 0, perceptual = function(a, b)
    return (a - b):abs():flatten(1):mean { 1 } -- one for each picture
  end, decode = function(x) return x * 2 end })({ student = model }, pairs_of):item(),
    2 * (drawn - pairs_of.sample):abs():mean():item(), 1e-5)
  local loader = ty.data.DataLoader(ty.data.TensorDataset(pairs_of), { batch_size = 32, shuffle = false })
  local losses = distill.fit(model, loader, { steps = 60, lr = 0.02, weight_decay = 0, quiet = true,
    loss = distill.hipa_loss(flow) })
  check.ok(losses[60] < 0.9 * losses[1], ("%g of %g"):format(losses[60], losses[1]))
  local before = distill.one_step(model, flow, noise, condition)
  check.ok(not same(before, drawn))
  peft.merge(model)
  check.close(distill.one_step(model, flow, noise, condition):flatten():tolist(), before:flatten():tolist(), 1e-3)
  peft.unmerge(model)
  peft.remove(model)
  check.close(distill.one_step(model, flow, noise, condition):flatten():tolist(), drawn:flatten():tolist(), 1e-4)
end)

check.test("what is refused", function()
  local x = ty.ones(1, 1, 4, 4)
  check.fails(function() distill.bands(ty.ones(3)) end, "distill.bands: x: expected [n, c, h, w], got a tensor [3]")
  check.fails(function() distill.bands(x, 0) end, "radius: expected a finite number > 0 or nil, got 0")
  check.fails(function() distill.swap_bands(x, ty.ones(1, 1, 4, 5)) end, "high: expected [1, 1, 4, 4]")
  check.fails(function() distill.edges(ty.ones(1, 1, 2, 4)) end, "distill.edges: x: expected sides of at least 3")
  check.fails(function() distill.high_distance(x, x, { radius = 9 }) end, "radius: expected some components beyond")
  check.fails(function() distill.hipa_loss(diffusion.DDPM()) end, "flow: expected a process that predicts")
  check.fails(function() distill.hipa_loss(flow, { weight = -1 }) end, "weight: expected a finite number >= 0")
  check.fails(function() distill.spectrum(x, 0) end, "distill.spectrum: bins: expected an integer >= 1 or nil, got 0")
end)

check.finish()
