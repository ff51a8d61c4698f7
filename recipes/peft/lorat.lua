-- A tracker by low-rank updates of a vision transformer
-- claim: success above full tuning's, at less memory
-- system: LoRAT on a vision transformer that knows still scenes; objects and laws of movement that it never saw
-- paper: Lin et al. 2024, "Tracking Meets LoRA: Faster Training, Larger Model, Stronger Performance"
-- time: 4 minutes on one CPU core
--
-- The base learns which of ninety objects a still scene shows. A tracker over it then learns from pairs of frames of
-- moving clips, where another that looks the same moves about and something hides the object halfway. Low-rank updates
-- of all linear layers are compared with full tuning, a head of convolutions, and positions of the template's own; all
-- take the same steps over the same pairs and get two rates, chosen by pairs apart. Beside them a correlation tracker,
-- which compares colours. Success is the area under the curve of overlaps, in clips of ten objects that no training
-- showed, and in clips of laws that training left out for the object. Memory is the peak of everything during a step.
-- In the picture: frames with the tracked box in white and the true one in green.
local ty = require "tycho"
local datasets, models, peft = require "tycho.datasets", require "tycho.models", require "tycho.peft"
local vision, zoo = require "tycho.vision", require "tycho.zoo"

local track, boxes_of = vision.track, vision.boxes
local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 200, "of learning to track", quick = 2 },
    { "base_steps", 250, "of training the base", quick = 2 },
    { "batch", 8, "pairs of a step", quick = 4 },
    { "clips", 400, "to learn from", quick = 8 },
    { "test", 100, "clips of the test, of each part", quick = 4 },
    { "scenes", 3000, "of the base", quick = 16 },
    { "width", 96, "hidden size", quick = 32 },
    { "layers", 4, "of the transformer", quick = 1 },
    { "rank", 8, "of the updates" },
  },
}
local args = r.args
local side = 32 -- of a search region; clips are 64 pixels wide

-- ---- pictures ----

local function clips(split, seed, count)
  local set = datasets.load("clips", { split = split, seed = seed, length = count, size = 64, frames = 8,
    objects = { 1, 1 }, laws = { "constant", "gravity", "bounce" }, distractors = 1, occlusion = 0.5, visible = 0.5,
    fields = { "video", "tracks" } })
  local video, boxes = {}, {}
  for at = 0, count - 1, 50 do
    local batch = set:batch(ty.arange(at, math.min(at + 50, count)))
    video[#video + 1] = batch.video
    boxes[#boxes + 1] = batch.tracks:select(1, 0):narrow(2, 2, 4)
  end
  return { video = ty.keep(ty.concat(video, 0)), boxes = ty.keep(ty.concat(boxes, 0):contiguous()), count = count }
end
local training, development = clips("training", 0, args.clips), clips("validation", 1, math.min(64, args.test))
local tests = { ["new objects"] = clips("held_out_objects", 2, args.test),
  ["new laws"] = clips("held_out_combinations", 3, args.test) }
local function frame(set, clip, at) return zoo.scenes.pictures(set.video:select(0, clip):select(0, at)) end

-- Random pairs of frames of different times: the search region lies a little aside.
local function pairs_of(tracker, set, n)
  local first, second, a, b = {}, {}, {}, {}
  for i = 1, n do
    local clip = ty.randint(0, set.count, { 3 }):tolist()
    local frames = set.video.shape[2]
    local from, to = clip[2] % frames, clip[3] % frames
    first[i], second[i] = frame(set, clip[1], from), frame(set, clip[1], to)
    a[i], b[i] = set.boxes:select(0, clip[1]):select(0, from), set.boxes:select(0, clip[1]):select(0, to)
  end
  a, b = ty.stack(a, 0), ty.stack(b, 0)
  local size = boxes_of.around(b, 1)
  local width = size:narrow(1, 2, 1) - size:narrow(1, 0, 1)
  local shift = (ty.rand(n, 2) * 2 - 1) * width * 0.8
  local guess = b + ty.concat({ shift, shift }, 1)
  return track.pairs(tracker, ty.stack(first, 0), a, ty.stack(second, 0), b, guess)
end

-- ---- the base ----

ty.manual_seed(r.seed)
local function transformer()
  return models.ViT({ image_size = side, patch_size = 4, hidden_size = args.width, intermediate_size = 4 * args.width,
    num_hidden_layers = args.layers, num_attention_heads = args.width // 16 }, false)
end
local start
do
  local set = datasets.load("scenes", { size = 32, length = args.scenes, objects = { 1, 2 },
    fields = { "image", "labels" } })
  local batch = set:batch(ty.arange(args.scenes))
  local vit = transformer()
  local cells = ty.nn.Linear(args.width, batch.labels.shape[2])
  ty.no_grad(function() cells.bias:fill_(-4) end)
  local all = vit:parameters()
  for _, p in ipairs(cells:parameters()) do all[#all + 1] = p end
  local optimizer = ty.optim.AdamW(all, { lr = 1.5e-3, weight_decay = 0.01,
    schedule = ty.optim.one_cycle { steps = args.base_steps } })
  local labels = batch.labels:to "f32"
  for _ = 1, args.base_steps do
    ty.scope(function()
      local at = ty.randint(0, args.scenes, { 32 })
      local hidden = vit:hidden(zoo.scenes.pictures(batch.image:index_select(0, at)))
      local logits = cells(hidden:narrow(1, 1, hidden.shape[2] - 1)):amax({ 1 })
      optimizer:step(ty.nn.bce_with_logits(logits, labels:index_select(0, at)) * 20)
      optimizer:zero_grad()
    end)
  end
  start = vit:state_dict()
end

-- ---- trackers ----

local function success(tracker, set)
  local sum = {}
  for at = 0, set.count - 1, 25 do
    local n = math.min(25, set.count - at)
    sum[#sum + 1] = ty.scope(function()
      local truth = set.boxes:narrow(0, at, n)
      local found = tracker:follow(zoo.scenes.pictures(set.video:narrow(0, at, n)), truth:select(1, 0))
      return ty.keep(boxes_of.iou(found:narrow(1, 1, 7), truth:narrow(1, 1, 7)))
    end)
  end
  return (track.success(ty.concat(sum, 0)))
end

local function way(options, low)
  return function(rate, seed)
    collectgarbage()
    collectgarbage()
    local before, peak = ty.memory.stats().live, 0
    ty.manual_seed(seed)
    local vit = transformer()
    vit:load_state_dict(start)
    local tracker = track.Tracker(vit, options)
    local parameters = tracker:parameters()
    if low then
      peft.lora(tracker, { rank = args.rank, alpha = args.rank, targets = { "query", "key", "value", "dense" },
        save = { "score", "distances" } })
      parameters = peft.parameters(tracker)
      tracker.types:requires_grad_(true)
      parameters[#parameters + 1] = tracker.types
    end
    local optimizer = ty.optim.AdamW(parameters, { lr = rate, weight_decay = 0.01, clip_norm = 1,
      schedule = ty.optim.one_cycle { steps = args.steps } })
    tracker:train()
    for step = 1, args.steps do
      ty.scope(function()
        local pairs_now = ty.no_grad(pairs_of, tracker, training, args.batch)
        ty.memory.reset_peak()
        optimizer:step(tracker:loss(pairs_now))
        optimizer:zero_grad()
        if step > 1 then peak = math.max(peak, ty.memory.stats().peak - before) end
      end)
    end
    tracker:eval()
    ty.manual_seed(99)
    local loss = ty.no_grad(ty.scope, function() return tracker:loss(pairs_of(tracker, development, 128)):item() end)
    return { development = loss, peak = peak, tracker = tracker,
      success = function(set) return success(tracker, set) end }
  end
end

local function correlation(set)
  local overlaps = {}
  for clip = 0, set.count - 1 do
    local truth = set.boxes:select(0, clip)
    local found = track.by_colours(zoo.scenes.pictures(set.video:select(0, clip)), truth:select(0, 0))
    overlaps[clip + 1] = boxes_of.iou(found:narrow(0, 1, 7), truth:narrow(0, 1, 7))
  end
  return (track.success(ty.concat(overlaps, 0)))
end

local list = { { "LoRAT", way({}, true), { 3e-3, 6e-3 } }, { "full tuning", way({}), { 5e-4, 1.5e-3 } },
  { "head of convolutions", way({ head = "conv" }, true), { 3e-3, 6e-3 } },
  { "own positions", way({ positions = "own" }, true), { 3e-3, 6e-3 } } }
local ways = {}
for i, one in ipairs(list) do ways[i] = { name = one[1], run = one[2], rates = r:tries(one[3]) } end
local found = peft.compare.ways(ways, r.seeds, function(line) r:say("%s", line) end)

local gap, peaks = {}, {}
for part, set in pairs(tests) do
  for i, seed in ipairs(r.seeds) do
    for _, one in ipairs(list) do
      local run = found[one[1]].runs[i]
      run[part] = run.success(set)
      r:say("%s, %s, seed %d, rate %g: success %.3f, %.1f MB", one[1], part, seed, found[one[1]].rate, run[part],
        run.peak / 1e6)
      r.metrics[("%s/%s/%d"):format(one[1], part, seed)] = run[part]
    end
    if part == "new objects" then
      gap[i] = found.LoRAT.runs[i][part] - found["full tuning"].runs[i][part]
      peaks[i] = found.LoRAT.runs[i].peak / found["full tuning"].runs[i].peak
    end
  end
  r.metrics["correlation/" .. part] = correlation(set)
  r:say("correlation, %s: success %.3f", part, r.metrics["correlation/" .. part])
end

-- ---- a film ----

local film, set = {}, tests["new objects"]
local shown = math.min(4, set.count)
local videos = zoo.scenes.pictures(set.video:narrow(0, 0, shown))
local tracked = found.LoRAT.runs[1].tracker:follow(videos, set.boxes:narrow(0, 0, shown):select(1, 0))
for clip = 0, shown - 1 do
  for f = 0, 7 do
    local picture = videos:select(0, clip):select(0, f)
    picture = boxes_of.drawn(picture, set.boxes:select(0, clip):select(0, f), { -1, 1, -1 })
    film[#film + 1] = boxes_of.drawn(picture, tracked:select(0, clip):select(0, f), { 1, 1, 1 })
  end
end
ty.plot.grid(ty.stack(film, 0), { columns = 8, scale = 1 }):save(r:picture "lorat.png")

os.exit(r:finish {
  { claim = "success above full tuning's, objects never seen", values = gap, bar = 0 },
  { claim = "peak memory of training, of full tuning's", values = peaks, bar = 1, below = true },
}, true)
