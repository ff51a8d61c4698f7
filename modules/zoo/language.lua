--- The language models of the zoo: what recipes/zoo/kjv-lm.lua and kjv-draft.lua share. A Llama is trained on all books
-- of the King James Bible but every tenth chapter, for several epochs with dropout, and resumes bit for bit.
local ty = require "tycho"
local llm = require "tycho.llm"

local M = {}

-- Chapters of the first three books that are held out: those of the recipe llm/pretrain.
local first_chapters = 117 // 10

--- The arguments of such a recipe; the defaults of `own` (width, layers, heads, steps, lr, dropout) come first.
---@param own table<string, number>
---@return RecipeArgument[]
function M.arguments(own)
  return {
    { "steps", own.steps, "training steps", quick = 4 },
    { "batch", 8, "rows at a time", quick = 2 },
    { "length", 256, "tokens of a row", quick = 32 },
    { "vocabulary", 4096, "tokens", quick = 300 },
    { "books", 66, "of the Bible", quick = 1 },
    { "width", own.width, "hidden size", quick = 32 },
    { "layers", own.layers, "layers", quick = 1 },
    { "heads", own.heads, "heads of attention", quick = 2 },
    { "lr", own.lr, "peak learning rate" },
    { "dropout", own.dropout, "share of the layers' outputs" },
    { "validation", false, "keep chapters apart, to choose settings by" },
    { "every", 300, "steps between evaluations" },
    { "resume", false, "go on from the checkpoints in the results folder", place = true },
    { "publish", false, "write the first seed's model to zoo/", place = true },
  }
end

--- The text in its parts: training, held_out, validation where it was asked for, and `first`, what llm/pretrain holds
-- out.
---@param r Recipe
---@return Corpus
function M.corpus(r)
  local args = r.args
  local corpus = llm.corpus.open { folder = r:path "corpus", books = args.books, vocabulary = args.vocabulary,
    length = args.length, validation = args.validation }
  local held_out = corpus.documents.held_out
  corpus:part("first", table.move(held_out, 1, math.min(first_chapters, #held_out), 1, {}))
  return corpus
end

--- The text that kjv-lm was trained on in its own tokens, for what is done to that model afterwards: the part
-- `training` is what it has seen; of the chapters that it has not, every fourth is in the part `choice`, for settings,
-- and of the others so many as are wanted in the part `measured`. Returns the corpus, and loss(model, part): nats per
-- token of a part, in rows without overlap. options: books (66), chapters (of `measured`: all).
---@param folder string  for the token files
---@param options? { books?: integer, chapters?: integer, device?: string }
---@return Corpus
---@return fun(model: LanguageModel, part: string): number
function M.unseen(folder, options)
  local o = ty.nn.options("zoo.language.unseen", options, { books = 66, chapters = 1 << 30, device = "cpu" })
  local shelf = require "tycho.zoo.shelf"
  local corpus = llm.corpus.open { folder = folder, books = o.books, tokenizer = shelf.tokenizer "kjv-lm",
    length = 256 }
  local hands, others = ty.data.deal(corpus.documents.held_out, 4, { 1 })
  local choice = hands[1]
  -- Evenly from the whole book, so that fewer are like all.
  local step, measured = math.max(1, #others / o.chapters), {}
  for i = 1, #others do
    if #measured < i / step then measured[#measured + 1] = others[i] end
  end
  corpus:part("choice", choice)
  corpus:part("measured", #measured > 0 and measured or choice)
  local sets = {}
  return corpus, function(model, part)
    local path = ("%s/%s.safetensors"):format(folder, part)
    sets[part] = sets[part] or llm.data.Packed(path, { length = corpus.length })
    return llm.train.evaluate(model, sets[part], { device = o.device }).loss
  end
end

--- Trains the model of a seed; it is in the folder "seedN/model" of the results as well.
---@param r Recipe
---@param corpus Corpus
---@param seed integer
---@return LanguageModel
function M.train(r, corpus, seed)
  local args, folder = r.args, r:path("seed" .. seed)
  ty.manual_seed(seed)
  local model = corpus:model({ width = args.width, layers = args.layers, heads = args.heads }):to(r.device)
  r:say("seed %d: %d parameters, %d tokens of %d bytes to train on", seed, model:count_parameters(),
    corpus.training.total, corpus.bytes.training)
  llm.dropout.attach(model, args.dropout)
  llm.train.fit(model, corpus.training, {
    steps = args.steps, batch = args.batch, seed = seed, lr = args.lr, final = 0.02, device = r.device,
    folder = folder .. "/checkpoint", resume = args.resume and "auto" or false, log = folder, every = args.every,
    evaluate = function(step)
      local bits = corpus:evaluate(model, args.validation and "validation" or "held_out",
        { device = r.device }).bits_per_byte
      r:say("step %d: %.4f bits per byte", step, bits)
      return { bits_per_byte = bits }
    end,
  })
  llm.dropout.remove(model)
  corpus:save(model, folder .. "/model")
  return model:eval()
end

--- Writes the first seed's model to a folder, in half precision.
---@param r Recipe
---@param folder string
function M.write(r, folder)
  local trained = r:path("seed" .. r.seeds[1] .. "/model")
  llm.load(trained, { dtype = "f16" }):save(folder)
  llm.tokenizer(trained):save(folder)
end

return M
