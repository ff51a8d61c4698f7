-- Handwritten digits, drawn by flow matching
-- claim: a class-conditional flow model draws digits that a classifier recognises, as varied as real ones
-- system: flow matching with classifier-free guidance
-- paper: Lipman et al. 2023, "Flow Matching for Generative Modeling"; Ho and Salimans 2022, "Classifier-Free Guidance"
-- time: a minute on two CPU cores
local ty = require "tycho"
local diffusion = require "tycho.diffusion"
local vision = require "tycho.vision"

local r = ty.recipe.declare {
  title = "Handwritten digits, drawn by flow matching",
  claim = "drawn digits are recognised as the digit that was asked for, and are as varied as real ones",
  system = "flow matching with classifier-free guidance",
  paper = "Lipman et al. 2023, Flow Matching for Generative Modeling",
  time = "a minute on two CPU cores",
  args = {
    { "steps", 700, "training steps", quick = 12 },
    { "batch", 64, "images per step" },
    { "lr", 2e-3, "peak learning rate" },
    { "model", "unet", "the network: unet or dit", choices = { "unet", "dit" } },
    { "width", 32, "channels of the first resolution (unet), or a quarter of the width (dit)" },
    { "samples", 500, "images to draw", quick = 40 },
    { "guidance", 1.5, "strength of classifier-free guidance (1: none)" },
    { "sample_steps", 12, "steps of the sampler (Heun, two network calls each)", quick = 4 },
    { "classifier_steps", 500, "training steps of the classifier that judges", quick = 20 },
    { "save_every", 200, "steps between checkpoints" },
    { "resume", false, "go on from the checkpoint in the results folder" },
  },
}
local args, optim = r.args, ty.optim

local training, held_out = ty.data.digits { split = { 0.8, 0.2 }, seed = 0 }

local model
if args.model == "unet" then
  model = diffusion.UNet { channels = { args.width, 2 * args.width }, classes = 10, dropout = 0.1 }
else
  model = diffusion.DiT { width = 4 * args.width, classes = 10 }
end
if r.device ~= "cpu" then model:to(r.device) end
r:say("%s with %d parameters", args.model, model:count_parameters())

local flow = diffusion.Flow()
local opt = optim.AdamW(model:parameters(), {
  lr = args.lr, beta2 = 0.99, clip_norm = 1.0,
  schedule = optim.cosine { steps = args.steps, warmup = math.min(50, args.steps // 4) },
})
local ema = optim.EMA(model, { decay = 0.995 })
local loader = ty.data.DataLoader(training,
  { batch_size = args.batch, shuffle = true, seed = r.seed, drop_last = true, device = r.device })

local folder = r:path "checkpoint"
local parts = { model = model, optimizer = opt, ema = ema, loader = loader }
local losses, start = {}, 0
if args.resume and ty.train.has_checkpoint(folder) then
  local saved = ty.train.load_checkpoint(folder, parts)
  losses, start = saved.losses:tolist(), saved.step
  r:say("resumed at step %d", start)
end

local function save(step)
  parts.step, parts.losses = step, ty.tensor(losses, { dtype = "f64" })
  ty.train.save_checkpoint(folder, parts)
end

local logger = ty.train.Logger(r.out, { resume = start })
for step, batch, log in ty.train.steps(loader, args.steps, { start = start, title = "flow", logger = logger }) do
  local loss = flow:loss(model:train(), batch.image, batch.label)
  opt:step(loss)
  ema:update()
  losses[step] = loss:item()
  log { loss = losses[step] }
  if step % args.save_every == 0 or step == args.steps then save(step) end
end
logger:close()
ema.model:save(r:path "model.safetensors")

local labels = ty.arange(args.samples, { device = r.device }) % 10
local began = r:seconds()
local samples = flow:sample(ema.model, { args.samples, 1, 8, 8 },
  { labels = labels, guidance = args.guidance, steps = args.sample_steps }):clamp(-1, 1):to "cpu"
labels = labels:to "cpu"
r:say("%d images in %.1f s", args.samples, r:seconds() - began)

ty.plot.grid(samples:narrow(0, 0, math.min(100, args.samples)), { columns = 10, scale = 5, invert = true })
  :save(r:path "samples.png")
local smooth, sum = {}, nil
for i, loss in ipairs(losses) do
  sum = sum and 0.95 * sum + 0.05 * loss or loss
  smooth[i] = sum
end
ty.plot.line {
  series = { { y = losses, label = "each step", color = { 0.75, 0.82, 0.9 } }, { y = smooth, label = "smoothed" } },
  title = "Flow matching loss", x_label = "step", y_label = "mean square error",
}:save(r:path "loss.svg"):save(r:path "loss.png")

-- The judge never sees what it is tested on: neither the held-out digits nor the drawn ones.
local classifier = vision.ResNet {
  in_channels = 1, classes = 10, small = true, channels = { 32, 64 }, blocks = { 1, 1 }, dropout = 0.2,
}
if r.device ~= "cpu" then classifier:to(r.device) end
vision.fit(classifier, training, { steps = args.classifier_steps, seed = r.seed })
local recognised = vision.predict(classifier, samples):eq(labels):to("f64"):mean():item()

local measure = diffusion.measure
local real = training:batch(ty.arange(#training))
local spread, smallest = measure.spread_within_classes(samples, labels, 10)
local real_spread = measure.spread_within_classes(real.image, real.label, 10)
local unseen = held_out:batch(ty.arange(#held_out)).image
r.metrics.nearest_training_image = measure.nearest(samples, real.image)
r.metrics.nearest_training_image_of_held_out = measure.nearest(unseen, real.image)
r.metrics.final_loss = smooth[#smooth]

os.exit(r:finish {
  { claim = "the judge reads held-out real digits", measured = vision.accuracy(classifier, held_out), bar = 0.97 },
  { claim = "drawn digits recognised as asked", measured = recognised, bar = 0.95 },
  { claim = "spread within a class, against real digits", measured = spread / real_spread, bar = 0.7 },
  { claim = "smallest distance between two of a class", measured = smallest, bar = 1e-3 },
}, true)
