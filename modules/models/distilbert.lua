--- DistilBERT: BERT with half the layers, no kinds of sentences and no pooler. Sanh et al. 2019, "DistilBERT, a
-- distilled version of BERT". Parameter names as published.
local ty = require "tycho"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local text_encoder = require "tycho.models.text_encoder"

local nn = ty.nn

local EPS = 1e-12 -- which the config does not have

local fields = {
  vocab_size = { "count" }, dim = { "count", 768 }, n_layers = { "few", 6 }, n_heads = { "count", 12 },
  hidden_dim = { "count", 3072 }, max_position_embeddings = { "count", 512 }, sinusoidal_pos_embds = { "flag", false },
  dropout = { "share", 0.1 }, attention_dropout = { "share", 0.1 }, activation = { "text", "gelu" },
  qa_dropout = { "share", 0.1 }, seq_classif_dropout = { "share", 0.2 }, initializer_range = { "number", 0.02 },
  tie_word_embeddings = { "flag", true },
}

local Attention = nn.module "DistilBertAttention"

function Attention:init(config)
  self.heads, self.p = config.n_heads, config.attention_dropout
  for _, name in ipairs { "q_lin", "k_lin", "v_lin", "out_lin" } do
    self[name] = layers.linear(config.dim, config.dim, true, config.initializer_range)
  end
end

function Attention:forward(x, mask)
  return self.out_lin(nn.attention(self.q_lin(x), self.k_lin(x), self.v_lin(x),
    { heads = self.heads, mask = mask, dropout = self.training and self.p or 0 }))
end

local Mlp = nn.module "DistilBertMlp"

function Mlp:init(config)
  self.lin1 = layers.linear(config.dim, config.hidden_dim, true, config.initializer_range)
  self.lin2 = layers.linear(config.hidden_dim, config.dim, true, config.initializer_range)
  self.activation = layers.activation("DistilBert", config, "activation")
end

function Mlp:forward(x) return self.lin2(layers.activated(self.lin1, x, self.activation)) end

local Layer = nn.module "DistilBertLayer"

function Layer:init(config)
  self.attention, self.ffn = Attention(config), Mlp(config)
  self.sa_layer_norm = nn.LayerNorm(config.dim, { eps = EPS })
  self.output_layer_norm = nn.LayerNorm(config.dim, { eps = EPS })
  self.p = config.dropout
end

function Layer:forward(x, mask)
  local first, last = self.sa_layer_norm, self.output_layer_norm
  local _, y = ty.add_layer_norm(self.attention(x, mask), x, first.weight, first.bias, EPS)
  _, y = ty.add_layer_norm(self.ffn(y), y, last.weight, last.bias, EPS, self.p, self.training)
  return y
end

local Embeddings = nn.module "DistilBertEmbeddings"

function Embeddings:init(config)
  local std = config.initializer_range
  self.word_embeddings = layers.embedding(config.vocab_size, config.dim, std, config.pad_token_id or 0)
  self.position_embeddings = layers.embedding(config.max_position_embeddings, config.dim, std)
  self.LayerNorm = nn.LayerNorm(config.dim, { eps = EPS })
  self.dropout = nn.Dropout(config.dropout)
end

function Embeddings:forward(tokens)
  local t, room = tokens.shape[2], self.position_embeddings.count
  if t > room then error(("DistilBert: %d tokens, but there are %d positions"):format(t, room), 4) end
  local positions = self.position_embeddings(ty.arange(t, { device = tokens.device }))
  return self.dropout(self.LayerNorm(self.word_embeddings(tokens) + positions))
end

local Transformer = nn.module "DistilBertTransformer"

function Transformer:init(config)
  self.layer = nn.ModuleList {}
  for _ = 1, config.n_layers do self.layer:append(Layer(config)) end
end

---@class DistilBert: TextEncoder
local DistilBert = nn.module("DistilBert", text_encoder.TextEncoder)
DistilBert.model_type, DistilBert.architecture = "distilbert", "DistilBertModel"
DistilBert.prefixes = { "distilbert." }
DistilBert.other_heads = { "^vocab_", "^pre_classifier%.", "^classifier%.", "^qa_outputs%." }

--- config: the keys of config.json.
---@param config table
function DistilBert:init(config)
  config = configs.read("DistilBert", config, fields)
  configs.divides("DistilBert", config, "n_heads", "dim")
  self.config = config
  self.embeddings = Embeddings(config)
  self.transformer = Transformer(config)
end

--- Hidden states [n, t, hidden] of tokens i64 [n, t]. options: mask (bool or i64 [n, t], 0: padding).
---@param tokens Tensor
---@param options? {mask?: Tensor}
---@return Tensor hidden
function DistilBert:forward(tokens, options)
  local mask, x = text_encoder.padding(options), self.embeddings(tokens)
  for _, layer in ipairs(self.transformer.layer) do x = layer(x, mask) end
  return x
end

local function spec(task, make, logits, loss)
  return { architecture = "DistilBertFor" .. task, model_type = "distilbert", body = "distilbert",
    encoder = DistilBert, make = make, logits = logits, loss = loss }
end

local masked = spec("MaskedLM", function(self, config)
  self.vocab_transform = layers.linear(config.dim, config.dim, true, config.initializer_range)
  self.vocab_layer_norm = nn.LayerNorm(config.dim, { eps = EPS })
  self.activation = layers.activation("DistilBert", config, "activation")
end)
masked.projector, masked.embedding = "vocab_projector", "word_embeddings"
function masked.bias() return true end
function masked.width(config) return config.dim end
function masked.transform(self, x)
  return self.vocab_layer_norm(layers.activated(self.vocab_transform, x, self.activation))
end

local tokens_make, tokens_logits = text_encoder.linear_head("classifier", configs.labels,
  function(config) return config.dropout end)
local spans_make, spans_logits = text_encoder.linear_head("qa_outputs", function() return 2 end,
  function(config) return config.qa_dropout end)

return {
  DistilBert = DistilBert,
  --- Logits [n, t, vocabulary] of what stands at each place.
  DistilBertForMaskedLM = text_encoder.masked(masked),
  --- Logits [n, labels] of texts.
  DistilBertForSequenceClassification = text_encoder.head(spec("SequenceClassification", function(self, config)
    self.pre_classifier = layers.linear(config.dim, config.dim, true, config.initializer_range)
    self.dropout = nn.Dropout(config.seq_classif_dropout)
    self.classifier = layers.linear(config.dim, configs.labels(config), true, config.initializer_range)
  end, function(self, x)
    return self.classifier(self.dropout(self.pre_classifier(x:select(1, 0), nil, "relu")))
  end)),
  --- Logits [n, t, labels] of tokens.
  DistilBertForTokenClassification = text_encoder.head(spec("TokenClassification", tokens_make, tokens_logits)),
  --- Logits [n, t, 2] of where an answer begins and where it ends; its labels are i64 [n, 2].
  DistilBertForQuestionAnswering = text_encoder.head(spec("QuestionAnswering", spans_make, spans_logits,
    text_encoder.spans)),
}
