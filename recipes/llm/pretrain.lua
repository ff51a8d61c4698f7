-- A language model, trained from nothing on a book
-- claim: a small transformer takes fewer bits per byte of unseen chapters than gzip -9 and than the best n-gram model
-- system: a Llama of 2 million parameters over byte-pair tokens, packed documents
-- paper: Touvron et al. 2023, "LLaMA"; Chen and Goodman 1999 (the n-gram model)
-- time: 4 minutes on two CPU cores
--
-- The n-gram model has the best order by the held-out text itself, over bytes or over the model's own tokens, which
-- favours it. gzip may use what the training text tells it.
local ty = require "tycho"
local llm = require "tycho.llm"

local r = ty.recipe.declare {
  seeds = 1,
  args = {
    { "steps", 1050, "training steps", quick = 8 },
    { "batch", 8, "rows at a time", quick = 4 },
    { "accumulate", 1, "batches of a step" },
    { "length", 128, "tokens of a row" },
    { "vocabulary", 1024, "tokens; 257: bytes", quick = 400 },
    { "width", 192, "hidden size", quick = 64 },
    { "layers", 4, "layers", quick = 2 },
    { "lr", 3e-3, "peak learning rate" },
    { "weight_decay", 0.1, "decay of matrices" },
    { "checkpoint", false, "gradient checkpointing" },
    { "every", 350, "steps between evaluations" },
    { "held_out", 10, "one chapter of so many is held out" },
    { "text", "", "a text file in place of the one that ships; documents end at empty lines" },
    { "resume", false, "go on from the checkpoint in the results folder" },
  },
}
local args = r.args

-- Chapters, of which every tenth is never trained on, neither by the tokenizer nor by any model.
local corpus = llm.corpus.open {
  folder = r.out, text = args.text ~= "" and ty.io.read(args.text) or nil, every = args.held_out,
  vocabulary = args.vocabulary, length = args.length,
}
local documents, ids, bytes, tokenizer = corpus.documents, corpus.ids, corpus.bytes, corpus.tokenizer
local training, held_out = corpus.training, corpus.held_out
r:say("%d chapters of %d bytes (%d tokens) to train on, %d of %d bytes (%d tokens) held out", #documents.training,
  bytes.training, training.total, #documents.held_out, bytes.held_out, held_out.total)

-- ---- what it has to beat ----

-- The best order by the held-out text itself, which favours the baseline; over bytes and over the model's own tokens.
local function ngrams()
  local best, raw, coded = math.huge, { training = {}, held_out = {} }, { training = {}, held_out = {} }
  for part, chapters in pairs(documents) do
    for i, chapter in ipairs(chapters) do
      raw[part][i] = "\0" .. chapter .. "\0"
      local list = ids[part][i]:tolist()
      for k, id in ipairs(list) do list[k] = ("<I2"):pack(id) end
      coded[part][i] = table.concat(list)
    end
  end
  local function try(name, sets, width, vocabulary, orders)
    local bits, order = llm.compressors.best_ngram(sets, { width = width, vocabulary = vocabulary, orders = orders,
      each = function(n, of) r.metrics[("%d_gram_over_%s"):format(n, name)] = of / bytes.held_out end })
    r:say("%d-gram over %s: %.4f bits per byte", order, name, bits / bytes.held_out)
    best = math.min(best, bits / bytes.held_out)
  end
  try("bytes", raw, 1, 256, r.quick and { 4 } or { 5, 6, 7, 8, 9, 10 })
  try("tokens", coded, 2, tokenizer.size, r.quick and { 2 } or { 3, 4, 5, 6, 7 })
  return best
end

local gzip_bits, gzip_name = llm.compressors.gzip(r:path "text", table.concat(documents.training),
  table.concat(documents.held_out))
gzip_bits = gzip_bits / bytes.held_out
r:say("%s: %.4f bits per byte", gzip_name, gzip_bits)
local ngram_bits = ngrams()

-- ---- the model ----

-- Trains a model with a seed into a folder; how good it is on the held-out part.
local function train(seed, out, resume)
  ty.manual_seed(seed)
  local model = corpus:model { width = args.width, layers = args.layers }
  model:to(r.device)
  r:say("seed %d: a Llama with %d parameters over %d tokens", seed, model:count_parameters(), tokenizer.size)
  local function evaluate()
    return corpus:evaluate(model, "held_out", { device = r.device, batch = args.batch })
  end
  local began = r:seconds()
  llm.train.fit(model, training, {
    steps = args.steps, batch = args.batch, accumulate = args.accumulate, seed = seed, lr = args.lr, final = 0.02,
    weight_decay = args.weight_decay, checkpoint = args.checkpoint, device = r.device, folder = out .. "/checkpoint",
    resume = resume, log = out, every = args.every,
    evaluate = function(step)
      local result = evaluate()
      r:say("step %d: %.4f bits per byte held out", step, result.bits_per_byte)
      return { held_out = result.loss, bits_per_byte = result.bits_per_byte }
    end,
  })
  r:say("trained in %.0f s", r:seconds() - began)
  corpus:save(model, out .. "/model")
  return model, evaluate()
end

-- The curves are those of the log, which has the steps before a break as well.
local function draw_curves(out, path)
  local trained, curve = { x = {}, y = {}, label = "batches of training" }, { x = {}, y = {}, label = "held out" }
  local bits_per_nat = training.total / bytes.training / math.log(2)
  for line in ty.io.lines(out .. "/metrics.jsonl") do
    local entry = ty.io.json_decode(line)
    trained.x[#trained.x + 1], trained.y[#trained.y + 1] = entry.step, tonumber(entry.loss) * bits_per_nat
    if entry.bits_per_byte then
      curve.x[#curve.x + 1], curve.y[#curve.y + 1] = entry.step, tonumber(entry.bits_per_byte)
    end
  end
  ty.plot.line {
    series = {
      trained, curve,
      { x = { 1, args.steps }, y = { ngram_bits, ngram_bits }, label = "n-gram" },
      { x = { 1, args.steps }, y = { gzip_bits, gzip_bits }, label = gzip_name },
    },
    title = "A language model on a book", x_label = "step", y_label = "bits per byte",
  }:save((path:gsub("png$", "svg"))):save(path)
end

local function write(model)
  local samples = {}
  for i, begin in ipairs { "Genesis 51\n", "And God said", "And Moses" } do
    local prompt = ty.concat({ ty.tensor({ corpus.eos }, { dtype = "i64" }), tokenizer:encode(begin) }, 0)
    local tokens = model:eval():generate({ prompt }, math.min(120, 2 * args.length - prompt:numel()),
      { temperature = 0.8, top_p = 0.95, seed = r.seed + i, stop_tokens = { corpus.eos } })[1]
    samples[i] = tokenizer:decode(tokens)
    r:say("\n--- %s", samples[i])
  end
  ty.io.write_atomic(r:path "samples.txt", table.concat(samples, "\n\n") .. "\n")
end

local bits, of_gzip, of_ngram, perplexities = {}, {}, {}, {}
for i, seed in ipairs(r.seeds) do
  local out = i == 1 and r.out or r:path("seed" .. seed)
  local model, result = train(seed, out, args.resume and (i == 1 or "auto")) -- a break leaves later seeds unbegun
  bits[i], perplexities[i] = result.bits_per_byte, result.perplexity
  of_gzip[i], of_ngram[i] = bits[i] / gzip_bits, bits[i] / ngram_bits
  if i == 1 then
    draw_curves(out, r:picture "bits.png")
    write(model)
  end
end
r.metrics.bits_per_byte, r.metrics.perplexity = bits, perplexities

os.exit(r:finish {
  { claim = "bits per byte held out, of gzip -9's", values = of_gzip, baseline = gzip_bits, bar = 1, below = true },
  { claim = "bits per byte held out, of the best n-gram's", values = of_ngram, baseline = ngram_bits, bar = 1,
    below = true },
}, true)
