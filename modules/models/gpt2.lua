--- GPT-2, with the parameter names of the public checkpoints (wte.weight, h.0.attn.c_attn.weight, ...). Radford et al.
-- 2019, "Language Models are Unsupervised Multitask Learners".
local ty = require "tycho"
local Cache = require "tycho.models.cache"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"
local LanguageModel = require "tycho.models.model"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter

-- x [..., inputs] times weight [inputs, outputs] plus bias: the public checkpoints keep these weights untransposed.
local Conv1D = nn.module "Conv1D"
Conv1D.fan_in_fan_out = true

function Conv1D:init(inputs, outputs, std)
  self.weight = parameter({ inputs, outputs }, function(t) nn.init.normal(t, 0, std) end)
  self.bias = parameter({ outputs }, nn.init.zeros)
end

-- Block-quantized weights are [outputs, inputs]: blocks lie along the inputs, as GGUF files have them.
function Conv1D:forward(x)
  local w = self.weight
  return ty.linear(x, w:is_floating_point() and w:transpose(0, 1) or w, self.bias)
end

function Conv1D:describe()
  local shape = self.weight.shape
  local inputs, outputs = shape[1], shape[2]
  if not self.weight:is_floating_point() then inputs, outputs = outputs, inputs end
  return ("%d, %d"):format(inputs, outputs)
end

local Attention = nn.module "Attention"

function Attention:init(o, layer)
  self.heads, self.scale = o.heads, 0
  if not o.scale_attn_weights then self.scale = 1 end
  if o.scale_attn_by_inverse_layer_idx then
    self.scale = (o.scale_attn_weights and 1 / math.sqrt(o.width // o.heads) or 1) / layer
  end
  self.c_attn = Conv1D(o.width, 3 * o.width, 0.02)
  self.c_proj = Conv1D(o.width, o.width, 0.02 / math.sqrt(2 * o.layers))
  self.dropout, self.p = nn.Dropout(o.dropout), o.attention_dropout
end

function Attention:forward(x, at)
  local shape = x.shape
  local qkv = self.c_attn(x):reshape(shape[1], shape[2], 3, self.heads, -1):permute(2, 0, 3, 1, 4)
  local q = layers.tail(qkv:select(0, 0), 2, layers.query_count(at))
  local y = layers.attend(q, qkv:select(0, 1), qkv:select(0, 2), at, self.scale, -1, self.p, self.training)
  return self.dropout(self.c_proj(layers.tail(y, 1, at.last)))
end

local Mlp = nn.module "Mlp"

function Mlp:init(o)
  self.c_fc = Conv1D(o.width, o.inner, 0.02)
  self.c_proj = Conv1D(o.inner, o.width, 0.02 / math.sqrt(2 * o.layers))
  self.dropout = nn.Dropout(o.dropout)
  self.approximate = o.activation == "gelu_tanh" and "tanh" or "none"
  self.activation = ty[o.activation == "gelu_tanh" and "gelu" or o.activation]
end

function Mlp:forward(x)
  local inner = self.c_fc(x)
  inner = self.activation == ty.gelu and ty.gelu(inner, self.approximate) or self.activation(inner)
  return self.dropout(self.c_proj(inner))
end

local Block = nn.module "GPT2Block"

function Block:init(o, layer)
  self.ln_1 = nn.LayerNorm(o.width, { eps = o.eps })
  self.attn = Attention(o, layer)
  self.ln_2 = nn.LayerNorm(o.width, { eps = o.eps })
  self.mlp = Mlp(o)
end

function Block:forward(x, _, at)
  x = layers.tail(x, 1, at.last) + self.attn(self.ln_1(x), at)
  return x + self.mlp(self.ln_2(x))
end

---@class GPT2: LanguageModel
local GPT2 = nn.module("GPT2", LanguageModel)
GPT2.model_type, GPT2.architecture = "gpt2", "GPT2LMHeadModel"
GPT2.prefixes = { "transformer." }
GPT2.published_prefix = "transformer." -- of the names of modules in transformers, which adapters go by

--- options: vocabulary (50257), context (1024), width (768), layers (12), heads (12), dropout (0, in training),
-- embedding_dropout (as dropout), attention_dropout (0, of the weights of attention), inner (4 * width), activation
-- ("gelu_new"), eps (1e-5), tie (true: the head is the token embedding). The defaults are the smallest published size,
-- 124M parameters.
function GPT2:init(options)
  local o = nn.options("GPT2", options, { vocabulary = 50257, context = 1024, width = 768, layers = 12, heads = 12,
    dropout = 0, embedding_dropout = nn.none, attention_dropout = 0, inner = nn.none, activation = "gelu_new",
    eps = 1e-5, tie = true, scale_attn_weights = true, scale_attn_by_inverse_layer_idx = false, config = nn.none },
    { vocabulary = "an integer >= 1", context = "an integer >= 1", width = "an integer >= 1",
      layers = "an integer in [1, 65536]", heads = "an integer >= 1", inner = "an integer >= 1", config = "a table" })
  if o.width % o.heads ~= 0 then error(("GPT2: heads %d must divide width %d"):format(o.heads, o.width), 3) end
  o.inner, o.embedding_dropout = o.inner or 4 * o.width, o.embedding_dropout or o.dropout
  self.config = o.config or { vocab_size = o.vocabulary, n_positions = o.context, n_embd = o.width, n_layer = o.layers,
    n_head = o.heads, n_inner = o.inner, activation_function = o.activation, layer_norm_epsilon = o.eps,
    resid_pdrop = o.dropout, embd_pdrop = o.embedding_dropout, attn_pdrop = o.attention_dropout,
    tie_word_embeddings = o.tie,
    scale_attn_weights = o.scale_attn_weights, scale_attn_by_inverse_layer_idx = o.scale_attn_by_inverse_layer_idx }
  o.activation = configs.activation("GPT2", o.activation, "activation_function")
  self.context, self.heads, self.width = o.context, o.heads, o.width
  self.wte = layers.embedding(o.vocabulary, o.width, 0.02)
  self.wpe = layers.embedding(o.context, o.width, 0.01)
  self.drop = nn.Dropout(o.embedding_dropout)
  self.h = nn.ModuleList {}
  for i = 1, o.layers do self.h:append(Block(o, i)) end
  self.ln_f = nn.LayerNorm(o.width, { eps = o.eps })
  self:make_head(o.width, self.config)
end

--- Makes what head() needs besides the body.
function GPT2:make_head(width, config) layers.make_head(self, width, config) end

--- The model of a published config.json.
function GPT2.from_config(class, given, state)
  local none = configs.none
  given = configs.untied(given, state, { "lm_head.weight" }, { "transformer.wte.weight", "wte.weight" })
  local c = configs.read("GPT2", given, {
    vocab_size = { "count" }, n_positions = { "count" }, n_embd = { "count" }, n_layer = { "few" },
    n_head = { "count" }, n_inner = { "count", none }, activation_function = { "text", "gelu_new" },
    layer_norm_epsilon = { "epsilon", 1e-5 }, resid_pdrop = { "share", 0.1 }, embd_pdrop = { "share", 0.1 },
    attn_pdrop = { "share", 0.1 }, scale_attn_weights = { "flag", true }, tie_word_embeddings = { "flag", true },
    scale_attn_by_inverse_layer_idx = { "flag", false }, reorder_and_upcast_attn = { "flag", false },
  })
  configs.divides("GPT2", c, "n_head", "n_embd")
  local model = class { vocabulary = c.vocab_size, context = c.n_positions, width = c.n_embd, layers = c.n_layer,
    heads = c.n_head, dropout = c.resid_pdrop, embedding_dropout = c.embd_pdrop, attention_dropout = c.attn_pdrop,
    inner = c.n_inner, activation = c.activation_function, eps = c.layer_norm_epsilon, tie = c.tie_word_embeddings,
    scale_attn_weights = c.scale_attn_weights, config = c,
    scale_attn_by_inverse_layer_idx = c.scale_attn_by_inverse_layer_idx }
  for name, module in model:named_modules() do
    local source = module.fan_in_fan_out and state and state[name .. ".weight"]
    if source and not source:is_floating_point() then -- makes room for codes, which lie the other way
      module.weight = module.weight:transpose(0, 1):detach():requires_grad_()
    end
  end
  return model
end

--- A cache for forward(). options: room (positions to begin with).
---@return KVCache
function GPT2:cache(options) return Cache.new(#self.h, options) end

--- Hidden states after the last norm: tokens i64 [n, t] to [n, t, width]. options as in forward(), and last as in
-- Decoder:hidden().
function GPT2:hidden(tokens, options)
  local last = layers.last("GPT2", options)
  local cache, t = options and options.cache or Cache.new(0), tokens.shape[2]
  local at, positions = layers.learnt_positions("GPT2", tokens, options, cache, self.context)
  local x = layers.through(self.h, self.drop(self.wte(tokens) + self.wpe(positions)), at,
    options and options.checkpoint, last)
  cache:advance(t)
  return self.ln_f(x)
end

function GPT2:tied() return not self.lm_head and self.wte or nil end

--- Logits of hidden states.
function GPT2:head(hidden)
  return self.lm_head and self.lm_head(hidden) or ty.linear(hidden, self.wte.weight)
end

--- tokens i64 [n, t] to logits [n, t, vocabulary]. options: cache (from model:cache(), without gradients: the tokens
-- follow those of the calls before), mask (bool or i64 [n, t], 0: padding, on the left), cu_seqlens, longest and
-- checkpoint (as Decoder:forward() has them).
---@param tokens Tensor
---@param options? {cache?: KVCache, mask?: Tensor, cu_seqlens?: Tensor, longest?: integer, checkpoint?: boolean}
---@return Tensor logits
function GPT2:forward(tokens, options) return self:head(self:hidden(tokens, options)) end

return GPT2
