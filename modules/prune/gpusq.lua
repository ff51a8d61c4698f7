--- GPUSQ-ViT: 2:4 sparsity and then integers, both trained with a teacher. Yu et al. 2023, "Boost Vision Transformer
-- with GPU-Friendly Sparsity and Quantization". Of each four neighbouring inputs a weight keeps two, and the dense
-- model teaches what is left by labels, logits and features; then weights and activations are rounded to 8 or 4 bits in
-- the forward pass, and the sparse model teaches, its features weighted by how far rounding moved each block.
--
--     local report = prune.gpusq.compress(model, training, { bits = 8, images = pictures })
--     prune.gpusq.deploy(model)                 -- packed: integer products from here on
--     local bytes = prune.gpusq.save(model, "small.safetensors")
--
-- A packed group of four weights takes two codes and two positions of 2 bits: 20 bits with codes of 8, 12 with codes of
-- 4, in the place of 128.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local masks = require "tycho.prune.masks"
local two_four = require "tycho.prune.two_four"
local vision = require "tycho.vision"

local nn = ty.nn
local surgery = nn.surgery
local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local M = {}

-- Shares of the largest element that a range may end at: what is left out is clipped.
local RANGES = { 1, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4 }

local function most_of(bits) return (1 << bits - 1) - 1 end

-- ---- rounding in training ----

--- x rounded to whole multiples of scale up to `most` of them. The gradient passes where nothing was clipped.
---@param x Tensor
---@param scale Tensor|number  that fits x
---@param most integer
---@return Tensor
function M.round(x, scale, most)
  local who = "prune.gpusq.round"
  expect(who, "x", x, "a tensor")
  expect(who, "most", most, "an integer >= 1")
  if not ty.is_tensor(scale) then expect(who, "scale", scale, "a number > 0") end
  local inside = (x / scale):clamp(-most, most)
  return (inside + ty.no_grad(function() return inside:round() - inside end)) * scale
end

-- The share of its largest element at which the range of each row of x ends best, by the squared error: [rows, 1].
local function best_share(x, bits)
  local most = most_of(bits)
  local largest = x:abs():max(1, true):clamp(1e-12)
  local best, least
  for _, share in ipairs(RANGES) do
    local error = (M.round(x, largest * (share / most), most) - x):square():sum(1, true)
    local shares = ty.full_like(error, share)
    if not least then
      best, least = shares, error
    else
      local better = error:lt(least)
      best, least = ty.where(better, shares, best), ty.where(better, error, least)
    end
  end
  return best, largest
end

-- The scales of a layer's weight as it is now, [rows, 1] or [1, 1].
local function weight_scale(state, weight)
  return ty.no_grad(function()
    local largest = weight:detach():abs():max(1, true)
    if state.scale == "layer" then largest = largest:max(0, true) end
    return (largest:clamp(1e-12) * state.share / most_of(state.bits)):to("f16"):to("f32"):clamp(2 ^ -24)
  end)
end

local function weight_of(module)
  local masked = masks.mask:state(module)
  return surgery.rows(module, masked and masks.effective(module) or module.weight)
end

local rounded = surgery.wrapper { name = "Rounded", field = "_gpusq",
  forward = function()
    return function(self, x, residual, activation)
      local state = self._gpusq
      local weight = weight_of(self)
      if state.bits then weight = M.round(weight, weight_scale(state, weight), most_of(state.bits)) end
      if state.x_bits then x = M.round(x, state.x_scale, most_of(state.x_bits)) end
      return ty.linear(x, weight, self.bias, residual, activation)
    end
  end,
  describe = function(state) return ("weights of %d bits, inputs of %d"):format(state.bits, state.x_bits) end }

local bit_words = "an integer in [2, 8]"

local function quantize(model, images, options)
  local who = "prune.gpusq.quantize"
  expect(who, "model", model, "a module")
  expect(who, "images", images, "a tensor")
  local o = arguments.read(who, options, { bits = 8, activations = none, scale = none, targets = none },
    { bits = bit_words, activations = bit_words, scale = '"layer" or "row"', targets = false })
  local scale, x_bits = o.scale or (o.bits == 8 and "layer" or "row"), o.activations or o.bits
  local list, seen, removers = surgery.find(who, model, { targets = o.targets }), {}, {}
  if #list == 0 then fail("%s: targets: no linear layer matches %s", who, arguments.describe(o.targets)) end
  for i, layer in ipairs(list) do
    if rounded:state(layer.module) then fail("%s: %s is rounded already", who, layer.name) end
    removers[i] = layer.module:register_forward_pre_hook(function(_, x)
      seen[i] = seen[i] or ty.keep(x:detach():reshape(1, -1))
    end)
  end
  local training = model.training
  model:eval()
  local ok, problem = pcall(ty.no_grad, model, images)
  for _, remove in ipairs(removers) do remove() end
  model:train(training)
  if not ok then error(problem, 0) end
  for i, layer in ipairs(list) do
    if not seen[i] then fail("%s: %s saw none of the images", who, layer.name) end
    ty.no_grad(ty.scope, function()
      local share, largest = best_share(seen[i], x_bits)
      local x_scale = (largest * share / most_of(x_bits)):reshape():to("f16"):to("f32"):clamp(2 ^ -24)
      local weight = weight_of(layer.module):detach()
      local rows = scale == "layer" and weight:reshape(1, -1) or weight
      rounded:wrap(layer.module, { bits = o.bits, x_bits = x_bits, scale = scale, x_scale = ty.keep(x_scale),
        share = ty.keep((best_share(rows, o.bits))) })
    end)
  end
  ty.core.program.renew()
  return model
end

--- Rounds the weights of a model's linear layers and their inputs in the forward pass, in place, so that the model can
-- be trained as it will be run. Ranges of inputs are those that round `images` best and stay; those of weights are a
-- share of the largest, the share found once. options: bits (8; of weights), activations (as bits), scale ("layer": one
-- for a weight, with 8 bits; "row": one for each output, with fewer), targets (which layers, as nn.surgery.find has
-- them; all linear ones). Returns the model.
---@param model Module
---@param images Tensor  that the model takes
---@param options? { bits?: integer, activations?: integer, scale?: "layer"|"row", targets?: string|function }
---@return Module
function M.quantize(model, images, options) return nn.for_caller(quantize, model, images, options) end

--- Takes the rounding off again; weights are those that were trained. Returns the model.
---@param model Module
---@return Module
function M.release(model)
  for _, layer in ipairs(rounded:wrapped("prune.gpusq.release", model)) do rounded:unwrap(layer.module) end
  ty.core.program.renew()
  return model
end

-- ---- both stages ----

local own = { bits = 8, activations = none, scale = none, targets = none, images = none, teacher = "sparse",
  prune_steps = 300, quantize_steps = 300, order = "prune", weighted = true, lr = 1e-3, quantize_lr = 5e-4, seed = 0 }
local own_kinds = { bits = bit_words, activations = bit_words, scale = '"layer" or "row"', targets = false,
  images = "a tensor", teacher = '"sparse" or "dense"', prune_steps = "an integer >= 0",
  quantize_steps = "an integer >= 0", order = '"prune" or "quantize" or "dense"', weighted = "a boolean",
  lr = "a finite number >= 0", quantize_lr = "a finite number >= 0", seed = "an integer" }

local function compress(model, dataset, options)
  local who = "prune.gpusq.compress"
  expect(who, "model", model, "a module")
  local given, rest = {}, {}
  for key, value in pairs(expect(who, "options", options, "a table")) do
    if own[key] ~= nil then given[key] = value else rest[key] = value end
  end
  local o = arguments.read(who, given, own, own_kinds)
  local images = expect(who, "images", o.images, "a tensor")
  local dense = model:clone():requires_grad_(false):eval()
  local teacher, report = dense, { losses = {} }
  local function train(steps, lr, seed, weights)
    if steps == 0 then return end
    local how = { teacher = teacher, steps = steps, lr = lr, seed = seed, weights = weights }
    for key, value in pairs(rest) do how[key] = value end
    for _, loss in ipairs((vision.distil(model, dataset, how))) do report.losses[#report.losses + 1] = loss end
  end
  local function prune()
    local before = rounded:wrapped(who, model) -- rounding stands above the masks
    for _, layer in ipairs(before) do
      layer.state = rounded:state(layer.module)
      rounded:unwrap(layer.module)
    end
    masks.magnitude(model, { pattern = "2:4", targets = o.targets or "" })
    for _, layer in ipairs(before) do rounded:wrap(layer.module, layer.state) end
    train(o.prune_steps, o.lr, o.seed)
  end
  local function round()
    local before = model:clone():requires_grad_(false):eval()
    M.quantize(model, images, { bits = o.bits, activations = o.activations, scale = o.scale, targets = o.targets })
    if o.teacher == "sparse" and o.order == "prune" then teacher = before end
    local moved, mean, weights = vision.feature_distances(model, before, images, rest.blocks), 0, {}
    for _, distance in ipairs(moved) do mean = mean + distance / #moved end
    for i, distance in ipairs(moved) do weights[i] = mean > 0 and distance / mean or 1 end
    report.moved, report.weights = moved, weights
    train(o.quantize_steps, o.quantize_lr, o.seed + 1, o.weighted and weights or nil)
  end
  if o.order == "quantize" then
    round()
    prune()
  else
    if o.order == "prune" then prune() else train(o.prune_steps, o.lr, o.seed) end
    round()
  end
  return report
end

--- Both stages, in place: 2:4 masks by magnitude and `prune_steps` (300) with the dense model as teacher, then rounding
-- and `quantize_steps` (300) with the sparse model as teacher. options:
--   images       pictures that ranges are found with, and how far rounding moves blocks
--   bits (8), activations, scale, targets  as quantize() has them
--   teacher      of the second stage, "sparse", or "dense"
--   weighted     true: features weigh by how far rounding moved their block, over the mean; false: all the same
--   lr (1e-3), quantize_lr (5e-4)  rates of the stages; seed (0)
--   order        "prune"; for comparison "quantize", the other way round, and "dense", no zeros at all
-- and those of vision.distil: hard, soft, temperature, features (the shares of the loss), batch_size, transform, quiet.
-- Returns { losses, moved, weights }: of all steps; how far rounding moved each block, relative; what features weigh.
---@param model Module
---@param dataset table  as vision.distil has it
---@param options table
---@return { losses: number[], moved: number[], weights: number[] } report
function M.compress(model, dataset, options) return nn.for_caller(compress, model, dataset, options) end

-- ---- integers ----

local parts = { "values", "positions", "codes", "scales", "x_scale" }

local packed = surgery.wrapper { name = "TwoFour", field = "_two_four", fields = parts,
  forward = function()
    return function(self, x, residual, activation)
      local most = most_of(self._two_four.x_bits)
      local whole = (x / self.x_scale:to "f32"):clamp(-most, most):round():to "i8"
      local sums = two_four.product(whole, self)
      local y = sums:to "f32" * (self.scales:to "f32" * self.x_scale:to "f32")
      return surgery.finish(self.bias and y + self.bias or y, residual, activation)
    end
  end,
  describe = function(state) return ("integers of %d bits, 2 of 4"):format(state.bits) end }

-- A parameter that is no weight of a packed layer, as it is stored: i8 and a scale where it has several dimensions.
local function stored(t)
  local shape, wide = t.shape, 0
  for _, size in ipairs(shape) do wide = wide + (size > 1 and 1 or 0) end
  if wide < 2 then return nil, t:detach():to "f16" end
  local scale = (t:detach():abs():max():clamp(1e-12) / 127):to "f32"
  return (t:detach() / scale):round():clamp(-127, 127):to "i8", scale
end

local function deploy(model)
  local who = "prune.gpusq.deploy"
  local list = rounded:wrapped(who, model)
  if #list == 0 then fail("%s: model: expected one of prune.gpusq.quantize, got %s", who, arguments.describe(model)) end
  local report = { layers = {}, outside = {} }
  ty.no_grad(function()
    for _, layer in ipairs(list) do
      local module, state = layer.module, layer.module._gpusq
      local weight = weight_of(module):detach()
      local scale = weight_scale(state, weight)
      local codes = (weight / scale):clamp(-most_of(state.bits), most_of(state.bits)):round():to "i8"
      local form = two_four.encode(codes, state.bits)
      report.layers[#report.layers + 1] = { name = layer.name, weights = codes:numel(), bytes = form.bytes }
      local x_scale = state.x_scale:to "f16"
      rounded:unwrap(module)
      if masks.mask:state(module) then masks.mask:unwrap(module) end
      surgery.remove(module, "weight")
      for _, name in ipairs { "values", "positions" } do module:buffer(name, form[name]) end
      module:buffer("scales", scale:reshape(-1):to "f16")
      module:buffer("x_scale", x_scale)
      packed:wrap(module, { bits = state.bits, x_bits = state.x_bits })
      rawset(module, "columns", form.columns)
    end
    for name, t in model:named_parameters() do
      local codes, scale = stored(t)
      t:detach():copy_(codes and codes:to "f32" * scale or scale)
      if codes then report.outside[#report.outside + 1] = { name = name, weights = t:numel() } end
    end
  end)
  ty.core.program.renew()
  return report
end

--- Packs the rounded layers of a model, in place, for running: codes of two in four, positions, products of integers.
-- What is left is rounded too: matrices and kernels to 8 bits by their largest, biases and norms to half precision.
-- Returns { layers, outside }: of each packed layer { name, weights, bytes }, and what is not 2:4, { name, weights }.
---@param model Module
---@return { layers: table[], outside: table[] } report
function M.deploy(model) return nn.for_caller(deploy, model) end

-- All that a deployed model is made of, by name, as it is stored.
local function state_of(who, model)
  local list = packed:wrapped(who, model)
  if #list == 0 then fail("%s: model: expected one of prune.gpusq.deploy, got %s", who, arguments.describe(model)) end
  local state, bytes = {}, 0
  for _, layer in ipairs(list) do
    for _, name in ipairs { "values", "positions", "scales", "x_scale" } do
      state[layer.name .. "." .. name] = layer.module[name]:to { device = "cpu" }
    end
  end
  for name, t in model:named_parameters() do
    local codes, scale = stored(t:detach():to { dtype = "f32", device = "cpu" })
    if codes then
      state[name .. ".codes"], state[name .. ".scale"] = codes, scale
    else
      state[name] = scale
    end
  end
  for _, t in pairs(state) do bytes = bytes + t:nbytes() end
  return state, bytes, list
end

--- Bytes of all tensors of a deployed model, as save() writes them.
---@param model Module
---@return integer
function M.bytes(model)
  local _, bytes = state_of("prune.gpusq.bytes", expect("prune.gpusq.bytes", "model", model, "a module"))
  return bytes
end

--- Writes a deployed model as safetensors. Returns the bytes of its tensors.
---@param model Module
---@param path string  of the file
---@return integer bytes
function M.save(model, path)
  local who = "prune.gpusq.save"
  expect(who, "model", model, "a module")
  expect(who, "path", path, "a string")
  local state, bytes, list = state_of(who, model)
  local of = list[1].module._two_four
  ty.io.save_safetensors(path, state, { bits = tostring(of.bits), activations = tostring(of.x_bits) })
  return bytes
end

local function load(model, path)
  local who = "prune.gpusq.load"
  expect(who, "model", model, "a module")
  expect(who, "path", path, "a string")
  local state, about = ty.io.load(path)
  local function want(name, dtype, count)
    local t = state[name]
    if not t or t.dtype ~= dtype or t:numel() ~= count then
      fail("%s: %s: %s: expected %s of %d elements, got %s", who, path, name, dtype, count,
        arguments.describe(t))
    end
    return t
  end
  local function whole(name) return math.tointeger(tonumber(about and about[name])) end
  local bits, x_bits = whole "bits", whole "activations"
  if not bits or not x_bits or bits < 2 or bits > 8 or x_bits < 2 or x_bits > 8 then
    fail("%s: %s: expected a file of prune.gpusq.save, got another one", who, path)
  end
  if #packed:wrapped(who, model) + #rounded:wrapped(who, model) > 0 then
    fail("%s: model: expected one as it was before prune.gpusq, got one that is rounded or packed", who)
  end
  -- All of the file is looked at before anything is changed.
  local forms, values = {}, {}
  for _, layer in ipairs(surgery.find(who, model)) do
    local name = layer.name
    if state[name .. ".values"] then
      local columns, rows = surgery.sizes(layer.module)
      local count, positions, dtype = two_four.sizes(rows, columns, bits)
      local scales = state[name .. ".scales"]
      forms[#forms + 1] = { module = layer.module, columns = columns,
        values = want(name .. ".values", dtype, count):reshape(rows, -1),
        positions = want(name .. ".positions", "u8", positions):reshape(rows, -1),
        scales = want(name .. ".scales", "f16", scales and scales:numel() == 1 and 1 or rows),
        x_scale = want(name .. ".x_scale", "f16", 1):reshape() }
      values[name .. ".weight"] = false
    end
  end
  ty.no_grad(function()
    for name, t in model:named_parameters() do
      if values[name] == nil then
        local value = stored(t) and want(name .. ".codes", "i8", t:numel()):to "f32" * want(name .. ".scale", "f32", 1)
          or want(name, "f16", t:numel())
        values[name] = value:reshape(t.shape)
      end
    end
    for _, form in ipairs(forms) do
      surgery.remove(form.module, "weight")
      for _, name in ipairs { "values", "positions", "scales", "x_scale" } do form.module:buffer(name, form[name]) end
      packed:wrap(form.module, { bits = bits, x_bits = x_bits })
      rawset(form.module, "columns", form.columns)
    end
    for name, t in model:named_parameters() do t:detach():copy_(values[name]) end
  end)
  ty.core.program.renew()
  return model:eval()
end

--- Puts what save() wrote into a model of the same sizes that has not been changed yet. Returns the model.
---@param model Module
---@param path string
---@return Module
function M.load(model, path) return nn.for_caller(load, model, path) end

return M
