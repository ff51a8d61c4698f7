--- AdamW on the host, as offloaded training steps it, beside DeepSpeed's: the 124M parameters of GPT-2 in f32, and in
-- bf16 with moments in f32, where a step moves 22 bytes a parameter in place of 28.
local ty = require "tycho"
local shapes = require "bench.lib.gpt2_shapes"
local offload = require "tycho.offload"

local count, options = 0, { lr = 1e-4 }
for _, shape in ipairs(shapes) do count = count + shape[1] * (shape[2] or 1) end

local function item(name, dtype, peer_dtype, bytes)
  return { name = name, work = { update = bytes * count }, bars = { peer = 1, limit = 0.85 },
    peer = { "step", { options = options, shapes = shapes, dtype = peer_dtype } },
    setup = function()
      local parameters = {}
      for i, shape in ipairs(shapes) do
        parameters[i] = (ty.randn(shape) * 0.02):to(dtype):requires_grad_()
        parameters[i]:set_grad((ty.randn(shape) * 0.01):to(dtype))
      end
      local adam = ty.optim.AdamW(parameters, options)
      offload.wide_states(adam)
      return function() adam:step() end
    end }
end

return { item("adamw_124m/f32", "f32", "float32", 28), item("adamw_124m/bf16", "bf16", "bfloat16", 22) }
