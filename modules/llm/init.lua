--- Language models: require "tycho.llm".
--
--     local llm = require "tycho.llm"
--     local model = llm.load "path/of/a/hugging-face/folder"
--     local tokens = model:generate(ty.tensor { { 464, 3290 } }, 20, { top_k = 40 })
--
-- Families: GPT2, Llama, Mistral, Qwen2, Qwen3, Mixtral, GLA, Bert, BertForMaskedLM, T5. Each takes the keys of its
-- config.json (GPT2: options of its own) and has the parameter names of the published files. Training: data (token
-- files, packed batches), train (accumulation, evaluation, the loop), corpus (a text in parts, its tokenizer and a
-- model trained on it), trials (optimizers compared at equal budget), ngram (the baseline), bleu (scores of what was
-- generated).
local loader = require "tycho.llm.load"

local M = {
  load = loader.load,
  tokenizer = loader.tokenizer,
  weights = loader.weights,
  assign = loader.assign,
}

local files = { GPT2 = "gpt2", Llama = "llama", Mistral = "mistral", Qwen2 = "qwen2", Qwen3 = "qwen3",
  Mixtral = "mixtral", GLA = "gla", Bert = "bert", BertForMaskedLM = "bert", T5 = "t5", Cache = "cache",
  HeavyHitterCache = "h2o", chat = "chat", data = "data", train = "train", ngram = "ngram", corpus = "corpus",
  trials = "trials", bleu = "bleu" }

-- A family's file is read when it is first asked for.
return setmetatable(M, { __index = function(self, name)
  local file = files[name]
  if not file then return nil end
  local value = require("tycho.llm." .. file)
  if file == "bert" then value = value[name] end
  rawset(self, name, value)
  return value
end })
