-- Experts on two processors: what is cached, where the rest runs, what is brought before
-- claim: a cache by the router's scores hits more often than LRU, and the whole is sooner, on recorded routing
-- system: hybrid schedule of experts on host and device, cache by decayed scores, prefetching by simulated gain
-- paper: Zhong et al. 2025, "HybriMoE: Hybrid CPU-GPU Scheduling and Cache Management for Efficient MoE Inference"
-- time: 4 minutes on a CPU core
--
-- A small mixture of experts is trained on the King James Bible, and what its routers choose is recorded on chapters
-- that it has not seen: a prompt at once, then a token at a time. The traces are real; time is simulated, since no
-- machine is asked for that has a device and a link: seconds of an expert on the host are measured here, for one token
-- and for many; the device takes a share of them, and the link brings an expert in a multiple of what the host needs to
-- compute one token with it. Both ratios are arguments, by default of the kind of the paper's machines (a GPU behind
-- PCIe beside a server's processor). Slots are so many in every layer, for all caches alike, which is the best that LRU
-- can have: across layers, which come round in a circle, it would do worse.
-- Hit rates are those of plain caches that fetch what they miss. For time, LRU has the same hybrid schedule as ours;
-- LRU that fetches all it misses stands beside it. Decay and the number of scores that count are chosen on chapters of
-- their own.
local ty = require "tycho"
local llm = require "tycho.llm"
local models = require "tycho.models"
local offload = require "tycho.offload"
local stats = ty.stats

local r = ty.recipe.declare { seeds = 3, args = {
  { "steps", 200, "training steps of the mixture", quick = 3 },
  { "batch", 8, "rows of a step", quick = 2 },
  { "length", 128, "tokens of a row", quick = 32 },
  { "width", 96, "hidden size", quick = 32 },
  { "layers", 4, "layers", quick = 2 },
  { "experts", 8, "experts of a layer" },
  { "texts", 6, "chapters of a trace", quick = 1 },
  { "tokens", 160, "tokens of each, a quarter of them the prompt", quick = 24 },
  { "device_share", 0.1, "seconds of an expert on the device, of those on the host" },
  { "link_ratio", 3.0, "seconds to bring an expert, of those of a token on the host" },
} }
local a = r.args
local slots = { a.experts // 4, a.experts // 2, 3 * a.experts // 4 }

local corpus = llm.corpus.open { folder = r:path "corpus", length = a.length, vocabulary = r.quick and 300 or 1024,
  books = r.quick and 1 or 12, validation = true, text = r.quick and ty.data.kjv { books = 1 }:sub(1, 40000) or nil }

local function mixture()
  return models.Mixtral { vocab_size = corpus.tokenizer.size, hidden_size = a.width, intermediate_size = 2 * a.width,
    num_hidden_layers = a.layers, num_attention_heads = a.width // 32, num_key_value_heads = a.width // 32,
    num_local_experts = a.experts, num_experts_per_tok = 2, max_position_embeddings = 512, output_router_logits = true,
    router_aux_loss_coef = 0.01 }
end

-- Seconds of an expert on the host by its tokens, a straight line through two measurements.
local function measured_rates(model)
  local expert = model.model.layers[1].block_sparse_moe.experts[1]
  local times = {}
  for i, n in ipairs { 1, 64 } do
    local x = ty.randn(n, a.width)
    times[i] = r:time({ function() ty.no_grad(expert, x) end }, { rounds = r.quick and 2 or 15, calls = { 20 } })[1]
  end
  local token = math.max(0, (times[2] - times[1]) / 63)
  local rates = { host_base = math.max(0, times[1] - token), host_token = token }
  rates.device_base, rates.device_token = a.device_share * rates.host_base, a.device_share * token
  rates.link, rates.dense = a.link_ratio * times[1], a.device_share * 2 * times[1]
  return rates
end

-- Traces of the first so many chapters of a part that are long enough.
local function traces_of(model, part)
  local list = {}
  for _, ids in ipairs(corpus.ids[part]) do
    if #list < a.texts and ids.shape[1] >= a.tokens then
      list[#list + 1] = offload.record_routing(model, ids:narrow(0, 0, a.tokens):unsqueeze(0),
        { prompt = a.tokens // 4, ahead = 3 })
    end
  end
  return list
end

-- Sums over traces.
local function run(traces, o)
  local sum = { seconds = 0, prompt = 0, decode = 0, hits = 0, misses = 0 }
  for _, trace in ipairs(traces) do
    local seen = offload.simulate_experts(trace, o)
    for name in pairs(sum) do sum[name] = sum[name] + seen[name] end
  end
  sum.hit_rate = sum.hits / (sum.hits + sum.misses)
  return sum
end

local function with(rates, slot, more)
  local o = { rates = rates, slots = slot }
  for key, value in pairs(more) do o[key] = value end
  return o
end

local against_lru, against_lfu, sooner, sooner_plain, decode, prompt = {}, {}, {}, {}, {}, {}
local first
for i, seed in ipairs(r.seeds) do
  ty.manual_seed(seed)
  local model = r:place(mixture)
  local losses = llm.train.fit(model, corpus.training, { steps = a.steps, batch = a.batch, lr = 2e-3, seed = seed,
    title = "seed " .. seed })
  model:eval()
  local rates = measured_rates(model)
  local choice, held_out = traces_of(model, "validation"), traces_of(model, "held_out")
  r:say("seed %d: loss %.2f; an expert's token on the host %.1f us, 64 of them %.1f us", seed, losses[#losses],
    1e6 * (rates.host_base + rates.host_token), 1e6 * (rates.host_base + 64 * rates.host_token))
  local hits, seconds = {}, {}
  for s, slot in ipairs(slots) do
    local best, most = nil, -1
    for _, alpha in ipairs { 0.1, 0.2, 0.35, 0.5, 0.7 } do
      for _, top in ipairs { 2, 4, a.experts } do
        local rule = { rule = "score", alpha = alpha, top = top }
        rule.kind = "fetch"
        local rate = run(choice, with(rates, slot, rule)).hit_rate
        if rate > most then best, most = rule, rate end
      end
    end
    local function cached(rule, kind, prefetch)
      local o = with(rates, slot, rule == "score" and best or { rule = rule })
      o.kind, o.prefetch = kind, prefetch
      return run(held_out, o)
    end
    hits[s] = { lru = cached("lru", "fetch").hit_rate, lfu = cached("lfu", "fetch").hit_rate,
      score = cached("score", "fetch").hit_rate }
    local plain, hybrid, ours = cached("lru", "fetch"), cached("lru", "hybrid"), cached("score", "hybrid", true)
    local without = cached("score", "hybrid")
    seconds[s] = { of_lru = ours.seconds / hybrid.seconds, of_plain = ours.seconds / plain.seconds,
      decode = ours.decode / hybrid.decode, prompt = ours.prompt / hybrid.prompt }
    r:say("  %d of %d experts: hits %.1f %% LRU, %.1f %% LFU, %.1f %% score (alpha %.2f, top %d); "
      .. "of the time of LRU with the schedule %.3f, without prefetching %.3f; of LRU that fetches %.3f", slot,
      a.experts, 100 * hits[s].lru, 100 * hits[s].lfu, 100 * hits[s].score, best.alpha, best.top, seconds[s].of_lru,
      without.seconds / hybrid.seconds, seconds[s].of_plain)
  end
  first = first or hits
  local function over(rule, other)
    return stats.mean(stats.ratios(stats.column(hits, rule), stats.column(hits, other)))
  end
  local function mean(key) return stats.mean(stats.column(seconds, key)) end
  against_lru[i], against_lfu[i] = over("score", "lru"), over("score", "lfu")
  sooner[i], sooner_plain[i], decode[i], prompt[i] = mean "of_lru", mean "of_plain", mean "decode", mean "prompt"
end

local drawn = {}
for _, row in ipairs { { "lru", "LRU" }, { "lfu", "LFU" }, { "score", "score" } } do
  local y = ty.tensor(stats.column(first, row[1])) * 100
  drawn[#drawn + 1] = { x = slots, y = y, label = row[2] }
end
ty.plot.line { series = drawn, title = "Experts that were there when wanted", x_label = "slots of a layer",
  y_label = "hits, %" }:save(r:picture "hits.png")

os.exit(r:finish {
  { claim = "hit rate of the cache by score, of LRU's, mean of three sizes", values = against_lru, bar = 1 },
  { claim = "likewise of LFU's", values = against_lfu, judged = false },
  { claim = "simulated time of all three together, of LRU's with the same schedule", values = sooner, bar = 1,
    below = true },
  { claim = "likewise of LRU that fetches what it misses", values = sooner_plain, bar = 1, below = true },
  { claim = "tokens one by one: time, of LRU's with the same schedule", values = decode, judged = false },
  { claim = "prompts: time, of LRU's with the same schedule", values = prompt, judged = false },
}, true)
