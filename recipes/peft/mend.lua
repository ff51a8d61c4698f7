-- Editing what a language model believes, by a network that reads the gradient of one example
-- claim: nine of ten edits hold, also said otherwise, and unrelated text loses at most 0.02 nats a token
-- system: the small Llama of the zoo with a table of invented facts; MEND against fine-tuning on the edit
-- paper: Mitchell et al. 2022, "Fast Model Editing at Scale"
-- time: 4 minutes on one CPU core
--
-- The model first learns a table by heart: invented people, two relations, five ways of saying each, with verses of
-- the Bible in between. An edit is one sentence with another object. Editors are trained on some of the people and
-- three of the phrasings; what counts are edits of other people, said in a phrasing that training had and asked for in
-- the two that it had not. Drawdown is what held-out verses lose, in nats a token; and how many other facts, of all
-- people and phrasings, are no longer right. Fine-tuning changes the same weights by Adam until the edit's own
-- sentence has the new object, at rates chosen on people of the training part: plainly, with KL to the model before on
-- unrelated text, and on the last block alone.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local peft, zoo = require "tycho.peft", require "tycho.zoo"
local nn, optim = ty.nn, ty.optim

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "people", 60, "of whom a quarter is held out", quick = 8 },
    { "learning", 220, "steps in which the table is learnt", quick = 2 },
    { "steps", 400, "of training an editor", quick = 2 },
    { "edits", 24, "held-out ones that are measured", quick = 2 },
    { "rank", 128, "of the editor's layers", quick = 8 },
    { "rate", 1e-3, "of the editor's networks" },
    { "alpha", 1e-4, "at the start" },
    { "share", 0.1, "of the edit in the objective" },
    { "tries", 8, "edits by which fine-tuning's rate is chosen", quick = 1 },
  },
}
local args = r.args

-- ---- the table ----

local relations = {
  { objects = { "Jerusalem", "Egypt", "Babylon", "Hebron", "Samaria", "Zion", "Gilead", "Jericho", "Bethel", "Moab" },
    "And %s dwelt in the city of", "The city of %s was", "Then returned %s unto his house in",
    "And they buried %s in", "Now the inheritance of %s was in" },
  { objects = { "David", "Moses", "Aaron", "Saul", "Jacob", "Joseph", "Solomon", "Samuel", "Joshua", "Abraham" },
    "And %s was the son of", "The father of %s was", "And these are the words of %s the son of",
    "Now %s was of the seed of", "And %s hearkened unto the voice of his father" },
}
local learnt, asked = { 1, 2, 3 }, { 4, 5 } -- phrasings that editors are trained with, and the others
local starts, ends = { "Bal", "Zim", "Har", "Mel", "Jot", "Kel", "Nad", "Oz", "Pel", "Tir" },
  { "dor", "rok", "an", "tesh", "uel", "bor", "iph", "mar" }

local tokenizer = zoo.tokenizer "kjv-lm"
local function ids(text) return tokenizer:encode(text):tolist() end
local facts, held_out, trained = {}, {}, {}
for person = 0, args.people - 1 do
  local name = starts[person % #starts + 1] .. ends[person // #starts % #ends + 1]
  for k, relation in ipairs(relations) do
    local fact = { prompts = {}, objects = {}, name = name }
    for i, object in ipairs(relation.objects) do fact.objects[i] = ids(" " .. object)[1] end
    fact.answer = fact.objects[(person * 7 + k * 3 + person // 10) % #fact.objects + 1]
    for i, phrasing in ipairs(relation) do fact.prompts[i] = ids(phrasing:format(name)) end
    facts[#facts + 1] = fact
    table.insert(person % 4 == 3 and held_out or trained, fact)
  end
end

local function chapters(split)
  local set, list = datasets.load("kjv", { split = split }), {}
  for i = 0, #set - 1 do list[#list + 1] = table.concat(set:get(i).verses, " ") end
  return list
end
local seen, unseen = chapters "training", chapters "held_out"
local function text(chapter, count) -- its first tokens, [1, count + 1] or fewer
  local tokens = tokenizer:encode(chapter:sub(1, 8 * count + 200)):to "i64"
  return tokens:narrow(0, 0, math.min(count + 1, tokens:numel())):unsqueeze(0)
end

-- Logits [n, classes] behind each of the prompts.
local function behind(model, prompts)
  local tokens, cu, longest, last = {}, { 0 }, 0, {}
  for _, prompt in ipairs(prompts) do
    table.move(prompt, 1, #prompt, #tokens + 1, tokens)
    cu[#cu + 1], longest, last[#last + 1] = #tokens, math.max(longest, #prompt), #tokens - 1
  end
  local options = { cu_seqlens = ty.tensor(cu, { dtype = "i64" }), longest = longest }
  return model(ty.tensor({ tokens }, { dtype = "i64" }), options):flatten(0, 1)
    :index_select(0, ty.tensor(last, { dtype = "i64" }))
end

local function answers(model, prompts, objects)
  return nn.cross_entropy(behind(model, prompts), ty.tensor(objects, { dtype = "i64" }))
end

local function text_loss(model, tokens)
  local n = tokens.shape[2] - 1
  return nn.cross_entropy(model(tokens:narrow(1, 0, n)):flatten(0, 1), tokens:narrow(1, 1, n):reshape(-1))
end

-- ---- a model that knows it ----

local random = math.random
math.randomseed(r.seed + 1)
local function some(list) return list[random(#list)] end
local function any_text() return text(some(seen), 48) end

ty.manual_seed(r.seed)
local model = zoo.load "kjv-lm"
do
  local path = r:path "facts.safetensors"
  local opt = optim.AdamW(model, { lr = 1e-3, weight_decay = 0, clip_norm = 1,
    schedule = optim.linear { steps = args.learning } })
  for step = 1, args.learning do
    local prompts, objects = {}, {}
    for i = 1, r.quick and 4 or 32 do
      local fact = facts[random(#facts)]
      prompts[i], objects[i] = some(fact.prompts), fact.answer
    end
    ty.scope(function()
      local loss = answers(model, prompts, objects)
      if step % 50 == 0 then r:say("step %d of learning the table: loss %.4f", step, loss:item()) end
      opt:step(loss + text_loss(model, any_text()))
    end)
  end
  model:eval()
  model:save(path)
end
for _, p in ipairs(model:parameters()) do p:requires_grad_(false) end

-- For each of the prompts 1 where the likeliest token is the object.
local function hits(prompts, objects)
  return ty.no_grad(ty.scope, function()
    return behind(model, prompts):argmax(-1):eq(ty.tensor(objects, { dtype = "i64" })):to("i64"):tolist()
  end)
end
local function share_right(prompts, objects) return ty.stats.mean(hits(prompts, objects)) end

local probes, truth = {}, {} -- of all facts, in every phrasing, some
for i = 1, r.quick and 4 or 60 do
  local fact = facts[random(#facts)]
  probes[i], truth[i] = some(fact.prompts), fact.answer
end
local unrelated = {}
for i = 1, r.quick and 1 or 3 do unrelated[i] = text(unseen[#unseen * i // 4], r.quick and 16 or 127) end
local function text_nats()
  return ty.no_grad(ty.scope, function()
    local sum = 0
    for _, tokens in ipairs(unrelated) do sum = sum + text_loss(model, tokens):item() end
    return sum / #unrelated
  end)
end
local known, nats = hits(probes, truth), text_nats()
r:say("the model knows %.1f %% of the table; verses %.4f nats a token", 100 * ty.stats.mean(known), nats)

-- ---- edits ----

-- `count` edits of facts: another object each, said in one phrasing.
local function edits_of(list, count)
  local edits = {}
  for i = 1, count do
    local fact = list[(i - 1) % #list + 1]
    local object = some(fact.objects)
    while object == fact.answer do object = some(fact.objects) end
    edits[i] = { fact = fact, object = object, prompt = fact.prompts[some(learnt)] }
  end
  return edits
end

-- What is unrelated to a fact: the beginning of other facts and a bit of text; logits of both.
local function bystanders(fact)
  local prompts = {}
  while #prompts < 16 do
    local other = some(trained)
    if other ~= fact then prompts[#prompts + 1] = other.prompts[some(learnt)] end
  end
  local tokens = any_text():narrow(1, 0, 16)
  return function() return ty.concat({ behind(model, prompts), model(tokens):flatten(0, 1) }, 0) end
end

-- Success and drawdown of ways to edit: change(edit) changes the model, restore() takes it back.
local function measure(edits, change, restore)
  local found = { own = 0, asked = 0, drawdown = 0, lost = 0 }
  for _, edit in ipairs(edits) do
    change(edit)
    local prompts, objects = {}, {}
    for i, k in ipairs(asked) do prompts[i], objects[i] = edit.fact.prompts[k], edit.object end
    found.own = found.own + share_right({ edit.prompt }, { edit.object }) / #edits
    found.asked = found.asked + share_right(prompts, objects) / #edits
    found.drawdown = found.drawdown + (text_nats() - nats) / #edits
    local after, lost, count = hits(probes, truth), 0, 0
    for i, prompt in ipairs(probes) do
      local same = false
      for _, own in ipairs(edit.fact.prompts) do same = same or own == prompt end
      if not same then lost, count = lost + known[i] - after[i], count + 1 end
    end
    found.lost = found.lost + lost / count / #edits
    restore()
  end
  return found
end

local function told(name, found)
  r:say("%s: %.3f of the edits hold as said, %.3f otherwise; verses lose %.4f nats, other facts %.3f", name, found.own,
    found.asked, found.drawdown, found.lost)
end

local last = model.config.num_hidden_layers - 1
local function layer_names(count)
  local names = {}
  for block = last - count + 1, last do
    for _, kind in ipairs { "gate_proj", "up_proj", "down_proj" } do
      names[#names + 1] = ("layers.%d.mlp.%s"):format(block, kind)
    end
  end
  return names
end

-- ---- fine-tuning on the edit ----

local function fine_tuning(names, with_kl)
  local weights, start = {}, {}
  for i, layer in ipairs(nn.surgery.find("mend", model, { targets = names })) do
    weights[i] = layer.module.weight
    start[i] = weights[i]:detach():clone()
  end
  local function restore()
    ty.no_grad(function() for i, w in ipairs(weights) do w:detach():copy_(start[i]) end end)
  end
  local function changer(rate)
    return function(edit)
      for _, w in ipairs(weights) do w:requires_grad_() end
      local opt = optim.Adam(weights, { lr = rate })
      local keep = with_kl and bystanders(edit.fact)
      local before = keep and ty.no_grad(function() return keep():log_softmax(-1) end)
      for _ = 1, r.quick and 1 or 25 do
        if share_right({ edit.prompt }, { edit.object }) == 1 then break end
        ty.scope(function()
          local loss = answers(model, { edit.prompt }, { edit.object })
          if keep then loss = loss + (before:exp() * (before - keep():log_softmax(-1))):sum(-1):mean() end
          opt:step(loss)
        end)
      end
      for _, w in ipairs(weights) do w:requires_grad_(false) end
    end
  end
  return changer, restore
end

local baselines, test_edits = {}, edits_of(held_out, args.edits)
for _, way in ipairs { { "fine-tuning", layer_names(3) }, { "fine-tuning with KL", layer_names(3), true },
  { "fine-tuning of the last block", layer_names(1) } } do
  local changer, restore = fine_tuning(way[2], way[3])
  local best, score
  local tried = edits_of(trained, args.tries)
  for _, rate in ipairs(r.quick and { 1e-3 } or { 3e-4, 1e-3 }) do
    local found = measure(tried, changer(rate), restore)
    local value = found.asked - found.lost - found.drawdown
    if not best or value > score then best, score = rate, value end
  end
  local found = measure(r.quick and test_edits or table.move(test_edits, 1, args.edits // 2, 1, {}), changer(best),
    restore)
  told(("%s, rate %g"):format(way[1], best), found)
  for key, value in pairs(found) do r.metrics[way[1] .. "/" .. key] = value end
  baselines[#baselines + 1] = found
end

-- ---- MEND ----

local own, otherwise, drawdown, lost, curves = {}, {}, {}, {}, {}
for i, seed in ipairs(r.seeds) do
  ty.manual_seed(seed)
  math.randomseed(seed + 100)
  local editor = peft.mend.editor(model, { layers = layer_names(3), rank = args.rank, rate = args.alpha })
  local opt = optim.Adam(editor:groups(args.alpha / 10), { lr = args.rate, clip_norm = 10,
    schedule = optim.linear { steps = args.steps, final = 0.1 } })
  local x, y, smooth = {}, {}, nil
  for step = 1, args.steps do
    ty.scope(function()
      local edit = edits_of({ some(trained) }, 1)[1]
      local prompts, objects = {}, {}
      for k = 1, #learnt do prompts[k], objects[k] = edit.fact.prompts[learnt[k]], edit.object end
      local loss, parts = editor:objective {
        edit = function() return answers(model, { edit.prompt }, { edit.object }) end,
        check = function() return answers(model, prompts, objects) end, keep = bystanders(edit.fact),
        share = args.share }
      opt:step(loss)
      smooth = smooth and 0.95 * smooth + 0.05 * parts.check or parts.check
      x[step], y[step] = step, smooth
      if step % 50 == 0 then
        r:say("seed %d, step %d: loss %.3f otherwise, %.4f changed", seed, step, smooth, parts.change)
      end
    end)
  end
  curves[i] = { x = x, y = y, label = "seed " .. seed }
  local found = measure(test_edits, function(edit)
    editor:edit(function() return answers(model, { edit.prompt }, { edit.object }) end)
  end, function() editor:undo() end)
  told(("MEND, seed %d"):format(seed), found)
  own[i], otherwise[i], drawdown[i], lost[i] = found.own, found.asked, found.drawdown, found.lost
  if i == 1 then -- edits in sequence, all of them there at once
    local count = math.min(4, #test_edits)
    for k = 1, count do
      local edit = test_edits[k]
      editor:edit(function() return answers(model, { edit.prompt }, { edit.object }) end)
    end
    local held = 0
    for k = 1, count do held = held + share_right({ test_edits[k].prompt }, { test_edits[k].object }) / count end
    r:say("%d edits in sequence: %.2f hold, verses lose %.4f nats", count, held, text_nats() - nats)
    r.metrics["edits in sequence that hold"] = held
    for _ = 1, count do editor:undo() end
  end
end
ty.plot.line { series = curves, title = "Loss of the edit said otherwise, edits of training", x_label = "steps",
  y_label = "nats, smoothed", width = 640, height = 400 }:save(r:picture "mend.png")

local function of_baselines(key)
  local list = {}
  for i, found in ipairs(baselines) do list[i] = found[key] end
  return list
end
os.exit(r:finish {
  { claim = "held-out edits that hold as they were said", values = own, baseline = of_baselines "own", bar = 0.9 },
  { claim = "held-out edits that hold in phrasings without training", values = otherwise,
    baseline = of_baselines "asked", bar = 0.9 },
  { claim = "what verses lose by an edit, nats a token", values = drawdown, baseline = of_baselines "drawdown",
    bar = 0.02, below = true },
  { claim = "share of other facts that an edit breaks", values = lost, baseline = of_baselines "lost", bar = 0.02,
    below = true },
}, true)
