--- Cascaded-Forward: each block has a predictor that reads the classes from what it gives, and what the predictors say
-- is added up. Zhao et al. 2023, "The Cascaded Forward Algorithm for Neural Network Training" (arXiv 2303.09728), with
-- cross entropy. Blocks stay as they were drawn (batch norms in them learn their statistics on the way, without a
-- gradient), or learn by direct feedback alignment (Nokland 2016): e, the last predictor's probabilities less the
-- label, comes to block i through a matrix B_i drawn once, and e B_i stands for the gradient of what the block gives.
-- The last block has the gradient of its predictor's loss. Blocks and predictors learn together here, not one after the
-- other.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.local.blocks"

local nn = ty.nn

-- A matrix [classes, width] with rows of length one.
local function new_feedback(classes, predictor)
  local matrix = ty.randn { classes, predictor.weight.shape[2] }:to(predictor.weight.dtype)
  matrix = matrix / matrix:square():sum(1, true):sqrt()
  return matrix:to(predictor.weight.device)
end

--- A learner of blocks. options: classes; example (an input [n, ...], by which the sizes are known); feedback (false;
-- true: blocks learn by direct feedback alignment); rate (1e-3, or a function that makes an optimizer of parameters).
-- Scores are the mean probabilities of all predictors.
---@param layers Module[]
---@param options { classes: integer, example: Tensor, feedback?: boolean, rate?: number|function }
---@return Learner
return function(layers, options)
  local who = "local.cascaded"
  arguments.expect(who, "layers", layers, "a list")
  local o = arguments.read(who, options, { classes = arguments.none, example = arguments.none, feedback = false,
    rate = 1e-3 }, { classes = "an integer >= 1", example = "a tensor", rate = "a number >= 0 or a function" })
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
    if o.feedback and i < #layers then predictor:buffer("feedback", new_feedback(o.classes, predictor)) end
    stages[i] = { frozen = not o.feedback, forward = function(x) return layer(x) end,
      optimizer = make((o.feedback and nn.Sequential(layer, predictor) or predictor):parameters()),
      loss = function(y, target)
        y = y:flatten(1)
        if not o.feedback then return nn.cross_entropy(predictor(y), target) end
        if i == #layers then return nn.cross_entropy(predictor(y), target.label) end
        return nn.cross_entropy(predictor(y:detach()), target.label)
          + (y * target.wrong:matmul(predictor.feedback)):sum() / y.shape[1]
      end }
  end
  local function read(outputs)
    local sum = 0
    for i, y in ipairs(outputs) do sum = sum + model.predictors[i](y:flatten(1)):softmax(1) end
    return sum / #outputs
  end
  -- What is wrong with the last predictor's probabilities, by a pass ahead.
  local function prepare(x, label)
    local outputs = blocks.outputs(stages, x)
    return x, ty.no_grad(function()
      local said = model.predictors[#outputs](outputs[#outputs]:flatten(1)):softmax(1)
      return { label = label, wrong = said - ty.one_hot(label, o.classes):to(said.dtype) }
    end)
  end
  return blocks.learner { model = model, stages = stages, scores = read, prepare = o.feedback and prepare or nil }
end
