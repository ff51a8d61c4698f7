-- Larger pictures from convolutions of small ones
-- claim: sharper than bicubic interpolation and than a network on enlarged pictures, in a fraction of its time
-- system: ESPCN, whose last convolution makes channels that become pixels, three times as large in each direction
-- paper: Shi et al. 2016, "Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel Convolutional
--   Neural Network"
-- time: 15 minutes on one CPU core
--
-- Trained on crops of 25 photographs, measured on nine others, luminance alone, as in the paper; small pictures are
-- bicubic, antialiased. SRCNN (9-1-5, Dong et al. 2014) does as much on the enlarged picture; it gets a fifth of the
-- steps, which takes it as long. Each takes the best of its rates after a quarter of its steps, by the PSNR of the
-- photographs that it learns from.
local ty = require "tycho"
local datasets, models, vision = require "tycho.datasets", require "tycho.models", require "tycho.vision"
local sr = vision.super_resolution

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "scale", 3, "times as large", least = 2 },
    { "steps", 8000, "training steps of ESPCN", quick = 5 },
    { "slower", 5, "fewer steps of SRCNN, times" },
    { "batch", 16, "crops of a step", quick = 2 },
    { "side", 17, "pixels of a small crop" },
    { "photos", 25, "photographs of a part that are measured, at most", quick = 2 },
    { "rounds", 5, "measurements of which the median counts", quick = 1 },
    { "height", 1080, "rows of the pictures that are timed", quick = 90 },
    { "width", 1920, "columns of these", quick = 120 },
  },
}
local args, scale = r.args, r.args.scale
local held_out, learnt = datasets.load("photos", { split = "held_out" }), datasets.load "photos"

local function train(name, rate, steps, seed)
  ty.manual_seed(seed)
  local model = models[name] { scale = scale }:to(r.device)
  local crops = datasets.load("photos", { crop = scale * args.side, length = 20000, seed = seed })
  local began = r:seconds()
  sr.fit(model, crops, { steps = steps, lr = rate, batch = args.batch, device = r.device })
  return model, r:seconds() - began
end
local function psnr(model, photos) return sr.psnr(model:to "cpu", photos, args.photos) end

local networks = {
  { "ESPCN", args.steps, { 1e-3, 2e-3, 3e-3 } },
  { "SRCNN", math.max(1, args.steps // args.slower), { 1e-3, 2e-3, 4e-3 } },
}
local gain, trained, plain = {}, {}, nil
for _, network in ipairs(networks) do
  local name, steps, rates = table.unpack(network)
  local _, _, rate = ty.stats.best(r.quick and { rates[1] } or rates, function(lr)
    local found = psnr(train(name, lr, math.max(1, steps // 4), 100), learnt)
    r:say("%s, rate %g: %.3f dB on the photographs that it learns from", name, lr, found)
    return lr, found
  end)
  gain[name] = {}
  for i, seed in ipairs(r.seeds) do
    local model, seconds = train(name, rate, steps, seed)
    local own, bicubic, each, others = psnr(model, held_out)
    plain = others
    gain[name][i] = own - bicubic
    if i == 1 then trained[name] = { model = model, each = each } end
    r:say("%s, rate %g, seed %d: %.3f dB, bicubic %.3f; %d steps in %.0f s", name, rate, seed, own, bicubic, steps,
      seconds)
  end
end
for i = 0, #plain - 1 do
  r:say("%-14s bicubic %.2f, ESPCN %.2f, SRCNN %.2f dB", held_out:get(i).name, plain[i + 1], trained.ESPCN.each[i + 1],
    trained.SRCNN.each[i + 1])
end

-- ---- time ----

local small = ty.rand(1, 1, args.height // scale, args.width // scale):to(r.device)
local function drawing(model)
  model:to(r.device)
  return function() return ty.no_grad(function() return model(small) end) end
end
local times = r:time({ ESPCN = drawing(trained.ESPCN.model), SRCNN = drawing(trained.SRCNN.model),
  bicubic = function() return sr.bicubic(small, scale) end }, { rounds = args.rounds })
for _, name in ipairs { "bicubic", "ESPCN", "SRCNN" } do
  r:say("%-8s %.1f frames a second of %d x %d, %d threads", name, 1 / times[name], args.width, args.height,
    ty.threads())
  r.metrics["frames_per_second_" .. name] = 1 / times[name]
end

-- ---- what it looks like: bicubic, ESPCN, the photograph ----

local cells, model = {}, trained.ESPCN.model:to "cpu"
for _, i in ipairs { 0, 1, 3, 5 } do
  local image = held_out:get(i % #held_out).image
  local h, w = math.min(image.shape[2], 96 * scale // 3 * 3), math.min(image.shape[3], 96 * scale // 3 * 3)
  local top, left = (image.shape[2] - h) // 2, (image.shape[3] - w) // 2
  local truth = image:narrow(1, top, h):narrow(2, left, w):unsqueeze(0):to "f32" / 255
  local few, large = sr.reduce(truth, scale)
  local bytes = (few:squeeze(0) * 255):round():to "u8"
  local drawn = { sr.bicubic(few, scale):squeeze(0), sr.enlarge(model, bytes):to "f32" / 255, large:squeeze(0) }
  for _, x in ipairs(drawn) do
    cells[#cells + 1] = ty.interpolate(x:unsqueeze(0), { size = { 192, 192 }, mode = "bilinear" }):squeeze(0) * 2 - 1
  end
end
ty.plot.grid(ty.stack(cells, 0), { columns = 3 }):save(r:picture "espcn.png")

os.exit(r:finish {
  { claim = "PSNR of photographs never seen, above bicubic interpolation, dB", values = gain.ESPCN, bar = 0.4 },
  { claim = "the same above SRCNN, trained for as long, dB", values = ty.stats.differences(gain.ESPCN, gain.SRCNN),
    bar = 0 },
  { claim = "times as fast as SRCNN", measured = times.SRCNN / times.ESPCN, bar = 5 },
  { claim = ("frames a second, to %d x %d"):format(args.width, args.height), measured = 1 / times.ESPCN,
    judged = false },
  { claim = "SRCNN above bicubic interpolation, dB", values = gain.SRCNN, judged = false },
}, true)
