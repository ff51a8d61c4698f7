-- A draft on the device, the model that it drafts for on the CPU
-- claim: the model's own text, twice as fast as the CPU alone writes it
-- system: speculative decoding across devices: a deep draft head that reads the target's states through a gate
-- paper: Zhang et al. 2025, "Dovetail: A CPU/GPU Heterogeneous Speculative Decoding for LLM inference"
-- time: 6 minutes on one CPU core
--
-- The target is kjv-lm of the zoo. Its draft is three layers deep, gets for each token the target's last hidden state
-- through the paper's dynamic gate, and is trained on a part of the text that the target has seen, at a rate that was
-- chosen on chapters that nothing here is measured on. The same head with a linear layer in place of the gate, as EAGLE
-- has it, gets the same batches, steps and rate; a rate of its own was not looked for. The third draft is kjv-draft, a
-- small model that was trained on all of the text for far longer, and is the better one. Texts are greedy and go on
-- from beginnings of chapters that no model has seen. How much is drafted follows the two speeds (llm.draft_length).
--
-- There is no GPU here. Tokens and rounds are those of real runs of the small pair; seconds are of a model of time: for
-- each pass of the target over so many tokens what layers of TinyLlama's shape take on this core, times their number,
-- in f32, as kjv-lm computes, and in q8_0; for each drafted token the bytes of such a draft in half precision at 448 GB
-- a second (an RTX 2080) and 60 launches of 5 microseconds. In q8_0 a core computes as long as it reads: a pass over
-- five tokens costs twice one over a single token, there no draft reaches the bar, and the row is judged all the same.
-- The wall clock of the small pair with everything on this core is said as well.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local llm = require "tycho.llm"
local quant = require "tycho.quant"
local zoo = require "tycho.zoo"

local r = ty.recipe.declare { seeds = 3, args = {
  { "steps", 140, "of training a draft", quick = 2 },
  { "lr", 2e-3, "peak learning rate" },
  { "layers", 3, "of the drafts" },
  { "length", 128, "tokens of a row", quick = 32 },
  { "texts", 10, "chapters that are continued", quick = 2 },
  { "tokens", 64, "tokens of each", quick = 12 },
  { "most", 8, "tokens drafted at a time at most", quick = 3 },
  { "width", 2048, "hidden size of the layers that are timed", quick = 256 },
  { "rounds", 15, "of timing", quick = 1 },
} }
local a = r.args
local clock = ty.system.clock
local target, tokenizer = zoo.load("kjv-lm", { device = r.device }):eval(), zoo.tokenizer "kjv-lm"

-- Rows to train on, with the target's states, and beginnings of chapters: not those that settings were chosen on.
local ids, rows, prompts, chapters = {}, {}, {}, datasets.load("kjv", { split = "training" })
for i = 0, #chapters - 1, 6 do
  if #ids < a.steps * 8 * a.length then
    for _, id in ipairs(tokenizer:encode(chapters:get(i).text):tolist()) do ids[#ids + 1] = id end
  end
end
for n = 1, math.min(a.steps, #ids // (8 * a.length)) do
  local tokens = ty.tensor({ table.unpack(ids, (n - 1) * 8 * a.length + 1, n * 8 * a.length) }, { dtype = "i64",
    device = r.device }):reshape(8, a.length)
  local hidden = ty.no_grad(target.hidden, target, tokens)
  rows[n] = { tokens = tokens, features = hidden, hidden = hidden }
end
chapters = datasets.load("kjv", { split = "held_out" })
for i = 0, #chapters - 1 do
  if i % 4 ~= 0 and i % 5 ~= 0 and #prompts < a.texts then
    prompts[#prompts + 1] = tokenizer:encode(chapters:get(i).text):narrow(0, 0, 32):to { device = r.device }
  end
end

-- Seconds of passes of a Llama of 22 layers over 1, 2, ... tokens behind 200.
local function passes(dtype)
  local model = llm.Llama { vocab_size = 256, hidden_size = a.width, intermediate_size = a.width * 11 // 4,
    num_hidden_layers = 2, num_attention_heads = a.width // 64, num_key_value_heads = math.max(1, a.width // 512),
    max_position_embeddings = 256 }:eval()
  if dtype ~= "f32" then quant.quantize(model, { dtype = dtype }) end
  local cache, seconds = model:cache { room = 256 }, {}
  ty.no_grad(model.hidden, model, ty.randint(0, 256, { 1, 200 }), { cache = cache })
  local ways = {}
  for n = 1, a.most + 1 do
    local tokens = ty.randint(0, 256, { 1, n })
    ways[n] = function()
      ty.no_grad(model.hidden, model, tokens, { cache = cache })
      cache:truncate(200)
    end
  end
  local _, times = r:time(ways, { rounds = a.rounds })
  for n = 1, #ways do
    local least = math.min(table.unpack(times[n]))
    seconds[n] = 11 * math.max(least, (seconds[n - 1] or 0) / 11) -- a pass over more is no faster
  end
  return seconds
end
local target_rates = { f32 = passes "f32", q8_0 = passes "q8_0" }
for name, list in pairs(target_rates) do
  r.metrics[name .. "_pass1"], r.metrics[name .. "_pass_last"] = list[1], list[#list]
  r:say("22 layers in %s: a pass over 1 token %.1f ms, over 5 %.2f times as long", name, 1e3 * list[1],
    list[math.min(5, #list)] / list[1])
end
-- Of a drafted token: a head of a.layers with 32,000 tokens, and a model with a ninth of the parameters, as kjv-draft.
local layer = a.width * a.width * (2.25 + 3 * 2.75)
local drafts = { head = 3e-4 + 2 * (a.layers * layer + 32000 * a.width + 4 * a.width * a.width) / 448e9,
  small = 3e-4 + 2 * 22 * layer / 9 / 448e9 }

-- The texts, seconds, and what stats say of each.
local function decode(draft, length)
  local texts, all, since = {}, {}, clock()
  for i, prompt in ipairs(prompts) do
    all[i] = {}
    texts[i] = target:generate({ prompt }, a.tokens, { temperature = 0, stop_tokens = false, draft = draft,
      draft_tokens = length, stats = draft and all[i] })[1]
  end
  return texts, clock() - since, all
end
local own = decode()
local _, alone = decode()

local same, all, wall = 0, 0, {}
-- Tokens of a round, and how many times as fast as without a draft by the rates of a target.
local function measure(draft, seconds, name)
  local rates = target_rates[name]
  local texts, _, stats = decode(draft, llm.draft_length { draft = seconds, model = rates })
  local count, time, rounds = #prompts * a.tokens, 0.0, 0
  for i, text in ipairs(texts) do
    all, same = all + 1, same + (text:equal(own[i]) and 1 or 0)
    time, rounds = time + stats[i].drafted * seconds, rounds + stats[i].rounds
    for n, passed in pairs(stats[i].passes) do time = time + passed * rates[n] end
  end
  return count / rounds, count * rates[1] / time
end

local speed, coded, per, plain, small = {}, {}, {}, {}, {}
local vanilla = zoo.load("kjv-draft", { device = r.device }):eval()
for i, seed in ipairs(r.seeds) do
  local heads = {}
  for _, fusion in ipairs { "gate", "linear" } do
    ty.manual_seed(seed)
    local draft, order, at = llm.FeatureDraft(target, { layers = a.layers, fusion = fusion }):to(r.device),
      ty.randperm(#rows):tolist(), 0
    draft:fit(target, { next = function()
      at = at % #order + 1
      return rows[order[at] + 1]
    end }, { steps = a.steps, lr = a.lr, warmup = 10 })
    heads[fusion] = draft:eval()
  end
  per[i], speed[i] = measure(heads.gate, drafts.head, "f32")
  _, coded[i] = measure(heads.gate, drafts.head, "q8_0")
  local tokens, fast = measure(heads.linear, drafts.head, "f32")
  plain[i] = per[i] / tokens
  local theirs
  theirs, small[i] = measure(vanilla, drafts.small, "f32")
  local _, seconds = decode(heads.gate, 4)
  local _, others = decode(vanilla, 4)
  wall[i] = alone / seconds
  r.metrics["wall_kjv_draft_" .. seed], r.metrics["linear_" .. seed] = alone / others, fast
  r:say("seed %d: tokens of a round %.2f, without the gate %.2f, kjv-draft %.2f; times as fast %.2f, %.2f, %.2f; "
    .. "q8_0 %.2f; wall clock on this core %.2f, kjv-draft %.2f", seed, per[i], tokens, theirs, speed[i], fast,
    small[i], coded[i], wall[i], alone / others)
end

os.exit(r:finish {
  { claim = "texts that are the target's own, of all", measured = same / all, bar = 1 },
  { claim = "times as fast as the CPU alone, target in f32 (rates and tokens measured, time modelled)", values = speed,
    baseline = small, bar = 2 },
  { claim = "likewise, target in q8_0", values = coded, bar = 2 },
  { claim = "tokens of a round with the gate, of those with a linear layer", values = plain, bar = 1 },
  { claim = "tokens of a round", values = per, judged = false },
  { claim = "wall clock of the small pair, all on this core, times as fast as without a draft", values = wall,
    judged = false },
}, true)
