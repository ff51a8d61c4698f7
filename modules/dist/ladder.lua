--- Blocks whose inputs are one module behind, so that a sum over ranks is on its way while the next module computes.
-- Zhang et al. 2025, "Ladder-residual: parallelism-aware architecture for accelerating large model inference with
-- communication overlapping".
--
-- A transformer is x[i + 1] = x[i] + h[i](x[i]), where h is attention and feed-forward network in turn, each with its
-- norm, and h[i] of tensor parallel ranks is a sum over them. Here h[i] gets x[i - 1], which lacks the sum that was
-- begun last: x[i + 1] = x[i] + h[i](x[i - 1]).
local ty = require "tycho"
local arguments = require "tycho.arguments"
local layers = require "tycho.models.layers"

local surgery = ty.nn.surgery
local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe

-- ---- sums that are on their way ----

-- A sum is begun where the last layer of a module would have taken it: the tensor parallel layers call this.
local function begin(group, x, bias)
  local sum = x:detach()
  if x.requires_grad then sum = ty.no_grad(sum.clone, sum) end -- what has a history may not be changed
  return { x = x, bias = bias, work = group:all_reduce(sum, "sum", { async = true }) }
end

-- The sum in the place of x, whose gradient is that of the sum.
local arrived = ty.custom_op {
  name = "dist.arrived",
  forward = function(_, work) return work:wait() end,
  backward = function(_, g) return nil, g end,
}

-- The result of a module: a tensor, or a sum on its way.
local function arrive(pending)
  if ty.is_tensor(pending) then return pending end
  local y = arrived(pending.work, pending.x)
  return pending.bias and y + pending.bias or y
end

-- ---- layers ----

-- Checkpoints let go of what is computed within a layer.
local function is_gone(pending)
  local x = ty.is_tensor(pending) and pending or pending.x
  return not pcall(function() return x.ndim end)
end

local function add(a, b) return a and a + b or b end

-- What has arrived of a queue of results, all but the last `lag`.
local function take(queue, lag, at)
  local sum
  while #queue > lag do
    local x = arrive(table.remove(queue, 1))
    sum = add(sum, at and layers.wanted(x, at) or x)
  end
  return sum
end

local ladder = surgery.wrapper { name = "Ladder", field = "_ladder", forward = function()
  return function(self, stream, more, at)
    local state = self._ladder
    local queue = at.ladder
    if state.index == state.first then
      queue = { index = state.index }
    elseif not queue or queue.index ~= state.index or queue[1] and is_gone(queue[1]) then
      fail("ladder_residual: expected layers one after the other, got layer %d without what is before it; checkpoint"
        .. " does not go with it", state.index)
    else
      more = take(queue, state.lag)
    end
    local x
    stream, x = layers.add_norm(self.input_layernorm, stream, more)
    queue[#queue + 1] = self.self_attn(x, at)
    more = take(queue, state.lag, at)
    stream, x = layers.add_norm(self.post_attention_layernorm, layers.wanted(stream, at), more)
    queue[#queue + 1] = self[self.mlp_name](x, at)
    if state.index == state.final then
      at.ladder = nil
      return stream, take(queue, 0, at)
    end
    queue.index, at.ladder = state.index + 1, queue
    return stream, nil
  end
end }

--- A model some of whose layers are one behind.
---@class LadderResidual
---@field model LanguageModel
local Ladder = {}
Ladder.__index = Ladder
Ladder.__name = "LadderResidual"

--- Makes the layers what they were.
---@return LanguageModel model
function Ladder:remove()
  for _, layer in ipairs(ladder:wrapped("LadderResidual:remove", self.model)) do
    for _, module in ipairs { layer.module.self_attn, layer.module[layer.module.mlp_name] } do
      local state = rawget(module, "_parallel")
      if state then state.defer = nil end
    end
    ladder:unwrap(layer.module)
  end
  return self.model
end

--- Lets the layers of a Llama or its like from `first` on compute while sums over ranks are on their way, in training
-- too; the weights stay as they are, and the numbers are others: the model is trained on for a while. Of a model that
-- dist.tensor_parallel has split the sums are begun here and waited for one module later; on one rank the numbers are
-- the same. options: first (1; the upper half of n layers begins at n // 2 + 1), lag (1: of how many modules, the last
-- ones, the results are not there yet; 0: the model as it was). It does not go with the option checkpoint.
---@param model LanguageModel
---@param options? { first?: integer, lag?: integer }
---@return LadderResidual
return function(model, options)
  local who = "dist.ladder_residual"
  expect(who, "model", model, "a module")
  local body = rawget(model, "model")
  local list = arguments.is_module(body) and rawget(body, "layers")
  if not arguments.is_module(list) then
    fail("%s: model: expected a decoder with model.layers, got %s", who, describe(model))
  end
  local o = arguments.read(who, options, { first = 1, lag = 1 },
    { first = ("an integer in [1, %d]"):format(#list), lag = "an integer >= 0" })
  for i, layer in ipairs(list) do
    if layer.forward ~= layers.DecoderLayer.forward then
      fail("%s: model: expected layers with one norm before each module, as Llama has them, got %s", who,
        i .. ": " .. getmetatable(layer).__name)
    end
  end
  for i = o.first, #list do
    local layer = list[i]
    for _, module in ipairs { layer.self_attn, layer[layer.mlp_name] } do
      local state = rawget(module, "_parallel")
      if state then state.defer = begin end
    end
    ladder:wrap(layer, { index = i, first = o.first, final = #list, lag = o.lag })
  end
  return setmetatable({ model = model }, Ladder)
end
