-- A pipeline that draws digits by name learns a digit that it never saw
-- claim: from two dozen pictures a LoRA teaches a new word, and what was known stays known
-- system: LoRA with prior preservation, as DreamBooth has it
-- paper: Ruiz et al. 2023, "DreamBooth: Fine Tuning Text-to-Image Diffusion Models for Subject-Driven Generation"
-- time: 2 minutes on two CPU cores
--
-- The pipeline is trained on the digits from zero to eight with captions, then fine-tuned on pictures of nines, once
-- with pictures of the other digits beside, which it drew itself, and once without them. With --pipeline and --data it
-- does the same to a pipeline of diffusers on the disk with a folder of pictures and captions, and writes the LoRA.
local ty = require "tycho"
local diffusion = require "tycho.diffusion"
local hub = require "tycho.hub"
local vision = require "tycho.vision"
local zoo = require "tycho.zoo"

local r = ty.recipe.declare {
  seeds = 1,
  args = {
    { "steps", 700, "training steps of the pipeline", quick = 4 },
    { "batch", 64, "pictures a step" },
    { "lr", 2e-3, "peak learning rate" },
    { "pictures", 24, "pictures of the new digit" },
    { "tuning_steps", 250, "steps of fine-tuning", quick = 3 },
    { "tuning_batch", 16, "pictures a step of fine-tuning" },
    { "tuning_lr", 4e-3, "learning rate of fine-tuning" },
    { "rank", 8, "of the adapter" },
    { "samples", 180, "pictures to draw", quick = 9 },
    { "guidance", 2.0, "strength of classifier-free guidance" },
    { "drawing_steps", 16, "steps of drawing", quick = 2 },
    { "classifier_steps", 500, "training steps of the classifier that judges", quick = 4 },
    { "pipeline", "", "a folder of diffusers to fine-tune instead" },
    { "data", "", "a folder of pictures with captions for it" },
    { "size", 512, "the side of these pictures" },
  },
}
local args, finetune, digits = r.args, diffusion.finetune, zoo.digit_painter

if args.pipeline ~= "" then
  local painter = diffusion.TextToImage(hub.pipeline(args.pipeline, { device = r.device }))
  local losses = finetune.train(painter, finetune.folder(args.data, { size = args.size }), { steps = args.tuning_steps,
    rank = args.rank, seed = r.seeds[1], quiet = false })
  finetune.save(painter, r:path "lora.safetensors")
  r:say("the loss of the last step was %.4f; the LoRA is %s", losses[#losses], r:path "lora.safetensors")
  os.exit(true, true)
end

-- ---- a pipeline of digits ----

local training, held_out = ty.data.digits { split = { 0.8, 0.2 }, seed = 0 }
local all = training:batch(ty.arange(#training))
local seen = all.label:lt(9):nonzero():flatten()
local known = ty.data.TensorDataset { image = all.image:index_select(0, seen), label = all.label:index_select(0, seen) }
local nines = all.image:index_select(0, all.label:eq(9):nonzero():flatten())

-- As pictures of a folder are: u8 [3, h, w].
local function as_u8(x) return ((x:clamp(-1, 1) + 1) * 127.5):round():to("u8"):expand(3, 8, 8) end

local function judge(seed)
  local classifier = vision.ResNet { in_channels = 1, classes = 10, small = true, channels = { 32, 64 },
    blocks = { 1, 1 }, dropout = 0.2 }
  classifier:to(r.device)
  vision.fit(classifier, training, { steps = args.classifier_steps, seed = seed })
  return classifier
end

local function recognised(painter, classifier, labels, seed)
  return digits.recognised(painter, classifier, labels, { steps = args.drawing_steps, guidance = args.guidance,
    seed = seed })
end

local old, new = {}, {}
for i = 1, args.samples do old[i], new[i] = (i - 1) % 9, 9 end

local read, before, learnt, untaught, kept, forgotten = {}, {}, {}, {}, {}, {}
for i, seed in ipairs(r.seeds) do
  ty.manual_seed(seed)
  local base = diffusion.TextToImage(digits.pipeline()):to(r.device)
  digits.train(base, known, { steps = args.steps, batch = args.batch, lr = args.lr, seed = seed })
  local classifier = judge(seed)
  read[i] = vision.accuracy(classifier, held_out)
  before[i] = recognised(base, classifier, old, seed)
  untaught[i] = recognised(base, classifier, new, seed)
  r:say("seed %d: known digits recognised %.3f, nines %.3f", seed, before[i], untaught[i])

  -- What the pipeline draws of what it knows, as the prior.
  local labels, captions = {}, {}
  for k = 1, 90 do labels[k], captions[k] = (k - 1) % 9, digits.caption((k - 1) % 9) end
  local own = digits.draw(base, labels, { steps = args.drawing_steps, guidance = args.guidance, seed = seed + 1 })
  local prior = { captions = captions, picture = function(k) return own:select(0, k - 1) end }
  local set = { captions = {}, picture = function(k) return as_u8(nines:select(0, k - 1)) end }
  for k = 1, args.pictures do set.captions[k] = digits.caption(9) end
  local state = base.network:state_dict()
  local function tuned(with)
    local p = digits.pipeline()
    hub.assign(p.components.unet, state)
    hub.assign(p.components.text_encoder, base.text_encoder:state_dict())
    local painter = diffusion.TextToImage(p):to(r.device)
    finetune.train(painter, set, { steps = args.tuning_steps, batch = args.tuning_batch, lr = args.tuning_lr,
      rank = args.rank, targets = { "to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "conv1", "conv2" },
      seed = seed, prior = with and { set = prior, weight = 1 } or nil })
    return painter
  end
  local painter, without = tuned(true), tuned(false)
  local pictures
  learnt[i], pictures = recognised(painter, classifier, new, seed)
  local share, others = recognised(painter, classifier, old, seed)
  kept[i] = share / math.max(before[i], 1e-3)
  forgotten[i] = recognised(without, classifier, old, seed) / math.max(before[i], 1e-3)
  r:say("seed %d: nines recognised %.3f, known digits %.3f of before, without the prior %.3f", seed, learnt[i], kept[i],
    forgotten[i])
  if i == 1 then
    local shown = ty.concat({ others:narrow(0, 0, math.min(9, args.samples)),
      pictures:narrow(0, 0, math.min(9, args.samples)) }, 0)
    ty.plot.grid(shown, { columns = 9, scale = 5, invert = true }):save(r:picture "digits.png")
    finetune.save(painter, r:path "nine.safetensors")
  end
end
r.metrics.nines_recognised_before = untaught

os.exit(r:finish {
  { claim = "the judge reads held-out real digits", values = read, bar = 0.97 },
  { claim = "known digits recognised, before", values = before, bar = 0.9 },
  { claim = "nines recognised, after two dozen pictures", values = learnt, baseline = untaught, bar = 0.8 },
  { claim = "known digits recognised after, against before", values = kept, baseline = forgotten, bar = 0.9 },
}, true)
