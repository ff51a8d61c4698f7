-- What more data with noisy labels is worth to another task
-- claim: accuracy on a task with few labels grows as the logarithm of the noisy data that a network learnt from
-- system: a residual network of pictures drawn by datasets.canvas, a part of them under wrong labels; curation.scaling
-- paper: Sun et al. 2017, "Revisiting Unreasonable Effectiveness of Data in Deep Learning Era"
-- time: 3 minutes on one CPU core
--
-- Networks learn to tell twelve kinds of things, from sets each twice as large as the one before, with a share of the
-- labels wrong. Then they are carried over to six kinds that they never saw, with few pictures of each: all of the
-- network goes on learning, or a new head alone. Every set takes the same steps, so that a larger one costs nothing but
-- its labels; rates are the same for all sizes. The smaller sets are parts of the larger ones, and each seed draws its
-- own pictures. Beside it: a network that begins at the target task; one of half the channels; and a set of the largest
-- size whose k-th kind is 1/k as frequent as its first.
local ty = require "tycho"
local curation, datasets, models = require "tycho.curation", require "tycho.datasets", require "tycho.models"
local scaling, unlearning = curation.scaling, curation.unlearning

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "sizes", { 125, 250, 500, 1000, 2000, 4000, 8000 }, "pictures to learn from", quick = { 64, 128, 256 } },
    { "noise", 0.2, "share of their labels that is wrong" },
    { "steps", 250, "of 64 pictures, for every size", quick = 2 },
    { "rate", 5e-3, "of these steps" },
    { "few", 60, "pictures of the target task to learn from", quick = 24 },
    { "tune", 60, "steps on them", quick = 2 },
    { "test", 1000, "pictures of the target task to test by", quick = 60 },
    { "channels", { 16, 32, 64 }, "of the network's stages", quick = { 8, 8, 8 } },
  },
}
local args, sizes = r.args, r.args.sizes
local largest, half = sizes[#sizes], {}
for i, channels in ipairs(args.channels) do half[i] = channels // 2 end

-- Pictures of a split with their kinds, the first of them 0.
local function draw(split, count, seed, first)
  local set = datasets.load("canvas", { split = split, length = count, seed = seed, moved = true })
  local images, kinds = {}, {}
  for start = 0, count - 1, 1000 do
    local batch = set:batch(ty.arange(start, math.min(count, start + 1000)))
    table.insert(images, batch.image)
    table.insert(kinds, batch.kind - (first or 0))
  end
  return { image = ty.concat(images, 0):to(r.device), label = ty.concat(kinds, 0):to(r.device) }
end
local known = 12

local function network(channels, seed)
  ty.manual_seed(seed)
  return r:place(function()
    return models.ResNet { in_channels = 3, classes = known, channels = channels, blocks = { 1, 1, 1 } }
  end)
end

-- What a network reaches on the target task, tuned and by its head alone, and the network.
local function reached(set, channels, seed, few, test)
  local model = network(channels, seed)
  if set then
    scaling.pretrain(model, set, { steps = args.steps, lr = args.rate, prepare = datasets.pixels })
  end
  ty.manual_seed(seed)
  local function carried(tune)
    return (scaling.transfer(model, few, test, { prepare = datasets.pixels, tune = tune, classes = 6,
      steps = tune and args.tune or 3 * args.tune, lr = tune and 2e-3 or 1e-2 }))
  end
  return { tuned = carried(true), head = carried(false) }, model
end

-- Of a set so many pictures of each kind that the k-th is 1/k as frequent as the first, as many as can be up to
-- `count`.
local function long_tail(set, count)
  local all, chosen = 0, {}
  for k = 1, known do all = all + 1 / k end
  for k = 1, known do
    local list = unlearning.of_class(set, k - 1)
    table.move(list, 1, math.min(#list, math.floor(count / (k * all))), #chosen + 1, chosen)
  end
  return (unlearning.part(set, chosen))
end

local found, laws = {}, { tuned = {}, head = {} }
for i, seed in ipairs(r.seeds) do
  local clean = draw("training", largest, seed)
  ty.manual_seed(seed)
  local noisy = scaling.mislabelled(clean, args.noise, known)
  local few, test = draw("unknown_kinds", args.few, 100 + seed, known), draw("unknown_kinds", args.test, 200 + seed,
    known)
  local own = draw("validation", args.test, seed)
  local function try(name, set, channels)
    local got, model = reached(set, channels, seed, few, test)
    local task = { image = datasets.pixels(own.image), label = own.label }
    got.own = unlearning.accuracy(model, task)
    ty.stats.put(found, name, i, got)
    r:note(name, got, seed)
    r:say("seed %d, %-16s target task %.3f, by a new head %.3f; its own kinds %.3f", seed, name, got.tuned, got.head,
      got.own)
  end
  try("nothing", nil, args.channels)
  for _, size in ipairs(sizes) do try(tostring(size), scaling.first(noisy, size), args.channels) end
  try("half, " .. sizes[1], scaling.first(noisy, sizes[1]), half)
  try("half, " .. largest, noisy, half)
  try("right labels", clean, args.channels)
  try("long tail", long_tail(scaling.mislabelled(draw("training", 4 * largest, 50 + seed), args.noise, known), largest),
    args.channels)
  for key, list in pairs(laws) do
    local values = {}
    for k, size in ipairs(sizes) do values[k] = found[tostring(size)][key][i] end
    list[i] = scaling.log_law(sizes, values)
  end
end

-- ---- the law of the means over seeds ----

local series, mean = {}, {}
for _, key in ipairs { "tuned", "head" } do
  local values, line, errors = {}, {}, {}
  for k, size in ipairs(sizes) do values[k] = ty.stats.mean(found[tostring(size)][key]) end
  local law = scaling.log_law(sizes, values)
  for k, size in ipairs(sizes) do line[k], errors[k] = law.at(size), values[k] - law.at(size) end
  mean[key] = law
  r.metrics["law_" .. key] = { per_tenfold = law.per_tenfold, at_one = law.at_one, r2 = law.r2, errors = errors }
  series[#series + 1] = { x = sizes, y = values, label = key == "tuned" and "all tuned" or "head alone" }
  series[#series + 1] = { x = sizes, y = line, label = "law of " .. (key == "tuned" and "all tuned" or "head alone") }
end
ty.plot.line { series = series, title = "Accuracy on six kinds never seen", x_label = "noisy pictures before",
  y_label = "share right", log_x = true }:save(r:picture "data-scaling.png")

local function gain(name, than, key)
  return ty.stats.differences(found[name][key or "tuned"], found[than][key or "tuned"])
end
local first, last = tostring(sizes[1]), tostring(largest)
os.exit(r:finish {
  { claim = ("R2 of the law, means of all seeds at %d sizes"):format(#sizes), measured = mean.tuned.r2, bar = 0.95 },
  { claim = "the same by a new head alone", measured = mean.head.r2, judged = false },
  { claim = "R2 of each seed", values = ty.stats.column(laws.tuned, "r2"), judged = false },
  { claim = "accuracy that ten times the data adds", values = ty.stats.column(laws.tuned, "per_tenfold"),
    bar = 0.05 },
  { claim = "largest size, above the smallest", values = gain(last, first), bar = 0.1 },
  { claim = "largest size, above a network that learnt nothing before", values = gain(last, "nothing"), bar = 0.1 },
  { claim = "half the channels: largest size, above the smallest",
    values = gain("half, " .. largest, "half, " .. first), judged = false },
  { claim = "right labels, above noisy ones at the largest size", values = gain("right labels", last), judged = false },
  { claim = "a long tail of kinds, above equal ones at the largest size", values = gain("long tail", last),
    judged = false },
}, true)
