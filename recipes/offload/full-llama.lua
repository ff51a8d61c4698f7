-- A Llama of 1.1 billion parameters, trained in full inside 3 GiB
-- claim: at 70 % and more of the speed that computing or the disk allows, with the losses of the run in memory
-- system: a Llama and a GPT-2 in bf16 whose f32 moments are in a file, stepped within the backward pass
-- paper: Liao et al. 2024, "Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single GPU"
-- time: 5 minutes on two CPU cores; 10 GB of disk, and 16 GB of memory for the runs that it is compared with
--
-- Nothing of the model is frozen, adapted or left out: every parameter has a gradient, two f32 moments and a step of
-- AdamW. Parameters stay in memory, moments and what the backward pass wants kept are in a file that is read past the
-- page cache, gradients live until their layer has stepped; the head is a sequence of tiles. The budget is the
-- allocator's own, which refuses what is more; from outside the resident size of the process is held against 3 GiB, and
-- the bytes that the kernel moved for the process (/proc/self/io) against the engine's count. Weights and tokens are
-- random: what is measured is the step. The run in memory has the same arithmetic and no limits; where the machine has
-- not the memory for it, the rows that need it are said not to be judged. The limit is the larger of two times: that of
-- the step's operations, as the meta device counts them, at the rate of a bf16 product of a layer's shape (the median
-- of what it is after each step, since a machine's speed changes), and that of the step's bytes at the rate at which
-- the disk reads and writes at once. The first step, which makes the moments and the file, is not timed.
local ty = require "tycho"
local models = require "tycho.models"
local offload = require "tycho.offload"
local nn = ty.nn

local r = ty.recipe.declare { args = {
  { "tokens", 512, "of a step", quick = 8 },
  { "gpt2_tokens", 1024, "of a step of GPT-2", quick = 8 },
  { "limit_mib", 2900, "of tensors of the Llama; the process itself takes some more", quick = 1024 },
  { "steps", 3, "of each run, the first of which is not timed", quick = 2, least = 2 },
  { "compare", true, "with the run in memory, for which the machine needs 16 bytes a parameter" },
  { "only", "both", "which model", choices = { "both", "llama", "gpt2" } },
} }
local a = r.args

local function size(full, quick) return r.quick and quick or full end

-- Vocabulary, tokens of a step, the weight of a layer whose product is timed, the model.
local shapes = {
  llama = { words = size(32000, 128), tokens = a.tokens, layer = { size(2048, 128), size(5632, 352) } },
  gpt2 = { words = size(50257, 128), tokens = a.gpt2_tokens, layer = { size(768, 64), size(3072, 256) } },
}
function shapes.llama.make()
  return models.Llama { vocab_size = shapes.llama.words, hidden_size = shapes.llama.layer[1],
    intermediate_size = shapes.llama.layer[2], num_hidden_layers = size(22, 2), num_attention_heads = size(32, 2),
    num_key_value_heads = size(4, 1), max_position_embeddings = a.tokens }
end
function shapes.gpt2.make()
  return models.GPT2 { vocabulary = shapes.gpt2.words, context = a.gpt2_tokens, width = shapes.gpt2.layer[1],
    layers = size(12, 2), heads = size(12, 1) }
end

local function loss_of(model, shape, step, device)
  ty.manual_seed(1000 + step)
  local ids = ty.randint(0, shape.words, { 1, shape.tokens + 1 }, { device = device })
  return nn.cross_entropy(model(ids:narrow(1, 0, shape.tokens)):reshape(shape.tokens, -1):to "f32",
    ids:narrow(1, 1, shape.tokens):reshape(-1))
end

local function setup(shape)
  ty.manual_seed(r.seed)
  local model = nn.with_defaults({ dtype = "bf16" }, shape.make)
  offload.tile(model, { bytes = size(32 << 20, 4096) }) -- the head, whose moments would be there all at once
  local optimizer = ty.optim.AdamW(model, { lr = 1e-3 })
  offload.wide_states(optimizer)
  return model, optimizer
end

local function watch(step, loss, seconds) r:say("  step %d: loss %.4f, %.2f s", step, loss, seconds) end

-- Seconds of a product of a layer.
local function product(shape)
  local n, m = table.unpack(shape.layer)
  local x, w = ty.randn(shape.tokens, n):to "bf16", ty.randn(m, n):to "bf16"
  local best = math.huge
  for _ = 1, 6 do best = math.min(best, r:clock(function() ty.linear(x, w) end)) end
  return best
end

local function offloaded(shape, limit)
  local model, optimizer = setup(shape)
  local engine = offload.engine(model, optimizer, { moments = "file", activations = "file", file = r.out,
    policy = offload.fuyou { activations = "swap" } })
  local products = {}
  local got = offload.trial(a.steps, function(step) return engine:step(loss_of, model, shape, step) end,
    { engine = engine, budget = limit, watch = function(step, ...)
      watch(step, ...)
      products[step] = product(shape)
    end })
  got.product, got.parameters = ty.stats.median(products), model:count_parameters()
  if limit then engine:trace(r:path "timeline.json") end
  engine:close { discard = true }
  return got
end

local function in_memory(shape, parameters)
  local room = offload.outside().available or math.huge
  if not a.compare or 16 * parameters + (1 << 30) > room then return nil end
  local model, optimizer = setup(shape)
  return offload.trial(a.steps, function(step)
    local value = loss_of(model, shape, step)
    optimizer:step(value)
    return value:item()
  end, { watch = watch })
end

-- Seconds of the step's operations, when a product of a layer takes so long, and the operations of a second.
local function computing(shape, seconds)
  local seen = ty.profile.foresee(function(device)
    local model = nn.with_defaults({ dtype = "bf16", device = device }, shape.make)
    loss_of(model, shape, 1, device):backward()
  end)
  local operations = 2 * shape.tokens * shape.layer[1] * shape.layer[2]
  return seen.products * seconds / operations, operations / seconds / 1e9
end

local rows = {}
local disk = offload.bandwidth(r.out, { bytes = r.quick and 16 << 20 or 1 << 30 })
r:say("disk: reads %.2f, writes %.2f, both at once %.2f GB/s%s", disk.read / 1e9, disk.write / 1e9, disk.both / 1e9,
  disk.direct and "" or ", through the page cache")
for _, name in ipairs { "llama", "gpt2" } do
  if a.only == "both" or a.only == name then
    local shape = shapes[name]
    r:clean "cpu"
    local ours = offloaded(shape, name == "llama" and a.limit_mib << 20 or nil)
    r:clean "cpu"
    local plain = in_memory(shape, ours.parameters)
    r:clean "cpu"
    local compute, rate = computing(shape, ours.product)
    local limit = math.max(compute, ours.step / disk.both)
    r:say("%s: %.1f million parameters; a step %.2f s, of which %.2f s waited; %.2f GB moved in a step, %.2f s at the "
      .. "disk's rate; operations %.2f s at %.1f GFLOPS; counted %.2f GB, resident %.2f GB", name,
      ours.parameters / 1e6, ours.seconds, ours.waited, ours.step / 1e9, ours.step / disk.both, compute, rate,
      ours.peak / 1e9, ours.resident / 1e9)
    r.metrics[name] = { seconds = ours.seconds, memory_seconds = plain and plain.seconds, compute = compute,
      disk = ours.step / disk.both, bytes = ours.step, waited = ours.waited }
    local apart = 0
    for step, loss in ipairs(plain and plain.losses or {}) do
      apart = math.max(apart, math.abs(loss - ours.losses[step]))
    end
    local function row(claim, measured, bar, more)
      rows[#rows + 1] = { claim = claim, measured = measured, bar = bar, below = true }
      for key, value in pairs(more or {}) do rows[#rows][key] = value end
    end
    if name == "llama" then
      row("resident bytes at their most, of 3 GiB", ours.resident / (3 << 30), 1)
      row("speed, of the smaller of what computing and the disk allow", limit / ours.seconds, 0.7, { below = false })
      row("bytes that the kernel moved, of those that the engine counts", ours.seen / ours.moved, nil,
        { judged = false })
    end
    row(name .. ": largest difference of losses from those in memory", apart, 0, { judged = plain ~= nil })
    row(name .. ": time of a step, of that in memory", plain and ours.seconds / plain.seconds or 0, 1.15,
      { judged = name == "gpt2" and plain ~= nil })
  end
end
os.exit(r:finish(rows), true)
