-- Running and training models with a window of their layers in memory
-- claim: 60 % fewer bytes on the device, with outputs that are the same to the last bit
-- system: a small Llama, a CLIP and a larger Llama, with all but a window of layers in a file
-- paper: Abbasi and Lim 2024, "Superpipeline: A Universal Approach for Reducing GPU Memory Usage in Large Models"
-- time: 2 minutes on one CPU core
--
-- The device is the CPU here, and its bytes are those that tensors take: parameters that are there, gradients, moments
-- and activations, at their most during a pass. The rest of the model is in a file that is read past the page cache.
-- Each model runs on the same inputs with and without the window, and both ways are timed in turn. Training sends
-- gradients and moments away besides; the optimizer is AdamW. The picture is the plane of the two knobs for the larger
-- Llama, whose weights are random: how many layers stay, and how many of these are loaded ahead. On one core the
-- processor that computes is the one that asks the disk, so that what is hidden is the disk's time alone.
local ty = require "tycho"
local llm = require "tycho.llm"
local offload = require "tycho.offload"
local zoo = require "tycho.zoo"
local nn = ty.nn

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "window", 2, "units on the device at a time" },
    { "ahead", 1, "of these, how many are loaded before they are wanted" },
    { "place", "file", "where the others are: file or host" },
    { "width", 512, "of the larger Llama", quick = 64 },
    { "layers", 12, "of it", quick = 6 },
    { "tokens", 256, "of its input", quick = 16 },
    { "steps", 3, "of training", quick = 2 },
    { "rounds", 3, "of timing", quick = 1 },
  },
}
local args = r.args

local function plan(window, ahead, place)
  return { parameters = place or args.place, gradients = "device", moments = "device",
    policy = offload.superpipeline { window = window, ahead = ahead } }
end

local resident, apart = offload.resident, ty.recipe.apart
local kjv = zoo.tokenizer "kjv-lm"
local function text(seed, rows, length)
  local ids = kjv:encode(ty.data.kjv():sub(100000 * seed, 100000 * seed + 12 * rows * length))
  return ids:narrow(0, 0, rows * length):to("i64"):reshape(rows, length)
end

-- ---- inference ----

local shares, differences = {}, {}
local function infer(name, model, run)
  shares[name] = {}
  for i, seed in ipairs(r.seeds) do
    local input = run.input(seed)
    local function pass() return run.output(model, input) end
    local whole = resident(model) + r:memory(function() ty.no_grad(pass) end)
    local wanted = ty.no_grad(pass)
    local engine = offload.engine(model, nil, plan(args.window, args.ahead))
    engine:run(pass)
    local part = resident(model) + r:memory(function() engine:run(pass) end)
    differences[#differences + 1] = apart(engine:run(pass), wanted)
    engine:close()
    shares[name][i] = part / whole
    r:say("%s, seed %d: %.2f MB of %.2f MB", name, seed, part / 1e6, whole / 1e6)
  end
end

infer("language model", zoo.load "kjv-lm", {
  input = function(seed) return text(seed, 1, 32) end,
  output = function(model, ids) return model(ids) end,
})
infer("CLIP", zoo.load "scene-clip", {
  input = function(seed)
    ty.manual_seed(seed)
    return { ty.rand(1, 3, 64, 64), ty.randint(0, 500, { 1, 16 }) }
  end,
  output = function(model, input) return (model(input[2], { pictures = input[1], interpolate = true })) end,
})

-- ---- training ----

local training = {}
for i, seed in ipairs(r.seeds) do
  local input = text(seed, 2, 33)
  local losses, bytes = {}, {}
  for way, planned in pairs { memory = false, window = plan(args.window, args.ahead) } do
    if planned then planned.moments, planned.gradients = args.place, args.place end
    local model = zoo.load "kjv-lm"
    local optimizer = ty.optim.AdamW(model, { lr = 1e-4 })
    local engine = planned and offload.engine(model, optimizer, planned)
    local function loss()
      return nn.cross_entropy(model(input:narrow(1, 0, 32)):reshape(64, -1), input:narrow(1, 1, 32):reshape(-1))
    end
    losses[way] = {}
    for step = 1, args.steps do
      local before = resident(model, optimizer)
      local extra = r:memory(function()
        losses[way][step] = engine and engine:step(loss) or ty.train.minimize(optimizer, 1, loss)
      end)
      bytes[way] = before + extra
    end
    if engine then engine:close() end
    for _, p in ipairs(model:parameters()) do p:set_grad() end
  end
  differences[#differences + 1] = apart(losses.memory, losses.window)
  training[i] = bytes.window / bytes.memory
  r:say("training, seed %d: %.2f MB of %.2f MB, losses %.4f to %.4f", seed, bytes.window / 1e6, bytes.memory / 1e6,
    losses.window[1], losses.window[args.steps])
end

-- ---- the plane of the two knobs ----

ty.manual_seed(r.seed)
local large = llm.Llama { vocab_size = 2048, hidden_size = args.width, intermediate_size = 2 * args.width,
  num_hidden_layers = args.layers, num_attention_heads = args.width // 64, num_key_value_heads = args.width // 64,
  max_position_embeddings = 512 }
local ids = ty.randint(0, 2048, { 1, args.tokens })
local function pass() return large(ids, { last = 1 }) end
local function alone() ty.no_grad(pass) end
local whole = resident(large) + r:memory(alone)
local wanted = ty.no_grad(pass)
local series = {}
for _, ahead in ipairs { 0, 1, 2 } do
  local line = { x = {}, y = {}, label = ("%d ahead"):format(ahead) }
  for _, window in ipairs { 1, 2, 3, 4, 6 } do
    if window > ahead then
      -- One engine at a time has the model; the model alone is timed right before and after it.
      local before = r:time({ alone = alone }, { rounds = args.rounds }).alone
      local engine = offload.engine(large, nil, plan(window, ahead))
      local function within() engine:run(pass) end
      local seconds = r:time({ within = within }, { rounds = args.rounds }).within
      local bytes = resident(large) + r:memory(within)
      differences[#differences + 1] = apart(engine:run(pass), wanted)
      engine:close()
      local after = r:time({ alone = alone }, { rounds = args.rounds }).alone
      local share, time = bytes / whole, seconds / math.min(before, after)
      local name = ("window%d_ahead%d"):format(window, ahead)
      r.metrics[name .. "_share"], r.metrics[name .. "_time"] = share, time
      table.insert(line.x, share)
      table.insert(line.y, time)
      r:say("window %d, %d ahead: %.3f of the bytes, %.2f times the time", window, ahead, share, time)
    end
  end
  series[#series + 1] = line
end
ty.plot.line { series = series, title = "A window of layers",
  x_label = "device bytes, of the whole model's", y_label = "time of a pass, relative", width = 640,
  height = 400 }:save(r:picture "superpipeline.png")

local rows = {}
for _, name in ipairs { "language model", "CLIP" } do
  rows[#rows + 1] = { claim = name .. ": device bytes, of the whole model's", values = shares[name], bar = 0.4,
    below = true }
end
rows[#rows + 1] = { claim = "training the language model: device bytes, of those in memory", values = training,
  bar = 0.4, below = true }
rows[#rows + 1] = { claim = "larger Llama: device bytes, of the whole model's",
  measured = r.metrics[("window%d_ahead%d_share"):format(2, 1)], bar = 0.4, below = true }
rows[#rows + 1] = { claim = "largest difference of outputs and losses", measured = math.max(table.unpack(differences)),
  bar = 0, below = true }
os.exit(r:finish(rows), true)
