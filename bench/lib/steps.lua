--- Training steps of whole models, for the items that time them and for the processes whose memory is measured. Each
-- returns a function that does one step and what is known of it: parameters, and the operations of a forward pass.
local ty = require "tycho"

local nn, optim = ty.nn, ty.optim
local steps = {}

local function training(model, opt, loss)
  return function()
    local value = loss(model)
    opt:step(value)
    return value
  end
end

-- A training loop looks at its loss.
local function looked_at(step)
  return function() return ty.scope(function() return step():item() end) end
end

--- GPT-2 124M, AdamW: `batch` sequences of `t` tokens.
function steps.gpt2(batch, t)
  local model = require("tycho.llm").GPT2 {}
  local opt = optim.AdamW(model:parameters(), { lr = 1e-4 })
  local tokens, targets = ty.randint(0, 50257, { batch, t }), ty.randint(0, 50257, { batch, t })
  local width, layers, vocabulary = 768, 12, 50257
  local weights = layers * 12 * width * width + vocabulary * width -- that every token is multiplied with
  return training(model, opt, function(m) return m:loss(tokens, targets) end), {
    parameters = model:count_parameters(),
    forward_flops = 2 * batch * t * weights + layers * 2 * width * t * t * batch, -- the causal half of attention
  }
end

--- The U-Net of DDPM for 32x32 images, 6.47M parameters: batch 16, AdamW.
function steps.unet()
  local model = require("tycho.diffusion").UNet { in_channels = 3, out_channels = 3, channels = { 64, 128, 128 },
    layers = 2, attention = { false, true, false }, groups = 8, heads = 4, scale_shift = false }
  local opt = optim.AdamW(model:parameters(), { lr = 1e-4 })
  local x, target, time = ty.randn(16, 3, 32, 32), ty.randn(16, 3, 32, 32), ty.rand(16) * 1000
  return training(model, opt, function(m) return ty.mse_loss(m(x, time), target) end), {
    parameters = model:count_parameters(),
    forward_flops = 50.80e9, -- convolutions, linear layers, attention
  }
end

--- ResNet-18, 224x224, batch 8, SGD with momentum.
function steps.resnet()
  local model = require("tycho.vision").ResNet {}
  local opt = optim.SGD(model:parameters(), { lr = 1e-3, momentum = 0.9 })
  local x, labels = ty.randn(8, 3, 224, 224), ty.randint(0, 1000, { 8 })
  return training(model, opt, function(m) return nn.cross_entropy(m(x), labels) end), {
    parameters = model:count_parameters(),
    forward_flops = 8 * 3.627e9,
  }
end

function steps.eager(name, ...) return looked_at((steps[name](...))) end

function steps.compiled(name, ...) return looked_at(ty.compile((steps[name](...)))) end

--- The same step in every way that Tycho has.
function steps.modes(...) return { eager = steps.eager(...), compiled = steps.compiled(...) } end

return steps
