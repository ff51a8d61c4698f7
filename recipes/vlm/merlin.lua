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
    { "steps", 80, "of each way to train", quick = 2 },
    { "batch", 24, "volumes of a step", quick = 4 },
    { "lr", 2e-3, "peak learning rate" },
    { "flat_steps", 300, "of the network of slices", quick = 2 },
    { "flat_batch", 128, "slices of a step", quick = 8 },
    { "training", 1500, "volumes", quick = 8 },
    { "sliced", 300, "other volumes, whose slices have labels", quick = 4 },
    { "test", 400, "volumes to measure with", quick = 16 },
    { "among", 50, "reports and volumes that are retrieved from", quick = 4 },
    { "width", 64, "of texts and of the common space" },
    { "data", 0, "seed of the volumes" },
    { "pilot", "", "pattern" },
  },
}
local args = r.args
local kinds, sections = facts.kinds, #facts.sections

-- ---- volumes, reports, prompts ----

local function studies(split, seed, count, slices)
  return datasets.volumes.studies { split = split, seed = seed, count = count, slices = slices }
end
local training = studies("training", args.data, args.training, false)
local sliced = studies("training", args.data + 1000, args.sliced, true)
local tests = { seen = studies("validation", args.data, args.test, false),
  new = studies("held_out_findings", args.data, args.test // 2, false) }

local texts, parts, known, room = {}, {}, {}, 0
for i, report in ipairs(training.reports) do
  parts[i] = table.move(facts.split(report), 1, sections, 2, { report })
  for _, text in ipairs(parts[i]) do texts[#texts + 1] = " " .. text end
end
local tokenizer = ty.tokenizer.train(texts, { vocabulary = 400, special = { "<end>" } })
for _, text in ipairs(texts) do
  known[text] = known[text] or tokenizer:encode(text):tolist()
  room = math.max(room, #known[text] + 1)
end
local function tokens(list)
  local rows = {}
  for i, text in ipairs(list) do
    local ids = known[" " .. text] or tokenizer:encode(" " .. text):tolist()
    rows[i] = table.move(ids, 1, math.min(#ids, room - 1), 1, {})
    for k = #rows[i] + 1, room do rows[i][k] = 0 end
  end
  return ty.tensor(rows, { dtype = "i64" }):to { device = r.device }
end
local columns = {}
for k = 1, sections + 1 do
  local list = {}
  for i, own in ipairs(parts) do list[i] = own[k] end
  columns[k] = tokens(list)
end
local set = ty.data.TensorDataset { volumes = training.volumes, codes = training.codes, texts = ty.stack(columns, 1) }

-- What says that a finding is there, in every place that training meets, and what denies it.
local said = { ["missing part"] = { "the upper part of the %s is missing", "the %s has no upper part" },
  effusion = { "a large effusion on the %s side", "a moderate %s pleural effusion" } }
local prompts = {}
for k, kind in ipairs(kinds) do
  local present = {}
  for _, code in ipairs(datasets.volumes.codes) do
    for _, text in ipairs(code[1] ~= kind and {} or said[kind] or { "a " .. kind .. " in the %s, 16 mm",
      "the %s contains a 12 mm " .. kind }) do
      present[#present + 1] = text:format(kind == "effusion" and code[2]:match "^%a+" or code[2])
    end
  end
  prompts[k] = { present = tokens(present), absent = tokens(facts.absent[kind]) }
end

-- ---- training ----

local function network(kind, stride)
  return models.ResNet3d { in_channels = 1, classes = #kinds, channels = { 8, 32, 64 }, blocks = { 1, 1, 1 },
    convolution = kind, small = true, stem_stride = stride }
end
local function loader(of, batch, seed)
  return ty.data.DataLoader(of, { batch_size = batch, shuffle = true, seed = seed, drop_last = true,
    device = r.device })
end

-- The network of two dimensions: which kinds a slice shows, of bodies that no other training sees.
local function learn_slices(seed)
  ty.manual_seed(seed)
  local flat = r:place(function() return network("space", 1) end)
  local slices = ty.data.TensorDataset { image = sliced.volumes:transpose(1, 2):flatten(0, 1):unsqueeze(2),
    label = sliced.slices:flatten(0, 1) }
  local losses = ty.train.fit(flat, loader(slices, args.flat_batch, seed), { steps = args.flat_steps, lr = 3e-3, warmup = 20,
    quiet = true, loss = function(m, b) return nn.bce_with_logits(m(b.image), b.label) end })
  r:say("slices %.4f  %.0f s", losses[#losses], os.clock())
  return flat
end

local function train(seed, image, weights)
  ty.manual_seed(seed)
  local model = r:place(function()
    image.fc = nn.Linear(64, #datasets.volumes.codes)
    return merlin.Model { image = image, width = args.width, text = models.CLIPTextModelWithProjection {
      vocab_size = tokenizer.size, hidden_size = args.width, intermediate_size = 2 * args.width, num_hidden_layers = 2,
      num_attention_heads = 2, eos_token_id = 0, max_position_embeddings = room, projection_dim = args.width } }
  end)
  local step, sum = 0, { codes = 0, reports = 0 }
  ty.train.fit(model, loader(set, args.batch, seed), { steps = args.steps, lr = args.lr, warmup = 20, quiet = true,
    loss = function(m, b)
      step = step + 1
      local loss, log = merlin.loss(m, { volumes = b.volumes, codes = b.codes,
        tokens = b.texts:select(1, merlin.turn(step - 1, sections)) }, weights)
      if step > args.steps - 10 then for k, v in pairs(log) do sum[k] = sum[k] + v:item() / 10 end end
      return loss, log
    end })
  r:say("   codes %.3f reports %.3f", sum.codes, sum.reports)
  return model:eval()
end

local function inflated(weights)
  return function(seed, flat) return train(seed, merlin.inflate(flat, { stem_stride = 2 }), weights) end
end
local ways = { { "Merlin", inflated() }, { "reports only", inflated { codes = 0 } },
  { "codes only", inflated { reports = 0 } },
  { "slices", function(seed, flat)
    local copy = network("space", 1)
    copy:load_state_dict(flat:state_dict())
    return train(seed, copy)
  end }, { "not inflated", function(seed) return train(seed, network("3d", 2)) end } }

-- ---- measuring ----

local function measure(model, of)
  return ty.no_grad(ty.scope, function()
    local function embed(fn)
      return vlm.embed(of.volumes.shape[1], function(start, rows)
        return fn(of.volumes:narrow(0, start, rows):to { device = r.device })
      end)
    end
    local image, scores, found = embed(function(x) return model:image_features(x) end), {}, {}
    for k, prompt in ipairs(prompts) do
      scores[k] = merlin.present(image, model:text_features(prompt.present), model:text_features(prompt.absent))
    end
    found.scores = ty.keep(ty.stack(scores, 1))
    local by
    found.f1, by = vision.macro_f1(found.scores, of.kinds)
    found.by = by:tolist()
    found.precision = vision.mean_average_precision(found.scores, of.kinds)
    found.codes = of.codes:sum():item() > 0 and vision.mean_average_precision(embed(model), of.codes)
    local recall = vlm.retrieval(model, of.volumes, tokens(of.reports), { among = args.among })
    found.recall = (recall.captions_in_5 + recall.pictures_in_5) / 2
    return found
  end)
end

for i, seed in ipairs(r.seeds) do
  local flat = learn_slices(seed)
  for _, way in ipairs(ways) do
   if way[1]:find(args.pilot) then
    local t0 = os.clock()
    local model = way[2](seed, flat)
    local took = os.clock() - t0
    local f, g = measure(model, tests.seen), measure(model, tests.new)
    r:say("%-13s seed %d: f1 %.3f ap %.3f codes %.3f recall@5 %.3f, %.0f s  new f1 %.3f ap %.3f recall@5 %.3f %s", way[1], seed, f.f1, f.precision, f.codes, f.recall,
      took, g.f1, g.precision, g.recall, table.concat(f.by, " "))
    end
  end
end
