-- A large batch of contrast in the memory of a small one
-- claim: at constant memory the contrast of 32 pairs in batches of 4, and classes found better than without
-- system: momentum self-distillation with accumulated contrast, on a small CLIP trained from scratch
-- paper: Pham et al. 2025, "Boosting Medical Vision-Language Pretraining via Momentum Self-Distillation under Limited
--   Computing Resources"
-- time: 4 minutes on one CPU core
--
-- All ways get batches of 4 pairs and as many forward passes, a backward pass counting as two: batches of 4 alone and
-- accumulation pay 3 for a pair, momentum towers and the gradient cache 4, so that these see fewer pairs. The gradient
-- cache, which has the exact gradient of the large batch, stands beside the claim. Rates are the best of several for
-- each way, by the first seed; batches of 4 alone do a little better at 2e-4, and still worse than when they are
-- accumulated, which is what the claim compares with. The picture tower reads maps of the zoo's residual network after
-- its third stage, frozen and computed once, so that a run of seconds learns something; all else begins at random.
-- Classes are of scenes of one object, found by three prompts; no training scene is among them.
local ty = require "tycho"
local models = require "tycho.models"
local vlm, zoo = require "tycho.vlm", require "tycho.zoo"
local scenes = zoo.scenes

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "forwards", 60000, "passes of a pair through the towers", quick = 200 },
    { "pairs", 5000, "training scenes", quick = 64 },
    { "micro", 4, "pairs of a batch" },
    { "cycle", 8, "batches of a step", quick = 2 },
    { "width", 64, "of both towers", quick = 16 },
    { "momentum", 0.9, "of the momentum towers" },
    { "alpha", 0.4, "share of soft targets" },
    { "test", 800, "scenes to measure with", quick = 20 },
    { "most", 32, "batches of a cycle whose memory is measured", quick = 3 },
  },
}
local args = r.args
local words = zoo.tokenizer "scene-clip"

-- ---- scenes as frozen maps ----

local network, pool = r:place(function() return zoo.load "scene-resnet" end), ty.nn.AvgPool2d(2)
local classes = scenes.classes()

local function get(split, first, count, most)
  local batch = scenes.labelled(split, { "image", "caption", "scene" }, first, count, { objects = { 1, most } })
  local maps = scenes.through(batch.image, function(x) return pool(network:maps(x, 3)) end, r.device)
  return { maps = maps, labels = batch.labels:to { device = r.device },
    tokens = scenes.tokens(words, batch.caption, 48):to { device = r.device } }
end
local training, single = get("training", 0, args.pairs, 2), get("validation", 0, args.test, 1)
local mixed = get("validation", 2000, args.test, 2)
local set = ty.data.TensorDataset { image = training.maps, tokens = training.tokens }

-- ---- the network, and what it is measured by ----

local function fresh(seed)
  ty.manual_seed(seed)
  local width = args.width
  local function tower(more)
    for key, value in pairs { hidden_size = width, intermediate_size = 2 * width, hidden_act = "gelu",
      num_hidden_layers = 2, num_attention_heads = math.max(1, width // 32) } do more[key] = value end
    return more
  end
  return r:place(function()
    return models.CLIPModel { projection_dim = width,
      text_config = tower { vocab_size = words.size, max_position_embeddings = 48, bos_token_id = words.bos,
        eos_token_id = words.eos, pad_token_id = words.pad },
      vision_config = tower { image_size = 8, patch_size = 2, num_channels = 96 } }
  end)
end

local function quality(model)
  model:eval()
  return ty.no_grad(ty.scope, function()
    local named = vlm.named(classes, function(texts) return scenes.read(model, words, texts) end)
    return { zero_shot = (vlm.zero_shot(model:image_features(single.maps), named, single.labels)),
      recall = vlm.found(model:image_features(mixed.maps), model:text_features(mixed.tokens)) }
  end)
end

-- ---- ways to train ----

local next_batches = vlm.cycles(args.cycle)
local function loader(seed)
  return ty.data.DataLoader(set, { batch_size = args.micro, shuffle = true, seed = seed, drop_last = true })
end
local function common(cost, batches, lr)
  return { steps = math.max(1, args.forwards // (cost * args.micro * batches)), lr = lr, warmup = 20, quiet = true }
end

-- A way whose step is a backward pass over the batches of a cycle.
local function by(cost, backward)
  return function(model, seed, lr)
    local o = common(cost, args.cycle, lr)
    function o.backward(net, next_batch) return { loss = backward(net, next_batches(next_batch)) } end
    ty.train.fit(model, loader(seed), o)
  end
end

local ways = {
  { "small batches", 5e-4,
    function(model, seed, lr) vlm.fit_contrastive(model, loader(seed), common(3, 1, lr)) end },
  { "accumulation", 1e-3, by(3, vlm.accumulated_backward) }, { "gradient cache", 1e-3, by(4, vlm.cached_backward) },
  { "MSD", 1e-3, function(model, seed, lr)
    local o = common(4, args.cycle, lr)
    o.cycle, o.momentum, o.alpha = args.cycle, args.momentum, args.alpha
    vlm.msd.fit(model, loader(seed), o)
  end },
}

local zero_shot, recall = {}, {}
for _, way in ipairs(ways) do
  local name = way[1]
  for i, seed in ipairs(r.seeds) do
    local model, began = fresh(seed), r:seconds()
    way[3](model, seed, way[2])
    local found = quality(model)
    ty.stats.put(zero_shot, name, i, found.zero_shot)
    ty.stats.put(recall, name, i, found.recall)
    r:say("%-14s seed %d: %.3f of the classes, %.3f of the captions among a hundred, %.0f s", name, seed,
      found.zero_shot, found.recall, r:seconds() - began)
    r:note(name, { ["zero shot"] = found.zero_shot, recall = found.recall }, seed)
  end
end

-- ---- memory of a step by its effective batch ----

local function pairs_of(from, count)
  return { pictures = training.maps:narrow(0, from, count), tokens = training.tokens:narrow(0, from, count) }
end
local function cycle_of(count)
  local list = {}
  for i = 1, count do list[i] = pairs_of((i - 1) * args.micro, args.micro) end
  return list
end
local model, teacher = fresh(r.seed), fresh(r.seed + 1)
vlm.msd.backward(model, teacher, cycle_of(1)) -- gradients are there from now on
local memory, counts = { msd = {}, direct = {} }, {}
for k = 1, math.floor(math.log(args.most, 2)) + 1 do
  local list = cycle_of(1 << (k - 1))
  counts[k] = #list * args.micro
  local one = { pairs_of(0, counts[k]) }
  memory.msd[k] = r:memory(function() vlm.msd.backward(model, teacher, list) end)
  memory.direct[k] = r:memory(function() vlm.accumulated_backward(model, one) end)
  r:say("%4d pairs a step: %.2f MB, as one batch %.2f MB", counts[k], memory.msd[k] / 1e6, memory.direct[k] / 1e6)
end
ty.plot.line { title = "Memory of a step", x_label = "pairs that are contrasted", y_label = "MB at most",
  series = { { x = counts, y = ty.tensor(memory.msd) / 1e6, label = "MSD, batches of " .. args.micro },
    { x = counts, y = ty.tensor(memory.direct) / 1e6, label = "one batch" } } }:save(r:picture "memory.png")

local less, mean = ty.stats.differences, ty.stats.mean
local simple = mean(zero_shot["small batches"]) > mean(zero_shot.accumulation) and "small batches" or "accumulation"
os.exit(r:finish {
  { claim = "memory of a step with all batches, of that with one", measured = memory.msd[#counts] / memory.msd[1],
    baseline = memory.direct[#counts] / memory.direct[1], bar = 1.1, below = true },
  { claim = "share of classes found, more than by the better of small batches and accumulation",
    values = less(zero_shot.MSD, zero_shot[simple]), baseline = zero_shot[simple], bar = 0 },
  { claim = "share of captions found among 100, more than by the same", values = less(recall.MSD, recall[simple]),
    baseline = recall[simple], judged = false },
  { claim = "share of classes found, more than by the gradient cache", baseline = zero_shot["gradient cache"],
    values = less(zero_shot.MSD, zero_shot["gradient cache"]), judged = false },
}, true)
