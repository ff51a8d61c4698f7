--- EfficientQAT: weights of few bits, trained block by block and then end to end. Chen et al. 2024, "EfficientQAT:
-- Efficient Quantization-Aware Training for Large Language Models". The first phase (Block-AP, section 3.2) trains the
-- weights, step sizes and zero points of a block until it gives what the original block gave; the second (E2E-QP,
-- section 3.3) keeps the integer codes and trains only the step sizes, on the loss of the whole model.
--
--     local qat = quant.efficient_qat
--     local report = qat.block_ap(model, corpus.training, { bits = 2, group = 64 })
--     llm.train.fit(model, corpus.training, { steps = 100, optimizer = function(_, o)
--       return ty.optim.AdamW(qat.steps(model), { lr = 2e-4, schedule = o.schedule })
--     end })
--     qat.finish(model)
--
-- After the first phase the layers hold packed codes, zero points and steps, and no other weight.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local blocks = require "tycho.quant.blocks"
local calibration = require "tycho.quant.calibration"
local gptq = require "tycho.quant.gptq"
local packing = require "tycho.quant.packing"

local nn = ty.nn
local surgery = nn.surgery
local expect, fail = arguments.expect, arguments.fail
local M = {}

-- ---- fake quantization ----

-- A value, exactly, with the gradient of x.
local function straight(x, value) return value + (x - x:detach()) end

--- What weights w [rows, n] are rounded to, each row one group: step (clip(round(w / step) + zero) - zero), equations
-- 1 and 2. step and zero: [rows, 1]. Gradients pass roundings as if these were not there, and codes where they
-- are not clipped; steps are kept in [1e-4, 1e4] and zero points whole and on the grid, straight through as well.
---@param w Tensor
---@param step Tensor
---@param zero Tensor
---@param bits integer
---@return Tensor
function M.fake(w, step, zero, bits)
  local who = "quant.efficient_qat.fake"
  local top = (1 << expect(who, "bits", bits, "an integer in [1, 8]")) - 1
  expect(who, "w", w, "a tensor")
  expect(who, "step", step, "a tensor")
  expect(who, "zero", zero, "a tensor")
  step = straight(step, step:detach():clamp(1e-4, 1e4))
  zero = straight(zero, zero:detach():round():clamp(0, top))
  local scaled = w / step
  local code = (straight(scaled, scaled:detach():round()) + zero):clamp(0, top)
  return (code - zero) * step
end

-- Rows of w cut into groups, [rows * groups, group]; the last group of a row is filled with zeros.
local function grouped(w, group)
  local rows, columns = w.shape[1], w.shape[2]
  local groups = (columns + group - 1) // group
  if groups * group > columns then
    w = ty.concat({ w, ty.zeros({ rows, groups * group - columns }, { dtype = w.dtype, device = w.device }) }, 1)
  end
  return w:reshape(rows * groups, group)
end

local function joined(w, rows, columns) return w:reshape(rows, -1):narrow(1, 0, columns) end

local training = surgery.wrapper {
  name = "QuantTraining", field = "_training", fields = { "step", "zero" },
  forward = function()
    return function(self, x, residual, activation)
      local o = self._training
      local w = M.fake(grouped(surgery.rows(self, self.weight), o.group), self.step, self.zero, o.bits)
      local y = ty.linear(x, joined(w, o.rows, o.columns), self.bias)
      return surgery.finish(y, residual, activation)
    end
  end,
}

-- ---- packed layers ----

local packed = surgery.wrapper {
  name = "Quant", field = "_quant", fields = { "codes", "zeros", "steps" },
  forward = function()
    return function(self, x, residual, activation)
      return surgery.finish(ty.linear(x, M.weight(self):to(x.dtype), self.bias), residual, activation)
    end
  end,
  describe = function(o) return ("%d bits in groups of %d"):format(o.bits, o.group) end,
}

--- The weight that a packed layer stands for, f32 [outputs, inputs]: (code - zero) step. Differentiable in the steps.
---@param module Module
---@return Tensor
function M.weight(module)
  local o = nn.is_module(module) and packed:state(module)
  if not o then
    fail("quant.efficient_qat.weight: module: expected a packed layer, got %s", arguments.describe(module))
  end
  local groups = module.steps.shape[2]
  local function spread(x) -- [rows, groups] for each column
    return x:unsqueeze(2):expand(o.rows, groups, o.group):reshape(o.rows, groups * o.group):narrow(1, 0, o.columns)
  end
  local from_zero = ty.no_grad(function()
    return packing.unpack(module.codes, o.bits, o.columns):to "f32"
      - spread(packing.unpack(module.zeros, o.bits, groups):to "f32")
  end)
  return from_zero * spread(module.steps:to "f32")
end

-- Puts codes [rows, columns], zeros and steps [rows, groups] in the place of a layer's weight; returns its row of a
-- report. Steps are stored in half precision, as finish() leaves them.
local function pack(layer, codes, zeros, steps, o)
  local module, rows, columns = layer.module, codes.shape[1], codes.shape[2]
  local dtype = module.weight.dtype
  local state = { bits = o.bits, group = o.group, rows = rows, columns = columns, dtype = dtype }
  packed:wrap(module, state)
  surgery.remove(module, "weight")
  module:buffer("codes", packing.pack(codes, o.bits))
  module:buffer("zeros", packing.pack(zeros, o.bits))
  module:parameter("steps", steps:to("f16"):to("f32"))
  local bytes = module.codes:nbytes() + module.zeros:nbytes() + 2 * steps:numel()
  return { name = layer.name, parameters = rows * columns, bits = 8 * bytes / (rows * columns) }
end

-- The codes, zeros and steps of a layer that was trained.
local function codes_of(module)
  local o = module._training
  local top, groups = (1 << o.bits) - 1, module.step.shape[1] // o.rows
  local step = module.step:detach():clamp(1e-4, 1e4):to("f16"):to "f32" -- as it will be stored
  local zero = module.zero:detach():round():clamp(0, top)
  local w = grouped(surgery.rows(module):to "f32", o.group)
  local codes = ((w / step):round() + zero):clamp(0, top)
  return joined(codes, o.rows, o.columns), zero:reshape(o.rows, groups), step:reshape(o.rows, groups)
end

-- Wraps a layer for training, from the grid that rounding to nearest has.
local function begin(layer, o)
  local w = gptq.weight_of(o.who, layer)
  local scale, offset = gptq.grid(grouped(w, o.group), { bits = o.bits, symmetric = false, mse = o.mse })
  training:wrap(layer.module, { bits = o.bits, group = o.group, rows = w.shape[1], columns = w.shape[2] })
  layer.module:parameter("step", scale:contiguous())
  layer.module:parameter("zero", (-offset / scale):round():contiguous())
end

local function finish_training(layer, o)
  local codes, zeros, steps = codes_of(layer.module)
  training:unwrap(layer.module)
  return pack(layer, codes, zeros, steps, o)
end

local function summed(report)
  local bits, all = 0, 0
  for _, row in ipairs(report) do bits, all = bits + row.bits * row.parameters, all + row.parameters end
  report.bits = bits / all
  return report
end

local grid = { bits = 2, group = 64, mse = false }
local kinds = { bits = "2 or 3 or 4", group = "an integer >= 1", mse = "a boolean", epochs = "an integer >= 0",
  weight_lr = "a finite number >= 0", step_lr = "a finite number >= 0", shrink = "a number >= 1",
  weights = "a boolean" }

local function read(who, options, more)
  local defaults = {}
  for _, list in ipairs { grid, more } do
    for key, value in pairs(list) do defaults[key] = value end
  end
  local o = arguments.read(who, options, defaults, kinds)
  o.who = who
  return o
end

local function check_layers(who, model, skip)
  local found = blocks.linears(who, model, skip)
  for _, layer in ipairs(found) do
    if packed:state(layer.module) then fail("%s: %s is packed already", who, layer.name) end
    gptq.weight_of(who, layer)
  end
  return found
end

-- ---- the first phase ----

-- The mean squared distance of a block's output to the targets, weighted by tokens.
local function distance(step, inputs, targets)
  local sum, count = 0, 0
  for k, call in ipairs(inputs) do
    ty.no_grad(ty.scope, function()
      sum = sum + (step.output(call) - targets[k]):square():sum():item()
      count = count + targets[k]:numel()
    end)
  end
  return count > 0 and sum / count or nil
end

-- Trains one block; its layers are wrapped.
local function train_block(step, o, generator)
  local weights, grids = {}, {}
  for _, layer in ipairs(step.layers) do
    grids[#grids + 1] = layer.module.step:requires_grad_(true)
    grids[#grids + 1] = layer.module.zero:requires_grad_(true)
    if o.weights then weights[#weights + 1] = layer.module.weight:requires_grad_(true) end
  end
  local total = o.epochs * #step.inputs
  local function schedule(at) -- a cosine down to 1 / shrink of the rate, as the authors' code has it
    local low = 1 / o.shrink
    return low + (1 - low) * (1 + math.cos(math.pi * math.min(1, at / total))) / 2
  end
  local groups = { { params = grids, lr = o.step_lr } }
  if #weights > 0 then groups[2] = { params = weights, lr = o.weight_lr } end
  local opt = ty.optim.AdamW(groups, { weight_decay = 0, schedule = schedule })
  for _ = 1, o.epochs do
    for _, k in ipairs(generator(#step.inputs)) do
      ty.scope(function()
        opt:step((step.output(step.inputs[k]) - step.targets[k]):square():mean())
      end)
    end
  end
  for _, list in ipairs { weights, grids } do
    for _, p in ipairs(list) do p:requires_grad_(false) end
  end
end

local function block_ap(model, data, options)
  local more = { epochs = 2, weight_lr = 2e-5, step_lr = 1e-4, shrink = 20, weights = true }
  for key, value in pairs(calibration.options) do more[key] = value end
  local o = read("quant.efficient_qat.block_ap", options, more)
  check_layers(o.who, model, o.skip)
  local report, flags = { blocks = {} }, {}
  for _, p in ipairs(model:parameters()) do
    flags[p] = p.requires_grad
    p:requires_grad_(false)
  end
  local drawn = 0
  local function order(n) -- a permutation of 1 to n, by the seed alone
    drawn = drawn + 1
    local list = ty.seeded_noise(ty.zeros(n), o.seed * 100003 + drawn, "uniform"):argsort():tolist()
    for i, at in ipairs(list) do list[i] = at + 1 end
    return list
  end
  local ok, problem = pcall(calibration.walk, o.who, model, data, o, function(step)
    for _, layer in ipairs(step.layers) do
      ty.no_grad(begin, layer, o)
    end
    local row = { index = step.index, rounded = distance(step, step.inputs, step.targets),
      held_rounded = distance(step, step.held.inputs, step.held.targets) }
    if o.epochs > 0 then train_block(step, o, order) end
    for _, layer in ipairs(step.layers) do
      report[#report + 1] = ty.no_grad(finish_training, layer, o)
    end
    row.trained = distance(step, step.inputs, step.targets)
    row.held_trained = distance(step, step.held.inputs, step.held.targets)
    report.blocks[#report.blocks + 1] = row
  end)
  for _, p in ipairs(model:parameters()) do p:requires_grad_(flags[p] or false) end
  if not ok then error(problem, 0) end
  return summed(report)
end

--- Block-AP: the linear layers of a model's blocks, one block after the other, trained in few bits until the block
-- gives what it gave, from the inputs that the blocks before it now give; then packed, in place. Embeddings, norms,
-- biases and the head stay. options: bits (2; or 3, 4), group (64; the last group of a row may have fewer), mse (false:
-- search for the range to begin with), epochs (2), weight_lr (2e-5), step_lr (1e-4, of steps and zero points), shrink
-- (20: the rates fall to a 20th along a cosine), weights (true; false trains steps and zero points alone), rows (128),
-- batch (8), seed (0), device, skip, held (0: rows to measure the blocks on that they are not trained with).
-- Returns a list of { name, parameters, bits }, the mean of bits in `bits`, and in `blocks` for each block the mean
-- squared distance of its output: rounded and trained, held_rounded and held_trained.
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options? table
---@return table report
function M.block_ap(model, data, options) return nn.for_caller(block_ap, model, data, options) end

-- ---- other beginnings ----

local function round(model, options)
  local o = read("quant.efficient_qat.round", options, { skip = {} })
  local report = {}
  for _, layer in ipairs(check_layers(o.who, model, o.skip)) do
    ty.no_grad(ty.scope, function()
      begin(layer, o)
      report[#report + 1] = finish_training(layer, o)
    end)
  end
  ty.core.program.renew()
  return summed(report)
end

--- Rounds the layers to nearest and packs them, in place: what block_ap() gives after no steps. options: bits, group,
-- mse, skip.
---@param model LanguageModel
---@param options? table
---@return table report
function M.round(model, options) return nn.for_caller(round, model, options) end

local function from_gptq(model, data, options)
  local more = { damp = 0.01, block = 128 }
  for key, value in pairs(blocks.options) do more[key] = value end
  local o = read("quant.efficient_qat.gptq", options, more)
  check_layers(o.who, model, o.skip)
  gptq.check_solver(o.who, o)
  local report, later = {}, {}
  blocks.walk(o.who, model, data, o, function(group, moment)
    for _, layer in ipairs(group) do
      local w = gptq.weight_of(o.who, layer)
      -- With act_order the grids are those of the weights as they were, and so known here.
      local value, codes = gptq.solved(o.who, layer.name, gptq.solve, w, moment, { bits = o.bits, group = o.group,
        symmetric = false, mse = o.mse, act_order = true, damp = o.damp, block = o.block })
      local scale, offset = gptq.grid(grouped(w, o.group), { bits = o.bits, symmetric = false, mse = o.mse })
      local rows = w.shape[1]
      layer.module.weight:detach():copy_(surgery.laid_out(layer.module, value))
      later[#later + 1] = { layer, ty.keep(codes), ty.keep((-offset / scale):round():reshape(rows, -1)),
        ty.keep(scale:reshape(rows, -1)) }
    end
  end)
  for _, each in ipairs(later) do
    ty.no_grad(function() report[#report + 1] = pack(each[1], each[2], each[3], each[4], o) end)
  end
  return summed(report)
end

--- GPTQ's codes in packed layers, so that their steps can be trained: quant.gptq.quantize() with the columns by the
-- size of their inputs. options: bits, group, mse, damp, block, rows, batch, seed, device, skip.
---@param model LanguageModel
---@param data PackedDataset|table[]
---@param options? table
---@return table report
function M.gptq(model, data, options) return nn.for_caller(from_gptq, model, data, options) end

-- ---- the second phase ----

local function layers_of(who, model)
  expect(who, "model", model, "a module")
  local found = packed:wrapped(who, model)
  if #found == 0 then fail("%s: model: expected one with packed layers, got %s", who, arguments.describe(model)) end
  return found
end

--- The step sizes of all packed layers, f32 [outputs, groups] each, ready to be trained; nothing else of the model is.
---@param model Module
---@return Tensor[]
function M.steps(model)
  local list = {}
  local found = layers_of("quant.efficient_qat.steps", model)
  for _, p in ipairs(model:parameters()) do p:requires_grad_(false) end
  for _, layer in ipairs(found) do list[#list + 1] = layer.module.steps:requires_grad_(true) end
  return list
end

--- Ends the second phase: the steps are rounded to the half precision in which they are stored, and trained no more.
---@param model Module
---@return Module model
function M.finish(model)
  for _, layer in ipairs(layers_of("quant.efficient_qat.finish", model)) do
    local steps = layer.module.steps:requires_grad_(false)
    ty.no_grad(function() steps:copy_(steps:to("f16"):to "f32") end)
  end
  return model
end

--- The packed layers as ordinary ones, in place, with the values that they stand for.
---@param model Module
---@return Module model
function M.unpack(model)
  for _, layer in ipairs(layers_of("quant.efficient_qat.unpack", model)) do
    local module = layer.module
    ty.no_grad(function() packed:restore(module, M.weight(module):to(module._quant.dtype):contiguous()) end)
  end
  return model
end

return M
