--- The decoder of Llama and of the families that follow it: parameter names, forward, cache. A family is a table of
-- what it does differently; see llama.lua.
local ty = require "tycho"
local Cache = require "tycho.models.cache"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local rotary = require "tycho.models.rotary"
local LanguageModel = require "tycho.models.model"

local nn = ty.nn
local M = {}

local none = configs.none

-- Fields that all of these families have.
local shared = {
  vocab_size = { "count" }, hidden_size = { "count" }, intermediate_size = { "count" },
  num_hidden_layers = { "few" }, num_attention_heads = { "count" }, num_key_value_heads = { "count", none },
  head_dim = { "count", none }, max_position_embeddings = { "count", 2048 }, rms_norm_eps = { "epsilon", 1e-6 },
  rope_theta = { "number", none }, rope_scaling = { "table", none }, rope_parameters = { "table", none },
  tie_word_embeddings = { "flag", false }, hidden_act = { "text", "silu" }, attention_dropout = { "share", 0 },
}

-- The embeddings, the layers and the last norm, which published files name "model".
local Body = nn.module "Decoder"

function Body:init(config, family)
  self.embed_tokens = layers.embedding(config.vocab_size, config.hidden_size, nil, config.pad_token_id)
  self.layers = nn.ModuleList {}
  for i = 1, config.num_hidden_layers do self.layers:append(family.layer(config, i)) end
  self.norm = family.norm and family.norm(config) or nn.RMSNorm(config.hidden_size, { eps = config.rms_norm_eps })
end

-- Rotary positions by the config, and those of layers that have some of their own, or nil.
function M.rotaries(family, who, config)
  if family.rotary then return family.rotary(who, config) end
  return rotary.new(who, config, config.head_dim)
end

--- What all decoders have: embedding, layers with a cache, the last norm and the head.
---@class Decoder: LanguageModel
local Decoder = nn.module("Decoder", LanguageModel)

-- Files of the body alone lack its name.
Decoder.missing_prefixes = { "model." }

function Decoder:init(given)
  local family = self.family
  local who = family.name
  local fields = {}
  for name, field in pairs(shared) do fields[name] = field end
  for name, field in pairs(family.fields or {}) do fields[name] = field end
  local config = configs.read(who, given, fields)
  config.num_key_value_heads = config.num_key_value_heads or config.num_attention_heads
  if not config.head_dim then
    configs.divides(who, config, "num_attention_heads", "hidden_size")
    config.head_dim = config.hidden_size // config.num_attention_heads
  end
  configs.divides(who, config, "num_key_value_heads", "num_attention_heads")
  if family.check then family.check(config) end
  self.config = config
  self.context = config.max_position_embeddings
  self.rotary, self.local_rotary = M.rotaries(family, who, config)
  self.model = Body(config, family)
  self:make_head(config.hidden_size, config)
end

--- Makes what head() needs besides the body.
function Decoder:make_head(width, config) layers.make_head(self, width, config) end

function Decoder.from_config(class, config, state)
  local tied, field = config.tie_word_embeddings, (class.family.fields or {}).tie_word_embeddings
  if tied == nil and field then tied = field[2] end
  if tied then
    local names = { "model.embed_tokens.weight", "embed_tokens.weight" }
    for i, name in ipairs { table.unpack(names) } do names[i + 2] = M.renamed(class.family, name, 1, 2) end
    config = configs.untied(config, state, { "lm_head.weight" }, names)
  end
  return class(config)
end

--- Options of layers.Attention by a config; `window` as the layer has it.
function M.attention(config, more)
  local o = { hidden = config.hidden_size, heads = config.num_attention_heads, kv_heads = config.num_key_value_heads,
    width = config.head_dim, qkv_bias = config.attention_bias, out_bias = config.attention_bias,
    dropout = config.attention_dropout }
  for key, value in pairs(more or {}) do o[key] = value end
  return o
end

--- A layer with the gated feed-forward network.
function M.layer(config, more)
  local activation = configs.activation("decoder", config.hidden_act, "hidden_act")
  return layers.DecoderLayer(M.attention(config, more), config.rms_norm_eps, "mlp", function()
    return layers.GatedMlp(config.hidden_size, config.intermediate_size, activation, config.mlp_bias)
  end)
end

--- A cache for forward(); it grows as tokens come.
---@return KVCache
function Decoder:cache(options) return Cache.new(#self.model.layers, options) end

--- What the layers get of tokens i64 [n, t]: [n, t, hidden].
function Decoder:embed(tokens) return self.model.embed_tokens(tokens) end

--- Hidden states after the last norm: tokens i64 [n, t] to [n, t, hidden]. options as in forward(), and last: of how
-- many positions, the last ones, they are wanted, [n, last, hidden]; the last layer then does little more than their
-- work; places: i64 [m], where among the n * t tokens they are wanted, [1, m, hidden]; embeddings: [n, t, hidden], in
-- place of those of the tokens; axes i64 [3, n, t] and sections: positions of three kinds, as layers.turns_by_axes()
-- has them; prefix bool [n, t]: tokens that all see each other, in the first call of a cache or without one; taps: a
-- table in which numbers of layers, true at first, get the stream [n, t, hidden]
-- behind them.
function Decoder:hidden(tokens, options)
  local last = layers.last(self.family.name, options)
  local cache = options and options.cache
  local past, t = cache and cache.past or 0, tokens.shape[2]
  cache = cache or Cache.new(0)
  local cu_seqlens = options and options.cu_seqlens
  local mask, positions
  if cu_seqlens then
    positions = layers.packed_positions(self.family.name, tokens, options)
  elseif layers.is_visibility(options) then
    mask, positions = layers.visibility(self.family.name, tokens, options)
    if self.bias then error(self.family.name .. ": mask: biased scores go with a mask [n, t] alone", 0) end
  else
    mask, positions = cache:see(tokens, options and options.mask)
  end
  local whole = options and options.prefix and past == 0
  if whole then
    mask = layers.prefix_mask(self.family.name, tokens, options, mask)
    if self.bias then error(self.family.name .. ": prefix: biased scores go with none", 0) end
  end
  local axes = options and options.axes
  local function turns(by)
    if axes then return layers.turns_by_axes(by, axes, options.sections) end
    local cos, sin = by:table(cu_seqlens and options.longest or past + t, tokens.device)
    if not positions then return cos:narrow(0, past, t), sin:narrow(0, past, t) end
    return ty.embedding(cos, positions):unsqueeze(1), ty.embedding(sin, positions):unsqueeze(1)
  end
  local cos, sin = turns(self.rotary)
  local local_cos, local_sin
  if self.local_rotary then local_cos, local_sin = turns(self.local_rotary) end
  local bias = self.bias and self:bias(mask and (mask:to("i64"):cumsum(1) - 1):clamp(0) or cu_seqlens and positions
    or ty.arange(past + t, { device = tokens.device }):unsqueeze(0), mask)
  if mask then mask = mask.ndim == 3 and mask:unsqueeze(1) or mask:unsqueeze(1):unsqueeze(1) end
  local at = { cos = cos, sin = sin, local_cos = local_cos, local_sin = local_sin, mask = mask, bias = bias,
    causal = not whole, interleaved = self.interleaved or false,
    cu_seqlens = cu_seqlens, cache = cache.layers > 0 and cache or nil,
    tokens = tokens, record = options and options.record, taps = options and options.taps }
  local stream, more = layers.through(self.model.layers,
    options and options.embeddings or self:embed(tokens), at, options and options.checkpoint, last,
    options and options.places)
  cache:advance(t)
  local _, x = layers.add_norm(self.model.norm, stream, more)
  return x
end

function Decoder:tied() return not self.lm_head and self.model.embed_tokens or nil end

--- Logits of hidden states.
function Decoder:head(hidden)
  return self.lm_head and self.lm_head(hidden) or ty.linear(hidden, self.model.embed_tokens.weight)
end
M.head = Decoder.head

--- tokens i64 [n, t] to logits [n, t, vocabulary]. options:
--   cache       from model:cache(), without gradients: the tokens follow those of the calls before
--   mask        bool or i64 [n, t], 0: padding, on the left; or bool [n, t, t]: which tokens each of them sees, besides
--               that none sees what follows it. This goes with positions, and not with a cache
--   positions   i64 [n, t]: with such a mask or with cu_seqlens, the position of each token
--   cu_seqlens  i64 [sequences + 1]: where sequences packed into tokens [1, n] begin and end, from 0 to n; none
--               sees another, and positions count from 0 in each, unless they are given
--   longest     the most tokens that one of them may have, or positions above all that are given (default n)
--   checkpoint  true: the backward pass runs each layer again, whose results then need not be kept
---@param tokens Tensor
---@param options? {cache?: KVCache, mask?: Tensor, positions?: Tensor, cu_seqlens?: Tensor, longest?: integer,
-- checkpoint?: boolean}
---@return Tensor logits
function Decoder:forward(tokens, options) return self:head(self:hidden(tokens, options)) end

--- A name of a parameter in the family's files for ours (from 1 to 2) or the other way round.
function M.renamed(spec, name, from, to)
  for _, pair in ipairs(spec.names or {}) do
    if name:sub(1, #pair[from]) == pair[from] then return pair[to] .. name:sub(#pair[from] + 1) end
  end
  return name
end

--- A family. spec: name, model_type, architecture, fields (more config keys), layer(config, i), check(config), norm(
-- config) (the last norm, an RMSNorm without it), rotary(who, config) (positions, and those of layers that have some
-- of their own), names (of files: pairs of the beginnings of a name, ours and the published one).
function M.define(spec)
  local class = nn.module(spec.name, Decoder)
  class.family, class.model_type, class.architecture = spec, spec.model_type, spec.architecture
  if spec.names then
    --- Renames one published name to ours.
    function class:rename(name) return M.renamed(spec, name, 2, 1) end

    --- The tensors by transformers' names.
    function class:published_state()
      local state = {}
      for name, t in pairs(self:state_dict()) do state[M.renamed(spec, name, 1, 2)] = t end
      return state
    end
  end
  return class
end

return M
