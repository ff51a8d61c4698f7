--- Attention and the transformer's encoder layer, with PyTorch's parameter names.
local ty = require "tycho"
local base = require "tycho.nn.module"
local init = require "tycho.nn.initial"
local layers = require "tycho.nn.layers"
local masks = require "tycho.nn.masks"
local norms = require "tycho.nn.norms"
local options = require "tycho.nn.options"

local define = base.define
local is_tensor, fused_attention = ty.is_tensor, ty.scaled_dot_product_attention
local M = {}

--- The positions of x [b, t, heads * d] by heads: [b, heads, t, d].
---@param x Tensor
---@param heads integer
---@return Tensor
function M.split_heads(x, heads)
  local shape = is_tensor(x) and x.shape or {}
  if #shape ~= 3 then
    options.fail("split_heads: x: expected a tensor of 3 dimensions, got %s", options.describe(x))
  end
  if not math.tointeger(heads) or heads < 1 then options.positive("split_heads", "heads", heads) end
  return x:reshape(shape[1], shape[2], heads, -1):transpose(1, 2)
end

--- The inverse of split_heads(): [b, heads, t, d] to [b, t, heads * d].
---@param x Tensor
---@return Tensor
function M.join_heads(x)
  if not is_tensor(x) or x.ndim ~= 4 then
    options.fail("join_heads: x: expected a tensor of 4 dimensions, got %s", options.describe(x))
  end
  return x:transpose(1, 2):flatten(2)
end

-- Which keys each query sees, bool [t, s]; the queries are the last t of the s positions. nil: all see all.
local function visible(t, s, causal, window, cu_seqlens, device)
  if not causal and window < 0 and not cu_seqlens then return nil end
  local i = ty.arange(s - t, s, { device = device }):unsqueeze(1)
  local j = ty.arange(s, { device = device }):unsqueeze(0)
  local seen = causal and j:le(i) or ty.ones({ t, s }, { dtype = "bool", device = device })
  if window >= 0 then seen = seen:logical_and((i - j):abs():le(window)) end
  if cu_seqlens then -- how many sequences have begun tells them apart
    local number = cu_seqlens:unsqueeze(0):le(ty.arange(s, { device = device }):unsqueeze(1)):to("i64"):sum({ 1 })
    seen = seen:logical_and(number:narrow(0, s - t, t):unsqueeze(1):eq(number:unsqueeze(0)))
  end
  return seen
end

-- Softmax and products in place of the one op: the weights [b, h, t, s] are there to be dropped or shown, and are kept
-- for the backward pass. Returns the results and the weights, in f32. Srivastava et al. 2014; Vaswani et al. 2017.
local function with_weights(q, k, v, o)
  local shape, kv = q.shape, k.shape
  local groups, t, s = shape[2] // kv[2], shape[3], kv[3]
  local scale = (o.scale or 0) ~= 0 and o.scale or 1 / math.sqrt(shape[4])
  q = q:reshape(shape[1], kv[2], groups * t, shape[4])
  local scores = (q:matmul(k:transpose(2, 3)) * scale):reshape(shape[1], shape[2], t, s):to "f32"
  if (o.softcap or 0) > 0 then scores = (scores / o.softcap):tanh() * o.softcap end
  local seen, mask = visible(t, s, o.causal, o.window or -1, o.cu_seqlens, q.device), o.mask
  if mask and mask.dtype == "bool" then
    seen = seen and seen:logical_and(mask) or mask
  elseif mask then
    scores = scores + mask
  end
  if seen then scores = scores:masked_fill(seen:logical_not(), -1e30) end
  local weights = scores:softmax(-1)
  -- A row that sees nothing, which padding has, is zero, as in the op.
  if seen then weights = weights:masked_fill(seen:logical_not(), 0) end
  local kept = ty.dropout(weights, o.dropout or 0, true):to(v.dtype)
  return kept:reshape(shape[1], kv[2], groups * t, s):matmul(v):reshape(shape[1], shape[2], t, -1), weights
end

local kinds = { heads = "an integer >= 1", kv_heads = "an integer >= 1", mask = "a tensor", causal = "a boolean",
  scale = "a finite number", window = "an integer >= -1", cu_seqlens = "a tensor", dropout = "a number in [0, 1]",
  softcap = "a number >= 0" }
local types = { heads = "number", kv_heads = "number", mask = "userdata", causal = "boolean", scale = "number",
  window = "number", cu_seqlens = "userdata", dropout = "number", softcap = "number" }

-- The options, or an error. One token of a small model takes microseconds: what looks right is not looked at twice.
local function checked(given)
  for name, value in pairs(given) do
    if type(value) ~= types[name] then
      local defaults = {}
      for key in pairs(kinds) do defaults[key] = options.none end
      return options.read("attention", given, defaults, kinds)
    end
  end
  return given
end

-- x by heads, whether it came so or as [b, t, heads * d].
local function by_heads(what, x, heads)
  if is_tensor(x) and x.ndim == 4 then return x end
  local shape = is_tensor(x) and x.shape or {}
  if #shape ~= 3 or not math.tointeger(heads) or heads < 1 or shape[3] % heads ~= 0 then
    options.fail("attention: %s: expected [b, t, heads * d] with the option heads, or [b, heads, t, d], got %s with "
      .. "heads = %s", what, options.describe(x), tostring(heads))
  end
  return x:reshape(shape[1], shape[2], heads, shape[3] // heads):transpose(1, 2)
end

--- Attention over heads: splits q, k and v by heads, takes ty.scaled_dot_product_attention and joins what comes out.
-- q [b, t, heads * d], k [b, s, kv_heads * d] and v [b, s, kv_heads * dv] give [b, t, heads * dv]; what is by heads
-- already, as rotary positions leave it and caches keep it, comes as [b, heads, t, d]. For a context take q of one
-- sequence and k, v of another. options:
--   heads, kv_heads     how many heads q has, and k and v (default: as many; fewer are shared by groups of queries)
--   mask                bool (true: seen) or numbers that are added; broadcasts to [b, heads, t, s]
--   causal, window, cu_seqlens  which keys a query sees: see the op; queries are the last of the positions
--   scale               of the scores (0: 1 / sqrt(d))
--   softcap             of the scores, before the mask: softcap * tanh(score / softcap) (0: none)
--   dropout             0: the share of the weights that is dropped; give it in training only
---@param q Tensor
---@param k Tensor
---@param v Tensor
---@param given? table
---@return Tensor
function M.attention(q, k, v, given)
  local o = type(given) == "table" and checked(given)
    or given == nil and {} or options.expect("attention", "options", given, "a table")
  local kv_heads, dropout = o.kv_heads or o.heads, o.dropout or 0
  q, k, v = by_heads("q", q, o.heads), by_heads("k", k, kv_heads), by_heads("v", v, kv_heads)
  local y
  if dropout > 0 then
    y = with_weights(q, k, v, o)
  else
    y = fused_attention(q, k, v, o.mask, o.causal or false, o.scale or 0, o.window or -1, 0, o.cu_seqlens,
      nil, o.softcap)
  end
  return y:transpose(1, 2):flatten(2)
end

--- Multi-head attention (Vaswani et al. 2017). Inputs are [batch, time, width]: batch_first = true is the default here.
-- options: bias, dropout (of the attention weights, in training), kdim, vdim, batch_first.
---@overload fun(width: integer, heads: integer, options?: table): Module
local MultiheadAttention = define "MultiheadAttention"
M.MultiheadAttention = MultiheadAttention

function MultiheadAttention:init(width, heads, given)
  local who = "MultiheadAttention"
  local o = options.read(who, given,
    { bias = true, dropout = 0, kdim = options.none, vdim = options.none, batch_first = true },
    { dropout = "a number in [0, 1]", kdim = "an integer >= 1", vdim = "an integer >= 1" })
  options.positive(who, "width", width)
  options.positive(who, "heads", heads)
  if width % heads ~= 0 then
    options.fail("%s: heads: expected a divisor of the width %d, got %d", who, width, heads)
  end
  self.embed_dim, self.num_heads, self.dropout, self.batch_first = width, heads, o.dropout, o.batch_first
  local kdim, vdim = o.kdim or width, o.vdim or width
  if kdim == width and vdim == width then
    self.in_proj_weight = options.parameter({ 3 * width, width }, init.xavier_uniform)
  else
    self.q_proj_weight = options.parameter({ width, width }, init.xavier_uniform)
    self.k_proj_weight = options.parameter({ width, kdim }, init.xavier_uniform)
    self.v_proj_weight = options.parameter({ width, vdim }, init.xavier_uniform)
  end
  if o.bias then self.in_proj_bias = options.parameter({ 3 * width }, init.zeros) end
  self.out_proj = layers.Linear(width, width, { bias = o.bias })
  if o.bias and self.out_proj.bias.device ~= "meta" then init.zeros(self.out_proj.bias) end
end

local function project(self, q, k, v)
  local width, bias = self.embed_dim, self.in_proj_bias
  if self.in_proj_weight and rawequal(q, k) and rawequal(k, v) then
    local all = ty.linear(q, self.in_proj_weight, bias)
    return all:narrow(-1, 0, width), all:narrow(-1, width, width), all:narrow(-1, 2 * width, width)
  end
  local function one(x, i, separate)
    local weight = separate or self.in_proj_weight:narrow(0, i * width, width)
    return ty.linear(x, weight, bias and bias:narrow(0, i * width, width))
  end
  return one(q, 0, self.q_proj_weight), one(k, 1, self.k_proj_weight), one(v, 2, self.v_proj_weight)
end

local call_defaults = { need_weights = false, average_attn_weights = true }
local call_kinds = {}
for name, value in pairs(masks.defaults) do call_defaults[name], call_kinds[name] = value, masks.kinds[name] end

--- q [b, t, width], k and v [b, s, kdim / vdim] (left out: q) to [b, t, width].
-- options: mask (bool, true: may be seen; or numbers that are added; broadcasts to [b, heads, t, s]), causal; as in
-- PyTorch attn_mask and key_padding_mask ([b, s]), in which true means left out; need_weights (false; true: the weights
-- [b, t, s] are a second result, the mean over heads, or [b, heads, t, s] with average_attn_weights = false).
function MultiheadAttention:forward(q, k, v, given)
  if type(k) == "table" then k, given = nil, k end
  k = k or q
  v = v or k
  local o = options.read("MultiheadAttention", given, call_defaults, call_kinds)
  for i = 1, 3 do
    local x = select(i, q, k, v)
    if not ty.is_tensor(x) or x.ndim ~= 3 then
      options.fail("MultiheadAttention: %s: expected a tensor of 3 dimensions, got %s", ("qkv"):sub(i, i),
        options.describe(x))
    end
  end
  if not self.batch_first then
    local same_k, same_v = rawequal(k, q), rawequal(v, k)
    q = q:transpose(0, 1)
    k = same_k and q or k:transpose(0, 1)
    v = same_v and k or v:transpose(0, 1)
  end
  local mask = masks.combine("MultiheadAttention", o, q:size(0), self.num_heads, q:size(1), k:size(1))
  local dropout = self.training and self.dropout or 0
  q, k, v = project(self, q, k, v)
  local y, weights
  if o.need_weights then
    local heads = self.num_heads
    y, weights = with_weights(M.split_heads(q, heads), M.split_heads(k, heads), M.split_heads(v, heads),
      { mask = mask, causal = o.causal, dropout = dropout })
    y = M.join_heads(y)
    if o.average_attn_weights then weights = weights:mean { 1 } end
  else
    y = M.attention(q, k, v, { heads = self.num_heads, mask = mask, causal = o.causal, dropout = dropout })
  end
  y = self.out_proj(y)
  if not self.batch_first then y = y:transpose(0, 1) end
  return y, weights
end

function MultiheadAttention:describe() return ("%d, %d"):format(self.embed_dim, self.num_heads) end

--- Self-attention and a feed-forward network with residuals; x [b, t, width].
-- options: feedforward (2048), dropout (0.1), activation ("relu" or "gelu"), norm_first (false), eps (1e-5),
-- batch_first (true, and nothing else).
local TransformerEncoderLayer = define "TransformerEncoderLayer"
M.TransformerEncoderLayer = TransformerEncoderLayer

function TransformerEncoderLayer:init(width, heads, given)
  local o = options.read("TransformerEncoderLayer", given,
    { feedforward = 2048, dropout = 0.1, activation = "relu", norm_first = false, eps = 1e-5, batch_first = true },
    { feedforward = "an integer >= 1", dropout = "a number in [0, 1]", activation = '"relu" or "gelu"' })
  options.batch_first("TransformerEncoderLayer", o)
  self.self_attn = MultiheadAttention(width, heads, { dropout = o.dropout })
  self.linear1 = layers.Linear(width, o.feedforward)
  self.dropout = layers.Dropout(o.dropout)
  self.linear2 = layers.Linear(o.feedforward, width)
  self.norm1 = norms.LayerNorm(width, { eps = o.eps })
  self.norm2 = norms.LayerNorm(width, { eps = o.eps })
  self.norm_first = o.norm_first
  self.activation = ty[o.activation]
end

local encoder_defaults = { mask = options.none, causal = false, src_mask = options.none,
  src_key_padding_mask = options.none }
local encoder_kinds = { mask = "a tensor", causal = "a boolean", src_mask = "a tensor",
  src_key_padding_mask = "a tensor" }

--- options: mask and causal, as MultiheadAttention's; PyTorch's src_mask and src_key_padding_mask (true: left out).
function TransformerEncoderLayer:forward(x, given)
  local o = options.read("TransformerEncoderLayer", given, encoder_defaults, encoder_kinds)
  local call = { mask = o.mask, causal = o.causal, attn_mask = o.src_mask, key_padding_mask = o.src_key_padding_mask }
  local function attend(h) return self.dropout((self.self_attn(h, call))) end
  local function feed(h) return self.dropout(self.linear2(self.dropout(self.activation(self.linear1(h))))) end
  if self.norm_first then
    x = x + attend(self.norm1(x))
    return x + feed(self.norm2(x))
  end
  x = self.norm1(x + attend(x))
  return self.norm2(x + feed(x))
end

return M
