-- Decoding with half of the inputs, chosen by the inputs and the weights
-- claim: inputs left out by |x| times the norm of their weights are missed less than by |x|, and decoding gets faster
-- system: the small Llama of the corpus, every linear layer but the head, at 25 to 65 % sparsity; a Llama of random
--   weights that is larger than the caches for the speed
-- paper: Chen et al. 2025, "WINA: Weight Informed Neuron Activation for Accelerating Large Language Model Inference"
-- time: 3 minutes on two CPU cores, and 3 more for each base that has to be trained
--
-- TEAL, which chooses by |x| alone, leaves out as many inputs, by rank or by thresholds calibrated on the validation
-- part. Errors are squares over those of the output. The weights are as they are: the paper's rotation to orthogonal
-- columns is not made, so that the error of the logits is no matter of proof: in 1 of 24 settings (65 %, by rank, one
-- seed) it is 0.7 % above TEAL's.
local ty = require "tycho"
local llm = require "tycho.llm"
local prune = require "tycho.prune"

local r = ty.recipe.declare {
  seeds = 3, base = true,
  args = {
    { "steps", 1050, "training steps of a base", quick = 8 },
    { "vocabulary", 1024, "tokens", quick = 400 },
    { "width", 2048, "hidden size of the Llama whose decoding is timed", quick = 128 },
    { "layers", 4, "its layers", quick = 1 },
    { "dtype", "f32", "of its weights", choices = { "f32", "bf16", "f16" } },
    { "tokens", 12, "that are decoded in a round", quick = 2 },
    { "rounds", 5, "of which the median counts", quick = 1 },
    { "quality", true, "measure errors and losses" },
  },
}
local args = r.args
local sparsities = r.quick and { 0.5 } or { 0.25, 0.4, 0.5, 0.65 }
local ways = { { "wina", "topk" }, { "teal", "topk" }, { "wina", "threshold" }, { "teal", "threshold" } }

-- ---- errors and losses, by seed ----

-- By seed: the largest ratio of errors, WINA over TEAL, of all settings; the mean difference of the losses.
local layers, logits, differences, rows = {}, {}, {}, {}

local function measure(corpus, seed)
  local default = args.steps == 1050 and {} or { steps = args.steps }
  default.seed, default.quiet = seed, true
  local small = r.quick and { width = 64, layers = 2 } or {}
  local function base()
    return corpus:trained { folder = r:base(seed), model = small, train = default, device = r.device }:eval()
  end
  local parts = {}
  for _, part in ipairs { "held_out", "validation" } do parts[part] = corpus:batches(part, { device = r.device }) end
  local function forward(model, batch)
    return model(batch.tokens, { cu_seqlens = batch.cu_seqlens, longest = batch.longest })
  end
  local function over(batches, model, most)
    return function()
      for i = 1, math.min(#batches, most) do forward(model, batches[i]) end
    end
  end
  -- The loss in nats per token, and the squared error of the logits over the squares of those wanted.
  local function judge(model, wanted)
    local loss, tokens, off, all, list = 0, 0, 0, 0, {}
    ty.no_grad(function()
      for i, batch in ipairs(parts.held_out) do
        local y = forward(model, batch)
        loss = loss + ty.nn.cross_entropy(y:flatten(0, 1), batch.targets:flatten()):item() * batch.count
        tokens = tokens + batch.count
        if wanted then
          off = off + (y - wanted[i]):square():sum():item()
          all = all + wanted[i]:square():sum():item()
        else
          list[i] = ty.keep(y)
        end
      end
    end)
    return loss / tokens, off / all, list
  end
  local dense, _, want = judge(base())
  r:say("seed %d: held-out loss %.4f with all inputs", seed, dense)
  r:say("  sparsity  chosen by               error of layers  of logits  loss    perplexity")
  local worst, losses = { layers = 0, logits = 0 }, {}
  for _, sparsity in ipairs(sparsities) do
    local results = {}
    for _, way in ipairs(ways) do
      local sparse = prune.wina(base(), { sparsity = sparsity, criterion = way[1], selection = way[2] })
      if way[2] == "threshold" then prune.calibrate(sparse, over(parts.validation, sparse, 2)) end
      local _, error_of_layers = prune.output_errors(sparse, over(parts.held_out, sparse, 2))
      local loss, error_of_logits = judge(sparse, want)
      results[way[1] .. way[2]] = { layers = error_of_layers, logits = error_of_logits, loss = loss }
      r:say("  %.2f      %-22s  %.5f          %.5f    %.4f  %.2f", sparsity, way[1] .. ", " .. way[2],
        error_of_layers, error_of_logits, loss, math.exp(loss))
      rows[#rows + 1] = { seed = seed, sparsity = sparsity, criterion = way[1], selection = way[2],
        layers = error_of_layers, logits = error_of_logits, loss = loss, dense_loss = dense }
    end
    for _, selection in ipairs { "topk", "threshold" } do
      local wina, teal = results["wina" .. selection], results["teal" .. selection]
      worst.layers = math.max(worst.layers, wina.layers / teal.layers)
      worst.logits = math.max(worst.logits, wina.logits / teal.logits)
      losses[#losses + 1] = wina.loss - teal.loss
    end
  end
  table.insert(layers, worst.layers)
  table.insert(logits, worst.logits)
  table.insert(differences, ty.stats.mean(losses))
end

if args.quality then
  local corpus = llm.corpus.open { folder = r.out, validation = true, vocabulary = args.vocabulary,
    text = r.quick and ty.data.kjv():sub(1, 60000) or nil }
  for _, seed in ipairs(r.seeds) do measure(corpus, seed) end
  r.metrics.rows = rows
end

-- ---- the speed of decoding ----

local function decode()
  ty.manual_seed(r.seed)
  local model = ty.nn.with_defaults({ dtype = args.dtype, device = r.device }, function()
    return llm.Llama { vocab_size = 1024, hidden_size = args.width, intermediate_size = args.width * 8 // 3 // 64 * 64,
      num_hidden_layers = args.layers, num_attention_heads = args.width // 64, max_position_embeddings = 512,
      tie_word_embeddings = true }
  end):eval()
  local prompt = ty.randint(0, 1024, { 1, 16 }, { device = r.device })
  local function once()
    local cache = model:cache { room = 64 }
    model:generate(prompt, 1, { temperature = 0, stop_tokens = false, cache = cache })
    local began = ty.system.clock()
    model:generate(prompt:narrow(1, 0, 1), args.tokens, { temperature = 0, stop_tokens = false, cache = cache })
    return args.tokens / (ty.system.clock() - began)
  end
  -- Dense and sparse after each other in every round: what disturbs one disturbs the other.
  local speeds = { [0] = {}, [0.25] = {}, [0.5] = {}, [0.65] = {} }
  for _ = 1, args.rounds do
    for sparsity, list in pairs(speeds) do
      if sparsity > 0 then prune.wina(model, { sparsity = sparsity }) end
      once()
      list[#list + 1] = once()
      if sparsity > 0 then prune.unwina(model) end
    end
  end
  local dense = ty.stats.median(speeds[0])
  r:say("\ndecoding of %.0f M parameters, %s: %.2f tokens/s with all inputs", model:count_parameters() / 1e6,
    args.dtype, dense)
  r.metrics.tokens_per_second_dense = dense
  for _, sparsity in ipairs { 0.25, 0.5, 0.65 } do
    local speed = ty.stats.median(speeds[sparsity])
    r:say("  %.2f sparse: %.2f tokens/s, %.2f times as many", sparsity, speed, speed / dense)
    r.metrics[("tokens_per_second_%d"):format(sparsity * 100)] = speed
    speeds[sparsity] = speed / dense
  end
  return speeds
end

local gain, table_rows = decode(), args.quality and {
  { claim = "error of layers' outputs, WINA over TEAL, largest of all",
    measured = math.max(table.unpack(layers)), values = layers, bar = 1, below = true },
  { claim = "error of the logits, WINA over TEAL, largest of all",
    measured = math.max(table.unpack(logits)), values = logits, bar = 1, below = true },
  { claim = "held-out loss, WINA less TEAL", values = differences, bar = 0, below = true },
} or {}
table.move({
  { claim = "tokens/s at 50 % sparsity over dense", measured = gain[0.5], bar = 1 },
  { claim = "tokens/s at 65 % sparsity over dense", measured = gain[0.65], bar = 1 },
}, 1, 2, #table_rows + 1, table_rows)
os.exit(r:finish(table_rows), true)
