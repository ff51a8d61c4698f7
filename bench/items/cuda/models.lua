--- Training steps of whole models in bf16 on a GPU. The limit is their operations at the rate of a large product and
-- the optimizer's traffic at the bandwidth of a copy; the other tensors' traffic is not in it.
local steps = require "bench.lib.steps"

return function(on)
  local where = { device = on.device, dtype = "bf16" }

  local function item(name, group, peer, flops, bytes, setup)
    peer.dtype = "bf16"
    return { name = name, target = 0.4, rounds = 4, work = { bf16 = flops, copy = bytes }, bars = { peer = 1.05 },
      peer = { "step", peer, group = group }, setup = setup }
  end

  local batch, t, layers, width, vocabulary = 8, 1024, 12, 768, 50257
  if on.tiny then batch, t, layers, width, vocabulary = 2, 16, 1, 32, 101 end
  local weights = layers * 12 * width * width + vocabulary * width
  local forward = 2 * batch * t * weights + layers * 2 * width * t * t * batch
  local gpt2, unet, resnet = on.size("124M", "tiny"), on.size("36M", "tiny"), on.size("50", "tiny")
  local images = on.size(128, 2)
  return {
    item(("gpt2-124M/B%d-T%d"):format(batch, t), "gpt2", { batch = batch, t = t, size = gpt2 }, 3 * forward,
      28 * on.size(124439808, 18000), function() return steps.modes("gpt2", batch, t, gpt2, where) end),
    item(("unet-36M/B%d"):format(images), "unet", { batch = images, size = unet }, 3 * images * steps.flops[unet],
      28 * on.size(35.7e6, 50000), function() return steps.modes("unet", images, unet, where) end),
    item(("resnet-50/B%d"):format(images), "resnet", { batch = images, size = resnet },
      3 * images * steps.flops[resnet], 20 * on.size(25557032, 50000),
      function() return steps.modes("resnet", images, resnet, where) end),
  }
end
