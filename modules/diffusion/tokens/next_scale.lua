--- Tokens scale by scale: the way of models.VAR over models.ScaleTokenizer.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
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

--- Pictures as networks are trained with them, made once: ids i64 [n, tokens], inputs [n, tokens of all scales but the
-- first, width], on the tokenizer's device.
---@param pictures Tensor
---@return { ids: Tensor, inputs: Tensor }
function Way:material(pictures)
  local ids = self.tokenizer:encode(pictures:to { device = self.tokenizer:device() })
  return { ids = ty.concat(ids, 1), inputs = ty.concat(self.tokenizer:inputs(ids), 1) }
end

-- Inputs of material by scale.
local function inputs_of(self, joined)
  local list, first = {}, 0
  for l = 2, self.steps do
    local n = self.model.scales[l] ^ 2 // 1 | 0
    list[l - 1], first = joined:narrow(1, first, n), first + n
  end
  return list
end

local function condition_of(self, batch, drop)
  local condition = { labels = batch.labels }
  return drop and conditions.drop(condition, { labels = self.model.null_label }, drop) or condition
end

--- The mean cross entropy of the tokens of a batch of material with `labels`. drop: the share of labels that are
-- dropped, for guidance (none).
---@param batch { ids: Tensor, inputs: Tensor, labels: Tensor }
---@param drop? number
---@return Tensor
function Way:loss(batch, drop)
  local logits = self.model(inputs_of(self, batch.inputs), condition_of(self, batch, drop))
  return ty.nn.cross_entropy(logits:flatten(0, 1), batch.ids:flatten())
end

--- The same loss, and its gradients, one scale after the other, so that no more than one of them is in memory: what a
-- model allows whose scales do not see each other (`markov`).
---@param batch { ids: Tensor, inputs: Tensor, labels: Tensor }
---@param drop? number
---@return number loss
function Way:backward(batch, drop)
  if not self.model.markov then
    arguments.fail("NextScale:backward: model: expected one whose scales do not see each other, got one that has "
      .. "attention = \"full\"; use loss()")
  end
  local inputs, condition = inputs_of(self, batch.inputs), condition_of(self, batch, drop)
  local sum, first = 0.0, 0
  for l, side in ipairs(self.model.scales) do
    local n = side * side
    sum = sum + ty.scope(function()
      local logits = self.model:scale(l, inputs[l - 1], condition)
      local loss = ty.nn.cross_entropy(logits:flatten(0, 1), batch.ids:narrow(1, first, n):flatten())
      loss = loss * (n / self.model.length)
      loss:backward()
      return loss:item()
    end)
    first = first + n
  end
  return sum
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
