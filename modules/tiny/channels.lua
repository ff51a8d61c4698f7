--- Layers of which some input channels are trained: the weight's gradient is computed, and the input kept for it, for
-- these alone. Lin et al. 2022, "On-Device Training Under 256KB Memory", section 3.2 (sub-layers).
local ty = require "tycho"

local surgery = ty.nn.surgery

-- ctx keeps the channels of x that are trained, and the whole weight for the gradient of x.
local linear = ty.custom_op {
  name = "partial_linear",
  forward = function(ctx, x, part, weight, bias)
    ctx:save(x:narrow(-1, 0, part.shape[2]):clone(), weight)
    return ty.linear(x, weight, bias)
  end,
  backward = function(ctx, g)
    local some, weight = ctx:saved()
    local rows = g:reshape(-1, g.shape[g.ndim])
    return g:matmul(weight), rows:transpose(0, 1):matmul(some:reshape(rows.shape[1], -1)), nil, rows:sum(0)
  end,
}

local conv = ty.custom_op {
  name = "partial_conv2d",
  forward = function(ctx, x, part, weight, bias, layer)
    ctx.layer, ctx.size, ctx.part = layer, x.shape, part.shape
    ctx:save(x:narrow(1, 0, part.shape[2]):clone(), weight)
    return ty.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation)
  end,
  backward = function(ctx, g)
    local some, weight = ctx:saved()
    local layer = ctx.layer
    return ty.conv2d_backward_input(g, weight, ctx.size, layer.stride, layer.padding, layer.dilation, 1),
      ty.conv2d_backward_weight(g, some, ctx.part, layer.stride, layer.padding, layer.dilation, 1), nil,
      g:sum { 0, 2, 3 }
  end,
}

local forwards = {
  linear = function(base)
    return function(self, x, residual, activation)
      if not ty.is_grad_enabled() then return base.forward(self, x, residual, activation) end
      local y = linear(x, self._partial.part, self.weight:detach(), self.bias)
      return surgery.finish(y, residual, activation)
    end
  end,
  conv = function(base)
    return function(self, x)
      if not ty.is_grad_enabled() then return base.forward(self, x) end
      return conv(x, self._partial.part, self.weight:detach(), self.bias, self)
    end
  end,
}

local M = { wrapper = surgery.wrapper { name = "Partial", field = "_partial",
  forward = function(base, kind) return forwards[kind](base) end,
  describe = function(state) return ("%d inputs trained"):format(state.part.shape[2]) end } }

--- Whether input channels of a layer can be trained apart: of linear layers and of convolutions in one group.
---@param module Module
---@return boolean
function M.fits(module)
  local kind = surgery.kind(module)
  if kind == "conv" then return module.groups == 1 and module.weight.ndim == 4 end
  return kind == "linear" and not module.fan_in_fan_out and module.weight:is_floating_point()
end

--- Wraps such a layer; its first `count` input channels are trained. Returns what the optimizer is to train, a view of
-- the weight, which the layer does not list among its parameters.
---@param module Module
---@param count integer  [1, inputs]
---@return Tensor part  [outputs, count, ...]
function M.attach(module, count)
  local part = ty.keep(module.weight:detach():narrow(1, 0, count):requires_grad_())
  M.wrapper:wrap(module, { part = part })
  return part
end

return M
