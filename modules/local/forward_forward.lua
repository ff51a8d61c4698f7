--- Forward-Forward: a layer learns to be much alive for inputs with their right label and little for those with
-- another. Hinton 2022, "The Forward-Forward Algorithm: Some Preliminary Investigations" (arXiv 2212.13345). The
-- goodness of a layer is the mean square of what it gives; a right input is to have more than the threshold, a wrong
-- one less. Before the next layer lengths are made equal, so that it cannot read the goodness of the one before.
--
-- The label stands beside the input, a number for each class, where Hinton writes it into the black border of pictures.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.local.blocks"

local nn = ty.nn

-- Rows of mean square 1, the mean left in place: layer normalisation without it.
local function equal_lengths(x) return x * (x:square():mean(-1, true) + 1e-8):rsqrt() end

local function goodness(y) return y:square():mean(-1) end

--- A learner of layers, each of which has its activation in it; the first takes width + classes numbers, the label's
-- behind the input's. options: classes; rate (1e-3, or a function that makes an optimizer of parameters); threshold
-- (2); strength (2: the number that stands for a label, in lengths of the input). A class's score is the sum of the
-- goodness with its label over all layers but the first (of one layer: its own).
---@param layers Module[]
---@param options { classes: integer, rate?: number|function, threshold?: number, strength?: number }
---@return Learner
return function(layers, options)
  local who = "local.forward_forward"
  arguments.expect(who, "layers", layers, "a list")
  for i, layer in ipairs(layers) do arguments.expect(who, ("layers[%d]"):format(i), layer, "a module") end
  local o = arguments.read(who, options, { classes = arguments.none, rate = 1e-3, threshold = 2, strength = 2 },
    { classes = "an integer >= 2", rate = "a number >= 0 or a function", threshold = "a finite number",
      strength = "a finite number" })
  arguments.expect(who, "classes", o.classes, "an integer >= 2")
  local model, stages, make = nn.ModuleList(layers), {}, blocks.optimizer(o.rate)
  -- The first half of a batch is right, the second wrong.
  local function loss(y)
    local g = goodness(y)
    local n = g.shape[1] // 2
    local right, wrong = g:narrow(0, 0, n), g:narrow(0, n, n)
    return (ty.softplus(-right + o.threshold) + ty.softplus(wrong - o.threshold)):mean()
  end
  for i, layer in ipairs(layers) do
    stages[i] = { loss = loss, optimizer = make(layer:parameters()),
      forward = function(x) return layer(i > 1 and equal_lengths(x) or x) end }
  end
  local function with(x, label)
    x = x:flatten(1)
    local length = x:square():sum(1, true):sqrt()
    return ty.concat({ x, ty.one_hot(label, o.classes):to(x.dtype) * (length * o.strength) }, 1)
  end
  local function read(x)
    local scores = {}
    for class = 0, o.classes - 1 do
      local outputs = blocks.outputs(stages, with(x, ty.full({ x.shape[1] }, class, { dtype = "i64",
        device = x.device })))
      local sum = goodness(outputs[math.min(2, #outputs)])
      for i = 3, #outputs do sum = sum + goodness(outputs[i]) end
      scores[class + 1] = sum
    end
    return ty.stack(scores, 1)
  end
  return blocks.learner { model = model, stages = stages, prepare = blocks.paired(with, o.classes), read = read }
end
