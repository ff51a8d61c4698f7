--- Gated linear attention: in place of keys and values that grow with the text, each head has a matrix that decays, by
-- gates that depend on the token, and is added to. Yang et al. 2024, "Gated Linear Attention Transformers with
-- Hardware-Efficient Training". Config keys and parameter names are those of flash-linear-attention's
-- GLAForCausalLM.
--
--     local model = llm.GLA { vocab_size = 1000, hidden_size = 128, num_hidden_layers = 4, num_heads = 2 }
local ty = require "tycho"
local States = require "tycho.models.states"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local LanguageModel = require "tycho.models.model"

local nn = ty.nn
local none = configs.none

local NORMALIZER, RANK = 16, 16 -- of the gates: the root that is taken of them, and the rank of their projection

local fields = {
  vocab_size = { "count", 32000 }, hidden_size = { "count", 2048 }, expand_k = { "number", 0.5 },
  expand_v = { "number", 1 }, hidden_ratio = { "number", 4 }, intermediate_size = { "count", none },
  num_hidden_layers = { "few", 24 }, num_heads = { "count", 4 }, num_kv_heads = { "count", none },
  feature_map = { "text", none }, clamp_min = { "number", none }, use_output_gate = { "flag", true },
  hidden_act = { "text", "swish" }, elementwise_affine = { "flag", true }, norm_eps = { "epsilon", 1e-6 },
  tie_word_embeddings = { "flag", false }, max_position_embeddings = { "count", 2048 },
  -- These choose between implementations of the same computation in flash-linear-attention; fuse_norm shows in a name.
  attn_mode = { "text", "chunk" }, fuse_norm = { "flag", true }, fuse_swiglu = { "flag", true },
  fuse_cross_entropy = { "flag", true }, fuse_linear_cross_entropy = { "flag", false }, use_l2warp = { "flag", false },
  -- These would compute something else; check() refuses them.
  use_short_conv = { "flag", false }, conv_size = { "count", 4 }, use_gk = { "flag", true }, use_gv = { "flag", false },
  attn = { "table", none }, attnres_block_size = { "count", none },
}

local function check(config)
  local function refuse(name, value)
    error(("GLA: %s = %s is not supported"):format(name, type(value) == "table" and "a table" or tostring(value)), 0)
  end
  for _, name in ipairs { "use_short_conv", "use_gv", "use_l2warp" } do
    if config[name] then refuse(name, true) end
  end
  if not config.use_gk then refuse("use_gk", false) end
  if config.attn then refuse("attn", config.attn) end
  if config.attnres_block_size and config.attnres_block_size ~= 1 then
    refuse("attnres_block_size", config.attnres_block_size)
  end
  if config.feature_map then config.feature_map = configs.activation("GLA", config.feature_map, "feature_map") end
  config.num_kv_heads = config.num_kv_heads or config.num_heads
  configs.divides("GLA", config, "num_kv_heads", "num_heads")
  config.key_dim = math.tointeger(config.hidden_size * config.expand_k // 1)
  config.value_dim = math.tointeger(config.hidden_size * config.expand_v // 1)
  for _, name in ipairs { "key_dim", "value_dim" } do
    if config[name] < 1 then
      error(("GLA: expand_%s leaves %s no width"):format(name:sub(1, 1), name), 0)
    end
    configs.divides("GLA", config, "num_heads", name)
  end
  if not config.intermediate_size then
    local inner = math.tointeger(config.hidden_size * config.hidden_ratio * 2 / 3 // 1)
    config.intermediate_size = math.max(1, (inner + 255) // 256) * 256
  end
end

-- Repeats each head [b, heads, t, d] for the heads of queries that share it.
local function repeat_heads(x, times)
  if times == 1 then return x end
  local s = x.shape
  return x:unsqueeze(2):expand(s[1], s[2], times, s[3], s[4]):reshape(s[1], s[2] * times, s[3], s[4])
end

local Attention = nn.module "GatedLinearAttention"

function Attention:init(config)
  local hidden, key, value = config.hidden_size, config.key_dim, config.value_dim
  self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
  self.group, self.clamp_min = config.num_heads // config.num_kv_heads, config.clamp_min
  self.feature_map = config.feature_map
  self.q_proj = layers.linear(hidden, key)
  self.k_proj = layers.linear(hidden, key // self.group)
  self.v_proj = layers.linear(hidden, value // self.group)
  self.gk_proj = nn.Sequential(layers.linear(hidden, RANK), layers.linear(RANK, key // self.group, true))
  if config.use_output_gate then
    self.g_proj = layers.linear(hidden, value)
    self.activation = configs.activation("GLA", config.hidden_act, "hidden_act")
  end
  self.o_proj = layers.linear(value, hidden)
  -- Published files name the norm by what it is fused with.
  self.norm_name = config.fuse_norm and config.use_output_gate and config.hidden_act == "swish" and "g_norm_swish_gate"
    or "g_norm"
  self[self.norm_name] = nn.RMSNorm(value // config.num_heads, { eps = config.norm_eps,
    elementwise_affine = config.elementwise_affine })
end

--- The logarithms of the gates [b, heads, t, width], f32 or wider.
function Attention:gates(x)
  local g = self.gk_proj(x)
  if g.dtype == "f16" or g.dtype == "bf16" then g = g:to "f32" end
  g = g:log_sigmoid() / NORMALIZER
  if self.clamp_min then g = g:clamp(self.clamp_min) end
  return nn.split_heads(g, self.kv_heads)
end

--- at: padding (bool [b, 1, t, 1] or nil), cache and layer (or nil), cu_seqlens (or nil), last (the number of last
-- positions whose result is wanted; nil: of all).
function Attention:forward(x, at)
  local q = nn.split_heads(self.q_proj(x), self.heads)
  local k = nn.split_heads(self.k_proj(x), self.kv_heads)
  local v = nn.split_heads(self.v_proj(x), self.kv_heads)
  local g = self:gates(x)
  if self.feature_map then q, k = ty[self.feature_map](q), ty[self.feature_map](k) end
  if at.padding then -- padding leaves the state as it is
    k, g = k:masked_fill(at.padding, 0), g:masked_fill(at.padding, 0)
  end
  k, v, g = repeat_heads(k, self.group), repeat_heads(v, self.group), repeat_heads(g, self.group)
  local y, state = ty.gated_linear_attention(q, k, v, g, at.cache and at.cache:get(at.layer), 0, at.cu_seqlens)
  if at.cache then at.cache:put(at.layer, state) end
  y = layers.tail(nn.join_heads(self[self.norm_name](y)), 1, at.last)
  if self.g_proj then
    local gate = self.g_proj(layers.tail(x, 1, at.last))
    y = ty.glu(y:to(gate.dtype), gate, self.activation) -- norms are f32 where autocast makes the rest halves
  end
  return self.o_proj(y)
end

local Block = nn.module "GLABlock"

function Block:init(config)
  self.attn_norm = nn.RMSNorm(config.hidden_size, { eps = config.norm_eps })
  self.attn = Attention(config)
  self.mlp_norm = nn.RMSNorm(config.hidden_size, { eps = config.norm_eps })
  self.mlp = layers.GatedMlp(config.hidden_size, config.intermediate_size,
    configs.activation("GLA", config.hidden_act, "hidden_act"))
end

--- stream, more [b, t, hidden], as layers.DecoderLayer has them; more may be nil.
function Block:forward(stream, more, at)
  local x
  stream, x = layers.add_norm(self.attn_norm, stream, more)
  stream, x = layers.add_norm(self.mlp_norm, layers.tail(stream, 1, at.last), self.attn(x, at))
  return stream, self.mlp(x)
end

-- The embeddings, the layers and the last norm, which published files name "model".
local Body = nn.module "GLABody"

function Body:init(config)
  self.embeddings = layers.embedding(config.vocab_size, config.hidden_size, nil, config.pad_token_id)
  self.layers = nn.ModuleList {}
  for _ = 1, config.num_hidden_layers do self.layers:append(Block(config)) end
  self.norm = nn.RMSNorm(config.hidden_size, { eps = config.norm_eps })
end

---@class GLA: LanguageModel
local GLA = nn.module("GLA", LanguageModel)
GLA.model_type, GLA.architecture = "gla", "GLAForCausalLM"
GLA.missing_prefixes = { "model." } -- of files of the body alone
GLA.Attention = Attention

--- config: the keys of config.json, by default as flash-linear-attention has them (1.3 billion parameters).
-- expand_k and expand_v are the widths of keys and values as shares of hidden_size, which num_heads heads divide.
function GLA:init(given)
  local config = configs.read("GLA", given, fields)
  check(config)
  self.config = config
  self.model = Body(config)
  if config.tie_word_embeddings then
    self.ignored_too = { "^lm_head%.weight$" }
  else
    self.lm_head = layers.linear(config.hidden_size, config.vocab_size)
  end
end

--- The keys of config.json.
function GLA:published_config()
  local config = LanguageModel.published_config(self)
  config.key_dim, config.value_dim = nil, nil -- follow from the others
  return config
end

--- A cache for forward(): one state for each layer, however many tokens come.
---@return StateCache
function GLA:cache(options) return States.new(#self.model.layers, options) end

--- Hidden states after the last norm: tokens i64 [n, t] to [n, t, hidden]. options as in forward(), and last as in
-- Decoder:hidden().
function GLA:hidden(tokens, options)
  local last = layers.last("GLA", options)
  options = options or {}
  local cache, mask = options.cache, options.mask
  if options.cu_seqlens and (cache or mask) then error("GLA: cu_seqlens goes with neither a cache nor a mask", 0) end
  local at = { cache = cache, cu_seqlens = options.cu_seqlens }
  if mask then at.padding = mask:to("bool"):logical_not():unsqueeze(1):unsqueeze(-1) end
  local stream, more = layers.through(self.model.layers, self.model.embeddings(tokens), at, options.checkpoint, last)
  if cache then cache:advance(tokens.shape[2]) end
  local _, x = layers.add_norm(self.model.norm, stream, more)
  return x
end

function GLA:tied() return not self.lm_head and self.model.embeddings or nil end

--- Logits of hidden states.
function GLA:head(hidden)
  return self.lm_head and self.lm_head(hidden) or ty.linear(hidden, self.model.embeddings.weight)
end

--- tokens i64 [n, t] to logits [n, t, vocabulary]; there is no limit to t. options: cache (from model:cache(), without
-- gradients: the tokens follow those of the calls before), mask (bool or i64 [n, t], 0: padding), cu_seqlens (i64
-- [sequences + 1]: where sequences packed into tokens [1, n] begin and the last one ends), checkpoint (true: the
-- backward pass runs each layer again).
---@param tokens Tensor
---@param options? {cache?: StateCache, mask?: Tensor, cu_seqlens?: Tensor, checkpoint?: boolean}
---@return Tensor logits
function GLA:forward(tokens, options) return self:head(self:hidden(tokens, options)) end

return GLA
