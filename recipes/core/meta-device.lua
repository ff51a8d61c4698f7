-- Memory and time before the run
-- claim: a device of shapes alone foretells the peak of training within 5 % for ten models of three kinds
-- system: meta device that follows the allocator's rules allocation by allocation, and a learnt model of a step's time
-- paper: "GPU Memory and Utilization Estimation for Training-Aware Resource Management: Opportunities and
--   Limitations", 2026, arXiv:2602.17817
-- time: 2 minutes on a CPU core
--
-- The same function is run twice: on the meta device, which allocates nothing and computes nothing, and on the CPU with
-- an empty cache. It makes the model and AdamW and does two steps, whose second has the moments of the first. So it is
-- done plain, under bf16 autocast, and with checkpoints where the model has them. Sums of parameters, gradients and
-- moments, what is often quoted, stand beside it as the baseline. What kernels take for themselves while they run is
-- measured and not foretold: it is most of what is left, and more of it the smaller the batch of a convolution.
-- The time of a step is learnt from nine models and foretold for the tenth, each in turn, of processor seconds on one
-- thread. The baseline is the roofline with the machine's own limits. Utilisation is the share of the machine's
-- arithmetic; convolutions by Winograd's way, which multiplies less than is counted, may have more than all of it.
local ty = require "tycho"
local models = require "tycho.models"
local nn, optim, stats = ty.nn, ty.optim, ty.stats

local r = ty.recipe.declare { args = {
  { "batch", 32, "pictures of a batch; texts are a quarter of it", quick = 4 },
  { "size", 32, "height and width of pictures", quick = 16 },
  { "width", 128, "width of transformers", quick = 64 },
  { "layers", 4, "their layers", quick = 2 },
  { "tokens", 256, "tokens of a text", quick = 64 },
  { "steps", 3, "steps that are timed", quick = 1 },
} }
if r.args.threads == 0 then ty.set_threads(1) end -- processor seconds are then those of a clock
local a, heads, words = r.args, 4, 1024

local function labels(device, n) return ty.zeros({ n }, { dtype = "i64", device = device }) end
local function pictures(device, channels)
  return ty.randn({ a.batch, channels, a.size, a.size }, { device = device })
end

local language = { vocab_size = words, hidden_size = a.width, intermediate_size = 4 * a.width,
  num_hidden_layers = a.layers, num_attention_heads = heads, max_position_embeddings = a.tokens }
local function read(model, device, options)
  local x = ty.zeros({ a.batch // 4, a.tokens }, { dtype = "i64", device = device })
  return nn.cross_entropy(model(x, options):reshape(-1, words), x:reshape(-1))
end
local function classify(model, device)
  return nn.cross_entropy(model(pictures(device, 3)), labels(device, a.batch))
end
local function denoise(channels, condition)
  return function(model, device)
    local x = pictures(device, channels)
    local t = ty.zeros({ a.batch }, { device = device })
    return (model(x, t, condition and { labels = labels(device, a.batch) }) - x):square():mean()
  end
end
local half = a.size // 2

-- Name, kind, model, loss, whether the model has checkpoints.
local list = {
  { "Llama", "language", function() return models.Llama(language) end, read, true },
  { "GPT-2", "language", function()
    return models.GPT2 { vocabulary = words, context = a.tokens, width = a.width, layers = a.layers, heads = heads }
  end, read, true },
  { "GPT-NeoX", "language", function() return models.GPTNeoX(language) end, read, true },
  { "BERT", "language", function() return models.BertForMaskedLM(language) end, read },
  { "DiT", "diffusion", function()
    return models.DiT { size = a.size, patch = 2, channels = 4, width = a.width, depth = a.layers, heads = heads }
  end, denoise(4, true) },
  { "U-Net", "diffusion", function()
    return models.UNet { in_channels = 3, out_channels = 3, levels = { 32, { channels = 64, attention = true } } }
  end, denoise(3) },
  { "autoencoder", "diffusion", function()
    return models.AutoencoderKL { block_out_channels = { 32, 64 }, norm_num_groups = 8,
      down_block_types = { "DownEncoderBlock2D", "DownEncoderBlock2D" },
      up_block_types = { "UpDecoderBlock2D", "UpDecoderBlock2D" } }
  end, function(model, device)
    local x = pictures(device, 3)
    return (model:decode(model:encode(x):mode()) - x):square():mean()
  end },
  { "ResNet", "vision", function()
    return models.ResNet { channels = { 32, 64, 128 }, blocks = { 2, 2, 2 }, classes = 10, small = true }
  end, classify },
  { "ViT", "vision", function()
    return models.ViTForImageClassification { image_size = a.size, patch_size = 4, hidden_size = a.width,
      intermediate_size = 4 * a.width, num_hidden_layers = a.layers, num_attention_heads = heads, num_labels = 10 }
  end, classify },
  { "convolutions", "vision", function()
    return nn.Sequential(nn.Conv2d(3, 64, 3, { padding = 1 }), nn.GroupNorm(8, 64), nn.SiLU(),
      nn.Conv2d(64, 128, 3, { padding = 1, stride = 2 }), nn.GroupNorm(8, 128), nn.SiLU(), nn.Flatten(),
      nn.Linear(128 * half * half, 10))
  end, classify },
}

local function training(row, mode, device)
  ty.manual_seed(r.seed)
  local model = nn.with_defaults({ device = device }, row[3])
  local opt = optim.AdamW(model:parameters(), { lr = 1e-3 })
  local function loss()
    return row[4](model, device, mode == "checkpoints" and { checkpoint = true } or nil)
  end
  return function()
    ty.scope(function() opt:step(mode == "bf16" and ty.autocast("bf16", loss) or loss()) end)
  end, model
end
local function two_steps(row, mode)
  return function(device)
    local step, model = training(row, mode, device)
    step()
    step()
    return model:count_parameters()
  end
end

-- ---- memory ----

local worst, of_sum = { plain = 0, bf16 = 0, checkpoints = 0 }, {}
r:say("%-14s %-10s %-12s %12s %12s %8s %12s", "model", "kind", "", "foretold", "measured", "apart", "of states")
for _, row in ipairs(list) do
  for _, mode in ipairs { "plain", "bf16", "checkpoints" } do
    if mode ~= "checkpoints" or row[5] then
      ty.profile.foresee(two_steps(row, mode)) -- once before: what Lua loads when it is first used is there then
      local seen, parameters = ty.profile.foresee(two_steps(row, mode))
      ty.memory.empty_cache()
      local peak = r:memory(function() two_steps(row, mode) "cpu" end)
      local apart = 100 * math.abs(seen.peak / peak - 1)
      worst[mode] = math.max(worst[mode], apart)
      -- Parameters, gradients and two moments of f32.
      if mode == "plain" then of_sum[#of_sum + 1] = 100 * math.abs(16 * parameters / peak - 1) end
      r:say("%-14s %-10s %-12s %9.2f MB %9.2f MB %6.2f %% %9.2f MB", row[1], row[2], mode, seen.peak / 1e6, peak / 1e6,
        apart, 16 * parameters / 1e6)
      r.metrics[("%s %s"):format(row[1], mode)] = apart
    end
  end
end

-- ---- time ----

-- The machine's limits for one thread: a large product, a large copy, in processor seconds like all times here.
local function seconds_of(fn, least)
  local best = math.huge
  for _ = 1, r.quick and 1 or 7 do
    local began = os.clock()
    ty.scope(fn)
    best = math.min(best, os.clock() - began)
  end
  return math.max(best, least)
end
local function limits_of(n, count)
  local x, y = ty.randn(n, n), ty.randn(count)
  local z = y:clone()
  return { flops = 2.0 * n ^ 3 / seconds_of(function() return x:matmul(x) end, 1e-6),
    bandwidth = 8.0 * count / seconds_of(function() z:copy_(y) end, 1e-6) }
end
local limits = limits_of(r.quick and 256 or 1024, r.quick and 1 << 20 or 1 << 25)
local rows, roofline = {}, {}
for i, row in ipairs(list) do
  local seen = ty.profile.foresee(function(device) (training(row, "plain", device))() end)
  local step = training(row, "plain", "cpu")
  step()
  local times = {}
  for n = 1, a.steps do
    local began = os.clock()
    step()
    times[n] = os.clock() - began
  end
  rows[i] = { seen = seen, seconds = math.max(1e-6, stats.median(times)) }
  roofline[i] = math.max(seen.flops / limits.flops, seen.bytes / limits.bandwidth)
  collectgarbage()
end
local learnt, plain, points = {}, {}, {}
r:say("\n%-14s %10s %10s %10s %13s %13s", "model", "step", "foretold", "roofline", "utilisation", "foretold")
for i, row in ipairs(rows) do
  local others = {}
  for j, other in ipairs(rows) do if j ~= i then others[#others + 1] = other end end
  local seconds = ty.profile.fit_time(others):seconds(row.seen)
  learnt[i], plain[i] = math.abs(seconds / row.seconds - 1), math.abs(roofline[i] / row.seconds - 1)
  local share = 100 * row.seen.flops / limits.flops
  local used, foretold = share / row.seconds, share / seconds
  points[i] = math.abs(used - foretold)
  r:say("%-14s %7.1f ms %7.1f ms %7.1f ms %11.1f %% %11.1f %%", list[i][1], 1e3 * row.seconds, 1e3 * seconds,
    1e3 * roofline[i], used, foretold)
end

os.exit(r:finish {
  { claim = "peak of ten models of three kinds, the worst, % from measured", measured = worst.plain,
    baseline = stats.median(of_sum), bar = 5, below = true },
  { claim = "likewise under bf16 autocast", measured = worst.bf16, bar = 5, below = true },
  { claim = "likewise of three models with checkpoints", measured = worst.checkpoints, bar = 5, below = true },
  { claim = "time of a step of a model not learnt from: median error, of the roofline's",
    measured = stats.median(learnt) / stats.median(plain), baseline = stats.median(plain), bar = 1, below = true },
  { claim = "utilisation likewise: median error in points of the machine's arithmetic",
    measured = stats.median(points), judged = false },
}, true)
