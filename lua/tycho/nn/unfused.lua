--- Fused ops written out in plain ones, as the papers have them: ty.nn.unfused. They take the memory that
-- the ops save; the ops are compared with them.
local ty = require "tycho"
local options = require "tycho.nn.options"

local M = {}

-- [t, s] bool: which keys a query sees, or nil for all.
local function visible(t, s, o, device)
  local keys = ty.arange(s, { device = device })
  local here = ty.arange(s - t, s, { device = device }):unsqueeze(1)
  local see
  local function also(condition) see = see and see:logical_and(condition) or condition end
  if o.causal then also(keys:le(here)) end
  if o.window then
    local near = (keys - here):abs():le(o.window)
    also(o.sinks and near:logical_or(keys:lt(o.sinks)) or near)
  end
  if o.cu_seqlens then
    local begins = o.cu_seqlens:unsqueeze(1)
    also(begins:le(keys):sum { 0 }:eq(begins:le(here:squeeze(1)):sum { 0 }:unsqueeze(1)))
  end
  return see
end

-- given: names, each with its value behind it.
local function tensors(who, ...)
  local given = table.pack(...)
  for i = 1, given.n, 2 do
    local value = given[i + 1]
    if not ty.is_tensor(value) or value.ndim ~= 4 then
      options.fail("unfused.%s: %s: expected a tensor [b, h, t, d], got %s", who, given[i], options.describe(value))
    end
  end
end

--- ty.scaled_dot_product_attention with the T x T matrix. q [b, h, t, d]; k, v [b, hk, s, d]; bias (nil): bool (true:
-- seen) or numbers that are added. options: causal, window, sinks, cu_seqlens, softcap, as the op has them.
---@param q Tensor
---@param k Tensor
---@param v Tensor
---@param bias? Tensor
---@param given? table
---@return Tensor
function M.attention(q, k, v, bias, given)
  tensors("attention", "q", q, "k", k, "v", v)
  local o = options.read("unfused.attention", given,
    { causal = false, window = options.none, sinks = options.none, cu_seqlens = options.none,
      softcap = 0 },
    { window = "an integer >= 0", sinks = "an integer >= 0", cu_seqlens = "a tensor", softcap = "a number >= 0" })
  local group = q.shape[2] // k.shape[2]
  if group > 1 then
    local function repeated(x) return x:unsqueeze(2):tile(1, 1, group, 1, 1):flatten(1, 2) end
    k, v = repeated(k), repeated(v)
  end
  local scores = ty.matmul(q, k:transpose(-2, -1)) * (1 / math.sqrt(q.shape[4]))
  if o.softcap > 0 then scores = (scores / o.softcap):tanh() * o.softcap end
  if bias and bias.dtype ~= "bool" then scores = scores + bias:to(scores.dtype) end
  local see = visible(q.shape[3], k.shape[3], o, q.device)
  if bias and bias.dtype == "bool" then see = see and see:logical_and(bias) or bias end
  if see then scores = scores:masked_fill(see:logical_not(), -math.huge) end
  return ty.matmul(scores:softmax(-1), v)
end

--- ty.gated_linear_attention as its recurrence, one token after the other: q, k, g [b, h, t, dk] (g: logarithms of the
-- gates), v [b, h, t, dv] to y [b, h, t, dv] and the last state [b, h, dk, dv].
---@param q Tensor
---@param k Tensor
---@param v Tensor
---@param g Tensor
---@return Tensor y, Tensor state
function M.gated_linear_attention(q, k, v, g)
  tensors("gated_linear_attention", "q", q, "k", k, "v", v, "g", g)
  local state, rows = 0, {}
  for t = 0, q.shape[3] - 1 do
    local function at(x) return x:select(2, t) end
    state = at(g):exp():unsqueeze(-1) * state + at(k):unsqueeze(-1) * at(v):unsqueeze(-2)
    rows[t + 1] = (at(q):unsqueeze(-1) * state):sum(-2) / math.sqrt(q.shape[4])
  end
  return ty.stack(rows, 2), state
end

return M
