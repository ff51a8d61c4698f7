--- What the encoders of texts share: embeddings of sentences, and heads over their hidden states that judge texts,
-- tokens or answers, or guess hidden tokens. Reimers and Gurevych 2019, "Sentence-BERT".
local ty = require "tycho"
local classifier = require "tycho.models.classifier"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local LanguageModel = require "tycho.models.model"

local nn = ty.nn
local M = {}

--- The encoder alone. A class has forward(tokens, options), which gives hidden states [n, t, hidden].
---@class TextEncoder: LanguageModel
local TextEncoder = nn.module("TextEncoder", LanguageModel)
M.TextEncoder = TextEncoder

--- Padding as nn.attention() wants it, [n, 1, 1, t], or nil.
function M.padding(options)
  local mask = options and options.mask
  return mask and mask:to("bool"):unsqueeze(1):unsqueeze(1)
end

-- The mean over the tokens that are no padding.
local function mean(x, mask)
  if not mask then return x:mean(1) end
  local weight = mask:to(x.dtype):unsqueeze(-1)
  return (x * weight):sum(1) / weight:sum(1):clamp(1e-9)
end
M.mean = mean

--- Sentence embeddings [n, hidden]. options: those of forward(), pooling ("mean" over the tokens that are no padding,
-- "first" or "pooler"), normalize (true: to length 1).
---@param tokens Tensor
---@return Tensor embeddings
function TextEncoder:embed(tokens, options)
  options = options or {}
  if options.cu_seqlens then error(getmetatable(self).__name .. ".embed: goes without cu_seqlens", 2) end
  local x, pooling = self:forward(tokens, options), options.pooling or "mean"
  if pooling == "mean" then
    x = mean(x, options.mask)
  elseif pooling == "first" then
    x = x:select(1, 0)
  elseif pooling == "pooler" and self.pooler then
    x = self.pooler(x:select(1, 0))
  else
    error(("%s.embed: pooling '%s' is not one of mean, first, pooler%s"):format(getmetatable(self).__name,
      tostring(pooling), self.pooler and "" or ", or this model has no pooler"), 2)
  end
  return options.normalize == false and x or nn.normalize(x)
end

function TextEncoder:loss()
  local name = getmetatable(self).__name
  error(("%s: the encoder alone has no loss; take %sForMaskedLM"):format(name, name), 2)
end

--- Logits [n, t, 2] of where an answer begins and where it ends, against i64 [n, 2].
function M.spans(logits, labels)
  return nn.cross_entropy(logits:transpose(1, 2):flatten(0, 1), labels:flatten())
end

--- A class with an encoder and a head over it. spec: architecture, model_type, body (the encoder's name in the files),
-- encoder(config), make(self, config) (the head's modules), logits(self, hidden, options), loss(logits, labels, config)
-- (nil: of a classifier), rename and other_heads (as tycho.models.published has them).
function M.head(spec)
  local class = nn.module(spec.architecture, LanguageModel)
  class.model_type, class.architecture = spec.model_type, spec.architecture
  class.rename, class.other_heads = spec.rename, spec.other_heads or {}
  local loss = spec.loss or classifier.loss

  --- config: the keys of config.json.
  ---@param config table
  function class:init(config)
    self[spec.body] = spec.encoder(config)
    self.config = self[spec.body].config
    spec.make(self, self.config)
  end

  --- Logits; options as for the encoder.
  ---@param tokens Tensor
  ---@return Tensor logits
  function class:forward(tokens, options) return spec.logits(self, self[spec.body](tokens, options), options) end

  --- The mean loss of labels.
  ---@return Tensor loss
  function class:loss(tokens, labels, options)
    return loss(self:forward(tokens, options), labels, self.config)
  end

  function class:generate() error(spec.architecture .. ": a classifier generates no text", 2) end

  return class
end

--- The parts make and logits of head() for one linear layer `name` over each token. outputs(config): how many;
-- dropout(config): before it.
function M.linear_head(name, outputs, dropout)
  return function(self, config)
    self.dropout = nn.Dropout(dropout(config))
    self[name] = layers.linear(config.hidden_size or config.dim, outputs(config), true, config.initializer_range)
  end, function(self, x) return self[name](self.dropout(x)) end
end

--- The layer from hidden states to the vocabulary: weights of its own, or those of the embedding; a bias in any case.
local Projector = nn.module "Projector"

function Projector:init(width, config, bias)
  if bias then self.bias = require("tycho.nn.options").parameter({ config.vocab_size }, nn.init.zeros) end
  if not config.tie_word_embeddings then
    self.weight = layers.linear(width, config.vocab_size, false, config.initializer_range).weight
  end
end

function Projector:forward(x, embedding) return ty.linear(x, self.weight or embedding.weight, self.bias) end

--- A class that guesses hidden tokens, with logits [n, t, vocabulary]. spec: as of head(), and projector (the name of
-- the layer to the vocabulary), bias(config), width(config), embedding (the embedding's name below the encoder),
-- make(self, config) and transform(self, x) (what comes before the projector).
function M.masked(spec)
  local name = spec.projector
  local full = {}
  for key, value in pairs(spec) do full[key] = value end

  function full.make(self, config)
    spec.make(self, config)
    self[name] = Projector(spec.width(config), config, spec.bias(config))
    if config.tie_word_embeddings then self.ignored_too = { "^" .. name .. "%.weight$" } end -- is there twice
  end

  local function embedding(self) return self[spec.body].embeddings[spec.embedding] end

  function full.logits(self, x) return self[name](spec.transform(self, x), embedding(self)) end

  function full.loss(logits, labels) return nn.cross_entropy(logits:flatten(0, 1), labels:flatten()) end

  local class = M.head(full)

  function class.from_config(own, config, state)
    local below = "embeddings." .. spec.embedding .. ".weight"
    return own(configs.untied(config, state, { name .. ".weight" }, { spec.body .. "." .. below, below }))
  end

  function class:tied() return not self[name].weight and embedding(self) or nil end

  --- The weights go to the projector's own place for them.
  function class:set_head(head) self[name].weight = head.weight end

  --- As the encoder's embed().
  function class:embed(tokens, options) return self[spec.body]:embed(tokens, options) end

  function class:generate() error(spec.architecture .. ": a masked language model generates no text", 2) end

  return class
end

return M
