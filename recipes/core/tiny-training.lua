-- A network of bytes learns new classes in 256 KB
-- claim: a small CNN with int8 weights and activations adapts inside an enforced arena, better than by its last layer
-- system: int8 training with quantization-aware scaling, a sparse scheme found by contribution analysis, a static plan
-- paper: Lin et al. 2022, "On-Device Training Under 256KB Memory"
-- time: 4 minutes on one CPU core
--
-- A small MobileNetV2 learns the digits 0 to 4, drawn large, is folded and turned into bytes, and then adapts to the
-- digits 5 to 9 by plain SGD on few pictures at a time. Everything that changes lies in the arena: activations,
-- gradients, the sums of updates, and weights that are trained with their fractions; the plan is made before the first
-- step, and one that does not fit is an error. Every way gets the same steps and the same pictures in the same order
-- and two rates, chosen by pictures apart; accuracy is that of held-out digits. Compared are the last layer alone, as
-- many biases as fit, and the scheme of the search, also without scaling of its gradients, for which it gets larger
-- rates. What layers are worth is measured on the pictures apart too. The picture: the arena over the steps of the
-- plan, in which what is alive at the same time lies one below the other.
local ty = require "tycho"
local datasets, models, peft = require "tycho.datasets", require "tycho.models", require "tycho.peft"
local tiny = require "tycho.tiny"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 500, "of adapting", quick = 3 },
    { "batch", 4, "pictures" },
    { "size", 32, "of a picture, pixels", quick = 16 },
    { "kilobytes", 256, "of the arena" },
    { "base_steps", 150, "of training the base", quick = 2 },
    { "each", 100, "steps that say what a layer is worth", quick = 1 },
    { "first", 8, "convolution that is looked at", quick = 18 },
  },
}
local args = r.args
local bytes = 1024 * args.kilobytes

-- Digits of five classes, labels from 0.
local function digits(split, low)
  local set = datasets.load("digits", { split = split })
  local batch, at = set:batch(ty.arange(#set)), {}
  for i, label in ipairs(batch.label:tolist()) do
    if label >= low and label < low + 5 then at[#at + 1] = i - 1 end
  end
  local rows = ty.tensor(at, { dtype = "i64" })
  local large = ty.interpolate(batch.image, { size = { args.size, args.size }, mode = "bilinear" })
  return ty.keep(large:index_select(0, rows)), ty.keep(batch.label:index_select(0, rows) - low)
end

-- ---- the base, in floats and then in bytes ----

ty.manual_seed(r.seed)
local old, old_labels = digits("training", 0)
local model = models.MobileNetV2 { in_channels = 1, classes = 5, stem = 8, stride = 2, width = 96, dropout = 0,
  settings = { { 1, 8, 1, 1 }, { 3, 16, 2, 2 }, { 3, 24, 2, 2 }, { 3, 32, 1, 2 } } }
local optimizer = ty.optim.AdamW(model, { lr = 5e-3, schedule = ty.optim.one_cycle { steps = args.base_steps } })
for _ = 1, args.base_steps do
  ty.scope(function()
    local at = ty.randperm(old_labels.shape[1]):narrow(0, 0, 32)
    optimizer:step(ty.cross_entropy(model(old:index_select(0, at)), old_labels:index_select(0, at)))
  end)
end
tiny.fold(model, old:narrow(0, 0, 2))
local network = tiny.int8(model, old:narrow(0, 0, 64))

local new, new_labels = digits("training", 5)
local test, test_labels = digits("held_out", 5)
local count = new_labels.shape[1] * 7 // 10
local codes, test_codes = network:codes(new), network:codes(test)
local training = { codes:narrow(0, 0, count), new_labels:narrow(0, 0, count) }
local development = { codes:narrow(0, count, new_labels.shape[1] - count),
  new_labels:narrow(0, count, new_labels.shape[1] - count) }
local one = { codes:narrow(0, 0, args.batch), new_labels:narrow(0, 0, args.batch) }

-- ---- the scheme ----

local convolutions, all = 0, {}
for place, node in ipairs(network.nodes) do
  if node.kind == "conv" then
    convolutions = convolutions + 1
    all[place] = 1
  end
end
local function takes(options)
  options.classes, options.bytes = 5, options.bytes or 1 << 40
  local trainer = tiny.arena(network:clone(), options)
  trainer:step(one[1], one[2])
  return trainer:report().bytes, trainer
end
local whole = takes { weights = all, biases = convolutions }
r:say("to train everything would take %.1f KB", whole / 1024)
local refused, why = pcall(takes, { weights = all, biases = convolutions, bytes = bytes })
r:say("in the arena: %s", refused and "it fits" or why)
local most = convolutions
while most > 0 and takes { biases = most } > bytes do most = most - 1 end
local gains = tiny.contributions(network, { classes = 5, train = training, development = development,
  steps = args.each, batch = args.batch, lr = 0.1, first = args.first, biases = { most // 3, 2 * most // 3, most },
  say = function(line) r:say("worth: %s", line) end })
local found = tiny.search(network, gains, { classes = 5, bytes = bytes, batch = one,
  population = r.quick and 4 or 16, generations = r.quick and 1 or 12 })
local said = {}
for place, node in ipairs(network.nodes) do
  if found.weights[place] then said[#said + 1] = ("%s (%g)"):format(node.name, found.weights[place]) end
end
r:say("the scheme, of %d tried: the last %d biases and weights of %s; %.1f KB", found.tried, found.biases,
  table.concat(said, ", "), found.bytes / 1024)

-- ---- adapting ----

local largest = 0
local function way(name, rates, options)
  local function run(rate, seed)
    local trainer = tiny.arena(network:clone(), { classes = 5, bytes = bytes, lr = rate, scaled = options.scaled,
      weights = options.weights, biases = options.biases, schedule = ty.optim.cosine { steps = args.steps } })
    trainer:fit(training[1], training[2], { steps = args.steps, batch = args.batch, seed = seed })
    largest = math.max(largest, trainer:report().bytes)
    local _, right = trainer:judge(test_codes, test_labels)
    return { development = trainer:judge(development[1], development[2]), right = right, trainer = trainer }
  end
  return { name = name, rates = r.quick and { rates[1] } or rates, run = run }
end
local runs = peft.compare.ways({
  way("scheme", { 0.05, 0.15 }, { weights = found.weights, biases = found.biases }),
  way("last layer", { 0.3, 1 }, {}),
  way("biases", { 0.1, 0.3 }, { biases = most }),
  way("not scaled", { 0.3, 1 }, { weights = found.weights, biases = found.biases, scaled = false }),
}, r.seeds, function(line) r:say("%s", line) end)

local function over(name)
  local list = {}
  for i, seed in ipairs(r.seeds) do
    list[i] = runs.scheme.runs[i].right - runs[name].runs[i].right
    r.metrics[name .. "/right/" .. seed] = runs[name].runs[i].right
    r.metrics["scheme/right/" .. seed] = runs.scheme.runs[i].right
    r:say("seed %d: %.2f %% right by the scheme, %.2f %% by %s", seed, 100 * runs.scheme.runs[i].right,
      100 * runs[name].runs[i].right, name)
  end
  return list
end

-- ---- the arena over the steps of the plan ----

local places, rows, columns = runs.scheme.runs[1].trainer:places(), 128, 0
for _, place in ipairs(places) do columns = math.max(columns, place.last + 1) end
local map = ty.zeros(1, 1, rows, columns) - 1
for i, place in ipairs(places) do
  local from, to = place.offset * rows // bytes, (place.offset + place.bytes) * rows // bytes
  map:narrow(2, from, math.max(1, to - from)):narrow(3, place.first, place.last - place.first + 1)
    :fill_(0.1 + 0.9 * (i * 0.618 % 1))
end
ty.plot.grid(map, { columns = 1, scale = 4 }):save(r:picture "tiny-training.png")

os.exit(r:finish {
  { claim = "KB of everything that changes, the most of all ways", measured = largest / 1024, bar = 256, below = true },
  { claim = "KB that training everything would take", measured = whole / 1024, judged = false },
  { claim = "accuracy gained over the last layer alone", values = over "last layer", bar = 0.02 },
  { claim = "over as many biases as fit", values = over "biases", bar = 0.005 },
  { claim = "over the same scheme without scaling", values = over "not scaled", bar = 0.02 },
}, true)
