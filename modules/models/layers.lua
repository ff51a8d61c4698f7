--- The blocks that the decoders share: attention with grouped heads and rotary positions, the gated feed-forward
-- network, the layer of both. What a family does differently is an option here and named in its file.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local configs = require "tycho.models.config"

local nn = ty.nn
local M = {}

--- A linear layer as published checkpoints initialise it: normal with `std`, no bias unless asked for.
function M.linear(inputs, outputs, bias, std)
  local layer = nn.Linear(inputs, outputs, { bias = bias or false })
  if layer.weight.device ~= "meta" then
    nn.init.normal(layer.weight, 0, std or 0.02)
    if bias then nn.init.zeros(layer.bias) end
  end
  return layer
end

--- Token embeddings: normal with `std`. pad: the token that stands for nothing and gets no gradient.
function M.embedding(count, width, std, pad)
  pad = math.type(pad) == "integer" and pad >= 0 and pad < count and pad or nil
  local layer = nn.Embedding(count, width, { padding_index = pad })
  if layer.weight.device ~= "meta" then nn.init.normal(layer.weight, 0, std or 0.02) end
  return layer
end

--- Gives a model a layer of its own for the logits, `lm_head`, unless the embeddings of its tokens serve for them.
function M.make_head(model, width, config, std)
  if config.tie_word_embeddings then
    model.ignored_too = { "^lm_head%.weight$" } -- some files have it twice
  else
    model.lm_head = M.linear(width, config.vocab_size, false, std)
  end
end

-- Activations that ty.linear does not have, by their names in config.json.
local apart = { quick_gelu = function(x) return ty.glu(x, x * 1.702, "sigmoid") end, tanh = ty.tanh }

--- The name of an activation for activated(), of a config's key: one of config.activation(), quick_gelu or tanh.
function M.activation(who, config, key)
  return apart[config[key]] and config[key] or configs.activation(who, config[key], key, apart)
end

--- The activation of what a linear layer makes of x.
function M.activated(layer, x, activation)
  local fn = apart[activation]
  if fn then return fn(layer(x)) end
  return layer(x, nil, activation)
end

--- A linear layer that published files call `dense`, with an activation (nil: none).
local Dense = nn.module "Dense"
M.Dense = Dense

function Dense:init(inputs, outputs, activation, std)
  self.dense = M.linear(inputs, outputs, true, std)
  self.activation = activation or "none"
end

function Dense:forward(x) return M.activated(self.dense, x, self.activation) end

--- Raises unless tokens are i64 [n, t] and options a table or nil.
---@param who string
---@param tokens Tensor
---@param options? table
function M.check_tokens(who, tokens, options)
  if not ty.is_tensor(tokens) or tokens.ndim ~= 2 or tokens.dtype ~= "i64" then
    arguments.fail("%s: tokens: expected an i64 tensor [n, t], got %s", who, arguments.describe(tokens))
  end
  arguments.expect(who, "options", options, "a table or nil")
end

--- Hidden states after the last norm of a model that sees, as Decoder:hidden() has them: where options have pictures or
-- features, its language model gets embed(model, tokens, options) in the place of the tokens' embeddings.
---@param who string  for errors
---@param model Module
---@param tokens Tensor
---@param options? table
---@param embed fun(model: Module, tokens: Tensor, options: table): Tensor
---@return Tensor hidden
function M.hidden_of_seen(who, model, tokens, options, embed)
  M.check_tokens(who, tokens, options)
  if not (options and (options.pictures or options.features)) then
    return model.language_model:hidden(tokens, options)
  end
  local with = {}
  for key, value in pairs(options) do with[key] = value end
  with.embeddings = embed(model, tokens, options)
  return model.language_model:hidden(tokens, with)
end

--- Targets i64 [n, t] of tokens [n, t] of a model that sees: those one place on, but for image tokens and, by the
-- option mask, padding, which are not counted (-100).
---@param tokens Tensor
---@param image integer|integer[]  the image token, or several
---@param options? table
---@return Tensor targets
function M.targets_of_seen(tokens, image, options)
  if options and options.cu_seqlens then error("loss: packed sequences need their targets", 3) end
  local n, t = tokens.shape[1], tokens.shape[2]
  local targets = tokens:narrow(1, 1, t - 1)
  local hidden
  for _, token in ipairs(type(image) == "table" and image or { image }) do
    hidden = hidden and hidden:logical_or(targets:eq(token)) or targets:eq(token)
  end
  if options and options.mask and options.mask.ndim == 2 then
    hidden = hidden:logical_or(options.mask:narrow(1, 1, t - 1):to("bool"):logical_not())
  end
  local none = ty.full({ n, 1 }, -100, { dtype = "i64", device = tokens.device })
  return ty.concat({ targets:masked_fill(hidden, -100), none }, 1)
end

--- Cosines and sines [n, 1, t, pairs] of tokens whose positions are of three kinds, by time, row and column, i64 [3, n,
-- t]: the first sections[1] pairs of a head turn by the first, and so on. Wang et al. 2024 (Qwen2-VL), M-RoPE.
---@param by table  a rotary of tycho.models.rotary
---@param axes Tensor
---@param sections integer[]
---@return Tensor cos
---@return Tensor sin
function M.turns_by_axes(by, axes, sections)
  local cos, sin = by:table(axes:numel() > 0 and axes:max():item() + 1 or 1, axes.device)
  local function of(list)
    local parts, at = {}, 0
    for i, count in ipairs(sections) do
      parts[i] = ty.embedding(list:narrow(1, at, count):contiguous(), axes[i - 1])
      at = at + count
    end
    return ty.concat(parts, -1):unsqueeze(1)
  end
  return of(cos), of(sin)
end

--- The last `count` places of x along a dimension; all of them without a count, or if there are no more.
function M.tail(x, dim, count)
  if not count then return x end
  local size = x.shape[dim < 0 and x.ndim + dim + 1 or dim + 1]
  if count >= size then return x end
  return x:narrow(dim, size - count, count)
end

--- Reads the option `last` of hidden(): the number of last positions that are wanted, nil for all.
function M.last(who, options)
  local last = options and options.last
  if last ~= nil and (not math.tointeger(last) or last < 1) then
    error(("%s: last must be a positive integer, got %s"):format(who, tostring(last)), 3)
  end
  return last
end

--- The positions [1, n] of tokens [1, n] that are packed sequences, which begin and end at cu_seqlens i64 [sequences +
-- 1] (from 0 to n): they count from 0 in each, unless the option positions, i64 [1, n], says what they are, where some
-- tokens were left out say; `longest` is then above all of them.
function M.packed_positions(who, tokens, options)
  local cu, shape = options.cu_seqlens, tokens.shape
  if #shape ~= 2 or shape[1] ~= 1 then
    error(("%s: tokens: expected [1, n] with cu_seqlens, got [%s]"):format(who, table.concat(shape, ", ")), 0)
  end
  if options.cache or options.mask then error(who .. ": cu_seqlens goes with neither a cache nor a mask", 0) end
  local n, count, given = shape[2], cu.shape[1] - 1, options.positions
  if given ~= nil then
    if not ty.is_tensor(given) or given.dtype ~= "i64" or given.ndim ~= 2 or given.shape[1] ~= 1
      or given.shape[2] ~= n then
      arguments.fail("%s: positions: expected i64 [1, %d] with cu_seqlens, got %s", who, n, arguments.describe(given))
    end
    return given:to { device = tokens.device }
  end
  local lengths = cu:narrow(0, 1, count) - cu:narrow(0, 0, count)
  -- At each begin the length before it is taken off; an empty sequence at the end begins at n.
  local jumps = ty.zeros({ n + 1 }, { dtype = "i64", device = tokens.device })
  jumps = jumps:index_add(0, cu:narrow(0, 1, count), lengths)
  return (ty.arange(n, { device = tokens.device }) - jumps:cumsum(0):narrow(0, 0, n)):unsqueeze(0)
end

--- What layers of a model with a table of `context` positions are told of tokens [n, t] behind those of a cache, and
-- the positions of these. options: mask, cu_seqlens and longest, as Decoder:forward() has them.
function M.learnt_positions(who, tokens, options, cache, context)
  local past, t = cache.past, tokens.shape[2]
  local cu_seqlens = options and options.cu_seqlens
  local longest = cu_seqlens and options.longest or past + t
  if longest > context then error(("%s: %d tokens, but there is room for %d"):format(who, longest, context), 4) end
  local mask, positions
  if cu_seqlens then
    positions = M.packed_positions(who, tokens, options)
  else
    mask, positions = cache:see(tokens, options and options.mask)
  end
  return { mask = mask and mask:unsqueeze(1):unsqueeze(1), cu_seqlens = cu_seqlens,
    cache = cache.layers > 0 and cache or nil },
    positions or ty.arange(past, past + t, { device = tokens.device })
end

--- Whether the mask among the options of a model says of each token which others it sees.
function M.is_visibility(options)
  local mask = options and options.mask
  return mask ~= nil and ty.is_tensor(mask) and mask.ndim == 3
end

--- Reads such a mask, bool [n, t, t], and the positions i64 [n, t] that go with it, of tokens [n, t].
function M.visibility(who, tokens, options)
  local mask, positions, shape = options.mask, options.positions, tokens.shape
  local n, t = shape[1], shape[2]
  if mask.dtype ~= "bool" or mask.shape[1] ~= n or mask.shape[2] ~= t or mask.shape[3] ~= t then
    arguments.fail("%s: mask: expected bool [n, t] or [%d, %d, %d], got %s", who, n, t, t, arguments.describe(mask))
  end
  if not ty.is_tensor(positions) or positions.dtype ~= "i64" or positions.ndim ~= 2 or positions.shape[1] ~= n
    or positions.shape[2] ~= t then
    arguments.fail("%s: positions: expected i64 [%d, %d] with a mask [n, t, t], got %s", who, n, t,
      arguments.describe(positions))
  end
  if options.cache then error(who .. ": a mask [n, t, t] does not go with a cache", 0) end
  return mask, positions
end

--- Which tokens each of tokens [n, t] sees, bool [n, t, t], where those of the option prefix, bool [n, t], see each
-- other and all others what is before them. mask: bool [n, t] or nil, padding that nobody sees.
function M.prefix_mask(who, tokens, options, mask)
  local prefix, n, t = options.prefix, tokens.shape[1], tokens.shape[2]
  if not ty.is_tensor(prefix) or prefix.ndim ~= 2 or prefix.shape[1] ~= n or prefix.shape[2] ~= t then
    arguments.fail("%s: prefix: expected bool [%d, %d], got %s", who, n, t, arguments.describe(prefix))
  elseif options.cu_seqlens or mask and mask.ndim ~= 2 then
    arguments.fail("%s: prefix: expected neither cu_seqlens nor a mask [n, t, t] beside it", who)
  end
  prefix = prefix:to "bool"
  local places = ty.arange(t, { device = tokens.device })
  local seen = places:unsqueeze(0):le(places:unsqueeze(1)):unsqueeze(0)
  seen = seen:logical_or(prefix:unsqueeze(2):logical_and(prefix:unsqueeze(1)))
  return mask and seen:logical_and(mask:unsqueeze(1)) or seen
end

--- What is wanted of x [b, t, width]: at the places at.places of all tokens, [1, places, width], or the last at.last
-- positions; all of it where neither is given.
function M.wanted(x, at)
  if at.places then return x:flatten(0, 1):index_select(0, at.places):unsqueeze(0) end
  return M.tail(x, 1, at.last)
end

--- The number of last positions that need queries in attention, nil for all. The wanted positions are enough, unless
-- the cache measures what all queries attend to, or packed sequences count every position.
function M.query_count(at)
  if at.cu_seqlens or at.cache and at.cache.attend then return nil end
  return at.last
end

--- Causal attention of queries [b, h, t, d] (or of the last ones alone) to the keys and values [b, hkv, t, d] of the
-- same tokens and those in the cache, which gets them: [b, t, h * d]. at: as Attention:forward() has it; scale, window,
-- dropout (of the weights, in training) and softcap as in nn.attention().
function M.attend(q, k, v, at, scale, window, dropout, training, softcap)
  local cache = at.cache
  if cache and cache.attend then
    if at.bias then error("cache: biased scores of attention do not go with a cache that attends itself", 0) end
    return nn.join_heads(cache:attend(at.layer, q, k, v, scale, window, softcap))
  end
  if cache then k, v = cache:append(at.layer, k, v) end
  local mask = at.bias or at.mask
  if mask and mask.shape[3] > 1 then mask = M.tail(mask, 2, q.shape[3]) end
  local causal = at.causal ~= false
  if not causal and window and window >= 0 then
    if window + 1 < k.shape[3] then error("prefix: more tokens than a layer's window sees are not supported", 0) end
    window = -1
  end
  return nn.attention(q, k, v, { mask = mask, causal = causal, scale = scale, window = window,
    cu_seqlens = at.cu_seqlens, dropout = training and dropout or 0, softcap = softcap })
end

--- Causal attention. options: hidden, heads, kv_heads, width (of a head), qkv_bias, out_bias, norm_eps (norms of q and
-- k, of each head as Qwen3 has them; with whole_norms of all heads at once, as OLMo 2), norm(width, eps) (makes these;
-- nil: RMSNorms), window (how many tokens back a token sees, itself included), dropout (of the weights, in training),
-- fused (one layer qkv_proj in place of three), scale and softcap (of the scores), local_positions (cos and sin are
-- those of the layers that see a window).
local Attention = nn.module "Attention"
M.Attention = Attention

function Attention:init(o)
  self.heads, self.kv_heads, self.window = o.heads, o.kv_heads, o.window and o.window - 1 or -1
  self.dropout, self.scale, self.softcap = o.dropout or 0, o.scale or 0, o.softcap or nil
  self.local_positions = o.local_positions or false
  if o.fused then
    self.qkv_proj = M.linear(o.hidden, (o.heads + 2 * o.kv_heads) * o.width, o.qkv_bias)
  else
    self.q_proj = M.linear(o.hidden, o.heads * o.width, o.qkv_bias)
    self.k_proj = M.linear(o.hidden, o.kv_heads * o.width, o.qkv_bias)
    self.v_proj = M.linear(o.hidden, o.kv_heads * o.width, o.qkv_bias)
  end
  self.o_proj = M.linear(o.heads * o.width, o.hidden, o.out_bias)
  if o.norm_eps then
    self.whole_norms = o.whole_norms or false
    local norm = o.norm or function(width, eps) return nn.RMSNorm(width, { eps = eps }) end
    self.q_norm = norm(self.whole_norms and o.heads * o.width or o.width, o.norm_eps)
    self.k_norm = norm(self.whole_norms and o.kv_heads * o.width or o.width, o.norm_eps)
  end
end

-- Queries of the last `count` positions (nil: of all), keys and values of all, [b, heads, t, width] each.
local function project(self, x, count)
  local q, k, v
  if self.qkv_proj then
    local all, heads = self.qkv_proj(x), self.heads + 2 * self.kv_heads
    local width = all.shape[3] // heads
    local own, shared = self.heads * width, self.kv_heads * width
    q, k, v = all:narrow(-1, 0, own), all:narrow(-1, own, shared), all:narrow(-1, own + shared, shared)
    q = M.tail(q, 1, count)
  else
    q, k, v = self.q_proj(M.tail(x, 1, count)), self.k_proj(x), self.v_proj(x)
  end
  if self.q_norm and self.whole_norms then q, k = self.q_norm(q), self.k_norm(k) end
  q, k, v = nn.split_heads(q, self.heads), nn.split_heads(k, self.kv_heads), nn.split_heads(v, self.kv_heads)
  if self.q_norm and not self.whole_norms then q, k = self.q_norm(q), self.k_norm(k) end
  return q, k, v
end

--- at: cos, sin (of the tokens' positions), local_cos, local_sin (those of layers with local_positions), interleaved
-- (pairs are neighbours, not halves), mask (bool or nil), bias (nil: what is added to the scores, the mask
-- included), tokens (the ids), cache and layer (or nil), cu_seqlens (or nil), last and places (where the result is
-- wanted, as wanted() has it).
function Attention:forward(x, at)
  local queries = M.query_count(at)
  local q, k, v = project(self, x, queries)
  local cos, sin = at.cos, at.sin
  if self.local_positions then cos, sin = at.local_cos, at.local_sin end
  q = ty.rotary(q, M.tail(cos, -2, queries), M.tail(sin, -2, queries), at.interleaved)
  k = ty.rotary(k, cos, sin, at.interleaved)
  local y = M.attend(q, k, v, at, self.scale, self.window, self.dropout, self.training, self.softcap)
  return self.o_proj(M.wanted(y, at))
end

--- The weights that attention gives to each pair of x's tokens, [b, heads, t, t], for who wants to look at them: the
-- queries' in rows. at: as forward() has it, without a cache.
function Attention:weights(x, at)
  local q, k = project(self, x)
  local cos, sin = at.cos, at.sin
  if self.local_positions then cos, sin = at.local_cos, at.local_sin end
  q, k = ty.rotary(q, cos, sin, at.interleaved), ty.rotary(k, cos, sin, at.interleaved)
  -- Values that are the unit vectors give the weights themselves.
  local t = x.shape[2]
  local one = ty.eye(t, { dtype = k.dtype, device = k.device }):expand(k.shape[1], k.shape[2], t, t)
  return (ty.scaled_dot_product_attention(q, k, one, at.bias or at.mask, true, self.scale, self.window, 0,
    at.cu_seqlens, nil, self.softcap))
end

--- down(activation(gate(x)) * up(x)). Shazeer 2020, "GLU Variants Improve Transformer".
local GatedMlp = nn.module "GatedMlp"
M.GatedMlp = GatedMlp

function GatedMlp:init(hidden, inner, activation, bias)
  self.gate_proj = M.linear(hidden, inner, bias)
  self.up_proj = M.linear(hidden, inner, bias)
  self.down_proj = M.linear(inner, hidden, bias)
  self.activation = activation
end

function GatedMlp:forward(x)
  return self.down_proj(ty.glu(self.up_proj(x), self.gate_proj(x), self.activation))
end

--- Attention and a feed-forward network, each after a norm. The sum with the residual is taken together with the norm
-- that follows it, so a layer gets the stream and what is still to be added to it, and returns the same.
local DecoderLayer = nn.module "DecoderLayer"
M.DecoderLayer = DecoderLayer

--- attention: options of Attention; make_mlp() makes the module `mlp_name`.
function DecoderLayer:init(attention, eps, mlp_name, make_mlp)
  self.self_attn = Attention(attention)
  self.mlp_name = mlp_name
  self[mlp_name] = make_mlp()
  self.input_layernorm = nn.RMSNorm(attention.hidden, { eps = eps })
  self.post_attention_layernorm = nn.RMSNorm(attention.hidden, { eps = eps })
end

--- Adds `more` (nil: nothing) to the stream [b, t, hidden] and takes the norm of the sum. Returns the sum and its norm.
function M.add_norm(norm, stream, more)
  if not more then return stream, norm(stream) end
  return ty.add_rms_norm(more, stream, norm.weight, norm.eps, 0, false)
end

--- stream, more [b, t, hidden]; more may be nil. Both are of the wanted places alone afterwards.
function DecoderLayer:forward(stream, more, at)
  local x
  stream, x = M.add_norm(self.input_layernorm, stream, more)
  stream, x = M.add_norm(self.post_attention_layernorm, M.wanted(stream, at), self.self_attn(x, at))
  return stream, self[self.mlp_name](x, at)
end

--- Sends the stream [b, t, hidden] through a list of layers such as DecoderLayer, or such as add to the stream
-- themselves and return it alone. checkpoint, last and places: the options of hidden(); at.taps: its option, too.
-- Returns the stream and what is still to be added to it, or nil.
function M.through(list, stream, at, checkpoint, last, places)
  local more
  for i, layer in ipairs(list) do
    at.layer = i
    if checkpoint then -- runs layers again when `at` has been changed, so that none may cut its result short
      stream, more = ty.checkpoint(layer, stream, more, at)
    else
      at.last = i == #list and last or nil
      -- Only this kind of layer looks at places.
      at.places = i == #list and getmetatable(layer) == DecoderLayer and places or nil
      stream, more = layer(stream, more, at)
      if at.places then return stream, more end
    end
    if at.taps and at.taps[i] then at.taps[i] = more and stream + more or stream end
  end
  local wanted = { last = last, places = places }
  return M.wanted(stream, wanted), more and M.wanted(more, wanted)
end

return M
