-- Deeper layers work on fewer of a picture's tokens
-- claim: with 56 % of the decoder's work and 54 % of its cache, as many questions are answered
-- system: p-MoD on scene-vlm: a router in each layer, TanhNorm, symmetric reweighting, shares that decay as a cosine
-- paper: Zhang et al. 2025, "p-MoD: Building Mixture-of-Depths MLLMs via Progressive Ratio Decay"
-- time: 12 minutes on one CPU core
--
-- All models begin as scene-vlm and their decoders are tuned on the same questions in the same order at the same rate;
-- the tower and the projector stay. The dense model is tuned as well. The other schedule is one that the paper compares
-- with: one share for all layers behind the first, such that it works as much as the decaying one. Questions of the
-- test are of other scenes than those of tuning; models are compared question by question.
--
-- The answers do not stay. Half of a decoder of four layers is deep by the schedule, and the routers, which begin at
-- zero, do not find the objects: the picture shows what each layer keeps. With a fifth of the steps, on a third of the
-- pictures, 0.778 +- 0.034 stayed. A third as much is lost with the same share for all layers behind the first. A
-- router of the last layer has no gradient, so it asks the one before; with its own, 0.896 +- 0.026 of the answers
-- stayed, on an earlier scene-vlm that answered 0.73 of the questions (0.900 with that of the one before). There a
-- floor of 0.15 with a dense first layer kept no more, nor did routers that learn fifty times as fast as the rest.
local ty = require "tycho"
local vlm, zoo = require "tycho.vlm", require "tycho.zoo"
local answerer, mod = zoo.answerer, vlm.mixture_of_depths

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 300, "of tuning each model", quick = 1 },
    { "batch", 16, "pictures of a step", quick = 2 },
    { "questions", 4, "about each of them" },
    { "lr", 1e-3, "peak learning rate" },
    { "pool", 1500, "scenes that are tuned on", quick = 4 },
    { "test", 200, "scenes to measure with", quick = 4 },
    { "shift", 0.34, "of the cosine: the mean share of tokens that layers keep" },
    { "floor", 0.25, "the least share" },
    { "scale", 0.2, "of TanhNorm" },
    { "times", 5.0, "the rate at which routers learn, which begin at zero" },
  },
}
local args = r.args
local tokenizer = zoo.tokenizer "scene-vlm"
local dialogue = answerer.dialogue(tokenizer)
local function base() return r:place(function() return zoo.load "scene-vlm" end) end

local start = base()
local test = answerer.featured(start, answerer.questions("validation", args.test))

-- Costs are those of a question as long as the test's are in the mean.
local asked, length = 0, 0
for _, batch in ipairs(test) do
  for _, turns in ipairs(batch.questions) do
    for _, turn in ipairs(turns) do
      asked, length = asked + 1, length + dialogue:prompt(turn.question).shape[2] - dialogue.features
    end
  end
end
local text = math.floor(length / asked + 0.5)
local function cost_of(shares) return vlm.cost(start, { text = text, shares = shares }) end

local layers = #start.language_model.model.layers
local decay = mod.shares(layers, { shift = args.shift, floor = args.floor, dense = 0.85 })

-- The share x of shares(x) at which the work is that of the decaying schedule.
local function equal(shares)
  local wanted = cost_of(decay).prefill
  local low, high = 0, 1
  for _ = 1, 40 do
    local middle = (low + high) / 2
    if cost_of(shares(middle)).prefill < wanted then low = middle else high = middle end
  end
  return shares(high)
end
local schedules = { { name = "decaying", shares = decay }, { name = "constant", shares = equal(function(x)
  local list = {}
  for l = 1, layers do list[l] = l == 1 and 1 or x end
  return list
end) } }

local untuned = vlm.answers.shares(vlm.answers.ask(start, dialogue, test)).all

local function run(seed, shares)
  local model = base()
  if shares then mod.apply(model, { shares = shares, scale = args.scale }) end
  local pool = answerer.featured(start, answerer.questions("training", args.pool, { seed = seed + 1,
    questions = args.questions }))
  answerer.tune(model, dialogue, pool, { steps = args.steps, batch = args.batch, lr = args.lr, seed = seed,
    fast = "router", times = args.times })
  return vlm.answers.ask(model, dialogue, test), model
end

local dense, found, better, shown = {}, {}, {}, nil
for _, schedule in ipairs(schedules) do found[schedule.name], better[schedule.name] = {}, {} end
for i, seed in ipairs(r.seeds) do
  local reference = run(seed)
  dense[i] = vlm.answers.shares(reference).all
  for _, schedule in ipairs(schedules) do
    local answered, model = run(seed, schedule.shares)
    found[schedule.name][i] = vlm.answers.shares(answered).all
    local difference, err = vlm.answers.paired(reference, answered)
    better[schedule.name][i] = difference
    r:say("seed %d: %s %.3f, dense %.3f, paired difference %.4f +- %.4f", seed, schedule.name,
      found[schedule.name][i], dense[i], difference, err)
    if not shown and schedule.name == "decaying" then shown = model end
  end
end

-- Which patches each layer of the first model keeps: others are darkened.
local batch = { features = test[1].features:narrow(0, 0, 4),
  questions = table.move(test[1].questions, 1, 4, 1, {}), image = test[1].image:narrow(0, 0, 4) }
local side, pictures = math.tointeger(batch.features.shape[2] ^ 0.5), { batch.image }
mod.watch(shown, function(_, visual, places)
  local count, ones = side * side, ty.ones_like(places, "f32")
  local kept = (visual:to "f32" * 0):scatter(1, places, ones):narrow(1, 0, count)
    :to { device = batch.image.device }
  local map = ty.interpolate(kept:reshape(4, 1, side, side), { 64, 64 }, 0, "nearest")
  pictures[#pictures + 1] = ty.keep((batch.image:to "f32" * (map * 0.85 + 0.15)):to "u8")
end)
vlm.answers.ask(shown, dialogue, { batch })
ty.plot.grid(ty.concat(pictures, 0), { columns = 4 }):save(r:picture "kept.png")

local cost, dense_cost, kept = cost_of(decay), cost_of(), {}
for i = 1, #dense do kept[i] = found.decaying[i] / dense[i] end
os.exit(r:finish {
  { claim = "operations of reading a prompt, of the dense decoder's", measured = cost.prefill / dense_cost.prefill,
    bar = 0.56, below = true },
  { claim = "bytes of keys and values, of the dense decoder's", measured = cost.kv / dense_cost.kv, bar = 0.54,
    below = true },
  { claim = "questions answered, of those of the dense model", values = kept, baseline = dense, bar = 0.99 },
  { claim = "the dense model, tuned as long", values = dense, baseline = untuned, judged = false },
  { claim = "shares constant behind the first layer, answered more than dense", values = better.constant,
    judged = false },
  { claim = "shares that decay, answered more than dense", values = better.decaying, judged = false },
}, true)
