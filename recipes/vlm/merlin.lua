-- Volumes, codes and reports: findings and reports found by words
-- claim: one network of volumes, trained on codes and reports on one core, finds by prompts and retrieves reports
-- system: Merlin: an inflated 3-D residual network with heads of codes and of contrast, whole reports and sections
-- paper: Blankemeier et al. 2024, "Merlin: A Vision Language Foundation Model for 3D Computed Tomography"
-- time: 4 minutes on one CPU core
--
-- WIP
local ty = require "tycho"
local datasets, models = require "tycho.datasets", require "tycho.models"
local vision, vlm = require "tycho.vision", require "tycho.vlm"
local facts, merlin, nn = datasets.volumes.facts, vlm.merlin, ty.nn

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 200, "of each way to train", quick = 2 },
    { "batch", 24, "volumes of a step", quick = 4 },
    { "lr", 2e-3, "peak learning rate" },
    { "flat_steps", 300, "of the network of slices", quick = 2 },
    { "flat_batch", 128, "slices of a step", quick = 8 },
    { "training", 1500, "volumes", quick = 8 },
    { "sliced", 300, "other volumes, whose slices have labels", quick = 4 },
    { "test", 400, "volumes to measure with", quick = 16 },
    { "among", 64, "reports and volumes that are retrieved from", quick = 4 },
    { "width", 64, "of texts and of the common space" },
    { "data", 0, "seed of the volumes" },
    { "ways", "", "pattern" },
  },
}
local args = r.args
local room, kinds, sections = 64, facts.kinds, #facts.sections

-- ---- volumes, reports, prompts ----

local function studies(split, seed, count, more)
  local o = { split = split, seed = seed, count = count }
  for key, value in pairs(more or {}) do o[key] = value end
  return datasets.volumes.studies(o)
end
local training = studies("training", args.data, args.training)
local sliced = studies("training", args.data + 1000, args.sliced, { slices = true })
local tests = { seen = studies("validation", args.data, args.test),
  new = studies("held_out_findings", args.data, args.test // 2) }
r:say("drawn: %.0f s", r:seconds())

local texts, parts = {}, {}
for i, report in ipairs(training.reports) do
  parts[i] = table.move(facts.split(report), 1, sections, 2, { report })
  for _, text in ipairs(parts[i]) do texts[#texts + 1] = " " .. text end
end
local tokenizer = ty.tokenizer.train(texts, { vocabulary = 400, special = { "<end>" } })
local function tokens(list)
  local rows = {}
  for i, text in ipairs(list) do
    local ids = tokenizer:encode(" " .. text):tolist()
    for k = math.min(#ids, room - 1) + 1, room do ids[k] = 0 end
    rows[i] = table.move(ids, 1, room, 1, {})
  end
  return ty.tensor(rows, { dtype = "i64" })
end
local columns = {}
for k = 1, sections + 1 do
  local list = {}
  for i, own in ipairs(parts) do list[i] = own[k] end
  columns[k] = tokens(list)
end
local pairs_set = ty.data.TensorDataset { volumes = training.volumes, codes = training.codes,
  texts = ty.stack(columns, 1) }

-- What says that a finding is there, with places that training meets, and what denies it.
local said = { ["missing part"] = { "the upper part of the %s is missing", "the %s has no upper part" },
  effusion = { "a large effusion on the %s side", "a moderate %s pleural effusion" } }
local prompts = {}
for k, kind in ipairs(kinds) do
  local present = {}
  for _, code in ipairs(datasets.volumes.codes) do
    if code[1] == kind then
      for _, text in ipairs(said[kind] or { ("a %s in the %%s, 16 mm"):format(kind), ("the %%s contains a 12 mm %s")
        :format(kind) }) do
        present[#present + 1] = text:format(kind == "effusion" and code[2]:match "^%a+" or code[2])
      end
    end
  end
  prompts[k] = { present = tokens(present), absent = tokens(facts.absent[kind]) }
end

-- ---- training ----

local function network(kind, stride)
  return models.ResNet3d { in_channels = 1, classes = #kinds, channels = { 8, 32, 64 }, blocks = { 1, 1, 1 },
    convolution = kind, small = true, stem_stride = stride }
end
local function loader(set, batch, seed)
  return ty.data.DataLoader(set, { batch_size = batch, shuffle = true, seed = seed, drop_last = true })
end

-- The network of two dimensions: which kinds a slice shows, of bodies that no other training sees.
local function learn_slices(seed)
  ty.manual_seed(seed)
  local flat = r:place(function() return network("space", 1) end)
  local set = ty.data.TensorDataset { image = sliced.volumes:transpose(1, 2):flatten(0, 1):unsqueeze(2),
    label = sliced.slices:flatten(0, 1) }
  ty.train.fit(flat, loader(set, args.flat_batch, seed), { steps = args.flat_steps, lr = 3e-3, warmup = 20,
    quiet = true, loss = function(m, b) return nn.bce_with_logits(m(b.image), b.label) end })
  return flat
end

local function train(seed, image, weights)
  ty.manual_seed(seed)
  local model = r:place(function()
    image.fc = nn.Linear(64, #datasets.volumes.codes)
    local text = models.CLIPTextModelWithProjection { vocab_size = tokenizer.size, hidden_size = args.width,
      intermediate_size = 2 * args.width, num_hidden_layers = 2, num_attention_heads = 2, eos_token_id = 0,
      max_position_embeddings = room, projection_dim = args.width }
    return merlin.Model { image = image, text = text, width = args.width }
  end)
  local step = 0
  ty.train.fit(model, loader(pairs_set, args.batch, seed), { steps = args.steps, lr = args.lr, warmup = 20,
    quiet = true, loss = function(m, b)
      step = step + 1
      return merlin.loss(m, { volumes = b.volumes, codes = b.codes,
        tokens = b.texts:select(1, merlin.turn(step - 1, sections)) }, weights)
    end })
  return model:eval()
end

local ways = {
  { "Merlin", function(seed, flat) return train(seed, merlin.inflate(flat, { stem_stride = 2 })) end },
  { "reports only", function(seed, flat)
    return train(seed, merlin.inflate(flat, { stem_stride = 2 }), { codes = 0 })
  end },
  { "codes only", function(seed, flat)
    return train(seed, merlin.inflate(flat, { stem_stride = 2 }), { reports = 0 })
  end },
  { "slices", function(seed, flat)
    local copy = network("space", 1)
    copy:load_state_dict(flat:state_dict())
    return train(seed, copy)
  end },
  { "not inflated", function(seed) return train(seed, network("3d", 2)) end },
}

-- ---- measuring ----

local function measure(model, set)
  return ty.no_grad(ty.scope, function()
    local n, scores, found = set.volumes.shape[1], {}, {}
    local function embed(fn)
      return vlm.embed(n, function(start, rows) return fn(set.volumes:narrow(0, start, rows):to { device = r.device }) end)
    end
    local image = embed(function(x) return model:image_features(x) end)
    for k, prompt in ipairs(prompts) do
      scores[k] = merlin.present(image, model:text_features(prompt.present), model:text_features(prompt.absent))
    end
    scores = ty.stack(scores, 1)
    found.scores = ty.keep(scores)
    local by
    found.f1, by = vision.macro_f1(scores, set.kinds)
    found.by = by:tolist()
    found.precision = vision.mean_average_precision(scores, set.kinds)
    found.codes = set.codes:sum():item() > 0
      and vision.mean_average_precision(embed(function(x) return model(x) end), set.codes) or 0
    local rows, sum, groups = {}, 0, 0
    for i, list in ipairs(set.findings) do if #list > 0 then rows[#rows + 1] = i - 1 end end
    for start = 1, #rows - args.among + 1, args.among do
      local list = {}
      local at = table.move(rows, start, start + args.among - 1, 1, {})
      for k, i in ipairs(at) do list[k] = set.reports[i + 1] end
      local recall = vlm.recall(image:index_select(0, ty.tensor(at)), model:text_features(tokens(list)), { at = { 5 } })
      sum, groups = sum + (recall.captions[5] + recall.pictures[5]) / 2, groups + 1
    end
    found.recall = sum / groups
    return found
  end)
end

for i, seed in ipairs(r.seeds) do
  local t0 = os.clock()
  local flat = learn_slices(seed)
  r:say("slices %.1f", os.clock() - t0)
  for _, way in ipairs(ways) do
   if way[1]:find(args.ways) then
    local t0 = os.clock()
    local model = way[2](seed, flat)
    local took = os.clock() - t0
    local f, g = measure(model, tests.seen), measure(model, tests.new)
    r:say("%-13s seed %d: f1 %.3f ap %.3f codes %.3f recall@5 %.3f, %.0f s  new f1 %.3f ap %.3f recall@5 %.3f %s", way[1], seed, f.f1, f.precision, f.codes, f.recall,
      took, g.f1, g.precision, g.recall, table.concat(f.by, " "))
    end
  end
end
