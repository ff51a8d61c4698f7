--- What T5 and its encoder alone are made of: the config, attention with relative positions, blocks, stacks. Parameter
-- names as published.
local ty = require "tycho"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"

local nn = ty.nn
local M = {}

-- The bucket of a distance (key minus query): near distances have one each, far ones share buckets by logarithm.
local function bucket(distance, both_ways, count, max_distance)
  local first = 0
  if both_ways then
    count = count // 2
    if distance > 0 then first = count end
    distance = math.abs(distance)
  else
    distance = math.max(-distance, 0)
  end
  local exact = count // 2
  if distance < exact then return first + distance end
  local far = exact + math.floor(math.log(distance / exact) / math.log(max_distance / exact) * (count - exact))
  return first + math.min(far, count - 1)
end

-- Scores are not scaled; the weights are initialised for that. There is no dropout of the weights of attention.
local Attention = nn.module "T5Attention"

function Attention:init(config, options)
  local inner = config.num_heads * config.d_kv
  self.heads, self.both_ways = config.num_heads, options.both_ways
  self.q = layers.linear(config.d_model, inner, false, (config.d_model * config.d_kv) ^ -0.5)
  self.k = layers.linear(config.d_model, inner, false, config.d_model ^ -0.5)
  self.v = layers.linear(config.d_model, inner, false, config.d_model ^ -0.5)
  self.o = layers.linear(inner, config.d_model, false, inner ^ -0.5)
  if options.positions then
    self.buckets, self.max_distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    self.relative_attention_bias = layers.embedding(self.buckets, config.num_heads, config.d_model ^ -0.5)
  end
end

--- The bias of the scores of queries past .. past + t - 1 and keys 0 .. s - 1: [1, heads, t, s].
function Attention:positions(past, t, s)
  local list, least = {}, -(past + t - 1)
  for distance = least, s - 1 - past do
    list[#list + 1] = bucket(distance, self.both_ways, self.buckets, self.max_distance)
  end
  local device = self.relative_attention_bias.weight.device
  local on = { dtype = "i64", device = device }
  local by_distance = self.relative_attention_bias(ty.tensor(list, on))
  local index = ty.arange(s, on):unsqueeze(0) - ty.arange(past, past + t, 1, on):unsqueeze(1) - least
  return ty.embedding(by_distance, index):permute(2, 0, 1):unsqueeze(0)
end

-- memory: the tokens that x attends to (nil: x itself). kept: a table that holds the keys and values of the memory
-- after the first call. append(k, v): adds them to a cache and returns all.
function Attention:forward(x, memory, bias, kept, append)
  local k, v
  if kept and kept.k then
    k, v = kept.k, kept.v
  else
    memory = memory or x
    k, v = nn.split_heads(self.k(memory), self.heads), nn.split_heads(self.v(memory), self.heads)
    if kept then kept.k, kept.v = ty.unscoped(ty.clone, k), ty.unscoped(ty.clone, v) end
  end
  if append then k, v = append(k, v) end
  return self.o(nn.attention(self.q(x), k, v, { heads = self.heads, mask = bias, scale = 1 }))
end

local FeedForward = nn.module "T5FeedForward"

function FeedForward:init(config)
  local wide = config.d_model ^ -0.5
  local gated = config.feed_forward_proj:match "^gated%-(.*)$"
  if gated == "gelu" then gated = "gelu_new" end -- what version 1.1 means by it
  self.gated, self.activation = gated ~= nil, configs.activation("T5", gated or config.feed_forward_proj,
    "feed_forward_proj")
  if gated then
    self.wi_0 = layers.linear(config.d_model, config.d_ff, false, wide)
    self.wi_1 = layers.linear(config.d_model, config.d_ff, false, wide)
  else
    self.wi = layers.linear(config.d_model, config.d_ff, false, wide)
  end
  self.wo = layers.linear(config.d_ff, config.d_model, false, config.d_ff ^ -0.5)
end

function FeedForward:forward(x)
  if self.gated then return self.wo(ty.glu(self.wi_1(x), self.wi_0(x), self.activation)) end
  return self.wo(self.wi(x, nil, self.activation))
end

-- One part of a block: a norm, what `name` is, the sum.
local Part = nn.module "T5Part"

function Part:init(config, name, module)
  self.name = name
  self[name] = module
  self.layer_norm = nn.RMSNorm(config.d_model, { eps = config.layer_norm_epsilon })
  self.dropout = nn.Dropout(config.dropout_rate)
end

function Part:forward(x, ...) return x + self.dropout(self[self.name](self.layer_norm(x), ...)) end

local Block = nn.module "T5Block"

function Block:init(config, decoder, first)
  self.layer = nn.ModuleList {}
  self.layer:append(Part(config, "SelfAttention", Attention(config, { both_ways = not decoder, positions = first })))
  if decoder then self.layer:append(Part(config, "EncDecAttention", Attention(config, {}))) end
  self.layer:append(Part(config, "DenseReluDense", FeedForward(config)))
end

local Stack = nn.module "T5Stack"
M.Stack = Stack

function Stack:init(config, count, decoder)
  self.block = nn.ModuleList {}
  for i = 1, count do self.block:append(Block(config, decoder, i == 1)) end
  self.final_layer_norm = nn.RMSNorm(config.d_model, { eps = config.layer_norm_epsilon })
  self.dropout = nn.Dropout(config.dropout_rate)
end

--- The config of a T5. who: the class, for errors.
---@param who string
---@param config table
---@return table
function M.read(who, config)
  local none = configs.none
  local c = configs.read(who, config, {
    vocab_size = { "count" }, d_model = { "count" }, d_kv = { "count" }, d_ff = { "count" }, num_layers = { "few" },
    num_heads = { "count" }, num_decoder_layers = { "few", none },
    relative_attention_num_buckets = { "count", 32 }, relative_attention_max_distance = { "count", 128 },
    layer_norm_epsilon = { "epsilon", 1e-6 }, feed_forward_proj = { "text", "relu" }, dropout_rate = { "share", 0.1 },
    tie_word_embeddings = { "flag", true }, scale_decoder_outputs = { "flag", none },
    decoder_start_token_id = { "integer", 0 }, pad_token_id = { "integer", 0 }, dense_act_fn = { "text", none },
    is_gated_act = { "flag", none }, classifier_dropout = { "share", 0 },
  })
  if c.relative_attention_num_buckets < 4
    or c.relative_attention_max_distance <= c.relative_attention_num_buckets // 2 then
    error(("%s: relative_attention_num_buckets must be at least 4, got %d, and relative_attention_max_distance more "
      .. "than half of it, got %d"):format(who, c.relative_attention_num_buckets, c.relative_attention_max_distance),
      0)
  end
  c.num_decoder_layers = c.num_decoder_layers or c.num_layers
  return c
end

local function added_mask(mask, like)
  if not mask then return nil end
  mask = mask:to("bool"):unsqueeze(1):unsqueeze(1)
  return ty.zeros(mask.shape, { dtype = like.dtype, device = like.device })
    :masked_fill(mask:logical_not(), -math.huge)
end

local function add_mask(bias, mask) return mask and bias + mask or bias end

--- The hidden states [n, s, d_model] that a stack makes of embedded tokens [n, s, d_model]. mask: bool or i64 [n, s]
-- (0: padding) or nil.
---@return Tensor
function M.encode(stack, x, mask)
  local s = x.shape[2]
  x = stack.dropout(x)
  local bias = stack.block[1].layer[1].SelfAttention:positions(0, s, s)
  bias = add_mask(bias, added_mask(mask, bias))
  for _, block in ipairs(stack.block) do
    x = block.layer[1](x, nil, bias)
    x = block.layer[2](x)
  end
  return stack.dropout(stack.final_layer_norm(x))
end

return M
