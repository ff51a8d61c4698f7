-- Frozen encoders of pictures and of texts, brought together by two light heads
-- claim: classes are found by their names more often than by a CLIP from scratch, with 6 % of its pairs
-- system: SAIL on the zoo's residual network and its language model of the Bible, against the zoo's CLIP
-- paper: Zhang et al. 2025, "Assessing and Learning Alignment of Unimodal Vision and Language Models"
-- time: 5 minutes on one CPU core
--
-- The CLIP learnt from scratch on the 100,000 training scenes with their captions, in an hour; the heads get 6,000 of
-- these pairs, others for every seed. Neither frozen encoder ever saw a caption. But what they are has to be said: the
-- residual network was taught which objects, tints and places scenes have, as numbered labels without words, so that
-- this says how cheaply labels and words are joined, and not that pictures need no labels; and the language model read
-- an old book that has few of the words. A class is the mean of three prompts for both, scenes of the test show one
-- object, and no training scene is among them. Captions among a hundred, which name tints, places and backgrounds too,
-- stand beside that: the claim is not about them, and there the CLIP with all pairs is ahead. The linear head and the
-- softmax loss got the same steps; rates were chosen on other scenes.
--
-- The assessment aligns seven encoders by linear heads and a few of the pairs, and asks whether k nearest neighbours or
-- a linear probe put them in the same order. The network's stages are among them, and some that were never trained.
local ty = require "tycho"
local models = require "tycho.models"
local vlm, zoo = require "tycho.vlm", require "tycho.zoo"
local scenes, sail = zoo.scenes, vlm.sail

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "pairs", 6000, "pictures with their captions, 6 % of CLIP's", quick = 40 },
    { "steps", 300, "of the heads", quick = 4 },
    { "batch", 512, "pairs of a step", quick = 32 },
    { "lr", 1e-3, "peak learning rate of gated heads" },
    { "linear_lr", 3e-3, "of linear heads" },
    { "test", 1000, "scenes of one object to find the class of", quick = 24 },
    { "known", 800, "labelled scenes for k nearest neighbours", quick = 24 },
    { "assessed", 1000, "pairs for the assessment of encoders", quick = 32 },
  },
}
local args = r.args

-- ---- frozen encoders ----

local clip, words = r:place(function() return zoo.load "scene-clip" end), zoo.tokenizer "scene-clip"
local network = r:place(function() return zoo.load "scene-resnet" end)
local reader, letters = r:place(function() return zoo.load "kjv-lm" end), zoo.tokenizer "kjv-lm"

-- Features of pictures by a function of them that gives maps [n, channels, h, w].
local function seen(image, maps)
  return scenes.through(image, function(x) return sail.joined(maps(x):flatten(2):transpose(1, 2), false) end, r.device)
end
local function last_maps(x) return network:maps(x) end
local function read(texts) return sail.read(reader, letters, texts) end

-- ---- what is asked ----

local classes = scenes.classes()
local function labelled(split, first, count)
  local batch = scenes.labelled(split, { "image", "scene" }, first, count, { objects = { 1, 1 } })
  batch.labels = batch.labels:to { device = r.device }
  return batch
end
local test, known = labelled("validation", 2000, args.test), labelled("training", 0, args.known)
local mixed = scenes.set("validation", { "image", "caption" }):batch(ty.arange(2000, 2000 + math.min(500, args.test)))

-- ---- CLIP from scratch ----

local theirs, theirs_found = ty.no_grad(function()
  local function texts(list) return scenes.read(clip, words, list) end
  local function pictures(image)
    return scenes.through(image, function(x) return clip:image_features(x) end, r.device)
  end
  local accuracy, found = vlm.zero_shot(pictures(test.image), vlm.named(classes, texts), test.labels)
  return { accuracy = accuracy, recall = vlm.found(pictures(mixed.image), texts(mixed.caption)) }, found
end)
r:say("CLIP from scratch: %.3f of the classes, %.3f of the captions among a hundred", theirs.accuracy, theirs.recall)

-- ---- SAIL ----

local test_x, mixed_x, mixed_y = seen(test.image, last_maps), seen(mixed.image, last_maps), read(mixed.caption)
local prompts = sail.prompts(classes, read)

local function align(seed, image, text, kind, loss)
  return sail.aligned(image, text, { kind = kind, steps = args.steps, batch = args.batch, seed = seed, loss = loss,
    warmup = 20, lr = kind == "linear" and args.linear_lr or args.lr, quiet = true, device = r.device })
end

-- Zero-shot accuracy of aligned heads on features of the test's pictures.
local function zero_shot(model, pictures) return sail.zero_shot(model, prompts, pictures, test.labels) end

local gains, shares, found_in, linear, softmax = {}, {}, {}, {}, {}
local first, ours_found
for i, seed in ipairs(r.seeds) do
  local began = r:seconds()
  local batch = scenes.set("training", { "image", "caption" }):batch(ty.arange((i - 1) * args.pairs, i * args.pairs))
  local image, text = seen(batch.image, last_maps), read(batch.caption)
  local encoded = r:seconds()
  local model = align(seed, image, text, "glu", "sigmoid")
  local fitted = r:seconds()
  local found
  shares[i], found = zero_shot(model, test_x)
  gains[i] = shares[i] - theirs.accuracy
  found_in[i] = ty.no_grad(function() return vlm.found(model:image_features(mixed_x), model:text_features(mixed_y)) end)
    - theirs.recall
  linear[i] = shares[i] - zero_shot(align(seed, image, text, "linear", "sigmoid"), test_x)
  softmax[i] = shares[i] - zero_shot(align(seed, image, text, "glu", "softmax"), test_x)
  r:say("seed %d: %.3f of the classes, %.3f of the captions; linear heads %.3f, softmax %.3f; features in %.0f s, "
    .. "heads in %.0f s", seed, shares[i], found_in[i] + theirs.recall, shares[i] - linear[i], shares[i] - softmax[i],
    encoded - began, fitted - encoded)
  if i == 1 then first, ours_found = { image = batch.image, text = text }, found end
end

-- ---- which encoders align ----

local function stage(net, last) return function(x) return net:maps(x, last) end end
ty.manual_seed(r.seed)
local blank = r:place(function()
  return models.ResNet { channels = { 16, 48, 96, 192 }, blocks = { 1, 1, 2, 1 }, small = true, classes = 2 }
end)
-- Statistics of its own, that it is not shut: a few batches in training mode.
ty.no_grad(function()
  local some = scenes.pictures(known.image:narrow(0, 0, math.min(64, args.known)):to { device = r.device })
  for _ = 1, 10 do blank:maps(some) end
end)
blank:eval()
local pool = ty.nn.AvgPool2d(8)
local encoders = {
  { "pixels", function(x) return pool(x):flatten(1):unsqueeze(2):unsqueeze(3) end },
  { "untrained, stage 2", stage(blank, 2) }, { "untrained, stage 4", stage(blank, 4) },
  { "stage 1", stage(network, 1) }, { "stage 2", stage(network, 2) }, { "stage 3", stage(network, 3) },
  { "stage 4", stage(network, 4) },
}
if r.quick then encoders = { encoders[1], encoders[7] } end
local knn, probe, aligned = {}, {}, {}
for i, encoder in ipairs(encoders) do
  local x, y = seen(known.image, encoder[2]), seen(test.image, encoder[2])
  knn[i] = sail.knn(x, known.labels, y, test.labels)
  probe[i] = sail.linear_probe(x, known.labels, y, test.labels)
  local few = math.min(args.assessed, args.pairs)
  local image = seen(first.image:narrow(0, 0, few), encoder[2])
  aligned[i] = zero_shot(align(r.seed, image, first.text:narrow(0, 0, few), "linear", "sigmoid"), y)
  r:say("%-19s k-NN %.3f  linear probe %.3f  aligned %.3f", encoder[1], knn[i], probe[i], aligned[i])
  r:note(encoder[1], { knn = knn[i], probe = probe[i], aligned = aligned[i] })
end

local labels = {}
for i = 1, math.min(8, args.test) do
  labels[i] = ("%s\nCLIP: %s"):format(classes[ours_found:tolist()[i] + 1], classes[theirs_found:tolist()[i] + 1])
end
ty.plot.grid(test.image:narrow(0, 0, #labels), { columns = 4, scale = 2, labels = labels }):save(r:picture "found.png")

r.metrics["clip/accuracy"], r.metrics["clip/recall"] = theirs.accuracy, theirs.recall
os.exit(r:finish {
  { claim = "share of classes found by name, more than by CLIP from scratch with all pairs", values = gains,
    baseline = theirs.accuracy, bar = 0 },
  { claim = "share of captions found among 100, more than by CLIP from scratch", values = found_in,
    baseline = theirs.recall, judged = false },
  { claim = "share of classes found by name", values = shares, baseline = theirs.accuracy, judged = false },
  { claim = "the same more than with linear heads", values = linear, judged = false },
  { claim = "the same more than with the softmax loss", values = softmax, judged = false },
  { claim = "encoders in order: k-NN with alignment, correlation of ranks", judged = false,
    measured = ty.stats.rank_correlation(knn, aligned), baseline = ty.stats.rank_correlation(probe, aligned) },
}, true)
