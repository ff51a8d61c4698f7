-- What training from the disk takes of the host's memory
-- claim: half the host's memory at its most, and the same losses
-- system: a Llama in bf16 whose parameters and f32 moments are in a file; buffers, pinned memory, overflow check, file
-- paper: Liaw and Chen 2025, "MemAscend: System Memory Optimization for SSD-Offloaded LLM Fine-Tuning"
-- time: 2 minutes on one CPU core
--
-- The plain tier does what ZeRO-Infinity does: as many buffers as two layers, the embedding and the head have weights,
-- each as large as the embedding; memory that stays in place is taken in powers of two; gradients, which lie in one
-- piece, are looked at with isinf, isnan and a disjunction, each of which makes a tensor. The embedding has about ten
-- times the elements of the largest weight of a layer, as in Llama 3 and Qwen 2.5. Each of the four savings is tried
-- alone and all of them together, with the same policy, window and writes under way. Bytes at their most are counted
-- by the engine and the allocator (live tensors and buffers), and seen from outside: of the resident size of the
-- process, which the kernel keeps and which is set back before, what the library itself takes included. Judged is the
-- latter. The pages of the file that the kernel keeps when it is not read past its cache are no part of a process and
-- are said apart: they are what direct access saves. The device is the CPU, so that moments on their way and
-- activations count as the host's as well, in all rows alike; a GPU would have them, and the share would be smaller.
-- Losses are compared with the run in memory, to the last bit.
local ty = require "tycho"
local llm = require "tycho.llm"
local offload = require "tycho.offload"
local nn = ty.nn

local r = ty.recipe.declare { seeds = 3, args = {
  { "width", 512, "hidden size", quick = 64 },
  { "inner", 1536, "width inside of the feed-forward network", quick = 192 },
  { "layers", 8, "layers", quick = 2 },
  { "vocabulary", 15000, "tokens", quick = 1900 },
  { "tokens", 32, "of a step", quick = 8 },
  { "steps", 3, "steps", quick = 2 },
  { "backend", "auto", "of the file: auto, uring or threads" },
} }
local a = r.args

local function make(seed)
  ty.manual_seed(seed)
  local model = llm.Llama { vocab_size = a.vocabulary, hidden_size = a.width, intermediate_size = a.inner,
    num_hidden_layers = a.layers, num_attention_heads = a.width // 64, num_key_value_heads = a.width // 64,
    max_position_embeddings = a.tokens }:to "bf16"
  local optimizer = ty.optim.AdamW(model, { lr = 1e-3 })
  offload.wide_states(optimizer)
  return model, optimizer, function()
    local ids = ty.randint(0, a.vocabulary, { 1, a.tokens + 1 })
    return nn.cross_entropy(model(ids:narrow(1, 0, a.tokens)):reshape(a.tokens, -1):to "f32",
      ids:narrow(1, 1, a.tokens):reshape(-1))
  end
end

-- The resident size of this process at its most since the last call, and now.
local function resident()
  local most, now
  for line in io.lines "/proc/self/status" do
    most = most or tonumber(line:match "^VmHWM:%s*(%d+)")
    now = now or tonumber(line:match "^VmRSS:%s*(%d+)")
  end
  local file = io.open("/proc/self/clear_refs", "w")
  if file then
    file:write "5"
    file:close()
  end
  return 1024 * most, 1024 * now
end

-- Losses, and bytes at their most: counted, resident, kept by the kernel.
local function run(seed, o)
  r:clean()
  local model, optimizer, loss = make(seed)
  local engine = offload.engine(model, optimizer, { parameters = "file", moments = "file", file = r.out,
    backend = a.backend, in_flight = 4 << 20, direct = o.direct,
    policy = offload.memascend { adaptive = o.adaptive, exact = o.exact, fused = o.fused } })
  r:clean()
  ty.memory.reset_peak()
  local _, begun = resident()
  local losses = {}
  for step = 1, a.steps do losses[step] = engine:step(loss) end
  local most = resident()
  local counted = ty.memory.stats().peak + engine.policy.gradient_pool.memory
  for _, pool in pairs(engine:stats().pools) do counted = counted + pool.memory end
  local cached = engine.stores.file.tier:cached()
  engine:close()
  return { losses = losses, counted = counted, resident = most, cached = cached, begun = begun }
end

local rows = { { "plain", {} }, { "adaptive buffers", { adaptive = true } }, { "exact memory", { exact = true } },
  { "fused check", { fused = true } }, { "direct file", { direct = true } },
  { "together", { adaptive = true, exact = true, fused = true, direct = true } } }
local shares, counted, whole, apart = {}, {}, {}, 0
for i, seed in ipairs(r.seeds) do
  local model, optimizer, loss = make(seed)
  local wanted = {}
  for step = 1, a.steps do
    ty.scope(function()
      local l = loss()
      optimizer:step(l)
      wanted[step] = l:item()
    end)
  end
  local count = model:count_parameters()
  model, optimizer, loss = nil, nil, nil -- luacheck: ignore
  local plain
  for _, row in ipairs(rows) do
    local o = { adaptive = false, exact = false, fused = false, direct = false }
    for key in pairs(row[2]) do o[key] = true end
    local got = run(seed, o)
    plain = plain or got
    apart = math.max(apart, ty.recipe.apart(wanted, got.losses))
    r:say("seed %d, %-16s counted %6.1f MB, resident %6.1f MB (%.3f) from %6.1f MB, kept by the kernel %6.1f MB; "
      .. "%.1f bytes of a parameter", seed, row[1], got.counted / 1e6, got.resident / 1e6,
      got.resident / plain.resident, got.begun / 1e6, got.cached / 1e6, got.resident / count)
    shares[i], counted[i] = got.resident / plain.resident, got.counted / plain.counted
    whole[i] = (got.resident + got.cached) / (plain.resident + plain.cached)
    r.metrics[row[1]:gsub(" ", "_") .. "_" .. seed] = got.resident / plain.resident
  end
end

os.exit(r:finish {
  { claim = "resident bytes at their most, of the plain tier's", values = shares, bar = 0.5, below = true },
  { claim = "largest difference of losses to the run in memory", measured = apart, bar = 0, below = true },
  { claim = "counted bytes at their most, of the plain tier's", values = counted, judged = false },
  { claim = "resident and what the kernel keeps of the file, of the plain tier's", values = whole, judged = false },
}, true)
