--- Parts of the loop of generators over tokens: what guidance makes of two predictions, and how tokens are drawn.
local arguments = require "tycho.arguments"

local M = {}

--- What is said with guidance: other + scale (said - other); said alone where there is no other. Ho and Salimans 2022,
-- "Classifier-Free Diffusion Guidance".
---@param said Tensor
---@param other? Tensor
---@param scale? number
---@return Tensor
function M.guided(said, other, scale)
  arguments.expect("tokens.guided", "said", said, "a tensor")
  if not other then return said end
  return other + (said - other) * scale
end

--- Guidance that rises from 1 to `last` with the steps, as VAR and MUSE have it.
---@param last number
---@return fun(share: number): number
function M.rising(last)
  arguments.expect("tokens.rising", "last", last, "a finite number")
  return function(share) return 1 + (last - 1) * share end
end

--- Numbers of codes drawn from logits [n, tokens, codes]. options: temperature (1; 0: the likeliest), top_k (0: only so
-- many of the likeliest; 0: all).
---@param options? {temperature?: number, top_k?: integer}
---@return fun(said: Tensor, other: Tensor?, scale: number?): Tensor  i64 [n, tokens]
function M.categorical(options)
  local o = arguments.read("tokens.categorical", options, { temperature = 1, top_k = 0 },
    { temperature = "a finite number >= 0", top_k = "an integer >= 0" })
  return function(said, other, scale)
    local logits = M.guided(said, other, scale)
    if o.temperature == 0 then return logits:argmax(-1) end
    local codes = logits.shape[logits.ndim]
    if o.top_k > 0 and o.top_k < codes then
      local values = logits:topk(o.top_k)
      logits = logits:masked_fill(logits:lt(values:narrow(-1, o.top_k - 1, 1)), -1e30)
    end
    return (logits / o.temperature):softmax(-1):flatten(0, -2):multinomial(1):reshape(logits.shape[1], -1)
  end
end

--- Bits drawn from their logits, each for itself: 0 or 1 in the dtype of the logits. options: temperature (1; 0: the
-- likelier).
---@param options? {temperature?: number}
---@return fun(said: Tensor, other: Tensor?, scale: number?): Tensor
function M.bernoulli(options)
  local o = arguments.read("tokens.bernoulli", options, { temperature = 1 }, { temperature = "a finite number >= 0" })
  return function(said, other, scale)
    local logits = M.guided(said, other, scale)
    if o.temperature == 0 then return logits:gt(0):to(logits.dtype) end
    return (logits / o.temperature):sigmoid():bernoulli()
  end
end

return M
