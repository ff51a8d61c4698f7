--- One optimizer step over the 124M parameters of GPT-2 on a GPU, in their shapes. The limit is the least traffic at
-- the bandwidth of a copy.
local full = require "bench.lib.gpt2_shapes"
local steps = require "bench.lib.steps"

return function(on)
  local shapes = on.size(full, { { 70, 64 }, { 64 }, { 48, 96 } })
  local count = 0
  for _, shape in ipairs(shapes) do count = count + shape[1] * (shape[2] or 1) end

  -- bytes: read and written for each parameter. The peer has no step of 8 bits.
  local function item(name, class, options, bytes)
    local peer = options.bits == nil and { "step", { optimizer = class, options = options, shapes = shapes } } or nil
    return { name = name, work = { copy = bytes * count }, bars = { limit = 0.85 }, peer = peer,
      setup = function() return steps.update(class, options, shapes, on.randn) end }
  end

  return {
    item("adamw_124m", "AdamW", { lr = 1e-4 }, 28),
    item("adamw_8bit_124m", "AdamW", { lr = 1e-4, bits = 8 }, 16 + 16 / 256),
    item("sgd_momentum_124m", "SGD", { lr = 1e-4, momentum = 0.9 }, 20),
  }
end
