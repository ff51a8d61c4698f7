--- GLM: one transformer for filling blanks and for going on, whose context sees itself both ways and whose generated
-- part is causal. Du et al. 2022, "GLM: General Language Model Pretraining with Autoregressive Blank Infilling"; Zeng
-- et al. 2023, "GLM-130B: An Open Bilingual Pre-trained Model": rotary positions, gated GELU, DeepNorm (section 2.1).
-- Parameter names as in the published ChatGLM-6B, whose layers are these.
--
--     local model = models.GLM { vocab_size = 1000, hidden_size = 64, inner_hidden_size = 176, num_layers = 4,
--       num_attention_heads = 4 }
--     local logits = model(tokens, { prefix = ty.tensor { 10, 7 }, positions = positions })
local ty = require "tycho"
local configs = require "tycho.models.config"
local rotary = require "tycho.models.rotary"

local nn = ty.nn
local init = nn.init

local fields = {
  vocab_size = { "count" }, hidden_size = { "count" }, inner_hidden_size = { "count" }, num_layers = { "few" },
  num_attention_heads = { "count" }, max_sequence_length = { "count", 2048 }, layernorm_epsilon = { "epsilon", 1e-5 },
  norm = { "text", "deepnorm" }, rope_theta = { "number", 10000 },
}

-- Where a layer normalizes, what the stream is multiplied by where a branch joins it, and the gain of initial weights.
local orders = {
  deepnorm = { post = true, scaled = true }, post = { post = true }, pre = {}, sandwich = { sandwich = true },
}

local function norm(config) return nn.LayerNorm(config.hidden_size, { eps = config.layernorm_epsilon }) end

local Attention = nn.module "GLMAttention"

function Attention:init(config)
  self.heads = config.num_attention_heads
  self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
  self.dense = nn.Linear(config.hidden_size, config.hidden_size)
end

function Attention:forward(x, at)
  local b, t = x.shape[1], x.shape[2]
  -- The outputs are those of a head one after the other: its query, its key, its value.
  local all = self.query_key_value(x):reshape(b, t, self.heads, 3, -1):permute { 3, 0, 2, 1, 4 }
  local q, k = ty.rotary(all:select(0, 0), at.cos, at.sin), ty.rotary(all:select(0, 1), at.cos, at.sin)
  local y = ty.scaled_dot_product_attention(q, k, all:select(0, 2), { mask = at.mask, causal = at.mask == nil })
  return self.dense(y:transpose(1, 2):reshape(b, t, -1))
end

local Mlp = nn.module "GLMMLP"

function Mlp:init(config)
  self.dense_h_to_4h = nn.Linear(config.hidden_size, 2 * config.inner_hidden_size)
  self.dense_4h_to_h = nn.Linear(config.inner_hidden_size, config.hidden_size)
end

function Mlp:forward(x)
  local both = self.dense_h_to_4h(x)
  local inner = both.shape[#both.shape] // 2
  return self.dense_4h_to_h(both:narrow(-1, 0, inner):gelu() * both:narrow(-1, inner, inner))
end

local Layer = nn.module "GLMLayer"

function Layer:init(config)
  local order = orders[config.norm]
  self.post, self.sandwich = order.post, order.sandwich
  self.alpha = order.scaled and (2 * config.num_layers) ^ 0.5 or 1
  self.input_layernorm, self.attention = norm(config), Attention(config)
  self.post_attention_layernorm, self.mlp = norm(config), Mlp(config)
  if self.sandwich then self.third_layernorm, self.fourth_layernorm = norm(config), norm(config) end
end

function Layer:forward(x, at)
  if self.post then
    -- LN(alpha x + f(x)): each norm is that of the branch before, the first one that of the embeddings.
    x = self.input_layernorm(x)
    x = self.post_attention_layernorm(x * self.alpha + self.attention(x, at))
    return x * self.alpha + self.mlp(x)
  end
  local y = self.attention(self.input_layernorm(x), at)
  x = x + (self.sandwich and self.third_layernorm(y) or y)
  y = self.mlp(self.post_attention_layernorm(x))
  return x + (self.sandwich and self.fourth_layernorm(y) or y)
end

local Body = nn.module "GLMTransformer"

function Body:init(config)
  self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
  self.layers = nn.ModuleList {}
  for _ = 1, config.num_layers do self.layers:append(Layer(config)) end
  self.final_layernorm = norm(config)
end

--- A GLM.
---@class GLM: Module
local GLM = nn.module "GLM"

GLM.model_type = "glm"

-- Normal weights with Glorot's variance for the rows [first, first + count) of a layer, times a gain.
local function xavier(linear, gain, first, count)
  local rows = linear.weight:narrow(0, first or 0, count or linear.weight.shape[1])
  init.normal(rows, 0, gain * (2 / (rows.shape[1] + rows.shape[2])) ^ 0.5)
end

--- config: vocab_size, hidden_size, inner_hidden_size, num_layers, num_attention_heads; max_sequence_length (2048),
-- layernorm_epsilon (1e-5), rope_theta (10000) and norm: "deepnorm" (LN(alpha x + f(x)), alpha the root of twice the
-- layers; values, outputs of attention and feed-forward begin smaller by as much), and to compare with "post" (alpha
-- 1), "pre" and "sandwich" (norms before and after a branch; Ding et al. 2021, "CogView").
---@param config table
function GLM:init(config)
  config = configs.read("GLM", config, fields)
  if not orders[config.norm] then
    error(('GLM: config key \'norm\': expected "deepnorm", "post", "pre" or "sandwich", got "%s"'):format(
      config.norm), 0)
  end
  configs.divides("GLM", config, "num_attention_heads", "hidden_size")
  self.config, self.context = config, config.max_sequence_length
  local width = config.hidden_size // config.num_attention_heads
  self.rotary = rotary.new("GLM", { rope_theta = config.rope_theta,
    max_position_embeddings = config.max_sequence_length }, width)
  self.transformer = Body(config)
  self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, { bias = false })
  local beta = orders[config.norm].scaled and (2 * config.num_layers) ^ -0.5 or 1
  ty.no_grad(function()
    init.normal(self.transformer.word_embeddings.weight, 0, 0.02)
    init.normal(self.lm_head.weight, 0, 0.02)
    for _, layer in ipairs(self.transformer.layers) do
      local qkv, h = layer.attention.query_key_value, config.hidden_size
      for head = 0, config.num_attention_heads - 1 do
        for part = 0, 2 do -- as if each of the three were a square matrix
          local rows = qkv.weight:narrow(0, (3 * head + part) * width, width)
          init.normal(rows, 0, (part == 2 and beta or 1) * (1 / h) ^ 0.5)
        end
      end
      xavier(layer.attention.dense, beta)
      xavier(layer.mlp.dense_h_to_4h, beta, 0, config.inner_hidden_size)
      xavier(layer.mlp.dense_h_to_4h, beta, config.inner_hidden_size, config.inner_hidden_size)
      xavier(layer.mlp.dense_4h_to_h, beta)
      for _, linear in ipairs { qkv, layer.attention.dense, layer.mlp.dense_h_to_4h, layer.mlp.dense_4h_to_h } do
        linear.bias:zero_()
      end
    end
  end)
end

--- Which tokens see which: bool [n, 1, t, t], true where a query (row) sees a key: those not after it, and the first
-- prefix[i] tokens of row i.
---@param prefix Tensor  i64 [n]
---@param t integer
---@return Tensor
function GLM.mask(prefix, t)
  local place = ty.arange(t, { device = prefix.device })
  local causal = place:unsqueeze(0):le(place:unsqueeze(1)):reshape(1, 1, t, t)
  return causal:logical_or(place:reshape(1, 1, 1, t):lt(prefix:reshape(-1, 1, 1, 1)))
end

--- Hidden states after the last norm: tokens i64 [n, t] to [n, t, hidden]. options as in forward().
function GLM:hidden(tokens, options)
  options = options or {}
  local t = tokens.shape[2]
  if t > self.context then
    error(("GLM: tokens: expected at most %d positions, got %d"):format(self.context, t), 2)
  end
  local positions = options.positions
  local cos, sin = self.rotary:table(positions and self.context or t, tokens.device)
  if positions then
    cos, sin = ty.embedding(cos, positions):unsqueeze(1), ty.embedding(sin, positions):unsqueeze(1)
  else
    cos, sin = cos:narrow(0, 0, t), sin:narrow(0, 0, t)
  end
  local at = { cos = cos, sin = sin, mask = options.prefix and self.mask(options.prefix, t) or nil }
  local x = self.transformer.word_embeddings(tokens)
  for _, layer in ipairs(self.transformer.layers) do x = layer(x, at) end
  return self.transformer.final_layernorm(x)
end

--- tokens i64 [n, t] to logits [n, t, vocabulary]. options: prefix (i64 [n]: so many first tokens see one another, the
-- rest is causal; without it all are causal), positions (i64 [n, t], below max_sequence_length; 0, 1, ... without).
---@param tokens Tensor
---@param options? {prefix?: Tensor, positions?: Tensor}
---@return Tensor logits
function GLM:forward(tokens, options) return self.lm_head(self:hidden(tokens, options)) end

--- Mean cross entropy, in nats, of targets i64 [n, t] (-100: not counted). options as in forward().
---@param tokens Tensor
---@param targets Tensor
---@param options? table
---@return Tensor loss
function GLM:loss(tokens, targets, options)
  return nn.cross_entropy(self:forward(tokens, options):flatten(0, 1), targets:flatten())
end

return GLM
