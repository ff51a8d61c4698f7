--- T5: an encoder and a decoder with relative positions. Raffel et al. 2020, "Exploring the Limits of Transfer Learning
-- with a Unified Text-to-Text Transformer"; version 1.1 by Shazeer 2020. Parameter names as published.
local ty = require "tycho"
local Cache = require "tycho.models.cache"
local layers = require "tycho.models.layers"
local parts = require "tycho.models.t5_blocks"
local LanguageModel = require "tycho.models.model"

local nn = ty.nn

---@class T5: LanguageModel
local T5 = nn.module("T5", LanguageModel)
T5.model_type, T5.architecture = "t5", "T5ForConditionalGeneration"
-- Copies of `shared`, and what version 1.0 wrote but never used.
T5.ignored_too = { "^encoder%.embed_tokens%.weight$", "^decoder%.embed_tokens%.weight$", "^lm_head%.weight$",
  "%.EncDecAttention%.relative_attention_bias%.weight$" }

--- config: the keys of config.json.
---@param config table
function T5:init(config)
  local c = parts.read("T5", config)
  self.config = c
  -- Version 1.0 scales what the tied head gets.
  self.scale = 1
  if c.scale_decoder_outputs or (c.scale_decoder_outputs == nil and c.tie_word_embeddings) then
    self.scale = c.d_model ^ -0.5
  end
  self.shared = layers.embedding(c.vocab_size, c.d_model, 1)
  self.encoder = parts.Stack(c, c.num_layers, false)
  self.decoder = parts.Stack(c, c.num_decoder_layers, true)
  if not c.tie_word_embeddings then self.lm_head = layers.linear(c.d_model, c.vocab_size) end
end

-- Newer versions of transformers always write tie_word_embeddings as true: what counts is whether there is a head.
function T5.from_config(class, given, state)
  local config = {}
  for key, value in pairs(given) do config[key] = value end
  if config.scale_decoder_outputs == nil then
    config.scale_decoder_outputs = config.tie_word_embeddings ~= false
  end
  if state then config.tie_word_embeddings = state["lm_head.weight"] == nil end
  return class(config)
end

--- The memory [n, s, d_model] of source tokens i64 [n, s]. options: mask (bool or i64 [n, s], 0: padding).
---@return Tensor memory
function T5:encode(tokens, options) return parts.encode(self.encoder, self.shared(tokens), options and options.mask) end

--- A cache for decode().
---@return KVCache
function T5:cache(options)
  local cache = Cache.new(#self.decoder.block, options)
  cache.cross = {}
  for i = 1, cache.layers do cache.cross[i] = {} end
  return cache
end

--- Hidden states [n, t, d_model] of target tokens i64 [n, t], ready for the head. options: memory (from encode()), mask
-- (of the memory), cache (from model:cache(), without gradients).
function T5:hidden(tokens, options)
  local cache, stack = options.cache, self.decoder
  local past, t = cache and cache.past or 0, tokens.shape[2]
  local x = stack.dropout(self.shared(tokens))
  local bias = stack.block[1].layer[1].SelfAttention:positions(past, t, past + t)
  if t > 1 then
    local ahead = ty.ones({ t, past + t }, { dtype = "bool", device = x.device }):triu(past + 1)
    bias = bias:masked_fill(ahead, -math.huge)
  end
  local seen = options.mask and options.mask:to("bool"):unsqueeze(1):unsqueeze(1)
  for i, block in ipairs(stack.block) do
    x = block.layer[1](x, nil, bias, nil, cache and function(k, v) return cache:append(i, k, v) end)
    x = block.layer[2](x, options.memory, seen, cache and cache.cross[i])
    x = block.layer[3](x)
  end
  if cache then cache:advance(t) end
  return stack.dropout(stack.final_layer_norm(x)) * self.scale
end

function T5:tied() return not self.lm_head and self.shared or nil end

--- Logits of hidden states.
function T5:head(hidden)
  return self.lm_head and self.lm_head(hidden) or ty.linear(hidden, self.shared.weight)
end

--- Source tokens i64 [n, s] and target tokens i64 [n, t] (beginning with decoder_start_token_id) to logits
-- [n, t, vocabulary]. options: mask (of the source).
---@return Tensor logits
function T5:forward(tokens, targets, options)
  local mask = options and options.mask
  return self:head(self:hidden(targets, { memory = self:encode(tokens, options), mask = mask }))
end

--- Mean cross entropy of the labels i64 [n, t] (-100: not counted), which the decoder sees one place later.
---@return Tensor loss
function T5:loss(tokens, labels, options)
  local shape = labels.shape
  local start = ty.full({ shape[1], 1 }, self.config.decoder_start_token_id, { dtype = "i64", device = labels.device })
  local inputs = ty.concat({ start, labels:narrow(1, 0, shape[2] - 1) }, 1)
  inputs = inputs:masked_fill(inputs:eq(-100), self.config.pad_token_id)
  return nn.cross_entropy(self:forward(tokens, inputs, options):flatten(0, 1), labels:flatten())
end

--- As LanguageModel:start(): the prompts are the source, the decoder begins with decoder_start_token_id.
function T5:start(tokens, mask, cache)
  local memory = self:encode(tokens, { mask = mask })
  local first = ty.full({ tokens.shape[1], 1 }, self.config.decoder_start_token_id,
    { dtype = "i64", device = tokens.device })
  return first, nil, function(input)
    return self:head(self:hidden(input, { cache = cache, memory = memory, mask = mask }):select(1, -1))
  end
end

return T5
