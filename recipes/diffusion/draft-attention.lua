-- A map of low resolution says which blocks of attention are computed
-- claim: at least 1.5 times as fast as dense attention at long sequences, ordering and draft included, and pictures
--   stay nearer to those of dense attention than with other blocks of the same number
-- system: DraftAttention on a text-to-image transformer of the zoo, and on layers of long sequences
-- paper: Shen et al. 2025, "DraftAttention: Fast Video Diffusion via Low-Resolution Attention Guidance"
-- time: 4 minutes on one CPU core
--
-- Quality is measured where a trained network is: at 64 patches, which is too few to save time. Time is measured where
-- there is some to save: layers of the same width at thousands of patches, untrained, whose whole forward passes are
-- timed at the same sparsity. Beside the draft stand windows, random blocks and blocks that the full map chooses, as
-- many of each; and cells of another shape.
local ty = require "tycho"
local diffusion, zoo = require "tycho.diffusion", require "tycho.zoo"

local r = ty.recipe.declare { seeds = 3,
  args = {
    { "model", "scene-dit", "a transformer of the zoo, or a folder of diffusers with a path" },
    { "steps", 20, "of the sampler", quick = 3 },
    { "count", 24, "prompts for each seed", quick = 2 },
    { "scale", 4.0, "of guidance" },
    { "warmup", 5, "first steps, which are dense", quick = 1 },
    { "sparsity", 0.6, "share of the pairs of cells that are left out" },
    { "side", 96, "patches of a side of the maps that are timed", quick = 16 },
  } }
local args = r.args
local attention = diffusion.attention

local yardstick = zoo.yardstick { model = args.model, device = r.device, real = r.quick and 8 or 256 }
local network, process = yardstick.painter.network, yardstick.painter.process
local side = yardstick.size // 4 // network.config.patch_size

-- ---- quality ----

-- Lists of as many cells for every query, by scores [b, h, cells, cells].
local function best(scores)
  return attention.draft_blocks(scores, args.sparsity)
end
-- What the full map gives each pair of cells.
local function full_map(q, k, cells)
  local weights = (q:matmul(k:transpose(-2, -1)) * q.shape[4] ^ -0.5):softmax(-1)
  local n = cells.count
  local order = cells.order:to { device = q.device }
  weights = weights:index_select(2, order):index_select(3, order)
  return weights:reshape(q.shape[1], q.shape[2], n, cells.size, n, cells.size):sum { 3, 5 } / cells.size
end
local function window(q, _, cells)
  local far = (cells.places:unsqueeze(0) - cells.places:unsqueeze(1)):square():sum(-1)
  local more = ty.arange(cells.count * cells.count):to("f32"):reshape(far.shape) * 1e-6 -- so many, and no more
  local near = (-far - more):to { device = q.device }
  return best(near:expand(q.shape[1], q.shape[2], cells.count, cells.count):contiguous())
end
local function random(q, _, cells)
  return best(ty.rand({ q.shape[1], q.shape[2], cells.count, cells.count }, { device = q.device }))
end

local function sampler(options)
  if not options then return process:sampler { steps = args.steps, guidance = args.scale } end
  local o = { rows = side, columns = side, cell = { 1, 2 }, sparsity = args.sparsity, warmup = args.warmup }
  for key, value in pairs(options) do o[key] = value end
  local model = network:clone()
  local part = attention.draft(model, o)
  return { sampler = process:sampler { steps = args.steps, guidance = args.scale, parts = { part } }, model = model }
end

-- How much of the full map's mass the draft's blocks hold, over samples of the middle step.
local mass, mass_random = {}, {}
local function recording(q, k, cells)
  local full, draft = full_map(q, k, cells), attention.draft_map(cells:gather(q), cells:gather(k), cells)
  local function held(blocks)
    local n = cells.count
    local seen = ty.zeros({ q.shape[1], q.shape[2], n, n + 1 }, { device = blocks.device })
      :scatter_add(3, blocks + 1, ty.ones_like(blocks, "f32"))
    return (full * seen:narrow(3, 1, n)):sum():item() / full:sum():item()
  end
  local blocks = best(draft)
  mass[#mass + 1], mass_random[#mass_random + 1] = held(blocks), held(random(q, k, cells))
  return blocks
end
local watched = sampler { choose = recording }
yardstick:draw(watched.sampler, yardstick:prompts("training", 0, 4, 7), { network = watched.model })
r:say("of the mass of attention, the blocks that are kept hold: the draft's %.3f, random ones %.3f",
  ty.stats.mean(mass), ty.stats.mean(mass_random))

local list = yardstick:compare(sampler(), { draft = sampler {}, ["full map"] = sampler { choose = function(q, k, cells)
  return best(full_map(q, k, cells))
end }, window = sampler { choose = window }, random = sampler { choose = random },
  ["other cells"] = sampler { cell = { 2, 2 } } }, { count = args.count, seeds = r.seeds, fewer = false })
for i, comparison in ipairs(list) do r:say("seed %d\n%s", r.seeds[i], tostring(comparison)) end
local few, sheet = math.min(6, args.count), {}
for _, name in ipairs { "full", "draft", "random" } do
  sheet[#sheet + 1] = list[1]:row(name).samples:narrow(0, 0, few)
end
ty.plot.grid(ty.concat(sheet, 0):to "f32" / 127.5 - 1, { columns = few, scale = 2 }):save(r:picture "draft.png")

-- ---- seconds of whole passes at a long sequence ----

local speedups = {}
for i, seed in ipairs(r.seeds) do
  ty.manual_seed(seed)
  local n = args.side
  local long = diffusion.DiT { size = n, patch = 1, channels = 4, width = 160, heads = 5, depth = 2, classes = 0 }
    :to(r.device)
  local x, t = ty.randn({ 1, 4, n, n }, { device = r.device }), ty.full({ 1 }, 500.0, { device = r.device })
  local condition = { labels = ty.zeros({ 1 }, { dtype = "i64", device = r.device }) }
  local sparse = long:clone()
  attention.draft(sparse, { rows = n, columns = n, cell = { 8, 8 }, sparsity = args.sparsity })
  local function pass(model)
    return function() return ty.no_grad(model, x, t, condition) end
  end
  local took = r:time({ dense = pass(long), draft = pass(sparse) }, { rounds = 3 })
  speedups[i] = took.dense / took.draft
  r:say("%d patches, two layers: dense %.3f s, draft %.3f s", n * n, took.dense, took.draft)
end

-- ---- the table ----

local function each(fn)
  local values = {}
  for i, comparison in ipairs(list) do values[i] = fn(comparison) end
  return values
end
local function less(name) return each(function(c) return c:row "draft".psnr - c:row(name).psnr end) end
os.exit(r:finish {
  { claim = "seconds of dense passes, of those with a draft, long sequence", values = speedups, bar = 1.5 },
  { claim = "PSNR to the pictures of dense attention, in dB", values = each(function(c) return c:row "draft".psnr end),
    bar = 25, baseline = each(function(c) return c:row "random".psnr end) },
  { claim = "PSNR, less that with random blocks, in dB", values = less "random", bar = 1 },
  { claim = "PSNR, less that with windows, in dB", values = less "window", bar = 0 },
  { claim = "mass of attention in the draft's blocks", measured = ty.stats.mean(mass), bar = 0.5,
    baseline = ty.stats.mean(mass_random) },
  { claim = "captions found, of those of dense attention",
    values = each(function(c) return c:row "draft".judged.captions / c:row "full".judged.captions end), bar = 0.95 },
}, true)
