-- A ring of experts: a mixture that is larger than the device
-- claim: from a file through a ring of buffers a mixture computes at 80 % of the speed of one that is in memory
-- system: experts in the file tier, a ring of buffers, prefetching along the layers and by what the router will want
-- paper: Shen et al. 2022, "SE-MoE: A Scalable and Efficient Mixture-of-Experts Distributed Training and Inference
--   System"
-- time: a minute on a CPU core
--
-- Experts of random weights, since time and bytes do not depend on what they hold; real text routes. They lie in a file
-- and are read past the page cache; the device is the CPU. That the numbers are those of the model in memory, bit for
-- bit, and how many bytes of experts are on the device at once, is of the real ring. Its time here, where one core
-- computes and copies, is said and not judged. Judged is the simulator, which follows the recorded routing with the
-- measured seconds of an expert and of a read, as if reading cost the processor nothing: at batches of more and more
-- tokens, with a ring, with buffers but without foresight, and with a single buffer. Attention, behind which more reads
-- would hide, is left out. With few tokens an expert computes
-- for less time than it takes to come, and no order of reads helps; with many a single buffer does. The bar is of a
-- batch in between, an eighth of the largest.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local models = require "tycho.models"
local offload = require "tycho.offload"
local zoo = require "tycho.zoo"

local r = ty.recipe.declare { seeds = 3, args = {
  { "width", 256, "hidden size", quick = 32 },
  { "inner", 768, "width inside of an expert", quick = 64 },
  { "layers", 4, "layers", quick = 2 },
  { "experts", 8, "experts of a layer" },
  { "slots", 4, "buffers of the ring" },
  { "tokens", 2048, "tokens of the largest batch", quick = 128 },
} }
local a = r.args
if a.threads == 0 then ty.set_threads(1) end

local tokenizer = zoo.tokenizer "kjv-lm"
local chapters, ids = datasets.load("kjv", { split = "held_out" }), {}
for i = 0, #chapters - 1 do
  if #ids >= 4 * a.tokens then break end
  for _, id in ipairs(tokenizer:encode(chapters:get(i).text):tolist()) do ids[#ids + 1] = id end
end

local exact, held, real = {}, {}, {}
local speed, blind, single = {}, {}, {}
local sizes, curves = {}, { ring = {}, blind = {}, single = {} }
for n = a.tokens // 16, a.tokens, a.tokens // 16 do if a.tokens % n == 0 then sizes[#sizes + 1] = n end end

for i, seed in ipairs(r.seeds) do
  ty.manual_seed(seed)
  local model = r:place(function()
    return models.Mixtral { vocab_size = tokenizer.size, hidden_size = a.width, intermediate_size = a.inner,
      num_hidden_layers = a.layers, num_attention_heads = 4, num_key_value_heads = 4, num_local_experts = a.experts,
      num_experts_per_tok = 2, max_position_embeddings = a.tokens }
  end)
  model:eval()
  local first = (seed * 977) % math.max(1, #ids - a.tokens)
  local tokens = ty.tensor({ table.unpack(ids, first + 1, first + a.tokens) }, { dtype = "i64" }):unsqueeze(0)
  local short = tokens:narrow(1, 0, a.tokens // 4)
  local function run(x) return ty.no_grad(function() return model:hidden(x) end) end

  -- What is measured: an expert by its tokens.
  local layer = model.model.layers[1]
  local expert, x = layer.block_sparse_moe.experts[1], {}
  for k, n in ipairs { 8, a.tokens // 4 } do x[k] = ty.randn(n, a.width) end
  local times = r:time({ function() ty.no_grad(expert, x[1]) end, function() ty.no_grad(expert, x[2]) end,
    function() run(short) end }, { rounds = r.quick and 2 or 9 })
  local token = math.max(0, (times[2] - times[1]) / (a.tokens // 4 - 8))
  local rates = { base = math.max(0, times[1] - 8 * token), token = token }

  local wanted = run(short):clone()
  collectgarbage()
  collectgarbage()
  local before = ty.memory.stats().live
  local ring = offload.expert_ring(model, { slots = a.slots, file = r.out })
  local freed = before - ty.memory.stats().live
  exact[i] = run(short):equal(wanted) and 1 or 0
  held[i] = (1 - freed / ring.bytes) * a.layers * a.experts / a.slots
  local seconds = r:time({ function() run(short) end }, { rounds = r.quick and 1 or 5 })[1]
  real[i] = times[3] / seconds
  -- A read of an expert as the ring reads it, when nothing computes.
  local reads, c = {}, ring.counters
  for k = 1, r.quick and 2 or 9 do
    local waited = c.waited
    ty.no_grad(expert, x[1])
    reads[k] = c.waited - waited
  end
  rates.link = ty.stats.median(reads)
  ring:close()
  if i == 1 then
    r:say("experts %.1f MB, of which a ring of %d holds %.1f MB; an expert read in %.2f ms (%.2f GB/s)",
      ring.bytes / 1e6, a.slots, a.slots * ring.bytes / a.layers / a.experts / 1e6, 1e3 * rates.link,
      ring.bytes / a.layers / a.experts / rates.link / 1e9)
  end

  for s, n in ipairs(sizes) do
    local trace = offload.record_routing(model, tokens:narrow(1, 0, n), { prompt = n, ahead = 1 })
    local function simulated(o)
      o.rates = rates
      return offload.simulate_ring(trace, o).speed
    end
    local here = { ring = simulated { slots = a.slots }, blind = simulated { slots = a.slots, ahead = false },
      single = simulated { slots = 1, ahead = false } }
    for name, curve in pairs(curves) do curve[s] = (curve[s] or 0) + 100 * here[name] / #r.seeds end
    if n == a.tokens // 8 then speed[i], blind[i], single[i] = here.ring, here.blind, here.single end
  end
  r:say("seed %d: an expert with %d tokens %.2f ms; of the speed in memory: real ring %.2f at %d tokens, simulated "
    .. "%.2f, without foresight %.2f, one buffer %.2f at %d", seed, a.tokens // 4, 1e3 * times[2], real[i],
    a.tokens // 4, speed[i], blind[i], single[i], a.tokens // 8)
end

ty.plot.line { series = { { x = sizes, y = curves.ring, label = "ring" },
  { x = sizes, y = curves.blind, label = "without foresight" },
  { x = sizes, y = curves.single, label = "one buffer" } },
  title = "Speed from a file, of that in memory (simulated)", x_label = "tokens of a batch", y_label = "%" }
  :save(r:picture "speed.png")

local exactly = 0
for _, x in ipairs(exact) do exactly = exactly + x end
os.exit(r:finish {
  { claim = "outputs that are those of the model in memory, of all seeds", measured = exactly / #exact, bar = 1 },
  { claim = "bytes of experts on the device, of those of the slots", values = held, bar = 1.1, below = true },
  { claim = "speed of that in memory, simulated, an eighth of the largest batch", values = speed,
    baseline = single, bar = 0.8 },
  { claim = "likewise without foresight", values = blind, judged = false },
  { claim = "likewise with a single buffer", values = single, judged = false },
  { claim = "speed of that in memory, the real ring on one core, a quarter of the largest batch", values = real,
    judged = false },
}, true)
