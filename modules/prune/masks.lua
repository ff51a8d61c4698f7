--- Pruning by magnitude, and layers that keep to the mask they got. A layer stays the object that it was, with its
-- weights under their names; its class becomes one that multiplies the weight with the mask while it is trained, so
-- that a weight that is gone has no gradient and stays zero whatever the optimizer.
local ty = require "tycho"

local nn = ty.nn
local surgery = nn.surgery
local M = {}

--- The weight that a masked layer computes with, together with the matrices that perp.lua added.
function M.effective(module)
  local p = module._pruned
  local mask = p.mask
  local weight = module.weight
  if p.factors == nil or p.factors.dtype ~= weight.dtype or p.factors.device ~= weight.device then
    p.factors = ty.keep(mask:to { dtype = weight.dtype, device = weight.device })
  end
  mask = p.factors
  if p.adapter then return p.adapter(module, mask) end
  return weight * mask
end

local function forward(base)
  return function(self, x, residual, activation)
    -- A weight that is not trained has its zeros already: the mask is for gradients.
    if not self._pruned.adapter and not self.weight.requires_grad then
      return base.forward(self, x, residual, activation)
    end
    return ty.linear(x, surgery.rows(self, M.effective(self)), self.bias, residual, activation)
  end
end

--- The wrapper that holds a layer to its mask.
M.mask = surgery.wrapper { name = "Masked", field = "_pruned", forward = forward,
  describe = function(p) return ("sparsity = %.3f"):format(p.sparsity) end }

--- Gives a linear layer a mask of its weight's shape: elements where it is false become zero and stay so.
function M.attach(module, mask)
  local kept = mask:to("i64"):sum():item()
  if M.mask:state(module) then
    error("prune: the model has masks already; prune.release takes them away", 0)
  end
  M.mask:wrap(module, { mask = ty.keep(mask), kept = kept, sparsity = 1 - kept / math.max(mask:numel(), 1) })
  ty.no_grad(function() module.weight:copy_(module.weight * mask:to(module.weight.dtype)) end)
end

--- The layers to prune: linear ones that `targets` accepts, as in nn.surgery.find(); without it all but the head. A
-- list of { name, module }, each module once.
function M.layers(who, model, targets)
  local list = surgery.find(who, model, { targets = targets, head = targets ~= nil })
  if #list == 0 then error(("%s: targets: no linear layer matches %s"):format(who, tostring(targets)), 0) end
  for _, layer in ipairs(list) do
    local weight = layer.module.weight
    if not weight:is_floating_point() then
      error(("%s: %s is quantized already (%s)"):format(who, layer.name, weight.dtype), 0)
    end
  end
  return list
end

--- What pruning made of layers: a list of { name, parameters, sparsity, and what else `notes` (a list as long) has },
-- with parameters, sparsity (the share of zeros), dense (bytes of the weights in half precision) and bytes (of the same
-- as prune.compact keeps them: a bit for each weight and those that are not zero) of all together.
---@param list { name: string, module: Module }[]
---@param notes? table[]
---@return table report
function M.report(list, notes)
  local report, zeros = { parameters = 0, dense = 0, bytes = 0 }, 0
  ty.no_grad(ty.scope, function()
    for i, layer in ipairs(list) do
      local weight = layer.module.weight:detach()
      local n = weight:numel()
      local none = n - weight:ne(0):to("i64"):sum():item()
      local row = { name = layer.name, parameters = n, sparsity = none / math.max(n, 1) }
      for key, value in pairs(notes and notes[i] or {}) do row[key] = value end
      report[i], zeros, report.parameters = row, zeros + none, report.parameters + n
      report.bytes = report.bytes + 2 * (n - none) + (n + 7) // 8
    end
  end)
  report.dense, report.sparsity = 2 * report.parameters, zeros / math.max(report.parameters, 1)
  return report
end

--- Returns a share of weights or inputs to leave out, or raises.
function M.check_sparsity(who, value)
  if type(value) ~= "number" or not (value >= 0 and value < 1) then
    error(("%s: sparsity must be a number within [0, 1), got %s"):format(who, tostring(value)), 0)
  end
  return value
end

--- A mask that is false at the `count` smallest scores. scores: of any shape.
function M.all_but_smallest(scores, count)
  local flat = ty.ones({ scores:numel() }, { dtype = "u8", device = scores.device })
  if count > 0 then flat = flat:scatter(0, scores:flatten():argsort(0):narrow(0, 0, count), 0) end
  return flat:reshape(scores.shape):to "bool"
end

--- n and m of "2:4", or nothing without a pattern.
function M.pattern(who, text)
  if text == nil then return end
  local n, m = tostring(text):match "^(%d+):(%d+)$"
  n, m = math.tointeger(n), math.tointeger(m)
  if not n or n < 1 or n >= m then
    error(("%s: pattern must be kept:group, such as 2:4, got %s"):format(who, tostring(text)), 0)
  end
  return n, m
end

--- Raises unless a layer has a whole number of groups.
function M.check_groups(who, n, m, inputs)
  if inputs % m ~= 0 then
    error(("%s: %d:%d needs a multiple of %d inputs, got a weight of %d"):format(who, n, m, m, inputs), 0)
  end
end

--- true for the n largest of each m neighbours in a row. scores: [rows, columns].
function M.largest_of_groups(scores, n, m)
  local groups = scores:reshape(-1, m)
  local _, at = groups:topk(n, 1)
  return ty.zeros(groups.shape, { dtype = "u8", device = scores.device }):scatter(1, at, 1):reshape(scores.shape)
    :to "bool"
end

-- The n largest of each m neighbours along the inputs.
local function of_groups(module, n, m)
  local scores = surgery.rows(module):abs()
  M.check_groups("prune.magnitude", n, m, scores.shape[2])
  return surgery.laid_out(module, M.largest_of_groups(scores, n, m))
end

local function magnitude(model, options)
  local who = "prune.magnitude"
  local o = nn.options(who, options, { sparsity = nn.none, pattern = nn.none, scope = "layer", targets = nn.none })
  if (o.sparsity == nil) == (o.pattern == nil) then error(who .. ": expected sparsity or pattern, and not both", 0) end
  local n, m = M.pattern(who, o.pattern)
  if not m then M.check_sparsity(who, o.sparsity) end
  if o.scope ~= "layer" and o.scope ~= "global" then
    error(("%s: scope must be layer or global, got %s"):format(who, tostring(o.scope)), 0)
  end
  local list = M.layers(who, model, o.targets)
  for _, layer in ipairs(list) do
    if not layer.module.weight:isfinite():all():item() then
      error(("%s: %s: a weight is not finite"):format(who, layer.name), 0)
    end
  end
  ty.no_grad(function()
    local new = {}
    if not m and o.scope == "global" then
      local parts = {}
      for i, layer in ipairs(list) do parts[i] = layer.module.weight:abs():flatten() end
      local all = ty.concat(parts, 0)
      local mask, at = M.all_but_smallest(all, math.floor(o.sparsity * all:numel() + 0.5)), 0
      for i, layer in ipairs(list) do
        local count = layer.module.weight:numel()
        new[i] = mask:narrow(0, at, count):reshape(layer.module.weight.shape):clone()
        at = at + count
      end
    else
      for i, layer in ipairs(list) do
        local weight = layer.module.weight:detach()
        new[i] = m and of_groups(layer.module, n, m) or M.all_but_smallest(weight:abs(),
          math.floor(o.sparsity * weight:numel() + 0.5))
      end
    end
    for i, layer in ipairs(list) do M.attach(layer.module, new[i]) end
  end)
  ty.core.program.renew()
  return model, M.report(list)
end

--- Sets the smallest weights to zero, where they stay through training. options: sparsity (the share that goes), of
-- each layer, or with scope = "global" of all together; or pattern ("2:4": of each 4 neighbouring inputs the 2 largest
-- stay); targets (which linear layers: a Lua pattern of names, or a function of name and module; all but the head).
-- Han et al. 2015, "Learning both Weights and Connections for Efficient Neural Networks". Returns the model and a
-- report: a list of { name, parameters, sparsity }, with parameters, sparsity, dense (bytes in half precision) and
-- bytes (of what prune.compact keeps of them).
---@param model Module
---@param options {sparsity?: number, pattern?: string, scope?: "layer"|"global", targets?: string|function}
---@return Module model
---@return table report
function M.magnitude(model, options)
  return nn.for_caller(magnitude, model, options)
end

--- Makes masks of the weights that are zero, for a model that was pruned, saved and loaded. Returns the model.
---@param model Module
---@param targets? string|function  as magnitude() has them
---@return Module model
function M.zeros(model, targets)
  return nn.for_caller(function()
    for _, layer in ipairs(M.layers("prune.zeros", model, targets)) do
      M.attach(layer.module, layer.module.weight:detach():ne(0))
    end
    ty.core.program.renew()
    return model
  end)
end

--- The masked layers of a model.
function M.masked(who, model) return M.mask:wrapped(who, model) end

--- The share of zeros in the weights of the masked layers, counted.
---@param model Module
---@return number
function M.sparsity(model)
  local zeros, all = 0, 0
  for _, layer in ipairs(M.masked("prune.sparsity", model)) do
    local weight = layer.module.weight:detach()
    zeros, all = zeros + weight:eq(0):to("i64"):sum():item(), all + weight:numel()
  end
  return all > 0 and zeros / all or 0.0
end

--- Takes the masks away; weights that are zero are as any other again. Returns the model.
---@param model Module
---@return Module model
function M.release(model)
  for _, layer in ipairs(M.masked("prune.release", model)) do
    if layer.module._pruned.adapter then error("prune.release: prune.merge the adapters first", 2) end
    M.mask:unwrap(layer.module)
  end
  ty.core.program.renew()
  return model
end

return M
