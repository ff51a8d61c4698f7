--- One optimizer step over the 124M parameters of GPT-2, in its tensors' shapes. The limit is the least traffic at the
-- bandwidth of an update in place.
local ty = require "tycho"
local shapes = require "bench.lib.gpt2_shapes"
local steps = require "bench.lib.steps"

local count = 0
for _, shape in ipairs(shapes) do count = count + shape[1] * (shape[2] or 1) end

local function item(name, class, options, passes, bar, limit)
  return { name = name, work = { update = 4 * passes * count }, bars = { peer = bar, limit = limit },
    peer = { "step", { optimizer = class, options = options, shapes = shapes } },
    setup = function() return steps.update(class, options, shapes, ty.randn) end }
end

return {
  item("adamw_124m", "AdamW", { lr = 1e-4 }, 7, 2, 0.85),
  item("sgd_momentum_124m", "SGD", { lr = 1e-4, momentum = 0.9 }, 5, 1, nil),
  item("sgd_124m", "SGD", { lr = 1e-4 }, 3, 1, nil),
}
