--- RoBERTa, and XLM-RoBERTa and CamemBERT, which are built alike: BERT whose positions count from behind the padding's
-- number, with heads of its own. Liu et al. 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach". Parameter
-- names as published.
local ty = require "tycho"
local bert = require "tycho.models.bert"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local LanguageModel = require "tycho.models.model"
local text_encoder = require "tycho.models.text_encoder"

local nn = ty.nn

local fields = { pad_token_id = { "integer", 1 } }
for name, field in pairs(bert.Bert.fields) do fields[name] = field end

--- RoBERTa's body, which gives a vector for each token.
---@class Roberta: Bert
local Roberta = nn.module("Roberta", bert.Bert)
Roberta.model_type, Roberta.architecture = "roberta", "RobertaModel"
Roberta.prefixes = { "roberta." }
Roberta.other_heads = { "^lm_head%.", "^classifier%.", "^qa_outputs%." }
Roberta.fields = fields

--- The token that positions are counted by.
function Roberta.pad_of(config)
  local pad = config.pad_token_id
  if pad < 0 or pad + 2 > config.max_position_embeddings then
    error(("Roberta: config key 'pad_token_id': expected a row of the %d positions before the last, got %d"):format(
      config.max_position_embeddings, pad), 0)
  end
  return pad
end

local others = { ["xlm-roberta"] = "XLMRoberta", camembert = "Camembert" }

-- A class whose models are written under the name that their config had.
local function named(class)
  function class:published_config()
    local config = LanguageModel.published_config(self)
    local prefix = others[self.config.model_type]
    if prefix then
      local architecture = self.architecture:gsub("^Roberta", prefix)
      config.model_type, config.architectures = self.config.model_type, { architecture }
    end
    return config
  end
  return class
end

named(Roberta)

local function encoder(config) return Roberta(config, false) end

local function dropout(config) return config.classifier_dropout or config.hidden_dropout_prob end

-- lm_head.{dense, layer_norm, bias}: the head over the token embedding; untied it has weights of its own, decoder, and
-- its bias there, but for files that have it under the old name.
local Head = nn.module "RobertaHead"

function Head:init(config, old_bias)
  local width, tied = config.hidden_size, config.tie_word_embeddings
  self.dense = layers.linear(width, width, true, config.initializer_range)
  self.layer_norm = nn.LayerNorm(width, { eps = config.layer_norm_eps })
  if not tied then self.decoder = layers.linear(width, config.vocab_size, not old_bias, config.initializer_range) end
  if tied or old_bias then self.bias = require("tycho.nn.options").parameter({ config.vocab_size }, nn.init.zeros) end
end

---@class RobertaForMaskedLM: LanguageModel
local RobertaForMaskedLM = nn.module("RobertaForMaskedLM", LanguageModel)
RobertaForMaskedLM.model_type, RobertaForMaskedLM.architecture = "roberta", "RobertaForMaskedLM"
RobertaForMaskedLM.rename = Roberta.rename
named(RobertaForMaskedLM)
RobertaForMaskedLM.other_heads = { "^roberta%.pooler%." }

--- config: the keys of config.json. old_bias (false): of an untied head, as files that are older have it.
---@param config table
function RobertaForMaskedLM:init(config, old_bias)
  self.roberta = encoder(config)
  self.config = self.roberta.config
  configs.only("Roberta", self.config, { is_decoder = false })
  self.lm_head = Head(self.config, old_bias)
  self.ignored_too = { self.config.tie_word_embeddings and "^lm_head%.decoder%." or "^lm_head%.bias$" } -- there twice
end

function RobertaForMaskedLM.from_config(class, config, state)
  config = configs.untied(config, state, { "lm_head.decoder.weight" }, { "roberta.embeddings.word_embeddings.weight" })
  return class(config, state and state["lm_head.decoder.bias"] == nil)
end

--- Logits [n, t, vocabulary]; options as for Bert.
---@param tokens Tensor
---@return Tensor logits
function RobertaForMaskedLM:forward(tokens, options)
  local head = self.lm_head
  local x = head.layer_norm(head.dense(self.roberta(tokens, options), nil, "gelu"))
  local weight = (head.decoder or self.roberta.embeddings.word_embeddings).weight
  return ty.linear(x, weight, head.bias or head.decoder.bias)
end

function RobertaForMaskedLM:tied()
  return not self.lm_head.decoder and self.roberta.embeddings.word_embeddings or nil
end

--- The bias goes to the head's own place for it.
function RobertaForMaskedLM:set_head(head)
  local config = {}
  for _, key in ipairs { "vocab_size", "hidden_size", "initializer_range", "layer_norm_eps" } do
    config[key] = self.config[key]
  end
  local before, after = self.lm_head, nn.with_defaults({ device = "meta" }, Head, config)
  after.dense, after.layer_norm = before.dense, before.layer_norm
  rawset(after.decoder, "weight", head.weight)
  rawset(after.decoder, "bias", before.bias)
  self.lm_head = after
  self.ignored_too = { "^lm_head%.bias$" }
end

--- Mean cross entropy of the labels [n, t] (-100: not counted).
---@return Tensor loss
function RobertaForMaskedLM:loss(tokens, labels, options)
  return nn.cross_entropy(self:forward(tokens, options):flatten(0, 1), labels:flatten())
end

--- As Bert:embed().
function RobertaForMaskedLM:embed(tokens, options) return self.roberta:embed(tokens, options) end

function RobertaForMaskedLM:generate() error("RobertaForMaskedLM: a masked language model generates no text", 2) end

-- classifier.{dense, out_proj}: judges a text by its first token.
local Classifier = nn.module "RobertaClassifier"

function Classifier:init(config)
  self.dense = layers.linear(config.hidden_size, config.hidden_size, true, config.initializer_range)
  self.dropout = nn.Dropout(dropout(config))
  self.out_proj = layers.linear(config.hidden_size, configs.labels(config), true, config.initializer_range)
end

function Classifier:forward(x) return self.out_proj(self.dropout(self.dense(self.dropout(x)):tanh())) end

local function head(task, make, logits, loss)
  return named(text_encoder.head { architecture = "RobertaFor" .. task, model_type = "roberta", body = "roberta",
    rename = Roberta.rename, other_heads = { "^roberta%.pooler%." }, encoder = encoder, make = make, logits = logits,
    loss = loss })
end

local tokens_make, tokens_logits = text_encoder.linear_head("classifier", configs.labels, dropout)
local spans_make, spans_logits = text_encoder.linear_head("qa_outputs", function() return 2 end,
  function() return 0 end)

return {
  Roberta = Roberta, RobertaForMaskedLM = RobertaForMaskedLM,
  --- Logits [n, labels] of texts.
  RobertaForSequenceClassification = head("SequenceClassification",
    function(self, config) self.classifier = Classifier(config) end,
    function(self, x) return self.classifier(x:select(1, 0)) end),
  --- Logits [n, t, labels] of tokens.
  RobertaForTokenClassification = head("TokenClassification", tokens_make, tokens_logits),
  --- Logits [n, t, 2] of where an answer begins and where it ends; its labels are i64 [n, 2].
  RobertaForQuestionAnswering = head("QuestionAnswering", spans_make, spans_logits, text_encoder.spans),
}
