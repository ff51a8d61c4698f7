--- ModernBERT: an encoder with rotary positions, gated feed-forward networks, next to no biases, and layers of
-- which two in three see a window. Warner et al. 2024, "Smarter, Better, Faster, Longer". Parameter names as published.
local ty = require "tycho"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local rotary = require "tycho.models.rotary"
local text_encoder = require "tycho.models.text_encoder"

local nn = ty.nn
local none = configs.none

local fields = {
  vocab_size = { "count" }, hidden_size = { "count" }, intermediate_size = { "count" },
  num_hidden_layers = { "few" }, num_attention_heads = { "count" }, max_position_embeddings = { "count", 8192 },
  hidden_activation = { "text", "gelu" }, norm_eps = { "epsilon", 1e-5 }, norm_bias = { "flag", false },
  attention_bias = { "flag", false }, attention_dropout = { "share", 0 }, embedding_dropout = { "share", 0 },
  mlp_bias = { "flag", false }, mlp_dropout = { "share", 0 }, decoder_bias = { "flag", true },
  classifier_pooling = { "text", "cls" }, classifier_dropout = { "share", 0 }, classifier_bias = { "flag", false },
  classifier_activation = { "text", "gelu" }, initializer_range = { "number", 0.02 },
  initializer_cutoff_factor = { "number", 2 }, layer_types = { "texts", none }, local_attention = { "count", 128 },
  global_attn_every_n_layers = { "count", 3 }, global_rope_theta = { "number", 160000 },
  local_rope_theta = { "number", 10000 }, rope_parameters = { "table", none }, rope_scaling = { "table", none },
  deterministic_flash_attn = { "flag", false }, sparse_prediction = { "flag", false },
  sparse_pred_ignore_index = { "integer", -100 }, tie_word_embeddings = { "flag", true },
}

local function norm(config)
  return nn.LayerNorm(config.hidden_size, { eps = config.norm_eps, bias = config.norm_bias })
end

-- Matrices that write into the stream begin smaller, the deeper the network is.
local function out_std(config) return config.initializer_range / math.sqrt(2 * config.num_hidden_layers) end

local Attention = nn.module "ModernBertAttention"

function Attention:init(config, sliding)
  self.heads, self.p = config.num_attention_heads, config.attention_dropout
  self.window, self.sliding = sliding and config.local_attention // 2 or -1, sliding
  self.Wqkv = layers.linear(config.hidden_size, 3 * config.hidden_size, config.attention_bias, config.initializer_range)
  self.Wo = layers.linear(config.hidden_size, config.hidden_size, config.attention_bias, out_std(config))
  self.dropout = nn.Dropout(self.p)
end

function Attention:forward(x, at)
  local b, t = x.shape[1], x.shape[2]
  local turns = self.sliding and at.sliding or at.full
  local qkv = self.Wqkv(x):reshape(b, t, 3, self.heads, -1):permute { 2, 0, 3, 1, 4 }
  local q, k = ty.rotary(qkv:select(0, 0), turns.cos, turns.sin), ty.rotary(qkv:select(0, 1), turns.cos, turns.sin)
  return self.dropout(self.Wo(nn.attention(q, k, qkv:select(0, 2),
    { mask = at.mask, window = self.window, dropout = self.training and self.p or 0 })))
end

local Mlp = nn.module "ModernBertMlp"

function Mlp:init(config)
  self.Wi = layers.linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, config.initializer_range)
  self.Wo = layers.linear(config.intermediate_size, config.hidden_size, config.mlp_bias, out_std(config))
  self.dropout = nn.Dropout(config.mlp_dropout)
  self.activation = configs.activation("ModernBert", config.hidden_activation, "hidden_activation")
end

function Mlp:forward(x)
  local gate, up = self.Wi(x):chunk(2, -1)
  return self.Wo(self.dropout(ty.glu(up, gate, self.activation)))
end

local Layer = nn.module "ModernBertLayer"

function Layer:init(config, i)
  if i > 1 then self.attn_norm = norm(config) end -- the first comes right behind the embeddings' norm
  self.attn = Attention(config, config.layer_types[i] == "sliding_attention")
  self.mlp_norm = norm(config)
  self.mlp = Mlp(config)
end

function Layer:forward(x, at)
  x = x + self.attn(self.attn_norm and self.attn_norm(x) or x, at)
  return x + self.mlp(self.mlp_norm(x))
end

local Embeddings = nn.module "ModernBertEmbeddings"

function Embeddings:init(config)
  self.tok_embeddings = layers.embedding(config.vocab_size, config.hidden_size, config.initializer_range,
    config.pad_token_id)
  self.norm = norm(config)
  self.drop = nn.Dropout(config.embedding_dropout)
end

function Embeddings:forward(tokens) return self.drop(self.norm(self.tok_embeddings(tokens))) end

---@class ModernBert: TextEncoder
local ModernBert = nn.module("ModernBert", text_encoder.TextEncoder)
ModernBert.model_type, ModernBert.architecture = "modernbert", "ModernBertModel"
ModernBert.prefixes = { "model." }
ModernBert.other_heads = { "^head%.", "^decoder%.", "^classifier%." }

--- config: the keys of config.json.
---@param config table
function ModernBert:init(config)
  local who = "ModernBert"
  config = configs.read(who, config, fields)
  configs.divides(who, config, "num_attention_heads", "hidden_size")
  configs.only(who, config, { classifier_pooling = { "cls", "mean" } })
  config.layer_types = configs.layer_types(who, config, function(i)
    return (i - 1) % config.global_attn_every_n_layers == 0
  end)
  self.config = config
  local full, sliding = rotary.pair(who, config, config.hidden_size // config.num_attention_heads,
    { theta = config.global_rope_theta, scaling = config.rope_scaling },
    { theta = config.local_rope_theta, scaling = config.rope_scaling })
  self.rotary, self.local_rotary = full, sliding
  self.embeddings = Embeddings(config)
  self.layers = nn.ModuleList {}
  for i = 1, config.num_hidden_layers do self.layers:append(Layer(config, i)) end
  self.final_norm = norm(config)
end

--- Hidden states [n, t, hidden] of tokens i64 [n, t]. options: mask (bool or i64 [n, t], 0: padding), checkpoint (true:
-- the backward pass runs each layer again, whose results then need not be kept).
---@param tokens Tensor
---@param options? {mask?: Tensor, checkpoint?: boolean}
---@return Tensor hidden
function ModernBert:forward(tokens, options)
  local t = tokens.shape[2]
  local function turns(by)
    local cos, sin = by:table(t, tokens.device)
    return { cos = cos:narrow(0, 0, t), sin = sin:narrow(0, 0, t) }
  end
  local at = { mask = text_encoder.padding(options), full = turns(self.rotary), sliding = turns(self.local_rotary) }
  local x, checkpoint = self.embeddings(tokens), options and options.checkpoint
  for _, layer in ipairs(self.layers) do
    if checkpoint then x = ty.checkpoint(layer, x, at) else x = layer(x, at) end
  end
  return self.final_norm(x)
end

-- head.{dense, norm}, which stands before every task's layer.
local Head = nn.module "ModernBertHead"

function Head:init(config)
  self.dense = layers.linear(config.hidden_size, config.hidden_size, config.classifier_bias, out_std(config))
  self.norm = norm(config)
  self.activation = layers.activation("ModernBert", config, "classifier_activation")
end

function Head:forward(x) return self.norm(layers.activated(self.dense, x, self.activation)) end

local function spec(task, make, logits, loss)
  return { architecture = "ModernBertFor" .. task, model_type = "modernbert", body = "model", encoder = ModernBert,
    make = make, logits = logits, loss = loss }
end

local function judge(task, outputs, loss, pool)
  return text_encoder.head(spec(task, function(self, config)
    self.head = Head(config)
    self.drop = nn.Dropout(config.classifier_dropout)
    self.classifier = layers.linear(config.hidden_size, outputs(config), true, config.hidden_size ^ -0.5)
  end, function(self, x, options)
    return self.classifier(self.drop(self.head(pool and pool(self, x, options) or x)))
  end, loss))
end

local masked = spec("MaskedLM", function(self, config) self.head = Head(config) end)
masked.projector, masked.embedding = "decoder", "tok_embeddings"
function masked.bias(config) return config.decoder_bias end
function masked.width(config) return config.hidden_size end
function masked.transform(self, x) return self.head(x) end

return {
  ModernBert = ModernBert,
  --- Logits [n, t, vocabulary] of what stands at each place.
  ModernBertForMaskedLM = text_encoder.masked(masked),
  --- Logits [n, labels] of texts, by their first token or (classifier_pooling "mean") by all.
  ModernBertForSequenceClassification = judge("SequenceClassification", configs.labels, nil, function(self, x, options)
    if self.config.classifier_pooling == "cls" then return x:select(1, 0) end
    return text_encoder.mean(x, options and options.mask)
  end),
  --- Logits [n, t, labels] of tokens.
  ModernBertForTokenClassification = judge("TokenClassification", configs.labels),
  --- Logits [n, t, 2] of where an answer begins and where it ends; its labels are i64 [n, 2].
  ModernBertForQuestionAnswering = judge("QuestionAnswering", function() return 2 end, text_encoder.spans),
}
