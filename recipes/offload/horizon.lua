-- Training with two layers on the device, whatever the depth
-- claim: bytes on the device are bounded by two layers; the gradients are the same; twice as fast as ZeRO-3's offload
-- system: Llamas of four depths, all of which lives in the host's memory
-- paper: Yuan et al. 2026, "Horizon-LM: A RAM-Centric Architecture for LLM Training"
-- time: 3 minutes on one CPU core
--
-- The device is the CPU here, with the memory that tensors take; the host's memory is beside it. What a layer takes in
-- training in memory (parameters, gradients, moments, activations) is the slope of the bytes over the depth, and twice
-- that is the bound. Losses and parameters after some steps are compared to the last bit. Times are those of the
-- deepest model against the manner of ZeRO-3 with offload: the optimizer steps after the backward pass, layers are
-- computed again, parameters come from the host; that with each being waited for and with one loaded ahead, of which
-- the faster one counts. Here both compute on the same core, so that the host's optimizer is no slower than the
-- device's, and what the paper gains from a faster device cannot be seen.
local ty = require "tycho"
local llm = require "tycho.llm"
local offload = require "tycho.offload"
local nn = ty.nn

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "depths", { 4, 8, 16, 32 }, "layers", quick = { 3, 6 } },
    { "width", 256, "hidden size", quick = 64 },
    { "batch", 2, "rows" },
    { "length", 128, "tokens of a row", quick = 16 },
    { "steps", 3, "whose losses are compared", quick = 2 },
    { "rounds", 3, "of timing", quick = 1 },
  },
}
local args = r.args
local tokens = args.batch * args.length

local function away(policy, more)
  local plan = { parameters = "host", gradients = "host", moments = "host", activations = "host", in_flight = 1 << 20,
    policy = policy }
  for key, value in pairs(more or {}) do plan[key] = value end
  return plan
end

-- The manner of ZeRO-3 with offload: what is computed again keeps its inputs on the device.
local function zero3(ahead)
  local policy = offload.superpipeline { window = 1 + ahead, ahead = ahead }
  function policy.recomputes() return true end
  return away(policy, { activations = "device", in_flight = ahead == 0 and 0 or 1 << 20 })
end

local function setup(seed, depth, plan)
  ty.manual_seed(seed)
  local model = llm.Llama { vocab_size = 512, hidden_size = args.width, intermediate_size = 3 * args.width,
    num_hidden_layers = depth, num_attention_heads = args.width // 64, num_key_value_heads = args.width // 64,
    max_position_embeddings = args.length }
  local optimizer = ty.optim.AdamW(model, { lr = 1e-3 })
  local engine = plan and offload.engine(model, optimizer, plan)
  local ids = ty.randint(0, 512, { args.batch, args.length + 1 })
  local self = { model = model, engine = engine, losses = {} }
  local function loss()
    local logits = model(ids:narrow(1, 0, args.length))
    return nn.cross_entropy(logits:reshape(tokens, -1), ids:narrow(1, 1, args.length):reshape(-1))
  end
  function self.step()
    local value
    if engine then value = engine:step(loss)
    else
      local l = loss()
      optimizer:step(l)
      value = l:item()
    end
    self.losses[#self.losses + 1] = value
  end
  -- Bytes of the model and its state on the device, and the most that a step adds.
  function self.bytes()
    local held = 0
    local function add(t) if t.device ~= "meta" then held = held + t:nbytes() end end
    for _, p in ipairs(model:parameters()) do
      add(p)
      for _, value in pairs(optimizer.state[p] or {}) do if ty.is_tensor(value) then add(value) end end
    end
    return held + r:memory(self.step)
  end
  return self
end

local depths = args.depths
local deepest = depths[#depths]

local shares, growth, apart = {}, {}, 0
local lines = { memory = { x = {}, y = {}, label = "in memory" }, horizon = { x = {}, y = {}, label = "two layers" } }
for i, seed in ipairs(r.seeds) do
  local bytes = { memory = {}, horizon = {} }
  for k, depth in ipairs(depths) do
    local plain, ours = setup(seed, depth), setup(seed, depth, away(offload.horizon {}))
    for _ = 2, args.steps do
      ty.scope(plain.step)
      ty.scope(ours.step)
    end
    bytes.memory[k], bytes.horizon[k] = plain.bytes(), ours.bytes()
    ours.engine:close()
    for step, loss in ipairs(plain.losses) do apart = math.max(apart, math.abs(loss - ours.losses[step])) end
    local theirs = ours.model:parameters()
    for n, p in ipairs(plain.model:parameters()) do
      apart = math.max(apart, (p:detach() - theirs[n]:detach()):abs():max():item())
    end
    r:say("%d layers, seed %d: %.2f MB in memory, %.2f MB with two layers", depth, seed, bytes.memory[k] / 1e6,
      bytes.horizon[k] / 1e6)
    if i == 1 then
      for name, line in pairs(lines) do
        table.insert(line.x, depth)
        table.insert(line.y, bytes[name][k] / 1e6)
      end
    end
  end
  local n = #depths
  local layer = (bytes.memory[n] - bytes.memory[1]) / (depths[n] - depths[1])
  shares[i], growth[i] = bytes.horizon[n] / (2 * layer), bytes.horizon[n] / bytes.horizon[1]
end

local ways = { memory = false, ours = away(offload.horizon {}), waited = zero3(0), ahead = zero3(1) }
local runs, steps = {}, {}
for name, plan in pairs(ways) do
  runs[name] = setup(r.seed, deepest, plan)
  steps[name] = runs[name].step
end
local _, times = r:time(steps, { rounds = args.rounds })
local seconds = {}
for name, run in pairs(runs) do
  seconds[name] = math.min(table.unpack(times[name])) -- what else the machine does only ever slows one down
  r.metrics["seconds_" .. name] = seconds[name]
  if run.engine then run.engine:close() end
end
local baseline = math.min(seconds.waited, seconds.ahead)
r:say("a step of %d layers: %.3f s in memory, %.3f s with two layers, %.3f s and %.3f s in the manner of ZeRO-3",
  deepest, seconds.memory, seconds.ours, seconds.waited, seconds.ahead)

ty.plot.line { series = { lines.memory, lines.horizon }, title = "Bytes on the device by depth", x_label = "layers",
  y_label = "MB", width = 640, height = 400 }:save(r:picture "horizon.png")
os.exit(r:finish {
  { claim = "device bytes of the deepest, of what two layers take in memory", values = shares, bar = 1, below = true },
  { claim = "device bytes of the deepest, of those of the shallowest", values = growth, bar = 1.1, below = true },
  { claim = "largest difference of losses and parameters", measured = apart, bar = 0, below = true },
  { claim = "speed, of the manner of ZeRO-3 with offload", measured = baseline / seconds.ours, baseline = baseline,
    bar = 2 },
}, true)
