--- The memory of layers with a state of fixed size: one tensor for each layer, however many tokens came. Models with
-- such layers use this cache where decoders with attention use a cache of keys and values.
local ty = require "tycho"

---@class StateCache
---@field past integer  tokens seen, padding included
local States = {}
States.__index = States

--- For `layers` layers. options: room (no matter how many tokens come: taken and not needed).
---@param layers integer
---@param options? table
---@return StateCache
function States.new(layers, options)
  ty.nn.options("StateCache", options, { room = 0 })
  return setmetatable({ past = 0, layers = layers }, States)
end

--- The state of a layer (counted from 1), nil before the first token.
function States:get(layer) return self[layer] end

--- Keeps a state, which may be a tensor of the current scope.
function States:put(layer, state) self[layer] = ty.unscoped(state.detach, state) end

--- Counts t tokens more, once every layer has put its state.
function States:advance(t) self.past = self.past + t end

--- Forgets everything; a part cannot be taken back out of a state.
function States:truncate(past)
  if past ~= 0 then
    if past == self.past then return end
    error(("cache: %d positions are wanted of %d, but a state cannot be taken back to where it was"):format(past,
      self.past), 2)
  end
  self.past = 0
  for i = 1, self.layers do self[i] = nil end
end

--- Keeps the rows `index` (i64 [n]) of the batch, for example those that are not finished.
function States:select(index)
  ty.no_grad(function()
    for i = 1, self.layers do
      if self[i] then self[i] = ty.unscoped(ty.index_select, self[i], 0, index) end
    end
  end)
end

return States
