-- Captions from a painter that learnt to read them
-- claim: what a frozen painter taught an encoder by pictures alone makes captions that few pairs do not
-- system: VLV: picture to caption embeddings by way of the painter's loss, then a small decoder writes captions
-- paper: Zhang et al. 2025, "Vision-Language-Vision Auto-Encoder: Scalable Knowledge Distillation from Diffusion
--   Models"
-- time: 4 minutes on one CPU core
--
-- The painter is canvas-unet, of pixels, told in words by cross-attention. Stage 1 sees pictures without captions: an
-- encoder from scratch, with as many queries as captions have tokens, stands in the place of the text encoder. Stage 2
-- sees a few hundred pairs. The captioner without stage 1 has the same encoder, decoder and pairs, and as many
-- seconds as both stages; the one on contrastive features, of scene-clip, which has seen captions of other pictures, as
-- many steps as that. Reconstructions are judged by canvas-judge beside pictures that the painter makes of the true
-- captions with the same noise and guidance.
--
-- In these minutes it does not pay: with 350 steps of stage 1 the painter draws styles and grounds from the embeddings
-- and hardly the kinds of things (its loss is 0.043; 0.029 with true words, 0.049 with none), and the captioner that
-- learns from the pairs for as many seconds, over and over, writes better ones. On development pictures, one seed: with
-- 700 and 1400 steps the loss is 0.043 and 0.040, on scene-clip's patches, which stay, 0.039 both times; the judge sees
-- 0.16 and 0.11 of the kinds, on patches 0.09 and 0.13, where true words give 0.72. 400, 1000 and 2000 steps of stage 2
-- at the encoder's full rate make 0.094, 0.102 and 0.109 of the captions right, 2000 without stage 1 0.102; as many
-- seconds as 1400 steps of stage 1 take make those 0.203.
local ty = require "tycho"
local vlm, zoo = require "tycho.vlm", require "tycho.zoo"
local describer, vlv = zoo.describer, vlm.vlv

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "pictures", 3000, "without captions, for stage 1", quick = 16 },
    { "steps", 350, "of stage 1", quick = 1 },
    { "lr", 0.03, "peak learning rate of stage 1, of Muon" },
    { "pairs", 256, "of a picture and its caption, for stage 2", quick = 16 },
    { "caption_steps", 200, "of stage 2", quick = 2 },
    { "caption_lr", 2e-3, "peak learning rate of stage 2" },
    { "encoder", 0.1, "rate of the encoder in stage 2, over that of the rest" },
    { "batch", 32, "of a step", quick = 4 },
    { "test", 256, "pictures to measure with", quick = 8 },
    { "painted", 128, "of them are painted anew", quick = 4 },
    { "guidance", 2.0, "of painting" },
  },
}
local args = r.args
local painter = zoo.canvas.load { device = r.device }
local objective, judge = zoo.painter.objective(painter), zoo.canvas.judge()
local width = painter.text_encoder.config.hidden_size
local test = describer.pairs(painter, "validation", args.test)

-- What the judge sees in pictures of the test: the mean of style, kind and ground.
local labels = {}
for _, name in ipairs { "style", "kind", "ground" } do labels[name] = test.labels[name]:narrow(0, 0, args.painted) end
local function seen(pictures)
  local shares, sum = judge:shares(pictures, labels), 0
  for _, value in pairs(shares) do sum = sum + value / 3 end
  return sum, shares
end
local function paint(embeddings)
  return describer.paint(painter, embeddings:narrow(0, 0, args.painted), { guidance = args.guidance })
end
local of_words = paint(describer.states(painter, test.caption))
local ceiling, by_words = seen(of_words)
for name, value in pairs(by_words) do r.metrics["painted/words/" .. name] = value end

-- The patches of scene-clip, which sees pictures of 64 x 64.
local clip = r:place(function() return zoo.load "scene-clip" end)
local function contrastive(image)
  local list = {}
  for start = 0, image.shape[1] - 1, 64 do
    local part = zoo.scenes.pictures(image:narrow(0, start, math.min(64, image.shape[1] - start)):to(r.device))
    list[#list + 1] = ty.no_grad(function()
      return (clip.vision_model:run(ty.interpolate(part, { 64, 64 }, 0, "bilinear"), {}, true))
    end)
  end
  return ty.concat(list, 0)
end
local clip_test = contrastive(test.image)

local function score(captioner, x)
  local captions = describer.describe(painter, captioner, x)
  return describer.score(captions, test.caption), captions
end

local kept, sight, found, shown = {}, {}, {}, nil
local names = { "VLV", "without stage 1", "contrastive features" }
for _, name in ipairs(names) do found[name] = { all = {}, whole = {} } end
for i, seed in ipairs(r.seeds) do
  local pool = describer.pairs(painter, "training", args.pictures, { seed = 10 + seed })
  local pairs_ = describer.pairs(painter, "training", args.pairs, { seed = 110 + seed })
  local function teach(captioner, steps, rate, x)
    return describer.teach(captioner, pairs_, { steps = steps, batch = args.batch, lr = args.caption_lr, seed = seed,
      encoder = rate }, x)
  end
  ty.manual_seed(seed)
  local encoder = describer.encoder(painter)
  local loss, first = vlv.reconstruct(encoder, objective, painter.network, pool.latents, { steps = args.steps,
    batch = args.batch, lr = args.lr, seed = seed })
  local again = paint(ty.no_grad(encoder, test.latents))
  local shares
  sight[i], shares = seen(again)
  kept[i] = sight[i] / ceiling
  local captioner = describer.captioner(encoder, width)
  local _, second = teach(captioner, args.caption_steps, args.encoder)
  local scores, captions = score(captioner, test.latents)
  local results = { VLV = scores }

  ty.manual_seed(seed)
  local steps = math.max(1, math.floor(args.caption_steps * (first + second) / second + 0.5))
  local plain = describer.captioner(describer.encoder(painter), width)
  teach(plain, steps, 1)
  results["without stage 1"] = score(plain, test.latents)

  local other = describer.captioner(r:place(function() return ty.nn.Linear(clip_test.shape[3], width) end), width)
  teach(other, steps, 1, contrastive(pairs_.image))
  results["contrastive features"] = score(other, clip_test)

  r:say("seed %d: stage 1 %.1f s, loss %.4f; stage 2 %.1f s; the others %d steps; the judge sees %.3f, of words %.3f",
    seed, first, loss, second, steps, sight[i], ceiling)
  for name, value in pairs(shares) do r.metrics[("painted/VLV/%s/%d"):format(name, seed)] = value end
  for _, name in ipairs(names) do
    local s = results[name]
    found[name].all[i], found[name].whole[i] = s.all, s.whole
    r:say("  %-20s words %.3f (style %.3f, kind %.3f, ground %.3f, colour %.3f, mark %.3f), whole captions %.3f", name,
      s.all, s.style, s.kind, s.ground, s.colour, s.mark, s.whole)
    for key, value in pairs(s) do r.metrics[("captions/%s/%s/%d"):format(name, key, seed)] = value end
  end
  shown = shown or { again = again, captions = captions }
end

-- Pictures, what the painter makes of their embeddings, with the captions that were written, and of true captions.
local count, list, texts = math.min(8, args.painted), {}, {}
for row, pictures in ipairs { test.image, shown.again, of_words } do
  list[row] = pictures:narrow(0, 0, count):to "cpu"
  for k = 1, count do
    local text = row == 2 and shown.captions[k] or row == 3 and test.caption[k] or "picture"
    texts[#texts + 1] = text:gsub("^a ", ""):gsub(" on a ", "\non "):gsub(" ground$", ""):gsub("^(%S+ %S+) ", "%1\n")
  end
end
ty.plot.grid(ty.concat(list, 0), { columns = count, scale = 3, labels = texts }):save(r:picture "captions.png")

local above, above_clip = {}, {}
for i, value in ipairs(found.VLV.whole) do
  above[i] = value - found["without stage 1"].whole[i]
  above_clip[i] = value - found["contrastive features"].whole[i]
end
local rows = {
  { claim = "style, kind and ground that a judge sees in reconstructions, of those in pictures of true captions",
    values = kept, bar = 0.9 },
  { claim = "captions right word for word, more than without stage 1", values = above, bar = 0.0 },
  { claim = "captions right word for word, more than from contrastive features", values = above_clip, bar = 0.0 },
  { claim = "style, kind and ground seen in reconstructions", values = sight, baseline = ceiling, judged = false },
}
for _, name in ipairs(names) do
  rows[#rows + 1] = { claim = "captions right word for word, " .. name, values = found[name].whole, judged = false }
  rows[#rows + 1] = { claim = "words of captions right, " .. name, values = found[name].all, judged = false }
end
os.exit(r:finish(rows), true)
