-- Large pictures by way of small ones: full size, low size, full size
-- claim: twice as fast as sampling at full size throughout, with pictures as near to real ones and to their captions
-- system: Bottleneck Sampling on a text-to-image transformer of the zoo, at 128 x 128 pixels by way of 64 x 64
-- paper: Tian et al. 2025, "Training-free Diffusion Acceleration with Bottleneck Sampling"
-- time: 9 minutes on one CPU core with AVX-512
--
-- A few steps at full size, most at a quarter of the pixels, a few at full size again; at each change the clean picture
-- as it is predicted is resized and gets fresh noise. The base knows 64 x 64 alone, so it is trained further once, at
-- both sizes by turns, and all rows have these weights. Where the size changes is chosen among four settings on
-- captions of the training part, by the Fréchet distance. Beside it stand full size with fewer steps in the same time,
-- as many steps without the first stage, and changes without more noise. Distances are of whole pictures and of squares
-- of 64 x 64 pixels, which show fine parts. Clips, which the paper has as well, are not tried here.
--
-- More training at both sizes helps a little: with 480 steps and 768 scenes it was at 1.13 of the full sampler's
-- distance, 1.13 of that with fewer steps, 1.26 of that of squares, 1.04 of that without the first stage and 1.09 of
-- that without more noise; with 1,500 steps and 4,096 scenes at 1.12, 1.11, 1.19, 0.99 and 0.97. On an earlier
-- scene-dit, trained for less at its own size, it was at 1.02 of the full sampler's.
local ty = require "tycho"
local diffusion, zoo = require "tycho.diffusion", require "tycho.zoo"

local r = ty.recipe.declare { seeds = 3, base = true,
  args = {
    { "model", "scene-dit", "a base of the zoo of Stable Diffusion 3's shape" },
    { "tuning", 1500, "steps of training at both sizes", quick = 1 },
    { "scenes", 4096, "that are trained on", quick = 4 },
    { "batch", 12, "scenes in a step", quick = 2 },
    { "steps", 20, "of the full sampler", quick = 3 },
    { "count", 24, "prompts for each seed", quick = 2 },
    { "trial", 24, "prompts by which the stages are chosen", quick = 2 },
    { "scale", 4.0, "of guidance", quick = 1.0 },
  } }
local args, stages = r.args, diffusion.stages

local yardstick = zoo.yardstick { model = args.model, device = r.device, size = 128, real = r.quick and 4 or 256 }
local painter = yardstick.painter
local network = diffusion.sized(painter.network, { 16, 32 })
painter.network = network

-- ---- one set of weights for both sizes ----

local function tune()
  ty.manual_seed(r.seed)
  local batch = yardstick:set("training", { "image", "caption" }):batch(ty.arange(args.scenes))
  local latents = {}
  for _, side in ipairs { 16, 32 } do
    local list = {}
    for start = 0, args.scenes - 1, 16 do
      local some = batch.image:narrow(0, start, math.min(16, args.scenes - start)):to { device = r.device }
      if side == 16 then some = some:to "f32":avg_pool2d(2):round():to "u8" end
      list[#list + 1] = ty.scope(function() return painter:encode(some) end)
    end
    latents[side] = ty.concat(list, 0)
  end
  local set = ty.data.TensorDataset { small = latents[16], large = latents[32], tokens = painter:tokens(batch.caption) }
  local objective, large = painter.process.objective, false
  objective.null = painter:condition { "" }
  ty.train.fit(network, ty.data.DataLoader(set, { batch_size = args.batch, shuffle = true, seed = r.seed,
    drop_last = true }), { steps = args.tuning, lr = 1e-4, weight_decay = 0.01, title = "both sizes",
    loss = function(model, some)
      large = not large
      return ty.autocast("bf16", objective.loss, objective, model, large and some.large or some.small,
        painter:condition(some.tokens))
    end })
  network:eval()
end

-- What was tuned otherwise, or from an earlier base, has another name.
local path = r:base(("both-sizes-%s-%s-%d-%d-%d-%d.safetensors"):format(args.model, zoo.version(args.model),
  args.tuning, args.scenes, args.batch, r.seed))
if ty.io.exists(path) then network:load(path) else
  tune()
  ty.io.mkdir(r:base())
  network:save(path)
end

-- ---- the stages, chosen on captions of the training part ----

local function sampler(list)
  local part = list and stages.part { stages = list }
  return painter.process:sampler { steps = args.steps, guidance = args.scale, parts = { part } }
end

local first, middle, last = table.unpack(r.quick and { 1, 1, 1 } or { 2, 10, 4 })

-- leave and back: how noisy the picture is where it becomes small and large again; noise: how much noisier each stage
-- begins than the last one stopped.
local function three(leave, back, noise)
  return { { steps = first, to = leave }, { steps = middle, from = math.min(1, leave + noise), to = back, scale = 0.5 },
    { steps = last, from = math.min(1, back + noise) } }
end

local chosen, least
local tried = yardstick:prompts("training", 0, args.trial, 1000)
for _, leave in ipairs(r.quick and { 0.8 } or { 0.95, 0.85 }) do
  for _, back in ipairs(r.quick and { 0.4 } or { 0.6, 0.4 }) do
    local pictures = yardstick:decode((yardstick:draw(sampler(three(leave, back, 0.1)), tried)))
    local whole = yardstick:frechet(pictures, "training", "scene-resnet")
    local fine = yardstick:detail(pictures, "training", "scene-resnet")
    r:say("small from %.2f to %.2f: distance %.4g, of squares %.4g", leave, back, whole, fine)
    if not least or whole * fine < least then chosen, least = { leave, back }, whole * fine end
  end
end
local leave, back = table.unpack(chosen)

-- ---- on captions of the validation part ----

local NAME = "Bottleneck"
local list = yardstick:compare(sampler(), {
  [NAME] = sampler(three(leave, back, 0.1)),
  -- A step from pure noise says nothing to what comes after.
  ["small first"] = sampler { { steps = 1, to = 0.99 }, { steps = first + middle, from = 1, to = back, scale = 0.5 },
    { steps = last, from = back + 0.1 } },
  ["no more noise"] = sampler(three(leave, back, 0)),
}, { count = args.count, seeds = r.seeds, fewer = { NAME } })
for i, comparison in ipairs(list) do r:say("seed %d\n%s", r.seeds[i], tostring(comparison)) end

local few, sheet = math.min(3, args.count), {}
for _, name in ipairs { "full", NAME, NAME .. ", fewer steps", "small first" } do
  sheet[#sheet + 1] = list[1]:row(name).samples:narrow(0, 0, few)
end
ty.plot.grid(ty.concat(sheet, 0):to "f32" / 127.5 - 1, { columns = few }):save(r:picture "bottleneck.png")

local rows = yardstick.rows(list, NAME, { speedup = 2 })
local function beside(claim, judge, name, bar, judged)
  local values = {}
  for i, comparison in ipairs(list) do
    values[i] = comparison:row(NAME).judged[judge] / comparison:row(name).judged[judge]
  end
  rows[#rows + 1] = { claim = claim, values = values, bar = bar, below = true, judged = judged }
end
beside("Frechet distance to real pictures, of the full sampler's", "frechet", "full", 1.05)
beside("the same of squares of 64 x 64 pixels", "detail", "full", 1.05)
beside("Frechet distance, of that of full size with fewer steps in its time", "frechet", NAME .. ", fewer steps", 1)
beside("the same of squares, of fewer steps", "detail", NAME .. ", fewer steps", 1)
beside("Frechet distance, of that without the first stage", "frechet", "small first", 1)
beside("the same of squares, of no first stage", "detail", "small first", nil, false)
beside("Frechet distance of squares, of that with no more noise at the changes", "detail", "no more noise", 1)
local captions = {}
for i, comparison in ipairs(list) do
  captions[i] = comparison:row(NAME).judged.captions - comparison:row "full".judged.captions
end
rows[#rows + 1] = { claim = "captions found among those of the seed, less the full sampler's", values = captions,
  bar = -0.05 }
os.exit(r:finish(rows), true)
