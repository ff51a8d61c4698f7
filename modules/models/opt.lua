--- OPT and Galactica: learned positions that begin at the third row of their table, norms before attention and the
-- feed-forward network or (350M) behind them, embeddings narrower than the layers where the config says so. Zhang et
-- al. 2022, "OPT: Open Pre-trained Transformer Language Models". Parameter names as published.
local ty = require "tycho"
local Cache = require "tycho.models.cache"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local LanguageModel = require "tycho.models.model"

local nn = ty.nn
local none = configs.none

local OFFSET = 2 -- rows of the table of positions before the first

local fields = {
  vocab_size = { "count" }, hidden_size = { "count" }, num_hidden_layers = { "few" }, ffn_dim = { "count" },
  num_attention_heads = { "count" }, max_position_embeddings = { "count", 2048 },
  do_layer_norm_before = { "flag", true }, _remove_final_layer_norm = { "flag", false },
  word_embed_proj_dim = { "count", none }, dropout = { "share", 0.1 }, attention_dropout = { "share", 0 },
  activation_dropout = { "share", 0 }, activation_function = { "text", "relu" }, layerdrop = { "share", 0 },
  init_std = { "number", 0.02 }, enable_bias = { "flag", true }, layer_norm_elementwise_affine = { "flag", true },
  tie_word_embeddings = { "flag", true },
}

local function norm(config)
  return nn.LayerNorm(config.hidden_size, { elementwise_affine = config.layer_norm_elementwise_affine })
end

local Attention = nn.module "OPTAttention"

function Attention:init(config)
  self.heads, self.p = config.num_attention_heads, config.attention_dropout
  for _, name in ipairs { "k_proj", "v_proj", "q_proj", "out_proj" } do
    self[name] = layers.linear(config.hidden_size, config.hidden_size, config.enable_bias, config.init_std)
  end
end

function Attention:forward(x, at)
  local q = nn.split_heads(self.q_proj(layers.tail(x, 1, layers.query_count(at))), self.heads)
  local k, v = nn.split_heads(self.k_proj(x), self.heads), nn.split_heads(self.v_proj(x), self.heads)
  local y = layers.attend(q, k, v, at, 0, -1, self.p, self.training)
  return self.out_proj(layers.tail(y, 1, at.last))
end

local Layer = nn.module "OPTLayer"

function Layer:init(config)
  self.before = config.do_layer_norm_before
  self.self_attn = Attention(config)
  self.self_attn_layer_norm = norm(config)
  self.fc1 = layers.linear(config.hidden_size, config.ffn_dim, config.enable_bias, config.init_std)
  self.fc2 = layers.linear(config.ffn_dim, config.hidden_size, config.enable_bias, config.init_std)
  self.final_layer_norm = norm(config)
  self.dropout = nn.Dropout(config.dropout)
  self.activation = layers.activation("OPT", config, "activation_function")
end

--- The stream [b, t, hidden] after the layer, of the last at.last positions where that is given.
function Layer:forward(stream, _, at)
  local before, kept = self.before, layers.tail(stream, 1, at.last)
  local attended = self.self_attn(before and self.self_attn_layer_norm(stream) or stream, at)
  stream = kept + self.dropout(attended)
  if not before then stream = self.self_attn_layer_norm(stream) end
  local x = layers.activated(self.fc1, before and self.final_layer_norm(stream) or stream, self.activation)
  stream = stream + self.dropout(self.fc2(x))
  return before and stream or self.final_layer_norm(stream)
end

local Body = nn.module "OPTDecoder"

function Body:init(config)
  local narrow, width, std = config.word_embed_proj_dim or config.hidden_size, config.hidden_size, config.init_std
  self.embed_tokens = layers.embedding(config.vocab_size, narrow, std, config.pad_token_id or 1)
  self.embed_positions = layers.embedding(config.max_position_embeddings + OFFSET, width, std)
  if narrow ~= width then
    self.project_in = layers.linear(narrow, width, false, std)
    self.project_out = layers.linear(width, narrow, false, std)
  end
  if config.do_layer_norm_before and not config._remove_final_layer_norm then self.final_layer_norm = norm(config) end
  self.layers = nn.ModuleList {}
  for _ = 1, config.num_hidden_layers do self.layers:append(Layer(config)) end
end

local Model = nn.module "OPTModel"

function Model:init(config) self.decoder = Body(config) end

---@class OPT: LanguageModel
local OPT = nn.module("OPT", LanguageModel)
OPT.model_type, OPT.architecture = "opt", "OPTForCausalLM"
OPT.missing_prefixes = { "model." } -- of files of the body alone, as the first ones were

--- config: the keys of config.json.
---@param given table
function OPT:init(given)
  local config = configs.read("OPT", given, fields)
  configs.divides("OPT", config, "num_attention_heads", "hidden_size")
  configs.only("OPT", config, { layerdrop = 0, activation_dropout = 0 })
  self.config, self.context = config, config.max_position_embeddings
  self.model = Model(config)
  self:make_head(config.word_embed_proj_dim or config.hidden_size, config)
end

--- Makes what head() needs besides the body.
function OPT:make_head(width, config) layers.make_head(self, width, config, config.init_std) end

function OPT.from_config(class, config, state)
  return class(configs.untied(config, state, { "lm_head.weight" },
    { "model.decoder.embed_tokens.weight", "decoder.embed_tokens.weight" }))
end

--- A cache for forward(); it grows as tokens come.
---@return KVCache
function OPT:cache(options) return Cache.new(#self.model.decoder.layers, options) end

--- Hidden states after the last norm, as wide as the embeddings: tokens i64 [n, t] to [n, t, width]. options as in
-- forward(), and last as in Decoder:hidden().
function OPT:hidden(tokens, options)
  local last, body = layers.last("OPT", options), self.model.decoder
  local cache, t = options and options.cache or Cache.new(0), tokens.shape[2]
  local at, positions = layers.learnt_positions("OPT", tokens, options, cache, self.context)
  local x = body.embed_tokens(tokens)
  if body.project_in then x = body.project_in(x) end
  x = layers.through(body.layers, x + body.embed_positions(positions + OFFSET), at, options and options.checkpoint,
    last)
  cache:advance(t)
  if body.final_layer_norm then x = body.final_layer_norm(x) end
  return body.project_out and body.project_out(x) or x
end

function OPT:tied() return not self.lm_head and self.model.decoder.embed_tokens or nil end

--- Logits of hidden states.
function OPT:head(hidden)
  return self.lm_head and self.lm_head(hidden) or ty.linear(hidden, self.model.decoder.embed_tokens.weight)
end

--- tokens i64 [n, t] to logits [n, t, vocabulary]. options: cache (from model:cache(), without gradients: the tokens
-- follow those of the calls before), mask (bool or i64 [n, t], 0: padding, on the left), cu_seqlens, longest and
-- checkpoint (as Decoder:forward() has them).
---@param tokens Tensor
---@param options? {cache?: KVCache, mask?: Tensor, cu_seqlens?: Tensor, longest?: integer, checkpoint?: boolean}
---@return Tensor logits
function OPT:forward(tokens, options) return self:head(self:hidden(tokens, options)) end

return OPT
