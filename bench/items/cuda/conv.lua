--- conv2d on a GPU, forward and forward with backward, over the layers of ResNet-50 and of the U-Net of DDPM.
local ty = require "tycho"
local calls = require "bench.lib.calls"

-- name, batch, in, size, out, kernel, stride, padding
local layers = {
  { "resnet/256x56-128-1x1", 64, 256, 56, 128, 1, 1, 0 },
  { "resnet/128x28", 64, 128, 28, 128, 3, 1, 1 },
  { "resnet/256x14", 64, 256, 14, 256, 3, 1, 1 },
  { "resnet/512x7", 64, 512, 7, 512, 3, 1, 1 },
  { "resnet/256x28-256-s2", 64, 256, 28, 256, 3, 2, 1 },
  { "resnet/1024x14-2048-1x1-s2", 64, 1024, 14, 2048, 1, 2, 0 },
  { "resnet/stem", 64, 3, 224, 64, 7, 2, 3 },
  { "unet/128x32", 128, 128, 32, 128, 3, 1, 1 },
  { "unet/384x32-128", 128, 384, 32, 128, 3, 1, 1 },
  { "unet/256x16", 128, 256, 16, 256, 3, 1, 1 },
  { "unet/512x8-256", 128, 512, 8, 256, 3, 1, 1 },
  { "unet/256x16-s2", 128, 256, 16, 256, 3, 2, 1 },
}
local in_f32 = { ["resnet/128x28"] = true, ["resnet/256x56-128-1x1"] = true, ["unet/128x32"] = true }

return function(on)
  local items = {}
  local function add(dtype, layer)
    local name, n, c, size, out, kernel, stride, padding = table.unpack(layer)
    if on.tiny then n, c, size, out = 2, math.min(c, 8), 8, 8 end
    local rows = (size + 2 * padding - kernel) // stride + 1
    local flops = 2 * n * out * rows * rows * c * kernel * kernel
    local image = c == 3
    local function tensors()
      return on.randn({ n, c, size, size }, dtype), on.randn({ out, c, kernel, kernel }, dtype)
    end
    local arguments = { n = n, c = c, size = size, out = out, kernel = kernel, stride = stride, padding = padding,
      groups = 1, dtype = dtype }
    items[#items + 1] = { name = ("%s/%s/fwd"):format(dtype, name), work = { [dtype] = flops },
      peer = { "forward", arguments }, bars = {}, setup = function()
        local x, w = tensors()
        return function() ty.conv2d(x, w, nil, stride, padding):free() end
      end }
    items[#items + 1] = { name = ("%s/%s/fwd+bwd"):format(dtype, name),
      work = { [dtype] = flops * (image and 2 or 3) }, peer = { "both", arguments }, bars = {}, setup = function()
        local x, w = tensors()
        return calls.both(image and { w } or { x, w }, on.randn({ n, out, rows, rows }, dtype), function()
          return ty.conv2d(x, w, nil, stride, padding)
        end)
      end }
  end
  for _, layer in ipairs(layers) do add("bf16", layer) end
  for _, layer in ipairs(layers) do
    if in_f32[layer[1]] then add("f32", layer) end
  end
  return items
end
