--- Tokens scale by scale: the way of models.VAR over models.ScaleTokenizer.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local KVCache = require "tycho.models.cache"

local Way = {}
Way.__index = Way
Way.__name = "NextScale"

--- The way for tokens.sample: all places of a scale at once, then those of the next, from the sum of what there is. It
-- ends with a list of tokens, i64 [n, s * s] for each scale, and keeps keys and values only where a scale sees the
-- others.
---@param model VAR
---@param tokenizer ScaleTokenizer
---@return table
local function next_scale(model, tokenizer)
  local who = "tokens.next_scale"
  arguments.expect(who, "model", model, "a module")
  arguments.expect(who, "model.scale", model.scale, "a function")
  arguments.expect(who, "tokenizer", tokenizer, "a module")
  arguments.expect(who, "tokenizer.input", tokenizer.input, "a function")
  if table.concat(model.scales, ",") ~= table.concat(tokenizer.scales, ",") then
    arguments.fail("%s: model: expected the scales of the tokenizer, %s, got %s", who,
      table.concat(tokenizer.scales, ", "), table.concat(model.scales, ", "))
  end
  return setmetatable({ model = model, tokenizer = tokenizer, steps = #tokenizer.scales }, Way)
end

function Way:begin()
  local cache
  if not self.model.markov then cache = KVCache.new(#self.model.blocks, { room = self.model.length }) end
  return { ids = {}, cache = cache }
end

function Way:predict(state, step, condition)
  local input
  if step > 1 then
    input = self.tokenizer:input(state.sum, step)
    local copies = condition.labels.shape[1] // input.shape[1]
    if copies > 1 then input = ty.concat({ input, input }, 0) end
  end
  return self.model:scale(step, input, condition, state.cache)
end

function Way:take(state, step, drawn)
  state.ids[step] = ty.keep(drawn)
  state.sum = ty.keep(self.tokenizer:add(state.sum, drawn, step))
  return state
end

function Way:finish(state) return state.ids end

return next_scale
