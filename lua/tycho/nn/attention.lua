--- Attention and the transformer's encoder layer, with PyTorch's parameter names.
local ty = require "tycho"
local base = require "tycho.nn.module"
local init = require "tycho.nn.initial"
local layers = require "tycho.nn.layers"
local norms = require "tycho.nn.norms"
local options = require "tycho.nn.options"

local define = base.define
local M = {}

--- Multi-head attention (Vaswani et al. 2017). Inputs are [batch, time, width]: batch_first = true is the default here.
-- options: bias, dropout (on the output of the heads, in training), kdim, vdim, batch_first.
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

--- q [b, t, width], k and v [b, s, kdim / vdim] (left out: q) to [b, t, width].
-- options: mask (bool, true: may be seen; or numbers that are added; broadcasts to [b, heads, t, s]), causal.
function MultiheadAttention:forward(q, k, v, given)
  if type(k) == "table" then k, given = nil, k end
  k = k or q
  v = v or k
  given = given or {}
  if not ty.is_tensor(q) or q.ndim ~= 3 then
    options.fail("MultiheadAttention: q: expected a tensor of 3 dimensions, got %s", options.describe(q))
  end
  local function heads(x) -- [b, t, h * d] to [b, h, t, d]
    local shape = x.shape
    return x:reshape(shape[1], shape[2], self.num_heads, -1):transpose(1, 2)
  end
  if not self.batch_first then
    local same_k, same_v = rawequal(k, q), rawequal(v, k)
    q = q:transpose(0, 1)
    k = same_k and q or k:transpose(0, 1)
    v = same_v and k or v:transpose(0, 1)
  end
  local hq, hk, hv = project(self, q, k, v)
  local y = ty.scaled_dot_product_attention(heads(hq), heads(hk), heads(hv), given.mask, given.causal or false)
  y = y:transpose(1, 2):flatten(2)
  if self.dropout > 0 and self.training then y = ty.dropout(y, self.dropout, true) end
  y = self.out_proj(y)
  return self.batch_first and y or y:transpose(0, 1)
end

function MultiheadAttention:describe() return ("%d, %d"):format(self.embed_dim, self.num_heads) end

--- Self-attention and a feed-forward network with residuals; x [b, t, width].
-- options: feedforward (2048), dropout (0.1), activation ("relu" or "gelu"), norm_first (false), eps (1e-5).
local TransformerEncoderLayer = define "TransformerEncoderLayer"
M.TransformerEncoderLayer = TransformerEncoderLayer

function TransformerEncoderLayer:init(width, heads, given)
  local o = options.read("TransformerEncoderLayer", given,
    { feedforward = 2048, dropout = 0.1, activation = "relu", norm_first = false, eps = 1e-5 },
    { feedforward = "an integer >= 1", dropout = "a number in [0, 1]", activation = '"relu" or "gelu"' })
  self.self_attn = MultiheadAttention(width, heads, { dropout = o.dropout })
  self.linear1 = layers.Linear(width, o.feedforward)
  self.dropout = layers.Dropout(o.dropout)
  self.linear2 = layers.Linear(o.feedforward, width)
  self.norm1 = norms.LayerNorm(width, { eps = o.eps })
  self.norm2 = norms.LayerNorm(width, { eps = o.eps })
  self.norm_first = o.norm_first
  self.activation = ty[o.activation]
end

function TransformerEncoderLayer:forward(x, given)
  local function attend(h) return self.dropout(self.self_attn(h, given or {})) end
  local function feed(h) return self.dropout(self.linear2(self.dropout(self.activation(self.linear1(h))))) end
  if self.norm_first then
    x = x + attend(self.norm1(x))
    return x + feed(self.norm2(x))
  end
  x = self.norm1(x + attend(x))
  return self.norm2(x + feed(x))
end

return M
