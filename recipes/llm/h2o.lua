-- Decoding with a fifth of the cache: the tokens that got the most attention
-- claim: with the last tokens and the heavy hitters, 20 % of the cache keeps the score, and long texts decode faster
-- system: the small Llama of the corpus, streaming over unseen chapters; a Llama of random weights for the speed
-- paper: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
-- time: 2 minutes on two CPU cores, and 3 more for each base that has to be trained
--
-- The baselines have the same budget: a window of the last tokens, and a window with four sinks. How much of the budget
-- is for the last tokens is chosen on the validation part. The texts are short, and most of what such a model uses is
-- near, so that windows lose little as well. What it costs: the weights of attention are computed once more to be
-- summed up while prompts are read, which takes three times as long.
local ty = require "tycho"
local llm = require "tycho.llm"

local r = ty.recipe.declare {
  seeds = 3, base = true,
  args = {
    { "steps", 1050, "training steps of a base", quick = 8 },
    { "vocabulary", 1024, "tokens", quick = 400 },
    { "length", 128, "tokens of a text, which is what a base is trained on", quick = 64 },
    { "share", 0.2, "of the cache" },
    { "context", 4096, "tokens of the prompt whose continuation is timed", quick = 128 },
    { "batch", 4, "prompts at once", quick = 1 },
    { "width", 512, "hidden size of the Llama that is timed", quick = 64 },
    { "layers", 4, "its layers", quick = 1 },
    { "tokens", 24, "that are decoded in a round", quick = 2 },
    { "rounds", 5, "of which the median counts", quick = 1 },
    { "quality", true, "measure losses" },
  },
}
local args = r.args

-- ---- the score, by seed ----

-- Mean cross entropy of rows [n, t + 1], a token at a time; of all tokens but the first.
local function streamed(model, rows, cache)
  local t, sum = rows.shape[2] - 1, 0.0
  ty.no_grad(function()
    for i = 0, t - 1 do
      ty.scope(function()
        local logits = model(rows:narrow(1, i, 1), { cache = cache }):select(1, 0)
        sum = sum + ty.nn.cross_entropy(logits, rows:select(1, i + 1)):item()
      end)
    end
  end)
  return sum / t
end

-- Rows of `length` + 1 neighbouring tokens of the documents of a part.
local function rows_of(corpus, part, most)
  local rows = {}
  for _, ids in ipairs(corpus.ids[part]) do
    for at = 0, ids:numel() - args.length - 1, args.length do
      if #rows < most then rows[#rows + 1] = ids:narrow(0, at, args.length + 1) end
    end
  end
  return ty.stack(rows):to { device = r.device }
end

local budget = math.floor(args.share * args.length + 0.5)
local full_losses, window_losses = {}, {}
local increases, gains, exact = {}, {}, true

local function measure(corpus, seed)
  local settings = args.steps == 1050 and {} or { steps = args.steps }
  settings.seed, settings.quiet = seed, true
  local model = corpus:trained { folder = r:base(seed),
    model = r.quick and { width = 64, layers = 2 } or {}, train = settings,
    device = r.device }:eval()
  local function with(options)
    options.h2o = true
    return model:cache(options)
  end
  -- How much of the budget is for the last tokens is chosen on the validation part.
  local validation = rows_of(corpus, "validation", r.quick and 4 or 48)
  local best, recent = math.huge, nil
  for _, share in ipairs { 0.25, 0.5, 0.75 } do
    local wanted = math.max(1, math.floor(share * budget + 0.5))
    local loss = streamed(model, validation, with { heavy = budget - wanted, recent = wanted })
    if loss < best then best, recent = loss, wanted end
  end
  local rows = rows_of(corpus, "held_out", r.quick and 4 or 1000)
  local full = streamed(model, rows, model:cache())
  local heavy = streamed(model, rows, with { heavy = budget - recent, recent = recent })
  local window = streamed(model, rows, with { heavy = 0, recent = budget })
  local sinks = streamed(model, rows, with { heavy = 0, recent = budget - 4, sinks = 4 })
  r:say("seed %d: loss %.4f with all %d tokens; with %d: %.4f by heavy hitters (%d of the last), %.4f window, %.4f "
    .. "window and 4 sinks", seed, full, args.length, budget, heavy, recent, window, sinks)
  r.metrics["seed" .. seed] = { full = full, h2o = heavy, window = window, sinks = sinks, recent = recent }
  full_losses[#full_losses + 1], window_losses[#window_losses + 1] = full, math.min(window, sinks)
  increases[#increases + 1], gains[#gains + 1] = heavy / full, heavy - math.min(window, sinks)
  -- Where everything fits, the tokens are those of the full cache.
  local prompt = rows:narrow(0, 0, math.min(8, rows.shape[1])):narrow(1, 0, args.length // 2)
  local count = args.length // 2
  local want = model:generate(prompt, count, { temperature = 0, stop_tokens = false })
  local got = model:generate(prompt, count, { temperature = 0, stop_tokens = false,
    cache = with { heavy = args.length // 2, recent = args.length // 2 } })
  exact = exact and want:eq(got):all():item()
end

if args.quality then
  local corpus = llm.corpus.open { folder = r.out, validation = true, vocabulary = args.vocabulary,
    length = args.length, text = r.quick and ty.data.kjv():sub(1, 60000) or nil }
  for _, seed in ipairs(r.seeds) do measure(corpus, seed) end
end

-- ---- the speed ----

local median = ty.stats.median

local function throughput()
  ty.manual_seed(r.seed)
  local model = ty.nn.with_defaults({ device = r.device }, function()
    return llm.Llama { vocab_size = 1024, hidden_size = args.width, intermediate_size = args.width * 8 // 3 // 16 * 16,
      num_hidden_layers = args.layers, num_attention_heads = args.width // 64, tie_word_embeddings = true,
      max_position_embeddings = args.context + 1024 }
  end):eval()
  local prompt = ty.randint(0, 1024, { args.batch, args.context }, { device = r.device })
  local kept = math.floor(args.share * args.context + 0.5)
  local caches = { model:cache { room = args.context + (args.rounds + 2) * args.tokens + 2 },
    model:cache { h2o = true, heavy = kept // 2, recent = kept - kept // 2 } }
  local function decode(cache, tokens, count)
    local began = ty.system.clock()
    model:generate(tokens, count, { temperature = 0, stop_tokens = false, cache = cache })
    return count * args.batch / (ty.system.clock() - began)
  end
  local speeds, last = { {}, {} }, prompt:narrow(1, 0, 1)
  for i, cache in ipairs(caches) do
    local began = ty.system.clock()
    decode(cache, prompt, 2)
    r:say("%s: prompts of %d tokens in %.2f s", i == 1 and "all" or "20 %", args.context, ty.system.clock() - began)
  end
  for _ = 1, args.rounds do -- one after the other in every round: what disturbs one disturbs the other
    for i, cache in ipairs(caches) do table.insert(speeds[i], decode(cache, last, args.tokens)) end
  end
  local full, heavy = median(speeds[1]), median(speeds[2])
  local bytes = caches[2]:bytes() / (2 * args.batch * args.width * args.layers * args.context * 4)
  r:say("%d prompts of %d tokens: %.1f tokens/s with all, %.1f with %.0f %% of the bytes, %.2f times as many",
    args.batch, args.context, full, heavy, 100 * bytes, heavy / full)
  r.metrics.tokens_per_second_full, r.metrics.tokens_per_second_h2o, r.metrics.bytes = full, heavy, bytes
  return heavy / full
end

local faster = throughput()
local rows = {}
if args.quality then
  rows = {
    { claim = "held-out loss with 20 % of the cache, over all of it", values = increases, baseline = full_losses,
      bar = 1.01, below = true },
    { claim = "held-out loss, less that of the better window", values = gains, baseline = window_losses, bar = 0,
      below = true },
    { claim = "the same tokens where all fit", measured = exact and "yes" or "no", bar = "yes", pass = exact },
  }
end
rows[#rows + 1] = { claim = "tokens/s with 20 % of the cache, over all of it", measured = faster, bar = 1 }
os.exit(r:finish(rows), true)
