--- Choosing the next token: logits [n, vocabulary] to tokens [n, 1]. The filters are those of the field, in the order
-- in which transformers applies them: repetition penalty, temperature, top-k, top-p, min-p.
local ty = require "tycho"

local M = {}

local limits = {
  temperature = { 0, math.huge }, top_p = { 0, 1 }, min_p = { 0, 1 }, top_k = { 0, math.huge },
  repetition_penalty = { 0, math.huge },
}

--- Raises on options outside of what makes sense.
function M.check(who, o)
  for name, limit in pairs(limits) do
    local value = o[name]
    local positive = name == "top_p" or name == "repetition_penalty"
    if type(value) ~= "number" or value ~= value or value < limit[1] or value > limit[2] or positive and value == 0 then
      error(("%s: %s must be a number %s %g%s, got %s"):format(who, name, positive and "above" or "from", limit[1],
        limit[2] < math.huge and (" to %g"):format(limit[2]) or "", tostring(value)), 3)
    end
  end
end

local function hide(logits, hidden) return logits:masked_fill(hidden, -math.huge) end

--- Logits f32 after penalty, temperature and filters. options: temperature (above 0), top_k (0: all), top_p (1: all:
-- the fewest tokens that together have this probability; Holtzman et al. 2020), min_p (0: all with at least this share
-- of the best one's probability; Nguyen et al. 2024), repetition_penalty (1; Keskar et al. 2019). seen: bool
-- [n, vocabulary], the tokens that the penalty is for.
---@param logits Tensor
---@return Tensor
function M.filter(logits, options, seen)
  local o = options
  logits = logits:to "f32"
  if o.repetition_penalty ~= 1 and seen then
    local penalized = ty.where(logits:lt(0), logits * o.repetition_penalty, logits / o.repetition_penalty)
    logits = ty.where(seen, penalized, logits)
  end
  if o.temperature ~= 1 and o.temperature > 0 then logits = logits / o.temperature end
  local count = logits.shape[2]
  if o.top_k > 0 and o.top_k < count then
    local best = logits:topk(math.tointeger(o.top_k))
    logits = hide(logits, logits:lt(best:narrow(1, best.shape[2] - 1, 1)))
  end
  if o.top_p < 1 then
    local sorted, order = logits:sort(-1, true)
    local p = sorted:softmax(-1)
    -- A token goes when those before it have the share already.
    local gone = (p:cumsum(-1) - p):ge(o.top_p)
    logits = hide(logits, gone:to("u8"):scatter(1, order, gone:to "u8"):to "bool")
  end
  if o.min_p > 0 then
    local p = logits:softmax(-1)
    logits = hide(logits, p:lt(p:max(-1, true) * o.min_p))
  end
  return logits
end

--- The next token of each row, i64 [n, 1]; temperature 0 takes the most likely one.
---@param logits Tensor
---@return Tensor tokens
function M.sample(logits, options, seen)
  if options.temperature == 0 then
    if options.repetition_penalty ~= 1 then logits = M.filter(logits, options, seen) end
    return logits:argmax(-1, true)
  end
  -- Of one draw it makes no difference, but drawing without replacement sorts all tokens.
  return ty.multinomial(M.filter(logits, options, seen):softmax(-1), 1, true)
end

return M
