-- Reports of pictures by a light adapter
-- claim: with the same steps an adapter between frozen models writes truer reports than the whole trained from scratch
-- system: LLaVA-Rad: a tower that knows codes, a small decoder that knows reports, a projector, then LoRA beside it
-- paper: Zambrano Chaves et al. 2024, "Towards a clinically accessible radiology foundation model: open-access and
--   lightweight, with automated evaluation"
-- time: 4 minutes on one CPU core
--
-- WIP
local ty = require "tycho"
local datasets, models = require "tycho.datasets", require "tycho.models"
local peft, vision, vlm = require "tycho.peft", require "tycho.vision", require "tycho.vlm"
local zoo = require "tycho.zoo"
local facts, rad, nn = datasets.volumes.facts, vlm.llava_rad, ty.nn

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "align", 100, "steps of the projector alone", quick = 1 },
    { "adapt", 100, "steps of the projector with LoRA", quick = 1 },
    { "batch", 16, "pictures of a step", quick = 2 },
    { "lr", 3e-3, "peak learning rate of the adapter" },
    { "scratch_lr", 2e-3, "of the model from scratch" },
    { "rank", 8, "of LoRA" },
    { "look_steps", 300, "of training the tower on codes", quick = 2 },
    { "look_lr", 3e-3, "peak" },
    { "look_batch", 32, "pictures of a step", quick = 4 },
    { "read_steps", 300, "of training the decoder on reports", quick = 2 },
    { "training", 1500, "studies", quick = 8 },
    { "test", 150, "studies to measure with", quick = 4 },
    { "among", 16, "reports that are retrieved from", quick = 4 },
    { "width", 96, "of the decoder" },
    { "layers", 3, "of the decoder" },
    { "data", 0, "seed" },
    { "ways", "", "pattern" },
  },
}
local args = r.args

-- ---- pictures and reports ----

-- What a projection can show. Soft tissue in soft tissue leaves no trace in it that the noise of texture does not hide.
local function visible(f)
  if f.organ == "liver" or f.organ == "spleen" then return f.kind == "calcification" end
  return true
end
local function studies(split, count)
  local set = datasets.volumes.studies { split = split, seed = args.data, count = count, volumes = false,
    frontal = true, marked = true, findings = { 1, 3 } }
  set.clean, set.shown = {}, {}
  for i, report in ipairs(set.reports) do
    set.clean[i] = table.concat(facts.split(facts.filter(report, visible)), "; ")
    set.shown[i] = {}
    for _, f in ipairs(set.findings[i]) do if visible(f) then table.insert(set.shown[i], f) end end
  end
  return set
end
local training, test = studies("training", args.training), studies("validation", args.test)
r:say("drawn: %.0f s", os.clock())
local tokenizer = ty.tokenizer.train((function()
  local list = { " " .. rad.question .. "\n" }
  for i, text in ipairs(training.reports) do
    list[#list + 1] = " " .. text
    list[#list + 1] = " " .. training.clean[i]
  end
  return list
end)(), { vocabulary = 400, special = { "<end>", "<image>" } })
local marks = ty.tokenizer.fields(tokenizer)
marks.bos, marks.eos, marks.pad = 0, 0, 0
local reading = vlm.Dialogue(tokenizer, { image_token = 1, features = 0, before = " ", lead = " " })

-- ---- the parts ----

local text_config = { model_type = "llama", vocab_size = tokenizer.size, hidden_size = args.width,
  intermediate_size = args.width * 8 // 3, num_hidden_layers = args.layers, num_attention_heads = args.width // 32,
  max_position_embeddings = 256, tie_word_embeddings = true, bos_token_id = 0, eos_token_id = 0 }
local function new_model(seed)
  ty.manual_seed(seed)
  return r:place(function()
    local resnet = models.ResNet { in_channels = 1, classes = 1, channels = { 16, 32, 64, 96 }, blocks = { 1, 1, 1, 1 },
      small = true }
    local tower = models.ResNetVisionModel.around(resnet, 32)
    local model = models.Llava { model_type = "llava", text_config = text_config,
      vision_config = tower:published_config(), image_token_index = 1, vision_feature_layer = -1,
      tie_word_embeddings = true, eos_token_id = 0 }
    model.vision_tower:load_state_dict(tower:state_dict())
    zoo.answerer.spread(model)
    return model
  end)
end
local dialogue
do
  local probe = new_model(0)
  local places = rad.look(probe, test.frontal:narrow(0, 0, 1)).shape[2]
  dialogue = vlm.Dialogue(tokenizer, { image_token = 1, features = places, before = " ", lead = " " })
end

local function loader(set, batch)
  return ty.data.DataLoader(ty.data.TensorDataset(set), { batch_size = batch, shuffle = true, seed = 1,
    drop_last = true })
end
local base = new_model(1)
base.vision_tower:learn_norms(true)
local head = r:place(function() return nn.Linear(96, #facts.kinds) end)
local places = ty.adaptive_max_pool2d(training.marked, { 4, 4 }):flatten(2):transpose(1, 2):contiguous()
ty.train.fit(base.vision_tower, loader({ image = training.frontal, kinds = places }, args.look_batch), {
  steps = args.look_steps, lr = args.look_lr, warmup = 20, quiet = true, optimizer = function(m, o)
    return ty.optim.AdamW({ { params = m:parameters() }, { params = head:parameters(), lr = o.lr * 3 } }, { lr = o.lr,
      beta2 = 0.95, clip_norm = 1, schedule = o.schedule, weight_decay = 0.05 })
  end, loss = function(_, b) return nn.bce_with_logits(head(rad.seen(base, b.image)), b.kinds) * 10 end })
base:eval()
base.vision_tower:learn_norms(false)
local seen_kinds = ty.no_grad(function() return head(rad.seen(base, test.frontal)):amax(1) end)
local ap, by = vision.mean_average_precision(seen_kinds, test.kinds)
r:say("tower: ap %.3f  %.0f s %s", ap, os.clock(), table.concat(by:tolist(), " "))

-- The decoder reads reports, without pictures.
do
  local lm = base.language_model
  local list = {}
  for i, text in ipairs(training.clean) do list[i] = { { question = rad.question, answer = text } } end
  local tokens, targets = reading:rows(list)
  local losses = ty.train.fit(lm, loader({ tokens = tokens, targets = targets }, args.look_batch), { steps = args.read_steps, lr = 3e-3,
    warmup = 20, quiet = true, loss = function(m, b) return m:loss(b.tokens, b.targets) end })
  r:say("decoder: %.3f  %.0f s", losses[#losses], os.clock())
end
do local name = os.getenv "BASE" -- PILOT
  if name and ty.io.exists(name) then base:load_state_dict(ty.io.load_safetensors(name)) elseif name then
    local t = {} for k, v in pairs(base:state_dict()) do t[k] = v:clone() end ty.io.save_safetensors(name, t) end end
local knows = base:state_dict()

local looked = rad.look(base, training.frontal)
local function adapter(seed, reports)
  local model = new_model(seed)
  local own = model.multi_modal_projector:state_dict()
  local state = {}
  for name, tensor in pairs(knows) do
    local part = name:match "^multi_modal_projector%.(.*)"
    state[name] = part and own[part]:clone() or tensor
  end
  model:load_state_dict(state)
  local pool = { looked = looked, reports = reports }
  local o = { steps = args.align, batch = args.batch, lr = args.lr, seed = seed }
  local first = rad.tune(model, dialogue, pool, rad.align(model), o)
  o.steps = args.adapt
  local parameters = rad.adapt(model, { rank = args.rank })
  r:say("loss %.3f, %.3f", first, rad.tune(model, dialogue, pool, parameters, o))
  peft.merge(model)
  peft.remove(model)
  return model
end
local function scratch(seed, reports)
  local model = new_model(seed)
  model.vision_tower:learn_norms(true)
  r:say("loss %.3f", rad.tune(model, dialogue, { pictures = training.frontal, reports = reports }, model:parameters(),
    { steps = args.align + args.adapt, batch = args.batch, lr = args.scratch_lr, seed = seed, decay = 0.1 }))
  model.vision_tower:learn_norms(false)
  return model
end

-- ---- measuring ----

local function judge(texts)
  local scores = {}
  for i, text in ipairs(texts) do scores[i] = facts.score(text, test.shown[i]) end
  return facts.total(scores)
end
local function retrieve(model)
  local seen, sum, groups = rad.look(model, test.frontal), 0, 0
  local rows = {}
  for i, list in ipairs(test.shown) do if #list > 0 then rows[#rows + 1] = i end end
  for start = 1, math.min(#rows, 4 * args.among) - args.among + 1, args.among do
    local at, list = {}, {}
    for k = 0, args.among - 1 do at[k + 1], list[k + 1] = rows[start + k] - 1, test.clean[rows[start + k]] end
    local x = rad.likelihoods(model, dialogue, seen:index_select(0, ty.tensor(at)), list)
    local own = ty.arange(args.among)
    sum = sum + ((x - x:mean({ 0 }, true)):argmax(1):eq(own):to("f32"):mean():item()
      + x:argmax(0):eq(own):to("f32"):mean():item()) / 2
    groups = groups + 1
  end
  return sum / groups
end
local function show(name, f, more)
  r:say("%-10s f1 %.3f placed %.3f p %.3f r %.3f errors %.3f (false %.2f missed %.2f place %.2f size %.2f) %s", name, f.f1, f.placed.f1, f.precision, f.recall,
    f.errors, f.wrong.false_finding, f.wrong.missed_finding, f.wrong.wrong_place, f.wrong.wrong_size, more or "")
end
local near = {}
for i, k in ipairs(rad.nearest(rad.look(base, test.frontal), looked)) do near[i] = training.clean[k] end
show("nearest", judge(near))
local ways = { { "adapter", function(seed) return adapter(seed, training.clean) end },
  { "scratch", function(seed) return scratch(seed, training.clean) end },
  { "noisy", function(seed) return adapter(seed, training.reports) end } }
for _, seed in ipairs(r.seeds) do
  for _, way in ipairs(ways) do
   if way[1]:find(args.ways) then
    local t0 = os.clock()
    local model = way[2](seed)
    local t1 = os.clock()
    local texts = rad.write(model, dialogue, test.frontal)
    local t2 = os.clock()
    local f = judge(texts)
    local recall = retrieve(model)
    show(way[1], f, ("recall %.3f; %.0f s, %.0f, %.0f"):format(recall, t1 - t0, t2 - t1, os.clock() - t2))
    for i = 1, math.min(4, #texts) do r:say("   %s | %s", texts[i], test.clean[i]) end
    end
  end
end
