-- One model for reports, pictures, volumes and video
-- claim: one checkpoint answers questions about all four, with fewer tokens where little changes between frames
-- system: Hulu-Med: all that is seen as frames, one encoder, one decoder, pooling, unchanged places left out, stages
-- paper: Jiang et al. 2025, "Hulu-Med: A Transparent Generalist Model towards Holistic Medical Vision-Language
--   Understanding"
-- time: 4 minutes on one CPU core
--
-- WIP
local ty = require "tycho"
local datasets, models = require "tycho.datasets", require "tycho.models"
local vlm, zoo = require "tycho.vlm", require "tycho.zoo"
local facts, hulu, nn = datasets.volumes.facts, vlm.hulu, ty.nn

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 200, "of each model, or of its specialists together", quick = 4 },
    { "batch", 24, "questions of a step", quick = 4 },
    { "lr", 2e-3, "peak learning rate" },
    { "training", 500, "samples of each kind", quick = 6 },
    { "test", 150, "samples of each kind to measure with", quick = 4 },
    { "frames", 8, "of a clip" },
    { "every", 2, "slices of a volume, of which one is seen" },
    { "slices_threshold", 0.15, "change of a place of a slice that keeps it" },
    { "clips_threshold", 0.02, "change of a place of a frame that keeps it" },
    { "width", 96, "of the decoder" },
    { "layers", 3, "of the decoder" },
    { "data", 0, "seed" },
    { "pilot", "", "pattern" },
  },
}
local args = r.args
local kinds = { "text", "picture", "volume", "video" }
local laws = { constant = "it slides", gravity = "it falls or is thrown", bounce = "it bounces", spin = "it spins",
  approach = "it comes closer" }

-- ---- one encoder ----

local network = r:place(function() return zoo.load "scene-resnet" end):eval()
local function encode(frames)
  return vlm.embed(frames.shape[1], function(start, rows)
    local x = network.bn1(network.conv1(frames:narrow(0, start, rows):to { device = r.device })):relu()
    x = network.layer1(x)
    local last = network.layer3(network.layer2(x))
    return ty.concat({ last, ty.adaptive_avg_pool2d(x, { last.shape[3], last.shape[4] }) }, 1):permute(0, 2, 3, 1)
  end, 32)
end

-- ---- samples ----

-- Questions about findings: of two kinds, of which one is there where any is, and where it is.
local function questions_of(list, i, shown)
  local there, result = {}, {}
  for _, f in ipairs(list) do
    if not shown or shown(f) then there[f.kind] = there[f.kind] or f end
  end
  for k = 0, #facts.kinds - 1 do
    local kind = facts.kinds[(i + k) % #facts.kinds + 1]
    if there[kind] and not result.yes then
      result.yes = true
      result[#result + 1] = { "is there a " .. kind .. "?", "yes" }
      result[#result + 1] = { "where is the " .. kind .. "?", there[kind].organ }
    elseif not there[kind] and not result.no then
      result.no = true
      result[#result + 1] = { "is there a " .. kind .. "?", "no" }
    end
  end
  return result
end
local function visible(f) return f.kind == "calcification" or f.organ ~= "liver" and f.organ ~= "spleen" end

local function sighted(frames, shown, threshold)
  return hulu.see(frames, encode(shown), { threshold = threshold })
end
local function samples(split, count, whole)
  local result = { text = {}, picture = {}, volume = {}, video = {} }
  local function add(kind, seen, list, before)
    for _, pair in ipairs(list) do
      table.insert(result[kind], { seen = seen, question = (before or "") .. pair[1], answer = pair[2], kind = kind })
    end
  end
  local first = split == "training" and 0 or 0
  local texts = datasets.volumes.studies { split = split, seed = args.data, first = 500, count = count, volumes = false,
    findings = { 1, 3 } }
  for i, report in ipairs(texts.reports) do add("text", nil, questions_of(texts.findings[i], i), report .. "\n ") end
  local flat = datasets.volumes.studies { split = split, seed = args.data, first = first, count = count, volumes = true,
    frontal = true, findings = { 1, 3 } }
  for i = 1, count do
    local frame = flat.frontal:narrow(0, i - 1, 1)
    add("picture", sighted(frame, frame:clamp(-1, 1):expand(1, 3, 32, 32), 0), questions_of(flat.findings[i], i, visible))
    local slices = flat.volumes:select(0, i - 1):select(0, 0):permute(1, 0, 2):unsqueeze(1) -- [h, 1, d, w]
    slices = ty.avg_pool3d(slices:transpose(0, 1):unsqueeze(0), { args.every, 1, 1 }, { args.every, 1, 1 }):squeeze(0):transpose(0, 1)
    slices = ty.pad(slices, { 2, 2 }, "constant", -1)
    add("volume", sighted(slices, slices:clamp(-1, 1):expand(slices.shape[1], 3, 32, 32), whole and 0 or args.slices_threshold), questions_of(flat.findings[i], i))
  end
  local clips = datasets.load("clips", { split = split, seed = args.data, frames = args.frames, size = 32,
    fields = { "video", "law" } })
  for i = 0, count - 1 do
    local item = clips:get(i)
    local frames = item.video:to "f32" / 127.5 - 1
    add("video", sighted(frames, frames, whole and 0 or args.clips_threshold),
      { { "how does it move?", laws[datasets.clips.laws[item.law:item() + 1]] } })
  end
  return result
end
local training, test = samples("training", args.training), samples("validation", args.test)
r:say("seen: %.0f s", os.clock())
for _, kind in ipairs(kinds) do
  local count, all = 0, 0
  for _, s in ipairs(test[kind]) do
    if s.seen then count, all = count + s.seen.positions.shape[1], all + s.seen.length end
  end
  r:say("%s: %d questions, %.1f of %.1f tokens", kind, #test[kind], count / #test[kind], all / #test[kind])
end
local words = {}
for _, kind in ipairs(kinds) do
  for _, s in ipairs(training[kind]) do words[#words + 1] = (" %s\n %s"):format(s.question, s.answer) end
end
local tokenizer = ty.tokenizer.train(words, { vocabulary = 500, special = { "<end>" } })
ty.tokenizer.fields(tokenizer).eos = 0

-- ---- training ----

local function new_model(seed)
  ty.manual_seed(seed)
  return r:place(function()
    return hulu.Model(models.Llama { model_type = "llama", vocab_size = tokenizer.size, hidden_size = args.width,
      intermediate_size = args.width * 8 // 3, num_hidden_layers = args.layers, num_attention_heads = args.width // 32,
      max_position_embeddings = 512, tie_word_embeddings = true }, 112)
  end)
end

-- Shares of the steps, and the kinds that are drawn from in them, each as often.
local progressive = { { 0.2, { "text" } }, { 0.3, { "text", "picture" } }, { 0.5, kinds } }
local function train(seed, plan, steps)
  local model = new_model(seed)
  local opt = ty.optim.AdamW(model:parameters(), { lr = args.lr, beta2 = 0.95, clip_norm = 1, weight_decay = 0.05,
    schedule = ty.optim.cosine { steps = steps, warmup = math.max(1, steps // 10), final = 0.05 } })
  local stage, done, tail = 1, 0, 0
  for step = 1, steps do
    while stage < #plan and step > done + plan[stage][1] * steps do
      done, stage = done + plan[stage][1] * steps, stage + 1
    end
    ty.scope(function()
      local list = {}
      local from = plan[stage][2]
      local draws = ty.randint(0, 1 << 30, { args.batch }):tolist()
      for k = 1, args.batch do
        local pool = training[from[(k - 1) % #from + 1]]
        list[k] = pool[draws[k] % #pool + 1]
      end
      local loss = hulu.loss(model, hulu.pack(list, tokenizer))
      opt:step(loss)
      if step > steps - 10 then tail = tail + loss:item() / 10 end
    end)
  end
  r:say("  loss %.3f", tail)
  return model
end
local function ask(model, of, which)
  local found = {}
  model:eval()
  for _, kind in ipairs(which) do
    for start = 1, #of[kind], 40 do
      local list = table.move(of[kind], start, math.min(start + 39, #of[kind]), 1, {})
      local part = ty.scope(function() return hulu.ask(model, hulu.pack(list, tokenizer)) end)
      table.move(part, 1, #part, #found + 1, found)
    end
  end
  return vlm.answers.shares(found)
end
local function show(name, s)
  r:say("%-12s all %.3f text %.3f picture %.3f volume %.3f video %.3f  %.0f s", name, s.all, s.text or 0, s.picture or 0, s.volume or 0, s.video or 0, os.clock())
end
-- The likeliest answer to each question, whatever is seen.
local counts, blind = {}, {}
for _, kind in ipairs(kinds) do
  for _, s in ipairs(training[kind]) do
    local q = kind .. s.question:match "[^\n]*$"
    counts[q] = counts[q] or {}
    counts[q][s.answer] = (counts[q][s.answer] or 0) + 1
  end
  for _, s in ipairs(test[kind]) do
    local best
    local of = counts[kind .. s.question:match "[^\n]*$"] or {}
    for answer, n in pairs(of) do if not best or n > of[best] then best = answer end end
    blind[#blind + 1] = { kind = kind, right = best == s.answer }
  end
end
show("blind", vlm.answers.shares(blind))
for _, seed in ipairs(r.seeds) do
  if ("unified"):find(args.pilot) then show("unified", ask(train(seed, progressive, args.steps), test, kinds)) end
  if ("mixed"):find(args.pilot) then show("mixed", ask(train(seed, { { 1, kinds } }, args.steps), test, kinds)) end
  for _, kind in ipairs(kinds) do
    if ("specialists"):find(args.pilot) then
    show(kind, ask(train(seed, { { 1, { kind } } }, args.steps // 4), test, { kind })) end
  end
end
