-- Training in half precision, product by product
-- claim: a training step of the networks of MLPerf Tiny in bf16 takes two thirds of its time in f32, on the same curve
-- system: forward, input gradient and weight gradient as products of bf16 with f32 sums; MAC per clock of each
-- paper: Nadalini et al. 2023, "Reduced Precision Floating-Point Optimization for Deep Neural Network On-Device
--   Learning on MicroControllers"
-- time: 3 minutes on one CPU core
--
-- ResNet8 and DS-CNN, their batch norms folded, learn handwritten digits drawn as large as their inputs, from the same
-- weights on the same batches in both precisions; weights and AdamW's states are f32. The report has the
-- multiplications and additions per clock of every primitive. The paper's f32 is the same product by scalars; ours is
-- what the library does in f32 anyway: vectors twice as wide as its words, Winograd's transforms for 3x3 kernels, which
-- take a quarter of the products. Where these serve, bf16 goes through them too. What was tried for the steps: windows
-- as columns for all convolutions (three times slower than Winograd's), and a kernel for pointwise ones, by which they
-- come near twice the rate; what is left is activations, sums and depthwise convolutions, which have few products.
local ty = require "tycho"
local datasets, models, tiny = require "tycho.datasets", require "tycho.models", require "tycho.tiny"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 150, "of training", quick = 2 },
    { "batch", 32, "pictures", quick = 4 },
    { "rounds", 40, "of timing", quick = 1 },
    { "lr", 3e-3, "highest rate of AdamW" },
  },
}
local args = r.args
local has = tiny.has_bf16()
if not has then r:say("this processor has no instruction for products of bf16: times are not judged, counts stay") end

local set = datasets.load "digits"
local all = set:batch(ty.arange(#set))
local networks = {
  { name = "DS-CNN", new = function() return models.DSCNN { classes = 10, dropout = 0 } end, shape = { 1, 49, 10 } },
  { name = "ResNet8", shape = { 3, 32, 32 }, new = function()
    return models.ResNet { small = true, channels = { 16, 32, 64 }, blocks = { 1, 1, 1 }, classes = 10 }
  end },
}
local function loss_of(model, x, y) return ty.cross_entropy(model(x), y) end

-- A network whose norms, after some batches, went into its convolutions, and its step in a precision.
local function stepper(network, dtype, seed, images)
  ty.manual_seed(seed)
  local model = network.new()
  for k = 0, r.quick and 0 or 19 do
    ty.scope(ty.no_grad, function() model(images:narrow(0, k * args.batch, args.batch)) end)
  end
  tiny.fold(model, images:narrow(0, 0, 2))
  local optimizer = ty.optim.AdamW(model, { lr = args.lr, schedule = ty.optim.one_cycle { steps = args.steps } })
  return tiny.step(model, optimizer, loss_of, dtype), model
end

local ratios, apart, pointwise = {}, {}, {}
for _, network in ipairs(networks) do
  local size = { network.shape[2], network.shape[3] }
  local images = ty.interpolate(all.image, { size = size, mode = "bilinear" }):expand(-1, network.shape[1], -1, -1)
  images = ty.keep(images:contiguous())

  -- ---- the curves ----
  apart[network.name] = {}
  for i, seed in ipairs(r.seeds) do
    local curves = {}
    for _, dtype in ipairs { "f32", "bf16" } do
      local step = stepper(network, dtype, seed, images)
      ty.manual_seed(seed)
      curves[dtype] = {}
      for k = 1, args.steps do
        ty.scope(function()
          local at = ty.randperm(all.label.shape[1]):narrow(0, 0, args.batch)
          curves[dtype][k] = step(images:index_select(0, at), all.label:index_select(0, at)):item()
        end)
      end
    end
    -- means over tenths of the steps: what they differ by, of the f32 curve's area
    local difference, area, tenth = 0, 0, math.max(1, args.steps // 10)
    for first = 1, args.steps - tenth + 1, tenth do
      local sums = { f32 = 0, bf16 = 0 }
      for k = first, first + tenth - 1 do
        for dtype in pairs(sums) do sums[dtype] = sums[dtype] + curves[dtype][k] end
      end
      difference, area = difference + math.abs(sums.f32 - sums.bf16), area + sums.f32
    end
    apart[network.name][i] = difference / area
    r:say("%s, seed %d: the curves are %.2f %% apart, last losses %.4f and %.4f", network.name, seed,
      100 * difference / area, curves.f32[args.steps], curves.bf16[args.steps])
    if i == 1 then
      ty.plot.line { series = { { y = curves.f32, label = "f32" }, { y = curves.bf16, label = "bf16" } },
        title = network.name, x_label = "step", y_label = "loss" }
        :save(network.name == "ResNet8" and r:picture "mcu-fp16.png" or r:path "ds-cnn.png")
    end
  end

  -- ---- times ----
  local x, y = images:narrow(0, 0, args.batch), all.label:narrow(0, 0, args.batch)
  local steps, model = {}, nil
  for _, dtype in ipairs { "f32", "bf16" } do
    local step
    step, model = stepper(network, dtype, 0, images)
    steps[dtype] = function() return step(x, y) end
  end
  local _, times = r:time(steps, { rounds = args.rounds, warmup = 3 })
  for dtype, list in pairs(times) do times[dtype] = math.min(table.unpack(list)) end
  ratios[network.name] = times.f32 / times.bf16
  r.metrics[network.name .. "/f32/ms"], r.metrics[network.name .. "/bf16/ms"] = 1e3 * times.f32, 1e3 * times.bf16
  r:say("%s: a step of %d takes %.2f ms in f32, %.2f ms in bf16", network.name, args.batch, 1e3 * times.f32,
    1e3 * times.bf16)
  local report = tiny.primitives(model, x, { rounds = math.max(1, args.rounds // 4) })
  r:say("%s", report)
  for _, sum in ipairs(report:sums()) do
    local key = ("%s/%s/%s"):format(network.name, sum.form, sum.primitive)
    for dtype, seconds in pairs(sum.seconds) do
      r.metrics[key .. "/" .. dtype .. "/MAC per clock"] = sum.macs / seconds / report.clock
    end
    if network.name == "DS-CNN" and sum.form == "pointwise" then
      pointwise[#pointwise + 1] = sum.seconds.f32 / sum.seconds.bf16
    end
  end
end

os.exit(r:finish {
  { claim = "a step of DS-CNN, f32 over bf16", measured = ratios["DS-CNN"], bar = 1.5, judged = has },
  { claim = "a step of ResNet8, f32 over bf16", measured = ratios.ResNet8, bar = 1.5, judged = has },
  { claim = "pointwise products, f32 over bf16, the least of the three", measured = math.min(table.unpack(pointwise)),
    bar = 1.5, judged = has },
  { claim = "curves apart, DS-CNN", values = apart["DS-CNN"], bar = 0.02, below = true },
  { claim = "curves apart, ResNet8", values = apart.ResNet8, bar = 0.02, below = true },
}, true)
