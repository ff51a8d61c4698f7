--- Training steps of whole models, for the items that time them and for the processes whose memory is measured. Each
-- but update() and decode() returns a function that does one step and what is known of it: parameters, and the
-- operations of a forward pass. The last argument says where, { device =, dtype = (of autocast) }; left out: on the CPU
-- in f32.
local ty = require "tycho"

local nn, optim = ty.nn, ty.optim
local steps = {}

local cpu = { device = "cpu" }

local function place(model, on, inputs)
  for i, x in ipairs(inputs) do inputs[i] = ty.keep(x:to { device = on.device }) end
  return model:to { device = on.device }
end

local function training(model, opt, loss, on)
  local function value_of() return loss(model) end
  return function()
    local value = ty.autocast(on.dtype or false, value_of)
    opt:step(value)
    return value
  end
end

-- A training loop looks at its loss.
local function looked_at(step)
  return function() return ty.scope(function() return step():item() end) end
end

--- A step of an optimizer alone, for parameters of these shapes; randn(shape) makes their numbers.
function steps.update(class, options, shapes, randn)
  local parameters = {}
  for i, shape in ipairs(shapes) do
    parameters[i] = (randn(shape) * 0.02):requires_grad_()
    parameters[i]:set_grad(randn(shape) * 0.01)
  end
  local opt = optim[class](parameters, options)
  return function() opt:step() end
end

--- Decoding the token that comes after `past` others.
function steps.decode(model, past)
  local cache = model:cache { room = past + 1 }
  ty.no_grad(model.hidden, model, ty.zeros({ 1, past }, { dtype = "i64" }), { cache = cache })
  local token = ty.zeros({ 1, 1 }, { dtype = "i64" })
  return function()
    ty.no_grad(ty.scope, function()
      cache.past = past
      return model(token, { cache = cache }):argmax(-1):item()
    end)
  end
end

-- The models by names that bench/peer/models.py knows too.
local gpt2 = { ["124M"] = {}, tiny = { vocabulary = 101, context = 32, width = 32, layers = 1, heads = 2 } }
local unet = {
  ["6M"] = { 64, { channels = 128, attention = true }, 128 },
  ["36M"] = { 128, { channels = 256, attention = true }, 256, 256 },
  tiny = { 8, { channels = 16, attention = true } },
}
-- Width, layers, pixels, width of a head.
local vit = { S = { 384, 12, 224, 64 }, B = { 768, 12, 224, 64 }, tiny = { 32, 1, 32, 16 } }
local resnet = {
  ["18"] = {},
  ["50"] = { block = "bottleneck", blocks = { 3, 4, 6, 3 } },
  tiny = { block = "bottleneck", channels = { 8, 16 }, blocks = { 1, 1 } },
}

-- Operations of one image forward: convolutions, linear layers, attention.
local flops = { ["6M"] = 50.80e9 / 16, ["36M"] = 12.44e9, ["18"] = 3.627e9, ["50"] = 8.178e9, tiny = 1e6 }
steps.flops = flops

--- GPT-2 124M, AdamW: `batch` sequences of `t` tokens.
function steps.gpt2(batch, t, size, on)
  on = on or cpu
  local options = gpt2[size or "124M"]
  local model = require("tycho.llm").GPT2(options)
  local vocabulary, width, layers = options.vocabulary or 50257, options.width or 768, options.layers or 12
  local inputs = { ty.randint(0, vocabulary, { batch, t }), ty.randint(0, vocabulary, { batch, t }) }
  model = place(model, on, inputs)
  local opt = optim.AdamW(model:parameters(), { lr = 1e-4 })
  local weights = layers * 12 * width * width + vocabulary * width -- that every token is multiplied with
  return training(model, opt, function(m) return m:loss(inputs[1], inputs[2]) end, on), {
    parameters = model:count_parameters(),
    forward_flops = 2 * batch * t * weights + layers * 2 * width * t * t * batch, -- the causal half of attention
  }
end

--- The U-Net of DDPM for 32x32 images. size: 6M or 36M parameters, or tiny.
function steps.unet_of(size)
  return require("tycho.diffusion").UNet { in_channels = 3, out_channels = 3, levels = unet[size],
    layers = size == "tiny" and 1 or 2, groups = 8, heads = 4, scale_shift = false }
end

--- A step of it with AdamW. size: 6M by default.
function steps.unet(batch, size, on)
  batch, size, on = batch or 16, size or "6M", on or cpu
  local pixels = size == "tiny" and 8 or 32
  local model = steps.unet_of(size)
  local shape = { batch, 3, pixels, pixels }
  local inputs = { ty.randn(shape), ty.randn(shape), ty.rand(batch) * 1000 }
  model = place(model, on, inputs)
  local opt = optim.AdamW(model:parameters(), { lr = 1e-4 })
  return training(model, opt, function(m) return ty.mse_loss(m(inputs[1], inputs[3]), inputs[2]) end, on), {
    parameters = model:count_parameters(),
    forward_flops = flops[size] * batch,
  }
end

--- A residual network, 224x224, SGD with momentum. size: "18" (the default) or "50".
function steps.resnet(batch, size, on)
  batch, size, on = batch or 8, size or "18", on or cpu
  local pixels = size == "tiny" and 32 or 224
  local model = require("tycho.vision").ResNet(resnet[size])
  local inputs = { ty.randn(batch, 3, pixels, pixels), ty.randint(0, 1000, { batch }) }
  model = place(model, on, inputs)
  local opt = optim.SGD(model:parameters(), { lr = 1e-3, momentum = 0.9 })
  return training(model, opt, function(m) return nn.cross_entropy(m(inputs[1]), inputs[2]) end, on), {
    parameters = model:count_parameters(),
    forward_flops = flops[size] * batch,
  }
end

--- A vision transformer, 224x224 in patches of 16, AdamW. size: "S" (the default) or "B".
function steps.vit(batch, size, on)
  batch, size, on = batch or 8, size or "S", on or cpu
  local width, layers, pixels, head = table.unpack(vit[size])
  local model = require("tycho.models").ViTForImageClassification { image_size = pixels, hidden_size = width,
    num_hidden_layers = layers, num_attention_heads = width // head, intermediate_size = 4 * width,
    num_labels = 1000 }
  local inputs = { ty.randn(batch, 3, pixels, pixels), ty.randint(0, 1000, { batch }) }
  model = place(model, on, inputs)
  local opt = optim.AdamW(model:parameters(), { lr = 1e-4 })
  local patches = (pixels // 16) ^ 2
  local tokens = patches + 1
  return training(model, opt, function(m) return m:loss(inputs[1], inputs[2]) end, on), {
    parameters = model:count_parameters(),
    forward_flops = batch * (2 * layers * (tokens * 12 * width ^ 2 + 2 * tokens ^ 2 * width)
      + 2 * patches * 768 * width),
  }
end

function steps.eager(name, ...) return looked_at((steps[name](...))) end

function steps.compiled(name, ...) return looked_at(ty.compile((steps[name](...)))) end

--- The same step in every way that Tycho has.
function steps.modes(...) return { eager = steps.eager(...), compiled = steps.compiled(...) } end

return steps
