-- The optimizer and its state on the host, half precision on the device
-- claim: 4 bytes of a parameter on the device in place of 16; an Adam at 80 % of the memory's speed, 3 times as fast as
--   the naive one
-- system: a Llama in bf16 whose f32 parameters and moments are on the host, where a native thread steps them
-- paper: Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training"
-- time: 2 minutes on one CPU core
--
-- Bytes on the device are those of a step at their most with few tokens, so that they are parameters and gradients;
-- compared with AdamW in f32. The host's Adam is timed alone on f32 state: 28 bytes of each parameter are read and
-- written, held against the fastest of three plain passes over as much memory. The naive offload does what a program
-- without it does: gradients are copied over when the backward pass is over, and the update is written with tensor
-- operations, each a pass of its own. Losses of the two are those of the same arithmetic, compared to the last bit by
-- the tests of the module; here a delayed update is held against one that is not, after the same steps. On one core the
-- thread has no core of its own, so that what the delay hides cannot be seen. The fastest of some rounds counts.
local ty = require "tycho"
local llm = require "tycho.llm"
local offload = require "tycho.offload"
local nn = ty.nn

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "width", 512, "hidden size", quick = 64 },
    { "layers", 8, "of the model", quick = 8 },
    { "tokens", 32, "of a step", quick = 8 },
    { "steps", 12, "with the update delayed and not", quick = 2 },
    { "rounds", 7, "of timing", quick = 1 },
  },
}
local args = r.args

local function make(seed)
  ty.manual_seed(seed)
  local model = llm.Llama { vocab_size = 256, hidden_size = args.width, intermediate_size = 3 * args.width,
    num_hidden_layers = args.layers, num_attention_heads = args.width // 64, num_key_value_heads = args.width // 64,
    max_position_embeddings = args.tokens }
  local ids = ty.randint(0, 256, { 1, args.tokens + 1 })
  return model, function()
    local logits = model(ids:narrow(1, 0, args.tokens))
    return nn.cross_entropy(logits:reshape(args.tokens, -1):to "f32", ids:narrow(1, 1, args.tokens):reshape(-1))
  end
end

local function live()
  collectgarbage()
  collectgarbage()
  return ty.memory.stats().live
end

-- The most bytes of a parameter that a model, its state and a step take.
local function bytes_of(seed, ours)
  local before = live()
  local model, loss = make(seed)
  local count, trainer, optimizer = model:count_parameters(), nil, nil
  if ours then trainer = offload.zero_offload(model, { settings = { lr = 1e-3 } })
  else optimizer = ty.optim.AdamW(model, { lr = 1e-3 }) end
  local function step() if ours then trainer:step(loss) else optimizer:step(loss()) end end
  for _ = 1, 2 do ty.scope(step) end
  local held = live() - before
  local most = held + r:memory(step)
  if trainer then trainer:close() end
  return most / count
end

local shares, plain, ends = {}, {}, { delayed = {}, atonce = {} }
for i, seed in ipairs(r.seeds) do
  shares[i], plain[i] = bytes_of(seed, true), bytes_of(seed, false)
  for name, delayed in pairs { delayed = true, atonce = false } do
    local model, loss = make(seed)
    local trainer = offload.zero_offload(model, { settings = { lr = 1e-3 }, delayed = delayed, from = args.steps // 4 })
    for _ = 1, args.steps do ends[name][i] = trainer:step(loss) end
    trainer:close()
  end
  r:say("seed %d: %.2f bytes of a parameter, %.2f in f32; loss after %d steps %.4f, delayed %.4f", seed, shares[i],
    plain[i], args.steps, ends.atonce[i], ends.delayed[i])
end
r.metrics.loss_delayed, r.metrics.loss_at_once = ty.stats.mean(ends.delayed), ty.stats.mean(ends.atonce)

-- ---- the update ----

local function fastest(functions)
  local _, times = r:time(functions, { rounds = args.rounds })
  local seconds = {}
  for name, list in pairs(times) do seconds[name] = math.min(table.unpack(list)) end
  return seconds
end

local model = make(r.seed)
local count = model:count_parameters()
local masters, grads, halves, half_grads, m, v = {}, {}, {}, {}, {}, {}
for i, p in ipairs(model:parameters()) do
  masters[i], grads[i] = p:detach():clone(), ty.randn_like(p) * 1e-3
  halves[i], half_grads[i] = masters[i]:to "bf16", grads[i]:to "bf16"
  m[i], v[i] = ty.zeros_like(grads[i]), ty.zeros_like(grads[i])
  masters[i]:set_grad(grads[i])
end
local optimizer = ty.optim.AdamW(masters, { lr = 1e-3 })
optimizer:step()
local t = 0
local function naive()
  ty.no_grad(function()
    t = t + 1
    for i, p in ipairs(masters) do
      ty.scope(function()
        local g = half_grads[i]:to "f32"
        m[i]:copy_(m[i] * 0.9 + g * 0.1)
        v[i]:copy_(v[i] * 0.999 + g * g * 0.001)
        local root = (v[i] / (1 - 0.999 ^ t)):sqrt() + 1e-8
        p:copy_(p * (1 - 1e-3 * 0.01) - m[i] / (1 - 0.9 ^ t) / root * 1e-3)
        halves[i]:copy_(p)
      end)
    end
  end)
end
local function ours() -- gradients over, Adam, half-precision parameters back
  ty.no_grad(function() for i, g in ipairs(half_grads) do grads[i]:copy_(g) end end)
  optimizer:step()
  ty.no_grad(function() for i, p in ipairs(masters) do halves[i]:copy_(p) end end)
end
local a, b = ty.rand(count), ty.rand(count)
local update = fastest { naive = naive, ours = ours, adam = function() optimizer:step() end,
  copy = function() ty.no_grad(function() a:copy_(b) end) end,
  add = function() ty.no_grad(function() a:add_(b) end) end,
  scale = function() ty.no_grad(function() a:mul_(0.99) end) end }
local memory = math.max(8 * count / update.copy, 12 * count / update.add, 8 * count / update.scale)
local adam = 28 * count / update.adam
r:say("%d parameters: Adam %.2f GB/s of %.2f GB/s; an update %.3f s, naive %.3f s", count, adam / 1e9, memory / 1e9,
  update.ours, update.naive)
r.metrics.adam_bytes_a_second, r.metrics.memory_bytes_a_second = adam, memory
r.metrics.update_seconds, r.metrics.naive_seconds = update.ours, update.naive

os.exit(r:finish {
  { claim = "device bytes of a parameter", values = shares, baseline = plain, bar = 4, below = true },
  { claim = "Adam's bytes a second on the host, of the memory's", measured = adam / memory, bar = 0.8 },
  { claim = "update phase, times as fast as a naive offload", measured = update.naive / update.ours,
    baseline = update.naive, bar = 3 },
}, true)
