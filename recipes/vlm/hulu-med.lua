-- One model for reports, pictures, volumes and video
-- claim: one checkpoint answers questions about all four, in fewer tokens where little changes between frames
-- system: Hulu-Med: all that is seen as frames, one encoder, one decoder, pooling, unchanged places left out, stages
-- paper: Jiang et al. 2025, "Hulu-Med: A Transparent Generalist Model towards Holistic Medical Vision-Language
--   Understanding"
-- time: 12 minutes on one CPU core
--
-- Reports are read, projections are pictures, volumes are sequences of slices, and clips of moving things stand for
-- video. Volumes are synthetic phantoms: nothing here is a medical claim. The encoder is scene-resnet as it ships, its
-- features computed once; the paper's has rotary positions and learns along. Questions ask whether a finding is there
-- and where, and by which law a thing moves. Specialists have the same size, and together the same steps and samples.
-- "Blind" gives each question the answer that it has most often in training.
--
-- Each stage warms up and decays on its own, as a training that goes on from another's weights does; one cosine over
-- all left volumes and clips, which come last, half of the rate. On development data, one seed, 1000 steps, that is no
-- difference: 0.608 with one cosine, 0.604 with one a stage, 0.589 with stages of 0.1, 0.2 and 0.7, and 0.640 mixed
-- from the start: where the decoder is drawn anew, stages only take steps from what comes last. A wider spread of its
-- first weights (0.575) and Muon gave no more. Volumes stay near blind for their size: a voxel is 8 mm, a finding one
-- or two of them. A net that learnt patches of 8 x 8 pixels for this alone told scans with and without one at an area
-- under the curve of 0.54 (nodules), 0.59 (cysts), 0.58 (calcifications), 0.88 (effusions).
local ty = require "tycho"
local datasets, models = require "tycho.datasets", require "tycho.models"
local vlm, zoo = require "tycho.vlm", require "tycho.zoo"
local examiner, hulu = zoo.examiner, vlm.hulu

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 1000, "of each model, or of its specialists together", quick = 4 },
    { "batch", 24, "samples of a step", quick = 4 },
    { "lr", 2e-3, "peak learning rate" },
    { "training", 1000, "studies and clips to learn from", quick = 4 },
    { "test", 200, "studies and clips to measure with", quick = 3 },
    { "frames", 8, "of a clip" },
    { "every", 2, "slices of a volume, of which the mean is seen" },
    { "slices_threshold", 0.4, "change of a place of a slice that keeps it" },
    { "clips_threshold", 0.02, "change of a place of a frame that keeps it" },
    { "width", 96, "of the decoder" },
    { "layers", 3, "of the decoder" },
    { "data", 0, "seed of what is drawn" },
  },
}
local args, kinds = r.args, examiner.kinds
local network = r:place(function() return zoo.load "scene-resnet" end)
local function samples(split, count)
  return examiner.samples(network, split, count, { seed = args.data, frames = args.frames, every = args.every,
    slices_threshold = args.slices_threshold, clips_threshold = args.clips_threshold })
end
local training, test = samples("training", args.training), samples("validation", args.test)
local kept, all = examiner.tokens(test.volume)
local more_kept, more_all = examiner.tokens(test.video)
r:say("tokens of volumes: %.3f of all, of clips: %.3f", kept / all, more_kept / more_all)
local words = {}
for i, s in ipairs(examiner.joined(training)) do words[i] = (" %s\n %s"):format(s.question, s.answer) end
local tokenizer = ty.tokenizer.train(words, { vocabulary = 500, special = { "<end>" } })
ty.tokenizer.fields(tokenizer).eos = 0
r:say("drawn and seen after %.0f s", r:seconds())

-- ---- who answers ----

local function trained(seed, pools, steps, stages)
  ty.manual_seed(seed)
  local model = r:place(function()
    return hulu.Model(models.Llama { model_type = "llama", vocab_size = tokenizer.size, hidden_size = args.width,
      intermediate_size = args.width * 8 // 3, num_hidden_layers = args.layers,
      num_attention_heads = args.width // 32, max_position_embeddings = 512, tie_word_embeddings = true },
      test.picture[1].seen.features.shape[2])
  end)
  hulu.fit(model, pools, tokenizer, { steps = steps, batch = args.batch, lr = args.lr, seed = seed, stages = stages })
  return model
end
local function unified(pools, stages)
  return function(seed, asked)
    return hulu.ask_all(trained(seed, pools, args.steps, stages), examiner.joined(asked), tokenizer)
  end
end
local function specialists(seed, asked)
  local found = {}
  for _, kind in ipairs(kinds) do
    local own = hulu.ask_all(trained(seed, training, args.steps // #kinds, { { 1, { kind } } }), asked[kind], tokenizer)
    table.move(own, 1, #own, #found + 1, found)
  end
  return found
end
local ways = { { "one model", unified(training), test },
  { "mixed from the start", unified(training, { { 1, kinds } }), test },
  { "all places", unified(training.whole), test.whole }, { "specialists", specialists, test } }
local found, blind = {}, vlm.answers.shares(hulu.blind(examiner.joined(training), examiner.joined(test)))
local function told(name, s)
  r:say("%-36s %.3f: text %.3f, picture %.3f, volume %.3f, video %.3f", name, s.all, s.text, s.picture, s.volume,
    s.video)
end
told("blind", blind)
for i, seed in ipairs(r.seeds) do
  for _, way in ipairs(ways) do
    found[way[1]] = found[way[1]] or {}
    found[way[1]][i] = vlm.answers.shares(way[2](seed, way[3]))
    told(("%s, seed %d, %.0f s"):format(way[1], seed, r:seconds()), found[way[1]][i])
  end
end

-- Slices of a volume, and a clip: what was left out is dark.
local scan = datasets.volumes.studies { split = "validation", seed = args.data, count = 1, findings = { 1, 3 } }
local clip = datasets.load("clips", { split = "validation", seed = args.data, frames = args.frames, size = 32,
  fields = { "video" } }):get(0)
ty.plot.grid(ty.concat({
  examiner.shaded(examiner.slices(scan.volumes:select(0, 0), args.every), test.volume[1].seen.kept),
  examiner.shaded(examiner.frames(clip.video), test.video[1].seen.kept) }, 0), { columns = 6, scale = 3 })
  :save(r:picture "kept.png")

local own = found["one model"]
local function each(fn)
  local result = {}
  for i = 1, #r.seeds do result[i] = fn(i) end
  return result
end
local function less(name) return each(function(i) return own[i].all - found[name][i].all end) end
local function seen_of(s) return (s.volume + s.video) / 2 end
local rows = {
  { claim = "questions answered in the worst of the four, more than blind", bar = 0, values = each(function(i)
    local worst = math.huge
    for _, kind in ipairs(kinds) do worst = math.min(worst, own[i][kind] - blind[kind]) end
    return worst
  end) },
  { claim = "questions answered, mean of the four, more than by specialists", values = less "specialists", bar = 0 },
  { claim = "questions answered, more than mixed from the start", values = less "mixed from the start", bar = 0 },
  { claim = "tokens of volumes and clips that are kept, share", measured = (kept + more_kept) / (all + more_all),
    bar = 0.5, below = true },
  { claim = "questions about volumes and clips answered, of those with all places", bar = 0.98,
    values = each(function(i) return seen_of(own[i]) / seen_of(found["all places"][i]) end) },
}
for _, kind in ipairs(kinds) do
  rows[#rows + 1] = { claim = kind .. ": questions answered, share", baseline = blind[kind], judged = false,
    values = each(function(i) return own[i][kind] end) }
  rows[#rows + 1] = { claim = kind .. ": by its specialist", judged = false,
    values = each(function(i) return found.specialists[i][kind] end) }
end
os.exit(r:finish(rows), true)
