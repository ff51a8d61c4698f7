-- Pictures as a few vectors of bits, and two ways to draw them
-- claim: 8 tokens of 12 bits without a grid give pictures back, and both diffusion of bits and token after token draw
--   with them
-- system: Instella-T2I's 1-D binary tokenizer, binary diffusion and autoregressive generation
-- paper: Wang et al. 2025, "Instella-T2I: Pushing the Limits of 1D Discrete Latent Space Image Generation"
-- time: 6 minutes on one CPU core
--
-- Handwritten digits, 8 x 8, where the paper has photographs of 1024 x 1024 in 128 tokens of 64 bits: 96 bits each.
-- Beside the bits, with the same transformer, steps, rate and bits: a one-hot code of 4,096 for each token; the merged
-- patches themselves, a grid of 2 x 2 vectors of 24 bits; and numbers that nothing quantizes, the ceiling, by one seed
-- (scene-vae knows no digits). Generators get labels in the place of words, the same depth, steps and rate; those that
-- draw token after token, over bits and over one-hot codes, get the better of the same three temperatures for each
-- seed, by other draws than those reported. Pictures are judged by a classifier trained with another seed. What was
-- learnt: with Adam the tokens stay empty for hundreds of steps, with Muon they do not; at this size a learnt codebook
-- and a grid give pictures back a little better than bits do at as many bits. The distance of digits token after token
-- is lost: with the choice of temperature 1.25, 1.40 and 1.56 against 1.11, 6.64 and 1.05 over one-hot codes, of which
-- one seed in three hardly learns (0.69 recognised); bits want temperature 1 (1.34; 1.48 at 0.7, 1.68 at 0.5), codes
-- 0.5 (1.07; 3.16 at 1). With the choice for codes alone and 360 pictures the ratio was 0.81.
local ty = require "tycho"
local diffusion, distill, models = require "tycho.diffusion", require "tycho.distill", require "tycho.models"

local r = ty.recipe.declare { seeds = 3, base = true, args = {
  { "tokenizer_steps", 350, "training steps of each tokenizer", quick = 3 },
  { "steps", 250, "training steps of each generator", quick = 3 },
  { "tokens", 8, "of a picture" },
  { "bits", 12, "of a token" },
  { "batch", 64, "pictures of a step", quick = 16 },
  { "guidance", 2, "scale of both generators" },
  { "denoising", 20, "steps of the diffusion of bits", quick = 3 },
  { "count", 360, "held-out pictures", quick = 20 },
  { "drawn", 1000, "pictures that each generator draws", quick = 20 },
  { "judge_steps", 300, "training steps of the judge", quick = 5 },
} }
local args, tokens = r.args, diffusion.tokens
local training, held_out = distill.digits.data()
local all, test = training:batch(ty.arange(r.quick and 200 or #training)), held_out:batch(ty.arange(args.count))
for _, batch in ipairs { all, test } do
  for name, x in pairs(batch) do batch[name] = x:to(r.device) end
end
local judge = distill.digits.judge(r:base(), { steps = args.judge_steps })
local asked = ty.arange(args.drawn, nil, 1, { device = r.device }) % 10

local function loader(set, seed)
  return ty.data.DataLoader(set, { batch_size = args.batch, shuffle = true, seed = seed, drop_last = true,
    device = r.device })
end

local KINDS = { bits = {}, codes = { kind = "codes" }, grid = { grid = true, bits = args.bits * args.tokens // 4 },
  plain = { kind = "plain" } }
local function tokenizer(kind, seed)
  local options = { size = 8, channels = 1, patch = 2, hidden = 64, depth = 1, tokens = args.tokens, bits = args.bits }
  for key, value in pairs(KINDS[kind]) do options[key] = value end
  ty.manual_seed(seed)
  local made = models.BitTokenizer(options):to(r.device)
  tokens.fit(made, loader(training, seed), { steps = args.tokenizer_steps, lr = 0.05, final = 0.02, smooth = 0.5,
    temperature = { 1, 0.1 }, optimizer = ty.optim.Muon, quiet = true })
  return made:requires_grad_(false)
end

local process = diffusion.binary()
local function way_of(name, network)
  if name ~= "diffusion" then return tokens.next_token(network) end
  return process:way(network, { args.tokens, args.bits }, { steps = args.denoising })
end
local function generator(name, made, seed)
  local material = ty.data.TensorDataset { tokens = made:encode(all.image), labels = all.label }
  ty.manual_seed(seed)
  local network = models.BitTransformer { tokens = made.tokens, bits = args.bits, hidden = 96, depth = 3,
    codes = name == "codes" and 1 << args.bits or nil, causal = name ~= "diffusion" }
  network:to(r.device)
  local _, averaged = ty.train.fit(network, loader(material, seed), { steps = args.steps, lr = 2e-3, final = 0.02,
    average = 0.98, weight_decay = 0.02, quiet = true, loss = function(m, batch)
      local condition = { labels = batch.labels }
      if name == "diffusion" then return process:loss(m, batch.tokens, condition, { drop = 0.1 }) end
      return tokens.next_token(m):loss(batch.tokens, condition, 0.1)
    end })
  return averaged:eval()
end

local function judged(x, labels)
  return { recognised = judge:recognised(x, labels), frechet = judge:frechet(x) }
end
local function drawn(name, network, made, seed, draw)
  local ids = tokens.sample(way_of(name, network), { labels = asked }, { guidance = args.guidance, seed = seed,
    draw = draw })
  return ty.no_grad(function() return made:decode(ids):clamp(-1, 1) end)
end

local found, sheet, temperature = {}, { test.image:narrow(0, 0, 20) }, { token = {}, codes = {} }
local function note(name, i, values)
  found[name] = found[name] or {}
  for key, value in pairs(values) do
    found[name][key] = found[name][key] or {}
    found[name][key][i] = value
  end
  r:say("seed %d, %-9s %srecognised %.3f, distance %.3f", r.seeds[i], name,
    values.psnr and ("%.2f dB, SSIM %.3f, %d bits, "):format(values.psnr, values.ssim, values.bits) or "",
    values.recognised, values.frechet)
end
local function show(i, x)
  if i == 1 then sheet[#sheet + 1] = x:narrow(0, 0, 20):clamp(-1, 1) end
end

for i, seed in ipairs(r.seeds) do
  local made = {}
  for _, kind in ipairs { "bits", "codes", "grid", i == 1 and "plain" or nil } do
    made[kind] = tokenizer(kind, seed)
    local values, back = tokens.reconstruction(made[kind], test.image)
    local seen = judged(back, test.label)
    values.recognised, values.frechet = seen.recognised, seen.frechet
    note(kind, i, values)
    show(i, back)
  end
  for _, name in ipairs { "diffusion", "token", "codes" } do
    local of = made[name == "codes" and "codes" or "bits"]
    local network, draw, best = generator(name, of, seed), nil, math.huge
    for _, t in ipairs(name ~= "diffusion" and (r.quick and { 1 } or { 1, 0.7, 0.5 }) or {}) do
      local how = tokens[name == "codes" and "categorical" or "bernoulli"] { temperature = t }
      local distance = judge:frechet(drawn(name, network, of, 1000 + seed, how))
      r:say("  %s, seed %d, temperature %g: distance %.3f", name, seed, t, distance)
      if distance < best then best, draw, temperature[name][i] = distance, how, t end
    end
    local x
    local seconds = r:clock(function() x = ty.keep(drawn(name, network, of, seed, draw)) end)
    note("by " .. name, i, judged(x, asked))
    r.metrics["milliseconds_per_picture/" .. name] = 1e3 * seconds / args.drawn
    show(i, x)
  end
end
-- Rows: real digits; as they come back from bits, one-hot codes, a grid, what nothing quantizes; drawn by diffusion of
-- bits, token after token, the same over one-hot codes.
ty.plot.grid(ty.concat(sheet, 0), { columns = 20, scale = 4, invert = true }):save(r:picture "instella-t2i.png")
r.metrics.found, r.metrics.temperature = found, temperature

local function ratio(name, other, key)
  local list = {}
  for i in ipairs(r.seeds) do list[i] = found[name][key][i] / math.max(1e-9, found[other][key][i]) end
  return list
end
os.exit(r:finish {
  { claim = "PSNR in dB of held-out digits that come back from 96 bits", values = found.bits.psnr,
    baseline = found.plain.psnr, bar = 20 },
  { claim = "digits that come back recognised, share", values = found.bits.recognised, bar = 0.95 },
  { claim = "PSNR, of that of one-hot codes at equal bits", values = ratio("bits", "codes", "psnr"),
    baseline = found.codes.psnr, bar = 0.9 },
  { claim = "PSNR, of that of a grid at equal bits", values = ratio("bits", "grid", "psnr"),
    baseline = found.grid.psnr, bar = 0.9 },
  { claim = "digits by diffusion of bits recognised as asked for", values = found["by diffusion"].recognised,
    bar = 0.95 },
  { claim = "digits token after token recognised as asked for", values = found["by token"].recognised, bar = 0.95 },
  { claim = "Fréchet distance token after token, of that over one-hot codes",
    values = ratio("by token", "by codes", "frechet"), baseline = found["by codes"].frechet, bar = 0.8, below = true },
}, true)
