-- Training with forward passes alone, a block of the model at a time
-- claim: device bytes of about one block, the numbers of the version in memory to the last bit, and the loss falls
-- system: MeZO on the small Llama of the zoo and on Llamas of four depths, whose blocks live in the host's memory
-- paper: Wang et al. 2025, "ZO2: Scalable Zeroth-Order Fine-Tuning for Extremely Large Language Models with Limited GPU
--   Memory"
-- time: 4 minutes on one CPU core
--
-- The device is the CPU here, and its bytes are those that tensors take at their most during a step: parameters that
-- are there, noise and activations. The task is to name the book that a stretch of the Bible is from, as text after a
-- prompt; loss is over the answer's tokens, of chapters that neither the model nor training saw. LoRA gets as many
-- forward passes, where a backward pass counts as two, and as many tries for its rate; it is the stronger method, and
-- keeps gradients, moments and activations for that. What is compared bit by bit are the losses of the first steps and
-- all parameters after them.
local ty = require "tycho"
local datasets, zoo = require "tycho.datasets", require "tycho.zoo"
local llm, offload, peft = require "tycho.llm", require "tycho.offload", require "tycho.peft"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "steps", 100, "of MeZO, two forward passes each", quick = 3 },
    { "tuning", 40, "steps of a try for the rate", quick = 2 },
    { "batch", 8, "items at a time", quick = 2 },
    { "same", 10, "steps that are done in memory as well", quick = 2 },
    { "items", 160, "of the held-out part", quick = 4 },
    { "depths", { 4, 8, 16 }, "blocks of the Llamas whose bytes are counted", quick = { 2, 4 } },
    { "width", 384, "hidden size of these", quick = 64 },
    { "place", "host", "where blocks are: host or file" },
  },
}
local args = r.args

-- ---- the loss falls, with the numbers of the version in memory ----

local tokenizer = zoo.tokenizer "kjv-lm"
local function part(split, length)
  return datasets.load("text_tasks", { split = split, tasks = { "book" }, tokenizer = tokenizer, length = length })
end
local training, test = part("training"), part("test", args.items)
local development = part("development", r.quick and 4 or 60)

local function score(model, set) return datasets.text_tasks.score(model, set).loss end

local function closure(model, seed, step)
  local positions = {}
  for k = 1, args.batch do positions[k] = ((seed * 1000 + step) * args.batch + k) % #training end
  local batch = training:batch(positions)
  return function() return llm.train.loss(model, batch) end
end

-- Trains with ZO2. before(step) is called before each step.
local function streamed(model, rate, seed, steps, before)
  local zo2 = offload.zo2(model, ty.optim.MeZO(model, { lr = rate, seed = seed }), { parameters = args.place })
  local losses = {}
  for step = 1, steps do
    if before then before(step, zo2, losses) end
    losses[step] = zo2:step(closure(model, seed, step))
  end
  zo2:close()
  return losses
end

local function lora(model, rate, seed, forwards)
  ty.manual_seed(seed)
  peft.lora(model, { rank = 8, alpha = 8, targets = "all-linear" })
  local optimizer = ty.optim.AdamW(peft.parameters(model), { lr = rate, weight_decay = 0, clip_norm = 1 })
  ty.train.minimize(optimizer, math.max(1, forwards // 3), function(step) return closure(model, seed, step)() end)
end

-- The rate with the least loss on the development part, with the first seed.
local function tune(name, rates, run)
  r:choose(name, rates, function(rate)
    local model = zoo.load "kjv-lm"
    run(model, rate)
    local loss = score(model, development)
    r:say("%s, rate %g: development loss %.4f", name, rate, loss)
    return nil, loss
  end)
  return r.metrics.chosen[name]
end
local rate = tune("MeZO", { 5e-5, 1e-4, 2e-4 }, function(m, try) streamed(m, try, r.seed, args.tuning) end)
local lora_rate = tune("LoRA", { 1e-3, 3e-3, 1e-2 }, function(m, try) lora(m, try, r.seed, 2 * args.tuning) end)

local start = score(zoo.load "kjv-lm", test)
local shares, theirs, curves, apart = {}, {}, {}, 0
for i, seed in ipairs(r.seeds) do
  local twin = zoo.load "kjv-lm"
  local optimizer, wanted = ty.optim.MeZO(twin, { lr = rate, seed = seed }), {}
  for step = 1, args.same do wanted[step] = optimizer:step(closure(twin, seed, step)) end
  local model = zoo.load "kjv-lm"
  local losses = streamed(model, rate, seed, args.steps, function(step, zo2, losses)
    if step ~= args.same + 1 then return end
    zo2:flush()
    zo2.engine:gather()
    apart = math.max(apart, ty.recipe.apart(twin, model), ty.recipe.apart(wanted, losses))
    zo2.engine:keep {}
  end)
  local ours, other = score(model, test), zoo.load "kjv-lm"
  lora(other, lora_rate, seed, 2 * args.steps)
  shares[i], theirs[i] = ours / start, score(other, test) / start
  r:say("seed %d: held-out loss %.4f at the start, %.4f after %d steps of MeZO, %.4f with LoRA at as many passes", seed,
    start, ours, args.steps, theirs[i] * start)
  curves[i] = { x = ty.arange(1, #losses + 1), y = losses, label = "loss, seed " .. seed, smooth = 9 }
end

-- ---- bytes on the device ----

-- The most bytes of a step, whole block's bytes.
local function measure(depth, plan)
  ty.manual_seed(r.seed)
  local model = llm.Llama { vocab_size = 512, hidden_size = args.width, intermediate_size = 3 * args.width,
    num_hidden_layers = depth, num_attention_heads = args.width // 64, num_key_value_heads = args.width // 64,
    max_position_embeddings = 64 }
  local ids = ty.randint(0, 512, { 1, 33 })
  local block = offload.resident(model:get "model.layers.0")
  local optimizer = ty.optim.MeZO(model, { lr = 1e-5 })
  local trainer = plan and offload.zo2(model, optimizer, plan) or optimizer
  local function loss() return model:loss(ids:narrow(1, 0, 32), ids:narrow(1, 1, 32)) end
  local function step() trainer:step(loss) end
  step()
  local most = offload.resident(model) + r:memory(step)
  local seconds = r:clock(step)
  if plan then trainer:close() end
  return most, block, seconds
end

local kinds = { { name = "in memory" },
  { name = "one ahead", plan = { parameters = args.place, in_flight = 1 << 20 } },
  { name = "one block", plan = { parameters = args.place, ahead = 0, in_flight = 0 } } }
local lines, found = {}, {}
for k, kind in ipairs(kinds) do
  local x, y, blocks = {}, {}, {}
  for _, depth in ipairs(args.depths) do
    local most, block, seconds = measure(depth, kind.plan)
    x[#x + 1], y[#y + 1], blocks[#blocks + 1] = depth, most / 1e6, most / block
    r:say("%s blocks, %s: %.2f MB, a block has %.2f MB; %.3f s a step", depth, kind.name, most / 1e6, block / 1e6,
      seconds)
    local name = ("%s_%s_"):format(kind.name, depth)
    r.metrics[name .. "blocks"], r.metrics[name .. "seconds"] = most / block, seconds
  end
  lines[k], found[kind.name] = { x = x, y = y, label = kind.name }, blocks
end

ty.plot.line { series = lines, title = "Bytes on the device by depth", x_label = "blocks", y_label = "MB", width = 640,
  height = 400 }:save(r:picture "zo2.png")
ty.plot.line { series = curves, title = "Loss by forward passes alone", x_label = "steps",
  y_label = "nats a token of the answer, smoothed", width = 640, height = 400 }:save(r:path "loss.png")

local one, ahead = found["one block"], found["one ahead"]
os.exit(r:finish {
  { claim = "device bytes of a step, of one block's, deepest model", measured = one[#one], bar = 1.5, below = true },
  { claim = "the same with one block on its way while one computes", measured = ahead[#ahead], bar = 3, below = true },
  { claim = "device bytes of the deepest, of those of the shallowest", measured = one[#one] / one[1], bar = 1.05,
    below = true },
  { claim = "largest difference of losses and parameters from the version in memory", measured = apart, bar = 0,
    below = true },
  { claim = "held-out loss after training, of that before", values = shares, baseline = theirs, bar = 0.95,
    below = true },
}, true)
