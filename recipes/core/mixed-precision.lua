-- Mixed precision: half the bits, the same accuracy, and what an epoch takes of energy
-- claim: a classifier trained in bf16, or in f16 with scaled losses, is as accurate as in f32; energy is reported
-- system: autocast, scaling of losses, and a meter of energy (RAPL, NVML, or a model that says so)
-- paper: Antonopoulos 2024, "Improve Machine Learning carbon footprint using Nvidia GPU and Mixed Precision training
--   for classification models -- Part I"
-- time: 2 minutes on a CPU core
--
-- The same network from the same weights, on the same batches, for the same epochs: parameters and the optimizer's
-- states are f32 in all three, products and convolutions are not. Accuracy is of held-out digits, at the end, and so
-- is the loss, which tells more where few digits are missed. The precisions take turns epoch by epoch, so that what
-- else the machine does meets them alike. Energy is what the meter says; where the machine has no counter it is a model
-- of processor seconds and memory, which cannot see that arithmetic of fewer bits takes less energy a second: it says
-- what the time says. The run names which it was, and energy is not judged: that depends on whether a processor
-- multiplies halves in hardware.
local ty = require "tycho"
local vision = require "tycho.vision"
local nn, optim, stats = ty.nn, ty.optim, ty.stats

local r = ty.recipe.declare { seeds = 3, args = {
  { "epochs", 8, "of all three precisions", quick = 1 },
  { "width", 32, "channels of the first stage", quick = 8 },
  { "batch", 32, "pictures of a batch" },
  { "lr", 2e-3, "highest rate of AdamW" },
} }
local a = r.args
local precisions = { "f32", "bf16", "f16" }

-- An epoch of one network; returns the meter's reading.
local function epoch(run, order, images, labels)
  local meter = ty.energy.meter { device = r.device }
  run.model:train()
  for first = 0, order.shape[1] - a.batch, a.batch do
    ty.scope(function()
      local rows = order:narrow(0, first, a.batch)
      local x, y = images:index_select(0, rows), labels:index_select(0, rows)
      local function loss() return nn.cross_entropy(run.model(x), y) end
      if run.precision == "f32" then run.opt:step(loss())
      else run.scaler:step(run.opt, ty.autocast(run.precision, loss)) end
    end)
  end
  r:wait()
  return meter:read()
end

local accuracy, loss_of, joules, seconds = {}, {}, {}, {}
for _, precision in ipairs(precisions) do
  accuracy[precision], loss_of[precision], joules[precision], seconds[precision] = {}, {}, {}, {}
end

-- Cross entropy of a whole data set, in f32.
local function loss_over(model, dataset)
  local indices = {}
  for n = 1, #dataset do indices[n] = n - 1 end
  local all = dataset:batch(indices)
  return ty.no_grad(function()
    return nn.cross_entropy(model(all.image:to(r.device)), all.label:to(r.device)):item()
  end)
end
local said
for i, seed in ipairs(r.seeds) do
  local training, held_out = ty.data.digits { split = { 0.8, 0.2 }, seed = seed }
  local count = r.quick and 256 or #training
  local indices = {}
  for n = 1, count do indices[n] = n - 1 end
  local all = training:batch(indices)
  local images, labels = all.image:to(r.device), all.label:to(r.device)
  local runs = {}
  for k, precision in ipairs(precisions) do
    ty.manual_seed(seed)
    local model = vision.ResNet { in_channels = 1, classes = 10, small = true, channels = { a.width, 2 * a.width },
      blocks = { 1, 1 } }
    model:to(r.device)
    local steps = a.epochs * (count // a.batch)
    runs[k] = { precision = precision, model = model, scaler = optim.GradScaler { enabled = precision == "f16" },
      opt = optim.AdamW(model:parameters(), { lr = a.lr, schedule = optim.one_cycle { steps = steps } }) }
    joules[precision][i], seconds[precision][i] = 0, 0
  end
  for n = 1, a.epochs do
    ty.manual_seed(1000 * seed + n)
    local order = ty.randperm(count):to { device = r.device }
    for _, run in ipairs(runs) do
      local reading = epoch(run, order, images, labels)
      said = reading
      joules[run.precision][i] = joules[run.precision][i] + reading.joules / a.epochs
      seconds[run.precision][i] = seconds[run.precision][i] + reading.seconds / a.epochs
    end
  end
  for _, run in ipairs(runs) do
    run.model:eval()
    accuracy[run.precision][i] = 100 * vision.accuracy(run.model, held_out)
    loss_of[run.precision][i] = loss_over(run.model, held_out)
    r:say("seed %d, %-4s: %.2f %% of %d held-out digits, loss %.4f, an epoch %.2f J in %.2f s", seed, run.precision,
      accuracy[run.precision][i], #held_out, loss_of[run.precision][i], joules[run.precision][i],
      seconds[run.precision][i])
  end
end
r:say("the meter: %s", tostring(said))

local function against_f32(values, of, how)
  local list = {}
  for i, x in ipairs(values[of]) do list[i] = how(x, values.f32[i]) end
  return list
end
local function minus(x, y) return x - y end
local function over(x, y) return x / y end
local source = said.measured and "measured" or "a model"
local rows = {
  { claim = "held-out accuracy, bf16, points above f32", values = against_f32(accuracy, "bf16", minus),
    baseline = stats.mean(accuracy.f32), bar = -0.5 },
  { claim = "held-out accuracy, f16 with scaled losses, points above f32",
    values = against_f32(accuracy, "f16", minus), baseline = stats.mean(accuracy.f32), bar = -0.5 },
  { claim = "held-out loss, bf16, of f32's", values = against_f32(loss_of, "bf16", over),
    baseline = stats.mean(loss_of.f32), bar = 1.05, below = true },
  { claim = "held-out loss, f16 with scaled losses, of f32's", values = against_f32(loss_of, "f16", over),
    baseline = stats.mean(loss_of.f32), bar = 1.05, below = true },
}
for _, precision in ipairs(precisions) do
  rows[#rows + 1] = { claim = ("energy of an epoch, %s, J"):format(precision), values = joules[precision],
    judged = false }
end
for _, precision in ipairs { "bf16", "f16" } do
  rows[#rows + 1] = { claim = ("energy of an epoch, %s, of f32's"):format(precision),
    values = against_f32(joules, precision, over), judged = false }
  r.metrics[precision .. "_seconds_of_f32"] = stats.mean(against_f32(seconds, precision, over))
end
r.metrics.energy_is = source
r:say("energy is %s", said.measured and "measured" or "a model, not measured: this machine shows no counter")
os.exit(r:finish(rows), true)
