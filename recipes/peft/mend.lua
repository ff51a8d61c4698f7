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
--
-- Facts that an edit breaks are those of the same relation: with 120 steps and share 0.03, 4 % of these and hardly any
-- others. Tried on training people kept apart, 150 steps: share 0.03 breaks 2.0 % (0.65 hold in other phrasings), share
-- 0.1 2.5 % (0.77); with more facts of the same relation among those to be kept 2.4 % (0.75), these with 800 steps and
-- share 0.05 1.96 % (0.85), and with 12 of 16 of the same relation, on other people, 2.6 % (0.94).
local ty = require "tycho"
local datasets = require "tycho.datasets"
local peft, zoo = require "tycho.peft", require "tycho.zoo"
local optim = ty.optim

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

local tokenizer = zoo.tokenizer "kjv-lm"
local function chapters(split)
  local set, list = datasets.load("kjv", { split = split }), {}
  for i = 0, #set - 1 do list[#list + 1] = table.concat(set:get(i).verses, " ") end
  return list
end
local unseen, unrelated = chapters "held_out", {}
for i = 1, r.quick and 1 or 3 do unrelated[i] = unseen[#unseen * i // 4] end

-- ---- a model that knows the table ----

math.randomseed(r.seed + 1)
ty.manual_seed(r.seed)
local model = zoo.load "kjv-lm"
local beliefs = peft.beliefs.new(model, tokenizer, { people = args.people, texts = chapters "training",
  unrelated = unrelated, unrelated_length = r.quick and 16 or 127, probes = r.quick and 4 or 60 })
local learnt = peft.beliefs.learnt
beliefs:learn(optim.AdamW(model, { lr = 1e-3, weight_decay = 0, clip_norm = 1,
  schedule = optim.linear { steps = args.learning } }), args.learning, { batch = r.quick and 4 or 32,
  watch = function(step, loss) r:say("step %d of learning the table: loss %.4f", step, loss) end })
model:save(r:path "facts.safetensors")
r:say("the model knows %.1f %% of the table; verses %.4f nats a token", 100 * ty.stats.mean(beliefs.known),
  beliefs.nats)

local function told(name, found)
  r:say("%s: %.3f of the edits hold as said, %.3f otherwise; verses lose %.4f nats, other facts %.3f", name, found.own,
    found.asked, found.drawdown, found.lost)
  return found
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

local baselines, test_edits = {}, beliefs:edits(beliefs.held_out, args.edits)
for _, way in ipairs { { "fine-tuning", layer_names(3) }, { "fine-tuning with KL", layer_names(3), true },
  { "fine-tuning of the last block", layer_names(1) } } do
  local change, restore = beliefs:fine_tuning(way[2], { kl = way[3], steps = r.quick and 1 or 25 })
  local best, score
  local tried = beliefs:edits(beliefs.trained, args.tries)
  for _, rate in ipairs(r.quick and { 1e-3 } or { 3e-4, 1e-3 }) do
    local found = beliefs:measure(tried, change(rate), restore)
    local value = found.asked - found.lost - found.drawdown
    if not best or value > score then best, score = rate, value end
  end
  local found = beliefs:measure(r.quick and test_edits or table.move(test_edits, 1, args.edits // 2, 1, {}),
    change(best), restore)
  for key, value in pairs(found) do r.metrics[way[1] .. "/" .. key] = value end
  baselines[#baselines + 1] = told(("%s, rate %g"):format(way[1], best), found)
end

-- ---- MEND ----

local all, curves = {}, {}
for i, seed in ipairs(r.seeds) do
  ty.manual_seed(seed)
  math.randomseed(seed + 100)
  local editor = peft.mend.editor(model, { layers = layer_names(3), rank = args.rank, rate = args.alpha })
  local opt = optim.Adam(editor:groups(args.alpha / 10), { lr = args.rate, clip_norm = 10,
    schedule = optim.linear { steps = args.steps, final = 0.1 } })
  local x, y, smooth = {}, {}, nil
  for step = 1, args.steps do
    ty.scope(function()
      local edit = beliefs:edits({ beliefs.trained[math.random(#beliefs.trained)] }, 1)[1]
      local loss, parts = editor:objective {
        edit = function() return beliefs:loss({ edit.prompt }, { edit.object }) end,
        check = function() return beliefs:loss(beliefs:said(edit, learnt)) end, keep = beliefs:bystanders(edit.fact),
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
  local function change(edit) editor:edit(function() return beliefs:loss({ edit.prompt }, { edit.object }) end) end
  all[i] = told(("MEND, seed %d"):format(seed), beliefs:measure(test_edits, change, function() editor:undo() end))
  if i == 1 then -- edits in sequence, all of them there at once
    local count, held = math.min(4, #test_edits), 0
    for k = 1, count do change(test_edits[k]) end
    for k = 1, count do held = held + beliefs:share({ test_edits[k].prompt }, { test_edits[k].object }) / count end
    r:say("%d edits in sequence: %.2f hold, verses lose %.4f nats", count, held, beliefs:text_nats() - beliefs.nats)
    r.metrics["edits in sequence that hold"] = held
    for _ = 1, count do editor:undo() end
  end
end
ty.plot.line { series = curves, title = "Loss of the edit said otherwise, edits of training", x_label = "steps",
  y_label = "nats, smoothed", width = 640, height = 400 }:save(r:picture "mend.png")

local function row(claim, key, bar, below)
  return { claim = claim, values = ty.stats.column(all, key), baseline = ty.stats.column(baselines, key), bar = bar,
    below = below }
end
os.exit(r:finish {
  row("held-out edits that hold as they were said", "own", 0.9),
  row("held-out edits that hold in phrasings without training", "asked", 0.9),
  row("what verses lose by an edit, nats a token", "drawdown", 0.02, true),
  row("share of other facts that an edit breaks", "lost", 0.02, true),
}, true)
