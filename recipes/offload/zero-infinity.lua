-- Training a model that is larger than the device and the host together
-- claim: trains beyond the limits of device and host, nearly as fast as in memory
-- system: a Llama over device, host and file, its large layers in tiles
-- paper: Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning"
-- time: 3 minutes on one CPU core
--
-- The device has a budget that the allocator enforces, the host's share is what the plan gives it, and the rest is in a
-- file that is read past the page cache. The plan is that of offload.plan, which knows the bytes of each kind and
-- refuses what cannot fit. The run in memory has no limits, the same tiles, the same checkpoints (layers are computed
-- again) and the same batches; losses and parameters are compared to the last bit. Without tiles, a whole layer with
-- its moments has to be on the device at once: that this does not fit is a row of its own. The fastest of some rounds
-- counts. There is one core, which steps the optimizer as well, and nothing but reading and writing goes on beside it;
-- the bar of the speed is that of a disk that allows 15 % more than the step in memory. Missed: 0.62 with two threads,
-- 0.70 to 0.76 with one, whose computing takes longer; 0.8 s of a step are waited for, half of them until moments are
-- written that the step after the backward pass brings and sends. Within the backward pass (--within) they would move
-- beside computing, but that does not fit into these 96 MiB.
local ty = require "tycho"
local llm = require "tycho.llm"
local offload = require "tycho.offload"
local nn = ty.nn

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "width", 512, "hidden size", quick = 64 },
    { "inner", 4096, "of the feed-forward layers", quick = 512 },
    { "layers", 6, "of the model", quick = 2 },
    { "tokens", 512, "of a step", quick = 16 },
    { "device_mib", 96, "of the device", quick = 2 },
    { "host_mib", 256, "of the host", quick = 1 },
    { "tile", 2048, "KiB of a tile at most", quick = 32 },
    { "steps", 2, "whose losses are compared" },
    { "rounds", 3, "of timing", quick = 1 },
    { "within", false, "the optimizer steps a tile within the backward pass" },
  },
}
local args = r.args
local smallest = r.quick and 1024 or nil

local function make(seed, tiles)
  ty.manual_seed(seed)
  local model = llm.Llama { vocab_size = 512, hidden_size = args.width, intermediate_size = args.inner,
    num_hidden_layers = args.layers, num_attention_heads = args.width // 64, num_key_value_heads = args.width // 64,
    max_position_embeddings = args.tokens }
  if tiles then offload.tile(model, { bytes = args.tile << 10 }) end
  return model
end

local function plan_of(model, window)
  local plan = offload.plan(model, { device = args.device_mib << 20, host = args.host_mib << 20, window = window,
    file = os.getenv "TMPDIR" or "/tmp", quiet = r.quick })
  plan.policy = offload.zero_infinity { window = window, ahead = window - 1, within = args.within }
  plan.smallest = smallest
  return plan
end

-- A run: its step, which computes within the budget when there is a plan.
local function setup(seed, tiles, planned)
  local model = make(seed, tiles)
  local optimizer = ty.optim.AdamW(model, { lr = 1e-3 })
  local ids = ty.randint(0, 512, { 1, args.tokens + 1 })
  local engine = planned and offload.engine(model, optimizer, plan_of(model, tiles and 4 or 1))
  local self = { model = model, engine = engine, losses = {}, most = 0 }
  local function loss()
    local logits = model(ids:narrow(1, 0, args.tokens), { checkpoint = true })
    return nn.cross_entropy(logits:reshape(args.tokens, -1), ids:narrow(1, 1, args.tokens):reshape(-1))
  end
  local function resident()
    local bytes = 0
    for _, p in ipairs(model:parameters()) do
      if p.device ~= "meta" then bytes = bytes + p:nbytes() end
      for _, value in pairs(optimizer.state[p] or {}) do
        if ty.is_tensor(value) and value.device ~= "meta" then bytes = bytes + value:nbytes() end
      end
    end
    return bytes
  end
  function self.step()
    if not engine then
      local l = loss()
      optimizer:step(l)
      self.losses[#self.losses + 1] = l:item()
      return
    end
    collectgarbage()
    local memory = ty.memory.stats()
    local others = memory.live - resident()
    ty.memory.reset_peak()
    ty.memory.set_budget("cpu", others + memory.beyond + (args.device_mib << 20))
    local ok, value = pcall(engine.step, engine, loss)
    ty.memory.set_budget("cpu")
    self.most = math.max(self.most, ty.memory.stats().peak - others)
    if not ok then error(value, 0) end
    self.losses[#self.losses + 1] = value
  end
  return self
end

local states, apart, gains, host = 0, 0, nil, 0
local most = {}
for i, seed in ipairs(r.seeds) do
  local plain, ours = setup(seed, true), setup(seed, true, true)
  for _ = 1, args.steps do
    ty.scope(plain.step)
    ours.step()
  end
  if i == 1 then
    states = 16 * plain.model:count_parameters()
    local _, times = r:time({ plain = plain.step, ours = ours.step }, { rounds = args.rounds, warmup = 0 })
    local memory, offloaded = math.min(table.unpack(times.plain)), math.min(table.unpack(times.ours))
    gains = memory / offloaded
    local stats = ours.engine:stats()
    host = stats.host and stats.host.most or 0
    r:say("%.1f MB of parameters, gradients and moments; the most on the device %.1f MB, on the host %.1f MB, in the "
      .. "file %.1f MB; a step %.3f s in memory, %.3f s, %d stalls, %.3f s waited", states / 1e6, ours.most / 1e6,
      host / 1e6, stats.file.most / 1e6, memory, offloaded, stats.stalls, stats.waited)
    r.metrics.seconds_memory, r.metrics.seconds_offloaded = memory, offloaded
    ours.engine:trace(r:path "timeline.json")
  end
  ours.engine:close()
  most[i] = ours.most / (args.device_mib << 20)
  for step, loss in ipairs(plain.losses) do apart = math.max(apart, math.abs(loss - ours.losses[step])) end
  local theirs = ours.model:parameters()
  for n, p in ipairs(plain.model:parameters()) do
    apart = math.max(apart, (p:detach() - theirs[n]:detach()):abs():max():item())
  end
end

-- Whole layers within the same limits, one at a time: the plan refuses, or the budget does.
local fits, problem = pcall(function()
  local whole = setup(r.seed, false, true)
  whole.step()
end)
r:say("without tiles: %s", fits and "it fits" or tostring(problem):match "[^\n]*")

os.exit(r:finish {
  { claim = "parameters, gradients and moments, of the limits of device and host together",
    measured = states / ((args.device_mib + args.host_mib) << 20), bar = 1.5 },
  { claim = "most bytes on the device, of its limit", values = most, bar = 1, below = true },
  { claim = "most bytes on the host, of its limit", measured = host / (args.host_mib << 20), bar = 1, below = true },
  { claim = "without tiles it does not fit", measured = fits and "fits" or "does not fit", bar = "does not fit",
    pass = not fits },
  { claim = "largest difference of losses and parameters from those in memory", measured = apart, bar = 0,
    below = true },
  { claim = "speed, of the run in memory", measured = gains, bar = 0.85 },
}, true)
