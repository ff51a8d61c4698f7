--- Batch norms that go into the convolutions before them: what a network is before it is trained or quantized where
-- memory is short. The norm is an affine map by the statistics that it has, so the network in evaluation mode stays the
-- same. Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
-- Inference", section 3.2.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local who = "tiny.fold"

-- w' = w * gamma / sqrt(var + eps), b' = (b - mean) * gamma / sqrt(var + eps) + beta
local function fold(conv, norm)
  ty.no_grad(function()
    local scale = ty.rsqrt(norm.running_var:to "f32" + norm.eps)
    if norm.weight then scale = scale * norm.weight end
    local shift = -norm.running_mean * scale
    if norm.bias then shift = shift + norm.bias end
    if conv.bias then shift = shift + conv.bias * scale end
    conv.weight:mul_(scale:reshape(-1, 1, 1, 1))
    if conv.bias then conv.bias:copy_(shift)
    else conv.bias = ty.keep(shift:to(conv.weight.dtype):clone():requires_grad_(conv.weight.requires_grad)) end
  end)
end

-- Tells its state's `see` what the layer got and gave.
local watched = nn.surgery.wrapper {
  name = "Watched", field = "_watched",
  forward = function(base)
    return function(self, x, ...)
      local y = base.forward(self, x, ...)
      self._watched.see(self, x, y)
      return y
    end
  end,
}

-- The convolution before each norm, where there is just one and nothing but this norm follows it.
local function pairs_of(model, modules, ...)
  local maker, before, norms = {}, {}, {}
  local function convolved(conv, _, y) maker[y] = conv end
  local function normed(norm, x)
    local conv = maker[x]
    before[norm] = before[norm] == nil and conv or false
    if conv then norms[conv] = norms[conv] == nil and norm or false end
  end
  for _, module in pairs(modules) do
    local class = getmetatable(module)
    if class == nn.Conv2d then watched:wrap(module, { see = convolved })
    elseif class == nn.BatchNorm2d and module.running_mean then watched:wrap(module, { see = normed }) end
  end
  local ok, result = pcall(ty.no_grad, model.forward, model, ...)
  for _, layer in ipairs(watched:wrapped(who, model)) do watched:unwrap(layer.module) end
  if not ok then error(result, 0) end
  for norm, conv in pairs(before) do
    if not conv or norms[conv] ~= norm then before[norm] = nil end
  end
  return before, result
end

--- Puts every nn.BatchNorm2d that gets what a convolution gave, and nothing else, into that convolution, and an
-- nn.Identity in its place. Which do, a forward pass shows, and a second one that the network is still the same. The
-- model is left in evaluation mode.
---@param model Module
---@param ... any  what forward() gets
---@return integer count  norms that are gone
return function(model, ...)
  arguments.expect(who, "model", model, "a module")
  model:eval()
  local _, modules = nn.surgery.modules(model)
  local before, was = pairs_of(model, modules, ...)
  local count = 0
  for _, parent in pairs(modules) do
    for key, norm in pairs(parent) do
      local conv = before[norm]
      if conv then
        fold(conv, norm)
        parent[key] = nn.Identity()
        count = count + 1
      end
    end
  end
  ty.core.program.renew()
  local now = ty.no_grad(model.forward, model, ...)
  if ty.is_tensor(was) and ty.is_tensor(now) then
    local change = (now - was):abs():amax():item() / math.max(was:abs():amax():item(), 1e-30)
    if change >= 1e-3 then
      arguments.fail("%s: model: expected convolutions whose results go nowhere but to their norms; the output moved "
        .. "by %.3g", who, change)
    end
  end
  return count
end
