--- Cascaded-Forward: blocks stay as they were drawn, and each has a predictor that reads its classes from them; what
-- the predictors say is added up. Zhao et al. 2023, "The Cascaded Forward Algorithm for Neural Network Training" (arXiv
-- 2303.09728), with cross entropy. Batch norms in blocks learn their statistics on the way, without a gradient.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.local.blocks"

local nn = ty.nn

--- A learner of blocks, which are not trained. options: classes; example (an input [n, ...], by which the sizes are
-- known); rate (1e-3, or a function that makes an optimizer of parameters). Scores are the mean probabilities.
---@param layers Module[]
---@param options { classes: integer, example: Tensor, rate?: number|function }
---@return Learner
return function(layers, options)
  local who = "local.cascaded"
  arguments.expect(who, "layers", layers, "a list")
  local o = arguments.read(who, options, { classes = arguments.none, example = arguments.none, rate = 1e-3 },
    { classes = "an integer >= 1", example = "a tensor", rate = "a number >= 0 or a function" })
  arguments.expect(who, "classes", o.classes, "an integer >= 1")
  arguments.expect(who, "example", o.example, "a tensor")
  local sizes = blocks.sizes(layers, o.example)
  local stages, make = {}, blocks.optimizer(o.rate)
  local model = nn.ModuleDict { layers = nn.ModuleList(layers), predictors = nn.ModuleList() }
  for i, layer in ipairs(layers) do
    local width = 1
    for _, size in ipairs(sizes[i]) do width = width * size end
    local predictor = nn.Linear(width, o.classes)
    model.predictors:append(predictor)
    stages[i] = { frozen = true, forward = function(x) return layer(x) end, optimizer = make(predictor:parameters()),
      loss = function(y, label) return nn.cross_entropy(predictor(y:flatten(1)), label) end }
  end
  return blocks.learner { model = model, stages = stages, scores = function(outputs)
    local sum = 0
    for i, y in ipairs(outputs) do sum = sum + model.predictors[i](y:flatten(1)):softmax(1) end
    return sum / #outputs
  end }
end
