--- Language models: require "tycho.llm".
--
--     local llm = require "tycho.llm"
--     local model = llm.load "path/of/a/hugging-face/folder"
--     local tokens = model:generate(ty.tensor { { 464, 3290 } }, 20, { top_k = 40 })
--
-- Families: GPT2, Llama, Mistral, Qwen2, Qwen3, Mixtral, Olmo2, Phi3, GPTNeoX, Gemma, Gemma2, Gemma3, OPT, Falcon, GLA,
-- Mamba, Mamba2, Bert, BertForMaskedLM, T5. Each takes the keys of its config.json (GPT2: options of its own) and has
-- the parameter names of the published files.
-- Training: data (token files, packed batches), train (accumulation, evaluation, the loop), corpus (a text in parts,
-- its tokenizer and a model trained on it), trials (optimizers compared at equal budget),
-- multilevel (training by way of a smaller model), ngram and compressors
-- (baselines), bleu (scores of what was generated), masking (the objective of encoders), spans (entities as tags).
-- Drafts for generate(): FeatureDraft, which reads the model's states, and draft_length, how much is drafted at a time.
local hub = require "tycho.hub"
local Cache = require "tycho.models.cache"
local LanguageModel = require "tycho.models.model"

-- The networks of tycho.models leave generation and further caches to this module.

--- Continues tokens by up to `count` more. tokens: i64 [n, t], and the result is [n, t + new]; or a list of rows of
-- different lengths, and the result is a list of i64 tensors, each a prompt and what follows it. options: temperature
-- (1; 0 takes the most likely token), top_k, top_p, min_p, repetition_penalty; seed (the generator is left as it was);
-- stop_tokens (one or a list; by default eos_token_id of the model's files; false: none); stop (list of texts, with
-- tokenizer); on_token(row, token), called for each token as it comes, rows counted from 1, false ends the row; pad
-- (0); draft (a smaller model of the same tokens, which proposes draft_tokens, 4, at a time), stats; cache (to go on
-- from); pictures (for models that see some). tycho.llm.generate tells more.
---@param tokens Tensor|Tensor[]
---@param count integer
---@param options? table
---@return Tensor|Tensor[] tokens
function LanguageModel:generate(tokens, count, options)
  return require("tycho.llm.generate").generate(self, tokens, count, options)
end

for kind, file in pairs { paged = "tycho.llm.cache.paged", h2o = "tycho.llm.cache.h2o",
  quantized = "tycho.llm.cache.quantized" } do
  Cache.kinds[kind] = function(layers, options) return require(file).new(layers, options) end
end

local M = {
  Cache = Cache,
  load = hub.load,
  tokenizer = hub.tokenizer,
  weights = hub.weights,
  assign = hub.assign,
}

local files = { HeavyHitterCache = "tycho.llm.cache.h2o", PackedCache = "tycho.llm.cache.packed",
  PagePool = "tycho.llm.cache.pool", chat = "tycho.hub.chat", data = "tycho.llm.data",
  train = "tycho.llm.train", ngram = "tycho.llm.ngram", compressors = "tycho.llm.compressors",
  corpus = "tycho.llm.corpus", trials = "tycho.llm.trials", multilevel = "tycho.llm.multilevel",
  bleu = "tycho.llm.bleu", dropout = "tycho.llm.dropout", infill = "tycho.llm.infill",
  draft_length = "tycho.llm.draft_length",
  FeatureDraft = "tycho.llm.feature_draft", masking = "tycho.llm.masking", spans = "tycho.llm.spans",
  preference = "tycho.llm.preference", shrink = "tycho.llm.shrink", stream = { "tycho.llm.text", "stream" } }
for family in ([[GPT2 Llama Mistral Qwen2 Qwen3 Mixtral Olmo2 Phi3 GPTNeoX Gemma Gemma2 Gemma3 OPT Falcon GLA
  Mamba Mamba2 Bert BertForMaskedLM T5]]):gmatch "%S+" do
  files[family] = { "tycho.models", family }
end

return require "tycho.lazy" (M, files, "tycho.llm")
