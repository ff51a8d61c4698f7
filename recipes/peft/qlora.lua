-- Fine-tuning on top of 4-bit weights
-- claim: adapters on a 4-bit base learn what adapters on a 16-bit base learn
-- system: NF4 with double quantization, LoRA on all linear layers, paged optimizer
-- paper: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs"
-- time: 10 minutes on one CPU core, and 3 on two for the base
--
-- A small Llama that has read the books of Moses learns program text, the Lua sources of this library, by adapters of
-- rank 16 on all linear layers: on NF4 codes, and on the same weights in bf16, each with the best of three rates by the
-- validation part. Short rows take more bits for each weight than long ones; bits and bytes are judged for the shapes
-- of Llama 2 7B, whose frozen size, gradients and moments are counted, and one of whose layers is made for real.
local ty = require "tycho"
local llm, peft = require "tycho.llm", require "tycho.peft"

local r = ty.recipe.declare {
  seeds = 3, base = true,
  args = {
    { "steps", 200, "steps of fine-tuning", quick = 3 },
    { "batch", 8, "rows at a time", quick = 2 },
    { "rank", 16, "of the adapters" },
    { "checkpoint", false, "gradient checkpointing" },
    { "all_weights", false, "train all weights as well, half as long again" },
  },
}
local args, quick = r.args, r.quick

-- ---- what a model of 7 billion parameters takes ----

-- Llama 2 7B's config.json.
local llama = { vocab_size = 32000, hidden_size = 4096, intermediate_size = 11008, num_hidden_layers = 32,
  num_attention_heads = 32, max_position_embeddings = 4096, rms_norm_eps = 1e-5 }

local function megabytes(bytes) return bytes / 1e6 end

local counted = peft.account(llm.Llama, llama)
local report, large = counted.report, counted.footprint
r:say("Llama 2 7B, %d parameters, %d of them as NF4 with %.4f bits:", counted.parameters, report.parameters,
  report.bits)
r:say("  %8.1f MB frozen, of which %.1f codes and scales", megabytes(large.frozen), megabytes(large.quantized))
r:say("  %8.1f MB adapters of rank 64 in f32, %.1f MB gradients, %.1f MB paged moments", megabytes(large.adapter),
  megabytes(large.gradients), megabytes(large.state))
r:say("  %8.1f MB together; 16-bit fine-tuning takes %.1f (weights, gradients, two moments in f32)",
  megabytes(large.total), megabytes(12 * counted.parameters))

-- One of its layers for real: the bytes that the allocator gave out against those accounted for.
local function real_layer()
  local config = {}
  for key, value in pairs(llama) do config[key] = value end
  config.num_hidden_layers, config.vocab_size = 1, 64
  if quick then config.hidden_size, config.intermediate_size = 512, 1408 end
  local wanted = peft.account(llm.Llama, config).footprint
  collectgarbage()
  local before = ty.memory.stats("cpu").live
  local made = peft.account(llm.Llama, config, "cpu")
  local measured, model, optimizer = made.footprint, made.model, made.optimizer
  collectgarbage()
  local live = ty.memory.stats("cpu").live - before
  for key, bytes in pairs(wanted) do
    assert(measured[key] == bytes, ("qlora: %s: expected %d bytes, got %d"):format(key, bytes, measured[key]))
  end
  optimizer:zero_grad()
  local loss = model:loss(ty.randint(0, 64, { 1, 16 }), nil, { checkpoint = true })
  optimizer:step(loss)
  r:say("one layer of it on the CPU: %.1f MB accounted for, %.1f MB in its tensors, %.1f MB taken by the allocator "
    .. "(and %.1f MB paged)", megabytes(wanted.total), megabytes(measured.total), megabytes(live),
    megabytes(measured.state))
  return measured.total / wanted.total
end
local agreement = real_layer()

-- ---- the texts ----

local corpus = llm.corpus.open { folder = r:path "base-text", validation = true, vocabulary = quick and 400 or 1024 }
local base_folder = r:base(r.seed)
local base_options = { folder = base_folder, train = { quiet = true, seed = r.seed } }
if quick then
  base_options.model = { width = 64, layers = 2, hidden = 192 }
  base_options.train = { steps = 4, batch = 2, quiet = true }
end
corpus:trained(base_options)

local files = llm.corpus.files(package.searchpath("tycho", package.path):match "^(.*)/[^/]*$", "%.lua$")
if quick then files = { table.unpack(files, 1, 6) } end
local code = corpus:other { folder = r:path "text", documents = files, every = quick and 4 or 8, validation = true }
r:say("%d files of Lua to train on (%d tokens), %d to choose rates by (%d), %d held out (%d)",
  #code.documents.training, code.training.total, #code.documents.validation, code.validation.total,
  #code.documents.held_out, code.held_out.total)

-- ---- the methods ----

local rates = quick and { 1e-2 } or { 3e-3, 1e-2, 3e-2 }
local methods = {
  { name = "QLoRA, NF4", rates = rates, dtype = "bf16", adapt = function(model)
    local _, facts = peft.qlora(model, { rank = args.rank, alpha = args.rank })
    return facts
  end },
  { name = "LoRA, bf16", rates = rates, dtype = "bf16", adapt = function(model)
    peft.lora(model, { rank = args.rank, alpha = args.rank, targets = "all-linear" })
  end },
}
if args.all_weights then
  table.insert(methods, { name = "all weights, f32", rates = { 3e-4, 1e-3, 3e-3 }, dtype = "f32" })
end

local function prepare(method, seed)
  ty.manual_seed(1000 + seed)
  local model = llm.load(base_folder, { dtype = method.dtype })
  model:requires_grad_(true)
  local facts = method.adapt and method.adapt(model)
  model:to(r.device)
  return model, facts
end

local function train(method, rate, seed)
  local model = prepare(method, seed)
  local trained = method.adapt and peft.parameters(model) or model:parameters()
  llm.train.fit(model, code.training, { steps = args.steps, batch = args.batch, seed = seed, lr = rate, final = 0.02,
    warmup = 20, device = r.device, quiet = true, checkpoint = args.checkpoint,
    optimizer = function(_, o)
      return ty.optim.AdamW(trained, { lr = o.lr, schedule = o.schedule, clip_norm = o.clip_norm, weight_decay = 0,
        beta2 = 0.95, paged = true })
    end })
  return model
end

local function loss_of(model, part) return code:evaluate(model, part, { device = r.device }).loss end

for _, method in ipairs(methods) do
  local model, facts = prepare(method, 0)
  method.before = loss_of(model, "held_out")
  if facts then
    r:say("%s: %d weights in %.3f bits (rows here are short: a scale of 32 bits for each), relative error %.4f",
      method.name, facts.parameters, facts.bits, facts.error)
  end
  method.losses = {}
  for i, seed in ipairs(r.seeds) do
    method.losses[i] = loss_of(r:choose(method.name, method.rates, function(rate, known)
      local made = train(method, rate, seed)
      if known then return made end
      local loss = loss_of(made, "validation") -- the first seed chooses
      r:say("%s: rate %g, %.4f on the validation part", method.name, rate, loss)
      return made, loss
    end), "held_out")
  end
  method.loss, method.rate = ty.stats.mean(method.losses), r.metrics.chosen[method.name]
  r:say("%s: held out %.4f before, %.4f after (spread %.4f), rate %g", method.name, method.before, method.loss,
    ty.stats.spread(method.losses), method.rate)
  r.metrics[method.name] = { before = method.before, rate = method.rate, losses = method.losses }
end

local four, sixteen = methods[1], methods[2]
r.metrics.footprint_7b = large
os.exit(r:finish {
  { claim = "held-out loss of QLoRA over that of 16-bit LoRA", measured = four.loss / sixteen.loss,
    values = ty.stats.ratios(four.losses, sixteen.losses), baseline = sixteen.losses, bar = 1.01, below = true },
  { claim = "bits of a weight, Llama 2 7B (4.13 to two places)", measured = report.bits, bar = 4.135, below = true },
  { claim = "4-bit base of Llama 2 7B, MB (the paper's 5,048)", measured = megabytes(large.frozen), bar = 5048,
    below = true },
  { claim = "bytes of a real layer of it over those accounted for", measured = agreement, bar = 1, below = true },
}, true)
