--- A training step as a program: recorded once, without what a sparse scheme does not need, with every update as soon
-- as its gradient is there, its memory planned before it runs. Zhu et al. 2023, "PockEngine: Sparse and Efficient
-- Fine-tuning in a Pocket".
--
--     local pocket = tiny.pocket(model, {
--       scheme = { weights = { "fc", "layer4" }, biases = { "layer3" } },
--       optimizer = function(parameters) return optim.AdamW(parameters, { lr = 1e-3 }) end,
--       loss = function(network, x, y) return ty.cross_entropy(network(x), y) end,
--     })
--     for batch in loader do total = total + pocket:step(batch.image, batch.label):item() end
--     pocket:remove()
--
-- What a scheme leaves out is gone at two places. Tensors that are frozen ask autograd for no gradient, so the backward
-- pass ends where nothing before it is trained, and inputs of frozen layers are not kept: that is so without a
-- recording, too. tiny.foresee does the same to a recording of the whole step, by leaving out updates and then all that
-- nobody reads, and so tells what any scheme will take before it is used. Only a recording moves updates into the
-- backward pass, so that no two gradients of weights need be there at once.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local scheme = require "tycho.tiny.scheme"

local expect, fail = arguments.expect, arguments.fail
local program = ty.core.program
local M = {}

--- What tiny.pocket makes.
---@class Pocket
---@field model Module
---@field scheme SparseScheme
---@field optimizer Optimizer
local Pocket = {}
Pocket.__index = Pocket

local words = { scheme = "a table", optimizer = "a function", loss = "a function", early = "a boolean",
  arena = "an integer >= 0" }

local function optimizer_of(who, make, parameters)
  local optimizer = make(parameters)
  if type(optimizer) ~= "table" or not optimizer.step or not optimizer.groups then
    fail("%s: optimizer: expected it to return one of ty.optim, got %s", who, arguments.describe(optimizer))
  end
  return optimizer
end

-- The step that is recorded.
local function stepper(who, model, optimizer, loss_of)
  return function(...)
    local loss = loss_of(model, ...)
    if not ty.is_tensor(loss) then
      fail("%s: loss: expected it to return a tensor, got %s", who, arguments.describe(loss))
    end
    optimizer:step(loss)
    return loss
  end
end

--- Takes a model in charge. options:
--   scheme     what is trained (tiny.scheme; everything)
--   optimizer  function(parameters) that makes one of ty.optim for them
--   loss       function(model, ...) of what step() gets
--   early      updates as soon as their gradients are there (true)
--   arena      the most bytes of temporaries; more is an error (0: any number)
---@param model Module
---@param options {scheme?: table, optimizer: function, loss: function, early?: boolean, arena?: integer}
---@return Pocket
function M.pocket(model, options)
  local who = "tiny.pocket"
  expect(who, "model", model, "a module")
  local o = arguments.read(who, expect(who, "options", options, "a table"), { scheme = { weights = { "" },
    biases = { "" } }, optimizer = arguments.none, loss = arguments.none, early = true, arena = 0 }, words)
  expect(who, "optimizer", o.optimizer, "a function")
  expect(who, "loss", o.loss, "a function")
  local self = setmetatable({ model = model, scheme = scheme(model, o.scheme) }, Pocket)
  self.optimizer = optimizer_of(who, o.optimizer, self.scheme.parameters)
  self.run = ty.compile(stepper(who, model, self.optimizer, o.loss), { early = o.early, arena = o.arena })
  return self
end

--- A step: forward, backward, updates. The first two of each form of the arguments run as they are, the second is
-- recorded.
---@param ... any  what loss() gets behind the model
---@return Tensor loss
function Pocket:step(...) return self.run(...) end

--- What was recorded, for each form of the arguments: runs (launches of a replay), dropped, hastened (updates that run
-- earlier than recorded), arena and temporaries (bytes, with and without sharing), recorded, steps and fused.
---@return table[]
function Pocket:report() return program.stats(self.run) end

--- Gives the model back with its weights as they are now.
function Pocket:remove() self.scheme:remove() end

--- What steps by each of some schemes will take, from one recording of the step that trains everything: for each, the
-- graph without the updates that the scheme leaves out, and without what only they needed. Returns a list of { runs,
-- removed (launches less than of the whole), arena (bytes), trained (elements) } and the same of the whole. The model
-- and the generator are left as they were. Schemes of input channels change layers and cannot be told from a recording.
---@param model Module
---@param options {optimizer: function, loss: function}
---@param schemes table[]  as of tiny.scheme
---@param ... any          what loss() gets behind the model
---@return table[] list
---@return table whole
function M.foresee(model, options, schemes, ...)
  local who = "tiny.foresee"
  expect(who, "model", model, "a module")
  expect(who, "schemes", schemes, "a list of tables")
  local o = arguments.read(who, expect(who, "options", options, "a table"), { optimizer = arguments.none,
    loss = arguments.none, early = true }, words)
  expect(who, "optimizer", o.optimizer, "a function")
  expect(who, "loss", o.loss, "a function")
  local rng, copy = ty.rng_state(), model:clone()
  copy:requires_grad_(true)
  local optimizer = optimizer_of(who, o.optimizer, copy:parameters())
  local run = ty.compile(stepper(who, copy, optimizer, o.loss), { early = o.early })
  run(...)
  run(...)
  ty.rng_state(rng)
  local whole = program.stats(run)[1]
  local list = {}
  for i, spec in ipairs(schemes) do
    if spec.channels and next(spec.channels) then
      fail("%s: schemes[%d]: expected weights and biases, got channels", who, i)
    end
    local made = scheme(copy, spec)
    local seen = program.foresee(run, made.frozen)
    list[i] = { runs = seen.runs, removed = whole.runs - seen.runs, arena = seen.arena, trained = made.elements }
    made:remove()
  end
  return list, { runs = whole.runs, removed = 0, arena = whole.arena, trained = model:count_parameters() }
end

return M
