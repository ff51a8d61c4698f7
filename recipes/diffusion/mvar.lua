-- Next-scale prediction from the scale before alone, by windows
-- claim: a third of the memory and no keys and values kept, at a held-out loss near that of VAR
-- system: MVAR, scale and spatial Markov conditions for pictures drawn scale by scale
-- paper: Zhang et al. 2025, "MVAR: Visual Autoregressive Modeling with Scale and Spatial Markovian Conditioning"
-- time: 4 minutes on one CPU core
--
-- Handwritten digits, 8 x 8, in tokens of four scales (1 x 1 to 4 x 4) by one residual quantizer of 128 codes, trained
-- first and the same for all. VAR sees all coarser scales; scale-Markov sees its own scale, whose tokens come from the
-- sum of the coarser ones; MVAR sees of that a window of 3 x 3 places. All have the same depth, steps, batches, rate
-- and initial weights. Memory is the most that is held beyond the networks while 16 digits are drawn with guidance, by
-- attention that makes no matrix of scores, which VAR has too; that of training is by one scale after the other, which
-- gives the same gradients. Drawn digits are judged by a classifier; those that come back from their own tokens are the
-- ceiling. What was learnt: pictures of emoji of 32 x 32, in seven scales, take more steps than fit here until they
-- look like something; Muon takes half the steps of Adam.
local ty = require "tycho"
local diffusion, distill, models = require "tycho.diffusion", require "tycho.distill", require "tycho.models"

local r = ty.recipe.declare { seeds = 3, base = true, args = {
  { "tokenizer_steps", 400, "training steps of the tokenizer", quick = 2 },
  { "steps", 180, "training steps of each network", quick = 2 },
  { "batch", 32, "digits of a step", quick = 4 },
  { "lr", 0.03, "rate of all networks" },
  { "width", 64, "of the networks", quick = 16 },
  { "depth", 8, "of the networks", quick = 2 },
  { "window", 3, "places of a window's side" },
  { "guidance", 2, "scale, at the last scale" },
  { "count", 360, "held-out digits, and drawn ones", quick = 20 },
  { "judge_steps", 300, "training steps of the judge", quick = 5 },
} }
local args, tokens = r.args, diffusion.tokens
local training, held_out = distill.digits.data()
local all, test = training:batch(ty.arange(#training)), held_out:batch(ty.arange(args.count))
local there = { device = r.device }
for _, batch in ipairs { all, test } do
  for name, x in pairs(batch) do batch[name] = x:to(there) end
end
local judge = distill.digits.judge(r:base(), { steps = args.judge_steps })
local function judged(x, labels)
  return { recognised = judge:recognised(x, labels), frechet = judge:frechet(x) }
end

-- ---- the tokenizer ----

ty.manual_seed(1000)
local tokenizer = models.ScaleTokenizer { channels = 1, factor = 2, hidden = 24, width = 8, scales = { 1, 2, 3, 4 } }
  :to(r.device)
tokens.fit(tokenizer, ty.data.DataLoader(training, { batch_size = 32, shuffle = true, seed = 1000, drop_last = true,
  device = r.device }), { steps = args.tokenizer_steps, lr = 4e-3, final = 0.02, quiet = true })
tokenizer:requires_grad_(false)
local ceiling, back = tokens.reconstruction(tokenizer, test.image)
ceiling.judged = judged(back, test.label)
r:say("tokenizer: %.2f dB, SSIM %.3f, %d bits; recognised %.3f, distance %.3f", ceiling.psnr, ceiling.ssim,
  ceiling.bits, ceiling.judged.recognised, ceiling.judged.frechet)

-- ---- the networks ----

local function network(kind)
  return models.VAR { scales = tokenizer.scales, codes = tokenizer.codes, inputs = tokenizer.width, classes = 10,
    width = args.width, depth = args.depth, attention = kind, window = args.window }:to(r.device)
end
local way = tokens.next_scale(network "full", tokenizer)
local train, check = way:material(all.image), way:material(test.image)
train.labels, check.labels = all.label, test.label
local function loader(seed)
  return ty.data.DataLoader(ty.data.TensorDataset(train), { batch_size = args.batch, shuffle = true, seed = seed,
    drop_last = true })
end

local KINDS = { "full", "scale", "window" }
local asked = ty.arange(args.count, nil, 1, there) % 10
local found, first, sheet = {}, {}, { test.image:narrow(0, 0, 20), back:narrow(0, 0, 20) }
for i, seed in ipairs(r.seeds) do
  for _, kind in ipairs(KINDS) do
    ty.manual_seed(seed)
    local _, averaged = ty.train.fit(network(kind), loader(seed), { steps = args.steps, lr = args.lr, final = 0.02,
      average = 0.95, quiet = true, optimizer = ty.optim.Muon,
      loss = function(m, batch) return tokens.next_scale(m, tokenizer):loss(batch, 0.1) end })
    way = tokens.next_scale(averaged:eval(), tokenizer)
    local ids = tokens.sample(way, { labels = asked }, { guidance = tokens.rising(args.guidance), seed = seed })
    local x = ty.no_grad(function() return tokenizer:decode(ids):clamp(-1, 1) end)
    local values = judged(x, asked)
    values.loss = ty.no_grad(function() return way:loss(check):item() end)
    for key, value in pairs(values) do
      found[kind] = found[kind] or {}
      found[kind][key] = found[kind][key] or {}
      found[kind][key][i] = value
    end
    r:say("seed %d, %-6s held-out loss %.4f, recognised %.3f, distance %.3f", seed, kind, values.loss,
      values.recognised, values.frechet)
    if i == 1 then first[kind], sheet[#sheet + 1] = averaged, x:narrow(0, 0, 20) end
  end
end
-- Rows: held-out digits, as they come back from their tokens; drawn by VAR, scale-Markov, MVAR.
ty.plot.grid(ty.concat(sheet, 0), { columns = 20, scale = 4, invert = true }):save(r:picture "mvar.png")

-- What the frequencies of codes alone say, of each place by the training part: a network that saw nothing.
local counts = ty.one_hot(train.ids, tokenizer.codes):sum(0):to "f64" + 0.5
local alone = -(counts / counts:sum(1):unsqueeze(1)):log():unsqueeze(0):expand(args.count, -1, -1)
  :gather(2, check.ids:unsqueeze(2)):mean():item()

-- ---- memory ----

local function drawing(kind)
  return r:memory(function()
    tokens.sample(tokens.next_scale(first[kind], tokenizer), { labels = ty.arange(16, nil, 1, there) % 10 },
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
  drawing(kind)
  megabytes.drawing[kind], megabytes.training[kind] = drawing(kind) / 1e6, step(kind) / 1e6
  r:say("%-6s %.2f MB to draw 16 digits, %.2f MB to train", kind, megabytes.drawing[kind], megabytes.training[kind])
end
r.metrics.found, r.metrics.megabytes, r.metrics.ceiling = found, megabytes, ceiling

local function ratio(key, other)
  local list = {}
  for i, value in ipairs(found.window[key]) do
    list[i] = value / (type(other) == "number" and other or math.max(1e-9, found[other][key][i]))
  end
  return list
end
os.exit(r:finish {
  { claim = "memory to draw with keys and values of all scales kept, of MVAR's", bar = 3,
    measured = megabytes.drawing.full / megabytes.drawing.window },
  { claim = "memory of a training step of VAR, of MVAR's scale by scale", bar = 1.5,
    measured = megabytes.training.full / megabytes.training.window },
  { claim = "held-out loss, of VAR's", values = ratio("loss", "full"), baseline = found.full.loss, bar = 1.03,
    below = true },
  { claim = "held-out loss, of that of whole scales", values = ratio("loss", "scale"), baseline = found.scale.loss,
    bar = 1.02, below = true },
  { claim = "held-out loss, of that by the frequencies of codes at each place", values = ratio("loss", alone),
    baseline = alone, bar = 0.9, below = true },
  { claim = "drawn digits recognised as asked for, of VAR's", values = ratio("recognised", "full"),
    baseline = found.full.recognised, bar = 0.95 },
  { claim = "Fréchet distance of drawn digits, of VAR's", values = ratio("frechet", "full"),
    baseline = found.full.frechet, bar = 1.1, below = true },
}, true)
