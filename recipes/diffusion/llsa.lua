-- Attention to few tokens and to means of the rest, in log-linear time
-- claim: the time of attention grows with the tokens and their logarithm up to 65,536 of them, and a network of pixels
--   that is trained with it learns as one with dense attention does
-- system: LLSA, hierarchical choice of blocks with the means of what was not chosen
-- paper: Zhou et al. 2025, "Trainable Log-linear Sparse Attention for Efficient Diffusion Transformers"
-- time: 4 minutes on one CPU core
--
-- A transformer of single pixels of small scenes, 1,024 tokens in Z-order: each block of 16 sees 8 blocks of 64. Beside
-- it, with the same steps and batches: dense attention, the choice of one level without means (other trainable sparse
-- attention), and one that keeps half as many. Times are those of the layer, forward and with its gradients, and stand
-- beside dense attention's, which is fast: the length at which they meet is the figure that counts.
local ty = require "tycho"
local datasets, diffusion = require "tycho.datasets", require "tycho.diffusion"

local r = ty.recipe.declare { seeds = 3,
  args = {
    { "steps", 80, "training steps of each network", quick = 2 },
    { "batch", 4, "pictures of a step", quick = 2 },
    { "width", 48, "of the transformer", quick = 16 },
    { "depth", 2, "of the transformer", quick = 1 },
    { "kept", 8, "blocks that a block of queries keeps at each level" },
    { "count", 32, "held-out pictures", quick = 2 },
    { "longest", 65536, "tokens that attention is timed at", quick = 4096 },
  } }
local args, flow = r.args, diffusion.Flow()
local attention, SIDE = diffusion.attention, 32

-- ---- training ----

local function pictures(split, count)
  local set = datasets.load("scenes", { split = split, size = SIDE, fields = { "image" }, objects = { 1, 2 },
    rotation = 0, backgrounds = { "plain", "gradient" } })
  return (set:batch(ty.arange(count)).image:to "f32" / 127.5 - 1):to(r.device)
end
local training = ty.data.TensorDataset { image = pictures("training", r.quick and 8 or 800) }
local held_out = pictures("validation", args.count)
local function labels(n) return { labels = ty.zeros({ n }, { dtype = "i64", device = r.device }) } end

-- The mean over times of the held-out loss, with fixed noise.
local function loss_of(model)
  return ty.no_grad(function()
    local sum, parts = 0.0, 0
    for i, time in ipairs { 0.1, 0.3, 0.5, 0.7, 0.9 } do
      for first = 0, args.count - 1, 8 do
        local x = held_out:narrow(0, first, math.min(8, args.count - first))
        ty.manual_seed(100 * i + first)
        local t = ty.full({ x.shape[1] }, time, { device = r.device })
        sum, parts = sum + flow:loss(model, x, labels(x.shape[1]), { t = t }):item(), parts + 1
      end
    end
    return sum / parts
  end)
end

local kinds = { { "dense" }, { "LLSA", { kept = args.kept } },
  { "one level, no means", { kept = args.kept, levels = 1, enrich = false } },
  { "LLSA, half as many", { kept = args.kept // 2 } } }
local losses, models = {}, {}
for i, seed in ipairs(r.seeds) do
  for _, kind in ipairs(kinds) do
    ty.manual_seed(seed)
    local model = diffusion.DiT { size = SIDE, patch = 1, channels = 3, width = args.width, depth = args.depth,
      heads = 2, classes = 0 }:to(r.device)
    if kind[2] then attention.llsa(model, kind[2]) end
    local loader = ty.data.DataLoader(training, { batch_size = args.batch, shuffle = true, seed = seed,
      drop_last = true })
    ty.manual_seed(seed + 1)
    local began = ty.system.clock()
    ty.train.fit(model, loader, { steps = args.steps, lr = 3e-3, quiet = true,
      loss = function(m, batch) return flow:loss(m, batch.image, labels(batch.image.shape[1])) end })
    local took = ty.system.clock() - began
    losses[kind[1]] = losses[kind[1]] or {}
    losses[kind[1]][i] = loss_of(model:eval())
    models[kind[1]] = models[kind[1]] or model
    r:say("seed %d, %s: held-out loss %.4f, %.1f s", seed, kind[1], losses[kind[1]][i], took)
  end
end

local sheet = {}
for _, kind in ipairs(kinds) do
  sheet[#sheet + 1] = flow:sampler { steps = r.quick and 2 or 15, solver = diffusion.solver.euler() }:sample(
    models[kind[1]], { 4, 3, SIDE, SIDE }, { condition = labels(4), seeds = { 1, 2, 3, 4 } }):clamp(-1, 1)
end
ty.plot.grid(ty.concat(sheet, 0), { columns = 4, scale = 2 }):save(r:picture "llsa.png")

-- ---- seconds over tokens ----

local function seconds(n, fn, times)
  local function noise() return ty.randn({ 1, 1, n, 32 }, { device = r.device }):requires_grad_() end
  local q, k, v, least, forward = noise(), noise(), noise(), math.huge, math.huge
  local list = { q, k, v }
  for _ = 1, times do
    ty.scope(function()
      local began = ty.system.clock()
      local y = fn(q, k, v)
      r:wait()
      forward = math.min(forward, ty.system.clock() - began)
      ty.grad(y:sum(), list)
      r:wait()
      least = math.min(least, ty.system.clock() - began)
    end)
  end
  return least, forward
end
local function loglinear(q, k, v) return attention.loglinear(q, k, v, { kept = args.kept }) end
local sparse, dense, both, forwards, tokens = {}, {}, {}, {}, r.quick and 1024 or 4096
while tokens <= args.longest do
  local all, forward = seconds(tokens, loglinear, 3)
  sparse[#sparse + 1], forwards[#forwards + 1] = { tokens, all }, { tokens, forward }
  if tokens <= 16384 then
    local full = seconds(tokens, function(q, k, v) return ty.scaled_dot_product_attention(q, k, v) end, 2)
    dense[#dense + 1], both[#both + 1] = { tokens, full }, full / all
  end
  r:say("%6d tokens, %d levels: forward %.4f s, with gradients %.4f s%s", tokens,
    attention.levels(tokens, 16, args.kept), forward, all, dense[#sparse]
    and (", dense %.4f s"):format(dense[#sparse][2]) or "")
  tokens = tokens * 2
end

-- ---- the table ----

local function of(name, other)
  local values = {}
  for i in ipairs(r.seeds) do values[i] = losses[name][i] / losses[other][i] end
  return values
end
os.exit(r:finish {
  { claim = "slope of seconds with gradients over tokens, on logarithmic axes", bar = 1.25, below = true,
    measured = ty.stats.slope(sparse, true), baseline = ty.stats.slope(dense, true) },
  { claim = "slope of seconds forward over tokens", measured = ty.stats.slope(forwards, true), bar = 1.25,
    below = true },
  { claim = "seconds of dense attention with gradients, of LLSA's, at the longest both were timed at",
    measured = both[#both], bar = 2 },
  { claim = "held-out loss, of that with dense attention", values = of("LLSA", "dense"), bar = 1.05, below = true },
  { claim = "held-out loss, of that with one level and no means", values = of("LLSA", "one level, no means"), bar = 1,
    below = true },
}, true)
