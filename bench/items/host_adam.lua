--- AdamW on the host, as offloaded training steps it, beside DeepSpeed's: the 124M parameters of GPT-2 in f32, and in
-- bf16 with moments in f32, where a step moves 22 bytes a parameter in place of 28; and a training step of that model
-- in bf16 whose moments are in a file, beside ZeRO-Infinity's, which has the f32 weights in its file as well.
local ty = require "tycho"
local shapes = require "bench.lib.gpt2_shapes"
local offload = require "tycho.offload"

local count, options = 0, { lr = 1e-4 }
for _, shape in ipairs(shapes) do count = count + shape[1] * (shape[2] or 1) end

local function adam(name, dtype, peer_dtype, bytes)
  return { name = name, work = { update = bytes * count }, bars = { peer = 1, limit = 0.85 },
    peer = { "step", { options = options, shapes = shapes, dtype = peer_dtype } },
    setup = function()
      local parameters = {}
      for i, shape in ipairs(shapes) do
        parameters[i] = (ty.randn(shape) * 0.02):to(dtype):requires_grad_()
        parameters[i]:set_grad((ty.randn(shape) * 0.01):to(dtype))
      end
      local optimizer = ty.optim.AdamW(parameters, options)
      offload.wide_states(optimizer)
      return function() optimizer:step() end
    end }
end

local function from_disk(batch, t)
  return { name = ("gpt2_124m, moments on disk/B%d-T%d"):format(batch, t), target = 1, rounds = 5, bars = { peer = 1 },
    peer = { "infinity", { batch = batch, t = t } },
    setup = function()
      local model = require("tycho.llm").GPT2 {}
      local inputs = { ty.randint(0, 50257, { batch, t }), ty.randint(0, 50257, { batch, t }) }
      local engine = offload.engine(model, ty.optim.AdamW(model, options), { moments = "file",
        policy = offload.fuyou { activations = "swap" } })
      local function loss() return ty.autocast("bf16", model.loss, model, inputs[1], inputs[2]) end
      return function() return ty.scope(engine.step, engine, loss) end
    end }
end

return { adam("adamw_124m/f32", "f32", "float32", 28), adam("adamw_124m/bf16", "bf16", "bfloat16", 22),
  from_disk(1, 256) }
