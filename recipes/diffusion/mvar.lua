-- Next-scale prediction from the scale before alone, by windows
-- claim: a third of the memory and no keys and values kept, at a held-out loss near that of VAR
-- system: MVAR, scale and spatial Markov conditions for pictures drawn scale by scale
-- paper: Zhang et al. 2025, "MVAR: Visual Autoregressive Modeling with Scale and Spatial Markovian Conditioning"
-- time: 5 minutes on one CPU core
--
-- Objects of eight kinds on plain grounds, 32 x 32, in tokens of seven scales (1 x 1 to 8 x 8) by one residual
-- quantizer of 128 codes, trained first and the same for all. VAR sees all coarser scales; scale-Markov sees its own
-- scale, whose tokens come from the sum of the coarser ones; MVAR sees of that a window of 3 x 3 places. All have the
-- same depth, steps, batches, rate and initial weights; the rate was chosen for VAR by other pictures than those
-- reported. Memory is the most that is held beyond the networks while 16 pictures are drawn with guidance, by attention
-- that makes no matrix of scores, which VAR has too; that of training is by one scale after the other, which gives the
-- same gradients. Drawn pictures are judged by scene-resnet; what comes back from its own tokens is the ceiling.
local ty = require "tycho"
local diffusion, models, zoo = require "tycho.diffusion", require "tycho.models", require "tycho.zoo"

local r = ty.recipe.declare { seeds = 3, args = {
  { "pictures", 2000, "to train on", quick = 40 },
  { "tokenizer_steps", 400, "training steps of the tokenizer", quick = 2 },
  { "steps", 130, "training steps of each network", quick = 2 },
  { "batch", 16, "pictures of a step", quick = 4 },
  { "lr", 4e-3, "rate of all networks" },
  { "width", 64, "of the networks", quick = 16 },
  { "depth", 6, "of the networks", quick = 2 },
  { "window", 3, "places of a window's side" },
  { "guidance", 2, "scale, at the last scale" },
  { "count", 200, "held-out pictures, and drawn ones", quick = 4 },
} }
local args, tokens = r.args, diffusion.tokens
local single = zoo.single { real = r.quick and 8 or nil }
local training, held_out = single:data("training", args.pictures), single:data("validation", 2 * args.count)
local validation = held_out.image:narrow(0, args.count, args.count)

-- ---- the tokenizer ----

ty.manual_seed(1000)
local tokenizer = models.ScaleTokenizer()
tokens.fit(tokenizer, ty.data.DataLoader(ty.data.TensorDataset { image = training.image }, { batch_size = 32,
  shuffle = true, seed = 1000, drop_last = true }), { steps = args.tokenizer_steps, lr = 4e-3, final = 0.02,
  quiet = true })
tokenizer:requires_grad_(false):eval()
local ceiling, back = tokens.reconstruction(tokenizer, validation)
local labels = held_out.label:narrow(0, args.count, args.count)
local real = single:measure(back, labels)
r:say("tokenizer: %.2f dB, SSIM %.3f, %d bits; recognised %.3f, distance %.4f", ceiling.psnr, ceiling.ssim,
  ceiling.bits, real.recognised, real.frechet)

-- ---- the networks ----

local function network(kind)
  return models.VAR { scales = tokenizer.scales, codes = tokenizer.codes, inputs = tokenizer.width,
    classes = #single.kinds, width = args.width, depth = args.depth, attention = kind, window = args.window }
end
local way = tokens.next_scale(network "full", tokenizer)
local train, test = way:material(training.image), way:material(validation)
train.labels, test.labels = training.label, labels
local function loader(seed)
  return ty.data.DataLoader(ty.data.TensorDataset(train), { batch_size = args.batch, shuffle = true, seed = seed,
    drop_last = true })
end

local KINDS = { "full", "scale", "window" }
local found, first, sheet = {}, {}, { validation:narrow(0, 0, math.min(16, args.count)),
  back:narrow(0, 0, math.min(16, args.count)) }
for i, seed in ipairs(r.seeds) do
  for _, kind in ipairs(KINDS) do
    ty.manual_seed(seed)
    local model = network(kind)
    local _, averaged = ty.train.fit(model, loader(seed), { steps = args.steps, lr = args.lr, final = 0.02,
      weight_decay = 0.02, average = 0.95, quiet = true,
      loss = function(m, batch) return tokens.next_scale(m, tokenizer):loss(batch, 0.1) end })
    way = tokens.next_scale(averaged:eval(), tokenizer)
    local loss = ty.no_grad(function() return way:loss(test):item() end)
    local ids = tokens.sample(way, { labels = labels },
      { guidance = tokens.rising(args.guidance), draw = tokens.categorical { top_k = 64 }, seed = seed })
    local pictures = ty.no_grad(function() return tokenizer:decode(ids) end)
    local values = single:measure(pictures, labels)
    values.loss = loss
    for key, value in pairs(values) do
      found[kind] = found[kind] or {}
      found[kind][key] = found[kind][key] or {}
      found[kind][key][i] = value
    end
    r:say("seed %d, %-6s held-out loss %.4f, recognised %.3f, distance %.4f", seed, kind, loss, values.recognised,
      values.frechet)
    if i == 1 then
      first[kind], sheet[#sheet + 1] = averaged, pictures:narrow(0, 0, math.min(16, args.count)):clamp(-1, 1)
    end
  end
end
-- Rows: real pictures, as they come back from their tokens, VAR, scale-Markov, MVAR.
ty.plot.grid(ty.concat(sheet, 0), { columns = math.min(16, args.count), scale = 2 }):save(r:picture "mvar.png")

-- What the frequencies of codes alone say, of each place by the training part: a network that saw nothing.
local counts = ty.one_hot(train.ids, tokenizer.codes):sum(0):to "f64" + 0.5
local alone = -(counts / counts:sum(1):unsqueeze(1)):log():unsqueeze(0):expand(args.count, -1, -1)
  :gather(2, test.ids:unsqueeze(2)):mean():item()

-- ---- memory ----

local function drawing(kind)
  return r:memory(function()
    tokens.sample(tokens.next_scale(first[kind], tokenizer), { labels = labels:narrow(0, 0, 1):expand(16) },
      { guidance = args.guidance })
  end)
end
local batch = loader(0):next()
local function step(kind)
  local of = tokens.next_scale(network(kind), tokenizer)
  return r:memory(function()
    if of.model.markov then of:backward(batch) else of:loss(batch):backward() end
  end)
end
local megabytes = { drawing = {}, training = {} }
for _, kind in ipairs(KINDS) do
  megabytes.drawing[kind], megabytes.training[kind] = drawing(kind) / 1e6, step(kind) / 1e6
  r:say("%-6s %.2f MB to draw 16 pictures, %.2f MB to train", kind, megabytes.drawing[kind], megabytes.training[kind])
end
r.metrics.found, r.metrics.megabytes, r.metrics.ceiling = found, megabytes, ceiling
r.metrics.ceiling_drawn = real

local function ratio(key, other, fn)
  local list = {}
  for i, value in ipairs(found.window[key]) do
    list[i] = value / (type(other) == "number" and other or math.max(1e-9, found[other][key][i]))
  end
  return list
end
os.exit(r:finish {
  { claim = "memory to draw with keys and values of all scales kept, of MVAR's", bar = 3,
    measured = megabytes.drawing.full / megabytes.drawing.window },
  { claim = "memory of a training step of VAR, of MVAR's scale by scale", bar = 2,
    measured = megabytes.training.full / megabytes.training.window },
  { claim = "held-out loss, of VAR's", values = ratio("loss", "full"), baseline = found.full.loss, bar = 1.03,
    below = true },
  { claim = "held-out loss, of that of whole scales", values = ratio("loss", "scale"), baseline = found.scale.loss,
    bar = 1.02, below = true },
  { claim = "held-out loss, of that by the frequencies of codes at each place", values = ratio("loss", alone),
    baseline = alone, bar = 0.9, below = true },
  { claim = "drawn pictures recognised, of VAR's", values = ratio("recognised", "full"),
    baseline = found.full.recognised, bar = 0.95 },
  { claim = "Fréchet distance of drawn pictures, of VAR's", values = ratio("frechet", "full"),
    baseline = found.full.frechet, bar = 1.05, below = true },
}, true)
