-- Data parallel training without copies: ranks divide moments, gradients and parameters
-- claim: a rank of n keeps 4 + 12/n, 2 + 14/n or 16/n bytes a parameter in place of 16, and trains as one rank does
-- system: dist.zero, stages 0 to 3 over ranks, for any model
-- paper: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
-- time: 6 minutes on one CPU core
--
-- All ways take the same batches: a rank of n has an n-th of each. Bytes are those that a rank's ledger has between the
-- backward pass and the step, when gradients are there and activations are not, less what it had before the model was
-- made; the model's tables of rotary positions are among them. Stage 0 is plain data parallel training. What is sent is
-- counted as rings of ranks send it, which each have (n - 1) / n of a whole to hand on. Stage 3 gathers the embedding,
-- whose gradient needs no weights, once, and keeps the last layer from its forward to its backward pass, so that it
-- sends less than the three times of the paper. One rank alone trains with ty.optim.AdamW, without dist.zero.
local ty = require "tycho"
local dist = require "tycho.dist"

local r = ty.recipe.declare {
  seeds = 3,
  args = table.move(dist.workload.arguments, 1, #dist.workload.arguments, 6, {
    { "steps", 60, "training steps", quick = 2 }, { "batch", 8, "rows of a step", quick = 4 },
    { "ranks", { 1, 2, 4, 8 }, "numbers of ranks whose bytes are measured", quick = { 2 } },
    { "rate", 3e-3, "of AdamW" }, { "megabytes", 12, "that a rank may have, where the largest model is sought" },
  }),
}
local args = r.args
local several = args.batch // 2 -- ranks that train

-- Trains on a rank: losses of the steps and the held-out loss afterwards. stage nil: one rank as ever.
local function train(group, work, seed, stage, half, o)
  local t, d = require "tycho", require "tycho.dist"
  local model = d.workload.model(work, seed)
  local function make(list) return t.optim.AdamW(list, { lr = o.rate }) end
  local engine = stage and d.zero(group, model, { stage = stage, half = half, optimizer = make })
  local optimizer = not engine and make(model:parameters())
  local share, losses = o.batch // group.size, {}
  for step = 1, o.steps do
    t.scope(function()
      local rows = d.workload.rows(work, seed, step, share * group.rank, share)
      local function loss() return d.workload.loss(model, rows) end
      local value
      if engine then
        value = engine:step(loss)
      else
        local now = loss()
        optimizer:step(now)
        value = now:item()
      end
      losses[step] = group:all_reduce(t.tensor(value, { dtype = "f64" }), "mean"):item()
    end)
  end
  return { losses = losses, held_out = d.workload.evaluate(model, work) }
end

-- Bytes of a rank and bytes that it sends in a step, for each parameter of a model in half precision.
local function measure(group, work, stage, length)
  local _, d = require "tycho", require "tycho.dist"
  group:reset_memory()
  local before = group:memory()
  local model = d.workload.model(work, 0)
  local count, bytes, sent = model:count_parameters(), nil, nil
  local engine = d.zero(group, model, { stage = stage, half = "bf16", bucket = 1 << 16 })
  for step = 1, 2 do
    local so_far = group:traffic().bytes
    local rows = d.workload.rows(work, 0, step, group.rank, 1):narrow(1, 0, length)
    engine:backward(function() return d.workload.loss(model, rows) end)
    rows = nil -- luacheck: ignore
    group:reset_memory()
    bytes = group:memory() - before
    engine:update()
    sent = group:traffic().bytes - so_far
  end
  return { bytes = bytes / count, sent = sent / count, count = count }
end

local work = dist.workload.open { length = args.length, width = args.width, layers = args.layers, rows = args.rows,
  config = { tie_word_embeddings = false } }

r:say("bytes of a rank and bytes sent in a step, for each parameter")
local formulas = { [0] = function() return 16 end, function(n) return 4 + 12 / n end, function(n) return 2 + 14 / n end,
  function(n) return 16 / n end }
local off, sends, series = 0, { 0, 0, 0 }, {}
for stage = 0, 3 do
  local y = {}
  for i, n in ipairs(args.ranks) do
    local got = dist.run(n, measure, nil, work, stage, 9)[1]
    y[i] = got.bytes
    off = math.max(off, math.abs(got.bytes / formulas[stage](n) - 1))
    if stage > 0 and n > 1 then sends[stage] = math.max(sends[stage], got.sent / 2 * n / (n - 1)) end
    r:say("stage %d, %d ranks: %6.2f bytes, by the formula %6.2f; %5.2f sent", stage, n, got.bytes, formulas[stage](n),
      got.sent)
    r:note(("stage_%d/ranks_%d"):format(stage, n), { bytes = got.bytes, sent = got.sent })
  end
  series[stage + 1] = { x = args.ranks, y = y, label = stage == 0 and "plain" or "stage " .. stage }
end
ty.plot.line { series = series, title = "Bytes of a rank for each parameter", x_label = "ranks", width = 900 }
  :save(r:picture "zero.png")

-- The most layers with which steps run within the limit.
local function most_layers(stage)
  local function fits(layers)
    local deep = { training = work.training, held_out = work.held_out, length = work.length, config = {} }
    for key, value in pairs(work.config) do deep.config[key] = value end
    deep.config.num_hidden_layers = layers
    local ok, problem = pcall(dist.run, args.ranks[#args.ranks], measure, { memory = args.megabytes << 20 }, deep,
      stage, 9)
    if not ok and not tostring(problem):find "may have" then error(problem, 0) end
    return ok
  end
  local low, high = 0, 1
  while high <= (r.quick and 2 or 256) and fits(high) do low, high = high, 2 * high end
  while high - low > 1 do
    local middle = (low + high) // 2
    if fits(middle) then low = middle else high = middle end
  end
  return low
end
local largest = {}
for _, stage in ipairs { 0, 3 } do
  largest[stage] = most_layers(stage)
  r:say("within %d MiB a rank of %d trains %d layers in stage %d", args.megabytes, args.ranks[#args.ranks],
    largest[stage], stage)
end

r:say("\nheld-out loss, %d ranks", several)
local apart, halves = {}, {}
for i, seed in ipairs(r.seeds) do
  local o = { rate = args.rate, steps = args.steps, batch = args.batch }
  local alone = dist.run(1, train, nil, work, seed, nil, nil, o)[1]
  apart[i] = 0
  for stage = 1, 3 do
    local got = dist.run(several, train, nil, work, seed, stage, nil, o)[1]
    for step, loss in ipairs(got.losses) do
      apart[i] = math.max(apart[i], math.abs(loss / alone.losses[step] - 1))
    end
    r:say("seed %d, stage %d: %.6f, one rank %.6f", seed, stage, got.held_out, alone.held_out)
    apart[i] = math.max(apart[i], math.abs(got.held_out / alone.held_out - 1))
  end
  halves[i] = dist.run(several, train, nil, work, seed, 3, "bf16", o)[1].held_out / alone.held_out
  r:note("losses", { first = alone.losses[1], last = alone.losses[#alone.losses], held_out = alone.held_out }, seed)
end

os.exit(r:finish {
  { claim = "a rank's bytes from those of the paper's formulas, all stages and numbers of ranks", measured = off,
    bar = 0.02, below = true },
  { claim = "sent in a step, in sizes of the model, stages 1 and 2", measured = math.max(sends[1], sends[2]),
    bar = 2.02, below = true },
  { claim = "the same, stage 3", measured = sends[3], bar = 3.02, below = true },
  { claim = "layers that fit within a rank's limit in stage 3, of those of plain data parallel training",
    measured = largest[3] / math.max(1, largest[0]), bar = 2 },
  { claim = "losses of stages 1 to 3 from those of one rank, f32, the largest difference of all steps", values = apart,
    bar = 1e-5, below = true },
  { claim = "held-out loss of stage 3 in bf16, of one rank's in f32", values = halves, bar = 1.01, below = true },
}, true)
