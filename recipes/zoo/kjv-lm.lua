-- A language model of the King James Bible
-- claim: it takes a tenth fewer bits per byte of unseen chapters than the recipe llm/pretrain, on the same chapters
-- system: a Llama of 6.5 million parameters over 4096 byte-pair tokens
-- paper: Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models"
-- time: 50 minutes a seed on one CPU core
--
-- It reads all 66 books but every tenth chapter; those held out of the first three books are what llm/pretrain holds
-- out as well. Bits per byte do not depend on the tokenizer. The text is gone through many times, so the layers drop a
-- share of what they add to the hidden states in training (llm.dropout). Rate, dropout and steps are a first choice and
-- were not searched for; --validation keeps chapters apart for who wants to.
local ty = require "tycho"
local llm, zoo = require "tycho.llm", require "tycho.zoo"

local r = ty.recipe.declare { seeds = 2, recorded_seeds = 2,
  args = zoo.language.arguments { width = 256, layers = 7, heads = 4, steps = 2040, lr = 2e-3, dropout = 0.1 } }

local corpus = zoo.language.corpus(r)
local pretrain = r:recorded "llm/pretrain"
local first, all, of_pretrain = {}, {}, {}
for i, seed in ipairs(r.seeds) do
  local model = zoo.language.train(r, corpus, seed)
  all[i] = corpus:evaluate(model, "held_out", { device = r.device }).bits_per_byte
  first[i] = corpus:evaluate(model, "first", { device = r.device }).bits_per_byte
  of_pretrain[i] = pretrain and first[i] / ty.stats.mean(pretrain.metrics.bits_per_byte)
  r:say("seed %d: %.4f bits per byte of all chapters held out, %.4f of those of the first three books", seed, all[i],
    first[i])
end
r.metrics.bits_per_byte, r.metrics.bits_per_byte_first = all, first

-- The first words of a chapter that was held out, and how the model goes on.
local model = llm.load(r:path("seed" .. r.seeds[1] .. "/model"), { device = r.device })
local ids = corpus.ids.held_out[1]:narrow(0, 0, 24):to { device = r.device }
local tokens = model:generate({ ids }, 100, { temperature = 0.8, top_p = 0.95, seed = r.seed,
  stop_tokens = { corpus.eos } })[1]
r:say("\n%s", corpus.tokenizer:decode(tokens))

local rows = {
  { claim = "bits per byte of llm/pretrain's held-out chapters, of what llm/pretrain takes", values = of_pretrain,
    measured = not pretrain and "llm/pretrain is not recorded" or nil, bar = 0.9, below = true,
    judged = pretrain ~= nil },
  { claim = "bits per byte of all chapters held out", values = all, judged = false },
}
if r.args.publish then zoo.publish(r, rows, function(folder) zoo.language.write(r, folder) end) end
os.exit(r:finish(rows), true)
