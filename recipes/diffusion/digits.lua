-- Handwritten digits, drawn by flow matching
-- claim: a class-conditional flow model draws digits that a classifier recognises, as varied as real ones
-- system: flow matching with classifier-free guidance
-- paper: Lipman et al. 2023, "Flow Matching for Generative Modeling"; Ho and Salimans 2022, "Classifier-Free Guidance"
-- time: a minute on two CPU cores
--
-- The judge is a classifier that never sees what it is tested on, neither the held-out digits nor the drawn ones. That
-- the drawn digits are no copies of the training set is told by their distance to its nearest image, which stands
-- beside that of held-out digits in the metrics.
local ty = require "tycho"
local diffusion = require "tycho.diffusion"
local vision = require "tycho.vision"

local r = ty.recipe.declare {
  seeds = 1,
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
local flow = diffusion.Flow()

-- A model trained with a seed (the average of its weights), and the loss of each step.
local function train(seed, out, resume)
  local model
  if args.model == "unet" then
    model = diffusion.UNet {
      levels = { args.width, { channels = 2 * args.width, attention = true } }, classes = 10, dropout = 0.1,
    }
  else
    model = diffusion.DiT { width = 4 * args.width, classes = 10 }
  end
  model:to(r.device)
  r:say("seed %d: %s with %d parameters", seed, args.model, model:count_parameters())
  local opt = optim.AdamW(model:parameters(), {
    lr = args.lr, beta2 = 0.99, clip_norm = 1.0,
    schedule = optim.cosine { steps = args.steps, warmup = math.min(50, args.steps // 4) },
  })
  local ema = optim.EMA(model, { decay = 0.995 })
  local loader = ty.data.DataLoader(training,
    { batch_size = args.batch, shuffle = true, seed = seed, drop_last = true, device = r.device })

  local folder = out .. "/checkpoint"
  local parts = { model = model, optimizer = opt, ema = ema, loader = loader }
  local losses, start = {}, 0
  local saved = ty.train.resume_checkpoint(folder, parts, resume)
  if saved then
    losses, start = saved.losses:tolist(), saved.step
    r:say("resumed at step %d", start)
  end
  local logger = ty.train.Logger(out, { resume = start })
  for step, batch, log in ty.train.steps(loader, args.steps, { start = start, title = "flow", logger = logger }) do
    local loss = flow:loss(model:train(), batch.image, { labels = batch.label })
    opt:step(loss)
    ema:update()
    losses[step] = loss:item()
    log { loss = losses[step] }
    if step % args.save_every == 0 or step == args.steps then
      parts.step, parts.losses = step, ty.tensor(losses, { dtype = "f64" })
      ty.train.save_checkpoint(folder, parts)
    end
  end
  logger:close()
  ema.model:save(out .. "/model.safetensors")
  return ema.model, losses
end

-- The judge: a classifier of real digits.
local function judge(seed)
  local classifier = vision.ResNet {
    in_channels = 1, classes = 10, small = true, channels = { 32, 64 }, blocks = { 1, 1 }, dropout = 0.2,
  }
  classifier:to(r.device)
  vision.fit(classifier, training, { steps = args.classifier_steps, seed = seed })
  return classifier
end

local function draw_loss(losses, path)
  ty.plot.line {
    y = losses, smooth = 20, label = "each step, smoothed",
    title = "Flow matching loss", x_label = "step", y_label = "mean square error",
  }:save(path .. ".svg"):save(path .. ".png")
end

local measure = diffusion.measure
local real = training:batch(ty.arange(#training))
local real_spread = measure.spread_within_classes(real.image, real.label, 10)
local unseen = held_out:batch(ty.arange(#held_out)).image
local labels = ty.arange(args.samples) % 10
local read, recognised, spreads, smallest, nearest = {}, {}, {}, {}, {}
for i, seed in ipairs(r.seeds) do
  local out = i == 1 and r.out or r:path("seed" .. seed)
  ty.manual_seed(seed)
  local model, losses = train(seed, out, args.resume and (i == 1 or "auto")) -- a break leaves later seeds unbegun
  local began = r:seconds()
  local samples = flow:sample(model, { args.samples, 1, 8, 8 }, {
    condition = { labels = labels:to(r.device) }, guidance = args.guidance, steps = args.sample_steps,
  }):clamp(-1, 1):to "cpu"
  r:say("%d images in %.1f s", args.samples, r:seconds() - began)
  local name = i == 1 and r:picture "samples.png" or out .. "/samples.png"
  ty.plot.grid(samples:narrow(0, 0, math.min(100, args.samples)), { columns = 10, scale = 5, invert = true }):save(name)
  draw_loss(losses, out .. "/loss")

  local classifier = judge(seed)
  read[i] = vision.accuracy(classifier, held_out)
  recognised[i] = vision.predict(classifier, samples):eq(labels):to("f64"):mean():item()
  local spread
  spread, smallest[i] = measure.spread_within_classes(samples, labels, 10)
  spreads[i], nearest[i] = spread / real_spread, measure.nearest(samples, real.image)
end
r.metrics.nearest_training_image = nearest
r.metrics.nearest_training_image_of_held_out = measure.nearest(unseen, real.image)

os.exit(r:finish {
  { claim = "the judge reads held-out real digits", values = read, bar = 0.97 },
  { claim = "drawn digits recognised as asked", values = recognised, bar = 0.95 },
  { claim = "spread within a class, against real digits", values = spreads, bar = 0.7 },
  { claim = "smallest distance between two of a class", values = smallest, bar = 1e-3 },
}, true)
