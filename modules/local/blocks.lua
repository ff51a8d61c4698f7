--- Training in blocks: what one hands to the next has no history, so that the graph of a block, with all that it keeps
-- for its backward pass, is freed before that of the next is made.
--
-- A stage is a table: forward(x) gives what is handed on; loss(y, target) the loss of this block, of one element;
-- optimizer steps on it. Perhaps frozen (true: forward is not trained, only what loss uses) and after() (called when
-- the optimizer has done its step).
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect = arguments.expect
local M = {}

---@class Stage
---@field forward fun(x: Tensor): Tensor
---@field loss fun(y: Tensor, target: any): Tensor
---@field optimizer Optimizer
---@field frozen? boolean
---@field after? fun()

local function check_stages(who, stages)
  expect(who, "stages", stages, "a list of tables")
  if #stages == 0 then arguments.fail("%s: stages: expected at least one, got none", who) end
  for i, stage in ipairs(stages) do
    expect(who, ("stages[%d].forward"):format(i), stage.forward, "a function")
    expect(who, ("stages[%d].loss"):format(i), stage.loss, "a function")
  end
end

-- What a stage hands on, and its loss.
local function ahead(stage, x, target)
  local y
  if stage.frozen then y = ty.no_grad(stage.forward, x) else y = stage.forward(x) end
  return y, stage.loss(y, target)
end

--- One step: block after block forward, backward and an update; the next block sees what came before the update.
-- Returns the losses.
---@param stages Stage[]
---@param x Tensor
---@param target any
---@return number[] losses
function M.step(stages, x, target)
  local who = "local.blocks.step"
  check_stages(who, stages)
  expect(who, "x", x, "a tensor")
  local losses = {}
  x = x:detach()
  for i, stage in ipairs(stages) do
    expect(who, ("stages[%d].optimizer"):format(i), stage.optimizer, "a table")
    local given <close> = x -- which is gone before the next block begins
    x = ty.scope(function()
      local y, loss = ahead(stage, given, target)
      stage.optimizer:step(loss)
      losses[i] = loss:item()
      return y:detach()
    end)
    if stage.after then stage.after() end
  end
  return losses
end

--- The gradients of one step without its updates: for each block those of its loss by its own parameters.
---@param stages Stage[]
---@param x Tensor
---@param target any
---@param parameters Tensor[][]  of each block; false for one that its loss does not use
---@return (Tensor|false)[][]
function M.gradients(stages, x, target, parameters)
  local who = "local.blocks.gradients"
  check_stages(who, stages)
  expect(who, "x", x, "a tensor")
  expect(who, "parameters", parameters, "a list of lists")
  if #parameters ~= #stages then
    arguments.fail("%s: parameters: expected a list for each of %d stages, got %d", who, #stages, #parameters)
  end
  local all = {}
  x = x:detach()
  for i, stage in ipairs(stages) do
    local y, loss = ahead(stage, x, target)
    all[i] = #parameters[i] > 0 and ty.grad(loss, parameters[i], { allow_unused = true }) or {}
    for k = 1, #parameters[i] do all[i][k] = all[i][k] or false end
    x = y:detach()
  end
  return all
end

--- What the blocks hand on, one after the other, without gradients.
---@param stages Stage[]
---@param x Tensor
---@return Tensor[]
function M.outputs(stages, x)
  local who = "local.blocks.outputs"
  check_stages(who, stages)
  expect(who, "x", x, "a tensor")
  return ty.no_grad(function()
    local list = {}
    for i, stage in ipairs(stages) do
      x = stage.forward(x)
      list[i] = x
    end
    return list
  end)
end

--- What is trained in blocks: a step on pictures and labels, and scores of the classes.
---@class Learner
---@field stages Stage[]
---@field model Module  all of its weights
local Learner = {}
Learner.__index = Learner
Learner.__name = "Learner"

--- A learner of stages. spec: stages; model (a module that holds all weights, for saving and copying); scores(outputs,
-- x) (of the classes, [n, classes], from what the blocks hand on); prepare(x, label) (what training begins with and its
-- target: by itself the two as they are); read(x) (scores in place of those by the outputs).
---@param spec { stages: Stage[], model: Module, scores?: function, prepare?: function, read?: function }
---@return Learner
function M.learner(spec)
  local who = "local.blocks.learner"
  expect(who, "spec", spec, "a table")
  check_stages(who, spec.stages)
  expect(who, "spec.model", spec.model, "a module")
  expect(who, "spec.prepare", spec.prepare, "a function or nil")
  expect(who, "spec.read", spec.read, "a function or nil")
  if not spec.read then expect(who, "spec.scores", spec.scores, "a function") end
  return setmetatable({ stages = spec.stages, model = spec.model, prepare = spec.prepare, read = spec.read,
    from_outputs = spec.scores }, Learner)
end

--- Trains on a batch. Returns the losses of the blocks.
---@param x Tensor      [n, ...]
---@param label Tensor  i64 [n]
---@return number[]
function Learner:step(x, label)
  local who = "Learner:step"
  expect(who, "self", self, "a table")
  expect(who, "x", x, "a tensor")
  expect(who, "label", label, "a tensor")
  expect(who, "self.stages", self.stages, "a list")
  local target = label
  if self.prepare then x, target = self.prepare(x, label) end
  return M.step(self.stages, x, target)
end

--- Scores of the classes, [n, classes], in evaluation mode and without gradients, 512 rows at a time.
---@param x Tensor
---@return Tensor
function Learner:scores(x)
  local who = "Learner:scores"
  expect(who, "self", self, "a table")
  expect(who, "x", x, "a tensor")
  expect(who, "self.model", self.model, "a module")
  if x.ndim < 2 or x.shape[1] == 0 then
    arguments.fail("%s: x: expected [n, ...] with n > 0, got %s", who, arguments.describe(x))
  end
  self.model:eval()
  local scores = ty.no_grad(ty.nn.in_parts, x, 512, self.read or function(part)
    return self.from_outputs(M.outputs(self.stages, part), part)
  end)
  self.model:train()
  return scores
end

--- The share of labels that have the highest score.
---@param set { x: Tensor, label: Tensor }
---@return number
function Learner:accuracy(set)
  expect("Learner:accuracy", "set", set, "a table")
  expect("Learner:accuracy", "set.label", set.label, "a tensor")
  return self:scores(set.x):argmax(1):eq(set.label):to("f64"):mean():item()
end

-- ---- what the ways share ----

--- What prepares batches for losses that compare right labels with wrong ones: prepare(x, label) gives with(x, label)
-- and behind it with(x, another label, drawn anew), and the label.
---@param with fun(x: Tensor, label: Tensor): Tensor
---@param classes integer
---@return fun(x: Tensor, label: Tensor): Tensor, Tensor
function M.paired(with, classes)
  expect("local.blocks.paired", "with", with, "a function")
  expect("local.blocks.paired", "classes", classes, "an integer >= 2")
  return function(x, label)
    local other = (label + ty.randint(1, classes, label.shape, { device = label.device })) % classes
    return ty.concat({ with(x, label), with(x, other) }, 0), label
  end
end

local function adam(lr)
  return function(parameters) return ty.optim.AdamW(parameters, { lr = lr, weight_decay = 0 }) end
end

--- What makes an optimizer of parameters: a function as it is; of a number AdamW with that rate and no decay.
---@param rate number|fun(parameters: Tensor[]): Optimizer
---@return fun(parameters: Tensor[]): Optimizer
function M.optimizer(rate)
  expect("local.blocks.optimizer", "rate", rate, "a number >= 0 or a function")
  return type(rate) == "number" and adam(rate) or rate
end

--- The size without its first of what each layer gives, in evaluation mode: { { 64 }, { 16, 8, 8 } }.
---@param layers Module[]
---@param x Tensor  an example, [n, ...]
---@return integer[][]
function M.sizes(layers, x)
  local who = "local.blocks.sizes"
  expect(who, "layers", layers, "a list")
  expect(who, "x", x, "a tensor")
  if x.ndim < 2 then arguments.fail("%s: x: expected [n, ...], got %s", who, arguments.describe(x)) end
  for i, layer in ipairs(layers) do expect(who, ("layers[%d]"):format(i), layer, "a module") end
  local sizes = {}
  ty.no_grad(function()
    for i, layer in ipairs(layers) do
      local training = layer.training
      layer:eval()
      x = layer(x)
      layer:train(training)
      sizes[i] = table.move(x.shape, 2, x.ndim, 1, {})
    end
  end)
  return sizes
end

--- Training from end to end as a learner: one block, whose loss is the cross entropy of what the last layer gives.
-- options: rate (1e-3, or a function that makes an optimizer).
---@param layers Module[]  one after the other; the last gives [n, classes]
---@param options? { rate: number|function }
---@return Learner
function M.end_to_end(layers, options)
  local who = "local.blocks.end_to_end"
  expect(who, "layers", layers, "a list")
  for i, layer in ipairs(layers) do expect(who, ("layers[%d]"):format(i), layer, "a module") end
  local o = arguments.read(who, options, { rate = 1e-3 }, { rate = "a number >= 0 or a function" })
  local model = ty.nn.Sequential(table.unpack(layers))
  return M.learner { model = model, scores = function(outputs) return outputs[1] end, stages = { {
    forward = function(x) return model(x) end, loss = ty.nn.cross_entropy,
    optimizer = M.optimizer(o.rate)(model:parameters()) } } }
end

return M
