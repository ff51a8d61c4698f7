--- Decoding with a part of the inputs: each linear layer takes the inputs x_j with the largest |x_j| times the norm of
-- their weights, and the weights of the others are not read. Chen et al. 2025, "WINA: Weight Informed Neuron Activation
-- for Accelerating Large Language Model Inference". By |x_j| alone it is that of Liu et al. 2024, "Training-Free
-- Activation Sparsity in Large Language Models" (TEAL), with a threshold for each layer from calibration.
local ty = require "tycho"
local masks = require "tycho.prune.masks"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

-- x [..., in] with zeros for the inputs that are left out.
local function selected(w, x)
  if w.count == w.inputs then return x end
  if w.selection == "threshold" and not w.threshold then
    error("prune.wina: selection by threshold needs prune.calibrate first", 0)
  end
  return ty.sparsify(x, w.scale, w.threshold and 0 or w.count, w.threshold or 0)
end

local function columns_of(module) return surgery.rows(module, module.weight):transpose(0, 1) end

local function forward(self, x, residual, activation)
  local w = self._wina
  if w.watch then w.watch(x) end
  -- The weights of an input lie together, whichever way round the layer has its weight.
  local y = ty.sparse_linear(w.watch and x or selected(w, x), columns_of(self), self.bias)
  return surgery.finish(y, residual, activation)
end

-- The wrapper by which a layer leaves inputs out.
local wina = surgery.wrapper { name = "Wina", field = "_wina", forward = function() return forward end,
  describe = function(w) return ("keeps %d"):format(w.count) end }

-- Stores the weight transposed, as a parameter of the same shape.
local function lay_out(module, by_input)
  if module.fan_in_fan_out then return end
  local weight = module.weight
  local new = ty.no_grad(function()
    if not by_input then return weight:detach():contiguous() end
    return weight:detach():transpose(0, 1):contiguous():transpose(0, 1)
  end)
  surgery.exchange(module, "weight", new:requires_grad_(weight.requires_grad))
end

local function apply(model, options)
  local who = "prune.wina"
  local o = nn.options(who, options, { sparsity = nn.none, criterion = "wina", selection = "topk", targets = nn.none })
  if o.criterion ~= "wina" and o.criterion ~= "teal" then
    error(("%s: criterion must be wina or teal, got %s"):format(who, tostring(o.criterion)), 0)
  end
  if o.selection ~= "topk" and o.selection ~= "threshold" then
    error(("%s: selection must be topk or threshold, got %s"):format(who, tostring(o.selection)), 0)
  end
  local list = masks.layers(who, model, o.targets)
  local before = wina:wrapped(who, model)[1]
  if before then error(who .. ": the model has sparse layers already; prune.unwina takes them away", 0) end
  for _, layer in ipairs(list) do
    local module = layer.module
    local share = type(o.sparsity) == "function" and o.sparsity(layer.name) or o.sparsity
    masks.check_sparsity(who, share)
    local w = module.weight
    if not w:is_floating_point() then
      error(("%s: %s: the weight: expected floats, got %s"):format(who, layer.name, w.dtype), 0)
    end
    local inputs = surgery.sizes(module)
    local scale = nil
    if o.criterion == "wina" then
      scale = ty.no_grad(function() return surgery.rows(module):to("f32"):norm(2, 0) end)
      if w.dtype == "f64" then scale = scale:to "f64" end
    end
    wina:wrap(module, { inputs = inputs, count = math.max(1, math.floor(inputs * (1 - share) + 0.5)),
      sparsity = share, selection = o.selection, scale = scale and ty.keep(scale) })
    lay_out(module, true)
  end
  ty.core.program.renew()
  return model
end

--- Makes the linear layers of a model leave out inputs, for every token. options: sparsity (the share of the inputs
-- that goes, or a function of a layer's name that gives it); criterion ("wina": |x_j| times the norm of the weights of
-- input j; "teal": |x_j|); selection ("topk": the same number for every token; "threshold": by calibrate(), the same
-- number on average); targets (which layers: a Lua pattern of names, or a function of name and module; all but the
-- head). Weights are stored transposed, so that with one token at a time those of the inputs that are left out are not
-- read; names and shapes stay. Returns the model.
---@param model Module
---@param options table
---@return Module model
function M.apply(model, options)
  return nn.for_caller(apply, model, options)
end

-- Calls run() with every layer taking all of its inputs, which watch(layer, x [n, in]) gets to see.
local function observe(who, model, run, watch)
  local list = wina:wrapped(who, model)
  if #list == 0 then error(who .. ": the model has no sparse layers; prune.wina makes them", 3) end
  for _, layer in ipairs(list) do
    layer.module._wina.watch = function(x)
      ty.scope(function() watch(layer, x:detach():reshape(-1, layer.module._wina.inputs)) end)
    end
  end
  local ok, message = pcall(ty.no_grad, run)
  for _, layer in ipairs(list) do layer.module._wina.watch = nil end
  if not ok then error(message, 0) end
  return list
end

--- Sets the thresholds of a model with selection = "threshold": run() calls it on text that is like what is to come; of
-- each layer the scores of at most `most` (100000) inputs are looked at, and a share `sparsity` of these lies below.
-- Returns the model.
---@param model Module
---@param run fun()
---@param most? integer
---@return Module model
function M.calibrate(model, run, most)
  most = most or 100000
  local seen = {}
  local list = observe("prune.calibrate", model, run, function(layer, x)
    local w, own = layer.module._wina, seen[layer.name] or { count = 0 }
    seen[layer.name] = own
    local rows = math.min(x.shape[1], math.max(own.count == 0 and 1 or 0, (most - own.count) // w.inputs))
    if rows == 0 then return end
    local scores = x:narrow(0, 0, rows):to("f32"):abs()
    if w.scale then scores = scores * w.scale:to "f32" end
    own[#own + 1] = ty.keep(scores:flatten())
    own.count = own.count + rows * w.inputs
  end)
  for _, layer in ipairs(list) do
    local w, own = layer.module._wina, seen[layer.name]
    if not own then error(("prune.calibrate: run() did not use %s"):format(layer.name), 2) end
    w.threshold = ty.scope(function()
      local at = math.floor(w.sparsity * own.count)
      return at == 0 and -1 or ty.concat(own, 0):sort(0):narrow(0, at - 1, 1):item()
    end)
  end
  ty.core.program.renew()
  return model
end

--- Measures how leaving inputs out changes each layer: run() calls the model, whose layers take all inputs meanwhile.
-- Returns by name of the layer the squared error of its output over the squares of the output, and the mean of these.
---@param model Module
---@param run fun()
---@return table<string, number> errors
---@return number mean
function M.output_errors(model, run)
  local sums = {}
  local list = observe("prune.output_errors", model, run, function(layer, x)
    local w, own = layer.module._wina, sums[layer.name] or { 0, 0 }
    sums[layer.name] = own
    local columns = columns_of(layer.module)
    own[1] = own[1] + ty.matmul(selected(w, x) - x, columns):to("f32"):square():sum():item()
    own[2] = own[2] + ty.matmul(x, columns):to("f32"):square():sum():item()
  end)
  local errors, mean = {}, 0
  for _, layer in ipairs(list) do
    local own = sums[layer.name]
    if not own then error(("prune.output_errors: run() did not use %s"):format(layer.name), 2) end
    errors[layer.name] = own[1] / math.max(own[2], 1e-300)
    mean = mean + errors[layer.name] / #list
  end
  return errors, mean
end

--- Makes the layers what they were. Returns the model.
---@param model Module
---@return Module model
function M.remove(model)
  for _, layer in ipairs(wina:wrapped("prune.unwina", model)) do
    wina:unwrap(layer.module)
    lay_out(layer.module, false)
  end
  ty.core.program.renew()
  return model
end

return M
