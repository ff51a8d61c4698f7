--- A text in documents, of which some are never trained on, its tokenizer, and the model that is trained on it: what
-- recipes of language models share. The text that ships is the King James Bible (datasets/kjv).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local data = require "tycho.llm.data"
local train = require "tycho.llm.train"

local M = {}

--- A text in parts for training and held out, with a tokenizer trained on it and the tokens of every document.
---@class Corpus
---@field documents table<string, string[]>  of the parts training, held_out and, where it was asked for, validation
---@field ids table<string, Tensor[]>        their tokens, i64 [n]
---@field bytes table<string, integer>
---@field folder string                      of the token files
---@field training PackedDataset
---@field held_out PackedDataset             results are measured on it, and nothing is chosen by it
---@field validation? PackedDataset          rates and sizes are chosen by it
---@field tokenizer Tokenizer                trained on the part `training` alone
---@field eos integer                        id of the mark before and behind every document
local Corpus = {}
Corpus.__index = Corpus

-- Names of the parts and their documents.
local function split(all, every, validation)
  local middle = validation and every // 2 or nil
  local dealt, rest = ty.data.deal(all, every, { every, middle })
  local documents = { training = rest, held_out = dealt[every], validation = middle and dealt[middle] }
  for part, list in pairs(documents) do
    if #list == 0 then
      error(("llm.corpus: no document of %d for the part %s; every is %d"):format(#all, part, every), 3)
    end
  end
  return documents
end

local mark = "<|endoftext|>"

local function check_every(who, o)
  if o.folder == "" then error(who .. ": folder: expected a folder for the token files, got none", 3) end
  if not math.tointeger(o.every) or o.every < (o.validation and 3 or 2) then
    error(("%s: every must be an integer of at least %d, got %s"):format(who, o.validation and 3 or 2,
      tostring(o.every)), 3)
  end
  ty.io.mkdir(o.folder)
end

-- Writes the tokens of a part and opens them.
local function encode_part(self, part)
  local ids, bytes = {}, 0
  for i, document in ipairs(self.documents[part]) do
    -- The mark is what a document is predicted from at its begin, and has to be predicted at its end.
    ids[i] = self.tokenizer:encode(mark .. document .. mark)
    bytes = bytes + #document
  end
  local path = ("%s/%s.safetensors"):format(self.folder, part)
  data.write(path, ids)
  self.ids[part], self.bytes[part] = ids, bytes
  -- What is measured on: at least three quarters of a row are there to be seen where a token is predicted, but for the
  -- begin of a document.
  self[part] = data.Packed(path, { length = self.length, jitter = part == "training",
    overlap = part == "training" and 0 or self.length * 3 // 4 })
end

local function encode(self, folder)
  self.folder = folder
  for part in pairs(self.documents) do encode_part(self, part) end
  return self
end

--- The texts of the files under a folder whose names match a pattern, in the order of their names.
---@param folder string
---@param pattern string  as string.find has them
---@return string[]
function M.files(folder, pattern)
  arguments.expect("llm.corpus.files", "folder", folder, "a string")
  arguments.expect("llm.corpus.files", "pattern", pattern, "a string")
  local list = {}
  local names = ty.io.listdir(folder)
  table.sort(names)
  for _, name in ipairs(names) do
    local path = folder .. "/" .. name
    if ty.io.stat(path).kind == "directory" then
      for _, text in ipairs(M.files(path, pattern)) do list[#list + 1] = text end
    elseif name:find(pattern) then
      list[#list + 1] = ty.io.read(path)
    end
  end
  return list
end

--- Splits a text, trains a tokenizer on its training part and writes its tokens to a folder. options:
--   folder (where the token files go), text (the one that ships), books (3: how many books of the one that ships; what
--   is held out of the first ones stays so with more), every (10: one document of so many is held out),
--   validation (false: as many again are kept apart to choose settings by), vocabulary (1024; 257 is one token for a
--   byte), tokenizer (in place of one that is trained; it has to know the mark <|endoftext|>), length (tokens of a row,
--   128).
---@param options table
---@return Corpus
function M.open(options)
  local none = ty.nn.none
  local o = ty.nn.options("llm.corpus.open", options, { folder = "", text = none, books = 3, every = 10,
    validation = false, vocabulary = 1024, tokenizer = none, length = 128 },
    { text = "a string", books = "an integer in [1, 66]", every = false, tokenizer = false })
  check_every("llm.corpus.open", o)
  local documents = split(ty.data.documents(o.text or ty.data.kjv { books = o.books }), o.every, o.validation)
  local self = setmetatable({ documents = documents, ids = {}, bytes = {}, length = o.length }, Corpus)
  self.tokenizer = o.tokenizer or ty.tokenizer.train(documents.training, { vocabulary = o.vocabulary,
    special = { mark } })
  self.eos = self.tokenizer:id(mark) or error("llm.corpus.open: tokenizer: expected one that has " .. mark, 2)
  local fields = ty.tokenizer.fields(self.tokenizer)
  fields.bos, fields.eos = self.eos, self.eos
  return encode(self, o.folder)
end

--- Another text in the tokens of this one, for models that are trained on this one and then fine-tuned. options:
-- folder (where its token files go), documents (a list of texts), every and validation (as open()'s).
---@param options {folder: string, documents: string[], every?: integer, validation?: boolean}
---@return Corpus
function Corpus:other(options)
  local o = ty.nn.options("llm.corpus: other", options, { folder = "", documents = {}, every = 10, validation = false })
  check_every("llm.corpus: other", o)
  return encode(setmetatable({ documents = split(o.documents, o.every, o.validation), ids = {}, bytes = {},
    length = self.length, tokenizer = self.tokenizer, eos = self.eos }, Corpus), o.folder)
end

--- One more part to measure on: some of the held-out documents, say, under a name of its own.
---@param name string
---@param documents string[]
---@return PackedDataset
function Corpus:part(name, documents)
  local who = "llm.corpus: part"
  arguments.expect(who, "name", name, "a string")
  arguments.expect(who, "documents", documents, "a list of strings")
  if #documents == 0 then arguments.fail("%s: documents: expected at least one, got an empty table", who) end
  if rawget(self, name) ~= nil or Corpus[name] then
    arguments.fail("%s: name: expected a new one, got '%s'", who, name)
  end
  self.documents[name] = documents
  encode_part(self, name)
  return self[name]
end

--- The loss of a model over a part: loss (nats per token), perplexity, bits_per_byte. options as llm.train.evaluate's.
---@param model LanguageModel
---@param part? string  held_out
---@param options? {batch?: integer, device?: string}
---@return {loss: number, perplexity: number, tokens: integer, bits_per_byte: number}
function Corpus:evaluate(model, part, options)
  part = part or "held_out"
  local o = { bytes = self.bytes[part] }
  for key, value in pairs(options or {}) do o[key] = value end
  return train.evaluate(model, self[part], o)
end

--- All rows of a part in batches that are kept, for what looks at them again and again. A batch: tokens, targets,
-- cu_seqlens, longest, count, as llm.data.Packed gives them without overlap: every token is predicted once.
---@param part string
---@param options? {batch?: integer, device?: string}  batch: rows (16)
---@return table[]
function Corpus:batches(part, options)
  local o = ty.nn.options("llm.corpus: batches", options, { batch = 16, device = "cpu" })
  if not ty.is_tensor(self.ids[part] and self.ids[part][1]) then
    arguments.fail("llm.corpus: batches: part: expected a part of the corpus, got %s", arguments.describe(part))
  end
  local packed = data.Packed(("%s/%s.safetensors"):format(self.folder, part), { length = self.length })
  return ty.data.batches(packed, { batch_size = o.batch, device = o.device })
end

--- An untrained Llama for this text. options: width (192), layers (4), heads (one for 48 of the width), key_value_heads
-- (as many as heads), hidden (8/3 of the width, a multiple of 16), context (positions; twice the length of a row), and
-- other keys of its config.json under `config`.
---@param options? table
---@return LanguageModel
function Corpus:model(options)
  local none = ty.nn.none
  local o = ty.nn.options("llm.corpus: model", options, { width = 192, layers = 4, heads = none, key_value_heads = none,
    hidden = none, context = 2 * self.length, config = {} })
  local config = {
    vocab_size = self.tokenizer.size, hidden_size = o.width, num_hidden_layers = o.layers,
    intermediate_size = o.hidden or o.width * 8 // 3 // 16 * 16,
    num_attention_heads = o.heads or math.max(1, o.width // 48), num_key_value_heads = o.key_value_heads,
    max_position_embeddings = o.context, tie_word_embeddings = true, bos_token_id = self.eos,
    eos_token_id = self.eos,
  }
  for key, value in pairs(o.config) do config[key] = value end
  return require "tycho.models.llama" (config)
end

--- Writes a model that was trained on this text to a folder, with the tokenizer that it goes by.
---@param model LanguageModel
---@param folder string
function Corpus:save(model, folder)
  model:save(folder)
  self.tokenizer:save(folder)
end

local function text_of(value, depth)
  if type(value) ~= "table" then return tostring(value) end
  if depth > 16 then arguments.fail "llm.corpus.text_of: value: expected at most 16 levels of tables" end
  local words = {}
  for key, entry in pairs(value) do words[#words + 1] = ("%s=%s"):format(key, text_of(entry, depth + 1)) end
  table.sort(words)
  return "{" .. table.concat(words, " ") .. "}"
end

--- Settings as text, to see whether they are still the same.
---@param value any a table of tables without circles, or a plain value
---@return string
function M.text_of(value) return text_of(value, 1) end

--- A model trained on this text: the one in `folder`, when it was trained with the same settings, otherwise it is
-- trained and kept there. Recipes that begin with a trained model share it so. options: folder; model (as model()'s);
-- train (as llm.train.fit's: steps, seed, lr ...), device.
---@param options {folder: string, model?: table, train?: table, device?: string}
---@return LanguageModel
function Corpus:trained(options)
  local none = ty.nn.none
  local o = ty.nn.options("llm.corpus: trained", options, { folder = "", model = {}, train = {}, device = none })
  if o.folder == "" then error("llm.corpus: trained: folder: expected a folder to keep the model in, got none", 2) end
  local fit = { steps = 1050, batch = 8, lr = 3e-3, final = 0.02, seed = 0 }
  for key, value in pairs(o.train) do fit[key] = value end
  local settings = M.text_of { model = o.model, train = fit, length = self.length, tokens = self.training.total,
    vocabulary = self.tokenizer.size }
  local note = o.folder .. "/settings.txt"
  local model
  if ty.io.exists(note) and ty.io.read(note) == settings then
    model = require("tycho.hub").load(o.folder)
    if o.device then model:to(o.device) end
    return model
  end
  ty.manual_seed(fit.seed)
  model = self:model(o.model)
  if o.device then model:to(o.device) end
  fit.device = o.device
  train.fit(model, self.training, fit)
  self:save(model, o.folder)
  ty.io.write_atomic(note, settings)
  return model
end

return M
