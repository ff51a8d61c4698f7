--- Falcon: attention and the feed-forward network side by side, few or one head of keys and values for all queries, in
-- one product; rotary positions, or (RW) a penalty of distance in their place. Almazrouei et al. 2023, "The Falcon
-- Series of Open Language Models"; Press et al. 2022, "Train Short, Test Long" (ALiBi).
local ty = require "tycho"
local configs = require "tycho.models.config"
local decoder = require "tycho.models.decoder"
local layers = require "tycho.models.layers"

local nn = ty.nn
local none = configs.none

-- Heads of keys and values: the newer layout says how many, the older has one, or as many as queries.
local function kv_heads(config)
  if config.new_decoder_architecture then return config.num_kv_heads or config.num_attention_heads end
  return config.multi_query and 1 or config.num_attention_heads
end

local Attention = nn.module "FalconAttention"

function Attention:init(config)
  self.heads, self.kv_heads, self.alibi = config.num_attention_heads, kv_heads(config), config.alibi
  self.query_key_value = layers.linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * config.head_dim,
    config.bias)
  self.dense = layers.linear(config.hidden_size, config.hidden_size, config.bias)
end

function Attention:forward(x, at)
  local b, t, group = x.shape[1], x.shape[2], self.heads // self.kv_heads
  -- The outputs are those of a head of keys after the other: its queries, its key, its value.
  local all = self.query_key_value(x):reshape(b, t, self.kv_heads, group + 2, -1):permute { 0, 2, 3, 1, 4 }
  local queries = layers.query_count(at)
  local q = layers.tail(all:narrow(2, 0, group):flatten(1, 2), 2, queries)
  local k, v = all:select(2, group), all:select(2, group + 1)
  if not self.alibi then
    q = ty.rotary(q, layers.tail(at.cos, -2, queries), layers.tail(at.sin, -2, queries), at.interleaved)
    k = ty.rotary(k, at.cos, at.sin, at.interleaved)
  end
  return self.dense(layers.tail(layers.attend(q, k, v, at, 0, -1), 1, at.last))
end

local Mlp = nn.module "FalconMLP"

function Mlp:init(config)
  local inner = config.ffn_hidden_size or 4 * config.hidden_size
  self.dense_h_to_4h = layers.linear(config.hidden_size, inner, config.bias)
  self.dense_4h_to_h = layers.linear(inner, config.hidden_size, config.bias)
  self.activation = layers.activation("Falcon", config, "activation")
end

function Mlp:forward(x) return self.dense_4h_to_h(layers.activated(self.dense_h_to_4h, x, self.activation)) end

local Layer = nn.module "FalconLayer"

function Layer:init(config)
  local function norm() return nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_epsilon }) end
  self.parallel = config.parallel_attn
  if config.new_decoder_architecture and config.num_ln_in_parallel_attn ~= 1 then
    self.ln_attn, self.ln_mlp = norm(), norm()
  else
    self.input_layernorm = norm()
    if not self.parallel then self.post_attention_layernorm = norm() end
  end
  self.self_attention = Attention(config)
  self.mlp = Mlp(config)
end

--- The stream [b, t, hidden] after the layer, of the last at.last positions where that is given.
function Layer:forward(stream, _, at)
  local kept = layers.tail(stream, 1, at.last)
  local x = (self.ln_attn or self.input_layernorm)(stream)
  local attended = self.self_attention(x, at)
  if not self.parallel then
    local sum = kept + attended
    return sum + self.mlp(self.post_attention_layernorm(sum))
  end
  return kept + (self.mlp(self.ln_mlp and self.ln_mlp(kept) or layers.tail(x, 1, at.last)) + attended)
end

-- The slopes of the penalties by heads, rounded to bf16 as the published models have learnt with. Where the heads are
-- no power of two, those of every other head of twice as many follow.
local function slopes(heads, device)
  local whole = 1 << (math.floor(math.log(heads, 2) + 1e-9))
  local list = {}
  for i = 1, whole do list[i] = 2.0 ^ (-8 * i / whole) end
  for i = 1, heads - whole do list[whole + i] = 2.0 ^ (-8 * (2 * i - 1) / (2 * whole)) end
  return ty.tensor(list, { dtype = "bf16", device = device })
end

local Falcon = decoder.define {
  name = "Falcon", model_type = "falcon", architecture = "FalconForCausalLM",
  names = { { "model.embed_tokens.", "transformer.word_embeddings." }, { "model.norm.", "transformer.ln_f." },
    { "model.layers.", "transformer.h." } },
  fields = { intermediate_size = { "count", none }, num_kv_heads = { "count", none }, hidden_act = { "text", none },
    num_ln_in_parallel_attn = { "count", none }, layer_norm_epsilon = { "epsilon", 1e-5 }, alibi = { "flag", false },
    new_decoder_architecture = { "flag", false }, multi_query = { "flag", true }, parallel_attn = { "flag", true },
    bias = { "flag", false }, ffn_hidden_size = { "count", none }, activation = { "text", "gelu" },
    hidden_dropout = { "share", 0 }, apply_residual_connection_post_layernorm = { "flag", false },
    tie_word_embeddings = { "flag", true } },
  check = function(config)
    configs.only("Falcon", config, { hidden_dropout = 0, attention_dropout = 0,
      apply_residual_connection_post_layernorm = false })
    if config.new_decoder_architecture then
      configs.only("Falcon", config, { parallel_attn = true, num_ln_in_parallel_attn = { false, 1, 2 } })
      if config.num_kv_heads then configs.divides("Falcon", config, "num_kv_heads", "num_attention_heads") end
    else
      configs.only("Falcon", config, { num_ln_in_parallel_attn = { false, 1 } })
    end
  end,
  layer = Layer,
  norm = function(config) return nn.LayerNorm(config.hidden_size, { eps = config.layer_norm_epsilon }) end,
}

Falcon.missing_prefixes = { "transformer." }

--- What is added to the scores of keys at positions i64 [b or 1, s] of a sequence, [b or 1, heads, 1, s]: the later a
-- key the more, -infinity where the mask (bool [b, s] or nil) hides it. nil with rotary positions.
function Falcon:bias(positions, mask)
  if not self.config.alibi then return nil end
  local bias = slopes(self.config.num_attention_heads, positions.device):reshape(1, -1, 1, 1)
    * positions:unsqueeze(1):unsqueeze(1):to "bf16"
  bias = bias:to "f32" / math.sqrt(self.config.head_dim)
  return mask and bias:masked_fill(mask:unsqueeze(1):unsqueeze(1):logical_not(), -math.huge) or bias
end

return Falcon
