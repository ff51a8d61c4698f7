-- Emoji from words
-- claim: pictures of what was never seen together, no nearer to the training pictures than other real ones are
-- system: the U-Net of the zoo that draws scenes of emoji, in the shape of Stable Diffusion's
-- paper: Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models"
-- time: seconds for a prompt; 4 minutes on one CPU core for the table
--
--     ./run recipes/diffusion/emoji.lua --prompt "two red apples on a blue background"
--     ./run recipes/diffusion/emoji.lua --train FOLDER --prompt "a purple fox"
--
-- With --prompt it draws a sheet of what the words say, several sheets with | between prompts; with --model clip-dit
-- clips, eight frames of each in a row. With --train the base is trained further, by a LoRA, on a folder of pictures
-- with captions beside them (NAME.png and NAME.txt). Without either it measures: whether captions of combinations of
-- object and colour that no training scene has are drawn as well as others, and whether pictures are copies. A copy
-- would be nearer to its nearest training picture than a real picture that was not trained on is to its own, in the
-- features of scene-clip.
local ty = require "tycho"
local diffusion, zoo = require "tycho.diffusion", require "tycho.zoo"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "prompt", "", "what to draw; several, with | between" },
    { "model", "scene-unet", "a text-to-image base of the zoo, or a folder of diffusers with a path" },
    { "each", 8, "pictures of a prompt" },
    { "steps", 25, "of the sampler", quick = 2 },
    { "guidance", 5.0, "scale of classifier-free guidance" },
    { "interval", { 0.2, 10 }, "sigma / alpha between which drawing is guided", length = 2 },
    { "train", "", "a folder of pictures and captions to train on further" },
    { "train_steps", 300, "of that training", quick = 2 },
    { "count", 64, "prompts for each seed of the table", quick = 4 },
    { "training", 4000, "training pictures that nearest ones are looked for among", quick = 16 },
  },
}
local args = r.args
local guidance = diffusion.guidance.classifier_free { scale = args.guidance, interval = args.interval }

local began = r:seconds()
local yardstick = zoo.yardstick { model = args.model, device = r.device, real = r.quick and 8 or 512 }
local painter = yardstick.painter

if args.train ~= "" then
  local finetune = diffusion.finetune
  local rows, columns = painter:default_size()
  local size = painter:factor() * math.max(rows, columns)
  local losses = finetune.train(painter, finetune.folder(args.train, { size = size }), { steps = args.train_steps,
    seed = r.seed, quiet = false })
  finetune.save(painter, r:path "lora.safetensors")
  r:say("the loss of the last step was %.4f; the LoRA is %s", losses[#losses], r:path "lora.safetensors")
  if args.prompt == "" then os.exit(true, true) end
end

local function save(pictures, path, columns)
  ty.plot.grid(pictures:to "f32" / 127.5 - 1, { columns = columns, scale = 2 }):save(path)
  return path
end

if args.prompt ~= "" then
  local prompts = {}
  for prompt in (args.prompt .. "|"):gmatch "(.-)|" do
    for _ = 1, prompt ~= "" and args.each or 0 do prompts[#prompts + 1] = prompt end
  end
  local pictures = painter:paint(prompts, { steps = args.steps, guidance = guidance, seed = r.seed })
  local columns, what = args.each, "pictures"
  if pictures.ndim == 5 then
    columns, what = 8, "clips"
    pictures = zoo.clips.frames(pictures, columns)
  end
  r:say("%d %s in %.1f s: %s", #prompts, what, r:seconds() - began, save(pictures, r:path "emoji.png", columns))
  os.exit(true, true)
end

-- ---- what the table says ----

local sampler = painter.process:sampler { steps = args.steps, guidance = guidance }

-- Features of real pictures of a split, [n, width], each of length 1, so that a product is a cosine.
local function unit(features) return ty.nn.normalize(features, { dim = 1 }) end
local function real(split, from, count)
  local images = yardstick:set(split, { "image" }):batch(ty.arange(from, from + count)).image
  return unit(yardstick:features(images, "scene-clip"))
end
local trained = real("training", 0, args.training)

-- The mean over pictures of the cosine to the nearest training picture.
local function nearest(features)
  return ty.no_grad(function() return ty.matmul(features, trained:transpose(0, 1)):amax(1):mean():item() end)
end

local found = { seen = {}, unseen = {}, nearness = {}, frechet = {}, ratio = {}, floor = {} }
local validation = real("validation", 1000, args.count * 2)
local sheet
for i, seed in ipairs(r.seeds) do
  local prompts = { seen = yardstick:prompts("validation", (i - 1) * args.count, args.count, seed),
    unseen = yardstick:prompts("held_out_combinations", (i - 1) * args.count, args.count, seed) }
  local pictures = {}
  for _, kind in ipairs { "seen", "unseen" } do
    pictures[kind] = yardstick:decode((yardstick:draw(sampler, prompts[kind])))
    local shares = yardstick:asked(pictures[kind], prompts[kind])
    found[kind][i] = shares.caption
    for name, share in pairs(shares) do r.metrics[("%s/%s/%d"):format(kind, name, seed)] = share end
    r:say("seed %d, combinations %s: captions found %.3f, objects %.3f, colours %.3f, places %.3f", seed, kind,
      shares.caption, shares.object, shares.colour, shares.place or 0)
  end
  found.ratio[i] = found.unseen[i] / found.seen[i]
  found.nearness[i] = nearest(unit(yardstick:features(pictures.seen, "scene-clip"))) - nearest(validation)
  found.frechet[i] = yardstick:frechet(pictures.seen, "validation", "scene-resnet")
  local again = yardstick:set("training", { "image" }):batch(ty.arange(50000 + i * args.count, 50000 + (i + 1)
    * args.count)).image
  found.floor[i] = yardstick:frechet(again, "validation", "scene-resnet")
  if i == 1 then sheet = ty.concat({ pictures.seen, pictures.unseen }, 0) end
end
local shown = math.min(12, args.count)
local few = ty.concat({ sheet:narrow(0, 0, shown), sheet:narrow(0, args.count, shown) }, 0)
save(few, r:picture "emoji.png", 6)

os.exit(r:finish {
  { claim = "captions of combinations never seen that are found in the pictures, of those of others",
    values = found.ratio, bar = 0.9 },
  { claim = "cosine to the nearest training picture, less that of real pictures that were not trained on",
    values = found.nearness, bar = 0, below = true },
  { claim = "captions found among a hundred", values = found.seen, judged = false },
  { claim = "captions of combinations never seen found among a hundred", values = found.unseen, judged = false },
  { claim = "Frechet distance to real pictures by scene-resnet", values = found.frechet, judged = false },
  { claim = "that of as many real pictures", values = found.floor, judged = false },
}, true)
