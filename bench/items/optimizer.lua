--- One optimizer step over the 124M parameters of GPT-2, in its tensors' shapes. The limit is the least traffic at the
-- bandwidth of an update in place.
local ty = require "tycho"
local shapes = require "bench.lib.gpt2_shapes"

local count = 0
for _, shape in ipairs(shapes) do count = count + shape[1] * (shape[2] or 1) end

local function item(name, class, options, passes, bar, limit)
  return { name = name, work = { update = 4 * passes * count }, bars = { peer = bar, limit = limit },
    peer = { "step", { optimizer = class, options = options, shapes = shapes } }, setup = function()
      local parameters = {}
      for i, shape in ipairs(shapes) do
        parameters[i] = (ty.randn(shape) * 0.02):requires_grad_()
        parameters[i]:set_grad(ty.randn(shape) * 0.01)
      end
      local opt = ty.optim[class](parameters, options)
      return function() opt:step() end
    end }
end

return {
  item("adamw_124m", "AdamW", { lr = 1e-4 }, 7, 2, 0.85),
  item("sgd_momentum_124m", "SGD", { lr = 1e-4, momentum = 0.9 }, 5, 1, nil),
  item("sgd_124m", "SGD", { lr = 1e-4 }, 3, 1, nil),
}
