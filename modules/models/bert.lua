--- BERT: a bidirectional encoder, also for sentence embeddings. Devlin et al. 2019, "BERT: Pre-training of Deep
-- Bidirectional Transformers". Parameter names as published. roberta.lua goes on from it.
local ty = require "tycho"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local LanguageModel = require "tycho.models.model"
local text_encoder = require "tycho.models.text_encoder"

local nn, Dense = ty.nn, layers.Dense

-- A linear layer, dropout, the sum with the residual and its norm, which is how each half of a layer ends.
local Output = nn.module "BertOutput"

function Output:init(inputs, config)
  self.dense = layers.linear(inputs, config.hidden_size, true, config.initializer_range)
  self.LayerNorm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  self.p = config.hidden_dropout_prob
end

function Output:forward(x, residual)
  local norm = self.LayerNorm
  local _, y = ty.add_layer_norm(self.dense(x), residual, norm.weight, norm.bias, norm.eps, self.p, self.training)
  return y
end

local SelfAttention = nn.module "BertSelfAttention"

function SelfAttention:init(config)
  self.heads, self.causal = config.num_attention_heads, config.is_decoder == true
  for _, name in ipairs { "query", "key", "value" } do
    self[name] = layers.linear(config.hidden_size, config.hidden_size, true, config.initializer_range)
  end
end

function SelfAttention:forward(x, mask, cu_seqlens)
  return nn.attention(self.query(x), self.key(x), self.value(x),
    { heads = self.heads, mask = mask, causal = self.causal, cu_seqlens = cu_seqlens })
end

-- The published names nest: attention.self, attention.output.
local Attention = nn.module "BertAttention"

function Attention:init(config)
  self.self = SelfAttention(config)
  self.output = Output(config.hidden_size, config)
end

function Attention:forward(x, mask, cu_seqlens) return self.output(self.self(x, mask, cu_seqlens), x) end

local Layer = nn.module "BertLayer"

function Layer:init(config, who)
  self.attention = Attention(config)
  self.intermediate = Dense(config.hidden_size, config.intermediate_size,
    configs.activation(who, config.hidden_act, "hidden_act"), config.initializer_range)
  self.output = Output(config.intermediate_size, config)
end

function Layer:forward(x, mask, cu_seqlens)
  x = self.attention(x, mask, cu_seqlens)
  return self.output(self.intermediate(x), x)
end

local Encoder = nn.module "BertEncoder"

function Encoder:init(config, who)
  self.layer = nn.ModuleList {}
  for _ = 1, config.num_hidden_layers do self.layer:append(Layer(config, who)) end
end

local Embeddings = nn.module "BertEmbeddings"

-- pad: the token that stands for nothing, by which positions are counted: from behind its number, and the same for all
-- padding. nil: positions count all tokens.
function Embeddings:init(config, who, pad)
  local width, std = config.hidden_size, config.initializer_range
  self.who, self.pad = who, pad
  self.word_embeddings = layers.embedding(config.vocab_size, width, std, config.pad_token_id or pad or 0)
  self.position_embeddings = layers.embedding(config.max_position_embeddings, width, std, pad)
  self.token_type_embeddings = layers.embedding(config.type_vocab_size, width, std)
  self.LayerNorm = nn.LayerNorm(width, { eps = config.layer_norm_eps })
  self.dropout = nn.Dropout(config.hidden_dropout_prob)
end

-- positions: of packed sequences, from 0 in each, below `longest`; nil: those of rows.
function Embeddings:forward(tokens, types, positions, longest)
  local t, pad = longest or tokens.shape[2], self.pad
  local room = self.position_embeddings.count - (pad and pad + 1 or 0)
  if t > room then error(("%s: %d tokens, but there are %d positions"):format(self.who, t, room), 4) end
  local kinds = self.token_type_embeddings(types or ty.zeros({ 1 }, { dtype = "i64", device = tokens.device }))
  if positions then
    if pad then positions = positions + (pad + 1) end
  elseif pad then
    local seen = tokens:ne(pad):to "i64"
    positions = seen:cumsum(1) * seen + pad
  else
    positions = ty.arange(t, { device = tokens.device })
  end
  return self.dropout(self.LayerNorm(self.word_embeddings(tokens) + kinds + self.position_embeddings(positions)))
end

local fields = {
  vocab_size = { "count" }, hidden_size = { "count" }, num_hidden_layers = { "few" },
  num_attention_heads = { "count" }, intermediate_size = { "count" }, hidden_act = { "text", "gelu" },
  hidden_dropout_prob = { "share", 0.1 }, attention_probs_dropout_prob = { "share", 0.1 },
  max_position_embeddings = { "count", 512 }, type_vocab_size = { "count", 2 }, layer_norm_eps = { "epsilon", 1e-12 },
  initializer_range = { "number", 0.02 }, position_embedding_type = { "text", "absolute" },
  tie_word_embeddings = { "flag", true }, classifier_dropout = { "share", configs.none },
}

local function read(who, given, known)
  local config = configs.read(who, given, known)
  configs.divides(who, config, "num_attention_heads", "hidden_size")
  configs.only(who, config, { position_embedding_type = "absolute", add_cross_attention = false })
  return config
end

-- Older files call the parameters of norms gamma and beta.
local function rename(_, name)
  return (name:gsub("LayerNorm%.gamma$", "LayerNorm.weight"):gsub("LayerNorm%.beta$", "LayerNorm.bias"))
end

---@class Bert: LanguageModel
local Bert = nn.module("Bert", text_encoder.TextEncoder)
Bert.model_type, Bert.architecture = "bert", "BertModel"
Bert.prefixes = { "bert." }
Bert.other_heads = { "^cls%.", "^classifier%.", "^qa_outputs%." }
Bert.rename, Bert.fields = rename, fields

--- config: the keys of config.json. pooler (true): with the layer over the first token.
---@param config table
function Bert:init(config, pooler)
  local who = getmetatable(self).__name
  config = read(who, config, self.fields)
  self.config = config
  self.embeddings = Embeddings(config, who, self.pad_of and self.pad_of(config))
  self.encoder = Encoder(config, who)
  if pooler ~= false then
    self.pooler = Dense(config.hidden_size, config.hidden_size, "tanh", config.initializer_range)
  end
end

-- Sentence encoders are published without a pooler as well as with one.
function Bert.from_config(class, config, state)
  local pooler = "pooler.dense.weight"
  return class(config, not state or (state[pooler] or state[class.prefixes[1] .. pooler]) ~= nil)
end

--- Hidden states [n, t, hidden] of tokens i64 [n, t]. options: mask (bool or i64 [n, t], 0: padding), types (i64 [n,
-- t]: 0 and 1 for the first and second sentence), or, in place of padding, cu_seqlens (i64 [sequences + 1]: where
-- sequences packed into tokens [1, n] begin and end, from 0 to n) and longest (of their lengths; it is found where it
-- is not given).
---@param tokens Tensor
---@param options? {mask?: Tensor, types?: Tensor, cu_seqlens?: Tensor, longest?: integer}
---@return Tensor hidden
function Bert:forward(tokens, options)
  local mask, cu_seqlens = text_encoder.padding(options), options and options.cu_seqlens
  local positions, longest
  if cu_seqlens then
    positions = layers.packed_positions(getmetatable(self).__name, tokens, options)
    longest = options.longest or positions:numel() > 0 and positions:max():item() + 1 or 0
  end
  local x = self.embeddings(tokens, options and options.types, positions, longest)
  for _, layer in ipairs(self.encoder.layer) do x = layer(x, mask, cu_seqlens) end
  return x
end

-- cls.predictions.{transform.{dense, LayerNorm}, bias}: the head over the token embedding; untied it has weights of its
-- own, decoder, and its bias there, but for files that have it under the old name.
local Transform = nn.module "BertTransform"

function Transform:init(config)
  self.dense = layers.linear(config.hidden_size, config.hidden_size, true, config.initializer_range)
  self.LayerNorm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  self.activation = configs.activation("Bert", config.hidden_act, "hidden_act")
end

function Transform:forward(x)
  return self.LayerNorm(self.dense(x, nil, self.activation))
end

local Predictions = nn.module "BertPredictions"

function Predictions:init(config, old_bias)
  local tied = config.tie_word_embeddings
  self.transform = Transform(config)
  if not tied then
    self.decoder = layers.linear(config.hidden_size, config.vocab_size, not old_bias, config.initializer_range)
  end
  if tied or old_bias then
    self.bias = require("tycho.nn.options").parameter({ config.vocab_size }, nn.init.zeros)
  end
end

local Head = nn.module "BertHead"

function Head:init(...) self.predictions = Predictions(...) end

---@class BertForMaskedLM: LanguageModel
local BertForMaskedLM = nn.module("BertForMaskedLM", LanguageModel)
BertForMaskedLM.model_type, BertForMaskedLM.architecture = "bert", "BertForMaskedLM"
BertForMaskedLM.rename = rename
BertForMaskedLM.other_heads = { "^cls%.seq_relationship%.", "^bert%.pooler%." }

--- config: the keys of config.json. old_bias (false): of an untied head, as files that are older have it.
---@param config table
function BertForMaskedLM:init(config, old_bias)
  self.bert = Bert(config, false)
  self.config = self.bert.config
  self.cls = Head(self.config, old_bias)
  local tied = self.config.tie_word_embeddings
  self.ignored_too = { tied and "^cls%.predictions%.decoder%." or "^cls%.predictions%.bias$" } -- are there twice
end

function BertForMaskedLM.from_config(class, config, state)
  config = configs.untied(config, state, { "cls.predictions.decoder.weight" },
    { "bert.embeddings.word_embeddings.weight" })
  return class(config, state and state["cls.predictions.decoder.bias"] == nil)
end

--- Logits [n, t, vocabulary]; options as for Bert.
---@param tokens Tensor
---@return Tensor logits
function BertForMaskedLM:forward(tokens, options)
  local head = self.cls.predictions
  local weight = (head.decoder or self.bert.embeddings.word_embeddings).weight
  return ty.linear(head.transform(self.bert(tokens, options)), weight, head.bias or head.decoder.bias)
end

function BertForMaskedLM:tied()
  return not self.cls.predictions.decoder and self.bert.embeddings.word_embeddings or nil
end

--- The bias goes to the head's own place for it.
function BertForMaskedLM:set_head(head)
  local config = { tie_word_embeddings = false }
  for _, key in ipairs { "vocab_size", "hidden_size", "initializer_range", "layer_norm_eps", "hidden_act" } do
    config[key] = self.config[key]
  end
  local before, after = self.cls.predictions, nn.with_defaults({ device = "meta" }, Head, config)
  after.predictions.transform = before.transform
  rawset(after.predictions.decoder, "weight", head.weight)
  rawset(after.predictions.decoder, "bias", before.bias)
  self.cls = after
  self.ignored_too = { "^cls%.predictions%.bias$" }
end

--- Mean cross entropy of the labels [n, t] (-100: not counted).
---@return Tensor loss
function BertForMaskedLM:loss(tokens, labels, options)
  return nn.cross_entropy(self:forward(tokens, options):flatten(0, 1), labels:flatten())
end

--- As Bert:embed().
function BertForMaskedLM:embed(tokens, options) return self.bert:embed(tokens, options) end

--- BERT as a decoder: each token sees those before it, and the head predicts the one after.
---@class BertLMHeadModel: BertForMaskedLM
local BertLMHeadModel = nn.module("BertLMHeadModel", BertForMaskedLM)
BertLMHeadModel.architecture = "BertLMHeadModel"

--- Mean cross entropy of the token after each one: targets [n, t] are the tokens one place on (-100: not counted), by
-- default those of `tokens` itself.
---@return Tensor loss
function BertLMHeadModel:loss(tokens, targets, options) return LanguageModel.loss(self, tokens, targets, options) end

-- A class of text_encoder.head() with one linear layer over the encoder, which the file calls `name`. pooled: over the
-- pooler's output, one judgement of each text.
local function judge(task, name, pooled, outputs, loss)
  local make, logits = text_encoder.linear_head(name, outputs, function(config)
    return config.classifier_dropout or config.hidden_dropout_prob
  end)
  return text_encoder.head { architecture = "BertFor" .. task, model_type = "bert", body = "bert", rename = rename,
    other_heads = not pooled and { "^bert%.pooler%." } or {}, make = make, loss = loss,
    encoder = function(config) return Bert(config, pooled) end,
    logits = function(self, x)
      return logits(self, pooled and self.bert.pooler(x:select(1, 0)) or x)
    end }
end

return {
  Bert = Bert, BertForMaskedLM = BertForMaskedLM, BertLMHeadModel = BertLMHeadModel,
  --- Logits [n, labels] of texts.
  BertForSequenceClassification = judge("SequenceClassification", "classifier", true, configs.labels),
  --- Logits [n, t, labels] of tokens.
  BertForTokenClassification = judge("TokenClassification", "classifier", false, configs.labels),
  --- Logits [n, t, 2] of where an answer begins and where it ends; its labels are i64 [n, 2].
  BertForQuestionAnswering = judge("QuestionAnswering", "qa_outputs", false, function() return 2 end,
    text_encoder.spans),
}
