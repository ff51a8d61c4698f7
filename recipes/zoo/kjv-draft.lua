-- A small language model that drafts for kjv-lm
-- claim: kjv-lm takes two of five tokens that a tenth of its parameters proposes, and writes what it writes alone
-- system: a Llama of 0.7 million parameters over the tokens of kjv-lm, and speculative decoding
-- paper: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"
-- time: 10 minutes a seed on one CPU core
--
-- It is trained as kjv-lm is, on the same chapters. How many drafted tokens hold is counted where both go on greedily
-- from the first words of chapters that neither has seen; the tokens are compared with those of kjv-lm alone.
local ty = require "tycho"
local zoo = require "tycho.zoo"

local args = zoo.language.arguments { width = 96, layers = 3, heads = 2, steps = 2040, lr = 4e-3, dropout = 0 }
args[#args + 1] = { "target", "kjv-lm", "model of the zoo that it drafts for" }
args[#args + 1] = { "chapters", 20, "to go on from", quick = 1 }
args[#args + 1] = { "tokens", 64, "that are written of each", quick = 4 }
local r = ty.recipe.declare { seeds = 2, recorded_seeds = 2, args = args }

local corpus = zoo.language.corpus(r)
local target = not r.quick and zoo.load(r.args.target, { device = r.device })
  or corpus:model { width = 64, layers = 2 }:to(r.device):eval()
if not r.quick then -- the same text and number of tokens give the same tokenizer
  local sample = corpus.documents.held_out[1]
  local theirs, ours = zoo.tokenizer(r.args.target):encode(sample), corpus.tokenizer:encode(sample)
  if theirs:numel() ~= ours:numel() or not theirs:eq(ours):all():item() then
    error(r.args.target .. ": its tokens are not those of this text", 0)
  end
end

-- The share of drafted tokens that hold, and whether all that is written is what the large model writes alone.
local function accepted(draft)
  local drafted, held, same = 0, 0, true
  for i = 1, math.min(r.args.chapters, #corpus.ids.held_out) do
    local prompt = corpus.ids.held_out[i]:narrow(0, 0, 24):to { device = r.device }
    local o = { temperature = 0, stop_tokens = false }
    local alone = target:generate({ prompt }, r.args.tokens, o)[1]
    local stats = {}
    o.draft, o.stats = draft, stats
    local written = target:generate({ prompt }, r.args.tokens, o)[1]
    same = same and written:eq(alone):all():item()
    drafted, held = drafted + stats.drafted, held + stats.accepted
  end
  return held / drafted, same
end

local shares, bits, same = {}, {}, true
for i, seed in ipairs(r.seeds) do
  local model = zoo.language.train(r, corpus, seed)
  local as_alone
  bits[i] = corpus:evaluate(model, "held_out", { device = r.device }).bits_per_byte
  shares[i], as_alone = accepted(model)
  same = same and as_alone
  r:say("seed %d: %.4f bits per byte of all chapters held out, %.1f %% of the drafted tokens hold", seed, bits[i],
    100 * shares[i])
end
r.metrics.bits_per_byte = bits

local rows = {
  { claim = "share of the drafted tokens that kjv-lm takes, greedy", values = shares, bar = 0.4 },
  { claim = "what is written with the draft is what kjv-lm writes alone", measured = same and "yes" or "no",
    bar = "yes", pass = same },
  { claim = "bits per byte of all chapters held out", values = bits, judged = false },
}
if r.args.publish then zoo.publish(r, rows, function(folder) zoo.language.write(r, folder) end) end
os.exit(r:finish(rows), true)
