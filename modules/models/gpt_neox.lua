--- GPT-NeoX, the shape of Pythia: attention and the feed-forward network side by side, after LayerNorms with biases,
-- one product for queries, keys and values by heads, and a quarter of each head turned. Black et al. 2022,
-- "GPT-NeoX-20B"; Biderman et al. 2023, "Pythia".
local ty = require "tycho"
local configs = require "tycho.models.config"
local decoder = require "tycho.models.decoder"
local layers = require "tycho.models.layers"

local nn = ty.nn

local Attention = nn.module "GPTNeoXAttention"

function Attention:init(config)
  self.heads, self.p = config.num_attention_heads, config.attention_dropout
  self.query_key_value = layers.linear(config.hidden_size, 3 * config.hidden_size, config.attention_bias)
  self.dense = layers.linear(config.hidden_size, config.hidden_size, config.attention_bias)
end

function Attention:forward(x, at)
  local b, t = x.shape[1], x.shape[2]
  -- The outputs are those of a head one after the other: its query, its key, its value.
  local all = self.query_key_value(x):reshape(b, t, self.heads, 3, -1):permute { 3, 0, 2, 1, 4 }
  local queries = layers.query_count(at)
  local q = ty.rotary(layers.tail(all:select(0, 0), 2, queries), layers.tail(at.cos, -2, queries),
    layers.tail(at.sin, -2, queries), at.interleaved)
  local k = ty.rotary(all:select(0, 1), at.cos, at.sin, at.interleaved)
  local y = layers.attend(q, k, all:select(0, 2), at, 0, -1, self.p, self.training)
  return self.dense(layers.tail(y, 1, at.last))
end

local Mlp = nn.module "GPTNeoXMLP"

function Mlp:init(config)
  self.dense_h_to_4h = layers.linear(config.hidden_size, config.intermediate_size, true)
  self.dense_4h_to_h = layers.linear(config.intermediate_size, config.hidden_size, true)
  self.activation = layers.activation("GPTNeoX", config, "hidden_act")
end

function Mlp:forward(x, residual)
  return self.dense_4h_to_h(layers.activated(self.dense_h_to_4h, x, self.activation), residual)
end

local Layer = nn.module "GPTNeoXLayer"

function Layer:init(config)
  self.parallel = config.use_parallel_residual
  self.input_layernorm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps })
  self.attention = Attention(config)
  self.mlp = Mlp(config)
end

--- The stream [b, t, hidden] after the layer, of the last at.last positions where that is given.
function Layer:forward(stream, _, at)
  local kept = layers.tail(stream, 1, at.last)
  local attended = kept + self.attention(self.input_layernorm(stream), at)
  return self.mlp(self.post_attention_layernorm(self.parallel and kept or attended), attended)
end

local GPTNeoX = decoder.define {
  name = "GPTNeoX", model_type = "gpt_neox", architecture = "GPTNeoXForCausalLM",
  names = { { "model.embed_tokens.", "gpt_neox.embed_in." }, { "model.norm.", "gpt_neox.final_layer_norm." },
    { "model.", "gpt_neox." }, { "lm_head.", "embed_out." } },
  fields = { layer_norm_eps = { "epsilon", 1e-5 }, hidden_act = { "text", "gelu" }, rotary_pct = { "number", 0.25 },
    rotary_emb_base = { "number", 10000 }, use_parallel_residual = { "flag", true },
    attention_bias = { "flag", true }, hidden_dropout = { "share", 0 }, classifier_dropout = { "share", 0.1 },
    partial_rotary_factor = { "number", configs.none } },
  check = function(config)
    configs.only("GPTNeoX", config, { hidden_dropout = 0 })
    if config.num_key_value_heads ~= config.num_attention_heads then
      error(("GPTNeoX: config key 'num_key_value_heads': expected %d, as num_attention_heads, got %d"):format(
        config.num_attention_heads, config.num_key_value_heads), 0)
    end
    config.partial_rotary_factor = config.partial_rotary_factor or config.rotary_pct
    config.rope_theta = config.rope_theta or config.rotary_emb_base
  end,
  layer = Layer,
  norm = function(config) return nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_eps }) end,
}

GPTNeoX.ignored = { "%.attention%.bias$", "%.attention%.masked_bias$", "%.rotary_emb%.inv_freq$" }
GPTNeoX.missing_prefixes = { "gpt_neox." }

return GPTNeoX
