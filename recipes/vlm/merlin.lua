-- Volumes, codes and reports: findings and reports found by words
-- claim: a network of volumes, trained on codes and reports on one core, finds by prompts and retrieves reports
-- system: Merlin: an inflated 3-D residual network with heads of codes and of contrast, whole reports and sections
-- paper: Blankemeier et al. 2024, "Merlin: A Vision Language Foundation Model for 3D Computed Tomography"
-- time: 5 minutes on one CPU core
--
-- The volumes are synthetic phantoms of 8 mm a voxel: nothing here is a medical claim. All ways have the same volumes,
-- steps, batches, rates and heads. All but "not inflated", which begins at random, begin as one network of slices, that
-- was trained once on labelled slices of other bodies, as published 2-D weights are given; "slices" is that network,
-- trained on with both losses and the mean over all slices. A finding's score is the mean cosine with texts that say it
-- is there less that with texts that deny it. Retrieval is among fifty, both ways; equal reports count as one.
--
-- Rates, weights and steps were chosen by pilots on volumes of another seed. Three things counted: heads behind a mean
-- over all places, one of which has the nodule, learn ten times as fast as the rest; codes weigh ten times their mean;
-- and kernels begin spread over the depth, since in the middle alone, as in the paper's code, three strides leave seven
-- of eight slices unseen. Sections that say "normal" are one text for many volumes, which belong together in the
-- contrast. The network of slices is not beaten: it keeps all of them to the end, at nearly twice the work of a step,
-- and a slice shows what a finding is. How results grow with the data is not measured.
local ty = require "tycho"
local datasets, models = require "tycho.datasets", require "tycho.models"
local vision, vlm = require "tycho.vision", require "tycho.vlm"
local facts, merlin, nn = datasets.volumes.facts, vlm.merlin, ty.nn
local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 80, "of each way to train", quick = 2 },
    { "batch", 24, "volumes of a step", quick = 4 },
    { "lr", 2e-3, "peak learning rate, of heads ten times that" },
    { "codes", 10.0, "weight of the codes" },
    { "flat_steps", 400, "of the network of slices", quick = 2 },
    { "training", 1200, "volumes", quick = 8 },
    { "sliced", 300, "other volumes, whose slices have labels", quick = 4 },
    { "test", 300, "volumes to measure with", quick = 16 },
    { "among", 50, "reports and volumes that are retrieved from", quick = 8 },
    { "data", 0, "seed of the volumes" },
  },
}
local args, kinds, sections, room = r.args, facts.kinds, #facts.sections, 64
local function studies(split, seed, count, slices)
  return datasets.volumes.studies { split = split, seed = seed, count = count, slices = slices or false,
    findings = { 1, 3 } }
end
local training, sliced = studies("training", args.data, args.training), studies("training", args.data + 1000,
  args.sliced, true)
local test, new = studies("validation", args.data, args.test), studies("held_out_findings", args.data, args.test // 2)

local texts, prompts = {}, {}
for _, report in ipairs(training.reports) do
  texts[#texts + 1] = report
  table.move(facts.split(report), 1, sections, #texts + 1, texts)
end
local tokenizer = ty.tokenizer.train(texts, { vocabulary = 400, special = { "<end>" } })
ty.tokenizer.fields(tokenizer).pad = 0
local function tokens(list) -- filled up with the mark of the end, at least one
  local x = tokenizer:encode_batch(list, { max_length = room - 1 })
  return ty.pad(x, { 0, room - x.shape[2] }, "constant", 0):to { device = r.device }
end
training.texts = tokens(texts):reshape(args.training, sections + 1, room)
for k, kind in ipairs(kinds) do
  local present, absent = facts.prompts(kind)
  prompts[k] = { present = tokens(present), absent = tokens(absent) }
end

local function network(kind, stride)
  return models.ResNet3d { in_channels = 1, classes = #kinds, channels = { 8, 32, 64 }, blocks = { 1, 1, 1 },
    convolution = kind, small = true, stem_stride = stride }
end
-- The network of two dimensions: which kinds a slice shows. Each kind, and none, is met as often as the others.
ty.manual_seed(args.data + 1)
local flat = r:place(function() return network("space", 1) end)
do
  local images, labels = sliced.volumes:transpose(1, 2):flatten(0, 1):unsqueeze(2), sliced.slices:flatten(0, 1)
  local rows = merlin.balanced(labels)
  ty.train.fit(flat, ty.data.DataLoader(ty.data.TensorDataset { image = images:index_select(0, rows),
    label = labels:index_select(0, rows) }, { batch_size = 128, shuffle = true, seed = args.data,
    drop_last = true, device = r.device }), { steps = args.flat_steps, lr = 5e-3, weight_decay = 0.05, quiet = true,
    loss = function(m, b) return nn.bce_with_logits(m(b.image), b.label) end })
end
local function inflated() return merlin.inflate(flat, { stem_stride = 2, spread = true }) end
local function copied()
  local copy = network("space", 1)
  copy:load_state_dict(flat:state_dict())
  return copy
end
-- What a way begins as, and the weights of codes and of reports.
local ways = { { "Merlin", inflated, args.codes, 1 }, { "reports only", inflated, 0, 1 },
  { "codes only", inflated, args.codes, 0 }, { "slices", copied, args.codes, 1 },
  { "not inflated", function() return network("3d", 2) end, args.codes, 1 } }
local found, shown, unseen = {}, nil, {}
for _, way in ipairs(ways) do found[way[1]] = { precision = {}, codes = {}, recall = {}, by_kind = {} } end
local function run(way, seed)
  ty.manual_seed(seed)
  local model = r:place(function()
    local image = way[2]()
    image.fc = nn.Linear(64, #datasets.volumes.codes)
    return merlin.Model { image = image, width = 64, text = models.CLIPTextModelWithProjection {
      vocab_size = tokenizer.size, hidden_size = 64, intermediate_size = 128, num_hidden_layers = 2,
      num_attention_heads = 2, eos_token_id = 0, max_position_embeddings = room, projection_dim = 64 } }
  end)
  merlin.fit(model, training, { steps = args.steps, batch = args.batch, lr = args.lr, warmup = 10, seed = seed,
    codes = way[3], reports = way[4], quiet = true })
  local scores = merlin.find(model, test.volumes, prompts)
  local _, by_kind = vision.macro_f1(scores, test.kinds)
  local function coded(start, rows) return model(test.volumes:narrow(0, start, rows):to { device = r.device }) end
  local recall = vlm.retrieval(model, test.volumes, tokens(test.reports), { among = args.among })
  return { precision = vision.mean_average_precision(scores, test.kinds), by_kind = by_kind:tolist(),
    codes = vision.mean_average_precision(vlm.embed(args.test, coded), test.codes), scores = scores,
    recall = (recall.captions_in_5 + recall.pictures_in_5) / 2 }, model
end
for i, seed in ipairs(r.seeds) do
  for _, way in ipairs(ways) do
    local f, model = run(way, seed)
    for key, list in pairs(found[way[1]]) do list[i] = f[key] end
    if way[1] == "Merlin" then
      shown = shown or f.scores
      unseen[i] = vision.mean_average_precision(merlin.find(model, new.volumes, prompts), new.kinds)
    end
    r:say("%-12s seed %d: precision %.3f, codes %.3f, recall %.3f", way[1], seed, f.precision, f.codes, f.recall)
  end
end

-- For each finding the volumes that its words find first, seen from the front through what is there, if anything.
local cuts, labels, large = {}, {}, datasets.load("volumes", { split = "validation", seed = args.data, size = 64,
  fields = { "volume", "findings" }, findings = { 1, 3 } })
for k, kind in ipairs(kinds) do
  local _, best = shown:select(1, k - 1):topk(5)
  for _, i in ipairs(best:tolist()) do
    local item, own = large:get(i), { organ = "is not there", centre = { 0.5, 0.5, 0.5 } }
    for _, f in ipairs(item.findings) do own = f.kind == kind and f or own end
    cuts[#cuts + 1] = ty.keep(item.volume:select(0, 0):select(1, math.floor(own.centre[2] * 64)) * 1.4 - 1)
    labels[#labels + 1] = ("%s\n%s"):format(kind, own.organ)
  end
end
ty.plot.grid(ty.stack(cuts, 0), { columns = 5, scale = 2, labels = labels }):save(r:picture "found.png")
local function compared(key, name, with)
  local result = {}
  for i, value in ipairs(found.Merlin[key]) do result[i] = with(value, name and found[name][key][i]) end
  return result
end
local chance = test.kinds:mean():item()
local rows = { { claim = "precision of five findings by prompts, mean average, of that of chance", bar = 1.5,
  values = compared("precision", nil, function(a) return a / chance end) },
  { claim = "reports and volumes found in five guesses, of those of chance", bar = 2,
    values = compared("recall", nil, function(a) return a * args.among / 5 end) } }
local function row(claim, key, name, bar)
  rows[#rows + 1] = { claim = claim, values = compared(key, name, function(a, b) return a - b end), bar = bar,
    baseline = found[name][key], judged = bar ~= nil and nil }
end
row("precision more than with reports only", "precision", "reports only", 0)
row("precision more than by slices in two dimensions", "precision", "slices", 0)
row("precision more than without inflation", "precision", "not inflated", 0)
row("reports and volumes found, more than with reports only", "recall", "reports only")
row("precision of codes more than with codes only", "codes", "codes only")
rows[#rows + 1] = { claim = "precision by prompts of findings in organs never met", values = unseen, judged = false }
for k, kind in ipairs(kinds) do
  local function own(a) return a[k] end
  rows[#rows + 1] = { claim = "F1 of " .. kind, judged = false, values = compared("by_kind", nil, own) }
end
os.exit(r:finish(rows), true)
