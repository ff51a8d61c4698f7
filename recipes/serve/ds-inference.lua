-- Serving a language model: continuous batches, several ranks, weights beyond the memory
-- claim: requests served together get the texts that the model gives alone, faster than by batches that wait for each
--   other, over ranks too, and of a model whose weights do not fit
-- system: the zoo's Llama under an engine with pages of keys and values; a wider Llama with its layers in a file
-- paper: Aminabadi et al. 2022, "DeepSpeed Inference: Enabling Efficient Inference of Transformer Models at
--   Unprecedented Scale"
-- time: 4 minutes on one CPU core
--
-- Requests are pieces of the King James Bible of 8 to 96 tokens that ask for 8 to 96 more, drawn evenly, and arrive
-- independently of each other. The baseline generates batches that begin and end together, as the model's generate()
-- does; requests that have all their tokens end, and each gets its tokens as they come. How many go into a batch is
-- chosen by its throughput when all requests are there at once; at the rates of the picture it takes those that wait.
-- Waiting is by a clock of the processor's time (serve.replay), at 0.7 of what the baseline can do at most.
--
-- Ranks share one core here: a rank's time is by its own clock, and links are those of one machine. The model beyond
-- the memory has random weights; all but two of its layers are in a file and pass through a window (tycho.offload),
-- and memory is what tensors take at most, keys and values included.
local ty = require "tycho"
local dist, llm, offload = require "tycho.dist", require "tycho.llm", require "tycho.offload"
local serve, zoo = require "tycho.serve", require "tycho.zoo"
local replay = serve.replay

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "model", "kjv-lm", "of the zoo", quick = "kjv-draft" },
    { "requests", 96, "of a trace", quick = 6 }, { "longest", 96, "tokens of a prompt, and new ones", quick = 12 },
    { "batches", { 8, 16, 32, 64 }, "sizes the baseline may choose", quick = { 4 } },
    { "rates", { 0.4, 0.7, 1, 1.5 }, "of arrival, by the baseline's throughput", quick = { 0.7 } },
    { "ranks", { 2, 4 }, "that share the model", quick = { 2 } },
    { "latency", 1e-5, "seconds of a message between ranks" }, { "bandwidth", 5e10, "bytes a second between ranks" },
    { "width", 512, "of the model beyond the memory", quick = 64 }, { "layers", 12, "of it", quick = 6 },
  },
}
local args = r.args

local model = zoo.load(args.model)
local text = zoo.tokenizer(args.model):encode(ty.data.kjv()):to "i64"
local lengths = { math.min(8, args.longest), args.longest }

local function requests(seed, n, rate)
  return serve.traces.trace { text = text, requests = n, rate = rate or 1e9, input = lengths, output = lengths,
    seed = seed }
end
local function engine_of(m, more)
  local o = { prefixes = false, requests = 64 }
  for key, value in pairs(more or {}) do o[key] = value end
  return serve.engine(m, o)
end
-- ---- one rank ----

local v = {}
local put = function(name, i, value) ty.stats.put(v, name, i, value) end
local batch, most
for i, seed in ipairs(r.seeds) do
  local list = requests(seed, args.requests)
  if i == 1 then
    for _, size in ipairs(args.batches) do
      local got = replay.batches(model, list, size).throughput
      if not most or got > most then batch, most = size, got end
    end
    r:say("the baseline's batch is %d: %.0f tokens a second", batch, most)
  end
  local by_engine = replay.run(engine_of(model), list)
  local by_batches = replay.batches(model, list, batch)
  put("faster", i, by_engine.throughput / by_batches.throughput)
  put("same", i, replay.same(by_engine.texts, replay.alone(model, list)))
  for k, share in ipairs(args.rates) do
    local trace = requests(seed, args.requests, share * most / (lengths[1] + lengths[2]) * 2)
    local a, b = replay.run(engine_of(model), trace), replay.batches(model, trace, batch)
    local mine, theirs = ty.stats.mean(a.each), ty.stats.mean(b.each)
    put("engine " .. k, i, 1e3 * mine)
    put("batches " .. k, i, 1e3 * theirs)
    if share == 0.7 then put("waits", i, theirs / mine) end
    r:say("seed %d, rate %.1f: %.1f and %.1f ms a token", seed, share, 1e3 * mine, 1e3 * theirs)
  end
end

-- ---- several ranks ----

local function ranked(group, name, list)
  local d, s, z = require "tycho.dist", require "tycho.serve", require "tycho.zoo"
  local m = z.load(name)
  if group.size > 1 then d.tensor_parallel(m, group) end
  group:barrier()
  local times = s.replay.run(s.engine(m, { prefixes = false }), list, { clock = function() return group:clock() end })
  return { texts = times.texts, throughput = times.throughput }
end
local some = requests(r.seed, math.min(32, args.requests))
local link = { latency = args.latency, bandwidth = args.bandwidth }
local one = dist.run(1, ranked, link, args.model, some)[1]
local over_ranks, speeds = 1, {}
for k, n in ipairs(args.ranks) do
  local got = dist.run(n, ranked, link, args.model, some)[1]
  over_ranks, speeds[k] = math.min(over_ranks, replay.same(got.texts, one.texts)), got.throughput / one.throughput
end

-- ---- beyond the memory ----

ty.manual_seed(r.seed)
local large = llm.Llama { vocab_size = model.config.vocab_size, hidden_size = args.width,
  intermediate_size = 4 * args.width, num_hidden_layers = args.layers, num_attention_heads = 8 }:eval()
local few = requests(r.seed, 4)
local wanted, weights = replay.alone(large, few), offload.resident(large)
local away = offload.engine(large, nil, { parameters = "file", gradients = "device", moments = "device",
  policy = offload.superpipeline { window = 2, ahead = 1 } })
local streamed = engine_of(large, { within = function(pass) return away:run(pass) end, room = 1024 })
replay.run(streamed, few) -- the window is there from now on
local got
local peak = offload.resident(large) + r:memory(function() got = replay.run(streamed, few).texts end)
local beyond = replay.same(got, wanted)
away:close()

local function means(name)
  local list = {}
  for k in ipairs(args.rates) do list[k] = ty.stats.mean(v[name .. k]) end
  return list
end
ty.plot.line({ title = "What a token of a request takes, waiting included", log_y = true, y_label = "ms",
  x_label = "rate of arrival / throughput of batches", series = {
    { x = args.rates, y = means "engine ", label = "continuous batches" },
    { x = args.rates, y = means "batches ", label = ("batches of up to %d"):format(batch) } },
}):save(r:picture "ds-inference.png")
r:note("tokens a second over ranks, by those of one", speeds)
os.exit(r:finish {
  { claim = "requests whose text is the model's own", values = v.same, bar = 1 },
  { claim = "tokens a second, by those of the best batches", values = v.faster, bar = 1.3 },
  { claim = "time of a token at 0.7 of the batches' throughput, batches by continuous ones", values = v.waits,
    bar = 1.5 },
  { claim = "requests whose text is the same over ranks", measured = over_ranks, bar = 1 },
  { claim = ("tokens a second with %d ranks, by those of one"):format(args.ranks[1]), measured = speeds[1], bar = 1.2 },
  { claim = "requests of the model beyond the memory whose text is its own", measured = beyond, bar = 1 },
  { claim = "its memory, by its weights", measured = peak / weights, bar = 0.6, below = true },
})
