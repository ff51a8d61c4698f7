--- Mono-Forward: every layer has a matrix of its own that makes scores of the classes from what the layer gives, and is
-- trained by the cross entropy of these, alone. Gong et al. 2025, "Mono-Forward: Backpropagation-Free Algorithm for
-- Efficient Neural Network Training Harnessing Local Errors" (arXiv 2501.09238): G_i = a_i M_i^T; learnt together, M_i
-- and the layer's weights.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.local.blocks"

local nn = ty.nn

--- A learner of layers, each of which has its activation in it. options: classes; example (an input [n, ...], by which
-- the sizes are known); rate (1e-3, or a function that makes an optimizer of parameters); by ("last": scores are those
-- of the last layer; "sum": those of all layers together).
---@param layers Module[]
---@param options { classes: integer, example: Tensor, rate?: number|function, by?: string }
---@return Learner
return function(layers, options)
  local who = "local.mono_forward"
  arguments.expect(who, "layers", layers, "a list")
  local o = arguments.read(who, options, { classes = arguments.none, example = arguments.none, rate = 1e-3,
    by = "last" }, { classes = "an integer >= 1", example = "a tensor", rate = "a number >= 0 or a function",
    by = '"last" or "sum"' })
  arguments.expect(who, "classes", o.classes, "an integer >= 1")
  arguments.expect(who, "example", o.example, "a tensor")
  local sizes = blocks.sizes(layers, o.example)
  local stages, make = {}, blocks.optimizer(o.rate)
  local model = nn.ModuleDict { layers = nn.ModuleList(layers), projections = nn.ModuleList() }
  for i, layer in ipairs(layers) do
    local width = 1
    for _, size in ipairs(sizes[i]) do width = width * size end
    local projection = nn.Linear(width, o.classes, { bias = false })
    model.projections:append(projection)
    stages[i] = { forward = function(x) return layer(x) end, optimizer = make(nn.Sequential(layer, projection)
      :parameters()), loss = function(y, label) return nn.cross_entropy(projection(y:flatten(1)), label) end }
  end
  return blocks.learner { model = model, stages = stages, scores = function(outputs)
    local last = #outputs
    local scores = model.projections[last](outputs[last]:flatten(1))
    if o.by == "sum" then
      for i = 1, last - 1 do scores = scores + model.projections[i](outputs[i]:flatten(1)) end
    end
    return scores
  end }
end
