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
local zoo = require "tycho.zoo"
local stats = ty.stats

local r = ty.recipe.declare { args = {
  { "batch", 32, "pictures of a batch; texts are a quarter of it", quick = 4 },
  { "size", 32, "height and width of pictures", quick = 16 },
  { "width", 128, "width of transformers", quick = 64 },
  { "layers", 4, "their layers", quick = 2 },
  { "tokens", 256, "tokens of a text", quick = 64 },
  { "steps", 3, "steps that are timed", quick = 1 },
} }
if r.args.threads == 0 then ty.set_threads(1) end -- processor seconds are then those of a clock
local a = r.args
local list = zoo.kinds.all { batch = a.batch, size = a.size, width = a.width, layers = a.layers, tokens = a.tokens }

local function two_steps(work, mode)
  return function(device)
    local step, model = zoo.kinds.training(work, device, { mode = mode, seed = r.seed })
    step()
    step()
    return model:count_parameters()
  end
end

-- ---- memory ----

local worst, of_sum = { plain = 0, bf16 = 0, checkpoints = 0 }, {}
r:say("%-14s %-10s %-12s %12s %12s %8s %12s", "model", "kind", "", "foretold", "measured", "apart", "of states")
for _, work in ipairs(list) do
  for _, mode in ipairs { "plain", "bf16", "checkpoints" } do
    if mode ~= "checkpoints" or work.checkpoints then
      ty.profile.foresee(two_steps(work, mode)) -- once before: what Lua loads when it is first used is there then
      local seen, parameters = ty.profile.foresee(two_steps(work, mode))
      ty.memory.empty_cache()
      local peak = r:memory(function() two_steps(work, mode) "cpu" end)
      local apart = 100 * math.abs(seen.peak / peak - 1)
      worst[mode] = math.max(worst[mode], apart)
      -- Parameters, gradients and two moments of f32.
      if mode == "plain" then of_sum[#of_sum + 1] = 100 * math.abs(16 * parameters / peak - 1) end
      r:say("%-14s %-10s %-12s %9.2f MB %9.2f MB %6.2f %% %9.2f MB", work.name, work.kind, mode, seen.peak / 1e6,
        peak / 1e6, apart, 16 * parameters / 1e6)
      r.metrics[("%s %s"):format(work.name, mode)] = apart
    end
  end
end

-- ---- time ----

-- Limits are those of one thread, in processor seconds like all times here.
local limits = ty.profile.limits { processor = true, copy = true }
local rows, roofline = {}, {}
for i, work in ipairs(list) do
  local seen = ty.profile.foresee(function(device) (zoo.kinds.training(work, device, { seed = r.seed }))() end)
  local step = zoo.kinds.training(work, "cpu", { seed = r.seed })
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
for i, seconds in ipairs(ty.profile.cross_time(rows)) do
  local row = rows[i]
  learnt[i], plain[i] = math.abs(seconds / row.seconds - 1), math.abs(roofline[i] / row.seconds - 1)
  local share = 100 * row.seen.flops / limits.flops
  local used, foretold = share / row.seconds, share / seconds
  points[i] = math.abs(used - foretold)
  r:say("%-14s %7.1f ms %7.1f ms %7.1f ms %11.1f %% %11.1f %%", list[i].name, 1e3 * row.seconds, 1e3 * seconds,
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
