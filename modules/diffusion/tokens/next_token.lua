--- Tokens one after the other: the way of causal networks such as models.BitTransformer, over vectors of bits or codes.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
local KVCache = require "tycho.models.cache"
local draws = require "tycho.diffusion.tokens.draw"

local Way = {}
Way.__index = Way
Way.__name = "NextToken"

--- The way for tokens.sample: a token at a time, with what was computed before kept. It ends with bits [n, tokens,
-- bits] (drawn each for itself) or codes i64 [n, tokens].
---@param model BitTransformer
---@return table
local function next_token(model)
  local who = "tokens.next_token"
  arguments.expect(who, "model", model, "a module")
  if not model.causal then
    arguments.fail("%s: model: expected one with causal attention, got one that sees all", who)
  end
  return setmetatable({ model = model, steps = model.tokens,
    draw = model.codes and draws.categorical() or draws.bernoulli() }, Way)
end

--- The loss of tokens [n, tokens, ...], each given those before it: cross entropy of bits, or of codes. drop: the share
-- of samples whose condition is dropped, for guidance.
---@param tokens Tensor
---@param condition table
---@param drop? number
---@return Tensor
function Way:loss(tokens, condition, drop)
  arguments.expect("NextToken:loss", "tokens", tokens, "a tensor")
  if drop then condition = conditions.drop(condition, conditions.null(self.model, condition), drop) end
  local logits = self.model(tokens, nil, condition)
  if self.model.codes then return ty.nn.cross_entropy(logits:flatten(0, 1), tokens:flatten()) end
  return ty.nn.bce_with_logits(logits, tokens)
end

function Way:begin() return { list = {}, cache = KVCache.new(#self.model.blocks, { room = self.model.tokens }) } end

function Way:predict(state, step, condition)
  local last = state.list[step - 1]
  local n = conditions.tensors(condition)[1][2].shape[1]
  if last and last.shape[1] < n then last = ty.concat({ last, last }, 0) end
  return self.model(last, nil, condition, state.cache)
end

function Way:take(state, step, drawn)
  if not self.model.codes and drawn.ndim == 2 then drawn = drawn:unsqueeze(1) end
  state.list[step] = ty.keep(drawn)
  return state
end

function Way:finish(state) return ty.concat(state.list, 1) end

return next_token
