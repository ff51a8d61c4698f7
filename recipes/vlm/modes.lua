-- Experts that a token can do without are skipped
-- claim: 80 % of the chosen experts are not computed, and 97 % of the questions that were answered still are
-- system: MoDES on a mixture of experts made of scene-vlm: importance by layer, thresholds for text and for pictures
-- paper: Huang et al. 2025, "MoDES: Accelerating Mixture-of-Experts Multimodal Large Language Models via Dynamic Expert
--   Skipping"
-- time: 5 minutes on one CPU core
--
-- The zoo has no mixture of experts, so each feed-forward network of scene-vlm is divided into 16 thin experts, of
-- which a router chooses 8. A router that looks at the mean of an expert's gates needs no training: the mixture answers
-- 0.95 of what the dense model does, by its division 0.92 to 0.97; 60 steps of training made no difference (0.943 +-
-- 0.027 and, at thrice the rate, 0.938 +- 0.029, by other seeds). Seeds draw the division and the calibration pictures.
-- Skipped experts are not computed: they get the rows that stay, which are counted. The small loss of the claim is that
-- of the paper's abstract (88 % skipped, 97 % kept). All rules have the same calibration pictures, of which none is
-- tested with, and the same least share, or nearly: fewer experts for all tokens (2 of 8 and 1 of 8), one threshold on
-- the router's weights, the same times the layers' importance, and two thresholds without it.
--
-- Calibration takes the paper's 512 samples: words move less than half as far as with 160. Two thresholds are what
-- matters: importance by layer adds nothing in a decoder of four layers, and with one threshold it does harm: words
-- need experts of layers other than the first.
local ty = require "tycho"
local prune, vlm, zoo = require "tycho.prune", require "tycho.vlm", require "tycho.zoo"
local answerer, modes = zoo.answerer, prune.modes

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "experts", 16, "of each layer" },
    { "chosen", 8, "of them for each token" },
    { "share", 0.805, "of the chosen ones that are skipped in calibration" },
    { "steps", 0, "of training the mixture on", quick = 1 },
    { "lr", 3e-4, "peak learning rate" },
    { "calibration", 512, "scenes to calibrate with, with one question each", quick = 3 },
    { "points", 24, "thresholds of each kind that are tried", quick = 4 },
    { "test", 300, "scenes to measure with", quick = 3 },
    { "rounds", 20, "of timing", quick = 1 },
  },
}
local args = r.args
local tokenizer = zoo.tokenizer "scene-vlm"
local dialogue = answerer.dialogue(tokenizer)
local start = r:place(function() return zoo.load "scene-vlm" end)
local test = answerer.featured(start, answerer.questions("validation", args.test))

local single = answerer.single(test)
local dense_score = vlm.answers.shares(vlm.answers.ask(start, dialogue, test)).all
local layers, even = #start.language_model.model.layers, {}
for l = 1, layers do even[l] = 1 end
even = { text = even, visual = even }

local rules = { { name = "MoDES" }, { name = "two thresholds", alpha = even }, { name = "one threshold", alpha = even,
  one = true }, { name = "one threshold with importance", one = true } }
local kept, far, skipped = {}, {}, {} -- by rule or the number of experts
for _, rule in ipairs(rules) do kept[rule.name], far[rule.name], skipped[rule.name] = {}, {}, {} end
for k = 1, 2 do kept[k], far[k] = {}, {} end
local unskipped, mixed, better, shown = {}, {}, {}, nil

for i, seed in ipairs(r.seeds) do
  local model = prune.moefy(start, { experts = args.experts, chosen = args.chosen, seed = seed })
  if args.steps > 0 then
    local pool = answerer.featured(start, answerer.questions("training", 500, { seed = seed + 1 }))
    answerer.tune(model, dialogue, pool, { steps = args.steps, lr = args.lr, seed = seed })
  end
  local data = answerer.featured(start, answerer.questions("training", args.calibration, { seed = seed + 1000,
    questions = 1 }))
  local logits, judged = answerer.logits(model, dialogue, data), answerer.logits(model, dialogue, single)
  local whole = vlm.answers.ask(model, dialogue, test)
  local score, before = vlm.answers.shares(whole).all, ty.keep(ty.no_grad(judged))
  mixed[i], unskipped[i] = score / dense_score, score
  local function measure(key)
    local found = vlm.answers.ask(model, dialogue, test)
    kept[key][i] = vlm.answers.shares(found).all / score
    local after, counts = modes.count(model, function() return ty.no_grad(judged) end)
    far[key][i] = modes.divergence(before, after)
    return found, counts
  end
  modes.apply(model)
  local alpha, of_modes = modes.importance(model, logits), nil
  for _, rule in ipairs(rules) do
    local given = modes.calibrate(model, logits, { share = args.share, points = args.points, one = rule.one,
      alpha = rule.alpha or alpha })
    local found, counts = measure(rule.name)
    skipped[rule.name][i] = counts.skipped
    r:say("seed %d, %s: %.3f skipped, %.3f of the answers kept, divergence %.4f; %.4f on calibration data (%d tries)",
      seed, rule.name, counts.skipped, kept[rule.name][i], far[rule.name][i], given.divergence, given.measurements)
    if rule.name == "MoDES" then
      of_modes = found
      shown = shown or { model = model, given = given }
    end
  end
  modes.set(model, { text = 0, visual = 0 })
  local function choose(k)
    for _, layer in ipairs(model.language_model.model.layers) do layer.block_sparse_moe.chosen = k end
  end
  for k = 1, 2 do
    choose(k)
    better[i] = (vlm.answers.paired(measure(k), of_modes)) -- than with 2 in the end
  end
  choose(args.chosen)
  r:say("seed %d: mixture %.3f, dense %.3f; 2 and 1 keep %.3f, %.3f", seed, score, dense_score, kept[2][i], kept[1][i])
end

-- Seconds of reading 32 prompts, and of a word after one of them.
local model, given = shown.model, shown.given
local batch = test[1].features:narrow(0, 0, math.min(32, test[1].features.shape[1]))
local prompt, word, cache = dialogue:prompt(single[1].questions[1][1].question), ty.tensor { { 5 } }, model:cache()
prompt, word = prompt:to { device = model:device() }, word:to { device = model:device() }
local function read(features, held)
  local tokens = prompt:expand(features.shape[1], prompt.shape[2])
  return model:hidden(tokens, { features = features, cache = held, last = 1 }):sum():item()
end
ty.no_grad(function() read(batch:narrow(0, 0, 1), cache) end)
local none, full, work = { text = 0, visual = 0 }, { text = given.text, visual = given.visual }, {}
for name, with in pairs { all = none, some = full } do
  work["read " .. name] = function()
    modes.set(model, with)
    ty.no_grad(read, batch)
  end
  work["say " .. name] = function()
    modes.set(model, with)
    ty.no_grad(function() model:hidden(word, { cache = cache }):sum():item() end)
    cache:truncate(prompt.shape[2])
  end
end
modes.set(model, { alpha = given.alpha })
local times = r:time(work, { rounds = args.rounds, calls = { ["say all"] = r.quick and 2 or 20,
  ["say some"] = r.quick and 2 or 20 } })

-- How many of its experts each patch gets in each layer but the last, which works on words alone: darker, fewer.
local count = math.min(5, test[1].image.shape[1])
local image, side = test[1].image:narrow(0, 0, count):to "u8", math.tointeger(batch.shape[2] ^ 0.5)
local few, pictures = answerer.subset(single, { table.unpack({ 0, 1, 2, 3, 4 }, 1, count) }), { image }
modes.set(model, full)
modes.count(model, function() ty.no_grad(answerer.logits(model, dialogue, { few })) end, function(layer, _, _, chosen)
  if layer < layers then pictures[#pictures + 1] = ty.keep(modes.paint(image, chosen, side)) end
end)
ty.plot.grid(ty.concat(pictures, 0), { columns = count }):save(r:picture "experts.png")

local function row(claim, values, more)
  local result = { claim = claim, values = values, judged = false }
  for key, value in pairs(more or {}) do result[key] = value end
  return result
end
os.exit(r:finish {
  row("chosen experts that are not computed", skipped.MoDES, { bar = 0.8, judged = true }),
  row("questions answered, of those without skipping", kept.MoDES, { bar = 0.97, judged = true, baseline = unskipped }),
  row("answered more than with 2 of 8 experts", better, { bar = 0, judged = true }),
  row("divergence of the words", far.MoDES, { baseline = far["one threshold"], below = true }),
  row("with two thresholds without importance: answered", kept["two thresholds"]),
  row("  divergence", far["two thresholds"]),
  row("with one threshold: answered", kept["one threshold"]),
  row("with one threshold and importance: answered", kept["one threshold with importance"]),
  row("with 2 of 8 experts, 75 % skipped: answered", kept[2]),
  row("with 1 of 8 experts, 88 % skipped: answered", kept[1]),
  row("the mixture of experts, of what the dense model answers", mixed, { bar = 0.97, judged = true }),
  { claim = "seconds to read 32 prompts, of those without skipping", judged = false,
    measured = times["read some"] / times["read all"] },
  { claim = "seconds of a further word, of those without skipping", judged = false,
    measured = times["say some"] / times["say all"] },
}, true)
