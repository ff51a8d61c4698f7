-- Super-resolution: the sub-pixel convolution against a transposed one, luminance and colours, figures, learning,
-- mistakes.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local models, vision = require "tycho.models", require "tycho.vision"
local sr = vision.super_resolution

check.test("channels that become pixels are a transposed convolution", function()
  for scale = 2, 3 do
    local model = models.ESPCN { scale = scale, widths = { 5 }, kernels = { 3, 3 } }:to "f64"
    local x = ty.rand({ 1, 1, 6, 7 }, { dtype = "f64" })
    local inner = model.layers[1](ty.pad(x, { 2, 2, 2, 2 }, "replicate")):tanh()
    local w, k = model.layers[2].weight:detach(), 3
    local turned = ty.zeros({ 5, 1, scale * k, scale * k }, { dtype = "f64" })
    for a = 0, scale - 1 do
      for b = 0, scale - 1 do
        for u = 0, k - 1 do
          for v = 0, k - 1 do
            local from = w:select(0, a * scale + b):select(1, u):select(1, v)
            turned:select(2, a + scale * (k - 1 - u)):select(2, b + scale * (k - 1 - v)):copy_(from:unsqueeze(1))
          end
        end
      end
    end
    local want = ty.conv_transpose2d(inner, turned, nil, scale, scale * (k - 1))
    local bias = model.layers[2].bias:detach():reshape(1, scale * scale, 1, 1)
    local y = model(x)
    check.equal(y.shape, { 1, 1, scale * 6, scale * 7 })
    want = want + bias:expand(1, scale * scale, 6, 7):contiguous():pixel_shuffle(scale)
    check.ok((y - want):abs():max():item() < 1e-12)
  end
end)

check.test("an edge goes on beyond the picture: a flat one stays flat", function()
  for name in pairs { ESPCN = 1, SRCNN = 1 } do
    local y = models[name] { scale = 2, widths = { 4, 3 } }(ty.full({ 1, 1, 5, 6 }, 0.3))
    check.equal(y.shape, { 1, 1, 10, 12 })
    for a = 0, 1 do -- each place of a cell by itself
      local cell = y:select(2, 4 + a)
      check.ok((y:narrow(2, a, 1) - cell:unsqueeze(2)):abs():max():item() < 1e-5, name)
    end
  end
end)

check.test("luminance, and colours through it and back", function()
  local white = sr.luminance(ty.full({ 1, 3, 2, 2 }, 255, { dtype = "u8" }))
  check.close(white:tolist(), { { { { 1, 1 }, { 1, 1 } } } }, 1e-5)
  local red = ty.zeros(1, 3, 1, 1)
  red:select(1, 0):fill_(1)
  check.close(sr.luminance(red):item(), 0.299, 1e-6)
  -- A network that enlarges by nearest pixels, and colours of one kind: what comes back is what went in.
  local flat = ty.stack({ ty.full({ 4, 5 }, 200), ty.full({ 4, 5 }, 30), ty.full({ 4, 5 }, 90) }, 0):to "u8"
  local model = setmetatable({ config = { scale = 3 } }, { __call = function(_, x)
    return ty.interpolate(x, { scale = 3, mode = "nearest" })
  end })
  local large = sr.enlarge(model, flat)
  check.equal({ large.dtype, large.shape }, { "u8", { 3, 12, 15 } })
  check.equal({ large:select(0, 0):max():item(), large:select(0, 1):min():item(), large:select(0, 2):max():item() },
    { 200, 30, 90 })
end)

check.test("what is made smaller, and how far pictures are apart", function()
  local small, large = sr.reduce(ty.rand(2, 1, 11, 7), 3)
  check.equal({ small.shape, large.shape }, { { 2, 1, 3, 2 }, { 2, 1, 9, 6 } })
  local x = ty.full({ 1, 1, 6, 6 }, 0.5)
  local off = x:clone()
  off:select(2, 0):fill_(1)
  check.close(sr.decibels(x, x + 0.1):item(), 20, 1e-3)
  check.close(sr.decibels(x, off):item(), -10 * math.log(0.25 / 6, 10), 1e-3)
  check.close(sr.decibels(x, off, 1):item(), 100, 1e-3)
end)

-- Waves, which bicubic interpolation does not follow.
local Waves = ty.data.class "Waves"
function Waves:get(i)
  local t = ty.arange(24):to "f32" * (1.2 + i % 3 * 0.1) + i
  local line = (t:sin() * 100 + 128):to "u8"
  return { image = line:expand(3, 24, 24):contiguous() }
end

check.test("it learns what interpolation does not do", function()
  ty.manual_seed(0)
  local set = setmetatable({ size = 30 }, Waves)
  local model = models.ESPCN { scale = 2, widths = { 16, 8 } }
  local losses = sr.fit(model, set, { steps = 200, lr = 5e-3, batch = 8 })
  check.equal(#losses, 200)
  local own, bicubic, each, plain = sr.psnr(model, set)
  check.ok(own > bicubic + 1, ("%g %g"):format(own, bicubic))
  check.close({ ty.stats.mean(each), ty.stats.mean(plain) }, { own, bicubic }, 1e-9)
end)

check.test("mistakes", function()
  check.fails(function() models.ESPCN { scale = 1 } end, "ESPCN: scale: expected an integer >= 2, got 1")
  check.fails(function() models.ESPCN { kernels = { 5, 4, 3 } } end, "kernels: expected odd sizes, got 4 at place 2")
  check.fails(function() models.SRCNN { widths = { 8 } } end, "SRCNN: kernels: expected one more than the 1 widths")
  check.fails(function() models.ESPCN()(ty.ones(1, 3, 4, 4)) end, "ESPCN: x: expected %[n, 1, h, w%]")
  check.fails(function() sr.luminance(ty.ones(3, 4, 4)) end, "luminance: x: expected %[n, 3, h, w%]")
  check.fails(function() sr.reduce(ty.ones(1, 1, 2, 9), 3) end, "reduce: x: expected .* of at least 3 pixels")
  check.fails(function() sr.decibels(ty.ones(1, 1, 4, 4), ty.ones(1, 1, 4, 5)) end, "of one size above 0 pixels")
  check.fails(function() sr.enlarge(models.ESPCN(), ty.ones(1, 4, 4)) end, "picture: expected %[3, h, w%]")
  check.fails(function() sr.fit(models.ESPCN(), {}) end, "super_resolution.fit: crops: expected a data set with pic")
  check.fails(function() sr.psnr(models.ESPCN(), {}) end, "super_resolution.psnr: photos: expected a data set with pic")
  check.fails(function() sr.fit(models.ESPCN(), {}, { steps = 0 }) end, "steps: expected an integer >= 1")
end)

check.finish()
